"""Block-scaled fp8 weights that are split over ranks.

XLA's partitioner cannot be trusted with the loops over tiles that keep a wide
copy of such a weight from existing: it gathers the weight at each trip, or
sums over ranks at each trip. So every rank multiplies its own shard and there
is one sum, where the shard's input side is split. A shard's edges may cut
blocks: scales are whole everywhere, and a rank picks those of its columns and
of each run of rows that no edge cuts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from glm_jax.layers import Linear
from pallas_kernels.tiling import dot
from sharding.collectives import rank_index
from sharding.mesh import ways

# Wide elements of a shard that exist at once.
_TILE = 1 << 22


@dataclasses.dataclass(frozen=True)
class Products:
  """Products with the block-scaled weights of one layer.

  Attributes:
    plan: of several devices.
    rows: mesh axes over which the step's rows are split.
    rules: how the weights lie in this step.
  """

  plan: Any
  rows: tuple[str, ...]
  rules: Any

  def linear(self, layer: Linear, x: jax.Array) -> jax.Array:
    """Maps [T, D] to [T, F] in x's dtype."""
    spec, (_, inner) = self._weight(layer)

    def body(x, values, scales):
      run = math.gcd(values.shape[0], layer.block[0])
      scales = self._own(layer, scales, values.shape, run)
      out = _product(x, values, scales, run)
      out = lax.psum(out, inner) if inner else out
      return out.astype(x.dtype)

    rows = self.rows or None
    apply = self.plan.shard_map(
      body, (P(rows, spec[1]), spec, P()), P(rows, spec[0])
    )
    return apply(x, layer.kernel[...], layer.scale[...])

  def heads(
    self, layer: Linear, x: jax.Array, einsum: str, num: int, side: slice
  ) -> jax.Array:
    """Multiplies each head by some rows of its part of a weight.

    Args:
      layer: kernel [num * n, R].
      x: [T, num, .] features of each head.
      einsum: of one head: 'td,dr->tr', or 'tr,vr->tv', which sums over R.
      num: heads.
      side: of the n rows of each head.

    Returns:
      [T, num, .] in x's dtype.
    """
    spec, (outer, inner) = self._weight(layer)
    summed = einsum.startswith('tr')
    a, rest = einsum.split(',')
    b, out = rest.split('->')
    own = num // ways(self.plan.mesh, outer)

    size = layer.kernel.shape[0] // num
    start, stop, _ = side.indices(size)
    run = math.gcd(layer.block[0], size, start, stop)

    def body(x, values, scales):
      scales = self._own(layer, scales, values.shape, run)
      scales = scales.reshape(own, size // run, -1)
      values = values.reshape(own, size // run, run, -1)
      part = slice(start // run, stop // run)
      w = _widen(values[:, part], scales[:, part], x.dtype)
      w = w.reshape(own, stop - start, -1)
      y = dot(f'{a[0]}n{a[1]},n{b}->{out[0]}n{out[1]}', x, w)
      y = lax.psum(y, inner) if inner and summed else y
      y = y.astype(x.dtype)
      if inner and not summed:  # attention wants queries whole
        y = lax.all_gather(y, inner, axis=2, tiled=True)
      return y

    rows = self.rows or None
    taken = P(rows, spec[0], spec[1] if summed else None)
    apply = self.plan.shard_map(body, (taken, spec, P()), P(rows, spec[0]))
    return apply(x, layer.kernel[...], layer.scale[...])

  def _weight(self, layer: Linear):
    """How a kernel [F, D] is split, and the mesh axes of F and of D."""
    kernel, mesh = layer.kernel, self.plan.mesh
    spec = self.rules.spec(kernel.axes, kernel.shape, mesh)
    large = lambda name: tuple(
      a for a in self.rules.axes(name) if mesh.shape[a] > 1
    )
    return spec, tuple(map(large, kernel.axes))

  def _own(self, layer: Linear, scales, shape, run: int):
    """Scales [F' / run, D'] of a shard [F', D']: one a run of rows."""
    _, every = self._weight(layer)
    rows, columns = (
      (rank_index(axes) * size + jnp.arange(0, size, step)) // block
      for axes, size, step, block in zip(
        every, shape, (run, 1), layer.block, strict=True
      )
    )
    return scales[:, columns][rows]


def _widen(values, scales, dtype) -> jax.Array:
  """Values [..., n, run, D] times scales [..., n, D]."""
  wide = values.astype(jnp.float32) * scales[..., None, :]
  return wide.astype(dtype)


def _product(x, values, scales, run: int) -> jax.Array:
  """x [T, D] times a shard [F, D] of scaled values: [T, F] float32."""
  F, D = values.shape
  n = F // run
  tile = min(max(_TILE // (D * run), 1), n)
  values = values.reshape(n, run, D)

  def part(values, scales):
    w = _widen(values, scales, x.dtype).reshape(-1, D)
    return dot('td,fd->tf', x, w)

  whole = n // tile
  if whole == 1:
    out = part(values[:tile], scales[:tile])
  else:
    cut = lambda a: a[: whole * tile].reshape(whole, tile, *a.shape[1:])
    out = lax.map(lambda args: part(*args), (cut(values), cut(scales)))
    out = out.swapaxes(0, 1).reshape(x.shape[0], -1)
  if n == whole * tile:
    return out
  rest = part(values[whole * tile :], scales[whole * tile :])
  return jnp.concatenate([out, rest], axis=1)


def with_products(module: nnx.Module, products: Products) -> nnx.Module:
  """A copy of a layer whose fp8 linear maps use `products`."""
  module = jax.tree.map(lambda a: a, module)
  for _, node in nnx.iter_graph(module):
    if isinstance(node, Linear) and node.block is not None:
      node.products = products
  return module
