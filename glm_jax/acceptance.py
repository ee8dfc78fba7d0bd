"""Which drafted tokens stand: pure functions over arrays.

Rejection sampling (spec/model.md section 4.7): a draft y, drawn from q, is
accepted with probability min(1, p(y) / q(y)); the first rejected position is
drawn from the residual max(p - q, 0); when all are accepted, a bonus token
is drawn from p. The tokens then follow p exactly, whatever q is. Two rules
are special cases: a greedy draft is a one-hot q (accepted with probability
p(y)), and temperature 0 is a one-hot p (accepted where it is the argmax).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm_jax.sampling import Purpose, noise_key


class Verdict(NamedTuple):
  """The outcome of one round for one sequence.

  Attributes:
    accepted: scalar int32, drafts that stand.
    token: scalar int32, the token after them: residual or bonus.
  """

  accepted: jax.Array
  token: jax.Array


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
  """The distribution of a rejected position, [..., V].

  Args:
    p: [..., V] target probabilities.
    q: [..., V] draft probabilities.

  Returns:
    max(p - q, 0), normalised; p itself where nothing is left.
  """
  left = jnp.maximum(p - q, 0)
  total = jnp.sum(left, axis=-1, keepdims=True)
  return jnp.where(total > 0, left / jnp.where(total > 0, total, 1), p)


def accept_probability(p: jax.Array, q: jax.Array) -> jax.Array:
  """min(1, p / q) of drafted tokens; 0 where p is 0, 1 where q is 0 < p."""
  safe = jnp.where(q > 0, q, 1)
  return jnp.where(q > 0, jnp.minimum(p / safe, 1), (p > 0).astype(p.dtype))


def accept_length_bound(p: jax.Array, q: jax.Array) -> jax.Array:
  """Acceptance probability of a draw from q: sum of min(p, q) = 1 - TV."""
  return jnp.sum(jnp.minimum(p, q), axis=-1)


def judge(
  p: jax.Array,
  q: jax.Array,
  drafts: jax.Array,
  count: jax.Array,
  position: jax.Array,
  seed: jax.Array,
) -> Verdict:
  """Accepts or rejects the drafts of one sequence.

  Args:
    p: [K + 1, V] target probabilities after each of the K + 1 rows.
    q: [K, V] probabilities that the drafts were drawn from.
    drafts: [K] int32 drafted tokens.
    count: scalar int32, drafts that exist (at most K).
    position: scalar int32 absolute position of the first draft.
    seed: scalar uint32 request seed.

  Returns:
    The verdict.
  """
  K = drafts.shape[0]
  steps = jnp.arange(K)

  def coin(position):
    key = noise_key(seed, position, Purpose.ACCEPT)
    return jax.random.uniform(key, (), jnp.float32)

  u = jax.vmap(coin)(position + steps)
  p_draft = jnp.take_along_axis(p[:K], drafts[:, None], axis=-1)[:, 0]
  q_draft = jnp.take_along_axis(q, drafts[:, None], axis=-1)[:, 0]
  stands = (u * q_draft < p_draft) & (steps < count)
  accepted = jnp.sum(jnp.cumprod(stands.astype(jnp.int32)))
  # q is 0 past the last draft: the residual of the bonus position is p.
  padded = jnp.concatenate([q, jnp.zeros_like(p[:1])])
  q_here = jnp.where(accepted < count, padded[accepted], 0)
  final = residual(p[accepted], q_here)
  bonus = accepted >= count
  where = position + accepted
  keys = (
    noise_key(seed, where, Purpose.SAMPLE),
    noise_key(seed, where, Purpose.RESIDUAL),
  )
  noise = [jax.random.gumbel(k, final.shape, jnp.float32) for k in keys]
  noise = jnp.where(bonus, noise[0], noise[1])
  token = jnp.argmax(jnp.log(final) + noise).astype(jnp.int32)
  return Verdict(accepted.astype(jnp.int32), token)


def next_draft_count(
  count: jax.Array, accepted: jax.Array, most: int
) -> jax.Array:
  """Adaptive number of drafts of the next round, 1 to `most`.

  It depends on finished rounds alone, never on a token it leads to, so the
  tokens keep their distribution.

  Args:
    count: [B] int32 drafts of the finished round.
    accepted: [B] int32 of them accepted.
    most: upper bound.

  Returns:
    [B] int32: two more after a full round, else one more than stood.
  """
  grown = jnp.where(accepted >= count, count + 2, accepted + 1)
  return jnp.clip(grown, 1, most)
