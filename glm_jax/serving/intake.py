"""From a request to a sequence: everything that can be refused up front."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence as Seq

import numpy as np

from glm_jax.serving.config import EngineConfig
from glm_jax.serving.request import InvalidRequest, Request
from glm_jax.serving.sequence import Sequence
from glm_jax.serving.steps import MAX_STOP_IDS
from pallas_kernels.tiling import PAGE, cdiv


@dataclasses.dataclass(frozen=True)
class Intake:
  """What requests are checked against.

  Attributes:
    config: the engine's.
    vocab_size: ids are below it.
    eos: ids that end a request unless it says otherwise.
  """

  config: EngineConfig
  vocab_size: int
  eos: Seq[int]

  def sequence(self, request: Request, arrival: int) -> Sequence:
    """A checked request as a sequence.

    Args:
      request: as submitted.
      arrival: its number; seeds requests that bring no seed.

    Returns:
      The sequence, waiting.

    Raises:
      InvalidRequest: it can never run.
    """
    p, ids = request.sampling, self._prompt(request)
    drafts = p.num_speculative_tokens
    if drafts is None:
      drafts = self.config.num_speculative_tokens
    if drafts > self.config.most_drafts:
      raise InvalidRequest(
        f'num_speculative_tokens={drafts} exceeds the engine limit of '
        f'{self.config.most_drafts}'
      )
    eos = frozenset(p.stop_token_ids)
    eos |= frozenset(() if p.ignore_eos else self.eos)
    if len(eos) > MAX_STOP_IDS:
      raise InvalidRequest(
        f'{len(eos)} stop ids: at most {MAX_STOP_IDS}, the eos ids included'
      )
    seed = self.config.seed + arrival if p.seed is None else p.seed
    places = self.config.most_drafts
    return Sequence(
      request=request,
      arrival=arrival,
      limit=len(ids) + self._new_tokens(request),
      drafts=drafts,
      eos=eos,
      seed=seed % 2**32,
      ids=ids,
      drafted=[0] * places,
      accepted=[0] * places,
      times={'arrival': time.monotonic()},
    )

  def _prompt(self, request: Request) -> list[int]:
    ids = np.asarray(request.prompt_ids, np.int64)
    if not ids.size:
      raise InvalidRequest('the prompt is empty: give at least one token')
    bad = (ids < 0) | (ids >= self.vocab_size)
    if bad.any():
      raise InvalidRequest(
        f'token id {ids[bad.argmax()]} in the prompt: ids are 0 to '
        f'{self.vocab_size - 1}'
      )
    return ids.tolist()

  def _new_tokens(self, request: Request) -> int:
    n, new = len(request.prompt_ids), request.sampling.max_new_tokens
    window = self.config.max_model_len
    wanted = window - n if new is None else new
    if wanted < 1 or n + wanted > window:
      raise InvalidRequest(
        f'{n} prompt tokens and max_new_tokens={new} exceed the window of '
        f'{window}: shorten one of them'
      )
    pages = cdiv(n + wanted, PAGE)
    if pages > self.config.num_pages:
      raise InvalidRequest(
        f'{n} prompt tokens and {wanted} new ones need {pages} cache pages; '
        f'the engine has {self.config.num_pages}'
      )
    return wanted
