"""The trunk over packed windows, made to be differentiated.

The same blocks as inference (`glm_jax.block`), with three differences: rows
attend within their window instead of through a paged cache; the indexer's
inputs are cut from the graph, so that it learns from its own loss alone and
the trunk never from it; and each index group (a full layer and the shared
layers it serves) is one unit of rematerialisation, of which only the residual
stream, the selection and the attention targets are kept.

The scan over groups carries the residual stream only. Each group's experts
are scanned inputs: gradients are those of one group, never of the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from glm_jax import losses
from glm_jax.block import Block
from glm_jax.layer_plan import layer_plan
from glm_jax.layers import swiglu
from glm_jax.model import Model
from glm_jax.moe import Experts
from glm_jax.plan import LOCAL, LocalPlan
from glm_jax.rope import rope_tables
from glm_jax.training.attention import IMPLEMENTATIONS, attend
from glm_jax.training.index_losses import (
  attention_targets,
  index_loss,
  loss_slots,
)
from glm_jax.training.windows import (
  Keys,
  Selection,
  Windows,
  select,
  slots_mask,
  strided,
)
from pallas_kernels.tiling import dot

_KEPT = ('selection', 'target')


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
  """How the forward pass is computed.

  Attributes:
    sparse: attend to the indexer's selection; else to all visible rows.
    attention: 'gather', 'masked', 'cudnn'; 'auto' is gather on CPU and for
      the sparse pass, else masked.
    experts: 'grouped' (each row through its own experts), 'dense' (all
      experts, weighted: fastest for a few small ones on a GPU), 'auto'.
    kl_stride: every how manieth row has an indexer loss; 0 for none.
    chunk: rows whose [heads, S] scores or logits exist at once.
    block_bytes: of gathered rows at once.
    remat: recompute index groups in the backward pass.
    keep_selection: return what the full layers selected.
    plan: where rows, keys and weights are.
  """

  sparse: bool = True
  attention: str = 'auto'
  experts: str = 'auto'
  kl_stride: int = 1
  chunk: int = 256
  block_bytes: int = 512 << 20
  remat: bool = True
  keep_selection: bool = False
  plan: LocalPlan = LOCAL

  def __post_init__(self):
    if self.attention not in ('auto', *IMPLEMENTATIONS):
      raise ValueError(
        f"attention={self.attention!r} must be 'auto' or one of "
        f'{IMPLEMENTATIONS}'
      )
    if self.experts not in ('auto', 'grouped', 'dense'):
      raise ValueError(
        f"experts={self.experts!r} must be 'auto', 'grouped' or 'dense'"
      )

  @property
  def attention_here(self) -> str:
    """The attention that 'auto' means on this device."""
    if self.attention != 'auto':
      return self.attention
    return 'gather' if self.sparse else 'masked'

  @property
  def experts_here(self) -> str:
    """The expert computation that 'auto' means on this device."""
    if self.experts != 'auto':
      return self.experts
    return 'grouped' if jax.default_backend() == 'cpu' else 'dense'


class Pass(NamedTuple):
  """What all layers of one pass share.

  Attributes:
    keys: what stands at each row.
    cos: [B * S, P / 2] rotary cosines.
    sin: [B * S, P / 2] rotary sines.
    offset: int32 below `kl_stride`, the first row with an indexer loss.
    options: how to compute.
  """

  keys: Keys
  cos: jax.Array
  sin: jax.Array
  offset: jax.Array | int
  options: ForwardOptions

  @property
  def live(self) -> jax.Array:
    """Which rows hold a token [B * S]."""
    return (self.keys.segment > 0).reshape(-1)


class Attended(NamedTuple):
  """What a layer's attention leaves for others.

  Attributes:
    rows: [B, S, latent + P] the layer's rows.
    selection: in force; None if dense.
    index: (queries, weights, keys) of a full layer's indexer, else None.
    target: [T', k] attention shares at the rows with an indexer loss; in the
      dense pass what they are made of, see `index_loss`.
  """

  rows: jax.Array
  selection: Selection | None
  index: tuple | None
  target: jax.Array | tuple | None


def make_pass(
  model: Model, windows: Windows, options: ForwardOptions, offset=0
) -> Pass:
  """The trunk's pass over a batch."""
  c = model.config
  S = windows.rows
  if options.kl_stride and S % options.kl_stride:
    raise ValueError(f'kl_stride={options.kl_stride} must divide {S}')
  segment, position = windows.segments[:, :S], windows.positions[:, :S]
  cos, sin = rope_tables(
    position.reshape(-1), c.mla.qk_rope_head_dim, c.rope_theta
  )
  return Pass(Keys(segment, position, 0), cos, sin, offset, options)


def run_attention(
  block: Block,
  x: jax.Array,
  selection: Selection | None,
  step: Pass,
  replay: jax.Array | None = None,
) -> tuple[jax.Array, Attended]:
  """The attention half of a layer.

  Args:
    block: the layer.
    x: [B * S, D].
    selection: of the full layer below; a full layer ignores it.
    step: what all layers share.
    replay: [B, S, k] slots that a full layer takes instead of its choice.

  Returns:
    x with the attention's output added, and what others need of it.
  """
  o, mla = step.options, block.attention
  B, S = step.keys.segment.shape
  windowed = lambda a: a.reshape(B, S, *a.shape[1:])
  normed = block.input_norm(x)
  q_latent, q, rows = mla.project(normed, step.cos, step.sin)
  q, rows = windowed(q), windowed(rows)
  index = None
  if block.indexer is not None and (o.sparse or o.kl_stride):
    inputs = lax.stop_gradient((normed, q_latent))
    index = block.indexer(*inputs, step.cos, step.sin)
    index = tuple(map(windowed, index))
    if o.sparse:
      as_mask = o.attention_here != 'gather'
      if replay is None:
        selection = select(
          *index, step.keys, block.topk, o.chunk, as_mask=as_mask, plan=o.plan
        )
      else:
        mask = slots_mask(replay, S) if as_mask else None
        selection = Selection(None if as_mask else replay, mask)
      selection = checkpoint_name(selection, 'selection')
  out = attend(
    mla,
    q,
    rows,
    selection if o.sparse else None,
    step.keys.queries,
    step.keys,
    implementation=o.attention_here,
    chunk=o.chunk,
    block_bytes=o.block_bytes,
    plan=o.plan,
  )
  target = None
  if o.kl_stride:
    some = strided(q, o.kl_stride, step.offset)
    absorbed = mla.absorb(some.reshape(-1, *some.shape[2:]))
    absorbed = lax.stop_gradient(absorbed.reshape(*some.shape[:3], -1))
    if o.sparse:
      slots = loss_slots(selection, block.topk, step)
      target = attention_targets(absorbed, rows, slots, mla.config, o)
      target = checkpoint_name(target, 'target')
    else:
      target = (absorbed, rows)  # shares of all keys exist in chunks only
  return x + out, Attended(rows, selection, index, target)


def run_feed_forward(
  block: Block,
  experts: Experts | None,
  x: jax.Array,
  live: jax.Array,
  options: ForwardOptions,
) -> tuple[jax.Array, jax.Array | None]:
  """The MLP half of a layer.

  Args:
    block: the layer.
    experts: its own experts, a pool of one layer; None if dense.
    x: [T, D].
    live: [T] rows that count in the load.
    options: how to compute.

  Returns:
    x with the MLP's output added, and the load [E] of each expert.
  """
  normed = block.post_norm(x)
  if block.moe is None:
    return x + block.mlp(normed), None
  chosen, weights = block.moe.router(normed)
  load = losses.expert_load(chosen, experts.gate.shape[1], live)
  if options.experts_here == 'grouped':
    routed, weights = options.plan.experts(experts, normed, chosen, weights, 0)
  else:
    routed = _all_experts(experts, normed, chosen, weights)[:, None]
    weights = jnp.ones((len(x), 1), jnp.float32)
  return x + block.moe.combine(normed, routed, weights), load


def _all_experts(experts, x, chosen, weights):
  """Weighted sum over experts [T, D], computed for every expert."""
  E = experts.gate.shape[1]
  hit = chosen[:, :, None] == jnp.arange(E)
  share = jnp.sum(jnp.where(hit, weights[:, :, None], 0), axis=1)
  gate, up, down = (getattr(experts, n)[...][0] for n in ('gate', 'up', 'down'))
  into = lambda w: dot('td,efd->tef', x, w).astype(x.dtype)
  hidden = swiglu(into(gate), into(up)).astype(jnp.float32)
  hidden = (hidden * share[:, :, None]).astype(x.dtype)
  return dot('tef,edf->td', hidden, down)


def run_group(
  blocks: Sequence[Block],
  experts: Sequence[Experts | None],
  x: jax.Array,
  step: Pass,
  replay: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """One index group: a full layer and the shared layers it serves.

  Returns:
    x, and 'kl' (a scalar, with `kl_stride`), 'load' [moe layers, E] and
    'selected' [B, S, k] (with `keep_selection`).
  """
  selection, index, targets, loads = None, None, [], []
  for block, own in zip(blocks, experts):
    block = step.options.plan.weights(block, len(x))
    x, attended = run_attention(block, x, selection, step, replay)
    selection = attended.selection
    index = attended.index if block.indexer is not None else index
    targets.append(attended.target)
    x, load = run_feed_forward(block, own, x, step.live, step.options)
    loads += [] if load is None else [load]
  aux = {}
  if step.options.kl_stride:
    aux['kl'] = index_loss(index, selection, blocks[0], targets, step)
  if loads:
    aux['load'] = jnp.stack(loads)
  if step.options.keep_selection:
    aux['selected'] = selection.as_slots(block.topk)
  return x, aux


def remat(f, options: ForwardOptions, *, looped: bool = False):
  """`f`, recomputed in the backward pass except for what is dear."""
  if not options.remat:
    return f
  policy = jax.checkpoint_policies.save_only_these_names(*_KEPT)
  return jax.checkpoint(f, policy=policy, prevent_cse=not looped)


def expert_view(experts: Experts, slot: int) -> Experts:
  """One layer's experts as a pool of one."""
  return jax.tree.map(lambda a: a[slot : slot + 1], experts)


def index_groups(kinds: Sequence[str]) -> list[range]:
  """Ranges of layers that share one selection, the full layer first."""
  starts = [i for i, kind in enumerate(kinds) if kind == 'full']
  return [range(a, b) for a, b in zip(starts, [*starts[1:], len(kinds)])]


def trunk(
  model: Model,
  windows: Windows,
  options: ForwardOptions = ForwardOptions(),
  offset: jax.Array | int = 0,
  replay: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """All trunk layers over a batch.

  Args:
    model: the model in its compute dtype.
    windows: the batch.
    options: how to compute.
    offset: int32 below `kl_stride`: which rows have an indexer loss.
    replay: [full layers, B, S, k] slots, -1 for none, that full layers take
      instead of their own choice: what serving selected for these tokens.

  Returns:
    [B * S, D] hidden states after the final norm; 'kl' [full layers], 'load'
    [moe layers, E] and 'selected' [full layers, B, S, k] in the order of
    layers, where there are such.

  Raises:
    ValueError: selections to replay or to keep of a pass that selects none.
  """
  if not options.sparse and (options.keep_selection or replay is not None):
    raise ValueError('sparse=False selects nothing to replay or to keep')
  layers = layer_plan(model.config)
  step = make_pass(model, windows, options, offset)
  S = step.keys.segment.shape[1]
  tokens = windows.tokens[:, :S].reshape(-1)
  x = options.plan.embed(model.embed[...], tokens)
  found: dict[str, list] = {}
  run = remat(lambda b, e, x, r: run_group(b, e, x, step, r), options)
  groups = index_groups(layers.indexer_types[: layers.prologue])
  for number, group in enumerate(groups):
    own = [
      expert_view(model.experts, layers.moe_slot(i))
      if layers.is_moe(i)
      else None
      for i in group
    ]
    chosen = None if replay is None else replay[number]
    x, aux = run([model.prologue[i] for i in group], own, x, chosen)
    _add(found, aux)
  if layers.num_groups:
    rest = None if replay is None else replay[len(groups) :]
    x, aux = _scan(model, x, step, rest)
    for name, values in aux.items():
      # [groups, n, ...] to one axis of layers.
      found.setdefault(name, []).append(values.reshape(-1, *values.shape[2:]))
  aux = {k: jnp.concatenate(v) for k, v in found.items()}
  return model.norm(x), aux


def _add(found: dict[str, list], aux: dict[str, jax.Array]):
  """Files what a group gave, each with an axis of layers."""
  for name, value in aux.items():
    found.setdefault(name, []).append(value if name == 'load' else value[None])


def _scan(model, x, step, replay):
  """The scanned groups; a repeated group may hold several full layers."""
  layers = layer_plan(model.config)
  first, size = layers.prologue, layers.group_size
  moes = [layers.is_moe(first + j) for j in range(size)]
  before = sum(layers.is_moe(i) for i in range(first))
  pools = None
  if any(moes):
    pools = jax.tree.map(
      lambda a: a[before:].reshape(layers.num_groups, sum(moes), *a.shape[1:]),
      model.experts,
    )
  parts = index_groups(layers.indexer_types[first : first + size])
  if replay is not None:
    replay = replay.reshape(layers.num_groups, len(parts), *replay.shape[1:])

  def body(x, scanned):
    group, pool, chosen = scanned
    found: dict[str, list] = {}
    for number, part in enumerate(parts):
      own = [
        expert_view(pool, sum(moes[:j])) if moes[j] else None for j in part
      ]
      run = lambda b, e, x, r: run_group(b, e, x, step, r)
      run = remat(run, step.options, looped=True)
      taken = None if chosen is None else chosen[number]
      x, aux = run([group.blocks[j] for j in part], own, x, taken)
      _add(found, aux)
    return x, {k: jnp.concatenate(v) for k, v in found.items()}

  return lax.scan(body, x, (model.groups, pools, replay))
