"""`top_mask` on a GPU, by Pallas (Triton): a row is read once.

The search of threshold.py runs in registers; XLA reads the row again for each
of its 23 counts. See indexer_scores/gpu.py about the backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.streaming_topk.reference import comparable
from pallas_kernels.streaming_topk.threshold import search_mask

_WIDEST = 16384  # scores of a row that registers hold


def fits(size: int) -> bool:
  """Whether a row of so many scores is taken."""
  return size <= _WIDEST


def top_mask(
  scores: jax.Array, k: int, *, interpret: bool = False
) -> jax.Array:
  """As `threshold.top_mask`, of [T, S] scores; S at most 16,384.

  Args:
    scores: [T, S] float32.
    k: at least 1.
    interpret: run on any backend, slowly.

  Returns:
    [T, S] bool.
  """
  T, S = scores.shape
  if not fits(S):
    raise NotImplementedError(f'{S} scores a row; at most {_WIDEST} are held')
  width = pl.next_power_of_2(S)
  # Triton's arrays are powers of two; what is added is never chosen.
  scores = comparable(scores)
  scores = jnp.pad(scores, ((0, 0), (0, width - S)), constant_values=-jnp.inf)

  def kernel(s_ref, o_ref):
    o_ref[...] = search_mask(s_ref[...], k).astype(jnp.int8)

  mask = pl.pallas_call(
    kernel,
    grid=(T,),
    in_specs=[pl.BlockSpec((1, width), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((1, width), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((T, width), jnp.int8),
    compiler_params=plgpu.CompilerParams(
      num_warps=max(4, min(16, width // 512)), num_stages=1
    ),
    interpret=interpret,
    name='top_mask',
  )(scores)
  return mask[:, :S] != 0
