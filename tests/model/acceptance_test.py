"""Acceptance is lossless: pure functions against exact distributions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm_jax.acceptance import (
  accept_length_bound,
  accept_probability,
  judge,
  next_draft_count,
  residual,
)
from glm_jax.decoding import DecodeState
from glm_jax.drafting import Drafts
from glm_jax.plan import LocalPlan
from glm_jax.sampling import filtered_logits, sampling_params
from glm_jax.speculative import accept

DRAWS = 200_000
# A chi-square statistic with d degrees of freedom exceeds d + 8 sqrt(2 d)
# + 12 with probability below 1e-7 (Laurent-Massart: P(X >= d + 2 sqrt(d x)
# + 2 x) <= exp(-x), x = 16). Seeds are fixed, so a test never flickers.
X = 16.0


def chi_square_limit(cells):
  d = cells - 1
  return d + 2 * np.sqrt(d * X) + 2 * X


def chi_square(counts, probabilities):
  live = probabilities > 0
  assert counts[~live].sum() == 0, 'an impossible outcome was drawn'
  expected = counts.sum() * probabilities[live]
  return ((counts[live] - expected) ** 2 / expected).sum(), live.sum()


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return (e / e.sum(-1, keepdims=True)).astype(np.float32)


def distributions(kind, rng, shape):
  p = softmax(rng.normal(size=shape) * 2)
  if kind == 'close':
    return p, softmax(np.log(p) + 0.3 * rng.normal(size=shape))
  if kind == 'far':
    return p, softmax(rng.normal(size=shape) * 2)
  if kind == 'equal':
    return p, p
  if kind == 'cut':  # top-p removed some of the draft's tokens
    p = np.where(p < np.median(p, -1, keepdims=True), 0, p)
    return p / p.sum(-1, keepdims=True), softmax(rng.normal(size=shape))
  q = np.eye(shape[-1], dtype=np.float32)[np.argmax(p, -1)]
  return p, q  # greedy draft: one-hot q


@jax.jit
def many_verdicts(p, q, seeds):
  """Drafts drawn from q, then judged, for each seed."""

  def one(seed):
    key = jax.random.fold_in(jax.random.key(12345), seed)
    drafts = jax.random.categorical(key, jnp.log(q), axis=-1)
    verdict = judge(
      p, q, drafts.astype(jnp.int32), jnp.int32(len(q)), jnp.int32(9), seed
    )
    tokens = jnp.append(drafts, 0).at[verdict.accepted].set(verdict.token)
    return tokens, verdict.accepted

  return jax.vmap(one)(seeds)


class AcceptanceTest(parameterized.TestCase):
  @parameterized.parameters('close', 'far', 'equal', 'cut', 'greedy')
  def test_tokens_follow_p_and_acceptance_is_one_minus_tv(self, kind):
    rng = np.random.default_rng(0)
    p, q = distributions(kind, rng, (3, 7))
    q = q[:2]
    seeds = jnp.arange(DRAWS, dtype=jnp.uint32)
    tokens, accepted = map(np.asarray, many_verdicts(p, q, seeds))
    for place in range(3):
      # The token at `place` is final for those that got that far; what they
      # drew before is independent of it here, since p has no memory.
      reached = accepted >= place
      counts = np.bincount(tokens[reached, place], minlength=7)
      statistic, cells = chi_square(counts, p[place])
      assert statistic < chi_square_limit(max(cells, 2)), (place, statistic)
    alpha = np.asarray(accept_length_bound(p[:2], q))
    rate = (accepted >= 1).mean()
    # Five standard errors of a Bernoulli mean.
    assert abs(rate - alpha[0]) <= 5 * np.sqrt(0.25 / DRAWS) + 1e-6
    both = (accepted >= 2).mean()
    assert abs(both - alpha[0] * alpha[1]) <= 5 * np.sqrt(0.25 / DRAWS) + 1e-6

  def test_greedy_draft_is_accepted_with_its_own_probability(self):
    p, q = distributions('greedy', np.random.default_rng(1), (2, 7))
    alpha = accept_length_bound(p[:1], q[:1])
    np.testing.assert_allclose(alpha[0], p[0].max(), rtol=1e-6)

  def test_exact_greedy_accepts_the_argmax_and_nothing_else(self):
    eye = np.eye(5, dtype=np.float32)
    p = eye[[3, 1, 2]]
    for drafts, accepted, token in (
      ([3, 1], 2, 2),
      ([3, 0], 1, 1),
      ([0, 1], 0, 3),
    ):
      for seed in range(50):
        q = eye[drafts]
        verdict = judge(
          p,
          q,
          jnp.asarray(drafts, jnp.int32),
          jnp.int32(2),
          jnp.int32(4),
          jnp.uint32(seed),
        )
        assert (verdict.accepted, verdict.token) == (accepted, token)

  def test_greedy_rounds_are_judged_alike_beside_one_that_draws(self):
    B, K, V = 16, 3, 5
    rng = np.random.default_rng(7)
    tokens = rng.integers(V, size=(B, K)).astype(np.int32)
    count = jnp.asarray(np.arange(B) % (K + 1), jnp.int32)
    logits = rng.normal(size=(B, K + 1, V)).astype(np.float32)
    # Half of the drafts are right, and some maxima are shared.
    right = rng.random((B, K)) < 0.5
    logits[:, :K][right, tokens[right]] = 9
    logits[::3, :, :2] = 9
    q = jnp.asarray(np.eye(V, dtype=np.float32)[tokens])
    drafts = Drafts(jnp.asarray(tokens), q, q, count, jnp.int32(1))

    def judged(temperature):
      state = DecodeState(
        cache=None,
        page_table=jnp.zeros((B, 1), jnp.int32),
        lengths=jnp.arange(B, dtype=jnp.int32) + 4,
        last_token=jnp.zeros(B, jnp.int32),
        limits=jnp.full(B, 100, jnp.int32),
        eos=jnp.full((B, 1), -1, jnp.int32),
        done=jnp.zeros(B, bool),
        params=sampling_params(B, temperature=temperature),
      )
      return accept(state, drafts, jnp.asarray(logits), LocalPlan())

    alone, beside = judged(0.0), judged([0.0] * (B - 1) + [1.0])
    for a, b in zip(alone, beside):
      np.testing.assert_array_equal(a[:-1], b[:-1])
    assert 0 < int(alone[2].sum()) < int(count.sum())  # accepted and rejected

  def test_a_draft_that_top_p_removed_is_never_accepted(self):
    logits = jnp.log(jnp.asarray([[0.6, 0.3, 0.06, 0.04]]))
    params = sampling_params(1, temperature=1.0, top_p=0.8)
    p = jax.nn.softmax(filtered_logits(logits, params), axis=-1)
    np.testing.assert_allclose(p[0], [2 / 3, 1 / 3, 0, 0], rtol=1e-5)
    q = jnp.asarray([[0.0, 0.0, 1.0, 0.0]])
    for seed in range(200):
      verdict = judge(
        jnp.concatenate([p, p]),
        q,
        jnp.asarray([2], jnp.int32),
        jnp.int32(1),
        jnp.int32(0),
        jnp.uint32(seed),
      )
      assert verdict.accepted == 0
      assert verdict.token in (0, 1)

  def test_extreme_inputs_are_safe(self):
    zero, one = jnp.float32(0), jnp.float32(1)
    assert accept_probability(zero, zero) == 0
    assert accept_probability(one, zero) == 1
    assert accept_probability(zero, one) == 0
    assert accept_probability(jnp.float32(0.2), jnp.float32(0.8)) == 0.25
    p = jnp.asarray([0.5, 0.5, 0.0])
    np.testing.assert_array_equal(residual(p, p), p)
    hot = jnp.asarray([1.0, 0.0, 0.0])
    np.testing.assert_array_equal(residual(p, hot), [0, 1, 0])

  def test_fewer_drafts_than_the_shape_holds(self):
    p = np.eye(4, dtype=np.float32)[[1, 2, 3]]
    for count in range(3):
      verdict = judge(
        p,
        p[:2],
        jnp.asarray([1, 2], jnp.int32),
        jnp.int32(count),
        jnp.int32(0),
        jnp.uint32(0),
      )
      assert (verdict.accepted, verdict.token) == (count, count + 1)

  def test_adaptive_count_depends_on_finished_rounds_and_stays_in_range(self):
    for count, accepted in itertools.product(range(8), range(8)):
      if accepted <= count:
        n = int(next_draft_count(jnp.int32(count), jnp.int32(accepted), 7))
        assert 1 <= n <= 7
        assert n == min(7, count + 2 if accepted == count else accepted + 1)
