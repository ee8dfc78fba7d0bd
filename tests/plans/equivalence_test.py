"""Every plan on eight devices gives what one device gives.

Caches start full of NaN, so that a row, a slot or a page of somebody else
that leaks into a result shows. Index heads 32, top-k 8 below the lengths.
"""

import jax
import numpy as np
import plan_cases
import pytest
from absl.testing import absltest, parameterized
from compare import assert_close, assert_same_selection

FAST = (
  ('token_split', (1, 8, 1), {'move': 'partials'}),
  ('token_split', (2, 2, 2), {'move': 'rows'}),
  ('layer_split', (1, 8, 1), {}),
)
MORE = (
  ('token_split', (1, 8, 1), {'move': 'rows'}),
  ('token_split', (1, 8, 1), {'move': 'rows', 'slots': 1}),
  ('token_split', (2, 4, 1), {'move': 'partials'}),
  ('token_split', (1, 2, 4), {'move': 'partials'}),
  ('token_split', (1, 2, 4), {'move': 'rows'}),
  ('token_split', (2, 2, 2), {'min_rows': 1 << 20}),  # never split
  ('layer_split', (2, 4, 1), {'slots': 1}),
  ('layer_split', (1, 2, 4), {}),
  ('replicated', (1, 8, 1), {}),
  ('replicated', (2, 2, 2), {}),
)


class EquivalenceTest(parameterized.TestCase):
  def tearDown(self):
    super().tearDown()
    jax.clear_caches()  # all cases' programs at once are too many (conftest)

  def check_passes(self, name, shape, options, deep):
    plan = plan_cases.make_plan(name, shape, deep, **options)
    model = plan_cases.placed_model(shape, deep)
    # Each further kind of step is one more program to compile.
    got = plan_cases.passes(model, plan, rounds=1 + deep, decode=deep)
    for i, ((logits, tokens), (ours, drawn)) in enumerate(
      zip(plan_cases.expected_passes(deep, 1 + deep), got, strict=True)
    ):
      # The same tokens, so the same rows in every later step.
      np.testing.assert_array_equal(drawn, tokens)
      assert_close(ours, logits, atol=1e-5, rtol=1e-5, name=f'logits {i}')

  @parameterized.parameters(*FAST)
  def test_prefill_draft_and_verify(self, name, shape, options):
    self.check_passes(name, shape, options, deep=False)

  @parameterized.parameters(*FAST, *MORE)
  @pytest.mark.long
  def test_prefill_decode_draft_and_verify(self, name, shape, options):
    self.check_passes(name, shape, options, deep=True)

  @parameterized.parameters(
    ('token_split', (1, 8, 1), {'move': 'rows'}),
    ('token_split', (1, 4, 2), {'move': 'partials'}),
    ('layer_split', (2, 4, 1), {}),
    ('replicated', (1, 2, 4), {}),
  )
  @pytest.mark.long
  def test_selection(self, name, shape, options):
    plan = plan_cases.make_plan(name, shape, **options)
    got = plan_cases.captured(plan_cases.placed_model(shape), plan)
    expected = plan_cases.expected_capture()
    for layer, scores in enumerate(expected['scores']):
      assert_close(
        got['scores'][layer], scores, atol=1e-5, rtol=1e-5, name='scores'
      )
      assert_same_selection(
        got['selected'][layer], expected['selected'][layer], scores, 8
      )
    assert_close(
      got['logits'], expected['logits'], atol=1e-5, rtol=1e-5, name='logits'
    )


if __name__ == '__main__':
  absltest.main()
