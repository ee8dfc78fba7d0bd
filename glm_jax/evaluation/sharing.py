"""IndexShare switched on at inference only, to see what training it is worth.

A model trained with an indexer in every layer loses some of them; the layers
without one attend with the selection of the nearest layer below that has.
Everything else is as it was.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from glm_jax.checkpoints.names import model_leaves
from glm_jax.layer_plan import LayerPlan, layer_plan
from glm_jax.model import Model, abstract_model
from glm_jax.published_config import index_pattern

_GROUPS = 'groups.blocks.'


def share_index(model: Model, pattern: str) -> Model:
  """The model without the indexers of the layers marked S.

  Args:
    model: has an indexer in every layer that is marked F.
    pattern: F or S for every layer, as in `index_topk_pattern`.

  Returns:
    A model of its own configuration, in the same dtype; arrays that need no
    other shape are the same.

  Raises:
    ValueError: a pattern of other letters or another length, or an F where
      the model has no indexer.
  """
  old = model.config
  kinds = index_pattern(
    {'num_hidden_layers': old.num_layers, 'index_topk_pattern': pattern}
  )
  config = dataclasses.replace(old, indexer_types=kinds)
  lacking = [
    i for i in layer_plan(config).full_layers if old.indexer_types[i] != 'full'
  ]
  if lacking:
    raise ValueError(
      f'{pattern=} needs indexers in layers {lacking}, which have none'
    )
  given = _by_layer(model)
  new = abstract_model(config, dtype=model.embed.dtype)
  plan = layer_plan(config)
  values = []
  for leaf in model_leaves(new, config):
    layers, rest = _place(leaf.path, plan)
    if layers is None:
      values.append(given[rest])
    elif leaf.path.startswith(_GROUPS):
      values.append(jnp.stack([given[i, rest] for i in layers]))
    else:
      values.append(given[layers[0], rest])
  return jax.tree.structure(new).unflatten(values)


def _by_layer(model: Model) -> dict:
  """Arrays by (layer, path in the block), the rest by path."""
  plan = layer_plan(model.config)
  leaves = model_leaves(model, model.config)
  found = {}
  for leaf, value in zip(leaves, jax.tree.leaves(model), strict=True):
    layers, rest = _place(leaf.path, plan)
    if layers is None:
      found[rest] = value
    elif leaf.path.startswith(_GROUPS):
      found |= {(i, rest): value[g] for g, i in enumerate(layers)}
    else:
      found[layers[0], rest] = value
  return found


def _place(path: str, plan: LayerPlan) -> tuple[range | None, str]:
  """Trunk layers whose parameter a path holds, and its path in the block."""
  for prefix in (_GROUPS, 'prologue.'):
    if path.startswith(prefix):
      number, _, rest = path.removeprefix(prefix).partition('.')
      if prefix == _GROUPS:
        first = plan.prologue + int(number)
        return range(first, plan.num_layers, plan.group_size), rest
      return range(int(number), int(number) + 1), rest
  return None, path
