"""Attention of each row over its selected rows: `topk_gather_attention`.

logit[t, n, j] = scale * q[t, n] . row[slots[t, j]]      (R + P features)
out[t, n]      = softmax_j(logit[t, n]) @ latent[slots[t]]  (R features)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose, run
from pallas_kernels.tiling import cdiv, within_pool
from pallas_kernels.topk_gather_attention import (
  backward,
  gpu,
  hopper,
  reference,
  tpu,
  xla,
)
from pallas_kernels.topk_gather_attention.rows import SCALE_GROUP, decode_rows

__all__ = ['SCALE_GROUP', 'decode_rows', 'topk_gather_attention']

AVAILABLE = {
  'gpu': gpu.topk_gather_attention,
  'hopper': hopper.topk_gather_attention,
  'reference': reference.topk_gather_attention,
  'xla': xla.topk_gather_attention,
  'tpu': tpu.topk_gather_attention,
  'interpret': functools.partial(tpu.topk_gather_attention, interpret=True),
}
BLOCK_BYTES = 64 << 20


def _check(q, rows, row_scales, slots, latent_width) -> None:
  T, _, width = q.shape
  if not 0 < latent_width < width:
    raise ValueError(f'{latent_width=} must be within the width of {q.shape=}')
  rope = width - latent_width
  packed = row_scales is not None
  if packed != (rows.dtype == jnp.uint8):
    raise ValueError(
      f'{rows.dtype=} with row_scales {"given" if packed else "absent"}: '
      'uint8 records have scales, other rows have none'
    )
  needed = latent_width + 2 * rope if packed else width
  if rows.ndim != 2 or rows.shape[1] < needed:
    raise ValueError(f'{rows.shape=} must be [M, at least {needed}]')
  if packed:
    groups = cdiv(latent_width, SCALE_GROUP)
    if row_scales.shape != (rows.shape[0], groups):
      raise ValueError(f'{row_scales.shape=} must be {(rows.shape[0], groups)}')
  if slots.ndim != 2 or slots.shape[0] != T or slots.dtype != jnp.int32:
    raise ValueError(f'{slots.shape=} {slots.dtype=} must be [{T}, k] int32')


def topk_gather_attention(
  q: jax.Array,
  rows: jax.Array,
  row_scales: jax.Array | None,
  slots: jax.Array,
  *,
  scale: float,
  latent_width: int,
  implementation: str | None = None,
  block_bytes: int = BLOCK_BYTES,
) -> tuple[jax.Array, jax.Array]:
  """Absorbed multi-head latent attention over selected rows.

  Differentiable in q and in rows that are not records (`backward.py`).

  Args:
    q: [T, N, R + P] absorbed queries: latent part, then rotary part.
    rows: [M, W] pool of cached rows, f32, bf16 or uint8 records; W may
      exceed what is used.
    row_scales: [M, ceil(R / 128)] float32 for uint8 records, else None.
    slots: [T, k] int32 row ids in the pool, -1 for none, in any order. Ids
      already include any layer offset; one beyond the pool counts as none,
      and debug mode raises for it.
    scale: softmax scale; there is no default, since the latent's width is
      not the head's.
    latent_width: R.
    implementation: None, 'tpu', 'gpu' (Triton), 'hopper' (Mosaic GPU),
      'interpret', 'xla' or 'reference'.
    block_bytes: bytes of gathered rows and logits at once ('reference' alone
      gathers all).

  Returns:
    out: [T, N, R] in q's dtype; 0 for a row without any valid slot.
    lse: [T, N] float32 natural log of the sum of exponentials, -inf for a
      row without any valid slot.

  Raises:
    ValueError: wrong shapes or dtypes.
    NotImplementedError: the named implementation is not here, or uint8
      records are differentiated through.
  """
  _check(q, rows, row_scales, slots, latent_width)
  choice = choose('topk_gather_attention', implementation, AVAILABLE)
  args = (q, rows, row_scales, within_pool(slots, rows.shape[0], 'slot'))
  bounded = {
    name: functools.partial(call, block_bytes=block_bytes)
    for name, call in AVAILABLE.items()
    if name != 'reference'
  }
  forward = functools.partial(run, choice, {**AVAILABLE, **bounded})
  return backward.attend(forward, scale, latent_width, block_bytes, *args)
