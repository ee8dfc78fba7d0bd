"""transformers' GlmMoeDsa as the oracle of the model tests.

Small checkpoints with random weights, written by transformers and read back
by both sides. Everything that a trap needs to bite is random too: the
router's correction bias, all norm weights, the index key norm's bias.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import shutil
import tempfile

import numpy as np
import safetensors.torch
import torch
import transformers
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from glm_jax.validation.walk import contract_selection

GLM_5_2 = 'FFF' + 'SSSF' * 18 + 'SSS'

# known_faults.md's T1.
transformers.utils.logging.disable_progress_bar()

T1 = dict(
  vocab_size=97,
  hidden_size=64,
  intermediate_size=96,
  moe_intermediate_size=32,
  num_attention_heads=4,
  n_routed_experts=8,
  num_experts_per_tok=2,
  kv_lora_rank=16,
  q_lora_rank=32,
  qk_rope_head_dim=8,
  qk_nope_head_dim=24,
  v_head_dim=32,
  index_topk=8,
  index_head_dim=16,
  index_n_heads=32,
  initializer_range=0.2,
  layers='FFFSSSFS',
  theta=8e6,
)


@dataclasses.dataclass
class Oracle:
  """A checkpoint and transformers' model of it."""

  path: str
  model: GlmMoeDsaForCausalLM
  topk: int

  def __call__(self, ids) -> dict[str, np.ndarray]:
    """Runs [T] ids of one sequence.

    Returns:
      logits [T, V], selected [F, T, k] as our contract has it, hidden
      [L, T, D].
    """
    seen, hidden = [], []

    def watch(layer, args, out):
      hidden.append(out[0][0].numpy())
      if layer.self_attn.indexer is not None:
        seen.append(contract_selection(out[1][0].numpy(), self.topk))

    hooks = [m.register_forward_hook(watch) for m in self.model.model.layers]
    try:
      with torch.no_grad():
        out = self.model(torch.as_tensor(ids)[None], use_cache=False)
    finally:
      for hook in hooks:
        hook.remove()
    return {
      'logits': out.logits[0].numpy(),
      'selected': np.stack(seen),
      'hidden': np.stack(hidden),
    }


def settings(**changes) -> dict:
  """T1 with changes, as `checkpoint` takes them."""
  return {**T1, **changes}


def random_settings(seed: int) -> dict:
  """One of the twelve small configurations, by seed."""
  rng = np.random.default_rng(seed)
  pick = lambda *options: options[int(rng.integers(len(options)))]
  heads = int(pick(1, 2, 4, 6))
  experts = int(pick(4, 8, 16))
  layers = {
    0: 'FFFSSSFS',
    1: 'FFFFF',
    2: GLM_5_2,
    3: 'FSSSFSSS',
    4: 'FFS',
    5: 'F',
    6: 'FSFSFS',
    7: 'FFFSSSFSSS',
    8: 'FSSFFS',
    9: 'FFFSSSFSSSFSSS',
    10: 'FFFF',
    11: 'FFFSSSF',
  }[seed]
  tiny = layers == GLM_5_2
  return settings(
    layers=layers,
    hidden_size=32 if tiny else int(pick(48, 64, 80)),
    intermediate_size=int(pick(40, 96)),
    moe_intermediate_size=16 if tiny else int(pick(16, 32)),
    num_attention_heads=heads,
    n_routed_experts=experts,
    num_experts_per_tok=int(pick(1, 2, 3)),
    n_shared_experts=int(pick(1, 2)),
    norm_topk_prob=bool(pick(True, True, False)),
    routed_scaling_factor=float(pick(1.0, 2.5)),
    kv_lora_rank=int(pick(16, 24)),
    q_lora_rank=int(pick(24, 32)),
    qk_rope_head_dim=int(pick(4, 8)),
    qk_nope_head_dim=int(pick(8, 24)),
    v_head_dim=int(pick(16, 32)),
    index_topk=int(pick(8, 12, 16)),
    index_n_heads=40 if seed == 8 else 32,
    index_head_dim=int(pick(16, 24)),
    tie_word_embeddings=seed == 4,
    first_k_dense_replace=int(pick(0, 1, 3)) if not tiny else 3,
    initializer_range=0.2,
    theta=float(pick(8e6, 1e6, 1e4)),
  )


def checkpoint(seed: int = 0, **given) -> str:
  """Writes a checkpoint (once a session) and returns its directory."""
  return _checkpoint(seed, tuple(sorted(given.items())))


@functools.cache
def load(path: str, dtype=torch.float32) -> Oracle:
  """The oracle of a checkpoint, its latent norms at the config's epsilon."""
  model = GlmMoeDsaForCausalLM.from_pretrained(
    path,
    dtype=dtype,
    attn_implementation='eager',
    experts_implementation='eager',
  ).eval()
  for layer in model.model.layers:
    for norm in (
      layer.self_attn.q_a_layernorm,
      layer.self_attn.kv_a_layernorm,
    ):
      norm.variance_epsilon = model.config.rms_norm_eps
  return Oracle(path, model, model.config.index_topk)


@functools.cache
def _root() -> str:
  root = tempfile.mkdtemp(prefix='glm-jax-oracle-')
  atexit.register(shutil.rmtree, root, ignore_errors=True)
  return root


@functools.cache
def _checkpoint(seed: int, given: tuple) -> str:
  given = settings(**dict(given))
  letters, theta = given.pop('layers'), given.pop('theta')
  kinds = ['full' if c == 'F' else 'shared' for c in letters]
  config = GlmMoeDsaConfig(
    **given,
    num_hidden_layers=len(kinds),
    num_key_value_heads=given['num_attention_heads'],
    indexer_types=kinds,
    rope_parameters={'rope_theta': theta, 'rope_type': 'default'},
    eos_token_id=[1, 2],
    pad_token_id=1,
    dtype='float32',
  )
  torch.manual_seed(seed)
  model = GlmMoeDsaForCausalLM(config)
  randomise(model)
  path = os.path.join(_root(), str(len(os.listdir(_root()))))
  model.save_pretrained(path)
  return path


def randomise(model: torch.nn.Module) -> None:
  """Gives values to what transformers initialises to zeros and ones."""
  with torch.no_grad():
    for name, p in model.named_parameters():
      if 'norm' in name and name.endswith('weight'):
        p.copy_(1 + 0.2 * torch.randn_like(p))
      elif name.endswith('k_norm.bias'):
        p.copy_(0.5 * torch.randn_like(p))
      elif name.endswith('embed_tokens.weight'):
        # The padding id's row is zeros: all its index scores would be 0, and
        # which of equal keys torch takes is anyone's guess.
        p.normal_(std=float(p.std()))
    for name, p in model.named_buffers():
      if name.endswith('e_score_correction_bias'):
        p.copy_(0.2 * torch.randn_like(p))


def edited(path: str, out: str, edit) -> str:
  """Copies a checkpoint with `edit(name, tensor)` for every tensor."""
  shutil.copytree(path, out)
  file = os.path.join(out, 'model.safetensors')
  tensors = safetensors.torch.load_file(file)
  tensors = {name: edit(name, t.clone()) for name, t in tensors.items()}
  safetensors.torch.save_file(tensors, file, metadata={'format': 'pt'})
  return out


def published(path: str) -> dict:
  """A checkpoint's config.json."""
  with open(os.path.join(path, 'config.json'), encoding='utf-8') as file:
    return json.load(file)
