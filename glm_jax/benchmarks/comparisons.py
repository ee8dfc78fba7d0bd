"""What the ops gain, from compiled evidence: two comparisons of issue size.

Selection against `lax.top_k`: the same rows, the cycles of the selecting
kernel alone. A sort of a million keys takes the compiler's simulation most of
an hour, so a shorter one is simulated and multiplied by how often it is
contained: sorting grows faster than its length, so that is a lower bound.

An IndexShare group against layers that each have an indexer: one scoring and
selection and four attentions against four of each, the layers of one group
at one decoded token of a million. Gathers on the SparseCores have no
estimate; their bytes over the bandwidth stand in for them on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from glm_jax.benchmarks.report import Device, Request, Row
from glm_jax.benchmarks.workers import measure_all
from pallas_kernels.arg_specs import TOPK, arg_spec

CASE = 'decode_8x1m'
LAYERS = 4  # of one group
TOP_K = 'lax.top_k'
TOP_K_KEYS = 16_384  # of a row of the sort that is simulated
SELECT_GOAL, GROUP_GOAL = 8.0, 3.3  # times fewer cycles (issue 5)


def top_k_baseline() -> tuple[Callable, tuple]:
  """XLA's own selection at a part of the keys, and its arguments."""
  rows = arg_spec('streaming_topk', CASE, 'bf16').rows
  scores = jax.ShapeDtypeStruct((rows, TOP_K_KEYS), jnp.float32)
  return lambda scores: lax.top_k(scores, TOPK), (scores,)


def compare(
  request: Request,
  device: Device,
  rows: Sequence[Row],
  log: Callable[[str], None],
) -> list[Row]:
  """Rows of both comparisons, as far as the rows given have what they need.

  Args:
    request: of the suite.
    device: that the rows are of.
    rows: of the kernels ('tpu').
    log: told what is under way.

  Returns:
    A row a side; the better side's has the ratio in its details, under
    'fewer_cycles', with its goal.
  """
  by_case = {(row.case, row.dtype): row for row in rows}
  found = []
  for dtype in ('bf16', 'fp8'):
    index = by_case.get((f'streaming_topk/{CASE}', dtype))
    attention = by_case.get((f'topk_gather_attention/{CASE}', dtype))
    if index is None or index.us is None:
      continue
    if dtype == 'bf16':
      log(f'{device.name} {TOP_K}: cycles')
      found += _selection(request, device, index)
    if attention is not None and attention.us is not None:
      found += _group(request, device, dtype, index, attention)
  return found


def _selection(request: Request, device: Device, index: Row) -> list[Row]:
  case = dict(op=TOP_K, generation=device.name, options=device.options)
  (answer,) = measure_all([dict(case, profile=True)])
  spec = arg_spec('streaming_topk', CASE, 'bf16')
  times = 1 / index.details['simulated_share']
  by_op = index.details['cycles_by_op']
  ours = times * sum(n for op, n in by_op.items() if 'select_topk' in op)
  parts = spec.context // TOP_K_KEYS
  theirs = parts * sum(answer.get('cycles', {}).values())
  shape = f'{spec.rows} rows of {spec.context} scores, k={TOPK}'
  make = lambda system, cycles, **details: _row(
    request, device, f'select/{CASE}', system, 'f32', shape, cycles, details
  )
  ratio = theirs / ours if theirs and 'error' not in answer else None
  return [
    make('tpu', ours, fewer_cycles=ratio, goal=SELECT_GOAL),
    make(
      TOP_K,
      theirs or None,
      problem=answer.get('error'),
      lower_bound=f'{parts} times the sort of {TOP_K_KEYS} keys',
    ),
  ]


def _group(
  request: Request, device: Device, dtype: str, index: Row, attention: Row
) -> list[Row]:
  gathers = lambda row: row.details.get('sparsecore_us') or 0
  cycles = lambda row: (row.us + gathers(row)) * 1e-6 * device.clock
  indexed, attended = cycles(index), cycles(attention)
  shared = indexed + LAYERS * attended
  per_layer = LAYERS * (indexed + attended)
  shape = f'{LAYERS} layers, {index.shape}'
  make = lambda system, cycles, **details: _row(
    request, device, f'group/{CASE}', system, dtype, shape, cycles, details
  )
  return [
    make('shared', shared, fewer_cycles=per_layer / shared, goal=GROUP_GOAL),
    make('per layer', per_layer),
  ]


def _row(request, device, case, system, dtype, shape, cycles, details) -> Row:
  return Row(
    suite='op',
    case=case,
    system=system,
    device=device.name,
    dtype=dtype,
    shape=shape,
    us=1e6 * cycles / device.clock if cycles else None,
    evidence=request.evidence,
    command=request.command,
    date=request.date,
    details=dict(details, cycles=int(cycles) if cycles else None),
  )
