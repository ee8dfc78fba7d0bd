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

from glm_jax.cache import Cache
from pallas_kernels.tiling import PAGE

POOLS = ('latents', 'latent_scales', 'index_keys', 'index_scales', 'hidden')


def _paged(cache: Cache, name: str) -> jax.Array:
  """A pool as [layers, pages, rows, ...]."""
  a = getattr(cache, name)
  rows = 1 if name == 'hidden' else PAGE
  return a.reshape(-1, cache.num_pages, rows, *a.shape[1:])


def _pools(cache: Cache) -> list[str]:
  return [name for name in POOLS if getattr(cache, name) is not None]


def extract(cache: Cache, page: jax.Array) -> dict[str, jax.Array]:
  """A page's record.

  Args:
    cache: the cache.
    page: scalar int32.

  Returns:
    By pool: [layers, 64, ...] ([1, 1, D] for the hidden state).
  """
  take = lambda a: jax.lax.dynamic_index_in_dim(a, page, 1, False)
  return {name: take(_paged(cache, name)) for name in _pools(cache)}


def insert(cache: Cache, page: jax.Array, record) -> Cache:
  """Fills a page from a record; donate the cache."""

  def put(name):
    a = _paged(cache, name)
    value = record[name][:, None]
    at = (0, page) + (0,) * (a.ndim - 2)
    whole = jax.lax.dynamic_update_slice(a, value, at)
    return whole.reshape(getattr(cache, name).shape)

  return dataclasses.replace(cache, **{n: put(n) for n in _pools(cache)})


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
  total = sum(getattr(cache, name).nbytes for name in _pools(cache))
  return total // cache.num_pages


def checksum(record: dict[str, np.ndarray]) -> int:
  """CRC-32 over all parts of a record in host memory."""
  crc = 0
  for name in sorted(record):
    part = np.ascontiguousarray(record[name])
    crc = zlib.crc32(part.view(np.uint8).data, crc)
  return crc
