"""What the cache and the weights weigh, by arithmetic alone, and what is read.

The counterpart of `accountant.py` for bytes. A *record* is what one layer
keeps of one token: a latent row and, in a full layer, an index key.
"""

from __future__ import annotations

import dataclasses

from glm_jax import cache as cache_lib
from glm_jax.config import ModelConfig
from glm_jax.layer_plan import layer_plan
from sharding.accountant import active_params


@dataclasses.dataclass(frozen=True)
class Pool:
  """One layer's buffer of the cache.

  Attributes:
    name: 'latent' or 'index'.
    layer: checkpoint layer; the drafter is layer `num_layers`.
    drafter: it is the drafter's.
    bytes_per_token: with or without padding, as asked.
  """

  name: str
  layer: int
  drafter: bool
  bytes_per_token: int


def pools(
  config: ModelConfig, dtype: str = 'auto', *, physical: bool = False
) -> tuple[Pool, ...]:
  """Every buffer of the cache, one a layer and kind (known fault 43).

  GLM-5.2: 78 latent and 21 index buffers of the trunk, 1 and 1 of the
  drafter.
  """
  plan = layer_plan(config)
  row, key = _record(config, dtype, physical)
  out = [Pool('latent', i, False, row) for i in range(plan.num_layers)]
  out += [Pool('index', i, False, key) for i in plan.full_layers]
  if plan.has_mtp:
    out += [Pool(n, plan.num_layers, True, b) for n, b in (
      ('latent', row), ('index', key))]  # fmt: skip
  return tuple(out)


def _record(config: ModelConfig, dtype: str, physical: bool) -> tuple[int, int]:
  """Bytes of one latent row and of one index key."""
  both = cache_lib.bytes_per_token(
    config, dtype, physical=physical, drafter=True
  )
  dtype = cache_lib.cache_dtype(config, dtype)
  head = config.indexer.head_dim
  key = {'fp8': head + 4, 'bf16': 2 * head, 'f32': 4 * head}[dtype]
  return both - key, key


def largest_record(
  config: ModelConfig, dtype: str = 'auto', *, physical: bool = False
) -> int:
  """Bytes of a token in the largest layer: what a transient slot holds."""
  return sum(_record(config, dtype, physical))


def capacity_bytes(
  config: ModelConfig,
  cache_plan: str,
  ways: int,
  *,
  slots: int = 0,
  dtype: str = 'auto',
  physical: bool = False,
) -> float:
  """Cache bytes of one token on the fullest of `ways` ranks, drafter included.

  Args:
    config: the model.
    cache_plan: 'replicated', 'token_split' or 'layer_split'.
    ways: context ranks.
    slots: transient slots, each with room for a token's largest record.
    dtype: of the cache.
    physical: with padding.

  Returns:
    Bytes a cached token: what one rank's memory is divided by.

  Raises:
    ValueError: an unknown plan, or fewer layers than ranks.
  """
  buffers = pools(config, dtype, physical=physical)
  total = sum(p.bytes_per_token for p in buffers)
  staged = slots * largest_record(config, dtype, physical=physical)
  if cache_plan == 'replicated':
    return total
  if cache_plan == 'token_split':
    return total / ways + staged
  if cache_plan == 'layer_split':
    return balanced_share(config, ways, dtype, physical=physical) + staged
  raise ValueError(
    f"{cache_plan=} is unknown: use 'token_split', 'layer_split' or "
    "'replicated'"
  )


def balanced_share(
  config: ModelConfig,
  ways: int,
  dtype: str = 'auto',
  *,
  physical: bool = False,
) -> int:
  """Bytes of the largest share when whole layers are dealt contiguously.

  The smallest bound that a greedy filling of `ways` shares can keep; a
  layer's latents and index keys stay together, the drafter is the last layer.
  """
  sizes: dict[int, int] = {}
  for pool in pools(config, dtype, physical=physical):
    sizes[pool.layer] = sizes.get(pool.layer, 0) + pool.bytes_per_token
  if not 0 < ways <= len(sizes):
    raise ValueError(
      f'cannot deal {len(sizes)} layers to {ways} ranks: use 1 to {len(sizes)}'
    )
  low, high = max(sizes.values()), sum(sizes.values())
  while low < high:
    bound = (low + high) // 2
    shares, filled = 1, 0
    for size in sizes.values():
      filled += size
      if filled > bound:
        shares, filled = shares + 1, size
    low, high = (low, bound) if shares <= ways else (bound + 1, high)
  return low


def weight_bytes_read(
  config: ModelConfig, rows: int, weight_bytes: float, *, drafter: bool = False
) -> float:
  """Weight bytes that a step of `rows` rows reads, each once.

  Args:
    config: the model.
    rows: rows of the step; each chooses its experts, none the same: an upper
      bound that reaches all experts at E / k rows.
    weight_bytes: bytes of a matrix element (2 for bf16, about 1 for fp8).
    drafter: of the MTP layer instead of the trunk.

  Returns:
    Bytes. Embeddings and the head stay bf16.
  """
  c, D = config.moe, config.hidden_size
  experts = min(rows * c.experts_per_token, c.num_experts)
  more = (experts - c.experts_per_token) * 3 * D * c.intermediate_size
  moes = 1 if drafter else len(layer_plan(config).moe_layers)
  inner = active_params(config, head=False, drafter=drafter) + moes * more
  return inner * weight_bytes + 2 * config.vocab_size * D


def cache_bytes_read(
  config: ModelConfig, context: int, rows: int = 1, *, dtype: str = 'auto'
) -> float:
  """Cache bytes that consecutive rows of one sequence read in the trunk.

  Index keys are read once for all rows, selected rows once a query.
  """
  plan = layer_plan(config)
  row, key = _record(config, dtype, physical=True)
  chosen = min(config.indexer.topk, context)
  return (
    len(plan.full_layers) * context * key
    + plan.num_layers * rows * chosen * row
  )
