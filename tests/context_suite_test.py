"""Suite `context`: arithmetic by hand, goals, and a dry run of the slice."""

import dataclasses
import pathlib
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from glm_jax import forward, load_config
from glm_jax.benchmarks import Device, Request, context_report, load_suite
from glm_jax.benchmarks.context_bound import (
  attention_work,
  bounds,
  decode_work,
  integrate,
  pairs,
  prefill_work,
  sampled_chunks,
  step_work,
)
from glm_jax.benchmarks.context_plans import DensePlan
from glm_jax.benchmarks.context_report import Case
from glm_jax.benchmarks.context_slice import (
  SETTINGS,
  context_name,
  per_layer_model,
)
from glm_jax.benchmarks.context_steps import Bench
from glm_jax.cache import init_cache, read_rows
from glm_jax.decoding import prefill_step
from glm_jax.model import abstract_model, init_model
from glm_jax.param import num_elements
from glm_jax.plan import LocalPlan
from sharding import accountant

M = 1_048_576
GLM, TINY = SETTINGS['glm52'], SETTINGS['tiny']
HERE = Device('here', float('inf'), float('inf'))


class SliceTest(parameterized.TestCase):
  def test_real_layers_with_few_experts(self):
    config = load_config('configs/glm52_slice.py')
    whole = load_config('glm52')
    kinds = ''.join(kind[0] for kind in config.indexer_types)
    self.assertEqual(kinds, 'fsssfsss')
    self.assertEqual(config.mla, whole.mla)
    self.assertEqual(config.indexer, whole.indexer)
    self.assertEqual(config.mtp, whole.mtp)
    # Ten to twenty gigabytes of bf16.
    self.assertBetween(2 * num_elements(abstract_model(config)), 10e9, 20e9)

  def test_contexts_are_whole_chunks(self):
    for setting in SETTINGS.values():
      for context in setting.contexts:
        self.assertEqual(context % setting.chunk, 0)
      self.assertGreater(setting.contexts[-1], setting.config.indexer.topk)
      most = (setting.rounds + setting.warm) * (setting.drafts + 1)
      steps = setting.steps + setting.warm + max(setting.steps // 4, 1)
      self.assertLessEqual(max(most, steps), setting.room)
      self.assertEqual(setting.room % 64, 0)
      self.assertLessEqual(setting.room, setting.chunk)
    names = [context_name(c) for c in GLM.contexts]
    self.assertEqual(names, ['8k', '32k', '128k', '512k', '1m'])

  @pytest.mark.long
  def test_more_indexers_change_nothing_while_all_keys_are_selected(self):
    model = init_model(TINY.config, jax.random.key(0))
    every = per_layer_model(model)
    self.assertEqual(set(every.config.indexer_types), {'full'})
    self.assertIs(every.experts, model.experts)
    tokens = np.arange(64)[None]
    run = jax.jit(lambda model: forward(model, tokens).logits)
    np.testing.assert_allclose(run(model), run(every), atol=1e-5)


class BoundTest(parameterized.TestCase):
  @parameterized.parameters((0, 5, None), (0, 5, 3), (7, 4, 9), (2, 4, 4))
  def test_pairs(self, first, rows, most):
    seen = range(first + 1, first + rows + 1)
    self.assertEqual(pairs(first, rows, most),
                     sum(min(n, most or n) for n in seen))  # fmt: skip

  @parameterized.parameters(('shared', M - 1, 1), ('per_layer', 4096, 2048))
  def test_flops_are_those_of_the_accountant(self, system, first, rows):
    config = GLM.config
    if system == 'per_layer':
      config = accountant.per_layer_indexers(config)
    want = accountant.rows_flops(config, first, rows)
    more = accountant.rows_flops(config, first, rows, head=False, drafter=True)
    got = step_work(GLM.config, system, first, rows, head=True)
    both = step_work(GLM.config, system, first, rows, head=True, drafter=True)
    self.assertAlmostEqual(got.flops / want.total, 1, places=9)
    self.assertAlmostEqual((both.flops - got.flops) / more.total, 1, places=9)

  def test_decode_bytes_by_hand(self):
    full, shared, dense = (
      attention_work(GLM.config, kind, M - 1, 1).bytes
      for kind in ('full', 'shared', 'dense')
    )
    keys, indexer = 256 * M, 2 * 9_371_648
    self.assertAlmostEqual((full - shared) / (keys + indexer), 1, places=9)
    self.assertEqual(dense - shared, 1280 * (M - 2048))
    # 165.02 M elements, 2,048 rows of 1,280 bytes and the row's own.
    self.assertAlmostEqual(shared / (330.04e6 + 2.62e6), 1, places=3)

  def test_bounds_of_the_slice(self):
    decode = bounds(GLM.config, 'decode', 'per_layer', M, GLM.chunk)
    amount = lambda system: (
      decode_work(GLM.config, system, M, attention_only=True).bytes
    )
    self.assertEqual(
      decode['attention'], amount('per_layer') / amount('shared')
    )
    prefill = bounds(GLM.config, 'prefill', 'per_layer', M, GLM.chunk)
    for found in (decode, prefill):
      self.assertGreater(found['attention'], found['step'])
      self.assertGreater(found['step'], 1)
    # Nine indexers with the drafter's against three: never more than that.
    self.assertLess(prefill['attention'], 3)
    short = bounds(GLM.config, 'prefill', 'per_layer', 8192, GLM.chunk)
    self.assertLess(short['attention'], prefill['attention'])

  def test_chunks_make_no_difference_to_sparse_flops(self):
    one, many = (
      prefill_work(TINY.config, 'shared', 512, chunk).flops
      for chunk in (512, 64)
    )
    self.assertAlmostEqual(one / many, 1, places=12)

  @parameterized.parameters((256, 64, 8, 4), (4096, 64, 8, 8), (512, 64, 2, 2))
  def test_linear_cost_is_integrated_exactly(self, context, chunk, n, taken):
    cost = lambda first: 3.0 + 0.5 * (first + chunk / 2)
    firsts = sampled_chunks(context, chunk, n)
    self.assertLen(firsts, taken)
    whole = sum(cost(first) for first in range(0, context, chunk))
    found = integrate([cost(first) for first in firsts], context, chunk)
    # The middle chunk of an even number of them is half a chunk late.
    self.assertAlmostEqual(found / whole, 1, delta=chunk / context)


def _found(ratios, attention=1.5):
  """Figures with one second for `shared`."""
  found = {}
  for context, (per_layer, dense) in ratios.items():
    for phase in ('prefill', 'decode'):
      for system, seconds in (
        ('shared', 1.0),
        ('per_layer', per_layer),
        ('dense', dense),
      ):
        found[Case(phase, system, context)] = dict(seconds=seconds)
  found[Case('attention', 'shared', M)] = dict(seconds=1.0)
  found[Case('attention', 'per_layer', M)] = dict(seconds=attention)
  return found


class GoalsTest(parameterized.TestCase):
  good = {8192: (1.0, 3.0), 32_768: (1.1, 1.0), 131_072: (1.2, 1.5),
          524_288: (1.6, 1.46), M: (1.9, 6.0)}  # fmt: skip

  def test_all_reached(self):
    self.assertEmpty(context_report.missed(GLM, _found(self.good)))

  def test_a_bound_missed(self):
    found = _found(self.good, attention=1.0)
    (text,) = context_report.missed(GLM, found)
    self.assertIn('attention_1m: per-layer indexers take 1.00x', text)
    found = _found(self.good | {M: (1.2, 6.0)})
    (text,) = context_report.missed(GLM, found)
    self.assertIn('prefill_1m', text)

  def test_an_advantage_that_shrinks(self):
    found = _found(self.good | {524_288: (1.6, 1.4)})
    texts = context_report.missed(GLM, found)
    self.assertLen(texts, 2)  # prefill and decode
    self.assertIn('1.40x over dense at 512k, less than 1.50x', texts[0])

  def test_what_was_not_measured_or_failed(self):
    found = _found(self.good)
    del found[Case('attention', 'per_layer', M)]
    self.assertEmpty(context_report.missed(GLM, found))
    (text,) = context_report.missed(GLM, found, ['attention_1m'])
    self.assertIn('not measured in the time given', text)
    found[Case('drafting', 'shared', M)] = dict(seconds=None, problem='why')
    (text,) = context_report.missed(GLM, found)
    self.assertEqual(text, 'drafting_1m shared: why')


class RequestTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(evidence='compiled'), 'use --evidence=run'),
    (dict(model='nano'), '--model=nano is not a slice'),
    (dict(select=('9k',)), '--op=9k is not a context of the suite: use some'),
    (dict(systems=('sparse',)), '--system=sparse is unknown: use some of'),
  )
  def test_bad_requests(self, change, message):
    request = Request('run', (HERE,), systems=('auto',))
    with self.assertRaisesRegex(ValueError, message):
      load_suite('context').run(dataclasses.replace(request, **change), print)

  def test_the_essential_comes_first(self):
    suite = load_suite('context')
    cases = list(suite.cases(GLM, ('shared', 'per_layer', 'dense')))
    self.assertLen(set(cases), len(cases))
    own = [Case(p, 'shared', c) for c in GLM.contexts
           for p in ('prefill', 'decode')]  # fmt: skip
    self.assertEqual(cases[: len(own)], own)
    last = [case for case in cases if case.context == M]
    self.assertEqual(cases[len(own) : len(own) + 8], last[2:])


class StepsTest(parameterized.TestCase):
  def test_chunks_and_a_decode_step_give_the_whole_prompt_s_logits(self):
    setting = dataclasses.replace(TINY, contexts=(192,))
    bench = Bench(setting, lambda line: None)
    bench.prefill(192)
    self.assertLen(bench.walls, 3)
    _, logits = bench._greedy(192)
    prompt = bench.tokens[: 192 - setting.room + 1]
    want = jax.jit(lambda m: forward(m, prompt).logits[0, -1])(
      bench.model('shared')
    )
    np.testing.assert_allclose(logits[0], want, rtol=0, atol=1e-4)

  @pytest.mark.long
  def test_dense_prefill_is_sparse_prefill_that_selects_everything(self):
    indexer = dataclasses.replace(TINY.config.indexer, topk=128)
    mtp = dataclasses.replace(TINY.config.mtp, num_layers=0)
    config = dataclasses.replace(TINY.config, indexer=indexer, mtp=mtp)
    model = init_model(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 512, 128, dtype=np.int32)
    # Pages in another order than positions, and a pool with room to spare.
    table = jnp.array([[2, 0]])
    found = []
    for plan in (LocalPlan(), DensePlan(form='xla')):
      cache = init_cache(config, 3, dtype='f32')
      for first in (0, 64):
        pos = jnp.arange(first, first + 64)
        cache = prefill_step(
          model, cache, table, jnp.asarray(tokens[first : first + 64]),
          jnp.zeros(64, jnp.int32), pos, plan=plan,
        )  # fmt: skip
      slots = jnp.concatenate([jnp.arange(128, 192), jnp.arange(64)])
      found.append(np.asarray(read_rows(cache, 7, slots)))
    self.assertGreater(np.abs(found[0]).max(), 0.1)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4)


class SuiteTest(parameterized.TestCase):
  @pytest.mark.long
  def test_dry_run(self):
    folder = pathlib.Path(tempfile.mkdtemp(prefix='context_'))
    saved, lines = [], []
    request = Request(
      'run', (HERE,), systems=('auto',), model='tiny', save=saved.append
    )
    suite = load_suite('context')
    report = suite.run(request, lines.append)
    self.assertLen(saved, len(report.rows))
    # Nothing is compiled while a part is measured.
    first, rest = map(lines.index, ('shared prefill_128', 'shared check_128'))
    last = max(i for i in range(rest) if 'compiled in' not in lines[i])
    self.assertGreater(last, first)
    self.assertNotIn('compiled in', ' '.join(lines[first : last + 1]))
    self.assertNotIn('compiled in', ' '.join(lines[rest:]))
    for row in report.rows:
      self.assertNotIn('problem', row.details)
      self.assertTrue(row.us or row.case == 'check_128', row)
    by = {(row.case, row.system): row for row in report.rows}
    prefill = by['prefill_512', 'shared'].details
    self.assertEqual(prefill['how'], 'all 8 chunks')
    self.assertGreater(prefill['over_per_layer'], 0)
    dense = by['prefill_512', 'dense'].details
    self.assertEqual(dense['how'], 'integrated from 2 chunks, xla')
    check = by['check_128', 'shared'].details
    self.assertEqual(check['xla_tokens_agree'], 1)
    self.assertLess(check['xla_logits_error'], 1e-4)
    self.assertIn('over_per_layer', report.table(suite.COLUMNS['run']))
    suite.plot(report, folder / 'new' / 'context.png')
    content = (folder / 'new' / 'context.png').read_bytes()
    self.assertEqual(content[1:4], b'PNG')

  def test_nothing_more_is_started_when_time_is_up(self):
    suite = load_suite('context')
    request = Request(
      'run', (HERE,), systems=('auto',), model='tiny', max_seconds=0.0
    )
    measured = lambda bench, case: dict(seconds=1.0)
    with (
      mock.patch('glm_jax.benchmarks.context_steps.Bench'),
      mock.patch.object(suite, '_measured', measured),
    ):
      report = suite.run(request, lambda line: None)
    self.assertLen(report.rows, 1)
    self.assertIn('attention_512', report.notes[-1])
    self.assertLen(report.missed, 2)

  def test_picture_has_units_and_legends(self):
    suite = load_suite('context')
    found = _found(GoalsTest.good)
    request = Request('run', (HERE,))
    report = context_report.report(request, GLM, found)
    with mock.patch('matplotlib.figure.Figure.savefig', autospec=True) as save:
      suite.plot(report, pathlib.Path(tempfile.mkdtemp()) / 'a.png')
    figure = save.call_args[0][0]
    self.assertLen(figure.axes, 4)
    for axes in figure.axes:
      self.assertIn('(tokens)', axes.get_xlabel())
      self.assertIn('(', axes.get_ylabel())
      self.assertNotEmpty(axes.get_legend().get_texts())


if __name__ == '__main__':
  pytest.main([__file__])
