"""Conversion from one checkpoint to another without a model in memory."""

from __future__ import annotations

import math
from typing import Any

from etils import epath

from glm_jax.checkpoints.export import (
  published_writer,
  stored_config,
  tokenizer_files,
  write_side_files,
)
from glm_jax.checkpoints.names import model_leaves
from glm_jax.checkpoints.orbax_parts import PART_BYTES, OrbaxWriter
from glm_jax.checkpoints.source import WeightSource
from glm_jax.checkpoints.tensor_writer import MAX_SHARD_BYTES


def convert(
  source: WeightSource,
  directory: epath.PathLike,
  layout: str,
  *,
  dtype: str = 'auto',
  weight_dtype: str = 'auto',
  file_bytes: int | None = None,
) -> dict[str, Any]:
  """Writes a checkpoint in another layout or dtype and reads it back.

  Tokenizer files come along. An interrupted conversion goes on with what is
  whole if the source has not changed. The directory is complete only if all
  that was read back is right.

  Args:
    source: the checkpoint to convert.
    directory: new, empty, or an interrupted conversion of the same.
    layout: 'orbax' or 'hf' (published).
    dtype: as for `load_model`.
    weight_dtype: as for `load_model`.
    file_bytes: of one safetensors file or orbax part; None for 5 GB or 2 GiB.

  Returns:
    'verified' (bool), 'different' (names), 'parameters' and 'bytes' written,
    'reused' (shards or parts found whole), and the 'dtype' and
    'weight_dtype' of the result.

  Raises:
    FileExistsError: the directory holds something else.
    ValueError: an interrupted save of something else, a source that does not
      fit its config, or an unknown layout or dtype.
  """
  if layout not in ('orbax', 'hf'):
    raise ValueError(f"{layout=} must be 'orbax' or 'hf'")
  leaves = model_leaves(source.abstract(dtype, weight_dtype), source.config)
  source.check_model(leaves, weight_dtype)
  config = stored_config(source.config, leaves)
  origin = source.fingerprint()
  directory = epath.Path(directory).expanduser()
  if layout == 'orbax':
    writer = OrbaxWriter(
      directory,
      config,
      leaves,
      source.read,
      source=origin,
      part_bytes=file_bytes or PART_BYTES,
    )
  else:
    writer = published_writer(
      directory,
      config,
      leaves,
      source.read,
      source=origin,
      by_layer=source.by_layer,
      max_shard_bytes=file_bytes or MAX_SHARD_BYTES,
    )
  try:
    reused = writer.write()
    different = writer.verify()
  finally:
    source.close()
  if not different:
    files = tokenizer_files(source.directory, required=False)
    write_side_files(directory, config, files)
    writer.complete()
  weights = [leaf for leaf in leaves if not leaf.is_scale]
  return {
    'verified': not different,
    'different': different,
    'parameters': sum(math.prod(leaf.shape) for leaf in weights),
    'bytes': writer.nbytes,
    'reused': reused,
    'dtype': config.dtype,
    'weight_dtype': 'fp8' if config.weight_block_size else config.dtype,
  }
