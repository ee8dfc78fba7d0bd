"""The optimiser's step on abstract arguments.

Sparse stage: trunk and indexer learn, every row attends to its selection.
Master weights and both moments of AdamW are float32, split like the weights
they belong to; windows are split over `data` and rows over `context` by XLA's
own partitioner.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax.training.config import Stage, TrainConfig
from glm_jax.training.parameters import Layout
from glm_jax.training.step import TrainState, init_state, make_step
from glm_jax.training.windows import Windows
from sharding.mesh import DATA
from sharding.planner.request import PlanRequest
from sharding.rules import DEFAULT


def train_config(request: PlanRequest) -> TrainConfig:
  """The run whose step is planned: one stage of one window size."""
  stage = Stage(
    name='sparse',
    steps=1,
    window=request.context,
    batch=request.batch,
    train=('trunk', 'indexer'),
    attention='gather',
    experts='grouped',
  )
  return TrainConfig(model=request.config, stages=(stage,), optimizer='adamw')


def train_call(request: PlanRequest, mesh: Mesh):
  """The step's function and its arguments, (state, batch).

  Raises:
    ValueError: a parameter that does not divide over the mesh, or fp8
      weights, which are not trained.
  """
  if request.weight_dtype == 'fp8':
    raise ValueError("weight_dtype='fp8' is not trained: use bf16 or f32")
  config = train_config(request)
  stage, layout = config.stages[0], Layout(config.model)
  state = jax.eval_shape(lambda: init_state(config, layout))
  whole = NamedSharding(mesh, PartitionSpec())
  by_path = {
    path: DEFAULT.sharding(leaf.axes, leaf.shape, mesh)
    for path, leaf in layout.leaves.items()
  }

  def place(path, value):
    names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
    known = names and by_path[names[-1]]
    fits = known and value.shape == layout.leaves[names[-1]].shape
    return jax.ShapeDtypeStruct(
      value.shape, value.dtype, sharding=known if fits else whole
    )

  state: TrainState = jax.tree_util.tree_map_with_path(place, state)
  tokens = jax.ShapeDtypeStruct(
    (1, stage.batch, stage.window + stage.lookahead),
    jnp.int32,
    sharding=NamedSharding(mesh, PartitionSpec(None, _batch_axes(stage, mesh))),
  )
  return make_step(config, stage), (state, Windows(tokens, tokens, tokens))


def _batch_axes(stage: Stage, mesh: Mesh) -> str | None:
  """Windows are split over `data` where they divide."""
  ways = mesh.shape[DATA]
  return DATA if ways > 1 and stage.batch % ways == 0 else None
