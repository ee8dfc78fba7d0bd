"""Suite `context`: a slice of GLM-5.2 at 8K to 1,048,576 tokens, on one device.

Three systems share the weights (`context_slice`): `shared` selects in two
layers of eight (IndexShare), `per_layer` in each, `dense` attends to every
row. `shared` prefills every token of the largest context in chunks; the others
run some chunks of each context, over the rows that `shared` has cached, and
the rest is integrated. Decoding runs the last tokens of a context again.

`--model=tiny` is a dry run on a CPU. `--op=128k,1m` takes some contexts;
`--system` takes some systems, `shared` always among them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from glm_jax.benchmarks import context_report
from glm_jax.benchmarks.context_bound import integrate, sampled_chunks
from glm_jax.benchmarks.context_plot import plot
from glm_jax.benchmarks.context_report import Case, Found
from glm_jax.benchmarks.context_slice import (
  SYSTEMS,
  Setting,
  context_name,
  setting_named,
)
from glm_jax.benchmarks.report import Report, Request

__all__ = ['COLUMNS', 'plot', 'run']

COLUMNS = {
  'run': (
    'tokens_s',
    'gigabytes',
    'peak_gb',
    'over_per_layer',
    'over_dense',
    'bound_per_layer',
    'bound_dense',
    'how',
    'problem',
  )
}
_REPEATS = 2  # of a chunk, where that is quick
_QUICK_SECONDS = 1.0
# What a program's refusal looks like: of a kernel, of memory, of the compiler.
_PROBLEMS = (NotImplementedError, MemoryError, RuntimeError, ValueError)


def run(request: Request, log: Callable[[str], None]) -> Report:
  """Measures until all is done, or the request's time is up.

  Raises:
    ValueError: evidence other than 'run', or an unknown slice, context or
      system.
  """
  if request.evidence != 'run':
    raise ValueError(
      'the context suite runs a model on this device: use --evidence=run'
    )
  setting = _selected(request)
  systems = _systems(request)
  from glm_jax.benchmarks.context_steps import Bench

  left = float('inf') if request.max_seconds is None else request.max_seconds
  end = time.monotonic() + left
  bench = Bench(setting, log)
  found: dict[Case, Found] = {}
  late = []
  for part in parts(list(cases(setting, systems))):
    if time.monotonic() <= end or not found:
      bench.prepare(programs(setting, part))
    for case in part:
      if time.monotonic() > end and found:
        late.append(case.name)
        continue
      log(f'{case.system} {case.name}')
      found[case] = _measured(bench, case)
      if request.save is not None:
        request.save(context_report.report(request, setting, found))
  return context_report.report(request, setting, found, late)


def cases(setting: Setting, systems: tuple[str, ...]) -> Iterator[Case]:
  """What is measured, the most wanted first.

  The whole prefill and decoding of `shared`; then everything at the largest
  context, other contexts from long to short, and what nothing depends on.
  """
  *others, last = setting.contexts
  for context in setting.contexts:
    yield Case('prefill', 'shared', context)
    yield Case('decode', 'shared', context)
  rest = [s for s in systems if s != 'shared']
  yield Case('attention', 'shared', last)
  for system in rest:
    for phase in ('prefill', 'decode', 'attention'):
      yield Case(phase, system, last)
  yield Case('drafting', 'shared', last)
  for context in reversed(others):
    for system in rest:
      yield Case('prefill', system, context)
      yield Case('decode', system, context)
  yield Case('check', 'shared', setting.contexts[0])
  for context in reversed(others):
    for system in ('shared', *rest):
      yield Case('attention', system, context)
    yield Case('drafting', 'shared', context)


def parts(chosen: list[Case]) -> tuple[list[Case], list[Case]]:
  """What goals are set for, and the rest; programs are compiled by part."""
  first = next(i for i, case in enumerate(chosen) if case.phase == 'check')
  return chosen[:first], chosen[first:]


def programs(setting: Setting, chosen: Sequence[Case]) -> list[Any]:
  """Names of the programs that cases need, each once."""
  from glm_jax.benchmarks.context_steps import Name

  names = []
  for phase, system, context in chosen:
    if phase == 'prefill':
      widths = [c for c in setting.contexts if c <= context]
      names += [Name(system, phase, width) for width in widths]
    elif phase == 'check':
      for step in ('prefill', 'decode'):
        names.append(Name(system, step, context, 'xla'))
    else:
      names.append(Name(system, phase, context))
  return list(dict.fromkeys(names))


def _measured(bench, case: Case) -> Found:
  """One case; a problem of another system than `shared` ends that case."""
  from glm_jax.benchmarks.context_steps import peak_bytes

  try:
    return dict(_MEASURE[case.phase](bench, case), peak_bytes=peak_bytes())
  except _PROBLEMS as why:
    if case.system == 'shared' and case.phase in ('prefill', 'decode'):
      raise
    lines = str(why).splitlines() or [repr(why)]
    return dict(seconds=None, problem=lines[0][:200])


def _prefill(bench, case: Case) -> Found:
  s, context = bench.setting, case.context
  sampled = sampled_chunks(context, s.chunk, s.samples)
  if case.system == 'shared':
    name = bench.prefill(context)
    walls = [bench.walls[i] for i in range(0, context, s.chunk)]
    few = [bench.walls[i] for i in sampled]
    return dict(
      seconds=sum(walls),
      integrated_seconds=integrate(few, context, s.chunk),
      how=f'all {len(walls)} chunks',
      chunk_seconds=[*zip(range(0, context, s.chunk), walls)],
      program_bytes=bench.program_bytes(name),
    )
  walls = []
  for first in sampled:
    name, seconds = bench.chunk(case.system, first)
    if seconds < _QUICK_SECONDS:
      more = [bench.chunk(case.system, first)[1] for _ in range(_REPEATS - 1)]
      seconds = min(seconds, *more)
    walls.append(seconds)
  how = f'integrated from {len(walls)} chunks'
  if len(walls) == context // s.chunk:
    how = f'all {len(walls)} chunks'
  if case.system == 'dense':
    how += f', {bench.form}'
  return dict(
    seconds=integrate(walls, context, s.chunk),
    how=how,
    chunk_seconds=[*zip(sampled, walls)],
    program_bytes=bench.program_bytes(name),
  )


def _decode(bench, case: Case) -> Found:
  profile = case.context == bench.setting.contexts[-1]
  found = bench.decode(case.system, case.context, profile)
  bench.restore(case.context)
  return found


def _attention(bench, case: Case) -> Found:
  profile = case.context == bench.setting.contexts[-1]
  found = bench.attention(case.system, case.context, profile)
  bench.restore(case.context)
  return found


def _drafting(bench, case: Case) -> Found:
  found = bench.drafting(case.system, case.context)
  bench.restore(case.context)
  return found


def _check(bench, case: Case) -> Found:
  return dict(seconds=None, **bench.check(case.context))


_MEASURE: dict[str, Callable[[Any, Case], Found]] = {
  'prefill': _prefill,
  'decode': _decode,
  'attention': _attention,
  'drafting': _drafting,
  'check': _check,
}


def _selected(request: Request) -> Setting:
  """The setting, with the contexts asked for."""
  setting = setting_named(request.model)
  if not request.select:
    return setting
  names = {context_name(c): c for c in setting.contexts}
  unknown = [name for name in request.select if name not in names]
  if unknown:
    raise ValueError(
      f'--op={unknown[0]} is not a context of the suite: use some of '
      f'{", ".join(names)}'
    )
  chosen = tuple(sorted(names[name] for name in set(request.select)))
  return dataclasses.replace(setting, contexts=chosen)


def _systems(request: Request) -> tuple[str, ...]:
  """Systems to measure, `shared` first."""
  if request.systems == ('auto',):
    return SYSTEMS
  unknown = [name for name in request.systems if name not in SYSTEMS]
  if unknown:
    raise ValueError(
      f'--system={unknown[0]} is unknown: use some of {", ".join(SYSTEMS)}'
    )
  return tuple(s for s in SYSTEMS if s == 'shared' or s in request.systems)
