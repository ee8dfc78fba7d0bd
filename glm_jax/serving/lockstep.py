"""Several processes run one engine: process 0 decides, the others follow.

Given the same requests, cancellations and clock, an engine makes the same
plans and dispatches the same device calls in the same order; that is all that
a program over several processes needs. So process 0, which serves the API,
sends what happened since the last step, and every process replays it before
its own step. Masks of token filters are computed everywhere: a filter answers
by tokens alone. The wire is TCP between hosts, not a device collective, which
would wait for the steps in flight.

A process that is lost, or whose state differs from process 0's, ends the pod
with an error that says so.
"""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from glm_jax.serving.engine import Engine
from glm_jax.serving.request import InvalidRequest, Output, Request

_STOP = 'stop'


class PodError(RuntimeError):
  """A process of the pod is lost or out of step; nothing can be served."""


class Leader:
  """Process 0's engine: see `request.EngineCore`; tells the others.

  Attributes:
    engine: the engine of this process.
  """

  def __init__(self, engine: Engine, followers: Sequence[Connection]):
    check_lockstep(engine)
    self.engine = engine
    self._followers = list(followers)
    self._events: list[tuple] = []

  def submit(self, request: Request) -> None:
    """See `request.EngineCore`; a token filter must be picklable."""
    if request.token_filter is not None:
      try:
        pickle.dumps(request.token_filter)
      except Exception as error:
        raise InvalidRequest(
          f'this token filter cannot be sent to other processes: {error}'
        ) from error
    self.engine.submit(request)
    self._events.append(('submit', request))

  def abort(self, request_id: str) -> bool:
    """See `request.EngineCore`."""
    self._events.append(('abort', request_id))
    return self.engine.abort(request_id)

  def flush_cache(self) -> bool:
    """See `request.EngineCore`."""
    self._events.append(('flush_cache',))
    return self.engine.flush_cache()

  def drain(self) -> None:
    """See `request.EngineCore`."""
    self._events.append(('drain',))
    self.engine.drain()

  def has_work(self) -> bool:
    """See `request.EngineCore`."""
    return self.engine.has_work()

  def stats(self) -> dict[str, Any]:
    """See `request.EngineCore`."""
    return self.engine.stats()

  def warm_up(self) -> int:
    """Compiles every shape, here and in all other processes."""
    self._send(('warm_up', None, [], None))
    return self.engine.warm_up()

  def step(self) -> list[Output]:
    """See `request.EngineCore`."""
    now, events, self._events = time.monotonic(), self._events, []
    if events or self.engine.has_work():
      self._send(('step', now, events, state_of(self.engine)))
      return self.engine.step(now)
    return []

  def close(self) -> None:
    """Ends every process's loop."""
    self._send((_STOP, None, [], None))
    self.engine.close()

  def _send(self, message: tuple) -> None:
    data = pickle.dumps(message)
    for number, connection in enumerate(self._followers, 1):
      try:
        connection.send_bytes(data)
      except OSError as error:
        raise PodError(
          f'process {number} of the pod is lost: {error}'
        ) from error


def follow(engine: Engine, leader: Connection) -> None:
  """The loop of every other process; returns when process 0 closes.

  Args:
    engine: made with the same arguments as process 0's.
    leader: from `connect`.

  Raises:
    PodError: process 0 is lost, or the two have come out of step.
  """
  check_lockstep(engine)
  while True:
    try:
      kind, now, events, state = pickle.loads(leader.recv_bytes())
    except (EOFError, OSError) as error:
      raise PodError(f'process 0 of the pod is lost: {error}') from error
    if kind == _STOP:
      engine.close()
      return
    if kind == 'warm_up':
      engine.warm_up()
      continue
    for name, *arguments in events:
      getattr(engine, name)(*arguments)
    if state_of(engine) != state:
      raise PodError(
        f'out of step with process 0: {state_of(engine)} is not {state}; were '
        'both started with the same flags?'
      )
    engine.step(now)


def state_of(engine: Engine) -> tuple:
  """What must be equal in all processes before each step."""
  stats = engine.stats()
  return (
    stats['steps'],
    tuple(stats['rows'].values()),
    tuple(stats['pages'].values()),
    stats['requests']['waiting'],
    stats['requests']['running'],
    stats['tokens']['generation'],
  )


def check_lockstep(engine: Engine) -> None:
  """Refuses engines whose plans depend on what only one process sees."""
  if engine.disk is not None:
    raise ValueError(
      'disk_cache_dir: each process would find other files; leave it out with '
      'several processes'
    )
  if not engine.config.wait_for_restores:
    raise ValueError(
      'several processes need wait_for_restores=True: when a transfer is '
      'there differs between them'
    )


def listen(host: str, port: int = 0) -> tuple[Listener, tuple[str, int, bytes]]:
  """Process 0's end: a listener, and the address that others connect to.

  Args:
    host: address of this host that the others reach.
    port: 0 for a free one.

  Returns:
    The listener, and (host, port, key), to be handed to the others once.
  """
  key = secrets.token_bytes(32)
  listener = Listener((host, port), backlog=256, authkey=key)
  return listener, (*listener.address, key)


def accept(listener: Listener, count: int) -> list[Connection]:
  """Waits for so many processes; the listener is closed then."""
  connections = [listener.accept() for _ in range(count)]
  listener.close()
  return connections


def connect(address: tuple[str, int, bytes]) -> Connection:
  """Another process's end."""
  host, port, key = address
  return Client((host, port), authkey=key)
