"""Computing in host memory, within a step that is compiled for a device."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.experimental import compute_on

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def runs_on_host(function: Callable) -> Callable:
  """A function of arrays in host memory, computed and left there."""
  function = jax.jit(function)
  # Before jax 0.11, compute_on2 has the form that compute_on has since then;
  # on TPU it takes three copies of a pool, which the older form does not.
  if hasattr(compute_on, 'compute_on2'):
    return compute_on.compute_on('device_host')(function)
  return compute_on.compute_on(
    function, compute_type='device_host', out_memory_spaces=HOST
  )
