"""Where text comes from: exact releases of packages, or a folder.

A recipe names each release with its version, archive, SHA-256 and licence, so
that anyone can rebuild the same corpus without its text being shipped. pip
fetches the archives and refuses one whose checksum differs; they are read in
place and never unpacked. For a source archive pip also runs the package's own
metadata step, as it would to install it; a wheel runs nothing.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

LICENCES = ('Apache-2.0', 'BSD-2-Clause', 'BSD-3-Clause', 'MIT', 'PSF-2.0')
EXTENSIONS = ('.h', '.md', '.pxd', '.py', '.pyx', '.rst', '.txt')
MAX_FILE_BYTES = 1_000_000
# Copies of other projects, under other terms and often held by us already.
_FOREIGN = re.compile(
  r'/(_?vendor(ed)?|extern(al|als)?|third_?party|subprojects|node_modules'
  r'|_distutils|locale|[^/]*\.(dist|egg)-info|\.[^/]*|__pycache__)/'
)
_SHA256 = re.compile(r'[0-9a-f]{64}')


@dataclasses.dataclass(frozen=True)
class Source:
  """One release, or a folder.

  Attributes:
    kind: 'sdist', 'wheel' or 'folder'.
    name: of the package; heads the paths of a source archive or folder.
    version: exact.
    file: name of the archive.
    sha256: of the archive.
    licence: SPDX identifier; several are joined by ' AND '.
    exclude: glob patterns of paths to leave out.
    path: of the folder.
  """

  kind: str
  name: str
  version: str = ''
  file: str = ''
  sha256: str = ''
  licence: str = ''
  exclude: tuple[str, ...] = ()
  path: str = ''

  def __post_init__(self):
    if self.kind not in ('sdist', 'wheel', 'folder'):
      raise ValueError(
        f'{self.name}: kind {self.kind!r} is not sdist, wheel or folder'
      )
    if self.kind == 'folder':
      return
    if not self.version or not self.file or '/' in self.file:
      raise ValueError(f'{self.name}: version and file (a name) are needed')
    if not _SHA256.fullmatch(self.sha256):
      raise ValueError(f'{self.name}: sha256 must be 64 hexadecimal digits')
    for licence in self.licence.split(' AND '):
      if licence not in LICENCES:
        raise ValueError(
          f'{self.name}: licence {licence!r} is none of {", ".join(LICENCES)}'
        )


@dataclasses.dataclass(frozen=True)
class Recall:
  """Training documents of `glm_jax.data.pairs.recall_documents`.

  Attributes:
    documents: how many.
    tokens: of each.
    pairs: names with values in each, stated twice.
    seed: of all choices.
  """

  documents: int
  tokens: int = 8192
  pairs: int = 24
  seed: int = 0

  def __post_init__(self):
    for name in ('documents', 'tokens', 'pairs'):
      if getattr(self, name) < 1:
        raise ValueError(f'recall: {name} must be at least 1')


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What a corpus is made of, and how.

  Attributes:
    sources: in the order of the documents.
    vocab_size: of the tokenizer, special tokens included.
    held_out_share: of the bytes, kept out of training.
    document_bytes: a document of several files stays below this.
    tokenizer_bytes: of training text that the tokenizer is made from.
    recall: documents that restate what stood far before, added to training;
      None for none.
    python, platforms: the wheels to take, whatever machine this is.
    expected: SHA-256 of the outputs by file name; empty when unknown.
  """

  sources: tuple[Source, ...]
  vocab_size: int = 6144
  held_out_share: float = 0.02
  document_bytes: int = 262_144
  tokenizer_bytes: int = 50_000_000
  recall: Recall | None = None
  python: str = '3.13'
  platforms: tuple[str, ...] = ('manylinux_2_28_x86_64', 'manylinux2014_x86_64')
  expected: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if not self.sources:
      raise ValueError('a recipe needs at least one source')
    names = [source.name for source in self.sources]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
      raise ValueError(f'{", ".join(sorted(twice))} stands in the recipe twice')
    if not 0 < self.held_out_share < 1:
      raise ValueError(f'{self.held_out_share=} must be in (0, 1)')


def load_recipe(path: epath.PathLike) -> Recipe:
  """Reads a recipe, such as configs/corpus.json.

  Raises:
    ValueError: it is no recipe, or names a licence that is not permissive.
  """
  try:
    content = json.loads(epath.Path(path).read_text())
    sources = tuple(
      _make(Source, {**source, 'exclude': tuple(source.get('exclude', ()))})
      for source in content.pop('sources')
    )
    content = {k: v for k, v in content.items() if k != 'about'}
    if 'recall' in content:
      content['recall'] = _make(Recall, content['recall'])
    if 'platforms' in content:
      content['platforms'] = tuple(content['platforms'])
    return _make(Recipe, {**content, 'sources': sources})
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    reason = f'no {error}' if isinstance(error, KeyError) else error
    raise ValueError(f'{path} is no recipe: {reason}') from error


def folder_recipe(folder: epath.PathLike, **settings: Any) -> Recipe:
  """A recipe whose only source is a folder of text, licence not asked."""
  path = epath.Path(folder).expanduser()
  if not path.is_dir():
    raise ValueError(f'{folder} is not a directory')
  name = path.resolve().name or 'folder'
  source = Source('folder', name, path=os.fspath(path))
  return Recipe((source,), **settings)


def fetch(recipe: Recipe, source: Source, downloads: epath.Path) -> bool:
  """Makes sure that the archive of `source` is in `downloads`, unaltered.

  Returns:
    Whether it had to be fetched.

  Raises:
    ValueError: pip could not get it, or got something else.
  """
  path = downloads / source.file
  if source.kind == 'folder' or _is(path, source.sha256):
    return False
  downloads.mkdir(parents=True, exist_ok=True)
  command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps']
  command += ['--disable-pip-version-check', '--dest', os.fspath(downloads)]
  if source.kind == 'sdist':
    command += ['--no-binary', source.name]
  else:
    command += ['--only-binary', ':all:', '--python-version', recipe.python]
    for platform in recipe.platforms:
      command += ['--platform', platform]
  with tempfile.NamedTemporaryFile('w', suffix='.txt') as wanted:
    wanted.write(
      f'{source.name}=={source.version} --hash=sha256:{source.sha256}\n'
    )
    wanted.flush()
    done = subprocess.run(
      [*command, '--requirement', wanted.name], capture_output=True, text=True
    )
  if not _is(path, source.sha256):
    lines = [s for s in done.stderr.splitlines() if s and 'WARN' not in s]
    reason = lines[-1].strip() if lines else f'no {source.file} came'
    raise ValueError(
      f'pip could not fetch {source.name} {source.version}: {reason}'
    )
  return True


def read_files(
  source: Source, downloads: epath.Path
) -> list[tuple[str, bytes]]:
  """(path, content) of the text files of a source, ascending by path.

  Folders of copied projects, other kinds of files, files beyond
  `MAX_FILE_BYTES` and what the recipe excludes are left out.
  """
  if source.kind == 'folder':
    found = _read_folder(source)
  elif source.kind == 'sdist':
    found = _read_tar(source, downloads / source.file)
  else:
    found = _read_zip(source, downloads / source.file)
  return sorted(found)


def state_of(source: Source) -> Any:
  """What tells whether the text of a source has changed since it was read."""
  if source.kind != 'folder':
    return [source.kind, source.name, source.sha256, source.exclude]
  return [
    (path, status.st_size, status.st_mtime_ns)
    for path, local in _walk(source)
    for status in [os.stat(local)]
  ]


def _wanted(source: Source, path: str, size: int) -> bool:
  # The user chose the name of a folder, whatever it is.
  inside = path if source.kind == 'wheel' else path.partition('/')[2]
  return (
    path.endswith(EXTENSIONS)
    and size <= MAX_FILE_BYTES
    and not _FOREIGN.search(f'/{inside}')
    and not any(fnmatch.fnmatch(path, p) for p in source.exclude)
  )


def _read_tar(source: Source, path: epath.Path) -> Iterator[tuple[str, bytes]]:
  with path.open('rb') as stream, tarfile.open(fileobj=stream) as archive:
    for member in archive:
      name = f'{source.name}/{member.name.partition("/")[2]}'
      if member.isfile() and _wanted(source, name, member.size):
        yield name, archive.extractfile(member).read()


def _read_zip(source: Source, path: epath.Path) -> Iterator[tuple[str, bytes]]:
  with path.open('rb') as stream, zipfile.ZipFile(stream) as archive:
    for member in archive.infolist():
      if _wanted(source, member.filename, member.file_size):
        yield member.filename, archive.read(member)


def _read_folder(source: Source) -> Iterator[tuple[str, bytes]]:
  for path, local in _walk(source):
    with open(local, 'rb') as stream:
      yield path, stream.read()


def _walk(source: Source) -> list[tuple[str, str]]:
  """(path in the corpus, path here) of a folder's wanted files, ascending."""
  found = []
  for parent, _, names in os.walk(source.path):
    for name in names:
      local = os.path.join(parent, name)
      inside = os.path.relpath(local, source.path).replace(os.sep, '/')
      path = f'{source.name}/{inside}'
      if os.path.isfile(local):
        if _wanted(source, path, os.path.getsize(local)):
          found.append((path, local))
  return sorted(found)


def sha256(path: epath.PathLike) -> str:
  """SHA-256 of a file, in hexadecimal."""
  digest = hashlib.sha256()
  with epath.Path(path).open('rb') as stream:
    while block := stream.read(1 << 20):
      digest.update(block)
  return digest.hexdigest()


def _is(path: epath.Path, expected: str) -> bool:
  return path.is_file() and sha256(path) == expected


def _make(kind: type, content: Mapping[str, Any]) -> Any:
  unknown = set(content) - {field.name for field in dataclasses.fields(kind)}
  if unknown:
    raise ValueError(f'unknown {", ".join(sorted(unknown))}')
  return kind(**content)
