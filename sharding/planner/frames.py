"""Where a computation is called from, and what its loops count to.

A `Frame` is a computation together with the instruction that calls it, so
that a value can be followed out of a fusion or a loop body to where it was
made. XLA hoists constants into the tuple that a loop carries; without the
way back, hardly any trip count could be read.
"""

from __future__ import annotations

import dataclasses
import re

from glm_jax.hlo import Computation, Instruction, Module

_TRANSPARENT = (
  'bitcast', 'broadcast', 'convert', 'copy', 'copy-done', 'copy-start',
  'optimization-barrier', 'reshape',
)  # fmt: skip
_ARITHMETIC = {
  'add': lambda a, b: a + b,
  'subtract': lambda a, b: a - b,
  'multiply': lambda a, b: a * b,
  'minimum': min,
  'maximum': max,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
  """A computation and its caller.

  Attributes:
    module: the module.
    computation: what is run.
    caller: the frame that calls it, None for the entry.
    call: the calling instruction, in the caller's computation.
  """

  module: Module
  computation: Computation
  caller: Frame | None = None
  call: Instruction | None = None

  def enter(self, call: Instruction, name: str) -> Frame:
    """The frame of a computation that `call` names."""
    return Frame(self.module, self.module.computations[name], self, call)

  def value(self, name: str) -> int | None:
    """An integer that is known before the program runs, else None."""
    instruction = self.computation.by_name.get(name)
    if instruction is None:
      return None
    code = instruction.opcode
    if code == 'constant':
      text = instruction.arguments.strip()
      return int(text) if re.fullmatch(r'-?\d+', text) else None
    if code in _TRANSPARENT:
      return self.value(instruction.operands[0])
    if code == 'get-tuple-element':
      return self._element(instruction.operands[0], instruction.index)
    if code == 'parameter' and self.call and self.call.opcode != 'while':
      return self.caller.value(self.call.operands[int(instruction.arguments)])
    if code in _ARITHMETIC:
      values = [self.value(operand) for operand in instruction.operands]
      return None if None in values else _ARITHMETIC[code](*values)
    if code in ('fusion', 'call'):
      name = instruction.called.get('calls') or instruction.called['to_apply']
      inner = self.enter(instruction, name)
      return inner.value(inner.computation.root.name)
    return None

  def _element(self, name: str, index: int) -> int | None:
    """Element of a tuple as an integer."""
    instruction = self.computation.by_name[name]
    code = instruction.opcode
    if code == 'tuple':
      return self.value(instruction.operands[index])
    if code in ('copy', 'bitcast', 'optimization-barrier', 'copy-done'):
      return self._element(instruction.operands[0], index)
    if code == 'while' and self._is_invariant(instruction, index):
      return self._element(instruction.operands[0], index)
    if code == 'parameter' and self.call and self.call.opcode == 'while':
      if self.caller._is_invariant(self.call, index):
        return self.caller._element(self.call.operands[0], index)
    return None

  def _is_invariant(self, loop: Instruction, index: int) -> bool:
    """Whether a loop hands an element of its tuple on as it came."""
    body = self.module.computations[loop.called['body']]
    if body.root.opcode != 'tuple':
      return False
    name = body.root.operands[index]
    while True:
      instruction = body.by_name[name]
      if instruction.opcode in _TRANSPARENT:
        name = instruction.operands[0]
        continue
      source = instruction.operands[0] if instruction.operands else ''
      return (
        instruction.opcode == 'get-tuple-element'
        and instruction.index == index
        and body.by_name[source].opcode == 'parameter'
      )

  def trip_count(self, loop: Instruction) -> int | None:
    """How often a loop of this computation runs; None if data decides."""
    known = loop.attribute(r'known_trip_count\W+n\W+(\d+)')
    if known is not None:
      return int(known)
    found = _comparison(self.enter(loop, loop.called['condition']))
    if found is None:
      return None
    index, direction, limit = found
    first = self._element(loop.operands[0], index)
    step = _step(self.enter(loop, loop.called['body']), index)
    if first is None or not step:
      return None
    span = limit - first if step > 0 else first - limit
    span += direction in ('LE', 'GE')
    return max(-(-span // abs(step)), 0)


_MIRRORED = {'LT': 'GT', 'GT': 'LT', 'LE': 'GE', 'GE': 'LE', 'NE': 'NE'}


def _comparison(frame: Frame) -> tuple[int, str, int] | None:
  """(element of the loop's tuple, direction, limit) of a loop condition."""
  frame, root = _inside(frame, frame.computation.root)
  if root.opcode != 'compare':
    return None
  direction = root.attribute(r'direction=(\w+)')
  if direction not in _MIRRORED:
    return None
  left, right = root.operands
  for counter, limit, way in (
    (left, right, direction),
    (right, left, _MIRRORED[direction]),
  ):
    index, value = _counter(frame, counter), frame.value(limit)
    if index is not None and value is not None:
      return index, way, value
  return None


def _inside(frame: Frame, instruction: Instruction):
  """Goes through fusions to the instruction that computes a result."""
  while instruction.opcode == 'fusion':
    frame = frame.enter(instruction, instruction.called['calls'])
    instruction = frame.computation.root
  return frame, instruction


def _counter(frame: Frame, name: str) -> int | None:
  """Which element of the loop's tuple a value is, if it is one."""
  instruction = frame.computation.by_name[name]
  if instruction.opcode in _TRANSPARENT:
    return _counter(frame, instruction.operands[0])
  if instruction.opcode == 'parameter' and frame.call.opcode == 'fusion':
    outer = frame.call.operands[int(instruction.arguments)]
    return _counter(frame.caller, outer)
  if instruction.opcode != 'get-tuple-element':
    return None
  source = frame.computation.by_name[instruction.operands[0]]
  return instruction.index if source.opcode == 'parameter' else None


def _step(body: Frame, index: int) -> int | None:
  """What a loop adds to its counter."""
  root = body.computation.root
  if root.opcode != 'tuple':
    return None
  update = body.computation.by_name[root.operands[index]]
  while update.opcode in _TRANSPARENT:
    update = body.computation.by_name[update.operands[0]]
  frame, update = _inside(body, update)
  if update.opcode not in ('add', 'subtract'):
    return None
  left, right = update.operands
  sign = 1 if update.opcode == 'add' else -1
  for counter, amount in ((left, right), (right, left)):
    if _counter(frame, counter) == index:
      value = frame.value(amount)
      return None if value is None else sign * value
  return None


def entry_frame(module: Module) -> Frame:
  """The frame of what a module runs."""
  return Frame(module, module.entry)
