"""Lightning-indexer scores on a TPU core: pages streamed by DMA, in Pallas.

Rows are sorted by (sequence, position) and cut into tiles of rows of one
sequence, so that a tile reads each of its pages once, whatever the mix of
rows, and walks only the blocks of keys that one of its rows sees.

Scores leave as [T, S / 128, 128], the layout the selection reads; rows go to
their own place by DMA, so nothing is permuted afterwards. Memory law: no
temporary but the queries in tile order and, for fp8 keys, lines with their
scales (8 bytes a key of the table).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_sizes import generation
from pallas_kernels.indexer_scores.stream import CHUNK, LANES, Sizes
from pallas_kernels.indexer_scores.tpu_body import score_tiles
from pallas_kernels.tiling import PAGE, cdiv, pad_rows, round_up

MAX_BLOCK = 16384  # keys of one buffer
MAX_TILE = 16  # rows that share one stream of keys
FP8_UNITS = ('v6e', 'tpu7x')  # their matrix units take e4m3


def blocks_of(pages: int, page: int) -> tuple[int, int]:
  """Keys of one buffer and buffers of a context of `pages` pages."""
  keys = max(pages, 1) * page
  block = min(round_up(keys, CHUNK), MAX_BLOCK)
  return block, cdiv(keys, block)


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
  """What a block's walk needs of the page table, [B * blocks, 1, ids] int32.

  A page to read for each of the block's, which is any page where it is
  missing; then 1 if one is missing; then the ids as they are, -1 for missing.
  Ids stand where `Sizes.entry` says.
  """
  B, n = page_table.shape
  pages = sizes.blocks * sizes.pages
  ids = jnp.minimum(page_table, size - 1)
  ids = jnp.pad(ids, ((0, 0), (0, pages - n)), constant_values=-1)
  if sizes.scaled:
    ids = page_pairs(ids).reshape(2, B * sizes.blocks, -1).swapaxes(0, 1)
  ids = ids.reshape(B * sizes.blocks, 1, sizes.pages)
  hole = jnp.any(ids < 0, axis=-1, keepdims=True).astype(jnp.int32)
  parts = [jnp.maximum(ids, 0), hole, ids]
  rest = sizes.ids - 2 * sizes.pages - 1
  return jnp.pad(jnp.concatenate(parts, -1), ((0, 0), (0, 0), (0, rest)))


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
    fill: write -inf into blocks of 1024 keys beyond the row's own; without it
      they hold anything.
    full: for the cycle model: see `Sizes`.
    interpret: True, or `pltpu.InterpretParams` to simulate memory and races,
      to run on a CPU.
  """
  T, heads, H = q.shape
  B, n = page_table.shape
  P, page, _ = key_pages.shape
  check_kernel_arguments(H, page, interpret)
  rows = 1 if T <= B else min(MAX_TILE, 1 << (cdiv(T, B) - 1).bit_length())
  block, blocks = blocks_of(n, page)
  sizes = Sizes(
    rows=rows,
    block=block,
    blocks=blocks,
    page=page,
    ids=round_up(2 * (block // page) + 1, LANES),
    first=first,
    fill=fill,
    full=full,
    unroll=interpret is False,
    scaled=key_scales is not None,
    split=splits(q, key_scales, rows),
  )
  lines = blocks * block // LANES
  if T == 0:
    return jnp.zeros((T, lines, LANES), jnp.float32)
  row_of, seq_of, last_of = row_tiles(
    jnp.clip(row_seq, 0, B - 1), row_pos, B, rows
  )
  tiles = seq_of.shape[0]
  at = jnp.maximum(row_of, 0)
  if sizes.split and not full:  # the cycle model aborts on it, once a call
    q, w = scaled_queries(q, w)
  return score_tiles(
    row_of,
    jnp.where(row_of >= 0, row_pos[at], -1),
    seq_of,
    last_of,
    q[at].reshape(tiles, rows * heads, H),
    w[at].reshape(tiles, rows * heads, 1),
    block_ids(page_table, P, sizes),
    key_pages,
    pair_lines(key_scales, page_table, lines),
    out_rows=T,
    sizes=sizes,
    interpret=interpret,
  )


def page_pairs(ids: jax.Array) -> jax.Array:
  """Page ids [B, n] as those of even and of odd pages, [2, B, n / 2]."""
  return ids.reshape(ids.shape[0], -1, 2).transpose(2, 0, 1)


def splits(q: jax.Array, key_scales: jax.Array | None, rows: int) -> bool:
  """Whether queries are split in two, instead of the keys being widened.

  A single row is bound by what is done to every key. More rows of a tile
  share that, and would pay for twice the products.
  """
  narrow = key_scales is not None and q.dtype == jnp.bfloat16
  return narrow and rows == 1 and generation() in FP8_UNITS


def scaled_queries(q: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Queries in the range of e4m3, and the weights that undo it.

  The largest feature of a head comes to lie within 192 and 384, by a power of
  two. What `split_query` then loses of any feature is below 2^-21 of that
  one: less than the sum's own rounding.

  Args:
    q: [T, I, H] bf16.
    w: [T, I] float32.
  """
  top = jnp.max(jnp.abs(q.astype(jnp.float32)), axis=-1)
  power = lax.reduce_precision(jnp.maximum(top, 2.0**-100), 8, 0)
  # Back in bf16, whatever a division by a power of two rounds to.
  q = (q * (256 / power)[..., None]).astype(jnp.bfloat16)
  return q, w * (power * (1 / 256))


def pair_lines(
  key_scales: jax.Array | None, page_table: jax.Array, lines: int
) -> jax.Array | None:
  """Lines with the scales of each page, [2, B, lines, 128] float32.

  A page's 64 scales are half a line of HBM, which no DMA may start in, and a
  gather of half lines copies the whole pool first. A line has the scales of
  two pages of the pool; a pool stored flat is seen as lines without moving
  (one of an odd number of pages is copied).

  Args:
    key_scales: [P, 64] float32 or None.
    page_table: [B, n] int32.
    lines: at least n / 2.

  Returns:
    For each line of scores, that of its even page and that of its odd page;
    anything where no page is.
  """
  if key_scales is None:
    return None
  pool = pad_rows(key_scales, round_up(key_scales.shape[0], 2))
  pool = pool.reshape(-1, LANES)
  B, n = page_table.shape
  ids = jnp.minimum(page_table, key_scales.shape[0] - 1)
  ids = jnp.pad(ids, ((0, 0), (0, 2 * lines - n)), constant_values=-1)
  at = jnp.maximum(page_pairs(ids), 0) // 2
  return jnp.take(pool, at, axis=0, mode='clip')


def check_kernel_arguments(H: int, page: int, interpret) -> None:
  """Raises `NotImplementedError` for sizes that no tile divides."""
  if page != PAGE or (interpret is False and H % LANES):
    raise NotImplementedError(
      f'the TPU kernel takes heads of a multiple of {LANES} and pages of '
      f'{PAGE} tokens, not {H=} {page=}; use implementation="xla"'
    )


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
  T, rows, _ = lines.shape
  return lines.reshape(T, rows * LANES)[:, :S]
