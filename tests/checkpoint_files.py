"""Small published checkpoints, written with the safetensors library.

Names and shapes are spelled out here from spec/model.md section 1.3, apart
from the code under test.
"""

from __future__ import annotations

import json
import math
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from glm_jax.checkpoints.names import model_leaves

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)

# Weights that the published FP8 checkpoint quantises (section 1.5).
FP8_SUFFIXES = tuple(
  f'{name}.weight'
  for name in (
    'q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj wq_b wk '
    'gate_proj up_proj down_proj'
  ).split()
)


def t1(pattern: str = 'FFFSSSFS', **keys) -> dict:
  """The config.json of T1 (spec/known_faults.md), or of another pattern."""
  kinds = {'F': 'full', 'S': 'shared'}
  return {
    'model_type': 'glm_moe_dsa',
    'dtype': 'bfloat16',
    'vocab_size': 97,
    'hidden_size': 64,
    'intermediate_size': 48,
    'moe_intermediate_size': 24,
    'num_hidden_layers': len(pattern),
    'num_attention_heads': 4,
    'q_lora_rank': 32,
    'kv_lora_rank': 16,
    'qk_nope_head_dim': 24,
    'qk_rope_head_dim': 8,
    'v_head_dim': 32,
    'index_n_heads': 32,
    'index_head_dim': 16,
    'index_topk': 8,
    'indexer_types': [kinds[c] for c in pattern],
    'n_routed_experts': 4,
    'num_experts_per_tok': 2,
    'first_k_dense_replace': 3,
    'eos_token_id': 1,
    'pad_token_id': 0,
    'max_position_embeddings': 4096,
    **keys,
  }


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
  """Every tensor of a config: names as published, shapes [out, in]."""
  c = config
  D, V, n = c['hidden_size'], c['vocab_size'], c['num_hidden_layers']
  out = {'model.embed_tokens.weight': (V, D), 'model.norm.weight': (D,)}
  if not c.get('tie_word_embeddings'):
    out['lm_head.weight'] = (V, D)
  for i in range(n + c.get('num_nextn_predict_layers', 0)):
    full = i == n or c['indexer_types'][i] == 'full'
    dense = i < c['first_k_dense_replace']
    layer = {**_attention(c), **(_indexer(c) if full else {})}
    layer |= _dense(c) if dense else _sparse(c)
    if i == n:
      layer |= {
        'enorm.weight': (D,),
        'hnorm.weight': (D,),
        'eh_proj.weight': (D, 2 * D),
        'shared_head.norm.weight': (D,),
      }
    out |= {f'model.layers.{i}.{name}': s for name, s in layer.items()}
  return out


def _attention(c):
  D, Q, R = c['hidden_size'], c['q_lora_rank'], c['kv_lora_rank']
  N, nope = c['num_attention_heads'], c['qk_nope_head_dim']
  P, v = c['qk_rope_head_dim'], c['v_head_dim']
  return {
    'input_layernorm.weight': (D,),
    'post_attention_layernorm.weight': (D,),
    'self_attn.q_a_proj.weight': (Q, D),
    'self_attn.q_a_layernorm.weight': (Q,),
    'self_attn.q_b_proj.weight': (N * (nope + P), Q),
    'self_attn.kv_a_proj_with_mqa.weight': (R + P, D),
    'self_attn.kv_a_layernorm.weight': (R,),
    'self_attn.kv_b_proj.weight': (N * (nope + v), R),
    'self_attn.o_proj.weight': (D, N * v),
  }


def _indexer(c):
  heads, H = c['index_n_heads'], c['index_head_dim']
  part = 'self_attn.indexer.'
  return {
    f'{part}wq_b.weight': (heads * H, c['q_lora_rank']),
    f'{part}wk.weight': (H, c['hidden_size']),
    f'{part}weights_proj.weight': (heads, c['hidden_size']),
    f'{part}k_norm.weight': (H,),
    f'{part}k_norm.bias': (H,),
  }


def _mlp(prefix, D, F):
  return {
    f'{prefix}.gate_proj.weight': (F, D),
    f'{prefix}.up_proj.weight': (F, D),
    f'{prefix}.down_proj.weight': (D, F),
  }


def _dense(c):
  return _mlp('mlp', c['hidden_size'], c['intermediate_size'])


def _sparse(c):
  D, F, E = c['hidden_size'], c['moe_intermediate_size'], c['n_routed_experts']
  out = _mlp('mlp.shared_experts', D, F)
  for e in range(E):
    out |= _mlp(f'mlp.experts.{e}', D, F)
  out['mlp.gate.weight'] = (E, D)
  out['mlp.gate.e_score_correction_bias'] = (E,)
  return out


def tensors(config: dict, dtype=BF16, seed: int = 0) -> dict[str, np.ndarray]:
  """Random tensors of a config; the correction bias is float32."""
  rng = np.random.default_rng(seed)
  return {
    name: rng.standard_normal(shape, np.float32).astype(
      F32 if name.endswith('correction_bias') else dtype
    )
    for name, shape in shapes(config).items()
  }


def quantize(x: np.ndarray, block) -> tuple[np.ndarray, np.ndarray]:
  """Block-scaled e4m3 in NumPy: values [F, D] and scales [f, d]."""
  x = x.astype(np.float32)
  scales = np.ones([math.ceil(n / b) for n, b in zip(x.shape, block)], F32)
  for i, j in np.ndindex(scales.shape):
    part = x[i * block[0] :, j * block[1] :][: block[0], : block[1]]
    amax = np.abs(part).max()
    # XLA divides by a constant as it multiplies by the reciprocal.
    scales[i, j] = amax * (F32.type(1) / F32.type(448)) if amax > 0 else 1
  return np.clip(x / spread(scales, x.shape, block), -448, 448).astype(
    FP8
  ), scales


def spread(scales: np.ndarray, shape, block) -> np.ndarray:
  """One scale an element."""
  full = scales.repeat(block[0], 0).repeat(block[1], 1)
  return full[: shape[0], : shape[1]]


def quantized(values: dict[str, np.ndarray], block) -> dict[str, np.ndarray]:
  """The tensors of an FP8 checkpoint."""
  out = {}
  for name, value in values.items():
    if name.endswith(FP8_SUFFIXES) and 'eh_proj' not in name:
      out[name], out[f'{name}_scale_inv'] = quantize(value, block)
    else:
      out[name] = value
  return out


def fuse_experts(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Experts in two tensors a layer, as newer transformers can save them."""
  out, parts = {}, {}
  for name, value in values.items():
    if '.mlp.experts.' in name:
      prefix, rest = name.split('.mlp.experts.')
      parts.setdefault(f'{prefix}.mlp.experts', {})[rest] = value
    else:
      out[name] = value
  for prefix, p in parts.items():
    for suffix in ('.weight', '.weight_scale_inv'):
      end = suffix.removeprefix('.weight')
      get = lambda kind, p=p, s=suffix: [
        p[name] for e in range(len(p)) if (name := f'{e}.{kind}_proj{s}') in p
      ]
      if get('down'):
        both = np.concatenate([get('gate'), get('up')], axis=1)
        out[f'{prefix}.gate_up_proj{end}'] = both
        out[f'{prefix}.down_proj{end}'] = np.stack(get('down'))
  return out


def write(
  directory,
  config: dict,
  values: dict[str, np.ndarray],
  *,
  shards: int = 1,
  index: bool = True,
) -> pathlib.Path:
  """Writes a checkpoint in `shards` files, with an index or without."""
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  (directory / 'config.json').write_text(json.dumps(config))
  names, weight_map = list(values), {}
  for i in range(shards):
    file = f'model-{i + 1:05d}-of-{shards:05d}.safetensors'
    mine = {n: np.ascontiguousarray(values[n]) for n in names[i::shards]}
    safetensors.numpy.save_file(mine, directory / file)
    weight_map |= dict.fromkeys(mine, file)
  if index:
    text = json.dumps({'metadata': {}, 'weight_map': weight_map})
    (directory / 'model.safetensors.index.json').write_text(text)
  return directory


def raises(message: str, kind: type[Exception] = ValueError):
  """A context in which `kind` must be raised with this message (a regex)."""
  return pytest.raises(kind, match=message)


def named(model) -> dict[str, np.ndarray]:
  """A model's tensors under their published names."""
  return tensors_of(model, model_leaves(model, model.config))


def tensors_of(model, leaves) -> dict[str, np.ndarray]:
  """The tensors of modules whose parameters are `leaves`."""
  out = {}
  for leaf, array in zip(leaves, jax.tree.leaves(model), strict=True):
    array = np.asarray(array)
    assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype), leaf.path
    for place in np.ndindex(leaf.names.shape):
      out[leaf.names[place]] = array[place]
  return out


def assert_same(actual: dict, expected: dict) -> None:
  """Raises unless names, shapes, dtypes and every bit are the same."""
  assert sorted(actual) == sorted(expected)
  for name, value in expected.items():
    got = actual[name]
    assert (got.shape, got.dtype) == (value.shape, value.dtype), name
    assert got.tobytes() == value.tobytes(), name
