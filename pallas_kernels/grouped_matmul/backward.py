"""Gradients of the grouped matmul: one loop over tiles of sorted rows.

    dx[m]      = weights[layer, expert(m)].T @ dout[m]
    dweights_e = sum over the rows m of expert e of dout[m] x[m].T

One rule serves every implementation of the forward pass. Tiles are those of
`xla.py`: each holds rows of one expert, whose weights are sliced from the
pool where they lie, so an expert without rows costs nothing but its zeros.

Memory law: dweights is summed in float32 for one layer, [E, F, D]; a pool of
one layer returns just that, a larger one is zero outside `layer`. Weights
that are not differentiated (frozen, or fp8) have no such array.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.xla import expert_weight
from pallas_kernels.tiling import dot, pad_rows


def gradients(
  d_out: jax.Array,
  x: jax.Array | None,
  weights: jax.Array,
  scales: jax.Array | None,
  layer: jax.Array,
  group_sizes: jax.Array,
  *,
  scale_block: tuple[int, int],
  tile: int,
) -> tuple[jax.Array, jax.Array | None]:
  """Cotangents of the rows and of one layer's weights.

  Args:
    d_out: [M, F] cotangent of the output.
    x: [M, D] rows sorted by expert; None when only dx is wanted.
    weights: [L, E, F, D] pool.
    scales: [L, E, f, d] float32 of e4m3 weights, else None.
    layer: int32 scalar.
    group_sizes: [E] int32.
    scale_block: rows and columns that share one scale.
    tile: rows multiplied at once.

  Returns:
    dx [M, D] in d_out's dtype, and dweights [E, F, D] of the layer in
    float32 or wider (None without x).
  """
  M = d_out.shape[0]
  E, F, D = weights.shape[1:]
  tiles = (group_sizes + tile - 1) // tile
  zero = jnp.int32(0)
  ends = jnp.cumsum(tiles)
  row_ends = jnp.cumsum(group_sizes)
  d_out = pad_rows(d_out, M + tile)
  padded = None if x is None else pad_rows(x, M + tile)

  def body(i, carry):
    d_x, d_w = carry
    expert = jnp.searchsorted(ends, i, side='right').astype(jnp.int32)
    within = i - (ends[expert] - tiles[expert])
    start = row_ends[expert] - group_sizes[expert] + within * tile
    own = (start + jnp.arange(tile) < row_ends[expert])[:, None]
    cut = lambda a: jnp.where(
      own, lax.dynamic_slice(a, (start, zero), (tile, a.shape[1])), 0
    )
    d_y = cut(d_out)
    # Zeros past the group's end: the next group's first tile replaces them.
    rows = dot(
      'mf,fd->md',
      d_y,
      expert_weight(weights, scales, layer, expert, d_out.dtype, scale_block),
    ).astype(d_x.dtype)
    d_x = lax.dynamic_update_slice(d_x, rows, (start, zero))
    if d_w is not None:
      more = d_w[expert] + dot('mf,md->fd', d_y, cut(padded)).astype(d_w.dtype)
      d_w = lax.dynamic_update_index_in_dim(d_w, more, expert, 0)
    return d_x, d_w

  d_x = jnp.zeros((M + tile, D), d_out.dtype)
  d_w = None
  if x is not None:
    wide = jnp.promote_types(weights.dtype, jnp.float32)
    d_w = jnp.zeros((E, F, D), wide)
  d_x, d_w = lax.fori_loop(0, ends[-1], body, (d_x, d_w))
  return d_x[:M], d_w


def _multiply(
  forward: Callable,
  scale_block: tuple[int, int],
  tile: int,
  x: jax.Array,
  weights: jax.Array,
  scales: jax.Array | None,
  layer: jax.Array,
  group_sizes: jax.Array,
) -> jax.Array:
  """Runs an implementation of the op under the rule of this file.

  Args:
    forward: an implementation, with the op's array arguments and
      `scale_block` by name.
    scale_block: rows and columns that share one scale.
    tile: rows multiplied at once in the backward pass.
    x: [M, D] rows sorted by expert.
    weights: [L, E, F, D] pool; e4m3 weights have no gradient.
    scales: [L, E, f, d] float32 of e4m3 weights, else None; no gradient.
    layer: int32 scalar.
    group_sizes: [E] int32.

  Returns:
    [M, F], what `forward` returns.
  """
  return forward(
    x, weights, scales, layer, group_sizes, scale_block=scale_block
  )


def _multiply_forward(
  forward, scale_block, tile, x, weights, scales, layer, group_sizes
):
  # With symbolic zeros every leaf says whether it is being differentiated.
  wanted = weights.perturbed
  if scales is not None and (wanted or scales.perturbed):
    raise NotImplementedError(
      'grouped_matmul has no gradient of fp8 weights '
      f'({weights.value.dtype=}): freeze them, or train bf16 or f32 weights'
    )
  x, *rest = (
    None if argument is None else argument.value
    for argument in (x, weights, scales, layer, group_sizes)
  )
  out = forward(x, *rest, scale_block=scale_block)
  # Frozen weights need no rows in the backward pass.
  return out, (x if wanted else None, *rest)


def _multiply_backward(forward, scale_block, tile, residuals, d_out):
  if isinstance(d_out, jax.custom_derivatives.SymbolicZero):
    return None, None, None, None, None
  d_x, d_w = gradients(d_out, *residuals, scale_block=scale_block, tile=tile)
  _, weights, _, layer, _ = residuals
  if d_w is not None:
    d_w = d_w.astype(weights.dtype)[None]
    if weights.shape[0] > 1:
      pool = jnp.zeros_like(weights)
      d_w = lax.dynamic_update_slice_in_dim(pool, d_w, layer, 0)
  return d_x, d_w, None, None, None


multiply = jax.custom_vjp(_multiply, nondiff_argnums=(0, 1, 2))
multiply.defvjp(_multiply_forward, _multiply_backward, symbolic_zeros=True)
