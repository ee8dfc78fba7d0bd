"""Rows of packed windows: who sees whom, and what the indexer selects.

A batch is B windows of S rows. A row is named by its place in its window, so
"slots" below are 0 .. S - 1, -1 for none. A row sees the rows of its own
segment up to itself; for the drafter, whose slot 0 is empty, those from
position `first` on. There is no cache: a window's rows are all there is.

What rows attend to is a list of slots where rows are gathered, and a mask
where attention runs over all keys: then nothing is sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from glm_jax.plan import LOCAL, LocalPlan
from pallas_kernels.indexer_scores import gpu as gpu_scores
from pallas_kernels.indexer_scores.reference import relu
from pallas_kernels.streaming_topk import gpu as gpu_select
from pallas_kernels.streaming_topk import threshold
from pallas_kernels.streaming_topk.reference import comparable
from pallas_kernels.tiling import PAGE, dot


class Windows(NamedTuple):
  """One batch on the device; S rows and E tokens of look-ahead.

  Attributes:
    tokens: [B, S + E] int32.
    segments: [B, S + E] int32, 0 for no segment.
    positions: [B, S + E] int32 within the segment.
  """

  tokens: jax.Array
  segments: jax.Array
  positions: jax.Array

  @property
  def rows(self) -> int:
    """S: whole pages; the look-ahead is less than one."""
    return self.tokens.shape[1] // PAGE * PAGE

  def targets(self, distance: int) -> tuple[jax.Array, jax.Array]:
    """Tokens `distance` rows on [B, S], and where those are the segment's."""
    S = self.rows
    ahead = slice(distance, distance + S)
    missing = max(distance + S - self.tokens.shape[1], 0)
    far = lambda a: jnp.pad(a[:, ahead], ((0, 0), (0, missing)))
    own = self.segments[:, :S]
    return far(self.tokens), (own > 0) & (own == far(self.segments))


class Queries(NamedTuple):
  """Where a set of query rows stands, all S rows or some of them.

  Attributes:
    index: [B, R] int32 place in the window.
    segment: [B, R] int32.
  """

  index: jax.Array
  segment: jax.Array


class Keys(NamedTuple):
  """What stands at each row of a window.

  Attributes:
    segment: [B, S] int32.
    position: [B, S] int32.
    first: lowest position that holds a key.
  """

  segment: jax.Array
  position: jax.Array
  first: int

  @property
  def queries(self) -> Queries:
    """All rows as queries."""
    index = jnp.arange(self.segment.shape[1], dtype=jnp.int32)
    return Queries(jnp.broadcast_to(index, self.segment.shape), self.segment)


def visible(queries: Queries, keys: Keys) -> jax.Array:
  """Which keys each query sees, [B, R, S] (or [R, S] without a batch)."""
  index = jnp.arange(keys.segment.shape[-1])
  seen = queries.segment[..., :, None] == keys.segment[..., None, :]
  seen &= (queries.segment > 0)[..., :, None]
  seen &= index <= queries.index[..., :, None]
  return seen & (keys.position >= keys.first)[..., None, :]


def visible_slots(queries: Queries, keys: Keys) -> jax.Array:
  """All visible keys as a selection [B, R, S], -1 where unseen."""
  index = jnp.arange(keys.segment.shape[-1], dtype=jnp.int32)
  return jnp.where(visible(queries, keys), index, -1)


def slots_mask(slots: jax.Array, size: int) -> jax.Array:
  """A selection [B, R, k] as a mask [B, R, size]."""
  B, R, _ = slots.shape
  b = jnp.arange(B)[:, None, None]
  r = jnp.arange(R)[None, :, None]
  at = jnp.where(slots < 0, size, slots)
  mask = jnp.zeros((B, R, size), bool)
  return mask.at[b, r, at].set(True, mode='drop')


def pool_slots(slots: jax.Array, size: int) -> jax.Array:
  """Slots [B, R, k] as ids [B * R, k] of the pool of all windows' rows."""
  start = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None, None] * size
  ids = jnp.where(slots < 0, -1, slots + start)
  return ids.reshape(-1, slots.shape[-1])


def strided(a: jax.Array, stride: int, offset: jax.Array | int) -> jax.Array:
  """Rows offset, offset + stride, ... of [B, S, ...]: [B, S / stride, ...]."""
  B, S = a.shape[:2]
  parts = a.reshape(B, S // stride, stride, *a.shape[2:])
  return lax.dynamic_index_in_dim(parts, offset, 2, keepdims=False)


class Selection(NamedTuple):
  """What rows attend to; one of the two, the other is None.

  Attributes:
    slots: [B, R, k] int32 in no order, -1 for none.
    mask: [B, R, S] bool.
  """

  slots: jax.Array | None
  mask: jax.Array | None

  def strided(self, stride: int, offset: jax.Array | int) -> Selection:
    """Of every `stride`-th row."""
    return jax.tree.map(lambda a: strided(a, stride, offset), self)

  def as_slots(self, k: int) -> jax.Array:
    """[B, R, k] int32 slots; of a mask, ascending, then -1."""
    if self.slots is not None:
      return self.slots
    S = self.mask.shape[-1]
    left = S - jnp.arange(S, dtype=jnp.int32)
    found, slots = lax.top_k(jnp.where(self.mask, left, 0), min(k, S))
    slots = jnp.where(found > 0, slots, -1)
    missing = k - slots.shape[-1]
    pads = ((0, 0), (0, 0), (0, missing))
    return jnp.pad(slots, pads, constant_values=-1)

  def as_mask(self, size: int) -> jax.Array:
    """[B, R, size] bool."""
    return slots_mask(self.slots, size) if self.mask is None else self.mask


def select(
  index_q: jax.Array,
  w: jax.Array,
  index_keys: jax.Array,
  keys: Keys,
  k: int,
  chunk: int,
  *,
  as_mask: bool = False,
  plan: LocalPlan = LOCAL,
) -> Selection:
  """The k best visible keys of every row; no gradient.

  Args:
    index_q: [B, S, I, H] index queries after RoPE.
    w: [B, S, I] float32 head weights.
    index_keys: [B, S, H].
    keys: what stands at each row.
    k: keys wanted.
    chunk: rows whose [I, S] products exist at once.
    as_mask: give a mask instead of slots.
    plan: where query rows and keys are.

  Returns:
    The selection. Equal scores go to the lower slot, as in `streaming_topk`.
  """
  index_q, w, index_keys = lax.stop_gradient((index_q, w, index_keys))
  S = w.shape[1]
  ranks = plan.query_ranks
  chunk = min(chunk, S // ranks)
  if S % (chunk * ranks):
    raise ValueError(
      f'{chunk=} must divide the window of {S} rows over {ranks} ranks'
    )
  # A row sees no key behind itself: each part of the rows needs a prefix.
  parts = 4 if S % (4 * chunk * ranks) == 0 else 1
  chosen, first = [], keys.first
  for part in range(parts):
    start, end = part * S // parts, (part + 1) * S // parts
    queries = Queries(*(a[:, start:end] for a in keys.queries))
    seen = Keys(keys.segment[:, :end], keys.position[:, :end], keys.first)
    some = plan.by_query(
      lambda rows, seen: _select_rows(
        *rows, seen[0], Keys(*seen[1:], first), k, chunk, as_mask
      ),
      (index_q[:, start:end], w[:, start:end], queries),
      (index_keys[:, :end], seen.segment, seen.position),
    )
    size = S if as_mask else k
    pads = ((0, 0), (0, 0), (0, size - some.shape[-1]))
    none = False if as_mask else -1
    chosen.append(jnp.pad(some, pads, constant_values=none))
  whole = jnp.concatenate(chosen, axis=1)
  return Selection(None, whole) if as_mask else Selection(whole, None)


def _select_rows(index_q, w, queries, index_keys, keys, k, chunk, as_mask):
  """Mask [B, R, S] or slots [B, R, min(k, S)] of some rows."""
  B, R = w.shape[:2]
  n = R // chunk
  width = min(k, keys.segment.shape[1])

  def best(xs):
    q, w, queries, b = xs
    one = lambda a: lax.dynamic_index_in_dim(a, b, 0, keepdims=False)
    own = Keys(one(keys.segment), one(keys.position), keys.first)
    scores = comparable(_scores(q, w, one(index_keys)))
    scores = jnp.where(visible(queries, own), scores, -jnp.inf)
    if as_mask:
      return _top_mask(scores, k)
    winners, slots = lax.top_k(scores, width)
    return jnp.where(winners > -jnp.inf, slots, -1).astype(jnp.int32)

  cut = lambda a: a.reshape(B * n, chunk, *a.shape[2:])
  rows = (*map(cut, (index_q, w)), jax.tree.map(cut, queries))
  found = lax.map(best, (*rows, jnp.repeat(jnp.arange(B), n)))
  return found.reshape(B, R, -1)


def _scores(q, w, keys):
  """[T, S] of [T, I, H] queries; on a GPU by a kernel where it fits."""

  def plain(q, w, keys):
    # One pass over the products; a matmul would need their relu in memory.
    return jnp.sum(relu(dot('tih,sh->tis', q, keys)) * w[:, :, None], axis=1)

  if not gpu_scores.fits(*q.shape, len(keys)):
    return plain(q, w, keys)
  return lax.platform_dependent(
    q, w, keys, cuda=gpu_scores.sequence_scores, default=plain
  )


def _top_mask(scores, k):
  """Exact top-k as a mask; on a GPU by a kernel where it fits."""
  plain = lambda scores: threshold.top_mask(scores, k)
  if not gpu_select.fits(scores.shape[-1]):
    return plain(scores)
  kernel = lambda scores: gpu_select.top_mask(scores, k)
  return lax.platform_dependent(scores, cuda=kernel, default=plain)
