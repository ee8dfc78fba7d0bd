"""Needle and copy probes: does a model use what lies far behind?

A needle is one line (`pairs`) put into held-out text at some depth and asked
for again at the very end. A copy is a span of other text that stands in the
context twice. Both are scored in one teacher-forced pass: a needle is found
when the likeliest token is right at every token of its value, which is what
greedy decoding would then write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from glm_jax.data.pairs import (
  FORMS,
  PROBE,
  PairSource,
  insert,
  line_ends,
  random_slice,
  snap,
  whole_lines,
)
from glm_jax.data.token_file import TokenFile
from glm_jax.text import Tokenizer

_NEAREST = 257  # the first distance that glm-nano's top-k 256 cannot reach
_ROOM = 64  # tokens of the longest question


@dataclasses.dataclass(frozen=True)
class Needles:
  """Contexts that end with the value asked for.

  Attributes:
    tokens: [N, L] int32.
    value_sizes: [N] int32; the last `value_sizes[i]` tokens are the answer.
    distances: [N] int32 tokens from the value's statement to the answer.
  """

  tokens: np.ndarray
  value_sizes: np.ndarray
  distances: np.ndarray

  def __len__(self) -> int:
    """Number of contexts."""
    return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Copies:
  """Contexts in which a span of other text stands twice.

  Attributes:
    tokens: [N, L] int32; the copy is the last `span` tokens.
    first: [N] int32, where the span stands for the first time.
    span: tokens of the span.
  """

  tokens: np.ndarray
  first: np.ndarray
  span: int

  @property
  def distances(self) -> np.ndarray:
    """[N] int32 tokens from the span to its copy."""
    return self.tokens.shape[1] - self.span - self.first

  def __len__(self) -> int:
    """Number of contexts."""
    return len(self.tokens)


def needle(
  tokenizer: Tokenizer,
  token_file: TokenFile | Sequence[np.ndarray],
  seed: int,
  count: int = 200,
  length: int = 8192,
  *,
  nearest: int = _NEAREST,
  farthest: int | None = None,
) -> Needles:
  """Contexts of exactly `length` tokens with one needle each.

  Distances are drawn evenly in their logarithm, one from each of `count`
  equal steps; the line goes to the next start of a line before, so the true
  distance, which is recorded, is a few tokens more than drawn.

  Args:
    tokenizer: of the model.
    token_file: held-out documents.
    seed: the same seed gives the same contexts.
    count: number of contexts.
    length: tokens of a context, the answer included.
    nearest: least distance; above the model's top-k it tests the indexer.
    farthest: largest distance; None is as far as the context goes.

  Raises:
    ValueError: distances that do not fit in the context, or no document that
      fills it.
  """
  farthest = length - _ROOM if farthest is None else farthest
  if not 1 <= nearest <= farthest <= length - _ROOM:
    raise ValueError(
      f'{nearest=} and {farthest=} must be ascending and at most '
      f'{length - _ROOM} in contexts of {length=}'
    )
  rng = np.random.default_rng([seed, 1])
  source = PairSource(tokenizer, seed, PROBE, FORMS[:1])
  documents, ends = _documents(token_file), line_ends(tokenizer)
  tokens = np.empty((count, length), np.int32)
  sizes, distances = np.empty(count, np.int32), np.empty(count, np.int32)
  for i, drawn in enumerate(_log_steps(rng, nearest, farthest, count)):
    pair = next(source)
    line = pair.line
    asked = line[: pair.ask + pair.value_size]
    if len(asked) > _ROOM:
      raise ValueError(f'a line of {len(asked)} tokens: {pair.name}')
    size = length - len(line) - len(asked)
    text = whole_lines(rng, documents, ends, size)
    while _holds(text, line[: pair.ask]):
      text = whole_lines(rng, documents, ends, size)
    place = int(snap(ends[text], size + len(line) - drawn))
    tokens[i] = np.concatenate([insert(text, [(place, line)]), asked])
    sizes[i], distances[i] = pair.value_size, size + len(line) - place
  return Needles(tokens, sizes, distances)


def copy(
  tokenizer: Tokenizer,
  token_file: TokenFile | Sequence[np.ndarray],
  seed: int,
  count: int = 200,
  length: int = 8192,
  *,
  span: int = 64,
  nearest: int = _NEAREST,
) -> Copies:
  """Contexts of exactly `length` tokens that end with a copy of a span.

  The span is held-out text from elsewhere, put in at the start of a line;
  distances are drawn as in `needle`.

  Args:
    tokenizer: of the model.
    token_file: held-out documents.
    seed: the same seed gives the same contexts.
    count: number of contexts.
    length: tokens of a context, the copy included.
    span: tokens that are copied.
    nearest: least distance from a token to its copy.

  Raises:
    ValueError: a context without room, or no document that fills it.
  """
  size = length - 2 * span
  if span < 1 or not 0 <= nearest - span <= size:
    raise ValueError(
      f'{span=} twice, {nearest=} apart, does not fit in {length=}'
    )
  rng = np.random.default_rng([seed, 2])
  documents, ends = _documents(token_file), line_ends(tokenizer)
  tokens = np.empty((count, length), np.int32)
  first = np.empty(count, np.int32)
  for i, drawn in enumerate(_log_steps(rng, nearest, size + span, count)):
    text = whole_lines(rng, documents, ends, size)
    copied = random_slice(rng, documents, span)
    while _holds(text, copied):
      copied = random_slice(rng, documents, span)
    first[i] = snap(ends[text], size + span - drawn)
    tokens[i] = np.concatenate([insert(text, [(first[i], copied)]), copied])
  return Copies(tokens, first, span)


def score_needles(
  model: Any, needles: Needles, *, selection: str = 'share', **options
) -> dict[str, Any]:
  """Which needles a model finds.

  Args:
    model: in the dtype to compute in.
    needles: from `needle`.
    selection: what rows attend to, one of `scoring.SELECTIONS`.
    **options: `batch` and `attention` of `scoring.score_tokens`.

  Returns:
    'count', 'found' (their number), 'share', 'nats' a value token;
    'by_distance', rows {from, to, count, found, share}; 'distances' and
    'each' (found or not) in the order of the contexts.
  """
  from glm_jax.evaluation.scoring import score_tokens

  most = int(needles.value_sizes.max())
  length = needles.tokens.shape[1]
  places = np.arange(length - most, length)
  places = np.broadcast_to(places, (len(needles), most))
  asked = places >= (length - needles.value_sizes)[:, None]
  scores = score_tokens(
    model, needles.tokens, places, selection=selection, **options
  )
  right = scores.greedy == needles.tokens[:, -most:]
  found = np.all(right | ~asked, axis=1)
  rows = []
  for low, high, which in octaves(needles.distances):
    row = {'from': low, 'to': high, 'count': int(which.sum())}
    row |= {'found': int(found[which].sum())}
    rows.append(row | {'share': float(found[which].mean())})
  return {
    'selection': selection,
    'count': len(needles),
    'found': int(found.sum()),
    'share': float(found.mean()),
    'nats': float(scores.nats[asked].mean()),
    'by_distance': rows,
    'distances': needles.distances.tolist(),
    'each': found.tolist(),
  }


def score_copies(
  model: Any, copies: Copies, *, selection: str = 'share', lead=8, **options
) -> dict[str, Any]:
  """How much better a model predicts a span when it has seen it before.

  Args:
    model: in the dtype to compute in.
    copies: from `copy`.
    selection: what rows attend to, one of `scoring.SELECTIONS`.
    lead: first tokens of the span that do not count: nobody can know yet
      that a copy begins.
    **options: `batch` and `attention` of `scoring.score_tokens`.

  Returns:
    'count'; 'first_nats', 'copy_nats' a token and 'first_accuracy',
    'copy_accuracy' of the likeliest token; 'by_distance', rows of the same
    with {from, to, count}.
  """
  from glm_jax.evaluation.scoring import score_tokens

  if not 0 <= lead < copies.span:
    raise ValueError(f'{lead=} must be in [0, {copies.span})')
  inside = np.arange(lead, copies.span)
  start = copies.tokens.shape[1] - copies.span
  starts = np.stack([copies.first, np.full_like(copies.first, start)], 1)
  # A context may begin with its span; nothing predicts its first token.
  places = np.maximum(starts[:, :, None] + inside, 1)
  scores = score_tokens(
    model,
    copies.tokens,
    places.reshape(len(copies), -1),
    selection=selection,
    **options,
  )
  shape = (len(copies), 2, len(inside))
  wanted = copies.tokens[:, start + lead :][:, None]
  right = scores.greedy.reshape(shape) == wanted
  nats = scores.nats.reshape(shape)

  def summary(which):
    means = {'count': int(which.sum())}
    for i, name in enumerate(('first', 'copy')):
      means[f'{name}_nats'] = float(nats[which, i].mean())
      means[f'{name}_accuracy'] = float(right[which, i].mean())
    return means

  rows = [
    {'from': low, 'to': high} | summary(which)
    for low, high, which in octaves(copies.distances)
  ]
  every = summary(np.ones(len(copies), bool))
  return {'selection': selection, **every, 'by_distance': rows}


def octaves(distances: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
  """Distances by powers of two: (from, to, which) of those that have any."""
  power = np.floor(np.log2(distances)).astype(int)
  return [(1 << p, (2 << p) - 1, power == p) for p in np.unique(power).tolist()]


def _documents(source) -> list[np.ndarray]:
  if isinstance(source, TokenFile):
    return [source.document(i) for i in range(len(source))]
  return list(source)


def _log_steps(rng, low: int, high: int, count: int) -> np.ndarray:
  """One integer from each of `count` equal steps in the logarithm, mixed."""
  steps = (rng.permutation(count) + rng.random(count)) / count
  drawn = np.exp(np.log(low) + steps * (np.log(high + 1) - np.log(low)))
  return np.clip(drawn.astype(int), low, high)


def _holds(text: np.ndarray, ids: np.ndarray) -> bool:
  """Whether the ids stand anywhere in the text."""
  windows = np.lib.stride_tricks.sliding_window_view(text, len(ids))
  return bool((windows == ids).all(axis=1).any())
