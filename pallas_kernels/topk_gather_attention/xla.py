"""Attention over gathered rows in plain XLA, a block of rows at a time.

Memory law: gathered rows and logits exist for as many query rows (a multiple
of eight) as fit in `block_bytes`. The gathered rows are never sliced: all W
columns are multiplied and the output is cut (a slice would copy them; 1.3x,
spec/kernels_gpu.md section 3c).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.streaming_topk.xla import rows_per_block
from pallas_kernels.tiling import dot, map_row_blocks
from pallas_kernels.topk_gather_attention.rows import gather_rows


def _attend(q, slots, rows, row_scales, scale, latent_width):
  """One block: unnormalised output, largest logit, sum of exponentials."""
  valid = slots >= 0
  q, gathered = gather_rows(q, rows, row_scales, slots, latent_width)
  logits = dot('tnd,tkd->tnk', q, gathered) * scale
  logits = jnp.where(valid[:, None, :], logits, -jnp.inf)
  top = jnp.max(logits, axis=-1, keepdims=True)
  p = jnp.exp(logits - jnp.where(top > -jnp.inf, top, 0))
  total = jnp.sum(p, axis=-1)
  out = dot('tnk,tkd->tnd', p.astype(gathered.dtype), gathered)
  return out[..., :latent_width], top[..., 0], total


def _block(q, rows, row_scales, slots, block_bytes):
  """Query rows of one block."""
  k = slots.shape[1]
  # A record's byte becomes a float32, then a bf16 feature.
  feature = rows.dtype.itemsize if row_scales is None else 1 + 4 + 2
  row_bytes = k * rows.shape[1] * feature + 8 * q.shape[1] * k
  return rows_per_block(row_bytes, block_bytes, q.shape[0])


def topk_gather_attention(
  q: jax.Array,  # [T, N, R + P]
  rows: jax.Array,  # [M, W]
  row_scales: jax.Array | None,  # [M, G] f32
  slots: jax.Array,  # [T, k] int32
  *,
  scale: float,
  latent_width: int,
  block_bytes: int,
) -> tuple[jax.Array, jax.Array]:  # [T, N, R], [T, N] f32
  """See the public call."""

  def attend(q, slots):
    out, top, total = _attend(q, slots, rows, row_scales, scale, latent_width)
    out = jnp.where(total[..., None] != 0, out / total[..., None], 0)
    return out, jnp.log(total) + top

  block = _block(q, rows, row_scales, slots, block_bytes)
  out, lse = map_row_blocks(attend, block, q, slots)
  return out.astype(q.dtype), lse


def partial_attention(
  q: jax.Array,  # [T, N, R + P]
  rows: jax.Array,  # [M, W]
  row_scales: jax.Array | None,  # [M, G] f32
  slots: jax.Array,  # [T, k] int32
  count: jax.Array,  # [T] int32
  *,
  scale: float,
  latent_width: int,
  block_bytes: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, N, R], [T, N], [T, N] f32
  """See `partial.py`; all k rows are gathered, whatever the count."""

  def attend(q, slots):
    return _attend(q, slots, rows, row_scales, scale, latent_width)

  del count  # slots beyond it are -1
  block = _block(q, rows, row_scales, slots, block_bytes)
  return map_row_blocks(attend, block, q, slots)
