"""A step of the planner: its process, its arguments, its experts' tiles."""

from unittest import mock

import jax
import small_models
from absl.testing import parameterized
from jax.sharding import Mesh
from plan_requests import request

from glm_jax.cache import init_cache
from sharding import capacity, make_mesh, plan_named
from sharding.mesh import MeshShape
from sharding.planner import process, steps
from sharding.planner.process import CompileError
from sharding.planner.request import PlanRequest


class ProcessTest(parameterized.TestCase):
  def test_a_compile_that_takes_too_much_memory_is_ended(self):
    hungry = (
      'import time\nprint("eating", flush=True)\n'
      'food = [bytes(1 << 20) * 400 for _ in range(2)]\n'
      'food = [bytearray(f) for f in food]\ntime.sleep(60)\n'
    )
    lines = []
    with mock.patch.object(process, '_PROGRAM', hungry):
      with self.assertRaisesRegex(CompileError, 'more than 0 GiB of memory'):
        process.compile_step(
          request(), log=lines.append, memory_limit=200 << 20
        )
    self.assertEqual(lines, ['eating'])

  def test_a_crash_leaves_its_last_words(self):
    crash = 'import sys\nprint("no such flag", file=sys.stderr)\nsys.exit(7)\n'
    with mock.patch.object(process, '_PROGRAM', crash):
      with self.assertRaisesRegex(CompileError, 'code 7: no such flag'):
        process.compile_step(request())

  def test_an_error_of_the_worker_is_one_line(self):
    says = (
      'import sys, pathlib\n'
      'pathlib.Path(sys.argv[2], "result").write_text(\'{"error": "so"}\')\n'
    )
    with mock.patch.object(process, '_PROGRAM', says):
      with self.assertRaisesRegex(CompileError, '^so$'):
        process.compile_step(request())


class StepTest(parameterized.TestCase):
  def test_bytes_of_shards_and_of_what_is_not_read(self):
    mesh = Mesh([jax.devices()[0]], ('x',))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    place = lambda tree: jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree
    )
    arguments = place({'a': jax.numpy.ones(4), 'b': jax.numpy.ones(8)})
    traced = jax.jit(lambda x: x['a'] + 1).trace(arguments)
    self.assertEqual(steps.device_bytes(arguments), 48)
    self.assertEqual(steps.unread(traced, (arguments,)), 32)

  def test_transient_layers_and_pools_by_the_plans_own_count(self):
    config = small_models.small_config(0)
    mesh = make_mesh(MeshShape(context=8), jax.devices()[:8])
    plan = plan_named('token_split', config, mesh)
    r = PlanRequest(
      config=config,
      topology='v6e:2x4',
      mesh=MeshShape(context=8),
      context=1024,
    )
    cache, slots = steps.abstract_cache(r, plan)
    real = init_cache(config, r.pages, dtype='auto', plan=plan)
    for got, want in zip(jax.tree.leaves(cache), jax.tree.leaves(real)):
      self.assertEqual(got.shape, want.shape)
      self.assertEqual(got.sharding, want.sharding)
    record = capacity.largest_record(config, physical=True)
    self.assertEqual(slots, 2 * record * 1024)


class ExpertTilesTest(parameterized.TestCase):
  def test_rows_of_one_rank(self):
    tiles = lambda **o: steps.expert_tiles(request(**o))
    # 8 choices over 256 ranks: one rank runs one, the others wait for it.
    self.assertEqual(tiles(), 1)
    # 64 ranks hold 4 experts each; 32 rows choose 256 in all, 4 a rank.
    few = dict(topology='v6e:8x8', mesh=MeshShape(context=64))
    self.assertEqual(tiles(batch=32, **few), 4)
    # 65,536 rows choose 8 of 256 experts, one a rank: 2,048 rows of 256.
    self.assertEqual(tiles(step='prefill', chunk=65_536), 8)
