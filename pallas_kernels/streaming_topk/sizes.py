"""What the selection kernel is specialised to, and what that costs."""

from __future__ import annotations

import dataclasses

from pallas_kernels.tiling import cdiv, round_up

LANES = 128
SUB = 8  # lines of one tile
CHUNK = SUB * LANES  # keys of one tile
GROUP = 8  # tiles sorted against each other
TOGETHER = 8  # lines of outputs read at once, at most
STEP = 32  # groups counted between two tests of a loop's end


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What a kernel is specialised to.

  Attributes:
    k: keys wanted.
    lines: lines of 128 scores of one row.
    group: tiles sorted against each other.
    chunk: groups counted in one step.
    block: lines whose running counts share a row.
    full: count everything, whatever the data. For the compiler's cycle
      model only, which does not follow data.
    unroll: copies of lines are unrolled; the interpreter would compile each.
  """

  k: int
  lines: int
  group: int
  chunk: int
  block: int
  full: bool
  unroll: bool

  @property
  def groups(self) -> int:
    """Groups of one row."""
    return self.lines // (SUB * self.group)

  @property
  def blocks(self) -> int:
    """Blocks of one row, in whole tiles."""
    return round_up(self.lines // self.block, SUB)

  @property
  def outputs(self) -> int:
    """Lines of 128 outputs."""
    return cdiv(self.k, LANES)

  @property
  def together(self) -> int:
    """Lines of outputs read at once."""
    return power_of_two(self.outputs, TOGETHER)

  @property
  def flops(self) -> int:
    """FLOPs of the matrix products over a row whose scores are all seen."""
    lines = self.lines * LANES**2  # winners of each line
    running = 2 * self.blocks * LANES * (LANES + self.blocks)
    placed = self.outputs * 3 * self.blocks * LANES**2
    read = self.outputs * 2 * LANES**3
    return 2 * (lines + running + placed + read)


def power_of_two(n: int, most: int) -> int:
  """The largest power of two up to `most` that divides n."""
  return min(n & -n, most)


def sizes_of(k: int, lines: int, full: bool, unroll: bool = True) -> Sizes:
  """Sizes for rows of `lines` (a multiple of eight) lines."""
  group = power_of_two(lines // SUB, GROUP)
  return Sizes(
    k=k,
    lines=lines,
    group=group,
    chunk=power_of_two(lines // SUB // group, STEP),
    block=power_of_two(lines, LANES),
    full=full,
    unroll=unroll,
  )
