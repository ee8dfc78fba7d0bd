"""Stop strings over text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from glm_jax.text import partial_stop


class StopFilter:
  """Passes text on up to the first stop string.

  The stop string that is *complete* first ends the text, and of several that
  end at the same character the longest one: the result does not depend on
  how the text was cut. What may still become a stop string is held back.

  Attributes:
    stopped: the stop string that was found, None until then.
  """

  def __init__(self, stops: Sequence[str] = (), include: bool = False):
    """Takes the stop strings; `include` keeps the one found in the text."""
    if not all(stops):
      raise ValueError('a stop string is empty; leave it out')
    self._stops = tuple(stops)
    self._include = include
    self._held = ''
    self.stopped: str | None = None

  def feed(self, text: str) -> str:
    """Adds text; returns what is now certain to precede any stop string."""
    if self.stopped is not None:
      return ''
    if not self._stops:
      return text
    text = self._held + text
    found = self._first(text)
    if found is not None:
      start, self.stopped = found
      self._held = ''
      return text[: start + len(self.stopped) * self._include]
    size = partial_stop(text, self._stops)
    self._held = text[len(text) - size :]
    return text[: len(text) - size]

  def finish(self) -> str:
    """Returns what was held back: no stop string came of it."""
    held, self._held = self._held, ''
    return held

  def _first(self, text: str) -> tuple[int, str] | None:
    """(start, stop string) of the one that ends first in `text`."""
    starts = ((text.find(stop), stop) for stop in self._stops)
    found = [(at + len(stop), at, stop) for at, stop in starts if at >= 0]
    return min(found)[1:] if found else None
