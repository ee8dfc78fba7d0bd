"""What the planner is asked."""

from __future__ import annotations

import dataclasses

from glm_jax.cache import cache_dtype
from glm_jax.config import ModelConfig
from glm_jax.model import weight_init
from pallas_kernels.tiling import PAGE
from sharding.mesh import MeshShape
from sharding.planner.topology import num_devices

STEPS = ('decode', 'verify', 'prefill', 'serve', 'train')
_SERVE_ROWS = 512  # prompt rows of a server's step, unless asked for
CACHE_PLANS = ('token_split', 'layer_split', 'replicated')


@dataclasses.dataclass(frozen=True)
class PlanRequest:
  """One step to be compiled for one slice.

  Attributes:
    config: the model.
    topology: the slice, as libtpu calls it.
    mesh: sizes of the mesh axes.
    context: cached tokens of a sequence; of 'train', tokens of a window.
    batch: sequences.
    step: one of `STEPS`; 'serve' is the server's: `batch` requests decode and
      `chunk` prompt rows run beside them.
    cache_plan: one of `CACHE_PLANS`.
    num_speculative_tokens: drafts of a 'verify' round or a 'serve' step.
    kv_cache_dtype: 'auto', 'bf16', 'f32' or 'fp8'.
    weight_dtype: 'auto', 'bf16', 'f32' or 'fp8'.
    chunk: rows of a 'prefill' step, all sequences together; None for 256 a
      device, the least for which rows are split. Of 'serve', 0 or more.
    implementation: of the ops; None for TPU kernels where there are some.
    slots: transient layer slots of a plan that moves rows ahead; None for
      the plan's own number.
  """

  config: ModelConfig
  topology: str
  mesh: MeshShape
  context: int = 1_048_576
  batch: int = 1
  step: str = 'decode'
  cache_plan: str = 'token_split'
  num_speculative_tokens: int = 0
  kv_cache_dtype: str = 'auto'
  weight_dtype: str = 'auto'
  chunk: int | None = None
  implementation: str | None = None
  slots: int | None = None

  def __post_init__(self):
    for name, known in (('step', STEPS), ('cache_plan', CACHE_PLANS)):
      value = getattr(self, name)
      if value not in known:
        raise ValueError(
          f'{name}={value!r} is unknown: use one of {", ".join(known)}'
        )
    if self.chunk is None:
      whole = self.batch * self.context
      rows = 256 * self.mesh.size if self.step != 'serve' else _SERVE_ROWS
      object.__setattr__(self, 'chunk', min(rows, whole))
    for name in ('context', 'batch', 'chunk'):
      least = 0 if (name, self.step) == ('chunk', 'serve') else 1
      if getattr(self, name) < least:
        raise ValueError(f'{name}={getattr(self, name)} must be positive')
    cache_dtype(self.config, self.kv_cache_dtype)
    weight_init(self.config, 'auto', self.weight_dtype)
    self._check_drafts()
    devices = num_devices(self.topology)
    if self.mesh.size != devices:
      raise ValueError(
        f'mesh {self.mesh} needs {self.mesh.size} devices, {self.topology} '
        f'has {devices}: use sizes whose product is {devices}'
      )

  def _check_drafts(self):
    drafts = self.num_speculative_tokens
    if self.step == 'verify' or (self.step == 'serve' and drafts):
      if not self.config.mtp.num_layers:
        raise ValueError(
          f'step={self.step!r} with drafts needs a drafter: the config has '
          'num_nextn_predict_layers=0'
        )
      if not 1 <= drafts <= 8:
        raise ValueError(
          f'num_speculative_tokens={drafts} must be 1 to 8 for '
          f'step={self.step!r}'
        )
    elif drafts and self.step == 'decode':
      raise ValueError(
        f'num_speculative_tokens={drafts} belongs to step=verify; plain '
        'decode drafts nothing'
      )

  @property
  def rows(self) -> int:
    """Rows of one step, all sequences together."""
    return {
      'decode': self.batch,
      'verify': self.batch * (self.num_speculative_tokens + 1),
      'prefill': self.chunk,
      'serve': self.batch * (self.num_speculative_tokens + 1) + self.chunk,
      'train': self.batch * self.context,
    }[self.step]

  @property
  def pages(self) -> int:
    """Pages of a sequence, with room for drafted rows."""
    drafts = self.num_speculative_tokens
    room = drafts if self.step in ('verify', 'serve') else 0
    return -(-(self.context + room) // PAGE)
