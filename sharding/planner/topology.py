"""Named TPU slices, described without a TPU.

libtpu describes a slice's devices and compiles for them on any Linux host.
"""

from __future__ import annotations

import functools
import math
import re

import jax

from sharding.chips import CHIPS, Chip, chip_named

SMALLEST = 'smallest'
_LIBTPU = (
  "libtpu is missing: it compiles for TPUs on any Linux host, install it "
  "with pip install 'glm-jax[plan]'"
)  # fmt: skip
_BUSY = (
  'another process of this host has loaded libtpu: wait for it, or set '
  'ALLOW_MULTIPLE_LIBTPU_LOAD=1 where both only compile'
)
_FLAT = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_CUBES = (
  '2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8',
  '8x8x16', '8x16x16',
)  # fmt: skip


def slices(chip: Chip) -> tuple[str, ...]:
  """Names of the slices of a generation that can be rented, small to large."""
  shapes = _FLAT if chip.torus_axes == 2 else _CUBES
  return tuple(f'{chip.name}:{shape}' for shape in shapes)


def num_chips(topology: str) -> int:
  """Chips of a slice, from its name.

  Raises:
    ValueError: the name is not 'generation:AxB' or 'generation:AxBxC'.
  """
  chip = chip_named(topology)
  shape = topology.partition(':')[2]
  if not re.fullmatch(r'\d+(x\d+)+', shape):
    raise ValueError(
      f'topology {topology!r} must name its chips, as in '
      f'{slices(chip)[4]} or {SMALLEST}:{chip.name}'
    )
  sizes = [int(n) for n in shape.split('x')]
  chips = math.prod(sizes)
  if len(sizes) != chip.torus_axes or not 0 < chips <= chip.pod_chips:
    raise ValueError(
      f'topology {topology!r} does not exist: {chip.name} has '
      f'{chip.torus_axes} axes and at most {chip.pod_chips} chips; slices are '
      f'{", ".join(slices(chip))}'
    )
  return chips


def num_devices(topology: str) -> int:
  """JAX devices of a slice, from its name."""
  return num_chips(topology) * chip_named(topology).devices_per_chip


def candidates(topology: str) -> tuple[str, ...]:
  """The slices that a topology argument stands for.

  Args:
    topology: 'v6e:16x16', or 'smallest:v6e' for all slices of v6e, small to
      large.

  Returns:
    Names.

  Raises:
    ValueError: an unknown generation or shape.
  """
  first, _, generation = topology.partition(':')
  if first == SMALLEST:
    if generation not in CHIPS:
      raise ValueError(
        f'topology {topology!r}: after {SMALLEST}: comes one of '
        f'{", ".join(CHIPS)}'
      )
    return slices(CHIPS[generation])
  num_chips(topology)
  return (topology,)


@functools.cache
def topology_devices(topology: str) -> list[jax.Device]:
  """Devices of a slice as libtpu describes them.

  Raises:
    ValueError: libtpu knows no such slice.
    ImportError: libtpu is not installed.
  """
  num_chips(topology)
  from jax.experimental import topologies

  try:
    import libtpu  # noqa: F401
  except ImportError as error:
    raise ImportError(_LIBTPU) from error
  try:
    description = topologies.get_topology_desc(
      platform='tpu', topology_name=topology
    )
  except Exception as error:  # what libtpu raises has no class of its own
    reason = str(error).strip().splitlines()
    if 'lockfile' in str(error):
      raise ValueError(_BUSY) from error
    raise ValueError(
      f'topology {topology!r} does not exist for libtpu: '
      f'{reason[0] if reason else type(error).__name__}; slices are '
      f'{", ".join(slices(chip_named(topology)))}'
    ) from error
  return description.devices
