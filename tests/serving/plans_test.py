"""The engine over several devices: caches dealt out, same answers."""

import dataclasses

import jax
import numpy as np
import plan_cases
import pytest
from absl.testing import parameterized
from small_engines import (
  CONFIG,
  check_empty,
  random_prompt,
  request,
  rng,
  run,
  serve,
  tokens,
)

from glm_jax import forward
from glm_jax.serving.engine import Engine
from sharding import plan_named

SHAPE = (2, 2, 2)


def engine(name):
  plan = plan_named(name, plan_cases.config(), plan_cases.mesh(SHAPE))
  config = dataclasses.replace(CONFIG, host_cache_bytes=64 << 20)
  return Engine(plan_cases.placed_model(SHAPE), config, plan)


class OnlySeven:
  def allowed(self, new_ids):
    return np.array([1 << 7, 0, 0], np.uint32)


class PlanTest(parameterized.TestCase):
  @parameterized.parameters(('token_split',), ('layer_split',), ('replicated',))
  @pytest.mark.long
  def test_answers_prefix_hits_and_restores(self, name):
    """Each token is the best of one device's logits, to 1e-4."""
    e = engine(name)
    e.warm_up()
    compiled = e.runner.compilations()
    texts = [random_prompt(rng(i), n) for i, n in enumerate((130, 5, 70, 64))]
    rounds = {}
    for turn in range(3):
      if turn == 2:  # everything idle goes to the host
        for i in range(8):
          serve(e, [request(f'o{i}', random_prompt(rng(60 + i), 240), 2)])
      for i, text in enumerate(texts):
        e.submit(
          request(f'{turn}.{i}', text, num_speculative_tokens=(0, 3, 7)[i % 3])
        )
      rounds |= run(e)
      check_empty(e)
    e.submit(request('f', texts[0], token_filter=OnlySeven()))
    assert tokens(run(e)) == {'f': [7] * 8}
    assert e.runner.compilations() == compiled
    assert rounds['1.0'][-1].cached_tokens == 129
    assert e.store.counts['restored_pages'] > 0
    model = plan_cases.model()
    best = jax.jit(lambda ids: forward(model, ids).logits[0])
    for name, new in tokens(rounds).items():
      text = texts[int(name[2:])]
      ids = (*text, *new, *[0] * 140)[:140]
      rows = np.asarray(best(np.array([ids])))[len(text) - 1 :][: len(new)]
      chosen = rows[np.arange(len(new)), new]
      np.testing.assert_array_less(rows.max(-1) - chosen, 1e-4)
