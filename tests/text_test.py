"""Tokenizer, chat template, stop strings and streaming text."""

import contextlib
import json
import os

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from glm_jax import text

SPECIAL = (
  '<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|>'.split()
)
MARKUP = '<think> </think> <tool_call> </tool_call>'.split()
START = '[gMASK]<sop>'
MAX, HIGH = (f'{START}<|system|>Reasoning Effort: {e}' for e in ('Max', 'High'))
USER = {'role': 'user', 'content': 'Hi'}
SIGNATURE = {'name': 'weather', 'description': 'für <Köln> & 北京', 'at': {}}
WEATHER = {'type': 'function', 'function': SIGNATURE}
UNICODE = 'naïve 北京 – 👩‍🚀🚀 e\u0301 \u202eabc \U0010ffff end'


def make_backend():
  """Byte-level BPE, like GLM's; one token ends a 中 and begins the next."""
  merges = [('t', 'h'), ('th', 'e'), ('Ń', 'ä')]
  tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map(''.join, merges)]
  vocab = {token: i for i, token in enumerate(tokens)}
  backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(SPECIAL)
  backend.add_tokens(MARKUP)
  return backend


@pytest.fixture(scope='module')
def tokenizer():
  return text.Tokenizer(make_backend())


@pytest.fixture
def directory(tmp_path):
  make_backend().save(str(tmp_path / 'tokenizer.json'))
  return tmp_path


def assistant(content, **more):
  return {'role': 'assistant', 'content': content, **more}


@contextlib.contextmanager
def raises(words):
  """Expects a ValueError of one line that holds each of `words`."""
  with pytest.raises(ValueError) as caught:
    yield
  message = str(caught.value)
  assert [w for w in words.split('|') if w not in message] == [], message
  assert '\n' not in message


def test_encode_and_decode(tokenizer):
  ids = tokenizer.encode(f'<|user|>{UNICODE}<think>')
  special = [make_backend().token_to_id(t) for t in ('<|user|>', '<think>')]
  assert [ids[0], ids[-1]] == special and tokenizer.encode('') == []
  assert tokenizer.decode(ids) == f'{UNICODE}<think>'
  assert tokenizer.decode(np.asarray(ids, np.int32)) == f'{UNICODE}<think>'
  whole = tokenizer.decode(ids, skip_special_tokens=False)
  assert whole == f'<|user|>{UNICODE}<think>'
  # The vocabulary of a model may be padded: its last ids have no text.
  assert tokenizer.vocab_size == make_backend().get_vocab_size()
  assert tokenizer.decode([*ids, tokenizer.vocab_size]).endswith('end<think>')


@pytest.mark.parametrize('ids', [[-1], [2**32], [0.5], [[1, 2]], ['1'], [True]])
def test_bad_ids_and_text_are_refused(tokenizer, ids):
  with raises('must be a list of ints'):
    tokenizer.decode(ids)
  with raises('cannot encode'):
    tokenizer.encode('\ud83d')


def test_prompts_are_never_cut_or_padded_or_begun(tokenizer):
  backend = make_backend()
  start = [('<sop>', backend.token_to_id('<sop>'))]
  backend.post_processor = processors.TemplateProcessing(
    '<sop> $A', None, start
  )
  backend.enable_truncation(max_length=3)
  backend.enable_padding(length=500)
  ids = text.Tokenizer(backend).encode(UNICODE)
  assert ids == tokenizer.encode(UNICODE) and 3 < len(ids) < 500


def test_load_without_tokenizer_or_with_an_unknown_class(directory):
  """Known fault 56: older libraries do not know the class of a tokenizer."""
  config = {'tokenizer_class': 'ClassOfTheFuture'}
  (directory / 'tokenizer_config.json').write_text(json.dumps(config))
  assert len(text.Tokenizer.load(directory).encode('<sop>')) == 1
  (directory / 'tokenizer.json').unlink()
  assert text.Tokenizer.load(directory) is None


@pytest.mark.parametrize(
  'config, generation, want',
  [
    (154820, None, (154820,)),
    ([154820, 154827, 154829], None, (154820, 154827, 154829)),
    (154820, [154829, 154827], (154820, 154827, 154829)),
    (None, 154827, (154827,)),
    (None, None, ()),
  ],
)
def test_every_eos_id_stops(directory, config, generation, want):
  for name, value in ('config', config), ('generation_config', generation):
    content = json.dumps({'eos_token_id': value})
    (directory / f'{name}.json').write_text(content)
  assert text.read_eos_token_ids(directory) == want
  assert text.Tokenizer.load(directory).stop_ids == want
  more = text.Tokenizer.load(directory, eos_token_ids=[9, 3, 154827])
  assert more.stop_ids == tuple(sorted({3, 9, 154827, *want}))


def test_template_sources_in_order(directory):
  def rendered():
    return text.Tokenizer.load(directory).apply_chat_template([USER])

  config = directory / 'tokenizer_config.json'
  assert rendered().startswith(START)
  config.write_text(json.dumps({'chat_template': 'from a string'}))
  assert rendered() == 'from a string'
  named = {'tool_use': 'for tools', 'default': 'from a list'}
  named = [{'name': k, 'template': v} for k, v in named.items()]
  config.write_text(json.dumps({'chat_template': named}))
  assert rendered() == 'from a list'
  (directory / 'chat_template.jinja').write_bytes('Datei: ü'.encode())
  assert rendered() == 'Datei: ü'


@pytest.mark.parametrize(
  'name, content, words',
  [
    ('tokenizer.json', '{"version": 1', 'tokenizer.json is broken'),
    ('chat_template.jinja', 'a\n{{ b', 'chat_template.jinja|line 2'),
    ('tokenizer_config.json', '{"chat_template": 5}', 'config.json is 5'),
    ('tokenizer_config.json', '{"chat_template": [{"name": "rag"}]}', 'rag'),
    ('tokenizer_config.json', '{', 'tokenizer_config.json is not JSON'),
    ('config.json', '{"eos_token_id": "</s>"}', 'eos_token_id|/config.json'),
    ('config.json', '{"eos_token_id": true}', 'eos_token_id|True'),
    ('generation_config.json', '{"eos_token_id": [-1]}', 'generation_config'),
  ],
)
def test_broken_files_are_named_at_load(directory, name, content, words):
  (directory / name).write_text(content)
  with raises(words):
    text.Tokenizer.load(directory)


@pytest.mark.parametrize(
  'template, words',
  [
    ("{{ ''.__class__.__mro__ }}", '__class__|unsafe'),
    ('{{ messages.append(1) }}', 'append|unsafe'),
    ('{{ raise_exception("only two turns") }}', 'only two turns'),
    ('{{ 1 + "a" }}', 'operand'),
    ("{% include '/etc/hostname' %}", 'no loader'),
  ],
)
def test_failing_templates_are_value_errors(template, words):
  tokenizer = text.Tokenizer(make_backend(), template)
  with raises(f'chat template given|{words}'):
    tokenizer.apply_chat_template([USER])


def test_helpers_and_variables_of_published_templates():
  template = (
    '{% for m in messages %}{{ m | tojson(ensure_ascii=False) }}{% break %}'
    '{% endfor %}{{ [1] | tojson(indent=1) }}{{ extra }}'
    '{{ reasoning_effort is defined }}{{ clear_thinking is defined }}'
  )
  render = text.Tokenizer(make_backend(), template).apply_chat_template
  messages = [{'role': 'user', 'content': 'ü<'}] * 2
  # Neither escaped nor sorted; what was not chosen stays undefined.
  want = '{"role": "user", "content": "ü<"}[\n 1\n]'
  assert render(messages, extra='x') == want + 'xFalseFalse'
  chosen = render(messages, reasoning_effort='low', clear_thinking=False)
  assert chosen == want + 'TrueTrue'


@pytest.mark.parametrize(
  'effort', [None, 'none', 'low', 'medium', 'high', 'max', 'High', ' high', '']
)
@pytest.mark.parametrize('thinking', [True, False])
def test_known_fault_54_thinking_switches(tokenizer, effort, thinking):
  # `thinking` is not the switch, whatever other models call it.
  rendered = tokenizer.apply_chat_template(
    [USER], enable_thinking=thinking, reasoning_effort=effort, thinking=False
  )
  line = HIGH if effort == 'high' else MAX
  on = f'{line}<|user|>Hi<|assistant|><think>'
  off = f'{START}<|user|>Hi<|assistant|><think></think>'
  assert rendered == (on if thinking else off)


def test_turns_tools_and_calls(tokenizer):
  arguments = {'zone': 'Köln', 'at': [1, None], 'items': 'x', 'deep': {'a': 1}}
  plain = {'name': 'weather', 'arguments': arguments}
  wrapped = {'name': 'weather', 'arguments': json.dumps(arguments)}
  wrapped = {'id': '1', 'type': 'function', 'function': wrapped}
  messages = [
    {'role': 'developer', 'content': ' Be brief. '},
    {'role': 'user', 'content': [{'type': 'text', 'text': t} for t in 'ab']},
    assistant(None, reasoning='r', tool_calls=[wrapped, plain]),
    {'role': 'tool', 'tool_call_id': '1', 'content': '21°'},
    {'role': 'observation', 'content': [{'type': 'text', 'text': '22°'}]},
    assistant('c', reasoning_content='s'),
    {'role': 'user', 'content': '<b>&\n'},
  ]
  before = json.dumps(messages)
  rendered = tokenizer.apply_chat_template(
    messages, tools=[WEATHER, SIGNATURE], add_generation_prompt=False
  )
  assert json.dumps(messages) == before  # The caller's list is untouched.
  tools, turns = rendered.split('<|system|> ')
  assert tools.startswith(f'{MAX}<|system|>\n# Tools\n')
  listed = tools.split('<tools>\n')[1].split('</tools>')[0]
  assert listed == (json.dumps(SIGNATURE, ensure_ascii=False) + '\n') * 2
  weather = (
    '<tool_call>weather<arg_key>zone</arg_key><arg_value>Köln</arg_value>'
    '<arg_key>at</arg_key><arg_value>[1, null]</arg_value>'
    '<arg_key>items</arg_key><arg_value>x</arg_value>'
    '<arg_key>deep</arg_key><arg_value>{"a": 1}</arg_value></tool_call>'
  )
  assert turns == (
    f'Be brief. <|user|>ab<|assistant|><think>r</think>{weather}{weather}'
    '<|observation|><tool_response>21°</tool_response>'
    '<tool_response>22°</tool_response>'
    '<|assistant|><think>s</think>c<|user|><b>&\n'
  )


def test_clear_thinking_drops_reasoning_before_the_last_user(tokenizer):
  first, second = (assistant('c', reasoning_content=r) for r in '12')
  messages = [USER, first, USER, second, {'role': 'tool', 'content': 't'}]
  cleared = tokenizer.apply_chat_template(messages, clear_thinking=True)
  kept = tokenizer.apply_chat_template(messages, clear_thinking=False)
  assert kept == tokenizer.apply_chat_template(messages)
  assert '<think>1</think>' in kept
  assert cleared == kept.replace('<think>1</think>', '<think></think>')


@pytest.mark.parametrize('thinking', [True, False])
def test_known_fault_56_prefix_is_stable_over_turns(tokenizer, thinking):
  def render(messages, **kwargs):
    return tokenizer.apply_chat_template(
      messages, tools=[WEATHER], enable_thinking=thinking, **kwargs
    )

  reasoning = ' I think\n' if thinking else ''
  turn = assistant('\nCalling. ', reasoning_content=reasoning)
  output = f'{reasoning}</think>' * thinking + turn['content']
  first = [{'role': 'system', 'content': 'S'}, USER]
  second = [*first, turn, {'role': 'tool', 'content': '21°'}]
  third = [*second, assistant('Done'), USER]
  assert render(second).startswith(render(first, add_generation_prompt=False))
  assert render(third).startswith(render(second, add_generation_prompt=False))
  # What the model was given and what it wrote, character by character; also
  # when the client sends the raw output back as content.
  assert render(second).startswith(render(first) + output)
  assert render([*first, assistant(output), *second[3:]]) == render(second)


def test_known_fault_56_changed_system_tail_keeps_the_tools(tokenizer):
  def render(tail):
    system = {'role': 'system', 'content': f'Same head. {tail}'}
    return tokenizer.apply_chat_template([system, USER], tools=[WEATHER])

  first, second = (tokenizer.encode(render(t)) for t in ('10:00', '11:30'))
  cached = tokenizer.decode(os.path.commonprefix([first, second]))
  assert '</tools>' in cached and cached.endswith('Same head. 1')


@pytest.mark.parametrize(
  'message, words',
  [
    ({'role': 'usr', 'content': 'x'}, "(usr)|role|'user'"),
    ({'role': 'user'}, '(user)|no content|string'),
    (assistant(None), 'no content|tool_calls'),
    ({'role': 'user', 'content': 5}, 'content 5|only text'),
    ({'role': 'user', 'content': [{'type': 'image_url'}]}, 'image_url|text'),
    (assistant('', tool_calls=['f']), "'f'|JSON object"),
    (assistant('', tool_calls=[{'arguments': '{}'}]), "tool call|'name'"),
    (assistant('', tool_calls=[{'name': 'f', 'arguments': '{'}]), "call|'{'"),
    (assistant('', tool_calls=[{'name': 'f', 'arguments': '[1]'}]), '[1]'),
  ],
)
def test_bad_messages_are_named(tokenizer, message, words):
  with raises(f'messages[1]|{words}'):
    tokenizer.apply_chat_template([USER, message])
  for messages in [], 'Hi', USER, None:
    with raises('non-empty list'):
      tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize(
  'generated, stops, whole, partial',
  [
    ('abcabc', ['c', 'bc'], 1, 0),
    ('a北京b', ['京', 'bb'], 2, 1),
    ('abc', 'bc', 1, 0),
    ('abc</', ['</tool_call>'], None, 2),
    ('abc', ['cab', 'bcx'], None, 2),
    ('', ['x'], None, 0),
  ],
)
def test_stop_strings(generated, stops, whole, partial):
  assert text.find_stop(generated, stops) == whole
  assert text.partial_stop(generated, stops) == partial
  later = None if whole is None else whole + 2
  assert text.find_stop('bc' + generated, stops, start=2) == later
  for helper in text.find_stop, text.partial_stop:
    with raises('empty stop string'):
      helper(generated, [*stops, ''])


def stream(tokenizer, ids, chunk=1, skip=True):
  stream = text.TextStream(tokenizer, skip_special_tokens=skip)
  chunks = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
  return [*map(stream.feed, chunks), stream.finish()]


@pytest.mark.parametrize('chunk', [1, 2, 3, 7, 1000])
@pytest.mark.parametrize('skip', [True, False])
def test_pieces_join_to_decode_without_half_characters(tokenizer, chunk, skip):
  ids = tokenizer.encode(f'<|user|>{UNICODE}<think>the weather' * 20)
  pieces = stream(tokenizer, ids, chunk, skip)
  assert ''.join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
  assert '\ufffd' not in ''.join(pieces)


def test_text_comes_as_soon_as_it_is_complete(tokenizer):
  ids = tokenizer.encode('a😀b')
  assert stream(tokenizer, ids) == ['a', '', '', '', '😀', 'b', '']
  assert text.TextStream(tokenizer).feed(ids[0]) == 'a'
  assert stream(tokenizer, ids[:-2]) == ['a', '', '', '', '\ufffd']


@pytest.mark.parametrize('seed', range(8))
def test_random_ids_join_to_decode(tokenizer, seed):
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, tokenizer.vocab_size + 20, 600)
  if seed % 2:  # Mostly pieces of UTF-8 sequences, in the wrong order.
    parts = tokenizer.encode('😀中é')
    ids = np.where(rng.random(600) < 0.9, rng.choice(parts, 600), ids)
  pieces = stream(tokenizer, ids, 1 + seed % 3, skip=seed < 4)
  assert ''.join(pieces) == tokenizer.decode(ids, skip_special_tokens=seed < 4)


@pytest.mark.parametrize(
  'make',
  [
    lambda t: t.encode('the weather ' * 300),
    lambda t: t.encode('中' * 400),
    lambda t: t.encode('中')[:1] * 800,  # Characters that never end,
    lambda t: t.encode('中')[1:2] * 800,  # that never begin,
    lambda t: t.encode('中')[:2] * 400,  # that are cut off.
    lambda t: t.encode('中')[:1] + t.encode('<|user|>' * 800),
    lambda t: t.encode('中')[:1] + [t.vocab_size + 1] * 800,
  ],
)
def test_work_per_id_does_not_grow(make, monkeypatch):
  tokenizer = text.Tokenizer(make_backend())
  ids, decode, sizes = make(tokenizer), tokenizer.decode, []
  want = decode(ids)

  def counting_decode(ids, **kwargs):
    sizes.append(len(ids))
    return decode(ids, **kwargs)

  monkeypatch.setattr(tokenizer, 'decode', counting_decode)
  assert ''.join(stream(tokenizer, ids)) == want
  assert max(sizes) <= 32 and len(sizes) <= 2 * len(ids) + 1


def test_transformers_renders_the_same(tokenizer):
  transformers = pytest.importorskip('transformers')
  source = text.epath.Path(text.__file__).parent / 'chat_template.jinja'
  other = transformers.PreTrainedTokenizerFast(
    tokenizer_object=make_backend(), chat_template=source.read_text()
  )
  call = {'function': {'name': 'f', 'arguments': {'zone': 'ü', 'at': 2}}}
  turn = assistant('c', tool_calls=[call], reasoning_content='r')
  messages = [USER, turn, {'role': 'tool', 'content': '<21°>'}, USER]
  for chosen in {}, {'clear_thinking': True}, {'enable_thinking': False}:
    kwargs = {'tools': [WEATHER], 'add_generation_prompt': True, **chosen}
    want = other.apply_chat_template(messages, tokenize=False, **kwargs)
    assert tokenizer.apply_chat_template(messages, **kwargs) == want
