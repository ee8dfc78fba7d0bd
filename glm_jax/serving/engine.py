"""The engine: requests in, tokens out, one step at a time.

A step is planned, dispatched, and only then is the step before it read, so
the device never waits for the host. Requests whose tokens are not known yet
are planned by what they may become at most; the device itself stops them at
their limit or at an eos. The host's work in a step depends on the requests
in it and on the pages that changed, not on the context.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any

from glm_jax.model import Model
from glm_jax.plan import LocalPlan
from glm_jax.serving.config import EngineConfig, buckets
from glm_jax.serving.disk_tier import DiskTier
from glm_jax.serving.filters import FilterError, propose
from glm_jax.serving.host_tier import HostTier
from glm_jax.serving.intake import Intake
from glm_jax.serving.request import (
  FinishReason,
  InvalidRequest,
  Output,
  QueueFull,
  Request,
  TokenLogprob,
)
from glm_jax.serving.runner import Runner
from glm_jax.serving.scheduler import Scheduler, StepPlan
from glm_jax.serving.sequence import Sequence, State
from glm_jax.serving.steps import StepResult
from glm_jax.serving.store import PageStore
from glm_jax.serving.tally import Tally
from glm_jax.serving.tuning import Tuning
from pallas_kernels.tiling import cdiv


class Engine:
  """See `request.EngineCore` for the interface; one thread only.

  Attributes:
    config: what it was made with.
    runner: the device's side.
    host: the host tier, or None.
    disk: the disk tier, or None.
    store: the pages.
    scheduler: queues and slots.
    vocab_size: ids are below it.
    propose: `filters.propose`, or what stands for it over several processes.
  """

  def __init__(
    self,
    model: Model,
    config: EngineConfig,
    plan: LocalPlan | None = None,
    *,
    runner: Runner | None = None,
  ):
    limit = model.config.max_position_embeddings
    if config.max_model_len > limit:
      raise ValueError(
        f'max_model_len={config.max_model_len} exceeds the model window of '
        f'{limit}'
      )
    self.config = config
    self.runner = runner or Runner(model, config, plan or LocalPlan())
    self.disk, self.host = self._tiers(config)
    self.store = PageStore(
      config.num_pages,
      self.runner,
      root=self.runner.root if self.disk is not None else b'root',
      tier=self.host,
      with_drafter=config.most_drafts > 0,
      caching=config.enable_prefix_caching,
      debug=config.debug,
    )
    self.scheduler = Scheduler(
      config, buckets(config), self.store, self.runner.chunks
    )
    eos = config.eos_token_ids
    eos = model.config.eos_token_ids if eos is None else eos
    self.vocab_size = model.config.vocab_size
    self._intake = Intake(config, model.config.vocab_size, eos)
    self.propose = propose
    self._words = cdiv(model.config.vocab_size, 32)
    self._live: dict[str, Sequence] = {}
    self._flying: collections.deque[tuple[StepPlan, StepResult]] = (
      collections.deque()
    )
    self._outputs: list[Output] = []
    self._arrivals = 0
    self._draining = False
    self._tally = Tally(config.most_drafts)

  def _tiers(self, config: EngineConfig):
    """The disk and the host tier; None for those that are off."""
    runner, disk = self.runner, None
    if not config.host_cache_bytes:
      return None, None
    if config.disk_cache_dir is not None:
      disk = DiskTier(
        config.disk_cache_dir,
        runner.root,
        config.disk_cache_bytes,
        runner.to_device,
      )
    host = HostTier(
      config.host_cache_bytes,
      runner.record_bytes,
      runner.to_device,
      pinned=runner.pinned,
      checksums=config.debug,
      below=disk,
    )
    return disk, host

  # The interface.

  def submit(self, request: Request) -> None:
    """See `request.EngineCore`."""
    if self._draining:
      raise QueueFull('the engine shuts down', 30.0, draining=True)
    if request.request_id in self._live:
      raise InvalidRequest(f'request_id={request.request_id!r} is in use')
    seq = self._intake.sequence(request, self._arrivals + 1)
    if len(self.scheduler.waiting) >= self.config.max_queue:
      waiting = len(self.scheduler.waiting)
      raise QueueFull(
        f'{waiting} requests wait already', self._tally.wait_estimate(waiting)
      )
    self._arrivals += 1
    self._live[request.request_id] = seq
    self.scheduler.add(seq)

  def abort(self, request_id: str) -> bool:
    """See `request.EngineCore`."""
    seq = self._live.get(request_id)
    if seq is None:
      return False
    self._finish(seq, 'abort')
    return True

  @property
  def steps_in_flight(self) -> int:
    """Steps dispatched whose tokens are not read."""
    return len(self._flying)

  def has_work(self) -> bool:
    """See `request.EngineCore`."""
    return bool(self._live or self._flying or self._outputs)

  def step(self, now: float | None = None) -> list[Output]:
    """See `request.EngineCore`; `now` replaces this process's clock."""
    now = time.monotonic() if now is None else now
    self._expire(now)
    if self.host is not None:
      self.host.poll()
    plan = self.scheduler.schedule(now, idle=not self._flying)
    if plan:
      self._dispatch(plan)
    elif not self._flying:
      self.store.offload(self.config.restore_window)
    ahead = self.config.steps_ahead if plan else 0
    while len(self._flying) > ahead:
      self._read(*self._flying.popleft())
      if not plan:
        break  # what was read may let others run
    outputs, self._outputs = self._outputs, []
    return outputs

  def flush_cache(self) -> bool:
    """See `request.EngineCore`."""
    self.store.flush()
    return not self._live

  def drain(self) -> None:
    """See `request.EngineCore`."""
    self._draining = True

  def close(self) -> None:
    """Keeps every cached page on disk, where there is a disk tier; waits."""
    self.drain()
    if self.disk is None:
      return
    self.store.offload(self.config.num_pages, replace=True)
    self.host.sink()
    self.disk.close()

  def tune(
    self, path: str | None = None, candidates=(), saved: Tuning | None = None
  ) -> Tuning:
    """Chooses how each context range runs; before `warm_up`.

    See `runner.Runner.tune`.
    """
    chosen = self.runner.tune(path, candidates, saved)
    self.scheduler.set_chunks(self.runner.chunks)
    return chosen

  def compile(self) -> None:
    """Compiles every step, and runs none yet."""
    self.runner.compile()

  def warm_up(self) -> int:
    """Compiles every shape; returns how many."""
    return self.runner.warm_up()

  def stats(self) -> dict[str, Any]:
    """Counts since the start, and how things stand.

    Returns:
      'requests': waiting, running, finished by reason; 'tokens': prompt and
      generation; 'pages': used, idle, free, total; 'prefix': see
      `store.PageStore.counts`; 'host' and 'disk': bytes and counts of a
      tier, or None; 'drafts': rounds, drafted and accepted by place;
      'steps', 'rows', 'preemptions', 'corrupted', 'in_flight',
      'page_tokens'.
    """
    return self._tally.report(self)

  # Requests.

  def _expire(self, now: float) -> None:
    late = [
      seq
      for seq in self._live.values()
      if seq.request.deadline is not None and now >= seq.request.deadline
    ]
    for seq in late:
      self._finish(seq, 'deadline')

  def _finish(
    self,
    seq: Sequence,
    reason: FinishReason,
    *,
    new: tuple[int, ...] = (),
    logprobs=None,
    error: str | None = None,
  ) -> None:
    """Ends a sequence; everything that it holds goes back now."""
    self.scheduler.remove(seq)
    del self._live[seq.request.request_id]
    self._tally.finished(reason)
    self._emit(seq, new, logprobs, reason, error)

  def _emit(self, seq, new, logprobs, reason=None, error=None) -> None:
    self._outputs.append(
      Output(
        request_id=seq.request.request_id,
        new_ids=new,
        logprobs=logprobs,
        finished=reason is not None,
        finish_reason=reason,
        prompt_tokens=seq.prompt_tokens,
        cached_tokens=seq.cached_tokens,
        drafted=tuple(seq.drafted),
        accepted=tuple(seq.accepted),
        rounds=seq.rounds,
        error=error,
        queued_seconds=seq.queued_seconds,
      )
    )

  # Steps.

  def _dispatch(self, plan: StepPlan) -> None:
    plan, proposals = self._filter(plan)
    if not plan:
      return
    self.store.flush_changes()
    result = self.runner.dispatch(plan, proposals)
    self._flying.append((plan, result))
    for seq, drafts in plan.decode:
      seq.in_flight += 1
      seq.ahead += drafts + 1
    for chunk in plan.prefill:
      seq = chunk.seq
      seq.computed += chunk.count
      self.store.register(seq)
      if chunk.last:
        seq.state = State.DECODE
        seq.in_flight += 1
        seq.ahead += 1
        self._tally.prompt(seq)

  def _filter(self, plan: StepPlan):
    """Proposals of filtered sequences; ends those whose filter fails."""
    proposals = {}
    failed = set()
    for seq, drafts in [
      *plan.decode,
      *((c.seq, 0) for c in plan.prefill if c.last),
    ]:
      if seq.request.token_filter is None:
        continue
      try:
        proposals[seq] = self.propose(seq, drafts, self._words)
      except FilterError as error:
        failed.add(seq)
        self._finish(seq, 'error', error=str(error))
    if not proposals and not failed:
      return plan, proposals
    decode = tuple(
      (s, len(proposals[s][0]) if s in proposals else k)
      for s, k in plan.decode
      if s not in failed
    )
    prefill = tuple(c for c in plan.prefill if c.seq not in failed)
    return dataclasses.replace(plan, decode=decode, prefill=prefill), proposals

  def _read(self, plan: StepPlan, result: StepResult) -> None:
    """Takes the tokens of a dispatched step; waits for them."""
    wanted = any(s.request.sampling.logprobs is not None for s in plan.drawing)
    result = self.runner.read(result, wanted)
    counts, tokens = result.count.tolist(), result.tokens.tolist()
    ended, bad = result.ended.tolist(), result.bad.tolist()
    drafted, accepted = result.drafted.tolist(), result.accepted.tolist()
    for i, (seq, drafts) in enumerate(plan.decode):
      seq.in_flight -= 1
      seq.ahead -= drafts + 1
      if seq.state is State.DONE or not counts[i]:
        continue
      if drafted[i]:
        self._tally.round(seq, drafted[i], accepted[i])
      row = i * result.tokens.shape[1]
      self._take(seq, tokens[i][: counts[i]], ended[i], bad[i], result, row)
    rows = result.tokens.size
    ends = [c.seq for c in plan.prefill if c.last]
    for i, seq in enumerate(ends):
      seq.in_flight -= 1
      seq.ahead -= 1
      if seq.state is State.DONE:
        continue
      self._take(
        seq,
        [int(result.first[i])],
        bool(result.first_ended[i]),
        bool(result.first_bad[i]),
        result,
        rows + i,
      )

  def _take(self, seq, new, ended, bad, result, row) -> None:
    """New tokens of one sequence."""
    if bad:
      self._tally.corrupted()
      self._finish(seq, 'error', error='the model gave NaN logits')
      return
    seq.ids += new
    seq.newest, seq.settled = len(new), ended
    self._tally.tokens(len(new))
    logprobs = None
    if seq.request.sampling.logprobs is not None:
      logprobs = _logprobs(
        result.logprobs, row, new, seq.request.sampling.logprobs
      )
    if seq.running:
      self.store.register(seq)
    if not ended:
      self._emit(seq, tuple(new), logprobs)
      return
    reason = 'stop' if new[-1] in seq.eos else 'length'
    self._finish(seq, reason, new=tuple(new), logprobs=logprobs)


def _logprobs(values, row: int, new: list[int], top: int):
  """Log probabilities of consecutive rows."""
  out = []
  for i, token in enumerate(new, row):
    ids, best = values.top_ids[i, :top], values.top[i, :top]
    pairs = tuple(zip(ids.tolist(), best.tolist()))
    out.append(TokenLogprob(token, float(values.chosen[i]), pairs))
  return tuple(out)
