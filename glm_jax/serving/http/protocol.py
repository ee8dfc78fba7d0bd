"""What clients may ask: the requests of the HTTP interface.

Names and defaults are OpenAI's, with vLLM's additions. A field that is not
known is refused rather than ignored, since it may have been meant; fields
that say nothing about the answer are accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_TOKEN = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Model(pydantic.BaseModel):
  """Base of everything here: strict about names and about NaN."""

  model_config = pydantic.ConfigDict(
    extra='forbid', allow_inf_nan=False, protected_namespaces=()
  )


class StreamOptions(Model):
  """What a stream tells besides the text."""

  include_usage: bool = False
  continuous_usage_stats: bool = False
  include_obfuscation: bool = False


class Sampled(Model):
  """Fields that every request for text shares."""

  model: str | None = None
  temperature: float | None = Field(None, ge=0, le=1e6)
  top_p: float | None = Field(None, gt=0, le=1)
  top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN)
  min_p: float | None = Field(None, ge=0, le=1)
  n: int = Field(1, ge=1, le=MAX_CHOICES)
  seed: Seed | None = None
  stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
  stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOPS)
  include_stop_str_in_output: bool = False
  ignore_eos: bool = False
  skip_special_tokens: bool = True
  stream: bool = False
  stream_options: StreamOptions | None = None
  priority: int = Field(0, ge=-(2**31), lt=2**31)
  timeout: float | None = Field(
    None, gt=0, le=1e9, description='Seconds after which the request ends.'
  )
  num_speculative_tokens: int | None = Field(None, ge=0, le=8)
  return_token_ids: bool = False
  # No such sampling here; the neutral value is accepted.
  presence_penalty: Literal[0] | None = None
  frequency_penalty: Literal[0] | None = None
  repetition_penalty: Literal[1] | None = None
  logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
  # Without any effect on the answer.
  user: str | None = None
  metadata: dict[str, Any] | None = None
  store: bool | None = None
  service_tier: str | None = None
  prompt_cache_key: str | None = None
  prompt_cache_retention: str | None = None
  safety_identifier: str | None = None

  @pydantic.model_validator(mode='after')
  def _stream_options_need_a_stream(self):
    if self.stream_options is not None and not self.stream:
      raise ValueError('stream_options need stream=true')
    return self

  def stops(self) -> tuple[str, ...]:
    """The stop strings."""
    stop = self.stop or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


class FunctionName(Model):
  """Names a function."""

  name: str = Field(min_length=1)


class NamedTool(Model):
  """`tool_choice` for one function."""

  type: Literal['function'] = 'function'
  function: FunctionName


class Function(Model):
  """A function that the model may call."""

  name: str = Field(pattern=r'^[a-zA-Z0-9_.:/-]{1,256}$')
  description: str | None = None
  parameters: dict[str, Any] | None = None
  strict: bool | None = None


class Tool(Model):
  """A tool; functions are the only kind."""

  type: Literal['function'] = 'function'
  function: Function


class JsonSchema(Model):
  """A JSON schema that the answer satisfies."""

  name: str = ''
  description: str | None = None
  schema_: dict[str, Any] | bool | None = Field(None, alias='schema')
  strict: bool | None = None


class ResponseFormat(Model):
  """The form of the answer."""

  type: Literal['text', 'json_object', 'json_schema']
  json_schema: JsonSchema | None = None

  @pydantic.model_validator(mode='after')
  def _schema_where_needed(self):
    given = (
      self.json_schema is not None and self.json_schema.schema_ is not None
    )
    if given != (self.type == 'json_schema'):
      raise ValueError(
        f'type {self.type!r} {"takes no" if given else "needs a"} '
        'json_schema.schema'
      )
    return self


class Thinking(Model):
  """Z.ai's switch for reasoning."""

  type: Literal['enabled', 'disabled']


class Conversation(Model):
  """Fields that decide the prompt of a chat."""

  messages: list[dict[str, Any]] = Field(min_length=1)
  tools: list[Tool] | None = None
  chat_template_kwargs: dict[str, Any] | None = None
  add_generation_prompt: bool = True
  reasoning_effort: (
    Literal['none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'] | None
  ) = None
  thinking: Thinking | None = None


class ChatRequest(Conversation, Sampled):
  """/v1/chat/completions."""

  max_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN)
  max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN)
  logprobs: bool = False
  top_logprobs: int | None = Field(None, ge=0, le=20)
  tool_choice: Literal['none', 'auto', 'required'] | NamedTool | None = None
  parallel_tool_calls: bool = True
  include_reasoning: bool = True
  response_format: ResponseFormat | None = None

  @pydantic.model_validator(mode='after')
  def _consistent(self):
    if self.top_logprobs is not None and not self.logprobs:
      raise ValueError('top_logprobs need logprobs=true')
    choice = self.tool_choice
    if choice not in (None, 'none', 'auto') and not self.tools:
      raise ValueError('tool_choice needs tools')
    if isinstance(choice, NamedTool):
      names = [tool.function.name for tool in self.tools]
      if choice.function.name not in names:
        raise ValueError(
          f'tool_choice names {choice.function.name!r}; tools are {names}'
        )
    return self


class CompletionRequest(Sampled):
  """/v1/completions."""

  prompt: (
    str
    | Tokens
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[Tokens], Field(min_length=1)]
  )
  max_tokens: int | None = Field(16, ge=1, le=MAX_TOKEN)
  logprobs: int | None = Field(None, ge=0, le=20)
  echo: bool = False
  best_of: Literal[1] | None = None
  suffix: Literal[''] | None = None
  response_format: ResponseFormat | None = None

  @pydantic.model_validator(mode='after')
  def _consistent(self):
    if self.echo and self.logprobs is not None:
      raise ValueError(
        'echo with logprobs is not supported: prompts have no logprobs'
      )
    return self


class TokenizeRequest(Model):
  """/tokenize of a text or of a conversation."""

  model: str | None = None
  prompt: str | None = None
  messages: list[dict[str, Any]] | None = Field(None, min_length=1)
  tools: list[Tool] | None = None
  chat_template_kwargs: dict[str, Any] | None = None
  add_generation_prompt: bool = True
  reasoning_effort: str | None = None
  thinking: Thinking | None = None
  add_special_tokens: bool = False
  return_token_strs: bool = False

  @pydantic.model_validator(mode='after')
  def _one_of_both(self):
    if (self.prompt is None) == (self.messages is None):
      raise ValueError('give either prompt or messages')
    if self.add_special_tokens:
      raise ValueError('add_special_tokens: GLM adds none; write them')
    return self


class DetokenizeRequest(Model):
  """/detokenize."""

  model: str | None = None
  tokens: list[TokenId]


class AbortRequest(Model):
  """/abort_request: by the id of the response, or all."""

  request_id: str | None = Field(
    None, validation_alias=pydantic.AliasChoices('request_id', 'rid')
  )
  abort_all: bool = False

  @pydantic.model_validator(mode='after')
  def _one_of_both(self):
    if (self.request_id is None) != self.abort_all:
      raise ValueError('give either request_id or abort_all=true')
    return self
