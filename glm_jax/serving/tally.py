"""What an engine counts, and how it reports that."""

from __future__ import annotations

import time
from typing import Any

from glm_jax.serving.sequence import Sequence
from pallas_kernels.tiling import PAGE

REASONS = ('stop', 'length', 'abort', 'deadline', 'error')


class Tally:
  """Counts of one engine since its start."""

  def __init__(self, most_drafts: int):
    self._finished = dict.fromkeys(REASONS, 0)
    self._prompt_tokens = self._new_tokens = 0
    self._rounds = self._corrupted = 0
    self._drafted, self._accepted = [0] * most_drafts, [0] * most_drafts
    self._pace = 1.0  # seconds between finished requests, smoothed
    self._last_finish: float | None = None

  def wait_estimate(self, waiting: int) -> float:
    """Seconds until so many requests have finished, 1 to 300."""
    return min(max(self._pace * waiting, 1.0), 300.0)

  def prompt(self, seq: Sequence) -> None:
    """The last prompt row of a sequence was dispatched."""
    self._prompt_tokens += seq.prompt_tokens

  def corrupted(self) -> None:
    """A sequence had NaN logits."""
    self._corrupted += 1

  def round(self, seq: Sequence, drafted: int, accepted: int) -> None:
    """A sequence had a round with drafts."""
    seq.rounds += 1
    self._rounds += 1
    for j in range(drafted):
      seq.drafted[j] += 1
      self._drafted[j] += 1
    for j in range(accepted):
      seq.accepted[j] += 1
      self._accepted[j] += 1

  def tokens(self, new: int) -> None:
    """A sequence got new tokens."""
    self._new_tokens += new

  def finished(self, reason: str) -> None:
    """A sequence has ended."""
    self._finished[reason] += 1
    now = time.monotonic()
    if self._last_finish is not None:
      self._pace += 0.1 * (now - self._last_finish - self._pace)
    self._last_finish = now

  def report(self, engine) -> dict[str, Any]:
    """See `engine.Engine.stats`."""
    pool, host, disk = engine.store.pool, engine.host, engine.disk
    scheduler, runner = engine.scheduler, engine.runner
    return {
      'requests': {
        'waiting': len(scheduler.waiting),
        'running': len(scheduler.running),
        'finished': dict(self._finished),
      },
      'tokens': {'prompt': self._prompt_tokens, 'generation': self._new_tokens},
      'pages': {
        'used': pool.num_used,
        'idle': pool.num_idle,
        'free': pool.num_free,
        'total': pool.num_pages,
      },
      'page_tokens': PAGE,
      'prefix': dict(engine.store.counts),
      'host': None if host is None else host.report(),
      'disk': None if disk is None else disk.report(),
      'drafts': {
        'rounds': self._rounds,
        'drafted': list(self._drafted),
        'accepted': list(self._accepted),
      },
      'steps': runner.steps,
      'rows': dict(runner.rows),
      'preemptions': scheduler.preemptions,
      'corrupted': self._corrupted,
      'in_flight': engine.steps_in_flight,
    }
