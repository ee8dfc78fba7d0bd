"""Computing in host memory, within a step that is compiled for a device."""

from __future__ import annotations

from collections.abc import Callable

import jax

try:
  from jax.experimental.compute_on import compute_on2 as compute_on
except ImportError:  # from jax 0.11 on it has the shorter name
  from jax.experimental.compute_on import compute_on

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def runs_on_host(function: Callable) -> Callable:
  """A function of arrays in host memory, computed and left there."""
  return compute_on(
    jax.jit(function), compute_type='device_host', out_memory_spaces=HOST
  )
