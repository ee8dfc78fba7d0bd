"""Options of the compiler that every step of ours is compiled with.

The planner, the launchers and the tests take them from here, so that what was
planned is what runs. They go into `compiler_options` of `jax.jit` or of
`lowered.compile`, never into an environment variable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.block_sizes import GENERATIONS

_OPTIONS: dict[str, dict[str, Any]] = {
  # No SparseCore: gathers and collectives stay where they are.
  'v5e': {},
  # The scheduler runs all-gathers one after the other with compute, with or
  # without the options of v6e (spec/kernels_tpu.md section 4).
  'v5p': {},
  # All-gathers move to the SparseCore, so that compute runs beside them.
  'v6e': {
    'xla_tpu_enable_sparse_core_collective_offload_all_gather': True,
    'xla_enable_async_all_gather': True,
  },
  # Without it nearly all weights are copied to another tiling at each step
  # (13.9 GB of temporaries against 0.04 on a skeleton of this model).
  # All-gathers on the SparseCore are the default here.
  'tpu7x': {'xla_tpu_control_large_2nd_minor_layout_for_x16': False},
  # cuBLAS is given the address of a layer within the scanned stack, where a
  # Triton product has its weights copied out first; products of the same
  # rows are not merged, which would join their weights anew at each step.
  'nvidia': {
    'xla_gpu_enable_triton_gemm': False,
    'xla_gpu_dot_merger_threshold_mb': 0,
  },
}


def compiler_options(platform: str) -> dict[str, Any]:
  """Options for a platform.

  Args:
    platform: a generation ('tpu7x'), a topology ('tpu7x:4x4x4'), a JAX
      device's `device_kind`, or a platform that is no TPU.

  Returns:
    A new dictionary; empty for CPUs and generations without options.
  """
  name = GENERATIONS.get(platform, platform).partition(':')[0]
  name = 'nvidia' if name.startswith('NVIDIA ') else name
  return dict(_OPTIONS.get(name, {}))


class StepJit:
  """`jax.jit` of a step with the options of the default device's platform.

  Devices are looked up at the first call, not when a module is imported.
  """

  def __init__(self, function: Callable, **options):
    """Takes what `jax.jit` takes."""
    functools.update_wrapper(self, function)
    self._function, self._options = function, options

  @functools.cached_property
  def _jitted(self):
    chosen = compiler_options(jax.devices()[0].device_kind)
    return jax.jit(
      self._function, compiler_options=chosen or None, **self._options
    )

  def __call__(self, *args, **kwargs):
    """Runs the step."""
    return self._jitted(*args, **kwargs)

  def __getattr__(self, name: str):
    """`lower`, `trace` and all else of the jitted function."""
    if name.startswith('__') or name in ('_function', '_options'):
      raise AttributeError(name)
    return getattr(self._jitted, name)
