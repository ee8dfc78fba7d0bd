"""An n-gram model of token ids: what counting alone predicts.

Interpolated Kneser-Ney smoothing with three discounts an order (Chen and
Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling",
1999, section 3): the baseline that a trained model must beat. With c the
count of the highest order, and below it the number of different tokens seen
before an n-gram,

    p(w | h) = (c(h w) - D(c(h w))) / c(h .) + g(h) p(w | h without its first)

where c(h .) sums over tokens, g(h) c(h .) is the sum of what was discounted,
and one token is predicted by 1 / V below the unigrams. A history that was
never seen leaves the word to the shorter one.

An n-gram is one int64, its tokens the digits; counts live in sorted arrays.
NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from glm_jax.data.token_file import TokenFile

# Where too few n-grams occur once to four times to estimate discounts.
_DEFAULT_DISCOUNTS = (0.5, 1.0, 1.5)


class Order(NamedTuple):
  """Counts of the n-grams of one order.

  Attributes:
    keys: [n] int64 ascending, the n-grams.
    counts: [n] int64, at least 1.
    contexts: [m] int64 ascending, their first n - 1 tokens.
    totals: [m] float64 sum of a context's counts.
    left: [m] float64 share of a context's mass that goes to shorter ones.
    discounts: [4] float64 of a count of 0, 1, 2, and more.
  """

  keys: np.ndarray
  counts: np.ndarray
  contexts: np.ndarray
  totals: np.ndarray
  left: np.ndarray
  discounts: np.ndarray


class KneserNey:
  """A trained n-gram model.

  Attributes:
    vocab_size: ids are below it.
    orders: counts of the orders from 1 on.
  """

  def __init__(
    self,
    documents: TokenFile | Sequence[np.ndarray],
    vocab_size: int,
    order: int = 5,
  ):
    """Counts a corpus; no n-gram crosses the start of a document.

    Args:
      documents: of ids; memory is about 60 bytes a token.
      vocab_size: every id is below it.
      order: longest n-gram.

    Raises:
      ValueError: no documents, or n-grams that do not fit an int64.
    """
    if order < 1 or (vocab_size + 1) ** order >= 1 << 63:
      raise ValueError(
        f'{order=} with {vocab_size=}: (vocab_size + 1) ** order must be '
        'below 2 ** 63: use a lower order'
      )
    self.vocab_size, self._base = vocab_size, vocab_size + 1
    self._order = order
    tokens = self._padded(documents)
    keys = self._grams(tokens, order)[tokens[order - 1 :] < vocab_size]
    if not len(keys):
      raise ValueError('there are no documents to count')
    keys, counts = _count(keys)
    orders = [self._make(keys, counts)]
    for n in range(order - 1, 0, -1):
      # Each longer n-gram once: how many tokens were seen before this one.
      keys, counts = _count(orders[-1].keys % self._base**n)
      orders.append(self._make(keys, counts))
    self.orders = tuple(reversed(orders))

  @property
  def num_ngrams(self) -> list[int]:
    """Different n-grams of each order."""
    return [len(order.keys) for order in self.orders]

  def probabilities(self, ids: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """Probabilities of tokens.

    Args:
      ids: [N] tokens.
      contexts: [N, order - 1] tokens before each, `vocab_size` for none.

    Returns:
      [N] float64.
    """
    ids = np.asarray(ids, np.int64)
    contexts = np.asarray(contexts, np.int64)
    p = np.full(len(ids), 1 / self.vocab_size)
    history, place = np.zeros(len(ids), np.int64), 1
    for n, order in enumerate(self.orders):
      if n:
        history = history + contexts[:, -n] * place
        place *= self._base
      where, seen = _find(order.contexts, history)
      at, there = _find(order.keys, history * self._base + ids)
      counts = np.where(there, order.counts[at], 0)
      counts = counts - order.discounts[np.minimum(counts, 3)]
      longer = counts / order.totals[where] + order.left[where] * p
      p = np.where(seen, longer, p)
    return p

  def nats(
    self, documents: TokenFile | Sequence[np.ndarray], chunk: int = 1 << 20
  ) -> np.ndarray:
    """Negative log-likelihood of every token given what precedes it.

    Args:
      documents: of ids, as in training.
      chunk: tokens at once.

    Returns:
      [tokens of all documents] float64, in nats.
    """
    tokens = self._padded(documents)
    ends = np.flatnonzero(tokens < self.vocab_size)
    before = np.arange(1 - self._order, 0)
    found = []
    for first in range(0, len(ends), chunk):
      at = ends[first : first + chunk]
      p = self.probabilities(tokens[at], tokens[at[:, None] + before])
      found.append(-np.log(p))
    return np.concatenate(found) if found else np.empty(0)

  def _padded(self, documents) -> np.ndarray:
    """All tokens, `order - 1` marks (`vocab_size`) before each document."""
    mark = np.full(self._order - 1, self.vocab_size, np.int32)
    pieces = []
    for i in range(len(documents)):
      whole = isinstance(documents, TokenFile)
      ids = documents.document(i) if whole else np.asarray(documents[i])
      if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
        raise ValueError(
          f'document {i} has ids {ids.min()} to {ids.max()}; the model has '
          f'{self.vocab_size}'
        )
      pieces += [mark, ids.astype(np.int32)]
    return np.concatenate([np.empty(0, np.int32), *pieces])

  def _grams(self, tokens: np.ndarray, n: int) -> np.ndarray:
    """Every n-gram of the stream."""
    size = max(len(tokens) - n + 1, 0)
    keys = np.zeros(size, np.int64)
    for i in range(n):
      keys *= self._base
      keys += tokens[i : i + size]
    return keys

  def _make(self, keys: np.ndarray, counts: np.ndarray) -> Order:
    discounts = estimate_discounts(counts)
    histories = keys // self._base
    first = np.flatnonzero(np.diff(histories, prepend=-1))
    totals = np.add.reduceat(counts, first).astype(np.float64)
    taken = discounts[np.minimum(counts, 3)]
    left = np.add.reduceat(taken, first) / totals
    return Order(keys, counts, histories[first], totals, left, discounts)


def estimate_discounts(counts: np.ndarray) -> np.ndarray:
  """Discounts of counts of 0, 1, 2 and more, from how often counts occur.

  With n_i n-grams of count i and Y = n_1 / (n_1 + 2 n_2), the discount of
  count i is i - (i + 1) Y n_(i + 1) / n_i (Chen and Goodman, equation 26).
  Corpora too small for that, where some n_i is 0 or a discount is not in
  (0, i], take 0.5, 1 and 1.5.
  """
  n = np.bincount(np.minimum(counts, 5), minlength=6).astype(np.float64)
  if n[1:5].all():
    y = n[1] / (n[1] + 2 * n[2])
    i = np.arange(1, 4)
    found = i - (i + 1) * y * n[2:5] / n[1:4]
    if ((found > 0) & (found <= i)).all():
      return np.concatenate([[0.0], found])
  return np.asarray([0.0, *_DEFAULT_DISCOUNTS])


def _count(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Distinct keys, ascending, and how often each occurs; sorts in place."""
  keys.sort()
  first = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
  counts = np.diff(first, append=len(keys))
  return keys[first], counts


def _find(keys: np.ndarray, wanted: np.ndarray):
  """Places in ascending `keys` (some place if absent), and if there."""
  at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return at, keys[at] == wanted
