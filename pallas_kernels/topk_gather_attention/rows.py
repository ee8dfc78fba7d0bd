"""How a cached latent row is read: wide rows as they are, fp8 records decoded.

A wide row (f32 or bf16) is [latent R | rotary key P | zeros]. An fp8 record
is a row of bytes: R e4m3 latents, then P bf16 rotary features, with one
float32 scale for each 128 latents in a plane of its own (656 bytes at R=512,
P=64; spec/model.md section 2.7).
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
