"""What every suite is asked and what it answers: requests, rows, tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Device:
  """What a roofline needs to know of one JAX device.

  Attributes:
    name: generation or kind, as 'v6e'.
    bandwidth: bytes a second of its main memory; infinite where unknown,
      and then nothing is set against a floor.
    flops: bf16 peak a second, likewise.
    clock: cycles a second, to turn the compiler's cycles into time; None
      where no cycles are counted.
    topology: a slice that libtpu compiles for, None for a device at hand.
    options: compiler options that programs of ours are compiled with.
  """

  name: str
  bandwidth: float
  flops: float
  clock: float | None = None
  topology: str | None = None
  options: dict[str, Any] = dataclasses.field(default_factory=dict)


# Measured: a copy of 4 GiB and a matrix product of 8192^3 (kernels_gpu.md).
GPUS = {'NVIDIA H200': Device('NVIDIA H200', 4.3e12, 780e12)}


@dataclasses.dataclass(frozen=True)
class Request:
  """What to measure.

  Attributes:
    evidence: 'compiled' or 'run'.
    devices: to compile for, or the one at hand.
    select: names, or parts of names, of the cases; () for all.
    systems: implementations.
    command: the command line, kept beside every number.
    date: of the run, ISO.
    url: of a server to measure, for the serve suite; None starts one.
    model: that it serves, as launch/serve.py takes it.
    scale: of its traffic and window; 1 takes minutes on a CPU.
    max_seconds: after which a suite of many cases starts no more; None for
      all of them. A device that is lent for a time would be gone before the
      report.
    save: keeps what has been measured so far, for a run that is cut off.
  """

  evidence: str
  devices: tuple[Device, ...]
  select: tuple[str, ...] = ()
  systems: tuple[str, ...] = ('tpu',)
  command: str = ''
  date: str = ''
  url: str | None = None
  model: str | None = None
  scale: int = 1
  max_seconds: float | None = None
  save: Callable[[Report], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One number with all that it depends on (design section 8).

  Attributes:
    suite: as asked for.
    case: what was run, at which shape.
    system: the implementation.
    device: generation, or the device's kind.
    dtype: of the streamed operand.
    shape: of the operands.
    us: microseconds; None where the evidence gives none.
    tflops: the work's FLOPs over `us`, in 1e12 a second.
    gbps: the bytes that must move over `us`, in 1e9 a second.
    roofline_share: floor over `us`.
    ratio: `us` over the floor.
    evidence: 'compiled' or 'run'.
    command: that gives this row.
    date: of the run.
    details: what the suite alone knows.
  """

  suite: str
  case: str
  system: str
  device: str
  dtype: str
  shape: str
  us: float | None
  tflops: float | None = None
  gbps: float | None = None
  roofline_share: float | None = None
  ratio: float | None = None
  evidence: str
  command: str
  date: str
  details: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Report:
  """What a suite found.

  Attributes:
    rows: numbers.
    notes: limits of the evidence, printed with every table.
    missed: goals that were not met, a sentence each.
  """

  rows: tuple[Row, ...]
  notes: tuple[str, ...] = ()
  missed: tuple[str, ...] = ()

  @property
  def passed(self) -> bool:
    """Every goal of the suite that was measured is met."""
    return not self.missed

  def table(self, columns: Sequence[str] = ()) -> str:
    """Rows as text, then the notes and the goals missed.

    Args:
      columns: names of details shown behind the common columns.
    """
    common = ('case', 'dtype', 'system', 'device', 'us', 'tflops', 'gbps')
    head = [*common, 'x floor', *columns]
    lines = [head]
    for row in self.rows:
      cells = [getattr(row, name) for name in common] + [row.ratio]
      cells += [row.details.get(name) for name in columns]
      lines.append([_cell(cell) for cell in cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = [
      '  '.join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip()
      for line in lines
    ]
    text += [''] + [f'note: {note}' for note in self.notes]
    text += [f'MISSED: {goal}' for goal in self.missed]
    return '\n'.join(text)


def _cell(value: Any) -> str:
  if value is None:
    return '-'
  if isinstance(value, float):
    return f'{value:.3g}' if abs(value) < 100 else f'{value:.0f}'
  if isinstance(value, list | tuple):
    return ' '.join(map(str, value)) or '-'
  return str(value)
