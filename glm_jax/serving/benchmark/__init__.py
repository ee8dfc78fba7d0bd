"""Replays traffic against an OpenAI-compatible server and reports on it."""

from glm_jax.serving.benchmark.client import Record, Run, replay
from glm_jax.serving.benchmark.report import block, summary
from glm_jax.serving.benchmark.traces import (
  Session,
  Turn,
  agent_trace,
  random_trace,
  read_trace,
  shared_prefix_trace,
)

__all__ = [
  'Record',
  'Run',
  'Session',
  'Turn',
  'agent_trace',
  'block',
  'random_trace',
  'read_trace',
  'replay',
  'shared_prefix_trace',
  'summary',
]
