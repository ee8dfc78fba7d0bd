"""What several recorded runs of one model make of it, one beside another.

Records (`validate(..., record=)`) may come from other frameworks, machines
and days. Those of one model, one dtype and the same tokens form a case, whose
first record is the reference of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from etils import epath

from glm_jax.validation import compare
from glm_jax.validation.record import Meta, Record
from glm_jax.validation.result import Result, make_result

_TENSORS = ('attention', 'mlp', 'hidden')


@dataclasses.dataclass(frozen=True)
class LayerError:
  """One layer's error: ||run - reference|| / ||reference|| of all its rows.

  Attributes:
    layer: trunk layer.
    attention: of attention's output.
    mlp: of the MLP's output.
    hidden: of the hidden states above the layer.
    same_keys: share of selected keys that both selected; None where the layer
      selects nothing.
  """

  layer: int
  attention: float
  mlp: float
  hidden: float
  same_keys: float | None


@dataclasses.dataclass(frozen=True)
class Comparison:
  """One run beside its reference.

  Attributes:
    name: of the run's record.
    meta: how it was run.
    layers: errors layer by layer.
    result: the verdict `validate` would give.
    kl: [T] nats from the reference's next-token distribution; None where the
      last layer was not run.
    other_token: first position with another likeliest token, None for none.
    draft_kl: [2, K] nats a draft step, with sharing and without; None where a
      record has no drafter.
  """

  name: str
  meta: Meta
  layers: tuple[LayerError, ...]
  result: Result
  kl: np.ndarray | None
  other_token: int | None
  draft_kl: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Case:
  """Records of one model, dtype and prompt.

  Attributes:
    name: of the reference's record.
    meta: how the reference was run.
    runs: the others, each beside it.
  """

  name: str
  meta: Meta
  runs: tuple[Comparison, ...]

  @property
  def passed(self) -> bool:
    """All runs are within tolerance of the reference."""
    return all(run.result.passed for run in self.runs)


def compare_records(paths: Sequence[epath.PathLike]) -> list[Case]:
  """Groups records into cases and compares each with its reference.

  Args:
    paths: directories of records; the first of each case is believed.

  Returns:
    A case a model, dtype and prompt, in the order of their references.

  Raises:
    ValueError: a path holds no record, or a record has nothing beside it.
  """
  cases: dict[tuple, list[Record]] = {}
  for path in paths:
    record = Record(path)
    meta = record.meta
    key = (meta.config_hash, meta.dtype, meta.tokens)
    cases.setdefault(key, []).append(record)
  alone = [records[0] for records in cases.values() if len(records) == 1]
  if alone:
    raise ValueError(
      f'{alone[0].path} has no other record of its model, dtype '
      f'({alone[0].meta.dtype}) and tokens: record the others with '
      '--against, which takes them from it'
    )
  return [
    Case(
      first.path.name,
      first.meta,
      tuple(compare_pair(first, other) for other in others),
    )
    for first, *others in cases.values()
  ]


def compare_pair(reference: Record, run: Record) -> Comparison:
  """Compares the layers that both have, logits and drafts."""
  tol = compare.tolerance_of(reference.meta.dtype)
  layers = sorted({*reference.meta.layers} & {*run.meta.layers})
  errors, results = [], []
  kinds = reference.meta.config['indexer_types']
  for a, b in zip(reference.layers(layers), run.layers(layers), strict=True):
    full = kinds[a.layer] == 'full'
    results.append(compare.compare_layer(a, b, full, tol))
    sizes = {t: _distance(getattr(a, t), getattr(b, t)) for t in _TENSORS}
    same = _same_keys(a.selected, b.selected) if full else None
    errors.append(LayerError(a.layer, **sizes, same_keys=same))
  logits, kl, other = _logits(reference.logits(), run.logits(), tol)
  drafts, draft_kl = None, None
  given, made = reference.drafts(), run.drafts()
  if given is not None and made is not None:
    drafts = compare.compare_logits(given, made, tol)
    draft_kl = divergence(given, made)
  count = len(run.meta.tokens)
  return Comparison(
    name=run.path.name,
    meta=run.meta,
    layers=tuple(errors),
    result=make_result(results, logits, drafts, tol, count, None),
    kl=kl,
    other_token=other,
    draft_kl=draft_kl,
  )


def divergence(reference: np.ndarray, run: np.ndarray) -> np.ndarray:
  """KL(reference || run) in nats of [..., V] logits, in float64."""
  log_p, log_q = (_log_softmax(x.astype(np.float64)) for x in (reference, run))
  return np.maximum(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1), 0)


def _logits(reference, run, tol):
  if reference is None or run is None:
    return None, None, None
  differ = np.flatnonzero(reference.argmax(-1) != run.argmax(-1))
  return (
    compare.compare_logits(reference, run, tol),
    divergence(reference, run),
    int(differ[0]) if differ.size else None,
  )


def _log_softmax(x: np.ndarray) -> np.ndarray:
  x = x - x.max(axis=-1, keepdims=True)
  return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
  error = float(np.linalg.norm((b - a).astype(np.float64)))
  return error / (float(np.linalg.norm(a.astype(np.float64))) + 1e-30)


def _same_keys(a: np.ndarray, b: np.ndarray) -> float:
  """Share of a's selected keys that b selected too; rows are ascending."""
  both = sum(
    np.intersect1d(x[x >= 0], y[y >= 0], assume_unique=True).size
    for x, y in zip(a, b)
  )
  return both / max(int((a >= 0).sum()), 1)
