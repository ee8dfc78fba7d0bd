"""Attention over gathered rows on a GPU, by Pallas (Triton).

XLA writes the gathered rows [T, k, W] and reads them twice; here a tile of
them goes from the pool to the matrix units (2.7 times faster for 256 query
rows of GLM-5.2's widths, spec/kernels_gpu.md section 3c). A program takes
some heads of one query row and a part of its keys; parts are merged by lse.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tiling import cdiv, round_up
from pallas_kernels.triton import params, power_of_two

_KEYS = 64  # keys a tile
_MANY = 32  # query rows from which programs take 64 heads, fewer take 16
PROCESSORS = 132  # of an H100 or H200; holding a program of 64 heads each
_MERGED = 128  # features of a program that merges parts
# Query rows up to which one launch merges them. Of eight it takes 4.8 us of an
# H200, XLA's four 7.7; of 64 rows 13.6 and 7.2.
_MERGED_ROWS = 16
LOWEST = -1e30  # a running maximum that no logit is below, and not infinite


def check_dtypes(q, rows, row_scales) -> None:
  """Raises `NotImplementedError` unless queries and rows are bf16."""
  if row_scales is not None or {q.dtype, rows.dtype} != {
    jnp.dtype(jnp.bfloat16)
  }:
    raise NotImplementedError(
      f'{q.dtype} queries and {rows.dtype} rows: both must be bf16'
    )


def _check(q, rows, row_scales, latent_width) -> None:
  check_dtypes(q, rows, row_scales)
  rope = q.shape[-1] - latent_width
  if not power_of_two(latent_width) or not power_of_two(rope):
    raise NotImplementedError(
      f'{latent_width} latent and {rope} rotary features: both must be powers '
      'of two from 16'
    )


def split(rows: int, heads: int, k: int) -> tuple[int, int]:
  """Heads of a program, and parts that a query row's keys are cut into."""
  some = 16 if rows < _MANY else min(64, heads)
  room = PROCESSORS * (64 // some) // (rows * (heads // some))
  # Parts are merged from float32, so there are no more than fill the card.
  parts = 1 << max(room, 1).bit_length() - 1
  return some, min(parts, pl.next_power_of_2(cdiv(k, _KEYS)))


def _kernel(
  fill_ref, slots_ref, q_ref, rows_ref, out_ref, lse_ref, *, scale, R, P, some
):
  row, group, part = (pl.program_id(i) for i in range(3))
  parts = out_ref.shape[1]
  tiles = slots_ref.shape[1] // (_KEYS * parts)
  heads = pl.ds(group * some, some)
  q_latent = q_ref[row, heads, pl.ds(0, R)]
  q_rope = q_ref[row, heads, pl.ds(R, P)]
  fill = fill_ref[row]
  product = lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32)

  def tile(i, carry):
    acc, top, total = carry
    ids = slots_ref[row, pl.ds((part * tiles + i) * _KEYS, _KEYS)]
    valid = ids >= 0
    at = jnp.where(valid, ids, fill)
    latent = rows_ref[at, pl.ds(0, R)]
    rope = rows_ref[at, pl.ds(R, P)]
    logits = product(q_latent, latent.T) + product(q_rope, rope.T)
    logits = jnp.where(valid[None, :], logits * (scale / math.log(2)), -jnp.inf)
    new = jnp.maximum(top, jnp.max(logits, axis=1))
    shrink = jnp.exp2(top - new)
    p = jnp.exp2(logits - new[:, None])
    acc = acc * shrink[:, None] + product(p.astype(latent.dtype), latent)
    return acc, new, total * shrink + jnp.sum(p, axis=1)

  zero = jnp.zeros((some,), jnp.float32)
  start = (jnp.zeros((some, R), jnp.float32), zero + LOWEST, zero)
  acc, top, total = lax.fori_loop(0, tiles, tile, start)
  # Without a slot, `fill` names a row that may hold NaN: acc does not count.
  none = total == 0
  safe = jnp.where(none, 1, total)
  out = jnp.where(none[:, None], 0, acc / safe[:, None])
  out_ref[row, part, heads, pl.ds(0, R)] = out.astype(out_ref.dtype)
  lse = jnp.where(none, -jnp.inf, top * math.log(2) + jnp.log(safe))
  lse_ref[row, part, heads] = lse


def topk_gather_attention(
  q: jax.Array,  # [T, N, R + P] bf16
  rows: jax.Array,  # [M, W] bf16
  row_scales: jax.Array | None,
  slots: jax.Array,  # [T, k] int32
  *,
  scale: float,
  latent_width: int,
  block_bytes: int = 0,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # [T, N, R], [T, N] f32
  """See the public call; nothing is gathered, so `block_bytes` is idle."""
  del block_bytes
  _check(q, rows, row_scales, latent_width)
  T, N, width = q.shape
  R, P = latent_width, width - latent_width
  padded = max(16, pl.next_power_of_2(N)) if N <= 64 else round_up(N, 64)
  some, parts = split(T, padded, slots.shape[1])
  k = round_up(slots.shape[1], _KEYS * parts)
  pad = ((0, 0), (0, k - slots.shape[1]))
  slots = jnp.pad(slots, pad, constant_values=-1)
  out, lse = pl.pallas_call(
    lambda *refs: _kernel(*refs, scale=scale, R=R, P=P, some=some),
    grid=(T, padded // some, parts),
    out_shape=(
      jax.ShapeDtypeStruct(
        (T, parts, padded, R), q.dtype if parts == 1 else jnp.float32
      ),
      jax.ShapeDtypeStruct((T, parts, padded), jnp.float32),
    ),
    compiler_params=None if interpret else params(8 if some == 64 else 4, 2),
    interpret=interpret,
    name='topk_gather_attention',
  )(
    jnp.maximum(jnp.max(slots, axis=1), 0),  # read in place of -1
    slots,
    jnp.pad(q, ((0, 0), (0, padded - N), (0, 0))),
    rows,
  )
  return merge(out, lse, N, q.dtype, interpret=interpret)


def _merge_kernel(out_ref, lse_ref, o_ref, total_ref):
  """Some features of one head of one query row."""
  row, head, some = (pl.program_id(i) for i in range(3))
  width = math.gcd(o_ref.shape[2], _MERGED)
  lse = lse_ref[row, :, head]
  top = jnp.max(lse)
  top = jnp.where(top > -jnp.inf, top, 0)
  weight = jnp.exp(lse - top)
  total = jnp.sum(weight)
  none = total == 0
  features = pl.ds(some * width, width)
  values = weight[:, None] * out_ref[row, :, head, features]
  merged = jnp.sum(values, axis=0) / jnp.where(none, 1, total)
  o_ref[row, head, features] = merged.astype(o_ref.dtype)
  lse = jnp.where(none, -jnp.inf, top + jnp.log(jnp.where(none, 1, total)))

  def write():
    total_ref[row, head] = lse

  pl.when(some == 0)(write)


def merge(
  out: jax.Array,
  lse: jax.Array,
  heads: int,
  dtype: jnp.dtype,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Attention over all keys from that over parts of them.

  Args:
    out: [T, parts, N, R]; zeros where a part has no key. A power of two parts.
    lse: [T, parts, N] float32; -inf there.
    heads: of the N, how many are wanted.
    dtype: of the result.
    interpret: run on any backend, slowly.

  Returns:
    [T, heads, R], [T, heads] float32.
  """
  T, parts, _, R = out.shape
  if parts == 1:
    return out[:, 0, :heads].astype(dtype), lse[:, 0, :heads]
  if T > _MERGED_ROWS:
    out, lse = out[:, :, :heads], lse[:, :, :heads]
    total = jax.nn.logsumexp(lse, axis=1)
    weight = jnp.exp(lse - jnp.where(total > -jnp.inf, total, 0)[:, None])
    return jnp.sum(weight[..., None] * out, axis=1).astype(dtype), total
  return pl.pallas_call(
    _merge_kernel,
    grid=(T, heads, R // math.gcd(R, _MERGED)),
    out_shape=(
      jax.ShapeDtypeStruct((T, heads, R), dtype),
      jax.ShapeDtypeStruct((T, heads), jnp.float32),
    ),
    compiler_params=None if interpret else params(4, 1),
    interpret=interpret,
    name='merge_parts',
  )(out, lse)
