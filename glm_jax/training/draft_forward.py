"""The drafter over packed windows: all rows draft G tokens at once.

Row p (token p, the trunk's hidden state of p - 1, as in `glm_jax.drafting`)
first runs the layer as draft-extend does, and its post-norm state g[0]
predicts token p + 1. Step j then joins token p + j with g[j - 1] and predicts
token p + j + 1.

    shared    query, attention, MLP only: step 0's rows and step 0's selection
              of row p serve all steps, as they do at inference
    unshared  the older form: step j has rows, index and selection of its own,
              all made at step j

Gradients of the shared rows sum over steps. Every row keys step 0; the steps
(and their loss) are run for each `stride`-th row.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from glm_jax.drafting import drafter
from glm_jax.model import Model
from glm_jax.rope import rope_tables
from glm_jax.training.attention import attend
from glm_jax.training.forward import (
  ForwardOptions,
  Pass,
  remat,
  run_attention,
  run_feed_forward,
)
from glm_jax.training.index_losses import index_loss
from glm_jax.training.windows import Keys, Windows, strided


@dataclasses.dataclass(frozen=True)
class DraftForm:
  """How the drafter is trained.

  Attributes:
    steps: G.
    share: later steps reuse the first one's index and rows.
    advance_position: a later step's query rotates one position on.
    stride: every how manieth row drafts.
    loss: 'tv' (end-to-end total variation) or 'ce'.
    sparse: the drafter attends to its selection; False: to everything, and
      its indexer's loss covers all keys (warm-up). The trunk stays as it is.
  """

  steps: int = 7
  share: bool = True
  advance_position: bool = True
  stride: int = 1
  loss: str = 'tv'
  sparse: bool = True

  def __post_init__(self):
    if self.loss not in ('tv', 'ce'):
      raise ValueError(f"loss={self.loss!r} must be 'tv' or 'ce'")


class Drafted(NamedTuple):
  """What the drafter made of a batch; T' rows drafted.

  Attributes:
    hidden: [G, T', D] post-norm states.
    trunk: [G, T', D] the trunk's states that predict the same tokens.
    targets: [G, T'] int32.
    mask: [T'] rows that have all targets.
    aux: 'kl' [1] with `kl_stride`, 'load' [1, E].
  """

  hidden: jax.Array
  trunk: jax.Array
  targets: jax.Array
  mask: jax.Array
  aux: dict[str, jax.Array]


def draft_windows(
  model: Model,
  windows: Windows,
  hidden: jax.Array,
  options: ForwardOptions,
  form: DraftForm,
  offset: jax.Array | int = 0,
) -> Drafted:
  """Drafts from every `stride`-th row.

  Args:
    model: with its drafter.
    windows: the batch.
    hidden: [B * S, D] the trunk's post-norm hidden states; cut them from the
      graph to leave the trunk alone.
    options: how to compute.
    form: how the drafter is trained.
    offset: int32, shifts which rows draft and have an indexer loss.

  Returns:
    Hidden states, and what they should predict.
  """
  S, B = windows.rows, windows.tokens.shape[0]
  hidden = hidden.reshape(B, S, -1)
  previous = jnp.pad(hidden, ((0, 0), (1, 0), (0, 0)))[:, :S]
  live = windows.positions[:, :S] > 0  # row 0 of a segment has no state
  previous = jnp.where(live[..., None], previous, 0)
  options = dataclasses.replace(options, sparse=options.sparse and form.sparse)
  run = _shared if form.share else _unshared
  place = offset % form.stride
  states, aux = run(model, windows, previous, options, form, offset)
  some = lambda a: strided(a, form.stride, place)
  ahead = lambda a, n: jnp.pad(a, ((0, 0), (0, n), (0, 0)))[:, n : n + S]
  trunk = [some(ahead(hidden, j)) for j in range(form.steps)]
  targets = [some(windows.targets(1 + j)[0]) for j in range(form.steps)]
  last = jnp.arange(S) + form.steps - 1 < S  # whose trunk states are here
  mask = live & windows.targets(form.steps)[1] & last
  flat = lambda xs: jnp.stack(xs).reshape(form.steps, -1, *xs[0].shape[2:])
  return Drafted(
    states,
    lax.stop_gradient(flat(trunk)),
    flat(targets),
    some(mask).reshape(-1),
    aux,
  )


def _pass(model, windows, options, form, offset, step):
  """The pass of step `step` over all rows; slot 0 holds nothing."""
  c, S = model.config, windows.rows
  segment, position = windows.segments[:, :S], windows.positions[:, :S]
  turned = position - 1 + (step if form.advance_position else 0)
  cos, sin = rope_tables(
    turned.reshape(-1), c.mla.qk_rope_head_dim, c.rope_theta
  )
  place = offset % max(options.kl_stride, 1)
  return Pass(Keys(segment, position, 1), cos, sin, place, options)


def _whole_layer(model, windows, state, options, form, offset, j):
  """One step as a full layer over all rows; state [B, S, D]."""
  mtp = drafter(model)
  step = _pass(model, windows, options, form, offset, j)
  B, S, D = state.shape

  def run(mtp, embed, state):
    mtp = options.plan.weights(mtp, B * S)
    tokens = windows.targets(j)[0].reshape(-1)
    embedding = options.plan.embed(embed, tokens)
    x = mtp.join(embedding, state.reshape(-1, D).astype(embedding.dtype))
    x, attended = run_attention(mtp.block, x, None, step)
    x, load = run_feed_forward(
      mtp.block, mtp.experts, x, step.live, step.options
    )
    aux = {'load': load[None]}
    if options.kl_stride:
      loss = index_loss(
        attended.index,
        attended.selection,
        mtp.block,
        [attended.target],
        step,
      )
      aux['kl'] = loss[None]
    return mtp.norm(x), (attended.rows, attended.selection), aux

  g, kept, aux = remat(run, options)(mtp, model.embed[...], state)
  return g.reshape(state.shape).astype(state.dtype), kept, aux


def _shared(model, windows, state, options, form, offset):
  g, (rows, selection), aux = _whole_layer(
    model, windows, state, options, form, offset, 0
  )
  mtp, c = drafter(model), model.config
  place = offset % form.stride
  some = lambda a: strided(a, form.stride, place)
  first = _pass(model, windows, options, form, offset, 0)
  queries = jax.tree.map(some, first.keys.queries)
  chosen = jax.tree.map(some, selection) if options.sparse else None
  position = some(windows.positions[:, : windows.rows])
  live = (queries.segment > 0).reshape(-1)
  state = some(g).reshape(-1, g.shape[-1])
  B, R = queries.index.shape

  def later(mtp, embed, rows, state, j):
    turned = position - 1 + (j if form.advance_position else 0)
    cos, sin = rope_tables(
      turned.reshape(-1), c.mla.qk_rope_head_dim, c.rope_theta
    )
    mtp = options.plan.weights(mtp, B * R)
    tokens = some(windows.targets(j)[0]).reshape(-1)
    embedding = options.plan.embed(embed, tokens)
    x = mtp.join(embedding, state.astype(embedding.dtype))
    attention = mtp.block.attention
    _, q, _ = attention.project(mtp.block.input_norm(x), cos, sin)
    x = x + attend(
      attention,
      q.reshape(B, R, *q.shape[1:]),
      rows,
      chosen,
      queries,
      first.keys,
      implementation=options.attention_here,
      chunk=options.chunk,
      block_bytes=options.block_bytes,
      plan=options.plan,
    )
    x, load = run_feed_forward(mtp.block, mtp.experts, x, live, options)
    return mtp.norm(x), load

  states = [state]
  for j in range(1, form.steps):
    run = remat(lambda *args, j=j: later(*args, j), options)
    state, load = run(mtp, model.embed[...], rows, states[-1])
    states.append(state)
    aux['load'] += load[None]
  return jnp.stack(states), aux


def _unshared(model, windows, state, options, form, offset):
  states, kept = [], []
  for j in range(form.steps):
    state, _, aux = _whole_layer(
      model, windows, state, options, form, offset, j
    )
    states.append(state)
    kept.append(aux)
  aux = {'load': sum(a['load'] for a in kept)}
  if options.kl_stride:
    aux['kl'] = sum(a['kl'] for a in kept) / form.steps
  place = offset % form.stride
  some = [strided(s, form.stride, place) for s in states]
  return jnp.stack([s.reshape(-1, s.shape[-1]) for s in some]), aux
