"""Latents in host memory: same tokens, same logits, four layers a fetch."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from small_engines import (
  alone,
  check_empty,
  make_engine,
  random_prompt,
  request,
  rng,
  serve,
)
from small_models import TILED, prompts, small_config, small_model

from glm_jax import init_cache, presets
from glm_jax.cache import make_rows
from glm_jax.drafting import prefill_rows
from glm_jax.model import trunk
from glm_jax.plan import LocalPlan
from glm_jax.serving import host_latent
from glm_jax.serving.host_latent import HostLatentCache, host_latent_plan

LENGTHS = (48, 5, 70, 64, 1, 130)


@functools.cache
def engine():
  plan = host_latent_plan(small_model(0).config, row_tile=8)
  return make_engine(plan=plan, host_cache_bytes=64 << 20)


class PlanTest(parameterized.TestCase):
  def test_groups_are_those_of_the_model(self):
    plan = host_latent_plan(presets.PRESETS['glm52'])
    assert plan.group == 4
    assert plan.firsts[:5] == (0, 1, 2, 6, 10) and plan.firsts[-1] == 78
    assert plan.num_layers == 78

  @parameterized.parameters(('f32', 1 << 30))
  def test_prompt_and_draft_rows_equal_those_of_one_device(self, dtype, ahead):
    self._compare(dtype, ahead)

  @parameterized.parameters('f32', 'fp8')
  def test_a_prompt_asks_for_whole_pages_where_they_are_fewer_rows(self, dtype):
    pages = []
    real = host_latent._gather_pages

    def counting(pool, at):
      pages.append(at.shape)
      return real(pool, at)

    with mock.patch.object(host_latent, '_gather_pages', counting):
      # Room for the four pages of the table, not for 90 times top-8 rows.
      self._compare(dtype, 1 << 18)
    self.assertEqual(set(pages), {(4,)})

  @parameterized.parameters(('f32', 0), ('fp8', 1 << 30), ('fp8', 0))
  @pytest.mark.long
  def test_other_layouts_and_layer_by_layer(self, dtype, ahead):
    self._compare(dtype, ahead)

  def _compare(self, dtype, ahead):
    """Checkpoint 1: a group of four layers, longer than top-k."""
    model = small_model(1)
    plan = host_latent_plan(model.config, row_tile=8, ahead_bytes=ahead)
    texts = prompts(1, (70, 20))
    seq = np.repeat([0, 1], [70, 20]).astype(np.int32)
    pos = np.concatenate([np.arange(70), np.arange(20)]).astype(np.int32)
    table = jnp.array([[2, 0], [1, -1]], jnp.int32)

    @functools.partial(jax.jit, static_argnames='plan')
    def run(model, cache, tokens, pos, plan):
      rows = make_rows(jnp.asarray(seq), pos, table)
      hidden, cache, _ = trunk(model, tokens, cache, rows, plan)
      cache = prefill_rows(model, tokens, hidden, cache, rows, plan)
      return hidden, cache

    found = {}
    for name, p in (('device', TILED), ('host', plan)):
      cache = init_cache(model.config, 3, dtype=dtype, plan=p)
      # In two steps, so that old rows and the step's own are both read.
      early = jnp.where(pos < 40, pos, -1)
      late = jnp.where(pos >= 40, pos, -1)
      tokens = np.concatenate(texts).astype(np.int32)
      _, cache = run(model, cache, tokens, early, p)
      hidden, cache = run(model, cache, tokens, late, p)
      found[name] = np.asarray(hidden)[pos >= 40], cache
    np.testing.assert_array_equal(found['host'][0], found['device'][0])
    host, device = found['host'][1], found['device'][1]
    assert isinstance(host, HostLatentCache)
    assert host.host.sharding.memory_kind == 'pinned_host'
    assert host.latents.size == 0  # nothing stays behind
    np.testing.assert_array_equal(
      jax.device_get(host.host), jax.device_get(device.latents)
    )
    np.testing.assert_array_equal(host.index_keys, device.index_keys)

  def test_one_index_list_sends_for_the_rows_of_the_whole_group(self):
    """Counted: a gather a full layer, the drafter's included; not a layer."""
    config = small_config(3)  # FFSFS
    model = jax.eval_shape(lambda: small_model(3))
    counts = {}
    for ahead in (1 << 30, 0):
      plan = host_latent_plan(config, ahead_bytes=ahead)
      gathers = []
      real, host_latent._gather = host_latent._gather, None

      def counting(pool, at, real=real, gathers=gathers):
        gathers.append(at.shape)
        return real(pool, at)

      host_latent._gather = counting
      try:
        cache = jax.eval_shape(lambda plan=plan: _abstract(plan, config))
        jax.eval_shape(
          lambda m, c, plan=plan: _one_step(m, c, plan), model, cache
        )
      finally:
        host_latent._gather = real
      counts[ahead] = gathers
    assert len(counts[1 << 30]) < len(counts[0])
    # One layer for the first, two for the others, the drafter's own for it.
    layers = [shape[1] for shape in counts[1 << 30]]
    assert layers[0] == layers[-1] == 1 and set(layers[1:-1]) == {2}

  def test_positions_from_outside_are_refused_not_mishandled(self):
    plan = host_latent_plan(small_config(0))
    with pytest.raises(NotImplementedError, match='replay'):
      plan.attend(None, None, LocalPlan(), 0, 1.0)


def _abstract(plan, config):
  """A cache's shapes; host memory is told apart when it is used."""
  cache = init_cache(config, 2, dtype='f32')
  empty = cache.latents[:0]
  fields = {f.name: getattr(cache, f.name) for f in dataclasses.fields(cache)}
  fields['latents'] = empty
  return HostLatentCache(
    **fields,
    host=cache.latents,
    slots=jnp.zeros(0, jnp.int32),
    page_table=jnp.zeros((0, 0), jnp.int32),
    pass_id=jnp.int32(0),
  )


def _one_step(model, cache, plan):
  table = jnp.array([[0, 1]], jnp.int32)
  rows = make_rows(jnp.zeros(8, jnp.int32), jnp.arange(8), table)
  tokens = jnp.zeros(8, jnp.int32)
  hidden, cache, _ = trunk(model, tokens, cache, rows, plan)
  return prefill_rows(model, tokens, hidden, cache, rows, plan)


class EngineTest(parameterized.TestCase):
  def test_the_engine_serves_the_same_tokens(self):
    e = engine()
    texts = [random_prompt(rng(i), n) for i, n in enumerate(LENGTHS)]
    for turn in ('first', 'again'):
      got = serve(
        e,
        [
          request(f'{turn}{i}', text, num_speculative_tokens=(0, 3, 7)[i % 3])
          for i, text in enumerate(texts)
        ],
      )
      for i, text in enumerate(texts):
        assert got[f'{turn}{i}'] == alone(0, text, 8), (turn, i)
      check_empty(e)
    assert e.store.counts['copied_pages'] > 0

  def test_evicted_pages_come_back(self):
    e = engine()
    text = random_prompt(rng(50), 140)
    serve(e, [request('a', text)])
    for i in range(8):
      serve(e, [request(f'o{i}', random_prompt(rng(60 + i), 240), 2)])
    before = e.store.counts['restored_pages']
    got = serve(e, [request('b', text, num_speculative_tokens=3)])
    assert got['b'] == alone(0, text, 8)
    assert e.store.counts['restored_pages'] == before + 2
    check_empty(e)
