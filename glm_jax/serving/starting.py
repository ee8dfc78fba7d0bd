"""From a model to a running engine, for launchers: limits, tuning, warm-up."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import jax
from etils import epath

from glm_jax.model import Model
from glm_jax.plan import LocalPlan
from glm_jax.serving import tuning
from glm_jax.serving.async_engine import AsyncEngine
from glm_jax.serving.config import EngineConfig, buckets
from glm_jax.serving.engine import Engine
from glm_jax.serving.lockstep import Leader
from pallas_kernels import dispatch


@dataclasses.dataclass(frozen=True)
class Limits:
  """What depends on the backend unless it is asked for.

  Attributes:
    seqs: requests at once.
    rows: of one step, drafts included.
    compact: two shapes alone are compiled.
  """

  seqs: int
  rows: int
  compact: bool


def limits(seqs: int | None, rows: int | None, compact: bool | None) -> Limits:
  """The limits asked for; None takes what suits the backend."""
  cpu = jax.default_backend() == 'cpu'
  default = lambda given, value: value if given is None else given
  return Limits(
    default(seqs, 8 if cpu else 64),
    default(rows, 128 if cpu else 512),
    default(compact, cpu),
  )


def set_up(compilation_cache_dir: str) -> None:
  """Logging, and the folder that keeps compiled programs; '' for none."""
  logging.basicConfig(
    level=logging.WARNING,
    stream=sys.stderr,
    format='%(asctime)s %(levelname)s %(name)s: %(message)s',
  )
  logging.getLogger('glm_jax').setLevel(logging.INFO)
  if compilation_cache_dir:
    folder = epath.Path(compilation_cache_dir).expanduser()
    jax.config.update('jax_compilation_cache_dir', os.fspath(folder))


def leave_signals_to_process_0() -> None:
  """Keeps this process alive until process 0 has drained and says so.

  A pod is told to end on every host at once, and requests still run then.
  """
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)


def sampling_defaults(directory: epath.PathLike) -> dict[str, float]:
  """Sampling defaults of a checkpoint's generation_config.json; {} without."""
  file = epath.Path(directory) / 'generation_config.json'
  if not file.exists():
    return {}
  found = json.loads(file.read_text())
  names = ('temperature', 'top_p', 'top_k', 'min_p')
  given = {name: found[name] for name in names if found.get(name) is not None}
  if found.get('do_sample') is False:
    given['temperature'] = 0.0
  return given


def compact_shapes(config: EngineConfig) -> EngineConfig:
  """The same engine with two compiled shapes: with and without a prompt."""
  return dataclasses.replace(
    config,
    prefill_rows=(0, config.max_num_batched_tokens),
    batch_sizes=(config.max_num_seqs,),
    draft_counts=(config.most_drafts,),
    context_pages=(config.max_blocks,),
  )


def start_engine(
  model: Model,
  config: EngineConfig,
  plan: LocalPlan,
  log: Callable[[str], None],
  *,
  followers: Sequence[Connection] = (),
  tune: bool = False,
  tuning_file: str | None = None,
) -> AsyncEngine:
  """A running engine with every shape compiled.

  Args:
    model: what it serves.
    config: of the engine.
    plan: of one device or several.
    log: gets a line for everything that was chosen.
    followers: wires to the other processes, if there are any.
    tune: measure what each context range runs on; see `tuning`.
    tuning_file: of a saved choice: read if it is there, else written.

  Raises:
    ValueError: a config that does not fit, or the tuning file of another
      engine.
    EngineDied: compilation failed.
  """
  engine = Engine(model, config, plan)
  if followers:
    engine = Leader(engine, followers)
  begin = time.perf_counter()
  if tune or tuning_file is not None:
    chosen = engine.tune(tuning_file)
    for line in chosen.lines(tuning.default_candidates(plan)):
      log(line)
  served = AsyncEngine(engine)
  served.start()
  served.wait_until_ready()
  shapes = len(buckets(config).all())
  log(f'compiled {shapes} shapes in {time.perf_counter() - begin:.1f} s')
  for line in dispatch.chosen():
    log(line)
  return served
