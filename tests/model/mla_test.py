"""Both forms of MLA against numpy in float64."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_bit_equal, assert_close
from model.small_layers import DTYPES, THETA, make_mla, rotate, t1, wide

from glm_jax.layers import Init
from glm_jax.mla import expanded_attention
from glm_jax.published_config import config_from_published
from glm_jax.rope import rope_tables
from pallas_kernels import topk_gather_attention
from pallas_kernels.block_scale import dequantize


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
