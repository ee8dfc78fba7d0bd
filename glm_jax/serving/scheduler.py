"""Which requests run in the next step, with how many rows.

    waiting --> restoring --> prefill --> decode --> done
       ^------------ preempted ------------|

Decoding requests come first, each with its newest token and its drafts; what
is left of the step's rows goes to prompts. Half of that is for the oldest
prompt and half for the one with the fewest rows left, so a long prompt moves
on in every step and a short one never waits for all of it. A request is
admitted only if the pages of its whole plan are there; a more important one
may take the place of less important ones, which come back through the prefix
cache.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping

from glm_jax.serving.config import Buckets, EngineConfig
from glm_jax.serving.sequence import Sequence, State
from glm_jax.serving.store import Hit, PageStore
from pallas_kernels.tiling import PAGE, cdiv


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Consecutive prompt rows of one sequence.

  Attributes:
    seq: whose.
    start: first position.
    count: rows.
    last: the row of its newest token is among them.
  """

  seq: Sequence
  start: int
  count: int
  last: bool


@dataclasses.dataclass(frozen=True)
class StepPlan:
  """One step.

  Attributes:
    decode: (sequence, drafts wanted) of each decoding request.
    prefill: prompt rows.
  """

  decode: tuple[tuple[Sequence, int], ...] = ()
  prefill: tuple[Chunk, ...] = ()

  def __bool__(self) -> bool:
    return bool(self.decode or self.prefill)

  @property
  def drawing(self) -> list[Sequence]:
    """Sequences that get new tokens from the step."""
    ends = [c.seq for c in self.prefill if c.last]
    return [s for s, _ in self.decode] + ends

  @property
  def rows(self) -> int:
    """Rows of the step, padding not counted."""
    decode = sum(1 + k for _, k in self.decode)
    return decode + sum(c.count for c in self.prefill)

  @property
  def blocks(self) -> int:
    """Pages of the longest sequence in the step."""
    seqs = [s for s, _ in self.decode] + [c.seq for c in self.prefill]
    return max(len(s.pages) for s in seqs)


class Scheduler:
  """Queues and slots of one engine; no jax in here.

  Attributes:
    waiting: in the order of service.
    running: those that hold a slot, in the order of admission.
    preemptions: how often a running request was sent back.
  """

  def __init__(
    self,
    config: EngineConfig,
    buckets: Buckets,
    store: PageStore,
    chunks: Mapping[int, int],
  ):
    self.waiting: list[Sequence] = []
    self.running: list[Sequence] = []
    self.preemptions = 0
    self._config = config
    self._buckets = buckets
    self._store = store
    self._chunk_rows = chunks
    self._blocked: tuple | None = None  # what could not be admitted, when
    self._slots = list(range(config.max_num_seqs))[::-1]

  def set_chunks(self, chunks: Mapping[int, int]) -> None:
    """Prompt rows of a step at most, by pages of the longest request."""
    self._chunk_rows = chunks

  def add(self, seq: Sequence) -> None:
    """Queues a sequence."""
    bisect.insort(self.waiting, seq, key=lambda s: s.order)

  def remove(self, seq: Sequence) -> None:
    """Takes a sequence out, wherever it is; its pages go back."""
    if seq.running:
      self._vacate(seq)
    else:
      self.waiting.remove(seq)
    seq.state = State.DONE

  def schedule(self, now: float, *, idle: bool) -> StepPlan:
    """Admits, restores and plans the next step.

    Args:
      now: monotonic seconds.
      idle: no step is in flight: the device may wait for a transfer.

    Returns:
      The plan; what it holds counts as dispatched from here on.
    """
    self._admit(now)
    decode = self._decode()
    rows = sum(1 + k for _, k in decode)
    prefill = self._prefill(max(self._config.max_num_batched_tokens - rows, 8))
    self._restore(idle=idle and not (decode or prefill))
    if not (decode or prefill):
      prefill = self._prefill(self._config.max_num_batched_tokens)
    # Prompts may have sent a planned request back for its pages.
    decode = [(s, k) for s, k in decode if s.running]
    return StepPlan(tuple(decode), tuple(prefill))

  def _admit(self, now: float) -> None:
    share = self._config.planned_share
    while self.waiting:
      seq = next((s for s in self.waiting if not s.in_flight), None)
      if seq is None:
        return
      tried = (seq, self._store.unplanned, len(self._slots))
      if tried == self._blocked:
        return
      hit = self._fitting(seq)
      if hit is None:
        self._blocked = tried
        return
      self._blocked = None
      self.waiting.remove(seq)
      seq.slot = self._slots.pop()
      self._store.attach(seq, hit, share)
      seq.times.setdefault('scheduled', now)
      seq.state = State.RESTORING if seq.restores else State.PREFILL
      if seq.state is State.PREFILL:
        seq.admitted = True
      self.running.append(seq)

  def _fitting(self, seq: Sequence) -> Hit | None:
    """The cached part of a sequence, once a slot and pages are there.

    Less important requests are sent back, if that is enough.
    """
    share = self._config.planned_share
    others = [
      s for s in self.running if s.request.priority > seq.request.priority
    ]
    hit = self._store.find(seq)
    if self._store.shortage(seq, hit, share) > 0 and hit.source is not None:
      hit = hit.without_copy()
    short = self._store.shortage(seq, hit, share)
    if self._slots and short <= 0:
      return hit
    # Planned pages are an upper bound of what sending all of them back frees.
    if not others or short > sum(s.planned for s in others):
      return None
    while not self._slots or self._store.shortage(seq, hit, share) > 0:
      others = [s for s in others if s.running]
      if not others:
        return None
      self.preempt(max(others, key=lambda s: s.order))
      hit = self._store.find(seq)
      if self._store.shortage(seq, hit, share) > 0:
        hit = hit.without_copy()
    return hit

  def preempt(self, seq: Sequence) -> None:
    """Sends a running sequence back to the queue; its pages stay cached."""
    self._vacate(seq)
    seq.state = State.WAITING
    self.preemptions += 1
    self.add(seq)

  def _vacate(self, seq: Sequence) -> None:
    self._store.release(seq)
    self._slots.append(seq.slot)
    seq.slot = -1
    self.running.remove(seq)

  def _restore(self, *, idle: bool) -> None:
    """Moves pages of restoring sequences on; waits only if nothing runs."""
    wait = idle or self._config.wait_for_restores
    for seq in [s for s in self.running if s.state is State.RESTORING]:
      if self._store.restore(seq, self._config.restore_window, wait=wait):
        seq.state = State.PREFILL
        seq.admitted = True

  def _decode(self) -> list[tuple[Sequence, int]]:
    ready = [s for s in self.running if s.state is State.DECODE]
    planned = []
    for seq in ready:
      if not seq.running or seq.state is not State.DECODE:
        continue  # sent back for the pages of one before it
      # Every step in flight brings at least one token.
      if len(seq.ids) + seq.in_flight >= seq.limit:
        continue
      if seq.request.token_filter is not None and seq.in_flight:
        continue
      drafts = min(seq.drafts, seq.limit - len(seq.ids) - seq.in_flight - 1)
      longest = min(len(seq.ids) + seq.ahead + drafts, seq.limit)
      if self._make_room(seq, longest):
        planned.append((seq, drafts))
    return [(s, k) for s, k in planned if s.running]

  def _make_room(self, seq: Sequence, tokens: int) -> bool:
    """Grows a sequence; the least important one goes back if need be."""
    while not self._store.grow(seq, tokens):
      last = max(self.running, key=lambda s: s.order)
      self.preempt(last)
      if last is seq:
        return False
    return True

  def _prefill(self, rows: int) -> list[Chunk]:
    ready = [s for s in self.running if s.state is State.PREFILL]
    if not ready:
      return []
    longest = cdiv(max(len(s.ids) for s in ready), PAGE)
    context = Buckets.fit(self._buckets.blocks, longest)
    rows = min(rows, self._chunk_rows[context])
    best = min(s.request.priority for s in ready)
    first = sorted(
      (s for s in ready if s.request.priority == best), key=lambda s: s.arrival
    )
    short = sorted(ready, key=lambda s: (s.request.priority, self._left(s)))
    share = {first[0]: cdiv(rows, 2)}
    # The other half, then what is left, goes by the fewest rows.
    taken: dict[Sequence, int] = {}
    for limits in (share, dict.fromkeys(short, rows)):
      for seq, most in limits.items():
        left = self._left(seq) - taken.get(seq, 0)
        count = min(left, most, rows - sum(taken.values()))
        if count > 0:
          taken[seq] = taken.get(seq, 0) + count
    return self._chunks(taken)

  def _left(self, seq: Sequence) -> int:
    return len(seq.ids) - seq.computed

  def _chunks(self, taken: dict[Sequence, int]) -> list[Chunk]:
    chunks, finishing = [], 0
    for seq, count in taken.items():
      if seq.state is not State.PREFILL:
        continue  # sent back for the pages of one before it
      last = count == self._left(seq)
      if last and finishing == self._buckets.finishing:
        count, last = count - 1, False
        if not count:
          continue
      if not self._make_room(seq, seq.computed + count):
        continue
      finishing += last
      chunks.append(Chunk(seq, seq.computed, count, last))
    return [c for c in chunks if c.seq.running]
