"""Every loss against dense autodiff or finite differences in float64.

The dense forms hold all logits and know nothing of chunks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from compare import assert_close
from jax.test_util import check_grads

from glm_jax import losses
from glm_jax.losses.drafts import _rejected
from pallas_kernels import indexer_scores, topk_gather_attention

R, P, SCALE = 6, 2, 0.5
shape = jax.ShapeDtypeStruct


def in_float64(test):
  """Runs a test with 64-bit numbers."""

  @functools.wraps(test)
  def wrapped(*args, **kwargs):
    with jax.enable_x64(True):
      return test(*args, **kwargs)

  return wrapped


def same(actual, expected, name, tolerance=1e-11):
  """Compares pytrees of arrays."""
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    assert_close(a, e, atol=tolerance, rtol=tolerance, name=name)


def same_loss(ours, dense, *args, tolerance=1e-11):
  """Compares a loss and its gradients to all of `args`; returns ours."""
  argnums = tuple(range(len(args)))
  run = lambda f: jax.jit(jax.value_and_grad(f, argnums))(*args)
  actual = run(ours)
  same(actual, run(dense), 'loss and gradients', tolerance)
  return actual


def temporary(f, *shapes):
  """Temporary bytes of a compiled function."""
  lowered = jax.jit(f).lower(*(shape(*s) for s in shapes))
  return lowered.compile().memory_analysis().temp_size_in_bytes


def normal(seed, *sizes):
  """Random float64 arrays of several shapes."""
  rng = np.random.default_rng(seed)
  return [rng.normal(size=size) for size in sizes]


class TokensTest(parameterized.TestCase):
  @parameterized.parameters(1, 4, 100)
  @in_float64
  def test_cross_entropy(self, chunk):
    """Chunks that divide nothing; NaN and wild targets where masked."""
    hidden, head = normal(0, (11, 5), (7, 5))
    targets = np.arange(11) % 7
    mask = np.arange(11) % 3 != 1
    targets[~mask] = -100

    def dense(hidden, head):
      log_p = jax.nn.log_softmax(hidden @ head.T)[np.arange(11), targets]
      return -jnp.sum(jnp.where(mask, log_p, 0)) / mask.sum()

    ours = lambda hidden, head: losses.cross_entropy(
      jnp.where(mask[:, None], hidden, jnp.nan), head, targets, mask, chunk
    )
    _, (d_hidden, _) = same_loss(ours, dense, hidden, head)
    np.testing.assert_array_equal(d_hidden[~mask], 0)

  @in_float64
  def test_weights(self):
    """A float mask weighs; two rows of weight 1 are one of weight 2."""
    hidden, head = normal(1, (2, 3), (4, 3))
    run = lambda rows, mask: losses.cross_entropy(
      hidden[rows], head, np.array([1, 2])[rows], jnp.asarray(mask)
    )
    rows = np.array([0, 1])
    whole = run(np.array([0, 0, 1]), [1.0, 1.0, 1.0])
    same(run(rows, [2.0, 1.0]), whole, 'loss')

  def test_masked_out_entirely(self):
    hidden, head = (jnp.float32(x) for x in normal(2, (4, 3), (5, 3)))
    zero = jnp.zeros(4)
    run = lambda hidden, head: losses.cross_entropy(
      hidden, head, jnp.zeros(4, jnp.int32), zero
    )
    value, grads = jax.value_and_grad(run, (0, 1))(hidden, head)
    self.assertEqual(value, 0)
    for grad in grads:
      np.testing.assert_array_equal(grad, 0)

  def test_head_gradient_is_summed_in_float32(self):
    """2048 chunks of bf16: bf16 sums would stop growing."""
    T = 2048
    hidden = jnp.ones((T, 1), jnp.bfloat16)
    head = jnp.zeros((2, 1), jnp.bfloat16)
    run = lambda head: losses.cross_entropy(
      hidden, head, jnp.zeros(T, jnp.int32), jnp.ones(T, bool), chunk=1
    )
    grad = jax.jit(jax.grad(run))(head)
    self.assertEqual(grad.dtype, jnp.bfloat16)
    np.testing.assert_array_equal(np.float32(grad), [[-0.5], [0.5]])

  def test_temporary_bytes_do_not_grow_as_tokens_times_vocabulary(self):
    D, V = 8, 4096
    run = lambda h, w, y: losses.cross_entropy(
      h, w, y, jnp.ones(len(y), bool), chunk=32
    )

    def measure(T, arguments):
      f = jax.value_and_grad(run, arguments)
      return temporary(f, ((T, D), 'float32'), ((V, D), 'float32'),
                       ((T,), 'int32'))  # fmt: skip

    small, large = measure(256, (0, 1)), measure(1024, (0, 1))
    self.assertLess(large - small, 768 * V)  # logits would be four times this
    # A frozen head has no [V, D] gradient.
    self.assertLess(measure(256, 0), small - 4 * V * D + 4096)


class DraftsTest(parameterized.TestCase):
  @in_float64
  def test_total_variation(self):
    p, q = normal(3, (4, 9), (4, 9))
    p, q = 2 * p, 2 * q
    softmax = lambda z: jax.nn.softmax(z)
    dense = lambda q: jnp.sum(
      1 - jnp.minimum(softmax(p), softmax(q)).sum(-1)
    )
    ours = lambda q: jnp.sum(losses.total_variation(p, q))
    _, (grad,) = same_loss(ours, dense, q)
    self.assertLess(np.abs(grad).max(), 1)
    check_grads(jax.jit(ours), (q,), 1, ('rev',), atol=1e-7, rtol=1e-7)

  def test_extreme_distributions(self):
    """One-hot, equal, disjoint; by size and by exclusion."""
    big, out = 1e4, -jnp.inf
    same_z = jnp.array([0.3, -1.0, 2.0, 0.1])
    cases = {
      'equal': (same_z, same_z, 0),
      'one-hot, equal': ([0, big, 0, 0], [0, big, 0, 0], 0),
      'one-hot, disjoint': ([big, 0, 0, 0], [0, big, 0, 0], 1),
      'excluded, equal': ([0, out, out, 0], [0, out, out, 0], 0),
      'excluded, disjoint': ([0, out, out, 0], [out, 0, 0, out], 1),
      'one-hot p': ([big, 0, 0, 0], [0, 0, 0, 0], 0.75),
      'one-hot q': ([0, 0, 0, 0], [out, out, 0, out], 0.75),
    }
    names, p, q, expected = zip(*((n, *c) for n, c in cases.items()))
    p, q = (jnp.stack([jnp.float32(jnp.array(r)) for r in z]) for z in (p, q))
    run = lambda p, q: losses.total_variation(p, q)
    value, pull = jax.vjp(run, p, q)
    d_p, d_q = pull(jnp.ones(len(names)))
    assert_close(value, expected, atol=1e-6, rtol=0, name=str(names))
    np.testing.assert_array_equal(d_p, 0)
    self.assertTrue(np.isfinite(d_q).all())
    for name, row in zip(names, d_q):
      with self.subTest(name):
        if 'equal' in name or 'disjoint' in name:
          # Disjoint support is a plateau: TV has no slope there.
          np.testing.assert_array_equal(row, 0)

  @parameterized.parameters(1, 2, 5)
  @in_float64
  def test_end_to_end(self, steps):
    p, q = normal(4, (steps, 6, 9), (steps, 6, 9))
    mask = np.array([1, 1, 0, 1, 0, 1], bool)
    q[:, ~mask] = 0

    def dense(q):
      rates = jnp.minimum(jax.nn.softmax(p), jax.nn.softmax(q)).sum(-1)
      prefixes = [jnp.prod(rates[: j + 1], axis=0) for j in range(steps)]
      rows = 1 - sum(prefixes) / steps
      return jnp.sum(jnp.where(mask, rows, 0)) / mask.sum()

    poisoned = np.where(mask[:, None], p, np.nan)
    ours = lambda q: losses.end_to_end_tv(
      poisoned, jnp.where(mask[:, None], q, jnp.nan), mask
    )
    same_loss(ours, dense, q)
    check_grads(jax.jit(ours), (q,), 1, ('rev',), atol=1e-7, rtol=1e-7)
    if steps == 1:
      plain = losses.total_variation(p[0], q[0])
      same(ours(q), jnp.mean(plain[mask]), 'one step is total variation')

  @in_float64
  def test_a_step_that_is_never_accepted(self):
    """a_2 = 0 of three: omega has no division, steps 1 and 2 still learn.

    L = 1 - (a_1 + a_1 a_2 + a_1 a_2 a_3) / 3, so omega is (1/3, a_1 (1 + a_3)
    / 3, 0).
    """
    out = -np.inf
    p, q = normal(5, (3, 1, 4), (3, 1, 4))
    p[1], q[1] = [[0, 0, out, out]], [[out, out, 0, 0]]
    ones = np.ones(1, bool)
    q_grad = jax.grad(lambda q: losses.end_to_end_tv(p, q, ones))(q)
    own = jax.grad(lambda q: jnp.sum(losses.total_variation(p, q)))(q)
    same(q_grad[0], own[0] / 3, 'step 1')
    np.testing.assert_array_equal(q_grad[1:], 0)
    # Steps 2's own gradient is 0 on the plateau; its omega is not.
    rates = 1 - losses.total_variation(p, q)
    omega = -jax.grad(lambda a: jnp.sum(_rejected(a)))(rates)
    expected = [1 / 3, rates[0, 0] * (1 + rates[2, 0]) / 3, 0]
    same(omega[:, 0], jnp.array(expected), 'omega')

  @parameterized.product(aligned=(True, False), own_head=(True, False))
  @in_float64
  def test_end_to_end_from_hidden(self, aligned, own_head):
    """Equal to the form over logits; nothing flows into the trunk."""
    G, T, D, V = 3, 7, 4, 6
    trunk, q, head, other = normal(6, (T + G, D), (G, T, D), (V, D), (V, D))
    mask = np.arange(T) != 2
    trunk_head = other if own_head else head
    at = np.arange(T) + 1 + np.arange(G)[:, None]

    def dense(trunk, q, head):
      p_logits = jax.lax.stop_gradient(trunk[at] @ trunk_head.T)
      return losses.end_to_end_tv(p_logits, q @ head.T, mask)

    def ours(trunk, q, head):
      return losses.end_to_end_tv_from_hidden(
        trunk[at] if aligned else trunk,
        q,
        head,
        mask,
        p_head=other if own_head else None,
        chunk=3,
      )

    _, (d_trunk, _, d_head) = same_loss(ours, dense, trunk, q, head)
    np.testing.assert_array_equal(d_trunk, 0)
    self.assertGreater(np.abs(d_head).max(), 1e-3)
    grad = jax.grad(
      lambda w: losses.end_to_end_tv_from_hidden(
        trunk, q, head, mask, p_head=w
      )
    )(other)
    np.testing.assert_array_equal(grad, 0)

  def test_end_to_end_shapes(self):
    q, head, mask = jnp.ones((2, 4, 3)), jnp.ones((5, 3)), jnp.ones(4, bool)
    with self.assertRaisesRegex(ValueError, r'\(5, 3\) must be \(6, 3\) or'):
      losses.end_to_end_tv_from_hidden(jnp.ones((5, 3)), q, head, mask)

  def test_all_rows_masked(self):
    q, head = (jnp.float32(x) for x in normal(7, (2, 4, 3), (5, 3)))
    mask = jnp.zeros(4, bool)
    targets = jnp.zeros((2, 4), jnp.int32)
    runs = (
      lambda q, w: losses.end_to_end_tv_from_hidden(q, q, w, mask),
      lambda q, w: losses.end_to_end_tv(q @ w.T, q @ w.T, mask),
      lambda q, w: losses.mtp_cross_entropy(q, w, targets, mask),
    )
    for run in runs:
      value, grads = jax.jit(jax.value_and_grad(run, (0, 1)))(q, head)
      self.assertEqual(value, 0)
      for grad in grads:
        np.testing.assert_array_equal(grad, 0)

  def test_temporary_bytes_do_not_grow_as_tokens_times_vocabulary(self):
    G, D, V = 3, 8, 2048

    def measure(T):
      run = lambda p, q, w: losses.end_to_end_tv_from_hidden(
        p, q, w, jnp.ones(T, bool), chunk=8
      )
      f = jax.value_and_grad(run, (1, 2))
      return temporary(f, ((T + G, D), 'float32'), ((G, T, D), 'float32'),
                       ((V, D), 'float32'))  # fmt: skip

    self.assertLess(measure(512) - measure(128), 384 * G * V)

  @in_float64
  def test_mtp_cross_entropy(self):
    """The mean over steps of the cross-entropy of each."""
    G, T = 3, 8
    hidden, head = normal(8, (G, T, 4), (5, 4))
    targets = np.random.default_rng(0).integers(0, 5, (G, T))
    mask = np.arange(T) < 6
    dense = lambda hidden, head: sum(
      losses.cross_entropy(h, head, y, mask) for h, y in zip(hidden, targets)
    ) / G
    ours = lambda hidden, head: losses.mtp_cross_entropy(
      hidden, head, targets, mask, chunk=3
    )
    same_loss(ours, dense, hidden, head)

  def test_draft_targets(self):
    """Two sequences of 6 and 4 tokens, two steps: 3 and 1 rows are whole."""
    tokens = jnp.array([[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 0, 0]])
    mask = jnp.array([[1] * 6, [1, 1, 1, 1, 0, 0]], bool)
    targets, live = losses.draft_targets(tokens, mask, 2)
    np.testing.assert_array_equal(
      live.reshape(2, 6), [[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    )
    targets = targets.reshape(2, 2, 6)
    np.testing.assert_array_equal(targets[:, 0, :3], [[2, 3, 4], [3, 4, 5]])
    np.testing.assert_array_equal(targets[:, 1, 0], [12, 13])


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


target = functools.partial(
  losses.attention_target, scale=SCALE, latent_width=R
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
    zero = jnp.zeros((1, 1), jnp.int32)
    whole = indexer_scores(index_q, w, pages, None, zero, zero[0, :1].repeat(3),
                           pos)  # fmt: skip
    slots = jnp.array([[0, 5, -1], [40, 2, 9], [63, 1, 0]], jnp.int32)
    actual = losses.selected_scores(index_q, w, pages[0], slots)
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
      s = jnp.where(mask, s, -jnp.inf).at[0].set(
        jnp.where(mask[0], s[0], jnp.nan)
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
    value, grad = jax.value_and_grad(losses.indexer_kl, 1)(
      target, scores, mask
    )
    assert_close(value, big / 3, atol=1e-2, rtol=0, name='only row 1 is far')
    expected = [[0, 0, 0], [-1 / 3, 1 / 3, 0], [0, 0, 0], [0, 0, 0]]
    assert_close(grad, expected, atol=1e-6, rtol=0, name='gradient')
    value, grad = jax.value_and_grad(losses.indexer_kl, 1)(
      target, scores, jnp.zeros_like(mask)
    )
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
    np.testing.assert_array_equal(jax.grad(undetached)(p, index_q), 0)

  @parameterized.parameters(1, 3, 100)
  @in_float64
  def test_dense_warm_up(self, chunk):
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
          dense_shares(q0, r0, m) + dense_shares(q1, r1, m)
        )
        / 2
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
      chunk=chunk,
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
      return temporary(
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

      return temporary(
        jax.value_and_grad(run, (2, 3, 4)),
        ((T, N, R + P), f32),
        ((256, R + P), f32),
        ((T, heads, H), f32),
        ((T, heads), f32),
        ((256, H), f32),
        ((T, k), 'int32'),
      )

    # One [T, S] float32 array would add 3.9 MB, a [T, N, S] one twice that.
    self.assertLess(dense(1024) - dense(256), 1 << 20)
    # Some [T, k] arrays; gathered rows would be 8 and keys 8 times as many.
    self.assertLess(sparse(1024) - sparse(256), 6 * 768 * k * 4)

  @in_float64
  def test_attention_target_is_what_attention_used(self):
    """Target-weighted rows are the head-mean of the attention's output."""
    q, rows, slots, *_ = selection_case()
    out, _ = topk_gather_attention(
      q[0], rows[0], None, slots, scale=SCALE, latent_width=R
    )
    latents = np.nan_to_num(rows[0])[np.maximum(slots, 0), :R]
    shares = target(q[0], rows[0], slots)
    same(
      jnp.einsum('tk,tkr->tr', shares, latents), out.mean(axis=1), 'outputs'
    )


class BalanceTest(absltest.TestCase):
  def test_load_and_update(self):
    experts = jnp.array([[0, 1], [0, 2], [0, 1], [3, 3]], jnp.int32)
    mask = jnp.array([1, 1, 1, 0], bool)
    load = losses.expert_load(experts, 4, mask)
    np.testing.assert_array_equal(load, [3, 2, 1, 0])
    whole = losses.expert_load(experts, 4)
    np.testing.assert_array_equal(whole, [3, 2, 1, 2])
    bias = jnp.array([0.5, 0.0, -0.25, 1.0])
    moved = losses.update_correction_bias(bias, load, 0.125)
    np.testing.assert_array_equal(moved, [0.375, -0.125, -0.125, 1.125])
    # The expert at the mean (2) stays.
    moved = losses.update_correction_bias(bias, whole, 0.125)
    np.testing.assert_array_equal(moved, [0.375, 0.0, -0.125, 1.0])

  def test_bias_has_no_gradient(self):
    load = jnp.array([3, 1], jnp.int32)
    run = lambda b: jnp.sum(losses.update_correction_bias(b, load, 0.1))
    np.testing.assert_array_equal(jax.grad(run)(jnp.zeros(2)), 0)

  def test_the_rule_evens_out_a_skewed_router(self):
    """One expert is favoured; after a while no load is far from the mean."""
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.random((256, 8)) + np.eye(8)[0], jnp.float32)

    def step(bias, _):
      _, experts = jax.lax.top_k(scores + bias, 2)
      load = losses.expert_load(experts, 8)
      return losses.update_correction_bias(bias, load, 0.01), load

    _, loads = jax.lax.scan(step, jnp.zeros(8), length=200)
    self.assertEqual(loads[0, 0], 256)
    np.testing.assert_array_less(np.abs(loads[-1] - 64), 16)


if __name__ == '__main__':
  absltest.main()
