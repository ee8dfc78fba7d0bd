"""Partial attention that fetches a dynamic number of rows, one TPU core.

Each selected row is copied from the pool in HBM by a DMA of its own, so a
shard that owns few of a query's rows reads few. A DMA may start at any row of
a 32-bit array only; a bf16 pool is seen as 32-bit words of two rows each
(bytes: of four), which is how the pool lies in HBM anyway: nothing is copied
or laid out anew. A copy then brings the row and its neighbours, whose logits
are masked; neighbours may hold NaN, so what is not finite counts as 0 among
the values. A selected row that holds NaN still gives NaN, through its logit.

Rows of a query come in chunks, with a running softmax over chunks. While one
is worked on the next is in flight, also across queries.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.topk_gather_attention.dense_kernel import (
  LANES,
  NO,
  decode_bytes,
  matmul,
  record_logits,
  record_values,
)

CHUNK = LANES  # slots of one buffer
_GROUP = 8  # copies started, and waited for, without a look at the count


def finite(x: jax.Array) -> jax.Array:
  """x with 0 in place of NaN and infinity."""
  wide = x.astype(jnp.float32)
  return jnp.where(jnp.abs(wide) < jnp.inf, wide, 0).astype(x.dtype)


def words_of(rows: jax.Array) -> jax.Array:
  """Rows [M, W] as 32-bit words [M / pack, W], the first row lowest.

  What the kernel sees a narrow pool as in HBM. The interpreter has no such
  view, so there, and only there, the pool is converted beforehand.
  """
  pack = 4 // rows.dtype.itemsize
  if pack == 1:
    return rows
  rows = rows.reshape(-1, pack, rows.shape[1]).swapaxes(1, 2)
  return lax.bitcast_convert_type(rows, jnp.int32)


def accumulate(state, logits, keep, values):
  """One step of the running softmax.

  Args:
    state: refs acc [N, R], m [N, 128], l [N, 128].
    logits: [N, K] float32.
    keep: [1, K] bool.
    values: p [N, K] to its weighted sums [N, R].
  """
  acc, m, l = state  # noqa: E741
  logits = jnp.where(keep, logits, NO)
  before = m[:, :1]
  top = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
  base = jnp.where(top > NO, top, 0)
  p = jnp.exp(logits - base)
  decay = jnp.exp(before - base)
  total = decay * l[:, :1] + jnp.sum(p, axis=1, keepdims=True)
  acc[...] = acc[...] * decay + values(p)
  m[...] = jnp.broadcast_to(top, m.shape)
  l[...] = jnp.broadcast_to(total, l.shape)


def _groups(count_ref, size, t, c):
  """Groups of copies of chunk c of row t."""
  left = jnp.clip(count_ref[t] - c * size, 0, size)
  return pl.cdiv(left, _GROUP)


def _start(slots_ref, count_ref, words, buffer, arrived, pack, t, c, half):
  """Starts the copies of chunk c of row t into a half of the buffer."""
  size = buffer.shape[1]

  def group(g, _):
    for i in range(_GROUP):
      at = g * _GROUP + i
      row = jnp.maximum(slots_ref[t, c * size + at], 0) // pack
      pltpu.make_async_copy(
        words.at[pl.ds(row, 1)],
        buffer.at[half, pl.ds(at, 1)],
        arrived.at[half],
      ).start()

  lax.fori_loop(0, _groups(count_ref, size, t, c), group, None)


def _wait(slots_ref, count_ref, words, buffer, arrived, t, c, half):
  """Waits for what `_start` started, a group at a time by its bytes."""
  del slots_ref, words
  whole = buffer.at[half, pl.ds(0, _GROUP)]

  def group(g, _):
    pltpu.make_async_copy(whole, whole, arrived.at[half]).wait()

  lax.fori_loop(0, _groups(count_ref, buffer.shape[1], t, c), group, None)


def kernel(slots_ref, count_ref, q_ref, keep_ref, *refs, dtype, scale, widths):
  """One query row.

  Args:
    slots_ref: [T, k] int32, prefetched; -1 reads row 0.
    count_ref: [T] int32, prefetched.
    q_ref: [1, N, up to W].
    keep_ref: [1, chunks, C * pack] int32, 1 for a selected row.
    *refs: records: scales [1, chunks, G, C * pack] f32; pool [M, W]; then
      outputs acc [1, N, R], m and l [1, N, 128]; then scratch: buffer
      [2, C, W] words, turn [1] int32, semaphores [2].
    dtype: of the pool.
    scale: softmax scale.
    widths: R, a multiple of 128, and P.
  """
  pack = 4 // jnp.dtype(dtype).itemsize  # rows of one word
  scales_ref, refs = (refs[0], refs[1:]) if pack == 4 else (None, refs)
  pool, acc, m, l, buffer, turn, arrived = refs  # noqa: E741
  words = pool if pool.dtype.itemsize == 4 else pool.bitcast(jnp.int32)
  t, rows, size = pl.program_id(0), pl.num_programs(0), buffer.shape[1]
  chunks = lambda t: jnp.maximum(pl.cdiv(count_ref[t], size), 1)
  copies = slots_ref, count_ref, words, buffer, arrived
  start = functools.partial(_start, *copies, pack)
  wait = functools.partial(_wait, *copies)

  @pl.when(t == 0)
  def _():
    turn[0] = 0
    # What no copy has written yet is masked like any neighbour.
    buffer[...] = jnp.zeros_like(buffer)
    start(0, 0, 0)

  acc[...] = jnp.zeros_like(acc)
  m[...] = jnp.full_like(m, NO)
  l[...] = jnp.zeros_like(l)

  def chunk(c, _):
    half = turn[0] & 1
    last = c + 1 == chunks(t)
    # The chunk after this one, of this row or of the next.
    next_t, next_c = jnp.where(last, t + 1, t), jnp.where(last, 0, c + 1)
    pl.when(next_t < rows)(lambda: start(next_t, next_c, 1 - half))
    wait(t, c, half)
    turn[0] += 1
    keep = keep_ref[0, pl.ds(c, 1)] > 0
    state = (acc.at[0], m.at[0], l.at[0])
    if pack == 4:
      records = pltpu.bitcast(buffer[half], dtype)
      _attend_records(
        q_ref[0], records, scales_ref[0, c], keep, state, scale, widths
      )
    else:
      _attend_rows(q_ref[0], buffer[half], dtype, keep, state, scale, widths)

  lax.fori_loop(0, chunks(t), chunk, None)


def _attend_rows(q, words, dtype, keep, state, scale, widths):
  """Adds one chunk of f32 or bf16 rows."""
  rows = pltpu.bitcast(words, dtype).astype(q.dtype)
  logits = matmul(q, rows[:, : q.shape[1]], 1) * scale
  values = finite(rows[:, : widths[0]])
  accumulate(
    state, logits, keep, lambda p: matmul(p.astype(q.dtype), values, 0)
  )


def _attend_records(q, records, scales, keep, state, scale, widths):
  """Adds one chunk of records."""
  latent, rope = (x.astype(q.dtype) for x in decode_bytes(records, *widths))
  logits = record_logits(q, latent, rope, scales) * scale
  latent, scales = finite(latent), finite(scales)
  accumulate(state, logits, keep, lambda p: record_values(p, latent, scales))


def _operands(q, slots, count, scales, pack, chunk):
  """Queries, the rows of each word that are selected, and scales by row."""
  T, k = slots.shape
  by_row = lambda x: jnp.repeat(x, pack, axis=1)
  chunked = lambda x: x.reshape(T, k // chunk, chunk * pack, *x.shape[2:])
  mine = by_row(slots) % pack == jnp.arange(k * pack) % pack
  inside = jnp.arange(k) < count[:, None]
  keep = mine & by_row((slots >= 0) & inside)
  arrays = [q, chunked(keep.astype(jnp.int32))]
  if scales is not None:
    arrays.append(chunked(by_row(scales)).swapaxes(2, 3))
  return arrays


def _cost(q, rows, k, latent_width):
  """With all k slots in use; fewer cost less."""
  T, N, width = q.shape
  return pl.CostEstimate(
    flops=2 * T * N * k * (width + latent_width),
    transcendentals=T * N * k,
    bytes_accessed=q.size * q.dtype.itemsize
    + T * k * rows.shape[1] * rows.dtype.itemsize
    + 4 * T * N * (latent_width + 2 * LANES),
  )


def partials(
  q: jax.Array,
  rows: jax.Array,
  slots: jax.Array,
  count: jax.Array,
  scales: jax.Array | None,
  *,
  scale: float,
  latent_width: int,
  rope_width: int,
  interpret,
  chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Attends to the first `count` slots of each row.

  Args:
    q: [T, N, R + P], or of `interleave` for records; at least as wide a
      dtype as the rows'. N is a multiple of 16.
    rows: [M, W] pool; W is a multiple of 128, M of the rows of a word.
    slots: [T, k] int32, -1 for none; k is a multiple of `chunk`.
    count: [T] int32.
    scales: [T, k, G] float32 of records, else None.
    scale: softmax scale.
    latent_width: R, a multiple of 128.
    rope_width: P.
    interpret: `pltpu.InterpretParams` or False.
    chunk: slots of one buffer; 128 lanes of logits when compiled.

  Returns:
    acc [T, N, R], m [T, N] and l [T, N], float32.
  """
  (T, N, _), (k, W) = q.shape, (slots.shape[1], rows.shape[1])
  pack = 4 // rows.dtype.itemsize
  block = lambda *shape: pl.BlockSpec(
    (1, *shape), lambda t, *_: (t,) + (0,) * len(shape)
  )
  arrays = _operands(q, slots, count, scales, pack, chunk)
  words = jnp.float32 if pack == 1 else jnp.int32
  acc, m, l = pl.pallas_call(  # noqa: E741
    functools.partial(
      kernel,
      dtype=rows.dtype,
      scale=scale,
      widths=(latent_width, rope_width),
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(T,),
      in_specs=[
        *(block(*x.shape[1:]) for x in arrays),
        pl.BlockSpec(memory_space=pltpu.HBM),
      ],
      out_specs=[block(N, latent_width), block(N, LANES), block(N, LANES)],
      scratch_shapes=[
        pltpu.VMEM((2, chunk, W), words),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((T, N, width), jnp.float32)
      for width in (latent_width, LANES, LANES)
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('arbitrary',),
      # Slots are within the pool; a check costs as much as a copy.
      disable_bounds_checks=True,
    ),
    cost_estimate=_cost(q, rows, k, latent_width),
    interpret=interpret,
    name='partial_attention',
  )(slots, count, *arrays, words_of(rows) if interpret else rows)
  return acc, m[..., 0], l[..., 0]
