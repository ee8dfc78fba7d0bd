"""The model's own block without its MLP, as programs that suite `layer` runs.

A program is one layer, or four of a kind at decode, as a step of the model
runs them: the cache is donated and comes back, pages lie in random order,
rotary tables and addresses are made once for all layers, and the ops choose
their kernels.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from glm_jax.benchmarks import layer_cases
from glm_jax.benchmarks.layer_cases import LayerCase
from glm_jax.block import Block, LayerIds, StepContext
from glm_jax.cache import (
  Cache,
  Rows,
  init_cache,
  make_rows,
  write_index_keys,
  write_rows,
)
from glm_jax.config import DENSE, FULL, ModelConfig, MtpConfig
from glm_jax.indexer import Indexer
from glm_jax.layers import Init, RMSNorm
from glm_jax.mla import Mla
from glm_jax.plan import LocalPlan
from glm_jax.rope import rope_tables
from pallas_kernels.tiling import PAGE

_PLACES = {  # published name -> attribute of a block
  'input_layernorm.weight': 'input_norm.weight',
  'self_attn.q_a_proj.weight': 'attention.q_a.kernel',
  'self_attn.q_a_layernorm.weight': 'attention.q_norm.weight',
  'self_attn.q_b_proj.weight': 'attention.q_b.kernel',
  'self_attn.kv_a_proj_with_mqa.weight': 'attention.kv_a.kernel',
  'self_attn.kv_a_layernorm.weight': 'attention.kv_norm.weight',
  'self_attn.kv_b_proj.weight': 'attention.kv_b.kernel',
  'self_attn.o_proj.weight': 'attention.o.kernel',
  'self_attn.indexer.wq_b.weight': 'indexer.wq_b.kernel',
  'self_attn.indexer.wk.weight': 'indexer.wk.kernel',
  'self_attn.indexer.weights_proj.weight': 'indexer.weights_proj.kernel',
  'self_attn.indexer.k_norm.weight': 'indexer.key_norm_weight',
  'self_attn.indexer.k_norm.bias': 'indexer.key_norm_bias',
}
_FILL_ROWS = 8192  # of a pool at once
_TOGETHER = 4  # layers of a kind in one program, at decode


class AttentionLayer(Block):
  """A decoder layer that ends behind the attention."""

  def __init__(self, config: ModelConfig, init: Init, *, full: bool):
    keys = jax.random.split(jax.random.key(0), 2)
    self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, init)
    self.attention = Mla(keys[0], config, init)
    self.indexer = Indexer(keys[1], config, init) if full else None
    self.topk = config.indexer.topk

  def _feed_forward(self, x, ids, experts, step):
    return x, x


def make_layer(
  config: ModelConfig, weights: dict, *, full: bool
) -> AttentionLayer:
  """A layer with a copy of given weights, in the config's dtype."""
  dtype = jnp.dtype(config.dtype)
  layer = AttentionLayer(config, Init(dtype), full=full)
  for name, place in _PLACES.items():
    if '.indexer.' in name and not full:
      continue
    *path, last = place.split('.')
    module = functools.reduce(getattr, path, layer)
    value = jnp.array(weights[name], dtype)
    if getattr(module, last).shape != value.shape:
      raise ValueError(f'{place} and {name} have different shapes')
    setattr(module, last, nnx.Param(value))
  return layer


def layers_together(case: LayerCase) -> int:
  """Layers of a timed program: few rows leave the launch of one to be seen."""
  return _TOGETHER if case.phase == 'decode' else 1


def cut(config: ModelConfig, layers: int) -> ModelConfig:
  """A model whose cache holds full layers alone."""
  kinds = (FULL,) * layers
  return dataclasses.replace(
    config,
    indexer_types=kinds,
    mlp_types=(DENSE,) * layers,
    mtp=MtpConfig(),
  )


def empty_cache(case: LayerCase, layers: int) -> Cache:
  """A cache with as many pages as a case has tokens."""
  pages = -(-case.context // PAGE) * case.batch
  return init_cache(cut(case.config, layers), pages)


@functools.partial(jax.jit, donate_argnums=0)
def _randomise(pool: jax.Array, key: jax.Array) -> jax.Array:
  rows = pool.shape[0]
  block = _FILL_ROWS if rows % _FILL_ROWS == 0 else PAGE

  def fill(i, pool):
    drawn = jax.random.normal(jax.random.fold_in(key, i), (block, width))
    drawn = drawn.astype(pool.dtype)
    return lax.dynamic_update_slice(pool, drawn, (i * block, 0))

  width = pool.shape[1]
  return lax.fori_loop(0, rows // block, fill, pool)


def random_cache(case: LayerCase, layers: int, *, full: bool) -> Cache:
  """A cache of normal numbers; shared layers have no index keys."""
  cache = empty_cache(case, layers)
  keys = cache.index_keys if full else cache.index_keys[:0]
  return dataclasses.replace(
    cache,
    latents=_randomise(cache.latents, jax.random.key(1)),
    index_keys=_randomise(keys, jax.random.key(2)) if full else keys,
  )


def rows_of(case: LayerCase) -> Rows:
  """The step's rows; pages of all sequences in random order."""
  each = -(-case.context // PAGE)
  table = np.random.default_rng(4).permutation(case.batch * each)
  table = table.reshape(case.batch, each).astype(np.int32)
  seq = np.repeat(np.arange(case.batch, dtype=np.int32), case.new)
  return make_rows(
    jnp.asarray(seq), jnp.asarray(case.positions), jnp.asarray(table)
  )


def stored_cache(case: LayerCase, rows: Rows) -> Cache:
  """The cache of one layer with what `layer_cases.cached` says."""
  cache = empty_cache(case, 1)
  latents, keys = layer_cases.cached(case)
  before = latents.shape[1]
  if not before:
    return cache
  seq = np.repeat(np.arange(case.batch, dtype=np.int32), before)
  pos = np.tile(np.arange(before, dtype=np.int32), case.batch)
  slots = make_rows(jnp.asarray(seq), jnp.asarray(pos), rows.page_table).slots
  flat = lambda a: jnp.asarray(a.reshape(-1, a.shape[-1]))
  cache = write_rows(cache, 0, slots, flat(latents))
  return write_index_keys(cache, 0, slots, flat(keys))


class Program:
  """Consecutive layers as one program.

  Attributes:
    leaves: their weights, flat: flattening modules at each call takes time
      that a step of the whole model spends once for 78 layers.
    step: of (leaves, cache, x, rows, cos, sin, selection, replay).
  """

  def __init__(self, layers: list[AttentionLayer], capture=()):
    """Takes the layers; a first one that is shared needs a selection."""
    self.leaves, treedef = jax.tree.flatten(layers)
    plan = LocalPlan()

    def step(leaves, cache, x, rows, cos, sin, selection, replay):
      context = StepContext(rows, cos, sin, plan, capture)
      kept = {}
      for i, layer in enumerate(jax.tree.unflatten(treedef, leaves)):
        x, cache, selection, found = layer(
          x, cache, selection, LayerIds(i, i, 0), None, context, replay
        )
        kept |= found
      return x, cache, kept

    self.step = step


def step_inputs(case: LayerCase, rows: Rows) -> tuple:
  """x, rows, cos and sin of a case."""
  c = case.config
  x = layer_cases.hidden(case).reshape(-1, c.hidden_size)
  x = jnp.asarray(x.astype(jnp.dtype(c.dtype)))
  cos, sin = rope_tables(rows.pos, c.mla.qk_rope_head_dim, c.rope_theta)
  return x, rows, cos, sin


def layer_program(
  case: LayerCase, kind: str, weights: dict
) -> tuple[Program, tuple]:
  """A timed program of a case.

  Args:
    case: the case.
    kind: 'full' or 'shared'.
    weights: of `layer_cases.weights`; every layer gets a copy.

  Returns:
    The program and the arguments of its step.
  """
  count, full = layers_together(case), kind == FULL
  layers = [make_layer(case.config, weights, full=full) for _ in range(count)]
  program, rows = Program(layers), rows_of(case)
  selection = None
  if not full:
    chosen = jnp.asarray(layer_cases.selection(case))
    selection = LocalPlan().selection(rows, chosen)
  return program, (
    program.leaves,
    random_cache(case, count, full=full),
    *step_inputs(case, rows),
    selection,
    None,
  )


def lower(program: Program, args: tuple):
  """The program lowered; its cache is donated and comes back second."""
  return jax.jit(program.step, donate_argnums=1).lower(*args)
