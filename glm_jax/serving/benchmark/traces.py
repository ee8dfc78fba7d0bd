"""What a benchmark asks for: random, shared-prefix and agent traffic.

A trace is a list of sessions; the turns of a session follow each other, since
each continues the conversation, while sessions run side by side. The same
seed gives the same traffic.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

# Ids that every vocabulary has, and below any special token.
_LOW, _HIGH = 16, 256
_WORDS = (
  'file test error value list the of to read write open line class model step '
  'cache page token shape index array build run check plan note main path key '
  'node tree map set count name type text call loop case item'
).split()


@dataclasses.dataclass(frozen=True)
class Turn:
  """One request.

  Attributes:
    prompt_ids: the whole prompt of a completion; None in a conversation.
    message: what the conversation goes on with.
    output_tokens: asked for, whatever the model would end at.
  """

  prompt_ids: tuple[int, ...] | None
  message: dict[str, Any] | None
  output_tokens: int


@dataclasses.dataclass(frozen=True)
class Session:
  """Turns that follow each other.

  Attributes:
    turns: at least one.
    system: of a conversation, before its first message.
    tools: of a conversation.
  """

  turns: tuple[Turn, ...]
  system: str | None = None
  tools: tuple[dict[str, Any], ...] = ()


def random_trace(
  count: int,
  input_tokens: int,
  output_tokens: int,
  *,
  range_ratio: float = 0.0,
  vocab_size: int = _HIGH,
  seed: int = 0,
) -> list[Session]:
  """Unrelated prompts of random ids.

  Args:
    count: requests.
    input_tokens: of a prompt.
    output_tokens: of an answer.
    range_ratio: lengths vary by this share up and down, uniformly.
    vocab_size: ids are below it (and below 256).
    seed: of the traffic.
  """
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(count):
    ids = _ids(rng, _vary(rng, input_tokens, range_ratio), vocab_size)
    new = _vary(rng, output_tokens, range_ratio)
    made.append(Session((Turn(ids, None, new),)))
  return made


def shared_prefix_trace(
  groups: int,
  per_group: int,
  prefix_tokens: int,
  suffix_tokens: int,
  output_tokens: int,
  *,
  vocab_size: int = _HIGH,
  seed: int = 0,
) -> list[Session]:
  """Prompts that share their beginnings within groups, in mixed order."""
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(groups):
    prefix = _ids(rng, prefix_tokens, vocab_size)
    for _ in range(per_group):
      suffix = _ids(rng, suffix_tokens, vocab_size)
      made.append(Session((Turn(prefix + suffix, None, output_tokens),)))
  return [made[i] for i in rng.permutation(len(made))]


def agent_trace(
  sessions: int,
  turns: int,
  *,
  system_words: int = 200,
  result_words: int = 100,
  output_tokens: int = 32,
  seed: int = 0,
) -> list[Session]:
  """Agents at work: each turn adds a result to a growing conversation.

  All sessions have the same system text and tools, as agents do.
  """
  rng = np.random.default_rng(seed)
  system = _text(rng, system_words)
  tools = tuple(_tool(rng, name) for name in ('read', 'write', 'run'))
  made = []
  for _ in range(sessions):
    messages = [{'role': 'user', 'content': _text(rng, result_words)}]
    for _ in range(turns - 1):
      content = _text(rng, result_words)
      messages.append({'role': 'user', 'content': content})
    found = tuple(Turn(None, m, output_tokens) for m in messages)
    made.append(Session(found, system, tools))
  return made


def read_trace(path: epath.PathLike) -> list[Session]:
  """Recorded traffic: one JSON object a line, one session an object.

  A line holds `turns`, a list of {"message": {...}, "output_tokens": n} or
  {"prompt_ids": [...], "output_tokens": n}, and may hold `system`, `tools`.

  Raises:
    ValueError: a line that is none of this, by number.
  """
  made = []
  text = epath.Path(path).read_text()
  for number, line in enumerate(text.splitlines(), 1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
      turns = tuple(_turn(turn) for turn in record['turns'])
      tools = tuple(record.get('tools') or ())
      made.append(Session(turns, record.get('system'), tools))
      if not turns:
        raise ValueError('no turns')
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise ValueError(f'{path} line {number}: {error!r}') from error
  if not made:
    raise ValueError(f'{path} holds no session')
  return made


def _turn(record: dict[str, Any]) -> Turn:
  ids, message = record.get('prompt_ids'), record.get('message')
  if (ids is None) == (message is None):
    raise ValueError('a turn has either prompt_ids or message')
  ids = None if ids is None else tuple(int(i) for i in ids)
  return Turn(ids, message, int(record['output_tokens']))


def _ids(rng, count: int, vocab_size: int) -> tuple[int, ...]:
  return tuple(rng.integers(_LOW, min(vocab_size, _HIGH), count).tolist())


def _text(rng, words: int) -> str:
  return ' '.join(rng.choice(_WORDS, words))


def _tool(rng, name: str) -> dict[str, Any]:
  path = {'type': 'string', 'description': _text(rng, 8)}
  schema = {'type': 'object', 'properties': {'path': path}}
  about = _text(rng, 30)
  function = {'name': name, 'description': about, 'parameters': schema}
  return {'type': 'function', 'function': function}


def _vary(rng, length: int, ratio: float) -> int:
  low, high = round(length * (1 - ratio)), round(length * (1 + ratio))
  return max(1, int(rng.integers(low, high + 1)))


def count_requests(sessions: Sequence[Session]) -> int:
  """Requests of a trace."""
  return sum(len(session.turns) for session in sessions)
