"""From logits to a token: pure functions over arrays.

Noise is a function of (request seed, absolute position, purpose) and of
nothing else: not of the batch slot, the bucket or the chunking.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np


class Purpose(enum.IntEnum):
  """What a random number decides; each has noise of its own."""

  SAMPLE = 0
  DRAFT = 1
  ACCEPT = 2
  RESIDUAL = 3


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['temperature', 'top_k', 'top_p', 'min_p', 'seed'],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How each sequence of a batch is sampled.

  Attributes:
    temperature: [B] float32; 0 takes the largest logit.
    top_k: [B] int32 tokens kept; 0 keeps all.
    top_p: [B] float32 probability kept, after top_k; 1 keeps all.
    min_p: [B] float32 least probability relative to the best; 0 keeps all.
    seed: [B] uint32 request seeds.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  seed: jax.Array


def sampling_params(
  batch: int, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0
) -> SamplingParams:
  """Checked parameters; numbers hold for all sequences, lists for each.

  A single `seed` gives sequence i the request seed `seed + i`.

  Raises:
    ValueError: a value out of range, named.
  """
  full = lambda x, dtype: np.broadcast_to(np.asarray(x, dtype), (batch,))
  seeds = np.asarray(seed, np.int64)
  if seeds.ndim == 0:
    seeds = seeds + np.arange(batch)
  for name, value, ok in (
    ('temperature', temperature, lambda v: (v >= 0) & np.isfinite(v)),
    ('top_k', top_k, lambda v: v >= 0),
    ('top_p', top_p, lambda v: (v > 0) & (v <= 1)),
    ('min_p', min_p, lambda v: (v >= 0) & (v <= 1)),
  ):
    if not np.all(ok(np.asarray(value))):
      need = {
        'temperature': 'finite and at least 0',
        'top_k': 'at least 0 (0 keeps all)',
        'top_p': 'above 0 and at most 1',
        'min_p': 'between 0 and 1',
      }[name]
      raise ValueError(f'{name}={value} must be {need}')
  return SamplingParams(
    temperature=jnp.asarray(full(temperature, np.float32)),
    top_k=jnp.asarray(full(top_k, np.int32)),
    top_p=jnp.asarray(full(top_p, np.float32)),
    min_p=jnp.asarray(full(min_p, np.float32)),
    seed=jnp.asarray((seeds % 2**32).astype(np.uint32)),
  )


def noise_key(
  seed: jax.Array, position: jax.Array, purpose: Purpose
) -> jax.Array:
  """The random key of one decision.

  Args:
    seed: scalar uint32 request seed.
    position: scalar int32 absolute position of the token decided.
    purpose: what is decided.

  Returns:
    A scalar random key.
  """
  key = jax.random.fold_in(jax.random.key(seed), position)
  return jax.random.fold_in(key, int(purpose))


def filtered_logits(logits: jax.Array, params: SamplingParams) -> jax.Array:
  """Logits after temperature, top_k, top_p and min_p.

  Args:
    logits: [B, V] float32.
    params: one entry a row.

  Returns:
    [B, V] float32, -inf where a token may not be drawn. The best token
    always may. Rows of temperature 0 keep the best token alone (the lowest
    id among equals).
  """
  V = logits.shape[-1]
  greedy = params.temperature <= 0
  scaled = logits / jnp.where(greedy, 1, params.temperature)[:, None]

  def cut(scaled):
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(V)[None]
    k = jnp.where(greedy, 1, params.top_k)[:, None]
    keep = (rank < k) | (k == 0)
    p = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    keep &= (before < params.top_p[:, None]) | (params.top_p >= 1)[:, None]
    keep &= p >= params.min_p[:, None] * p[:, :1]
    keep |= rank == 0
    rows = jnp.arange(logits.shape[0])[:, None]
    kept = jnp.zeros(logits.shape, bool).at[rows, order].set(keep)
    return jnp.where(kept, scaled, -jnp.inf)

  cuts = greedy | (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
  # The sort over the vocabulary is paid only where some row needs it.
  return jax.lax.cond(jnp.any(cuts), cut, lambda s: s, scaled)


def draw(
  allowed: jax.Array,
  positions: jax.Array,
  seed: jax.Array,
  purpose: Purpose,
) -> jax.Array:
  """Draws one token a row from filtered logits.

  Args:
    allowed: [B, V] float32, -inf where a token may not be drawn.
    positions: [B] int32 absolute position of the token drawn.
    seed: [B] uint32 request seeds.
    purpose: which noise.

  Returns:
    [B] int32 tokens; a row with one allowed token gets it whatever the noise.
  """

  def gumbel(seed, position):
    key = noise_key(seed, position, purpose)
    return jax.random.gumbel(key, allowed.shape[-1:], jnp.float32)

  open_rows = jnp.sum(allowed > -jnp.inf, axis=-1) > 1
  noise = jax.lax.cond(
    jnp.any(open_rows),
    lambda: jax.vmap(gumbel)(seed, positions),
    lambda: jnp.zeros(allowed.shape, jnp.float32),
  )
  return jnp.argmax(allowed + noise, axis=-1).astype(jnp.int32)


def sample(
  logits: jax.Array, positions: jax.Array, params: SamplingParams
) -> jax.Array:
  """Draws one token [B] a row of logits [B, V]; see `draw`."""
  allowed = filtered_logits(logits, params)
  return draw(allowed, positions, params.seed, Purpose.SAMPLE)
