"""Makes token files for training: fetch, filter, tokenizer, encode.

  python launch/prepare_data.py --recipe=configs/corpus.json --out=DIR
  python launch/prepare_data.py --folder=DIR --out=DIR --vocab_size=1024

A recipe names exact releases of packages, their checksums and their licences;
pip fetches them. `--folder` takes any folder of text instead. DIR then holds
tokenizer/ (published format) and the token files train and held_out. What is
up to date is not made again.

Exit code 1: the recipe states checksums, and the files made differ from them
(`--no-verify` accepts that).
"""

from __future__ import annotations

import time

from absl import flags

from glm_jax import cli

_RECIPE = flags.DEFINE_string(
  'recipe', None, 'What the corpus is made of: configs/corpus.json.'
)
_FOLDER = flags.DEFINE_string(
  'folder', None, 'Folder of text to use instead of a recipe.'
)
_OUT = flags.DEFINE_string('out', None, 'Directory to write, local.')
_VOCAB_SIZE = flags.DEFINE_integer(
  'vocab_size', None, "Of the tokenizer to make; default: the recipe's, 6144."
)
_TOKENIZER = flags.DEFINE_string(
  'tokenizer', None, 'Directory of a tokenizer to use instead of a new one.'
)
_VERIFY = flags.DEFINE_bool(
  'verify', True, "Compare what was made with the recipe's checksums."
)
_JSON = flags.DEFINE_string('json', None, 'File to write the result to.')


def main() -> bool:
  if bool(_RECIPE.value) == bool(_FOLDER.value):
    raise cli.UserError('give either --recipe=FILE or --folder=DIR')
  if not _OUT.value:
    raise cli.UserError('--out=DIR is needed')
  if '://' in _OUT.value:
    raise cli.UserError(f'--out={_OUT.value} must be a local directory')
  if _TOKENIZER.value and _VOCAB_SIZE.value is not None:
    raise cli.UserError('--tokenizer has a vocabulary: leave --vocab_size out')
  start = time.monotonic()
  from glm_jax import data

  if _RECIPE.value:
    recipe = data.load_recipe(_RECIPE.value)
  else:
    recipe = data.folder_recipe(_FOLDER.value)
  result = data.prepare(
    recipe,
    _OUT.value,
    vocab_size=_VOCAB_SIZE.value,
    tokenizer=_TOKENIZER.value,
    log=cli.log,
  )
  result['seconds'] = round(time.monotonic() - start, 1)
  print(f'vocabulary: {result["vocab_size"]}')
  for name, split in result['splits'].items():
    print(
      f'{name}: {split["bytes"]:,} bytes of {split["files"]:,} files in '
      f'{split["documents"]:,} documents, {split["tokens"]:,} tokens, '
      f'{split["bytes_per_token"]:.3f} bytes a token'
    )
  for name, digest in result['sha256'].items():
    print(f'{digest}  {name}')
  if _JSON.value:
    cli.write_json(_JSON.value, result)
  if result['matches_recipe'] is None:
    return True
  for name, digest in recipe.expected.items():
    if result['sha256'].get(name) != digest:
      cli.log(f'{name} differs from the recipe ({digest})')
  return result['matches_recipe'] or not _VERIFY.value


if __name__ == '__main__':
  cli.run(main)
