"""The engine gives the tokens that each request gets alone."""

import functools

import jax
import numpy as np
import pytest
from absl.testing import parameterized
from small_engines import (
  alone,
  check_empty,
  make_engine,
  random_prompt,
  request,
  rng,
  run,
  serve,
  tokens,
)
from small_models import TILED, small_model

from glm_jax import forward, generate
from glm_jax.serving.request import InvalidRequest

LENGTHS = (48, 5, 70, 64, 1, 130, 65)
TEXTS = tuple(random_prompt(rng(i), n) for i, n in enumerate(LENGTHS))
VOCAB = 96


@functools.cache
def engine():
  """One engine for tests that leave it empty; its cache is flushed."""
  return make_engine()


def fresh():
  engine().flush_cache()
  return engine()


class OnlyIds:
  """A filter that allows some ids, by the number of tokens before."""

  def __init__(self, *steps):
    self.steps, self.calls = steps, 0

  def allowed(self, new_ids):
    self.calls += 1
    ids = self.steps[min(len(new_ids), len(self.steps) - 1)]
    if ids is None:
      return None
    bits = np.zeros(VOCAB, bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder='little').view(np.uint32)


@functools.cache
def _forward():
  model = small_model(0)
  run = lambda tokens: forward(model, tokens, plan=TILED).logits[0]
  return jax.jit(run)


def teacher(prompt, new):
  """Logits [new, V] that each new token was drawn from, in one pass."""
  ids = (*prompt, *new, *[0] * 64)[:64]
  return np.asarray(_forward()(np.array([ids])))[len(prompt) - 1 :][: len(new)]


class IdentityTest(parameterized.TestCase):
  def test_any_batching_and_drafting_gives_the_tokens_of_single_requests(self):
    e = fresh()
    for turn in ('first', 'again'):  # the second time from the cache
      got = serve(
        e,
        [
          request(f'{turn}{i}', text, num_speculative_tokens=(0, 3, 7)[i % 3])
          for i, text in enumerate(TEXTS)
        ],
      )
      for i, text in enumerate(TEXTS):
        assert got[f'{turn}{i}'] == alone(0, text, 8), (turn, i)
      check_empty(e)
    plain = generate(
      small_model(0), [list(TEXTS[2])], max_new_tokens=8, plan=TILED
    )
    assert plain.tokens == [got['again2']]

  def test_a_prefix_hit_computes_exactly_the_rest(self):
    e = fresh()
    text = TEXTS[5]
    serve(e, [request('a', text)])
    rows = e.runner.rows['prefill']
    e.submit(request('b', text[:128] + (3, 1, 4)))
    outputs = run(e)['b']
    assert e.runner.rows['prefill'] - rows == 3
    assert outputs[-1].cached_tokens == 128
    assert outputs[-1].prompt_tokens == 131
    want = alone(0, text[:128] + (3, 1, 4), 8)
    assert [t for o in outputs for t in o.new_ids] == want

  def test_a_conversation_goes_on_from_what_it_generated(self):
    e = fresh()
    text, turns = TEXTS[2], 3
    computed, whole = 0, 0
    for turn in range(turns):
      before = e.runner.rows['prefill']
      new = serve(e, [request(str(turn), text, num_speculative_tokens=3)])
      assert new[str(turn)] == alone(0, text, 8)
      computed += e.runner.rows['prefill'] - before
      whole += len(text)
      text = text + tuple(new[str(turn)]) + (turn, 7, 7)
    # The first prompt, then the last round's tokens and what was added.
    assert computed <= 70 + (turns - 1) * (8 + 1 + 3)

  def test_noise_depends_on_seed_and_position_not_on_slot_or_batch(self):
    options = dict(temperature=1.0, top_p=0.9, num_speculative_tokens=0)
    e = fresh()
    one = serve(e, [request('x', TEXTS[2], seed=7, **options)])['x']
    many = [
      request(str(i), text, seed=7, **options) for i, text in enumerate(TEXTS)
    ]
    assert serve(e, many[::-1])['2'] == one
    assert serve(e, [request('y', TEXTS[2], seed=8, **options)])['y'] != one
    want = alone(0, TEXTS[2], 8, temperature=1.0, top_p=0.9, seed=7)
    assert one == want

  def test_stop_ids_and_eos_end_a_request_with_a_reason(self):
    e = fresh()
    want = alone(0, TEXTS[0], 8)
    stop = want[3]
    cut = want[: want.index(stop) + 1]
    for K in (0, 7):
      e.submit(
        request('a', TEXTS[0], stop_token_ids=(stop,), num_speculative_tokens=K)
      )
      e.submit(request('b', TEXTS[0], num_speculative_tokens=K))
      got = run(e)
      assert tokens(got)['a'] == cut
      assert got['a'][-1].finish_reason == 'stop'
      assert tokens(got)['b'] == want
      assert got['b'][-1].finish_reason == 'length'
      for outs in got.values():
        assert [o.finished for o in outs] == [False] * (len(outs) - 1) + [True]
    check_empty(e)

  def test_draft_counts_are_reported_and_greedy_drafts_are_judged(self):
    e = fresh()
    e.submit(request('a', TEXTS[0], 24, num_speculative_tokens=3))
    last = run(e)['a'][-1]
    assert last.rounds > 0 and last.drafted[0] == last.rounds
    assert last.drafted[3:] == (0,) * 4
    assert sum(last.accepted) <= sum(last.drafted)
    # Tokens: one from the prompt, then one and the accepted a round.
    assert 24 <= 1 + sum(last.accepted) + last.rounds + 1

  def test_logprobs_are_those_of_the_whole_forward_pass(self):
    e = fresh()
    for K in (0, 3):
      e.submit(request('a', TEXTS[1], 6, logprobs=3, num_speculative_tokens=K))
      e.submit(request('b', TEXTS[2], 6, num_speculative_tokens=K))
      got = run(e)
      assert all(o.logprobs is None for o in got['b'])
      found = [p for o in got['a'] for p in o.logprobs]
      new = tokens(got)['a']
      want = np.asarray(jax.nn.log_softmax(teacher(TEXTS[1], new), axis=-1))
      assert [p.token for p in found] == new
      for p, row in zip(found, want):
        np.testing.assert_allclose(p.logprob, row[p.token], atol=1e-5)
        ids, best = zip(*p.top)
        assert len(ids) == 3
        np.testing.assert_allclose(best, np.sort(row)[::-1][:3], atol=1e-5)
        np.testing.assert_allclose(best, row[list(ids)], atol=1e-5)

  def test_nothing_is_compiled_once_the_engine_is_warm(self):
    e = make_engine()
    assert e.warm_up() == 1
    warm = e.runner.compilations()
    got = serve(e, [request(str(i), t) for i, t in enumerate(TEXTS)])
    serve(e, [request(str(i), t) for i, t in enumerate(TEXTS)])
    assert got['0'] == alone(0, TEXTS[0], 8)
    e.submit(request('f', TEXTS[0], token_filter=OnlyIds({7})))
    assert tokens(run(e)) == {'f': [7] * 8}
    assert e.runner.compilations() == warm

  @parameterized.parameters(
    (dict(prompt=()), 'empty'),
    (dict(prompt=(1, 96)), 'token id 96'),
    (dict(prompt=(1,) * 250), 'exceed the window of 256'),
    (dict(prompt=(1,), num_speculative_tokens=8), 'limit of 7'),
    (dict(prompt=(1,), stop_token_ids=tuple(range(17))), 'at most 16'),
  )
  def test_a_request_that_can_never_run_says_why(self, changes, message):
    prompt = changes.pop('prompt')
    with pytest.raises(InvalidRequest, match=message):
      engine().submit(request('bad', prompt, **changes))
    assert not engine().has_work()


class FilterTest(parameterized.TestCase):
  @parameterized.parameters(0, 3, 7)
  def test_only_allowed_tokens_come_and_forced_ones_are_drafts(self, K):
    e = fresh()
    steps = ({5, 6}, {7}, {8}, {9}, {1, 2, 3}, {7}, None)
    rule = OnlyIds(*steps)
    e.submit(
      request('a', TEXTS[0], 8, token_filter=rule, num_speculative_tokens=K)
    )
    e.submit(request('b', TEXTS[0], 8, num_speculative_tokens=3))
    got = run(e)
    new = tokens(got)['a']
    assert tokens(got)['b'] == alone(0, TEXTS[0], 8)
    assert len(new) == 8
    for token, ids in zip(new, steps):
      assert ids is None or token in ids
    # The tokens after a forced run are the model's best among the allowed.
    logits = teacher(TEXTS[0], new)
    for token, ids, row in zip(new, steps, logits):
      best = max(ids or range(VOCAB), key=lambda t: row[t])
      assert token == best
    assert sum(got['a'][-1].accepted) == sum(got['a'][-1].drafted)
    assert (sum(got['a'][-1].drafted) >= 3) == (K >= 3)
    check_empty(e)

  def test_a_filter_that_fails_ends_its_request_alone(self):
    class Broken:
      def allowed(self, new_ids):
        if len(new_ids) == 2:
          raise KeyError('no such state')
        return None

    nothing = OnlyIds(None, None, ())
    e = fresh()
    e.submit(request('a', TEXTS[0], token_filter=Broken()))
    e.submit(request('b', TEXTS[1], token_filter=nothing))
    e.submit(request('c', TEXTS[2]))
    got = run(e)
    assert got['a'][-1].finish_reason == 'error'
    assert 'no such state' in got['a'][-1].error
    assert 'allows no token' in got['b'][-1].error
    assert tokens(got)['a'] == alone(0, TEXTS[0], 8)[:2]
    assert tokens(got)['c'] == alone(0, TEXTS[2], 8)
    check_empty(e)
