"""Losses of the drafter over its G steps.

Step g of row t predicts token t + 2 + g; the trunk's own distribution of
that token comes from its hidden state of position t + 1 + g. p is the trunk
(detached), q the drafter, both at temperature 1.

    TV        = 1 - sum_v min(p_v, q_v)
    dTV/dz_v  = -q_v ([q_v <= p_v] - S),  S = sum_v q_v [q_v <= p_v]
    L         = 1 - (1/G) sum_j prod_{i<=j} a_i,  a_i = 1 - TV_i
    dL/da_i   = -omega_i = -(1/G) sum_{j>=i} prod_{k<=j, k!=i} a_k

(Bebop, arXiv 2606.12370; spec/model.md section 4.8). omega comes from the
prefix products below i and a suffix recursion above it, so an a_i of 0 is
like any other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm_jax.losses.chunks import head_sum, logits_of, mean
from glm_jax.losses.tokens import nats_sum

CHUNK = 64


def draft_targets(
  tokens: jax.Array, mask: jax.Array, steps: int
) -> tuple[jax.Array, jax.Array]:
  """What each draft step predicts, and the rows that have all targets.

  Args:
    tokens: [B, S] int32.
    mask: [B, S] True for real tokens; padding trails.
    steps: G.

  Returns:
    targets [G, B * S] int32 and a mask [B * S], True where the row's own
    token, the next and all G targets are real.
  """
  S = tokens.shape[1]
  ahead = lambda x, n: jnp.pad(x, ((0, 0), (0, n)))[:, n : n + S]
  targets = jnp.stack([ahead(tokens, 2 + g) for g in range(steps)])
  live = mask.astype(bool)
  for n in range(1, steps + 2):
    live = live & ahead(mask.astype(bool), n)
  return targets.reshape(steps, -1), live.reshape(-1)


def mtp_cross_entropy(
  hidden: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  mask: jax.Array,
  chunk: int = CHUNK,
) -> jax.Array:
  """Cross-entropy of the drafter, the mean over its steps.

  Args:
    hidden: [G, T, D] post-norm hidden states of each step.
    head: [V, D].
    targets: [G, T] int32 (`draft_targets`).
    mask: [T] True for rows that have all targets, or float weights.
    chunk: tokens whose G * V logits exist at once.

  Returns:
    Nats a prediction, a float32 scalar.
  """
  steps = len(hidden)
  weights = mask.astype(jnp.promote_types(hidden.dtype, jnp.float32))
  hidden = jnp.where(weights[:, None, None] > 0, hidden.swapaxes(0, 1), 0)
  each = jnp.broadcast_to(weights[:, None], targets.shape[::-1])
  rows = (targets.swapaxes(0, 1), each)
  total = head_sum(nats_sum, chunk, hidden, head, (), rows)
  return mean(total, steps * jnp.sum(weights))


@jax.custom_vjp
def total_variation(p_logits: jax.Array, q_logits: jax.Array) -> jax.Array:
  """Total variation between two distributions over the vocabulary.

  Args:
    p_logits: [..., V] of the target; detached. -inf excludes a token.
    q_logits: [..., V] of the draft.

  Returns:
    [...] float32, between 0 and 1: 1 - the rate at which rejection sampling
    accepts. Computed as half the summed difference, exactly 0 for p = q.
  """
  p, q = _softmax(p_logits), _softmax(q_logits)
  return jnp.sum(jnp.abs(p - q), axis=-1) / 2


def _tv_forward(p_logits, q_logits):
  return total_variation(p_logits, q_logits), (p_logits, q_logits)


def _tv_backward(saved, cotangent):
  p, q = map(_softmax, saved)
  below = q <= p
  total = lambda mask: jnp.sum(jnp.where(mask, q, 0), axis=-1, keepdims=True)
  # S - 1 summed over what it lacks: the gradient at p = q is 0, not almost.
  slope = jnp.where(below, -total(~below), total(below))
  d_q = cotangent[..., None] * q * slope
  return None, d_q.astype(saved[1].dtype)


total_variation.defvjp(_tv_forward, _tv_backward)


@jax.custom_vjp
def _rejected(rates: jax.Array) -> jax.Array:
  """1 - the mean over steps of prefix products; rates [G, ...] to [...]."""
  return 1 - jnp.mean(jnp.cumprod(rates, axis=0), axis=0)


def _rejected_forward(rates):
  return _rejected(rates), rates


def _rejected_backward(rates, cotangent):
  steps = len(rates)
  before = [jnp.ones_like(cotangent)]  # prod of the rates below each step
  after = [jnp.ones_like(cotangent)]  # sum over j of prod of i < k <= j
  for i in range(steps - 1):
    before.append(before[-1] * rates[i])
    after.append(1 + rates[steps - 1 - i] * after[-1])
  omega = jnp.stack(before) * jnp.stack(after[::-1]) / steps
  return (-omega * cotangent,)


_rejected.defvjp(_rejected_forward, _rejected_backward)


def end_to_end_tv(
  p_logits: jax.Array, q_logits: jax.Array, mask: jax.Array
) -> jax.Array:
  """One minus the mean accepted share of G drafts; small vocabularies.

  Args:
    p_logits: [G, T, V] of the trunk; detached.
    q_logits: [G, T, V] of the drafter.
    mask: [T] True for rows that have all targets, or float weights.

  Returns:
    The mean over rows that count, a float32 scalar; total variation for
    G = 1. The expected number of accepted drafts is G * (1 - loss).
  """
  weights = mask.astype(jnp.promote_types(q_logits.dtype, jnp.float32))
  live = (weights > 0)[None, :, None]
  p_logits = jax.lax.stop_gradient(jnp.where(live, p_logits, 0))
  q_logits = jnp.where(live, q_logits, 0)
  rows = _rejected(1 - total_variation(p_logits, q_logits))
  return mean(jnp.sum(rows * weights), jnp.sum(weights))


def end_to_end_tv_from_hidden(
  p_hidden: jax.Array,
  q_hidden: jax.Array,
  head: jax.Array,
  mask: jax.Array,
  *,
  p_head: jax.Array | None = None,
  chunk: int = CHUNK,
) -> jax.Array:
  """`end_to_end_tv` from hidden states; [G, T, V] never exists.

  Args:
    p_hidden: [T + G, D] the trunk's post-norm hidden states by position
      (step g of row t is judged by row t + 1 + g), or [G, T, D] already
      aligned; detached.
    q_hidden: [G, T, D] the drafter's post-norm hidden states.
    head: [V, D] of the drafter; its gradient comes from q only.
    mask: [T] True for rows that have all targets, or float weights.
    p_head: [V, D] of the trunk, None for `head`; detached.
    chunk: tokens whose 2 * G * V logits exist at once.

  Returns:
    The loss, a float32 scalar.

  Raises:
    ValueError: `p_hidden` has neither shape.
  """
  G, T, D = q_hidden.shape
  step, row = jnp.arange(G)[None], jnp.arange(T)[:, None]
  if p_hidden.shape == (T + G, D):
    at = row + 1 + step
  elif p_hidden.shape == (G, T, D):
    p_hidden, at = p_hidden.reshape(G * T, D), step * T + row
  else:
    raise ValueError(f'{p_hidden.shape=} must be {(T + G, D)} or {(G, T, D)}')
  weights = mask.astype(jnp.promote_types(q_hidden.dtype, jnp.float32))
  q_hidden = q_hidden.swapaxes(0, 1)
  q_hidden = jnp.where(weights[:, None, None] > 0, q_hidden, 0)
  shared = (p_hidden, head if p_head is None else p_head)
  shared = jax.lax.stop_gradient(jax.tree.map(jnp.asarray, shared))
  total = head_sum(_rejected_sum, chunk, q_hidden, head, shared, (at, weights))
  return mean(total, jnp.sum(weights))


def _rejected_sum(q_logits, shared, at, weights):
  """Weighted sum of a chunk; q_logits [chunk, G, V], at [chunk, G]."""
  p_hidden, p_head = shared
  p_logits = logits_of(p_hidden[at], p_head)
  p_logits = jnp.where(weights[:, None, None] > 0, p_logits, 0)
  rates = 1 - total_variation(p_logits, q_logits)
  return jnp.sum(_rejected(rates.swapaxes(0, 1)) * weights)


def _softmax(logits):
  wide = jnp.promote_types(logits.dtype, jnp.float32)
  return jax.nn.softmax(logits.astype(wide), axis=-1)
