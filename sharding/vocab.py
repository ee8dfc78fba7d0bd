"""Head and sampling with the vocabulary split over every device.

Logits come out of a reduce-scatter, so each device holds [T, V / devices]
and they are never gathered: temperature, softmax, noise and the draw are
elementwise or reductions, which XLA's partitioner splits by itself, and the
cuts of sampling, a sort on one device, are threshold searches here. The same
holds for training's total-variation loss (`glm_jax.losses.drafts`): it is a
softmax and sums over the vocabulary, and stays split as the head is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from glm_jax.sampling import SamplingParams
from pallas_kernels.streaming_topk.sharded import kth_largest, order_key
from pallas_kernels.tiling import dot
from sharding.collectives import rank_index
from sharding.mesh import ways


def vocab_axes(plan, size: int) -> tuple[str, ...]:
  """Mesh axes over which logits of `size` tokens are split."""
  outer, inner = plan.axes('vocab'), plan.axes('embed')
  finer = outer + inner
  return finer if size % ways(plan.mesh, finer) == 0 else outer


def logits(plan, weight: jax.Array, hidden: jax.Array) -> jax.Array:
  """Logits [T, V] float32 of hidden [T, D]; weight [V, D].

  A step whose rows are split over the same axes as the head's inputs sends
  the rows to all of them: a head is applied to few rows.
  """
  spec = plan.rules.spec(('vocab', 'embed'), weight.shape, plan.mesh)
  inner, out = plan.axes('embed'), vocab_axes(plan, weight.shape[0])

  def body(weight, hidden):
    part = dot('td,vd->tv', hidden, weight)
    if not inner:
      return part
    if len(out) > len(plan.axes('vocab')):
      return lax.psum_scatter(part, inner, scatter_dimension=1, tiled=True)
    return lax.psum(part, inner)

  run = plan.shard_map(body, (spec, P(None, inner or None)), P(None, out))
  return run(weight, hidden)


def filtered_logits(
  plan, logits: jax.Array, params: SamplingParams
) -> jax.Array:
  """`glm_jax.sampling.filtered_logits` without a sort and without a gather.

  Args:
    plan: of several devices.
    logits: [B, V] float32, split over the vocabulary.
    params: one entry a row.

  Returns:
    [B, V] float32, -inf where a token may not be drawn, split likewise. What
    top_p keeps can differ from one device's where a sum of probabilities
    comes within rounding of it.
  """
  axes = vocab_axes(plan, logits.shape[1])
  split = P(None, axes or None)
  run = plan.shard_map(
    lambda logits, params: _filter(logits, params, axes), (split, P()), split
  )
  return run(logits, params)


def _filter(logits, params, axes):
  greedy = params.temperature <= 0
  scaled = logits / jnp.where(greedy, 1, params.temperature)[:, None]
  cuts = greedy | (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
  cut = lambda: _cut(scaled, greedy, params, axes)
  return lax.cond(jnp.any(cuts), cut, lambda: scaled)


def _cut(scaled, greedy, params, axes):
  add = lambda x: lax.psum(x, axes) if axes else x
  most = lambda x: lax.pmax(x, axes) if axes else x
  V = add(scaled.shape[1])
  ids = rank_index(axes) * scaled.shape[1] + jnp.arange(scaled.shape[1])
  ids = jnp.broadcast_to(ids.astype(jnp.uint32), scaled.shape)
  keys = order_key(jnp.where(scaled == 0, 0, scaled))
  k = jnp.where(greedy, 1, params.top_k)
  k = jnp.where(k == 0, V, k).astype(jnp.int32)
  keep = _largest(keys, ids, jnp.ones_like(scaled, bool), k, axes)
  top = most(jnp.max(scaled, axis=1))
  weight = jnp.where(keep, jnp.exp(scaled - top[:, None]), 0)
  p = weight / add(jnp.sum(weight, axis=1))[:, None]
  keep &= p >= params.min_p[:, None] * most(jnp.max(p, axis=1))[:, None]
  p = jnp.where(keep, p, 0)
  nucleus = lambda: keep & _nucleus(keys, ids, p, params.top_p, axes)
  keep = lax.cond(jnp.any(params.top_p < 1), nucleus, lambda: keep)
  return jnp.where(keep, scaled, -jnp.inf)


def _largest(keys, ids, live, k, axes):
  """The k largest live keys of each row; ties go to the lowest ids."""
  threshold, places, _ = kth_largest(keys, live, k, axes)
  tied = live & (keys == threshold[:, None])
  last, _, _ = kth_largest(~ids, tied, places, axes)
  tied &= ~ids >= last[:, None]
  return live & (keys > threshold[:, None]) | tied


def _nucleus(keys, ids, p, top_p, axes):
  """The likeliest tokens whose predecessors' mass is below top_p."""
  add = lambda x: lax.psum(x, axes) if axes else x
  above = lambda key: add(jnp.sum(jnp.where(keys > key[:, None], p, 0), axis=1))

  def bit(i, low):
    """`low` has too much mass above it, or is 0; finds the largest such."""
    tried = low | jnp.uint32(1) << (31 - i).astype(jnp.uint32)
    return jnp.where(above(tried) >= top_p, tried, low)

  low = lax.fori_loop(0, 32, bit, jnp.zeros(len(p), jnp.uint32))
  enough = above(jnp.zeros_like(low)) >= top_p
  # The smallest key whose predecessors leave room; equal keys share it.
  edge = jnp.where(enough, low + 1, 0)
  most = lambda x: lax.pmin(x, axes) if axes else x
  far = jnp.uint32(2**32 - 1)
  last = most(jnp.min(jnp.where(keys >= edge[:, None], keys, far), axis=1))
  tied = keys == last[:, None]
  mass = add(jnp.sum(jnp.where(tied, p, 0), axis=1))
  count = add(jnp.sum(tied & (p > 0), axis=1, dtype=jnp.int32))
  each = jnp.where(count > 0, mass / jnp.maximum(count, 1), 1)
  room = jnp.ceil((top_p - above(last)) / jnp.maximum(each, 1e-38))
  room = jnp.where(top_p >= 1, 2**30, jnp.clip(room, 0, 2**30))
  kept = _largest(keys, ids, tied & (p > 0), room.astype(jnp.int32), axes)
  return (keys > last[:, None]) | kept | (top_p >= 1)[:, None]
