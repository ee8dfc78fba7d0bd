"""The indexer's loss over windows: its rows, its targets, its scores.

Every `kl_stride`-th row has one (spec/model.md section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from glm_jax import losses
from glm_jax.training.windows import pool_slots, strided, visible_slots


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
  """Keys of the rows with an indexer loss, [B, S / stride, k]."""
  stride, offset = step.options.kl_stride, step.offset
  if step.options.sparse:
    return selection.strided(stride, offset).as_slots(k)
  some = lambda a: strided(a, stride, offset)
  return visible_slots(jax.tree.map(some, step.keys.queries), step.keys)


def index_loss(
  index: tuple, selection, k: int, targets: Sequence, step
) -> jax.Array:
  """KL of a full layer's scores to the mean of the layers it serves."""
  o = step.options
  q, w, keys = index
  slots = loss_slots(selection, k, step)
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
