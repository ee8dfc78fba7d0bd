"""Training data: text from packages, a tokenizer, token files, batches.

  sources             a recipe: exact releases with checksums and licences
  corpus              filters, duplicates, held-out split, long documents
  tokenizer_training  byte-level BPE with GLM's special tokens
  token_file          ids on disk, memory-mapped and checked
  token_batches       step -> windows of ids, a pure function of (seed, step)
  preparation         all of it in order, skipping what is up to date

The public names are looked up when they are first used: preparing data
imports no jax.
"""

from __future__ import annotations

import importlib

_PUBLIC = {  # name -> the module that defines it
  'Batch': 'glm_jax.data.token_batches',
  'TokenBatches': 'glm_jax.data.token_batches',
  'TokenFile': 'glm_jax.data.token_file',
  'TokenWriter': 'glm_jax.data.token_file',
  'folder_recipe': 'glm_jax.data.sources',
  'load_recipe': 'glm_jax.data.sources',
  'prepare': 'glm_jax.data.preparation',
  'train_tokenizer': 'glm_jax.data.tokenizer_training',
  'write_tokenizer': 'glm_jax.data.tokenizer_training',
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
