"""Comparisons that say where and how two results differ."""

from __future__ import annotations

import numpy as np


def _wide(x) -> np.ndarray:
  """Any array (bf16 and fp8 too) as float64 or as its own integers."""
  x = np.asarray(x)
  if x.dtype.kind in 'iub':
    return x
  return x.astype(np.float64)


def _pattern(x: np.ndarray) -> np.ndarray:
  """0 for a finite number, 1 for NaN, 2 for +inf, 3 for -inf."""
  kind = np.zeros(x.shape, np.int8)
  kind[np.isnan(x)] = 1
  kind[np.isposinf(x)] = 2
  kind[np.isneginf(x)] = 3
  return kind


def cosine_difference(a, b) -> float:
  """1 - 2ab / (aa + bb): 0 for equal arrays, whatever their size."""
  a, b = _wide(a).astype(np.float64), _wide(b).astype(np.float64)
  total = np.sum(a * a) + np.sum(b * b)
  return float(1 - 2 * np.sum(a * b) / total) if total > 0 else 0.0


def assert_close(
  actual, expected, *, atol: float, rtol: float, name: str
) -> None:
  """Raises unless |actual - expected| <= atol + rtol * |expected|.

  Shapes come first, then the pattern of NaN and inf, then numbers.

  Args:
    actual: what the code returned.
    expected: what it should be.
    atol: absolute tolerance.
    rtol: relative tolerance.
    name: of the quantity, for the message.

  Raises:
    AssertionError: naming the worst index and the cosine difference.
  """
  a = _wide(actual).astype(np.float64)
  e = _wide(expected).astype(np.float64)
  if a.shape != e.shape:
    raise AssertionError(f'{name}: shape {a.shape}, expected {e.shape}')
  words = ('a number', 'NaN', 'inf', '-inf')
  wrong = np.argwhere(_pattern(a) != _pattern(e))
  if len(wrong):
    at = tuple(int(i) for i in wrong[0])
    raise AssertionError(
      f'{name}: {len(wrong)} of {a.size} elements differ in NaN/inf pattern, '
      f'the first at {at}: {words[_pattern(a)[at]]}, expected '
      f'{words[_pattern(e)[at]]}'
    )
  finite = np.isfinite(e)
  a, e = np.where(finite, a, 0), np.where(finite, e, 0)
  excess = np.abs(a - e) - (atol + rtol * np.abs(e))
  if a.size and excess.max() > 0:
    at = np.unravel_index(int(excess.argmax()), a.shape)
    raise AssertionError(
      f'{name}: {int((excess > 0).sum())} of {a.size} elements differ, worst '
      f'at {tuple(int(i) for i in at)}: {float(a[at])}, expected '
      f'{float(e[at])} (difference {abs(a[at] - e[at]):.3g}, {atol=} '
      f'{rtol=}); cosine difference {cosine_difference(a, e):.3g}'
    )


def assert_bit_equal(actual, expected, *, name: str) -> None:
  """Raises unless shapes, dtypes and every byte are the same."""
  a, e = np.asarray(actual), np.asarray(expected)
  if (a.shape, a.dtype) != (e.shape, e.dtype):
    raise AssertionError(
      f'{name}: {a.shape} {a.dtype}, expected {e.shape} {e.dtype}'
    )
  as_bytes = lambda x: (
    np.ascontiguousarray(x)
    .reshape(-1)
    .view(np.uint8)
    .reshape(-1, x.dtype.itemsize)
  )
  different = np.flatnonzero((as_bytes(a) != as_bytes(e)).any(axis=1))
  if len(different):
    at = np.unravel_index(int(different[0]), a.shape)
    raise AssertionError(
      f'{name}: {len(different)} of {a.size} elements differ in bits, the '
      f'first at {tuple(int(i) for i in at)}: {a[at]!r}, expected {e[at]!r}'
    )


def assert_same_selection(ours, theirs, scores, k: int) -> None:
  """Raises unless two selections are the same up to equal scores.

  Every member of the symmetric difference must score within 1e-5 of the
  row's scale (its largest finite magnitude) of the k-th score. Ours must
  also be well formed: unique, ascending, then -1, min(k, visible) of them,
  none of them invisible.

  Args:
    ours: [T, k] positions, -1 for none.
    theirs: [T, any] positions; negative and invisible ones do not count.
    scores: [T, S] the oracle's scores, -inf (or NaN) where not visible.
    k: keys wanted.

  Raises:
    AssertionError: naming the row and the positions.
  """
  ours, theirs = np.asarray(ours), np.asarray(theirs)
  scores = _wide(scores).astype(np.float64)
  scores = np.where(np.isnan(scores), -np.inf, scores)
  if ours.shape != (len(scores), k):
    raise AssertionError(f'{ours.shape=}, expected {(len(scores), k)}')
  for t, (own, other, row) in enumerate(zip(ours, theirs, scores)):
    valid = own[own >= 0]
    visible = np.flatnonzero(row > -np.inf)
    wanted = min(k, len(visible))
    if (own[: len(valid)] != valid).any() or (own[len(valid) :] != -1).any():
      raise AssertionError(f'row {t}: {own} is not positions, then -1')
    if (np.diff(valid) <= 0).any():
      raise AssertionError(f'row {t}: {valid} is not unique and ascending')
    unseen = np.setdiff1d(valid, visible)
    if len(unseen):
      raise AssertionError(
        f'row {t}: selects {unseen.tolist()}, which it must not see'
      )
    if len(valid) != wanted:
      raise AssertionError(
        f'row {t}: selects {len(valid)} of {len(visible)} visible keys, '
        f'expected {wanted}'
      )
    if not wanted:
      continue
    other = np.intersect1d(other, visible)
    if len(other) != wanted:
      raise AssertionError(
        f'row {t}: the other side selects {len(other)} visible keys, '
        f'expected {wanted}'
      )
    threshold = np.sort(row[visible])[-wanted]
    finite = row[np.isfinite(row)]
    scale = np.abs(finite).max() if len(finite) else 0.0
    for position in np.setxor1d(valid, other):
      gap = abs(row[position] - threshold)
      if not gap <= 1e-5 * scale:
        side = 'ours' if position in valid else 'theirs'
        raise AssertionError(
          f'row {t}: position {position} is selected by {side} only and '
          f'scores {float(row[position])}, {gap:.3g} from the k-th score '
          f'{float(threshold)} (row scale {scale:.3g})'
        )
