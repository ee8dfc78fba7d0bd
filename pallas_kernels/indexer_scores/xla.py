"""Lightning-indexer scores in plain XLA, a few pages at a time.

Memory law: the [T, I, keys] products exist for `CHUNK` pages only. The
chunk has one fixed shape, so a key's score has the same bits whatever the
length of the context.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer_scores.reference import relu
from pallas_kernels.tiling import dot, round_up

CHUNK = 16  # pages scored at a time


def indexer_scores(
  q: jax.Array,  # [T, I, H]
  w: jax.Array,  # [T, I] f32
  key_pages: jax.Array,  # [P, page, H]
  key_scales: jax.Array | None,  # [P, page] f32
  page_table: jax.Array,  # [B, n] int32
  row_seq: jax.Array,  # [T] int32
  row_pos: jax.Array,  # [T] int32
  *,
  first: int = 0,
) -> jax.Array:  # [T, S] f32
  """See the public call."""
  T = q.shape[0]
  page = key_pages.shape[1]
  n = page_table.shape[1]
  padded = round_up(n, CHUNK)
  pages_Tn = jnp.pad(page_table, ((0, 0), (0, padded - n)), constant_values=-1)[
    jnp.maximum(row_seq, 0)
  ]
  chunks = pages_Tn.reshape(T, padded // CHUNK, CHUNK).swapaxes(0, 1)
  # fp8 keys are exact in bf16; nothing else is ever narrowed.
  stored = jnp.bfloat16 if key_scales is not None else key_pages.dtype
  compute = jnp.promote_types(q.dtype, stored)

  def score(chunk):
    start, pages = chunk
    at = jnp.maximum(pages, 0)
    keys = key_pages[at].astype(compute)
    keys = keys.reshape(T, CHUNK * page, q.shape[-1])
    dots_TIS = dot('tih,tsh->tis', q, keys)
    scores = jnp.sum(relu(dots_TIS) * w[:, :, None], axis=1)
    if key_scales is not None:
      scores = scores * key_scales[at].reshape(scores.shape)
    pos = start * page + jnp.arange(CHUNK * page)[None]
    here = jnp.repeat(pages >= 0, page, axis=1)
    seen = here & (pos >= first) & (pos <= row_pos[:, None])
    return jnp.where(seen, scores, -jnp.inf)

  starts = jnp.arange(0, padded, CHUNK, dtype=jnp.int32)
  scores = lax.map(score, (starts, chunks))  # [chunks, T, keys]
  scores_TS = scores.swapaxes(0, 1).reshape(T, padded * page)
  return scores_TS[:, : n * page]
