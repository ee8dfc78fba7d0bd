"""`validate` and its launcher on small checkpoints, sound and damaged."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import weakref

import numpy as np
import pytest
import safetensors.torch
import torch
from model import oracle

from glm_jax.checkpoints.published import PublishedCheckpoint
from glm_jax.validation import compare, run, torch_side, validate
from glm_jax.validation.record import Record
from glm_jax.validation.result import Parting

ROOT = pathlib.Path(__file__).resolve().parents[2]
IDS = tuple(np.random.default_rng(7).integers(0, 97, 60).tolist())

quiet = functools.partial(validate, log=lambda line: None)


def python(*arguments: str) -> subprocess.CompletedProcess:
  environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
  command = [sys.executable, *arguments]
  return subprocess.run(
    command, env=environment, capture_output=True, text=True
  )


def launch(*flags: str) -> subprocess.CompletedProcess:
  return python(str(ROOT / 'launch' / 'validate.py'), *flags)


@pytest.fixture(scope='module')
def record(tmp_path_factory) -> str:
  """transformers' run of T1, recorded in a process without jax."""
  path = str(tmp_path_factory.mktemp('recorded') / 'reference')
  code = f"""
import sys
from glm_jax.validation import validate
import glm_jax.validation.torch_side
path, tokens = {oracle.checkpoint(0)!r}, {IDS!r}
result = validate(path, tokens, framework='torch', record={path!r})
assert result.passed and result.max_abs_logit_error is None
jax = [name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib')]
assert not jax, jax
"""
  done = python('-c', code)
  assert done.returncode == 0, done.stderr
  assert 'latent norms (q_a, kv_a) set to eps 1e-05' in done.stderr
  return path


def corrupted(tmp_path, name: str, factor: float = 1.05) -> str:
  """T1 with the first row of one tensor a little wrong."""
  names = []

  def edit(key, tensor):
    if key == name:
      names.append(key)
      tensor[0] *= factor
    return tensor

  out = oracle.edited(oracle.checkpoint(0), str(tmp_path / 'corrupted'), edit)
  assert names == [name]
  return out


def test_launcher_compares_both_in_one_process(tmp_path):
  done = launch(
    f'--model={oracle.checkpoint(0)}', f'--json={tmp_path}/out.json'
  )
  assert done.returncode == 0, done.stderr
  assert 'index_topk 8' in done.stderr and 'highest' in done.stderr
  lines = done.stdout.splitlines()
  assert lines[0].split()[:2] == ['layer', 'select']
  assert lines[-1] == 'passed'
  result = json.loads((tmp_path / 'out.json').read_text())
  assert result['passed'] is True
  assert result['max_abs_logit_error'] < 2e-4
  assert result['argmax_agreement'] == 1
  assert result['selected_set_agreement'] == 1
  assert result['num_tokens'] > 8


def test_launcher_names_the_corrupted_layer_and_tensor(tmp_path, record):
  path = corrupted(tmp_path, 'model.layers.4.mlp.shared_experts.up_proj.weight')
  done = launch(f'--model={path}', f'--against={record}')
  assert done.returncode == 1, done.stderr
  assert 'FAILED: they part at layer 4: mlp' in done.stdout
  verdicts = [line.split()[-1] for line in done.stdout.splitlines()[1:9]]
  assert verdicts[:5] == ['ok', 'ok', 'ok', 'ok', 'mlp']


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--tokens={tokens}'], 'was made from other tokens (position 1 is'),
    (['--layers=3,9'], 'must be some of 0 to 7'),
    (['--layers=x'], 'must be numbers'),
    (['--framework=tf'], 'framework'),
  ],
)
def test_launcher_rejects_bad_input(tmp_path, record, flags, message):
  tokens = tmp_path / 'tokens.json'
  tokens.write_text(json.dumps([IDS[0], (IDS[1] + 1) % 97, *IDS[2:]]))
  flags = [flag.format(tokens=tokens) for flag in flags]
  done = launch(
    f'--model={oracle.checkpoint(0)}', f'--against={record}', *flags
  )
  assert done.returncode == 2
  assert message in done.stderr.splitlines()[-1]
  assert 'Traceback' not in done.stderr and not done.stdout


@pytest.mark.parametrize(
  'name, layer, tensor',
  [
    ('layers.0.self_attn.q_a_proj', 0, 'selected'),
    ('layers.1.self_attn.indexer.k_norm', 1, 'selected'),
    ('layers.2.mlp.down_proj', 2, 'mlp'),
    ('layers.3.self_attn.kv_b_proj', 3, 'attention'),
    ('layers.5.mlp.gate', 5, 'experts'),
    ('layers.6.self_attn.indexer.weights_proj', 6, 'selected'),
    ('layers.7.mlp.experts.0.down_proj', 7, 'mlp'),
    ('norm', None, 'logits'),
  ],
)
def test_the_first_parting_is_named(tmp_path, record, name, layer, tensor):
  path = corrupted(tmp_path, f'model.{name}.weight', factor=1.5)
  result = quiet(path, against=record)
  assert not result.passed
  assert (result.parted.layer, result.parted.tensor) == (layer, tensor)
  assert str(result.parted) in result.table()


def test_single_layers_are_compared_in_isolation(tmp_path, record):
  path = corrupted(tmp_path, 'model.layers.4.self_attn.o_proj.weight')
  assert quiet(path, against=record, layers=[0, 3, 5, 7]).passed
  result = quiet(path, against=record, layers=[3, 4])
  assert result.parted == Parting(4, 'attention')
  assert result.max_abs_logit_error is None
  assert [r.layer for r in result.layers] == [3, 4]


def test_records_go_both_ways(tmp_path, record):
  path, ours = oracle.checkpoint(0), tmp_path / 'ours'
  assert quiet(path, IDS, framework='jax', record=ours).passed
  assert Record(ours).meta.framework == 'jax'
  result = quiet(path, against=ours)  # runs torch
  assert result.passed and result.argmax_agreement == 1
  assert quiet(path, against=ours, layers=[4, 6]).passed
  # Torch against torch: not a bit may differ.
  result = quiet(path, against=record, framework='torch')
  assert result.passed and result.max_abs_logit_error == 0


def test_a_record_of_some_layers(tmp_path):
  path, some = oracle.checkpoint(0), tmp_path / 'some'
  quiet(path, IDS, framework='torch', layers=[3, 4, 7], record=some)
  assert not (some / 'layer_000.safetensors').exists()
  result = quiet(path, against=some)
  assert result.passed and result.max_abs_logit_error < 2e-4
  assert [r.layer for r in result.layers] == [3, 4, 7]
  with pytest.raises(ValueError, match=r'lacks layers \[0\]'):
    quiet(path, against=some, layers=[0, 3])


def test_records_that_do_not_belong(tmp_path, record):
  path = oracle.checkpoint(0)
  other = oracle.checkpoint(0, index_topk=9)
  with pytest.raises(ValueError, match='index_topk is 8 there, 9 here'):
    quiet(other, against=record)
  with pytest.raises(ValueError, match='other tokens .60 there, 3 here'):
    quiet(path, [1, 2, 3], against=record)
  with pytest.raises(ValueError, match='made in float32, not bfloat16'):
    quiet(path, against=record, dtype='bf16')
  with pytest.raises(ValueError, match='holds no record'):
    quiet(path, against=tmp_path)
  damaged = tmp_path / 'damaged'
  shutil.copytree(record, damaged)
  (damaged / 'layer_002.safetensors').unlink()
  with pytest.raises(ValueError, match='layer_002.safetensors is missing'):
    quiet(path, against=damaged)


def test_a_record_appears_whole_or_not_at_all(tmp_path, record, monkeypatch):
  path, at = oracle.checkpoint(0), tmp_path / 'at'
  shutil.copytree(record, at)
  before = {f.name: f.read_bytes() for f in at.iterdir()}
  monkeypatch.setattr(run, 'make_meta', lambda *args: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    quiet(path, IDS, framework='torch', record=at)
  assert {f.name: f.read_bytes() for f in at.iterdir()} == before
  assert os.listdir(tmp_path) == ['at']
  monkeypatch.undo()
  quiet(path, IDS[:20], framework='torch', record=at)
  assert Record(at).meta.tokens == IDS[:20]
  assert os.listdir(tmp_path) == ['at']
  (at / 'meta.json').unlink()
  with pytest.raises(ValueError, match='exists and is no record'):
    quiet(path, IDS, framework='torch', record=at)


def test_arguments_that_compare_nothing():
  path = oracle.checkpoint(0)
  with pytest.raises(ValueError, match='alone compares nothing'):
    quiet(path, framework='jax')
  with pytest.raises(ValueError, match='vocabulary has 97'):
    quiet(path, [5, 97])
  with pytest.raises(ValueError, match='non-empty list of whole numbers'):
    quiet(path, [])
  with pytest.raises(ValueError, match='dtype='):
    quiet(path, dtype='float16')
  if not torch.cuda.is_available():
    with pytest.raises(ValueError, match="'cuda': PyTorch .* no CUDA device"):
      quiet(path, torch_device='cuda')


def test_without_torch_there_is_one_clear_error(monkeypatch, record):
  monkeypatch.setitem(sys.modules, 'torch', None)
  monkeypatch.delitem(sys.modules, 'glm_jax.validation.torch_side', False)
  with pytest.raises(ImportError, match='pip install'):
    quiet(oracle.checkpoint(0))
  assert quiet(oracle.checkpoint(0), against=record).passed


def test_ties_go_on_with_the_references_choice(tmp_path):
  def edit(name, tensor):
    if name == 'model.embed_tokens.weight':
      tensor[1] = 0  # every key scores 0 for this token
    if name == 'model.layers.4.mlp.gate.weight':
      tensor[3] = tensor[2]
    if name == 'model.layers.4.mlp.gate.e_score_correction_bias':
      tensor[2:4] = 0.3  # one of two equal experts is often the second
    return tensor

  path = oracle.edited(oracle.checkpoint(0), str(tmp_path / 'ties'), edit)
  result = quiet(path, [1 if i % 9 == 8 else t for i, t in enumerate(IDS)])
  assert result.passed and result.selected_set_agreement == 1
  assert result.selected_ties > 0
  assert result.expert_ties > 0


def test_one_layer_is_in_memory_at_a_time(monkeypatch):
  # The published checkpoint has to fit in 64 GiB, both sides in one process.
  loaded = []

  def watch(owner, name, of):
    load = getattr(owner, name)

    def loading(*args, **kwargs):
      out = load(*args, **kwargs)
      assert not [r for r in loaded if r() is not None]
      loaded.append(weakref.ref(of(out)))
      return out

    monkeypatch.setattr(owner, name, loading)

  watch(torch_side.glm, 'GlmMoeDsaDecoderLayer', lambda layer: layer)
  watch(PublishedCheckpoint, 'load_block', lambda out: out[0])
  assert quiet(oracle.checkpoint(0), IDS).passed
  assert len(loaded) == 16


def test_bfloat16():
  result = quiet(oracle.checkpoint(0), IDS, dtype='bfloat16')
  assert result.passed, result.table()
  assert result.tolerance == compare.BFLOAT16
  assert result.layers[4].errors['hidden'] > 1e-4, 'it is bfloat16'


def fused(tensors: dict) -> dict:
  """Experts of a layer as two tensors."""
  out = {k: v for k, v in tensors.items() if '.mlp.experts.' not in k}
  for layer in range(3, 8):
    prefix = f'model.layers.{layer}.mlp.experts.'
    gate, up, down = (
      torch.stack([tensors[f'{prefix}{e}.{p}_proj.weight'] for e in range(8)])
      for p in ('gate', 'up', 'down')
    )
    out[f'{prefix}gate_up_proj'] = torch.cat([gate, up], dim=1)
    out[f'{prefix}down_proj'] = down
  return out


def fp8(tensors: dict, block: int = 32) -> dict:
  """What the published FP8 checkpoint keeps in e4m3, with block scales."""
  wide = ('norm', 'embed_tokens', 'lm_head', 'mlp.gate.', 'weights_proj')
  out = {}
  for name, tensor in tensors.items():
    if any(word in name for word in wide):
      out[name] = tensor
      continue
    F, D = tensor.shape
    rows, columns = -(-F // block), -(-D // block)
    scales = torch.rand(rows, columns) * 0.01 + 0.002
    full = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
    values = (tensor / full[:F, :D]).clamp(-448, 448)
    out[name] = values.to(torch.float8_e4m3fn)
    out[f'{name}_scale_inv'] = scales
  return out


@pytest.mark.parametrize('kind', ['fused', 'sharded', 'fp8', 'bf16'])
def test_checkpoint_formats(tmp_path, kind):
  path = tmp_path / kind
  shutil.copytree(oracle.checkpoint(0), path)
  file = path / 'model.safetensors'
  tensors = safetensors.torch.load_file(file)
  config = oracle.published(path)
  if kind == 'fused':
    tensors = fused(tensors)
  elif kind == 'bf16':
    config['dtype'] = 'bfloat16'
    bias = 'e_score_correction_bias'
    tensors = {k: v if bias in k else v.bfloat16() for k, v in tensors.items()}
  elif kind == 'fp8':
    tensors = fp8(tensors)
    config['quantization_config'] = {
      'quant_method': 'fp8',
      'fmt': 'e4m3',
      'weight_block_size': [32, 32],
    }
  (path / 'config.json').write_text(json.dumps(config))
  save = functools.partial(
    safetensors.torch.save_file, metadata={'format': 'pt'}
  )
  if kind != 'sharded':
    save(tensors, file)
  else:
    file.unlink()
    names = [f'model-0000{i}-of-00002.safetensors' for i in (1, 2)]
    weight_map = {k: names[i % 2] for i, k in enumerate(tensors)}
    for name in names:
      save({k: tensors[k] for k in tensors if weight_map[k] == name},
           path / name)  # fmt: skip
    index = {'metadata': {}, 'weight_map': weight_map}
    (path / 'model.safetensors.index.json').write_text(json.dumps(index))
  result = quiet(path, IDS)
  assert result.passed, result.table()
  assert result.max_abs_logit_error < 2e-4
