"""Exact top-k of rows of scores on a GPU, by Pallas (Triton).

Up to 8,192 scores of a row stay in the registers of one program, which runs
the whole search of threshold.py. A wider row is read twice. First for a lower
bound of its k-th largest score: position p belongs to group p modulo G, with
G twice k or more, and the k-th largest of the G groups' largest scores is
reached by k scores at least and, where neighbours do not repeat every G keys,
by about 1.4 k. What reaches the bound is then written, in order of position,
to a buffer of G candidates, and one program a row selects among those.

Nothing is approximate: a row with more candidates than the buffer holds (ties
by the thousand) is searched where it lies in memory, some fifty passes of one
program, by the last launch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.streaming_topk.threshold import (
  kth_key,
  search_mask,
  sort_keys,
)
from pallas_kernels.tiling import cdiv, round_up
from pallas_kernels.triton import params, scatter

WIDEST = 16384  # scores that the registers of a program hold
_NARROW = 8192  # of a row that is searched as it is
_CHUNK = 2048  # scores of a wide row that a program compares at once
_ROWS_AT_ONCE = 4  # of [S / G, G]: enough loads in flight
_SHARED = 16  # of [S / G, G]: fewer are not worth a launch of their own
_PROGRAMS = 512  # that fill the card


def warps(width: int) -> int:
  """Warps of a program that holds so many scores."""
  return max(4, min(16, width // 512))


def pad(scores: jax.Array, width: int) -> jax.Array:
  """[T, width]: what is added is never chosen."""
  more = ((0, 0), (0, width - scores.shape[1]))
  return jnp.pad(scores, more, constant_values=-jnp.inf)


def _groups(k: int) -> int:
  return 2 * pl.next_power_of_2(k)


def parts(rows: int, size: int) -> int:
  """Programs that share a wide row: one where the rows fill the card."""
  wanted = pl.next_power_of_2(cdiv(_PROGRAMS, rows))
  most = pl.next_power_of_2(size // (4 * _CHUNK) + 1) // 2
  shared = 1 if rows * 4 > _PROGRAMS else max(1, min(wanted, most))
  while size % (shared * _CHUNK):
    shared //= 2
  return shared


def _append(refs, row, before, chosen, values, interpret: bool):
  """Writes each value where chosen behind `before` others of its row."""
  places = before + jnp.cumsum(chosen.astype(jnp.int32)) - 1
  for ref, value in zip(refs, values):
    last = ref.shape[1] - 1
    # The last column is nobody's, and takes what is beyond the buffer, too.
    scatter(ref, row, places, value, chosen & (places < last), last, interpret)


def _call(kernel, *args, grid, out, name, width, interpret: bool):
  shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out)
  return pl.pallas_call(
    functools.partial(kernel, interpret=interpret),
    grid=grid,
    out_shape=shapes,
    compiler_params=None if interpret else params(warps(width), 1),
    interpret=interpret,
    name=name,
  )(*args)


def _narrow_kernel(s_ref, o_ref, w_ref, count_ref, *, k, interpret):
  row = pl.program_id(0)
  scores = s_ref[row, :]
  chosen = search_mask(scores[None], k, one_row=True)[0]
  ids = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
  _append((o_ref, w_ref), row, 0, chosen, (ids, scores), interpret)
  count_ref[row] = jnp.sum(chosen.astype(jnp.int32))


def _bound_kernel(s_ref, o_ref, *, k, interpret):
  """A key that k scores of the row reach; 0 where fewer groups have one."""
  del interpret
  row = pl.program_id(0)
  _, rows, groups = s_ref.shape
  step = _ROWS_AT_ONCE if rows % _ROWS_AT_ONCE == 0 else 1

  def add(i, top):
    some = [s_ref[row, i * step + j, :] for j in range(step)]
    return functools.reduce(jnp.maximum, some, top)

  start = jnp.full((groups,), -jnp.inf)
  top = lax.fori_loop(0, rows // step, add, start)
  o_ref[row] = kth_key(sort_keys(top)[None], k)[0]


def _compare(scores, bound):
  """Keys of scores, and which of them reach the bound."""
  keys = sort_keys(scores)
  return keys, (keys >= bound) & (keys > 0)


def _reach(s_ref, row, at, bound):
  """A chunk's scores, their keys, and which of them reach the bound."""
  scores = s_ref[row, pl.ds(at, _CHUNK)]
  return scores, *_compare(scores, bound)


def _count_kernel(s_ref, bound_ref, o_ref, *, interpret):
  del interpret
  row, part = pl.program_id(0), pl.program_id(1)
  size = s_ref.shape[1] // o_ref.shape[1]
  bound = bound_ref[row]

  def add(i, total):
    _, _, reached = _reach(s_ref, row, part * size + i * _CHUNK, bound)
    return total + reached.astype(jnp.int32)

  start = jnp.zeros((_CHUNK,), jnp.int32)
  o_ref[row, part] = jnp.sum(lax.fori_loop(0, size // _CHUNK, add, start))


def _collect_kernel(s_ref, bound_ref, before_ref, *refs, chunk, interpret):
  """Writes a part's candidates; the last part says how many a row has."""
  positions_ref, scores_ref, count_ref = refs
  row, part = pl.program_id(0), pl.program_id(1)
  parts = before_ref.shape[1]
  size = s_ref.shape[1] // parts
  chunks = size // chunk
  bound = bound_ref[row]
  # The mask changes nothing but hides from Triton that the scores stand side
  # by side: loaded four a thread, all of them and all addresses would pass
  # through shared memory to the layout of the scattered stores.
  place = lax.broadcasted_iota(jnp.int32, (chunk,), 0) & (chunk - 1)
  ids_of = lambda i: part * size + i * chunk + place

  def add(i, carry):
    before, scores = carry
    # On its way while this chunk is counted; the last is read twice.
    ahead = s_ref[row, ids_of(jnp.minimum(i + 1, chunks - 1))]
    _, reached = _compare(scores, bound)
    out = (positions_ref, scores_ref)
    _append(out, row, before, reached, (ids_of(i), scores), interpret)
    return before + jnp.sum(reached.astype(jnp.int32)), ahead

  start = before_ref[row, part], s_ref[row, ids_of(0)]
  total, _ = lax.fori_loop(0, chunks, add, start)

  def last():
    count_ref[row] = total

  pl.when(part == parts - 1)(last)


def _among_kernel(s_ref, *refs, k, interpret):
  """Selects among a row's candidates, or in the row where there are more."""
  ids_ref, scores_ref, count_ref, o_ref, w_ref, found_ref = refs
  row = pl.program_id(0)
  room = ids_ref.shape[1] - 1
  count = count_ref[row]

  def candidates():
    place = lax.broadcasted_iota(jnp.int32, (room,), 0)
    scores = scores_ref[row, pl.ds(0, room)]
    scores = jnp.where(place < count, scores, -jnp.inf)
    ids = ids_ref[row, pl.ds(0, room)]
    chosen = search_mask(scores[None], k, one_row=True)[0]
    _append((o_ref, w_ref), row, 0, chosen, (ids, scores), interpret)
    found_ref[row] = jnp.sum(chosen.astype(jnp.int32))

  pl.when(count <= room)(candidates)
  in_place = lambda: _search_row(
    s_ref, row, k, (o_ref, w_ref), found_ref, interpret
  )
  pl.when(count > room)(in_place)


def _search_row(s_ref, row, k, out, found_ref, interpret):
  """The k largest of a row by passes over memory; more than k are valid."""
  chunks = s_ref.shape[1] // _CHUNK

  def count(bound):
    def add(i, total):
      return total + _reach(s_ref, row, i * _CHUNK, bound)[2].astype(jnp.int32)

    start = jnp.zeros((_CHUNK,), jnp.int32)
    return jnp.sum(lax.fori_loop(0, chunks, add, start))

  def bit(i, bound):
    tried = bound | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
    return jnp.where(count(tried) >= k, tried, bound)

  bound = lax.fori_loop(0, 32, bit, jnp.uint32(0))
  wanted = k - count(bound + 1)  # ties that are taken

  def write(i, carry):
    before, ties = carry
    at = i * _CHUNK
    scores, keys, reached = _reach(s_ref, row, at, bound)
    equal = (reached & (keys == bound)).astype(jnp.int32)
    tie = (equal == 1) & (ties + jnp.cumsum(equal) <= wanted)
    chosen = tie | (reached & (keys > bound))
    ids = at + lax.broadcasted_iota(jnp.int32, (_CHUNK,), 0)
    _append(out, row, before, chosen, (ids, scores), interpret)
    before = before + jnp.sum(chosen.astype(jnp.int32))
    return before, ties + jnp.sum(equal)

  lax.fori_loop(0, chunks, write, (jnp.int32(0), jnp.int32(0)))
  found_ref[row] = jnp.int32(k)


def lower_bound(
  scores: jax.Array, k: int, *, interpret: bool = False
) -> jax.Array:
  """A key that k scores of a row reach at least; 0 where fewer are valid.

  Args:
    scores: [T, S] `comparable` float32, S a multiple of twice the power of
      two at or above k.
    k: at least 1.
    interpret: run on any backend, slowly.

  Returns:
    [T] uint32, of `threshold.sort_keys`.
  """
  T, S = scores.shape
  groups = _groups(k)
  scores = scores.reshape(T, S // groups, groups)
  if T * 8 <= _PROGRAMS and S // groups >= max(T, _SHARED):
    # So few programs leave most of the card idle: XLA spreads the maxima over
    # all of it, 64 groups a block. Its blocks are short where rows are short.
    scores = jnp.max(scores, axis=1, keepdims=True)
  return _call(
    functools.partial(_bound_kernel, k=k),
    scores,
    grid=(T,),
    out=[((T,), jnp.uint32)],
    name='select_bound',
    width=groups,
    interpret=interpret,
  )[0]


def _wide(scores: jax.Array, k: int, interpret: bool):
  """As `_narrow_kernel`'s outputs, for rows of any width."""
  T, S = scores.shape
  groups = _groups(k)
  if groups > WIDEST:
    raise NotImplementedError(f'k={k} of {S} scores: at most {WIDEST // 2}')
  S = round_up(S, max(groups, _CHUNK))
  scores = pad(scores, S)
  call = functools.partial(_call, interpret=interpret)
  bound = lower_bound(scores, k, interpret=interpret)
  some = parts(T, S)
  before = jnp.zeros((T, 1), jnp.int32)
  if some > 1:
    count = call(
      _count_kernel,
      scores,
      bound,
      grid=(T, some),
      out=[((T, some), jnp.int32)],
      name='select_count',
      width=_CHUNK,
    )[0]
    before = jnp.cumsum(count, axis=1) - count
  chunk = _CHUNK if S % (2 * _CHUNK * some) else 2 * _CHUNK
  buffer = (T, groups + 1)
  candidates = call(
    functools.partial(_collect_kernel, chunk=chunk),
    scores,
    bound,
    before,
    grid=(T, some),
    out=[(buffer, jnp.int32), (buffer, jnp.float32), ((T,), jnp.int32)],
    name='select_collect',
    width=chunk,
  )
  return call(
    functools.partial(_among_kernel, k=k),
    scores,
    *candidates,
    grid=(T,),
    out=_outputs(T, k),
    name='select_among',
    width=groups,
  )


def _outputs(T: int, k: int):
  # The last column takes what an interpreted, masked store must not write.
  return [((T, k + 1), jnp.int32), ((T, k + 1), jnp.float32), ((T,), jnp.int32)]


def select(
  scores: jax.Array, k: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """The k largest scores of every row, ties to the lowest position.

  Args:
    scores: [T, S] `comparable` float32.
    k: at least 1; at most 8,192 where rows are wider than that.
    interpret: run on any backend, slowly.

  Returns:
    positions [T, k] int32 ascending, then -1; scores [T, k] float32, -inf
    beside -1.
  """
  T, S = scores.shape
  if S <= _NARROW:
    width = pl.next_power_of_2(S)
    positions, winners, count = _call(
      functools.partial(_narrow_kernel, k=k),
      pad(scores, width),
      grid=(T,),
      out=_outputs(T, k),
      name='select_narrow',
      width=width,
      interpret=interpret,
    )
  else:
    positions, winners, count = _wide(scores, k, interpret)
  found = lax.broadcasted_iota(jnp.int32, (T, k), 1) < count[:, None]
  return (
    jnp.where(found, positions[:, :k], -1),
    jnp.where(found, winners[:, :k], -jnp.inf),
  )
