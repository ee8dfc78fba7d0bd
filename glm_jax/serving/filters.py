"""Token filters inside a round: masks of every row, and tokens they force.

A filtered request drafts nothing of its own, since the mask of a row needs
the tokens before it on the host. Where its filter leaves one token only
(braces, keys, quotes of a schema), that token is proposed instead: it is
always accepted, so structured output gains from drafting too.
"""

from __future__ import annotations

import numpy as np

from glm_jax.serving.sequence import Sequence


class FilterError(Exception):
  """A filter failed or allows nothing; the request ends with the message."""


def propose(
  seq: Sequence, most: int, words: int
) -> tuple[list[int], np.ndarray]:
  """Forced tokens after a sequence and the masks around them.

  Args:
    seq: with a token filter.
    most: tokens proposed at most.
    words: ceil(V / 32).

  Returns:
    t tokens, t <= most, and [t + 1, words] uint32 masks: of the first
    token, and of the token after each proposal.

  Raises:
    FilterError: the filter raised, or allows no token.
  """
  new = seq.ids[seq.prompt_tokens :]
  tokens: list[int] = []
  masks = [_mask(seq, new, words)]
  while len(tokens) < most:
    forced = _only(masks[-1])
    if forced is None or forced in seq.eos:
      break
    tokens.append(forced)
    masks.append(_mask(seq, [*new, *tokens], words))
  return tokens, np.stack(masks)


def _mask(seq: Sequence, new: list[int], words: int) -> np.ndarray:
  try:
    mask = seq.request.token_filter.allowed(new)
  except Exception as error:  # a filter is foreign code
    raise FilterError(f'the token filter failed: {error}') from error
  if mask is None:
    return np.full(words, 0xFFFFFFFF, np.uint32)
  mask = np.array(mask).view(np.uint32)
  if mask.shape != (words,):
    raise FilterError(f'the token filter gave {mask.shape}, not ({words},)')
  if not mask.any():
    raise FilterError('the token filter allows no token')
  return mask


def _only(mask: np.ndarray) -> int | None:
  """The one token that a mask allows, or None for several."""
  words = np.flatnonzero(mask)
  if len(words) != 1:
    return None
  word = int(mask[words[0]])
  if word & (word - 1):
    return None
  return int(words[0]) * 32 + word.bit_length() - 1
