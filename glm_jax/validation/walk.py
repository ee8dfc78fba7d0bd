"""One side's run through the layers, whichever framework computes them.

A side (`torch_side`, `jax_side`) opens one layer at a time and runs it on
NumPy arrays; `walk` decides what each layer is given. Held against a
reference, a run stays comparable to the end: where a full layer selects
otherwise than the reference, the layer is run again with the reference's
selection, and rows that were sent to other experts go on with the
reference's hidden state. Both are judged and counted by `compare`.

Imports NumPy only, like everything the PyTorch side needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from glm_jax.config import ModelConfig
from glm_jax.layer_plan import layer_plan


@dataclasses.dataclass
class LayerTensors:
  """What one layer took and gave; floats are float32.

  Attributes:
    layer: trunk layer.
    input: [T, D] hidden states below the layer.
    selected: [T, k] int32 positions ascending, then -1: a full layer's own
      choice, a shared layer's carried one.
    attention: [T, D] output of attention.
    mlp: [T, D] output of the MLP or the experts.
    hidden: [T, D] hidden states above the layer.
    experts: [T, e] int32 ascending, None in a dense layer.
    choice: [T, E] what experts are chosen by, None in a dense layer.
    scores: [T, S] index scores; None in a shared layer, or not kept.
  """

  layer: int
  input: np.ndarray
  selected: np.ndarray
  attention: np.ndarray
  mlp: np.ndarray
  hidden: np.ndarray
  experts: np.ndarray | None = None
  choice: np.ndarray | None = None
  scores: np.ndarray | None = None


# Hidden states and, for a shared layer or a replay, positions.
RunLayer = Callable[[np.ndarray, np.ndarray | None], LayerTensors]


class Side(Protocol):
  """One framework's model, a layer in memory at a time."""

  framework: str
  config: ModelConfig
  notes: list[str]  # how arithmetic was aligned, for the log and the record
  versions: dict[str, str]

  def embed(self, tokens: np.ndarray) -> np.ndarray:
    """[T, D] float32 embeddings of [T] ids."""
    ...

  def layer(self, layer: int) -> contextlib.AbstractContextManager[RunLayer]:
    """Loads a layer; its memory is free again at exit."""
    ...

  def logits(self, hidden: np.ndarray) -> np.ndarray:
    """[T, V] float32 of [T, D] hidden states above the last layer."""
    ...

  def drafts(
    self, tokens: np.ndarray, hidden: np.ndarray, drafted: list[int]
  ) -> np.ndarray:
    """[2, K, V] draft logits, with sharing and without.

    Args:
      tokens: [T] verified tokens.
      hidden: [T, D] hidden states above the last layer; the last is unused,
        its token has not been through the trunk.
      drafted: K - 1 tokens that the later steps embed.
    """
    ...


def walk(
  side: Side,
  tokens: np.ndarray,
  layers: tuple[int, ...],
  expected: Iterable[LayerTensors] | None = None,
  *,
  isolated: bool = False,
) -> Iterator[tuple[LayerTensors | None, LayerTensors]]:
  """Runs a side and yields the listed layers beside the reference's.

  Args:
    side: what computes.
    tokens: [T] ids.
    layers: ascending layers to yield.
    expected: the reference's tensors of the same layers, consumed one by one
      just before the layer runs; None for none.
    isolated: run the listed layers only, each on the reference's input (and
      a shared one on its selection), so that no error is carried on.

  Yields:
    The reference's tensors of a layer (None without one), and the side's.
  """
  plan = layer_plan(side.config)
  expected = None if expected is None else iter(expected)
  x = carried = None
  if not isolated:
    x = side.embed(tokens)
  for layer in layers if isolated else range(layers[-1] + 1):
    listed = layer in layers
    reference = next(expected) if expected is not None and listed else None
    if isolated:
      x, carried = reference.input, reference.selected
    with side.layer(layer) as run:
      if plan.is_full(layer):
        out, carried = _run_full(run, x, reference)
      else:
        out = run(x, carried)
    del run  # or its layer would stay in memory beside another side's
    x = rejoin(reference, out)
    if listed:
      yield reference, out


def _run_full(run, x, reference):
  """A full layer's tensors and the selection that goes on."""
  out = run(x, None)
  if (
    reference is None
    or not differing_rows(out.selected, reference.selected).any()
  ):
    return out, out.selected
  replayed = run(x, reference.selected)
  out = dataclasses.replace(replayed, selected=out.selected, scores=out.scores)
  return out, reference.selected


def rejoin(reference: LayerTensors | None, out: LayerTensors) -> np.ndarray:
  """Hidden states to go on with: the reference's where experts differ."""
  if reference is None or out.experts is None:
    return out.hidden
  rows = differing_rows(out.experts, reference.experts)
  return np.where(rows[:, None], reference.hidden, out.hidden)


def differing_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """[T] True where two arrays of sorted sets [T, k] differ."""
  if a.shape != b.shape:
    return np.ones(len(a), bool)
  return (a != b).any(axis=1)


def contract_selection(indices: np.ndarray, topk: int) -> np.ndarray:
  """A framework's top-k indices as our contract has them.

  Args:
    indices: [T, n] of row t at position t, n <= topk, any order; future
      positions (their score was -inf) and negative ones count as absent.
    topk: columns wanted.

  Returns:
    [T, topk] int32 ascending, then -1.
  """
  T = indices.shape[0]
  row = np.arange(T)[:, None]
  absent = np.iinfo(np.int32).max
  kept = np.where((indices > row) | (indices < 0), absent, indices)
  kept = np.sort(kept.astype(np.int32), axis=1)
  kept = np.where(kept == absent, -1, kept)
  missing = topk - kept.shape[1]
  return np.pad(kept, ((0, 0), (0, missing)), constant_values=-1)
