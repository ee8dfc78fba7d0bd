"""Checkpoints in the published layout: config.json and safetensors.

Opening one reads the config and the names of tensors. Parameters are read one
at a time and only as far as they are needed: a host of a pod reads what its
own devices hold, and `load_block` reads one layer. A change of format (fp8 to
bf16 or back) reads each matrix whole, and once a device where a plan shards
it: convert a large checkpoint first (launch/convert.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from flax import nnx
from tqdm import tqdm

from glm_jax.block import Block
from glm_jax.checkpoints.contents import (
  Place,
  check,
  locate,
  resolve,
  same_bits,
)
from glm_jax.checkpoints.names import (
  SCALE_SUFFIX,
  Leaf,
  layer_leaves,
  model_leaves,
)
from glm_jax.checkpoints.source import Slices, StoredMatrix, WeightSource
from glm_jax.checkpoints.tensor_files import TensorFiles
from glm_jax.config import ModelConfig
from glm_jax.layer_plan import layer_plan
from glm_jax.layers import Linear, RMSNorm
from glm_jax.model import Mtp, head, weight_init
from glm_jax.moe import Experts
from glm_jax.published_config import config_from_published
from pallas_kernels.block_scale import FP8


class Top(NamedTuple):
  """What lies below the first layer and above the last.

  Attributes:
    embed: [V, D].
    norm: the final norm.
    head: [V, D]; None if tied to the embedding.
  """

  embed: nnx.Param
  norm: RMSNorm
  head: Linear | None

  def logits(self, hidden: jax.Array, plan=None) -> jax.Array:
    """Logits [T, V] float32 of the last layer's output [T, D]."""
    return head(self, self.norm(hidden), plan)


def read_config(directory: epath.PathLike) -> ModelConfig:
  """The configuration of a directory with `config.json`.

  End-of-sequence ids are those of `config.json`, then any more that
  `generation_config.json` has.

  Raises:
    FileNotFoundError: no `config.json`.
    ValueError: not JSON, or values that are not supported.
  """
  return config_from_published(read_raw_config(epath.Path(directory)))


def read_raw_config(directory: epath.Path) -> dict[str, Any]:
  """`config.json` as a dict, with the ids of `generation_config.json`."""
  path = directory / 'config.json'
  if not path.exists():
    raise FileNotFoundError(
      f'{directory} has no config.json: pass the directory of a checkpoint'
    )
  raw = read_json(path)
  path = directory / 'generation_config.json'
  more = read_json(path).get('eos_token_id') if path.exists() else None
  if more is not None:
    lists = [
      x if isinstance(x, list) else [x]
      for x in (raw.get('eos_token_id'), more)
      if x is not None
    ]
    raw['eos_token_id'] = list(dict.fromkeys(sum(lists, [])))
  return raw


def read_json(path: epath.Path) -> dict[str, Any]:
  """A JSON object; raises ValueError that names the file."""
  try:
    value = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f'{path} is not JSON: {error}') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path} is not a JSON object')
  return value


class PublishedCheckpoint(WeightSource):
  """One published checkpoint.

  Attributes:
    config: its configuration, adjusted to the tensors that are there: no
      drafter without layer N, a drafter's own head where there is one.
    files: its tensors.
  """

  by_layer = True

  def __init__(self, directory: epath.PathLike):
    """Opens a directory, local or in a bucket.

    Prints one line on stderr for each kind of tensor that it leaves out.

    Args:
      directory: holds config.json and *.safetensors.

    Raises:
      FileNotFoundError: no such directory, or files are missing.
      ValueError: an unfinished save, a damaged file, an unsupported config,
        or indexers that the config says nothing about.
    """
    super().__init__()
    self.directory = epath.Path(directory).expanduser()
    self.files = TensorFiles(self.directory)
    raw = read_raw_config(self.directory)
    config = config_from_published(raw)
    where = str(self.directory)
    self._contents = resolve(config, raw, set(self.files), where)
    self.config = self._contents.config
    self._copies_equal = False
    for line in self._contents.notices:
      tqdm.write(line, file=sys.stderr)

  def load_block(
    self, layer: int, dtype='auto', weight_dtype='auto', plan: Any = None
  ) -> tuple[Block, Experts | None]:
    """Loads one layer, reading the bytes of this layer alone.

    Args:
      layer: trunk layer, or `num_layers` for the drafter's.
      dtype: as for `load_model`.
      weight_dtype: as for `load_model`.
      plan: as for `load_model`.

    Returns:
      The block and a pool of its experts, slot 0; None for a dense layer.

    Raises:
      ValueError: no such layer, or as for `load_model`.
    """
    layers, config = layer_plan(self.config), self.config
    if not 0 <= layer < layers.num_latent_slots:
      raise ValueError(
        f'{layer=} must be 0 to {layers.num_latent_slots - 1} in '
        f'{self.directory}'
      )
    init = weight_init(config, dtype, weight_dtype)
    full, moe = layers.is_full(layer), layers.is_moe(layer)

    def make(key):
      block = Block(key, config, init, full=full, moe=moe)
      return block, Experts(key, 1, config, init) if moe else None

    tree = jax.eval_shape(make, jax.random.key(0))
    leaves = layer_leaves(*tree, layer)
    # The drafter's layer has tensors outside its block.
    own = None if layer == layers.num_layers else layer
    self._check(leaves, weight_dtype, layer=own)
    return self.fill(tree, leaves, plan, f'layer {layer}')

  def load_top(
    self, dtype='auto', weight_dtype='auto', plan: Any = None
  ) -> Top:
    """Loads embedding, final norm and head; arguments as for `load_model`."""
    model = self.abstract(dtype, weight_dtype)
    top = Top(model.embed, model.norm, model.head)
    return self._load_part(top, weight_dtype, plan)

  def load_mtp(
    self, dtype='auto', weight_dtype='auto', plan: Any = None
  ) -> Mtp | None:
    """Loads the drafter, None without one; arguments as for `load_model`."""
    part = {'mtp': self.abstract(dtype, weight_dtype).mtp}
    return self._load_part(part, weight_dtype, plan)['mtp']

  def check_model(self, leaves: Sequence[Leaf], weight_dtype: str = 'auto'):
    """Raises ValueError unless the files hold just the model `leaves` make.

    The one error lists all tensors that are missing, surplus, mis-shaped or
    mis-typed. Copies of the embedding are compared once.
    """
    self._check(leaves, weight_dtype, whole=True)
    self._check_copies()

  def fingerprint(self) -> dict[str, Any]:
    """JSON that changes when the checkpoint does (names, sizes, times)."""
    files = sorted({self.files.info(name).file for name in self.files})
    stats = [(f.name, f.stat().length, f.stat().mtime) for f in files]
    config = read_raw_config(self.directory)
    return {'path': str(self.directory), 'files': stats, 'config': config}

  def is_fp8(self, name: str) -> bool:
    """Whether a weight is stored in fp8."""
    return self.files.info(self._locate(name).name).dtype == FP8

  def tensor(self, name: str, index: Slices) -> np.ndarray:
    """Part of a stored tensor, perhaps an expert's share of a fused one."""
    weight = name.removesuffix(SCALE_SUFFIX)
    tensor, expert, first = self._locate(weight)
    if weight != name:
      tensor += SCALE_SUFFIX
      first //= self.block[0]
    if first:
      rows = slice(index[0].start + first, index[0].stop + first)
      index = (rows, *index[1:])
    return self.files.read(tensor, (*expert, *index))

  def matrix(self, name: str) -> StoredMatrix:
    """A whole weight with its scales; of a fused one, gate and up together."""
    tensor, expert, first = self._locate(name)
    values = self.files.read(tensor, expert)
    scales, rows = None, slice(None)
    if values.dtype == FP8:
      scales = self.files.read(tensor + SCALE_SUFFIX, expert)
    if tensor.endswith('gate_up_proj'):
      rows = slice(first, first + self.config.moe.intermediate_size)
    return StoredMatrix(values, scales, rows)

  def close(self):
    """Closes the files; they are opened again when needed."""
    super().close()
    self.files.close()

  def _locate(self, name: str) -> Place:
    return locate(name, self.files, self.config)

  def _load_part(self, tree, weight_dtype: str, plan: Any):
    leaves = model_leaves(tree, self.config)
    self._check(leaves, weight_dtype)
    self._check_copies()
    return self.fill(tree, leaves, plan, 'loading')

  def _check(self, leaves: Sequence[Leaf], weight_dtype: str, **scope):
    # 'auto' promises the files' own numbers; a name asks for rounding.
    rounds = weight_dtype != 'auto'
    check(self.files, self._contents, leaves, quantize=rounds, **scope)

  def _check_copies(self):
    """Compares copies with their originals, the first time it is called."""
    if self._copies_equal:
      return
    with self.files:
      for copy, original in self._contents.copies:
        if not same_bits(self.files, copy, original):
          raise ValueError(
            f'{self.directory}: {copy} differs from {original}, but the model '
            'has one matrix for both: correct the checkpoint, or '
            'tie_word_embeddings in config.json'
          )
    self._copies_equal = True
