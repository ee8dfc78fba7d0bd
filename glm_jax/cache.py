"""The paged cache: latent rows of every layer, index keys of full layers.

All layers share flat pools, and a row's id includes its layer's offset: the
pools travel through the layer scan as carry, a layer writes its new rows and
gathers the selected ones, and no layer ever owns a slice (a slice would copy
it). How a row is laid out is this file's secret, behind `write_rows`,
`read_rows` and `bytes_per_token`:

    bf16, f32   [latent R | rotary key P | zeros], padded to 128 features
                (an unpadded width costs a whole-cache copy at each gather on
                TPU, spec/kernels_tpu.md section 2)
    fp8         bytes [latent R e4m3 | rotary key P bf16] and a plane of
                float32 scales, one for 128 latents
    index keys  [H]; fp8 keys have one power-of-two float32 scale a token in
                a plane of its own
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify

from glm_jax.config import ModelConfig
from glm_jax.layer_plan import layer_plan
from pallas_kernels.block_scale import FP8, FP8_MAX
from pallas_kernels.tiling import PAGE, cdiv, round_up, within_pool
from pallas_kernels.topk_gather_attention import SCALE_GROUP, decode_rows

CACHE_DTYPES = ('bf16', 'f32', 'fp8')
_WIDE = {'bf16': jnp.bfloat16, 'f32': jnp.float32}
_TILE_ROWS = 32  # of bytes in a TPU's tile; pools are whole pages
_FEW_ROWS = 64
_SMALLEST = 1e-4  # floor of the largest magnitude before it becomes a scale


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    'latents',
    'latent_scales',
    'index_keys',
    'index_scales',
    'hidden',
  ],
  meta_fields=['num_pages', 'latent_width', 'rope_width'],
)
@dataclasses.dataclass(frozen=True)
class Cache:
  """Pools over layers, pages and tokens; carried and donated.

  Attributes:
    latents: [latent slots * pages * 64, W] rows, or bytes of fp8 records.
    latent_scales: [same, G] float32 with fp8 records, else None.
    index_keys: [index slots * pages * 64, H].
    index_scales: [same] float32 with fp8 keys, else None.
    hidden: [pages, D] last post-norm hidden state of each page, kept for the
      drafter; None without one.
    num_pages: pages of one layer.
    latent_width: R.
    rope_width: P.
  """

  latents: jax.Array
  latent_scales: jax.Array | None
  index_keys: jax.Array
  index_scales: jax.Array | None
  hidden: jax.Array | None
  num_pages: int
  latent_width: int
  rope_width: int

  @property
  def slots_per_layer(self) -> int:
    """Token slots of one layer."""
    return self.num_pages * PAGE


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['seq', 'pos', 'slots', 'page_table'],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Rows:
  """The rows of one step and where they live.

  Attributes:
    seq: [T] int32 sequence of each row.
    pos: [T] int32 position of each row, -1 for padding.
    slots: [T] int32 token slot within a layer, -1 for padding.
    page_table: [B, n] int32 page of each 64-token block, -1 for none.
  """

  seq: jax.Array
  pos: jax.Array
  slots: jax.Array
  page_table: jax.Array


def make_rows(seq: jax.Array, pos: jax.Array, page_table: jax.Array) -> Rows:
  """Finds the slots of (sequence, position) pairs.

  Args:
    seq: [T] int32.
    pos: [T] int32, -1 for a padding row.
    page_table: [B, n] int32.

  Returns:
    The rows; a row without a page (or a sequence or position beyond the
    table) is written nowhere, and debug mode raises for it.
  """
  slots = _slots(page_table, seq[:, None], pos[:, None])[:, 0]
  checkify.debug_check(
    jnp.all((slots >= 0) == (pos >= 0)),
    'a row has no page: positions up to {top}, page table of {n} pages',
    top=jnp.max(pos),
    n=jnp.int32(page_table.shape[1]),
  )
  return Rows(seq, pos, slots, page_table)


def position_slots(rows: Rows, positions: jax.Array) -> jax.Array:
  """Slots within a layer of selected positions.

  Args:
    rows: the step's rows.
    positions: [T, k] int32, -1 for none.

  Returns:
    [T, k] int32, -1 for none. Computed once a group of layers.
  """
  return _slots(rows.page_table, rows.seq[:, None], positions)


def _slots(page_table, seq, pos):
  block = pos // PAGE
  inside = (pos >= 0) & (block < page_table.shape[1])
  inside &= (seq >= 0) & (seq < page_table.shape[0])
  page = page_table[jnp.maximum(seq, 0), jnp.where(inside, block, 0)]
  slot = page * PAGE + pos % PAGE
  return jnp.where(inside & (page >= 0), slot, -1).astype(jnp.int32)


def cache_dtype(config: ModelConfig, dtype: str) -> str:
  """Resolves 'auto' and spelled-out names to 'bf16', 'f32' or 'fp8'."""
  names = {'bfloat16': 'bf16', 'float32': 'f32', 'fp8_e4m3': 'fp8'}
  name = config.dtype if dtype == 'auto' else dtype
  name = names.get(name, name)
  if name not in CACHE_DTYPES:
    raise ValueError(
      f"kv_cache_dtype={dtype!r} must be 'auto' or one of {CACHE_DTYPES}"
    )
  return name


def _row_width(config: ModelConfig, dtype: str) -> int:
  c = config.mla
  used = c.row_dim if dtype != 'fp8' else c.row_dim + c.qk_rope_head_dim
  return round_up(used, 128)


def bytes_per_token(
  config: ModelConfig,
  dtype: str = 'auto',
  *,
  physical: bool = False,
  drafter: bool = False,
) -> int:
  """Cache bytes of one token over all layers.

  Args:
    config: the model.
    dtype: 'auto', 'bf16', 'f32' or 'fp8'.
    physical: with padding, as allocated; else the information alone.
    drafter: the drafter's bytes instead of the trunk's.

  Returns:
    Bytes (95,232 bf16 and 53,940 fp8, logical, for GLM-5.2's trunk).
  """
  dtype = cache_dtype(config, dtype)
  plan, c = layer_plan(config), config.mla
  latents = 1 if drafter else plan.num_layers
  keys = 1 if drafter else len(plan.full_layers)
  if dtype == 'fp8':
    used = c.kv_lora_rank + 2 * c.qk_rope_head_dim
    row = _row_width(config, dtype) if physical else used
    row += 4 * cdiv(c.kv_lora_rank, SCALE_GROUP)
    key = config.indexer.head_dim + 4
  else:
    size = jnp.dtype(_WIDE[dtype]).itemsize
    row = size * (_row_width(config, dtype) if physical else c.row_dim)
    key = size * config.indexer.head_dim
  return latents * row + keys * key


def init_cache(
  config: ModelConfig, num_pages: int, *, dtype: str = 'auto', plan=None
) -> Cache:
  """Allocates an empty cache.

  Args:
    config: the model.
    num_pages: pages of 64 tokens, shared by all sequences.
    dtype: 'auto' (the config's), 'bf16', 'f32' or 'fp8'.
    plan: where the pools live; None for one device.

  Returns:
    A cache of zeros.

  Raises:
    ValueError: unknown dtype, or row ids that int32 cannot hold.
  """
  dtype = cache_dtype(config, dtype)
  layers = layer_plan(config)
  if num_pages < 1:
    check_row_ids(num_pages, layers.num_latent_slots)
  latent_rows = layers.num_latent_slots * num_pages * PAGE
  index_rows = layers.num_index_slots * num_pages * PAGE
  shape = jax.ShapeDtypeStruct
  width, H = _row_width(config, dtype), config.indexer.head_dim
  R = config.mla.kv_lora_rank
  latent_scales = index_scales = hidden = None
  if dtype == 'fp8':
    latents = shape((latent_rows, width), jnp.uint8)
    groups = cdiv(R, SCALE_GROUP)
    latent_scales = shape((latent_rows, groups), jnp.float32)
    index_keys = shape((index_rows, H), FP8)
    index_scales = shape((index_rows,), jnp.float32)
  else:
    latents = shape((latent_rows, width), _WIDE[dtype])
    index_keys = shape((index_rows, H), _WIDE[dtype])
  if layers.has_mtp:
    wide = jnp.float32 if dtype == 'f32' else jnp.bfloat16
    hidden = shape((num_pages, config.hidden_size), wide)
  cache = Cache(
    latents=latents,
    latent_scales=latent_scales,
    index_keys=index_keys,
    index_scales=index_scales,
    hidden=hidden,
    num_pages=num_pages,
    latent_width=R,
    rope_width=config.mla.qk_rope_head_dim,
  )
  if plan is not None:
    return plan.place_cache(cache)
  check_row_ids(num_pages, layers.num_latent_slots)
  return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), cache)


def check_row_ids(num_pages: int, layers: int) -> None:
  """Raises `ValueError` unless int32 numbers a device's latent rows.

  Args:
    num_pages: pages of one layer on that device.
    layers: layers it holds.
  """
  rows = layers * num_pages * PAGE
  if not 0 < rows < 2**31:
    raise ValueError(
      f'{num_pages=} gives {rows} rows: row ids are int32, use 1 to '
      f'{(2**31 - 1) // (layers * PAGE)} pages'
    )


def write_rows(
  cache: Cache, layer: jax.Array | int, slots: jax.Array, rows: jax.Array
) -> Cache:
  """Writes latent rows of one layer.

  Args:
    cache: the cache.
    layer: slot of the layer in the latent pool.
    slots: [T] int32 token slots within the layer, -1 to write nothing.
    rows: [T, R + P] normed latents, then rotary keys.

  Returns:
    The cache with the rows in place.
  """
  at = _pool_ids(cache, layer, slots, cache.latents.shape[0])
  if cache.latent_scales is None:
    values = rows.astype(cache.latents.dtype)
  else:
    values, scales = _encode_record(rows, cache.latent_width)
    scales = cache.latent_scales.at[at].set(scales, mode='drop')
    cache = dataclasses.replace(cache, latent_scales=scales)
  missing = cache.latents.shape[1] - values.shape[1]
  values = jnp.pad(values, ((0, 0), (0, missing)))
  return dataclasses.replace(cache, latents=_put(cache.latents, at, values))


def read_rows(
  cache: Cache, layer: jax.Array | int, slots: jax.Array
) -> jax.Array:
  """Latent rows of one layer as numbers.

  Args:
    cache: the cache.
    layer: slot of the layer in the latent pool.
    slots: [...] int32 token slots within the layer, -1 for a row of zeros
      (as is one beyond the layer, for which debug mode raises).

  Returns:
    [..., R + P] in the cache's dtype (bf16 from fp8 records).
  """
  slots = within_pool(slots, cache.slots_per_layer, 'slot')
  at = jnp.maximum(slots, 0) + jnp.asarray(layer) * cache.slots_per_layer
  scales = cache.latent_scales
  rows = decode_rows(
    cache.latents[at],
    None if scales is None else scales[at],
    cache.latent_width,
    cache.rope_width,
  )
  rows = rows[..., : cache.latent_width + cache.rope_width]
  return jnp.where(slots[..., None] >= 0, rows, 0)


def write_hidden(cache: Cache, rows: Rows, hidden: jax.Array) -> Cache:
  """Keeps the last hidden state of each page that a step touches.

  Args:
    cache: of a model with a drafter.
    rows: [T] rows; positions of a sequence ascend.
    hidden: [T, D] post-norm hidden states.

  Returns:
    The cache; a page keeps the state of its highest row in this step.
  """
  page = rows.slots // PAGE
  below = jnp.roll(page, -1).at[-1].set(-1)
  last = (rows.slots >= 0) & (page != below)
  at = jnp.where(last, page, cache.num_pages)
  values = hidden.astype(cache.hidden.dtype)
  kept = cache.hidden.at[at].set(values, mode='drop')
  return dataclasses.replace(cache, hidden=kept)


def write_index_keys(
  cache: Cache, index_slot: jax.Array | int, slots: jax.Array, keys: jax.Array
) -> Cache:
  """Writes index keys [T, H] of one full layer; see `write_rows`."""
  at = _pool_ids(cache, index_slot, slots, cache.index_keys.shape[0])
  if cache.index_scales is not None:
    keys, scales = encode_keys(keys)
    scales = cache.index_scales.at[at].set(scales, mode='drop')
    cache = dataclasses.replace(cache, index_scales=scales)
  keys = keys.astype(cache.index_keys.dtype)
  return dataclasses.replace(cache, index_keys=_put(cache.index_keys, at, keys))


def read_index_keys(
  cache: Cache, index_slot: jax.Array | int, slots: jax.Array
) -> jax.Array:
  """Index keys [..., H] of one full layer as float32; see `read_rows`."""
  slots = within_pool(slots, cache.slots_per_layer, 'slot')
  at = jnp.maximum(slots, 0) + jnp.asarray(index_slot) * cache.slots_per_layer
  keys = cache.index_keys[at].astype(jnp.float32)
  if cache.index_scales is not None:
    keys = keys * cache.index_scales[at][..., None]
  return jnp.where(slots[..., None] >= 0, keys, 0)


def index_pages(cache: Cache) -> tuple[jax.Array, jax.Array | None]:
  """The index keys as the ops take them: [pages, 64, H], [pages, 64]."""
  pages = cache.index_keys.reshape(-1, PAGE, cache.index_keys.shape[1])
  if cache.index_scales is None:
    return pages, None
  return pages, cache.index_scales.reshape(-1, PAGE)


def _pool_ids(cache, layer, slots, size):
  """Pool ids of slots; -1 becomes an id past the end, which is dropped."""
  slots = within_pool(slots, cache.slots_per_layer, 'slot')
  at = slots + jnp.asarray(layer, jnp.int32) * cache.slots_per_layer
  return jnp.where(slots >= 0, at, size)


def _put(pool: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
  """Writes rows [T, W] at pool ids [T]; ids past the end write nothing.

  A few rows of bytes go in a tile of rows at a time: XLA lays a pool of bytes
  out anew, all of it, around an update that is less than a TPU's tile.
  """
  if pool.dtype.itemsize > 1 or len(rows) > _FEW_ROWS:
    return pool.at[at].set(rows, mode='drop')

  def one(i, pool):
    first = jnp.minimum(at[i], pool.shape[0] - 1) // _TILE_ROWS * _TILE_ROWS
    tile = lax.dynamic_slice_in_dim(pool, first, _TILE_ROWS)
    here = first + jnp.arange(_TILE_ROWS) == at[i]
    tile = jnp.where(here[:, None], rows[i], tile)
    return lax.dynamic_update_slice_in_dim(pool, tile, first, 0)

  return lax.fori_loop(0, len(rows), one, pool)


def _encode_record(rows, latent_width):
  """fp8 records (bytes [T, R + 2P]) and scales [T, G] of wide rows."""
  latent = rows[:, :latent_width].astype(jnp.float32)
  groups = cdiv(latent_width, SCALE_GROUP)
  pad = groups * SCALE_GROUP - latent_width
  parts = jnp.pad(latent, ((0, 0), (0, pad)))
  parts = parts.reshape(-1, groups, SCALE_GROUP)
  amax = jnp.maximum(jnp.max(jnp.abs(parts), axis=-1), _SMALLEST)
  scales = amax / FP8_MAX
  full = jnp.repeat(scales, SCALE_GROUP, axis=-1)[:, :latent_width]
  values = jnp.clip(latent / full, -FP8_MAX, FP8_MAX).astype(FP8)
  rope = rows[:, latent_width:].astype(jnp.bfloat16)
  bytes_ = lax.bitcast_convert_type(rope, jnp.uint8).reshape(len(rows), -1)
  values = lax.bitcast_convert_type(values, jnp.uint8)
  return jnp.concatenate([values, bytes_], axis=1), scales


def encode_keys(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Rounds index keys to e4m3 with one power-of-two scale a key.

  Args:
    keys: [T, H].

  Returns:
    values [T, H] e4m3 and scales [T] float32 (spec/model.md section 2.4).
  """
  wide = keys.astype(jnp.float32)
  amax = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), _SMALLEST)
  mantissa, exponent = jnp.frexp(amax / FP8_MAX)
  exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
  scales = jnp.ldexp(jnp.float32(1), exponent)
  return (wide / scales[:, None]).astype(FP8), scales
