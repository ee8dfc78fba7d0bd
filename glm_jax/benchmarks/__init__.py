"""Benchmarks: one module a suite, all giving the same rows.

A suite is a module with `run(request, log) -> Report`. `SUITES` names the
module of each; a module is imported when its suite is asked for.
"""

from __future__ import annotations

import importlib
import types

from glm_jax.benchmarks.report import GPUS, Device, Report, Request, Row

__all__ = [
  'GPUS',
  'SUITES',
  'Device',
  'Report',
  'Request',
  'Row',
  'load_suite',
]

SUITES = {
  'context': 'glm_jax.benchmarks.context_suite',
  'layer': 'glm_jax.benchmarks.layer_suite',
  'op': 'glm_jax.benchmarks.op_suite',
  'serve': 'glm_jax.benchmarks.serve_suite',
}


def load_suite(name: str) -> types.ModuleType:
  """The module of a suite.

  Raises:
    ValueError: there is no such suite.
  """
  if name not in SUITES:
    raise ValueError(
      f'suite {name!r} is unknown: use one of {", ".join(sorted(SUITES))}'
    )
  return importlib.import_module(SUITES[name])
