"""Exact top-k over shards of the keys, for use inside `shard_map`.

No rank ever holds another rank's candidates: the k-th largest score of all
shards is found digit by digit, four rounds of 256-bin counts added over the
axis ([T, 256] int32 a round). Ties at that score go to the lowest global
positions by the same search over positions, which costs its four rounds only
where some row has more ties than places. Memory law: one-hot digits exist
for `BLOCK` elements at a time.

Ranks are meant to bring candidates (their own top k), not whole contexts:
the result is put in order by a sort of what the rank brings.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.streaming_topk.reference import comparable
from pallas_kernels.tiling import map_row_blocks

BLOCK = 1 << 20  # elements whose one-hot digits exist at once
NIBBLE = 16


def order_key(scores: jax.Array) -> jax.Array:
  """uint32 that orders like the float32 scores (no NaN, no -0.0)."""
  bits = lax.bitcast_convert_type(scores, jnp.uint32)
  negative = bits >> 31 == 1
  return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def histogram(digits: jax.Array, live: jax.Array) -> jax.Array:
  """Counts of 8-bit digits, [T, S] -> [T, 256] int32, where `live`.

  The two nibbles' one-hot rows are multiplied: 32 comparisons an element and
  a matmul in place of 256 comparisons. One bf16 pass of the matmul unit is
  exact for 0 and 1, and so are counts in float32.
  """
  T, S = digits.shape

  def count(digits, live):
    bins = jnp.arange(NIBBLE, dtype=jnp.uint32)
    high = (digits[..., None] >> 4 == bins) & live[..., None]
    low = digits[..., None] & (NIBBLE - 1) == bins
    return jnp.einsum(
      'tsi,tsj->tij',
      high.astype(jnp.float32),
      low.astype(jnp.float32),
      precision=lax.Precision.DEFAULT,
    )

  rows = max(min(BLOCK // max(S, 1), T), 1)
  counts = map_row_blocks(count, rows, digits, live)
  return counts.reshape(-1, NIBBLE**2).astype(jnp.int32)


def kth_largest(
  keys: jax.Array, live: jax.Array, k: jax.Array, axis_name
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The k-th largest live key of each row over all ranks.

  Args:
    keys: [T, S] uint32, this rank's.
    live: [T, S] bool: keys that count.
    k: [T] int32, the same on every rank.
    axis_name: mesh axis (or axes) of the ranks.

  Returns:
    threshold [T] uint32, the k-th largest, or the smallest where fewer than
    k are live; [T] int32 keys equal to it that belong to the k largest; [T]
    int32 keys equal to it. The same on every rank; without a live key the
    counts are 0.
  """
  threshold = jnp.zeros_like(k, jnp.uint32)
  for shift in (24, 16, 8, 0):
    digits = keys >> shift
    if shift < 24:
      live = live & (digits >> 8 == threshold[:, None])
    counts = lax.psum(histogram(digits & 255, live), axis_name)
    if shift == 24:
      k = jnp.minimum(k, counts.sum(axis=1))
    at_least = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
    # The highest digit that leaves no more than k - 1 keys above it.
    digit = jnp.sum(at_least >= jnp.maximum(k, 1)[:, None], axis=1) - 1
    digit = jnp.maximum(digit, 0)
    pick = lambda x: jnp.take_along_axis(x, digit[:, None], axis=1)[:, 0]  # noqa: B023
    equal = pick(counts)
    k = k - (pick(at_least) - equal)
    threshold = threshold << 8 | digit.astype(jnp.uint32)
  return threshold, k, equal


def select_sharded(
  scores_local: jax.Array,
  positions_local: jax.Array,
  k: int,
  axis_name,
  k_local: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """This rank's part of the k best keys of every row, exactly.

  The union over ranks is what `streaming_topk` selects on one device: ties
  go to the lowest global position, -0.0 equals 0.0, NaN scores count as
  -inf, and -inf is never selected. Call inside `shard_map`.

  Args:
    scores_local: [T, S_local] float32 scores of this rank's candidates.
    positions_local: [S_local] or [T, S_local] int32 global positions, each
      on one rank only, in any order; negative means no candidate.
    k: keys wanted a row, over all ranks.
    axis_name: mesh axis, or tuple of axes, over which the keys are sharded.
    k_local: width of the result; None for min(k, S_local), which always
      suffices.

  Returns:
    positions: [T, k_local] int32 global positions, ascending, then -1.
    overflow: [T] int32 selected keys of this rank beyond k_local, the
      highest positions; the selection is whole only where it is 0.

  Raises:
    ValueError: wrong shapes or dtypes, or k < 1.
  """
  T, S = scores_local.shape
  if positions_local.ndim == 1:
    positions_local = jnp.broadcast_to(positions_local, (T, S))
  if k < 1:
    raise ValueError(f'{k=} must be at least 1')
  if positions_local.shape != (T, S) or positions_local.dtype != jnp.int32:
    raise ValueError(
      f'{positions_local.shape=} {positions_local.dtype=} must be int32 '
      f'{(S,)} or {(T, S)}'
    )
  if scores_local.dtype != jnp.float32:
    raise ValueError(f'{scores_local.dtype=} must be float32')
  k_local = min(k, S) if k_local is None else k_local
  scores = comparable(scores_local)
  live = (positions_local >= 0) & (scores > -jnp.inf)
  keys = order_key(scores)
  wanted = jnp.full((T,), k, jnp.int32)
  threshold, places, equal = kth_largest(keys, live, wanted, axis_name)
  tied = live & (keys == threshold[:, None])
  # The lowest positions are the largest complements.
  complement = ~positions_local.astype(jnp.uint32)
  cut = lax.cond(
    jnp.any(equal > places),
    lambda: kth_largest(complement, tied, places, axis_name)[0],
    lambda: jnp.zeros_like(threshold),
  )
  tied &= complement >= cut[:, None]
  chosen = live & (keys > threshold[:, None]) | tied
  last = jnp.iinfo(jnp.int32).max
  order = jnp.sort(jnp.where(chosen, positions_local, last), axis=1)
  order = jnp.pad(
    order[:, :k_local],
    ((0, 0), (0, max(k_local - S, 0))),
    constant_values=last,
  )
  overflow = jnp.maximum(chosen.sum(axis=1, dtype=jnp.int32) - k_local, 0)
  return jnp.where(order == last, -1, order), overflow
