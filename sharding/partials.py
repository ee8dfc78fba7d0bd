"""Selection and attention where every rank reads only the tokens it owns.

Each rank scores its own blocks and brings its k best; `select_sharded` cuts
them over ranks exactly, ties to the lowest position. A rank's winners become
rows of its own pool once a group of layers, and each layer attends to them
and merges by lse. Global positions and local rows never share a name.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from glm_jax.cache import Rows, position_slots
from glm_jax.plan import Selection
from pallas_kernels import indexer_scores, streaming_topk
from pallas_kernels.streaming_topk.sharded import select_sharded
from pallas_kernels.tiling import PAGE, cdiv, round_up, within_pool
from pallas_kernels.topk_gather_attention.partial import (
  first_valid,
  normalize,
  partial_attention,
)
from sharding.collectives import first_of_all, merge_by_lse, rank_index
from sharding.mesh import ways
from sharding.pools import KEYS, LATENTS
from sharding.sharded_cache import DealtRows
from sharding.whole_layer import pages_of


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['owned', 'local_slots', 'given'],
  meta_fields=['plan', 'k'],
)
@dataclasses.dataclass(frozen=True)
class DealtSelection:
  """The rows that a group of layers attends to, rank by rank.

  Attributes:
    owned: [T, ranks, m] int32 global positions that each rank owns.
    local_slots: [T, ranks, m] int32 the same as token slots within a layer of
      that rank's pool, first the valid ones, then -1.
    given: [T, k] int32 all positions where they were given, else None.
    plan: the plan.
    k: keys wanted.
  """

  owned: jax.Array
  local_slots: jax.Array
  given: jax.Array | None
  plan: object
  k: int

  @property
  def positions(self) -> jax.Array:
    """[T, k] int32 positions, ascending, then -1; gathered when asked for."""
    if self.given is not None:
      return self.given
    axes = self.plan.axes('tokens')
    body = lambda owned: first_of_all(owned[:, 0], self.k, axes)
    return self.plan.shard_map(body, P(None, axes or None), P())(self.owned)


def bound(k: int, ranks: int) -> int:
  """Rows that a rank attends to in one pass: twice its even share and some.

  At 2,048 keys over 128 ranks 64 rows, four times the share.
  """
  return min(k, round_up(2 * cdiv(k, ranks) + 32, 32))


def deal_rows(plan, rows: Rows) -> DealtRows:
  """Finds what each rank holds of the rows' sequences, once a pass."""
  axes, deal = plan.axes('index_tokens'), plan.index_deal
  n = rows.page_table.shape[1]
  width = cdiv(n, deal.ranks) * deal.ranks

  def body(table, seq, pos):
    mine = deal.own_pages(table, rank_index(axes)) >= 0
    place = jnp.cumsum(mine, axis=1, dtype=jnp.int32) - 1
    at = jnp.where(mine, place, width)
    number = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), table.shape)
    which = jnp.broadcast_to(jnp.arange(len(table))[:, None], table.shape)
    blocks = jnp.full((len(table), width), -1, jnp.int32)
    blocks = blocks.at[which, at].set(number, mode='drop')
    block = jnp.clip(pos // PAGE, 0, n - 1)
    seq = jnp.maximum(seq, 0)
    before = place[seq, block] + ~mine[seq, block]  # own blocks below
    partly = jnp.where(mine[seq, block], pos % PAGE + 1, 0)
    visible = jnp.where(pos >= 0, before * PAGE + partly, 0)
    return blocks[None], visible[None].astype(jnp.int32)

  by_rank = P(axes or None)
  run = plan.shard_map(body, P(), by_rank)
  blocks, visible = run(rows.page_table, rows.seq, rows.pos)
  return DealtRows(
    rows.seq, rows.pos, rows.slots, rows.page_table, blocks, visible
  )


def select(plan, q, w, cache, rows: DealtRows, index_slot, k: int, first: int):
  """The k best visible keys of every row, as a `DealtSelection`."""
  axes, deal = plan.axes('index_tokens'), plan.index_deal
  shared = tuple(a for a in axes if a not in plan.axes('tokens'))

  pages = plan.local_pages(cache, KEYS)

  def body(q, w, keys, scales, slot, blocks, visible, table, seq):
    own = deal.own_pages(table, rank_index(axes))
    own = jnp.where(own >= 0, own + slot * pages, -1)
    scores, positions = _candidates(
      plan, q, w, keys, scales, blocks[0], visible[0], own, seq, k, first, deal
    )
    if axes:
      positions = select_sharded(scores, positions, k, axes)[0]
    if shared:
      # Ranks that hold the same latents attend to the same winners.
      positions = lax.all_gather(positions, shared, axis=1, tiled=True)
      positions = first_valid(positions)[0][:, :k]
    return positions[:, None]

  by_rank = P(axes or None)
  run = plan.shard_map(
    body,
    (P(), P(), by_rank, by_rank, P(), by_rank, by_rank, P(), P()),
    P(None, plan.axes('tokens') or None),
  )
  owned = run(
    q,
    w,
    cache.index_keys,
    cache.index_scales,
    jnp.asarray(index_slot, jnp.int32),
    rows.blocks,
    rows.visible,
    within_pool(rows.page_table, cache.num_pages, 'page'),
    rows.seq,
  )
  return _addressed(plan, rows, owned, None, k)


def _candidates(
  plan, q, w, keys, scales, blocks, visible, own, seq, k, first, deal
):
  """Scores and global positions of a rank's k best keys, [T, at most k].

  Args:
    plan: the plan.
    q: [T, I, H] index queries.
    w: [T, I] head weights.
    keys: the rank's pool of index keys.
    scales: their scales or None.
    blocks: [B, m] the rank's blocks of each sequence, ascending, then -1.
    visible: [T] tokens of those blocks that a row sees.
    own: [B, n] page within the rank's pool of each block, -1 if not its own.
    seq: [T] sequence of each row.
    k: keys wanted.
    first: lowest visible position.
    deal: how pages are dealt.
  """
  width = blocks.shape[1] // deal.ranks
  # Up to `first` keys below the lowest visible position are thrown away.
  count = min(k + first, width * PAGE)
  seq = jnp.maximum(seq, 0)

  def score(i):
    part = lax.dynamic_slice_in_dim(blocks, i * width, width, axis=1)
    pages = jnp.take_along_axis(own, jnp.maximum(part, 0), axis=1)
    last = jnp.clip(visible - i * width * PAGE, 0, width * PAGE) - 1
    places, scores = streaming_topk(
      q,
      w,
      *pages_of(keys, scales),
      jnp.where(part >= 0, pages, -1),
      seq,
      last.astype(jnp.int32),
      count,
      implementation=plan.implementation,
      block_bytes=plan.block_bytes,
    )
    block = part[seq[:, None], jnp.maximum(places, 0) // PAGE]
    positions = block * PAGE + places % PAGE
    seen = (places >= 0) & (positions >= first)
    return jnp.where(seen, scores, -jnp.inf), jnp.where(seen, positions, -1)

  def further(i, best):
    scores, positions = jax.tree.map(
      lambda a, b: jnp.concatenate([a, b], axis=1), best, score(i)
    )
    # Equal scores stay in the order of their positions.
    scores, at = lax.top_k(scores, count)
    return scores, jnp.take_along_axis(positions, at, axis=1)

  best = score(0)
  passes = cdiv_traced(jnp.max(jnp.sum(blocks >= 0, axis=1)), width)
  with jax.named_scope('overflow'):
    return lax.fori_loop(1, passes, further, best)


def cdiv_traced(a: jax.Array, b: int) -> jax.Array:
  """Ceiling division of a traced count."""
  return (a + b - 1) // b


def selection(plan, rows: DealtRows, positions: jax.Array) -> DealtSelection:
  """A selection from positions [T, k]."""
  axes = plan.axes('tokens')
  slots = position_slots(rows, positions)

  def body(positions, slots):
    mine = plan.deal.own_slots(slots, rank_index(axes)) >= 0
    return first_valid(jnp.where(mine, positions, -1))[0][:, None]

  run = plan.shard_map(body, P(), P(None, axes or None))
  owned = run(positions, slots)
  return _addressed(plan, rows, owned, positions, positions.shape[1])


def dealt(plan, chosen: Selection) -> DealtSelection:
  """A selection made where rows moved, for a step where results move."""
  axes = plan.axes('tokens')

  def body(positions, slots):
    local = plan.deal.own_slots(slots, rank_index(axes))
    owned = jnp.where(local >= 0, positions, -1)
    return first_valid(owned)[0][:, None], first_valid(local)[0][:, None]

  run = plan.shard_map(body, P(), P(None, axes or None))
  owned, local = run(chosen.positions, chosen.slots)
  k = chosen.positions.shape[1]
  return DealtSelection(owned, local, chosen.positions, plan, k)


def _addressed(plan, rows, owned, given, k) -> DealtSelection:
  """Positions that ranks own, with their local slots."""
  axes = plan.axes('tokens')

  def body(owned, table, seq):
    rows = Rows(seq, seq, seq, table)
    slots = position_slots(rows, owned[:, 0])
    return plan.deal.own_slots(slots, rank_index(axes))[:, None]

  by_rank = P(None, axes or None)
  run = plan.shard_map(body, (by_rank, P(), P()), by_rank)
  local = run(owned, rows.page_table, rows.seq)
  return DealtSelection(owned, local, given, plan, k)


def attend(plan, q, cache, chosen: DealtSelection, layer, scale: float):
  """Attended latents [T, N, R]: each rank's winners, merged by lse."""
  if isinstance(chosen, Selection):
    chosen = dealt(plan, chosen)
  axes, heads = plan.axes('tokens'), plan.axes('heads')
  T, R = q.shape[0], cache.latent_width
  split = plan.is_split(T)
  ranks = ways(plan.mesh, axes)
  # A split step keeps its own rows; a whole step splits the features, which
  # is how the value projection wants them.
  scatter = 0 if split and plan.axes('rows') == axes else None
  if not split and R % ranks == 0 and plan.axes('fsdp') == axes:
    scatter = 2

  size = plan.local_pages(cache, LATENTS) * PAGE

  def body(q, latents, scales, layer, slots):
    slots = within_pool(slots[:, 0], size, 'slot')
    slots = jnp.where(slots >= 0, slots + layer * size, -1)
    out, lse = _own_rows(
      plan, q, latents, scales, slots, scale, R, bound(chosen.k, ranks)
    )
    return merge_by_lse(out, lse, axes, scatter=scatter)

  out = [None, heads or None, None]
  if scatter is not None:
    out[scatter] = axes or None
  by_rank = P(axes or None)
  run = plan.shard_map(
    body,
    (P(None, heads or None), by_rank, by_rank, P(), P(None, axes or None)),
    P(*out),
  )
  layer = jnp.asarray(layer, jnp.int32)
  return run(q, cache.latents, cache.latent_scales, layer, chosen.local_slots)


def _own_rows(plan, q, latents, scales, slots, scale, latent_width, size):
  """Attention [T, N, R] over a rank's winners, `size` of them at a time."""
  T, m = slots.shape
  slots = jnp.pad(
    slots, ((0, 0), (0, round_up(m, size) - m)), constant_values=-1
  )
  count = jnp.sum(slots >= 0, axis=1, dtype=jnp.int32)

  def part(i):
    return partial_attention(
      q,
      latents,
      scales,
      lax.dynamic_slice_in_dim(slots, i * size, size, axis=1),
      jnp.clip(count - i * size, 0, size),
      scale=scale,
      latent_width=latent_width,
      implementation=plan.implementation,
      block_bytes=plan.block_bytes,
    )

  def further(i, so_far):
    (a, m, l), (b, n, o) = so_far, part(i)  # noqa: E741
    top = jnp.maximum(m, n)
    safe = jnp.where(top > -jnp.inf, top, 0)
    u, v = jnp.exp(m - safe), jnp.exp(n - safe)
    return a * u[..., None] + b * v[..., None], top, l * u + o * v

  total = part(0)
  if m > size:
    passes = cdiv_traced(jnp.max(count, initial=0), size)
    with jax.named_scope('overflow'):
      total = lax.fori_loop(1, passes, further, total)
  out, lse = normalize(*total)
  return out.astype(q.dtype), lse


def index_scores(plan, q, w, cache, rows: DealtRows, index_slot, first: int):
  """All scores [T, S] of a full layer, each from the rank that owns its key."""
  axes, deal = plan.axes('index_tokens'), plan.index_deal

  pages = plan.local_pages(cache, KEYS)

  def body(q, w, keys, scales, slot, table, seq, pos):
    own = deal.own_pages(table, rank_index(axes))
    scores = indexer_scores(
      q,
      w,
      *pages_of(keys, scales),
      jnp.where(own >= 0, own + slot * pages, -1),
      seq,
      pos,
      first=first,
      implementation=plan.implementation,
    )
    return lax.pmax(scores, axes) if axes else scores

  by_rank = P(axes or None)
  run = plan.shard_map(
    body, (P(), P(), by_rank, by_rank, P(), P(), P(), P()), P()
  )
  table = within_pool(rows.page_table, cache.num_pages, 'page')
  slot = jnp.asarray(index_slot, jnp.int32)
  pool = cache.index_keys, cache.index_scales
  return run(q, w, *pool, slot, table, rows.seq, rows.pos)
