"""How many cache pages fit, and what context and concurrency that gives."""

from __future__ import annotations

import dataclasses
import os

import jax
import numpy as np

from glm_jax.cache import init_cache
from glm_jax.config import ModelConfig
from glm_jax.serving.config import EngineConfig
from glm_jax.serving.host_latent import HostLatentPlan
from glm_jax.serving.pages import GROUP
from pallas_kernels.tiling import PAGE, cdiv

# Records on the device, at most, while pages come up from host memory.
MOVING = EngineConfig.restore_window + GROUP

# Of host memory, where the device has none of its own: a cache beside the
# user's other programs, as other servers do it.
_HOST_BYTES = 4 << 30
_HOST_SHARE = 0.5
# Pages are dealt over devices: the share of one is that of many, divided.
_MANY_PAGES = 4096


@dataclasses.dataclass(frozen=True)
class Size:
  """What a cache of so many pages can hold.

  Attributes:
    num_pages: pages of 64 tokens.
    page_bytes: of one page over all layers, as allocated.
    max_model_len: tokens of one request at most.
  """

  num_pages: int
  page_bytes: int
  max_model_len: int

  @property
  def cache_bytes(self) -> int:
    """Bytes of all pages."""
    return self.num_pages * self.page_bytes

  @property
  def concurrency(self) -> float:
    """Requests of the largest length that fit at once."""
    return self.num_pages / cdiv(self.max_model_len, PAGE)


def page_bytes(config: ModelConfig, dtype: str, plan=None) -> int:
  """Bytes of one page of 64 tokens on a device, padding included.

  Args:
    config: the model.
    dtype: of the cache.
    plan: of several devices: what one of them holds and moves is counted;
      with latents on the host, they are not.
  """
  shapes = lambda n: jax.eval_shape(lambda: init_cache(config, n, dtype=dtype))
  if hasattr(plan, 'cache_bytes'):
    found = plan.cache_bytes(shapes(_MANY_PAGES))
    return cdiv(found['pools'] + found['slots'], _MANY_PAGES)
  whole = _bytes(shapes(1))
  if isinstance(plan, HostLatentPlan):
    return whole - host_page_bytes(config, dtype)
  return whole


def _bytes(arrays) -> int:
  leaves = jax.tree.leaves(arrays)
  return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in leaves)


def host_page_bytes(config: ModelConfig, dtype: str) -> int:
  """Bytes of one page's latents, where those are in host memory."""
  cache = jax.eval_shape(lambda: init_cache(config, 1, dtype=dtype))
  return _bytes((cache.latents, cache.latent_scales))


def workspace_bytes(
  config: ModelConfig, *, rows: int, drawn: int, context: int, plan=None
) -> int:
  """Bytes that a step needs beside weights and cache, estimated.

  Args:
    config: the model.
    rows: rows of a step at most.
    drawn: rows of a step at most that get logits.
    context: keys that a row may see.
    plan: rows that it sends ahead to the device are counted.
  """
  # Logits, after temperature, as keys, probabilities, what drafts keep.
  logits = 6 * 4 * drawn * config.vocab_size
  hidden = 12 * 4 * rows * config.hidden_size
  # One bounded block of index scores over the whole context.
  scores = 2 * 4 * 8 * context
  ahead = plan.ahead_bytes if isinstance(plan, HostLatentPlan) else 0
  return logits + hidden + scores + ahead


def available_bytes(utilization: float) -> int:
  """Bytes that are free for a cache on the default device.

  Args:
    utilization: share of the device's memory that may be used at all; what
      is in use already (the weights) is taken off. Without device memory,
      half of the free host memory, 4 GiB at most.
  """
  stats = jax.local_devices()[0].memory_stats()
  if stats and 'bytes_limit' in stats:
    limit = int(stats['bytes_limit'] * utilization)
    return limit - stats.get('bytes_in_use', 0)
  free = os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  return min(int(free * _HOST_SHARE), _HOST_BYTES)


def fit(
  config: ModelConfig,
  *,
  dtype: str,
  memory: int,
  max_num_seqs: int,
  max_model_len: int | None = None,
  num_pages: int | None = None,
  page_size: int | None = None,
) -> Size:
  """The pages and the context that fit into `memory`.

  Args:
    config: the model.
    dtype: of the cache.
    memory: bytes for pages.
    max_num_seqs: requests at once; more pages than they can fill, with as
      many again for prefixes, are not taken.
    max_model_len: asked for; None for the largest that fits.
    num_pages: asked for; None for what fits.
    page_size: bytes of a page on a device; None for one device.

  Returns:
    The size.

  Raises:
    ValueError: what was asked for does not fit, or exceeds the model window.
  """
  window = config.max_position_embeddings
  if max_model_len is not None and not 2 <= max_model_len <= window:
    raise ValueError(
      f'{max_model_len=} must be 2 to {window}, the window of the model'
    )
  size = page_size or page_bytes(config, dtype)
  pages = num_pages
  if pages is None:
    wanted = cdiv(max_model_len or window, PAGE)
    pages = min(memory // size, 2 * max_num_seqs * wanted)
    if pages < 1:
      raise ValueError(
        f'no page of {size} bytes fits into the {memory} bytes that are left '
        'for the cache: use a smaller kv_cache_dtype, fewer max_num_seqs or '
        'more memory'
      )
  longest = min(window, pages * PAGE)
  if max_model_len is not None and max_model_len > longest:
    raise ValueError(
      f'{max_model_len=} needs {cdiv(max_model_len, PAGE)} pages of {size} '
      f'bytes, and {pages} fit: use at most --max_model_len={longest}'
    )
  return Size(int(pages), size, max_model_len or longest)


def lines(
  size: Size, dtype: str, *, longest: bool, host_page: int = 0
) -> list[str]:
  """A size for people.

  Args:
    size: what fits.
    dtype: of the cache.
    longest: nobody asked for a context: it is the largest that fits.
    host_page: bytes of a page's latents in host memory, 0 for none.
  """
  chosen = ', the largest that fits' if longest else ''
  out = [
    f'max_model_len {size.max_model_len}{chosen}; cache of {size.num_pages} '
    f'pages ({PAGE * size.num_pages} tokens, {dtype}, '
    f'{size.cache_bytes / 2**30:.2f} GiB); maximum concurrency for '
    f'{size.max_model_len} tokens: {size.concurrency:.2f}x'
  ]
  if host_page:
    page = size.page_bytes
    out.append(
      f'latents on the host: {size.num_pages * host_page / 2**30:.2f} GiB; a '
      f'page takes {page} bytes of the device instead of {page + host_page}: '
      f'{(page + host_page) / page:.2f} times the tokens'
    )
  return out
