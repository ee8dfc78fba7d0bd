"""A measuring process of its own for each system, started one after another.

Two frameworks do not share a card: each takes its memory. So a suite starts a
module (`python -m MODULE FOLDER`) that runs `answer_cases`: it says where it
runs, reads one case a line (JSON) from stdin and writes one answer a line to
stdout. A case at which the process dies costs that case alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


def answer_cases(
  hello: dict[str, Any],
  measure: Callable[[dict], dict],
  failures: tuple[type[BaseException], ...],
) -> None:
  """What a measuring process does until stdin ends.

  Args:
    hello: where it runs, said first.
    measure: answers a case.
    failures: of one case: their first line becomes its 'problem'.
  """
  _say(hello)
  for line in sys.stdin:
    try:
      answer = measure(json.loads(line))
    except failures as error:
      text = (str(error).splitlines() or [''])[0] or repr(error)
      answer = dict(problem=f'{type(error).__name__}: {text}'[:300])
    _say(answer)


def _say(answer: dict) -> None:
  print(json.dumps(answer), flush=True)


def ask(
  module: str,
  folder: str,
  cases: Sequence[dict],
  started: Callable[[dict], None],
  remedy: str = '',
) -> Iterator[dict]:
  """Answers of a measuring process, in the order of the cases.

  Args:
    module: its name.
    folder: where it may leave files for others.
    cases: what it is asked.
    started: told what the process says of itself, each time that one starts.
    remedy: what helps where none does.

  Yields:
    An answer a case; 'problem' where the process died.

  Raises:
    ValueError: the process says nothing, as where a library is missing.
  """
  talk = functools.partial(
    _one_process, module, folder, started=started, remedy=remedy
  )
  return after_deaths(talk, cases)


def after_deaths(
  talk: Callable[[list[dict]], Iterator[dict]], cases: Sequence[dict]
) -> Iterator[dict]:
  """Answers of as many processes as it takes.

  Args:
    talk: starts a process and yields its answers; one that dies at a case
      answers it and no other.
    cases: what is asked, in order.

  Yields:
    An answer a case.
  """
  waiting = list(cases)
  while waiting:
    answered = 0
    for answer in talk(waiting):
      answered += 1
      yield answer
    waiting = waiting[answered:]


@contextlib.contextmanager
def child_process(command: Sequence[str], log, **options):
  """A process that is spoken to by lines; it is gone afterwards.

  Args:
    command: what to run.
    log: file for what it writes to stderr.
    **options: of `subprocess.Popen`.
  """
  child = subprocess.Popen(
    command,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=log,
    text=True,
    **options,
  )
  try:
    yield child
  finally:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
      try:
        pipe.close()
      except BrokenPipeError:
        pass


def _one_process(module, folder, cases, *, started, remedy):
  """Answers of one process; the last one says how it died, if it did."""
  command = [sys.executable, '-m', module, folder]
  with (
    tempfile.TemporaryFile() as log,
    child_process(command, log, cwd=ROOT) as child,
  ):
    hello = read(child)
    if hello is None:
      raise ValueError(f'{module} did not start: {_last_words(log)}{remedy}')
    started(hello)
    for case in cases:
      answer = put(child, case)
      if answer is None:
        yield dict(problem=f'the process died: {_last_words(log)}')
        return
      yield answer


def put(child, case: dict) -> dict | None:
  """A process's answer to a case; None once it has ended."""
  try:
    child.stdin.write(json.dumps(case) + '\n')
    child.stdin.flush()
  except BrokenPipeError:
    return None
  return read(child)


def read(child) -> dict | None:
  """The next answer; None once the process has ended."""
  for line in child.stdout:
    try:
      answer = json.loads(line)
    except json.JSONDecodeError:
      continue  # a library that prints
    if isinstance(answer, dict):
      return answer
  return None


def _last_words(log) -> str:
  log.seek(0)
  lines = log.read().decode(errors='replace').split('\n')
  said = [line.strip() for line in lines if line.strip()]
  return (said or ['it wrote nothing to stderr'])[-1][:300]
