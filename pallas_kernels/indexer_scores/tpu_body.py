"""What runs on the core for one tile of rows: scores, hides, in turns.

All blocks of keys but the last are seen whole by the tile, so the loop over
them is straight code: copies of a part of the next block are started before
each part of this one is scored. The last two turns score, or read, a part of
a block in loops of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer_scores.reference import relu
from pallas_kernels.indexer_scores.stream import (
  CHUNK,
  ID_SLOTS,
  KEY_SEMS,
  LANES,
  SUB,
  Sizes,
  Stream,
)
from pallas_kernels.tiling import precision, round_up

LOW = 16  # times which a query's low part is stored
_VMEM_BYTES = 48 << 20  # of 64 MiB on the smallest generation
NO = float('-inf')
E4M3 = jnp.float8_e4m3fn


def split_query(q):
  """Queries as two parts in e4m3, high above low, [2 * rows * I, H].

  Four bits each hold the eight of a bf16, so that products with e4m3 keys
  are those of the queries as they are. `scaled_queries` says what is lost.
  """
  q = q.astype(jnp.float32)
  high = q.astype(E4M3)
  low = (q - high.astype(jnp.float32)) * LOW
  return jnp.concatenate([high, low.astype(E4M3)])


def chunk_scores(q, w, keys, rows):
  """Scores of some keys, [rows, C / 128, 128] float32.

  Args:
    q: [rows * I, H], or of `split_query`.
    w: [rows * I, 1] float32.
    keys: [C, H].
    rows: rows of the tile.
  """
  count = w.shape[0]
  heads = count // rows
  # Results of one product: few enough to stay near the registers.
  width = min(keys.shape[0], max(2 * LANES, CHUNK // rows))
  parts = []
  for at in range(0, keys.shape[0], width):
    dots = lax.dot_general(
      q,
      keys[at : at + width],
      (((1,), (1,)), ((), ())),
      precision=precision(q, keys),
      preferred_element_type=jnp.float32,
    )
    if q.shape[0] > count:
      dots = dots[:count] + dots[count:] * (1 / LOW)
    weighted = (relu(dots) * w).reshape(rows, heads, width)
    scores = jnp.sum(weighted, axis=1)
    parts.append(scores.reshape(rows, width // LANES, LANES))
  return jnp.concatenate(parts, axis=1)


def kernel(rows_ref, pos_ref, seq_ref, last_ref, q_ref, w_ref, *refs, sizes):
  """One tile of rows over the keys it sees.

  Args:
    rows_ref: [tiles * rows] int32, prefetched: row of each place or -1.
    pos_ref: [tiles * rows] int32, prefetched: its position.
    seq_ref: [tiles] int32, prefetched.
    last_ref: [tiles] int32, prefetched: highest position of the tile.
    q_ref: [1, rows * I, H].
    w_ref: [1, rows * I, 1] f32.
    *refs: of `Stream`.
    sizes: what is static.
  """
  t, rows = pl.program_id(0), sizes.rows
  places = range(rows)
  lo = min(sizes.first // sizes.block, sizes.blocks)
  last = last_ref[t]
  hi = jnp.clip((last + sizes.block) // sizes.block, lo, sizes.blocks)
  hi = sizes.blocks if sizes.full else hi
  q = q_ref[0]
  if sizes.split:
    # The cycle model aborts on the conversion, once a tile.
    q = pltpu.bitcast(q, E4M3) if sizes.full else split_query(q)
  tile = Tile(
    stream=Stream(refs, seq_ref[t], last, hi, sizes),
    rows=[rows_ref[t * rows + place] for place in places],
    positions=[pos_ref[t * rows + place] for place in places],
    q=q,
    w=w_ref[0],
    lo=lo,
    hi=hi,
  )
  none = tile.stream.none
  none[...] = jnp.full_like(none, NO)
  tile.each_unseen(lambda block, row: tile.stream.unseen(block, row).start())
  tile.when(hi > lo, lambda: walk(tile))
  tile.each_unseen(lambda block, row: tile.stream.unseen(block, row).wait())


@dataclasses.dataclass(frozen=True)
class Tile:
  """A tile of rows and the blocks it sees.

  Attributes:
    stream: its copies.
    rows: row of each place, -1 for none; scalars.
    positions: position of each place.
    q: [rows * I, H], or of `split_query`.
    w: [rows * I, 1] f32.
    lo: first block.
    hi: the block behind the last one.
  """

  stream: Stream
  rows: list[Any]
  positions: list[Any]
  q: jax.Array
  w: jax.Array
  lo: int
  hi: Any

  @property
  def sizes(self) -> Sizes:
    """What is static."""
    return self.stream.sizes

  def when(self, condition, do):
    """`pl.when`, or always in a profile."""
    do() if self.sizes.full else pl.when(condition)(do)

  def each_row(self, do):
    """Calls do(place, row) for the places that have one."""
    for place, row in enumerate(self.rows):
      self.when(row >= 0, functools.partial(do, place, row))

  def each_unseen(self, do):
    """Calls do(block, row) for blocks that are written without being seen."""
    ahead = self.sizes.blocks if self.sizes.fill else self.hi
    for start, stop in ((0, self.lo), (self.hi, ahead)):
      self.each_row(
        lambda _, row, start=start, stop=stop: lax.fori_loop(
          start, stop, lambda block, _: do(block, row), None
        )
      )

  def score(self, i, c):
    """Scores part c of turn i."""
    score_part(self.stream, i, c, self.q, self.w, self.positions)


def times(n, do):
  """Calls do(i) n times."""
  lax.fori_loop(0, n, lambda i, _: do(i), None)


def walk(tile: Tile):
  """All turns of a tile that sees a block."""
  stream, lo, hi = tile.stream, tile.lo, tile.hi
  ids = stream.page_ids(lo)
  ids.start()
  ids.wait()
  stream.start_rest(lo)
  times(stream.parts(lo), lambda c: stream.start_part(lo, c))
  times(stream.parts(lo), lambda c: stream.wait_part(lo))
  stream.wait_rest(lo)
  tail = jnp.maximum(hi - 2, lo)
  lax.fori_loop(lo, tail, lambda i, _: turn(tile, i, straight_parts), None)
  lax.fori_loop(tail, hi, lambda i, _: turn(tile, i, looped_parts), None)
  tile.each_row(lambda t, row: stream.scored(hi - 1, t, row).start())
  tile.each_row(lambda t, row: stream.scored(hi - 1, t, row).wait())


def turn(tile: Tile, i, parts):
  """Scores block i while block i + 1 arrives and scores of i - 1 leave."""
  stream = tile.stream
  stream.start_rest(i + 1)
  done = jnp.maximum(i - 1, tile.lo)
  leaves = lambda t, row: stream.scored(done, t, row)
  tile.when(i > tile.lo, lambda: tile.each_row(lambda *at: leaves(*at).start()))
  if stream.plane is not None:
    key_scales(stream, i)
  parts(tile, i)
  # Rare, so no part of a profile: pages are missing behind a sequence.
  missing = stream.page_id(i, tile.sizes.pages) > 0
  pl.when(missing)(lambda: hide_missing(stream, i))
  tile.when(i > tile.lo, lambda: tile.each_row(lambda *at: leaves(*at).wait()))
  stream.wait_rest(i + 1)


def straight_parts(tile: Tile, i):
  """The parts of a block that is seen whole, as is the next one."""
  parts = tile.sizes.parts
  # Two parts' copies, so that the last ones have time to arrive; the products
  # of split queries hide those of one.
  pace = 1 if tile.sizes.split else 2
  for c in range(parts):
    # Scored first: the compiler then issues copies beside the matrix work.
    tile.score(i, c)
    for ahead in range(pace * c, min(pace * (c + 1), parts)):
      tile.stream.start_part(i + 1, ahead)
  for _ in range(tile.sizes.parts):
    tile.stream.wait_part(i + 1)


def looped_parts(tile: Tile, i):
  """The parts of block i that are seen; -inf for the others with `fill`."""
  stream, sizes = tile.stream, tile.sizes
  ahead, seen = stream.parts(i + 1), stream.parts(i)
  times(ahead, lambda c: stream.start_part(i + 1, c))
  times(seen, lambda c: tile.score(i, c))
  if sizes.fill and not sizes.full:
    lax.fori_loop(seen, sizes.parts, lambda c, _: hide_part(stream, i, c), None)
  times(ahead, lambda c: stream.wait_part(i + 1))


def hide_part(stream: Stream, i, c):
  """-inf for part c of turn i."""
  lines = stream.sizes.part // LANES
  at = pl.ds(pl.multiple_of(c * lines, lines), lines)
  none = jnp.full((stream.sizes.rows, lines, LANES), NO)
  stream.out[i & 1, :, at] = none


def score_part(stream: Stream, i, c, q, w, positions):
  """Scores part c of turn i."""
  sizes, slot = stream.sizes, i & 1
  start = pl.multiple_of(c * sizes.part, sizes.part)
  keys = stream.keys[slot, pl.ds(start, sizes.part)]
  if not sizes.split:
    dtype = jnp.bfloat16 if stream.plane is not None else keys.dtype
    dtype = jnp.promote_types(q.dtype, dtype)
    q, keys = q.astype(dtype), keys.astype(dtype)
  scores = chunk_scores(q, w, keys, sizes.rows)
  shape = (CHUNK // LANES, LANES)
  place = lax.broadcasted_iota(jnp.int32, shape, 0) * LANES
  place += lax.broadcasted_iota(jnp.int32, shape, 1)
  for at in range(0, sizes.part, CHUNK):
    pos = place + (i * sizes.block + start + at)
    lines = slice(at // LANES, (at + CHUNK) // LANES)
    chunk = scores[:, lines]
    out = pl.ds(pl.multiple_of((start + at) // LANES, SUB), SUB)
    if stream.plane is not None:
      chunk = chunk * stream.scale[out][None]
    for t, last in enumerate(positions):
      seen = (pos >= sizes.first) & (pos <= last)
      stream.out[slot, t, out] = jnp.where(seen, chunk[t], NO)


def key_scales(stream: Stream, i):
  """Puts the scales of the keys of turn i together, [lines, 128] float32.

  A line of the plane holds the scales of two pages of the pool, of which one
  is wanted: the half that the page's id says, moved to where it belongs.
  """
  page, lines = stream.sizes.page, stream.lines
  shape = (LANES, stream.pairs.shape[-1])
  odd = jnp.broadcast_to(stream.pairs[i & 1] & 1, shape).T
  halves = []
  for place in range(LANES // page):
    line = stream.scales[i & 1, place]
    stays = odd[place * lines : (place + 1) * lines] == place
    halves.append(jnp.where(stays, line, pltpu.roll(line, page, 1)))
  low = lax.broadcasted_iota(jnp.int32, (lines, LANES), 1) < page
  stream.scale[...] = jnp.where(low, *halves)


def hide_missing(stream: Stream, i):
  """Overwrites the scores of pages that are not there with -inf."""
  sizes, slot = stream.sizes, i & 1
  shape = (sizes.rows, 1, LANES)
  lane = lax.broadcasted_iota(jnp.int32, shape, 2)

  def line(r, _):
    scores = stream.out[slot, :, pl.ds(r, 1)]
    for at in range(0, LANES, sizes.page):
      j = sizes.entry((r * LANES + at) // sizes.page)
      page = stream.page_id(i, sizes.pages + 1 + j)
      gone = (lane >= at) & (lane < at + sizes.page) & (page < 0)
      scores = jnp.where(gone, NO, scores)
    stream.out[slot, :, pl.ds(r, 1)] = scores

  lax.fori_loop(0, stream.lines, line, None)


def score_tiles(
  row_of: jax.Array,  # [tiles * rows] int32
  pos_of: jax.Array,  # [tiles * rows] int32
  seq_of: jax.Array,  # [tiles] int32
  last_of: jax.Array,  # [tiles] int32
  q: jax.Array,  # [tiles, rows * I, H]
  w: jax.Array,  # [tiles, rows * I, 1] f32
  ids: jax.Array,  # [B * blocks, 1, ids] int32
  key_pages: jax.Array,  # [P, page, H]
  plane: jax.Array | None,  # [2, B, S / 128, 128] f32
  *,
  out_rows: int,
  sizes: Sizes,
  interpret=False,
) -> jax.Array:  # [T, S / 128, 128] f32
  """The kernel over tiles of rows."""
  lines = sizes.block // LANES
  shape = (out_rows, sizes.blocks * lines, LANES)
  hbm = pl.BlockSpec(memory_space=pltpu.HBM)
  mine = lambda i, *_: (i, 0, 0)
  scaled = lambda x: None if plane is None else x
  keys = sizes.blocks * sizes.block
  if not interpret:
    # Else XLA may put it into the vector memory first, whole.
    ids = pltpu.with_memory_space_constraint(ids, pltpu.HBM)
  # As if every row saw all keys; a row with fewer costs less.
  cost = pl.CostEstimate(
    flops=2 * out_rows * (q.shape[1] // sizes.rows) * q.shape[2] * keys,
    transcendentals=0,
    bytes_accessed=q.shape[0] * keys * q.shape[2] * key_pages.dtype.itemsize
    + 4 * out_rows * keys,
  )
  return pl.pallas_call(
    functools.partial(kernel, sizes=sizes),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=seq_of.shape,
      in_specs=[
        pl.BlockSpec((1, *q.shape[1:]), mine),
        pl.BlockSpec((1, *w.shape[1:]), mine),
        hbm,
        hbm,
        scaled(hbm),
      ],
      out_specs=hbm,
      scratch_shapes=[
        pltpu.SMEM((ID_SLOTS, 1, sizes.ids), jnp.int32),
        pltpu.VMEM((2, sizes.block, q.shape[-1]), key_pages.dtype),
        pltpu.VMEM((2, sizes.rows, lines, LANES), jnp.float32),
        pltpu.VMEM((lines, LANES), jnp.float32),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA((KEY_SEMS,)),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA,
        scaled(pltpu.VMEM((2, 2, lines, LANES), jnp.float32)),
        scaled(pltpu.VMEM((2, 1, round_up(2 * lines, LANES)), jnp.int32)),
        scaled(pltpu.VMEM((lines, LANES), jnp.float32)),
        scaled(pltpu.SemaphoreType.DMA),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
    cost_estimate=cost,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',),
      # Page ids were brought into range; a check costs as much as a copy.
      disable_bounds_checks=True,
      vmem_limit_bytes=_VMEM_BYTES,
    ),
    interpret=interpret,
    name='indexer_scores',
  )(row_of, pos_of, seq_of, last_of, q, w, ids, key_pages, plane)
