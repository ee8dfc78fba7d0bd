"""What runs on the core for one tile of rows: streams, scores, hides.

While a block of keys is scored, the pages of the next one arrive in the other
half of a buffer, and the page ids of the one after that in scalar memory. The
copies of the next block are started between the matmuls of this one: starting
a copy takes the scalar unit about as long as its 16 KiB take to arrive.
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
CHUNK = 1024  # keys of one step between copies: a whole (8, 128) tile a row
ID_SLOTS = 4  # page ids of a block live from two blocks before to its end
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
  """

  rows: int
  block: int
  blocks: int
  page: int
  ids: int
  first: int
  fill: bool
  full: bool

  @property
  def pages(self) -> int:
    """Pages of one block."""
    return self.block // self.page


def chunk_scores(q, w, keys, rows):
  """Scores of one chunk of keys, [rows, C / 128, 128] float32.

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

  Copies of one slot are waited for as one, by their bytes. Turn i moves
  block i; turns past the last block move the last one again, into a slot
  that nobody reads, rather than branch between the matmuls.
  """

  def __init__(self, refs, sequence, turns, sizes: Sizes):
    self.table, self.pool, self.plane, self.scores = refs[:4]
    self.ids, self.keys, self.scales, self.out, self.none = refs[4:9]
    self.id_sem, self.key_sem, self.scale_sem, self.out_sem = refs[9:13]
    self.none_sem = refs[13]
    self.sequence, self.turns, self.sizes = sequence, turns, sizes
    self.lines = sizes.block // LANES

  def block(self, i):
    """The block that turn i moves."""
    return jnp.minimum(i, self.turns - 1)

  def page_ids(self, i):
    """Copies page ids into scalar memory."""
    at = self.sequence * self.sizes.blocks + self.block(i)
    slot = i & (ID_SLOTS - 1)
    return pltpu.make_async_copy(
      self.table.at[at], self.ids.at[slot], self.id_sem.at[slot]
    )

  def start_pages(self, i, pages):
    """Starts the copies of some pages of a block."""
    slot, size = i & 1, self.sizes.page
    for j in pages:
      # A missing page is any other: its scores are overwritten.
      page = jnp.maximum(self.ids[i & (ID_SLOTS - 1), 0, j], 0)
      pltpu.make_async_copy(
        self.pool.at[page],
        self.keys.at[slot, pl.ds(j * size, size)],
        self.key_sem.at[slot],
      ).start()

  def wait_pages(self, i):
    """Waits for all pages of a block."""
    whole = self.keys.at[i & 1]
    pltpu.make_async_copy(whole, whole, self.key_sem.at[i & 1]).wait()

  def scale_plane(self, i):
    """Copies the scales of a block's keys."""
    slot = i & 1
    return pltpu.make_async_copy(
      self.plane.at[
        self.sequence, pl.ds(self.block(i) * self.lines, self.lines)
      ],
      self.scales.at[slot],
      self.scale_sem.at[slot],
    )

  def scored(self, i, t, row):
    """Copies a block's scores of the tile's row t to their place."""
    return pltpu.make_async_copy(
      self.out.at[i & 1, t],
      self.scores.at[row, pl.ds(i * self.lines, self.lines)],
      self.out_sem.at[i & 1],
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
  hi = jnp.clip((last_ref[tile] + sizes.block) // sizes.block, lo, sizes.blocks)
  hi = sizes.blocks if sizes.full else hi
  stream = Stream(refs, seq_ref[tile], hi, sizes)

  def when(condition, do):
    do() if sizes.full else pl.when(condition)(do)

  def each_row(do):
    for t, place in enumerate(places):
      row = rows_ref[place]
      when(row >= 0, functools.partial(do, t, row))

  def turn(i, _):
    stream.page_ids(i + 1).wait()
    stream.page_ids(i + 2).start()
    stream.wait_pages(i)
    if stream.plane is not None:
      stream.scale_plane(i).wait()
      stream.scale_plane(i + 1).start()
    when(
      i >= lo + 2,
      lambda: each_row(lambda t, row: stream.scored(i - 2, t, row).wait()),
    )
    for at in range(0, sizes.block, CHUNK):
      pages = range(at // sizes.page, (at + CHUNK) // sizes.page)
      stream.start_pages(i + 1, pages)
      score_chunk(
        stream, i, at, q_ref[0], w_ref[0], [pos_ref[p] for p in places]
      )
    when(
      stream.ids[i & (ID_SLOTS - 1), 0, sizes.pages] > 0,
      lambda: hide_missing(stream, i),
    )
    each_row(lambda t, row: stream.scored(i, t, row).start())

  def walk():
    stream.page_ids(lo).start()
    stream.page_ids(lo + 1).start()
    stream.page_ids(lo).wait()
    stream.start_pages(lo, range(sizes.pages))
    if stream.plane is not None:
      stream.scale_plane(lo).start()
    lax.fori_loop(lo, hi, turn, None)
    stream.page_ids(hi + 1).wait()
    stream.wait_pages(hi)
    if stream.plane is not None:
      stream.scale_plane(hi).wait()
    for i in (hi - 2, hi - 1):
      when(
        i >= lo,
        lambda i=i: each_row(lambda t, row: stream.scored(i, t, row).wait()),
      )

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


def score_chunk(stream: Stream, i, at: int, q, w, positions):
  """Scores `CHUNK` keys of turn i, from `at` in the block."""
  sizes, slot = stream.sizes, i & 1
  keys = stream.keys[slot, pl.ds(at, CHUNK)]
  dtype = jnp.bfloat16 if stream.plane is not None else keys.dtype
  dtype = jnp.promote_types(q.dtype, dtype)
  scores = chunk_scores(q.astype(dtype), w, keys.astype(dtype), sizes.rows)
  lines = pl.ds(at // LANES, CHUNK // LANES)
  if stream.plane is not None:
    scores = scores * stream.scales[slot, lines][None]
  shape = (CHUNK // LANES, LANES)
  pos = lax.broadcasted_iota(jnp.int32, shape, 0) * LANES
  pos += lax.broadcasted_iota(jnp.int32, shape, 1) + i * sizes.block + at
  for t, last in enumerate(positions):
    seen = (pos >= sizes.first) & (pos <= last)
    stream.out[slot, t, lines] = jnp.where(seen, scores[t], NO)


def hide_missing(stream: Stream, i):
  """Overwrites the scores of pages that are not there with -inf."""
  sizes, slot = stream.sizes, i & 1
  shape = (sizes.rows, 1, LANES)
  lane = lax.broadcasted_iota(jnp.int32, shape, 2)

  def line(r, _):
    scores = stream.out[slot, :, pl.ds(r, 1)]
    for at in range(0, LANES, sizes.page):
      page = stream.ids[i & (ID_SLOTS - 1), 0, (r * LANES + at) // sizes.page]
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
  plane: jax.Array | None,  # [B, S / 128, 128] f32
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
        scaled(pltpu.VMEM((2, lines, LANES), jnp.float32)),
        pltpu.VMEM((2, sizes.rows, lines, LANES), jnp.float32),
        pltpu.VMEM((lines, LANES), jnp.float32),
        pltpu.SemaphoreType.DMA((ID_SLOTS,)),
        pltpu.SemaphoreType.DMA((2,)),
        scaled(pltpu.SemaphoreType.DMA((2,))),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA,
      ],
    ),
    out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
    cost_estimate=cost,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',),
      # Page ids were brought into range; a check costs as much as a copy.
      disable_bounds_checks=True,
    ),
    interpret=interpret,
    name='indexer_scores',
  )(row_of, pos_of, seq_of, last_of, q, w, ids, key_pages, plane)
