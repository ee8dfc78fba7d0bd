"""Reading safetensors by byte ranges, from a local path or a bucket.

A file is 8 bytes (little-endian length of the header), the header (JSON: name
-> dtype, shape, byte range) and the tensors' bytes without holes. Headers are
read when they are first needed and tensors only as far as asked, so that a
host reads its own share of a checkpoint and a layer costs only its bytes.
Where `model.safetensors.index.json` exists it alone says which file holds a
tensor, and files that it does not name are left alone.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from etils import epath

from glm_jax.checkpoints.unfinished import refuse_unfinished

INDEX_NAME = 'model.safetensors.index.json'
DTYPES = {
  'BOOL': np.dtype(np.bool_),
  'U8': np.dtype(np.uint8),
  'I8': np.dtype(np.int8),
  'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
  'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
  'I16': np.dtype(np.int16),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'I32': np.dtype(np.int32),
  'F32': np.dtype(np.float32),
  'I64': np.dtype(np.int64),
  'F64': np.dtype(np.float64),
}
# The format's own limit: a longer header is a damaged or hostile file.
MAX_HEADER_BYTES = 100_000_000
_MAX_OPEN = 4
_SHARD = re.compile(r'(.+)-(\d{5})-of-(\d{5})\.safetensors')
_AGAIN = 'download or write the file again'

Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Where a tensor lies.

  Attributes:
    file: the file that holds it.
    kind: dtype as the header spells it, e.g. 'BF16'.
    shape: its shape.
    start: offset of its first byte in the file.
    nbytes: its bytes.
  """

  file: epath.Path
  kind: str
  shape: tuple[int, ...]
  start: int
  nbytes: int

  @property
  def dtype(self) -> np.dtype:
    """NumPy dtype; raises ValueError for one that NumPy cannot hold."""
    if self.kind not in DTYPES:
      raise ValueError(
        f'{self.file} holds a tensor of dtype {self.kind}, which is not '
        f'supported: known are {", ".join(DTYPES)}'
      )
    return DTYPES[self.kind]


def read_header(path: epath.Path) -> dict[str, TensorInfo]:
  """The tensors of one file, checked against the file's size.

  Args:
    path: a safetensors file.

  Returns:
    Each tensor's place by name, in the order of the header.

  Raises:
    ValueError: a truncated file, or a header that is not well formed.
  """
  size = path.stat().length
  with path.open('rb') as f:
    first = f.read(8)
    length = struct.unpack('<Q', first)[0] if len(first) == 8 else 0
    if not 2 <= length <= MAX_HEADER_BYTES:
      raise ValueError(
        f'{path} has a header of {length} bytes, outside 2 to '
        f'{MAX_HEADER_BYTES}: not a safetensors file or damaged, {_AGAIN}'
      )
    if 8 + length > size:
      raise ValueError(
        f'{path} is truncated: {size} bytes, header of {length}; {_AGAIN}'
      )
    text = f.read(length)
  try:
    header = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(header, dict):
      raise ValueError('not a JSON object')
    header.pop('__metadata__', None)
    found = {k: _info(path, v, 8 + length) for k, v in header.items()}
    end = _check_layout(found, 8 + length)
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{path} has a bad header ({error}): {_AGAIN}') from error
  if end != size:
    what = 'is truncated' if end > size else 'has bytes after its tensors'
    raise ValueError(
      f'{path} {what}: {size} bytes, its header says {end}; {_AGAIN}'
    )
  return found


class _Run(NamedTuple):
  """Consecutive bytes that cover part of a tensor.

  Attributes:
    start: offset of the first byte in the file.
    nbytes: bytes to read.
    shape: what they hold.
    kept: index of the wanted part within that.
  """

  start: int
  nbytes: int
  shape: tuple[int, ...]
  kept: Index


def _covering_run(info: TensorInfo, index: Index) -> _Run:
  """The shortest run of leading rows that covers `info`'s tensor[index]."""
  shape = info.shape
  full = (*index, *[slice(None)] * (len(shape) - len(index)))
  spans = [
    (i, i + 1) if isinstance(i, int) else i.indices(n)[:2]
    for i, n in zip(full, shape)
  ]
  lengths = [max(stop - start, 0) for start, stop in spans]
  # All axes before `cut` have one row, so the run is contiguous.
  cut = next((a for a, n in enumerate(lengths) if n != 1), len(shape) - 1)
  run = (*lengths[: cut + 1], *shape[cut + 1 :])
  first = sum(spans[a][0] * math.prod(shape[a + 1 :]) for a in range(cut + 1))
  size = info.dtype.itemsize
  kept = [0 if isinstance(i, int) else slice(None) for i in full[: cut + 1]]
  return _Run(
    info.start + first * size,
    math.prod(run) * size,
    run,
    (*kept, *full[cut + 1 :]),
  )


class TensorFiles:
  """The tensors of a directory; headers are read on demand.

  Attributes:
    directory: the directory.
    bytes_read: bytes of tensors read so far, headers not counted.
  """

  def __init__(self, directory: epath.PathLike):
    """Opens a directory.

    Args:
      directory: holds *.safetensors, with or without an index.

    Raises:
      FileNotFoundError: no such directory, no tensors, or a missing file.
      ValueError: an unfinished save, a bad index or header, or a tensor that
        is in two files.
    """
    self.directory = epath.Path(directory).expanduser()
    self.bytes_read = 0
    self._open: collections.OrderedDict[str, BinaryIO] = (
      collections.OrderedDict()
    )
    self._headers: dict[str, dict[str, TensorInfo]] = {}
    if not self.directory.is_dir():
      raise FileNotFoundError(f'{self.directory} is not a directory')
    refuse_unfinished(self.directory)
    files = {p.name for p in self.directory.iterdir()}
    if INDEX_NAME in files:
      self._file_of = self._read_index(files)
    else:
      self._file_of = self._read_all_headers(files)

  def __iter__(self) -> Iterator[str]:
    return iter(self._file_of)

  def __contains__(self, name: object) -> bool:
    return name in self._file_of

  def __len__(self) -> int:
    return len(self._file_of)

  def info(self, name: str) -> TensorInfo:
    """Where a tensor lies.

    Raises:
      KeyError: no such tensor.
      ValueError: its file is damaged or contradicts the index.
    """
    file = self._file_of[name]
    if file not in self._headers:
      header = read_header(self.directory / file)
      self._check_header(file, header)
      self._headers[file] = header
    if name not in self._headers[file]:
      raise ValueError(
        f'{self.directory / INDEX_NAME} says that {file} holds {name}, which '
        'it does not: download both again'
      )
    return self._headers[file][name]

  def read(self, name: str, index: Index = ()) -> np.ndarray:
    """Reads a tensor or part of it.

    The shortest run of leading rows that covers `index` is read; what
    `index` leaves out of later axes is dropped in memory.

    Args:
      name: the tensor.
      index: an int (drops the axis) or a slice of step 1 for leading axes.

    Returns:
      `tensor[index]`, read-only.

    Raises:
      KeyError: no such tensor.
      ValueError: its file is damaged or contradicts the index.
    """
    info = self.info(name)
    run = _covering_run(info, index)
    f = self._file(info.file)
    f.seek(run.start)
    data = f.read(run.nbytes)
    if len(data) != run.nbytes:
      raise ValueError(f'{info.file} is truncated: {_AGAIN}')
    self.bytes_read += run.nbytes
    return np.frombuffer(data, info.dtype).reshape(run.shape)[run.kept]

  def close(self):
    """Closes the files; the next read opens them again."""
    while self._open:
      self._open.popitem()[1].close()

  def __enter__(self) -> TensorFiles:
    return self

  def __exit__(self, *_):
    self.close()

  def _file(self, path: epath.Path) -> BinaryIO:
    """An open file; the least recently used one is closed for it."""
    if path.name not in self._open:
      if len(self._open) == _MAX_OPEN:
        self._open.popitem(last=False)[1].close()
      self._open[path.name] = path.open('rb')
    self._open.move_to_end(path.name)
    return self._open[path.name]

  def _read_index(self, files: set[str]) -> dict[str, str]:
    path = self.directory / INDEX_NAME
    try:
      index = json.loads(path.read_text(), object_pairs_hook=_unique)
      weight_map = dict(index['weight_map'])
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f'{path} is not a safetensors index ({error}): download it again, or '
        'delete it to read all *.safetensors'
      ) from error
    missing = sorted({str(v) for v in weight_map.values()} - files)
    if missing:
      raise FileNotFoundError(
        f'{path} names {len(missing)} file(s) that are not there, first '
        f'{missing[0]}: download the rest of the checkpoint'
      )
    return weight_map

  def _read_all_headers(self, files: set[str]) -> dict[str, str]:
    names = sorted(f for f in files if f.endswith('.safetensors'))
    if not names:
      raise FileNotFoundError(
        f'{self.directory} holds no *.safetensors: pass the directory of a '
        'checkpoint'
      )
    _check_shard_names(self.directory, names)
    file_of: dict[str, str] = {}
    for file in names:
      self._headers[file] = read_header(self.directory / file)
      for name in self._headers[file]:
        if name in file_of:
          raise ValueError(
            f'{self.directory}: {name} is in {file_of[name]} and in {file}; '
            'remove the file that does not belong'
          )
        file_of[name] = file
    return file_of

  def _check_header(self, file: str, header: dict[str, TensorInfo]):
    """A file may hold nothing that the index puts elsewhere or leaves out."""
    for name in header:
      other = self._file_of.get(name)
      if other != file:
        where = f'and in {other}' if other else 'but not in the index'
        raise ValueError(
          f'{self.directory}: {name} is in {file} {where}; download '
          f'{INDEX_NAME} and the file again'
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """A JSON object whose keys may not repeat."""
  result = dict(pairs)
  if len(result) != len(pairs):
    twice = collections.Counter(k for k, _ in pairs).most_common(1)[0][0]
    raise ValueError(f'{twice!r} is there twice')
  return result


def _info(path: epath.Path, entry: dict[str, Any], base: int) -> TensorInfo:
  kind, shape = entry['dtype'], tuple(entry['shape'])
  begin, end = entry['data_offsets']
  numbers = (*shape, begin, end)
  if not all(type(n) is int and n >= 0 for n in numbers) or begin > end:
    raise ValueError(f'shape {shape} or offsets {begin}, {end}')
  if kind in DTYPES:
    wanted = math.prod(shape) * DTYPES[kind].itemsize
    if end - begin != wanted:
      raise ValueError(f'{end - begin} bytes for {kind} {shape}')
  return TensorInfo(path, str(kind), shape, base + begin, end - begin)


def _check_layout(found: dict[str, TensorInfo], base: int) -> int:
  """The end of the last tensor; tensors must follow each other closely."""
  end = base
  for info in sorted(found.values(), key=lambda i: (i.start, i.nbytes)):
    if info.start != end:
      raise ValueError(f'hole or overlap at byte {end}')
    end += info.nbytes
  return end


def _check_shard_names(directory: epath.Path, names: list[str]):
  """Without an index, the names must account for every shard."""
  shards: dict[tuple[str, int], set[int]] = {}
  for match in filter(None, map(_SHARD.fullmatch, names)):
    key = match[1], int(match[3])
    shards.setdefault(key, set()).add(int(match[2]))
  for (stem, count), there in shards.items():
    missing = sorted(set(range(1, count + 1)) - there)
    if missing:
      raise FileNotFoundError(
        f'{directory} lacks {len(missing)} of {count} files, first '
        f'{stem}-{missing[0]:05d}-of-{count:05d}.safetensors: download the '
        'rest of the checkpoint'
      )
