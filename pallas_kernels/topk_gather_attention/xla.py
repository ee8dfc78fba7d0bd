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
  T, N, _ = q.shape
  k = slots.shape[1]

  def attend(q, slots):
    valid = slots >= 0
    q, gathered = gather_rows(q, rows, row_scales, slots, latent_width)
    logits = dot('tnd,tkd->tnk', q, gathered) * scale
    logits = jnp.where(valid[:, None, :], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.where(top > -jnp.inf, top, 0)
    p = jnp.exp(logits - top)
    total = jnp.sum(p, axis=-1)
    out = dot('tnk,tkd->tnd', p.astype(gathered.dtype), gathered)
    out = out[..., :latent_width]
    out = jnp.where(total[..., None] > 0, out / total[..., None], 0)
    return out, jnp.log(total) + top[..., 0]

  # A record's byte becomes a float32, then a bf16 feature.
  feature = rows.dtype.itemsize if row_scales is None else 1 + 4 + 2
  row_bytes = k * rows.shape[1] * feature + 8 * N * k
  block = rows_per_block(row_bytes, block_bytes, T)
  out, lse = map_row_blocks(attend, block, q, slots)
  return out.astype(q.dtype), lse
