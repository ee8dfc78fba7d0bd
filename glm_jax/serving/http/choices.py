"""One sequence of an answer: from engine outputs to text and parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from glm_jax.serving.parsers import ChatDelta, ChatParser, Detokenizer
from glm_jax.serving.request import Output, TokenLogprob

_EMPTY = ChatDelta()


@dataclasses.dataclass(frozen=True)
class Step:
  """What one output adds to a choice.

  Attributes:
    text: new text.
    delta: the same in parts, where there is a parser.
    ids: new ids, up to one that completes a stop string.
    logprobs: one entry an id, None if none were asked for.
    finish_reason: OpenAI's word, set with the last step.
    cut: a stop string ended the text while the engine still runs.
  """

  text: str
  delta: ChatDelta
  ids: tuple[int, ...]
  logprobs: tuple[TokenLogprob, ...] | None
  finish_reason: str | None
  cut: bool = False


class Choice:
  """Follows one sequence and knows what to tell of it.

  Attributes:
    output: the newest output of the engine: counts of tokens and drafts.
    num_ids: ids that count so far.
    num_reasoning: of them, those read while the model was reasoning.
    stop_reason: the stop string or the id that ended it; None for an eos.
    finish_reason: set at the end.
  """

  def __init__(
    self,
    detokenizer: Detokenizer | None,
    parser: ChatParser | None = None,
    *,
    eos_ids: Collection[int] = (),
    stop_ids: Collection[int] = (),
    named_tool: bool = False,
  ):
    """Starts a choice.

    Args:
      detokenizer: None leaves the text empty: a model without a tokenizer.
      parser: splits the text; None leaves it whole.
      eos_ids: end the sequence, and are not text.
      stop_ids: the same, asked for by the client.
      named_tool: the client named the one tool that is called.
    """
    self._detokenizer = detokenizer
    self._parser = parser
    self._eos_ids = frozenset(eos_ids)
    self._stop_ids = frozenset(stop_ids)
    self._named_tool = named_tool
    self.output = Output('')
    self.num_ids = self.num_reasoning = 0
    self.stop_reason: int | str | None = None
    self.finish_reason: str | None = None

  def take(self, output: Output) -> Step:
    """Takes the next output of the engine."""
    self.output = output
    texts, deltas, count = [], [], 0
    stopped = None
    for token in output.new_ids:
      count += 1
      self.num_reasoning += self._parser is not None and self._parser.reasoning
      if token in self._eos_ids or token in self._stop_ids:
        self.stop_reason = None if token in self._eos_ids else token
      elif self._detokenizer is not None:
        piece = self._detokenizer.feed([token])
        self._append(piece.text, texts, deltas)
        stopped = piece.stopped
      if stopped is not None:
        break
    self.num_ids += count
    cut = stopped is not None and not output.finished
    if output.finished or cut:
      if self._detokenizer is not None:
        piece = self._detokenizer.finish()
        self._append(piece.text, texts, deltas)
        stopped = stopped or piece.stopped
      if self._parser is not None:
        deltas.append(self._parser.finish())
      self.stop_reason = self.stop_reason if stopped is None else stopped
      self.finish_reason = self._reason('stop' if stopped else None)
    logprobs = output.logprobs and output.logprobs[:count]
    return Step(
      ''.join(texts),
      _join(deltas),
      tuple(output.new_ids[:count]),
      logprobs,
      self.finish_reason,
      cut,
    )

  def _append(self, text: str, texts: list, deltas: list):
    texts.append(text)
    if self._parser is not None:
      deltas.append(self._parser.feed(text))

  def _reason(self, found: str | None) -> str:
    reason = found or self.output.finish_reason or 'stop'
    called = self._parser is not None and self._parser.num_calls
    whole = called and not self._parser.unfinished
    # OpenAI: a call that the client named itself ends with 'stop'.
    if reason == 'stop' and whole and not self._named_tool:
      return 'tool_calls'
    return reason


def _join(deltas: Sequence[ChatDelta]) -> ChatDelta:
  """Several deltas as one; steps of the same call become one step."""
  deltas = [delta for delta in deltas if delta]
  if len(deltas) <= 1:
    return deltas[0] if deltas else _EMPTY
  calls = []
  for call in (call for delta in deltas for call in delta.calls):
    if calls and calls[-1].index == call.index:
      text = calls[-1].arguments + call.arguments
      calls[-1] = dataclasses.replace(calls[-1], arguments=text)
    else:
      calls.append(call)
  return ChatDelta(
    ''.join(delta.reasoning for delta in deltas),
    ''.join(delta.content for delta in deltas),
    tuple(calls),
  )
