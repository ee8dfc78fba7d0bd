"""Plans of many devices: mesh, rules, cache plans, collectives."""

from sharding.layer_split import LayerSplit
from sharding.mesh import MeshShape, make_mesh, mesh_shape, parse_mesh_shape
from sharding.planner import PodPlan, plan_pod
from sharding.replicated import Replicated
from sharding.rules import DEFAULT, Rules, module_shardings
from sharding.token_split import TokenSplit

__all__ = [
  'DEFAULT',
  'LayerSplit',
  'MeshShape',
  'PLANS',
  'PodPlan',
  'Replicated',
  'Rules',
  'TokenSplit',
  'make_mesh',
  'mesh_shape',
  'module_shardings',
  'parse_mesh_shape',
  'plan_named',
  'plan_pod',
]

PLANS = {
  'token_split': TokenSplit,
  'layer_split': LayerSplit,
  'replicated': Replicated,
}


def plan_named(name: str, config, mesh, **options):
  """A cache plan by its name.

  Args:
    name: one of `PLANS`.
    config: the model.
    mesh: of `make_mesh`.
    **options: fields of the plan.

  Raises:
    ValueError: an unknown name or option, or a mesh that the model does not
      divide over.
  """
  if name not in PLANS:
    raise ValueError(f'cache plan {name!r} is unknown: use {sorted(PLANS)}')
  return PLANS[name](config, mesh, **options)
