"""Token files: ids on disk, memory-mapped, and checked before use.

A file NAME is three: NAME.bin, the ids of all documents without a gap, little
endian, two bytes each while the vocabulary allows; NAME.idx, where documents
begin and end (int64, one more than there are documents); NAME.json, what both
hold, their checksums, and the checksum of the tokenizer that made them.

The JSON file is written last: without it there is no token file.
"""

from __future__ import annotations

import hashlib
import json
import os
import types
from typing import Any

import numpy as np
from etils import epath
from numpy.typing import ArrayLike

from glm_jax.data.sources import sha256

_FORMAT = 'glm-jax tokens 1'
_DTYPES = {'uint16': np.dtype('<u2'), 'uint32': np.dtype('<u4')}
_KEYS = (
  'format dtype vocab_size num_tokens num_documents tokenizer_sha256 sha256'
)


class TokenWriter:
  """Writes a token file document by document; all of it or nothing.

  with TokenWriter(path, vocab_size, tokenizer_sha256) as writer:
    writer.add(ids)
  """

  def __init__(
    self, path: epath.PathLike, vocab_size: int, tokenizer_sha256: str
  ):
    """Starts a file; an existing one stays until the new one is complete.

    Args:
      path: without a suffix; its folder must exist.
      vocab_size: every id is below it.
      tokenizer_sha256: of the tokenizer.json that made the ids.
    """
    self._path = epath.Path(path)
    self._name = 'uint16' if vocab_size <= 1 << 16 else 'uint32'
    self._vocab_size = vocab_size
    self._tokenizer_sha256 = tokenizer_sha256
    self._digest = hashlib.sha256()
    self._offsets = [0]
    self._stream = None

  def __enter__(self) -> TokenWriter:
    self._stream = _partial(self._path, 'bin').open('wb')
    return self

  def add(self, ids: ArrayLike):
    """Appends a document of `ids` [n], n > 0.

    Raises:
      ValueError: no ids, or ids outside the vocabulary.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or not array.size or array.dtype.kind not in 'iu':
      raise ValueError(
        f'document {len(self._offsets) - 1} has ids of shape {array.shape} '
        f'and type {array.dtype}; expected a list of at least one integer'
      )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= self._vocab_size:
      raise ValueError(
        f'document {len(self._offsets) - 1} has ids {low} to {high}; the '
        f'vocabulary has {self._vocab_size}'
      )
    content = array.astype(_DTYPES[self._name]).tobytes()
    self._digest.update(content)
    self._stream.write(content)
    self._offsets.append(self._offsets[-1] + array.size)

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: types.TracebackType | None,
  ):
    self._stream.close()
    if kind is not None:
      _partial(self._path, 'bin').unlink(missing_ok=True)
      return
    index = np.asarray(self._offsets, '<i8').tobytes()
    _partial(self._path, 'idx').write_bytes(index)
    about = {
      'format': _FORMAT,
      'dtype': self._name,
      'vocab_size': self._vocab_size,
      'num_tokens': self._offsets[-1],
      'num_documents': len(self._offsets) - 1,
      'tokenizer_sha256': self._tokenizer_sha256,
      'sha256': {
        'bin': self._digest.hexdigest(),
        'idx': hashlib.sha256(index).hexdigest(),
      },
    }
    text = json.dumps(about, indent=2) + '\n'
    _partial(self._path, 'json').write_text(text)
    _part(self._path, 'json').unlink(missing_ok=True)
    for suffix in ('bin', 'idx', 'json'):
      _partial(self._path, suffix).replace(_part(self._path, suffix))


class TokenFile:
  """A token file, open for reading.

  Attributes:
    tokens: every id [num_tokens], memory-mapped where the file is local.
    offsets: document i is tokens[offsets[i] : offsets[i + 1]].
    vocab_size: every id is below it.
    tokenizer_sha256: of the tokenizer.json that made the ids.
  """

  def __init__(
    self,
    path: epath.PathLike,
    *,
    tokenizer_sha256: str | None = None,
    verify: bool = True,
  ):
    """Opens and checks a token file.

    Args:
      path: with or without one of its suffixes; local or remote.
      tokenizer_sha256: of the tokenizer in use; another's ids mean nothing.
      verify: compare checksums too, which reads the whole file once.

    Raises:
      ValueError: the file is missing, incomplete, altered, or made with
        another tokenizer.
    """
    path = epath.Path(path).expanduser()
    if path.suffix in ('.bin', '.idx', '.json'):
      path = path.with_suffix('')
    self.path = path
    about = _read_about(path)
    self.vocab_size: int = about['vocab_size']
    self.tokenizer_sha256: str = about['tokenizer_sha256']
    if tokenizer_sha256 not in (None, self.tokenizer_sha256):
      raise ValueError(
        f'{path} was made with tokenizer {self.tokenizer_sha256:.12}, not '
        f'with {tokenizer_sha256:.12}; make it again with this tokenizer'
      )
    dtype = _DTYPES[about['dtype']]
    sizes = {
      'bin': about['num_tokens'] * dtype.itemsize,
      'idx': (about['num_documents'] + 1) * 8,
    }
    for suffix, expected in sizes.items():
      part = _part(path, suffix)
      size = part.stat().length if part.exists() else 0
      if size != expected:
        raise ValueError(
          f'{part} has {size} bytes, {expected} expected; make it again'
        )
      if verify and sha256(part) != about['sha256'][suffix]:
        raise ValueError(f'{part} was altered (checksum); make it again')
    self.tokens = _map(_part(path, 'bin'), dtype)
    index = _part(path, 'idx').read_bytes()
    self.offsets = np.frombuffer(index, '<i8').astype(np.int64)

  def __len__(self) -> int:
    """Number of documents."""
    return len(self.offsets) - 1

  def document(self, index: int) -> np.ndarray:
    """Ids of one document."""
    if not 0 <= index < len(self):
      raise ValueError(f'{index=} must be in [0, {len(self)})')
    return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def _read_about(path: epath.Path) -> dict[str, Any]:
  part = _part(path, 'json')
  if not part.exists():
    raise ValueError(
      f'there is no token file {path} ({part.name} is missing); '
      'launch/prepare_data.py makes one'
    )
  try:
    about = json.loads(part.read_text())
    missing = set(_KEYS.split()) - set(about)
    if missing or about['format'] != _FORMAT or about['dtype'] not in _DTYPES:
      raise ValueError(f'format {about.get("format")}, missing {missing}')
  except (ValueError, AttributeError, TypeError) as error:
    raise ValueError(
      f'{part} does not describe a token file: {error}; make it again'
    ) from error
  return about


def _map(path: epath.Path, dtype: np.dtype) -> np.ndarray:
  if '://' in os.fspath(path):
    return np.frombuffer(path.read_bytes(), dtype)
  if not path.stat().length:  # An empty file cannot be mapped.
    return np.empty(0, dtype)
  return np.memmap(os.fspath(path), dtype, 'r')


def _part(path: epath.Path, suffix: str) -> epath.Path:
  return path.parent / f'{path.name}.{suffix}'


def _partial(path: epath.Path, suffix: str) -> epath.Path:
  return path.parent / f'{path.name}.{suffix}.tmp'
