"""The studies: what differs between their forms, and their tables."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import textwrap

import numpy as np
import pytest
from absl.testing import absltest

from glm_jax.data import TokenFile, TokenWriter
from glm_jax.evaluation import draft_ablation, index_price
from glm_jax.evaluation.by_position import PositionLosses
from glm_jax.training.recipe import load_recipe

ROOT = pathlib.Path(__file__).resolve().parents[2]
ABLATION = ROOT / 'configs' / 'ablation.py'
PRICE = ROOT / 'configs' / 'index_price.py'


def measured(length):
  return {
    'accept_length': length,
    'accept_length_with_bonus': length + 1,
    'acceptance': [0.5, 0.25],
    'rounds': 10,
  }


class DraftAblationTest(absltest.TestCase):
  def test_forms_differ_in_sharing_and_loss_alone(self):
    recipe = load_recipe(ABLATION)
    forms = {
      form: draft_ablation.form_config(recipe, form, 3)
      for form in draft_ablation.FORMS
    }
    plain = lambda c: dataclasses.replace(
      c,
      stages=tuple(
        dataclasses.replace(s, draft=None, train=('trunk',)) for s in c.stages
      ),
    )
    assert len({repr(plain(c)) for c in forms.values()}) == 1
    drafts = {f: [s.draft for s in c.stages] for f, c in forms.items()}
    assert [d.share for d in drafts['unshared']] == [False, False]
    assert [d.loss for d in drafts['shared']] == ['ce', 'ce']
    assert [d.loss for d in drafts['shared_tv']] == ['ce', 'tv']
    assert all(d.steps == 7 for ds in drafts.values() for d in ds)
    assert all(c.seed == 3 for c in forms.values())

  def test_rows_draft_as_they_were_trained(self):
    options = {row.name: row.options for row in draft_ablation.ROWS}
    assert not options['baseline MTP'].share_index
    assert options['baseline MTP'].greedy
    assert options['+ IndexShare + KVShare'].share_kv
    assert not options['+ rejection sampling'].greedy

  def test_table_has_means_spread_and_gains(self):
    names = [row.name for row in draft_ablation.ROWS]
    runs = {
      (name, seed): measured(1 + i + 0.1 * seed)
      for i, name in enumerate(names)
      for seed in (0, 1)
    }
    table = draft_ablation.summarise(runs)
    assert [row['name'] for row in table] == names
    np.testing.assert_allclose(table[1]['accept_length'], 2.05)
    np.testing.assert_allclose(
      table[1]['accept_length_stdev'], np.std([2, 2.1], ddof=1)
    )
    np.testing.assert_allclose(table[1]['accept_length_gain'], 2.05 / 1.05 - 1)
    np.testing.assert_allclose(table[3]['published_gain'], 5.47 / 4.56 - 1)
    alone = draft_ablation.summarise({(names[2], 0): measured(1.0)})
    assert alone[0]['accept_length_gain'] is None
    assert alone[0]['accept_length_stdev'] is None

  def test_prompts_go_on_within_their_document(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'held_out'
      with TokenWriter(path, 1000, 'ab' * 32) as writer:
        for start in range(0, 1000, 250):
          writer.add(np.arange(start, start + 250))
      file = TokenFile(path)
      prompts = draft_ablation.held_out_prompts(file, 4, 100, 28)
      assert all(
        np.array_equal(p, np.arange(p[0], p[0] + 100)) for p in prompts
      )
      assert all((p[0] % 250) + 128 <= 250 for p in prompts)
      with pytest.raises(ValueError, match='shorten the prompts'):
        draft_ablation.held_out_prompts(file, 4, 240, 28)


def judged(loss, windows=4):
  rng = np.random.default_rng(0)
  nats = np.stack([rng.random(windows), rng.random(windows)], 1) + loss
  return {
    'losses': PositionLosses(
      (0, 64, 128), nats, np.array([64, 64]), 'digest', 'share'
    ),
    'needles': {'share': 0.5},
    'copies': {'copy_nats': 1.0, 'copy_accuracy': 0.5},
  }


class IndexPriceTest(absltest.TestCase):
  def test_forms_differ_in_indexers_and_selection_alone(self):
    recipe = load_recipe(PRICE)
    forms = {
      form: index_price.form_config(recipe, form, 1)
      for form in index_price.TRAINED
    }
    kinds = {f: index_price.pattern(c.model) for f, c in forms.items()}
    assert kinds == {
      'dense': 'F' * 10,
      'per_layer': 'F' * 10,
      'share': 'FFFSSSFSSS',
    }
    sparse = {f: [s.sparse for s in c.stages] for f, c in forms.items()}
    assert sparse == {
      'dense': [False, False],
      'per_layer': [False, True],
      'share': [False, True],
    }
    # A dense run has no use for its indexers.
    assert not any(s.kl_coefficient for s in forms['dense'].stages)
    plain = lambda c: dataclasses.replace(
      c,
      model=recipe.model,
      stages=tuple(
        dataclasses.replace(s, sparse=True, kl_coefficient=1.0)
        for s in c.stages
      ),
    )
    assert len({repr(plain(c)) for c in forms.values()}) == 1
    base = load_recipe(PRICE, 'get_base')
    assert index_price.pattern(base.model) == 'F' * 10
    assert not any(stage.sparse for stage in base.stages)

  def test_differences_are_paired_with_per_layer(self):
    levels = dict(dense=1.0, per_layer=2.0, share=2.01, inference_only=2.5)
    runs = {
      (form, seed): judged(level)
      for form, level in levels.items()
      for seed in (0, 1)
    }
    found = index_price.compare_forms(runs, (0, 1))
    assert [row['form'] for row in found['forms']] == list(index_price.FORMS)
    share = found['difference']['share'][-1]
    np.testing.assert_allclose(share['difference'], 0.01, atol=1e-9)
    inference = found['difference']['inference_only'][-1]
    np.testing.assert_allclose(inference['difference'], 0.5, atol=1e-9)


SMALL_PRICE = """
import dataclasses
import runpy
from glm_jax.config import IndexerConfig, MlaConfig
full = runpy.run_path({price!r})

def small(config):
  kinds = config.model.indexer_types[:4]
  kinds = kinds if len(set(kinds)) == 1 and config.stages[0].name == 'short' \\
      else ('full', 'shared', 'full', 'shared')
  model = dataclasses.replace(
    config.model, hidden_size=32, intermediate_size=48, indexer_types=kinds,
    mlp_types=('dense',) * 4, mla=MlaConfig(2, 16, 16, 12, 8, 12),
    indexer=IndexerConfig(32, 12, 8), dtype='float32')
  stages = tuple(
    dataclasses.replace(s, steps=2, window=128, batch=2, chunk=128)
    for s in config.stages)
  return dataclasses.replace(
    config, model=model, stages=stages, compute='float32', eval_windows=2)

def get_base():
  return small(full['get_base']())

def get_train_config():
  return small(full['get_train_config']())
"""


@pytest.mark.long
def test_index_price_runs_and_goes_on_where_it_stopped(tmp_path):
  """The launcher, on a real folder of text and a model of four layers."""
  recipe = tmp_path / 'price.py'
  recipe.write_text(textwrap.dedent(SMALL_PRICE.format(price=str(PRICE))))
  launch = lambda *args: subprocess.run(
    [sys.executable, *args], cwd=ROOT, capture_output=True, text=True
  )
  corpus = tmp_path / 'corpus'
  made = launch(
    'launch/prepare_data.py',
    '--folder=glm_jax',
    f'--out={corpus}',
    '--tokenizer=glm_jax/models/glm_nano',
  )
  assert made.returncode == 0, made.stderr[-2000:]
  command = (
    'launch/index_price.py',
    f'--config={recipe}',
    f'--corpus={corpus}',
    f'--workdir={tmp_path / "runs"}',
    '--seeds=0',
    '--length=256',
    '--windows=2',
    '--count=4',
    '--goal=1',
    f'--json={tmp_path / "out.json"}',
  )
  some = launch(*command, '--forms=share')
  assert some.returncode == 1, some.stderr[-2000:]
  assert 'not run: dense-0, per_layer-0, inference_only-0' in some.stderr
  done = launch(*command)
  assert done.returncode == 0, done.stderr[-2000:]
  found = json.loads((tmp_path / 'out.json').read_text())
  assert [row['form'] for row in found['forms']] == list(index_price.FORMS)


def test_ablation_keeps_every_measured_row(tmp_path):
  """A stop between two rows of one form loses neither."""
  rows = [row.name for row in draft_ablation.ROWS if row.form == 'shared']
  measured = {
    'accept_length': 1.0,
    'accept_length_with_bonus': 2.0,
    'acceptance': [0.5],
  }
  (tmp_path / 'shared-0.json').write_text(json.dumps({rows[0]: measured}))
  done = subprocess.run(
    [
      sys.executable,
      'launch/ablation.py',
      '--corpus=nowhere',
      f'--workdir={tmp_path}',
      '--seeds=0',
      '--max_seconds=0',
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1, done.stderr[-2000:]
  assert 'not run: unshared-0, shared-0, shared_tv-0' in done.stderr
  assert rows[0] in done.stdout and rows[1] not in done.stdout
  assert '1.000' in done.stdout and '2.000' in done.stdout


if __name__ == '__main__':
  absltest.main()
