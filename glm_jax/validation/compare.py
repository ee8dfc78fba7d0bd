"""Compares two runs layer by layer and says where they part.

Sets (selected positions, chosen experts) agree by one rule: every member of
the symmetric difference must score within a tolerance times the row's scale
of the k-th score (design section 4). Tensors are compared row by row: the
largest difference in a row over the row's largest magnitude, so that a few
huge rows cannot hide an error in the others.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from glm_jax.validation.walk import LayerTensors, differing_rows

TENSORS = ('selected', 'attention', 'experts', 'mlp', 'hidden')
_ROWS = 256  # rows compared at a time: bounds temporaries


@dataclasses.dataclass(frozen=True)
class Tolerance:
  """What two runs may differ by.

  Attributes:
    selection: index scores of differing keys from the k-th score, over the
      row's largest score.
    experts: the same of differing experts.
    layer: of a layer's tensors, relative to the row.
    logits: of logits, absolute while their largest magnitude is at most 10,
      then in proportion to it.
  """

  selection: float
  experts: float
  layer: float
  logits: float


# Sums of products in another order differ by 1e-6 a layer, which the layers
# above amplify: at most 2e-5 (layers) and 6e-5 (logits) on the twelve models
# of tests/model/parity_test.py.
FLOAT32 = Tolerance(selection=1e-5, experts=1e-5, layer=2e-4, logits=2e-4)
# Each side rounds every product to 2^-8, and transformers also rotates and
# normalises in bfloat16 where this code uses float32. Twice the largest
# errors of one layer on the same models: attention 0.034, MLP 0.056, keys
# 0.021, experts 0.005 and logits 0.045. Each side is that far from float32.
BFLOAT16 = Tolerance(selection=5e-2, experts=2e-2, layer=1e-1, logits=1e-1)


@dataclasses.dataclass(frozen=True)
class LayerResult:
  """How one layer compares.

  Attributes:
    layer: trunk layer.
    selected_agreement: share of rows that select alike by the rule; None for
      a shared layer, which selects nothing.
    selected_ties: rows whose sets differ, as the rule allows.
    expert_ties: the same for chosen experts; such rows are left out of `mlp`
      and `hidden`.
    errors: largest relative row error by tensor.
    absolute: largest absolute error by tensor.
    parted: the first tensor beyond tolerance, None for none.
  """

  layer: int
  selected_agreement: float | None
  selected_ties: int
  expert_ties: int
  errors: dict[str, float]
  absolute: dict[str, float]
  parted: str | None


def tolerance_of(dtype: str) -> Tolerance:
  """The tolerance of a run in 'float32' or 'bfloat16'."""
  return FLOAT32 if dtype == 'float32' else BFLOAT16


def set_violations(
  scores: np.ndarray | None, a: np.ndarray, b: np.ndarray, tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
  """Rows whose sets differ, and rows whose sets differ too much.

  Args:
    scores: [T, S] by which both sides choose; None allows no difference.
    a: [T, k] members ascending, -1 for none.
    b: [T, k] the other side's.
    tolerance: how far from the k-th score a differing member may score,
      relative to the largest finite magnitude in the row.

  Returns:
    differ and violate, both [T] bool.
  """
  width = max(a.shape[1], b.shape[1])
  a, b = (
    np.pad(s, ((0, 0), (0, width - s.shape[1])), constant_values=-1)
    for s in (a, b)
  )
  differ = differing_rows(np.sort(a, axis=1), np.sort(b, axis=1))
  violate = differ.copy()
  if scores is None:
    return differ, violate
  for t in np.flatnonzero(differ):
    ours, theirs = (np.unique(s[t][s[t] >= 0]) for s in (a, b))
    k = min(len(ours), len(theirs))
    row = scores[t]
    finite = row[np.isfinite(row)]
    if len(ours) != len(theirs) or not 0 < k <= len(finite):
      continue
    kth = np.partition(finite, len(finite) - k)[len(finite) - k]
    distance = np.abs(row[np.setxor1d(ours, theirs)] - kth)
    allowed = tolerance * np.abs(finite).max()
    # Written so that NaN is a violation.
    violate[t] = not (distance <= allowed).all()
  return differ, violate


def row_errors(
  a: np.ndarray, b: np.ndarray, rows: np.ndarray | None = None
) -> tuple[float, float]:
  """Largest relative row error and largest absolute error.

  Args:
    a: [T, D] the reference.
    b: [T, D] what is judged.
    rows: [T] bool, rows to compare; None for all.

  Returns:
    relative (to the row's largest magnitude, but at least to a thousandth of
    the tensor's) and absolute; infinite where either holds NaN or inf.
  """
  floor = 1e-3 * float(np.abs(a).max()) + 1e-30
  relative = absolute = 0.0
  for start in range(0, len(a), _ROWS):
    part = slice(start, start + _ROWS)
    error = np.abs(a[part] - b[part]).max(axis=1)
    error = np.where(np.isfinite(error), error, np.inf)
    scale = np.maximum(np.abs(a[part]).max(axis=1), floor)
    if rows is not None:
      error = np.where(rows[part], error, 0)
    relative = max(relative, float((error / scale).max()))
    absolute = max(absolute, float(error.max()))
  return relative, absolute


def compare_layer(
  reference: LayerTensors, run: LayerTensors, full: bool, tol: Tolerance
) -> LayerResult:
  """Compares one layer's tensors.

  Args:
    reference: the side that is believed.
    run: the side that is judged.
    full: the layer selects.
    tol: what is allowed.

  Returns:
    The comparison.
  """
  errors, absolute, parted = {}, {}, []
  agreement, ties, expert_ties, same = None, 0, 0, None
  if full:
    scores = run.scores if run.scores is not None else reference.scores
    differ, violate = set_violations(
      scores, reference.selected, run.selected, tol.selection
    )
    agreement = 1 - float(violate.mean())
    ties = int((differ & ~violate).sum())
    if violate.any():
      parted.append('selected')
  elif differing_rows(reference.selected, run.selected).any():
    parted.append('selected')
  if reference.experts is not None:
    differ, violate = set_violations(
      reference.choice, reference.experts, run.experts, tol.experts
    )
    expert_ties = int((differ & ~violate).sum())
    same = ~differ
    if violate.any():
      parted.append('experts')
  for name in ('attention', 'mlp', 'hidden'):
    errors[name], absolute[name] = row_errors(
      getattr(reference, name),
      getattr(run, name),
      None if name == 'attention' else same,
    )
    if not errors[name] <= tol.layer:
      parted.append(name)
  first = min(parted, key=TENSORS.index) if parted else None
  return LayerResult(
    reference.layer, agreement, ties, expert_ties, errors, absolute, first
  )


@dataclasses.dataclass(frozen=True)
class LogitsResult:
  """How logits compare.

  Attributes:
    max_abs_error: largest absolute difference.
    scale: largest magnitude of the reference.
    argmax_agreement: share of rows with the same largest logit.
    unexcused: rows with another argmax whose two logits are further apart
      in the reference than twice the allowed error.
    allowed: the largest error allowed at this scale.
  """

  max_abs_error: float
  scale: float
  argmax_agreement: float
  unexcused: int
  allowed: float

  @property
  def passed(self) -> bool:
    """Within tolerance."""
    return self.max_abs_error <= self.allowed and not self.unexcused


def compare_logits(
  reference: np.ndarray, run: np.ndarray, tol: Tolerance
) -> LogitsResult:
  """Compares [..., V] logits."""
  reference, run = (a.reshape(-1, a.shape[-1]) for a in (reference, run))
  worst, scale, agree, gaps = 0.0, 0.0, 0, []
  for start in range(0, len(reference), _ROWS):
    a, b = reference[start : start + _ROWS], run[start : start + _ROWS]
    error = np.abs(a - b).max()
    worst = max(worst, float(error) if np.isfinite(error) else np.inf)
    scale = max(scale, float(np.abs(a).max()))
    ours, theirs = a.argmax(axis=1), b.argmax(axis=1)
    agree += int((ours == theirs).sum())
    row = np.arange(len(a))
    gaps.append(a[row, ours] - a[row, theirs])
  allowed = tol.logits * max(1.0, scale / 10)
  unexcused = int((np.concatenate(gaps) > 2 * allowed).sum())
  return LogitsResult(worst, scale, agree / len(reference), unexcused, allowed)
