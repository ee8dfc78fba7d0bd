"""The model's numbers, frozen and split by concern.

`published_config.py` reads them from a published `config.json`. Sources:
spec/model.md sections 1.1 (values) and 1.4 (`head_dim` is never read).
"""

from __future__ import annotations

import dataclasses

FULL = 'full'
SHARED = 'shared'
DENSE = 'dense'
SPARSE = 'sparse'


@dataclasses.dataclass(frozen=True)
class MlaConfig:
  """Multi-head latent attention (spec/model.md section 2.6)."""

  num_heads: int = 64
  q_lora_rank: int = 2048
  kv_lora_rank: int = 512  # R: width of the cached latent
  qk_nope_head_dim: int = 192
  qk_rope_head_dim: int = 64  # P: width of the cached rotary key
  v_head_dim: int = 256
  # Trainer and engines use rms_norm_eps; transformers leaves 1e-6 here.
  latent_norm_eps: float = 1e-5

  @property
  def row_dim(self) -> int:
    """Features of one cached row: latent, then rotary key."""
    return self.kv_lora_rank + self.qk_rope_head_dim

  @property
  def scale(self) -> float:
    """Softmax scale: from the head's own width, never the latent's."""
    return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
  """Lightning indexer of the full layers (spec/model.md section 2.1)."""

  num_heads: int = 32
  head_dim: int = 128
  topk: int = 2048
  # Fixed by every trainer and engine; not a key of config.json.
  key_norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """Routed and shared experts (spec/model.md section 1.1)."""

  num_experts: int = 256
  experts_per_token: int = 8
  num_shared_experts: int = 1
  intermediate_size: int = 2048
  routed_scaling_factor: float = 2.5
  norm_topk_prob: bool = True


@dataclasses.dataclass(frozen=True)
class MtpConfig:
  """The drafter: checkpoint layer N (spec/model.md section 4)."""

  num_layers: int = 0
  share_index_and_kv: bool = True
  # Set by the loader where a checkpoint has shared_head.head; else tied.
  own_head: bool = False


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Everything that shapes the model.

  Attributes:
    indexer_types: one of 'full' or 'shared' a trunk layer.
    mlp_types: one of 'dense' or 'sparse' a trunk layer.
    dtype: the checkpoint's own dtype, 'bfloat16' or 'float32'.
    weight_block_size: block of an FP8 checkpoint, None for bf16 and f32.
  """

  vocab_size: int = 154_880
  hidden_size: int = 6144
  intermediate_size: int = 12_288
  indexer_types: tuple[str, ...] = ()
  mlp_types: tuple[str, ...] = ()
  mla: MlaConfig = MlaConfig()
  indexer: IndexerConfig = IndexerConfig()
  moe: MoeConfig = MoeConfig()
  mtp: MtpConfig = MtpConfig()
  rms_norm_eps: float = 1e-5
  rope_theta: float = 8e6
  max_position_embeddings: int = 1_048_576
  tie_word_embeddings: bool = False
  initializer_range: float = 0.02
  eos_token_ids: tuple[int, ...] = (154_820, 154_827, 154_829)
  pad_token_id: int | None = 154_820
  dtype: str = 'bfloat16'
  weight_block_size: tuple[int, int] | None = None

  @property
  def num_layers(self) -> int:
    """Trunk layers; the drafter is layer `num_layers` of the checkpoint."""
    return len(self.indexer_types)

  def __post_init__(self):
    _check(self)


def _check(c: ModelConfig) -> None:
  """Rejects numbers that no model can have."""
  if not c.indexer_types:
    raise ValueError('indexer_types is empty: a model needs layers')
  if c.indexer_types[0] != FULL:
    raise ValueError(
      f'indexer_types[0]={c.indexer_types[0]!r}: the first layer must be '
      "'full', it has no layer below to take indices from"
    )
  if len(c.mlp_types) != len(c.indexer_types):
    raise ValueError(
      f'{len(c.mlp_types)} mlp_types for {len(c.indexer_types)} '
      'indexer_types: they must be equal in number'
    )
  for kinds, known in (
    (c.indexer_types, (FULL, SHARED)),
    (c.mlp_types, (DENSE, SPARSE)),
  ):
    unknown = sorted({str(k) for k in kinds} - set(known))
    if unknown:
      raise ValueError(f'layer types {unknown} are unknown: use {known}')
  groups = (('', c), ('mla.', c.mla), ('indexer.', c.indexer), ('moe.', c.moe))
  for prefix, part in groups:
    for field in dataclasses.fields(part):
      name, value = field.name, getattr(part, field.name)
      if name == 'pad_token_id' or name == 'num_shared_experts' and value == 0:
        continue
      if isinstance(value, int | float) and not isinstance(value, bool):
        if not value > 0:
          raise ValueError(f'{prefix}{name}={value} must be positive')
  for name, width in (
    ('qk_rope_head_dim', c.mla.qk_rope_head_dim),
    ('index_head_dim', c.indexer.head_dim),
  ):
    if width % 2:
      raise ValueError(f'{name}={width} must be even: RoPE rotates pairs')
  if c.indexer.head_dim < c.mla.qk_rope_head_dim:
    raise ValueError(
      f'index_head_dim={c.indexer.head_dim} is less than qk_rope_head_dim='
      f'{c.mla.qk_rope_head_dim}: the indexer rotates its first dims'
    )
  if c.moe.experts_per_token > c.moe.num_experts:
    raise ValueError(
      f'num_experts_per_tok={c.moe.experts_per_token} exceeds '
      f'n_routed_experts={c.moe.num_experts}'
    )
