"""Rows times the weights of their own expert: `grouped_matmul`.

out[m] = weights[layer, expert(m)] @ x[m]
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.block_scale import BLOCK
from pallas_kernels.dispatch import choose, run
from pallas_kernels.grouped_matmul import backward, gpu, reference, tpu, xla

AVAILABLE = {
  'gpu': gpu.grouped_matmul,
  'interpret': functools.partial(tpu.grouped_matmul, interpret=True),
  'reference': reference.grouped_matmul,
  'tpu': tpu.grouped_matmul,
  'xla': xla.grouped_matmul,
}


def grouped_matmul(
  x: jax.Array,
  weights: jax.Array,
  scales: jax.Array | None,
  layer: jax.Array | int,
  group_sizes: jax.Array,
  *,
  tile: int | None = None,
  scale_block: tuple[int, int] = BLOCK,
  implementation: str | None = None,
) -> jax.Array:
  """Multiplies sorted rows by their experts' weights; drops nothing.

  Differentiable in x, and in weights that are not e4m3 (`backward.py`).

  Args:
    x: [M, D] rows sorted by expert.
    weights: [L, E, F, D] pool over layers: f32, bf16 or e4m3.
    scales: [L, E, f, d] float32 block scales of e4m3 weights, else None.
    layer: which layer of the pool, an int or a traced int32.
    group_sizes: [E] int32 rows of each expert; they sum to M.
    tile: rows multiplied at once ('xla', and every backward pass); None for
      the average group.
    scale_block: rows and columns that share one scale.
    implementation: None, 'tpu', 'gpu', 'interpret' (the TPU kernel on a CPU),
      'xla' or 'reference'.

  Returns:
    [M, F] in x's dtype, accumulated in float32.

  Raises:
    ValueError: wrong shapes or dtypes.
    NotImplementedError: the named implementation is not here, or e4m3
      weights are differentiated.
  """
  M, D = x.shape
  _, E, _, width = weights.shape
  if width != D:
    raise ValueError(f'{weights.shape=} must end in the width of {x.shape=}')
  if group_sizes.shape != (E,):
    raise ValueError(f'{group_sizes.shape=} must be {(E,)}')
  if (weights.dtype == jnp.float8_e4m3fn) != (scales is not None):
    raise ValueError(
      f'{weights.dtype=} with scales '
      f'{"absent" if scales is None else "given"}: e4m3 weights have scales, '
      'others have none'
    )
  choice = choose('grouped_matmul', implementation, AVAILABLE)
  tile = xla.default_tile(M, E) if tile is None else tile
  tiled = functools.partial(AVAILABLE['xla'], tile=tile)
  forward = functools.partial(run, choice, {**AVAILABLE, 'xla': tiled})
  layer, group_sizes = jnp.asarray(layer, jnp.int32), jnp.asarray(group_sizes)
  args = (x, weights, scales, layer, group_sizes)
  return backward.multiply(forward, scale_block, tile, *args)
