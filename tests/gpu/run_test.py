"""The GPU's kernels on the GPU of this host, against the reference there.

`make test-on-gpu`; fails, and skips nothing, where JAX has no GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import (
  indexer_scores,
  streaming_topk,
  topk_gather_attention,
)
from pallas_kernels.streaming_topk import gpu_select


def index_arguments(T, B, n, dtype, seed=0):
  """GLM-5.2's widths; pages in random order, one missing, NaN in page 0."""
  rng = np.random.default_rng(seed)
  pages = B * n + 1
  keys = rng.normal(size=(pages, 64, 128)).astype(np.float32)
  keys[0] = np.nan
  table = rng.permutation(pages - 1)[: B * n].reshape(B, n) + 1
  table[:, n // 2] = -1
  row_pos = rng.integers(0, n * 64, T)
  row_pos[0] = -1
  return (
    jnp.asarray(rng.normal(size=(T, 32, 128)), jnp.bfloat16),
    jnp.asarray(rng.normal(size=(T, 32)), jnp.float32),
    jnp.asarray(keys, jnp.float8_e4m3fn if dtype == 'fp8' else jnp.bfloat16),
    jnp.asarray(rng.random((pages, 64)), jnp.float32)
    if dtype == 'fp8'
    else None,
    jnp.asarray(table, jnp.int32),
    jnp.asarray(np.sort(rng.integers(0, B, T)), jnp.int32),
    jnp.asarray(row_pos, jnp.int32),
  )


@pytest.mark.on_gpu
class RunTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.assertEqual(jax.default_backend(), 'gpu', 'this host has no GPU')

  @parameterized.product(
    shape=((8, 8, 128), (66, 2, 256), (130, 1, 40)), dtype=('bf16', 'fp8')
  )
  def test_scores(self, shape, dtype):
    case = index_arguments(*shape, dtype)
    got, want = (
      np.asarray(indexer_scores(*case, first=1, implementation=name))
      for name in ('gpu', 'reference')
    )
    np.testing.assert_array_equal(got > -np.inf, want > -np.inf)
    seen = want > -np.inf
    np.testing.assert_allclose(got[seen], want[seen], rtol=1e-4, atol=1e-3)

  @parameterized.parameters(
    (9, 4096, 256),
    (5, 8192, 2048),
    (3, 16384, 2048),
    (8, 131072, 2048),
    (600, 20000, 2048),
    (2, 1 << 20, 2048),
  )
  def test_selection_is_exact(self, T, size, k):
    scores = np.random.default_rng(0).normal(size=(T, size))
    scores = scores.astype(np.float32)
    scores[0] = np.round(scores[0] * 4) / 4
    scores[1, k // 3 :] = -np.inf
    positions, _ = gpu_select.select(jnp.asarray(scores), k)
    for row, got in zip(scores, np.asarray(positions)):
      order = np.argsort(-row, kind='stable')[:k]
      want = np.sort(order[row[order] > -np.inf])
      fill = (0, k - len(want))
      np.testing.assert_array_equal(got, np.pad(want, fill, constant_values=-1))

  def test_the_whole_selection(self):
    case = index_arguments(24, 3, 300, 'bf16')
    scores = np.asarray(indexer_scores(*case, implementation='gpu'))
    positions, winners = streaming_topk(*case, k=2048, implementation='gpu')
    for row, got in zip(scores, np.asarray(positions)):
      order = np.argsort(-row, kind='stable')[:2048]
      want = np.sort(order[row[order] > -np.inf])
      np.testing.assert_array_equal(got[: len(want)], want)
      self.assertTrue((got[len(want) :] == -1).all())
    self.assertTrue(
      np.isfinite(winners[-1][np.asarray(positions[-1]) >= 0]).all()
    )

  @parameterized.product(T=(1, 8, 64, 300), heads=(4, 64))
  def test_attention(self, T, heads):
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(9000, 640)).astype(np.float32)
    rows[0] = np.nan
    slots = np.full((T, 2048), -1, np.int32)
    for t in range(T):
      count = 0 if t == 7 else rng.integers(1, 2048)
      at = rng.permutation(2048)[:count]
      slots[t, at] = rng.permutation(8999)[:count] + 1
    q = jnp.asarray(rng.normal(size=(T, heads, 576)), jnp.bfloat16)
    rows = jnp.asarray(rows, jnp.bfloat16)
    (out, lse), (want, want_lse) = (
      topk_gather_attention(
        q,
        rows,
        None,
        jnp.asarray(slots),
        scale=576**-0.5,
        latent_width=512,
        implementation=name,
      )
      for name in ('gpu', 'xla')
    )
    np.testing.assert_allclose(
      np.float32(out), np.float32(want), rtol=3e-2, atol=1e-2
    )
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-3)


if __name__ == '__main__':
  absltest.main()
