"""`top_mask` and its GPU kernel against numpy's stable sort, NaN included."""

import jax
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.streaming_topk import gpu
from pallas_kernels.streaming_topk.threshold import top_mask


def by_sorting(scores, k):
  scores = np.where(np.isnan(scores), -np.inf, scores)
  order = np.argsort(-scores, axis=-1, kind='stable')[..., :k]
  mask = np.zeros(scores.shape, bool)
  np.put_along_axis(mask, order, True, axis=-1)
  return mask & (scores > -np.inf)


class TopMaskTest(parameterized.TestCase):
  @parameterized.product(S=(1, 2, 63, 64, 65, 200), k=(1, 2, 64, 100))
  def test_equals_a_stable_sort(self, S, k):
    rng = np.random.default_rng(S * 1000 + k)
    rows = [
      rng.standard_normal(S),
      rng.integers(-2, 3, S),  # ties everywhere, on both sides of 0
      np.zeros(S),
      np.where(rng.random(S) < 0.5, 0.0, -0.0),
      np.where(rng.random(S) < 0.7, -np.inf, rng.standard_normal(S)),
      np.full(S, -np.inf),
      np.where(rng.random(S) < 0.3, np.nan, rng.integers(-1, 2, S)),
      rng.choice([np.inf, 1e-45, -1e-45, 3e38, -3e38], S),
    ]
    scores = np.asarray(rows, np.float32)
    # The CPU backend flushes subnormal numbers to zero in a comparison.
    scores[np.abs(scores) == np.float32(1e-45)] = 0
    got = jax.jit(top_mask, static_argnums=1)(scores, k)
    np.testing.assert_array_equal(got, by_sorting(scores, k))
    if S in (64, 200):
      got = gpu.top_mask(scores, k, interpret=True)
      np.testing.assert_array_equal(got, by_sorting(scores, k))

  def test_leading_axes_are_rows(self):
    scores = np.random.default_rng(0).standard_normal((2, 3, 50))
    scores = np.asarray(scores, np.float32)
    np.testing.assert_array_equal(top_mask(scores, 7), by_sorting(scores, 7))

  def test_rows_wider_than_the_gpu_kernel_holds_are_refused(self):
    self.assertFalse(gpu.fits(16385))
    with self.assertRaisesRegex(NotImplementedError, '16385 scores a row'):
      gpu.top_mask(np.zeros((1, 16385), np.float32), 3)

  def test_a_cut_by_the_highest_position_would_be_seen(self):
    mask = np.asarray(top_mask(np.zeros((1, 10), np.float32), 3))
    np.testing.assert_array_equal(np.flatnonzero(mask), [0, 1, 2])


if __name__ == '__main__':
  absltest.main()
