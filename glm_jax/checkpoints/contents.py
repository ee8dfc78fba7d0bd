"""What a published checkpoint holds, and whether that is what it should.

`resolve` looks at tensor names alone: it settles what the config leaves open
(a drafter that is absent, a head of its own), which tensors to leave out, and
which must be copies of others. `check` compares shapes and dtypes of the
tensors that a set of parameters needs, and reports everything at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from glm_jax.checkpoints.names import (
  EMBED_NAME,
  HEAD_NAME,
  INDEXER_PART,
  SCALE_SUFFIX,
  Leaf,
  fused_expert,
  layer_of,
  layer_prefix,
)
from glm_jax.checkpoints.tensor_files import TensorFiles
from glm_jax.config import SHARED, ModelConfig
from pallas_kernels.block_scale import FP8
from pallas_kernels.tiling import cdiv

_WIDE = ('BF16', 'F32')
_FP8 = 'F8_E4M3'
# Values that code computes and some checkpoints store all the same.
_BUFFERS = ('rotary_emb.inv_freq',)
_PATTERN_KEYS = ('indexer_types', 'index_topk_pattern', 'index_topk_freq')
_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Contents:
  """What is in a checkpoint.

  Attributes:
    config: the configuration, adjusted to what is there.
    ignored: tensors that are left out.
    copies: pairs (tensor, original) that must be equal, bit for bit; the
      first is among `ignored`.
    notices: lines for the user.
  """

  config: ModelConfig
  ignored: frozenset[str]
  copies: tuple[tuple[str, str], ...]
  notices: tuple[str, ...]


class Place(NamedTuple):
  """Where a matrix lies in its tensor.

  Attributes:
    name: the tensor.
    expert: leading index in a fused tensor, () otherwise.
    first_row: its first row in the (fused) matrix.
  """

  name: str
  expert: tuple[int, ...] = ()
  first_row: int = 0


def resolve(
  config: ModelConfig, raw: dict[str, Any], names: Collection[str], where: str
) -> Contents:
  """Settles what is read and what is left out.

  Args:
    config: from `config.json`.
    raw: the parsed `config.json`.
    names: all tensor names.
    where: the checkpoint, for messages.

  Returns:
    The contents.

  Raises:
    ValueError: indexers on layers that only our default pattern calls shared.
  """
  ignored = {n for n in names if n.endswith(_BUFFERS)}
  notices, copies = [], []
  unused = _shared_indexers(config, raw, names, where)
  if unused:
    layers = len({layer_of(n) for n in unused})
    notices.append(
      f'{where}: ignoring {len(unused)} indexer tensors of {layers} layers '
      'that share the indices of a layer below'
    )
    ignored |= unused
  n = config.num_layers
  drafter = {x for x in names if layer_of(x) == n} - ignored
  mtp = config.mtp
  if mtp.num_layers and not drafter:
    notices.append(f'{where}: no tensors of layer {n}, so no drafter')
    mtp = dataclasses.replace(mtp, num_layers=0)
  elif drafter and not mtp.num_layers:
    notices.append(
      f'{where}: ignoring {len(drafter)} tensors of layer {n}: '
      'num_nextn_predict_layers is 0'
    )
    ignored |= drafter
  elif drafter:
    own = f'{layer_prefix(n)}shared_head.head.weight' in drafter
    mtp = dataclasses.replace(mtp, own_head=own)
    embed = f'{layer_prefix(n)}embed_tokens.weight'
    if embed in drafter:
      copies.append((embed, EMBED_NAME))
      notices.append(f'{where}: ignoring {embed}, a copy of {EMBED_NAME}')
  if config.tie_word_embeddings and HEAD_NAME in names:
    copies.append((HEAD_NAME, EMBED_NAME))
  ignored |= {copy for copy, _ in copies}
  return Contents(
    dataclasses.replace(config, mtp=mtp),
    frozenset(ignored),
    tuple(copies),
    tuple(notices),
  )


def locate(
  name: str, names: Collection[str], config: ModelConfig
) -> Place | None:
  """Where a matrix is: under its own name or in a fused tensor."""
  if name in names:
    return Place(name)
  fused = fused_expert(name)
  if fused is None or fused[0] not in names:
    return None
  tensor, expert, part = fused
  first = config.moe.intermediate_size if part == 'up' else 0
  return Place(tensor, (expert,), first)


def check(
  files: TensorFiles,
  contents: Contents,
  leaves: Iterable[Leaf],
  *,
  layer: int | None = None,
  whole: bool = False,
  quantize: bool = False,
):
  """Compares the tensors that parameters need with those that are there.

  Args:
    files: the checkpoint.
    contents: of `resolve`.
    leaves: parameters to be read.
    layer: the layer they belong to, for its surplus tensors.
    whole: they are the whole model: any other tensor is surplus.
    quantize: wide tensors may be read into fp8 parameters.

  Raises:
    ValueError: all that is missing, surplus, mis-shaped or mis-typed.
  """
  config, used, missing, wrong = contents.config, set(), [], []
  for leaf in leaves:
    if leaf.is_scale:
      continue  # judged with the weights that they scale
    for name in leaf.names.flat:
      place = locate(name, files, config)
      if place is None:
        missing.append(name)
        continue
      used |= {place.name, place.name + SCALE_SUFFIX}
      wrong += _faults(files, config, leaf, place, quantize)
  known = used | contents.ignored
  surplus = [
    name
    for name in files
    if name not in known
    and (whole or (layer is not None and layer_of(name) == layer))
  ]
  surplus += [
    n
    for n in used
    if n.endswith(SCALE_SUFFIX)
    and n in files
    and files.info(n.removesuffix(SCALE_SUFFIX)).kind != _FP8
  ]
  _report(files, config, missing, surplus, wrong)


def _shared_indexers(config, raw, names, where) -> set[str]:
  """Indexer tensors of layers that own no indexer."""
  shared = {i for i, kind in enumerate(config.indexer_types) if kind == SHARED}
  unused = {n for n in names if INDEXER_PART in n and layer_of(n) in shared}
  if unused and all(raw.get(key) is None for key in _PATTERN_KEYS):
    layers = sorted({layer_of(n) for n in unused})
    raise ValueError(
      f'{where}: layers {_some(layers)} have indexers, but config.json has '
      f'none of {", ".join(_PATTERN_KEYS)} and the default of GLM-5.2 would '
      "ignore them: add indexer_types to config.json (all 'full' for GLM-5 "
      'and 5.1)'
    )
  return unused


def _faults(
  files: TensorFiles,
  config: ModelConfig,
  leaf: Leaf,
  place: Place,
  quantize: bool,
) -> list[str]:
  """What is wrong with one tensor and its scales."""
  name, info = place.name, files.info(place.name)
  shape = leaf.tensor_shape
  if place.expert:
    rows = shape[0] * (2 if name.endswith('gate_up_proj') else 1)
    shape = (config.moe.num_experts, rows, *shape[1:])
  if info.shape != shape:
    return [f'{name} has shape {list(info.shape)}, not {list(shape)}']
  if info.kind in _WIDE:
    if leaf.dtype == FP8 and not quantize:
      return [f'{name} is {info.kind}, not {_FP8}']
    return []
  if info.kind != _FP8:
    known = ', '.join((*_WIDE, _FP8))
    return [f'{name} is {info.kind}, which is none of {known}']
  block = config.weight_block_size
  if block is None:
    return [f'{name} is {_FP8} but config.json has no quantization_config']
  scales = name + SCALE_SUFFIX
  if scales not in files:
    return [f'{name} is {_FP8} without {scales}']
  found = files.info(scales)
  rows, columns = (cdiv(n, b) for n, b in zip(shape[-2:], block))
  wanted = (*shape[:-2], rows, columns)
  if found.shape != wanted or found.kind != 'F32':
    return [
      f'{scales} is {found.kind} {list(found.shape)}, not F32 {list(wanted)}'
    ]
  if leaf.dtype == FP8 and place.first_row % block[0]:
    return [
      f'{name} has {_FP8} blocks that straddle gate and up: read it with '
      "weight_dtype='bf16'"
    ]
  return []


def _report(files, config, missing, surplus, wrong):
  """Raises one error that lists everything, if there is anything."""
  faults = [f'missing {n}' for n in sorted(missing)]
  faults += [f'surplus {n}' for n in sorted(surplus)]
  # A fused tensor is looked at once an expert.
  faults += sorted(set(wrong))
  if not faults:
    return
  n, hint = config.num_layers, ''
  if missing and all(layer_of(x) == n for x in missing):
    hint = (
      f'; layer {n}, the drafter, is there in part: set '
      'num_nextn_predict_layers to 0 to do without it'
    )
  if any(fault.endswith(f'not {_FP8}') for fault in wrong):
    hint += "; weight_dtype='fp8' rounds such tensors"
  raise ValueError(
    f'{files.directory} does not match its config.json: {_some(faults)}'
    f'{hint}; download the rest or correct config.json'
  )


def _some(items: list) -> str:
  """The first few items and the number of the others."""
  text = ', '.join(map(str, items[:_SHOWN]))
  rest = len(items) - _SHOWN
  return text if rest <= 0 else f'{text} and {rest} more'


def same_bits(files: TensorFiles, copy: str, original: str) -> bool:
  """Whether two tensors are equal; reads a few rows at a time."""
  a, b = files.info(copy), files.info(original)
  if (a.kind, a.shape) != (b.kind, b.shape):
    return False
  step = max(1, (64 << 20) * a.shape[0] // max(a.nbytes, 1))
  for start in range(0, a.shape[0], step):
    rows = (slice(start, min(start + step, a.shape[0])),)
    left, right = files.read(copy, rows), files.read(original, rows)
    if not np.array_equal(left.view(np.uint8), right.view(np.uint8)):
      return False
  return True
