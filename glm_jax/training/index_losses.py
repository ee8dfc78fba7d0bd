"""The indexer's loss over windows: its rows, its targets, its scores.

Every `kl_stride`-th row has one (spec/model.md section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from glm_jax import losses
from glm_jax.losses.chunks import mean
from glm_jax.training.windows import pool_slots, strided


def attention_targets(q, rows, slots, c, o) -> jax.Array:
  """Attention shares [T', k] at the rows with an indexer loss."""

  def shares(queries, rows):
    q, slots = queries
    out = losses.attention_target(
      q.reshape(-1, *q.shape[2:]),
      rows.reshape(-1, rows.shape[-1]),
      pool_slots(slots, rows.shape[1]),
      scale=c.scale,
      latent_width=c.kv_lora_rank,
      block_bytes=o.block_bytes,
    )
    return out.reshape(slots.shape)

  out = o.plan.by_query(shares, (q, slots), rows)
  return out.reshape(-1, out.shape[-1])


def loss_slots(selection, k: int, step) -> jax.Array:
  """Selected keys of the rows with an indexer loss, [B, S / stride, k]."""
  return selection.strided(step.options.kl_stride, step.offset).as_slots(k)


def index_loss(
  index: tuple, selection, block, targets: Sequence, step
) -> jax.Array:
  """KL of a full layer's scores to the mean of the layers it serves.

  Args:
    index: (queries, weights, keys) of the full layer's indexer.
    selection: in force; None in the dense pass.
    block: the full layer.
    targets: of each layer served: attention shares [T', k], or in the dense
      pass (absorbed queries [B, R, N, latent + P], rows [B, S, ...]).
    step: what all layers share.

  Returns:
    The mean over rows with a loss, a float32 scalar.
  """
  if not step.options.sparse:
    return _dense_loss(index, block.attention.config.scale, targets, step)
  o = step.options
  q, w, keys = index
  slots = loss_slots(selection, block.topk, step)
  some = lambda a: strided(a, o.kl_stride, step.offset)

  def score(queries, keys):
    q, w, slots = queries
    flat = lambda a: a.reshape(-1, *a.shape[2:])
    ids = pool_slots(slots, keys.shape[1])
    out = losses.selected_scores(
      flat(q), flat(w), flat(keys), ids, block_bytes=o.block_bytes
    )
    return out.reshape(slots.shape)

  scores = o.plan.by_query(score, (some(q), some(w), slots), keys)
  flat = lambda a: a.reshape(-1, a.shape[-1])
  return losses.indexer_kl(
    losses.mean_target(targets), flat(scores), flat(slots) >= 0
  )


def _dense_loss(index, scale, targets, step) -> jax.Array:
  """The warm-up: all keys of the row's own segment, up to itself."""
  o, keys = step.options, step.keys
  q, w, index_keys = index
  some = lambda a: strided(a, o.kl_stride, step.offset)
  queries = jax.tree.map(some, keys.queries)
  live = queries.segment > 0
  pos = jnp.where(live, queries.index, -1)
  start = jnp.maximum(queries.index - some(keys.position) + keys.first, 0)

  def rows(queries, keys):
    layers, q, w, pos, start = queries
    caches, index_keys = keys
    return losses.indexer_kl_dense_rows(
      list(zip(layers, caches)),
      q,
      w,
      index_keys,
      pos,
      scale=scale,
      first=start,
    )

  layers, caches = zip(*targets)
  total, live = o.plan.by_query(
    rows, (layers, some(q), some(w), pos, start), (caches, index_keys)
  )
  return mean(jnp.sum(total), jnp.sum(live))
