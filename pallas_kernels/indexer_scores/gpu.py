"""Indexer scores on a GPU, by Pallas (Triton).

XLA writes the dots of all heads [T, I, S] to memory and reads them back; here
a tile of them lives in registers until the heads are summed. A program takes
some query rows and keys: one row where sequences decode, four where they
prefill, whose rows mostly are of one sequence. Keys are the rows of the
product and heads its columns: a thread then holds most of the heads of a key.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.indexer_scores.reference import relu
from pallas_kernels.tiling import PAGE, round_up
from pallas_kernels.triton import (
  available,
  check_addressable,
  params,
  power_of_two,
)

_ROWS = 4  # query rows a program; with 32 heads a 128-row matrix operand
_KEYS = 128  # keys a tile
_PAGES = _KEYS // PAGE
_TILES = 8  # of keys a program


def fits(rows: int, heads: int, width: int, size: int) -> bool:
  """Whether `sequence_scores` takes these shapes; else XLA does the work."""
  whole = rows % _ROWS == 0 and size % _KEYS == 0
  powers = power_of_two(heads) and power_of_two(width)
  return available() and whole and powers


def _dots(q, w, keys, rows: int):
  """[rows * I, H] queries, [rows * I] weights, [_KEYS, H] -> [rows, _KEYS]."""
  dots = jnp.dot(keys, q.T, preferred_element_type=jnp.float32)
  return jnp.sum((relu(dots) * w).reshape(_KEYS, rows, -1), axis=2).T


def sequence_scores(
  q: jax.Array,
  w: jax.Array,
  keys: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """sum over heads of w relu(q k), for every row and key of one sequence.

  Args:
    q: [T, I, H] index queries.
    w: [T, I] float32 head weights.
    keys: [S, H] index keys, in q's dtype.
    interpret: run on any backend, slowly.

  Returns:
    [T, S] float32; limits are the caller's.
  """
  T, heads, H = q.shape
  S = keys.shape[0]
  if not fits(T, heads, H, S):
    raise NotImplementedError(
      f'{T} rows of {heads} heads of {H}, {S} keys: rows must be a multiple of '
      f'{_ROWS}, keys of {_KEYS}, heads and width powers of two from 16'
    )

  def kernel(q_ref, w_ref, k_ref, o_ref):
    o_ref[...] = _dots(q_ref[...], w_ref[...], k_ref[...], _ROWS)

  return pl.pallas_call(
    kernel,
    grid=(T // _ROWS, S // _KEYS),
    in_specs=[
      pl.BlockSpec((_ROWS * heads, H), lambda i, j: (i, 0)),
      pl.BlockSpec((_ROWS * heads,), lambda i, j: (i,)),
      pl.BlockSpec((_KEYS, H), lambda i, j: (j, 0)),
    ],
    out_specs=pl.BlockSpec((_ROWS, _KEYS), lambda i, j: (i, j)),
    out_shape=jax.ShapeDtypeStruct((T, S), jnp.float32),
    compiler_params=None if interpret else params(8, 3),
    interpret=interpret,
    name='sequence_scores',
  )(q.reshape(T * heads, H), w.reshape(T * heads), keys)


def _kernel(*refs, rows: int, heads: int, first: int, scaled, comparable):
  """Scores of `rows` query rows and `_TILES` tiles of keys."""
  q_ref, w_ref, keys_ref, *refs = refs
  scales_ref = refs.pop(0) if scaled else None
  table_ref, seq_ref, pos_ref, o_ref = refs
  begin, start = pl.program_id(0) * rows, pl.program_id(1) * _TILES
  some = pl.ds(begin * heads, rows * heads)
  mine = pl.ds(begin, rows)
  q, w = q_ref[some, :], w_ref[some]
  seqs, row_pos = seq_ref[mine], pos_ref[mine]
  key = lax.broadcasted_iota(jnp.int32, (_KEYS,), 0)
  place = lax.broadcasted_iota(jnp.int32, (_TILES * _PAGES,), 0)
  number = lax.broadcasted_iota(jnp.int32, (rows,), 0)

  def sweep(seq, before: bool):
    """Writes the rows of one sequence; the others' stay, or become -inf."""
    own = seqs == seq
    last = jnp.max(jnp.where(own, row_pos, -1))
    seen = jnp.clip(last // _KEYS + 1 - start, 0, _TILES)

    def write(i, scores):
      columns = pl.ds((start + i) * _KEYS, _KEYS)
      if before:
        scores = jnp.where(own[:, None], scores, o_ref[mine, columns])
      o_ref[mine, columns] = scores

    # No branch within the loop and one load behind another at most: the next
    # tiles' keys are then on the way while this one's are multiplied.
    pages = table_ref[seq, pl.ds(start * _PAGES, _TILES * _PAGES)]

    def tile(i, _):
      chosen = lambda n: jnp.sum(jnp.where(place == i * _PAGES + n, pages, 0))
      page = chosen(0)
      for n in range(1, _PAGES):
        page = jnp.where(key < n * PAGE, page, chosen(n))
      at = jnp.maximum(page, 0) * PAGE + key % PAGE
      scores = _dots(q, w, keys_ref[at, :].astype(q.dtype), rows)
      if scaled:
        scores = scores * scales_ref[at][None]
      pos = (start + i) * _KEYS + key[None]
      there = (page >= 0)[None] & (pos >= first) & (pos <= row_pos[:, None])
      there &= own[:, None]
      if comparable:  # false for NaN
        there &= scores > -jnp.inf
        scores = jnp.where(scores == 0, 0.0, scores)
      write(i, jnp.where(there, scores, -jnp.inf))

    nothing = jnp.full((rows, _KEYS), -jnp.inf)
    lax.fori_loop(0, seen, tile, None)
    lax.fori_loop(seen, _TILES, lambda i, _: write(i, nothing), None)

  sweep(seq_ref[begin], before=False)

  def another(r, _):
    seq = seq_ref[begin + r]
    met = jnp.sum(((seqs == seq) & (number < r)).astype(jnp.int32))
    pl.when(met == 0)(lambda: sweep(seq, before=True))

  if rows > 1:
    lax.fori_loop(1, rows, another, None)


def indexer_scores(
  q: jax.Array,  # [T, I, H] bf16
  w: jax.Array,  # [T, I] f32
  key_pages: jax.Array,  # [P, page, H] bf16 or fp8
  key_scales: jax.Array | None,  # [P, page] f32
  page_table: jax.Array,  # [B, n] int32
  row_seq: jax.Array,  # [T] int32
  row_pos: jax.Array,  # [T] int32
  *,
  first: int = 0,
  comparable: bool = False,
  interpret: bool = False,
) -> jax.Array:  # [T, S] f32
  """See the public call.

  `comparable`: NaN becomes -inf and -0.0 0.0, as the selection compares them.
  """
  T, heads, H = q.shape
  n = page_table.shape[1]
  if q.dtype != jnp.bfloat16 or key_pages.dtype.itemsize > 2:
    raise NotImplementedError(
      f'{q.dtype} queries and {key_pages.dtype} keys: bf16, or bf16 and fp8'
    )
  if not (power_of_two(heads) and power_of_two(H)):
    raise NotImplementedError(
      f'{heads} heads of {H}: both must be powers of two from 16'
    )
  check_addressable(key_pages)
  rows = _ROWS if T >= _ROWS * page_table.shape[0] else 1
  padded = round_up(T, rows)
  pages = round_up(n, _PAGES * _TILES)
  whole = lambda a, fill=0: jnp.pad(
    a, [(0, padded - T)] + [(0, 0)] * (a.ndim - 1), constant_values=fill
  )
  table = jnp.pad(page_table, ((0, 0), (0, pages - n)), constant_values=-1)
  scales = () if key_scales is None else (key_scales.reshape(-1),)
  scores = pl.pallas_call(
    lambda *refs: _kernel(
      *refs,
      rows=rows,
      heads=heads,
      first=first,
      scaled=bool(scales),
      comparable=comparable,
    ),
    grid=(padded // rows, pages // (_PAGES * _TILES)),
    out_shape=jax.ShapeDtypeStruct((padded, pages * PAGE), jnp.float32),
    compiler_params=None if interpret else params(4, 3),
    interpret=interpret,
    name='indexer_scores',
  )(
    whole(q).reshape(padded * heads, H),
    whole(w).reshape(padded * heads),
    key_pages.reshape(-1, H),
    *scales,
    table,
    jnp.maximum(whole(row_seq), 0),
    whole(row_pos, -1),
  )
  return scores[:T, : n * PAGE]
