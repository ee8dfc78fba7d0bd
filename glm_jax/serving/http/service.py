"""What the routes share: the model's facts, prompts, engine requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from glm_jax.serving.http import protocol
from glm_jax.serving.http.errors import ApiError
from glm_jax.serving.http.metrics import Metrics
from glm_jax.serving.parsers import Detokenizer
from glm_jax.serving.request import (
  EngineStream,
  Request,
  SamplingParams,
  TokenFilter,
)
from glm_jax.serving.structured import StructuredOutput
from glm_jax.text import Tokenizer

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ServedModel:
  """What the HTTP side knows of the model.

  Attributes:
    names: that clients may use; the first one is shown.
    vocab_size: of the model; ids are below it.
    max_model_len: tokens of prompt and answer together.
    tokenizer: None where there is none: ids only.
    eos_ids: ids that end an answer.
    sampling: defaults of temperature, top_p, top_k, min_p, as in the
      checkpoint's generation_config.json.
    created: seconds since the epoch, for /v1/models.
  """

  names: tuple[str, ...]
  vocab_size: int
  max_model_len: int
  tokenizer: Tokenizer | None
  eos_ids: tuple[int, ...] = ()
  sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)
  created: int = dataclasses.field(default_factory=lambda: int(time.time()))


@dataclasses.dataclass(frozen=True)
class ServerOptions:
  """How the server treats its clients.

  Attributes:
    api_keys: any of them opens everything; empty asks for none.
    max_body_bytes: of one request.
    body_seconds: that a body may take to arrive.
    request_seconds: until a request is ended; None never.
    stall_seconds: that a client may take nothing of its stream.
    log_requests: log prompts and parameters; off, only ids and counts.
  """

  api_keys: tuple[str, ...] = ()
  max_body_bytes: int = 32 << 20
  body_seconds: float = 60.0
  request_seconds: float | None = None
  stall_seconds: float = 60.0
  log_requests: bool = False


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt as ids, and whether it has opened a think block."""

  ids: tuple[int, ...]
  text: str | None = None
  thinking: bool = False


class Service:
  """The engine and everything that requests need around it.

  Attributes:
    engine: runs the requests.
    model: facts of the model.
    options: of the server.
    metrics: counters for /metrics and the status page.
    draining: no new requests; set when the process is told to end.
  """

  def __init__(
    self, engine: EngineStream, model: ServedModel, options: ServerOptions
  ):
    self.engine = engine
    self.model = model
    self.options = options
    self.metrics = Metrics(model.names[0])
    self.draining = False
    self.running: dict[str, tuple[str, ...]] = {}
    self._structured: StructuredOutput | None = None
    self._longest_text = _longest_text(model)

  @property
  def alive(self) -> bool:
    """The engine has not failed, or says nothing about that."""
    return getattr(self.engine, 'alive', True)

  @property
  def tokenizer(self) -> Tokenizer:
    """The tokenizer; refuses the request where there is none."""
    if self.model.tokenizer is None:
      raise ApiError(
        400,
        'this model has no tokenizer: use /v1/completions with a prompt of '
        'token ids',
        code='no_tokenizer',
      )
    return self.model.tokenizer

  def check_model(self, name: str | None):
    """Refuses a model that is not served."""
    if name is not None and name not in self.model.names:
      raise ApiError(
        404,
        f'no model {name!r:.200} here; use {self.model.names[0]!r}',
        param='model',
        code='model_not_found',
      )

  async def chat_prompt(
    self, request: protocol.Conversation | protocol.TokenizeRequest
  ) -> Prompt:
    """Renders and encodes a conversation, off the event loop."""
    arguments = _template_arguments(request)
    tokenizer = self.tokenizer

    def render() -> Prompt:
      text = tokenizer.apply_chat_template(request.messages, **arguments)
      thinking = text.rstrip().endswith('<think>')
      return Prompt(self._encode(text), text, thinking)

    return await _in_thread(render, 'messages')

  async def text_prompts(self, prompt: str | Sequence[Any]) -> list[Prompt]:
    """The prompts of a completion: texts, or lists of ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
      prompt = [prompt]
    if isinstance(prompt[0], str):
      encode = lambda: [Prompt(self._encode(text), text) for text in prompt]
      return await _in_thread(encode, 'prompt')
    return [Prompt(tuple(ids)) for ids in prompt]

  async def token_filter(self, **what: Any) -> TokenFilter:
    """A grammar for one sequence; see `StructuredOutput.token_filter`."""
    if self._structured is None:
      self._structured = StructuredOutput(self.tokenizer, self.model.vocab_size)
    structured = self._structured
    make = lambda: structured.token_filter(**what)
    return await _in_thread(make, 'response_format')

  def requests(
    self,
    request: protocol.Sampled,
    response_id: str,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | None,
    logprobs: int | None,
    filters: Sequence[TokenFilter | None],
  ) -> list[Request]:
    """Engine requests: `n` of each prompt, in order of prompts."""
    if self.draining:
      raise ApiError(
        503,
        'the server is shutting down',
        code='draining',
        headers={'Retry-After': '5'},
      )
    seconds = [request.timeout, self.options.request_seconds]
    seconds = min((s for s in seconds if s is not None), default=None)
    made = []
    for i in range(len(prompts) * request.n):
      prompt = prompts[i // request.n]
      self._check_prompt(prompt, max_new_tokens)
      seed = None if request.seed is None else request.seed + i % request.n
      sampling = self._sampling(request, max_new_tokens, logprobs, seed)
      made.append(
        Request(
          f'{response_id}-{i}',
          prompt.ids,
          sampling,
          priority=request.priority,
          deadline=seconds and time.monotonic() + seconds,
          token_filter=filters[i],
        )
      )
    if self.options.log_requests:
      for one in made:
        _LOG.info('%s: %s %r', one.request_id, one.sampling, one.prompt_ids)
    return made

  async def idle(self, seconds: float):
    """Waits until no request is left, `seconds` at most."""
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(seconds):
        while self.running:
          await asyncio.sleep(0.01)

  def detokenizer(self, request: protocol.Sampled) -> Detokenizer | None:
    """What turns one sequence's ids into text; None without a tokenizer."""
    if self.model.tokenizer is None:
      if request.stop:
        raise ApiError(400, 'stop needs a tokenizer', param='stop')
      return None
    return Detokenizer(
      self.model.tokenizer,
      request.stops(),
      include_stop=request.include_stop_str_in_output,
      skip_special_tokens=request.skip_special_tokens,
    )

  def _encode(self, text: str) -> tuple[int, ...]:
    """Ids of a prompt; text that can never fit costs no time."""
    tokenizer = self.tokenizer
    if len(text) > self._longest_text:
      raise ApiError(
        400,
        f'the prompt has {len(text)} characters: surely more than the '
        f'context of {self.model.max_model_len} tokens: shorten it',
        code='context_length_exceeded',
      )
    return tuple(tokenizer.encode(text))

  def _sampling(self, request, max_new_tokens, logprobs, seed):
    defaults = self.model.sampling
    value = lambda name, neutral: (
      defaults.get(name, neutral)
      if getattr(request, name) is None
      else getattr(request, name)
    )
    return SamplingParams(
      max_new_tokens=max_new_tokens,
      temperature=value('temperature', 1.0),
      top_p=value('top_p', 1.0),
      top_k=max(0, int(value('top_k', 0))),
      min_p=value('min_p', 0.0),
      seed=seed,
      stop_token_ids=tuple(request.stop_token_ids or ()),
      ignore_eos=request.ignore_eos,
      logprobs=logprobs,
      num_speculative_tokens=request.num_speculative_tokens,
    )

  def _check_prompt(self, prompt: Prompt, max_new_tokens: int | None):
    if not prompt.ids:
      raise ApiError(400, 'the prompt is empty', param='prompt')
    if max(prompt.ids) >= self.model.vocab_size:
      raise ApiError(
        400,
        f'token id {max(prompt.ids)} is not below {self.model.vocab_size}',
        param='prompt',
      )
    limit, given = self.model.max_model_len, len(prompt.ids)
    if given + (max_new_tokens or 1) > limit:
      raise ApiError(
        400,
        f'the prompt has {given} tokens; with {max_new_tokens or 1} new ones '
        f'it exceeds the context of {limit}: shorten one of them',
        param='messages' if prompt.thinking else 'prompt',
        code='context_length_exceeded',
      )


def _longest_text(model: ServedModel) -> int:
  """Characters beyond which no text fits into the context."""
  tokenizer = model.tokenizer
  if tokenizer is None:
    return 0
  text = lambda i: tokenizer.decode([i], skip_special_tokens=False)
  longest = max(len(text(i)) for i in range(tokenizer.vocab_size))
  # Some tokenizers compose characters first, which shortens the text.
  return 4 * longest * model.max_model_len


def new_id(prefix: str) -> str:
  """A fresh id, as in chatcmpl-0123456789abcdef..."""
  return f'{prefix}-{uuid.uuid4().hex}'


def as_dicts(tools: Sequence[protocol.Tool] | None) -> list[dict] | None:
  """Tools as the client wrote them, for the template and the parsers."""
  if not tools:
    return None
  return [tool.model_dump(exclude_unset=True) for tool in tools]


def _template_arguments(request) -> dict[str, Any]:
  """Template variables: the request's fields, then its explicit ones."""
  arguments: dict[str, Any] = {
    'tools': as_dicts(request.tools),
    'add_generation_prompt': request.add_generation_prompt,
  }
  if request.reasoning_effort == 'none':
    arguments['enable_thinking'] = False
  elif request.reasoning_effort is not None:
    arguments['reasoning_effort'] = request.reasoning_effort
  if request.thinking is not None:
    arguments['enable_thinking'] = request.thinking.type == 'enabled'
  given = request.chat_template_kwargs or {}
  if 'thinking' in given:
    raise ApiError(
      400,
      'chat_template_kwargs.thinking has no effect on this model: use '
      'enable_thinking',
      param='chat_template_kwargs',
    )
  taken = {'messages', 'tools', 'add_generation_prompt', 'self'} & set(given)
  if taken:
    raise ApiError(
      400,
      f'chat_template_kwargs may not set {", ".join(sorted(taken))}',
      param='chat_template_kwargs',
    )
  if not isinstance(given.get('enable_thinking', True), bool):
    raise ApiError(
      400,
      f'enable_thinking={given["enable_thinking"]!r:.80} must be true or false',
      param='chat_template_kwargs',
    )
  return {**arguments, **given}


async def _in_thread(work, param: str):
  """Runs `work` off the event loop; its `ValueError` is the client's."""
  try:
    return await asyncio.to_thread(work)
  except ValueError as error:
    raise ApiError(400, str(error), param=param, code='invalid_value') from None
