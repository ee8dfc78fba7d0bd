"""Pages as records: out of the cache, into it, copied, poisoned.

A record holds a page's rows of every pool: latents of all layers, index
keys, their scales, the drafter's rows (they are layers of the same pools)
and the hidden state. Nothing moves a part of it (known faults 19, 37, 42).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.cache import Cache
from glm_jax.serving.host_compute import DEVICE, HOST, runs_on_host
from pallas_kernels.tiling import PAGE

Record = dict[str, Any]  # by pool: jax arrays, or numpy arrays
POOLS = ('latents', 'latent_scales', 'index_keys', 'index_scales', 'hidden')
# Where a cache keeps its latents in host memory: `host_latent`.
_ON_HOST = {'latents': 'host', 'latent_scales': 'host_scales'}


def _field(cache: Cache, name: str) -> tuple[str, bool]:
  """The cache's field that holds a pool, and whether that is in host memory."""
  other = _ON_HOST.get(name)
  if other is not None and getattr(cache, other, None) is not None:
    return other, True
  return name, False


def _pools(cache: Cache) -> list[tuple[str, str, bool]]:
  """(pool, field, in host memory) of every pool that the cache has."""
  found = [(name, *_field(cache, name)) for name in POOLS]
  return [f for f in found if getattr(cache, f[1]) is not None]


def _rows(cache: Cache, field: str, plan, pages: jax.Array) -> jax.Array:
  """Row ids [n, layers, 64] of pages in a pool ([n, 1, 1] of hidden states).

  The pool keeps its shape: seen as pages, a narrow plane of scales would be
  laid out anew on TPU, all of it.
  """
  if field == 'hidden':
    return pages[:, None, None]
  kind = 'index_keys' if field.startswith('index') else 'latents'
  rows = getattr(cache, field).shape[0]
  places = jax.vmap(lambda page: plan.page_places(cache, kind, rows, page))
  return places(pages)[..., None] * PAGE + jnp.arange(PAGE, dtype=jnp.int32)


def _take(pool, rows):
  return pool[rows]


def _put(pool, rows, value):
  return pool.at[rows].set(value)


_take_on_host = runs_on_host(_take)
_put_on_host = runs_on_host(_put)


def extract(cache: Cache, pages: jax.Array, plan) -> list[Record]:
  """Records of pages.

  Args:
    cache: the cache.
    pages: [n] int32.
    plan: knows where a page's layers stand.

  Returns:
    A record a page, by pool: [layers, 64, ...] ([1, 1, D] for the hidden
    state).
  """
  found = {}
  for name, field, on_host in _pools(cache):
    pool, rows = getattr(cache, field), _rows(cache, field, plan, pages)
    if on_host:
      pool, rows = jax.device_put((pool, rows), HOST)
      value = _take_on_host(pool, rows)
      value = jax.device_put(value, DEVICE)
    else:
      value = _take(pool, rows)
    found[name] = value
  return [
    {name: value[i] for name, value in found.items()} for i in range(len(pages))
  ]


def insert(
  cache: Cache, pages: jax.Array, records: Sequence[Record], plan
) -> Cache:
  """Fills pages [n] int32 from their records; donate the cache."""
  changed = {}
  for name, field, on_host in _pools(cache):
    pool, rows = getattr(cache, field), _rows(cache, field, plan, pages)
    value = jnp.stack([record[name] for record in records])
    if on_host:
      pool, rows, value = jax.device_put((pool, rows, value), HOST)
    put = _put_on_host if on_host else _put
    changed[field] = put(pool, rows, value)
  return dataclasses.replace(cache, **changed)


def copy(cache: Cache, source: jax.Array, target: jax.Array, plan) -> Cache:
  """Copies a page; donate the cache."""
  record = extract(cache, source[None], plan)
  return insert(cache, target[None], record, plan)


def poison(cache: Cache, page: jax.Array, plan) -> Cache:
  """Fills a page with NaN, every byte of fp8 records too."""

  def bad(a):
    if a.dtype == jnp.uint8:  # NaN as e4m3 and as halves of bf16
      return jnp.full(a.shape, 0xFF, a.dtype)
    return jnp.full(a.shape, jnp.nan, a.dtype)

  record = extract(cache, page[None], plan)
  return insert(cache, page[None], jax.tree.map(bad, record), plan)


def record_bytes(cache: Cache, plan) -> int:
  """Bytes of one page's record."""
  shapes = jax.eval_shape(
    lambda cache: extract(cache, jnp.zeros(1, jnp.int32), plan), cache
  )
  return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))


def checksum(record: dict[str, np.ndarray]) -> int:
  """CRC-32 over all parts of a record in host memory."""
  crc = 0
  for name in sorted(record):
    part = np.ascontiguousarray(record[name])
    crc = zlib.crc32(part.view(np.uint8).data, crc)
  return crc
