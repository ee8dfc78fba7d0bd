"""What serving tests share: small engines, and what one request alone gives."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from small_models import TILED, small_model

from glm_jax.cache import init_cache
from glm_jax.decoding import DecodeState, decode_step, prefill_step
from glm_jax.sampling import sampling_params
from glm_jax.serving.config import EngineConfig
from glm_jax.serving.engine import Engine
from glm_jax.serving.request import Request, SamplingParams

CONFIG = EngineConfig(
  max_model_len=256,
  num_pages=24,
  max_num_seqs=4,
  max_num_batched_tokens=32,
  max_speculative_tokens=7,
  prefill_rows=(32,),
  batch_sizes=(4,),
  draft_counts=(7,),
  context_pages=(4,),
  debug=True,
)


def make_engine(seed=0, plan=TILED, **changes):
  config = dataclasses.replace(CONFIG, **changes)
  return Engine(small_model(seed), config, plan)


@functools.cache
def alone(checkpoint, prompt, new, **options):
  """New tokens of one request, without engine, prefix cache or drafts.

  The steps of `generate` at one shape for every prompt: it compiles once.
  """
  model, pages = small_model(checkpoint), CONFIG.max_blocks
  table = jnp.arange(pages, dtype=jnp.int32)[None]
  cache = init_cache(model.config, pages, dtype='f32')
  n, chunk = len(prompt), 32
  for first in range(0, n - 1, chunk):
    pos = np.arange(first, first + chunk, dtype=np.int32)
    pos[pos >= n - 1] = -1
    part = np.array([*prompt, *[0] * chunk][first : first + chunk], np.int32)
    cache = prefill_step(
      model, cache, table, part, np.zeros(chunk, np.int32), pos, plan=TILED
    )
  state = DecodeState(
    cache=cache,
    page_table=table,
    lengths=jnp.array([n], jnp.int32),
    last_token=jnp.array(prompt[-1:], jnp.int32),
    limits=jnp.array([n + new], jnp.int32),
    eos=jnp.array([-1], jnp.int32),
    done=jnp.zeros(1, bool),
    params=sampling_params(1, **options),
  )
  tokens = []
  for _ in range(new):
    state, _ = decode_step(model, state, plan=TILED)
    tokens.append(int(state.last_token[0]))
  return tokens


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
