"""Attention over the selected rows that one device holds, and the merge.

On a cache whose tokens are split over devices, each device attends to the
selected rows it owns and keeps what the softmax needs to go on elsewhere:

    m   = max_j logit_j                  (-inf without rows)
    l   = sum_j exp(logit_j - m)         (0 without rows)
    acc = sum_j exp(logit_j - m) row_j[:R]

out = acc / l and lse = m + log(l) are `topk_gather_attention` of the local
rows, and the whole attention is the sum over devices of exp(lse - top) out,
divided by the sum of exp(lse - top), with top the largest lse.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import choose, run
from pallas_kernels.tiling import within_pool
from pallas_kernels.topk_gather_attention import tpu, xla

AVAILABLE = {
  'xla': xla.partial_attention,
  'tpu': tpu.partial_attention,
  'interpret': functools.partial(tpu.partial_attention, interpret=True),
}
BLOCK_BYTES = 64 << 20


def first_valid(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Brings the valid slots of each row to the front.

  Args:
    slots: [T, k] int32, -1 for none, in any order.

  Returns:
    slots [T, k] int32 ascending, then -1; count [T] int32 of valid ones.
  """
  last = jnp.iinfo(jnp.int32).max
  ordered = jnp.sort(jnp.where(slots >= 0, slots, last), axis=1)
  count = jnp.sum(slots >= 0, axis=1, dtype=jnp.int32)
  return jnp.where(ordered < last, ordered, -1), count


def partial_attention(
  q: jax.Array,
  rows: jax.Array,
  row_scales: jax.Array | None,
  slots: jax.Array,
  count: jax.Array,
  *,
  scale: float,
  latent_width: int,
  implementation: str | None = None,
  block_bytes: int = BLOCK_BYTES,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Attention over the first `count` slots of each row, unnormalised.

  Args:
    q: [T, N, R + P].
    rows: [M, W] this device's pool; see `topk_gather_attention`.
    row_scales: [M, ceil(R / 128)] float32 for uint8 records, else None.
    slots: [T, k] int32 row ids in this pool, -1 for none (`first_valid`).
    count: [T] int32; slots from there on are not read, whatever they hold.
    scale: softmax scale.
    latent_width: R.
    implementation: None or a name of `topk_gather_attention`.
    block_bytes: bytes of gathered rows and logits at once.

  Returns:
    acc [T, N, R], m [T, N], l [T, N], float32 or wider, as this file says.

  Raises:
    NotImplementedError: the named implementation is not here.
  """
  inside = jnp.arange(slots.shape[1]) < count[:, None]
  slots = jnp.where(inside, slots, -1)
  choice = choose('partial_attention', implementation, AVAILABLE)
  return run(
    choice,
    AVAILABLE,
    q,
    rows,
    row_scales,
    within_pool(slots, rows.shape[0], 'slot'),
    count,
    scale=scale,
    latent_width=latent_width,
    block_bytes=block_bytes,
  )


def normalize(
  acc: jax.Array, m: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Turns partial sums into an output and its lse.

  Args:
    acc: [..., R] float32 unnormalised output.
    m: [...] float32 largest logit, -inf without rows.
    total: [...] float32 sum of exponentials l, 0 without rows.

  Returns:
    out [..., R] and lse [...] (natural log); 0 and -inf without rows.
  """
  some = total != 0  # NaN passes
  total = jnp.where(some, total, 1)
  out = jnp.where(some[..., None], acc / total[..., None], 0)
  return out, jnp.where(some, m + jnp.log(total), -jnp.inf)


def merge_partials(
  out: jax.Array, lse: jax.Array, axis_name: str | tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
  """Merges attention over disjoint sets of rows, one a shard, by lse.

  Called where `axis_name` is bound (`shard_map`). A shard without rows has
  weight exactly 0, whatever its `out` holds; without rows on any shard the
  result is 0 and -inf. Three reductions: a maximum of [T, N], then the sums
  of [T, N] and [T, N, R], which do not wait for one another.

  Args:
    out: [T, N, R] this shard's output, normalised over its own rows.
    lse: [T, N] its natural log of the sum of exponentials, -inf for none.
    axis_name: the mesh axis or axes the rows are split over.

  Returns:
    out [T, N, R] in out's dtype (weighted and summed in float32 or wider)
    and lse [T, N], the same on every shard.
  """
  top = lax.pmax(lax.stop_gradient(lse), axis_name)
  top = jnp.where(top > -jnp.inf, top, 0)  # -inf - -inf would be NaN
  weight = jnp.exp(lse - top)
  wide = out.astype(jnp.promote_types(out.dtype, jnp.float32))
  # A weight of 0 does not silence NaN.
  share = jnp.where(weight[..., None] != 0, weight[..., None] * wide, 0)
  total, merged = lax.psum((weight, share), axis_name)
  some = total != 0  # NaN passes
  total = jnp.where(some, total, 1)
  merged = jnp.where(some[..., None], merged / total[..., None], 0)
  lse = jnp.where(some, top + jnp.log(total), -jnp.inf)
  return merged.astype(out.dtype), lse
