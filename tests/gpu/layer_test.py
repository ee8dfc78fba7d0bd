"""The layer suite's programs at real sizes, compiled for an H200.

Nothing runs and no GPU is needed; see ops_test.py.
"""

import functools

import jax
import pytest
from absl.testing import parameterized
from gpu.ops_test import H200, TRITON, described
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from glm_jax.benchmarks import layer_cases
from glm_jax.benchmarks.layer_cases import CASES, KINDS
from glm_jax.benchmarks.layer_programs import layer_program, lower
from glm_jax.config import SHARED
from glm_jax.presets import PRESETS

GIB = 1 << 30


@functools.cache
def weights_of(preset):
  return jax.eval_shape(lambda: layer_cases.weights(PRESETS[preset]))


def compiled(name, kind):
  """A program of the suite for a described H200, and its cache's bytes."""
  case, made = CASES[name], {}

  def arguments(weights):
    made['program'], args = layer_program(case, kind, weights)
    return args

  args = jax.eval_shape(arguments, weights_of(case.preset))
  card = topologies.get_topology_desc(
    platform='cuda', target_config=H200, topology='1x1x1'
  )
  place = SingleDeviceSharding(card.devices[0])
  args = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), args
  )
  cache = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(args[1]))
  with described():
    return lower(made['program'], args).compile(), cache


@pytest.mark.gpu
class LayerTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (f'_{name}_{kind}', name, kind)
    for name in ('decode_128k_b1', 'decode_512k_b8', 'prefill_16k')
    for kind in KINDS
  )
  def test_layer(self, name, kind):
    program, cache = compiled(name, kind)
    self.assertIn(TRITON, program.as_text())
    sizes = program.memory_analysis()
    self.assertGreaterEqual(sizes.alias_size_in_bytes, cache)
    temporaries = sizes.temp_size_in_bytes
    print(
      f'\n{name}/{kind}: {temporaries / 1e6:.1f} MB, cache {cache / 1e6:.0f} '
      'MB (compiled, not run)'
    )
    # At decode nothing of the cache's size is made beside it.
    if name == 'decode_128k_b1' and kind == SHARED:
      # Nor of the up-projections', 25 and 33 MB.
      self.assertLess(temporaries, 20e6)
    limit = GIB // 2 if name.startswith('decode') else 16 * GIB
    self.assertLess(temporaries, limit)


if __name__ == '__main__':
  pytest.main([__file__])
