"""Compiles in a process of its own, watched for memory.

A compile of a full model takes gigabytes and minutes inside one call: a
child that outgrows its limit is ended, with a message, before the host is.
It also gives libtpu its settings without touching this process.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from sharding.planner.request import PlanRequest

MEMORY_LIMIT = 20 << 30
_POLL_SECONDS = 0.2
# No TPU is looked for: libtpu is a compiler here, of which several may run.
_SETTINGS = (
  'ALLOW_MULTIPLE_LIBTPU_LOAD=1',
  'JAX_PLATFORMS=cpu',
  'TPU_SKIP_MDS_QUERY=1',
  'TPU_WORKER_HOSTNAMES=localhost',
)
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from sharding.planner.worker import main
main(sys.argv[2])
"""


class CompileError(ValueError):
  """The step cannot be compiled; one line says why."""


def compile_step(
  request: PlanRequest,
  *,
  log: Callable[[str], None] = lambda line: None,
  memory_limit: int = MEMORY_LIMIT,
) -> dict[str, Any]:
  """Compiles one step and returns what was read from it.

  Args:
    request: the step.
    log: called with lines of progress.
    memory_limit: resident bytes at which the compile is given up.

  Returns:
    The worker's measurements (`worker.py`).

  Raises:
    CompileError: it cannot be compiled, or not within the memory.
  """
  root = pathlib.Path(__file__).resolve().parents[2]
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    (path / 'request').write_bytes(pickle.dumps(request))
    command = ['env', *_SETTINGS, sys.executable, '-c', _PROGRAM]
    with (
      open(path / 'errors', 'w') as errors,
      subprocess.Popen(
        [*command, str(root), folder],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
      ) as child,
    ):
      try:
        peak = _watch(child, log, memory_limit)
      finally:
        child.kill()
    if peak > memory_limit:
      raise CompileError(
        f'compiling step={request.step} for {request.topology} needs more '
        f'than {memory_limit / 2**30:.0f} GiB of memory on this host: use a '
        'smaller chunk, batch or slice, or a host with more memory'
      )
    result = path / 'result'
    if not result.exists():
      raise CompileError(_last_words(path / 'errors', child.returncode))
    out = json.loads(result.read_text())
  if 'error' in out:
    raise CompileError(out['error'])
  return out | {'host_bytes': peak}


def _watch(child, log, memory_limit: int) -> int:
  """Waits for the child; ends it past the limit. Returns its peak bytes."""

  def forward():
    for line in child.stdout:
      log(line.rstrip())

  reader = threading.Thread(target=forward, daemon=True)
  reader.start()
  peak = 0
  while child.poll() is None:
    peak = max(peak, _resident(child.pid))
    if peak > memory_limit:
      child.kill()
    time.sleep(_POLL_SECONDS)
  reader.join(timeout=5)
  return peak


def _resident(pid: int) -> int:
  """Resident bytes of a process; 0 once it is gone or off Linux."""
  try:
    status = pathlib.Path(f'/proc/{pid}/status').read_text()
  except OSError:
    return 0
  for line in status.splitlines():
    if line.startswith('VmRSS:'):
      return int(line.split()[1]) << 10
  return 0


def _last_words(errors: pathlib.Path, code: int) -> str:
  lines = [line.strip() for line in errors.read_text().splitlines()]
  last = next((line for line in reversed(lines) if line), 'no message')
  return f'the compiling process ended with exit code {code}: {last}'
