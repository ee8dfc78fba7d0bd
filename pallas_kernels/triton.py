"""Pallas' Triton backend, which JAX has deprecated: asked for in one place.

The GPU kernels (`*/gpu.py`) are written in plain Pallas and take their
compiler parameters here. A JAX without the backend refuses them, and the ops
run in XLA (dispatch.py), which gives the same results.
"""

from __future__ import annotations

import jax.numpy as jnp


def available() -> bool:
  """Whether this JAX has the backend."""
  return _backend() is not None


def _backend():
  try:
    from jax.experimental.pallas import triton
  except ImportError:
    return None
  return triton


def params(warps: int, stages: int):
  """Compiler parameters of a kernel.

  Args:
    warps: of 32 threads, a program.
    stages: of the loads in a loop that are in flight together.

  Raises:
    NotImplementedError: this JAX has no Triton backend.
  """
  backend = _backend()
  if backend is None:
    raise NotImplementedError('this JAX has no Triton backend for Pallas')
  return backend.CompilerParams(num_warps=warps, num_stages=stages)


def power_of_two(n: int, least: int = 16) -> bool:
  """Whether Triton's arrays and matrix products take this many elements."""
  return n >= least and n & (n - 1) == 0


def check_addressable(pool) -> None:
  """Raises `NotImplementedError` for what JAX's lowering cannot address.

  It counts elements in int32 up to 4 GiB, and in int64 beyond: bytes between
  2 and 4 GiB would wrap.
  """
  if pool.dtype.itemsize == 1 and 2**31 < pool.size <= 2**32:
    raise NotImplementedError(
      f'a pool of {pool.size / 2**30:.1f} GiB of {pool.dtype}: up to 2 GiB, '
      'or beyond 4'
    )


def scatter(ref, row, columns, values, chosen, spare: int, interpret: bool):
  """Writes `values` to `columns` of a row where `chosen`.

  Interpreted, a masked store touches every address it is given, so what is
  not chosen goes to column `spare`, which must be nobody's.
  """
  if interpret:
    ref[row, jnp.where(chosen, columns, spare)] = values
    return
  _backend().store(ref.at[row, columns], values, mask=chosen)


def store_rows(ref, rows, columns, values, chosen, spare: int, interpret: bool):
  """Writes the rows of `values` that are `chosen`, to a slice of columns.

  Interpreted, what is not chosen goes to row `spare`, as in `scatter`.
  """
  if interpret:
    ref[jnp.where(chosen, rows, spare), columns] = values
    return
  mask = jnp.broadcast_to(chosen[:, None], values.shape)
  _backend().store(ref.at[rows, columns], values, mask=mask)
