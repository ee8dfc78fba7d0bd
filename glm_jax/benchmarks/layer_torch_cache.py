"""transformers' cache of one layer, held at one length.

What a cache holds differs between versions: 5.17 keeps expanded keys and
values of every head, 5.24 the latent and the rotary key. Nothing here asks
for a version: one token is run, and what its cache then holds is what is
filled.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np
import torch
import transformers
from transformers import DynamicCache, StaticCache

from glm_jax.benchmarks.layer_cases import KINDS, LayerCase

_AXES = {'keys': 2, 'values': 2, 'indexer_keys': 1}  # of the tokens
_LENGTHS = ('cumulative_length', 'indexer_cumulative_length')
_CHUNK = 4096  # tokens that are expanded at once


def cache_argument(attention) -> str:
  """The name of the cache among the arguments of an attention.

  Raises:
    NotImplementedError: it takes none that is known here.
  """
  names = inspect.signature(attention.forward).parameters
  for name in ('cache', 'past_key_values'):
    if name in names:
      return name
  raise _unknown(f'its attention takes no cache but {", ".join(names)}')


def _unknown(what: str) -> NotImplementedError:
  return NotImplementedError(
    f'transformers {transformers.__version__} is unknown to this benchmark: '
    f'{what}; 5.17 and 5.24 are known'
  )


class HeldCache:
  """The cache of one layer before a step; the step's tokens come on top.

  Attributes:
    what: 'expanded' or 'latent' rows.
  """

  def __init__(self, layers, case: LayerCase, system: str, kind: str):
    """An empty cache.

    Args:
      layers: `layer_torch.TorchLayers`.
      case: the case.
      system: form of the layer.
      kind: 'full' or 'shared'.
    """
    self._layers, self._case, self._kind = layers, case, kind
    self._static = system == 'torch_static'
    self._index = KINDS.index(kind)
    self._cache = None
    probe = self._one_token(DynamicCache(config=layers.config))
    self._bytes = sum(
      t.nbytes // t.shape[axis] for t, axis in _held(probe).values()
    )
    heads, width = probe.keys.shape[1], probe.keys.shape[-1]
    c = layers.config
    shapes = {
      (c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim): (
        'expanded'
      ),
      (1, c.kv_lora_rank): 'latent',
    }
    if (heads, width) not in shapes:
      raise _unknown(f'it caches {heads} heads of {width}')
    self.what = shapes[heads, width]

  @property
  def _before(self) -> int:
    return self._case.context - self._case.new

  def check_fits(self) -> None:
    """Raises `MemoryError` where the card cannot hold the cache.

    A dynamic cache is copied at each step, half of it at a time.
    """
    if self._layers.device.type != 'cuda':
      return
    need = self._bytes * self._case.context
    need = need if self._static or not self._before else 1.5 * need
    card = torch.cuda.mem_get_info()[1]
    if need > card:
      raise MemoryError(
        f'{need / 2**30:.0f} GiB of {self.what} cache and copies do not fit '
        f'{card / 2**30:.0f} GiB'
      )

  def randomise(self) -> None:
    """Fills the cache with normal numbers."""
    for tensor, axis in self._open().values():
      tensor.narrow(axis, 0, self._before).normal_()

  def load(self, latents: np.ndarray, keys: np.ndarray) -> None:
    """Fills the cache with what the other framework's holds.

    Args:
      latents: [B, n, R + P] normed latents, then rotary keys.
      keys: [B, n, H] index keys.
    """
    held, layers = self._open(), self._layers
    rank = layers.config.kv_lora_rank
    attention = layers.attention[self._kind]
    order = np.asarray(layers.rotary_order)
    latents, keys = latents.copy(), keys.copy()
    latents[..., rank:] = latents[..., rank + order]
    keys[..., : len(order)] = keys[..., order]
    for start in range(0, self._before, _CHUNK):
      part = slice(start, min(start + _CHUNK, self._before))
      rows = layers.tensor(latents[:, part])[:, None]
      pair = rows[..., :rank], rows[..., rank:]
      if self.what == 'expanded':
        pair = attention.expand_kv(*pair)
      for name, values in zip(('keys', 'values'), pair):
        held[name][0][:, :, part] = values
      if 'indexer_keys' in held:
        held['indexer_keys'][0][:, part] = layers.tensor(keys[:, part])

  def step(self):
    """transformers' cache for one step."""
    return next(self.steps(1))

  def steps(self, count: int) -> Iterator:
    """transformers' cache for each of some steps, always at the same length.

    What makes the length go back costs no kernel between steps: a static
    cache gets a counter that is there already, a dynamic one a view.
    """
    if not self._before:
      make = lambda: DynamicCache(config=self._layers.config)
      return (make() for _ in range(count))
    if self._cache is None:
      self._open()
    layer = self._cache.layers[self._index]
    if not self._static:
      return self._shortened(layer, count)
    names = [n for n in _LENGTHS if getattr(layer, n, None) is not None]
    fresh = torch.full((count, len(names)), self._before)
    fresh = [row.unbind() for row in fresh.to(self._layers.device)]
    return self._recounted(layer, names, fresh)

  def _recounted(self, layer, names, fresh):
    for counters in fresh:
      for name, counter in zip(names, counters):
        setattr(layer, name, counter)
      yield self._cache

  def _shortened(self, layer, count):
    for _ in range(count):
      for name, (tensor, axis) in _held(layer).items():
        setattr(layer, name, tensor.narrow(axis, 0, self._before))
      yield self._cache

  def _open(self) -> dict[str, tuple[torch.Tensor, int]]:
    """Allocates what comes before the step, and returns it."""
    if not self._before:
      return {}
    config = self._layers.config
    if self._static:
      length = self._case.context
      self._cache = StaticCache(config=config, max_cache_len=length)
      layer = self._one_token(self._cache)
      if not isinstance(getattr(layer, _LENGTHS[0], None), torch.Tensor):
        raise _unknown(f'{type(layer).__name__} counts its tokens elsewhere')
      return _held(layer)
    self._cache = DynamicCache(config=config)
    layer = self._one_token(self._cache)
    for name, (tensor, axis) in _held(layer).items():
      shape = list(tensor.shape)
      shape[axis] = self._before
      setattr(layer, name, tensor.new_empty(shape))
    return _held(layer)

  def _one_token(self, cache):
    """Runs a token on an empty cache, which sets up its layer."""
    layers, case = self._layers, self._case
    static = isinstance(cache, StaticCache)
    length = case.context if static else 1
    one = LayerCase('one', 'decode', 1, case.batch, case.preset)
    context = layers.context(one, 'torch_eager', length)
    shape = (case.batch, 1, layers.config.hidden_size)
    x = torch.zeros(shape, dtype=layers.dtype, device=layers.device)
    given = layers.given(one)[..., :1] if self._kind == 'shared' else None
    layers(self._kind, 'torch_eager', x, cache, context, given)
    layer = cache.layers[self._index]
    if getattr(layer, 'keys', None) is None:
      raise _unknown(f'{type(layer).__name__} holds no keys')
    if self._kind == 'full' and getattr(layer, 'indexer_keys', None) is None:
      raise _unknown(f'{type(layer).__name__} holds no index keys')
    return layer


def _held(layer) -> dict[str, tuple[torch.Tensor, int]]:
  """The tensors of a cache's layer, with the axis of their tokens."""
  found = {name: getattr(layer, name, None) for name in _AXES}
  return {k: (v, _AXES[k]) for k, v in found.items() if v is not None}
