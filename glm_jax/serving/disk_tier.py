"""Pages on disk: prefixes that outlive the server.

One file a page, named by its chained hash, in a folder named after what the
rows depend on besides the tokens, so that another model, dtype or layout
never finds them. Files are written and read by a few threads; a file is
complete or absent, since it is renamed into place.
"""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from glm_jax.serving.records import checksum

Record = dict[str, np.ndarray]
_SUFFIX = '.page'
# What a file that was cut, changed or deleted makes of `decode`.
_DAMAGED = (OSError, SafetensorError, KeyError, TypeError, ValueError)


class DiskTier:
  """Records of full pages on disk, the longest unused going first.

  Attributes:
    counts: records written, not written, read, dropped, found damaged.
  """

  def __init__(
    self,
    directory: epath.PathLike,
    root: bytes,
    budget_bytes: int,
    to_device: Callable[[Sequence[Record]], list[dict[str, jax.Array]]],
    *,
    threads: int = 4,
  ):
    self._folder = epath.Path(directory) / root.hex()
    self._folder.mkdir(parents=True, exist_ok=True)
    self._budget = budget_bytes
    self._to_device = to_device
    self._threads = ThreadPoolExecutor(threads, thread_name_prefix='disk')
    self._lock = threading.Lock()
    self._sizes: collections.OrderedDict[bytes, int] = collections.OrderedDict()
    self.counts = dict.fromkeys(
      ('written', 'failed', 'read', 'dropped', 'damaged'), 0
    )
    found = []
    for path in self._folder.glob(f'*{_SUFFIX}'):
      stat = path.stat()
      found.append((stat.mtime, path.stem, stat.length))
    for _, stem, size in sorted(found):
      self._sizes[bytes.fromhex(stem)] = size

  def __len__(self) -> int:
    return len(self._sizes)

  @property
  def used_bytes(self) -> int:
    """Bytes of all files, those being written not counted."""
    with self._lock:
      return sum(self._sizes.values())

  def report(self) -> dict[str, int]:
    """Bytes and counts."""
    return {'bytes': self.used_bytes, **self.counts}

  def has(self, key: bytes) -> bool:
    """Whether the record's file is complete."""
    return key in self._sizes

  def put(self, key: bytes, record: Record) -> None:
    """Writes a record, later."""
    if key not in self._sizes:
      self._threads.submit(self._write, key, record)

  def fetch(self, key: bytes) -> DiskTransfer | None:
    """Starts to read a record."""
    with self._lock:
      if key not in self._sizes:
        return None
      self._sizes.move_to_end(key)
    return DiskTransfer(self._threads.submit(self._read, key), self._to_device)

  def clear(self) -> None:
    """Deletes every record."""
    with self._lock:
      for key in list(self._sizes):
        self._delete(key)

  def close(self) -> None:
    """Waits for what is being written."""
    self._threads.shutdown()

  def _path(self, key: bytes) -> epath.Path:
    return self._folder / f'{key.hex()}{_SUFFIX}'

  def _write(self, key: bytes, record: Record) -> None:
    data = encode(record)
    if len(data) > self._budget:
      return
    path = self._path(key)
    part = path.with_suffix(f'.part{threading.get_ident()}')
    try:
      part.write_bytes(data)
      part.replace(path)
    except OSError:  # a full disk: the page is not kept
      with self._lock:
        self.counts['failed'] += 1
      part.unlink(missing_ok=True)
      return
    with self._lock:
      self._sizes[key] = len(data)
      self.counts['written'] += 1
      while sum(self._sizes.values()) > self._budget:
        self.counts['dropped'] += 1
        self._delete(next(iter(self._sizes)))

  def _read(self, key: bytes) -> Record | None:
    """A record; None, and the file deleted, if it is damaged."""
    try:
      record = decode(self._path(key))
      self.counts['read'] += 1
      return record
    except _DAMAGED:
      with self._lock:
        self.counts['damaged'] += 1
        self._delete(key)
      return None

  def _delete(self, key: bytes) -> None:
    self._sizes.pop(key, None)
    self._path(key).unlink(missing_ok=True)


class DiskTransfer:
  """A record on its way from a file to the device."""

  def __init__(self, reading: Future, to_device):
    self._reading, self._to_device = reading, to_device
    self._moving: dict[str, jax.Array] | None = None

  def ready(self) -> bool:
    """Whether `result` would not wait."""
    if not self._reading.done():
      return False
    parts = self.result()
    return parts is None or all(a.is_ready() for a in parts.values())

  def result(self) -> dict[str, jax.Array] | None:
    """The record on the device; waits for the file."""
    record = self._reading.result()
    if record is not None and self._moving is None:
      (self._moving,) = self._to_device([record])
    return self._moving


def encode(record: Record) -> bytes:
  """A record as the bytes of a safetensors file with a checksum."""
  parts = {k: np.ascontiguousarray(v) for k, v in record.items()}
  shapes = {k: [str(v.dtype), list(v.shape)] for k, v in parts.items()}
  meta = {'shapes': json.dumps(shapes), 'crc': str(checksum(parts))}
  flat = {k: v.reshape(-1).view(np.uint8) for k, v in parts.items()}
  return save(flat, meta)


def decode(path: epath.PathLike) -> Record:
  """Reads what `encode` wrote.

  Raises:
    ValueError: the checksum differs.
  """
  with safe_open(path, 'numpy') as file:
    meta = file.metadata()
    record = {}
    for name, (dtype, shape) in json.loads(meta['shapes']).items():
      flat = file.get_tensor(name)
      record[name] = flat.view(jnp.dtype(dtype)).reshape(shape)
  if checksum(record) != int(meta['crc']):
    raise ValueError(f'{path} is damaged: its checksum differs')
  return record
