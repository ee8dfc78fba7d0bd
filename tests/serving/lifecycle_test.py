"""Requests that end early, wait or are sent back: nothing lost or leaked."""

import asyncio
import dataclasses
import functools
import time

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

from glm_jax.serving.async_engine import AsyncEngine, EngineDied
from glm_jax.serving.request import InvalidRequest, QueueFull
from glm_jax.serving.sequence import State

LONG, SHORT = random_prompt(rng(0), 130), random_prompt(rng(1), 20)


@functools.cache
def _engine(**changes):
  return make_engine(**changes)


def fresh(**changes):
  engine = _engine(**changes)
  assert not engine.has_work()
  engine.flush_cache()
  return engine


def state_of(engine, name):
  seq = engine._live[name]
  if seq.state is State.PREFILL and seq.computed:
    return 'mid-prompt'
  if seq.state is State.DECODE and len(seq.ids) == seq.prompt_tokens:
    return 'last prompt step in flight'
  if seq.state is State.DECODE and seq.in_flight:
    return 'drafting' if seq.drafts else 'decoding'
  if seq.state is State.WAITING and seq.admitted:
    return 'sent back'
  return seq.state.value


def step_until(engine, name, wanted):
  seen = []
  for _ in range(200):
    if state_of(engine, name) == wanted:
      return seen
    seen += engine.step()
  raise AssertionError(f'{name} never came to be {wanted}')


class AbortTest(parameterized.TestCase):
  @parameterized.parameters(
    'waiting',
    'mid-prompt',
    'last prompt step in flight',
    'decoding',
    'drafting',
    'sent back',
  )
  def test_known_fault_46_cancelled_anywhere_everything_comes_back(self, stage):
    engine = fresh()
    drafts = 7 if stage == 'drafting' else 0
    others = [request(f'o{i}', SHORT + (i,), 30, priority=0) for i in range(4)]
    victim = request(
      'victim', LONG, 40, priority=1, num_speculative_tokens=drafts
    )
    outs = []
    if stage == 'waiting':
      for other in others:
        engine.submit(other)
      outs += engine.step()
      engine.submit(victim)
    else:
      engine.submit(victim)
      if stage == 'sent back':
        outs += step_until(engine, 'victim', 'decoding')
      for other in others[: 4 if stage == 'sent back' else 2]:
        engine.submit(other)
    outs += step_until(engine, 'victim', stage)
    assert engine.abort('victim')
    assert not engine.abort('victim')
    rest = run(engine)
    for out in outs:
      rest.setdefault(out.request_id, []).insert(0, out)
    ends = [o for o in rest['victim'] if o.finished]
    assert [o.finish_reason for o in ends] == ['abort']
    for i in range(4):
      if f'o{i}' in rest:
        assert rest[f'o{i}'][-1].finish_reason == 'length'
    check_empty(engine)
    # What it left behind is right: it goes on from there.
    got = serve(engine, [request('again', LONG, 12, num_speculative_tokens=3)])
    assert got['again'] == alone(0, LONG, 12)
    check_empty(engine)

  def test_a_deadline_ends_a_waiting_and_a_running_request(self):
    engine = fresh()
    engine.submit(request('late', LONG, 40, deadline=time.monotonic() - 1))
    engine.submit(request('runs', SHORT, 40, deadline=time.monotonic() + 1e4))
    step_until(engine, 'runs', 'decoding')
    seq = engine._live['runs']
    seq.request = dataclasses.replace(seq.request, deadline=time.monotonic())
    got = run(engine)
    assert got['runs'][-1].finish_reason == 'deadline'
    check_empty(engine)

  def test_a_full_queue_says_when_to_come_back(self):
    engine = make_engine(max_queue=2)
    for name in 'ab':
      engine.submit(request(name, SHORT))
    with pytest.raises(QueueFull) as raised:
      engine.submit(request('c', SHORT))
    assert 1 <= raised.value.retry_after <= 300
    with pytest.raises(InvalidRequest, match='in use'):
      engine.submit(request('a', SHORT))
    engine.abort('a'), engine.abort('b')
    engine.drain()
    with pytest.raises(QueueFull) as raised:
      engine.submit(request('d', SHORT))
    assert raised.value.draining
    run(engine)
    check_empty(engine)


class SchedulingTest(parameterized.TestCase):
  def test_a_more_important_request_takes_a_place_and_the_other_comes_back(
    self,
  ):
    engine = fresh()
    before = engine.stats()['preemptions']
    low = [
      request(
        f'low{i}',
        LONG + (i,),
        30,
        priority=5,
        num_speculative_tokens=(0, 3)[i % 2],
      )
      for i in range(4)
    ]
    for r in low:
      engine.submit(r)
    outs = step_until(engine, 'low0', 'decoding')
    engine.submit(request('high', SHORT, 8, priority=0))
    outs += engine.step()
    assert state_of(engine, 'high') != 'waiting'
    assert engine.stats()['preemptions'] == before + 1
    rows = engine.runner.rows['prefill']
    rest = run(engine)
    for out in reversed(outs):
      rest.setdefault(out.request_id, []).insert(0, out)
    got = tokens(rest)
    assert got['high'] == alone(0, SHORT, 8)
    for i in range(4):
      assert got[f'low{i}'] == alone(0, LONG + (i,), 30), i
    # The one sent back found its pages again: it ran its last rows only.
    assert engine.runner.rows['prefill'] - rows < 3 * len(LONG)
    check_empty(engine)

  @parameterized.parameters(0.0, 1.0)
  def test_memory_never_runs_out_in_the_middle_of_a_request(self, share):
    engine = fresh(planned_share=share)
    held = [engine.store.pool.take() for _ in range(18)]  # six are left
    texts = [random_prompt(rng(10 + i), 60) for i in range(4)]
    before = engine.stats()['preemptions']
    got = serve(
      engine,
      [
        request(str(i), t, 100, num_speculative_tokens=3)
        for i, t in enumerate(texts)
      ],
    )
    for i, text in enumerate(texts):
      assert got[str(i)] == alone(0, text, 100), i
    # Planned in full nobody is sent back; planned short somebody must be.
    assert (engine.stats()['preemptions'] > before) == (share == 0.0)
    for page in held:
      engine.store.pool.release(page)
    check_empty(engine)

  def test_a_long_prompt_does_not_starve_a_short_one_nor_the_reverse(self):
    engine = fresh()
    long = random_prompt(rng(2), 200)
    engine.submit(request('long', long, 2))
    engine.step()
    engine.submit(request('short', SHORT, 2))
    for turn in range(20):  # noqa: B007
      if any(o.request_id == 'short' for o in engine.step()):
        break
    # 20 rows at 16 of 32 a step: two steps, and one until the token is read.
    assert turn <= 3
    computed = engine._live['long'].computed
    assert 32 + 2 * 16 <= computed < len(long)
    # A stream of short prompts leaves the long one its half of each step.
    steps = 0
    while 'long' in engine._live and engine._live['long'].computed < len(long):
      engine.submit(request(f's{steps}', SHORT + (steps,), 1))
      engine.step()
      steps += 1
    assert steps <= (len(long) - computed) / 16 + 2
    run(engine)
    check_empty(engine)

  def test_known_fault_45_slots_are_reused_while_steps_are_in_flight(self):
    """Steps two ahead: every admission takes a slot just given up."""
    engine = fresh(steps_ahead=2)
    texts = [random_prompt(rng(20 + i), 3 + 11 * i) for i in range(12)]
    got = serve(
      engine,
      [
        request(str(i), t, 2 + i % 3, num_speculative_tokens=(0, 7)[i % 2])
        for i, t in enumerate(texts)
      ],
    )
    for i, text in enumerate(texts):
      assert got[str(i)] == alone(0, text, 2 + i % 3), i
    check_empty(engine)

  def test_known_fault_29_padding_rows_touch_no_live_page(self):
    engine = fresh(enable_prefix_caching=False)
    engine.submit(request('a', SHORT, 30))
    step_until(engine, 'a', 'decoding')
    while engine._flying:
      engine._read(*engine._flying.popleft())
    extract = lambda page: jax.device_get(engine.runner.extract([page]))[0]
    mine = engine._live['a'].pages[0]
    before = [extract(page) for page in range(24)]
    engine.step()
    after = [extract(page) for page in range(24)]
    at = len(engine._live['a'].ids) - 1  # the row that the step wrote
    for page, (old, new) in enumerate(zip(before, after)):
      for name in old:
        a, b = old[name], new[name]
        if page == mine:
          if name == 'hidden':
            continue
          a, b = np.delete(a, [at, at + 1], 1), np.delete(b, [at, at + 1], 1)
        np.testing.assert_array_equal(a, b, f'{name} of page {page}')
    assert (before[mine]['latents'] != after[mine]['latents']).any()
    engine.abort('a')
    run(engine)


class AsyncTest(parameterized.TestCase):
  def test_streams_early_leavers_and_draining(self):
    engine = AsyncEngine(fresh())

    async def read(r, most=10**9):
      got = []
      stream = engine.generate(r)
      async for out in stream:
        got += out.new_ids
        if len(got) >= most:
          break
      await stream.aclose()
      return got

    async def main():
      whole, part = await asyncio.gather(
        read(request('a', LONG, 20)), read(request('b', SHORT, 100), 3)
      )
      assert whole == alone(0, LONG, 20)
      assert part == alone(0, SHORT, 100)[: len(part)]
      with pytest.raises(InvalidRequest):
        await read(request('c', ()))
      running = asyncio.create_task(read(request('d', SHORT, 20)))
      await asyncio.sleep(0)
      await engine.drain()
      assert await running == alone(0, SHORT, 20)
      assert not engine.ready
      with pytest.raises(QueueFull):
        await read(request('e', SHORT))
      return await engine.stats()

    engine.start()
    assert engine.wait_until_ready(600) and engine.ready
    stats = asyncio.run(main())
    engine.stop()
    assert stats['requests']['finished']['abort'] >= 1
    check_empty(engine.engine)
    engine.engine._draining = False

  def test_a_failing_step_ends_every_stream_with_the_reason(self):
    engine = AsyncEngine(make_engine())
    engine.engine.warm_up = lambda: 0

    def broken():
      raise MemoryError('out of device memory')

    engine.engine.step = broken
    engine.start()

    async def main():
      async for _ in engine.generate(request('a', SHORT)):
        pass

    for _ in range(2):
      with pytest.raises(EngineDied, match='out of device memory'):
        asyncio.run(main())
    assert not engine.ready and not engine.alive
