"""The child of `process.py`: lowers, compiles and measures one step.

What is read: the compiler's memory analysis, and the text of the scheduled
module that the compiler dumps. Where the step does not fit, the compiler
says how much it wanted and has dumped the module all the same.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import pickle
import re
import time
from typing import Any

import jax

from pallas_kernels.dispatch import choices
from sharding.chips import chip_named
from sharding.compiler_options import compiler_options
from sharding.planner import hlo, steps
from sharding.planner.cost import Loops, module_cost
from sharding.planner.request import PlanRequest
from sharding.planner.transfers import transfers

_UNITS = {'': 1, 'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30, 'T': 1 << 40}
_OUT_OF_MEMORY = re.compile(
  r'total memory required \D*\(([\d.]+)([KMGT]?)\) exceeds available \w+ '
  r'\(([\d.]+)([KMGT]?)\)'
)


def main(folder: str) -> None:
  """Reads `folder/request`, writes `folder/result`; progress on stdout."""
  path = pathlib.Path(folder)
  request = pickle.loads((path / 'request').read_bytes())
  try:
    result = measure(request, path / 'dump')
  except (ValueError, NotImplementedError, ImportError) as error:
    result = {'error': ' '.join(str(error).split())}
  (path / 'result').write_text(json.dumps(result))


def measure(request: PlanRequest, dump: pathlib.Path) -> dict[str, Any]:
  """Compiles a step and reads the result.

  Args:
    request: the step.
    dump: folder for the compiler's own files.

  Returns:
    Bytes and times of one device, see the keys below.

  Raises:
    ValueError: the compiler refuses the step for a reason that is not HBM.
  """
  start = time.monotonic()
  say = lambda text: print(
    f'{request.topology} {request.step}: {text} '
    f'({time.monotonic() - start:.0f} s)',
    flush=True,
  )
  say('tracing')
  step = steps.lower(request)
  say('compiling')
  options = compiler_options(request.topology) | {
    'xla_dump_to': str(dump),
    'xla_dump_hlo_as_text': True,
  }
  out: dict[str, Any] = {}
  try:
    compiled = step.lowered.compile(compiler_options=options)
    memory, wanted, limit = compiled.memory_analysis(), None, None
  except jax.errors.JaxRuntimeError as error:
    memory, (wanted, limit) = None, _out_of_memory(error)
  out['seconds_to_compile'] = time.monotonic() - start
  say('reading the module')
  out |= device_memory(step, memory, wanted, limit)
  out |= module_figures(hlo.parse(module_text(dump)), request, step.loops)
  fetches = any(t['is_fetch'] for t in out['transfers'])
  out['slot_bytes'] = step.slots if fetches else 0
  out['operations'] = [dataclasses.asdict(c) for c in choices()]
  say('done')
  return out


def _out_of_memory(error: Exception) -> tuple[int, int]:
  """Bytes wanted and there, of a compile that ran out of memory."""
  found = _OUT_OF_MEMORY.search(str(error))
  if found is None:
    reason = ' '.join(str(error).split())
    raise ValueError(f'the compiler refuses the step: {reason[:400]}')
  size = lambda number, unit: int(float(number) * _UNITS[unit])
  return size(found[1], found[2]), size(found[3], found[4])


def device_memory(step, memory, wanted, limit) -> dict[str, Any]:
  """Bytes of one device by what they hold."""
  out: dict[str, Any] = dict(step.bytes)
  if memory is None:
    total = wanted + step.unread
    out |= {'total': total, 'fits_compiler': False}
    out['temporaries'] = total - sum(step.bytes.values())
    out['compiler_limit'] = limit
    return {'device_bytes': out}
  held = sum(step.bytes.values())
  out |= {
    # What arguments take beyond their elements: tiles that are not full.
    'padding': memory.argument_size_in_bytes + step.unread - held,
    'outputs': memory.output_size_in_bytes - memory.alias_size_in_bytes,
    'temporaries': memory.temp_size_in_bytes,
    'program': memory.generated_code_size_in_bytes,
    'aliased': memory.alias_size_in_bytes,
    'fits_compiler': True,
  }
  out['total'] = (
    memory.argument_size_in_bytes
    + step.unread
    + out['outputs']
    + out['temporaries']
    + out['program']
  )
  return {'device_bytes': out}


def module_text(dump: pathlib.Path) -> str:
  """The scheduled module among the compiler's files.

  The step's own module is the largest; small ones are made while tracing.

  Raises:
    ValueError: the compiler wrote none.
  """
  for last in ('after_codegen', 'after_optimizations'):
    files = sorted(
      dump.glob(f'*.{last}.txt'), key=lambda file: file.stat().st_size
    )
    if files:
      return files[-1].read_text()
  raise ValueError('the compiler wrote no module: nothing can be measured')


def module_figures(
  module: hlo.Module, request: PlanRequest, counts: dict[str, float]
) -> dict[str, Any]:
  """FLOPs, bytes, times and transfers of one device."""
  chip, loops = chip_named(request.topology), Loops(counts)
  cost = module_cost(module, loops)
  moves = transfers(module, chip, Loops(counts))
  compute = dataclasses.replace(cost, bytes=0.0).seconds(chip)
  return {
    'flops': cost.flops,
    'declared_flops': cost.declared,
    'bytes': cost.bytes,
    'compute_seconds': compute,
    'memory_seconds': cost.bytes / chip.bandwidth,
    'transfers': [
      dataclasses.asdict(t) | {'hidden': t.hidden, 'is_fetch': t.is_fetch}
      for t in moves
    ],
    'collectives': collective_totals(moves),
    'loops_assumed': loops.assumed,
    'loops_unknown': sorted(loops.unknown),
  }


def collective_totals(moves) -> list[dict[str, Any]]:
  """Collectives of a step by kind: how many and how much."""
  totals: dict[tuple, list[float]] = collections.defaultdict(lambda: [0, 0, 0])
  for move in moves:
    total = totals[move.kind, move.asynchronous]
    exposed = move.seconds - move.hidden_seconds
    for i, value in enumerate((1, move.bytes, exposed)):
      total[i] += move.times * value
  return [
    {
      'kind': kind,
      'asynchronous': asynchronous,
      'count': count,
      'bytes': moved,
      'exposed_seconds': exposed,
    }
    for (kind, asynchronous), (count, moved, exposed) in sorted(totals.items())
  ]
