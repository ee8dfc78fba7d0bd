"""What plans of several devices share: rows, weights, embedding, experts.

Linear layers are left to XLA's partitioner; a plan says how rows and weights
are split, once a step, and everything that XLA cannot be trusted with (the
cache, selection, attention, experts) runs in `shard_map`.

A step is *split* when every rank gets at least `min_rows` rows: each rank
then computes its own rows and gathers each layer's weights over `data` and
`context` as it comes to it. Other steps are *whole*: every rank sees all
rows, weights stay where they are and partial products are summed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax.cache import Cache
from glm_jax.config import ModelConfig
from sharding import ragged, vocab
from sharding.block_scaled import Products, with_products
from sharding.collectives import rank_index
from sharding.experts import run_experts
from sharding.mesh import CONTEXT, DATA, mesh_shape, ways
from sharding.rules import DEFAULT, Rules, parameters
from sharding.sharded_cache import ShardedCache, sharded_zeros

P = PartitionSpec
ANY = PartitionSpec.UNCONSTRAINED


@dataclasses.dataclass(frozen=True)
class ShardedPlan:
  """Rows, weights and experts over a mesh; cache plans build on it.

  Attributes:
    config: the model.
    mesh: of `make_mesh`.
    rules: logical axes to mesh axes.
    implementation: of the ops; None chooses.
    block_bytes: bytes of scores, and of gathered rows, at once on a device.
    slots: 2 fetches the next layer while one computes, 1 afterwards.
    min_rows: rows a rank must get for a step to be split.
    expert_capacity: rows a rank sends to one other rank at once in a split
      step; None for twice the even share. More rows go in further rounds.
    ragged_experts: send exactly the rows that travel (TPU only).
  """

  config: ModelConfig
  mesh: Mesh
  rules: Rules = DEFAULT
  implementation: str | None = None
  block_bytes: int = 64 << 20
  slots: int = 2
  min_rows: int = 256
  expert_capacity: int | None = None
  ragged_experts: bool = False

  # Fixed row tiles promise bits that no sum over devices can keep.
  row_tile = None

  def __post_init__(self):
    mesh_shape(self.mesh)
    if self.ragged_experts:
      ragged.check_platform(self.mesh)
    if self.slots not in (1, 2):
      raise ValueError(
        f'slots={self.slots} must be 1 (fetch a layer when it is needed) or 2 '
        '(while the layer before computes)'
      )
    heads, N = ways(self.mesh, self.axes('heads')), self.config.mla.num_heads
    if N % heads:
      raise ValueError(
        f'{N} attention heads do not divide over '
        f'{"x".join(self.axes("heads"))}={heads}: use a smaller model axis'
      )

  def axes(self, name: str) -> tuple[str, ...]:
    """Mesh axes larger than 1 of a logical axis."""
    return tuple(a for a in self.rules.axes(name) if self.mesh.shape[a] > 1)

  def sharding(self, axes, shape) -> NamedSharding:
    """Where a parameter lives (`glm_jax.checkpoints` asks this)."""
    return self.rules.sharding(axes, shape, self.mesh)

  def is_split(self, num_rows: int) -> bool:
    """Whether a step of that many rows is split over ranks.

    Raises:
      ValueError: it is large enough but does not divide.
    """
    ranks = ways(self.mesh, self.axes('rows'))
    if ranks == 1 or num_rows < ranks * self.min_rows:
      return False
    if num_rows % ranks:
      raise ValueError(
        f'a step of {num_rows} rows does not divide over {ranks} ranks: pad '
        f'it to {-(-num_rows // ranks) * ranks} rows, or raise '
        f'min_rows={self.min_rows}'
      )
    return True

  def row_axes(self, num_rows: int) -> tuple[str, ...]:
    """Mesh axes that a step's rows are split over, () for none."""
    return self.axes('rows') if self.is_split(num_rows) else ()

  def place_rows(self, tree):
    """Constrains [T, ...] arrays to where the step's rows are."""

    def place(a):
      rows = self.row_axes(a.shape[0])
      # The features of a whole step are few: split, every norm would wait.
      rest = None if a.ndim == 2 and not rows else ANY
      spec = P(rows or None, *(rest,) * (a.ndim - 1))
      return lax.with_sharding_constraint(a, NamedSharding(self.mesh, spec))

    return jax.tree.map(place, tree)

  def rows(self, f: Callable, *arrays):
    """Applies a row-wise function to [T, ...] arrays."""
    return self.place_rows(f(*self.place_rows(arrays)))

  def weights(self, module: nnx.Module, num_rows: int):
    """A layer's weights; a split step gathers all but routed experts."""
    if not self.is_split(num_rows):
      return with_products(module, Products(self, (), self.rules))
    kept = Rules(
      tuple(
        (name, tuple(a for a in axes if a not in (DATA, CONTEXT)))
        for name, axes in self.rules.table
      )
    )
    out = []
    for _, value in parameters(module):
      array = value[...]
      if 'expert' not in value.axes:
        array = lax.with_sharding_constraint(
          array, kept.sharding(value.axes, array.shape, self.mesh)
        )
      out.append(array)
    module = jax.tree.unflatten(jax.tree.structure(module), out)
    return with_products(module, Products(self, self.row_axes(num_rows), kept))

  def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows [T, D] of the embedding: each rank looks up the ids it holds."""
    spec = self.rules.spec(('vocab', 'embed'), table.shape, self.mesh)
    vocab = self.axes('vocab')

    def body(table, tokens):
      at = tokens - rank_index(vocab) * table.shape[0]
      here = (at >= 0) & (at < table.shape[0])
      rows = jnp.where(here[:, None], table[jnp.where(here, at, 0)], 0)
      return lax.psum(rows, vocab) if vocab else rows

    rows = self.shard_map(body, (spec, P()), P(None, spec[1]))(table, tokens)
    return self.place_rows(rows)

  def logits(self, weight: jax.Array, hidden: jax.Array) -> jax.Array:
    """Logits [T, V] float32, split over the vocabulary."""
    return vocab.logits(self, weight, hidden)

  def filtered_logits(self, logits, params) -> jax.Array:
    """Logits after all cuts of sampling, split over the vocabulary."""
    return vocab.filtered_logits(self, logits, params)

  def experts(self, experts, x, chosen, weights, layer):
    """Routed experts: see `sharding.experts`."""
    out = run_experts(self, experts, x, chosen, weights, layer)
    ones = jnp.ones((x.shape[0], 1), jnp.float32)
    return self.place_rows((out[:, None], ones))

  def layout(self, cache: Cache) -> tuple[Cache, dict[str, PartitionSpec]]:
    """Global shapes of the pools, and how each is split.

    Args:
      cache: shapes and dtypes, as one device would hold them.

    Raises:
      ValueError: row ids of a rank that int32 cannot hold.
    """
    raise NotImplementedError(f'{type(self).__name__} is no cache plan')

  def place_cache(self, cache: Cache) -> ShardedCache:
    """Allocates the pools, each rank its own part."""
    return sharded_zeros(*self.layout(cache), self.mesh)

  def page_places(self, cache: Cache, kind: str, rows: int, page) -> jax.Array:
    """Where a page's layers stand in a pool; see `LocalPlan.page_places`."""
    layers = jnp.arange(rows // cache.slots_per_layer, dtype=jnp.int32)
    return layers * cache.num_pages + page

  def cache_bytes(self, cache: Cache) -> dict[str, int]:
    """Bytes on one device: 'pools' for good, 'slots' while rows move.

    Args:
      cache: shapes and dtypes, as one device would hold them.
    """
    shapes, specs = self.layout(cache)
    pools = 0
    for name, spec in specs.items():
      array = getattr(shapes, name)
      if array is not None:
        shard = NamedSharding(self.mesh, spec).shard_shape(array.shape)
        pools += math.prod(shard) * array.dtype.itemsize
    return {'pools': pools, 'slots': self.num_slots * self.slot_bytes(shapes)}

  @property
  def num_slots(self) -> int:
    """Transient slots that exist together."""
    return 0

  def slot_bytes(self, shapes: Cache) -> int:
    """Bytes of one slot."""
    return 0

  def hidden_spec(self, cache) -> PartitionSpec:
    """Pages' last hidden states are split by feature, not by page.

    XLA can gather and scatter pages of such an array without moving any.
    """
    if cache.hidden is None:
      return P()
    return self.rules.spec((None, 'embed'), cache.hidden.shape, self.mesh)

  def shard_map(self, body: Callable, in_specs, out_specs) -> Callable:
    """`body` on every device's shards."""
    return jax.shard_map(
      body,
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      check_vma=False,
    )
