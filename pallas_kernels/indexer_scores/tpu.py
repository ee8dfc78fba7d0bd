"""Lightning-indexer scores on a TPU core: pages streamed by DMA, in Pallas.

Rows are sorted by (sequence, position) and cut into tiles of rows of one
sequence, so that a tile reads each of its pages once, whatever the mix of
rows. A tile walks the blocks of keys that one of its rows sees: while a block
is scored, the pages of the next one arrive in the other half of a buffer, and
the page ids of the one after that in scalar memory. The copies of the next
block are started between the matmuls of this one: starting a copy takes the
scalar unit about as long as its 16 KiB take to arrive.

Scores leave as [T, S / 128, 128], the layout the selection reads; rows go to
their own place by DMA, so nothing is permuted afterwards. Memory law: no
temporary but the queries in tile order and, for fp8 keys, the scales in
position order (4 bytes a key of the table).
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
from pallas_kernels.tiling import PAGE, cdiv, precision, round_up

LANES = 128
CHUNK = 1024  # keys of one step between copies: a whole (8, 128) tile a row
MAX_BLOCK = 4096  # keys of one buffer
MAX_TILE = 16  # rows that share one stream of keys
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
    fill: write -inf where no row of the tile sees anything.
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


def row_tiles(
  row_seq: jax.Array, row_pos: jax.Array, sequences: int, rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Cuts rows into tiles of one sequence each.

  Args:
    row_seq: [T] int32, within the table.
    row_pos: [T] int32.
    sequences: sequences of the page table.
    rows: rows of one tile.

  Returns:
    row of each place [tiles * rows] int32, -1 where there is none; sequence
    of each tile [tiles] int32; highest position of each tile [tiles] int32,
    -1 for a tile that sees nothing.
  """
  T = row_seq.shape[0]
  tiles = T // rows + min(sequences, T) if rows > 1 else T
  at = jnp.arange(T, dtype=jnp.int32)
  seq, pos, row = lax.sort((row_seq, row_pos, at), num_keys=2)
  new = jnp.concatenate([jnp.ones(1, bool), seq[1:] != seq[:-1]])
  place = at - lax.cummax(jnp.where(new, at, 0))
  tile = jnp.cumsum(place % rows == 0, dtype=jnp.int32) - 1
  empty = jnp.full(tiles * rows, -1, jnp.int32)
  return (
    empty.at[tile * rows + place % rows].set(row),
    jnp.zeros(tiles, jnp.int32).at[tile].set(seq),
    jnp.full(tiles, -1, jnp.int32).at[tile].max(pos),
  )


def block_ids(page_table: jax.Array, size: int, sizes: Sizes) -> jax.Array:
  """Page ids a block, [B * blocks, 1, ids]; then 1 where a page is missing."""
  B, n = page_table.shape
  pages = sizes.blocks * sizes.pages
  ids = jnp.minimum(page_table, size - 1)
  ids = jnp.pad(ids, ((0, 0), (0, pages - n)), constant_values=-1)
  ids = ids.reshape(B * sizes.blocks, 1, sizes.pages)
  hole = jnp.any(ids < 0, axis=-1, keepdims=True).astype(jnp.int32)
  rest = ((0, 0), (0, 0), (0, sizes.ids - sizes.pages - 1))
  return jnp.pad(jnp.concatenate([ids, hole], axis=-1), rest)


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
    each_row(lambda t, row: lax.fori_loop(0, lo, lambda b, _: do(b, row), None))
    each_row(
      lambda t, row: lax.fori_loop(
        hi, sizes.blocks, lambda b, _: do(b, row), None
      )
    )

  if sizes.fill:
    stream.none[...] = jnp.full_like(stream.none, NO)
    each_unseen(lambda block, row: stream.unseen(block, row).start())
  when(hi > lo, walk)
  if sizes.fill:
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


def scores_in_lines(
  q: jax.Array,  # [T, I, H]
  w: jax.Array,  # [T, I] f32
  key_pages: jax.Array,  # [P, page, H]
  key_scales: jax.Array | None,  # [P, page] f32
  page_table: jax.Array,  # [B, n] int32
  row_seq: jax.Array,  # [T] int32
  row_pos: jax.Array,  # [T] int32
  *,
  first: int = 0,
  fill: bool = True,
  full: bool = False,
  interpret=False,
) -> jax.Array:  # [T, S / 128, 128] f32
  """Scores with S rounded up to whole blocks, as the selection reads them.

  Args:
    q: and all other arrays: as in the public call.
    w: see above.
    key_pages: see above.
    key_scales: see above.
    page_table: see above.
    row_seq: see above.
    row_pos: see above.
    first: lowest visible position.
    fill: write -inf into blocks of `CHUNK` keys beyond the row's own; without
      it they hold anything.
    full: for the cycle model: see `Sizes`.
    interpret: True or `pltpu.InterpretParams` to run on a CPU.
  """
  T, heads, H = q.shape
  B, n = page_table.shape
  P, page, _ = key_pages.shape
  check_kernel_arguments(H, page, interpret)
  rows = 1 if T <= B else min(MAX_TILE, 1 << (cdiv(T, B) - 1).bit_length())
  block = min(round_up(max(n, 1) * page, CHUNK), MAX_BLOCK)
  blocks = cdiv(max(n, 1) * page, block)
  sizes = Sizes(
    rows=rows,
    block=block,
    blocks=blocks,
    page=page,
    ids=round_up(block // page + 1, LANES),
    first=first,
    fill=fill,
    full=full,
  )
  lines = blocks * block // LANES
  if T == 0:
    return jnp.zeros((T, lines, LANES), jnp.float32)
  row_of, seq_of, last_of = row_tiles(
    jnp.clip(row_seq, 0, B - 1), row_pos, B, rows
  )
  tiles = seq_of.shape[0]
  at = jnp.maximum(row_of, 0)
  return score_tiles(
    row_of,
    jnp.where(row_of >= 0, row_pos[at], -1),
    seq_of,
    last_of,
    q[at].reshape(tiles, rows * heads, H),
    w[at].reshape(tiles, rows * heads, 1),
    block_ids(page_table, P, sizes),
    key_pages,
    scale_plane(key_scales, page_table, lines),
    out_rows=T,
    sizes=sizes,
    interpret=interpret,
  )


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
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',),
      # Page ids were brought into range; a check costs as much as a copy.
      disable_bounds_checks=True,
    ),
    interpret=pltpu.InterpretParams() if interpret is True else interpret,
    name='indexer_scores',
  )(row_of, pos_of, seq_of, last_of, q, w, ids, key_pages, plane)


def scale_plane(
  key_scales: jax.Array | None, page_table: jax.Array, lines: int
) -> jax.Array | None:
  """Scales in position order, [B, lines, 128]; anything where no page is.

  A page's 64 scales are half a line of HBM, which no DMA may start in.
  """
  if key_scales is None:
    return None
  B = page_table.shape[0]
  plane = key_scales[jnp.clip(page_table, 0, key_scales.shape[0] - 1)]
  plane = plane.reshape(B, -1)
  plane = jnp.pad(plane, ((0, 0), (0, lines * LANES - plane.shape[1])))
  return plane.reshape(B, lines, LANES)


def check_kernel_arguments(H: int, page: int, interpret) -> None:
  """Raises `NotImplementedError` for sizes that no tile divides."""
  if interpret is False and (H % LANES or page != PAGE):
    raise NotImplementedError(
      f'the TPU kernel takes heads of a multiple of {LANES} and pages of '
      f'{PAGE} tokens, not {H=} {page=}; use implementation="xla"'
    )
  if (
    CHUNK % page or (page > LANES and page % LANES) or LANES % min(page, LANES)
  ):
    raise NotImplementedError(f'{page=} must be a power of two up to {CHUNK}')


def indexer_scores(
  q: jax.Array,  # [T, I, H]
  w: jax.Array,  # [T, I] f32
  key_pages: jax.Array,  # [P, page, H]
  key_scales: jax.Array | None,  # [P, page] f32
  page_table: jax.Array,  # [B, n] int32
  row_seq: jax.Array,  # [T] int32
  row_pos: jax.Array,  # [T] int32
  *,
  first: int = 0,
  interpret=False,
) -> jax.Array:  # [T, S] f32
  """See the public call; `interpret` as in `scores_in_lines`."""
  lines = scores_in_lines(
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
  S = page_table.shape[1] * key_pages.shape[1]
  return lines.reshape(q.shape[0], -1)[:, :S]
