"""The lightning indexer of a full layer: queries, head weights and the key.

Its inputs are the layer's normed hidden state and the *normed* query latent
(spec/model.md section 2.1). Scores and the selection are ops.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from glm_jax.config import ModelConfig
from glm_jax.layers import Init, Linear, layer_norm
from glm_jax.param import param
from glm_jax.rope import apply_rope


class Indexer(nnx.Module):
  """Projections of one indexer; I heads of width H share one key a token."""

  def __init__(self, key: jax.Array, config: ModelConfig, init: Init):
    c = config.indexer
    keys = jax.random.split(key, 3)
    width = c.num_heads * c.head_dim
    D = config.hidden_size
    rank = config.mla.q_lora_rank
    self.wq_b = Linear(keys[0], rank, width, ('index', 'fsdp'), init)
    self.wk = Linear(keys[1], D, c.head_dim, ('index', 'embed'), init)
    self.weights_proj = Linear(
      keys[2], D, c.num_heads, ('index', 'embed'), init, fp8=False
    )
    self.key_norm_weight = param(
      None, (c.head_dim,), (None,), init.dtype, fill=1.0
    )
    self.key_norm_bias = param(None, (c.head_dim,), (None,), init.dtype)
    self.config = c

  def __call__(
    self, x: jax.Array, q_latent: jax.Array, cos: jax.Array, sin: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects rows.

    Args:
      x: [T, D] normed hidden states.
      q_latent: [T, Q] normed query latents.
      cos: [T, P / 2] rotary cosines.
      sin: [T, P / 2] rotary sines.

    Returns:
      q: [T, I, H] queries after RoPE.
      w: [T, I] float32 head weights with H^-0.5 I^-0.5 in; may be negative.
      k: [T, H] the key of each row, after norm and RoPE.
    """
    c = self.config
    q = self.wq_b(q_latent).reshape(-1, c.num_heads, c.head_dim)
    k = layer_norm(
      self.wk(x),
      self.key_norm_weight[...],
      self.key_norm_bias[...],
      c.key_norm_eps,
    )
    w = self.weights_proj.wide(x) * (c.head_dim**-0.5 * c.num_heads**-0.5)
    return (
      apply_rope(q, cos, sin),
      w.astype(jnp.float32),
      apply_rope(k, cos, sin),
    )
