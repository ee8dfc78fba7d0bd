"""What a training run is: a model, stages, an optimiser and a schedule."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence

from glm_jax.config import ModelConfig
from glm_jax.training.draft_forward import DraftForm
from glm_jax.training.forward import ForwardOptions
from pallas_kernels.tiling import PAGE

PARTS = ('trunk', 'indexer', 'mtp')


@dataclasses.dataclass(frozen=True)
class Stage:
  """Consecutive steps of one kind.

  Attributes:
    name: for the metrics.
    steps: optimiser steps.
    window: rows S of a window, whole pages.
    batch: windows a micro-batch.
    accumulate: micro-batches a step.
    train: which of `PARTS` learn. The drafter's indexer belongs to 'mtp'.
    sparse: attend to the indexer's selection; False: to everything (pre-
      training, and the indexer's warm-up).
    attention: see `ForwardOptions`.
    experts: see `ForwardOptions`.
    kl_coefficient: of the indexer's loss, 0 for none.
    kl_stride: every how manieth row has an indexer loss.
    draft: how the drafter is trained; None leaves it alone.
    draft_weight: of the drafter's loss.
    lr_scale: factor of the learning rate.
    chunk: see `ForwardOptions`.
    remat: see `ForwardOptions`.
  """

  name: str
  steps: int
  window: int
  batch: int
  accumulate: int = 1
  train: tuple[str, ...] = ('trunk', 'indexer')
  sparse: bool = True
  attention: str = 'auto'
  experts: str = 'auto'
  kl_coefficient: float = 1.0
  kl_stride: int = 8
  draft: DraftForm | None = None
  draft_weight: float = 1.0
  lr_scale: float = 1.0
  chunk: int = 256
  remat: bool = True

  def __post_init__(self):
    for name in ('steps', 'batch', 'accumulate'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)} must be at least 1')
    if self.window < PAGE or self.window % PAGE:
      raise ValueError(f'window={self.window} must be a multiple of {PAGE}')
    if not self.train or set(self.train) - set(PARTS):
      raise ValueError(f'train={self.train} must be some of {PARTS}')
    if ('mtp' in self.train) != (self.draft is not None):
      raise ValueError(
        f"train={self.train} with draft={self.draft}: 'mtp' learns from a "
        'draft loss, give both or neither'
      )
    self.options  # noqa: B018  checks attention and experts

  @property
  def options(self) -> ForwardOptions:
    """How the forward pass of the stage is computed."""
    return ForwardOptions(
      sparse=self.sparse,
      attention=self.attention,
      experts=self.experts,
      kl_stride=self.kl_stride if self.kl_coefficient else 0,
      chunk=self.chunk,
      remat=self.remat,
    )

  @property
  def tokens_per_step(self) -> int:
    """Rows of one optimiser step."""
    return self.window * self.batch * self.accumulate

  @property
  def lookahead(self) -> int:
    """Tokens beyond a window that targets need."""
    return 1 if self.draft is None else self.draft.steps + 1


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """A training run.

  Attributes:
    model: the model.
    stages: run one after another.
    learning_rate: peak, of matrices (Muon) and of all else (AdamW).
    adam_scale: factor of the rate for what AdamW trains.
    schedule: 'wsd' (constant, then linear down) or 'cosine'.
    warmup: steps of linear warm-up.
    decay: share of all steps that 'wsd' goes down over.
    final_scale: the schedule's last value, as a share of the peak.
    optimizer: 'muon' for matrices with AdamW for the rest, or 'adamw'.
    weight_decay: of matrices, embedding and head; decoupled.
    betas: of AdamW.
    momentum: of Muon.
    clip: largest global norm of the gradient.
    bias_rate: step of the router's correction bias.
    compute: 'bfloat16' or 'float32'; master weights are always float32.
    seed: of the weights and of the data's order.
    log_every: steps between lines of metrics; the loss of every step is kept.
    eval_every: steps between held-out losses; 0: at the end alone.
    eval_windows: windows of a held-out loss.
    save_every: steps between checkpoints.
    keep: checkpoints kept.
  """

  model: ModelConfig
  stages: tuple[Stage, ...]
  learning_rate: float = 2e-3
  adam_scale: float = 1.0
  schedule: str = 'wsd'
  warmup: int = 100
  decay: float = 0.3
  final_scale: float = 0.02
  optimizer: str = 'muon'
  weight_decay: float = 0.05
  betas: tuple[float, float] = (0.9, 0.95)
  momentum: float = 0.95
  clip: float = 1.0
  bias_rate: float = 1e-3
  compute: str = 'bfloat16'
  seed: int = 0
  log_every: int = 1
  eval_every: int = 0
  eval_windows: int = 16
  save_every: int = 200
  keep: int = 2

  def __post_init__(self):
    for name, known in (
      ('schedule', ('wsd', 'cosine')),
      ('optimizer', ('muon', 'adamw')),
      ('compute', ('bfloat16', 'float32')),
    ):
      if getattr(self, name) not in known:
        raise ValueError(f'{name}={getattr(self, name)!r} must be in {known}')
    if not self.stages:
      raise ValueError('stages is empty: a run needs at least one')
    for stage in self.stages:
      if 'mtp' in stage.train and not self.model.mtp.num_layers:
        raise ValueError(
          f'stage {stage.name} trains the drafter, which the model lacks: '
          'set mtp.num_layers=1'
        )
      if stage.window > self.model.max_position_embeddings:
        raise ValueError(
          f'window={stage.window} of stage {stage.name} exceeds '
          f'max_position_embeddings={self.model.max_position_embeddings}'
        )

  @property
  def steps(self) -> int:
    """Steps of all stages."""
    return sum(stage.steps for stage in self.stages)

  @property
  def trained(self) -> tuple[str, ...]:
    """Parts that some stage trains."""
    return tuple(p for p in PARTS if any(p in s.train for s in self.stages))

  def place(self, step: int) -> tuple[int, int]:
    """(stage, step within it) of a step."""
    for index, stage in enumerate(self.stages):
      if step < stage.steps:
        return index, step
      step -= stage.steps
    raise ValueError(f'there are only {self.steps} steps')


def override(config: TrainConfig, settings: Sequence[str]) -> TrainConfig:
  """A configuration with `name=value` settings applied.

  Args:
    config: the run.
    settings: of `TrainConfig`, else of every `Stage` or `DraftForm` (or of
      one stage: 'stage_name.batch=8').

  Raises:
    ValueError: an unknown name.
  """
  fields = lambda x: {f.name for f in dataclasses.fields(x)}
  for setting in settings:
    name, equals, text = setting.partition('=')
    if not equals:
      raise ValueError(f'{setting!r} must read name=value')
    try:
      value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      value = text
    only, _, field = name.rpartition('.')
    if not only and name in fields(TrainConfig):
      config = dataclasses.replace(config, **{name: value})
      continue
    names = [s.name for s in config.stages]
    known = fields(Stage) | fields(DraftForm)
    if field not in known or only and only not in names:
      raise ValueError(
        f'{name} is no setting of TrainConfig, Stage ({", ".join(names)}) or '
        'DraftForm'
      )
    stages = tuple(
      _set(s, field, value) if only in ('', s.name) else s
      for s in config.stages
    )
    config = dataclasses.replace(config, stages=stages)
  return config


def _set(stage: Stage, field: str, value) -> Stage:
  # A name that both have means the stage ('steps').
  if field in {f.name for f in dataclasses.fields(Stage)}:
    return dataclasses.replace(stage, **{field: value})
  if stage.draft is None:
    return stage
  draft = dataclasses.replace(stage.draft, **{field: value})
  return dataclasses.replace(stage, draft=draft)
