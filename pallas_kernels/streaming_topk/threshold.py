"""Exact top-k as a mask, by counting: no sort, no compaction.

A threshold is found two bits at a time: three counts of a row say which
quarter of what is left holds the k-th largest score. Equal scores are cut by
the same search over positions. A GPU reads a row 23 times from its cache;
`lax.top_k` of 8,192 scores there is a full sort.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.streaming_topk.reference import comparable

_MAGNITUDE = 0x7FFFFFFF  # kernels take no array from outside: a Python number


def sortable(scores: jax.Array) -> jax.Array:
  """uint32 in the order of `comparable` scores."""
  bits = lax.bitcast_convert_type(scores, jnp.uint32)
  return jnp.where(bits >> 31 == 1, ~bits, ~(~bits & _MAGNITUDE))


def top_mask(scores: jax.Array, k: int) -> jax.Array:
  """Which scores are the k largest of their row, ties to the lowest position.

  Args:
    scores: [..., S] float32; -inf (and NaN) is never chosen.
    k: at least 1.

  Returns:
    [..., S] bool, k of them in a row, or as many as are above -inf.
  """
  return search_mask(comparable(scores), k)


def sort_keys(scores: jax.Array) -> jax.Array:
  """uint32 in the order of `comparable` scores, 0 for -inf."""
  return jnp.where(scores > -jnp.inf, sortable(scores), jnp.uint32(0))


def kth_key(keys: jax.Array, k: int) -> jax.Array:
  """The largest bound that k keys of a row reach; 0 where fewer are above 0.

  Args:
    keys: [..., S] uint32.
    k: at least 1.

  Returns:
    [...] uint32.
  """
  reach = lambda bound: _count(keys >= bound[..., None]) >= k
  return search(jnp.zeros(keys.shape[:-1], jnp.uint32), 32, reach)


def search_mask(scores: jax.Array, k: int, *, one_row: bool = False):
  """`top_mask` of `comparable` scores; what a kernel runs on its block.

  Args:
    scores: [..., S] float32.
    k: at least 1.
    one_row: of one row: skip the search for the last tie where all ties at
      the threshold are chosen.

  Returns:
    [..., S] bool.
  """
  S = scores.shape[-1]
  keys = sort_keys(scores)
  bound = kth_key(keys, k)
  above = keys > bound[..., None]
  equal = (keys == bound[..., None]) & (keys > 0)
  wanted = k - _count(above)
  place = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
  place = place.astype(jnp.uint32)
  start = jnp.zeros(scores.shape[:-1], jnp.uint32)
  # The largest position before which fewer than the wanted ties stand.
  few = lambda at: _count(equal & (place < at[..., None])) < wanted
  last_tie = lambda: search(start, max(S - 1, 1).bit_length(), few)
  if one_row:
    every = jnp.sum(_count(equal)) <= jnp.sum(wanted)
    last = lax.cond(every, lambda: start + jnp.uint32(S), last_tie)
  else:
    last = last_tie()
  return above | equal & (place <= last[..., None])


def _count(which: jax.Array) -> jax.Array:
  return jnp.sum(which, axis=-1, dtype=jnp.int32)


def search(
  start: jax.Array, bits: int, holds: Callable[[jax.Array], jax.Array]
) -> jax.Array:
  """The largest value of so many bits for which a monotone test holds.

  Args:
    start: zeros of what is found, uint32.
    bits: of the largest value.
    holds: of values; true up to some value (0 is not asked about).

  Returns:
    uint32 like `start`; 0 where the test never holds.
  """
  if bits % 2:
    bits += 1

  def step(i, value):
    shift = (bits - 2 - 2 * i).astype(jnp.uint32)
    one = jnp.ones_like(shift)
    tries = [value + c * (one << shift) for c in (1, 2, 3)]
    passed = sum(holds(t).astype(jnp.uint32) for t in tries)
    return value + (passed << shift)

  return lax.fori_loop(0, bits // 2, step, start)
