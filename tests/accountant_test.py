"""The accountant against published figures, the model and the allocator."""

import dataclasses

import jax
import pytest
from absl.testing import parameterized

from glm_jax import presets
from glm_jax.cache import bytes_per_token, init_cache
from glm_jax.model import abstract_model
from pallas_kernels.tiling import PAGE
from sharding import accountant, capacity, partials
from sharding.chips import CHIPS, chip_named

GLM52 = presets.PRESETS['glm52']
GLM51 = presets.PRESETS['glm51']
MILLION = 1_048_576


def matrix_elements(module):
  """Elements of a module's matrices; norms and biases are left out."""
  leaves = jax.tree.leaves(module)
  return sum(leaf.size for leaf in leaves if leaf.ndim > 1)


class FlopsTest(parameterized.TestCase):
  def test_active_parameters_are_those_of_the_model(self):
    self.assertAlmostEqual(accountant.active_params(GLM52), 40.30e9, delta=1e7)
    self.assertAlmostEqual(accountant.active_params(GLM51), 40.83e9, delta=1e7)
    for name in ('glm52', 'tiny'):
      config = presets.PRESETS[name]
      model = abstract_model(config)
      block = model.prologue[0]
      self.assertEqual(
        accountant.attention_params(config), matrix_elements(block.attention)
      )
      self.assertEqual(
        accountant.indexer_params(config), matrix_elements(block.indexer)
      )
      self.assertEqual(
        accountant.mlp_params(config, moe=False), matrix_elements(block.mlp)
      )
      self.assertEqual(
        accountant.mlp_params(config, moe=True, active=False),
        matrix_elements(model.mtp.block.moe)
        + matrix_elements(model.mtp.experts),
      )
      # All experts, embedding and drafter: nothing is missing.
      c, D = config.moe, config.hidden_size
      idle = 3 * D * c.intermediate_size * (c.num_experts - c.experts_per_token)
      moes = sum(kind == 'sparse' for kind in config.mlp_types)
      everything = (
        accountant.active_params(config)
        + accountant.active_params(config, drafter=True, head=False)
        + (moes + 1) * idle
        + config.vocab_size * D
      )
      stacked = sum(
        a.size for a in jax.tree.leaves(model.groups) if a.ndim == 2
      )
      self.assertEqual(everything, matrix_elements(model) - stacked)

  @parameterized.parameters(
    (32 * 1024, 0.125, 0.109),
    (128 * 1024, 0.188, 0.125),
    (200 * 1024, 0.235, 0.138),
    (256 * 1024, 0.271, 0.148),
    (512 * 1024, 0.439, 0.193),
    (MILLION, 0.774, 0.283),
  )
  def test_the_table_of_the_fact_sheet(self, context, every, shared):
    total = lambda c: accountant.token_flops(c, context).total / 1e12
    self.assertAlmostEqual(total(GLM51), every, delta=2e-3)
    self.assertAlmostEqual(total(GLM52), shared, delta=2e-3)

  @parameterized.parameters(
    ('absorbed', 2.73), ('expanded', 2.81), ('no_core', 2.88)
  )
  def test_ratio_of_sharing_at_a_million(self, counting, ratio):
    got = accountant.sharing_ratio(GLM52, MILLION, counting=counting)
    self.assertAlmostEqual(got, ratio, delta=5e-3)
    drafter = accountant.sharing_ratio(GLM52, MILLION, with_drafter=True)
    self.assertAlmostEqual(drafter, 2.66, delta=5e-3)

  def test_prefill_of_the_whole_context(self):
    shared = accountant.prefill_flops(GLM52, MILLION)
    every = accountant.prefill_flops(GLM51, MILLION)
    self.assertAlmostEqual(every.total / 1e15, 458, delta=1)
    self.assertAlmostEqual(shared.total / 1e15, 200, delta=1)
    self.assertAlmostEqual(every.indexer / 1e15, 351, delta=1)
    self.assertAlmostEqual(shared.indexer / 1e15, 95, delta=1)
    self.assertAlmostEqual(every.total / shared.total, 2.29, delta=5e-3)

  def test_known_fault_51_four_rows_make_ten_pairs(self):
    self.assertEqual(accountant.visible_pairs(0, 4), 10)
    config = dataclasses.replace(
      presets.PRESETS['tiny'],
      indexer=dataclasses.replace(presets.PRESETS['tiny'].indexer, topk=3),
    )
    # Rows see 1, 2, 3, 4 keys and attend to at most three of them.
    self.assertEqual(accountant.selected_pairs(0, 4, 3), 1 + 2 + 3 + 3)
    flops = accountant.rows_flops(config, 0, 4)
    per_key = 2 * config.indexer.num_heads * config.indexer.head_dim
    fulls = config.indexer_types.count('full')
    self.assertEqual(flops.indexer, 10 * per_key * fulls)
    core = accountant.core_flops(config)
    self.assertEqual(flops.attention, 9 * core * config.num_layers)

  @parameterized.parameters(3, 64, 100, 2048)
  def test_rows_add_up_to_chunks(self, topk):
    config = dataclasses.replace(
      GLM52, indexer=dataclasses.replace(GLM52.indexer, topk=topk)
    )
    one = [accountant.rows_flops(config, p, 1).total for p in range(130)]
    whole = accountant.rows_flops(config, 0, 130).total
    parts = accountant.rows_flops(config, 0, 70) + accountant.rows_flops(
      config, 70, 60
    )
    self.assertEqual(sum(one), whole)
    self.assertEqual(parts.total, whole)

  def test_a_round_of_drafting(self):
    drafts = 3
    got = accountant.round_flops(GLM52, MILLION, drafts)
    verify = accountant.rows_flops(GLM52, MILLION - 1, drafts + 1)
    self.assertGreater(got.total, verify.total)
    # The drafter indexes each verified row once, not once a draft step.
    per_row = 2 * 32 * 128 * MILLION
    self.assertAlmostEqual(
      got.indexer - verify.indexer, 4 * per_row, delta=4 * per_row * 1e-4
    )

  def test_unknown_counting(self):
    with self.assertRaisesRegex(ValueError, 'dense.*no_core'):
      accountant.core_flops(GLM52, 'dense')


class CapacityTest(parameterized.TestCase):
  def test_known_fault_43_a_buffer_a_layer_and_kind(self):
    for dtype, row, key, total in (
      ('bf16', 1152, 256, 95_232),
      ('fp8', 656, 132, 53_940),
    ):
      pools = capacity.pools(GLM52, dtype)
      of = lambda name, drafter: [
        p.bytes_per_token
        for p in pools
        if p.name == name and p.drafter == drafter
      ]
      self.assertEqual(of('latent', False), [row] * 78)
      self.assertEqual(of('index', False), [key] * 21)
      self.assertEqual(of('latent', True), [row])
      self.assertEqual(of('index', True), [key])
      trunk = sum(of('latent', False)) + sum(of('index', False))
      self.assertEqual(trunk, total)

  @parameterized.product(name=('glm52', 'tiny'), dtype=('bf16', 'fp8', 'f32'))
  def test_known_fault_43_the_sum_is_what_the_allocator_allocates(
    self, name, dtype
  ):
    config, pages = presets.PRESETS[name], 3
    cache = jax.eval_shape(lambda: init_cache(config, pages, dtype=dtype))
    size = lambda a: a.size * a.dtype.itemsize
    cache = dataclasses.replace(cache, hidden=None)
    allocated = sum(map(size, jax.tree.leaves(cache)))
    pools = capacity.pools(config, dtype, physical=True)
    per_token = sum(p.bytes_per_token for p in pools)
    self.assertEqual(per_token * pages * PAGE, allocated)
    both = [
      bytes_per_token(config, dtype, physical=True, drafter=drafter)
      for drafter in (False, True)
    ]
    self.assertEqual(per_token, sum(both))

  def test_capacity_at_eight_ways(self):
    whole = capacity.capacity_bytes(GLM52, 'replicated', 8)
    self.assertEqual(whole, 95_232 + 1_408)
    gain = lambda plan, slots: (
      whole / capacity.capacity_bytes(GLM52, plan, 8, slots=slots)
    )
    self.assertGreaterEqual(gain('layer_split', 2), 6.2)
    self.assertGreaterEqual(gain('layer_split', 1), 6.8)
    self.assertGreaterEqual(gain('token_split', 2), 6.4)
    self.assertGreaterEqual(gain('token_split', 0), 7.8)
    self.assertEqual(capacity.largest_record(GLM52), 1_408)

  @parameterized.parameters(1, 2, 7, 8, 16, 79)
  def test_the_largest_share_is_the_best_possible(self, ways):
    share = capacity.balanced_share(GLM52, ways)
    sizes = {}
    for p in capacity.pools(GLM52):
      sizes[p.layer] = sizes.get(p.layer, 0) + p.bytes_per_token

    def shares(bound):
      count, filled = 1, 0
      for size in sizes.values():
        if size > bound:
          return 1000
        count, filled = (
          (count, filled + size)
          if filled + size <= bound
          else (count + 1, size)
        )
      return count

    self.assertLessEqual(shares(share), ways)
    self.assertGreater(shares(share - 1), ways)

  def test_errors_name_the_value(self):
    with self.assertRaisesRegex(ValueError, '80 ranks: use 1 to 79'):
      capacity.balanced_share(GLM52, 80)
    with self.assertRaisesRegex(ValueError, "'ring'.*token_split"):
      capacity.capacity_bytes(GLM52, 'ring', 8)

  @parameterized.parameters((128, 5.0), (256, 8.0), (8, 2.5), (1, 1.0))
  def test_attention_that_a_rank_executes(self, ways, most):
    bound = partials.bound(GLM52.indexer.topk, ways)
    ratio = accountant.executed_attention_ratio(GLM52, MILLION, ways, bound)
    self.assertBetween(ratio, 1, most)

  def test_decode_reads_mostly_index_keys(self):
    read = capacity.cache_bytes_read(GLM52, MILLION, dtype='fp8')
    keys = 21 * 132 * MILLION
    self.assertAlmostEqual(keys, 2.91e9, delta=1e7)
    self.assertAlmostEqual(read - keys, 78 * 2048 * 656, delta=1)
    weights = capacity.weight_bytes_read(GLM52, 1, 2)
    self.assertAlmostEqual(
      weights, 2 * accountant.active_params(GLM52), delta=1
    )
    # A thousand rows reach every expert.
    wide = capacity.weight_bytes_read(GLM52, 1024, 2)
    self.assertAlmostEqual(wide / 2, 743e9 - 951e6, delta=3e9)


class ChipTest(parameterized.TestCase):
  def test_devices_of_a_chip_share_it(self):
    chip = chip_named('tpu7x:4x4x4')
    self.assertEqual(chip.devices_per_chip, 2)
    self.assertEqual(chip.peak() * 2, chip.bf16_flops)
    self.assertEqual(chip.bandwidth * 2, chip.hbm_bandwidth)
    # Six links of 100 GB/s each way; two of them on an axis.
    self.assertEqual(chip.link_bandwidth, 100e9)
    self.assertEqual(CHIPS['v5p'].link_bandwidth, 200e9)
    for chip in CHIPS.values():
      self.assertLessEqual(chip.limit_bytes, chip.hbm_bytes)

  def test_roofline_is_the_slower_side(self):
    chip = CHIPS['v6e']
    self.assertEqual(accountant.roofline_seconds(918e12, 0, chip, 1), 1)
    self.assertEqual(accountant.roofline_seconds(0, 1638e9, chip, 1), 1)
    both = accountant.roofline_seconds(918e12, 3276e9, chip, 2)
    self.assertEqual(both, 1)

  def test_unknown_generation(self):
    with pytest.raises(ValueError, match='v9.*v5e, v5p, v6e, tpu7x'):
      chip_named('v9:2x2')
