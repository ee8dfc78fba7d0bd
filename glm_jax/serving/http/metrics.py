"""Prometheus metrics under vLLM's names, so that dashboards work.

What vLLM has no name for (host and disk tiers) begins with `glm_jax:`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from glm_jax.serving.http.rates import Rates
from glm_jax.serving.request import Output

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_SECONDS = (
  *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
  *(10, 20, 40, 80, 160, 320, 640, 1280, 2560),
)
_TOKENS = tuple(2**power for power in range(0, 21, 2))


class Metrics:
  """Counts what the HTTP side sees; the engine's own counts come at scrape.

  Attributes:
    started: seconds since the epoch.
    counts: requests that ended, for the status page.
    rates: generated tokens over time.
  """

  def __init__(self, model_name: str):
    """Makes a registry of its own: several servers fit into one process."""
    self._name = model_name
    self._registry = prometheus_client.CollectorRegistry()
    self._stats: Mapping[str, Any] = {}
    self._registry.register(_EngineCollector(self))
    self.started = time.time()
    self.counts = {'finished': 0, 'aborted': 0}
    self.rates = Rates()
    self._prompt = self._counter('prompt_tokens', 'Prompt tokens.')
    self._generated = self._counter('generation_tokens', 'Generated tokens.')
    self._success = prometheus_client.Counter(
      'vllm:request_success',
      'Finished requests.',
      ['model_name', 'finished_reason'],
      registry=self._registry,
    )
    seconds = lambda name, about: self._histogram(name, about, _SECONDS)
    self._first = seconds('time_to_first_token_seconds', 'Until the first.')
    self._between = seconds('inter_token_latency_seconds', 'Between tokens.')
    self._each = seconds(
      'request_time_per_output_token_seconds', 'Mean of a request.'
    )
    self._whole = seconds('e2e_request_latency_seconds', 'Until the last.')
    self._queued = seconds(
      'request_queue_time_seconds', 'Until it was first scheduled.'
    )
    self._prompts = self._histogram(
      'request_prompt_tokens', 'Prompt tokens of a request.', _TOKENS
    )
    self._answers = self._histogram(
      'request_generation_tokens', 'New tokens of a request.', _TOKENS
    )

  @property
  def model_name(self) -> str:
    """The value of the label `model_name`."""
    return self._name

  @property
  def engine_stats(self) -> Mapping[str, Any]:
    """What the engine said at the last scrape."""
    return self._stats

  def exposition(self, stats: Mapping[str, Any]) -> bytes:
    """The text that Prometheus reads; `stats` are the engine's."""
    self._stats = stats
    return prometheus_client.generate_latest(self._registry)

  def sequence(self) -> SequenceMetrics:
    """Begins the measurement of one sequence."""
    return SequenceMetrics(self)

  def _counter(self, name: str, about: str):
    counter = prometheus_client.Counter(
      f'vllm:{name}', about, ['model_name'], registry=self._registry
    )
    return counter.labels(self._name)

  def _histogram(self, name: str, about: str, buckets):
    histogram = prometheus_client.Histogram(
      f'vllm:{name}',
      about,
      ['model_name'],
      buckets=buckets,
      registry=self._registry,
    )
    return histogram.labels(self._name)


class SequenceMetrics:
  """Times and counts of one sequence."""

  def __init__(self, metrics: Metrics):
    self._metrics = metrics
    self._begin = time.perf_counter()
    self._first: float | None = None
    self._last = self._begin
    self._ids = 0
    self._done = False

  def tokens(self, count: int):
    """`count` tokens have just arrived."""
    if not count:
      return
    now, metrics = time.perf_counter(), self._metrics
    if self._first is None:
      self._first = now
      metrics._first.observe(now - self._begin)
      count_between = count - 1
    else:
      count_between = count
    # The tokens of one step share the time since the step before.
    for _ in range(count_between):
      metrics._between.observe((now - self._last) / count)
    self._last = now
    self._ids += count
    metrics._generated.inc(count)
    metrics.rates.add(count)

  def finish(self, output: Output, reason: str):
    """The sequence has ended; `output` is the newest one of the engine."""
    if self._done:
      return
    self._done = True
    metrics = self._metrics
    now = time.perf_counter()
    metrics._success.labels(metrics.model_name, reason).inc()
    metrics._whole.observe(now - self._begin)
    metrics._prompt.inc(output.prompt_tokens)
    metrics._prompts.observe(output.prompt_tokens)
    metrics._answers.observe(self._ids)
    if output.queued_seconds is not None:
      metrics._queued.observe(output.queued_seconds)
    if self._first is not None and self._ids > 1:
      metrics._each.observe((self._last - self._first) / (self._ids - 1))
    metrics.counts['aborted' if reason == 'abort' else 'finished'] += 1


class _EngineCollector:
  """Turns the engine's stats into metric families at scrape time."""

  def __init__(self, metrics: Metrics):
    self._metrics = metrics

  def describe(self):
    """Nothing is known before a scrape."""
    return ()

  def collect(self) -> Iterator[Any]:
    """Yields metric families."""
    stats = self._metrics.engine_stats
    if not stats:
      return
    pages, drafts = stats['pages'], stats['drafts']
    for name, value in (
      ('num_requests_running', stats['requests']['running']),
      ('num_requests_waiting', stats['requests']['waiting']),
      ('kv_cache_usage_perc', pages['used'] / pages['total']),
    ):
      yield self._family(GaugeMetricFamily, name, value)
    for name, value in (
      ('num_preemptions', stats['preemptions']),
      ('corrupted_requests', stats['corrupted']),
      ('prefix_cache_queries', stats['prefix']['query_tokens']),
      ('prefix_cache_hits', stats['prefix']['hit_tokens']),
      ('spec_decode_num_drafts', drafts['rounds']),
      ('spec_decode_num_draft_tokens', sum(drafts['drafted'])),
      ('spec_decode_num_accepted_tokens', sum(drafts['accepted'])),
    ):
      yield self._family(CounterMetricFamily, name, value)
    by_position = CounterMetricFamily(
      'vllm:spec_decode_num_accepted_tokens_per_pos',
      'Accepted drafts at each position.',
      labels=['model_name', 'position'],
    )
    for position, count in enumerate(drafts['accepted']):
      labels = [self._metrics.model_name, str(position)]
      by_position.add_metric(labels, count)
    yield by_position
    yield from self._tiers(stats)

  def _tiers(self, stats: Mapping[str, Any]) -> Iterator[Any]:
    """Pages that move between the device and what is below; names of ours."""
    moved = CounterMetricFamily(
      'glm_jax:cache_pages',
      'Pages that left the device, came back, or shortened a hit.',
      labels=['model_name', 'event'],
    )
    for event in ('evicted_pages', 'restored_pages', 'shortened_hits'):
      name = event.removesuffix('_pages')
      moved.add_metric([self._metrics.model_name, name], stats['prefix'][event])
    yield moved
    for tier in ('host', 'disk'):
      report = stats[tier]
      if report is None:
        continue
      events = CounterMetricFamily(
        f'glm_jax:{tier}_cache_pages',
        f'Pages of the {tier} tier by what happened to them.',
        labels=['model_name', 'event'],
      )
      for event, count in report.items():
        if event in ('bytes', 'budget'):
          about = f'{tier}_cache_{"budget_" * (event == "budget")}bytes'
          yield self._family(GaugeMetricFamily, about, count, 'glm_jax')
        else:
          events.add_metric([self._metrics.model_name, event], count)
      yield events

  def _family(self, kind, name: str, value: float, prefix: str = 'vllm'):
    family = kind(
      f'{prefix}:{name}', name.replace('_', ' '), labels=['model_name']
    )
    family.add_metric([self._metrics.model_name], float(value))
    return family
