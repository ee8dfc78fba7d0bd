"""The few collectives that plans are made of; call them inside `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def as_bits(x: jax.Array) -> jax.Array:
  """The same bytes as unsigned integers: they travel unchanged, NaN too."""
  return lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])


def rank_index(axes: Sequence[str]) -> jax.Array:
  """This device's number along some mesh axes together, 0 for none."""
  return lax.axis_index(tuple(axes)) if axes else jnp.int32(0)


def gather_shards(x: jax.Array, axes: Sequence[str]) -> jax.Array:
  """All ranks' shards one after another, on every rank; bit-exact."""
  if not axes:
    return x
  bits = lax.all_gather(as_bits(x), tuple(axes), tiled=True)
  return lax.bitcast_convert_type(bits, x.dtype)


def broadcast(x: jax.Array, mine: jax.Array, axes: Sequence[str]) -> jax.Array:
  """The x of the one rank whose `mine` is true, on every rank; bit-exact.

  What other ranks hold is never added, so it may be NaN.
  """
  if not axes:
    return x
  bits = as_bits(x)
  bits = lax.psum(jnp.where(mine, bits, 0), tuple(axes))
  return lax.bitcast_convert_type(bits, x.dtype)


def merge_by_lse(
  out: jax.Array,
  lse: jax.Array,
  axes: Sequence[str],
  *,
  scatter: int | None = None,
) -> jax.Array:
  """Attention over the rows of all ranks from each rank's share.

  Two collectives: every rank's lse [T, N] is gathered, so that each rank can
  weight its own share before the one sum of [T, N, R].

  Args:
    out: [T, N, R] this rank's output, normalised over its own rows.
    lse: [T, N] its log of the sum of exponentials, -inf without rows.
    axes: mesh axes the rows are split over.
    scatter: dimension of the result that is left split over `axes` (a
      reduce-scatter, half the bytes); None for the whole result.

  Returns:
    [T, N, R] in out's dtype; 0 for a row without any key on any rank. A rank
    without rows adds exactly 0, whatever its `out` holds.
  """
  if not axes:
    return jnp.where((lse > -jnp.inf)[..., None], out, 0)
  axes = tuple(axes)
  every = lax.all_gather(lse, axes)  # [ranks, T, N]
  top = jnp.max(every, axis=0)
  top = jnp.where(top > -jnp.inf, top, 0)
  total = jnp.sum(jnp.exp(every - top), axis=0)
  weight = jnp.exp(lse - top) / jnp.where(total > 0, total, 1)
  share = out.astype(jnp.float32) * weight[..., None]
  # A weight of 0 does not silence NaN.
  share = jnp.where(weight[..., None] > 0, share, 0)
  if scatter is None:
    merged = lax.psum(share, axes)
  else:
    merged = lax.psum_scatter(
      share, axes, scatter_dimension=scatter, tiled=True
    )
  return merged.astype(out.dtype)


def first_of_all(
  positions: jax.Array, k: int, axes: Sequence[str]
) -> jax.Array:
  """The positions that all ranks hold, ascending, then -1.

  Args:
    positions: [T, m] int32 of this rank, -1 for none, at most k over all
      ranks.
    k: width of the result.
    axes: mesh axes of the ranks.

  Returns:
    [T, k] int32, the same on every rank.
  """
  if axes:
    positions = lax.all_gather(positions, tuple(axes), axis=1, tiled=True)
  last = jnp.iinfo(jnp.int32).max
  ordered = jnp.sort(jnp.where(positions >= 0, positions, last), axis=1)
  ordered = jnp.where(ordered == last, -1, ordered)[:, :k]
  missing = k - ordered.shape[1]
  return jnp.pad(ordered, ((0, 0), (0, missing)), constant_values=-1)
