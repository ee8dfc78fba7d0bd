"""The device mesh: axes `data`, `context` and `model`, always all three.

    data     whole sequences (serving) or windows (training)
    context  tokens of a sequence: rows of a step, pages of the cache
    model    attention heads, MLP width, vocabulary

An axis of size 1 is there all the same, so that no code asks which axes a
mesh has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

DATA, CONTEXT, MODEL = AXES = ('data', 'context', 'model')


class MeshShape(NamedTuple):
  """Sizes of the mesh axes; an axis of size 1 divides nothing."""

  data: int = 1
  context: int = 1
  model: int = 1

  @property
  def size(self) -> int:
    """Devices of the mesh."""
    return math.prod(self)

  def __str__(self) -> str:
    return ','.join(f'{name}={n}' for name, n in zip(AXES, self))


def parse_mesh_shape(text: str) -> MeshShape:
  """Reads 'context=8', 'data=2,context=4' or '2x4x1' (data x context x model).

  Raises:
    ValueError: an unknown axis, an axis named twice, or a size below 1.
  """
  text = text.strip()
  known = "use axes of 'data=1,context=8,model=1', or '1x8x1'"
  if re.fullmatch(r'\d+x\d+x\d+', text):
    sizes = dict(zip(AXES, map(int, text.split('x'))))
  else:
    sizes = {}
    for part in text.split(','):
      match = re.fullmatch(r'\s*(\w+)\s*=\s*(-?\d+)\s*', part)
      if match is None or match[1] not in AXES:
        raise ValueError(f'mesh {text!r}: {part!r} is not an axis; {known}')
      if match[1] in sizes:
        raise ValueError(f'mesh {text!r} names {match[1]!r} twice; {known}')
      sizes[match[1]] = int(match[2])
  shape = MeshShape(**sizes)
  _check_positive(shape)
  return shape


def make_mesh(
  shape: MeshShape | None = None, devices: Sequence | None = None
) -> Mesh:
  """A mesh over devices, in an order that suits their interconnect.

  Args:
    shape: sizes of the axes; None puts every device on `context`.
    devices: concrete devices, or those of a topology description; None for
      all devices of all processes.

  Returns:
    A mesh with the axes `AXES`, in that order, partitioned automatically.

  Raises:
    ValueError: the sizes do not use exactly these devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  if not devices:
    raise ValueError('a mesh needs at least one device; none was given')
  shape = MeshShape(context=len(devices)) if shape is None else shape
  shape = MeshShape(*shape)
  _check_positive(shape)
  if shape.size != len(devices):
    raise ValueError(
      f'mesh {shape} needs {shape.size} devices, there are {len(devices)}: '
      f'use sizes whose product is {len(devices)}'
    )
  if devices[0].platform == 'tpu':
    array = mesh_utils.create_device_mesh(
      tuple(shape), devices, allow_split_physical_axes=True
    )
  else:
    array = np.array(devices).reshape(shape)
  return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_shape(mesh: Mesh) -> MeshShape:
  """The sizes of a mesh of `make_mesh`.

  Raises:
    ValueError: it has other axes.
  """
  if tuple(mesh.axis_names) != AXES:
    raise ValueError(
      f'mesh axes {tuple(mesh.axis_names)} must be {AXES}: build it with '
      'make_mesh'
    )
  return MeshShape(*mesh.devices.shape)


def ways(mesh: Mesh, axes: Sequence[str]) -> int:
  """Devices along some axes together."""
  return math.prod(mesh.shape[name] for name in axes)


def _check_positive(shape: MeshShape) -> None:
  for name, size in zip(AXES, shape):
    if size < 1:
      raise ValueError(f'mesh axis {name}={size} must be at least 1')
