"""The HTTP interface as clients use it, over a scripted engine."""

import json

import pytest
from chat_tokenizer import tokenizer
from http_server import MODEL, ask, chat, serve, served_model
from scripted_engine import ScriptedEngine

CITY = 'Köln "am" Rhein'
CALL = (
  f'<tool_call>weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value>'
  '<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>'
)
TOOLS = [
  {
    'type': 'function',
    'function': {
      'name': 'weather',
      'parameters': {
        'type': 'object',
        'properties': {
          'city': {'type': 'string'},
          'days': {'type': 'integer', 'minimum': 1, 'maximum': 9},
        },
        'required': ['city', 'days'],
      },
    },
  }
]
HI = [{'role': 'user', 'content': 'Hi'}]
SCHEMA = {
  'type': 'object',
  'properties': {'ok': {'type': 'boolean'}, 'n': {'type': 'integer'}},
  'required': ['ok', 'n'],
  'additionalProperties': False,
}


@pytest.fixture
def say(engine):
  """Sets what the engine says, and how many ids a step."""

  def set_answer(answer, step_tokens=1):
    engine.answer, engine.step_tokens = answer, step_tokens
    engine.delay, engine.limit = 0.0, 1000

  set_answer('Hello')
  return set_answer


def joined(chunks):
  """Message of a stream of the openai client, put together."""
  message = {'reasoning': '', 'content': '', 'calls': [], 'end': None}
  for chunk in chunks:
    for choice in chunk.choices:
      delta = choice.delta
      reasoning = getattr(delta, 'reasoning_content', None)
      message['reasoning'] += reasoning or ''
      message['content'] += delta.content or ''
      for call in delta.tool_calls or ():
        if call.id:
          assert call.index == len(message['calls'])
          message['calls'].append([call.function.name, ''])
        message['calls'][call.index][1] += call.function.arguments
      message['end'] = choice.finish_reason or message['end']
  return message


def whole(answer):
  """The same of a complete answer."""
  choice = answer.choices[0]
  return {
    'reasoning': choice.message.reasoning_content or '',
    'content': choice.message.content or '',
    'calls': [
      [call.function.name, call.function.arguments]
      for call in choice.message.tool_calls or ()
    ],
    'end': choice.finish_reason,
  }


def test_chat(client, say):
  say('hm</think>Hello 中')
  answer = client.chat.completions.create(model=MODEL, messages=HI)
  assert answer.object == 'chat.completion'
  message = answer.choices[0].message
  assert (message.reasoning_content, message.content) == ('hm', 'Hello 中')
  assert answer.choices[0].finish_reason == 'stop'
  ids = tokenizer().encode('hm</think>Hello 中')
  prompt = tokenizer().apply_chat_template(HI)
  usage = answer.usage
  assert usage.completion_tokens == len(ids) + 1  # The end token counts.
  assert usage.prompt_tokens == len(tokenizer().encode(prompt))
  assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
  details = usage.completion_tokens_details
  assert details.reasoning_tokens == len(tokenizer().encode('hm</think>'))
  assert details.accepted_prediction_tokens == usage.completion_tokens


@pytest.mark.parametrize('step', [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
  'text',
  ['hm</think>中国 🚀!', f'hm {CALL}', f'x</think>a{CALL}\n{CALL}', 'never'],
)
def test_streams_equal_complete_answers(client, say, text, step):
  say(text, step)
  ask_ = lambda **more: client.chat.completions.create(
    model=MODEL, messages=HI, tools=TOOLS, **more
  )
  stream = joined(ask_(stream=True))
  assert stream == whole(ask_())
  assert stream['end'] == ('tool_calls' if CALL in text else 'stop')
  for name, arguments in stream['calls']:
    assert name == 'weather'
    assert json.loads(arguments) == {'city': CITY, 'days': 3}


@pytest.mark.parametrize('step', range(1, 9))
def test_stop_strings_end_text_and_engine(server, say, engine, step):
  say('Hello STOP there ' * 20, step)
  until = len(tokenizer().encode('Hello STOP'))
  options = dict(stop=['STOP', 'zz'], return_token_ids=True, thinking=OFF)
  got = chat(server, **options).json
  choice = got['choices'][0]
  assert choice['message']['content'] == 'Hello '
  assert (choice['finish_reason'], choice['stop_reason']) == ('stop', 'STOP')
  assert got['usage']['completion_tokens'] == until
  assert len(choice['token_ids']) == until
  assert engine.ended[engine.seen[-1].request_id] == 'abort'
  events = chat(server, stream=True, **options).events
  deltas = [c for event in events for c in event['choices']]
  assert ''.join(c['delta'].get('content', '') for c in deltas) == 'Hello '
  assert (
    sum((c.get('token_ids', []) for c in deltas), []) == choice['token_ids']
  )
  kept = chat(server, **options, include_stop_str_in_output=True).json
  assert kept['choices'][0]['message']['content'] == 'Hello STOP'


OFF = {'type': 'disabled'}


def test_a_stream_with_usage_and_done(client, server, say):
  say('Hello')
  options = {'include_usage': True}
  events = chat(server, stream=True, stream_options=options).events
  assert all(event['usage'] is None for event in events[:-1])
  assert events[-1]['choices'] == []
  complete = chat(server).json['usage']
  assert events[-1]['usage'] == {
    **complete,
    'prompt_tokens_details': events[-1]['usage']['prompt_tokens_details'],
  }
  assert len({event['id'] for event in events}) == 1
  assert events[0]['choices'][0]['delta'] == {
    'role': 'assistant',
    'content': '',
  }
  options['continuous_usage_stats'] = True
  events = chat(server, stream=True, stream_options=options).events
  counts = [event['usage']['completion_tokens'] for event in events]
  assert counts == sorted(counts) and counts[0] == 0


def test_logprobs(client, say):
  say('a中')
  answer = client.chat.completions.create(
    model=MODEL, messages=HI, logprobs=True, top_logprobs=3
  )
  content = answer.choices[0].logprobs.content
  ids = [*tokenizer().encode('a中'), tokenizer().stop_ids[0]]
  assert len(content) == len(ids) == answer.usage.completion_tokens
  assert content[0].token == 'a' and content[0].bytes == [97]
  assert content[1].bytes is None  # A part of a character.
  assert [len(entry.top_logprobs) for entry in content] == [3] * len(ids)
  assert content[0].top_logprobs[1].logprob == -1.5
  stream = client.chat.completions.create(
    model=MODEL, messages=HI, logprobs=True, top_logprobs=3, stream=True
  )
  streamed = [
    entry
    for chunk in stream
    for choice in chunk.choices
    if choice.logprobs
    for entry in choice.logprobs.content
  ]
  assert streamed == content


def test_tools_forced_by_the_client(client, say):
  say('ignored: the grammar decides')
  for choice in ('required', {'type': 'function', 'function': NAME}):
    answer = client.chat.completions.create(
      model=MODEL, messages=HI, tools=TOOLS, tool_choice=choice, seed=3
    )
    got = whole(answer)
    (name, arguments), *_ = got['calls']
    assert name == 'weather' and not got['content']
    assert 1 <= json.loads(arguments)['days'] <= 9
    # OpenAI: a call that the client named ends with 'stop'.
    assert got['end'] == ('tool_calls' if choice == 'required' else 'stop')


NAME = {'name': 'weather'}


def test_tool_choice_none_leaves_calls_as_text(client, say):
  say(f'</think>{CALL}')
  answer = client.chat.completions.create(
    model=MODEL, messages=HI, tools=TOOLS, tool_choice='none'
  )
  assert whole(answer)['content'] == CALL
  answer = client.chat.completions.create(model=MODEL, messages=HI)
  assert whole(answer)['content'] == CALL


@pytest.mark.parametrize('thinking', [True, False])
def test_json(client, say, engine, thinking):
  say('ignored')
  extra = {'chat_template_kwargs': {'enable_thinking': thinking}}
  schema = {'type': 'json_schema', 'json_schema': {'name': 'n'}}
  schema['json_schema']['schema'] = SCHEMA
  for form in ({'type': 'json_object'}, schema):
    answer = client.chat.completions.create(
      model=MODEL,
      messages=HI,
      response_format=form,
      extra_body=extra,
      seed=5,
    )
    got = json.loads(answer.choices[0].message.content)
    assert isinstance(got, dict)
    if form is schema:
      assert isinstance(got['ok'], bool) and isinstance(got['n'], int)
    prompt = tokenizer().decode(
      engine.seen[-1].prompt_ids, skip_special_tokens=False
    )
    assert prompt.endswith('<think>') == thinking


def test_completions(client, say):
  say('Hello 中')
  create = lambda **more: client.completions.create(model=MODEL, **more)
  answer = create(prompt='abc', max_tokens=50)
  assert answer.choices[0].text == 'Hello 中'
  assert answer.choices[0].finish_reason == 'stop'
  assert create(prompt='abc').choices[0].finish_reason == 'stop'
  assert create(prompt='abc', max_tokens=2).choices[0].text == 'He'
  assert create(prompt='abc', echo=True).choices[0].text == 'abcHello 中'
  ids = tokenizer().encode('abc')
  assert create(prompt=ids, echo=True).choices[0].text == 'abcHello 中'
  many = create(prompt=['abc', 'the'], n=2, echo=True)
  texts = [choice.text for choice in many.choices]
  assert texts == ['abcHello 中'] * 2 + ['theHello 中'] * 2
  assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
  assert many.usage.prompt_tokens == 3 + 1
  logprobs = create(prompt='abc', logprobs=2).choices[0].logprobs
  assert logprobs.tokens[:2] == ['H', 'e']
  assert logprobs.text_offset[:2] == [0, 1]
  assert len(logprobs.top_logprobs[0]) == 2
  chunks = list(create(prompt='abc', stream=True, echo=True))
  assert ''.join(c.choices[0].text for c in chunks) == 'abcHello 中'
  assert chunks[-1].choices[0].finish_reason == 'stop'


def test_several_choices_with_seeds(client, engine, say):
  say('Hello')
  answer = client.chat.completions.create(
    model=MODEL, messages=HI, n=3, seed=7, temperature=0.5, top_p=0.9
  )
  assert [choice.index for choice in answer.choices] == [0, 1, 2]
  sampling = [request.sampling for request in engine.seen[-3:]]
  assert sorted(s.seed for s in sampling) == [7, 8, 9]
  assert {(s.temperature, s.top_p) for s in sampling} == {(0.5, 0.9)}
  stream = client.chat.completions.create(
    model=MODEL, messages=HI, n=2, stream=True
  )
  texts = {0: '', 1: ''}
  for chunk in stream:
    for choice in chunk.choices:
      delta = choice.delta
      texts[choice.index] += delta.content or ''
      texts[choice.index] += getattr(delta, 'reasoning_content', None) or ''
  assert texts == {0: 'Hello', 1: 'Hello'}


def test_defaults_come_from_the_checkpoint():
  engine = ScriptedEngine()
  model = served_model(sampling={'temperature': 0.25, 'top_p': 0.75})
  with serve(engine, model) as server:
    chat(server)
    chat(server, temperature=0)
  first, second = (request.sampling for request in engine.seen)
  assert (first.temperature, first.top_p) == (0.25, 0.75)
  assert (second.temperature, second.top_p) == (0, 0.75)
  assert first.max_new_tokens is None


def test_models_and_text(client, server):
  assert [model.id for model in client.models.list()] == [MODEL]
  card = client.models.retrieve(MODEL)
  assert card.max_model_len == 4096
  got = ask(
    server, '/tokenize', {'prompt': 'the 中', 'return_token_strs': True}
  )
  ids = tokenizer().encode('the 中')
  assert got.json['tokens'] == ids and got.json['count'] == len(ids)
  assert got.json['token_strs'][0] == 'the'
  back = ask(server, '/detokenize', {'tokens': ids}).json
  assert back == {'prompt': 'the 中'}
  got = ask(server, '/tokenize', {'messages': HI, 'tools': TOOLS}).json
  text = tokenizer().apply_chat_template(HI, tools=TOOLS)
  assert got['tokens'] == tokenizer().encode(text)


EFFORTS = [None, 'minimal', 'low', 'medium', 'high', 'xhigh', 'max']


@pytest.mark.parametrize('effort', EFFORTS)
@pytest.mark.parametrize('thinking', [None, True, False])
def test_thinking_switches(server, effort, thinking):
  """Known fault 54: only 'high' lowers the effort, and off is off."""
  body = {'messages': HI}
  if effort is not None:
    body['reasoning_effort'] = effort
  if thinking is not None:
    body['chat_template_kwargs'] = {'enable_thinking': thinking}
  ids = ask(server, '/tokenize', body).json['tokens']
  text = tokenizer().decode(ids, skip_special_tokens=False)
  if thinking is False:
    assert 'Reasoning Effort' not in text
    assert text.endswith('<|assistant|><think></think>')
  else:
    word = 'High' if effort == 'high' else 'Max'
    assert text.startswith(f'[gMASK]<sop><|system|>Reasoning Effort: {word}<|')
    assert text.endswith('<|assistant|><think>')


def test_other_ways_to_switch_thinking_off(server):
  """Known fault 54: a switch works or is refused, never ignored."""
  for body in ({'thinking': OFF}, {'reasoning_effort': 'none'}):
    ids = ask(server, '/tokenize', {'messages': HI, **body}).json['tokens']
    text = tokenizer().decode(ids, skip_special_tokens=False)
    assert text.endswith('<think></think>'), body
  for body in (
    {'chat_template_kwargs': {'thinking': False}},
    {'chat_template_kwargs': {'enable_thinking': 'false'}},
    {'thinking': False},
    {'enable_thinking': False},
    {'reasoning_effort': 'lowest'},
  ):
    got = ask(server, '/v1/chat/completions', {'messages': HI, **body})
    assert got.status == 400, body
    assert 'thinking' in got.json['error']['message'] or 'effort' in str(
      got.json
    )


def test_tools_stay_cached_when_the_system_tail_changes(server, say):
  """Known fault 56: the tools stand before what changes."""
  say('</think>ok')
  tools = [
    {
      'type': 'function',
      'function': {'name': f'tool_{i}', 'description': 'x' * 40},
    }
    for i in range(8)
  ]
  turn = lambda system: [{'role': 'system', 'content': system}, *HI]
  block = ask(server, '/tokenize', {'messages': turn(''), 'tools': tools})
  block = block.json['count'] - len(tokenizer().encode('Hi')) - 4
  chat(server, turn('request 1 of day 1'), tools=tools)
  usage = chat(server, turn('request 2 of day 7'), tools=tools).json['usage']
  cached = usage['prompt_tokens_details']['cached_tokens']
  assert cached >= block // 64 * 64 > 500


def test_a_conversation_keeps_its_prefix(server, say):
  """What the client sends back are the ids that the model wrote."""
  say(f'hm\n</think>\n\nYes. {CALL}')
  got = chat(server, HI, tools=TOOLS, return_token_ids=True).json
  message = got['choices'][0]['message']
  wrote = got['prompt_token_ids'] + got['choices'][0]['token_ids'][:-1]
  follow = [*HI, message, {'role': 'tool', 'content': '12 C'}]
  ids = ask(server, '/tokenize', {'messages': follow, 'tools': TOOLS}).json
  assert ids['tokens'][: len(wrote)] == wrote


def test_a_model_without_a_tokenizer_takes_ids():
  engine = ScriptedEngine([5, 6, 7])
  with serve(engine, served_model(tokenizer=None)) as server:
    body = {'prompt': [1, 2], 'return_token_ids': True, 'logprobs': 1}
    choice = ask(server, '/v1/completions', body).json['choices'][0]
    assert (choice['text'], choice['token_ids']) == ('', [5, 6, 7])
    assert choice['logprobs']['tokens'][0] == 'token_id:5'
    assert choice['prompt_token_ids'] == [1, 2]
    # Tokens without text are streamed as they come, the prompt but once.
    body = {'prompt': [1, 2], 'return_token_ids': True, 'stream': True}
    events = ask(server, '/v1/completions', body).events
    shown = [event['choices'][0] for event in events if event['choices']]
    assert [c['token_ids'] for c in shown] == [[], [5], [6], [7]]
    assert [c.get('prompt_token_ids') for c in shown] == [[1, 2]] + [None] * 3
    for path, body in (
      ('/v1/completions', {'prompt': 'a'}),
      ('/v1/chat/completions', {'messages': HI}),
      ('/v1/completions', {'prompt': [1], 'stop': 'a'}),
      ('/tokenize', {'prompt': 'a'}),
    ):
      got = ask(server, path, body)
      assert got.status == 400 and 'tokenizer' in got.json['error']['message']
