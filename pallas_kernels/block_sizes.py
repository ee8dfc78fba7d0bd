"""Block sizes of the kernels: tuned ones from a file, else a heuristic.

`tuned.json` holds, by op, generation, dtype and shape bucket, the sizes that
won there and the evidence for them (`python -m glm_jax.benchmarks.tune`
fills it). A shape falls into the bucket whose dimensions are the next powers
of two. A kernel passes its heuristic, which must be legal on every
generation, and gets it back with the tuned sizes in place. No environment
variable takes part.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

# JAX's `device_kind` of each generation.
GENERATIONS = {
  'TPU v5 lite': 'v5e',
  'TPU v5e': 'v5e',
  'TPU v5': 'v5p',
  'TPU v5p': 'v5p',
  'TPU v6 lite': 'v6e',
  'TPU v6e': 'v6e',
  'TPU7x': 'tpu7x',
}
FILE = __file__.removesuffix('block_sizes.py') + 'tuned.json'
_trial: list[Mapping[str, Mapping[str, int]]] = []


def generation() -> str | None:
  """The TPU generation a trace is for, or None.

  An abstract mesh with a device in the context (compiling ahead of time)
  goes before the devices of this process. None where neither is a TPU:
  sizes are then the heuristic's.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  kind = getattr(device, 'device_kind', None)
  if kind is None and jax.default_backend() == 'tpu':
    kind = jax.devices()[0].device_kind
  return GENERATIONS.get(kind)


def bucket(shape: Mapping[str, int]) -> str:
  """The name of a shape's bucket, as in 'rows=64 outputs=2048'."""
  rounded = {name: 1 << max(n - 1, 0).bit_length() for name, n in shape.items()}
  return ' '.join(f'{name}={n}' for name, n in rounded.items())


@functools.cache
def tuned() -> dict:
  """The file's contents: op -> generation -> dtype -> bucket -> entry."""
  with open(FILE) as file:
    return json.load(file)


@contextlib.contextmanager
def trial(sizes: Mapping[str, Mapping[str, int]]) -> Iterator[None]:
  """In the context, ops named here take these sizes, at any shape (tuning)."""
  _trial.append(sizes)
  try:
    yield
  finally:
    _trial.pop()


def block_sizes(
  op: str,
  shape: Mapping[str, int],
  dtype: jnp.dtype,
  heuristic: Mapping[str, int],
) -> dict[str, int]:
  """Block sizes of one call.

  Args:
    op: the op's name.
    shape: the dimensions that matter, in the op's own order.
    dtype: of the operand that is streamed.
    heuristic: a legal size by name.

  Returns:
    The heuristic, with the tuned sizes in place where there are any.

  Raises:
    ValueError: the file names a size that the kernel does not have.
  """
  entry = tuned().get(op, {}).get(generation() or '', {})
  entry = entry.get(jnp.dtype(dtype).name, {}).get(bucket(shape), {})
  sizes = entry.get('sizes', {})
  if _trial:
    sizes = _trial[-1].get(op, {})
  unknown = sorted(set(sizes) - set(heuristic))
  if unknown:
    raise ValueError(
      f'{FILE}: {op} has no size named {", ".join(unknown)}; it has '
      f'{", ".join(heuristic)}'
    )
  return {**heuristic, **sizes}
