"""The GPU's grouped matmul, interpreted, against the reference.

Experts without rows hold NaN, in values and scales, and so do other layers.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import choices, grouped_matmul, triton
from pallas_kernels.arg_specs import arg_specs
from pallas_kernels.block_scale import BLOCK, quantize
from pallas_kernels.grouped_matmul import gpu, reference

DTYPES = {'bf16': jnp.bfloat16, 'f32': jnp.float32}


def case(sizes, dtype, *, fp8=False, F=48, D=80, rows=None, block=(16, 32)):
  """Arguments in layer 1 of 3; what nobody chose is NaN."""
  rng = np.random.default_rng(0)
  sizes = np.asarray(sizes, np.int32)
  x = rng.normal(size=(sizes.sum() if rows is None else rows, D))
  weights = rng.normal(size=(3, len(sizes), F, D)).astype(np.float32)
  weights *= 2.0 ** rng.integers(-4, 5, (3, len(sizes), F, 1))
  unread = np.ones(weights.shape[:2], bool)
  unread[1] = sizes == 0
  scales = None
  if fp8:
    weights, scales = quantize(jnp.asarray(weights), block)
    scales = jnp.where(unread[..., None, None], jnp.nan, scales)
  weights = jnp.where(unread[..., None, None], jnp.nan, weights)
  weights = weights.astype(jnp.float8_e4m3fn if fp8 else DTYPES[dtype])
  x = jnp.asarray(x, DTYPES[dtype])
  return x, weights, scales, jnp.int32(1), jnp.asarray(sizes)


def run(args, block=(16, 32), **options):
  """The layer is traced, as it is in a scanned model."""
  call = functools.partial(
    gpu.grouped_matmul, scale_block=block, interpret=True, **options
  )
  return np.asarray(jax.jit(call)(*args), np.float32)


def wanted(args, block=(16, 32)):
  return np.asarray(
    reference.grouped_matmul(*args, scale_block=block), np.float32
  )


class GpuMatmulTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('uneven_and_empty', [0, 17, 0, 3, 20, 0]),
    ('all_in_one', [0, 0, 37, 0]),
    ('all_in_the_last', [0, 0, 33]),
    ('one_row', [0, 1]),
    ('one_each', [1] * 19),
    ('whole_tiles', [32, 0, 16, 16]),
  )
  def test_equals_the_reference(self, sizes):
    args = case(sizes, 'bf16')
    got, want = run(args), wanted(args)
    self.assertTrue(np.isfinite(want).all())
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-3)

  @parameterized.product(dtype=('bf16', 'f32'), fp8=(False, True))
  def test_dtypes(self, dtype, fp8):
    args = case([0, 17, 0, 3, 20], dtype, fp8=fp8)
    got, want = run(args), wanted(args)
    # The reference rounds widened fp8 weights to bf16, the kernel nothing.
    close = 1e-5 if dtype == 'f32' else 2**-7 * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=close)

  def test_published_scale_blocks(self):
    """128x128, of which the last are partial; inputs in steps of 64."""
    args = case([2, 0, 9], 'f32', fp8=True, F=160, D=192, block=BLOCK)
    self.assertEqual(args[2].shape, (3, 3, 2, 2))
    for inputs in (16, 64):
      tiles = gpu.Tiles(16, 32, inputs, 4, 2)
      got = run(args, BLOCK, tiles=tiles)
      want = wanted(args, BLOCK)
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)

  def test_larger_tiles(self):
    args = case([70, 0, 1, 64, 5], 'bf16', D=64)
    want = wanted(args)
    for rows in (32, 64, 128):
      got = run(args, tiles=gpu.Tiles(rows, 16, 32, 4, 2))
      np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-3)

  def test_rows_of_nobody_become_zeros(self):
    args = case([5, 0, 18], 'bf16', rows=60)
    got = run(args)
    self.assertEqual(got.shape, (60, 48))
    self.assertFalse(got[23:].any())
    self.assertTrue(got[:23].any(axis=1).all())
    self.assertFalse(run(case([0, 0], 'bf16', rows=3)).any())

  def test_no_rows(self):
    args = case([0, 0], 'bf16')
    self.assertEqual(run(args).shape, (0, 48))

  @parameterized.product(tile=(16, 64), experts=(1, 5, 16))
  def test_there_are_tiles_enough(self, tile, experts):
    """Every row once, whatever the sizes; the worst ones need every tile."""
    rng = np.random.default_rng(tile)
    rows = 150
    worst = min(experts, rows) - 1
    cases = [np.array([rows - worst] + [1] * worst)]
    cases += [
      rng.multinomial(n, rng.dirichlet([0.3] * experts)) for n in (0, 70, rows)
    ]
    most = gpu.row_tiles(rows, experts, tile)
    padded = 1 << (experts - 1).bit_length()
    find = jax.jit(
      jax.vmap(
        lambda sizes, n: gpu._rows_of_tile(sizes, n, tile, rows),
        in_axes=(None, 0),
      )
    )
    for sizes in cases:
      full = np.pad(sizes, (0, padded - experts)).astype(np.int32)
      expert, first, end = (
        np.asarray(a) for a in find(full, jnp.arange(most + 3))
      )
      owner = np.full(rows, -1)
      for e, a, b in zip(expert, first, end):
        part = owner[a : min(a + tile, b)]
        self.assertTrue((part == -1).all(), 'a row twice')
        part[:] = e
      nobody = np.full(rows - sizes.sum(), padded)
      want = np.append(np.repeat(np.arange(experts), sizes), nobody)
      np.testing.assert_array_equal(owner, want)
      self.assertTrue((first[most:] >= end[most:]).all())

  def test_tiles_of_the_real_shapes(self):
    """Every shape has tiles that divide it and fit most experts' rows."""
    for spec in arg_specs(('grouped_matmul_in', 'grouped_matmul_out')):
      x, weights = spec.args[:2]
      M, (_, E, F, D) = x.shape[0], weights.shape
      tiles = gpu.choose_tiles(M, E, F, D, x.dtype, weights.dtype, BLOCK)
      with self.subTest(spec.name):
        self.assertEqual((F % tiles.outputs, D % tiles.inputs), (0, 0))
        self.assertBetween(tiles.rows, min(max(16, M // E), 64), 128)
        # Two programs' stages fit a processor of 228 KiB.
        stage = tiles.outputs * weights.dtype.itemsize + tiles.rows * 2
        stage *= tiles.inputs * tiles.stages
        self.assertLessEqual(2 * stage, 227 << 10)

  def test_glm_nano_is_taken(self):
    take = lambda F, D: gpu.choose_tiles(
      128, 16, F, D, jnp.bfloat16, jnp.bfloat16, BLOCK
    )
    self.assertEqual(take(48, 256)[:3], (16, 16, 128))
    self.assertEqual(take(256, 48)[:3], (16, 64, 16))

  def test_what_it_does_not_take_is_refused(self):
    x, weights, _, layer, sizes = case([2, 3], 'bf16', F=40)
    call = functools.partial(gpu.grouped_matmul, scale_block=BLOCK)
    with self.assertRaisesRegex(NotImplementedError, 'weights 40x80: mult'):
      call(x, weights, None, layer, sizes)
    with self.assertRaisesRegex(NotImplementedError, 'float32 with rows in bf'):
      call(x, weights.astype(jnp.float32), None, layer, sizes)
    with self.assertRaisesRegex(NotImplementedError, 'rows in float16'):
      call(x.astype(jnp.float16), weights, None, layer, sizes)
    args = case([2, 3], 'bf16', fp8=True, block=(16, 8))
    with self.assertRaisesRegex(NotImplementedError, r'scale blocks of \(16'):
      gpu.grouped_matmul(*args, scale_block=(16, 8))

  @parameterized.parameters((1, 256, True), (2, 256, False), (1, 128, False))
  def test_pools_whose_offsets_would_overflow(self, layers, experts, refused):
    """e4m3 pools of 3 GiB; those of 6 are counted in int64, 1.5 fits int32."""
    shape = jax.ShapeDtypeStruct
    args = (
      shape((32, 6144), jnp.bfloat16),
      shape((layers, experts, 2048, 6144), jnp.float8_e4m3fn),
      shape((layers, experts, 16, 48), jnp.float32),
      shape((), jnp.int32),
      shape((experts,), jnp.int32),
    )
    trace = functools.partial(gpu.grouped_matmul, scale_block=BLOCK)
    if refused:
      with self.assertRaisesRegex(NotImplementedError, r'pool of 3\.0 GiB'):
        jax.eval_shape(trace, *args)
    else:
      self.assertEqual(jax.eval_shape(trace, *args).shape, (32, 2048))

  def test_a_gpu_is_offered_the_kernel_or_xla(self):
    """Lowered for a GPU, the whole op; a width that is refused is XLA's."""
    for F, inside in ((48, True), (40, False)):
      args = case([2, 3], 'bf16', F=F)
      jax.eval_shape(grouped_matmul, *args)
      found = [c for c in choices() if c.op == 'grouped_matmul'][-1]
      self.assertEqual('gpu' in found.kernels, inside)
      if not inside:
        self.assertIn('weights 40x80', found.reason)
        with self.assertRaisesRegex(NotImplementedError, '40x80'):
          grouped_matmul(*args, implementation='gpu')
      got = grouped_matmul(*args)
      np.testing.assert_allclose(
        np.float32(got), wanted(args), rtol=2**-7, atol=1e-3
      )

  def test_gradients_are_those_of_every_other(self):
    """`backward.py` has the rule; the forward pass alone is the kernel's."""
    x, weights, _, _, sizes = case([2, 0, 3], 'f32', F=16, D=32)
    weights = jnp.nan_to_num(weights)

    def loss(x, weights, name):
      out = grouped_matmul(x, weights, None, 1, sizes, implementation=name)
      return jnp.sum(jnp.square(out / 64))

    interpreted = functools.partial(gpu.grouped_matmul, interpret=True)
    module = grouped_matmul.__globals__
    with mock.patch.dict(module['AVAILABLE'], gpu=interpreted):
      got = jax.grad(loss, (0, 1))(x, weights, 'gpu')
    want = jax.grad(loss, (0, 1))(x, weights, 'reference')
    for a, b in zip(got, want):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_jax_without_the_backend_leaves_it_to_xla():
  args = case([2, 3], 'bf16')
  with mock.patch.object(triton, '_backend', return_value=None):
    with pytest.raises(NotImplementedError, match='no Triton backend'):
      grouped_matmul(*args, implementation='gpu')


if __name__ == '__main__':
  absltest.main()
