"""A training run over a mesh, in one process or many.

Every process runs the same loop (`glm_jax.training.loop`) and holds the parts
of its own devices: of weights and moments, which it alone writes and reads,
and of windows, of which it reads those of its share of `data`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glm_jax.checkpoints import load_model
from glm_jax.data import TokenBatches
from glm_jax.training.config import Stage, TrainConfig
from glm_jax.training.parameters import Layout
from glm_jax.training.placement import OneDevice, to_windows
from glm_jax.training.step import TrainState, init_state, make_eval
from glm_jax.training.windows import Windows
from pallas_kernels.tiling import round_up
from sharding import train
from sharding.mesh import DATA
from sharding.rules import DEFAULT, Rules


@dataclasses.dataclass(frozen=True)
class MeshPlacement(OneDevice):
  """See this file's head.

  Attributes:
    mesh: of `make_mesh`, over the devices of all processes.
    rules: logical axes to mesh axes.
  """

  mesh: Mesh
  rules: Rules = DEFAULT

  @property
  def is_main(self) -> bool:
    """Process 0 writes logs and metrics."""
    return jax.process_index() == 0

  def check(self, config: TrainConfig) -> None:
    """Raises `ValueError` if some stage does not divide over the mesh."""
    for stage in config.stages:
      train.check_stage(train.over_mesh(stage), self.mesh)

  def step(self, config: TrainConfig, stage: Stage) -> Callable:
    """The compiled step of a stage."""
    return train.make_sharded_step(config, stage, self.mesh, self.rules)[0]

  def evaluate(self, config: TrainConfig, stage: Stage) -> Callable:
    """The compiled evaluation of a stage."""
    plan = train.train_plan(config.model, self.mesh, self.rules)
    return make_eval(config, train.over_mesh(stage), plan)

  def abstract(self, config: TrainConfig) -> TrainState:
    """Shapes, dtypes and places of a training state."""
    return train.abstract_state(config, self.mesh, self.rules)

  def init(
    self, config: TrainConfig, start: epath.PathLike | None
  ) -> TrainState:
    """The state before step 0; see `OneDevice.init`."""
    model = None
    if start is not None:
      plan = train.train_plan(config.model, self.mesh, self.rules)
      model = load_model(start, dtype='f32', plan=plan)
    layout = Layout(config.model)
    like = self.abstract(config)
    make = jax.jit(
      lambda model: init_state(config, layout, model),
      out_shardings=jax.tree.map(lambda a: a.sharding, like),
    )
    return make(model)

  def windows(self, batches: TokenBatches, numbers: np.ndarray) -> Windows:
    """Reads windows by number, each process those of its devices.

    The last axis of `numbers` is dealt over `data`; empty windows fill it up.
    """
    count = round_up(numbers.shape[-1], self.mesh.shape[DATA])
    short = count - numbers.shape[-1]
    widths = [(0, 0)] * (numbers.ndim - 1) + [(0, short)]
    numbers = np.pad(numbers, widths, constant_values=-1)
    spec = P(*(None,) * (numbers.ndim - 1), DATA)
    sharding = NamedSharding(self.mesh, spec)
    read: dict[str, Windows] = {}

    def part(index, field):
      key = repr(index[: numbers.ndim])
      if key not in read:
        some = numbers[index[: numbers.ndim]]
        found = to_windows(batches.windows(np.maximum(some, 0).reshape(-1)))
        there = (some >= 0).reshape(-1, 1)
        read[key] = jax.tree.map(
          lambda a: np.where(there, a, 0).reshape(*some.shape, -1), found
        )
      return getattr(read[key], field)

    shape = (*numbers.shape, batches.width)
    return Windows(
      *(
        jax.make_array_from_callback(
          shape, sharding, lambda index, field=field: part(index, field)
        )
        for field in Windows._fields
      )
    )

  def every(self, flag: bool) -> bool:
    """Whether all processes say so; all of them must ask."""
    if jax.process_count() == 1:
      return flag
    return bool(np.all(multihost_utils.process_allgather(np.bool_(flag))))
