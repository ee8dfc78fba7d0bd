"""The TPU kernels of `streaming_topk`, interpreted on a CPU."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from compare import assert_bit_equal
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from score_cases import make_case

from pallas_kernels import streaming_topk
from pallas_kernels.indexer_scores import tpu as scores_tpu
from pallas_kernels.streaming_topk import tpu
from pallas_kernels.streaming_topk.select import LANES, select, sort_network

SIMULATED = pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')


def best(scores, k):
  """The contract on one row: positions and scores, padded."""
  scores = scores.astype(np.float64)
  scores = np.where(np.isnan(scores), -np.inf, scores)
  order = np.argsort(-scores, kind='stable')[:k]
  order = np.sort(order[scores[order] > -np.inf])
  missing = k - len(order)
  return (
    np.concatenate([order, np.full(missing, -1)]),
    np.concatenate([scores[order], np.full(missing, -np.inf)]),
  )


class TpuSelectTest(parameterized.TestCase):
  def check(self, scores, last, k, interpret=True):
    """Rows [T, S] of scores, visible up to `last`; the rest is poison."""
    scores = np.array(scores, np.float32)
    visible = scores.copy()
    for t, p in enumerate(last):
      end = -(-(p + 1) // 1024) * 1024
      visible[t, p + 1 :] = -np.inf
      scores[t, p + 1 : end] = -np.inf
      scores[t, end:] = np.nan if t % 2 else np.inf
    call = jax.jit(functools.partial(select, k=k, interpret=interpret))
    lines = jnp.asarray(scores).reshape(len(last), -1, LANES)
    positions, winners = call(lines, jnp.asarray(last, jnp.int32))
    self.assertEqual(positions.shape, (len(last), k))
    for t, row in enumerate(visible):
      expected, values = best(row, k)
      np.testing.assert_array_equal(positions[t], expected, err_msg=f'row {t}')
      np.testing.assert_array_equal(winners[t], values, err_msg=f'row {t}')

  @parameterized.product(S=(7168, 16384), k=(300,))
  def test_adversarial_rows(self, S, k):
    """Ties by the thousand, signed zeros, NaN, few keys, none, lengths."""
    rng = np.random.default_rng(S)
    scores = rng.normal(size=(12, S))
    zeros = np.where(rng.random(S) < 0.5, -0.0, 0.0)
    scores[1] = np.round(scores[1] * 4) / 4
    scores[2] = np.where(rng.random(S) < 0.97, zeros, scores[2])
    scores[3, ::3] = np.nan
    scores[4] = -np.inf
    scores[4, 5] = -3
    scores[5] = np.arange(S)  # every group of eight holds eight winners
    scores[6] = zeros
    scores[7] = -np.arange(S) - 1e30
    scores[8] = np.where(rng.random(S) < 0.01, np.inf, -1e-30)
    last = [S - 1] * 12
    last[3], last[9], last[10], last[11] = S - 3, 4095, 4096, -1
    self.check(scores, last, k)

  @parameterized.parameters(1, 129)
  def test_k_around_edges(self, k):
    """Also k beyond the context."""
    rng = np.random.default_rng(k)
    scores = np.round(rng.normal(size=(2, 1024)) * 9)
    self.check(scores, [1023, 700], k)

  def test_no_race_and_no_unwritten_memory(self):
    rng = np.random.default_rng(0)
    scores = np.round(rng.normal(size=(2, 2048)) * 2)
    self.check(scores, [2047, 900], 40, interpret=SIMULATED)
    self.assertFalse(interpret_pallas_call.races.races_found)

  @pytest.mark.long
  def test_a_million_keys(self):
    """The largest context; ties at the threshold of every second row."""
    rng = np.random.default_rng(1)
    S = 1 << 20
    scores = rng.normal(size=(3, S)).astype(np.float32)
    scores[1] = np.round(scores[1] * 16) / 16
    scores[2] = np.maximum(scores[2], 2.875)
    self.check(scores, [S - 1, S - 1, S - 77], 2048)

  def test_scores_and_selection_equal_xla(self):
    self.check_public('fp8')

  @pytest.mark.long
  def test_scores_and_selection_of_bf16_keys_equal_xla(self):
    self.check_public('bf16')

  def check_public(self, dtype):
    """32 heads, more keys than k, blocks of 8 rows, one block of keys more.

    Keys and queries are small integers, so that every implementation has
    the same scores, many of them equal.
    """
    rows = [(0, 1500), (2, 3), (1, 700), (0, -1), (1, 63), (1, 64), (1, 65)]
    rows += [(0, 1499), (0, 1024), (0, 1023)]
    args = list(make_case(dtype, (1501, 701, 4), rows, n=24, heads=32, width=8))
    integers = lambda x: jnp.round(x.astype(jnp.float32)).astype(x.dtype)
    args[:3] = [integers(x) for x in args[:3]]
    args[4] = args[4].at[0, 2].set(-1)
    expected = streaming_topk(*args, 100, first=1, implementation='xla')
    with mock.patch.object(scores_tpu, 'MAX_BLOCK', 1024):
      actual = jax.jit(
        lambda *args: tpu.streaming_topk(
          *args, 100, first=1, block_bytes=8 * 4 * 2048, interpret=True
        )
      )(*args)
    for name, got, want in zip(('positions', 'scores'), actual, expected):
      assert_bit_equal(got, want, name=name)

  def test_public_call(self):
    args = make_case('f32', (70, 0), [(0, 69), (1, 4), (0, -1)], n=2)
    actual = streaming_topk(*args, 80, implementation='interpret')
    self.assertEqual(actual[0][0].tolist(), [*range(70)] + [-1] * 10)
    self.assertTrue((np.asarray(actual[0][1:]) == -1).all())
    many = jnp.full((2, (1 << 15) + 1), -1, jnp.int32)
    with self.assertRaisesRegex(NotImplementedError, 'at most 2097152 keys'):
      streaming_topk(*args[:4], many, *args[5:], 80, implementation='interpret')

  def test_network_sorts(self):
    """All 0-1 inputs of eight come out in descending order."""
    for bits in range(256):
      x = [bits >> i & 1 for i in range(8)]
      for i, j in sort_network(8):
        x[i], x[j] = max(x[i], x[j]), min(x[i], x[j])
      self.assertEqual(x, sorted(x, reverse=True))

  def test_declared_cost_is_a_hand_count(self):
    """128 lines of scores, eight rows of running counts, two of outputs."""
    shapes = (
      jax.ShapeDtypeStruct((3, 128, LANES), jnp.float32),
      jax.ShapeDtypeStruct((3,), jnp.int32),
    )
    traced = jax.make_jaxpr(functools.partial(select, k=256))(*shapes)
    (call,) = (e for e in traced.eqns if e.primitive.name == 'pallas_call')
    lines = 128 * 128 * 128  # each line's winners, summed by a matrix
    running = 2 * (8 * 128 * 128 + 8 * 8 * 128)
    outputs = 2 * (3 * 8 * 128 * 128 + 2 * 128 * 128 * 128)
    cost = call.params['cost_estimate']
    self.assertEqual(cost.flops, 3 * 2 * (lines + running + outputs))
    self.assertEqual(cost.bytes_accessed, 3 * 4 * (128 * 128 + 2 * 256))


if __name__ == '__main__':
  absltest.main()
