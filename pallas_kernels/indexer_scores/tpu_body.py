"""What runs on the core for one tile of rows: streams, scores, hides.

While a block of keys is scored, the pages of the next one arrive in the other
half of a buffer, and the page ids of the one after that in scalar memory.
Starting a copy takes the scalar unit two to four cycles and a page arrives in
ten to twenty, so all are started before the matmuls, in a loop that does
nothing else: between the matmuls they hold the vector loads back. Every copy
is waited for in the trip of the loop that started it: nothing is lost by it,
and the compiler's cycle model can follow.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer_scores.reference import relu
from pallas_kernels.tiling import precision

LANES = 128
SUB = 8  # lines of one tile
CHUNK = 1024  # keys whose scores fill a whole (8, 128) tile of a row
MAX_PART = 4096  # keys of one trip of the innermost loop
# Semaphores of the pages: the compiler takes copies that share one as one
# after another, at half the memory's bandwidth.
KEY_SEMS = 16
ID_SLOTS = 4  # page ids of a block live from two blocks before to its end
_VMEM_BYTES = 48 << 20  # of 64 MiB on the smallest generation
NO = float('-inf')


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What a kernel is specialised to.

  Attributes:
    rows: rows of one tile.
    block: keys of one buffer, a multiple of `CHUNK`.
    blocks: blocks of the padded context.
    page: keys of one page.
    ids: width of a block's row of page ids.
    first: lowest visible position.
    fill: write -inf into the blocks after those that the tile sees.
    full: take every block and row as visible. For the compiler's cycle
      model only, which does not follow data.
    unroll: copies of pages are unrolled; the interpreter would compile each.
  """

  rows: int
  block: int
  blocks: int
  page: int
  ids: int
  first: int
  fill: bool
  full: bool
  unroll: bool

  @property
  def pages(self) -> int:
    """Pages of one block."""
    return self.block // self.page

  @property
  def part(self) -> int:
    """Keys of one trip of the innermost loop; divides a block."""
    chunks = self.block // CHUNK
    return CHUNK * min(chunks & -chunks, max(MAX_PART // CHUNK // self.rows, 1))

  @property
  def parts(self) -> int:
    """Parts of one block."""
    return self.block // self.part


def chunk_scores(q, w, keys, rows):
  """Scores of some keys, [rows, C / 128, 128] float32.

  Args:
    q: [rows * I, H].
    w: [rows * I, 1] float32.
    keys: [C, H].
    rows: rows of the tile.
  """
  heads = q.shape[0] // rows
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
    weighted = (relu(dots) * w).reshape(rows, heads, width)
    scores = jnp.sum(weighted, axis=1)
    parts.append(scores.reshape(rows, width // LANES, LANES))
  return jnp.concatenate(parts, axis=1)


class Stream:
  """The copies of one tile: page ids, pages and scales in, scores out.

  What a turn needs is there when it begins: a turn starts the copies of the
  next one and of its predecessor's scores, and waits for all of them at its
  end.
  """

  def __init__(self, refs, sequence, last, turns, sizes: Sizes):
    self.table, self.pool, self.plane, self.scores = refs[:4]
    self.ids, self.keys, self.scales, self.out, self.none = refs[4:9]
    self.id_sem, self.key_sem, self.scale_sem, self.out_sem = refs[9:13]
    self.none_sem = refs[13]
    self.sequence, self.last, self.turns = sequence, last, turns
    self.sizes, self.lines = sizes, sizes.block // LANES

  def parts(self, i):
    """Parts of block i that the tile sees."""
    if self.sizes.full:
      return self.sizes.parts
    keys = self.last + self.sizes.part - i * self.sizes.block
    return jnp.clip(keys // self.sizes.part, 0, self.sizes.parts)

  def page_id(self, i, j):
    """Entry j of the row of page ids of block i, from scalar memory."""
    return self.ids[i & (ID_SLOTS - 1), 0, j]

  def page_ids(self, i):
    """Copies a block's page ids into scalar memory; the last one's beyond."""
    at = jnp.minimum(i, self.turns - 1)
    slot = i & (ID_SLOTS - 1)
    return pltpu.make_async_copy(
      self.table.at[self.sequence * self.sizes.blocks + at],
      self.ids.at[slot],
      self.id_sem,
    )

  def pair_lines(self, i):
    """Copies the lines that hold the scales of a block's keys."""
    at = pl.ds(jnp.minimum(i, self.turns - 1) * self.lines, self.lines)
    return pltpu.make_async_copy(
      self.plane.at[:, self.sequence, at], self.scales.at[i & 1], self.scale_sem
    )

  def start_part(self, i, c):
    """Starts the copies of the pages of part c of a block."""
    size, pages = self.sizes.page, self.sizes.part // self.sizes.page

    def page(j, _):
      at = c * pages + j
      pltpu.make_async_copy(
        self.pool.at[self.page_id(i, at)],
        self.keys.at[i & 1, pl.ds(at * size, size)],
        self.key_sem.at[j % KEY_SEMS],
      ).start()

    lax.fori_loop(0, pages, page, None, unroll=self.sizes.unroll)

  def wait_part(self, i):
    """Waits for the pages of a part, those of a semaphore by their bytes."""
    share = self.keys.at[i & 1, pl.ds(0, self.sizes.part // KEY_SEMS)]

    def wait(sem, _):
      pltpu.make_async_copy(share, share, self.key_sem.at[sem]).wait()

    lax.fori_loop(0, KEY_SEMS, wait, None, unroll=self.sizes.unroll)

  def start_rest(self, i):
    """Starts what turn i needs beside its pages, and the page ids after it."""
    self.page_ids(i + 1).start()
    if self.plane is not None:
      self.pair_lines(i).start()

  def wait_rest(self, i):
    """Waits for what `start_rest` started."""
    self.page_ids(i + 1).wait()
    if self.plane is not None:
      self.pair_lines(i).wait()

  def scored(self, i, t, row):
    """Copies a block's scores of the tile's row t to their place."""
    return pltpu.make_async_copy(
      self.out.at[i & 1, t],
      self.scores.at[row, pl.ds(i * self.lines, self.lines)],
      self.out_sem,
    )

  def unseen(self, block, row):
    """Copies -inf to where the row sees nothing."""
    return pltpu.make_async_copy(
      self.none,
      self.scores.at[row, pl.ds(block * self.lines, self.lines)],
      self.none_sem,
    )


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
  tile = pl.program_id(0)
  places = [tile * sizes.rows + t for t in range(sizes.rows)]
  lo = min(sizes.first // sizes.block, sizes.blocks)
  last = last_ref[tile]
  hi = jnp.clip((last + sizes.block) // sizes.block, lo, sizes.blocks)
  hi = sizes.blocks if sizes.full else hi
  stream = Stream(refs, seq_ref[tile], last, hi, sizes)

  def when(condition, do):
    do() if sizes.full else pl.when(condition)(do)

  def each_row(do):
    for t, place in enumerate(places):
      row = rows_ref[place]
      when(row >= 0, functools.partial(do, t, row))

  def turn(i, _, straight):
    stream.start_rest(i + 1)
    done = jnp.maximum(i - 1, lo)
    leaves = lambda t, row: stream.scored(done, t, row)
    when(i > lo, lambda: each_row(lambda *at: leaves(*at).start()))
    operands = q_ref[0], w_ref[0], [pos_ref[p] for p in places]
    if straight:
      for c in range(sizes.parts):
        stream.start_part(i + 1, c)
        score_part(stream, i, c, *operands)
      for _ in range(sizes.parts):
        stream.wait_part(i + 1)
    else:
      ahead, seen = stream.parts(i + 1), stream.parts(i)
      each = lambda n, do: lax.fori_loop(0, n, lambda c, _: do(c), None)
      each(ahead, lambda c: stream.start_part(i + 1, c))
      each(seen, lambda c: score_part(stream, i, c, *operands))
      if sizes.fill and not sizes.full:
        lax.fori_loop(
          seen, sizes.parts, lambda c, _: hide_part(stream, i, c), None
        )
      each(ahead, lambda c: stream.wait_part(i + 1))
    # Rare, so no part of a profile: pages are missing behind a sequence.
    pl.when(stream.page_id(i, sizes.pages) > 0)(lambda: hide_missing(stream, i))
    when(i > lo, lambda: each_row(lambda *at: leaves(*at).wait()))
    stream.wait_rest(i + 1)

  def walk():
    ids = stream.page_ids(lo)
    ids.start()
    ids.wait()
    stream.start_rest(lo)
    parts = stream.parts(lo)
    lax.fori_loop(0, parts, lambda c, _: stream.start_part(lo, c), None)
    lax.fori_loop(0, parts, lambda c, _: stream.wait_part(lo), None)
    stream.wait_rest(lo)
    # All blocks but the last are seen whole, so the loop over them has no
    # branches; the last two turns read or score a part of a block.
    tail = jnp.maximum(hi - 2, lo)
    lax.fori_loop(lo, tail, functools.partial(turn, straight=True), None)
    lax.fori_loop(tail, hi, functools.partial(turn, straight=False), None)
    each_row(lambda t, row: stream.scored(hi - 1, t, row).start())
    each_row(lambda t, row: stream.scored(hi - 1, t, row).wait())

  def each_unseen(do):
    ahead = sizes.blocks if sizes.fill else hi
    for start, stop in ((0, lo), (hi, ahead)):
      each_row(
        lambda t, row, start=start, stop=stop: lax.fori_loop(
          start, stop, lambda block, _: do(block, row), None
        )
      )

  stream.none[...] = jnp.full_like(stream.none, NO)
  each_unseen(lambda block, row: stream.unseen(block, row).start())
  when(hi > lo, walk)
  each_unseen(lambda block, row: stream.unseen(block, row).wait())


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
  dtype = jnp.bfloat16 if stream.plane is not None else keys.dtype
  dtype = jnp.promote_types(q.dtype, dtype)
  scores = chunk_scores(q.astype(dtype), w, keys.astype(dtype), sizes.rows)
  shape = (CHUNK // LANES, LANES)
  place = lax.broadcasted_iota(jnp.int32, shape, 0) * LANES
  place += lax.broadcasted_iota(jnp.int32, shape, 1)
  for at in range(0, sizes.part, CHUNK):
    pos = place + (i * sizes.block + start + at)
    lines = slice(at // LANES, (at + CHUNK) // LANES)
    chunk = scores[:, lines]
    if stream.plane is not None:
      chunk = chunk * chunk_scales(stream, i, start + at)[None]
    out = pl.ds(pl.multiple_of((start + at) // LANES, SUB), SUB)
    for t, last in enumerate(positions):
      seen = (pos >= sizes.first) & (pos <= last)
      stream.out[slot, t, out] = jnp.where(seen, chunk[t], NO)


def chunk_scales(stream: Stream, i, at):
  """Scales of `CHUNK` keys of turn i from `at` on, [8, 128] float32.

  A line of the plane holds the scales of two pages of the pool, of which one
  is wanted: the half that the page's id says, moved to where it belongs.
  """
  shape = (CHUNK // LANES, LANES)
  page = stream.sizes.page
  row = lax.broadcasted_iota(jnp.int32, shape, 0)
  lines = pl.ds(pl.multiple_of(at // LANES, SUB), SUB)
  halves = []
  for place in range(LANES // page):
    half = jnp.zeros(shape, jnp.int32)
    for r in range(shape[0]):
      j = at // page + r * (LANES // page) + place
      half = jnp.where(row == r, stream.page_id(i, j) & 1, half)
    line = stream.scales[i & 1, place, lines]
    halves.append(jnp.where(half == place, line, pltpu.roll(line, page, 1)))
  low = lax.broadcasted_iota(jnp.int32, shape, 1) < page
  return jnp.where(low, *halves)


def hide_missing(stream: Stream, i):
  """Overwrites the scores of pages that are not there with -inf."""
  sizes, slot = stream.sizes, i & 1
  shape = (sizes.rows, 1, LANES)
  lane = lax.broadcasted_iota(jnp.int32, shape, 2)

  def line(r, _):
    scores = stream.out[slot, :, pl.ds(r, 1)]
    for at in range(0, LANES, sizes.page):
      j = sizes.pages + 1 + (r * LANES + at) // sizes.page
      page = stream.page_id(i, j)
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
        scaled(pltpu.VMEM((2, 2, lines, LANES), jnp.float32)),
        pltpu.VMEM((2, sizes.rows, lines, LANES), jnp.float32),
        pltpu.VMEM((lines, LANES), jnp.float32),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA((KEY_SEMS,)),
        scaled(pltpu.SemaphoreType.DMA),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA,
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
