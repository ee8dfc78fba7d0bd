"""The server's own step on abstract arguments: decoding and prompt rows mixed.

It is the function that `glm_jax.serving.runner` compiles for each bucket, so
what the planner says of it holds for a server on that slice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax.drafting import DraftOptions
from glm_jax.model import Model
from glm_jax.serving.config import EngineConfig, buckets
from glm_jax.serving.inputs import InputBuilder
from glm_jax.serving.scheduler import StepPlan
from glm_jax.serving.steps import engine_step, init_state
from pallas_kernels.tiling import PAGE, cdiv
from sharding.planner.request import PlanRequest

_FINISHING = 8  # prompts that may end in one step, as in `serving.config`
_step = jax.jit(
  engine_step,
  static_argnames=('plan', 'blocks', 'with_drafter', 'options'),
  donate_argnames='state',
)


def serve_call(
  request: PlanRequest, model: Model, cache: Any, mesh: Mesh
) -> tuple[Any, tuple, dict[str, Any]]:
  """The engine's step of one bucket.

  Args:
    request: of step 'serve'.
    model: abstract, with shardings.
    cache: abstract, with shardings.
    mesh: of the slice.

  Returns:
    The jitted function, its arguments, and its static arguments but `plan`.
  """
  slots, K = request.batch, request.num_speculative_tokens
  whole = NamedSharding(mesh, PartitionSpec())
  place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole)
  make = functools.partial(init_state, num_slots=slots, most_drafts=K)
  state = jax.eval_shape(make, model, cache)
  state = jax.tree.map(place, dataclasses.replace(state, cache=None))
  state = dataclasses.replace(state, cache=cache)
  words = cdiv(request.config.vocab_size, 32)
  builder = InputBuilder(slots, min(_FINISHING, slots), words, np.asarray)
  inputs = builder.build(StepPlan(), request.chunk, slots, K)
  table = jax.ShapeDtypeStruct(
    (slots + 1, request.pages), np.int32, sharding=whole
  )
  share = request.config.mtp.share_index_and_kv
  static = dict(
    blocks=request.pages,
    with_drafter=model.mtp is not None and K > 0,
    options=DraftOptions(share, share),
  )
  arguments = model, state, table, jax.tree.map(place, inputs)
  return _step, arguments, static


def bucket_requests(
  request: PlanRequest, config: EngineConfig
) -> list[PlanRequest]:
  """A request for each shape that a server of `config` compiles."""
  return [
    dataclasses.replace(
      request,
      step='serve',
      chunk=rows,
      batch=batch,
      num_speculative_tokens=drafts,
      context=blocks * PAGE - drafts,
    )
    for rows, batch, drafts, blocks in buckets(config).all()
  ]
