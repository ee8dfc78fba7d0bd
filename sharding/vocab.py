"""Head and sampling with the vocabulary split over every device.

Logits come out of a reduce-scatter, so each device holds [T, V / devices]
and they are never gathered: temperature, softmax, noise and the draw are
elementwise or reductions, which XLA's partitioner splits by itself, and the
cuts of sampling are threshold searches, which add counts over the mesh. The
same holds for training's total-variation loss (`glm_jax.losses.drafts`): it
is a softmax and sums over the vocabulary, and stays split as the head is.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from glm_jax import sampling
from glm_jax.sampling import SamplingParams
from pallas_kernels.tiling import dot
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
  """`glm_jax.sampling.filtered_logits` without a gather.

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
  body = functools.partial(sampling.filtered_logits, axes=axes)
  return plan.shard_map(body, (split, P()), split)(logits, params)
