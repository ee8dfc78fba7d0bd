"""One optimiser step of a stage: losses, gradients, update, router bias."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from glm_jax import losses
from glm_jax.compiling import StepJit
from glm_jax.layer_plan import layer_plan
from glm_jax.model import Model
from glm_jax.plan import LOCAL, LocalPlan
from glm_jax.training.config import Stage, TrainConfig
from glm_jax.training.draft_forward import draft_windows
from glm_jax.training.forward import trunk
from glm_jax.training.optimizer import Optimizer, learning_rate
from glm_jax.training.parameters import BIAS, Layout, part_of
from glm_jax.training.windows import Windows

_CHUNK = 2048  # rows whose logits exist at once
_DRAFT_CHUNK = 512
_ACCEPT_STRIDE = 8  # of the acceptance estimate where it is no loss


class TrainState(NamedTuple):
  """Everything that a step changes.

  Attributes:
    params: float32 by path.
    moments: the optimiser's state.
    step: int32, steps done.
    alive: False once a step was not finite; such a step and all later ones
      change nothing.
  """

  params: dict[str, jax.Array]
  moments: Any
  step: jax.Array
  alive: jax.Array


def trainable(config: TrainConfig, layout: Layout) -> list[str]:
  """Paths that gradients move; the correction bias moves by load alone."""
  return [
    path
    for path in layout.leaves
    if part_of(path) in config.trained and not path.endswith(BIAS)
  ]


def init_state(
  config: TrainConfig, layout: Layout, start: Model | None = None
) -> TrainState:
  """The state before step 0."""
  params = layout.init(config.seed, start)
  paths = trainable(config, layout)
  moments = Optimizer(config, paths).init({p: params[p] for p in paths})
  return TrainState(params, moments, jnp.int32(0), jnp.bool(True))


def head_weight(model: Model, *, drafter: bool = False) -> jax.Array:
  """[V, D] of the trunk's head or the drafter's."""
  if drafter and model.mtp.head is not None:
    return model.mtp.head.kernel[...]
  if model.head is not None:
    return model.head.kernel[...]
  return model.embed[...]


def stage_loss(
  model: Model,
  windows: Windows,
  stage: Stage,
  offset: jax.Array | int,
  plan: LocalPlan = LOCAL,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of one micro-batch, and what to log.

  Args:
    model: in its compute dtype.
    windows: the batch.
    stage: what is trained and how.
    offset: shifts which rows have an indexer loss or draft.
    plan: where rows, keys and weights are.

  Returns:
    The loss; 'cross_entropy' and, where they exist, 'indexer_kl',
    'draft_loss', 'draft_kl', 'accept' and the loads 'load', 'draft_load'.
  """
  options = dataclasses.replace(stage.options, plan=plan)
  learns = {'trunk', 'indexer'} & set(stage.train)
  own = options if 'indexer' in learns else _without_kl(options)
  place = offset % max(own.kl_stride, 1)
  hidden, aux = trunk(model, windows, own, place)
  if not learns:
    hidden = lax.stop_gradient(hidden)
  targets, mask = windows.targets(1)
  entropy = losses.cross_entropy(
    hidden, head_weight(model), targets.reshape(-1), mask.reshape(-1), _CHUNK
  )
  log = {'cross_entropy': entropy}
  total = entropy if 'trunk' in learns else 0.0
  if 'kl' in aux:
    log['indexer_kl'] = jnp.mean(aux['kl'])
    total += stage.kl_coefficient * jnp.sum(aux['kl'])
  if 'load' in aux:
    log['load'] = aux['load']
  if stage.draft is not None:
    draft, more = _draft_loss(model, windows, hidden, stage, options, offset)
    total += stage.draft_weight * draft
    log |= more
  return jnp.asarray(total, jnp.float32), log


def _without_kl(options):
  return dataclasses.replace(options, kl_stride=0)


def _draft_loss(model, windows, hidden, stage, options, offset):
  form = stage.draft
  out = draft_windows(model, windows, hidden, options, form, offset)
  head = head_weight(model, drafter=True)
  judge = lambda q, p, mask: losses.end_to_end_tv_from_hidden(
    p, q, head, mask, p_head=head_weight(model), chunk=_DRAFT_CHUNK
  )
  if form.loss == 'tv':
    loss = judge(out.hidden, out.trunk, out.mask)
    rejected = loss
  else:
    loss = losses.mtp_cross_entropy(
      out.hidden, head, out.targets, out.mask, _DRAFT_CHUNK
    )
    some = slice(None, None, _ACCEPT_STRIDE)
    detached = lax.stop_gradient(out.hidden[:, some])
    rejected = judge(detached, out.trunk[:, some], out.mask[some])
  log = {
    'draft_loss': loss,
    'accept': lax.stop_gradient(form.steps * (1 - rejected)),
    'draft_load': out.aux['load'],
  }
  if 'kl' in out.aux:
    log['draft_kl'] = out.aux['kl'][0]
    loss += stage.kl_coefficient * out.aux['kl'][0]
  return loss, log


@functools.lru_cache(16)
def make_step(config: TrainConfig, stage: Stage) -> Callable:
  """The compiled step of a stage on one device; the state is donated."""
  return StepJit(step_function(config, stage), donate_argnums=0)


def step_function(
  config: TrainConfig, stage: Stage, plan: LocalPlan = LOCAL
) -> Callable[[TrainState, Windows], tuple[TrainState, dict[str, jax.Array]]]:
  """The step of a stage, to be compiled.

  Args:
    config: the run.
    stage: one of its stages.
    plan: where rows, keys and weights are.

  Returns:
    (state, windows with a leading axis of micro-batches) to the new state
    and scalars to log.
  """
  layout = Layout(config.model)
  paths = trainable(config, layout)
  optimizer = Optimizer(config, paths)

  def loss(moving, params, windows, offset):
    # What the stage leaves alone gets no gradient.
    cut = {
      p: v if part_of(p) in stage.train else lax.stop_gradient(v)
      for p, v in moving.items()
    }
    model = layout.model(params | cut, config.compute)
    return stage_loss(model, windows, stage, offset, plan)

  def gradients(state, batch):
    moving = {p: state.params[p] for p in paths}
    one = lambda windows, i: jax.grad(loss, has_aux=True)(
      moving, state.params, windows, state.step * stage.accumulate + i
    )
    if stage.accumulate == 1:
      return one(jax.tree.map(lambda a: a[0], batch), 0)
    count = stage.accumulate
    shapes = jax.eval_shape(one, jax.tree.map(lambda a: a[0], batch), 0)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    add = lambda total, xs: (jax.tree.map(jnp.add, total, one(*xs)), None)
    grads, log = lax.scan(add, zero, (batch, jnp.arange(count)))[0]
    mean = lambda x: x / count if x.dtype == jnp.float32 else x
    return jax.tree.map(mean, grads), jax.tree.map(mean, log)

  def step(state, batch):
    grads, log = gradients(state, batch)
    norm = _norm(grads)
    clip = jnp.minimum(1.0, config.clip / (norm + 1e-12))
    grads = {p: g * clip for p, g in grads.items()}
    rate = learning_rate(config, state.step) * stage.lr_scale
    moving = {p: state.params[p] for p in paths}
    new, moments = optimizer.update(grads, state.moments, moving, rate)
    new = {p: v for p, v in new.items() if part_of(p) in stage.train}
    new |= _biases(config, stage, layout, state.params, log)
    fine = jnp.isfinite(norm) & jnp.isfinite(log['cross_entropy'])
    fine &= state.alive
    keep = lambda a, b: jnp.where(fine, a, b)
    after = TrainState(
      {p: keep(new.get(p, v), v) for p, v in state.params.items()},
      jax.tree.map(keep, moments, state.moments),
      state.step + fine,
      fine,
    )
    return after, _scalars(log, rate, norm, fine)

  return step


def _norm(grads):
  squares = [jnp.sum(jnp.square(g)) for g in grads.values()]
  return jnp.sqrt(sum(squares))


def _biases(config, stage, layout, params, log):
  """New correction biases by path, of the parts that learn."""
  new = {}
  move = lambda path, load: losses.update_correction_bias(
    params[path], load, config.bias_rate
  )
  plan = layer_plan(layout.config)
  if 'trunk' in stage.train and 'load' in log:
    for i in range(plan.prologue):
      if plan.is_moe(i):
        path = f'prologue.{i}.moe{BIAS}'
        new[path] = move(path, log['load'][plan.moe_slot(i)])
    for j in range(plan.group_size if plan.num_groups else 0):
      first = plan.prologue + j
      if plan.is_moe(first):
        layers = range(first, plan.num_layers, plan.group_size)
        slots = jnp.asarray([plan.moe_slot(i) for i in layers])
        path = f'groups.blocks.{j}.moe{BIAS}'
        each = jax.vmap(
          lambda b, n: losses.update_correction_bias(b, n, config.bias_rate)
        )
        new[path] = each(params[path], log['load'][slots])
  if 'mtp' in stage.train and 'draft_load' in log:
    path = f'mtp.block.moe{BIAS}'
    new[path] = move(path, log['draft_load'][0])
  return new


def _scalars(log, rate, norm, fine):
  out = {k: v for k, v in log.items() if k not in ('load', 'draft_load')}
  for name in ('load', 'draft_load'):
    if name in log:
      load = log[name].astype(jnp.float32)
      worst = jnp.max(load, -1) / jnp.maximum(jnp.mean(load, -1), 1e-9)
      out[f'{name}_max_over_mean'] = jnp.mean(worst)
  return out | {'learning_rate': rate, 'gradient_norm': norm, 'fine': fine}


@functools.lru_cache(16)
def make_eval(
  config: TrainConfig, stage: Stage, plan: LocalPlan = LOCAL
) -> Callable[[dict, Windows], tuple[jax.Array, jax.Array]]:
  """(params, windows) to summed nats and tokens of a batch, compiled."""
  options = dataclasses.replace(_without_kl(stage.options), plan=plan)
  layout = Layout(config.model)

  @jax.jit
  def evaluate(params, windows):
    model = layout.model(params, config.compute)
    hidden, _ = trunk(model, windows, options)
    targets, mask = windows.targets(1)
    mean = losses.cross_entropy(
      hidden, head_weight(model), targets.reshape(-1), mask.reshape(-1), _CHUNK
    )
    count = jnp.sum(mask)
    return mean * count, count

  return evaluate
