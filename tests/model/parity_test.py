"""The model against transformers on twelve random small configurations.

Each runs two sequences through one paged executable: a prompt shorter than
top-k and one longer, then 64 greedy tokens each, so that the short one grows
past top-k on the way. Then one forward of the oracle over each sequence
checks every position's logits, selections and argmax.
"""

from __future__ import annotations

import numpy as np
import pytest
from model import oracle
from model.paged import Runner

from glm_jax import load_model
from glm_jax.validation.compare import FLOAT32, set_violations

NEW_TOKENS = 64


def differences(runner: Runner, reference: list[dict]) -> tuple[int, int]:
  """Rows of full layers that select otherwise, and beyond the tie rule."""
  ties = violations = 0
  for s, expected in enumerate(reference):
    selected = runner.gathered('selected', s)
    scores = runner.gathered('scores', s)
    for a, b, score in zip(expected['selected'], selected, scores):
      differ, violate = set_violations(score, a, b, FLOAT32.selection)
      ties += int(differ.sum())
      violations += int(violate.sum())
  return ties, violations


def logit_error(runner: Runner, reference: list[dict]) -> float:
  """Largest absolute difference of two logits."""
  return max(
    float(np.abs(runner.gathered('logits', s) - expected['logits']).max())
    for s, expected in enumerate(reference)
  )


@pytest.mark.parametrize('seed', range(12))
def test_random_config_equals_transformers(seed):
  path = oracle.checkpoint(seed, **oracle.random_settings(seed))
  reference_model = oracle.load(path)
  topk = reference_model.topk
  model = load_model(path)
  rng = np.random.default_rng(seed)
  draw = lambda n: rng.integers(0, model.config.vocab_size, n).tolist()
  prompts = [draw(topk - 3), draw(topk + 20 + seed)]
  pages = [[4, 1], [0, 3]]

  runner = Runner(model, pages, num_pages=5)
  runner.feed(prompts)
  new = runner.greedy(NEW_TOKENS)

  sequences = [p + n for p, n in zip(prompts, new)]
  reference = [reference_model(tokens) for tokens in sequences]
  ties, violations = differences(runner, reference)
  assert violations == 0
  if ties:
    runner = Runner(model, pages, num_pages=5, capture=())
    runner.feed(sequences, [r['selected'] for r in reference])
  error = logit_error(runner, reference)
  scale = max(float(np.abs(r['logits']).max()) for r in reference)
  print(f'seed {seed}: error {error:.1e} at scale {scale:.1f}, {ties} ties')
  assert error <= FLOAT32.logits * max(1, scale / 10)

  for prompt, tokens, expected in zip(prompts, new, reference):
    for i, token in enumerate(tokens):
      row = expected['logits'][len(prompt) + i - 1]
      gap = float(row.max() - row[token])
      if gap > 0:
        print(f'seed {seed}: token {i} differs, top-2 gap {gap:.1e}')
      assert gap < 1e-4
