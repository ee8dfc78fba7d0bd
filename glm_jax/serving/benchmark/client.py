"""Replays a trace against an OpenAI-compatible server and takes the time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np

from glm_jax.serving.benchmark.traces import Session, Turn


@dataclasses.dataclass
class Record:
  """How one request went.

  Attributes:
    begin: seconds since the start of the run, when it was sent.
    prompt_tokens: as the server counts them.
    cached_tokens: of them, taken from its prefix cache.
    output_tokens: as the server counts them.
    times: seconds since the start at which text arrived.
    text: the answer.
    ids: its tokens, where they were asked for.
    names: the same as `logprobs` names them, where those were asked for.
    top: log probabilities of the best tokens in each one's place, by name.
    error: why it failed; None if it did not.
    status: of HTTP, 0 without an answer.
  """

  begin: float = 0.0
  prompt_tokens: int = 0
  cached_tokens: int = 0
  output_tokens: int = 0
  times: list[float] = dataclasses.field(default_factory=list)
  text: str = ''
  ids: list[int] = dataclasses.field(default_factory=list)
  names: list[str] = dataclasses.field(default_factory=list)
  top: list[dict[str, float]] = dataclasses.field(default_factory=list)
  error: str | None = None
  status: int = 0

  @property
  def end(self) -> float:
    """Seconds since the start at which the last text arrived."""
    return self.times[-1] if self.times else self.begin

  @property
  def first(self) -> float:
    """Seconds from sending to the first text."""
    return self.times[0] - self.begin

  @property
  def per_token(self) -> float:
    """Mean seconds between tokens after the first one."""
    return (self.end - self.times[0]) / max(self.output_tokens - 1, 1)


@dataclasses.dataclass(frozen=True)
class Run:
  """A whole replay.

  Attributes:
    records: one a request.
    seconds: from the first request to the last answer.
    counters: growth of the server's metrics by name; empty without any.
    max_concurrency: sessions at once; None for no limit.
    request_rate: sessions a second; infinite for all at once.
  """

  records: list[Record]
  seconds: float
  counters: Mapping[str, float]
  max_concurrency: int | None
  request_rate: float


def replay(
  url: str,
  trace: Sequence[Session],
  *,
  model: str | None = None,
  api_key: str | None = None,
  max_concurrency: int | None = None,
  request_rate: float = float('inf'),
  temperature: float = 0.0,
  seed: int = 0,
  token_ids: bool = False,
  logprobs: int | None = None,
) -> Run:
  """Runs `trace` against the server at `url` and waits for all of it.

  Args:
    url: with or without /v1.
    trace: what to ask for.
    model: its name there; None asks the server.
    api_key: sent as a bearer token.
    max_concurrency: sessions at once; None for no limit.
    request_rate: sessions a second, at random intervals (a Poisson process).
    temperature: of sampling.
    seed: of the intervals.
    token_ids: ask for the tokens themselves (`return_token_ids`); a model
      without a tokenizer gives nothing else.
    logprobs: of so many tokens in each place; of completions alone.

  Raises:
    ValueError: no such server, or it refuses to name its model.
  """
  base = url.rstrip('/').removesuffix('/v1')
  work = _Replay(base, model, api_key, temperature, token_ids, logprobs)
  return asyncio.run(
    work.run(trace, max_concurrency, request_rate, np.random.default_rng(seed))
  )


class _Replay:
  """One replay: the session with the server, and the clock."""

  def __init__(self, base, model, api_key, temperature, token_ids, logprobs):
    self._base, self._model = base, model
    self._headers = {'Authorization': f'Bearer {api_key}'} if api_key else {}
    self._temperature, self._token_ids = temperature, token_ids
    self._logprobs = logprobs
    self._start = 0.0

  async def run(self, trace, max_concurrency, request_rate, rng) -> Run:
    gate = asyncio.Semaphore(max_concurrency or len(trace))
    async with aiohttp.ClientSession(
      headers=self._headers,
      timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
      connector=aiohttp.TCPConnector(limit=0),
      read_bufsize=_LINE,
    ) as self._http:
      self._model = self._model or await self._first_model()
      before = await self._counters()
      self._start = time.perf_counter()
      tasks = []
      for session in trace:
        tasks.append(asyncio.create_task(self._session(session, gate)))
        if np.isfinite(request_rate):
          await asyncio.sleep(rng.exponential(1 / request_rate))
      found = await asyncio.gather(*tasks)
      seconds = time.perf_counter() - self._start
      after = await self._counters()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    records = [record for records in found for record in records]
    return Run(records, seconds, grown, max_concurrency, request_rate)

  async def _session(self, session: Session, gate) -> list[Record]:
    """The turns of a session; one that fails ends it."""
    messages: list[dict[str, Any]] = []
    if session.system is not None:
      messages.append({'role': 'system', 'content': session.system})
    records = []
    async with gate:
      for turn in session.turns:
        path, body = self._body(session, turn, messages)
        record = Record(begin=time.perf_counter() - self._start)
        records.append(record)
        try:
          await self._ask(path, body, record)
        except (aiohttp.ClientError, OSError, ValueError) as error:
          record.error = f'{type(error).__name__}: {error}'
        if record.error is not None:
          break
        messages.append({'role': 'assistant', 'content': record.text})
    return records

  def _body(self, session: Session, turn: Turn, messages):
    body = {
      'model': self._model,
      'max_tokens': turn.output_tokens,
      'temperature': self._temperature,
      'stream': True,
      'stream_options': {'include_usage': True},
      'ignore_eos': True,
    }
    if self._token_ids:
      body['return_token_ids'] = True
    if self._logprobs is not None:
      body['logprobs'] = self._logprobs
    if turn.prompt_ids is not None:
      return '/v1/completions', {**body, 'prompt': list(turn.prompt_ids)}
    messages.append(turn.message)
    tools = {'tools': list(session.tools)} if session.tools else {}
    # The calls that a benchmark model happens to write are its text.
    tools |= {'tool_choice': 'none'} if tools else {}
    return '/v1/chat/completions', {**body, 'messages': list(messages), **tools}

  async def _ask(self, path: str, body: dict, record: Record):
    async with self._http.post(f'{self._base}{path}', json=body) as answer:
      record.status = answer.status
      if answer.status != 200:
        text = await answer.text()
        record.error = f'HTTP {answer.status}: {text:.300}'
        return
      done = False
      async for line in answer.content:
        if not line.startswith(b'data: '):
          continue
        data = line[6:].strip()
        if data == b'[DONE]':
          done = True
          break
        self._event(json.loads(data), record)
      if not done and record.error is None:
        record.error = 'the stream broke off'
      if not record.times and record.error is None:
        record.error = 'no text came'

  def _event(self, event: dict, record: Record):
    if event.get('error'):
      record.error = str(event['error'].get('message'))
      return
    usage = event.get('usage')
    if usage:
      record.prompt_tokens = usage['prompt_tokens']
      record.output_tokens = usage['completion_tokens']
      details = usage.get('prompt_tokens_details') or {}
      record.cached_tokens = details.get('cached_tokens') or 0
    for choice in event.get('choices') or ():
      delta = choice.get('delta', choice)
      # The first event of a stream may hold no token yet.
      parts = [delta.get(key) or '' for key in _TEXT]
      ids = choice.get('token_ids') or ()
      record.ids += ids
      told = choice.get('logprobs') or {}
      record.names += told.get('tokens') or ()
      record.top += told.get('top_logprobs') or ()
      if any(parts) or ids or choice.get('finish_reason'):
        record.times.append(time.perf_counter() - self._start)
        record.text += ''.join(parts[1:])

  async def _first_model(self) -> str:
    try:
      async with self._http.get(f'{self._base}/v1/models') as answer:
        listed = await answer.json(content_type=None)
        return listed['data'][0]['id']
    except (aiohttp.ClientError, KeyError, OSError, TypeError) as error:
      raise ValueError(
        f'no OpenAI-compatible server at {self._base}: {error!r}'
      ) from error

  async def _counters(self) -> dict[str, float]:
    """Counters of the server under vLLM's names; {} without metrics."""
    try:
      async with self._http.get(f'{self._base}/metrics') as answer:
        text = await answer.text() if answer.status == 200 else ''
    except (aiohttp.ClientError, OSError):
      text = ''
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
      position = _POSITION.search(labels or '')
      key = f'{name}:{position.group(1)}' if position else name
      found[key] = found.get(key, 0.0) + float(value)
    return found


_LINE = 1 << 26  # bytes: the ids of a prompt of a million tokens
# Reasoning is not sent back: what the client repeats is the content.
_TEXT = ('reasoning_content', 'content', 'text')
_SAMPLE = re.compile(
  r'^vllm:(spec_decode_\w+_total|prefix_cache_\w+_total)(\{.*\})? (\S+)$', re.M
)
_POSITION = re.compile(r'position="(\d+)"')
