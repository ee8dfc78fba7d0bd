"""Fetching a layer of dealt pages by kernels (`sharding.remote_gather`).

Latents and index keys go in one gather where they are dealt over the same
ranks, else in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.tiling import PAGE
from sharding import remote_gather
from sharding.pools import KEYS, LATENTS, Pool
from sharding.sharded_cache import ShardedCache, Slot


class Part(NamedTuple):
  """A layer of a pool: its slot in the pool, an int or traced."""

  pool: Pool
  layer: jax.Array | int


class Flight(NamedTuple):
  """A gather that is under way.

  Attributes:
    group: what it brings.
    whole: the gathered arrays, not there yet.
    semaphores: tell when they are.
  """

  group: Sequence[Part]
  whole: tuple[jax.Array, ...]
  semaphores: tuple[jax.Array, ...]


def possible(plan, cache) -> bool:
  """Whether kernels gather: on TPUs, wherever rows fill whole tiles."""
  rows = [plan.local_pages(cache, pool) * PAGE for pool in (LATENTS, KEYS)]
  return (
    plan.mesh.devices.flat[0].platform == 'tpu'
    and plan.deal.ranks > 1
    and not any(n % remote_gather.ROWS for n in rows)
  )


def begin(plan, cache, layer, index_slot) -> tuple[ShardedCache, Slot]:
  """Fetches a first layer, which nothing hides."""
  slot = Slot(None, None, None, None)
  for group in _groups(plan, layer, index_slot):
    rows, ring, by_rank = _how(plan, cache, group)

    def body(arrays, slots, rows=rows, ring=ring):
      return remote_gather.gather(arrays, slots, rows, ring)

    run = plan.shard_map(body, (by_rank, P()), (by_rank, P()))
    arrays, whole = run(_arrays(cache, group), _slots(cache, group))
    cache, slot = _put(cache, group, arrays), _put(slot, group, whole)
  return cache, slot


def depart(plan, x, cache, layer, index_slot):
  """Sends for a layer; see `remote_gather.start`.

  Args:
    plan: of dealt pages.
    x: [T, D] what the layer before reads.
    cache: the cache.
    layer: the layer's slot among latents.
    index_slot: its slot among index keys, None if it is shared.

  Returns:
    x, the cache, and the flights.
  """
  flights = []
  for group in _groups(plan, layer, index_slot):
    rows, ring, by_rank = _how(plan, cache, group)
    by_row = P(plan.row_axes(len(x)) or None)

    def body(x, arrays, slots, rows=rows, ring=ring):
      return remote_gather.start(arrays, slots, rows, x, ring)

    run = plan.shard_map(
      body, (by_row, by_rank, P()), (by_rank, by_row, P(), P())
    )
    arrays, x, *flight = run(x, _arrays(cache, group), _slots(cache, group))
    cache = _put(cache, group, arrays)
    flights.append(Flight(group, *flight))
  return x, cache, flights


def land(plan, x, cache, flights: Sequence[Flight]):
  """Waits for a layer; see `remote_gather.wait`.

  Args:
    plan: of dealt pages.
    x: [T, D] what the layer before made.
    cache: the cache.
    flights: of `depart`.

  Returns:
    x, the cache, and the slot.
  """
  slot = Slot(None, None, None, None)
  for group, whole, semaphores in flights:
    rows, ring, by_rank = _how(plan, cache, group)
    by_row = P(plan.row_axes(len(x)) or None)

    def body(x, arrays, whole, semaphores, rows=rows, ring=ring):
      return remote_gather.wait(arrays, whole, semaphores, rows, x, ring)

    run = plan.shard_map(
      body, (by_row, by_rank, P(), P()), (by_rank, P(), by_row)
    )
    arrays, whole, x = run(x, _arrays(cache, group), whole, semaphores)
    cache, slot = _put(cache, group, arrays), _put(slot, group, whole)
  return x, cache, slot


def _groups(plan, layer, index_slot) -> list[list[Part]]:
  latents, keys = Part(LATENTS, layer), Part(KEYS, index_slot)
  if index_slot is None:
    return [[latents]]
  if plan.axes(LATENTS.rule) == plan.axes(KEYS.rule):
    return [[latents, keys]]
  return [[latents], [keys]]


def _how(plan, cache, group):
  """Rows of a rank, the ring, and how the pools are split."""
  pool = group[0].pool
  axes = plan.axes(pool.rule)
  ring = remote_gather.Ring(
    axes,
    tuple(plan.mesh.shape[a] for a in axes),
    tuple(a for a in plan.mesh.axis_names if a not in axes),
    barrier=0 if pool is LATENTS else 1,
  )
  return plan.local_pages(cache, pool) * PAGE, ring, P(axes or None)


def _arrays(source, group) -> tuple[jax.Array, ...]:
  pairs = (part.pool.arrays(source) for part in group)
  return tuple(a for pair in pairs for a in pair if a is not None)


def _slots(cache, group) -> jax.Array:
  """The layer's place in each array of `_arrays`."""
  slots = [
    jnp.asarray(part.layer, jnp.int32)
    for part in group
    for a in part.pool.arrays(cache)
    if a is not None
  ]
  return jnp.stack(slots)


def _put(source, group, arrays):
  """`source` with the arrays of `_arrays` replaced."""
  size = len(arrays) // len(group)  # both pools have scales, or neither
  for i, part in enumerate(group):
    pair = (*arrays[i * size : (i + 1) * size], None)[:2]
    source = part.pool.replaced(source, pair)
  return source
