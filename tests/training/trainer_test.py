"""The trainer: forward passes against inference, gradients, loop, resume."""

import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from glm_jax import drafting, forward
from glm_jax.cache import init_cache, make_rows
from glm_jax.checkpoints import load_model
from glm_jax.config import (
  IndexerConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  MtpConfig,
)
from glm_jax.data import TokenWriter
from glm_jax.model import head
from glm_jax.model import trunk as serve_trunk
from glm_jax.plan import LocalPlan
from glm_jax.sampling import sampling_params
from glm_jax.training import metrics
from glm_jax.training.config import Stage, TrainConfig, override
from glm_jax.training.draft_forward import DraftForm, draft_windows
from glm_jax.training.forward import ForwardOptions, trunk
from glm_jax.training.loop import Trainer, export
from glm_jax.training.optimizer import learning_rate, orthogonalize
from glm_jax.training.parameters import Layout, part_of
from glm_jax.training.step import stage_loss
from glm_jax.training.windows import Windows

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Compilation is what these tests spend their time on.
quick = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)
# Unrolled full layer, then two scanned groups of full and shared.
MODEL = ModelConfig(
  vocab_size=96,
  hidden_size=32,
  intermediate_size=48,
  indexer_types=('full', 'full', 'shared', 'full', 'shared'),
  mlp_types=('dense',) + ('sparse',) * 4,
  mla=MlaConfig(2, 16, 16, 12, 8, 12),
  indexer=IndexerConfig(4, 12, 8),
  moe=MoeConfig(4, 2, 1, 16),
  mtp=MtpConfig(1),
  rope_theta=1e4,
  max_position_embeddings=512,
  tie_word_embeddings=True,
  initializer_range=0.2,
  eos_token_ids=(0,),
  pad_token_id=0,
  dtype='float32',
)
# Two scanned groups and nothing else: half the compilation.
SMALL = dataclasses.replace(
  MODEL,
  indexer_types=('full', 'shared') * 2,
  mlp_types=('sparse',) * 4,
)
LENGTHS, STARTS, ROWS, AHEAD = (50, 90), (0, 64), 192, 8


@functools.cache
def model():
  return Layout(MODEL).model(Layout(MODEL).init(0), 'float32')


@functools.cache
def small_params():
  return Layout(SMALL).init(0)


def documents():
  rng = np.random.default_rng(0)
  return [rng.integers(0, 96, n).astype(np.int32) for n in LENGTHS]


def windows():
  """Two documents in one window, rows of nobody between and behind."""
  arrays = np.zeros((3, 1, ROWS + AHEAD), np.int32)
  for i, (ids, start) in enumerate(zip(documents(), STARTS)):
    part = slice(start, start + len(ids))
    arrays[0, 0, part] = ids
    arrays[1, 0, part] = i + 1
    arrays[2, 0, part] = np.arange(len(ids))
  return Windows(*map(jnp.asarray, arrays))


def write_corpus(folder):
  """Documents of two alternating patterns: easy to learn."""
  rng = np.random.default_rng(1)
  for name, count in (('train', 40), ('held_out', 6)):
    with TokenWriter(folder / name, 96, 'ab' * 32) as writer:
      for _ in range(count):
        start, step = rng.integers(0, 96), rng.integers(1, 4)
        writer.add((start + step * np.arange(150)) % 96)
  return folder


@functools.cache
def corpus():
  return write_corpus(pathlib.Path(tempfile.mkdtemp(prefix='corpus_')))


CONFIG = TrainConfig(
  model=SMALL,
  stages=(
    Stage('share', 10, 128, 2, accumulate=2, kl_stride=4, experts='dense'),
  ),
  compute='float32',
  learning_rate=2e-2,
  warmup=2,
  save_every=3,
  eval_every=6,
  eval_windows=4,
  keep=3,
)


def losses_of(workdir):
  lines = metrics.read(pathlib.Path(workdir) / 'metrics.jsonl')
  free = ('tokens_per_second',)
  return [{k: v for k, v in x.items() if k not in free} for x in lines]


@functools.cache
def finished():
  """An uninterrupted run: trainer, result, state."""
  trainer = Trainer(
    CONFIG, tempfile.mkdtemp(prefix='run_'), corpus(), log=lambda _: None
  )
  return trainer, *trainer.run()


class ForwardTest(parameterized.TestCase):
  @parameterized.parameters(
    ('gather', 'grouped'), ('gather', 'dense'), ('masked', 'dense')
  )
  def test_equals_inference(self, attention, experts):
    options = ForwardOptions(
      attention=attention, experts=experts, kl_stride=4, chunk=64
    )
    ours = np.asarray(head(model(), _trunk(model(), options)))
    for ids, start in zip(documents(), STARTS):
      theirs = np.asarray(_serve(model(), ids))
      error = np.abs(theirs - ours[start : start + len(ids)]).max()
      assert error <= 1e-5 * max(np.abs(theirs).max(), 1), error

  def test_dense_stage_equals_a_selection_of_everything(self):
    wide = dataclasses.replace(MODEL.indexer, topk=ROWS)
    layout = Layout(dataclasses.replace(MODEL, indexer=wide))
    all_keys = layout.model(Layout(MODEL).flatten(model()), 'float32')
    sparse = _trunk(all_keys, ForwardOptions(kl_stride=0))
    options = ForwardOptions(sparse=False, kl_stride=0, chunk=64)
    dense = _trunk(model(), options)
    live = np.asarray(windows().segments[0, :ROWS]) > 0
    np.testing.assert_allclose(dense[live], sparse[live], atol=2e-5)

  @parameterized.parameters(True, False)
  def test_draft_steps_equal_inference(self, advance):
    steps, at = 3, 40
    form = DraftForm(steps=steps, advance_position=advance)
    out = _drafted(form)
    ids = documents()[1]
    theirs = _draft(jnp.asarray(ids), at, steps, advance)
    ours = head(model(), out.hidden[:, STARTS[1] + at])
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    targets = np.asarray(out.targets[:, STARTS[1] + at])
    np.testing.assert_array_equal(targets, ids[at + 1 : at + 1 + steps])
    live = np.flatnonzero(out.mask)
    # Rows 1 .. n - 1 - steps of each document, nothing across them.
    wanted = [
      start + np.arange(1, n - steps) for n, start in zip(LENGTHS, STARTS)
    ]
    np.testing.assert_array_equal(live, np.concatenate(wanted))

  def test_unshared_first_step_is_the_shared_one(self):
    shared, own = _drafted(DraftForm(2)), _drafted(DraftForm(2, share=False))
    live = np.asarray(shared.mask)
    first = np.abs(shared.hidden[0] - own.hidden[0])[live].max()
    second = np.abs(shared.hidden[1] - own.hidden[1])[live].max()
    assert first < 1e-5 < 1e-3 < second

  def test_stride_drafts_from_some_rows(self):
    every = _drafted(DraftForm(2))
    some = _drafted(DraftForm(2, stride=4), 5)  # offset 5 of stride 4 is 1
    np.testing.assert_array_equal(every.mask[1::4], some.mask)
    np.testing.assert_array_equal(every.targets[:, 1::4], some.targets)
    live = np.asarray(some.mask)
    np.testing.assert_allclose(
      every.hidden[:, 1::4][:, live], some.hidden[:, live], atol=1e-5
    )


def _trunk(m, options):
  return quick(lambda m, w: trunk(m, w, options)[0])(m, windows())


@functools.cache
def _hidden():
  return _trunk(model(), ForwardOptions(kl_stride=0))


@functools.cache
def _drafted(form, offset=0):
  options = ForwardOptions(kl_stride=4)
  run = lambda *args: draft_windows(*args, options, form, offset)
  return quick(run)(model(), windows(), _hidden())


@quick
def _serve(m, ids):
  return forward(m, ids).logits[0]


@functools.partial(quick, static_argnums=(1, 2, 3))
def _draft(ids, at, steps, advance):
  """Inference's draft logits after `at` + 1 verified tokens, forced."""
  table = jnp.arange(4, dtype=jnp.int32)[None]
  pos = jnp.arange(at, dtype=jnp.int32)
  rows = make_rows(jnp.zeros(at, jnp.int32), pos, table)
  cache = init_cache(MODEL, 4, dtype='f32')
  before = ids[:at]
  hidden, cache, _ = serve_trunk(model(), before, cache, rows)
  cache = drafting.prefill_rows(
    model(), before, hidden, cache, rows, LocalPlan()
  )
  drafts, _ = drafting.draft(
    model(),
    ids[None, at : at + 1],
    hidden[-1][None, None],
    cache,
    table,
    jnp.full(1, at, jnp.int32),
    jnp.ones(1, jnp.int32),
    jnp.full(1, steps, jnp.int32),
    sampling_params(1),
    steps,
    drafting.DraftOptions(advance_position=advance),
    LocalPlan(),
    ids[None, at + 1 : at + 1 + steps],
  )
  return drafts.logits[0]


class GradientTest(parameterized.TestCase):
  def grads(self, **settings):
    layout = Layout(SMALL)
    stage = Stage('s', 1, 128, 1, kl_stride=4, **settings)
    loss = lambda p: stage_loss(layout.model(p, 'float32'), windows(), stage, 1)
    run = quick(jax.grad(loss, has_aux=True))
    grads = run(small_params())[0]
    size = {'trunk': 0.0, 'indexer': 0.0, 'mtp': 0.0}
    for path, g in grads.items():
      assert np.isfinite(g).all(), path
      size[part_of(path)] += float(jnp.abs(g).sum())
    return size, grads

  @parameterized.parameters(True, False)
  def test_indexer_and_trunk_never_meet(self, sparse):
    """The indexer's loss moves the indexer alone; the LM loss never it."""
    cheap = dict(sparse=sparse, experts='dense', remat=False)
    size, grads = self.grads(train=('indexer',), **cheap)
    assert size['indexer'] > 0 == size['trunk'] == size['mtp']
    every = [p for p in grads if '.indexer.' in p and p[:3] != 'mtp']
    assert all(np.any(grads[p]) for p in every), every
    size, _ = self.grads(train=('trunk',), kl_coefficient=0.0, **cheap)
    assert size['trunk'] > 0 == size['indexer']

  def test_frozen_trunk_gets_only_the_drafters_embedding(self):
    form = DraftForm(2, stride=2)
    size, grads = self.grads(
      train=('mtp',), draft=form, experts='dense', remat=False
    )
    assert size['indexer'] == 0 < size['mtp']
    moved = {p for p, g in grads.items() if np.any(g) and p[:3] != 'mtp'}
    # Embedding and head are shared; the run itself freezes them.
    assert moved <= {'embed', 'head.kernel'}

  def test_attention_forms_have_the_same_gradient(self):
    trained = dict(train=('trunk', 'indexer'), remat=False)
    _, gather = self.grads(attention='gather', experts='grouped', **trained)
    _, masked = self.grads(attention='masked', experts='dense', **trained)
    for path, g in gather.items():
      scale = max(np.abs(g).max(), 1e-3)
      np.testing.assert_allclose(
        masked[path], g, atol=1e-4 * scale, err_msg=path
      )


class OptimizerTest(parameterized.TestCase):
  def test_orthogonalize(self):
    x = np.random.default_rng(0).normal(size=(3, 6, 4)).astype(np.float32)
    values = np.linalg.svd(np.asarray(orthogonalize(jnp.asarray(x))))[1]
    assert values.min() > 0.5 and values.max() < 1.3

  def test_schedules(self):
    for schedule in ('wsd', 'cosine'):
      config = dataclasses.replace(CONFIG, schedule=schedule, warmup=3)
      rates = [
        float(learning_rate(config, jnp.int32(s))) / config.learning_rate
        for s in range(config.steps + 1)
      ]
      np.testing.assert_allclose(rates[:3], [1 / 3, 2 / 3, 1], rtol=1e-6)
      np.testing.assert_allclose(rates[-1], config.final_scale, rtol=1e-5)
      assert rates[3:] == sorted(rates[3:], reverse=True)

  def test_stages_follow_each_other(self):
    short = Stage('short', 2, 64, 1, sparse=False)
    config = dataclasses.replace(CONFIG, stages=(short, *CONFIG.stages))
    assert [config.place(s) for s in (0, 1, 2, 11)] == [
      (0, 0), (0, 1), (1, 0), (1, 9)
    ]  # fmt: skip
    run = Trainer(config, tempfile.mkdtemp(), corpus())
    assert run.batch(1).tokens.shape == (1, 1, 65)
    assert run.batch(2).tokens.shape == (2, 2, 129)

  def test_override(self):
    config = override(
      CONFIG, ['seed=3', 'share.batch=1', 'attention=masked', 'loss=ce']
    )
    assert config.seed == 3
    assert [s.batch for s in config.stages] == [1]
    assert {s.attention for s in config.stages} == {'masked'}
    with pytest.raises(ValueError, match='nope is no setting'):
      override(CONFIG, ['nope=1'])


class LoopTest(parameterized.TestCase):
  def test_learns_and_writes_metrics(self):
    trainer, result, _ = finished()
    assert result.finished and not result.failed
    lines = metrics.read(trainer.workdir / 'metrics.jsonl')
    steps = [x['step'] for x in lines if 'cross_entropy' in x]
    assert steps == list(range(1, 11))
    first, last = lines[0], [x for x in lines if 'cross_entropy' in x][-1]
    assert last['cross_entropy'] < first['cross_entropy'] - 0.5
    wanted = {'step', 'stage', 'cross_entropy', 'indexer_kl', 'learning_rate',
              'gradient_norm', 'tokens_per_second'}  # fmt: skip
    assert all(wanted <= set(x) for x in lines if 'cross_entropy' in x)
    held_out = [x['step'] for x in lines if 'held_out_loss' in x]
    assert held_out == [6, 10]

  def test_biases_move_and_the_drafter_does_not(self):
    _, _, state = finished()
    before = Layout(SMALL).init(CONFIG.seed)
    for path, value in state.params.items():
      moved = bool(np.any(np.asarray(value) != np.asarray(before[path])))
      assert moved == (part_of(path) != 'mtp'), path

  def test_resume_in_pieces_is_exact(self):
    trainer, _, state = finished()
    workdir = tempfile.mkdtemp(prefix='run_')
    again = Trainer(CONFIG, workdir, corpus(), log=lambda _: None)
    result, _ = again.run(max_steps=5)
    assert (result.step, result.finished) == (5, False)
    _, other = again.run()
    assert losses_of(workdir) == losses_of(trainer.workdir)
    for path, value in state.params.items():
      np.testing.assert_array_equal(value, other.params[path], path)

  def test_damaged_checkpoints_are_refused_by_name(self):
    trainer, _, _ = finished()
    workdir = pathlib.Path(tempfile.mkdtemp(prefix='run_'))
    log = []
    again = Trainer(CONFIG, workdir, corpus(), log=log.append)
    again.run(max_steps=9)
    folder = workdir / 'checkpoints'
    assert sorted(p.name for p in folder.iterdir()) == ['3', '6', '9']
    _flip(folder / '9')
    (folder / '6' / 'about' / 'metadata').unlink()
    (folder / '10.orbax-checkpoint-tmp-1').mkdir()
    result, _ = again.run()
    assert result.finished
    text = '\n'.join(log)
    for word in (f'{folder / "9"} is damaged', f'{folder / "6"} is damaged'):
      assert word in text, text
    assert 'tmp-1 is an unfinished save' in text
    assert (workdir / 'damaged' / '9').exists()
    assert losses_of(workdir) == losses_of(trainer.workdir)
    other = dataclasses.replace(CONFIG, seed=9)
    with pytest.raises(ValueError, match='another configuration'):
      Trainer(other, workdir, corpus(), log=log.append).run()

  def test_stops_at_a_step_that_is_not_finite(self):
    workdir = tempfile.mkdtemp(prefix='run_')
    run = Trainer(CONFIG, workdir, corpus(), log=lambda _: None)
    run.run(max_steps=2)
    good, bad = run.restore, []

    def poisoned(checkpoints):
      state = good(checkpoints)
      norm = state.params['norm.weight'].at[0].set(np.inf)
      bad.append(state._replace(params=state.params | {'norm.weight': norm}))
      return jax.tree.map(jnp.copy, bad[-1])

    with mock.patch.object(run, 'restore', poisoned):
      result, state = run.run()
    assert 'step 2 (stage share) is not finite' in result.failed
    assert 'saved as step 2' in result.failed and not result.finished
    for path, value in bad[0].params.items():
      np.testing.assert_array_equal(state.params[path], value, path)
    assert bool(state.alive)
    assert pathlib.Path(workdir, 'checkpoints', '2').exists()

  def test_export_loads(self):
    trainer, _, state = finished()
    folder = pathlib.Path(tempfile.mkdtemp()) / 'model'
    written = export(trainer, state.params, folder)
    loaded = load_model(folder)
    for a, b in zip(jax.tree.leaves(written), jax.tree.leaves(loaded)):
      np.testing.assert_array_equal(a, b)


def _flip(folder):
  """Changes one byte in the middle of the largest file."""
  file = max(
    (p for p in folder.rglob('*') if p.is_file()),
    key=lambda p: p.stat().st_size,
  )
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


RECIPE = """
import sys
sys.path.insert(0, {folder!r})
sys.path.insert(0, {tests!r})
import trainer_test

def get_train_config():
  return trainer_test.CONFIG
"""


class KillTest(absltest.TestCase):
  def test_bit_equal_after_sigkill(self):
    """The command is killed in the middle of a run and given again."""
    trainer, _, _ = finished()
    workdir = pathlib.Path(tempfile.mkdtemp(prefix='run_'))
    recipe = workdir / 'recipe.py'
    here = pathlib.Path(__file__).parent
    recipe.write_text(RECIPE.format(folder=str(here), tests=str(here.parent)))
    command = [
      sys.executable,
      str(ROOT / 'launch' / 'train.py'),
      f'--config={recipe}',
      f'--corpus={corpus()}',
      f'--workdir={workdir}',
    ]
    file = workdir / 'metrics.jsonl'
    with subprocess.Popen(
      command,
      cwd=ROOT,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
    ) as process:
      deadline = time.monotonic() + 120
      while len(metrics.read(file)) < 5 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
      process.send_signal(signal.SIGKILL)
      error = process.stderr.read().decode()
    assert len(metrics.read(file)) >= 5, error
    with file.open('a') as stream:
      stream.write('{"step": 99')  # a line that the kill cut short
    result, _ = Trainer(CONFIG, workdir, corpus(), log=lambda _: None).run()
    assert result.finished
    assert losses_of(workdir) == losses_of(trainer.workdir)
    for line in file.read_text().splitlines():
      json.loads(line)


if __name__ == '__main__':
  absltest.main()
