"""The model: embedding, unrolled prologue, scanned groups, norm and head.

Parameters live in modules; the cache is passed in and comes back. It goes
through the scan as carry, next to the hidden state, so that a layer writes
and reads rows in place.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from glm_jax.block import Block, LayerIds, StepContext
from glm_jax.cache import Cache, Rows, init_cache, make_rows
from glm_jax.config import ModelConfig
from glm_jax.layer_plan import LayerPlan, layer_plan
from glm_jax.layers import Init, Linear, RMSNorm
from glm_jax.moe import Experts
from glm_jax.mtp import Mtp
from glm_jax.param import param, stack
from glm_jax.plan import LocalPlan, Selection
from glm_jax.rope import rope_tables
from pallas_kernels.block_scale import BLOCK
from pallas_kernels.tiling import PAGE, cdiv

CAPTURES = ('selected', 'scores', 'hidden', 'attention', 'mlp')
# Captured once a full layer; the others once a layer.
_PER_INDEXER = ('selected', 'scores')


class Group(nnx.Module):
  """The layers of one scanned group; its first layer is full."""

  def __init__(self, key, config: ModelConfig, plan: LayerPlan, init: Init):
    first = plan.prologue
    keys = jax.random.split(key, plan.group_size)
    self.blocks = nnx.List(
      Block(k, config, init, full=plan.is_full(i), moe=plan.is_moe(i))
      for i, k in enumerate(keys, first)
    )


class Model(nnx.Module):
  """All parameters of one checkpoint."""

  def __init__(self, key: jax.Array, config: ModelConfig, init: Init):
    plan = layer_plan(config)
    keys = jax.random.split(key, 6)
    D, V = config.hidden_size, config.vocab_size
    self.embed = param(
      keys[0], (V, D), ('vocab', 'embed'), init.dtype, std=init.std
    )
    self.prologue = nnx.List(
      Block(k, config, init, full=plan.is_full(i), moe=plan.is_moe(i))
      for i, k in enumerate(jax.random.split(keys[1], max(plan.prologue, 1)))
      if i < plan.prologue
    )
    self.groups = (
      stack(
        lambda k: Group(k, config, plan, init),
        jax.random.split(keys[2], plan.num_groups),
      )
      if plan.num_groups
      else None
    )
    moes = len(plan.moe_layers)
    self.experts = Experts(keys[3], moes, config, init) if moes else None
    self.norm = RMSNorm(D, config.rms_norm_eps, init)
    self.head = (
      None
      if config.tie_word_embeddings
      else Linear(keys[4], D, V, ('vocab', 'embed'), init, fp8=False)
    )
    self.mtp = Mtp(keys[5], config, init) if plan.has_mtp else None
    self.config = config


class ForwardOutput(NamedTuple):
  """What `forward` returns.

  Attributes:
    logits: [B, T, V] float32.
    hidden: [B, T, D] after the final norm.
    cache: with the tokens' rows in it.
    captured: by name: 'selected' [F, B, T, k] int32 positions and 'scores'
      [F, B, T, S] a full layer; 'hidden', 'attention' and 'mlp'
      [L, B, T, D] a layer (its output, its attention's, its MLP's).
  """

  logits: jax.Array
  hidden: jax.Array
  cache: Cache
  captured: dict[str, jax.Array]


def init_model(
  config: ModelConfig, key: jax.Array, *, dtype='auto', weight_dtype='auto'
) -> Model:
  """A model with random weights; works under `jax.eval_shape`.

  Args:
    config: the model.
    key: random key.
    dtype: 'auto' (the config's), 'bfloat16'/'bf16' or 'float32'/'f32'.
    weight_dtype: 'auto', 'fp8' (block-scaled e4m3 matrices), or wide as
      `dtype`.

  Returns:
    The model.
  """
  return Model(key, config, weight_init(config, dtype, weight_dtype))


def weight_init(config: ModelConfig, dtype='auto', weight_dtype='auto') -> Init:
  """Resolves the dtypes of a model's weights; raises on unknown names."""
  names = {'bf16': 'bfloat16', 'f32': 'float32'}
  if weight_dtype == 'auto':
    weight_dtype = 'wide' if config.weight_block_size is None else 'fp8'
  if weight_dtype not in ('wide', 'fp8'):
    weight = names.get(str(weight_dtype), str(weight_dtype))
    if dtype not in ('auto', weight_dtype, weight):
      raise ValueError(
        f'{weight_dtype=} contradicts {dtype=}: wide weights have the '
        'compute dtype'
      )
    dtype, weight_dtype = weight, 'wide'
  dtype = config.dtype if dtype == 'auto' else dtype
  dtype = names.get(dtype, dtype) if isinstance(dtype, str) else dtype
  dtype = jnp.dtype(dtype)
  if dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
    raise ValueError(
      f"dtype={str(dtype)!r} must be 'auto', 'bf16' or 'f32' "
      "(weights may be 'fp8')"
    )
  block = None
  if weight_dtype == 'fp8':
    block = config.weight_block_size or BLOCK
  return Init(dtype, config.initializer_range, block)


def layer_block(model: Model, layer: int) -> Block:
  """The block of one trunk layer, sliced out of its stack if scanned."""
  plan = layer_plan(model.config)
  if layer < plan.prologue:
    return model.prologue[layer]
  group, place = divmod(layer - plan.prologue, plan.group_size)
  return jax.tree.map(lambda a: a[group], model.groups.blocks[place])


def layer_ids(plan: LayerPlan, layer: int) -> LayerIds:
  """The pool slots of one trunk layer."""
  moe = plan.moe_slot(layer) if plan.is_moe(layer) else 0
  return LayerIds(layer, plan.index_slot(layer), moe)


def run_layers(
  model: Model,
  x: jax.Array,
  cache: Cache,
  selection: Selection | None,
  step: StepContext,
  layers: range,
  replay: jax.Array | None = None,
) -> tuple[jax.Array, Cache, Selection | None, dict[str, jax.Array]]:
  """Runs a range of trunk layers one by one (a stage).

  Args:
    model: the model.
    x: [T, D] hidden states.
    cache: the cache.
    selection: carried in when the first layer is shared.
    step: what all layers share.
    layers: consecutive trunk layers.
    replay: [F, T, k] positions by index slot, instead of own choices.

  Returns:
    x, the cache, the selection that the next layer needs (None when the next
    layer is full or absent), and what was captured, stacked.
  """
  plan = layer_plan(model.config)
  kept: dict[str, list] = {}
  for layer in layers:
    ids = layer_ids(plan, layer)
    own = None
    if replay is not None and plan.is_full(layer):
      own = replay[ids.index]
    following = layer_ids(plan, min(layer + 1, plan.num_latent_slots - 1))
    full = plan.is_full(following.latent)
    x, cache, ahead = step.plan.fetch(
      x, cache, following.latent, following.index if full else None
    )
    block = step.plan.weights(layer_block(model, layer), len(x))
    x, cache, selection, captured = block(
      x, cache, selection, ids, model.experts, step, own
    )
    x, cache = step.plan.arrive(x, cache, ahead)
    for name, value in captured.items():
      kept.setdefault(name, []).append(value)
  after = layers.stop
  if after >= plan.num_layers or plan.is_full(after):
    selection = None
  return x, cache, selection, {k: jnp.stack(v) for k, v in kept.items()}


def _scan_groups(model, x, cache, step, replay):
  """Runs all scanned groups; captures come back flat over layers."""
  plan = layer_plan(model.config)
  group0 = jnp.arange(plan.num_groups, dtype=jnp.int32)
  index0 = plan.index_slot(plan.prologue)
  size = plan.group_size
  moes = [plan.is_moe(plan.prologue + j) for j in range(size)]
  fulls = [plan.is_full(plan.prologue + j) for j in range(size)]
  moe0 = sum(plan.is_moe(i) for i in range(plan.prologue))
  last = LayerIds(plan.num_latent_slots - 1, plan.num_index_slots - 1, 0)

  def body(carry, scanned):
    x, cache = carry
    group, g, own = scanned
    group = step.plan.weights(group, len(x))
    selection, kept = None, {}
    for j, block in enumerate(group.blocks):
      ids = LayerIds(
        plan.prologue + g * size + j,
        index0 + g * sum(fulls) + sum(fulls[: j + 1]) - 1,
        moe0 + g * sum(moes) + sum(moes[:j]),
      )
      # The next group's first layer is full, as is the drafter at the end.
      full = fulls[(j + 1) % size]
      x, cache, ahead = step.plan.fetch(
        x,
        cache,
        jnp.minimum(ids.latent + 1, last.latent),
        jnp.minimum(ids.index + 1, last.index) if full else None,
      )
      mine = None if own is None or not fulls[j] else own[sum(fulls[:j])]
      x, cache, selection, captured = block(
        x, cache, selection, ids, model.experts, step, mine
      )
      x, cache = step.plan.arrive(x, cache, ahead)
      for name, value in captured.items():
        kept.setdefault(name, []).append(value)
    return (x, cache), {k: jnp.stack(v) for k, v in kept.items()}

  own = None
  if replay is not None:
    own = replay[index0:].reshape(-1, sum(fulls), *replay.shape[1:])
  (x, cache), kept = jax.lax.scan(body, (x, cache), (model.groups, group0, own))
  flat = {k: v.reshape(-1, *v.shape[2:]) for k, v in kept.items()}
  return x, cache, flat


def trunk(
  model: Model,
  tokens: jax.Array,
  cache: Cache,
  rows: Rows,
  plan: LocalPlan | None = None,
  *,
  capture: tuple[str, ...] = (),
  replay: jax.Array | None = None,
  drafter_next: bool = False,
) -> tuple[jax.Array, Cache, dict[str, jax.Array]]:
  """Runs all trunk layers on one step's rows.

  Args:
    model: the model.
    tokens: [T] int32 token of each row.
    cache: the cache; comes back with the rows written.
    rows: where each row lives.
    plan: tiling, dispatch and placement; None for one device.
    capture: names of intermediates to return.
    replay: [F, T, k] positions that full layers take instead of their own.
    drafter_next: the same rows go through the drafter next, which finds its
      own cache rows on the way.

  Returns:
    [T, D] hidden states after the final norm, the cache, and captures with
    a leading layer axis.

  Raises:
    ValueError: an unknown capture.
  """
  unknown = set(capture) - set(CAPTURES)
  if unknown:
    raise ValueError(f'capture={sorted(unknown)} is not one of {CAPTURES}')
  plan = plan or LocalPlan()
  layers = layer_plan(model.config)
  c = model.config
  cos, sin = rope_tables(rows.pos, c.mla.qk_rope_head_dim, c.rope_theta)
  cache, rows = plan.begin(cache, rows, 0, 0)
  step = StepContext(rows, cos, sin, plan, tuple(capture))
  x = plan.embed(model.embed[...], tokens)
  x, cache, _, kept = run_layers(
    model, x, cache, None, step, range(layers.prologue), replay
  )
  if layers.num_groups:
    x, cache, more = _scan_groups(model, x, cache, step, replay)
    names = dict.fromkeys([*kept, *more])
    kept = {
      k: jnp.concatenate([d[k] for d in (kept, more) if k in d]) for k in names
    }
  cache = cache if drafter_next else plan.end(cache)
  return plan.rows(model.norm, x), cache, kept


def head(
  model: Model,
  hidden: jax.Array,
  plan: LocalPlan | None = None,
  *,
  own: Linear | None = None,
) -> jax.Array:
  """Logits [T, V] float32 of post-norm hidden states [T, D].

  Args:
    model: the model.
    hidden: [T, D].
    plan: tiling, dispatch and placement; None for one device.
    own: a head other than the model's (the drafter's, if it has one).

  Returns:
    The logits.
  """
  plan = plan or LocalPlan()
  linear = own or model.head
  weight = model.embed if linear is None else linear.kernel
  return plan.logits(weight[...], hidden)


def forward(
  model: Model,
  tokens,
  cache: Cache | None = None,
  *,
  capture: tuple[str, ...] = (),
  start=None,
  mask=None,
  page_table: jax.Array | None = None,
  replay: jax.Array | None = None,
  plan: LocalPlan | None = None,
  cache_dtype: str = 'auto',
) -> ForwardOutput:
  """Runs tokens of whole sequences or their continuations.

  Args:
    model: the model.
    tokens: [B, T] or [T] token ids.
    cache: continues these sequences; None starts new ones in a new cache.
    capture: intermediates to return: 'selected', 'scores', 'hidden',
      'attention', 'mlp'.
    start: [B] position of each sequence's first token; None for 0.
    mask: [B, T] False at padding tokens, which are trailing, write nothing
      and are seen by nobody; None for no padding. Never derived from ids.
    page_table: [B, n] pages of each sequence; None deals the cache's pages
      out evenly.
    replay: [F, B, T, k] positions that full layers take instead of choosing.
    plan: tiling, dispatch and placement; None for one device.
    cache_dtype: of a new cache: 'auto', 'bf16', 'f32' or 'fp8'.

  Returns:
    Logits, hidden states, cache and captures.

  Raises:
    ValueError: shapes that do not fit each other, too small a cache, or an
      unknown capture.
  """
  tokens = jnp.asarray(tokens, jnp.int32)
  tokens = tokens[None] if tokens.ndim == 1 else tokens
  B, T = tokens.shape
  if cache is None:
    if start is not None:
      raise ValueError(f'{start=} needs the cache that holds what precedes')
    dtype = cache_dtype
    if dtype == 'auto' and model.embed.dtype == jnp.float32:
      dtype = 'f32'
    pages = B * cdiv(T, PAGE)
    cache = init_cache(model.config, pages, dtype=dtype, plan=plan)
  if page_table is None:
    n = cache.num_pages // B
    page_table = jnp.arange(B * n, dtype=jnp.int32).reshape(B, n)
  if page_table.shape[1] * PAGE < T:
    raise ValueError(
      f'{T} tokens a sequence need {cdiv(T, PAGE)} pages; page_table has '
      f'{page_table.shape[1]} (cache of {cache.num_pages} for {B} sequences)'
    )
  start = jnp.zeros(B, jnp.int32) if start is None else jnp.asarray(start)
  pos = start[:, None].astype(jnp.int32) + jnp.arange(T, dtype=jnp.int32)
  if mask is not None:
    pos = jnp.where(jnp.asarray(mask), pos, -1)
  seq = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], (B, T))
  rows = make_rows(seq.reshape(-1), pos.reshape(-1), page_table)
  if replay is not None:
    replay = replay.reshape(replay.shape[0], B * T, -1)
  hidden, cache, captured = trunk(
    model,
    tokens.reshape(-1),
    cache,
    rows,
    plan,
    capture=capture,
    replay=replay,
  )
  split = lambda a: a.reshape(*a.shape[:-2], B, T, a.shape[-1])
  logits = head(model, hidden, plan)
  captured = {k: split(v) for k, v in captured.items()}
  return ForwardOutput(split(logits), split(hidden), cache, captured)


def abstract_model(
  config: ModelConfig, *, dtype='auto', weight_dtype='auto'
) -> Model:
  """The model as shapes and dtypes; nothing is allocated."""
  make = lambda: init_model(
    config, jax.random.key(0), dtype=dtype, weight_dtype=weight_dtype
  )
  return jax.eval_shape(make)
