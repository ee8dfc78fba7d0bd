"""The suite of the ops at their real shapes: compiled for a TPU, or run here.

Compiled: microseconds are the larger of the compiler's estimated cycles and
the bytes that must move over the bandwidth. Run: wall and busy time on the
device at hand (timing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from glm_jax.benchmarks.comparisons import compare
from glm_jax.benchmarks.report import GPUS, Device, Report, Request, Row
from glm_jax.benchmarks.timing import time_case
from glm_jax.benchmarks.work import (
  CORES,
  op_work,
  representative,
  shape_text,
)
from glm_jax.benchmarks.workers import measure_all
from pallas_kernels.arg_specs import (
  CASES,
  DTYPES,
  OPS,
  ArgSpec,
  arg_spec,
  arg_specs,
)

AUTO = 'auto'  # the op's own choice
_KERNELS = ('gpu', 'hopper')
COLUMNS = {
  'compiled': (
    'cycles',
    'fewer_cycles',
    'temporaries_mb',
    'copies',
    'sparsecore',
    'problem',
  ),
  'run': ('busy_us', 'launches', 'problem'),
}
NOTES = {
  'compiled': (
    'compiled, not run: cycles are estimates of libtpu, which bills reads '
    'and writes of HBM as independent, follows no data-dependent branch or '
    'trip count (the profiling build makes them static) and is about 20% '
    'optimistic about the bandwidth of v6e',
    'us is max(cycles / clock, bytes / bandwidth); clocks are inferred from '
    'public peaks, the least certain one is of tpu7x',
    'long loops are simulated on fewer sequences, rows or experts and '
    'multiplied; HLO loops count one trip',
    'a gather on the SparseCores has no estimate: its bytes / bandwidth stand '
    'in column sparsecore as a floor and are in no share',
    'fewer_cycles: select against lax.top_k (a lower bound: a shorter sort, '
    'multiplied by its share of the keys); group: one scoring and selection '
    'for four attentions against one for each, floors of gathers included',
  ),
  'run': (
    'median of a call with several queued before a wait, after a warm-up, on '
    'the device at hand; busy_us: the sum of its kernels',
  ),
}
# Largest microseconds over floor (issue 5), by op and case.
GOALS = {
  ('indexer_scores', 'decode_8x1m'): 1.4,
  ('topk_gather_attention', 'decode_8x1m'): 1.5,
  ('topk_gather_attention', 'decode_64x128k'): 1.5,
}


# Largest busy microseconds (issue 8; FlashMLA needs 72, 175 and 2,420).
BUSY_GOALS = {
  ('NVIDIA H200', 'topk_gather_attention', 'decode_64x32k', 'bf16'): 72,
  ('NVIDIA H200', 'topk_gather_attention', 'decode_256x8k', 'bf16'): 237,
  ('NVIDIA H200', 'topk_gather_attention', 'prefill_4k_128k', 'bf16'): 3600,
}


def run(request: Request, log: Callable[[str], None]) -> Report:
  """Measures the cases that the request selects.

  Raises:
    ValueError: the request selects nothing.
  """
  known = arg_specs()
  if {device.name for device in request.devices} & set(GPUS):
    attention = (arg_spec(*goal[1:]) for goal in BUSY_GOALS)
    known += tuple(spec for spec in attention if spec not in known)
  cases = [
    spec
    for spec in known
    if not request.select or any(part in spec.name for part in request.select)
  ]
  if not cases:
    names = [*OPS, *CASES, *DTYPES]
    raise ValueError(
      f'no case is named {", ".join(request.select)}: names are '
      f'OP/CASE/DTYPE of {", ".join(names)}'
    )
  measure = _compiled if request.evidence == 'compiled' else _timed
  rows = []
  for device in request.devices:
    for system in request.systems:
      found = measure(request, device, system, cases, log)
      if measure is _compiled and system == 'tpu':
        found += compare(request, device, found, log)
      rows += found
  missed = [text for row in rows for text in _missed(row)]
  return Report(tuple(rows), NOTES[request.evidence], tuple(missed))


def _compiled(
  request: Request,
  device: Device,
  system: str,
  specs: Sequence[ArgSpec],
  log: Callable[[str], None],
) -> list[Row]:
  def measured(profile):
    cases = [
      dict(
        op=spec.op,
        case=spec.case,
        dtype=spec.dtype,
        generation=device.name,
        implementation=system,
        options=device.options,
        profile=profile,
      )
      for spec in specs
    ]
    for spec, answer in zip(specs, measure_all(cases)):
      what = 'cycles' if profile else 'memory'
      log(f'{device.name} {spec.name} {system}: {what}')
      yield answer

  # XLA's sorts take the simulation minutes each, and its loops are not
  # followed: cycles are of kernels alone.
  simulate = system == 'tpu'
  cycles = list(measured(True)) if simulate else [{} for _ in specs]
  return [
    _compiled_row(request, device, system, spec, memory, estimate)
    for spec, memory, estimate in zip(specs, measured(False), cycles)
  ]


def _compiled_row(
  request: Request,
  device: Device,
  system: str,
  spec: ArgSpec,
  memory: dict[str, Any],
  estimate: dict[str, Any],
) -> Row:
  work = op_work(spec)
  by_op = dict(estimate.get('cycles', {}))
  gathers = [op for op in by_op if 'gather_fusion' in op]
  if memory.get('sparsecore') and work.gathered and gathers:
    # On the TensorCore only because the simulated case is a small one.
    del by_op[max(gathers, key=by_op.get)]
  _, times = representative(spec, CORES[device.name])
  total = sum(by_op.values()) * times
  whole = by_op and 'error' not in estimate
  seconds = None
  if whole and 'error' not in memory:
    seconds = max(total / device.clock, work.bytes / device.bandwidth)
  details = dict(
    cycles=int(total) if whole else None,
    cycles_by_op=by_op,
    simulated_share=1 / times if by_op else None,
    flops=work.flops,
    bytes=work.bytes,
    floor_us=1e6 * work.floor_seconds(device.bandwidth, device.flops),
    problem=memory.get('error') or estimate.get('error'),
  )
  if 'error' not in memory:
    details |= dict(
      temporaries_bytes=memory['temporaries'],
      temporaries_mb=round(memory['temporaries'] / 1e6, 2),
      arguments_bytes=memory['arguments'],
      copies=memory['copies'],
      kernels=memory['kernels'],
      compile_seconds=round(memory['seconds'], 1),
      sparsecore=None,
    )
    moved = 2 * work.gathered if memory['sparsecore'] else 0
    if moved:
      floor = 1e6 * moved / device.bandwidth
      details['sparsecore'] = f'{floor:.0f} us (floor)'
      details['sparsecore_us'] = floor
  return _row(request, device, system, spec, seconds, details)


def _timed(
  request: Request,
  device: Device,
  system: str,
  specs: Sequence[ArgSpec],
  log: Callable[[str], None],
) -> list[Row]:
  rows = []
  for spec in specs:
    log(f'{device.name} {spec.name} {system}')
    seconds, details = None, {}
    try:
      implementation = None if system == AUTO else system
      seconds, details = time_case(spec, implementation)
    except (NotImplementedError, MemoryError, RuntimeError, ValueError) as why:
      details = dict(problem=(str(why).splitlines() or [repr(why)])[0][:200])
    rows.append(_row(request, device, system, spec, seconds, details))
  return rows


def _row(
  request: Request,
  device: Device,
  system: str,
  spec: ArgSpec,
  seconds: float | None,
  details: dict[str, Any],
) -> Row:
  work = op_work(spec)
  per = lambda amount, unit: amount / seconds / unit if seconds else None
  floor = work.floor_seconds(device.bandwidth, device.flops)
  return Row(
    suite='op',
    case=f'{spec.op}/{spec.case}',
    system=system,
    device=device.name,
    dtype=spec.dtype,
    shape=shape_text(spec),
    us=1e6 * seconds if seconds else None,
    tflops=per(work.flops, 1e12),
    gbps=per(work.bytes, 1e9),
    roofline_share=floor / seconds if seconds and floor else None,
    ratio=seconds / floor if seconds and floor else None,
    evidence=request.evidence,
    command=request.command,
    date=request.date,
    details=details,
  )


def _missed(row: Row) -> list[str]:
  """Sentences about a row that does not reach its goal."""
  goal = BUSY_GOALS.get((row.device, *row.case.split('/'), row.dtype))
  busy = row.details.get('busy_us')
  if goal is not None and busy is not None and row.system in (AUTO, *_KERNELS):
    where = f'{row.case} {row.dtype} by {row.system} on {row.device}'
    return [f'{where}: busy {busy:.0f} us, goal {goal}'] if busy > goal else []
  if row.system not in ('tpu', 'shared'):
    return []
  where = f'{row.case} {row.dtype} on {row.device}'
  found = []
  op, _, case = row.case.partition('/')
  goal = GOALS.get((op, case))
  if goal is not None and row.ratio is not None and row.ratio > goal:
    found.append(f'{where}: {row.ratio:.2f}x its floor, goal {goal}x')
  gain, goal = row.details.get('fewer_cycles'), row.details.get('goal')
  if gain is not None and gain < goal:
    found.append(f'{where}: {gain:.2f}x fewer cycles, goal {goal}x')
  if row.evidence == 'compiled' and row.details.get('copies'):
    found.append(f'{where}: copies {", ".join(row.details["copies"])}')
  return found
