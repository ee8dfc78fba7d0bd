"""The drafter: one MTP layer that guesses several tokens ahead.

Row i of the layer joins the trunk's hidden state of position i with the
embedding of token i + 1 and predicts token i + 2 (spec/model.md section 4.1).
It is stored at slot i + 1, beside the token it needs, so that a page depends
on its own prefix only; its RoPE position stays i, and slot 0 holds nothing.
Below, "position p" is the slot: token p, hidden state of p - 1.

A round of drafting (`draft`) first runs the rows of the newest verified
tokens; the selection of the last of them is the index that every later step
reuses, together with the rows it points to. Later steps compute only query,
attention, MLP and head, and write nothing. The post-norm hidden state is
what goes to the next step.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm_jax import cache as cache_lib
from glm_jax.block import LayerIds, StepContext
from glm_jax.cache import Cache, Rows, make_rows
from glm_jax.layer_plan import layer_plan
from glm_jax.model import Model, head
from glm_jax.mtp import Mtp
from glm_jax.plan import LocalPlan, Selection, choose_tokens
from glm_jax.rope import rope_tables
from glm_jax.sampling import Purpose, SamplingParams
from pallas_kernels.tiling import PAGE


@dataclasses.dataclass(frozen=True)
class DraftOptions:
  """How drafts are made.

  Attributes:
    share_index: later steps reuse the first step's index.
    share_kv: later steps read the first step's rows and write none. Both or
      neither: a frozen index cannot contain drafted rows.
    advance_position: each later step's query rotates one position on.
    greedy: take the likeliest token instead of drawing from q.
  """

  share_index: bool = True
  share_kv: bool = True
  advance_position: bool = True
  greedy: bool = False

  def __post_init__(self):
    if self.share_index != self.share_kv:
      raise ValueError(
        f'share_index={self.share_index} with share_kv={self.share_kv}: '
        'share both or neither, a frozen index cannot hold drafted rows'
      )


SHARED = DraftOptions()


class Drafts(NamedTuple):
  """What a round of drafting proposes.

  Attributes:
    tokens: [B, K] int32.
    q: [B, K, V] float32 probabilities they were drawn from.
    logits: [B, K, V] float32 before temperature and cuts.
    count: [B] int32 drafts that exist.
    index_calls: scalar int32, times the indexer ran: 1 with sharing.
  """

  tokens: jax.Array
  q: jax.Array
  logits: jax.Array
  count: jax.Array
  index_calls: jax.Array


def drafter(model: Model) -> Mtp:
  """The model's MTP layer.

  Raises:
    ValueError: the checkpoint has none.
  """
  if model.mtp is None:
    raise ValueError(
      'the model has no MTP layer: use num_speculative_tokens=0, or a '
      'checkpoint with num_nextn_predict_layers=1'
    )
  return model.mtp


def previous_hidden(cache: Cache, rows: Rows, hidden: jax.Array) -> jax.Array:
  """Hidden state of the position before each row.

  Args:
    cache: keeps the last hidden state of each page.
    rows: [T] rows; consecutive positions of a sequence stand in order.
    hidden: [T, D] post-norm hidden states of these rows.

  Returns:
    [T, D]: the row above where it is the same sequence's previous position,
    else what the page of that position keeps. Zero at position 0.
  """
  above = jnp.roll(hidden, 1, axis=0)
  follows = (jnp.roll(rows.seq, 1) == rows.seq) & (
    jnp.roll(rows.pos, 1) == rows.pos - 1
  )
  follows = follows.at[0].set(False)
  block = jnp.maximum(rows.pos - 1, 0) // PAGE
  page = rows.page_table[jnp.maximum(rows.seq, 0), block]
  kept = cache.hidden[jnp.maximum(page, 0)].astype(hidden.dtype)
  previous = jnp.where(follows[:, None], above, kept)
  return jnp.where((rows.pos > 0)[:, None], previous, 0)


def extend(
  model: Model,
  tokens: jax.Array,
  hidden: jax.Array,
  cache: Cache,
  rows: Rows,
  plan: LocalPlan,
) -> tuple[jax.Array, Cache, Selection]:
  """Runs the drafter on verified tokens and keeps its rows.

  Args:
    model: the model, with its drafter.
    tokens: [T] int32 token of each position p.
    hidden: [T, D] post-norm hidden state of position p - 1: the trunk's.
    cache: the cache; comes back with the rows written.
    rows: positions p; position 0 has no row and is not written.
    plan: tiling, dispatch and placement.

  Returns:
    [T, D] post-norm hidden states (they predict token p + 1), the cache, and
    the selection of each row.
  """
  slots = jnp.where(rows.pos > 0, rows.slots, -1)
  rows = dataclasses.replace(rows, slots=slots)
  # As the cache keeps it: the same whichever chunk the state comes from.
  hidden = hidden.astype(cache.hidden.dtype)
  return _run(model, tokens, hidden, cache, rows, rows.pos - 1, plan)


def _run(model, tokens, hidden, cache, rows, rope_pos, plan, frozen=None):
  """One pass of the layer; `frozen` is a selection to reuse, writing none."""
  c, mtp = model.config, plan.weights(drafter(model), len(tokens))
  layers = layer_plan(c)
  cos, sin = rope_tables(rope_pos, c.mla.qk_rope_head_dim, c.rope_theta)
  ids = LayerIds(layers.num_layers, layers.num_index_slots - 1, 0)
  cache, rows = plan.begin(cache, rows, ids.latent, ids.index)
  # Slot 0 holds no row of this layer.
  step = StepContext(rows, cos, sin, plan, first=1)
  embedding = plan.embed(model.embed[...], tokens)
  x = plan.rows(mtp.join, embedding, hidden.astype(embedding.dtype))
  x, cache, selection, _ = mtp.block(
    x, cache, frozen, ids, mtp.experts, step, frozen=frozen is not None
  )
  return plan.rows(mtp.norm, x), plan.end(cache), selection


def prefill_rows(
  model: Model,
  tokens: jax.Array,
  hidden: jax.Array,
  cache: Cache,
  rows: Rows,
  plan: LocalPlan,
) -> Cache:
  """The drafter's part of a prefill chunk.

  Args:
    model: the model, with its drafter.
    tokens: [T] int32 the chunk's tokens.
    hidden: [T, D] the trunk's post-norm hidden states of the same rows.
    cache: the cache; comes back with the drafter's rows and each page's last
      hidden state.
    rows: the chunk's rows.
    plan: tiling, dispatch and placement.

  Returns:
    The cache.
  """
  previous = previous_hidden(cache, rows, hidden)
  cache = extend(model, tokens, previous, cache, rows, plan)[1]
  return cache_lib.write_hidden(cache, rows, hidden)


def draft_logits(model: Model, hidden: jax.Array, plan: LocalPlan) -> jax.Array:
  """Logits [T, V] of the drafter's hidden states, which are normed already."""
  return head(model, hidden, plan, own=drafter(model).head)


def extend_pending(
  model: Model,
  tokens: jax.Array,
  hidden: jax.Array,
  cache: Cache,
  page_table: jax.Array,
  position: jax.Array,
  pending: jax.Array,
  plan: LocalPlan,
) -> tuple[jax.Array, Cache, Selection]:
  """Keeps the drafter's rows of the newest verified tokens.

  Args:
    model: the model, with its drafter.
    tokens: [B, J] int32 newest verified tokens, the first `pending` count.
    hidden: [B, J, D] the trunk's post-norm hidden state before each.
    cache: the cache; comes back with the rows written.
    page_table: [B, n] int32.
    position: [B] int32 position of the first of them.
    pending: [B] int32 how many tokens there are.
    plan: tiling, dispatch and placement.

  Returns:
    [B * J, D] post-norm hidden states, the cache, each row's selection.
  """
  B, J = tokens.shape
  at = jnp.arange(J, dtype=jnp.int32)[None]
  pos = jnp.where(at < pending[:, None], position[:, None] + at, -1)
  seq = jnp.repeat(jnp.arange(B, dtype=jnp.int32), J)
  rows = make_rows(seq, pos.reshape(-1), page_table)
  return extend(
    model,
    tokens.reshape(-1),
    hidden.reshape(B * J, -1),
    cache,
    rows,
    plan,
  )


def draft(
  model: Model,
  tokens: jax.Array,
  hidden: jax.Array,
  cache: Cache,
  page_table: jax.Array,
  position: jax.Array,
  pending: jax.Array,
  count: jax.Array,
  params: SamplingParams,
  num_drafts: int,
  options: DraftOptions = SHARED,
  plan: LocalPlan | None = None,
  forced: jax.Array | None = None,
) -> tuple[Drafts, Cache]:
  """One round of drafting.

  Args:
    model: the model, with its drafter.
    tokens: [B, J] int32 newest verified tokens, the first `pending` count.
    hidden: [B, J, D] the trunk's post-norm hidden state before each.
    cache: the cache; comes back with the verified rows of the drafter.
    page_table: [B, n] int32.
    position: [B] int32 position of the first of them.
    pending: [B] int32 how many tokens there are; 0 drafts nothing.
    count: [B] int32 drafts wanted, at most `num_drafts`.
    params: the same temperature and cuts as the target's.
    num_drafts: K.
    options: sharing, positions and the draft rule.
    plan: tiling, dispatch and placement.
    forced: [B, K] int32 proposals from elsewhere, -1 for the drafter's own;
      their q is one-hot.

  Returns:
    The drafts and the cache. Drafted rows are never read later: with sharing
    none is written, without it they lie beyond what is verified.
  """
  plan = plan or LocalPlan()
  B, K = tokens.shape[0], num_drafts
  seq = jnp.arange(B, dtype=jnp.int32)
  g, cache, selection = extend_pending(
    model, tokens, hidden, cache, page_table, position, pending, plan
  )
  # Each sequence goes on from its own newest verified row.
  newest = jnp.maximum(pending - 1, 0)
  selection = jax.tree.map(lambda a: newest_rows(a, newest), selection)
  last = jnp.where(pending > 0, position + newest, -1)
  count = jnp.where(last > 0, jnp.minimum(count, K), 0)
  out = _Steps(
    tokens=jnp.zeros((B, K), jnp.int32),
    q=jnp.zeros((B, K, model.config.vocab_size), jnp.float32),
    logits=jnp.zeros((B, K, model.config.vocab_size), jnp.float32),
    hidden=newest_rows(g, newest),
    cache=None if options.share_kv else cache,
    index_calls=jnp.int32(1),
  )
  forced = jnp.full((B, K), -1, jnp.int32) if forced is None else forced
  propose = lambda j, out: _propose(
    model, out, j, last, params, options, plan, forced
  )
  out = propose(0, out)
  frozen = selection if options.share_kv else None
  held = lambda out: out.cache if frozen is None else cache

  def step(j, out):
    live = (last >= 0) & (j < count)
    moved = jnp.where(live, last + j, -1)
    turned = moved if options.advance_position else jnp.where(live, last, -1)
    token = jax.lax.dynamic_index_in_dim(out.tokens, j - 1, 1, False)
    rows = make_rows(seq, moved, page_table)
    g, written, _ = _run(
      model,
      token,
      out.hidden,
      held(out),
      rows,
      turned - 1,
      plan,
      frozen,
    )
    calls = out.index_calls + (0 if options.share_index else 1)
    kept = written if frozen is None else None
    out = out._replace(hidden=g, cache=kept, index_calls=calls)
    return propose(j, out)

  # The longest count sets the number of steps, so few drafts cost few steps.
  out = jax.lax.fori_loop(1, jnp.max(count), step, out)
  drafts = Drafts(out.tokens, out.q, out.logits, count, out.index_calls)
  return drafts, held(out)


def newest_rows(a: jax.Array, newest: jax.Array) -> jax.Array:
  """Row `newest[b]` of each sequence: [B * J, ...] to [B, ...].

  After a round sequences differ in how many rows they keep; a sequence's
  first or last row is another token's (known fault 34).
  """
  B = newest.shape[0]
  return a.reshape(B, -1, *a.shape[1:])[jnp.arange(B), newest]


class _Steps(NamedTuple):
  """What the draft steps carry."""

  tokens: jax.Array  # [B, K]
  q: jax.Array  # [B, K, V]
  logits: jax.Array  # [B, K, V]
  hidden: jax.Array  # [B, D]
  cache: Cache | None  # None where no step writes
  index_calls: jax.Array


def _propose(model, out, j, last, params, options, plan, forced):
  """Draws draft j of each sequence from the logits of its hidden state."""
  logits = draft_logits(model, out.hidden, plan)
  if options.greedy:
    zeros = jnp.zeros_like(params.temperature)
    params = dataclasses.replace(params, temperature=zeros)
  target = last + 1 + j  # position of the token proposed
  token, allowed = choose_tokens(plan, logits, target, params, Purpose.DRAFT)
  q = plan.rows(lambda x: jax.nn.softmax(x, axis=-1), allowed)
  given = jax.lax.dynamic_index_in_dim(forced, j, 1, False)
  token = jnp.where(given >= 0, given, token)
  sure = jax.nn.one_hot(given, q.shape[-1], dtype=q.dtype)
  q = jnp.where((given >= 0)[:, None], sure, q)
  at = (0, j)
  return out._replace(
    tokens=jax.lax.dynamic_update_slice(out.tokens, token[:, None], at),
    q=jax.lax.dynamic_update_slice(out.q, q[:, None], (*at, 0)),
    logits=jax.lax.dynamic_update_slice(out.logits, logits[:, None], (*at, 0)),
  )
