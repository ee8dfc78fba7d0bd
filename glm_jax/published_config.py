"""From a published `config.json` to `ModelConfig`, and back.

An absent key takes its GLM-5.2 value (`num_nextn_predict_layers`: 0); a key
that is present and contradicts another key, or asks for something this code
does not implement, raises one `ValueError` that names the value and the
remedy. The pattern of indexers: spec/model.md section 1.2.
"""

from __future__ import annotations

from typing import Any

from glm_jax.config import (
  DENSE,
  FULL,
  SHARED,
  SPARSE,
  IndexerConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  MtpConfig,
)


def index_pattern(config: dict[str, Any]) -> tuple[str, ...]:
  """The indexer kind of every layer of a published config.

  `indexer_types` is the authority, then `index_topk_pattern`, then the
  freq/offset rule (spec/model.md section 1.2); sources that are present must
  agree.

  Args:
    config: a published `config.json` as a dict.

  Returns:
    'full' or 'shared' for each trunk layer.

  Raises:
    ValueError: unknown letters or words, a wrong length, or disagreement.
  """
  n = _get(config, 'num_hidden_layers', 78)
  found: dict[str, tuple[str, ...]] = {}
  if (types := config.get('indexer_types')) is not None:
    found['indexer_types'] = tuple(types)
  if (pattern := config.get('index_topk_pattern')) is not None:
    letters = {'F': FULL, 'S': SHARED}
    found['index_topk_pattern'] = tuple(letters.get(c, c) for c in pattern)
  freq = _get(config, 'index_topk_freq', 4)
  offset = _get(config, 'index_skip_topk_offset', 3)
  if freq < 1 or offset < 0:
    raise ValueError(
      f'index_topk_freq={freq} and index_skip_topk_offset={offset} must be '
      'at least 1 and 0: correct config.json'
    )
  rule = tuple(
    FULL if max(i - offset + 1, 0) % freq == 0 else SHARED for i in range(n)
  )
  # Half of a rule cannot contradict a list: the other half is our default.
  keys = ('index_topk_freq', 'index_skip_topk_offset')
  if None not in map(config.get, keys):
    found['+'.join(keys)] = rule
  for name, kinds in found.items():
    bad = sorted({str(k) for k in kinds} - {FULL, SHARED})
    if bad:
      raise ValueError(
        f"{name} holds {bad}: only 'full' and 'shared' (F and S) are known"
      )
    if len(kinds) != n:
      raise ValueError(
        f'{name} has {len(kinds)} entries but num_hidden_layers={n}: '
        'they must be equal'
      )
  if not found:
    return rule
  (first, kinds), *rest = found.items()
  for name, other in rest:
    if other != kinds:
      layer = next(i for i in range(n) if other[i] != kinds[i])
      raise ValueError(
        f'{first} and {name} disagree at layer {layer} '
        f'({kinds[layer]} against {other[layer]}): remove the wrong one'
      )
  return kinds


def config_from_published(config: dict[str, Any]) -> ModelConfig:
  """Builds a `ModelConfig` from a published `config.json`.

  Args:
    config: the parsed JSON object.

  Returns:
    The checked configuration.

  Raises:
    ValueError: contradictory or unsupported values.
  """
  _reject_unsupported(config)
  n = _get(config, 'num_hidden_layers', 78)
  rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
  theta = _get(rope, 'rope_theta', _get(config, 'rope_theta', 8e6))
  if _get(config, 'rope_theta', theta) != theta:
    raise ValueError(
      f'rope_theta={config["rope_theta"]} contradicts '
      f'rope_parameters.rope_theta={theta}: remove one'
    )
  eps = _get(config, 'rms_norm_eps', 1e-5)
  eos = config.get('eos_token_id', ModelConfig.eos_token_ids)
  eos = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
  return ModelConfig(
    vocab_size=_get(config, 'vocab_size', 154_880),
    hidden_size=_get(config, 'hidden_size', 6144),
    intermediate_size=_get(config, 'intermediate_size', 12_288),
    indexer_types=index_pattern(config),
    mlp_types=_mlp_types(config, n),
    mla=MlaConfig(
      num_heads=_get(config, 'num_attention_heads', 64),
      q_lora_rank=_get(config, 'q_lora_rank', 2048),
      kv_lora_rank=_get(config, 'kv_lora_rank', 512),
      qk_nope_head_dim=_get(config, 'qk_nope_head_dim', 192),
      qk_rope_head_dim=_get(config, 'qk_rope_head_dim', 64),
      v_head_dim=_get(config, 'v_head_dim', 256),
      latent_norm_eps=_get(config, 'latent_norm_eps', eps),
    ),
    indexer=IndexerConfig(
      num_heads=_get(config, 'index_n_heads', 32),
      head_dim=_get(config, 'index_head_dim', 128),
      topk=_get(config, 'index_topk', 2048),
    ),
    moe=MoeConfig(
      num_experts=_get(config, 'n_routed_experts', 256),
      experts_per_token=_get(config, 'num_experts_per_tok', 8),
      num_shared_experts=_get(config, 'n_shared_experts', 1),
      intermediate_size=_get(config, 'moe_intermediate_size', 2048),
      routed_scaling_factor=_get(config, 'routed_scaling_factor', 2.5),
      norm_topk_prob=_get(config, 'norm_topk_prob', True),
    ),
    mtp=MtpConfig(
      num_layers=_get(config, 'num_nextn_predict_layers', 0),
      share_index_and_kv=_get(config, 'index_share_for_mtp_iteration', True),
    ),
    rms_norm_eps=eps,
    rope_theta=float(theta),
    max_position_embeddings=_get(config, 'max_position_embeddings', 1_048_576),
    tie_word_embeddings=_get(config, 'tie_word_embeddings', False),
    initializer_range=_get(config, 'initializer_range', 0.02),
    eos_token_ids=tuple(e for e in eos if e is not None),
    pad_token_id=config.get('pad_token_id', 154_820),
    dtype=config.get('dtype') or config.get('torch_dtype') or 'bfloat16',
    weight_block_size=_block_size(config.get('quantization_config')),
  )


def config_to_published(config: ModelConfig) -> dict[str, Any]:
  """The published `config.json` of a configuration (the inverse)."""
  c = config
  out: dict[str, Any] = {
    'architectures': ['GlmMoeDsaForCausalLM'],
    'model_type': 'glm_moe_dsa',
    'attention_bias': False,
    'dtype': c.dtype,
    'eos_token_id': list(c.eos_token_ids),
    'first_k_dense_replace': _leading_dense(c.mlp_types),
    'hidden_act': 'silu',
    'hidden_size': c.hidden_size,
    'index_head_dim': c.indexer.head_dim,
    'index_n_heads': c.indexer.num_heads,
    'index_share_for_mtp_iteration': c.mtp.share_index_and_kv,
    'index_topk': c.indexer.topk,
    'indexer_rope_interleave': True,
    'indexer_types': list(c.indexer_types),
    'initializer_range': c.initializer_range,
    'intermediate_size': c.intermediate_size,
    'kv_lora_rank': c.mla.kv_lora_rank,
    'max_position_embeddings': c.max_position_embeddings,
    'mlp_layer_types': list(c.mlp_types),
    'moe_intermediate_size': c.moe.intermediate_size,
    'n_group': 1,
    'n_routed_experts': c.moe.num_experts,
    'n_shared_experts': c.moe.num_shared_experts,
    'norm_topk_prob': c.moe.norm_topk_prob,
    'num_attention_heads': c.mla.num_heads,
    'num_experts_per_tok': c.moe.experts_per_token,
    'num_hidden_layers': c.num_layers,
    'num_key_value_heads': c.mla.num_heads,
    'num_nextn_predict_layers': c.mtp.num_layers,
    'pad_token_id': c.pad_token_id,
    'q_lora_rank': c.mla.q_lora_rank,
    'qk_nope_head_dim': c.mla.qk_nope_head_dim,
    'qk_rope_head_dim': c.mla.qk_rope_head_dim,
    'rms_norm_eps': c.rms_norm_eps,
    'rope_interleave': True,
    'rope_parameters': {'rope_theta': c.rope_theta, 'rope_type': 'default'},
    'routed_scaling_factor': c.moe.routed_scaling_factor,
    'scoring_func': 'sigmoid',
    'tie_word_embeddings': c.tie_word_embeddings,
    'topk_group': 1,
    'topk_method': 'noaux_tc',
    'v_head_dim': c.mla.v_head_dim,
    'vocab_size': c.vocab_size,
  }
  if c.mla.latent_norm_eps != c.rms_norm_eps:
    out['latent_norm_eps'] = c.mla.latent_norm_eps
  if c.weight_block_size is not None:
    out['quantization_config'] = {
      'activation_scheme': 'dynamic',
      'fmt': 'e4m3',
      'quant_method': 'fp8',
      'weight_block_size': list(c.weight_block_size),
    }
  return out


_ONLY = {  # key -> the values this code implements
  'model_type': ('glm_moe_dsa',),
  'topk_method': ('noaux_tc',),
  'scoring_func': ('sigmoid',),
  'n_group': (1,),
  'topk_group': (1,),
  'moe_layer_freq': (1,),
  'hidden_act': ('silu',),
  'attention_bias': (False,),
  'mlp_bias': (False,),
  'rope_interleave': (True,),
  'indexer_rope_interleave': (True,),
  'attention_dropout': (0,),
  'moe_router_dtype': ('float32', 'fp32'),
  'dtype': ('bfloat16', 'float32'),
  'torch_dtype': ('bfloat16', 'float32'),
  'num_nextn_predict_layers': (0, 1),  # one MTP layer drafts several steps
  'partial_rotary_factor': (1,),  # the rotary width is qk_rope_head_dim
}


def _get(config: dict[str, Any], key: str, default):
  value = config.get(key)
  return default if value is None else value


def _reject_unsupported(config: dict[str, Any]) -> None:
  for key, allowed in _ONLY.items():
    value = config.get(key)
    if value is not None and value not in allowed:
      raise ValueError(
        f'{key}={value!r} is not supported: this code implements '
        f'{", ".join(map(repr, allowed))} only'
      )
  rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
  kind = _get(rope, 'rope_type', _get(rope, 'type', 'default'))
  if kind != 'default':
    raise ValueError(
      f'rope_type={kind!r} is not supported: GLM-5 models rotate unscaled '
      "(rope_type='default')"
    )
  nope = _get(config, 'qk_nope_head_dim', 192)
  rope_dim = _get(config, 'qk_rope_head_dim', 64)
  if _get(config, 'qk_head_dim', nope + rope_dim) != nope + rope_dim:
    raise ValueError(
      f'qk_head_dim={config["qk_head_dim"]} contradicts qk_nope_head_dim + '
      f'qk_rope_head_dim = {nope} + {rope_dim}: correct one of them'
    )
  layers = set(config.get('layer_types') or ()) - {'indexed_attention'}
  if layers:
    raise ValueError(
      f'layer_types holds {sorted(layers)}: every layer must be '
      "'indexed_attention'"
    )


def _mlp_types(config: dict[str, Any], n: int) -> tuple[str, ...]:
  dense = min(_get(config, 'first_k_dense_replace', 3), n)
  types = config.get('mlp_layer_types')
  if types is None:
    return (DENSE,) * dense + (SPARSE,) * (n - dense)
  types = tuple(types)
  bad = sorted({str(t) for t in types} - {DENSE, SPARSE})
  if bad:
    raise ValueError(
      f"mlp_layer_types holds {bad}: only 'dense' and 'sparse' are known"
    )
  if len(types) != n:
    raise ValueError(
      f'mlp_layer_types has {len(types)} entries but num_hidden_layers={n}: '
      'they must be equal'
    )
  given = config.get('first_k_dense_replace')
  if given is not None and _leading_dense(types) != min(given, n):
    raise ValueError(
      f'first_k_dense_replace={given} contradicts mlp_layer_types, which '
      f'starts with {_leading_dense(types)} dense layers: correct one'
    )
  return types


def _leading_dense(types: tuple[str, ...]) -> int:
  return next((i for i, t in enumerate(types) if t != DENSE), len(types))


def _block_size(quant: dict[str, Any] | None) -> tuple[int, int] | None:
  if quant is None:
    return None
  method, fmt = quant.get('quant_method'), quant.get('fmt', 'e4m3')
  block = tuple(quant.get('weight_block_size') or ())
  if method != 'fp8' or fmt != 'e4m3' or len(block) != 2 or min(block) < 1:
    raise ValueError(
      f'quantization_config with quant_method={method!r}, fmt={fmt!r}, '
      f'weight_block_size={list(block)} is not supported: only block-scaled '
      'fp8 (e4m3, two block sizes)'
    )
  return block  # type: ignore[return-value]
