"""Small integer and array helpers, written once for every op."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify

PAGE = 64  # tokens of one cache page


def cdiv(a: int, b: int) -> int:
  """Ceiling division."""
  return -(-a // b)


def round_up(a: int, b: int) -> int:
  """The smallest multiple of `b` that is at least `a`."""
  return cdiv(a, b) * b


def pad_rows(x: jax.Array, rows: int, value=0) -> jax.Array:
  """Pads the leading axis of `x` to `rows` with `value`."""
  missing = rows - x.shape[0]
  if missing == 0:
    return x
  widths = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
  return jnp.pad(x, widths, constant_values=value)


def within_pool(ids: jax.Array, size: int, what: str) -> jax.Array:
  """Ids of a pool of `size`, with -1 for ids beyond it.

  JAX would clamp such an id and read somebody else's row without a word.
  Debug mode (`checkify`) raises.
  """
  checkify.debug_check(
    jnp.all(ids < size),
    f'{what} {{top}} is beyond the pool of {{size}}',
    top=jnp.max(ids, initial=-1),
    size=jnp.int32(size),
  )
  return jnp.where(ids < size, ids, -1)


def map_row_blocks(f, block: int, *arrays, min_blocks: int = 1):
  """Applies a row-wise function to blocks of `block` rows, one at a time.

  Args:
    f: row-wise function of as many arrays, returning arrays (any pytree)
      with the same leading axis.
    block: rows of one call; the last block repeats the last row, so that
      padding reads nothing that no row reads.
    *arrays: arrays (any pytrees) with one leading axis of T rows.
    min_blocks: run at least this many blocks. A loop of one trip is inlined
      by XLA and then rounds like its surroundings; two trips stay a loop.

  Returns:
    What `f` would return for all rows at once, [T, ...].
  """
  rows = jax.tree.leaves(arrays)[0].shape[0]
  blocks = max(cdiv(rows, block), min_blocks)
  if blocks == 1 and rows == block:
    return f(*arrays)
  mode = 'edge' if rows else 'constant'

  def split(x):
    widths = [(0, blocks * block - rows)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, widths, mode).reshape(blocks, block, *x.shape[1:])

  out = lax.map(lambda xs: f(*xs), jax.tree.map(split, arrays))
  join = lambda y: y.reshape(blocks * block, *y.shape[2:])[:rows]
  return jax.tree.map(join, out)


def precision(*arrays: jax.Array) -> lax.Precision:
  """Matmul precision of operands: float32 means float32 on every device."""
  wide = any(a.dtype in (jnp.float32, jnp.float64) for a in arrays)
  return lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT


def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """`einsum` with float32 accumulation and result (float64 stays)."""
  out = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
  return jnp.einsum(
    spec, a, b, precision=precision(a, b), preferred_element_type=out
  )
