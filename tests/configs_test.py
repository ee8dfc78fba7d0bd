"""Config files, presets, and `load_config`."""

import json
import pathlib
import re

import jax
import pytest

from glm_jax.cache import bytes_per_token
from glm_jax.checkpoints import load_config
from glm_jax.checkpoints.names import layer_of, model_leaves
from glm_jax.layer_plan import layer_plan
from glm_jax.model import abstract_model, forward
from glm_jax.param import num_elements
from glm_jax.presets import PRESETS
from glm_jax.published_config import config_from_published, config_to_published

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / 'configs'
FILES = [('glm52', 'glm52'), ('glm52', 'glm53'), ('glm5', 'glm5'),
         ('glm5', 'glm51'), ('tiny', 'tiny')]  # fmt: skip


def number(name, text):
  """A figure that a config file's docstring promises."""
  docstring = (CONFIGS / f'{name}.py').read_text().split('"""')[1]
  found = re.search(rf'^ +([\d ]+?) +{text}', docstring, re.M)
  return [int(x) for x in found[1].split()]


@pytest.mark.parametrize('file, preset', FILES)
def test_file_equals_preset(file, preset):
  config = load_config(CONFIGS / f'{file}.py')
  assert config == load_config(preset) == PRESETS[preset]
  again = config_from_published(
    json.loads(json.dumps(config_to_published(config)))
  )
  assert again == config


@pytest.mark.parametrize('name', ['glm52', 'glm5', 'tiny'])
def test_figures_of_the_docstring(name):
  config = load_config(name)
  model = abstract_model(config)
  assert [num_elements(model)] == number(name, 'parameters')
  sizes = number(name, 'logical cache bytes')
  second = bytes_per_token(config, 'fp8')
  if name == 'tiny':
    second = bytes_per_token(config, drafter=True)
  assert sizes == [bytes_per_token(config), second]


def test_glm52_has_the_published_tensors():
  config = load_config('glm52')
  leaves = model_leaves(abstract_model(config), config)
  names = [name for leaf in leaves for name in leaf.names.flat]
  assert num_elements(abstract_model(config)) == 753_329_940_480
  assert len(names) == len(set(names)) == 59_585
  assert sum(layer_of(n) == 78 for n in names) == 791
  shapes = {
    name: leaf.tensor_shape for leaf in leaves for name in leaf.names.flat
  }
  attention = 'model.layers.77.self_attn.'
  for name, shape in {
    'lm_head.weight': (154_880, 6144),
    f'{attention}q_b_proj.weight': (16_384, 2048),
    f'{attention}kv_a_proj_with_mqa.weight': (576, 6144),
    f'{attention}kv_b_proj.weight': (28_672, 512),
    f'{attention}o_proj.weight': (6144, 16_384),
    'model.layers.74.self_attn.indexer.wq_b.weight': (4096, 2048),
    'model.layers.2.mlp.up_proj.weight': (12_288, 6144),
    'model.layers.3.mlp.experts.255.down_proj.weight': (6144, 2048),
    'model.layers.78.eh_proj.weight': (6144, 12_288),
  }.items():
    assert shapes[name] == shape
  fp8 = abstract_model(config, weight_dtype='fp8')
  scales = {
    name: leaf.tensor_shape
    for leaf in model_leaves(fp8, config)
    if leaf.is_scale
    for name in leaf.names.flat
  }
  # 576 rows: four whole blocks of 128 and a half one.
  assert scales[f'{attention}kv_a_proj_with_mqa.weight_scale_inv'] == (5, 48)
  assert len(scales) == 79 * 5 + 22 * 2 + 3 * 3 + 76 * 3 * 257


def test_known_fault_43_layers_of_the_two_pools():
  plan = layer_plan(load_config('glm52'))
  assert (plan.num_latent_slots, plan.num_index_slots) == (79, 22)
  assert plan.full_layers == (0, 1, *range(2, 78, 4))
  plan = layer_plan(load_config('glm51'))
  assert (plan.num_latent_slots, plan.num_index_slots) == (79, 79)


# What tells the models apart in their published config.json.
GLM51 = {
  'model_type': 'glm_moe_dsa',
  'head_dim': 64,
  'max_position_embeddings': 202_752,
  'num_nextn_predict_layers': 1,
  'rope_parameters': {'rope_theta': 1_000_000, 'rope_type': 'default'},
}
GLM52 = {
  'model_type': 'glm_moe_dsa',
  'head_dim': 192,
  'index_topk_freq': 4,
  'index_skip_topk_offset': 3,
  'index_topk_pattern': None,
  'max_position_embeddings': 1_048_576,
  'num_nextn_predict_layers': 1,
  'rope_parameters': {'rope_theta': 8_000_000, 'rope_type': 'default'},
}


def test_published_configs_of_51_and_52(tmp_path):
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(GLM52))
  assert load_config(path) == load_config(tmp_path) == PRESETS['glm52']
  full = GLM51 | {'indexer_types': ['full'] * 78}
  path.write_text(json.dumps(full))
  assert load_config(tmp_path) == PRESETS['glm51']
  # Without indexer_types the weights decide (checkpoint_test.py).
  path.write_text(json.dumps(GLM51))
  assert len(layer_plan(load_config(path)).full_layers) == 21


def test_tiny_runs_with_the_real_pattern():
  config = load_config('tiny')
  letters = ''.join(kind[0].upper() for kind in config.indexer_types)
  assert letters == 'FFFSSSFSSSFSSS'
  plan = layer_plan(config)
  assert (plan.prologue, plan.group_size, plan.num_groups) == (6, 4, 2)
  tokens = jax.ShapeDtypeStruct((2, 100), jax.numpy.int32)
  out = jax.eval_shape(forward, abstract_model(config), tokens)
  assert out.logits.shape == (2, 100, 512)


def test_what_is_no_config(tmp_path):
  with pytest.raises(FileNotFoundError, match='nor a preset .glm5, glm51'):
    load_config('glm99')
  with pytest.raises(FileNotFoundError, match='hf download zai-org/GLM-5.2 '):
    load_config('zai-org/GLM-5.2')
  with pytest.raises(FileNotFoundError, match='has no config.json'):
    load_config(tmp_path)
  for name, text, message in (
    ('a.txt', '', 'is no configuration: pass a .json or .py file'),
    ('a.py', 'x = 1', 'must define get_config'),
    ('b.py', 'get_config = dict', 'must define get_config'),
    ('a.json', '[1]', 'is not a JSON object'),
    ('b.json', '{"n_group": 2}', 'n_group=2 is not supported'),
  ):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
      load_config(tmp_path / name)


def test_a_path_wins_over_a_preset(tmp_path, monkeypatch):
  (tmp_path / 'tiny').mkdir()
  (tmp_path / 'tiny' / 'config.json').write_text(json.dumps(GLM52))
  monkeypatch.chdir(tmp_path)
  assert load_config('tiny') == PRESETS['glm52']
