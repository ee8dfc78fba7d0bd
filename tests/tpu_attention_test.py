"""The TPU kernels of `topk_gather_attention`, interpreted on a CPU.

Every run detects races and fills memory that was not written with NaN. Pools
are NaN wherever no slot points, row 0 included: it is what -1 gathers.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from compare import assert_bit_equal, assert_close
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import choices, topk_gather_attention
from pallas_kernels.topk_gather_attention import dma_kernel, tpu
from pallas_kernels.topk_gather_attention.partial import (
  first_valid,
  normalize,
  partial_attention,
)

R, P, SCALE = 256, 32, 32**-0.5
OUT = {'f32': (2e-6, 2e-6), 'bf16': (8e-3, 2e-2), 'fp8': (8e-3, 2e-2)}
LSE = {'f32': (2e-6, 2e-6), 'bf16': (2e-5, 1e-5), 'fp8': (2e-5, 1e-5)}
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')


@functools.cache
def runner(call, **options):
  options = {'scale': SCALE, 'latent_width': R, **options}
  return jax.jit(functools.partial(call, interpret=INTERPRET, **options))


def pool(values, dtype, latent_width=R):
  """A pool in the op's layout and what it holds, in float64.

  Args:
    values: [M, R + P]; a NaN row is poison: all its bytes are NaN.
    dtype: 'f32', 'bf16' or 'fp8'.
    latent_width: R.

  Returns:
    rows, row_scales or None, numbers; latents of records not rounded.
  """
  M, width = values.shape
  if dtype != 'fp8':
    rows = np.zeros((M, -(-width // 128) * 128), np.float32)
    rows[:, :width] = values
    rows[np.isnan(values).any(axis=1)] = np.nan
    rows = rows.astype(np.float32 if dtype == 'f32' else ml_dtypes.bfloat16)
    return rows, None, rows[:, :width].astype(np.float64)
  groups = np.split(
    values[:, :latent_width], range(128, latent_width, 128), axis=1
  )
  scales = np.stack([np.abs(g).max(axis=1) / 448 for g in groups], axis=1)
  scales = scales.astype(np.float32)
  full = np.repeat(scales, 128, axis=1)[:, :latent_width]
  latent = (values[:, :latent_width] / full).astype(ml_dtypes.float8_e4m3fn)
  rope = values[:, latent_width:].astype(ml_dtypes.bfloat16)
  end = latent_width + 2 * rope.shape[1]
  rows = np.full((M, -(-end // 128) * 128), 255, np.uint8)  # NaN in both
  rows[:, :latent_width] = latent.view(np.uint8)
  rows[:, latent_width:end] = np.ascontiguousarray(rope).view(np.uint8)
  decoded = [latent.astype(np.float64) * full, rope.astype(np.float64)]
  return rows, scales, np.concatenate(decoded, axis=1)


def attend_f64(q, rows, slots, latent_width=R):
  """One row and one head at a time, in float64."""
  q = np.asarray(q).astype(np.float64)
  T, N, _ = q.shape
  out = np.zeros((T, N, latent_width))
  lse = np.full((T, N), -np.inf)
  for t in range(T):
    own = rows[slots[t][slots[t] >= 0]]
    for n in range(N if len(own) else 0):
      logits = SCALE * own @ q[t, n]
      p = np.exp(logits - logits.max())
      out[t, n] = p @ own[:, :latent_width] / p.sum()
      lse[t, n] = np.log(p.sum()) + logits.max()
  return out, lse


def make_case(dtype, *, T=4, N=3, k=24, M=64, width=R, rope=P, seed=0):
  """Random queries and slots with holes; row 1 has no slot, row 2 all k.

  Returns:
    The op's arguments as numpy arrays, and the numbers in the pool.
  """
  rng = np.random.default_rng(seed)
  slots = np.full((T, k), -1, np.int32)
  for t in range(T):
    count = {1: 0, 2: k}.get(t, rng.integers(1, k))
    where = rng.permutation(k)[:count]
    slots[t, where] = 1 + rng.permutation(M - 1)[:count]
  values = np.full((M, width + rope), np.nan, np.float32)
  used = np.unique(slots[slots >= 0])
  values[used] = rng.normal(size=(len(used), width + rope))
  rows, scales, numbers = pool(values, dtype, width)
  q = rng.normal(size=(T, N, width + rope))
  q = q.astype(np.float32 if dtype == 'f32' else ml_dtypes.bfloat16)
  return (q, rows, scales, slots), numbers


def check(test, case, out, lse, dtype, latent_width=R):
  (q, _, _, slots), numbers = case
  expected, expected_lse = attend_f64(q, numbers, slots, latent_width)
  atol, rtol = OUT[dtype]
  assert_close(out, expected, atol=atol, rtol=rtol, name='out')
  atol, rtol = LSE[dtype]
  assert_close(lse, expected_lse, atol=atol, rtol=rtol, name='lse')
  test.assertFalse(interpret_pallas_call.races.races_found)


class DenseKernelTest(parameterized.TestCase):
  @parameterized.product(dtype=('f32', 'bf16', 'fp8'))
  def test_matches_float64(self, dtype):
    """Slots in any order with holes, a row of none, a row of all."""
    case = make_case(dtype)
    out, lse = runner(tpu.topk_gather_attention)(*case[0])
    self.assertEqual((out.dtype, lse.dtype), (case[0][0].dtype, jnp.float32))
    check(self, case, out, lse, dtype)
    np.testing.assert_array_equal(np.asarray(out[1], np.float32), 0)

  def test_partial_group_of_latents(self):
    """Records whose latents end inside a group are decoded once gathered."""
    case = make_case('fp8', width=160, rope=8)
    run = runner(tpu.topk_gather_attention, latent_width=160)
    q, rows, scales, slots = case[0]
    numbers = case[1]
    numbers[:, :160] = numbers[:, :160].astype(ml_dtypes.bfloat16)
    out, lse = run(q, rows, scales, slots)
    check(self, (case[0], numbers), out, lse, 'fp8', 160)

  def test_blocks_and_parts(self):
    """T=21: blocks of 16 query rows in parts of 8, the last one ragged."""
    case = make_case('bf16', T=21)
    budget = 16 * 128 * 384 * 2
    run = runner(tpu.topk_gather_attention, block_bytes=budget)
    out, lse = run(*case[0])
    check(self, case, out, lse, 'bf16')

  def test_two_queries_a_step(self):
    """From 16 rows on a step takes two; a row's bits do not change."""
    (q, rows, scales, slots), _ = make_case('bf16')
    run = runner(tpu.topk_gather_attention)
    rest = (rows, scales, np.tile(slots[:1], (16, 1)))
    many = run(np.tile(q[:1], (16, 1, 1)), *rest)
    one = run(q[:1], rows, scales, slots[:1])
    for t in (0, 15):
      assert_bit_equal(many[0][t], one[0][0], name='out')
      assert_bit_equal(many[1][t], one[1][0], name='lse')

  @parameterized.product(dtype=('bf16', 'fp8'))
  def test_known_fault_24_nan_in_every_row_not_selected(self, dtype):
    """13 rows in pages of 4, k=16: equal to a clean pool, bit for bit."""
    rng = np.random.default_rng(24)
    pages = np.array([3, 6, 1, 4])  # of 8; page 0 is the null page
    slots = (pages[:, None] * 4 + np.arange(4)).reshape(-1)[:13]
    slots = np.concatenate([slots, np.full(3, -1)]).astype(np.int32)[None]
    clean = rng.normal(size=(32, R + P)).astype(np.float32)
    dirty = np.full_like(clean, np.nan)
    dirty[slots[0, :13]] = clean[slots[0, :13]]
    q = rng.normal(size=(1, 3, R + P)).astype(ml_dtypes.bfloat16)
    for call in (tpu.topk_gather_attention, _partial):
      results = [
        runner(call)(q, *pool(values, dtype)[:2], slots)
        for values in (dirty, clean)
      ]
      for a, b in zip(*results):
        self.assertTrue(np.isfinite(np.asarray(a, np.float32)).all())
        assert_bit_equal(a, b, name=f'{call}')

  def test_nan_in_a_selected_row_shows(self):
    (q, rows, scales, slots), _ = make_case('bf16')
    rows[slots[2, 0], 3] = np.nan
    for call in (tpu.topk_gather_attention, _partial):
      out = np.asarray(runner(call)(q, rows, scales, slots)[0], np.float32)
      self.assertTrue(np.isnan(out[2]).all())
      self.assertTrue((out[1] == 0).all())

  def test_by_name_and_backward(self):
    """The public call under 'interpret': values and gradients as 'xla'."""
    (q, rows, _, slots), _ = make_case('f32', T=3)
    rows = np.nan_to_num(rows)

    @functools.partial(jax.jit, static_argnames='name')
    def loss(q, rows, name):
      out, lse = topk_gather_attention(
        q, rows, None, slots, scale=SCALE, latent_width=R, implementation=name
      )
      seen = jnp.where(lse > -jnp.inf, lse, 0)
      return jnp.sum(out**2) + jnp.sum(jnp.sin(seen))

    both = [
      jax.value_and_grad(loss, argnums=(0, 1))(q, rows, name=name)
      for name in ('interpret', 'xla')
    ]
    for a, b in zip(jax.tree.leaves(both[0]), jax.tree.leaves(both[1])):
      assert_close(a, b, atol=2e-5, rtol=2e-5, name='loss and gradients')
    ran = {c.implementation for c in choices() if 'gather_att' in c.op}
    self.assertLessEqual({'interpret', 'xla'}, ran)

  def test_refuses(self):
    (q, rows, _, slots), _ = make_case('bf16')
    call = functools.partial(
      topk_gather_attention, scale=1.0, latent_width=R, implementation='tpu'
    )
    with self.assertRaisesRegex(NotImplementedError, r'\(64, 300\).*"xla"'):
      call(q, rows[:, :300], None, slots)
    many = np.zeros((len(q), 40_000), np.int32)
    with self.assertRaisesRegex(NotImplementedError, 'k=40000.*in VMEM'):
      call(q, rows, None, many)
    call = functools.partial(
      partial_attention, scale=1.0, latent_width=R, implementation='tpu'
    )
    count = np.zeros(len(q), np.int32)
    with self.assertRaisesRegex(NotImplementedError, r'multiple of 2 rows'):
      call(q, rows[:63], None, slots, count)

  @parameterized.product(dtype=('bf16', 'fp8'), k=(2048, 100))
  @pytest.mark.long
  def test_real_widths(self, dtype, k):
    """64 heads, 512 + 64 features, 2048 of 4096 rows."""
    case = make_case(dtype, T=3, N=64, k=k, M=4096, width=512, rope=64)
    run = runner(tpu.topk_gather_attention, latent_width=512)
    out, lse = run(*case[0])
    check(self, case, out, lse, dtype, 512)
    out, lse = runner(_partial, latent_width=512)(*case[0])
    check(self, case, out, lse, dtype, 512)


def _partial(q, rows, scales, slots, **options):
  """`normalize` of the kernel with dynamic counts."""
  slots, count = first_valid(slots)
  parts = tpu.partial_attention(q, rows, scales, slots, count, **options)
  return normalize(*parts)


class DmaKernelTest(parameterized.TestCase):
  @parameterized.product(dtype=('f32', 'bf16', 'fp8'))
  def test_matches_float64(self, dtype):
    """Counts of 0, of a part of a group of copies, and of all."""
    case = make_case(dtype)
    out, lse = runner(_partial)(*case[0])
    check(self, case, out, lse, dtype)

  def test_parts_are_what_they_say(self):
    """acc, m and l separately; an empty row gives 0, -inf and 0."""
    (q, rows, scales, slots), numbers = make_case('f32')
    slots, count = (np.asarray(x) for x in first_valid(slots))
    run = runner(tpu.partial_attention)
    acc, m, total = run(q, rows, scales, slots, count)
    own = numbers[slots[2]]
    logits = SCALE * np.einsum('nd,kd->nk', q[2].astype(np.float64), own)
    top = logits.max(axis=1)
    p = np.exp(logits - top[:, None])
    close = functools.partial(assert_close, atol=5e-5, rtol=5e-6)
    close(m[2], top, name='m')
    close(total[2], p.sum(axis=1), name='l')
    close(acc[2], p @ own[:, :R], name='acc')
    for x, empty in ((acc, 0), (m, -np.inf), (total, 0)):
      np.testing.assert_array_equal(x[1], empty)

  @parameterized.product(counts=((40, 0, 33, 16), (0, 0, 17, 0)))
  def test_chunks_of_16(self, counts):
    """Counts round every edge of a chunk; buffers swap across rows."""
    rng = np.random.default_rng(sum(counts))
    T, k, M = len(counts), 64, 128
    slots = np.stack([rng.permutation(M)[:k] for _ in counts])
    slots = np.where(np.arange(k) < np.array(counts)[:, None], slots, -1)
    slots = slots.astype(np.int32)
    values = np.full((M, R + P), np.nan, np.float32)
    used = np.unique(slots[slots >= 0])
    values[used] = rng.normal(size=(len(used), R + P))
    rows, _, numbers = pool(values, 'bf16')
    q = rng.normal(size=(T, 16, R + P)).astype(ml_dtypes.bfloat16)
    parts = dma_kernel.partials(
      jnp.asarray(q),
      jnp.asarray(rows),
      jnp.asarray(slots),
      jnp.asarray(counts, jnp.int32),
      None,
      scale=SCALE,
      latent_width=R,
      rope_width=P,
      interpret=INTERPRET,
      chunk=16,
    )
    case = (q, rows, None, slots), numbers
    check(self, case, *normalize(*parts), 'bf16')

  def test_holes_within_the_count(self):
    """-1 and ids beyond the pool before `count` are masked, not read."""
    (q, rows, scales, slots), numbers = make_case('bf16')
    count = np.full(len(q), slots.shape[1], np.int32)
    beyond = np.where(slots < 0, len(rows) + 5, slots).astype(np.int32)
    parts = partial_attention(
      q,
      rows,
      scales,
      beyond,
      count,
      scale=SCALE,
      latent_width=R,
      implementation='interpret',
    )
    expected = attend_f64(q, numbers, slots)
    for a, e, name in zip(normalize(*parts), expected, ('out', 'lse')):
      assert_close(a, e, atol=8e-3, rtol=2e-2, name=name)

  def test_only_counted_rows_are_copied(self):
    """The loop's length follows the count, not k: NaN beyond is not seen."""
    (q, rows, scales, slots), numbers = make_case('bf16')
    slots, count = (np.asarray(x) for x in first_valid(slots))
    short = np.minimum(count, 8)
    run = runner(tpu.partial_attention)
    rows = rows.copy()
    late = np.setdiff1d(slots[2, 8:], slots[[0, 2, 3], :8])
    rows[late] = np.nan
    out, lse = normalize(*run(q, rows, scales, slots, short))
    kept = np.where(np.arange(slots.shape[1]) < 8, slots, -1)
    check(self, ((q, rows, scales, kept), numbers), out, lse, 'bf16')


if __name__ == '__main__':
  absltest.main()
