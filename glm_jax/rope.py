"""Interleaved rotary position embedding of the first features.

Pairs (0, 1), (2, 3), ... are rotated by position * theta^(-2j/P), in place,
by the MLA heads and by the indexer alike (spec/model.md section 2.2).
Phases are float32 with the reference's own association: position times the
rounded frequency. At a million positions any other order of rounding moves
a cosine by up to 1e-2 (known fault 25).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def inverse_frequencies(width: int, theta: float) -> np.ndarray:
  """Frequencies of each pair, [width / 2] float32."""
  exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
  powers = np.power(np.float64(theta), exponents.astype(np.float64))
  return np.float32(1) / powers.astype(np.float32)


def rope_tables(
  positions: jax.Array, width: int, theta: float
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines of every row.

  Args:
    positions: [T] int32; a padding row's -1 counts as 0.
    width: rotary features P.
    theta: base of the frequencies.

  Returns:
    cos and sin, [T, P / 2] float32.
  """
  positions = jnp.maximum(positions, 0).astype(jnp.float32)
  phases = positions[:, None] * inverse_frequencies(width, theta)[None]
  return jnp.cos(phases), jnp.sin(phases)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates the first P features of `x` and passes the others.

  Args:
    x: [T, ..., width] with width >= P.
    cos: [T, P / 2].
    sin: [T, P / 2].

  Returns:
    x rotated, in x's dtype; the arithmetic is float32.
  """
  half = cos.shape[-1]
  shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (half,)
  cos, sin = cos.reshape(shape), sin.reshape(shape)
  pairs = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
  even = pairs[..., 0].astype(cos.dtype)
  odd = pairs[..., 1].astype(cos.dtype)
  turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
  turned = turned.reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
  return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
