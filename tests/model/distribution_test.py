"""Sampled continuations keep their distribution under drafting."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import make_model, small_config

from glm_jax import forward
from glm_jax.decoding import decode_step, start
from glm_jax.drafting import DraftOptions
from glm_jax.plan import LocalPlan
from glm_jax.sampling import sampling_params
from glm_jax.speculative import speculative_step, start_drafting

V, BATCH, RUNS = 12, 500, 40  # 20,000 two-token continuations
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]  # longer than top-k 8
PLAN = LocalPlan()


def exact_pairs(model):
  """P(t1, t2) after the prompt, [V * V], from plain forward passes."""
  run = jax.jit(forward)
  first = jax.nn.softmax(run(model, np.array([PROMPT])).logits[0, -1])
  grown = np.array([[*PROMPT, t] for t in range(V)])
  second = jax.nn.softmax(run(model, grown).logits[:, -1], axis=-1)
  return np.asarray(first[:, None] * second, np.float64).reshape(-1)


def begin(model, K):
  params = sampling_params(BATCH, temperature=1.0)
  return start(model, [PROMPT] * BATCH, 2, params, PLAN, num_drafts=K)


def reseed(state, run):
  seed = (run * BATCH + jnp.arange(BATCH)).astype(jnp.uint32)
  params = dataclasses.replace(state.params, seed=seed)
  return dataclasses.replace(state, params=params)


def plain_pairs(model):
  fresh, counts = begin(model, 0), np.zeros(V * V)
  for run in range(RUNS):
    state = reseed(jax.tree.map(jnp.copy, fresh), run)
    tokens = []
    for _ in range(2):
      state, _ = decode_step(model, state, plan=PLAN)
      tokens.append(np.asarray(state.last_token))
    counts += np.bincount(tokens[0] * V + tokens[1], minlength=V * V)
  return counts


def drafted_pairs(model, options):
  fresh, counts, accepted = begin(model, 1), np.zeros(V * V), 0
  own = jnp.full((BATCH, 1), -1, jnp.int32)
  for run in range(RUNS):
    decode = reseed(jax.tree.map(jnp.copy, fresh), run)
    state = start_drafting(model, decode, 1)
    tokens = np.zeros((BATCH, 4), int)
    have = np.zeros(BATCH, int)
    while have.min() < 2:
      state, done = speculative_step(
        model, state, own, plan=PLAN, options=options
      )
      new, count = np.asarray(done.tokens), np.asarray(done.count)
      accepted += int(np.sum(done.accepted))
      for j in range(2):
        rows = np.flatnonzero(j < count)
        tokens[rows, have[rows] + j] = new[rows, j]
      have += count
    assert have.max() == 2  # limits are exact
    counts += np.bincount(tokens[:, 0] * V + tokens[:, 1], minlength=V * V)
  return counts, accepted


def excess(counts, p):
  """Chi-square statistic over its limit; cells below 10 are merged.

  A chi-square variable with d degrees exceeds d + 2 sqrt(16 d) + 32 with
  probability below exp(-16) (Laurent and Massart). Seeds are fixed.
  """
  n = counts.sum()
  small = n * p < 10
  observed = np.append(counts[~small], counts[small].sum())
  expected = n * np.append(p[~small], p[small].sum())
  keep = expected > 0
  statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
  d = keep.sum() - 1
  return statistic / (d + 2 * np.sqrt(16 * d) + 32)


def check(options):
  model = make_model(small_config(0, vocab_size=V), 2)
  p = exact_pairs(model)
  assert np.isclose(p.sum(), 1, atol=1e-5)
  counts, accepted = drafted_pairs(model, options)
  assert 0.02 < accepted / (BATCH * RUNS) < 0.98  # both branches were taken
  assert excess(counts, p) < 1
  # The test can see a fault: one token in twenty from elsewhere.
  assert excess(0.95 * counts + 0.05 * np.roll(counts, 1), p) > 1
  return model, p


def test_twenty_thousand_continuations_with_and_without_drafting():
  model, p = check(DraftOptions())
  assert excess(plain_pairs(model), p) < 1


@pytest.mark.long
def test_the_same_with_greedy_drafts():
  check(DraftOptions(greedy=True))
