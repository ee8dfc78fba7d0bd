"""Grouped matmul as a Pallas TPU kernel: a list of visits, built outside.

A visit is one expert's share of one row tile. The grid is (tiles of outputs,
visits): rows are sorted, so an expert's visits follow each other and its
weights, fetched whole in the contracted axis, are read once for each tile of
outputs; an expert without rows has no visit and is never read. A row tile's
visits follow each other too, so its output block stays in VMEM while each
visit fills in its own rows.

fp8 weights are widened where they are multiplied, [outputs, 128] at a time:
each partial product is scaled by its block's number and added in float32.
An e4m3 value is exact in bf16, so nothing is rounded before the sum and no
wide copy of the weights exists.

Memory law: two blocks of weights, rows and outputs in VMEM; in HBM nothing
beside the visit list, five int32 a visit, and one layer's scales.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_scale import BLOCK, FP8
from pallas_kernels.block_sizes import block_sizes
from pallas_kernels.tiling import cdiv, precision

LANES = 128
ROWS = 128  # rows of a tile, as many as the matrix unit is deep
_WEIGHT_BYTES = 6 << 20  # of one block of weights; two are in VMEM
_VMEM_BYTES = 48 << 20  # of 64 MiB on the smallest generation


def num_visits(experts: int, rows: int, tile: int) -> int:
  """Visits of the grid: the most that any sizes need, rows of nobody too."""
  return cdiv(rows, tile) + min(experts + 1, rows) - 1


def visit_list(
  group_sizes: jax.Array, rows: int, tile: int
) -> tuple[jax.Array, ...]:
  """Which expert works on which row tile, in order.

  Args:
    group_sizes: [E] int32 rows of each expert; they may sum to less than
      `rows`, and what is left belongs to nobody.
    rows: M.
    tile: rows of a tile.

  Returns:
    expert, row tile, first row, end row, and whether the visit is the first
    of its tile: int32 [V] each. Rows of nobody, and visits past the last
    one, have no rows and repeat an expert, so that nothing is fetched.
  """
  E = group_sizes.shape[0]
  tiles = cdiv(rows, tile)
  visits = num_visits(E, rows, tile)
  ends = jnp.cumsum(group_sizes).astype(jnp.int32)
  ends = jnp.append(ends, jnp.int32(rows))
  starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
  first_tile = starts // tile
  count = jnp.where(ends > starts, (ends - 1) // tile - first_tile + 1, 0)
  visit_ends = jnp.cumsum(count)
  at = jnp.arange(visits, dtype=jnp.int32)
  group = jnp.searchsorted(visit_ends, at, side='right').astype(jnp.int32)
  live = group < E + 1
  group = jnp.minimum(group, E)
  within = at - (visit_ends[group] - count[group])
  row_tile = jnp.where(live, first_tile[group] + within, tiles - 1)
  mine = live & (group < E)
  last = jnp.max(jnp.where(group_sizes > 0, jnp.arange(E), 0))
  expert = jnp.where(mine, group, last)
  before = jnp.concatenate([jnp.full(1, -1, jnp.int32), row_tile[:-1]])
  return tuple(
    a.astype(jnp.int32)
    for a in (
      expert,
      row_tile,
      jnp.where(mine, starts[group], 0),
      jnp.where(mine, ends[group], 0),
      row_tile != before,
    )
  )


def _product(x_ref, w_ref, scale_ref, first_block, depth, *, unroll):
  """One visit's [rows, outputs] float32; see the module."""
  transposed = (((1,), (1,)), ((), ()))
  if scale_ref is None:
    x, w = x_ref[...], w_ref[0, 0]
    return lax.dot_general(
      x,
      w,
      transposed,
      precision=precision(x, w),
      preferred_element_type=jnp.float32,
    )
  blocks = cdiv(w_ref.shape[2], LANES)

  def step(i, total):
    at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
    x = x_ref[:, at]
    w = w_ref[0, 0, :, at].astype(x.dtype)
    part = lax.dot_general(
      x,
      w,
      transposed,
      precision=precision(x, w),
      preferred_element_type=jnp.float32,
    )
    scaled = [
      part[:, b * LANES : (b + 1) * LANES] * scale_ref[0, 0, first_block + b, i]
      for b in range(blocks)
    ]
    return total + jnp.concatenate(scaled, axis=1)

  zero = jnp.zeros((x_ref.shape[0], w_ref.shape[2]), jnp.float32)
  return lax.fori_loop(0, depth // LANES, step, zero, unroll=unroll)


def _kernel(
  layer,  # [1] int32, and visits [V] int32 each, in SMEM
  expert,
  row_tile,
  start,
  end,
  first,
  x_ref,  # [rows, D]
  w_ref,  # [1, 1, outputs, D]
  *refs,  # [1, 1, f, d] f32 in SMEM with fp8 weights; out [rows, outputs]
  always,
  unroll,
):
  scale_ref = refs[0] if len(refs) == 2 else None
  out_ref = refs[-1]
  rows, outputs = out_ref.shape
  block, visit = pl.program_id(0) * (outputs // LANES), pl.program_id(1)

  @pl.when(first[visit] == 1)
  def clear():
    out_ref[...] = jnp.zeros_like(out_ref)

  def fill():
    depth = x_ref.shape[1]
    product = _product(x_ref, w_ref, scale_ref, block, depth, unroll=unroll)
    row = row_tile[visit] * rows + lax.broadcasted_iota(
      jnp.int32, (rows, outputs), 0
    )
    own = (row >= start[visit]) & (row < end[visit])
    out_ref[...] = jnp.where(own, product.astype(out_ref.dtype), out_ref[...])

  if always:
    fill()
  else:
    pl.when(start[visit] < end[visit])(fill)


def _check(x, weights, scale_block) -> None:
  """Raises `NotImplementedError` for what the kernel does not take."""
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(f'rows in {x.dtype}: bf16 or f32')
  if weights.dtype not in (x.dtype, FP8):
    raise NotImplementedError(
      f'weights in {weights.dtype} with rows in {x.dtype}: the same or e4m3'
    )
  if weights.dtype == FP8 and tuple(scale_block) != BLOCK:
    raise NotImplementedError(f'scale blocks of {scale_block}: {BLOCK}')
  D, F = x.shape[1], weights.shape[2]
  if D % LANES or F < LANES:
    raise NotImplementedError(
      f'weights {F}x{D}: inputs in multiples of {LANES}, at least {LANES} '
      'outputs'
    )


def _outputs_of_a_block(F: int, D: int, itemsize: int) -> int:
  """Outputs of one block: a multiple of 128 within the VMEM budget."""
  most = max(_WEIGHT_BYTES // (D * itemsize) // LANES, 1) * LANES
  blocks = cdiv(cdiv(F, LANES) * LANES, most)
  return cdiv(cdiv(F, LANES), blocks) * LANES


def _block_sizes(M: int, F: int, D: int, dtype: jnp.dtype) -> dict[str, int]:
  """Rows and outputs of a block, and trips of its loop that are unrolled."""
  return block_sizes(
    'grouped_matmul',
    dict(rows=M, outputs=F, inputs=D),
    dtype,
    dict(
      row_tile=ROWS,
      outputs=_outputs_of_a_block(F, D, dtype.itemsize),
      unroll=8,
    ),
  )


def grouped_matmul(
  x: jax.Array,  # [M, D], rows sorted by expert
  weights: jax.Array,  # [L, E, F, D]
  scales: jax.Array | None,  # [L, E, f, d] f32
  layer: jax.Array | int,
  group_sizes: jax.Array,  # [E] int32
  *,
  scale_block: tuple[int, int],
  interpret=False,
  profile: bool = False,
) -> jax.Array:  # [M, F]
  """See the public call.

  Args:
    x: see there.
    weights: see there.
    scales: see there.
    layer: see there.
    group_sizes: see there.
    scale_block: see there; (128, 128) only.
    interpret: True or `pltpu.InterpretParams` to run on a CPU.
    profile: multiply in every visit, for a cycle estimate that takes
      data-dependent branches as false. The result stays right.
  """
  _check(x, weights, scale_block)
  M, D = x.shape
  E, F = weights.shape[1:3]
  if M == 0:
    return jnp.zeros((0, F), x.dtype)
  sizes = _block_sizes(M, F, D, weights.dtype)
  rows, outputs = min(sizes['row_tile'], M), sizes['outputs']
  visits = visit_list(group_sizes, M, rows)

  at_rows = lambda n, v, layer, expert, tile, *_: (tile[v], 0)
  at_weights = lambda n, v, layer, expert, *_: (layer[0], expert[v], n, 0)
  at_scales = lambda n, v, layer, expert, *_: (0, expert[v], 0, 0)
  at_out = lambda n, v, layer, expert, tile, *_: (tile[v], n)
  in_specs = [
    pl.BlockSpec((rows, D), at_rows),
    pl.BlockSpec((1, 1, outputs, D), at_weights),
  ]
  operands = [x, weights]
  if scales is not None:
    whole = (1, 1, *scales.shape[2:])
    in_specs.append(pl.BlockSpec(whole, at_scales, memory_space=pltpu.SMEM))
    # The pool's scales would be copied to another layout, all layers of them.
    operands.append(lax.dynamic_slice_in_dim(scales, layer, 1))
  call = pl.pallas_call(
    functools.partial(_kernel, always=profile, unroll=sizes['unroll']),
    out_shape=jax.ShapeDtypeStruct((M, F), x.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=6,
      grid=(cdiv(F, outputs), visits[0].shape[0]),
      in_specs=in_specs,
      out_specs=pl.BlockSpec((rows, outputs), at_out),
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      vmem_limit_bytes=_VMEM_BYTES,
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * M * F * D,
      transcendentals=0,
      bytes_accessed=M * (D + F) * x.dtype.itemsize
      + min(M, E) * F * D * weights.dtype.itemsize,
    ),
    interpret=interpret,
    name='grouped_matmul',
  )
  layer = jnp.asarray(layer, jnp.int32).reshape(1)
  return call(layer, *visits, *operands)


def scaled_matmul(
  x: jax.Array,  # [T, D]
  values: jax.Array,  # [F, D] e4m3
  scales: jax.Array,  # [f, d] f32
  block: tuple[int, int],
  *,
  interpret=False,
  profile: bool = False,
) -> jax.Array:  # [T, F]
  """`block_scale.scaled_matmul`: all rows belong to one expert."""
  return grouped_matmul(
    x,
    values[None, None],
    scales[None, None],
    0,
    jnp.full(1, x.shape[0], jnp.int32),
    scale_block=block,
    interpret=interpret,
    profile=profile,
  )
