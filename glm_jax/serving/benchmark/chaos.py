"""Clients that misbehave in every way, side by side with ones that do not.

What they get is judged: an answer that was finished must be the one that the
same request gets alone, and no request may be refused in an unplanned way.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np

_PATH = '/v1/completions'
# What each kind of client may be answered; 0 is no answer at all.
_GOOD = frozenset([200, 429])
KINDS: Mapping[str, frozenset[int]] = {
  'complete': _GOOD,
  'stream': _GOOD,
  'several': _GOOD,
  'slow reader': _GOOD,
  'leaves while sending': frozenset([0]),
  'leaves while queued': frozenset([0]),
  'leaves at the first token': _GOOD,
  'leaves in the middle': _GOOD,
  'aborts by id': _GOOD,
  'deadline': frozenset([200, 408, 429]),
  'no JSON': frozenset([400]),
  'bad field': frozenset([400]),
  'too long': frozenset([400]),
  'too large': frozenset([413]),
  'no such path': frozenset([404]),
}
_WHOLE = ('complete', 'stream', 'several', 'slow reader')


@dataclasses.dataclass(frozen=True)
class Ask:
  """A request that has one right answer.

  Attributes:
    prompt_ids: of the prompt.
    max_tokens: new tokens; greedy, and no end token ends them earlier.
  """

  prompt_ids: tuple[int, ...]
  max_tokens: int


@dataclasses.dataclass
class Outcome:
  """What came of all requests.

  Attributes:
    statuses: (kind, status of HTTP) -> how often.
    finished: answers that ran to their end and were compared.
    problems: what must not happen, in words; at most a few of a kind.
  """

  statuses: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  finished: int = 0
  problems: list[str] = dataclasses.field(default_factory=list)


def make_asks(
  count: int, vocab_size: int, longest: int, *, seed: int = 0
) -> list[Ask]:
  """Requests that share prefixes of whole and broken pages in many ways."""
  rng = np.random.default_rng(seed)
  base = rng.integers(0, vocab_size, longest).tolist()
  made = []
  for _ in range(count):
    shared = int(rng.integers(0, longest * 3 // 4))
    own = rng.integers(0, vocab_size, int(rng.integers(1, longest // 4)))
    prompt = tuple(base[:shared] + own.tolist())
    made.append(Ask(prompt, int(rng.integers(1, 24))))
  return made


async def alone(url: str, asks: Sequence[Ask]) -> dict[Ask, list[int]]:
  """The right answers: each request alone, with nothing cached."""
  answers = {}
  async with aiohttp.ClientSession() as http:
    for ask in asks:
      async with http.post(f'{url}/flush_cache') as flushed:
        flushed.raise_for_status()
      async with http.post(f'{url}{_PATH}', json=_body(ask)) as answer:
        answer.raise_for_status()
        answers[ask] = (await answer.json())['choices'][0]['token_ids']
  return answers


class Chaos:
  """Sends `count` requests of random kinds at random times.

  Attributes:
    outcome: fills up while it runs.
  """

  def __init__(
    self,
    url: str,
    answers: Mapping[Ask, list[int]],
    *,
    max_body_bytes: int,
    max_model_len: int,
    per_second: float,
    seed: int = 0,
  ):
    """Prepares requests to the server at `url`.

    Args:
      url: without a path.
      answers: of `alone`.
      max_body_bytes: what the server takes.
      max_model_len: of the server.
      per_second: arrivals, a Poisson process.
      seed: of kinds and times.
    """
    self._url = url
    self._answers = dict(answers)
    self._asks = list(answers)
    self._max_body_bytes = max_body_bytes
    self._max_model_len = max_model_len
    self._per_second = per_second
    self._rng = np.random.default_rng(seed)
    self.outcome = Outcome()
    self.leaving = False  # The server has been told to end.

  async def run(self, count: int):
    """Sends them and waits for all."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
      connector=connector, timeout=timeout
    ) as self._http:
      tasks = []
      for _ in range(count):
        kind = list(KINDS)[self._rng.integers(len(KINDS))]
        ask = self._asks[self._rng.integers(len(self._asks))]
        at = int(self._rng.integers(1, 6))
        tasks.append(asyncio.create_task(self._one(kind, ask, at)))
        await asyncio.sleep(self._rng.exponential(1 / self._per_second))
      await asyncio.gather(*tasks)

  async def _one(self, kind: str, ask: Ask, at: int):
    try:
      status = await self._attempt(kind, ask, at)
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
      status = 0
      if not self.leaving and 0 not in KINDS[kind]:
        self._problem(kind, f'{type(error).__name__}: {error}')
    self.outcome.statuses[kind, status] += 1
    planned = KINDS[kind] | ({0, 503} if self.leaving else set())
    if status not in planned:
      self._problem(kind, f'HTTP {status}')

  async def _attempt(self, kind: str, ask: Ask, at: int) -> int:
    if kind in ('leaves while sending', 'leaves while queued'):
      return await self._leave(kind, ask)
    path, data = self._request(kind, ask)
    headers = {'Content-Type': 'application/json'}
    url = f'{self._url}{path}'
    async with self._http.post(url, data=data, headers=headers) as answer:
      if answer.status != 200:
        await answer.read()
        return answer.status
      if kind in ('complete', 'several', 'deadline'):
        self._compare(kind, ask, _complete(await answer.json()))
        return 200
      pace = 0.02 * at if kind == 'slow reader' else 0.0
      events, name = [], ''
      async for line in answer.content:
        if not line.startswith(b'data: '):
          continue
        if line.startswith(b'data: [DONE]'):
          self._compare(kind, ask, _streamed(events))
          break
        events.append(json.loads(line[6:]))
        name = events[0].get('id', '')
        if kind == 'leaves at the first token' and len(events) == 2:
          break
        if kind == 'leaves in the middle' and len(events) == 1 + at:
          break
        if kind == 'aborts by id' and len(events) == 1 + at:
          await self._abort(name)
        await asyncio.sleep(pace)
      return 200

  def _request(self, kind: str, ask: Ask) -> tuple[str, bytes]:
    """(path, body) of a request of this kind."""
    if kind == 'no JSON':
      return _PATH, json.dumps(_body(ask)).encode()[:-2]
    if kind == 'too large':
      return _PATH, b'[' * (self._max_body_bytes + 1)
    if kind == 'no such path':
      return '/v1/nothing', b'{}'
    more: dict[str, Any] = {
      'several': {'n': 2},
      'deadline': {'timeout': 0.01},
      'bad field': {'temperature': -1},
      'too long': {'max_tokens': self._max_model_len},
    }.get(kind, {})
    stream = ('stream', 'slow reader', 'aborts by id')
    if kind in stream or kind.startswith('leaves'):
      more = {'stream': True}
    return _PATH, json.dumps({**_body(ask), **more}).encode()

  async def _leave(self, kind: str, ask: Ask) -> int:
    """Closes the connection in the middle of the body, or right after it."""
    host, port = self._url.removeprefix('http://').rsplit(':', 1)
    _, writer = await asyncio.open_connection(host.strip('[]'), int(port))
    body = json.dumps({**_body(ask), 'stream': True}).encode()
    head = (
      f'POST {_PATH} HTTP/1.1\r\nHost: chaos\r\nContent-Type: '
      f'application/json\r\nContent-Length: {len(body)}\r\n\r\n'
    )
    whole = head.encode() + body
    writer.write(whole[: -len(body) // 2] if 'sending' in kind else whole)
    await writer.drain()
    writer.close()
    return 0

  async def _abort(self, name: str):
    url = f'{self._url}/abort_request'
    async with self._http.post(url, json={'request_id': name}) as answer:
      if answer.status != 200:
        self._problem('aborts by id', f'/abort_request: {answer.status}')

  def _compare(self, kind: str, ask: Ask, choices: Sequence[tuple]):
    """Judges choices (ids, finish reason, error) of an answer that ended."""
    right = self._answers[ask]
    for ids, reason, error in choices:
      if error is not None:
        if kind != 'deadline' and not self.leaving:
          self._problem(kind, f'error {error}')
        continue
      if reason == 'length':
        self.outcome.finished += 1
        if ids != right:
          self._problem(kind, f'{ids} is not {right}')
      elif ids != right[: len(ids)]:
        self._problem(kind, f'{ids} does not begin {right}')
      elif kind in _WHOLE and not self.leaving:
        self._problem(kind, f'finish reason {reason}')

  def _problem(self, kind: str, what: str):
    if len(self.outcome.problems) < 20:
      self.outcome.problems.append(f'{kind}: {what}')


def _body(ask: Ask) -> dict[str, Any]:
  return {
    'prompt': list(ask.prompt_ids),
    'max_tokens': ask.max_tokens,
    'temperature': 0,
    'ignore_eos': True,
    'return_token_ids': True,
  }


def _complete(answer: dict) -> list[tuple]:
  if 'error' in answer:
    return [([], None, answer['error']['code'])]
  return [
    (choice['token_ids'], choice['finish_reason'], None)
    for choice in answer['choices']
  ]


def _streamed(events: Sequence[dict]) -> list[tuple]:
  ids: list[int] = []
  reason = None
  for event in events:
    if 'error' in event:
      return [(ids, None, event['error']['code'])]
    for choice in event['choices']:
      ids += choice['token_ids']
      reason = choice['finish_reason'] or reason
  return [(ids, reason, None)]
