"""Norms, RoPE and linear maps against numpy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_bit_equal, assert_close
from model.small_layers import DTYPES, THETA, build, rotate, wide

from glm_jax.layers import (
  Init,
  Linear,
  Mlp,
  layer_norm,
  rms_norm,
  swiglu,
)
from glm_jax.param import param
from glm_jax.rope import apply_rope, inverse_frequencies, rope_tables
from pallas_kernels.block_scale import dequantize


class NormTest(parameterized.TestCase):
  @parameterized.product(dtype=('f32', 'bf16'), scale=(1.0, 1e-3, 300.0))
  def test_rms_norm(self, dtype, scale):
    rng = np.random.default_rng(0)
    x = (scale * rng.normal(size=(4, 96))).astype(DTYPES[dtype])
    weight = rng.uniform(-0.07, 1.81, 96).astype(DTYPES[dtype])
    actual = jax.jit(rms_norm)(x, weight, 1e-5)
    self.assertEqual(actual.dtype, x.dtype)
    mean = np.mean(wide(x) ** 2, axis=-1, keepdims=True)
    expected = wide(x) / np.sqrt(mean + 1e-5) * wide(weight)
    rtol = 2e-6 if dtype == 'f32' else 2**-8
    assert_close(actual, expected, atol=1e-6, rtol=rtol, name='rms_norm')

  @parameterized.product(dtype=('f32', 'bf16'), offset=(0.0, 30.0))
  def test_layer_norm(self, dtype, offset):
    """A mean far from zero: statistics must not be bf16."""
    rng = np.random.default_rng(1)
    x = (offset + rng.normal(size=(4, 128))).astype(DTYPES[dtype])
    weight = rng.uniform(0.5, 2, 128).astype(np.float32)
    bias = rng.normal(size=128).astype(np.float32)
    actual = jax.jit(layer_norm)(x, weight, bias, 1e-6)
    self.assertEqual(actual.dtype, x.dtype)
    centred = wide(x) - wide(x).mean(axis=-1, keepdims=True)
    variance = np.mean(centred**2, axis=-1, keepdims=True)
    expected = centred / np.sqrt(variance + 1e-6) * wide(weight) + wide(bias)
    rtol = 1e-5 if dtype == 'f32' else 2**-8
    assert_close(actual, expected, atol=1e-5, rtol=rtol, name='layer_norm')

  def test_eps_counts(self):
    """Of a row whose variance is eps, half of the result is eps."""
    x = np.float32([[1e-3, -1e-3]])
    one, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    half = np.float64([[1, -1]]) / np.sqrt(2)
    actual = layer_norm(x, one, zero, 1e-6)
    assert_close(actual, half, atol=0, rtol=1e-6, name='layer_norm')
    actual = rms_norm(x, one, 1e-6)
    assert_close(actual, half, atol=0, rtol=1e-6, name='rms_norm')

  def test_known_fault_11_dtype_of_norm_parameters(self):
    """bf16 input [4, 128]: float32 and bf16 parameters agree."""
    rng = np.random.default_rng(11)
    x = jnp.asarray(rng.normal(size=(4, 128)), jnp.bfloat16)
    weight = jnp.asarray(rng.uniform(0.5, 2, 128), jnp.float32)
    bias = jnp.asarray(rng.normal(size=128), jnp.float32)
    narrow = weight.astype(jnp.bfloat16), bias.astype(jnp.bfloat16)
    run = jax.jit(layer_norm)
    ours = run(x, weight, bias, 1e-6)
    theirs = run(x, *narrow, 1e-6)
    self.assertEqual((ours.dtype, theirs.dtype), (jnp.bfloat16, jnp.bfloat16))
    assert_close(ours, theirs, atol=2**-6, rtol=2**-6, name='layer_norm')
    # The same numbers in either dtype give the same bits.
    widened = [a.astype(jnp.float32) for a in narrow]
    assert_bit_equal(run(x, *widened, 1e-6), theirs, name='layer_norm')


class RopeTest(parameterized.TestCase):
  @parameterized.product(
    shape=((5, 8), (5, 3, 8), (5, 3, 20)), dtype=('f32', 'bf16')
  )
  def test_pairs_turn_as_complex_numbers(self, shape, dtype):
    """Interleaved, the first 8 features only, in place; -1 counts as 0."""
    rng = np.random.default_rng(2)
    positions = np.int32([0, 1, 17, 900, -1])
    x = rng.normal(size=shape).astype(DTYPES[dtype])
    cos, sin = rope_tables(positions, 8, THETA)
    self.assertEqual((cos.dtype, cos.shape), (jnp.float32, (5, 4)))
    actual = jax.jit(apply_rope)(x, cos, sin)
    self.assertEqual(actual.dtype, x.dtype)
    expected = rotate(x, positions, THETA, 8)
    atol, rtol = (2e-4, 1e-5) if dtype == 'f32' else (1e-3, 2**-8)
    assert_close(actual, expected, atol=atol, rtol=rtol, name='rotated')
    passed = np.asarray(actual)[..., 8:]
    assert_bit_equal(passed, x[..., 8:], name='passed through')
    for row in (0, 4):
      assert_bit_equal(actual[row], x[row], name='position 0')

  def test_dot_products_depend_on_the_distance(self):
    rng = np.random.default_rng(3)
    q, k = rng.normal(size=(2, 8)).astype(np.float32)
    positions = np.int32([3, 10, 103, 110])
    cos, sin = rope_tables(positions, 8, 100.0)
    turn = jax.jit(apply_rope)
    turned_q = turn(np.tile(q, (4, 1)), cos, sin)
    turned_k = turn(np.tile(k, (4, 1)), cos, sin)
    dots = wide(turned_q) @ wide(turned_k).T
    assert_close(dots[1, 0], dots[3, 2], atol=1e-4, rtol=0, name='distance 7')
    self.assertGreater(abs(dots[1, 0] - dots[0, 0]), 1e-2)

  @parameterized.parameters(2047, 202_751, 1_048_575)
  def test_known_fault_25_phases_at_a_million(self, position):
    """float32 phases with the reference's association, 64 dims.

    The table equals cos and sin of fl32(position * fl32(frequency)) to
    1e-7. Against exact phases it is off by 4e-5, 4e-3 and 9e-3: an
    implementation with another association differs by that much.
    """
    positions = np.int32([position])
    for run in (rope_tables, jax.jit(rope_tables, static_argnums=(1, 2))):
      cos, sin = run(positions, 64, THETA)
      exponents = np.arange(0, 64, 2, dtype=np.float32) / np.float32(64)
      powers = np.float32(THETA ** exponents.astype(np.float64))
      phases = np.float32(position) * (np.float32(1) / powers)
      self.assertEqual(phases.dtype, np.float32)
      assert_close(cos[0], np.cos(wide(phases)), atol=1e-7, rtol=0, name='cos')
      assert_close(sin[0], np.sin(wide(phases)), atol=1e-7, rtol=0, name='sin')
    exact = position * THETA ** (-np.arange(0, 64, 2) / 64)
    off = np.abs(wide(cos[0]) - np.cos(exact)).max()
    limit = {2047: 1e-4, 202_751: 1e-2, 1_048_575: 2e-2}[position]
    self.assertLess(off, limit)

  @parameterized.parameters(8e6, 1e6)
  def test_known_fault_25_frequencies_of_torch(self, theta):
    """The frequencies are torch's own, bit for bit."""
    try:
      import torch
    except ImportError:
      self.skipTest('torch is not installed')
    exponents = torch.arange(0, 64, 2, dtype=torch.int64).float() / 64
    expected = (1.0 / (theta**exponents)).numpy()
    actual = inverse_frequencies(64, theta)
    assert_bit_equal(actual, expected, name='frequencies')
    positions = np.int32([2047, 202_751, 1_048_575])
    cos, sin = rope_tables(positions, 64, theta)
    phases = torch.tensor(positions).float()[:, None] * torch.tensor(expected)
    assert_close(cos, phases.cos().numpy(), atol=2e-7, rtol=0, name='cos')
    assert_close(sin, phases.sin().numpy(), atol=2e-7, rtol=0, name='sin')


class LinearTest(parameterized.TestCase):
  @parameterized.product(dtype=('f32', 'bf16'))
  def test_wide_weights(self, dtype):
    init = Init(dtype=jnp.dtype(DTYPES[dtype]), std=1.0)
    linear = build(Linear, 24, 10, (None, None), init)
    kernel = linear.kernel[...]
    self.assertEqual((kernel.shape, kernel.dtype), ((10, 24), init.dtype))
    x = np.random.default_rng(0).normal(size=(3, 24)).astype(DTYPES[dtype])
    expected = wide(x) @ wide(kernel).T
    actual = linear(x)
    self.assertEqual(actual.dtype, x.dtype)
    rtol = 1e-6 if dtype == 'f32' else 2**-8
    assert_close(actual, expected, atol=1e-5, rtol=rtol, name='linear')
    # `wide` keeps float32 even from bf16 operands.
    actual = linear.wide(x)
    self.assertEqual(actual.dtype, jnp.float32)
    assert_close(actual, expected, atol=2e-5, rtol=1e-6, name='wide')

  @parameterized.product(dtype=('f32', 'bf16'), outputs=(7, 16, 150))
  def test_fp8_equals_its_dequantised_weights(self, dtype, outputs):
    """Odd last blocks; 150 outputs are two tiles of 64 and a rest."""
    block = (16, 8)
    init = Init(jnp.dtype(DTYPES[dtype]), 1.0, fp8_block=block)
    linear = build(Linear, 21, outputs, (None, None), init)
    self.assertEqual(linear.kernel.dtype, jnp.float8_e4m3fn)
    self.assertEqual(linear.scale.shape, (-(-outputs // 16), 3))
    w = dequantize(linear.kernel[...], linear.scale[...], init.dtype, block)
    x = np.random.default_rng(1).normal(size=(5, 21)).astype(DTYPES[dtype])
    actual = jax.jit(lambda linear, x: linear(x))(linear, x)
    self.assertEqual(actual.dtype, x.dtype)
    rtol = 1e-6 if dtype == 'f32' else 2**-8
    assert_close(actual, wide(x) @ wide(w).T, atol=2e-5, rtol=rtol, name='fp8')
    with self.assertRaisesRegex(ValueError, r'wide\(\) needs weights that'):
      linear.wide(x)

  def test_fresh_weights(self):
    """Normal with the asked deviation; fp8 keeps them to one part in 16."""
    key = jax.random.key(1)
    plain = Linear(key, 40, 50, (None, 'embed'), Init(std=0.3))
    w = wide(plain.kernel[...])
    assert_close(w.std(), 0.3, atol=0.02, rtol=0, name='deviation')
    init = Init(std=0.3, fp8_block=(16, 8))
    linear = Linear(key, 40, 50, (None, 'embed'), init)
    self.assertEqual(linear.kernel.axes, (None, 'embed'))
    self.assertEqual(linear.scale.axes, (None, None))
    back = dequantize(
      linear.kernel[...], linear.scale[...], jnp.float32, (16, 8)
    )
    assert_close(back, w, atol=1e-3, rtol=1 / 16, name='fp8 weights')
    kept = Linear(key, 40, 50, (None, 'embed'), init, fp8=False)
    assert_bit_equal(kept.kernel[...], plain.kernel[...], name='kept wide')

  @parameterized.product(dtype=('f32', 'bf16'))
  def test_swiglu_mlp(self, dtype):
    init = Init(jnp.dtype(DTYPES[dtype]), 0.3)
    mlp = build(Mlp, 16, 24, init)
    x = np.random.default_rng(2).normal(size=(5, 16)).astype(DTYPES[dtype])
    gate = wide(x) @ wide(mlp.gate.kernel[...]).T
    up = wide(x) @ wide(mlp.up.kernel[...]).T
    hidden = gate / (1 + np.exp(-gate)) * up
    expected = hidden @ wide(mlp.down.kernel[...]).T
    atol = 1e-5 if dtype == 'f32' else 0.03
    actual = jax.jit(lambda mlp, x: mlp(x))(mlp, x)
    assert_close(actual, expected, atol=atol, rtol=2**-7, name='mlp')

  def test_swiglu_is_float32_inside(self):
    gate = jnp.asarray([[3.0, -3.0, 0.5]], jnp.bfloat16)
    up = jnp.asarray([[1.25, -2.0, 7.0]], jnp.bfloat16)
    exact = wide(gate) / (1 + np.exp(-wide(gate))) * wide(up)
    expected = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert_bit_equal(swiglu(gate, up), expected, name='swiglu')

  def test_parameters_name_their_axes(self):
    made = param(None, (2, 3), ('embed', None), jnp.float32, fill=2.0)
    self.assertEqual(made.axes, ('embed', None))
    np.testing.assert_array_equal(np.asarray(made[...]), 2.0)
    with self.assertRaisesRegex(ValueError, r"axes=\('embed',\) must name"):
      param(None, (2, 3), ('embed',), jnp.float32)


if __name__ == '__main__':
  absltest.main()
