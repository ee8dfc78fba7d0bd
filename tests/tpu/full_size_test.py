"""The real GLM-5.2, compiled for real TPU slices on a CPU host.

Nothing runs: libtpu compiles the step for a topology and its memory analysis
is read (compiled, not run). Weights are split over all devices by their
logical axes and the cache pools by rows, by XLA's own partitioner, which does
not cut kernels: the ops are plain XLA here (`model_kernels_test.py` has them).
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax import presets
from glm_jax.cache import init_cache
from glm_jax.decoding import DecodeState, decode_step, prefill_step
from glm_jax.model import abstract_model
from glm_jax.plan import LocalPlan
from glm_jax.sampling import sampling_params
from pallas_kernels.tiling import PAGE

BATCH, CHUNK = 8, 1024
SHORT, LONG = 131_072, 1_048_576
TOPOLOGIES = {'v6e': 'v6e:16x16', 'tpu7x': 'tpu7x:4x4x4'}
# tpu7x would copy nearly all weights to another tiling at each step
# (spec/kernels_tpu.md section 4).
OPTIONS = {
  'v6e': {},
  'tpu7x': {'xla_tpu_control_large_2nd_minor_layout_for_x16': 'false'},
}
# The axis of a weight that is dealt to all devices, best first.
SPLIT = ('expert_mlp', 'heads', 'index', 'mlp', 'vocab', 'embed')


@functools.cache
def mesh_of(chip):
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  devices = topologies.get_topology_desc(
    platform='tpu', topology_name=TOPOLOGIES[chip]
  ).devices
  return Mesh(np.array(devices), ('all',))


def place(shape, dtype, mesh, axes=()):
  """A shape-only array, split along its best axis or replicated."""
  spec = [None] * len(shape)
  lead = len(shape) - len(axes)
  for name in SPLIT:
    for i, axis in enumerate(axes, lead):
      if axis == name and shape[i] % mesh.size == 0 and not any(spec):
        spec[i] = 'all'
  sharding = NamedSharding(mesh, PartitionSpec(*spec))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compiled(chip, step, context):
  """The compiled step, and bytes of cache a device holds."""
  config, mesh = presets.PRESETS['glm52'], mesh_of(chip)
  model = jax.tree.map(
    lambda v: nnx.Param(place(v.shape, v.dtype, mesh, v.axes), axes=v.axes),
    abstract_model(config),
    is_leaf=lambda v: isinstance(v, nnx.Variable),
  )
  pages = BATCH * context // PAGE
  cache = jax.eval_shape(lambda: init_cache(config, pages, dtype='bf16'))
  rows = NamedSharding(mesh, PartitionSpec('all'))
  cache = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows), cache
  )
  ints = lambda *shape: place(shape, jnp.int32, mesh)
  table = ints(BATCH, context // PAGE)
  if step == 'decode':
    params = jax.tree.map(
      lambda a: place(a.shape, a.dtype, mesh), sampling_params(BATCH)
    )
    done = place((BATCH,), bool, mesh)
    state = DecodeState(
      cache,
      table,
      lengths=ints(BATCH),
      last_token=ints(BATCH),
      limits=ints(BATCH),
      eos=ints(3),
      done=done,
      params=params,
    )
    traced = decode_step.trace(
      model, state, plan=LocalPlan(implementation='xla')
    )
  else:
    traced = prefill_step.trace(
      model,
      cache,
      table,
      ints(CHUNK),
      ints(CHUNK),
      ints(CHUNK),
      plan=LocalPlan(implementation='xla'),
    )
  lowered = traced.lower(lowering_platforms=('tpu',))
  size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache))
  return lowered.compile(compiler_options=OPTIONS[chip]), size / mesh.size


@pytest.mark.tpu
class FullSizeTest(parameterized.TestCase):
  @parameterized.product(chip=('v6e', 'tpu7x'), step=('decode', 'prefill'))
  def test_known_fault_30_memory_is_bounded_at_a_million_tokens(
    self, chip, step
  ):
    temps = {}
    for context in (SHORT, LONG):
      executable, cache_bytes = compiled(chip, step, context)
      memory = executable.memory_analysis()
      temps[context] = memory.temp_size_in_bytes
      print(
        f'\n{chip} {step} {context}: a device has arguments '
        f'{memory.argument_size_in_bytes / 1e9:.2f} GB, of which cache '
        f'{cache_bytes / 1e9:.2f}, temporaries '
        f'{memory.temp_size_in_bytes / 1e9:.3f} (compiled, not run)'
      )
      # The donated cache is updated where it lies.
      self.assertGreaterEqual(memory.alias_size_in_bytes, cache_bytes)
    # No copy of the cache: it is 8 times as large at the longer context.
    self.assertLess(temps[LONG], 0.15 * cache_bytes)
    # Nothing is rows x context beyond the bounded block of scores.
    budget = LocalPlan().block_bytes
    self.assertLess(temps[LONG] - temps[SHORT], 6 * budget)
    if step == 'prefill':
      self.assertLess(temps[LONG] - temps[SHORT], 0.1 * 4 * CHUNK * LONG)
