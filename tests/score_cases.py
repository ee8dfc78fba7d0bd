"""Arguments of `indexer_scores` with poison, and its scores in float64."""

import jax.numpy as jnp
import numpy as np


def scores_f64(q, w, key_pages, key_scales, page_table, row_seq, row_pos):
  """One row and one page at a time, in float64."""
  wide = lambda a: np.asarray(a).astype(np.float64)
  q, w, keys = wide(q), wide(w), wide(key_pages)
  page_table, row_seq = np.asarray(page_table), np.asarray(row_seq)
  page, n = keys.shape[1], page_table.shape[1]
  out = np.full((len(q), n * page), -np.inf)
  for t in range(len(q)):
    for s in range(0, int(row_pos[t]) + 1, page):
      where = int(page_table[row_seq[t], s // page])
      if where < 0:
        continue
      count = min(page, int(row_pos[t]) + 1 - s)
      scores = w[t] @ np.maximum(q[t] @ keys[where, :count].T, 0)
      if key_scales is not None:
        scores = scores * wide(key_scales[where, :count])
      out[t, s : s + count] = scores
  return out


def make_case(dtype, lengths, rows, *, n, page=64, heads=4, width=16, seed=0):
  """Random arguments: pages in random order, NaN wherever nobody may look.

  Args:
    dtype: 'f32', 'bf16' or 'fp8' (keys; queries are then bf16).
    lengths: tokens of each sequence.
    rows: (sequence, position) of each row, position -1 for padding.
    n: width of the page table.
    page: tokens a page.
    heads: index heads.
    width: width of a head.
    seed: of the random numbers.

  Returns:
    The op's arguments as jax arrays.
  """
  rng = np.random.default_rng(seed)
  B, T = len(lengths), len(rows)
  wide = {'f32': jnp.float32, 'bf16': jnp.bfloat16, 'fp8': jnp.bfloat16}
  used = sum(-(-length // page) for length in lengths)
  P = used + 3
  free = list(rng.permutation(P))
  keys = np.full((P, page, width), np.nan, np.float32)
  scales = np.full((P, page), np.nan, np.float32)
  table = np.full((B, n), -1, np.int32)
  for b, length in enumerate(lengths):
    for s in range(0, length, page):
      where = table[b, s // page] = free.pop()
      count = min(page, length - s)
      keys[where, :count] = rng.normal(size=(count, width))
      scales[where, :count] = 2.0 ** rng.integers(-3, 4, count)
  seq = np.array([r[0] for r in rows], np.int32)
  pos = np.array([r[1] for r in rows], np.int32)
  q = rng.normal(size=(T, heads, width)).astype(np.float32)
  w = rng.normal(size=(T, heads)).astype(np.float32)
  q[pos < 0], w[pos < 0] = np.nan, np.nan
  key_dtype = jnp.float8_e4m3fn if dtype == 'fp8' else wide[dtype]
  return (
    jnp.asarray(q, wide[dtype]),
    jnp.asarray(w),
    jnp.asarray(keys).astype(key_dtype),
    jnp.asarray(scales) if dtype == 'fp8' else None,
    jnp.asarray(table),
    jnp.asarray(seq),
    jnp.asarray(pos),
  )
