"""Attention of each query row over its own gathered rows, one TPU core.

The rows of a query stand together, [k, W], so both products are plain
matmuls with the whole softmax between them: all k logits of a query fit into
VMEM, and a running softmax over parts of k is slower on every generation
(its parts wait for one another). While a query is worked on, the next one's
rows arrive.

Records stay bytes until they are in VMEM. An e4m3 latent is exact in bf16, so
its scale does not touch it: it multiplies 128 latents' share of a logit, and
the probability before the second product. A rotary feature is put together
from its two bytes in the odd lane, where `interleave` puts its query.

Masked slots must gather a row that may be read (`readable`): their weight is
0, which does not silence NaN. Only a row without any valid slot may gather
NaN; its output is replaced.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sizes import block_sizes
from pallas_kernels.tiling import precision

LANES = 128
ROW_BYTES = 12 << 20  # of gathered rows in one step; two steps are in VMEM
_VMEM_BYTES = (
  48 << 20
)  # of 64 MiB on the smallest generation; the rest is XLA's
NO = float('-inf')


def readable(slots: jax.Array) -> jax.Array:
  """Row ids to gather: a slot of -1 reads what its row reads anyway."""
  other = jnp.max(slots, axis=1, keepdims=True)
  return jnp.where(slots >= 0, slots, jnp.maximum(other, 0))


def interleave(q: jax.Array, latent_width: int) -> jax.Array:
  """Queries [..., R + P] as records are multiplied: rotary in odd lanes."""
  rope = q[..., latent_width:]
  rope = jnp.stack([jnp.zeros_like(rope), rope], axis=-1)
  rope = rope.reshape(*q.shape[:-1], -1)
  rest = LANES - rope.shape[-1]
  rope = jnp.pad(rope, [(0, 0)] * (q.ndim - 1) + [(0, rest)])
  return jnp.concatenate([q[..., :latent_width], rope], axis=-1)


def decode_bytes(
  records: jax.Array,  # [K, R + 128] uint8
  latent_width: int,
  rope_width: int,
) -> tuple[jax.Array, jax.Array]:
  """Unscaled latents [K, R] and rotary features in odd lanes [K, 128], bf16."""
  latent = pltpu.bitcast(records[:, :latent_width], jnp.float8_e4m3fn)
  # Byte 2j is the low half of feature j, byte 2j + 1 its high half.
  rope = records[:, latent_width : latent_width + LANES].astype(jnp.int32)
  pair = (rope << 24) | (pltpu.roll(rope, 1, 1) << 16)
  lane = lax.broadcasted_iota(jnp.int32, rope.shape, 1)
  used = (lane % 2 == 1) & (lane < 2 * rope_width)
  rope = jnp.where(used, lax.bitcast_convert_type(pair, jnp.float32), 0)
  return latent.astype(jnp.bfloat16), rope.astype(jnp.bfloat16)


def matmul(a: jax.Array, b: jax.Array, b_axis: int) -> jax.Array:
  """a [M, K] times b, contracted over b's `b_axis`; float32."""
  return lax.dot_general(
    a,
    b,
    (((1,), (b_axis,)), ((), ())),
    precision=precision(a, b),
    preferred_element_type=jnp.float32,
  )


def record_logits(q, latent, rope, scales):
  """Logits [N, K] of decoded records.

  Args:
    q: [N, R + 128] of `interleave`.
    latent: [K, R] unscaled.
    rope: [K, 128].
    scales: [G, K] float32.
  """
  width = latent.shape[1]
  logits = matmul(q[:, width:], rope, 1)
  for g in range(width // LANES):
    at = slice(g * LANES, (g + 1) * LANES)
    logits += matmul(q[:, at], latent[:, at], 1) * scales[g : g + 1]
  return logits


def record_values(p, latent, scales):
  """Weighted sums [N, R] of decoded records; p [N, K] float32."""
  parts = []
  for g in range(latent.shape[1] // LANES):
    at = slice(g * LANES, (g + 1) * LANES)
    weight = (p * scales[g : g + 1]).astype(latent.dtype)
    parts.append(matmul(weight, latent[:, at], 0))
  return jnp.concatenate(parts, axis=1)


def softmax(logits, valid):
  """p [N, K], its sum and the largest logit [N, 1]; p is 0 if not valid."""
  logits = jnp.where(valid, logits, NO)
  top = jnp.max(logits, axis=1, keepdims=True)
  p = jnp.exp(logits - jnp.where(top > NO, top, 0))
  return p, jnp.sum(p, axis=1, keepdims=True), top


def kernel(q_ref, rows_ref, slots_ref, *refs, scale, latent_width, rope_width):
  """A few query rows.

  Args:
    q_ref: [B, N, up to W] (records: of `interleave`).
    rows_ref: [B, K, W] gathered rows.
    slots_ref: [B, 1, K] int32, -1 for none.
    *refs: records: scales [B, G, K] float32; then out [B, N, R] and lse
      [B, 1, N].
    scale: softmax scale.
    latent_width: R, a multiple of 128.
    rope_width: P.
  """
  out_ref, lse_ref = refs[-2:]
  for b in range(q_ref.shape[0]):
    q, valid = q_ref[b], slots_ref[b] >= 0
    if len(refs) == 3:
      scales = refs[0][b]
      decoded = decode_bytes(rows_ref[b], latent_width, rope_width)
      latent, rope = (x.astype(q.dtype) for x in decoded)
      logits = record_logits(q, latent, rope, scales)
      p, total, top = softmax(logits * scale, valid)
      out = record_values(p, latent, scales)
    else:
      rows = rows_ref[b].astype(q.dtype)
      logits = matmul(q, rows[:, : q.shape[1]], 1)
      p, total, top = softmax(logits * scale, valid)
      out = matmul(p.astype(q.dtype), rows[:, :latent_width], 0)
    some = total != 0  # NaN passes
    total = jnp.where(some, total, 1)
    out_ref[b] = jnp.where(some, out / total, 0).astype(out_ref.dtype)
    lse = jnp.where(some, top + jnp.log(total), NO)
    lse_ref[b] = jnp.broadcast_to(lse, (lse.shape[0], LANES)).T[:1]


def attend(
  q: jax.Array,
  gathered: jax.Array,
  slots: jax.Array,
  scales: jax.Array | None,
  *,
  scale: float,
  latent_width: int,
  rope_width: int,
  out_dtype: jnp.dtype,
  interpret,
) -> tuple[jax.Array, jax.Array]:
  """Attends to gathered rows.

  Args:
    q: [T, N, R + P], or of `interleave` for records; at least as wide a
      dtype as the rows'. N is a multiple of 16.
    gathered: [T, K, W] rows of `readable` slots; K and W multiples of 128.
    slots: [T, K] int32, -1 for none.
    scales: [T, G, K] float32 of records, else None.
    scale: softmax scale.
    latent_width: R, a multiple of 128.
    rope_width: P.
    out_dtype: of the output.
    interpret: `pltpu.InterpretParams` or False.

  Returns:
    out [T, N, R] and lse [T, N] float32.
  """
  T, N, width = q.shape
  K, W = gathered.shape[1:]
  few = K * W * gathered.dtype.itemsize * 2 > ROW_BYTES or T < 16
  sizes = block_sizes(
    'topk_gather_attention',
    {'rows': T, 'heads': N, 'keys': K},
    gathered.dtype,
    {'queries': 1 if few else 2},
  )
  B = sizes['queries']
  B = B if T % B == 0 else 1
  block = lambda *shape: pl.BlockSpec((B, *shape), lambda t: (t, 0, 0))
  in_specs = [block(N, width), block(K, W), block(1, K)]
  arrays = [q, gathered, slots[:, None]]
  if scales is not None:
    in_specs.append(block(scales.shape[1], K))
    arrays.append(scales)
  out, lse = pl.pallas_call(
    functools.partial(
      kernel, scale=scale, latent_width=latent_width, rope_width=rope_width
    ),
    grid=(T // B,),
    in_specs=in_specs,
    out_specs=[block(N, latent_width), block(1, N)],
    out_shape=[
      jax.ShapeDtypeStruct((T, N, latent_width), out_dtype),
      jax.ShapeDtypeStruct((T, 1, N), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',), vmem_limit_bytes=_VMEM_BYTES
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * T * N * K * (width + latent_width),
      transcendentals=T * N * K,
      bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays)
      + T * N * latent_width * jnp.dtype(out_dtype).itemsize,
    ),
    interpret=interpret,
    name='topk_gather_attention',
  )(*arrays)
  return out, lse[:, 0]
