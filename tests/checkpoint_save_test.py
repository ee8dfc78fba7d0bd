"""Saves: bit-equal round trips, interruptions, bounded memory, orbax."""

import dataclasses
import json
import math
import weakref

import checkpoint_files as cf
import jax
import numpy as np
import pytest
from checkpoint_fp8_test import BLOCK, ODD, QUANTIZED, SPEC, Plan

from glm_jax.checkpoints import (
  PublishedCheckpoint,
  export,
  load_config,
  load_model,
  load_orbax,
  orbax_parts,
  save_orbax,
  save_published,
  tensor_writer,
)
from glm_jax.checkpoints.tensor_files import INDEX_NAME, TensorFiles
from glm_jax.checkpoints.tensor_writer import Entry, TensorWriter
from glm_jax.checkpoints.unfinished import MARKER

SCANNED = 'FFFFSFS'  # three dense layers, two groups of two
SMALL = 60_000  # bytes of a file: several a model
named, raises = cf.named, cf.raises


@pytest.fixture(scope='module', params=['bf16', 'f32', 'fp8'])
def checkpoint(request, tmp_path_factory):
  """(model, its tensors) of one kind, with scanned layers and a drafter."""
  config = cf.t1(SCANNED, num_nextn_predict_layers=1, **ODD)
  dtype = cf.BF16
  if request.param == 'f32':
    config['dtype'], dtype = 'float32', cf.F32
  values = cf.tensors(config, dtype)
  if request.param == 'fp8':
    config |= QUANTIZED
    values = cf.quantized(values, BLOCK)
  directory = tmp_path_factory.mktemp(request.param)
  cf.write(directory, config, values)
  return load_model(directory), values


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  """(model, its tensors) of T1 in bf16."""
  config = cf.t1()
  values = cf.tensors(config)
  directory = cf.write(tmp_path_factory.mktemp('small'), config, values)
  return load_model(directory), values


def save_small(model, directory, layout='published', **kwargs):
  if layout == 'orbax':
    save_orbax(model, model.config, directory, part_bytes=SMALL, **kwargs)
  else:
    save_published(
      model, model.config, directory, max_shard_bytes=SMALL, **kwargs
    )


@pytest.mark.parametrize('index', [True, False])
def test_published_round_trip(checkpoint, tmp_path, index):
  model, values = checkpoint
  save_small(model, tmp_path)
  files = sorted(p.name for p in tmp_path.glob('*.safetensors'))
  assert len(files) > 3 and files[0] == (
    f'model-00001-of-{len(files):05d}.safetensors'
  )
  assert not list(tmp_path.glob('*.partial'))
  if not index:
    (tmp_path / INDEX_NAME).unlink()
  again = load_model(tmp_path)
  cf.assert_same(named(again), values)
  assert again.config == model.config
  sizes = json.loads((tmp_path / 'config.json').read_text())
  assert ('quantization_config' in sizes) == any(
    v.dtype == cf.FP8 for v in values.values()
  )


def test_orbax_round_trip(checkpoint, tmp_path):
  model, values = checkpoint
  # f32 in one part, the others in parts that cut the pool of experts.
  part_bytes = 1 << 30 if model.experts.gate.dtype == cf.F32 else SMALL
  save_orbax(model, model.config, tmp_path, part_bytes=part_bytes)
  parts = len(list(tmp_path.glob('part_*')))
  assert (parts > 3) == (part_bytes == SMALL)
  again = load_orbax(tmp_path)
  cf.assert_same(named(again), values)
  assert again.config == model.config
  # Onto a mesh; `load_model` finds out what it is by itself.
  again = load_model(tmp_path, plan=Plan())
  cf.assert_same(named(again), values)
  assert again.experts.gate.sharding.spec == SPEC


def test_sharded_models_are_saved_without_gathering(
  small, tmp_path, monkeypatch
):
  model, values = small
  save_small(model, tmp_path / 'plain')
  spread = load_model(tmp_path / 'plain', plan=Plan(1, 2))
  save_small(spread, tmp_path / 'orbax', 'orbax')
  cf.assert_same(named(load_model(tmp_path / 'orbax')), values)
  sizes = []
  fetch = export._fetch
  monkeypatch.setattr(
    export, '_fetch', lambda *args: sizes.append(args[2]) or fetch(*args)
  )
  save_small(spread, tmp_path / 'published')
  cf.assert_same(named(load_model(tmp_path / 'published')), values)
  assert (1, 1, 24, 64) in sizes  # one expert of one layer at a time
  largest = max(v.size for v in values.values())
  assert max(map(math.prod, sizes)) <= largest


def test_part_of_an_accelerators_array(monkeypatch):
  x = jax.device_put(np.arange(24.0).reshape(4, 6))
  part = (slice(1, 3), slice(2, 5))
  assert np.array_equal(export.host_part(x, part), x[part])
  monkeypatch.setattr(export, '_HOST', ())
  assert np.array_equal(export.host_part(x, part), x[part])


def test_orbax_changes_format_as_published_does(checkpoint, tmp_path):
  model, _ = checkpoint
  wanted = 'f32' if model.experts.gate.dtype == cf.FP8 else 'fp8'
  save_orbax(model, model.config, tmp_path / 'orbax')
  save_published(model, model.config, tmp_path / 'published')
  expected = load_model(tmp_path / 'published', weight_dtype=wanted)
  for plan in None, Plan(1, 2):
    got = load_orbax(tmp_path / 'orbax', weight_dtype=wanted, plan=plan)
    cf.assert_same(named(got), named(expected))


def test_transformers_reads_what_was_saved(small, tmp_path):
  import torch
  import transformers

  model, values = small
  save_small(model, tmp_path)
  module, info = transformers.GlmMoeDsaForCausalLM.from_pretrained(
    tmp_path, output_loading_info=True
  )
  assert not info['missing_keys'] and not info['unexpected_keys']
  state = module.state_dict()
  for name in 'lm_head.weight', 'model.layers.6.self_attn.o_proj.weight':
    assert state[name].dtype == torch.bfloat16
    expected = values[name].astype(np.float32)
    assert np.array_equal(state[name].float().numpy(), expected)
  assert module.generation_config.eos_token_id == [1]


def test_side_files(small, tmp_path):
  model, _ = small
  source = tmp_path / 'tokenizer'
  source.mkdir()
  with raises('has no tokenizer.json', FileNotFoundError):
    save_small(model, tmp_path / 'out', tokenizer_from=source)
  assert not (tmp_path / 'out').exists()
  texts = {'tokenizer.json': '{}', 'chat_template.jinja': 'x', 'other': 'y'}
  texts['generation_config.json'] = '{"temperature": 0.5, "eos_token_id": 9}'
  for name, text in texts.items():
    (source / name).write_text(text)
  for layout in 'published', 'orbax':
    out = tmp_path / layout
    save_small(model, out, layout, tokenizer_from=source)
    assert (out / 'tokenizer.json').read_text() == '{}'
    assert (out / 'chat_template.jinja').read_text() == 'x'
    assert not (out / 'other').exists()
    generation = json.loads((out / 'generation_config.json').read_text())
    assert generation == {
      'temperature': 0.5,
      'eos_token_id': [1],
      'pad_token_id': 0,
    }
    assert load_config(out) == model.config


class Stop(Exception):
  """What interrupts a save in these tests."""


def interrupt(monkeypatch, owner, name, after):
  """Makes `owner.name` raise when it is called for the `after`-th time."""
  calls, original = [], getattr(owner, name)

  def wrapped(*args, **kwargs):
    calls.append(name)
    if len(calls) == after:
      raise Stop
    return original(*args, **kwargs)

  monkeypatch.setattr(owner, name, wrapped)
  return calls


@pytest.mark.parametrize(
  'layout, owner, name, after',
  [
    ('published', TensorWriter, '_write_shard', 1),
    ('published', TensorWriter, '_write_shard', 3),
    ('published', tensor_writer, '_bytes', 40),
    ('published', tensor_writer, 'write_text', 1),
    ('published', tensor_writer, 'finish_save', 1),
    ('orbax', orbax_parts.ocp.Checkpointer, 'save', 3),
    ('orbax', orbax_parts, 'write_text', 1),
    ('orbax', orbax_parts, 'finish_save', 1),
  ],
)
def test_interrupted_save_is_refused_then_finished(
  small, tmp_path, monkeypatch, layout, owner, name, after
):
  model, values = small
  with monkeypatch.context() as patch, pytest.raises(Stop):
    interrupt(patch, owner, name, after)
    save_small(model, tmp_path, layout)
  with raises(f'is an unfinished save .{MARKER} is there.: run the command'):
    load_model(tmp_path)
  other = dataclasses.replace(model.config, rope_theta=1.0)
  with raises('unfinished save of something else'):
    save_published(model, other, tmp_path)
  save_small(model, tmp_path, layout)
  cf.assert_same(named(load_model(tmp_path)), values)
  assert not [p for p in tmp_path.iterdir() if 'partial' in p.name]
  with raises('is not empty and is not an unfinished save', FileExistsError):
    save_small(model, tmp_path, layout)


@pytest.mark.parametrize('layout', ['published', 'orbax'])
def test_other_weights_do_not_mix_with_an_interrupted_save(
  small, tmp_path, monkeypatch, layout
):
  model, values = small
  owner, name = TensorWriter, '_write_shard'
  if layout == 'orbax':
    owner, name = orbax_parts.ocp.Checkpointer, 'save'
  with monkeypatch.context() as patch, pytest.raises(Stop):
    interrupt(patch, owner, name, 4)
    save_small(model, tmp_path, layout)
  negated = jax.tree.map(lambda x: -x, model)
  with monkeypatch.context() as patch:
    calls = interrupt(patch, owner, name, 10**6)
    save_small(negated, tmp_path, layout)
    files = len(list(tmp_path.glob('model-*'))) or len(
      list(tmp_path.glob('part_*'))
    )
    assert len(calls) == files  # all written again
  got = {k: -v for k, v in named(load_model(tmp_path)).items()}
  cf.assert_same(got, values)


def test_whole_shards_are_kept(small, tmp_path, monkeypatch):
  model, values = small
  with monkeypatch.context() as patch, pytest.raises(Stop):
    interrupt(patch, TensorWriter, '_write_shard', 5)
    save_small(model, tmp_path)
  with monkeypatch.context() as patch:
    calls = interrupt(patch, TensorWriter, '_write_shard', 10**6)
    save_small(model, tmp_path)
  assert len(calls) == len(list(tmp_path.glob('model-*'))) - 4
  cf.assert_same(named(load_model(tmp_path)), values)


def test_leftovers_of_orbax_are_removed(small, tmp_path, monkeypatch):
  model, _ = small
  with monkeypatch.context() as patch, pytest.raises(Stop):
    interrupt(patch, orbax_parts.ocp.Checkpointer, 'save', 2)
    save_small(model, tmp_path, 'orbax')
  left = tmp_path / 'part_00001.orbax-checkpoint-tmp'
  (left / 'd').mkdir(parents=True)
  save_small(model, tmp_path, 'orbax')
  assert not left.exists()


def test_a_directory_with_other_files_is_left_alone(small, tmp_path):
  model, _ = small
  (tmp_path / 'thesis.txt').write_text('mine')
  for layout in 'published', 'orbax':
    with raises('is not empty', FileExistsError):
      save_small(model, tmp_path, layout)
  assert [p.name for p in tmp_path.iterdir()] == ['thesis.txt']


def test_one_tensor_in_memory_at_a_time(tmp_path):
  alive = []

  def make(i):
    assert not [a for a in alive if a() is not None]
    value = np.full((3, 5), i, np.float32)
    alive.append(weakref.ref(value))
    return value

  entries = [
    Entry(f'x{i}', cf.F32, (3, 5), lambda i=i: make(i)) for i in range(9)
  ]
  writer = TensorWriter(tmp_path, entries, max_shard_bytes=150)
  assert writer.write() == 0 and writer.verify() == []
  writer.complete()
  assert len(alive) == 18 and len(writer.shards) == 5
  with TensorFiles(tmp_path) as files:
    assert all((files.read(f'x{i}') == i).all() for i in range(9))


def test_shards_are_aligned_whatever_the_order(tmp_path):
  shapes = [('a', cf.FP8, (3,)), ('b', cf.F32, (2,)), ('c', cf.BF16, (5,))]
  entries = [
    Entry(n, d, s, lambda d=d, s=s: np.ones(s, d)) for n, d, s in shapes
  ]
  writer = TensorWriter(tmp_path, entries)
  writer.write()
  writer.complete()
  with TensorFiles(tmp_path) as files:
    for name, dtype, shape in shapes:
      assert files.info(name).start % dtype.itemsize == 0
      assert np.array_equal(files.read(name), np.ones(shape, dtype))


def test_orbax_directory_that_was_changed(small, tmp_path):
  model, _ = small
  save_small(model, tmp_path, 'orbax')
  config = json.loads((tmp_path / 'config.json').read_text())
  config['vocab_size'] = 98
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with raises('does not match config.json at embed, head.kernel: one of'):
    load_model(tmp_path)
  manifest = tmp_path / 'glm_jax_orbax.json'
  manifest.write_text('{"format": 0}')
  with raises('has format 0, not 1: write the checkpoint again'):
    load_model(tmp_path)
  manifest.unlink()
  with raises('has no glm_jax_orbax.json', FileNotFoundError):
    load_orbax(tmp_path)


def test_what_has_no_weights(tmp_path):
  file = tmp_path / 'config.json'
  file.write_text('{}')
  for name in 'glm52', file:
    with raises('has no weights.*or use init_model'):
      load_model(name)
  with raises('hf download zai-org/GLM-5.2 --local-dir', FileNotFoundError):
    load_model('zai-org/GLM-5.2')
  with raises('holds no .*safetensors', FileNotFoundError):
    PublishedCheckpoint(tmp_path)
  with raises('float64 weights cannot be saved'):
    wide = dataclasses.make_dataclass('Leaf', ['path', 'dtype'])
    from glm_jax.checkpoints.export import stored_config

    stored_config(load_config('tiny'), [wide('embed', np.dtype('f8'))])
