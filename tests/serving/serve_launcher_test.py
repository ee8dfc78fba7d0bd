"""launch/serve.py from outside: flags, files, start, end."""

import contextlib
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
from small_models import TILED, make_model, small_config

from glm_jax import generate
from glm_jax.serving import sizing

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


@contextlib.contextmanager
def served(tmp_path, *flags):
  """A server of a small checkpoint: (process, model, what it wrote)."""
  from glm_jax.checkpoints import save_published

  config = small_config(
    0, vocab_size=300, eos_token_ids=tuple(tokenizer().stop_ids)
  )
  model = make_model(config, 0)
  save_published(model, config, tmp_path / 'model')
  backend().save(str(tmp_path / 'model' / 'tokenizer.json'))
  ready = tmp_path / 'ready.json'
  command = [
    *(sys.executable, str(SCRIPT), f'--model={tmp_path / "model"}'),
    *('--max-model-len', '512', '--max_num_seqs=2', '--port=0'),
    *('--max_num_batched_tokens=32', '--num-speculative-tokens=2'),
    *('--dtype=f32', '--deterministic', f'--json={ready}'),
    f'--compilation_cache_dir={tmp_path / "compiled"}',
    *flags,
  ]
  with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
    try:
      while not ready.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.2)
      yield process, model, json.loads(ready.read_text())
    finally:
      process.kill()


@pytest.mark.long
def test_a_checkpoint_is_served_until_sigterm(tmp_path):
  """The whole: a published checkpoint, a key, requests, a graceful end."""
  (tmp_path / 'key').write_text('secret\n')
  flags = f'--api-key-file={tmp_path / "key"}', '--served-model-name=mine'
  with served(tmp_path, *flags) as (process, _, shown):
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
    headers = ('authorization: Bearer secret', 'content-type: application/json')
    curl = ['curl', '-sS', f'{server.url}{path}', '-d']
    curl += [json.dumps({**body, 'max_tokens': 200, 'ignore_eos': True})]
    for header in headers:
      curl += ['-H', header]
    long = subprocess.Popen(curl, stdout=subprocess.PIPE)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    answer = json.loads(long.communicate(timeout=120)[0])
    assert answer['usage']['completion_tokens'] == 200
    errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 0, errors
    assert 'Traceback' not in errors and 'maximum concurrency' in errors
    assert os.listdir(tmp_path / 'compiled')


@pytest.mark.long
def test_latents_in_host_memory_change_capacity_and_no_token(tmp_path):
  flags = '--latent_offloading_size=0.001', '--kv_cache_memory_bytes=1000000'
  prompts = [[5] * 3, list(range(5, 135)), list(range(5, 100))]
  with served(tmp_path, *flags) as (process, model, shown):
    server = types.SimpleNamespace(url=shown['url'])
    got = []
    for prompt in prompts:
      body = {'prompt': prompt, 'max_tokens': 12, 'temperature': 0}
      body |= {'ignore_eos': True, 'return_token_ids': True}
      answer = ask(server, '/v1/completions', body, timeout=120)
      got.append(answer.json['choices'][0]['token_ids'])
    assert answer.json['usage']['prompt_tokens_details']['cached_tokens'] > 64
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1].decode()
  want = generate(
    model, prompts, max_new_tokens=12, eos_token_ids=(), plan=TILED
  )
  assert got == want.tokens
  latents = sizing.host_page_bytes(model.config, 'f32')
  page = sizing.page_bytes(model.config, 'f32') - latents
  # The host's budget is what bounds the pages here.
  assert shown['num_pages'] == int(0.001 * 2**30) // latents
  times = f'{(page + latents) / page:.2f} times the tokens'
  assert f'page takes {page} bytes' in errors and times in errors


def test_latents_in_host_memory_are_for_one_device():
  got = run(
    '--load_format=dummy',
    '--model=tiny',
    '--mesh=context=8',
    '--latent_offloading_size=1',
  )
  assert got.returncode == 2, got.stderr
  assert 'is for one device: leave out --mesh' in got.stderr
