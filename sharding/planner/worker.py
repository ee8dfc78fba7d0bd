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

from glm_jax import hlo
from glm_jax.compiling import compiler_options
from pallas_kernels.dispatch import choices
from sharding.chips import chip_named
from sharding.planner import steps
from sharding.planner.cost import Loops, module_cost
from sharding.planner.request import PlanRequest
from sharding.planner.transfers import transfers

_UNITS = {'': 1, 'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30, 'T': 1 << 40}
_OUT_OF_MEMORY = re.compile(
  r'total memory required \D*\(([\d.]+)([KMGT]?)\) exceeds available'
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
  out: dict[str, Any] = {}
  memory, wanted, text = compile_text(step.lowered, request.topology, dump)
  out['seconds_to_compile'] = time.monotonic() - start
  say('reading the module')
  out |= device_memory(step, memory, wanted)
  out |= module_figures(hlo.parse(text), request, step.loops)
  fetches = any(t['is_fetch'] for t in out['transfers'])
  out['movement'] = step.movement
  out['slot_bytes'] = step.slots if fetches else 0
  out['operations'] = [dataclasses.asdict(c) for c in choices()]
  say('done')
  return out


def compile_text(
  lowered: jax.stages.Lowered, topology: str, dump: pathlib.Path
) -> tuple[Any, int | None, str]:
  """Compiles for a slice and returns the scheduled module as text.

  The text is the compiler's dump: `as_text` of jax 0.10.2 fails for programs
  with a SparseCore call, and there is none of a program that does not fit.

  Args:
    lowered: for devices of the slice.
    topology: the slice.
    dump: folder for the compiler's own files.

  Returns:
    The compiler's memory analysis, None if the program does not fit a
    device's memory; the bytes that it would need then; the text.

  Raises:
    ValueError: the compiler refuses the program for another reason.
  """
  options = compiler_options(topology) | {
    'xla_dump_to': str(dump),
    'xla_dump_hlo_as_text': True,
  }
  try:
    compiled = lowered.compile(compiler_options=options)
    memory, wanted = compiled.memory_analysis(), None
  except jax.errors.JaxRuntimeError as error:
    memory, wanted = None, _out_of_memory(error)
  return memory, wanted, hlo.dumped_text(dump)


def _out_of_memory(error: Exception) -> int:
  """Bytes wanted by a program that ran out of memory while compiling."""
  found = _OUT_OF_MEMORY.search(str(error))
  if found is None:
    reason = ' '.join(str(error).split())
    raise ValueError(f'the compiler refuses the step: {reason[:400]}')
  return int(float(found[1]) * _UNITS[found[2]])


def device_memory(step: steps.Step, memory, wanted) -> dict[str, Any]:
  """Bytes of one device by what they hold."""
  out: dict[str, Any] = dict(step.bytes)
  if memory is None:
    total = wanted + step.unread
    out |= {'total': total, 'fits_compiler': False}
    out['temporaries'] = total - sum(step.bytes.values())
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
    'kernels_without_cost': sorted(loops.silent),
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
