"""What a prefix hit below the device is worth: restore beside recompute.

One engine serves the same prompt twice over: after a flush, when every row
must run, and after its pages were evicted to host memory, when they are
copied back. Both are the time to the first token, in turns, in one process.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import numpy as np

from glm_jax.model import Model
from glm_jax.plan import LocalPlan
from glm_jax.serving.config import EngineConfig
from glm_jax.serving.engine import Engine
from glm_jax.serving.request import Request, SamplingParams
from pallas_kernels.tiling import PAGE, cdiv


@dataclasses.dataclass(frozen=True)
class RestoreTime:
  """Seconds to the first token of one prompt.

  Attributes:
    recompute: with nothing cached, the median.
    restore: with every full page in host memory, the median.
    tokens: of the prompt.
    pages: restored.
    page_bytes: of one record.
    pinned: records lie in pinned host memory, not in numpy arrays.
  """

  recompute: float
  restore: float
  tokens: int
  pages: int
  page_bytes: int
  pinned: bool

  @property
  def ratio(self) -> float:
    """How many times cheaper a restore is."""
    return self.recompute / self.restore


def engine_for(
  model: Model, tokens: int, plan: LocalPlan | None = None, rows: int = 128
) -> Engine:
  """A warm engine for one prompt of `tokens` tokens, `rows` rows a step."""
  pages = cdiv(tokens + 2, PAGE) + 2
  config = EngineConfig(
    max_model_len=tokens + 2,
    num_pages=pages,
    max_num_seqs=1,
    max_num_batched_tokens=rows,
    max_speculative_tokens=0 if model.mtp is None else 1,
    prefill_rows=(0, rows),
    context_pages=(cdiv(tokens + 2, PAGE),),
    host_cache_bytes=1 << 50,
  )
  engine = Engine(model, config, plan)
  engine.warm_up()
  return engine


def measure(engine: Engine, tokens: int, repeats: int = 3) -> RestoreTime:
  """Times both ways; see the module.

  Args:
    engine: warm and idle, with a host tier.
    tokens: of the prompt, at least two pages.
    repeats: of each.

  Returns:
    The times.

  Raises:
    RuntimeError: the pages were not restored as they should be.
  """
  pages = (tokens - 1) // PAGE
  vocab = engine.vocab_size
  ids = np.random.default_rng(0).integers(0, vocab, tokens)
  prompt, seconds = ids.tolist(), {'recompute': [], 'restore': []}
  for turn in range(repeats):
    engine.flush_cache()
    seconds['recompute'].append(_first_token(engine, f'new{turn}', prompt))
    evict(engine)
    before = engine.store.counts['restored_pages']
    seconds['restore'].append(_first_token(engine, f'back{turn}', prompt))
    restored = engine.store.counts['restored_pages'] - before
    if restored != pages:
      raise RuntimeError(f'{restored} of {pages} pages were restored')
  return RestoreTime(
    recompute=statistics.median(seconds['recompute']),
    restore=statistics.median(seconds['restore']),
    tokens=tokens,
    pages=pages,
    page_bytes=engine.runner.record_bytes,
    pinned=engine.runner.pinned,
  )


def evict(engine: Engine) -> None:
  """Moves every idle page to host memory and waits for it there."""
  engine.store.offload(engine.config.num_pages)
  for page in engine.store.index.pages():
    engine.store.index.remove(page)
    engine.store.pool.forget(page)
  while engine.host.arriving:
    engine.host.poll()
    time.sleep(1e-4)


def _first_token(engine: Engine, name: str, prompt: list[int]) -> float:
  begin = time.perf_counter()
  engine.submit(Request(name, prompt, SamplingParams(max_new_tokens=1)))
  while engine.has_work():
    engine.step()
  return time.perf_counter() - begin
