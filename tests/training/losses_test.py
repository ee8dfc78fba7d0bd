"""Losses of tokens, drafts and balance against dense forms in float64.

The dense forms hold all logits and know nothing of chunks.
"""

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
from glm_jax.losses.drafts import _rejected


class TokensTest(parameterized.TestCase):
  @parameterized.parameters(4, 100)
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
    value, grads = jax.jit(jax.value_and_grad(run, (0, 1)))(hidden, head)
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

    def compiled(T, arguments):
      return compile_for(
        jax.value_and_grad(run, arguments),
        ((T, D), 'float32'),
        ((V, D), 'float32'),
        ((T,), 'int32'),
      )

    trained, frozen = compiled(256, (0, 1)), compiled(256, 0)
    growth = temporary(compiled(1024, (0, 1))) - temporary(trained)
    self.assertLess(growth, 768 * V)  # logits would be four times this
    # The gradient of a frozen head is not computed at all.
    flops = lambda c: c.cost_analysis()['flops']
    self.assertLess(flops(frozen), flops(trained) - 2 * 32 * V * D)


class DraftsTest(parameterized.TestCase):
  @in_float64
  def test_total_variation(self):
    p, q = normal(3, (4, 9), (4, 9))
    p, q = 2 * p, 2 * q
    softmax = lambda z: jax.nn.softmax(z)
    dense = lambda q: jnp.sum(1 - jnp.minimum(softmax(p), softmax(q)).sum(-1))
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
    value = losses.total_variation(p, q)
    total = lambda p, q: jnp.sum(losses.total_variation(p, q))
    d_p, d_q = jax.jit(jax.grad(total, (0, 1)))(p, q)
    assert_close(value, expected, atol=1e-6, rtol=0, name=str(names))
    np.testing.assert_array_equal(d_p, 0)
    self.assertTrue(np.isfinite(d_q).all())
    for name, row in zip(names, d_q):
      with self.subTest(name):
        if 'equal' in name or 'disjoint' in name:
          # Disjoint support is a plateau: TV has no slope there.
          np.testing.assert_array_equal(row, 0)

  @parameterized.parameters(1, 5)
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
    if steps > 1:
      check_grads(jax.jit(ours), (q,), 1, ('rev',), atol=1e-7, rtol=1e-7)
    else:
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
    gradient = lambda f, x: jax.jit(jax.grad(f))(x)
    q_grad = gradient(lambda q: losses.end_to_end_tv(p, q, ones), q)
    own = gradient(lambda q: jnp.sum(losses.total_variation(p, q)), q)
    same(q_grad[0], own[0] / 3, 'step 1')
    np.testing.assert_array_equal(q_grad[1:], 0)
    # Step 2's own gradient is 0 on the plateau; its omega is not.
    rates = 1 - jax.jit(losses.total_variation)(p, q)
    omega = -gradient(lambda a: jnp.sum(_rejected(a)), rates)
    expected = [1 / 3, rates[0, 0] * (1 + rates[2, 0]) / 3, 0]
    same(omega[:, 0], jnp.array(expected), 'omega')

  @parameterized.parameters((True, True), (False, False))
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
    judged_by = lambda w: losses.end_to_end_tv_from_hidden(
      trunk, q, head, mask, p_head=w
    )
    grad = jax.jit(jax.grad(judged_by))(other)
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
      return temporary(
        compile_for(
          f,
          ((T + G, D), 'float32'),
          ((G, T, D), 'float32'),
          ((V, D), 'float32'),
        )
      )

    self.assertLess(measure(512) - measure(128), 384 * G * V)

  @in_float64
  def test_mtp_cross_entropy(self):
    """The mean over steps of the cross-entropy of each."""
    G, T = 3, 8
    hidden, head = normal(8, (G, T, 4), (5, 4))
    targets = np.random.default_rng(0).integers(0, 5, (G, T))
    mask = np.arange(T) < 6
    dense = lambda hidden, head: (
      sum(
        losses.cross_entropy(h, head, y, mask) for h, y in zip(hidden, targets)
      )
      / G
    )
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
