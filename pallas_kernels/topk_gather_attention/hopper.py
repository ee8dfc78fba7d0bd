"""Attention over gathered rows on a Hopper GPU, by Pallas (Mosaic GPU).

A program takes 64 heads of one query row and a part of its keys. One
warpgroup copies tiles of 64 rows from the pool to shared memory, by
asynchronous copies of 16 bytes into the layout that the matrix units read,
while two others multiply the tile before. Each of those has every logit (64
heads, 64 keys) and half of the output's features: 128 registers a thread.
Triton waits for a tile's rows before it multiplies (gpu.py).

Pallas has copies of rows chosen by an index on Blackwell alone, hence the
inline code. It is the choice where this process has a Hopper GPU (dispatch.py).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tiling import cdiv, round_up
from pallas_kernels.topk_gather_attention.gpu import (
  LOWEST,
  PROCESSORS,
  check_dtypes,
  merge,
)

_HEADS = _KEYS = 64  # of a tile: one warpgroup's matrix operand
_BUFFERS = 2  # tiles of rows in shared memory
_IDS = 256  # of one copy
_COLUMNS = 64  # of a swizzled tile: 128 bytes
_SHARED = 227 << 10  # bytes of a program
_LOG2E = math.log2(math.e)


def _mosaic():
  """Pallas' Mosaic GPU backend.

  Raises:
    NotImplementedError: this JAX has none.
  """
  try:
    from jax.experimental.pallas import mosaic_gpu
  except ImportError as error:
    raise NotImplementedError(f'this JAX has no Mosaic GPU: {error}') from None
  return mosaic_gpu


def _check(q, rows, row_scales, latent_width, keys: int) -> None:
  check_dtypes(q, rows, row_scales)
  width = q.shape[-1]
  if latent_width % (2 * _COLUMNS) or latent_width > 512 or width % _COLUMNS:
    raise NotImplementedError(
      f'{latent_width} latent of {width} features: multiples of '
      f'{2 * _COLUMNS}, at most 512, and of {_COLUMNS}'
    )
  tiles = (_HEADS + _BUFFERS * _KEYS) * width * 2
  if tiles + 4 * keys + 2048 > _SHARED or rows.shape[1] % 8:
    raise NotImplementedError(
      f'{width} features, {keys} keys, rows of {rows.shape[1]}: tiles of '
      f'{tiles} bytes and the ids must fit {_SHARED - 2048}, and rows be '
      'multiples of 16 bytes'
    )


def parts_of(programs: int, k: int) -> int:
  """Parts of a row's keys, a power of two: as many as fill the card."""
  room = max(PROCESSORS // programs, 1)
  most = max(k // _KEYS, 1)
  return 1 << min(room, most).bit_length() - 1


def _transforms(mosaic):
  """Of tiles as the matrix units read them."""
  return (
    mosaic.TilingTransform((8, _COLUMNS)),
    mosaic.SwizzleTransform(2 * _COLUMNS),
  )


def _copy_rows(mosaic, pool_ref, ids_ref, tile_ref, first, fill):
  """Starts the copies of a tile's rows; the calling warpgroup's 128 threads.

  Eight threads copy 128 bytes of a row, which are one line of a swizzled
  tile of (8, 64): 16 bytes at place c of line r lie at place c xor r.

  Args:
    mosaic: the backend.
    pool_ref: [M, W] bf16, in global memory.
    ids_ref: [k] int32, in shared memory.
    tile_ref: [64, width] bf16, in shared memory.
    first: place of the tile's first id.
    fill: row that is read in place of a negative id.
  """
  from jax.experimental.mosaic.gpu import utils
  from jaxlib.mlir import ir
  from jaxlib.mlir.dialects import arith, gpu, llvm

  columns = tile_ref.shape[1] // _COLUMNS
  row_bytes = pool_ref.shape[1] * 2
  splat = mosaic.Layout.WG_SPLAT

  @mosaic.inline_mgpu(
    arg_types=(
      mosaic.RefType(),
      mosaic.RefType(),
      mosaic.RefType(_transforms(mosaic)),
      splat,
      splat,
    )
  )
  def start(_, pool, ids, tile, first, fill):
    i32 = ir.IntegerType.get_signless(32)
    i64 = ir.IntegerType.get_signless(64)
    none = ir.Type.parse('!llvm.void')
    const = lambda n: arith.constant(i32, n)
    add, mul = arith.addi, arith.muli
    address = lambda kind, ref: llvm.ptrtoint(kind, utils.memref_ptr(ref))
    scalar = lambda array: array.registers.flat[0]
    pool_at = address(i64, pool)
    ids_at, tile_at = address(i32, ids), address(i32, tile)
    thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
    thread = arith.remui(thread, const(128))
    place = arith.remui(thread, const(8))
    line = arith.remui(arith.divui(thread, const(8)), const(8))
    swizzled = mul(arith.xori(place, line), const(16))
    within = add(mul(line, const(128)), swizzled)
    for i in range(_KEYS // 16):
      row = add(arith.divui(thread, const(8)), const(16 * i))
      at = add(ids_at, mul(add(scalar(first), row), const(4)))
      read = 'ld.shared.s32 $0, [$1];'
      chosen = llvm.inline_asm(i32, [at], read, '=r,r', has_side_effects=True)
      absent = arith.cmpi(arith.CmpIPredicate.slt, chosen, const(0))
      chosen = arith.extsi(i64, arith.select(absent, scalar(fill), chosen))
      source = add(pool_at, mul(chosen, arith.constant(i64, row_bytes)))
      source = add(source, arith.extui(i64, mul(place, const(16))))
      band = mul(arith.divui(row, const(8)), const(columns * 1024))
      target = add(tile_at, add(band, within))
      for j in range(columns):
        copy = (
          'cp.async.cg.shared.global.L2::256B '
          f'[$0+{j * 1024}], [$1+{j * 128}], 16;'
        )
        llvm.inline_asm(
          none, [target, source], copy, 'r,l', has_side_effects=True
        )
    llvm.inline_asm(
      none, [], 'cp.async.commit_group;', '', has_side_effects=True
    )

  start(pool_ref, ids_ref, tile_ref, first, fill)


def _wait_for_copies(mosaic, left: int):
  """Waits until `left` of this thread's tiles are on the way, no more."""
  from jaxlib.mlir import ir
  from jaxlib.mlir.dialects import llvm

  @mosaic.inline_mgpu()
  def wait(_):
    none = ir.Type.parse('!llvm.void')
    text = f'cp.async.wait_group {left};'
    llvm.inline_asm(none, [], text, '~{memory}', has_side_effects=True)

  wait()


def _produce(mosaic, at, refs, tiles: int):
  """The warpgroup that brings queries, ids and rows to shared memory."""
  row, group, part = at
  fill_ref, slots_ref, q_ref, pool_ref, _, _, q, rows, ids, *barriers = refs
  q_here, ids_here, full, empty = barriers
  mosaic.set_max_registers(24, action='decrease')
  keys = ids.shape[0]
  for begin in range(0, keys, min(_IDS, keys)):
    some = min(_IDS, keys)
    mosaic.copy_gmem_to_smem(
      slots_ref.at[row, pl.ds(part * keys + begin, some)],
      ids.at[pl.ds(begin, some)],
      ids_here,
    )
  heads = pl.ds(group * _HEADS, _HEADS)
  mosaic.copy_gmem_to_smem(q_ref.at[row, heads], q, q_here)
  fill = fill_ref[row]
  mosaic.barrier_wait(ids_here)

  def give(i):
    mosaic.commit_smem()
    mosaic.barrier_arrive(full.at[lax.rem(i, _BUFFERS)])

  def tile(i, _):
    buffer = lax.rem(i, _BUFFERS)

    @pl.when(i >= _BUFFERS)
    def _():
      mosaic.barrier_wait(empty.at[buffer])

    _copy_rows(mosaic, pool_ref, ids, rows.at[buffer], i * _KEYS, fill)

    @pl.when(i > 0)
    def _():
      _wait_for_copies(mosaic, 1)
      give(i - 1)

  lax.fori_loop(0, tiles, tile, None)
  _wait_for_copies(mosaic, 0)
  give(jnp.int32(tiles - 1))


def _load(mosaic, ref, at, layout):
  """A vector that all threads hold as the layout says."""
  options = dict(layout=layout, optimized=False)
  try:
    return mosaic.load(ref.at[at], **options)
  except TypeError:  # JAX 0.10 takes the index apart
    return mosaic.load(ref, at, **options)


def _consume(mosaic, at, refs, tiles: int, half: int, scale: float):
  """A warpgroup that attends: all logits, and its half of the features."""
  row, group, part = at
  *_, out_ref, lse_ref, q, rows, ids, q_here, ids_here, full, empty = refs
  mosaic.set_max_registers(240, action='increase')
  features = out_ref.shape[-1] // 2
  mine = pl.ds(half * features, features)
  layout, cast = mosaic.Layout.WGMMA, mosaic.layout_cast
  wide = lambda x, shape: lax.broadcast_in_dim(x, shape, [0])
  mosaic.barrier_wait(q_here)
  mosaic.barrier_wait(ids_here)

  def tile(i, carry):
    acc, top, total = carry
    buffer = lax.rem(i, _BUFFERS)
    mosaic.barrier_wait(full.at[buffer])

    def multiply(acc_ref):
      mosaic.wgmma(acc_ref, q, rows.at[buffer].transpose((1, 0)))
      return acc_ref[...]

    logits = pl.run_scoped(multiply, mosaic.ACC((_HEADS, _KEYS), jnp.float32))
    chosen = _load(
      mosaic, ids, pl.ds(i * _KEYS, _KEYS), layout=layout.reduce(0)
    )
    valid = lax.broadcast_in_dim(chosen, logits.shape, [1]) >= 0
    logits = jnp.where(valid, logits * (scale * _LOG2E), -jnp.inf)
    new = jnp.maximum(top, logits.max(axis=1))
    shrink = jnp.exp2(top - new)
    p = jnp.exp2(logits - wide(new, logits.shape))
    acc = acc * wide(shrink, acc.shape)
    total = total * shrink + p.sum(axis=1)
    p = p.astype(jnp.bfloat16)
    add = lambda acc_ref: mosaic.wgmma(acc_ref, p, rows.at[buffer, :, mine])
    acc = pl.run_state(add)(mosaic.ACC.init(acc))
    mosaic.barrier_arrive(empty.at[buffer])
    return acc, new, total

  zero = jnp.zeros((_HEADS,), jnp.float32)
  start = (
    cast(jnp.zeros((_HEADS, features), jnp.float32), layout),
    cast(zero + LOWEST, layout.reduce(1)),
    cast(zero, layout.reduce(1)),
  )
  acc, top, total = lax.fori_loop(0, tiles, tile, start)
  # Without a slot, `fill` names a row that may hold NaN: acc does not count.
  none = total == 0
  safe = jnp.where(none, 1.0, total)
  out = jnp.where(wide(none, acc.shape), 0.0, acc / wide(safe, acc.shape))
  heads = pl.ds(group * _HEADS, _HEADS)
  out_ref[row, part, heads, mine] = out.astype(out_ref.dtype)
  if half == 0:
    lse = (top + jnp.log2(safe)) / _LOG2E
    lse_ref[row, part, heads] = jnp.where(none, -jnp.inf, lse)


def _kernel(*refs, mosaic, tiles: int, scale: float):
  at = tuple(lax.axis_index(name) for name in ('row', 'group', 'part'))
  warpgroup = lax.axis_index('warpgroup')
  for half in range(2):
    attend = functools.partial(_consume, mosaic, at, refs, tiles, half, scale)
    pl.when(warpgroup == half)(attend)
  pl.when(warpgroup == 2)(functools.partial(_produce, mosaic, at, refs, tiles))


def _scratch(mosaic, width: int, keys: int):
  """Queries, tiles of rows and ids, and who waits for them."""
  tiled = dict(transforms=_transforms(mosaic))
  copies = cdiv(keys, min(_IDS, keys))
  return (
    mosaic.SMEM((_HEADS, width), jnp.bfloat16, **tiled),
    mosaic.SMEM((_BUFFERS, _KEYS, width), jnp.bfloat16, **tiled),
    mosaic.SMEM((keys,), jnp.int32),
    mosaic.Barrier(),
    mosaic.Barrier(num_arrivals=copies),
    mosaic.Barrier(num_barriers=_BUFFERS),
    mosaic.Barrier(num_arrivals=2, num_barriers=_BUFFERS),
  )


def topk_gather_attention(
  q: jax.Array,  # [T, N, R + P] bf16
  rows: jax.Array,  # [M, W] bf16
  row_scales: jax.Array | None,
  slots: jax.Array,  # [T, k] int32
  *,
  scale: float,
  latent_width: int,
  block_bytes: int = 0,
) -> tuple[jax.Array, jax.Array]:  # [T, N, R], [T, N] f32
  """See the public call; nothing is gathered, so `block_bytes` is idle."""
  del block_bytes
  T, N, width = q.shape
  padded = round_up(N, _HEADS)
  parts = parts_of(T * padded // _HEADS, slots.shape[1])
  keys = round_up(cdiv(slots.shape[1], parts), _KEYS)
  keys = keys if keys <= _IDS else round_up(keys, _IDS)
  _check(q, rows, row_scales, latent_width, keys)
  mosaic = _mosaic()
  pad = ((0, 0), (0, keys * parts - slots.shape[1]))
  slots = jnp.pad(slots, pad, constant_values=-1)
  dtype = q.dtype if parts == 1 else jnp.float32
  out, lse = mosaic.kernel(
    functools.partial(_kernel, mosaic=mosaic, tiles=keys // _KEYS, scale=scale),
    out_type=(
      jax.ShapeDtypeStruct((T, parts, padded, latent_width), dtype),
      jax.ShapeDtypeStruct((T, parts, padded), jnp.float32),
    ),
    grid=(T, padded // _HEADS, parts),
    grid_names=('row', 'group', 'part'),
    num_threads=3,
    thread_name='warpgroup',
    scratch_types=_scratch(mosaic, width, keys),
    compiler_params=mosaic.CompilerParams(
      approx_math=True,
      reduction_scratch_bytes=512,
      lowering_semantics=mosaic.LoweringSemantics.Lane,
    ),
  )(
    jnp.maximum(jnp.max(slots, axis=1), 0),  # read in place of -1
    slots,
    jnp.pad(q, ((0, 0), (0, padded - N), (0, 0))),
    rows,
  )
  return merge(out, lse, N, q.dtype)
