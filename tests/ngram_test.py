"""Kneser-Ney against its definition, computed with dictionaries."""

import collections

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from glm_jax.evaluation import ngram


class Definition:
  """Sets and dictionaries, one probability at a time."""

  def __init__(self, documents, vocab_size, order):
    self.V, self.order = vocab_size, order
    self.counts = [collections.Counter() for _ in range(order + 1)]
    before = [collections.defaultdict(set) for _ in range(order)]
    for document in documents:
      padded = ['start'] * (order - 1) + list(document)
      for end in range(order, len(padded) + 1):
        gram = tuple(padded[end - order : end])
        self.counts[order][gram] += 1
        for n in range(1, order):
          before[n][gram[order - n :]].add(gram[order - n - 1])
    for n in range(1, order):
      self.counts[n].update({g: len(s) for g, s in before[n].items()})
    self.discounts = [self._discounts(c.values()) for c in self.counts]

  @staticmethod
  def _discounts(values):
    n1, n2, n3, n4 = (sum(v == i for v in values) for i in (1, 2, 3, 4))
    if 0 in (n1, n2, n3, n4):
      return [0, 0.5, 1, 1.5]
    y = n1 / (n1 + 2 * n2)
    own = [0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
    fine = all(0 < d <= i for i, d in enumerate(own) if i)
    return own if fine else [0, 0.5, 1, 1.5]

  def probability(self, word, history):
    n = len(history) + 1
    shorter = 1 / self.V
    if n > 1:
      shorter = self.probability(word, history[1:])
    seen = {g: c for g, c in self.counts[n].items() if g[:-1] == history}
    if not seen:
      return shorter
    d = self.discounts[n]
    total = sum(seen.values())
    spared = sum(d[min(c, 3)] for c in seen.values())
    c = seen.get((*history, word), 0)
    return (max(c - d[min(c, 3)], 0) + spared * shorter) / total


def corpus(seed, vocab_size, sizes, power=1.2):
  rng = np.random.default_rng(seed)
  p = 1 / np.arange(1, vocab_size + 1) ** power
  return [rng.choice(vocab_size, n, p=p / p.sum()) for n in sizes]


class KneserNeyTest(parameterized.TestCase):
  @parameterized.parameters((1, 7), (2, 7), (3, 30), (5, 5), (5, 40))
  def test_equals_the_definition_and_sums_to_one(self, order, vocab_size):
    documents = corpus(order, vocab_size, (700, 300, 1, 2))
    model = ngram.KneserNey(documents, vocab_size, order)
    oracle = Definition(documents, vocab_size, order)
    rng = np.random.default_rng(0)
    words = np.arange(vocab_size)
    # Histories that were seen, the start, and ones that were not.
    histories = [[vocab_size] * (order - 1)]
    histories += [documents[0][i : i + order - 1] for i in (3, 50, 90)]
    histories += list(rng.integers(0, vocab_size, (4, order - 1)))
    for history in histories:
      contexts = np.tile(np.asarray(history, int), (vocab_size, 1))
      contexts = contexts.reshape(vocab_size, order - 1)
      found = model.probabilities(words, contexts)
      names = ('start' if h == vocab_size else int(h) for h in history)
      history = tuple(names)
      wanted = [oracle.probability(w, history) for w in range(vocab_size)]
      np.testing.assert_allclose(found, wanted, rtol=1e-12)
      np.testing.assert_allclose(found.sum(), 1, rtol=1e-12)

  def test_estimates_discounts_where_it_can(self):
    # n1 .. n4 = 10, 4, 2, 1: Y = 10 / 18.
    counts = np.repeat([1, 2, 3, 4, 9], [10, 4, 2, 1, 3])
    y = 10 / 18
    wanted = [0, 1 - 0.8 * y, 2 - 1.5 * y, 3 - 2 * y]
    np.testing.assert_allclose(ngram.estimate_discounts(counts), wanted)
    model = ngram.KneserNey(corpus(0, 40, (4000,)), 40, 3)
    for order in model.orders[1:]:
      assert order.discounts.tolist() != [0, 0.5, 1, 1.5]

  def test_by_hand(self):
    """'a a b' and 'b a' in bigrams; both orders too small for estimates.

    Bigrams: ^a, aa, ab, ^b, ba, once each. Before a: ^, a, b; before b: a, ^.
    p(a) = (3 - 1.5) / 5 + (1.5 + 1) / 5 * 1/2 = 0.55, p(b) = 0.45.
    p(a | a) = (1 - 0.5) / 2 + (0.5 + 0.5) / 2 * 0.55 = 0.525.
    p(a | b) = (1 - 0.5) / 1 + 0.5 * 0.55 = 0.775.
    """
    model = ngram.KneserNey([np.array([0, 0, 1]), np.array([1, 0])], 2, 2)
    assert model.num_ngrams == [2, 5]
    found = model.probabilities([0, 1, 0], [[0], [0], [1]])
    np.testing.assert_allclose(found, [0.525, 0.475, 0.775])

  def test_nats_do_not_cross_documents(self):
    documents = corpus(1, 20, (400, 300))
    model = ngram.KneserNey(documents, 20, 3)
    held_out = corpus(2, 20, (30, 1, 20))
    nats = model.nats(held_out, chunk=7)
    alone = [model.nats([ids]) for ids in held_out]
    np.testing.assert_array_equal(nats, np.concatenate(alone))
    oracle = Definition(documents, 20, 3)
    first = -np.log(oracle.probability(held_out[2][0], ('start', 'start')))
    np.testing.assert_allclose(nats[31], first)
    # Text like that of training is predicted better than by chance.
    assert nats.mean() < np.log(20) - 0.2

  def test_bad_input_is_refused(self):
    with pytest.raises(ValueError, match='lower order'):
      ngram.KneserNey([np.arange(3)], 154_880, 5)
    with pytest.raises(ValueError, match='no documents'):
      ngram.KneserNey([], 10)
    with pytest.raises(ValueError, match='ids 0 to 10'):
      ngram.KneserNey([np.arange(11)], 10)


if __name__ == '__main__':
  absltest.main()
