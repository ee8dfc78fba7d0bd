"""The GPU's kernels, interpreted, against the reference.

What must not be read holds NaN: page 0 and row 0, where an unmasked -1 ends.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import pallas_kernels
from pallas_kernels import triton
from pallas_kernels.indexer_scores import gpu as scores_gpu
from pallas_kernels.indexer_scores import reference as scores_reference
from pallas_kernels.streaming_topk import gpu as select_gpu
from pallas_kernels.streaming_topk import gpu_select, threshold
from pallas_kernels.streaming_topk import reference as select_reference
from pallas_kernels.topk_gather_attention import gpu as attention_gpu
from pallas_kernels.topk_gather_attention import hopper
from pallas_kernels.topk_gather_attention import reference as attention


def index_case(T, B, n, *, fp8=False, heads=32, width=32):
  """Rows of some sequences in order, the last one a padding row."""
  rng = np.random.default_rng(0)
  pages = B * n + 2
  keys = rng.normal(size=(pages, 64, width)).astype(np.float32)
  keys[0] = np.nan
  table = rng.permutation(pages - 1)[: B * n].reshape(B, n) + 1
  table[:, -1] = -1
  row_pos = rng.integers(0, (n - 1) * 64, T)
  row_pos[-1] = -1
  return (
    jnp.asarray(rng.normal(size=(T, heads, width)), jnp.bfloat16),
    jnp.asarray(rng.normal(size=(T, heads)), jnp.float32),
    jnp.asarray(keys, jnp.float8_e4m3fn if fp8 else jnp.bfloat16),
    jnp.asarray(rng.random((pages, 64)), jnp.float32) if fp8 else None,
    jnp.asarray(table, jnp.int32),
    jnp.asarray(np.sort(rng.integers(0, B, T)), jnp.int32),
    jnp.asarray(row_pos, jnp.int32),
  )


class ScoresTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('decode', 3, 3, 3, False), ('prefill_of_two_sequences', 9, 2, 9, True)
  )
  def test_equal_the_reference(self, T, B, n, fp8):
    case = index_case(T, B, n, fp8=fp8)
    got = np.asarray(scores_gpu.indexer_scores(*case, first=1, interpret=True))
    want = np.asarray(scores_reference.indexer_scores(*case, first=1))
    np.testing.assert_array_equal(got > -np.inf, want > -np.inf)
    seen = want > -np.inf
    np.testing.assert_allclose(got[seen], want[seen], rtol=1e-5, atol=1e-4)

  def test_what_it_does_not_take_is_refused(self):
    q, *rest = index_case(3, 3, 3)
    with self.assertRaisesRegex(NotImplementedError, 'float32 queries'):
      scores_gpu.indexer_scores(q.astype(jnp.float32), *rest)
    q, w, _, _, *rest = index_case(3, 3, 3, fp8=True)
    for pages, refused in ((2**20, False), (2**20 + 1, True), (2**22, False)):
      keys = jax.ShapeDtypeStruct((pages, 64, 32), jnp.float8_e4m3fn)
      scales = jax.ShapeDtypeStruct((pages, 64), jnp.float32)
      call = lambda *args: scores_gpu.indexer_scores(*args, interpret=True)
      if refused:
        with self.assertRaisesRegex(NotImplementedError, '2.0 GiB of float8'):
          jax.eval_shape(call, q, w, keys, scales, *rest)
      else:
        jax.eval_shape(call, q, w, keys, scales, *rest)
    case = index_case(3, 3, 3, heads=24)
    with self.assertRaisesRegex(NotImplementedError, '24 heads of 32'):
      scores_gpu.indexer_scores(*case)


class SelectTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('narrow', 500, 40, 8192, 512),
    ('wide', 1200, 40, 256, 512),
    ('wide_in_one_part', 1200, 40, 256, 1),
    ('wide_and_fewer_than_k', 700, 650, 256, 512),
  )
  def test_equals_a_stable_sort(self, size, k, narrow, programs):
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(5, size)).astype(np.float32)
    scores[0] = np.round(scores[0])  # ties by the hundred
    scores[1, k // 2 :] = -np.inf
    scores[2] = -np.inf
    scores[3, ::3] = 0.25
    scores[3, 1::3] = np.where(np.arange(size)[1::3] % 2, 0.0, -0.0)
    scores[4, :9] = np.nan
    scores = select_reference.comparable(jnp.asarray(scores))
    sizes = dict(_NARROW=narrow, _CHUNK=64, _SHARED=8, _PROGRAMS=programs)
    with mock.patch.multiple(gpu_select, **sizes):
      positions, winners = gpu_select.select(scores, k, interpret=True)
    for row, got, value in zip(np.asarray(scores), positions, winners):
      order = np.argsort(-row, kind='stable')[:k]
      want = np.sort(order[row[order] > -np.inf])
      fill = (0, k - len(want))
      np.testing.assert_array_equal(got, np.pad(want, fill, constant_values=-1))
      np.testing.assert_array_equal(
        value, np.pad(row[want], fill, constant_values=-np.inf)
      )

  def test_a_bound_leaves_few_candidates(self):
    scores = np.random.default_rng(3).normal(size=(2, 4096))
    bound = gpu_select.lower_bound(
      jnp.asarray(scores, jnp.float32), 64, interpret=True
    )
    for row, key in zip(jnp.asarray(scores, jnp.float32), bound):
      reached = int(jnp.sum(threshold.sort_keys(row) >= key))
      self.assertBetween(reached, 64, 128)

  @parameterized.named_parameters(('of_few_rows', 512), ('of_many', 1))
  def test_a_bound_is_the_kth_of_the_groups(self, programs):
    scores = np.random.default_rng(3).normal(size=(2, 4096))
    scores = jnp.asarray(scores, jnp.float32)
    bound = lambda s: gpu_select.lower_bound(s, 64, interpret=True)
    with mock.patch.object(gpu_select, '_PROGRAMS', programs):
      shared = 'reduce_max' in str(jax.make_jaxpr(bound)(scores))
      got = bound(scores)
    self.assertEqual(shared, programs > 1)
    tops = np.asarray(scores).reshape(2, 32, 128).max(axis=1)
    want = threshold.sort_keys(jnp.asarray(np.sort(tops)[:, -64]))
    np.testing.assert_array_equal(got, want)

  def test_programs_share_few_rows(self):
    self.assertEqual(gpu_select.parts(1, 1 << 20), 128)
    self.assertEqual(gpu_select.parts(8, 1 << 20), 64)
    self.assertEqual(gpu_select.parts(8, 1 << 17), 16)
    self.assertEqual(gpu_select.parts(1024, 1 << 17), 1)

  def test_more_than_a_program_holds_is_refused(self):
    with self.assertRaisesRegex(NotImplementedError, 'k=9000 of 20000'):
      gpu_select.select(jnp.zeros((1, 20000)), 9000)

  def test_the_whole_op_equals_the_reference(self):
    case = index_case(5, 2, 3)
    got = select_gpu.streaming_topk(
      *case, k=20, block_bytes=1 << 20, interpret=True
    )
    want = select_reference.streaming_topk(*case, k=20)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-4)


class AttentionTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('few_rows', 3, 4, 200), ('many_rows', 33, 20, 70)
  )
  def test_equals_the_reference(self, T, N, k):
    rng = np.random.default_rng(2)
    R, P, M = 32, 16, 300
    rows = rng.normal(size=(M, 64)).astype(np.float32)
    rows[0] = np.nan
    rows[:, R + P :] = np.nan
    slots = np.full((T, k), -1, np.int32)
    for t in range(1, T):  # row 0 has none
      count = rng.integers(1, k)
      slots[t, rng.permutation(k)[:count]] = rng.permutation(M - 1)[:count] + 1
    q = jnp.asarray(rng.normal(size=(T, N, R + P)), jnp.bfloat16)
    rows = jnp.asarray(rows, jnp.bfloat16)
    args, widths = (q, rows, None, slots), dict(scale=0.2, latent_width=R)
    out, lse = attention_gpu.topk_gather_attention(
      *args, **widths, interpret=True
    )
    clean = jnp.where(jnp.isnan(rows), 0, rows)
    want, want_lse = attention.topk_gather_attention(
      q, clean, None, jnp.asarray(slots), **widths
    )
    self.assertEqual(out.dtype, jnp.bfloat16)
    np.testing.assert_allclose(
      np.float32(out), np.float32(want), rtol=2e-2, atol=2e-2
    )
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-4)
    self.assertFalse(np.any(np.float32(out[0])))

  def test_programs_fill_the_card(self):
    self.assertEqual(attention_gpu.split(1, 64, 2048), (16, 32))
    self.assertEqual(attention_gpu.split(8, 64, 2048), (16, 16))
    self.assertEqual(attention_gpu.split(64, 64, 2048), (64, 2))
    self.assertEqual(attention_gpu.split(4096, 64, 2048), (64, 1))

  def test_what_it_does_not_take_is_refused(self):
    q = jnp.zeros((1, 4, 48), jnp.bfloat16)
    slots = jnp.zeros((1, 4), jnp.int32)
    call = attention_gpu.topk_gather_attention
    with self.assertRaisesRegex(NotImplementedError, 'float32 rows'):
      call(q, jnp.zeros((9, 64)), None, slots, scale=1.0, latent_width=32)
    rows = jnp.zeros((9, 64), jnp.bfloat16)
    with self.assertRaisesRegex(NotImplementedError, '24 latent'):
      call(q, rows, None, slots, scale=1.0, latent_width=24)


class HopperTest(parameterized.TestCase):
  """The kernel itself runs on a GPU alone (tests/gpu)."""

  def test_programs_fill_the_card(self):
    self.assertEqual(hopper.parts_of(1, 2048), 32)
    self.assertEqual(hopper.parts_of(8, 2048), 16)
    self.assertEqual(hopper.parts_of(64, 2048), 2)
    self.assertEqual(hopper.parts_of(300, 2048), 1)

  @parameterized.parameters(
    (jnp.float32, 576, 512, 'float32 queries'),
    (jnp.bfloat16, 560, 512, '560 features'),
    (jnp.bfloat16, 384, 320, '320 latent'),
    (jnp.bfloat16, 1088, 512, '1088 features, 64 keys'),
  )
  def test_what_it_does_not_take_is_refused(self, dtype, width, latent, why):
    q = jnp.zeros((300, 4, width), dtype)
    rows = jnp.zeros((9, width), dtype)
    slots = jnp.zeros((300, 4), jnp.int32)
    with self.assertRaisesRegex(NotImplementedError, why):
      hopper.topk_gather_attention(
        q, rows, None, slots, scale=1.0, latent_width=latent
      )

  @parameterized.parameters(1, 6)  # the kernel, and XLA for many rows
  def test_parts_are_merged(self, times):
    rng = np.random.default_rng(0)
    logits, rows = rng.normal(size=(3, 4, 12)), rng.normal(size=(12, 256))
    logits[1, :, :6] = -np.inf
    logits[2] = -np.inf
    p = np.exp(logits)
    all_keys = np.maximum(p.sum(axis=2, keepdims=True), 1e-30)
    some = p.reshape(3, 4, 2, 6).transpose(0, 2, 1, 3)
    total = some.sum(axis=3)
    out = np.stack([some[:, i] @ rows[6 * i : 6 * i + 6] for i in range(2)], 1)
    out = np.divide(out, total[..., None], where=total[..., None] > 0, out=out)
    with np.errstate(divide='ignore'):
      lse, want_lse = np.log(total), np.log(p.sum(axis=2))
    more = lambda a: jnp.float32(np.concatenate([a] * times))
    got, got_lse = attention_gpu.merge(
      more(out), more(lse), 3, jnp.float32, interpret=True
    )
    want, want_lse = more(p @ rows / all_keys)[:, :3], more(want_lse)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got_lse, want_lse[:, :3], rtol=1e-5)


def test_a_jax_without_the_backend_leaves_everything_to_xla():
  case = index_case(3, 3, 3)
  with mock.patch.object(triton, '_backend', return_value=None):
    with pytest.raises(NotImplementedError, match='no Triton backend'):
      scores_gpu.indexer_scores(*case)
    assert not scores_gpu.fits(4, 32, 32, 128)
    assert not select_gpu.fits(128)


@pytest.mark.parametrize(
  'op', ['indexer_scores', 'streaming_topk', 'topk_gather_attention']
)
def test_a_gpu_is_offered_the_kernel(op):
  module = getattr(pallas_kernels, op).__globals__
  assert module['AVAILABLE']['gpu'].__module__.endswith('.gpu')


if __name__ == '__main__':
  absltest.main()
