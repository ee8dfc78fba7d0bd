"""Server-sent events that notice clients which leave or stall."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from glm_jax.serving.http.errors import ApiError, dump

_T = TypeVar('_T')
_HEADERS = {'Cache-Control': 'no-cache', 'X-Accel-Buffering': 'no'}
_DONE = b'data: [DONE]\n\n'


class Disconnected(Exception):
  """The client has gone; there is nobody to answer."""


class EventStream(Response):
  """Sends a stream of JSON objects, then [DONE].

  When the client disconnects, or takes nothing for `stall_seconds`, the
  stream is closed, which aborts what feeds it. While nothing happens, a
  comment every `heartbeat_seconds` keeps proxies from giving up.
  """

  media_type = 'text/event-stream'

  def __init__(
    self,
    first: dict[str, Any],
    events: AsyncGenerator[dict[str, Any]],
    *,
    stall_seconds: float = 60.0,
    heartbeat_seconds: float = 15.0,
  ):
    """Sends `first`, then `events`; an `ApiError` becomes the last event."""
    super().__init__(headers=_HEADERS)
    del self.headers['content-length']
    self._first = first
    self._events = events
    self._stall = stall_seconds
    self._heartbeat = heartbeat_seconds

  async def __call__(self, scope, receive, send):
    """Answers one ASGI request."""
    with contextlib.suppress(Disconnected, TimeoutError):
      await unless_gone(receive, self._write(send))

  async def _write(self, send):
    start = {'type': 'http.response.start', 'status': 200}
    async with contextlib.aclosing(self._events):
      await send({**start, 'headers': self.raw_headers})
      await send(_body(_frame(self._first)))
      async with contextlib.aclosing(self._frames()) as frames:
        async for data in frames:
          async with asyncio.timeout(self._stall):
            await send(_body(data))
    await send(_body(_DONE, more=False))

  async def _frames(self):
    """Events as bytes, with heartbeats between them."""
    upcoming = None
    try:
      while True:
        upcoming = upcoming or asyncio.create_task(_next(self._events))
        await asyncio.wait([upcoming], timeout=self._heartbeat)
        if not upcoming.done():
          yield b': still working\n\n'
          continue
        event, upcoming = upcoming.result(), None
        if event is None:
          return
        yield _frame(event)
    except ApiError as error:
      yield _frame(error.body())
    finally:
      if upcoming is not None:
        upcoming.cancel()
        await asyncio.wait([upcoming])


async def stream(
  request: Request,
  events: AsyncGenerator[dict[str, Any]],
  *,
  stall_seconds: float,
) -> Response:
  """Opens a stream; a refusal before the first event keeps its status."""
  try:
    first = await unless_gone(request.receive, _next(events))
  except Disconnected:
    return Response(status_code=499)
  return EventStream(first, events, stall_seconds=stall_seconds)


async def unless_gone(
  receive: Callable[[], Awaitable[dict]], work: Awaitable[_T]
) -> _T:
  """Awaits `work`; cancels it when the client goes away.

  Args:
    receive: of the ASGI request, whose body has been read.
    work: a coroutine.

  Raises:
    Disconnected: the client has gone.
  """
  task = asyncio.ensure_future(work)
  gone = asyncio.ensure_future(_gone(receive))
  try:
    await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
      raise Disconnected
    return task.result()
  finally:
    for one in (task, gone):
      one.cancel()
    await asyncio.wait([task, gone])


async def answer(request: Request, work: Awaitable[Response]) -> Response:
  """The response of `work`, or an empty one if the client has gone."""
  try:
    return await unless_gone(request.receive, work)
  except Disconnected:
    return Response(status_code=499)


async def _gone(receive):
  while (await receive())['type'] != 'http.disconnect':
    pass


async def _next(events: AsyncGenerator) -> Any:
  return await anext(events, None)


def _frame(event: dict[str, Any]) -> bytes:
  return b'data: ' + dump(event) + b'\n\n'


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
  return {'type': 'http.response.body', 'body': data, 'more_body': more}
