"""Two processes of four devices: the same results, and neither outlives the
other."""

import os
import tempfile
import time

import numpy as np
import plan_cases
import pytest
from absl.testing import absltest, parameterized
from compare import assert_close
from processes import Pair

from sharding import distributed


class DeathTest(parameterized.TestCase):
  @parameterized.parameters(0, 1)
  def test_killing_one_ends_the_other_in_one_line(self, victim):
    pair = Pair(self, 'work')
    pair.wait_for('started', 300)
    time.sleep(1)  # in the middle of collectives
    other = 1 - victim
    before = pair.read(other, 'err')
    pair.processes[victim].kill()
    code = pair.processes[other].wait(timeout=60)
    self.assertNotEqual(code, 0)
    said = pair.read(other, 'err').removeprefix(before)
    # The runtime may log lines of its own, which carry no label.
    ours = [line for line in said.splitlines() if line.startswith('[')]
    self.assertEqual(ours, [f'[{other}] process {victim} of 2 is lost: ending'])

  def test_process_0_leaves_last(self):
    pair = Pair(self, 'leave')
    pair.finish(120)
    self.assertEqual([p.returncode for p in pair.processes], [0, 0])

  @parameterized.parameters(
    ({'num_processes': 2}, 'need coordinator_address=HOST:PORT'),
    ({'coordinator_address': 'here'}, "must be 'auto' or HOST:PORT"),
    ({'coordinator_address': 'a:1'}, 'needs num_processes and process_id'),
    (
      {'coordinator_address': 'a:1', 'num_processes': 2, 'process_id': 2},
      'process_id=2 must be 0 to 1',
    ),
  )
  def test_bad_arguments(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      distributed.start(**options)

  def test_one_process_needs_nothing(self):
    self.assertEqual(distributed.start(), 1)
    self.assertEqual(distributed.start('a:1', 1, 0), 1)
    self.assertTrue(distributed.is_main())
    distributed.finish()


class EqualTest(parameterized.TestCase):
  @parameterized.parameters('partials', 'rows', 'layers')
  @pytest.mark.long
  def test_two_processes_give_what_one_device_gives(self, case):
    pair = Pair(self, 'case', os.path.join(self._folder(), 'out.npz'), case)
    pair.finish(1800)
    found = np.load(os.path.join(self.path, 'out.npz'))
    for i, pair in enumerate(plan_cases.expected_passes()):
      logits, tokens = pair
      np.testing.assert_array_equal(found[f'{i}.1'], tokens)
      assert_close(
        found[f'{i}.0'], logits, atol=1e-5, rtol=1e-5, name=f'logits {i}'
      )

  def _folder(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.path = folder.name
    return folder.name


if __name__ == '__main__':
  absltest.main()
