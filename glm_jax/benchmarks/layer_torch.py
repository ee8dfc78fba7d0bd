"""The PyTorch side of suite `layer`: transformers' GlmMoeDsaAttention.

`measuring.ask` starts this module. Three forms: eager, sdpa with a
DynamicCache, sdpa with a StaticCache. The length stays the same from step to
step: on Hopper, sdpa over a growing cache has cuDNN plan anew for each
length, 45 to 63 ms a step (spec/kernels_gpu.md section 2), which is no part
of what is compared. Imports no jax.
"""

from __future__ import annotations

import gc
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from glm_jax.benchmarks import layer_cases
from glm_jax.benchmarks.layer_cases import CASES, KINDS, LayerCase
from glm_jax.benchmarks.layer_torch_cache import HeldCache, cache_argument
from glm_jax.benchmarks.measuring import answer_cases

_MIN_SECONDS, _MAX_REPEATS, _QUEUED = 0.3, 30, 10  # as timing.measure
_WARM = 3  # steps before timing; cuDNN plans in the first


class TorchLayers:
  """A full and a shared layer with the same weights, on one device."""

  def __init__(self, case: LayerCase):
    """Builds the layers of a case's model."""
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

    config = case.config
    self.device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    self.dtype = getattr(torch, config.dtype)
    self.config = _transformers_config(glm, config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(self.dtype)
    try:
      with self.device:
        self.attention = {
          kind: glm.GlmMoeDsaAttention(self.config, i).eval()
          for i, kind in enumerate(KINDS)
        }
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm = glm.GlmMoeDsaRMSNorm(width, eps)
        self.rotary = glm.GlmMoeDsaRotaryEmbedding(self.config)
    finally:
      torch.set_default_dtype(before)
    self._load(layer_cases.weights(config), config.mla.latent_norm_eps)
    self._cache = cache_argument(self.attention['full'])
    self.rotary_order = _rotary_order(glm, config.mla.qk_rope_head_dim)

  def _load(self, weights: dict[str, np.ndarray], latent_eps: float):
    copy = lambda to, name: to.copy_(torch.from_numpy(weights.pop(name)))
    for attention in self.attention.values():
      for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        norm.variance_epsilon = latent_eps  # validation/torch_side.py
    # transformers keeps this one in float32 whatever the model's dtype.
    self.attention['full'].indexer.weights_proj.float()
    copy(self.norm.weight.data, 'input_layernorm.weight')
    full = self.attention['full'].state_dict()
    shared = self.attention['shared'].state_dict()
    for name, target in full.items():
      copy(target, f'self_attn.{name}')
      if name in shared:
        shared.pop(name).copy_(target)
    if weights or shared:
      raise NotImplementedError(
        f'transformers {transformers.__version__} names its weights otherwise: '
        f'{sorted([*weights, *shared])} are left over'
      )

  def context(self, case: LayerCase, form: str, length: int) -> dict[str, Any]:
    """What all layers of a step share: positions, their rotation, the mask.

    Args:
      case: the case.
      form: one of `layer_cases.TORCH`.
      length: keys of the cache, the step's included.
    """
    last = torch.from_numpy(case.positions).reshape(case.batch, -1)
    pos = last.to(self.device, torch.long)
    visible = torch.arange(length, device=self.device) <= pos[..., None]
    mask = visible[:, None]
    if form == 'torch_eager':
      mask = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
      mask.masked_fill_(~visible[:, None], torch.finfo(self.dtype).min)
    like = torch.empty((), dtype=self.dtype, device=self.device)
    return dict(
      position_embeddings=self.rotary(like, position_ids=pos),
      position_ids=pos,
      attention_mask=mask,
    )

  def __call__(self, kind, form, x, cache, context, given=None):
    """Runs a layer without its MLP.

    Args:
      kind: 'full' or 'shared'.
      form: one of `layer_cases.TORCH`.
      x: [B, S, D].
      cache: transformers' cache.
      context: of `context`.
      given: [B, S, k] selected keys of a shared layer.

    Returns:
      x plus the attention's output, that output, and the selected keys.
    """
    eager = form == 'torch_eager'
    self.config._attn_implementation = 'eager' if eager else 'sdpa'
    out, _, selected = self.attention[kind](
      self.norm(x),
      prev_topk_indices=given,
      **{self._cache: cache},
      **context,
    )
    return x + out, out, selected

  def tensor(self, array: np.ndarray) -> torch.Tensor:
    """A NumPy array in the layers' dtype, on their device."""
    return torch.from_numpy(array).to(self.device, self.dtype)

  def given(self, case: LayerCase) -> torch.Tensor:
    """A selection for a shared layer; absent keys repeat the row's own."""
    found = layer_cases.selection(case)
    found = np.where(found < 0, case.positions[:, None], found)
    found = torch.from_numpy(found).to(self.device)
    return found.reshape(case.batch, case.new, -1)


def _rotary_order(glm, width: int) -> list[int]:
  """Where the features of a rotated key come from, as transformers keeps it.

  It takes interleaved pairs and puts the first ones of all pairs in front.
  """
  x = torch.arange(width, dtype=torch.float32).reshape(1, 1, 1, width)
  cos, sin = torch.ones(1, 1, width), torch.zeros(1, 1, width)
  _, turned = glm.apply_rotary_pos_emb_interleave(x, x, cos, sin)
  return [int(i) for i in turned.flatten()]


def _transformers_config(glm, config):
  c, i = config.mla, config.indexer
  return glm.GlmMoeDsaConfig(
    vocab_size=config.vocab_size,
    hidden_size=config.hidden_size,
    intermediate_size=config.intermediate_size,
    num_hidden_layers=len(KINDS),
    indexer_types=list(KINDS),
    mlp_layer_types=['dense'] * len(KINDS),
    num_attention_heads=c.num_heads,
    num_key_value_heads=c.num_heads,
    q_lora_rank=c.q_lora_rank,
    kv_lora_rank=c.kv_lora_rank,
    qk_nope_head_dim=c.qk_nope_head_dim,
    qk_rope_head_dim=c.qk_rope_head_dim,
    v_head_dim=c.v_head_dim,
    index_n_heads=i.num_heads,
    index_head_dim=i.head_dim,
    index_topk=i.topk,
    rms_norm_eps=config.rms_norm_eps,
    max_position_embeddings=config.max_position_embeddings,
    rope_parameters=dict(rope_type='default', rope_theta=config.rope_theta),
    pad_token_id=config.pad_token_id,
    eos_token_id=list(config.eos_token_ids),
  )


class TorchMeasure:
  """Answers cases; see `answer_cases`."""

  def __init__(self, folder: pathlib.Path):
    self.folder, self.layers, self.preset = folder, None, None

  def __call__(self, request: dict) -> dict:
    """Answers a 'time' or 'parity' request."""
    case = CASES[request['case']]
    self._free()
    if case.preset != self.preset:
      self.layers, self.preset = None, None
      self._free()
      self.layers, self.preset = TorchLayers(case), case.preset
    with torch.inference_mode():
      if request['what'] == 'parity':
        return self._parity(case, request['systems'])
      return self._time(case, request['system'], request['kind'])

  def _free(self):
    gc.collect()
    if torch.cuda.is_available():
      torch.cuda.empty_cache()

  def _parity(self, case: LayerCase, systems) -> dict:
    """Leaves outputs and selections in files, for the other framework."""
    layers, x = self.layers, self.layers.tensor(layer_cases.hidden(case))
    for system in systems:
      found = {}
      context = layers.context(case, system, case.context)
      topk = None
      for kind in KINDS:
        held = HeldCache(layers, case, system, kind)
        held.load(*layer_cases.cached(case))
        _, out, topk = layers(kind, system, x, held.step(), context, topk)
        found[kind] = out.float().cpu().numpy().reshape(-1, out.shape[-1])
        del held, out
      topk = topk.cpu().numpy().reshape(len(case.positions), -1)
      found['selected'] = layer_cases.contract(topk, case)
      np.savez(self.folder / f'{case.name}.{system}.npz', **found)
      self._free()
    return dict(written=list(systems))

  def _time(self, case: LayerCase, system: str, kind: str) -> dict:
    layers, x = self.layers, self.layers.tensor(layer_cases.hidden(case))
    context = layers.context(case, system, case.context)
    given = layers.given(case) if kind == 'shared' else None
    held = HeldCache(layers, case, system, kind)
    held.check_fits()
    held.randomise()
    cuda = layers.device.type == 'cuda'
    if cuda:
      torch.cuda.reset_peak_memory_stats()
    (unused,) = set(KINDS) - {kind}
    spare = layers.attention[unused].parameters()
    spare = sum(weight.nbytes for weight in spare)

    def burst(steps):
      caches = held.steps(steps)
      wait()
      start = time.perf_counter()
      for _ in range(steps):
        layers(kind, system, x, next(caches), context, given)
      wait()
      return (time.perf_counter() - start) / steps

    wait = torch.cuda.synchronize if cuda else lambda: None
    burst(_WARM)
    once = burst(1)
    queued = max(1, min(_QUEUED, int(2 * _MIN_SECONDS / once)))
    repeats = min(max(int(_MIN_SECONDS / (once * queued)), 3), _MAX_REPEATS)
    seconds = [burst(queued) for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated() - spare if cuda else None
    busy = _busy(burst, queued) if cuda else {}
    return dict(
      us=1e6 * statistics.median(seconds),
      fastest_us=1e6 * min(seconds),
      slowest_us=1e6 * max(seconds),
      queued=queued,
      repeats=repeats,
      peak_gib=None if peak is None else peak / 2**30,
      cached=held.what,
      **busy,
    )


def _busy(burst: Callable[[int], Any], steps: int) -> dict[str, Any]:
  """Time and number of the kernels of a step, from torch's profiler."""
  from torch.profiler import ProfilerActivity, profile

  try:
    with profile(activities=[ProfilerActivity.CUDA]) as found:
      burst(steps)
    events = [
      event
      for event in found.key_averages()
      if event.device_type != torch.autograd.DeviceType.CPU
    ]
    us = {e.key: e.self_device_time_total / steps for e in events}
  except (RuntimeError, AttributeError, AssertionError) as error:
    return dict(busy_us=None, busy_problem=str(error)[:200])
  top = sorted(us, key=us.get, reverse=True)[:12]
  return dict(
    busy_us=sum(us.values()) or None,
    launches=sum(e.count for e in events) / steps,
    kernels={name[:80]: us[name] for name in top},
  )


def main() -> None:
  """Answers requests until stdin ends."""
  cuda = torch.cuda.is_available()
  hello = dict(
    device=torch.cuda.get_device_name() if cuda else 'cpu',
    platform='cuda' if cuda else 'cpu',
    versions=f'torch {torch.__version__}, '
    f'transformers {transformers.__version__}',
  )
  failures = (RuntimeError, ValueError, OSError, MemoryError)
  answer_cases(hello, TorchMeasure(pathlib.Path(sys.argv[1])), failures)


if __name__ == '__main__':
  main()
