"""Block-scaled fp8: odd blocks, extremes, and matmul against dequantised."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_bit_equal, assert_close

from pallas_kernels.block_scale import (
  BLOCK,
  FP8_MAX,
  dequantize,
  quantize,
  scaled_matmul,
)


def blocks_of(values, block):
  """Every block of a matrix, with its index."""
  for i in range(0, values.shape[0], block[0]):
    for j in range(0, values.shape[1], block[1]):
      at = i // block[0], j // block[1]
      yield at, values[i : i + block[0], j : j + block[1]]


def dequantize_f64(values, scales, block):
  """One element at a time."""
  out = np.zeros(values.shape)
  for i, j in np.ndindex(*values.shape):
    out[i, j] = float(values[i, j]) * float(
      scales[i // block[0], j // block[1]]
    )
  return out


class BlockScaleTest(parameterized.TestCase):
  @parameterized.parameters(
    ((8, 8), (4, 4)), ((9, 13), (4, 8)), ((3, 5), (4, 8)), ((5, 4), (1, 2))
  )
  def test_round_trip(self, shape, block):
    """Largest magnitude / 448 a block; within half a step of e4m3."""
    rng = np.random.default_rng(0)
    wide = rng.normal(size=shape) * 2.0 ** rng.integers(-9, 9, shape)
    wide = wide.astype(np.float32)
    values, scales = quantize(jnp.asarray(wide), block)
    self.assertEqual(values.dtype, jnp.float8_e4m3fn)
    self.assertEqual(scales.dtype, jnp.float32)
    counts = tuple(-(-s // b) for s, b in zip(shape, block))
    self.assertEqual(scales.shape, counts)
    actual = np.asarray(dequantize(values, scales, jnp.float32, block))
    expected = dequantize_f64(np.asarray(values), np.asarray(scales), block)
    assert_close(actual, expected, atol=0, rtol=2e-7, name='dequantised')
    for (at, own), (_, back) in zip(
      blocks_of(wide, block), blocks_of(actual, block)
    ):
      largest = np.abs(own).max()
      assert_close(scales[at], largest / 448, atol=0, rtol=1e-6, name='scale')
      # 3 mantissa bits: half a step is 1/16; below 2^-6 steps are equal.
      limit = np.maximum(np.abs(own) / 16, largest / 448 * 2.0**-10)
      self.assertTrue((np.abs(back - own) <= limit * 1.001).all())

  def test_leading_axes(self):
    rng = np.random.default_rng(1)
    wide = jnp.asarray(rng.normal(size=(2, 3, 9, 13)), jnp.float32)
    values, scales = quantize(wide, (4, 8))
    self.assertEqual(scales.shape, (2, 3, 3, 2))
    whole = dequantize(values, scales, jnp.bfloat16, (4, 8))
    for i, j in np.ndindex(2, 3):
      one = quantize(wide[i, j], (4, 8))
      assert_bit_equal(values[i, j], one[0], name='values')
      assert_bit_equal(scales[i, j], one[1], name='scales')
      part = dequantize(*one, jnp.bfloat16, (4, 8))
      assert_bit_equal(whole[i, j], part, name='dequantised')

  @parameterized.parameters(
    0.0, 1e-45, 1e-40, 1e-38, 1e-37, 1e-36, 1e-30, 1e30, 3e38
  )
  def test_extreme_blocks_are_finite(self, largest):
    """Zeros, subnormal scales and huge values: never NaN, never inf."""
    wide = np.zeros((4, 4), np.float32)
    wide[1, 2] = -largest
    values, scales = quantize(jnp.asarray(wide), (4, 4))
    back = np.asarray(dequantize(values, scales, jnp.float32, (4, 4)))
    # Below 1e-37 the result may be flushed to 0.
    assert_close(back, wide, atol=1e-37, rtol=1 / 16, name='block')
    if largest == 0:
      self.assertEqual(float(scales[0, 0]), 1.0)

  def test_largest_magnitude_never_overflows(self):
    """e4m3 has no inf: past 448 a cast gives NaN."""
    rng = np.random.default_rng(2)
    wide = jnp.asarray(rng.uniform(-1, 1, (256, 16)), jnp.float32)
    values, _ = quantize(wide, (1, 16))
    largest = np.abs(np.asarray(values).astype(np.float32)).max(axis=1)
    np.testing.assert_array_equal(largest, FP8_MAX)

  def test_published_block(self):
    self.assertEqual(BLOCK, (128, 128))
    values, scales = quantize(jnp.ones((576, 130)))
    self.assertEqual((values.shape, scales.shape), ((576, 130), (5, 2)))

  @parameterized.product(
    outputs=(4, 8, 30, 33, 64),  # under, exactly and over the tiles of 8
    dtype=('f32', 'bf16'),
  )
  def test_matmul_equals_dequantised(self, outputs, dtype):
    rng = np.random.default_rng(outputs)
    block, D = (4, 8), 21
    wide = {'f32': np.float32, 'bf16': ml_dtypes.bfloat16}[dtype]
    x = rng.normal(size=(5, D)).astype(wide)
    weights = rng.normal(size=(outputs, D)) * 2.0 ** rng.integers(
      -5, 6, (outputs, 1)
    )
    values, scales = quantize(jnp.asarray(weights, jnp.float32), block)
    actual = jax.jit(scaled_matmul, static_argnums=(3, 4))(
      x, values, scales, block, 2
    )
    self.assertEqual(actual.dtype, wide)
    exact = dequantize_f64(np.asarray(values), np.asarray(scales), block)
    exact = exact.astype(wide).astype(np.float64)  # the tile is in x's dtype
    expected = x.astype(np.float64) @ exact.T
    rtol = 1e-5 if dtype == 'f32' else 2**-8
    atol = 1e-5 * np.abs(expected).max()
    assert_close(actual, expected, atol=atol, rtol=rtol, name='product')

  def test_matmul_never_dequantises_all(self):
    """2048 x 512 weights are 4 MiB wide; a tile of 512 outputs is 1 MiB."""
    shape = jax.ShapeDtypeStruct
    lowered = jax.jit(scaled_matmul).lower(
      shape((8, 512), jnp.float32),
      shape((2048, 512), jnp.float8_e4m3fn),
      shape((16, 4), jnp.float32),
    )
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    limit = 4 * 512 * 512 + 200_000
    if jax.default_backend() == 'cpu':
      limit += 2 * 2048 * 512  # XLA slices e4m3 there as f16, all of it
    self.assertLess(temporary, limit)
    self.assertLess(limit, 4 * 2048 * 512)


if __name__ == '__main__':
  absltest.main()
