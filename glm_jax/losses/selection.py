"""Losses of the indexer: what attention looks at, and what it was shown.

A full layer's indexer learns to rank keys as attention weighs them
(spec/model.md section 3.1):

    target[t, s] = sum_n softmax_s(attention logits)[t, n, s] / N     detached
    loss         = mean_t KL(target[t] || softmax_s(index score[t, s]))

over the selected keys in the sparse stage, over all visible keys of a small
context in the warm-up. Under IndexShare one indexer serves several layers,
and the mean of their targets stands for all of them: the gradient,
softmax(score) - target, is linear in the target, so it equals the mean of
the gradients of one KL a layer (IndexCache, arXiv 2603.12201). Each full
layer thus counts once, with weight 1, however many layers it serves.

Memory law: gathered rows and keys exist for one block of rows at a time,
[T, S] and [T, heads, k] never; backward passes compute them again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from glm_jax.losses.chunks import join_rows, mean, split_rows
from pallas_kernels.indexer_scores.reference import relu
from pallas_kernels.streaming_topk.xla import rows_per_block
from pallas_kernels.tiling import dot, map_row_blocks, within_pool
from pallas_kernels.topk_gather_attention import BLOCK_BYTES
from pallas_kernels.topk_gather_attention.backward import (
  accumulate_row_blocks,
  probabilities,
)

DENSE_CHUNK = 64


def attention_target(
  q: jax.Array,
  rows: jax.Array,
  slots: jax.Array,
  *,
  scale: float,
  latent_width: int,
  row_scales: jax.Array | None = None,
  block_bytes: int = BLOCK_BYTES,
) -> jax.Array:
  """The share of attention that each selected key gets, over all heads.

  Args:
    q: [T, N, R + P] absorbed queries of one layer.
    rows: [M, W] pool of cached rows, as in `topk_gather_attention`.
    slots: [T, k] int32 row ids in the pool, -1 for none.
    scale: the attention's softmax scale.
    latent_width: R.
    row_scales: [M, G] float32 for uint8 records, else None.
    block_bytes: bytes of gathered rows and logits at once.

  Returns:
    [T, k] float32, detached: rows sum to 1, or are 0 without a valid slot.
  """
  q, rows, row_scales = lax.stop_gradient((q, rows, row_scales))
  T, N, _ = q.shape
  slots = within_pool(slots, rows.shape[0], 'slot')

  def share(q, slots):
    p, _, _ = probabilities(
      q, rows, row_scales, slots, scale=scale, latent_width=latent_width
    )
    return _normalise(jnp.sum(p, axis=1))

  feature = rows.dtype.itemsize if row_scales is None else 1 + 4 + 2
  row_bytes = slots.shape[1] * (rows.shape[1] * feature + 8 * N)
  block = rows_per_block(row_bytes, block_bytes, T)
  return map_row_blocks(share, block, q, slots)


def attention_target_dense(
  q: jax.Array, rows: jax.Array, visible: jax.Array, *, scale: float
) -> jax.Array:
  """The share of attention of every visible key, for one chunk of rows.

  Args:
    q: [T, N, R + P] absorbed queries; T is a chunk, [T, N, S] logits exist.
    rows: [S, W] cached rows of one sequence, W of at least R + P. Rows that
      nobody sees may hold anything.
    visible: [T, S] True where row t may read key s.
    scale: the attention's softmax scale.

  Returns:
    [T, S] float32, detached: rows sum to 1, or are 0 where nothing is seen.
  """
  q, rows = lax.stop_gradient((q, rows))
  rows = jnp.where(jnp.any(visible, axis=0)[:, None], rows, 0)
  logits = dot('tnd,sd->tns', q, rows[:, : q.shape[-1]]) * scale
  logits = jnp.where(visible[:, None], logits, -jnp.inf)
  top = jnp.max(logits, axis=-1, keepdims=True)
  p = jnp.exp(logits - jnp.where(top > -jnp.inf, top, 0))
  total = jnp.sum(p, axis=-1, keepdims=True)
  return _normalise(jnp.sum(p / jnp.where(total > 0, total, 1), axis=1))


def mean_target(targets: Sequence[jax.Array] | jax.Array) -> jax.Array:
  """The target of an indexer that serves several layers.

  Args:
    targets: [T, k] of each layer served, the full layer's own included, all
      over the same selected keys; a sequence or stacked [J, T, k].

  Returns:
    [T, k] their mean, detached.
  """
  return lax.stop_gradient(sum(targets) / len(targets))


def selected_scores(
  index_q: jax.Array,
  w: jax.Array,
  keys: jax.Array,
  slots: jax.Array,
  *,
  block_bytes: int = BLOCK_BYTES,
) -> jax.Array:
  """Index scores of the selected keys, differentiable.

  Args:
    index_q: [T, I, H] index queries after RoPE.
    w: [T, I] float32 head weights with H^-0.5 I^-0.5 already in.
    keys: [M, H] pool of index keys, f32 or bf16.
    slots: [T, k] int32 ids in that pool (the index layer's offset included),
      -1 for none.
    block_bytes: bytes of gathered keys and products at once.

  Returns:
    [T, k] float32 scores, as `indexer_scores` gives; -inf for no slot. Keys
    that no slot names may hold NaN.
  """
  slots = within_pool(slots, keys.shape[0], 'slot')
  return _selected_scores(block_bytes, index_q, w, keys, slots)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _selected_scores(block_bytes, index_q, w, keys, slots):
  def score(index_q, w, slots):
    _, dots = _index_dots(index_q, keys, slots)
    scores = jnp.sum(relu(dots) * w[:, :, None], axis=1)
    return jnp.where(slots >= 0, scores, -jnp.inf)

  block = _index_block(index_q, keys, slots, block_bytes)
  return map_row_blocks(score, block, index_q, w, slots)


def _index_dots(index_q, keys, slots):
  """Gathered keys [T, k, H], 0 without a slot, and products [T, I, k]."""
  at = jnp.maximum(slots, 0)
  gathered = jnp.take(keys, at, axis=0, mode='clip')
  gathered = jnp.where(slots[:, :, None] >= 0, gathered, 0)
  gathered = gathered.astype(jnp.promote_types(index_q.dtype, jnp.bfloat16))
  return gathered, dot('tih,tkh->tik', index_q, gathered)


def _index_block(index_q, keys, slots, block_bytes):
  heads, width = index_q.shape[1:]
  row_bytes = slots.shape[1] * (width * (keys.dtype.itemsize + 4) + 8 * heads)
  return rows_per_block(row_bytes, block_bytes, len(slots))


def _scores_forward(block_bytes, *args):
  return _selected_scores(block_bytes, *args), args


def _scores_backward(block_bytes, saved, cotangent):
  index_q, w, keys, slots = saved
  M = keys.shape[0]
  wide = jnp.promote_types(keys.dtype, jnp.float32)

  def backward(d_keys, index_q, w, slots, cotangent):
    gathered, dots = _index_dots(index_q, keys, slots)
    cotangent = jnp.where(slots >= 0, cotangent, 0)[:, None]
    d_w = jnp.sum(cotangent * relu(dots), axis=2)
    d_dots = jnp.where(dots > 0, cotangent * w[:, :, None], 0)
    d_dots = d_dots.astype(gathered.dtype)
    d_q = dot('tik,tkh->tih', d_dots, gathered)
    d_gathered = dot('tik,tih->tkh', d_dots, index_q).astype(wide)
    at = jnp.where(slots >= 0, slots, M)
    return d_keys.at[at].add(d_gathered, mode='drop'), (d_q, d_w)

  block = _index_block(index_q, keys, slots, block_bytes)
  d_keys, (d_q, d_w) = accumulate_row_blocks(
    backward,
    block,
    jnp.zeros(keys.shape, wide),
    (index_q, w, slots, cotangent),
    (0, 0, -1, 0),
  )
  return (
    d_q.astype(index_q.dtype),
    d_w.astype(w.dtype),
    d_keys.astype(keys.dtype),
    None,
  )


_selected_scores.defvjp(_scores_forward, _scores_backward)


def indexer_kl(
  target: jax.Array, scores: jax.Array, mask: jax.Array
) -> jax.Array:
  """KL(target || softmax(scores)) over the keys that count.

  Args:
    target: [T, k] attention shares, one layer's or `mean_target`'s;
      detached, and normalised over the mask.
    scores: [T, k] index scores; anything where the mask is False.
    mask: [T, k] True for valid slots of rows that count.

  Returns:
    The mean over live rows (some key counts and has a share), a float32
    scalar.
  """
  total, live = _kl_rows(target, scores, mask)
  return mean(jnp.sum(total), jnp.sum(live))


def indexer_kl_dense(
  layers: Sequence[tuple[jax.Array, jax.Array]],
  index_q: jax.Array,
  w: jax.Array,
  index_keys: jax.Array,
  pos: jax.Array,
  *,
  scale: float,
  first: jax.Array | int = 0,
  chunk: int = DENSE_CHUNK,
) -> jax.Array:
  """The warm-up loss: all visible keys.

  Args:
    layers: (q [B, T, N, R + P], rows [B, S, W]) of each layer that the
      indexer serves, its own included; their mean target; detached.
    index_q: [B, T, I, H] index queries after RoPE.
    w: [B, T, I] float32 head weights with H^-0.5 I^-0.5 already in.
    index_keys: [B, S, H] key of each position.
    pos: [B, T] int32 position of each row, -1 for rows that do not count.
    scale: the attention's softmax scale.
    first: lowest visible position, of all rows or of each [B, T].
    chunk: rows of a sequence whose [heads, S] logits exist at once; the
      backward pass computes them again.

  Returns:
    The mean over live rows of all sequences, a float32 scalar.
  """
  total, live = indexer_kl_dense_rows(
    layers, index_q, w, index_keys, pos, scale=scale, first=first, chunk=chunk
  )
  return mean(jnp.sum(total), jnp.sum(live))


def indexer_kl_dense_rows(
  layers: Sequence[tuple[jax.Array, jax.Array]],
  index_q: jax.Array,
  w: jax.Array,
  index_keys: jax.Array,
  pos: jax.Array,
  *,
  scale: float,
  first: jax.Array | int = 0,
  chunk: int = DENSE_CHUNK,
) -> tuple[jax.Array, jax.Array]:
  """`indexer_kl_dense` before the mean: KL and liveness of each row [B, T]."""
  layers = lax.stop_gradient(tuple(layers))
  narrow = jnp.promote_types(index_q.dtype, jnp.bfloat16)
  # Wide outside the loop, so that chunks add their gradients in float32.
  wide = jnp.promote_types(index_keys.dtype, jnp.float32)
  first = jnp.broadcast_to(jnp.asarray(first, jnp.int32), pos.shape)

  def sequence(layers, index_q, w, keys, pos, first):
    qs, caches = zip(*layers)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk_kl(qs, index_q, w, pos, first, keys):
      at = jnp.arange(len(keys))[None]
      visible = (at >= first[:, None]) & (at <= pos[:, None])
      target = mean_target(
        [
          attention_target_dense(q, rows, visible, scale=scale)
          for q, rows in zip(qs, caches)
        ]
      )
      seen = jnp.any(visible, axis=0)[:, None]
      keys = jnp.where(seen, keys, 0).astype(narrow)
      dots = dot('tih,sh->tis', index_q, keys)
      scores = jnp.sum(relu(dots) * w[:, :, None], axis=1)
      return _kl_rows(target, scores, visible)

    parts = jax.tree.map(lambda x: split_rows(x, chunk), (qs, index_q, w))
    parts = (*parts, split_rows(pos, chunk, -1), split_rows(first, chunk))
    rows = lax.map(lambda part: chunk_kl(*part, keys), parts)
    return jax.tree.map(lambda x: join_rows(x, len(pos)), rows)

  return jax.vmap(sequence)(
    layers, index_q, w, index_keys.astype(wide), pos, first
  )


def _normalise(shares):
  total = jnp.sum(shares, axis=-1, keepdims=True)
  return shares / jnp.where(total > 0, total, 1)


def _kl_rows(target, scores, mask):
  """KL of each row and which rows are live, both [T] in the score's dtype."""
  wide = jnp.promote_types(scores.dtype, jnp.float32)
  target = lax.stop_gradient(jnp.where(mask, target, 0)).astype(wide)
  live = jnp.sum(target, axis=-1) > 0
  target = _normalise(target)
  # Masked scores leave before exp: -inf would make NaN on the way back.
  scores = jnp.where(mask, scores.astype(wide), 0)
  top = lax.stop_gradient(
    jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=-jnp.inf)
  )
  scores = scores - jnp.where(top > -jnp.inf, top, 0)
  exp = jnp.where(mask, jnp.exp(jnp.where(mask, scores, 0)), 0)
  total = jnp.sum(exp, axis=-1, keepdims=True)
  log_p = scores - jnp.log(jnp.where(total > 0, total, 1))
  log_target = jnp.log(jnp.where(target > 0, target, 1))
  each = jnp.where(target > 0, target * (log_target - log_p), 0)
  return jnp.sum(each, axis=-1), live.astype(wide)
