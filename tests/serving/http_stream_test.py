"""Streams of events: heartbeats, errors, clients that leave or stall."""

import asyncio
import json

import pytest

from glm_jax.serving.http.errors import ApiError
from glm_jax.serving.http.sse import Disconnected, EventStream, unless_gone


class Client:
  """The other end of an ASGI call."""

  def __init__(self, *, slow=0.0):
    self.sent = []
    self.gone = asyncio.Event()
    self.slow = slow

  async def receive(self):
    await self.gone.wait()
    return {'type': 'http.disconnect'}

  async def send(self, message):
    if message['type'] == 'http.response.body':
      await asyncio.sleep(self.slow)
    self.sent.append(message)

  @property
  def body(self):
    return b''.join(m.get('body', b'') for m in self.sent)


class Source:
  """Events with pauses; remembers whether it was closed."""

  def __init__(self, *steps):
    self.steps = steps
    self.closed = False

  async def events(self):
    try:
      for step in self.steps:
        if isinstance(step, float):
          await asyncio.sleep(step)
        elif isinstance(step, Exception):
          raise step
        else:
          yield step
    finally:
      self.closed = True


def play(source, client, leave_after=None, **options):
  async def main():
    stream = EventStream({'first': 1}, source.events(), **options)
    if leave_after is not None:
      loop = asyncio.get_running_loop()
      loop.call_later(leave_after, client.gone.set)
    await asyncio.wait_for(stream({}, client.receive, client.send), 10)

  asyncio.run(main())


def test_events_and_done():
  source, client = Source({'a': '中'}, {'b': 2}), Client()
  play(source, client)
  assert client.sent[0]['status'] == 200
  headers = dict(client.sent[0]['headers'])
  assert headers[b'content-type'].startswith(b'text/event-stream')
  assert b'content-length' not in headers
  frames = client.body.decode().split('\n\n')
  assert frames == [
    'data: {"first": 1}',
    'data: {"a": "中"}',
    'data: {"b": 2}',
    'data: [DONE]',
    '',
  ]
  assert client.sent[-1]['more_body'] is False


def test_heartbeats_while_nothing_happens():
  client = Client()
  play(Source(0.35, {'a': 1}), client, heartbeat_seconds=0.1)
  frames = client.body.decode().split('\n\n')
  assert frames.count(': still working') >= 1
  assert frames[-3:] == ['data: {"a": 1}', 'data: [DONE]', '']


def test_an_error_is_the_last_event():
  source = Source({'a': 1}, ApiError(408, 'too late', code='late'), {'b': 1})
  client = Client()
  play(source, client)
  frames = client.body.decode().split('\n\n')
  assert json.loads(frames[-3][6:])['error']['code'] == 'late'
  assert frames[-2] == 'data: [DONE]' and source.closed


@pytest.mark.parametrize('pause', [0.0, 30.0])
def test_a_client_that_leaves_closes_the_source(pause):
  steps = [pause] if pause else [0.01, {'a': 1}] * 1000
  source, client = Source(*steps), Client()
  play(source, client, leave_after=0.1)
  assert source.closed
  assert b'[DONE]' not in client.body


def test_a_client_that_stalls_closes_the_source():
  source, client = Source({'a': 1}, 30.0), Client(slow=0.2)
  play(source, client, stall_seconds=0.05)
  assert source.closed
  assert b'[DONE]' not in client.body


def test_work_is_cancelled_when_the_client_goes():
  seen = []

  async def work():
    try:
      await asyncio.sleep(30)
    except asyncio.CancelledError:
      seen.append('cancelled')
      raise

  async def main():
    client = Client()
    asyncio.get_running_loop().call_later(0.05, client.gone.set)
    with pytest.raises(Disconnected):
      await unless_gone(client.receive, work())

  asyncio.run(main())
  assert seen == ['cancelled']
