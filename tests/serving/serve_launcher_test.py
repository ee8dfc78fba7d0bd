"""launch/serve.py from outside: flags, files, start, end."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest
from chat_tokenizer import backend, tokenizer
from http_server import ask
from small_models import make_model, small_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / 'launch' / 'serve.py'


def run(*args):
  return subprocess.run(
    [sys.executable, str(SCRIPT), *args],
    capture_output=True,
    text=True,
    timeout=120,
    cwd=ROOT,
  )


@pytest.mark.parametrize(
  'args, word',
  [
    (['--max-modellen=5'], '--max_model_len'),
    (['--port=http'], 'port'),
    (['--tool-call-parser=hermes'], 'glm47'),
    (['--model=zai-org/GLM-5.2'], 'hf download zai-org/GLM-5.2'),
    (['--model=/no/such/place'], '/no/such/place'),
    (['--api_key_file=/no/such/key'], '/no/such/key'),
    (['--load-format', 'dummy', '--model=nothing'], 'presets'),
  ],
  ids=lambda value: str(value)[:30],
)
def test_bad_input_is_one_line_and_exit_2(args, word):
  got = run(*args)
  assert got.returncode == 2, got.stderr
  assert word in got.stderr.splitlines()[-1]
  assert 'Traceback' not in got.stderr and not got.stdout


def test_help_shows_the_names_of_vllm():
  got = run('--help')
  assert got.returncode == 0
  for name in (
    '--max_model_len',
    '--max_num_seqs',
    '--max_num_batched_tokens',
    '--served_model_name',
    '--kv_cache_dtype',
    '--gpu_memory_utilization',
    '--[no_]enable_prefix_caching',
    '--api_key_file',
  ):
    assert name in got.stdout
  assert '127.0.0.1' in got.stdout


def test_keys_are_read_from_a_file(tmp_path):
  code = (
    'import sys; sys.path.insert(0, "launch"); import serve; '
    f'print(serve.read_keys({str(tmp_path / "keys")!r}))'
  )
  (tmp_path / 'keys').write_text('one\n\n two \n')
  got = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=60,
  )
  assert got.stdout.strip() == "('one', 'two')", got.stderr


@pytest.mark.long
def test_a_checkpoint_is_served_until_sigterm(tmp_path):
  """The whole: a published checkpoint, a key, requests, a graceful end."""
  from glm_jax.checkpoints import save_published

  config = small_config(
    0, vocab_size=300, eos_token_ids=tuple(tokenizer().stop_ids)
  )
  save_published(make_model(config, 0), config, tmp_path / 'model')
  backend().save(str(tmp_path / 'model' / 'tokenizer.json'))
  (tmp_path / 'key').write_text('secret\n')
  ready = tmp_path / 'ready.json'
  command = [
    *(sys.executable, str(SCRIPT), f'--model={tmp_path / "model"}'),
    *('--max-model-len', '512', '--max_num_seqs=2', '--port=0'),
    *('--max_num_batched_tokens=32', '--num-speculative-tokens=2'),
    *(f'--json={ready}', f'--api-key-file={tmp_path / "key"}'),
    *('--served-model-name=mine', '--dtype=f32', '--deterministic'),
    f'--compilation_cache_dir={tmp_path / "compiled"}',
  ]
  with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
    try:
      while not ready.exists():
        assert process.poll() is None
        time.sleep(0.2)
      shown = json.loads(ready.read_text())
      server = types.SimpleNamespace(url=shown['url'])
      assert shown['model'] == 'mine' and shown['max_model_len'] == 512
      key = {'authorization': 'Bearer secret'}
      assert ask(server, '/ready').status == 200
      assert ask(server, '/v1/models').status == 401
      body = {'messages': [{'role': 'user', 'content': 'Hi'}]}
      body |= {'max_tokens': 8, 'temperature': 0}
      path = '/v1/chat/completions'
      first = ask(server, path, body, **key)
      assert first.status == 200, first.body
      stream = ask(server, path, {**body, 'stream': True}, **key)
      assert stream.events
      long = subprocess.Popen(
        [
          *(
            'curl',
            '-sS',
            f'{server.url}{path}',
            '-H',
            'authorization: Bearer secret',
            '-H',
            'content-type: application/json',
            '-d',
          ),
          json.dumps({**body, 'max_tokens': 200, 'ignore_eos': True}),
        ],
        stdout=subprocess.PIPE,
      )
      time.sleep(0.5)
      process.send_signal(signal.SIGTERM)
      answer = json.loads(long.communicate(timeout=120)[0])
      assert answer['usage']['completion_tokens'] == 200
      errors = process.communicate(timeout=60)[1].decode()
      assert process.returncode == 0, errors
      assert 'Traceback' not in errors and 'maximum concurrency' in errors
      assert os.listdir(tmp_path / 'compiled')
    finally:
      process.kill()
