"""The real steps on abstract arguments: nothing is allocated.

The same functions that generation and training run, with parameters, cache
and state as shapes that know where they would live on a slice.
"""

from __future__ import annotations

import math
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax.cache import init_cache
from glm_jax.decoding import DecodeState, decode_step, prefill_step
from glm_jax.model import Model, abstract_model
from glm_jax.sampling import sampling_params
from glm_jax.speculative import SpeculativeState, speculative_step
from pallas_kernels.grouped_matmul.xla import default_tile
from sharding.base import ShardedPlan
from sharding.mesh import make_mesh
from sharding.planner.engine_step import serve_call
from sharding.planner.request import PlanRequest
from sharding.planner.topology import topology_devices
from sharding.planner.train_step import train_call
from sharding.rules import abstract_sharded
from sharding.sharded_cache import ShardedCache

_EOS = 3


class Step(NamedTuple):
  """A lowered step.

  Attributes:
    lowered: ready to be compiled.
    bytes: of one device's arguments by what they hold, elements alone.
    unread: of these, bytes that the program is not passed. They stay in
      memory all the same: plain decoding does not run the drafter.
    slots: bytes of the plan's transient layers, part of the temporaries of a
      step that moves rows.
    loops: trips of loops whose length is data, by pattern of `op_name`.
    movement: what a split step sends, rows or results, and the bytes of both;
      None where there is no choice.
  """

  lowered: jax.stages.Lowered
  bytes: dict[str, int]
  unread: int
  slots: int
  loops: dict[str, float]
  movement: str | None = None


def lower(request: PlanRequest) -> Step:
  """Traces and lowers a step for its slice.

  Args:
    request: the step.

  Returns:
    The lowered step.

  Raises:
    ValueError: an impossible mesh or plan, an unknown slice.
    NotImplementedError: an op that the plan or the chip cannot run.
    ImportError: libtpu is missing.
  """
  mesh = make_mesh(request.mesh, topology_devices(request.topology))
  if request.step == 'train':
    step, (state, batch) = train_call(request, mesh)
    held = {
      'weights': device_bytes(state.params),
      'optimiser': device_bytes(state.moments),
      'state': device_bytes(batch),
    }
    traced = step.trace(state, batch)
    lowered = traced.lower(lowering_platforms=('tpu',))
    return Step(lowered, held, 0, 0, data_loops(request))
  plan = cache_plan(request, mesh)
  model = abstract_sharded(
    abstract_model(request.config, weight_dtype=request.weight_dtype),
    mesh,
    plan.rules,
  )
  cache, slots = abstract_cache(request, plan)
  function, arguments, options = _call(request, model, cache, mesh)
  traced = function.trace(*arguments, plan=plan, **options)
  held = {'weights': device_bytes(model), 'cache': device_bytes(cache)}
  held['state'] = device_bytes(arguments) - sum(held.values())
  unused = unread(traced, arguments)
  lowered = traced.lower(lowering_platforms=('tpu',))
  movement = None
  if hasattr(plan, 'movement') and plan.is_split(request.rows):
    movement = str(plan.movement(request.rows, cache))
  return Step(lowered, held, unused, slots, data_loops(request), movement)


def cache_plan(request: PlanRequest, mesh: Mesh) -> ShardedPlan:
  """The plan object of a request's cache plan."""
  from sharding import plan_named

  options = {} if request.slots is None else {'slots': request.slots}
  return plan_named(
    request.cache_plan,
    request.config,
    mesh,
    implementation=request.implementation,
    **options,
  )


def abstract_cache(
  request: PlanRequest, plan: ShardedPlan
) -> tuple[ShardedCache, int]:
  """The request's cache as shapes, and bytes of its transient slots.

  Args:
    request: the step.
    plan: says where pools live and how many slots there are.

  Returns:
    The cache, each array where the plan would place it, and bytes that slots
    take on a device while rows move (they are temporaries of the step).
  """
  slots = []

  def describe(cache):
    slots.append(plan.cache_bytes(cache)['slots'])
    shapes, specs = plan.layout(cache)
    arrays = {
      name: getattr(shapes, name)
      and jax.ShapeDtypeStruct(
        getattr(shapes, name).shape,
        getattr(shapes, name).dtype,
        sharding=NamedSharding(plan.mesh, spec),
      )
      for name, spec in specs.items()
    }
    return ShardedCache(
      **arrays,
      num_pages=shapes.num_pages,
      latent_width=shapes.latent_width,
      rope_width=shapes.rope_width,
    )

  cache = init_cache(
    request.config,
    request.batch * request.pages,
    dtype=request.kv_cache_dtype,
    plan=types.SimpleNamespace(place_cache=describe),
  )
  return cache, slots[0]


def _call(request, model: Model, cache, mesh: Mesh):
  """The step's function, its arguments, and its options but the plan."""
  if request.step == 'serve':
    return serve_call(request, model, cache, mesh)
  B = request.batch
  whole = NamedSharding(mesh, PartitionSpec())
  shape = lambda dims, dtype=jnp.int32: jax.ShapeDtypeStruct(
    dims, dtype, sharding=whole
  )
  table = shape((B, request.pages))
  if request.step == 'prefill':
    rows = [shape((request.chunk,)) for _ in range(3)]
    options = {'with_drafter': model.mtp is not None}
    return prefill_step, (model, cache, table, *rows), options
  state = DecodeState(
    cache,
    table,
    lengths=shape((B,)),
    last_token=shape((B,)),
    limits=shape((B,)),
    eos=shape((_EOS,)),
    done=shape((B,), bool),
    params=jax.tree.map(lambda a: shape(a.shape, a.dtype), sampling_params(B)),
  )
  if request.step == 'decode':
    return decode_step, (model, state), {}
  K = request.num_speculative_tokens
  state = SpeculativeState(
    decode=state,
    pending_tokens=shape((B, K + 1)),
    pending_hidden=shape(
      (B, K + 1, request.config.hidden_size), model.embed.dtype
    ),
    pending_position=shape((B,)),
    pending=shape((B,)),
    draft_count=shape((B,)),
  )
  return speculative_step, (model, state, shape((B, K))), {}


def unread(traced, arguments: Any) -> int:
  """Bytes on a device of arguments that a traced step never reads."""
  jaxpr = traced.jaxpr.jaxpr
  read = {id(v) for e in jaxpr.eqns for v in e.invars}
  read |= {id(v) for v in jaxpr.outvars}
  leaves = jax.tree.leaves(arguments)
  pairs = zip(leaves, jaxpr.invars, strict=True)
  return device_bytes([leaf for leaf, var in pairs if id(var) not in read])


def device_bytes(tree: Any) -> int:
  """Bytes of the shards that one device holds, without padding."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    shard = leaf.sharding.shard_shape(tuple(leaf.shape))
    total += math.prod(shard) * jnp.dtype(leaf.dtype).itemsize
  return total


def data_loops(request: PlanRequest) -> dict[str, float]:
  """Trips of loops whose length is data, in the case that is planned for.

  Drafting makes all its drafts. Passes for more candidates than are provided
  for (scope 'overflow') do not happen. Rows are even over experts.
  """
  drafts = max(request.num_speculative_tokens - 1, 1)
  return {
    'overflow': 0,
    r'feed_forward/.*while$': expert_tiles(request),
    r'^jit\((speculative|engine)_step\)/while$': drafts,
  }


def expert_tiles(request: PlanRequest) -> int:
  """Tiles of one grouped product on a rank that has its share of rows.

  At least one: where fewer rows than ranks choose experts, some rank runs
  one, and the others wait for it.
  """
  c = request.config.moe
  ranks = request.mesh.data * request.mesh.context
  own = max(c.num_experts // ranks, 1)
  pairs = math.ceil(request.rows * c.experts_per_token / ranks)
  groups = min(own, pairs)
  # The product is given room for all rows, whoever they belong to.
  room = request.rows * min(c.experts_per_token, own)
  if request.rows >= ranks * 256:
    room = min(room, 2 * pairs + 8 * ranks)
  tile = default_tile(room, own)
  return groups * math.ceil(pairs / groups / tile)
