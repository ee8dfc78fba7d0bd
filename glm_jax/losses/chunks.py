"""Sums over tokens that hold the logits of one chunk at a time.

A chunk takes every n-th row (row r of chunk c is row r * n + c of the
array), so that a token axis sharded over devices stays sharded within every
chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.tiling import cdiv, dot, pad_rows


def split_rows(x: jax.Array, chunk: int, fill=0) -> jax.Array:
  """Chunks of rows.

  Args:
    x: [T, ...].
    chunk: rows of a chunk.
    fill: what stands where there is no row.

  Returns:
    [n, chunk, ...].
  """
  chunk = max(min(chunk, x.shape[0]), 1)
  n = max(cdiv(x.shape[0], chunk), 1)
  padded = pad_rows(x, n * chunk, fill)
  return padded.reshape(chunk, n, *x.shape[1:]).swapaxes(0, 1)


def join_rows(parts: jax.Array, rows: int) -> jax.Array:
  """The [rows, ...] array that `split_rows` made [n, chunk, ...] of."""
  n, chunk = parts.shape[:2]
  return parts.swapaxes(0, 1).reshape(n * chunk, *parts.shape[2:])[:rows]


def mean(total: jax.Array, count: jax.Array) -> jax.Array:
  """total / count, 0 (with gradient 0) where nothing counts."""
  return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0)


def logits_of(hidden: jax.Array, head: jax.Array) -> jax.Array:
  """Logits [..., V], float32 or wider, of hidden [..., D] and head [V, D]."""
  return dot('...d,vd->...v', hidden, head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def head_sum(
  f: Callable,
  chunk: int,
  hidden: jax.Array,
  head: jax.Array,
  shared,
  rows: tuple,
) -> jax.Array:
  """Sums f(logits, shared, *rows) over chunks of tokens.

  The backward pass computes each chunk's logits again; the head's gradient
  is summed in float32 whatever the head's dtype.

  Args:
    f: gives the sum over a chunk as a scalar; differentiable in its logits
      [chunk, ..., V]. It closes over no array.
    chunk: tokens whose logits exist at once.
    hidden: [T, ..., D].
    head: [V, D].
    shared: arrays (any pytree) that every chunk sees whole; no gradient.
    rows: arrays [T, ...] cut like `hidden`; no gradient. Rows past the end
      are zeros, for which f must give 0.

  Returns:
    The sum, a scalar.
  """
  total = lambda logits, rows: f(logits, shared, *rows)

  def body(carry, xs):
    hidden, rows = xs
    return carry + total(logits_of(hidden, head), rows), None

  parts = jax.tree.map(lambda x: split_rows(x, chunk), (hidden, rows))
  wide = jnp.promote_types(
    jnp.promote_types(hidden.dtype, head.dtype), jnp.float32
  )
  return jax.lax.scan(body, jnp.zeros((), wide), parts)[0]


def _head_sum_forward(f, chunk, hidden, head, shared, rows):
  saved = (hidden, head, shared, rows)
  return head_sum(f, chunk, *saved), saved


def _head_sum_backward(f, chunk, saved, cotangent):
  hidden, head, shared, rows = saved

  def body(d_head, xs):
    hidden, rows = xs
    logits = logits_of(hidden, head)
    _, pull = jax.vjp(lambda z: f(z, shared, *rows), logits)
    (d_logits,) = pull(cotangent)
    d_hidden = dot('...v,vd->...d', d_logits.astype(head.dtype), head)
    flat = lambda x: x.reshape(-1, x.shape[-1]).astype(hidden.dtype)
    d_head += dot('mv,md->vd', flat(d_logits), flat(hidden))
    return d_head, d_hidden.astype(hidden.dtype)

  parts = jax.tree.map(lambda x: split_rows(x, chunk), (hidden, rows))
  d_head = jnp.zeros(head.shape, cotangent.dtype)
  d_head, d_hidden = jax.lax.scan(body, d_head, parts)
  d_hidden = join_rows(d_hidden, hidden.shape[0])
  return d_hidden, d_head.astype(head.dtype), None, None


head_sum.defvjp(_head_sum_forward, _head_sum_backward)
