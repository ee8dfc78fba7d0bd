"""Host-latent decode: index keys on the device, latents in host memory.

Selection reads every index key of a context but attention reads k latents of
each layer, so the keys stay on the device and the latents, nine tenths of the
bytes, move to pinned host memory. IndexShare makes this cheap: one index list
serves a group of layers, so once it is known the rows of the whole group are
gathered on the host and sent together, before the later layers ask:

    select --> slots --> host gathers [T, G, k, W] --> device attends, G times

A chunk of a prompt asks for more rows than its sequences hold: then a layer's
whole pages are sent, each once, and attention reads its rows there.

The rows that a step itself writes stay on the device until its pass over the
layers ends, and are taken from there. Results are those of `LocalPlan`, bit
by bit where both are compiled to the same kernels (on a CPU). The host's part
is in the compiled step (`compute_on`), so steps are dispatched ahead as ever,
and the pool is updated in place (on a GPU it is copied: results/misses.md).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax import cache as cache_lib
from glm_jax.cache import Cache, Rows
from glm_jax.config import ModelConfig
from glm_jax.layer_plan import layer_plan
from glm_jax.plan import LocalPlan, Selection
from glm_jax.serving.host_compute import DEVICE, HOST, runs_on_host
from pallas_kernels.tiling import PAGE, map_row_blocks, round_up, within_pool


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    'latents',
    'latent_scales',
    'index_keys',
    'index_scales',
    'hidden',
    'host',
    'host_scales',
    'slots',
    'page_table',
    'pass_id',
  ],
  meta_fields=['num_pages', 'latent_width', 'rope_width', 'first_layer'],
)
@dataclasses.dataclass(frozen=True)
class HostLatentCache(Cache):
  """A cache whose latents are in host memory.

  `latents` and `latent_scales` hold the rows of the pass under way alone,
  [layers * T, ...], and none between passes.

  Attributes:
    host: [latent slots * pages * 64, W] every latent row, in host memory.
    host_scales: [same, G] with fp8 records, else None.
    slots: [T] int32 token slots of the pass's rows, -1 for padding.
    page_table: [B, n] int32 of the pass.
    pass_id: scalar int32, counts passes.
    first_layer: latent slot of the pass's first layer.
  """

  host: jax.Array | None = None
  host_scales: jax.Array | None = None
  slots: jax.Array | None = None
  page_table: jax.Array | None = None
  pass_id: jax.Array | None = None
  first_layer: int = 0


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    'positions',
    'slots',
    'seq',
    'own',
    'pass_id',
    'first',
    'ahead',
  ],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class HostSelection(Selection):
  """A selection and what was sent for on its account.

  Attributes:
    seq: [T] int32 sequence of each row.
    own: [T, k] int32 row of this pass that was selected, -1 for none.
    pass_id: [T] int32 the pass that `own` speaks of.
    first: [T] int32 latent slot of the group's first layer.
    ahead: rows [T, G, k, W] and scales (or None) of the group's layers; None
      where they would take too much memory.
  """

  seq: jax.Array
  own: jax.Array
  pass_id: jax.Array
  first: jax.Array
  ahead: tuple[jax.Array, jax.Array | None] | None


@dataclasses.dataclass(frozen=True)
class HostLatentPlan(LocalPlan):
  """One device with latents in host memory.

  Attributes:
    num_layers: trunk layers; the drafter's is the next.
    firsts: latent slot of the full layer with each index slot.
    served: layers that each one's selection serves.
    ahead_bytes: device memory that rows sent ahead may take, or a layer's
      pages; a step that needs more (a prompt chunk) fetches layer by layer,
      pages where they are fewer rows and fit, else rows block by block.
  """

  num_layers: int = 0
  firsts: tuple[int, ...] = ()
  served: tuple[int, ...] = ()
  ahead_bytes: int = 1 << 30

  @property
  def group(self) -> int:
    """Layers that one selection serves at most."""
    return max(self.served)

  def place_cache(self, cache: Cache) -> Cache:
    """Allocates the latents in host memory and the rest on the device."""
    layers = cache.latents.shape[0] // max(cache.slots_per_layer, 1)
    cache_lib.check_row_ids(cache.num_pages, layers)
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if 'pinned_host' not in kinds:
      raise NotImplementedError(
        f'host-latent decode needs pinned_host memory; {device} has {kinds}'
      )
    pinned = jax.sharding.SingleDeviceSharding(
      device, memory_kind='pinned_host'
    )

    def on_host(a):
      if a is None:
        return None
      return jax.device_put(np.zeros(a.shape, a.dtype), pinned)

    none = lambda a: (
      None if a is None else jnp.zeros((0, *a.shape[1:]), a.dtype)
    )
    zeros = lambda a: None if a is None else jnp.zeros(a.shape, a.dtype)
    return HostLatentCache(
      latents=none(cache.latents),
      latent_scales=none(cache.latent_scales),
      index_keys=zeros(cache.index_keys),
      index_scales=zeros(cache.index_scales),
      hidden=zeros(cache.hidden),
      num_pages=cache.num_pages,
      latent_width=cache.latent_width,
      rope_width=cache.rope_width,
      host=on_host(cache.latents),
      host_scales=on_host(cache.latent_scales),
      slots=jnp.zeros(0, jnp.int32),
      page_table=jnp.zeros((0, 0), jnp.int32),
      pass_id=jnp.int32(0),
    )

  def begin(self, cache, rows: Rows, layer, index_slot):
    """Makes room for the rows of this pass, of the drafter's layer or all."""
    spare = round_up(len(rows.slots), PAGE)
    layers = self.num_layers if layer < self.num_layers else 1
    to_host = lambda a: a if a is None else jax.device_put(a, HOST)
    cache = dataclasses.replace(
      cache,
      latents=_room(cache.latents, layers * spare),
      latent_scales=_room(cache.latent_scales, layers * spare),
      host=to_host(cache.host),
      host_scales=to_host(cache.host_scales),
      slots=jnp.full(spare, -1, jnp.int32),  # until something is written
      page_table=rows.page_table,
      pass_id=cache.pass_id + 1,
      first_layer=layer,
    )
    return cache, rows

  def write_rows(self, cache, layer, rows: Rows, values):
    """Keeps a layer's new rows on the device until the pass ends."""
    spare = len(cache.slots)
    view = Cache(
      latents=cache.latents,
      latent_scales=cache.latent_scales,
      index_keys=cache.index_keys,
      index_scales=cache.index_scales,
      hidden=cache.hidden,
      num_pages=spare // PAGE,
      latent_width=cache.latent_width,
      rope_width=cache.rope_width,
    )
    at = jnp.arange(len(values), dtype=jnp.int32)
    view = cache_lib.write_rows(view, layer - cache.first_layer, at, values)
    missing = spare - len(rows.slots)
    return dataclasses.replace(
      cache,
      latents=view.latents,
      latent_scales=view.latent_scales,
      slots=jnp.pad(rows.slots, (0, missing), constant_values=-1),
    )

  def end(self, cache):
    """Moves the pass's rows to the host, each to its place."""
    spare, per_layer = len(cache.slots), cache.slots_per_layer
    layers = cache.latents.shape[0] // max(spare, 1)
    layer = cache.first_layer + jnp.arange(layers, dtype=jnp.int32)
    size = cache.host.shape[0]
    at = layer[:, None] * per_layer + cache.slots[None]
    at = jnp.where(cache.slots[None] >= 0, at, size).reshape(-1)
    put = lambda pool, rows: (
      None if pool is None else _scatter(pool, _send(at), _send(rows))
    )
    return dataclasses.replace(
      cache,
      host=put(cache.host, cache.latents),
      host_scales=put(cache.host_scales, cache.latent_scales),
      latents=_room(cache.latents, 0),
      latent_scales=_room(cache.latent_scales, 0),
      slots=cache.slots[:0],
      page_table=cache.page_table[:0, :0],
      first_layer=0,
    )

  def select(self, q, w, cache, rows: Rows, index_slot, k, *, first=0):
    """Selects, and sends for the rows of the whole group."""
    plain = super().select(q, w, cache, rows, index_slot, k, first=first)
    return self._sent_for(cache, plain, rows, index_slot)

  def _sent_for(
    self, cache, plain: Selection, rows: Rows, index_slot
  ) -> HostSelection:
    T, k = plain.slots.shape
    slots = within_pool(plain.slots, cache.slots_per_layer, 'slot')
    own = _own_rows(cache.slots, slots)
    layer = jnp.asarray(self.firsts, jnp.int32)[index_slot]
    full = lambda a: jnp.broadcast_to(a, (T,))
    selection = HostSelection(
      positions=plain.positions,
      slots=slots,
      seq=rows.seq,
      own=own,
      pass_id=full(cache.pass_id),
      first=full(layer),
      ahead=None,
    )
    # Small steps always send ahead: where draft steps read the pool, XLA has
    # been seen to copy it.
    known = isinstance(index_slot, int)  # and not in a scan over groups
    group = self.served[index_slot] if known else self.group
    if T * group * k * self._row_bytes(cache) > self.ahead_bytes:
      return selection
    layers = cache.host.shape[0] // cache.slots_per_layer
    each = layer + jnp.arange(group, dtype=jnp.int32)
    each = jnp.minimum(each, layers - 1)[None, :, None]
    at = jnp.maximum(slots, 0)[:, None] + each * cache.slots_per_layer
    rows, scales = _fetch(cache, at)
    # The full layer's own rows are there already: the drafter's later steps
    # read them from here, when the pass is over.
    mine = self._merge(cache, own, (rows[:, 0], _layer_of(scales, 0)), layer)
    put = lambda a, value: None if a is None else a.at[:, 0].set(value)
    ahead = put(rows, mine[0]), put(scales, mine[1])
    return dataclasses.replace(selection, ahead=ahead)

  def _row_bytes(self, cache) -> int:
    size = cache.host.shape[1] * cache.host.dtype.itemsize
    scales = cache.host_scales
    return size if scales is None else size + 4 * scales.shape[1]

  def _merge(self, cache, own, fetched, layer):
    """Fetched rows [T, k, W] with this pass's own rows in their places."""
    at = (layer - cache.first_layer) * len(cache.slots) + jnp.maximum(own, 0)
    here = (own >= 0)[..., None]
    pick = lambda new, old: (
      None if old is None else jnp.where(here, new[at], old)
    )
    if not cache.latents.shape[0]:
      return fetched
    return (
      pick(cache.latents, fetched[0]),
      pick(cache.latent_scales, fetched[1]),
    )

  def attend(self, q, cache, selection: HostSelection, layer, scale):
    """Attends to rows that have come from the host, or fetches them."""
    if not isinstance(selection, HostSelection):
      raise NotImplementedError(
        'positions given from outside (replay) do not run with latents in '
        'host memory: use the plan of one device'
      )
    of_pass = (selection.pass_id == cache.pass_id)[:, None]
    own = jnp.where(of_pass, selection.own, -1)
    if selection.ahead is None and self._pages_are_fewer(cache, selection):
      return self._attend_pages(q, cache, selection, own, layer, scale)
    k = selection.slots.shape[1]

    def block(q, slots, own, fetched):
      if fetched is None:
        offset = jnp.asarray(layer, jnp.int32) * cache.slots_per_layer
        fetched = _fetch(cache, jnp.maximum(slots, 0) + offset)
      rows, scales = self._merge(cache, own, fetched, layer)
      flat = lambda a: None if a is None else a.reshape(-1, a.shape[-1])
      at = jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)
      at = jnp.where(slots >= 0, at, -1)
      return self.attend_rows(q, cache, flat(rows), flat(scales), at, scale)

    if selection.ahead is not None:
      g = jnp.asarray(layer, jnp.int32) - selection.first[0]
      # The full layer's own rows were put in place when they were sent for.
      own = jnp.where(g > 0, own, -1)
      fetched = jax.tree.map(
        lambda a: jax.lax.dynamic_index_in_dim(a, g, 1, False), selection.ahead
      )
      return self.rows(block, q, selection.slots, own, fetched)
    whole = functools.partial(block, fetched=None)
    size = self.row_tile or 8 * max(
      self.block_bytes // (8 * k * self._row_bytes(cache)), 1
    )
    return map_row_blocks(whole, size, q, selection.slots, own, min_blocks=2)

  def _pages_are_fewer(self, cache, selection) -> bool:
    """Whether the pass's pages are fewer rows than were selected, and fit."""
    rows = cache.page_table.size * PAGE
    fit = rows * self._row_bytes(cache) <= self.ahead_bytes
    return 0 < rows <= selection.slots.size and fit

  def _attend_pages(self, q, cache, selection, own, layer, scale):
    """Attends to rows of the pass's pages, all sent for, and to its own."""
    first = jnp.asarray(layer, jnp.int32) * cache.num_pages
    pages = jnp.maximum(cache.page_table, 0).reshape(-1) + first
    size, spare = pages.size * PAGE, len(cache.slots)
    mine = (layer - cache.first_layer) * spare

    def joined(pool, new):
      if pool is None:
        return None
      rows = jax.device_put(_gather_pages(pool, _send(pages)), DEVICE)
      new = jax.lax.dynamic_slice_in_dim(new, mine, spare)
      return jnp.concatenate([rows.reshape(size, -1), new])

    rows = joined(cache.host, cache.latents)
    scales = joined(cache.host_scales, cache.latent_scales)
    start = selection.seq * (cache.page_table.shape[1] * PAGE)
    at = jnp.where(own >= 0, size + own, selection.positions + start[:, None])
    at = jnp.where(selection.slots >= 0, at, -1)
    attend = lambda q, at: self.attend_rows(q, cache, rows, scales, at, scale)
    return self.rows(attend, q, at)


def host_latent_plan(config: ModelConfig, **options) -> HostLatentPlan:
  """The plan of a model; options as in `HostLatentPlan` and `LocalPlan`."""
  plan = layer_plan(config)
  firsts = list(plan.full_layers)
  ends = [*firsts[1:], plan.num_layers]
  if plan.has_mtp:
    firsts.append(plan.num_layers)
    ends.append(plan.num_layers + 1)
  return HostLatentPlan(
    num_layers=plan.num_layers,
    firsts=tuple(firsts),
    served=tuple(b - a for a, b in zip(firsts, ends)),
    **options,
  )


def _layer_of(scales, layer):
  return None if scales is None else scales[:, layer]


def _room(a, rows: int):
  return None if a is None else jnp.zeros((rows, *a.shape[1:]), a.dtype)


def _send(a):
  return jax.device_put(a, HOST)


def _fetch(cache: HostLatentCache, at):
  """Rows and scales at pool ids, gathered on the host, on the device."""
  at = _send(at)
  get = lambda pool: (
    None if pool is None else jax.device_put(_gather(pool, at), DEVICE)
  )
  return get(cache.host), get(cache.host_scales)


@runs_on_host
def _gather(pool, at):
  return pool[at]


@runs_on_host
def _gather_pages(pool, pages):
  return pool.reshape(-1, PAGE, pool.shape[-1])[pages]


@runs_on_host
def _scatter(pool, at, rows):
  return pool.at[at].set(rows, mode='drop')


def _own_rows(own_slots, slots):
  """Which row of the pass each selected slot is, -1 for none."""
  order = jnp.argsort(own_slots)
  ranked = own_slots[order]
  at = jnp.searchsorted(ranked, slots)
  at = jnp.minimum(at, len(ranked) - 1)
  found = (ranked[at] == slots) & (slots >= 0)
  return jnp.where(found, order[at], -1).astype(jnp.int32)
