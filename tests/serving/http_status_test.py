"""The status page and the metrics: what they count, what they never show."""

import re
import shutil
import subprocess

import pytest
from http_server import ask, chat, serve
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine

from glm_jax.serving.http import rates

SECRET = 'zebra'
CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')


@pytest.fixture(scope='module')
def server():
  engine = ScriptedEngine(f'hm</think>Hello {SECRET}', step_tokens=3)
  with serve(engine) as running:
    for _ in range(3):
      chat(running, f'{SECRET} ' * 40)
    yield running


def metrics(server):
  got = ask(server, '/metrics')
  assert got.headers['content-type'].startswith('text/plain')
  found = {}
  for family in text_string_to_metric_families(got.body.decode()):
    for sample in family.samples:
      assert sample.labels['model_name'] == 'glm-test'
      rest = {k: v for k, v in sample.labels.items() if k != 'model_name'}
      found[sample.name, *rest.values()] = sample.value
  return found


def test_metrics_have_the_names_that_dashboards_know(server):
  before = metrics(server)
  usage = chat(server, f'{SECRET} ' * 40).json['usage']
  after = metrics(server)
  grew = lambda *name: after[name] - before.get(name, 0)
  new = usage['completion_tokens']
  details = usage['completion_tokens_details']
  assert grew('vllm:prompt_tokens_total') == usage['prompt_tokens']
  assert grew('vllm:generation_tokens_total') == new
  assert grew('vllm:request_success_total', 'stop') == 1
  assert grew('vllm:time_to_first_token_seconds_count') == 1
  assert grew('vllm:inter_token_latency_seconds_count') == new - 1
  assert grew('vllm:e2e_request_latency_seconds_count') == 1
  assert grew('vllm:prefix_cache_queries_total') == usage['prompt_tokens']
  cached = usage['prompt_tokens_details']['cached_tokens']
  assert grew('vllm:prefix_cache_hits_total') == cached > 0
  accepted = details['accepted_prediction_tokens']
  assert grew('vllm:spec_decode_num_accepted_tokens_total') == accepted
  assert grew('vllm:spec_decode_num_draft_tokens_total') == 2 * accepted
  by_position = 'vllm:spec_decode_num_accepted_tokens_per_pos_total'
  assert grew(by_position, '0') == accepted and grew(by_position, '1') == 0
  assert grew('vllm:request_queue_time_seconds_sum') == 0.25
  assert after['glm_jax:host_cache_bytes',] == 300
  assert after['glm_jax:host_cache_budget_bytes',] == 400
  assert after['glm_jax:host_cache_pages_total', 'put'] == 5
  assert after['glm_jax:cache_pages_total', 'restored'] == 0
  assert not any('disk' in name for name, *_ in after)  # There is none.
  assert after['vllm:kv_cache_usage_perc',] == 0.3
  assert after['vllm:num_preemptions_total',] == 4
  assert after['vllm:num_requests_running',] == 0


def test_status_counts_and_shows_no_text(server):
  got = ask(server, '/status')
  assert SECRET.encode() not in got.body
  counts = got.json
  assert counts['state'] == 'ready' and counts['requests']['finished'] >= 3
  assert counts['drafts']['accept_length'] == 1
  assert counts['drafts']['accept_length_with_bonus'] == 2
  assert counts['engine']['pages']['total'] == 10
  assert 'note' not in counts['engine']  # Text is left out.


def test_the_page_needs_nothing_from_elsewhere(server):
  got = ask(server, '/')
  page = got.body.decode()
  assert not re.search(r'(src|href)="(?!data:)|https?://|@import', page)
  policy = got.headers['content-security-policy']
  assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy


def test_rates():
  now = [100.0]
  found = rates.Rates(lambda: now[0])
  for count in (3, 4):
    found.add(count)
  now[0] += rates.SECONDS
  assert found.per_second()[-1] == 7 / rates.SECONDS
  assert len(found.per_second()) == rates.PERIODS
  for _ in range(500):
    now[0] += rates.SECONDS
    found.add(1)
  assert sum(found.per_second()) == (rates.PERIODS) / rates.SECONDS


@pytest.mark.browser
def test_a_browser_shows_the_page(server, tmp_path):
  assert CHROMIUM, "needs chromium; without one: -m 'not browser'"
  picture = tmp_path / 'status.png'
  options = [
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--hide-scrollbars',
    '--window-size=1000,900',
    f'--user-data-dir={tmp_path}/profile',
    '--virtual-time-budget=3000',
  ]
  browse = lambda *more: subprocess.run(
    [CHROMIUM, *options, *more, f'{server.url}/'],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  browse(f'--screenshot={picture}')
  assert picture.stat().st_size > 10_000
  shown = browse('--dump-dom').stdout.split('<script>')[0]
  text = re.sub('<[^>]*>', ' ', shown)
  finished = ask(server, '/status').json['requests']['finished']
  for word in ('glm-test', 'ready', 'context 4,096', 'pages, total', 'accept'):
    assert word in text, text
  assert re.search(rf'{finished}\s+finished', text), text
  assert SECRET not in text
  line = re.search(r'points="([^"]+)"', shown).group(1)
  assert len(line.split()) == rates.PERIODS
