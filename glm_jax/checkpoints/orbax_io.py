"""Checkpoints in orbax's format: parameters restore onto any sharding.

    config.json          the published config, with the weights' own dtype
    part_00000, ...      orbax checkpoints {key: array} of about 2 GiB
    glm_jax_orbax.json   which part holds what; written last

orbax makes each part whole or absent; until the manifest is there, no reader
accepts the directory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import lax
from jax.sharding import Sharding

from glm_jax.checkpoints.export import (
  stored_config,
  tokenizer_files,
  write_side_files,
)
from glm_jax.checkpoints.names import SCALE_SUFFIX, Leaf, model_leaves
from glm_jax.checkpoints.orbax_parts import (
  FORMAT,
  MANIFEST,
  PART_BYTES,
  OrbaxWriter,
  Piece,
  restore,
)
from glm_jax.checkpoints.published import read_config, read_json
from glm_jax.checkpoints.source import Slices, StoredMatrix, WeightSource
from glm_jax.checkpoints.unfinished import refuse_unfinished
from glm_jax.config import ModelConfig
from glm_jax.model import Model
from pallas_kernels.block_scale import FP8


class OrbaxCheckpoint(WeightSource):
  """One checkpoint in orbax's format."""

  by_layer = False

  def __init__(self, directory: epath.PathLike):
    """Opens a directory that `save_orbax` wrote.

    Args:
      directory: local or in a bucket.

    Raises:
      FileNotFoundError: it holds no such checkpoint.
      ValueError: an unfinished save, or a damaged manifest.
    """
    super().__init__()
    self.directory = epath.Path(directory).expanduser()
    refuse_unfinished(self.directory)
    if not (self.directory / MANIFEST).exists():
      raise FileNotFoundError(
        f'{self.directory} has no {MANIFEST}: not a checkpoint of save_orbax'
      )
    manifest = read_json(self.directory / MANIFEST)
    if manifest.get('format') != FORMAT:
      raise ValueError(
        f'{self.directory / MANIFEST} has format {manifest.get("format")}, '
        f'not {FORMAT}: write the checkpoint again with this version'
      )
    config = read_config(self.directory)
    own_head = 'mtp.head.kernel' in manifest['parameters']
    mtp = dataclasses.replace(config.mtp, own_head=own_head)
    self.config = dataclasses.replace(config, mtp=mtp)
    self._leaves = {
      leaf.path: leaf for leaf in model_leaves(self.abstract(), self.config)
    }
    there = {k: tuple(x) for k, x in manifest['parameters'].items()}
    wanted = {k: (x.dtype.name, *x.shape) for k, x in self._leaves.items()}
    if there != wanted:
      wrong = sorted({k for k, _ in there.items() ^ wanted.items()})
      raise ValueError(
        f'{self.directory}: {MANIFEST} does not match config.json at '
        f'{", ".join(wrong[:20])}: one of them was changed, write the '
        'checkpoint again'
      )
    self._pieces: dict[str, list[Piece]] = {}
    for path, start, stop, part in manifest['pieces']:
      piece = Piece(self._leaves[path], start, stop, part)
      self._pieces.setdefault(path, []).append(piece)
    # Tensor name -> parameter and place in it.
    self._where = {
      leaf.names[place]: (leaf, place)
      for leaf in self._leaves.values()
      for place in np.ndindex(leaf.names.shape)
    }
    # A matrix and its scales are read in turn, perhaps from two parts.
    self._host_part = functools.lru_cache(2)(self._read_part)

  def check_model(self, leaves: Sequence[Leaf], weight_dtype: str = 'auto'):
    """Does nothing: opening the checkpoint compared it with its config."""

  def fingerprint(self) -> dict[str, Any]:
    """JSON that changes when the checkpoint does."""
    path = self.directory / MANIFEST
    return {'path': str(path), 'time': path.stat().mtime}

  def is_fp8(self, name: str) -> bool:
    """Whether a weight is stored in fp8."""
    return self._where[name][0].dtype == FP8

  def tensor(self, name: str, index: Slices) -> np.ndarray:
    """Part of a stored tensor."""
    leaf, place = self._where[name]
    for piece in self._pieces[leaf.path]:
      start = piece.start or 0
      if piece.stop is None or start <= place[0] < piece.stop:
        break
    if place:
      place = (place[0] - start, *place[1:])
    return self._host_part(piece.part)[piece.key][(*place, *index)]

  def matrix(self, name: str) -> StoredMatrix:
    """A whole stored weight with its scales."""
    scales = None
    if self.is_fp8(name):
      scales = self.tensor(name + SCALE_SUFFIX, ())
    return StoredMatrix(self.tensor(name, ()), scales, slice(None))

  def place(self, leaf: Leaf, sharding: Sharding | None) -> jax.Array:
    """Reads one parameter; each host its own part where nothing changes."""
    stored = self._leaves.get(leaf.path)
    if (
      sharding is None
      or stored is None
      or (stored.dtype == FP8) != (leaf.dtype == FP8)
    ):
      return super().place(leaf, sharding)
    pieces = self._pieces[leaf.path]
    restored = (
      restore(self.directory / p.part, [p], [sharding])[0].astype(leaf.dtype)
      for p in pieces
    )
    if pieces[0].start is None:
      return next(restored)
    zeros = functools.partial(jnp.zeros, leaf.shape, leaf.dtype)
    whole = jax.jit(zeros, out_shardings=sharding)()
    for piece, value in zip(pieces, restored):
      whole = _insert(whole, value, piece.start)
    return whole

  def close(self):
    """Lets go of buffers."""
    super().close()
    self._host_part.cache_clear()

  def _read_part(self, part: str) -> dict[str, np.ndarray]:
    """A whole part by key: about 2 GiB, or one layer's experts."""
    pieces = [p for ps in self._pieces.values() for p in ps if p.part == part]
    arrays = restore(self.directory / part, pieces)
    return dict(zip((p.key for p in pieces), arrays))


def save_orbax(
  model: Model,
  config: ModelConfig,
  directory: epath.PathLike,
  tokenizer_from: epath.PathLike | None = None,
  *,
  part_bytes: int = PART_BYTES,
):
  """Saves a model in orbax's format; every process of a pod calls this.

  Args:
    model: the model, sharded in any way.
    config: its configuration; dtype and fp8 block are taken from the model.
    directory: new, empty, or an interrupted save of the same.
    tokenizer_from: directory whose tokenizer files are copied.
    part_bytes: of one part.

  Raises:
    FileExistsError: the directory holds something else.
    FileNotFoundError: `tokenizer_from` holds no tokenizer.json.
    ValueError: an interrupted save of something else.
  """
  leaves = model_leaves(model, config)
  config = stored_config(config, leaves)
  files = tokenizer_files(tokenizer_from)
  arrays = dict(zip((x.path for x in leaves), jax.tree.leaves(model)))

  def read(leaf, index):
    array = arrays[leaf.path]
    if index[0] == slice(0, leaf.shape[0]):
      return array
    return _layers(array, index[0].start, index[0].stop - index[0].start)

  writer = OrbaxWriter(directory, config, leaves, read, part_bytes=part_bytes)
  writer.write()
  if jax.process_index() == 0:
    write_side_files(writer.directory, config, files)
  writer.complete()


def load_orbax(
  directory: epath.PathLike,
  dtype='auto',
  weight_dtype='auto',
  plan: Any = None,
) -> Model:
  """Loads a model that `save_orbax` saved; as `WeightSource.load_model`."""
  return OrbaxCheckpoint(directory).load_model(dtype, weight_dtype, plan)


@functools.partial(jax.jit, static_argnums=2)
def _layers(array: jax.Array, start, count: int) -> jax.Array:
  return lax.dynamic_slice_in_dim(array, start, count)


@functools.partial(jax.jit, donate_argnums=0)
def _insert(whole: jax.Array, piece: jax.Array, start) -> jax.Array:
  """Writes a piece in place: two copies of a parameter may not fit."""
  return lax.dynamic_update_slice_in_dim(whole, piece, start, 0)
