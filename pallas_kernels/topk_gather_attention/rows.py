"""How a cached latent row is read: wide rows as they are, fp8 records decoded.

A wide row (f32 or bf16) is [latent R | rotary key P | zeros]. An fp8 record
is a row of bytes: R e4m3 latents, then P bf16 rotary features, with one
float32 scale for each 128 latents in a plane of its own (656 bytes at R=512,
P=64; spec/model.md section 2.7).

Both lie in HBM 640 elements wide, five whole tiles: XLA gathers them without
a copy of the pool, and a kernel may copy single rows out of them through a
32-bit view. Packed words (384 a row) make a decode step's attention a fifth
slower. One record of the four layers that share a selection (1152 words)
would save a tenth of the cache; it is 2 to 4% faster on v5e and v5p and as
much slower on v6e and tpu7x, since a kernel reads a third more than its
layer's part, and the step's own rows need a second attention: not worth a
second form of every step (`results/tpu_row_layout.json`, compiled, not run).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

SCALE_GROUP = 128  # latents that share one scale


def decode_rows(
  rows: jax.Array,  # [..., W]
  scales: jax.Array | None,  # [..., G] f32
  latent_width: int,
  rope_width: int,
) -> jax.Array:  # [..., W or R + P]
  """Rows as numbers: unchanged, or bf16 from fp8 records."""
  if scales is None:
    return rows
  latent = lax.bitcast_convert_type(
    rows[..., :latent_width], jnp.float8_e4m3fn
  ).astype(jnp.float32)
  group = jnp.repeat(scales, SCALE_GROUP, axis=-1)[..., :latent_width]
  end = latent_width + 2 * rope_width
  pairs = rows[..., latent_width:end].reshape(*rows.shape[:-1], rope_width, 2)
  rope = lax.bitcast_convert_type(pairs, jnp.bfloat16)
  return jnp.concatenate([(latent * group).astype(jnp.bfloat16), rope], -1)


def gather_rows(
  q: jax.Array,  # [T, N, R + P]
  rows: jax.Array,  # [M, W]
  row_scales: jax.Array | None,  # [M, G] f32
  slots: jax.Array,  # [T, k] int32
  latent_width: int,
) -> tuple[jax.Array, jax.Array]:  # [T, N, W], [T, k, W]
  """Queries padded to the rows' width, and the selected rows; one dtype.

  Neither is ever rounded to the other's narrower dtype. A weight of 0 does
  not silence NaN: rows that do not count become 0.
  """
  width = q.shape[-1]
  at = jnp.maximum(slots, 0)
  scales = None
  if row_scales is not None:
    scales = jnp.take(row_scales, at, axis=0, mode='clip')
  gathered = decode_rows(
    jnp.take(rows, at, axis=0, mode='clip'),
    scales,
    latent_width,
    width - latent_width,
  )
  wide = jnp.promote_types(q.dtype, gathered.dtype)
  valid = slots >= 0
  gathered = jnp.where(valid[:, :, None], gathered, 0).astype(wide)
  pad = gathered.shape[-1] - width
  return jnp.pad(q.astype(wide), ((0, 0), (0, 0), (0, pad))), gathered
