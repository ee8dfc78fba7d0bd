"""Grouped matmul in plain XLA: a loop over tiles that hold rows of one expert.

Each tile multiplies `tile` rows by one expert's weights, sliced from the
pool where they lie: neither a layer nor an expert that nobody chose is ever
read (`jax.lax.ragged_dot` multiplies every row by every expert on CPU).

Work law: at most M // tile + E tiles, so at most M + E * (tile - 1) rows are
multiplied; `default_tile` keeps that below 2 * M. Tiles run in order and
write whole tiles: what a tile writes past the end of its group is garbage
that the next group's first tile overwrites.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_scale import dequantize
from pallas_kernels.tiling import dot, pad_rows

_MAX_TILE = 256


def default_tile(rows: int, experts: int) -> int:
  """Rows of a tile: the rows an expert has on average, at most 256."""
  return max(1, min(rows // experts, _MAX_TILE))


def expert_weight(
  weights: jax.Array,  # [L, E, F, D]
  scales: jax.Array | None,  # [L, E, f, d] f32
  layer: jax.Array,
  expert: jax.Array,
  dtype: jnp.dtype,
  scale_block: tuple[int, int],
) -> jax.Array:  # [F, D]
  """One expert's weights, sliced where they lie; fp8 ones dequantised."""
  zero = jnp.int32(0)
  at = (layer, expert, zero, zero)
  w = lax.dynamic_slice(weights, at, (1, 1, *weights.shape[2:]))[0, 0]
  if scales is None:
    return w
  s = lax.dynamic_slice(scales, at, (1, 1, *scales.shape[2:]))[0, 0]
  return dequantize(w, s, dtype, scale_block)


def grouped_matmul(
  x: jax.Array,  # [M, D], rows sorted by expert
  weights: jax.Array,  # [L, E, F, D]
  scales: jax.Array | None,  # [L, E, f, d] f32
  layer: jax.Array | int,
  group_sizes: jax.Array,  # [E] int32
  *,
  scale_block: tuple[int, int],
  tile: int,
) -> jax.Array:  # [M, F]
  """See the public call."""
  M, D = x.shape
  F = weights.shape[2]
  padded = pad_rows(x, M + tile)
  tiles = (group_sizes + tile - 1) // tile
  ends = jnp.cumsum(tiles)
  row_starts = jnp.cumsum(group_sizes) - group_sizes
  layer, zero = jnp.asarray(layer, jnp.int32), jnp.int32(0)

  def body(i, out):
    expert = jnp.searchsorted(ends, i, side='right').astype(jnp.int32)
    within = i - (ends[expert] - tiles[expert])
    start = row_starts[expert] + within * tile
    rows = lax.dynamic_slice(padded, (start, zero), (tile, D))
    y = dot(
      'md,fd->mf',
      rows,
      expert_weight(weights, scales, layer, expert, x.dtype, scale_block),
    ).astype(x.dtype)
    return lax.dynamic_update_slice(out, y, (start, zero))

  out = jnp.zeros((M + tile, F), x.dtype)
  return lax.fori_loop(0, ends[-1], body, out)[:M]
