"""Pages that leave the device come back as they were, or not at all."""

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

from glm_jax.serving.disk_tier import DiskTier, decode, encode
from glm_jax.serving.engine import Engine
from glm_jax.serving.pages import GROUP
from glm_jax.serving.runner import Runner
from glm_jax.serving.sequence import State

TEXT = random_prompt(rng(5), 140)
MIB = 1 << 20


def engine_with(**changes):
  return make_engine(**{'host_cache_bytes': 64 * MIB, **changes})


def narrow_engine(host_pages):
  """An engine with 12 of its 24 pages, and the others, which are held."""
  engine = make_engine(host_cache_bytes=host_pages * page_bytes())
  return engine, [engine.store.pool.take() for _ in range(12)]


def push_out(engine):
  """Somebody takes every page for a moment; what is freed is NaN."""
  pool = engine.store.pool
  for page in [pool.take() for _ in range(pool.available)]:
    pool.release(page)
  while engine.host.arriving:
    engine.host.poll()
  assert pool.num_free == pool.num_pages


def _sequence(engine, text):
  return engine._intake.sequence(request('probe', text), 0)


class HostTest(parameterized.TestCase):
  @parameterized.parameters(0, 3)
  def test_known_fault_42_a_restored_prefix_equals_a_fresh_one(self, K):
    engine = engine_with()
    ask = lambda name: request(name, TEXT, 24, num_speculative_tokens=K)
    engine.submit(ask('first'))
    first = run(engine)['first']
    push_out(engine)
    assert engine.store.find(_sequence(engine, TEXT)).pages == (None, None)
    before = engine.store.counts['restored_pages']
    rows = engine.runner.rows['prefill']
    engine.submit(ask('again'))
    again = run(engine)['again']
    assert tokens({'x': again}) == tokens({'x': first})
    assert tokens({'x': again})['x'] == alone(0, TEXT, 24)
    assert engine.store.counts['restored_pages'] == before + 2
    assert engine.runner.rows['prefill'] - rows == len(TEXT) - 128
    assert again[-1].cached_tokens == 128
    # Known fault 37: the drafter's rows came back too, so drafts fare alike.
    assert again[-1].accepted == first[-1].accepted
    assert again[-1].drafted == first[-1].drafted
    check_empty(engine)
    assert engine.host.pinned_records == 0

  @parameterized.parameters(0, 7)
  def test_known_fault_37_drafted_pages_equal_a_fresh_prefill(self, K):
    """After a restore too, and whatever was accepted or rejected."""
    engine, prompt = engine_with(), TEXT[:70]
    new = serve(engine, [request('a', prompt, 62, num_speculative_tokens=K)])
    text = (*prompt, *new['a'])
    grown = _records(engine, text)
    push_out(engine)
    serve(engine, [request('b', text, 1)])
    assert engine.store.counts['restored_pages'] == 2
    back = _records(engine, text)
    engine.flush_cache()
    serve(engine, [request('c', text, 1)])
    for name, want in _records(engine, text).items():
      np.testing.assert_array_equal(grown[name], want, str(name))
      np.testing.assert_array_equal(back[name], want, str(name))

  def test_every_part_of_a_record_comes_back_bit_by_bit(self):
    engine = engine_with()
    serve(engine, [request('a', TEXT, 2)])
    entry = engine.store.find(_sequence(engine, TEXT)).pages[0]
    extract = lambda: engine.runner.extract([entry.page])
    (want,) = jax.device_get(extract())
    record = extract()
    engine.runner.poison(entry.page)
    (bad,) = jax.device_get(extract())
    engine.runner.insert([entry.page], engine.runner.to_device(record))
    (got,) = jax.device_get(extract())
    layers = len(small_model(0).config.indexer_types) + 1
    assert want['latents'].shape[:2] == (layers, 64)
    assert set(want) == {'latents', 'index_keys', 'hidden'}
    for name in want:
      assert np.isnan(bad[name]).all(), name
      np.testing.assert_array_equal(got[name], want[name], name)
    assert sum(a.nbytes for a in want.values()) == engine.runner.record_bytes

  def test_many_pages_move_as_they_do_one_by_one(self):
    runner = engine_with(num_pages=40).runner
    pages = [*range(5, 5 + 2 * GROUP), 2, 1]  # groups, and two left over
    records = [
      {
        name: rng(page).normal(size=part.shape).astype(np.float32)
        for name, part in runner.extract([page])[0].items()
      }
      for page in pages
    ]
    runner.insert(pages, runner.to_device(records))
    together = jax.device_get(runner.extract(pages))
    for page, want, got in zip(pages, records, together, strict=True):
      (alone,) = jax.device_get(runner.extract([page]))
      for name in want:
        np.testing.assert_array_equal(got[name], want[name], str(page))
        np.testing.assert_array_equal(alone[name], want[name], str(page))

  def test_a_missing_page_shortens_the_hit(self):
    engine = engine_with()
    serve(engine, [request('a', TEXT, 2)])
    push_out(engine)
    del engine.host._stored[_key(engine, 1)]
    engine.submit(request('b', TEXT, 8))
    got = run(engine)['b']
    assert tokens({'b': got})['b'] == alone(0, TEXT, 8)
    assert got[-1].cached_tokens == 64
    check_empty(engine)

  @parameterized.parameters(0, 1)
  def test_a_corrupt_page_found_on_the_way_shortens_the_hit(self, block):
    engine = engine_with()
    serve(engine, [request('a', TEXT, 2)])
    push_out(engine)
    engine.host.poll()
    stored = engine.host._stored[_key(engine, block)]
    record = {k: np.array(v) for k, v in jax.device_get(stored.record).items()}
    record['index_keys'][0, 5] += 1  # known fault 42 (b), (c)
    stored.record = record
    engine.submit(request('b', TEXT, 8, num_speculative_tokens=3))
    got = run(engine)['b']
    assert tokens({'b': got})['b'] == alone(0, TEXT, 8)
    assert got[-1].cached_tokens == 64 * block
    assert engine.stats()['host']['corrupt'] == 1
    assert engine.store.counts['shortened_hits'] == 1
    check_empty(engine)

  def test_a_slow_transfer_holds_up_its_own_request_alone(self):
    engine = engine_with()
    serve(engine, [request('a', TEXT, 2)])
    push_out(engine)
    fetch, held = engine.host.fetch, [True]

    def slow(keys):
      transfers = fetch(keys)
      for transfer in transfers:
        ready = transfer.ready
        transfer.ready = lambda ready=ready: not held[0] and ready()
      return transfers

    engine.host.fetch = slow
    engine.submit(request('slow', TEXT, 8))
    engine.submit(request('other', TEXT[:30], 20))
    outs = []
    while 'other' in engine._live:
      outs += engine.step()
    assert {o.request_id for o in outs} == {'other'}
    assert engine._live['slow'].state is State.RESTORING
    held[0] = False
    assert tokens(run(engine))['slow'] == alone(0, TEXT, 8)
    check_empty(engine)

  def test_known_fault_46_cancelled_while_it_is_restored(self):
    engine = engine_with()
    serve(engine, [request('a', TEXT, 2)])
    push_out(engine)
    fetch = engine.host.fetch

    def never(keys):
      transfers = fetch(keys)
      for transfer in transfers:
        transfer.ready = lambda: False
      return transfers

    engine.host.fetch = never
    engine.submit(request('other', TEXT[:30], 30))
    engine.submit(request('gone', TEXT, 8))
    engine.step()
    assert engine._live['gone'].state is State.RESTORING
    assert engine.host.pinned_records == 2
    engine.abort('gone')
    assert run(engine)['gone'][-1].finish_reason == 'abort'
    assert engine.host.pinned_records == 0
    check_empty(engine)

  def test_the_budget_holds_and_pinned_records_stay(self):
    engine = engine_with(host_cache_bytes=3 * page_bytes())
    for i in range(2):
      serve(engine, [request(str(i), random_prompt(rng(i), 200), 2)])
      push_out(engine)
      assert engine.host.used_bytes <= engine.host.budget_bytes
    assert engine.stats()['host']['dropped'] > 0
    assert len(engine.host) == 3
    for key in engine.host.keys():
      engine.host.pin(key)
    engine.host.put(b'new', {})
    assert not engine.host.has(b'new')
    assert engine.stats()['host']['refused'] == 1
    with pytest.raises(ValueError, match='holds no page'):
      engine_with(host_cache_bytes=10)

  def test_the_host_tier_adds_its_budget_to_what_is_reused(self):
    """Ten prompts of two whole pages, in turn: 12 pages keep none for long.

    Four prompts with their last pages fill the device; the host needs room
    for the other six, and for the two pages of the one that is coming back.
    """
    texts = [random_prompt(rng(i), 130) for i in range(10)]
    cached = {}
    for pages in (0, 14):
      engine, _ = narrow_engine(pages)
      for turn in range(3):
        for i, text in enumerate(texts):
          engine.submit(request(f'{turn}{i}', text, 1))
          (out,) = run(engine)[f'{turn}{i}']
          if turn:
            cached[pages] = cached.get(pages, 0) + out.cached_tokens // 64
    assert cached == {0: 0, 14: 40}

  def test_no_room_is_taken_by_what_the_device_has(self):
    """However pages go down and up, device and host know as many as fit."""
    pages = 6
    engine, held = narrow_engine(pages)
    texts = [random_prompt(rng(i), 130) for i in range(8)]
    order = [*range(8), *rng(0).integers(0, 8, 12)]
    for n, i in enumerate(order):
      serve(engine, [request(str(n), texts[i], 1)])
      for _ in range(3):  # idle: pages are copied down ahead of their time
        engine.step()
    device = {
      engine.store.index.of_page(page).key
      for page in engine.store.pool.idle_pages()
      if len(engine.store.index.of_page(page).tokens) == 64
    }
    host = set(engine.host.keys())
    assert len(host) == engine.host.num_records == pages
    # Those on both sides are at most the two pages that came up last.
    assert len(device | host) >= len(device) + pages - 2
    assert engine.store.counts['restored_pages'] > 0
    for page in held:
      engine.store.pool.release(page)
    check_empty(engine)

  def test_without_pinned_memory_records_are_numpy_arrays(self):
    config = engine_with().config
    runner = Runner(small_model(0), config, TILED, pinned=False)
    engine = Engine(small_model(0), config, TILED, runner=runner)
    want = serve(engine, [request('a', TEXT, 8)])['a']
    push_out(engine)
    jax.block_until_ready(engine.runner.cache)
    engine.host.poll()
    stored = list(engine.host._stored.values())
    assert all(
      isinstance(v, np.ndarray) for s in stored for v in s.record.values()
    )
    assert serve(engine, [request('b', TEXT, 8)])['b'] == want
    assert engine.store.counts['restored_pages'] == 2

  def test_flushing_empties_every_tier(self):
    engine = engine_with()
    serve(engine, [request('a', TEXT, 2)])
    push_out(engine)
    assert engine.flush_cache()
    assert len(engine.host) == 0 and len(engine.store.index) == 0
    stats = engine.stats()
    assert stats['pages']['free'] == stats['pages']['total']


def _records(engine, text):
  """Every plane of the first two pages of a text."""
  found = {}
  for i, entry in enumerate(engine.store.find(_sequence(engine, text)).pages):
    (record,) = engine.runner.extract([entry.page])
    for name, plane in record.items():
      found[i, name] = np.array(plane)
      if not i and name != 'hidden':
        found[i, name][-1, 0] = 0  # The drafter's row i lies in slot i + 1.
  return found


@functools.cache
def page_bytes():
  return make_engine().runner.record_bytes


def _key(engine, block):
  seq = _sequence(engine, TEXT)
  engine.store.find(seq)
  return seq.keys[block]


class DiskTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.folder = tmp_path

  def _engine(self, **changes):
    return engine_with(disk_cache_dir=str(self.folder), **changes)

  def test_a_prefix_outlives_the_engine(self):
    engine = self._engine()
    want = serve(engine, [request('a', TEXT, 8, num_speculative_tokens=3)])['a']
    engine.close()
    again = self._engine()
    rows = again.runner.rows['prefill']
    again.submit(request('b', TEXT, 8, num_speculative_tokens=3))
    got = run(again)['b']
    assert tokens({'b': got})['b'] == want == alone(0, TEXT, 8)
    assert got[-1].cached_tokens == 128
    assert again.runner.rows['prefill'] - rows == len(TEXT) - 128
    check_empty(again)

  def test_other_weights_find_nothing(self):
    engine = self._engine()
    serve(engine, [request('a', TEXT, 2)])
    engine.close()
    changed = jax.tree.map(lambda a: a * 1.01, small_model(0))
    other = Engine(changed, engine.config, TILED)
    assert len(other.disk) == 0 and other.runner.root != engine.runner.root

  def test_a_damaged_file_is_deleted_and_the_rest_computed(self):
    engine = self._engine()
    serve(engine, [request('a', TEXT, 2)])
    engine.close()
    path = next(self.folder.rglob(f'{_key(engine, 1).hex()}.page'))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    again = self._engine()
    again.submit(request('b', TEXT, 8))
    got = run(again)['b']
    assert tokens({'b': got})['b'] == alone(0, TEXT, 8)
    assert got[-1].cached_tokens == 64
    assert again.stats()['disk']['damaged'] == 1
    assert not path.exists()

  def test_the_budget_holds(self):
    tier = DiskTier(self.folder, b'root', 3000, lambda r: r)
    record = {'a': np.zeros(200, np.float32)}
    for i in range(6):
      tier.put(bytes([i]), record)
    tier.close()
    assert tier.used_bytes <= 3000 and 2 <= len(tier) < 6
    again = DiskTier(self.folder, b'root', 3000, lambda r: r)
    assert len(again) == len(tier)

  @parameterized.parameters(b'', b'cut', bytes(64), b'{}' + bytes(200))
  def test_whatever_a_file_holds_it_is_damaged_or_right(self, data):
    tier = DiskTier(self.folder, b'root', 1 << 20, lambda r: r)
    tier.put(b'a', {'a': np.zeros(200, np.float32)})
    tier.put(b'b', {'a': np.zeros(200, np.float32)})
    tier.close()
    again = DiskTier(self.folder, b'root', 1 << 20, lambda r: r)
    next(self.folder.rglob('61.page')).write_bytes(data)
    next(self.folder.rglob('62.page')).unlink()
    assert again.fetch(b'a').result() is again.fetch(b'b').result() is None
    assert again.counts['damaged'] == 2 and not again.has(b'a')
    again.close()

  def test_a_disk_that_takes_nothing_keeps_nothing(self):
    tier = DiskTier(self.folder, b'root', 1 << 20, lambda r: r)
    tier._folder.rmdir()
    tier.put(b'a', {'a': np.zeros(200, np.float32)})
    tier.close()
    assert tier.counts['failed'] == 1 and not tier.has(b'a')

  @parameterized.parameters('float32', 'bfloat16', 'float8_e4m3fn', 'uint8')
  def test_known_fault_19_a_record_is_the_same_after_the_file(self, dtype):
    values = np.arange(24).reshape(2, 3, 4).astype(jax.numpy.dtype(dtype))
    path = self.folder / 'x.page'
    path.write_bytes(encode({'a': values, 'b': values[:1]}))
    got = decode(path)
    for name, want in (('a', values), ('b', values[:1])):
      assert got[name].dtype == want.dtype
      np.testing.assert_array_equal(got[name], want)
