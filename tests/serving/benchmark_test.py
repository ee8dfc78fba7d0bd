"""Traces, their replay against a server, and the figures."""

import contextlib
import json

import pytest
from benchmark_suite import suite_request
from http_server import serve, served_model
from scripted_engine import ScriptedEngine

from glm_jax.benchmarks import load_suite, serve_long
from glm_jax.serving import benchmark
from glm_jax.serving.benchmark import Record, Run


def shape(trace):
  return [
    [len(turn.prompt_ids) if turn.prompt_ids else turn for turn in one.turns]
    for one in trace
  ]


def test_random_traffic():
  make = lambda **more: benchmark.random_trace(40, 100, 10, **more)
  assert make(seed=1) == make(seed=1) != make(seed=2)
  assert shape(make()) == [[100]] * 40
  varied = make(range_ratio=0.5)
  lengths = {len(one.turns[0].prompt_ids) for one in varied}
  assert 50 <= min(lengths) < 70 < 130 < max(lengths) <= 150
  ids = [i for one in make(vocab_size=64) for i in one.turns[0].prompt_ids]
  assert 16 <= min(ids) and max(ids) < 64


def test_shared_prefixes():
  trace = benchmark.shared_prefix_trace(3, 4, 128, 20, 8)
  assert shape(trace) == [[148]] * 12
  assert len({one.turns[0].prompt_ids[:128] for one in trace}) == 3
  assert len({one.turns[0].prompt_ids for one in trace}) == 12


def test_recorded_traffic(tmp_path):
  path = tmp_path / 'trace.jsonl'
  turn = {'message': {'role': 'user', 'content': 'a'}, 'output_tokens': 3}
  ids = {'prompt_ids': [1, 2], 'output_tokens': 1}
  lines = [{'turns': [turn, turn], 'system': 's'}, {'turns': [ids]}]
  path.write_text('\n'.join(map(json.dumps, lines)) + '\n\n')
  first, second = benchmark.read_trace(path)
  assert first.system == 's' and len(first.turns) == 2
  assert second.turns[0].prompt_ids == (1, 2)
  for bad in ('', '{', '{"turns": []}', '{"turns": [{"output_tokens": 1}]}'):
    path.write_text(bad)
    with pytest.raises(ValueError, match='line 1|no session'):
      benchmark.read_trace(path)


def test_an_agent_reuses_its_conversation():
  engine = ScriptedEngine('</think>' + 'Hello there ' * 9, step_tokens=3)
  trace = benchmark.agent_trace(2, 20, output_tokens=20)
  with serve(engine, served_model(max_model_len=10**6)) as server:
    run = benchmark.replay(server.url, trace)
  figures = benchmark.summary(run)
  assert (figures['completed'], figures['failed']) == (40, 0)
  assert figures['output_tokens'] == 40 * 20
  assert figures['input_tokens'] == sum(
    len(request.prompt_ids) for request in engine.seen
  )
  assert figures['cached_tokens'] >= 0.9 * figures['input_tokens']
  assert figures['peak_concurrency'] == 2
  drafts = figures['drafts']
  assert drafts['accepted'] == drafts['drafts'] == 40 * 7
  assert drafts['length_with_bonus'] == 2
  assert drafts['by_position'] == [100, 0]
  text = benchmark.block(figures)
  for label in (
    'Median TTFT',
    'P99 ITL',
    'Mean TPOT',
    'Position 1',
    'from the',
  ):
    assert label in text


def test_failures_are_counted_and_named():
  engine = ScriptedEngine('a', limit=1, delay=0.01)
  trace = benchmark.random_trace(6, 30, 4, vocab_size=200)
  with serve(engine) as server:
    run = benchmark.replay(server.url, trace)
    figures = benchmark.summary(run)
    assert figures['failed'] > 0
    assert figures['completed'] + figures['failed'] == 6
    errors = [r.error for r in run.records if r.error]
    assert all('HTTP 429' in error for error in errors)
    one = benchmark.replay(server.url + '/v1', trace, max_concurrency=1)
    assert benchmark.summary(one)['failed'] == 0
    url = server.url
  with pytest.raises(ValueError, match='no OpenAI-compatible server'):
    benchmark.replay(url, trace)


def test_the_arithmetic():
  records = [
    Record(1.0, 10, 4, 3, [1.5, 1.6, 2.0], 'abc'),
    Record(1.4, 20, 0, 1, [2.4], 'x'),
    Record(0.0, error='no'),
  ]
  figures = benchmark.summary(Run(records, 4.0, {}, 2, float('inf')))
  assert figures['ttft']['Mean'] == pytest.approx(750)
  assert figures['tpot']['Mean'] == pytest.approx(250)
  assert figures['itl']['Median'] == pytest.approx(250)
  assert figures['output_throughput'] == 1
  assert figures['total_throughput'] == 34 / 4
  assert figures['peak_concurrency'] == 2
  assert figures['drafts'] is None
  text = benchmark.block(figures)
  assert 'Failed requests:                        1' in text
  assert 'Input tokens from the cache (%):        13.33' in text


def test_the_suite_measures_any_server():
  engine = ScriptedEngine('</think>' + 'Hello there ' * 40, step_tokens=3)
  lines = []
  with serve(engine, served_model(max_model_len=10**6)) as server:
    suite = load_suite('serve')
    report = suite.run(suite_request(url=server.url), lines.append)
    one = suite.run(
      suite_request(url=server.url, select=('agent',)), lines.append
    )
  assert report.passed and [row.case for row in report.rows] == list(
    suite.traces(1)
  )
  shared = report.rows[1].details
  assert shared['completed'] == 12 and shared['cached_percent'] > 50
  assert report.rows[2].details['cached_percent'] > 70
  text = report.table(suite.COLUMNS['run'])
  assert text.count('Serving Benchmark Result') == 3
  assert 'speedup' in text and 'P99 TTFT' in text
  assert [row.case for row in one.rows] == ['agent']


def test_the_suite_compares_with_the_naive_engine(monkeypatch):
  suite = load_suite('serve')
  fast = ScriptedEngine('</think>' + 'Hello there ' * 40, step_tokens=4)
  slow = ScriptedEngine('</think>' + 'Hello there ' * 40, delay=0.01)
  started = []

  @contextlib.contextmanager
  def server(_, flags):
    started.append(flags)
    engine = slow if suite.NAIVE == flags else fast
    with serve(engine, served_model(max_model_len=10**6)) as running:
      yield running.url

  monkeypatch.setattr(suite, '_server', server)
  request = suite_request(select=('random',))
  report = suite.run(request, lambda *_: None)
  assert started == [(), suite.NAIVE]
  assert report.passed and report.rows[0].details['speedup'] > 1
  assert report.rows[1].details['speedup'] is None
  fast, slow = slow, fast
  report = suite.run(request, lambda *_: None)
  assert not report.passed and 'not faster' in report.missed[0]


def test_a_long_request_comes_back_from_the_host(monkeypatch):
  suite, flags = load_suite('serve'), []

  @contextlib.contextmanager
  def server(_, asked):
    flags.extend(asked)
    with serve(engine, served_model(max_model_len=10**6)) as running:
      yield running.url

  monkeypatch.setattr(suite, '_server', server)
  engine = ScriptedEngine('Hello there ' * 40, delay=0.001)
  request = suite_request(select=('long_request',))
  report = suite.run(request, lambda *_: None)
  assert [row.system for row in report.rows] == ['new', 'unrelated', 'restored']
  assert '--num_gpu_blocks_override=18' in flags and report.rows[2].us > 0
  details = report.rows[2].details
  assert details['same_tokens'] and details['output_tokens'] == 64
  assert details['cached_percent'] > 90
  # The scripted engine computes nothing, so that nothing is gained.
  assert all('restoring took' in goal for goal in report.missed)

  engine = ScriptedEngine('Hello there ' * 40, cached=False)
  report = suite.run(request, lambda *_: None)
  assert any('came from the cache' in goal for goal in report.missed)


def test_latents_on_the_host_give_the_same_tokens(monkeypatch):
  suite, started = load_suite('serve'), []
  answers = [
    'Hello there ' * 40,
    'Hello there ' * 40,
    'Hello, ' * 60,
    'No ' * 90,
  ]

  @contextlib.contextmanager
  def server(_, flags):
    started.append(flags)
    engine = ScriptedEngine(answers[len(started) - 1])
    with serve(engine, served_model(max_model_len=10**6)) as running:
      yield running.url

  monkeypatch.setattr(suite, '_server', server)
  request = suite_request(select=('host_latent',))
  report = suite.run(request, lambda *_: None)
  assert report.passed and report.rows[1].details['same_tokens']
  assert '--max_model_len=384' in started[0]
  assert started[1][:-1] == started[0] and 'latent' in started[1][-1]
  assert all(row.details['repeats'] for row in report.rows)
  report = suite.run(request, lambda *_: None)
  assert 'other tokens' in report.missed[0]
  assert report.rows[1].details['difference']['at'] == 0


def test_answers_part_where_the_device_says_how_close_it_was():
  expected = Record(
    ids=[5, 6, 7], names=['a', 'b', 'c'], top=[{'a': -1.0}, {'b': -1.0}] * 2
  )
  other = lambda *ids: Record(ids=list(ids), names=['a', 'x', 'c'])
  assert serve_long.difference(expected, other(5, 6, 7)) is None
  far = serve_long.difference(expected, other(5, 9, 7))
  assert far == {'at': 1, 'nats': None}
  expected.top[1]['x'] = -1.25
  near = serve_long.difference(expected, other(5, 9, 7))
  assert near == {'at': 1, 'nats': 0.25}
  short = serve_long.difference(expected, other(5, 6))
  assert short['at'] == 2


def test_shared_beginnings_by_length(monkeypatch):
  suite, started = load_suite('serve'), []
  names = [case.name for case in serve_long.reuse_cases(1 << 20)]
  assert names[:3] == ['reuse_8192_c1', 'reuse_8192_c4', 'reuse_8192_c16']
  assert names[-2:] == ['reuse_524288_c1', 'reuse_524288_c4']

  @contextlib.contextmanager
  def server(_, flags):
    started.append(flags)
    engine = ScriptedEngine('Hello there ' * 40)
    with serve(engine, served_model(max_model_len=10**6)) as running:
      yield running.url

  monkeypatch.setattr(suite, '_server', server)
  request = suite_request(select=('reuse_512_c4',))
  report = suite.run(request, lambda *_: None)
  assert [(row.case, row.system) for row in report.rows] == [
    ('reuse_512_c4', 'engine'),
    ('reuse_512_c4', 'naive'),
  ]
  assert '--max_num_seqs=16' in started[0]
  assert '--max_model_len=544' in started[0] and len(started) == 2
  assert started[1][-4:] == started[0]
  assert report.rows[0].details['speedup'] > 0
  assert report.rows[0].details['cached_percent'] > 80


def test_the_suite_needs_a_server_and_a_case(monkeypatch, tmp_path):
  suite = load_suite('serve')
  with pytest.raises(ValueError, match='evidence=run'):
    suite.run(suite_request(evidence='compiled'), print)
  with pytest.raises(ValueError, match='no case'):
    suite.run(suite_request(select=('nothing',)), print)
  monkeypatch.setattr(suite, '_SERVER', tmp_path / 'serve.py')
  with pytest.raises(ValueError, match='--url'):
    suite.run(suite_request(), lambda *_: None)
