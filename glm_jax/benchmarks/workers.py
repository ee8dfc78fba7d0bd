"""Runs cases in child processes: an abort of the compiler costs one case."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

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
  waiting = list(cases)
  while waiting:
    answered = 0
    for answer in _one_child(waiting):
      answered += 1
      yield answer
    waiting = waiting[answered:]


def _one_child(cases: Sequence[dict]) -> Iterator[dict]:
  """Answers of one child; the last one says how it ended, if it did."""
  root = pathlib.Path(__file__).resolve().parents[2]
  with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
    settings = [*_SETTINGS, f'PYTHONPATH={root}']
    if cases[0]['profile']:
      settings.append(f'LIBTPU_INIT_ARGS={_PROFILE}{folder}')
    child = subprocess.Popen(
      ['env', *settings, sys.executable, '-m', __package__ + '.child', folder],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=log,
      text=True,
    )
    try:
      for case in cases:
        answer = _ask(child, case)
        if answer is None:
          log.seek(0)
          said = _REASON.search(log.read().decode(errors='replace'))
          yield dict(
            error='the compiler aborted' + (f': {said[1]}' if said else ''),
            cycles=read_cycles(pathlib.Path(folder)),
          )
          return
        yield answer
    finally:
      child.kill()
      child.wait()
      for pipe in (child.stdin, child.stdout):
        try:
          pipe.close()
        except BrokenPipeError:
          pass


def _ask(child, case: dict) -> dict | None:
  """A child's answer to a case; None once it has ended."""
  try:
    child.stdin.write(json.dumps(case) + '\n')
    child.stdin.flush()
  except BrokenPipeError:
    return None
  for line in child.stdout:
    try:
      return json.loads(line)
    except json.JSONDecodeError:
      continue  # a library that prints
  return None


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
