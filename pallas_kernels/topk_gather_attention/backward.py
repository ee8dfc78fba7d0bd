"""Gradients of attention over gathered rows, a block of query rows at a time.

One rule serves every implementation of the forward pass. With g_j the row at
slot j, p the softmax of one head and d the cotangents:

    dp_j    = dout . g_j[:R]
    dlogit  = p_j * (dp_j - sum_i p_i dp_i + dlse)
    dq      = scale * sum_j dlogit_j g_j
    dg_j    = scale * sum_n dlogit_nj q_n + [sum_n p_nj dout_n | 0]

p is recomputed from q and the pool, so neither out nor lse is kept for the
backward pass, and a row with one valid slot has p = 1 and dlogit = 0 exactly.

Memory law: gathered rows, their gradients and the [heads, k] products exist
for as many query rows (a multiple of eight) as fit in `block_bytes`; the
pool's gradient is one [M, W] float32 array that every block adds to.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.streaming_topk.xla import rows_per_block
from pallas_kernels.tiling import cdiv, dot, pad_rows
from pallas_kernels.topk_gather_attention.rows import gather_rows


def probabilities(
  q: jax.Array,
  rows: jax.Array,
  row_scales: jax.Array | None,
  slots: jax.Array,
  *,
  scale: float,
  latent_width: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The softmax of one block of query rows, and what it was made of.

  Args:
    q: [T, N, R + P].
    rows: [M, W] pool.
    row_scales: [M, G] float32 of uint8 records, else None.
    slots: [T, k] int32, -1 for none.
    scale: softmax scale.
    latent_width: R.

  Returns:
    p [T, N, k] in float32 or wider, 0 where there is no slot; the gathered
    rows [T, k, W], 0 where there is no slot; q [T, N, W] in their dtype.
  """
  valid = slots >= 0
  q, gathered = gather_rows(q, rows, row_scales, slots, latent_width)
  logits = dot('tnd,tkd->tnk', q, gathered) * scale
  logits = jnp.where(valid[:, None, :], logits, -jnp.inf)
  top = jnp.max(logits, axis=-1, keepdims=True)
  p = jnp.exp(logits - jnp.where(top > -jnp.inf, top, 0))
  total = jnp.sum(p, axis=-1, keepdims=True)
  return p / jnp.where(total > 0, total, 1), gathered, q


def accumulate_row_blocks(
  f: Callable, block: int, total, arrays: tuple, fills: tuple
):
  """Runs `f` over blocks of rows that all add to one running total.

  Args:
    f: (total, *blocks) to (total, outputs); outputs are arrays (any pytree)
      with the leading axis of the blocks.
    block: rows of one call.
    total: the initial total (any pytree), updated in place.
    arrays: arrays with one leading axis of T rows.
    fills: what each array's rows past the end hold; they must add nothing.

  Returns:
    The total, and the outputs [T, ...].
  """
  rows = arrays[0].shape[0]
  blocks = max(cdiv(rows, block), 1)
  split = lambda x, fill: pad_rows(x, blocks * block, fill).reshape(
    blocks, block, *x.shape[1:]
  )
  parts = tuple(split(x, fill) for x, fill in zip(arrays, fills))
  total, out = lax.scan(lambda total, xs: f(total, *xs), total, parts)
  join = lambda y: y.reshape(blocks * block, *y.shape[2:])[:rows]
  return total, jax.tree.map(join, out)


def gradients(
  q: jax.Array,
  rows: jax.Array,
  slots: jax.Array,
  d_out: jax.Array,
  d_lse: jax.Array,
  *,
  scale: float,
  latent_width: int,
  block_bytes: int,
) -> tuple[jax.Array, jax.Array]:
  """Cotangents of the queries and of the pool.

  Args:
    q: [T, N, R + P].
    rows: [M, W], f32, bf16 or f64.
    slots: [T, k] int32, -1 for none.
    d_out: [T, N, R] cotangent of the output.
    d_lse: [T, N] cotangent of lse.
    scale: softmax scale.
    latent_width: R.
    block_bytes: bytes of one block's arrays.

  Returns:
    [T, N, R + P] in q's dtype and [M, W] in the pool's. Rows that no slot
    names get 0; a query row without a valid slot gets and gives 0.
  """
  T, N, width = q.shape
  (M, W), k = rows.shape, slots.shape[1]
  wide = jnp.promote_types(rows.dtype, jnp.float32)

  def backward(total, q, slots, d_out, d_lse):
    p, gathered, q = probabilities(
      q, rows, None, slots, scale=scale, latent_width=latent_width
    )
    d_out = _widen(d_out.astype(gathered.dtype), W)
    dp = dot('tnd,tkd->tnk', d_out, gathered)
    mean = jnp.sum(p * dp, axis=-1, keepdims=True)
    d_logits = scale * p * (dp - mean + d_lse[:, :, None])
    valid = slots >= 0
    # Not a product with 0: the cotangents of an empty row may be NaN.
    d_logits = jnp.where(valid[:, None, :], d_logits, 0)
    d_logits = d_logits.astype(gathered.dtype)
    d_q = dot('tnk,tkd->tnd', d_logits, gathered)[..., :width]
    d_gathered = dot('tnk,tnd->tkd', d_logits, q)
    d_gathered += dot('tnk,tnd->tkd', p.astype(gathered.dtype), d_out)
    at = jnp.where(valid, slots, M)
    return total.at[at].add(d_gathered.astype(wide), mode='drop'), d_q

  row_bytes = k * W * (rows.dtype.itemsize + 4) + 16 * N * k
  block = rows_per_block(row_bytes, block_bytes, T)
  total = jnp.zeros((M, W), wide)
  d_rows, d_q = accumulate_row_blocks(
    backward, block, total, (q, slots, d_out, d_lse), (0, -1, 0, 0)
  )
  return d_q.astype(q.dtype), d_rows.astype(rows.dtype)


def _attend(
  forward: Callable,
  scale: float,
  latent_width: int,
  block_bytes: int,
  q: jax.Array,
  rows: jax.Array,
  row_scales: jax.Array | None,
  slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Runs an implementation of the op under the rule of this file.

  Args:
    forward: an implementation, with the op's array arguments and `scale` and
      `latent_width` by name.
    scale: softmax scale.
    latent_width: R.
    block_bytes: bytes of one block's arrays in the backward pass.
    q: [T, N, R + P].
    rows: [M, W].
    row_scales: [M, G] float32 or None; with them there is no gradient.
    slots: [T, k] int32, -1 for none, within the pool; no gradient.

  Returns:
    What `forward` returns.
  """
  return forward(
    q, rows, row_scales, slots, scale=scale, latent_width=latent_width
  )


def _attend_forward(
  forward, scale, latent_width, block_bytes, q, rows, row_scales, slots
):
  if row_scales is not None:
    raise NotImplementedError(
      'topk_gather_attention has no gradient through fp8 records '
      f'({rows.dtype=}): train with a bf16 or f32 cache'
    )
  out = forward(q, rows, None, slots, scale=scale, latent_width=latent_width)
  return out, (q, rows, slots)


def _attend_backward(
  forward, scale, latent_width, block_bytes, residuals, cotangents
):
  d_q, d_rows = gradients(
    *residuals,
    *cotangents,
    scale=scale,
    latent_width=latent_width,
    block_bytes=block_bytes,
  )
  return d_q, d_rows, None, None


attend = jax.custom_vjp(_attend, nondiff_argnums=(0, 1, 2, 3))
attend.defvjp(_attend_forward, _attend_backward)


def _widen(x: jax.Array, width: int) -> jax.Array:
  """Pads the last axis with zeros."""
  missing = width - x.shape[-1]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
