"""A real server on a free port of this machine, in a thread, for tests."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time

from chat_tokenizer import tokenizer
from scripted_engine import VOCAB

from glm_jax.serving.http import ServedModel, Server, ServerOptions, create_app

MODEL = 'glm-test'


def served_model(**changes):
  values = dict(
    names=(MODEL,),
    vocab_size=VOCAB,
    max_model_len=4096,
    tokenizer=tokenizer(),
    eos_ids=tokenizer().stop_ids,
    created=1,
  )
  return ServedModel(**{**values, **changes})


@contextlib.contextmanager
def serve(engine, model=None, *, drain_seconds=5.0, **options):
  """Yields a running `Server`; leaves when it has stopped."""
  app = create_app(engine, model or served_model(), ServerOptions(**options))
  started = threading.Event()
  server = Server(
    app,
    host='127.0.0.1',
    port=0,
    drain_seconds=drain_seconds,
    on_started=lambda _: started.set(),
  )
  thread = threading.Thread(
    target=lambda: asyncio.run(server.serve()), daemon=True
  )
  thread.start()
  assert started.wait(20)
  try:
    yield server
  finally:
    server.handle_exit(None, None)
    thread.join(20)
    assert not thread.is_alive()


@dataclasses.dataclass
class Answer:
  """A response of `ask`."""

  status: int
  headers: dict
  body: bytes

  @property
  def json(self):
    return json.loads(self.body)

  @property
  def events(self):
    """The objects of a stream, [DONE] checked and left out."""
    lines = self.body.decode().split('\n\n')
    data = [line[6:] for line in lines if line.startswith('data: ')]
    assert data[-1] == '[DONE]'
    return [json.loads(line) for line in data[:-1]]


def ask(server, path, body=None, *, method=None, timeout=30, **headers):
  """One request; a body that is no bytes is sent as JSON."""
  address = server.url.removeprefix('http://')
  connection = http.client.HTTPConnection(address, timeout=timeout)
  if body is not None and not isinstance(body, bytes):
    body = json.dumps(body).encode()
    headers.setdefault('content_type', 'application/json')
  names = {name.replace('_', '-'): value for name, value in headers.items()}
  method = method or ('GET' if body is None else 'POST')
  with contextlib.closing(connection):
    connection.request(method, path, body, names)
    got = connection.getresponse()
    headers = {name.lower(): value for name, value in got.getheaders()}
    return Answer(got.status, headers, got.read())


def chat(server, messages='Hi', **more):
  """A chat request; the answer must be a success."""
  if isinstance(messages, str):
    messages = [{'role': 'user', 'content': messages}]
  got = ask(server, '/v1/chat/completions', {'messages': messages, **more})
  assert got.status == 200, got.body
  return got


def until(condition, seconds=10.0):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


@contextlib.contextmanager
def connect(server, data=b'', buffer=None):
  host, port = server.url.removeprefix('http://').split(':')
  with socket.socket() as made:
    made.settimeout(20)
    if buffer is not None:  # Has an effect before connecting only.
      made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.connect((host, int(port)))
    made.sendall(data)
    yield made


def post(path, body, length=None):
  """Bytes of a request."""
  body = body if isinstance(body, bytes) else json.dumps(body).encode()
  length = len(body) if length is None else length
  head = (
    f'POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n'
    f'Content-Length: {length}\r\n\r\n'
  )
  return head.encode() + body
