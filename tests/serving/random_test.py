"""Random traffic: every answer is the one that its request gets alone.

Prompts share prefixes and go on from answers; requests arrive, are
cancelled, outbid each other and are drafted at random (K of 0, 3 and 7), over
too few pages and a host tier that overflows. Freed pages are NaN. Half-way the
engine ends and another one goes on from the disk tier, with its latents in
host memory.
"""

import functools
import tempfile

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
)
from small_models import TILED, small_model

from glm_jax.serving.host_latent import host_latent_plan


class Traffic:
  """Random requests over a growing tree of texts."""

  def __init__(self, seed):
    self.rng = rng(seed)
    self.texts = [random_prompt(self.rng, n) for n in (64, 128, 100, 20)]
    self.sent = {}

  def prompt(self):
    text = self.texts[self.rng.integers(len(self.texts))]
    kind = self.rng.integers(4)
    if kind == 0:
      text = random_prompt(self.rng, self.rng.integers(1, 150))
    elif kind == 1:  # leaves the text somewhere
      text = text[: self.rng.integers(1, len(text) + 1)]
    if kind in (1, 2):
      text = text + random_prompt(self.rng, self.rng.integers(0, 40))
    text = text[:200]
    self.texts.append(text)
    return text

  def request(self):
    name = str(len(self.sent))
    options = dict(num_speculative_tokens=int(self.rng.choice([0, 3, 7])))
    if self.rng.random() < 0.2:
      options = dict(
        num_speculative_tokens=0, temperature=0.8, top_p=0.9, seed=int(name)
      )
    out = request(
      name,
      self.prompt(),
      int(self.rng.integers(1, 13)),
      priority=int(self.rng.integers(3)),
      **options,
    )
    self.sent[name] = out
    return out

  def expected(self, name):
    sent = self.sent[name]
    p = sent.sampling
    options = {}
    if p.temperature:
      options = dict(temperature=p.temperature, top_p=p.top_p, seed=p.seed)
    return alone(0, sent.prompt_ids, p.max_new_tokens, **options)


def play(engine, traffic, count):
  """Runs `count` more requests; outputs by name."""
  outputs, left = {}, count
  while left or engine.has_work():
    if left and (not engine.has_work() or traffic.rng.random() < 0.6):
      engine.submit(traffic.request())
      left -= 1
    if engine._live and traffic.rng.random() < 0.03:
      engine.abort(str(traffic.rng.choice(list(engine._live))))
    for out in engine.step():
      outputs.setdefault(out.request_id, []).append(out)
      if out.finished and traffic.rng.random() < 0.5:
        new = tuple(t for o in outputs[out.request_id] for t in o.new_ids)
        sent = traffic.sent[out.request_id]
        traffic.texts.append((*sent.prompt_ids, *new))
  return outputs


def check(traffic, outputs):
  assert outputs.keys() == traffic.sent.keys()
  for name, outs in outputs.items():
    new = [t for out in outs for t in out.new_ids]
    want = traffic.expected(name)
    reasons = [out.finish_reason for out in outs if out.finished]
    assert reasons in (['length'], ['abort']) and outs[-1].finished, name
    assert new == (want if reasons == ['length'] else want[: len(new)]), name


@functools.cache
def host_latents():
  return host_latent_plan(small_model(0).config, row_tile=8)


class RandomTest(parameterized.TestCase):
  def test_sixty_requests(self):
    self._run(0, 60)

  @parameterized.parameters(1, 2, 3)
  @pytest.mark.long
  def test_three_hundred_requests(self, seed):
    self._run(seed, 300)

  def _run(self, seed, count):
    traffic = Traffic(seed)
    outputs, stats = {}, []
    with tempfile.TemporaryDirectory() as folder:
      changes = dict(
        steps_ahead=int(traffic.rng.integers(3)),
        planned_share=float(traffic.rng.choice([0.0, 1.0])),
        host_cache_bytes=1 << 21,
        disk_cache_dir=folder,
      )
      for plan in (TILED, host_latents()):
        engine = make_engine(plan=plan, **changes)
        held = [engine.store.pool.take() for _ in range(12)]
        outputs |= play(engine, traffic, count // 2)
        stats.append(engine.stats())
        for page in held:
          engine.store.pool.release(page)
        check_empty(engine)
        assert engine.host.pinned_records == 0
        assert engine.host.used_bytes <= engine.host.budget_bytes
        engine.close()
    check(traffic, outputs)
    # The traffic met what it is here for, under either plan.
    for found in stats:
      prefix = found['prefix']
      assert prefix['hit_tokens'] > 0 and prefix['copied_pages'] > 0
      assert prefix['evicted_pages'] > 0 and prefix['restored_pages'] > 0
      assert found['preemptions'] > 0
      assert np.sum(found['drafts']['drafted']) > 0
    assert stats[1]['disk']['read'] > 0
