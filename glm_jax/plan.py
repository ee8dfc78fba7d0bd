"""The plan of one device: how rows are tiled, selected and attended.

The model is handed a plan and never asks where arrays live. A sharded plan
has the same methods.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from glm_jax import cache as cache_lib
from glm_jax.cache import Cache, Rows
from glm_jax.layers import few_rows
from glm_jax.sampling import Purpose, SamplingParams, choose, filtered_logits
from pallas_kernels import (
  indexer_scores,
  streaming_topk,
  topk_gather_attention,
)
from pallas_kernels.tiling import dot, map_row_blocks, within_pool

ROW_TILE = 8


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['positions', 'slots'],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Selection:
  """The rows that a group of layers attends to.

  Attributes:
    positions: [T, k] int32 ascending, then -1.
    slots: [T, k] int32 the same as token slots within a layer.
  """

  positions: jax.Array
  slots: jax.Array


@dataclasses.dataclass(frozen=True)
class LocalPlan:
  """One device.

  Attributes:
    row_tile: None, or the fixed number of rows (8) that every row-wise op
      runs on, so that a row's bits do not depend on batch, chunking or
      bucket (design section 4, promise b). Slower.
    implementation: of the ops; None chooses.
    block_bytes: bytes of scores, and of gathered rows, that may exist at
      once; counted by the memory planner.
  """

  row_tile: int | None = None
  implementation: str | None = None
  block_bytes: int = 64 << 20

  def rows(self, f: Callable, *arrays: jax.Array):
    """Applies a row-wise function to [T, ...] arrays."""
    if self.row_tile is None:
      return f(*arrays)
    return map_row_blocks(f, self.row_tile, *arrays, min_blocks=2)

  @property
  def query_ranks(self) -> int:
    """Devices that a window's query rows are split over, in training."""
    return 1

  def by_query(self, f: Callable, queries, keys):
    """Runs a function of query rows that read a window's keys, in training.

    Args:
      f: of two pytrees; no weights in its closure.
      queries: arrays [B, R, ...]; f gives arrays with these axes in front.
      keys: arrays [B, S, ...].
    """
    return f(queries, keys)

  def weights(self, module, num_rows: int):
    """A layer's weights as a step of `num_rows` rows wants them."""
    return module

  def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows [T, D] of the embedding [V, D]."""
    return table[tokens]

  def logits(self, weight: jax.Array, hidden: jax.Array) -> jax.Array:
    """Logits [T, V] float32 of hidden [T, D] under a head [V, D]."""
    multiply = functools.partial(dot, 'td,vd->tv')
    return self.rows(lambda x: few_rows(multiply, x, weight), hidden)

  def filtered_logits(
    self, logits: jax.Array, params: SamplingParams
  ) -> jax.Array:
    """Logits [T, V] after all cuts; see `sampling.filtered_logits`."""
    return self.rows(filtered_logits, logits, params)

  def experts(self, experts, x, chosen, weights, layer):
    """Runs rows through their routed experts.

    Args:
      experts: the pool.
      x: [T, D] rows.
      chosen: [T, k] int32 experts of each row.
      weights: [T, k] float32 weights of their outputs.
      layer: slot of the layer in the pool.

    Returns:
      outputs [T, n, D] and weights [T, n] whose weighted sum over n is the
      layer's; n is k here and may be 1 where partial sums travel.
    """
    return experts(x, chosen, layer, self), weights

  def place_cache(self, cache: Cache) -> Cache:
    """Allocates a new cache of zeros where it lives.

    Args:
      cache: shapes and dtypes, as one device would hold them.

    Returns:
      The cache.

    Raises:
      ValueError: row ids that int32 cannot hold.
    """
    layers = cache.latents.shape[0] // max(cache.slots_per_layer, 1)
    cache_lib.check_row_ids(cache.num_pages, layers)
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), cache)

  def page_places(self, cache: Cache, kind: str, rows: int, page) -> jax.Array:
    """Where a page's layers stand in a pool (serving moves whole pages).

    Args:
      cache: the cache.
      kind: 'latents' or 'index_keys': whose pool.
      rows: leading size of the pool.
      page: scalar int32.

    Returns:
      [layers] int32 places in the pool seen as [pages of all layers, 64, ...].
    """
    layers = jnp.arange(rows // cache.slots_per_layer, dtype=jnp.int32)
    return layers * cache.num_pages + page

  def begin(
    self, cache: Cache, rows: Rows, layer, index_slot
  ) -> tuple[Cache, Rows]:
    """Starts a pass over layers; the first one is full.

    A plan whose layers live elsewhere fetches the first layer here, unless
    the pass before has fetched it, and adds addresses to the rows.

    Args:
      cache: the cache.
      rows: the pass's rows.
      layer: the first layer's slot in the latent pool.
      index_slot: its slot in the index-key pool.

    Returns:
      The cache and the rows of this pass.
    """
    return cache, rows

  def fetch(self, x: jax.Array, cache: Cache, layer, index_slot):
    """Sends for the next layer's rows while this layer computes.

    Args:
      x: [T, D] what this layer reads.
      cache: the cache.
      layer: the next layer's slot in the latent pool.
      index_slot: its slot in the index-key pool, None if it is shared.

    Returns:
      x and the cache, to be used from here on, and what `arrive` takes.
    """
    return x, cache, None

  def arrive(self, x: jax.Array, cache: Cache, ahead):
    """Puts what was sent for where the next layer reads it.

    Args:
      x: [T, D] what this layer made.
      cache: the cache.
      ahead: of `fetch`.

    Returns:
      x and the cache.
    """
    return x, cache

  def end(self, cache: Cache) -> Cache:
    """Ends a pass: drops what was fetched."""
    return cache

  def write_rows(self, cache: Cache, layer, rows: Rows, values) -> Cache:
    """Writes latent rows [T, R + P] of one layer; see `cache.write_rows`."""
    return cache_lib.write_rows(cache, layer, rows.slots, values)

  def write_index_keys(self, cache: Cache, index_slot, rows: Rows, keys):
    """Writes index keys [T, H] of one full layer."""
    return cache_lib.write_index_keys(cache, index_slot, rows.slots, keys)

  def index_scores(
    self, q, w, cache: Cache, rows: Rows, index_slot, *, first: int = 0
  ) -> jax.Array:
    """All scores [T, S] of a full layer: for inspection, small contexts."""
    pages, scales = cache_lib.index_pages(cache)
    table = _pool_table(cache, rows.page_table, index_slot)
    score = lambda q, w, seq, pos: indexer_scores(
      q,
      w,
      pages,
      scales,
      table,
      seq,
      pos,
      first=first,
      implementation=self.implementation,
    )
    return self.rows(score, q, w, rows.seq, rows.pos)

  def select(
    self,
    q,
    w,
    cache: Cache,
    rows: Rows,
    index_slot,
    k: int,
    *,
    first: int = 0,
  ) -> Selection:
    """Selects the k best visible keys of every row.

    Args:
      q: [T, I, H] index queries.
      w: [T, I] float32 head weights.
      cache: holds the keys, the step's own included.
      rows: the step's rows.
      index_slot: slot of the layer in the index-key pool.
      k: keys wanted.
      first: lowest visible position.

    Returns:
      The selection.
    """
    pages, scales = cache_lib.index_pages(cache)
    table = _pool_table(cache, rows.page_table, index_slot)

    select = lambda q, w, seq, pos: streaming_topk(
      q,
      w,
      pages,
      scales,
      table,
      seq,
      pos,
      k,
      first=first,
      implementation=self.implementation,
      block_bytes=self.block_bytes,
    )[0]
    positions = self.rows(select, q, w, rows.seq, rows.pos)
    return self.selection(rows, positions)

  def selection(self, rows: Rows, positions: jax.Array) -> Selection:
    """A selection from positions [T, k]: addresses once for the group."""
    return Selection(positions, cache_lib.position_slots(rows, positions))

  def attend(
    self,
    q: jax.Array,
    cache: Cache,
    selection: Selection,
    layer,
    scale: float,
  ) -> jax.Array:
    """Attends to the selected rows of one layer.

    Args:
      q: [T, N, R + P] absorbed queries.
      cache: holds the rows, the step's own included.
      selection: what to read.
      layer: slot of the layer in the latent pool.
      scale: softmax scale.

    Returns:
      [T, N, R] attended latents.
    """
    offset = jnp.asarray(layer, jnp.int32) * cache.slots_per_layer
    # Past one layer's pool lies the next layer's, so the check is here.
    slots = within_pool(selection.slots, cache.slots_per_layer, 'slot')
    ids = jnp.where(slots >= 0, slots + offset, -1)
    attend = lambda q, ids: self.attend_rows(
      q, cache, cache.latents, cache.latent_scales, ids, scale
    )
    return self.rows(attend, q, ids)

  def attend_rows(self, q, cache: Cache, rows, row_scales, ids, scale):
    """Attends to rows [n, W] of the cache's layout by their ids [T, k]."""
    return topk_gather_attention(
      q,
      rows,
      row_scales,
      ids,
      scale=scale,
      latent_width=cache.latent_width,
      implementation=self.implementation,
      block_bytes=self.block_bytes,
    )[0]


LOCAL = LocalPlan()


def choose_tokens(
  plan, logits: jax.Array, positions, params: SamplingParams, purpose: Purpose
) -> tuple[jax.Array, jax.Array]:
  """A token a row, placed by any plan; see `sampling.choose`."""
  one = lambda logits, at, params: choose(
    logits, at, params, purpose, plan.filtered_logits
  )
  return plan.rows(one, logits, positions, params)


def _pool_table(cache: Cache, page_table: jax.Array, index_slot) -> jax.Array:
  """The page table with the layer's offset in; -1 stays -1."""
  # Past one layer's pool lies the next layer's, so the check is here.
  pages = within_pool(page_table, cache.num_pages, 'page')
  offset = jnp.asarray(index_slot, jnp.int32) * cache.num_pages
  return jnp.where(pages >= 0, pages + offset, -1)
