"""A double of the engine that says what a test tells it to say.

It keeps the contract of `serving.request.EngineStream` without a model, so
that a test of the front end decides every token and every delay.
"""

import asyncio
import random
import time

import numpy as np
from chat_tokenizer import tokenizer

from glm_jax.serving.request import (
  InvalidRequest,
  Output,
  QueueFull,
  TokenLogprob,
)

VOCAB = 300
PAGE = 64


class ScriptedEngine:
  """Emits `script(request)` in steps of `step_tokens` ids.

  Attributes:
    open: ids of the requests inside.
    seen: every request that was accepted, in order.
    ended: request id -> finish reason.
  """

  def __init__(self, answer='Hello', *, step_tokens=1, delay=0.0, limit=1000,
               cached=True):  # fmt: skip
    self.answer = answer
    self.step_tokens = step_tokens
    self.delay = delay
    self.limit = limit
    self.cached = cached
    self.open = {}
    self.seen = []
    self.ended = {}
    self.prefixes = set()
    self.draining = False
    self.flushes = self.rounds = 0
    self.tokens = {'prompt': 0, 'generation': 0}
    self.prefix = dict.fromkeys(
      ('query_tokens', 'hit_tokens', 'evicted_pages', 'restored_pages',
       'shortened_hits'), 0
    )  # fmt: skip
    self.fail = None

  @property
  def ready(self):
    return not self.draining

  async def generate(self, request):
    if self.draining:
      raise QueueFull('draining', 5.0, draining=True)
    if len(self.open) >= self.limit:
      raise QueueFull('no place', 2.5)
    if max(request.prompt_ids) >= VOCAB:
      raise InvalidRequest('bad id')
    assert request.request_id not in self.open
    self.seen.append(request)
    stop = self.open[request.request_id] = asyncio.Event()
    self.ended[request.request_id] = 'abort'  # Unless it gets further.
    base = dict(
      request_id=request.request_id,
      prompt_tokens=len(request.prompt_ids),
      cached_tokens=self._cached(request.prompt_ids),
      queued_seconds=0.25,
    )
    try:
      ids, reason = self._ids(request)
      for at in range(0, len(ids), self.step_tokens):
        end = await self._wait(stop, request)
        if self.fail is not None:
          raise self.fail
        if end is not None:
          self.ended[request.request_id] = end
          yield Output(finished=True, finish_reason=end, **base)
          return
        last = at + self.step_tokens >= len(ids)
        if last:
          self.ended[request.request_id] = reason
        new = tuple(ids[at : at + self.step_tokens])
        rounds = at // self.step_tokens + 1
        self.rounds += 1
        self.tokens['generation'] += len(new)
        yield Output(
          new_ids=new,
          logprobs=self._logprobs(request, new),
          finished=last,
          finish_reason=reason if last else None,
          drafted=(rounds, rounds),
          accepted=(rounds, 0),
          rounds=rounds,
          **base,
        )
    finally:
      del self.open[request.request_id]

  async def abort(self, request_id):
    if request_id not in self.open:
      return False
    self.open[request_id].set()
    return True

  async def flush_cache(self):
    if self.open:
      return False
    self.flushes += 1
    self.prefixes.clear()
    return True

  async def stats(self):
    return {
      'requests': {'running': len(self.open), 'waiting': 0},
      'tokens': dict(self.tokens),
      'pages': {'used': 3, 'idle': 2, 'free': 5, 'total': 10},
      'prefix': dict(self.prefix),
      'drafts': {
        'rounds': self.rounds,
        'drafted': [self.rounds, self.rounds],
        'accepted': [self.rounds, 0],
      },
      'host': {'bytes': 300, 'budget': 400, 'put': 5, 'fetched': 2},
      'disk': None,
      'preemptions': 4,
      'corrupted': 0,
      'note': 'text is not shown',
    }

  async def drain(self):
    self.draining = True
    while self.open:
      await asyncio.sleep(0.005)

  async def _wait(self, stop, request):
    """The reason to end now, if there is one."""
    try:
      await asyncio.wait_for(stop.wait(), self.delay or 1e-4)
      return 'abort'
    except TimeoutError:
      late = request.deadline is not None
      late = late and time.monotonic() >= request.deadline
      return 'deadline' if late else None

  def _ids(self, request):
    """(new ids, finish reason)."""
    answer = self.answer(request) if callable(self.answer) else self.answer
    ids = list(answer) if not isinstance(answer, str) else None
    eos = tokenizer().stop_ids[0]
    if ids is None:
      ids = [*tokenizer().encode(answer), eos]
    if request.token_filter is not None:
      ids = self._filtered(request)
    sampling = request.sampling
    stops = set(sampling.stop_token_ids)
    stops |= set() if sampling.ignore_eos else set(tokenizer().stop_ids)
    for n, token in enumerate(ids, 1):
      if token in stops:
        return ids[:n], 'stop'
      if n == sampling.max_new_tokens:
        return ids[:n], 'length'
    return ids, 'stop'

  def _filtered(self, request):
    """Random ids that the filter allows; closes what can be closed."""
    pick, ids = random.Random(request.sampling.seed or 0), []
    while len(ids) < 500:
      bits = request.token_filter.allowed(ids).view(np.uint8)
      options = np.flatnonzero(np.unpackbits(bits, bitorder='little'))
      ends = set(options) & set(tokenizer().stop_ids)
      close = [i for i in options if tokenizer().decode([i]) in ('"', '}', ']')]
      close += [i for i in options if tokenizer().decode([i])[:2] == '</']
      if ends:
        return [*ids, min(ends)]
      ids.append(int(pick.choice(close or list(options))))
    return ids

  def _cached(self, prompt):
    """Whole pages seen before, as a prefix cache would count them."""
    pages = [tuple(prompt[:n]) for n in range(PAGE, len(prompt), PAGE)]
    hit = sum(1 for page in pages if page in self.prefixes)
    if self.cached:
      self.prefixes.update(pages)
    self.prefix['query_tokens'] += len(prompt)
    self.prefix['hit_tokens'] += hit * PAGE
    return hit * PAGE

  def _logprobs(self, request, new):
    if request.sampling.logprobs is None:
      return None
    top = range(request.sampling.logprobs)
    return tuple(
      TokenLogprob(i, -0.5, tuple(((i + j) % VOCAB, -0.5 - j) for j in top))
      for i in new
    )
