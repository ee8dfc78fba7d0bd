"""The engine's device functions: one mixed step, and moves of whole pages.

A step runs rows of any requests at once: prompt rows, the newest token of
each decoding request and its drafts. What the next step needs stays on the
device in `SlotState`, so that steps are dispatched without knowing the ids
that the last one drew:

    pending verified tokens --> drafter --> drafts
    prompt rows + newest tokens + drafts --> trunk
    last prompt rows --> first token     decode rows --> accepted tokens

A request owns a slot from its first prompt row to its end. Slot S, the last,
belongs to nobody: padding names it, and it is finished forever (known fault
29).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm_jax import cache as cache_lib
from glm_jax import drafting
from glm_jax.cache import Cache, make_rows
from glm_jax.decoding import DecodeState, is_end
from glm_jax.drafting import SHARED, DraftOptions, Drafts
from glm_jax.model import Model, head, trunk
from glm_jax.plan import LocalPlan, choose_tokens
from glm_jax.sampling import Purpose, SamplingParams, sampling_params
from glm_jax.serving.request import MAX_LOGPROBS
from glm_jax.speculative import accept, keep_hidden

MAX_STOP_IDS = 16


def _pytree(cls):
  cls = dataclasses.dataclass(frozen=True)(cls)
  names = [f.name for f in dataclasses.fields(cls)]
  return jax.tree_util.register_dataclass(cls, names, [])


@_pytree
class SlotState:
  """What steps hand on, S + 1 slots; donated. J = most drafts + 1.

  Attributes:
    cache: pools of all pages.
    lengths: [S + 1] int32 tokens of each request, prompt and new.
    last_token: [S + 1] int32 the newest token, whose row is not cached yet.
    limits: [S + 1] int32 tokens at which a request is finished.
    eos: [S + 1, E] int32 ids that finish it; -1 stands for none.
    done: [S + 1] bool.
    params: how each is sampled.
    pending_tokens: [S + 1, J] int32 tokens that the drafter has not seen.
    pending_hidden: [S + 1, J, D] the trunk's hidden state before each.
    pending_position: [S + 1] int32 position of the first of them.
    pending: [S + 1] int32 how many there are.
  """

  cache: Cache
  lengths: jax.Array
  last_token: jax.Array
  limits: jax.Array
  eos: jax.Array
  done: jax.Array
  params: SamplingParams
  pending_tokens: jax.Array
  pending_hidden: jax.Array
  pending_position: jax.Array
  pending: jax.Array


@_pytree
class StepInputs:
  """One step, as the host plans it. W = ceil(V / 32).

  Attributes:
    tokens: [P] int32 prompt rows; a request's rows stand together.
    slot: [P] int32 whose they are.
    pos: [P] int32 positions, -1 for padding.
    draft: [P] bool: the drafter's row is wanted too.
    last_row: [F] int32 rows of `tokens` that are the last of their prompt.
    last_slot: [F] int32 their slots; beyond S for padding.
    last_limits: [F] int32 see `SlotState`, as for the next two.
    last_eos: [F, E] int32.
    last_params: of F requests.
    slots: [B] int32 decoding requests; S for padding.
    count: [B] int32 drafts wanted of each, at most K.
    forced: [B, K] int32 proposals of the host, -1 for the drafter's own.
    masked: scalar bool: the two masks below are read.
    mask: [B, K + 1, W] uint32 tokens allowed after each row.
    last_mask: [F, W] uint32 the same of the first tokens.
    logprobs: scalar bool: log probabilities are wanted.
  """

  tokens: jax.Array
  slot: jax.Array
  pos: jax.Array
  draft: jax.Array
  last_row: jax.Array
  last_slot: jax.Array
  last_limits: jax.Array
  last_eos: jax.Array
  last_params: SamplingParams
  slots: jax.Array
  count: jax.Array
  forced: jax.Array
  masked: jax.Array
  mask: jax.Array
  last_mask: jax.Array
  logprobs: jax.Array


class Logprobs(NamedTuple):
  """Of n rows; zeros unless wanted."""

  chosen: jax.Array  # [n] float32 of the drawn token
  top_ids: jax.Array  # [n, MAX_LOGPROBS] int32
  top: jax.Array  # [n, MAX_LOGPROBS] float32


class StepResult(NamedTuple):
  """What one step drew.

  Attributes:
    tokens: [B, K + 1] int32 new tokens, the first `count` of each.
    count: [B] int32.
    drafted: [B] int32 drafts proposed.
    accepted: [B] int32 drafts accepted.
    ended: [B] bool the request has ended on the device.
    bad: [B] bool NaN among its logits.
    first: [F] int32 first tokens of finished prompts.
    first_ended: [F] bool.
    first_bad: [F] bool.
    logprobs: of B * (K + 1) rows, then F rows.
  """

  tokens: jax.Array
  count: jax.Array
  drafted: jax.Array
  accepted: jax.Array
  ended: jax.Array
  bad: jax.Array
  first: jax.Array
  first_ended: jax.Array
  first_bad: jax.Array
  logprobs: Logprobs


def init_state(
  model: Model, cache: Cache, num_slots: int, most_drafts: int
) -> SlotState:
  """The state before the first step; every slot is finished."""
  n, J, D = num_slots + 1, most_drafts + 1, model.config.hidden_size
  zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
  hidden = model.embed.dtype if cache.hidden is None else cache.hidden.dtype
  return SlotState(
    cache=cache,
    lengths=zeros(n) + 1,
    last_token=zeros(n),
    limits=zeros(n) + 1,
    eos=zeros(n, MAX_STOP_IDS) - 1,
    done=jnp.ones(n, bool),
    params=sampling_params(n),
    pending_tokens=zeros(n, J),
    pending_hidden=jnp.zeros((n, J, D), hidden),
    pending_position=zeros(n),
    pending=zeros(n),
  )


def engine_step(
  model: Model,
  state: SlotState,
  table: jax.Array,
  inputs: StepInputs,
  *,
  plan: LocalPlan,
  blocks: int,
  with_drafter: bool,
  options: DraftOptions = SHARED,
) -> tuple[SlotState, StepResult]:
  """Runs one step; pure, compiled once a shape by `runner.Runner`.

  Args:
    model: the model.
    state: donated by the caller.
    table: [S + 1, n] int32 pages of each slot, -1 for none.
    inputs: the step.
    plan: tiling, dispatch and placement.
    blocks: pages a sequence that this step may see (its context bucket).
    with_drafter: keep the drafter's rows, so that any request may draft.
    options: how drafts are made.

  Returns:
    The next state and what was drawn.
  """
  table = table[:, :blocks]
  slots, P = inputs.slots, inputs.tokens.shape[0]
  old = _decoding(state, slots, table)
  drafts, cache = _draft(model, state, old, inputs, plan, with_drafter, options)
  B, K = drafts.tokens.shape
  J = K + 1
  at = jnp.arange(J, dtype=jnp.int32)[None]
  position = jnp.where(old.done, -1, old.lengths - 1)
  live = (at <= drafts.count[:, None]) & (position[:, None] >= 0)
  pos = jnp.where(live, position[:, None] + at, -1)
  tokens = jnp.concatenate([old.last_token[:, None], drafts.tokens], axis=1)
  rows = make_rows(
    jnp.concatenate([inputs.slot, jnp.repeat(slots, J)]),
    jnp.concatenate([inputs.pos, pos.reshape(-1)]),
    table,
  )
  tokens = jnp.concatenate([inputs.tokens, tokens.reshape(-1)])
  hidden, cache, _ = trunk(model, tokens, cache, rows, plan)
  if P and with_drafter:
    cache = _prompt_drafter_rows(model, inputs, hidden[:P], cache, table, plan)
  ends, hidden = hidden[inputs.last_row], hidden[P:]
  F = ends.shape[0]
  logits = head(model, jnp.concatenate([hidden, ends]), plan)
  bad = jnp.any(jnp.isnan(logits), axis=-1)
  bad, first_bad = jnp.any(bad[: B * J].reshape(B, J) & live, 1), bad[B * J :]
  words = jnp.concatenate([inputs.mask.reshape(B * J, -1), inputs.last_mask])
  allowed = jax.lax.cond(
    inputs.masked, _apply_mask, lambda logits, words: logits, logits, words
  )
  new, count, accepted, ended = accept(
    old, drafts, allowed[: B * J].reshape(B, J, -1), plan
  )
  hidden = hidden.reshape(B, J, -1)
  if with_drafter:
    cache = keep_hidden(cache, old.page_table, hidden, position, count)
  state = _after_decode(state, slots, old, cache, new, count, ended, hidden)
  first, first_ended, state = _after_prompt(
    state, inputs, allowed[B * J :], ends, plan
  )
  drawn = jnp.concatenate([new.reshape(-1), first]) if F else new.reshape(-1)
  result = StepResult(
    tokens=new,
    count=count,
    drafted=jnp.where(old.done, 0, drafts.count),
    accepted=accepted,
    ended=ended,
    bad=bad,
    first=first,
    first_ended=first_ended,
    first_bad=first_bad,
    logprobs=_logprobs(inputs.logprobs, logits, drawn),
  )
  return state, result


def _decoding(state: SlotState, slots, table) -> DecodeState:
  """The decoding requests of a step, [B]; without the cache."""
  take = lambda a: a[slots]
  params = jax.tree.map(take, state.params)
  # An empty slot does not hold up the others: see `sampling.choose`.
  quiet = jnp.where(state.done[slots], 0, params.temperature)
  return DecodeState(
    cache=None,
    page_table=table[slots],
    lengths=state.lengths[slots],
    last_token=state.last_token[slots],
    limits=state.limits[slots],
    eos=state.eos[slots],
    done=state.done[slots],
    params=dataclasses.replace(params, temperature=quiet),
  )


def _draft(model, state, old, inputs, plan, with_drafter, options):
  """The drafter's part: rows of pending tokens, then drafts."""
  slots = inputs.slots
  B, K = inputs.forced.shape
  V = model.config.vocab_size
  empty = lambda *shape: jnp.zeros((B, 0, *shape), jnp.float32)
  none = Drafts(
    empty().astype(jnp.int32),
    empty(V),
    empty(V),
    jnp.zeros(B, jnp.int32),
    jnp.int32(0),
  )
  if not with_drafter:
    return none, state.cache
  pending = jnp.where(old.done, 0, state.pending[slots])
  known = (
    state.pending_tokens[slots],
    state.pending_hidden[slots],
    state.cache,
    old.page_table,
    state.pending_position[slots],
    pending,
  )
  if not K:
    _, cache, _ = drafting.extend_pending(model, *known, plan)
    return none, cache
  # Drafts past the limit would need rows that nobody asked for.
  room = jnp.maximum(old.limits - old.lengths - 1, 0)
  count = jnp.minimum(inputs.count, room)
  return drafting.draft(
    model, *known, count, old.params, K, options, plan, inputs.forced
  )


def _prompt_drafter_rows(model, inputs, hidden, cache, table, plan):
  """The drafter's rows of prompt rows, where they are not in the page yet."""
  rows = make_rows(inputs.slot, inputs.pos, table)
  previous = drafting.previous_hidden(cache, rows, hidden)
  wanted = jnp.where(inputs.draft, rows.slots, -1)
  wanted = dataclasses.replace(rows, slots=wanted)
  cache = drafting.extend(model, inputs.tokens, previous, cache, wanted, plan)[
    1
  ]
  return cache_lib.write_hidden(cache, rows, hidden)


def _apply_mask(logits, words):
  bit = jnp.arange(logits.shape[-1])
  bits = (words[:, bit // 32] >> (bit % 32).astype(jnp.uint32)) & 1
  return jnp.where(bits == 1, logits, -jnp.inf)


def _after_decode(state, slots, old, cache, new, count, ended, hidden):
  """The slots of decoding requests after a round."""
  newest = jnp.maximum(count - 1, 0)
  last = jnp.take_along_axis(new, newest[:, None], axis=1)[:, 0]
  missing = state.pending_tokens.shape[1] - new.shape[1]
  wide = lambda a: jnp.pad(a, ((0, 0), (0, missing)) + ((0, 0),) * (a.ndim - 2))
  put = lambda a, value: a.at[slots].set(value.astype(a.dtype))
  return dataclasses.replace(
    state,
    cache=cache,
    lengths=put(state.lengths, old.lengths + count),
    last_token=put(state.last_token, jnp.where(old.done, old.last_token, last)),
    done=put(state.done, old.done | ended),
    pending_tokens=put(state.pending_tokens, wide(new)),
    pending_hidden=put(state.pending_hidden, wide(hidden)),
    pending_position=put(state.pending_position, old.lengths),
    pending=put(state.pending, count),
  )


def _after_prompt(state, inputs, logits, hidden, plan):
  """Draws the first token of finished prompts and fills their slots."""
  F = inputs.last_row.shape[0]
  if not F:
    return jnp.zeros(0, jnp.int32), jnp.zeros(0, bool), state
  length = inputs.pos[inputs.last_row] + 1
  params = inputs.last_params
  first, _ = choose_tokens(plan, logits, length, params, Purpose.SAMPLE)
  ended = is_end(first, inputs.last_eos) | (length + 1 >= inputs.last_limits)
  at = inputs.last_slot
  put = lambda a, value: a.at[at].set(value.astype(a.dtype), mode='drop')
  head_of = lambda a, value: a.at[at, 0].set(value.astype(a.dtype), mode='drop')
  state = dataclasses.replace(
    state,
    lengths=put(state.lengths, length + 1),
    last_token=put(state.last_token, first),
    limits=put(state.limits, inputs.last_limits),
    eos=put(state.eos, inputs.last_eos),
    done=put(state.done, ended),
    params=jax.tree.map(put, state.params, inputs.last_params),
    pending_tokens=head_of(state.pending_tokens, first),
    pending_hidden=head_of(state.pending_hidden, hidden),
    pending_position=put(state.pending_position, length),
    pending=put(state.pending, jnp.ones(F, jnp.int32)),
  )
  return first, ended, state


def _logprobs(wanted, logits, drawn) -> Logprobs:
  """Log probabilities of drawn tokens and of the best ones."""
  n, top = logits.shape[0], min(MAX_LOGPROBS, logits.shape[1])

  def compute():
    p = jax.nn.log_softmax(logits, axis=-1)
    best, ids = jax.lax.top_k(p, top)
    chosen = jnp.take_along_axis(p, drawn[:, None], axis=1)[:, 0]
    return Logprobs(chosen, ids.astype(jnp.int32), best)

  def nothing():
    return Logprobs(
      jnp.zeros(n, jnp.float32),
      jnp.zeros((n, top), jnp.int32),
      jnp.zeros((n, top), jnp.float32),
    )

  return jax.lax.cond(wanted, compute, nothing)
