"""From logits to a token: pure functions over arrays.

Noise is a function of (request seed, absolute position, purpose) and of
nothing else: not of the batch slot, the bucket or the chunking.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.streaming_topk.threshold import search, sortable

COLDEST = 1e-6  # of temperatures above 0: logits over less may overflow


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
    temperature: [B] float32; 0 takes the largest logit. One below `COLDEST`
      counts as that.
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


def filtered_logits(
  logits: jax.Array, params: SamplingParams, axes: Sequence[str] = ()
) -> jax.Array:
  """Logits after temperature, top_k, top_p and min_p.

  No row is sorted: its cuts are thresholds, found by counting. A row of
  temperature 0 is an argmax, and searches are paid only where some other row
  needs them.

  Args:
    logits: [B, V] float32; inside `shard_map` this rank's part of V.
    params: one entry a row.
    axes: mesh axes that the vocabulary is split over.

  Returns:
    [B, V] float32, -inf where a token may not be drawn. The best token
    always may. Rows of temperature 0 keep the best token alone (the lowest
    id among equals).
  """
  greedy = params.temperature <= 0
  # XLA divides by one row's temperature otherwise than by many rows'.
  inverse = 1 / jnp.maximum(params.temperature, COLDEST)
  scaled = logits * jnp.where(greedy, 1, inverse)[:, None]
  cuts = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
  row = _Row.of(scaled, axes)
  keep = lax.cond(
    jnp.any(cuts & ~greedy),
    lambda: _kept(row, params),
    lambda: jnp.ones(scaled.shape, bool),
  )
  return jnp.where(keep & ~greedy[:, None] | row.best(), scaled, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class _Row:
  """Rows of logits after temperature, or each rank's part of them.

  Attributes:
    scaled: [B, V] float32.
    ids: [V] int32 token ids.
    top: [B] float32 the largest of a row.
    axes: mesh axes that V is split over.
  """

  scaled: jax.Array
  ids: jax.Array
  top: jax.Array
  axes: tuple[str, ...]

  @classmethod
  def of(cls, scaled, axes):
    size, axes = scaled.shape[1], tuple(axes)
    ids = jnp.arange(size, dtype=jnp.int32)
    if axes:
      ids += lax.axis_index(axes) * size
    top = jnp.max(scaled, axis=1)
    return cls(scaled, ids, lax.pmax(top, axes) if axes else top, axes)

  def sum(self, values) -> jax.Array:
    """Sums [B] over the vocabulary."""
    whole = jnp.sum(values, axis=1)
    return lax.psum(whole, self.axes) if self.axes else whole

  def least(self, values) -> jax.Array:
    """Smallest values [B] over the vocabulary."""
    whole = jnp.min(values, axis=1)
    return lax.pmin(whole, self.axes) if self.axes else whole

  def best(self) -> jax.Array:
    """[B, V] bool: the best token alone, the lowest id among equals."""
    equal = self.scaled == self.top[:, None]
    far = jnp.iinfo(jnp.int32).max
    return self.ids == self.least(jnp.where(equal, self.ids, far))[:, None]

  def largest(self, keys, live, k) -> jax.Array:
    """[B, V] bool: the k [B] largest live keys; ties go to the lowest ids."""
    count = lambda which: self.sum(which.astype(jnp.int32))
    zeros = jnp.zeros(k.shape, jnp.uint32)
    reach = lambda bound: count(live & (keys >= bound[:, None])) >= k
    bound = search(zeros, 32, reach)[:, None]
    above, tied = live & (keys > bound), live & (keys == bound)
    places = k - count(above)
    ids = self.ids.astype(jnp.uint32)
    # The largest id before which fewer ties stand than there are places for.
    few = lambda at: count(tied & (ids < at[:, None])) < places
    last_tie = lambda: ids <= search(zeros, 32, few)[:, None]
    every = lambda: jnp.ones(keys.shape, bool)
    fit = jnp.all(count(tied) <= places)
    return above | tied & lax.cond(fit, every, last_tie)


def _kept(row: _Row, params: SamplingParams) -> jax.Array:
  """[B, V] bool: what top_k, then top_p and min_p leave of each row."""
  # -0.0 equals 0.0, and NaN is less than anything.
  scores = jnp.where(row.scaled == 0, 0, row.scaled)
  keys = sortable(jnp.where(jnp.isnan(scores), -jnp.inf, scores))
  every = jnp.ones(keys.shape, bool)
  k = jnp.where(params.top_k == 0, jnp.iinfo(jnp.int32).max, params.top_k)
  keep = lax.cond(
    jnp.any(params.top_k > 0),
    lambda: row.largest(keys, every, k),
    lambda: every,
  )
  weight = jnp.where(keep, jnp.exp(row.scaled - row.top[:, None]), 0)
  p = weight / row.sum(weight)[:, None]
  # Of the best token weight is 1.
  keep &= weight >= params.min_p[:, None]
  nucleus = lambda: _nucleus(row, keys, jnp.where(keep, p, 0), params.top_p)
  return keep & lax.cond(jnp.any(params.top_p < 1), nucleus, lambda: every)


def _nucleus(row: _Row, keys, p, top_p) -> jax.Array:
  """[B, V] bool: likeliest tokens whose predecessors' mass is below top_p."""
  above = lambda key: row.sum(jnp.where(keys > key[:, None], p, 0))
  zeros = jnp.zeros(top_p.shape, jnp.uint32)
  # The largest key that has too much mass above it.
  low = search(zeros, 32, lambda key: above(key) >= top_p)
  # The smallest key whose predecessors leave room; equal keys share it.
  edge = jnp.where(above(zeros) >= top_p, low + 1, 0)
  far = jnp.uint32(2**32 - 1)
  last = row.least(jnp.where(keys >= edge[:, None], keys, far))
  tied = keys == last[:, None]
  mass, count = row.sum(jnp.where(tied, p, 0)), row.sum(tied & (p > 0))
  each = jnp.where(count > 0, mass / jnp.maximum(count, 1), 1)
  room = jnp.ceil((top_p - above(last)) / jnp.maximum(each, 1e-38))
  room = jnp.clip(room, 0, 2**30).astype(jnp.int32)
  kept = row.largest(keys, tied & (p > 0), room)
  return (keys > last[:, None]) | kept | (top_p >= 1)[:, None]


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

  noise = jax.vmap(gumbel)(seed, positions)
  return jnp.argmax(allowed + noise, axis=-1).astype(jnp.int32)


def choose(
  logits: jax.Array,
  positions: jax.Array,
  params: SamplingParams,
  purpose: Purpose,
  cut: Callable[..., jax.Array] = filtered_logits,
) -> tuple[jax.Array, jax.Array]:
  """Filters logits and draws one token a row; see `draw`.

  A batch at temperature 0 pays one branch and an argmax: wherever a step
  branches on a value, a GPU's host waits for the device.

  Args:
    logits: [B, V] float32.
    positions: [B] int32 absolute position of the token drawn.
    params: one entry a row.
    purpose: which noise.
    cut: (logits, params) -> what may be drawn.

  Returns:
    [B] int32 tokens and [B, V] float32 logits, -inf where a token may not be
    drawn.
  """

  def best():
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    alone = jnp.arange(logits.shape[-1]) == token[:, None]
    return token, jnp.where(alone, logits, -jnp.inf)

  def drawn():
    allowed = cut(logits, params)
    return draw(allowed, positions, params.seed, purpose), allowed

  return lax.cond(all_greedy(params), best, drawn)


def all_greedy(params: SamplingParams) -> jax.Array:
  """Whether every sequence takes its best token: a scalar bool."""
  return jnp.all(params.temperature <= 0)
