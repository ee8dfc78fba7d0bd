"""Parameters from whatever holds them, one at a time.

A source has `read(leaf, index)`: the part `index` of one parameter as a NumPy
array. A plan that has `sharding(axes, shape)` says where a parameter lives;
then only the parts that this host's devices need are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Sharding
from tqdm import tqdm

from glm_jax.checkpoints.names import Leaf

Slices = tuple[slice, ...]
Read = Callable[[Leaf, Slices], np.ndarray]


def whole(leaf: Leaf) -> Slices:
  """The index of all of a parameter."""
  return tuple(slice(0, n) for n in leaf.shape)


def sharding_of(leaf: Leaf, plan) -> Sharding | None:
  """Where the plan wants a parameter; None for the default device."""
  find = getattr(plan, 'sharding', None)
  return None if find is None else find(leaf.axes, leaf.shape)


def place(leaf: Leaf, read: Read, sharding: Sharding | None) -> jax.Array:
  """Reads one parameter onto its devices."""
  if sharding is None:
    return jax.device_put(read(leaf, whole(leaf)))
  parts: dict[tuple, np.ndarray] = {}  # replicas are read once

  def part(index):
    spans = tuple(i.indices(n)[:2] for i, n in zip(index, leaf.shape))
    if spans not in parts:
      parts[spans] = read(leaf, tuple(slice(*s) for s in spans))
    return parts[spans]

  return jax.make_array_from_callback(leaf.shape, sharding, part)


def assemble(
  tree, leaves: Sequence[Leaf], make: Callable[[Leaf], jax.Array], what: str
):
  """A copy of `tree` with every parameter made anew.

  Args:
    tree: modules, abstract or not.
    leaves: their parameters, in the tree's order.
    make: makes one parameter.
    what: for the progress bar.

  Returns:
    The modules with arrays in them.
  """
  # disable=None: no bar where stderr is not a terminal.
  bar = tqdm(leaves, desc=what, unit='param', disable=None)
  arrays = [make(leaf) for leaf in bar]
  return jax.tree.unflatten(jax.tree.structure(tree), arrays)
