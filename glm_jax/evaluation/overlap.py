"""How much the selections of neighbouring queries, and of layers, agree.

A kernel that serves a tile of queries fetches the union of what they select;
IndexShare lets layers attend with another layer's selection. Both pay off as
far as selections overlap. Only queries with more visible keys than top-k
count: before that, everything is selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from glm_jax.layer_plan import layer_plan
from glm_jax.model import Model, forward

DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TILES = (8, 16, 32)


def selections(model: Model, tokens: np.ndarray) -> np.ndarray:
  """What inference selects in one context, prefilled at once.

  Args:
    model: in the dtype to compute in.
    tokens: [T] ids.

  Returns:
    [full layers, T, k] int32 positions, -1 for none.
  """
  return np.asarray(_selected(model, np.asarray(tokens, np.int32)[None]))


@jax.jit
def _selected(model, tokens):
  return forward(model, tokens, capture=('selected',)).captured['selected'][
    :, 0
  ]


def selection_overlap(
  model: Model,
  windows: np.ndarray,
  *,
  distances: Sequence[int] = DISTANCES,
  tiles: Sequence[int] = TILES,
) -> list[dict[str, Any]]:
  """Overlap of a model's selections over contexts, by position.

  Args:
    model: in the dtype to compute in.
    windows: [N, T] ids, T above the model's top-k.
    distances: between two queries.
    tiles: numbers of consecutive queries, each beginning at a multiple.

  Returns:
    Rows {kind, layer, from, to, value, random} of positions `from` to `to`,
    means over contexts and queries. `random` is what selections drawn
    blindly from the visible keys would give. By kind:
      'neighbours', with `distance`: the share of a query's k keys that the
        query so much later selects too.
      'tile', with `queries`: keys in the union, in units of k.
      'layers', with `other`: Jaccard index of two full layers' selections.
  """
  k, T = model.config.indexer.topk, windows.shape[1]
  if T <= k:
    raise ValueError(
      f'contexts of {T} tokens are selected whole by top-k {k}: use longer ones'
    )
  layers = layer_plan(model.config).full_layers
  totals: dict[tuple, np.ndarray] = {}
  for tokens in windows:
    chosen = [selection_bits(s, T) for s in selections(model, tokens)]
    for key, value in _measures(chosen, k, distances, tiles):
      totals[key] = totals.get(key, 0) + value / len(windows)
  rows = []
  for (kind, name, size, layer), values in totals.items():
    places = np.arange(k, k + len(values))
    if kind == 'tile':
      places = np.arange(len(values)) * size
    blind = _blind(kind, size, k, places)
    for low, high in _buckets(k, T):
      here = (places >= low) & (places < high)
      if not here.any():
        continue
      row = {'kind': kind, 'layer': layers[layer]}
      row[name] = layers[size] if kind == 'layers' else size
      row |= {'from': low, 'to': high - 1}
      row['value'] = float(values[here].mean())
      rows.append(row | {'random': float(blind[here].mean())})
  return rows


def selection_bits(slots: np.ndarray, size: int) -> np.ndarray:
  """Selections [T, k] of positions below `size` as bit sets [T, words]."""
  T = len(slots)
  mask = np.zeros((T, size + 1), bool)
  # -1 is the last column, which is dropped.
  mask[np.arange(T)[:, None], slots] = True
  bits = np.packbits(mask[:, :size], axis=1)
  pad = -bits.shape[1] % 8
  return np.ascontiguousarray(np.pad(bits, ((0, 0), (0, pad)))).view(np.uint64)


def _measures(chosen, k, distances, tiles):
  """(kind, name, number, layer) and values by query from k on, or by tile."""
  size = lambda bits: np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
  for layer, bits in enumerate(chosen):
    late = bits[k:]
    for d in distances:
      if d < len(late):
        both = size(late[:-d] & late[d:]) / k
        yield ('neighbours', 'distance', d, layer), both
    for n in tiles:
      whole = bits[: len(bits) // n * n].reshape(-1, n, bits.shape[1])
      union = size(np.bitwise_or.reduce(whole, axis=1)) / k
      yield ('tile', 'queries', n, layer), union
    for other in range(layer + 1, len(chosen)):
      both = size(late & chosen[other][k:])
      yield ('layers', 'other', other, layer), both / (2 * k - both)


def _blind(kind, size, k, places):
  """Expected values for selections drawn evenly from the visible keys."""
  visible = places + 1
  if kind == 'neighbours':
    return k / (visible + size)
  if kind == 'layers':
    share = k / visible
    return share / (2 - share)
  # A key visible to all of a tile is in its union unless all pass it over.
  return visible * (1 - (1 - np.minimum(k / visible, 1)) ** size) / k


def _buckets(k: int, T: int) -> list[tuple[int, int]]:
  """Octaves of positions from k to T."""
  edges = [k]
  while edges[-1] < T:
    edges.append(min(2 * edges[-1], T))
  return list(zip(edges[:-1], edges[1:]))


def selection_agreement(ours: np.ndarray, theirs: np.ndarray) -> float:
  """Mean share of a query's keys that two selections have in common.

  Serving and training that select different keys for the same tokens compute
  different probabilities (known fault 52): replay one in the other
  (`training.forward.trunk`), or know how far they agree.

  Args:
    ours: [..., k] int32 positions in any order, -1 for none.
    theirs: the same, for the same queries.

  Returns:
    From 0 to 1, over the queries that select anything.
  """
  a, b = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (ours, theirs))
  if a.shape != b.shape:
    raise ValueError(f'selections of {ours.shape} and {theirs.shape} differ')
  size = int(max(a.max(), b.max(), 0)) + 1
  total = count = 0
  for rows in np.array_split(np.arange(len(a)), max(len(a) // 4096, 1)):
    first, second = selection_bits(a[rows], size), selection_bits(b[rows], size)
    number = lambda bits: np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
    largest = np.maximum(number(first), number(second))
    some = largest > 0
    total += (number(first & second)[some] / largest[some]).sum()
    count += some.sum()
  return float(total / max(count, 1))
