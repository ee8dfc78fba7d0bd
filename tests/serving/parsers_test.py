"""Streams equal complete answers, wherever the text or the ids are cut."""

import json
import random
import re

import pytest
from absl.testing import parameterized
from chat_tokenizer import tokenizer

from glm_jax.serving.parsers import (
  ChatDelta,
  ChatParser,
  Detokenizer,
  StopFilter,
)
from glm_jax.serving.parsers.arguments import value_as_json

SCHEMA = {
  'type': 'object',
  'properties': {
    'city': {'type': 'string'},
    'days': {'type': 'integer'},
    'unit': {'enum': ['C', 'F']},
    'when': {'type': ['string', 'null']},
    'at': {'anyOf': [{'type': 'number'}, {'$ref': '#/$defs/place'}]},
  },
  '$defs': {'place': {'type': 'object'}},
}
TOOLS = [
  {'type': 'function', 'function': {'name': 'weather', 'parameters': SCHEMA}},
  {'type': 'function', 'function': {'name': 'now'}},
]


def call(name, *arguments):
  pairs = ''.join(
    f'<arg_key>{key}</arg_key><arg_value>{value}</arg_value>'
    for key, value in arguments
  )
  return f'<tool_call>{name}{pairs}</tool_call>'


KOELN = call('weather', ('city', 'Köln "am" \\Rhein\n<b>'), ('days', '3'))
# (text, thinking, reasoning, content, [(name, arguments)])
CASES = {
  'plain': ('Hi <b>there</b>', False, '', 'Hi <b>there</b>', []),
  'reasoning': ('2 < 3\n</think>\n\nYes', True, '2 < 3\n', '\n\nYes', []),
  'never ends thinking': ('so </thin', True, 'so </thin', '', []),
  'thinks again': ('<think>a</think>b', False, 'a', 'b', []),
  'repeats the tag': ('<think>a</think>b', True, 'a', 'b', []),
  'almost a tag': ('<thing>', False, '', '<thing>', []),
  'mentions the end': ('a </think> b', False, '', 'a </think> b', []),
  'one call': (
    f'Look: {KOELN}',
    False,
    '',
    'Look: ',
    [('weather', {'city': 'Köln "am" \\Rhein\n<b>', 'days': 3})],
  ),
  'a call inside the reasoning ends it': (
    f'hm {KOELN}</think> done',
    True,
    'hm ',
    ' done',
    [('weather', {'city': 'Köln "am" \\Rhein\n<b>', 'days': 3})],
  ),
  'two calls and white space': (
    f'x</think>{call("now")}\n{call(" now ")}',
    True,
    'x',
    '\n',
    [('now', {}), ('now', {})],
  ),
  'types': (
    call(
      'weather',
      ('city', '12'),
      ('unit', 'C'),
      ('when', 'null'),
      ('at', ' {"lat": 1.50} '),
      ('more', '[1, "<arg_key>"]'),
      ('text', 'no json'),
      ('quoted', '"q"'),
    ),
    False,
    '',
    '',
    [
      (
        'weather',
        {
          'city': '12',
          'unit': 'C',
          'when': None,
          'at': {'lat': 1.5},
          'more': [1, '<arg_key>'],
          'text': 'no json',
          'quoted': '"q"',
        },
      )
    ],
  ),
  'a key given twice keeps its first value': (
    call('weather', ('city', 'a'), ('city', 'b'), ('days', '1'), ('days', '2')),
    False,
    '',
    '',
    [('weather', {'city': 'a', 'days': 1})],
  ),
  'markup of values in a string': (
    call('weather', ('city', '</arg_key></arg_val <tool_call></think>')),
    False,
    '',
    '',
    [('weather', {'city': '</arg_key></arg_val <tool_call></think>'})],
  ),
  'new lines as in GLM-4.5': (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>a</arg_value>\n'
    '</tool_call>',
    False,
    '',
    '',
    [('weather', {'city': 'a'})],
  ),
  'a call without a name is text': (
    'a<tool_call> </tool_call>b',
    False,
    '',
    'a<tool_call> </tool_call>b',
    [],
  ),
  'a name that breaks off is text': (
    '<tool_call>weath',
    False,
    '',
    '<tool_call>weath',
    [],
  ),
  'surrogates and emoji': (
    call('weather', ('city', '👩‍🚀 \u2028 \x7f'), ('at', '{"😀": 1}')),
    False,
    '',
    '',
    [('weather', {'city': '👩‍🚀 \u2028 \x7f', 'at': {'😀': 1}})],
  ),
}


def collect(pieces, thinking, tools=TOOLS):
  """(reasoning, content, [(name, arguments text)], parser)."""
  parser = ChatParser(thinking=thinking, tools=tools)
  deltas = [parser.feed(piece) for piece in pieces] + [parser.finish()]
  calls = []
  for step in (step for delta in deltas for step in delta.calls):
    if step.name is not None:
      assert step.index == len(calls)
      calls.append([step.name, ''])
    assert step.index == len(calls) - 1
    calls[-1][1] += step.arguments
  reasoning = ''.join(delta.reasoning for delta in deltas)
  content = ''.join(delta.content for delta in deltas)
  return reasoning, content, [tuple(c) for c in calls], parser


def by_pattern(text):
  """Content and calls of a well-formed answer, by regular expressions."""
  found = []
  for inner in re.findall(r'<tool_call>(.*?)</tool_call>', text, re.S):
    name = re.match(r'[^<]*', inner).group().strip()
    pairs = re.findall(
      r'<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>', inner, re.S
    )
    found.append((name, dict(pairs)))
  return re.sub(r'<tool_call>.*?</tool_call>', '', text, flags=re.S), found


class ChatParserTest(parameterized.TestCase):
  @parameterized.parameters(*CASES)
  def test_the_parts(self, case):
    text, thinking, reasoning, content, calls = CASES[case]
    got = collect([text], thinking)
    assert got[:2] == (reasoning, content)
    assert [(n, json.loads(a)) for n, a in got[2]] == calls
    assert not got[3].unfinished or 'breaks off' in case

  @parameterized.parameters(*CASES)
  def test_every_split_in_two_and_three(self, case):
    text, thinking, *_ = CASES[case]
    whole = collect([text], thinking)[:3]
    for i in range(len(text) + 1):
      assert collect([text[:i], text[i:]], thinking)[:3] == whole, i
      j = random.Random(i).randint(i, len(text))
      assert collect([text[:i], text[i:j], text[j:]], thinking)[:3] == whole

  @parameterized.product(case=list(CASES), step=list(range(1, 9)))
  def test_steps_of_tokens(self, case, step):
    text, thinking, *_ = CASES[case]
    whole = collect([text], thinking)[:3]
    ids = tokenizer().encode(text)
    for offset in range(step):
      cuts = [0, *range(offset, len(ids), step), len(ids)]
      stream = Detokenizer(tokenizer())
      pieces = [stream.feed(ids[a:b]).text for a, b in zip(cuts, cuts[1:])]
      pieces.append(stream.finish().text)
      assert collect(pieces, thinking)[:3] == whole

  def test_every_truncation_is_the_same_in_one_piece_and_by_character(self):
    for text, thinking, *_ in CASES.values():
      for end in range(len(text)):
        cut = text[:end]
        assert collect([cut], thinking)[:3] == collect(cut, thinking)[:3], cut

  def test_a_string_argument_streams_before_it_ends(self):
    parser = ChatParser(thinking=False, tools=TOOLS)
    parser.feed('<tool_call>weather<arg_key>city</arg_key><arg_value>')
    assert parser.feed('Kö').calls[0].arguments == 'Kö'
    assert parser.feed('ln</').calls[0].arguments == 'ln'
    assert parser.feed('arg_value>').calls[0].arguments == '"'

  def test_without_tools_calls_are_text(self):
    text = f'a{KOELN}b'
    assert collect([text], False, None)[:3] == ('', text, [])
    text = f'a{KOELN}</think>b'
    assert collect([text], True, None)[:3] == (f'a{KOELN}', 'b', [])

  def test_a_broken_off_call_is_reported(self):
    text = '<tool_call>weather<arg_key>city</arg_key><arg_value>Kö'
    *_, calls, parser = collect([text], False)
    assert calls == [('weather', '{"city": "Kö')]
    assert parser.unfinished

  def test_random_answers_equal_the_regular_expressions(self):
    pick = random.Random(0)
    alphabet = ['a', 'é', '中', '"', '\\', '\n', '<', '>', '</', ' ', '😀']
    words = lambda n: ''.join(pick.choice(alphabet) for _ in range(n))
    for _ in range(200):
      text = words(pick.randint(0, 6))
      for _ in range(pick.randint(0, 3)):
        keys = pick.sample(['a', 'b b', 'ключ', 'city'], pick.randint(0, 3))
        pairs = [(key, words(pick.randint(0, 8)) + 'x') for key in keys]
        text += call(pick.choice(['f', 'weather']), *pairs)
        text += words(pick.randint(0, 4))
      content, calls = by_pattern(text)
      pieces, rest = [], text
      while rest:
        size = pick.randint(1, 9)
        pieces.append(rest[:size])
        rest = rest[size:]
      got = collect(pieces, False)
      assert got[:2] == ('', content), text
      assert [(n, json.loads(a)) for n, a in got[2]] == calls, text


def test_values_keep_their_spelling_or_become_strings():
  number, text = frozenset(['number']), frozenset(['string'])
  assert value_as_json(' 1.50 ', number) == '1.50'
  assert value_as_json('3', number) == '3'
  assert value_as_json('NaN', number) == '"NaN"'
  assert value_as_json('3', text) == '"3"'
  assert value_as_json('3', None) == '3'
  assert value_as_json('true', frozenset(['boolean'])) == 'true'
  assert value_as_json('true', number) == '"true"'
  deep = '[' * 100_000
  assert value_as_json(deep, None) == f'"{deep}"'
  digits = '9' * 10_000
  assert value_as_json(digits, None) == f'"{digits}"'


class StopFilterTest(parameterized.TestCase):
  @parameterized.parameters(
    ('abXYc', ('XY',), 'ab', 'XY'),
    ('abXYc', ('Y', 'XYc', 'XY'), 'ab', 'XY'),
    ('xabc', ('xabc', 'ab'), 'x', 'ab'),
    ('aab', ('ab',), 'a', 'ab'),
    ('aXaX', ('XaX', 'X'), 'a', 'X'),
    ('aX', ('XY',), 'aX', None),
    ('\n\n', ('\n\n',), '', '\n\n'),
    ('abc', (), 'abc', None),
  )
  def test_the_first_to_be_complete_ends_the_text(self, text, stops, out, stop):
    for i in range(len(text) + 1):
      for j in range(i, len(text) + 1):
        found = StopFilter(stops)
        pieces = (text[:i], text[i:j], text[j:])
        got = ''.join(map(found.feed, pieces)) + found.finish()
        assert (got, found.stopped) == (out, stop), (i, j)

  def test_the_stop_can_be_kept(self):
    for i in range(6):
      found = StopFilter(('XY',), include=True)
      assert found.feed('abXYc'[:i]) + found.feed('abXYc'[i:]) == 'abXY'

  def test_an_empty_stop_is_refused(self):
    with pytest.raises(ValueError, match='empty'):
      StopFilter(('',))


class DetokenizerTest(parameterized.TestCase):
  @parameterized.parameters(*range(1, 9))
  def test_pieces_equal_the_whole_and_never_break_a_character(self, step):
    text = 'naïve 北京中中 – 👩‍🚀🚀 e\u0301 the the\U0010ffff end'
    ids = tokenizer().encode(text)
    assert len(ids) > len(text)
    for offset in range(step):
      cuts = [0, *range(offset, len(ids), step), len(ids)]
      stream = Detokenizer(tokenizer())
      pieces = [stream.feed(ids[a:b]).text for a, b in zip(cuts, cuts[1:])]
      assert '\ufffd' not in ''.join(pieces)
      assert ''.join(pieces) + stream.finish().text == text

  def test_an_unfinished_character_at_the_end_is_shown_as_broken(self):
    ids = tokenizer().encode('a北')[:-1]
    stream = Detokenizer(tokenizer())
    assert stream.feed(ids).text == 'a'
    assert stream.finish().text == '\ufffd'

  @parameterized.parameters(*range(1, 9))
  def test_a_stop_string_ends_the_count_at_its_own_token(self, step):
    ids = tokenizer().encode('中a STOP the end')
    before = len(tokenizer().encode('中a STOP'))
    stream = Detokenizer(tokenizer(), ('STOP',))
    text, count, stopped = '', 0, None
    for at in range(0, len(ids), step):
      piece = stream.feed(ids[at : at + step])
      text += piece.text
      count += piece.num_ids
      stopped = stopped or piece.stopped
    assert (text, count, stopped) == ('中a ', before, 'STOP')
    assert stream.finish().text == ''

  def test_a_stop_string_inside_a_token_and_at_the_very_end(self):
    stream = Detokenizer(tokenizer(), ('h',))
    piece = stream.feed(tokenizer().encode('the'))
    assert (piece.text, piece.stopped) == ('t', 'h')
    stream = Detokenizer(tokenizer(), ('\ufffd',))
    stream.feed(tokenizer().encode('北')[:1])
    assert stream.finish().stopped == '\ufffd'

  def test_markup_is_shown_and_control_tokens_are_not(self):
    ids = tokenizer().encode('<|user|>a<tool_call>b</think><|endoftext|>')
    assert Detokenizer(tokenizer()).feed(ids).text == 'a<tool_call>b</think>'
    shown = Detokenizer(tokenizer(), skip_special_tokens=False).feed(ids).text
    assert shown == '<|user|>a<tool_call>b</think><|endoftext|>'


def test_an_empty_delta_is_false():
  assert not ChatDelta()
  assert ChatDelta(content='a')
