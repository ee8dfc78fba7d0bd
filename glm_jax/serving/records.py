"""One page as one record: out of the cache, into it, copied, poisoned.

A record holds a page's rows of every pool: latents of all layers, index
keys, their scales, the drafter's rows (they are layers of the same pools)
and the hidden state. Nothing moves a part of it (known faults 19, 37, 42).
"""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on

from glm_jax.cache import Cache
from pallas_kernels.tiling import PAGE

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


def _paged(cache: Cache, field: str) -> jax.Array:
  """A pool as [layers, pages, rows, ...]."""
  a = getattr(cache, field)
  rows = 1 if field == 'hidden' else PAGE
  return a.reshape(-1, cache.num_pages, rows, *a.shape[1:])


def _take(paged, page):
  return jax.lax.dynamic_index_in_dim(paged, page, 1, False)


def _put(paged, page, value):
  at = (0, page) + (0,) * (paged.ndim - 2)
  return jax.lax.dynamic_update_slice(paged, value[:, None], at)


_HOST = jax.memory.Space.Host
_take_on_host = compute_on('device_host')(jax.jit(_take))
_put_on_host = compute_on('device_host')(jax.jit(_put))


def extract(cache: Cache, page: jax.Array) -> dict[str, jax.Array]:
  """A page's record.

  Args:
    cache: the cache.
    page: scalar int32.

  Returns:
    By pool: [layers, 64, ...] ([1, 1, D] for the hidden state).
  """
  record = {}
  for name, field, on_host in _pools(cache):
    paged = _paged(cache, field)
    if on_host:
      paged, at = jax.device_put((paged, page), _HOST)
      value = jax.device_put(_take_on_host(paged, at), jax.memory.Space.Device)
    else:
      value = _take(paged, page)
    record[name] = value
  return record


def insert(cache: Cache, page: jax.Array, record) -> Cache:
  """Fills a page from a record; donate the cache."""
  changed = {}
  for name, field, on_host in _pools(cache):
    paged, value, at = _paged(cache, field), record[name], page
    if on_host:
      paged, value, at = jax.device_put((paged, value, page), _HOST)
    put = _put_on_host if on_host else _put
    changed[field] = put(paged, at, value).reshape(getattr(cache, field).shape)
  return dataclasses.replace(cache, **changed)


def copy(cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
  """Copies a page; donate the cache."""
  return insert(cache, target, extract(cache, source))


def poison(cache: Cache, page: jax.Array) -> Cache:
  """Fills a page with NaN, every byte of fp8 records too."""

  def bad(a):
    if a.dtype == jnp.uint8:  # NaN as e4m3 and as halves of bf16
      return jnp.full(a.shape, 0xFF, a.dtype)
    return jnp.full(a.shape, jnp.nan, a.dtype)

  return insert(cache, page, jax.tree.map(bad, extract(cache, page)))


def record_bytes(cache: Cache) -> int:
  """Bytes of one page's record."""
  total = sum(getattr(cache, field).nbytes for _, field, _ in _pools(cache))
  return total // cache.num_pages


def checksum(record: dict[str, np.ndarray]) -> int:
  """CRC-32 over all parts of a record in host memory."""
  crc = 0
  for name in sorted(record):
    part = np.ascontiguousarray(record[name])
    crc = zlib.crc32(part.view(np.uint8).data, crc)
  return crc
