"""Exact top-k of a row of scores that fits the core's memory, in Pallas.

The k-th largest score is found two bits at a time, by counting. Scores are
first sorted within groups of eight that stand in the same place of consecutive
(8, 128) tiles, so that layer 0 holds the largest of every group. The k-th
largest of layer 0 is a lower bound of the threshold; only layers with
anything above the bound, two of eight for scores in no order, are counted
after that. The worst case counts all of them and is still exact.

Winners are then counted by line of 128 (ties at the threshold too: the first
ones fill the places left), each output finds its line in the running counts,
lines are gathered, and a last running count within the line gives the lane.
Every count is a small integer, exact in the bf16 passes that add it.

Counting on float32 needs no integer keys: NaN compares false, and -0.0
equals 0.0.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.streaming_topk.sizes import (
  CHUNK,
  LANES,
  SUB,
  Sizes,
  sizes_of,
)

NO = float('-inf')
_MIN = -(2**31)
_NO_KEY = 0x007FFFFF  # `unsigned_key` of -inf; NaN of either sign is beyond
_TIE = 256  # a line's ties are counted in units of this


def iota(shape, axis):
  """int32 index along an axis."""
  return lax.broadcasted_iota(jnp.int32, shape, axis)


def mask(condition) -> jax.Array:
  """1.0 where true, in bf16."""
  return jnp.where(condition, 1.0, 0.0).astype(jnp.bfloat16)


def add_up(a, b, contract=((1,), (0,)), precision=lax.Precision.DEFAULT):
  """Matmul with float32 results."""
  return lax.dot_general(
    a,
    b,
    (contract, ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def sort_network(n: int):
  """Comparators (i, j), i < j, of Batcher's odd-even merge sort, n = 2^m."""
  p = 1
  while p < n:
    step = p
    while step:
      for j in range(step % p, n - step, 2 * step):
        for i in range(min(step, n - j - step)):
          if (i + j) // (2 * p) == (i + j + step) // (2 * p):
            yield i + j, i + j + step
      step //= 2
    p *= 2


def threshold_of(key, shape=(SUB, LANES)) -> jax.Array:
  """Scores whose order is that of an unsigned key, as float32 of `shape`."""
  signed = key ^ _MIN
  bits = jnp.full(shape, signed ^ ((signed >> 31) & 0x7FFFFFFF), jnp.int32)
  return lax.bitcast_convert_type(bits, jnp.float32)


def finite_threshold(key) -> jax.Array:
  """`threshold_of`, with -inf for the keys of -inf and below."""
  none = (key ^ _MIN) <= (_NO_KEY ^ _MIN)
  return jnp.where(none, NO, threshold_of(key))


class Row:
  """One row of scores: reading, counting, and where its winners lie."""

  def __init__(self, refs, seen, sizes: Sizes):
    (
      self.scores,
      self.layers,
      self.counts,
      self.lines,
      self.line_ids,
      self.ranks,
      self.ties,
      self.gathered,
      self.sem,
    ) = refs
    self.seen, self.sizes = seen, sizes
    chunk = sizes.chunk * sizes.group
    steps = (seen + chunk - 1) // chunk
    self.steps = sizes.groups // sizes.chunk if sizes.full else steps

  def tile(self, at):
    """A tile of scores; -inf for NaN and for what nobody wrote."""
    x = self.scores[0, pl.ds(pl.multiple_of(at * SUB, SUB), SUB)]
    return jnp.where((x > NO) & (at < self.seen), x, NO)

  def sort_groups(self):
    """Writes the layers, largest first."""
    sizes = self.sizes
    network = list(sort_network(sizes.group))

    def group(g, _):
      tiles = [self.tile(g * sizes.group + j) for j in range(sizes.group)]
      for i, j in network:
        high = jnp.maximum(tiles[i], tiles[j])
        tiles[i], tiles[j] = high, jnp.minimum(tiles[i], tiles[j])
      at = pl.ds(pl.multiple_of(g * SUB, SUB), SUB)
      for j, x in enumerate(tiles):
        self.layers[j, at] = x

    lax.fori_loop(0, self.steps * sizes.chunk, group, None)

  def count(self, compare, bounds, layers, start=0):
    """Scores of layers from `start` that compare true, for each bound."""
    size = self.sizes.chunk * SUB

    def step(j, s, totals):
      at = pl.ds(pl.multiple_of(s * size, SUB), size)
      x = self.layers[j, at].reshape(-1, SUB, LANES)
      hits = [compare(x, bound).astype(jnp.int32) for bound in bounds]
      return [t + jnp.sum(h, axis=0) for t, h in zip(totals, hits)]

    totals = [jnp.zeros((SUB, LANES), jnp.int32) for _ in bounds]
    steps = self.steps
    if self.sizes.full:  # the cycle model aborts on the nested loops
      flat = lambda i, totals: step(i // steps, i % steps, totals)
      totals = lax.fori_loop(start * steps, layers * steps, flat, totals)
    else:
      layer = lambda j, totals: lax.fori_loop(
        0, steps, functools.partial(step, j), totals
      )
      totals = lax.fori_loop(start, layers, layer, totals)
    return [jnp.sum(t) for t in totals]

  def kth_largest(self, layers, bound):
    """Unsigned key of the k-th largest score of some layers, two bits a pass.

    Three counts wait for one reduction: over few scores that wait is most of
    a pass.

    Args:
      layers: layers that hold all scores above `bound`.
      bound: unsigned key at or above which there are k scores, or 0.
    """

    def bits(i, key):
      shift = 30 - 2 * i
      trials = [key | (jnp.int32(n) << shift) for n in (1, 2, 3)]
      bounds = [threshold_of(trial) for trial in trials]
      some = lambda: self.count(jnp.greater_equal, bounds, layers)
      if not self.sizes.full:
        known = (trials[-1] ^ _MIN) <= (bound ^ _MIN)
        counts = lax.cond(known, lambda: [jnp.int32(self.sizes.k)] * 3, some)
      else:
        counts = some()
      # Keys below that of -inf are NaN and count none: the highest that
      # leaves enough, not the number of those that do.
      for trial, count in zip(trials, counts):
        key = jnp.where(count >= self.sizes.k, trial, key)
      return key

    return lax.fori_loop(0, 16, bits, jnp.int32(0))

  def threshold(self):
    """The k-th largest score, [8, 128], and the places left for ties."""
    sizes = self.sizes
    bound = self.kth_largest(1, jnp.int32(0))
    above = finite_threshold(bound)
    layers = sizes.group
    if not sizes.full:
      layers = sum(
        (self.count(jnp.greater, [above], j + 1, j)[0] > 0).astype(jnp.int32)
        for j in range(sizes.group)
      )
      layers = jnp.maximum(layers, 1)
    key = self.kth_largest(layers, bound)
    least = finite_threshold(key)
    (more,) = self.count(jnp.greater, [least], layers)
    places = jnp.where(jnp.max(least) > NO, sizes.k - more, 0)
    return least, places, more + places

  def count_lines(self, least):
    """Winners and ties of every line, [blocks, 128] in `counts`."""
    sizes = self.sizes
    self.counts[...] = jnp.zeros_like(self.counts)
    tie = jnp.where(least[:1] > NO, jnp.float32(_TIE), 0.0)
    ones = jnp.ones((LANES, LANES), jnp.bfloat16)
    shape = (sizes.block, LANES)
    diagonal = iota(shape, 0) == iota(shape, 1)

    def block(b, _):
      tiles = sizes.block // SUB
      x = jnp.concatenate([self.tile(b * tiles + j) for j in range(tiles)])
      hit = jnp.where(x > least[:1], 1.0, jnp.where(x == least[:1], tie, 0.0))
      total = add_up(hit.astype(jnp.bfloat16), ones)  # the same in every lane
      line = jnp.sum(jnp.where(diagonal, total, 0), axis=0, keepdims=True)
      self.counts[pl.ds(b, 1)] = line

    blocks = sizes.lines // sizes.block
    tiles = self.steps * sizes.chunk * sizes.group
    steps = (
      blocks if sizes.full else (tiles * SUB + sizes.block - 1) // sizes.block
    )
    lax.fori_loop(0, steps, block, None)

  def place_winners(self, least, places):
    """Line, rank in the line and ties to take there, of every output.

    Outputs stand in lanes: `line_ids`, `ranks`, `ties` are [outputs, 128].
    """
    sizes = self.sizes
    counts = self.counts[...]  # [blocks, 128]
    ties = jnp.floor(counts * (1 / _TIE))
    more = counts - ties * _TIE
    shape = (LANES, LANES)
    upto = mask(iota(shape, 0) <= iota(shape, 1))
    shape = (sizes.blocks, sizes.blocks)
    before = jnp.where(iota(shape, 1) < iota(shape, 0), 1.0, 0.0)
    exact = lax.Precision.HIGHEST

    def running(x):
      """Running counts within each block, and before the block."""
      inside = add_up(x.astype(jnp.bfloat16), upto)
      total = jnp.broadcast_to(inside[:, LANES - 1 :], inside.shape)
      return inside, add_up(before, total, precision=exact), total

    inside, base, _ = running(ties)
    earlier = inside + base - ties
    taken = jnp.clip(places.astype(jnp.float32) - earlier, 0, ties)
    inside, base, total = running(more + taken)
    end = base + total
    high = jnp.floor(inside * (1 / LANES))
    low = inside - high * LANES
    parts = [x.astype(jnp.bfloat16) for x in (high, low, taken)]
    line = iota((LANES, LANES), 0).astype(jnp.float32)
    column = lambda x: jnp.sum(x, axis=0, keepdims=True)

    for q in range(sizes.outputs):
      at = iota((1, LANES), 1).astype(jnp.float32) + q * LANES
      done = end <= at
      block = column(jnp.where(done, 1.0, 0.0))
      start = jnp.max(jnp.where(done, end, 0.0), axis=0, keepdims=True)
      own = mask(iota(end.shape, 0).astype(jnp.float32) == block)
      high, low, take = (add_up(x, own, ((0,), (0,))) for x in parts)
      inside = high * LANES + low  # [lines of the block, outputs]
      done = inside <= at - start
      which = column(jnp.where(done, 1.0, 0.0))
      start += jnp.max(jnp.where(done, inside, 0.0), axis=0, keepdims=True)
      row = pl.ds(q, 1)
      ids = (block * sizes.block + which).astype(jnp.int32)
      self.lines[row] = jnp.where(ids < sizes.lines, ids, 0)
      self.ranks[row] = at - start
      self.ties[row] = column(jnp.where(line == which, take, 0.0))

  def gather_lines(self, q, place):
    """Copies the lines of a line of outputs into a place of `gathered`.

    Unrolled: the address of an id is then one addition away, and a copy takes
    the scalar unit two cycles in place of five.
    """

    def line(j, _):
      at = self.line_ids[q, j]
      self.gathered[place, pl.ds(j, 1)] = self.scores[0, pl.ds(at, 1)]

    lax.fori_loop(0, LANES, line, None, unroll=self.sizes.unroll)

  def read_winners(self, q, place, least, total):
    """Positions and scores [1, 128] of a line of outputs, gathered before."""
    x = self.gathered[place].T  # [lanes, outputs]
    least = least[:1, :1]
    shape = (LANES, LANES)
    upto = mask(iota(shape, 1) <= iota(shape, 0))
    tied = (x == least) & (x > NO)
    row = pl.ds(q, 1)
    first = add_up(upto, mask(tied)) <= self.ties[row]
    won = (x > least) | (tied & first)
    rank = add_up(upto, mask(won))
    wanted = self.ranks[row]
    lane = jnp.sum(jnp.where(rank <= wanted, 1, 0), axis=0, keepdims=True)
    hit = won & (rank == wanted + 1)
    score = jnp.sum(jnp.where(hit, x, 0.0), axis=0, keepdims=True)
    there = iota((1, LANES), 1) + q * LANES < total
    position = jnp.where(there, self.lines[row] * LANES + lane, -1)
    score = jnp.where(score == 0, 0.0, score)
    return position, jnp.where(there, score, NO)


def kernel(seen_ref, scores_ref, positions_ref, winners_ref, *refs, sizes):
  """One row.

  Args:
    seen_ref: [T] int32, prefetched: tiles of scores that were written.
    scores_ref: [1, S / 128, 128] f32.
    positions_ref: [1, outputs, 128] int32.
    winners_ref: [1, outputs, 128] f32.
    *refs: scratch of `Row`.
    sizes: what is static.
  """
  seen = sizes.lines // SUB if sizes.full else seen_ref[pl.program_id(0)]
  row = Row((scores_ref, *refs), seen, sizes)
  row.sort_groups()
  least, places, total = row.threshold()
  row.count_lines(least)
  row.place_winners(least, places)
  copy = pltpu.make_async_copy(row.lines, row.line_ids, row.sem)
  copy.start()
  copy.wait()

  def read(i, _):
    # Lines that wait for one another's results are read together.
    lines = [i * sizes.together + j for j in range(sizes.together)]
    for place, q in enumerate(lines):
      row.gather_lines(q, place)
    for place, q in enumerate(lines):
      position, score = row.read_winners(q, place, least, total)
      positions_ref[0, pl.ds(q, 1)] = position
      winners_ref[0, pl.ds(q, 1)] = score

  lax.fori_loop(0, sizes.outputs // sizes.together, read, None)


def select(
  scores: jax.Array,
  last: jax.Array,
  k: int,
  *,
  full: bool = False,
  interpret=False,
) -> tuple[jax.Array, jax.Array]:
  """The k best of rows of scores, exactly; ties to the lowest position.

  Args:
    scores: [T, S / 128, 128] float32, S a multiple of 1024. -inf and NaN are
      never selected.
    last: [T] int32 highest position of each row, or -1. Scores beyond it in
      the same 1024 must be -inf; those of later ones may be anything.
    k: keys wanted a row.
    full: for the cycle model: see `Sizes`.
    interpret: True, or `pltpu.InterpretParams` to simulate memory and races,
      to run on a CPU.

  Returns:
    positions [T, k] int32, ascending, then -1; scores [T, k] float32 of
    those, -inf beside -1.
  """
  T, lines, _ = scores.shape
  sizes = sizes_of(k, lines, full, unroll=interpret is False)
  outputs = sizes.outputs
  out = (1, outputs, LANES)
  mine = lambda t, *_: (t, 0, 0)
  row_bytes = 4 * lines * LANES
  positions, winners = pl.pallas_call(
    functools.partial(kernel, sizes=sizes),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(T,),
      in_specs=[pl.BlockSpec((1, lines, LANES), mine)],
      out_specs=[pl.BlockSpec(out, mine), pl.BlockSpec(out, mine)],
      scratch_shapes=[
        pltpu.VMEM((sizes.group, sizes.groups * SUB, LANES), jnp.float32),
        pltpu.VMEM((sizes.blocks, LANES), jnp.float32),
        pltpu.VMEM((outputs, LANES), jnp.int32),
        pltpu.SMEM((outputs, LANES), jnp.int32),
        pltpu.VMEM((outputs, LANES), jnp.float32),
        pltpu.VMEM((outputs, LANES), jnp.float32),
        pltpu.VMEM((sizes.together, LANES, LANES), jnp.float32),
        pltpu.SemaphoreType.DMA,
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((T, outputs, LANES), jnp.int32),
      jax.ShapeDtypeStruct((T, outputs, LANES), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',),
      vmem_limit_bytes=3 * row_bytes + (12 << 20),
    ),
    cost_estimate=pl.CostEstimate(
      flops=T * sizes.flops,
      bytes_accessed=T * (row_bytes + 8 * outputs * LANES),
      transcendentals=0,
    ),
    interpret=interpret,
    name='select_topk',
  )(jnp.clip(last + CHUNK, 0, lines * LANES) // CHUNK, scores)
  return (
    positions.reshape(T, outputs * LANES)[:, :k],
    winners.reshape(T, outputs * LANES)[:, :k],
  )
