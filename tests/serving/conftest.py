"""Fixtures that HTTP tests share; a module replaces what it wants otherwise."""

import openai
import pytest
from http_server import serve
from scripted_engine import ScriptedEngine


@pytest.fixture(scope='module')
def engine():
  return ScriptedEngine()


@pytest.fixture(scope='module')
def server(engine):
  with serve(engine) as running:
    yield running


@pytest.fixture(scope='module')
def client(server):
  made = openai.OpenAI(
    base_url=f'{server.url}/v1', api_key='none', max_retries=0
  )
  with made:
    yield made
