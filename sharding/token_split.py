"""LayerSplit's role on TPU: every rank owns a share of every layer's tokens.

Pages are dealt over the ranks of `data` and `context` (`sharding.deal`);
latents are replicated over `model`, index keys are dealt on over `model`.
The drafter's layer and its index keys are dealt like any other's.

A step moves either results or rows:

    partials  every rank scores its own keys for all rows, the best are cut
              exactly over ranks, every rank attends to the winners it owns
              and the shares are merged by lse. Decode, verify and draft steps
              do this, and prefill chunks where it is fewer bytes.
    rows      every rank computes its own rows and reads whole layers, which
              are all-gathered ahead into slots (`sharding.slots`). Long
              chunks do this where it is fewer bytes (`movement`).

Who computes which queries: the linear layers of a split step run each row on
one rank, those of a whole step all rows on all ranks; scores and attention as
above. A chunk's new rows are all-gathered and each is written by the owner of
its page (and into the slot, if there is one).

How many winners one rank owns is not known beforehand. Attention takes
`bound` of them in a first pass and further passes while some row has more
(scope 'overflow'); scoring takes an even share of each sequence's blocks
first and passes on while some rank has more. So neither is ever cut short,
and with dealt pages one pass does.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from glm_jax import cache as cache_lib
from glm_jax.cache import Cache, Rows
from pallas_kernels.tiling import PAGE, within_pool
from sharding import partials
from sharding.collectives import gather_shards, rank_index
from sharding.deal import Deal
from sharding.mesh import MODEL, ways
from sharding.movement import Movement, movement
from sharding.sharded_cache import DealtRows
from sharding.slots import SlotPlan


@dataclasses.dataclass(frozen=True)
class TokenSplit(SlotPlan):
  """See this file's head.

  Attributes:
    move: 'partials' or 'rows' for split steps; None decides by bytes.
  """

  move: str | None = None

  def __post_init__(self):
    super().__post_init__()
    if self.move not in (None, 'partials', 'rows'):
      raise ValueError(f"move={self.move!r} must be None, 'partials' or 'rows'")
    tokens, index = self.rules.axes('tokens'), self.rules.axes('index_tokens')
    if index not in (tokens, (*tokens, MODEL)):
      raise ValueError(
        f"rule 'index_tokens' -> {index} must be that of 'tokens' {tokens}, "
        f'or it and {MODEL!r}: a rank cuts winners for the rows it holds'
      )

  @property
  def deal(self) -> Deal:
    """How pages of latents are dealt."""
    return Deal(ways(self.mesh, self.axes('tokens')))

  @property
  def index_deal(self) -> Deal:
    """How pages of index keys are dealt."""
    outer = self.deal.outer
    return Deal(outer, ways(self.mesh, self.axes('index_tokens')) // outer)

  def movement(self, num_rows: int, cache: Cache) -> Movement:
    """What a step of that many rows moves, and the bytes of either way."""
    found = movement(
      self.config,
      self.deal.ranks,
      num_rows,
      cache.num_pages,
      row_bytes=_row_bytes(cache.latents, cache.latent_scales),
      key_bytes=_row_bytes(cache.index_keys, cache.index_scales),
    )
    if not self.is_split(num_rows):
      return found._replace(choice='partials')
    return found if self.move is None else found._replace(choice=self.move)

  def layout(self, cache: Cache):
    """Each rank has its pages of every layer."""
    layers = cache.latents.shape[0] // max(cache.slots_per_layer, 1)
    cache_lib.check_row_ids(self.deal.local_pages(cache.num_pages), layers)
    fields, specs = {}, {'hidden': self.hidden_spec(cache)}
    for deal, rule, names in (
      (self.deal, 'tokens', ('latents', 'latent_scales')),
      (self.index_deal, 'index_tokens', ('index_keys', 'index_scales')),
    ):
      per_rank = deal.local_pages(cache.num_pages)
      for name in names:
        specs[name] = P(self.axes(rule) or None)
        a = getattr(cache, name)
        if a is not None:
          rows = a.shape[0] // cache.num_pages * per_rank * deal.ranks
          fields[name] = jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype)
    return dataclasses.replace(cache, **fields), specs

  def page_places(self, cache, kind: str, rows: int, page):
    """On the page's owner, layer after layer."""
    deal = self.deal if kind == 'latents' else self.index_deal
    pages = deal.local_pages(cache.num_pages)
    layers = rows // (deal.ranks * pages * PAGE)
    first = deal.owner(page) * layers
    at = first + jnp.arange(layers, dtype=jnp.int32)
    return at * pages + deal.local(page)

  def begin(self, cache, rows: Rows, layer, index_slot):
    """Decides what the pass moves; see this file's head."""
    num_rows = rows.pos.shape[0]
    if cache.slot is None and self.movement(num_rows, cache).choice != 'rows':
      return cache, partials.deal_rows(self, rows)
    return super().begin(cache, rows, layer, index_slot)

  def fetch(self, cache, layer, index_slot):
    """Sends for the next layer where rows move."""
    if cache.slot is None:
      return cache, None
    return super().fetch(cache, layer, index_slot)

  def arrive(self, cache, ahead):
    """Takes in the next layer where rows move."""
    return cache if cache.slot is None else super().arrive(cache, ahead)

  def local_latents(self, cache, latents, scales) -> Cache:
    """A rank's latent pool as a cache of its own."""
    pages = self.deal.local_pages(cache.num_pages)
    return _local(cache, pages, latents=latents, latent_scales=scales)

  def local_keys(self, cache, keys, scales) -> Cache:
    """A rank's index-key pool as a cache of its own."""
    pages = self.index_deal.local_pages(cache.num_pages)
    return _local(cache, pages, index_keys=keys, index_scales=scales)

  def _read(self, arrays, rule, deal: Deal, num_pages, slot):
    axes = self.axes(rule)
    num_slots = deal.local_pages(num_pages) * PAGE

    def body(arrays, slot):
      cut = lambda a: lax.dynamic_slice_in_dim(a, slot * num_slots, num_slots)
      parts = jax.tree.map(cut, arrays)
      arrays, parts = lax.optimization_barrier((arrays, parts))
      return arrays, jax.tree.map(lambda a: gather_shards(a, axes), parts)

    by_rank = P(axes or None)
    run = self.shard_map(body, (by_rank, P()), (by_rank, P()))
    return run(arrays, jnp.asarray(slot, jnp.int32))

  def read_layer(self, cache, layer):
    """A layer's latent rows from all ranks, in gathered pages."""
    arrays, whole = self._read(
      (cache.latents, cache.latent_scales),
      'tokens',
      self.deal,
      cache.num_pages,
      layer,
    )
    cache = dataclasses.replace(
      cache, latents=arrays[0], latent_scales=arrays[1]
    )
    return cache, *whole

  def read_keys(self, cache, index_slot):
    """A full layer's index keys from all ranks, in gathered pages."""
    arrays, whole = self._read(
      (cache.index_keys, cache.index_scales),
      'index_tokens',
      self.index_deal,
      cache.num_pages,
      index_slot,
    )
    cache = dataclasses.replace(
      cache, index_keys=arrays[0], index_scales=arrays[1]
    )
    return cache, *whole

  def store_rows(self, cache, layer, slots, values):
    """The owner of each row's page writes it."""
    axes, deal = self.axes('tokens'), self.deal

    def body(latents, scales, layer, slots, values):
      local = self.local_latents(cache, latents, scales)
      own = deal.own_slots(slots, rank_index(axes))
      local = cache_lib.write_rows(local, layer, own, values)
      return local.latents, local.latent_scales

    by_rank = P(axes or None)
    run = self.shard_map(body, (by_rank, by_rank, P(), P(), P()), by_rank)
    layer = jnp.asarray(layer, jnp.int32)
    slots = within_pool(slots, cache.slots_per_layer, 'slot')
    latents, scales = run(
      cache.latents, cache.latent_scales, layer, slots, values
    )
    return dataclasses.replace(cache, latents=latents, latent_scales=scales)

  def store_keys(self, cache, index_slot, slots, keys):
    """The owner of each key's page writes it."""
    axes, deal = self.axes('index_tokens'), self.index_deal

    def body(pool, scales, slot, slots, keys):
      local = self.local_keys(cache, pool, scales)
      own = deal.own_slots(slots, rank_index(axes))
      local = cache_lib.write_index_keys(local, slot, own, keys)
      return local.index_keys, local.index_scales

    by_rank = P(axes or None)
    run = self.shard_map(body, (by_rank, by_rank, P(), P(), P()), by_rank)
    slot = jnp.asarray(index_slot, jnp.int32)
    slots = within_pool(slots, cache.slots_per_layer, 'slot')
    pool, scales = run(cache.index_keys, cache.index_scales, slot, slots, keys)
    return dataclasses.replace(cache, index_keys=pool, index_scales=scales)

  def latent_slots(self, cache, slots):
    """Token slots to rows of a gathered layer."""
    slots = within_pool(slots, cache.slots_per_layer, 'slot')
    return self.deal.gathered_slots(slots, cache.num_pages)

  def key_slots(self, cache, slots):
    """Token slots to index keys of a gathered layer."""
    slots = within_pool(slots, cache.slots_per_layer, 'slot')
    return self.index_deal.gathered_slots(slots, cache.num_pages)

  def key_table(self, cache, page_table):
    """Pages to pages of gathered index keys."""
    pages = within_pool(page_table, cache.num_pages, 'page')
    return self.index_deal.gathered(pages, cache.num_pages)

  def write_rows(self, cache, layer, rows, values):
    """Owners write the rows; so does every rank that has a slot."""
    if cache.slot is None:
      return self.store_rows(cache, layer, rows.slots, values)
    return super().write_rows(cache, layer, rows, values)

  def write_index_keys(self, cache, index_slot, rows, keys):
    """Owners write the keys; so does every rank that has a slot."""
    if cache.slot is None:
      return self.store_keys(cache, index_slot, rows.slots, keys)
    return super().write_index_keys(cache, index_slot, rows, keys)

  def index_scores(self, q, w, cache, rows, index_slot, *, first=0):
    """All scores [T, S] of a full layer."""
    if cache.slot is None:
      return partials.index_scores(self, q, w, cache, rows, index_slot, first)
    return super().index_scores(q, w, cache, rows, index_slot, first=first)

  def select(self, q, w, cache, rows, index_slot, k, *, first=0):
    """The k best visible keys of every row."""
    if cache.slot is None:
      return partials.select(self, q, w, cache, rows, index_slot, k, first)
    return super().select(q, w, cache, rows, index_slot, k, first=first)

  def selection(self, rows: Rows, positions: jax.Array):
    """A selection from positions [T, k]."""
    if isinstance(rows, DealtRows):
      return partials.selection(self, rows, positions)
    return super().selection(rows, positions)

  def attend(self, q, cache, selection, layer, scale):
    """Attended latents [T, N, R] of the selected rows."""
    if cache.slot is None:
      return partials.attend(self, q, cache, selection, layer, scale)
    return super().attend(q, cache, selection, layer, scale)


def _local(cache: Cache, num_pages: int, **fields) -> Cache:
  none = dict.fromkeys(
    ('latents', 'latent_scales', 'index_keys', 'index_scales', 'hidden')
  )
  return Cache(
    **none | fields,
    num_pages=num_pages,
    latent_width=cache.latent_width,
    rope_width=cache.rope_width,
  )


def _row_bytes(rows, scales) -> int:
  size = rows.dtype.itemsize * rows.shape[1]
  if scales is not None:
    size += 4 * (1 if len(scales.shape) == 1 else scales.shape[1])
  return size
