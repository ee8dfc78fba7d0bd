"""From a recipe to token files, stage by stage.

  downloads/   the archives that the recipe names
  text/        train.jsonl and held_out.jsonl, one document a line
  tokenizer/   in the published format
  train.*, held_out.*    token files
  stages.json  what each stage was made from, and checksums of what it made

A stage is skipped while its inputs, its code and its outputs are unchanged, so
a second run costs a few checksums and an interrupted one goes on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tokenizers
from etils import epath

from glm_jax.data import (
  corpus,
  pairs,
  sources,
  token_file,
  tokenizer_training,
)
from glm_jax.text import Tokenizer

_BATCH_DOCUMENTS = 64
_TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'chat_template.jinja',
)


def prepare(
  recipe: sources.Recipe,
  out: epath.PathLike,
  *,
  vocab_size: int | None = None,
  tokenizer: epath.PathLike | None = None,
  log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
  """Makes the token files of a recipe in the directory `out`.

  Args:
    recipe: from `load_recipe` or `folder_recipe`.
    out: local; made if it does not exist.
    vocab_size: instead of the recipe's.
    tokenizer: directory with a tokenizer.json to use instead of making one.
    log: receives a line now and then.

  Returns:
    `splits`: bytes, documents, tokens and bytes_per_token of each;
    `vocab_size`; `dropped`: files by reason; `sha256` by file name;
    `matches_recipe`: whether those are the recipe's, None where it cannot be
    told: no checksums in the recipe, or another vocabulary.

  Raises:
    ValueError: an archive that cannot be had, or too little text.
  """
  out = epath.Path(out).expanduser()
  out.mkdir(parents=True, exist_ok=True)
  stages = _Stages(out, log)
  size = recipe.vocab_size if vocab_size is None else vocab_size
  text = stages.run(
    'text',
    _text_inputs(recipe),
    lambda: _make_text(recipe, out, log),
  )
  files = dict(text['sha256'])
  if tokenizer is None:
    own = size == recipe.vocab_size
    made = stages.run(
      'tokenizer',
      [
        size,
        recipe.tokenizer_bytes,
        text['sha256'],
        tokenizers.__version__,
        sources.sha256(tokenizer_training.TEMPLATE),
      ],
      lambda: _make_tokenizer(recipe, size, out),
    )
    files |= made['sha256']
    tokenizer_json = out / 'tokenizer' / 'tokenizer.json'
  else:
    own = False
    given = epath.Path(tokenizer).expanduser()
    if not (given / 'tokenizer.json').exists():
      raise ValueError(f'there is no {given / "tokenizer.json"}')
    (out / 'tokenizer').mkdir(exist_ok=True)
    for name in _TOKENIZER_FILES:
      if (given / name).exists() and given != out / 'tokenizer':
        (given / name).copy(out / 'tokenizer' / name, overwrite=True)
    tokenizer_json = out / 'tokenizer' / 'tokenizer.json'
  tokens = stages.run(
    'tokens',
    [sources.sha256(tokenizer_json), text['sha256'], repr(recipe.recall)],
    lambda: _make_tokens(recipe.recall, tokenizer_json, out, log),
  )
  files |= tokens['sha256']
  splits = {s: text['splits'][s] | tokens['splits'][s] for s in corpus.SPLITS}
  for split in splits.values():
    split['bytes_per_token'] = round(split['bytes'] / split['tokens'], 4)
  matches = None
  if own and recipe.expected:
    matches = all(files.get(k) == v for k, v in recipe.expected.items())
  return {
    'splits': splits,
    'vocab_size': tokens['vocab_size'],
    'dropped': text['dropped'],
    'sha256': files,
    'matches_recipe': matches,
  }


class _Stages:
  """Runs a stage unless stages.json shows that nothing has changed."""

  def __init__(self, out: epath.Path, log: Callable[[str], None]):
    self._out, self._log = out, log
    self._path = out / 'stages.json'
    try:
      self._done = json.loads(self._path.read_text())
    except (FileNotFoundError, ValueError):
      self._done = {}

  def run(
    self, name: str, inputs: Any, work: Callable[[], dict[str, Any]]
  ) -> dict[str, Any]:
    """The result of `work`, a dict whose 'sha256' lists the files it made."""
    content = json.dumps([inputs, _CODE], sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()
    old = self._done.get(name, {})
    if old.get('inputs') == key and self._intact(old['result']['sha256']):
      self._log(f'{name}: up to date')
      return old['result']
    start = time.monotonic()
    result = json.loads(json.dumps(work()))
    self._done[name] = {'inputs': key, 'result': result}
    partial = self._out / 'stages.json.tmp'
    partial.write_text(json.dumps(self._done, indent=2) + '\n')
    partial.replace(self._path)
    self._log(f'{name}: made in {time.monotonic() - start:.0f} s')
    return result

  def _intact(self, files: Mapping[str, str]) -> bool:
    return all(
      (self._out / name).exists() and sources.sha256(self._out / name) == digest
      for name, digest in files.items()
    )


def _text_inputs(recipe: sources.Recipe) -> list:
  states = [sources.state_of(source) for source in recipe.sources]
  return [states, recipe.held_out_share, recipe.document_bytes]


def _make_text(
  recipe: sources.Recipe, out: epath.Path, log: Callable[[str], None]
) -> dict[str, Any]:
  collector = corpus.Collector(recipe)
  for number, source in enumerate(recipe.sources, start=1):
    sources.fetch(recipe, source, out / 'downloads')
    found = sources.read_files(source, out / 'downloads')
    size = collector.add(source.name, found)
    log(
      f'{number}/{len(recipe.sources)} {source.name} {source.version}: '
      f'{size / 1e6:.1f} MB of text'
    )
  (out / 'text').mkdir(exist_ok=True)
  splits, names = {}, []
  for split, documents in collector.documents().items():
    names.append(f'text/{split}.jsonl')
    corpus.write_documents(out / names[-1], documents)
    texts = [text for d in documents for _, text in d.files]
    splits[split] = {
      'bytes': sum(len(text.encode()) for text in texts),
      'files': len(texts),
      'documents': len(documents),
    }
  return {
    'splits': splits,
    'dropped': dict(collector.dropped),
    'sha256': _checksums(out, names),
  }


def _make_tokenizer(
  recipe: sources.Recipe, vocab_size: int, out: epath.Path
) -> dict[str, Any]:
  path = out / 'text' / 'train.jsonl'
  texts = _sample(path, recipe.tokenizer_bytes)
  backend = tokenizer_training.train_tokenizer(texts, vocab_size)
  tokenizer_training.write_tokenizer(backend, out / 'tokenizer')
  names = [f'tokenizer/{name}' for name in _TOKENIZER_FILES]
  return {'sha256': _checksums(out, names)}


def _sample(path: epath.Path, num_bytes: int) -> Iterator[str]:
  """Texts of about `num_bytes`, from documents spread over the whole file."""
  size = path.stat().length
  for document in corpus.read_documents(path):
    for name, text in document.files:
      chance = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 16**8
      if chance * size < num_bytes:
        yield f'{name}\n{text}'


def _make_tokens(
  recall: sources.Recall | None,
  tokenizer_json: epath.Path,
  out: epath.Path,
  log: Callable[[str], None],
) -> dict[str, Any]:
  encoder = tokenizer_training.TextEncoder(tokenizer_json)
  digest = sources.sha256(tokenizer_json)
  splits, names = {}, []
  for split in corpus.SPLITS:
    documents = corpus.read_documents(out / 'text' / f'{split}.jsonl')
    count, said = 0, time.monotonic()
    long = []  # that recall documents can be cut from
    with token_file.TokenWriter(
      out / split, encoder.vocab_size, digest
    ) as writer:
      for batch in _batched(documents, _BATCH_DOCUMENTS):
        for ids in encoder.encode_documents([d.files for d in batch]):
          writer.add(ids)
          count += len(ids)
          if recall and len(ids) >= recall.tokens:
            long.append(np.asarray(ids, np.int32))
        if time.monotonic() - said > 10:
          log(f'{split}: {count / 1e6:.1f} million tokens')
          said = time.monotonic()
      if recall and split == 'train':
        for ids in _recall(recall, tokenizer_json, long):
          writer.add(ids)
          count += len(ids)
    splits[split] = {'tokens': count}
    names += [f'{split}.{suffix}' for suffix in ('bin', 'idx', 'json')]
  return {
    'splits': splits,
    'vocab_size': encoder.vocab_size,
    'sha256': _checksums(out, names),
  }


def _recall(recall, tokenizer_json, documents) -> np.ndarray:
  tokenizer = Tokenizer.load(tokenizer_json.parent)
  return pairs.recall_documents(
    tokenizer,
    documents,
    recall.seed,
    recall.documents,
    recall.tokens,
    recall.pairs,
  )


def _batched(items: Iterator, size: int) -> Iterator[list]:
  batch = []
  for item in items:
    batch.append(item)
    if len(batch) == size:
      yield batch
      batch = []
  if batch:
    yield batch


def _checksums(out: epath.Path, names: list[str]) -> dict[str, str]:
  return {name: sources.sha256(out / name) for name in names}


def _code_checksum() -> str:
  """Of the code that decides what comes out."""
  modules = (sources, corpus, tokenizer_training, token_file, pairs)
  paths = [__file__, *(module.__file__ for module in modules)]
  code = [epath.Path(path).read_bytes() for path in paths]
  return hashlib.sha256(b'\0'.join(code)).hexdigest()


_CODE = _code_checksum()
