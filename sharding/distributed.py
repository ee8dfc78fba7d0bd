"""Several processes: one call starts them, and none outlives another.

`start` begins `jax.distributed`, labels what the process logs, and keeps a
line to process 0 open. A process whose line breaks, or stays silent for
`heartbeat_seconds`, is lost: process 0 says so in one line and exits with 1,
which breaks the other lines, so that every process ends the same way. A
collective that fails because a peer is gone ends in that one line too, not in
a traceback. `finish` says goodbye: lines that close after it mean nothing, and
process 0, which hosts jax's coordination service, leaves last.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

HEARTBEAT_SECONDS = 30
_BEAT, _BYE = b'.', b'x'
_GRACE_SECONDS = 10  # for the watch to find out why a collective failed

_watch: _Watch | None = None


def start(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  heartbeat_seconds: float = HEARTBEAT_SECONDS,
) -> int:
  """Joins this process to the others; call it before jax finds its devices.

  Args:
    coordinator_address: host:port of process 0; 'auto' asks the pod, as jax
      does on TPU pods and known clusters; None with the other two None for
      one process alone.
    num_processes: all processes; None with 'auto'.
    process_id: this one; None with 'auto'.
    heartbeat_seconds: a process that is silent for so long is lost.

  Returns:
    The number of processes.

  Raises:
    ValueError: arguments that do not fit together.
  """
  global _watch
  given = (num_processes, process_id)
  if coordinator_address is None:
    if any(x is not None for x in given):
      raise ValueError(
        f'{num_processes=} and {process_id=} need coordinator_address=HOST:PORT'
      )
    return 1
  auto = coordinator_address == 'auto'
  if not auto:
    _check(coordinator_address, num_processes, process_id)
  if num_processes == 1:
    return 1
  # Found dead by our own line, which says so in one line, long before jax.
  jax.config.update('jax_enable_recoverability', True)
  jax.distributed.initialize(
    None if auto else coordinator_address,
    num_processes,
    process_id,
    heartbeat_timeout_seconds=int(4 * heartbeat_seconds) + 60,
    shutdown_timeout_seconds=int(heartbeat_seconds),
  )
  count = jax.process_count()
  if count == 1:
    return 1
  sys.stderr = _Labelled(sys.stderr, f'[{jax.process_index()}] ')
  host = None if auto else coordinator_address.rsplit(':', 1)[0]
  _watch = _Watch(host, heartbeat_seconds)
  sys.excepthook = _excepthook
  return count


def finish() -> None:
  """Waits for all processes and lets go of them; does nothing for one."""
  global _watch
  if _watch is not None:
    multihost_utils.sync_global_devices('finish')
    watch, _watch = _watch, None
    watch.leave()
    if jax.process_index() == 0:
      # A process that still talks to the service when it goes would abort.
      watch.wait_for_goodbyes()
      jax.distributed.shutdown()
    else:
      jax.distributed.shutdown()
      watch.say_goodbye()
    watch.close()


def main_address() -> str:
  """Process 0's address, as the others reach it; several processes only."""
  return _watch.address


def least(value: int) -> int:
  """The least of all processes' values, 0 to 2^31 - 1."""
  if jax.process_count() == 1:
    return value
  return int(multihost_utils.process_allgather(np.int32(value)).min())


def fail(message: str) -> NoReturn:
  """Ends this process, and thereby all others, in one line on stderr.

  If a peer is gone that is the cause, and the watch says so within a moment.
  """
  time.sleep(_GRACE_SECONDS)
  sys.stderr.write(f'{message}\n')
  sys.stderr.flush()
  os._exit(1)


def is_main() -> bool:
  """Whether this process prints results: process 0."""
  return jax.process_index() == 0


def _check(address, num_processes, process_id):
  host, _, port = address.rpartition(':')
  if not host or not port.isdigit():
    raise ValueError(
      f"coordinator_address={address!r} must be 'auto' or HOST:PORT"
    )
  if num_processes is None or process_id is None:
    raise ValueError(
      f'coordinator_address={address!r} needs num_processes and process_id, '
      f'not {num_processes} and {process_id}'
    )
  if not 0 <= process_id < num_processes:
    raise ValueError(
      f'{process_id=} must be 0 to {num_processes - 1} ({num_processes=})'
    )


class _Watch:
  """Lines between process 0 and every other, watched by threads."""

  def __init__(self, host: str | None, seconds: float):
    self._seconds = seconds
    self._leaving = threading.Event()
    self._lost = threading.Lock()
    count, me = jax.process_count(), jax.process_index()
    server = None
    port = 0
    if me == 0:
      server = socket.create_server(('', 0), backlog=count)
      port = server.getsockname()[1]
    address = np.zeros(5, np.int32)
    if me == 0:
      own = socket.gethostbyname(host) if host else _own_address()
      address[:] = [*map(int, own.split('.')), port]
    *numbers, port = multihost_utils.broadcast_one_to_all(address).tolist()
    self.address = '.'.join(map(str, numbers))
    if server is not None:
      self._lines = {}
      for _ in range(count - 1):
        line, _ = server.accept()
        line.settimeout(seconds)
        self._lines[int.from_bytes(line.recv(4), 'big')] = line
      server.close()
    else:
      target = (self.address, port)
      line = socket.create_connection(target, timeout=seconds)
      line.sendall(me.to_bytes(4, 'big'))
      self._lines = {0: line}
    self._gone = {peer: threading.Event() for peer in self._lines}
    for peer, line in self._lines.items():
      for job in (self._listen, self._beat):
        threading.Thread(target=job, args=(peer, line), daemon=True).start()

  def leave(self):
    """From now on lines that end mean nothing, and no beats are sent."""
    self._leaving.set()

  def say_goodbye(self):
    """Tells every peer, and waits until it has closed the line."""
    for peer, line in self._lines.items():
      try:
        line.sendall(_BYE)
        line.shutdown(socket.SHUT_WR)
      except OSError:  # The peer has gone already.
        continue
      self._gone[peer].wait(self._seconds)

  def wait_for_goodbyes(self):
    """Waits until every peer has said goodbye, `heartbeat_seconds` at most."""
    end = time.monotonic() + self._seconds
    for gone in self._gone.values():
      gone.wait(max(0, end - time.monotonic()))

  def close(self):
    """Closes every line."""
    for line in self._lines.values():
      # A thread reads it: close() alone would not reach the peer.
      with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
      line.close()

  def _beat(self, peer, line):
    while not self._leaving.wait(self._seconds / 6):
      try:
        line.sendall(_BEAT)
      except OSError:
        if not self._gone[peer].wait(1):  # a goodbye may be on its way
          self._end(peer)
        return

  def _listen(self, peer, line):
    line.settimeout(self._seconds)
    said = _BEAT
    while _BYE not in said:
      try:
        said = line.recv(64)
      except OSError:  # a timeout is one, too
        said = b''
      if not said:
        if self._leaving.is_set():
          break
        self._end(peer)
    self._gone[peer].set()

  def _end(self, peer):
    """One line, whichever thread comes first."""
    if self._leaving.is_set():
      return
    if self._lost.acquire(blocking=False):
      sys.stderr.write(
        f'process {peer} of {jax.process_count()} is lost: ending\n'
      )
      sys.stderr.flush()
      os._exit(1)
    time.sleep(self._seconds)


def _excepthook(kind, error, trace):
  """A failure whose cause is a lost peer is left to the watch to report."""
  if not issubclass(kind, KeyboardInterrupt | SystemExit):
    if _is_communication(error):
      time.sleep(_GRACE_SECONDS)
  sys.__excepthook__(kind, error, trace)
  sys.stderr.flush()
  os._exit(1)


def _is_communication(error: BaseException) -> bool:
  return isinstance(error, jax.errors.JaxRuntimeError)


def _own_address() -> str:
  """The address by which other hosts reach this one."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    try:
      probe.connect(('192.0.2.1', 9))  # Sends nothing: it picks a route.
      return probe.getsockname()[0]
    except OSError:
      return socket.gethostbyname(socket.gethostname())


class _Labelled:
  """A text stream that begins every line with a label."""

  def __init__(self, stream, label: str):
    self._stream, self._label = stream, label
    self._fresh = True
    self._lock = threading.Lock()

  def write(self, text: str) -> int:
    with self._lock:
      for line in text.splitlines(keepends=True):
        # In one write: the runtime's own lines would come in between.
        self._stream.write(self._label + line if self._fresh else line)
        self._fresh = line.endswith('\n')
    return len(text)

  def __getattr__(self, name):
    return getattr(self._stream, name)
