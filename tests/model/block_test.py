"""Layers, stages, chunks and buckets of T1 (known_faults.md A and C).

`row_tile` mode promises bits (design section 4, promise b): there, rows are
compared bit by bit whatever else the step holds.
"""

from __future__ import annotations

import functools

import compare
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import oracle
from model.paged import Runner

from glm_jax import forward, init_cache, load_model
from glm_jax.block import StepContext
from glm_jax.cache import make_rows
from glm_jax.layer_plan import layer_plan
from glm_jax.model import (
  abstract_model,
  head,
  layer_block,
  layer_ids,
  run_layers,
  trunk,
)
from glm_jax.plan import LocalPlan
from glm_jax.published_config import config_from_published
from glm_jax.rope import rope_tables

TILED = LocalPlan(row_tile=8)
LENGTH = 48


@functools.cache
def t1(**changes):
  return load_model(oracle.checkpoint(0, **changes))


@functools.cache
def ids(count: int = LENGTH, seed: int = 0) -> tuple[int, ...]:
  return tuple(np.random.default_rng(seed).integers(3, 97, count).tolist())


def start(model, tokens, plan, capture=()):
  """Embeddings, a cache and the context of one sequence's rows."""
  T = len(tokens)
  pos = jnp.arange(T, dtype=jnp.int32)
  pages = -(-T // 64)
  table = jnp.arange(pages, dtype=jnp.int32)[None]
  rows = make_rows(jnp.zeros(T, jnp.int32), pos, table)
  c = model.config
  cos, sin = rope_tables(pos, c.mla.qk_rope_head_dim, c.rope_theta)
  x = model.embed[...][jnp.asarray(tokens)]
  cache = init_cache(c, pages, dtype='f32')
  return x, cache, StepContext(rows, cos, sin, plan, capture)


def test_a_shared_layer_alone_raises():
  # Known fault 4.
  model = t1()
  x, cache, step = start(model, ids(), LocalPlan())
  with pytest.raises(ValueError, match='needs the selection'):
    layer_block(model, 4)(
      x, cache, None, layer_ids(layer_plan(model.config), 4), None, step
    )


def test_every_layer_attends_to_topk_keys():
  # Known fault 5: layers 0-2 own an indexer, they are not dense.
  model, counts = t1(), []

  class Counting(LocalPlan):
    def attend(self, q, cache, selection, layer, scale):
      counts.append(np.asarray((selection.slots >= 0).sum(axis=1)))
      return super().attend(q, cache, selection, layer, scale)

  x, cache, step = start(model, ids(), Counting(implementation='reference'))
  run_layers(model, x, cache, None, step, range(8))
  assert len(counts) == 8
  for count in counts:
    np.testing.assert_array_equal(count, np.minimum(np.arange(48) + 1, 8))


def stage(model, layers, plan, capture=()):
  """A jitted stage: (x, cache, selection) to the same."""
  _, _, context = start(model, ids(), plan, capture)

  @jax.jit
  def run(model, x, cache, selection):
    return run_layers(model, x, cache, selection, context, layers)

  return functools.partial(run, model)


def test_stages_equal_the_unsplit_run():
  # Known fault 6: layer 4 is shared, its source is layer 2.
  model, cut = t1(), 4
  x, cache, _ = start(model, ids(), TILED)
  whole_x, whole_cache, _, _ = stage(model, range(8), TILED)(x, cache, None)
  x, cache, selection, _ = stage(model, range(cut), TILED)(x, cache, None)
  assert selection.positions.dtype == selection.slots.dtype == jnp.int32
  x, cache, selection, _ = stage(model, range(cut, 8), TILED)(
    x, cache, selection
  )
  assert selection is None
  compare.assert_bit_equal(x, whole_x, name='hidden')
  for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(whole_cache)):
    compare.assert_bit_equal(a, b, name='cache')


def test_nothing_is_carried_where_nobody_needs_it():
  # Known fault 7: the next layer is full, or there is none.
  model = t1(layers='FFFF')
  x, cache, _ = start(model, ids(), LocalPlan())
  for layers in (range(2), range(4)):
    out = jax.eval_shape(stage(model, layers, LocalPlan()), x, cache, None)
    assert out[2] is None
  assert jnp.asarray(1_048_575, jnp.int32) == 1_048_575


def test_scanned_groups_equal_unrolled_layers():
  model = t1(layers='FFSFS', first_k_dense_replace=1)
  plan = layer_plan(model.config)
  assert (plan.prologue, plan.group_size, plan.num_groups) == (1, 2, 2)
  names = ('selected', 'hidden')
  x, cache, context = start(model, ids(), TILED, names)
  tokens = jnp.asarray(ids())

  @jax.jit
  def scanned(model, cache):
    return trunk(model, tokens, cache, context.rows, TILED, capture=names)

  scanned_x, scanned_cache, scanned_seen = scanned(model, cache)
  x, cache, _, seen = stage(model, range(5), TILED, names)(x, cache, None)
  compare.assert_bit_equal(
    scanned_x, jax.jit(lambda x: TILED.rows(model.norm, x))(x), name='hidden'
  )
  compare.assert_bit_equal(scanned_cache.latents, cache.latents, name='latents')
  for name in names:
    compare.assert_bit_equal(scanned_seen[name], seen[name], name=name)


def chunked(model, chunks, plan, rows, tokens=None):
  """Logits and selections of T1's tokens, fed in chunks of given lengths."""
  tokens = list(tokens or ids())
  pages = [list(range(-(-len(tokens) // 64)))]
  runner = cached_runner(model, rows, plan, len(pages[0]))
  runner.reset(pages)
  at = 0
  for chunk in chunks:
    runner.run([(0, token) for token in tokens[at : at + chunk]])
    at += chunk
  assert at == len(tokens)
  return runner.gathered('logits', 0), runner.gathered('selected', 0)


@functools.cache
def cached_runner(model, rows, plan, pages):
  return Runner(
    model, [list(range(pages))], rows=rows, capture=('selected',), plan=plan
  )


CHUNKS = {
  '20+28': (20, 28),
  '7+1+40': (7, 1, 40),
  '48x1': (1,) * 48,
  '47+1': (47, 1),
  'prefix 16, 32 new': (16, 32),
}


@pytest.mark.parametrize('chunks', CHUNKS.values(), ids=CHUNKS.keys())
def test_chunks_change_no_bit_with_row_tiles(chunks):
  # Known fault 26. Buckets of 8, 24 and 48 rows, other executables each.
  model = t1()
  logits, selected = chunked(model, (48,), TILED, 48)
  bucket = next(b for b in (8, 48) if b >= max(chunks))
  other_logits, other_selected = chunked(model, chunks, TILED, bucket)
  compare.assert_bit_equal(other_selected, selected, name='selected')
  compare.assert_bit_equal(other_logits, logits, name='logits')


@pytest.mark.parametrize('chunks', CHUNKS.values(), ids=CHUNKS.keys())
def test_chunks_agree_without_row_tiles(chunks):
  model, plan = t1(), LocalPlan()
  logits, selected = chunked(model, (48,), plan, 48)
  bucket = next(b for b in (8, 48) if b >= max(chunks))
  other_logits, other_selected = chunked(model, chunks, plan, bucket)
  np.testing.assert_array_equal(other_selected, selected)
  scale = float(np.abs(logits).max())
  np.testing.assert_allclose(other_logits, logits, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize('length', [63, 64, 65])
def test_page_boundaries(length):
  model, tokens = t1(), ids(70, seed=1)
  logits, selected = chunked(model, (70,), TILED, 72, tokens)
  # The rest comes token by token after a chunk that ends at the boundary.
  chunks = (length,) + (1,) * (70 - length)
  other_logits, other_selected = chunked(model, chunks, TILED, 72, tokens)
  compare.assert_bit_equal(other_selected, selected, name='selected')
  compare.assert_bit_equal(other_logits, logits, name='logits')


def test_batches_of_unequal_lengths():
  model = t1(layers='FFS')
  sequences = [list(ids(5, 2)), list(ids(48)), list(ids(66, 3))]
  pages = [[3], [0], [4, 1]]
  runner = Runner(
    model, pages, rows=48, plan=TILED, capture=('selected',), num_pages=5
  )
  runner.feed(sequences)
  together = [
    {name: runner.gathered(name, s) for name in ('logits', 'selected')}
    for s in range(3)
  ]
  for s, tokens in enumerate(sequences):
    runner.reset(pages)
    runner.feed([tokens if i == s else [] for i in range(3)])
    for name, expected in together[s].items():
      compare.assert_bit_equal(runner.gathered(name, s), expected, name=name)


def test_padding_rows_leave_live_sequences_alone():
  # Known fault 29: padding rows of a bucket name sequence 0, a live one.
  model = t1(layers='FFS')
  results = []
  for rows in (3, 8):
    runner = Runner(
      model, [[1], [2], [0]], rows=rows, plan=TILED, capture=('selected',)
    )
    runner.feed([list(ids(12, s)) for s in range(3)])
    runner.run([(0, 5), (1, 6), (2, 7)])
    results.append(runner)
  exact, padded = results
  for s in range(3):
    for name in ('selected', 'logits'):
      compare.assert_bit_equal(
        padded.gathered(name, s), exact.gathered(name, s), name=name
      )
  for a, b in zip(jax.tree.leaves(padded.cache), jax.tree.leaves(exact.cache)):
    compare.assert_bit_equal(a, b, name='cache')


def test_a_padding_mask_is_never_read_off_the_ids():
  # Known fault 50: pad == eos == 1; the 1 in the middle is a real token.
  model = t1(layers='FFS')
  assert model.config.pad_token_id == model.config.eos_token_ids[0] == 1
  run = jax.jit(forward, static_argnames=('capture', 'plan'))
  padded = run(
    model,
    [[5, 1, 7, 1, 1]],
    mask=[[True, True, True, False, False]],
    capture=('selected',),
    plan=TILED,
  )
  bare = run(model, [[5, 1, 7]], capture=('selected',), plan=TILED)
  compare.assert_bit_equal(padded.logits[:, :3], bare.logits, name='logits')
  selected = np.asarray(padded.captured['selected'])[:, 0]
  assert (selected[:, 2, :3] == [0, 1, 2]).all()
  assert (selected[:, 3:] == -1).all(), 'padding sees nothing'
  other = run(model, [[5, 9, 7]], capture=('selected',), plan=TILED)
  assert np.abs(other.logits[0, 2] - bare.logits[0, 2]).max() > 1e-2


def test_two_runs_of_one_executable_are_equal():
  model = t1()
  first = chunked(model, (48,), LocalPlan(), 48)
  second = chunked(model, (48,), LocalPlan(), 48)
  for a, b in zip(first, second):
    compare.assert_bit_equal(a, b, name='second run')


def test_temporaries_do_not_grow_with_the_context():
  # Known fault 30: a step of 64 rows with a table for 128K and for 1M.
  path = oracle.checkpoint(0, layers='FS')
  config = config_from_published(oracle.published(path))
  model = abstract_model(config)
  plan = LocalPlan(block_bytes=16 << 20)

  def temporaries(context: int) -> int:
    pages = context // 64
    cache = jax.eval_shape(lambda: init_cache(config, pages, dtype='f32'))
    row = jax.ShapeDtypeStruct((64,), jnp.int32)
    table = jax.ShapeDtypeStruct((1, pages), jnp.int32)

    def step(model, tokens, seq, pos, table, cache):
      rows = make_rows(seq, pos, table)
      hidden, cache, _ = trunk(model, tokens, cache, rows, plan)
      return head(model, hidden, plan), cache

    lowered = jax.jit(step, donate_argnums=5).lower(
      model, row, row, row, table, cache
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes

  small, large = temporaries(1 << 17), temporaries(1 << 20)
  print(f'temporaries: {small / 2**20:.1f} MiB, {large / 2**20:.1f} MiB')
  assert large < 64 * (1 << 20) * 4 / 2, 'the scores of half the rows'
