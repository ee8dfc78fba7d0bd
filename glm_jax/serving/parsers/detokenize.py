"""New ids to text, one id at a time, with stop strings applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from glm_jax.serving.parsers.stops import StopFilter
from glm_jax.text import TextStream, Tokenizer

# Markup that the parsers look for; shown even where a tokenizer calls it
# special. Published tokenizers do not.
MARKUP = (
  '<think>',
  '</think>',
  '<tool_call>',
  '</tool_call>',
  '<arg_key>',
  '</arg_key>',
  '<arg_value>',
  '</arg_value>',
)


@dataclasses.dataclass(frozen=True)
class Piece:
  """What one call of `Detokenizer` gives.

  Attributes:
    text: new text, never ending inside a character or a possible stop.
    num_ids: ids that count: all of them, or those up to the stop string.
    stopped: the stop string that was found in this call, if any.
  """

  text: str
  num_ids: int
  stopped: str | None = None


class Detokenizer:
  """Text of one sequence as its ids arrive; the pieces do not overlap.

  Ids are looked at singly, so a stop string inside a step of several ids
  ends the text and the count at the very id that completes it.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    stops: Sequence[str] = (),
    *,
    include_stop: bool = False,
    skip_special_tokens: bool = True,
  ):
    """Reads ids with `tokenizer`; the rest is as in `StopFilter`."""
    self._tokenizer = tokenizer
    self._skip = skip_special_tokens
    self._shown = markup_ids(tokenizer).values()
    self._stream = TextStream(tokenizer, skip_special_tokens=False)
    self._filter = StopFilter(stops, include_stop)

  def feed(self, ids: Sequence[int]) -> Piece:
    """Takes new ids [n], n >= 0; none count after a stop string."""
    if self._filter.stopped is not None:
      return Piece('', 0)
    text = []
    for count, token in enumerate(ids, 1):
      if self._visible(token):
        text.append(self._filter.feed(self._stream.feed(token)))
      if self._filter.stopped is not None:
        return Piece(''.join(text), count, self._filter.stopped)
    return Piece(''.join(text), len(ids))

  def finish(self) -> Piece:
    """Returns what was held back; a broken last character reads U+FFFD."""
    if self._filter.stopped is not None:
      return Piece('', 0)
    text = self._filter.feed(self._stream.finish())
    stopped = self._filter.stopped
    return Piece(text + self._filter.finish(), 0, stopped)

  def _visible(self, token: int) -> bool:
    shown = not self._skip or token in self._shown
    return shown or bool(self._tokenizer.visible_ids([token]))


def markup_ids(tokenizer: Tokenizer) -> dict[str, int]:
  """Ids of the markup that is one token in this tokenizer."""
  ids = {text: tokenizer.encode(text) for text in MARKUP}
  return {text: found[0] for text, found in ids.items() if len(found) == 1}
