"""Plans of suite `context`: dense attention, and the attention side alone.

The model's own trunk runs under both: a plan may hand out other blocks than
the model's (`LocalPlan.weights`), which have the same weights.
"""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
from jax import lax

from glm_jax.benchmarks.context_bound import EXPANDED_ROWS
from glm_jax.block import Block
from glm_jax.cache import Cache, Rows
from glm_jax.mla import Mla
from glm_jax.mtp import Mtp
from glm_jax.plan import LocalPlan, Selection
from pallas_kernels.tiling import PAGE, dot

FORMS = ('cudnn', 'xla')


@dataclasses.dataclass(frozen=True)
class AttentionSide(LocalPlan):
  """Layers that end behind their attention: no MLP, no experts."""

  def weights(self, module, num_rows: int):
    """The blocks without what follows the attention."""
    return _wrapped(module, _AttentionBlock)


@dataclasses.dataclass(frozen=True)
class DensePlan(LocalPlan):
  """Attention to every visible row; no index scores, no selection.

  Few rows read the cached latents (absorbed): the gather kernel is given all
  positions, which splits the keys over the processors and holds nothing
  more. Many rows expand keys and values a block of as many keys at a time,
  and merge blocks by their logarithmic sums.

  Attributes:
    form: of a block of many rows, 'cudnn' or 'xla'.
    attention_only: as `AttentionSide`; few rows only.
  """

  form: str = 'xla'
  attention_only: bool = False

  def weights(self, module, num_rows: int):
    """Blocks that expand keys and values, for many rows."""
    if num_rows >= EXPANDED_ROWS:
      return _wrapped(module, _DenseBlock)
    if self.attention_only:
      return _wrapped(module, _AttentionBlock)
    return module

  def write_index_keys(self, cache: Cache, index_slot, rows: Rows, keys):
    """Writes nothing: nobody reads them."""
    return cache

  def select(
    self, q, w, cache: Cache, rows: Rows, index_slot, k, *, first=0
  ) -> Selection:
    """Every visible position of each row."""
    at = jnp.arange(rows.page_table.shape[1] * PAGE, dtype=jnp.int32)[None]
    visible = (at >= first) & (at <= rows.pos[:, None])
    return self.selection(rows, jnp.where(visible, at, -1))


def _wrapped(module, wrap):
  """A block, a scanned group or the drafter with other blocks."""
  if isinstance(module, Block):
    return wrap(module)
  if isinstance(module, Mtp):
    return types.SimpleNamespace(
      block=wrap(module.block),
      experts=module.experts,
      join=module.join,
      norm=module.norm,
    )
  return types.SimpleNamespace(blocks=[wrap(b) for b in module.blocks])


class _AttentionBlock:
  """A block whose output is that of its attention."""

  def __init__(self, block: Block):
    self._block = block

  def __getattr__(self, name):
    return getattr(self._block, name)

  def __call__(self, *args, **options):
    return Block.__call__(self, *args, **options)

  def _feed_forward(self, x, ids, experts, step):
    return x, x


class _DenseBlock:
  """A block that attends to every row, for one sequence's whole chunk."""

  def __init__(self, block: Block):
    self._block = block

  def __call__(
    self, x, cache, selection, ids, experts, step, replay=None, *, frozen=False
  ):
    block = self._block
    mla: Mla = block.attention
    _, q, row = mla.project(block.input_norm(x), step.cos, step.sin)
    cache = step.plan.write_rows(cache, ids.latent, step.rows, row)
    values = dense_attention(
      mla, q, cache, step.rows, ids.latent, step.plan.form
    )
    x = x + mla.o(values.reshape(len(x), -1))
    x, _ = block._feed_forward(x, ids, experts, step)
    return x, cache, selection, {}


def dense_attention(
  mla: Mla, q: jax.Array, cache: Cache, rows: Rows, layer, form: str
) -> jax.Array:
  """Causal attention of a chunk to all that precedes it, expanded a head.

  Args:
    mla: the layer's projections.
    q: [T, N, nope + P] queries after RoPE; T a multiple of 64.
    cache: holds the rows up to the chunk's own.
    rows: the chunk: consecutive positions of sequence 0 from a multiple of T.
    layer: slot of the layer in the latent pool.
    form: 'cudnn' or 'xla'.

  Returns:
    [T, N, v] attended values in q's dtype.
  """
  c, T = mla.config, q.shape[0]
  pages = cache.latents.reshape(-1, PAGE, cache.latents.shape[1])
  offset = jnp.asarray(layer, jnp.int32) * cache.num_pages
  w_uk, w_uv = mla.up_projections()
  own = rows.pos[0] // T
  attend = {'cudnn': _cudnn, 'xla': _xla}[form]

  def block(i, causal):
    at = lax.dynamic_slice_in_dim(
      rows.page_table[0], i * (T // PAGE), T // PAGE
    )
    read = pages[at + offset].reshape(T, -1)[:, : c.row_dim]
    latent, rope = jnp.split(read, [c.kv_lora_rank], axis=1)
    rope = jnp.broadcast_to(rope[:, None], (T, c.num_heads, c.qk_rope_head_dim))
    k_nope = dot('sr,ndr->snd', latent, w_uk).astype(q.dtype)
    k = jnp.concatenate([k_nope, rope.astype(q.dtype)], axis=-1)
    v = dot('sr,nvr->snv', latent, w_uv).astype(q.dtype)
    out, lse = attend(q, k, v, c.scale, causal)
    return out.astype(jnp.float32), lse

  def merge(i, carry):
    out, lse = carry
    more, more_lse = block(i, False)
    both = jnp.logaddexp(lse, more_lse)
    weight = lambda a: jnp.exp(a - both)[..., None]
    return out * weight(lse) + more * weight(more_lse), both

  out, _ = lax.fori_loop(0, own, merge, block(own, True))
  return out.astype(q.dtype)


def _xla(q, k, v, scale, causal):
  """Output [T, N, v] and natural logarithmic sums [T, N] float32."""
  logits = dot('tnd,snd->nts', q, k) * scale
  if causal:
    T = q.shape[0]
    logits = jnp.where(jnp.tril(jnp.ones((T, T), bool)), logits, -jnp.inf)
  top = jnp.max(logits, axis=-1, keepdims=True)
  p = jnp.exp(logits - top)
  total = jnp.sum(p, axis=-1)
  out = dot('nts,snv->tnv', p.astype(v.dtype), v) / total.T[..., None]
  return out, (jnp.log(total) + top[..., 0]).T


def _cudnn(q, k, v, scale, causal):
  # The public call rounds the logarithmic sums to bf16.
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  kinds = cudnn.MaskType
  out, lse = cudnn.dot_product_attention(
    q[None],
    k[None],
    v[None],
    scale=scale,
    mask_type=kinds.CAUSAL if causal else kinds.NO_MASK,
    return_residual=True,
  )
  lse = lse.reshape(q.shape[1], q.shape[0]).T
  return out[0], lse.astype(jnp.float32)


def dense_form(config, chunk: int, log) -> str:
  """'cudnn' where it runs here and agrees with XLA, else 'xla'."""
  if jax.default_backend() != 'gpu':
    return 'xla'
  c = config.mla
  keys = jax.random.split(jax.random.key(0), 3)
  qk = c.qk_nope_head_dim + c.qk_rope_head_dim
  q, k, v = (
    jax.random.normal(key, (chunk, c.num_heads, width), jnp.bfloat16)
    for key, width in zip(keys, (qk, qk, c.v_head_dim))
  )
  try:
    for causal in (True, False):
      run = lambda attend, causal=causal: jax.jit(
        lambda q, k, v: attend(q, k, v, c.scale, causal)
      )(q, k, v)
      for got, want in zip(run(_cudnn), run(_xla)):
        error = jnp.max(jnp.abs(got.astype(jnp.float32) - want))
        if not error <= 0.02 * jnp.max(jnp.abs(want)):
          raise RuntimeError(f'cuDNN and XLA differ by {float(error):.3g}')
  except Exception as why:  # whatever a cuDNN or a JAX says no with
    reason = (str(why).splitlines() or [repr(why)])[0]
    log(f'dense attention in XLA: {reason[:200]}')
    return 'xla'
  return 'cudnn'
