"""The exact top-k keys of every row: `streaming_topk`.

positions[t] = the k positions of largest score[t], ascending, then -1
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels.dispatch import choose, run
from pallas_kernels.indexer_scores import check_index_arguments
from pallas_kernels.streaming_topk import gpu, reference, tpu, xla
from pallas_kernels.tiling import within_pool

AVAILABLE = {
  'gpu': gpu.streaming_topk,
  'interpret': functools.partial(tpu.streaming_topk, interpret=True),
  'reference': reference.streaming_topk,
  'tpu': tpu.streaming_topk,
  'xla': xla.streaming_topk,
}
BLOCK_BYTES = 64 << 20


def streaming_topk(
  q: jax.Array,
  w: jax.Array,
  key_pages: jax.Array,
  key_scales: jax.Array | None,
  page_table: jax.Array,
  row_seq: jax.Array,
  row_pos: jax.Array,
  k: int,
  *,
  first: int = 0,
  shard=None,
  implementation: str | None = None,
  block_bytes: int = BLOCK_BYTES,
) -> tuple[jax.Array, jax.Array]:
  """Selects the k best visible keys of every row, exactly.

  Ties go to the lowest position; -0.0 equals 0.0; NaN scores count as -inf.

  Args:
    q: [T, I, H]; w: [T, I]; key_pages: [P, 64, H]; key_scales: [P, 64] or
      None; page_table: [B, n]; row_seq: [T]; row_pos: [T]: as in
      `indexer_scores`.
    w: see above.
    key_pages: see above.
    key_scales: see above.
    page_table: see above.
    row_seq: see above.
    row_pos: see above.
    k: keys wanted a row.
    first: lowest visible position, as in `indexer_scores`.
    shard: the caller's part of a token-sharded pool; not on one device.
    implementation: None, 'tpu', 'gpu', 'interpret' (the TPU kernel on a CPU),
      'xla' or 'reference'.
    block_bytes: bytes of scores that may exist at once ('gpu', 'xla'); a GPU
      scores at least 264 rows at once, or it would idle.

  Returns:
    positions: [T, k] int32, unique, ascending, then -1 where fewer than k
      keys are visible. Never a future position.
    scores: [T, k] float32 of those positions, -inf beside -1.

  Raises:
    ValueError: wrong shapes or dtypes, or k < 1.
    NotImplementedError: the named implementation or `shard` is not here.
  """
  check_index_arguments(
    q, w, key_pages, key_scales, page_table, row_seq, row_pos
  )
  if k < 1:
    raise ValueError(f'{k=} must be at least 1')
  if shard is not None:
    raise NotImplementedError('streaming_topk has no sharded form yet')
  choice = choose('streaming_topk', implementation, AVAILABLE)
  page_table = within_pool(page_table, key_pages.shape[0], 'page')
  args = (q, w, key_pages, key_scales, page_table, row_seq, row_pos)
  bounded = {
    name: functools.partial(AVAILABLE[name], block_bytes=block_bytes)
    for name in ('gpu', 'xla')
  }
  return run(choice, {**AVAILABLE, **bounded}, *args, k=k, first=first)
