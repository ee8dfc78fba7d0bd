"""A step of a scanned model reads its weights where they lie.

Nothing runs and no GPU is needed; see ops_test.py.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized
from gpu.ops_test import H200, described
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from glm_jax.benchmarks.context_slice import SETTINGS
from glm_jax.cache import init_cache
from glm_jax.compiling import compiler_options
from glm_jax.decoding import prefill_step
from glm_jax.model import abstract_model
from glm_jax.plan import LocalPlan


def compiled(rows):
  """A step of so many rows through eight layers of GLM-5.2's."""
  config = dataclasses.replace(
    SETTINGS['glm52'].config,
    mtp=dataclasses.replace(SETTINGS['glm52'].config.mtp, num_layers=0),
  )
  cache = jax.eval_shape(lambda: init_cache(config, 128))
  ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  args = abstract_model(config), cache, ids(1, 128), *[ids(rows)] * 3
  card = topologies.get_topology_desc(
    platform='cuda', target_config=H200, topology='1x1x1'
  )
  place = SingleDeviceSharding(card.devices[0])
  args = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), args
  )
  with described():
    lowered = prefill_step.lower(*args, plan=LocalPlan(), with_drafter=False)
    return lowered.compile(compiler_options=compiler_options('NVIDIA H200'))


@pytest.mark.gpu
class StepTest(parameterized.TestCase):
  @parameterized.parameters(1, 4)
  def test_weights_are_not_copied(self, rows):
    found = compiled(rows)
    temporaries = found.memory_analysis().temp_size_in_bytes
    # The largest weight of one layer has 201 MB. Before 0.11 jax gives no
    # product an address within a stack: it copies one weight at a time.
    if jax.__version_info__ < (0, 11):
      self.assertLess(temporaries, 210e6)
      return
    self.assertLess(temporaries, 100e6)
    # Copies of a norm's weights pay for themselves; those of a matrix do not.
    copies = re.findall(
      r', bf16\[1,(\d+),\d+\]\S* u32.*? fusion-start\(', found.as_text()
    )
    self.assertEmpty(copies)


if __name__ == '__main__':
  pytest.main([__file__])
