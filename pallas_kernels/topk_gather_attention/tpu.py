"""Attention over selected rows on TPU: a gather by XLA, then a dense kernel.

`jnp.take` of whole rows, 128 lanes at a time, becomes an asynchronous gather
on the SparseCores (v5p, v6e, tpu7x); v5e, which has none, gathers on its
TensorCore. No copy of the pool is made. One block of query rows is gathered
in parts, so that the compiler may run a part's gather behind the kernels of
the parts before it (it does so for the last part, by its schedule).

A prefill kernel that shares rows between neighbouring queries pays only if
the union of eight neighbours' selections stays below about twice one
selection (spec/kernels_tpu.md section 2): it saves gather traffic and adds
matmuls. Without a measured overlap on a trained model it is not written.

Memory law: the gathered rows of as many query rows (a multiple of eight) as
fit in `block_bytes`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.streaming_topk.xla import rows_per_block
from pallas_kernels.tiling import map_row_blocks, round_up
from pallas_kernels.topk_gather_attention import dense_kernel, dma_kernel
from pallas_kernels.topk_gather_attention.dense_kernel import LANES, ROW_BYTES
from pallas_kernels.topk_gather_attention.rows import decode_rows

BLOCK_BYTES = 64 << 20
_PART = 8  # query rows gathered at once
_ROWS = 32  # query rows whose slots scalar memory holds, of 2048 each


def check(rows: jax.Array, k: int, interpret) -> None:
  """Raises `NotImplementedError` for what the kernel cannot do well."""
  width = rows.shape[1]
  if interpret is False and width % LANES:
    raise NotImplementedError(
      f'{rows.shape=} must be a multiple of {LANES} wide for the TPU kernel, '
      'since the whole pool would be copied; use implementation="xla"'
    )
  if round_up(k, LANES) * width * rows.dtype.itemsize > ROW_BYTES:
    raise NotImplementedError(
      f'{k=} rows of {width} {rows.dtype} are more than the {ROW_BYTES} bytes '
      'that the TPU kernel keeps in VMEM; use implementation="xla"'
    )


def topk_gather_attention(
  q: jax.Array,  # [T, N, R + P]
  rows: jax.Array,  # [M, W]
  row_scales: jax.Array | None,  # [M, G] f32
  slots: jax.Array,  # [T, k] int32
  *,
  scale: float,
  latent_width: int,
  block_bytes: int = BLOCK_BYTES,
  interpret=False,
) -> tuple[jax.Array, jax.Array]:  # [T, N, R], [T, N] f32
  """See the public call; `interpret`: True or `pltpu.InterpretParams`."""
  T, N, _ = q.shape
  check(rows, slots.shape[1], interpret)
  slots = _pad_slots(slots)

  def part(q, slots):
    return _attend(q, rows, row_scales, slots, scale, latent_width, interpret)

  def attend(q, slots):
    if q.shape[0] <= _PART or q.shape[0] % _PART:
      return part(q, slots)
    cut = lambda x: jnp.split(x, q.shape[0] // _PART)
    outs = [part(*xs) for xs in zip(cut(q), cut(slots))]
    return tuple(jnp.concatenate(xs) for xs in zip(*outs))

  if T == 0:
    return (
      jnp.zeros((0, N, latent_width), q.dtype),
      jnp.zeros((0, N), jnp.float32),
    )
  row_bytes = slots.shape[1] * rows.shape[1] * rows.dtype.itemsize
  block = rows_per_block(row_bytes, block_bytes, T)
  # A block that divides T saves padded copies of the queries and the output.
  whole = [b for b in range(_PART, block + 1, _PART) if T % b == 0]
  block = block if block == T else max(whole, default=block)
  return map_row_blocks(attend, block, q, slots)


def partial_attention(
  q: jax.Array,  # [T, N, R + P]
  rows: jax.Array,  # [M, W]
  row_scales: jax.Array | None,  # [M, G] f32
  slots: jax.Array,  # [T, k] int32, -1 for none
  count: jax.Array,  # [T] int32
  *,
  scale: float,
  latent_width: int,
  block_bytes: int = BLOCK_BYTES,
  interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, N, R], [T, N], [T, N] f32
  """See `partial.py`: `count` rows of each query are read, by a DMA each.

  The scales of records are gathered for all k slots. Nothing is gathered
  into HBM otherwise, so `block_bytes` bounds nothing here.
  """
  del block_bytes
  T, N, width = q.shape
  pack = 4 // rows.dtype.itemsize
  if rows.shape[1] % LANES or rows.shape[0] % pack:
    raise NotImplementedError(
      f'{rows.shape=} must be a multiple of {pack} rows and {LANES} wide for '
      'the TPU kernel; use implementation="xla"'
    )
  rope_width = width - latent_width
  if row_scales is not None and not _splits(latent_width, rope_width):
    raise NotImplementedError(
      f'{latent_width=} must be a multiple of {LANES} and {rope_width=} at '
      f'most {LANES // 2} for records; use implementation="xla"'
    )
  count = jnp.clip(count, 0, slots.shape[1])
  slots = _pad_slots(slots)
  R = round_up(latent_width, LANES)
  dtype = jnp.promote_types(q.dtype, jnp.bfloat16)
  if row_scales is None:
    dtype = jnp.promote_types(q.dtype, rows.dtype)

  def attend(q, slots, count):
    scales = None
    if row_scales is not None:
      at = dense_kernel.readable(slots)
      scales = jnp.take(row_scales, at, axis=0, mode='clip')
      q = dense_kernel.interleave(q, latent_width)
    acc, m, total = dma_kernel.partials(
      _pad_heads(q.astype(dtype)),
      rows,
      slots,
      count,
      scales,
      scale=scale,
      latent_width=R,
      rope_width=rope_width,
      interpret=pltpu.InterpretParams() if interpret is True else interpret,
    )
    return acc[:, :N, :latent_width], m[:, :N], total[:, :N]

  if T == 0:
    empty = jnp.zeros((0, N), jnp.float32)
    return jnp.zeros((0, N, latent_width), jnp.float32), empty, empty
  block = min(T, max(_ROWS * 2048 // slots.shape[1], 1))
  return map_row_blocks(attend, block, q, slots, count)


def _splits(latent_width: int, rope_width: int) -> bool:
  """Whether records are decoded in VMEM: whole groups, one tile of rotary."""
  return latent_width % LANES == 0 and 2 * rope_width <= LANES


def _attend(q, rows, row_scales, slots, scale, latent_width, interpret):
  """Gathers the rows of one part and attends to them."""
  N, width = q.shape[1:]
  rope_width = width - latent_width
  at = dense_kernel.readable(slots)
  take = lambda x: jnp.take(x, at, axis=0, mode='clip')
  gathered, scales = take(rows), None
  dtype = jnp.promote_types(q.dtype, jnp.bfloat16)
  if row_scales is None:
    dtype = jnp.promote_types(q.dtype, rows.dtype)
  elif _splits(latent_width, rope_width):
    scales = take(row_scales).swapaxes(1, 2)
    q = dense_kernel.interleave(q, latent_width)
  else:
    gathered = decode_rows(gathered, take(row_scales), latent_width, rope_width)
  out, lse = dense_kernel.attend(
    _pad_heads(q.astype(dtype)),
    _widen(gathered, round_up(gathered.shape[-1], LANES)),
    slots,
    scales,
    scale=scale,
    latent_width=round_up(latent_width, LANES),
    rope_width=rope_width,
    out_dtype=q.dtype,
    interpret=pltpu.InterpretParams() if interpret is True else interpret,
  )
  return out[:, :N, :latent_width], lse[:, :N]


def _pad_slots(slots: jax.Array) -> jax.Array:
  """Slots [T, k] with k to a multiple of 128, by -1."""
  k = max(round_up(slots.shape[1], LANES), LANES)
  missing = k - slots.shape[1]
  return jnp.pad(slots, ((0, 0), (0, missing)), constant_values=-1)


def _pad_heads(q: jax.Array) -> jax.Array:
  """Queries [T, N, ...] with N to a multiple of 16, a bf16 tile's rows."""
  missing = round_up(q.shape[1], 16) - q.shape[1]
  return jnp.pad(q, ((0, 0), (0, missing), (0, 0)))


def _widen(x: jax.Array, width: int) -> jax.Array:
  """Pads the last axis with zeros; nothing to do for a padded pool."""
  missing = width - x.shape[-1]
  if missing == 0:
    return x
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
