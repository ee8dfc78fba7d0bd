"""Structured output: JSON, JSON schemas and forced tool calls.

A grammar decides which tokens may follow; `llguidance` computes the masks.
Where the model reasons first, the grammar begins after </think>, so that the
answer alone is bound to it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glm_jax.serving.parsers.arguments import declared_types
from glm_jax.serving.parsers.detokenize import markup_ids
from glm_jax.serving.request import InvalidRequest
from glm_jax.text import Tokenizer

_STRING = frozenset(['string'])
_ANY_TEXT = r'/(?s:.*)/'
# A value as the template writes strings: whatever does not end it.
_VALUE = r'/(?s:.*)/ & ~/(?s:.*)<\/arg_value>(?s:.*)/'
_MAX_GRAMMAR = 1 << 20


class GrammarFilter:
  """A `TokenFilter` that follows one sequence through a grammar.

  Attributes:
    error: why the grammar had to be given up, if it was: only the end of the
      text is allowed from there on, and the answer must not be trusted.
  """

  def __init__(self, matcher, words: int, eos_ids: Sequence[int]):
    """Wraps a fresh llguidance matcher; `words` is ceil(V / 32)."""
    self._matcher = matcher
    self._words = words
    self._end = np.zeros(words, np.uint32)
    for token in eos_ids:
      self._end[token // 32] |= np.uint32(1 << token % 32)
    self._eos_ids = frozenset(eos_ids)
    self._consumed: list[int] = []
    self.error: str | None = None

  def allowed(self, new_ids: Sequence[int]) -> np.ndarray:
    """See `TokenFilter.allowed`; costs what changed since the last call."""
    new_ids = list(new_ids)
    if self.error is not None or self._eos_ids.intersection(new_ids):
      return self._end
    same = 0
    for old, new in zip(self._consumed, new_ids):
      if old != new:
        break
      same += 1
    back = len(self._consumed) - same
    if back:
      self._matcher.rollback(back)
    fresh = new_ids[same:]
    accepted = self._matcher.try_consume_tokens(fresh) if fresh else 0
    self._consumed = new_ids[: same + accepted]
    if accepted < len(fresh):
      # A proposal outside the grammar, which cannot be kept: any token that
      # follows it is as good as another.
      return self._end
    # The library may give a word more than the vocabulary needs.
    mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
    mask = mask[: self._words]
    if self._matcher.is_error():
      self.error = self._matcher.get_error()
      return self._end
    return mask if mask.any() else self._end


class StructuredOutput:
  """Makes token filters for one tokenizer."""

  def __init__(self, tokenizer: Tokenizer, vocab_size: int):
    """Prepares grammars over `tokenizer`; `vocab_size` is the model's."""
    self._tokenizer = tokenizer
    self._vocab_size = vocab_size
    self._markup = markup_ids(tokenizer)

  def token_filter(
    self,
    *,
    thinking: bool,
    schema: Mapping[str, Any] | bool | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    parallel: bool = True,
  ) -> GrammarFilter:
    """A filter for an answer that is JSON, tool calls, or either.

    Args:
      thinking: the prompt has opened a think block: reasoning comes first.
      schema: JSON schema of the answer, {} for any JSON value; None if the
        answer may be no JSON.
      tools: function descriptions that may be called; empty for none.
      parallel: whether several calls may follow each other.

    Raises:
      InvalidRequest: llguidance is missing, or cannot do this schema.
    """
    answers = []
    lines = []
    if schema is not None:
      answers.append(f'%json {_dump(schema)}')
    if tools:
      calls = [f'call{i}' for i in range(len(tools))]
      answers.append('call+' if parallel else 'call')
      lines.append(f'call: {" | ".join(calls)}')
      for name, tool in zip(calls, tools):
        lines += self._call(name, tool)
    head = f'{_ANY_TEXT} {self._mark("</think>")} ' if thinking else ''
    lines.insert(0, f'start: {head}answer')
    lines[1:1] = ['answer: ' + ' | '.join(f'a{i}' for i in range(len(answers)))]
    lines += [f'a{i}: {answer}' for i, answer in enumerate(answers)]
    return self._compile('\n'.join(lines) + '\n')

  def _call(self, rule: str, tool: Mapping[str, Any]) -> list[str]:
    """Rules of one tool call, in the format of the chat template."""
    function = tool.get('function') or tool
    schema = function.get('parameters') or {}
    properties = schema.get('properties') or {}
    required = schema.get('required') or ()
    definitions = {
      key: schema[key] for key in ('$defs', 'definitions') if key in schema
    }
    parts, lines = [], []
    for i, (key, about) in enumerate(properties.items()):
      name = f'{rule}_{i}'
      optional = '' if key in required else '?'
      parts.append(f'{name}{optional}')
      lines.append(
        f'{name}: {self._mark("<arg_key>")} {_dump(key)} '
        f'{self._mark("</arg_key>")} {self._mark("<arg_value>")} '
        f'{name}_value {self._mark("</arg_value>")}'
      )
      lines += _value(f'{name}_value', about, definitions)
    begin, end = self._mark('<tool_call>'), self._mark('</tool_call>')
    called = _dump(function['name'])
    return [f'{rule}: {begin} {called} {" ".join(parts)} {end}', *lines]

  def _mark(self, text: str) -> str:
    """Markup in a grammar: one token where the tokenizer has one."""
    token = self._markup.get(text)
    return _dump(text) if token is None else f'<[{token}]>'

  def _compile(self, lark: str) -> GrammarFilter:
    if len(lark) > _MAX_GRAMMAR:
      raise InvalidRequest(
        f'the schema is too large ({len(lark)} characters; at most '
        f'{_MAX_GRAMMAR}): simplify it'
      )
    guidance, tokens = self._library
    grammar = guidance.LLMatcher.grammar_from_lark(lark)
    matcher = guidance.LLMatcher(tokens, grammar, log_level=0)
    if matcher.is_error():
      reason = ' '.join(matcher.get_error().split())
      raise InvalidRequest(
        f'the schema cannot be enforced: {reason:.300}; simplify it, or leave '
        'out response_format and tool_choice'
      )
    words = -(-self._vocab_size // 32)
    return GrammarFilter(matcher, words, self._tokenizer.stop_ids)

  @functools.cached_property
  def _library(self) -> tuple[Any, Any]:
    """(llguidance, the tokenizer in its form)."""
    try:
      import llguidance
    except ImportError:
      raise InvalidRequest(
        'response_format and a forced tool_choice need llguidance on the '
        "server: pip install 'glm-jax[serve]'"
      ) from None
    eos = list(self._tokenizer.stop_ids)
    if not eos:
      raise InvalidRequest(
        'structured output needs an end token, and this model names none'
      )
    tokens = llguidance.LLTokenizer(
      self._tokenizer.to_json(),
      n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
      eos_token=eos,
    )
    return llguidance, tokens


def _value(rule: str, schema: Any, definitions: Mapping[str, Any]) -> list[str]:
  """Rules for a value: strings as they are, everything else as JSON."""
  types = declared_types(schema, definitions)
  options = []
  strings = schema.get('enum') if isinstance(schema, Mapping) else None
  if types == _STRING and isinstance(strings, list) and strings:
    options = [_dump(value) for value in strings if isinstance(value, str)]
  elif types is None or 'string' in types:
    return [f'{rule}: {rule.upper()}', f'{rule.upper()}: {_VALUE}']
  else:
    options = [f'%json {_dump({**schema, **definitions})}']
  rules = [f'{rule}_{i}: {option}' for i, option in enumerate(options)]
  names = [f'{rule}_{i}' for i in range(len(options))]
  return [f'{rule}: {" | ".join(names)}', *rules]


def _dump(value: Any) -> str:
  """JSON, which is also how a grammar writes a literal."""
  try:
    return json.dumps(value, ensure_ascii=True, allow_nan=False)
  except (ValueError, RecursionError) as error:
    raise InvalidRequest(f'the schema is no usable JSON: {error}') from None
