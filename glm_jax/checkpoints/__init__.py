"""Loading and saving models: published checkpoints, orbax, presets.

    load_config('glm52')              a preset, a config file or a checkpoint
    load_model('/ckpt/GLM-5.2-FP8')   a published or orbax directory
    save_published(model, config, directory)
    save_orbax(model, config, directory)

Paths are local or in a bucket (gs://). A save that was interrupted is refused
by name; the same save started again finishes it.
"""

from __future__ import annotations

import os
import types
from typing import Any

from etils import epath

from glm_jax.checkpoints.conversion import convert
from glm_jax.checkpoints.export import save_published
from glm_jax.checkpoints.orbax_io import (
  MANIFEST,
  OrbaxCheckpoint,
  load_orbax,
  save_orbax,
)
from glm_jax.checkpoints.published import PublishedCheckpoint, read_config
from glm_jax.checkpoints.published import read_json as _read_json
from glm_jax.config import ModelConfig
from glm_jax.embedded import EMBEDDED
from glm_jax.model import Model
from glm_jax.presets import PRESETS
from glm_jax.published_config import config_from_published

__all__ = [
  'EMBEDDED',
  'OrbaxCheckpoint',
  'PublishedCheckpoint',
  'convert',
  'load_config',
  'load_model',
  'load_orbax',
  'open_checkpoint',
  'save_orbax',
  'save_published',
]


def load_config(path_or_preset: epath.PathLike) -> ModelConfig:
  """The configuration of a checkpoint, a config file or a preset.

  Args:
    path_or_preset: a directory with `config.json`; a `.json` file like it; a
      Python file with `get_config()`; 'glm_nano', the embedded model; or a
      preset: 'glm52', 'glm53', 'glm51', 'glm5', 'tiny'. What exists as a
      path is taken as one.

  Returns:
    The configuration.

  Raises:
    FileNotFoundError: neither a path nor a preset.
    ValueError: a file that holds no configuration, or unsupported values.
  """
  path = epath.Path(path_or_preset).expanduser()
  if path.is_dir():
    return read_config(path)
  if path.exists():
    if path.suffix == '.json':
      return config_from_published(_read_json(path))
    if path.suffix == '.py':
      return _run_config(path)
    raise ValueError(f'{path} is no configuration: pass a .json or .py file')
  name = os.fspath(path_or_preset)
  if name in PRESETS:
    return PRESETS[name]
  if name == EMBEDDED.name:
    return read_config(EMBEDDED)
  raise FileNotFoundError(
    f'{name!r} is neither a path nor a preset ({", ".join(PRESETS)}, '
    f'{EMBEDDED.name})'
    f'{_hub_hint(name)}'
  )


def load_model(
  path: epath.PathLike | None = None,
  *,
  dtype: Any = 'auto',
  weight_dtype: Any = 'auto',
  plan: Any = None,
) -> Model:
  """Loads a checkpoint.

  Args:
    path: a directory in the published format or of `save_orbax`; None (or
      'glm_nano') for the embedded glm-nano.
    dtype: 'auto' (the config's), 'bf16' or 'f32', of weights that are not
      fp8; the router's correction bias stays float32.
    weight_dtype: 'auto' (as stored), 'fp8' (block-scaled), or as `dtype`.
    plan: places each parameter if it has `sharding(axes, shape)`; then a host
      reads only what its devices hold. None: the default device.

  Returns:
    The model.

  Raises:
    FileNotFoundError: no such directory, or files are missing.
    ValueError: something without weights, an unfinished save, damaged files,
      or tensors that do not fit the config (one error lists them all).
  """
  checkpoint = open_checkpoint(path)
  return checkpoint.load_model(dtype, weight_dtype, plan)


def open_checkpoint(
  path: epath.PathLike | None,
) -> PublishedCheckpoint | OrbaxCheckpoint:
  """Opens a checkpoint of either layout; raises as `load_model`."""
  directory = EMBEDDED if path is None else epath.Path(path).expanduser()
  if os.fspath(directory) == EMBEDDED.name and not directory.exists():
    directory = EMBEDDED
  if directory.is_dir():
    if (directory / MANIFEST).exists():
      return OrbaxCheckpoint(directory)
    return PublishedCheckpoint(directory)
  name = os.fspath(directory)
  if name in PRESETS or directory.exists():
    raise ValueError(
      f'{name} has no weights: pass the directory of a checkpoint, or use '
      f'init_model(load_config({name!r}), key) for random ones'
    )
  raise FileNotFoundError(f'{name} is not a directory{_hub_hint(name)}')


def _run_config(path: epath.Path) -> ModelConfig:
  """Runs a Python file and calls its `get_config()`."""
  module = types.ModuleType(path.stem)
  module.__file__ = os.fspath(path)
  exec(compile(path.read_text(), module.__file__, 'exec'), vars(module))
  get = getattr(module, 'get_config', None)
  config = get() if callable(get) else None
  if not isinstance(config, ModelConfig):
    raise ValueError(
      f'{path} must define get_config() that returns a ModelConfig'
    )
  return config


def _hub_hint(name: str) -> str:
  """How to download what may be the id of a model on the hub."""
  owner, _, model = name.partition('/')
  if not owner or not model or '/' in model or name.startswith(('.', '~')):
    return ''
  return (
    f'; if it is a hub id, download it: hf download {name} --local-dir {model}'
  )
