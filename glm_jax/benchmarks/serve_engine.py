"""Cases of suite `serve` that need the engine itself, in this process.

`restore` is the time to the first token of a long prompt whose pages come
back from host memory, beside computing it anew. `tuning` is what path tuning
chose beside the best fixed choice, for every context range that is compiled.
`host_time` is what the host does for a decode step of 64 requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax

from glm_jax.benchmarks.report import Request, Row
from glm_jax.checkpoints import load_model
from glm_jax.model import Model
from glm_jax.plan import LocalPlan
from glm_jax.serving import host_time, restore_time
from glm_jax.serving.config import EngineConfig
from glm_jax.serving.engine import Engine

WITHIN = 1.05  # of the best fixed choice: the goal of path tuning
HOST_SECONDS, HOST_GROWTH = 2e-3, 1.3  # of a step; from 1K to 1M tokens


def restore(request: Request, model: Model) -> tuple[list[Row], list[str]]:
  """Rows of `restore`, and the goals that they miss."""
  tokens = 1024 * request.scale - 2
  found = restore_time.measure(restore_time.engine_for(model, tokens), tokens)
  row = lambda system, seconds, **details: _row(
    request,
    model,
    'restore',
    system,
    f'{found.tokens} tokens, {found.pages} pages of {found.page_bytes} B',
    seconds,
    ttft_ms=1e3 * seconds,
    pinned=found.pinned,
    **details,
  )
  rows = [
    row('restored', found.restore, speedup=found.ratio),
    row('recomputed', found.recompute),
  ]
  missed = []
  if found.ratio <= 1:
    missed.append(
      f'restore: {found.restore:.3f} s, recomputing takes '
      f'{found.recompute:.3f} s'
    )
  return rows, missed


def tuned(request: Request, model: Model) -> tuple[list[Row], list[str]]:
  """Rows of `tuning`, and the goals that they miss."""
  window = 1024 * request.scale
  config = EngineConfig(
    max_model_len=window,
    num_pages=window // 64,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    draft_counts=(0,),
    context_pages=(window // 256, window // 64),
    prefill_rows=(0, 128),
  )
  engine = Engine(model, config, LocalPlan())
  chosen = engine.tune()
  rows, missed = [], []
  for case in engine.runner.compare_tuning(chosen):
    what = 'prompt row' if case.prompt else 'decode step'
    name = f'tuning_{64 * case.blocks}_{what.split()[0]}'
    for system, seconds in (('tuned', case.chosen), ('best', case.best)):
      speedup = case.best / case.chosen if system == 'tuned' else None
      rows.append(
        _row(request, model, name, system, what, seconds, speedup=speedup)
      )
    if case.chosen > WITHIN * case.best:
      missed.append(f'{name}: {case.chosen / case.best:.3f} times the best')
  return rows, missed


def host(request: Request, model: Model) -> tuple[list[Row], list[str]]:
  """Rows of `host_time`, and the goals that they miss."""
  rows, missed = [], []
  for drafts in (0, 5):
    short, long = host_time.measure((1 << 10, 1 << 20), drafts=drafts)
    for found in (short, long):
      name = f'host_time_{found.tokens}_k{drafts}'
      shape = f'{found.requests} requests of {found.tokens} tokens'
      seconds = found.median
      rows.append(_row(request, model, name, 'host', shape, seconds))
      if seconds > HOST_SECONDS:
        missed.append(f'{name}: {1e3 * seconds:.2f} ms a step')
    if long.median >= HOST_GROWTH * short.median:
      missed.append(
        f'host_time, {drafts} drafts: {long.median / short.median:.2f} times '
        'as long at 1M tokens as at 1K'
      )
  return rows, missed


CASES = {'restore': restore, 'tuning': tuned, 'host_time': host}


def run(
  request: Request, chosen: Iterable[str], log: Callable[..., None]
) -> tuple[list[Row], list[str]]:
  """Rows of the chosen cases, and the goals that they miss."""
  rows, missed = [], []
  chosen = list(chosen)
  if not chosen:
    return rows, missed
  # On a CPU, XLA widens a whole bf16 pool at each gather.
  cpu = jax.default_backend() == 'cpu'
  model = load_model(request.model, dtype='f32' if cpu else 'auto')
  for case in chosen:
    log(f'engine: {case}')
    more, unmet = CASES[case](request, model)
    rows += more
    missed += unmet
  return rows, missed


def _row(request, model, case, system, shape, seconds, **details) -> Row:
  return Row(
    suite='serve',
    case=case,
    system=system,
    device=jax.devices()[0].device_kind,
    dtype=str(model.embed.dtype),
    shape=shape,
    us=1e6 * seconds,
    evidence='run',
    command=request.command,
    date=request.date,
    details=details,
  )
