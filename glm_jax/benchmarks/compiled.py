"""One op compiled for a TPU generation on any host, and what that shows.

Nothing runs. The compiler's own dump of the program (`after_codegen`) is
read, not `compiled.as_text()`, which fails on jax 0.10.2 where a SparseCore
call is inside (spec/kernels_tpu.md section 5).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from glm_jax import hlo
from pallas_kernels.arg_specs import ArgSpec

# The smallest slice of each generation; its first device stands for any.
SLICES = {
  'v5e': 'v5e:2x2',
  'v5p': 'v5p:2x2x1',
  'v6e': 'v6e:2x2',
  'tpu7x': 'tpu7x:2x2x1',
}
# Cycles a second, inferred from public peaks (spec/kernels_tpu.md section 1).
CLOCKS = {'v5e': 1.5e9, 'v5p': 1.75e9, 'v6e': 1.75e9, 'tpu7x': 2.2e9}
# Blocks of rows, keys or scores that the ops may hold are smaller.
_BLOCK_BYTES = 128 << 20
_MOVES = ('copy', 'copy-start', 'transpose', 'reshape', 'convert')


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of one program.

  Attributes:
    seconds: of lowering and compiling.
    arguments: bytes of the arguments, as laid out on the device.
    temporaries: bytes beside arguments and results.
    aliased: bytes of results that lie where arguments lay.
    copies: names of the instructions that move an array at least a quarter
      as large as the largest argument (and no block of it), with its bytes.
    kernels: names of the Pallas kernels inside.
    sparsecore: a part runs asynchronously on the SparseCores.
  """

  seconds: float
  arguments: int
  temporaries: int
  aliased: int
  copies: tuple[str, ...]
  kernels: tuple[str, ...]
  sparsecore: bool


def op_function(spec: ArgSpec, implementation: str | None) -> Callable:
  """The public call of a case.

  Args:
    spec: the case.
    implementation: of the op; None is its own choice.

  Returns:
    A function of the case's array arguments.
  """
  name = spec.op.removesuffix('_in').removesuffix('_out')
  public = getattr(pallas_kernels, name)
  call = functools.partial(public, implementation=implementation)
  return lambda *args: call(*args, **spec.options)


def as_stored(
  spec: ArgSpec, function: Callable
) -> tuple[Callable, tuple, dict]:
  """A function of a case's arguments, of arguments as a step has them.

  The cache stores scales of index keys flat; a plane [P, 64] of its own would
  be padded to whole lines and copied. The queries come out of a matmul in the
  order of their axes; alone, as a program's argument, the compiler would
  choose the layout that pads least and then copy them.

  Args:
    spec: the case.
    function: of its array arguments.

  Returns:
    The function, its arguments, and options for `compile_for`.
  """
  args = spec.args
  if spec.op == 'topk_gather_attention':
    return function, args, dict(row_major=(0,))
  if spec.op not in ('indexer_scores', 'streaming_topk') or args[3] is None:
    return function, args, {}
  plane = args[3]
  flat = jax.ShapeDtypeStruct((math.prod(plane.shape),), plane.dtype)
  call = lambda *args: function(
    *args[:3], args[3].reshape(plane.shape), *args[4:]
  )
  return call, (*args[:3], flat, *args[4:]), {}


def on_device(generation: str) -> tuple[Any, Any]:
  """A sharding on one device of a generation, and its abstract mesh.

  The abstract mesh in the context tells kernels what they are built for.
  """
  device = topologies.get_topology_desc(
    platform='tpu', topology_name=SLICES[generation]
  ).devices[0]
  sharding = NamedSharding(Mesh(np.array([device]), ('x',)), PartitionSpec())
  kind = dict(device_kind=device.device_kind, num_cores=device.num_cores)
  if 'platform' in inspect.signature(jax.sharding.AbstractDevice).parameters:
    kind['platform'] = 'tpu'
  mesh = jax.sharding.AbstractMesh(
    (1,), ('x',), abstract_device=jax.sharding.AbstractDevice(**kind)
  )
  return sharding, mesh


def compile_for(
  function: Callable,
  args: tuple,
  generation: str,
  *,
  options: Mapping[str, Any] | None = None,
  donate: tuple[int, ...] = (),
  row_major: tuple[int, ...] = (),
) -> Compiled:
  """Compiles a function for one device of a generation.

  Args:
    function: of arrays.
    args: their shapes; None where there is no array.
    generation: 'v5e', 'v5p', 'v6e' or 'tpu7x'.
    options: compiler options.
    donate: arguments whose memory the results may take.
    row_major: arguments that arrive in the order of their axes; the layout of
      the others is the compiler's default.

  Returns:
    What the compiler says.
  """
  sharding, mesh = on_device(generation)
  start = time.monotonic()
  given = [sharding] * len(args)
  for at in row_major:
    order = Layout(tuple(range(args[at].ndim)))
    given[at] = Format(order, sharding)
  jitted = jax.jit(
    function,
    in_shardings=tuple(given),
    out_shardings=sharding,
    donate_argnums=donate,
  )
  with jax.sharding.use_abstract_mesh(mesh):
    lowered = jitted.lower(*args)
  with tempfile.TemporaryDirectory() as folder:
    dump = {
      'xla_dump_to': folder,
      'xla_dump_hlo_as_text': True,
      'xla_dump_hlo_pass_re': 'none',
    }
    executable = lowered.compile(compiler_options={**(options or {}), **dump})
    seconds = time.monotonic() - start
    text = hlo.dumped_text(folder)
  memory = executable.memory_analysis()
  largest = max(_nbytes(leaf) for leaf in jax.tree.leaves(args))
  return Compiled(
    seconds=seconds,
    arguments=memory.argument_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    aliased=memory.alias_size_in_bytes,
    copies=moves(text, max(largest // 4, _BLOCK_BYTES)),
    kernels=kernels(lowered.as_text()),
    sparsecore='async_execution_thread="sparsecore"' in text,
  )


def moves(text: str, least: int) -> tuple[str, ...]:
  """Instructions that only move or retype at least `least` bytes.

  Args:
    text: a compiled program.
    least: bytes.

  Returns:
    'name (opcode, bytes)' each. A fusion counts if its name says so: the
    compiler names one after what is inside.
  """
  module = hlo.parse(text)
  # What is inside a fusion has no memory of its own.
  fused = {
    instruction.called.get('calls')
    for computation in module.computations.values()
    for instruction in computation.instructions
    if instruction.opcode == 'fusion'
  }
  return tuple(
    f'{i.name} ({i.opcode}, {i.arrays[0].bytes} bytes)'
    for name, computation in module.computations.items()
    if name not in fused
    for i in computation.instructions
    if _only_moves(i) and i.arrays[0].bytes >= max(least, 1)
  )


def _only_moves(instruction: hlo.Instruction) -> bool:
  if instruction.opcode == 'fusion':
    return bool(re.search('copy|transpose|convert', instruction.name))
  return instruction.opcode in _MOVES


def kernels(lowered: str) -> tuple[str, ...]:
  """Names of the Pallas kernels in a lowered program, each once."""
  names = re.findall(r'kernel_name = "([^"]+)"', lowered)
  return tuple(dict.fromkeys(names))


def _nbytes(array) -> int:
  return math.prod(array.shape) * array.dtype.itemsize
