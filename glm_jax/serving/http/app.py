"""The HTTP application: routes over a `Service`."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import fastapi
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from glm_jax.serving.http import errors, metrics, protocol, sse, status
from glm_jax.serving.http.chat import Chat
from glm_jax.serving.http.completions import Completion
from glm_jax.serving.http.errors import ApiError, JsonResponse
from glm_jax.serving.http.middleware import Guard
from glm_jax.serving.http.service import ServedModel, ServerOptions, Service
from glm_jax.serving.request import EngineStream

_TITLE = 'glm-jax'
# What cancelled requests may take to be gone.
_LAST_SECONDS = 10.0


def create_app(
  engine: EngineStream,
  model: ServedModel,
  options: ServerOptions | None = None,
  *,
  on_shutdown: Callable[[], Awaitable[None]] | None = None,
) -> fastapi.FastAPI:
  """An OpenAI-compatible application over a running engine.

  Args:
    engine: runs the requests.
    model: facts of the model.
    options: of the server.
    on_shutdown: awaited after the last request, e.g. to stop the engine.

  Returns:
    The ASGI application; `app.state.service` is its `Service`.
  """
  options = options or ServerOptions()
  service = Service(engine, model, options)

  @contextlib.asynccontextmanager
  async def lifespan(_):
    yield
    service.draining = True
    await service.idle(_LAST_SECONDS)
    if on_shutdown is not None:
      await on_shutdown()

  app = fastapi.FastAPI(
    title=_TITLE,
    description='OpenAI-compatible interface of GLM models in JAX.',
    docs_url=None,  # The usual page loads scripts from elsewhere.
    redoc_url=None,
    lifespan=lifespan,
  )
  app.state.service = service
  errors.install(app)
  app.include_router(_generation(service))
  app.include_router(_text(service))
  app.include_router(_operation(service))
  app.add_middleware(
    Guard,
    api_keys=options.api_keys,
    max_body_bytes=options.max_body_bytes,
    body_seconds=options.body_seconds,
  )
  return app


def _generation(service: Service) -> fastapi.APIRouter:
  """Routes that run the model."""
  router = fastapi.APIRouter(responses=_ERRORS, default_response_class=Response)

  async def respond(request: Request, work: Chat | Completion, stream: bool):
    if not stream:
      return await sse.answer(request, work.complete())
    return await sse.stream(
      request, work.events(), stall_seconds=service.options.stall_seconds
    )

  @router.post('/v1/chat/completions', responses=_STREAMED)
  async def chat(body: protocol.ChatRequest, request: Request) -> Response:
    """Answers in a conversation."""
    return await respond(request, Chat(service, body), body.stream)

  @router.post('/v1/completions', responses=_STREAMED)
  async def completions(
    body: protocol.CompletionRequest, request: Request
  ) -> Response:
    """Continues text or token ids."""
    return await respond(request, Completion(service, body), body.stream)

  @router.post('/abort_request', responses=_ok('Ids that were ended.'))
  async def abort(body: protocol.AbortRequest) -> Response:
    """Ends a running request by the id of its response, or all of them."""
    running = dict(service.running)
    ids = list(running) if body.abort_all else [body.request_id]
    aborted = []
    for response_id in ids:
      inner = running.get(response_id, ())
      ended = [await service.engine.abort(one) for one in inner]
      if any(ended):
        aborted.append(response_id)
    return JsonResponse({'aborted': aborted})

  return router


def _text(service: Service) -> fastapi.APIRouter:
  """Routes that turn text into ids and back."""
  router = fastapi.APIRouter(responses=_ERRORS, default_response_class=Response)

  @router.get('/v1/models', responses=_ok('The list.'))
  async def models() -> Response:
    """The names of the model."""
    data = [_card(service.model, name) for name in service.model.names]
    return JsonResponse({'object': 'list', 'data': data})

  @router.get('/v1/models/{name:path}', responses=_ok('The model.'))
  async def model(name: str) -> Response:
    """One model."""
    service.check_model(name)
    return JsonResponse(_card(service.model, name))

  @router.post('/tokenize', responses=_ok('Ids.'))
  async def tokenize(body: protocol.TokenizeRequest) -> Response:
    """Ids of a text, or of a conversation as the model sees it."""
    service.check_model(body.model)
    if body.messages is not None:
      ids = list((await service.chat_prompt(body)).ids)
    else:
      ids = list((await service.text_prompts(body.prompt))[0].ids)
    text = lambda i: service.tokenizer.decode([i], skip_special_tokens=False)
    return JsonResponse(
      {
        'count': len(ids),
        'max_model_len': service.model.max_model_len,
        'tokens': ids,
        'token_strs': [text(i) for i in ids]
        if body.return_token_strs
        else None,
      }
    )

  @router.post('/detokenize', responses=_ok('The text.'))
  async def detokenize(body: protocol.DetokenizeRequest) -> Response:
    """Text of ids, special tokens included."""
    service.check_model(body.model)
    text = service.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return JsonResponse({'prompt': text})

  return router


def _operation(service: Service) -> fastapi.APIRouter:
  """Routes for those who run the server."""
  router = fastapi.APIRouter(default_response_class=Response)

  @router.get('/health', responses=_ERRORS | _ok('Alive.'))
  async def health() -> Response:
    """200 while the process and its engine live."""
    if not service.alive:
      raise ApiError(503, 'the engine has failed', code='engine_failed')
    return JsonResponse({'status': 'ok'})

  @router.get('/ready', responses=_ERRORS | _ok('Ready.'))
  async def ready() -> Response:
    """200 when requests are taken: warmed up and not shutting down."""
    if service.draining or not service.engine.ready:
      why = 'shutting down' if service.draining else 'warming up'
      raise ApiError(503, f'not ready: {why}', code='not_ready')
    return JsonResponse({'status': 'ready'})

  @router.get('/metrics', responses=_ok('Metrics.', 'text/plain'))
  async def exposition() -> Response:
    """Prometheus metrics."""
    text = service.metrics.exposition(await service.engine.stats())
    return Response(text, media_type=metrics.CONTENT_TYPE)

  @router.post('/flush_cache', responses=_ERRORS | _ok('Done.'))
  async def flush_cache() -> Response:
    """Forgets every cached prefix; refused while requests run."""
    if not await service.engine.flush_cache():
      raise ApiError(409, 'requests are running: flush when idle', code='busy')
    return JsonResponse({'flushed': True})

  @router.get('/', include_in_schema=False)
  async def page() -> Response:
    """The status page."""
    return HTMLResponse(status.page(), headers=status.HEADERS)

  @router.get('/status', responses=_ok('Counts.'))
  async def counts() -> Response:
    """What the status page shows: counts, never prompts."""
    return JsonResponse(status.snapshot(service, await service.engine.stats()))

  return router


def _card(model: ServedModel, name: str) -> dict[str, Any]:
  return {
    'id': name,
    'object': 'model',
    'created': model.created,
    'owned_by': _TITLE,
    'root': model.names[0],
    'parent': None,
    'max_model_len': model.max_model_len,
  }


def _error() -> dict[str, Any]:
  """The usual error, for the OpenAPI document."""
  text = {'type': 'string'}
  fields = {
    'message': text,
    'type': text,
    'param': {'type': ['string', 'null']},
    'code': {'type': ['string', 'null']},
  }
  error = {
    'type': 'object',
    'required': list(fields),
    'properties': fields,
  }
  schema = {
    'type': 'object',
    'required': ['error'],
    'properties': {'error': error},
  }
  return {
    'description': 'The usual error object.',
    'content': {'application/json': {'schema': schema}},
  }


def _ok(description: str, *media: str) -> dict[int | str, dict[str, Any]]:
  """A success, for the OpenAPI document: a JSON object unless said."""
  schemas = {
    'application/json': {'schema': {'type': 'object'}},
    'text/plain': {'schema': {'type': 'string'}},
  }
  media = media or ('application/json',)
  content = {name: schemas.get(name, {}) for name in media}
  return {200: {'description': description, 'content': content}}


_ERRORS: dict[int | str, dict[str, Any]] = {'4XX': _error(), '503': _error()}
_STREAMED = _ok('The answer.', 'application/json', 'text/event-stream')
