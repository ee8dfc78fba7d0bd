"""Exact top-k of index scores on a GPU: scored and selected by Pallas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.indexer_scores import gpu as scores_gpu
from pallas_kernels.streaming_topk.gpu_select import WIDEST, pad, select, warps
from pallas_kernels.streaming_topk.reference import comparable
from pallas_kernels.streaming_topk.threshold import search_mask
from pallas_kernels.streaming_topk.xla import rows_per_block
from pallas_kernels.tiling import map_row_blocks
from pallas_kernels.triton import available, params

_ROWS = 264  # fewer programs, of which each selects in a row, idle the card


def fits(size: int) -> bool:
  """Whether one program holds a row of so many scores, in this JAX."""
  return available() and size <= WIDEST


def top_mask(
  scores: jax.Array, k: int, *, interpret: bool = False
) -> jax.Array:
  """As `threshold.top_mask`, of [T, S] scores; S at most 16,384.

  Args:
    scores: [T, S] float32.
    k: at least 1.
    interpret: run on any backend, slowly.

  Returns:
    [T, S] bool.
  """
  T, S = scores.shape
  if not fits(S):
    raise NotImplementedError(f'{S} scores a row; at most {WIDEST} are held')
  width = pl.next_power_of_2(S)

  def kernel(s_ref, o_ref):
    o_ref[...] = search_mask(s_ref[...], k, one_row=True).astype(jnp.int8)

  mask = pl.pallas_call(
    kernel,
    grid=(T,),
    in_specs=[pl.BlockSpec((1, width), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((1, width), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((T, width), jnp.int8),
    compiler_params=None if interpret else params(warps(width), 1),
    interpret=interpret,
    name='top_mask',
  )(pad(comparable(scores), width))
  return mask[:, :S] != 0


def streaming_topk(
  q: jax.Array,  # [T, I, H] bf16
  w: jax.Array,  # [T, I] f32
  key_pages: jax.Array,  # [P, page, H] bf16 or fp8
  key_scales: jax.Array | None,  # [P, page] f32
  page_table: jax.Array,  # [B, n] int32
  row_seq: jax.Array,  # [T] int32
  row_pos: jax.Array,  # [T] int32
  k: int,
  *,
  first: int = 0,
  block_bytes: int,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # [T, k] int32, [T, k] f32
  """See the public call; of wide rows 264 are scored at once all the same."""
  S = page_table.shape[1] * key_pages.shape[1]

  def best(q, w, row_seq, row_pos):
    scores = scores_gpu.indexer_scores(
      q,
      w,
      key_pages,
      key_scales,
      page_table,
      row_seq,
      row_pos,
      first=first,
      comparable=True,
      interpret=interpret,
    )
    return select(scores, k, interpret=interpret)

  T = q.shape[0]
  block = max(rows_per_block(4 * S, block_bytes, T), min(_ROWS, T))
  return map_row_blocks(best, block, q, w, row_seq, row_pos)
