"""What suite `context` runs: eight layers of a model, at growing contexts.

Layers 6 to 13 of GLM-5.2's pattern: a full layer and three shared ones,
twice. The systems share all weights but the six more indexers of `per_layer`,
which are copies of the indexer whose selection the layer would share.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.cache import Cache
from glm_jax.config import FULL, ModelConfig
from glm_jax.layer_plan import layer_plan
from glm_jax.model import Model, abstract_model, layer_block
from glm_jax.presets import PRESETS

LAYERS = slice(6, 14)
SYSTEMS = ('shared', 'per_layer', 'dense')


@dataclasses.dataclass(frozen=True)
class Setting:
  """A slice and how it is measured.

  Attributes:
    config: the slice with its drafter.
    contexts: tokens, ascending; multiples of `chunk`.
    chunk: rows of a prefill step, a multiple of 64.
    samples: chunks that stand for a context where not all are run.
    steps: decode steps that are timed.
    rounds: rounds of drafting that are timed.
    warm: steps or rounds before them.
    drafts: K.
    room: last tokens of a context that decoding runs again; whole pages.
  """

  config: ModelConfig
  contexts: tuple[int, ...]
  chunk: int
  samples: int = 8
  steps: int = 32
  rounds: int = 12
  warm: int = 3
  drafts: int = 5
  room: int = 128


def slice_config(config: ModelConfig, num_experts: int) -> ModelConfig:
  """Layers 6 to 13 of a model, with fewer experts."""
  return dataclasses.replace(
    config,
    indexer_types=config.indexer_types[LAYERS],
    mlp_types=config.mlp_types[LAYERS],
    moe=dataclasses.replace(config.moe, num_experts=num_experts),
  )


SETTINGS = {
  'glm52': Setting(
    slice_config(PRESETS['glm52'], 16),
    contexts=(8192, 32_768, 131_072, 524_288, 1_048_576),
    chunk=2048,
  ),
  # Seconds on a CPU; more keys than the 64 that are selected.
  'tiny': Setting(
    slice_config(PRESETS['tiny'], 8),
    contexts=(128, 256, 512),
    chunk=64,
    samples=2,
    steps=2,
    rounds=2,
    warm=1,
    room=64,
  ),
}


def setting_named(name: str | None) -> Setting:
  """A setting; None is GLM-5.2's.

  Raises:
    ValueError: there is none of that name.
  """
  name = name or 'glm52'
  if name not in SETTINGS:
    raise ValueError(
      f'--model={name} is not a slice of suite context: use one of '
      f'{", ".join(SETTINGS)}'
    )
  return SETTINGS[name]


def context_name(tokens: int) -> str:
  """131072 as '128k', 1048576 as '1m', what divides by neither as it is."""
  for unit, letter in ((1 << 20, 'm'), (1 << 10, 'k')):
    if tokens % unit == 0:
      return f'{tokens // unit}{letter}'
  return str(tokens)


def random_tokens(setting: Setting) -> np.ndarray:
  """[largest context] int32 token ids, the same in every run."""
  rng = np.random.default_rng(0)
  size = setting.contexts[-1]
  return rng.integers(0, setting.config.vocab_size, size, dtype=np.int32)


def per_layer_model(model: Model) -> Model:
  """The same layers with an indexer each; nothing else is copied but blocks.

  Raises:
    ValueError: the model has layers that are not scanned.
  """
  plan = layer_plan(model.config)
  every = (FULL,) * plan.num_layers
  config = dataclasses.replace(model.config, indexer_types=every)
  new = layer_plan(config)
  if (new.prologue, new.group_size) != (0, 1):
    raise ValueError('per_layer_model needs layers of one MLP kind')
  blocks = []
  for layer in range(plan.num_layers):
    block = layer_block(model, plan.index_source(layer))
    own = layer_block(model, layer)
    for name in ('input_norm', 'attention', 'post_norm', 'moe', 'mlp'):
      if getattr(own, name) is not None:
        setattr(block, name, getattr(own, name))
    blocks.append(block)
  other = abstract_model(config)
  for name in ('embed', 'experts', 'norm', 'head', 'mtp'):
    setattr(other, name, getattr(model, name))
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
  other.groups.blocks[0] = stacked
  return other


def per_layer_keys(model: Model, cache: Cache) -> jax.Array:
  """Index keys of every layer: those of the layer it shared with.

  Args:
    model: with IndexShare.
    cache: its cache.

  Returns:
    [(layers + drafter) * slots, H] in the cache's dtype.
  """
  plan = layer_plan(model.config)
  layers = range(plan.num_latent_slots)
  sources = np.array([plan.index_slot(layer) for layer in layers])
  keys = cache.index_keys
  by_slot = keys.reshape(plan.num_index_slots, -1, keys.shape[1])
  return by_slot[sources].reshape(-1, keys.shape[1])
