"""`select_sharded` on eight devices against numpy's stable sort."""

import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.streaming_topk.sharded import histogram, select_sharded

NO = -np.inf
RANKS = 8


@functools.cache
def runner(ranks, k, k_local=None):
  """Arrays [ranks, T, S] and [ranks, (T,) S] through `shard_map`."""
  mesh = Mesh(np.array(jax.devices()[:ranks]), ('context',))
  spec = PartitionSpec('context')

  def body(scores, positions):
    out = select_sharded(scores[0], positions[0], k, 'context', k_local)
    return jax.tree.map(lambda x: x[None], out)

  return jax.jit(
    jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(spec, spec))
  )


def best(scores, k):
  """The contract on one row: positions of the k best, ascending."""
  scores = np.where(np.isnan(scores), NO, scores.astype(np.float64))
  order = np.argsort(-scores, kind='stable')[:k]
  return np.sort(order[scores[order] > NO]).tolist()


def deal(S, ranks, page):
  """Positions [ranks, S / ranks]: pages dealt to ranks in turn."""
  pages = np.arange(S, dtype=np.int32).reshape(-1, ranks, page)
  return pages.swapaxes(0, 1).reshape(ranks, -1)


class SelectShardedTest(parameterized.TestCase):
  def check(self, scores, positions, k, *, k_local=None):
    """Scores [T, S] dealt by `positions` [ranks, S_local]."""
    local = np.moveaxis(scores[:, positions], 1, 0)  # [ranks, T, S_local]
    local = np.where(positions[:, None] >= 0, local, np.nan)
    run = runner(len(positions), k, k_local)
    chosen, overflow = jax.tree.map(np.asarray, run(local, positions))
    width = min(k, positions.shape[1]) if k_local is None else k_local
    self.assertEqual(chosen.shape, (len(positions), len(scores), width))
    self.assertEqual(chosen.dtype, np.int32)
    for t, row in enumerate(scores):
      expected = best(row, k)
      for r, own in enumerate(positions):
        mine = [p for p in expected if p in set(own.tolist())]
        got = chosen[r, t].tolist()
        kept = mine[:width]
        self.assertEqual(got, kept + [-1] * (width - len(kept)), (r, t))
        self.assertEqual(int(overflow[r, t]), len(mine) - len(kept))
    return chosen

  @parameterized.product(page=(1, 64), k=(1, 37, 300))
  def test_dealt_pages_equal_one_device(self, page, k):
    rng = np.random.default_rng(k)
    scores = rng.normal(size=(5, 1024)).astype(np.float32)
    scores[1] = np.round(scores[1])  # a handful of distinct values
    scores[2, 200:] = NO  # fewer keys than the last k
    scores[3] = np.where(rng.random(1024) < 0.9, NO, np.nan)
    scores[4] *= 1e-30
    self.check(scores, deal(1024, RANKS, page), k)

  def test_ties_by_the_thousand(self):
    """The cut falls among thousands of equal scores on all ranks."""
    rng = np.random.default_rng(0)
    S = 8192
    zeros = np.where(rng.random(S) < 0.5, -0.0, 0.0)
    scores = np.stack(
      [
        zeros,  # only ties, of both signs
        np.where(rng.random(S) < 0.05, 1.0, zeros),
        np.where(rng.random(S) < 0.001, rng.normal(size=S), -3.5),
        rng.normal(size=S),  # no tie: rows differ in what they need
      ]
    ).astype(np.float32)
    self.check(scores, deal(S, RANKS, 64), 2048, k_local=1024)

  def test_positions_in_any_order_a_row(self):
    """Candidates as [T, S_local], unsorted, some absent."""
    rng = np.random.default_rng(1)
    T, S = 3, 512
    scores = np.round(rng.normal(size=(T, S)) * 2).astype(np.float32)
    order = np.stack([rng.permutation(S) for _ in range(T)]).astype(np.int32)
    order = np.where(rng.random((T, S)) < 0.1, -1, order)
    local = np.where(
      order < 0, np.nan, np.take_along_axis(scores, np.maximum(order, 0), 1)
    )
    # A rank's absent candidates may hold any score.
    local = np.where(order < 0, 99, local).astype(np.float32)
    ranks = lambda x: x.reshape(T, RANKS, -1).swapaxes(0, 1)
    chosen, overflow = runner(RANKS, 60)(ranks(local), ranks(order))
    self.assertEqual(int(np.abs(overflow).max()), 0)
    for t in range(T):
      present = np.isin(np.arange(S), order[t])
      expected = best(np.where(present, scores[t], NO), 60)
      got = np.asarray(chosen)[:, t]
      self.assertEqual(np.sort(got[got >= 0]).tolist(), expected)
      for r, row in enumerate(got):
        row = row[row >= 0].tolist()
        self.assertEqual(row, sorted(row), (r, t))

  def test_empty_shards(self):
    """All visible keys on one rank, a row without any, padding ranks."""
    scores = np.full((3, 512), NO, np.float32)
    scores[0, 64:128] = np.arange(64)
    scores[1, 70] = -7.0
    positions = deal(512, RANKS, 64)
    positions[5] = -1
    chosen = self.check(scores, positions, 20)
    self.assertTrue((chosen[:, 2] == -1).all())

  def test_known_fault_47_interleave_two(self):
    """Lengths 1..4 on two ranks: union of local top-k is global top-k."""
    rng = np.random.default_rng(47)
    scores = rng.normal(size=(4, 8)).astype(np.float32)
    for t in range(4):
      scores[t, t + 1 :] = NO
    positions = deal(8, 2, 2)
    visible = [(positions[r] < n).sum() for r in range(2) for n in range(1, 5)]
    self.assertEqual(visible, [1, 2, 2, 2, 0, 0, 1, 2])
    for k in (2, 4):
      chosen = self.check(scores, positions, k)
      self.assertTrue((chosen[1, :2] == -1).all())

  def test_local_candidates_suffice(self):
    """Each rank brings its own top k only, as a kernel returns it."""
    rng = np.random.default_rng(2)
    S, k = 2048, 100
    scores = np.round(rng.normal(size=(2, S)) * 4).astype(np.float32)
    dealt = deal(S, RANKS, 64)
    positions = np.full((RANKS, 2, k), -1, np.int32)
    local = np.full((RANKS, 2, k), NO, np.float32)
    for r in range(RANKS):
      for t in range(2):
        own = dealt[r][best(scores[t][dealt[r]], k)]
        positions[r, t, : len(own)], local[r, t, : len(own)] = (
          own,
          scores[t][own],
        )
    chosen, _ = runner(RANKS, k)(local, positions)
    for t in range(2):
      got = np.asarray(chosen)[:, t]
      self.assertEqual(np.sort(got[got >= 0]).tolist(), best(scores[t], k))

  def test_overflow_is_counted(self):
    """All winners on rank 0, which may return four."""
    scores = np.full((1, 128), -1, np.float32)
    scores[0, :16] = 1
    self.check(scores, deal(128, RANKS, 16), 10, k_local=4)
    self.check(scores, deal(128, RANKS, 16), 40, k_local=64)

  def test_histogram_in_blocks(self):
    rng = np.random.default_rng(3)
    digits = rng.integers(0, 256, (5, 300)).astype(np.uint32)
    live = rng.random((5, 300)) < 0.7
    module = sys.modules[histogram.__module__]
    with mock.patch.object(module, 'BLOCK', 700):  # two rows at a time
      counts = np.asarray(histogram(jnp.asarray(digits), jnp.asarray(live)))
    for t in range(5):
      expected = np.bincount(digits[t][live[t]], minlength=256)
      np.testing.assert_array_equal(counts[t], expected)

  def test_wrong_arguments(self):
    scores, positions = jnp.ones((2, 8)), jnp.arange(8, dtype=jnp.int32)
    with self.assertRaisesRegex(ValueError, 'k=0 must be at least 1'):
      select_sharded(scores, positions, 0, 'context')
    with self.assertRaisesRegex(ValueError, r'positions_local\.shape=\(3, 8\)'):
      select_sharded(scores, jnp.zeros((3, 8), jnp.int32), 4, 'context')
    with self.assertRaisesRegex(ValueError, r"float32'\) must be int32"):
      select_sharded(scores, positions.astype(jnp.float32), 4, 'context')
    with self.assertRaisesRegex(ValueError, r'bfloat16.* must be float32'):
      select_sharded(scores.astype(jnp.bfloat16), positions, 4, 'context')


if __name__ == '__main__':
  absltest.main()
