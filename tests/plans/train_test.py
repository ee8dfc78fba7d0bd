"""A training step over a mesh is the step of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import plan_cases
import pytest
from absl.testing import absltest, parameterized
from compare import assert_close

from glm_jax.training.config import Stage, TrainConfig
from glm_jax.training.draft_forward import DraftForm
from glm_jax.training.parameters import Layout
from glm_jax.training.step import init_state, make_step
from glm_jax.training.windows import Windows
from sharding.placement import MeshPlacement
from sharding.train import check_stage, make_sharded_step

WINDOW = 512  # one page a rank at context 8; top-k is 8
STAGE = Stage(
  name='all',
  steps=1,
  window=WINDOW,
  batch=2,
  train=('trunk', 'indexer', 'mtp'),
  kl_stride=4,
  # Draft targets reach three rows across each shard's edge.
  draft=DraftForm(steps=3, stride=2),
  chunk=32,
  attention='gather',
  experts='grouped',
)

# Half of what there is to compile: no drafter, nothing computed twice.
SHORT = dataclasses.replace(
  STAGE, train=('trunk', 'indexer'), draft=None, remat=False
)


@functools.cache
def config(stage=STAGE):
  return TrainConfig(
    model=plan_cases.config(),
    stages=(stage,),
    optimizer='adamw',
    compute='float32',
    warmup=0,
  )


@functools.cache
def batch():
  """Segments of unequal lengths, one across all edges, padding at an end."""
  rng = np.random.default_rng(0)
  S = WINDOW + STAGE.lookahead
  tokens = rng.integers(0, 96, (1, 2, S)).astype(np.int32)
  segments = np.ones((1, 2, S), np.int32)
  segments[0, 1] = np.repeat([1, 2, 3, 0], [70, 250, 150, S - 470])
  positions = np.zeros_like(segments)
  for b in range(2):
    for s in range(1, segments[0, b].max() + 1):
      at = segments[0, b] == s
      positions[0, b, at] = np.arange(at.sum())
  return Windows(*map(jnp.asarray, (tokens, segments, positions)))


@functools.cache
def expected(stage):
  start = init_state(config(stage), Layout(config().model))
  return start, make_step(config(stage), stage)(
    jax.tree.map(jnp.copy, start), batch()
  )


class TrainTest(parameterized.TestCase):
  def check(self, shape, stage=STAGE):
    start, (after, log) = expected(stage)
    mesh = plan_cases.mesh(shape)
    step, place = make_sharded_step(config(stage), stage, mesh)
    state, ours = step(place(start), place(batch()))
    names = ['cross_entropy', 'indexer_kl', 'gradient_norm',
             'load_max_over_mean']  # fmt: skip
    for name in names + ['draft_loss', 'draft_kl'] * (stage.draft is not None):
      assert_close(ours[name], log[name], atol=1e-5, rtol=1e-5, name=name)
    self.assertTrue(bool(ours['fine']))
    # First moments are the gradients, up to a factor.
    flat = jax.tree_util.tree_flatten_with_path(after.moments)[0]
    found = jax.tree.leaves(state.moments)
    for (path, a), b in zip(flat, found, strict=True):
      scale = float(np.abs(np.asarray(a)).max()) or 1.0
      assert_close(
        np.asarray(b) / scale, np.asarray(a) / scale, atol=1e-5, rtol=0,
        name=jax.tree_util.keystr(path),
      )  # fmt: skip
    for name, value in after.params.items():
      assert_close(
        state.params[name], value, atol=2 * config().learning_rate, rtol=1e-5,
        name=name,
      )  # fmt: skip
    return state

  def test_without_drafter(self):
    state = self.check((1, 8, 1), SHORT)
    weight = state.params['experts.gate']
    self.assertEqual(weight.sharding.shard_shape(weight.shape)[1], 1)

  @parameterized.parameters((1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4))
  @pytest.mark.long
  def test_with_drafter(self, *shape):
    self.check(shape)

  @pytest.mark.long
  def test_each_device_makes_its_own_part(self):
    place = MeshPlacement(plan_cases.mesh((2, 2, 2)))
    made = place.init(config(), None)
    shard = made.params['embed'].addressable_shards[0].data
    self.assertEqual(shard.size * 8, made.params['embed'].size)
    self.assertEqual(int(made.step), 0)

  @parameterized.parameters(
    ({'batch': 3}, 'batch=3 windows do not divide over data=2'),
    ({'window': 320}, 'window=320 does not divide over context=2'),
    ({'experts': 'dense'}, "use experts='grouped'"),
    ({'attention': 'cudnn'}, "use 'gather'"),
    ({'kl_stride': 7}, 'kl_stride=7 must divide the 256 rows'),
  )
  def test_errors(self, changes, message):
    stage = dataclasses.replace(STAGE, **changes)
    with self.assertRaisesRegex(ValueError, message):
      check_stage(stage, plan_cases.mesh((2, 2, 2)))


if __name__ == '__main__':
  absltest.main()
