"""Selection and attention where a rank can read a whole layer.

The layer is a pool of its own (a slot) or part of the replicated cache; rows
are split as finely as they divide, so that no rank does another's work.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from glm_jax.cache import Rows
from pallas_kernels import (
  indexer_scores,
  streaming_topk,
  topk_gather_attention,
)
from pallas_kernels.tiling import PAGE
from sharding.mesh import MODEL, ways


def query_axes(plan, num_rows: int) -> tuple[str, ...]:
  """Mesh axes over which index queries are split: `model` too if it can."""
  axes = plan.row_axes(num_rows)
  finer = axes + ((MODEL,) if plan.mesh.shape[MODEL] > 1 else ())
  fits = num_rows % ways(plan.mesh, finer) == 0
  return finer if axes and fits else axes


def pages_of(keys: jax.Array, scales: jax.Array | None):
  """Index keys as the ops take them: [pages, 64, H] and [pages, 64]."""
  pages = keys.reshape(-1, PAGE, keys.shape[-1])
  return pages, None if scales is None else scales.reshape(-1, PAGE)


def select(
  plan, q, w, keys, scales, table, rows: Rows, k: int, first: int
) -> jax.Array:
  """Positions [T, k] of each row's best keys.

  Args:
    plan: the plan.
    q: [T, I, H] index queries.
    w: [T, I] float32 head weights.
    keys: [slots, H] on every rank.
    scales: [slots] float32 or None.
    table: [B, n] int32 pages within `keys`, -1 for none.
    rows: the step's rows.
    k: keys wanted.
    first: lowest visible position.
  """

  def body(q, w, keys, scales, table, seq, pos):
    return streaming_topk(
      q,
      w,
      *pages_of(keys, scales),
      table,
      seq,
      pos,
      k,
      first=first,
      implementation=plan.implementation,
      block_bytes=plan.block_bytes,
    )[0]

  by_row = P(query_axes(plan, q.shape[0]) or None)
  run = plan.shard_map(
    body, (by_row, by_row, P(), P(), P(), by_row, by_row), by_row
  )
  positions = run(q, w, keys, scales, table, rows.seq, rows.pos)
  return plan.place_rows(positions)


def index_scores(plan, q, w, keys, scales, table, rows, first) -> jax.Array:
  """All scores [T, S]; arguments as for `select`."""

  def body(q, w, keys, scales, table, seq, pos):
    return indexer_scores(
      q,
      w,
      *pages_of(keys, scales),
      table,
      seq,
      pos,
      first=first,
      implementation=plan.implementation,
    )

  by_row = P(plan.row_axes(q.shape[0]) or None)
  run = plan.shard_map(
    body, (by_row, by_row, P(), P(), P(), by_row, by_row), by_row
  )
  return run(q, w, keys, scales, table, rows.seq, rows.pos)


def attend(
  plan, q, latents, scales, ids, scale: float, latent_width: int
) -> jax.Array:
  """Attended latents [T, N, R]; heads are split over `model`.

  Args:
    plan: the plan.
    q: [T, N, R + P] absorbed queries.
    latents: [slots, W] on every rank.
    scales: [slots, G] float32 or None.
    ids: [T, k] int32 rows of `latents`, -1 for none.
    scale: softmax scale.
    latent_width: R.
  """

  def body(q, latents, scales, ids):
    return topk_gather_attention(
      q,
      latents,
      scales,
      ids,
      scale=scale,
      latent_width=latent_width,
      implementation=plan.implementation,
      block_bytes=plan.block_bytes,
    )[0]

  rows = plan.row_axes(q.shape[0]) or None
  by_head = P(rows, plan.axes('heads') or None)
  run = plan.shard_map(body, (by_head, P(), P(), P(rows)), by_head)
  return run(q, latents, scales, jnp.asarray(ids))
