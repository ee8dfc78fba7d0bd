"""Indexer scores of one sequence's rows on a GPU, by Pallas (Triton).

XLA writes the dots of all heads [T, I, S] to memory and reads them back; here
a tile of them lives in registers until the heads are summed. Pallas' Triton
backend is deprecated in JAX: nothing but `sequence_scores` depends on it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.indexer_scores.reference import relu

_ROWS = 4  # query rows a program; with 32 heads a 128-row matrix operand
_KEYS = 128  # keys a tile


def fits(rows: int, heads: int, width: int, size: int) -> bool:
  """Whether the kernel takes these shapes; else XLA does the work."""
  power = lambda n: n & (n - 1) == 0
  whole = rows % _ROWS == 0 and size % _KEYS == 0
  return whole and power(heads) and power(width) and min(heads, width) >= 16


def sequence_scores(
  q: jax.Array,
  w: jax.Array,
  keys: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """sum over heads of w relu(q k), for every row and key.

  Args:
    q: [T, I, H] index queries.
    w: [T, I] float32 head weights.
    keys: [S, H] index keys, in q's dtype.
    interpret: run on any backend, slowly.

  Returns:
    [T, S] float32; limits are the caller's.
  """
  T, heads, H = q.shape
  S = keys.shape[0]
  if not fits(T, heads, H, S):
    raise NotImplementedError(
      f'{T} rows of {heads} heads of {H}, {S} keys: rows must be a multiple of '
      f'{_ROWS}, keys of {_KEYS}, heads and width powers of two from 16'
    )

  def kernel(q_ref, w_ref, k_ref, o_ref):
    dots = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=jnp.float32)
    scores = (relu(dots) * w_ref[...][:, None]).reshape(_ROWS, heads, _KEYS)
    o_ref[...] = jnp.sum(scores, axis=1)

  return pl.pallas_call(
    kernel,
    grid=(T // _ROWS, S // _KEYS),
    in_specs=[
      pl.BlockSpec((_ROWS * heads, H), lambda i, j: (i, 0)),
      pl.BlockSpec((_ROWS * heads,), lambda i, j: (i,)),
      pl.BlockSpec((_KEYS, H), lambda i, j: (j, 0)),
    ],
    out_specs=pl.BlockSpec((_ROWS, _KEYS), lambda i, j: (i, j)),
    out_shape=jax.ShapeDtypeStruct((T, S), jnp.float32),
    compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
    interpret=interpret,
    name='sequence_scores',
  )(q.reshape(T * heads, H), w.reshape(T * heads), keys)
