"""Prefill and decode steps over a paged cache, and the state they carry.

Rows are packed: a prefill step takes the next rows of any sequences, a
decode step one row of each. A prompt's last token is the first decode row,
so prefill needs no head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax import drafting
from glm_jax.cache import Cache, init_cache, make_rows
from glm_jax.compiling import StepJit
from glm_jax.model import Model, head, trunk
from glm_jax.plan import LocalPlan, choose_tokens
from glm_jax.sampling import Purpose, SamplingParams
from pallas_kernels.tiling import PAGE, cdiv

PREFILL_CHUNK = 512


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    'cache',
    'page_table',
    'lengths',
    'last_token',
    'limits',
    'eos',
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
    limits: [B] int32 tokens at which a sequence is finished.
    eos: [E] int32 ids that finish a sequence, or [B, E] of each; -1 stands
      for none.
    done: [B] bool; a finished sequence writes and changes nothing.
    params: how each sequence is sampled.
  """

  cache: Cache
  page_table: jax.Array
  lengths: jax.Array
  last_token: jax.Array
  limits: jax.Array
  eos: jax.Array
  done: jax.Array
  params: SamplingParams


@functools.partial(
  StepJit,
  static_argnames=('plan', 'with_drafter'),
  donate_argnames='cache',
)
def prefill_step(
  model: Model,
  cache: Cache,
  page_table: jax.Array,
  tokens: jax.Array,
  seq: jax.Array,
  pos: jax.Array,
  *,
  plan: LocalPlan,
  with_drafter: bool = False,
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
    with_drafter: write the drafter's rows as well.

  Returns:
    The cache with the rows written.
  """
  rows = make_rows(seq, pos, page_table)
  hidden, cache, _ = trunk(
    model, tokens, cache, rows, plan, drafter_next=with_drafter
  )
  if with_drafter:
    cache = drafting.prefill_rows(model, tokens, hidden, cache, rows, plan)
  return cache


@functools.partial(StepJit, static_argnames='plan', donate_argnames='state')
def decode_step(
  model: Model,
  state: DecodeState,
  *,
  plan: LocalPlan,
) -> tuple[DecodeState, jax.Array]:
  """Runs the newest token of each sequence and draws the next one.

  Args:
    model: the model.
    state: donated.
    plan: tiling, dispatch and placement.

  Returns:
    The next state, and [B, V] float32 logits of the step.
  """
  B = state.lengths.shape[0]
  seq = jnp.arange(B, dtype=jnp.int32)
  pos = jnp.where(state.done, -1, state.lengths - 1)
  rows = make_rows(seq, pos, state.page_table)
  hidden, cache, _ = trunk(model, state.last_token, state.cache, rows, plan)
  logits = head(model, hidden, plan)
  drawn, _ = choose_tokens(
    plan, logits, state.lengths, state.params, Purpose.SAMPLE
  )
  token = jnp.where(state.done, state.last_token, drawn)
  ended = is_end(token, state.eos)
  state = dataclasses.replace(
    state,
    cache=cache,
    lengths=state.lengths + ~state.done,
    last_token=token,
    done=state.done | ended | (state.lengths + 1 >= state.limits),
  )
  return state, logits


def is_end(tokens: jax.Array, eos: jax.Array) -> jax.Array:
  """Which tokens end their sequence.

  Args:
    tokens: [B] or [B, J] int32.
    eos: [E] or [B, E] int32, -1 for none.

  Returns:
    Booleans of the tokens' shape.
  """
  if eos.ndim == 1:
    return jnp.isin(tokens, eos)
  eos = eos.reshape(eos.shape[0], *(1,) * (tokens.ndim - 1), -1)
  return jnp.any(tokens[..., None] == eos, axis=-1)


def start(
  model: Model,
  prompts: Sequence[Sequence[int]],
  max_new_tokens: int,
  params: SamplingParams,
  plan: LocalPlan,
  *,
  prefill_chunk: int = PREFILL_CHUNK,
  cache_dtype: str = 'auto',
  num_drafts: int = 0,
  eos: Sequence[int] = (),
) -> DecodeState:
  """Prefills prompts of any lengths and returns the state to decode from.

  Args:
    model: the model.
    prompts: token ids of each prompt.
    max_new_tokens: new tokens of each prompt at most.
    params: how each sequence is sampled.
    plan: tiling, dispatch and placement.
    prefill_chunk: rows of one prefill step at most.
    cache_dtype: 'auto', 'bf16', 'f32' or 'fp8'.
    num_drafts: drafts of a round; their rows need room past the end.
    eos: ids that finish a sequence.

  Returns:
    The state; all prompt tokens but the last one of each are cached.
  """
  lengths = np.array([len(p) for p in prompts], np.int32)
  room = max_new_tokens + num_drafts
  needed = [cdiv(int(n) + room, PAGE) for n in lengths]
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
    cache = prefill_step(
      model,
      cache,
      page_table,
      _part(tokens, i, chunk, 0),
      _part(seq, i, chunk, 0),
      _part(pos, i, chunk, -1),
      plan=plan,
      with_drafter=num_drafts > 0,
    )
  return DecodeState(
    cache=cache,
    page_table=page_table,
    lengths=jnp.asarray(lengths),
    last_token=jnp.asarray([p[-1] for p in prompts], jnp.int32),
    limits=jnp.asarray(lengths + max_new_tokens),
    eos=jnp.asarray(tuple(eos) or (-1,), jnp.int32),
    done=jnp.zeros(len(prompts), bool),
    params=params,
  )


def _part(a: np.ndarray, first: int, size: int, fill: int) -> np.ndarray:
  """a[first : first + size], filled up to `size`."""
  part = a[first : first + size]
  return np.pad(part, (0, size - len(part)), constant_values=fill)
