"""What goes into the engine and what comes out: the interface of serving.

Everything here is plain Python: a front end needs no jax. The engine itself
is `engine.Engine`, with `engine.AsyncEngine` around it; both follow the
protocols below, so that a front end can be tested against a small double.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np

FinishReason = Literal['stop', 'length', 'abort', 'deadline', 'error']
MAX_LOGPROBS = 20


class InvalidRequest(ValueError):
  """The request can never run (HTTP 400); the message names the remedy."""


class QueueFull(Exception):
  """The engine takes no request now (HTTP 429, or 503 while it drains).

  Attributes:
    retry_after: seconds after which trying again makes sense.
    draining: the engine is shutting down and will take no more.
  """

  def __init__(
    self, message: str, retry_after: float, *, draining: bool = False
  ):
    super().__init__(message)
    self.retry_after = retry_after
    self.draining = draining


class TokenFilter(Protocol):
  """Restricts what may be sampled, a token at a time (structured output)."""

  def allowed(self, new_ids: Sequence[int]) -> np.ndarray | None:
    """Which tokens may follow.

    Called on the engine's thread, before a token is sampled and, with
    drafting, for proposals that may be rejected later: the answer depends on
    `new_ids` alone, never on the order of calls.

    Args:
      new_ids: the tokens after the prompt.

    Returns:
      [ceil(V / 32)] uint32, bit i % 32 of word i // 32 set if token i may
      follow; None if every token may. At least one bit is set.
    """
    ...


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How one request is sampled; what `glm_jax.sampling` does, no more.

  Attributes:
    max_new_tokens: new tokens at most; None up to the engine's window.
    temperature: 0 takes the largest logit.
    top_p: probability kept, after top_k; 1 keeps all.
    top_k: tokens kept; 0 keeps all.
    min_p: least probability relative to the best; 0 keeps all.
    seed: of the noise; None takes one from the engine's counter.
    stop_token_ids: ids that end the request, besides the model's eos ids.
    ignore_eos: the model's eos ids do not end it.
    logprobs: None for none, else how many best tokens to report beside the
      chosen one (0 to 20).
    num_speculative_tokens: drafts of a round, 0 to the engine's; None for
      the engine's default.
  """

  max_new_tokens: int | None = 128
  temperature: float = 0.0
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  seed: int | None = None
  stop_token_ids: tuple[int, ...] = ()
  ignore_eos: bool = False
  logprobs: int | None = None
  num_speculative_tokens: int | None = None

  def __post_init__(self):
    top = MAX_LOGPROBS
    rules = (
      ('max_new_tokens', lambda v: v is None or v >= 1, 'at least 1, or None'),
      ('temperature', lambda v: 0 <= v < math.inf, 'finite and at least 0'),
      ('top_p', lambda v: 0 < v <= 1, 'above 0 and at most 1'),
      ('top_k', lambda v: v >= 0, 'at least 0 (0 keeps all)'),
      ('min_p', lambda v: 0 <= v <= 1, 'between 0 and 1'),
      ('logprobs', lambda v: v is None or 0 <= v <= top, f'None or 0 to {top}'),
      (
        'num_speculative_tokens',
        lambda v: v is None or 0 <= v <= 8,
        'None or 0 to 8',
      ),
    )
    for name, ok, need in rules:
      value = getattr(self, name)
      if not ok(value):
        raise InvalidRequest(f'{name}={value} must be {need}')


@dataclasses.dataclass(frozen=True)
class Request:
  """One prompt to continue.

  Attributes:
    request_id: unique among the requests in the engine.
    prompt_ids: at least one token id.
    sampling: how it is sampled.
    priority: a lower number is served first (vLLM's convention).
    deadline: `time.monotonic()` seconds after which it is ended; None never.
    token_filter: restricts the tokens; None for none.
  """

  request_id: str
  prompt_ids: Sequence[int]
  sampling: SamplingParams = SamplingParams()
  priority: int = 0
  deadline: float | None = None
  token_filter: TokenFilter | None = None


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
  """Log probabilities at one position, before temperature and cuts.

  Attributes:
    token: the chosen id.
    logprob: its log probability.
    top: (id, log probability) of the best tokens, best first.
  """

  token: int
  logprob: float
  top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Output:
  """What one step brought one request; exactly one is `finished`.

  Attributes:
    request_id: whose it is.
    new_ids: tokens of this step, a stopping one included; may be empty in
      the finished output.
    logprobs: one entry a new id, or None if none were asked for.
    finished: nothing follows.
    finish_reason: set when finished.
    prompt_tokens: length of the prompt.
    cached_tokens: of them, taken from the prefix cache at first admission.
    drafted: drafts proposed so far, a count for each place in a round.
    accepted: of them accepted.
    rounds: rounds with at least one draft so far.
    error: the message with finish reason 'error'.
    queued_seconds: until it was first scheduled; None if it never was.
  """

  request_id: str
  new_ids: tuple[int, ...] = ()
  logprobs: tuple[TokenLogprob, ...] | None = None
  finished: bool = False
  finish_reason: FinishReason | None = None
  prompt_tokens: int = 0
  cached_tokens: int = 0
  drafted: tuple[int, ...] = ()
  accepted: tuple[int, ...] = ()
  rounds: int = 0
  error: str | None = None
  queued_seconds: float | None = None

  @property
  def accept_length(self) -> float:
    """Accepted drafts a round, the bonus token not counted."""
    return sum(self.accepted) / max(self.rounds, 1)


class EngineCore(Protocol):
  """`engine.Engine`: single-threaded, nothing here blocks but `step`."""

  def submit(self, request: Request) -> None:
    """Queues a request.

    Raises:
      QueueFull: try again later.
      InvalidRequest: it can never run.
    """
    ...

  def abort(self, request_id: str) -> bool:
    """Ends a request wherever it is; False if it is not here (any more).

    Its finished output comes from the next `step`.
    """
    ...

  def step(self) -> list[Output]:
    """Schedules and dispatches one step; returns what became known."""
    ...

  def has_work(self) -> bool:
    """Whether a call of `step` could bring or finish anything."""
    ...

  def flush_cache(self) -> bool:
    """Forgets every cached prefix in all tiers; False if requests run."""
    ...

  def stats(self) -> dict[str, Any]:
    """Counts for status pages and tests; see `engine.Engine.stats`."""
    ...

  def drain(self) -> None:
    """Takes no new request; those inside run to their end."""
    ...


class EngineStream(Protocol):
  """`engine.AsyncEngine`: the same for an event loop; one engine thread."""

  def generate(self, request: Request) -> AsyncIterator[Output]:
    """Yields a request's outputs; leaving the iterator early aborts it.

    Raises:
      QueueFull: try again later.
      InvalidRequest: it can never run.
    """
    ...

  async def abort(self, request_id: str) -> bool:
    """See `EngineCore.abort`."""
    ...

  async def flush_cache(self) -> bool:
    """See `EngineCore.flush_cache`."""
    ...

  async def stats(self) -> dict[str, Any]:
    """See `EngineCore.stats`."""
    ...

  async def drain(self) -> None:
    """Takes no new request and returns when those inside have ended."""
    ...

  @property
  def ready(self) -> bool:
    """Warmed up, alive and not draining."""
    ...
