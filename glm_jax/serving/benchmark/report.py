"""The block of figures that users of serving benchmarks know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glm_jax.serving.benchmark.client import Run

_WIDTH = 50


def summary(run: Run) -> dict[str, Any]:
  """Figures of a run; times in milliseconds, rates a second.

  Failed requests count as such and in nothing else. Inter-token latency is
  the time between events that bring text, as clients see it; the time per
  output token divides by the tokens.
  """
  good = [record for record in run.records if record.error is None]
  seconds = max(run.seconds, 1e-9)
  prompt = sum(record.prompt_tokens for record in good)
  output = sum(record.output_tokens for record in good)
  gaps = [np.diff(record.times) for record in good]
  several = [record for record in good if record.output_tokens > 1]
  return {
    'completed': len(good),
    'failed': len(run.records) - len(good),
    'max_concurrency': run.max_concurrency,
    'request_rate': run.request_rate,
    'duration': run.seconds,
    'input_tokens': prompt,
    'cached_tokens': sum(record.cached_tokens for record in good),
    'output_tokens': output,
    'request_throughput': len(good) / seconds,
    'output_throughput': output / seconds,
    'total_throughput': (prompt + output) / seconds,
    'peak_concurrency': _peak(run),
    'ttft': _spread([record.first for record in good]),
    'tpot': _spread([record.per_token for record in several]),
    'itl': _spread(np.concatenate(gaps) if gaps else []),
    'drafts': _drafts(run.counters),
  }


def block(figures: Mapping[str, Any]) -> str:
  """The figures of `summary` as text."""
  lines = [' Serving Benchmark Result '.center(_WIDTH, '=')]
  add = lambda label, value: lines.append(f'{label:<40}{_form(value):<10}')
  add('Successful requests:', figures['completed'])
  add('Failed requests:', figures['failed'])
  if figures['max_concurrency'] is not None:
    add('Maximum request concurrency:', figures['max_concurrency'])
  if np.isfinite(figures['request_rate']):
    add('Request rate configured (RPS):', figures['request_rate'])
  add('Benchmark duration (s):', figures['duration'])
  add('Total input tokens:', figures['input_tokens'])
  add('Total generated tokens:', figures['output_tokens'])
  add('Request throughput (req/s):', figures['request_throughput'])
  add('Output token throughput (tok/s):', figures['output_throughput'])
  add('Peak concurrent requests:', figures['peak_concurrency'])
  add('Total token throughput (tok/s):', figures['total_throughput'])
  share = 100 * figures['cached_tokens'] / max(figures['input_tokens'], 1)
  add('Input tokens from the cache (%):', share)
  for title, key in (
    ('Time to First Token', 'ttft'),
    ('Time per Output Token (excl. 1st token)', 'tpot'),
    ('Inter-token Latency', 'itl'),
  ):
    lines.append(title.center(_WIDTH, '-'))
    for name, value in figures[key].items():
      add(f'{name} {key.upper()} (ms):', value)
  drafts = figures['drafts']
  if drafts is not None:
    lines.append('Speculative Decoding'.center(_WIDTH, '-'))
    add('Acceptance rate (%):', drafts['rate'])
    add('Acceptance length (with bonus token):', drafts['length_with_bonus'])
    add('Acceptance length (drafts only):', drafts['length'])
    add('Drafts:', drafts['drafts'])
    add('Draft tokens:', drafts['draft_tokens'])
    add('Accepted tokens:', drafts['accepted'])
    lines.append('Per-position acceptance (%):')
    for position, value in enumerate(drafts['by_position']):
      add(f'  Position {position}:', value)
  lines.append('=' * _WIDTH)
  return '\n'.join(line.rstrip() for line in lines)


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
  """Mean, median and 99th percentile in milliseconds."""
  if not len(seconds):
    return {'Mean': None, 'Median': None, 'P99': None}
  values = 1e3 * np.asarray(seconds)
  return {
    'Mean': float(values.mean()),
    'Median': float(np.median(values)),
    'P99': float(np.percentile(values, 99)),
  }


def _drafts(counters: Mapping[str, float]) -> dict[str, Any] | None:
  """Acceptance from the server's counters; None where it does not draft."""
  get = lambda name: counters.get(f'spec_decode_num_{name}_total', 0.0)
  rounds, drafted = get('drafts'), get('draft_tokens')
  if not rounds or not drafted:
    return None
  accepted = get('accepted_tokens')
  prefix = 'spec_decode_num_accepted_tokens_per_pos_total:'
  by_position = {
    int(name.removeprefix(prefix)): value
    for name, value in counters.items()
    if name.startswith(prefix)
  }
  return {
    'drafts': int(rounds),
    'draft_tokens': int(drafted),
    'accepted': int(accepted),
    'rate': 100 * accepted / drafted,
    'length': accepted / rounds,
    'length_with_bonus': 1 + accepted / rounds,
    'by_position': [
      100 * by_position[position] / rounds for position in sorted(by_position)
    ],
  }


def _peak(run: Run) -> int:
  """Requests that were open at once, at most."""
  good = [record for record in run.records if record.error is None]
  changes = [(r.begin, 1) for r in good] + [(r.end, -1) for r in good]
  steps = np.cumsum([change for _, change in sorted(changes)])
  return int(steps.max(initial=0))


def _form(value: float | int | None) -> str:
  if value is None:
    return 'n/a'
  return str(value) if isinstance(value, int) else f'{value:.2f}'
