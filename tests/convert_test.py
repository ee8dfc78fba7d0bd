"""launch/convert.py and the conversion behind it."""

import json
import os
import pathlib
import subprocess
import sys

import checkpoint_files as cf
import numpy as np
import pytest

from glm_jax.checkpoints import (
  PublishedCheckpoint,
  convert,
  load_model,
  open_checkpoint,
  orbax_parts,
)
from glm_jax.checkpoints.tensor_writer import TensorWriter
from glm_jax.checkpoints.unfinished import MARKER

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMALL = 60_000
named, raises = cf.named, cf.raises


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  """(directory, tensors): scanned layers, a drafter, a tokenizer."""
  config = cf.t1('FFFFSFS', num_nextn_predict_layers=1)
  values = cf.tensors(config)
  directory = tmp_path_factory.mktemp('source')
  cf.write(directory, config, values, shards=2)
  (directory / 'tokenizer.json').write_text('{"t": 1}')
  text = json.dumps({'eos_token_id': [4], 'top_p': 0.95})
  (directory / 'generation_config.json').write_text(text)
  return directory, values


def run(source, out, layout, **kwargs):
  checkpoint = open_checkpoint(source)
  return convert(checkpoint, out, layout, file_bytes=SMALL, **kwargs)


def test_there_and_back_is_bit_equal(source, tmp_path):
  directory, values = source
  result = run(directory, tmp_path / 'orbax', 'orbax')
  total = sum(v.nbytes for v in values.values())
  assert result == {
    'verified': True,
    'different': [],
    'parameters': sum(v.size for v in values.values()),
    'bytes': total,
    'reused': 0,
    'dtype': 'bfloat16',
    'weight_dtype': 'bfloat16',
  }
  assert run(tmp_path / 'orbax', tmp_path / 'hf', 'hf')['verified']
  back = load_model(tmp_path / 'hf')
  cf.assert_same(named(back), values)
  assert back.config == PublishedCheckpoint(directory).config
  assert back.config.eos_token_ids == (1, 4)
  assert (tmp_path / 'hf' / 'tokenizer.json').read_text() == '{"t": 1}'
  generation = (tmp_path / 'hf' / 'generation_config.json').read_text()
  assert json.loads(generation)['top_p'] == 0.95


def test_every_change_of_format(source, tmp_path):
  directory, _ = source
  expected = named(load_model(directory, weight_dtype='fp8'))
  result = run(directory, tmp_path / 'fp8', 'hf', weight_dtype='fp8')
  assert result['verified'] and result['weight_dtype'] == 'fp8'
  again = load_model(tmp_path / 'fp8')
  cf.assert_same(named(again), expected)
  assert again.config.weight_block_size == (128, 128)
  # fp8 to orbax in f32: dequantised on the way.
  expected = named(load_model(tmp_path / 'fp8', weight_dtype='f32'))
  result = run(tmp_path / 'fp8', tmp_path / 'f32', 'orbax', weight_dtype='f32')
  assert result['dtype'] == result['weight_dtype'] == 'float32'
  cf.assert_same(named(load_model(tmp_path / 'f32')), expected)


def test_reads_the_source_once_to_write_and_once_to_verify(source, tmp_path):
  directory, values = source
  checkpoint = PublishedCheckpoint(directory)
  convert(checkpoint, tmp_path, 'hf', file_bytes=SMALL)
  total = sum(v.nbytes for v in values.values())
  assert checkpoint.files.bytes_read == 2 * total
  assert not checkpoint.files._open


class Stop(Exception):
  """What interrupts a conversion in these tests."""


@pytest.mark.parametrize(
  'layout, owner, name',
  [
    ('hf', TensorWriter, '_write_shard'),
    ('orbax', orbax_parts.ocp.Checkpointer, 'save'),
  ],
)
def test_interrupted_conversion_goes_on(
  source, tmp_path, monkeypatch, layout, owner, name
):
  directory, values = source
  calls, original = [], getattr(owner, name)

  def stop_at_the_fifth(*args, **kwargs):
    calls.append(name)
    if len(calls) == 5:
      raise Stop
    return original(*args, **kwargs)

  monkeypatch.setattr(owner, name, stop_at_the_fifth)
  out = tmp_path / 'out'
  with pytest.raises(Stop):
    run(directory, out, layout)
  with raises(f'unfinished save .{MARKER}'):
    load_model(out)
  with raises('unfinished save of something else'):
    run(directory, out, layout, dtype='f32')
  result = run(directory, out, layout)
  assert result['verified'] and result['reused'] == 4
  files = list(out.glob('model-*')) or list(out.glob('part_*'))
  assert len(calls) == 5 + len(files) - 4
  cf.assert_same(named(load_model(out)), values)


def test_a_source_that_changed_is_not_mixed_in(source, tmp_path, monkeypatch):
  _, values = source
  config = cf.t1('FFFFSFS', num_nextn_predict_layers=1)
  copy = cf.write(tmp_path / 'copy', config, values)

  def stop(self):
    raise Stop

  with monkeypatch.context() as patch, pytest.raises(Stop):
    patch.setattr(TensorWriter, 'verify', stop)
    run(copy, tmp_path / 'out', 'hf')
  file = copy / 'model-00001-of-00001.safetensors'
  os.utime(file, (1, 1))
  with raises('unfinished save of something else'):
    run(copy, tmp_path / 'out', 'hf')


@pytest.mark.parametrize('layout', ['hf', 'orbax'])
def test_wrong_bits_are_found_and_written_again(
  source, tmp_path, monkeypatch, layout
):
  directory, values = source
  out = tmp_path / 'out'
  checkpoint = PublishedCheckpoint(directory)
  read, calls = checkpoint.read, []

  def flip(leaf, index):
    value = read(leaf, index)
    if leaf.path == 'norm.weight' and not calls:
      calls.append(leaf)
      value = value.copy()
      value[3] += 1
    return value

  monkeypatch.setattr(checkpoint, 'read', flip)
  result = convert(checkpoint, out, layout, file_bytes=SMALL)
  wrong = 'model.norm.weight' if layout == 'hf' else 'norm.weight'
  assert not result['verified'] and result['different'] == [wrong]
  with raises('unfinished save'):
    load_model(out)
  result = run(directory, out, layout)
  assert result['verified'] and result['reused'] > 0
  cf.assert_same(named(load_model(out)), values)


def test_bad_requests_write_nothing(source, tmp_path):
  directory, values = source
  out = tmp_path / 'out'
  with raises("layout='zarr' must be 'orbax' or 'hf'"):
    run(directory, out, 'zarr')
  with raises("dtype='int4' must be"):
    run(directory, out, 'hf', weight_dtype='int4')
  with raises('is not empty', FileExistsError):
    run(directory, directory, 'hf')
  config = cf.t1('FFFFSFS', num_nextn_predict_layers=1)
  part = dict(list(values.items())[1:])
  broken = cf.write(tmp_path / 'broken', config, part)
  with raises('missing model.embed_tokens.weight'):
    run(broken, out, 'hf')
  assert not out.exists()


def launch(*flags, code='', timeout=120):
  """Runs the launcher as a user would; `code` goes before it."""
  path = ROOT / 'launch' / 'convert.py'
  script = f'import runpy, sys\n{code}\nsys.argv[0] = {str(path)!r}\n'
  script += f"runpy.run_path({str(path)!r}, run_name='__main__')"
  return subprocess.run(
    [sys.executable, '-W', 'error', '-c', script, *map(str, flags)],
    env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )


def test_command(source, tmp_path):
  directory, values = source
  out, report = tmp_path / 'out', tmp_path / 'report.json'
  done = launch(
    f'--model={directory}', '--out', out, '--format=hf', '--json', report,
    '--weight-dtype=f32',
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert done.stderr == ''  # no progress bar without a terminal
  count = sum(v.size for v in values.values())
  assert done.stdout.startswith(f'{out}: {count:,} parameters, ')
  result = json.loads(report.read_text())
  assert result['verified'] and result['parameters'] == count
  assert result['weight_dtype'] == 'float32' and result['num_different'] == 0
  wide = {k: v.astype(np.float32) for k, v in values.items()}
  cf.assert_same(named(load_model(out)), wide)
  done = launch(f'--model={directory}', f'--out={out}', '--format=hf')
  assert done.returncode == 2 and done.stdout == ''
  assert done.stderr.startswith(f'convert.py: {out} is not empty')
  assert done.stderr.count('\n') == 1


def test_command_fails_when_what_it_wrote_is_wrong(source, tmp_path):
  directory, _ = source
  code = (
    'from glm_jax.checkpoints.tensor_writer import TensorWriter\n'
    "TensorWriter._compare = lambda *a: ['model.norm.weight']"
  )
  out = tmp_path / 'out'
  done = launch(
    f'--model={directory}', f'--out={out}', '--format=hf', code=code
  )
  assert done.returncode == 1
  assert 'model.norm.weight differs' in done.stderr
  assert 'WRONG, left unfinished' in done.stdout
  assert (out / MARKER).exists()


def test_command_says_what_is_missing(source):
  for flags, message in (
    ((), '--model is needed'),
    (('--model=x', '--format=hf'), '--out is needed'),
    (('--model=x', '--out=y'), '--format is needed'),
    (('--model=tiny', '--out=y', '--format=hf'), 'tiny has no weights'),
  ):
    done = launch(*flags)
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.count('\n') == 1
