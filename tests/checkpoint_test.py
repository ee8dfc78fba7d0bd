"""Published checkpoints: what is read, what is ignored, what is refused."""

import json

import checkpoint_files as cf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.checkpoints import (
  PublishedCheckpoint,
  load_model,
  load_orbax,
  open_checkpoint,
  save_orbax,
  save_published,
)
from glm_jax.checkpoints.names import layer_leaves, layer_of, model_leaves
from glm_jax.checkpoints.tensor_files import INDEX_NAME
from glm_jax.model import abstract_model
from glm_jax.presets import PRESETS

SCANNED = 'FFFSSSFSSSFSSS'  # layers 0-5 unrolled, two scanned groups


named, raises = cf.named, cf.raises


def notices(capsys):
  return capsys.readouterr().err.splitlines()


@pytest.fixture(scope='module')
def transformers_checkpoint(tmp_path_factory):
  """Written by transformers, with a drafter."""
  from glm_jax.validation.random_checkpoint import write_random_checkpoint

  directory = tmp_path_factory.mktemp('transformers')
  write_random_checkpoint(directory, 0, {'index_topk': 8}, mtp=True)
  return directory


def test_transformers_checkpoint_loads_bit_for_bit(transformers_checkpoint):
  import torch
  from safetensors.torch import load_file

  model = load_model(transformers_checkpoint)
  expected = load_file(transformers_checkpoint / 'model.safetensors')
  cf.assert_same(named(model), {k: v.numpy() for k, v in expected.items()})
  assert model.groups is not None and model.mtp is not None
  half = load_model(transformers_checkpoint, dtype='bf16')
  for name, value in named(half).items():
    value = value.astype(np.float32)
    if not name.endswith('correction_bias'):
      rounded = expected[name].to(torch.bfloat16).float()  # to nearest even
      assert np.array_equal(value, rounded.numpy()), name
    else:
      assert np.array_equal(value, expected[name].numpy())


@pytest.mark.parametrize('fused', [False, True])
def test_transformers_layouts_of_experts(tmp_path, fused):
  import transformers

  config = cf.t1()
  del config['model_type']
  torch_config = transformers.GlmMoeDsaConfig(**config)
  module = transformers.GlmMoeDsaForCausalLM(torch_config)
  module.save_pretrained(
    tmp_path, save_original_format=not fused, max_shard_size='100KB'
  )
  assert (
    'experts.gate_up_proj"' in (tmp_path / INDEX_NAME).read_text()
  ) == fused
  model = load_model(tmp_path, dtype='f32')
  state = module.state_dict()
  for layer in range(3, 8):
    gate, up = state[f'model.layers.{layer}.mlp.experts.gate_up_proj'].chunk(
      2, 1
    )
    slot = layer - 3
    assert np.array_equal(model.experts.gate[slot], gate.float().numpy())
    assert np.array_equal(model.experts.up[slot], up.float().numpy())
    down = state[f'model.layers.{layer}.mlp.experts.down_proj']
    assert np.array_equal(model.experts.down[slot], down.float().numpy())


@pytest.mark.parametrize('index', [False, True])
@pytest.mark.parametrize('pattern', ['FFFSSSFS', SCANNED, 'FFFFF'])
def test_unrolled_and_scanned_layers(tmp_path, pattern, index):
  config = cf.t1(pattern, num_nextn_predict_layers=1)
  values = cf.tensors(config)
  cf.write(tmp_path, config, values, shards=3, index=index)
  model = load_model(tmp_path)
  assert (model.groups is None) == (pattern == 'FFFSSSFS')
  cf.assert_same(named(model), values)


def test_known_fault_1_shared_layers_own_no_indexer(tmp_path):
  published = PRESETS['glm52']
  names = [
    name
    for leaf in model_leaves(abstract_model(published), published)
    for name in leaf.names.flat
  ]
  owners = {layer_of(n) for n in names if '.indexer.' in n}
  trunk = owners - {78}
  assert trunk == {0, 1, *range(2, 78, 4)} and len(trunk) == 21
  assert owners - trunk == {78}  # the drafter's own
  assert sum('.indexer.' in n for n in names) == 22 * 5

  config = cf.t1(SCANNED)
  cf.write(tmp_path, config, cf.tensors(config))
  model = load_model(tmp_path)
  kinds = [b.indexer is not None for b in model.groups.blocks]
  assert kinds == [True, False, False, False]
  with open_checkpoint(tmp_path).files as files:
    assert not any('layers.3.self_attn.indexer' in n for n in files)


def test_known_fault_41_drafter_with_and_without_its_own_head(tmp_path):
  config = cf.t1(num_nextn_predict_layers=1)
  values = cf.tensors(config)
  drafter = [n for n in values if n.startswith('model.layers.8.')]
  parts = lambda text: sum(text in n for n in drafter)
  assert parts('.mlp.experts.') == 3 * 4 and parts('.indexer.') == 5
  glue = ('enorm', 'hnorm', 'eh_proj', 'shared_head')
  assert sum(map(parts, glue)) == 4
  # 768 expert + 3 shared + 2 router + 7 attention + 2 norms + 5 + 4.
  assert len(drafter) - 3 * 4 + 3 * 256 == 791

  model = load_model(cf.write(tmp_path / 'tied', config, values))
  assert model.mtp.head is None and not model.config.mtp.own_head
  head = 'model.layers.8.shared_head.head.weight'
  values[head] = 2 * values['lm_head.weight']
  model = load_model(cf.write(tmp_path / 'own', config, values))
  assert model.config.mtp.own_head
  assert np.array_equal(model.mtp.head.kernel[...], values[head])
  save_published(model, model.config, tmp_path / 'again')
  cf.assert_same(named(load_model(tmp_path / 'again')), values)
  save_orbax(model, model.config, tmp_path / 'orbax')
  cf.assert_same(named(load_orbax(tmp_path / 'orbax')), values)


def test_drafter_absent_not_wanted_or_in_part(tmp_path, capsys):
  config = cf.t1(num_nextn_predict_layers=1)
  values = cf.tensors(config)
  trunk = {k: v for k, v in values.items() if '.layers.8.' not in k}
  model = load_model(cf.write(tmp_path / 'absent', config, trunk))
  assert model.mtp is None and model.config.mtp.num_layers == 0
  (notice,) = notices(capsys)
  assert 'no tensors of layer 8, so no drafter' in notice

  without = cf.t1(num_nextn_predict_layers=0)
  model = load_model(cf.write(tmp_path / 'unwanted', without, values))
  assert model.mtp is None
  (notice,) = notices(capsys)
  assert 'ignoring 35 tensors of layer 8' in notice

  name = 'model.layers.8.eh_proj.weight'
  part = trunk | {name: values[name]}
  with raises(
    'missing model.layers.8.enorm.weight.*and 14 more; layer 8, the drafter, '
    'is there in part: set num_nextn_predict_layers to 0'
  ):
    load_model(cf.write(tmp_path / 'part', config, part))
  with raises('surplus model.layers.9.enorm.weight'):
    more = values | {'model.layers.9.enorm.weight': np.ones(64, cf.BF16)}
    load_model(cf.write(tmp_path / 'more', config, more))


def test_drafter_copy_of_the_embedding(tmp_path, capsys):
  config = cf.t1(num_nextn_predict_layers=1)
  values = cf.tensors(config)
  embed = values['model.embed_tokens.weight']
  name = 'model.layers.8.embed_tokens.weight'
  copy = cf.write(tmp_path / 'copy', config, values | {name: embed})
  cf.assert_same(named(load_model(copy)), values)
  (notice,) = notices(capsys)
  assert f'ignoring {name}, a copy of model.embed_tokens.weight' in notice
  for kind, other in ('values', embed + 1), ('shape', embed[:-1]):
    bad = cf.write(tmp_path / kind, config, values | {name: other})
    with raises(f'{name} differs from model.embed_tokens.weight'):
      load_model(bad)
    with raises(f'{name} differs from model.embed_tokens.weight'):
      PublishedCheckpoint(bad).load_top()


def test_tied_head_absent_equal_or_different(tmp_path):
  config = cf.t1(tie_word_embeddings=True)
  values = cf.tensors(config)
  assert 'lm_head.weight' not in values
  model = load_model(cf.write(tmp_path / 'absent', config, values))
  assert model.head is None
  embed = values['model.embed_tokens.weight']
  equal = values | {'lm_head.weight': embed}
  model = load_model(cf.write(tmp_path / 'equal', config, equal))
  cf.assert_same(named(model), values)
  bad = values | {'lm_head.weight': -embed}
  with raises('lm_head.weight differs.*tie_word_embeddings'):
    load_model(cf.write(tmp_path / 'bad', config, bad))
  del values['model.norm.weight']
  untied = cf.t1()
  with raises('missing lm_head.weight, missing model.norm.weight;'):
    load_model(cf.write(tmp_path / 'untied', untied, values))


def with_all_indexers(pattern='FFFSSSFS', **keys):
  """Tensors with indexers on every layer, and the config of `pattern`."""
  return cf.t1(pattern, **keys), cf.tensors(cf.t1('F' * len(pattern), **keys))


def test_needless_indexers_are_ignored_with_one_notice(tmp_path, capsys):
  config, values = with_all_indexers()
  model = load_model(cf.write(tmp_path, config, values))
  (notice,) = notices(capsys)
  assert 'ignoring 20 indexer tensors of 4 layers' in notice
  wanted = cf.shapes(config)
  cf.assert_same(named(model), {n: values[n] for n in wanted})
  checkpoint = PublishedCheckpoint(tmp_path)
  for layer in range(8):
    checkpoint.load_block(layer)
  assert len(notices(capsys)) == 1


@pytest.mark.parametrize(
  'keys',
  [{'index_topk_pattern': 'FFFSSSFS'}, {'index_topk_freq': 4}],
)
def test_any_pattern_key_makes_indexers_needless(tmp_path, keys):
  config, values = with_all_indexers(**keys)
  del config['indexer_types']
  model = load_model(cf.write(tmp_path, config, values))
  assert [b.indexer is not None for b in model.prologue] == [
    c == 'F' for c in 'FFFSSSFS'
  ]


def test_indexers_on_all_layers_without_a_pattern_are_an_error(tmp_path):
  config, values = with_all_indexers()
  del config['indexer_types']
  cf.write(tmp_path, config, values)
  with raises(
    'layers 3, 4, 5, 7 have indexers, but config.json has none of '
    "indexer_types.*add indexer_types to config.json .all 'full' for GLM-5"
  ):
    PublishedCheckpoint(tmp_path)
  config['indexer_types'] = ['full'] * 8
  model = load_model(cf.write(tmp_path, config, values))
  cf.assert_same(named(model), values)


def test_buffers_are_ignored(tmp_path, capsys):
  config = cf.t1()
  values = cf.tensors(config)
  buffers = {
    'model.rotary_emb.inv_freq': np.ones(4, np.float32),
    'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, np.float32),
  }
  cf.write(tmp_path, config, values | buffers)
  cf.assert_same(named(load_model(tmp_path)), values)
  assert not notices(capsys)


def test_one_error_lists_everything(tmp_path):
  config = cf.t1()
  values = cf.tensors(config)
  del values['model.layers.0.self_attn.q_a_proj.weight']
  values['model.layers.1.extra'] = np.ones(2, np.float32)
  values['model.norm.weight'] = np.ones(63, cf.BF16)
  values['model.layers.2.input_layernorm.weight'] = np.ones(64, np.int32)
  bias = 'model.layers.5.mlp.gate.e_score_correction_bias'
  values[bias] = values[bias].astype(cf.BF16)  # cast, as older files need
  cf.write(tmp_path, config, values)
  with pytest.raises(ValueError) as error:
    load_model(tmp_path)
  text = str(error.value)
  for fault in (
    'missing model.layers.0.self_attn.q_a_proj.weight',
    'surplus model.layers.1.extra',
    'model.norm.weight has shape [63], not [64]',
    'model.layers.2.input_layernorm.weight is I32, which is none of BF16',
  ):
    assert fault in text
  assert '\n' not in text and ' more' not in text and 'bias' not in text
  with raises('surplus model.layers.1.extra; download'):
    PublishedCheckpoint(tmp_path).load_block(1)
  PublishedCheckpoint(tmp_path).load_block(5)
  few = dict(list(values.items())[:10])
  cf.write(tmp_path / 'few', config, few)
  rest = len(cf.shapes(config)) - 10 + 1 - 20  # one of the ten is mis-shaped
  with pytest.raises(ValueError, match=f'and {rest} more;') as error:
    load_model(tmp_path / 'few')
  assert str(error.value).count('model.layers') <= 20


def test_bad_configs_name_the_file(tmp_path):
  values = cf.tensors(cf.t1())
  cf.write(tmp_path, cf.t1(), values)
  (tmp_path / 'config.json').write_text('{"a"')
  with raises('config.json is not JSON'):
    load_model(tmp_path)
  (tmp_path / 'config.json').write_text('[]')
  with raises('config.json is not a JSON object'):
    load_model(tmp_path)
  (tmp_path / 'config.json').unlink()
  with pytest.raises(FileNotFoundError, match='has no config.json'):
    load_model(tmp_path)


@pytest.mark.parametrize(
  'own, more, merged',
  [
    (1, [2, 1], (1, 2)),
    ([3, 1], 3, (3, 1)),
    (None, [7], (7,)),
    (5, None, (5,)),
  ],
)
def test_end_ids_of_both_files(tmp_path, own, more, merged):
  config = cf.t1(eos_token_id=own)
  if own is None:
    del config['eos_token_id']
  cf.write(tmp_path, config, cf.tensors(config))
  if more is not None:
    text = json.dumps({'eos_token_id': more, 'temperature': 1.0})
    (tmp_path / 'generation_config.json').write_text(text)
  assert PublishedCheckpoint(tmp_path).config.eos_token_ids == merged


# Parts of a model


def test_known_fault_4_one_layer_reads_its_own_bytes(tmp_path):
  config = cf.t1(SCANNED, num_nextn_predict_layers=1)
  values = cf.tensors(config)
  cf.write(tmp_path, config, values, shards=5)
  model = load_model(tmp_path)
  checkpoint = PublishedCheckpoint(tmp_path)
  for layer in range(15):
    mine = {k: v for k, v in values.items() if layer_of(k) == layer}
    before = checkpoint.files.bytes_read
    block, experts = checkpoint.load_block(layer)
    assert (experts is None) == (layer < 3)
    # A shared layer has no indexer to fall back on.
    assert (block.indexer is None) == (layer < 14 and SCANNED[layer] == 'S')
    got = cf.tensors_of((block, experts), layer_leaves(block, experts, layer))
    glue = ('norm.weight', 'eh_proj.weight')
    if layer == 14:
      inside = (*glue, 'layernorm.weight', 'k_norm.weight')
      mine = {
        k: v
        for k, v in mine.items()
        if not k.endswith(glue) or k.endswith(inside[2:])
      }
    cf.assert_same(got, mine)
    read = checkpoint.files.bytes_read - before
    assert read == sum(v.nbytes for v in mine.values())
  assert not checkpoint.files._open
  with raises('layer=15 must be 0 to 14'):
    checkpoint.load_block(15)
  mtp = checkpoint.load_mtp()
  same = lambda a, b: np.array_equal(np.asarray(a), np.asarray(b))
  assert jax.tree.all(jax.tree.map(same, mtp, model.mtp))


def test_top_gives_logits(tmp_path):
  config = cf.t1()
  values = cf.tensors(config)
  cf.write(tmp_path, config, values)
  top = PublishedCheckpoint(tmp_path).load_top(dtype='f32')
  wide = {k: v.astype(np.float32) for k, v in values.items() if 'l.norm' in k}
  x = np.random.default_rng(0).standard_normal((3, 64), np.float32)
  x_norm = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
  head = values['lm_head.weight'].astype(np.float32)
  expected = (x_norm * wide['model.norm.weight']) @ head.T
  np.testing.assert_allclose(top.logits(jnp.asarray(x)), expected, rtol=1e-4)
  rows = top.embed[jnp.array([5, 0])]
  embed = values['model.embed_tokens.weight'].astype(np.float32)
  assert np.array_equal(rows, embed[[5, 0]])
  assert PublishedCheckpoint(tmp_path).load_mtp() is None
