"""Which slice, batch or context: several compiles that answer one question."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from glm_jax.config import ModelConfig
from pallas_kernels.tiling import PAGE
from sharding.accountant import per_layer_indexers
from sharding.mesh import MeshShape, parse_mesh_shape
from sharding.planner import meshes, process
from sharding.planner.plan import PodPlan
from sharding.planner.request import CACHE_PLANS, PlanRequest
from sharding.planner.topology import SMALLEST, candidates

Log = Callable[[str], None]
FITS = ('batch', 'context')


def plan_pod(
  config: ModelConfig,
  topology: str,
  *,
  mesh: MeshShape | str | None = None,
  fit: str | None = None,
  log: Log = lambda line: None,
  memory_limit: int = process.MEMORY_LIMIT,
  **options: Any,
) -> PodPlan:
  """Compiles a step for a slice with libtpu and says whether it fits.

  Args:
    config: the model.
    topology: 'tpu7x:4x4x8', or 'smallest:v6e' for the smallest slice of a
      generation on which the step fits.
    mesh: sizes of the mesh axes, as 'context=32,model=2'; None for the one
      with the fewest bytes a device.
    fit: 'batch' or 'context' to look for the largest that fits, starting
      from the one given; None to judge that one.
    log: called with lines of progress.
    memory_limit: bytes of this host's memory that a compile may take.
    **options: further fields of `PlanRequest`.

  Returns:
    The plan; `fits` says whether it does. Of 'smallest:', the largest slice
    where none fits.

  Raises:
    ValueError: bad input, or a step that cannot be compiled
      (`process.CompileError`).
  """
  if fit not in (None, *FITS):
    raise ValueError(f'fit={fit!r} is unknown: use one of {", ".join(FITS)}')
  compiled = lambda request: PodPlan(
    request, process.compile_step(request, log=log, memory_limit=memory_limit)
  )
  plan = None
  names = candidates(topology)
  for name in names:
    try:
      request = _request(config, name, mesh, options)
    except ValueError as error:
      if len(names) == 1:
        raise
      log(f'{name}: {error}')
      continue
    if topology.startswith(SMALLEST) and name != names[-1]:
      needed = meshes.estimated_bytes(request)
      if not meshes.has_room(request):
        log(f'{name}: needs {needed / 2**30:.1f} GiB a device before it runs')
        continue
    plan = compiled(request)
    if plan.fits:
      break
  if plan is None:
    raise ValueError(f'no slice of {topology} suits this model and step')
  return plan if fit is None else _largest(plan, fit, compiled, log)


def _request(config, topology, mesh, options) -> PlanRequest:
  """The request for one slice; chooses a mesh where none is given."""
  if isinstance(mesh, str):
    mesh = parse_mesh_shape(mesh)
  if mesh is None:
    weight_dtype = options.get('weight_dtype', 'auto')
    mesh = meshes.mesh_choices(config, topology, weight_dtype)[0]
  return PlanRequest(config=config, topology=topology, mesh=mesh, **options)


def _largest(plan: PodPlan, fit: str, compiled, log: Log) -> PodPlan:
  """The plan with the largest batch or context that fits.

  What is left over, divided by what one more costs, gives the next guess;
  the compiler judges it. Two guesses that bracket the answer within 3%, or by
  one, end the search.
  """
  unit = 1 if fit == 'batch' else PAGE * plan.request.mesh.size
  good, bad = (plan, None) if plan.fits else (None, plan)
  tried = {_size(plan, fit)}
  for _ in range(6):
    guess = _guess(plan, fit, unit)
    low = _size(good, fit) if good else 0
    high = _size(bad, fit) if bad else None
    if high is not None:
      guess = min(guess, high - unit)
    guess = max(guess, low + unit, unit)
    if guess in tried or high is not None and guess >= high:
      break
    log(f'trying {fit}={guess}')
    tried.add(guess)
    plan = compiled(dataclasses.replace(plan.request, **{fit: guess}))
    good, bad = (plan, bad) if plan.fits else (good, plan)
    if good and bad:
      gap = _size(bad, fit) - _size(good, fit)
      if gap <= max(unit, 0.03 * _size(good, fit)):
        break
  return good or plan


def _size(plan: PodPlan, fit: str) -> int:
  return getattr(plan.request, fit)


def _guess(plan: PodPlan, fit: str, unit: int) -> int:
  """The size at which memory runs out, if cache and state grow linearly."""
  device = plan.measured['device_bytes']
  per_chip = plan.chip.devices_per_chip
  left = (plan.chip.limit_bytes - plan.hbm_bytes_per_chip) / per_chip
  grows = (
    device.get('cache', 0) + device['state'] + max(device['temporaries'], 0) / 2
  )
  scale = 1 + 0.98 * left / grows
  return max(int(_size(plan, fit) * scale) // unit * unit, 0)


def compare_plans(
  config: ModelConfig,
  topology: str,
  *,
  log: Log = lambda line: None,
  cache_plans: tuple[str, ...] = CACHE_PLANS,
  **options: Any,
) -> list[tuple[str, PodPlan | str]]:
  """The same step under every cache plan, with IndexShare and without.

  Args:
    config: the model.
    topology: one slice, or 'smallest:' for each plan's smallest.
    log: called with lines of progress.
    cache_plans: the plans.
    **options: of `plan_pod`; `cache_plan` is ignored.

  Returns:
    A name and the plan of each; a message in place of a plan that cannot
    express this model or mesh.
  """
  options.pop('cache_plan', None)
  rows: list[tuple[str, PodPlan | str]] = []
  for sharing, model in (
    ('IndexShare', config),
    ('an indexer a layer', per_layer_indexers(config)),
  ):
    for cache_plan in cache_plans:
      name = f'{cache_plan}, {sharing}'
      log(f'comparing {name}')
      try:
        plan = plan_pod(
          model, topology, log=log, cache_plan=cache_plan, **options
        )
      except ValueError as error:
        plan = str(error)
      rows.append((name, plan))
  return rows
