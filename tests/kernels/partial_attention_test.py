"""Partial attention over split pools and its merge, against the whole pool.

Shards hold NaN wherever no slot of theirs points, row 0 included.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_bit_equal, assert_close
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.topk_gather_attention import topk_gather_attention
from pallas_kernels.topk_gather_attention.partial import (
  first_valid,
  merge_partials,
  normalize,
  partial_attention,
)

SHARDS, R, P, SCALE = 4, 128, 16, 0.2
SPLIT, WHOLE = PartitionSpec('x'), PartitionSpec()


def make_case(T=6, N=3, k=40, M=64, seed=0):
  """A pool dealt to shards by contiguous rows.

  Row 0 selects nothing, row 1 rows of the last shard only.

  Returns:
    q, rows [M, 256], slots, and slots local to each shard [SHARDS, T, k].
  """
  rng = np.random.default_rng(seed)
  own = M // SHARDS
  slots = np.full((T, k), -1, np.int32)
  slots[1, :own] = np.arange(M - own, M)[::-1]
  for t in range(2, T):
    count = rng.integers(1, k)
    slots[t, rng.permutation(k)[:count]] = rng.permutation(M)[:count]
  rows = np.full((M, 256), np.nan, np.float32)
  used = np.unique(slots[slots >= 0])
  rows[used] = rng.normal(size=(len(used), 256))
  rows[used, R + P :] = 0
  shard = np.arange(SHARDS)[:, None, None]
  local = np.where((slots >= 0) & (slots // own == shard), slots % own, -1)
  q = rng.normal(size=(T, N, R + P)).astype(np.float32)
  return q, rows, slots, local.astype(np.int32)


def attend_split(q, rows, local):
  """What every shard returns after the merge: [SHARDS, ...] each."""
  mesh = Mesh(np.array(jax.devices()[:SHARDS]), ('x',))

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(WHOLE, SPLIT, SPLIT),
    out_specs=(SPLIT, SPLIT),
    check_vma=False,
  )
  def attend(q, rows, slots):
    slots, count = first_valid(slots[0])
    parts = partial_attention(
      q, rows, None, slots, count, scale=SCALE, latent_width=R
    )
    out, lse = merge_partials(*normalize(*parts), 'x')
    return out[None], lse[None]

  return jax.jit(attend)(q, rows, local)


class PartialAttentionTest(parameterized.TestCase):
  def test_split_pool_equals_whole_pool(self):
    """Rows without slots, one-sided rows and mixed rows, on every shard."""
    q, rows, slots, local = make_case()
    expected, expected_lse = topk_gather_attention(
      q, rows, None, slots, scale=SCALE, latent_width=R
    )
    out, lse = attend_split(q, rows, local)
    for shard in range(SHARDS):
      assert_close(out[shard], expected, atol=1e-6, rtol=1e-6, name='out')
      assert_close(lse[shard], expected_lse, atol=1e-6, rtol=1e-6, name='lse')
    np.testing.assert_array_equal(out[0, 0], 0)
    np.testing.assert_array_equal(lse[0, 0], -np.inf)

  def test_one_sided_row_is_untouched(self):
    """Empty shards weigh exactly nothing: the owner's bits come back."""
    q, rows, _, local = make_case()
    own = len(rows) // SHARDS
    slots, count = first_valid(jnp.asarray(local[-1]))
    alone = normalize(
      *partial_attention(
        q, rows[-own:], None, slots, count, scale=SCALE, latent_width=R
      )
    )
    out, lse = attend_split(q, rows, local)
    assert_bit_equal(out[0, 1], alone[0][1], name='out')
    assert_bit_equal(lse[0, 1], alone[1][1], name='lse')

  def test_merge_ignores_what_an_empty_shard_holds(self):
    """NaN in `out` where lse is -inf, on some shards and on all."""
    mesh = Mesh(np.array(jax.devices()[:SHARDS]), ('x',))
    merge = jax.jit(
      jax.shard_map(
        lambda out, lse: merge_partials(out, lse, 'x'),
        mesh=mesh,
        in_specs=(SPLIT, SPLIT),
        out_specs=(SPLIT, SPLIT),
      )
    )
    out = np.full((SHARDS, 2, 3), np.nan, np.float32)
    lse = np.full((SHARDS, 2), -np.inf, np.float32)
    out[2, 0], lse[2, 0] = [1, 2, 3], -700
    merged, merged_lse = merge(out, lse)
    np.testing.assert_array_equal(merged[0], [[1, 2, 3], [0, 0, 0]])
    np.testing.assert_array_equal(merged_lse[0], [-700, -np.inf])

  def test_merge_weighs_by_lse(self):
    """Two shards whose sums are as 3 to 1, at logits that overflow exp."""
    mesh = Mesh(np.array(jax.devices()[:2]), ('x',))
    merge = jax.shard_map(
      lambda out, lse: merge_partials(out, lse, 'x'),
      mesh=mesh,
      in_specs=(SPLIT, SPLIT),
      out_specs=(SPLIT, SPLIT),
    )
    out = np.float32([[[4.0]], [[8.0]]])
    lse = np.float32([[1000 + np.log(3)], [1000]])
    merged, merged_lse = merge(out, lse)
    assert_close(merged[:, 0, 0], [5, 5], atol=2e-4, rtol=0, name='out')
    expected = np.full((2, 1), 1000 + np.log(4))
    assert_close(merged_lse, expected, atol=1e-4, rtol=0, name='lse')

  def test_merge_has_a_gradient_with_empty_shards(self):
    """The shared maximum carries none, and -inf gives no NaN."""
    mesh = Mesh(np.array(jax.devices()[:2]), ('x',))
    merge = jax.shard_map(
      lambda out, lse: merge_partials(out, lse, 'x'),
      mesh=mesh,
      in_specs=(SPLIT, SPLIT),
      out_specs=(SPLIT, SPLIT),
    )
    lse = np.float32([[0.5, -np.inf, -np.inf], [0.5, 1.0, -np.inf]])
    out = np.ones((2, 3, 1), np.float32)
    total = lambda out, lse: jnp.sum(merge(out, lse)[0][0])
    d_out, d_lse = jax.grad(total, argnums=(0, 1))(out, lse)
    expected = np.float32([[0.5, 0, 0], [0.5, 1, 0]])
    assert_close(d_out[..., 0], expected, atol=1e-6, rtol=0, name='d_out')
    assert_close(d_lse, np.zeros((2, 3)), atol=1e-6, rtol=0, name='d_lse')

  def test_slots_beyond_the_count_are_not_read(self):
    q, rows, slots, _ = make_case()
    slots, count = first_valid(jnp.asarray(slots))
    call = functools.partial(partial_attention, scale=SCALE, latent_width=R)
    clean = call(q, rows, None, slots, count)
    beyond = jnp.where(slots < 0, 10**6, slots)
    for name, a, b in zip(
      ('acc', 'm', 'l'), call(q, rows, None, beyond, count), clean
    ):
      assert_bit_equal(a, b, name=name)

  def test_first_valid(self):
    slots = jnp.array([[-1, 7, -1, 3], [-1, -1, -1, -1], [4, 3, 2, 0]])
    ordered, count = first_valid(slots)
    expected = [[3, 7, -1, -1], [-1, -1, -1, -1], [0, 2, 3, 4]]
    np.testing.assert_array_equal(ordered, expected)
    np.testing.assert_array_equal(count, [2, 0, 4])

  def test_nan_shows(self):
    """A shard whose rows hold NaN is neither dropped nor taken for empty."""
    rows = np.full((4, 256), np.nan, np.float32)
    q = np.ones((1, 2, R + P), np.float32)
    slots, count = first_valid(jnp.array([[2, -1]]))
    parts = partial_attention(
      q, rows, None, slots, count, scale=SCALE, latent_width=R
    )
    out, lse = normalize(*parts)
    merge = jax.vmap(
      lambda out, lse: merge_partials(out, lse, 'x'), axis_name='x'
    )
    other = jnp.stack([lse, jnp.zeros_like(lse)])
    merged, merged_lse = merge(jnp.stack([out, jnp.ones_like(out)]), other)
    for x in (out, lse, merged, merged_lse):
      self.assertTrue(np.isnan(np.asarray(x)).all())

  def test_normalize(self):
    acc = jnp.array([[[2.0, 4.0]], [[0.0, 0.0]]])
    out, lse = normalize(
      acc, jnp.array([[3.0], [-jnp.inf]]), jnp.array([[2.0], [0.0]])
    )
    np.testing.assert_array_equal(out, [[[1, 2]], [[0, 0]]])
    expected = [[3 + np.log(2)], [-np.inf]]
    assert_close(lse, expected, atol=1e-6, rtol=0, name='lse')


if __name__ == '__main__':
  absltest.main()
