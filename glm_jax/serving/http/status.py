"""The status page: counts of the server, never a prompt or an answer."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from glm_jax.serving.http import rates
from glm_jax.serving.http.service import Service

# The page is one file without anything from elsewhere; nothing may embed it.
HEADERS = {
  'Cache-Control': 'no-store',
  'Content-Security-Policy': (
    "default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
  ),
  'X-Content-Type-Options': 'nosniff',
}


@functools.cache
def page() -> str:
  """The HTML of the page."""
  path = epath.Path(__file__).parent / 'status.html'
  return path.read_bytes().decode('utf-8')


def snapshot(service: Service, stats: Mapping[str, Any]) -> dict[str, Any]:
  """What the page shows.

  Args:
    service: whose counts.
    stats: of the engine, see `engine.Engine.stats`; numbers are passed on,
      text is not.
  """
  counts, drafts = service.metrics.counts, stats['drafts']
  rounds = drafts['rounds']
  accepted = sum(drafts['accepted']) / rounds if rounds else None
  return {
    'model': service.model.names[0],
    'max_model_len': service.model.max_model_len,
    'state': (
      'draining'
      if service.draining
      else 'ready'
      if service.engine.ready
      else 'not ready'
    ),
    'time': time.time(),
    'uptime_seconds': time.time() - service.metrics.started,
    'requests': {
      'open': len(service.running),
      'finished': counts['finished'],
      'aborted': counts['aborted'],
    },
    'tokens': {
      'prompt': stats['prefix']['query_tokens'],
      'cached': stats['prefix']['hit_tokens'],
      'generated': stats['tokens']['generation'],
    },
    'tokens_per_second': service.metrics.rates.per_second(),
    'rate_seconds': rates.SECONDS,
    'drafts': {
      'rounds': rounds,
      'accept_length': accepted,
      'accept_length_with_bonus': None if accepted is None else accepted + 1,
    },
    'engine': _numbers(stats),
  }


def _numbers(value: Any) -> Any:
  """Numbers of a nested mapping; whatever else is left out."""
  if isinstance(value, Mapping):
    found = {str(key): _numbers(inner) for key, inner in value.items()}
    return {key: inner for key, inner in found.items() if inner is not None}
  if isinstance(value, list | tuple):
    return [inner for inner in map(_numbers, value) if inner is not None]
  if hasattr(value, 'item'):
    value = value.item()
  if isinstance(value, bool | int):
    return value
  if isinstance(value, float) and math.isfinite(value):
    return value
  return None
