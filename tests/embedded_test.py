"""glm-nano, the model in the package: it loads, is small, and has learnt."""

import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import glm_jax
from glm_jax.embedded import EMBEDDED

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope='module')
def model():
  return glm_jax.load_model(dtype='f32')


def test_it_is_the_default_and_known_by_name():
  assert glm_jax.load_config('glm_nano') == glm_jax.load_config(EMBEDDED)


def test_folder_takes_at_most_24_mib_of_disk():
  blocks = [math.ceil(f.stat().length / 4096) for f in EMBEDDED.iterdir()]
  assert 4 * (sum(blocks) + 1) <= 24576  # KiB, the folder's own block too


def test_it_has_the_published_shape():
  c = glm_jax.load_config('glm_nano')
  full, shared = 'full', 'shared'
  assert c.indexer_types == (full, full) + (full, *[shared] * 3) * 2
  assert c.indexer.num_heads == 32
  assert c.indexer.topk * 32 == c.max_position_embeddings == 8192
  assert c.mtp.num_layers == 1 and c.mtp.share_index_and_kv


def test_the_tokenizer_is_its_own():
  tokenizer = glm_jax.Tokenizer.load(EMBEDDED)
  assert tokenizer.vocab_size <= glm_jax.load_config('glm_nano').vocab_size
  text = 'def f(x):\n    return x + 1  # é 漢\n'
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_it_predicts_python(model):
  tokenizer = glm_jax.Tokenizer.load(EMBEDDED)
  source = (ROOT / 'glm_jax' / 'moe.py').read_text()
  ids = jnp.asarray([tokenizer.encode(source)[:512]])
  logits = glm_jax.forward(model, ids).logits[0, :-1]
  nats = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(
    logits, ids[0, 1:, None], -1
  ).squeeze(-1)
  # 8.7 nats would be a guess; this file was in nobody's training data.
  assert float(nats.mean()) < 4.0


def test_the_demo_drafts_without_changing_a_token_and_without_torch():
  code = (
    'import sys, runpy; '
    'sys.modules.update(torch=None, transformers=None); '
    'sys.argv = ["demo.py", "--max_new_tokens=12"]; '
    'runpy.run_path("launch/demo.py", run_name="__main__")'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert 'same tokens with and without drafts: yes' in done.stdout
