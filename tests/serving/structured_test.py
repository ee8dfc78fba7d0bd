"""Grammars: what they allow, in any order of questions."""

import json
import random
import sys

import numpy as np
import pytest
from chat_tokenizer import tokenizer

from glm_jax.serving.parsers import ChatParser
from glm_jax.serving.request import InvalidRequest
from glm_jax.serving.structured import StructuredOutput

VOCAB = 300  # More than the tokenizer knows, as models have.
PERSON = {
  'type': 'object',
  'properties': {
    'name': {'type': 'string', 'maxLength': 8},
    'age': {'type': 'integer', 'minimum': 0, 'maximum': 150},
    'tags': {'type': 'array', 'items': {'enum': ['a', 'b']}, 'maxItems': 3},
  },
  'required': ['name', 'age'],
  'additionalProperties': False,
}
WEATHER = {
  'type': 'function',
  'function': {
    'name': 'weather',
    'parameters': {
      'type': 'object',
      'properties': {
        'city': {'type': 'string'},
        'unit': {'type': 'string', 'enum': ['C', 'F']},
        'person': {'$ref': '#/$defs/person'},
        'days': {'type': 'integer', 'minimum': 1, 'maximum': 9},
      },
      'required': ['city', 'days'],
      '$defs': {'person': PERSON},
    },
  },
}
NOW = {'type': 'function', 'function': {'name': 'now'}}


@pytest.fixture(scope='module')
def structured():
  return StructuredOutput(tokenizer(), VOCAB)


def allowed(found, ids):
  """Ids that may follow, as a sorted list."""
  bits = found.allowed(ids)
  assert bits.dtype == np.uint32 and bits.shape == (-(-VOCAB // 32),)
  flat = np.unpackbits(bits.view(np.uint8), bitorder='little')
  return np.flatnonzero(flat).tolist()


def walk(found, pick, limit=400):
  """A random text that the grammar allows, up to its end token."""
  ids = []
  while len(ids) < limit:
    options = allowed(found, ids)
    assert options and max(options) < VOCAB
    ends = [i for i in options if i in tokenizer().stop_ids]
    # Ends soon: long strings say nothing new.
    if ends and (len(ids) > 40 or pick.random() < 0.2):
      return ids
    plain = [i for i in options if i not in tokenizer().stop_ids]
    closing = [i for i in plain if tokenizer().decode([i]) in '"}]<']
    markup = [i for i in plain if tokenizer().decode([i]).startswith('</')]
    likely = markup or closing
    if likely and pick.random() < 0.5:
      plain = likely
    ids.append(pick.choice(plain or ends))
    if ids[-1] in tokenizer().stop_ids:
      return ids[:-1]
  raise AssertionError(tokenizer().decode(ids))


def follows(found, text, thinking=False):
  """Whether a grammar takes all of `text`, and may end there."""
  ids = tokenizer().encode(text)
  for n, token in enumerate(ids):
    if token not in allowed(found, ids[:n]):
      return False
  return bool(set(allowed(found, ids)) & set(tokenizer().stop_ids))


def test_random_walks_satisfy_the_schema(structured):
  for seed in range(12):
    found = structured.token_filter(thinking=False, schema=PERSON)
    text = tokenizer().decode(walk(found, random.Random(seed)))
    person = json.loads(text)
    assert set(person) <= set(PERSON['properties'])
    assert isinstance(person['name'], str) and len(person['name']) <= 8
    assert 0 <= person['age'] <= 150
    assert set(person.get('tags', [])) <= {'a', 'b'}


def test_what_a_schema_refuses(structured):
  new = lambda: structured.token_filter(thinking=False, schema=PERSON)
  assert follows(new(), '{"name": "Ann", "age": 7}')
  assert not follows(new(), '{"name": "Ann", "age": 151}')
  assert not follows(new(), '{"name": "Ann"}')
  assert not follows(new(), '{"name": "Ann", "age": 7, "x": 1}')
  assert not follows(new(), 'Sure: {"name": "Ann", "age": 7}')
  assert not follows(new(), '')


def test_an_object_of_any_kind(structured):
  new = lambda: structured.token_filter(
    thinking=False, schema={'type': 'object'}
  )
  assert follows(new(), '{"a": [1, {"b": null}]}')
  assert not follows(new(), '[1]')


@pytest.mark.parametrize('vocab', [288, 289, 300, 320, 1000])
def test_masks_have_a_bit_for_each_id_of_the_model(vocab):
  found = StructuredOutput(tokenizer(), vocab)
  found = found.token_filter(thinking=True, schema=PERSON)
  for text in ('', 'a', 'a</think>', 'a</think>{"name": "A", "age": 1}'):
    mask = found.allowed(tokenizer().encode(text))
    assert mask.shape == (-(-vocab // 32),)
    flat = np.unpackbits(mask.view(np.uint8), bitorder='little')
    assert 0 < flat[: tokenizer().vocab_size].sum()
    assert not flat[tokenizer().vocab_size :].any()


def test_reasoning_is_free_and_must_end(structured):
  found = structured.token_filter(thinking=True, schema=PERSON)
  good = 'hm {"x\n中</think>{"name": "A", "age": 1}'
  assert follows(found, good)
  assert not set(allowed(found, [])) & set(tokenizer().stop_ids)
  found = structured.token_filter(thinking=True, schema=PERSON)
  assert not follows(found, 'hm</think>no')


def test_answers_do_not_depend_on_the_order_of_questions(structured):
  text = '{"name": "Ann", "age": 42, "tags": ["a"]}'
  ids = tokenizer().encode(text)
  fresh = [
    allowed(structured.token_filter(thinking=False, schema=PERSON), ids[:n])
    for n in range(len(ids) + 1)
  ]
  found = structured.token_filter(thinking=False, schema=PERSON)
  pick = random.Random(0)
  for _ in range(200):
    n = pick.randint(0, len(ids))
    if pick.random() < 0.3:  # A proposal that will be rejected.
      wrong = [*ids[:n], pick.randrange(VOCAB)]
      assert allowed(found, wrong)
    assert allowed(found, ids[:n]) == fresh[n]


def test_only_the_end_follows_an_end_or_a_foreign_token(structured):
  found = structured.token_filter(thinking=False, schema=PERSON)
  ends = sorted(tokenizer().stop_ids)
  assert allowed(found, [tokenizer().encode('x')[0]]) == ends
  assert allowed(found, [ends[0]]) == ends
  assert allowed(found, [299, 5]) == ends


def parse(text, tools):
  parser = ChatParser(thinking=False, tools=tools)
  deltas = [parser.feed(text), parser.finish()]
  calls = []
  for step in (step for delta in deltas for step in delta.calls):
    if step.name is not None:
      calls.append([step.name, ''])
    calls[-1][1] += step.arguments
  content = ''.join(delta.content for delta in deltas)
  return content, [(name, json.loads(text)) for name, text in calls]


def test_random_calls_parse_and_satisfy_their_schema(structured):
  names = set()
  for seed in range(12):
    tools = [WEATHER, NOW]
    found = structured.token_filter(thinking=False, tools=tools)
    text = tokenizer().decode(walk(found, random.Random(seed), 2000))
    content, calls = parse(text, tools)
    assert not content and calls, text
    for name, arguments in calls:
      names.add(name)
      if name == 'weather':
        assert isinstance(arguments['city'], str)
        assert 1 <= arguments['days'] <= 9
        assert arguments.get('unit', 'C') in ('C', 'F')
        assert arguments.get('person', {'age': 0})['age'] <= 150
      else:
        assert arguments == {}
  assert names == {'weather', 'now'}


def test_what_a_forced_call_refuses(structured):
  good = (
    '<tool_call>weather<arg_key>city</arg_key>'
    '<arg_value>Köln "x" <b></arg_value>'
    '<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>'
  )
  new = lambda **more: structured.token_filter(
    thinking=False, tools=[WEATHER], **more
  )
  assert follows(new(), good)
  assert follows(new(), good + good)
  assert not follows(new(parallel=False), good + good)
  assert not follows(new(), good.replace('3', '12'))
  assert not follows(new(), 'Sure! ' + good)
  assert not follows(new(), good.replace('weather', 'now'))
  either = lambda: structured.token_filter(
    thinking=True, tools=[WEATHER], schema={'type': 'object'}
  )
  assert follows(either(), 'a</think>' + good)
  assert follows(either(), 'a</think>{}')


@pytest.mark.parametrize(
  'schema',
  [
    {'type': 'nonsense'},
    {'$ref': '#/nowhere'},
    {'type': 'string', 'pattern': '(['},
    {'not': {'type': 'string'}},
    {'type': 'integer', 'minimum': 5, 'maximum': 1},
  ],
  ids=str,
)
def test_a_schema_that_cannot_be_enforced_is_refused(structured, schema):
  with pytest.raises(InvalidRequest, match='cannot be enforced'):
    structured.token_filter(thinking=False, schema=schema)


def test_huge_and_deep_schemas_are_refused(structured):
  deep = {'type': 'object'}
  for _ in range(5000):
    deep = {'type': 'object', 'properties': {'a': deep}}
  with pytest.raises(InvalidRequest):
    structured.token_filter(thinking=False, schema=deep)
  wide = {'type': 'string', 'enum': ['x' * 50 + str(i) for i in range(40_000)]}
  with pytest.raises(InvalidRequest, match='too large'):
    structured.token_filter(thinking=False, schema=wide)


def test_without_the_library_the_remedy_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'llguidance', None)
  fresh = StructuredOutput(tokenizer(), VOCAB)
  with pytest.raises(InvalidRequest, match=r'glm-jax\[serve\]'):
    fresh.token_filter(thinking=False, schema=PERSON)
