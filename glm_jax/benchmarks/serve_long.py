"""Cases of suite `serve` for long prompts, each with a server of its own.

`long_request` fills the window: prompt A, an unrelated prompt B of the same
length, then A again. The device holds one of them, so B sends A's pages to
host memory, and the third request takes them back from there. It must give
the first one's tokens; its time to the first token is set against theirs.

`host_latent` asks two servers for the same: one keeps latents on the device,
the other in host memory. Both must give the same tokens, also when asked
again; where they part, the device's log probabilities say how close it was.

`reuse` asks for prompts that share 90% of their tokens, at several lengths
and numbers of requests at once, from the whole engine and from the naive one,
both started for that length. One request before them, which is not timed,
brings the shared tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from glm_jax.benchmarks.report import Request, Row
from glm_jax.benchmarks.serve_row import serve_row
from pallas_kernels.tiling import PAGE, cdiv

OUTPUT = 64  # tokens of a long answer
CACHED = 0.9  # of the repeated prompt, at least, must come from the cache
_REUSE_OUTPUT = 16
_TOP = 20  # log probabilities of each place of a repeated answer
_CONCURRENT = (1, 4, 16)
NAIVE = 'naive'
_HOST_GIB = 0.05  # for a thousand tokens: two prompts of GLM-5.2's rows


@dataclasses.dataclass(frozen=True)
class ReuseCase:
  """Requests that share their beginning.

  Attributes:
    length: tokens of a prompt.
    concurrent: requests at once.
    requests: of the case, the one before them not among them.
  """

  length: int
  concurrent: int
  requests: int

  @property
  def name(self) -> str:
    """As in 'reuse_32768_c4'."""
    return f'reuse_{self.length}_c{self.concurrent}'


def reuse_cases(window: int) -> list[ReuseCase]:
  """Lengths up to half a window, requests up to two windows of tokens."""
  made = []
  for length in (window // 128, window // 32, window // 8, window // 2):
    for concurrent in _CONCURRENT:
      requests = max(2, concurrent)
      if length >= PAGE and length * requests <= 2 * window:
        made.append(ReuseCase(length, concurrent, requests))
  return made


def reuse_flags(case: ReuseCase, window: int) -> tuple[str, ...]:
  """Of a server for prompts of one length."""
  return (
    f'--max_num_seqs={_CONCURRENT[-1]}',
    '--compact_shapes=true',
    f'--max_num_batched_tokens={_rows(window)}',
    f'--max_model_len={case.length + 2 * _REUSE_OUTPUT}',
  )


def _rows(window: int) -> int:
  """Of a step, where prompts are long."""
  return min(2048, window // 4)


def long_flags(window: int) -> tuple[str, ...]:
  """Of a server whose device holds one prompt, and its host two.

  It serves one length alone, and so compiles two shapes and not dozens.
  """
  return (
    '--max_num_seqs=1',
    '--compact_shapes=true',
    f'--max_num_batched_tokens={_rows(window)}',
    f'--num_gpu_blocks_override={cdiv(window, PAGE) + 2}',
    f'--kv_offloading_size={_HOST_GIB * window / 1024}',
  )


def latent_flags(window: int) -> dict[str, tuple[str, ...]]:
  """Of the two servers of `host_latent`."""
  common = (
    '--max_num_seqs=1',
    '--compact_shapes=true',
    f'--max_model_len={_short(window) + 2 * OUTPUT}',
    f'--num_gpu_blocks_override={cdiv(_short(window), PAGE) + 4}',
  )
  room = f'--latent_offloading_size={_HOST_GIB * max(1, window / 1024)}'
  return {'device': common, 'host_latent': (*common, room)}


def _short(window: int) -> int:
  """Tokens that a host can gather rows for in prefill, k a token and layer."""
  return max(4 * PAGE, window // 32)


def host_latent(
  request: Request,
  server: Callable[..., Any],
  window: int,
  log: Callable[..., None],
) -> tuple[list[Row], list[str]]:
  """Rows of `host_latent`, and what it misses.

  Args:
    request: of the suite.
    server: (request, flags) -> context of a server's URL.
    window: of the suite.
    log: of what begins.
  """
  from glm_jax.serving import benchmark

  rows, seen, missed = [], {}, []
  trace = benchmark.random_trace(1, _short(window), OUTPUT)
  for system, flags in latent_flags(window).items():
    log(f'host_latent: {system}')
    with server(request, flags) as url:
      run = benchmark.replay(url, trace, token_ids=True)
      again = benchmark.replay(url, trace, token_ids=True, logprobs=_TOP)
    (record,), (repeated,) = run.records, again.records
    error = record.error or repeated.error
    if error is not None:
      return rows, [f'host_latent, {system}: {error}']
    seen[system] = repeated
    figures = benchmark.summary(run)
    rows.append(_row(request, 'host_latent', system, record, figures))
    repeats = record.ids == repeated.ids
    rows[-1].details['repeats'] = repeats
    if not repeats:
      missed.append(f'host_latent, {system}: other tokens when asked again')
  differ = difference(seen['device'], seen['host_latent'])
  rows[-1].details.update(
    same_tokens=differ is None,
    difference=differ,
    slower=rows[1].us / rows[0].us,
  )
  if differ is not None:
    missed.append(
      'host_latent: other tokens than with latents on the device from token '
      f'{differ["at"]} on, there {differ["nats"]} nats less likely'
    )
  return rows, missed


def difference(expected, found) -> dict[str, Any] | None:
  """Where two answers part, None if they do not.

  Args:
    expected: a record with log probabilities.
    found: another.

  Returns:
    at: index of the first token that differs.
    nats: by how much less likely the found one is in the expected answer;
      None if it is not among the best there.
  """
  if expected.ids == found.ids:
    return None
  pairs = zip(expected.ids, found.ids)
  shortest = min(len(expected.ids), len(found.ids))
  at = next((i for i, (a, b) in enumerate(pairs) if a != b), shortest)
  nats = None
  if at < min(len(expected.top), len(found.names)):
    top = expected.top[at]
    here, there = top.get(expected.names[at]), top.get(found.names[at])
    nats = None if None in (here, there) else here - there
  return {'at': at, 'nats': nats}


def long_request(
  request: Request, url: str, log: Callable[..., None]
) -> tuple[list[Row], list[str]]:
  """Rows of `long_request`, and what it misses."""
  from glm_jax.serving import benchmark

  tokens = 1024 * request.scale - 2 * OUTPUT
  traces = [
    benchmark.random_trace(1, tokens, OUTPUT, seed=seed) for seed in (0, 1, 0)
  ]
  systems = ('new', 'unrelated', 'restored')
  rows, records, missed = [], [], []
  for system, trace in zip(systems, traces):
    log(f'long_request: {tokens} tokens, {system}')
    run = benchmark.replay(url, trace, token_ids=True)
    (record,) = run.records
    if record.error is not None:
      return rows, [f'long_request, {system}: {record.error}']
    figures = benchmark.summary(run)
    records.append(record)
    rows.append(_row(request, 'long_request', system, record, figures))
  first, other, again = records
  same = first.ids == again.ids
  faster = min(first.first, other.first) / again.first
  rows[-1].details.update(same_tokens=same, speedup=faster)
  if not same:
    missed.append('long_request: the restored prompt gave other tokens')
  if again.cached_tokens < CACHED * tokens:
    missed.append(
      f'long_request: {again.cached_tokens} of {tokens} tokens came from the '
      'cache'
    )
  if faster <= 1:
    missed.append(
      f'long_request: restoring took {again.first:.1f} s, computing '
      f'{first.first:.1f} s'
    )
  return rows, missed


def _row(request: Request, case, system, record, figures) -> Row:
  new = record.prompt_tokens - record.cached_tokens
  return serve_row(
    request,
    case,
    system,
    figures,
    shape=f'{record.prompt_tokens} tokens, {record.output_tokens} new',
    us=1e6 * record.per_token,
    prefill_tok_s=new / record.first,
  )


def reuse(
  cases: Sequence[ReuseCase], url: str, system: str, log: Callable[..., None]
) -> list[tuple[str, str, dict[str, Any]]]:
  """(case, system, figures) of cases of one length, each with new endings."""
  from glm_jax.serving import benchmark

  length = cases[0].length
  own = length // 10
  first, *sessions = benchmark.shared_prefix_trace(
    1,
    1 + sum(case.requests for case in cases),
    length - own,
    own,
    _REUSE_OUTPUT,
  )
  if system != NAIVE:  # which keeps nothing
    benchmark.replay(url, [first])
  found = []
  for case in cases:
    log(f'{system}: {case.name}')
    trace, sessions = sessions[: case.requests], sessions[case.requests :]
    run = benchmark.replay(
      url, trace, max_concurrency=case.concurrent, token_ids=True
    )
    found.append((case.name, system, benchmark.summary(run)))
  return found
