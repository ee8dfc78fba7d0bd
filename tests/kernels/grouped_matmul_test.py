"""`grouped_matmul` against one float64 product a row, and its work counted."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_bit_equal, assert_close

from pallas_kernels import grouped_matmul
from pallas_kernels.block_scale import dequantize, quantize
from pallas_kernels.grouped_matmul import xla

IMPLEMENTATIONS = ('reference', 'xla')


@functools.cache
def runner(implementation, **options):
  return jax.jit(
    functools.partial(grouped_matmul, implementation=implementation, **options)
  )


def product_f64(x, weights, layer, sizes):
  """Each row times its own expert's weights [E, F, D], in float64."""
  expert = np.repeat(np.arange(len(sizes)), sizes)
  x = np.asarray(x).astype(np.float64)
  w = np.asarray(weights[layer]).astype(np.float64)[expert]
  return np.einsum('md,mfd->mf', x, w)


def routing(rng, experts, rows, choices, *, skew=0.0):
  """Rows of each expert when every row picks `choices` different ones."""
  logits = skew * rng.normal(size=experts) + rng.gumbel(size=(rows, experts))
  chosen = np.argsort(-logits, axis=1)[:, :choices]
  return np.bincount(chosen.reshape(-1), minlength=experts).astype(np.int32)


class GroupedMatmulTest(parameterized.TestCase):
  @parameterized.product(implementation=IMPLEMENTATIONS, dtype=('f32', 'bf16'))
  def test_matches_float64(self, implementation, dtype):
    """Empty groups, a traced layer, NaN in all that must not be read."""
    rng = np.random.default_rng(0)
    L, E, F, D = 3, 6, 10, 24
    wide = np.float32 if dtype == 'f32' else ml_dtypes.bfloat16
    x = rng.normal(size=(32, D)).astype(wide)
    weights = rng.normal(size=(L, E, F, D)).astype(wide)
    cases = (
      [0, 7, 0, 1, 24, 0],
      [5, 5, 5, 5, 6, 6],
      [32, 0, 0, 0, 0, 0],
      [0, 0, 0, 0, 0, 32],
      [1, 0, 31, 0, 0, 0],
    )
    for sizes in cases:
      with self.subTest(str(sizes)):
        sizes = np.array(sizes, np.int32)
        poisoned = np.full_like(weights, np.nan)
        poisoned[1, sizes > 0] = weights[1, sizes > 0]
        layer = jnp.int32(1)
        actual = runner(implementation)(x, poisoned, None, layer, sizes)
        self.assertEqual(actual.dtype, wide)
        expected = product_f64(x, weights, 1, sizes)
        rtol = 1e-6 if dtype == 'f32' else 2**-8
        assert_close(actual, expected, atol=1e-5, rtol=rtol, name='out')

  @parameterized.product(tile=(1, 3, 8, 32, 40))
  def test_any_tile(self, tile):
    """Tiles that divide nothing, and one larger than all rows."""
    rng = np.random.default_rng(tile)
    x = rng.normal(size=(32, 8)).astype(np.float32)
    weights = rng.normal(size=(1, 5, 6, 8)).astype(np.float32)
    sizes = np.array([4, 0, 9, 1, 18], np.int32)
    actual = runner('xla', tile=tile)(x, weights, None, 0, sizes)
    expected = product_f64(x, weights, 0, sizes)
    assert_close(actual, expected, atol=1e-5, rtol=1e-6, name='out')

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_layer_may_be_traced_or_not(self, implementation):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 8)).astype(np.float32)
    weights = rng.normal(size=(3, 2, 6, 8)).astype(np.float32)
    sizes = np.array([3, 1], np.int32)
    for layer in (0, 2):
      static = jax.jit(
        functools.partial(
          grouped_matmul, layer=layer, implementation=implementation
        )
      )(x, weights, None, group_sizes=sizes)
      traced = runner(implementation)(x, weights, None, layer, sizes)
      assert_close(traced, static, atol=1e-6, rtol=1e-6, name=f'{layer=}')
      expected = product_f64(x, weights, layer, sizes)
      assert_close(static, expected, atol=1e-5, rtol=1e-6, name=f'{layer=}')

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_no_rows(self, implementation):
    x = jnp.zeros((0, 8))
    weights = jnp.full((1, 3, 6, 8), jnp.nan)
    sizes = jnp.zeros(3, jnp.int32)
    actual = runner(implementation)(x, weights, None, 0, sizes)
    self.assertEqual(actual.shape, (0, 6))

  @parameterized.product(implementation=IMPLEMENTATIONS, dtype=('f32', 'bf16'))
  def test_fp8_equals_dequantised_weights(self, implementation, dtype):
    """Odd last blocks in both axes; unread experts' scales are NaN."""
    rng = np.random.default_rng(8)
    L, E, F, D, block = 2, 4, 11, 21, (4, 8)
    wide = jnp.float32 if dtype == 'f32' else jnp.bfloat16
    x = jnp.asarray(rng.normal(size=(16, D)), wide)
    weights = rng.normal(size=(L, E, F, D)) * 2.0 ** rng.integers(
      -4, 5, (L, E, F, 1)
    )
    values, scales = quantize(jnp.asarray(weights, jnp.float32), block)
    self.assertEqual(scales.shape, (L, E, 3, 3))
    sizes = jnp.array([6, 0, 9, 1], jnp.int32)
    decoded = dequantize(values, scales, wide, block)
    plain = runner(implementation)(x, decoded, None, 1, sizes)
    poisoned = scales.at[0].set(jnp.nan).at[1, 1].set(jnp.nan)
    actual = runner(implementation, scale_block=block)(
      x, values, poisoned, 1, sizes
    )
    assert_close(actual, plain, atol=1e-5, rtol=1e-6, name='out')

  def test_tiles_multiply_at_most_twice_the_rows(self):
    """256 experts, 64 rows x top-8: the tiles that really run are counted.

    `jax.lax.ragged_dot` is not used: off TPU it multiplies every row by
    every expert, 258x the operations at 256 experts (design section 3).
    """
    rng = np.random.default_rng(0)
    E, F, D, M = 256, 2, 4, 512
    x = rng.normal(size=(M, D)).astype(np.float32)
    weights = rng.normal(size=(1, E, F, D)).astype(np.float32)
    multiplied = []
    dot = xla.dot

    def counting_dot(spec, a, b):
      jax.debug.callback(lambda: multiplied.append(a.shape[0]))
      return dot(spec, a, b)

    with mock.patch.object(xla, 'dot', counting_dot):
      run = jax.jit(functools.partial(grouped_matmul, implementation='xla'))
      for skew in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        sizes = routing(rng, E, 64, 8, skew=skew)
        self.assertEqual(sizes.sum(), M)
        multiplied.clear()
        actual = run(x, weights, None, 0, sizes)
        jax.effects_barrier()
        with self.subTest(f'{skew=}: {len(multiplied)} tiles'):
          self.assertGreaterEqual(len(multiplied), np.count_nonzero(sizes))
          self.assertGreaterEqual(sum(multiplied), M)
          self.assertLessEqual(sum(multiplied), 2 * M)
          expected = product_f64(x, weights, 0, sizes)
          assert_close(actual, expected, atol=1e-5, rtol=1e-5, name='out')

  @parameterized.parameters(
    *((M, E) for M in (1, 8, 255, 256, 511, 512, 4096) for E in (1, 8, 256))
  )
  def test_default_tile_bounds_the_work(self, M, E):
    """Whatever the routing: the worst case is one row in most groups."""
    tile = xla.default_tile(M, E)
    self.assertBetween(tile, 1, 256)
    ones = min(M, E) - 1
    sizes = np.array([M - ones] + [1] * ones)
    rows = int((-(-sizes // tile)).sum()) * tile
    self.assertLess(rows, 2 * M + tile)
    self.assertLessEqual(rows, 2 * M if tile > 1 else M)

  @parameterized.product(dtype=('f32', 'bf16', 'fp8'))
  def test_temporary_bytes(self, dtype):
    """256 experts: at most twice the rows' own bytes and one expert."""
    if dtype != 'f32' and jax.default_backend() == 'cpu':
      self.skipTest('XLA on CPU widens a whole bf16 or fp8 pool to slice it')
    L, E, F, D, M = 2, 256, 64, 128, 512
    shape = jax.ShapeDtypeStruct
    wide = jnp.float32 if dtype == 'f32' else jnp.bfloat16
    weight_dtype = jnp.float8_e4m3fn if dtype == 'fp8' else wide
    scales = shape((L, E, 1, 1), jnp.float32) if dtype == 'fp8' else None
    lowered = runner('xla').lower(
      shape((M, D), wide),
      shape((L, E, F, D), weight_dtype),
      scales,
      shape((), jnp.int32),
      shape((E,), jnp.int32),
    )
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    rows = M * (D + F) * jnp.dtype(wide).itemsize
    expert = 4 * F * D
    # One layer of dequantised experts would be 8 MiB, all rows' weights 16.
    self.assertLess(temporary, 2 * rows + 4 * expert + 16_384)

  def test_bits_do_not_depend_on_other_groups(self):
    """A fixed tile: an expert's rows do not feel how many others have."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(24, 64)).astype(np.float32)
    weights = rng.normal(size=(1, 3, 32, 64)).astype(np.float32)
    run = runner('xla', tile=8)
    sizes = lambda *a: np.array(a, np.int32)
    whole = run(x, weights, None, 0, sizes(5, 8, 11))
    moved = run(np.roll(x, -5, 0), weights, None, 0, sizes(0, 8, 16))
    assert_bit_equal(moved[:8], whole[5:13], name='rows of expert 1')

  def test_wrong_arguments(self):
    x = jnp.ones((4, 8))
    weights = jnp.ones((1, 2, 6, 8))
    sizes = jnp.array([2, 2], jnp.int32)
    scales = jnp.ones((1, 2, 1, 1))
    fp8 = weights.astype(jnp.float8_e4m3fn)
    cases = [
      ((x[:, :7], weights, None, 0, sizes), r'must end in the width of x\.s'),
      ((x, weights, None, 0, sizes[:1]), r'group_sizes\.shape=\(1,\) must'),
      ((x, weights, scales, 0, sizes), 'scales given: e4m3 weights have'),
      ((x, fp8, None, 0, sizes), 'scales absent: e4m3 weights have scales'),
    ]
    for args, message in cases:
      with self.subTest(message):
        with self.assertRaisesRegex(ValueError, message):
          grouped_matmul(*args)
    with self.assertRaisesRegex(ValueError, "implementation='ragged_dot'"):
      grouped_matmul(x, weights, None, 0, sizes, implementation='ragged_dot')


if __name__ == '__main__':
  absltest.main()
