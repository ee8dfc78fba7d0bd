"""The GPU's kernels on the GPU of this host, against the reference there.

`make test-on-gpu`; fails, and skips nothing, where JAX has no GPU.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import (
  grouped_matmul,
  indexer_scores,
  streaming_topk,
  topk_gather_attention,
)
from pallas_kernels.block_scale import quantize
from pallas_kernels.streaming_topk import gpu_select

# Outputs and inputs of an expert, in and out.
GLM, NANO = ((2048, 6144), (6144, 2048)), ((48, 256), (256, 48))


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


def expert_arguments(M, F, D, dtype, layers=2, seed=0):
  """16 experts, some of them empty; NaN where nobody's weights are."""
  E, layer = 16, layers - 1
  rng = np.random.default_rng(seed)
  sizes = rng.multinomial(M, rng.dirichlet([0.7] * (E - 3)))
  sizes = rng.permutation(np.append(sizes, [0, 0, 0]))
  wide = jnp.float32 if dtype == 'f32' else jnp.bfloat16
  keys = jax.random.split(jax.random.key(seed))
  own = jax.random.normal(keys[0], (E, F, D), jnp.float32)
  x = jax.random.normal(keys[1], (M, D), jnp.float32).astype(wide)
  own, scales = quantize(own) if dtype == 'fp8' else (own.astype(wide), None)
  unread = jnp.asarray(sizes == 0)[:, None, None]
  pool = lambda a: (
    jnp.full((layers, *a.shape), jnp.nan, a.dtype)
    .at[layer]
    .set(jnp.where(unread, jnp.asarray(jnp.nan, a.dtype), a))
  )
  scales = None if scales is None else pool(scales)
  sizes = jnp.asarray(sizes, jnp.int32)
  return x, pool(own), scales, jnp.int32(layer), sizes


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
    if T > 2:  # more ties than candidates are kept: searched in place
      scores[2] = scores[2] > 0
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
    self.assert_same_attention(T, heads, 'gpu')

  @parameterized.product(T=(1, 8, 64, 300), heads=(4, 64))
  def test_hopper(self, T, heads):
    self.assert_same_attention(T, heads, 'hopper')

  def assert_same_attention(self, T, heads, system):
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
      for name in (system, 'xla')
    )
    np.testing.assert_allclose(
      np.float32(out), np.float32(want), rtol=3e-2, atol=1e-2
    )
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-3)

  @parameterized.parameters(
    *itertools.product((1, 130, 500, 1500), GLM, ('bf16', 'fp8')),
    *itertools.product((1, 130, 500, 1500), NANO, ('bf16',)),
    *itertools.product((130, 500), (GLM[0], NANO[0]), ('f32',)),
  )
  def test_grouped_matmul(self, rows, width, dtype):
    """Every size of the row tiles, over GLM-5.2's and glm-nano's widths."""
    self.assert_same_products(expert_arguments(rows, *width, dtype), dtype)

  @parameterized.parameters(('bf16', 12), ('fp8', 24))
  def test_grouped_matmul_far_into_a_pool(self, dtype, layers):
    """The last layer of 4.8 GB lies beyond what 32 bits count."""
    self.assert_same_products(
      expert_arguments(40, 2048, 6144, dtype, layers), dtype
    )

  def assert_same_products(self, case, dtype):
    got, want = (
      np.float32(
        jax.jit(grouped_matmul, static_argnames='implementation')(
          *case, implementation=name
        )
      )
      for name in ('gpu', 'xla')
    )
    self.assertTrue(np.isfinite(want).all())
    # XLA rounds widened fp8 weights to bf16, and the kernel nothing.
    close = 1e-5 if dtype == 'f32' else 2**-7
    np.testing.assert_allclose(
      got, want, rtol=close, atol=close * np.abs(want).max()
    )


if __name__ == '__main__':
  absltest.main()
