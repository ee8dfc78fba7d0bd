"""What every request passes first: keys, origin, size and pace.

Plain ASGI: a wrapper that buffers responses would break streams and hide
clients that go away.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import Sequence

from glm_jax.serving.http.errors import ApiError, error_response

OPEN_PATHS = ('/health', '/ready')


class Guard:
  """Refuses what should never reach a route, with the usual error shape.

  Requests without a valid key are refused, except to /health and /ready. So
  are requests that a browser sends from another site, since nothing here is
  meant for one (there are no CORS headers either). Bodies are bounded in
  size and in the time they may take to arrive.
  """

  def __init__(
    self,
    app,
    *,
    api_keys: Sequence[str] = (),
    max_body_bytes: int,
    body_seconds: float,
  ):
    """Wraps the ASGI `app`; without keys, no key is asked for."""
    self._app = app
    self._keys = [key.encode() for key in api_keys]
    self._max_body_bytes = max_body_bytes
    self._body_seconds = body_seconds

  async def __call__(self, scope, receive, send):
    """Answers one ASGI request."""
    if scope['type'] != 'http':
      await self._app(scope, receive, send)
      return
    headers = {}
    for name, value in scope['headers']:
      headers.setdefault(name, value)
    try:
      self._check(scope['path'], headers)
      body = _Body(receive, self._max_body_bytes, self._body_seconds)
    except ApiError as error:
      await error_response(error)(scope, receive, send)
      return
    await self._app(scope, body, send)

  def _check(self, path: str, headers: dict[bytes, bytes]):
    origin, host = headers.get(b'origin'), headers.get(b'host', b'')
    if origin is not None and origin.partition(b'://')[2] != host:
      raise ApiError(
        403, 'requests from other web sites are refused', code='cross_origin'
      )
    if path not in OPEN_PATHS and self._keys:
      self._check_key(headers.get(b'authorization', b''))
    length = headers.get(b'content-length', b'0')
    if not length.isdigit() or len(length) > 18:
      raise ApiError(400, 'bad Content-Length', code='bad_length')
    if int(length) > self._max_body_bytes:
      raise _too_large(self._max_body_bytes)

  def _check_key(self, authorization: bytes):
    """Bearer, or Basic with the key as password (for the status page)."""
    scheme, _, given = authorization.partition(b' ')
    if scheme.lower() == b'basic':
      try:
        given = base64.b64decode(given, validate=True).partition(b':')[2]
      except ValueError:
        given = b''
    elif scheme.lower() != b'bearer':
      given = b''
    known = [hmac.compare_digest(given.strip(), key) for key in self._keys]
    if not any(known):
      raise ApiError(
        401,
        'no valid API key: send Authorization: Bearer KEY',
        code='invalid_api_key',
        headers={'WWW-Authenticate': 'Basic realm="glm-jax", charset="UTF-8"'},
      )


class _Body:
  """`receive` with bounds; after the body it waits without any."""

  def __init__(self, receive, max_bytes: int, seconds: float):
    self._receive = receive
    self._left = self._max_bytes = max_bytes
    self._deadline = asyncio.get_running_loop().time() + seconds
    self._complete = False

  async def __call__(self):
    if self._complete:
      return await self._receive()
    try:
      async with asyncio.timeout_at(self._deadline):
        message = await self._receive()
    except TimeoutError:
      raise ApiError(
        408, 'the body took too long to arrive', code='slow_body'
      ) from None
    if message['type'] == 'http.request':
      self._left -= len(message.get('body', b''))
      self._complete = not message.get('more_body', False)
      if self._left < 0:
        raise _too_large(self._max_bytes)
    else:
      self._complete = True
    return message


def _too_large(limit: int) -> ApiError:
  message = f'the body exceeds {limit} bytes (see --max_body_bytes)'
  close = {'Connection': 'close'}
  return ApiError(413, message, code='body_too_large', headers=close)
