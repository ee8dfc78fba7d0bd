"""One decoder layer: the same code for prefill, decode, verify and draft.

Rows are (sequence, position) pairs. A full layer writes its index keys and
selects; a shared layer attends with the selection it is given.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from flax import nnx

from glm_jax.cache import Cache, Rows
from glm_jax.config import ModelConfig
from glm_jax.indexer import Indexer
from glm_jax.layers import Init, Mlp, RMSNorm
from glm_jax.mla import Mla
from glm_jax.moe import Experts, Moe
from glm_jax.plan import Selection


class LayerIds(NamedTuple):
  """Where a layer's state lies in the pools; ints or traced int32."""

  latent: jax.Array | int
  index: jax.Array | int
  moe: jax.Array | int


class StepContext(NamedTuple):
  """What every layer of one step reads.

  Attributes:
    rows: the step's rows.
    cos: [T, P / 2] rotary cosines.
    sin: [T, P / 2] rotary sines.
    plan: tiling, dispatch and placement.
    capture: names of the intermediates to return.
    first: lowest position that a query sees; 1 for the drafter.
  """

  rows: Rows
  cos: jax.Array
  sin: jax.Array
  plan: object
  capture: tuple[str, ...] = ()
  first: int = 0


class Block(nnx.Module):
  """A decoder layer; routed experts are passed in, they live in a pool."""

  def __init__(
    self,
    key: jax.Array,
    config: ModelConfig,
    init: Init,
    *,
    full: bool,
    moe: bool,
  ):
    keys = jax.random.split(key, 3)
    D, eps = config.hidden_size, config.rms_norm_eps
    self.input_norm = RMSNorm(D, eps, init)
    self.attention = Mla(keys[0], config, init)
    self.indexer = Indexer(keys[1], config, init) if full else None
    self.post_norm = RMSNorm(D, eps, init)
    self.moe = Moe(keys[2], config, init) if moe else None
    self.mlp = None if moe else Mlp(keys[2], D, config.intermediate_size, init)
    self.topk = config.indexer.topk

  def __call__(
    self,
    x: jax.Array,
    cache: Cache,
    selection: Selection | None,
    ids: LayerIds,
    experts: Experts | None,
    step: StepContext,
    replay: jax.Array | None = None,
    *,
    frozen: bool = False,
  ) -> tuple[jax.Array, Cache, Selection, dict[str, jax.Array]]:
    """Runs the layer.

    Args:
      x: [T, D] hidden states.
      cache: the whole cache; comes back with this step's rows written.
      selection: of the full layer below; a full layer ignores it.
      ids: the layer's slots in the pools.
      experts: the expert pool; None for a dense layer.
      step: what all layers share.
      replay: [T, k] positions a full layer takes instead of its own choice.
      frozen: write nothing, index nothing and attend with `selection` (the
        drafter's later steps).

    Returns:
      x [T, D], the cache, the selection in force, and what was captured.

    Raises:
      ValueError: a shared layer without a selection.
    """
    if self.indexer is None and selection is None:
      raise ValueError(
        'a shared layer needs the selection of its full layer: run the full '
        'layer first and pass its selection on'
      )
    captured: dict[str, jax.Array] = {}
    if frozen:
      q = step.plan.rows(self._query, x, step.cos, step.sin)
    else:
      q, cache, selection = self._attention_inputs(
        x, cache, selection, ids, step, replay, captured
      )
    attended = step.plan.attend(
      q, cache, selection, ids.latent, self.attention.config.scale
    )
    x, captured['attention'] = step.plan.rows(
      self._after_attention, x, attended
    )
    x, captured['mlp'] = self._feed_forward(x, ids, experts, step)
    captured['hidden'] = x
    kept = {k: v for k, v in captured.items() if k in step.capture}
    return x, cache, selection, kept

  def _query(self, x, cos, sin):
    _, q, _ = self.attention.project(self.input_norm(x), cos, sin)
    return self.attention.absorb(q)

  def _attention_inputs(self, x, cache, selection, ids, step, replay, captured):
    """Projects, writes this step's rows, selects."""
    rows, plan = step.rows, step.plan

    def project(x, cos, sin):
      x = self.input_norm(x)
      q_latent, q, row = self.attention.project(x, cos, sin)
      index = () if self.indexer is None else self.indexer(
        x, q_latent, cos, sin
      )  # fmt: skip
      return self.attention.absorb(q), row, index

    q, row, index = plan.rows(project, x, step.cos, step.sin)
    with jax.named_scope('write_rows'):
      cache = plan.write_rows(cache, ids.latent, rows, row)
    if self.indexer is not None:
      index_q, w, key = index
      with jax.named_scope('select'):
        cache = plan.write_index_keys(cache, ids.index, rows, key)
        if 'scores' in step.capture:
          captured['scores'] = plan.index_scores(
            index_q, w, cache, rows, ids.index, first=step.first
          )
        if replay is not None:
          selection = plan.selection(rows, replay)
        else:
          selection = plan.select(
            index_q,
            w,
            cache,
            rows,
            ids.index,
            self.topk,
            first=step.first,
          )
      if 'selected' in step.capture:
        captured['selected'] = selection.positions
    return q, cache, selection

  def _after_attention(self, x, attended):
    out = self.attention.output(attended)
    return x + out, out

  def _feed_forward(self, x, ids, experts, step):
    """Returns x plus the MLP's output, and that output alone."""
    plan = step.plan
    with jax.named_scope('feed_forward'):
      if self.moe is None:

        def dense(x):
          out = self.mlp(self.post_norm(x))
          return x + out, out

        return plan.rows(dense, x)

      def route(x):
        normed = self.post_norm(x)
        return normed, *self.moe.router(normed)

      normed, chosen, weights = plan.rows(route, x)
      routed, weights = plan.experts(experts, normed, chosen, weights, ids.moe)

      def combine(x, normed, routed, weights):
        out = self.moe.combine(normed, routed, weights)
        return x + out, out

      return plan.rows(combine, x, normed, routed, weights)
