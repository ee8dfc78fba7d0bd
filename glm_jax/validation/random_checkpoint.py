"""Writes a small random checkpoint with PyTorch `transformers`.

The directory is in the published format and was written by an independent
library: the input of `make demo` and of the parity tests. Imports torch,
never jax.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import transformers

# Small enough for seconds on a CPU, and yet: the real sharing pattern, 32
# index heads, and an index_topk far below the prompts it is tried on.
SMALL: dict[str, Any] = dict(
  vocab_size=512,
  hidden_size=128,
  intermediate_size=256,
  moe_intermediate_size=64,
  num_hidden_layers=14,
  num_attention_heads=4,
  num_key_value_heads=4,
  n_routed_experts=8,
  num_experts_per_tok=2,
  n_shared_experts=1,
  q_lora_rank=64,
  kv_lora_rank=64,
  qk_nope_head_dim=24,
  qk_rope_head_dim=16,
  v_head_dim=32,
  index_n_heads=32,
  index_head_dim=32,
  index_topk=32,
  indexer_types=['full', 'full'] + ['full', 'shared', 'shared', 'shared'] * 3,
  first_k_dense_replace=3,
  initializer_range=0.1,
  max_position_embeddings=4096,
  rope_parameters={'rope_theta': 8e6, 'rope_type': 'default'},
  eos_token_id=[0, 1, 2],
  pad_token_id=0,
)


def write_random_checkpoint(
  directory: str | os.PathLike[str],
  seed: int,
  overrides: Mapping[str, Any] | None = None,
  *,
  dtype: torch.dtype = torch.float32,
) -> None:
  """Writes a checkpoint whose every parameter is random.

  `transformers` starts the router's correction bias and the index key
  norm's bias at 0 and norms at 1; here they are random too, so that code
  that ignores one of them cannot pass.

  Args:
    directory: where to write; made if missing.
    seed: of all weights.
    overrides: config keys that differ from `SMALL`.
    dtype: of the weights written.
  """
  config = transformers.GlmMoeDsaConfig(**{**SMALL, **(overrides or {})})
  torch.manual_seed(seed)
  model = transformers.GlmMoeDsaForCausalLM(config)
  with torch.no_grad():
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
      if name.endswith(('norm.weight', 'layernorm.weight')):
        value.copy_(1 + 0.2 * torch.randn_like(value))
      elif name.endswith(('k_norm.bias', 'e_score_correction_bias')):
        value.copy_(0.2 * torch.randn_like(value))
  model.to(dtype)
  for module in model.modules():
    bias = getattr(module, 'e_score_correction_bias', None)
    if bias is not None:
      module.e_score_correction_bias = bias.float()  # F32 in every checkpoint
  model.save_pretrained(directory)
