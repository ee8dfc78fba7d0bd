"""The naive plan: every rank holds the whole cache.

Who computes which queries: in a split step each rank its own rows, in a whole
step every rank all rows (heads are split over `model` either way). A chunk's
new rows are all-gathered and written by every rank. Capacity does not grow
with ranks: this is what the other plans are measured against.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from glm_jax import cache as cache_lib
from glm_jax.cache import Cache, Rows
from glm_jax.plan import Selection
from pallas_kernels.tiling import within_pool
from sharding import whole_layer
from sharding.base import ShardedPlan
from sharding.pools import KEYS, LATENTS, write

FIELDS = ('latents', 'latent_scales', 'index_keys', 'index_scales')


@dataclasses.dataclass(frozen=True)
class Replicated(ShardedPlan):
  """See this file's head."""

  def layout(self, cache: Cache):
    """All rows on every rank."""
    layers = cache.latents.shape[0] // max(cache.slots_per_layer, 1)
    cache_lib.check_row_ids(cache.num_pages, layers)
    specs = dict.fromkeys(FIELDS, P())
    # Where XLA puts it after a step anyway: a server's step is compiled once.
    return cache, {**specs, 'hidden': self.hidden_spec(cache)}

  def begin(self, cache, rows, layer, index_slot):
    """Nothing to fetch."""
    return cache, rows

  def fetch(self, x, cache, layer, index_slot):
    """Nothing to fetch."""
    return x, cache, None

  def arrive(self, x, cache, ahead):
    """Nothing was fetched."""
    return x, cache

  def end(self, cache):
    """Nothing was fetched."""
    return cache

  def write_rows(self, cache, layer, rows: Rows, values):
    """Every rank writes all rows."""
    return self._write(cache, LATENTS, layer, rows, values)

  def write_index_keys(self, cache, index_slot, rows: Rows, keys):
    """Every rank writes all keys."""
    return self._write(cache, KEYS, index_slot, rows, keys)

  def _write(self, cache, pool, layer, rows, values):
    own = lambda layer, slots: (layer, slots)
    layer = jnp.asarray(layer, jnp.int32)
    return write(
      self, cache, pool, cache, cache.num_pages, own, layer, rows.slots, values
    )

  def _table(self, cache, rows, index_slot):
    pages = within_pool(rows.page_table, cache.num_pages, 'page')
    offset = jnp.asarray(index_slot, jnp.int32) * cache.num_pages
    return jnp.where(pages >= 0, pages + offset, -1)

  def index_scores(self, q, w, cache, rows, index_slot, *, first=0):
    """All scores [T, S] of a full layer."""
    table = self._table(cache, rows, index_slot)
    pool = cache.index_keys, cache.index_scales
    return whole_layer.index_scores(self, q, w, *pool, table, rows, first)

  def select(self, q, w, cache, rows, index_slot, k, *, first=0) -> Selection:
    """The k best visible keys of every row."""
    table = self._table(cache, rows, index_slot)
    pool = cache.index_keys, cache.index_scales
    positions = whole_layer.select(self, q, w, *pool, table, rows, k, first)
    return self.selection(rows, positions)

  def selection(self, rows: Rows, positions: jax.Array) -> Selection:
    """A selection from positions [T, k]."""
    return Selection(positions, cache_lib.position_slots(rows, positions))

  def attend(self, q, cache, selection, layer, scale) -> jax.Array:
    """Attended latents [T, N, R] of the selected rows."""
    offset = jnp.asarray(layer, jnp.int32) * cache.slots_per_layer
    slots = within_pool(selection.slots, cache.slots_per_layer, 'slot')
    ids = jnp.where(slots >= 0, slots + offset, -1)
    pool = cache.latents, cache.latent_scales
    return whole_layer.attend(self, q, *pool, ids, scale, cache.latent_width)
