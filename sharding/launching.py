"""What every launcher does with `glm_jax.mesh_flags`.

    def main():
      with launching.processes():
        config = ...
        plan = launching.plan_for(config)

runs the same on one host and on many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from glm_jax import cli, mesh_flags
from glm_jax.config import ModelConfig
from glm_jax.model import Model, init_model
from glm_jax.plan import LocalPlan
from glm_jax.training.placement import ONE_DEVICE, OneDevice
from sharding import distributed, module_shardings, plan_named
from sharding.mesh import make_mesh, parse_mesh_shape
from sharding.placement import MeshPlacement


@contextlib.contextmanager
def processes() -> Iterator[None]:
  """Joins this process to the others for as long as the body runs.

  Raises:
    ValueError: flags that do not fit together.
  """
  count = distributed.start(
    mesh_flags.COORDINATOR.value,
    mesh_flags.NUM_PROCESSES.value,
    mesh_flags.PROCESS_ID.value,
    heartbeat_seconds=mesh_flags.HEARTBEAT.value,
  )
  if count > 1 and distributed.is_main():
    cli.log(f'{count} processes')
  yield
  # Not after an error: then the others must end as well.
  distributed.finish()


def plan_for(
  config: ModelConfig,
  *,
  row_tile: int | None = None,
  implementation: str | None = None,
) -> LocalPlan:
  """The plan that the flags ask for.

  Args:
    config: the model.
    row_tile: of one device (`--deterministic`).
    implementation: of the ops; None chooses.

  Returns:
    The plan of one device without `--mesh` and in one process, else that of
    `--cache_plan`.

  Raises:
    UserError: `--deterministic` over several devices.
    ValueError: a mesh that does not fit the devices or the model.
  """
  text = mesh_flags.MESH.value
  if text is None and mesh_flags.COORDINATOR.value is None:
    return LocalPlan(row_tile=row_tile, implementation=implementation)
  if row_tile is not None:
    raise cli.UserError(
      '--deterministic holds on one device: sums over a mesh have no fixed '
      'order, leave out --mesh'
    )
  return plan_named(
    mesh_flags.CACHE_PLAN.value,
    config,
    _mesh(),
    slots=mesh_flags.CACHE_SLOTS.value,
    implementation=implementation,
  )


def placement() -> OneDevice:
  """Where a training run lives: one device, or a mesh as the flags ask.

  Raises:
    UserError: flags of a cache, which training has none of.
    ValueError: a mesh that does not fit the devices.
  """
  for flag in (mesh_flags.CACHE_PLAN, mesh_flags.CACHE_SLOTS):
    if flag.present:
      raise cli.UserError(f'--{flag.name} is of a cache; training has none')
  if mesh_flags.MESH.value is None and mesh_flags.COORDINATOR.value is None:
    return ONE_DEVICE
  return MeshPlacement(_mesh())


def _mesh() -> Mesh:
  """The mesh of the flags; all devices on context without `--mesh`."""
  text = mesh_flags.MESH.value
  return make_mesh(None if text is None else parse_mesh_shape(text))


def random_model(config: ModelConfig, dtype: str, seed: int, plan) -> Model:
  """A model with random weights, where a plan wants them."""
  make = lambda key: init_model(config, key, dtype=dtype)
  key, where = jax.random.key(seed), None
  if hasattr(plan, 'mesh'):
    where = module_shardings(jax.eval_shape(make, key), plan.mesh)
  return jax.jit(make, out_shardings=where)(key)


def describe(plan, cache, num_rows: int) -> str:
  """One line on what a plan holds and moves, for a launcher's log.

  Args:
    plan: of several devices.
    cache: shapes and dtypes, as one device would hold them.
    num_rows: rows of a prefill step.
  """
  found = plan.cache_bytes(cache)
  text = (
    f'cache {found["pools"] / 1e9:.3f} GB and {found["slots"] / 1e9:.3f} GB of '
    'slots a device'
  )
  movement = getattr(plan, 'movement', None)
  return text if movement is None else f'{text}; {movement(num_rows, cache)}'
