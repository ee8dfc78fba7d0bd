"""Mesh, rules, the deal of pages and layers, and bytes by shapes alone."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import plan_cases
from absl.testing import absltest, parameterized
from small_models import small_config

from glm_jax.cache import bytes_per_token, init_cache, make_rows
from glm_jax.config import FULL
from glm_jax.layer_plan import layer_plan
from glm_jax.model import abstract_model
from glm_jax.presets import PRESETS
from pallas_kernels.tiling import PAGE
from sharding import (
  DEFAULT,
  MeshShape,
  Rules,
  make_mesh,
  mesh_shape,
  parse_mesh_shape,
  plan_named,
)
from sharding.capacity import capacity_bytes
from sharding.deal import Deal
from sharding.layer_split import ownership
from sharding.movement import movement
from sharding.partials import bound, deal_rows
from sharding.rules import module_shardings, parameters, shard_bytes

GLM52 = PRESETS['glm52']


class MeshTest(parameterized.TestCase):
  def test_axes_are_always_all_three(self):
    mesh = make_mesh()
    self.assertEqual(mesh_shape(mesh), MeshShape(1, 8, 1))
    mesh = make_mesh(MeshShape(2, 2, 2))
    self.assertEqual(mesh.axis_names, ('data', 'context', 'model'))

  @parameterized.parameters(
    ('context=8', (1, 8, 1)),
    ('data=2, context=4', (2, 4, 1)),
    ('2x4x1', (2, 4, 1)),
  )
  def test_parses(self, text, shape):
    self.assertEqual(parse_mesh_shape(text), MeshShape(*shape))
    self.assertEqual(parse_mesh_shape(str(MeshShape(*shape))), shape)

  @parameterized.parameters(
    ('expert=8', "'expert=8' is not an axis"),
    ('data=2,data=4', "names 'data' twice"),
    ('context=0', 'context=0 must be at least 1'),
    ('2x4', "'2x4' is not an axis"),
    ('context=-8', 'context=-8 must be at least 1'),
  )
  def test_bad_text(self, text, message):
    with self.assertRaisesRegex(ValueError, message):
      parse_mesh_shape(text)

  def test_impossible_meshes(self):
    with self.assertRaisesRegex(ValueError, 'needs 6 devices, there are 8'):
      make_mesh(MeshShape(2, 3, 1))
    with self.assertRaisesRegex(ValueError, 'at least one device'):
      make_mesh(devices=[])
    other = jax.sharding.Mesh(np.array(jax.devices()), ('x',))
    with self.assertRaisesRegex(ValueError, r"\('x',\) must be"):
      mesh_shape(other)


class RulesTest(parameterized.TestCase):
  @parameterized.parameters((1, 8, 1), (2, 2, 2), (1, 2, 4))
  def test_every_matrix_of_glm52_is_over_all_chips(self, *shape):
    mesh = make_mesh(MeshShape(*shape))
    model = abstract_model(GLM52)
    local = shard_bytes(model, mesh)
    whole = 0
    for path, value in parameters(model):
      size = value.size * value.dtype.itemsize
      if local[path] * mesh.size == size:
        continue
      # Vectors alone are whole everywhere.
      self.assertLessEqual(len(value.axes), 1, path)
      whole += local[path]
    self.assertLess(whole, 2e-5 * sum(local.values()))

  def test_fp8_scales_weigh_little(self):
    mesh = make_mesh()
    model = abstract_model(GLM52, weight_dtype='fp8')
    total = sum(v.size * v.dtype.itemsize for _, v in parameters(model))
    held = sum(shard_bytes(model, mesh).values())
    self.assertLess(held, 1.0001 * total / 8)

  def test_clash_names_both(self):
    mesh = make_mesh(MeshShape(2, 4, 1))
    rules = DEFAULT.replace(mlp=('context',))
    with self.assertRaisesRegex(
      ValueError, "'mlp' and 'embed' of .* both want the mesh axis 'context'"
    ):
      rules.spec(('mlp', 'embed'), (64, 64), mesh)

  def test_indivisible_size_names_both(self):
    mesh = make_mesh(MeshShape(2, 4, 1))
    with self.assertRaisesRegex(
      ValueError, "'expert' of size 12 .* does not divide over dataxcontext=8"
    ):
      DEFAULT.spec((None, 'expert'), (3, 12), mesh)
    model = abstract_model(small_config(0, vocab_size=90))
    with self.assertRaisesRegex(ValueError, "^embed: logical axis 'vocab'"):
      module_shardings(model, make_mesh(MeshShape(1, 2, 4)))

  def test_bad_tables(self):
    with self.assertRaisesRegex(ValueError, "rule 'mlp' -> .* mesh axes"):
      DEFAULT.replace(mlp=('pipe',))
    with self.assertRaisesRegex(ValueError, r"\['mlp'\] have two rules"):
      Rules((('mlp', ()), ('mlp', ())))
    with self.assertRaisesRegex(ValueError, "'cabbage' has no rule"):
      DEFAULT.axes('cabbage')

  def test_axes_of_size_one_are_left_out(self):
    spec = DEFAULT.spec(('heads', 'fsdp'), (64, 64), make_mesh())
    self.assertEqual(spec, jax.sharding.PartitionSpec(None, ('context',)))


class DealTest(parameterized.TestCase):
  @parameterized.product(outer=(1, 2, 8), inner=(1, 4), pages=(1, 7, 8, 100))
  def test_every_page_has_one_place(self, outer, inner, pages):
    deal = Deal(outer, inner)
    page = np.arange(pages)
    owner, local = deal.owner(page), deal.local(page)
    np.testing.assert_array_equal(deal.page(owner, local), page)
    self.assertTrue((local < deal.local_pages(pages)).all())
    # Ranks that share latents own the same pages, whatever `inner` is.
    np.testing.assert_array_equal(owner // inner, page % outer)
    at = np.asarray(deal.gathered(page, pages))
    self.assertLen(set(at.tolist()), pages)
    self.assertLess(at.max(), deal.ranks * deal.local_pages(pages))
    counts = np.bincount(owner, minlength=deal.ranks)
    self.assertLessEqual(counts.max() - counts.min(), 1)

  def test_slots(self):
    deal = Deal(2)
    slots = jnp.array([-1, 0, 63, 64, 130, 200], jnp.int32)
    np.testing.assert_array_equal(
      deal.own_slots(slots, 0), [-1, 0, 63, -1, 66, -1]
    )
    np.testing.assert_array_equal(
      deal.own_slots(slots, 1), [-1, -1, -1, 0, -1, 72]
    )
    np.testing.assert_array_equal(
      deal.gathered_slots(slots, 4), [-1, 0, 63, 128, 66, 200]
    )

  def test_bounded_rows(self):
    """At 128 ways at most five times the even share of the selection."""
    self.assertEqual(bound(2048, 128), 64)
    self.assertLessEqual(bound(2048, 128), 5 * 2048 / 128)
    self.assertEqual(bound(2048, 1), 2048)
    self.assertEqual(bound(8, 8), 8)


class DealtRowsTest(parameterized.TestCase):
  @parameterized.parameters((1, 2, 1), (1, 8, 1), (2, 2, 2))
  def test_known_fault_47_local_and_global_positions(self, *shape):
    """What a rank sees of a sequence, against counting one by one."""
    devices = jax.devices()[: math.prod(shape)]
    mesh = make_mesh(MeshShape(*shape), devices)
    plan = plan_named('token_split', plan_cases.config(), mesh)
    table = np.array([[4, 5, 6, 7, 8], [3, 0, -1, -1, -1], [9, 1, 2, -1, -1]])
    edges = [-1, 0, 1, 62, 63, 64, 127, 128, 190]
    seq, pos = np.repeat(range(3), len(edges)), np.tile(edges, 3)
    have = (pos < 0) | (table[seq, np.maximum(pos, 0) // PAGE] >= 0)
    seq, pos = seq[have].astype(np.int32), pos[have].astype(np.int32)
    rows = make_rows(seq, pos, jnp.asarray(table, jnp.int32))
    dealt = jax.jit(functools.partial(deal_rows, plan))(rows)
    deal = plan.index_deal
    for rank in range(deal.ranks):
      for b, pages in enumerate(table):
        own = [j for j, p in enumerate(pages) if p >= 0 and
               deal.owner(p) == rank]  # fmt: skip
        got = np.asarray(dealt.blocks[rank, b])
        self.assertEqual(got[: len(own)].tolist(), own)
        self.assertTrue((got[len(own) :] == -1).all())
      for t, (b, p) in enumerate(zip(seq, pos)):
        seen = [
          s for s in range(p + 1) if deal.owner(table[b, s // PAGE]) == rank
        ]
        self.assertEqual(int(dealt.visible[rank, t]), len(seen), (rank, b, p))


class OwnershipTest(parameterized.TestCase):
  @parameterized.parameters(1, 2, 3, 8, 16, 79, 100)
  def test_every_layer_has_one_owner(self, ranks):
    """Known faults 6 and 43: two layer spaces under one map."""
    own, plan = ownership(GLM52, ranks), layer_plan(GLM52)
    self.assertLen(own.layers, ranks)
    flat = [i for layers in own.layers for i in layers]
    self.assertEqual(flat, list(range(79)))  # contiguous, the drafter last
    self.assertLen(own.latent, 79)
    self.assertLen(own.index, 22)
    for i in range(79):
      rank, place = own.latent[i]
      self.assertEqual(own.layers[rank][place], i)
      if plan.is_full(i):
        owner, key = own.index[plan.index_slot(i)]
        self.assertEqual(owner, rank)
        full = [j for j in own.layers[rank] if plan.is_full(j)]
        self.assertEqual(full[key], i)
    for pairs in (own.latent, own.index):
      self.assertLen(set(pairs), len(pairs))

  def test_balanced_by_bytes(self):
    own = ownership(GLM52, 8)
    self.assertEqual(sorted(map(len, own.layers)), [9] + [10] * 7)
    self.assertEqual((own.num_latent, own.num_index), (10, 4))
    # A cut inside an index group is legal: layer 39 is shared, its source 38.
    first = [layers[0] for layers in ownership(GLM52, 2).layers]
    self.assertFalse(layer_plan(GLM52).is_full(first[1]))

  def test_all_full(self):
    config = dataclasses.replace(GLM52, indexer_types=(FULL,) * 78)
    own = ownership(config, 8)
    self.assertLen(own.index, 79)
    self.assertEqual((own.num_latent, own.num_index), (10, 10))


@functools.cache
def real_bytes(name, **options):
  """Bytes on a device for a pool of GLM-5.2, and tokens in the pool."""
  pages = 1 << 12
  cache = jax.eval_shape(lambda: init_cache(GLM52, pages, dtype='bf16'))
  plan = plan_named(name, GLM52, make_mesh(), **options)
  return plan.cache_bytes(cache), pages * PAGE


class CapacityTest(parameterized.TestCase):
  @parameterized.parameters(
    ('layer_split', 2, 6.2, False),
    ('layer_split', 1, 6.8, False),
    ('token_split', 2, 6.4, False),
    ('token_split', 2, 7.8, True),
  )
  def test_ratios_at_eight_ways(self, name, slots, least, decode):
    whole, tokens = real_bytes('replicated')
    found, _ = real_bytes(name, slots=slots)
    used = found['pools'] + (0 if decode else found['slots'])
    self.assertGreaterEqual(whole['pools'] / used, least)
    # The accountant counts records; a page's last hidden state is ours.
    hidden = GLM52.hidden_size * 2 / PAGE / 8
    predicted = capacity_bytes(
      GLM52, name, 8, slots=0 if decode else slots, physical=True
    )
    self.assertLess(abs(used / tokens / (predicted + hidden) - 1), 0.02)

  def test_one_rank_is_the_allocators_sum(self):
    whole, tokens = real_bytes('replicated')
    records = bytes_per_token(GLM52, physical=True)
    records += bytes_per_token(GLM52, physical=True, drafter=True)
    hidden = GLM52.hidden_size * 2 / PAGE / 8  # the pages' own are split
    self.assertEqual(whole['pools'], tokens * (records + hidden))

  def test_allocation_is_the_layout(self):
    """What `init_cache` makes has the shapes that bytes are summed from."""
    config = plan_cases.config()
    for name in ('token_split', 'layer_split', 'replicated'):
      plan = plan_named(name, config, make_mesh(MeshShape(2, 2, 2)))
      shapes = jax.eval_shape(lambda: init_cache(config, 5, dtype='f32'))
      cache = init_cache(config, 5, dtype='f32', plan=plan)
      held = sum(
        math.prod(a.addressable_shards[0].data.shape) * a.dtype.itemsize
        for a in jax.tree.leaves(cache)
      )
      self.assertEqual(held, plan.cache_bytes(shapes)['pools'])

  def test_movement_is_decided_by_bytes(self):
    sizes = {'row_bytes': 1280, 'key_bytes': 256}
    small = movement(GLM52, 128, 512, 16384, **sizes)
    large = movement(GLM52, 128, 65536, 16384, **sizes)
    self.assertEqual(small.choice, 'partials')
    self.assertEqual(large.choice, 'rows')
    self.assertEqual(small.rows, large.rows)
    self.assertEqual(small.rows, round(127 / 128 * 2**20 * (79 * 1280 + 5632)))
    self.assertIn('moves rows: 111.', str(large))


class PlanErrorsTest(absltest.TestCase):
  def test_named(self):
    config, mesh = plan_cases.config(), make_mesh()
    with self.assertRaisesRegex(ValueError, "'ring' is unknown: use .*split"):
      plan_named('ring', config, mesh)
    with self.assertRaisesRegex(ValueError, 'slots=3 must be 1'):
      plan_named('layer_split', config, mesh, slots=3)
    with self.assertRaisesRegex(ValueError, "move='all' must be"):
      plan_named('token_split', config, mesh, move='all')

  def test_heads_must_divide(self):
    with self.assertRaisesRegex(ValueError, '4 attention heads do not divide'):
      plan_named('replicated', plan_cases.config(), make_mesh((1, 1, 8)))

  def test_rows_must_divide(self):
    plan = plan_named(
      'replicated', plan_cases.config(), make_mesh(), min_rows=4
    )
    self.assertFalse(plan.is_split(31))
    self.assertTrue(plan.is_split(32))
    with self.assertRaisesRegex(ValueError, '33 rows .* pad it to 40 rows'):
      plan.is_split(33)

  def test_row_ids(self):
    """int32 numbers a rank's rows, not the pod's."""
    most = (2**31 - 1) // (79 * PAGE)
    plan = plan_named('token_split', GLM52, make_mesh())
    make = lambda n: jax.eval_shape(lambda: init_cache(GLM52, n, plan=plan))
    self.assertEqual(make(8 * most).num_pages, 8 * most)
    with self.assertRaisesRegex(ValueError, f'use 1 to {most} pages'):
      make(8 * most + 1)


if __name__ == '__main__':
  absltest.main()
