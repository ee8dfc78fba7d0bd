"""/v1/chat/completions: streams and complete answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from glm_jax.serving.http import logprobs as logprob_format
from glm_jax.serving.http import protocol
from glm_jax.serving.http.choices import Choice, Step
from glm_jax.serving.http.errors import ApiError, JsonResponse
from glm_jax.serving.http.running import Running
from glm_jax.serving.http.service import Prompt, Service, as_dicts, new_id
from glm_jax.serving.http.usage import usage
from glm_jax.serving.parsers import CallDelta, ChatParser


class Chat:
  """One request for an answer in a conversation."""

  def __init__(self, service: Service, request: protocol.ChatRequest):
    """Checks the model; `prepare` does the rest."""
    service.check_model(request.model)
    self._service = service
    self._request = request
    self._model = request.model or service.model.names[0]
    self._created = int(time.time())
    self.id = new_id('chatcmpl')

  async def prepare(self) -> Running:
    """Renders the prompt and makes the engine's requests."""
    request, service = self._request, self._service
    self._prompt = await service.chat_prompt(request)
    max_new = request.max_completion_tokens or request.max_tokens
    top = (request.top_logprobs or 0) if request.logprobs else None
    requests = service.requests(
      request,
      self.id,
      [self._prompt],
      max_new_tokens=max_new,
      logprobs=top,
      filters=[await self._filter(self._prompt) for _ in range(request.n)],
    )
    choices = [self._choice() for _ in requests]
    return Running(service, self.id, requests, choices)

  async def complete(self) -> JsonResponse:
    """The whole answer at once."""
    running = await self.prepare()
    messages = [_Message() for _ in running.choices]
    async with running:
      async for index, step in running.steps():
        messages[index].add(step)
    choices = []
    for index, (choice, message) in enumerate(zip(running.choices, messages)):
      choices.append(
        {
          'index': index,
          'message': message.as_dict(self._request.include_reasoning),
          'logprobs': self._logprobs(message.logprobs),
          'finish_reason': choice.finish_reason,
          'stop_reason': choice.stop_reason,
          **self._ids('token_ids', message.ids),
        }
      )
    return JsonResponse(
      {
        'id': self.id,
        'object': 'chat.completion',
        'created': self._created,
        'model': self._model,
        'choices': choices,
        'usage': usage(running.choices, self._request.n),
        **self._ids('prompt_token_ids', self._prompt.ids),
      }
    )

  async def events(self) -> AsyncGenerator[dict[str, Any]]:
    """The answer as chunks; the first one comes when it is accepted."""
    running = await self.prepare()
    options = self._request.stream_options or protocol.StreamOptions()
    every = options.continuous_usage_stats
    chunk = lambda index, delta, **more: self._chunk(
      [{'index': index, 'delta': delta, **more}],
      usage(running.choices, self._request.n) if every else None,
      options.include_usage,
    )
    pending = [_Pending() for _ in running.choices]
    async with running:
      await running.accepted()
      for index in range(len(running.choices)):
        delta = {'role': 'assistant', 'content': ''}
        more = self._ids('prompt_token_ids', self._prompt.ids)
        yield chunk(index, delta, logprobs=None, finish_reason=None, **more)
      async for index, step in running.steps():
        wait = pending[index]
        wait.add(step)
        delta = self._delta(step)
        if delta or step.finish_reason:
          more = {'logprobs': self._logprobs(wait.logprobs)}
          more['finish_reason'] = step.finish_reason
          if step.finish_reason:
            more['stop_reason'] = running.choices[index].stop_reason
          yield chunk(index, delta, **more, **self._ids('token_ids', wait.ids))
          pending[index] = _Pending()
    if options.include_usage:
      yield self._chunk([], usage(running.choices, self._request.n), True)

  def _chunk(self, choices, counts, has_usage: bool) -> dict[str, Any]:
    shown = {'usage': counts} if has_usage or counts else {}
    return {
      'id': self.id,
      'object': 'chat.completion.chunk',
      'created': self._created,
      'model': self._model,
      'choices': choices,
      **shown,
    }

  def _choice(self) -> Choice:
    request = self._request
    calls = request.tools and request.tool_choice != 'none'
    named = isinstance(request.tool_choice, protocol.NamedTool)
    return Choice(
      self._service.detokenizer(request),
      ChatParser(
        thinking=self._prompt.thinking,
        tools=as_dicts(request.tools) if calls else None,
      ),
      eos_ids=() if request.ignore_eos else self._service.model.eos_ids,
      stop_ids=request.stop_token_ids or (),
      named_tool=named,
    )

  async def _filter(self, prompt: Prompt):
    """The grammar that the answer must follow, if any."""
    request = self._request
    tools, choice = as_dicts(request.tools) or [], request.tool_choice
    if isinstance(choice, protocol.NamedTool):
      name = choice.function.name
      tools = [t for t in tools if t['function']['name'] == name]
    forced = choice not in (None, 'none', 'auto')
    schema = None if forced else answer_schema(request.response_format)
    if schema is None and not forced:
      return None
    refuse_endless(request)
    return await self._service.token_filter(
      thinking=prompt.thinking,
      schema=schema,
      tools=() if choice == 'none' else tools,
      parallel=request.parallel_tool_calls
      and not isinstance(choice, protocol.NamedTool),
    )

  def _delta(self, step: Step) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if step.delta.reasoning and self._request.include_reasoning:
      delta['reasoning_content'] = step.delta.reasoning
    if step.delta.content:
      delta['content'] = step.delta.content
    if step.delta.calls:
      delta['tool_calls'] = [_call_delta(call) for call in step.delta.calls]
    return delta

  def _logprobs(self, entries: Sequence) -> dict[str, Any] | None:
    if not self._request.logprobs:
      return None
    tokenizer = self._service.tokenizer
    return logprob_format.chat(tokenizer, entries)

  def _ids(self, name: str, ids: Sequence[int]) -> dict[str, list[int]]:
    return {name: list(ids)} if self._request.return_token_ids else {}


class _Pending:
  """Ids and logprobs whose text has not been sent yet."""

  def __init__(self):
    self.ids: list[int] = []
    self.logprobs: list = []

  def add(self, step: Step):
    self.ids += step.ids
    self.logprobs += step.logprobs or ()


class _Message(_Pending):
  """An answer as it is put together."""

  def __init__(self):
    super().__init__()
    self._reasoning: list[str] = []
    self._content: list[str] = []
    self._calls: list[dict[str, Any]] = []

  def add(self, step: Step):
    super().add(step)
    self._reasoning.append(step.delta.reasoning)
    self._content.append(step.delta.content)
    for call in step.delta.calls:
      if call.name is not None:
        self._calls.append(_new_call(call.name))
      self._calls[call.index]['function']['arguments'] += call.arguments

  def as_dict(self, include_reasoning: bool) -> dict[str, Any]:
    message: dict[str, Any] = {
      'role': 'assistant',
      'content': ''.join(self._content) or None,
      'refusal': None,
    }
    reasoning = ''.join(self._reasoning)
    if not self._calls and message['content'] is None:
      message['content'] = ''
    if include_reasoning:
      message['reasoning_content'] = reasoning or None
    if self._calls:
      message['tool_calls'] = self._calls
    return message


def answer_schema(form: protocol.ResponseFormat | None) -> Any:
  """JSON schema of the answer; None if it is free text."""
  if form is None or form.type == 'text':
    return None
  if form.type == 'json_object':
    return {'type': 'object'}
  return form.json_schema.schema_


def refuse_endless(request: protocol.Sampled):
  """A grammar ends with an end token: it must be allowed to."""
  if request.ignore_eos:
    raise ApiError(
      400,
      'ignore_eos cannot be combined with response_format or a forced '
      'tool_choice: what follows a complete answer is undefined',
      param='ignore_eos',
    )


def _new_call(name: str) -> dict[str, Any]:
  return {
    'id': f'call_{uuid.uuid4().hex[:24]}',
    'type': 'function',
    'function': {'name': name, 'arguments': ''},
  }


def _call_delta(call: CallDelta) -> dict[str, Any]:
  if call.name is None:
    function = {'arguments': call.arguments}
    return {'index': call.index, 'function': function}
  begun = _new_call(call.name)
  begun['function']['arguments'] = call.arguments
  return {'index': call.index, **begun}
