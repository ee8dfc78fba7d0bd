"""Two processes of `plan_process.py`, or of a launcher, and what they print."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time

_DEVICES = '--xla_force_host_platform_device_count'
SCRIPT = pathlib.Path(__file__).with_name('plan_process.py')


def free_port():
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    return probe.getsockname()[1]


class Pair:
  """Two processes and what they print, in files."""

  def __init__(self, case, *args, launcher=None):
    folder = tempfile.TemporaryDirectory()
    case.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    address = f'localhost:{free_port()}'
    flags = re.sub(rf'{_DEVICES}=\d+', '', os.environ.get('XLA_FLAGS', ''))
    env = os.environ | {'XLA_FLAGS': f'{flags} {_DEVICES}=4',
                        'JAX_PLATFORMS': 'cpu'}  # fmt: skip
    self.processes = []
    for i in range(2):
      command = [sys.executable, SCRIPT, address, '2', str(i), *args]
      if launcher is not None:
        where = f'--coordinator_address={address}', '--num_processes=2'
        command = [sys.executable, launcher, *args, *where, f'--process_id={i}']
      with self.open(i, 'out') as out, self.open(i, 'err') as err:
        self.processes.append(
          subprocess.Popen(command, stdout=out, stderr=err, env=env)
        )
    for process in self.processes:
      # In this order: the last one added runs first.
      case.addCleanup(process.wait)
      case.addCleanup(process.kill)

  def open(self, i, kind):
    return (self.folder / f'{i}.{kind}').open('wb')

  def read(self, i, kind):
    return (self.folder / f'{i}.{kind}').read_text(errors='replace')

  def wait_for(self, text, seconds):
    end = time.monotonic() + seconds
    while not all(text in self.read(i, 'out') for i in range(2)):
      for i, process in enumerate(self.processes):
        if process.poll() is not None:
          raise AssertionError(f'{i} ended: {self.read(i, "err")}')
      if time.monotonic() > end:
        raise AssertionError(f'no {text!r} in {seconds} s')
      time.sleep(0.2)

  def finish(self, seconds):
    for i, process in enumerate(self.processes):
      code = process.wait(timeout=seconds)
      if code:
        raise AssertionError(f'{i} exits with {code}: {self.read(i, "err")}')
