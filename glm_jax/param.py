"""The one way to make a parameter.

Modules hold parameters only and are ordinary pytrees. Every parameter
carries the names of its logical axes (`param.axes`); a leading axis that
`stack` adds over scanned groups is left out of them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

Axes = tuple[str | None, ...]


def param(
  key: jax.Array | None,
  shape: tuple[int, ...],
  axes: Axes,
  dtype,
  *,
  std: float | None = None,
  fill: float = 0.0,
) -> nnx.Param:
  """A parameter: normal with standard deviation `std`, else `fill`.

  Args:
    key: random key; unused without `std`.
    shape: the parameter's shape.
    axes: one logical axis name (or None) a dimension, read by the plan.
    dtype: the parameter's dtype.
    std: standard deviation, None for a constant.
    fill: the constant.

  Returns:
    An `nnx.Param` with the metadata `axes`.
  """
  if len(axes) != len(shape):
    raise ValueError(f'{axes=} must name every dimension of {shape=}')
  if std is None:
    value = jnp.full(shape, fill, dtype)
  else:
    value = (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
  return nnx.Param(value, axes=axes)


def stack(make: Callable[[jax.Array], nnx.Module], keys: jax.Array):
  """One module whose parameters have a leading axis over `keys`."""
  return jax.vmap(make)(keys)


def num_elements(model: nnx.Module) -> int:
  """Parameter elements of a (possibly abstract) module."""
  return sum(leaf.size for leaf in jax.tree.leaves(model))
