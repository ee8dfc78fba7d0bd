"""Runs the sequences of one HTTP request in the engine, side by side."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Sequence

from glm_jax.serving.http.errors import from_engine
from glm_jax.serving.request import EngineStream, Output, Request

# A refusal (queue full, bad request) comes at once; a first token may take
# minutes. After this wait a stream opens its response and sees.
_REFUSAL_SECONDS = 5.0


class Generation:
  """The outputs of several requests, merged as they come.

  Leaving the context aborts whatever has not finished.
  """

  def __init__(self, engine: EngineStream, requests: Sequence[Request]):
    """Prepares `requests`; entering the context submits them."""
    self._engine = engine
    self._requests = requests
    self._queue: asyncio.Queue = asyncio.Queue()
    self._seen: collections.deque = collections.deque()
    self._tasks: list[asyncio.Task] = []
    self._open: set[int] = set()

  async def __aenter__(self) -> Generation:
    self._open = set(range(len(self._requests)))
    for index, request in enumerate(self._requests):
      task = asyncio.create_task(self._read(index, request))
      self._tasks.append(task)
    return self

  async def __aexit__(self, *_):
    for task in self._tasks:
      task.cancel()
    # Even if we are cancelled ourselves, the aborts must go through.
    gathered = asyncio.gather(*self._tasks, return_exceptions=True)
    await asyncio.shield(gathered)

  async def accepted(self):
    """Returns once no refusal is to be expected.

    Raises:
      ApiError: the engine refused.
    """
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_REFUSAL_SECONDS):
        self._seen.append(await self._next())

  async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
    """Yields (index of the request, output) until all have finished.

    Raises:
      ApiError: the engine refused, or failed.
    """
    while self._open:
      seen = self._seen.popleft() if self._seen else None
      index, output = seen or await self._next()
      if index in self._open:
        if output.finished:
          self._open.discard(index)
        yield index, output

  def end(self, index: int):
    """Aborts one request; nothing more comes of it."""
    self._open.discard(index)
    self._tasks[index].cancel()

  async def _next(self) -> tuple[int, Output]:
    index, output = await self._queue.get()
    if isinstance(output, Exception):
      raise from_engine(output) from output
    return index, output

  async def _read(self, index: int, request: Request):
    stream = self._engine.generate(request)
    finished = False
    try:
      async for output in stream:
        finished = output.finished
        self._queue.put_nowait((index, output))
    except Exception as error:
      finished = True
      self._queue.put_nowait((index, error))
    finally:
      if not finished and hasattr(stream, 'aclose'):
        await stream.aclose()
