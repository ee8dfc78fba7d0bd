"""Tokenizer training, token files and batches; corpora: corpus_test.py."""

import contextlib

import numpy as np
import pytest
import tokenizers

from glm_jax import data
from glm_jax.data import tokenizer_training
from glm_jax.data.token_batches import permuted
from glm_jax.text import Tokenizer

HASH = 'ab' * 32
SPECIAL = (
  *tokenizer_training.CONTROL_TOKENS,
  *tokenizer_training.MARKUP_TOKENS,
)


@contextlib.contextmanager
def raises(words):
  """Expects a ValueError of one line that holds each of `words`."""
  with pytest.raises(ValueError) as caught:
    yield
  message = str(caught.value)
  assert [w for w in words.split('|') if w not in message] == [], message
  assert '\n' not in message


def source_text(name, lines=40):
  """Python-like text that no other name gives."""
  rows = [f'def {name}_{i}(x, y):\n  return x * {i} + y' for i in range(lines)]
  return '\n\n'.join([f'"""Functions of {name}."""', *rows]) + '\n'


@pytest.fixture(scope='module')
def backend():
  texts = [source_text(f'f{i}') for i in range(20)]
  return data.train_tokenizer(texts, 300)


@pytest.fixture(scope='module')
def directory(backend, tmp_path_factory):
  path = tmp_path_factory.mktemp('tokenizer')
  data.write_tokenizer(backend, path)
  return path


# Tokenizer.


def test_any_text_round_trips(directory):
  tokenizer = Tokenizer.load(directory)
  rng = np.random.default_rng(0)
  texts = [
    ''.join(map(chr, range(0x3000))),
    bytes(range(256)).decode('latin-1') + '\r\n\t  \n 12345 \U0010ffff 👩‍🚀',
    *(bytes(rng.integers(0, 256, 500)).decode('cp437') for _ in range(20)),
  ]
  for text in texts:
    assert tokenizer.decode(tokenizer.encode(text), False) == text
  ids = tokenizer.encode('x = 2026')
  assert [tokenizer.decode([i]) for i in ids[-4:]] == [*'2026']


def test_special_tokens_are_single_ids_at_the_end(directory, backend):
  tokenizer = Tokenizer.load(directory)
  assert tokenizer.vocab_size == 300
  ids = tokenizer.encode(''.join(SPECIAL))
  assert ids == list(range(300 - len(SPECIAL), 300))
  # The published distances: end of text, user, observation.
  eos = [backend.token_to_id(t) for t in tokenizer_training.EOS_TOKENS]
  assert [i - eos[0] for i in eos] == [0, 7, 9]
  markup = ''.join(tokenizer_training.MARKUP_TOKENS)
  assert tokenizer.decode(ids) == markup
  prompt = tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}])
  start = [backend.token_to_id(t) for t in ('[gMASK]', '<sop>', '<|system|>')]
  assert tokenizer.encode(prompt)[:3] == start


def test_training_is_deterministic(backend):
  texts = [source_text(f'f{i}') for i in range(20)]
  again = data.train_tokenizer(reversed(texts), 300)
  assert again.to_str() == backend.to_str()
  with raises('vocab_size=100|at least'):
    data.train_tokenizer(texts, 100)


def test_other_libraries_read_the_tokenizer(directory, backend):
  transformers = pytest.importorskip('transformers')
  text = '<|user|>x = 12 <think> é\n\n  y'
  for kind in transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast:
    theirs = kind.from_pretrained(directory)
    assert theirs(text).input_ids == backend.encode(text).ids
    assert theirs.decode(theirs(text).input_ids) == text
    assert theirs.eos_token == theirs.pad_token == '<|endoftext|>'
    messages = [{'role': 'user', 'content': 'x'}]
    ours = Tokenizer.load(directory).apply_chat_template(messages)
    assert ours == theirs.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=True
    )


def test_text_never_becomes_a_special_token(directory, backend):
  encoder = tokenizer_training.TextEncoder(directory / 'tokenizer.json')
  text = 'a ' + ' '.join(SPECIAL) + source_text('b')
  files = [('p/[gMASK].py', text), ('p/b.py', source_text('c'))]
  first, second = encoder.encode_documents([files, files[1:]])
  name = {i: backend.id_to_token(i) for i in range(300)}
  special = [name[i] for i in first if name[i] in SPECIAL]
  assert (
    special == '[gMASK] <sop> <|file_sep|> <|file_sep|> <|endoftext|>'.split()
  )
  whole = ''.join(f'<|file_sep|>{p}\n{t}' for p, t in files)
  assert backend.decode(first, skip_special_tokens=False) == (
    f'[gMASK]<sop>{whole}<|endoftext|>'
  )
  # Where a text has no special tokens, nothing else is different.
  assert second[3:-1] == backend.encode(f'p/b.py\n{files[1][1]}').ids
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  (directory / 'bare.json').write_text(tokenizer.to_str())
  with raises('bare.json lacks [gMASK]'):
    tokenizer_training.TextEncoder(directory / 'bare.json')


# Token files.


def write_tokens(path, lengths, vocab_size=6144):
  """Documents of the numbers 1, 2, 3, .. so that each token is unlike all."""
  with data.TokenWriter(path, vocab_size, HASH) as writer:
    start = 1
    for length in lengths:
      writer.add(np.arange(start, start + length))
      start += length
  return data.TokenFile(path)


@pytest.mark.parametrize('vocab_size, size', [(65536, 2), (65537, 4)])
def test_token_file(tmp_path, vocab_size, size):
  file = write_tokens(tmp_path / 'a.b', [3, 1, 5], vocab_size)
  assert (tmp_path / 'a.b.bin').stat().st_size == 9 * size
  assert len(file) == 3 and file.document(2).tolist() == [5, 6, 7, 8, 9]
  assert isinstance(file.tokens, np.memmap)
  for name in 'a.b.bin', 'a.b.json':
    assert len(data.TokenFile(tmp_path / name, tokenizer_sha256=HASH)) == 3
  assert not list(tmp_path.glob('*.tmp'))
  with raises('index=3'):
    file.document(3)


def test_a_failed_writer_leaves_the_old_file(tmp_path):
  write_tokens(tmp_path / 't', [4])
  for ids, words in [
    ([5, 6144], 'document 1|5 to 6144|6144'),
    ([-1], '-1'),
    ([], 'at least one'),
    ([0.5], 'float64'),
  ]:
    with raises(words):
      with data.TokenWriter(tmp_path / 't', 6144, HASH) as writer:
        writer.add([1])
        writer.add(ids)
  assert data.TokenFile(tmp_path / 't').tokens.tolist() == [1, 2, 3, 4]
  assert not list(tmp_path.glob('*.tmp'))


def test_bad_token_files_are_refused(tmp_path):
  path = tmp_path / 't'
  write_tokens(path, [4, 3])
  with raises('made with tokenizer abab|not with cdcd|again'):
    data.TokenFile(path, tokenizer_sha256='cd' * 32)
  good = {s: (tmp_path / f't.{s}').read_bytes() for s in ('bin', 'idx', 'json')}
  for suffix, content, words in [
    ('bin', good['bin'][:-1], 't.bin has 13 bytes, 14 expected'),
    ('idx', good['idx'] + b'1', 't.idx has 25 bytes, 24 expected'),
    ('bin', b'1' + good['bin'][1:], 't.bin was altered'),
    ('idx', b'1' + good['idx'][1:], 't.idx was altered'),
    ('bin', None, 't.bin has 0 bytes'),
    ('json', b'{"format": "x"}', 't.json does not describe'),
    ('json', b'[', 't.json does not describe'),
    ('json', b'[]', 't.json does not describe'),
    ('json', None, 't.json is missing'),
  ]:
    part = tmp_path / f't.{suffix}'
    part.unlink() if content is None else part.write_bytes(content)
    with raises(words):
      data.TokenFile(path)
    part.write_bytes(good[suffix])
  data.TokenFile(path)


# Batches.

LENGTHS = (700, 1, 64, 65, 256, 63, 130, 512, 3, 200, 129)


@pytest.fixture
def file(tmp_path):
  return write_tokens(tmp_path / 't', LENGTHS)


def owners(file):
  """Document of each token; token 0 is none."""
  return np.repeat(np.arange(len(file) + 1), [1, *np.diff(file.offsets)])


@pytest.mark.parametrize('window', [64, 256, 1024])
@pytest.mark.parametrize('lookahead', [1, 4])
def test_segments(file, window, lookahead):
  batches = data.TokenBatches(
    file, batch_size=3, window=window, lookahead=lookahead
  )
  batch = batches.windows(range(batches.num_windows))
  total = sum(LENGTHS)
  assert batch.tokens.shape == (batches.num_windows, window + lookahead)
  assert batch.tokens.dtype == batch.segment_ids.dtype == np.int32
  rows = batch.tokens[:, :window][batch.row_mask]
  assert sorted(rows.tolist()) == list(range(1, total + 1))
  assert not batch.tokens[batch.segment_ids == 0].any()
  owner = owners(file)
  for tokens, ids, positions in zip(
    batch.tokens, batch.segment_ids, batch.positions
  ):
    for segment in range(1, ids.max() + 1):
      (places,) = np.nonzero(ids == segment)
      assert places[0] % 64 == 0
      assert (np.diff(places) == 1).all() and (
        np.diff(tokens[places]) == 1
      ).all()
      assert len(set(owner[tokens[places]])) == 1
      assert positions[places].tolist() == list(range(len(places)))
      if places[-1] >= window:  # Look-ahead only for whole windows.
        assert segment == 1 and places[0] == 0
  # Each token but the first `distance` of a document is a target once.
  for distance in range(1, lookahead + 1):
    targets, counts = batch.targets(distance)
    assert (targets - batch.tokens[:, :window] == distance)[counts].all()
    later = np.arange(1, total + 1) - file.offsets[owner[1:] - 1]
    wanted = np.arange(1, total + 1)[later > distance]
    assert sorted(targets[counts].tolist()) == wanted.tolist()
  with raises('distance=5'):
    batch.targets(5)


def test_rests_share_windows(file):
  batches = data.TokenBatches(file, batch_size=1, window=256)
  pages = sum(-(-(n % 256) // 64) for n in LENGTHS)
  whole = sum(n // 256 for n in LENGTHS)
  assert batches.num_windows - whole <= -(-pages // 4) + 1


@pytest.mark.parametrize('batch_size', [1, 4, 7, 50])
def test_every_epoch_deals_each_token_once(file, batch_size):
  batches = data.TokenBatches(file, batch_size=batch_size, window=128, seed=3)
  epochs = 4
  dealt = [
    (batch.tokens[row, :128][batch.row_mask[row]]).tolist()
    for step in range(epochs * batches.steps_per_epoch)
    for batch in [batches.batch(step)]
    for row in range(batch_size)
  ]
  size = batches.num_windows
  orders = [dealt[e * size : (e + 1) * size] for e in range(epochs)]
  for order in orders:
    assert sorted(sum(order, [])) == list(range(1, sum(LENGTHS) + 1))
  assert orders[0] != orders[1] != orders[2]


def test_a_batch_depends_on_seed_and_step_only(file):
  make = lambda seed: data.TokenBatches(
    file, batch_size=4, window=128, seed=seed, lookahead=2
  )
  through = make(1)
  run = [through.batch(step) for step in range(12)]
  for step in (11, 2, 7):
    resumed = make(1).batch(step)
    for name in ('tokens', 'segment_ids', 'positions'):
      want = getattr(run[step], name)
      np.testing.assert_array_equal(getattr(resumed, name), want)
  assert (make(2).batch(0).tokens != run[0].tokens).any()
  # The order is part of what a run means: it may never change.
  order = permuted(np.arange(10), 10, '0 0').tolist()
  assert order == [6, 4, 7, 3, 8, 0, 9, 2, 5, 1]


@pytest.mark.parametrize('size', [1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097])
def test_permutations(size):
  results = [permuted(np.arange(size), size, f'{k} 0') for k in range(9)]
  for result in results:
    assert sorted(result.tolist()) == list(range(size))
  if size >= 63:
    fixed = np.mean([np.mean(r == np.arange(size)) for r in results])
    assert fixed < 0.1 and len({r.tobytes() for r in results}) == 9


@pytest.mark.parametrize(
  'settings, words',
  [
    ({'window': 100}, 'window=100|64'),
    ({'window': 0}, 'window=0'),
    ({'batch_size': 0}, 'batch_size=0'),
    ({'lookahead': 0}, 'lookahead=0'),
  ],
)
def test_bad_batches_are_refused(file, settings, words):
  with raises(words):
    data.TokenBatches(file, **{'batch_size': 1, 'window': 64, **settings})
  batches = data.TokenBatches(file, batch_size=1, window=64)
  with raises('step=-1'):
    batches.batch(-1)
  with raises('must be in [0, '):
    batches.windows([batches.num_windows])
