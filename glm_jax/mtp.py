"""The weights of the drafter, checkpoint layer N (spec/model.md section 4.1).

    z = eh_proj([enorm(embedding of token i + 1) ; hnorm(hidden of i)])
    u = decoder layer(z)           sparse, with its own indexer and cache
    g = shared_head.norm(u)        logits = head(g) predict token i + 2

How rows are stored and drafts are made is in `drafting.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from glm_jax.block import Block
from glm_jax.config import ModelConfig
from glm_jax.layers import Init, Linear, RMSNorm
from glm_jax.moe import Experts


class Mtp(nnx.Module):
  """The drafter's weights: checkpoint layer N."""

  def __init__(self, key, config: ModelConfig, init: Init):
    D, eps = config.hidden_size, config.rms_norm_eps
    keys = jax.random.split(key, 4)
    self.embed_norm = RMSNorm(D, eps, init)
    self.hidden_norm = RMSNorm(D, eps, init)
    self.project = Linear(keys[0], 2 * D, D, ('rank', 'embed'), init, fp8=False)
    self.block = Block(keys[1], config, init, full=True, moe=True)
    self.experts = Experts(keys[2], 1, config, init)
    self.norm = RMSNorm(D, eps, init)
    # Tied to the trunk's head unless the checkpoint brings its own.
    self.head = (
      Linear(keys[3], D, config.vocab_size, ('vocab', 'embed'), init, fp8=False)
      if config.mtp.own_head
      else None
    )

  def join(self, embedding: jax.Array, hidden: jax.Array) -> jax.Array:
    """The block's input [T, D]: the embedding's half comes first."""
    halves = [self.embed_norm(embedding), self.hidden_norm(hidden)]
    return self.project(jnp.concatenate(halves, axis=-1))
