"""The trunk alone on one device: what its compiled program computes.

No device can hold it, but the compiler has scheduled the whole program before
it says so, and FLOPs need no memory. They show what IndexShare saves: the
same program with an indexer in every layer, counted the same way.
"""

from __future__ import annotations

import functools
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
  AbstractDevice,
  AbstractMesh,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

from glm_jax import hlo
from glm_jax.cache import Cache, init_cache, make_rows
from glm_jax.config import ModelConfig
from glm_jax.model import Model, abstract_model, trunk
from glm_jax.plan import LocalPlan
from pallas_kernels.tiling import PAGE
from sharding.accountant import without_drafter
from sharding.planner.cost import Cost, Loops, module_cost
from sharding.planner.topology import topology_devices
from sharding.planner.worker import compile_text


@functools.partial(jax.jit, static_argnames='plan', donate_argnames='cache')
def trunk_row(
  model: Model,
  cache: Cache,
  token: jax.Array,
  pos: jax.Array,
  table: jax.Array,
  *,
  plan: LocalPlan,
) -> tuple[jax.Array, Cache]:
  """Hidden state [1, D] of one row, and the cache."""
  rows = make_rows(jnp.zeros(1, jnp.int32), pos, table)
  hidden, cache, _ = trunk(model, token, cache, rows, plan)
  return hidden, cache


def trunk_cost(
  config: ModelConfig,
  topology: str,
  context: int,
  dump: pathlib.Path,
  *,
  implementation: str | None = None,
) -> Cost:
  """Cost of one row of the trunk at the end of a context, compiled.

  Args:
    config: the model.
    topology: a slice; one of its devices is compiled for.
    context: keys that the row sees, whole pages.
    dump: folder for the compiler's files.
    implementation: of the ops.

  Returns:
    The cost. Each of the row's experts is one trip of a grouped product.
  """
  config = without_drafter(config)
  device = topology_devices(topology)[0]
  where = NamedSharding(Mesh(np.array([device]), ('x',)), PartitionSpec())
  pages = context // PAGE
  place = lambda tree: jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree
  )
  one = jax.ShapeDtypeStruct((1,), jnp.int32)
  arguments = place(
    (
      abstract_model(config),
      jax.eval_shape(lambda: init_cache(config, pages)),
      one,
      one,
      jax.ShapeDtypeStruct((1, pages), jnp.int32),
    )
  )
  plan = LocalPlan(implementation=implementation)
  # Outside `shard_map` a kernel asks which chip it is lowered for.
  with jax.sharding.use_abstract_mesh(_one_device(device)):
    traced = trunk_row.trace(*arguments, plan=plan)
    lowered = traced.lower(lowering_platforms=('tpu',))
  text = compile_text(lowered, topology, dump)[2]
  trips = {'feed_forward': config.moe.experts_per_token}
  return module_cost(hlo.parse(text), Loops(trips))


def _one_device(device) -> AbstractMesh:
  """A mesh of one device that knows its kind."""
  kind = {'device_kind': device.device_kind, 'num_cores': device.num_cores}
  # Not every version of jax names the platform.
  if 'platform' in inspect.signature(AbstractDevice).parameters:
    kind['platform'] = 'tpu'
  return AbstractMesh((1,), ('x',), abstract_device=AbstractDevice(**kind))
