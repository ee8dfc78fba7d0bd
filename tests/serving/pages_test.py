"""Pages, the prefix index and the store, without a device."""

import numpy as np
import pytest
from absl.testing import parameterized
from small_engines import random_prompt, rng

from glm_jax.serving.host_tier import HostTier
from glm_jax.serving.pages import GROUP, PagePool
from glm_jax.serving.prefix import PrefixIndex, chain
from glm_jax.serving.request import Request
from glm_jax.serving.sequence import Sequence, State
from glm_jax.serving.store import PageStore


class PoolTest(parameterized.TestCase):
  def test_idle_pages_are_evicted_in_the_order_of_their_release(self):
    evicted = []
    pool = PagePool(4, evicted.append)
    a, b, c = pool.take(), pool.take(), pool.take()
    for page in (a, b, c):
      pool.keep(page)
    for page in (b, c, a):
      pool.release(page)
    assert (pool.num_free, pool.num_idle, pool.num_used) == (1, 3, 0)
    pool.take()
    assert evicted == []
    assert [pool.take(), pool.take()] == [b, c] == evicted
    pool.check()

  def test_a_page_in_use_is_never_taken(self):
    pool = PagePool(2)
    a, b = pool.take(), pool.take()
    pool.keep(a)
    pool.share(a)
    pool.release(a)
    assert pool.take() is None
    pool.release(b)
    assert pool.take() == b
    assert pool.take() is None

  def test_known_fault_31_ids_and_counts_out_of_range_raise(self):
    freed = []
    pool = PagePool(8, on_free=freed.append)
    page = pool.take()
    pool.release(page)
    assert freed == [page]
    for wrong in (
      lambda: pool.release(page),
      lambda: pool.share(page),
      lambda: pool.references(9),
      lambda: pool.release(-1),
    ):
      with pytest.raises(ValueError):
        wrong()

  def test_forgetting_frees_an_idle_page_and_spares_a_used_one(self):
    pool = PagePool(2)
    a, b = pool.take(), pool.take()
    for page in (a, b):
      pool.keep(page)
    pool.release(a)
    pool.forget(a)
    pool.forget(b)
    assert (pool.num_free, pool.num_idle) == (1, 0)
    pool.release(b)
    assert pool.num_free == 2
    pool.check()


class IndexTest(parameterized.TestCase):
  def _filled(self, ids):
    index = PrefixIndex()
    keys = chain(index.root, ids)
    parent = index.root
    for block, key in enumerate(keys):
      part = np.array(ids[block * 64 : (block + 1) * 64])
      assert index.insert(parent, part, 10 + block, 63).key == key
      parent = key
    return index, keys

  def test_a_page_is_known_by_all_tokens_before_it(self):
    ids = random_prompt(rng(0), 200)
    index, _ = self._filled(ids)
    found = index.match(ids, chain(index.root, ids))
    assert [e.page for e in found.pages] == [10, 11, 12]
    other = (ids[0] + 1, *ids[1:])  # pages 1 and 2 hold the same tokens
    found = index.match(other, chain(index.root, other))
    assert (found.pages, found.tail, found.common) == ((), None, 0)

  def test_leaving_a_page_in_the_middle_counts_the_common_tokens(self):
    ids = random_prompt(rng(0), 200)
    index, keys = self._filled(ids)
    part = np.array(ids[192:200])
    index.insert(keys[2], part, 20, 7)
    other = (*ids[:100], (ids[100] + 1) % 96, *ids[101:])
    found = index.match(other, chain(index.root, other))
    assert [e.page for e in found.pages] == [10]
    assert (found.tail.page, found.common) == (11, 36)
    found = index.match((*ids, 5), chain(index.root, (*ids, 5)))
    assert (len(found.pages), found.tail.page, found.common) == (3, 20, 8)

  def test_a_lower_tier_extends_the_chain_and_a_gap_ends_it(self):
    ids = random_prompt(rng(0), 200)
    index, keys = self._filled(ids)
    index.remove(11)
    assert [e.page for e in index.match(ids, keys).pages] == [10]
    below = {keys[1]}.__contains__
    found = index.match(ids, keys, below)
    assert [e and e.page for e in found.pages] == [10, None, 12]
    assert found.tail is None

  def test_the_older_of_two_equal_pages_stays(self):
    ids = random_prompt(rng(0), 64)
    index, _ = self._filled(ids)
    again = index.insert(index.root, np.array(ids), 30, 63)
    assert again.page == 10 and index.of_page(30) is None
    assert index.remove(30) is None
    index.remove(10)
    assert (
      len(index) == 0 and index.match(ids, chain(index.root, ids)).pages == ()
    )


class Tape:
  """A device that writes down what it is told."""

  def __init__(self):
    self.calls = []

  def __getattr__(self, name):
    return lambda *args: self.calls.append((name, *args))


def sequence(ids, new=8, slot=0):
  request = Request('r', ids)
  seq = Sequence(request, 1, len(ids) + new, 0, frozenset(), 0, list(ids))
  seq.slot = slot
  return seq


def admit(store, seq):
  hit = store.find(seq)
  assert store.shortage(seq, hit, 1.0) <= 0
  store.attach(seq, hit, 1.0)
  seq.state = State.PREFILL
  return hit


def prefill(store, seq):
  assert store.grow(seq, len(seq.ids))
  seq.computed = len(seq.ids)
  store.register(seq)


def leaving_store(num_pages, budget=8):
  """A store whose pages leave for a tier of `budget` records."""
  device = Tape()
  device.extract = lambda pages: (
    device.calls.append(('extract', *pages)) or [f'of {p}' for p in pages]
  )
  tier = HostTier(budget, 1, list, pinned=True)
  return PageStore(num_pages, device, tier=tier)


class StoreTest(parameterized.TestCase):
  def test_a_hit_of_n_pages_leaves_exactly_the_rest(self):
    store = PageStore(8, Tape(), with_drafter=True)
    ids = random_prompt(rng(0), 150)
    first = sequence(ids)
    assert admit(store, first).start == 0
    prefill(store, first)
    second = sequence((*ids[:128], 7, 7, 7))
    admit(store, second)
    assert (second.computed, second.draft_from) == (128, 128)
    assert second.pages == first.pages[:2]
    assert second.cached_tokens == 128
    assert store.pool.references(first.pages[0]) == 2

  def test_a_whole_hit_runs_the_last_row_in_a_copy(self):
    store = PageStore(8, Tape(), with_drafter=True)
    ids = random_prompt(rng(0), 128)
    first = sequence(ids)
    admit(store, first)
    prefill(store, first)
    second = sequence(ids)
    admit(store, second)
    # The drafter's rows are all there: none is written again.
    assert (second.computed, second.draft_from) == (127, 128)
    assert second.pages[0] == first.pages[0]
    assert second.pages[1] != first.pages[1]
    assert ('copy', first.pages[1], second.pages[1]) in store._device.calls

  @parameterized.parameters((True, 139), (False, 140))
  def test_a_page_left_in_the_middle_needs_one_row_more_for_the_drafter(
    self, with_drafter, start
  ):
    store = PageStore(8, Tape(), with_drafter=with_drafter)
    ids = random_prompt(rng(0), 150)
    first = sequence(ids)
    admit(store, first)
    prefill(store, first)
    store.release(first)
    other = (*ids[:140], (ids[140] + 1) % 96)
    # The copied page keeps the hidden state of row 149, not of row 139.
    second = sequence(other)
    admit(store, second)
    assert (second.computed, second.draft_from) == (start, 140)

  def test_planned_pages_are_counted_before_they_are_taken(self):
    store = PageStore(8, Tape())
    first = sequence(random_prompt(rng(0), 10), new=300)
    admit(store, first)
    assert (store.pool.num_used, store.unplanned) == (0, 3)
    second = sequence(random_prompt(rng(1), 200), new=8)
    assert store.shortage(second, store.find(second), 1.0) == 1
    assert store.shortage(first, store.find(first), 0.0) == -2
    store.release(first)
    assert store.unplanned == 8

  def test_two_that_compute_the_same_page_end_up_with_one(self):
    store = PageStore(8, Tape())
    ids = random_prompt(rng(0), 100)
    pair = [sequence(ids, slot=i) for i in range(2)]
    for seq in pair:
      admit(store, seq)
    for seq in pair:
      prefill(store, seq)
    assert pair[0].pages[0] == pair[1].pages[0]
    assert (1, 0, pair[0].pages[0]) in store.changes
    for seq in pair:
      store.release(seq)
    store.pool.check()
    assert store.pool.num_used == 0 and store.unplanned == 8

  def test_known_fault_44_a_slot_carries_nothing_over_to_its_next_owner(self):
    store = PageStore(8, Tape())
    first = sequence(random_prompt(rng(0), 100))
    admit(store, first)
    prefill(store, first)
    assert [c[0] for c in store.changes] == [0, 0]
    store.release(first)
    admit(store, sequence(random_prompt(rng(1), 100)))
    store.flush_changes()
    assert store._device.calls[-1] == ('set_row', 0, [])

  def test_freed_pages_are_poisoned_in_debug_mode_alone(self):
    for debug in (False, True):
      store = PageStore(4, Tape(), debug=debug, caching=False)
      seq = sequence(random_prompt(rng(0), 100))
      admit(store, seq)
      prefill(store, seq)
      pages = list(seq.pages)
      store.release(seq)
      poisoned = [c[1] for c in store._device.calls if c[0] == 'poison']
      assert sorted(poisoned) == (sorted(pages) if debug else [])

  def test_pages_leave_together_before_any_of_them_is_written(self):
    store = leaving_store(8)
    device, tier = store._device, store.tier
    shared, other = random_prompt(rng(0), 100), random_prompt(rng(1), 256)
    for ids in (shared, other):
      seq = sequence(ids)
      admit(store, seq)
      prefill(store, seq)
      store.release(seq)
    device.calls.clear()
    # All of `shared` but a token, so its half page is copied, and long enough
    # to push out what is older.
    seq = sequence((*shared[:99], *random_prompt(rng(2), 300)))
    admit(store, seq)
    assert store.grow(seq, len(seq.ids))
    names = [call[0] for call in device.calls]
    assert names == ['copy', 'set_row', 'extract']
    left = device.calls[-1][1:]
    assert len(left) > 1 and set(left) < set(seq.pages)
    assert [tier.fetch([key])[0].result() for key in tier.keys()] == [
      f'of {page}' for page in left
    ]

  def test_attach_copies_out_before_it_writes(self):
    store = leaving_store(4)
    for seed in (0, 1):  # a full page and a half one each
      seq = sequence(random_prompt(rng(seed), 100))
      admit(store, seq)
      prefill(store, seq)
      store.release(seq)
    assert store.pool.num_free == 0
    store.pool.take()  # the half page, so that a full one leaves next
    store._device.calls.clear()
    admit(store, sequence((*random_prompt(rng(1), 100)[:99], 1)))
    names = [call[0] for call in store._device.calls]
    assert names == ['extract', 'copy', 'set_row']

  def test_records_beyond_the_budget_are_a_group_at_most(self):
    store = leaving_store(100, budget=8)
    alive = []
    extract = store._device.extract

    def count(pages):
      alive.append(len(store.tier) + len(pages))
      return extract(pages)

    store._device.extract = count
    for seed in (0, 1):
      seq = sequence(random_prompt(rng(seed), 6000))
      admit(store, seq)
      prefill(store, seq)
      store.release(seq)
    assert len(alive) > 3 and max(alive) <= 8 + GROUP
