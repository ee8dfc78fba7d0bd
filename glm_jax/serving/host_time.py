"""Host time of the engine loop: a decode step whose device part is instant.

Everything that the host does for a step is done, over real queues, pages and
page tables; only the compiled call returns at once with a result of the same
shapes. All requests share one long prompt, as agents do, so that a million
tokens each need no million pages each.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from glm_jax.serving.config import EngineConfig, buckets
from glm_jax.serving.engine import Engine
from glm_jax.serving.inputs import InputBuilder
from glm_jax.serving.request import Request, SamplingParams
from glm_jax.serving.runner import Runner
from glm_jax.serving.steps import Logprobs, StepResult
from pallas_kernels.tiling import PAGE, cdiv

_VOCAB = 1024


class InstantRunner(Runner):
  """A runner without a device: every token is 1, every draft rejected."""

  def __init__(self, config: EngineConfig):
    self.buckets = buckets(config)
    self.with_drafter = config.most_drafts > 0
    self.chunks = dict.fromkeys(self.buckets.blocks, self.buckets.prefill[-1])
    self.steps = 0
    self.rows = {'prefill': 0, 'decode': 0}
    self.record_bytes, self.pinned = 1, False
    self._num_slots = config.max_num_seqs
    self._inputs = InputBuilder(
      config.max_num_seqs, self.buckets.finishing, cdiv(_VOCAB, 32), np.asarray
    )
    self._table = np.zeros((1, config.max_blocks))

  def _run(self, inputs, blocks: int) -> StepResult:
    (B, K), F = inputs.forced.shape, len(inputs.last_row)
    live = inputs.slots < self._num_slots
    none, no = np.zeros(B, np.int32), np.zeros(B, bool)
    return StepResult(
      tokens=np.ones((B, K + 1), np.int32),
      count=live.astype(np.int32),
      drafted=inputs.count,
      accepted=none,
      ended=no,
      bad=no,
      first=np.ones(F, np.int32),
      first_ended=np.zeros(F, bool),
      first_bad=np.zeros(F, bool),
      logprobs=Logprobs(none, none, none),
    )

  def read(self, result: StepResult, logprobs: bool) -> StepResult:
    """The result itself."""
    return result

  def copy(self, source: int, target: int) -> None:
    """Nothing to copy."""

  def set_row(self, slot: int, pages) -> None:
    """Makes the row, and drops it."""
    row = np.full(self._table.shape[1], -1, np.int32)
    row[: len(pages)] = pages

  def set_entries(self, entries) -> None:
    """Makes the array, and drops it."""
    np.array(entries, np.int32)


@dataclasses.dataclass(frozen=True)
class HostTime:
  """Seconds of one engine step on the host.

  Attributes:
    median: over the steps measured.
    p90: nine of ten were faster.
    tokens: context of each request.
    requests: decoding in each step.
  """

  median: float
  p90: float
  tokens: int
  requests: int


def decoding_engine(tokens: int, requests: int, *, drafts: int = 0) -> Engine:
  """An engine with so many requests in the middle of decoding.

  Args:
    tokens: context of each; all but the last page is shared.
    requests: how many.
    drafts: K.

  Returns:
    The engine; each `step` is one decode step of all of them.
  """
  new = 4096
  config = EngineConfig(
    max_model_len=tokens + new,
    num_pages=cdiv(tokens, PAGE) + requests * (cdiv(new, PAGE) + 2),
    max_num_seqs=requests,
    max_num_batched_tokens=1 << 16,
    num_speculative_tokens=drafts,
  )
  shape = SimpleNamespace(
    max_position_embeddings=tokens + new,
    vocab_size=_VOCAB,
    eos_token_ids=(),
  )
  engine = Engine(
    SimpleNamespace(config=shape), config, runner=InstantRunner(config)
  )
  prompt = np.random.default_rng(0).integers(0, _VOCAB, tokens - 1).tolist()
  sampling = SamplingParams(max_new_tokens=new)
  for i in range(requests):
    engine.submit(Request(str(i), [*prompt, i % _VOCAB], sampling))
    while not engine._live[str(i)].slot >= 0 or (
      len(engine._live[str(i)].ids) == tokens
    ):
      engine.step()
  return engine


def measure(
  tokens: Sequence[int],
  requests: int = 64,
  *,
  steps: int = 200,
  drafts: int = 0,
) -> list[HostTime]:
  """Host time of decode steps at each context, in turns; see the module."""
  engines = [decoding_engine(n, requests, drafts=drafts) for n in tokens]
  seconds = [[] for _ in engines]
  for _ in range(steps):
    for engine, times in zip(engines, seconds):
      begin = time.perf_counter()
      outputs = engine.step()
      times.append(time.perf_counter() - begin)
      if len(outputs) != requests:
        raise RuntimeError(f'{len(outputs)} of {requests} requests decoded')
  return [
    HostTime(
      statistics.median(times), float(np.quantile(times, 0.9)), n, requests
    )
    for n, times in zip(tokens, seconds)
  ]
