"""`indexer_scores` against a float64 loop over rows and keys, with poison.

Every page that no row may read, every key past a sequence's end and every
input of a padding row is NaN, so a stray read shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_close
from jax.experimental import checkify
from score_cases import make_case, scores_f64

from pallas_kernels import indexer_scores

IMPLEMENTATIONS = ('reference', 'xla')
FP8 = jnp.float8_e4m3fn
RUN = {
  name: jax.jit(functools.partial(indexer_scores, implementation=name))
  for name in IMPLEMENTATIONS
}


class IndexerScoresTest(parameterized.TestCase):
  @parameterized.product(
    implementation=IMPLEMENTATIONS, dtype=('f32', 'bf16', 'fp8')
  )
  def test_packed_batch_matches_float64(self, implementation, dtype):
    """Three sequences, ragged ends, a padding row, a row into a hole."""
    rows = [(0, 64), (2, 0), (1, 129), (0, -1), (1, 63), (1, 64), (0, 150)]
    args = make_case(dtype, (65, 130, 1), rows, n=3)
    # Position 150 of sequence 0 lies past its pages: what is there counts.
    actual = np.asarray(RUN[implementation](*args))
    self.assertEqual(actual.dtype, np.float32)
    expected = scores_f64(*args)
    # A visible key that is NaN stays NaN, on every backend.
    self.assertEqual(int(np.isnan(expected[6]).sum()), 63)
    assert_close(actual, expected, atol=3e-5, rtol=1e-5, name='scores')

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_page_and_chunk_edges(self, implementation):
    """Rows on both sides of a page (64) and of a chunk of pages (1024)."""
    edges = (0, 62, 63, 64, 1022, 1023, 1024)
    rows = [(0, p) for p in edges]
    args = make_case('f32', (1025,), rows, n=17, heads=2, width=4)
    actual = np.asarray(RUN[implementation](*args))
    for t, p in enumerate(edges):
      finite = np.isfinite(actual[t])
      np.testing.assert_array_equal(finite, np.arange(17 * 64) <= p)
    expected = scores_f64(*args)
    assert_close(actual, expected, atol=1e-5, rtol=1e-5, name='scores')

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_rows_that_see_nothing(self, implementation):
    """Padding rows, and sequences without any page: -inf throughout."""
    args = list(make_case('f32', (65, 0), [(0, -1), (1, 10), (0, -7)], n=3))
    args[2] = jnp.full_like(args[2], jnp.nan)
    actual = np.asarray(RUN[implementation](*args))
    np.testing.assert_array_equal(actual, np.full((3, 192), -np.inf))

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_first_visible_position(self, implementation):
    """The drafter's pool has no row at 0: what lies there is NaN."""
    args = list(make_case('f32', (70,), [(0, 69), (0, 1), (0, 0)], n=2))
    first = int(args[4][0, 0])
    args[2] = args[2].at[first, 0].set(jnp.nan)
    expected = scores_f64(*args)
    expected[:, 0] = -np.inf
    actual = jax.jit(
      functools.partial(indexer_scores, implementation=implementation, first=1)
    )(*args)
    assert_close(actual, expected, atol=3e-5, rtol=1e-5, name='scores')

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_no_rows(self, implementation):
    args = make_case('f32', (5,), [], n=1)
    self.assertEqual(RUN[implementation](*args).shape, (0, 64))

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_known_fault_28_second_sequence_of_a_packed_batch(
    self, implementation
  ):
    """Page 4, lengths 7 and 3: the second reads its own page, no other."""
    q = jnp.ones((2, 1, 1), jnp.float32)
    w = jnp.ones((2, 1), jnp.float32)
    keys = 1 + jnp.arange(12, dtype=jnp.float32).reshape(3, 4, 1)
    keys = keys.at[1, 3].set(jnp.nan).at[2, 3].set(jnp.nan)
    table = jnp.array([[0, 1], [2, -1]], jnp.int32)
    seq, pos = jnp.array([0, 1], jnp.int32), jnp.array([6, 2], jnp.int32)
    actual = RUN[implementation](q, w, keys, None, table, seq, pos)
    no = -np.inf
    expected = [
      [1, 2, 3, 4, 5, 6, 7, no],
      [9, 10, 11, no, no, no, no, no],
    ]
    np.testing.assert_array_equal(np.asarray(actual), expected)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_known_fault_18_scale_of_each_fp8_key(self, implementation):
    """Key i has amplitude 2^(i mod 8); each decodes to 1 part in 16."""
    H, page = 16, 64
    rng = np.random.default_rng(18)
    amplitude = 2.0 ** (np.arange(page) % 8)
    keys = rng.uniform(0.5, 1, (page, H)) * amplitude[:, None]
    scales = (amplitude / 256).astype(np.float32)
    values = jnp.asarray(keys / scales[:, None], jnp.float32).astype(FP8)
    # Row h asks for feature h: the scores are the decoded keys.
    q = jnp.eye(H, dtype=jnp.bfloat16)[:, None]
    w = jnp.ones((H, 1), jnp.float32)
    scores = RUN[implementation](
      q,
      w,
      values[None],
      jnp.asarray(scales)[None],
      jnp.zeros((1, 1), jnp.int32),
      jnp.zeros(H, jnp.int32),
      jnp.full(H, page - 1, jnp.int32),
    )
    assert_close(scores.T, keys, atol=0, rtol=1 / 16, name='decoded keys')

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_known_fault_31_page_beyond_the_pool(self, implementation):
    """Ids up to 9 in a pool of 8: no score in normal mode, raises in debug."""
    rows = [(0, 191), (1, 63)]
    args = list(make_case('f32', (192, 64), rows, n=3))
    args[2] = jnp.nan_to_num(args[2][:7], nan=0.5)
    args[2] = jnp.concatenate([args[2], args[2][:1]])  # 8 pages
    run = RUN[implementation]
    check = checkify.checkify(run, errors=checkify.user_checks)
    args[4] = jnp.array([[3, 1, 7], [5, -1, -1]], jnp.int32)
    clean = np.array(run(*args))
    error, _ = check(*args)
    self.assertIsNone(error.get())
    args[4] = jnp.array([[3, 9, 7], [5, -1, -1]], jnp.int32)
    actual = np.asarray(run(*args))
    clean[0, 64:128] = -np.inf
    assert_close(actual, clean, atol=0, rtol=0, name='scores')
    error, _ = check(*args)
    self.assertIn('page 9 is beyond the pool of 8', error.get())

  def test_wrong_arguments(self):
    good = make_case('f32', (5, 5), [(0, 4), (1, 2)], n=2)
    names = ('q', 'w', 'keys', 'scales', 'table', 'seq', 'pos')
    ones = lambda *shape: jnp.ones(shape, jnp.float32)
    cases = [
      (dict(w=ones(2, 3)), r'w\.shape=\(2, 3\).*must be \(2, 4\) float32'),
      (dict(w=good[1].astype(jnp.bfloat16)), r'bfloat16.*must be \(2, 4\)'),
      (dict(keys=ones(5, 64, 8)), r'\(5, 64, 8\) must end in the width'),
      (dict(scales=ones(4, 64)), r'key_scales\.shape=\(4, 64\) must be'),
      (dict(scales=ones(5, 64)), r'given: fp8 keys have scales'),
      (dict(keys=good[2].astype(FP8)), r'absent: fp8 keys have scales'),
      (dict(table=jnp.zeros(2, jnp.int32)), r'page_table\.shape=\(2,\)'),
      (dict(seq=jnp.zeros(3, jnp.int32)), r'row_seq\.shape=\(3,\)'),
      (dict(pos=jnp.zeros(3, jnp.int32)), r'row_pos\.shape=\(3,\)'),
      (dict(table=ones(2, 2)), r'page_table\.dtype=float32 must be int32'),
      (dict(seq=ones(2)), r'row_seq\.dtype=float32 must be int32'),
      (dict(pos=ones(2)), r'row_pos\.dtype=float32 must be int32'),
    ]
    for change, message in cases:
      with self.subTest(message):
        args = {**dict(zip(names, good)), **change}
        with self.assertRaisesRegex(ValueError, message):
          indexer_scores(*args.values())

  def test_what_is_not_here(self):
    args = make_case('f32', (5,), [(0, 4)], n=1)
    with self.assertRaisesRegex(NotImplementedError, 'indexer_scores.*shard'):
      indexer_scores(*args, shard=object())
    with self.assertRaisesRegex(ValueError, "implementation='dense'"):
      indexer_scores(*args, implementation='dense')


if __name__ == '__main__':
  absltest.main()
