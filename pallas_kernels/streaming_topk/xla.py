"""Exact top-k in plain XLA: scores of one bounded block of rows at a time.

Memory law: [rows, S] float32 scores, and the keys and products of one chunk
of pages, exist for as many rows (a multiple of eight) as fit in
`block_bytes`, never for all T.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer_scores import xla as scores_xla
from pallas_kernels.streaming_topk.reference import ascending, comparable
from pallas_kernels.tiling import map_row_blocks


def rows_per_block(row_bytes: int, block_bytes: int, rows: int) -> int:
  """Rows of one block: a multiple of eight within the budget, or all."""
  block = max(block_bytes // row_bytes // 8 * 8, 8)
  return max(min(block, rows), 1)


def streaming_topk(
  q: jax.Array,  # [T, I, H]
  w: jax.Array,  # [T, I] f32
  key_pages: jax.Array,  # [P, page, H]
  key_scales: jax.Array | None,  # [P, page] f32
  page_table: jax.Array,  # [B, n] int32
  row_seq: jax.Array,  # [T] int32
  row_pos: jax.Array,  # [T] int32
  k: int,
  *,
  first: int = 0,
  block_bytes: int,
) -> tuple[jax.Array, jax.Array]:  # [T, k] int32, [T, k] f32
  """See the public call."""
  S = page_table.shape[1] * key_pages.shape[1]
  width = min(k, S)

  def select(q, w, row_seq, row_pos):
    scores = comparable(
      scores_xla.indexer_scores(
        q,
        w,
        key_pages,
        key_scales,
        page_table,
        row_seq,
        row_pos,
        first=first,
      )
    )
    # `lax.top_k` gives equal values in the order of their positions.
    winners, positions = lax.top_k(scores, width)
    positions, winners = ascending(positions, winners)
    pad = ((0, 0), (0, k - width))
    return (
      jnp.pad(positions, pad, constant_values=-1),
      jnp.pad(winners, pad, constant_values=-jnp.inf),
    )

  _, I, H = q.shape  # noqa: E741
  chunk = scores_xla.CHUNK * key_pages.shape[1]
  row_bytes = 4 * S + chunk * (4 * I + q.dtype.itemsize * H)
  block = rows_per_block(row_bytes, block_bytes, q.shape[0])
  return map_row_blocks(select, block, q, w, row_seq, row_pos)
