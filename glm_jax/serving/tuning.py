"""Run-time path tuning: what each context range runs on, by measurement.

For every compiled context range the candidates (exact implementations and
block sizes) run a real decode step, and every chunk size a real prompt step;
the fastest are kept. Selections never change, only how fast they come. The
choice can be saved and read back; a file of another device, model or engine
is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import jax
from etils import epath

from glm_jax.plan import LocalPlan
from glm_jax.serving.config import Buckets

REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Measured:
  """One candidate at one context range.

  Attributes:
    blocks: pages a request of the range.
    rows: prompt rows of the step, 0 for decoding.
    plan: the candidate's index.
    seconds: of a step, the median; None if it does not run here.
  """

  blocks: int
  rows: int
  plan: int
  seconds: float | None


@dataclasses.dataclass(frozen=True)
class Tuning:
  """What was chosen.

  Attributes:
    key: device, model and shapes that it holds for.
    plans: by pages a request: the index of the candidate.
    chunks: by pages a request: prompt rows of a step at most.
    measured: everything that was timed.
  """

  key: str
  plans: dict[int, int]
  chunks: dict[int, int]
  measured: tuple[Measured, ...] = ()

  def save(self, path: epath.PathLike) -> None:
    """Writes the choice as JSON."""
    text = json.dumps(dataclasses.asdict(self), indent=2)
    epath.Path(path).write_text(text + '\n')

  def lines(self, candidates: Sequence[LocalPlan]) -> list[str]:
    """The choice for people, a line a context range."""
    out = []
    for blocks, plan in sorted(self.plans.items()):
      p = candidates[plan]
      out.append(
        f'up to {blocks * 64} tokens: implementation '
        f'{p.implementation or "auto"}, blocks of {p.block_bytes >> 20} MiB, '
        f'prompt chunks of {self.chunks[blocks]} rows'
      )
    return out


def default_candidates(plan: LocalPlan) -> tuple[LocalPlan, ...]:
  """The plan itself, first, and variants of it that give the same results."""
  sizes = (16 << 20, 256 << 20)
  replace = lambda size: dataclasses.replace(plan, block_bytes=size)
  return plan, *(replace(s) for s in sizes if s != plan.block_bytes)


def tuning_key(description: object, candidates: Sequence[LocalPlan]) -> str:
  """Device, model and shapes as one short string."""
  device = jax.devices()[0].device_kind
  text = repr((description, candidates))
  digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
  return f'{device} x{jax.device_count()} {digest}'


def load(path: epath.PathLike, key: str) -> Tuning:
  """Reads a saved choice.

  Raises:
    ValueError: it is of another device, model or engine, or not a choice.
  """
  try:
    data = json.loads(epath.Path(path).read_text())
    numbers = lambda d: {int(k): int(v) for k, v in d.items()}
    measured = tuple(Measured(**m) for m in data['measured'])
    plans, chunks = numbers(data['plans']), numbers(data['chunks'])
    found = data['key']
  except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
    raise ValueError(f'{path} is not a tuning file: {error}') from error
  if found != key:
    raise ValueError(
      f'{path} was tuned for {found!r}, this engine is {key!r}: delete it to '
      'tune again'
    )
  return Tuning(key, plans, chunks, measured)


def tune(
  key: str,
  buckets: Buckets,
  num_candidates: int,
  time_step: Callable[[int, int, int], Iterable[float]],
) -> Tuning:
  """Measures every candidate and keeps the fastest.

  Args:
    key: see `tuning_key`.
    buckets: the shapes.
    num_candidates: how many plans there are.
    time_step: (blocks, rows, plan) to seconds of a few steps, the first one
      not counted; raises `NotImplementedError` for a plan that does not run.

  Returns:
    The choice: decoding decides the plan, the rows a second of that plan the
    chunk.

  Raises:
    NotImplementedError: no candidate runs.
  """
  measured, plans, chunks = [], {}, {}

  def measure(blocks, rows, plan) -> float | None:
    try:
      seconds = statistics.median(time_step(blocks, rows, plan))
    except NotImplementedError:
      seconds = None
    measured.append(Measured(blocks, rows, plan, seconds))
    return seconds

  least = buckets.prefill[0]
  for blocks in buckets.blocks:
    times = [measure(blocks, least, i) for i in range(num_candidates)]
    ran = [i for i, t in enumerate(times) if t is not None]
    if not ran:
      raise NotImplementedError('none of the candidate plans runs here')
    plans[blocks] = best = min(ran, key=lambda i: times[i])
    rows = [r for r in buckets.prefill if r]
    rates = {r: r / (measure(blocks, r, best) or float('inf')) for r in rows}
    chunks[blocks] = max(rates, key=rates.get)
  return Tuning(key, plans, chunks, tuple(measured))


def timed(run: Callable[[], object], repeats: int = REPEATS) -> list[float]:
  """Seconds of some calls, each waited for; one more goes before."""
  jax.block_until_ready(run())
  seconds = []
  for _ in range(repeats):
    begin = time.perf_counter()
    jax.block_until_ready(run())
    seconds.append(time.perf_counter() - begin)
  return seconds
