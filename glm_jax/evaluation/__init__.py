"""What a model makes of held-out text, beyond a mean loss.

  probes       needles and copies far behind, at distances beyond top-k
  by_position  loss by position in the window; paired differences of models
  overlap      how alike the selections of neighbours and of layers are
  ngram        a Kneser-Ney baseline
  sharing      IndexShare switched on at inference only
  plots        pictures of all that (extra `notebook`)
  scoring      teacher-forced passes that give nats and greedy tokens

The public names are looked up when they are first used: making contexts
imports no jax.
"""

from __future__ import annotations

import importlib

_PUBLIC = {  # name -> the module that defines it
  'Copies': 'glm_jax.evaluation.probes',
  'KneserNey': 'glm_jax.evaluation.ngram',
  'Needles': 'glm_jax.evaluation.probes',
  'PositionLosses': 'glm_jax.evaluation.by_position',
  'copy': 'glm_jax.evaluation.probes',
  'full_windows': 'glm_jax.evaluation.by_position',
  'losses_by_position': 'glm_jax.evaluation.by_position',
  'needle': 'glm_jax.evaluation.probes',
  'paired_difference': 'glm_jax.evaluation.by_position',
  'recall_documents': 'glm_jax.data.pairs',
  'score_copies': 'glm_jax.evaluation.probes',
  'score_needles': 'glm_jax.evaluation.probes',
  'score_tokens': 'glm_jax.evaluation.scoring',
  'selection_agreement': 'glm_jax.evaluation.overlap',
  'selection_overlap': 'glm_jax.evaluation.overlap',
  'share_index': 'glm_jax.evaluation.sharing',
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
