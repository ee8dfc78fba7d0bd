"""This repo's model as a `walk.Side`: layers streamed, rows in chunks.

The rows of a layer run through its own one-layer paged cache a chunk at a
time, as in serving, so that memory does not grow with the square of the
context and what is validated is the path that serves. The cache starts as
NaN and its page 0, where unmasked -1 would lead, stays so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax import drafting
from glm_jax.block import LayerIds, StepContext
from glm_jax.cache import init_cache, make_rows
from glm_jax.checkpoints.published import PublishedCheckpoint
from glm_jax.config import DENSE, FULL
from glm_jax.drafting import DraftOptions
from glm_jax.layer_plan import layer_plan
from glm_jax.plan import LocalPlan
from glm_jax.rope import rope_tables
from glm_jax.sampling import sampling_params
from glm_jax.validation.walk import LayerTensors, RunLayer
from pallas_kernels import dispatch
from pallas_kernels.tiling import PAGE, cdiv, dot

CHUNK = 256  # rows of one step
_IDS = LayerIds(latent=0, index=0, moe=0)


class JaxSide:
  """Runs this repo's layers; see `walk.Side`."""

  framework = 'jax'

  def __init__(
    self,
    path: str | os.PathLike,
    dtype: str = 'float32',
    *,
    weight_dtype: str = 'auto',
    plan: LocalPlan | None = None,
    keep_scores: int = 8192,
  ):
    """Opens a checkpoint.

    Args:
      path: directory in the published format.
      dtype: 'float32' or 'bfloat16', of weights and arithmetic.
      weight_dtype: as `load_model` takes it.
      plan: tiling and dispatch; None for one device.
      keep_scores: longest context whose index scores are kept; [T, T]
        float32 a full layer, needed to judge selections that differ. In a
        longer one, none may differ.
    """
    self._checkpoint = PublishedCheckpoint(path)
    self.config = self._checkpoint.config
    self.dtype = dtype
    self._weight_dtype = weight_dtype
    self._plan = plan or LocalPlan()
    self._keep_scores = keep_scores
    # One layer's cache, whichever layer it is.
    self._one = dataclasses.replace(
      self.config,
      indexer_types=(FULL,),
      mlp_types=(DENSE,),
      mtp=dataclasses.replace(self.config.mtp, num_layers=0),
    )
    device = jax.devices()[0]
    self._note = (
      f'jax: {dtype} on {device.device_kind}, matmul precision '
      f'{"highest" if dtype == "float32" else "default"}, '
      f'implementation {self._plan.implementation or "auto"}'
    )
    self.versions = {'jax': jax.__version__, 'platform': device.platform}

  @property
  def notes(self) -> list[str]:
    """How arithmetic was aligned, and the ops chosen so far."""
    return [self._note, *dispatch.chosen()]

  def embed(self, tokens: np.ndarray) -> np.ndarray:
    """[T, D] float32 embeddings."""
    top = self._top()
    return _numpy(top.embed[...][jnp.asarray(tokens, jnp.int32)])

  @contextlib.contextmanager
  def layer(self, layer: int) -> Iterator[RunLayer]:
    """Loads one decoder layer."""
    block, experts = self._checkpoint.load_block(
      layer, dtype=self.dtype, weight_dtype=self._weight_dtype
    )
    full = layer_plan(self.config).is_full(layer)

    def run(x, selected):
      return self._run(block, experts, layer, full, x, selected)

    yield run

  def logits(self, hidden: np.ndarray) -> np.ndarray:
    """[T, V] float32 logits of hidden states above the last layer."""
    top = self._top()
    parts = [
      _numpy(_logits(top, jnp.asarray(rows, self.dtype), self._plan))
      for rows in _chunks(hidden)
    ]
    return np.concatenate(parts)[: len(hidden)]

  def drafts(
    self, tokens: np.ndarray, hidden: np.ndarray, drafted: list[int]
  ) -> np.ndarray:
    """[2, K, V] draft logits, with sharing and without; float32."""
    top = self._top()
    # Arguments of the program: captured, they would be copied into it.
    weights = dict(
      embed=top.embed,
      head=top.head,
      mtp=self._checkpoint.load_mtp(self.dtype, self._weight_dtype),
    )
    T = len(tokens)
    states = top.norm(jnp.asarray(hidden[:-1], self.dtype))
    run = jax.jit(
      functools.partial(_draft_logits, self.config, plan=self._plan),
      static_argnames='share',
    )
    ids = jnp.asarray(tokens, jnp.int32)
    given = jnp.asarray([[*drafted, 0]], jnp.int32)
    cache = init_cache(self.config, cdiv(T + len(drafted), PAGE), dtype='f32')
    return np.stack(
      [
        _numpy(run(weights, ids, states, given, cache, share=share))
        for share in (True, False)
      ]
    )

  def _run(self, block, experts, layer, full, x, selected) -> LayerTensors:
    """Runs a loaded layer on [T, D] rows of one sequence."""
    T = len(x)
    pages = cdiv(T, PAGE)
    cache = self._poisoned_cache(pages + 1)
    page_table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
    capture = ('selected', 'attention', 'mlp', 'hidden')
    if full and selected is None and T <= self._keep_scores:
      capture += ('scores',)
    given = [None] * cdiv(T, CHUNK)
    if selected is not None:
      given = _chunks(selected, fill=-1)
    positions = _chunks(np.arange(T, dtype=np.int32)[:, None], fill=-1)
    c = self.config
    parts = []
    for rows, pos, chosen in zip(_chunks(x), positions, given):
      pos = jnp.asarray(pos[:, 0])
      cache, captured = _step(
        block,
        experts,
        jnp.asarray(rows, self.dtype),
        cache,
        page_table,
        pos,
        rope_tables(pos, c.mla.qk_rope_head_dim, c.rope_theta),
        None if chosen is None else jnp.asarray(chosen),
        full=full,
        plan=self._plan,
        capture=capture,
      )
      parts.append(jax.tree.map(_numpy, captured))
    joined = {k: np.concatenate([p[k] for p in parts])[:T] for k in parts[0]}
    if 'scores' in joined:
      joined['scores'] = joined['scores'][:, :T]
    if 'experts' in joined:
      joined['experts'] = np.sort(joined['experts'], axis=1)
    if selected is not None:
      joined['selected'] = selected
    return LayerTensors(layer=layer, input=x, **joined)

  def _poisoned_cache(self, pages: int):
    """A cache of NaN: what reads a row that was never written shows."""
    kind = 'f32' if self.dtype == 'float32' else 'bf16'
    cache = init_cache(self._one, pages, dtype=kind)
    return jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), cache)

  def _top(self):
    return self._checkpoint.load_top(dtype=self.dtype)


def layer_step(
  block,
  experts,
  x: jax.Array,
  cache,
  page_table: jax.Array,
  pos: jax.Array,
  rotary: tuple[jax.Array, jax.Array],
  chosen: jax.Array | None,
  *,
  full: bool,
  plan: LocalPlan,
  capture: tuple[str, ...],
):
  """One chunk of rows through one layer, and how experts were chosen."""
  rows = make_rows(jnp.zeros_like(pos), pos, page_table)
  step = StepContext(rows, *rotary, plan, capture)
  carried = replay = None
  if full:
    replay = chosen
  elif chosen is not None:
    carried = plan.selection(rows, chosen)
  watched = None if experts is None else _Watched(experts, block.moe.router)
  _, cache, _, captured = block(x, cache, carried, _IDS, watched, step, replay)
  if watched is not None:
    captured |= watched.seen
  return cache, captured


def _draft_logits(
  config, weights, tokens, states, given, cache, *, share, plan
):
  """Draft logits [K, V] after all tokens: prefill, then one round."""
  model = types.SimpleNamespace(config=config, **weights)
  T, K = len(tokens), given.shape[1]
  page_table = jnp.arange(cache.num_pages, dtype=jnp.int32)[None]
  rows = make_rows(
    jnp.zeros(T - 1, jnp.int32),
    jnp.arange(T - 1, dtype=jnp.int32),
    page_table,
  )
  cache = drafting.prefill_rows(model, tokens[:-1], states, cache, rows, plan)
  one = jnp.ones(1, jnp.int32)
  drafts, _ = drafting.draft(
    model,
    tokens[None, -1:],
    states[None, -1:],
    cache,
    page_table,
    (T - 1) * one,
    one,
    K * one,
    sampling_params(1),
    K,
    DraftOptions(share, share),
    plan,
    given,
  )
  return drafts.logits[0]


class _Watched:
  """The experts of a layer, and what they were asked for."""

  def __init__(self, experts, router):
    self._experts, self._router = experts, router
    self.seen: dict[str, jax.Array] = {}

  def __call__(self, x, chosen, layer, plan):
    wide = (x.astype(jnp.float32), self._router.weight[...])
    logits = dot('td,ed->te', wide[0], wide[1].astype(jnp.float32))
    bias = self._router.correction_bias[...]
    self.seen = {'experts': chosen, 'choice': jax.nn.sigmoid(logits) + bias}
    return self._experts(x, chosen, layer, plan)


def compile_step():
  """`layer_step` as an executable of its own, traced afresh."""
  return jax.jit(
    functools.partial(layer_step),
    static_argnames=('full', 'plan', 'capture'),
    donate_argnames='cache',
  )


_step = compile_step()


@functools.partial(jax.jit, static_argnames='plan')
def _logits(top, x, plan):
  return top.logits(x, plan)


def _chunks(x: np.ndarray, fill=0) -> list[np.ndarray]:
  """[CHUNK, ...] pieces of [T, ...], the last one filled up."""
  missing = -len(x) % CHUNK
  padded = np.pad(x, ((0, missing), (0, 0)), constant_values=fill)
  return list(padded.reshape(-1, CHUNK, x.shape[1]))


def _numpy(x: jax.Array) -> np.ndarray:
  if jnp.issubdtype(x.dtype, jnp.floating):
    x = x.astype(jnp.float32)
  return np.asarray(x)
