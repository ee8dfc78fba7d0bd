"""Requests generated from the served OpenAPI document find no 5xx."""

import hypothesis
import pytest
import schemathesis
from http_server import MODEL, ask
from schemathesis.specs.openapi.checks import positive_data_acceptance
from scripted_engine import ScriptedEngine

PATHS = [
  '/v1/chat/completions',
  '/v1/completions',
  '/abort_request',
  '/v1/models',
  '/v1/models/{name}',
  '/tokenize',
  '/detokenize',
  '/health',
  '/ready',
  '/metrics',
  '/flush_cache',
  '/status',
]


@pytest.fixture(scope='module')
def engine():
  return ScriptedEngine('hm</think>Hello')


@pytest.fixture(scope='module')
def document(server):
  return schemathesis.openapi.from_url(f'{server.url}/openapi.json')


def test_the_document_names_every_path(server, document):
  got = ask(server, '/openapi.json').json
  assert sorted(got['paths']) == sorted(PATHS)
  chat = got['components']['schemas']['ChatRequest']
  assert chat['additionalProperties'] is False
  assert {'messages', 'tools', 'stream'} <= set(chat['properties'])


@pytest.mark.parametrize('path', PATHS)
def test_no_request_of_the_document_fails_the_server(document, path):
  try_requests(document, path, 12)


@pytest.mark.long
@pytest.mark.parametrize('path', PATHS)
def test_more_requests_of_the_document(document, path):
  try_requests(document, path, 300)


def try_requests(document, path, examples):
  method = 'POST' if path in POSTED else 'GET'
  operation = document[path][method]
  statuses = []

  @hypothesis.settings(
    max_examples=examples,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @hypothesis.given(case=operation.as_strategy())
  def attempt(case):
    body = case.body
    if isinstance(body, dict):
      # Deeper than the checks of names and messages, half of the time.
      body['model'] = MODEL if len(statuses) % 2 else body.get('model')
      if 'messages' in body and len(statuses) % 2:
        body['messages'] = [{'role': 'user', 'content': str(body)}]
    answer = case.call()
    statuses.append(answer.status_code)
    # What the schema allows may still contradict itself, as a schema for
    # the answer that cannot be enforced.
    case.validate_response(answer, excluded_checks=[positive_data_acceptance])
    assert answer.status_code < 500, answer.text

  attempt()
  assert statuses


POSTED = (
  '/v1/chat/completions',
  '/v1/completions',
  '/abort_request',
  '/tokenize',
  '/detokenize',
  '/flush_cache',
)
