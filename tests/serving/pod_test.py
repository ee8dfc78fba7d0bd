"""launch/serve.py in two processes of four devices: one engine, one answer."""

import http.client
import json
import pathlib
import re
import signal
import tempfile
import time
import types

import jax
import numpy as np
import pytest
from absl.testing import parameterized
from chat_tokenizer import backend, tokenizer
from http_server import ask
from processes import Pair
from small_models import make_model, small_config

from glm_jax import forward

SERVE = pathlib.Path(__file__).resolve().parents[2] / 'launch' / 'serve.py'
FLAGS = (
  *('--mesh=context=8', '--dtype=f32', '--max_model_len=256'),
  *('--max_num_seqs=2', '--max_num_batched_tokens=32', '--port=0'),
  '--heartbeat_seconds=10',
  *('--num_gpu_blocks_override=16', '--kv_offloading_size=0.01'),
)  # fmt: skip
PERSON = {
  'type': 'object',
  'properties': {'age': {'enum': [1, 22, 333]}},
  'required': ['age'],
  'additionalProperties': False,
}


def config():
  """As few layers as have an index, a shared one, experts and a drafter."""
  return small_config(
    1,
    indexer_types=('full', 'shared'),
    mlp_types=('dense', 'sparse'),
    vocab_size=304,
    eos_token_ids=tuple(tokenizer().stop_ids),
  )


@pytest.mark.long
class PodTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.compiled = tempfile.TemporaryDirectory()
    cls.addClassCleanup(cls.compiled.cleanup)

  def start(self, cache_plan, drafts=2):
    """A pod that answers: (pair, its URL)."""
    from glm_jax.checkpoints import save_published

    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    path = pathlib.Path(folder.name)
    self.model = make_model(config(), 0)
    save_published(self.model, config(), path / 'model')
    backend().save(str(path / 'model' / 'tokenizer.json'))
    ready = path / 'ready.json'
    pair = Pair(
      self,
      f'--model={path / "model"}',
      f'--json={ready}',
      f'--cache_plan={cache_plan}',
      f'--num_speculative_tokens={drafts}',
      f'--compilation_cache_dir={self.compiled.name}',
      *FLAGS,
      launcher=str(SERVE),
    )
    end = time.monotonic() + 900
    while not ready.exists():
      for i, process in enumerate(pair.processes):
        assert process.poll() is None, pair.read(i, 'err')
      assert time.monotonic() < end, pair.read(0, 'err')
      time.sleep(0.2)
    time.sleep(0.2)
    return pair, types.SimpleNamespace(url=json.loads(ready.read_text())['url'])

  @parameterized.parameters('token_split', 'layer_split', 'replicated')
  def test_a_pod_answers_as_one_device_does(self, cache_plan):
    """Each greedy token is the best of one device's logits, to 1e-4."""
    pair, server = self.start(cache_plan)
    prompts = [np.random.default_rng(i).integers(0, 256, n).tolist()
               for i, n in enumerate((70, 5, 130, 70))]  # fmt: skip
    for prompt in (*prompts, prompts[2]):
      body = {'prompt': prompt, 'max_tokens': 9, 'temperature': 0}
      body |= {'ignore_eos': True, 'return_token_ids': True}
      answer = ask(server, '/v1/completions', body, timeout=300)
      assert answer.status == 200, answer.body
      self.check(prompt, answer.json['choices'][0]['token_ids'])
    assert answer.json['usage']['prompt_tokens_details']['cached_tokens'] > 64
    chat = {'messages': [{'role': 'user', 'content': 'Hi'}], 'seed': 0}
    chat |= {'max_tokens': 100, 'thinking': {'type': 'disabled'}}
    form = {'name': 'person', 'schema': PERSON}
    chat['response_format'] = {'type': 'json_schema', 'json_schema': form}
    answer = ask(server, '/v1/chat/completions', chat, timeout=300)
    text = answer.json['choices'][0]['message']['content']
    assert json.loads(text)['age'] in (1, 22, 333), answer.body
    for process in pair.processes[::-1]:  # as a pod is told to end
      process.send_signal(signal.SIGTERM)
    pair.finish(120)
    assert 'Traceback' not in pair.read(0, 'err') + pair.read(1, 'err')

  def check(self, prompt, new):
    assert len(new) == 9
    ids = np.zeros(160, np.int32)
    ids[: len(prompt) + len(new)] = [*prompt, *new]
    best = jax.jit(lambda model, ids: forward(model, ids).logits[0])
    rows = np.asarray(best(self.model, ids[None]))[len(prompt) - 1 :][:9]
    chosen = rows[np.arange(9), new]
    np.testing.assert_array_less(rows.max(-1) - chosen, 1e-4)

  @parameterized.parameters(0, 1)
  def test_killing_one_process_ends_the_other_in_one_line(self, victim):
    pair, server = self.start('token_split', drafts=0)
    other = 1 - victim
    body = {'prompt': [1, 2, 3], 'max_tokens': 200, 'ignore_eos': True}
    body |= {'stream': True}
    address = server.url.removeprefix('http://')
    connection = http.client.HTTPConnection(address, timeout=120)
    connection.request('POST', '/v1/completions', json.dumps(body).encode(),
                       {'content-type': 'application/json'})  # fmt: skip
    answer = connection.getresponse()
    self.addCleanup(connection.close)
    self.addCleanup(answer.close)
    answer.readline()  # in the middle of a request
    before = pair.read(other, 'err')
    pair.processes[victim].kill()
    assert pair.processes[other].wait(timeout=60) != 0
    said = pair.read(other, 'err').removeprefix(before)
    # The runtime may log lines of its own, which carry no number.
    ours = [line for line in said.splitlines() if re.match(r'\[\d+\] ', line)]
    self.assertEqual(ours, [f'[{other}] process {victim} of 2 is lost: ending'])
