"""Runs cases in child processes: an abort of the compiler costs one case."""

from __future__ import annotations

import json
import pathlib
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
_PROFILE = '--xla_jf_dump_static_llo_profile_to='


def measure_all(cases: Sequence[dict]) -> Iterator[dict]:
  """Measurements in the order of the cases.

  Args:
    cases: as `child.measure` takes them; all with the same `profile`.

  Yields:
    Its result, or {'error': why} where the compiler ended the process.
  """
  waiting = list(cases)
  while waiting:
    answered = 0
    for answer in _one_child(waiting):
      answered += 1
      yield answer
    if answered < len(waiting):
      yield dict(error='the compiler aborted')
      answered += 1
    waiting = waiting[answered:]


def _one_child(cases: Sequence[dict]) -> Iterator[dict]:
  """Answers of one child, as many as it gives before it ends."""
  root = pathlib.Path(__file__).resolve().parents[2]
  with tempfile.TemporaryDirectory() as folder:
    settings = [*_SETTINGS, f'PYTHONPATH={root}']
    if cases[0]['profile']:
      settings.append(f'LIBTPU_INIT_ARGS={_PROFILE}{folder}')
    child = subprocess.Popen(
      ['env', *settings, sys.executable, '-m', __package__ + '.child', folder],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    try:
      for case in cases:
        try:
          child.stdin.write(json.dumps(case) + '\n')
          child.stdin.flush()
        except BrokenPipeError:
          return
        line = _answer(child)
        if line is None:
          return
        yield line
    finally:
      child.kill()
      child.wait()
      for pipe in (child.stdin, child.stdout):
        try:
          pipe.close()
        except BrokenPipeError:
          pass


def _answer(child) -> dict | None:
  """The next line that is a measurement; None once the child has ended."""
  for line in child.stdout:
    try:
      return json.loads(line)
    except json.JSONDecodeError:
      continue  # a library that prints
  return None
