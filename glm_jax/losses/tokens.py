"""Cross-entropy of tokens, from hidden states and the head."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm_jax.losses.chunks import head_sum, mean

CHUNK = 512


def cross_entropy(
  hidden: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  mask: jax.Array,
  chunk: int = CHUNK,
) -> jax.Array:
  """Mean negative log-likelihood of the targets.

  Args:
    hidden: [T, D] post-norm hidden states; row t predicts targets[t].
    head: [V, D].
    targets: [T] int32; anything where the mask is 0.
    mask: [T] bool, or float weights of at least 0.
    chunk: tokens whose [V] logits exist at once, forwards and backwards.

  Returns:
    Nats a token, a float32 scalar; 0 when nothing counts.
  """
  weights = mask.astype(jnp.promote_types(hidden.dtype, jnp.float32))
  hidden = jnp.where(weights[:, None] > 0, hidden, 0)
  total = head_sum(nats_sum, chunk, hidden, head, (), (targets, weights))
  return mean(total, jnp.sum(weights))


def nats_sum(logits, shared, targets, weights):
  """Weighted sum of nats of a chunk; logits [chunk, ..., V]."""
  del shared
  # A comparison, not a gather: it works on a vocabulary that is sharded.
  hit = jnp.arange(logits.shape[-1]) == targets[..., None]
  picked = jnp.sum(jnp.where(hit, logits, 0), axis=-1)
  nats = jax.nn.logsumexp(logits, axis=-1) - picked
  return jnp.sum(nats * weights)
