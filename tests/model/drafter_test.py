"""The drafter against its written-out PyTorch reference, and its traps.

Seven steps, longer than top-k, sharing on and off; then each trap of
spec/model.md section 4 made on purpose and caught.
"""

import dataclasses
import functools
import tempfile
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from absl.testing import parameterized

from glm_jax import drafting, load_model
from glm_jax.cache import init_cache, make_rows
from glm_jax.drafting import DraftOptions
from glm_jax.model import trunk
from glm_jax.mtp import Mtp
from glm_jax.plan import LocalPlan
from glm_jax.sampling import sampling_params
from glm_jax.validation.random_checkpoint import write_random_checkpoint
from glm_jax.validation.torch_drafter import TorchDrafter
from glm_jax.validation.torch_side import TorchSide

K = 7
TOLERANCE = 2e-4
# Five layers, real sharing inside; index_topk 16 is far below the lengths.
SMALL = dict(
  num_hidden_layers=5,
  indexer_types=['full', 'full', 'shared', 'shared', 'shared'],
  index_topk=16,
  first_k_dense_replace=1,
)
LENGTHS = (70, 41)  # verified tokens of two sequences
FORCED = np.arange(3, 3 + 2 * K).reshape(2, K)


@functools.cache
def checkpoint():
  directory = tempfile.mkdtemp(prefix='drafter_test_')
  write_random_checkpoint(directory, 7, SMALL, mtp=True)
  side = TorchSide(directory)
  drafter = TorchDrafter(side._weights, side._hf, side.config)
  trunk = transformers.GlmMoeDsaForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation='eager'
  )
  for module in trunk.modules():
    if hasattr(module, 'q_a_layernorm'):
      module.q_a_layernorm.variance_epsilon = 1e-5
      module.kv_a_layernorm.variance_epsilon = 1e-5
  return directory, load_model(directory), (trunk, drafter)


@functools.cache
def trunk_hidden(b):
  """transformers' post-norm hidden states [n - 1, D] of a sequence."""
  trunk, _ = checkpoint()[2]
  ids = torch.tensor([tokens_of(b)[:-1]])
  with torch.no_grad():
    return trunk.model(input_ids=ids, use_cache=False).last_hidden_state[0]


def tokens_of(b):
  rng = np.random.default_rng(b)
  return rng.integers(0, 512, LENGTHS[b]).tolist()


def prefilled(model, cut=None):
  """Cache and hidden states after the trunk saw all but the newest tokens.

  The prompts go through in two chunks (`cut` rows first), as in serving.
  """
  table = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
  seq = np.concatenate([np.full(n - 1, b) for b, n in enumerate(LENGTHS)])
  pos = np.concatenate([np.arange(n - 1) for n in LENGTHS])
  ids = np.concatenate([tokens_of(b)[:-1] for b in range(2)])
  cache, hidden = init_cache(model.config, 8, dtype='f32'), []
  for part in (slice(0, cut), slice(cut, None)) if cut else (slice(None),):
    arrays = [jnp.asarray(a[part], jnp.int32) for a in (ids, seq, pos)]
    h, cache = _prefill(model, cache, table, *arrays)
    hidden.append(np.asarray(h))
  hidden = np.concatenate(hidden)
  last = np.cumsum([n - 1 for n in LENGTHS]) - 1
  return cache, table, hidden[last]


@jax.jit
def _prefill(model, cache, table, ids, seq, pos):
  rows = make_rows(seq, pos, table)
  hidden, cache, _ = trunk(model, ids, cache, rows)
  cache = drafting.prefill_rows(model, ids, hidden, cache, rows, LocalPlan())
  return hidden, cache


def draft_logits(options=DraftOptions(), cut=None, steps=K, slot_0=0.0):
  """Our draft logits [2, steps, V], with the drafted tokens given.

  `slot_0` fills the slot of each sequence that holds no drafter row.
  """
  _, model, _ = checkpoint()
  cache, table, hidden = prefilled(model, cut)
  first = cache.slots_per_layer * np.array([[5], [2]]) + [0, 4 * 64]
  cache = dataclasses.replace(
    cache,
    latents=cache.latents.at[first[0]].set(slot_0),
    index_keys=cache.index_keys.at[first[1]].set(slot_0),
  )
  newest = jnp.asarray([tokens_of(b)[-1] for b in range(2)], jnp.int32)
  drafts, _ = drafting.draft(
    model,
    newest[:, None],
    jnp.asarray(hidden)[:, None],
    cache,
    table,
    jnp.asarray(LENGTHS, jnp.int32) - 1,
    jnp.ones(2, jnp.int32),
    jnp.full(2, steps, jnp.int32),
    sampling_params(2),
    steps,
    options,
    LocalPlan(),
    jnp.asarray(FORCED[:, :steps], jnp.int32),
  )
  return np.asarray(drafts.logits)


@functools.cache
def reference_logits(share=True, advance=True):
  _, drafter = checkpoint()[2]
  return np.stack(
    [
      drafter(
        tokens_of(b),
        trunk_hidden(b),
        FORCED[b, : K - 1].tolist(),
        share=share,
        advance=advance,
      ).numpy()
      for b in range(2)
    ]
  )


def error(ours, theirs):
  return np.abs(ours - theirs).max()


class DrafterTest(parameterized.TestCase):
  @parameterized.parameters((True, True), (True, False), (False, True))
  def test_seven_steps_equal_the_reference(self, share, advance):
    options = DraftOptions(share, share, advance_position=advance)
    ours = draft_logits(options)
    assert error(ours, reference_logits(share, advance)) < TOLERANCE

  def test_chunked_prefill_changes_nothing(self):
    for cut in (30, sum(LENGTHS) - 2 - 30):
      assert error(draft_logits(cut=cut), reference_logits()) < TOLERANCE

  def test_known_fault_35_the_two_modes_differ_beyond_top_k(self):
    shared, unshared = reference_logits(True), reference_logits(False)
    assert error(shared[:, 0], unshared[:, 0]) < TOLERANCE
    assert error(shared[:, 1:], unshared[:, 1:]) > 100 * TOLERANCE
    assert error(draft_logits(), unshared) > 100 * TOLERANCE

  def test_known_fault_34_each_sequence_goes_on_from_its_own_row(self):
    """Pending rows of different counts: the last real one is the anchor."""
    _, model, _ = checkpoint()
    table = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    keep = (2, 4)  # rows of this round: one accepted draft, three
    before = [n - k for n, k in zip(LENGTHS, keep)]
    ids, seq, pos = [], [], []
    for b, n in enumerate(before):
      ids += tokens_of(b)[:n]
      seq += [b] * n
      pos += list(range(n))
    arrays = [jnp.asarray(a, jnp.int32) for a in (ids, seq, pos)]
    cache = init_cache(model.config, 8, dtype='f32')
    _, cache = _prefill(model, cache, table, *arrays)
    # The trunk's states of all verified tokens, as verification gives them.
    pending = np.zeros((2, 4, model.config.hidden_size), np.float32)
    tokens = np.full((2, 4), 9, np.int32)  # a rejected branch's token
    for b, (n, k) in enumerate(zip(before, keep)):
      pending[b, :k] = trunk_hidden(b)[n - 1 : n - 1 + k]
      tokens[b, :k] = tokens_of(b)[n : n + k]
    drafts, _ = drafting.draft(
      model,
      jnp.asarray(tokens),
      jnp.asarray(pending),
      cache,
      table,
      jnp.asarray(before, jnp.int32),
      jnp.asarray(keep, jnp.int32),
      jnp.full(2, 3, jnp.int32),
      sampling_params(2),
      3,
      forced=jnp.asarray(FORCED[:, :3], jnp.int32),
    )
    assert error(drafts.logits, reference_logits()[:, :3]) < TOLERANCE

  def test_known_fault_36_the_drafter_has_its_own_index(self):
    _, model, _ = checkpoint()
    kernel = model.mtp.block.indexer.wq_b.kernel
    saved = kernel[...]
    try:
      kernel[...] = jnp.zeros_like(saved)
      changed = draft_logits(steps=1)
    finally:
      kernel[...] = saved
    assert error(changed, reference_logits()[:, :1]) > 10 * TOLERANCE

  def test_an_own_head_is_used(self):
    """shared_head.head, where a checkpoint has one (known fault 41)."""
    _, model, _ = checkpoint()
    config = model.config
    own = dataclasses.replace(
      config, mtp=dataclasses.replace(config.mtp, own_head=True)
    )
    from glm_jax.model import abstract_model

    names = {
      jax.tree_util.keystr(p, simple=True, separator='.')
      for p, _ in jax.tree_util.tree_flatten_with_path(abstract_model(own))[0]
    }
    assert any(n.startswith('mtp.head.kernel') for n in names)
    hidden = jnp.ones((3, config.hidden_size))
    from glm_jax.layers import Init, Linear

    other = Linear(
      jax.random.key(5),
      config.hidden_size,
      config.vocab_size,
      ('vocab', 'embed'),
      Init(),
    )
    tied = drafting.draft_logits(model, hidden, LocalPlan())
    with mock.patch.object(drafting, 'drafter') as found:
      found.return_value.head = other
      ours = drafting.draft_logits(model, hidden, LocalPlan())
    want = hidden @ other.kernel[...].T
    np.testing.assert_allclose(ours, want, rtol=1e-4, atol=1e-6)
    assert error(ours, tied) > TOLERANCE


class MutationTest(parameterized.TestCase):
  """Each fault of the drafting contract made on purpose is caught."""

  def assert_caught(self, options=DraftOptions(), step=1):
    wrong = draft_logits(options, steps=step + 1)
    theirs = reference_logits()[:, : step + 1]
    assert error(wrong, theirs) > 10 * TOLERANCE

  def test_control(self):
    assert error(draft_logits(steps=2), reference_logits()[:, :2]) < TOLERANCE

  def test_known_fault_33_pre_norm_recycle(self):
    true_run, true_logits = drafting._run, drafting.draft_logits

    def raw(model, *args, **kwargs):
      mtp = model.mtp
      plain = types.SimpleNamespace(
        join=mtp.join,
        block=mtp.block,
        experts=mtp.experts,
        head=mtp.head,
        norm=lambda x: x,
      )
      proxy = types.SimpleNamespace(
        config=model.config, embed=model.embed, head=model.head, mtp=plain
      )
      return true_run(proxy, *args, **kwargs)

    def normed(model, hidden, plan):
      return true_logits(model, model.mtp.norm(hidden), plan)

    with mock.patch.object(drafting, '_run', raw):
      with mock.patch.object(drafting, 'draft_logits', normed):
        wrong = draft_logits(steps=2)
    theirs = reference_logits()
    assert error(wrong[:, :1], theirs[:, :1]) < TOLERANCE  # step 0 is right
    assert error(wrong[:, 1:2], theirs[:, 1:2]) > 10 * TOLERANCE

  def test_hidden_first_in_eh_proj(self):
    def swapped(self, embedding, hidden):
      halves = [self.hidden_norm(hidden), self.embed_norm(embedding)]
      return self.project(jnp.concatenate(halves, axis=-1))

    with mock.patch.object(Mtp, 'join', swapped):
      self.assert_caught(step=0)

  def test_the_trunks_selection_is_reused(self):
    """A selection of another layer's index keys, here layer 0's."""
    true_select = LocalPlan.select

    def trunks(self, q, w, cache, rows, index_slot, k, *, first=0):
      slot = 0 if first == 1 else index_slot
      return true_select(self, q, w, cache, rows, slot, k, first=first)

    with mock.patch.object(LocalPlan, 'select', trunks):
      self.assert_caught(step=1)

  def test_known_fault_34_the_first_row_is_taken_for_the_newest(self):
    def first(a, newest):
      B = newest.shape[0]
      return a.reshape(B, -1, *a.shape[1:])[:, 0]

    with mock.patch.object(drafting, 'newest_rows', first):
      with self.assertRaises(AssertionError):
        DrafterTest(
          'test_known_fault_34_each_sequence_goes_on_from_its_own_row'
        ).test_known_fault_34_each_sequence_goes_on_from_its_own_row()

  def test_drafted_rows_are_left_readable(self):
    """Later steps write rows and index them, as without sharing."""
    self.assert_caught(DraftOptions(share_index=False, share_kv=False))

  def test_slot_0_is_read(self):
    true_context = drafting.StepContext

    def from_zero(*args, **kwargs):
      return true_context(*args, **{**kwargs, 'first': 0})

    theirs = reference_logits()[:, :1]
    for fill in (np.nan, 9.0, -9.0):
      assert error(draft_logits(steps=1, slot_0=fill), theirs) < TOLERANCE
    with mock.patch.object(drafting, 'StepContext', from_zero):
      wrong = [draft_logits(steps=1, slot_0=fill) for fill in (9.0, -9.0)]
    # A head weight may be negative: one of the two signs scores high.
    assert max(error(w, theirs) for w in wrong) > 10 * TOLERANCE
