"""The TPU kernel of `grouped_matmul`, interpreted on a CPU.

Every run detects races and fills memory that was not written with NaN.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_bit_equal, assert_close
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import choices, grouped_matmul
from pallas_kernels.block_scale import BLOCK, quantize, scaled_matmul
from pallas_kernels.grouped_matmul import tpu

F, D, L = 160, 256, 2  # the last block of outputs is partial


def run(x, weights, scales, layer, sizes, **options):
  return tpu.grouped_matmul(
    jnp.asarray(x),
    weights,
    scales,
    layer,
    jnp.asarray(sizes, jnp.int32),
    scale_block=BLOCK,
    interpret=pltpu.InterpretParams(
      detect_races=True, uninitialized_memory='nan'
    ),
    **options,
  )


@functools.cache
def pool(experts, kind):
  """Weights [L, E, F, D] as float64, as the op takes them, and scales."""
  rng = np.random.default_rng(experts)
  weights = rng.normal(size=(L, experts, F, D)) * 0.1
  if kind == 'fp8':
    values, scales = quantize(jnp.asarray(weights, jnp.float32))
    full = np.repeat(np.repeat(np.asarray(scales), 128, -2), 128, -1)
    wide = np.asarray(values).astype(np.float64) * full[..., :F, :D]
    return wide, values, scales
  values = jnp.asarray(weights, jnp.float32 if kind == 'f32' else jnp.bfloat16)
  return np.asarray(values).astype(np.float64), values, None


def expected(x, wide, layer, sizes):
  """Each row times its own expert's weights; rows of nobody are 0."""
  out = np.zeros((len(x), F))
  start = 0
  for expert, size in enumerate(sizes):
    rows = np.asarray(x[start : start + size]).astype(np.float64)
    out[start : start + size] = rows @ wide[layer, expert].T
    start += size
  return out


def rows(seed, count, dtype):
  return np.random.default_rng(seed).normal(size=(count, D)).astype(dtype)


class TpuGroupedMatmulTest(parameterized.TestCase):
  @parameterized.product(
    kind=('f32', 'bf16', 'fp8'),
    sizes=(
      (0, 7, 0, 1, 24, 0),
      (0, 0, 0, 0, 0, 40),  # all rows to one expert, the last
      (150, 0, 0, 0, 0, 0),
      (127, 1, 1, 127, 0, 0),  # around the edge of a tile of 128
      (128, 0, 128, 1, 0, 0),
      (129, 0, 0, 126, 2, 0),
      (1, 0, 0, 0, 0, 0),
    ),
  )
  def test_matches_float64(self, kind, sizes):
    """NaN in every expert that must not be read, and in the other layer."""
    dtype = np.float32 if kind == 'f32' else ml_dtypes.bfloat16
    x = rows(0, sum(sizes), dtype)
    wide, values, scales = pool(6, kind)
    unread = np.ones((L, 6), bool)
    unread[1] = np.array(sizes) == 0
    poisoned = jnp.where(unread[:, :, None, None], jnp.nan, values)
    if scales is not None:
      scales = jnp.where(unread[:, :, None, None], jnp.nan, scales)
    actual = run(x, poisoned.astype(values.dtype), scales, 1, sizes)
    self.assertEqual(actual.dtype, dtype)
    assert_close(
      actual,
      expected(x, wide, 1, sizes),
      atol=2e-5,
      rtol=1e-6 if kind == 'f32' else 2**-8,
      name='out',
    )

  @parameterized.product(kind=('bf16', 'fp8'))
  def test_many_experts_of_few_rows(self, kind):
    """64 experts, 40 rows: most experts have none, tiles are shared."""
    rng = np.random.default_rng(3)
    sizes = np.bincount(rng.integers(0, 64, 40), minlength=64)
    x = rows(4, 40, ml_dtypes.bfloat16)
    wide, values, scales = pool(64, kind)
    actual = run(x, values, scales, 0, sizes)
    want = expected(x, wide, 0, sizes)
    assert_close(actual, want, atol=2e-5, rtol=2**-8, name='out')

  def test_every_e4m3_number_is_read_exactly(self):
    """All 254 finite values, subnormals too, each alone in a sum."""
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN
    values = codes.view(ml_dtypes.float8_e4m3fn)
    weights = np.zeros((1, 1, 256, 128), ml_dtypes.float8_e4m3fn)
    weights[0, 0, :, 5] = values
    x = np.zeros((8, 128), ml_dtypes.bfloat16)
    x[:, 5] = 1
    scales = jnp.ones((1, 1, 2, 1))
    actual = run(x, jnp.asarray(weights), scales, 0, [8])
    want = np.broadcast_to(values.astype(np.float32), (8, 256))
    assert_close(actual, want, atol=0, rtol=0, name='out')

  @parameterized.parameters(1, 8, 130)
  def test_dense_matmul(self, count):
    """576 outputs, as the latents' projection has: a partial block."""
    x = rows(8, count, ml_dtypes.bfloat16)
    weights = np.random.default_rng(9).normal(size=(576, D))
    values, scales = quantize(jnp.asarray(weights, jnp.float32))
    full = np.repeat(np.repeat(np.asarray(scales), 128, 0), 128, 1)
    wide = np.asarray(values).astype(np.float64) * full[:576]
    actual = tpu.scaled_matmul(
      jnp.asarray(x),
      values,
      scales,
      BLOCK,
      interpret=pltpu.InterpretParams(
        detect_races=True, uninitialized_memory='nan'
      ),
    )
    want = x.astype(np.float64) @ wide.T
    assert_close(actual, want, atol=2e-5, rtol=2**-8, name='out')

  def test_dense_matmul_by_name(self):
    x = jnp.asarray(rows(10, 8, ml_dtypes.bfloat16))
    values, scales = quantize(jnp.ones((256, D)))
    plain = scaled_matmul(x, values, scales)
    kernel = scaled_matmul(x, values, scales, implementation='interpret')
    assert_close(kernel, plain, atol=1e-4, rtol=2**-7, name='out')
    with self.assertRaisesRegex(ValueError, "implementation='mxu'"):
      scaled_matmul(x, values, scales, implementation='mxu')

  def test_scales_belong_to_their_own_block(self):
    """Each 128x128 block has a scale of its own, far from the others."""
    values = jnp.ones((1, 1, 384, 256), jnp.float8_e4m3fn)
    scales = 2.0 ** jnp.arange(6, dtype=jnp.float32).reshape(1, 1, 3, 2)
    x = np.zeros((2, 256), np.float32)
    x[0, 3] = x[1, 200] = 1
    actual = run(x, values, scales, 0, [2])
    want = np.repeat(np.asarray(scales)[0, 0].T, 128, axis=1)
    assert_close(actual, want, atol=0, rtol=0, name='out')

  def test_rows_of_nobody_are_zero(self):
    """Sizes that sum to less than M: tiles with and without other rows."""
    x = rows(5, 300, np.float32)
    wide, values, _ = pool(6, 'f32')
    for sizes in ((0, 5, 0, 0, 0, 3), (0,) * 6, (128, 0, 0, 0, 0, 0)):
      with self.subTest(str(sizes)):
        actual = run(x, values, None, 0, sizes)
        want = expected(x, wide, 0, sizes)
        assert_close(actual, want, atol=2e-5, rtol=1e-6, name='out')

  def test_a_row_with_nan_stays_alone(self):
    x = rows(6, 20, np.float32)
    wide, values, _ = pool(6, 'f32')
    sizes = (0, 9, 0, 11, 0, 0)
    clean = run(x, values, None, 0, sizes)
    x[4] = np.nan
    poisoned = run(x, values, None, 0, sizes)
    rest = np.arange(20) != 4
    assert_bit_equal(
      np.asarray(poisoned)[rest], np.asarray(clean)[rest], name='other rows'
    )

  def test_the_profiling_build_gives_the_same(self):
    x = rows(7, 40, ml_dtypes.bfloat16)
    _, values, scales = pool(6, 'fp8')
    sizes = (0, 9, 0, 11, 20, 0)
    usual = run(x, values, scales, 1, sizes)
    full = run(x, values, scales, 1, sizes, profile=True)
    assert_bit_equal(full, usual, name='out')

  @parameterized.parameters(
    ((5, 0, 3), 8, 8, [(0, 0, 0, 5), (2, 0, 5, 8)]),
    ((8, 8, 0), 16, 8, [(0, 0, 0, 8), (1, 1, 8, 16)]),
    ((9, 7, 0), 16, 8, [(0, 0, 0, 9), (0, 1, 0, 9), (1, 1, 9, 16)]),
    ((0, 0, 17), 17, 8, [(2, 0, 0, 17), (2, 1, 0, 17), (2, 2, 0, 17)]),
  )
  def test_visits(self, sizes, count, tile, want):
    """Each (expert, tile) pair once, in order; what follows has no rows."""
    visits = tpu.visit_list(jnp.asarray(sizes, jnp.int32), count, tile)
    expert, row_tile, start, end, first = (np.asarray(a) for a in visits)
    got = list(zip(*(a.tolist() for a in (expert, row_tile, start, end))))
    self.assertEqual(got[: len(want)], want)
    for visit in range(len(want), len(got)):
      self.assertEqual((start[visit], end[visit]), (0, 0))
      self.assertEqual(expert[visit], want[-1][0])  # nothing is fetched
    self.assertEqual(first.sum(), len(set(row_tile.tolist())))
    self.assertTrue((np.diff(row_tile) >= 0).all())

  @parameterized.parameters(
    (dict(D=200), 'multiples of 128'),
    (dict(F=64), 'at least 128 outputs'),
    (dict(block=(64, 128)), 'scale blocks'),
    (dict(dtype=jnp.float16), 'bf16 or f32'),
  )
  def test_what_the_kernel_does_not_take(self, change, message):
    shape = dict(D=256, F=256, block=BLOCK, dtype=jnp.bfloat16) | change
    x = jnp.ones((4, shape['D']), shape['dtype'])
    weights = jnp.ones((1, 2, shape['F'], shape['D']), jnp.float8_e4m3fn)
    scales = jnp.ones((1, 2, 4, 4))
    sizes = jnp.array([1, 3], jnp.int32)
    call = lambda implementation: grouped_matmul(
      x,
      weights,
      scales,
      0,
      sizes,
      scale_block=shape['block'],
      implementation=implementation,
    )
    with self.assertRaisesRegex(NotImplementedError, message):
      call('interpret')
    if shape['dtype'] == jnp.bfloat16 and shape['block'] == BLOCK:
      out = jax.jit(lambda: call(None))()  # traced, so both forms are
      self.assertEqual(out.shape, (4, shape['F']))
      reasons = [c.reason for c in choices() if c.op == 'grouped_matmul']
      self.assertTrue(any(message in reason for reason in reasons))


if __name__ == '__main__':
  absltest.main()
