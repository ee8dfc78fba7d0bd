"""Run-time path tuning: what each context range runs on, by measurement.

For every compiled context range the candidates (exact implementations and
block sizes) run a real decode step, and a real prompt step of every chunk
size; the fastest are kept, for steps with and without prompt rows apart.
Selections never change, only how fast they come. The choice can be saved and
read back; a file of another device, model or engine is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from glm_jax.plan import LocalPlan
from glm_jax.serving.config import Buckets

REPEATS = 5  # steps of a turn
ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Measured:
  """One candidate at one context range.

  Attributes:
    blocks: pages a request of the range.
    rows: prompt rows of the step, 0 for decoding.
    plan: the candidate's index.
    seconds: of the fastest step; None if it does not run here.
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
    plans: by pages a request: the candidate that steps without prompts take.
    prompt_plans: the same of steps with prompt rows.
    chunks: by pages a request: prompt rows of a step at most.
    measured: everything that was timed.
  """

  key: str
  plans: dict[int, int]
  prompt_plans: dict[int, int]
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
      prompt = candidates[self.prompt_plans[blocks]]
      out.append(
        f'up to {blocks * 64} tokens: {_named(candidates[plan])}; prompts '
        f'{_named(prompt)}, {self.chunks[blocks]} rows a step'
      )
    return out


def _named(plan: LocalPlan) -> str:
  size = plan.block_bytes >> 20
  return f'implementation {plan.implementation or "auto"}, blocks of {size} MiB'


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
    chosen = [
      numbers(data[name]) for name in ('plans', 'prompt_plans', 'chunks')
    ]
    found = data['key']
  except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
    raise ValueError(f'{path} is not a tuning file: {error}') from error
  if found != key:
    raise ValueError(
      f'{path} was tuned for {found!r}, this engine is {key!r}: delete it to '
      'tune again'
    )
  return Tuning(key, *chosen, measured)


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
    The choice: the fastest decode step, and the most prompt rows a second.

  Raises:
    NotImplementedError: no candidate runs.
  """
  measured, plans, prompt_plans, chunks = [], {}, {}, {}
  least = buckets.prefill[0]
  for blocks in buckets.blocks:
    cases = [(least, i) for i in range(num_candidates)]
    times = fastest(blocks, cases, time_step)
    ran = [i for _, i in cases if times[least, i] is not None]
    if not ran:
      raise NotImplementedError('none of the candidate plans runs here')
    plans[blocks] = min(ran, key=lambda i: times[least, i])
    prompts = [(rows, i) for i in ran for rows in buckets.prefill if rows]
    prompt_times = fastest(blocks, prompts, time_step)
    chunks[blocks], prompt_plans[blocks] = min(
      prompts, key=lambda case: prompt_times[case] / case[0]
    )
    for (rows, plan), seconds in [*times.items(), *prompt_times.items()]:
      measured.append(Measured(blocks, rows, plan, seconds))
  return Tuning(key, plans, prompt_plans, chunks, tuple(measured))


def fastest(
  blocks: int,
  cases: Sequence[tuple[int, int]],
  time_step: Callable[[int, int, int], Iterable[float]],
  rounds: int = ROUNDS,
) -> dict[tuple[int, int], float | None]:
  """The fastest step of each case; the cases take turns.

  Other work on the machine only ever adds time, and never to one case alone.

  Args:
    blocks: pages a request.
    cases: (prompt rows, candidate).
    time_step: as in `tune`.
    rounds: how often each case has its turn.

  Returns:
    Seconds by case; None for one that does not run.
  """
  best: dict[tuple[int, int], float | None] = {}
  for turn in range(rounds):
    for case in cases:
      if turn and best[case] is None:
        continue
      try:
        seconds = min(time_step(blocks, *case))
      except NotImplementedError:
        best[case] = None
        continue
      best[case] = min(seconds, best[case]) if turn else seconds
  return best


@dataclasses.dataclass(frozen=True)
class Compared:
  """The choice beside the best fixed one, measured again, in turns.

  Attributes:
    blocks: pages a request of the range.
    prompt: of steps with prompt rows: seconds a row; else seconds a step.
    chosen: of what was chosen.
    best: of the best candidate.
  """

  blocks: int
  prompt: bool
  chosen: float
  best: float


def compare(
  chosen: Tuning,
  buckets: Buckets,
  time_step: Callable[[int, int, int], Iterable[float]],
  rounds: int = ROUNDS,
) -> list[Compared]:
  """Measures a choice against every fixed one, side by side.

  Args:
    chosen: of `tune`, with what it measured.
    buckets: the shapes.
    time_step: as in `tune`.
    rounds: turns of each candidate, see `fastest`.

  Returns:
    Two comparisons a context range.
  """
  out = []
  ran = {
    (m.blocks, m.rows, m.plan) for m in chosen.measured if m.seconds is not None
  }
  for blocks in buckets.blocks:
    mine = {
      False: (buckets.prefill[0], chosen.plans[blocks]),
      True: (chosen.chunks[blocks], chosen.prompt_plans[blocks]),
    }
    for prompt, own in mine.items():
      cases = sorted(
        (rows, plan)
        for n, rows, plan in ran
        if n == blocks and (rows if prompt else rows == own[0])
      )
      times = fastest(blocks, cases, time_step, rounds)
      cost = {
        case: seconds / (case[0] if prompt else 1)
        for case, seconds in times.items()
      }
      out.append(Compared(blocks, prompt, cost[own], min(cost.values())))
  return out


def timed(run: Callable[[], object], repeats: int = REPEATS) -> list[float]:
  """Seconds of some calls, each waited for; one more goes before."""
  jax.block_until_ready(run())
  seconds = []
  for _ in range(repeats):
    begin = time.perf_counter()
    jax.block_until_ready(run())
    seconds.append(time.perf_counter() - begin)
  return agreed(seconds)


def agreed(seconds: list[float]) -> list[float]:
  """Process 0's times, so that all processes choose the same."""
  if jax.process_count() == 1:
    return seconds
  return multihost_utils.broadcast_one_to_all(np.array(seconds)).tolist()
