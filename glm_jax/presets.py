"""Configurations known by name.

`configs/` has the same numbers one by one, with their sources. GLM-5.3 has
GLM-5.2's class and sizes (spec/peers_jax.md). GLM-5 and 5.1 have an indexer in
every layer, a smaller rotary base and a shorter window (spec/model.md 1.1).
"""

from __future__ import annotations

import dataclasses

from glm_jax.config import (
  DENSE,
  FULL,
  SPARSE,
  IndexerConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  MtpConfig,
)
from glm_jax.published_config import index_pattern

_GLM52 = ModelConfig(
  indexer_types=index_pattern({}),
  mlp_types=(DENSE,) * 3 + (SPARSE,) * 75,
  mtp=MtpConfig(num_layers=1),
)
_GLM5 = dataclasses.replace(
  _GLM52,
  indexer_types=(FULL,) * 78,
  rope_theta=1e6,
  max_position_embeddings=202_752,
)
# GLM-5.2's sharing pattern and 32 index heads, seconds on a CPU.
_TINY = ModelConfig(
  vocab_size=512,
  hidden_size=128,
  intermediate_size=256,
  indexer_types=index_pattern({'num_hidden_layers': 14}),
  mlp_types=(DENSE,) * 3 + (SPARSE,) * 11,
  mla=MlaConfig(
    num_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=32,
  ),
  indexer=IndexerConfig(num_heads=32, head_dim=32, topk=64),
  moe=MoeConfig(num_experts=8, experts_per_token=2, intermediate_size=64),
  mtp=MtpConfig(num_layers=1),
  initializer_range=0.1,
  eos_token_ids=(0, 1, 2),
  pad_token_id=0,
  dtype='float32',
)

PRESETS: dict[str, ModelConfig] = {
  'glm5': _GLM5,
  'glm51': _GLM5,
  'glm52': _GLM52,
  'glm53': _GLM52,
  'tiny': _TINY,
}
