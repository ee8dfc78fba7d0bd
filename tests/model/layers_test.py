"""Norms, RoPE, linear maps and both forms of MLA against numpy in float64."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_bit_equal, assert_close

from glm_jax.layers import (
  Init,
  Linear,
  Mlp,
  layer_norm,
  rms_norm,
  swiglu,
)
from glm_jax.mla import Mla, expanded_attention
from glm_jax.param import param
from glm_jax.published_config import config_from_published
from glm_jax.rope import apply_rope, inverse_frequencies, rope_tables
from pallas_kernels import topk_gather_attention
from pallas_kernels.block_scale import dequantize

DTYPES = {'f32': np.float32, 'bf16': ml_dtypes.bfloat16}
THETA = 8e6


def wide(x):
  return np.asarray(x).astype(np.float64)


def t1(**changes):
  """The attention of T1 (spec/known_faults.md): N=4, R=16, nope 24, P=8."""
  return config_from_published(
    {
      'num_hidden_layers': 1,
      'hidden_size': 64,
      'num_attention_heads': 4,
      'q_lora_rank': 32,
      'kv_lora_rank': 16,
      'qk_nope_head_dim': 24,
      'qk_rope_head_dim': 8,
      'v_head_dim': 32,
      **changes,
    }
  )


def build(module, *args, **kwargs):
  """A module with weights from numpy, which needs no compilation.

  Kernels are normal (standard deviation `init.std`), norm weights lie in
  [0.1, 2], and the fp8 scales of neighbouring blocks differ up to 64 times.
  """
  init = next(a for a in args if isinstance(a, Init))
  rng = np.random.default_rng(0)
  make = lambda key: module(key, *args, **kwargs)

  def fill(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    if '.scale' in f'.{name}':
      value = init.std / 100 * 2.0 ** rng.integers(-3, 4, leaf.shape)
    elif 'weight' in name:
      value = rng.uniform(0.1, 2, leaf.shape)
    elif leaf.dtype == jnp.float8_e4m3fn:
      value = np.clip(100 * rng.normal(size=leaf.shape), -448, 448)
    else:
      value = init.std * rng.normal(size=leaf.shape)
    return jnp.asarray(value.astype(leaf.dtype))

  return jax.tree_util.tree_map_with_path(
    fill, jax.eval_shape(make, jax.random.key(0))
  )


def make_mla(init, **changes):
  return build(Mla, t1(**changes), init)


def rotate(x, positions, theta, width):
  """Pairs as complex numbers: (x0 + i x1) * exp(i p theta^(-2j/P))."""
  x = wide(x).copy()
  freq = theta ** (-np.arange(0, width, 2) / width)
  turn = np.exp(1j * np.maximum(positions, 0)[:, None] * freq)
  turn = turn.reshape(len(x), *(1,) * (x.ndim - 2), width // 2)
  pairs = (x[..., 0:width:2] + 1j * x[..., 1:width:2]) * turn
  x[..., 0:width:2], x[..., 1:width:2] = pairs.real, pairs.imag
  return x


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


class MlaTest(parameterized.TestCase):
  def test_few_rows_of_a_gpu_are_padded(self):
    """Its branch has the values of the other one, which runs here."""
    mla = make_mla(Init(jnp.dtype('float32'), 0.1))
    rng = np.random.default_rng(5)
    x = rng.normal(size=(3, 64)).astype('f')
    cos, sin = rope_tables(jnp.arange(3), 8, THETA)

    def run():
      _, q, row = mla.project(x, cos, sin)
      q = mla.absorb(q)
      return q, row, mla.output(q[..., :16])

    expected = jax.jit(run)()
    taken = lambda *args, cuda, default: cuda(*args)
    with mock.patch('jax.lax.platform_dependent', taken):
      traced = str(jax.make_jaxpr(run)())
      actual = run()
    self.assertIn('4,8,56', traced)  # eight rows of whole heads, 24 + 32
    for a, b in zip(actual, expected):
      assert_close(a, b, atol=1e-5, rtol=1e-5, name='padded')

  def test_known_fault_20_scale_is_the_heads(self):
    """1/sqrt(nope + rope): 1/sqrt(32) of T1, 1/16 of GLM-5.2."""
    self.assertAlmostEqual(t1().mla.scale, 32**-0.5, places=15)
    self.assertEqual(config_from_published({}).mla.scale, 1 / 16)

  def expanded_f64(self, mla, q, rows, mask):
    """Per-head keys and values, in float64, from the published layout."""
    c = mla.config
    kernel = wide(mla.kv_b.kernel[...])
    out = np.zeros((len(q), c.num_heads, c.v_head_dim))
    up = c.qk_nope_head_dim + c.v_head_dim
    latent, rope = wide(rows)[:, : c.kv_lora_rank], wide(rows)[:, 16:]
    for n in range(c.num_heads):
      both = latent @ kernel[n * up : (n + 1) * up].T
      keys = np.concatenate([both[:, : c.qk_nope_head_dim], rope], axis=1)
      values = both[:, c.qk_nope_head_dim :]
      logits = wide(q)[:, n] @ keys.T / np.sqrt(24 + 8)
      for t in range(len(q)):
        if mask[t].any():
          own = logits[t][mask[t]]
          p = np.exp(own - own.max())
          out[t, n] = p @ values[mask[t]] / p.sum()
    return out

  def test_known_fault_20_absorbed_equals_expanded(self):
    """To 1e-5, over random subsets of rows; a row may see nothing."""
    rng = np.random.default_rng(20)
    T = 12
    mla = make_mla(Init(std=0.2))
    x = rng.normal(size=(T, 64)).astype(np.float32)
    cos, sin = rope_tables(np.arange(T, dtype=np.int32), 8, THETA)
    q, rows = jax.jit(lambda mla, x: mla.project(x, cos, sin)[1:])(mla, x)
    self.assertEqual(q.shape, (T, 4, 32))
    self.assertEqual(rows.shape, (T, 24))
    mask = np.tril(rng.uniform(size=(T, T)) < 0.6) | np.eye(T, dtype=bool)
    mask[5] = False
    slots = np.full((T, T), -1, np.int32)
    for t in range(T):
      slots[t, : mask[t].sum()] = np.flatnonzero(mask[t])

    @jax.jit
    def both(mla, q, rows):
      attended, _ = topk_gather_attention(
        mla.absorb(q),
        rows,
        None,
        slots,
        scale=mla.config.scale,
        latent_width=16,
      )
      values = mla._per_head('tr,vr->tv', attended, 1)
      expanded = expanded_attention(mla, q, rows, mask)
      return expanded, values, mla.output(attended)

    expanded, values, out = both(mla, q, rows)
    expected = self.expanded_f64(mla, q, rows, mask)
    self.assertGreater(np.abs(expected).max(), 0.3)
    assert_close(expanded, expected, atol=1e-5, rtol=0, name='expanded')
    assert_close(values, expected, atol=1e-5, rtol=0, name='absorbed')
    flat = expected.reshape(T, -1) @ wide(mla.o.kernel[...]).T
    self.assertGreater(np.abs(flat).max(), 0.3)
    assert_close(out, flat, atol=1e-5, rtol=1e-5, name='output')

  def test_projections(self):
    """What is cached: the normed latent, then the turned, unnormed key."""
    rng = np.random.default_rng(4)
    mla = make_mla(Init(std=0.2), latent_norm_eps=1e-5)
    c = mla.config
    norm = lambda x, w: (
      x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * wide(w)
    )
    x = rng.normal(size=(6, 64)).astype(np.float32)
    positions = np.int32([0, 1, 5, 70, 9, -1])
    q_latent, q, rows = jax.jit(
      lambda mla, x: mla.project(x, *rope_tables(positions, 8, THETA))
    )(mla, x)
    latent = norm(wide(x) @ wide(mla.q_a.kernel[...]).T, mla.q_norm.weight)
    assert_close(q_latent, latent, atol=1e-5, rtol=1e-5, name='q_latent')
    full = (latent @ wide(mla.q_b.kernel[...]).T).reshape(6, 4, 32)
    rope = rotate(full[..., 24:], positions, THETA, 8)
    expected = np.concatenate([full[..., :24], rope], axis=-1)
    assert_close(q, expected, atol=2e-5, rtol=1e-5, name='q')
    both = wide(x) @ wide(mla.kv_a.kernel[...]).T
    latent = norm(both[:, : c.kv_lora_rank], mla.kv_norm.weight)
    key = rotate(both[:, c.kv_lora_rank :], positions, THETA, 8)
    expected = np.concatenate([latent, key], axis=-1)
    assert_close(rows, expected, atol=2e-5, rtol=1e-5, name='rows')

  def test_known_fault_21_absorbed_product_accumulates_in_float32(self):
    """bf16 [8,4,192] x [512,4,192]: error below 4 * 2^-8, f32 in the HLO."""
    rng = np.random.default_rng(21)
    mla = make_mla(
      Init(jnp.dtype(jnp.bfloat16), std=1.0),
      kv_lora_rank=512,
      qk_nope_head_dim=192,
    )
    q = jnp.asarray(rng.normal(size=(8, 4, 200)), jnp.bfloat16)
    run = jax.jit(lambda mla, q: mla.absorb(q))
    actual = run(mla, q)
    self.assertEqual(actual.shape, (8, 4, 520))
    kernel = wide(mla.kv_b.kernel[...]).reshape(4, 192 + 32, 512)[:, :192]
    expected = np.einsum('tnd,ndr->tnr', wide(q)[..., :192], kernel)
    error = np.abs(wide(actual)[..., :512] - expected).max()
    self.assertLess(error / np.abs(expected).max(), 4 * 2**-8)
    assert_close(
      actual[..., :512], expected, atol=0.02, rtol=4 * 2**-8, name='absorbed'
    )
    assert_bit_equal(actual[..., 512:], q[..., 192:], name='rotary part')
    # Both products, and the score's own: no dot may end in bf16.
    attended = jnp.ones((8, 4, 512), jnp.bfloat16)
    texts = {
      'absorb': run.lower(mla, q).as_text(),
      'output': jax.jit(lambda mla, a: mla._per_head('tr,vr->tv', a, 1))
      .lower(mla, attended)
      .as_text(),
    }
    for name, text in texts.items():
      results = re.findall(
        r'stablehlo\.dot_general.*-> tensor<[\dx]*x(\w+)>', text
      )
      self.assertEqual(results, ['f32'], name)

  @parameterized.product(dtype=('f32', 'bf16'))
  def test_fp8_per_head_equals_dequantise_before_split(self, dtype):
    """56 rows a head, blocks of 16: blocks straddle parts and heads."""
    rng = np.random.default_rng(8)
    block = (16, 8)
    mla = make_mla(Init(jnp.dtype(DTYPES[dtype]), 0.2, fp8_block=block))
    kv_b = mla.kv_b
    self.assertEqual(kv_b.kernel.dtype, jnp.float8_e4m3fn)
    kernel = dequantize(kv_b.kernel[...], kv_b.scale[...], jnp.float32, block)
    both = wide(kernel).reshape(4, 56, 16)
    w_uk, w_uv = mla.up_projections()
    np.testing.assert_array_equal(wide(w_uk), both[:, :24])
    np.testing.assert_array_equal(wide(w_uv), both[:, 24:])
    both = wide(both.astype(DTYPES[dtype]))  # a head is decoded to x's dtype
    rtol = 1e-5 if dtype == 'f32' else 2**-8
    q = rng.normal(size=(5, 4, 32)).astype(DTYPES[dtype])
    actual = jax.jit(lambda mla, q: mla.absorb(q))(mla, q)
    expected = np.einsum('tnd,ndr->tnr', wide(q)[..., :24], both[:, :24])
    size = np.abs(expected).max()
    assert_close(
      actual[..., :16], expected, atol=1e-5 * size, rtol=rtol, name='absorbed'
    )
    a = rng.normal(size=(5, 4, 16)).astype(DTYPES[dtype])
    actual = jax.jit(lambda mla, a: mla._per_head('tr,vr->tv', a, 1))(mla, a)
    expected = np.einsum('tnr,nvr->tnv', wide(a), both[:, 24:])
    size = np.abs(expected).max()
    assert_close(actual, expected, atol=1e-5 * size, rtol=rtol, name='values')


if __name__ == '__main__':
  absltest.main()
