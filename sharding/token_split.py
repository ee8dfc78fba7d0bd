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
              are all-gathered ahead into slots (`sharding.slots`), on TPUs
              by kernels (`sharding.remote_gather`). Long chunks do this
              where it is fewer bytes (`movement`).

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
from sharding import kernel_fetch, partials
from sharding.collectives import gather_shards, rank_index
from sharding.deal import Deal
from sharding.mesh import MODEL, ways
from sharding.movement import Movement, movement
from sharding.pools import LATENTS, Pool, write
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

  def fetch(self, x, cache, layer, index_slot):
    """Sends for the next layer where rows move."""
    if cache.slot is None:
      return x, cache, None
    if self.slots == 1 or not kernel_fetch.possible(self, cache):
      return super().fetch(x, cache, layer, index_slot)
    with jax.named_scope('fetch'):
      return kernel_fetch.depart(self, x, cache, layer, index_slot)

  def arrive(self, x, cache, ahead):
    """Takes in the next layer where rows move."""
    if cache.slot is None:
      return x, cache
    if isinstance(ahead, list):
      with jax.named_scope('fetch'):
        x, cache, ahead = kernel_fetch.land(self, x, cache, ahead)
    return super().arrive(x, cache, ahead)

  def _fetch(self, cache, layer, index_slot):
    if not kernel_fetch.possible(self, cache):
      return super()._fetch(cache, layer, index_slot)
    with jax.named_scope('fetch'):
      return kernel_fetch.begin(self, cache, layer, index_slot)

  def deal_of(self, pool: Pool) -> Deal:
    """How a pool's pages are dealt."""
    return self.deal if pool is LATENTS else self.index_deal

  def local_pages(self, cache, pool: Pool) -> int:
    """Pages of a layer in a rank's pool."""
    return self.deal_of(pool).local_pages(cache.num_pages)

  def read(self, cache, pool, layer):
    """A layer from all ranks, in gathered pages."""
    axes = self.axes(pool.rule)
    num_slots = self.local_pages(cache, pool) * PAGE

    def body(arrays, layer):
      cut = lambda a: lax.dynamic_slice_in_dim(a, layer * num_slots, num_slots)
      parts = jax.tree.map(cut, arrays)
      arrays, parts = lax.optimization_barrier((arrays, parts))
      return arrays, jax.tree.map(lambda a: gather_shards(a, axes), parts)

    by_rank = P(axes or None)
    run = self.shard_map(body, (by_rank, P()), (by_rank, P()))
    arrays, whole = run(pool.arrays(cache), jnp.asarray(layer, jnp.int32))
    return pool.replaced(cache, arrays), *whole

  def store(self, cache, pool, layer, slots, rows):
    """The owner of each row's page writes it."""
    axes, deal = self.axes(pool.rule), self.deal_of(pool)
    own = lambda layer, slots: (layer, deal.own_slots(slots, rank_index(axes)))
    slots = within_pool(slots, cache.slots_per_layer, 'slot')
    layer = jnp.asarray(layer, jnp.int32)
    pages = self.local_pages(cache, pool)
    return write(
      self, cache, pool, cache, pages, own, layer, slots, rows, axes=axes
    )

  def fetched(self, cache, pool, slots):
    """Token slots to rows of a gathered layer."""
    slots = within_pool(slots, cache.slots_per_layer, 'slot')
    return self.deal_of(pool).gathered_slots(slots, cache.num_pages)

  def key_table(self, cache, page_table):
    """Pages to pages of gathered index keys."""
    pages = within_pool(page_table, cache.num_pages, 'page')
    return self.index_deal.gathered(pages, cache.num_pages)

  def _write(self, cache, pool, layer, rows, values):
    """Owners write; so does every rank that has a slot."""
    if cache.slot is None:
      return self.store(cache, pool, layer, rows.slots, values)
    return super()._write(cache, pool, layer, rows, values)

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


def _row_bytes(rows, scales) -> int:
  size = rows.dtype.itemsize * rows.shape[1]
  if scales is not None:
    size += 4 * (1 if len(scales.shape) == 1 else scales.shape[1])
  return size
