"""Recipes: Python files that define `get_train_config()`."""

from __future__ import annotations

import os
import types

from etils import epath

from glm_jax.training.config import TrainConfig


def load_recipe(
  path: epath.PathLike, function: str = 'get_train_config'
) -> TrainConfig:
  """Runs a recipe file.

  Args:
    path: local or remote.
    function: of the file, without arguments, that gives the configuration.

  Raises:
    ValueError: there is no such file, or it has no such function.
  """
  file = epath.Path(path).expanduser()
  if not file.exists():
    raise ValueError(f'recipe {os.fspath(path)} does not exist')
  module = types.ModuleType(file.stem)
  module.__file__ = os.fspath(file)
  exec(compile(file.read_text(), module.__file__, 'exec'), vars(module))
  get = getattr(module, function, None)
  if not callable(get):
    raise ValueError(f'{os.fspath(path)} must define {function}()')
  return get()
