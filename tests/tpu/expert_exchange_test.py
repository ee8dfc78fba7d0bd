"""The ragged expert exchange passes the TPU compiler (compiled, not run)."""

import functools
import os

import jax
import jax.numpy as jnp
import plan_cases
import pytest
from absl.testing import absltest, parameterized
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from glm_jax.layers import Init
from glm_jax.moe import Experts
from sharding import MeshShape, make_mesh, plan_named
from sharding.rules import abstract_sharded


@functools.cache
def devices(topology):
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  return topologies.get_topology_desc(
    platform='tpu', topology_name=topology
  ).devices


@pytest.mark.tpu
class ExpertExchangeTest(parameterized.TestCase):
  @parameterized.product(
    topology=('v5e:2x2', 'v6e:2x2'), shape=((1, 4, 1), (2, 2, 1))
  )
  def test_compiles(self, topology, shape):
    mesh = make_mesh(MeshShape(*shape), devices(topology))
    config, T = plan_cases.config(), 1024
    plan = plan_named(
      'replicated', config, mesh, min_rows=8, ragged_experts=True
    )
    make = lambda: Experts(
      jax.random.key(0), 2, config, Init(jnp.dtype(jnp.bfloat16))
    )
    experts = abstract_sharded(jax.eval_shape(make), mesh)
    rows = NamedSharding(mesh, P(plan.axes('rows')))
    array = lambda n, dtype: jax.ShapeDtypeStruct((T, n), dtype, sharding=rows)
    k = config.moe.experts_per_token
    run = jax.jit(lambda *args: plan.experts(*args, 1)[0])
    lowered = run.trace(
      experts,
      array(config.hidden_size, jnp.bfloat16),
      array(k, jnp.int32),
      array(k, jnp.float32),
    ).lower(lowering_platforms=('tpu',))
    self.assertIn('ragged_all_to_all', lowered.as_text())
    memory = lowered.compile().memory_analysis()
    self.assertGreater(memory.temp_size_in_bytes, 0)


if __name__ == '__main__':
  absltest.main()
