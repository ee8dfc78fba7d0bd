"""The end of a server: what runs is finished, what is new is refused."""

import asyncio
import threading

from http_server import ask, connect, post, serve, until
from scripted_engine import ScriptedEngine

HI = [{'role': 'user', 'content': 'Hi'}]
CHAT = '/v1/chat/completions'


def test_the_end_waits_for_running_requests():
  engine = ScriptedEngine('Hello ' * 10, delay=0.02)
  answers = []
  with serve(engine, drain_seconds=20) as server:
    for stream in (False, True):
      body = {'messages': HI, 'stream': stream}
      thread = threading.Thread(
        target=lambda b: answers.append(ask(server, CHAT, b)), args=(body,)
      )
      thread.start()
    until(lambda: len(engine.open) == 2)
    assert ask(server, '/ready').status == 200
    server.handle_exit(None, None)
    until(lambda: refused(server))
    until(lambda: len(answers) == 2)
  assert all(answer.status == 200 for answer in answers)
  assert set(engine.ended.values()) == {'stop'}


def test_the_end_does_not_wait_for_ever():
  engine = ScriptedEngine('Hello ' * 1000, delay=0.05)
  with serve(engine, drain_seconds=0.5) as server:
    with connect(server, post(CHAT, {'messages': HI, 'stream': True})):
      until(lambda: engine.open)
      server.handle_exit(None, None)
      until(lambda: not engine.open, 5)
  assert set(engine.ended.values()) == {'abort'}


def refused(server):
  try:
    with connect(server):
      return False
  except ConnectionRefusedError:
    return True


def test_not_ready_while_it_drains():
  engine = ScriptedEngine()
  with serve(engine) as server:
    service = server.config.app.state.service
    service.draining = True
    got = ask(server, '/ready')
    assert (got.status, got.json['error']['code']) == (503, 'not_ready')
    got = ask(server, CHAT, {'messages': HI})
    assert (got.status, got.json['error']['code']) == (503, 'draining')
    assert got.headers['retry-after'] == '5'
    assert ask(server, '/health').status == 200
    service.draining = False
    asyncio.run(engine.drain())
    assert ask(server, '/ready').status == 503
    assert ask(server, CHAT, {'messages': HI}).status == 503
