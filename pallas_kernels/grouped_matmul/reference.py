"""Grouped matmul: the specification, one gathered weight a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.block_scale import dequantize
from pallas_kernels.tiling import dot


def grouped_matmul(
  x: jax.Array,  # [M, D], rows sorted by expert
  weights: jax.Array,  # [L, E, F, D]
  scales: jax.Array | None,  # [L, E, f, d] f32
  layer: jax.Array | int,
  group_sizes: jax.Array,  # [E] int32
  *,
  scale_block: tuple[int, int],
) -> jax.Array:  # [M, F]
  """See the public call."""
  M = x.shape[0]
  w = weights[layer]
  if scales is not None:
    w = dequantize(w, scales[layer], x.dtype, scale_block)
  expert = jnp.repeat(
    jnp.arange(w.shape[0]), group_sizes, total_repeat_length=M
  )
  return dot('md,mfd->mf', x, w[expert]).astype(x.dtype)
