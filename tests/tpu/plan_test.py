"""The planner on the real compiler: counts by hand, sharing, overlap, fit.

Nothing runs; figures are libtpu's (compiled, not run).
"""

import pathlib
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax import hlo, presets
from pallas_kernels.streaming_topk.sizes import LANES, sizes_of
from sharding import accountant, plan_pod
from sharding.chips import chip_named
from sharding.planner.cost import module_cost
from sharding.planner.topology import topology_devices
from sharding.planner.transfers import transfers
from sharding.planner.trunk import trunk_cost
from sharding.planner.worker import compile_text

P = PartitionSpec
GLM52 = presets.PRESETS['glm52']
MILLION = 1_048_576


def compiled(topology, f, *shapes, devices=1, specs=None):
  """The module of f on the first devices of a slice."""
  mesh = Mesh(np.array(topology_devices(topology)[:devices]), ('x',))
  specs = specs or [P()] * len(shapes)
  args = [
    jax.ShapeDtypeStruct(
      shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)
    )
    for shape, spec in zip(shapes, specs)
  ]
  lowered = jax.jit(f).trace(*args).lower(lowering_platforms=('tpu',))
  with tempfile.TemporaryDirectory() as folder:
    return hlo.parse(compile_text(lowered, topology, pathlib.Path(folder))[2])


def prefetch(x, ws):
  """A loop that all-gathers the next layer's weights while one computes."""
  layers = ws.shape[0]
  with jax.named_scope('fetch'):
    first = jax.lax.all_gather(ws[0], 'x', axis=0, tiled=True)

  def body(i, carry):
    x, w = carry
    with jax.named_scope('fetch'):
      at = jnp.minimum(i + 1, layers - 1)
      part = jax.lax.dynamic_index_in_dim(ws, at, 0, False)
      after = jax.lax.all_gather(part, 'x', axis=0, tiled=True)
    for _ in range(6):
      x = jnp.tanh(x @ w)
    return x, after

  return jax.lax.fori_loop(0, layers, body, (x, first))[0]


@pytest.mark.tpu
class CompiledCostTest(parameterized.TestCase):
  @parameterized.parameters('v5e:2x2', 'v6e:2x2', 'tpu7x:2x2x1')
  def test_products_in_the_forms_a_tpu_gives_them(self, topology):
    def f(x, w, many, row):
      batched = jnp.einsum('nij,njk->nik', many, many)
      y = jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x)
      return y, batched, row @ w

    module = compiled(
      topology, f, (256, 512), (512, 512), (16, 128, 128), (1, 512)
    )
    products = 5 * 256 * 512 * 512 + 16 * 128**3 + 512 * 512
    self.assertEqual(module_cost(module).flops, 2 * products)

  @parameterized.parameters('v5p:2x2x1', 'v6e:2x2', 'tpu7x:2x2x1')
  def test_rows_gathered_by_the_sparse_core_can_be_read(self, topology):
    table = lambda t, x: (
      jnp.take(t, jnp.arange(4096) * 7, axis=0, mode='clip') @ x
    )
    module = compiled(topology, table, (1 << 18, 640), (640, 128))
    cost = module_cost(module)
    self.assertEqual(cost.flops, 2 * 4096 * 640 * 128)
    # Gathered rows, not the table, are what moves.
    self.assertLess(cost.bytes, 8 * 4096 * 640 * 2)

  @parameterized.parameters(
    ('tpu7x:2x2x1', 8, 8), ('v6e:2x2', 4, 8), ('v5p:2x2x1', 4, 0)
  )
  def test_prefetches_that_compute_hides(self, topology, devices, hidden):
    f = jax.shard_map(
      prefetch,
      mesh=Mesh(np.array(topology_devices(topology)), ('x',)),
      in_specs=(P(), P(None, 'x', None)),
      out_specs=P(),
      check_vma=False,
    )
    module = compiled(
      topology,
      f,
      (4096, 4096),
      (8, 4096, 4096),
      devices=devices,
      specs=[P(), P(None, 'x', None)],
    )
    moves = transfers(module, chip_named(topology))
    fetched = sum(t.times for t in moves if t.is_fetch)
    self.assertEqual(fetched, 9)
    inside = sum(t.times for t in moves if t.is_fetch and t.hidden)
    # The first one has nothing before it.
    self.assertEqual(inside, hidden)

  # In plain XLA every product is in the text; kernels declare theirs, those
  # that find places among them.
  @parameterized.parameters('xla', None)
  def test_sharing_at_a_million(self, implementation):
    own = accountant.without_drafter(GLM52)
    every = accountant.per_layer_indexers(own)
    flops = {}
    for name, config in (('shared', own), ('every', every)):
      with tempfile.TemporaryDirectory() as folder:
        cost = trunk_cost(
          config,
          'v5p:2x2x1',
          MILLION,
          pathlib.Path(folder),
          implementation=implementation,
        )
      expected = accountant.token_flops(config, MILLION, head=False).total
      if implementation is None:
        # The kernel finds winners' places by products with ones.
        lines = MILLION // LANES
        fulls = config.indexer_types.count('full')
        expected += fulls * sizes_of(config.indexer.topk, lines, False).flops
      print(f'\n{name}: {cost.flops / 1e9:.2f} GFLOP compiled, '
            f'{expected / 1e9:.2f} counted')  # fmt: skip
      self.assertAlmostEqual(cost.flops / expected, 1, delta=0.03)
      flops[name] = cost.flops
    ratio = flops['every'] / flops['shared']
    print(f'ratio {ratio:.3f} (compiled, not run)')
    self.assertGreaterEqual(ratio, 2.65)
    counted = accountant.sharing_ratio(own, MILLION, head=False)
    self.assertAlmostEqual(ratio / counted, 1, delta=0.03)


@pytest.mark.tpu
class PlanTest(parameterized.TestCase):
  def test_the_real_model_at_a_million_on_a_real_slice(self):
    plan = plan_pod(GLM52, 'v6e:16x16', log=print)
    self.assertTrue(plan.fits)
    device = plan.measured['device_bytes']
    weights = 2 * 753_329_940_480 / 256
    self.assertAlmostEqual(device['weights'] / weights, 1, delta=0.02)
    self.assertFalse(plan.measured['loops_unknown'])

  def test_too_small_a_slice_is_an_answer(self):
    plan = plan_pod(presets.PRESETS['tiny'], 'v5e:1x1', context=1 << 22,
                    cache_plan='replicated')  # fmt: skip
    self.assertFalse(plan.fits)
    self.assertGreater(plan.hbm_bytes_per_chip, plan.chip.limit_bytes)
    self.assertGreater(plan.to_json()['executed_flops_per_chip'], 0)

  def test_a_shape_that_libtpu_does_not_know(self):
    with self.assertRaisesRegex(ValueError, 'v6e:3x5.*slices are v6e:1x1'):
      topology_devices('v6e:3x5')

  def test_without_libtpu(self):
    with mock.patch.dict(sys.modules, {'libtpu': None}):
      with self.assertRaisesRegex(ImportError, r'glm-jax\[plan\]'):
        topology_devices('v5e:2x4')
