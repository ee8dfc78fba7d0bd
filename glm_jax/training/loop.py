"""The training loop: stages, batches, metrics, checkpoints, stops.

A run may be killed at any moment and started again with the same command: it
goes on from the newest sound checkpoint, and on a CPU its losses are the same
to the bit as those of a run that was never stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath

from glm_jax.checkpoints import save_published
from glm_jax.cli import progress
from glm_jax.data import TokenBatches, TokenFile
from glm_jax.model import Model
from glm_jax.training.checkpointing import Checkpoints
from glm_jax.training.config import Stage, TrainConfig
from glm_jax.training.metrics import Metrics
from glm_jax.training.parameters import Layout
from glm_jax.training.placement import ONE_DEVICE, OneDevice
from glm_jax.training.step import TrainState
from glm_jax.training.windows import Windows


@dataclasses.dataclass(frozen=True)
class RunResult:
  """How a call ended.

  Attributes:
    step: steps done.
    steps: of the whole run.
    finished: all of them are.
    failed: why the run cannot go on, else ''.
    loss: cross-entropy of the last step made here, None if none was.
    held_out_loss: of the last evaluation here, None if there was none.
    tokens_per_second: of the steps made here, compilation left out.
  """

  step: int
  steps: int
  finished: bool
  failed: str
  loss: float | None
  held_out_loss: float | None
  tokens_per_second: float | None


def run_identity(config: TrainConfig, start: str, data: str) -> str:
  """A digest of everything that shapes a run's numbers."""
  free = dict(log_every=1, eval_every=0, eval_windows=1, save_every=1, keep=1)
  text = repr((dataclasses.replace(config, **free), start, data))
  return hashlib.sha256(text.encode()).hexdigest()


class Trainer:
  """One run in one directory."""

  def __init__(
    self,
    config: TrainConfig,
    workdir: epath.PathLike,
    corpus: epath.PathLike,
    *,
    init_from: epath.PathLike | None = None,
    log: Callable[[str], None] = print,
    placement: OneDevice = ONE_DEVICE,
  ):
    """Opens the corpus; allocates nothing on the device.

    Args:
      config: the run.
      workdir: holds checkpoints and metrics.
      corpus: of `launch/prepare_data.py`: train, held_out and tokenizer/.
      init_from: a checkpoint to take the first parameters from.
      log: is told what happens, by the main process.
      placement: devices and processes; every process runs the same.

    Raises:
      ValueError: a corpus or a stage that does not fit model or devices.
    """
    placement.check(config)
    self.config, self.placement = config, placement
    self._log = log if placement.is_main else lambda _: None
    self.workdir = epath.Path(workdir).expanduser()
    self.corpus = epath.Path(corpus).expanduser()
    self.layout = Layout(config.model)
    self._train = TokenFile(self.corpus / 'train')
    self._held_out = TokenFile(self.corpus / 'held_out')
    if self._train.vocab_size > config.model.vocab_size:
      raise ValueError(
        f'{self._train.path} has a vocabulary of {self._train.vocab_size}, '
        f'the model one of {config.model.vocab_size}'
      )
    self._start = init_from
    self.identity = run_identity(
      config, str(init_from), self._train.tokenizer_sha256
    )
    self._batches: dict[int, TokenBatches] = {}

  def restore(self, checkpoints: Checkpoints) -> TrainState:
    """The newest sound state, or that before step 0."""
    like = self.placement.abstract(self.config)
    state = checkpoints.restore(like, self.identity)
    if state is not None:
      return state
    return self.placement.init(self.config, self._start)

  def batch(self, step: int) -> Windows:
    """The micro-batches of a step, [accumulate, B, S + E]; pure in `step`."""
    index, within = self.config.place(step)
    stage = self.config.stages[index]
    if index not in self._batches:
      self._batches[index] = TokenBatches(
        self._train,
        batch_size=stage.batch * stage.accumulate,
        window=stage.window,
        lookahead=stage.lookahead,
        seed=self.config.seed * 1000 + index,
      )
    batches = self._batches[index]
    numbers = batches.numbers(within).reshape(stage.accumulate, stage.batch)
    return self.placement.windows(batches, numbers)

  def evaluate(self, evaluate: Callable, params: dict, stage: Stage) -> float:
    """Mean held-out nats a token, over the first `eval_windows`."""
    batches = TokenBatches(
      self._held_out, batch_size=1, window=stage.window, lookahead=1
    )
    count = min(self.config.eval_windows, batches.num_windows)
    size = min(stage.batch, count)
    nats = tokens = 0.0
    for first in range(0, count - size + 1, size):
      some = self.placement.windows(batches, first + np.arange(size))
      total, number = evaluate(params, some)
      nats, tokens = nats + float(total), tokens + float(number)
    return nats / max(tokens, 1)

  def run(
    self,
    *,
    max_seconds: float | None = None,
    max_steps: int | None = None,
  ) -> tuple[RunResult, TrainState]:
    """Trains until the end, a wall-clock limit, or a step that is not finite.

    Args:
      max_seconds: stop (with a checkpoint) before this many have passed.
      max_steps: stop (with a checkpoint) after this many steps here.

    Returns:
      How it ended, and the state.
    """
    session = _Session(self, time.monotonic(), max_seconds, max_steps)
    try:
      return session.run()
    finally:
      session.close()


class _Session:
  """One call of `Trainer.run`."""

  def __init__(self, trainer, started, max_seconds, max_steps):
    self.trainer, self.config = trainer, trainer.config
    self.started, self.max_seconds = started, max_seconds
    trainer.workdir.mkdir(parents=True, exist_ok=True)
    self.checkpoints = Checkpoints(
      trainer.workdir, self.config.keep, trainer._log, trainer.placement
    )
    self.state = trainer.restore(self.checkpoints)
    self.step = int(self.state.step)
    self.end = self.config.steps
    if max_steps is not None:
      self.end = min(self.end, self.step + max_steps)
    self.place = trainer.placement
    self.metrics = None
    if self.place.is_main:
      self.metrics = Metrics(trainer.workdir / 'metrics.jsonl', self.step)
    self.loss = self.held_out = None
    self.timed_tokens = self.timed_seconds = 0.0
    self.slowest = 0.0

  def run(self) -> tuple[RunResult, TrainState]:
    failed, stage_index, step_fn = '', None, None
    bar = progress(total=self.config.steps, desc='training', unit='step')
    bar.update(self.step)
    batch = None
    while self.step < self.end and not failed and not self._out_of_time():
      index, _ = self.config.place(self.step)
      stage = self.config.stages[index]
      first = index != stage_index
      if first:
        step_fn = self.place.step(self.config, stage)
        self._evaluate = self.place.evaluate(self.config, stage)
        stage_index = index
      begin = time.monotonic()
      if batch is None:
        batch = self.trainer.batch(self.step)
      self.state, log = step_fn(self.state, batch)
      # The next batch is made while the device works.
      batch = None
      if self.step + 1 < self.end:
        batch = self.trainer.batch(self.step + 1)
      log = {k: v.item() for k, v in jax.device_get(log).items()}
      seconds = time.monotonic() - begin
      if not log.pop('fine'):
        failed = self._failure(stage, log)
        break
      self.step += 1
      self._record(stage, log, seconds, compiled=not first)
      bar.update(1)
      bar.set_postfix(loss=f'{self.loss:.3f}', tps=f'{self._rate() or 0:,.0f}')
      if self.step % self.config.save_every == 0:
        self._save()
    bar.close()
    self._save()
    if self.step == self.config.steps and not failed:
      self._hold_out(self.config.stages[-1])
    result = RunResult(
      step=self.step,
      steps=self.config.steps,
      finished=self.step == self.config.steps and not failed,
      failed=failed,
      loss=self.loss,
      held_out_loss=self.held_out,
      tokens_per_second=self._rate(),
    )
    return result, self.state

  def close(self):
    self.checkpoints.close()
    if self.metrics is not None:
      self.metrics.close()

  def _record(self, stage, log, seconds, *, compiled):
    self.loss = log['cross_entropy']
    tokens = stage.tokens_per_step
    if compiled:
      self.timed_tokens += tokens
      self.timed_seconds += seconds
      self.slowest = max(self.slowest, seconds)
    line: dict[str, Any] = {'step': self.step, 'stage': stage.name, **log}
    line['tokens_per_second'] = round(tokens / seconds, 1)
    every = self.config.eval_every
    if every and self.step % every == 0 and self.step < self.config.steps:
      self._hold_out(stage, line)
    if self.step % self.config.log_every == 0 or 'held_out_loss' in line:
      self._write(**line)

  def _hold_out(self, stage, line=None):
    if line is None:
      self._evaluate = self.place.evaluate(self.config, stage)
    self.held_out = self.trainer.evaluate(
      self._evaluate, self.state.params, stage
    )
    self.trainer._log(f'step {self.step}: held-out loss {self.held_out:.4f}')
    if line is not None:
      line['held_out_loss'] = self.held_out
    else:
      self._write(step=self.step, stage=stage.name, held_out_loss=self.held_out)

  def _write(self, **line):
    if self.metrics is not None:
      self.metrics.write(**line)

  def _failure(self, stage, log) -> str:
    """Describes a step that was not finite; it changed nothing."""
    alive = jax.device_put(np.bool_(True), self.state.alive.sharding)
    self.state = self.state._replace(alive=alive)
    what = ', '.join(f'{k}={v:.4g}' for k, v in log.items())
    return (
      f'step {self.step} (stage {stage.name}) is not finite: {what}; the '
      f'state before it is saved as step {self.step}'
    )

  def _save(self):
    self.checkpoints.save(self.state, self.trainer.identity)

  def _out_of_time(self) -> bool:
    if self.max_seconds is None:
      return False
    # Room for one more step and the last checkpoint.
    room = 2 * self.slowest + 5
    left = self.max_seconds - (time.monotonic() - self.started)
    return not self.place.every(left >= room)

  def _rate(self):
    if not self.timed_seconds:
      return None
    return self.timed_tokens / self.timed_seconds


def export(
  trainer: Trainer, params: dict[str, jax.Array], directory: epath.PathLike
) -> Model:
  """Writes the model in the published format, with the corpus's tokenizer.

  Args:
    trainer: whose configuration and tokenizer.
    params: float32 by path.
    directory: new or empty.

  Returns:
    The model as written, in the configuration's dtype.
  """
  config = trainer.config.model
  model = trainer.layout.model(params, config.dtype)
  tokenizer = trainer.corpus / 'tokenizer'
  has = (tokenizer / 'tokenizer.json').exists()
  save_published(model, config, directory, tokenizer if has else None)
  return model
