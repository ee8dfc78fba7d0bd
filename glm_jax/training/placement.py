"""Where a run's arrays live: the part of the loop that a mesh replaces.

The loop is handed a placement and never asks how many devices or processes
there are; `sharding.placement` has the one of many.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from etils import epath

from glm_jax.checkpoints import load_model
from glm_jax.data import Batch, TokenBatches
from glm_jax.training.config import Stage, TrainConfig
from glm_jax.training.parameters import Layout
from glm_jax.training.step import TrainState, init_state, make_eval, make_step
from glm_jax.training.windows import Windows


class OneDevice:
  """The default device.

  Attributes:
    is_main: whether this process writes logs and metrics.
  """

  is_main = True

  def check(self, config: TrainConfig) -> None:
    """Raises `ValueError` if some stage cannot run here."""

  def step(self, config: TrainConfig, stage: Stage) -> Callable:
    """The compiled step of a stage; see `make_step`."""
    return make_step(config, stage)

  def evaluate(self, config: TrainConfig, stage: Stage) -> Callable:
    """The compiled evaluation of a stage; see `make_eval`."""
    return make_eval(config, stage)

  def abstract(self, config: TrainConfig) -> TrainState:
    """Shapes, dtypes and places of a training state."""
    like = jax.eval_shape(lambda: init_state(config, Layout(config.model)))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), like
    )

  def init(
    self, config: TrainConfig, start: epath.PathLike | None
  ) -> TrainState:
    """The state before step 0.

    Args:
      config: the run.
      start: a checkpoint to take parameters from, or None.
    """
    model = None if start is None else load_model(start, dtype='f32')
    state = init_state(config, Layout(config.model), model)
    # As a restored state is: one program serves both.
    return jax.device_put(state, jax.devices()[0])

  def windows(self, batches: TokenBatches, numbers: np.ndarray) -> Windows:
    """Reads windows by number.

    Args:
      batches: the file's windows.
      numbers: [...] int.

    Returns:
      Windows with these leading axes.
    """
    found = to_windows(batches.windows(numbers.reshape(-1)))
    split = lambda a: a.reshape(*numbers.shape, *a.shape[1:])
    return jax.tree.map(split, found)

  def every(self, flag: bool) -> bool:
    """Whether all processes say so; all of them must ask."""
    return flag


def to_windows(batch: Batch) -> Windows:
  """A batch of token files as the trainer takes it."""
  return Windows(batch.tokens, batch.segment_ids, batch.positions)


ONE_DEVICE = OneDevice()
