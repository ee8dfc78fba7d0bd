"""Moves of pages, compiled for a TPU: no copy of a pool (compiled, not run).

The published model's cache; a page is a seven-MiB record of it.
"""

import os

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from glm_jax import presets
from glm_jax.cache import init_cache
from glm_jax.plan import LocalPlan
from glm_jax.serving import records
from glm_jax.serving.pages import GROUP

PLAN = LocalPlan()


def on(sharding, tree):
  place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
  return jax.tree.map(place, tree)


@pytest.mark.tpu
class PageMoveTest(parameterized.TestCase):
  @parameterized.product(dtype=('bf16', 'fp8'), count=(1, GROUP))
  def test_temporaries_are_of_the_pages_whatever_the_cache(self, dtype, count):
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
    device = topologies.get_topology_desc(
      platform='tpu', topology_name='v5e:2x2'
    ).devices[0]
    here = SingleDeviceSharding(device)
    host = SingleDeviceSharding(device, memory_kind='pinned_host')
    glm = presets.PRESETS['glm52']
    # A group is so much of 256 pages that XLA lays scales out anew there.
    num_pages = 256 if count == 1 else 1024
    cache = jax.eval_shape(lambda: init_cache(glm, num_pages, dtype=dtype))
    size = records.record_bytes(cache, PLAN)
    whole = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache))
    take = lambda cache, pages: records.extract(cache, pages, PLAN)
    page = jax.ShapeDtypeStruct((), jnp.int32, sharding=here)
    pages = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=here)
    moved = jax.eval_shape(take, cache, pages)
    cache, moved = on(here, cache), on(here, moved)
    out = jax.jit(take, out_shardings=host).lower(cache, pages).compile()
    put = lambda cache, pages, moved: records.insert(cache, pages, moved, PLAN)
    into = jax.jit(put, donate_argnums=0).lower(cache, pages, moved).compile()
    move = lambda cache, a, b: records.copy(cache, a, b, PLAN)
    copy = jax.jit(move, donate_argnums=0).lower(cache, page, page).compile()
    found = [c.memory_analysis() for c in (out, into, copy)]
    print(
      f'{dtype}: {count} of {size >> 10} KiB, temporaries of extract, insert, '
      f'copy {[m.temp_size_in_bytes >> 10 for m in found]} KiB (compiled, '
      'not run)'
    )
    assert found[0].host_output_size_in_bytes >= count * size
    for m, pages in zip(found, (count, count, 1)):
      # A group is put together beside the parts that it is made of.
      most = 1.25 if pages == 1 else 2
      assert m.temp_size_in_bytes < most * pages * size
    for m in found[1:]:
      assert m.alias_size_in_bytes >= whole
