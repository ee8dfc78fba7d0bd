"""Attention over gathered rows: the specification, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.tiling import dot
from pallas_kernels.topk_gather_attention.rows import decode_rows


def topk_gather_attention(
  q: jax.Array,  # [T, N, R + P]
  rows: jax.Array,  # [M, W]
  row_scales: jax.Array | None,  # [M, G] f32
  slots: jax.Array,  # [T, k] int32, -1 for none
  *,
  scale: float,
  latent_width: int,
) -> tuple[jax.Array, jax.Array]:  # [T, N, R], [T, N] f32
  """See the public call."""
  width = q.shape[-1]
  valid = slots >= 0
  at = jnp.maximum(slots, 0)  # -1 wraps in JAX
  scales = None if row_scales is None else row_scales[at]
  gathered = decode_rows(rows[at], scales, latent_width, width - latent_width)
  gathered = gathered[..., :width].astype(jnp.float32)
  # A weight of 0 does not silence NaN: rows that do not count become 0.
  gathered = jnp.where(valid[:, :, None], gathered, 0)
  logits = dot('tnd,tkd->tnk', q.astype(jnp.float32), gathered) * scale
  logits = jnp.where(valid[:, None, :], logits, -jnp.inf)
  top = jnp.max(logits, axis=-1, keepdims=True)
  top = jnp.where(top > -jnp.inf, top, 0)
  p = jnp.exp(logits - top)
  total = jnp.sum(p, axis=-1)
  out = dot('tnk,tkr->tnr', p, gathered[..., :latent_width])
  out = jnp.where(total[..., None] != 0, out / total[..., None], 0)
  return out.astype(q.dtype), jnp.log(total) + top[..., 0]
