"""Suite `serve`: traffic against a server, ours or any OpenAI-compatible one.

Three traces: unrelated prompts, prompts with shared beginnings, and agents
whose conversations grow turn by turn. Without a URL the suite starts two
servers, one after the other: the whole engine (of the embedded glm-nano, or
`--model`), and the naive one with an indexer in every layer and neither
prefix or host cache nor drafts. The naive one has random weights, since no
checkpoint has weights for its indexers; it does the same work whatever they
are. `reuse` compares the two by length of a shared beginning, `long_request`
and `host_latent` take long prompts: see `serve_long`. More cases (`restore`,
`tuning`, `host_time`) measure the engine in this process: see `serve_engine`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from glm_jax.benchmarks import serve_long
from glm_jax.benchmarks.report import Report, Request, Row
from glm_jax.benchmarks.serve_row import serve_row
from glm_jax.presets import PRESETS

COLUMNS = {
  'run': (
    'output_tok_s',
    'ttft_ms',
    'tpot_ms',
    'cached_percent',
    'accept_length',
    'speedup',
    'failed',
  )
}
NAIVE = (
  '--load_format=dummy',
  '--per_layer_indexers',
  '--no_enable_prefix_caching',
  '--num_speculative_tokens=0',
)
INSIDE = ('restore', 'tuning', 'host_time')
LONG = ('long_request', 'host_latent')
_SERVER = pathlib.Path(__file__).parents[2] / 'launch' / 'serve.py'
_START_SECONDS = 3600


@dataclasses.dataclass(frozen=True)
class ServeReport(Report):
  """A report that also shows the block that users of serving benchmarks know.

  Attributes:
    blocks: text, one a case and system.
  """

  blocks: tuple[str, ...] = ()

  def table(self, columns=()) -> str:
    """The blocks, then the table of `Report`."""
    return '\n\n'.join([*self.blocks, super().table(columns)])


def traces(scale: int) -> dict[str, Callable[[], list]]:
  """Case -> a function that makes its trace; `scale` 1 takes minutes on a CPU.

  The lengths leave room for the smallest window that is served, 1024 tokens
  times `scale`.
  """
  from glm_jax.serving import benchmark

  return {
    'random': lambda: benchmark.random_trace(
      8 * scale, 256 * scale, 32 * scale, range_ratio=0.5
    ),
    'shared_prefix': lambda: benchmark.shared_prefix_trace(
      2, 6 * scale, 512 * scale, 32, 24 * scale
    ),
    'agent': lambda: benchmark.agent_trace(
      2 * scale,
      8,
      system_words=60 * scale,
      result_words=16 * scale,
      output_tokens=12 * scale,
    ),
  }


def run(request: Request, log: Callable[..., None]) -> Report:
  """Replays the traces; see the module.

  Raises:
    ValueError: evidence other than 'run', an unknown case, or no server.
  """
  if request.evidence != 'run':
    raise ValueError(
      'the serve suite measures a server that runs: use --evidence=run'
    )
  cases = traces(request.scale)
  reuse = {case.name: case for case in serve_long.reuse_cases(_window(request))}
  own = () if request.url else (*reuse, *LONG)
  inside = _chosen(request, () if request.url else INSIDE)
  chosen = _chosen(request, cases)
  shared = [reuse[name] for name in _chosen(request, own) if name in reuse]
  long = [name for name in _chosen(request, own) if name in LONG]
  if not chosen + inside + shared + long:
    names = [*cases, *own, *(() if request.url else INSIDE)]
    raise ValueError(f'no case of {", ".join(names)} matches {request.select}')
  found, rows, missed = [], [], []
  if request.url is not None:
    found = _measure(request, chosen, cases, request.url, 'url', log)
  else:
    if chosen:
      replay = functools.partial(_measure, request, chosen, cases, log=log)
      found += _both(request, (), replay, log)
    for _, group in itertools.groupby(shared, lambda case: case.length):
      group = list(group)
      flags = serve_long.reuse_flags(group[0], _window(request))
      reuse_of = functools.partial(serve_long.reuse, group, log=log)
      found += _both(request, flags, reuse_of, log)
      if request.save is not None:
        request.save(_report(request, found))
  more, unmet = _long(request, long, log)
  rows, missed = rows + more, missed + unmet
  if inside:
    from glm_jax.benchmarks import serve_engine

    more, unmet = serve_engine.run(request, inside, log)
    rows, missed = rows + more, missed + unmet
  report = _report(request, found)
  return dataclasses.replace(
    report, rows=report.rows + tuple(rows), missed=report.missed + tuple(missed)
  )


def _both(request: Request, flags, measure, log) -> list[tuple]:
  """What `measure(url, system)` finds of the whole engine and the naive one."""
  found = []
  for system, own in (('engine', ()), (serve_long.NAIVE, NAIVE)):
    log(f'{system}: starting a server')
    with _server(request, (*own, *flags)) as url:
      found += measure(url, system)
  return found


def _long(request: Request, chosen, log) -> tuple[list[Row], list[str]]:
  """Rows of the cases of `LONG`, and what they miss."""
  rows, missed, window = [], [], _window(request)
  if 'long_request' in chosen:
    log('long_request: starting a server')
    with _server(request, serve_long.long_flags(window)) as url:
      rows, missed = serve_long.long_request(request, url, log)
  if 'host_latent' in chosen:
    more, unmet = serve_long.host_latent(request, _server, window, log)
    rows, missed = rows + more, missed + unmet
  return rows, missed


def _window(request: Request) -> int:
  return 1024 * request.scale


def _chosen(request: Request, names) -> list[str]:
  if not request.select:
    return list(names)
  return [n for n in names if any(part in n for part in request.select)]


def _measure(request, chosen, cases, url, system, log) -> list[tuple]:
  """(case, system, figures) of each case."""
  from glm_jax.serving import benchmark

  found = []
  for case in chosen:
    log(f'{system}: {case}')
    replayed = benchmark.replay(
      url, cases[case](), max_concurrency=8, token_ids=request.url is None
    )
    found.append((case, system, benchmark.summary(replayed)))
  return found


@contextlib.contextmanager
def _server(request: Request, flags) -> Iterator[str]:
  """A server of ours in a process of its own; yields its URL."""
  if not _SERVER.exists():
    raise ValueError(
      f'{_SERVER} is not here: start a server and pass its --url'
    )
  name = request.model
  model = () if name is None else (f'--model={name}',)
  if name and (name in PRESETS or pathlib.Path(name).is_file()):
    model += ('--load_format=dummy',)  # a configuration has no weights
  with tempfile.TemporaryDirectory() as folder:
    ready = pathlib.Path(folder) / 'ready.json'
    command = [sys.executable, str(_SERVER), '--port=0', f'--json={ready}']
    command += [f'--max_model_len={_window(request)}', '--max_num_seqs=8']
    if request.devices[0].name == 'cpu':  # XLA widens bf16 pools there
      command.append('--dtype=f32')
    process = subprocess.Popen([*command, *model, *flags])
    try:
      end = time.monotonic() + _START_SECONDS
      while not ready.exists():
        if process.poll() is not None or time.monotonic() > end:
          raise ValueError(f'the server did not start: {" ".join(command)}')
        time.sleep(0.2)
      yield json.loads(ready.read_text())['url']
    finally:
      process.send_signal(signal.SIGTERM)
      try:
        process.wait(60)
      except subprocess.TimeoutExpired:
        process.kill()


def _report(request: Request, found: list[tuple]) -> Report:
  from glm_jax.serving import benchmark

  naive = {
    case: figures['output_throughput']
    for case, system, figures in found
    if system == 'naive'
  }
  rows, blocks, missed = [], [], []
  for case, system, figures in found:
    base = naive.get(case) if system == 'engine' else None
    output = max(figures['output_tokens'], 1)
    rows.append(
      serve_row(
        request,
        case,
        system,
        figures,
        shape=f'{figures["completed"]} requests',
        us=1e6 * figures['duration'] / output,
        speedup=base and figures['output_throughput'] / base,
      )
    )
    blocks.append(f'{case}, {system}\n{benchmark.block(figures)}')
    if figures['failed']:
      missed.append(f'{case}, {system}: {figures["failed"]} requests failed')
    if base and figures['output_throughput'] <= base:
      missed.append(f'{case}: the engine is not faster than the naive one')
  notes = ()
  if found:
    notes += (
      'all sessions arrive at once; 8 run side by side (cN: N), greedily',
    )
  if naive:
    notes += ('the naive engine has random weights',)
  return ServeReport(tuple(rows), notes, tuple(missed), tuple(blocks))
