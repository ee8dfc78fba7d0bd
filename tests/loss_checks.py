"""Comparisons of losses and gradients with dense forms in float64."""

from __future__ import annotations

import functools

import jax
import numpy as np
from compare import assert_close


def in_float64(test):
  """Runs a test with 64-bit numbers."""

  @functools.wraps(test)
  def wrapped(*args, **kwargs):
    with jax.enable_x64(True):
      return test(*args, **kwargs)

  return wrapped


def same(actual, expected, name, tolerance=1e-11):
  """Compares pytrees of arrays."""
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    assert_close(a, e, atol=tolerance, rtol=tolerance, name=name)


def same_loss(ours, dense, *args, tolerance=1e-11):
  """Compares a loss and its gradients to all of `args`; returns ours."""
  argnums = tuple(range(len(args)))
  run = lambda f: jax.jit(jax.value_and_grad(f, argnums))(*args)
  actual = run(ours)
  same(actual, run(dense), 'loss and gradients', tolerance)
  return actual


def compile_for(f, *shapes):
  """Compiles a function for arguments of (shape, dtype)."""
  return jax.jit(f).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).compile()


def temporary(compiled):
  """Temporary bytes of a compiled function."""
  return compiled.memory_analysis().temp_size_in_bytes


def normal(seed, *sizes):
  """Random float64 arrays of several shapes."""
  rng = np.random.default_rng(seed)
  return [rng.normal(size=size) for size in sizes]
