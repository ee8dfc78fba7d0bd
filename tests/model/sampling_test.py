"""Cuts of sampling, found by counting, against a sort of every row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from glm_jax.sampling import (
  Purpose,
  choose,
  filtered_logits,
  sampling_params,
)


def by_sorting(logits, params):
  """The definition, a row at a time in float64."""
  out = np.full(logits.shape, -np.inf, np.float32)
  values = [np.asarray(getattr(params, n)) for n in _NAMES]
  for row, x, temperature, top_k, top_p, min_p in zip(out, logits, *values):
    x = np.asarray(x, np.float32)
    x = x * (1 / np.float32(temperature if temperature > 0 else 1))
    order = np.argsort(-x, kind='stable')
    order = order[: 1 if temperature <= 0 else top_k or len(x)]
    p = np.exp(x[order].astype(np.float64) - x[order[0]])
    p /= p.sum()
    keep = (np.cumsum(p) - p < top_p) | (top_p >= 1)
    keep &= p >= min_p * p[0]
    keep[0] = True
    row[order[keep]] = x[order[keep]]
  return out


_NAMES = ('temperature', 'top_k', 'top_p', 'min_p')
_CUTS = dict(
  temperature=[0, 0.7, 1, 1, 1, 1.3, 0, 1, 1, 1, 0.5, 1, 1, 1, 1, 1],
  top_k=[0, 0, 5, 7, 0, 0, 3, 1, 90, 0, 11, 0, 10**6, 8, 0, 0],
  top_p=[1, 1, 1, 0.5, 0.9, 0.3, 1, 1, 0.95, 1, 0.6, 1e-6, 1, 1, 0.95, 0.97],
  min_p=[0, 0, 0, 0, 0, 0, 0, 0, 0, 0.21, 0.05, 0, 0, 0, 0.011, 1],
)


def rows_of(kind, V, seed):
  """[16, V] logits."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(16, V)).astype(np.float32) * 2
  if kind == 'ties':
    logits = np.round(logits)
  elif kind == 'few':  # a grammar leaves few tokens
    logits[:, 3:-3] = -np.inf
  elif kind == 'equal':
    logits[:] = 0.0
    logits[:, ::3] = -0.0
  elif kind == 'peaked':
    logits[np.arange(16), rng.integers(V, size=16)] = 40
  return logits


def conds(jaxpr):
  """Branches of a jaxpr's own conditions."""
  found = [e for e in jaxpr.eqns if e.primitive.name == 'cond']
  return [branch for e in found for branch in e.params['branches']]


def loops(jaxpr):
  """Whether a jaxpr loops, its conditions not counted."""
  return any(e.primitive.name in ('while', 'scan') for e in jaxpr.eqns)


class ByCountingTest(parameterized.TestCase):
  @parameterized.product(
    kind=('plain', 'ties', 'few', 'equal', 'peaked'), seed=(0, 1)
  )
  def test_same_as_by_sorting(self, kind, seed):
    self.check(rows_of(kind, 97, seed))

  @pytest.mark.long
  def test_same_as_by_sorting_of_a_whole_vocabulary(self):
    for kind in ('plain', 'ties', 'few'):
      self.check(rows_of(kind, 154_880, 2))
    # The sums are float32: of equal tokens, 6.5e-6 each, one more or less.
    logits, params = rows_of('equal', 154_880, 2), sampling_params(16, **_CUTS)
    ours = jax.jit(filtered_logits)(jnp.asarray(logits), params)
    count = lambda x: np.sum(np.asarray(x) > -np.inf, axis=1)
    expected = count(by_sorting(logits, params))
    assert np.abs(count(ours) - expected).max() <= 1

  def check(self, logits):
    params = sampling_params(16, **_CUTS)
    ours = jax.jit(filtered_logits)(jnp.asarray(logits), params)
    np.testing.assert_array_equal(ours, by_sorting(logits, params))

  def test_each_row_alone(self):
    logits = rows_of('ties', 97, 3)
    for i in range(16):
      params = sampling_params(1, **{n: v[i] for n, v in _CUTS.items()})
      ours = filtered_logits(jnp.asarray(logits[i : i + 1]), params)
      np.testing.assert_array_equal(ours, by_sorting(logits[i : i + 1], params))

  def test_nothing_is_sorted(self):
    params = sampling_params(16, **_CUTS)
    lowered = jax.jit(filtered_logits).lower(jnp.zeros((16, 97)), params)
    text = lowered.compile().as_text()
    assert ' while(' in text  # the searches
    assert ' sort(' not in text and 'TopK' not in text

  def test_rows_without_cuts_pay_no_search(self):
    jaxpr = jax.make_jaxpr(filtered_logits)(
      jnp.zeros((2, 8)), sampling_params(2, temperature=1.0)
    )
    assert not loops(jaxpr)
    (cut,) = (x for x in conds(jaxpr) if conds(x))
    assert any(loops(y) for x in conds(cut) for y in [x, *conds(x)])

  @parameterized.parameters(1e-45, 1e-39, 1e-9)
  def test_a_temperature_next_to_zero_overflows_nothing(self, temperature):
    logits = jnp.asarray([[-3.0, 0.0, 40.0, 39.0]])
    params = sampling_params(1, temperature=temperature, top_p=0.9)
    kept = filtered_logits(logits, params)
    np.testing.assert_array_equal(
      jnp.isfinite(kept), [[False, False, True, False]]
    )
    p = jax.nn.softmax(
      filtered_logits(logits, sampling_params(1, temperature=temperature))
    )
    np.testing.assert_array_equal(p, [[0, 0, 1, 0]])

  def test_nan_beside_the_best_token(self):
    logits = rows_of('plain', 97, 4)
    logits[:, 5] = -np.inf
    params = sampling_params(16, **_CUTS | {'top_p': 1.0, 'min_p': 0.0})
    expected = by_sorting(logits, params)
    logits[0, 5] = np.nan  # the engine reports the row; others are untouched
    ours = jax.jit(filtered_logits)(jnp.asarray(logits), params)
    np.testing.assert_array_equal(ours[1:], expected[1:])


class ChooseTest(parameterized.TestCase):
  def test_a_greedy_batch_is_one_branch_and_no_noise(self):
    at = jnp.arange(2, dtype=jnp.int32)
    jaxpr = jax.make_jaxpr(
      lambda logits, params: choose(logits, at, params, Purpose.SAMPLE)
    )(jnp.zeros((2, 8)), sampling_params(2))
    drawn, best = conds(jaxpr)
    assert not conds(best) and 'random' not in str(best)
    assert conds(drawn) and 'random' in str(drawn)
    assert not loops(jaxpr) and not loops(best)

  def test_a_greedy_row_gets_its_token_beside_any_other_row(self):
    logits = jnp.asarray(rows_of('ties', 97, 5))
    at = jnp.arange(16, dtype=jnp.int32)
    alone = choose(logits, at, sampling_params(16), Purpose.SAMPLE)
    mixed = sampling_params(16, temperature=[0.0] * 15 + [1.0], top_p=0.9)
    beside = jax.jit(choose, static_argnums=3)(
      logits, at, mixed, Purpose.SAMPLE
    )
    for a, b in zip(alone, beside):
      np.testing.assert_array_equal(a[:15], b[:15])
    np.testing.assert_array_equal(alone[0], jnp.argmax(logits, axis=1))


class SamplingTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(temperature=1.0), [0.5, 0.3, 0.15, 0.05]),
    (dict(temperature=1.0, top_k=2), [0.625, 0.375, 0, 0]),
    (dict(temperature=1.0, top_p=0.79), [0.625, 0.375, 0, 0]),
    (dict(temperature=1.0, top_p=0.81), [10 / 19, 6 / 19, 3 / 19, 0]),
    (dict(temperature=1.0, min_p=0.31), [0.625, 0.375, 0, 0]),
    (dict(temperature=1.0, top_k=3, top_p=0.5), [1, 0, 0, 0]),
    (dict(temperature=0.0), [1, 0, 0, 0]),
  )
  def test_cuts(self, options, expected):
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    params = sampling_params(1, **options)
    p = jax.nn.softmax(filtered_logits(logits, params), axis=-1)[0]
    np.testing.assert_allclose(p, expected, atol=1e-6)

  def test_temperature_divides_the_logits(self):
    logits = jnp.asarray([[2.0, 1.0, 0.0]])
    params = sampling_params(1, temperature=0.5)
    np.testing.assert_allclose(
      filtered_logits(logits, params), 2 * logits, rtol=1e-6
    )

  def test_ties_at_temperature_zero_go_to_the_lowest_id(self):
    params = sampling_params(1)
    kept = filtered_logits(jnp.asarray([[1.0, 3.0, 3.0]]), params)
    np.testing.assert_array_equal(kept > -jnp.inf, [[False, True, False]])

  def test_a_row_is_cut_the_same_beside_any_other_row(self):
    logits = jax.random.normal(jax.random.key(0), (3, 64))
    params = sampling_params(
      3, temperature=[0.0, 1.0, 0.7], top_p=[1.0, 0.5, 1.0]
    )
    together = filtered_logits(logits, params)
    for i in range(3):
      alone = jax.tree.map(lambda a: a[i : i + 1], params)
      np.testing.assert_array_equal(
        filtered_logits(logits[i : i + 1], alone)[0], together[i]
      )

  @parameterized.parameters(
    (dict(temperature=-1.0), 'temperature=-1.0 must be finite'),
    (dict(temperature=float('nan')), 'temperature=nan must be finite'),
    (dict(top_p=0.0), 'top_p=0.0 must be above 0'),
    (dict(top_p=1.5), 'top_p=1.5 must be above 0'),
    (dict(top_k=-1), 'top_k=-1 must be at least 0'),
    (dict(min_p=2.0), 'min_p=2.0 must be between'),
  )
  def test_bad_values_are_named(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      sampling_params(1, **options)

  def test_seeds_are_of_requests(self):
    params = sampling_params(3, seed=7)
    np.testing.assert_array_equal(params.seed, [7, 8, 9])
    assert dataclasses.is_dataclass(params)
