"""Each known trap, sprung on purpose: validation must say where.

One function at a time is replaced by what other ports got wrong, on T1 of
known_faults.md, against a reference recorded by transformers. Where nothing
is pruned (index_topk 64) a wrong selection is invisible: that is the trap.
"""

from __future__ import annotations

import functools
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model import oracle

import glm_jax.cache
import glm_jax.indexer
from glm_jax.checkpoints.published import PublishedCheckpoint
from glm_jax.config import MlaConfig
from glm_jax.indexer import Indexer
from glm_jax.layers import Init
from glm_jax.mla import Mla
from glm_jax.moe import Router
from glm_jax.plan import LocalPlan
from glm_jax.validation import jax_side, validate
from pallas_kernels.indexer_scores import xla as scores_xla
from pallas_kernels.topk_gather_attention import AVAILABLE as ATTENTION

quiet = functools.partial(validate, log=lambda line: None)
UNSEEN = 'a selection must not matter while everything is selected'


@functools.cache
def reference(edit=None, topk: int = 8, tokens: int = 48):
  """A checkpoint, perhaps edited, its ids, and transformers' record."""
  path = oracle.checkpoint(0, index_topk=topk)
  root = tempfile.mkdtemp(dir=os.path.dirname(path))
  if edit is not None:
    path = oracle.edited(path, os.path.join(root, 'checkpoint'), edit)
  ids = np.random.default_rng(0).integers(0, 97, tokens)
  record = os.path.join(root, 'record')
  quiet(path, ids, framework='torch', record=record)
  return path, ids, record


@pytest.fixture
def check(monkeypatch):
  """Validates with an executable traced after the function was replaced."""

  def check(*args, layers=None, **kwargs):
    path, ids, record = reference(*args, **kwargs)
    monkeypatch.setattr(jax_side, '_step', jax_side.compile_step())
    return quiet(path, ids, against=record, layers=layers)

  return check


def parted(result) -> tuple[int, str]:
  assert not result.passed
  return result.parted.layer, result.parted.tensor


def wk_tiny(name, tensor):
  """Index keys with a variance of about 1e-6 before their norm."""
  return tensor * 6e-4 if name.endswith('indexer.wk.weight') else tensor


def bias_large(name, tensor):
  """Correction biases around 8, where bfloat16 counts in sixteenths."""
  return tensor + 8 if name.endswith('correction_bias') else tensor


def test_unmutated_passes(check):
  result = check()
  assert result.passed and result.selected_ties == 0
  assert [r.layer for r in result.layers] == list(range(8))


@pytest.mark.parametrize(
  'arguments',
  [(None, 64, 64), (wk_tiny,), (bias_large,)],
  ids=['nothing pruned', 'tiny wk', 'large bias'],
)
def test_unmutated_passes_where_traps_are_laid(check, arguments):
  assert check(*arguments, layers=[0, 3]).passed


def half_split(x, cos, sin):
  half = cos.shape[-1]
  shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (half,)
  cos, sin = cos.reshape(shape), sin.reshape(shape)
  a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def test_half_split_indexer_rope(check, monkeypatch):
  monkeypatch.setattr(glm_jax.indexer, 'apply_rope', half_split)
  assert parted(check(layers=[0])) == (0, 'selected')
  assert check(topk=64, layers=[0]).passed, UNSEEN


def test_no_relu(check, monkeypatch):
  scores = scores_xla.indexer_scores

  def without_relu(q, *args, **kwargs):
    # relu(x) - relu(-x) is x.
    both = scores(q, *args, **kwargs), scores(-q, *args, **kwargs)
    return jnp.where(both[0] > -jnp.inf, both[0] - both[1], -jnp.inf)

  monkeypatch.setattr(scores_xla, 'indexer_scores', without_relu)
  assert parted(check(layers=[0])) == (0, 'selected')
  assert check(topk=64, layers=[0]).passed, UNSEEN


def test_key_norm_epsilon(check, monkeypatch):
  norm = glm_jax.indexer.layer_norm
  monkeypatch.setattr(
    glm_jax.indexer,
    'layer_norm',
    lambda x, weight, bias, eps: norm(x, weight, bias, 1e-5),
  )
  assert parted(check(wk_tiny, layers=[0])) == (0, 'selected')


def test_unnormed_query_latent(check, monkeypatch):
  project = Mla.project

  def unnormed(self, x, cos, sin):
    return self.q_a(x), *project(self, x, cos, sin)[1:]

  monkeypatch.setattr(Mla, 'project', unnormed)
  assert parted(check(layers=[0])) == (0, 'selected')


def test_shared_layers_run_an_indexer_of_their_own(check, monkeypatch):
  load_block = PublishedCheckpoint.load_block

  def with_indexer(self, layer, **kwargs):
    block, experts = load_block(self, layer, **kwargs)
    if block.indexer is None:
      init = Init(std=self.config.initializer_range)
      own = Indexer(jax.random.key(layer), self.config, init)
      block.indexer = nnx.data(own)
    return block, experts

  monkeypatch.setattr(PublishedCheckpoint, 'load_block', with_indexer)
  assert parted(check(layers=[0, 3])) == (3, 'attention')
  assert check(topk=64, layers=[0, 3]).passed, UNSEEN


def test_dense_layers(check, monkeypatch):
  def everything(self, q, w, cache, rows, index_slot, k, **kwargs):
    every = jnp.arange(rows.page_table.shape[1] * 64, dtype=jnp.int32)
    seen = jnp.where(every <= rows.pos[:, None], every, -1)
    return self.selection(rows, seen)

  monkeypatch.setattr(LocalPlan, 'select', everything)
  result = check()
  assert parted(result) == (0, 'selected')
  assert [r.layer for r in result.layers if r.parted == 'selected'] == [
    *(0, 1, 2, 6)
  ]


def with_bias(change):
  """`Router.__call__` that sees another correction bias."""
  route = Router.__call__

  def call(self, x):
    kept = self.correction_bias[...]
    self.correction_bias[...] = change(kept)
    out = route(self, x)
    self.correction_bias[...] = kept
    return out

  return call


def test_correction_bias_ignored(check, monkeypatch):
  monkeypatch.setattr(Router, '__call__', with_bias(jnp.zeros_like))
  assert parted(check(layers=[0, 3])) == (3, 'experts')


def test_correction_bias_in_bfloat16(check, monkeypatch):
  rounded = lambda b: b.astype(jnp.bfloat16).astype(jnp.float32)
  monkeypatch.setattr(Router, '__call__', with_bias(rounded))
  assert parted(check(bias_large, layers=[0, 3])) == (3, 'experts')


def test_softmax_scale_of_the_latent(check, monkeypatch):
  monkeypatch.setattr(MlaConfig, 'scale', property(lambda c: c.row_dim**-0.5))
  assert parted(check(layers=[0])) == (0, 'attention')


def test_minus_one_wraps_when_written(check, monkeypatch):
  # The last slot of the pool is the last of 64 tokens'; all are selected.
  monkeypatch.setattr(
    glm_jax.cache,
    '_pool_ids',
    lambda cache, layer, slots, size: slots + layer * cache.slots_per_layer,
  )
  layer, tensor = parted(check(topk=64, tokens=64, layers=[0]))
  assert layer == 0 and tensor in ('selected', 'attention')


def test_minus_one_wraps_when_read(check, monkeypatch):
  def unmasked(table, seq, pos):
    return table[jnp.maximum(seq, 0), pos // 64] * 64 + pos % 64

  monkeypatch.setattr(glm_jax.cache, '_slots', unmasked)
  layer, tensor = parted(check(layers=[0]))
  assert layer == 0 and tensor in ('selected', 'attention')


def test_zero_times_nan(check, monkeypatch):
  def masks_weights_only(
    q, rows, row_scales, slots, *, scale, latent_width, block_bytes
  ):
    gathered = rows[jnp.maximum(slots, 0)][..., : q.shape[-1]]
    logits = jnp.einsum('tnd,tkd->tnk', q, gathered) * scale
    logits = jnp.where(slots[:, None] >= 0, logits, -jnp.inf)
    p = jax.nn.softmax(logits, axis=-1)
    out = jnp.einsum('tnk,tkr->tnr', p, gathered[..., :latent_width])
    return out, jax.nn.logsumexp(logits, axis=-1)

  monkeypatch.setitem(ATTENTION, 'xla', masks_weights_only)
  result = check(layers=[0])
  assert parted(result) == (0, 'attention')
  assert result.layers[0].errors['attention'] == np.inf
