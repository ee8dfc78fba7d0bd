"""One round of speculative decoding: draft, verify, accept.

    pending verified tokens --> drafter --> K drafts
    newest token + K drafts --> trunk, K + 1 rows on the normal sparse path
    p, q --> accepted drafts and one token more, which become pending

Sequences accept different numbers in one step. Rejected drafts leave rows
beyond the accepted length: the next rows of the sequence overwrite them, and
no query below ever sees them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm_jax import cache as cache_lib
from glm_jax import drafting
from glm_jax.acceptance import judge, next_draft_count
from glm_jax.cache import Cache, make_rows
from glm_jax.compiling import StepJit
from glm_jax.decoding import DecodeState, is_end
from glm_jax.drafting import SHARED, DraftOptions, Drafts
from glm_jax.model import Model, head, trunk
from glm_jax.plan import LocalPlan
from glm_jax.sampling import Purpose, all_greedy, draw
from pallas_kernels.tiling import PAGE


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    'decode',
    'pending_tokens',
    'pending_hidden',
    'pending_position',
    'pending',
    'draft_count',
  ],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class SpeculativeState:
  """What a round reads and writes; donated. J = K + 1.

  Attributes:
    decode: the state of plain decoding.
    pending_tokens: [B, J] int32 verified tokens the drafter has not seen.
    pending_hidden: [B, J, D] the trunk's hidden state before each.
    pending_position: [B] int32 position of the first of them.
    pending: [B] int32 how many there are; the last is the newest token.
    draft_count: [B] int32 drafts wanted in the next round, at most K.
  """

  decode: DecodeState
  pending_tokens: jax.Array
  pending_hidden: jax.Array
  pending_position: jax.Array
  pending: jax.Array
  draft_count: jax.Array


class Round(NamedTuple):
  """What one round did.

  Attributes:
    tokens: [B, J] int32 new tokens, the first `count` of each sequence.
    count: [B] int32, 0 for a finished sequence.
    drafted: [B] int32 drafts proposed.
    accepted: [B] int32 drafts accepted.
    index_calls: scalar int32, times the drafter's indexer ran.
    logits: [B, J, V] float32 of the verified rows.
  """

  tokens: jax.Array
  count: jax.Array
  drafted: jax.Array
  accepted: jax.Array
  index_calls: jax.Array
  logits: jax.Array


def start_drafting(
  model: Model, decode: DecodeState, num_drafts: int
) -> SpeculativeState:
  """The first round's state: the newest token waits for the drafter.

  Args:
    model: the model, with its drafter.
    decode: the state after prefill with the drafter.
    num_drafts: K.

  Returns:
    The state. A prompt of one token has no hidden state before it: its first
    round drafts nothing.

  Raises:
    ValueError: the model has no drafter, or K is out of range.
  """
  drafting.drafter(model)
  if not 1 <= num_drafts <= 8:
    raise ValueError(f'num_speculative_tokens={num_drafts} must be 0 to 8')
  B, J = decode.lengths.shape[0], num_drafts + 1
  newest = decode.lengths - 1
  block = jnp.maximum(newest - 1, 0) // PAGE
  page = decode.page_table[jnp.arange(B), block]
  hidden = decode.cache.hidden[jnp.maximum(page, 0)]
  shape = (B, J, hidden.shape[-1])
  return SpeculativeState(
    decode=decode,
    pending_tokens=jnp.zeros((B, J), jnp.int32).at[:, 0].set(decode.last_token),
    pending_hidden=jnp.zeros(shape, hidden.dtype).at[:, 0].set(hidden),
    pending_position=newest,
    pending=(newest > 0).astype(jnp.int32),
    draft_count=jnp.full(B, num_drafts, jnp.int32),
  )


def verify(
  model: Model,
  tokens: jax.Array,
  cache: Cache,
  page_table: jax.Array,
  position: jax.Array,
  count: jax.Array,
  plan: LocalPlan | None = None,
) -> tuple[jax.Array, jax.Array, Cache]:
  """Runs the newest token and its drafts through the trunk.

  Args:
    model: the model.
    tokens: [B, J] int32 newest token, then drafts.
    cache: comes back with the rows written.
    page_table: [B, n] int32.
    position: [B] int32 of the newest token, -1 for a finished sequence.
    count: [B] int32 drafts of each sequence.
    plan: tiling, dispatch and placement.

  Returns:
    logits [B, J, V] float32, post-norm hidden states [B, J, D], the cache.
  """
  plan = plan or LocalPlan()
  B, J = tokens.shape
  at = jnp.arange(J, dtype=jnp.int32)[None]
  live = (at <= count[:, None]) & (position[:, None] >= 0)
  pos = jnp.where(live, position[:, None] + at, -1).reshape(-1)
  seq = jnp.repeat(jnp.arange(B, dtype=jnp.int32), J)
  rows = make_rows(seq, pos, page_table)
  hidden, cache, _ = trunk(model, tokens.reshape(-1), cache, rows, plan)
  logits = head(model, hidden, plan)
  split = lambda a: a.reshape(B, J, -1)
  return split(logits), split(hidden), cache


@functools.partial(
  StepJit,
  static_argnames=('plan', 'options', 'adaptive'),
  donate_argnames='state',
)
def speculative_step(
  model: Model,
  state: SpeculativeState,
  forced: jax.Array,
  *,
  plan: LocalPlan,
  options: DraftOptions = SHARED,
  adaptive: bool = False,
) -> tuple[SpeculativeState, Round]:
  """One round for all sequences; what follows an eos is dropped.

  Args:
    model: the model, with its drafter.
    state: donated.
    forced: [B, K] int32 proposals from elsewhere, -1 for the drafter's own;
      their q is one-hot.
    plan: tiling, dispatch and placement.
    options: how drafts are made.
    adaptive: let finished rounds set the next draft count.

  Returns:
    The next state and what the round did.
  """
  old = state.decode
  B, J = state.pending_tokens.shape
  pending = jnp.where(old.done, 0, state.pending)
  # Drafts past the limit would need rows that nobody asked for.
  room = jnp.maximum(old.limits - old.lengths - 1, 0)
  drafts, cache = drafting.draft(
    model,
    state.pending_tokens,
    state.pending_hidden,
    old.cache,
    old.page_table,
    state.pending_position,
    pending,
    jnp.minimum(state.draft_count, room),
    old.params,
    J - 1,
    options,
    plan,
    forced,
  )
  position = jnp.where(old.done, -1, old.lengths - 1)
  tokens = jnp.concatenate([old.last_token[:, None], drafts.tokens], axis=1)
  logits, hidden, cache = verify(
    model, tokens, cache, old.page_table, position, drafts.count, plan
  )
  new, count, accepted, ended = accept(old, drafts, logits, plan)
  cache = keep_hidden(cache, old.page_table, hidden, position, count)
  newest = jnp.maximum(count - 1, 0)
  last = jnp.take_along_axis(new, newest[:, None], axis=1)[:, 0]
  decode = dataclasses.replace(
    old,
    cache=cache,
    lengths=old.lengths + count,
    last_token=jnp.where(old.done, old.last_token, last),
    done=old.done | ended,
  )
  wanted = state.draft_count
  if adaptive:
    wanted = next_draft_count(drafts.count, accepted, J - 1)
  state = SpeculativeState(
    decode=decode,
    pending_tokens=new,
    pending_hidden=hidden.astype(state.pending_hidden.dtype),
    pending_position=old.lengths,
    pending=count,
    draft_count=wanted,
  )
  done = Round(new, count, drafts.count, accepted, drafts.index_calls, logits)
  return state, done


def accept(
  old: DecodeState, drafts: Drafts, logits: jax.Array, plan: LocalPlan
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Judges a round; what follows an eos is dropped.

  Args:
    old: the state before the round; its cache is not read.
    drafts: what was proposed, K a sequence (K may be 0).
    logits: [B, K + 1, V] float32 of the verified rows.
    plan: tiling, dispatch and placement.

  Returns:
    new tokens [B, K + 1], the first count [B] of each, drafts accepted [B],
    and who has ended [B].
  """
  B, J, _ = logits.shape
  accepted, token = jax.lax.cond(
    all_greedy(old.params),
    lambda: _greedy_verdict(drafts, logits),
    lambda: _drawn_verdict(old, drafts, logits, plan),
  )
  at = jnp.arange(J)[None]
  drafted = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
  new = jnp.where(at < accepted[:, None], drafted, 0)
  new = jnp.where(at == accepted[:, None], token[:, None], new)
  count = accepted + 1
  ends = is_end(new, old.eos) & (at < count[:, None])
  first = jnp.where(jnp.any(ends, 1), jnp.argmax(ends, axis=1) + 1, J + 1)
  count = jnp.minimum(count, first)
  ended = (first <= count) | (old.lengths + count >= old.limits)
  count = jnp.where(old.done, 0, count).astype(jnp.int32)
  accepted = jnp.where(old.done, 0, accepted)
  return new, count, accepted, ended


def _greedy_verdict(drafts, logits):
  """Drafts [B] that stand and the token [B] after them, at temperature 0.

  What `_drawn_verdict` finds for one-hot distributions, to the last bit.
  """
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  exists = jnp.arange(drafts.tokens.shape[1]) < drafts.count[:, None]
  stands = (drafts.tokens == best[:, :-1]) & exists
  accepted = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1)
  token = jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
  return accepted.astype(jnp.int32), token


def _drawn_verdict(old, drafts, logits, plan):
  """Drafts [B] that stand and the token [B] after them."""
  B, J, V = logits.shape
  repeat = lambda a: jnp.repeat(a, J, axis=0)
  allowed = plan.filtered_logits(
    logits.reshape(B * J, V), jax.tree.map(repeat, old.params)
  )
  p = plan.rows(lambda x: jax.nn.softmax(x, axis=-1), allowed)
  verdict = jax.vmap(judge)(
    p.reshape(B, J, V),
    drafts.q,
    drafts.tokens,
    drafts.count,
    old.lengths,
    old.params.seed,
  )
  # A round without drafts is plain decoding, to the last bit.
  alone = lambda allowed, at, seed: draw(allowed, at, seed, Purpose.SAMPLE)
  drawn = plan.rows(
    alone, allowed.reshape(B, J, V)[:, 0], old.lengths, old.params.seed
  )
  return verdict.accepted, jnp.where(drafts.count > 0, verdict.token, drawn)


def keep_hidden(
  cache: Cache,
  page_table: jax.Array,
  hidden: jax.Array,
  position: jax.Array,
  count: jax.Array,
) -> Cache:
  """Keeps each page's last hidden state, of verified rows alone.

  Args:
    cache: of a model with a drafter.
    page_table: [B, n] int32.
    hidden: [B, J, D] post-norm hidden states of a round.
    position: [B] int32 of the first row, -1 for a finished sequence.
    count: [B] int32 rows that stand.

  Returns:
    The cache.
  """
  B, J, D = hidden.shape
  at = jnp.arange(J, dtype=jnp.int32)[None]
  pos = jnp.where(at < count[:, None], position[:, None] + at, -1)
  seq = jnp.repeat(jnp.arange(B, dtype=jnp.int32), J)
  rows = make_rows(seq, pos.reshape(-1), page_table)
  return cache_lib.write_hidden(cache, rows, hidden.reshape(B * J, D))
