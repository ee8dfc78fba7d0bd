"""Page records of every cache plan: whole pages, and nothing beside them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from small_models import small_config

from glm_jax import init_cache, presets
from glm_jax.cache import write_index_keys, write_rows
from glm_jax.layer_plan import layer_plan
from glm_jax.plan import LocalPlan
from glm_jax.serving import records
from sharding import MeshShape, make_mesh, plan_named
from sharding.pools import KEYS, LATENTS

PAGES = 5


@functools.cache
def config():
  return small_config(1)  # four layers in one group, and the drafter


def plan_of(name):
  if name == 'local':
    return LocalPlan()
  return plan_named(name, config(), make_mesh(MeshShape(2, 2, 2)))


def filled(plan, name):
  """A cache whose rows tell layer and slot; page 3 of it as a record."""
  layers = layer_plan(config())
  cache = init_cache(config(), PAGES, dtype='f32', plan=plan)
  slots = jnp.arange(PAGES * 64, dtype=jnp.int32)
  split = name in ('token_split', 'layer_split')
  for layer in range(layers.num_latent_slots):
    width = cache.latent_width + cache.rope_width
    rows = jnp.broadcast_to(
      (1000 * layer + slots)[:, None], (len(slots), width)
    )
    rows = rows.astype(jnp.float32)
    if split:
      cache = plan.store(cache, LATENTS, layer, slots, rows)
    else:
      cache = write_rows(cache, layer, slots, rows)
  for index in range(layers.num_index_slots):
    keys = jnp.broadcast_to(
      (-1000.0 * index - slots)[:, None],
      (len(slots), cache.index_keys.shape[1]),
    )
    if split:
      cache = plan.store(cache, KEYS, index, slots, keys)
    else:
      cache = write_index_keys(cache, index, slots, keys)
  return cache


class RecordTest(parameterized.TestCase):
  @parameterized.parameters(
    ('local',), ('token_split',), ('layer_split',), ('replicated',)
  )
  def test_a_record_holds_its_page_of_every_layer_and_moves_whole(self, name):
    plan = plan_of(name)
    cache = filled(plan, name)
    layers = layer_plan(config())
    extract = jax.jit(records.extract, static_argnames='plan')
    every = lambda cache: [
      jax.device_get(extract(cache, np.array([p], np.int32), plan))[0]
      for p in range(PAGES)
    ]
    before = every(cache)
    some = jax.device_get(extract(cache, np.array([4, 1], np.int32), plan))
    jax.tree.map(np.testing.assert_array_equal, some, [before[4], before[1]])
    for page, record in enumerate(before):
      slots = page * 64 + np.arange(64)
      for layer in range(layers.num_latent_slots):
        np.testing.assert_array_equal(
          record['latents'][layer, :, 0], 1000 * layer + slots
        )
      for index in range(layers.num_index_slots):
        np.testing.assert_array_equal(
          record['index_keys'][index, :, 3], -1000 * index - slots
        )
    size = sum(a.nbytes for a in before[0].values())
    assert records.record_bytes(cache, plan) == size
    copied = jax.jit(records.copy, static_argnames='plan')(
      cache, np.int32(3), np.int32(1), plan
    )
    assert copied.latents.sharding.is_equivalent_to(
      cache.latents.sharding, cache.latents.ndim
    )
    poisoned = jax.jit(records.poison, static_argnames='plan')(
      copied, np.int32(4), plan
    )
    after = every(poisoned)
    want = [before[0], before[3], before[2], before[3]]
    for page, record in enumerate(want):
      for pool, value in record.items():
        np.testing.assert_array_equal(after[page][pool], value, pool)
    for pool, value in after[4].items():
      assert np.isnan(value).all(), pool

  @parameterized.parameters(('bf16',), ('fp8',))
  def test_known_fault_43_every_pool_of_the_real_model_is_in_the_record(
    self, dtype
  ):
    glm = presets.PRESETS['glm52']
    cache = jax.eval_shape(lambda: init_cache(glm, 4, dtype=dtype))
    record = jax.eval_shape(
      lambda c: records.extract(c, jnp.zeros(1, jnp.int32), LocalPlan())[0],
      cache,
    )
    assert record['latents'].shape[0] == 79
    assert record['index_keys'].shape[0] == 22
    assert ('latent_scales' in record) == (dtype == 'fp8')
    pools = jax.tree.leaves(cache)
    total = sum(a.size * a.dtype.itemsize for a in pools) // 4
    assert records.record_bytes(cache, LocalPlan()) == total

  def test_a_partial_record_is_refused(self):
    cache = init_cache(config(), 2, dtype='f32')
    page = jnp.ones(1, jnp.int32)
    (record,) = records.extract(cache, page, LocalPlan())
    del record['index_keys']
    with pytest.raises(KeyError):
      records.insert(cache, page, [record], LocalPlan())
