"""Attention of a layer over windows, in three ways that agree.

    gather   rows at the selected slots (`topk_gather_attention`, absorbed)
    masked   per-head keys and values of all rows under a mask, in chunks
    cudnn    the same through cuDNN's fused attention (GPU, bf16)

`gather` costs k rows a query and is what inference runs; the other two cost
S keys a query but only matrix products. [heads, S] logits exist for one chunk
of rows (`masked`) or never (`cudnn`, whose mask is [B, R, S]).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from glm_jax.mla import Mla
from glm_jax.plan import LOCAL, LocalPlan
from glm_jax.training.windows import (
  Keys,
  Queries,
  Selection,
  pool_slots,
  visible,
  visible_slots,
)
from pallas_kernels import topk_gather_attention
from pallas_kernels.tiling import dot

IMPLEMENTATIONS = ('gather', 'masked', 'cudnn')


def attend(
  mla: Mla,
  q: jax.Array,
  rows: jax.Array,
  selection: Selection | None,
  queries: Queries,
  keys: Keys,
  *,
  implementation: str,
  chunk: int,
  block_bytes: int,
  plan: LocalPlan = LOCAL,
) -> jax.Array:
  """Attends and projects to the residual stream.

  Args:
    mla: the layer's weights.
    q: [B, R, N, nope + P] queries after RoPE.
    rows: [B, S, latent + P] normed latents, then rotary keys.
    selection: slots ('gather') or a mask; None for all visible rows.
    queries: where the query rows stand.
    keys: what stands at each row.
    implementation: one of `IMPLEMENTATIONS`.
    chunk: query rows whose logits exist at once ('masked').
    block_bytes: of gathered rows at once ('gather').
    plan: where query rows and keys are.

  Returns:
    [B * R, D].
  """
  c = mla.config
  B, R = q.shape[:2]
  S = rows.shape[1]
  if implementation == 'gather':
    if selection is None:
      slots = visible_slots(queries, keys)
    else:
      slots = selection.slots

    def gathered(queries, keys):
      q, slots = queries
      out, _ = topk_gather_attention(
        q.reshape(-1, *q.shape[2:]),
        keys.reshape(-1, keys.shape[-1]),
        None,
        pool_slots(slots, S),
        scale=c.scale,
        latent_width=c.kv_lora_rank,
        block_bytes=block_bytes,
      )
      return out.reshape(*q.shape[:3], -1)

    q = mla.absorb(q.reshape(B * R, *q.shape[2:])).reshape(*q.shape[:3], -1)
    out = plan.by_query(gathered, (q, slots), rows)
    return mla.output(out.reshape(B * R, *out.shape[2:]))
  if selection is None:
    mask = visible(queries, keys)
  else:
    mask = selection.as_mask(S)
  k, v = _expand(mla, rows)
  if implementation == 'cudnn':
    out = jax.nn.dot_product_attention(
      q, k, v, mask=mask[:, None], scale=c.scale, implementation='cudnn'
    )
  else:
    masked = lambda queries, keys: _masked(*queries, *keys, c.scale, chunk)
    out = plan.by_query(masked, (q, mask), (k, v))
  return mla.o(out.reshape(B * R, -1).astype(q.dtype))


def _expand(mla: Mla, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Per-head keys [B, S, N, nope + P] and values [B, S, N, v]."""
  c = mla.config
  w_uk, w_uv = mla.up_projections()
  latent, rope = jnp.split(rows, [c.kv_lora_rank], axis=-1)
  nope = dot('bsr,ndr->bsnd', latent, w_uk).astype(rows.dtype)
  rope = jnp.broadcast_to(
    rope[:, :, None], (*nope.shape[:3], c.qk_rope_head_dim)
  )
  v = dot('bsr,nvr->bsnv', latent, w_uv).astype(rows.dtype)
  return jnp.concatenate([nope, rope], axis=-1), v


def _masked(q, mask, k, v, scale, chunk):
  """[B, R, N, v] attended values, a chunk of query rows at a time."""
  B, R = q.shape[:2]
  chunk = min(chunk, R)
  if R % chunk:
    raise ValueError(f'{chunk=} must divide {R} query rows')

  @jax.checkpoint
  def part(q, mask, k, v):
    logits = dot('btnd,bsnd->bnts', q, k) * scale
    mask = mask[:, None]
    logits = jnp.where(mask, logits, -jnp.inf)
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    # A row that sees nothing must give 0, not NaN.
    p = jnp.exp(logits - jnp.where(top > -jnp.inf, top, 0))
    total = jnp.sum(p, axis=-1)
    out = dot('bnts,bsnv->btnv', p.astype(v.dtype), v)
    total = jnp.where(total > 0, total, 1).swapaxes(1, 2)
    return (out / total[..., None]).astype(v.dtype)

  if chunk == R:
    return part(q, mask, k, v)
  cut = lambda a: jnp.moveaxis(
    a.reshape(B, R // chunk, chunk, *a.shape[2:]), 1, 0
  )
  out = lax.map(lambda xs: part(*xs, k, v), (cut(q), cut(mask)))
  return jnp.moveaxis(out, 0, 1).reshape(B, R, *out.shape[3:])
