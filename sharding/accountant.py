"""What the model costs, by arithmetic alone: parameters, FLOPs, time.

Nothing is compiled and no array is made; the planner's compiled figures are
tested against this page. Bytes are in `capacity.py`. Counting is that of
spec/model.md section 6.3, two FLOPs a multiply-add, matrix products only:

    F(L) = 2 A + 2 I H n L + layers * c * min(k, L)

A: parameters a token uses; n: indexers; L: visible keys, its own included; c:
of the attention core, 2 N (R + P + R) when queries read the cached latent
("absorbed", what runs) or 2 N (qk + v) when heads were expanded before.
"""

from __future__ import annotations

import dataclasses

from glm_jax.config import FULL, ModelConfig
from glm_jax.layer_plan import layer_plan
from sharding.chips import Chip

COUNTINGS = ('absorbed', 'expanded', 'no_core')


@dataclasses.dataclass(frozen=True)
class Flops:
  """FLOPs of rows, by what they are spent on.

  Attributes:
    linear: matrices of attention, MLPs, router, head.
    indexer: index scores, query times key.
    attention: the core over selected rows.
  """

  linear: float
  indexer: float
  attention: float

  @property
  def total(self) -> float:
    """All of them."""
    return self.linear + self.indexer + self.attention

  def __add__(self, other: Flops) -> Flops:
    return Flops(
      self.linear + other.linear,
      self.indexer + other.indexer,
      self.attention + other.attention,
    )

  def __mul__(self, times: float) -> Flops:
    return Flops(
      self.linear * times, self.indexer * times, self.attention * times
    )


def per_layer_indexers(config: ModelConfig) -> ModelConfig:
  """The same model without IndexShare: an indexer in every layer."""
  return dataclasses.replace(config, indexer_types=(FULL,) * config.num_layers)


def without_drafter(config: ModelConfig) -> ModelConfig:
  """The trunk alone."""
  mtp = dataclasses.replace(config.mtp, num_layers=0)
  return dataclasses.replace(config, mtp=mtp)


def attention_params(config: ModelConfig) -> int:
  """Matrix elements of one layer's attention (165.02 M)."""
  c, D = config.mla, config.hidden_size
  qk = c.qk_nope_head_dim + c.qk_rope_head_dim
  up = c.qk_nope_head_dim + c.v_head_dim
  into = D * c.q_lora_rank + c.q_lora_rank * c.num_heads * qk
  cached = D * c.row_dim + c.kv_lora_rank * c.num_heads * up
  return into + cached + c.num_heads * c.v_head_dim * D


def indexer_params(config: ModelConfig) -> int:
  """Matrix elements of one indexer (9.37 M)."""
  c, D = config.indexer, config.hidden_size
  queries = config.mla.q_lora_rank * c.num_heads * c.head_dim
  return queries + D * c.head_dim + D * c.num_heads


def mlp_params(config: ModelConfig, *, moe: bool, active: bool = True) -> int:
  """Matrix elements of a layer's MLP, router included.

  Args:
    config: the model.
    moe: a sparse layer; else a dense one.
    active: those that one token uses; else all experts.

  Returns:
    Elements.
  """
  c, D = config.moe, config.hidden_size
  if not moe:
    return 3 * D * config.intermediate_size
  used = c.experts_per_token if active else c.num_experts
  experts = used + c.num_shared_experts
  return 3 * D * c.intermediate_size * experts + D * c.num_experts


def active_params(
  config: ModelConfig, *, head: bool = True, drafter: bool = False
) -> int:
  """Matrix elements that one token's row multiplies.

  Args:
    config: the model.
    head: the output matrix as well (a prefill row needs none).
    drafter: of the MTP layer instead of the trunk.

  Returns:
    Elements: 40.30e9 for GLM-5.2's trunk, 40.83e9 for GLM-5.1's.
  """
  D = config.hidden_size
  out = config.vocab_size * D if head else 0
  if drafter:
    block = attention_params(config) + indexer_params(config)
    return out + 2 * D * D + block + mlp_params(config, moe=True)
  plan = layer_plan(config)
  moes = len(plan.moe_layers)
  return (
    out
    + plan.num_layers * attention_params(config)
    + len(plan.full_layers) * indexer_params(config)
    + moes * mlp_params(config, moe=True)
    + (plan.num_layers - moes) * mlp_params(config, moe=False)
  )


def core_flops(config: ModelConfig, counting: str = 'absorbed') -> int:
  """FLOPs of one query against one selected row (139,264 or 65,536).

  Raises:
    ValueError: an unknown counting.
  """
  c = config.mla
  widths = {
    'absorbed': c.row_dim + c.kv_lora_rank,
    'expanded': c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim,
    'no_core': 0,
  }
  if counting not in widths:
    raise ValueError(f'{counting=} is unknown: use one of {COUNTINGS}')
  return 2 * c.num_heads * widths[counting]


def rows_flops(
  config: ModelConfig,
  first: int,
  rows: int,
  *,
  counting: str = 'absorbed',
  head: bool = True,
  drafter: bool = False,
  indexed: int | None = None,
) -> Flops:
  """FLOPs of consecutive rows of one sequence.

  A row at position p sees p + 1 keys, so that 4 rows from position 0 make 10
  pairs, not 16.

  Args:
    config: the model.
    first: position of the first row.
    rows: how many.
    counting: of the attention core.
    head: rows have logits.
    drafter: the MTP layer instead of the trunk.
    indexed: rows that run the indexer; None for all. The drafter's later
      steps reuse a selection.

  Returns:
    The FLOPs.
  """
  plan, c = layer_plan(config), config.indexer
  indexed = rows if indexed is None else indexed
  layers = 1 if drafter else plan.num_layers
  indexers = 1 if drafter else len(plan.full_layers)
  params = active_params(config, head=head, drafter=drafter)
  skipped = (rows - indexed) * indexers * indexer_params(config)
  per_key = 2 * c.num_heads * c.head_dim
  return Flops(
    linear=2 * (rows * params - skipped),
    indexer=per_key * indexers * visible_pairs(first, indexed),
    attention=core_flops(config, counting)
    * layers
    * selected_pairs(first, rows, c.topk),
  )


def visible_pairs(first: int, rows: int) -> int:
  """Query-key pairs of rows at positions first, first + 1, ..."""
  return rows * first + rows * (rows + 1) // 2


def selected_pairs(first: int, rows: int, topk: int) -> int:
  """Query-row pairs of the attention core: at most `topk` a query."""
  short = min(max(topk - first, 0), rows)  # rows that see fewer than k keys
  return visible_pairs(first, short) + (rows - short) * topk


def token_flops(config: ModelConfig, context: int, **options) -> Flops:
  """FLOPs of the token that sees `context` keys, its own included."""
  return rows_flops(config, context - 1, 1, **options)


def sharing_ratio(
  config: ModelConfig, context: int, *, with_drafter: bool = False, **options
) -> float:
  """FLOPs of per-layer indexers over those of this model, one token.

  Args:
    config: the model.
    context: keys that the token sees.
    with_drafter: the token goes through the drafter as well, in both models.
    **options: of `rows_flops`.

  Returns:
    The ratio: 2.73 for GLM-5.2 at 1,048,576, 2.88 without the core.
  """
  every = token_flops(per_layer_indexers(config), context, **options).total
  own = token_flops(config, context, **options).total
  if with_drafter:
    more = token_flops(config, context, drafter=True, **options).total
    every, own = every + more, own + more
  return every / own


def round_flops(config: ModelConfig, context: int, drafts: int) -> Flops:
  """FLOPs of one round of drafting and verification of one sequence.

  `drafts` + 1 rows go through the trunk and, once verified, through the
  drafter; later draft steps reuse its selection.

  Args:
    config: the model, with a drafter.
    context: keys that the newest token sees.
    drafts: K.

  Returns:
    The FLOPs of the whole round.
  """
  verify = rows_flops(config, context - 1, drafts + 1)
  # Pending rows need no logits; each of the K steps has one row that does.
  pending = drafts + 1
  extend = rows_flops(
    config,
    max(context - pending, 0),
    pending,
    drafter=True,
    head=False,
  )
  steps = rows_flops(
    config, context - 1, drafts - 1, drafter=True, head=False, indexed=0
  )
  heads = 2 * drafts * config.vocab_size * config.hidden_size
  return verify + extend + steps + Flops(heads, 0, 0)


def prefill_flops(
  config: ModelConfig, context: int, *, drafter: bool = False
) -> Flops:
  """FLOPs of prefilling a whole context from nothing; no logits.

  GLM-5.2 at 1,048,576: 200e15, of which 95e15 index scores.
  """
  return rows_flops(config, 0, context, head=False, drafter=drafter)


def roofline_seconds(
  flops: float, moved: float, chip: Chip, chips: int, dtype: str = 'bf16'
) -> float:
  """Least time of work spread evenly over a slice.

  Args:
    flops: all of it.
    moved: HBM bytes, all chips together.
    chip: the generation.
    chips: of the slice.
    dtype: of the operands.

  Returns:
    Seconds: the slower of arithmetic and memory.
  """
  devices = chips * chip.devices_per_chip
  return max(
    flops / (devices * chip.peak(dtype)), moved / (devices * chip.bandwidth)
  )


def executed_attention_ratio(
  config: ModelConfig, context: int, ways: int, bound: int
) -> float:
  """Attention FLOPs a rank executes over an even share of the ideal.

  Args:
    config: the model.
    context: keys that a query sees.
    ways: context ranks, each attending to its own rows alone.
    bound: rows that a rank gathers for a query, wanted or not.

  Returns:
    1 for a perfect split.
  """
  ideal = min(config.indexer.topk, context) / ways
  return bound / ideal
