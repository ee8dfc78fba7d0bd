"""Small random models and prompts that several tests share."""

import dataclasses
import functools

import jax
import numpy as np

from glm_jax import presets
from glm_jax.config import FULL, SHARED, ModelConfig
from glm_jax.model import init_model
from glm_jax.plan import LocalPlan

TILED = LocalPlan(row_tile=8)
PATTERNS = ('FS', 'FSSS', 'FFSS', 'FFSFS', 'FSFS', 'FFFSSS')
LENGTHS = (48, 5, 70, 64, 1)  # beyond top-k (8), page edges, one token


def small_config(seed, **changes) -> ModelConfig:
  """A config of its own for each seed; top-k 8 is far below the lengths."""
  pattern = PATTERNS[seed % len(PATTERNS)]
  kinds = tuple(FULL if c == 'F' else SHARED for c in pattern)
  base = presets.PRESETS['tiny']
  values = dict(
    indexer_types=kinds,
    mlp_types=('dense',) + ('sparse',) * (len(kinds) - 1),
    vocab_size=96,
    hidden_size=48 + 16 * (seed % 2),
    initializer_range=0.15,
    indexer=dataclasses.replace(base.indexer, topk=8),
    moe=dataclasses.replace(base.moe, num_experts=4 + 4 * (seed % 2)),
    mtp=dataclasses.replace(base.mtp, num_layers=1),
    eos_token_ids=(),
    dtype='float32',
  )
  return dataclasses.replace(base, **{**values, **changes})


@functools.cache
def small_model(seed):
  return make_model(small_config(seed), seed)


def make_model(config, seed):
  return jax.jit(lambda key: init_model(config, key))(jax.random.key(seed))


def prompts(seed, lengths):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, 96, n).tolist() for n in lengths]
