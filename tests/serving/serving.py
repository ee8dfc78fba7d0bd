"""What serving tests share: small engines, and what one request alone gives."""

import dataclasses
import functools

import numpy as np
from small_models import TILED, small_model

from glm_jax.generation import generate
from glm_jax.serving.config import EngineConfig
from glm_jax.serving.engine import Engine
from glm_jax.serving.request import Request, SamplingParams

CONFIG = EngineConfig(
  max_model_len=256,
  num_pages=24,
  max_num_seqs=4,
  max_num_batched_tokens=32,
  max_speculative_tokens=3,
  prefill_rows=(32,),
  batch_sizes=(4,),
  draft_counts=(0, 3),
  context_pages=(4,),
  debug=True,
)


def make_engine(seed=0, plan=TILED, **changes):
  config = dataclasses.replace(CONFIG, **changes)
  return Engine(small_model(seed), config, plan)


@functools.cache
def alone(seed, prompt, new, **options):
  """New tokens of one request by `generate`, no cache, no drafts."""
  out = generate(
    small_model(seed), [list(prompt)], max_new_tokens=new, plan=TILED, **options
  )
  return out.tokens[0]


def request(name, prompt, new=8, **changes):
  fields = {f.name for f in dataclasses.fields(Request)}
  outer = {k: v for k, v in changes.items() if k in fields}
  inner = {k: v for k, v in changes.items() if k not in fields}
  sampling = SamplingParams(max_new_tokens=new, **inner)
  return Request(name, tuple(prompt), sampling, **outer)


def run(engine, most=10_000):
  """Steps until nothing is left; all outputs by request id."""
  outputs = {}
  for _ in range(most):
    if not engine.has_work():
      return outputs
    for out in engine.step():
      outputs.setdefault(out.request_id, []).append(out)
  raise AssertionError(f'work is left after {most} steps')


def tokens(outputs):
  return {
    name: [t for out in outs for t in out.new_ids]
    for name, outs in outputs.items()
  }


def serve(engine, requests):
  for r in requests:
    engine.submit(r)
  return tokens(run(engine))


def check_empty(engine):
  """Every page, slot and byte is back; one terminal output was sent."""
  engine.store.pool.check()
  stats = engine.stats()
  assert stats['pages']['used'] == 0, stats
  assert stats['requests']['running'] == stats['requests']['waiting'] == 0
  assert engine.store.unplanned == engine.config.num_pages
  assert len(engine.scheduler._slots) == engine.config.max_num_seqs


def random_prompt(rng, n):
  return tuple(int(t) for t in rng.integers(0, 96, n))


def rng(seed):
  return np.random.default_rng(seed)
