"""FLOPs and bytes of the systems of suite `context`, and what they allow.

Two FLOPs a multiply-add, matrix products only (spec/model.md section 6.3).
Weights and cached rows are read once a step. The bound of a ratio is what
arithmetic alone gives: FLOPs in prefill, bytes in decode. Selecting among
scores is in neither, so that a ratio may pass its bound where selection, which
only full layers pay, takes long.
"""

from __future__ import annotations

import dataclasses

from glm_jax.config import FULL, ModelConfig
from glm_jax.layer_plan import layer_plan
from pallas_kernels.tiling import round_up

DENSE = 'dense'
# Rows from which dense attention expands keys and values a head.
EXPANDED_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Work:
  """Of a step or of many.

  Attributes:
    flops: of matrix products.
    bytes: read or written, at least.
  """

  flops: float = 0
  bytes: float = 0

  def __add__(self, other: Work) -> Work:
    return Work(self.flops + other.flops, self.bytes + other.bytes)


def kinds(config: ModelConfig, system: str) -> tuple[str, ...]:
  """The kind of each trunk layer in a system."""
  n = config.num_layers
  every = {'per_layer': (FULL,) * n, DENSE: (DENSE,) * n}
  return every.get(system, config.indexer_types)


def pairs(first: int, rows: int, most: int | None = None) -> int:
  """Query-key pairs of rows from position `first` on, at most `most` a row."""
  few = rows if most is None else min(max(most - first, 0), rows)
  visible = few * first + few * (few + 1) // 2
  return visible + (rows - few) * (most or 0)


def attention_work(
  config: ModelConfig, kind: str, first: int, rows: int
) -> Work:
  """The attention side of one layer for consecutive rows of one sequence.

  Args:
    config: the model.
    kind: 'full', 'shared' or 'dense'.
    first: position of the first row.
    rows: how many.

  Returns:
    Projections, index scores of a full layer, and the attention core.
  """
  c, i, D = config.mla, config.indexer, config.hidden_size
  size = _size(config)
  N, R, keys = c.num_heads, c.kv_lora_rank, first + rows
  qk, up = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
  expand = R * N * (c.qk_nope_head_dim + up)
  matrices = D * c.q_lora_rank + c.q_lora_rank * N * qk + D * c.row_dim
  matrices += N * up * D
  row = size * round_up(c.row_dim, 128)
  absorbed = 2 * N * (c.row_dim + R)
  flops, reads = 0.0, 0.0
  if kind == DENSE:
    reads = keys * row
    if rows < EXPANDED_ROWS:
      flops = absorbed * pairs(first, rows) + 2 * rows * expand
    else:
      flops = 2 * N * (qk + up) * pairs(first, rows) + 2 * keys * expand
  else:
    chosen = pairs(first, rows, i.topk)
    flops = absorbed * chosen + 2 * rows * expand
    reads = min(chosen, keys) * row
  if kind == FULL:
    matrices += c.q_lora_rank * i.num_heads * i.head_dim
    matrices += D * (i.head_dim + i.num_heads)
    flops += 2 * i.num_heads * i.head_dim * pairs(first, rows)
    reads += size * keys * i.head_dim
  moved = size * (matrices + expand + 2 * rows * D) + reads + rows * row
  return Work(flops + 2 * rows * matrices, moved)


def mlp_work(config: ModelConfig, rows: int) -> Work:
  """Router, routed and shared experts of one layer."""
  c, D = config.moe, config.hidden_size
  expert = 3 * D * c.intermediate_size
  used = c.experts_per_token + c.num_shared_experts
  read = min(c.num_experts, rows * c.experts_per_token) + c.num_shared_experts
  router = D * c.num_experts
  moved = _size(config) * (expert * read + router + 2 * rows * D)
  return Work(2.0 * rows * (expert * used + router), moved)


def step_work(
  config: ModelConfig,
  system: str,
  first: int,
  rows: int,
  *,
  drafter: bool = False,
  head: bool = False,
  attention_only: bool = False,
) -> Work:
  """One step of consecutive rows of one sequence.

  Args:
    config: the slice.
    system: 'shared', 'per_layer' or 'dense'.
    first: position of the first row.
    rows: how many.
    drafter: the rows go through the drafter as well.
    head: they have logits.
    attention_only: neither MLPs nor what stands around the layers.

  Returns:
    The work.
  """
  layers = list(kinds(config, system))
  if drafter:
    layers.append(DENSE if system == DENSE else FULL)
  total = Work()
  for kind in layers:
    total += attention_work(config, kind, first, rows)
    if not attention_only:
      total += mlp_work(config, rows)
  D, size = config.hidden_size, _size(config)
  if drafter and not attention_only:
    total += Work(2.0 * rows * 2 * D * D, size * 2 * D * D)
  if head and not attention_only:
    total += Work(
      2.0 * rows * D * config.vocab_size,
      size * D * config.vocab_size + 4 * rows * config.vocab_size,
    )
  return total


def prefill_work(
  config: ModelConfig, system: str, context: int, chunk: int, **options
) -> Work:
  """All chunks of a context, the drafter's rows included."""
  drafter = layer_plan(config).has_mtp
  total = Work()
  for first in range(0, context, chunk):
    total += step_work(config, system, first, chunk, drafter=drafter, **options)
  return total


def decode_work(
  config: ModelConfig, system: str, context: int, **options
) -> Work:
  """One token that sees `context` keys, its own included."""
  return step_work(config, system, context - 1, 1, head=True, **options)


def bounds(
  config: ModelConfig, phase: str, system: str, context: int, chunk: int
) -> dict[str, float]:
  """What a system's time over that of `shared` could be.

  Args:
    config: the slice.
    phase: 'prefill' (a ratio of FLOPs) or 'decode' (of bytes).
    system: 'per_layer' or 'dense'.
    context: tokens.
    chunk: rows of a prefill step.

  Returns:
    'attention': of the attention side alone; 'step': of all that runs.
  """

  def amount(name, attention_only):
    options = dict(attention_only=attention_only)
    if phase == 'prefill':
      return prefill_work(config, name, context, chunk, **options).flops
    return decode_work(config, name, context, **options).bytes

  return {
    side: amount(system, only) / amount('shared', only)
    for side, only in (('attention', True), ('step', False))
  }


def sampled_chunks(context: int, chunk: int, samples: int) -> list[int]:
  """First positions of the chunks that stand for a context's.

  All of them where there are no more than `samples`, else the middle one of
  each of `samples` equal parts (time grows about linearly with position).
  """
  count = context // chunk
  if count <= samples:
    return [i * chunk for i in range(count)]
  return [int((i + 0.5) * count / samples) * chunk for i in range(samples)]


def integrate(seconds: list[float], context: int, chunk: int) -> float:
  """Seconds of all chunks of a context, from those of `sampled_chunks`."""
  return sum(seconds) / len(seconds) * (context // chunk)


def _size(config: ModelConfig) -> int:
  return 4 if config.dtype == 'float32' else 2
