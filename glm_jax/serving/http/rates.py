"""Tokens a second over the last minutes, for the status page."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 2.0  # of one period
PERIODS = 150


class Rates:
  """Counts events in periods of `SECONDS`; the oldest are forgotten."""

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    """Reads the time from `clock`, in seconds."""
    self._clock = clock
    self._counts: dict[int, int] = {}

  def add(self, count: int):
    """Counts `count` events now."""
    period = int(self._clock() / SECONDS)
    if period not in self._counts:
      first = period - PERIODS
      old = self._counts.items()
      self._counts = {p: n for p, n in old if p >= first}
      self._counts[period] = 0
    self._counts[period] += count

  def per_second(self) -> list[float]:
    """Rates of the last `PERIODS` complete periods, oldest first."""
    now = int(self._clock() / SECONDS)
    periods = range(now - PERIODS, now)
    return [self._counts.get(p, 0) / SECONDS for p in periods]
