"""Reads the text of a compiled HLO module.

Text, because jax 0.10.2 cannot rebuild a module that holds a SparseCore call
(`as_text` fails in `async-update`), while the compiler's own dump of the same
module is complete. Instructions of a scheduled module stand in the order in
which they run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Iterable

_BITS = {
  'pred': 8, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8, 's16': 16, 'u16': 16,
  's32': 32, 'u32': 32, 's64': 64, 'u64': 64, 'bf16': 16, 'f16': 16,
  'f32': 32, 'f64': 64, 'c64': 64, 'c128': 128, 'token': 0, 'opaque': 0,
}  # fmt: skip
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?')
_HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
_NAME = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = ')
_OPERAND = re.compile(r'%([\w.\-]+)')
_CALLED = re.compile(
  r'(calls|to_apply|body|condition|true_computation|false_computation)'
  r'=%?([\w.\-]+)'
)
_CALLED_LIST = re.compile(
  r'(?:branch_computations|called_computations)=\{([^}]*)\}'
)


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of a shape.

  Attributes:
    dtype: as HLO writes it.
    dims: sizes.
    on_chip: it lies in a core's own memory (VMEM, SMEM), not in HBM.
  """

  dtype: str
  dims: tuple[int, ...]
  on_chip: bool = False

  @property
  def size(self) -> int:
    """Elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    """Bytes without the padding of tiles."""
    bits = 8 if self.dtype.startswith('f8') else _BITS[self.dtype]
    return -(-self.size * bits // 8)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  """One line of a computation.

  Attributes:
    name: unique in the module.
    arrays: of its result, flat.
    opcode: as HLO writes it.
    arguments: what stands in the parentheses.
    operands: names among the arguments.
    attributes: what follows.
  """

  name: str
  arrays: tuple[Array, ...]
  opcode: str
  arguments: str
  operands: tuple[str, ...]
  attributes: str

  def attribute(self, pattern: str) -> str | None:
    """First group of a pattern in the attributes."""
    found = re.search(pattern, self.attributes)
    return found and found[1]

  @functools.cached_property
  def op_name(self) -> str:
    """Where in the Python program it comes from: scopes, then primitive."""
    return self.attribute(r'op_name="([^"]*)"') or ''

  @functools.cached_property
  def index(self) -> int:
    """Of a get-tuple-element."""
    return int(self.attribute(r'index=(\d+)'))

  @functools.cached_property
  def called(self) -> dict[str, str]:
    """Computations it names, by attribute; lists are numbered."""
    found = {kind: name for kind, name in _CALLED.findall(self.attributes)}
    names = [
      name
      for group in _CALLED_LIST.findall(self.attributes)
      for name in re.findall(r'%?([\w.\-]+)', group)
    ]
    return found | {f'branch{i}': name for i, name in enumerate(names)}

  @property
  def bytes(self) -> int:
    """Bytes of the result in HBM."""
    return sum(a.bytes for a in self.arrays if not a.on_chip)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
  """Instructions in order; the last with ROOT is the result."""

  name: str
  instructions: tuple[Instruction, ...]
  root: Instruction

  @functools.cached_property
  def by_name(self) -> dict[str, Instruction]:
    """Its instructions by name."""
    return {i.name: i for i in self.instructions}

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    """Its parameters by number."""
    return {
      int(i.arguments): i for i in self.instructions if i.opcode == 'parameter'
    }

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """Who reads an instruction, by its name."""
    out: dict[str, list[Instruction]] = {}
    for instruction in self.instructions:
      for name in dict.fromkeys(instruction.operands):
        out.setdefault(name, []).append(instruction)
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
  """A module: computations by name, and which one is run."""

  computations: dict[str, Computation]
  entry: Computation


def parse(text: str) -> Module:
  """Parses a module.

  Args:
    text: of an HLO dump or of `compiled.as_text()`.

  Returns:
    The module.

  Raises:
    ValueError: there is no entry computation.
  """
  computations, entry = {}, None
  lines, name, is_entry = [], None, False
  for line in text.splitlines():
    header = _HEADER.match(line)
    if header:
      is_entry, name, lines = bool(header[1]), header[2], []
    elif name and line.startswith('}') and not line.startswith('}}'):
      computation = _computation(name, lines)
      computations[name] = computation
      entry = computation if is_entry else entry
      name = None
    elif name and lines and not line.startswith(' '):
      lines[-1] += line  # what a kernel says of itself may take lines
    elif name:
      lines.append(line)
  if entry is None:
    raise ValueError('the text holds no entry computation: not an HLO module')
  return Module(computations, entry)


def dumped_text(folder: str | pathlib.Path) -> str:
  """The scheduled module among a compiler's own files (`xla_dump_to`).

  The program's own module is the largest; small ones are made while tracing.

  Raises:
    ValueError: the compiler wrote none.
  """
  for last in ('after_codegen', 'after_optimizations'):
    files = list(pathlib.Path(folder).glob(f'*.{last}.txt'))
    if files:
      return max(files, key=lambda file: file.stat().st_size).read_text()
  raise ValueError(f'the compiler wrote no module into {folder}')


def _computation(name: str, lines: Iterable[str]) -> Computation:
  parsed, root = [], None
  for line in lines:
    match = _NAME.match(line)
    if match is None:
      continue
    instruction = _instruction(match[2], line[match.end() :])
    parsed.append(instruction)
    root = instruction if match[1] else root
  return Computation(name, tuple(parsed), root or parsed[-1])


def _instruction(name: str, rest: str) -> Instruction:
  """`rest` is: shape opcode(arguments), attributes."""
  end = _closing(rest, 0) + 1 if rest[0] == '(' else rest.index(' ')
  shape, rest = rest[:end], rest[end:].lstrip()
  start = rest.index('(')
  stop = _closing(rest, start)
  arguments = rest[start + 1 : stop]
  return Instruction(
    name=name,
    arrays=arrays(shape),
    opcode=rest[:start],
    arguments=arguments,
    operands=tuple(_OPERAND.findall(arguments)),
    attributes=rest[stop + 1 :],
  )


def _closing(text: str, start: int) -> int:
  """Where the parenthesis that opens at `start` closes."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == '(') - (text[i] == ')')
    if depth == 0:
      return i
  raise ValueError(f'unbalanced parentheses in {text[:80]!r}')


def arrays(shape: str) -> tuple[Array, ...]:
  """The arrays of a shape, tuples flattened."""
  return tuple(
    Array(
      dtype,
      tuple(int(n) for n in dims.split(',') if n),
      # Memory spaces above 0 are on the chip; 5 is the host's memory.
      bool(re.search(r'S\((?!5\))\d+\)', layout)),
    )
    for dtype, dims, layout in _ARRAY.findall(shape)
  )
