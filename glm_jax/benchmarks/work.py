"""The least work an op can do at a shape: FLOPs, and bytes that must move.

Floors assume that every array is read or written once and that nothing is
cached between calls. Rows stand at the end of their context, so every key is
visible; rows of one sequence share its keys; as many experts are chosen as
the rows can choose.
"""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels import arg_specs
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.grouped_matmul.tpu import ROWS, num_visits


@dataclasses.dataclass(frozen=True)
class Work:
  """Work of one call.

  Attributes:
    flops: multiplications and additions of the matrix products.
    bytes: read and written, at least.
    gathered: bytes of rows that are gathered one by one: of the attention's
      keys, or lines with the scales of two pages for each page of fp8 keys.
  """

  flops: float
  bytes: float
  gathered: float = 0

  def floor_seconds(self, bandwidth: float, flops: float) -> float:
    """Seconds that no implementation can beat on such a device."""
    return max(self.bytes / bandwidth, self.flops / flops)


def size(array) -> int:
  """Bytes of an array or its shape; 0 for None."""
  if array is None:
    return 0
  return math.prod(array.shape) * array.dtype.itemsize


def op_work(spec: ArgSpec) -> Work:
  """Least work of a case."""
  if spec.op in ('indexer_scores', 'streaming_topk'):
    return _index_work(spec)
  if spec.op == 'topk_gather_attention':
    return _attention_work(spec)
  return _expert_work(spec)


def _index_work(spec: ArgSpec) -> Work:
  q, w, pages, scales, table, *_ = spec.args
  T, I, H = q.shape  # noqa: E741
  moved = size(q) + size(w) + size(pages) + size(scales) + size(table)
  if spec.op == 'indexer_scores':
    moved += 4 * T * spec.context
  else:
    moved += 8 * T * spec.options['k']
  return Work(2.0 * T * spec.context * I * H, moved, 2 * size(scales))


def _attention_work(spec: ArgSpec) -> Work:
  q, rows, row_scales, slots = spec.args
  T, N, width = q.shape
  k, latent = slots.shape[1], spec.options['latent_width']
  row = rows.shape[1] * rows.dtype.itemsize
  row += 0 if row_scales is None else 4 * row_scales.shape[1]
  gathered = T * k * row
  moved = gathered + size(q) + size(slots) + 2 * T * N * latent + 4 * T * N
  return Work(2.0 * T * N * k * (width + latent), moved, gathered)


def _expert_work(spec: ArgSpec) -> Work:
  x, weights, scales, *_ = spec.args
  layers, E, F, D = weights.shape
  used = min(E, x.shape[0])
  experts = (size(weights) + size(scales)) / (layers * E) * used
  moved = experts + size(x) + x.shape[0] * F * x.dtype.itemsize
  return Work(2.0 * x.shape[0] * F * D, moved)


# Cores that share one device's memory and the steps of a parallel grid.
CORES = {'v5e': 1, 'v5p': 2, 'v6e': 1, 'tpu7x': 1}


def representative(spec: ArgSpec, cores: int) -> tuple[ArgSpec, float]:
  """A smaller case for the compiler's simulation, and its multiple.

  The simulation takes minutes where loops are long. Cost is linear in
  sequences, in rows and in visits of experts once a block is full, so fewer
  of them are simulated and the cycles multiplied.

  Args:
    spec: a case.
    cores: cores of a device; each is given a sequence.

  Returns:
    The case to simulate, and how often it is contained in `spec`.
  """
  cut = lambda a, n: None if a is None else _with_lead(a, n)
  rows = spec.rows
  if spec.op in ('indexer_scores', 'streaming_topk'):
    few = min(cores, spec.sequences)
    T = few * min(rows // spec.sequences, 64)
    q, w, pages, scales, table, seq, pos = spec.args
    pool = few * (pages.shape[0] // spec.sequences)
    args = (
      cut(q, T),
      cut(w, T),
      cut(pages, pool),
      cut(scales, pool),
      cut(table, few),
      cut(seq, T),
      cut(pos, T),
    )
    return dataclasses.replace(spec, args=args, sequences=few), rows / T
  if spec.op == 'topk_gather_attention':
    T = min(rows, 8)
    q, pool, scales, slots = spec.args
    args = (cut(q, T), pool, scales, cut(slots, T))
    return dataclasses.replace(spec, args=args), rows / T
  return _few_experts(spec)


def _few_experts(spec: ArgSpec) -> tuple[ArgSpec, float]:
  """Eight experts on one tile of rows; a visit costs the same everywhere."""
  x, weights, scales, layer, sizes = spec.args
  rows, few = min(x.shape[0], ROWS), 8
  narrow = lambda a: (
    None if a is None else type(a)((a.shape[0], few, *a.shape[2:]), a.dtype)
  )
  args = (
    _with_lead(x, rows),
    narrow(weights),
    narrow(scales),
    layer,
    _with_lead(sizes, few),
  )
  visits = num_visits(weights.shape[1], x.shape[0], rows)
  times = visits / num_visits(few, rows, rows)
  return dataclasses.replace(spec, args=args), times


def _with_lead(array, lead: int):
  return type(array)((lead, *array.shape[1:]), array.dtype)


def shape_text(spec: ArgSpec) -> str:
  """The case in words, as '8 rows of 8 x 1048576 tokens'."""
  if spec.op.startswith('grouped_matmul'):
    layers, E, F, D = spec.args[1].shape
    return f'{spec.rows} rows, {E} experts {F}x{D}'
  text = f'{spec.rows} rows of {spec.sequences} x {spec.context} tokens'
  if spec.op != 'indexer_scores':
    text += f', k={arg_specs.TOPK}'
  return text
