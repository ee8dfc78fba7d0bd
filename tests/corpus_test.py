"""From packages or a folder to a corpus and token files, and the command."""

import contextlib
import hashlib
import io
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest
from etils import epath

from glm_jax import data
from glm_jax.data import corpus, preparation, sources
from glm_jax.text import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[1]


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
  rows = [
    f'def {name}_number_{i}(x, y):\n  return {name}_other(x * {i}, axis=y)'
    for i in range(lines)
  ]
  return '\n\n'.join([f'"""Functions of {name}."""', *rows]) + '\n'


def write_folder(folder, names):
  for name in names:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source_text(path.stem))
  return folder


@pytest.mark.parametrize(
  'path, content, reason',
  [
    ('a.py', source_text('a'), None),
    ('a.py', 'x = 1\n', 'too short'),
    ('LICENSE.txt', source_text('a'), 'licence or list of names'),
    ('a.py', source_text('a').encode('utf-16'), 'not UTF-8'),
    ('a.py', source_text('a') + '\0', 'not text'),
    ('a.rst', 'привет мир\n' * 50, 'not English'),
    ('a.txt', '3.14159 2.71828 1.4142\n' * 50, 'numbers'),
    ('a.py', source_text('a') + 'x' * 1001, 'long lines'),
    ('a.py', '# DO NOT EDIT\n' + source_text('a'), 'generated'),
    (
      'a.py',
      source_text('a') + '# GNU Lesser General\tPublic License\n',
      'names another licence',
    ),
  ],
)
def test_filters(path, content, reason):
  content = content.encode() if isinstance(content, str) else content
  assert corpus.reason_to_drop(path, content) == reason


def collect(files, **settings):
  source = sources.Source('folder', 'x', path='x')
  collector = corpus.Collector(sources.Recipe((source,), **settings))
  collector.add('x', [(p, t.encode()) for p, t in sorted(files.items())])
  return collector, collector.documents()


@pytest.mark.parametrize('share, whole', [(0.6, True), (0.2, False)])
def test_split_and_documents(share, whole):
  """Small directories stay together, sizeable ones go file by file."""
  files = {
    f'x/{d:02d}/{f}.py': source_text(f'd{d:02d}f{f}')
    for d in range(30)
    for f in range(3)
  }
  files['x/copy.py'] = files['x/07/1.py'].replace('\n', '\r\n')
  limit = 4 * len(files['x/07/1.py'])
  collector, split = collect(files, held_out_share=share, document_bytes=limit)
  assert collector.dropped['duplicate'] == 1
  paths = {s: [p for d in split[s] for p, _ in d.files] for s in split}
  assert sorted(paths['train'] + paths['held_out']) == sorted(files)[:-1]
  assert share - 0.05 < len(paths['held_out']) / 90 <= share
  folders = [{p.split('/')[1] for p in paths[s]} for s in split]
  assert folders[0].isdisjoint(folders[1]) == whole
  for name, documents in split.items():
    assert paths[name] == sorted(paths[name])
    assert len(documents) == -(-len(paths[name]) // 4)
    for document in documents:
      assert sum(len(text) for _, text in document.files) <= limit


def test_held_out_files_are_unlike_training():
  files = {f'x/{i}/a.py': source_text(f'n{i}') for i in range(40)}
  _, split = collect(files, held_out_share=0.2)
  path, text = split['held_out'][0].files[0]
  files['x/copy.py'] = f'# Changed a little.\n{text}'
  collector, split = collect(files, held_out_share=0.2)
  paths = {s: {p for d in split[s] for p, _ in d.files} for s in split}
  assert collector.dropped['held out, but like training'] == 1
  assert path not in paths['held_out'] and 'x/copy.py' in paths['train']


def test_too_little_text_is_an_error():
  with raises('no held_out text is left of 1 files'):
    collect({'x/a.py': source_text('a')})
  _, split = collect({f'x/{n}.py': source_text(n) for n in 'ab'})
  assert [len(split[s]) for s in split] == [1, 1]


def make_archives(folder):
  """A source archive and a wheel, each with a file that must not be read."""
  names = ['b.py', 'a/c.py', '_vendor/d.py', 'e.bin', 'docs/no.rst']
  with tarfile.open(folder / 'p-1.tar.gz', 'w:gz') as archive:
    for name in names:
      content = source_text(name.replace('/', '_')).encode()
      member = tarfile.TarInfo(f'p-1/{name}')
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))
  with zipfile.ZipFile(folder / 'q-1.whl', 'w') as archive:
    archive.writestr('q/z.py', source_text('z'))
    archive.writestr('q-1.dist-info/top_level.txt', source_text('meta'))
  return [
    {
      'kind': kind,
      'name': name[0],
      'version': '1',
      'file': name,
      'licence': 'MIT',
      'sha256': hashlib.sha256((folder / name).read_bytes()).hexdigest(),
      'exclude': ['*/no.*'],
    }
    for kind, name in [('sdist', 'p-1.tar.gz'), ('wheel', 'q-1.whl')]
  ]


def test_recipe(tmp_path):
  downloads = tmp_path / 'downloads'
  downloads.mkdir()
  content = {'about': 'x', 'sources': make_archives(downloads)}
  path = tmp_path / 'recipe.json'

  def load(**changes):
    path.write_text(json.dumps({**content, **changes}))
    return data.load_recipe(path)

  recipe = load(vocab_size=300, held_out_share=0.3)
  found = [sources.read_files(s, downloads) for s in recipe.sources]
  assert [[p for p, _ in f] for f in found] == [
    ['p/a/c.py', 'p/b.py'],
    ['q/z.py'],
  ]
  # Archives that are there are not fetched, so none of this needs a network.
  result = data.prepare(recipe, tmp_path)
  assert result['matches_recipe'] is None and result['vocab_size'] == 300
  recipe = load(vocab_size=300, held_out_share=0.3, expected=result['sha256'])
  assert data.prepare(recipe, tmp_path)['matches_recipe'] is True
  recipe = load(vocab_size=300, held_out_share=0.3, expected={'train.bin': ''})
  assert data.prepare(recipe, tmp_path)['matches_recipe'] is False
  bad = content['sources'][0]
  for changes, words in [
    ({'sources': []}, 'recipe.json is no recipe|at least one source'),
    ({'surprise': 1}, 'unknown surprise'),
    ({'sources': [{**bad, 'licence': 'GPL-3.0'}]}, "p: licence 'GPL-3.0'"),
    ({'sources': [{**bad, 'kind': 'egg'}]}, "p: kind 'egg'"),
    ({'sources': [{**bad, 'sha256': 'x'}]}, 'p: sha256'),
    ({'sources': [{**bad, 'file': '../x'}]}, 'p: version and file'),
    ({'sources': [bad, bad]}, 'p stands in the recipe twice'),
  ]:
    with raises(words):
      load(**changes)


def test_archives_come_from_pip_and_are_checked(tmp_path, monkeypatch):
  content = b'an archive'
  digest = hashlib.sha256(content).hexdigest()
  source = sources.Source('wheel', 'q', '1', 'q-1.whl', digest, 'MIT')
  recipe = sources.Recipe((source,))
  commands, error = [], 'WARNING: x\nERROR: no such release\n'

  def pip(command, **_):
    commands.append(command)
    wanted = pathlib.Path(command[-1]).read_text()
    assert wanted == f'q==1 --hash=sha256:{digest}\n'
    (tmp_path / 'q-1.whl').write_bytes(content)
    return subprocess.CompletedProcess(command, 1, '', error)

  monkeypatch.setattr(sources.subprocess, 'run', pip)
  folder = epath.Path(tmp_path)
  assert sources.fetch(recipe, source, folder)
  assert not sources.fetch(recipe, source, folder) and len(commands) == 1
  assert {'--no-deps', '--only-binary', '--platform'} <= set(commands[0])
  (tmp_path / 'q-1.whl').write_bytes(b'')
  content = b'another'
  with raises('pip could not fetch q 1: ERROR: no such release'):
    sources.fetch(recipe, source, folder)


def test_shipped_recipe():
  recipe = data.load_recipe(ROOT / 'configs' / 'corpus.json')
  assert {'tokenizer/tokenizer.json', 'train.bin', 'held_out.bin'} <= set(
    recipe.expected
  )
  assert all(re.fullmatch('[0-9a-f]{64}', v) for v in recipe.expected.values())


# End to end.


def launch(*args):
  command = [sys.executable, str(ROOT / 'launch' / 'prepare_data.py'), *args]
  env = {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
  return subprocess.run(command, capture_output=True, text=True, env=env)


def test_folder_end_to_end(tmp_path):
  names = [f'{d}/m{d}{f}.py' for d in 'abcdefgh' for f in range(4)]
  folder = write_folder(tmp_path / 'vendor', names)
  out = tmp_path / 'out'
  done = launch(
    f'--folder={folder}',
    f'--out={out}',
    '--vocab-size=500',
    f'--json={tmp_path}/r.json',
  )
  assert done.returncode == 0, done.stderr
  result = json.loads((tmp_path / 'r.json').read_text())
  assert (
    'train: ' in done.stdout and result['sha256']['train.bin'] in done.stdout
  )
  digest = sources.sha256(out / 'tokenizer' / 'tokenizer.json')
  train = data.TokenFile(out / 'train', tokenizer_sha256=digest)
  held_out = data.TokenFile(out / 'held_out', tokenizer_sha256=digest)
  tokenizer = Tokenizer.load(out / 'tokenizer')
  text = ''.join(
    tokenizer.decode(file.document(i), skip_special_tokens=False)
    for file in (train, held_out)
    for i in range(len(file))
  )
  for name in names:
    body = (folder / name).read_text()
    assert text.count(f'<|file_sep|>vendor/{name}\n{body}') == 1
  assert len(train.tokens) == result['splits']['train']['tokens']
  batch = data.TokenBatches(train, batch_size=2, window=64).batch(0)
  assert batch.tokens.shape == (2, 65)


def test_stages_run_only_when_needed(tmp_path):
  names = [f'{d}.py' for d in 'abcdefgh']
  folder, out = write_folder(tmp_path / 'text', names), tmp_path / 'out'

  def run(**settings):
    lines = []
    recipe = data.folder_recipe(folder, vocab_size=300)
    result = data.prepare(recipe, out, log=lines.append, **settings)
    made = [s.split(':')[0] for s in lines if ': made' in s]
    return made, result

  made, first = run()
  assert made == ['text', 'tokenizer', 'tokens']
  assert run() == ([], first)
  (out / 'held_out.bin').write_bytes(b'')
  assert run() == (['tokens'], first)
  made, small = run(vocab_size=290)
  assert made == ['tokenizer', 'tokens'] and small['vocab_size'] == 290
  made, reused = run(tokenizer=out / 'tokenizer')
  assert made == [] and reused['splits'] == small['splits']
  (folder / 'i.py').write_text(source_text('i'))
  assert run()[0] == ['text', 'tokenizer', 'tokens']
  assert len(preparation._CODE) == 64


@pytest.mark.parametrize(
  'args, words',
  [
    ([], 'either --recipe=FILE or --folder=DIR'),
    (['--folder=x'], '--out=DIR is needed'),
    (['--folder=/nowhere', '--out=x'], '/nowhere is not a directory'),
  ],
)
def test_bad_command_lines(args, words):
  done = launch(*args)
  assert done.returncode == 2 and words in done.stderr
  assert done.stderr.count('\n') == 1 and not done.stdout
