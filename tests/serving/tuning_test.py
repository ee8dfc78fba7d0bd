"""Path tuning keeps the fastest of what runs, and never changes a token."""

import dataclasses
import json

import pytest
from absl.testing import parameterized
from small_engines import alone, make_engine, random_prompt, request, rng, serve
from small_models import TILED

from glm_jax.plan import LocalPlan
from glm_jax.serving.config import Buckets
from glm_jax.serving.tuning import Tuning, compare, load, tune

BUCKETS = Buckets((0, 64, 512), (8,), (0,), (16, 64), 8)


@dataclasses.dataclass(frozen=True)
class Elsewhere(LocalPlan):
  """A plan that does not run here."""

  def select(self, *args, **kwargs):
    raise NotImplementedError('not on this device')


def seconds(blocks, rows, plan):
  """Plan 0 is best up to 16 pages, plan 1 beyond; plan 2 does not run."""
  if plan == 2:
    raise NotImplementedError
  base = {16: (1.0, 2.0), 64: (5.0, 3.0)}[blocks][plan]
  if rows == 512 and plan == 1:
    base = 0.5  # best for prompts, though not for decoding
  # Chunks of 512 pay up to 16 pages, and not beyond.
  per_row = 0.01 if blocks == 16 or rows < 512 else 0.5
  return [base + rows * per_row] * 3


class TuningTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.folder = tmp_path

  def test_each_range_gets_its_best_and_nothing_else_is_within_reach(self):
    got = tune('here', BUCKETS, 3, seconds)
    assert got.plans == {16: 0, 64: 1}
    assert got.prompt_plans == {16: 1, 64: 1}
    assert got.chunks == {16: 512, 64: 64}
    for case in compare(got, BUCKETS, seconds, rounds=1):
      assert case.chosen == case.best
    worse = dataclasses.replace(got, plans={16: 1, 64: 1})
    cases = compare(worse, BUCKETS, seconds, rounds=1)
    assert [(c.blocks, c.prompt) for c in cases if c.chosen > c.best] == [
      (16, False)
    ]
    for blocks, plan in got.plans.items():
      ran = [m for m in got.measured if (m.blocks, m.rows) == (blocks, 0)]
      best = min(m.seconds for m in ran if m.seconds is not None)
      assert [m.seconds for m in ran if m.plan == plan] == [best]
    assert [m.seconds for m in got.measured if m.plan == 2] == [None, None]
    assert len(got.lines([LocalPlan()] * 3)) == 2

  def test_nothing_that_runs_is_an_error(self):
    def never(*_):
      raise NotImplementedError

    with pytest.raises(NotImplementedError, match='none of the candidate'):
      tune('here', BUCKETS, 1, never)

  def test_a_saved_choice_comes_back_and_another_device_is_refused(self):
    path = self.folder / 'tuning.json'
    got = tune('here', BUCKETS, 3, seconds)
    got.save(path)
    assert load(path, 'here') == got
    with pytest.raises(ValueError, match="'here'.*'there'.*delete it"):
      load(path, 'there')
    path.write_text(json.dumps({'key': 'here'}))
    with pytest.raises(ValueError, match='not a tuning file'):
      load(path, 'here')
    path.write_text('{')
    with pytest.raises(ValueError, match='not a tuning file'):
      load(path, 'here')

  def test_a_tuned_engine_gives_the_same_tokens_and_skips_what_cannot_run(self):
    path = self.folder / 'tuning.json'
    text = random_prompt(rng(0), 100)
    plans = Elsewhere(row_tile=8), TILED
    engine = make_engine()
    chosen = engine.tune(str(path), plans)
    assert isinstance(chosen, Tuning) and chosen.plans == {4: 1}
    got = serve(engine, [request('a', text, num_speculative_tokens=3)])
    assert got['a'] == alone(0, text, 8)
    again = make_engine()
    before = again.runner.steps
    assert again.tune(str(path), plans) == chosen
    assert again.runner.steps == before
    # A smaller chunk changes the steps, not the tokens.
    again.scheduler.set_chunks({4: 8})
    got = serve(again, [request('a', text, num_speculative_tokens=3)])
    assert got['a'] == alone(0, text, 8)
    assert again.runner.steps > engine.runner.steps
