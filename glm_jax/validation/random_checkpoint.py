"""Writes a small random checkpoint with PyTorch `transformers`.

The directory is in the published format and was written by an independent
library: the input of the parity tests. Imports torch, never jax. As a program
it writes layers of GLM-5.2's real dimensions (`real_slice`; 8 GB, and twice
that in memory):

  python -m glm_jax.validation.random_checkpoint DIR
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
import transformers
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from glm_jax.presets import PRESETS
from glm_jax.published_config import config_to_published

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


def real_slice() -> dict[str, Any]:
  """Config keys of GLM-5.2's layers 6 to 9 (full, shared x 3), drafter apart.

  Every dimension is the published one; experts are 16 instead of 256, tokens
  8,192 instead of 154,880.
  """
  config, layers = PRESETS['glm52'], slice(6, 10)
  small = dataclasses.replace(
    config,
    indexer_types=config.indexer_types[layers],
    mlp_types=config.mlp_types[layers],
    moe=dataclasses.replace(config.moe, num_experts=16),
    vocab_size=8192,
    eos_token_ids=(0, 1, 2),
    pad_token_id=0,
  )
  return config_to_published(small)


def write_random_checkpoint(
  directory: str | os.PathLike[str],
  seed: int,
  overrides: Mapping[str, Any] | None = None,
  *,
  mtp: bool = False,
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
    mtp: add layer N, the drafter, which transformers itself leaves out.
    dtype: of the weights written; the correction bias stays float32.
  """
  config = transformers.GlmMoeDsaConfig(**{**SMALL, **(overrides or {})})
  torch.manual_seed(seed)
  model = transformers.GlmMoeDsaForCausalLM(config)
  _randomise(model, config.initializer_range)
  _to(model, dtype)
  model.save_pretrained(directory)
  if mtp:
    _add_drafter(directory, config, dtype)


def _randomise(module: torch.nn.Module, std: float) -> None:
  with torch.no_grad():
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
      if name.endswith(('norm.weight', 'layernorm.weight')):
        value.copy_(1 + 0.2 * torch.randn_like(value))
      elif name.endswith(('k_norm.bias', 'e_score_correction_bias')):
        value.copy_(0.2 * torch.randn_like(value))
      elif name.endswith('embed_tokens.weight'):
        # torch leaves the pad row at 0, where all index scores would tie.
        value.normal_(0, std)


def _to(module: torch.nn.Module, dtype: torch.dtype) -> None:
  module.to(dtype)
  for part in module.modules():
    bias = getattr(part, 'e_score_correction_bias', None)
    if bias is not None:
      part.e_score_correction_bias = bias.float()  # F32 in every checkpoint


def _add_drafter(directory, config, dtype) -> None:
  """Adds layer N's tensors to the one file that transformers wrote."""
  n, D = config.num_hidden_layers, config.hidden_size
  grown = copy.deepcopy(config)
  grown.indexer_types = [*config.indexer_types, 'full']
  grown.mlp_layer_types = [*config.mlp_layer_types, 'sparse']
  layer = modeling_glm_moe_dsa.GlmMoeDsaDecoderLayer(grown, n)
  with torch.no_grad():
    for value in layer.parameters():
      value.normal_(0, config.initializer_range)
  _randomise(layer, config.initializer_range)
  _to(layer, dtype)
  state = layer.state_dict()
  for e, weight in enumerate(state.pop('mlp.experts.gate_up_proj')):
    gate, up = weight.chunk(2)
    state[f'mlp.experts.{e}.gate_proj.weight'] = gate.contiguous()
    state[f'mlp.experts.{e}.up_proj.weight'] = up.contiguous()
  for e, weight in enumerate(state.pop('mlp.experts.down_proj')):
    state[f'mlp.experts.{e}.down_proj.weight'] = weight.contiguous()
  # Post-norm and pre-norm hidden states must differ visibly (fault 33).
  for name in ('enorm', 'hnorm', 'shared_head.norm'):
    state[f'{name}.weight'] = (0.9 + 0.5 * torch.randn(D)).to(dtype)
  std = config.initializer_range
  state['eh_proj.weight'] = (std * torch.randn(D, 2 * D)).to(dtype)
  path = os.path.join(directory, 'model.safetensors')
  tensors = safetensors.torch.load_file(path)
  tensors |= {f'model.layers.{n}.{k}': v for k, v in state.items()}
  safetensors.torch.save_file(tensors, path, metadata={'format': 'pt'})
  path = os.path.join(directory, 'config.json')
  with open(path) as f:
    published = json.load(f)
  published['num_nextn_predict_layers'] = 1
  with open(path, 'w') as f:
    json.dump(published, f, indent=2)


if __name__ == '__main__':
  if len(sys.argv) != 2:
    sys.exit('usage: python -m glm_jax.validation.random_checkpoint DIR')
  write_random_checkpoint(
    sys.argv[1], 0, real_slice(), mtp=True, dtype=torch.bfloat16
  )
