r"""What a model makes of held-out text, beyond its mean loss.

  python launch/evaluate.py --model=DIR --corpus=DIR --suite=all \
    --json=FILE --plots=DIR

  needles   lines stated once and asked for up to a whole window later
  copy      a span that stands twice: is the second time easier?
  position  loss by position in the window
  overlap   how alike the selections of neighbouring queries and layers are
  ngram     a Kneser-Ney 5-gram of the corpus's training tokens (no --model)

`--selection` makes every row attend to all keys (dense), to the selections
that the config shares (share), or demands an indexer in every layer
(per_layer). `--share_index=FFFSSS..` lets a model that has one in every layer
share all the same. `--against=FILE` sets losses by position beside another
run's JSON, window by window; so does, for several seeds and without a model,

  python launch/evaluate.py --results=A0,A1,A2 --against=B0,B1,B2 --json=FILE

whose column `upper` is the mean difference and two standard errors (of seeds
or windows, the larger) as a share of the other loss.
"""

from __future__ import annotations

import json
import time

import numpy as np
from absl import flags
from etils import epath

from glm_jax import cli

SUITES = ('needles', 'copy', 'position', 'overlap', 'ngram')
_MODEL = flags.DEFINE_string(
  'model', None, 'Checkpoint directory; default: the embedded glm-nano.'
)
_CORPUS = flags.DEFINE_string(
  'corpus', None, 'Directory that launch/prepare_data.py wrote.'
)
_SUITE = flags.DEFINE_list(
  'suite', ['all'], f'Some of {", ".join(SUITES)}, or all.'
)
_SELECTION = flags.DEFINE_enum(
  'selection', 'share', ['dense', 'share', 'per_layer'], 'What rows attend to.'
)
_SHARE_INDEX = flags.DEFINE_string(
  'share_index',
  None,
  'F and S a layer: drop the indexers of the layers marked S.',
)
_LENGTH = flags.DEFINE_integer('length', 8192, 'Tokens of a context.')
_COUNT = flags.DEFINE_integer('count', 200, 'Needles, and copies.')
_WINDOWS = flags.DEFINE_integer(
  'windows', None, 'Windows of the position suite; default: all.'
)
_OVERLAP_WINDOWS = flags.DEFINE_integer(
  'overlap_windows', 8, 'Windows of the overlap suite.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the probes.')
_BATCH = flags.DEFINE_integer('batch', 8, 'Contexts at once.')
_ATTENTION = flags.DEFINE_enum(
  'attention',
  'auto',
  ['auto', 'gather', 'masked', 'cudnn'],
  'How attention is computed; all attend to the same keys.',
)
_DTYPE = flags.DEFINE_string(
  'dtype', 'auto', "Compute dtype: 'auto' (the config's), 'bf16' or 'f32'."
)
_ORDER = flags.DEFINE_integer('order', 5, 'Longest n-gram.')
_RESULTS = flags.DEFINE_list(
  'results',
  None,
  'JSON of earlier runs, one a seed: compare them, run nothing.',
)
_AGAINST = flags.DEFINE_list(
  'against', None, 'JSON of other runs, whose losses by position are compared.'
)
_JSON = flags.DEFINE_string('json', None, 'Write the result to this file.')
_PLOTS = flags.DEFINE_string('plots', None, 'Directory for pictures.')


def wanted_suites() -> list[str]:
  """The suites asked for, in the order of `SUITES`."""
  names = _SUITE.value
  unknown = sorted(set(names) - {*SUITES, 'all'})
  if unknown or not names:
    raise cli.UserError(
      f'--suite={",".join(names)} must be some of {", ".join(SUITES)}, or all'
    )
  return [name for name in SUITES if name in names or 'all' in names]


class Evaluation:
  """One call: the corpus, the model, and what was found."""

  def __init__(self, suites: list[str]):
    from glm_jax.data import TokenFile
    from glm_jax.data.sources import sha256
    from glm_jax.text import Tokenizer

    self.corpus = epath.Path(_CORPUS.value).expanduser()
    if not self.corpus.is_dir():
      raise cli.UserError(f'--corpus={_CORPUS.value} is not a directory')
    file = self.corpus / 'tokenizer' / 'tokenizer.json'
    self.tokenizer = Tokenizer.load(file.parent)
    if self.tokenizer is None:
      raise cli.UserError(f'{file} does not exist: prepare the corpus again')
    self.held_out = TokenFile(
      self.corpus / 'held_out', tokenizer_sha256=sha256(file)
    )
    self.model, self.topk = None, None
    if set(suites) - {'ngram'}:
      self.model = self._load(sha256(file))
      self.topk = self.model.config.indexer.topk

  def _load(self, tokenizer_sha256: str):
    """The model, whose tokenizer must be the corpus's."""
    from glm_jax.checkpoints import EMBEDDED, load_model
    from glm_jax.data.sources import sha256
    from glm_jax.evaluation import share_index

    path = EMBEDDED
    if _MODEL.value:
      names = [EMBEDDED.name] if EMBEDDED.exists() else []
      path = cli.resolve_model_path(_MODEL.value, presets=names)
      path = EMBEDDED if path == EMBEDDED.name else epath.Path(path)
    own = path / 'tokenizer.json'
    if own.exists() and sha256(own) != tokenizer_sha256:
      raise cli.UserError(
        f'{own} is not the tokenizer that made {self.held_out.path}: ids mean '
        'something else; use the corpus that the model was trained on'
      )
    model = load_model(path, dtype=_DTYPE.value)
    if model.config.vocab_size < self.held_out.vocab_size:
      raise cli.UserError(
        f'the corpus has a vocabulary of {self.held_out.vocab_size}, the '
        f'model one of {model.config.vocab_size}'
      )
    if _SHARE_INDEX.value:
      model = share_index(model, _SHARE_INDEX.value)
    return model

  @property
  def _passes(self):
    return dict(
      selection=_SELECTION.value,
      batch=_BATCH.value,
      attention=_ATTENTION.value,
    )

  def needles(self):
    from glm_jax.evaluation import needle, score_needles

    made = needle(
      self.tokenizer,
      self.held_out,
      _SEED.value,
      _COUNT.value,
      _LENGTH.value,
      nearest=self.topk + 1,
    )
    result = score_needles(self.model, made, **self._passes)
    print(
      f'needles found: {result["found"]} of {result["count"]} '
      f'({result["share"]:.1%}), {result["nats"]:.3f} nats a value token'
    )
    _table(result['by_distance'], 'distance', count='count', share='found')
    return result

  def copy(self):
    from glm_jax.evaluation import copy, score_copies

    made = copy(
      self.tokenizer,
      self.held_out,
      _SEED.value,
      _COUNT.value,
      _LENGTH.value,
      nearest=max(self.topk + 1, 64),  # No shorter than the span.
    )
    result = score_copies(self.model, made, **self._passes)
    print(
      f'copied spans: {result["copy_nats"]:.3f} nats a token, '
      f'{result["copy_accuracy"]:.1%} right; the first time '
      f'{result["first_nats"]:.3f}, {result["first_accuracy"]:.1%}'
    )
    names = dict(copy_nats='copy', first_nats='first')
    _table(result['by_distance'], 'distance', count='count', **names)
    return result

  def position(self):
    from glm_jax.evaluation import full_windows, losses_by_position

    windows = full_windows(self.held_out, _LENGTH.value, _WINDOWS.value)
    losses = losses_by_position(self.model, windows, **self._passes)
    rows = losses.rows()
    print(f'loss: {losses.loss:.4f} nats a token in {len(windows)} windows')
    _table(rows, 'position', nats='nats', standard_error='s.e.')
    result = {'loss': losses.loss, 'by_position': rows, 'losses': losses}
    if _AGAINST.value:
      result['against'] = compare([losses], read_losses(_AGAINST.value))
    return result

  def overlap(self):
    from glm_jax.evaluation import full_windows, selection_overlap

    windows = full_windows(self.held_out, _LENGTH.value, _OVERLAP_WINDOWS.value)
    rows = selection_overlap(self.model, windows[:, :-1])
    last = max(row['from'] for row in rows)
    print('overlap of selections at the last positions')
    for row in rows:
      if row['from'] == last:
        numbers = ('distance', 'queries', 'other')
        number = next(f'{n} {row[n]}' for n in numbers if n in row)
        print(
          f'  {row["kind"]:<10} layer {row["layer"]:>2}  {number:<14}'
          f'{row["value"]:>8.3f}  by chance {row["random"]:.3f}'
        )
    return rows

  def ngram(self):
    from glm_jax.data import TokenFile
    from glm_jax.evaluation.by_position import window_starts
    from glm_jax.evaluation.ngram import KneserNey

    train = TokenFile(
      self.corpus / 'train', tokenizer_sha256=self.held_out.tokenizer_sha256
    )
    begin = time.monotonic()
    model = KneserNey(train, train.vocab_size, _ORDER.value)
    counted = time.monotonic()
    nats = model.nats(self.held_out)
    # A model is never asked for the first token of a window.
    starts = window_starts(self.held_out, _LENGTH.value, _WINDOWS.value)
    inside = [nats[a + 1 : a + _LENGTH.value + 1].mean() for a in starts]
    result = {
      'order': _ORDER.value,
      'train_tokens': len(train.tokens),
      'train_sha256': sha256_of(train),
      'held_out_tokens': len(nats),
      'held_out_sha256': sha256_of(self.held_out),
      'ngrams': model.num_ngrams,
      'discounts': [order.discounts[1:] for order in model.orders],
      'nats': nats.mean(),
      'windows': len(starts),
      'nats_in_windows': np.mean(inside),
      'seconds_count': counted - begin,
      'seconds_score': time.monotonic() - counted,
    }
    print(
      f'Kneser-Ney {_ORDER.value}-gram of {len(train.tokens):,} tokens: '
      f'{result["nats"]:.4f} nats a held-out token, '
      f'{result["nats_in_windows"]:.4f} in the windows of the position suite'
    )
    return result


def read_losses(paths: list[str]):
  """Losses by position of other runs of this launcher."""
  from glm_jax.evaluation import PositionLosses

  found = []
  for path in paths:
    try:
      content = json.loads(epath.Path(path).expanduser().read_text())
      found.append(PositionLosses.from_json(content['position']['losses']))
    except (json.JSONDecodeError, KeyError, TypeError):
      raise cli.UserError(
        f'{path} holds no position suite of this launcher'
      ) from None
  return found


def compare(ours, theirs) -> list[dict]:
  """Prints and returns differences of losses, one of each for every seed."""
  from glm_jax.evaluation import paired_difference

  rows = paired_difference(ours, theirs)
  print(f'loss above that of {",".join(_AGAINST.value)}, window by window')
  names = dict(error_windows='s.e.', error_seeds='s.e. (seeds)')
  _table(rows, 'position', difference='nats', **names, upper_share='upper')
  return rows


def sha256_of(file) -> str:
  """Checksum of a token file's ids."""
  about = (file.path.parent / f'{file.path.name}.json').read_text()
  return json.loads(about)['sha256']['bin']


def _table(rows, place: str, **columns: str):
  """Rows of buckets with some of their columns, under new names."""
  heads = ''.join(f'{name:>13}' for name in columns.values())
  print(f'  {place:>15}{heads}')
  for row in rows:
    cells = ''.join(f'{_cell(row[key]):>13}' for key in columns)
    print(f'  {row["from"]:>7,}-{row["to"]:<7,}{cells}')


def _cell(value) -> str:
  if value is None:
    return '-'
  return f'{value:,}' if isinstance(value, int) else f'{value:.4f}'


def draw(result: dict, directory: epath.Path, topk: int | None):
  """Pictures of the suites that have one."""
  from glm_jax.evaluation import plots

  name = result['model'] or 'glm-nano'
  if 'position' in result:
    plots.plot_positions(
      {name: result['position']['by_position']},
      directory / 'loss_by_position.png',
      topk=topk,
    )
  if 'needles' in result:
    plots.plot_needles(
      {name: result['needles']['by_distance']},
      directory / 'needles.png',
      topk=topk,
    )
  if 'overlap' in result:
    plots.plot_overlap(result['overlap'], directory / 'overlap.png')


def main() -> None:
  if _RESULTS.value:
    if not _AGAINST.value:
      raise cli.UserError('--results needs --against: files to compare with')
    rows = compare(read_losses(_RESULTS.value), read_losses(_AGAINST.value))
    if _JSON.value:
      cli.write_json(_JSON.value, cli.origin() | {'against': rows})
    return
  if not _CORPUS.value:
    raise cli.UserError('--corpus=DIR is needed; --help shows an example')
  suites = wanted_suites()
  evaluation = Evaluation(suites)
  result = cli.origin() | {
    'machine': cli.machine(),
    'model': _MODEL.value,
    'selection': _SELECTION.value,
    'share_index': _SHARE_INDEX.value,
  }
  for name in suites:
    begin = time.monotonic()
    result[name] = getattr(evaluation, name)()
    cli.log(f'{name}: {time.monotonic() - begin:.1f} s')
    if _JSON.value:  # After each, so that a stop loses one suite at most.
      cli.write_json(_JSON.value, result)
  if _PLOTS.value:
    draw(result, epath.Path(_PLOTS.value).expanduser(), evaluation.topk)


if __name__ == '__main__':
  cli.run(main)
