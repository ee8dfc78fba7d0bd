"""Exact top-k on TPU: scores of a bounded block of rows, then their selection.

Two kernels, with [rows, S] float32 scores between them. The selection reads
a row of scores from HBM once and keeps it in the core's memory, so a first
threshold pass inside the scores would save no traffic: at 131,072 keys a row
is written and read in 0.6 of about 9 microseconds on v6e, and one of about 60
counting passes would go (`results/misses.md`). It was left out.

Memory law: scores of as many rows as fit in `block_bytes`, a multiple of
eight, never of all T.
"""

from __future__ import annotations

import jax
from jax import lax

from pallas_kernels.indexer_scores.tpu import blocks_of, scores_in_lines
from pallas_kernels.streaming_topk.select import select
from pallas_kernels.streaming_topk.xla import rows_per_block
from pallas_kernels.tiling import map_row_blocks

BLOCK_BYTES = 64 << 20
MAX_KEYS = 1 << 21  # three copies of a row's scores in the core's memory


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
  block_bytes: int = BLOCK_BYTES,
  interpret=False,
) -> tuple[jax.Array, jax.Array]:  # [T, k] int32, [T, k] f32
  """See the public call.

  Args:
    q: and all other arrays: as in the public call.
    w: see above.
    key_pages: see above.
    key_scales: see above.
    page_table: see above.
    row_seq: see above.
    row_pos: see above.
    k: see above.
    first: see above.
    block_bytes: bytes of scores that may exist at once.
    interpret: as in `scores_in_lines`.
  """
  block, blocks = blocks_of(page_table.shape[1], key_pages.shape[1])
  keys = block * blocks
  if keys > MAX_KEYS:
    raise NotImplementedError(
      f'the TPU kernel selects among at most {MAX_KEYS} keys a row, not '
      f'{keys}; use implementation="xla"'
    )

  def select_block(q, w, row_seq, row_pos):
    scores = scores_in_lines(
      q,
      w,
      key_pages,
      key_scales,
      page_table,
      row_seq,
      row_pos,
      first=first,
      fill=False,
      interpret=interpret,
    )
    last = lax.min(row_pos, keys - 1)
    return select(scores, last, k, interpret=interpret)

  rows = rows_per_block(4 * keys, block_bytes, q.shape[0])
  return map_row_blocks(select_block, rows, q, w, row_seq, row_pos)
