"""Windows of tokens for training: step -> batch, with nothing remembered.

A document gives as many whole windows as it fills; its rest is packed with the
rests of others. So a *segment* is a run of one document in one window, and it
begins at a multiple of the cache's page: a page never holds two segments.
Between segments lie rows that belong to none (segment 0). Rows may attend, and
be asked to predict, only within their own segment, which the segment ids say;
no token id has a meaning here.

Every token is a row exactly once an epoch. Windows are dealt in the order of a
permutation that is keyed by (seed, epoch) and computed where it is needed, so
a run that is resumed at step n needs to know n and nothing else.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib

import numpy as np
from numpy.typing import ArrayLike

from glm_jax.data.token_file import TokenFile
from pallas_kernels.tiling import PAGE, cdiv, round_up

_ROUNDS = 6


@dataclasses.dataclass(frozen=True)
class Batch:
  """Windows of S rows with E more tokens of look-ahead.

  Attributes:
    tokens: ids [B, S + E] int32; 0 where there is none.
    segment_ids: [B, S + E] int32, 1, 2, .. in a window; 0 is no segment. The
      look-ahead of a window that its document outlasts is its segment's too.
    positions: [B, S + E] int32, counted from the start of the segment.
    lookahead: E.
  """

  tokens: np.ndarray
  segment_ids: np.ndarray
  positions: np.ndarray
  lookahead: int

  @property
  def row_mask(self) -> np.ndarray:
    """Which rows hold a token [B, S] bool."""
    return self.segment_ids[:, : self._rows] > 0

  def targets(self, distance: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """What each row predicts, and where that counts.

    Args:
      distance: of the target, 1 to E; 1 is the next token.

    Returns:
      ids [B, S] int32, and [B, S] bool: True where row and target are in one
      segment. Elsewhere the id means nothing.
    """
    if not 1 <= distance <= self.lookahead:
      raise ValueError(f'{distance=} must be in [1, {self.lookahead}]')
    ahead = slice(distance, distance + self._rows)
    segments = self.segment_ids[:, : self._rows]
    same = (segments > 0) & (segments == self.segment_ids[:, ahead])
    return self.tokens[:, ahead], same

  @property
  def _rows(self) -> int:
    return self.tokens.shape[1] - self.lookahead


class TokenBatches:
  """Batches of a token file, by step.

  Attributes:
    num_windows: of an epoch.
    width: tokens of a window with its look-ahead, S + E.
    steps_per_epoch: rounded up; an epoch need not end with a step.
  """

  def __init__(
    self,
    file: TokenFile,
    *,
    batch_size: int,
    window: int,
    lookahead: int = 1,
    seed: int = 0,
  ):
    """Plans the windows, which depends on the file and `window` only.

    Args:
      file: has at least one document.
      batch_size: windows of a batch.
      window: rows S of a window, a multiple of 64.
      lookahead: tokens E beyond the rows; 1 for next-token loss, one more for
        each drafted token.
      seed: of the order.
    """
    if batch_size < 1 or lookahead < 1:
      raise ValueError(f'{batch_size=} and {lookahead=} must be at least 1')
    if window < PAGE or window % PAGE:
      raise ValueError(f'{window=} must be a multiple of {PAGE}')
    if not len(file):
      raise ValueError(f'{file.path} has no documents')
    self._file = file
    self._batch_size, self._window = batch_size, window
    self.width = window + lookahead
    self._lookahead, self._seed = lookahead, seed
    self._segments, self._first = _plan(file.offsets, window)
    self.num_windows = len(self._first) - 1
    self.steps_per_epoch = cdiv(self.num_windows, batch_size)

  def batch(self, step: int) -> Batch:
    """The batch of `step` >= 0: a pure function of (seed, step)."""
    return self.windows(self.numbers(step))

  def numbers(self, step: int) -> np.ndarray:
    """Numbers of the windows in the batch of `step` >= 0, [B] int64."""
    if step < 0:
      raise ValueError(f'{step=} must not be negative')
    dealt = step * self._batch_size + np.arange(self._batch_size)
    epochs, places = np.divmod(dealt, self.num_windows)
    windows = np.empty_like(places)
    for epoch in np.unique(epochs):
      now = epochs == epoch
      windows[now] = permuted(
        places[now], self.num_windows, f'{self._seed} {epoch}'
      )
    return windows

  def windows(self, indices: ArrayLike) -> Batch:
    """Windows by number, in [0, num_windows), in the order of the file.

    Evaluation takes each once: `windows(range(a, b))`.
    """
    indices = np.asarray(indices)
    if indices.size and not 0 <= indices.min() <= indices.max() < (
      self.num_windows
    ):
      raise ValueError(f'window {indices} must be in [0, {self.num_windows})')
    shape = (len(indices), self.width)
    tokens, segment_ids, positions = (np.zeros(shape, np.int32) for _ in '123')
    for row, window in enumerate(indices):
      part = slice(self._first[window], self._first[window + 1])
      for number, segment in enumerate(self._segments[part], start=1):
        place, start, rows, end = segment.tolist()
        # Only a window's last rows can be followed by look-ahead.
        size = min(end - start, rows + self._lookahead)
        there = (row, slice(place, place + size))
        tokens[there] = self._file.tokens[start : start + size]
        segment_ids[there] = number
        positions[there] = np.arange(size)
    return Batch(tokens, segment_ids, positions, self._lookahead)


def _plan(offsets: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
  """Segments of all windows, and which are whose.

  Returns:
    [N, 4] int64, ascending by window: place in the window, start in the file,
    rows, end of the document in the file; and [windows + 1]: segments of
    window w are first[w] to first[w + 1].
  """
  starts, ends = offsets[:-1], offsets[1:]
  whole, rest = np.divmod(ends - starts, window)
  # Whole windows, document by document.
  owner = np.repeat(np.arange(len(whole)), whole)
  nth = np.arange(len(owner)) - np.repeat(np.cumsum(whole) - whole, whole)
  full = np.stack(
    [
      np.zeros_like(owner),
      starts[owner] + nth * window,
      np.full_like(owner, window),
      ends[owner],
    ],
    axis=1,
  )
  bins = _pack(rest, window)
  packed = []
  for members in bins:
    place = 0
    for document in members:
      size = int(rest[document])
      packed.append([place, ends[document] - size, size, ends[document]])
      place += round_up(size, PAGE)
  segments = np.concatenate([full, np.asarray(packed, np.int64).reshape(-1, 4)])
  counts = np.asarray([1] * len(full) + [len(b) for b in bins], np.int64)
  return segments, np.concatenate([[0], np.cumsum(counts)])


def _pack(sizes: np.ndarray, window: int) -> list[list[int]]:
  """Groups indices of `sizes` (0: nothing) so that their pages fit a window.

  Best fit, largest first: each goes where it leaves the least room.
  """
  capacity = window // PAGE
  pages = cdiv(sizes, PAGE)
  bins: list[list[int]] = []
  by_room = collections.defaultdict(list)
  for index in np.argsort(-pages, kind='stable').tolist():
    need = int(pages[index])
    if not need:
      break
    room = next((r for r in range(need, capacity) if by_room[r]), capacity)
    if room == capacity:
      bins.append([])
      chosen = len(bins) - 1
    else:
      chosen = by_room[room].pop()
    bins[chosen].append(index)
    by_room[room - need].append(chosen)
  return bins


def permuted(indices: np.ndarray, size: int, key: str) -> np.ndarray:
  """Where a permutation of [0, size), chosen by `key`, sends `indices`.

  A Feistel network over the next power of four, walked until it lands inside:
  any index alone costs a few rounds, whatever the size.
  """
  half = np.uint64(max(1, cdiv(int(size - 1).bit_length(), 2)))
  low = (np.uint64(1) << half) - np.uint64(1)
  keys = _round_keys(key)
  result = np.asarray(indices, np.uint64)
  outside = np.ones(result.shape, bool)
  while outside.any():
    left, right = result >> half, result & low
    for round_key in keys:
      left, right = right, left ^ (_mix(right ^ round_key) & low)
    result = np.where(outside, (left << half) | right, result)
    outside = result >= size
  return result.astype(np.int64)


@functools.lru_cache(maxsize=16)
def _round_keys(key: str) -> np.ndarray:
  digest = hashlib.sha512(key.encode()).digest()
  return np.frombuffer(digest, '<u8')[:_ROUNDS]


def _mix(x: np.ndarray) -> np.ndarray:
  """The last steps of SplitMix64: every bit in moves every bit out."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))
