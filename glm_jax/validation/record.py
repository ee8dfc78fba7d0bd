"""A recorded run: one directory that another machine can compare against.

    meta.json            what was run and how; written last
    layer_000.safetensors  a layer's tensors (`walk.LayerTensors`), float32
    logits.safetensors   present when the last layer was run
    drafts.safetensors   present when the drafter was run

A layer's `input` is left out where it is the layer below's `hidden`, and a
shared layer's `selected` where the nearest recorded layer below has it. A
local record appears whole or not at all (it is written beside and renamed);
on object stores, a record without `meta.json` is no record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence

import numpy as np
from etils import epath
from safetensors.numpy import load, save

from glm_jax.config import ModelConfig
from glm_jax.published_config import config_to_published
from glm_jax.validation.walk import LayerTensors, Side

DRAFTS_FILE = 'drafts.safetensors'
_FORMAT = 'glm-jax validation record 1'
# Keys that do not change what a layer computes.
_IGNORED = (
  'dtype',
  'eos_token_id',
  'pad_token_id',
  'initializer_range',
  'max_position_embeddings',
  'num_nextn_predict_layers',
  'index_share_for_mtp_iteration',
)


@dataclasses.dataclass(frozen=True)
class Meta:
  """What `meta.json` holds.

  Attributes:
    config: the published config, without keys that change no number.
    tokens: the ids that were run.
    dtype: 'float32' or 'bfloat16'.
    framework: 'torch' or 'jax'.
    layers: recorded trunk layers, ascending.
    logits: whether logits are recorded.
    versions: of the packages that computed.
    notes: how arithmetic was aligned (norm eps, matmul precision).
    config_hash: of `config`.
    format: of the record.
  """

  config: dict
  tokens: tuple[int, ...]
  dtype: str
  framework: str
  layers: tuple[int, ...]
  logits: bool
  versions: dict[str, str]
  notes: tuple[str, ...]
  config_hash: str
  format: str = _FORMAT


def make_meta(
  side: Side,
  tokens: Sequence[int],
  dtype: str,
  layers: tuple[int, ...],
  logits: bool,
) -> Meta:
  """The description of a run."""
  config = _shape_keys(side.config)
  return Meta(
    config=config,
    tokens=tuple(int(t) for t in tokens),
    dtype=dtype,
    framework=side.framework,
    layers=layers,
    logits=logits,
    versions=side.versions,
    notes=tuple(side.notes),
    config_hash=_hash(config),
  )


class Writer:
  """Writes a record layer by layer; a context manager.

  Leaving it with an exception, or without `finish`, leaves nothing.
  """

  def __init__(self, path: epath.PathLike):
    """Checks that `path` is free or holds a record; raises `ValueError`."""
    self.path = epath.Path(path).expanduser()
    held = self.path.exists() and (
      not self.path.is_dir() or any(self.path.iterdir())
    )
    if held and not (self.path / 'meta.json').exists():
      raise ValueError(
        f'{self.path} exists and is no record: name a new directory'
      )
    self._local = '://' not in os.fspath(self.path)
    self._below: np.ndarray | None = None
    self._selected: np.ndarray | None = None

  def __enter__(self) -> Writer:
    if self._local:
      name = f'.{self.path.name}.{os.getpid()}'
      self._at = self.path.parent / f'{name}.tmp'
      self._old = self.path.parent / f'{name}.old'
    else:
      self._at = self.path
      (self.path / 'meta.json').unlink(missing_ok=True)
    self._at.mkdir(parents=True, exist_ok=True)
    return self

  def add(self, tensors: LayerTensors):
    """Writes one layer; layers come in ascending order."""
    fields = dataclasses.fields(tensors)
    arrays = {f.name: getattr(tensors, f.name) for f in fields}
    del arrays['layer']
    if _equal(tensors.input, self._below):
      del arrays['input']
    if _equal(tensors.selected, self._selected):
      del arrays['selected']
    self._below, self._selected = tensors.hidden, tensors.selected
    self._write(layer_file(tensors.layer), arrays)

  def add_logits(self, logits: np.ndarray):
    """Writes [T, V] logits."""
    self._write('logits.safetensors', {'logits': logits})

  def add_drafts(self, logits: np.ndarray):
    """Writes [2, K, V] draft logits, with sharing and without."""
    self._write(DRAFTS_FILE, {'logits': logits})

  def finish(self, meta: Meta):
    """Describes the record and puts it in its place."""
    text = json.dumps(dataclasses.asdict(meta), indent=2) + '\n'
    (self._at / 'meta.json').write_text(text)
    if not self._local:
      return
    if self.path.exists():
      self.path.rename(self._old)
    self._at.rename(self.path)
    if self._old.exists():
      self._old.rmtree()

  def __exit__(self, *exception):
    if self._local and self._at.exists():
      self._at.rmtree()

  def _write(self, name, arrays):
    arrays = {
      k: np.ascontiguousarray(v) for k, v in arrays.items() if v is not None
    }
    (self._at / name).write_bytes(save(arrays))


class Record:
  """A finished record."""

  def __init__(self, path: epath.PathLike):
    """Opens a record.

    Raises:
      ValueError: there is none, or it was written in another format.
    """
    self.path = epath.Path(path).expanduser()
    file = self.path / 'meta.json'
    if not file.exists():
      raise ValueError(
        f'{self.path} holds no record (meta.json is missing): write one with '
        '--record'
      )
    try:
      fields = json.loads(file.read_text())
      if fields.get('format') != _FORMAT:
        raise ValueError(f'format {fields.get("format")!r}')
      for name in ('tokens', 'layers', 'notes'):
        fields[name] = tuple(fields[name])
      self.meta = Meta(**fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
      raise ValueError(
        f'{file} is not a record of format {_FORMAT!r}: {error}'
      ) from error

  def check(
    self,
    config: ModelConfig,
    tokens: Sequence[int] | None,
    dtype: str,
    layers: Sequence[int] | None,
  ):
    """Raises `ValueError` unless the record is of this run.

    Args:
      config: of the checkpoint at hand.
      tokens: ids asked for; None takes the record's.
      dtype: asked for.
      layers: asked for; None takes the record's.
    """
    meta, ours = self.meta, _shape_keys(config)
    if meta.config_hash != _hash(ours):
      keys = sorted({*ours, *meta.config})
      key = next(
        (k for k in keys if ours.get(k) != meta.config.get(k)), 'config_hash'
      )
      raise ValueError(
        f'record {self.path} belongs to another checkpoint: {key} is '
        f'{_short(meta.config.get(key))} there, {_short(ours.get(key))} here'
      )
    if tokens is not None and tuple(tokens) != meta.tokens:
      raise ValueError(
        f'record {self.path} was made from other tokens '
        f'({_difference(meta.tokens, tuple(tokens))}): leave --tokens out to '
        "use the record's"
      )
    if dtype != meta.dtype:
      raise ValueError(
        f'record {self.path} was made in {meta.dtype}, not {dtype}: use '
        f'--dtype={meta.dtype} or record again'
      )
    absent = sorted(set(layers or ()) - set(meta.layers))
    if absent:
      raise ValueError(
        f'record {self.path} lacks layers {absent}: it has '
        f'{_short(list(meta.layers))}'
      )

  def layers(self, layers: Sequence[int]) -> Iterator[LayerTensors]:
    """Reads recorded layers one by one."""
    last = None
    for layer in layers:
      arrays = _read(self.path / layer_file(layer))
      adjacent = last is not None and last.layer == layer - 1
      if 'input' not in arrays:
        arrays['input'] = (
          last.hidden
          if adjacent
          else _read(self.path / layer_file(layer - 1))['hidden']
        )
      if 'selected' not in arrays:
        arrays['selected'] = (
          last.selected if adjacent else self._selected_below(layer)
        )
      last = LayerTensors(layer=layer, **arrays)
      yield last

  def logits(self) -> np.ndarray | None:
    """[T, V], None where the last layer was not run."""
    if not self.meta.logits:
      return None
    return _read(self.path / 'logits.safetensors')['logits']

  def drafts(self) -> np.ndarray | None:
    """[2, K, V], None where the drafter was not run."""
    path = self.path / DRAFTS_FILE
    return _read(path)['logits'] if path.exists() else None

  def _selected_below(self, layer):
    for below in reversed([i for i in self.meta.layers if i < layer]):
      arrays = _read(self.path / layer_file(below))
      if 'selected' in arrays:
        return arrays['selected']
    raise ValueError(f'{self.path} is damaged: no selection for layer {layer}')


def layer_file(layer: int) -> str:
  """Name of a layer's file."""
  return f'layer_{layer:03d}.safetensors'


def _read(path: epath.Path) -> dict[str, np.ndarray]:
  if not path.exists():
    raise ValueError(f'record is damaged: {path} is missing')
  return load(path.read_bytes())


def _shape_keys(config: ModelConfig) -> dict:
  published = config_to_published(config)
  published['latent_norm_eps'] = config.mla.latent_norm_eps
  return {k: v for k, v in published.items() if k not in _IGNORED}


def _hash(config: dict) -> str:
  text = json.dumps(config, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _equal(a, b) -> bool:
  return b is not None and np.array_equal(a, b)


def _short(value) -> str:
  text = str(value)
  return text if len(text) <= 60 else text[:57] + '...'


def _difference(a: tuple[int, ...], b: tuple[int, ...]) -> str:
  if len(a) != len(b):
    return f'{len(a)} there, {len(b)} here'
  at = next(i for i in range(len(a)) if a[i] != b[i])
  return f'position {at} is {a[at]} there, {b[at]} here'
