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

import numpy as np

from glm_jax.model import Model
from glm_jax.plan import LocalPlan
from glm_jax.serving.config import EngineConfig, buckets
from glm_jax.serving.filters import FilterError, propose
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
from glm_jax.serving.steps import MAX_STOP_IDS, StepResult
from glm_jax.serving.store import PageStore
from pallas_kernels.tiling import cdiv


class Engine:
  """See `request.EngineCore` for the interface; one thread only.

  Attributes:
    config: what it was made with.
    runner: the device's side.
    store: the pages.
    scheduler: queues and slots.
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
    self._with_drafter = config.most_drafts > 0
    self.store = PageStore(
      config.num_pages,
      self.runner,
      with_drafter=self._with_drafter,
      caching=config.enable_prefix_caching,
      debug=config.debug,
    )
    self.scheduler = Scheduler(config, buckets(config), self.store)
    eos = config.eos_token_ids
    self._eos = model.config.eos_token_ids if eos is None else eos
    self._vocab = model.config.vocab_size
    self._words = cdiv(self._vocab, 32)
    self._live: dict[str, Sequence] = {}
    self._flying: collections.deque[tuple[StepPlan, StepResult]] = (
      collections.deque()
    )
    self._outputs: list[Output] = []
    self._arrivals = 0
    self._draining = False
    self._finished = dict.fromkeys(
      ('stop', 'length', 'abort', 'deadline', 'error'), 0
    )
    self._tokens = {'prompt': 0, 'generation': 0}
    self._pace = 1.0  # seconds between finished requests, smoothed
    self._last_finish: float | None = None

  # The interface.

  def submit(self, request: Request) -> None:
    """See `request.EngineCore`."""
    if self._draining:
      raise QueueFull('the engine shuts down', 30.0, draining=True)
    seq = self._sequence(request)
    if len(self.scheduler.waiting) >= self.config.max_queue:
      wait = min(max(self._pace * len(self.scheduler.waiting), 1.0), 300.0)
      raise QueueFull(
        f'{len(self.scheduler.waiting)} requests wait already', wait
      )
    self._live[request.request_id] = seq
    self.scheduler.add(seq)

  def abort(self, request_id: str) -> bool:
    """See `request.EngineCore`."""
    seq = self._live.get(request_id)
    if seq is None:
      return False
    self._finish(seq, 'abort')
    return True

  def has_work(self) -> bool:
    """See `request.EngineCore`."""
    return bool(self._live or self._flying or self._outputs)

  def step(self) -> list[Output]:
    """See `request.EngineCore`."""
    now = time.monotonic()
    self._expire(now)
    plan = self.scheduler.schedule(now)
    if plan:
      self._dispatch(plan)
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

  def warm_up(self) -> int:
    """Compiles every shape; returns how many."""
    return self.runner.warm_up()

  def stats(self) -> dict[str, Any]:
    """Counts since the start, and how things stand.

    Returns:
      'requests': waiting, running, finished by reason; 'tokens': prompt and
      generation; 'pages': used, idle, free, total; 'prefix': see
      `store.PageStore.counts`; 'steps', 'rows', 'preemptions', 'in_flight'.
    """
    pool = self.store.pool
    return {
      'requests': {
        'waiting': len(self.scheduler.waiting),
        'running': len(self.scheduler.running),
        'finished': dict(self._finished),
      },
      'tokens': dict(self._tokens),
      'pages': {
        'used': pool.num_used,
        'idle': pool.num_idle,
        'free': pool.num_free,
        'total': pool.num_pages,
      },
      'prefix': dict(self.store.counts),
      'steps': self.runner.steps,
      'rows': dict(self.runner.rows),
      'preemptions': self.scheduler.preemptions,
      'in_flight': len(self._flying),
    }

  # Requests.

  def _sequence(self, request: Request) -> Sequence:
    """Checks a request."""
    p, n = request.sampling, len(request.prompt_ids)
    if request.request_id in self._live:
      raise InvalidRequest(f'request_id={request.request_id!r} is in use')
    if not n:
      raise InvalidRequest('the prompt is empty: give at least one token')
    window = self.config.max_model_len
    new = window - n if p.max_new_tokens is None else p.max_new_tokens
    if new < 1 or n + new > window:
      raise InvalidRequest(
        f'{n} prompt tokens and max_new_tokens={p.max_new_tokens} exceed the '
        f'window of {window}: shorten one of them'
      )
    pages = cdiv(n + new, 64)
    if pages > self.config.num_pages:
      raise InvalidRequest(
        f'{n} prompt tokens and {new} new ones need {pages} cache pages; the '
        f'engine has {self.config.num_pages}'
      )
    ids = np.asarray(request.prompt_ids, np.int64)
    bad = (ids < 0) | (ids >= self._vocab)
    if bad.any():
      raise InvalidRequest(
        f'token id {ids[bad.argmax()]} in the prompt: ids are 0 to '
        f'{self._vocab - 1}'
      )
    drafts = p.num_speculative_tokens
    drafts = self.config.num_speculative_tokens if drafts is None else drafts
    if drafts > self.config.most_drafts:
      raise InvalidRequest(
        f'num_speculative_tokens={drafts} exceeds the engine limit of '
        f'{self.config.most_drafts}'
      )
    eos = frozenset(p.stop_token_ids) | (
      frozenset() if p.ignore_eos else frozenset(self._eos)
    )
    if len(eos) > MAX_STOP_IDS:
      raise InvalidRequest(
        f'{len(eos)} stop ids: at most {MAX_STOP_IDS}, the eos ids included'
      )
    self._arrivals += 1
    seed = self.config.seed + self._arrivals if p.seed is None else p.seed
    return Sequence(
      request=request,
      arrival=self._arrivals,
      limit=n + new,
      drafts=drafts,
      eos=eos,
      seed=seed % 2**32,
      ids=ids.tolist(),
      drafted=[0] * self.config.most_drafts,
      accepted=[0] * self.config.most_drafts,
      times={'arrival': time.monotonic()},
    )

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
    self._finished[reason] += 1
    now = time.monotonic()
    if self._last_finish is not None:
      self._pace += 0.1 * (now - self._last_finish - self._pace)
    self._last_finish = now
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
        self._tokens['prompt'] += seq.prompt_tokens

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
        proposals[seq] = propose(seq, drafts, self._words)
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
        seq.rounds += 1
        for j in range(drafted[i]):
          seq.drafted[j] += 1
        for j in range(accepted[i]):
          seq.accepted[j] += 1
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
      self._finish(seq, 'error', error='the model gave NaN logits')
      return
    seq.ids += new
    seq.newest, seq.settled = len(new), ended
    self._tokens['generation'] += len(new)
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
