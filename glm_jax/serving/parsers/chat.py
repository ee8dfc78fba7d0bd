"""Splits an assistant's text into reasoning, content and tool calls.

The format is GLM's: reasoning stands before </think>, and a call is written
<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>. A
call inside the reasoning ends it. Nothing is trimmed: a client that sends the
parts back gets the same ids, and so its cached prefix.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from glm_jax.serving.parsers.arguments import (
  escape,
  parameter_types,
  value_as_json,
)
from glm_jax.text import partial_stop

_STRING = frozenset(['string'])


@dataclasses.dataclass(frozen=True)
class CallDelta:
  """A step of one tool call.

  Attributes:
    index: of the call in the answer, from 0.
    name: of the tool, in the first step of a call only.
    arguments: text that continues the JSON object of the arguments.
  """

  index: int
  name: str | None
  arguments: str


@dataclasses.dataclass(frozen=True)
class ChatDelta:
  """What a piece of text adds to an answer; any part may be empty."""

  reasoning: str = ''
  content: str = ''
  calls: tuple[CallDelta, ...] = ()

  def __bool__(self):
    return bool(self.reasoning or self.content or self.calls)


class ChatParser:
  """Parses one answer as its text arrives.

  Arguments declared as strings stream character by character; others, which
  cannot be told from strings before they end, come when they are complete. A
  key that is given twice keeps its first value.

  Attributes:
    num_calls: tool calls begun.
    unfinished: whether the text ended inside a call.
  """

  def __init__(
    self,
    *,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
  ):
    """Starts an answer.

    Args:
      thinking: whether the prompt has opened a think block.
      tools: descriptions, as in the request; None leaves calls as text.
    """
    self._tools = tools
    self._text = ''
    self._step = self._opening
    self._in_reasoning = thinking
    self._broken_off = False  # A call has ended the reasoning.
    self._name = self._key = ''
    self._types: frozenset[str] | None = None
    self._keys: set[str] = set()
    self._drop = False
    self._reasoning: list[str] = []
    self._content: list[str] = []
    self._calls: list[CallDelta] = []
    self.num_calls = 0
    self.unfinished = False

  @property
  def reasoning(self) -> bool:
    """Whether the text stands inside the reasoning now."""
    return self._in_reasoning

  def feed(self, text: str) -> ChatDelta:
    """Adds text; returns the parts that are now certain."""
    self._text += text
    while self._step(False):
      pass
    return self._take()

  def finish(self) -> ChatDelta:
    """Ends the text; what was held back is no markup."""
    while self._step(True):
      pass
    self.unfinished = self._step not in (self._prose, self._opening)
    return self._take()

  def _take(self) -> ChatDelta:
    delta = ChatDelta(
      ''.join(self._reasoning), ''.join(self._content), tuple(self._calls)
    )
    self._reasoning, self._content, self._calls = [], [], []
    return delta

  # Each state consumes from `_text` and says whether to go on at once.

  def _opening(self, last: bool) -> bool:
    """The first characters: a <think> that the model writes itself."""
    tag = '<think>'
    if not last and len(self._text) < len(tag) and tag.startswith(self._text):
      return False
    if self._text.startswith(tag):
      self._text = self._text[len(tag) :]
      self._in_reasoning = True
    self._step = self._prose
    return True

  def _prose(self, last: bool) -> bool:
    """Reasoning or content, up to the markup that ends it."""
    marks = ('</think>',) * (self._in_reasoning or self._broken_off)
    marks += ('<tool_call>',) * (self._tools is not None)
    before, mark = self._cut(marks, last)
    (self._reasoning if self._in_reasoning else self._content).append(before)
    if mark == '</think>':
      self._in_reasoning = self._broken_off = False
    elif mark == '<tool_call>':
      self._broken_off |= self._in_reasoning
      self._in_reasoning = False
      self._name, self._keys, self._step = '', set(), self._naming
    return mark is not None

  def _naming(self, last: bool) -> bool:
    """The name of the tool."""
    before, mark = self._cut(('<arg_key>', '</tool_call>'), last)
    self._name += before
    if mark is None:
      if last and self._name:  # Not a call yet: nothing is lost.
        self._content.append('<tool_call>' + self._name)
      return False
    name = self._name.strip()
    if not name:
      self._content.append('<tool_call>' + self._name + mark)
      self._step = self._prose
      return True
    self._name = name
    self._calls.append(CallDelta(self.num_calls, name, '{'))
    self.num_calls += 1
    return self._leave(mark)

  def _between(self, last: bool) -> bool:
    """White space between arguments."""
    return self._leave(self._cut(('<arg_key>', '</tool_call>'), last)[1])

  def _keying(self, last: bool) -> bool:
    before, mark = self._cut(('</arg_key>',), last)
    self._key += before
    if mark is None:
      return False
    self._key = self._key.strip()
    self._step = self._before_value
    return True

  def _before_value(self, last: bool) -> bool:
    _, mark = self._cut(('<arg_value>', '</tool_call>'), last)
    if mark != '<arg_value>':
      return mark is not None and self._leave(mark)
    self._types = parameter_types(self._tools, self._name, self._key)
    self._drop = self._key in self._keys
    self._value = ''
    if self._types == _STRING:
      self._argument(self._prefix() + '"')
    self._step = self._valuing
    return True

  def _valuing(self, last: bool) -> bool:
    before, mark = self._cut(('</arg_value>',), last)
    if self._types == _STRING:
      end = '' if mark is None else '"'
      self._argument(escape(before) + end)
    else:
      self._value += before
      if mark is not None:
        value = value_as_json(self._value, self._types)
        self._argument(self._prefix() + value)
    if mark is None:
      return False
    self._keys.add(self._key)
    self._step = self._between
    return True

  def _leave(self, mark: str | None) -> bool:
    """After the name or an argument: the next argument, or the end."""
    if mark == '<arg_key>':
      self._key, self._step = '', self._keying
    elif mark == '</tool_call>':
      self._drop = False
      self._argument('}')
      self._step = self._prose
    else:
      self._step = self._between
    return mark is not None

  def _prefix(self) -> str:
    comma = ', ' if self._keys else ''
    return f'{comma}{json.dumps(self._key, ensure_ascii=False)}: '

  def _argument(self, text: str):
    if text and not self._drop:
      self._calls.append(CallDelta(self.num_calls - 1, None, text))

  def _cut(self, marks: Sequence[str], last: bool) -> tuple[str, str | None]:
    """(text before the first mark, the mark); both leave the buffer.

    Without a mark, the end that may still become one stays, unless `last`.
    """
    found = [(self._text.find(mark), mark) for mark in marks]
    at, mark = min((f for f in found if f[0] >= 0), default=(0, None))
    if mark is not None:
      before, self._text = self._text[:at], self._text[at + len(mark) :]
      return before, mark
    held = 0 if last else partial_stop(self._text, marks)
    end = len(self._text) - held
    before, self._text = self._text[:end], self._text[end:]
    return before, None
