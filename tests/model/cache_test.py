"""The paged cache: its bytes, its rows, and what must never be written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from compare import assert_bit_equal, assert_close
from jax.experimental import checkify

from glm_jax import cache as cache_lib
from glm_jax.cache import (
  Cache,
  bytes_per_token,
  encode_keys,
  index_pages,
  init_cache,
  make_rows,
  position_slots,
  read_index_keys,
  read_rows,
  write_index_keys,
  write_rows,
)
from glm_jax.layer_plan import layer_plan
from glm_jax.plan import LocalPlan
from glm_jax.published_config import config_from_published

DTYPES = ('bf16', 'f32', 'fp8')
R, P, H = 160, 8, 16  # R leaves a partial group of 128 latents

write_rows_jit = jax.jit(write_rows)
read_rows_jit = jax.jit(read_rows)
write_keys_jit = jax.jit(write_index_keys)
read_keys_jit = jax.jit(read_index_keys)
make_rows_jit = jax.jit(make_rows)


@jax.jit
def write_both_jit(cache, layer, index_slot, slots, rows, keys):
  cache = write_rows(cache, layer, slots, rows)
  return write_index_keys(cache, index_slot, slots, keys)


@functools.cache
def glm52():
  return config_from_published({'num_nextn_predict_layers': 1})


@functools.cache
def tiny(letters='FFSF', mtp=1):
  return config_from_published(
    {
      'num_hidden_layers': len(letters),
      'index_topk_pattern': letters,
      'hidden_size': 32,
      'num_attention_heads': 2,
      'kv_lora_rank': R,
      'qk_nope_head_dim': 24,
      'qk_rope_head_dim': P,
      'index_head_dim': H,
      'index_n_heads': 2,
      'index_topk': 16,
      'num_nextn_predict_layers': mtp,
      'dtype': 'float32',
    }
  )


def filled(cache, seed=0):
  """The cache with random bytes in every pool (finite numbers)."""
  rng = np.random.default_rng(seed)

  def fill(a):
    if a.dtype == jnp.uint8:
      return jnp.asarray(rng.integers(0, 100, a.shape), jnp.uint8)
    return jnp.asarray(rng.uniform(1, 2, a.shape), jnp.float32).astype(a.dtype)

  return jax.tree.map(fill, cache)


def poisoned(cache):
  """The cache with NaN everywhere."""

  def fill(a):
    value = 255 if a.dtype == jnp.uint8 else jnp.nan
    return jnp.full(a.shape, value, jnp.float32).astype(a.dtype)

  return jax.tree.map(fill, cache)


def assert_same_cache(actual, expected, name='cache'):
  for field in dataclasses.fields(Cache):
    a, e = getattr(actual, field.name), getattr(expected, field.name)
    if isinstance(e, jax.Array):
      assert_bit_equal(a, e, name=f'{name}.{field.name}')
    else:
      assert a == e, f'{name}.{field.name}'


def random_rows(rng, count, width=R + P):
  """Rows as both sides of bf16 see them: bf16 numbers in float32."""
  rows = rng.normal(size=(count, width)) * 2.0 ** rng.integers(
    -6, 7, (count, 1)
  )
  return np.asarray(jnp.asarray(rows, jnp.bfloat16), np.float32)


def assert_rows(actual, expected, dtype, name):
  """Wide rows come back exactly; e4m3 latents to half a step."""
  actual = np.asarray(actual, np.float32)
  if dtype != 'fp8':
    np.testing.assert_array_equal(actual, expected, name)
    return
  np.testing.assert_array_equal(actual[:, R:], expected[:, R:], name)
  for start in range(0, R, 128):
    stop = min(start + 128, R)
    own, want = actual[:, start:stop], expected[:, start:stop]
    largest = np.abs(want).max(axis=1, keepdims=True)
    # Half a step of e4m3 (1/16, or 2^-10 of 448), then bf16 rounding.
    limit = np.abs(want) * (1 / 16 + 2**-8) + largest / 448 * 2.0**-10
    assert (np.abs(own - want) <= limit).all(), name


class BytesTest(parameterized.TestCase):
  def test_bytes_of_glm52(self):
    """spec/model.md section 2.7."""
    table = {
      ('bf16', False): (95_232, 1_408),
      ('fp8', False): (53_940, 788),
      ('f32', False): (190_464, 2_816),
      ('bf16', True): (105_216, 1_536),
      ('fp8', True): (53_940, 788),
      ('f32', True): (210_432, 3_072),
    }
    for (dtype, physical), (trunk, drafter) in table.items():
      with self.subTest(f'{dtype} {physical=}'):
        count = functools.partial(
          bytes_per_token, glm52(), dtype, physical=physical
        )
        self.assertEqual(count(), trunk)
        self.assertEqual(count(drafter=True), drafter)
    self.assertEqual(bytes_per_token(glm52()), 95_232)
    self.assertEqual(bytes_per_token(tiny(), 'auto'), 4 * (168 * 4 + 16 * 3))

  @parameterized.product(dtype=DTYPES, config=(glm52, tiny))
  def test_known_fault_43_bytes_equal_the_allocation(self, dtype, config):
    """Physical bytes a token times tokens is what the pools take."""
    config = config()
    cache = jax.eval_shape(lambda: init_cache(config, 3, dtype=dtype))
    pools = dataclasses.replace(cache, hidden=None)
    allocated = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pools))
    both = sum(
      bytes_per_token(config, dtype, physical=True, drafter=drafter)
      for drafter in (False, True)
    )
    self.assertEqual(allocated, 3 * 64 * both)
    plan = layer_plan(config)
    tokens = 3 * 64
    self.assertEqual(cache.latents.shape[0], plan.num_latent_slots * tokens)
    self.assertEqual(cache.index_keys.shape[0], plan.num_index_slots * tokens)

  def test_a_million_tokens_shape_only(self):
    """1M tokens of GLM-5.2 in bf16: 98 GiB, nothing allocated."""
    cache = jax.eval_shape(lambda: init_cache(glm52(), 16_384))
    self.assertEqual(cache.slots_per_layer, 1 << 20)
    self.assertEqual(cache.latents.shape, (79 << 20, 640))
    self.assertEqual(cache.latents.dtype, jnp.bfloat16)
    self.assertEqual(cache.index_keys.shape, (22 << 20, 128))
    self.assertEqual(cache.hidden.shape, (16_384, 6144))
    total = 2 * (cache.latents.size + cache.index_keys.size)
    self.assertEqual(total, (105_216 + 1_536) << 20)

  def test_names_of_dtypes(self):
    names = {
      'auto': jnp.float32,
      'bfloat16': jnp.bfloat16,
      'bf16': jnp.bfloat16,
      'float32': jnp.float32,
      'f32': jnp.float32,
      'fp8': jnp.uint8,
      'fp8_e4m3': jnp.uint8,
    }
    for name, dtype in names.items():
      cache = jax.eval_shape(
        lambda name=name: init_cache(tiny(), 1, dtype=name)
      )
      self.assertEqual(cache.latents.dtype, dtype)
      self.assertEqual(cache.latent_scales is None, dtype != jnp.uint8)
      self.assertEqual(cache.index_scales is None, dtype != jnp.uint8)
    for call in (
      lambda: init_cache(tiny(), 1, dtype='int8'),
      lambda: bytes_per_token(tiny(), 'int8'),
    ):
      with self.assertRaisesRegex(
        ValueError, "kv_cache_dtype='int8' must be 'auto' or one of"
      ):
        call()

  def test_hidden_only_with_a_drafter(self):
    self.assertIsNone(init_cache(tiny(mtp=0), 2).hidden)
    self.assertEqual(init_cache(tiny(mtp=1), 2).hidden.shape, (2, 32))

  def test_plan_places_the_cache(self):
    class Plan:
      def place_cache(self, cache):
        return ('placed', cache.num_pages)

    self.assertEqual(init_cache(tiny(), 2, plan=Plan()), ('placed', 2))

  def test_known_fault_25_row_ids_stay_int32(self):
    """One page more than int32 holds is an error that says what fits."""
    most = (2**31 - 1) // (79 * 64)
    cache = jax.eval_shape(lambda: init_cache(glm52(), most))
    self.assertEqual(cache.latents.shape[0], most * 64 * 79)
    for pages in (most + 1, 0, -1):
      with self.assertRaisesRegex(
        ValueError, f'num_pages={pages} gives .* row ids are int32, use 1 to '
        f'{most} pages'
      ):  # fmt: skip
        init_cache(glm52(), pages)


class RowsTest(parameterized.TestCase):
  @parameterized.product(dtype=DTYPES)
  def test_known_fault_19_round_trip(self, dtype):
    """Written rows come back, through the host too; others are untouched."""
    rng = np.random.default_rng(1)
    before = filled(init_cache(tiny(), 4, dtype=dtype))
    slots = rng.permutation(4 * 64)[:20].astype(np.int32)
    slots[[4, 9]] = -1
    rows, keys = random_rows(rng, 20), random_rows(rng, 20, H)
    layer, index = 2, 1
    cache = write_both_jit(before, layer, index, slots, rows, keys)
    host = jax.device_get(cache)
    self.assertIsInstance(host.latents, np.ndarray)
    for where, c in (('device', cache), ('restored', jax.device_put(host))):
      back = read_rows_jit(c, layer, slots)
      self.assertEqual(
        back.dtype, jnp.float32 if dtype == 'f32' else jnp.bfloat16
      )
      self.assertEqual(back.shape, (20, R + P))
      expected = np.where(slots[:, None] >= 0, rows, 0)
      assert_rows(back, expected, dtype, where)
      back = read_keys_jit(c, index, slots)
      self.assertEqual(back.dtype, jnp.float32)
      expected = np.where(slots[:, None] >= 0, keys, 0)
      limit = 0 if dtype != 'fp8' else np.abs(keys).max(axis=1)[:, None] / 16
      self.assertTrue((np.abs(np.asarray(back) - expected) <= limit).all())
    # Two dimensions of slots, as a selection has them.
    pair = read_rows_jit(cache, layer, slots[:4].reshape(2, 2))
    assert_bit_equal(
      pair.reshape(4, -1), read_rows_jit(cache, layer, slots[:4]), name='pair'
    )
    at = slots[slots >= 0]
    for name, pool, offset in (
      ('latents', cache.latents, layer),
      ('latent_scales', cache.latent_scales, layer),
      ('index_keys', cache.index_keys, index),
      ('index_scales', cache.index_scales, index),
    ):
      if pool is not None:
        old = np.asarray(getattr(before, name)).copy()
        new = np.asarray(pool).copy()
        touched = at + offset * cache.slots_per_layer
        old[touched], new[touched] = 0, 0
        assert_bit_equal(new, old, name=f'rest of {name}')

  @parameterized.product(dtype=DTYPES)
  def test_layers_never_alias(self, dtype):
    """Every slot of every layer holds its own number."""
    config, pages = tiny(), 4
    plan = layer_plan(config)
    cache = poisoned(init_cache(config, pages, dtype=dtype))
    every = np.arange(pages * 64, dtype=np.int32)
    # Integers up to 16 are exact in e4m3; rotary parts number the slots.
    for layer in range(plan.num_latent_slots):
      rows = np.full((len(every), R + P), layer + 1, np.float32)
      rows[:, R:] = every[:, None]
      cache = write_rows_jit(cache, layer, every, rows)
    for slot in range(plan.num_index_slots):
      keys = np.full((len(every), H), 7 + slot, np.float32)
      keys[:, 1:] = (every % 8)[:, None]
      cache = write_keys_jit(cache, slot, every, keys)
    for layer in range(plan.num_latent_slots):
      back = np.asarray(read_rows_jit(cache, layer, every), np.float32)
      assert_close(
        back[:, :R], np.full((256, R), layer + 1), atol=0, rtol=2**-8,
        name=f'latents of layer {layer}',
      )  # fmt: skip
      np.testing.assert_array_equal(back[:, R:], np.tile(every, (P, 1)).T)
    for slot in range(plan.num_index_slots):
      back = np.asarray(read_keys_jit(cache, slot, every))
      np.testing.assert_array_equal(back[:, 0], 7 + slot)
      np.testing.assert_array_equal(back[:, 1], every % 8)
    self.assertFalse(np.isnan(np.asarray(cache.index_keys, np.float32)).any())

  @parameterized.product(dtype=DTYPES)
  def test_index_pages_are_the_ops_view(self, dtype):
    cache = init_cache(tiny(), 3, dtype=dtype)
    keys = np.float32(np.arange(1, H + 1))[None]
    cache = write_keys_jit(cache, 2, np.int32([70]), keys)
    pages, scales = index_pages(cache)
    self.assertEqual(pages.shape, (4 * 3, 64, H))
    own = np.asarray(pages[2 * 3 + 1, 6], np.float32)
    if dtype == 'fp8':
      self.assertEqual(scales.shape, (4 * 3, 64))
      own = own * float(scales[2 * 3 + 1, 6])
    else:
      self.assertIsNone(scales)
    assert_close(own, keys[0], atol=0, rtol=1 / 16, name='key')
    self.assertEqual(np.count_nonzero(np.asarray(pages, np.float32)), H)

  def test_known_fault_18_scale_of_each_index_key(self):
    """Keys of amplitude 2^(i mod 8): each decodes to 1 part in 16."""
    rng = np.random.default_rng(18)
    amplitude = 2.0 ** (np.arange(64) % 8)
    keys = rng.uniform(0.5, 1, (64, H)) * amplitude[:, None]
    keys *= rng.choice([-1, 1], keys.shape)
    cache = init_cache(tiny(), 1, dtype='fp8')
    slots = np.arange(64, dtype=np.int32)
    cache = write_keys_jit(cache, 1, slots, np.float32(keys))
    back = read_keys_jit(cache, 1, slots)
    assert_close(back, keys, atol=0, rtol=1 / 16, name='keys')
    # A scale plane shifted by one key must fail this very comparison.
    shifted = dataclasses.replace(
      cache, index_scales=jnp.roll(cache.index_scales, 1)
    )
    with self.assertRaisesRegex(AssertionError, 'keys: .* elements differ'):
      back = read_keys_jit(shifted, 1, slots)
      assert_close(back, keys, atol=0, rtol=1 / 16, name='keys')

  def test_scales_of_index_keys_are_powers_of_two(self):
    """amax / 448 rounded up (spec/model.md section 2.4), floor 1e-4."""
    rng = np.random.default_rng(2)
    keys = rng.normal(size=(200, H)) * 2.0 ** rng.uniform(-12, 12, (200, 1))
    keys[0], keys[1], keys[2] = 0, 448, np.nextafter(np.float32(448), 500)
    keys[3] = 224
    keys = keys.astype(np.float32)
    values, scales = jax.jit(encode_keys)(keys)
    values, scales = np.asarray(values, np.float64), np.asarray(scales)
    mantissa, _ = np.frexp(scales)
    np.testing.assert_array_equal(mantissa, 0.5)
    amax = np.maximum(np.abs(keys.astype(np.float64)).max(axis=1), 1e-4)
    exact = 2.0 ** np.ceil(np.log2(amax / 448))
    np.testing.assert_array_equal(scales, exact)
    self.assertTrue(np.isfinite(values).all())
    error = np.abs(values * scales[:, None] - keys)
    limit = np.maximum(np.abs(keys) / 16, scales[:, None] * 2.0**-10)
    self.assertTrue((error <= limit).all())

  @parameterized.product(dtype=DTYPES)
  def test_rows_of_zeros_and_of_nan(self, dtype):
    """Zeros stay zeros; a NaN row stays its own affair."""
    cache = init_cache(tiny(), 1, dtype=dtype)
    rows = np.zeros((2, R + P), np.float32)
    rows[1] = np.nan
    keys = np.zeros((2, H), np.float32)
    keys[1] = np.nan
    slots = np.int32([3, 4])
    cache = write_both_jit(cache, 0, 0, slots, rows, keys)
    back = np.asarray(read_rows_jit(cache, 0, np.int32([3, 4, 5, -1])))
    nan = np.isnan(back.astype(np.float32)).all(axis=1)
    self.assertEqual(nan.tolist(), [False, True, False, False])
    np.testing.assert_array_equal(back[[0, 2, 3]].astype(np.float32), 0)
    back = np.asarray(read_keys_jit(cache, 0, slots))
    self.assertEqual(np.isnan(back).any(axis=1).tolist(), [False, True])


class AddressTest(parameterized.TestCase):
  def test_slots(self):
    """Pages in random order, both sides of a page edge, holes, padding."""
    table = jnp.array([[7, 2, -1], [5, -1, 0]], jnp.int32)
    cases = [
      ((0, 0), 7 * 64),
      ((0, 63), 7 * 64 + 63),
      ((0, 64), 2 * 64),
      ((0, 65), 2 * 64 + 1),
      ((0, 128), -1),  # no page
      ((0, 192), -1),  # beyond the table
      ((0, -1), -1),
      ((0, -64), -1),
      ((1, 0), 5 * 64),
      ((1, 70), -1),
      ((1, 191), 63),
      ((2, 0), -1),  # no such sequence
      ((-1, 0), -1),
    ]
    seq, pos = (np.int32(a) for a in zip(*(case[0] for case in cases)))
    rows = make_rows_jit(seq, pos, table)
    self.assertEqual(rows.slots.dtype, jnp.int32)
    self.assertEqual(rows.slots.tolist(), [case[1] for case in cases])

  def test_known_fault_28_positions_of_a_packed_batch(self):
    """Each row's positions go through its own sequence's pages."""
    table = jnp.array([[3, 1], [0, -1]], jnp.int32)
    seq, pos = jnp.array([0, 1], jnp.int32), jnp.array([66, 2], jnp.int32)
    rows = make_rows_jit(seq, pos, table)
    positions = jnp.array([[0, 3, 65, -1], [0, 1, 2, -1]], jnp.int32)
    slots = jax.jit(position_slots)(rows, positions)
    self.assertEqual(slots.dtype, jnp.int32)
    self.assertEqual(slots.tolist(), [[192, 195, 65, -1], [0, 1, 2, -1]])

  def test_known_fault_25_last_slot_of_a_million(self):
    table = np.arange(16_384, dtype=np.int32)[None, ::-1]
    pos = np.int32([0, 1_048_575, 1_048_576])
    rows = make_rows_jit(np.zeros(3, np.int32), pos, table)
    self.assertEqual(rows.slots.tolist(), [16_383 * 64, 63, -1])

  @parameterized.product(dtype=DTYPES)
  def test_known_fault_23_padding_writes_nowhere(self, dtype):
    """4 pages, lengths [3, 0]: the row 99.0 of the empty sequence at -1."""
    before = filled(init_cache(tiny(), 4, dtype=dtype))
    table = jnp.array([[0, 1], [2, 3]], jnp.int32)
    lengths = np.array([3, 0], np.int32)
    rows = make_rows_jit(np.int32([0, 1]), lengths - 1, table)
    slots = np.asarray(rows.slots)
    self.assertEqual(slots.tolist(), [2, -1])
    values = np.repeat(np.float32([[1], [99]]), R + P, axis=1)
    for layer in (0, 4):
      both = write_both_jit(before, layer, 3, slots, values, values[:, :H])
      one = write_both_jit(
        before, layer, 3, slots[:1], values[:1], values[:1, :H]
      )
      assert_same_cache(both, one)
      back = read_rows_jit(both, layer, np.int32([2]))
      assert_close(back, values[:1], atol=0, rtol=2**-8, name='row 1.0')
    # Nothing but padding: not a byte changes.
    none = np.int32([-1, -1])
    none = write_both_jit(before, 0, 0, none, values, values[:, :H])
    assert_same_cache(none, before)

  @parameterized.product(dtype=DTYPES)
  def test_known_fault_29_padding_rows_alias_a_live_request(self, dtype):
    """A bucket of 8 with 3 live rows; padding says sequence 0, position -1."""
    rng = np.random.default_rng(29)
    before = filled(init_cache(tiny(), 4, dtype=dtype))
    table = jnp.array([[3, 1], [2, -1]], jnp.int32)
    bucket = make_rows_jit(
      np.int32([0, 1, 1, 0, 0, 0, 0, 0]),
      np.int32([64, 6, 7, -1, -1, -1, -1, -1]),
      table,
    )
    slots = np.asarray(bucket.slots)
    self.assertEqual(slots.tolist(), [64, 134, 135] + [-1] * 5)
    rows, keys = random_rows(rng, 8), random_rows(rng, 8, H)
    rows[3:], keys[3:] = np.nan, np.nan

    step = lambda n: write_both_jit(before, 1, 1, slots[:n], rows[:n], keys[:n])
    assert_same_cache(step(8), step(3))

  @parameterized.product(dtype=DTYPES)
  def test_known_fault_24_select_and_attend_in_a_cache_of_nan(self, dtype):
    """13 rows in a cache of NaN, k=16: as in a clean cache, bit for bit."""
    rng = np.random.default_rng(24)
    config = tiny()
    plan = LocalPlan()
    table = jnp.array([[2, -1], [1, 0]], jnp.int32)
    row = jnp.int32([0, 1, 0]), jnp.int32([12, 0, -1])
    rows, keys = random_rows(rng, 13), random_rows(rng, 13, H)
    wide = jnp.bfloat16 if dtype == 'bf16' else jnp.float32
    index_q = jnp.asarray(rng.normal(size=(3, 2, H)), wide)
    w = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(3, 2, R + P)), wide)

    @jax.jit
    def step(cache):
      write = make_rows(
        jnp.int32([0] * 13 + [1]), jnp.int32([*range(13), 0]), table
      )
      given = jnp.concatenate([rows, rows[:1]])
      cache = write_rows(cache, 1, write.slots, given)
      given = jnp.concatenate([keys, keys[:1]])
      cache = write_index_keys(cache, 1, write.slots, given)
      asked = make_rows(*row, table)
      selection = plan.select(index_q, w, cache, asked, 1, 16)
      return selection, plan.attend(q, cache, selection, 1, 0.2)

    selection, out = step(poisoned(init_cache(config, 3, dtype=dtype)))
    clean_selection, clean = step(init_cache(config, 3, dtype=dtype))
    expected = [[*range(13)] + [-1] * 3, [0] + [-1] * 15, [-1] * 16]
    self.assertEqual(selection.positions.tolist(), expected)
    assert_bit_equal(selection.slots, clean_selection.slots, name='slots')
    self.assertTrue(np.isfinite(np.asarray(out, np.float32)).all())
    assert_bit_equal(out, clean, name='attended')
    np.testing.assert_array_equal(np.asarray(out[2], np.float32), 0)

  @parameterized.product(dtype=('f32', 'fp8'))
  def test_known_fault_31_slot_beyond_the_pool(self, dtype):
    """Pool of 8 pages, ids up to 9: nothing is written, zeros are read."""
    rng = np.random.default_rng(31)
    before = filled(init_cache(tiny(), 8, dtype=dtype))
    table = jnp.array([[7, 9, 8]], jnp.int32)
    rows = make_rows_jit(
      np.zeros(4, np.int32), np.int32([1, 64, 130, 2]), table
    )
    slots = np.asarray(rows.slots)
    self.assertEqual(slots.tolist(), [449, 576, 514, 450])
    values, keys = random_rows(rng, 4), random_rows(rng, 4, H)

    # The first layer: a slot past it would be a slot of the second.
    write = functools.partial(write_both_jit, before, 0, 0)
    good = np.array([0, 3])
    expected = write(slots[good], values[good], keys[good])
    assert_same_cache(write(slots, values, keys), expected)
    for read, width in ((read_rows_jit, R + P), (read_keys_jit, H)):
      back = np.asarray(read(expected, 0, slots), np.float32)
      self.assertEqual(back.shape, (4, width))
      np.testing.assert_array_equal(back[[1, 2]], 0)
      self.assertTrue((back[[0, 3]] != 0).any())

  def test_known_fault_31_slot_beyond_the_pool_raises_in_debug_mode(self):
    cache = init_cache(tiny(), 8, dtype='f32')
    values, keys = np.ones((4, R + P)), np.ones((4, H))
    calls = {
      'write_rows': lambda s: write_rows(cache, 0, s, values),
      'write_index_keys': lambda s: write_index_keys(cache, 0, s, keys),
      'read_rows': lambda s: read_rows(cache, 0, s),
      'read_index_keys': lambda s: read_index_keys(cache, 0, s),
    }
    for name, call in calls.items():
      with self.subTest(name):
        check = checkify.checkify(call, errors=checkify.user_checks)
        debug = jax.jit(check)
        error, _ = debug(np.int32([0, -1, 511, 5]))
        self.assertIsNone(error.get())
        error, _ = debug(np.int32([0, -1, 512, 5]))
        self.assertIn('slot 512 is beyond the pool of 512', error.get())

  def test_known_fault_31_rows_without_a_page_raise_in_debug_mode(self):
    table = jnp.array([[7, -1]], jnp.int32)
    check = checkify.checkify(make_rows, errors=checkify.user_checks)
    debug, zero = jax.jit(check), np.zeros(2, np.int32)
    error, _ = debug(zero, np.int32([63, -1]), table)
    self.assertIsNone(error.get())
    for seq, pos in ((zero, [63, 64]), (zero, [0, 128]), (zero + 1, [0, -1])):
      error, _ = debug(seq, np.int32(pos), table)
      self.assertIn('a row has no page: positions up to', error.get())
      self.assertIn('page table of 2 pages', error.get())

  def test_known_fault_31_plan_raises_in_debug_mode(self):
    """The plan adds the layer's offset: its ids must be of one layer."""
    cache = init_cache(tiny(), 8, dtype='f32')
    table = np.int32([[7, 9]])
    rows = make_rows_jit(np.int32([0]), np.int32([70]), table)
    plan, q = LocalPlan(), np.ones((1, 2, H), np.float32)
    select = lambda rows: plan.select(q, q[..., 0], cache, rows, 0, 4)
    debug = jax.jit(checkify.checkify(select, errors=checkify.user_checks))
    error, selection = debug(rows)
    self.assertIn('page 9 is beyond the pool of 8', error.get())
    selection = dataclasses.replace(
      selection, slots=jnp.full((1, 4), 8 * 64, jnp.int32)
    )
    q = np.ones((1, 2, R + P), np.float32)
    attend = lambda s: plan.attend(q, cache, s, 0, 1.0)
    debug = jax.jit(checkify.checkify(attend, errors=checkify.user_checks))
    error, _ = debug(selection)
    self.assertIn('slot 512 is beyond the pool of 512', error.get())


class MemoryTest(parameterized.TestCase):
  def compiled(self, f, *args):
    lowered = jax.jit(f, donate_argnums=0).lower(*args)
    return lowered.compile().memory_analysis()

  @parameterized.product(dtype=DTYPES)
  def test_donated_writes_are_in_place(self, dtype):
    """Eight rows into every layer of a scan: no copy of a pool."""
    if dtype == 'bf16' and jax.default_backend() == 'cpu':
      self.skipTest('XLA on CPU widens a whole bf16 pool to scatter into it')
    config = tiny('F' * 6, mtp=0)
    cache = jax.eval_shape(lambda: init_cache(config, 64, dtype=dtype))
    shape = jax.ShapeDtypeStruct

    def step(cache, slots, rows, keys, asked):
      def body(cache, layer):
        cache = write_rows(cache, layer, slots, rows)
        cache = write_index_keys(cache, layer, slots, keys)
        return cache, jnp.sum(read_rows(cache, layer, asked))

      return jax.lax.scan(body, cache, jnp.arange(6, dtype=jnp.int32))

    analysis = self.compiled(
      step,
      cache,
      shape((8,), jnp.int32),
      shape((8, R + P), jnp.float32),
      shape((8, H), jnp.float32),
      shape((8, 16), jnp.int32),
    )
    pools = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache))
    self.assertGreaterEqual(analysis.alias_size_in_bytes, pools)
    limit = 1 << 17
    if dtype == 'fp8' and jax.default_backend() == 'cpu':
      limit += 2 * cache.index_keys.size  # e4m3 keys are scattered as f16
    self.assertLess(analysis.temp_size_in_bytes, limit)
    self.assertGreater(pools, 40 * limit if dtype == 'f32' else 5 * limit)

  def test_known_fault_25_cache_beyond_two_gigabytes_compiles(self):
    """A write to the last layer of 1M tokens (fp8: 52.7 GiB), in place."""
    cache = jax.eval_shape(lambda: init_cache(glm52(), 16_384, dtype='fp8'))
    self.assertGreater(cache.latents.size, 2**31)
    shape = jax.ShapeDtypeStruct

    def step(cache, slots, rows):
      cache = write_rows(cache, 78, slots, rows)
      return cache, read_rows(cache, 78, slots)

    analysis = self.compiled(
      step, cache, shape((8,), jnp.int32), shape((8, 576), jnp.bfloat16)
    )
    self.assertGreaterEqual(analysis.alias_size_in_bytes, cache.latents.size)
    self.assertLess(analysis.temp_size_in_bytes, 1 << 19)

  @pytest.mark.long
  def test_known_fault_25_rows_beyond_two_gigabytes(self):
    """Bytes past 2^31 and 2^32 of one pool are their own rows (4.3 GB)."""
    config = tiny('F', mtp=0)
    pages = (1 << 24) // 64 + 1
    cache = init_cache(config, pages, dtype='fp8')
    self.assertGreater(cache.latents.size, 2**32)
    write = jax.jit(write_rows, donate_argnums=0)
    half, whole = (1 << 31) // 256, (1 << 32) // 256
    slots = np.int32([0, half - 1, half, half + 1, whole - 1, whole])
    rows = np.repeat(np.float32([[1], [2], [3], [4], [5], [6]]), R + P, 1)
    cache = write(cache, 0, slots, rows)
    back = np.asarray(read_rows_jit(cache, 0, slots), np.float32)
    assert_close(back, rows, atol=0, rtol=2**-8, name='rows')


class DocumentedNamesTest(absltest.TestCase):
  def test_dtypes(self):
    self.assertEqual(cache_lib.CACHE_DTYPES, DTYPES)


if __name__ == '__main__':
  absltest.main()
