r"""Trains a model by a recipe; the same command goes on where it stopped.

  python launch/train.py --config=configs/glm_nano.py --corpus=DIR \
    --workdir=DIR --max_seconds=560 --export=DIR

The recipe is a Python file with `get_train_config()`. The corpus is what
launch/prepare_data.py wrote. The working directory holds checkpoints/ and
metrics.jsonl (one JSON object a line). `--export` writes the trained model in
the published format once the last step is done. `--set=name=value` changes
the recipe (`--set=seed=1 --set=attention=cudnn --set=long.batch=8`).

`--mesh=data=2,context=4` trains over several devices of one process; on many
hosts the same command runs on each (`--coordinator_address`, launch/pod.sh)
over a --workdir that all of them see. A run may go on over another mesh or
number of processes. `--export` is for one process: run the finished command
once more on one host.

Exit code 0: the run is finished, or stopped as --max_seconds or --max_steps
asked; 1: a step was not finite (the state before it is saved).
"""

from __future__ import annotations

import dataclasses

from absl import flags
from etils import epath

from glm_jax import cli
from glm_jax import mesh_flags as _mesh_flags  # noqa: F401  defines flags

_CONFIG = flags.DEFINE_string(
  'config', None, 'Recipe: a Python file with get_train_config().'
)
_CORPUS = flags.DEFINE_string(
  'corpus', None, 'Directory that launch/prepare_data.py wrote.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Of checkpoints and metrics; default: runs/NAME.'
)
_INIT_FROM = flags.DEFINE_string(
  'init_from', None, 'Checkpoint that gives the first parameters.'
)
_EXPORT = flags.DEFINE_string(
  'export', None, 'Directory to write the finished model to.'
)
_SET = flags.DEFINE_multi_string(
  'set', [], 'name=value: a setting of the recipe; may be repeated.'
)
_MAX_SECONDS = flags.DEFINE_float(
  'max_seconds', None, 'Stop, resumable, before this much time has passed.'
)
_MAX_STEPS = flags.DEFINE_integer(
  'max_steps', None, 'Stop, resumable, after this many steps.'
)
_JSON = flags.DEFINE_string('json', None, 'File to write the result to.')


def main() -> bool:
  for name in ('config', 'corpus'):
    if not flags.FLAGS[name].value:
      raise cli.UserError(f'--{name} is needed; --help shows an example')
  from sharding import launching

  with launching.processes():
    return run()


def run() -> bool:
  """Trains; with several processes, all of them run this."""
  import jax

  from glm_jax.training.config import override
  from glm_jax.training.loop import Trainer, export
  from glm_jax.training.recipe import load_recipe
  from sharding import launching

  if _EXPORT.value and jax.process_count() > 1:
    raise cli.UserError(
      '--export is for one process: leave it out here, and give it to the '
      'same command in one process when the run is finished'
    )
  config = override(load_recipe(_CONFIG.value), _SET.value)
  name = epath.Path(_CONFIG.value).stem
  trainer = Trainer(
    config,
    _WORKDIR.value or f'runs/{name}',
    _CORPUS.value,
    init_from=_INIT_FROM.value,
    log=cli.log,
    placement=launching.placement(),
  )
  result, state = trainer.run(
    max_seconds=_MAX_SECONDS.value, max_steps=_MAX_STEPS.value
  )
  summary = dataclasses.asdict(result)
  if result.finished and _EXPORT.value:
    export(trainer, state.params, _EXPORT.value)
    summary['exported'] = _EXPORT.value
  if trainer.placement.is_main:
    report(result, summary)
  return not result.failed


def report(result, summary) -> None:
  """How the run ended: on stdout, and in `--json`."""
  if result.failed:
    cli.log(result.failed)
  elif not result.finished:
    cli.log('stopped as asked: run the same command to go on')
  print(f'step {result.step} of {result.steps}')
  for key in ('loss', 'held_out_loss', 'tokens_per_second'):
    if summary[key] is not None:
      print(f'{key}: {summary[key]:,.4f}')
  if _JSON.value:
    cli.write_json(_JSON.value, summary)


if __name__ == '__main__':
  cli.run(main)
