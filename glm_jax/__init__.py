"""GLM-5.2 in JAX: a shared-indexer sparse-attention model over 1M tokens.

The public names are looked up when they are first used, so that importing
the package, or a part that needs no jax, imports no jax.
"""

from __future__ import annotations

import importlib

_PUBLIC = {  # name -> the module that defines it
  'Tokenizer': 'glm_jax.text',
  'draft': 'glm_jax.drafting',
  'forward': 'glm_jax.model',
  'generate': 'glm_jax.generation',
  'init_cache': 'glm_jax.cache',
  'init_model': 'glm_jax.model',
  'load_config': 'glm_jax.checkpoints',
  'load_model': 'glm_jax.checkpoints',
  'validate': 'glm_jax.validation',
  'verify': 'glm_jax.speculative',
}

__all__ = list(_PUBLIC)  # noqa: PLE0605


def __getattr__(name: str):
  if name not in _PUBLIC:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  value = getattr(importlib.import_module(_PUBLIC[name]), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *_PUBLIC})
