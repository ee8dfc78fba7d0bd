"""Runs of a small model under a plan, to be compared with one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from small_models import make_model, prompts, small_config

from glm_jax.decoding import decode_step, start
from glm_jax.model import forward
from glm_jax.plan import LocalPlan
from glm_jax.sampling import sampling_params
from glm_jax.speculative import speculative_step, start_drafting
from sharding import PLANS, MeshShape, make_mesh, module_shardings

# Beyond top-k (8), page edges, fewer pages than ranks, one token.
LENGTHS = (48, 5, 135, 64, 1)
SEED = 3


@functools.cache
def config(deep=False):
  """F S | F S scanned; deep: F unrolled, then F S | F S scanned."""
  kinds = ('full',) * deep + ('full', 'shared') * 2
  base = small_config(SEED, hidden_size=64)
  return dataclasses.replace(
    base,
    indexer_types=kinds,
    mlp_types=('dense',) * deep + ('sparse',) * 4,
    moe=dataclasses.replace(base.moe, num_experts=8),
  )


@functools.cache
def model(deep=False):
  return make_model(config(deep), SEED)


@functools.cache
def mesh(shape):
  return make_mesh(MeshShape(*shape))


@functools.cache
def placed_model(shape, deep=False):
  shardings = module_shardings(model(deep), mesh(shape))
  return jax.device_put(model(deep), shardings)


def poisoned(plan):
  """The plan, with a cache that holds NaN wherever nothing was written."""

  @dataclasses.dataclass(frozen=True)
  class Poisoned(type(plan)):
    def place_cache(self, cache):
      zeros = super().place_cache(cache)
      return jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), zeros)

  fields = [f.name for f in dataclasses.fields(plan) if f.init]
  return Poisoned(**{name: getattr(plan, name) for name in fields})


def make_plan(name, shape, deep=False, **options):
  options = {'min_rows': 4, **options}
  return poisoned(PLANS[name](config(deep), mesh(shape), **options))


def host(a):
  """An array on the host, whichever processes hold its parts."""
  if a.is_fully_addressable:
    return np.asarray(a)
  return multihost_utils.process_allgather(a, tiled=True)


def passes(model, plan, lengths=LENGTHS, rounds=2, decode=True):
  """Prefill in split chunks, a decode step, rounds of K = 3 drafts.

  Returns:
    (logits of live rows, tokens of live rows) of each step, as arrays.
  """
  B = len(lengths)
  state = start(
    model,
    prompts(0, lengths),
    12,
    sampling_params(B),
    plan,
    prefill_chunk=64,
    num_drafts=3,
  )
  out = []
  # Tokens and counts are on every process, as a launcher reads them.
  if decode:
    state, logits = decode_step(model, state, plan=plan)
    out.append((host(logits), np.asarray(state.last_token)))
  state = start_drafting(model, state, 3)
  own = jnp.full((B, 3), -1, jnp.int32)
  for _ in range(rounds):
    state, done = speculative_step(model, state, own, plan=plan)
    live = np.arange(4) < np.asarray(done.count)[:, None]
    out.append((host(done.logits)[live], np.asarray(done.tokens)[live]))
  return out


@functools.cache
def expected_passes(deep=False, rounds=2):
  return passes(model(deep), LocalPlan(), rounds=rounds, decode=deep)


def captured(model, plan, lengths=(150, 90)):
  """A whole prompt at once: logits and selections of live rows."""
  T = -(-max(lengths) // 8) * 8  # rows divide over eight ranks
  tokens = np.zeros((len(lengths), T), np.int32)
  for row, prompt in zip(tokens, prompts(1, lengths)):
    row[: len(prompt)] = prompt
  mask = np.arange(T) < np.array(lengths)[:, None]
  run = jax.jit(
    lambda model, tokens, mask: forward(
      model, tokens, mask=mask, capture=('selected', 'scores'), plan=plan
    )
  )
  out = run(model, tokens, mask)
  pick = lambda a: np.asarray(a)[:, mask]
  return {
    'logits': np.asarray(out.logits)[mask],
    'selected': pick(out.captured['selected']),
    'scores': pick(out.captured['scores']),
  }


@functools.cache
def expected_capture():
  return captured(model(), LocalPlan())
