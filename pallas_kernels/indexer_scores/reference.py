"""Lightning-indexer scores: the specification, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.tiling import dot


def relu(x: jax.Array) -> jax.Array:
  """max(x, 0) that keeps NaN; XLA's maximum on CPU turns it into 0."""
  return jnp.where(x <= 0, 0, x)


def indexer_scores(
  q: jax.Array,  # [T, I, H]
  w: jax.Array,  # [T, I] f32
  key_pages: jax.Array,  # [P, page, H]
  key_scales: jax.Array | None,  # [P, page] f32
  page_table: jax.Array,  # [B, n] int32, -1 where there is no page
  row_seq: jax.Array,  # [T] int32
  row_pos: jax.Array,  # [T] int32, -1 for a padding row
  *,
  first: int = 0,
) -> jax.Array:  # [T, S] f32
  """See the public call."""
  T, page = q.shape[0], key_pages.shape[1]
  pages_Tn = page_table[jnp.maximum(row_seq, 0)]
  # -1 wraps in JAX: clip it, and mask what it would have read.
  keys_TSH = key_pages[jnp.maximum(pages_Tn, 0)].astype(jnp.float32)
  keys_TSH = keys_TSH.reshape(T, page_table.shape[1] * page, q.shape[-1])
  dots_TIS = dot('tih,tsh->tis', q.astype(jnp.float32), keys_TSH)
  scores_TS = dot('tis,ti->ts', relu(dots_TIS), w)
  if key_scales is not None:
    scales = key_scales[jnp.maximum(pages_Tn, 0)]
    scores_TS = scores_TS * scales.reshape(scores_TS.shape)
  here = jnp.repeat(pages_Tn >= 0, page, axis=1)
  pos = jnp.arange(scores_TS.shape[1])[None]
  seen = here & (pos >= first) & (pos <= row_pos[:, None])
  return jnp.where(seen, scores_TS, -jnp.inf)
