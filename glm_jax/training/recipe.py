"""Recipes: Python files that define `get_train_config()`."""

from __future__ import annotations

import os
import types

from etils import epath

from glm_jax.training.config import TrainConfig


def load_recipe(path: epath.PathLike) -> TrainConfig:
  """Runs a recipe file.

  Args:
    path: local or remote.

  Raises:
    ValueError: there is no such file, or it defines no `get_train_config`.
  """
  file = epath.Path(path).expanduser()
  if not file.exists():
    raise ValueError(f'recipe {os.fspath(path)} does not exist')
  module = types.ModuleType(file.stem)
  module.__file__ = os.fspath(file)
  exec(compile(file.read_text(), module.__file__, 'exec'), vars(module))
  get = getattr(module, 'get_train_config', None)
  if not callable(get):
    raise ValueError(f'{os.fspath(path)} must define get_train_config()')
  return get()
