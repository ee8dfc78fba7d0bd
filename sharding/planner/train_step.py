"""The optimiser's step on abstract arguments.

Sparse stage: trunk and indexer learn, every row attends to its selection.
The step is the one that `launch/train.py` runs (`sharding.train`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from glm_jax.training.config import Stage, TrainConfig
from glm_jax.training.windows import Windows
from sharding import train
from sharding.planner.request import PlanRequest


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


def train_call(request: PlanRequest, mesh: Mesh) -> tuple[Any, tuple]:
  """The step's function and its arguments, (state, batch).

  Raises:
    ValueError: windows, rows or parameters that do not divide over the mesh,
      or fp8 weights, which are not trained.
  """
  if request.weight_dtype == 'fp8':
    raise ValueError("weight_dtype='fp8' is not trained: use bf16 or f32")
  config = train_config(request)
  stage = config.stages[0]
  step, _ = train.make_sharded_step(config, stage, mesh)
  tokens = jax.ShapeDtypeStruct(
    (1, stage.batch, stage.window + stage.lookahead),
    jnp.int32,
    sharding=train.windows_sharding(mesh),
  )
  state = train.abstract_state(config, mesh)
  return step, (state, Windows(tokens, tokens, tokens))
