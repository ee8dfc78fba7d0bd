"""/v1/completions: text or ids are continued as they are."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from glm_jax.serving.http import logprobs as logprob_format
from glm_jax.serving.http import protocol
from glm_jax.serving.http.chat import answer_schema, refuse_endless
from glm_jax.serving.http.choices import Choice
from glm_jax.serving.http.errors import JsonResponse
from glm_jax.serving.http.running import Running
from glm_jax.serving.http.service import Service, new_id
from glm_jax.serving.http.usage import usage


class Completion:
  """One request to continue prompts."""

  def __init__(self, service: Service, request: protocol.CompletionRequest):
    """Checks the model; `prepare` does the rest."""
    service.check_model(request.model)
    self._service = service
    self._request = request
    self._model = request.model or service.model.names[0]
    self._created = int(time.time())
    self.id = new_id('cmpl')

  async def prepare(self) -> Running:
    """Encodes the prompts and makes the engine's requests."""
    request, service = self._request, self._service
    self._prompts = await service.text_prompts(request.prompt)
    count = len(self._prompts) * request.n
    schema = answer_schema(request.response_format)
    filters: list = [None] * count
    if schema is not None:
      refuse_endless(request)
      filters = [
        await service.token_filter(thinking=False, schema=schema)
        for _ in range(count)
      ]
    requests = service.requests(
      request,
      self.id,
      self._prompts,
      max_new_tokens=request.max_tokens,
      logprobs=request.logprobs,
      filters=filters,
    )
    choices = [
      Choice(
        service.detokenizer(request),
        eos_ids=() if request.ignore_eos else service.model.eos_ids,
        stop_ids=request.stop_token_ids or (),
      )
      for _ in requests
    ]
    self._offsets = [len(self._echo(i)) for i in range(count)]
    return Running(service, self.id, requests, choices)

  async def complete(self) -> JsonResponse:
    """All continuations at once."""
    running = await self.prepare()
    count = len(running.choices)
    texts = [[self._echo(i)] for i in range(count)]
    ids: list[list[int]] = [[] for _ in range(count)]
    entries: list[list] = [[] for _ in range(count)]
    async with running:
      async for index, step in running.steps():
        texts[index].append(step.text)
        ids[index] += step.ids
        entries[index] += step.logprobs or ()
    choices = [
      self._choice(i, ''.join(texts[i]), ids[i], entries[i], running.choices[i])
      | self._prompt_ids(i)
      for i in range(count)
    ]
    counts = usage(running.choices, self._request.n)
    return JsonResponse({**self._head(), 'choices': choices, 'usage': counts})

  async def events(self) -> AsyncGenerator[dict[str, Any]]:
    """The continuations as chunks; the first one says they are accepted."""
    running = await self.prepare()
    options = self._request.stream_options or protocol.StreamOptions()
    count = lambda: usage(running.choices, self._request.n)

    def chunk(choice):
      shown = {'usage': None} if options.include_usage else {}
      if options.continuous_usage_stats:
        shown = {'usage': count()}
      return {**self._head(), 'choices': [choice], **shown}

    ids: list[list[int]] = [[] for _ in running.choices]
    entries: list[list] = [[] for _ in running.choices]
    async with running:
      await running.accepted()
      for i, choice in enumerate(running.choices):
        first = self._choice(i, self._echo(i), [], [], choice)
        yield chunk(first | self._prompt_ids(i))
      async for i, step in running.steps():
        ids[i] += step.ids
        entries[i] += step.logprobs or ()
        shown = self._request.return_token_ids and ids[i]
        if step.text or shown or step.finish_reason:
          choice = running.choices[i]
          yield chunk(self._choice(i, step.text, ids[i], entries[i], choice))
          ids[i], entries[i] = [], []
    if options.include_usage:
      yield {**self._head(), 'choices': [], 'usage': count()}

  def _head(self) -> dict[str, Any]:
    return {
      'id': self.id,
      'object': 'text_completion',
      'created': self._created,
      'model': self._model,
    }

  def _echo(self, index: int) -> str:
    if not self._request.echo:
      return ''
    prompt = self._prompts[index // self._request.n]
    if prompt.text is not None:
      return prompt.text
    return self._service.tokenizer.decode(prompt.ids, skip_special_tokens=False)

  def _prompt_ids(self, index: int) -> dict[str, Any]:
    """Shown once a choice: a prompt may have a million of them."""
    if not self._request.return_token_ids:
      return {}
    prompt = self._prompts[index // self._request.n]
    return {'prompt_token_ids': list(prompt.ids)}

  def _choice(
    self, index: int, text: str, ids: Sequence[int], entries, choice: Choice
  ) -> dict[str, Any]:
    logprobs = None
    if self._request.logprobs is not None:
      logprobs = logprob_format.completion(
        self._service.model.tokenizer, entries, self._offsets[index]
      )
      names = logprobs['tokens']
      self._offsets[index] += sum(map(len, names))
    shown = {}
    if self._request.return_token_ids:
      shown = {'token_ids': list(ids)}
    return {
      'index': index,
      'text': text,
      'logprobs': logprobs,
      'finish_reason': choice.finish_reason,
      'stop_reason': choice.stop_reason,
      **shown,
    }
