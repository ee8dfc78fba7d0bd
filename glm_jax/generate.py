"""Chunked prefill and the decode loop over a paged cache.

Rows are packed: a prefill step takes the next rows of any sequences, a
decode step one row of each. A prompt's last token is the first decode row,
so prefill needs no head.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.cache import Cache, init_cache, make_rows
from glm_jax.model import Model, head, trunk
from glm_jax.plan import LocalPlan
from glm_jax.sampling import SamplingParams, sample, sampling_params
from glm_jax.text import Tokenizer, TextStream, find_stop
from pallas_kernels.tiling import PAGE, cdiv

PREFILL_CHUNK = 512


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    'cache',
    'page_table',
    'lengths',
    'last_token',
    'done',
    'params',
  ],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """Everything that a decode step reads and writes; donated.

  Attributes:
    cache: holds the rows of positions 0 .. lengths - 2.
    page_table: [B, n] int32, -1 for none.
    lengths: [B] int32 tokens of each sequence, prompt and new.
    last_token: [B] int32 the newest token, whose row is not cached yet.
    done: [B] bool; a finished sequence writes and changes nothing.
    params: how each sequence is sampled.
  """

  cache: Cache
  page_table: jax.Array
  lengths: jax.Array
  last_token: jax.Array
  done: jax.Array
  params: SamplingParams


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
  """What `generate` returns.

  Attributes:
    tokens: new ids of each prompt, an eos included.
    text: new text of each prompt up to a stop string; None without a
      tokenizer.
    seconds_prefill: wall seconds of prefill, compilation included.
    seconds_decode: wall seconds of decoding, compilation included.
  """

  tokens: list[list[int]]
  text: list[str] | None
  seconds_prefill: float
  seconds_decode: float


@functools.partial(jax.jit, static_argnames='plan', donate_argnames='cache')
def prefill_step(
  model: Model,
  cache: Cache,
  page_table: jax.Array,
  tokens: jax.Array,
  seq: jax.Array,
  pos: jax.Array,
  *,
  plan: LocalPlan,
) -> Cache:
  """Writes the rows of one chunk.

  Args:
    model: the model.
    cache: donated.
    page_table: [B, n] int32.
    tokens: [T] int32.
    seq: [T] int32 sequence of each row.
    pos: [T] int32 position of each row, -1 for padding.
    plan: tiling, dispatch and placement.

  Returns:
    The cache with the rows written.
  """
  rows = make_rows(seq, pos, page_table)
  return trunk(model, tokens, cache, rows, plan)[1]


@functools.partial(
  jax.jit, static_argnames=('plan', 'eos'), donate_argnames='state'
)
def decode_step(
  model: Model,
  state: DecodeState,
  *,
  plan: LocalPlan,
  eos: tuple[int, ...] = (),
) -> tuple[DecodeState, jax.Array]:
  """Runs the newest token of each sequence and draws the next one.

  Args:
    model: the model.
    state: donated.
    plan: tiling, dispatch and placement.
    eos: ids that finish a sequence.

  Returns:
    The next state, and [B, V] float32 logits of the step.
  """
  B = state.lengths.shape[0]
  seq = jnp.arange(B, dtype=jnp.int32)
  pos = jnp.where(state.done, -1, state.lengths - 1)
  rows = make_rows(seq, pos, state.page_table)
  hidden, cache, _ = trunk(model, state.last_token, state.cache, rows, plan)
  logits = head(model, hidden, plan)
  drawn = plan.rows(sample, logits, state.lengths, state.params)
  token = jnp.where(state.done, state.last_token, drawn)
  ended = jnp.isin(token, jnp.asarray(eos, jnp.int32))
  state = dataclasses.replace(
    state,
    cache=cache,
    lengths=state.lengths + ~state.done,
    last_token=token,
    done=state.done | ended,
  )
  return state, logits


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


def start(
  model: Model,
  prompts: Sequence[Sequence[int]],
  max_new_tokens: int,
  params: SamplingParams,
  plan: LocalPlan,
  *,
  prefill_chunk: int = PREFILL_CHUNK,
  cache_dtype: str = 'auto',
) -> DecodeState:
  """Prefills prompts of any lengths and returns the state to decode from."""
  lengths = np.array([len(p) for p in prompts], np.int32)
  needed = [cdiv(int(n) + max_new_tokens, PAGE) for n in lengths]
  table = np.full((len(prompts), max(needed)), -1, np.int32)
  ends = np.cumsum(needed)
  for i, n in enumerate(needed):
    table[i, :n] = np.arange(ends[i] - n, ends[i])
  if cache_dtype == 'auto' and model.embed.dtype == jnp.float32:
    cache_dtype = 'f32'
  cache = init_cache(model.config, int(ends[-1]), dtype=cache_dtype, plan=plan)
  page_table = jnp.asarray(table)
  tokens = np.concatenate([np.asarray(p[:-1], np.int32) for p in prompts])
  seq = np.repeat(np.arange(len(prompts), dtype=np.int32), lengths - 1)
  pos = np.concatenate([np.arange(n - 1, dtype=np.int32) for n in lengths])
  chunk = min(prefill_chunk, max(8, 1 << (max(len(pos), 1) - 1).bit_length()))
  for i in range(0, len(pos), chunk):
    part = lambda a, fill: np.pad(  # noqa: B023
      a[i : i + chunk],
      (0, max(0, i + chunk - len(a))),
      constant_values=fill,
    )
    cache = prefill_step(
      model,
      cache,
      page_table,
      part(tokens, 0),
      part(seq, 0),
      part(pos, -1),
      plan=plan,
    )
  return DecodeState(
    cache=cache,
    page_table=page_table,
    lengths=jnp.asarray(lengths),
    last_token=jnp.asarray([p[-1] for p in prompts], jnp.int32),
    done=jnp.zeros(len(prompts), bool),
    params=params,
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
    prefill_chunk: rows of one prefill step at most.
    cache_dtype: 'auto', 'bf16', 'f32' or 'fp8'.
    plan: tiling, dispatch and placement; None for one device.

  Returns:
    New tokens, text and timings.

  Raises:
    ValueError: an empty or too long prompt, an id outside the vocabulary, a
      parameter out of range, or stop strings without a tokenizer.
  """
  plan = plan or LocalPlan()
  check_prompts(prompts, max_new_tokens, model.config)
  if prefill_chunk < 1:
    raise ValueError(f'{prefill_chunk=} must be at least 1')
  if stop and tokenizer is None:
    raise ValueError(f'{stop=} needs a tokenizer: the model has none')
  eos = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
  B = len(prompts)
  params = sampling_params(
    B,
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
  )
  jax.block_until_ready(state)
  prefilled = time.perf_counter()
  out = _Collector(B, stop, tokenizer)
  for _ in range(max_new_tokens):
    was_done = out.done.copy()
    state, _ = decode_step(model, state, plan=plan, eos=tuple(eos))
    token, done = jax.device_get((state.last_token, state.done))
    stopped = out.add(token, was_done, done)
    if out.done.all():
      break
    if stopped.any():
      state = dataclasses.replace(state, done=jnp.asarray(out.done))
  seconds = time.perf_counter() - prefilled
  return GenerateOutput(
    out.tokens, out.finish(), prefilled - begin, seconds
  )


class _Collector:
  """New tokens and text of a batch; finds stop strings."""

  def __init__(self, batch: int, stop, tokenizer: Tokenizer | None):
    self.tokens: list[list[int]] = [[] for _ in range(batch)]
    self.done = np.zeros(batch, bool)
    self._stop = tuple(stop)
    self._longest = max((len(s) for s in self._stop), default=0)
    self._stopped = np.zeros(batch, bool)
    self._streams = None
    if tokenizer is not None:
      self._streams = [TextStream(tokenizer) for _ in range(batch)]
      self._text = [''] * batch

  def add(self, token, was_done, done) -> np.ndarray:
    """Takes one step's tokens; returns who ended on a stop string now."""
    before = self._stopped.copy()
    for i in np.flatnonzero(~was_done):
      self.tokens[i].append(int(token[i]))
      if self._streams is not None:
        self._append(i, self._streams[i].feed(int(token[i])))
    self.done |= done | self._stopped
    return self._stopped & ~before

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
