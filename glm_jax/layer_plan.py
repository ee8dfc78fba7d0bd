"""Which layer owns an indexer, whose indices a layer reads, what is scanned.

`LayerPlan` is the single source for the model, the cache, sharding,
checkpoint conversion and accounting. Nothing else counts layers.
"""

from __future__ import annotations

import dataclasses
import functools

from glm_jax.config import FULL, SPARSE, ModelConfig


@dataclasses.dataclass(frozen=True)
class LayerPlan:
  """The schedule of one model.

  Attributes:
    indexer_types: 'full' or 'shared' for each trunk layer.
    mlp_types: 'dense' or 'sparse' for each trunk layer.
    has_mtp: the drafter exists; it is layer `num_layers`, always full and
      sparse.
    prologue: number of leading layers that are unrolled.
    group_size: layers of one scanned group; its first layer is full.
    num_groups: scanned groups; prologue + group_size * num_groups layers.
  """

  indexer_types: tuple[str, ...]
  mlp_types: tuple[str, ...]
  has_mtp: bool
  prologue: int
  group_size: int
  num_groups: int

  @property
  def num_layers(self) -> int:
    """Trunk layers."""
    return len(self.indexer_types)

  @functools.cached_property
  def full_layers(self) -> tuple[int, ...]:
    """Trunk layers that own an indexer, ascending."""
    kinds = enumerate(self.indexer_types)
    return tuple(i for i, kind in kinds if kind == FULL)

  @functools.cached_property
  def moe_layers(self) -> tuple[int, ...]:
    """Trunk layers with routed experts, ascending."""
    kinds = enumerate(self.mlp_types)
    return tuple(i for i, kind in kinds if kind == SPARSE)

  @property
  def num_latent_slots(self) -> int:
    """Layers of the latent pool: the trunk's, then the drafter's."""
    return self.num_layers + self.has_mtp

  @property
  def num_index_slots(self) -> int:
    """Layers of the index-key pool: full layers, then the drafter's."""
    return len(self.full_layers) + self.has_mtp

  def is_full(self, layer: int) -> bool:
    """Whether a layer runs its own indexer (the drafter does)."""
    return layer == self.num_layers or self.indexer_types[layer] == FULL

  def is_moe(self, layer: int) -> bool:
    """Whether a layer has routed experts (the drafter does)."""
    return layer == self.num_layers or self.mlp_types[layer] == SPARSE

  def index_source(self, layer: int) -> int:
    """The layer whose selection this layer attends with.

    Args:
      layer: trunk layer, or `num_layers` for the drafter.

    Returns:
      The newest full layer at or below `layer`; the drafter's is itself.
    """
    if layer == self.num_layers:
      return layer
    return max(i for i in self.full_layers if i <= layer)

  def index_slot(self, layer: int) -> int:
    """Slot of the layer's index source in the index-key pool."""
    source = self.index_source(layer)
    if source == self.num_layers:
      return len(self.full_layers)
    return self.full_layers.index(source)

  def moe_slot(self, layer: int) -> int:
    """Slot of a sparse layer in the expert pool.

    Raises:
      ValueError: the layer has no routed experts.
    """
    if layer == self.num_layers:
      return 0  # the drafter's experts are a pool of their own
    if not self.is_moe(layer):
      raise ValueError(f'layer {layer} is dense: it has no routed experts')
    return self.moe_layers.index(layer)

  def partition(self, num_parts: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous shares of the trunk layers, first ones one longer.

    A share may start on a shared layer: latents and index keys are two
    layer spaces, so a share's index slots are looked up, not derived.
    """
    if not 0 < num_parts <= self.num_layers:
      raise ValueError(
        f'cannot deal {self.num_layers} layers to {num_parts} parts: use 1 '
        f'to {self.num_layers}'
      )
    size, extra = divmod(self.num_layers, num_parts)
    shares, start = [], 0
    for part in range(num_parts):
      stop = start + size + (part < extra)
      shares.append(tuple(range(start, stop)))
      start = stop
    return tuple(shares)

  def owned_index_slots(self, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Index-pool slots of the full layers among `layers`."""
    return tuple(self.index_slot(i) for i in layers if self.is_full(i))


def layer_plan(config: ModelConfig) -> LayerPlan:
  """The plan of a configuration.

  The scanned tail is the longest run of equal groups at the end of the
  trunk, each starting on a full layer, so that no selection crosses a scan
  step. GLM-5.2: layers 0-5 unrolled, 18 groups of 1 full + 3 shared.
  """
  kinds = tuple(zip(config.indexer_types, config.mlp_types))
  n = len(kinds)
  best = (0, 0, 0)  # (layers covered, -group size, groups)
  for size in range(1, n // 2 + 1):
    group = kinds[n - size :]
    if group[0][0] != FULL:
      continue
    count = 1
    while kinds[n - size * (count + 1) : n - size * count] == group:
      count += 1
    if count > 1:
      best = max(best, (size * count, -size, count))
  covered, negative_size, groups = best
  return LayerPlan(
    indexer_types=config.indexer_types,
    mlp_types=config.mlp_types,
    has_mtp=config.mtp.num_layers > 0,
    prologue=n - covered,
    group_size=-negative_size,
    num_groups=groups,
  )
