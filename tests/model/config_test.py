"""Every error of the configuration, and the layer plan by brute force."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from glm_jax.config import (
  IndexerConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  MtpConfig,
)
from glm_jax.layer_plan import layer_plan
from glm_jax.plan import Selection
from glm_jax.published_config import (
  config_from_published,
  config_to_published,
  index_pattern,
)

FULL_LAYERS = (0, 1, 2, *range(6, 78, 4))
KINDS = {'F': 'full', 'S': 'shared', 'd': 'dense', 's': 'sparse'}

# The published GLM-5.2 config.json (spec/model.md section 1.1).
GLM52 = {
  'architectures': ['GlmMoeDsaForCausalLM'],
  'model_type': 'glm_moe_dsa',
  'attention_bias': False,
  'dtype': 'bfloat16',
  'eos_token_id': [154820, 154827, 154829],
  'ep_size': 1,
  'first_k_dense_replace': 3,
  'head_dim': 192,
  'hidden_act': 'silu',
  'hidden_size': 6144,
  'index_head_dim': 128,
  'index_n_heads': 32,
  'index_share_for_mtp_iteration': True,
  'index_skip_topk_offset': 3,
  'index_topk': 2048,
  'index_topk_freq': 4,
  'index_topk_pattern': None,
  'indexer_rope_interleave': True,
  'indexer_types': [
    'full' if i in FULL_LAYERS else 'shared' for i in range(78)
  ],
  'initializer_range': 0.02,
  'intermediate_size': 12288,
  'kv_lora_rank': 512,
  'max_position_embeddings': 1048576,
  'mlp_layer_types': ['dense'] * 3 + ['sparse'] * 75,
  'moe_intermediate_size': 2048,
  'moe_layer_freq': 1,
  'moe_router_dtype': 'float32',
  'n_group': 1,
  'n_routed_experts': 256,
  'n_shared_experts': 1,
  'norm_topk_prob': True,
  'num_attention_heads': 64,
  'num_experts_per_tok': 8,
  'num_hidden_layers': 78,
  'num_key_value_heads': 64,
  'num_nextn_predict_layers': 1,
  'pad_token_id': 154820,
  'pretraining_tp': 1,
  'q_lora_rank': 2048,
  'qk_head_dim': 256,
  'qk_nope_head_dim': 192,
  'qk_rope_head_dim': 64,
  'rms_norm_eps': 1e-05,
  'rope_interleave': True,
  'rope_parameters': {'rope_theta': 8000000, 'rope_type': 'default'},
  'routed_scaling_factor': 2.5,
  'scoring_func': 'sigmoid',
  'tie_word_embeddings': False,
  'topk_group': 1,
  'topk_method': 'noaux_tc',
  'use_cache': True,
  'v_head_dim': 256,
  'vocab_size': 154880,
}


def kinds(letters):
  return tuple(KINDS[c] for c in letters)


def published(letters, **changes):
  """A published config with a pattern, all layers sparse, and no rule."""
  config = {
    'num_hidden_layers': len(letters),
    'indexer_types': list(kinds(letters)),
    'first_k_dense_replace': 0,
  }
  return {**config, **changes}


def model_config(letters, mlps=None, **changes):
  mlps = mlps or 's' * len(letters)
  return ModelConfig(
    indexer_types=kinds(letters), mlp_types=kinds(mlps), **changes
  )


class PublishedConfigTest(parameterized.TestCase):
  def test_every_value_of_glm52(self):
    self.assertEqual(
      config_from_published(GLM52),
      ModelConfig(
        vocab_size=154880,
        hidden_size=6144,
        intermediate_size=12288,
        indexer_types=kinds('FF' + 'FSSS' * 19),
        mlp_types=kinds('ddd' + 's' * 75),
        mla=MlaConfig(
          num_heads=64,
          q_lora_rank=2048,
          kv_lora_rank=512,
          qk_nope_head_dim=192,
          qk_rope_head_dim=64,
          v_head_dim=256,
          latent_norm_eps=1e-5,
        ),
        indexer=IndexerConfig(
          num_heads=32, head_dim=128, topk=2048, key_norm_eps=1e-6
        ),
        moe=MoeConfig(
          num_experts=256,
          experts_per_token=8,
          num_shared_experts=1,
          intermediate_size=2048,
          routed_scaling_factor=2.5,
          norm_topk_prob=True,
        ),
        mtp=MtpConfig(num_layers=1, share_index_and_kv=True, own_head=False),
        rms_norm_eps=1e-5,
        rope_theta=8e6,
        max_position_embeddings=1_048_576,
        tie_word_embeddings=False,
        initializer_range=0.02,
        eos_token_ids=(154820, 154827, 154829),
        pad_token_id=154820,
        dtype='bfloat16',
        weight_block_size=None,
      ),
    )

  def test_absent_keys_take_the_values_of_glm52(self):
    """All but the drafter, which only a present key asks for."""
    empty = config_from_published({})
    whole = config_from_published(GLM52)
    self.assertEqual(empty.mtp.num_layers, 0)
    self.assertEqual(dataclasses.replace(empty, mtp=whole.mtp), whole)
    nulls = config_from_published(dict.fromkeys(GLM52))
    self.assertEqual(nulls.indexer_types, empty.indexer_types)
    self.assertEqual(nulls.mla, empty.mla)
    rope = {'rope_theta': None, 'rope_type': None}
    config = {'rope_parameters': rope, 'rope_theta': None}
    self.assertEqual(config_from_published(config), empty)

  @parameterized.parameters(
    ({},),
    (GLM52,),
    ({**GLM52, 'num_nextn_predict_layers': 0, 'tie_word_embeddings': True},),
    ({**GLM52, 'dtype': 'float32', 'latent_norm_eps': 1e-6},),
    (published('FSFSS', qk_nope_head_dim=24, pad_token_id=None),),
    (
      {
        **published('FFSS', mlp_layer_types=['dense', 'sparse'] * 2),
        'first_k_dense_replace': 1,
        'n_shared_experts': 0,
        'quantization_config': {
          'quant_method': 'fp8',
          'weight_block_size': [16, 32],
        },
      },
    ),
  )
  def test_round_trip(self, config):
    first = config_from_published(config)
    out = json.loads(json.dumps(config_to_published(first)))
    self.assertEqual(config_from_published(out), first)
    self.assertEqual(config_to_published(config_from_published(out)), out)

  def test_published_keys_survive(self):
    """What we write says what GLM-5.2's own file says."""
    out = config_to_published(config_from_published(GLM52))
    for key in set(out) & set(GLM52):
      self.assertEqual(out[key], GLM52[key], key)

  @parameterized.parameters(192, 64, 7, None)
  def test_head_dim_is_never_read(self, head_dim):
    """GLM-5.2 says 192, GLM-5 says 64; qk_* is what counts."""
    config = config_from_published({**GLM52, 'head_dim': head_dim})
    self.assertEqual(config, config_from_published(GLM52))
    self.assertNotIn('head_dim', config_to_published(config))

  def test_other_generations(self):
    """GLM-5.1: every layer full, theta 1e6, a shorter window."""
    config = config_from_published(
      {
        'num_hidden_layers': 78,
        'indexer_types': None,
        'index_topk_freq': 1,
        'rope_parameters': {'rope_theta': 1e6, 'rope_type': 'default'},
        'max_position_embeddings': 202752,
        'head_dim': 64,
        'eos_token_id': 5,
      }
    )
    self.assertEqual(config.indexer_types, ('full',) * 78)
    self.assertEqual((config.rope_theta, config.eos_token_ids), (1e6, (5,)))
    self.assertEqual(config_from_published({'rope_theta': 1e6}).rope_theta, 1e6)
    old = {'rope_scaling': {'type': 'default', 'rope_theta': 5e5}}
    self.assertEqual(config_from_published(old).rope_theta, 5e5)

  @parameterized.parameters(
    # Layer kinds.
    ({'indexer_types': ['shared'] + ['full'] * 77}, 'first layer must be'),
    ({'indexer_types': ['full', 'sparse'] * 39}, r"holds \['sparse'\]: only"),
    ({'indexer_types': ['full'] * 77}, '77 entries but num_hidden_layers=78'),
    (
      {'indexer_types': ['full'] * 78, 'index_topk_pattern': 'FS' * 39},
      'indexer_types and index_topk_pattern disagree at layer 1',
    ),
    ({'index_topk_pattern': 'FXS' * 26}, r"index_topk_pattern holds \['X'\]"),
    ({'index_topk_pattern': 'FFS'}, 'index_topk_pattern has 3 entries but'),
    ({'index_topk_pattern': 'S' * 78}, 'first layer must be'),
    (
      {**GLM52, 'index_topk_freq': 2},
      r'indexer_types and index_topk_freq\+index_skip_topk_offset disagree '
      r'at layer 4 \(shared against full\): remove the wrong one',
    ),
    ({**GLM52, 'index_skip_topk_offset': 2}, 'disagree at layer 2'),
    ({'index_topk_freq': 0}, 'index_topk_freq=0 and index_skip_topk'),
    ({'index_skip_topk_offset': -1}, 'index_skip_topk_offset=-1 must be'),
    ({'num_hidden_layers': 0}, 'indexer_types is empty: a model needs'),
    ({'layer_types': ['full_attention'] * 78}, r"\['full_attention'\]: every"),
    # MLP kinds.
    ({'mlp_layer_types': ['dense', 'moe'] * 39}, r"holds \['moe'\]: only"),
    ({'mlp_layer_types': ['dense'] * 3}, '3 entries but num_hidden_layers'),
    ({**GLM52, 'first_k_dense_replace': 1}, '=1 contradicts mlp_layer_types'),
    # What this code does not implement.
    ({'model_type': 'deepseek_v32'}, "model_type='deepseek_v32' is not supp"),
    ({'topk_method': 'greedy'}, "topk_method='greedy'.*'noaux_tc' only"),
    ({'scoring_func': 'softmax'}, "scoring_func='softmax'.*'sigmoid' only"),
    ({'n_group': 8}, 'n_group=8 is not supported.*1 only'),
    ({'topk_group': 4}, 'topk_group=4 is not supported'),
    ({'moe_layer_freq': 2}, 'moe_layer_freq=2 is not supported'),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported"),
    ({'attention_bias': True}, 'attention_bias=True is not supported'),
    ({'mlp_bias': True}, 'mlp_bias=True is not supported'),
    ({'rope_interleave': False}, 'rope_interleave=False is not'),
    ({'indexer_rope_interleave': False}, 'indexer_rope_interleave=False'),
    ({'attention_dropout': 0.1}, 'attention_dropout=0.1 is not supported'),
    ({'moe_router_dtype': 'bfloat16'}, "moe_router_dtype='bfloat16' is not"),
    ({'dtype': 'float16'}, "dtype='float16' is not supported"),
    ({'torch_dtype': 'float16'}, "torch_dtype='float16' is not supported"),
    ({'rope_scaling': {'type': 'yarn'}}, "rope_type='yarn' is not supported"),
    ({'rope_parameters': {'rope_type': 'linear'}}, "rope_type='linear'"),
    (
      {**GLM52, 'rope_theta': 1e6},
      'rope_theta=1000000.0 contradicts rope_parameters.rope_theta=8000000',
    ),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5 is not'),
    ({'num_nextn_predict_layers': 2}, 'num_nextn_predict_layers=2 is not'),
    ({'num_nextn_predict_layers': -1}, 'num_nextn_predict_layers=-1 is not'),
    # Quantisation.
    ({'quantization_config': {'quant_method': 'awq'}}, "quant_method='awq'"),
    ({'quantization_config': {'quant_method': 'fp8'}}, r'block_size=\[\]'),
    (
      {
        'quantization_config': {
          'quant_method': 'fp8',
          'fmt': 'e5m2',
          'weight_block_size': [128, 128],
        }
      },
      "fmt='e5m2'.*only block-scaled fp8",
    ),
    (
      {
        'quantization_config': {
          'quant_method': 'fp8',
          'weight_block_size': [0, 128],
        }
      },
      r'weight_block_size=\[0, 128\]',
    ),
    # Numbers.
    ({'qk_head_dim': 192}, r'qk_head_dim=192 contradicts.*192 \+ 64'),
    ({'qk_head_dim': 256, 'qk_nope_head_dim': 128}, r'128 \+ 64: correct'),
    ({'hidden_size': -1}, 'hidden_size=-1 must be positive'),
    ({'vocab_size': 0}, 'vocab_size=0 must be positive'),
    ({'num_attention_heads': 0}, 'mla.num_heads=0 must be positive'),
    ({'index_topk': 0}, 'indexer.topk=0 must be positive'),
    ({'n_routed_experts': -4}, 'moe.num_experts=-4 must be positive'),
    ({'n_shared_experts': -1}, 'num_shared_experts=-1 must be positive'),
    ({'rms_norm_eps': -1e-5}, 'rms_norm_eps=-1e-05 must be positive'),
    ({'routed_scaling_factor': float('nan')}, 'factor=nan must be positive'),
    ({'qk_rope_head_dim': 33}, 'qk_rope_head_dim=33 must be even'),
    ({'index_head_dim': 127}, 'index_head_dim=127 must be even'),
    ({'index_head_dim': 32}, 'index_head_dim=32 is less than qk_rope_head_d'),
    (
      {'num_experts_per_tok': 9, 'n_routed_experts': 8},
      'num_experts_per_tok=9 exceeds n_routed_experts=8',
    ),
  )
  def test_message(self, config, message):
    with self.assertRaisesRegex(ValueError, message):
      config_from_published(config)

  def test_messages_of_a_config_made_by_hand(self):
    cases = [
      (dict(), 'indexer_types is empty'),
      (dict(indexer_types=('full',)), '0 mlp_types for 1 indexer_types'),
      (
        dict(indexer_types=('full', 'none'), mlp_types=('dense', 'dense')),
        r"layer types \['none'\] are unknown: use \('full', 'shared'\)",
      ),
      (
        dict(indexer_types=('full',), mlp_types=('moe',)),
        r"layer types \['moe'\] are unknown: use \('dense', 'sparse'\)",
      ),
    ]
    for fields, message in cases:
      with self.subTest(message):
        with self.assertRaisesRegex(ValueError, message):
          ModelConfig(**fields)


class PatternTest(parameterized.TestCase):
  def test_known_fault_1_full_layers_of_glm52(self):
    """21 of 78 own an indexer; rule, list and pattern say the same."""
    letters = ''.join('FS'[i not in FULL_LAYERS] for i in range(78))
    self.assertLen(FULL_LAYERS, 21)
    rule = {'index_topk_freq': 4, 'index_skip_topk_offset': 3}
    for config in (
      {},
      GLM52,
      rule,
      {'index_topk_pattern': letters},
      {'index_topk_pattern': letters, **rule},
      {'index_topk_freq': 4},
    ):
      self.assertEqual(index_pattern(config), kinds(letters))

  @parameterized.parameters(
    (8, 4, 3, 'FFFSSSFS'),  # T1 of spec/known_faults.md
    (8, 4, 0, 'SSSFSSSF'),
    (8, 4, 1, 'FSSSFSSS'),
    (6, 1, 3, 'FFFFFF'),
    (7, 2, 2, 'FFSFSFS'),
  )
  def test_freq_and_offset(self, n, freq, offset, letters):
    """full iff max(i - offset + 1, 0) mod freq == 0."""
    config = {
      'num_hidden_layers': n,
      'index_topk_freq': freq,
      'index_skip_topk_offset': offset,
    }
    self.assertEqual(index_pattern(config), kinds(letters))

  def test_half_a_rule_does_not_contradict_a_list(self):
    config = {**GLM52, 'index_skip_topk_offset': None, 'index_topk_freq': 2}
    self.assertEqual(index_pattern(config), index_pattern(GLM52))


def brute_force_tail(layers):
  """(prologue, group size, groups): every split is tried."""
  n, best = len(layers), (0, 0, 0)
  for size in range(1, n + 1):
    for count in range(2, n // size + 1):
      tail = layers[n - size * count :]
      groups = [tail[i * size : (i + 1) * size] for i in range(count)]
      same = all(g == groups[0] for g in groups)
      if same and groups[0][0][0] == 'full':
        best = max(best, (size * count, -size, count))
  covered, negative, count = best
  return n - covered, -negative, count


class LayerPlanTest(parameterized.TestCase):
  def check_plan(self, config):
    """All properties of a plan, each counted the slow way."""
    plan = layer_plan(config)
    types, mlps, n = config.indexer_types, config.mlp_types, config.num_layers
    layers = list(zip(types, mlps))
    self.assertEqual(
      (plan.prologue, plan.group_size, plan.num_groups),
      brute_force_tail(layers),
    )
    self.assertEqual(plan.prologue + plan.group_size * plan.num_groups, n)
    source, slot, moe = None, -1, 0
    for i in range(n):
      if types[i] == 'full':
        source, slot = i, slot + 1
      self.assertEqual(plan.is_full(i), types[i] == 'full')
      self.assertEqual(plan.index_source(i), source)
      self.assertEqual(plan.index_slot(i), slot)
      self.assertEqual(plan.is_moe(i), mlps[i] == 'sparse')
      if mlps[i] == 'sparse':
        self.assertEqual(plan.moe_slot(i), moe)
        moe += 1
      else:
        with self.assertRaisesRegex(ValueError, f'layer {i} is dense'):
          plan.moe_slot(i)
    has_mtp = config.mtp.num_layers > 0
    self.assertEqual(plan.num_latent_slots, n + has_mtp)
    self.assertEqual(plan.num_index_slots, slot + 1 + has_mtp)
    self.assertLen(plan.moe_layers, moe)
    # The drafter: full, sparse, its own source, the last slot.
    self.assertTrue(plan.is_full(n) and plan.is_moe(n))
    self.assertEqual((plan.index_source(n), plan.index_slot(n)), (n, slot + 1))
    # No selection crosses a scan step.
    for g in range(plan.num_groups):
      first = plan.prologue + g * plan.group_size
      for i in range(first, first + plan.group_size):
        self.assertGreaterEqual(plan.index_source(i), first)
    return plan

  def test_glm52(self):
    plan = self.check_plan(config_from_published(GLM52))
    self.assertEqual(plan.full_layers, FULL_LAYERS)
    self.assertEqual(
      (plan.prologue, plan.group_size, plan.num_groups), (6, 4, 18)
    )
    self.assertTrue(plan.has_mtp)
    self.assertEqual((plan.num_latent_slots, plan.num_index_slots), (79, 22))

  @parameterized.parameters(
    ('F' * 78, (0, 1, 78)),
    ('FFFSSSFS', (8, 0, 0)),
    ('FFFSSSF', (7, 0, 0)),
    ('FSSSFSSS', (0, 4, 2)),
    ('FS' * 5, (0, 2, 5)),
    ('FFSFS', (1, 2, 2)),
    ('FSSFSFS', (3, 2, 2)),
    ('F', (1, 0, 0)),
    ('FSSS', (4, 0, 0)),
  )
  def test_patterns(self, letters, tail):
    plan = self.check_plan(model_config(letters))
    self.assertEqual((plan.prologue, plan.group_size, plan.num_groups), tail)

  def test_dense_layers_end_the_uniform_tail(self):
    plan = self.check_plan(model_config('FSFSFSFS', 'ddddssss'))
    self.assertEqual(
      (plan.prologue, plan.group_size, plan.num_groups), (4, 2, 2)
    )

  def test_random_patterns(self):
    rng = np.random.default_rng(0)
    for _ in range(300):
      unit = ''.join(rng.choice(list('FS'), rng.integers(1, 5)))
      letters = ''.join(rng.choice(list('FS'), rng.integers(0, 5)))
      letters = 'F' + letters + unit * int(rng.integers(0, 5))
      mlps = ''.join(rng.choice(list('ds'), len(letters), p=(0.15, 0.85)))
      mtp = MtpConfig(num_layers=int(rng.integers(0, 2)))
      with self.subTest(f'{letters} {mlps}'):
        self.check_plan(model_config(letters, mlps, mtp=mtp))

  def test_known_fault_6_two_way_partition(self):
    """39/39: the second share starts on layer 39, which reads layer 38."""
    plan = layer_plan(config_from_published(GLM52))
    first, second = plan.partition(2)
    self.assertEqual(first, tuple(range(39)))
    self.assertEqual(second, tuple(range(39, 78)))
    self.assertFalse(plan.is_full(39))
    self.assertEqual(plan.index_source(39), 38)
    self.assertEqual(plan.index_slot(39), plan.index_slot(38))
    self.assertNotIn(plan.index_slot(39), plan.owned_index_slots(second))

  def test_known_fault_6_eight_way_partition(self):
    plan = layer_plan(config_from_published(GLM52))
    shares = plan.partition(8)
    self.assertEqual([len(s) for s in shares], [10] * 6 + [9] * 2)
    self.assertEqual(sum(shares, ()), tuple(range(78)))
    owned = [plan.owned_index_slots(s) for s in shares]
    self.assertEqual([len(o) for o in owned], [4, 3, 2, 3, 2, 3, 2, 2])
    self.assertEqual(sum(owned, ()), tuple(range(21)))
    # The drafter's slots follow the trunk's.
    self.assertEqual(plan.index_slot(78), 21)
    self.assertEqual(plan.owned_index_slots((*shares[7], 78))[-1], 21)

  def test_partition_of_any_size(self):
    plan = layer_plan(model_config('FSSFSFS'))
    for parts in range(1, 8):
      shares = plan.partition(parts)
      self.assertEqual(sum(shares, ()), tuple(range(7)))
      self.assertLen(shares, parts)
      lengths = [len(s) for s in shares]
      self.assertEqual(lengths, sorted(lengths, reverse=True))
      self.assertLessEqual(lengths[0] - lengths[-1], 1)
    for parts in (0, -1, 8):
      with self.assertRaisesRegex(
        ValueError, f'cannot deal 7 layers to {parts} parts: use 1 to 7'
      ):
        plan.partition(parts)

  def test_known_fault_7_ids_are_int32(self):
    """The carry holds position 1,048,575 and its slot exactly, as int32."""
    ids = jnp.array([[0, 1_048_574, 1_048_575, -1]], jnp.int32)
    carry = Selection(ids, ids)
    for leaf in (carry.positions, carry.slots):
      self.assertEqual(leaf.dtype, jnp.int32)
      self.assertEqual(leaf[0].tolist(), [0, 1_048_574, 1_048_575, -1])
    # What the fault's own carry types would have made of it.
    self.assertNotEqual(int(jnp.bfloat16(1_048_575)), 1_048_575)


if __name__ == '__main__':
  absltest.main()
