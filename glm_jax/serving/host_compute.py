"""Computing in host memory, within a step that is compiled for a device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.experimental.xla_metadata import set_xla_metadata

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def runs_on_host(function: Callable) -> Callable:
  """A function of arrays in host memory, computed and left there.

  XLA is told directly: jax's `compute_on` changed its form in 0.11, and on
  TPU the new one takes three copies of a pool in device memory.
  """
  function = jax.jit(function)

  @functools.wraps(function)
  def on_host(*args):
    with set_xla_metadata(_xla_compute_type='host'):
      return function(*args)

  return on_host
