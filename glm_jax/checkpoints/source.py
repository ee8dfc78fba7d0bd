"""Parameters from whatever stores them, one at a time.

A source knows its tensors by their published names. From that follows
everything else: parameters in the dtype and format that the model wants, and
onto the devices that a plan wants them on. A plan that has
`sharding(axes, shape)` says where a parameter lives; then a host reads only
the parts that its own devices need.

fp8 is dequantised in float32 and then rounded, a whole matrix before any
split: its blocks straddle heads. Wide weights are quantised matrix by matrix.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Sharding
from tqdm import tqdm

from glm_jax.checkpoints.names import SCALE_SUFFIX, Leaf, model_leaves
from glm_jax.config import ModelConfig
from glm_jax.model import Model, abstract_model
from pallas_kernels.block_scale import BLOCK, FP8, dequantize, quantize

Slices = tuple[slice, ...]
Read = Callable[[Leaf, Slices], np.ndarray]

_dequantize = jax.jit(dequantize, static_argnums=(2, 3))
_quantize = jax.jit(quantize, static_argnums=1)


class StoredMatrix(NamedTuple):
  """A matrix as it is stored.

  Attributes:
    values: [F, D], perhaps with rows of a neighbour.
    scales: [f, d] float32 of fp8 values, else None.
    rows: which rows are the matrix.
  """

  values: np.ndarray
  scales: np.ndarray | None
  rows: slice


class WeightSource(abc.ABC):
  """A checkpoint of any layout.

  Attributes:
    directory: where it is.
    config: its configuration.
    by_layer: whether a layer's tensors are best read together (True), or a
      parameter's of all layers.
  """

  directory: epath.Path
  config: ModelConfig
  by_layer: bool

  def __init__(self):
    # (tensor, target) of the matrix converted last, and what came of it.
    self._converted: tuple[Any, tuple[np.ndarray, ...]] = (None, ())

  @abc.abstractmethod
  def is_fp8(self, name: str) -> bool:
    """Whether a weight is stored in fp8."""

  @abc.abstractmethod
  def tensor(self, name: str, index: Slices) -> np.ndarray:
    """Part of a stored tensor (weights or scales) in its stored dtype."""

  @abc.abstractmethod
  def matrix(self, name: str) -> StoredMatrix:
    """A whole stored weight with its scales."""

  @abc.abstractmethod
  def check_model(self, leaves: Sequence[Leaf], weight_dtype: str = 'auto'):
    """Raises ValueError unless it holds the parameters `leaves`."""

  @abc.abstractmethod
  def fingerprint(self) -> Any:
    """JSON that changes when the checkpoint does."""

  def close(self):
    """Lets go of files and buffers; they come back when needed."""
    self._converted = (None, ())

  @property
  def block(self) -> tuple[int, int]:
    """Block of fp8 weights, stored or made."""
    return self.config.weight_block_size or BLOCK

  def abstract(self, dtype='auto', weight_dtype='auto') -> Model:
    """The model as shapes and dtypes; arguments as for `load_model`."""
    return abstract_model(self.config, dtype=dtype, weight_dtype=weight_dtype)

  def load_model(
    self, dtype='auto', weight_dtype='auto', plan: Any = None
  ) -> Model:
    """Loads all parameters.

    Args:
      dtype: 'auto' (the config's), 'bf16' or 'f32'; the correction bias stays
        float32.
      weight_dtype: 'auto' (as stored), 'fp8', or as `dtype`.
      plan: places parameters if it has `sharding(axes, shape)`.

    Returns:
      The model.

    Raises:
      ValueError: one error with all tensors that are missing, surplus,
        mis-shaped or mis-typed; copies that differ; unknown dtypes.
    """
    model = self.abstract(dtype, weight_dtype)
    leaves = model_leaves(model, self.config)
    self.check_model(leaves, weight_dtype)
    return self.fill(model, leaves, plan, 'loading')

  def fill(self, tree, leaves: Sequence[Leaf], plan: Any, what: str):
    """A copy of abstract modules with every parameter read.

    Args:
      tree: the modules.
      leaves: their parameters, in the tree's order.
      plan: as for `load_model`.
      what: for the progress bar.
    """
    # disable=None: no bar where stderr is not a terminal.
    bar = tqdm(leaves, desc=what, unit='param', disable=None)
    try:
      arrays = [self.place(leaf, sharding_of(leaf, plan)) for leaf in bar]
    finally:
      self.close()
    return jax.tree.unflatten(jax.tree.structure(tree), arrays)

  def place(self, leaf: Leaf, sharding: Sharding | None) -> jax.Array:
    """Reads one parameter onto its devices (None: the default device)."""
    if sharding is None:
      return jax.device_put(self.read(leaf, whole(leaf)))
    parts: dict[tuple, np.ndarray] = {}  # replicas are read once

    def part(index):
      spans = tuple(i.indices(n)[:2] for i, n in zip(index, leaf.shape))
      if spans not in parts:
        parts[spans] = self.read(leaf, tuple(slice(*s) for s in spans))
      return parts[spans]

    return jax.make_array_from_callback(leaf.shape, sharding, part)

  def read(self, leaf: Leaf, index: Slices) -> np.ndarray:
    """Reads part of a parameter in the parameter's own dtype.

    Args:
      leaf: a parameter of `abstract`.
      index: one slice with start and stop for each of its axes.

    Returns:
      `parameter[index]`.
    """
    lead = leaf.names.ndim
    inner = index[lead:]
    if not lead:
      return self._as(leaf.names[()], leaf.dtype, inner)
    names = leaf.names[index[:lead]]
    shape = names.shape + tuple(s.stop - s.start for s in inner)
    out = np.empty(shape, leaf.dtype)
    for at, name in np.ndenumerate(names):
      out[at] = self._as(name, leaf.dtype, inner)
    return out

  def _as(self, name: str, dtype: np.dtype, index: Slices) -> np.ndarray:
    """Part of a tensor in the dtype and format that is wanted."""
    weight = name.removesuffix(SCALE_SUFFIX)
    scales = weight != name
    target = np.dtype(FP8) if scales else dtype
    if self.is_fp8(weight) != (target == FP8):
      return self._convert(weight, target)[int(scales)][index]
    return self.tensor(name, index).astype(dtype, copy=False)

  def _convert(self, name: str, target: np.dtype) -> tuple[np.ndarray, ...]:
    """A whole matrix in the other format: (wide,) or (fp8, scales).

    The last one is kept: its scales, or another device's part of it, are
    often asked for next.
    """
    if self._converted[0] != (name, target):
      values, scales, rows = self.matrix(name)
      if scales is None:
        out = _quantize(values[rows], self.block)
      else:
        wide = _dequantize(values, scales, jnp.dtype(target), self.block)
        out = (wide[rows],)
      self._converted = ((name, target), tuple(map(np.asarray, out)))
    return self._converted[1]


def whole(leaf: Leaf) -> Slices:
  """The index of all of a parameter."""
  return tuple(slice(0, n) for n in leaf.shape)


def sharding_of(leaf: Leaf, plan: Any) -> Sharding | None:
  """Where a plan wants a parameter; None for the default device."""
  find = getattr(plan, 'sharding', None)
  return None if find is None else find(leaf.axes, leaf.shape)
