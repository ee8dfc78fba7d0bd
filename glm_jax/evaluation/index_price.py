"""IndexShare's price: four ways to attend, trained and probed alike.

`dense`, `per_layer` and `share` are trained; `inference_only` is the model of
`per_layer` with its indexers dropped and nothing trained (arXiv 2603.12201
calls it training-free). All are judged on the same held-out windows and the
same probes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from glm_jax.config import ModelConfig
from glm_jax.data import TokenFile
from glm_jax.evaluation.by_position import (
  PositionLosses,
  full_windows,
  losses_by_position,
  paired_difference,
)
from glm_jax.evaluation.probes import copy, needle, score_copies, score_needles
from glm_jax.evaluation.sharing import share_index
from glm_jax.model import Model
from glm_jax.text import Tokenizer
from glm_jax.training.config import TrainConfig, override

TRAINED = ('dense', 'per_layer', 'share')
FORMS = (*TRAINED, 'inference_only')
_SPAN = 64  # tokens of a copied span


def pattern(config: ModelConfig) -> str:
  """F and S of each layer."""
  return ''.join(kind[0].upper() for kind in config.indexer_types)


def form_config(recipe: TrainConfig, form: str, seed: int) -> TrainConfig:
  """The recipe of one run; its model is the one with shared indexers.

  Args:
    recipe: of 'share'; trained densely, then by selection, say.
    form: one of `TRAINED`.
    seed: of the order of the tokens.
  """
  if form != 'share':
    every = ('full',) * recipe.model.num_layers
    model = dataclasses.replace(recipe.model, indexer_types=every)
    recipe = dataclasses.replace(recipe, model=model)
  settings = [f'seed={seed}']
  if form == 'dense':
    settings += ['sparse=False', 'kl_coefficient=0.0']
  return override(recipe, settings)


def start_of(base: Model, recipe: TrainConfig, form: str) -> Model:
  """What a form begins with."""
  return share_index(base, pattern(recipe.model)) if form == 'share' else base


def selection_of(form: str) -> str:
  """What rows attend to (`scoring.SELECTIONS`)."""
  return 'share' if form == 'inference_only' else form


def judge_form(
  model: Model,
  form: str,
  tokenizer: Tokenizer,
  held_out: TokenFile,
  *,
  length: int,
  windows: int | None,
  count: int,
  **options: Any,
) -> dict[str, Any]:
  """Losses by position, needles and copies of one model.

  Args:
    model: in the dtype to compute in; for 'inference_only' that of
      'per_layer' after `share_index`.
    form: one of `FORMS`.
    tokenizer: of the model.
    held_out: documents.
    length: tokens of a context.
    windows: of the losses; None for all.
    count: needles, and copies.
    **options: `batch` and `attention` of `scoring.score_tokens`.

  Returns:
    'losses' (a `PositionLosses`), 'needles' and 'copies'.
  """
  options |= {'selection': selection_of(form)}
  nearest = max(model.config.indexer.topk + 1, _SPAN)
  probe = (tokenizer, held_out, 0, count, length)
  return {
    'losses': losses_by_position(
      model, full_windows(held_out, length, windows), **options
    ),
    'needles': score_needles(model, needle(*probe, nearest=nearest), **options),
    'copies': score_copies(
      model, copy(*probe, span=_SPAN, nearest=nearest), **options
    ),
  }


def compare_forms(
  judged: Mapping[tuple[str, int], Mapping[str, Any]], seeds: Sequence[int]
) -> dict[str, Any]:
  """The table, and 'share' and 'inference_only' against 'per_layer'.

  Args:
    judged: (form, seed) -> what `judge_form` returned, losses as they are or
      as in JSON.
    seeds: that are there for every form.

  Returns:
    'forms', a row each: mean loss, mean loss at the longest positions, share
    of needles, nats and accuracy of copies; 'difference', form -> rows of
    `paired_difference`.
  """

  def losses(form):
    found = [judged[form, seed]['losses'] for seed in seeds]
    return [
      x if isinstance(x, PositionLosses) else PositionLosses.from_json(x)
      for x in found
    ]

  mean = lambda values: sum(values) / len(values)
  rows = []
  for form in FORMS:
    runs = [judged[form, seed] for seed in seeds]
    rows.append(
      {
        'form': form,
        'seeds': len(seeds),
        'nats': mean([x.loss for x in losses(form)]),
        'nats_longest': mean([x.rows()[-1]['nats'] for x in losses(form)]),
        'needles': mean([r['needles']['share'] for r in runs]),
        'copy_nats': mean([r['copies']['copy_nats'] for r in runs]),
        'copy_accuracy': mean([r['copies']['copy_accuracy'] for r in runs]),
      }
    )
  base = losses('per_layer')
  return {
    'forms': rows,
    'difference': {
      form: paired_difference(losses(form), base)
      for form in ('share', 'inference_only')
    },
  }
