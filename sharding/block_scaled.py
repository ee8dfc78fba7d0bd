"""Block-scaled fp8 weights that are split over ranks.

XLA's partitioner cannot be trusted with the loops over tiles that keep a wide
copy of such a weight from existing: it gathers the weight at each trip, or
sums over ranks at each trip. So every rank multiplies its own shard and there
is one sum, where the shard's input side is split. A shard's edges may cut
blocks: scales are whole everywhere, and a rank picks those of its rows and
columns.
"""

from __future__ import annotations

import dataclasses
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
      scales = self._own(layer, scales, values.shape)
      out = _product(x, values, *scales)
      out = lax.psum(out, inner) if inner else out
      return out.astype(x.dtype)

    rows = self.rows or None
    run = self.plan.shard_map(
      body, (P(rows, spec[1]), spec, P()), P(rows, spec[0])
    )
    return run(x, layer.kernel[...], layer.scale[...])

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

    def body(x, values, scales):
      columns, at = self._own(layer, scales, values.shape)
      by_head = lambda v: v.reshape(own, -1, *v.shape[1:])[:, side]
      w = by_head(values).astype(jnp.float32) * columns[by_head(at)]
      y = dot(f'{a[0]}n{a[1]},n{b}->{out[0]}n{out[1]}', x, w.astype(x.dtype))
      y = lax.psum(y, inner) if inner and summed else y
      return y.astype(x.dtype)

    rows = self.rows or None
    ends = (spec[1], None) if summed else (None, spec[1])
    run = self.plan.shard_map(
      body, (P(rows, spec[0], ends[0]), spec, P()), P(rows, spec[0], ends[1])
    )
    return run(x, layer.kernel[...], layer.scale[...])

  def _weight(self, layer: Linear):
    """How a kernel [F, D] is split, and the mesh axes of F and of D."""
    kernel, mesh = layer.kernel, self.plan.mesh
    spec = self.rules.spec(kernel.axes, kernel.shape, mesh)
    large = lambda name: tuple(
      a for a in self.rules.axes(name) if mesh.shape[a] > 1
    )
    return spec, tuple(map(large, kernel.axes))

  def _own(self, layer: Linear, scales, shape):
    """Scales [f, D'] of a shard's columns, and the f of each of its rows."""
    _, every = self._weight(layer)
    at = [
      (rank_index(axes) * size + jnp.arange(size)) // block
      for axes, size, block in zip(every, shape, layer.block, strict=True)
    ]
    return scales[:, at[1]], at[0]


def _product(x, values, columns, at) -> jax.Array:
  """x [T, D] times a shard [F, D] of scaled values: [T, F] float32."""
  F, D = values.shape
  tile = max(_TILE // D, 1)

  def part(values, at):
    w = (values.astype(jnp.float32) * columns[at]).astype(x.dtype)
    return dot('td,fd->tf', x, w)

  if F <= tile:
    return part(values, at)
  whole = F // tile
  cut = lambda a: a[: whole * tile].reshape(whole, tile, *a.shape[1:])
  out = lax.map(lambda args: part(*args), (cut(values), cut(at)))
  out = out.swapaxes(0, 1).reshape(x.shape[0], whole * tile)
  if F == whole * tile:
    return out
  rest = part(values[whole * tile :], at[whole * tile :])
  return jnp.concatenate([out, rest], axis=1)


def with_products(module: nnx.Module, products: Products) -> nnx.Module:
  """A copy of a layer whose fp8 linear maps use `products`."""
  module = jax.tree.map(lambda a: a, module)
  for _, node in nnx.iter_graph(module):
    if isinstance(node, Linear) and node.block is not None:
      node.products = products
  return module
