"""Collectives of a compiled step, and whether compute hides them.

A transfer is hidden if the compute that is scheduled between its start and
its end takes at least as long as its bytes take on a link (design section
5). Compute is the roofline time of the instructions in between, and each
instruction hides one transfer only: transfers share the links, so two that
are under way together need the sum of their times.

Copies that a kernel starts end at the kernel that takes its semaphores. A
SparseCore transfer starts at its `async-update`, which carries the
operands; the `async-start` above it moves nothing.
"""

from __future__ import annotations

import dataclasses
import math
import re

from glm_jax.hlo import Instruction, Module
from sharding.chips import Chip
from sharding.planner.cost import Loops, instruction_cost, module_cost
from sharding.planner.frames import Frame

KINDS = (
  'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all',
  'ragged-all-to-all', 'collective-permute', 'collective-broadcast',
)  # fmt: skip
# The scope in which a cache plan moves rows of other ranks.
FETCH = 'fetch'


@dataclasses.dataclass(frozen=True)
class Transfer:
  """One collective.

  Attributes:
    kind: of `KINDS`, or 'kernel' for remote copies inside a kernel.
    name: of the instruction.
    op_name: where in the program it comes from.
    group: devices that take part.
    bytes: what one device receives, once.
    times: how often a step runs it.
    asynchronous: it has a start and an end.
    seconds: of its bytes on a link, once.
    hidden_seconds: of those, what compute between start and end covers.
    window_seconds: all compute between start and end, whatever it covers.
  """

  kind: str
  name: str
  op_name: str
  group: int
  bytes: float
  times: float
  asynchronous: bool
  seconds: float
  hidden_seconds: float
  window_seconds: float

  @property
  def hidden(self) -> bool:
    """Whether compute covers all of it."""
    return self.asynchronous and self.hidden_seconds >= self.seconds

  @property
  def is_fetch(self) -> bool:
    """Whether it brings cached rows from other ranks."""
    return FETCH in self.op_name


def transfers(
  module: Module, chip: Chip, loops: Loops | None = None
) -> list[Transfer]:
  """Every collective of a step, in the order of its computations.

  Args:
    module: parsed, scheduled.
    chip: what links and compute are worth.
    loops: trips of loops whose length is data.

  Returns:
    The transfers; one in a loop body appears once, with its trips.
  """
  loops = loops or Loops()
  out: list[Transfer] = []

  def visit(frame: Frame, times: float) -> None:
    if not _inside_async(frame) and times:
      out.extend(_of_computation(frame, times, chip, loops))

  module_cost(module, loops, visit)
  return out


def _inside_async(frame: Frame) -> bool:
  while frame.call is not None:
    if frame.call.opcode in ('async-start', 'custom-call'):
      return True
    frame = frame.caller
  return False


def _of_computation(frame, times, chip, loops) -> list[Transfer]:
  order = frame.computation.instructions
  place = {instruction.name: i for i, instruction in enumerate(order)}
  found = []  # (start, end, first instruction, collective)
  for instruction in order:
    collective = _collective(frame.module, instruction)
    if collective is None:
      continue
    begin, end = _window(frame, instruction, place)
    found.append((begin, end, instruction, collective))
  if not found:
    return []
  moving = {instruction.name for _, _, instruction, _ in found}
  # Compute that is still free to hide something, by instruction.
  free = [
    0.0
    if instruction.name in moving or instruction.opcode.startswith('async')
    else instruction_cost(frame, instruction, loops).seconds(chip)
    for instruction in order
  ]
  covered, window = {}, {}
  for begin, end, instruction, _ in found:
    window[instruction.name] = sum(free[begin + 1 : end])
  for begin, end, instruction, collective in sorted(
    found, key=lambda f: (f[1], f[0])
  ):
    need = _received(collective) / chip.link_bandwidth
    got = 0.0
    for i in range(begin + 1, end):
      used = min(free[i], need - got)
      free[i] -= used
      got += used
    covered[instruction.name] = got
  return [
    Transfer(
      kind=_kind(collective),
      name=instruction.name,
      op_name=instruction.op_name or collective.op_name,
      group=_group(collective),
      bytes=_received(collective),
      times=times,
      asynchronous=end > begin,
      seconds=_received(collective) / chip.link_bandwidth,
      hidden_seconds=covered[instruction.name],
      window_seconds=window[instruction.name],
    )
    for begin, end, instruction, collective in found
  ]


def _kind(collective: Instruction) -> str:
  kind = collective.opcode.removesuffix('-start')
  return 'kernel' if kind == 'custom-call' else kind


def _collective(module: Module, instruction: Instruction):
  """The collective that an instruction starts, however it is wrapped."""
  code = instruction.opcode
  if code.removesuffix('-start') in KINDS:
    return instruction
  if code == 'custom-call' and _remote_bytes(instruction):
    return instruction
  if code in ('async-start', 'fusion', 'call', 'custom-call'):
    for name in instruction.called.values():
      for inner in module.computations[name].instructions:
        found = _collective(module, inner)
        if found is not None:
          return found
  return None


def _window(frame, instruction, place) -> tuple[int, int]:
  """Where a transfer starts and ends in the schedule; equal if it blocks."""
  begin = place[instruction.name]
  if instruction.opcode == 'custom-call':
    return begin, place.get(_waits(frame, instruction), begin)
  if not instruction.opcode.endswith('-start'):
    return begin, begin
  name = instruction.name
  while True:
    users = frame.computation.users.get(name, [])
    after = [u for u in users if u.opcode.endswith(('-update', '-done'))]
    if not after:
      return begin, begin
    name = after[0].name
    if after[0].opcode.endswith('-done'):
      return begin, place[name]
    begin = place[name]


def _waits(frame: Frame, start: Instruction) -> str | None:
  """The kernel that takes the semaphores of one that starts copies."""
  users = frame.computation.users
  for part in users.get(start.name, []):
    is_semaphore = part.arrays[0].on_chip and part.arrays[0].dims == ()
    if part.opcode == 'get-tuple-element' and is_semaphore:
      for user in users.get(part.name, []):
        if user.opcode == 'custom-call':
          return user.name
  return None


def _remote_bytes(call: Instruction) -> float:
  found = call.attribute(r'"remote_bytes_transferred":"?(\d+)')
  return float(found or 0)


def _received(collective: Instruction) -> float:
  """Bytes that one device receives."""
  if collective.opcode == 'custom-call':
    return _remote_bytes(collective)
  # An asynchronous form returns its operands and semaphores as well.
  sizes = [a.bytes for a in collective.arrays]
  whole = sum(sizes)
  if collective.opcode.endswith('-start'):
    whole = max(sizes)
  n = _group(collective)
  others = (n - 1) / n
  kind = collective.opcode.removesuffix('-start')
  return {
    'all-gather': whole * others,
    'all-reduce': 2 * whole * others,
    'reduce-scatter': whole * (n - 1),
    'all-to-all': whole * others,
    'ragged-all-to-all': whole * others,
    'collective-permute': whole,
    'collective-broadcast': whole,
  }[kind]


def _group(collective: Instruction) -> int:
  """Devices of one replica group; 2 for a permutation."""
  if collective.opcode.startswith(('collective-permute', 'custom-call')):
    return 2
  text = collective.attributes
  mesh = re.search(r'replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}', text)
  if mesh:
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
    return math.prod(int(sizes[n]) for n in re.findall(r"'([^']+)'", mesh[2]))
  iota = re.search(r'replica_groups=\[\d+,(\d+)\]<=', text)
  if iota:
    return int(iota[1])
  listed = re.search(r'replica_groups=\{\{([\d,]*)\}', text)
  return len(listed[1].split(',')) if listed else 2
