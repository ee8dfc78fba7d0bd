"""Probes and the passes that score them."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import jax
import numpy as np
import pytest
import small_models
from absl.testing import absltest, parameterized
from etils import epath

from glm_jax import evaluation, forward
from glm_jax.checkpoints import save_published
from glm_jax.config import FULL
from glm_jax.data import (
  TokenFile,
  TokenWriter,
  pairs,
  train_tokenizer,
  write_tokenizer,
)
from glm_jax.data.sources import sha256
from glm_jax.evaluation import by_position, scoring
from glm_jax.model import abstract_model
from glm_jax.text import Tokenizer
from glm_jax.training.parameters import Layout

ROOT = pathlib.Path(__file__).resolve().parents[1]
VOCAB = 1200
LENGTH = 400  # not a whole number of pages
# Compilation is what these tests spend their time on.
quick = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)


def setUpModule():
  plain = scoring._hidden.__wrapped__
  scoring._hidden = quick(plain, static_argnames='options')


@functools.cache
def texts():
  """Made-up code: lines of a few words of a small language."""
  rng = np.random.default_rng(0)
  letters = list('abcdefghijklmnopqrstuvwxyz')
  words = [''.join(rng.choice(letters, rng.integers(4, 8))) for _ in range(300)]
  forms = ('{} = {}\n', '  {}({}, {})\n', 'def {}({}):\n', '# {} {} {}.\n')
  line = lambda: str(rng.choice(forms)).format(*rng.choice(words, 3))
  return [''.join(line() for _ in range(400)) for _ in range(4)]


@functools.cache
def backend():
  return train_tokenizer(texts(), VOCAB)


@functools.cache
def tokenizer():
  return Tokenizer(backend())


@functools.cache
def documents():
  return [np.asarray(tokenizer().encode(text)) for text in texts()]


@functools.cache
def code_model():
  """A model with the tokenizer's vocabulary; top-k 8 of 32 index heads."""
  config = small_models.small_config(0, vocab_size=VOCAB)  # FS
  assert config.indexer.num_heads == 32 and config.indexer.topk == 8
  layout = Layout(config)  # Its initialisation compiles faster.
  return layout.model(layout.init(0), 'float32')


class NeedleTest(parameterized.TestCase):
  def test_contexts_state_and_ask(self):
    made = evaluation.needle(
      tokenizer(), documents(), 3, count=20, length=700, nearest=40
    )
    assert made.tokens.shape == (20, 700)
    assert made.distances.min() >= 40
    assert made.distances.max() > 400
    for ids, size, distance in zip(
      made.tokens, made.value_sizes, made.distances
    ):
      answer = ids[-size:]
      np.testing.assert_array_equal(ids[-size - distance :][:size], answer)
      text = tokenizer().decode(ids.tolist())
      question = text.rsplit('\n', 1)[1]
      name, value = question.split(" = '")
      assert len(value) == size and value.isdigit()
      # Stated once, on a line of its own, and asked for once.
      assert text.count(name) == 2
      assert f"\n{question}'\n" in '\n' + text

  def test_the_seed_decides(self):
    make = lambda seed: evaluation.needle(
      tokenizer(), documents(), seed, count=4, length=600, nearest=40
    )
    np.testing.assert_array_equal(make(1).tokens, make(1).tokens)
    assert (make(1).tokens != make(2).tokens).any()

  def test_impossible_contexts_are_refused(self):
    make = functools.partial(evaluation.needle, tokenizer(), documents(), 0)
    with pytest.raises(ValueError, match='nearest=900'):
      make(length=800, nearest=900)
    with pytest.raises(ValueError, match='longest of'):
      make(length=1 << 20)
    with pytest.raises(ValueError, match='does not fit'):
      evaluation.copy(tokenizer(), documents(), 0, length=300)

  def test_copies_stand_twice(self):
    made = evaluation.copy(
      tokenizer(), documents(), 5, count=20, length=700, span=32, nearest=40
    )
    assert made.tokens.shape == (20, 700)
    assert 40 <= made.distances.min() < 80
    assert 400 < made.distances.max() <= 700 - 32
    for ids, first, distance in zip(made.tokens, made.first, made.distances):
      span = ids[-32:]
      np.testing.assert_array_equal(ids[first : first + 32], span)
      assert first + distance == 700 - 32


class RecallTest(parameterized.TestCase):
  def test_documents_restate_pairs(self):
    made = evaluation.recall_documents(
      tokenizer(), texts(), 0, 6, length=900, pairs=6
    )
    assert made.shape == (6, 900) and made.dtype == np.int32
    source = pairs.PairSource(tokenizer(), 0, pairs.TRAINING, pairs.FORMS)
    distances = []
    for ids in made:
      text = '\n' + tokenizer().decode(ids.tolist())
      for pair, _ in zip(source, range(6)):
        line = '\n' + tokenizer().decode(pair.line.tolist())
        assert text.count(line) == 2, line
        distances.append(text.rindex(line) - text.index(line))
    assert min(distances) < 400 and max(distances) > 1500

  def test_training_never_sees_a_probe(self):
    draw = lambda domain: [
      pair
      for pair, _ in zip(
        pairs.PairSource(tokenizer(), 0, domain, pairs.FORMS[:1]), range(300)
      )
    ]
    probe, training = draw(pairs.PROBE), draw(pairs.TRAINING)
    for field in ('name', 'value'):
      ours = {getattr(p, field) for p in probe}
      assert not ours & {getattr(p, field) for p in training}
    assert len({p.name for p in training}) == 300

  def test_too_many_pairs_are_refused(self):
    with pytest.raises(ValueError, match='pairs=60'):
      evaluation.recall_documents(
        tokenizer(), documents(), 0, 1, length=900, pairs=60
      )

  def test_a_value_that_shares_a_token_is_refused(self):
    form = "{name} = '{value}'\n"
    assert pairs.encode_pair(tokenizer(), form, 'a', '4711') is not None
    encode = tokenizer().encode
    word = next(w for w in pairs.words(tokenizer()) if len(encode(w)) == 1)
    form, halves = '{name}{value}\n', (word[:2], word[2:])
    assert pairs.encode_pair(tokenizer(), form, *halves) is None


class ScoreTest(parameterized.TestCase):
  @parameterized.parameters('share', 'dense')
  def test_equals_inference(self, selection):
    """Six contexts in batches of four, places at both ends."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (6, LENGTH))
    places = np.sort(rng.integers(1, LENGTH, (6, 7)))
    places[:, 0], places[:, -1] = 1, LENGTH - 1
    model = code_model()
    ours = scoring.score_tokens(
      model, tokens, places, selection=selection, batch=4
    )
    if selection == 'dense':
      model = _with_config(model, topk=LENGTH)
    logits = _logits(model, tokens)
    b = np.arange(6)[:, None]
    there = logits[b, places - 1]
    wanted = -jax.nn.log_softmax(there)[b, np.arange(7), tokens[b, places]]
    np.testing.assert_allclose(ours.nats, wanted, atol=2e-5)
    np.testing.assert_array_equal(ours.greedy, there.argmax(-1))

  def test_window_nats_are_those_of_every_row(self):
    tokens = np.random.default_rng(1).integers(0, VOCAB, (4, 448))
    windows = scoring.whole_windows(tokens)
    options = scoring.eval_options(code_model().config, 'share', 448)
    nats, mask = scoring.window_nats(code_model(), windows, options)
    np.testing.assert_array_equal(mask, np.arange(448) < 447 + np.zeros((4, 1)))
    places = np.tile(np.arange(1, 448), (4, 1))
    one = scoring.score_tokens(code_model(), tokens, places, batch=4)
    np.testing.assert_allclose(nats[:, :-1], one.nats, atol=1e-5)

  def test_per_layer_needs_an_indexer_in_every_layer(self):
    with pytest.raises(ValueError, match='indexer in every layer'):
      scoring.eval_options(small_models.small_config(0), 'per_layer', 64)
    full = small_models.small_config(
      0, indexer_types=(FULL,) * 2, mlp_types=('dense', 'sparse')
    )
    assert scoring.eval_options(full, 'per_layer', 64).sparse
    with pytest.raises(ValueError, match='must be one of'):
      scoring.eval_options(full, 'shared', 64)

  def test_needles_are_judged_by_every_value_token(self):
    made = evaluation.needle(
      tokenizer(), documents(), 0, count=6, length=LENGTH, nearest=20
    )
    result = evaluation.score_needles(code_model(), made, batch=4)
    assert result['count'] == 6 and result['found'] == 0
    assert sum(r['count'] for r in result['by_distance']) == 6
    assert result['nats'] > 4
    # A model that always answers right, but for one token of one needle.
    right = np.array(made.tokens[:, -made.value_sizes.max() :])
    right[2, -1] += 1
    right[4, 0] += made.value_sizes[4] < right.shape[1]
    scores = scoring.Scores(right, np.zeros(right.shape))
    with _answering(scores):
      result = evaluation.score_needles(None, made)
    assert result['each'] == [True, True, False, True, True, True]
    assert result['share'] == 5 / 6

  def test_copies_are_compared_with_the_first(self):
    made = evaluation.copy(
      tokenizer(), documents(), 0, count=4, length=LENGTH, span=24, nearest=30
    )
    greedy = np.zeros((4, 2, 16), np.int32)
    greedy[:, 1] = made.tokens[:, -16:]
    greedy[0, 1, 0] += 1
    nats = np.stack([np.full((4, 16), 3.0), np.full((4, 16), 0.5)], 1)
    scores = scoring.Scores(greedy.reshape(4, -1), nats.reshape(4, -1))
    with _answering(scores):
      result = evaluation.score_copies(None, made)
    assert result['first_nats'] == 3 and result['copy_nats'] == 0.5
    assert result['copy_accuracy'] == 63 / 64
    assert result['first_accuracy'] < 0.2
    real = evaluation.score_copies(code_model(), made, batch=4)
    assert real['count'] == 4
    assert abs(real['first_nats'] - np.log(VOCAB)) < 3


class PositionTest(parameterized.TestCase):
  def test_windows_are_whole_stretches_of_documents(self):
    file = _token_file([np.arange(90), np.arange(100, 165), np.arange(20)])
    made = by_position.full_windows(file, 64)
    # The second document has the token behind its window, the third no window.
    np.testing.assert_array_equal(made[:, 0], [0, 100])
    np.testing.assert_array_equal(made[:, -1], [64, 164])
    assert len(by_position.full_windows(file, 16, 3)) == 3
    with pytest.raises(ValueError, match='more than 128 tokens'):
      by_position.full_windows(file, 128)

  def test_buckets_hold_the_means_of_their_rows(self):
    rng = np.random.default_rng(0)
    windows = rng.integers(0, VOCAB, (5, 449)).astype(np.int32)
    made = by_position.losses_by_position(
      code_model(), windows, batch=4, edges=(0, 1, 50, 448)
    )
    b, rows = np.arange(5)[:, None], np.arange(448)
    logits = _logits(code_model(), windows[:, :-1])
    nats = -jax.nn.log_softmax(logits)[b, rows, windows[:, 1:]]
    nats = np.asarray(nats)
    wanted = [nats[:, :1], nats[:, 1:50], nats[:, 50:]]
    wanted = np.stack([x.mean(1) for x in wanted], 1)
    np.testing.assert_allclose(made.nats, wanted, atol=1e-5)
    np.testing.assert_allclose(made.loss, nats.mean(), atol=1e-5)
    for row, nats in zip(made.rows(), wanted.T):
      np.testing.assert_allclose(row['nats'], nats.mean(), atol=1e-5)
      error = nats.std(ddof=1) / 5**0.5
      np.testing.assert_allclose(row['standard_error'], error, atol=1e-5)
    again = by_position.PositionLosses.from_json(
      json.loads(
        json.dumps(dataclasses.asdict(made), default=np.ndarray.tolist)
      )
    )
    np.testing.assert_array_equal(again.nats, made.nats)
    assert again.rows() == made.rows()

  def test_default_edges(self):
    edges = by_position.bucket_edges(8192)
    assert edges[:6] == (0, 64, 128, 256, 512, 1024)
    assert edges[6:] == (1536, 2048, 3072, 4096, 6144, 8192)

  def test_paired_differences_cancel_what_windows_share(self):
    rng = np.random.default_rng(0)
    text = 10 * rng.random((40, 1))
    noise = lambda: 0.01 * rng.standard_normal((40, 2))
    make = lambda nats: by_position.PositionLosses(
      (0, 1, 2), nats, np.ones(2), 'w', 'share'
    )
    theirs = [make(text + noise()) for _ in range(3)]
    ours = [make(x.nats + [0.1, -0.2] + noise()) for x in theirs]
    rows = by_position.paired_difference(ours, theirs)
    np.testing.assert_allclose(
      [r['difference'] for r in rows], [0.1, -0.2], atol=5e-3
    )
    each = [o.nats[:, 0] - t.nats[:, 0] for o, t in zip(ours, theirs)]
    first = rows[0]
    error = np.mean(each, 0).std(ddof=1) / 40**0.5
    np.testing.assert_allclose(first['error_windows'], error)
    error = np.mean(each, 1).std(ddof=1) / 3**0.5
    np.testing.assert_allclose(first['error_seeds'], error)
    larger = max(first['error_windows'], first['error_seeds'])
    np.testing.assert_allclose(first['upper'], first['difference'] + 2 * larger)
    one = by_position.paired_difference(ours[:1], theirs[:1])[0]
    assert one['error_seeds'] is None and one['upper'] > one['difference']
    other = dataclasses.replace(ours[0], windows='v')
    with pytest.raises(ValueError, match='cannot be paired'):
      by_position.paired_difference([other], theirs[:1])
    with pytest.raises(ValueError, match='1 runs'):
      by_position.paired_difference(ours[:1], theirs)


class LaunchTest(parameterized.TestCase):
  def test_every_suite_writes_its_result(self):
    folder = _corpus()
    save_published(code_model(), code_model().config, folder / 'model')
    result = folder / 'result.json'
    flags = ['--suite=all', '--length=192', '--count=6', '--windows=4']
    flags += ['--overlap_windows=1', '--batch=4', '--model=model', '--order=3']
    done = _launch(folder, *flags, '--json=result.json', '--plots=plots')
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert found['command'].startswith('python launch/evaluate.py --')
    assert found['needles']['count'] == found['copy']['count'] == 6
    assert min(found['needles']['distances']) > 8
    assert len(found['position']['losses']['nats']) == 4
    assert {r['kind'] for r in found['overlap']} == {'neighbours', 'tile'}
    ngram = found['ngram']
    held_out = TokenFile(folder / 'held_out')
    oracle = evaluation.KneserNey(TokenFile(folder / 'train'), VOCAB, 3)
    nats = oracle.nats(held_out)
    np.testing.assert_allclose(ngram['nats'], nats.mean())
    starts = by_position.window_starts(held_out, 192, 4)
    inside = [nats[a + 1 : a + 193].mean() for a in starts]
    np.testing.assert_allclose(ngram['nats_in_windows'], np.mean(inside))
    # It has learnt this little language, the random model has not.
    assert ngram['nats'] + 1 < found['position']['loss']
    pictures = sorted(p.name for p in (folder / 'plots').iterdir())
    assert pictures == ['loss_by_position.png', 'needles.png', 'overlap.png']
    for line in ('needles found: ', 'copied spans: ', 'Kneser-Ney 3-gram'):
      assert line in done.stdout
    self._against_itself(folder, flags)

  def _against_itself(self, folder, flags):
    flags = [*flags[1:], '--suite=position', '--against=result.json']
    done = _launch(folder, *flags, '--json=again.json')
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / 'again.json').read_text())
    rows = found['position']['against']
    assert all(row['difference'] == row['upper'] == 0 for row in rows)
    again, first = ['again.json'] * 2, ['result.json'] * 2
    done = _launch(
      folder,
      f'--results={",".join(again)}',
      f'--against={",".join(first)}',
      '--json=pairs.json',
    )
    assert done.returncode == 0, done.stderr
    pairs_found = json.loads((folder / 'pairs.json').read_text())['against']
    assert [row['error_seeds'] for row in pairs_found] == [0] * len(rows)

  @parameterized.parameters(
    (('--suite=needle',), 'needle must be some of'),
    (('--suite=ngram', '--length=100000'), 'no document of'),
    (
      ('--suite=copy', '--model=nowhere'),
      "no such directory or file: 'nowhere'",
    ),
    (('--suite=ngram', '--corpus=nowhere'), 'is not a directory'),
    (('--results=a.json',), 'needs --against'),
  )
  def test_bad_input_is_one_line(self, flags, message):
    done = _launch(_corpus(), *flags)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count('\n') == 1, done.stderr


@functools.cache
def _corpus():
  """A corpus as prepare_data.py writes it; the last text is held out."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='corpus_'))
  write_tokenizer(backend(), folder / 'tokenizer')
  digest = sha256(epath.Path(folder / 'tokenizer' / 'tokenizer.json'))
  for name, some in (
    ('train', documents()[:-1]),
    ('held_out', documents()[-1:]),
  ):
    with TokenWriter(folder / name, VOCAB, digest) as writer:
      for ids in some:
        writer.add(ids)
  return folder


def _launch(folder, *flags):
  program = str(ROOT / 'launch' / 'evaluate.py')
  quick_flags = '--xla_backend_optimization_level=0'
  return subprocess.run(
    [sys.executable, program, '--corpus=.', *flags],
    cwd=folder,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': quick_flags},
    capture_output=True,
    text=True,
  )


def _token_file(documents):
  folder = pathlib.Path(tempfile.mkdtemp(prefix='tokens_'))
  with TokenWriter(folder / 'file', 96 * 3, 'ab' * 32) as writer:
    for ids in documents:
      writer.add(ids)
  return TokenFile(folder / 'file')


def _with_config(model, **indexer):
  """The same parameters under another configuration of equal shapes."""
  indexer = dataclasses.replace(model.config.indexer, **indexer)
  other = abstract_model(dataclasses.replace(model.config, indexer=indexer))
  return jax.tree.structure(other).unflatten(jax.tree.leaves(model))


def _logits(model, tokens):
  """Of inference, in one program for a few contexts; padded behind."""
  tokens = np.pad(tokens, ((0, 0), (0, 448 - tokens.shape[1])))
  return np.concatenate([_forward(model, row[None]) for row in tokens])


@quick
def _forward(model, tokens):
  return forward(model, tokens).logits


def _answering(scores):
  return mock.patch.object(scoring, 'score_tokens', lambda *a, **k: scores)


if __name__ == '__main__':
  absltest.main()
