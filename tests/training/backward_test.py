"""Gradients of the ops against dense autodiff in float64, with poison.

The dense forms below know nothing of slots, tiles or blocks: attention over
the whole pool under a mask, one gathered weight a row.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_close
from jax.test_util import check_grads

from pallas_kernels import grouped_matmul, topk_gather_attention
from pallas_kernels.block_scale import dequantize, quantize

R, P, W, SCALE = 6, 2, 12, 0.4
shape = jax.ShapeDtypeStruct


def attend(q, rows, slots, implementation='xla', block_bytes=64 << 20):
  return topk_gather_attention(
    q,
    rows,
    None,
    slots,
    scale=SCALE,
    latent_width=R,
    implementation=implementation,
    block_bytes=block_bytes,
  )


def dense_attention(q, rows, slots):
  """Over all M rows of a clean pool; lse is 0 for an empty row."""
  M = len(rows)
  chosen = (slots[:, :, None] == jnp.arange(M)).any(axis=1)
  logits = SCALE * jnp.einsum('tnd,md->tnm', q, rows[:, : R + P])
  p = jnp.where(chosen[:, None], jnp.exp(logits), 0)
  total = p.sum(-1)
  safe = jnp.where(total > 0, total, 1)
  out = jnp.einsum('tnm,mr->tnr', p, rows[:, :R]) / safe[..., None]
  return out, jnp.log(safe)


@functools.cache
def attention_gradient(f, **options):
  """Jitted gradients to q and the pool of a weighted sum of both outputs."""

  def loss(q, rows, slots, d_out, d_lse):
    out, lse = f(q, rows, slots, **options)
    # The lse of an empty row is -inf: it is left out.
    lse = jnp.where(jnp.isfinite(lse), lse, 0)
    return jnp.sum(out * d_out) + jnp.sum(lse * d_lse)

  return jax.jit(jax.grad(loss, (0, 1)))


def make_attention(T=5, N=3, k=8, M=20, seed=0, slots=None):
  """Queries, a pool that is NaN where no slot points, slots, cotangents."""
  rng = np.random.default_rng(seed)
  if slots is None:
    slots = np.full((T, k), -1, np.int32)
    for t in range(T):
      count = 0 if t == 1 else rng.integers(1, k + 1)
      slots[t, rng.permutation(k)[:count]] = 1 + rng.permutation(M - 1)[:count]
  T = len(slots)
  rows = np.full((M, W), np.nan)
  used = np.unique(slots[(slots >= 0) & (slots < M)])
  rows[used] = 0
  rows[used, : R + P] = rng.normal(size=(len(used), R + P))
  q = rng.normal(size=(T, N, R + P))
  d_out, d_lse = rng.normal(size=(T, N, R)), rng.normal(size=(T, N))
  return q, rows, slots, d_out, d_lse


def compare_attention(case, dtype=np.float64, atol=1e-12, **options):
  """Gradients to q and the pool against the dense form; returns ours."""
  q, rows, slots, d_out, d_lse = case
  with jax.enable_x64(True):
    q, rows = jnp.asarray(q, dtype), jnp.asarray(rows, dtype)
    ours = attention_gradient(attend, **options)(q, rows, slots, d_out, d_lse)
    q, rows = np.float64(q), np.nan_to_num(np.float64(rows))
    dense = attention_gradient(dense_attention)(q, rows, slots, d_out, d_lse)
    for name, a, e in zip(('dq', 'drows'), ours, dense):
      assert a.dtype == dtype, (name, a.dtype)
      scale = np.abs(e).max()
      assert_close(a, e, atol=atol * scale, rtol=atol, name=name)
  return ours


class AttentionBackwardTest(parameterized.TestCase):
  @parameterized.product(block_bytes=(64 << 20, 1), T=(5, 19))
  def test_matches_dense_autodiff(self, block_bytes, T):
    """Out and lse, holes, an empty row, blocks of eight, the last ragged."""
    compare_attention(make_attention(T), block_bytes=block_bytes)

  @parameterized.product(implementation=('reference', 'xla'))
  def test_float32(self, implementation):
    compare_attention(
      make_attention(), np.float32, 1e-5, implementation=implementation
    )

  def test_bfloat16(self):
    """Gradients come back in bf16; many rows add to one in float32."""
    compare_attention(make_attention(T=64, M=10), jnp.bfloat16, 2e-2)

  def test_finite_differences(self):
    q, rows, slots, _, _ = make_attention(T=3, N=2, k=4, M=6)
    keep = np.array([0, 2])  # row 1 is empty: its lse is -inf
    unread = np.isnan(rows)
    with jax.enable_x64(True):
      f = jax.jit(
        lambda q, rows: attend(q, jnp.where(unread, jnp.nan, rows), slots[keep])
      )
      args = (q[keep], np.nan_to_num(rows))
      check_grads(f, args, 1, ('rev',), atol=1e-6, rtol=1e-6)

  def test_known_fault_49_empty_rows(self):
    """All -1; one valid; valid in the last column only; length 0.

    Width 8. The pool is NaN where nothing points, row 0 included.
    """
    slots = np.full((4, 8), -1, np.int32)
    slots[1, 3] = 5
    slots[2, 7] = 9
    d_q, d_rows = compare_attention(make_attention(slots=slots))
    for row in (0, 3):
      np.testing.assert_array_equal(d_q[row], 0)
    unread = np.setdiff1d(np.arange(20), [5, 9])
    np.testing.assert_array_equal(d_rows[unread], 0)
    self.assertTrue((np.abs(d_rows[jnp.array([5, 9])]).max(axis=1) > 0).all())

  def test_known_fault_49_one_valid_slot_is_exact(self):
    """The softmax of one key is constant: dq is 0, not almost 0."""
    slots = np.full((2, 8), -1, np.int32)
    slots[0, 2], slots[1, 7] = 3, 4
    q, rows, _, d_out, _ = make_attention(slots=slots)
    d_q, d_rows = attention_gradient(attend)(
      jnp.float32(q * 30), jnp.float32(rows), slots, jnp.float32(d_out), 0.0
    )
    np.testing.assert_array_equal(d_q, 0)
    expected = d_out.sum(axis=1)
    assert_close(d_rows[3:5, :R], expected, atol=1e-6, rtol=1e-6, name='rows')

  def test_cotangents_of_an_empty_row_may_be_nan(self):
    """What follows -inf in lse is often NaN; it must not spread."""
    q, rows, slots, d_out, d_lse = make_attention()
    q, rows = jnp.float32(q), jnp.float32(rows)
    d_out, d_lse = jnp.float32(d_out), jnp.float32(d_lse)

    @jax.jit
    def pull(value):
      _, pull = jax.vjp(lambda q, rows: attend(q, rows, slots), q, rows)
      return pull((d_out.at[1].set(value), d_lse.at[1].set(value)))

    clean, dirty = pull(0.0), pull(jnp.nan)
    for a, e in zip(dirty, clean):
      np.testing.assert_array_equal(a, e)
      self.assertTrue(np.isfinite(a).all())

  def test_slots_beyond_the_pool_count_as_none(self):
    _, _, slots, _, _ = make_attention()
    compare_attention(make_attention(slots=np.where(slots < 0, 20, slots)))

  def test_no_rows(self):
    q, rows, slots, _, _ = make_attention()
    d_q, d_rows = attention_gradient(attend)(
      jnp.float32(q[:0]), jnp.float32(rows), slots[:0], 1.0, 0.0
    )
    self.assertEqual(d_q.shape, (0, 3, R + P))
    np.testing.assert_array_equal(d_rows, 0)

  def test_records_have_no_gradient(self):
    q = jnp.ones((2, 1, R + P), jnp.bfloat16)
    rows, scales = jnp.zeros((4, R + 2 * P), jnp.uint8), jnp.ones((4, 1))
    slots = jnp.zeros((2, 3), jnp.int32)
    run = lambda q: topk_gather_attention(
      q, rows, scales, slots, scale=1.0, latent_width=R
    )
    self.assertEqual(jax.eval_shape(run, q)[0].shape, (2, 1, R))
    with self.assertRaisesRegex(NotImplementedError, 'fp8 records'):
      jax.eval_shape(jax.grad(lambda q: jnp.sum(run(q)[1])), q)

  def test_temporary_bytes_follow_the_block(self):
    """Four times the query rows: not four times the gathered rows."""
    N, k, M, budget = 2, 256, 1024, 1 << 20

    def temporary(T):
      loss = lambda q, rows, slots: jnp.sum(
        attend(q, rows, slots, block_bytes=budget)[0]
      )
      lowered = jax.jit(jax.grad(loss, (0, 1))).lower(
        shape((T, N, R + P), jnp.float32),
        shape((M, W), jnp.float32),
        shape((T, k), jnp.int32),
      )
      return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(128), temporary(512)
    # Slots and queries are cut into blocks; gathered rows would be W * k.
    linear = (512 - 128) * 4 * (2 * k + 8 * N * (R + P))
    self.assertLess(large - small, linear)
    self.assertLess(large, 3 * budget + M * W * 8 + 512 * 4 * 3 * k)


def dense_product(x, weights, layer, sizes):
  """One gathered weight a row."""
  expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(x))
  return jnp.einsum('md,mfd->mf', x, weights[layer][expert])


@functools.cache
def product_gradient(f, **options):
  """Jitted gradients to rows and weights of a weighted sum."""

  def loss(x, weights, layer, sizes, d_out):
    args = (x, weights, layer, sizes)
    if f is grouped_matmul:
      args = (x, weights, None, layer, sizes)
    return jnp.sum(f(*args, **options) * d_out)

  return jax.jit(jax.grad(loss, (0, 1)))


class GroupedMatmulBackwardTest(parameterized.TestCase):
  @parameterized.parameters(
    ('xla', 1, None), ('xla', 3, 3), ('xla', 1, 16), ('reference', 3, 1)
  )
  def test_matches_dense_autodiff(self, implementation, L, tile):
    """Empty groups, tiles that divide nothing, a traced layer, NaN unread."""
    rng = np.random.default_rng(0)
    E, F, D, layer = 5, 4, 6, L - 1
    run = product_gradient(
      grouped_matmul, tile=tile, implementation=implementation
    )
    for sizes in ([0, 7, 0, 1, 5], [13, 0, 0, 0, 0], [1, 2, 3, 3, 4]):
      sizes = np.array(sizes, np.int32)
      with jax.enable_x64(True):
        x, d_out = rng.normal(size=(13, D)), rng.normal(size=(13, F))
        weights = rng.normal(size=(L, E, F, D))
        poisoned = np.full_like(weights, np.nan)
        poisoned[layer, sizes > 0] = weights[layer, sizes > 0]
        actual = run(x, poisoned, layer, sizes, d_out)
        expected = product_gradient(dense_product)(
          x, weights, layer, sizes, d_out
        )
        for name, a, e in zip(('dx', 'dweights'), actual, expected):
          self.assertEqual(a.dtype, np.float64)
          assert_close(a, e, atol=1e-12, rtol=1e-12, name=name)

  def test_finite_differences(self):
    rng = np.random.default_rng(1)
    sizes = np.array([2, 0, 3], np.int32)
    with jax.enable_x64(True):
      x, weights = rng.normal(size=(5, 3)), rng.normal(size=(2, 3, 2, 3))
      f = jax.jit(lambda x, w: grouped_matmul(x, w, None, 1, sizes))
      check_grads(f, (x, weights), 1, ('rev',), atol=1e-6, rtol=1e-6)

  def test_bfloat16_adds_in_float32(self):
    """512 rows of one expert; bf16 sums would stop at 256."""
    x = jnp.ones((512, 2), jnp.bfloat16)
    weights = jnp.ones((1, 2, 3, 2), jnp.bfloat16)
    sizes = jnp.array([511, 1], jnp.int32)
    run = product_gradient(grouped_matmul, tile=1)
    d_x, d_w = run(x, weights, 0, sizes, jnp.float32(1))
    self.assertEqual((d_x.dtype, d_w.dtype), (jnp.bfloat16, jnp.bfloat16))
    np.testing.assert_array_equal(np.float32(d_x), 3)
    np.testing.assert_array_equal(np.float32(d_w[0, 0]), 512)
    np.testing.assert_array_equal(np.float32(d_w[0, 1]), 1)

  def test_through_a_scan_over_layers_with_recomputation(self):
    """The pool is closed over, as in the trunk's scan."""
    rng = np.random.default_rng(2)
    L, D = 3, 4
    sizes = np.array([3, 1, 2], np.int32)
    with jax.enable_x64(True):
      x = rng.normal(size=(6, D))
      weights = rng.normal(size=(L, 3, D, D))

      def scanned(x, w):
        layer = lambda x, i: x + grouped_matmul(x, w, None, i, sizes)
        body = lambda x, i: (jax.checkpoint(layer)(x, i), None)
        return jnp.sum(jax.lax.scan(body, x, jnp.arange(L))[0] ** 2)

      def dense(x, w):
        for i in range(L):
          x = x + dense_product(x, w, i, sizes)
        return jnp.sum(x**2)

      actual = jax.jit(jax.grad(scanned, (0, 1)))(x, weights)
      expected = jax.jit(jax.grad(dense, (0, 1)))(x, weights)
      for name, a, e in zip(('dx', 'dweights'), actual, expected):
        assert_close(a, e, atol=1e-9, rtol=1e-12, name=name)

  def test_fp8_weights_may_be_frozen_but_not_trained(self):
    rng = np.random.default_rng(3)
    block = (4, 8)
    values, scales = quantize(jnp.float32(rng.normal(size=(2, 3, 5, 9))), block)
    sizes = jnp.array([2, 0, 4], jnp.int32)
    x = jnp.float32(rng.normal(size=(6, 9)))

    def loss(x, values, scales):
      y = grouped_matmul(x, values, scales, 1, sizes, scale_block=block)
      return jnp.sum(y**2)

    wide = dequantize(values, scales, jnp.float32, block)
    actual = jax.jit(jax.grad(loss))(x, values, scales)
    expected = jax.jit(
      jax.grad(lambda x: jnp.sum(dense_product(x, wide, 1, sizes) ** 2))
    )(x)
    assert_close(actual, expected, atol=1e-5, rtol=1e-5, name='dx')
    for argument in (1, 2):
      with self.assertRaisesRegex(NotImplementedError, 'fp8 weights'):
        jax.eval_shape(jax.grad(loss, argument), x, values, scales)

  def test_temporary_bytes(self):
    """One layer's sum where weights train, none where they are frozen."""
    E, F, D, M = 64, 32, 64, 128
    layer = 4 * E * F * D

    def temporary(arguments, L):
      loss = lambda x, w, sizes: jnp.sum(
        grouped_matmul(x, w, None, 0, sizes) ** 2
      )
      lowered = jax.jit(jax.grad(loss, arguments)).lower(
        shape((M, D), jnp.float32),
        shape((L, E, F, D), jnp.float32),
        shape((E,), jnp.int32),
      )
      return lowered.compile().memory_analysis().temp_size_in_bytes

    rows = 4 * M * (D + F)
    self.assertLess(temporary(0, 4), 4 * rows + 4 * 4 * F * D + 16_384)
    self.assertLess(temporary((0, 1), 1), layer * 1.1 + 8 * rows)


if __name__ == '__main__':
  absltest.main()
