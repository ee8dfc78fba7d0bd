"""Parameters cut into pieces, pieces dealt to parts, parts saved by orbax.

A part is an orbax checkpoint {key: array}. A parameter that is larger than a
part is cut along its layers, the one axis that no plan shards: a save holds
one piece in memory, and a restore adds one piece at a time to the parameter.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding

from glm_jax.checkpoints.names import Leaf
from glm_jax.checkpoints.source import Slices
from glm_jax.checkpoints.tensor_writer import byte_bar
from glm_jax.checkpoints.unfinished import begin_save, finish_save, write_text
from glm_jax.config import ModelConfig
from glm_jax.published_config import config_to_published

MANIFEST = 'glm_jax_orbax.json'
FORMAT = 1  # of the manifest
PART_BYTES = 2 << 30


@dataclasses.dataclass(frozen=True)
class Piece:
  """A parameter, or some of its layers, as it is saved.

  Attributes:
    leaf: the parameter.
    start: first index on its leading axis.
    stop: end on its leading axis; `start` and `stop` are None for all of it.
    part: directory of the part.
  """

  leaf: Leaf
  start: int | None
  stop: int | None
  part: str = ''

  @property
  def key(self) -> str:
    """Its key in the part."""
    if self.start is None:
      return self.leaf.path
    return f'{self.leaf.path}.{self.start:05d}'

  @property
  def index(self) -> Slices:
    """What it is of the parameter."""
    full = tuple(slice(0, n) for n in self.leaf.shape)
    if self.start is None:
      return full
    return (slice(self.start, self.stop), *full[1:])

  @property
  def shape(self) -> tuple[int, ...]:
    """Its shape."""
    return tuple(s.stop - s.start for s in self.index)

  @property
  def nbytes(self) -> int:
    """Its bytes."""
    return math.prod(self.shape) * self.leaf.dtype.itemsize


def pieces_of(leaves: Sequence[Leaf], part_bytes: int) -> list[Piece]:
  """Cuts parameters into pieces and deals these to parts, in order."""
  pieces, part, filled = [], -1, part_bytes
  for leaf in leaves:
    bounds = [(None, None)]
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    if leaf.names.ndim and size > part_bytes:
      step = max(1, part_bytes * leaf.shape[0] // size)
      n = leaf.shape[0]
      bounds = [(i, min(i + step, n)) for i in range(0, n, step)]
    for start, stop in bounds:
      piece = Piece(leaf, start, stop)
      if filled + piece.nbytes > part_bytes:
        part, filled = part + 1, 0
      filled += piece.nbytes
      pieces.append(dataclasses.replace(piece, part=f'part_{part:05d}'))
  return pieces


class OrbaxWriter:
  """One save: `write`, if wanted `verify`, then `complete`.

  Attributes:
    directory: where to.
    nbytes: bytes of all parameters.
  """

  def __init__(
    self,
    directory: epath.PathLike,
    config: ModelConfig,
    leaves: Sequence[Leaf],
    read: Callable[[Leaf, Slices], Any],
    *,
    source: Any = None,
    part_bytes: int = PART_BYTES,
  ):
    """Claims the directory.

    Args:
      directory: new, empty, or an interrupted save of the same.
      config: what will be written beside the parameters.
      leaves: the parameters.
      read: reads a part of one, as a NumPy or a (sharded) jax array.
      source: JSON that identifies where `read` reads: whole parts of an
        interrupted save are kept. None (memory): they are written again.
      part_bytes: of one part, unless one layer of a parameter is larger.

    Raises:
      FileExistsError: the directory holds something else.
      ValueError: an interrupted save of something else.
    """
    self.directory = epath.Path(directory).expanduser()
    self._read = read
    self._kept = source is not None
    pieces = pieces_of(leaves, part_bytes)
    self.nbytes = sum(p.nbytes for p in pieces)
    self._parts: dict[str, list[Piece]] = {}
    for piece in pieces:
      self._parts.setdefault(piece.part, []).append(piece)
    self._manifest = {
      'format': FORMAT,
      'parameters': {x.path: [x.dtype.name, *x.shape] for x in leaves},
      'pieces': [(p.leaf.path, p.start, p.stop, p.part) for p in pieces],
    }
    if jax.process_index() == 0:
      contents = [config_to_published(config), source, self._manifest]
      begin_save(self.directory, contents)
      # What orbax was writing when it was interrupted.
      for path in self.directory.glob('part_*.orbax-checkpoint-tmp*'):
        path.rmtree()

  def write(self) -> int:
    """Writes what is missing; returns the number of parts it found whole."""
    found = 0
    bar = byte_bar('writing', self.nbytes)
    with bar, _checkpointer() as checkpointer:
      for part, pieces in self._parts.items():
        path = self.directory / part
        if self._kept and _is_whole(path):
          found += 1
        else:
          tree = {p.key: self._read(p.leaf, p.index) for p in pieces}
          checkpointer.save(path, args=ocp.args.PyTreeSave(tree), force=True)
        bar.update(sum(p.nbytes for p in pieces))
    return found

  def verify(self) -> list[str]:
    """Reads everything back; names parameters that differ, bit for bit.

    A part with such a parameter is removed: the next run writes it again.
    """
    different = []
    with byte_bar('verifying', self.nbytes) as bar:
      for part, pieces in self._parts.items():
        wrong = []
        for piece in pieces:
          if not self._is_right(piece):
            wrong.append(piece.key)
          bar.update(piece.nbytes)
        if wrong:
          (self.directory / part).rmtree()
        different += wrong
    return different

  def complete(self):
    """Writes the manifest and removes the marker."""
    if jax.process_index() == 0:
      text = json.dumps(self._manifest, indent=1) + '\n'
      write_text(self.directory / MANIFEST, text)
      finish_save(self.directory)

  def _is_right(self, piece: Piece) -> bool:
    (there,) = restore(self.directory / piece.part, [piece])
    value = np.asarray(self._read(piece.leaf, piece.index))
    return there.dtype == value.dtype and np.array_equal(
      np.ascontiguousarray(there).view(np.uint8),
      np.ascontiguousarray(value).view(np.uint8),
    )


def _is_whole(path: epath.Path) -> bool:
  # A bucket knows no atomic rename, so being there is not enough.
  return path.exists() and ocp.utils.is_checkpoint_finalized(path)


def restore(
  path: epath.Path,
  pieces: Sequence[Piece],
  shardings: Sequence[Sharding] | None = None,
) -> list[Any]:
  """Reads pieces of one part.

  Args:
    path: the part.
    pieces: what to read.
    shardings: where to; None for NumPy arrays.

  Returns:
    One array a piece.
  """
  how: Sequence[ocp.RestoreArgs]
  if shardings is None:
    how = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(pieces)
  else:
    how = [
      ocp.ArrayRestoreArgs(sharding=sharding, global_shape=piece.shape)
      for piece, sharding in zip(pieces, shardings)
    ]
  wanted = {p.key: jax.ShapeDtypeStruct(p.shape, p.leaf.dtype) for p in pieces}
  args = ocp.args.PyTreeRestore(
    item=wanted,
    restore_args={p.key: h for p, h in zip(pieces, how)},
    partial_restore=True,
  )
  with _checkpointer() as checkpointer:
    restored = checkpointer.restore(path, args=args)
  return [restored[p.key] for p in pieces]


def _checkpointer() -> ocp.Checkpointer:
  # Weights do not compress; trying costs most of the time of a save.
  return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
