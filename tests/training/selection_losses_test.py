"""Indexer losses against dense autodiff or finite differences in float64.

The dense forms score and weigh every key under a mask.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_close
from jax.test_util import check_grads
from loss_checks import (
  compile_for,
  in_float64,
  normal,
  same,
  same_loss,
  temporary,
)

from glm_jax import losses
from pallas_kernels import indexer_scores, topk_gather_attention

R, P, SCALE = 6, 2, 0.5


def selection_case(seed=0, T=6, N=2, k=5, M=16, heads=3, H=4, layers=3):
  """Slots with holes (row 1 empty) and, by layer, queries and pools.

  Pools and index keys are NaN where no slot points.
  """
  rng = np.random.default_rng(seed)
  slots = np.full((T, k), -1, np.int32)
  for t in range(T):
    count = 0 if t == 1 else rng.integers(1, k + 1)
    slots[t, rng.permutation(k)[:count]] = 1 + rng.permutation(M - 1)[:count]
  used = np.unique(slots[slots >= 0])
  rows = np.full((layers, M, R + P), np.nan)
  rows[:, used] = rng.normal(size=(layers, len(used), R + P))
  keys = np.full((M, H), np.nan)
  keys[used] = rng.normal(size=(len(used), H))
  q = rng.normal(size=(layers, T, N, R + P))
  index_q = rng.normal(size=(T, heads, H))
  return q, rows, slots, index_q, rng.normal(size=(T, heads)), keys


@functools.partial(jax.jit, static_argnames='block_bytes')
def target(q, rows, slots, row_scales=None, block_bytes=64 << 20):
  return losses.attention_target(
    q,
    rows,
    slots,
    scale=SCALE,
    latent_width=R,
    row_scales=row_scales,
    block_bytes=block_bytes,
  )


def dense_shares(q, rows, mask):
  """Normalised head-summed softmax over all rows under a mask."""
  logits = SCALE * jnp.einsum('tnd,sd->tns', q, rows)
  p = jnp.where(mask[:, None], jnp.exp(logits), 0)
  total = p.sum(-1, keepdims=True)
  p = p / jnp.where(total > 0, total, 1)
  return p.mean(axis=1)


def dense_scores(index_q, w, keys):
  dots = jnp.einsum('tih,sh->tis', index_q, keys)
  return jnp.einsum('tis,ti->ts', jnp.maximum(dots, 0), w)


def dense_kl(shares, scores, mask):
  """The mean over rows with any key of KL(shares || softmax(scores))."""
  e = jnp.where(mask, jnp.exp(scores), 0)
  total = e.sum(-1, keepdims=True)
  log_p = scores - jnp.log(jnp.where(total > 0, total, 1))
  terms = shares * (jnp.log(jnp.where(shares > 0, shares, 1)) - log_p)
  return jnp.sum(jnp.where(mask, terms, 0)) / mask.any(-1).sum()


class SelectionTest(parameterized.TestCase):
  @parameterized.parameters(64 << 20, 1)
  @in_float64
  def test_attention_target(self, block_bytes):
    """Against the softmax over the pool; dead rows and holes are 0."""
    q, rows, slots, *_ = selection_case(T=11)
    actual = target(q[0], rows[0], slots, block_bytes=block_bytes)
    chosen = (slots[:, :, None] == np.arange(16)).any(1)
    dense = dense_shares(q[0], np.nan_to_num(rows[0]), chosen)
    expected = np.take_along_axis(dense, np.maximum(slots, 0), axis=1)
    same(actual, np.where(slots >= 0, expected, 0), 'target')
    sums = np.sum(actual, axis=1)
    same(sums, (slots >= 0).any(1).astype(float), 'sums')

  def test_attention_target_of_records(self):
    """fp8 records may teach, although they have no gradient."""
    scales = jnp.ones((4, 1))
    rows = jnp.full((4, R + 2 * P), 0x38, jnp.uint8)  # e4m3 1.0
    q = jnp.ones((1, 1, R + P), jnp.bfloat16)
    slots = jnp.array([[0, -1, 2, 3]], jnp.int32)
    actual = target(q, rows, slots, row_scales=scales)
    assert_close(
      actual, [[1 / 3, 0, 1 / 3, 1 / 3]], atol=1e-6, rtol=0, name='target'
    )

  @parameterized.parameters(64 << 20, 1)
  @in_float64
  def test_selected_scores(self, block_bytes):
    """Scores and gradients; a key selected by many rows sums them all."""
    *_, slots, index_q, w, keys = selection_case(T=11)
    (g,) = normal(9, slots.shape)
    clean = np.nan_to_num(keys)
    picked = lambda s: jnp.where(
      slots >= 0, jnp.take_along_axis(s, np.maximum(slots, 0), axis=1), 0
    )
    dense = lambda *args: jnp.sum(g * picked(dense_scores(*args)))

    def ours(index_q, w, keys):
      scores = losses.selected_scores(
        index_q,
        w,
        jnp.where(np.isnan(selection_case(T=11)[-1]), jnp.nan, keys),
        slots,
        block_bytes=block_bytes,
      )
      return jnp.sum(jnp.where(slots >= 0, scores * g, 0))

    same_loss(ours, dense, index_q, w, clean)

  def test_selected_scores_are_the_indexers(self):
    """The same numbers as `indexer_scores` gives at those positions."""
    index_q, w, pages = (
      jnp.float32(x) for x in normal(10, (3, 2, 4), (3, 2), (1, 64, 4))
    )
    pos = jnp.array([5, 40, 63], jnp.int32)
    seq = jnp.zeros(3, jnp.int32)
    whole = jax.jit(indexer_scores)(
      index_q, w, pages, None, jnp.zeros((1, 1), jnp.int32), seq, pos
    )
    slots = jnp.array([[0, 5, -1], [40, 2, 9], [63, 1, 0]], jnp.int32)
    actual = jax.jit(losses.selected_scores)(index_q, w, pages[0], slots)
    expected = np.take_along_axis(whole, np.maximum(slots, 0), axis=1)
    expected = np.where(slots >= 0, expected, -np.inf)
    assert_close(actual, expected, atol=1e-6, rtol=1e-6, name='scores')

  @in_float64
  def test_indexer_kl(self):
    """Against the dense form; -inf and NaN where the mask is False."""
    target, scores = normal(11, (5, 7), (5, 7))
    mask = np.random.default_rng(0).random((5, 7)) < 0.6
    mask[2] = False
    target = np.where(mask, np.exp(target), 0)
    target /= np.maximum(target.sum(1, keepdims=True), 1e-30)
    dense = lambda s: dense_kl(target, s, mask)

    def ours(s):
      s = (
        jnp.where(mask, s, -jnp.inf)
        .at[0]
        .set(jnp.where(mask[0], s[0], jnp.nan))
      )
      return losses.indexer_kl(np.where(mask, target, np.nan), s, mask)

    _, (grad,) = same_loss(ours, dense, scores)
    p = jax.nn.softmax(np.where(mask, scores, -1e30)) * mask
    same(grad, (p - target) / 4, 'gradient is (p - target) / live rows')
    check_grads(jax.jit(ours), (scores,), 1, ('rev',), atol=1e-7, rtol=1e-7)

  def test_indexer_kl_extremes(self):
    """One-hot targets, huge scores, equality, nothing live."""
    big = 1e4
    mask = jnp.ones((4, 3), bool).at[3].set(False)
    target = jnp.array([[0, 1, 0], [1, 0, 0], [0.25, 0.5, 0.25], [0, 0, 0]])
    scores = jnp.array(
      [[0, big, 0], [0, big, -big], [0, jnp.log(2.0), 0], [big, 0, 0]]
    )
    run = jax.jit(jax.value_and_grad(losses.indexer_kl, 1))
    value, grad = run(target, scores, mask)
    assert_close(value, big / 3, atol=1e-2, rtol=0, name='only row 1 is far')
    expected = [[0, 0, 0], [-1 / 3, 1 / 3, 0], [0, 0, 0], [0, 0, 0]]
    assert_close(grad, expected, atol=1e-6, rtol=0, name='gradient')
    value, grad = run(target, scores, jnp.zeros_like(mask))
    self.assertEqual(value, 0)
    np.testing.assert_array_equal(grad, 0)

  @in_float64
  def test_known_fault_51_one_indexer_teaches_several_layers(self):
    """The gradient of one KL to the mean target is the mean of three.

    Sharing changes no weight: three equal layers count as one.
    """
    q, rows, slots, index_q, w, keys = selection_case()
    mask = slots >= 0
    targets = [target(q[j], rows[j], slots) for j in range(3)]

    def loss(combine):
      def f(index_q, w, keys):
        scores = losses.selected_scores(index_q, w, keys, slots)
        return combine(lambda p: losses.indexer_kl(p, scores, mask))

      return jax.jit(jax.value_and_grad(f, (0, 1, 2)))(index_q, w, keys)

    _, shared = loss(lambda kl: kl(losses.mean_target(targets)))
    _, each = loss(lambda kl: sum(kl(p) for p in targets) / 3)
    same(shared, each, 'gradients')
    self.assertGreater(max(np.nanmax(np.abs(g)) for g in shared), 1e-3)
    alone = loss(lambda kl: kl(targets[0]))
    thrice = loss(lambda kl: kl(losses.mean_target([targets[0]] * 3)))
    same(thrice, alone, 'equal layers')
    stacked = losses.mean_target(jnp.stack(targets))
    same(stacked, losses.mean_target(targets), 'stacked')

  @in_float64
  def test_nothing_flows_into_what_teaches(self):
    """Exactly 0 to the attention's queries and rows, not to the indexer's."""
    q, rows, slots, index_q, w, keys = selection_case()
    rows, keys = np.nan_to_num(rows), np.nan_to_num(keys)

    def sparse(q, rows, index_q):
      scores = losses.selected_scores(index_q, w, keys, slots)
      p = losses.mean_target([target(*x, slots) for x in zip(q, rows)])
      return losses.indexer_kl(p, scores, slots >= 0)

    def undetached(p, index_q):
      scores = losses.selected_scores(index_q, w, keys, slots)
      return losses.indexer_kl(p, scores, slots >= 0)

    d_q, d_rows, d_index = jax.jit(jax.grad(sparse, (0, 1, 2)))(
      q, rows, index_q
    )
    np.testing.assert_array_equal(d_q, 0)
    np.testing.assert_array_equal(d_rows, 0)
    self.assertGreater(np.abs(d_index).max(), 1e-3)
    p = np.where(slots >= 0, 0.2, 0)
    np.testing.assert_array_equal(jax.jit(jax.grad(undetached))(p, index_q), 0)

  @in_float64
  def test_dense_warm_up(self):
    """Two sequences, two layers, a padding row, keys from position 1 on."""
    B, T, N, S, heads, H = 2, 5, 2, 7, 3, 4
    q0, q1, rows0, rows1, index_q, w, keys = normal(
      12,
      (B, T, N, R + P),
      (B, T, N, R + P),
      (B, S, R + P),
      (B, S, R + P),
      (B, T, heads, H),
      (B, T, heads),
      (B, S, H),
    )
    pos = np.array([[1, 2, 3, 4, 5], [2, 4, 6, -1, 0]], np.int32)
    at = np.arange(S)
    mask = (at >= 1) & (at <= pos[..., None])

    def dense(index_q, w, keys):
      shares = jax.vmap(
        lambda q0, q1, r0, r1, m: (
          (dense_shares(q0, r0, m) + dense_shares(q1, r1, m)) / 2
        )
      )(q0, q1, rows0, rows1, mask)
      scores = jax.vmap(dense_scores)(index_q, w, keys)
      flat = lambda x: x.reshape(-1, S)
      return dense_kl(flat(shares), flat(scores), flat(mask))

    rows0 = rows0.copy()
    unseen = ~mask.any(axis=1)[..., None]
    ours = lambda layers, index_q, w, keys: losses.indexer_kl_dense(
      [(q, jnp.where(unseen, jnp.nan, r)) for q, r in layers],
      index_q,
      w,
      jnp.where(unseen, jnp.nan, keys),
      pos,
      scale=SCALE,
      first=1,
      chunk=2,
    )
    layers = [(q0, rows0), (q1, rows1)]
    same_loss(functools.partial(ours, layers), dense, index_q, w, keys)
    taught = jax.jit(jax.grad(ours))(layers, index_q, w, keys)
    for grad in jax.tree.leaves(taught):
      np.testing.assert_array_equal(grad, 0)

  @in_float64
  def test_warm_up_equals_sparse_where_everything_is_selected(self):
    """All visible keys selected: the two stages are one loss."""
    T, N, heads, H = 6, 2, 3, 4
    q, rows, index_q, w, keys = normal(
      13, (T, N, R + P), (T, R + P), (T, heads, H), (T, heads), (T, H)
    )
    pos = np.arange(T, dtype=np.int32)
    slots = np.where(pos <= pos[:, None], pos, -1)

    def sparse(index_q, w, keys):
      scores = losses.selected_scores(index_q, w, keys, slots)
      return losses.indexer_kl(target(q, rows, slots), scores, slots >= 0)

    def warm(index_q, w, keys):
      one = jax.tree.map(lambda x: x[None], (index_q, w, keys, pos))
      return losses.indexer_kl_dense(
        [(q[None], rows[None])], *one, scale=SCALE, chunk=4
      )

    same_loss(warm, sparse, index_q, w, keys)

  def test_temporary_bytes_do_not_grow_as_rows_times_keys(self):
    """The warm-up over T = S tokens, and targets and scores over k of them."""
    N, heads, H, k = 2, 2, 8, 128
    f32 = 'float32'

    def dense(S):
      run = lambda q, rows, index_q, w, keys, pos: losses.indexer_kl_dense(
        [(q, rows)], index_q, w, keys, pos, scale=SCALE, chunk=16
      )
      return compile_for(
        jax.value_and_grad(run, (2, 3, 4)),
        ((1, S, N, R + P), f32),
        ((1, S, R + P), f32),
        ((1, S, heads, H), f32),
        ((1, S, heads), f32),
        ((1, S, H), f32),
        ((1, S), 'int32'),
      )

    def sparse(T):
      def run(q, rows, index_q, w, keys, slots):
        scores = losses.selected_scores(
          index_q, w, keys, slots, block_bytes=1 << 18
        )
        p = target(q, rows, slots, block_bytes=1 << 18)
        return losses.indexer_kl(p, scores, slots >= 0)

      return compile_for(
        jax.value_and_grad(run, (2, 3, 4)),
        ((T, N, R + P), f32),
        ((256, R + P), f32),
        ((T, heads, H), f32),
        ((T, heads), f32),
        ((256, H), f32),
        ((T, k), 'int32'),
      )

    # One [T, S] float32 array would add 3.9 MB, a [T, N, S] one twice that.
    growth = lambda f: temporary(f(1024)) - temporary(f(256))
    self.assertLess(growth(dense), 1 << 20)
    # Some [T, k] arrays; gathered rows would be 8 and keys 8 times as many.
    self.assertLess(growth(sparse), 6 * 768 * k * 4)

  @in_float64
  def test_attention_target_is_what_attention_used(self):
    """Target-weighted rows are the head-mean of the attention's output."""
    q, rows, slots, *_ = selection_case()
    attend = functools.partial(
      topk_gather_attention, scale=SCALE, latent_width=R
    )
    out, _ = jax.jit(attend)(q[0], rows[0], None, slots)
    latents = np.nan_to_num(rows[0])[np.maximum(slots, 0), :R]
    shares = target(q[0], rows[0], slots)
    same(jnp.einsum('tk,tkr->tr', shares, latents), out.mean(axis=1), 'outputs')


if __name__ == '__main__':
  absltest.main()
