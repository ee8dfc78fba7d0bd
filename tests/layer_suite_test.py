"""Suite `layer`: cases, goals, both frameworks' processes, parity."""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from glm_jax.benchmarks import Request, layer_cases, layer_suite, load_suite
from glm_jax.benchmarks.layer_cases import (
  CASES,
  JAX,
  KINDS,
  PARITY,
  TORCH,
  LayerCase,
  forms,
)
from glm_jax.benchmarks.layer_jax import compare, device_weights, judge
from glm_jax.benchmarks.measuring import ask

ROOT = pathlib.Path(__file__).parents[1]
DECODE = CASES['tiny_decode_b2']


def request(*select, systems=('auto',), evidence='run'):
  return Request(evidence, (), tuple(select), systems, 'command', 'today')


class CasesTest(parameterized.TestCase):
  def test_cases_of_the_issue_are_there(self):
    for batch in (1, 8):
      for size in ('8k', '32k', '128k', '512k'):
        self.assertIn(f'decode_{size}_b{batch}', CASES)
    for size in (4, 8, 16):
      self.assertEqual(CASES[f'prefill_{size}k'].new, 1024 * size)

  def test_tiny_cases_have_more_keys_than_are_selected(self):
    for case in CASES.values():
      self.assertGreater(case.context, case.config.indexer.topk)
      self.assertEqual(case.config.indexer.num_heads, 32)

  def test_the_model_has_21_full_and_57_shared_layers(self):
    counts = layer_cases.layers_of(CASES['prefill_4k'].config)
    self.assertEqual(counts, dict(full=21, shared=57))

  @parameterized.parameters(
    ('decode_8k_b1', 'full', 82),
    ('decode_8k_b1', 'shared', 77),
    ('decode_128k_b1', 'full', 90),
    ('decode_128k_b8', 'full', 148),
    ('prefill_8k', 'full', 6600),
  )
  def test_floors_are_those_of_the_h200_measurements(self, name, kind, us):
    flops, moved = layer_cases.work(CASES[name], kind)
    floor = 1e6 * max(moved / 4.3e12, flops / 780e12)
    self.assertAlmostEqual(floor / us, 1, delta=0.03)

  @parameterized.parameters('tiny_prefill', 'tiny_decode_b2')
  def test_selections_are_visible_distinct_and_ascending(self, name):
    case = CASES[name]
    for pos, row in zip(case.positions, layer_cases.selection(case)):
      chosen = row[row >= 0]
      self.assertLen(chosen, min(pos + 1, case.config.indexer.topk))
      self.assertTrue((np.diff(chosen) > 0).all())
      self.assertLessEqual(chosen[-1], pos)
      self.assertTrue((row[len(chosen) :] == -1).all())

  def test_indices_of_pytorch_as_ours(self):
    case = LayerCase('three', 'prefill', 3, 1, 'tiny')
    found = layer_cases.contract(np.array([[2, 0], [1, 0], [0, 2]]), case)
    self.assertEqual(found.shape, (3, 64))
    np.testing.assert_array_equal(found[:, :2], [[0, -1], [0, 1], [0, 2]])
    self.assertTrue((found[:, 2:] == -1).all())

  def test_every_process_makes_the_same_numbers(self):
    once, again = (layer_cases.weights(DECODE.config) for _ in range(2))
    for name, array in once.items():
      np.testing.assert_array_equal(array, again[name])


def timed(ours, theirs, case='decode_128k_b1', system='torch_static'):
  """Answers of both frameworks: microseconds by kind, or a problem."""
  answers = []
  for who, by_kind in ((JAX, ours), (system, theirs)):
    for kind, us in by_kind.items():
      what = dict(what='time', case=case, system=who, kind=kind)
      key = 'problem' if isinstance(us, str) else 'us'
      answers.append((what, {key: us}))
  return answers


def reported(answers):
  names = {what['case'] for what, _ in answers}
  cases = [case for case in CASES.values() if case.name in names]
  return layer_suite.report(request(), 'NVIDIA H200', cases, answers)


class GoalsTest(parameterized.TestCase):
  def test_mean_is_of_all_layers(self):
    answers = timed(dict(full=100.0, shared=22.0), dict(full=78.0, shared=78.0))
    rows = {(r.case, r.system): r for r in reported(answers).rows}
    mean = rows['decode_128k_b1/mean', JAX].us
    self.assertAlmostEqual(mean, (21 * 100 + 57 * 22) / 78)
    speedup = rows['decode_128k_b1/mean', 'torch_static'].details['speedup']
    self.assertAlmostEqual(speedup, 78 / mean)

  @parameterized.parameters((25.1, True), (24.9, False))
  def test_a_goal_is_judged_by_the_mean(self, ratio, met):
    same = lambda us: dict(full=us, shared=us)
    report = reported(timed(same(100.0), same(100.0 * ratio)))
    self.assertEqual(report.passed, met)
    if not met:
      self.assertRegex(report.missed[0], '24.9 times as fast as torch_static')

  def test_the_best_form_of_pytorch_counts(self):
    same = lambda us: dict(full=us, shared=us)
    answers = timed(same(100.0), same(5000.0), 'decode_8k_b1', 'torch_eager')
    self.assertTrue(reported(answers).passed)
    answers += timed({}, same(900.0), 'decode_8k_b1', 'torch_static')
    self.assertRegex(reported(answers).missed[0], '9.0 times .* torch_static')

  def test_prefill_is_judged_by_the_full_layer(self):
    same = dict(full=100.0, shared=1e9)
    answers = timed(same, dict(full=590.0, shared=1.0), 'prefill_16k')
    self.assertTrue(reported(answers).passed)  # the goal is over sdpa
    answers = timed(
      same, dict(full=590.0, shared=1.0), 'prefill_16k', 'torch_sdpa'
    )
    self.assertRegex(reported(answers).missed[0], 'prefill_16k/full: 5.9 times')

  def test_what_failed_has_missed_its_goal(self):
    same = dict(full=100.0, shared=100.0)
    for ours, theirs in ((same, dict.fromkeys(KINDS, 'out of memory')),):
      for answers in (timed(ours, theirs), timed(theirs, ours)):
        report = reported(answers)
        self.assertRegex(report.missed[0], 'not measured: out of memory')

  def test_what_was_not_asked_for_is_not_missed(self):
    report = reported(timed(dict(full=1.0, shared=1.0), {}))
    self.assertTrue(report.passed)

  def test_outputs_that_differ_fail_the_suite(self):
    error = lambda x: dict(worst_row_error=x, relative_error=x)
    found = dict(
      full=error(0.5),
      shared=error(0.001),
      agreement=0.2,
      rows_beyond_ties=3,
      layer_tolerance=0.1,
      selection_tolerance=0.05,
      passed=False,
    )
    case = PARITY['glm52', 'decode'].name
    what = dict(what='parity', case=case, systems=['torch_sdpa'])
    same = dict(full=100.0, shared=100.0)
    answers = timed(same, dict(full=1e5, shared=1e5), case, 'torch_sdpa')
    for answer in ({'torch_sdpa': found}, dict(problem='no file')):
      report = reported([*answers, (what, answer)])
      self.assertFalse(report.passed)
      self.assertRegex(report.missed[0], 'outputs differ|not compared')
    report = reported([*answers, (what, {'torch_sdpa': found})])
    rows = {(r.case, r.system): r for r in report.rows}
    row = rows[f'{case}/full', 'torch_sdpa']
    self.assertEqual(row.details['parity'], 0.5)
    json.dumps([vars(r) for r in report.rows])
    report.table(layer_suite.COLUMNS['run'])


class RequestsTest(parameterized.TestCase):
  def test_everything_at_real_sizes_without_a_choice(self):
    names = [c.name for c in layer_suite._chosen_cases(request())]
    self.assertLen(names, 11)
    self.assertFalse([name for name in names if 'tiny' in name])

  def test_tiny_cases_are_asked_for_by_name(self):
    for part in ('tiny', 'decode_'):
      found = layer_suite._chosen_cases(request(part))
      tiny = {case.preset == 'tiny' for case in found}
      self.assertEqual(tiny, {part == 'tiny'})

  def test_parity_comes_first_and_with_every_form(self):
    cases = layer_suite._chosen_cases(request('tiny'))
    for framework in ('torch', JAX):
      asked = layer_suite._requests(framework, cases, (JAX, *TORCH))
      compared = [a for a in asked if a['what'] == 'parity']
      self.assertEqual(asked[: len(compared)], compared)
      self.assertEqual(
        [tuple(a['systems']) for a in compared],
        [forms(CASES[a['case']]) for a in compared],
      )
    kinds = [a['kind'] for a in asked if a['what'] == 'time']
    self.assertEqual(kinds, list(KINDS) * len(cases))

  @parameterized.parameters(
    (dict(evidence='compiled'), (), '--evidence=run'),
    (dict(systems=('torch_flash',)), (), 'torch_flash is unknown: use jax'),
    ({}, ('decode_9k',), 'no case is named decode_9k'),
    (dict(systems=('torch_static',)), ('prefill_4k',), 'has no such case'),
    (dict(systems=(JAX,)), ('prefill_4k',), 'prefill_4k needs a GPU, jax'),
  )
  def test_bad_requests(self, options, select, message):
    with self.assertRaisesRegex(ValueError, message):
      load_suite('layer').run(request(*select, **options), print)

  def test_what_there_is_no_time_for_is_said(self):
    saved = []
    asked = Request(
      'run',
      (),
      ('tiny_decode_b1',),
      (JAX,),
      max_seconds=0,
      save=saved.append,
    )
    report = load_suite('layer').run(asked, print)
    self.assertLen(saved, 1)
    problems = [row.details.get('problem') for row in report.rows]
    self.assertEqual(problems[0], None)
    self.assertIn('not run in 0 s', problems)


class ProcessTest(absltest.TestCase):
  def test_a_case_that_kills_the_process_costs_itself(self):
    cases = [dict(n=n) for n in (1, -2, 13, 4)]
    hellos = []
    found = list(ask('tests.dying_process', '.', cases, hellos.append))
    self.assertEqual([a.get('twice') for a in found], [2, None, None, 8])
    self.assertEqual(found[1]['problem'], 'ValueError: -2 is negative')
    self.assertRegex(found[2]['problem'], 'died: thirteen is too much')
    self.assertNotEqual(found[0]['pid'], found[3]['pid'])
    self.assertEqual(hellos, [dict(device='none')] * 2)

  def test_a_process_that_does_not_start(self):
    with self.assertRaisesRegex(ValueError, 'named tests.absent, so'):
      list(ask('tests.absent', '.', [{}], print, ', so'))


class ParityTest(absltest.TestCase):
  def test_layers_compute_what_pytorch_computes(self):
    import torch

    from glm_jax.benchmarks.layer_torch import TorchMeasure

    before = torch.get_default_dtype()
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    systems = ['torch_sdpa', 'torch_static']
    asked = dict(what='parity', case=DECODE.name, systems=systems)
    self.assertEqual(TorchMeasure(folder)(asked), dict(written=systems))
    self.assertEqual(torch.get_default_dtype(), before)
    weights = device_weights(DECODE.config)
    for found in compare(DECODE, systems, weights, folder).values():
      self.assertTrue(found['passed'], found)
      self.assertGreater(found['agreement'], 0.95)
      for kind in KINDS:
        self.assertLess(found[kind]['relative_error'], 1e-5)

  def test_a_wrong_output_or_selection_is_noticed(self):
    rng = np.random.default_rng(0)
    out = rng.normal(size=(4, 32)).astype(np.float32)
    scores = rng.normal(size=(4, 20)).astype(np.float32)
    best = np.sort(np.argsort(-scores)[:, :5], axis=1)
    worst = np.sort(np.argsort(scores)[:, :5], axis=1)
    theirs = dict(full=out, shared=out, selected=best)
    same = judge('float32', theirs, dict(full=out, shared=out), best, scores)
    self.assertTrue(same['passed'])
    self.assertEqual(same['agreement'], 1)
    off = judge(
      'float32', theirs, dict(full=out, shared=1.01 * out), best, scores
    )
    self.assertFalse(off['passed'])
    other = judge('float32', theirs, dict(full=out, shared=out), worst, scores)
    self.assertEqual((other['passed'], other['rows_beyond_ties']), (False, 4))

  def test_the_pytorch_side_loads_no_jax(self):
    code = (
      'import sys, glm_jax.benchmarks.layer_torch; '
      'assert "jax" not in sys.modules'
    )
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)

  @pytest.mark.long
  def test_the_whole_suite_at_tiny_sizes(self):
    report = load_suite('layer').run(request('tiny'), print)
    self.assertTrue(report.passed, report.missed)
    found = {(row.case, row.system): row for row in report.rows}
    for case in CASES.values():
      if case.preset != 'tiny':
        continue
      for system in (JAX, *forms(case)):
        for kind in (*KINDS, layer_suite.MEAN):
          row = found[f'{case.name}/{kind}', system]
          self.assertGreater(row.us, 0, row)
    for case in (PARITY['tiny', 'decode'], PARITY['tiny', 'prefill']):
      for system in forms(case):
        details = found[f'{case.name}/parity', system].details
        self.assertLess(details['parity'], 1e-5)


if __name__ == '__main__':
  absltest.main()
