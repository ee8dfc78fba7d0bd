"""The copies of one tile of rows: page ids, pages and scales in, scores out.

While a block of keys is scored, the pages of the next one arrive in the other
half of a buffer, and the page ids of the one after that in scalar memory.
Every copy is waited for in the trip of the loop that started it: nothing is
lost by it, and the compiler's cycle model can follow.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUB = 8  # lines of one tile
CHUNK = 1024  # keys whose scores fill a whole (8, 128) tile of a row
MAX_PART = 4096  # keys of one trip of the innermost loop
# Semaphores of the pages: the compiler takes copies that share one as one
# after another, at half the memory's bandwidth.
KEY_SEMS = 16
ID_SLOTS = 4  # page ids of a block live from two blocks before to its end


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
    scaled: keys have scales.
    split: queries are two parts in e4m3, for keys that are not widened.
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
  scaled: bool
  split: bool

  @property
  def pages(self) -> int:
    """Pages of one block."""
    return self.block // self.page

  def entry(self, page):
    """Where a page's id stands among those of its block.

    With scales even pages come before odd ones: a line has one of each.
    """
    if not self.scaled:
      return page
    return page % 2 * (self.pages // 2) + page // 2

  @property
  def part(self) -> int:
    """Keys of one trip of the innermost loop; divides a block."""
    chunks = self.block // CHUNK
    return CHUNK * min(chunks & -chunks, max(MAX_PART // CHUNK // self.rows, 1))

  @property
  def parts(self) -> int:
    """Parts of one block."""
    return self.block // self.part


class Stream:
  """The copies of one tile: page ids, pages and scales in, scores out.

  What a turn needs is there when it begins: a turn starts the copies of the
  next one and of its predecessor's scores, and waits for all of them at its
  end.
  """

  def __init__(self, refs, sequence, last, turns, sizes: Sizes):
    self.table, self.pool, self.plane, self.scores = refs[:4]
    self.ids, self.keys, self.out, self.none = refs[4:8]
    self.id_sem, self.key_sem, self.out_sem, self.none_sem = refs[8:12]
    self.scales, self.pairs, self.scale, self.scale_sem = refs[12:]
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

  def table_row(self, i):
    """A block's row of page ids; the last one's beyond."""
    at = jnp.minimum(i, self.turns - 1)
    return self.table.at[self.sequence * self.sizes.blocks + at]

  def page_ids(self, i):
    """Copies a block's page ids into scalar memory."""
    slot = self.ids.at[i & (ID_SLOTS - 1)]
    return pltpu.make_async_copy(self.table_row(i), slot, self.id_sem)

  def pair_lines(self, i):
    """Copies what the scales of a block's keys are made of.

    These are the lines that hold them, and the page ids, which say what half
    of a line; ids are wanted in vectors here.
    """
    at = pl.ds(jnp.minimum(i, self.turns - 1) * self.lines, self.lines)
    lines = self.plane.at[:, self.sequence, at]
    ids = self.table_row(i).at[:, pl.ds(0, self.pairs.shape[-1])]
    copy = lambda source, at: pltpu.make_async_copy(
      source, at.at[i & 1], self.scale_sem
    )
    return copy(lines, self.scales), copy(ids, self.pairs)

  def start_part(self, i, c):
    """Starts the copies of the pages of part c of a block."""
    size, pages = self.sizes.page, self.sizes.part // self.sizes.page

    def page(j, _):
      at = c * pages + j
      pltpu.make_async_copy(
        self.pool.at[self.page_id(i, self.sizes.entry(at))],
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
      for copy in self.pair_lines(i):
        copy.start()

  def wait_rest(self, i):
    """Waits for what `start_rest` started."""
    self.page_ids(i + 1).wait()
    if self.plane is not None:
      for copy in self.pair_lines(i):
        copy.wait()

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
