"""Loss by position in the window: does the model gain from a longer past?

A window is one stretch of one document, so row and position are the same, and
every window has every position. What is kept is each window's mean of each
bucket of positions: two models are compared window by window, which cancels
what makes one text harder than another.

Standard errors are over windows (or seeds) as independent draws. Windows of
one document are alike, so the error of a mean is somewhat too small; that of
a paired difference hardly.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from glm_jax.data.token_file import TokenFile
from glm_jax.evaluation.scoring import eval_options, window_nats
from glm_jax.model import Model
from glm_jax.training.windows import Windows
from pallas_kernels.tiling import PAGE


@dataclasses.dataclass(frozen=True)
class PositionLosses:
  """Bucketed losses of one model over windows.

  Attributes:
    edges: bucket b is positions edges[b] to edges[b + 1] - 1 of the row that
      predicts.
    nats: [N, buckets] float64 mean nats a token of each window.
    weights: [buckets] rows of a bucket that predict.
    windows: digest of the windows' tokens: equal where pairs may be made.
    selection: what rows attended to.
  """

  edges: tuple[int, ...]
  nats: np.ndarray
  weights: np.ndarray
  windows: str
  selection: str

  @property
  def loss(self) -> float:
    """Mean nats a token over all positions."""
    return float(np.average(self.nats.mean(0), weights=self.weights))

  def rows(self) -> list[dict[str, Any]]:
    """One row a bucket: {from, to, nats, standard_error}."""
    return [
      _place(self.edges, b) | {'nats': mean, 'standard_error': error}
      for b, (mean, error) in enumerate(_mean_and_error(self.nats))
    ]

  @classmethod
  def from_json(cls, content: dict[str, Any]) -> PositionLosses:
    """What a JSON file holds that was written from this."""
    arrays = {k: np.asarray(content[k]) for k in ('nats', 'weights')}
    return cls(**(content | arrays | {'edges': tuple(content['edges'])}))


def bucket_edges(length: int) -> tuple[int, ...]:
  """Octaves from one page on, halved above 1,024."""
  edges = [0] + [PAGE << i for i in range(32)]
  edges += [3 << i for i in range(9, 32)]
  return (*sorted(e for e in edges if e < length), length)


def window_starts(
  token_file: TokenFile, length: int, count: int | None = None
) -> list[int]:
  """Where whole windows of documents begin in the file, evenly spread.

  Args:
    token_file: documents; what does not fill a window is left out.
    length: rows of a window; the token behind it is the document's too.
    count: of windows; None or too many is all.

  Raises:
    ValueError: no document fills a window.
  """
  places: list[int] = []
  for a, b in zip(token_file.offsets[:-1], token_file.offsets[1:]):
    places += range(int(a), int(b) - length, length)
  if not places:
    raise ValueError(
      f'no document of {token_file.path} has more than {length} tokens: ask '
      'for shorter windows'
    )
  if count is not None and count < len(places):
    picked = np.linspace(0, len(places), count, endpoint=False).astype(int)
    places = [places[i] for i in picked]
  return places


def full_windows(
  token_file: TokenFile, length: int, count: int | None = None
) -> np.ndarray:
  """The windows of `window_starts` with the token behind each.

  Returns:
    [N, length + 1] int32.
  """
  take = lambda a: np.asarray(token_file.tokens[a : a + length + 1], np.int32)
  return np.stack([take(a) for a in window_starts(token_file, length, count)])


def losses_by_position(
  model: Model,
  windows: np.ndarray,
  *,
  selection: str = 'share',
  batch: int = 8,
  attention: str = 'auto',
  edges: Sequence[int] | None = None,
) -> PositionLosses:
  """Losses of a model by position.

  Args:
    model: in the dtype to compute in.
    windows: [N, S + 1] from `full_windows`, S a multiple of 64.
    selection: what rows attend to, one of `scoring.SELECTIONS`.
    batch: windows at once.
    attention: as in `ForwardOptions`.
    edges: of the buckets, from 0 to S.

  Raises:
    ValueError: windows of no whole pages, or edges that do not fit them.
  """
  N, S = windows.shape[0], windows.shape[1] - 1
  edges = bucket_edges(S) if edges is None else tuple(edges)
  if S % PAGE or S < PAGE:
    raise ValueError(f'windows of {S} rows must be whole pages of {PAGE}')
  if edges[0] or edges[-1] != S or min(np.diff(edges)) < 1:
    raise ValueError(f'{edges=} must ascend from 0 to {S}')
  options = eval_options(model.config, selection, S, attention)
  batch = min(batch, N)
  parts = []
  for first in range(0, N, batch):
    # The last batch is filled up, so that one program serves all.
    which = np.arange(first, first + batch) % N
    nats, _ = window_nats(model, _windows(windows[which]), options)
    nats = np.asarray(jax.device_get(nats), np.float64)
    parts.append(np.add.reduceat(nats, edges[:-1], axis=1))
  weights = np.diff(edges)
  digest = f'{N} x {S} {zlib.crc32(np.ascontiguousarray(windows)):08x}'
  means = np.concatenate(parts)[:N] / weights
  return PositionLosses(edges, means, weights, digest, selection)


def paired_difference(
  ours: Sequence[PositionLosses], theirs: Sequence[PositionLosses]
) -> list[dict[str, Any]]:
  """How much higher our loss is, by position, window by window.

  Args:
    ours: a model's losses, one for each seed.
    theirs: the losses it is measured against, by the same seeds.

  Returns:
    A row a bucket: {from, to, nats (of theirs), difference, error_windows,
    error_seeds (None with one seed), upper, upper_share}. `upper` is the
    difference and twice the larger error, `upper_share` its share of theirs.

  Raises:
    ValueError: other windows, other buckets, or other numbers of seeds.
  """
  every = [*ours, *theirs]
  if not ours or len(ours) != len(theirs):
    raise ValueError(
      f'{len(ours)} runs cannot be paired with {len(theirs)}: give one of '
      'each for every seed'
    )
  if len({(x.windows, x.edges) for x in every}) > 1:
    raise ValueError(
      'losses of different windows or buckets cannot be paired: '
      + ', '.join(sorted({f'{x.windows} {x.edges}' for x in every}))
    )
  stack = lambda xs: np.stack([x.nats for x in xs])
  base, difference = stack(theirs), stack(ours) - stack(theirs)
  windows = _mean_and_error(difference.mean(0))
  seeds = _mean_and_error(difference.mean(1))
  rows = []
  for b, nats in enumerate(base.mean((0, 1)).tolist()):
    mean, error = windows[b]
    over_seeds = seeds[b][1]
    upper = mean + 2 * max(e for e in (error, over_seeds, 0.0) if e is not None)
    row = _place(ours[0].edges, b) | {'nats': nats, 'difference': mean}
    row |= {'error_windows': error, 'error_seeds': over_seeds}
    rows.append(row | {'upper': upper, 'upper_share': upper / nats})
  return rows


def _windows(tokens: np.ndarray) -> Windows:
  """[B, S + 1] tokens of one segment each."""
  place = np.arange(tokens.shape[1], dtype=np.int32)
  return Windows(
    tokens, np.ones_like(tokens), np.broadcast_to(place, tokens.shape)
  )


def _place(edges, b: int) -> dict[str, int]:
  return {'from': int(edges[b]), 'to': int(edges[b + 1]) - 1}


def _mean_and_error(
  values: np.ndarray,
) -> list[tuple[float, float | None]]:
  """Mean and standard error over axis 0, by column; None for one row."""
  n = len(values)
  means = values.mean(0).tolist()
  if n == 1:
    return [(m, None) for m in means]
  errors = values.std(0, ddof=1) / np.sqrt(n)
  return list(zip(means, errors.tolist()))
