"""The TPU kernel of `indexer_scores`, interpreted on a CPU.

Small blocks stand in for the real ones, so that a few hundred keys cross
their edges. Everything that must not be read is NaN, as in
`indexer_scores_test`, whose cases these are.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from compare import assert_close
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from score_cases import make_case, scores_f64

from pallas_kernels import indexer_scores
from pallas_kernels.indexer_scores import tpu

SIMULATED = pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')


def run(args, *, block=1024, interpret=True, **options):
  """The kernel with blocks of `block` keys."""
  with mock.patch.object(tpu, 'MAX_BLOCK', block):
    call = functools.partial(tpu.indexer_scores, interpret=interpret, **options)
    return np.asarray(jax.jit(call)(*args))


def races_found():
  return interpret_pallas_call.races.races_found


class TpuScoresTest(parameterized.TestCase):
  def check(self, args, actual, first=0):
    expected = scores_f64(*args)
    expected[:, :first] = -np.inf
    self.assertEqual(actual.dtype, np.float32)
    assert_close(actual, expected, atol=1e-4, rtol=1e-5, name='scores')

  def test_mixed_rows_over_several_blocks(self):
    self.check_mixed('fp8')

  @parameterized.parameters('f32', 'bf16')
  @pytest.mark.long
  def test_mixed_rows_of_other_dtypes(self, dtype):
    self.check_mixed(dtype)

  def check_mixed(self, dtype):
    """Tiles of 4, 3 and 1 rows, padding, holes; 32 heads; three blocks."""
    rows = [(0, 2100), (2, 0), (1, 1100), (0, -1), (1, 63), (1, 1024)]
    rows += [(0, 1023), (0, 70), (0, 1), (2, 5)]
    args = make_case(dtype, (2111, 1101, 3), rows, n=34, heads=32, width=16)
    hole = np.array(args[4])
    hole[0, 3], hole[1, 16] = -1, -1
    args = (*args[:4], jnp.asarray(hole), *args[5:])
    self.check(args, run(args))

  def test_blocks_of_several_parts(self):
    self.check_parts('fp8', 6146)

  @parameterized.product(dtype=('bf16', 'fp8'), last=(4095, 4096))
  @pytest.mark.long
  def test_edges_of_parts(self, dtype, last):
    self.check_parts(dtype, last)

  def check_parts(self, dtype, last):
    """Whole blocks in the loop, a part of one at the end, holes in both."""
    rows = [(0, last), (0, last - 1), (0, 2047), (0, 2048)]
    args = make_case(dtype, (6147,), rows, n=97, heads=4, width=8)
    hole = np.array(args[4])
    hole[0, [5, 40, 96]] = -1
    args = (*args[:4], jnp.asarray(hole), *args[5:])
    self.check(args, run(args, block=2048))

  def test_one_row_a_sequence(self):
    """Decode: a tile a row; the lowest position is not there."""
    rows = [(1, 1500), (0, 1023), (2, 12)]
    args = list(
      make_case('bf16', (1024, 1501, 0), rows, n=24, heads=32, width=8)
    )
    args[2] = args[2].at[int(args[4][1, 0]), 0].set(jnp.nan)
    args[2] = args[2].at[int(args[4][0, 0]), 0].set(jnp.nan)
    self.check(args, run(args, first=1), first=1)

  @parameterized.parameters(True, False)
  def test_queries_of_two_parts(self, races):
    """fp8 keys as they are; features of 2^-9 to 2^9 beside one another."""
    rows = [(1, 1100), (0, 1023), (2, 12)]
    args = list(
      make_case('fp8', (1024, 1101, 13), rows, n=18, heads=32, width=8)
    )
    wide = 2.0 ** np.random.default_rng(0).integers(-9, 10, args[0].shape)
    args[0] = (args[0] * wide).astype(jnp.bfloat16)
    interpret = SIMULATED if races else True
    with mock.patch.object(tpu, 'generation', lambda: 'v6e'):
      self.assertTrue(tpu.splits(args[0], args[3], 1))
      self.assertFalse(tpu.splits(args[0], args[3], 2))
      actual = run(args, interpret=interpret)
    self.assertFalse(races and races_found())
    expected = scores_f64(*args)
    size = np.abs(expected[np.isfinite(expected)]).max()
    assert_close(actual, expected, atol=1e-6 * size, rtol=1e-5, name='scores')

  @pytest.mark.long
  def test_first_beyond_a_block(self):
    rows = [(0, 1500), (0, 1023), (0, 1100)]
    args = make_case('f32', (1501,), rows, n=24, heads=2, width=8)
    self.check(args, run(args, first=1040), first=1040)

  @parameterized.parameters('bf16', 'fp8')
  def test_no_race_and_no_unwritten_memory(self, dtype):
    """Simulated memory: copies land when waited for, the rest is NaN."""
    rows = [(0, 3080), (1, 2), (0, 64), (0, -1)]
    args = make_case(dtype, (3081, 3), rows, n=49, heads=2, width=8)
    actual = run(args, interpret=SIMULATED)
    self.assertFalse(races_found())
    self.check(args, actual)

  def test_a_missing_wait_shows(self):
    """The check above can fail: without its wait, no page ever lands."""
    stream = tpu.score_tiles.__globals__['Stream']
    args = make_case('f32', (31,), [(0, 30)], n=1, heads=1, width=8)
    with mock.patch.object(stream, 'wait_part', lambda self, i: None):
      actual = run(args, interpret=SIMULATED)
    self.assertTrue(np.isnan(actual[0, :31]).all())

  def test_public_call(self):
    """By name: padding rows and no pages; what no tile divides."""
    run = functools.partial(indexer_scores, implementation='interpret')
    args = list(make_case('f32', (65, 0), [(0, -1), (1, 10), (0, -7)], n=3))
    args[2] = jnp.full_like(args[2], jnp.nan)
    np.testing.assert_array_equal(run(*args), np.full((3, 192), -np.inf))
    small = make_case('f32', (7, 3), [(0, 6), (1, 2)], n=2, page=4)
    with self.assertRaisesRegex(NotImplementedError, 'pages of 64.*page=4'):
      run(*small)
    with self.assertRaisesRegex(NotImplementedError, 'multiple of 128.*H=16'):
      indexer_scores(*args, implementation='tpu')
    args = make_case('f32', (5,), [], n=1)
    self.assertEqual(run(*args).shape, (0, 64))

  @parameterized.parameters(5, 6)
  def test_lines_of_two_pages(self, P):
    """Each page's scales lie in the half of its line that its id says."""
    scales = jnp.arange(P * 64, dtype=jnp.float32).reshape(P, 64)
    table = jnp.asarray([[4, 0, 3], [1, -1, 2]], jnp.int32)
    lines = np.asarray(tpu.pair_lines(scales, table, 8))
    self.assertEqual(lines.shape, (2, 2, 8, 128))
    for (b, j), page in np.ndenumerate(np.asarray(table)):
      half = 64 * (page % 2)
      found = lines[j % 2, b, j // 2, half : half + 64]
      if page >= 0:
        np.testing.assert_array_equal(found, scales[page])

  def test_row_tiles(self):
    """Every row has one place, in a tile of its own sequence."""
    rng = np.random.default_rng(0)
    seq = rng.integers(0, 5, 37).astype(np.int32)
    pos = rng.integers(-1, 900, 37).astype(np.int32)
    row_of, seq_of, last_of = map(np.asarray, tpu.row_tiles(seq, pos, 5, 4))
    self.assertCountEqual(row_of[row_of >= 0].tolist(), range(37))
    for tile, rows in enumerate(row_of.reshape(-1, 4)):
      rows = rows[rows >= 0]
      self.assertTrue((seq[rows] == seq_of[tile]).all())
      self.assertEqual(last_of[tile], pos[rows].max(initial=-1))


if __name__ == '__main__':
  absltest.main()
