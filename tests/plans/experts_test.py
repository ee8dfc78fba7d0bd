"""Experts over ranks drop nothing, whatever the routing and the capacity."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import plan_cases
import pytest
from absl.testing import absltest, parameterized
from compare import assert_close
from jax import lax

from glm_jax.layers import Init
from glm_jax.moe import Experts
from glm_jax.plan import LocalPlan
from sharding import DEFAULT, module_shardings, plan_named, ragged
from sharding.experts import capacity_of

T, LAYERS = 32, 2


@functools.cache
def pool(block=None):
  init = Init(fp8_block=block, std=0.3)
  make = lambda key: Experts(key, LAYERS, plan_cases.config(), init)
  return jax.jit(make)(jax.random.key(0))


def routing(kind):
  rng = np.random.default_rng(3)
  E, k = 8, plan_cases.config().moe.experts_per_token
  if kind == 'random':
    chosen = np.stack([rng.permutation(E)[:k] for _ in range(T)])
  else:  # every row to the same experts: one rank takes all
    chosen = np.broadcast_to(np.arange(k) + 5, (T, k))
  x = rng.normal(size=(T, 64)).astype(np.float32)
  weights = rng.random((T, k)).astype(np.float32)
  return x, jnp.asarray(chosen, jnp.int32), weights


def emulated(
  operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *,
  axis_name,
):  # fmt: skip
  me = lax.axis_index(axis_name)
  gather = lambda a: lax.all_gather(a, axis_name)
  parts = map(gather, (operand, input_offsets, send_sizes, output_offsets))
  at = jnp.arange(operand.shape[0])
  for rows, starts, sizes, targets in zip(*parts):
    sent = (at >= starts[me]) & (at < starts[me] + sizes[me])
    to = jnp.where(sent, at - starts[me] + targets[me], output.shape[0])
    output = output.at[to].set(rows, mode='drop')
  return output


def weighted(plan, experts, x, chosen, weights, layer):
  out, weights = plan.experts(experts, x, chosen, weights, layer)
  return jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=1)


class ExpertsTest(parameterized.TestCase):
  def check(self, shape, kind, block=None, **options):
    mesh, config = plan_cases.mesh(shape), plan_cases.config()
    plan = plan_named('replicated', config, mesh, **options)
    placed = jax.device_put(pool(block), module_shardings(pool(block), mesh))
    args = (*routing(kind), jnp.int32(1))
    run = lambda plan: jax.jit(functools.partial(weighted, plan))
    expected = run(LocalPlan())(pool(block), *args)
    ours = run(plan)(placed, *args)
    assert_close(ours, expected, atol=1e-5, rtol=1e-5, name='experts')
    return jax.jit(functools.partial(weighted, plan)).lower(placed, *args)

  def test_whole_step(self):
    self.check((2, 2, 2), 'random')

  @parameterized.parameters(
    ((1, 8, 1), 'one', 1), ((1, 8, 1), 'random', 3), ((1, 2, 4), 'random', None)
  )
  def test_split_step(self, shape, kind, capacity):
    self.check(shape, kind, min_rows=2, expert_capacity=capacity)

  @parameterized.product(
    shape=((1, 8, 1), (1, 2, 4)), kind=('random', 'one'), capacity=(1, 3, None)
  )
  @pytest.mark.long
  def test_more(self, shape, kind, capacity):
    self.check(shape, kind)
    self.check(shape, kind, min_rows=2, expert_capacity=capacity)

  def test_worst_case_takes_one_round(self):
    lowered = self.check((1, 8, 1), 'one', min_rows=2, expert_capacity=T)
    text = lowered.as_text()
    self.assertNotIn('overflow', text)
    self.assertIn('all_to_all', text)

  @pytest.mark.long
  def test_fp8_blocks_split_step(self):
    self.check((1, 8, 1), 'random', block=(16, 16), min_rows=2)

  def test_fp8_blocks(self):
    self.check((1, 2, 4), 'random', block=(16, 16))
    with self.assertRaisesRegex(ValueError, 'cut through fp8 blocks of 32'):
      self.check((1, 2, 4), 'random', block=(32, 32))

  def test_rows_and_experts_on_different_axes(self):
    rules = DEFAULT.replace(expert=('context',))
    with self.assertRaisesRegex(NotImplementedError, "'rows' and 'expert'"):
      plan = plan_named(
        'replicated', plan_cases.config(), plan_cases.mesh((2, 4, 1)),
        rules=rules, min_rows=2,
      )  # fmt: skip
      jax.eval_shape(
        functools.partial(weighted, plan), pool(), *routing('one'), jnp.int32(0)
      )

  def test_gradients_of_a_split_step(self):
    mesh, config = plan_cases.mesh((1, 4, 2)), plan_cases.config()
    plan = plan_named('replicated', config, mesh, min_rows=2, expert_capacity=T)
    x, chosen, weights = routing('random')
    placed = jax.device_put(pool(), module_shardings(pool(), mesh))

    def loss(plan, experts, x, weights):
      out = weighted(plan, experts, x, chosen, weights, 1)
      return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    grad = lambda plan: jax.jit(
      jax.grad(functools.partial(loss, plan), argnums=(0, 1, 2))
    )
    expected = grad(LocalPlan())(pool(), x, weights)
    ours = grad(plan)(placed, x, weights)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected)):
      assert_close(a, b, atol=1e-5, rtol=1e-5, name='gradient')

  @parameterized.parameters('random', 'one')
  def test_ragged(self, kind):
    """The collective, which CPUs lack, is replaced by gathers."""
    with (
      mock.patch.object(ragged, 'check_platform', lambda mesh: None),
      mock.patch.object(lax, 'ragged_all_to_all', emulated),
    ):
      self.check((1, 8, 1), kind, min_rows=2, ragged_experts=True)

  def test_ragged_is_for_tpu(self):
    with self.assertRaisesRegex(NotImplementedError, 'these devices are cpu'):
      plan_named(
        'replicated',
        plan_cases.config(),
        plan_cases.mesh((1, 8, 1)),
        ragged_experts=True,
      )

  def test_capacity_is_twice_the_even_share(self):
    mesh = plan_cases.mesh((1, 8, 1))
    plan = plan_named('replicated', plan_cases.config(), mesh)
    self.assertEqual(capacity_of(plan, 1024, 2), 512)
    plan = dataclasses.replace(plan, expert_capacity=7)
    self.assertEqual(capacity_of(plan, 4, 2), 4)


if __name__ == '__main__':
  absltest.main()
