"""`streaming_topk` against numpy's stable sort, with ties, NaN and poison.

Most cases choose the scores themselves: with heads q = (1, -1) and weights
(1, -1), a one-feature key k scores relu(k) - relu(-k) = k, exactly.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_bit_equal, assert_close, assert_same_selection
from jax.experimental import checkify

from pallas_kernels import streaming_topk

IMPLEMENTATIONS = ('reference', 'xla')
FP8 = jnp.float8_e4m3fn
NO = -np.inf


@functools.cache
def runner(implementation, **options):
  call = functools.partial(
    streaming_topk, implementation=implementation, **options
  )
  return jax.jit(call, static_argnames='k')


def case_from_scores(scores, pos, *, page=64, n=None, seed=0, order=None):
  """Arguments whose scores are given: sequence b has keys scores[b].

  Args:
    scores: a list of one-dimensional arrays, one a sequence.
    pos: position of the one row of each sequence.
    page: tokens a page.
    n: width of the page table; None for what the longest needs.
    seed: of the order of the pages.
    order: rows as (sequence, position) instead of one a sequence.

  Returns:
    The op's arguments; all that was not given is NaN.
  """
  rng = np.random.default_rng(seed)
  counts = [-(-len(s) // page) for s in scores]
  n = n or max(counts)
  P = sum(counts) + 2
  free = list(rng.permutation(P))
  keys = np.full((P, page, 1), np.nan, np.float32)
  table = np.full((len(scores), n), -1, np.int32)
  for b, row in enumerate(scores):
    for s in range(0, len(row), page):
      where = table[b, s // page] = free.pop()
      part = row[s : s + page]
      keys[where, : len(part), 0] = part
  rows = order or list(enumerate(pos))
  T = len(rows)
  both = np.array([1, -1], np.float32)
  return (
    jnp.asarray(np.broadcast_to(both[:, None], (T, 2, 1))),
    jnp.asarray(np.broadcast_to(both, (T, 2))),
    jnp.asarray(keys),
    None,
    jnp.asarray(table),
    jnp.asarray([r[0] for r in rows], jnp.int32),
    jnp.asarray([r[1] for r in rows], jnp.int32),
  )


def select(scores, k):
  """The contract on one row of scores: positions and scores, padded."""
  scores = np.asarray(scores, np.float64)
  scores = np.where(np.isnan(scores), NO, scores)
  best = np.argsort(-scores, kind='stable')[:k]
  best = np.sort(best[scores[best] > NO])
  missing = k - len(best)
  positions = np.concatenate([best, np.full(missing, -1)])
  return positions, np.concatenate([scores[best], np.full(missing, NO)])


def select_rows(scores, order, k):
  """`select` for rows (sequence, position): what lies ahead is not seen."""
  rows = [select(scores[b][: max(p + 1, 0)], k) for b, p in order]
  return np.array([r[0] for r in rows]), np.array([r[1] for r in rows])


class StreamingTopkTest(parameterized.TestCase):
  def check(self, implementation, scores, order, k, *, page=64, **options):
    """Runs chosen scores and compares positions and scores exactly."""
    scores = [np.asarray(s, np.float32) for s in scores]
    args = case_from_scores(scores, None, page=page, order=order)
    positions, values = runner(implementation, **options)(*args, k=k)
    expected, expected_values = select_rows(scores, order, k)
    self.assertEqual(positions.dtype, jnp.int32)
    self.assertEqual(values.dtype, jnp.float32)
    np.testing.assert_array_equal(np.asarray(positions), expected)
    np.testing.assert_array_equal(np.asarray(values), expected_values)
    return args

  @parameterized.product(
    implementation=IMPLEMENTATIONS, dtype=('f32', 'bf16', 'fp8')
  )
  def test_packed_batch_matches_float64(self, implementation, dtype):
    """Random heads and keys, three sequences, k between the lengths."""
    rng = np.random.default_rng(3)
    wide = {'f32': jnp.float32}.get(dtype, jnp.bfloat16)
    I, H, k, n = 4, 16, 70, 3  # noqa: E741
    order = [(1, 129), (0, 64), (2, 0), (1, 68), (0, -1), (1, 69), (1, 70)]
    seq, pos = (np.array(a, np.int32) for a in zip(*order))
    table = np.array([[5, 0, -1], [3, 6, 1], [2, -1, -1]], np.int32)
    lengths = (65, 130, 1)
    keys = np.full((8, 64, H), np.nan, np.float32)
    scales = np.full((8, 64), np.nan, np.float32)
    wide_keys = np.full((3, n * 64, H), np.nan)
    key_dtype = FP8 if dtype == 'fp8' else wide
    for b, length in enumerate(lengths):
      for s in range(length):
        at = table[b, s // 64], s % 64
        keys[at] = rng.normal(size=H)
        scales[at] = 2.0 ** rng.integers(-2, 3)
        value = keys[at].astype(key_dtype).astype(np.float64)
        wide_keys[b, s] = value * (scales[at] if dtype == 'fp8' else 1)
    q = rng.normal(size=(7, I, H)).astype(wide)
    w = rng.normal(size=(7, I)).astype(np.float32)
    scores = np.full((7, n * 64), NO)
    for t, (b, p) in enumerate(order):
      if p >= 0:
        dots = q[t].astype(np.float64) @ wide_keys[b, : p + 1].T
        scores[t, : p + 1] = w[t].astype(np.float64) @ np.maximum(dots, 0)
    positions, values = runner(implementation)(
      jnp.asarray(q),
      jnp.asarray(w),
      jnp.asarray(keys).astype(key_dtype),
      jnp.asarray(scales) if dtype == 'fp8' else None,
      jnp.asarray(table),
      jnp.asarray(seq),
      jnp.asarray(pos),
      k=k,
    )
    theirs, _ = select_rows(scores, list(enumerate([n * 64] * 7)), k)
    assert_same_selection(positions, theirs, scores, k)
    positions = np.asarray(positions)
    own = np.take_along_axis(scores, np.maximum(positions, 0), axis=1)
    own = np.where(positions >= 0, own, NO)
    assert_close(values, own, atol=1e-4, rtol=1e-5, name='scores')

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_page_and_chunk_edges(self, implementation):
    """Fewer, as many and more keys than k; pages of 64, chunks of 1024."""
    rng = np.random.default_rng(4)
    scores = [rng.normal(size=1025), rng.normal(size=65)]
    edges = (0, 62, 63, 64, 1022, 1023, 1024)
    order = [(0, p) for p in edges] + [(1, 64), (1, 63), (1, -1)]
    self.check(implementation, scores, order, 64)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_ties_by_the_thousand(self, implementation):
    """The threshold falls into, before and after runs of equal scores."""
    rng = np.random.default_rng(5)
    n, k = 4096, 500
    shuffled = lambda *counts: rng.permutation(
      np.repeat(np.arange(len(counts))[::-1], counts)
    )
    scores = [
      np.zeros(n),  # all equal
      shuffled(100, 2000, n - 2100),  # k falls into the ones
      shuffled(500, 2000, n - 2500),  # exactly k twos
      shuffled(499, 2000, n - 2499),  # one of 2000 ones
      np.repeat([0.0, 1.0], [n - 3, 3]),  # mostly zeros at the threshold
      -shuffled(3000, n - 3000).astype(np.float32),  # negative scores
    ]
    self.check(implementation, scores, [(b, n - 1) for b in range(6)], k)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_negative_zero_equals_zero(self, implementation):
    """Zeros of both signs tie: the lowest positions win.

    A negative scale turns a score of 0 into -0.0. With -0.0 below 0.0 the
    positive zeros, which lie behind, would be selected.
    """
    n, k = 512, 100
    keys = np.zeros(n, np.float32)
    keys[[7, 300]] = 1.0
    scales = np.where(np.arange(n) < 256, -1.0, 1.0).astype(np.float32)
    scores = keys * scales  # -1 at 7, +1 at 300, zeros of both signs
    self.assertTrue(np.signbit(scores[0]))
    positions, values = runner(implementation)(
      jnp.ones((1, 1, 1), jnp.bfloat16),
      jnp.ones((1, 1), jnp.float32),
      jnp.asarray(keys).reshape(8, 64, 1).astype(FP8),
      jnp.asarray(scales).reshape(8, 64),
      jnp.arange(8, dtype=jnp.int32)[None],
      jnp.zeros(1, jnp.int32),
      jnp.full(1, n - 1, jnp.int32),
      k=k,
    )
    expected, expected_values = select(scores + 0.0, k)
    self.assertEqual(expected[-1], 300)
    np.testing.assert_array_equal(np.asarray(positions[0]), expected)
    np.testing.assert_array_equal(np.asarray(values[0]), expected_values)
    self.assertFalse(np.signbit(np.asarray(values)).any())

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_nan_scores_lose_and_debug_mode_reports_them(self, implementation):
    """`lax.top_k` ranks NaN first; here NaN is never selected."""
    rng = np.random.default_rng(6)
    scores = [rng.normal(size=100), rng.normal(size=100)]
    scores[0][rng.permutation(100)[:90]] = np.nan
    order, k = [(0, 99), (1, 99)], 16
    args = self.check(implementation, scores, order, k)
    debug = checkify.checkify(
      lambda *args: runner(implementation)(*args, k=k),
      errors=checkify.user_checks,
    )
    error, (positions, _) = debug(*args)
    self.assertIn('an index score is NaN', error.get())
    np.testing.assert_array_equal(
      np.asarray(positions), select_rows(scores, order, k)[0]
    )
    # NaN where nothing is visible is no error.
    error, _ = debug(*case_from_scores([scores[1], scores[1]], (99, 50)))
    self.assertIsNone(error.get())

  def test_padding_of_a_block_is_not_reported(self):
    """Nine rows in blocks of eight: padding must not read sequence 0."""
    scores = [np.full(64, np.nan), np.arange(64.0)]
    args = case_from_scores(scores, None, order=[(1, 63)] * 9)
    debug = checkify.checkify(
      lambda *args: runner('xla', block_bytes=1)(*args, k=4),
      errors=checkify.user_checks,
    )
    error, (positions, _) = debug(*args)
    self.assertIsNone(error.get())
    np.testing.assert_array_equal(np.asarray(positions), [[60, 61, 62, 63]] * 9)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_infinite_scores(self, implementation):
    """+inf wins; a visible key of score -inf is never selected."""
    scores = np.arange(100, dtype=np.float32)
    scores[[3, 50]] = np.inf
    scores[10:40] = NO
    self.check(implementation, [scores], [(0, 99), (0, 45), (0, 2)], 40)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_no_visible_key(self, implementation):
    scores = [np.ones(64), np.zeros(0)]
    self.check(implementation, scores, [(0, -1), (1, 5), (0, 0)], 3)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_first_visible_position(self, implementation):
    """Position 0 is never selected, not even to fill up."""
    scores = np.arange(70.0)[::-1].copy()
    args = case_from_scores([scores], None, order=[(0, 69), (0, 1), (0, 0)])
    positions, _ = runner(implementation, first=1)(*args, k=3)
    expected = [[1, 2, 3], [1, -1, -1], [-1, -1, -1]]
    self.assertEqual(positions.tolist(), expected)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_no_rows(self, implementation):
    args = case_from_scores([np.ones(5)], None, order=[(0, 4)])
    args = [a if i in (2, 3, 4) else a[:0] for i, a in enumerate(args)]
    positions, scores = runner(implementation)(*args, k=3)
    self.assertEqual(positions.shape, (0, 3))
    self.assertEqual(scores.shape, (0, 3))

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_known_fault_14_fewer_valid_keys_than_k(self, implementation):
    """Three finite scores of 51, k=16: {0, 1, 2}, then 13 times -1."""
    scores = np.full(51, NO)
    scores[:3] = -1e30, 2.0, -5.0  # a legal score below any sentinel
    args = case_from_scores([scores], [50], page=17)
    self.assertEqual(args[4].shape[1] * 17, 51)
    positions, values = runner(implementation)(*args, k=16)
    self.assertEqual(positions[0].tolist(), [0, 1, 2] + [-1] * 13)
    np.testing.assert_array_equal(
      np.asarray(values[0]), np.float32([-1e30, 2, -5] + [NO] * 13)
    )

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_known_fault_14_k_exceeds_the_keys(self, implementation):
    """T=5 < k=8; the row 0 of 12 tokens sees itself only; 64 of 32."""
    rng = np.random.default_rng(14)
    five = [rng.normal(size=5)]
    self.check(implementation, five, [(0, t) for t in range(5)], 8, page=8)
    twelve = [rng.normal(size=12)]
    order = [(0, t) for t in range(12)]
    args = self.check(implementation, twelve, order, 8, page=4)
    positions, _ = runner(implementation)(*args, k=8)
    self.assertEqual(positions[0].tolist(), [0] + [-1] * 7)
    self.check(implementation, [rng.normal(size=32)], [(0, 31)], 64, page=32)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_known_fault_17_exact_at_128k(self, implementation):
    """131,072 random scores, k=2048: recall 1 and the same positions."""
    n, k = 1 << 17, 2048
    scores = np.random.default_rng(17).normal(size=n).astype(np.float32)
    args = case_from_scores([scores], [n - 1])
    positions, _ = runner(implementation)(*args, k=k)
    expected = np.sort(np.argsort(-scores, kind='stable')[:k])
    recall = len(np.intersect1d(np.asarray(positions[0]), expected)) / k
    self.assertEqual(recall, 1.0)
    np.testing.assert_array_equal(np.asarray(positions[0]), expected)

  def test_known_fault_25_last_position_of_a_million(self):
    """Position 1,048,575 survives as an int32 among the winners."""
    n = 1 << 20
    scores = np.zeros(n, np.float32)
    winners = [0, 2**19, 2**19 + 1, n - 3, n - 2, n - 1]
    scores[winners] = 1.0
    args = case_from_scores([scores], [n - 1], page=2048)
    positions, _ = runner('xla')(*args, k=6)
    self.assertEqual(positions.dtype, jnp.int32)
    self.assertEqual(positions[0].tolist(), winners)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_known_fault_28_second_sequence_of_a_packed_batch(
    self, implementation
  ):
    """Page 4, lengths 7 and 3: [0, 3, 6, -1] and [0, 1, 2, -1]."""
    first = [5, NO, NO, 4, NO, NO, 6]
    args = self.check(
      implementation, [first, [1, 3, 2]], [(0, 6), (1, 2)], 4, page=4
    )
    positions, values = runner(implementation)(*args, k=4)
    self.assertEqual(positions.tolist(), [[0, 3, 6, -1], [0, 1, 2, -1]])
    np.testing.assert_array_equal(np.asarray(values[1]), [1, 3, 2, NO])

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_known_fault_29_padding_rows_change_nothing(self, implementation):
    """A bucket of 8 with 3 live rows; padding names a live sequence."""
    rng = np.random.default_rng(29)
    scores = [rng.normal(size=70), rng.normal(size=130)]
    live = [(0, 69), (1, 129), (1, 128)]
    run = functools.partial(runner(implementation), k=16)
    alone = run(*case_from_scores(scores, None, order=live))
    order = live + [(0, -1)] * 5
    bucket = run(*case_from_scores(scores, None, order=order))
    for name, a, b in zip(('positions', 'scores'), bucket, alone):
      assert_bit_equal(a[:3], b, name=name)
    np.testing.assert_array_equal(np.asarray(bucket[0][3:]), -1)

  @parameterized.product(T=(9, 13))
  def test_blocks_of_rows(self, T):
    """Blocks of eight rows, the last one ragged, select as one block."""
    rng = np.random.default_rng(T)
    scores = [rng.normal(size=200), rng.normal(size=150)]
    order = [(t % 2, int(rng.integers(0, 150))) for t in range(T)]
    self.check('xla', scores, order, 32, block_bytes=1)

  def test_known_fault_30_scores_of_one_block_only(self):
    """Temporary bytes follow `block_bytes`, not rows times keys."""
    T, n, k = 256, 256, 64  # [T, S] float32 scores would be 16 MiB

    def temporary(block_bytes):
      shape = jax.ShapeDtypeStruct
      args = (
        shape((T, 1, 4), jnp.float32),
        shape((T, 1), jnp.float32),
        shape((n, 64, 4), jnp.float32),
        None,
        shape((1, n), jnp.int32),
        shape((T,), jnp.int32),
        shape((T,), jnp.int32),
      )
      run = jax.jit(
        functools.partial(streaming_topk, k=k, block_bytes=block_bytes)
      )
      analysis = run.lower(*args).compile().memory_analysis()
      return analysis.temp_size_in_bytes

    small = temporary(1 << 20)
    whole = temporary(1 << 30)
    self.assertGreater(whole, 4 * T * n * 64)
    self.assertLess(small, whole / 8)

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_known_fault_31_page_beyond_the_pool(self, implementation):
    """An id past the pool selects nothing, and debug mode raises."""
    scores = [np.arange(256.0), np.arange(64.0)]
    args = list(case_from_scores(scores, (255, 63)))
    size = args[2].shape[0]
    args[4] = args[4].at[0, 3].set(size + 2)
    run = functools.partial(runner(implementation), k=100)
    positions, _ = run(*args)
    self.assertEqual(positions[0].tolist(), list(range(92, 192)))
    self.assertEqual(positions[1].tolist(), [*range(64)] + [-1] * 36)
    debug = checkify.checkify(run, errors=checkify.user_checks)
    error, _ = debug(*args)
    self.assertIn(f'page {size + 2} is beyond the pool', error.get())

  def test_wrong_arguments(self):
    args = case_from_scores([np.ones(5)], [4])
    with self.assertRaisesRegex(ValueError, 'k=0 must be at least 1'):
      streaming_topk(*args, 0)
    bad = list(args)
    bad[1] = args[1].astype(jnp.bfloat16)
    with self.assertRaisesRegex(ValueError, r'w\.dtype=.*bfloat16'):
      streaming_topk(*bad, 4)
    with self.assertRaisesRegex(NotImplementedError, 'streaming_topk.*shard'):
      streaming_topk(*args, 4, shard=object())
    with self.assertRaisesRegex(ValueError, "implementation='approx'"):
      streaming_topk(*args, 4, implementation='approx')


if __name__ == '__main__':
  absltest.main()
