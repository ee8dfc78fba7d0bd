"""What a model makes of held-out text, beyond a mean loss.

  pairs        names with values in real text, for probes and for training
  probes       needles and copies far behind, at distances beyond top-k
  scoring      teacher-forced passes that give nats and greedy tokens

The public names are looked up when they are first used: making contexts and
training documents imports no jax.
"""

from __future__ import annotations

import importlib

_PUBLIC = {  # name -> the module that defines it
  'Copies': 'glm_jax.evaluation.probes',
  'Needles': 'glm_jax.evaluation.probes',
  'copy': 'glm_jax.evaluation.probes',
  'needle': 'glm_jax.evaluation.probes',
  'recall_documents': 'glm_jax.evaluation.pairs',
  'score_copies': 'glm_jax.evaluation.probes',
  'score_needles': 'glm_jax.evaluation.probes',
  'score_tokens': 'glm_jax.evaluation.scoring',
  'window_nats': 'glm_jax.evaluation.scoring',
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
