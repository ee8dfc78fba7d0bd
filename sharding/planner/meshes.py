"""Which mesh a slice gets when nobody says, and what it would hold.

Estimates before anything is compiled: bytes of the shards of weights and
cache on one device, by the rules and the accountant.
"""

from __future__ import annotations

import functools

from jax.sharding import AbstractMesh

from glm_jax.config import ModelConfig
from glm_jax.model import abstract_model
from sharding import capacity
from sharding.chips import chip_named
from sharding.mesh import AXES, MeshShape
from sharding.planner.request import PlanRequest
from sharding.planner.topology import num_devices
from sharding.rules import DEFAULT, shard_bytes

# Heads and experts are split over `model`; wider ones cut small matrices.
_MODEL_SIZES = (1, 2, 4, 8, 16)


def mesh_choices(
  config: ModelConfig, topology: str, weight_dtype: str = 'auto'
) -> list[MeshShape]:
  """Meshes of one sequence at a time that the model's sizes allow.

  Args:
    config: the model.
    topology: the slice.
    weight_dtype: of the weights; fp8 experts are not cut inside blocks.

  Returns:
    Shapes, fewest bytes a device first: latents are whole on every `model`
    rank.

  Raises:
    ValueError: there is none; says what stands in the way.
  """
  devices, found, problem = num_devices(topology), [], None
  for model in _MODEL_SIZES:
    if devices % model:
      continue
    shape = MeshShape(context=devices // model, model=model)
    try:
      _check_width(config, model, weight_dtype)
      weight_bytes(config, shape, weight_dtype)
    except ValueError as error:
      problem = error
      continue
    found.append(shape)
  if not found:
    raise ValueError(
      f'no mesh of {topology} ({devices} devices) suits this model: {problem}'
    )
  return found


def _check_width(config: ModelConfig, model: int, weight_dtype: str) -> None:
  """Rejects meshes that the plans reject."""
  if config.mla.num_heads % model:
    raise ValueError(
      f'{config.mla.num_heads} attention heads do not divide over {model}'
    )
  fp8 = weight_dtype == 'fp8' or config.weight_block_size is not None
  width = config.moe.intermediate_size
  if fp8 and model > 1 and width // model % 128:
    raise ValueError(
      f'experts of width {width} in {model} parts cut through fp8 blocks'
    )


def weight_bytes(
  config: ModelConfig, shape: MeshShape, weight_dtype: str = 'auto'
) -> int:
  """Bytes of weights on one device.

  Raises:
    ValueError: a size that does not divide, with the parameter's path.
  """
  mesh = AbstractMesh(tuple(shape), AXES)
  model = _abstract_model(config, weight_dtype)
  return sum(shard_bytes(model, mesh, DEFAULT).values())


@functools.lru_cache(8)
def _abstract_model(config: ModelConfig, weight_dtype: str):
  return abstract_model(config, weight_dtype=weight_dtype)


def cache_bytes(request: PlanRequest) -> float:
  """Bytes of cache on one device, transient slots left out."""
  mesh = request.mesh
  ways = mesh.data * mesh.context
  per_token = capacity.capacity_bytes(
    request.config,
    request.cache_plan,
    ways,
    dtype=request.kv_cache_dtype,
    physical=True,
  )
  return per_token * request.batch * request.context


def estimated_bytes(request: PlanRequest) -> float:
  """Bytes of weights and cache on one device; in training, of the optimiser.

  Trained weights and both moments are float32.
  """
  if request.step == 'train':
    return 3 * weight_bytes(request.config, request.mesh, 'f32')
  weights = weight_bytes(request.config, request.mesh, request.weight_dtype)
  return weights + cache_bytes(request)


def has_room(request: PlanRequest) -> bool:
  """Whether weights and cache alone are within a device's memory."""
  chip = chip_named(request.topology)
  return estimated_bytes(request) <= chip.limit_bytes / chip.devices_per_chip
