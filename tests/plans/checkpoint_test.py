"""Checkpoints across meshes: saved on one, restored on another."""

import os
import tempfile

import jax
import plan_cases
import pytest
from absl.testing import absltest, parameterized
from compare import assert_bit_equal
from processes import Pair

from glm_jax.checkpoints.orbax_io import load_orbax, save_orbax
from sharding import module_shardings, plan_named


class AcrossMeshesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.path = os.path.join(folder.name, 'model')

  def check(self, model, shape):
    """Values, and that every device holds its own part alone."""
    expected = plan_cases.model()
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(expected)):
      assert_bit_equal(a, b, name='parameter')
    if shape is not None:
      mesh = plan_cases.mesh(shape)
      wanted = jax.tree.leaves(module_shardings(expected, mesh))
      for a, s in zip(jax.tree.leaves(model), wanted):
        self.assertTrue(a.sharding.is_equivalent_to(s, a.ndim))

  def load(self, shape):
    if shape is None:
      return load_orbax(self.path)
    mesh = plan_cases.mesh(shape)
    plan = plan_named('replicated', plan_cases.config(), mesh)
    return load_orbax(self.path, plan=plan)

  def test_saved_on_one_mesh_restored_on_others(self):
    save_orbax(
      plan_cases.placed_model((1, 8, 1)), plan_cases.config(), self.path
    )
    for shape in ((2, 2, 2), (1, 8, 1), None):
      self.check(self.load(shape), shape)

  @pytest.mark.long
  def test_two_processes_save_one_restores(self):
    Pair(self, 'save', self.path).finish(900)
    self.check(self.load((2, 2, 2)), (2, 2, 2))

  @pytest.mark.long
  def test_one_saves_two_processes_restore(self):
    """Each process checks its own devices' parts."""
    save_orbax(plan_cases.model(), plan_cases.config(), self.path)
    pair = Pair(self, 'restore', self.path)
    pair.finish(900)
    for i in range(2):
      self.assertIn('restored', pair.read(i, 'out'))


if __name__ == '__main__':
  absltest.main()
