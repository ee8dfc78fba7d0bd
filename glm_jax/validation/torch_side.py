"""The oracle: transformers' GlmMoeDsa, one decoder layer in memory at a time.

The layers are transformers' own modules with eager attention; this file
fills them from the checkpoint, feeds them and watches them. It imports no
jax, so that a machine with PyTorch alone can record a reference.

What is aligned, and noted in every record: the two latent norms, whose
epsilon transformers leaves at its class default 1e-6, take the config's
(spec/model.md section 2.6); matmul precision is 'highest' and TF32 is off.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

import numpy as np
import safetensors
import torch
import torch.overrides
import transformers
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from glm_jax.config import ModelConfig
from glm_jax.published_config import config_from_published
from glm_jax.validation.torch_drafter import TorchDrafter
from glm_jax.validation.torch_weights import TorchWeights
from glm_jax.validation.walk import (
  LayerTensors,
  RunLayer,
  contract_selection,
)


class TorchSide:
  """Runs transformers' layers; see `walk.Side`."""

  framework = 'torch'

  def __init__(
    self,
    path: str | os.PathLike,
    dtype: str = 'float32',
    *,
    device: str = 'cpu',
    keep_scores: int = 8192,
  ):
    """Opens a checkpoint directory.

    Args:
      path: local directory with config.json and safetensors.
      dtype: 'float32' or 'bfloat16', of weights and arithmetic.
      device: where PyTorch computes: 'cpu' or 'cuda'.
      keep_scores: longest context whose index scores are kept, as in
        `JaxSide`.

    Raises:
      ValueError: transformers reads another model out of config.json, or
        there is no such device.
    """
    if device == 'cuda' and not torch.cuda.is_available():
      raise ValueError(
        f'device={device!r}: PyTorch {torch.__version__} finds no CUDA device; '
        "use 'cpu'"
      )
    self.device = torch.device(device)
    self._keep_scores = keep_scores
    with open(os.path.join(path, 'config.json'), encoding='utf-8') as file:
      published = json.load(file)
    self.config = config_from_published(published)
    self.dtype = getattr(torch, dtype)
    self._hf = _transformers_config(published, self.config)
    self._weights = TorchWeights(path, self.config.weight_block_size)
    eps = self.config.mla.latent_norm_eps
    default = glm.GlmMoeDsaRMSNorm(1).variance_epsilon
    name = torch.cuda.get_device_name() if device == 'cuda' else device
    self.notes = [
      f'torch: {dtype} on {name}, eager attention, matmul precision highest, '
      'TF32 off',
      f'torch: latent norms (q_a, kv_a) set to eps {eps:g}; transformers '
      f'leaves them at {default:g}',
    ]
    self.versions = {
      'torch': torch.__version__,
      'transformers': transformers.__version__,
      'safetensors': safetensors.__version__,
    }

  def embed(self, tokens: np.ndarray) -> np.ndarray:
    """[T, D] float32 embeddings."""
    shape = (self.config.vocab_size, self.config.hidden_size)
    table = torch.empty(shape, dtype=self.dtype)
    self._weights.copy_into(table, 'model.embed_tokens.weight')
    return _numpy(table[torch.as_tensor(np.asarray(tokens), dtype=torch.long)])

  @contextlib.contextmanager
  def layer(self, layer: int) -> Iterator[RunLayer]:
    """Loads one decoder layer."""
    with torch.device('meta'):
      module = glm.GlmMoeDsaDecoderLayer(self._hf, layer)
    module = module.to(self.dtype).eval()
    _keep_float32(module)
    module = module.to_empty(device=self.device)
    self._weights.fill(module, f'model.layers.{layer}.')
    attention = module.self_attn
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
      norm.variance_epsilon = self.config.mla.latent_norm_eps

    def run(x, selected):
      with _precise(), torch.no_grad(), self.device:
        return self._run(module, layer, x, selected)

    yield run

  def logits(self, hidden: np.ndarray) -> np.ndarray:
    """[T, V] float32 logits of hidden states above the last layer."""
    c = self.config
    name = 'model.embed_tokens' if c.tie_word_embeddings else 'lm_head'
    with _precise(), torch.no_grad(), self.device:
      norm = glm.GlmMoeDsaRMSNorm(c.hidden_size, c.rms_norm_eps).to(self.dtype)
      self._weights.copy_into(norm.weight.data, 'model.norm.weight')
      head = torch.empty((c.vocab_size, c.hidden_size), dtype=self.dtype)
      self._weights.copy_into(head, f'{name}.weight')
      x = norm(torch.as_tensor(hidden, dtype=self.dtype, device=self.device))
      return _numpy(x @ head.T)

  def drafts(
    self, tokens: np.ndarray, hidden: np.ndarray, drafted: list[int]
  ) -> np.ndarray:
    """[2, K, V] draft logits, with sharing and without; float32."""
    c = self.config
    with _precise(), torch.no_grad(), self.device:
      norm = glm.GlmMoeDsaRMSNorm(c.hidden_size, c.rms_norm_eps)
      self._weights.copy_into(norm.weight.data, 'model.norm.weight')
      drafter = TorchDrafter(self._weights, self._hf, c)
      states = norm(torch.as_tensor(hidden[:-1], device=self.device))
      ids = [int(t) for t in tokens]
      both = [
        drafter(ids, states, drafted, share=share) for share in (True, False)
      ]
    return _numpy(torch.stack(both))

  def _run(self, module, layer, x, selected) -> LayerTensors:
    """Runs a loaded layer on [T, D] rows of one sequence."""
    T = len(x)
    seen = {}
    hooks = [
      module.self_attn.register_forward_hook(
        lambda m, args, out: seen.update(attention=out[0], topk=out[2])
      ),
      module.mlp.register_forward_hook(
        lambda m, args, out: seen.update(mlp=out)
      ),
    ]
    if hasattr(module.mlp, 'gate'):
      hooks.append(
        module.mlp.gate.register_forward_hook(
          lambda m, args, out: seen.update(router=out[0], experts=out[2])
        )
      )
    hidden = torch.as_tensor(x, dtype=self.dtype, device=self.device)[None]
    position = torch.arange(T)[None]
    rotary = glm.GlmMoeDsaRotaryEmbedding(self._hf)
    lowest = torch.finfo(self.dtype).min
    mask = torch.full((T, T), lowest, dtype=self.dtype).triu(1)[None, None]
    given = None if selected is None else _oracle_indices(selected, self.device)
    try:
      with _watch(module.self_attn.indexer, given, seen):
        out, _ = module(
          hidden,
          attention_mask=mask,
          position_ids=position,
          position_embeddings=rotary(hidden, position),
          prev_topk_indices=given,
        )
    finally:
      for hook in hooks:
        hook.remove()
    if selected is None:
      topk = self.config.indexer.topk
      selected = contract_selection(seen['topk'][0].cpu().numpy(), topk)
    scores = None
    if 'scores' in seen and T <= self._keep_scores:
      scores = _numpy(seen['scores'][0])
      scores[scores <= lowest / 2] = -np.inf  # the mask was added
    experts = choice = None
    if 'router' in seen:
      bias = module.mlp.gate.e_score_correction_bias
      choice = _numpy(seen['router'].sigmoid() + bias)
      experts = np.sort(seen['experts'].cpu().numpy().astype(np.int32), axis=1)
    return LayerTensors(
      layer=layer,
      input=x,
      selected=selected,
      attention=_numpy(seen['attention'][0]),
      mlp=_numpy(seen['mlp'][0]),
      hidden=_numpy(out[0]),
      experts=experts,
      choice=choice,
      scores=scores,
    )


def _transformers_config(published: dict, config: ModelConfig):
  """transformers' reading of config.json, checked against ours."""
  hf = glm.GlmMoeDsaConfig.from_dict(dict(published))
  hf._attn_implementation = 'eager'
  hf._experts_implementation = 'eager'
  for name, theirs, ours in (
    ('indexer_types', tuple(hf.indexer_types), config.indexer_types),
    ('mlp_layer_types', tuple(hf.mlp_layer_types), config.mlp_types),
    ('hidden_size', hf.hidden_size, config.hidden_size),
    ('vocab_size', hf.vocab_size, config.vocab_size),
    ('index_topk', hf.index_topk, config.indexer.topk),
    ('index_n_heads', hf.index_n_heads, config.indexer.num_heads),
    ('rms_norm_eps', hf.rms_norm_eps, config.rms_norm_eps),
    ('rope_theta', hf.rope_parameters['rope_theta'], config.rope_theta),
    (
      'routed_scaling_factor',
      hf.routed_scaling_factor,
      config.moe.routed_scaling_factor,
    ),
  ):
    if theirs != ours:
      raise ValueError(
        f'transformers {transformers.__version__} reads {name}={theirs!r} '
        f'out of config.json, this code {ours!r}: state {name} there'
      )
  return hf


def _keep_float32(module):
  """What transformers keeps in float32: the router and `weights_proj`."""
  if hasattr(module.mlp, 'gate'):
    module.mlp.gate.float()
  if module.self_attn.indexer is not None:
    module.self_attn.indexer.weights_proj.float()


def _oracle_indices(selected: np.ndarray, device) -> torch.Tensor:
  """Our selection as transformers takes it: [1, T, k], no -1.

  A row with -1 sees fewer keys than k and selects all of them, its own
  position included, which therefore can stand in for -1.
  """
  own = np.arange(len(selected), dtype=selected.dtype)[:, None]
  whole = np.where(selected < 0, own, selected)
  return torch.as_tensor(whole, device=device)[None]


class _Listen(torch.overrides.TorchFunctionMode):
  """Puts what `topk` is asked of into a dictionary, as 'scores'."""

  def __init__(self, seen: dict):
    super().__init__()
    self._seen = seen

  def __torch_function__(self, function, types, args=(), kwargs=None):
    if function is torch.Tensor.topk:
      self._seen['scores'] = args[0]
    return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _watch(indexer, given: torch.Tensor | None, seen: dict):
  """Makes a full layer's indexer answer `given`, or hears its scores.

  transformers keeps scores within `forward`, so `topk` is listened to there.
  """
  if indexer is None:
    yield
    return
  forward = indexer.forward

  def run(*args, **kwargs):
    if given is not None:
      return given
    with _Listen(seen):
      return forward(*args, **kwargs)

  indexer.forward = run
  try:
    yield
  finally:
    del indexer.forward


@contextlib.contextmanager
def _precise():
  """float32 means float32, on every device; settings come back after."""
  before = torch.get_float32_matmul_precision()
  torch.set_float32_matmul_precision('highest')  # TF32 off, with it
  try:
    yield
  finally:
    torch.set_float32_matmul_precision(before)


def _numpy(x: torch.Tensor) -> np.ndarray:
  return x.detach().float().cpu().numpy()
