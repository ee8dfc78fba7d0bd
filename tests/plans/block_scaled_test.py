"""Products with fp8 weights whose shards cut through blocks."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import plan_cases
import pytest
from absl.testing import absltest, parameterized
from compare import assert_close

from glm_jax import hlo
from glm_jax.layers import Init, Linear
from glm_jax.mla import Mla
from sharding import block_scaled, module_shardings, plan_named

# Of 8 x 8, while a rank holds 6 of 48 columns at context 8.
INIT = Init(fp8_block=(8, 8), std=0.3)
# Compilation is what these tests spend their time on.
quick = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)


def make(shape, **options):
  plan = plan_named(
    'replicated', plan_cases.config(), plan_cases.mesh(shape), **options
  )
  return plan, lambda m: jax.device_put(m, module_shardings(m, plan.mesh))


class ProductsTest(parameterized.TestCase):
  @parameterized.parameters(
    ((1, 8, 1), ('rank', 'embed'), False),
    ((2, 2, 2), ('embed', 'heads'), True),
    ((2, 2, 2), ('rank', 'embed'), True),
    ((1, 2, 4), ('embed', 'heads'), False),
  )
  def test_linear(self, shape, axes, split):
    layer = Linear(jax.random.key(0), 48, 72, axes, INIT)
    x = jax.random.normal(jax.random.key(1), (16, 48))
    plan, place = make(shape, min_rows=1 if split else 99)
    own = plan.weights(place(layer), 16)
    self.assertIsNotNone(own.products)
    self.assertIsNone(layer.products)
    out = jax.jit(lambda m, x: m(x))(own, x)
    assert_close(out, layer(x), atol=1e-5, rtol=1e-5, name='linear')

  def test_tiles_and_a_rest(self):
    layer = Linear(jax.random.key(0), 48, 72, ('rank', 'embed'), INIT)
    x = jax.random.normal(jax.random.key(1), (3, 48))
    scales = layer.scale[:, jnp.arange(48) // 8]
    with mock.patch.object(block_scaled, '_TILE', 48 * 8 * 2):
      out = block_scaled._product(x, layer.kernel[...], scales, 8)
    assert_close(out, layer(x), atol=1e-5, rtol=1e-5, name='tiles')

  def test_heads(self):
    self.check_heads((1, 8, 1), False)

  @parameterized.parameters(((2, 2, 2), True), ((1, 4, 2), False))
  @pytest.mark.long
  def test_heads_on_other_meshes(self, *case):
    self.check_heads(*case)

  def check_heads(self, shape, split):
    config = plan_cases.config()
    config = dataclasses.replace(
      config, mla=dataclasses.replace(config.mla, num_heads=4)
    )
    mla = quick(lambda key: Mla(key, config, INIT))(jax.random.key(0))
    c = config.mla
    q = jax.random.normal(
      jax.random.key(1), (16, 4, c.qk_nope_head_dim + c.qk_rope_head_dim)
    )
    attended = jax.random.normal(jax.random.key(2), (16, 4, c.kv_lora_rank))
    plan, place = make(shape, min_rows=1 if split else 99)
    own = plan.weights(place(mla), 16)
    run = quick(lambda m, q, a: (m.absorb(q), m.output(a)))
    wanted = run(mla, q, attended)
    for a, b in zip(run(own, q, attended), wanted, strict=True):
      assert_close(a, b, atol=1e-5, rtol=2e-5, name='heads')

  def test_one_sum_and_no_gather(self):
    """However many tiles; XLA's own partition moved weights at each."""
    layer = Linear(jax.random.key(0), 64, 2048, ('rank', 'embed'), INIT)
    plan, place = make((1, 8, 1))
    own = plan.weights(place(layer), 1)
    with mock.patch.object(block_scaled, '_TILE', 1024):
      lowered = jax.jit(lambda m, x: m(x)).lower(own, np.ones((1, 64)))
    text = lowered.compile().as_text()
    codes = [
      i.opcode
      for c in hlo.parse(text).computations.values()
      for i in c.instructions
    ]
    self.assertEqual(codes.count('all-reduce'), 1)
    self.assertIn('while', codes)
    self.assertFalse({'all-gather', 'all-to-all'} & set(codes))


if __name__ == '__main__':
  absltest.main()
