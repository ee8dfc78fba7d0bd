"""The GPU's score kernel, interpreted, against the sum it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.indexer_scores import gpu


def normal(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape, np.float32)


class SequenceScoresTest(parameterized.TestCase):
  @parameterized.product(heads=(16, 32), size=(128, 384), dtype=('f4', 'bf16'))
  def test_equals_the_sum_over_heads(self, heads, size, dtype):
    dtype = jnp.bfloat16 if dtype == 'bf16' else jnp.float32
    q = jnp.asarray(normal(0, 8, heads, 32), dtype)
    keys = jnp.asarray(normal(1, size, 32), dtype)
    w = normal(2, 8, heads)
    dots = np.einsum('tih,sh->tis', *(np.float64(a) for a in (q, keys)))
    want = np.sum(np.maximum(dots, 0) * w[:, :, None], axis=1)
    got = gpu.sequence_scores(q, w, keys, interpret=True)
    self.assertEqual(got.dtype, jnp.float32)
    np.testing.assert_allclose(
      got, want, rtol=1e-5, atol=1e-5 * abs(want).max()
    )

  def test_nan_is_kept(self):
    q, w, keys = normal(0, 4, 16, 16), normal(1, 4, 16), normal(2, 128, 16)
    keys[5, 3] = np.nan
    got = np.asarray(gpu.sequence_scores(q, w, keys, interpret=True))
    np.testing.assert_array_equal(
      np.isnan(got).any(axis=0), np.arange(128) == 5
    )

  @parameterized.parameters(
    (3, 32, 32, 128), (4, 24, 32, 128), (4, 32, 8, 128), (4, 32, 32, 100)
  )
  def test_what_does_not_fit_is_refused(self, rows, heads, width, size):
    self.assertFalse(gpu.fits(rows, heads, width, size))
    shapes = ((rows, heads, width), (rows, heads), (size, width))
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    with self.assertRaisesRegex(NotImplementedError, f'{rows} rows of {heads}'):
      jax.eval_shape(gpu.sequence_scores, *args)


if __name__ == '__main__':
  absltest.main()
