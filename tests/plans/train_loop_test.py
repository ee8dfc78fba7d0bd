"""The training loop over meshes and processes is that of one device."""

import dataclasses
import functools
import pathlib
import tempfile

import jax
import numpy as np
import plan_cases
import pytest
from absl.testing import absltest
from compare import assert_bit_equal
from processes import Pair

from glm_jax.data import TokenWriter
from glm_jax.training import metrics
from glm_jax.training.checkpointing import Checkpoints
from glm_jax.training.config import Stage, TrainConfig
from glm_jax.training.loop import Trainer
from glm_jax.training.placement import ONE_DEVICE
from sharding.placement import MeshPlacement

# Windows of one page a rank at context 4; two micro-batches a step.
STAGE = Stage('share', 4, 256, 2, accumulate=2, kl_stride=4, chunk=64,
              attention='gather', experts='grouped')  # fmt: skip
LAUNCHER = pathlib.Path(__file__).parents[2] / 'launch' / 'train.py'
RECIPE = """
import sys
sys.path.insert(0, {folder!r})
from plans.train_loop_test import config as get_train_config
"""


@functools.cache
def config():
  return TrainConfig(
    model=plan_cases.config(),
    stages=(STAGE,),
    optimizer='adamw',
    compute='float32',
    # AdamW moves what has no gradient but noise by as much as all else.
    learning_rate=2e-4,
    warmup=0,
    save_every=100,
    eval_windows=3,
  )


@functools.cache
def corpus():
  """Documents of unequal lengths, some longer than a window."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='corpus_'))
  rng = np.random.default_rng(1)
  for name, count in (('train', 30), ('held_out', 6)):
    with TokenWriter(folder / name, 96, 'ab' * 32) as writer:
      for _ in range(count):
        writer.add(rng.integers(0, 96, rng.integers(20, 700)))
  return folder


def on_mesh(*shape):
  return MeshPlacement(plan_cases.mesh(shape))


def run(workdir, placement, steps):
  trainer = Trainer(
    config(), workdir, corpus(), placement=placement, log=lambda _: None
  )
  return trainer.run(max_steps=steps)[0]


def curve(workdir):
  lines = metrics.read(pathlib.Path(workdir) / 'metrics.jsonl')
  found = [x['cross_entropy'] for x in lines if 'cross_entropy' in x]
  return found + [x['held_out_loss'] for x in lines if 'held_out_loss' in x]


@functools.cache
def expected():
  workdir = tempfile.mkdtemp(prefix='run_')
  run(workdir, ONE_DEVICE, None)
  found = curve(workdir)
  assert len(found) == STAGE.steps + 1
  return found


class LoopTest(absltest.TestCase):
  def check(self, workdir):
    np.testing.assert_allclose(curve(workdir), expected(), rtol=1e-5)

  @pytest.mark.long
  def test_resumed_on_other_meshes(self):
    workdir = tempfile.mkdtemp(prefix='run_')
    for shape, steps in (((1, 4, 2), 1), ((2, 4, 1), 1), ((2, 2, 2), None)):
      run(workdir, on_mesh(*shape), steps)
    self.check(workdir)

  @pytest.mark.long
  def test_resumed_by_other_numbers_of_processes(self):
    """One process, then the launcher in two, then one device."""
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    workdir = pathlib.Path(folder.name, 'run')
    recipe = pathlib.Path(folder.name, 'recipe.py')
    tests = pathlib.Path(__file__).parents[1]
    recipe.write_text(RECIPE.format(folder=str(tests)))
    run(workdir, on_mesh(2, 4, 1), 1)
    flags = [f'--config={recipe}', f'--workdir={workdir}',
             f'--corpus={corpus()}']  # fmt: skip
    pair = Pair(self, '--mesh=data=2,context=4', '--max_steps=2', *flags,
                launcher=LAUNCHER)  # fmt: skip
    pair.finish(1800)
    self.assertIn('step 3 of 4\n', pair.read(0, 'out'))
    self.assertNotIn('step', pair.read(1, 'out'))  # process 0 answers
    run(workdir, ONE_DEVICE, None)
    self.check(workdir)


class PlacementTest(absltest.TestCase):
  def test_windows_are_dealt_and_filled_up(self):
    place = on_mesh(4, 2, 1)
    trainer = Trainer(config(), tempfile.mkdtemp(), corpus())
    trainer.batch(0)
    batches = trainer._batches[0]
    numbers = np.array([[3, 0, 2], [1, 4, 5]])
    ours = place.windows(batches, numbers)
    wanted = ONE_DEVICE.windows(batches, numbers)
    for a, b in zip(ours, wanted, strict=True):
      np.testing.assert_array_equal(a[:, :3], b)
      np.testing.assert_array_equal(a[:, 3], 0)
      self.assertEqual(a.addressable_shards[0].data.shape[1], 1)

  def test_checkpoint_crosses_meshes(self):
    workdir = tempfile.mkdtemp(prefix='run_')
    first, second = on_mesh(1, 8, 1), on_mesh(2, 2, 2)

    def some(place):
      state = place.abstract(config())
      names = ('embed', 'experts.gate', 'norm.weight')
      params = {name: state.params[name] for name in names}
      return state._replace(params=params, moments=())

    rng = np.random.default_rng(0)
    random = lambda a: rng.integers(0, 9, a.shape).astype(a.dtype)
    state = jax.tree.map(
      lambda a: jax.device_put(random(a), a.sharding), some(first)
    )
    saving = Checkpoints(workdir, 1, print, first)
    saving.save(state, 'run')
    saving.close()
    for place in (second, ONE_DEVICE):
      like = some(place)
      found = Checkpoints(workdir, 1, self.fail, place).restore(like, 'run')
      for a, b, c in zip(*map(jax.tree.leaves, (found, state, like))):
        assert_bit_equal(np.asarray(a), np.asarray(b), name='state')
        self.assertTrue(a.sharding.is_equivalent_to(c.sharding, a.ndim))

  def test_stage_that_does_not_divide(self):
    stage = dataclasses.replace(STAGE, batch=3)
    odd = dataclasses.replace(config(), stages=(stage,))
    with self.assertRaisesRegex(ValueError, 'batch=3 windows do not divide'):
      Trainer(odd, tempfile.mkdtemp(), corpus(), placement=on_mesh(2, 4, 1))


if __name__ == '__main__':
  absltest.main()
