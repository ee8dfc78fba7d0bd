"""Writing sharded safetensors, one tensor in memory at a time.

A shard is written under a temporary name and renamed when it is whole; the
index comes last, then the marker of an unfinished save goes. Whatever
interrupts a save, no reader takes the directory for a checkpoint, and the
same save started again goes on from the shards that are whole.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epath
from tqdm import tqdm

from glm_jax.checkpoints.tensor_files import DTYPES, INDEX_NAME, read_header
from glm_jax.checkpoints.unfinished import begin_save, finish_save, write_text

MAX_SHARD_BYTES = 5_000_000_000
_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
  """A tensor to write.

  Attributes:
    name: its name in the file.
    dtype: its dtype.
    shape: its shape.
    read: makes its value; called when its turn comes, perhaps twice.
  """

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]

  @property
  def nbytes(self) -> int:
    """Bytes of the value."""
    return math.prod(self.shape) * self.dtype.itemsize


class TensorWriter:
  """One save: `write`, if wanted `verify`, then `complete`.

  Attributes:
    directory: where to.
    shards: the entries of each file, by name.
    nbytes: bytes of all tensors.
  """

  def __init__(
    self,
    directory: epath.PathLike,
    entries: Sequence[Entry],
    *,
    contents: Any = None,
    trusted: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
  ):
    """Claims the directory.

    Args:
      directory: new, empty, or an interrupted save of the same.
      entries: what to write, in this order.
      contents: JSON that says what is saved; an interrupted save is only
        continued with the same.
      trusted: `contents` identifies the values, so whole shards of an
        interrupted save are kept unseen. Otherwise (values from memory) they
        are compared, and written again where they differ.
      max_shard_bytes: of one file, unless a single tensor is larger.

    Raises:
      FileExistsError: the directory holds something else.
      ValueError: an interrupted save of something else.
    """
    self.directory = epath.Path(directory).expanduser()
    self.shards = _deal(entries, max_shard_bytes)
    self.nbytes = sum(e.nbytes for e in entries)
    self._trusted = trusted
    layout = {
      file: [(e.name, e.dtype.name, e.shape) for e in shard]
      for file, shard in self.shards.items()
    }
    self.resumed = begin_save(
      self.directory, {'contents': contents, 'layout': layout}
    )

  def write(self) -> int:
    """Writes what is missing; returns the number of shards it found whole."""
    found = 0
    with byte_bar('writing', self.nbytes) as bar:
      for file, shard in self.shards.items():
        if self.resumed and self._is_whole(file, shard):
          found += 1
          bar.update(sum(e.nbytes for e in shard))
        else:
          self._write_shard(file, shard, bar)
    return found

  def verify(self) -> list[str]:
    """Reads everything back; names the tensors that differ, bit for bit.

    A shard with such a tensor is removed: the next run writes it again.
    """
    different = []
    with byte_bar('verifying', self.nbytes) as bar:
      for file, shard in self.shards.items():
        wrong = self._compare(file, shard, bar.update)
        if wrong:
          (self.directory / file).unlink()
        different += wrong
    return different

  def complete(self):
    """Writes the index and removes the marker."""
    weight_map = {
      e.name: file for file, shard in self.shards.items() for e in shard
    }
    index = {
      'metadata': {'total_size': self.nbytes},
      'weight_map': dict(sorted(weight_map.items())),
    }
    text = json.dumps(index, indent=2) + '\n'
    write_text(self.directory / INDEX_NAME, text)
    finish_save(self.directory)

  def _write_shard(self, file: str, shard: list[Entry], bar: tqdm):
    path = self.directory / file
    partial = self.directory / f'{file}.partial'
    with partial.open('wb') as f:
      f.write(_header(shard))
      for entry in shard:
        f.write(_bytes(entry))
        bar.update(entry.nbytes)
      f.flush()
      if '://' not in os.fspath(partial):
        os.fsync(f.fileno())
    partial.replace(path)

  def _is_whole(self, file: str, shard: list[Entry]) -> bool:
    """Whether an earlier run finished this shard."""
    path = self.directory / file
    if not path.exists():
      return False
    with path.open('rb') as f:
      header = _header(shard)
      size = len(header) + sum(e.nbytes for e in shard)
      if path.stat().length != size or f.read(len(header)) != header:
        return False
    return self._trusted or not self._compare(file, shard)

  def _compare(
    self,
    file: str,
    shard: list[Entry],
    done: Callable[[int], Any] = lambda nbytes: None,
  ) -> list[str]:
    """Names of the tensors in a file that differ from their values."""
    different = []
    path = self.directory / file
    infos = read_header(path)
    with path.open('rb') as f:
      for entry in shard:
        f.seek(infos[entry.name].start)
        there = np.frombuffer(f.read(entry.nbytes), np.uint8)
        if not np.array_equal(there, _bytes(entry)):
          different.append(entry.name)
        del there  # before the next one is read
        done(entry.nbytes)
    return different


def byte_bar(what: str, nbytes: int) -> tqdm:
  """A progress bar in bytes; disable=None: none unless stderr is a terminal."""
  return tqdm(total=nbytes, desc=what, unit='B', unit_scale=True, disable=None)


def _bytes(entry: Entry) -> np.ndarray:
  """The bytes of a value; NumPy lends none of a dtype it does not know."""
  value = np.ascontiguousarray(entry.read())
  if value.dtype != entry.dtype or value.shape != entry.shape:
    raise TypeError(
      f'{entry.name} was announced as {entry.dtype}{entry.shape} but is '
      f'{value.dtype}{value.shape}'
    )
  return value.reshape(-1).view(np.uint8)


def _deal(entries: Sequence[Entry], max_bytes: int) -> dict[str, list[Entry]]:
  """Entries by file name, filled in order."""
  shards: list[list[Entry]] = [[]]
  size = 0
  for entry in entries:
    if shards[-1] and size + entry.nbytes > max_bytes:
      shards.append([])
      size = 0
    shards[-1].append(entry)
    size += entry.nbytes
  count = len(shards)
  return {
    f'model-{i:05d}-of-{count:05d}.safetensors': _aligned(shard)
    for i, shard in enumerate(shards, 1)
  }


def _aligned(shard: list[Entry]) -> list[Entry]:
  """The shard in an order that keeps every tensor aligned to its dtype."""
  offset = 0
  for entry in shard:
    if offset % entry.dtype.itemsize:
      return sorted(shard, key=lambda e: -e.dtype.itemsize)
    offset += entry.nbytes
  return shard


def _header(shard: list[Entry]) -> bytes:
  """The bytes before the tensors, padded so that these start aligned."""
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  offset = 0
  for entry in shard:
    header[entry.name] = {
      'dtype': _KINDS[entry.dtype],
      'shape': entry.shape,
      'data_offsets': (offset, offset + entry.nbytes),
    }
    offset += entry.nbytes
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  return struct.pack('<Q', len(text)) + text
