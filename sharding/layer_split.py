"""LayerSplit as published: every rank owns the cache of whole layers.

Ranks own contiguous layers, balanced by bytes, the drafter's layer the last;
a cut may fall inside an index group, since every rank computes every layer
and so every full layer's selection. Latents and index keys are numbered
apart, in tables made from the layer plan.

Who computes which queries: in a split step each rank its own rows, in a whole
step every rank all rows. A layer's owner broadcasts what earlier steps wrote
(`sharding.slots` says when); a chunk's new rows are all-gathered, the owner
writes them into its pool and every rank into its slot. A decode step
broadcasts the whole layer as well: the plan is for prefill, and the baseline
of capacity and correctness.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from glm_jax import cache as cache_lib
from glm_jax.cache import Cache
from glm_jax.config import ModelConfig
from glm_jax.layer_plan import layer_plan
from pallas_kernels.tiling import within_pool
from sharding.capacity import pools
from sharding.collectives import broadcast, rank_index
from sharding.mesh import ways
from sharding.pools import LATENTS, write
from sharding.slots import SlotPlan


@dataclasses.dataclass(frozen=True)
class Ownership:
  """Which rank owns which pool slots.

  Attributes:
    layers: layers of each rank, contiguous; the last one may be the
      drafter's; a rank may own none.
    latent: (rank, place in its pool) of each latent slot.
    index: the same of each index-key slot.
  """

  layers: tuple[tuple[int, ...], ...]
  latent: tuple[tuple[int, int], ...]
  index: tuple[tuple[int, int], ...]

  @property
  def num_latent(self) -> int:
    """Latent layers of a rank's pool: the most that one owns."""
    return max(place for _, place in self.latent) + 1

  @property
  def num_index(self) -> int:
    """Index-key layers of a rank's pool: the most that one owns."""
    return max(place for _, place in self.index) + 1


@functools.lru_cache(32)
def ownership(config: ModelConfig, ranks: int) -> Ownership:
  """Deals layers to ranks in contiguous shares of nearly equal bytes.

  Args:
    config: the model.
    ranks: ranks; with more ranks than layers some own none.

  Returns:
    The ownership with the smallest largest share, then the fewest layers on
    any rank.
  """
  plan = layer_plan(config)
  sizes = layer_bytes(config)
  counts = range(1, len(sizes) + 1)
  candidates = {
    sum(sizes[i : i + n]) for n in counts for i in range(len(sizes))
  }
  shares = next(
    s for limit in sorted(candidates) if (s := _fill(sizes, ranks, limit))
  )
  latent, index = {}, {}
  for rank, layers in enumerate(shares):
    full = [i for i in layers if plan.is_full(i)]
    latent |= {i: (rank, place) for place, i in enumerate(layers)}
    index |= {plan.index_slot(i): (rank, p) for p, i in enumerate(full)}
  return Ownership(
    shares,
    tuple(latent[i] for i in range(plan.num_latent_slots)),
    tuple(index[i] for i in range(plan.num_index_slots)),
  )


def layer_bytes(config: ModelConfig, dtype: str = 'auto') -> list[int]:
  """Logical cache bytes of one token in each layer, the drafter's last."""
  sizes = [0] * layer_plan(config).num_latent_slots
  for pool in pools(config, dtype):
    sizes[pool.layer] += pool.bytes_per_token
  return sizes


def _fill(sizes, ranks, limit):
  """Contiguous shares of at most `limit` bytes, evenly long; () if none."""
  least = -(-len(sizes) // ranks)
  for longest in range(least, len(sizes) + 1):
    shares, share = [], []
    for i, size in enumerate(sizes):
      used = sum(sizes[j] for j in share)
      if share and (used + size > limit or len(share) == longest):
        shares.append(tuple(share))
        share = []
      share.append(i)
    shares.append(tuple(share))
    if max(sizes) <= limit and len(shares) <= ranks:
      return tuple(shares) + ((),) * (ranks - len(shares))
  return ()


@dataclasses.dataclass(frozen=True)
class LayerSplit(SlotPlan):
  """See this file's head."""

  @property
  def owners(self) -> Ownership:
    """Who owns which layer."""
    return ownership(self.config, ways(self.mesh, self.axes('tokens')))

  def layout(self, cache: Cache):
    """Each rank has its layers, and room for as many as any rank has."""
    axes, own = self.axes('tokens'), self.owners
    cache_lib.check_row_ids(cache.num_pages, own.num_latent)
    ranks = ways(self.mesh, axes)
    size = {'latent': own.num_latent, 'index': own.num_index}

    def resize(a, kind):
      if a is None:
        return None
      rows = ranks * size[kind] * cache.slots_per_layer
      return jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype)

    shapes = dataclasses.replace(
      cache,
      latents=resize(cache.latents, 'latent'),
      latent_scales=resize(cache.latent_scales, 'latent'),
      index_keys=resize(cache.index_keys, 'index'),
      index_scales=resize(cache.index_scales, 'index'),
    )
    by_rank = P(axes or None)
    specs = dict.fromkeys(
      ('latents', 'latent_scales', 'index_keys', 'index_scales'), by_rank
    )
    specs['hidden'] = self.hidden_spec(cache)
    return shapes, specs

  def page_places(self, cache, kind: str, rows: int, page):
    """On each layer's owner."""
    own = self.owners
    table = own.latent if kind == 'latents' else own.index
    size = own.num_latent if kind == 'latents' else own.num_index
    rank, place = np.array(table, np.int32).T
    return jnp.asarray(rank * size + place) * cache.num_pages + page

  def _where(self, pool, slot):
    """(rank, place) of a pool slot, an int or traced."""
    table = self.owners.latent if pool is LATENTS else self.owners.index
    table = jnp.asarray(np.array(table, np.int32))
    rank, place = table[jnp.asarray(slot, jnp.int32)]
    return rank, place

  def read(self, cache, pool, layer):
    """The owner's layer, on every rank."""
    axes, num_slots = self.axes('tokens'), cache.slots_per_layer

    def body(arrays, rank, place):
      mine = rank_index(axes) == rank
      at = jnp.where(mine, place, 0) * num_slots
      cut = lambda a: lax.dynamic_slice_in_dim(a, at, num_slots)
      parts = jax.tree.map(cut, arrays)
      arrays, parts = lax.optimization_barrier((arrays, parts))
      send = lambda a: broadcast(a, mine, axes)
      return arrays, jax.tree.map(send, parts)

    by_rank = P(axes or None)
    run = self.shard_map(body, (by_rank, P(), P()), (by_rank, P()))
    arrays, whole = run(pool.arrays(cache), *self._where(pool, layer))
    return pool.replaced(cache, arrays), *whole

  def store(self, cache, pool, layer, slots, rows):
    """The owner writes."""
    axes = self.axes('tokens')

    def own(where, slots):
      rank, place = where
      return place, jnp.where(rank_index(axes) == rank, slots, -1)

    return write(
      self, cache, pool, cache, cache.num_pages, own,
      self._where(pool, layer), slots, rows, axes=axes,
    )  # fmt: skip

  def fetched(self, cache, pool, slots):
    """A fetched layer keeps its token slots."""
    return within_pool(slots, cache.slots_per_layer, 'slot')

  def key_table(self, cache, page_table):
    """A fetched layer keeps its pages."""
    return within_pool(page_table, cache.num_pages, 'page')
