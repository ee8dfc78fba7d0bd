"""Errors in the shape that OpenAI clients read."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from glm_jax.serving.request import InvalidRequest, QueueFull

_LOG = logging.getLogger(__name__)
_TYPES = {
  400: 'invalid_request_error',
  401: 'authentication_error',
  403: 'permission_error',
  404: 'not_found_error',
  408: 'timeout_error',
  413: 'invalid_request_error',
  429: 'rate_limit_error',
  499: 'request_cancelled',
  503: 'service_unavailable',
}


class ApiError(HTTPException):
  """Ends a request with a status and `{"error": ...}`.

  It is an exception of the framework's kind, since the framework replaces
  any other one that is raised while it reads a body.

  Attributes:
    status: of HTTP.
    message: names the value and the remedy.
    param: the field of the request that is to blame, if one is.
    code: short and stable, for programs.
    headers: of the response.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
  ):
    super().__init__(status, message, headers)
    self.status = status
    self.message = message
    self.param = param
    self.code = code

  def body(self) -> dict[str, Any]:
    """The JSON object that is sent."""
    return {
      'error': {
        'message': self.message,
        'type': _TYPES.get(
          self.status,
          'server_error' if self.status >= 500 else 'invalid_request_error',
        ),
        'param': self.param,
        'code': self.code,
      }
    }


class JsonResponse(Response):
  """JSON in UTF-8 that survives lone surrogates in echoed text."""

  media_type = 'application/json'

  def render(self, content: Any) -> bytes:
    """The body."""
    return dump(content)


def dump(content: Any) -> bytes:
  """JSON bytes; a lone surrogate becomes the escape that it came from."""
  text = json.dumps(content, ensure_ascii=False, allow_nan=False)
  return text.encode('utf-8', 'backslashreplace')


def from_engine(error: Exception) -> ApiError:
  """What a refusal of the engine means over HTTP."""
  if isinstance(error, QueueFull):
    wait = {'Retry-After': str(max(1, math.ceil(error.retry_after)))}
    if error.draining:
      return ApiError(503, str(error), code='draining', headers=wait)
    return ApiError(429, str(error), code='queue_full', headers=wait)
  if isinstance(error, InvalidRequest):
    return ApiError(400, str(error), code='invalid_request')
  _LOG.error('the engine failed', exc_info=error)
  return ApiError(500, 'the engine failed; see its log', code='engine_failed')


def error_response(error: ApiError) -> JsonResponse:
  """The response that says so."""
  return JsonResponse(error.body(), error.status, error.headers)


def install(app: fastapi.FastAPI):
  """Makes every error of `app` one of ours, the framework's included."""

  async def ours(_, error: ApiError):
    return error_response(error)

  async def engine(_, error: Exception):
    return error_response(from_engine(error))

  async def invalid(_, error: RequestValidationError):
    return error_response(_validation(error))

  async def http(_, error: HTTPException):
    found = ApiError(error.status_code, str(error.detail), code='http_error')
    found.headers = dict(error.headers or {})
    return error_response(found)

  async def unexpected(_, error: Exception):
    message = f'the server failed: {type(error).__name__}; its log says more'
    return error_response(ApiError(500, message, code='internal_error'))

  app.add_exception_handler(ApiError, ours)
  app.add_exception_handler(InvalidRequest, engine)
  app.add_exception_handler(QueueFull, engine)
  app.add_exception_handler(RequestValidationError, invalid)
  app.add_exception_handler(HTTPException, http)
  app.add_exception_handler(Exception, unexpected)


def _validation(error: RequestValidationError) -> ApiError:
  """The first complaint of pydantic; the input itself is not repeated."""
  first = error.errors()[0]
  where = [str(part) for part in first['loc'] if part != 'body']
  param = '.'.join(where)[:200] or None
  if first['type'] == 'json_invalid':
    reason = first.get('ctx', {}).get('error', 'not JSON')
    return ApiError(400, f'the body is no JSON: {reason}', code='invalid_json')
  if first['type'] == 'extra_forbidden':
    message = f'unknown field {param!r}: leave it out'
    return ApiError(400, message, param=param, code='unknown_field')
  message = f'{param or "the body"}: {first["msg"]}'
  more = len(error.errors()) - 1
  message += f' (and {more} more)' if more else ''
  return ApiError(400, message, param=param, code='invalid_value')
