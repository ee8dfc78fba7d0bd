"""safetensors by byte ranges: what is read, and damaged files by name."""

import json
import struct

import checkpoint_files as cf
import numpy as np
import pytest
import safetensors.numpy

from glm_jax.checkpoints.tensor_files import INDEX_NAME, TensorFiles

raises = cf.raises


@pytest.mark.parametrize(
  'index, rows',
  [
    ((), 5 * 4 * 6),
    ((2,), 4 * 6),
    ((slice(1, 3),), 2 * 4 * 6),
    ((slice(1, 2), slice(1, 3)), 2 * 6),
    ((3, slice(2, 4)), 2 * 6),
    ((3, 1, slice(2, 5)), 3),
    ((slice(4, 5), 1, slice(2, 5)), 3),
    ((slice(0, 2), slice(1, 2), slice(2, 5)), 2 * 4 * 6),
    ((4, slice(0, 4), 5), 4 * 6),
    ((slice(3, 3),), 0),
    ((2, 3, 4), 1),
  ],
)
@pytest.mark.parametrize('dtype', [cf.BF16, cf.F32, cf.FP8])
def test_reads_only_the_rows_that_are_asked_for(tmp_path, index, rows, dtype):
  x = np.arange(120).reshape(5, 4, 6).astype(dtype)
  cf.write(tmp_path, {}, {'first': np.ones(3, np.float32), 'x': x})
  with TensorFiles(tmp_path) as files:
    got = files.read('x', index)
    assert got.dtype == dtype
    assert np.array_equal(got, x[index])
    assert files.bytes_read == rows * dtype.itemsize


def test_few_files_stay_open(tmp_path):
  values = {f'x{i}': np.full(3, i, np.float32) for i in range(9)}
  cf.write(tmp_path, {}, values, shards=9)
  with TensorFiles(tmp_path) as files:
    for _ in range(2):
      for i in range(9):
        assert (files.read(f'x{i}') == i).all()
        assert len(files._open) <= 4
  assert not files._open
  assert (files.read('x3') == 3).all()  # opens again
  files.close()


def header(entries, data=b''):
  text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
  return struct.pack('<Q', len(text)) + text + data


F4 = {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}


@pytest.mark.parametrize(
  'content, message',
  [
    (b'', 'header of 0 bytes'),
    (b'abc', 'header of 0 bytes'),
    (struct.pack('<Q', 1 << 40) + b'{}', 'outside 2 to 100000000'),
    (struct.pack('<Q', 1000) + b'{}', 'is truncated: 10 bytes'),
    (header(b'{"a":'), 'bad header'),
    (header(b'[1, 2]'), 'not a JSON object'),
    (header(b'{"a": 1, "a": 2}'), "'a' is there twice"),
    (header({'a': {}}), 'bad header'),
    (header({'a': F4}, b'123'), 'is truncated'),
    (header({'a': F4}, b'12345'), 'has bytes after its tensors'),
    (header({'a': {**F4, 'shape': [2]}}, b'1234'), 'bytes for F32'),
    (header({'a': {**F4, 'shape': [-1]}}, b'1234'), 'bad header .shape'),
    (header({'a': {**F4, 'shape': ['x']}}, b'1234'), 'bad header'),
    (header({'a': F4, 'b': F4}, b'1234'), 'hole or overlap'),
    (
      header({'a': {**F4, 'data_offsets': [4, 8]}}, b'12345678'),
      'hole or overlap',
    ),
  ],
)
def test_damaged_file_is_named(tmp_path, content, message):
  (tmp_path / 'model.safetensors').write_bytes(content)
  with raises(f'model.safetensors.*{message}.*again'):
    TensorFiles(tmp_path)


def test_unknown_dtype_is_named_when_it_is_read(tmp_path):
  entry = {'dtype': 'F4', 'shape': [2], 'data_offsets': [0, 1]}
  (tmp_path / 'a.safetensors').write_bytes(header({'a': entry}, b'1'))
  with raises('a.safetensors holds a tensor of dtype F4'):
    TensorFiles(tmp_path).read('a')


X = {'x': np.ones(2, np.float32), 'y': np.ones(2, np.float32)}


def write_index(directory, weight_map):
  (directory / INDEX_NAME).write_text(json.dumps({'weight_map': weight_map}))


def test_directory_without_tensors_or_files(tmp_path):
  with raises('is not a directory', FileNotFoundError):
    TensorFiles(tmp_path / 'nothing')
  with raises('holds no .*safetensors', FileNotFoundError):
    TensorFiles(tmp_path)
  cf.write(tmp_path, {}, X, shards=2)
  (tmp_path / 'model-00002-of-00002.safetensors').unlink()
  with raises('names 1 file.*model-00002-of-00002', FileNotFoundError):
    TensorFiles(tmp_path)
  (tmp_path / INDEX_NAME).unlink()
  with raises('lacks 1 of 2 files.*model-00002', FileNotFoundError):
    TensorFiles(tmp_path)


def test_tensor_in_two_files(tmp_path):
  for name in 'a', 'b':
    safetensors.numpy.save_file(X, tmp_path / f'{name}.safetensors')
  with raises('x is in a.safetensors and in b.safetensors'):
    TensorFiles(tmp_path)
  write_index(tmp_path, {'x': 'a.safetensors', 'y': 'b.safetensors'})
  with raises('y is in a.safetensors and in b.safetensors'):
    TensorFiles(tmp_path).info('x')


def test_index_that_does_not_fit_its_files(tmp_path):
  safetensors.numpy.save_file(X, tmp_path / 'a.safetensors')
  write_index(tmp_path, {'x': 'a.safetensors'})
  with raises('y is in a.safetensors but not in the index'):
    TensorFiles(tmp_path).info('x')
  write_index(tmp_path, dict.fromkeys('xyz', 'a.safetensors'))
  with raises('says that a.safetensors holds z, which it does not'):
    TensorFiles(tmp_path).info('z')
  (tmp_path / INDEX_NAME).write_text('{')
  with raises(f'{INDEX_NAME} is not a safetensors index'):
    TensorFiles(tmp_path)
  # The index alone says what belongs: a file beside it does not matter.
  write_index(tmp_path, dict.fromkeys('xy', 'a.safetensors'))
  (tmp_path / 'old.safetensors').write_bytes(b'no tensors')
  assert sorted(TensorFiles(tmp_path)) == ['x', 'y']
