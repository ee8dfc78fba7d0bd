"""What the tests of the planner ask it for."""

from glm_jax import presets
from sharding.mesh import MeshShape
from sharding.planner.request import PlanRequest

GLM52 = presets.PRESETS['glm52']


def request(**changes):
  values = dict(config=GLM52, topology='v6e:16x16', mesh=MeshShape(context=256))
  return PlanRequest(**values | changes)
