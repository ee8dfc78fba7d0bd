"""Benchmarks: what is counted, what is read from the compiler, the command."""

import dataclasses
import inspect
import json
import math
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from glm_jax.benchmarks import (
  Device,
  Report,
  Request,
  Row,
  comparisons,
  load_suite,
  op_suite,
  tune,
  work,
  workers,
)
from glm_jax.benchmarks.compiled import kernels, moves
from glm_jax.benchmarks.timing import make_args, time_case
from pallas_kernels import arg_specs, block_sizes
from pallas_kernels.arg_specs import arg_spec
from pallas_kernels.tiling import PAGE

PROGRAM = """
%fused_computation (param_0: bf16[1024,640]) -> bf16[1024,640] {
  %param_0 = bf16[1024,640]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %copy.9 = bf16[1024,640]{0,1:T(8,128)(2,1)} copy(%param_0)
}

ENTRY %main (a: bf16[1024,640]) -> bf16[8,640] {
  %a = bf16[1024,640]{1,0:T(8,128)(2,1)} parameter(0)
  %copy.1 = bf16[1024,640]{1,0:T(8,128)(2,1)} copy(%a)
  %copy.2 = s32[]{:T(128)} copy(%constant.31)
  %add.5 = bf16[1024,640]{1,0} fusion(%a), kind=kLoop, calls=%fused_computation
  %copy_add_fusion = bf16[1024,640]{1,0} fusion(%a), kind=kLoop, calls=%other
  %copy-start = (bf16[1024,640]{1,0}, bf16[1024,640]{1,0}, u32[]) copy-start(%a)
  ROOT %slice = bf16[8,640]{1,0} slice(%copy.1), slice={[0:8], [0:640]}
}
"""


class ReadingTest(absltest.TestCase):
  def test_copies_are_found_and_what_is_inside_fusions_is_not(self):
    bytes_ = 1024 * 640 * 2
    self.assertEqual(
      moves(PROGRAM, bytes_),
      (
        f'copy.1 (copy, {bytes_} bytes)',
        f'copy_add_fusion (fusion, {bytes_} bytes)',
        f'copy-start (copy-start, {bytes_} bytes)',
      ),
    )
    self.assertEqual(moves(PROGRAM, bytes_ + 1), ())

  def test_kernels_by_name(self):
    text = 'a {kernel_name = "b"} {kernel_name = "c"} {kernel_name = "b"}'
    self.assertEqual(kernels(text), ('b', 'c'))

  def test_cycles_by_op(self):
    folder = self.enter_context(tempfile.TemporaryDirectory())
    folder = pathlib.Path(folder)
    for name, cycles in (('a.1', 7), ('b', 1000)):
      path = folder / f'{name}_TPU v6 lite_static_llo_profile.textproto'
      path.write_text(
        f'hlo_op_estimate {{\n  hlo_op_name: "{name}"\n'
        f'  estimated_cycles: {cycles}\n}}\n'
      )
    found = workers.read_cycles(folder)
    self.assertEqual(found, {'a.1': 7, 'b': 1000})


class WorkTest(parameterized.TestCase):
  def test_scores_by_hand(self):
    spec = arg_spec('indexer_scores', 'decode_8x1m', 'bf16')
    found = work.op_work(spec)
    keys = 8 * 1_048_576
    self.assertEqual(found.flops, 2 * keys * 32 * 128)
    # Keys once, scores once; queries, weights and the table are small.
    self.assertAlmostEqual(found.bytes / (keys * (256 + 4)), 1, delta=1e-3)

  def test_rows_of_one_sequence_share_its_keys(self):
    one = work.op_work(arg_spec('streaming_topk', 'decode_8x1m', 'fp8'))
    eight = work.op_work(arg_spec('streaming_topk', 'verify_8x8_1m', 'fp8'))
    self.assertEqual(eight.flops, 8 * one.flops)
    self.assertLess(eight.bytes, 1.01 * one.bytes)

  def test_attention_by_hand(self):
    spec = arg_spec('topk_gather_attention', 'decode_8x1m', 'bf16')
    found = work.op_work(spec)
    self.assertEqual(found.gathered, 8 * 2048 * 1280)
    self.assertEqual(found.flops, 2 * 8 * 64 * 2048 * (576 + 512))

  def test_scales_are_gathered_by_lines_of_two_pages(self):
    pages = 8 * 1_048_576 // 64
    for dtype, lines in (('bf16', 0), ('fp8', pages)):
      spec = arg_spec('indexer_scores', 'decode_8x1m', dtype)
      self.assertEqual(work.op_work(spec).gathered, lines * 512)

  def test_experts_by_hand(self):
    few = work.op_work(arg_spec('grouped_matmul_in', 'decode_8x1m', 'bf16'))
    rows = 8 * 8
    weights = rows * 2048 * 6144 * 2  # 64 experts of 256 at most
    self.assertEqual(few.bytes, weights + rows * (6144 + 2048) * 2)
    self.assertEqual(few.flops, 2 * rows * 2048 * 6144)

  @parameterized.parameters(*(s.name for s in arg_specs.arg_specs()))
  def test_a_representative_is_the_same_op_in_small(self, name):
    spec = arg_spec(*name.split('/'))
    small, times = work.representative(spec, 1)
    self.assertGreaterEqual(times, 1)
    self.assertEqual(len(small.args), len(spec.args))
    for a, b in zip(small.args, spec.args):
      self.assertEqual(a is None, b is None)
      if a is not None:
        self.assertEqual((a.dtype, a.ndim), (b.dtype, b.ndim))
    ratio = work.op_work(spec).flops / work.op_work(small).flops
    if spec.op.startswith('grouped_matmul'):
      # A visit multiplies a whole tile, for however few of its rows.
      tiles = -(-spec.rows // small.rows)
      experts = min(256, spec.rows - 1)
      self.assertEqual(times, (tiles + experts) / (1 + 8))
    else:
      self.assertAlmostEqual(ratio / times, 1, delta=1e-6)


class ShapesTest(parameterized.TestCase):
  def test_unknown_names(self):
    for names in (('op', 'tiny', 'bf16'), ('streaming_topk', 'x', 'bf16')):
      with self.assertRaisesRegex(ValueError, 'is unknown: use one of'):
        arg_spec(*names)

  def test_cases_of_the_issue_are_there(self):
    names = {s.name for s in arg_specs.arg_specs()}
    for op in arg_specs.OPS[1:2]:
      for case in arg_specs.CASES:
        self.assertIn(f'{op}/{case}/fp8', names)

  @parameterized.parameters('bf16', 'fp8')
  def test_arrays_fit_the_shapes(self, dtype):
    for op in arg_specs.OPS[:3]:
      spec = arg_spec(op, 'tiny', dtype)
      args = make_args(spec)
      for array, shape in zip(args, spec.args):
        if shape is not None:
          self.assertEqual(
            (array.shape, array.dtype), (shape.shape, shape.dtype)
          )
      if op == 'streaming_topk':
        self.assertGreater(spec.context, spec.options['k'])
        self.assertLen(set(np.asarray(args[4]).ravel().tolist()), args[4].size)
        self.assertEqual(int(args[6].max()), spec.context - 1)
        self.assertEqual(args[4].shape[1] * PAGE, spec.context)

  def test_a_case_is_timed(self):
    spec = arg_spec('indexer_scores', 'tiny', 'bf16')
    seconds, details = time_case(spec, 'xla')
    self.assertGreater(seconds, 0)
    self.assertGreaterEqual(details['repeats'], 1)


class SizesTest(parameterized.TestCase):
  def test_bucket(self):
    shape = dict(rows=65, outputs=2048, inputs=1)
    self.assertEqual(
      block_sizes.bucket(shape), 'rows=128 outputs=2048 inputs=1'
    )

  def test_no_generation_means_the_heuristic(self):
    self.assertIsNone(block_sizes.generation())
    sizes = block_sizes.block_sizes(
      'grouped_matmul', dict(rows=64), jnp.bfloat16, dict(row_tile=128)
    )
    self.assertEqual(sizes, dict(row_tile=128))

  def test_the_mesh_in_the_context_names_the_generation(self):
    options = dict(device_kind='TPU v6 lite', num_cores=1)
    kind = jax.sharding.AbstractDevice
    if 'platform' in inspect.signature(kind).parameters:
      options['platform'] = 'tpu'
    mesh = jax.sharding.AbstractMesh(
      (1,), ('x',), abstract_device=kind(**options)
    )
    with jax.sharding.use_abstract_mesh(mesh):
      self.assertEqual(block_sizes.generation(), 'v6e')

  def test_every_tuned_entry_says_where_it_comes_from(self):
    for op, generations in block_sizes.tuned().items():
      self.assertIn(op, arg_specs.OPS + ('grouped_matmul',))
      for buckets in generations.values():
        for entries in buckets.values():
          for entry in entries.values():
            self.assertContainsSubset(('sizes', 'evidence'), entry)


class TuningTest(absltest.TestCase):
  def test_a_trial_stands_in_place_of_the_file(self):
    ask = lambda: block_sizes.block_sizes(
      'op', dict(rows=8), jnp.bfloat16, dict(queries=1)
    )
    with block_sizes.trial({'op': dict(queries=4)}):
      self.assertEqual(ask(), dict(queries=4))
    self.assertEqual(ask(), dict(queries=1))

  def test_only_a_clear_gain_wins(self):
    self.assertEqual(tune.winner({None: 1000, 1: 1000, 2: 950}), 2)
    self.assertIsNone(tune.winner({None: 1000, 1: 1000, 2: 990}))
    self.assertIsNone(tune.winner({2: 950}))  # nothing to compare with

  def test_entries_of_other_shapes_are_kept(self):
    old = tune.entry_of('v6e', 'bf16', 'decode_8x1m', dict(sizes={}))
    new = tune.entry_of('v6e', 'bf16', 'decode_64x128k', dict(sizes={}))
    (by_bucket,) = tune.merged(old, new)[tune.OP]['v6e'].values()
    self.assertLen(by_bucket, 2)


class SuiteTest(parameterized.TestCase):
  def test_unknown_suite(self):
    with self.assertRaisesRegex(ValueError, "suite 'ops' is unknown: use one"):
      load_suite('ops')

  def test_nothing_selected(self):
    request = Request('run', (), select=('decode_9x1m',))
    with self.assertRaisesRegex(ValueError, 'no case is named decode_9x1m'):
      load_suite('op').run(request, print)

  def test_rows_of_a_run(self):
    device = Device('here', bandwidth=1e9, flops=1e12)
    request = Request(
      'run', (device,), ('indexer_scores/tiny/bf16',), ('xla', 'tpu'), 'c', 'd'
    )
    report = load_suite('op').run(request, lambda line: None)
    ran, refused = report.rows
    least = work.op_work(arg_spec('indexer_scores', 'tiny', 'bf16'))
    self.assertAlmostEqual(ran.ratio * ran.roofline_share, 1)
    self.assertAlmostEqual(ran.us * ran.gbps * 1e3 / least.bytes, 1)
    self.assertIsNone(refused.us)  # the TPU kernel on a CPU
    self.assertNotEmpty(refused.details['problem'])
    self.assertIn('note: median', report.table(('problem',)))
    self.assertTrue(report.passed)

  def test_a_goal_that_is_missed(self):
    row = Row(
      suite='op', case='indexer_scores/decode_8x1m', system='tpu', device='v6e',
      dtype='bf16', shape='', us=10.0, tflops=1.0, gbps=1.0,
      roofline_share=0.5, ratio=2.0, evidence='compiled', command='', date='',
      details=dict(copies=['copy.1 (copy, 9 bytes)']),
    )  # fmt: skip
    missed = op_suite._missed(row)
    self.assertLen(missed, 2)
    report = Report((row,), (), tuple(missed))
    self.assertFalse(report.passed)
    self.assertIn(
      'MISSED: indexer_scores/decode_8x1m bf16 on v6e: 2.00x', report.table()
    )

  def test_busy_goals_of_a_card(self):
    device = Device('NVIDIA H200', bandwidth=1e9, flops=1e12)
    case = 'topk_gather_attention/decode_64x32k'
    request = Request('run', (device,), (f'{case}/bf16',), ('gpu',), 'c', 'd')
    found = []
    for busy in (73.0, 71.0, None):
      timed = 1e-3, dict(busy_us=busy)
      with mock.patch.object(op_suite, 'time_case', return_value=timed):
        report = load_suite('op').run(request, lambda line: None)
      self.assertEqual([row.case for row in report.rows], [case])
      found.append(report.missed)
    self.assertEqual(
      found,
      [(f'{case} bf16 by gpu on NVIDIA H200: busy 73 us, goal 72',), (), ()],
    )
    elsewhere = dataclasses.replace(request, devices=(Device('cpu', 1.0, 1.0),))
    with self.assertRaisesRegex(ValueError, 'no case is named'):
      load_suite('op').run(elsewhere, print)

  @parameterized.parameters(('fp8', True, 100), ('fp8', False, 130),
                            ('bf16', True, 130))  # fmt: skip
  def test_a_gather_on_the_sparse_cores_is_in_no_share(self, dtype, on, left):
    """The smaller case that is simulated has it on the TensorCore."""
    device = Device('v6e', bandwidth=1e12, flops=1e15, clock=1e9)
    request = Request('compiled', (device,), command='c', date='d')
    spec = arg_spec('indexer_scores', 'decode_8x1m', dtype)
    memory = dict(temporaries=0, arguments=0, copies=(), kernels=(),
                  seconds=1.0, sparsecore=on)  # fmt: skip
    cycles = dict(indexer_scores=98, gather_fusion=2, **{'gather_fusion.1': 30})
    row = op_suite._compiled_row(
      request, device, 'tpu', spec, memory, dict(cycles=cycles)
    )
    self.assertEqual(row.details['cycles'], 8 * left)
    floor = row.details.get('sparsecore_us')
    moved = 8 * 1_048_576 // 64 * 512 * 2
    self.assertEqual(floor, moved / 1e6 if on and dtype == 'fp8' else None)

  def test_comparisons_by_hand(self):
    """A selection of 10 cycles a row; a scoring of 90 us, attention of 10."""
    device = Device('v6e', bandwidth=1e12, flops=1e15, clock=1e9)
    request = Request('compiled', (device,), command='c', date='d')
    by_op = {'indexer_scores.1': 70, 'select_topk.1': 10}
    kept = dict(cycles_by_op=by_op, simulated_share=1 / 8)
    made = lambda case, us, details: Row(
      suite='op', case=case, system='tpu', device='v6e', dtype='bf16',
      shape='', us=us, evidence='compiled', command='c', date='d',
      details=details,
    )  # fmt: skip
    rows = [
      made('streaming_topk/decode_8x1m', 90.0, kept),
      made('topk_gather_attention/decode_8x1m', 6.0, dict(sparsecore_us=4.0)),
    ]
    sort = lambda cases: iter([dict(cycles={'sort': 100})])
    with mock.patch.object(comparisons, 'measure_all', sort):
      ours, theirs, shared, each = comparisons.compare(
        request, device, rows, lambda line: None
      )
    self.assertEqual(ours.details['cycles'], 8 * 10)
    self.assertEqual(theirs.details['cycles'], 64 * 100)
    self.assertEqual(ours.details['fewer_cycles'], 80)
    self.assertAlmostEqual(shared.us, 90 + 4 * 10)
    self.assertAlmostEqual(each.us, 4 * (90 + 10))
    self.assertEmpty(op_suite._missed(ours))
    self.assertLen(op_suite._missed(shared), 1)  # 3.08x, below 3.3x

  def test_command(self):
    folder = self.enter_context(tempfile.TemporaryDirectory())
    target = folder + '/rows.json'
    run = lambda *args: subprocess.run(
      [sys.executable, 'launch/bench.py', *args], capture_output=True, text=True
    )
    bad = run('--suite=nothing')
    self.assertEqual(bad.returncode, 2)
    self.assertEqual(len(bad.stderr.strip().splitlines()), 1)
    good = run(
      '--evidence=run', '--op=indexer_scores/tiny/bf16', '--system=xla',
      f'--json={target}',
    )  # fmt: skip
    self.assertEqual(good.returncode, 0, good.stderr)
    row = json.loads(pathlib.Path(target).read_text())['rows'][0]
    self.assertContainsSubset(
      'suite case system device dtype shape us tflops gbps roofline_share '
      'ratio evidence command date'.split(),
      row,
    )
    self.assertTrue(math.isfinite(row['us']))


if __name__ == '__main__':
  absltest.main()
