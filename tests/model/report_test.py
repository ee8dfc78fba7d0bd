"""Recorded runs side by side: figures, verdicts and the page."""

from __future__ import annotations

import base64
import json
import pathlib
import re

import numpy as np
import pytest
from model import oracle

from glm_jax import validation
from glm_jax.presets import PRESETS
from glm_jax.published_config import config_from_published
from glm_jax.validation import report, report_page
from glm_jax.validation.random_checkpoint import (
  real_slice,
  write_random_checkpoint,
)
from glm_jax.validation.record import Record

# Five layers, the real sharing and a drafter; index_topk far below the prompt.
SHAPE = dict(
  num_hidden_layers=5,
  indexer_types=['full', 'full', 'shared', 'shared', 'shared'],
  index_topk=16,
  first_k_dense_replace=1,
)
IDS = tuple(np.random.default_rng(7).integers(0, 97, 60).tolist())


@pytest.fixture(scope='module')
def records(tmp_path_factory) -> pathlib.Path:
  """transformers' run, ours, and ours with one damaged tensor."""
  at = tmp_path_factory.mktemp('records')

  def edit(name, tensor):
    if name == 'model.layers.3.mlp.shared_experts.up_proj.weight':
      tensor[0] *= 1.05
    return tensor

  sound = str(at / 'sound')
  write_random_checkpoint(sound, 7, SHAPE, mtp=True)
  damaged = oracle.edited(sound, str(at / 'checkpoint'), edit)
  quiet = dict(log=lambda line: None)
  validation.validate(
    sound, IDS, framework='torch', record=at / 'torch', **quiet
  )
  for name, path in (('jax', sound), ('damaged', damaged)):
    validation.validate(path, against=at / 'torch', record=at / name, **quiet)
  return at


def test_figures_and_verdicts(records):
  (case,) = report.compare_records(
    [records / name for name in ('torch', 'jax', 'damaged')]
  )
  good, bad = case.runs
  assert case.name == 'torch' and not case.passed
  assert good.result.passed
  assert str(bad.result.parted) == 'layer 3: mlp'
  assert [e.layer for e in good.layers] == list(range(5))
  assert max(e.hidden for e in good.layers) < 1e-4 < bad.layers[3].mlp
  assert max(e.mlp for e in bad.layers[:3]) < 1e-4
  assert good.layers[0].same_keys == 1
  kinds = case.meta.config['indexer_types']
  for error, kind in zip(good.layers, kinds, strict=True):
    assert (error.same_keys is None) == (kind == 'shared')
  assert good.kl.shape == (60,) and 0 <= good.kl.max() < 1e-8 < bad.kl.max()
  assert good.other_token is None
  assert good.draft_kl.shape == (2, 4) and good.draft_kl.max() < 1e-8


@pytest.mark.parametrize('name', ['torch', 'jax'])
def test_records_hold_the_scores_of_every_selection(records, name):
  record = Record(records / name)
  for layer in record.layers(record.meta.layers):
    full = record.meta.config['indexer_types'][layer.layer] == 'full'
    assert (layer.scores is not None) == full
    if not full:
      continue
    assert np.isneginf(layer.scores[np.triu_indices(60, 1)]).all()
    for t, (scores, kept) in enumerate(zip(layer.scores, layer.selected)):
      best = np.argsort(-scores[: t + 1], kind='stable')[:16]
      assert sorted(best) == [p for p in kept if p >= 0]


def test_divergence_is_that_of_the_distributions():
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
  logits = np.log(np.stack([p, q])) + np.array([[3.0], [-7.0]])
  got = report.divergence(logits[:1], logits[1:])
  np.testing.assert_allclose(got, [np.sum(p * np.log(p / q))], rtol=1e-12)


def test_selected_keys_are_counted_once():
  a = np.array([[0, 1, 2, -1], [1, 3, 5, 7]])
  b = np.array([[0, 2, -1, -1], [1, 2, 3, 4]])
  assert report._same_keys(a, b) == 4 / 7


def test_page_stands_alone(records, tmp_path):
  cases = report.compare_records(
    [records / name for name in ('torch', 'jax', 'damaged')]
  )
  html = report_page.write_page(cases, tmp_path / 'new' / 'index.html')
  text = html.read_text()
  images = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
  assert len(images) == 4 == text.count('<img')
  for image in images:
    assert base64.b64decode(image).startswith(b'\x89PNG')
  assert 'http' not in text and '<script' not in text
  assert 'class="bad"' in text and 'parts at layer 3: mlp' in text
  assert 'jax (reference)' not in text and 'torch (reference)' in text


def test_pictures_have_labels_and_legends(records):
  (case,) = report.compare_records([records / 'torch', records / 'jax'])
  for draw in (
    report_page._growth,
    report_page._selections,
    report_page._next_tokens,
    report_page._drafts,
  ):
    axes = report_page.Figure().subplots()
    draw(axes, case.runs)
    assert axes.get_xlabel() and axes.get_ylabel()
    labels = axes.get_legend_handles_labels()[1]
    assert labels and all('jax' in label for label in labels)


def test_launcher(records, tmp_path):
  from model.validate_test import launch

  out = tmp_path / 'report'
  names = ','.join(str(records / name) for name in ('torch', 'jax'))
  done = launch(f'--report={out}', f'--records={names}')
  assert done.returncode == 0, done.stderr
  assert 'jax beside torch: passed' in done.stdout
  assert (out / 'index.html').exists()
  (case,) = json.loads((out / 'report.json').read_text())
  assert len(case['runs'][0]['kl']) == 60
  done = launch(f'--report={out}', f'--records={records / "jax"}')
  assert done.returncode == 2
  assert 'has no other record of its model' in done.stderr
  done = launch(f'--report={out}')
  assert done.returncode == 2 and '--records=REF,A,B' in done.stderr


def test_slice_has_the_real_dimensions():
  real, got = PRESETS['glm52'], config_from_published(real_slice())
  assert (got.mla, got.indexer) == (real.mla, real.indexer)
  assert got.hidden_size == real.hidden_size
  assert got.indexer_types == ('full', 'shared', 'shared', 'shared')
  assert got.mlp_types == ('sparse',) * 4
  assert got.moe.intermediate_size == real.moe.intermediate_size
