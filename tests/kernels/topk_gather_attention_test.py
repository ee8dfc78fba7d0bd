"""`topk_gather_attention` against a float64 softmax row by row, with poison.

Pools are NaN wherever no slot points, row 0 included: it is what a clipped
-1 would read.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_bit_equal, assert_close
from jax.experimental import checkify

from pallas_kernels import topk_gather_attention
from pallas_kernels.topk_gather_attention import decode_rows

IMPLEMENTATIONS = ('reference', 'xla')
R, P, SCALE = 160, 8, 32**-0.5  # R leaves a partial group of 128 latents
OUT = {'f32': (2e-6, 2e-6), 'bf16': (8e-3, 2e-2), 'fp8': (8e-3, 2e-2)}
LSE = {'f32': (2e-6, 2e-6), 'bf16': (2e-5, 1e-5), 'fp8': (2e-5, 1e-5)}


@functools.cache
def runner(implementation, **options):
  options = {'scale': SCALE, 'latent_width': R, **options}
  return jax.jit(
    functools.partial(
      topk_gather_attention, implementation=implementation, **options
    )
  )


def encode_rows(values, dtype):
  """A pool in the op's layout from [M, R + P] numbers, and what it decodes to.

  Args:
    values: [M, R + P]; a NaN row is poison: all its bytes are NaN.
    dtype: 'f32', 'bf16' or 'fp8'.

  Returns:
    rows, row_scales or None, and the numbers in float64.
  """
  wide = {'f32': np.float32, 'bf16': ml_dtypes.bfloat16}
  if dtype != 'fp8':
    rows = np.zeros((len(values), 256), np.float32)
    rows[:, : R + P] = values
    rows[np.isnan(values).any(axis=1)] = np.nan
    rows = rows.astype(wide[dtype])
    return rows, None, rows[:, : R + P].astype(np.float64)
  fp8 = ml_dtypes.float8_e4m3fn
  groups = [values[:, :128], values[:, 128:R]]
  scales = np.stack([np.abs(g).max(axis=1) / 448 for g in groups], axis=1)
  scales = scales.astype(np.float32)
  full = np.repeat(scales, 128, axis=1)[:, :R]
  latent = (values[:, :R] / full).astype(fp8)
  rope = values[:, R:].astype(ml_dtypes.bfloat16)
  rows = np.full((len(values), 256), 255, np.uint8)  # 0xff: NaN in both
  rows[:, :R] = latent.view(np.uint8)
  rows[:, R : R + 2 * P] = np.ascontiguousarray(rope).view(np.uint8)
  rounded = (latent.astype(np.float32) * full).astype(ml_dtypes.bfloat16)
  decoded = np.concatenate([rounded, rope], axis=1).astype(np.float64)
  return rows, scales, decoded


def attend_f64(q, rows, slots, scale=SCALE, latent_width=R):
  """One row and one head at a time, in float64."""
  q = np.asarray(q).astype(np.float64)
  T, N, _ = q.shape
  out = np.zeros((T, N, latent_width))
  lse = np.full((T, N), -np.inf)
  for t in range(T):
    own = rows[slots[t][slots[t] >= 0]]
    if not len(own):
      continue
    for n in range(N):
      logits = scale * own @ q[t, n]
      top = logits.max()
      p = np.exp(logits - top)
      out[t, n] = p @ own[:, :latent_width] / p.sum()
      lse[t, n] = np.log(p.sum()) + top
  return out, lse


def make_case(dtype, *, T=5, N=3, k=12, M=40, seed=0):
  """Random queries and slots with holes; row 1 has no slot at all.

  Returns:
    The op's arguments as numpy arrays, and the decoded pool.
  """
  rng = np.random.default_rng(seed)
  slots = np.full((T, k), -1, np.int32)
  for t in range(T):
    count = 0 if t == 1 else rng.integers(1, k + 1)
    where = rng.permutation(k)[:count]
    slots[t, where] = 1 + rng.permutation(M - 1)[:count]
  values = np.full((M, R + P), np.nan, np.float32)
  used = np.unique(slots[slots >= 0])
  values[used] = rng.normal(size=(len(used), R + P))
  rows, scales, decoded = encode_rows(values, dtype)
  q_dtype = np.float32 if dtype == 'f32' else ml_dtypes.bfloat16
  q = rng.normal(size=(T, N, R + P)).astype(q_dtype)
  return (q, rows, scales, slots), decoded


class TopkGatherAttentionTest(parameterized.TestCase):
  @parameterized.product(
    implementation=IMPLEMENTATIONS, dtype=('f32', 'bf16', 'fp8')
  )
  def test_matches_float64(self, implementation, dtype):
    """Slots in any order with holes; unread rows are NaN."""
    args, decoded = make_case(dtype)
    out, lse = runner(implementation)(*args)
    self.assertEqual(out.dtype, args[0].dtype)
    self.assertEqual(lse.dtype, jnp.float32)
    expected, expected_lse = attend_f64(args[0], decoded, args[3])
    atol, rtol = OUT[dtype]
    assert_close(out, expected, atol=atol, rtol=rtol, name='out')
    atol, rtol = LSE[dtype]
    assert_close(lse, expected_lse, atol=atol, rtol=rtol, name='lse')
    np.testing.assert_array_equal(np.asarray(out[1], np.float32), 0)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_one_slot_is_that_row(self, implementation):
    """One key: the output is its latent and lse its logit, base e."""
    args, decoded = make_case('f32')
    q, rows, scales, slots = args
    slots = np.where(slots == slots.max(axis=1, keepdims=True), slots, -1)
    out, lse = runner(implementation)(q, rows, scales, slots)
    for t in (0, 2, 3, 4):
      row = decoded[slots[t].max()]
      expected = np.broadcast_to(row[:R], (3, R))
      assert_close(out[t], expected, atol=1e-6, rtol=1e-6, name='out')
      logits = SCALE * q[t].astype(np.float64) @ row
      assert_close(lse[t], logits, atol=1e-5, rtol=1e-5, name='lse')

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_huge_logits(self, implementation):
    """exp is taken after the maximum is subtracted."""
    (q, rows, scales, slots), decoded = make_case('f32')
    q = q * np.float32(1e4)
    out, lse = runner(implementation)(q, rows, scales, slots)
    expected, expected_lse = attend_f64(q, decoded, slots)
    self.assertGreater(np.abs(expected_lse[0]).max(), 1e3)
    assert_close(out, expected, atol=2e-2, rtol=0, name='out')
    assert_close(lse, expected_lse, atol=1e-2, rtol=1e-5, name='lse')

  @parameterized.product(T=(9, 13), dtype=('f32', 'fp8'))
  def test_blocks_of_rows(self, T, dtype):
    """Blocks of eight query rows, the last one ragged."""
    args, decoded = make_case(dtype, T=T)
    out, lse = runner('xla', block_bytes=1)(*args)
    expected, expected_lse = attend_f64(args[0], decoded, args[3])
    atol, rtol = OUT[dtype]
    assert_close(out, expected, atol=atol, rtol=rtol, name='out')
    atol, rtol = LSE[dtype]
    assert_close(lse, expected_lse, atol=atol, rtol=rtol, name='lse')

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_no_rows(self, implementation):
    (q, rows, _, slots), _ = make_case('f32')
    out, lse = runner(implementation)(q[:0], rows, None, slots[:0])
    self.assertEqual((out.shape, lse.shape), ((0, 3, R), (0, 3)))

  @parameterized.product(dtype=('f32', 'fp8'))
  def test_gathered_rows_of_one_block_only(self, dtype):
    """Temporary bytes follow `block_bytes`, not T times k rows.

    (XLA on CPU widens bf16 operands of a dot, so bf16 is not asked.)
    """
    T, N, k, M = 512, 2, 64, 4096
    args, _ = make_case(dtype, T=2, M=M)
    shape = jax.ShapeDtypeStruct

    def temporary(block_bytes):
      scales = args[2] if args[2] is None else shape((M, 2), jnp.float32)
      run = runner('xla', block_bytes=block_bytes)
      lowered = run.lower(
        shape((T, N, R + P), args[0].dtype),
        shape((M, 256), args[1].dtype),
        scales,
        shape((T, k), jnp.int32),
      )
      return lowered.compile().memory_analysis().temp_size_in_bytes

    budget = 2 << 20
    whole, small = temporary(1 << 30), temporary(budget)
    self.assertGreater(whole, T * k * R)
    # Query and output blocks come on top of gathered rows and logits.
    self.assertLess(small, 2 * budget + 8 * T * N * (R + P))

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_known_fault_15_fully_masked_row(self, implementation):
    """No valid slot: output 0, lse -inf; the same arrays serve twice."""
    (q, rows, scales, slots), _ = make_case('f32')
    q, rows = jnp.asarray(q), jnp.asarray(rows)
    slots = jnp.asarray(slots)
    kept = np.array(slots)
    run = runner(implementation)
    first = run(q, rows, scales, slots)
    np.testing.assert_array_equal(np.asarray(first[0][1]), 0)
    np.testing.assert_array_equal(np.asarray(first[1][1]), -np.inf)
    second = run(q, rows, scales, slots)
    assert_bit_equal(slots, kept, name='slots')
    for name, a, b in zip(('out', 'lse'), second, first):
      assert_bit_equal(a, b, name=name)

  def test_known_fault_20_scale_has_no_default(self):
    (q, rows, scales, slots), _ = make_case('f32')
    with self.assertRaisesRegex(TypeError, 'scale'):
      topk_gather_attention(q, rows, scales, slots, latent_width=R)

  @parameterized.product(
    implementation=IMPLEMENTATIONS, dtype=('f32', 'bf16', 'fp8')
  )
  def test_known_fault_24_nan_in_every_row_not_written(
    self, implementation, dtype
  ):
    """13 rows in pages of 4, k=16: equal to a clean pool, bit for bit."""
    rng = np.random.default_rng(24)
    pages = np.array([3, 6, 1, 4])  # of 8; page 0 is the null page
    slots = (pages[:, None] * 4 + np.arange(4)).reshape(-1)[:13]
    slots = np.concatenate([slots, np.full(3, -1)]).astype(np.int32)[None]
    clean = rng.normal(size=(32, R + P)).astype(np.float32)
    dirty = np.full_like(clean, np.nan)
    dirty[slots[0, :13]] = clean[slots[0, :13]]
    q_dtype = np.float32 if dtype == 'f32' else ml_dtypes.bfloat16
    q = rng.normal(size=(1, 3, R + P)).astype(q_dtype)
    run = runner(implementation)
    results = []
    for values in (dirty, clean):
      rows, scales, _ = encode_rows(values, dtype)
      results.append(run(q, rows, scales, slots))
    for name, a, b in zip(('out', 'lse'), *results):
      self.assertTrue(np.isfinite(np.asarray(a, np.float32)).all())
      assert_bit_equal(a, b, name=name)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_known_fault_28_second_sequence_of_a_packed_batch(
    self, implementation
  ):
    """Page 4, lengths 7 and 3: sequence 1 starts at slot 8, not 7."""
    rng = np.random.default_rng(28)
    values = rng.normal(size=(12, R + P)).astype(np.float32)
    values[[7, 11]] = np.nan
    starts = np.array([0, 8])[:, None]  # the aligned cumulative sum
    topk = np.array([[0, 3, 6, -1], [0, 1, 2, -1]])
    slots = np.where(topk >= 0, topk + starts, -1).astype(np.int32)
    rows, scales, decoded = encode_rows(values, 'f32')
    q = rng.normal(size=(2, 3, R + P)).astype(np.float32)
    out, lse = runner(implementation)(q, rows, scales, slots)
    expected, expected_lse = attend_f64(
      q, decoded, np.array([[0, 3, 6, -1], [8, 9, 10, -1]])
    )
    assert_close(out, expected, atol=2e-6, rtol=2e-6, name='out')
    assert_close(lse, expected_lse, atol=2e-6, rtol=2e-6, name='lse')

  @parameterized.product(implementation=IMPLEMENTATIONS, dtype=('f32', 'fp8'))
  def test_known_fault_31_slot_beyond_the_pool(self, implementation, dtype):
    """A slot past the pool counts as none, and debug mode raises."""
    args, decoded = make_case(dtype, M=40)
    q, rows, scales, slots = args
    debug = checkify.checkify(
      runner(implementation), errors=checkify.user_checks
    )
    error, _ = debug(*args)
    self.assertIsNone(error.get())
    beyond = np.where(slots < 0, 41, slots).astype(np.int32)
    out, lse = runner(implementation)(q, rows, scales, beyond)
    expected, expected_lse = attend_f64(q, decoded, slots)
    assert_close(out, expected, atol=OUT[dtype][0], rtol=2e-2, name='out')
    assert_close(lse, expected_lse, atol=2e-5, rtol=1e-5, name='lse')
    error, _ = debug(q, rows, scales, beyond)
    self.assertIn('slot 41 is beyond the pool of 40', error.get())

  def test_wrong_arguments(self):
    (q, rows, scales, slots), _ = make_case('f32')
    (_, packed, packed_scales, _), _ = make_case('fp8')
    call = functools.partial(topk_gather_attention, scale=1.0)
    whole = R + P
    cases = [
      ((q, rows, None, slots), whole, f'latent_width={whole} must be within'),
      ((q, rows, None, slots), 0, 'latent_width=0 must be within'),
      ((q, packed, None, slots), R, 'row_scales absent: uint8 records have'),
      ((q, rows, packed_scales, slots), R, 'row_scales given: uint8 records'),
      ((q, rows[:, :100], None, slots), R, r'\[M, at least 168\]'),
      ((q, rows[0], None, slots), R, r'\(256,\) must be \[M, at least'),
      # A record needs two bytes a rotary feature: 160 + 16.
      ((q, packed[:, :175], packed_scales, slots), R, r'\[M, at least 176\]'),
      ((q, packed, packed_scales[:, :1], slots), R, r'must be \(40, 2\)'),
      ((q, rows, None, slots[:2]), R, r'\(2, 12\).*must be \[5, k\] int32'),
      ((q, rows, None, slots[0]), R, r'\(12,\).*must be \[5, k\] int32'),
      ((q, rows, None, slots.astype(np.uint32)), R, 'uint32.* must be'),
    ]
    for args, width, message in cases:
      with self.subTest(message):
        with self.assertRaisesRegex(ValueError, message):
          call(*args, latent_width=width)
    with self.assertRaisesRegex(ValueError, "implementation='dense'"):
      call(q, rows, None, slots, latent_width=R, implementation='dense')


class DecodeRowsTest(absltest.TestCase):
  def test_wide_rows_pass(self):
    rows = jnp.ones((3, 256), jnp.bfloat16)
    self.assertIs(decode_rows(rows, None, R, P), rows)

  def test_known_fault_19_latents_scales_and_rope_stay_apart(self):
    """A 656-byte record: 512 latents, 64 rotary features, 4 scales."""
    latent = np.tile(np.float32([1, -2, 0.5, 448]), 128)
    rope = np.arange(64, dtype=np.float32) - 32
    record = np.zeros((1, 640), np.uint8)
    record[0, :512] = latent.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    record[0, 512:] = rope.astype(ml_dtypes.bfloat16).view(np.uint8)
    scales = np.float32([[1, 2, 4, 8]])
    self.assertEqual(record.nbytes + scales.nbytes, 656)
    actual = decode_rows(jnp.asarray(record), jnp.asarray(scales), 512, 64)
    self.assertEqual(actual.dtype, jnp.bfloat16)
    expected = np.concatenate([latent * np.repeat(scales[0], 128), rope])
    np.testing.assert_array_equal(np.asarray(actual[0], np.float32), expected)


if __name__ == '__main__':
  absltest.main()
