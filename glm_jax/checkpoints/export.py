"""Saving a model in the published layout, and what every layout shares.

Experts are written one by one and fp8 matrices with their scales beside them,
so that what is written reads back bit for bit. A value is fetched from the
devices that hold it when its turn comes: host memory holds one tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax import lax

from glm_jax.checkpoints.names import Leaf, layer_of, model_leaves
from glm_jax.checkpoints.published import read_json
from glm_jax.checkpoints.source import Read, Slices
from glm_jax.checkpoints.tensor_writer import (
  MAX_SHARD_BYTES,
  Entry,
  TensorWriter,
)
from glm_jax.checkpoints.unfinished import write_text
from glm_jax.config import ModelConfig
from glm_jax.model import Model
from glm_jax.published_config import config_to_published
from pallas_kernels.block_scale import BLOCK, FP8

_TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template.jinja',
)
_GENERATION = 'generation_config.json'
_HOST = ('cpu',)  # platforms whose arrays NumPy sees without a copy
_dynamic_slice = jax.jit(lax.dynamic_slice, static_argnums=2)


def save_published(
  model: Model,
  config: ModelConfig,
  directory: epath.PathLike,
  tokenizer_from: epath.PathLike | None = None,
  *,
  max_shard_bytes: int = MAX_SHARD_BYTES,
):
  """Saves a model in the published layout.

  An interrupted save is refused by every reader; calling this again with the
  same model finishes it.

  Args:
    model: the model, on one device or sharded over those of this process.
    config: its configuration; dtype and fp8 block are taken from the model.
    directory: new, empty, or an interrupted save of the same.
    tokenizer_from: directory whose tokenizer files are copied.
    max_shard_bytes: of one file.

  Raises:
    FileExistsError: the directory holds something else.
    FileNotFoundError: `tokenizer_from` holds no tokenizer.json.
    ValueError: an interrupted save of something else.
    NotImplementedError: a model spread over several processes.
  """
  leaves = model_leaves(model, config)
  config = stored_config(config, leaves)
  directory = epath.Path(directory).expanduser()
  files = tokenizer_files(tokenizer_from)
  read = model_reader(model, leaves)
  writer = published_writer(
    directory, config, leaves, read, max_shard_bytes=max_shard_bytes
  )
  writer.write()
  write_side_files(directory, config, files)
  writer.complete()


def published_writer(
  directory: epath.Path,
  config: ModelConfig,
  leaves: Sequence[Leaf],
  read: Read,
  *,
  source: Any = None,
  by_layer: bool = True,
  max_shard_bytes: int = MAX_SHARD_BYTES,
) -> TensorWriter:
  """The writer of a model's tensors.

  Args:
    directory: where to.
    config: what will be written beside the tensors.
    leaves: the parameters.
    read: reads a part of one.
    source: JSON that identifies where `read` reads, None for memory.
    by_layer: order tensors by layer, so that a layer's lie together; else
      by parameter, for a source that holds whole parameters.
    max_shard_bytes: of one file.
  """
  entries = []
  for leaf in leaves:
    for place in np.ndindex(leaf.names.shape):
      index = leaf.tensor_index(place)
      entries.append(
        Entry(
          leaf.names[place],
          leaf.dtype,
          leaf.tensor_shape,
          functools.partial(_read_tensor, read, leaf, index),
        )
      )
  if by_layer:
    entries.sort(key=lambda e: (_layer_key(e.name), e.name))
  return TensorWriter(
    directory,
    entries,
    contents={'config': config_to_published(config), 'source': source},
    trusted=source is not None,
    max_shard_bytes=max_shard_bytes,
  )


def stored_config(config: ModelConfig, leaves: Sequence[Leaf]) -> ModelConfig:
  """The configuration with the dtype and fp8 block that parameters have."""
  wide = next(leaf.dtype for leaf in leaves if leaf.path == 'embed')
  if wide.name not in ('bfloat16', 'float32'):
    raise ValueError(
      f'{wide.name} weights cannot be saved: cast them to bfloat16 or float32'
    )
  fp8 = any(leaf.dtype == FP8 for leaf in leaves)
  block = config.weight_block_size or BLOCK
  return dataclasses.replace(
    config, dtype=wide.name, weight_block_size=block if fp8 else None
  )


def model_reader(model: Model, leaves: Sequence[Leaf]) -> Read:
  """Reads parts of a model's parameters into host memory."""
  arrays = dict(zip((x.path for x in leaves), jax.tree.leaves(model)))
  return lambda leaf, index: host_part(arrays[leaf.path], index)


def host_part(array: jax.Array, index: Slices) -> np.ndarray:
  """A part of an array, fetched shard by shard; nothing is gathered.

  Raises:
    NotImplementedError: other processes hold some of it.
  """
  if not array.is_fully_addressable:
    raise NotImplementedError(
      'this layout is written by one process, but the model is spread over '
      'several: use save_orbax, then launch/convert.py on one host'
    )
  out = np.empty([s.stop - s.start for s in index], array.dtype)
  for shard in array.addressable_shards:
    if shard.replica_id:
      continue
    spans = [i.indices(n)[:2] for i, n in zip(shard.index, array.shape)]
    overlap = [
      (max(s.start, start), min(s.stop, stop))
      for s, (start, stop) in zip(index, spans)
    ]
    if all(start < stop for start, stop in overlap):
      starts = [a - start for (a, _), (start, _) in zip(overlap, spans)]
      sizes = [b - a for a, b in overlap]
      where = tuple(
        slice(a - s.start, b - s.start) for s, (a, b) in zip(index, overlap)
      )
      out[where] = _fetch(shard.data, starts, tuple(sizes))
  return out


def _fetch(
  data: jax.Array, starts: Sequence[int], sizes: tuple[int, ...]
) -> np.ndarray:
  """Copies a part of one device's data to the host, and no more than that."""
  if data.devices().pop().platform in _HOST:
    part = (slice(a, a + n) for a, n in zip(starts, sizes))
    return np.asarray(data)[tuple(part)]
  # Starts are data: one program serves every tensor of this shape.
  return np.asarray(_dynamic_slice(data, list(starts), sizes))


def tokenizer_files(
  directory: epath.PathLike | None, *, required: bool = True
) -> list[epath.Path]:
  """The files beside the weights that are copied with them.

  Args:
    directory: a checkpoint or tokenizer directory; None for no files.
    required: whether it must hold a tokenizer.

  Raises:
    FileNotFoundError: it must, and does not.
  """
  if directory is None:
    return []
  directory = epath.Path(directory).expanduser()
  names = (*_TOKENIZER_FILES, _GENERATION)
  found = [directory / n for n in names if (directory / n).exists()]
  if required and directory / _TOKENIZER_FILES[0] not in found:
    raise FileNotFoundError(
      f'{directory} has no {_TOKENIZER_FILES[0]}: pass a directory that has, '
      'or none'
    )
  return found


def write_side_files(
  directory: epath.Path, config: ModelConfig, files: Sequence[epath.Path]
):
  """Writes the configs and copies tokenizer files.

  Sampling defaults of a `generation_config.json` among `files` are kept; its
  end-of-sequence ids are the config's.
  """
  generation: dict[str, Any] = {}
  for path in files:
    if path.name == _GENERATION:
      generation = read_json(path)
    else:
      path.copy(directory / path.name, overwrite=True)
  generation['eos_token_id'] = list(config.eos_token_ids)
  if config.pad_token_id is not None:
    generation['pad_token_id'] = config.pad_token_id
  contents = {
    'config.json': config_to_published(config),
    _GENERATION: generation,
  }
  for name, value in contents.items():
    write_text(directory / name, json.dumps(value, indent=2) + '\n')


def _read_tensor(read: Read, leaf: Leaf, index: Slices) -> np.ndarray:
  return read(leaf, index).reshape(leaf.tensor_shape)


def _layer_key(name: str) -> int:
  layer = layer_of(name)
  return -1 if layer is None else layer
