"""The device's side of the engine: state, compiled steps, page moves.

Every call here dispatches and returns; nothing but `read` waits. Arrays that
go in are made fresh for each step and never written again, since a step may
read them after the call (known fault 45).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence as Seq

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from glm_jax.cache import cache_dtype, init_cache
from glm_jax.compiling import StepJit
from glm_jax.drafting import DraftOptions, drafter
from glm_jax.model import Model
from glm_jax.plan import LocalPlan
from glm_jax.serving import placement, records, tuning
from glm_jax.serving.config import Buckets, EngineConfig, buckets
from glm_jax.serving.inputs import InputBuilder
from glm_jax.serving.pages import GROUP, groups
from glm_jax.serving.scheduler import StepPlan
from glm_jax.serving.steps import (
  StepInputs,
  StepResult,
  engine_step,
  init_state,
)
from glm_jax.serving.tuning import Tuning
from pallas_kernels.tiling import PAGE, cdiv

TABLE_ENTRIES = 64  # changes of the page table in one call


@functools.cache
def _compiled_step(treedef):
  """The jitted step of models of one structure, shared by all engines.

  The model is handed over as a list: flattening it at each call would cost
  more host time than everything else of a step.
  """

  def step(leaves, state, table, inputs, *, beside, **static):
    model = jax.tree.unflatten(treedef, leaves)
    state, result = engine_step(model, state, table, inputs, **static)
    if beside is not None:
      cache, small = state.cache, dataclasses.replace(state, cache=None)
      small, result = jax.lax.with_sharding_constraint((small, result), beside)
      state = dataclasses.replace(small, cache=cache)
    return state, result

  return StepJit(
    step,
    static_argnames=('plan', 'blocks', 'with_drafter', 'options', 'beside'),
    donate_argnames='state',
  )


_donating = functools.partial(
  jax.jit, donate_argnames='cache', static_argnames='plan'
)
_insert = _donating(records.insert)
_copy = _donating(records.copy)
_poison = _donating(records.poison)
_set_row = jax.jit(
  lambda table, slot, row: table.at[slot].set(row), donate_argnums=0
)
_set_entries = jax.jit(
  lambda table, at: table.at[at[0], at[1]].set(at[2], mode='drop'),
  donate_argnums=0,
)


@jax.jit
def _first_numbers(leaves):
  """A few numbers of every weight: enough to tell checkpoints apart."""
  return [a[(*(0,) * (a.ndim - 1), slice(8))] for a in leaves if a.ndim]


@functools.cache
def _extract(sharding):
  """Records of pages, written to where `sharding` says."""
  return jax.jit(
    records.extract, out_shardings=sharding, static_argnames='plan'
  )


class Runner:
  """State and compiled functions of one engine.

  Attributes:
    buckets: the shapes that steps are padded to.
    with_drafter: the drafter's rows are kept.
    chunks: prompt rows of a step at most, by pages a request.
    record_bytes: bytes of one page's record.
    pinned: records lie in pinned host memory, not in numpy arrays.
    steps: steps dispatched.
    rows: rows dispatched, padding not counted, of prompts and of decoding.
  """

  def __init__(
    self,
    model: Model,
    config: EngineConfig,
    plan: LocalPlan,
    *,
    pinned: bool = True,
  ):
    self.buckets: Buckets = buckets(config)
    self.with_drafter = config.most_drafts > 0
    if self.with_drafter:
      drafter(model)
    self.steps = 0
    self.rows = {'prefill': 0, 'decode': 0}
    dtype = config.kv_cache_dtype
    if dtype == 'auto' and model.embed.dtype == jnp.float32:
      dtype = 'f32'
    cache = init_cache(model.config, config.num_pages, dtype=dtype, plan=plan)
    self.record_bytes = records.record_bytes(cache, plan)
    host = placement.host_sharding(cache.index_keys) if pinned else None
    self.pinned = host is not None
    self._root: bytes | None = None
    self._describe = model.config, cache_dtype(model.config, dtype)
    slots = config.max_num_seqs
    self._layout = plan  # candidates of tuning keep where pages are
    # Committed to where they live: page moves are, and jit tells them apart.
    small = placement.beside(cache.index_keys.sharding)
    state = init_state(model, cache, slots, config.most_drafts)
    cache = jax.tree.map(lambda a: jax.device_put(a, a.sharding), cache)
    state = placement.put(dataclasses.replace(state, cache=None), small)
    self._state = dataclasses.replace(state, cache=cache)
    table = jnp.full((slots + 1, config.max_blocks), -1, jnp.int32)
    self._table = placement.put(table, small)
    self._small = small
    many = isinstance(small, jax.sharding.NamedSharding)
    self._beside = small if many else None
    self._extract = _extract(small if host is None else host)
    # By pages a request, without and with prompt rows.
    self._plans = dict.fromkeys(self.buckets.blocks, (plan, plan))
    self.chunks = dict.fromkeys(self.buckets.blocks, self.buckets.prefill[-1])
    share = model.config.mtp.share_index_and_kv
    self._options = DraftOptions(share, share)
    self._leaves, treedef = jax.tree.flatten(model)
    self._step = _compiled_step(treedef)
    self._num_slots = slots
    self._debug = config.debug
    words = cdiv(model.config.vocab_size, 32)
    place = lambda a: placement.put(a, small) if many else jnp.asarray(a)
    self._inputs = InputBuilder(slots, self.buckets.finishing, words, place)

  @property
  def root(self) -> bytes:
    """What rows depend on besides the tokens: config, dtype, weights."""
    if self._root is None:
      seen = hashlib.blake2b(repr(self._describe).encode(), digest_size=16)
      for first in jax.device_get(_first_numbers(self._leaves)):
        seen.update(np.ascontiguousarray(first).tobytes())
      self._root = seen.digest()
    return self._root

  @property
  def cache(self):
    """The pools as they stand after everything dispatched."""
    return self._state.cache

  def compilations(self) -> int:
    """Executables behind this engine's calls; constant once warm."""
    calls = (self._step, self._extract, _insert, _copy, _set_row, _set_entries)
    return sum(call._cache_size() for call in calls)

  def _shapes(self):
    """(inputs, pages) of an empty step of every shape."""
    for prefill, batch, drafts, blocks in self.buckets.all():
      yield self._inputs.build(StepPlan(), prefill, batch, drafts), blocks

  def compile(self) -> None:
    """Compiles every step and runs none; `warm_up` then finds them compiled.

    Processes that compile at different paces meet after this: a collective
    whose peer still compiles may give up waiting.
    """
    for inputs, blocks in self._shapes():
      arguments, static = self._call(inputs, blocks)
      self._step.lower(*arguments, **static).compile()

  def warm_up(self) -> int:
    """Runs every shape, which compiles what is not; returns how many."""
    shapes = list(self._shapes())
    for inputs, blocks in shapes:
      result = self._run(inputs, blocks)
    for pages in ([0], [0] * GROUP):
      self.insert(pages, self.to_device(self.extract(pages)))
    self.copy(0, 0)
    if self._debug:
      self.poison(0)
    self.set_row(self._num_slots, [])
    self.set_entries([(self._num_slots, 0, -1)])
    jax.block_until_ready((result, self._state, self._table))
    return len(shapes)

  def saved_tuning(
    self, path: str | None, candidates: Seq[LocalPlan] = ()
  ) -> Tuning | None:
    """The choice saved at `path`; None without one.

    Raises:
      ValueError: it is of another device, model or engine.
    """
    if path is None or not epath.Path(path).exists():
      return None
    return tuning.load(path, self._tuning_key(self._candidates(candidates)))

  def tune(
    self,
    path: str | None = None,
    candidates: Seq[LocalPlan] = (),
    saved: Tuning | None = None,
  ) -> Tuning:
    """Chooses how each context range runs; before the first request.

    Args:
      path: of a saved choice; read if it is there, written if not.
      candidates: plans to choose from; () for variants of the engine's own.
      saved: a choice that was read already.

    Returns:
      The choice, which is in force.

    Raises:
      ValueError: the file is of another device, model or engine.
    """
    candidates = self._candidates(candidates)
    chosen = saved or self.saved_tuning(path, candidates)
    if chosen is None:
      key = self._tuning_key(candidates)
      steps = functools.partial(self._time_step, candidates)
      chosen = tuning.tune(key, self.buckets, len(candidates), steps)
      if path is not None:
        chosen.save(path)
    self._plans = {
      n: (candidates[i], candidates[chosen.prompt_plans[n]])
      for n, i in chosen.plans.items()
    }
    self.chunks = dict(chosen.chunks)
    return chosen

  def compare_tuning(
    self, chosen: Tuning, candidates: Seq[LocalPlan] = ()
  ) -> list[tuning.Compared]:
    """A choice of `tune` beside every fixed one; before the first request."""
    steps = functools.partial(self._time_step, self._candidates(candidates))
    return tuning.compare(chosen, self.buckets, steps)

  def _candidates(self, given: Seq[LocalPlan]) -> tuple[LocalPlan, ...]:
    own = self._layout
    return tuple(given) or tuning.default_candidates(own)

  def _tuning_key(self, candidates: Seq[LocalPlan]) -> str:
    return tuning.tuning_key((self._describe, self.buckets), candidates)

  def _time_step(self, candidates, blocks, rows, plan) -> list[float]:
    """Times steps at the end of a context range, on pages nobody uses yet.

    Slot 0 stands for every request: its rows see a full context, whose pages
    are all page 0.
    """
    b = self.buckets
    self.set_row(0, [0] * blocks)
    inputs = self._inputs.build(StepPlan(), rows, b.batch[-1], b.drafts[0])
    last = blocks * PAGE - rows - 2
    at = np.arange(last, last + rows, dtype=np.int32)
    inputs = dataclasses.replace(inputs, slot=np.zeros(rows, np.int32), pos=at)
    if not rows:
      inputs = dataclasses.replace(
        inputs, slots=np.zeros(b.batch[-1], np.int32)
      )
    before, self._plans = self._plans, {blocks: (candidates[plan],) * 2}
    put = lambda a, value: jax.device_put(a.at[0].set(value), self._small)
    try:

      def run():
        state = self._state
        self._state = dataclasses.replace(
          state,
          lengths=put(state.lengths, blocks * PAGE - 1),
          limits=put(state.limits, 1 << 30),
          done=put(state.done, False),
        )
        return self._run(inputs, blocks)

      return tuning.timed(run)
    finally:
      self._plans = before
      state = self._state
      self._state = dataclasses.replace(state, done=put(state.done, True))
      self.set_row(0, [])

  def dispatch(self, step: StepPlan, proposals=None) -> StepResult:
    """Runs one step.

    Args:
      step: what runs.
      proposals: of sequences with a token filter, see `filters.propose`.

    Returns:
      The result, on its way to the host.
    """
    b, fit = self.buckets, Buckets.fit
    prompt = sum(c.count for c in step.prefill)
    inputs = self._inputs.build(
      step,
      fit(b.prefill, prompt),
      fit(b.batch, len(step.decode)),
      fit(b.drafts, max((k for _, k in step.decode), default=0)),
      proposals or {},
    )
    result = self._run(inputs, fit(b.blocks, step.blocks))
    self.steps += 1
    self.rows['prefill'] += prompt
    self.rows['decode'] += step.rows - prompt
    return result

  def read(self, result: StepResult, logprobs: bool) -> StepResult:
    """A result as numpy arrays; waits for the step."""
    if not logprobs:
      result = result._replace(logprobs=None)
    return jax.device_get(result)

  def _call(self, inputs: StepInputs, blocks: int):
    """Arguments of the compiled step, and those that it is compiled for."""
    static = dict(
      plan=self._plans[blocks][len(inputs.tokens) > 0],
      blocks=blocks,
      with_drafter=self.with_drafter,
      options=self._options,
      beside=self._beside,
    )
    return (self._leaves, self._state, self._table, inputs), static

  def _run(self, inputs: StepInputs, blocks: int) -> StepResult:
    arguments, static = self._call(inputs, blocks)
    self._state, result = self._step(*arguments, **static)
    for a in jax.tree.leaves(result):
      a.copy_to_host_async()
    return result

  # Page moves, in the order of the calls.

  def copy(self, source: int, target: int) -> None:
    """Copies a page."""
    self._change(_copy, np.int32(source), np.int32(target))

  def extract(self, pages: Seq[int]) -> list[records.Record]:
    """Records of pages, on their way to the host."""
    found = []
    for at in groups(len(pages)):
      some = np.array(pages[at], np.int32)
      found += self._extract(self._state.cache, some, self._layout)
    if not self.pinned:
      for part in jax.tree.leaves(found):
        part.copy_to_host_async()
    return found

  def to_device(self, moved: Seq[records.Record]) -> list[records.Record]:
    """Starts to move records from the host to the device."""
    return placement.put(list(moved), self._small)

  def insert(self, pages: Seq[int], filled: Seq[records.Record]) -> None:
    """Fills pages from records on the device."""
    for at in groups(len(pages)):
      self._change(_insert, np.array(pages[at], np.int32), list(filled[at]))

  def poison(self, page: int) -> None:
    """Fills a page with NaN."""
    self._change(_poison, np.int32(page))

  def _change(self, move, *args) -> None:
    cache = move(self._state.cache, *args, self._layout)
    self._state = dataclasses.replace(self._state, cache=cache)

  def set_row(self, slot: int, pages: Seq[int]) -> None:
    """Sets the page table of a slot."""
    row = np.full(self._table.shape[1], -1, np.int32)
    row[: len(pages)] = pages
    self._table = _set_row(self._table, np.int32(slot), row)

  def set_entries(self, entries: Seq[tuple[int, int, int]]) -> None:
    """Sets (slot, block, page) in the page table."""
    for i in range(0, len(entries), TABLE_ENTRIES):
      part = np.array(entries[i : i + TABLE_ENTRIES], np.int32).T
      at = np.full((3, TABLE_ENTRIES), self._num_slots + 1, np.int32)
      at[:, : part.shape[1]] = part
      self._table = _set_entries(self._table, at)
