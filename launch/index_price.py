r"""IndexShare's price: dense, per layer, shared, shared at inference only.

  python launch/index_price.py --corpus=DIR --workdir=runs/index_price

Trains the forms of `glm_jax.evaluation.index_price` by one recipe, with every
seed, and judges them on held-out text: loss by position, needles, copies.
What is done already (WORKDIR/FORM-SEED.json) is not done again, so the same
command goes on after a stop. Exit code 1: runs are missing (--forms,
--max_seconds), or sharing costs more than --goal of the loss at the longest
positions (mean paired difference and two standard errors).
"""

from __future__ import annotations

import dataclasses
import json
import time

from absl import flags
from etils import epath

from glm_jax import cli

_CONFIG = flags.DEFINE_string(
  'config', 'configs/index_price.py', 'Recipe with get_base() as well.'
)
_CORPUS = flags.DEFINE_string(
  'corpus', None, 'Directory that launch/prepare_data.py wrote.'
)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/index_price', 'Of all runs.')
_FORMS = flags.DEFINE_list('forms', None, 'Forms to train; default: all.')
_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Seeds to train.')
_SET = flags.DEFINE_multi_string(
  'set', [], 'name=value: a setting of base and forms; may be repeated.'
)
_LENGTH = flags.DEFINE_integer('length', 8192, 'Tokens of a context.')
_WINDOWS = flags.DEFINE_integer('windows', 64, 'Windows of the losses.')
_COUNT = flags.DEFINE_integer('count', 100, 'Needles, and copies.')
_ATTENTION = flags.DEFINE_enum(
  'attention',
  'auto',
  ['auto', 'gather', 'masked', 'cudnn'],
  'How attention is computed when judging.',
)
_GOAL = flags.DEFINE_float('goal', 0.005, 'Of the loss that sharing may cost.')
_MAX_SECONDS = flags.DEFINE_float(
  'max_seconds', None, 'Start no run after so long; stop one in the middle.'
)
_JSON = flags.DEFINE_string('json', None, 'File to write the tables to.')
_PLOT = flags.DEFINE_string(
  'plot', None, 'Picture (PNG) of the price by position.'
)


class Study:
  """One call: the recipes and where runs are kept."""

  def __init__(self):
    from glm_jax.data import TokenFile
    from glm_jax.text import Tokenizer
    from glm_jax.training.config import override
    from glm_jax.training.recipe import load_recipe

    self.corpus = epath.Path(_CORPUS.value).expanduser()
    self.directory = epath.Path(_WORKDIR.value).expanduser()
    self.directory.mkdir(parents=True, exist_ok=True)
    load = lambda function: override(
      load_recipe(_CONFIG.value, function), _SET.value
    )
    self.base, self.recipe = load('get_base'), load('get_train_config')
    self.tokenizer = Tokenizer.load(self.corpus / 'tokenizer')
    if self.tokenizer is None:
      raise cli.UserError(f'{self.corpus} has no tokenizer: prepare it again')
    self.held_out = TokenFile(self.corpus / 'held_out')
    self._begin = time.monotonic()

  def left(self) -> float | None:
    """Seconds that remain, None without a limit."""
    if _MAX_SECONDS.value is None:
      return None
    return _MAX_SECONDS.value - (time.monotonic() - self._begin)

  def train(self, config, name: str, start=None):
    """The trained model, as it is exported; None where time ran out."""
    from glm_jax import load_model
    from glm_jax.training.loop import Trainer, export

    target = self.directory / name / 'model'
    if not target.exists():
      trainer = Trainer(
        config,
        self.directory / name,
        self.corpus,
        init_from=start,
        log=cli.log,
      )
      result, state = trainer.run(max_seconds=self.left())
      if result.failed:
        raise RuntimeError(result.failed)
      if not result.finished:
        return None
      export(trainer, state.params, target)
    return load_model(target)

  def start(self, form: str) -> epath.Path | None:
    """Checkpoint that a form begins with; None where time ran out."""
    from glm_jax.checkpoints import save_published
    from glm_jax.evaluation import index_price

    base = self.train(self.base, 'base')
    if base is None or form != 'share':
      return base and self.directory / 'base' / 'model'
    target = self.directory / 'base' / 'shared'
    if not target.exists():
      model = index_price.start_of(base, self.recipe, form)
      save_published(model, model.config, target)
    return target

  def run(self, form: str, seed: int) -> bool:
    """Trains and judges one run; False where time ran out."""
    from glm_jax.evaluation import index_price
    from glm_jax.evaluation.sharing import share_index

    start = self.start(form)
    if start is None:
      return False
    config = index_price.form_config(self.recipe, form, seed)
    model = self.train(config, f'{form}-{seed}', start)
    if model is None:
      return False
    models = {form: model}
    if form == 'per_layer':
      kinds = index_price.pattern(self.recipe.model)
      models['inference_only'] = share_index(model, kinds)
    for name, model in models.items():
      judged = index_price.judge_form(
        model,
        name,
        self.tokenizer,
        self.held_out,
        length=_LENGTH.value,
        windows=_WINDOWS.value,
        count=_COUNT.value,
        attention=_ATTENTION.value,
      )
      judged['losses'] = dataclasses.asdict(judged['losses'])
      judged |= cli.origin() | {'machine': cli.machine()}
      cli.write_json(self.directory / f'{name}-{seed}.json', judged)
    return True


def print_tables(found) -> None:
  print(
    f'{"":>16}{"loss":>9}{"longest":>9}{"needles":>9}{"copy nats":>11}'
    f'{"copy right":>12}'
  )
  for row in found['forms']:
    print(
      f'{row["form"]:>16}{row["nats"]:>9.4f}{row["nats_longest"]:>9.4f}'
      f'{row["needles"]:>9.1%}{row["copy_nats"]:>11.3f}'
      f'{row["copy_accuracy"]:>12.1%}'
    )
  for form, rows in found['difference'].items():
    last = rows[-1]
    print(
      f'{form} above per_layer at {last["from"]:,} to {last["to"]:,}: '
      f'{last["difference"]:+.4f} nats; with two standard errors '
      f'{last["upper_share"]:+.2%} of the loss'
    )


def main() -> bool:
  from glm_jax.evaluation import index_price

  if not _CORPUS.value:
    raise cli.UserError('--corpus=DIR is needed; --help shows an example')
  forms = cli.some_of('forms', _FORMS.value, index_price.TRAINED)
  seeds = [int(seed) for seed in _SEEDS.value]
  study = Study()
  file = lambda form, seed: study.directory / f'{form}-{seed}.json'
  for seed in seeds:
    for form in forms:
      out_of_time = study.left() is not None and study.left() < 0
      if not file(form, seed).exists() and not out_of_time:
        study.run(form, seed)
  every = [(form, seed) for form in index_price.FORMS for seed in seeds]
  missing = [f'{f}-{s}' for f, s in every if not file(f, s).exists()]
  if missing:
    cli.log(f'not run: {", ".join(missing)}')
    return False
  judged = {run: json.loads(file(*run).read_text()) for run in every}
  found = index_price.compare_forms(judged, seeds)
  print_tables(found)
  if _JSON.value:
    where = ', '.join(sorted({run['machine'] for run in judged.values()}))
    cli.write_json(_JSON.value, cli.origin() | {'machine': where} | found)
  if _PLOT.value:
    from glm_jax.evaluation import plots

    plots.plot_price(
      found['difference'],
      _PLOT.value,
      topk=study.recipe.model.indexer.topk,
      goal=_GOAL.value,
    )
  return found['difference']['share'][-1]['upper_share'] <= _GOAL.value


if __name__ == '__main__':
  cli.run(main)
