"""Plans of many devices: mesh, rules, cache plans, collectives."""

from sharding.mesh import MeshShape, make_mesh, mesh_shape, parse_mesh_shape
from sharding.rules import DEFAULT, Rules, module_shardings

__all__ = [
  'DEFAULT',
  'MeshShape',
  'Rules',
  'make_mesh',
  'mesh_shape',
  'module_shardings',
  'parse_mesh_shape',
]
