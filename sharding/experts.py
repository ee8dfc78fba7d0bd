"""Routed experts over ranks: each rank owns some experts, nothing is dropped.

Whole step: every rank has all rows, runs its own experts and the weighted
sums are added up: one collective.

Split step: a rank's rows travel to the ranks that own their experts and the
weighted sums travel back, by two dense `all_to_all` a round. A row goes to a
rank once, however many of its experts live there. A round has room for
`capacity` rows from each rank to each other rank; `capacity` equal to a
rank's rows is the worst case and always takes one round, a smaller one takes
as many rounds as the fullest pair of ranks needs (scope 'overflow'), so that
no routing can ever lose a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from glm_jax.layers import swiglu
from pallas_kernels import grouped_matmul
from pallas_kernels.tiling import cdiv, round_up
from sharding import ragged
from sharding.collectives import rank_index
from sharding.mesh import ways

NAMES = ('gate', 'up', 'down')


class Pool(NamedTuple):
  """One rank's part of the pool: weights [L, E, ...] and scales by name."""

  gate: jax.Array
  up: jax.Array
  down: jax.Array
  gate_scale: jax.Array | None
  up_scale: jax.Array | None
  down_scale: jax.Array | None


def run_experts(plan, experts, x, chosen, weights, layer) -> jax.Array:
  """Weighted sum of each row's routed experts.

  Args:
    plan: of several devices.
    experts: the pool, split as the plan's rules say.
    x: [T, D] rows.
    chosen: [T, k] int32 experts of each row.
    weights: [T, k] float32.
    layer: slot of the layer in the pool.

  Returns:
    [T, D] float32.

  Raises:
    NotImplementedError: a split step whose rows and experts are split over
      different mesh axes.
    ValueError: shards of fp8 experts cut through their blocks.
  """
  pool, specs = _pool(plan, experts)
  owners, inner = plan.axes('expert'), plan.axes('expert_mlp')
  rows = plan.row_axes(x.shape[0])
  layer = jnp.asarray(layer, jnp.int32)
  if rows and rows != owners:
    raise NotImplementedError(
      f'rows are split over {rows} and experts over {owners}: a split step '
      "needs the same rule for 'rows' and 'expert'"
    )

  def local(pool, layer, x, chosen, weights):
    count = pool.gate.shape[1]
    own = chosen - rank_index(owners) * count
    own = jnp.where((own >= 0) & (own < count), own, -1)
    return _own_experts(plan, experts.block, pool, layer, x, own, weights)

  def whole(*args):
    out = local(*args)
    return lax.psum(out, owners + inner) if owners + inner else out

  def split(pool, layer, x, chosen, weights):
    capacity = capacity_of(plan, x.shape[0], chosen.shape[1])

    def run(x, chosen, weights):
      out = local(pool, layer, x, chosen, weights)
      return lax.psum(out, inner) if inner else out

    target = chosen // pool.gate.shape[1]
    ranks = jnp.arange(lax.axis_size(owners))
    needs = jnp.any(target[:, :, None] == ranks, axis=1)
    if plan.ragged_experts:
      return ragged.exchange(run, x, chosen, weights, owners, needs)
    return _exchange(run, x, chosen, weights, owners, needs, capacity)

  by_row = P(rows or None)
  run = plan.shard_map(
    split if rows else whole, (specs, P(), by_row, by_row, by_row), by_row
  )
  return run(pool, layer, x, chosen, weights)


def _pool(plan, experts):
  """The pool's arrays and how each is split."""
  arrays, specs = {}, {}
  for name in NAMES:
    weight, scale = getattr(experts, name), getattr(experts, f'{name}_scale')
    shape = weight.shape
    arrays[name] = weight[...]
    specs[name] = plan.rules.spec(weight.axes, shape, plan.mesh)
    arrays[f'{name}_scale'] = None if scale is None else scale[...]
    specs[f'{name}_scale'] = None
    if scale is not None:
      specs[f'{name}_scale'] = plan.rules.spec(
        scale.axes, scale.shape, plan.mesh
      )
      parts = ways(plan.mesh, plan.axes('expert_mlp'))
      side = 2 if name != 'down' else 3
      if parts > 1 and shape[side] // parts % experts.block[side - 2]:
        raise ValueError(
          f'experts of width {shape[side]} in {parts} parts cut through fp8 '
          f'blocks of {experts.block[side - 2]}: use a smaller model axis'
        )
  return Pool(**arrays), Pool(**specs)


def _own_experts(plan, block, pool: Pool, layer, x, own, weights):
  """Weighted sums [T, D] over this rank's experts; own [T, k], -1 for none."""
  T, k = own.shape
  count = pool.gate.shape[1]
  width = min(k, count)  # a row's experts are distinct
  order = jnp.argsort(jnp.where(own < 0, count, own), axis=1)[:, :width]
  own = jnp.take_along_axis(own, order, axis=1)
  weights = jnp.take_along_axis(weights, order, axis=1)
  pairs = jnp.where(own < 0, count, own).reshape(-1)
  order = jnp.argsort(pairs, stable=True)
  sizes = jnp.zeros(count, jnp.int32).at[pairs].add(1, mode='drop')

  def apply(name, rows):
    weight = getattr(pool, name)
    scale = getattr(pool, f'{name}_scale')
    if scale is not None:
      scale = _own_scales(plan, block, name, weight, scale)
    return grouped_matmul(
      rows,
      weight,
      scale,
      layer,
      sizes,
      scale_block=block or (1, 1),
      implementation=plan.implementation,
    )

  rows = x[order // width]
  out = apply('down', swiglu(apply('gate', rows), apply('up', rows)))
  # Rows past the groups are nobody's; they may hold anything.
  live = jnp.arange(T * width) < jnp.sum(sizes)
  out = jnp.where(live[:, None], out, 0).astype(jnp.float32)
  inverse = jnp.zeros_like(order).at[order].set(jnp.arange(T * width))
  out = out[inverse].reshape(T, width, -1)
  return jnp.sum(out * weights[..., None], axis=1)


def _own_scales(plan, block, name, weight, scale):
  """The block scales of this rank's share of the experts' width."""
  inner = plan.axes('expert_mlp')
  if not inner:
    return scale
  side = 2 if name != 'down' else 3
  size = weight.shape[side] // block[side - 2]
  start = rank_index(inner) * size
  return lax.dynamic_slice_in_dim(scale, start, size, axis=side)


def capacity_of(plan, rows: int, k: int) -> int:
  """Rows from one rank to another in one round."""
  if plan.expert_capacity is not None:
    return min(max(plan.expert_capacity, 1), rows)
  ranks = ways(plan.mesh, plan.axes('expert'))
  return min(rows, round_up(2 * cdiv(rows * k, ranks), 8))


def _exchange(run, x, chosen, weights, owners, needs, capacity):
  """Sends rows to their experts' ranks, runs them there, sends sums back."""
  T, D = x.shape
  ranks = needs.shape[1]
  # A row's place among those that go to the same rank.
  place = jnp.cumsum(needs, axis=0, dtype=jnp.int32) - 1
  swap = lambda a: lax.all_to_all(a, owners, 0, 0, tiled=True)

  def one_round(i):
    at = jnp.where(needs, place - i * capacity, -1)
    inside = (at >= 0) & (at < capacity)
    rank = jnp.broadcast_to(jnp.arange(ranks), at.shape)
    row = jnp.broadcast_to(jnp.arange(T)[:, None], at.shape)
    source = jnp.full((ranks, capacity), T, jnp.int32)
    source = source.at[rank, jnp.where(inside, at, capacity)].set(
      row, mode='drop'
    )
    source = source.reshape(-1)
    take = lambda a, fill: jnp.where(
      (source < T)[:, None], a[jnp.minimum(source, T - 1)], fill
    )
    out = run(swap(take(x, 0)), swap(take(chosen, -1)), swap(take(weights, 0)))
    back = swap(out)
    return jnp.zeros((T, D), jnp.float32).at[source].add(back, mode='drop')

  out = one_round(0)
  if capacity < T:
    fullest = lax.pmax(jnp.max(jnp.sum(needs, axis=0)), owners)
    rounds = (fullest + capacity - 1) // capacity
    with jax.named_scope('overflow'):
      out = lax.fori_loop(1, rounds, lambda i, out: out + one_round(i), out)
  return out
