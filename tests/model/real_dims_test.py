"""One decoder layer of each kind at GLM-5.2's own widths.

A two-layer checkpoint (full, shared) with 8 experts instead of 256, on 2,560
tokens, so that 2,048 keys are really chosen. PyTorch runs in a process of its
own and leaves a record, so that its memory is free again. The same at an
eighth of the widths, in seconds, runs with every commit.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from glm_jax.validation import compare, validate

ROOT = pathlib.Path(__file__).resolve().parents[2]

GLM_5_2 = dict(
  hidden_size=6144,
  num_attention_heads=64,
  q_lora_rank=2048,
  kv_lora_rank=512,
  qk_nope_head_dim=192,
  qk_rope_head_dim=64,
  v_head_dim=256,
  index_n_heads=32,
  index_head_dim=128,
  index_topk=2048,
  moe_intermediate_size=2048,
)
EIGHTH = GLM_5_2 | dict(
  hidden_size=768,
  num_attention_heads=8,
  q_lora_rank=256,
  kv_lora_rank=64,
  index_topk=256,
  moe_intermediate_size=256,
)
_EXPERTS = 8


def write_checkpoint(path: pathlib.Path, widths: dict) -> None:
  """Random bf16 weights of two MoE layers: full, then shared."""
  config = dict(
    widths,
    model_type='glm_moe_dsa',
    architectures=['GlmMoeDsaForCausalLM'],
    dtype='bfloat16',
    vocab_size=256,
    num_hidden_layers=2,
    num_key_value_heads=widths['num_attention_heads'],
    first_k_dense_replace=0,
    mlp_layer_types=['sparse', 'sparse'],
    indexer_types=['full', 'shared'],
    n_routed_experts=_EXPERTS,
    num_experts_per_tok=2,
    rms_norm_eps=1e-5,
    rope_parameters={'rope_theta': 8e6, 'rope_type': 'default'},
    max_position_embeddings=1_048_576,
  )
  path.mkdir(parents=True)
  (path / 'config.json').write_text(json.dumps(config))
  torch.manual_seed(0)
  D, V = config['hidden_size'], config['vocab_size']
  draw = lambda *shape: (torch.randn(shape) * shape[-1] ** -0.5).bfloat16()
  norm = lambda width: (1 + 0.2 * torch.randn(width)).bfloat16()
  tensors = {
    'model.embed_tokens.weight': draw(V, D) * 4,
    'model.norm.weight': norm(D),
    'lm_head.weight': draw(V, D),
  }
  for layer in range(2):
    for name, tensor in layer_tensors(config, layer == 0, draw, norm):
      tensors[f'model.layers.{layer}.{name}'] = tensor
  file = path / 'model.safetensors'
  safetensors.torch.save_file(tensors, file, metadata={'format': 'pt'})


def layer_tensors(c: dict, full: bool, draw, norm):
  """Published names and tensors of one layer."""
  D, N, Q = c['hidden_size'], c['num_attention_heads'], c['q_lora_rank']
  R, P, nope = c['kv_lora_rank'], c['qk_rope_head_dim'], c['qk_nope_head_dim']
  v, F = c['v_head_dim'], c['moe_intermediate_size']
  yield 'input_layernorm.weight', norm(D)
  yield 'post_attention_layernorm.weight', norm(D)
  yield 'self_attn.q_a_proj.weight', draw(Q, D)
  yield 'self_attn.q_a_layernorm.weight', norm(Q)
  yield 'self_attn.q_b_proj.weight', draw(N * (nope + P), Q)
  yield 'self_attn.kv_a_proj_with_mqa.weight', draw(R + P, D)
  yield 'self_attn.kv_a_layernorm.weight', norm(R)
  yield 'self_attn.kv_b_proj.weight', draw(N * (nope + v), R)
  yield 'self_attn.o_proj.weight', draw(D, N * v)
  if full:
    width = c['index_head_dim']
    yield 'self_attn.indexer.wq_b.weight', draw(c['index_n_heads'] * width, Q)
    yield 'self_attn.indexer.wk.weight', draw(width, D)
    yield 'self_attn.indexer.weights_proj.weight', draw(c['index_n_heads'], D)
    yield 'self_attn.indexer.k_norm.weight', norm(width)
    yield 'self_attn.indexer.k_norm.bias', norm(width) - 1
  yield 'mlp.gate.weight', draw(_EXPERTS, D)
  yield 'mlp.gate.e_score_correction_bias', 0.1 * torch.randn(_EXPERTS)
  mlps = [f'mlp.experts.{e}' for e in range(_EXPERTS)]
  for mlp in [*mlps, 'mlp.shared_experts']:
    yield f'{mlp}.gate_proj.weight', draw(F, D)
    yield f'{mlp}.up_proj.weight', draw(F, D)
    yield f'{mlp}.down_proj.weight', draw(D, F)


def record_with_torch(path, tokens: int, dtype: str, record) -> None:
  ids = path / 'tokens.json'
  generator = torch.Generator().manual_seed(1)
  ids.write_text(
    json.dumps(torch.randint(256, (tokens,), generator=generator).tolist())
  )
  command = [
    sys.executable,
    str(ROOT / 'launch' / 'validate.py'),
    f'--model={path}',
    f'--tokens={ids}',
    f'--dtype={dtype}',
    '--framework=torch',
    f'--record={record}',
  ]
  environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
  done = subprocess.run(
    command, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr


@functools.cache
def tolerance(dtype: str) -> compare.Tolerance:
  return compare.tolerance_of(dtype)


def check(path, tokens: int, dtype: str) -> None:
  record = path / f'record-{dtype}'
  record_with_torch(path, tokens, dtype, record)
  result = validate(path, against=record, dtype=dtype)
  print(result.table())
  assert result.passed, result.table()
  assert result.selected_set_agreement == 1
  # Keys are really chosen, and both kinds of layer are here.
  assert (
    tokens > 1.2 * json.loads((path / 'config.json').read_text())['index_topk']
  )
  assert [r.selected_agreement is None for r in result.layers] == [False, True]
  allowed = 1e-3 if dtype == 'float32' else tolerance(dtype).layer
  for layer in result.layers:
    assert max(layer.errors.values()) <= allowed


@pytest.fixture(scope='module')
def eighth(tmp_path_factory):
  path = tmp_path_factory.mktemp('eighth') / 'checkpoint'
  write_checkpoint(path, EIGHTH)
  return path


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  path = tmp_path_factory.mktemp('whole') / 'checkpoint'
  write_checkpoint(path, GLM_5_2)
  return path


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_layers_at_an_eighth_of_the_widths(eighth, dtype):
  check(eighth, 320, dtype)


@pytest.mark.long
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_layers_at_real_widths(whole, dtype):
  check(whole, 2560, dtype)
