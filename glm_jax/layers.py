"""Norms, linear maps and the SwiGLU MLP. Weights keep the published [out, in].

Everything here is row-wise: [T, ...] in, [T, ...] out.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from glm_jax.param import Axes, param
from pallas_kernels.block_scale import FP8, quantize, scaled_matmul
from pallas_kernels.tiling import dot

_ROWS = 8  # from which XLA multiplies rows as a matrix on a GPU


@dataclasses.dataclass(frozen=True)
class Init:
  """How weights are made.

  Attributes:
    dtype: dtype of the weights that stay wide.
    std: standard deviation of a fresh weight.
    fp8_block: block of the weights kept in fp8, None for none.
  """

  dtype: jnp.dtype = jnp.dtype(jnp.float32)
  std: float = 0.02
  fp8_block: tuple[int, int] | None = None


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """Root-mean-square norm over the last axis, computed in float32."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return (wide * scale * weight.astype(wide.dtype)).astype(x.dtype)


def layer_norm(
  x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float
) -> jax.Array:
  """Layer norm over the last axis; statistics and parameters in float32."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
  variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
  out = centred * jax.lax.rsqrt(variance + eps)
  out = out * weight.astype(wide.dtype) + bias.astype(wide.dtype)
  return out.astype(x.dtype)


def few_rows(multiply, x: jax.Array, weights: jax.Array, few=None) -> jax.Array:
  """Products of rows; few rows are padded on a GPU.

  XLA takes fewer as reductions there, for which it may write all weights
  anew in float32; as a matrix product it reads them where they lie.

  Args:
    multiply: of x and the weights, [..., T, .].
    x: [..., T, .] rows.
    weights: what they are multiplied by.
    few: multiplies the padded rows, if not `multiply` does.

  Returns:
    [..., T, .] the products.
  """
  T = x.shape[-2]
  if T >= _ROWS:
    return multiply(x, weights)

  def padded(x, weights):
    more = [(0, 0)] * (x.ndim - 2) + [(0, _ROWS - T), (0, 0)]
    return (few or multiply)(jnp.pad(x, more), weights)[..., :T, :]

  return lax.platform_dependent(x, weights, cuda=padded, default=multiply)


class RMSNorm(nnx.Module):
  """Root-mean-square norm with a weight."""

  def __init__(self, width: int, eps: float, init: Init):
    self.weight = param(None, (width,), (None,), init.dtype, fill=1.0)
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises [T, width]."""
    return rms_norm(x, self.weight[...], self.eps)


class Linear(nnx.Module):
  """A linear map without bias; block-scaled fp8 where `init` says so.

  Attributes:
    kernel: [outputs, inputs].
    scale: [outputs / block, inputs / block] float32 of fp8, else None.
    block: of fp8, else None.
    products: what multiplies block-scaled weights that are split over
      devices (a plan sets it); None on one device.
  """

  def __init__(
    self,
    key: jax.Array,
    inputs: int,
    outputs: int,
    axes: Axes,
    init: Init,
    *,
    fp8: bool = True,
  ):
    block = init.fp8_block if fp8 else None
    kernel = param(key, (outputs, inputs), axes, init.dtype, std=init.std)
    self.block, self.products = block, None
    if block is None:
      self.kernel, self.scale = kernel, None
    else:
      values, scales = quantize(kernel[...], block)
      self.kernel = nnx.Param(values, axes=axes)
      # A shard's edge may cut a block: every shard keeps all scales.
      self.scale = nnx.Param(scales, axes=(None, None))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [T, inputs] to [T, outputs] in x's dtype."""
    if self.products is not None:
      return self.products.linear(self, x)
    if self.block is not None:
      return scaled_matmul(x, self.kernel[...], self.scale[...], self.block)
    return self.wide(x).astype(x.dtype)

  def wide(self, x: jax.Array) -> jax.Array:
    """Maps [T, inputs] to [T, outputs] in float32; wide weights only."""
    if self.kernel.dtype == FP8:
      raise ValueError('wide() needs weights that are not fp8')
    multiply = functools.partial(dot, 'td,fd->tf')
    return few_rows(multiply, x, self.kernel[...])


class Mlp(nnx.Module):
  """SwiGLU: down(silu(gate(x)) * up(x))."""

  def __init__(self, key: jax.Array, width: int, hidden: int, init: Init):
    keys = jax.random.split(key, 3)
    self.gate = Linear(keys[0], width, hidden, ('mlp', 'embed'), init)
    self.up = Linear(keys[1], width, hidden, ('mlp', 'embed'), init)
    self.down = Linear(keys[2], hidden, width, ('embed', 'mlp'), init)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [T, D] to [T, D]."""
    return self.down(swiglu(self.gate(x), self.up(x)))


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """silu(gate) * up, in float32, in gate's dtype."""
  wide = gate.astype(jnp.promote_types(gate.dtype, jnp.float32))
  return (jax.nn.silu(wide) * up.astype(wide.dtype)).astype(gate.dtype)
