"""A pool in host memory is read and written there: compiled for a TPU."""

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from glm_jax.serving.host_compute import DEVICE, HOST, runs_on_host


@runs_on_host
def put(pool, at, rows):
  return pool.at[at].set(rows)


@runs_on_host
def take(pool, at):
  return pool[at]


def step(pool, at, rows):
  pool, at, rows = jax.device_put((pool, at, rows), HOST)
  pool = put(pool, at, rows)
  return pool, jax.device_put(take(pool, at), DEVICE)


@pytest.mark.tpu
class HostComputeTest(parameterized.TestCase):
  def test_pool_stays_on_the_host(self):
    chip = topologies.get_topology_desc(
      platform='tpu', topology_name='v6e:2x2'
    ).devices[0]
    host = SingleDeviceSharding(chip, memory_kind='pinned_host')
    device = SingleDeviceSharding(chip)
    args = (
      jax.ShapeDtypeStruct((1 << 18, 640), jnp.bfloat16, sharding=host),
      jax.ShapeDtypeStruct((64,), jnp.int32, sharding=device),
      jax.ShapeDtypeStruct((64, 640), jnp.bfloat16, sharding=device),
    )
    compiled = (
      jax.jit(step, donate_argnums=0, out_shardings=(host, device))
      .lower(*args)
      .compile()
    )
    self.assertIn('HostExecute', compiled.as_text())
    memory = compiled.memory_analysis()
    # In bytes; the pool has 336 MB.
    self.assertLess(memory.temp_size_in_bytes, 1e6)
    self.assertLess(memory.host_temp_size_in_bytes, 1e6)
    self.assertEqual(
      memory.host_alias_size_in_bytes, memory.host_argument_size_in_bytes
    )


if __name__ == '__main__':
  pytest.main([__file__])
