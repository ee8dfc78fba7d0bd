"""HTTP over the real engine with a small model: clients, chaos, no leaks."""

import asyncio
import dataclasses
import json
import time

import numpy as np
import pytest
from chat_tokenizer import tokenizer
from http_server import MODEL, ask, chat, serve, served_model
from scripted_engine import VOCAB
from small_engines import CONFIG
from small_models import TILED, make_model, small_config

from glm_jax.serving.async_engine import AsyncEngine
from glm_jax.serving.benchmark import chaos
from glm_jax.serving.engine import Engine

HI = [{'role': 'user', 'content': 'Hi'}]
TEXT = '/v1/completions'
MAX_BODY = 20_000


@pytest.fixture(scope='module')
def engine():
  """One compiled shape; few pages, so that requests wait and are evicted."""
  model = make_model(small_config(0, vocab_size=VOCAB), 0)
  config = dataclasses.replace(
    CONFIG,
    max_model_len=512,
    num_pages=18,
    context_pages=(8,),
    num_speculative_tokens=3,
    max_speculative_tokens=3,
    draft_counts=(3,),
    planned_share=0.5,
    max_queue=24,
    eos_token_ids=tokenizer().stop_ids,
  )
  made = AsyncEngine(Engine(model, config, TILED))
  made.start()
  made.wait_until_ready()
  yield made
  made.stop()


@pytest.fixture(scope='module')
def server(engine):
  model = served_model(max_model_len=512)
  with serve(engine, model, max_body_bytes=MAX_BODY) as running:
    yield running


def settled(server):
  """The engine's counts once it is idle: nothing may be held any more."""
  for _ in range(400):
    stats = ask(server, '/status').json
    requests, pages = stats['engine']['requests'], stats['engine']['pages']
    busy = requests['running'] + requests['waiting'] + stats['requests']['open']
    if not busy and not pages['used'] and not stats['engine']['in_flight']:
      break
    time.sleep(0.05)
  assert not busy and not pages['used'], stats
  assert pages['idle'] + pages['free'] == pages['total']
  return stats


def test_chat_and_stream_agree(client):
  create = lambda **more: client.chat.completions.create(
    model=MODEL, messages=HI, max_tokens=20, temperature=0, **more
  )
  answer = create(logprobs=True, top_logprobs=2)
  choice = answer.choices[0]
  assert answer.usage.completion_tokens == len(choice.logprobs.content)
  for entry in choice.logprobs.content:
    assert entry.logprob == entry.top_logprobs[0].logprob <= 0
  text = {'reasoning_content': '', 'content': ''}
  for chunk in create(stream=True):
    for one in chunk.choices:
      for key in text:
        text[key] += getattr(one.delta, key, None) or ''
  assert text['reasoning_content'] == (choice.message.reasoning_content or '')
  assert text['content'] == (choice.message.content or '')


def test_seeds_decide_samples(server):
  body = {'prompt': [5, 6, 7], 'max_tokens': 12, 'return_token_ids': True}
  body |= {'temperature': 1.0, 'ignore_eos': True, 'n': 3}
  ids = lambda seed: [
    choice['token_ids']
    for choice in ask(server, TEXT, {**body, 'seed': seed}).json['choices']
  ]
  first = ids(1)
  assert first == ids(1) != ids(9)
  assert first[1:] == ids(2)[:-1]  # Choice i has the seed `seed + i`.
  assert len({tuple(one) for one in first}) == 3


def test_json_and_forced_tools(client):
  schema = {
    'type': 'object',
    'properties': {'ok': {'type': 'boolean'}, 'n': {'enum': [1, 22, 333]}},
    'required': ['ok', 'n'],
    'additionalProperties': False,
  }
  form = {'type': 'json_schema', 'json_schema': {'name': 's', 'schema': schema}}
  off = {'chat_template_kwargs': {'enable_thinking': False}}
  create = lambda **more: client.chat.completions.create(
    model=MODEL, messages=HI, max_tokens=100, extra_body=off, **more
  )
  for seed in range(2):
    answer = create(response_format=form, seed=seed)
    got = json.loads(answer.choices[0].message.content)
    assert isinstance(got['ok'], bool) and got['n'] in (1, 22, 333)
    assert answer.choices[0].finish_reason == 'stop'
  function = {'name': 'pick', 'parameters': schema}
  tools = [{'type': 'function', 'function': function}]
  answer = create(
    tools=tools, tool_choice='required', parallel_tool_calls=False
  )
  (call,) = answer.choices[0].message.tool_calls
  assert call.function.name == 'pick'
  assert json.loads(call.function.arguments)['n'] in (1, 22, 333)


def test_a_conversation_is_cached(server):
  said = 'the ' * 150
  first = chat(server, said, max_tokens=4, thinking={'type': 'disabled'}).json
  assert first['usage']['prompt_tokens'] > 128
  again = chat(server, said, max_tokens=4, thinking={'type': 'disabled'}).json
  details = again['usage']['prompt_tokens_details']
  assert details['cached_tokens'] >= 128
  assert ask(server, '/flush_cache', method='POST').status == 200
  last = chat(server, said, max_tokens=4, thinking={'type': 'disabled'}).json
  assert last['usage']['prompt_tokens_details']['cached_tokens'] == 0


def test_twenty_turns_of_an_agent_reuse_their_prompts(server):
  """Every turn sends the conversation back with a little more."""
  rng = np.random.default_rng(3)
  ids = lambda n: rng.integers(16, 256, n).tolist()
  prompt, sent, cached = ids(64), 0, 0
  for _ in range(20):
    prompt += ids(6)
    body = {'prompt': prompt, 'max_tokens': 14, 'temperature': 0}
    body |= {'ignore_eos': True, 'return_token_ids': True}
    got = ask(server, TEXT, body).json
    sent += len(prompt)
    cached += got['usage']['prompt_tokens_details']['cached_tokens']
    prompt = prompt + got['choices'][0]['token_ids']
  assert cached >= 0.95 * sent
  settled(server)


def test_the_engines_refusals_reach_the_client(server):
  got = ask(server, TEXT, {'prompt': [1], 'stop_token_ids': list(range(60))})
  assert got.status == 400 and 'stop ids' in got.json['error']['message']
  got = ask(server, TEXT, {'prompt': [1], 'num_speculative_tokens': 8})
  assert got.status == 400 and 'speculative' in got.json['error']['message']


def test_chaos_leaves_nothing_behind(server):
  answers = asyncio.run(chaos.alone(server.url, chaos.make_asks(6, VOCAB, 150)))
  clients = chaos.Chaos(
    server.url,
    answers,
    max_body_bytes=MAX_BODY,
    max_model_len=512,
    per_second=60,
  )
  asyncio.run(clients.run(120))
  assert clients.outcome.problems == []
  assert clients.outcome.finished > 15
  kinds = {kind for kind, _ in clients.outcome.statuses}
  assert kinds == set(chaos.KINDS)
  stats = settled(server)
  assert stats['requests']['aborted'] > 0
  assert ask(server, '/health').status == 200


class DyingEngine:
  """Lives until it is told to fail."""

  def __init__(self):
    self.failing = False

  def warm_up(self):
    return 0

  def has_work(self):
    return False

  def step(self):
    if self.failing:
      raise RuntimeError('a device is lost')
    return []


def test_an_engine_that_dies_ends_the_server():
  inner = DyingEngine()
  engine = AsyncEngine(inner)
  engine.start()
  engine.wait_until_ready()
  with serve(engine) as server:
    assert ask(server, '/health').status == 200
    inner.failing = True
    end = time.monotonic() + 20
    while server.servers[0].is_serving():
      assert time.monotonic() < end
      time.sleep(0.01)
  assert not engine.alive
