"""Speculative decoding changes no token, and the drafter is the published one.

CI runs a part of the table of checkpoints; `make test-long` runs all of it.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from small_models import (
  LENGTHS,
  TILED,
  make_model,
  prompts,
  small_config,
  small_model,
)

from glm_jax import cache as cache_lib
from glm_jax import drafting, presets
from glm_jax.decoding import decode_step, start
from glm_jax.drafting import DraftOptions
from glm_jax.generation import generate
from glm_jax.layer_plan import layer_plan
from glm_jax.model import init_model
from glm_jax.plan import LocalPlan
from glm_jax.sampling import sampling_params
from glm_jax.speculative import speculative_step, start_drafting


def begin(model, texts, new, K, plan=TILED, chunk=32, **options):
  params = sampling_params(len(texts), **options)
  return start(
    model, texts, new, params, plan, prefill_chunk=chunk, num_drafts=K
  )


@functools.cache
def plain(seed, lengths, new=12):
  """Tokens [B, new] and logits [B, new, V] without drafting."""
  model = small_model(seed)
  state = begin(model, prompts(seed, lengths), new, 0)
  tokens, logits = [], []
  for _ in range(new):
    state, step = decode_step(model, state, plan=TILED)
    tokens.append(np.asarray(state.last_token))
    logits.append(np.asarray(step))
  return np.stack(tokens, 1), np.stack(logits, 1)


def drafted(seed, lengths, K, force, new=12, plan=TILED):
  """The same through rounds; `force(b, position)` proposes tokens."""
  model = small_model(seed)
  texts = prompts(seed, lengths)
  B = len(texts)
  state = start_drafting(model, begin(model, texts, new, K, plan), K)
  tokens, logits = [[] for _ in texts], [[] for _ in texts]
  accepted = 0
  while not np.all(state.decode.done):
    forced = np.full((B, K), -1, np.int32)
    for b, j in itertools.product(range(B), range(K)):
      forced[b, j] = force(b, len(tokens[b]) + j)
    state, done = speculative_step(model, state, jnp.asarray(forced), plan=plan)
    count = np.asarray(done.count)
    accepted += int(np.sum(done.accepted))
    for b in range(B):
      tokens[b] += np.asarray(done.tokens[b, : count[b]]).tolist()
      logits[b] += list(np.asarray(done.logits[b, : count[b]]))
  return np.array(tokens), np.array(logits), accepted


def forcing(kind, right):
  """Proposals: the drafter's own, all right, all wrong, or in turns."""
  new = right.shape[1]

  def force(b, i):
    token = int(right[b, min(i, new - 1)])
    wrong = (token + 1) % 96
    return {
      'own': -1,
      'right': token,
      'wrong': wrong,
      'alternating': token if (i + b) % 3 else wrong,
    }[kind]

  return force


def check_lossless(seed, K, lengths, kind):
  tokens, logits = plain(seed, lengths)
  ours, our_logits, accepted = drafted(seed, lengths, K, forcing(kind, tokens))
  np.testing.assert_array_equal(ours, tokens)
  np.testing.assert_array_equal(our_logits, logits)
  if kind == 'right':
    # Whole rounds of 12 tokens; a one-token prompt's first round drafts none.
    assert accepted >= len(lengths) * (12 // (K + 1)) * K - K
  if kind == 'wrong':
    assert accepted == 0


class LosslessTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, 3, LENGTHS, 'own'),
    (0, 3, LENGTHS, 'right'),
    (0, 3, LENGTHS, 'wrong'),
    (0, 3, LENGTHS, 'alternating'),
    (1, 7, LENGTHS, 'alternating'),
    (0, 1, LENGTHS[2:3], 'alternating'),
  )
  def test_known_fault_38_greedy_tokens_and_logits_are_bit_equal(
    self, seed, K, lengths, kind
  ):
    check_lossless(seed, K, lengths, kind)

  @parameterized.product(
    seed=tuple(range(6)),
    K=(1, 3, 5, 7),
    lengths=(LENGTHS, LENGTHS[2:3]),
    kind=('own', 'right', 'wrong', 'alternating'),
  )
  @pytest.mark.long
  def test_all_checkpoints_and_draft_counts(self, seed, K, lengths, kind):
    check_lossless(seed, K, lengths, kind)

  @parameterized.parameters(
    (DraftOptions(share_index=False, share_kv=False), True),
  )
  def test_other_ways_to_draft_are_lossless_too(self, options, adaptive):
    self._check_options(options, adaptive)

  @parameterized.parameters(
    (DraftOptions(advance_position=False), False),
    (DraftOptions(greedy=True), True),
    (DraftOptions(False, False, advance_position=False), False),
  )
  @pytest.mark.long
  def test_more_ways_to_draft(self, options, adaptive):
    self._check_options(options, adaptive)

  def _check_options(self, options, adaptive):
    tokens, _ = plain(0, LENGTHS)
    got = generate(
      small_model(0),
      prompts(0, LENGTHS),
      max_new_tokens=12,
      num_speculative_tokens=3,
      draft_options=options,
      adaptive_drafts=adaptive,
      prefill_chunk=32,
      plan=TILED,
    )
    assert got.tokens == tokens.tolist()

  def test_bfloat16_by_teacher_forcing(self):
    """Each greedy token is the best of plain decoding on the same prefix."""
    model = make_model(small_config(0, dtype='bfloat16'), 1)
    texts = prompts(1, LENGTHS)
    got = np.array(
      generate(model, texts, max_new_tokens=8, num_speculative_tokens=3).tokens
    )
    state = begin(model, texts, 8, 0, LocalPlan(), chunk=512)
    for i in range(8):
      state, logits = decode_step(model, state, plan=LocalPlan())
      logits = np.asarray(logits)
      chosen = logits[np.arange(len(texts)), got[:, i]]
      # Two bf16 roundings of a logit of about 4: 2 x 4 x 2^-9.
      np.testing.assert_array_less(logits.max(-1) - chosen, 1.6e-2)
      state = dataclasses.replace(state, last_token=jnp.asarray(got[:, i]))

  def test_eos_inside_an_accepted_draft_ends_there(self):
    seed, K = 0, 3
    tokens, _ = plain(seed, LENGTHS)
    model, texts = small_model(seed), prompts(seed, LENGTHS)
    eos = int(tokens[0, 1])
    first = int(np.argmax(tokens[0] == eos))
    decode = begin(model, texts, 12, K)
    decode = dataclasses.replace(decode, eos=jnp.asarray([eos], jnp.int32))
    state = start_drafting(model, decode, K)
    state, done = speculative_step(
      model, state, jnp.asarray(tokens[:, :K]), plan=TILED
    )
    assert int(done.accepted[0]) > first  # more stood, and were dropped
    assert int(done.count[0]) == first + 1
    assert bool(state.decode.done[0])
    got = generate(
      model,
      texts,
      max_new_tokens=12,
      num_speculative_tokens=K,
      eos_token_ids=(eos,),
      prefill_chunk=32,
      plan=TILED,
    )
    assert got.tokens[0] == tokens[0, : first + 1].tolist()

  def test_limits_are_exact(self):
    tokens, _ = plain(0, LENGTHS)
    for new in (1, 2, 5):
      out = generate(
        small_model(0),
        prompts(0, LENGTHS),
        max_new_tokens=new,
        num_speculative_tokens=3,
        prefill_chunk=32,
        plan=TILED,
      )
      assert out.tokens == tokens[:, :new].tolist()

  @parameterized.parameters(-1, 9)
  def test_draft_counts_out_of_range(self, K):
    with self.assertRaisesRegex(ValueError, f'num_speculative_tokens={K}'):
      generate(small_model(0), [[1]], num_speculative_tokens=K)

  def test_no_drafter(self):
    config = small_config(0)
    config = dataclasses.replace(
      config, mtp=dataclasses.replace(config.mtp, num_layers=0)
    )
    model = init_model(config, jax.random.key(0))
    with self.assertRaisesRegex(ValueError, 'no MTP layer'):
      generate(model, [[1]], num_speculative_tokens=1)

  def test_half_shared_is_an_error(self):
    with self.assertRaisesRegex(ValueError, 'share both or neither'):
      DraftOptions(share_index=True, share_kv=False)


class CacheTest(parameterized.TestCase):
  """The cache is a pure function of the accepted tokens."""

  @parameterized.parameters('right', 'wrong', 'alternating')
  def test_known_fault_37_rows_equal_a_fresh_prefill(self, kind):
    seed, K, new = 0, 3, 12
    model, texts = small_model(seed), prompts(seed, LENGTHS)
    tokens, _ = plain(seed, LENGTHS)
    force = forcing(kind, tokens)
    state = start_drafting(model, begin(model, texts, new, K), K)
    done = [0] * len(texts)
    for _ in range(3):
      forced = np.array(
        [[force(b, n + j) for j in range(K)] for b, n in enumerate(done)]
      )
      state, step = speculative_step(
        model, state, jnp.asarray(forced, jnp.int32), plan=TILED
      )
      done = [n + int(c) for n, c in zip(done, step.count)]
    # What a fresh prefill of the accepted tokens leaves, in other chunks.
    longer = [t + tokens[b, :n].tolist() for b, (t, n) in
              enumerate(zip(texts, done))]  # fmt: skip
    fresh = begin(model, longer, new, K, chunk=24)
    self._check_equal(model, state, fresh)

  def _check_equal(self, model, state, fresh):
    layers = layer_plan(model.config)
    pages = lambda s, b: s.page_table[b]
    for b, length in enumerate(np.asarray(state.decode.lengths)):
      drafted_to = int(state.pending_position[b])  # the next is pending
      for slot in range(layers.num_latent_slots):
        drafter = slot == layers.num_layers
        low, high = (1, drafted_to) if drafter else (0, int(length) - 1)
        at = np.arange(low, high)
        rows = [
          cache_lib.read_rows(
            s.cache, slot, np.asarray(pages(s, b))[at // 64] * 64 + at % 64
          )
          for s in (state.decode, fresh)
        ]
        np.testing.assert_array_equal(*rows, f'{b=} {slot=}')
      for slot in range(layers.num_index_slots):
        drafter = slot == layers.num_index_slots - 1
        low, high = (1, drafted_to) if drafter else (0, int(length) - 1)
        at = np.arange(low, high)
        keys = [
          cache_lib.read_index_keys(
            s.cache, slot, np.asarray(pages(s, b))[at // 64] * 64 + at % 64
          )
          for s in (state.decode, fresh)
        ]
        np.testing.assert_array_equal(*keys, f'{b=} {slot=}')

  def test_nothing_beyond_the_accepted_length_is_ever_read(self):
    seed, K = 0, 3
    model, texts = small_model(seed), prompts(seed, LENGTHS)
    tokens, logits = plain(seed, LENGTHS)
    force = forcing('alternating', tokens)
    state = start_drafting(model, begin(model, texts, 12, K), K)
    got = [[] for _ in texts]
    for _ in range(4):
      forced = [[force(b, len(t) + j) for j in range(K)]
                for b, t in enumerate(got)]  # fmt: skip
      state = poison(model, state)
      state, step = speculative_step(
        model, state, jnp.asarray(forced, jnp.int32), plan=TILED
      )
      for b, c in enumerate(np.asarray(step.count)):
        want = logits[b, len(got[b]) : len(got[b]) + c]
        np.testing.assert_array_equal(step.logits[b, :c], want)
        got[b] += np.asarray(step.tokens[b, :c]).tolist()
    assert min(map(len, got)) >= 4


def poison(model, state):
  """Fills every row that is not an accepted one with NaN."""
  decode, layers = state.decode, layer_plan(model.config)
  cache = decode.cache
  per = cache.slots_per_layer
  keep = np.zeros((layers.num_latent_slots, per), bool)
  table = np.asarray(decode.page_table)
  for b, length in enumerate(np.asarray(decode.lengths)):
    ids = lambda at, b=b: table[b][at // 64] * 64 + at % 64
    keep[:-1, ids(np.arange(int(length) - 1))] = True
    keep[-1, ids(np.arange(1, int(state.pending_position[b])))] = True
  full = [*layers.full_layers, layers.num_layers]
  fill = lambda pool, kept: jnp.where(
    jnp.asarray(kept.reshape(-1))[:, None], pool, jnp.nan
  )
  cache = dataclasses.replace(
    cache,
    latents=fill(cache.latents, keep),
    index_keys=fill(cache.index_keys, keep[full]),
  )
  return dataclasses.replace(
    state, decode=dataclasses.replace(decode, cache=cache)
  )


class IndexCallsTest(parameterized.TestCase):
  def test_known_fault_35_one_indexer_call_a_draft_pass(self):
    for share in (True, False):
      out = generate(
        small_model(0),
        prompts(0, LENGTHS),
        max_new_tokens=12,
        num_speculative_tokens=3,
        draft_options=DraftOptions(share, share),
        adaptive_drafts=not share,
        prefill_chunk=32,
        plan=TILED,
      ).drafts
      assert out.passes >= 4
      assert (out.index_calls == out.passes) == share

  def test_known_fault_35_calls_are_counted_where_they_happen(self):
    """Through the plan: 21 + 1 in a prefill step of the real schedule."""
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Counting(LocalPlan):
      def select(self, q, w, cache, rows, index_slot, k, *, first=0):
        jax.debug.callback(lambda: calls.append(1))
        return super().select(q, w, cache, rows, index_slot, k, first=first)

    config = small_config(
      0,
      indexer_types=presets.PRESETS['glm52'].indexer_types,
      mlp_types=presets.PRESETS['glm52'].mlp_types,
      hidden_size=16,
    )
    model = make_model(config, 0)
    begin(model, [[1, 2, 3, 4, 5]], 4, 3, Counting(), chunk=8)
    jax.effects_barrier()
    assert len(calls) == 22
    calls.clear()
    state = begin(small_model(0), [[1, 2, 3, 4, 5]], 9, 7, Counting())
    jax.effects_barrier()
    calls.clear()
    page_table = state.page_table
    hidden = state.cache.hidden[None, :1]
    drafting.draft(
      small_model(0),
      state.last_token[:, None],
      hidden,
      state.cache,
      page_table,
      state.lengths - 1,
      jnp.ones(1, jnp.int32),
      jnp.full(1, 7, jnp.int32),
      state.params,
      7,
      DraftOptions(),
      Counting(),
    )
    jax.effects_barrier()
    assert len(calls) == 1
