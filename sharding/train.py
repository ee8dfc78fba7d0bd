"""Training across devices: windows over `data`, their rows over `context`.

The step is the one of a single device (`glm_jax.training.step`) under
shardings. Row-wise work stays with its rows; query rows read the keys of the
whole window, which are all-gathered over `context` (the gradient of that is a
reduce-scatter); experts are exchanged as in serving, in the worst-case round,
which alone can be differentiated; master weights, gradients and moments are
split as the weights are. What looks ahead, the drafter's targets and the
trunk's states that judge it, crosses a shard's edge by as many rows as there
are drafts: XLA exchanges that halo.
"""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glm_jax.compiling import StepJit
from glm_jax.config import ModelConfig
from glm_jax.training.config import Stage, TrainConfig
from glm_jax.training.parameters import Layout
from glm_jax.training.step import TrainState, init_state, step_function
from glm_jax.training.windows import Windows
from pallas_kernels.tiling import PAGE
from sharding.base import ShardedPlan
from sharding.mesh import CONTEXT, DATA
from sharding.rules import DEFAULT, Rules


@dataclasses.dataclass(frozen=True)
class TrainPlan(ShardedPlan):
  """See this file's head; made by `train_plan`."""

  @property
  def query_ranks(self) -> int:
    """Ranks of a window's rows."""
    return self.mesh.shape[CONTEXT]

  def by_query(self, f, queries, keys):
    """Each rank its own query rows, with the window's keys."""
    rows, windows = P(DATA, CONTEXT), P(DATA)
    return self.shard_map(f, (rows, windows), rows)(queries, keys)


def train_plan(
  config: ModelConfig, mesh: Mesh, rules: Rules = DEFAULT
) -> TrainPlan:
  """The plan of a training step over a mesh."""
  return TrainPlan(config, mesh, rules, min_rows=1, expert_capacity=2**31 - 1)


def over_mesh(stage: Stage) -> Stage:
  """The stage with what 'auto' means over a mesh."""
  if stage.experts == 'auto':
    stage = dataclasses.replace(stage, experts='grouped')
  return stage


def check_stage(stage: Stage, mesh: Mesh) -> None:
  """Raises `ValueError` unless a stage's windows divide over the mesh."""
  data, context = mesh.shape[DATA], mesh.shape[CONTEXT]
  if stage.batch % data:
    raise ValueError(
      f'batch={stage.batch} windows do not divide over data={data}: use a '
      'multiple'
    )
  if stage.window % (PAGE * context):
    raise ValueError(
      f'window={stage.window} does not divide over context={context} in pages '
      f'of {PAGE}: use a multiple of {PAGE * context}'
    )
  for name, stride in (
    ('kl_stride', stage.kl_stride),
    ('draft.stride', 1 if stage.draft is None else stage.draft.stride),
  ):
    if stride and stage.window // context % stride:
      raise ValueError(
        f'{name}={stride} must divide the {stage.window // context} rows of a '
        'rank'
      )
  if stage.options.experts_here != 'grouped':
    raise ValueError(
      "experts='dense' runs every expert on every row: use experts='grouped' "
      'over several devices'
    )
  if stage.options.attention_here == 'cudnn':
    raise ValueError("attention='cudnn' is for one device: use 'gather'")


def state_shardings(
  config: TrainConfig, state: TrainState, mesh: Mesh, rules: Rules = DEFAULT
) -> TrainState:
  """Where each array of a training state lives.

  Args:
    config: the run.
    state: concrete or abstract.
    mesh: the mesh.
    rules: the table.

  Returns:
    A pytree like `state`; moments lie with the weights they belong to, and
    scalars everywhere.
  """
  leaves = Layout(config.model).leaves

  def find(path, value):
    for key in path:
      leaf = leaves.get(getattr(key, 'key', None))
      if leaf is not None and leaf.shape == tuple(value.shape):
        return rules.sharding(leaf.axes, leaf.shape, mesh)
    return NamedSharding(mesh, P())

  return jax.tree_util.tree_map_with_path(find, state)


def abstract_state(
  config: TrainConfig, mesh: Mesh, rules: Rules = DEFAULT
) -> TrainState:
  """Shapes, dtypes and places of a training state."""
  layout = Layout(config.model)
  like = jax.eval_shape(lambda: init_state(config, layout))
  return jax.tree.map(
    lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
    like,
    state_shardings(config, like, mesh, rules),
  )


def make_sharded_step(
  config: TrainConfig, stage: Stage, mesh: Mesh, rules: Rules = DEFAULT
):
  """The compiled step of a stage over a mesh.

  Args:
    config: the run.
    stage: one of its stages.
    mesh: the mesh.
    rules: the table.

  Returns:
    step (as `glm_jax.training.step.make_step` gives), whose state stays where
    it was; and place: states and windows to where the step takes them.

  Raises:
    ValueError: windows, rows or experts that do not divide over the mesh.
  """
  stage = over_mesh(stage)
  check_stage(stage, mesh)
  like = abstract_state(config, mesh, rules)
  step = StepJit(
    step_function(config, stage, train_plan(config.model, mesh, rules)),
    donate_argnums=0,
    out_shardings=(jax.tree.map(lambda a: a.sharding, like), None),
  )

  def place(tree):
    if isinstance(tree, Windows):
      return jax.device_put(tree, windows_sharding(mesh))
    return jax.device_put(tree, state_shardings(config, tree, mesh, rules))

  return step, place


def windows_sharding(mesh: Mesh) -> NamedSharding:
  """Where a step's windows [accumulate, B, S + E] live.

  Ints of a whole window: each rank needs those ahead of its rows.
  """
  return NamedSharding(mesh, P(None, DATA))
