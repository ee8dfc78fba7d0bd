"""Several processes run one engine: process 0 decides, the others follow.

Given the same requests, cancellations and clock, an engine makes the same
plans and dispatches the same device calls in the same order; that is all that
a program over several processes needs. So process 0, which serves the API,
sends what happened since the last step, and every process replays it before
its own step. Token filters run in process 0 alone, which sends the masks that
they gave. The wire is TCP between hosts, not a device collective, which would
wait for the steps in flight.

A process that is lost, or whose state differs from process 0's, ends the pod
with an error that says so.
"""

from __future__ import annotations

import dataclasses
import pickle
import secrets
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from glm_jax.serving.engine import Engine
from glm_jax.serving.filters import FilterError, propose
from glm_jax.serving.request import Output, Request
from glm_jax.serving.tuning import Tuning

_KEY_BYTES = 32


class PodError(RuntimeError):
  """A process of the pod is lost or out of step; nothing can be served."""


class _AskedElsewhere:
  """Stands for a token filter whose masks come over the wire."""


class Leader:
  """Process 0's engine: see `request.EngineCore`; tells the others.

  Attributes:
    engine: the engine of this process.
  """

  def __init__(self, engine: Engine, followers: Sequence[Connection]):
    check_lockstep(engine)
    self.engine = engine
    engine.propose = self._propose
    self._followers = list(followers)
    self._events: list[tuple] = []

  def submit(self, request: Request) -> None:
    """See `request.EngineCore`."""
    self.engine.submit(request)
    if request.token_filter is not None:
      request = dataclasses.replace(request, token_filter=_AskedElsewhere())
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

  def tune(self, path: str | None = None, candidates=()) -> Tuning:
    """See `engine.Engine.tune`; what is saved here holds everywhere."""
    saved = self.engine.runner.saved_tuning(path, candidates)
    self._send('tune', saved)
    return self.engine.tune(path, candidates)

  def warm_up(self) -> int:
    """Compiles every shape everywhere, and only then runs any."""
    self._send('compile', self.engine.config)
    self.engine.compile()
    for number, connection in enumerate(self._followers, 1):
      try:
        connection.recv_bytes()
      except (EOFError, OSError) as error:
        raise PodError(f'process {number} of the pod is lost') from error
    self._send('warm_up')
    return self.engine.warm_up()

  def step(self) -> list[Output]:
    """See `request.EngineCore`."""
    now, events, self._events = time.monotonic(), self._events, []
    if events or self.engine.has_work():
      self._send('step', now, events, state_of(self.engine))
      return self.engine.step(now)
    return []

  def close(self) -> None:
    """Ends every process's loop."""
    self._send('stop')
    self.engine.close()

  def _propose(self, seq, most: int, words: int):
    """See `filters.propose`; the others get what came of it."""
    try:
      found = propose(seq, most, words)
    except FilterError as error:
      self._send('proposal', str(error))
      raise
    self._send('proposal', found)
    return found

  def _send(self, *message: Any) -> None:
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

  def proposed(seq, most: int, words: int):
    _, found = _receive(leader)
    if isinstance(found, str):
      raise FilterError(found)
    return found

  engine.propose = proposed
  while True:
    kind, *message = _receive(leader)
    if kind == 'stop':
      engine.close()
      return
    if kind == 'tune':
      engine.tune(saved=message[0])
    elif kind == 'compile':
      _check_equal(engine.config, message[0])
      engine.compile()
      leader.send_bytes(b'compiled')
    elif kind == 'warm_up':
      engine.warm_up()
    else:
      now, events, state = message
      for name, *arguments in events:
        getattr(engine, name)(*arguments)
      _check_equal(state_of(engine), state)
      engine.step(now)


def _receive(leader: Connection) -> tuple:
  try:
    return pickle.loads(leader.recv_bytes())
  except (EOFError, OSError) as error:
    raise PodError(f'process 0 of the pod is lost: {error}') from error


def _check_equal(own: object, leaders: object) -> None:
  if own != leaders:
    raise PodError(
      f'out of step with process 0: {own} is not {leaders}; were both started '
      'with the same flags?'
    )


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
  key = secrets.token_bytes(_KEY_BYTES)
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


def join(host: str) -> list[Connection]:
  """Wires the processes of `jax.distributed` to process 0; all call it.

  Args:
    host: process 0's address, as the others reach it.

  Returns:
    In process 0 the wire of each other process in their order, elsewhere the
    wire to process 0.
  """
  listener, secret = None, np.zeros(_KEY_BYTES + 2, np.uint8)
  if not jax.process_index():
    listener, (_, port, key) = listen(host)
    secret[:] = [*key, *port.to_bytes(2, 'big')]
  secret = multihost_utils.broadcast_one_to_all(secret).tobytes()
  if listener is None:
    port = int.from_bytes(secret[_KEY_BYTES:], 'big')
    wire = connect((host, port, secret[:_KEY_BYTES]))
    wire.send(jax.process_index())
    return [wire]
  wires = accept(listener, jax.process_count() - 1)
  by_number = {wire.recv(): wire for wire in wires}
  return [by_number[number] for number in sorted(by_number)]
