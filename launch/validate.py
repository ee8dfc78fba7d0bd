"""Holds this repo's model against PyTorch transformers, layer by layer.

  python launch/validate.py                                glm-nano, embedded
  python launch/validate.py --model=DIR                    both, in one process
  python launch/validate.py --model=DIR --framework=torch --record=REF
  python launch/validate.py --model=DIR --against=REF      elsewhere, no torch
  python launch/validate.py --model=DIR --layers=0,6,77    these layers alone
  python launch/validate.py --report=OUT --records=REF,A,B  runs side by side

Prints a line a layer and exits with 1 if the two part, naming the first layer
and tensor. Layers are streamed: memory holds one at a time. `--report` runs no
model: it compares recorded runs (`--against=REF --record=A` on each machine)
and writes OUT/index.html and OUT/report.json.
"""

from __future__ import annotations

import json

from absl import flags
from etils import epath

from glm_jax import cli

_MODEL = flags.DEFINE_string(
  'model',
  None,
  'Checkpoint directory in the published format; default: glm-nano.',
)
_TOKENS = flags.DEFINE_string(
  'tokens',
  None,
  "JSON file with a list of token ids. Default: the record's, or random ids, "
  'more of them than index_topk.',
)
_FRAMEWORK = flags.DEFINE_enum(
  'framework',
  None,
  ['torch', 'jax'],
  'Run this one only, with --record or --against. Default: both, or the one '
  'that the record is not of.',
)
_RECORD = flags.DEFINE_string(
  'record', None, 'Directory to write the reference run to.'
)
_AGAINST = flags.DEFINE_string('against', None, 'Recorded run to compare with.')
_LAYERS = flags.DEFINE_list(
  'layers',
  None,
  "Layers to compare, each on the reference's input. Default: all, carrying "
  'errors on.',
)
_DTYPE = flags.DEFINE_string(
  'dtype',
  'float32',
  "Of weights and arithmetic: 'float32', 'bfloat16' or 'auto' (the config's).",
)
_TORCH_DEVICE = flags.DEFINE_enum(
  'torch_device', 'cpu', ['cpu', 'cuda'], 'Where PyTorch computes.'
)
_REPORT = flags.DEFINE_string(
  'report', None, 'Directory for a page that compares --records.'
)
_RECORDS = flags.DEFINE_list(
  'records', None, 'Recorded runs; the first of each model is the reference.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the random ids.')
_JSON = flags.DEFINE_string('json', None, 'Write the result to this file.')


def read_tokens(path: str) -> list[int]:
  """Token ids of a JSON file that holds one list."""
  try:
    ids = json.loads(epath.Path(path).expanduser().read_text())
  except json.JSONDecodeError as error:
    raise cli.UserError(f'--tokens={path} is not JSON: {error}') from None
  if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
    ids = ids[0]
  whole = lambda i: isinstance(i, int) and not isinstance(i, bool)
  if not isinstance(ids, list) or not ids or not all(map(whole, ids)):
    raise cli.UserError(f'--tokens={path} must hold a list of integers')
  return ids


def read_layers(names: list[str] | None) -> list[int] | None:
  """Layer numbers of the flag."""
  if names is None:
    return None
  try:
    return [int(name) for name in names]
  except ValueError:
    raise cli.UserError(
      f'--layers={",".join(names)} must be numbers, as in --layers=0,6,77'
    ) from None


def report() -> bool:
  """Compares records; False where one parts from its reference."""
  from glm_jax.validation.report import compare_records
  from glm_jax.validation.report_page import write_page

  cases = compare_records(_RECORDS.value)
  out = epath.Path(_REPORT.value).expanduser()
  cli.write_json(out / 'report.json', cases)
  print(write_page(cases, out / 'index.html'))
  for case in cases:
    for run in case.runs:
      print(f'{run.name} beside {case.name}: {run.result.verdict}')
  return all(case.passed for case in cases)


def main() -> bool:
  if bool(_REPORT.value) != bool(_RECORDS.value):
    raise cli.UserError(
      '--report=DIR and --records=REF,A,B belong together: give both'
    )
  if _REPORT.value:
    return report()
  path = cli.resolve_model_path(_MODEL.value)
  tokens = read_tokens(_TOKENS.value) if _TOKENS.value else None
  from glm_jax.validation import validate

  result = validate(
    path,
    tokens,
    dtype=_DTYPE.value,
    layers=read_layers(_LAYERS.value),
    record=_RECORD.value,
    against=_AGAINST.value,
    framework=_FRAMEWORK.value,
    seed=_SEED.value,
    torch_device=_TORCH_DEVICE.value,
    log=cli.log,
  )
  print(result.table())
  if _JSON.value:
    cli.write_json(_JSON.value, result)
  return result.passed


if __name__ == '__main__':
  cli.run(main)
