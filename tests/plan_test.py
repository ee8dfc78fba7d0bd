"""The pod planner: what it says, what it refuses, what it watches.

Nothing is compiled for a TPU here; `tests/tpu/plan_test.py` does that.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import pytest
import small_models
from absl.testing import parameterized
from plan_requests import GLM52, request

from sharding import accountant, capacity
from sharding.chips import CHIPS
from sharding.mesh import MeshShape
from sharding.planner import meshes, process, report, search, topology
from sharding.planner.plan import PodPlan

ROOT = pathlib.Path(__file__).resolve().parents[1]
MILLION = 1_048_576
GB = 10**9


def fetch(seconds=1.0, window=2.0, times=1.0, hidden=True, asynchronous=True):
  return dict(
    kind='all-gather',
    name='f',
    op_name='jit(step)/fetch/all_gather',
    group=256,
    bytes=seconds,
    times=times,
    asynchronous=asynchronous,
    seconds=seconds,
    hidden_seconds=min(seconds, window),
    window_seconds=window,
    hidden=hidden,
    is_fetch=True,
  )


def measured(total=20 * GB, cache=5 * GB, transfers=(), **changes):
  device = dict(
    weights=10 * GB, cache=cache, state=0, temporaries=GB, total=total,
    fits_compiler=True,
  )  # fmt: skip
  return dict(
    device_bytes=device,
    flops=3e12,
    bytes=2e9,
    compute_seconds=1e-3,
    memory_seconds=2e-3,
    transfers=list(transfers),
    collectives=[
      dict(kind='all-gather', asynchronous=True, count=4.0, bytes=1e9,
           exposed_seconds=0.5)
    ],
    operations=[],
    loops_assumed={},
    loops_unknown=[],
    kernels_without_cost=[],
    seconds_to_compile=1.0,
    slot_bytes=0,
    movement=None,
  ) | changes  # fmt: skip


class PlanTest(parameterized.TestCase):
  def test_keys_of_the_design(self):
    plan = PodPlan(request(), measured())
    out = plan.to_json()
    keys = (
      'fits', 'hbm_bytes_per_chip', 'hbm_limit_bytes', 'devices_per_chip',
      'flops_per_token', 'roofline_seconds', 'prefill_seconds_lower_bound',
      'fetches_hidden', 'fetches_exposed',
    )  # fmt: skip
    self.assertContainsSubset(keys, out)
    json.dumps(out)
    self.assertEqual(out['evidence'], 'compiled, not run')
    self.assertEqual(out['roofline_seconds'], 2e-3)
    token = accountant.token_flops(GLM52, MILLION).total
    self.assertEqual(out['flops_per_token'], token)
    # 200 + the drafter's share of PFLOP on 256 chips of 918 TFLOP/s.
    bound = out['prefill_seconds_lower_bound']
    self.assertAlmostEqual(bound, 206e15 / (256 * 918e12), delta=0.02)

  @parameterized.parameters(
    ('v6e:16x16', MeshShape(context=256), 31 * GB, True),
    ('v6e:16x16', MeshShape(context=256), 34 * GB, False),
    # Two devices a chip: each may use half.
    ('tpu7x:4x4x4', MeshShape(context=128), 100 * GB, True),
    ('tpu7x:4x4x4', MeshShape(context=128), 102 * GB, False),
    ('v5p:4x4x4', MeshShape(context=64), 101 * GB, True),
    ('v5p:4x4x4', MeshShape(context=64), 103 * GB, False),
  )
  def test_a_chip_is_judged_on_all_its_devices(self, name, mesh, total, fits):
    plan = PodPlan(request(topology=name, mesh=mesh), measured(total))
    self.assertEqual(plan.fits, fits)
    per_chip = CHIPS[name.split(':')[0]].devices_per_chip
    self.assertEqual(plan.hbm_bytes_per_chip, total * per_chip)
    out = plan.to_json()
    self.assertEqual(
      out['headroom_bytes_per_chip'],
      out['hbm_limit_bytes'] - out['hbm_bytes_per_chip'],
    )

  def test_what_the_compiler_refuses_does_not_fit(self):
    figures = measured(GB)
    figures['device_bytes']['fits_compiler'] = False
    self.assertFalse(PodPlan(request(), figures).fits)

  def test_fetches_and_the_chunk_that_hides_them(self):
    prefill = request(step='prefill', chunk=1000)
    first = fetch(window=0.0, hidden=False)
    plan = lambda *moves: PodPlan(prefill, measured(transfers=moves))
    few = plan(first, fetch(seconds=1.0, window=2.0, times=18.0))
    self.assertEqual(few.count_fetches(True), 18)
    self.assertEqual(few.count_fetches(False), 1)
    self.assertEqual(few.smallest_hiding_chunk, 500)
    late = plan(first, fetch(seconds=3.0, window=2.0, times=3.0, hidden=False))
    self.assertEqual(late.count_fetches(False), 4)
    self.assertEqual(late.smallest_hiding_chunk, 1500)
    # A blocking fetch is hidden by no chunk.
    blocking = fetch(asynchronous=False, hidden=False, times=2.0)
    self.assertIsNone(plan(blocking).smallest_hiding_chunk)
    self.assertIsNone(plan().smallest_hiding_chunk)
    # The same place in the program is one line of the JSON.
    (line,) = late.to_json()['transfers']
    self.assertEqual((line['count'], line['seconds']), (4.0, 1.0 + 3 * 3.0))
    # Links may bound a prefill that arithmetic does not.
    slow = plan(fetch(seconds=10.0, window=20.0))
    chunks = -(-MILLION // 1000)
    self.assertEqual(slow.prefill_seconds_lower_bound, 10.0 * chunks)

  def test_collectives_that_block(self):
    some = [
      dict(kind=k, asynchronous=a, count=n, bytes=1.0, exposed_seconds=0.0)
      for k, a, n in (
        ('all-reduce', False, 156.0),
        ('all-gather', False, 78.0),
        ('all-gather', True, 50.0),
      )
    ]
    plan = PodPlan(request(), measured(collectives=some))
    self.assertEqual(plan.blocking_collectives_per_layer, 3)

  def test_model_flops_of_each_step(self):
    flops = lambda **o: PodPlan(request(**o), measured()).model_flops.total
    one = accountant.token_flops(GLM52, MILLION).total
    self.assertEqual(flops(batch=3), 3 * one)
    verify = flops(step='verify', num_speculative_tokens=3)
    self.assertAlmostEqual(verify / one, 4, delta=0.2)
    rows = accountant.rows_flops(GLM52, MILLION - 512, 512, head=False)
    drafter = accountant.rows_flops(
      GLM52, MILLION - 512, 512, head=False, drafter=True
    )
    prefill = flops(step='prefill', chunk=1024, batch=2)
    self.assertEqual(prefill, 2 * (rows.total + drafter.total))
    serve = dict(step='serve', num_speculative_tokens=3)
    self.assertEqual(flops(chunk=0, **serve), verify)  # nobody prefills
    prompt = flops(step='prefill', chunk=512)
    self.assertEqual(flops(chunk=512, **serve), verify + prompt)

  def test_table_and_markdown(self):
    moves = [fetch(), fetch(hidden=False)]
    plan = PodPlan(
      request(step='prefill', chunk=1024), measured(transfers=moves)
    )
    text = report.table(plan)
    for part in (
      'fits (compiled, not run)',
      'head-room',
      '1 hidden',
      'weights',
    ):
      self.assertIn(part, text)
    rows = report.markdown([('token_split', plan), ('layer_split', 'why not')])
    self.assertIn('| token_split | v6e:16x16 | yes | 20.00 (33.5)', rows)
    self.assertIn('why not', rows)

  def test_picture(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, 'plans.png')
      plan = PodPlan(request(), measured())
      report.plot([('a', plan), ('b', 'no')], str(path))
      self.assertEqual(path.read_bytes()[1:4], b'PNG')


class RequestTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(step='draft'), "step='draft'.*decode, verify"),
    (dict(cache_plan='ring'), "cache_plan='ring'.*token_split"),
    (dict(batch=0), 'batch=0 must be positive'),
    (dict(kv_cache_dtype='int4'), "kv_cache_dtype='int4'"),
    (dict(weight_dtype='int4'), "'int4'"),
    (dict(step='verify'), 'num_speculative_tokens=0 must be 1 to 8'),
    (dict(num_speculative_tokens=2), 'belongs to step=verify'),
    (dict(mesh=MeshShape(context=128)), '128 devices, v6e:16x16 has 256'),
    (dict(topology='tpu7x:4x4x4'), 'tpu7x:4x4x4 has 128'),
    (
      dict(config=accountant.without_drafter(GLM52), step='verify'),
      'needs a drafter',
    ),
  )
  def test_bad_input_names_the_value(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      request(**changes)

  @parameterized.parameters(
    ('v9:2x2', 'v9.*v5e, v5p, v6e, tpu7x'),
    ('v6e', 'must name its chips'),
    ('v6e:4x4x4', 'v6e has 2 axes'),
    ('v6e:32x32', 'at most 256 chips'),
    ('smallest:v9', 'smallest: comes one of'),
    ('smallest', 'smallest: comes one of'),
  )
  def test_unknown_topologies(self, name, message):
    with self.assertRaisesRegex(ValueError, message):
      topology.candidates(name)

  def test_slices(self):
    self.assertEqual(topology.num_chips('tpu7x:4x4x8'), 128)
    self.assertEqual(topology.num_devices('tpu7x:4x4x8'), 256)
    self.assertEqual(topology.num_devices('v5p:4x4x8'), 128)
    names = topology.candidates('smallest:v5p')
    sizes = [topology.num_chips(name) for name in names]
    self.assertEqual(sizes, sorted(sizes))
    self.assertEqual(topology.candidates('v6e:8x8'), ('v6e:8x8',))

  def test_rows_and_pages(self):
    self.assertEqual(request(batch=3).rows, 3)
    verify = request(step='verify', batch=3, num_speculative_tokens=4)
    self.assertEqual(verify.rows, 15)
    self.assertEqual(verify.pages, MILLION // 64 + 1)
    # The default chunk is the least whose rows are split over devices.
    self.assertEqual(request(step='prefill').chunk, 256 * 256)


class MeshTest(parameterized.TestCase):
  def test_choices_suit_the_model(self):
    for name in ('v6e:8x8', 'v5p:8x8x8'):
      shapes = meshes.mesh_choices(GLM52, name)
      for shape in shapes:
        self.assertEqual(shape.size, topology.num_devices(name))
      # 256 experts are not dealt over 512 ranks.
      self.assertLessEqual(max(s.context for s in shapes), 256)

  def test_known_model_on_no_mesh(self):
    odd = small_models.small_config(0, vocab_size=97)
    with self.assertRaisesRegex(ValueError, 'no mesh of v6e:16x16.*suits'):
      meshes.mesh_choices(odd, 'v6e:16x16')

  def test_estimate_is_weights_and_cache(self):
    r = request()
    weights = 2 * 753_329_940_480 / 256
    cache = capacity.capacity_bytes(GLM52, 'token_split', 256, physical=True)
    estimate = meshes.estimated_bytes(r)
    self.assertAlmostEqual(
      estimate, weights + cache * MILLION, delta=0.01 * estimate
    )
    self.assertTrue(meshes.has_room(r))
    small = request(topology='v6e:4x4', mesh=MeshShape(context=16))
    self.assertFalse(meshes.has_room(small))


class SearchTest(parameterized.TestCase):
  """Searches over a compiler that follows a formula."""

  def setUp(self):
    super().setUp()
    self.compiled = []
    self.enter_context(
      mock.patch.object(process, 'compile_step', self._compile)
    )

  def _compile(self, request, **_):
    self.compiled.append(request)
    estimate = meshes.estimated_bytes(request)
    return measured(
      total=int(estimate + 0.5 * GB), cache=int(meshes.cache_bytes(request))
    )

  def test_smallest_slice(self):
    plan = search.plan_pod(GLM52, 'smallest:v6e')
    self.assertEqual(plan.request.topology, 'v6e:8x8')
    self.assertTrue(plan.fits)
    # What cannot hold weights and cache is not even compiled.
    self.assertLen(self.compiled, 1)
    fp8 = search.plan_pod(
      GLM52, 'smallest:v6e', weight_dtype='fp8', kv_cache_dtype='fp8'
    )
    self.assertEqual(fp8.request.topology, 'v6e:4x8')

  def test_nothing_fits_is_an_answer(self):
    plan = search.plan_pod(GLM52, 'smallest:v5e', batch=64)
    self.assertFalse(plan.fits)
    self.assertEqual(plan.request.topology, 'v5e:16x16')

  @parameterized.parameters(1, 40)
  def test_largest_batch(self, batch):
    plan = search.plan_pod(GLM52, 'v6e:16x16', fit='batch', batch=batch)
    best = plan.request.batch
    self.assertTrue(plan.fits)
    more = dataclasses.replace(plan.request, batch=int(best * 1.04) + 1)
    limit = CHIPS['v6e'].limit_bytes
    self.assertGreater(meshes.estimated_bytes(more) + 0.5 * GB, limit)
    self.assertLess(len(self.compiled), 8)

  def test_largest_context(self):
    plan = search.plan_pod(GLM52, 'v6e:16x16', fit='context', context=131_072)
    self.assertTrue(plan.fits)
    self.assertGreater(plan.request.context, MILLION)
    self.assertEqual(plan.request.context % 64, 0)

  def test_nothing_fits_at_all(self):
    plan = search.plan_pod(GLM52, 'v6e:4x4', fit='batch')
    self.assertFalse(plan.fits)

  def test_compare(self):
    rows = search.compare_plans(GLM52, 'v6e:16x16')
    self.assertLen(rows, 6)
    # 79 layers are not dealt to 256 ranks.
    self.assertIn('use 1 to 79', dict(rows)['layer_split, IndexShare'])
    tokens = {
      name: plan.flops_per_token()
      for name, plan in rows
      if not isinstance(plan, str)
    }
    ratio = (
      tokens['token_split, an indexer a layer']
      / tokens['token_split, IndexShare']
    )
    self.assertAlmostEqual(ratio, 2.73, delta=0.01)

  def test_bad_fit(self):
    with self.assertRaisesRegex(ValueError, "fit='rows'.*batch, context"):
      search.plan_pod(GLM52, 'v6e:8x8', fit='rows')


class LauncherTest(parameterized.TestCase):
  @parameterized.parameters(
    ([], '--topology is needed'),
    (['--topology=v6e:2x2', '--mesh=context=3'], 'mesh .*context=3'),
  )
  def test_bad_input_is_one_line_and_exit_2(self, flags, message):
    self.check(flags, message)

  @parameterized.parameters(
    (['--topology=v9:2x2'], 'v9'),
    (['--topology=v6e:2x2', '--mesh=ring=4'], 'ring'),
    (['--topology=v6e:2x2', '--step=sleep'], 'sleep'),
    (['--topology=v6e:2x2', '--model=nowhere'], 'nowhere'),
  )
  @pytest.mark.long
  def test_more_bad_input(self, flags, message):
    self.check(flags, message)

  def check(self, flags, message):
    done = subprocess.run(
      [sys.executable, ROOT / 'launch' / 'plan.py', *flags],
      capture_output=True,
      text=True,
    )
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertRegex(done.stderr.strip().splitlines()[-1], message)
    self.assertNotIn('Traceback', done.stderr)
    self.assertEqual(done.stdout, '')
