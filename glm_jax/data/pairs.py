"""Names with values in real text: what probes ask for and training recalls.

A pair is a line such as NAME = 'VALUE', a name of two words and random
digits, that no text holds by chance. Stated once and asked for again far
behind, it can only be answered by attending to where it was stated.

Pairs of probes and pairs of training are two sets without a common member,
told apart by a checksum of the name and one of the value: no probe's answer
can have been learnt. NumPy and the tokenizer only; no jax is imported.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from glm_jax.text import Tokenizer

# How a pair is written; probes use the first, training all of them.
FORMS = (
  "{name} = '{value}'\n",
  '{name} = "{value}"\n',
  '{name} = {value}\n',
  '{name}: {value}\n',
  '# {name}: {value}\n',
)
PROBE, TRAINING = 'probe', 'training'
_PROBE_SHARE = 4  # every how manieth checksum is a probe's
_SLACK, _TRIES = 256, 100  # of the search for the end of a line


class Pair(NamedTuple):
  """A pair as token ids.

  Attributes:
    name: as text.
    value: as text.
    line: ids of the whole line.
    ask: how many ids of the line stand before the value.
    value_size: how many ids the value has.
  """

  name: str
  value: str
  line: np.ndarray
  ask: int
  value_size: int


class PairSource:
  """Random pairs of one domain, none of them twice."""

  def __init__(
    self, tokenizer: Tokenizer, seed: int, domain: str, forms: Sequence[str]
  ):
    """Reads the words of the tokenizer's vocabulary.

    Args:
      tokenizer: whose lower-case words make names.
      seed: the same seed gives the same pairs.
      domain: `PROBE` or `TRAINING`.
      forms: of `FORMS`.
    """
    if domain not in (PROBE, TRAINING):
      raise ValueError(f'{domain=} must be {PROBE!r} or {TRAINING!r}')
    self._tokenizer, self._domain, self._forms = tokenizer, domain, forms
    self._rng = np.random.default_rng([seed, zlib.crc32(domain.encode())])
    self._words = np.asarray(words(tokenizer))
    self._seen: set[str] = set()
    if len(self._words) < 32:
      raise ValueError(
        f'the vocabulary has {len(self._words)} words of lower-case letters; '
        'names need 32: use the tokenizer of a corpus of code'
      )

  def __iter__(self) -> Iterator[Pair]:
    return self

  def __next__(self) -> Pair:
    while True:
      form = self._forms[self._rng.integers(len(self._forms))]
      name, value = self._draw(self._name), self._draw(self._value)
      pair = encode_pair(self._tokenizer, form, name, value)
      if pair is not None and name not in self._seen:
        self._seen.add(name)
        return pair

  def _draw(self, make) -> str:
    while not (text := make()) or domain_of(text) != self._domain:
      pass
    return text

  def _name(self) -> str:
    name = '_'.join(self._rng.choice(self._words, 2))
    return name.upper() if self._rng.random() < 0.5 else name

  def _value(self) -> str:
    size = self._rng.integers(4, 7)
    first = '123456789'[self._rng.integers(9)]  # No number starts with 0.
    return first + ''.join(map(str, self._rng.integers(0, 10, size - 1)))


def domain_of(text: str) -> str:
  """The domain that a name or a value belongs to."""
  return TRAINING if zlib.crc32(text.encode()) % _PROBE_SHARE else PROBE


def encode_pair(
  tokenizer: Tokenizer, form: str, name: str, value: str
) -> Pair | None:
  """A pair's ids; None where its value shares a token with what surrounds it.

  The value must be tokens of its own behind the same ids whether or not the
  line goes on, or asking for it would not be the same as stating it.
  """
  before, _, after = form.partition('{value}')
  before = before.format(name=name)
  ask = tokenizer.encode(before)
  asked = tokenizer.encode(before + value)
  line = tokenizer.encode(before + value + after)
  if asked[: len(ask)] != ask or line[: len(asked)] != asked:
    return None
  line = np.asarray(line, np.int32)
  return Pair(name, value, line, len(ask), len(asked) - len(ask))


def words(tokenizer: Tokenizer) -> list[str]:
  """Lower-case ASCII words of 4 to 9 letters that are one token each."""
  texts = (tokenizer.decode([i]).strip() for i in range(tokenizer.vocab_size))
  fits = lambda s: s.isascii() and s.isalpha() and s.islower()
  return sorted({s for s in texts if 4 <= len(s) <= 9 and fits(s)})


def line_ends(tokenizer: Tokenizer) -> np.ndarray:
  """[V] bool: which tokens end a line."""
  ends = [
    tokenizer.decode([i]).endswith('\n') for i in range(tokenizer.vocab_size)
  ]
  return np.asarray(ends)


def random_slice(
  rng: np.random.Generator, documents: Sequence[np.ndarray], size: int
) -> np.ndarray:
  """`size` consecutive ids of one document, every start equally likely.

  Raises:
    ValueError: no document is that long.
  """
  starts = np.asarray([max(len(d) - size + 1, 0) for d in documents])
  ends = np.cumsum(starts)
  if not len(ends) or not ends[-1]:
    longest = max(map(len, documents), default=0)
    raise ValueError(
      f'contexts of {size} tokens need a document as long; the longest of '
      f'{len(documents)} has {longest}: ask for shorter ones'
    )
  place = rng.integers(ends[-1])
  which = int(np.searchsorted(ends, place, side='right'))
  start = int(place - (ends[which] - starts[which]))
  return np.asarray(documents[which][start : start + size], np.int32)


def whole_lines(
  rng: np.random.Generator,
  documents: Sequence[np.ndarray],
  ends: np.ndarray,
  size: int,
) -> np.ndarray:
  """As `random_slice`, the last token being the end of a line.

  Args:
    rng: moves on.
    documents: ids.
    ends: [V] bool, from `line_ends`.
    size: tokens wanted.
  """
  for _ in range(_TRIES):
    text = random_slice(rng, documents, size + _SLACK)
    found = np.flatnonzero(ends[text[size - 1 :]])
    if len(found):
      return text[found[-1] :][:size]
  raise ValueError(
    f'no line ends within {_SLACK} tokens, {_TRIES} times: use other text'
  )


def insert(
  text: np.ndarray, parts: Sequence[tuple[int, np.ndarray]]
) -> np.ndarray:
  """Text with ids put in before the given places of the text, in order."""
  pieces, last = [], 0
  for place, ids in parts:
    pieces += [text[last:place], ids]
    last = place
  return np.concatenate([*pieces, text[last:]])


def recall_documents(
  tokenizer: Tokenizer,
  texts: Sequence[str | np.ndarray],
  seed: int,
  n: int,
  length: int = 8192,
  pairs: int = 24,
) -> np.ndarray:
  """Training documents of real text in which many pairs are restated.

  Each pair stands twice: distances between the two are drawn evenly in their
  logarithm from 32 tokens to the whole document, places evenly, both at
  starts of lines. Pairs differ between documents and from every probe's.

  Args:
    tokenizer: of the model.
    texts: real text, or its ids; one of them at least as long as a document.
    seed: the same seed gives the same documents.
    n: number of documents.
    length: tokens of a document.
    pairs: of a document; they must leave half of it to the text.

  Returns:
    [n, length] int32.

  Raises:
    ValueError: no text is long enough, or the pairs leave no room for it.
  """
  rng = np.random.default_rng([seed, n, length])
  source = PairSource(tokenizer, seed, TRAINING, FORMS)
  ids = [
    np.asarray(tokenizer.encode(t)) if isinstance(t, str) else t for t in texts
  ]
  ends = line_ends(tokenizer)
  result = np.empty((n, length), np.int32)
  for row in result:
    lines = [pair.line for pair, _ in zip(source, range(pairs))]
    room = length - 2 * sum(map(len, lines))
    if room < length // 2:
      raise ValueError(
        f'{pairs=} take {length - room} of {length=} tokens: use fewer'
      )
    text = random_slice(rng, ids, room)
    gaps = np.exp(rng.uniform(np.log(32), np.log(room - 32), pairs))
    first = rng.uniform(0, room - gaps)
    wanted = np.concatenate([first, first + gaps])
    order = np.argsort(wanted, kind='stable')
    places = snap(ends[text], wanted[order].astype(int))
    row[:] = insert(
      text, [(p, lines[i % pairs]) for p, i in zip(places, order)]
    )
  return result


def snap(ends: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """The starts of lines at or next before the wanted places.

  Args:
    ends: [n] bool, which token of the text ends a line.
    wanted: places in the text.

  Returns:
    Places in the text; 0 where no line starts before the wanted one.
  """
  starts = np.concatenate([[0], np.flatnonzero(ends) + 1])
  return starts[np.searchsorted(starts, wanted, side='right') - 1]
