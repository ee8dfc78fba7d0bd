"""Exact top-k on a GPU, by Pallas (Triton): a threshold found by counting.

Up to 16,384 scores of a row stay in the registers of one program, which runs
the whole search of threshold.py; XLA reads the row again for each of its 23
counts. Wider rows are cut into blocks: a launch counts, in every block, the
keys that reach each of 32 bounds, and the next one goes on between the two
bounds that enclose the k-th key. Winners are written in order of position.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.indexer_scores import gpu as scores_gpu
from pallas_kernels.streaming_topk.reference import comparable
from pallas_kernels.streaming_topk.threshold import search_mask, sortable
from pallas_kernels.streaming_topk.xla import rows_per_block
from pallas_kernels.tiling import cdiv, map_row_blocks, round_up
from pallas_kernels.triton import available, params, scatter

_WIDEST = 16384  # scores of a row that registers hold
_CHUNK = 512  # scores that are compared at once in a wide row
_BLOCKS = 128  # of a wide row
_BITS = 5  # of the threshold found in a launch: 32 bounds


def fits(size: int) -> bool:
  """Whether one program holds a row of so many scores, in this JAX."""
  return available() and size <= _WIDEST


def _pad(scores: jax.Array, width: int) -> jax.Array:
  # Triton's arrays are powers of two; what is added is never chosen.
  more = ((0, 0), (0, width - scores.shape[1]))
  return jnp.pad(scores, more, constant_values=-jnp.inf)


def _warps(width: int) -> int:
  return max(4, min(16, width // 512))


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
    raise NotImplementedError(f'{S} scores a row; at most {_WIDEST} are held')
  width = pl.next_power_of_2(S)

  def kernel(s_ref, o_ref):
    o_ref[...] = search_mask(s_ref[...], k).astype(jnp.int8)

  mask = pl.pallas_call(
    kernel,
    grid=(T,),
    in_specs=[pl.BlockSpec((1, width), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((1, width), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((T, width), jnp.int8),
    compiler_params=None if interpret else params(_warps(width), 1),
    interpret=interpret,
    name='top_mask',
  )(_pad(comparable(scores), width))
  return mask[:, :S] != 0


def _write(ref, row, chosen, before, ids, interpret: bool):
  """Writes the chosen ids behind `before` others of the row."""
  places = before + jnp.cumsum(chosen) - 1
  spare = ref.shape[1] - 1
  scatter(ref, row, places, ids, chosen == 1, spare, interpret)


def _narrow(scores: jax.Array, k: int, interpret: bool):
  """Positions [T, k + 1], what is left unwritten undefined; counts [T]."""
  T, width = scores.shape

  def kernel(s_ref, o_ref, count_ref):
    row = pl.program_id(0)
    chosen = search_mask(s_ref[row, :][None], k)[0].astype(jnp.int32)
    ids = lax.broadcasted_iota(jnp.int32, (width,), 0)
    _write(o_ref, row, chosen, 0, ids, interpret)
    count_ref[row] = jnp.sum(chosen)

  return pl.pallas_call(
    kernel,
    grid=(T,),
    out_shape=(
      jax.ShapeDtypeStruct((T, k + 1), jnp.int32),
      jax.ShapeDtypeStruct((T,), jnp.int32),
    ),
    compiler_params=None if interpret else params(_warps(width), 1),
    interpret=interpret,
    name='select_narrow',
  )(scores)


def _keys(scores: jax.Array) -> jax.Array:
  """uint32 in the order of the scores, 0 for -inf."""
  return jnp.where(scores > -jnp.inf, sortable(scores), jnp.uint32(0))


def _count(keys: jax.Array, bounds: jax.Array, interpret: bool) -> jax.Array:
  """How many keys of each block reach each bound.

  Args:
    keys: [T, blocks, chunks * _CHUNK] uint32.
    bounds: [T, 32] uint32.
    interpret: run on any backend.

  Returns:
    [T, blocks, 32] int32.
  """
  T, blocks, size = keys.shape

  def kernel(keys_ref, bounds_ref, o_ref):
    row, block = pl.program_id(0), pl.program_id(1)
    bounds = bounds_ref[row, :]

    def add(i, total):
      some = keys_ref[row, block, pl.ds(i * _CHUNK, _CHUNK)]
      reach = some[:, None] >= bounds[None, :]
      return total + jnp.sum(reach.astype(jnp.int32), axis=0)

    start = jnp.zeros(bounds.shape, jnp.int32)
    o_ref[row, block, :] = lax.fori_loop(0, size // _CHUNK, add, start)

  shape = (T, blocks, bounds.shape[1])
  return pl.pallas_call(
    kernel,
    grid=(T, blocks),
    out_shape=jax.ShapeDtypeStruct(shape, jnp.int32),
    compiler_params=None if interpret else params(4, 2),
    interpret=interpret,
    name='count_reached',
  )(keys, bounds)


def _threshold(keys: jax.Array, k: int, interpret: bool) -> jax.Array:
  """[T] uint32: the largest bound that k keys of a row reach; 0 for none."""
  bound = jnp.zeros(keys.shape[:1], jnp.uint32)
  step = jnp.arange(1 << _BITS, dtype=jnp.uint32)
  for shift in reversed(range(0, 32, _BITS)):
    # The first round has two bits left: its other bounds would wrap.
    known = step < (1 << min(_BITS, 32 - shift))
    tries = bound[:, None] + jnp.where(known, step << shift, 0)
    counts = jnp.sum(_count(keys, tries, interpret), axis=1)
    reached = (counts >= k) & known & (step > 0)
    last = jnp.sum(reached, axis=1, dtype=jnp.uint32)  # counts never rise
    bound = bound + (last << shift)
  return bound


def _wide(scores: jax.Array, k: int, interpret: bool):
  """As `_narrow`, for rows of any width."""
  T, S = scores.shape
  blocks = min(_BLOCKS, pl.next_power_of_2(cdiv(S, _CHUNK)))
  size = round_up(cdiv(S, blocks), _CHUNK)
  keys = _keys(_pad(scores, blocks * size)).reshape(T, blocks, size)
  bound = _threshold(keys, k, interpret)
  at = bound[:, None, None]
  above = jnp.sum(keys > at, axis=2, dtype=jnp.int32)
  ties = jnp.sum((keys == at) & (keys > 0), axis=2, dtype=jnp.int32)
  wanted = k - jnp.sum(above, axis=1)
  past = lambda x: jnp.cumsum(x, axis=1) - x
  ties_before = past(ties)
  taken = jnp.minimum(ties_before, wanted[:, None])

  def kernel(keys_ref, bound_ref, wanted_ref, before_ref, ties_ref, o_ref):
    row, block = pl.program_id(0), pl.program_id(1)
    bound, wanted = bound_ref[row], wanted_ref[row]

    def chunk(i, carry):
      before, ties = carry
      some = keys_ref[row, block, pl.ds(i * _CHUNK, _CHUNK)]
      equal = ((some == bound) & (some > 0)).astype(jnp.int32)
      tie = (equal == 1) & (ties + jnp.cumsum(equal) <= wanted)
      chosen = ((some > bound) | tie).astype(jnp.int32)
      ids = lax.broadcasted_iota(jnp.int32, (_CHUNK,), 0)
      ids = ids + block * size + i * _CHUNK
      _write(o_ref, row, chosen, before, ids, interpret)
      return before + jnp.sum(chosen), ties + jnp.sum(equal)

    start = before_ref[row, block], ties_ref[row, block]
    lax.fori_loop(0, size // _CHUNK, chunk, start)

  positions = pl.pallas_call(
    kernel,
    grid=(T, blocks),
    out_shape=jax.ShapeDtypeStruct((T, k + 1), jnp.int32),
    compiler_params=None if interpret else params(4, 2),
    interpret=interpret,
    name='select_wide',
  )(keys, bound, wanted, past(above) + taken, ties_before)
  found = jnp.sum(above, axis=1) + jnp.minimum(jnp.sum(ties, axis=1), wanted)
  return positions, found


def select(
  scores: jax.Array, k: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """The k largest scores of every row, ties to the lowest position.

  Args:
    scores: [T, S] `comparable` float32.
    k: at least 1.
    interpret: run on any backend, slowly.

  Returns:
    positions [T, k] int32 ascending, then -1; scores [T, k] float32, -inf
    beside -1.
  """
  if scores.shape[1] <= _WIDEST:
    width = pl.next_power_of_2(scores.shape[1])
    positions, count = _narrow(_pad(scores, width), k, interpret)
  else:
    positions, count = _wide(scores, k, interpret)
  some = lax.broadcasted_iota(jnp.int32, (len(scores), k), 1) < count[:, None]
  positions = jnp.where(some, positions[:, :k], -1)
  winners = jnp.take_along_axis(scores, jnp.maximum(positions, 0), axis=1)
  return positions, jnp.where(some, winners, -jnp.inf)


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
  """See the public call; [rows, S] scores exist within `block_bytes`."""
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
      interpret=interpret,
    )
    return select(comparable(scores), k, interpret=interpret)

  # Scores, their order-preserving keys, and a padded copy of either.
  block = rows_per_block(16 * S, block_bytes, q.shape[0])
  return map_row_blocks(best, block, q, w, row_seq, row_pos)
