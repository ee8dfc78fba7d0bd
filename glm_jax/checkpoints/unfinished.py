"""A save in progress says so in its directory until it is complete.

The marker is the first thing written and the last removed. It tells two
stories apart: a save that may be continued (same contents) and a directory
that belongs to something else. Readers refuse a marked directory by name.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from etils import epath

MARKER = 'unfinished_save.json'


def refuse_unfinished(directory: epath.Path):
  """Raises ValueError if a save into `directory` was interrupted."""
  if (directory / MARKER).exists():
    raise ValueError(
      f'{directory} is an unfinished save ({MARKER} is there): run the '
      'command that wrote it again to finish it, or delete the directory'
    )


def begin_save(directory: epath.Path, contents: Any) -> bool:
  """Marks a directory as being written.

  Args:
    directory: new, empty, or left by an interrupted save of `contents`.
    contents: anything JSON can hold that says what is being saved.

  Returns:
    Whether an interrupted save is being continued.

  Raises:
    FileExistsError: the directory holds something else.
    ValueError: an interrupted save of something else.
  """
  text = json.dumps(contents, sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()
  marker = directory / MARKER
  if marker.exists():
    if marker.read_text() != digest:
      raise ValueError(
        f'{directory} is an unfinished save of something else: delete it or '
        'choose another directory'
      )
    return True
  if directory.exists():
    # A marker that was itself interrupted is not somebody's work.
    there = [p.name for p in directory.iterdir()]
    if not all(name.startswith(MARKER) for name in there):
      raise FileExistsError(
        f'{directory} is not empty and is not an unfinished save: choose '
        'another directory or delete it'
      )
  directory.mkdir(parents=True, exist_ok=True)
  write_text(marker, digest)
  return False


def finish_save(directory: epath.Path):
  """Removes the marker: from now on the directory is complete."""
  (directory / MARKER).unlink()


def write_text(path: epath.Path, text: str):
  """Writes a small file whole or not at all."""
  partial = path.parent / f'{path.name}.partial'
  partial.write_text(text)
  partial.replace(path)
