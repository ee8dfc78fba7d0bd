"""The cache of several devices: the same pools, and what is on its way.

Global shapes are rank after rank: [ranks * layers * local pages * 64, ...],
split over the mesh axes of the ranks, so that each rank's shard is a pool of
the form that `glm_jax.cache` knows. `num_pages` and page tables are global.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from glm_jax.cache import Cache, Rows


class Slot(NamedTuple):
  """One whole layer on every rank, for as long as the layer computes.

  Attributes:
    latents: [pages * 64, W].
    latent_scales: [pages * 64, G] with fp8 records, else None.
    index_keys: [pages * 64, H] of a full layer; of a shared layer those of
      its full layer, None while it is on its way.
    index_scales: [pages * 64] with fp8 keys, else None.
  """

  latents: jax.Array
  latent_scales: jax.Array | None
  index_keys: jax.Array | None
  index_scales: jax.Array | None


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    'latents',
    'latent_scales',
    'index_keys',
    'index_scales',
    'hidden',
    'slot',
  ],
  meta_fields=['num_pages', 'latent_width', 'rope_width'],
)
@dataclasses.dataclass(frozen=True)
class ShardedCache(Cache):
  """Pools split over ranks.

  Attributes:
    slot: the layer that computes next; None between passes.
  """

  slot: Slot | None = None


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['seq', 'pos', 'slots', 'page_table', 'blocks', 'visible'],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DealtRows(Rows):
  """Rows, and what each rank holds of their sequences.

  Attributes:
    blocks: [ranks, B, m] int32 the 64-token blocks of each sequence whose
      index keys a rank holds, ascending, then -1.
    visible: [ranks, T] int32 how many tokens of those blocks a row sees;
      they are the first ones, since blocks ascend.
  """

  blocks: jax.Array
  visible: jax.Array


def sharded_zeros(shapes: Cache, specs: dict, mesh: Mesh) -> ShardedCache:
  """A cache of zeros, made where it lives.

  Args:
    shapes: global shapes and dtypes by field; None stays None.
    specs: partition of each array field.
    mesh: the mesh.

  Returns:
    The cache, without a slot.
  """
  arrays = {
    name: getattr(shapes, name)
    for name in specs
    if getattr(shapes, name) is not None
  }
  shardings = {name: NamedSharding(mesh, specs[name]) for name in arrays}
  make = lambda: {k: jnp.zeros(a.shape, a.dtype) for k, a in arrays.items()}
  made = jax.jit(make, out_shardings=shardings)()
  fields = dict.fromkeys(specs) | made
  return ShardedCache(
    **fields,
    num_pages=shapes.num_pages,
    latent_width=shapes.latent_width,
    rope_width=shapes.rope_width,
  )
