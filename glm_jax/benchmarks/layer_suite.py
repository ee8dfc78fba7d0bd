"""Suite `layer`: one attention layer against transformers' on the same card.

A layer is GLM-5.2's decoder layer without its MLP, real sizes, bf16. Each
framework runs in a process of its own, PyTorch first, so that each has the
card's memory; the same run compares their outputs (`layer_jax.compare`).
Wall time is held against wall time: the median of several steps queued before
a wait. `--op=tiny` is the same at sizes for a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from glm_jax.benchmarks.layer_cases import (
  CASES,
  JAX,
  KINDS,
  PARITY,
  SYSTEMS,
  TINY,
  TORCH,
  LayerCase,
  forms,
  layers_of,
  work,
)
from glm_jax.benchmarks.measuring import ask
from glm_jax.benchmarks.report import GPUS, Device, Report, Request, Row

OWN_PROCESSES = True  # whoever asks for this suite leaves the device alone
MEAN = 'mean'
COLUMNS = {
  'run': (
    'busy_us',
    'launches',
    'peak_gib',
    'speedup',
    'parity',
    'agreement',
    'problem',
  )
}
_MODULES = {  # what is started, and what helps where it does not start
  'torch': (
    'glm_jax.benchmarks.layer_torch',
    " (pip install 'glm-jax[validate]')",
  ),
  JAX: ('glm_jax.benchmarks.layer_jax', ''),
}
NOTES = (
  'us is wall time, the median of steps queued before a wait; busy_us the sum '
  "of the device's kernels; speedup is PyTorch's wall time over jax's",
  'a layer is a decoder layer without its MLP; masks, rotary tables and the '
  'addresses of rows are made once for all layers and are not in the time',
  'torch_eager and torch_sdpa: DynamicCache held at one length, so that cuDNN '
  'plans once, in the warm-up; torch_static: sdpa, StaticCache',
  'mean is of all layers of the model, 21 full and 57 shared',
  "a model's step is one program of jax, so that a decode layer is a quarter "
  'of a program of four layers of its kind; PyTorch launches every layer',
  "peak_gib, of one layer and its cache: of torch the allocator's largest "
  'during the steps, of jax what the program needs, a layer of it',
)


@dataclasses.dataclass(frozen=True)
class Goal:
  """How many times faster than PyTorch a row has to be (issue 8).

  Attributes:
    case: of the suite.
    kind: 'full' or 'mean'.
    over: systems of PyTorch; the fastest one counts.
    least: ratio of wall times.
  """

  case: str
  kind: str
  over: tuple[str, ...]
  least: float


GOALS = (
  Goal('decode_128k_b1', MEAN, ('torch_static',), 25),
  Goal('decode_8k_b1', MEAN, TORCH, 10),
  Goal('prefill_8k', 'full', ('torch_sdpa',), 4),
  Goal('prefill_16k', 'full', ('torch_sdpa',), 6),
)


def run(request: Request, log: Callable[..., None]) -> Report:
  """Measures and compares; see the module.

  Raises:
    ValueError: evidence other than 'run', unknown cases or systems, real
      sizes on a CPU, or a framework that is missing.
  """
  if request.evidence != 'run':
    raise ValueError('the layer suite measures a GPU: use --evidence=run')
  cases, systems = _chosen_cases(request), _chosen_systems(request)
  real = [case.name for case in cases if case.preset != TINY]
  hosts: dict[str, dict] = {}
  answers: list[tuple[dict, dict]] = []
  begun = time.monotonic()
  if not any(_requests(framework, cases, systems) for framework in _MODULES):
    raise ValueError(
      f'{", ".join(systems)} has no such case: torch_static decodes only'
    )

  def found() -> Report:
    device = hosts[JAX if JAX in hosts else 'torch']['device']
    return report(request, device, cases, answers, _versions(hosts))

  with tempfile.TemporaryDirectory() as folder:
    for framework in _MODULES:

      def started(hello, framework=framework):
        hosts[framework] = hello
        if real and hello['platform'] == 'cpu':
          raise ValueError(
            f'{real[0]} needs a GPU, {framework} ({hello["versions"]}) finds '
            'none: use --op=tiny on a CPU'
          )

      asked, before = _requests(framework, cases, systems), len(answers)
      module, remedy = _MODULES[framework]
      process = ask(module, folder, asked, started, remedy)
      with contextlib.closing(process) as given:
        for answer, what in zip(given, asked):
          log(_said(framework, what, answer))
          answers.append((what, answer))
          if request.save is not None:
            request.save(found())
          if time.monotonic() - begun > _seconds(request, framework):
            break
      late = dict(problem=f'not run in {request.max_seconds} s')
      answers += [(what, late) for what in asked[len(answers) - before :]]
  return found()


def _seconds(request: Request, framework: str) -> float:
  """When a framework's last case has started; PyTorch, the first, has half."""
  if request.max_seconds is None:
    return float('inf')
  return request.max_seconds * (0.5 if framework == 'torch' else 1)


def _chosen_cases(request: Request) -> list[LayerCase]:
  """Tiny cases only where they are asked for."""
  parts = request.select
  found = [
    case
    for case in CASES.values()
    if case.preset != TINY
    and not parts
    or any(
      part in case.name and (case.preset != TINY or TINY in part)
      for part in parts
    )
  ]
  if not found:
    raise ValueError(
      f'no case is named {", ".join(parts)}: names are {", ".join(CASES)}'
    )
  return found


def _chosen_systems(request: Request) -> tuple[str, ...]:
  if request.systems == ('auto',):
    return SYSTEMS
  unknown = sorted(set(request.systems) - set(SYSTEMS))
  if unknown:
    raise ValueError(
      f'system {", ".join(unknown)} is unknown: use {", ".join(SYSTEMS)}'
    )
  return tuple(s for s in SYSTEMS if s in request.systems)


def _requests(
  framework: str, cases: Sequence[LayerCase], systems: Sequence[str]
) -> list[dict]:
  """What a framework's process is asked: parity first, then times."""
  torch = framework == 'torch'
  if not torch and JAX not in systems:
    return []
  asked = []
  for key in dict.fromkeys((case.preset, case.phase) for case in cases):
    case = PARITY[key]
    compared = [s for s in forms(case) if s in systems]
    if compared and JAX in systems:
      asked.append(dict(what='parity', case=case.name, systems=compared))
  for case in cases:
    mine = [s for s in forms(case) if s in systems] if torch else [JAX]
    asked += [
      dict(what='time', case=case.name, system=system, kind=kind)
      for system in mine
      for kind in KINDS
    ]
  return asked if any(a['what'] == 'time' for a in asked) else []


def _said(framework: str, what: dict, answer: dict) -> str:
  if what['what'] == 'parity':
    return f'{framework}: parity at {what["case"]}'
  us = answer.get('us')
  took = answer.get('problem') if us is None else f'{us:.0f} us'
  return f'{what["system"]}: {what["case"]}/{what["kind"]}: {took}'


def _versions(hosts: dict[str, dict]) -> str:
  return ', '.join(hello['versions'] for hello in hosts.values())


def report(
  request: Request,
  device: str,
  cases: Sequence[LayerCase],
  answers: Sequence[tuple[dict, dict]],
  versions: str = '',
) -> Report:
  """The rows of what both processes answered, and the goals missed.

  Args:
    request: of the suite.
    device: the card's name.
    cases: that were measured.
    answers: requests of `_requests`, each with its answer.
    versions: of both frameworks.

  Returns:
    The report; outputs that differ are a goal missed.
  """
  known = GPUS.get(device, Device(device, float('inf'), float('inf')))
  times = {
    (what['case'], what['kind'], what['system']): answer
    for what, answer in answers
    if what['what'] == 'time'
  }
  times |= _means(times)
  parity, missed = _parity(answers)
  rows = []
  for case in cases:
    for kind in (*KINDS, MEAN):
      for system in SYSTEMS:
        answer = times.get((case.name, kind, system))
        if answer is None:
          continue
        details = {k: v for k, v in answer.items() if k != 'us'}
        if system != JAX:
          ours = times.get((case.name, kind, JAX), {}).get('us')
          details['speedup'] = _ratio(answer.get('us'), ours)
          errors = parity.get((case.preset, case.phase, system), {})
          details['parity'] = errors.get(kind, {}).get('worst_row_error')
        rows.append(
          _row(request, known, case, kind, system, answer.get('us'), details)
        )
  for (preset, phase, system), found in parity.items():
    case = PARITY[preset, phase]
    worst = max(found[kind]['worst_row_error'] for kind in KINDS)
    details = dict(found, parity=worst)
    rows.append(_row(request, known, case, 'parity', system, None, details))
  missed += _missed(times)
  return Report(tuple(rows), (*NOTES, versions), tuple(missed))


def _means(times: dict) -> dict:
  """The mean layer of every case and system that has both kinds."""
  found = {}
  for name, system in dict.fromkeys((case, s) for case, _, s in times):
    each = {kind: times.get((name, kind, system), {}) for kind in KINDS}
    counts = layers_of(CASES[name].config)
    answer = {
      key: mean({kind: each[kind].get(key) for kind in KINDS}, counts)
      for key in ('us', 'busy_us', 'launches')
    }
    problems = [a['problem'] for a in each.values() if 'problem' in a]
    if problems:
      answer['problem'] = problems[0]
    found[name, MEAN, system] = answer
  return found


def mean(values: dict[str, float | None], counts: dict[str, int]):
  """The mean of values by kind, `counts` layers of each; None if one is."""
  if None in values.values():
    return None
  total = sum(counts[kind] * value for kind, value in values.items())
  return total / sum(counts.values())


def _ratio(theirs: float | None, ours: float | None) -> float | None:
  return theirs / ours if theirs and ours else None


def _parity(answers: Iterable[tuple[dict, dict]]) -> tuple[dict, list[str]]:
  """Comparisons by preset, phase and system, and those that failed."""
  parity, missed = {}, []
  for what, answer in answers:
    if what['what'] != 'parity':
      continue
    case = CASES[what['case']]
    if 'problem' in answer:
      missed.append(f'{case.name}: not compared: {answer["problem"]}')
      continue
    for system in what['systems']:
      found = answer.get(system)
      if found is None:
        continue  # PyTorch's answer says only that its files are written
      parity[case.preset, case.phase, system] = found
      if not found['passed']:
        missed.append(
          f'{case.name} {system}: outputs differ by '
          f'{found["full"]["worst_row_error"]:.2g} (full) and '
          f'{found["shared"]["worst_row_error"]:.2g} (shared) of a row, at '
          f'most {found["layer_tolerance"]:g}; selections of '
          f'{found["rows_beyond_ties"]} rows by more than ties'
        )
  return parity, missed


def _missed(times: dict[tuple[str, str, str], dict[str, Any]]) -> list[str]:
  """Sentences about goals that were asked for and are not met."""
  found = []
  for goal in GOALS:
    ours = times.get((goal.case, goal.kind, JAX))
    theirs = {
      system: times[goal.case, goal.kind, system]
      for system in goal.over
      if (goal.case, goal.kind, system) in times
    }
    if ours is None or not theirs:
      continue
    where = f'{goal.case}/{goal.kind}'
    measured = {s: a['us'] for s, a in theirs.items() if a.get('us')}
    if not ours.get('us') or not measured:
      failed = ours if not ours.get('us') else next(iter(theirs.values()))
      why = failed.get('problem', 'no time')
      found.append(f'{where}: not measured: {why}')
      continue
    best = min(measured, key=measured.get)
    ratio = measured[best] / ours['us']
    if ratio < goal.least:
      found.append(
        f'{where}: {ratio:.1f} times as fast as {best}, goal {goal.least:g}'
      )
  return found


def _row(request, device: Device, case, kind, system, seconds_us, details):
  floor = tflops = gbps = None
  if kind in KINDS and seconds_us:
    flops, moved = work(case, kind)
    floor = 1e6 * max(moved / device.bandwidth, flops / device.flops)
    tflops, gbps = flops / seconds_us / 1e6, moved / seconds_us / 1e3
  return Row(
    suite='layer',
    case=f'{case.name}/{kind}',
    system=system,
    device=device.name,
    dtype={'bfloat16': 'bf16', 'float32': 'f32'}[case.config.dtype],
    shape=case.shape,
    us=seconds_us,
    tflops=tflops,
    gbps=gbps,
    roofline_share=floor / seconds_us if floor else None,
    ratio=seconds_us / floor if floor else None,
    evidence=request.evidence,
    command=request.command,
    date=request.date,
    details=details,
  )
