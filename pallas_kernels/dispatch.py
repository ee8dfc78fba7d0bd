"""Which implementation of an op runs, and why.

`implementation=None` chooses; a named one runs or raises
`NotImplementedError`. Nothing becomes dense or approximate silently: every
implementation of an op returns the reference's result.

The choice follows the platform that a program is *lowered for*, which is not
the one of the process: a CPU host compiles for TPU slices, and a TPU host
runs some steps on its CPU. So None stages both forms, with
`jax.lax.platform_dependent`, and lowering drops all but one. A kernel that
does not take the arguments (a width that no tile divides, say) leaves its
platform to the next one, XLA in the end, and `choices` says so. Of a GPU's
kernels, the one that needs Hopper comes first where this process has such a
card: a program that a host without a GPU compiles for one has the other.

A Pallas kernel is never partitioned by XLA: over several devices it stands
inside `shard_map`, or the plan asks for 'xla' by name. JAX raises otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
from jax import lax

IMPLEMENTATIONS = ('tpu', 'gpu', 'hopper', 'interpret', 'xla', 'reference')
# Platforms in JAX's names, and their kernels, the preferred ones first.
_KERNELS = {'tpu': ('tpu',), 'cuda': ('hopper', 'gpu')}


@dataclasses.dataclass(frozen=True)
class Choice:
  """What runs.

  Attributes:
    op: the op's name.
    implementation: the name of the implementation.
    reason: why it was chosen, for logs and tables.
    kernels: implementations that take its place in a program lowered for
      their own platform, where the ones before do not take the arguments.
  """

  op: str
  implementation: str
  reason: str
  kernels: tuple[str, ...] = ()

  def on(self, platform: str) -> str:
    """What runs in a program lowered for a platform ('tpu', 'cuda')."""
    own = (k for k in _KERNELS.get(platform, ()) if k in self.kernels)
    return next(own, self.implementation)


_made: dict[Choice, None] = {}


@functools.cache
def _on_hopper() -> bool:
  """Whether this process has a GPU of compute capability 9.0."""
  try:
    card = jax.devices('gpu')[0]
  except RuntimeError:
    return False
  return getattr(card, 'compute_capability', None) == '9.0'


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
    kernels = tuple(
      name
      for names in _KERNELS.values()
      for name in names
      if name in available and (name != 'hopper' or _on_hopper())
    )
    reason = 'plain XLA runs on every backend'
    if kernels:
      reason += f'; {" and ".join(kernels)} have a kernel'
    return Choice(op, 'xla', reason, kernels)
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


def run(choice: Choice, available: Mapping[str, Callable], *args, **options):
  """Runs an op as chosen, and keeps the choice for `choices`.

  Args:
    choice: of `choose`.
    available: implementations by name, all with the same signature.
    *args: the op's array arguments; None where there is no array.
    **options: what is not an array.

  Returns:
    What the implementation returns.
  """
  call = lambda name, *args: available[name](*args, **options)
  if not choice.kernels:
    _made[choice] = None
    return call(choice.implementation, *args)
  refused, taken = {}, []

  def attempt(names, *args):
    for name in names:
      try:
        out = call(name, *args)
      except NotImplementedError as error:
        refused[name] = str(error)
      else:
        taken.append(name)
        return out
    return call(choice.implementation, *args)

  branches = {}
  for platform, known in _KERNELS.items():
    names = [name for name in known if name in choice.kernels]
    if names:
      branches[platform] = functools.partial(attempt, names)
  out = lax.platform_dependent(
    *args,
    default=lambda *args: call(choice.implementation, *args),
    **branches,
  )
  reason = choice.reason
  for name, why in refused.items():
    reason += f'; the {name} kernel does not take this: {why}'
  kernels = tuple(name for name in choice.kernels if name in taken)
  _made[dataclasses.replace(choice, reason=reason, kernels=kernels)] = None
  return out


def choices() -> tuple[Choice, ...]:
  """The choices this process made so far, each once, in order.

  A choice is made when a program is traced: one that was compiled before is
  not counted again.
  """
  return tuple(_made)


def chosen() -> list[str]:
  """'op: implementation' of the choices, on this process's platform."""
  backend = jax.default_backend()
  platform = 'cuda' if backend == 'gpu' else backend
  return sorted({f'{c.op}: {c.on(platform)}' for c in _made})
