"""The two pools of a cache, latents and index keys: one writer for both.

What differs between plans is which rows of a rank's pool a token is; how a
row is written is the cache's secret (`glm_jax.cache`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from glm_jax import cache as cache_lib
from glm_jax.cache import Cache
from pallas_kernels.tiling import PAGE


class Pool(NamedTuple):
  """One of the pools.

  Attributes:
    values: field of `Cache` (and of `Slot`) with the rows.
    scales: field with their scales.
    rule: logical axis over which its pages are split.
    write: of `glm_jax.cache`.
  """

  values: str
  scales: str
  rule: str
  write: Callable

  def arrays(self, source) -> tuple[jax.Array, jax.Array | None]:
    """(values, scales) of a cache or a slot."""
    return getattr(source, self.values), getattr(source, self.scales)

  def replaced(self, source, arrays):
    """The cache or slot with other (values, scales)."""
    fields = {self.values: arrays[0], self.scales: arrays[1]}
    if dataclasses.is_dataclass(source):
      return dataclasses.replace(source, **fields)
    return source._replace(**fields)

  def local(self, cache: Cache, num_pages: int, arrays) -> Cache:
    """A pool of `num_pages` a layer as a cache of its own."""
    none = dict.fromkeys(
      ('latents', 'latent_scales', 'index_keys', 'index_scales', 'hidden')
    )
    return Cache(
      **none | {self.values: arrays[0], self.scales: arrays[1]},
      num_pages=num_pages,
      latent_width=cache.latent_width,
      rope_width=cache.rope_width,
    )


LATENTS = Pool('latents', 'latent_scales', 'tokens', cache_lib.write_rows)
KEYS = Pool(
  'index_keys', 'index_scales', 'index_tokens', cache_lib.write_index_keys
)


def write(
  plan,
  cache: Cache,
  pool: Pool,
  source,
  num_pages: int,
  own: Callable,
  layer,
  slots: jax.Array,
  rows: jax.Array,
  *,
  axes: tuple[str, ...] = (),
):
  """Every rank writes those rows that `own` gives it.

  Args:
    plan: of several devices.
    cache: says how wide rows are.
    pool: which rows they are.
    source: the cache, or a slot, whose arrays are written.
    num_pages: pages of a layer in a rank's pool.
    own: (layer, slots) to the layer's place in a rank's pool and the token
      slots within it, -1 for rows of others; runs on each rank.
    layer: what `own` takes, traced.
    slots: [T] int32 token slots, -1 for none.
    rows: [T, ...] values.
    axes: mesh axes over which `source` is split.

  Returns:
    `source` with the rows in place.
  """

  def body(arrays, layer, slots, rows):
    place, slots = own(layer, slots)
    local = pool.local(cache, num_pages, arrays)
    return pool.arrays(pool.write(local, place, slots, rows))

  by_rank = P(axes or None)
  run = plan.shard_map(body, (by_rank, P(), P(), P()), by_rank)
  arrays = run(pool.arrays(source), layer, slots, rows)
  return pool.replaced(source, arrays)


def pages_of_slot(source, pool: Pool) -> int:
  """Pages of a whole layer in a slot."""
  return getattr(source, pool.values).shape[0] // PAGE
