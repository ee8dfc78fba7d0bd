"""One request on its way through the engine: host-side state only."""

from __future__ import annotations

import collections
import dataclasses
import enum

import numpy as np

from glm_jax.serving.request import Request
from pallas_kernels.tiling import PAGE, cdiv


class State(enum.Enum):
  """Where a sequence is; in the middle three it holds pages and a slot."""

  WAITING = 'waiting'
  RESTORING = 'restoring'
  PREFILL = 'prefill'
  DECODE = 'decode'
  DONE = 'done'


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
  """A request and how far it has come.

  Attributes:
    request: as submitted.
    arrival: number of its submission; the older goes first.
    limit: tokens, prompt and new, at which it is finished.
    drafts: K, drafts of a round.
    eos: ids that finish it.
    seed: of its noise.
    ids: prompt and new tokens known to the host.
    state: where it is.
    slot: its row of the device's state; -1 without one.
    pages: physical pages in order.
    keys: chained hashes of `ids`' full pages, as far as computed.
    registered: leading pages that the prefix index has seen.
    computed: prompt rows dispatched.
    draft_from: first row without the drafter's part.
    in_flight: dispatched steps whose tokens of this sequence are not read.
    ahead: tokens that those steps add at most.
    settled: it has ended on the device; steps in flight change nothing.
    newest: tokens that the last round read added: without drafter rows.
    planned: pages that its admission counted on.
    restores: (block, key) that a lower tier still has to bring.
    transfers: (block, key, transfer) under way.
    cached_tokens: prompt tokens found in the cache at first admission.
    admitted: it has been admitted before.
    drafted: drafts proposed, a count for each place.
    accepted: of them accepted.
    rounds: rounds with a draft.
    times: monotonic seconds of arrival and first schedule.
  """

  request: Request
  arrival: int
  limit: int
  drafts: int
  eos: frozenset[int]
  seed: int
  ids: list[int]
  state: State = State.WAITING
  slot: int = -1
  pages: list[int] = dataclasses.field(default_factory=list)
  keys: list[bytes] = dataclasses.field(default_factory=list)
  registered: int = 0
  computed: int = 0
  draft_from: int = 0
  in_flight: int = 0
  ahead: int = 0
  settled: bool = False
  newest: int = 1
  planned: int = 0
  restores: collections.deque = dataclasses.field(
    default_factory=collections.deque
  )
  transfers: list = dataclasses.field(default_factory=list)
  cached_tokens: int = 0
  admitted: bool = False
  drafted: list[int] = dataclasses.field(default_factory=list)
  accepted: list[int] = dataclasses.field(default_factory=list)
  rounds: int = 0
  times: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def prompt_tokens(self) -> int:
    """Tokens of the prompt."""
    return len(self.request.prompt_ids)

  @property
  def queued_seconds(self) -> float | None:
    """Seconds until it was first scheduled; None while it waits."""
    scheduled = self.times.get('scheduled')
    return None if scheduled is None else scheduled - self.times['arrival']

  @property
  def order(self) -> tuple[int, int]:
    """Smaller goes first."""
    return self.request.priority, self.arrival

  @property
  def running(self) -> bool:
    """It holds a slot."""
    return self.slot >= 0

  def array(self) -> np.ndarray:
    """[n] int32 `ids`; a new array, never one that a step may read."""
    return np.array(self.ids, np.int32)

  def plan_pages(self, share: float) -> int:
    """Pages that it needs when `share` of its new tokens are counted."""
    new = self.limit - len(self.ids)
    return cdiv(len(self.ids) + int(np.ceil(new * share)), PAGE)

  def complete(self, with_drafter: bool) -> int:
    """Tokens all of whose rows, the drafter's included, are dispatched."""
    if self.state is State.DECODE:
      pending = self.newest if with_drafter else 1
      return len(self.ids) - pending
    return self.computed if self.state is State.PREFILL else 0
