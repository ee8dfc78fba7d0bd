"""Runs and times the steps of suite `context` over one cache.

The three systems take turns on one cache: its latent rows are those that
`shared` has prefilled, to the last token of the largest context. Every step
is the one of `decoding.py` and `speculative.py`, compiled for the pages of
its context (as the server's buckets are) and with its state donated.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

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


@functools.partial(StepJit, static_argnames='plan', donate_argnames='cache')
def attention_step(model: Model, cache, page_table, token, pos, *, plan):
  """A decode row through the trunk alone: (cache, hidden [1, D])."""
  rows = make_rows(jnp.zeros_like(pos), pos, page_table)
  hidden, cache, _ = trunk(model, token, cache, rows, plan)
  return cache, hidden


class Bench:
  """Models, the cache and compiled steps.

  Attributes:
    setting: what is measured.
    tokens: [largest context] int32 the prompt.
    cache: with the rows of all tokens prefilled so far.
    walls: seconds of each chunk of `shared`, by its first position.
    form: of dense attention, once it has been chosen.
  """

  def __init__(self, setting: Setting, log: Callable[[str], None]):
    self.setting, self.log = setting, log
    self.tokens = random_tokens(setting)
    make = lambda key: init_model(setting.config, key)
    self._models = {'shared': jax.jit(make)(jax.random.key(0))}
    self._plans: dict[tuple, LocalPlan] = {}
    self.compiled: dict[tuple, Any] = {}
    pages = setting.contexts[-1] // PAGE
    dtype = 'f32' if setting.config.dtype == 'float32' else 'auto'
    self.cache = init_cache(setting.config, pages, dtype=dtype)
    self._keys: dict[str, jax.Array] = {}
    self._using = 'shared'
    self._table = jnp.arange(pages, dtype=jnp.int32)[None]
    self.walls: dict[int, float] = {}
    self.form: str | None = None

  def model(self, system: str) -> Model:
    """A system's weights; `dense` runs those of `shared`."""
    if system == 'per_layer' and system not in self._models:
      self._models[system] = per_layer_model(self._models['shared'])
    return self._models.get(system, self._models['shared'])

  def plan(self, system: str, attention_only: bool = False) -> LocalPlan:
    """How a system runs; the ops choose their kernels."""
    if system != 'dense':
      return AttentionSide() if attention_only else LocalPlan()
    if self.form is None:
      s = self.setting
      self.form = dense_form(s.config, s.chunk, self.log)
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

  def table(self, tokens: int) -> jax.Array:
    """[1, n] pages of the smallest context that holds so many tokens."""
    size = min(c for c in self.setting.contexts if c >= tokens)
    return self._table[:, : size // PAGE]

  def compile(self, name, step, *args, **static):
    """A step compiled ahead for these arguments, once."""
    if name not in self.compiled:
      start = time.perf_counter()
      self.compiled[name] = step.lower(*args, **static).compile()
      seconds = time.perf_counter() - start
      self.log(f'{" ".join(map(str, name))}: compiled in {seconds:.1f} s')
    return self.compiled[name]

  def program_bytes(self, name: tuple) -> int:
    """What a compiled step holds: arguments (donated ones too), temporaries."""
    found = self.compiled[name].memory_analysis()
    return found.argument_size_in_bytes + found.temp_size_in_bytes

  def chunk(
    self, system: str, first: int, plan: LocalPlan | None = None
  ) -> tuple[tuple, float]:
    """Prefills one chunk.

    Args:
      system: whose.
      first: its first position.
      plan: instead of the system's own.

    Returns:
      The compiled step's name, and wall seconds (not of compiling it).
    """
    self.use(system)
    s, model = self.setting, self.model(system)
    pos = np.arange(first, first + s.chunk, dtype=np.int32)
    table = self.table(first + s.chunk)
    args = (
      jnp.asarray(self.tokens[pos]),
      jnp.zeros(s.chunk, jnp.int32),
      jnp.asarray(pos),
    )
    named = '' if plan is None else str(plan.implementation)
    name = (system, 'prefill', table.shape[1], named)
    plan = plan or self.plan(system)
    step = self.compile(
      name,
      prefill_step,
      model,
      self.cache,
      table,
      *args,
      plan=plan,
      with_drafter=s.config.mtp.num_layers > 0,
    )
    jax.block_until_ready((self.cache, args))
    start = time.perf_counter()
    self.cache = jax.block_until_ready(step(model, self.cache, table, *args))
    return name, time.perf_counter() - start

  def prefill(self, context: int) -> tuple:
    """`shared` goes on until so many tokens are cached; the step's name."""
    s = self.setting
    for first in range(len(self.walls) * s.chunk, context, s.chunk):
      name, seconds = self.chunk('shared', first)
      if first in (0, *s.contexts):
        # A program's first call loads it: the same chunk once more.
        name, seconds = self.chunk('shared', first)
      self.walls[first] = seconds
    return name

  def restore(self, context: int) -> None:
    """Writes the last chunk of a context's prompt again."""
    self.chunk('shared', context - self.setting.chunk)

  def decode_state(self, system: str, context: int) -> DecodeState:
    """The state before the last `room` tokens of a context."""
    self.use(system)
    first = context - self.setting.room
    return DecodeState(
      cache=self.cache,
      page_table=self.table(context) + 0,  # donated
      lengths=jnp.full(1, first + 1, jnp.int32),
      last_token=jnp.asarray(self.tokens[first : first + 1]),
      limits=jnp.full(1, context + 1, jnp.int32),
      eos=jnp.full(1, -1, jnp.int32),
      done=jnp.zeros(1, bool),
      params=sampling_params(1),
    )

  def decode(self, system: str, context: int, profile: bool) -> dict[str, Any]:
    """Plain decoding at the end of a context; seconds a token and more."""
    model, plan = self.model(system), self.plan(system)
    state = self.decode_state(system, context)
    name = (system, 'decode', state.page_table.shape[1])
    step = self.compile(name, decode_step, model, state, plan=plan)
    carried = [state]

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
    model, plan = self.model(system), self.plan(system, attention_only=True)
    table = self.table(context)
    last = jnp.full(1, context - 1, jnp.int32)
    args = (table, jnp.asarray(self.tokens[context - 1 : context]), last)
    name = (system, 'attention', table.shape[1])
    step = self.compile(
      name, attention_step, model, self.cache, *args, plan=plan
    )

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
    plan = self.plan(system)
    name = (system, 'drafting', state.decode.page_table.shape[1])
    step = self.compile(name, speculative_step, model, state, own, plan=plan)
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
    """Wall seconds of one of `steps` queued steps; busy ones if profiled."""
    run(self.setting.warm)
    start = time.perf_counter()
    run(steps)
    found = dict(seconds=(time.perf_counter() - start) / steps)
    if profile:
      few = max(steps // 4, 1)
      kernels, launches = device_kernels(lambda: run(few), few)
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
    xla = LocalPlan(implementation='xla')
    self.restore(context)
    own = rows()
    own_tokens, own_logits = self._greedy(context, None)
    self.chunk('shared', context - s.chunk, xla)
    other = rows()
    other_tokens, other_logits = self._greedy(context, xla)
    self.restore(context)
    error = np.max(np.abs(own_logits - other_logits))
    return dict(
      xla_tokens_agree=float(np.mean(own_tokens == other_tokens)),
      xla_logits_error=float(error / np.max(np.abs(other_logits))),
      xla_rows_error=float(
        np.sqrt(np.mean((own - other) ** 2) / np.mean(other**2))
      ),
    )

  def _greedy(self, context: int, plan: LocalPlan | None):
    """Greedy tokens from the end of a context, and the first logits."""
    state = self.decode_state('shared', context)
    named = () if plan is None else (plan.implementation,)
    name = ('shared', 'decode', state.page_table.shape[1], *named)
    model, plan = self.model('shared'), plan or self.plan('shared')
    step = self.compile(name, decode_step, model, state, plan=plan)
    tokens, first = [], None
    for _ in range(min(_CHECK_STEPS, self.setting.room)):
      state, logits = step(model, state)
      first = np.asarray(logits) if first is None else first
      tokens.append(int(state.last_token[0]))
    self.cache = state.cache
    return np.array(tokens), first


def peak_bytes() -> int | None:
  """The most that this process has held on its device; None on a CPU."""
  found = jax.devices()[0].memory_stats() or {}
  return found.get('peak_bytes_in_use')
