"""What a TPU chip can hold and do, by generation.

Memory, bandwidth and peaks are the public system tables
(cloud.google.com/tpu/docs/tpu7x, which also lists v5p and v6e, and
cloud.google.com/tpu/docs/v5e). `usable_bytes` is what libtpu 0.0.52 leaves to
a program on one device: the limit that its own out-of-memory error names.
"""

from __future__ import annotations

import dataclasses

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
  """One generation.

  Attributes:
    name: as topologies call it.
    devices_per_chip: JAX devices of one chip.
    hbm_bytes: memory of a chip.
    usable_bytes: what programs may use on one device.
    hbm_bandwidth: bytes a second, a chip.
    bf16_flops: peak a second, a chip.
    fp8_flops: the same with both operands e4m3; v5e to v6e multiply fp8 as
      bf16.
    ici_bandwidth: bytes a second between chips, a chip, both directions of
      all its links together.
    torus_axes: dimensions of the torus; a chip has two links in each.
    pod_chips: the largest slice.
  """

  name: str
  devices_per_chip: int
  hbm_bytes: int
  usable_bytes: int
  hbm_bandwidth: float
  bf16_flops: float
  fp8_flops: float
  ici_bandwidth: float
  torus_axes: int
  pod_chips: int

  @property
  def limit_bytes(self) -> int:
    """Bytes that programs may use on a chip, all its devices together."""
    return min(self.hbm_bytes, self.usable_bytes * self.devices_per_chip)

  @property
  def link_bandwidth(self) -> float:
    """Bytes a second that one device receives along one torus axis.

    Both neighbours of the axis send at once; the devices of a chip share
    its links. A collective over several torus axes may be faster: this is
    the rate by which a fetch counts as hidden, so it errs to "exposed".
    """
    return self.ici_bandwidth / (2 * self.torus_axes) / self.devices_per_chip

  def peak(self, dtype: str = 'bf16') -> float:
    """FLOPs a second of one device: 'bf16' or 'fp8' operands."""
    whole = {'bf16': self.bf16_flops, 'fp8': self.fp8_flops}[dtype]
    return whole / self.devices_per_chip

  @property
  def bandwidth(self) -> float:
    """HBM bytes a second of one device."""
    return self.hbm_bandwidth / self.devices_per_chip


CHIPS: dict[str, Chip] = {
  chip.name: chip
  for chip in (
    Chip(
      name='v5e',
      devices_per_chip=1,
      hbm_bytes=16 * GIB,
      usable_bytes=int(15.75 * GIB),
      hbm_bandwidth=819e9,
      bf16_flops=197e12,
      fp8_flops=197e12,
      ici_bandwidth=400e9,
      torus_axes=2,
      pod_chips=256,
    ),
    Chip(
      name='v5p',
      devices_per_chip=1,  # two cores, one device
      hbm_bytes=95 * GIB,
      usable_bytes=int(95.73 * GIB),
      hbm_bandwidth=2765e9,
      bf16_flops=459e12,
      fp8_flops=459e12,
      ici_bandwidth=1200e9,
      torus_axes=3,
      pod_chips=8960,
    ),
    Chip(
      name='v6e',
      devices_per_chip=1,
      hbm_bytes=32 * GIB,
      usable_bytes=int(31.24 * GIB),
      hbm_bandwidth=1638e9,
      bf16_flops=918e12,
      fp8_flops=918e12,
      ici_bandwidth=800e9,
      torus_axes=2,
      pod_chips=256,
    ),
    Chip(
      name='tpu7x',
      devices_per_chip=2,
      hbm_bytes=192 * GIB,
      usable_bytes=int(94.74 * GIB),
      hbm_bandwidth=7380e9,
      bf16_flops=2307e12,
      fp8_flops=4614e12,
      ici_bandwidth=1200e9,
      torus_axes=3,
      pod_chips=9216,
    ),
  )
}


def chip_named(name: str) -> Chip:
  """The chip of a generation or topology name ('v6e', 'v6e:16x16').

  Raises:
    ValueError: an unknown generation.
  """
  generation = name.partition(':')[0]
  if generation not in CHIPS:
    raise ValueError(
      f'chip {generation!r} is unknown: use one of {", ".join(CHIPS)}'
    )
  return CHIPS[generation]
