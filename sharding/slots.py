"""Plans that fetch whole layers into transient slots.

While layer l computes, layer l + 1's rows of earlier steps travel into a
slot on every rank (`fetch` before the layer, `arrive` after it). The step's
own rows are all-gathered when the layer makes them and written both by their
owner and into the slot. So a layer reads one whole pool, and a row that no
page table names is in the slot but never read.

With `slots=2` the layer in use and the one on its way exist together. With
`slots=1` a layer is sent for when the one before is done: half the memory,
and nothing hides the transfer.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import jax

from glm_jax import cache as cache_lib
from glm_jax.cache import Cache, Rows
from glm_jax.plan import Selection
from sharding import whole_layer
from sharding.base import ShardedPlan
from sharding.pools import KEYS, LATENTS, Pool, pages_of_slot, write
from sharding.sharded_cache import ShardedCache, Slot


@dataclasses.dataclass(frozen=True)
class SlotPlan(ShardedPlan, abc.ABC):
  """What a plan says about its pools; the rest is here."""

  @abc.abstractmethod
  def read(self, cache: ShardedCache, pool: Pool, layer):
    """(cache, values, scales): a whole layer of a pool on every rank.

    The cache comes back so that later writes follow this read; otherwise XLA
    would have to copy the pool before it writes in place.
    """

  @abc.abstractmethod
  def store(self, cache: ShardedCache, pool: Pool, layer, slots, rows):
    """Owners write rows of a layer; the slot is not touched."""

  @abc.abstractmethod
  def fetched(self, cache: ShardedCache, pool: Pool, slots) -> jax.Array:
    """Token slots to rows of a fetched layer; -1 stays."""

  @abc.abstractmethod
  def key_table(self, cache: ShardedCache, page_table: jax.Array) -> jax.Array:
    """Pages to pages of a fetched layer's index keys; -1 stays."""

  @property
  def num_slots(self) -> int:
    """The layer in use and, with 2, the one on its way."""
    return self.slots

  def slot_bytes(self, shapes: Cache) -> int:
    """A whole layer on every rank: latents and index keys of all pages."""
    names = ('latents', 'latent_scales', 'index_keys', 'index_scales')
    arrays = [a for n in names if (a := getattr(shapes, n)) is not None]
    row = lambda a: math.prod(a.shape[1:]) * a.dtype.itemsize
    return shapes.slots_per_layer * sum(map(row, arrays))

  def begin(self, cache: ShardedCache, rows: Rows, layer, index_slot):
    """Fetches the first layer, unless it has arrived already."""
    if cache.slot is None:
      cache, slot = self._fetch(cache, layer, index_slot)
      cache = dataclasses.replace(cache, slot=slot)
    return cache, rows

  def fetch(self, x, cache: ShardedCache, layer, index_slot):
    """Sends for the next layer, or notes it down with one slot."""
    if self.slots == 1:
      return x, cache, (layer, index_slot)
    return x, *self._fetch(cache, layer, index_slot)

  def arrive(self, x, cache: ShardedCache, ahead):
    """The layer that was sent for is the one that computes next."""
    if self.slots == 1:
      cache, ahead = self._fetch(cache, *ahead)
    if ahead.index_keys is None:
      # Not when it was sent for: a full layer has written its keys since.
      old = cache.slot
      ahead = ahead._replace(
        index_keys=old.index_keys, index_scales=old.index_scales
      )
    return x, dataclasses.replace(cache, slot=ahead)

  def end(self, cache: ShardedCache) -> ShardedCache:
    """Drops the slot."""
    return dataclasses.replace(cache, slot=None)

  def _fetch(self, cache, layer, index_slot):
    keys = None, None
    with jax.named_scope('fetch'):
      cache, latents, scales = self.read(cache, LATENTS, layer)
      if index_slot is not None:
        cache, *keys = self.read(cache, KEYS, index_slot)
    return cache, Slot(latents, scales, *keys)

  def write_rows(self, cache: ShardedCache, layer, rows: Rows, values):
    """Owners write the rows, and every rank into its slot."""
    return self._write(cache, LATENTS, layer, rows, values)

  def write_index_keys(self, cache: ShardedCache, index_slot, rows, keys):
    """Owners write the keys, and every rank into its slot."""
    return self._write(cache, KEYS, index_slot, rows, keys)

  def _write(self, cache, pool, layer, rows, values):
    cache = self.store(cache, pool, layer, rows.slots, values)
    at = self.fetched(cache, pool, rows.slots)
    pages = pages_of_slot(cache.slot, pool)
    own = lambda layer, slots: (layer, slots)
    slot = write(self, cache, pool, cache.slot, pages, own, 0, at, values)
    return dataclasses.replace(cache, slot=slot)

  def index_scores(self, q, w, cache, rows, index_slot, *, first=0):
    """All scores [T, S] of the full layer in the slot."""
    table = self.key_table(cache, rows.page_table)
    pool = cache.slot.index_keys, cache.slot.index_scales
    return whole_layer.index_scores(self, q, w, *pool, table, rows, first)

  def select(self, q, w, cache, rows, index_slot, k, *, first=0) -> Selection:
    """The k best visible keys of every row."""
    table = self.key_table(cache, rows.page_table)
    pool = cache.slot.index_keys, cache.slot.index_scales
    positions = whole_layer.select(self, q, w, *pool, table, rows, k, first)
    return self.selection(rows, positions)

  def selection(self, rows: Rows, positions: jax.Array) -> Selection:
    """A selection from positions [T, k]; slots are global token slots."""
    return Selection(positions, cache_lib.position_slots(rows, positions))

  def attend(self, q, cache, selection: Selection, layer, scale) -> jax.Array:
    """Attended latents [T, N, R] of the selected rows of the slot."""
    ids = self.fetched(cache, LATENTS, selection.slots)
    pool = cache.slot.latents, cache.slot.latent_scales
    return whole_layer.attend(self, q, *pool, ids, scale, cache.latent_width)
