"""One JSON object a line; lines of steps that are done again are removed."""

from __future__ import annotations

import json
import math
from typing import Any

from etils import epath


class Metrics:
  """The metrics file of a run."""

  def __init__(self, path: epath.PathLike, step: int):
    """Opens the file and removes what comes after `step`.

    Args:
      path: local.
      step: steps that the restored state has done.
    """
    path = epath.Path(path)
    kept = [line for line in read(path) if line['step'] <= step]
    partial = path.parent / f'{path.name}.tmp'
    partial.write_text(''.join(json.dumps(line) + '\n' for line in kept))
    partial.replace(path)
    self._stream = path.open('a')

  def write(self, **values: Any):
    """Adds a line; numbers that JSON lacks become null."""
    clean = {
      k: None if isinstance(v, float) and not math.isfinite(v) else v
      for k, v in values.items()
    }
    self._stream.write(json.dumps(clean) + '\n')
    self._stream.flush()

  def close(self):
    """Closes the file."""
    self._stream.close()


def read(path: epath.PathLike) -> list[dict[str, Any]]:
  """Lines of a metrics file; a line cut short by a kill is left out."""
  path = epath.Path(path)
  if not path.exists():
    return []
  lines = []
  for text in path.read_text().splitlines():
    try:
      lines.append(json.loads(text))
    except ValueError:
      continue
  return lines
