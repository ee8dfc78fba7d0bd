"""Multi-head latent attention: what is cached, and queries that read it.

The absorbed form folds the key up-projection into the query and the value
up-projection into the output, so that attention reads the cached latent
itself (spec/model.md section 2.6). `expanded_attention` is the same maths
with per-head keys and values: the check on the absorbed form.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from glm_jax.config import ModelConfig
from glm_jax.layers import Init, Linear, RMSNorm, few_rows
from glm_jax.rope import apply_rope
from pallas_kernels.block_scale import dequantize
from pallas_kernels.tiling import dot


class Mla(nnx.Module):
  """Projections of one attention layer; N heads, latent rank R."""

  def __init__(self, key: jax.Array, config: ModelConfig, init: Init):
    c = config.mla
    D, N = config.hidden_size, c.num_heads
    keys = jax.random.split(key, 5)
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    up = c.qk_nope_head_dim + c.v_head_dim
    self.q_a = Linear(keys[0], D, c.q_lora_rank, ('rank', 'embed'), init)
    self.q_norm = RMSNorm(c.q_lora_rank, c.latent_norm_eps, init)
    self.q_b = Linear(keys[1], c.q_lora_rank, N * qk, ('heads', 'fsdp'), init)
    self.kv_a = Linear(keys[2], D, c.row_dim, ('rank', 'embed'), init)
    self.kv_norm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps, init)
    self.kv_b = Linear(keys[3], c.kv_lora_rank, N * up, ('heads', 'fsdp'), init)
    self.o = Linear(keys[4], N * c.v_head_dim, D, ('embed', 'heads'), init)
    self.config = c

  def project(
    self, x: jax.Array, cos: jax.Array, sin: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects rows.

    Args:
      x: [T, D] normed hidden states.
      cos: [T, P / 2] rotary cosines.
      sin: [T, P / 2] rotary sines.

    Returns:
      q_latent: [T, Q] normed query latents (the indexer's input).
      q: [T, N, nope + P] queries after RoPE.
      row: [T, R + P] what is cached: normed latent, then rotary key.
    """
    c = self.config
    q_latent = self.q_norm(self.q_a(x))
    q = self.q_b(q_latent).reshape(x.shape[0], c.num_heads, -1)
    nope, rope = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
    q = jnp.concatenate([nope, apply_rope(rope, cos, sin)], axis=-1)
    latent, key = jnp.split(self.kv_a(x), [c.kv_lora_rank], axis=-1)
    key = apply_rope(key, cos, sin)
    row = jnp.concatenate([self.kv_norm(latent), key], axis=-1)
    return q_latent, q, row

  def absorb(self, q: jax.Array) -> jax.Array:
    """[T, N, nope + P] queries to [T, N, R + P] queries of the latent."""
    nope, rope = jnp.split(q, [self.config.qk_nope_head_dim], axis=-1)
    latent = self._per_head('td,dr->tr', nope, 0)
    return jnp.concatenate([latent, rope], axis=-1)

  def output(self, attended: jax.Array) -> jax.Array:
    """[T, N, R] attended latents to the layer's [T, D] output."""
    values = self._per_head('tr,vr->tv', attended, 1)
    return self.o(values.reshape(values.shape[0], -1))

  def up_projections(self) -> tuple[jax.Array, jax.Array]:
    """W_UK [N, nope, R] and W_UV [N, v, R] as wide arrays (for checks)."""
    c = self.config
    kernel = self.kv_b.kernel[...]
    if self.kv_b.block is not None:
      # Blocks straddle heads: dequantise before any split.
      scales = self.kv_b.scale[...]
      kernel = dequantize(kernel, scales, jnp.float32, self.kv_b.block)
    both = kernel.reshape(c.num_heads, -1, c.kv_lora_rank)
    nope = c.qk_nope_head_dim
    return both[:, :nope], both[:, nope:]

  def _per_head(self, spec: str, x: jax.Array, part: int) -> jax.Array:
    """Multiplies x [T, N, .] by W_UK (part 0) or W_UV (part 1), a head each.

    fp8 weights are dequantised one head at a time.
    """
    c = self.config
    cut = c.qk_nope_head_dim
    side = slice(0, cut) if part == 0 else slice(cut, None)
    if self.kv_b.products is not None:
      return self.kv_b.products.heads(self.kv_b, x, spec, c.num_heads, side)
    kernel, block = self.kv_b.kernel[...], self.kv_b.block
    both = kernel.reshape(c.num_heads, -1, c.kv_lora_rank)
    heads = x.swapaxes(0, 1)  # [N, T, .]
    if block is None:
      a, rest = spec.split(',')
      b, out = rest.split('->')
      product = functools.partial(dot, f'n{a},n{b}->n{out}')

      def whole(x, weights):
        # A head's part would be copied: all of it is read where it lies.
        if part == 1:
          return product(x, weights)[..., cut:]
        zeros = ((0, 0), (0, 0), (0, c.v_head_dim))
        return product(jnp.pad(x, zeros), weights)

      multiply = lambda x, weights: product(x, weights[:, side])
      y = few_rows(multiply, heads, both, whole)
    else:
      rows = jnp.repeat(self.kv_b.scale[...], block[0], axis=0)
      rows = rows[: kernel.shape[0]].reshape(c.num_heads, -1, rows.shape[1])

      def head(args):
        x, values, scales = args
        w = dequantize(values, scales, x.dtype, (1, block[1]))
        return dot(spec, x, w)

      y = lax.map(head, (heads, both[:, side], rows[:, side]))
    return y.swapaxes(0, 1).astype(x.dtype)


def expanded_attention(
  mla: Mla, q: jax.Array, rows: jax.Array, mask: jax.Array
) -> jax.Array:
  """Attention with per-head keys and values over explicit rows.

  Args:
    mla: the layer's projections.
    q: [T, N, nope + P] queries after RoPE.
    rows: [S, R + P] cached rows, decoded.
    mask: [T, S] True where row t may read row s.

  Returns:
    [T, N, v] float32 attended values; 0 where a row may read nothing.
  """
  c = mla.config
  w_uk, w_uv = mla.up_projections()
  latent, key = jnp.split(rows.astype(jnp.float32), [c.kv_lora_rank], axis=-1)
  k_nope = dot('ndr,sr->snd', w_uk.astype(jnp.float32), latent)
  k_rope = jnp.broadcast_to(
    key[:, None], (key.shape[0], c.num_heads, key.shape[1])
  )
  k = jnp.concatenate([k_nope, k_rope], axis=-1)
  v = dot('nvr,sr->snv', w_uv.astype(jnp.float32), latent)
  logits = dot('tnd,snd->tns', q.astype(jnp.float32), k) * c.scale
  logits = jnp.where(mask[:, None], logits, -jnp.inf)
  p = jax.nn.softmax(logits, axis=-1)
  p = jnp.where(mask[:, None], p, 0)
  return dot('tns,snv->tnv', p, v)
