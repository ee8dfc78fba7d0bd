"""Head and sampling over a split vocabulary equal one device's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plan_cases
import pytest
from absl.testing import absltest, parameterized
from compare import assert_close

from glm_jax.losses.drafts import end_to_end_tv_from_hidden
from glm_jax.plan import LocalPlan
from glm_jax.sampling import Purpose, draw, filtered_logits, sampling_params
from sharding import plan_named

SHAPES = ((1, 8, 1), (2, 2, 2), (1, 2, 4))


@functools.cache
def plan(shape):
  return plan_named('replicated', plan_cases.config(), plan_cases.mesh(shape))


def case(seed, B=12, V=96):
  """Logits with ties, and every cut alone and together."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(B, V)).astype(np.float32) * 2
  logits[::2] = np.round(logits[::2])  # a handful of distinct values
  logits[1, 40:] = -np.inf
  logits[2] = 0.0
  logits[2, ::3] = -0.0
  params = sampling_params(
    B,
    temperature=[0, 0.7, 1, 1, 1, 1.3, 0, 1, 1, 1, 0.5, 1],
    top_k=[0, 0, 5, 7, 0, 0, 3, 1, 90, 0, 11, 0],
    top_p=[1, 1, 1, 0.5, 0.9, 0.3, 1, 1, 0.95, 1, 0.6, 1e-6],
    min_p=[0, 0, 0, 0, 0, 0, 0, 0, 0, 0.2, 0.05, 0],
    seed=seed,
  )
  return jnp.asarray(logits), params


class SamplingTest(parameterized.TestCase):
  def test_same_cuts_and_tokens(self):
    self.check((2, 2, 2), 0)

  @parameterized.product(shape=SHAPES, seed=(0, 1))
  @pytest.mark.long
  def test_same_cuts_and_tokens_more(self, shape, seed):
    self.check(shape, seed)

  def check(self, shape, seed):
    logits, params = case(seed)
    at = jnp.arange(12, dtype=jnp.int32)
    ours = jax.jit(plan(shape).filtered_logits)(logits, params)
    expected = jax.jit(filtered_logits)(logits, params)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(expected))
    choose = lambda allowed: draw(allowed, at, params.seed, Purpose.SAMPLE)
    np.testing.assert_array_equal(
      np.asarray(jax.jit(choose)(ours)), np.asarray(jax.jit(choose)(expected))
    )

  def test_no_cut_changes_nothing(self):
    logits, _ = case(3)
    params = sampling_params(12, temperature=1.0)
    ours = jax.jit(plan((1, 8, 1)).filtered_logits)(logits, params)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(logits))

  def test_logits_are_never_gathered(self):
    shape = (1, 8, 1)
    head = plan_cases.placed_model(shape).head.kernel[...]
    hidden = jnp.ones((12, head.shape[1]))
    _, params = case(0)
    at = jnp.arange(12, dtype=jnp.int32)

    def step(head, hidden, params):
      logits = plan(shape).logits(head, hidden)
      allowed = plan(shape).filtered_logits(logits, params)
      return draw(allowed, at, params.seed, Purpose.SAMPLE)

    text = jax.jit(step).lower(head, hidden, params).compile().as_text()
    gathers = [x for x in text.splitlines() if ' all-gather(' in x]
    self.assertEmpty([x for x in gathers if 'f32[12,96]' in x])


class HeadTest(parameterized.TestCase):
  @parameterized.parameters(*SHAPES)
  def test_logits(self, *shape):
    rng = np.random.default_rng(0)
    weight = plan_cases.model().head.kernel[...]
    hidden = rng.normal(size=(5, weight.shape[1])).astype(np.float32)
    placed = plan_cases.placed_model(shape).head.kernel[...]
    ours = jax.jit(plan(shape).logits)(placed, hidden)
    self.assertEqual(ours.sharding.shard_shape(ours.shape), (5, 12))
    expected = jax.jit(LocalPlan().logits)(weight, hidden)
    assert_close(ours, expected, atol=1e-5, rtol=1e-5, name='logits')

  @parameterized.parameters((2, 2, 2))
  def test_total_variation(self, *shape):
    rng = np.random.default_rng(1)
    G, T = 3, 16
    weight = plan_cases.model().head.kernel[...]
    draw = lambda *s: jnp.asarray(
      rng.normal(size=(*s, weight.shape[1])), jnp.float32
    )
    p, q, mask = draw(G, T), draw(G, T), jnp.arange(T) % 5 > 0
    loss = lambda head, q: end_to_end_tv_from_hidden(p, q, head, mask, chunk=8)
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    expected = run(weight, q)
    ours = run(plan_cases.placed_model(shape).head.kernel[...], q)
    for a, e, name in zip(
      jax.tree.leaves(ours), jax.tree.leaves(expected), ('loss', 'head', 'q')
    ):
      assert_close(a, e, atol=1e-6, rtol=1e-5, name=name)


if __name__ == '__main__':
  absltest.main()
