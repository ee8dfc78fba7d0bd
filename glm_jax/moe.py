"""Sigmoid router without auxiliary loss, routed experts, shared experts.

Routed experts of all layers lie in one pool [L, E, ...]: a layer passes its
slot, so neither a layer's nor an unchosen expert's weights are ever copied.
No row is dropped (spec/model.md sections 1.1, 1.3).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from glm_jax.config import ModelConfig
from glm_jax.layers import Init, Mlp, swiglu
from glm_jax.param import param
from pallas_kernels import grouped_matmul
from pallas_kernels.block_scale import quantize
from pallas_kernels.tiling import dot


class Router(nnx.Module):
  """Chooses k of E experts a row; arithmetic and bias are float32."""

  def __init__(self, key: jax.Array, config: ModelConfig, init: Init):
    c, D = config.moe, config.hidden_size
    self.weight = param(
      key, (c.num_experts, D), ('router', 'embed'), init.dtype, std=init.std
    )
    self.correction_bias = param(None, (c.num_experts,), (None,), jnp.float32)
    self.config = c

  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Routes rows.

    The correction bias takes part in the choice, never in the weight.

    Args:
      x: [T, D].

    Returns:
      experts: [T, k] int32; ties go to the lower expert.
      weights: [T, k] float32, normalised and scaled.
    """
    c = self.config
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = dot('td,ed->te', x.astype(wide), self.weight[...].astype(wide))
    scores = jax.nn.sigmoid(logits)
    choice = scores + self.correction_bias[...].astype(wide)
    _, experts = lax.top_k(choice, c.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if c.norm_topk_prob:
      weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
    return experts.astype(jnp.int32), weights * c.routed_scaling_factor


class Experts(nnx.Module):
  """The pool of routed experts: gate, up [L, E, F, D] and down [L, E, D, F]."""

  def __init__(
    self, key: jax.Array, num_layers: int, config: ModelConfig, init: Init
  ):
    c, D = config.moe, config.hidden_size
    wide = (num_layers, c.num_experts, c.intermediate_size, D)
    narrow = (num_layers, c.num_experts, D, c.intermediate_size)
    into = (None, 'expert', 'expert_mlp', None)
    back = (None, 'expert', None, 'expert_mlp')
    self.block = init.fp8_block
    for k, name, shape, axes in zip(
      jax.random.split(key, 3),
      ('gate', 'up', 'down'),
      (wide, wide, narrow),
      (into, into, back),
    ):
      weight = param(k, shape, axes, init.dtype, std=init.std)
      scale = None
      if self.block is not None:
        values, scales = quantize(weight[...], self.block)
        weight = nnx.Param(values, axes=axes)
        # A shard's edge may cut a block, so a block's scale is whole.
        scale = nnx.Param(scales, axes=(None, 'expert', None, None))
      setattr(self, name, weight)
      setattr(self, f'{name}_scale', scale)

  def __call__(
    self, x: jax.Array, experts: jax.Array, layer: jax.Array | int, plan
  ) -> jax.Array:
    """Runs each row through its k experts.

    Args:
      x: [T, D] rows.
      experts: [T, k] int32 experts of each row.
      layer: slot of the layer in the pool.
      plan: how rows are tiled and which implementation runs.

    Returns:
      [T, k, D] outputs, not yet weighted.
    """
    T, k = experts.shape
    pairs = experts.reshape(-1)
    order = jnp.argsort(pairs, stable=True)
    sizes = jnp.zeros(self.gate.shape[1], jnp.int32).at[pairs].add(1)

    def apply(name, rows):
      scale = getattr(self, f'{name}_scale')
      return grouped_matmul(
        rows,
        getattr(self, name)[...],
        None if scale is None else scale[...],
        layer,
        sizes,
        tile=plan.row_tile,
        scale_block=self.block or (1, 1),
        implementation=plan.implementation,
      )

    rows = x[order // k]
    hidden = plan.rows(swiglu, apply('gate', rows), apply('up', rows))
    out = apply('down', hidden)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(T * k))
    return out[inverse].reshape(T, k, x.shape[1])


class Moe(nnx.Module):
  """Router and shared expert of one layer; routed experts are in the pool."""

  def __init__(self, key: jax.Array, config: ModelConfig, init: Init):
    c = config.moe
    keys = jax.random.split(key)
    self.router = Router(keys[0], config, init)
    width = c.intermediate_size * c.num_shared_experts
    self.shared = (
      Mlp(keys[1], config.hidden_size, width, init) if width else None
    )

  def combine(
    self, x: jax.Array, routed: jax.Array, weights: jax.Array
  ) -> jax.Array:
    """Weighted sum of routed outputs plus the shared expert.

    Args:
      x: [T, D] the layer's input rows.
      routed: [T, k, D] outputs of the routed experts.
      weights: [T, k] float32.

    Returns:
      [T, D] in x's dtype.
    """
    out = jnp.sum(routed.astype(weights.dtype) * weights[..., None], axis=1)
    if self.shared is not None:
      out = out + self.shared(x).astype(weights.dtype)
    return out.astype(x.dtype)
