"""FLOPs and HBM bytes of compiled HLO, loops times their trip counts.

FLOPs are those of matrix products: `dot`, `convolution` (what TPUs make of a
dot), the multiply and reduce that a product with few rows becomes, and what
a kernel declares (`pl.CostEstimate`). Bytes are read and written once an
instruction: slices, gathers and updates count what they touch, and what lies
in a core's own memory counts nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping

from glm_jax.hlo import Array, Computation, Instruction, Module
from sharding.planner.frames import Frame, entry_frame

# Passes of a bf16 multiplier for one product, by XLA's precision.
_PASSES = {'highest': 6, 'high': 3}
_FREE = (
  'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while',
  'conditional', 'call', 'after-all', 'partition-id', 'replica-id', 'iota',
  'optimization-barrier', 'copy-done', 'async-update', 'async-done',
  'all-gather-done', 'all-reduce-done', 'collective-permute-done', 'domain',
)  # fmt: skip
_KERNEL = 'tpu_custom_call'  # of Pallas
_THROUGH = ('bitcast', 'convert', 'copy', 'reshape', 'transpose')


@dataclasses.dataclass(frozen=True)
class Cost:
  """What instructions do.

  Attributes:
    flops: of matrix products.
    passes: the same in passes of a bf16 multiplier (float32 takes six).
    fp8: the part of `passes` whose operands are both fp8.
    declared: the part of `flops` that kernels declare.
    bytes: moved to and from HBM.
  """

  flops: float = 0.0
  passes: float = 0.0
  fp8: float = 0.0
  declared: float = 0.0
  bytes: float = 0.0

  def __add__(self, other: Cost) -> Cost:
    return Cost(
      *(a + b for a, b in zip(dataclasses.astuple(self),
                              dataclasses.astuple(other)))
    )  # fmt: skip

  def __mul__(self, times: float) -> Cost:
    return Cost(*(a * times for a in dataclasses.astuple(self)))

  def seconds(self, chip, *, bandwidth: bool = True) -> float:
    """Roofline time on one device: the slower of arithmetic and memory."""
    compute = (self.passes - self.fp8) / chip.peak()
    compute += self.fp8 / chip.peak('fp8')
    return max(compute, self.bytes / chip.bandwidth if bandwidth else 0.0)


class Loops:
  """How often loops run whose length is data, and what could not be counted.

  Attributes:
    counts: trips by pattern of `op_name`; the first that matches counts.
    unknown: `op_name` of each loop that no pattern matches; it counts once.
    assumed: `op_name` of the others, with what was assumed.
    silent: `op_name` of kernels that declare no cost; they count nothing.
  """

  def __init__(self, counts: Mapping[str, float] | None = None):
    self.counts = dict(counts or {})
    self.unknown: set[str] = set()
    self.assumed: dict[str, float] = {}
    self.silent: set[str] = set()

  def trips(self, frame: Frame, loop: Instruction) -> float:
    """Trips of a loop: read from the program, else by pattern, else 1."""
    known = frame.trip_count(loop)
    if known is not None:
      return known
    for pattern, count in self.counts.items():
      if re.search(pattern, loop.op_name):
        self.assumed[loop.op_name] = count
        return count
    self.unknown.add(loop.op_name)
    return 1


def module_cost(
  module: Module,
  loops: Loops | None = None,
  visit: Callable[[Frame, float], None] | None = None,
) -> Cost:
  """Cost of one run of a module on one device.

  Args:
    module: parsed.
    loops: trips of loops whose length is data.
    visit: called with every scheduled computation and how often it runs.

  Returns:
    The cost; of a conditional, its dearest branch.
  """
  return _cost(entry_frame(module), 1.0, loops or Loops(), visit)


def _cost(frame, times, loops, visit):
  if visit:
    visit(frame, times)
  total = Cost()
  for instruction in frame.computation.instructions:
    total += instruction_cost(frame, instruction, loops, times, visit)
  return total


def instruction_cost(
  frame: Frame,
  instruction: Instruction,
  loops: Loops,
  times: float = 1.0,
  visit: Callable[[Frame, float], None] | None = None,
) -> Cost:
  """Cost of one instruction, everything that it calls included."""
  code, called = instruction.opcode, instruction.called
  inner = lambda name, n=times: _cost(
    frame.enter(instruction, name), n, loops, visit
  )
  if code == 'while':
    trips = loops.trips(frame, instruction)
    return inner(called['body'], times * trips) * trips
  if code == 'conditional':
    names = [n for k, n in called.items() if k != 'to_apply']
    return max((inner(n) for n in names), key=lambda c: c.passes + c.bytes)
  if code == 'call':
    return inner(called['to_apply'])
  if code == 'async-start':
    return inner(called['calls'])
  moved = _bytes(frame.computation, instruction, frame.module)
  if code == 'fusion':
    work = _fusion_flops(frame.module, called['calls'])
    return dataclasses.replace(work, bytes=moved)
  if code == 'custom-call':
    if 'branch0' in called:  # a program of the SparseCore
      return inner(called['branch0'])
    return _declared(instruction, moved, loops)
  work = _flops(frame.computation, instruction)
  return dataclasses.replace(work, bytes=moved)


def _declared(instruction: Instruction, moved: float, loops: Loops) -> Cost:
  """What a kernel says of itself.

  One that says nothing counts nothing and is named: its operands may be whole
  pools of which it reads a few rows.
  """
  text = instruction.attribute(r'"cost_estimate":\{([^}]*)\}')
  if text is None:
    if instruction.attribute(r'custom_call_target="(\w+)') != _KERNEL:
      return Cost(bytes=moved)
    loops.silent.add(instruction.op_name)
    return Cost()
  of = lambda name: float((re.findall(rf'"{name}":"?(\d+)', text) or [0])[0])
  flops, declared = of('flops'), of('bytes_accessed')
  return Cost(flops, flops, 0.0, flops, declared or moved)


@functools.lru_cache(4096)
def _fusion_flops(module: Module, name: str) -> Cost:
  """Products inside a fusion, nested fusions included."""
  computation, total = module.computations[name], Cost()
  for instruction in computation.instructions:
    if instruction.opcode == 'fusion':
      total += _fusion_flops(module, instruction.called['calls'])
    else:
      total += _flops(computation, instruction)
  return total


def _flops(computation: Computation, instruction: Instruction) -> Cost:
  code = instruction.opcode
  if code == 'dot':
    macs = _dot_macs(computation, instruction)
  elif code == 'convolution':
    macs = _convolution_macs(computation, instruction)
  elif code == 'reduce' and _is_product(computation, instruction):
    macs = computation.by_name[instruction.operands[0]].arrays[0].size
    return Cost(2.0 * macs)  # the vector unit's, none of the multiplier's
  else:
    return Cost()
  asked = instruction.attribute(r'operand_precision=\{(\w+)') or 'default'
  operands = [computation.by_name[n].arrays[0] for n in instruction.operands]
  passes = 2.0 * macs * _PASSES.get(asked, 1)
  fp8 = all(a.dtype.startswith('f8') for a in operands[:2])
  return Cost(2.0 * macs, passes, passes if fp8 else 0.0)


def _is_product(computation: Computation, reduce: Instruction) -> bool:
  """Whether a reduce is the second half of a dot with few rows."""
  if not reduce.op_name.endswith('dot_general'):
    return False
  source = computation.by_name[reduce.operands[0]]
  while source.opcode in _THROUGH:
    source = computation.by_name[source.operands[0]]
  return source.opcode == 'multiply'


def _dims(text: str | None) -> list[int]:
  return [int(n) for n in re.findall(r'\d+', text or '')]


def _dot_macs(computation: Computation, dot: Instruction) -> int:
  left = computation.by_name[dot.operands[0]].arrays[0]
  summed = _dims(dot.attribute(r'lhs_contracting_dims=\{([^}]*)\}'))
  return dot.arrays[0].size * math.prod(left.dims[d] for d in summed)


def _convolution_macs(
  computation: Computation, convolution: Instruction
) -> int:
  """Multiply-adds of a convolution; taps that fall on padding count none."""
  image, kernel = (
    computation.by_name[n].arrays[0] for n in convolution.operands[:2]
  )
  labels = convolution.attribute(r'dim_labels=(\S+?)(?:,|$)')
  lhs, rest = labels.split('_')
  rhs, out = rest.split('->')
  features = kernel.dims[rhs.index('i')]
  window = convolution.attribute(r'window=\{([^}]*)\}') or ''
  result, macs = convolution.arrays[0], features
  for label, size in zip(out, result.dims):
    if not label.isdigit():
      macs *= size
      continue
    n = int(label)
    macs *= _taps(
      image.dims[lhs.index(label)],
      kernel.dims[rhs.index(label)],
      size,
      _window(window, 'stride', n, 1),
      _window(window, 'pad', n, 0),
      _window(window, 'lhs_dilate', n, 1),
      _window(window, 'rhs_dilate', n, 1),
    )
  return macs


def _window(window: str, field: str, axis: int, default: int) -> int:
  """One number of a window; the lower one of a padding."""
  found = re.search(rf'\b{field}=([\d_x\-]+)', window)
  if found is None:
    return default
  return int(re.match(r'-?\d+', found[1].split('x')[axis])[0])


@functools.lru_cache(4096)
def _taps(image, kernel, out, stride, pad, image_step, kernel_step) -> int:
  """Pairs of output and kernel positions that meet an element."""
  width = (image - 1) * image_step + 1
  count = 0
  for o in range(out):
    for k in range(kernel):
      at = o * stride - pad + k * kernel_step
      count += 0 <= at < width and at % image_step == 0
  return count


def _bytes(
  computation: Computation, instruction: Instruction, module: Module
) -> float:
  """HBM bytes of one scheduled instruction."""
  code = instruction.opcode
  if code in _FREE or code.endswith('-done'):
    return 0.0
  hbm = lambda name: computation.by_name[name].bytes
  result, operands = instruction.bytes, instruction.operands
  if code == 'copy-start':
    target, source = instruction.arrays[:2]
    return sum(a.bytes for a in (target, source) if not a.on_chip)
  if code in ('dynamic-slice', 'gather', 'slice'):
    return 2.0 * result + sum(map(hbm, operands[1:]))
  if code == 'dynamic-update-slice':
    return 2.0 * hbm(operands[1])
  if code == 'scatter':
    return 3.0 * hbm(operands[-1]) + hbm(operands[1])
  if code == 'fusion' and 'calls' in instruction.called:
    inner = module.computations[instruction.called['calls']]
    return _fusion_bytes(module, computation, instruction, inner)
  return float(result + sum(hbm(n) for n in dict.fromkeys(operands)))


def _fusion_bytes(module, outer: Computation, fusion: Instruction, inner):
  """Operands as far as the fusion reads them, and what it writes."""
  total = 0.0
  for number, parameter in inner.parameters.items():
    whole = outer.by_name[fusion.operands[number]].bytes
    touched = _touched(module, inner, parameter.name) if whole else 0
    total += whole if touched is None else min(whole, touched)
  for write in _results(inner):
    if write.opcode == 'dynamic-update-slice':
      total += inner.by_name[write.operands[1]].arrays[0].bytes
    elif write.opcode == 'scatter':
      total += inner.by_name[write.operands[-1]].arrays[0].bytes
    else:
      total += _written(write, fusion)
  return total


def _results(inner: Computation) -> list[Instruction]:
  """The instructions whose values a fusion returns."""
  names = (
    inner.root.operands if inner.root.opcode == 'tuple' else [inner.root.name]
  )
  out = []
  for name in names:
    instruction = inner.by_name[name]
    while instruction.opcode == 'bitcast':
      instruction = inner.by_name[instruction.operands[0]]
    out.append(instruction)
  return out


def _written(write: Instruction, fusion: Instruction) -> int:
  """Bytes of one result; nothing if the fusion leaves it on the chip."""
  sizes = lambda a: (a.dtype, a.size)
  for array in fusion.arrays:
    if sizes(array) == sizes(write.arrays[0]):
      return 0 if array.on_chip else array.bytes
  return sum(a.bytes for a in fusion.arrays if not a.on_chip) // max(
    len(fusion.arrays), 1
  )


def _touched(module: Module, inner: Computation, name: str) -> int | None:
  """Bytes of a value that a fusion reads; None for all of them."""
  total = 0
  for user in inner.users.get(name, []):
    first = user.operands[0] == name
    if first and user.opcode in ('dynamic-slice', 'gather', 'slice'):
      array = user.arrays[0]
      read = Array(array.dtype, array.dims).bytes
    elif first and user.opcode in ('dynamic-update-slice', 'scatter'):
      read = 0  # updated where it lies; the write counts with the results
    elif user.opcode == 'bitcast' or _is_view(module, user, name):
      read = _touched(module, inner, user.name)
    elif user.opcode == 'fusion':
      nested = module.computations[user.called['calls']]
      number = user.operands.index(name)
      read = _touched(module, nested, nested.parameters[number].name)
    else:
      read = None
    if read is None:
      return None
    total += read
  return total


def _is_view(module: Module, user: Instruction, name: str) -> bool:
  """Whether a fusion gives a value as it lies, in another tiling.

  libtpu reads and writes tiles of fp8 pools through such a `copy`; by its
  cycle model (2,346 cycles for a pool of 1.66 GB on v6e) no pool is moved.
  """
  if user.opcode != 'fusion':
    return False
  nested = module.computations[user.called['calls']]
  number = user.operands.index(name)
  whole = f'output_to_operand_aliasing={{{{}}: ({number}, {{}})}}'
  return nested.root.opcode == 'copy' and whole in user.attributes
