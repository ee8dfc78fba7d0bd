"""Spellings of flags, exit codes, and what goes to which stream."""

import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from absl import app, flags

from glm_jax import cli

# `cli` alone: the launchers' own tests start the whole package.
SCRIPT = '''
"""Answers a question.

Usage: ask.py --answer=yes
"""

import sys
import types

package = types.ModuleType('glm_jax')
package.__path__ = [{package!r}]
sys.modules['glm_jax'] = package

from absl import flags

from glm_jax import cli

ANSWER = flags.DEFINE_enum(
  'answer', 'yes', ['yes', 'no', 'none', 'maybe'], 'What to answer.')
MAX_NEW_TOKENS = flags.DEFINE_integer(
  'max_new_tokens', 128, 'How many tokens to make.', lower_bound=1)
DETERMINISTIC = flags.DEFINE_bool('deterministic', True, 'Same bits.')
RAISES = flags.DEFINE_string('raises', None, 'Python text to raise.')


def main():
  if RAISES.value:
    raise eval(RAISES.value)
  cli.log('working')
  for _ in cli.progress(range(3), 'steps'):
    pass
  print(MAX_NEW_TOKENS.value, DETERMINISTIC.value)
  return {{'yes': True, 'no': False, 'none': None, 'maybe': 7}}[ANSWER.value]


if __name__ == '__main__':
  cli.run(main)
'''


@pytest.fixture(scope='module')
def script(tmp_path_factory):
  path = tmp_path_factory.mktemp('launch') / 'ask.py'
  package = os.path.dirname(cli.__file__)
  path.write_text(SCRIPT.lstrip().format(package=package))
  return path


@pytest.fixture
def ask(script):
  def call(*args):
    return subprocess.run(
      [sys.executable, str(script), *args],
      capture_output=True,
      text=True,
      timeout=60,
    )

  return call


@pytest.fixture
def flag_values():
  values = flags.FlagValues()
  flags.DEFINE_integer('max_new_tokens', 128, '', flag_values=values)
  flags.DEFINE_float('temperature', 1.0, '', flag_values=values)
  flags.DEFINE_string('prompt', None, '', flag_values=values)
  flags.DEFINE_bool('compare', False, '', flag_values=values)
  flags.DEFINE_bool('enable_prefix_caching', True, '', flag_values=values)
  flags.DEFINE_string('notes', '', '', flag_values=values)
  flags.DEFINE_multi_integer('layers', [], '', flag_values=values)
  return values


@pytest.mark.parametrize(
  'args, name, want',
  [
    (['--max_new_tokens=5'], 'max_new_tokens', 5),
    (['--max-new-tokens=5'], 'max_new_tokens', 5),
    (['--max-new-tokens', '5'], 'max_new_tokens', 5),
    (['-max_new_tokens', '5'], 'max_new_tokens', 5),
    (['--max-new-tokens=5', '--max_new_tokens=6'], 'max_new_tokens', 6),
    (['--temperature', '-1.5'], 'temperature', -1.5),
    (['--prompt', '-- two words --'], 'prompt', '-- two words --'),
    (['--prompt=--compare'], 'prompt', '--compare'),
    (['--prompt=a=b'], 'prompt', 'a=b'),
    (['--prompt='], 'prompt', ''),
    (['--compare'], 'compare', True),
    (['--compare=false'], 'compare', False),
    (['--no-enable-prefix-caching'], 'enable_prefix_caching', False),
    (['--no_enable_prefix_caching'], 'enable_prefix_caching', False),
    (['--noenable_prefix_caching'], 'enable_prefix_caching', False),
    (['--enable-prefix-caching'], 'enable_prefix_caching', True),
    (['--notes=x'], 'notes', 'x'),
    (['--layers=0', '--layers', '77'], 'layers', [0, 77]),
  ],
)
def test_spellings(flag_values, args, name, want):
  cli.parse_flags(['prog', *args], flag_values)
  assert flag_values[name].value == want


@pytest.mark.parametrize(
  'args, words',
  [
    (['--max-new-token=5'], ['--max-new-token', 'unknown']),
    (['--max_new_tokens=five'], ['max_new_tokens', 'five']),
    (['--max-new-tokens'], ['--max_new_tokens', 'needs a value']),
    (['--prompt', '--compare'], ['--prompt', 'needs a value']),
    (['--no-compare=true'], ['--no-compare=true', 'no value']),
    (['--no-prompt'], ['--no-prompt', 'unknown']),
    (['--compare', 'false'], ["'false'", '--no-flag']),
    (['stray', '--compare', 'also'], ["'stray', 'also'"]),
    (['--', '--compare'], ["'--compare'"]),
    (['-'], ["'-'"]),
    (['--compare=perhaps'], ['compare', 'perhaps']),
    (['--flagfile=/no/such/flags'], ['/no/such/flags']),
  ],
)
def test_bad_command_lines_name_the_culprit(flag_values, args, words):
  with pytest.raises(cli.UserError) as caught:
    cli.parse_flags(['prog', *args], flag_values)
  message = str(caught.value)
  assert '\n' not in message
  for word in words:
    assert word in message


def test_flagfile_takes_any_spelling(flag_values, tmp_path):
  path = tmp_path / 'flags.txt'
  path.write_text('# comment\n--max-new-tokens=7\n--compare\n')
  args = ['--max-new-tokens', '5', f'--flagfile={path}']
  cli.parse_flags(['prog', *args], flag_values)
  assert flag_values['max_new_tokens'].value == 7  # The last one wins.
  assert flag_values['compare'].value is True


@pytest.mark.parametrize('spelling', ['--help', '-h', '-?', '--helpfull'])
def test_help_outranks_bad_flags(flag_values, spelling):
  with pytest.raises(cli.HelpRequest) as caught:
    cli.parse_flags(['prog', '--bad', spelling], flag_values)
  assert caught.value.every_flag == (spelling == '--helpfull')


@pytest.mark.parametrize(
  'args, code, stdout',
  [
    ([], 0, '128 True\n'),
    (['--answer=none', '--max-new-tokens=3'], 0, '3 True\n'),
    (['--answer=no', '--no-deterministic'], 1, '128 False\n'),
  ],
)
def test_answers_are_exit_codes(ask, args, code, stdout):
  done = ask(*args)
  assert (done.returncode, done.stdout) == (code, stdout)
  assert done.stderr == 'working\n'  # No bar: stderr is not a terminal.


@pytest.mark.parametrize(
  'args, line',
  [
    (
      ['--max-new-token=5'],
      'unknown flag --max-new-token; did you mean --max_new_tokens?',
    ),
    (
      ['--no-determinstic'],
      'unknown flag --no-determinstic; did you mean',
    ),
    (['--max_new_tokens=0'], 'flag --max_new_tokens=0:'),
    (['--raises=ValueError("bad  value:\\n\\n  k")'], 'bad  value: k'),
    (['--raises=cli.UserError("no such thing")'], 'no such thing'),
    (
      ['--raises=FileNotFoundError(2, "No such file", "/x/y")'],
      'No such file: /x/y',
    ),
    (['--raises=NotImplementedError()'], 'NotImplementedError'),
    (['--raises=ModuleNotFoundError("No torch", name="torch")'], 'No torch'),
  ],
)
def test_bad_input_is_exit_2_and_one_line(ask, args, line):
  done = ask(*args)
  assert (done.returncode, done.stdout) == (2, '')
  assert done.stderr.startswith(f'ask.py: {line}')
  assert done.stderr.count('\n') == 1


@pytest.mark.parametrize(
  'args, error',
  [
    (['--raises=KeyError("a bug")'], "KeyError: 'a bug'"),
    (['--raises=ImportError("typo", name="glm_jax.x")'], 'ImportError: typo'),
    (['--answer=maybe'], 'TypeError: main returned 7'),
  ],
)
def test_bugs_keep_their_traceback(ask, args, error):
  done = ask(*args)
  assert done.returncode == 1
  assert 'Traceback' in done.stderr
  assert error in done.stderr


def test_traceback_flag_shows_where_bad_input_was_met(ask):
  done = ask('--raises=ValueError("k")', '--traceback')
  assert done.returncode == 2
  assert 'in main' in done.stderr
  assert done.stderr.endswith('ask.py: k\n')


def test_interrupt_is_130_and_one_line(ask):
  done = ask('--raises=KeyboardInterrupt()')
  assert (done.returncode, done.stdout) == (130, '')
  assert done.stderr == 'ask.py: interrupted\n'


def test_help_shows_our_flags_only(ask):
  done = ask('--help')
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout.startswith('Answers a question.\n\nUsage: ask.py')
  assert '--max_new_tokens\n' in done.stdout
  assert '(default: 128)' in done.stdout
  assert '--[no_]deterministic' in done.stdout
  assert 'yes|no|none|maybe' in done.stdout
  assert 'pdb' not in done.stdout and 'verbosity' not in done.stdout
  assert max(map(len, done.stdout.splitlines())) <= 80


BAD_INPUT = (
  *(ValueError, NotImplementedError, PermissionError, app.UsageError),
  *(FileExistsError, IsADirectoryError, NotADirectoryError),
)


@pytest.mark.parametrize('kind', BAD_INPUT)
def test_every_kind_of_bad_input_is_exit_2(monkeypatch, capsys, kind):
  def main():
    raise kind('wrong')

  monkeypatch.setattr(cli, 'parse_flags', lambda argv: None)
  with pytest.raises(SystemExit) as caught:
    cli.run(main, ['launch/prog.py'])
  assert caught.value.code == 2
  assert capsys.readouterr().err == 'prog.py: wrong\n'


@pytest.mark.parametrize(
  'answer, code',
  [
    (None, 0),
    (True, 0),
    (False, 1),
    (0, 0),
    (1, 1),
    (np.bool_(False), 1),
    (np.asarray(True), 0),
  ],
)
def test_run_maps_answers(monkeypatch, answer, code):
  monkeypatch.setattr(cli, 'parse_flags', lambda argv: None)
  with pytest.raises(SystemExit) as caught:
    cli.run(lambda: answer, ['prog'])
  assert caught.value.code == code


@dataclasses.dataclass
class Row:
  us: float
  where: pathlib.PurePath


def test_write_json(tmp_path):
  path = tmp_path / 'new' / 'folder' / 'result.json'
  result = {
    'nan': float('nan'),
    'inf': np.float32('inf'),
    'array': np.asarray([[1.0, np.nan], [2.0, 3.0]]),
    'flag': np.bool_(True),
    3: (np.int64(4), None, 'text'),
    'row': Row(1.5, pathlib.PurePath('a/b')),
  }
  cli.write_json(path, result)
  assert json.loads(path.read_text()) == {
    'nan': None,
    'inf': None,
    'array': [[1.0, None], [2.0, 3.0]],
    'flag': True,
    '3': [4, None, 'text'],
    'row': {'us': 1.5, 'where': 'a/b'},
  }
  assert os.listdir(path.parent) == ['result.json']


def test_write_json_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
  path = tmp_path / 'result.json'
  cli.write_json(path, {'a': 1})
  with pytest.raises(TypeError, match='set cannot be written'):
    cli.write_json(path, {'a': {1, 2}})

  def broken_replace(self, target):
    raise OSError('disk full')

  monkeypatch.setattr(type(cli.epath.Path(path)), 'replace', broken_replace)
  with pytest.raises(OSError, match='disk full'):
    cli.write_json(path, {'a': 2})
  assert json.loads(path.read_text()) == {'a': 1}
  assert os.listdir(tmp_path) == ['result.json']


def test_write_json_keeps_a_device_a_device(tmp_path):
  pipe = tmp_path / 'pipe'
  os.mkfifo(pipe)
  reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
  try:
    cli.write_json(pipe, {'a': 1})
    assert json.loads(os.read(reader, 1000)) == {'a': 1}
  finally:
    os.close(reader)
  assert not pipe.is_file()


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize(
  'stream, silent', [(io.StringIO, True), (Terminal, False)]
)
def test_progress_shows_on_a_terminal_only(monkeypatch, stream, silent):
  stderr = stream()
  monkeypatch.setattr(sys, 'stderr', stderr)
  assert list(cli.progress([1, 2], 'reading')) == [1, 2]
  with cli.progress(2, 'steps') as bar:
    bar.update(2)
  shown = stderr.getvalue()
  assert (shown == '') == silent
  assert ('reading' in shown and '2/2' in shown) == (not silent)


def test_log_goes_to_stderr(capsys):
  cli.log('layer', 3, 'of', 78)
  captured = capsys.readouterr()
  assert (captured.out, captured.err) == ('', 'layer 3 of 78\n')


def test_resolve_model_path_accepts(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'model').mkdir()
  (tmp_path / 'tiny.py').write_text('')
  presets = ['glm_52', 'glm_nano']
  resolve = lambda name: cli.resolve_model_path(name, presets=presets)
  assert resolve(str(tmp_path / 'model')) == str(tmp_path / 'model')
  assert resolve('~/tiny.py') == str(tmp_path / 'tiny.py')
  assert resolve('gs://bucket/glm') == 'gs://bucket/glm'
  assert resolve('glm-nano') == 'glm_nano'
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'glm_52').mkdir()
  assert resolve('glm_52') == 'glm_52'
  assert resolve('model') == 'model'


@pytest.mark.parametrize(
  'name, words',
  [
    (
      'zai-org/GLM-5.2',
      ['hf download zai-org/GLM-5.2 --local-dir GLM-5.2'],
    ),
    ('zai-org/GLM-5.2/', ['hf download zai-org/GLM-5.2 --local-dir']),
    ('configs/missing.py', ["no such directory or file: 'configs/missing.py'"]),
    ('glm-nanno', ["'glm-nanno'", 'presets: glm_nano']),
    ('', ["''"]),
    ('https://huggingface.co/zai-org', ['gs://', 'local path']),
  ],
)
def test_resolve_model_path_refuses(name, words):
  with pytest.raises(cli.UserError) as caught:
    cli.resolve_model_path(name, presets=['glm_nano'])
  message = str(caught.value)
  assert '\n' not in message
  for word in words:
    assert word in message
