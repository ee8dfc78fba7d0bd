"""The real steps on abstract arguments: nothing is allocated.

The same functions that generation and training run, with parameters, cache
and state as shapes that know where they would live on a slice.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax.cache import Cache, init_cache
from glm_jax.decoding import DecodeState, decode_step, prefill_step
from glm_jax.model import Model, abstract_model
from glm_jax.plan import LocalPlan
from glm_jax.sampling import sampling_params
from glm_jax.speculative import SpeculativeState, speculative_step
from sharding.mesh import make_mesh
from sharding.planner.request import PlanRequest
from sharding.planner.topology import topology_devices
from sharding.rules import abstract_sharded

_EOS = 3


class Step(NamedTuple):
  """A lowered step.

  Attributes:
    lowered: ready to be compiled.
    bytes: of one device's arguments by what they hold, elements alone.
    loops: trips of loops whose length is data, by pattern of `op_name`.
  """

  lowered: jax.stages.Lowered
  bytes: dict[str, int]
  loops: dict[str, float]


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
    from sharding.planner.train_step import lower_train

    return lower_train(request, mesh)
  plan = cache_plan(request, mesh)
  model = abstract_sharded(
    abstract_model(request.config, weight_dtype=request.weight_dtype),
    mesh,
    plan.rules,
  )
  cache = abstract_cache(request, plan)
  traced, state = _trace(request, model, cache, mesh, plan)
  held = {
    'weights': device_bytes(model),
    'cache': device_bytes(cache),
    'state': device_bytes(state),
  }
  lowered = traced.lower(lowering_platforms=('tpu',))
  return Step(lowered, held, data_loops(request))


def cache_plan(request: PlanRequest, mesh: Mesh) -> LocalPlan:
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


def abstract_cache(request: PlanRequest, plan: LocalPlan) -> Cache:
  """The request's cache as shapes, each where the plan would place it."""
  pages = request.batch * request.pages
  make = lambda: init_cache(
    request.config, pages, dtype=request.kv_cache_dtype, plan=plan
  )
  traced = jax.jit(make).trace()
  # A plan allocates under `jit` with output shardings, which are read here:
  # the devices of a description cannot hold anything.
  placed = {}
  for equation in traced.jaxpr.eqns:
    shardings = equation.params.get('out_shardings', ())
    placed.update(zip(equation.outvars, shardings))
  leaves = [
    jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=placed[v])
    for v in traced.jaxpr.jaxpr.outvars
  ]
  return jax.tree.unflatten(jax.tree.structure(traced.out_info), leaves)


def _trace(request, model: Model, cache, mesh: Mesh, plan):
  """The traced step and its small arguments."""
  B = request.batch
  whole = NamedSharding(mesh, PartitionSpec())
  shape = lambda dims, dtype=jnp.int32: jax.ShapeDtypeStruct(
    dims, dtype, sharding=whole
  )
  table = shape((B, request.pages))
  if request.step == 'prefill':
    rows = [shape((request.chunk,)) for _ in range(3)]
    drafter = model.mtp is not None
    traced = prefill_step.trace(
      model, cache, table, *rows, plan=plan, with_drafter=drafter
    )
    return traced, (table, rows)
  params = jax.tree.map(lambda a: shape(a.shape, a.dtype), sampling_params(B))
  state = DecodeState(
    cache,
    table,
    lengths=shape((B,)),
    last_token=shape((B,)),
    limits=shape((B,)),
    eos=shape((_EOS,)),
    done=shape((B,), bool),
    params=params,
  )
  if request.step == 'decode':
    traced = decode_step.trace(model, state, plan=plan)
    return traced, (table, params)
  K = request.num_speculative_tokens
  hidden = shape((B, K + 1, request.config.hidden_size), model.embed.dtype)
  state = SpeculativeState(
    decode=state,
    pending_tokens=shape((B, K + 1)),
    pending_hidden=hidden,
    pending_position=shape((B,)),
    pending=shape((B,)),
    draft_count=shape((B,)),
  )
  traced = speculative_step.trace(model, state, shape((B, K)), plan=plan)
  return traced, (table, params, hidden)


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
  for (scope 'overflow') do not happen.
  """
  drafts = max(request.num_speculative_tokens - 1, 1)
  return {r'overflow': 0, r'^jit\(speculative_step\)/while$': drafts}
