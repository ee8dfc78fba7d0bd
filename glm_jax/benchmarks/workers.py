"""Runs cases in child processes: an abort of the compiler costs one case."""

from __future__ import annotations

import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence

from glm_jax.benchmarks.measuring import (
  ROOT,
  after_deaths,
  child_process,
  put,
)

# libtpu is a compiler here: no TPU is looked for, and several may compile.
_SETTINGS = (
  'JAX_PLATFORMS=cpu',
  'TPU_SKIP_MDS_QUERY=1',
  'TPU_WORKER_HOSTNAMES=localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD=1',
)
_NAME = re.compile(r'hlo_op_name: "([^"]+)"')
_CYCLES = re.compile(r'estimated_cycles: (\d+)')
_REASON = re.compile(r'failed: (.*)')
_PROFILE = '--xla_jf_dump_static_llo_profile_to='


def measure_all(cases: Sequence[dict]) -> Iterator[dict]:
  """Measurements in the order of the cases.

  Args:
    cases: as `child.measure` takes them; all with the same `profile`.

  Yields:
    Its result; where the compiler ended the process, 'error' says why and
    'cycles' has what was estimated before.
  """
  return after_deaths(_one_child, cases)


def _one_child(cases: Sequence[dict]) -> Iterator[dict]:
  """Answers of one child; the last one says how it ended, if it did."""
  with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
    settings = [*_SETTINGS, f'PYTHONPATH={ROOT}']
    if cases[0]['profile']:
      settings.append(f'LIBTPU_INIT_ARGS={_PROFILE}{folder}')
    module = __package__ + '.child'
    command = ['env', *settings, sys.executable, '-m', module, folder]
    with child_process(command, log) as child:
      for case in cases:
        answer = put(child, case)
        if answer is None:
          log.seek(0)
          said = _REASON.search(log.read().decode(errors='replace'))
          yield dict(
            error='the compiler aborted' + (f': {said[1]}' if said else ''),
            cycles=read_cycles(pathlib.Path(folder)),
          )
          return
        yield answer


def read_cycles(folder: pathlib.Path) -> dict[str, int]:
  """Estimated cycles by HLO op, from libtpu's static profiles."""
  cycles = {}
  for path in sorted(folder.glob('*.textproto')):
    text = path.read_text()
    for part in text.split('hlo_op_estimate')[1:]:
      name, count = _NAME.search(part), _CYCLES.search(part)
      if name and count:
        cycles[name.group(1)] = int(count.group(1))
  return cycles
