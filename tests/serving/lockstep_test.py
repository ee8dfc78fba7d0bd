"""Two engines that follow one stream of events stay the same.

The second process is a thread here; the wire between them is real.
"""

import threading

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
  tokens,
)
from small_models import TILED

from glm_jax.serving import lockstep
from glm_jax.serving.lockstep import Leader, PodError, follow

TEXTS = tuple(random_prompt(rng(i), n) for i, n in enumerate((70, 5, 130, 64)))


def new_engine(**changes):
  changes = {'host_cache_bytes': 1 << 22, 'wait_for_restores': True, **changes}
  return make_engine(**changes)


class Pod:
  """A leader and one follower in a thread."""

  def __init__(self, **changes):
    listener, address = lockstep.listen('localhost')
    self.follower = new_engine(**changes)
    self.error = None
    self.thread = threading.Thread(
      target=self._follow, args=(address,), daemon=True
    )
    self.thread.start()
    self.wires = lockstep.accept(listener, 1)
    self.leader = Leader(new_engine(), self.wires)

  def _follow(self, address):
    try:
      with lockstep.connect(address) as wire:
        follow(self.follower, wire)
    except PodError as error:
      self.error = error

  def end(self):
    for wire in self.wires:
      wire.close()
    self.thread.join(300)
    assert not self.thread.is_alive()


class LockstepTest(parameterized.TestCase):
  def test_the_follower_makes_every_step_of_the_leader(self):
    pod = Pod()
    leader = pod.leader
    leader.warm_up()
    for turn in range(3):
      for i, text in enumerate(TEXTS):
        leader.submit(
          request(f'{turn}.{i}', text, num_speculative_tokens=(0, 3)[i % 2])
        )
      leader.submit(request(f'gone{turn}', TEXTS[0], 40))
      leader.submit(request(f'late{turn}', TEXTS[1], 40, deadline=0.0))
      got = {}
      while leader.has_work():
        for out in leader.step():
          got.setdefault(out.request_id, []).append(out)
          if out.request_id == f'gone{turn}' and not out.finished:
            leader.abort(f'gone{turn}')
      for i, text in enumerate(TEXTS):
        assert tokens(got)[f'{turn}.{i}'] == alone(0, text, 8)
      assert got[f'late{turn}'][-1].finish_reason == 'deadline'
      for i in range(6):
        leader.submit(request(f'o{turn}{i}', random_prompt(rng(i), 240), 2))
      run(leader)
    assert leader.stats()['prefix']['restored_pages'] > 0
    leader.close()
    pod.end()
    assert pod.error is None
    assert pod.follower.stats() == leader.stats()
    check_empty(leader.engine)
    check_empty(pod.follower)

  def test_a_lost_process_ends_the_pod_with_a_clear_error(self):
    pod = Pod()
    pod.end()
    assert 'process 0 of the pod is lost' in str(pod.error)
    pod.leader.submit(request('a', TEXTS[1]))
    with pytest.raises(PodError, match='process 1 of the pod is lost'):
      for _ in range(100):
        pod.leader.step()

  def test_an_engine_out_of_step_is_found_before_it_answers(self):
    pod = Pod()
    pod.follower.store.pool.take()
    pod.leader.submit(request('a', TEXTS[1]))
    pod.leader.step()
    pod.thread.join(300)
    assert 'out of step with process 0' in str(pod.error)
    pod.end()

  def test_token_filters_run_in_process_0_alone(self):
    """They need not be sent: the masks are, and what went wrong."""

    class Forced:
      calls = 0

      def allowed(self, new_ids):
        self.calls += 1
        if len(new_ids) == 6:
          raise KeyError('no such state')
        return np.array([1 << 7 + len(new_ids), 0, 0], np.uint32)

    pod, rule = Pod(), Forced()
    pod.leader.submit(
      request('a', TEXTS[0], token_filter=rule, num_speculative_tokens=3)
    )
    pod.leader.submit(request('b', TEXTS[1]))
    got = run(pod.leader)
    new = tokens(got)['a']  # Proposals are asked for ahead.
    assert new == [7, 8, 9, 10, 11] and rule.calls > 6
    assert 'no such state' in got['a'][-1].error
    assert tokens(got)['b'] == alone(0, TEXTS[1], 8)
    pod.leader.close()
    pod.end()
    assert pod.error is None
    assert pod.follower.stats() == pod.leader.stats()
    check_empty(pod.follower)

  def test_a_choice_of_process_0_holds_everywhere(self):
    pod = Pod()
    chosen = pod.leader.tune(candidates=(TILED,))
    pod.leader.close()
    pod.end()
    assert pod.error is None
    assert pod.follower.runner.chunks == chosen.chunks

  def test_what_would_differ_between_processes_is_refused(self):
    with pytest.raises(ValueError, match='wait_for_restores'):
      Leader(make_engine(), [])
    pod = Pod(max_queue=7)
    with pytest.raises(PodError, match='process 1 of the pod is lost'):
      pod.leader.warm_up()
    pod.thread.join(300)
    assert 'were both started with the same flags' in str(pod.error)
    pod.end()
