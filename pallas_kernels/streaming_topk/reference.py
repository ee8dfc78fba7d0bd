"""Exact top-k of index scores: the specification, by a stable sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from pallas_kernels.indexer_scores import reference as scores_reference


def comparable(scores: jax.Array) -> jax.Array:
  """Scores as the selection compares them: NaN lowest, -0.0 equal to 0.0.

  Debug mode (`checkify`) raises for NaN.
  """
  checkify.debug_check(~jnp.any(jnp.isnan(scores)), 'an index score is NaN')
  scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
  return jnp.where(scores == 0, 0.0, scores)


def ascending(
  positions: jax.Array, scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Orders winners by position and turns -inf winners into trailing -1."""
  valid = scores > -jnp.inf
  last = jnp.iinfo(jnp.int32).max
  key = jnp.where(valid, positions, last)
  key, scores = jax.lax.sort((key, scores), dimension=1, num_keys=1)
  return jnp.where(key == last, -1, key), scores


def streaming_topk(
  q: jax.Array,  # [T, I, H]
  w: jax.Array,  # [T, I] f32
  key_pages: jax.Array,  # [P, page, H]
  key_scales: jax.Array | None,  # [P, page] f32
  page_table: jax.Array,  # [B, n] int32
  row_seq: jax.Array,  # [T] int32
  row_pos: jax.Array,  # [T] int32
  k: int,
  *,
  first: int = 0,
) -> tuple[jax.Array, jax.Array]:  # [T, k] int32, [T, k] f32
  """See the public call."""
  scores_TS = comparable(
    scores_reference.indexer_scores(
      q, w, key_pages, key_scales, page_table, row_seq, row_pos, first=first
    )
  )
  missing = max(k - scores_TS.shape[1], 0)
  scores_TS = jnp.pad(
    scores_TS, ((0, 0), (0, missing)), constant_values=-jnp.inf
  )
  order = jnp.argsort(-scores_TS, axis=1, stable=True)[:, :k]
  winners = jnp.take_along_axis(scores_TS, order, axis=1)
  return ascending(order.astype(jnp.int32), winners)
