"""The host's work of a decode step, counted: it does not grow with context."""

import sys
import tracemalloc

import pytest
from absl.testing import parameterized

from glm_jax.serving.host_time import decoding_engine, measure

STEPS = 70  # every request fills a page within 64 steps
REQUESTS = 16


def work(tokens, drafts=0):
  """Calls made, and bytes held at most, during `STEPS` decode steps."""
  engine = decoding_engine(tokens, REQUESTS, drafts=drafts)
  calls = 0

  def count(frame, event, arg):
    nonlocal calls
    calls += event in ('call', 'c_call')

  for _ in range(3):
    engine.step()
  sys.setprofile(count)
  try:
    for _ in range(STEPS):
      assert len(engine.step()) == REQUESTS
  finally:
    sys.setprofile(None)
  tracemalloc.start()
  try:
    for _ in range(STEPS):
      engine.step()
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  return calls, peak


class HostWorkTest(parameterized.TestCase):
  @parameterized.parameters((0,), (5,))
  def test_a_step_does_the_same_at_any_context(self, drafts):
    short, short_bytes = work(1 << 10, drafts)
    long, long_bytes = work(1 << 16, drafts)
    assert long <= 1.02 * short
    # Lists of ids grow by an eighth now and then: 64K ids of 8 bytes.
    assert long_bytes - short_bytes < REQUESTS * 80_000

  def test_a_request_costs_a_bounded_number_of_calls(self):
    calls, _ = work(1 << 10)
    assert calls / STEPS / REQUESTS < 60

  def test_the_measurement_decodes_every_request_in_every_step(self):
    for got, tokens in zip(measure((1000, 300), 8, steps=5), (1000, 300)):
      assert (got.tokens, got.requests) == (tokens, 8)
      assert 0 < got.median <= got.p90

  @parameterized.parameters((0,), (5,))
  @pytest.mark.long
  def test_a_million_tokens_cost_what_a_thousand_do(self, drafts):
    short, long = measure((1 << 10, 1 << 20), drafts=drafts)
    assert long.median < 1.3 * short.median and long.median <= 2e-3
