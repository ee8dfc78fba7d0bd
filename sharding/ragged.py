"""The expert exchange that sends exactly the rows that travel; TPU only.

Same results as the dense exchange of `sharding.experts`, in one round: rows
are sorted by the rank they go to and sent as slices of any length. A rank
makes room for every row of every rank, since all may come to it; what is not
used is neither sent nor computed on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def exchange(run, x, chosen, weights, owners, needs):
  """Sends rows to their experts' ranks, runs them there, sends sums back.

  Args:
    run: weighted sums [M, D] of rows, their experts and weights.
    x: [T, D] this rank's rows.
    chosen: [T, k] int32 experts.
    weights: [T, k] float32.
    owners: mesh axes of the ranks.
    needs: [T, ranks] bool: row t has an expert on that rank.

  Returns:
    [T, D] float32.
  """
  T, ranks = needs.shape
  width = min(chosen.shape[1], ranks)
  sizes = jnp.sum(needs, axis=0, dtype=jnp.int32)  # to each rank
  table = lax.all_gather(sizes, owners)  # [sender, receiver]
  me = lax.axis_index(owners)
  before = jnp.cumsum(table, axis=0) - table  # rows of lower senders
  there = before[me]  # where this rank's slice lies on each receiver
  here = before[:, me]  # where each sender's slice lies on this rank
  start = jnp.cumsum(sizes) - sizes
  # Rows by the rank they go to; a row goes to at most `width` ranks.
  place = start + jnp.cumsum(needs, axis=0, dtype=jnp.int32) - 1
  row = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[:, None], needs.shape)
  source = jnp.full((T * width,), T, jnp.int32)
  source = source.at[jnp.where(needs, place, T * width)].set(row, mode='drop')

  def send(a, fill):
    rows = a[jnp.minimum(source, T - 1)]
    room = jnp.full((ranks * T, a.shape[1]), fill, a.dtype)
    return lax.ragged_all_to_all(
      rows, room, start, sizes, there, table[:, me], axis_name=owners
    )

  out = run(send(x, 0), send(chosen, -1), send(weights, 0))
  # Each slice goes back to where it was taken from.
  starts = lax.all_gather(start, owners)[:, me]
  back = lax.ragged_all_to_all(
    out,
    jnp.zeros((T * width, x.shape[1]), out.dtype),
    here,
    table[:, me],
    starts,
    sizes,
    axis_name=owners,
  )
  total = jnp.zeros((T, x.shape[1]), jnp.float32)
  return total.at[source].add(back, mode='drop')


def check_platform(mesh: jax.sharding.Mesh) -> None:
  """Raises `NotImplementedError` unless the devices are TPUs."""
  platform = mesh.devices.flat[0].platform
  if platform != 'tpu':
    raise NotImplementedError(
      f'ragged_experts runs on TPU, these devices are {platform}: use the '
      'dense exchange'
    )
