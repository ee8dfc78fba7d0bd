"""Block-scaled fp8 weights: e4m3 values with one float32 scale a block.

The published FP8 checkpoints use 128x128 blocks; the last block of either
axis may be partial (spec/model.md section 1.5).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.tiling import cdiv, dot

FP8 = jnp.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = (128, 128)


def dequantize(
  values: jax.Array,
  scales: jax.Array,
  dtype: jnp.dtype,
  block: tuple[int, int] = BLOCK,
) -> jax.Array:
  """Block-scaled values as numbers.

  Args:
    values: [..., F, D] e4m3.
    scales: [..., ceil(F / block[0]), ceil(D / block[1])] float32.
    dtype: result dtype; the product is taken in float32 first.
    block: rows and columns of one block.

  Returns:
    [..., F, D] in `dtype`.
  """
  F, D = values.shape[-2:]
  full = jnp.repeat(scales, block[0], axis=-2)[..., :F, :]
  full = jnp.repeat(full, block[1], axis=-1)[..., :D]
  return (values.astype(jnp.float32) * full).astype(dtype)


def quantize(
  values: jax.Array, block: tuple[int, int] = BLOCK
) -> tuple[jax.Array, jax.Array]:
  """Rounds to e4m3 with one scale (largest magnitude / 448) a block.

  Args:
    values: [..., F, D] f32 or bf16.
    block: rows and columns of one block.

  Returns:
    values [..., F, D] e4m3 and scales [..., f, d] float32, as `dequantize`
    takes them. A block of zeros has scale 1.
  """
  F, D = values.shape[-2:]
  f, d = cdiv(F, block[0]), cdiv(D, block[1])
  pad = [(0, 0)] * (values.ndim - 2)
  pad += [(0, f * block[0] - F), (0, d * block[1] - D)]
  wide = jnp.pad(values.astype(jnp.float32), pad)
  wide = wide.reshape(*values.shape[:-2], f, block[0], d, block[1])
  amax = jnp.max(jnp.abs(wide), axis=(-3, -1))
  # A subnormal scale is flushed to 0, and 0 / 0 is NaN.
  smallest = jnp.finfo(jnp.float32).tiny
  # A product, since XLA turns the division into one on some backends only.
  scales = jnp.maximum(amax * jnp.float32(1 / FP8_MAX), smallest)
  scales = jnp.where(amax > 0, scales, 1.0)
  full = jnp.repeat(scales, block[0], axis=-2)[..., :F, :]
  full = jnp.repeat(full, block[1], axis=-1)[..., :D]
  scaled = values.astype(jnp.float32) / full
  # Casting past the largest e4m3 number gives NaN, not the largest number.
  return jnp.clip(scaled, -FP8_MAX, FP8_MAX).astype(FP8), scales


def scaled_matmul(
  x: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  block: tuple[int, int] = BLOCK,
  tile_blocks: int = 4,
  *,
  implementation: str = 'xla',
) -> jax.Array:
  """Rows times block-scaled weights, a few blocks of outputs at a time.

  Args:
    x: [T, D] rows.
    values: [F, D] e4m3.
    scales: [f, d] float32.
    block: rows and columns of one block.
    tile_blocks: blocks of outputs dequantised at once ('xla'); a whole wide
      copy of the weights never exists.
    implementation: 'xla', 'tpu' or 'interpret'. None of them is chosen for
      the caller: linear maps are left to XLA's partitioner, which does not
      cut kernels.

  Returns:
    [T, F] in x's dtype, accumulated in float32.

  Raises:
    ValueError: the implementation is unknown.
    NotImplementedError: the kernel does not take these shapes or dtypes.
  """
  if implementation != 'xla':
    return _kernel_matmul(x, values, scales, block, implementation)
  F, D = values.shape
  tile = block[0] * tile_blocks
  whole = F // tile

  def product(values, scales):
    w = dequantize(values, scales, x.dtype, block)
    return dot('td,fd->tf', x, w).astype(x.dtype)

  parts = []
  if whole:
    cut = whole * tile_blocks
    tiles = (
      values[: whole * tile].reshape(whole, tile, D),
      scales[:cut].reshape(whole, tile_blocks, scales.shape[1]),
    )
    out = jax.lax.map(lambda vs: product(*vs), tiles)  # [whole, T, tile]
    parts.append(out.swapaxes(0, 1).reshape(x.shape[0], whole * tile))
  if F > whole * tile:
    rest = product(values[whole * tile :], scales[whole * tile_blocks :])
    parts.append(rest)
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _kernel_matmul(x, values, scales, block, implementation):
  # The kernel builds on this file, so it is imported where it is wanted.
  from pallas_kernels.dispatch import choose, run
  from pallas_kernels.grouped_matmul import tpu

  available = {
    'interpret': functools.partial(tpu.scaled_matmul, interpret=True),
    'tpu': tpu.scaled_matmul,
  }
  choice = choose('scaled_matmul', implementation, available)
  return run(choice, available, x, values, scales, block=block)
