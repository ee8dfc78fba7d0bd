"""Pages in host memory: where they go when the device needs their place.

A record leaves the device in the order of dispatch and arrives when it
arrives; nobody waits. On the way back a transfer is started, and the page is
filled once the transfer is there, so that the steps of others go on
meanwhile. Records are pinned while a sequence counts on them. In debug mode
each record carries a checksum, taken when it has arrived in host memory.

The record of a page that is on the device too saves a copy later and nothing
else. Such doubles are the first to make room, so that device and host
together know as many pages as fit into both, less those on their way up.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np

from glm_jax.serving.records import Record, checksum


class Transfer(Protocol):
  """A record on its way up to the device."""

  def ready(self) -> bool:
    """Whether `result` would not wait."""

  def result(self) -> Record | None:
    """The record on the device; None if it could not be had."""


class LowerTier(Protocol):
  """Where records go from here: `disk_tier.DiskTier`."""

  def has(self, key: bytes) -> bool:
    """Whether the record is there."""

  def put(self, key: bytes, record: Record) -> None:
    """Takes a record of numpy arrays."""

  def fetch(self, key: bytes) -> Transfer | None:
    """Starts to bring a record."""

  def clear(self) -> None:
    """Forgets everything."""


@dataclasses.dataclass(slots=True)
class _Stored:
  record: Record
  arrived: bool = False
  crc: int | None = None


class Arrays:
  """A transfer that is a dispatched copy."""

  def __init__(self, record: Record):
    self._record = record

  def ready(self) -> bool:
    """Whether every part has arrived."""
    return all(part.is_ready() for part in self._record.values())

  def result(self) -> Record:
    """The record; steps that read it wait on the device."""
    return self._record


class HostTier:
  """Records of full pages in host memory.

  Doubles make room first, then the longest unused.

  Attributes:
    budget_bytes: bytes of records at most.
    record_bytes: bytes of one.
    counts: records put, fetched, dropped, refused and found corrupt.
  """

  def __init__(
    self,
    budget_bytes: int,
    record_bytes: int,
    to_device: Callable[[Sequence[Record]], list[Record]],
    *,
    pinned: bool,
    checksums: bool = False,
    below: LowerTier | None = None,
  ):
    if budget_bytes < record_bytes:
      raise ValueError(
        f'host_cache_bytes={budget_bytes} holds no page: one page takes '
        f'{record_bytes} bytes'
      )
    self.budget_bytes, self.record_bytes = budget_bytes, record_bytes
    self.counts = dict.fromkeys(
      ('put', 'fetched', 'dropped', 'refused', 'corrupt'), 0
    )
    self._to_device = to_device
    self._pinned = pinned
    self._checksums = checksums
    self._below = below
    self._stored: collections.OrderedDict[bytes, _Stored]
    self._stored = collections.OrderedDict()
    self._doubles: dict[bytes, None] = {}
    self._pins: collections.Counter[bytes] = collections.Counter()
    self._coming: collections.deque[bytes] = collections.deque()

  def __len__(self) -> int:
    return len(self._stored)

  @property
  def used_bytes(self) -> int:
    """Bytes of all records."""
    return len(self._stored) * self.record_bytes

  @property
  def num_records(self) -> int:
    """Records that fit: so many pages more than the device's are known."""
    return self.budget_bytes // self.record_bytes

  @property
  def room(self) -> int:
    """Records that fit without another one going."""
    return self.num_records - len(self._stored)

  @property
  def arriving(self) -> int:
    """Records on their way that `poll` has not seen arrive."""
    return len(self._coming)

  @property
  def pinned_records(self) -> int:
    """Records that a sequence counts on."""
    return len(self._pins)

  def report(self) -> dict[str, int]:
    """Bytes, budget and counts of pages."""
    used, budget = self.used_bytes, self.budget_bytes
    return {'bytes': used, 'budget': budget, **self.counts}

  def keys(self) -> list[bytes]:
    """Every record here, the longest unused first."""
    return list(self._stored)

  def has(self, key: bytes) -> bool:
    """Whether the record is here or below."""
    if key in self._stored:
      return True
    return self._below is not None and self._below.has(key)

  def put(self, key: bytes, record: Record) -> None:
    """Takes a record; others make room, or it is refused."""
    if key in self._stored:
      self.single(key)
      return
    while self.room < 1:
      if not self._drop_one():
        self.counts['refused'] += 1
        return
    self._stored[key] = _Stored(record)
    self._coming.append(key)
    self.counts['put'] += 1

  def doubled(self, key: bytes) -> None:
    """The device has the page too."""
    if key in self._stored:
      self._doubles[key] = None

  def single(self, key: bytes) -> None:
    """The device has it no more: from now on its record counts."""
    self._doubles.pop(key, None)
    if key in self._stored:
      self._stored.move_to_end(key)

  def poll(self) -> None:
    """Settles records that have arrived; never waits."""
    while self._coming:
      stored = self._stored.get(self._coming[0])
      if stored is not None and not stored.arrived:
        parts = stored.record.values()
        if not all(_is_ready(part) for part in parts):
          return  # they arrive in the order in which they left
        self._settle(stored)
      self._coming.popleft()

  def _settle(self, stored: _Stored) -> None:
    if not self._pinned:
      stored.record = jax.device_get(stored.record)
    if self._checksums:
      stored.crc = checksum(jax.device_get(stored.record))
    stored.arrived = True

  def fetch(self, keys: Sequence[bytes]) -> list[Transfer | None]:
    """Starts to bring records up; None for one that is gone or corrupt."""
    here = [key for key in keys if self._sound(key)]
    moving = self._to_device([self._stored[key].record for key in here])
    found = dict(zip(here, map(Arrays, moving), strict=True))
    for key in keys:
      if key not in found and self._below is not None:
        found[key] = self._below.fetch(key)
    transfers = [found.get(key) for key in keys]
    self.counts['fetched'] += sum(t is not None for t in transfers)
    return transfers

  def _sound(self, key: bytes) -> bool:
    """Whether a record is here; one that is corrupt no longer."""
    stored = self._stored.get(key)
    if stored is None:
      return False
    if stored.crc is not None:
      if checksum(jax.device_get(stored.record)) != stored.crc:
        self.counts['corrupt'] += 1
        self._remove(key)
        return False
    self._stored.move_to_end(key)
    return True

  def pin(self, key: bytes) -> None:
    """A sequence counts on the record."""
    self._pins[key] += 1
    if key in self._stored:  # behind those that may go
      self._stored.move_to_end(key)

  def unpin(self, key: bytes) -> None:
    """It does no more."""
    if self._pins[key] < 1:
      raise ValueError(f'record {key.hex()} is not pinned')
    self._pins[key] -= 1
    if not self._pins[key]:
      del self._pins[key]

  def clear(self) -> None:
    """Forgets every record that nobody counts on, below too."""
    for key in list(self._stored):
      if key not in self._pins:
        self._remove(key)
    if self._below is not None:
      self._below.clear()

  def sink(self) -> None:
    """Writes every record to the tier below (before a restart); waits."""
    if self._below is None:
      return
    for key, stored in self._stored.items():
      self._below.put(key, jax.device_get(stored.record))

  def _drop_one(self) -> bool:
    for key in itertools.chain(self._doubles, self._stored):
      if key in self._pins:
        continue
      double = key in self._doubles
      stored = self._remove(key)
      self.counts['dropped'] += 1
      # A record that has not arrived would have to be waited for.
      if self._below is not None and stored.arrived and not double:
        self._below.put(key, jax.device_get(stored.record))
      return True
    return False

  def _remove(self, key: bytes) -> _Stored:
    self._doubles.pop(key, None)
    return self._stored.pop(key)


def _is_ready(part) -> bool:
  return isinstance(part, np.ndarray) or part.is_ready()
