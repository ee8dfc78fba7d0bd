"""`generate`: from prompts to tokens and text, with or without drafting."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.decoding import PREFILL_CHUNK, DecodeState, decode_step, start
from glm_jax.drafting import DraftOptions, drafter
from glm_jax.model import Model
from glm_jax.plan import LocalPlan
from glm_jax.sampling import sampling_params
from glm_jax.speculative import speculative_step, start_drafting
from glm_jax.text import TextStream, Tokenizer, find_stop


@dataclasses.dataclass(frozen=True)
class DraftStatistics:
  """How drafting went, over all rounds that drafted.

  Attributes:
    rounds: rounds of one sequence with at least one draft.
    drafted: [K] rounds that proposed a draft at each position.
    accepted: [K] rounds that accepted it.
    passes: draft passes of the whole batch.
    index_calls: times the drafter's indexer ran in them.
  """

  rounds: int
  drafted: tuple[int, ...]
  accepted: tuple[int, ...]
  passes: int
  index_calls: int

  @property
  def accept_length(self) -> float:
    """Accepted drafts a round, the bonus token not counted."""
    return sum(self.accepted) / max(self.rounds, 1)

  @property
  def accept_length_with_bonus(self) -> float:
    """Tokens a round: accepted drafts and the one after them."""
    return self.accept_length + 1


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
  """What `generate` returns.

  Attributes:
    tokens: new ids of each prompt, an eos included.
    text: new text of each prompt up to a stop string; None without a
      tokenizer.
    seconds_prefill: wall seconds of prefill, compilation included.
    seconds_decode: wall seconds of decoding, compilation included.
    drafts: None without drafting.
  """

  tokens: list[list[int]]
  text: list[str] | None
  seconds_prefill: float
  seconds_decode: float
  drafts: DraftStatistics | None = None


def check_prompts(
  prompts: Sequence[Sequence[int]], max_new_tokens: int, config
) -> None:
  """Raises `ValueError` for prompts that cannot be run; nothing is cut."""
  if not prompts:
    raise ValueError('no prompt given')
  if max_new_tokens < 1:
    raise ValueError(f'{max_new_tokens=} must be at least 1')
  limit = config.max_position_embeddings
  for i, prompt in enumerate(prompts):
    if not len(prompt):
      raise ValueError(f'prompt {i} is empty: give at least one token')
    if len(prompt) + max_new_tokens > limit:
      raise ValueError(
        f'prompt {i} has {len(prompt)} tokens; with {max_new_tokens=} it '
        f'exceeds the model window of {limit}: shorten one of them'
      )
    bad = [t for t in prompt if not 0 <= t < config.vocab_size]
    if bad:
      raise ValueError(
        f'prompt {i} holds token id {bad[0]}: ids are 0 to '
        f'{config.vocab_size - 1}'
      )


def generate(
  model: Model,
  prompts: Sequence[Sequence[int]],
  *,
  max_new_tokens: int = 128,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  seed: int = 0,
  eos_token_ids: Sequence[int] | None = None,
  stop: Sequence[str] = (),
  tokenizer: Tokenizer | None = None,
  num_speculative_tokens: int = 0,
  draft_options: DraftOptions | None = None,
  adaptive_drafts: bool = False,
  prefill_chunk: int = PREFILL_CHUNK,
  cache_dtype: str = 'auto',
  plan: LocalPlan | None = None,
) -> GenerateOutput:
  """Continues prompts.

  Args:
    model: the model.
    prompts: token ids of each prompt, of any lengths.
    max_new_tokens: new tokens of each prompt at most.
    temperature: 0 for greedy.
    top_k: tokens kept; 0 keeps all.
    top_p: probability kept after top_k; 1 keeps all.
    min_p: least probability relative to the best; 0 keeps all.
    seed: prompt i is sampled with the request seed `seed + i`.
    eos_token_ids: ids that end a sequence; None for the config's.
    stop: strings that end a sequence; they need the tokenizer.
    tokenizer: turns ids into text.
    num_speculative_tokens: drafts of a round, K; 0 decodes plainly.
    draft_options: how drafts are made; None shares index and rows if the
      config says so.
    adaptive_drafts: fewer drafts after rejections, up to K again later.
    prefill_chunk: rows of one prefill step at most.
    cache_dtype: 'auto', 'bf16', 'f32' or 'fp8'.
    plan: tiling, dispatch and placement; None for one device.

  Returns:
    New tokens, text, timings and draft statistics.

  Raises:
    ValueError: an empty or too long prompt, an id outside the vocabulary, a
      parameter out of range, stop strings without a tokenizer, or drafts
      without a drafter.
  """
  plan = plan or LocalPlan()
  K = num_speculative_tokens
  check_prompts(prompts, max_new_tokens, model.config)
  if prefill_chunk < 1:
    raise ValueError(f'{prefill_chunk=} must be at least 1')
  if stop and tokenizer is None:
    raise ValueError(f'{stop=} needs a tokenizer: the model has none')
  if not 0 <= K <= 8:
    raise ValueError(f'num_speculative_tokens={K} must be 0 to 8')
  if K:
    drafter(model)
  eos = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
  params = sampling_params(
    len(prompts),
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    min_p=min_p,
    seed=seed,
  )
  begin = time.perf_counter()
  state = start(
    model,
    prompts,
    max_new_tokens,
    params,
    plan,
    prefill_chunk=prefill_chunk,
    cache_dtype=cache_dtype,
    num_drafts=K,
    eos=eos,
  )
  jax.block_until_ready(state)
  prefilled = time.perf_counter()
  out = _Collector(len(prompts), stop, tokenizer, K)
  if K:
    share = model.config.mtp.share_index_and_kv
    options = draft_options or DraftOptions(share, share)
    _speculate(model, state, out, K, options, adaptive_drafts, plan)
  else:
    _decode(model, state, out, plan)
  seconds = time.perf_counter() - prefilled
  return GenerateOutput(
    out.tokens,
    out.finish(),
    prefilled - begin,
    seconds,
    out.statistics() if K else None,
  )


def _decode(model, state: DecodeState, out: _Collector, plan) -> None:
  """Plain decoding until every sequence is done."""
  ones = np.ones(len(out.tokens), np.int32)
  while not out.done.all():
    state, _ = decode_step(model, state, plan=plan)
    token, done = jax.device_get((state.last_token, state.done))
    if out.add(token[:, None], ones * ~out.done, done).any():
      state = dataclasses.replace(state, done=jnp.asarray(out.done))


def _speculate(model, state, out, K, options, adaptive, plan) -> None:
  """Drafting rounds until every sequence is done."""
  state = start_drafting(model, state, K)
  own = jnp.full((len(out.tokens), K), -1, jnp.int32)
  while not out.done.all():
    state, round_ = speculative_step(
      model, state, own, plan=plan, options=options, adaptive=adaptive
    )
    tokens, count, drafted, accepted, index_calls, done = jax.device_get(
      (*round_[:5], state.decode.done)
    )
    out.count(drafted, accepted, index_calls)
    if out.add(tokens, count, done).any():
      decode = dataclasses.replace(state.decode, done=jnp.asarray(out.done))
      state = dataclasses.replace(state, decode=decode)


class _Collector:
  """New tokens and text of a batch; finds stop strings, counts drafts."""

  def __init__(self, batch: int, stop, tokenizer: Tokenizer | None, K: int):
    self.tokens: list[list[int]] = [[] for _ in range(batch)]
    self.done = np.zeros(batch, bool)
    self._stop = tuple(stop)
    self._longest = max((len(s) for s in self._stop), default=0)
    self._stopped = np.zeros(batch, bool)
    self._drafted, self._accepted = np.zeros((2, K), np.int64)
    self._rounds = self._passes = self._index_calls = 0
    self._streams = None
    if tokenizer is not None:
      self._streams = [TextStream(tokenizer) for _ in range(batch)]
      self._text = [''] * batch

  def add(self, tokens, count, done) -> np.ndarray:
    """Takes one step's tokens; returns who ended on a stop string now.

    Args:
      tokens: [B, J] new tokens.
      count: [B] how many of them are real.
      done: [B] who has finished on the device.
    """
    before = self._stopped.copy()
    for i, new in self._live(tokens, count):
      for token in new:
        self.tokens[i].append(int(token))
        if self._streams is not None:
          self._append(i, self._streams[i].feed(int(token)))
        if self._stopped[i]:
          break
    self.done |= done | self._stopped
    return self._stopped & ~before

  def _live(self, tokens, count) -> Iterator[tuple[int, np.ndarray]]:
    for i in np.flatnonzero(count):
      yield i, tokens[i, : count[i]]

  def count(self, drafted, accepted, index_calls) -> None:
    """Takes one round's draft counts [B] and indexer calls."""
    self._passes += 1
    self._index_calls += int(index_calls)
    steps = np.arange(len(self._drafted))
    self._rounds += int((drafted > 0).sum())
    self._drafted += (steps < drafted[:, None]).sum(0)
    self._accepted += (steps < accepted[:, None]).sum(0)

  def statistics(self) -> DraftStatistics:
    """The draft counts so far."""
    return DraftStatistics(
      self._rounds,
      tuple(map(int, self._drafted)),
      tuple(map(int, self._accepted)),
      self._passes,
      self._index_calls,
    )

  def finish(self) -> list[str] | None:
    """The text, with what an unfinished character still held back."""
    if self._streams is None:
      return None
    for i in np.flatnonzero(~self._stopped):
      self._append(i, self._streams[i].finish())
    return self._text

  def _append(self, i: int, piece: str) -> None:
    fresh = max(0, len(self._text[i]) - self._longest)
    self._text[i] += piece
    at = find_stop(self._text[i], self._stop, fresh)
    if at is not None:
      self._text[i] = self._text[i][:at]
      self._stopped[i] = True
