"""Bad requests, clients that leave, limits and keys."""

import base64
import contextlib
import json
import logging
import resource
import threading

import pytest
from http_server import MODEL, ask, chat, connect, post, serve, until
from scripted_engine import ScriptedEngine

HI = [{'role': 'user', 'content': 'Hi'}]
CHAT = '/v1/chat/completions'
TEXT = '/v1/completions'


@pytest.fixture(autouse=True)
def reset(engine):
  engine.answer, engine.step_tokens, engine.delay = 'Hello', 1, 0.0
  engine.limit, engine.fail = 1000, None


BAD = {
  'no messages': (CHAT, {'messages': []}, 'messages'),
  'no role': (CHAT, {'messages': [{'content': 'a'}]}, 'role'),
  'a role that is not known': (
    CHAT,
    {'messages': [{'role': 'usr', 'content': 'a'}]},
    'usr',
  ),
  'an image': (
    CHAT,
    {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
    'only text',
  ),
  'an unknown field': (
    CHAT,
    {'messages': HI, 'guided_json': {}},
    'guided_json',
  ),
  'a penalty': (CHAT, {'messages': HI, 'presence_penalty': 0.5}, 'presence'),
  'a bias': (CHAT, {'messages': HI, 'logit_bias': {'1': 5}}, 'logit_bias'),
  'temperature': (CHAT, {'messages': HI, 'temperature': -1}, 'temperature'),
  'top_p': (CHAT, {'messages': HI, 'top_p': 0}, 'top_p'),
  'n': (CHAT, {'messages': HI, 'n': 0}, 'n:'),
  'max_tokens': (CHAT, {'messages': HI, 'max_tokens': 0}, 'max_tokens'),
  'an empty stop': (CHAT, {'messages': HI, 'stop': ''}, 'stop'),
  'too many tokens': (CHAT, {'messages': HI, 'max_tokens': 4096}, '4096'),
  'a long prompt': (TEXT, {'prompt': 'ab' * 3000}, '6000'),
  'an empty prompt': (TEXT, {'prompt': ''}, 'empty'),
  'no prompt': (TEXT, {'prompt': []}, 'prompt'),
  'an id too large': (TEXT, {'prompt': [5, 300]}, '300'),
  'a negative id': (TEXT, {'prompt': [-1]}, 'prompt'),
  'mixed ids': (TEXT, {'prompt': [1, 'a']}, 'prompt'),
  'a surrogate': (TEXT, {'prompt': '\ud800'}, 'surrogates'),
  'echo with logprobs': (
    TEXT,
    {'prompt': 'a', 'echo': True, 'logprobs': 1},
    'echo',
  ),
  'top_logprobs alone': (CHAT, {'messages': HI, 'top_logprobs': 2}, 'logprobs'),
  'tool_choice alone': (
    CHAT,
    {'messages': HI, 'tool_choice': 'required'},
    'tools',
  ),
  'json_schema without one': (
    CHAT,
    {'messages': HI, 'response_format': {'type': 'json_schema'}},
    'json_schema',
  ),
  'a schema that cannot be': (
    TEXT,
    {
      'prompt': 'a',
      'response_format': {
        'type': 'json_schema',
        'json_schema': {'schema': {'type': 'nonsense'}},
      },
    },
    'cannot be enforced',
  ),
  'a grammar without an end': (
    TEXT,
    {
      'prompt': 'a',
      'response_format': {'type': 'json_object'},
      'ignore_eos': True,
    },
    'ignore_eos',
  ),
  'arguments that are no JSON': (
    CHAT,
    {
      'messages': [
        {
          'role': 'assistant',
          'tool_calls': [{'function': {'name': 'a', 'arguments': '{'}}],
        }
      ]
    },
    'tool call',
  ),
}


# Bad without a stream only.
ALONE = {
  'stream_options alone': (
    CHAT,
    {'messages': HI, 'stream_options': {}},
    'stream',
  )
}


@pytest.mark.parametrize(
  'case, stream',
  [*((case, s) for case in BAD for s in (False, True))]
  + [(case, False) for case in ALONE],
)
def test_bad_requests(server, engine, case, stream):
  path, body, word = (BAD | ALONE)[case]
  seen = len(engine.seen)
  got = ask(server, path, {**body, **({'stream': True} if stream else {})})
  assert got.status == 400, got.body
  error = got.json['error']
  assert set(error) == {'message', 'type', 'param', 'code'}
  assert error['type'] == 'invalid_request_error'
  assert word in error['message'], error
  assert len(engine.seen) == seen


@pytest.mark.parametrize(
  'body',
  [
    b'',
    b'{',
    b'\xff\xfe\x00',
    b'[' * 1_000_000,
    b'{"a":' * 100_000,
    b'null',
    b'"a"',
    b'{"messages": NaN}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "seed": 1e400}',
    b'{"prompt": "a", "seed": ' + b'9' * 5000 + b'}',
    b'{"prompt": "a", "model": "\\ud800"}',
    b'{"prompt": "a", "prompt": ["\\ud800"]}',
  ],
  ids=range(13),
)
@pytest.mark.parametrize('path', [CHAT, TEXT, '/tokenize', '/abort_request'])
def test_malformed_bodies(server, path, body):
  got = ask(server, path, body, content_type='application/json')
  assert got.status in (400, 404), got.body
  assert got.json['error']['message']


def test_a_malformed_body_of_ten_megabytes(server):
  for body in (b'x' * 10_000_000, b'{"prompt": "' + b'y' * 10_000_000):
    got = ask(server, TEXT, body, content_type='application/json')
    assert got.status == 400
  whole = json.dumps({'prompt': 'z' * 10_000_000})
  got = ask(server, TEXT, whole.encode(), content_type='application/json')
  assert got.status == 400
  assert got.json['error']['code'] == 'context_length_exceeded'
  # Refused by its length: encoding it would take minutes.
  assert 'characters' in got.json['error']['message']
  assert len(got.body) < 1000
  assert ask(server, '/health').status == 200


def test_paths_and_methods(server):
  assert ask(server, '/nope').status == 404
  got = ask(server, CHAT)
  assert got.status == 405 and got.json['error']
  got = ask(server, CHAT, {'messages': HI, 'model': 'other'})
  assert (got.status, got.json['error']['code']) == (404, 'model_not_found')
  assert MODEL in got.json['error']['message']
  assert ask(server, '/v1/models/other/one').status == 404
  # A form that any web page can send is no request.
  body = json.dumps({'messages': HI}).encode()
  assert ask(server, CHAT, body, content_type='text/plain').status == 400


def test_a_full_queue(server, engine):
  engine.limit = 0
  for stream in (False, True):
    got = ask(server, CHAT, {'messages': HI, 'stream': stream})
    assert got.status == 429
    assert got.headers['retry-after'] == '3'  # 2.5 seconds, rounded up.
    assert got.json['error']['type'] == 'rate_limit_error'
  engine.limit = 2
  got = ask(server, CHAT, {'messages': HI, 'n': 3})
  assert got.status == 429
  until(lambda: not engine.open)


def test_deadlines(server, engine):
  engine.answer, engine.delay = 'long ' * 50, 0.05
  got = ask(server, CHAT, {'messages': HI, 'timeout': 0.2})
  assert (got.status, got.json['error']['code']) == (408, 'deadline_exceeded')
  got = ask(server, CHAT, {'messages': HI, 'timeout': 0.2, 'stream': True})
  assert got.status == 200
  assert got.events[-1]['error']['code'] == 'deadline_exceeded'
  assert len(got.events) > 1


def test_the_server_sets_a_deadline_too():
  engine = ScriptedEngine('long ' * 50, delay=0.05)
  with serve(engine, request_seconds=0.2) as server:
    for timeout in (None, 1000):
      got = ask(server, CHAT, {'messages': HI, 'timeout': timeout})
      assert got.status == 408


def test_a_failing_engine(server, engine):
  engine.fail = RuntimeError('secret prompt')
  got = ask(server, CHAT, {'messages': HI})
  assert got.status == 500 and b'secret' not in got.body
  got = ask(server, CHAT, {'messages': HI, 'stream': True})
  error = got.json if got.status == 500 else got.events[-1]
  assert error['error']['type'] == 'server_error'
  until(lambda: not engine.open)


def test_abort_by_id_and_all(server, engine):
  engine.answer, engine.delay = 'long ' * 200, 0.02
  for body in ({'request_id': None}, {'rid': None}, {'abort_all': True}):
    answers = []
    ask_ = lambda: answers.append(ask(server, CHAT, {'messages': HI}))
    thread = threading.Thread(target=ask_)
    thread.start()
    until(lambda: engine.open)
    name = next(iter(engine.open)).rpartition('-')[0]
    body = {key: value or name for key, value in body.items()}
    assert ask(server, '/abort_request', body).json == {'aborted': [name]}
    thread.join(20)
    assert answers[0].json['choices'][0]['finish_reason'] == 'abort'
    assert not engine.open
  got = ask(server, '/abort_request', {'request_id': 'unknown'})
  assert got.json == {'aborted': []}
  assert ask(server, '/abort_request', {}).status == 400


def test_flush(server, engine):
  before = engine.flushes
  assert ask(server, '/flush_cache', method='POST').status == 200
  assert engine.flushes == before + 1
  engine.answer, engine.delay = 'long ' * 200, 0.02
  with connect(server, post(CHAT, {'messages': HI})):
    until(lambda: engine.open)
    got = ask(server, '/flush_cache', method='POST')
    assert (got.status, got.json['error']['code']) == (409, 'busy')
  until(lambda: not engine.open)


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('n', [1, 3])
def test_a_client_that_leaves_ends_its_request(server, engine, stream, n):
  engine.answer, engine.delay = 'long ' * 400, 0.01
  body = {'messages': HI, 'stream': stream, 'n': n}
  with connect(server, post(CHAT, body)) as client:
    until(lambda: len(engine.open) == n)
    if stream:
      assert client.recv(4096).startswith(b'HTTP/1.1 200')
    names = list(engine.open)
  until(lambda: not engine.open, 5)
  assert {engine.ended[name] for name in names} == {'abort'}
  counts = ask(server, '/status').json['requests']
  assert counts['open'] == 0 and counts['aborted'] >= n


def test_clients_that_leave_while_they_send(server, engine):
  seen = len(engine.seen)
  for data in (b'POST', b'POST / HTTP/1.1\r\nHost', post(CHAT, b'{"a', 100)):
    with connect(server, data):
      pass
  with connect(server, b'\x00\xff rubbish \r\n\r\n') as client:
    assert b'400' in client.recv(100)
  assert ask(server, '/health').status == 200
  assert len(engine.seen) == seen


def test_a_client_that_does_not_read_is_given_up():
  engine = ScriptedEngine(lambda _: [40] * 4000, step_tokens=8)
  with serve(engine, stall_seconds=0.3) as server:
    body = {'prompt': 'a', 'stream': True, 'max_tokens': 3000, 'n': 3}
    body['logprobs'] = 20  # Large events.
    with connect(server, post(TEXT, body), buffer=2048):
      until(lambda: engine.seen)
      until(lambda: not engine.open, 30)
      until(lambda: ask(server, '/status').json['requests']['open'] == 0)
    counts = ask(server, '/status').json['requests']
    assert counts['aborted'] > 0


def test_slow_and_large_bodies():
  engine = ScriptedEngine()
  with serve(engine, body_seconds=0.3, max_body_bytes=1000) as server:
    with connect(server, post(CHAT, b'{', 50)) as client:
      assert b' 408 ' in client.recv(4096)
    got = ask(server, CHAT, b'x' * 1001, content_type='application/json')
    assert (got.status, got.json['error']['code']) == (413, 'body_too_large')
    chunk = b'1f4\r\n' + b'x' * 500 + b'\r\n'
    head = b'POST ' + CHAT.encode() + b' HTTP/1.1\r\nHost: x\r\n'
    head += b'Content-Type: application/json\r\nTransfer-Encoding: chunked'
    with connect(server, head + b'\r\n\r\n' + chunk * 3) as client:
      assert b' 413 ' in client.recv(4096)
    assert ask(server, TEXT, {'prompt': 'a'}).status == 200


def test_keys():
  basic = base64.b64encode(b'me:key two').decode()
  with serve(ScriptedEngine(), api_keys=('key one', 'key two')) as server:
    for path in ('/health', '/ready'):
      assert ask(server, path).status == 200
    for path in ('/', '/status', '/metrics', '/v1/models', '/openapi.json'):
      got = ask(server, path)
      assert (got.status, got.json['error']['code']) == (401, 'invalid_api_key')
    body = {'messages': HI}
    for value in (None, '', 'Bearer', 'Bearer key', 'Basic !', 'key one'):
      headers = {} if value is None else {'authorization': value}
      assert ask(server, CHAT, body, **headers).status == 401
    for value in ('Bearer key one', 'bearer key two', f'Basic {basic}'):
      assert ask(server, CHAT, body, authorization=value).status == 200
      assert ask(server, '/', authorization=value).status == 200


def test_other_web_sites_are_kept_out(server):
  got = ask(server, CHAT, {'messages': HI}, origin='https://evil.example')
  assert got.status == 403
  got = ask(server, '/flush_cache', method='POST', origin='null')
  assert got.status == 403
  got = ask(server, CHAT, {'messages': HI}, origin=server.url)
  assert got.status == 200
  assert not any(name.startswith('access-control') for name in got.headers)
  got = ask(server, CHAT, method='OPTIONS', origin=server.url)
  assert not any(name.startswith('access-control') for name in got.headers)


def test_prompts_are_not_logged(caplog):
  secret = 'a secret of mine'
  for wanted in (False, True):
    caplog.clear()
    with (
      caplog.at_level(logging.DEBUG),
      serve(ScriptedEngine(secret), log_requests=wanted) as server,
    ):
      got = chat(server, secret).json
      ask(server, TEXT, {'prompt': secret, 'stream': True, 'model': secret})
      ask(server, TEXT, {'prompt': secret, 'temperature': secret})
      ask(server, '/' + secret.replace(' ', '_'))
      shown = str(ask(server, '/status').json)
    logged = '\n'.join(record.getMessage() for record in caplog.records)
    assert secret not in logged + shown
    assert got['id'] in logged  # Ids and counts are.
    assert ('SamplingParams' in logged) == wanted


def test_a_thousand_connections(server, engine):
  wanted = 1000
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  need = 2 * wanted + 200
  # Each connection is two files here: `ulimit -Hn` says how many may be open.
  assert hard == resource.RLIM_INFINITY or hard >= need, hard
  resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, need), hard))
  engine.answer = 'Hello'
  data = post(TEXT, {'prompt': 'a', 'max_tokens': 3})
  try:
    with contextlib.ExitStack() as stack:
      clients = [stack.enter_context(connect(server)) for _ in range(wanted)]
      for client in clients:
        client.sendall(data)
      for client in clients:
        assert client.recv(4096).startswith(b'HTTP/1.1 200')
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  until(lambda: not engine.open)
