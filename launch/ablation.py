r"""What each piece of the drafter is worth, trained and measured.

  python launch/ablation.py --corpus=DIR --workdir=runs/ablation

Trains every form of the drafter with every seed by one recipe, drafts
held-out prompts at temperature 1, and prints the table beside the published
one. What is done already (WORKDIR/FORM-SEED.json) is not done again, so the
same command goes on after a stop, and several may share the work:
`--forms=shared --seeds=0` does one run; a last call without work prints the
table. Exit code 1: runs are missing (with --forms, --seeds, --max_seconds).
"""

from __future__ import annotations

import json
import time

from absl import flags
from etils import epath

from glm_jax import cli

_CONFIG = flags.DEFINE_string(
  'config', 'configs/ablation.py', 'Recipe of every run.'
)
_CORPUS = flags.DEFINE_string(
  'corpus', None, 'Directory that launch/prepare_data.py wrote.'
)
_TRUNK = flags.DEFINE_string(
  'model', None, 'Whose trunk; default: the embedded glm-nano.'
)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/ablation', 'Of all runs.')
_FORMS = flags.DEFINE_list('forms', None, 'Forms to train; default: all.')
_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Seeds to train.')
_SET = flags.DEFINE_multi_string(
  'set', [], 'name=value: a setting of the recipe; may be repeated.'
)
_PROMPTS = flags.DEFINE_integer('prompts', 64, 'Held-out prompts.')
_PROMPT_TOKENS = flags.DEFINE_integer('prompt_tokens', 3968, 'Of each.')
_NEW = flags.DEFINE_integer('max_new_tokens', 128, 'Drafted for, a prompt.')
_BLOCK_MIB = flags.DEFINE_integer(
  'block_mib', 64, 'Scores and gathered rows at once, MiB.'
)
_MAX_SECONDS = flags.DEFINE_float(
  'max_seconds', None, 'Start no run after so long; stop one in the middle.'
)
_JSON = flags.DEFINE_string('json', None, 'File to write the table to.')
_PLOT = flags.DEFINE_string('plot', None, 'Picture (PNG) of the table.')


def read_run(file: epath.Path) -> dict:
  """What one run measured so far, row by row."""
  return json.loads(file.read_text()) if file.exists() else {}


def rows_left(file: epath.Path, form: str) -> list:
  """The table's rows of a form that are not measured yet."""
  from glm_jax.evaluation import draft_ablation as ablation

  run = read_run(file)
  return [r for r in ablation.ROWS if r.form == form and r.name not in run]


def run_one(form: str, seed: int, directory: epath.Path, left: float | None):
  """Trains one run and measures its rows, each kept when it is there."""
  from glm_jax.checkpoints import EMBEDDED
  from glm_jax.data import TokenFile
  from glm_jax.evaluation import draft_ablation as ablation
  from glm_jax.training.config import override
  from glm_jax.training.loop import Trainer
  from glm_jax.training.recipe import load_recipe

  recipe = override(load_recipe(_CONFIG.value), _SET.value)
  config = ablation.form_config(recipe, form, seed)
  trainer = Trainer(
    config,
    directory / f'{form}-{seed}',
    _CORPUS.value,
    init_from=_TRUNK.value or EMBEDDED,
    log=cli.log,
  )
  result, state = trainer.run(max_seconds=left)
  if result.failed:
    raise RuntimeError(result.failed)
  if not result.finished:
    return
  model = trainer.layout.model(state.params, config.model.dtype)
  prompts = ablation.held_out_prompts(
    TokenFile(epath.Path(_CORPUS.value) / 'held_out'),
    _PROMPTS.value,
    _PROMPT_TOKENS.value,
    _NEW.value,
  )
  file = directory / f'{form}-{seed}.json'
  for row in rows_left(file, form):
    measured = ablation.measure(
      model,
      prompts,
      row.options,
      max_new_tokens=_NEW.value,
      block_bytes=_BLOCK_MIB.value << 20,
    )
    cli.log(form, seed, row.name, measured)
    run = {'form': form, 'seed': seed, 'steps': result.step}
    run |= cli.origin() | {'machine': cli.machine()}
    cli.write_json(file, run | read_run(file) | {row.name: measured})


def read_all(directory: epath.Path, seeds: list[int]):
  """(row, seed) -> measurement of what is done, and the runs that are not."""
  from glm_jax.evaluation import draft_ablation as ablation

  done, missing = {}, []
  for form in ablation.FORMS:
    for seed in seeds:
      file = directory / f'{form}-{seed}.json'
      if rows_left(file, form):
        missing.append(f'{form}-{seed}')
      run = read_run(file)
      done |= {
        (r.name, seed): run[r.name] for r in ablation.ROWS if r.name in run
      }
  return done, missing


def print_table(rows) -> None:
  print(
    f'{"":>24}{"seeds":>6}{"accept length":>16}{"gain":>8}'
    f'{"with bonus":>14}{"gain":>8}{"published":>11}{"gain":>8}'
  )
  for row in rows:
    cells = []
    for key in ('accept_length', 'accept_length_with_bonus'):
      spread = row[f'{key}_stdev']
      spread = '' if spread is None else f' ±{spread:.3f}'
      gain = row[f'{key}_gain']
      cells += [f'{row[key]:.3f}{spread}', f'{gain:+.1%}' if gain else '-']
    print(
      f'{row["name"]:>24}{row["seeds"]:>6}{cells[0]:>16}{cells[1]:>8}'
      f'{cells[2]:>14}{cells[3]:>8}{row["published"]:>11.2f}'
      f'{row["published_gain"]:>+8.1%}'
    )


def main() -> bool:
  from glm_jax.evaluation import draft_ablation as ablation

  if not _CORPUS.value:
    raise cli.UserError('--corpus=DIR is needed; --help shows an example')
  forms = cli.some_of('forms', _FORMS.value, ablation.FORMS)
  seeds = [int(seed) for seed in _SEEDS.value]
  directory = epath.Path(_WORKDIR.value).expanduser()
  directory.mkdir(parents=True, exist_ok=True)
  begin = time.monotonic()
  for seed in seeds:
    for form in forms:
      file = directory / f'{form}-{seed}.json'
      left = _MAX_SECONDS.value
      if left is not None:
        left -= time.monotonic() - begin
      if rows_left(file, form) and (left is None or left > 0):
        run_one(form, seed, directory, left)
  done, missing = read_all(directory, seeds)
  rows = ablation.summarise(done)
  print_table(rows)
  if _JSON.value:
    found = {'rows': rows, 'missing': missing}
    cli.write_json(_JSON.value, cli.origin() | found)
  if _PLOT.value:
    from glm_jax.evaluation.plots import plot_ablation

    plot_ablation(rows, _PLOT.value)
  if missing:
    cli.log(f'not run: {", ".join(missing)}')
  return not missing


if __name__ == '__main__':
  cli.run(main)
