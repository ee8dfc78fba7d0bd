"""Grouped matmul on a GPU, by Pallas (Triton).

Rows are cut into tiles of one expert each, so at most `row_tiles` of them; a
program multiplies one tile by some outputs' weights. It finds its expert
from the group sizes by itself: nothing is launched beside the kernel, an
expert without rows has no tile and its weights are never read.

Weights are the left operand, [outputs, inputs] as they lie: the matrix unit
takes 64 of their rows with as few as 16 of x's, so a tile that is nearly
empty, as in decode, wastes little. Programs go through the outputs `_BAND`
row tiles at a time: tiles of one expert read its weights together, and the
rows of a band stay in the L2 cache meanwhile.

fp8 weights are widened in registers, where an e4m3 value is exact in the
rows' dtype; a block's product is scaled and added in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.block_scale import FP8
from pallas_kernels.tiling import cdiv, precision
from pallas_kernels.triton import check_addressable, params, store_rows

_BAND = 8  # row tiles that go through the outputs together
_LEAST = 16  # rows, outputs and inputs that a matrix product needs


class Tiles(NamedTuple):
  """What one program multiplies, and how.

  Attributes:
    rows: of a row tile, a power of two from 16.
    outputs: of a program, a power of two from 16 that divides F.
    inputs: of a step of its loop, likewise of D.
    warps: of 32 threads, a program.
    stages: of its loads in flight together.
  """

  rows: int
  outputs: int
  inputs: int
  warps: int
  stages: int


def choose_tiles(
  M: int,
  E: int,
  F: int,
  D: int,
  x_dtype: jnp.dtype,
  weight_dtype: jnp.dtype,
  scale_block: tuple[int, int],
) -> Tiles:
  """Tiles of these shapes: most experts' rows fit one row tile.

  Raises:
    NotImplementedError: no power of two from 16 divides F or D, or what
      shares a scale.
  """
  fp8 = weight_dtype == FP8
  rows = min(max(pl.next_power_of_2(cdiv(2 * M, E)), _LEAST), 128)
  if x_dtype == jnp.float32:  # no matrix unit takes it: registers bound it
    most = Tiles(min(rows, 32), 64, 32, 4, 2)
  elif rows < 64:  # bound by the weights' bytes, of which more are in flight
    most = Tiles(rows, 128 if fp8 else 64, 128, 4, 4)
  elif rows == 64 or fp8:  # two programs a processor: one widens, one adds
    most = Tiles(64, 128, 64, 4, 4)
  else:
    most = Tiles(128, 128, 64, 8, 3)
  # A greatest common divisor with a power of two is one.
  block = scale_block if fp8 else (0, 0)
  outputs = math.gcd(most.outputs, F, block[0])
  inputs = math.gcd(most.inputs, D, block[1])
  if min(outputs, inputs) < _LEAST:
    scaled = f' in scale blocks of {tuple(block)}' if fp8 else ''
    raise NotImplementedError(
      f'weights {F}x{D}{scaled}: multiples of {_LEAST} are taken'
    )
  return most._replace(outputs=outputs, inputs=inputs)


def row_tiles(rows: int, experts: int, tile: int) -> int:
  """The most row tiles that any sizes need, those of nobody's rows too."""
  groups = min(experts + 1, rows)
  return groups + (rows - groups) // tile


def _rows_of_tile(sizes, number, tile: int, M: int):
  """Which rows a tile has.

  Args:
    sizes: [E'] int32 rows of each expert, zeros behind the last.
    number: of the tile.
    tile: rows of a tile.
    M: all rows.

  Returns:
    The tile's expert, or E' for a tile of rows that are nobody's; its first
    row; the end of its group's rows, at or before the first row where there
    are no tiles any more.
  """
  total = lambda a: jnp.sum(a, dtype=jnp.int32)
  tiles = (sizes + (tile - 1)) // tile
  expert = total((jnp.cumsum(tiles) <= number).astype(jnp.int32))
  index = lax.broadcasted_iota(jnp.int32, sizes.shape, 0)
  before = index < expert
  within = number - total(jnp.where(before, tiles, 0))
  start = total(jnp.where(before, sizes, 0))
  end = start + total(jnp.where(index == expert, sizes, 0))
  end = jnp.where(expert < sizes.shape[0], jnp.minimum(end, M), M)
  return expert, start + within * tile, end


def _kernel(
  layer_ref,  # [1] int32
  sizes_ref,  # [E'] int32
  x_ref,  # [M, D]
  w_ref,  # [L, E, F, D]
  *refs,  # scales [L, E, f, d] f32 of fp8 weights; out [M, F]
  tiles: Tiles,
  scale_block: tuple[int, int],
  interpret: bool,
):
  *scale_refs, out_ref = refs
  (M, D), (L, E, F, _) = x_ref.shape, w_ref.shape
  blocks = F // tiles.outputs
  number = pl.program_id(0)
  band, within = number // (_BAND * blocks), number % (_BAND * blocks)
  block = within // _BAND
  outputs = pl.ds(block * tiles.outputs, tiles.outputs)
  expert, first, end = _rows_of_tile(
    sizes_ref[...], band * _BAND + within % _BAND, tiles.rows, M
  )
  row = first + lax.broadcasted_iota(jnp.int32, (tiles.rows,), 0)
  # Rows of another group are not read: a product's column is one row's own.
  at = jnp.minimum(row, end - 1)
  # Nobody's rows are multiplied by nothing, and so become zeros.
  some = (expert < sizes_ref.shape[0]) & (first < end)
  steps = some.astype(jnp.int32) * (D // tiles.inputs)
  expert = jnp.minimum(expert, E - 1)
  layer = jnp.clip(layer_ref[0], 0, L - 1)

  def step(i, total):
    inputs = pl.ds(i * tiles.inputs, tiles.inputs)
    x = x_ref[at, inputs]
    w = w_ref[layer, expert, outputs, inputs]
    if scale_refs:  # by way of float32: bf16 itself is slower to make of e4m3
      w = w.astype(jnp.float32).astype(x.dtype)
    part = lax.dot_general(
      w,
      x,
      (((1,), (1,)), ((), ())),
      precision=precision(x, w),
      preferred_element_type=jnp.float32,
    )
    for scale_ref in scale_refs:
      at_scale = (
        block * tiles.outputs // scale_block[0],
        i * tiles.inputs // scale_block[1],
      )
      part = part * scale_ref[layer, expert, *at_scale]
    return total + part

  zero = jnp.zeros((tiles.outputs, tiles.rows), jnp.float32)
  out = lax.fori_loop(0, steps, step, zero).astype(out_ref.dtype).T
  store_rows(out_ref, row, outputs, out, row < end, M, interpret)


def _check(x, weights) -> None:
  """Raises `NotImplementedError` for what the kernel does not take."""
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(f'rows in {x.dtype}: bf16 or f32')
  if weights.dtype not in (x.dtype, FP8):
    raise NotImplementedError(
      f'weights in {weights.dtype} with rows in {x.dtype}: the same or e4m3'
    )
  check_addressable(weights)


def grouped_matmul(
  x: jax.Array,  # [M, D], rows sorted by expert
  weights: jax.Array,  # [L, E, F, D]
  scales: jax.Array | None,  # [L, E, f, d] f32
  layer: jax.Array | int,
  group_sizes: jax.Array,  # [E] int32
  *,
  scale_block: tuple[int, int],
  tiles: Tiles | None = None,
  interpret: bool = False,
) -> jax.Array:  # [M, F]
  """See the public call.

  Args:
    x: see there.
    weights: see there.
    scales: see there.
    layer: see there.
    group_sizes: see there; rows beyond their sum become zeros.
    scale_block: see there.
    tiles: None for those of `choose_tiles`.
    interpret: run on any backend, slowly.
  """
  _check(x, weights)
  M, D = x.shape
  E, F = weights.shape[1:3]
  widths = (M, E, F, D, x.dtype, weights.dtype, scale_block)
  tiles = choose_tiles(*widths) if tiles is None else tiles
  if M == 0:
    return jnp.zeros((0, F), x.dtype)
  sizes = jnp.pad(group_sizes, (0, pl.next_power_of_2(E) - E))
  bands = cdiv(row_tiles(M, E, tiles.rows), _BAND)
  out = pl.pallas_call(
    lambda *refs: _kernel(
      *refs, tiles=tiles, scale_block=scale_block, interpret=interpret
    ),
    grid=(bands * _BAND * (F // tiles.outputs),),
    # Interpreted, rows that are not a tile's own go to a spare one.
    out_shape=jax.ShapeDtypeStruct((M + interpret, F), x.dtype),
    compiler_params=None if interpret else params(tiles.warps, tiles.stages),
    interpret=interpret,
    name='grouped_matmul',
  )(
    jnp.asarray(layer, jnp.int32).reshape(1),
    sizes.astype(jnp.int32),
    x,
    weights,
    *(() if scales is None else (scales,)),
  )
  return out[:M]
