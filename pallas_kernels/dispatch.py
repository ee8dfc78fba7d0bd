"""Which implementation of an op runs, and why.

`implementation=None` chooses; a named one runs or raises
`NotImplementedError`. Nothing becomes dense or approximate silently: every
implementation of an op returns the reference's result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

IMPLEMENTATIONS = ('xla', 'reference')


@dataclasses.dataclass(frozen=True)
class Choice:
  """What runs.

  Attributes:
    op: the op's name.
    implementation: the name of the implementation.
    reason: why it was chosen, for logs and tables.
  """

  op: str
  implementation: str
  reason: str


def choose(
  op: str, implementation: str | None, available: Mapping[str, Callable]
) -> Choice:
  """Resolves an implementation name.

  Args:
    op: the op's name, for messages.
    implementation: a name, or None for the best available one.
    available: implementations of the op by name.

  Returns:
    The choice and its reason.

  Raises:
    ValueError: the name is unknown.
    NotImplementedError: the name is known but the op has no such version.
  """
  if implementation is None:
    return Choice(op, 'xla', 'plain XLA runs on every backend')
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f'{implementation=} is unknown: use None or one of {IMPLEMENTATIONS}'
    )
  if implementation not in available:
    raise NotImplementedError(
      f'{op} has no {implementation!r} implementation; it has '
      f'{sorted(available)}'
    )
  return Choice(op, implementation, 'asked for by name')
