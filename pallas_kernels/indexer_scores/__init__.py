"""Index scores of every cached key: `indexer_scores`.

score[t, s] = key_scale[s] * sum_i w[t, i] * relu(q[t, i] . key[s])
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose, run
from pallas_kernels.indexer_scores import gpu, reference, tpu, xla
from pallas_kernels.tiling import within_pool

AVAILABLE = {
  'gpu': gpu.indexer_scores,
  'interpret': functools.partial(tpu.indexer_scores, interpret=True),
  'reference': reference.indexer_scores,
  'tpu': tpu.indexer_scores,
  'xla': xla.indexer_scores,
}


def check_index_arguments(
  q, w, key_pages, key_scales, page_table, row_seq, row_pos
) -> None:
  """Raises `ValueError` where shapes or dtypes break the contract."""
  T, I, H = q.shape  # noqa: E741
  P, page, width = key_pages.shape
  if w.shape != (T, I) or w.dtype != jnp.float32:
    raise ValueError(f'{w.shape=} {w.dtype=} must be {(T, I)} float32')
  if width != H:
    raise ValueError(f'{key_pages.shape=} must end in the width of {q.shape=}')
  if key_scales is not None and key_scales.shape != (P, page):
    raise ValueError(f'{key_scales.shape=} must be {(P, page)}')
  if (key_pages.dtype.itemsize == 1) != (key_scales is not None):
    raise ValueError(
      f'{key_pages.dtype=} with key_scales '
      f'{"absent" if key_scales is None else "given"}: fp8 keys have scales, '
      'others have none'
    )
  if page_table.ndim != 2 or row_seq.shape != (T,) or row_pos.shape != (T,):
    raise ValueError(
      f'{page_table.shape=} must be [B, n], {row_seq.shape=} and '
      f'{row_pos.shape=} {(T,)}'
    )
  for name, a in (
    ('page_table', page_table),
    ('row_seq', row_seq),
    ('row_pos', row_pos),
  ):
    if a.dtype != jnp.int32:
      raise ValueError(f'{name}.dtype={a.dtype} must be int32')


def indexer_scores(
  q: jax.Array,
  w: jax.Array,
  key_pages: jax.Array,
  key_scales: jax.Array | None,
  page_table: jax.Array,
  row_seq: jax.Array,
  row_pos: jax.Array,
  *,
  first: int = 0,
  shard=None,
  implementation: str | None = None,
) -> jax.Array:
  """Scores every visible key for every row.

  Args:
    q: [T, I, H] index queries after RoPE.
    w: [T, I] float32 head weights with H^-0.5 I^-0.5 already in.
    key_pages: [P, 64, H] pool of index keys: f32, bf16 or fp8.
    key_scales: [P, 64] float32 scale of each fp8 key, else None.
    page_table: [B, n] int32 page of each sequence's 64-token block, -1
      where there is none. Ids already include any layer offset; one beyond
      the pool counts as none, and debug mode raises for it.
    row_seq: [T] int32 sequence of each row.
    row_pos: [T] int32 position of each row, -1 for a padding row.
    first: lowest visible position; the drafter's pool has no row at 0.
    shard: the caller's part of a token-sharded pool; not on one device.
    implementation: None, 'tpu', 'gpu', 'interpret' (the TPU kernel on a CPU),
      'xla' or 'reference'.

  Returns:
    [T, n * 64] float32; -inf at positions below `first` or above `row_pos`
    and where there is no page. Keys that are not visible may hold NaN.

  Raises:
    ValueError: wrong shapes or dtypes.
    NotImplementedError: the named implementation or `shard` is not here.
  """
  check_index_arguments(
    q, w, key_pages, key_scales, page_table, row_seq, row_pos
  )
  if shard is not None:
    raise NotImplementedError('indexer_scores has no sharded form yet')
  choice = choose('indexer_scores', implementation, AVAILABLE)
  page_table = within_pool(page_table, key_pages.shape[0], 'page')
  args = (q, w, key_pages, key_scales, page_table, row_seq, row_pos)
  return run(choice, AVAILABLE, *args, first=first)
