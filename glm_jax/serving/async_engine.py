"""The engine in a thread of its own, for an event loop.

Calls are put on a queue that the engine's thread empties between steps, so
the engine itself needs no lock. A step's outputs reach the event loop in one
call.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from glm_jax.serving.engine import Engine
from glm_jax.serving.request import Output, QueueFull, Request

_IDLE_SECONDS = 0.05  # how often an idle engine looks at deadlines


class EngineDied(RuntimeError):
  """The engine's thread ended with an error; nothing can be served."""


class AsyncEngine:
  """See `request.EngineStream` for the interface.

  Attributes:
    engine: the engine; touched by its thread alone once started.
    error: what ended the thread, or None.
  """

  def __init__(self, engine: Engine):
    self.engine = engine
    self.error: BaseException | None = None
    self._calls: queue.SimpleQueue = queue.SimpleQueue()
    self._streams: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue]]
    self._streams = {}
    self._warm = threading.Event()
    self._draining = False
    self._stopping = False
    self._thread = threading.Thread(
      target=self._run, name='engine', daemon=True
    )

  def start(self) -> None:
    """Starts the thread, which first compiles every shape."""
    self._thread.start()

  def wait_until_ready(self, timeout: float | None = None) -> bool:
    """Blocks until every shape is compiled; False after `timeout` seconds.

    Raises:
      EngineDied: compilation failed.
    """
    warm = self._warm.wait(timeout)
    self._raise_if_dead()
    return warm

  @property
  def ready(self) -> bool:
    """Warmed up, alive and not draining."""
    return self._warm.is_set() and not self._draining and self.alive

  @property
  def alive(self) -> bool:
    """The thread runs and has met no error."""
    return self.error is None and self._thread.is_alive()

  async def generate(self, request: Request) -> AsyncIterator[Output]:
    """Yields a request's outputs; leaving the iterator early aborts it.

    Raises:
      QueueFull: try again later.
      InvalidRequest: it can never run.
      EngineDied: the engine has failed, or fails now.
    """
    loop, outputs = asyncio.get_running_loop(), asyncio.Queue()
    name = request.request_id

    def submit(engine: Engine) -> None:
      engine.submit(request)
      self._streams[name] = (loop, outputs)

    finished = False
    pending = self._call(submit)
    try:
      await asyncio.wrap_future(pending)
      while not finished:
        output = await outputs.get()
        if isinstance(output, BaseException):
          raise EngineDied(f'the engine has failed: {output}') from output
        finished = output.finished
        yield output
    finally:
      if not finished:
        # The submission may still be on its way: the calls keep their order.
        self._later(lambda engine: self._drop(engine, name, outputs))

  async def abort(self, request_id: str) -> bool:
    """Ends a request; its finished output still comes."""
    return await self._ask(lambda engine: engine.abort(request_id))

  async def flush_cache(self) -> bool:
    """See `request.EngineCore.flush_cache`."""
    return await self._ask(lambda engine: engine.flush_cache())

  async def stats(self) -> dict[str, Any]:
    """See `engine.Engine.stats`."""
    return await self._ask(lambda engine: engine.stats())

  async def drain(self) -> None:
    """Takes no new request and returns when those inside have ended."""
    self._draining = True
    await self._ask(lambda engine: engine.drain())
    while self.alive and await self._ask(lambda engine: engine.has_work()):
      await asyncio.sleep(_IDLE_SECONDS)

  def stop(self, timeout: float | None = 30.0) -> None:
    """Ends the thread; requests inside end as aborted."""
    self._draining = True
    if self._thread.is_alive():
      self._later(lambda engine: self._halt(engine))
      self._thread.join(timeout)

  # The engine's thread.

  def _run(self) -> None:
    try:
      self.engine.warm_up()
      self._warm.set()
      while not self._stopping:
        self._take_calls(wait=not self.engine.has_work())
        self._deliver(self.engine.step())
      self.engine.close()
    except BaseException as error:  # noqa: BLE001 (told to every stream)
      self.error = error
    finally:
      self._warm.set()
      self._fail(self.error or EngineDied('the engine was stopped'))

  def _take_calls(self, *, wait: bool) -> None:
    try:
      while True:
        call = self._calls.get(wait, _IDLE_SECONDS)
        wait = False
        call(self.engine)
    except queue.Empty:
      return

  def _deliver(self, outputs: list[Output]) -> None:
    """Hands a step's outputs over, one call for each event loop."""
    batches: dict[asyncio.AbstractEventLoop, list] = {}
    for output in outputs:
      stream = self._streams.get(output.request_id)
      if stream is None:
        continue  # its reader has left
      batches.setdefault(stream[0], []).append((stream[1], output))
      if output.finished:
        del self._streams[output.request_id]
    for loop, batch in batches.items():
      _post(loop, batch)

  def _drop(self, engine: Engine, name: str, outputs: asyncio.Queue) -> None:
    stream = self._streams.get(name)
    if stream is not None and stream[1] is outputs:
      del self._streams[name]
      engine.abort(name)

  def _halt(self, engine: Engine) -> None:
    for name in list(self._streams):
      engine.abort(name)
    self._deliver(engine.step())
    self._stopping = True

  def _fail(self, error: BaseException) -> None:
    """Ends every stream and every call that still waits."""
    for loop, outputs in self._streams.values():
      _post(loop, [(outputs, error)])
    self._streams.clear()
    self._take_calls(wait=False)

  # Calls from the event loop.

  def _later(self, call: Callable[[Engine], Any]) -> None:
    self._calls.put(call)

  def _call(self, call: Callable[[Engine], Any]) -> Future:
    future: Future = Future()

    def run(engine: Engine) -> None:
      if not future.set_running_or_notify_cancel():
        return
      try:
        self._raise_if_dead()
        if self._stopping:
          raise QueueFull('the engine has stopped', 30.0, draining=True)
        future.set_result(call(engine))
      except Exception as error:  # noqa: BLE001 (handed to the caller)
        future.set_exception(error)

    self._later(run)
    if not self._thread.is_alive() and self._warm.is_set():
      self._take_calls(wait=False)  # nobody else will
    return future

  async def _ask(self, call: Callable[[Engine], Any]) -> Any:
    return await asyncio.wrap_future(self._call(call))

  def _raise_if_dead(self) -> None:
    if self.error is not None:
      raise EngineDied(f'the engine has failed: {self.error}') from self.error


def _post(loop: asyncio.AbstractEventLoop, batch: list) -> None:
  """Puts (queue, item) pairs from another thread."""

  def put() -> None:
    for outputs, item in batch:
      outputs.put_nowait(item)

  try:
    loop.call_soon_threadsafe(put)
  except RuntimeError:  # the loop is closed: its readers are gone
    return
