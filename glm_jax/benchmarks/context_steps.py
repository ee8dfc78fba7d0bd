"""Runs and times the steps of suite `context` over one cache.

The three systems take turns on one cache: its latent rows are those that
`shared` has prefilled, to the last token of the largest context. Every step
is the one of `decoding.py` and `speculative.py`, compiled for the pages of
its context (as the server's buckets are) and with its state donated.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.benchmarks.context_plans import (
  AttentionSide,
  DensePlan,
  dense_form,
)
from glm_jax.benchmarks.context_slice import (
  Setting,
  per_layer_keys,
  per_layer_model,
  random_tokens,
)
from glm_jax.benchmarks.timing import device_kernels
from glm_jax.cache import init_cache, make_rows, read_rows
from glm_jax.compiling import StepJit
from glm_jax.decoding import DecodeState, decode_step, prefill_step
from glm_jax.model import Model, init_model, trunk
from glm_jax.plan import LocalPlan
from glm_jax.sampling import sampling_params
from glm_jax.speculative import speculative_step, start_drafting
from pallas_kernels.tiling import PAGE

_CHECK_STEPS = 8
_WAITS = 4  # for the timed steps, whose median counts


@functools.partial(StepJit, static_argnames='plan', donate_argnames='cache')
def attention_step(model: Model, cache, page_table, token, pos, *, plan):
  """A decode row through the trunk alone: (cache, hidden [1, D])."""
  rows = make_rows(jnp.zeros_like(pos), pos, page_table)
  hidden, cache, _ = trunk(model, token, cache, rows, plan)
  return cache, hidden


class Name(NamedTuple):
  """A compiled step.

  Attributes:
    system: whose.
    phase: 'prefill', 'decode', 'attention' or 'drafting'.
    context: tokens whose pages it sees.
    implementation: of the ops; '' where they choose.
  """

  system: str
  phase: str
  context: int
  implementation: str = ''


class Bench:
  """Models, the cache and compiled steps.

  Attributes:
    setting: what is measured.
    tokens: [largest context] int32 the prompt.
    cache: with the rows of all tokens prefilled so far.
    walls: seconds of each chunk of `shared`, by its first position.
  """

  def __init__(self, setting: Setting, log: Callable[[str], None]):
    self.setting, self.log = setting, log
    self.tokens = random_tokens(setting)
    make = lambda key: init_model(setting.config, key)
    self._models = {'shared': jax.jit(make)(jax.random.key(0))}
    self.compiled: dict[Name, Any] = {}
    self._ran: set[Name] = set()
    pages = setting.contexts[-1] // PAGE
    dtype = 'f32' if setting.config.dtype == 'float32' else 'auto'
    self.cache = init_cache(setting.config, pages, dtype=dtype)
    self._shapes = _shapes(self._models['shared'], self.cache)
    self._keys: dict[str, jax.Array] = {}
    self._using = 'shared'
    self._table = jnp.arange(pages, dtype=jnp.int32)[None]
    self.walls: dict[int, float] = {}

  def model(self, system: str) -> Model:
    """A system's weights; `dense` runs those of `shared`."""
    if system == 'per_layer' and system not in self._models:
      self._models[system] = per_layer_model(self._models['shared'])
    return self._models.get(system, self._models['shared'])

  @functools.cached_property
  def form(self) -> str:
    """Of dense attention."""
    return dense_form(self.setting.config, self.setting.chunk, self.log)

  def plan(self, name: Name) -> LocalPlan:
    """How a program runs; the ops choose their kernels."""
    if name.implementation:
      return LocalPlan(implementation=name.implementation)
    attention_only = name.phase == 'attention'
    if name.system != 'dense':
      return AttentionSide() if attention_only else LocalPlan()
    return DensePlan(form=self.form, attention_only=attention_only)

  def use(self, system: str) -> None:
    """Puts a system's index keys into the cache."""
    owner = 'per_layer' if system == 'per_layer' else 'shared'
    if owner == self._using:
      return
    self._keys[self._using] = self.cache.index_keys
    if owner not in self._keys:
      shared = dataclasses.replace(self.cache, index_keys=self._keys['shared'])
      self._keys[owner] = per_layer_keys(self.model('shared'), shared)
    keys = self._keys.pop(owner)
    self.cache = dataclasses.replace(self.cache, index_keys=keys)
    self._using = owner

  def table(self, context: int) -> jax.Array:
    """[1, n] its pages."""
    return self._table[:, : context // PAGE]

  def prepare(self, names: Sequence[Name]) -> None:
    """Compiles programs side by side, before anything is timed."""
    if any(name.system == 'dense' for name in names):
      self.form  # noqa: B018 (chosen once, by what runs)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      # One that fails is compiled again, and fails, where it is asked for.
      concurrent.futures.wait([pool.submit(self.compile, n) for n in names])

  def compile(self, name: Name):
    """A program, compiled ahead once."""
    if name not in self.compiled:
      start = time.perf_counter()
      step, args, options = self._program(name)
      lowered = step.lower(*args, plan=self.plan(name), **options)
      self.compiled[name] = lowered.compile()
      seconds = time.perf_counter() - start
      self.log(f'{" ".join(map(str, name))}: compiled in {seconds:.1f} s')
    return self.compiled[name]

  def _program(self, name: Name):
    """The step of a program, shapes of its arguments, and options."""
    s = self.setting
    model, cache = self._shapes[name.system]
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    table = ids(1, name.context // PAGE)
    if name.phase == 'prefill':
      args = model, cache, table, *(ids(s.chunk) for _ in range(3))
      return prefill_step, args, dict(with_drafter=s.config.mtp.num_layers > 0)
    if name.phase == 'attention':
      return attention_step, (model, cache, table, ids(1), ids(1)), {}
    state = functools.partial(self._state, context=name.context)
    if name.phase == 'decode':
      return decode_step, (model, jax.eval_shape(state, cache, table)), {}
    start = lambda m, *args: start_drafting(m, state(*args), s.drafts)
    state = jax.eval_shape(start, model, cache, table)
    return speculative_step, (model, state, ids(1, s.drafts)), {}

  def program_bytes(self, name: Name) -> int:
    """What a compiled step holds: arguments (donated ones too), temporaries."""
    found = self.compiled[name].memory_analysis()
    return found.argument_size_in_bytes + found.temp_size_in_bytes

  def chunk(
    self, system: str, first: int, implementation: str = ''
  ) -> tuple[Name, float]:
    """Prefills one chunk; a program's first call, which loads it, is repeated.

    Args:
      system: whose.
      first: its first position.
      implementation: of the ops, instead of their own choice.

    Returns:
      The program's name, and wall seconds (not of compiling it).
    """
    self.use(system)
    s, model = self.setting, self.model(system)
    pos = np.arange(first, first + s.chunk, dtype=np.int32)
    context = min(c for c in s.contexts if c >= first + s.chunk)
    args = (
      self.table(context),
      jnp.asarray(self.tokens[pos]),
      jnp.zeros(s.chunk, jnp.int32),
      jnp.asarray(pos),
    )
    name = Name(system, 'prefill', context, implementation)
    step = self.compile(name)
    for _ in range(1 if name in self._ran else 2):
      jax.block_until_ready((self.cache, args))
      start = time.perf_counter()
      self.cache = jax.block_until_ready(step(model, self.cache, *args))
      seconds = time.perf_counter() - start
    self._ran.add(name)
    return name, seconds

  def prefill(self, context: int) -> Name:
    """`shared` goes on until so many tokens are cached; the step's name."""
    s = self.setting
    for first in range(len(self.walls) * s.chunk, context, s.chunk):
      name, self.walls[first] = self.chunk('shared', first)
    return name

  def restore(self, context: int) -> None:
    """Writes the last chunk of a context's prompt again."""
    self.chunk('shared', context - self.setting.chunk)

  def decode_state(self, system: str, context: int) -> DecodeState:
    """The state before the last `room` tokens of a context."""
    self.use(system)
    table = self.table(context) + 0  # donated
    return self._state(self.cache, table, context)

  def _state(self, cache, table, context: int) -> DecodeState:
    first = context - self.setting.room
    return DecodeState(
      cache=cache,
      page_table=table,
      lengths=jnp.full(1, first + 1, jnp.int32),
      last_token=jnp.asarray(self.tokens[first : first + 1]),
      limits=jnp.full(1, context + 1, jnp.int32),
      eos=jnp.full(1, -1, jnp.int32),
      done=jnp.zeros(1, bool),
      params=sampling_params(1),
    )

  def decode(self, system: str, context: int, profile: bool) -> dict[str, Any]:
    """Plain decoding at the end of a context; seconds a token and more."""
    name = Name(system, 'decode', context)
    model, step = self.model(system), self.compile(name)
    carried = [self.decode_state(system, context)]

    def run(steps):
      for _ in range(steps):
        carried[0], logits = step(model, carried[0])
      jax.block_until_ready((carried[0], logits))

    found = self._timed(run, self.setting.steps, profile)
    self.cache = carried[0].cache
    return found | dict(program_bytes=self.program_bytes(name))

  def attention(self, system: str, context: int, profile: bool):
    """The attention side of a decode step; seconds and more."""
    self.use(system)
    name = Name(system, 'attention', context)
    model, step = self.model(system), self.compile(name)
    last = jnp.full(1, context - 1, jnp.int32)
    token = jnp.asarray(self.tokens[context - 1 : context])
    args = (self.table(context), token, last)

    def run(steps):
      for _ in range(steps):
        self.cache, hidden = step(model, self.cache, *args)
      jax.block_until_ready((self.cache, hidden))

    found = self._timed(run, self.setting.steps, profile)
    return found | dict(program_bytes=self.program_bytes(name))

  def drafting(self, system: str, context: int) -> dict[str, Any]:
    """Rounds of drafting at the end of a context."""
    s, model = self.setting, self.model(system)
    state = start_drafting(model, self.decode_state(system, context), s.drafts)
    own = jnp.full((1, s.drafts), -1, jnp.int32)
    name = Name(system, 'drafting', context)
    step = self.compile(name)
    carried, counts = [state], []

    def run(rounds):
      for _ in range(rounds):
        carried[0], done = step(model, carried[0], own)
        counts.append(done.count)
      jax.block_until_ready((carried[0], counts))

    found = self._timed(run, s.rounds, False)
    self.cache = carried[0].decode.cache
    tokens = sum(int(c[0]) for c in counts[-s.rounds :]) / s.rounds
    return found | dict(
      seconds=found['seconds'] / max(tokens, 1),
      round_us=1e6 * found['seconds'],
      tokens_a_round=tokens,
      program_bytes=self.program_bytes(name),
    )

  def _timed(self, run, steps: int, profile: bool) -> dict[str, Any]:
    """Wall seconds of one of some queued steps; busy ones if profiled."""
    run(self.setting.warm)
    each, walls = max(steps // _WAITS, 1), []
    for _ in range(steps // each):
      start = time.perf_counter()
      run(each)
      walls.append((time.perf_counter() - start) / each)
    found: dict[str, Any] = dict(
      seconds=statistics.median(walls),
      fastest_seconds=min(walls),
      slowest_seconds=max(walls),
    )
    if profile:
      kernels, launches = device_kernels(lambda: run(each), each)
      if kernels:
        top = list(kernels.items())[:12]
        found |= dict(
          busy_us=1e6 * sum(kernels.values()),
          launches=launches,
          device_kernels={name: 1e6 * t for name, t in top},
        )
    return found

  def check(self, context: int) -> dict[str, float]:
    """The kernels against plain XLA, over the cache that they have filled.

    Returns:
      Share of greedy tokens that agree, the largest error of the first
      logits over their largest magnitude, and the root mean square error of
      the last chunk's rows in the last layer over their own.
    """
    s, config = self.setting, self.setting.config
    last = jnp.arange(context - s.chunk, context, dtype=jnp.int32)
    rows = lambda: np.asarray(
      read_rows(self.cache, config.num_layers - 1, last), np.float32
    )
    self.restore(context)
    own = rows()
    own_tokens, own_logits = self._greedy(context)
    self.chunk('shared', context - s.chunk, 'xla')
    other = rows()
    other_tokens, other_logits = self._greedy(context, 'xla')
    self.restore(context)
    error = np.max(np.abs(own_logits - other_logits))
    return dict(
      xla_tokens_agree=float(np.mean(own_tokens == other_tokens)),
      xla_logits_error=float(error / np.max(np.abs(other_logits))),
      xla_rows_error=float(
        np.sqrt(np.mean((own - other) ** 2) / np.mean(other**2))
      ),
    )

  def _greedy(self, context: int, implementation: str = ''):
    """Greedy tokens from the end of a context, and the first logits."""
    step = self.compile(Name('shared', 'decode', context, implementation))
    state, model = self.decode_state('shared', context), self.model('shared')
    tokens, first = [], None
    for _ in range(min(_CHECK_STEPS, self.setting.room)):
      state, logits = step(model, state)
      first = np.asarray(logits) if first is None else first
      tokens.append(int(state.last_token[0]))
    self.cache = state.cache
    return np.array(tokens), first


def _shapes(model: Model, cache) -> dict[str, tuple]:
  """Shapes of each system's model and cache."""
  shared = jax.eval_shape(lambda: (model, cache))
  keys = jax.eval_shape(per_layer_keys, *shared)
  wider = dataclasses.replace(shared[1], index_keys=keys)
  per_layer = jax.eval_shape(per_layer_model, shared[0]), wider
  return dict(shared=shared, per_layer=per_layer, dense=shared)


def peak_bytes() -> int | None:
  """The most that this process has held on its device; None on a CPU."""
  found = jax.devices()[0].memory_stats() or {}
  return found.get('peak_bytes_in_use')
