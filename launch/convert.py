"""Converts a checkpoint: layout, dtype, fp8 or not; then reads it back.

  python launch/convert.py --model=DIR --out=DIR --format=orbax
  python launch/convert.py --model=DIR --out=DIR --format=hf --weight_dtype=fp8

One tensor (hf) or one part of about 2 GiB or one layer's experts (orbax) is in
memory at a time. Interrupted, it goes on where it stopped when it is started
again; until it has verified every bit of its output, no loader accepts the
directory. Exit code 1: what was read back differs from what was to be written.
"""

from __future__ import annotations

import time

from absl import flags
from etils import epath

from glm_jax import cli

_MODEL = flags.DEFINE_string(
  'model', None, 'Checkpoint directory, published or orbax format.'
)
_OUT = flags.DEFINE_string(
  'out', None, 'Directory to write: new, empty, or an interrupted conversion.'
)
_FORMAT = flags.DEFINE_enum(
  'format', None, ['orbax', 'hf'], 'Layout to write; hf is the published one.'
)
_DTYPE = flags.DEFINE_string(
  'dtype', 'auto', "Of wide weights: 'auto' (the config's), 'bf16' or 'f32'."
)
_WEIGHT_DTYPE = flags.DEFINE_string(
  'weight_dtype', 'auto', "'auto' (the checkpoint's), 'bf16', 'f32' or 'fp8'."
)
_JSON = flags.DEFINE_string('json', None, 'File to write the result to.')


def main() -> bool:
  for name in ('model', 'out', 'format'):
    if not flags.FLAGS[name].value:
      raise cli.UserError(f'--{name} is needed; --help shows an example')
  start = time.monotonic()
  from glm_jax import checkpoints, presets

  path = cli.resolve_model_path(_MODEL.value, presets=presets.PRESETS)
  source = checkpoints.open_checkpoint(path)
  out = epath.Path(_OUT.value).expanduser()
  result = checkpoints.convert(
    source,
    out,
    _FORMAT.value,
    dtype=_DTYPE.value,
    weight_dtype=_WEIGHT_DTYPE.value,
  )
  different = result.pop('different')
  for name in different[:20]:
    cli.log(f'{name} differs from what was to be written')
  result |= {
    'model': path,
    'out': str(out),
    'format': _FORMAT.value,
    'num_different': len(different),
    'seconds': round(time.monotonic() - start, 3),
  }
  if _JSON.value:
    cli.write_json(_JSON.value, result)
  print(
    f'{out}: {result["parameters"]:,} parameters, {result["bytes"]:,} bytes, '
    f'{"verified" if result["verified"] else "WRONG, left unfinished"}'
  )
  return result['verified']


if __name__ == '__main__':
  cli.run(main)
