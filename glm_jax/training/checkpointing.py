"""Checkpoints of a run: saved in the background, verified when read.

    WORKDIR/checkpoints/STEP/   one orbax checkpoint: arrays, and a JSON file
                                with their names and digests
    WORKDIR/damaged/STEP        what was refused

The order of the data is a function of the step, so a state is the parameters,
the optimiser's moments and the step. orbax makes a checkpoint whole or leaves
a folder under a temporary name; what it cannot see (a file that was cut or
altered later) the digests do.

Over a mesh each process writes and reads the parts of its own devices; what
was saved on one mesh, or by some number of processes, is restored on any
other. The folder is one that all processes see. A checkpoint is sound if it
is for every process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax import lax

from glm_jax.training.placement import OneDevice
from glm_jax.training.step import TrainState

_UNFINISHED = 'orbax-checkpoint-tmp'


class Checkpoints:
  """The checkpoints of one run."""

  def __init__(
    self,
    workdir: epath.PathLike,
    keep: int,
    log: Callable[[str], None],
    placement: OneDevice,
  ):
    """Opens or makes them; nothing is read or removed yet.

    Args:
      workdir: of the run.
      keep: how many to keep.
      log: is told what is refused.
      placement: of the run.
    """
    workdir = epath.Path(workdir).expanduser()
    self._folder = workdir / 'checkpoints'
    self._damaged = workdir / 'damaged'
    self._keep, self._log, self._place = keep, log, placement
    self._manager: ocp.CheckpointManager | None = None

  def restore(self, like: TrainState, identity: str) -> TrainState | None:
    """The newest sound state.

    Args:
      like: shapes and places of a state.
      identity: of the run's configuration, as it was saved.

    Returns:
      The state, or None if nothing was ever saved.

    Raises:
      ValueError: the checkpoints are another run's, or all are damaged.
    """
    if not self._folder.exists():
      return None
    names = sorted(p.name for p in self._folder.iterdir())
    for name in names:
      if _UNFINISHED in name:
        self._log(f'{self._folder / name} is an unfinished save: ignored')
    steps = sorted((int(n) for n in names if n.isdigit()), reverse=True)
    for step in steps:
      found, reason = None, 'another process cannot read it'
      try:
        found = _read(self._folder / str(step), like)
      except Exception as error:  # noqa: BLE001  damage has many faces
        text = ' '.join(str(error).split())[:200]
        reason = f'{type(error).__name__}: {text}'
      if not self._place.every(found is not None):
        self._log(
          f'{self._folder / str(step)} is damaged and was moved to '
          f'{self._damaged}: {reason}'
        )
        self._set_aside(step)
        continue
      state, saved = found
      if saved != identity:
        raise ValueError(
          f'{self._folder} belongs to a run with another configuration: use '
          'a new --workdir'
        )
      return state
    if steps:
      raise ValueError(
        f'every checkpoint in {self._folder} is damaged: use a new --workdir'
      )
    return None

  def save(self, state: TrainState, identity: str):
    """Saves in the background; waits for the save before."""
    if self._manager is None:
      self._folder.mkdir(parents=True, exist_ok=True)
      self._manager = ocp.CheckpointManager(
        self._folder,
        options=ocp.CheckpointManagerOptions(
          max_to_keep=self._keep, enable_async_checkpointing=True
        ),
      )
    step = int(state.step)
    if step in self._manager.all_steps():
      return
    leaves = _named(state)
    if jax.default_backend() == 'cpu':
      # A save in the background may read the very buffers that the next step
      # is given to write to.
      leaves = jax.tree.map(jnp.copy, leaves)
    digests = _digests(list(leaves.values()))
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(leaves),
        about=ocp.args.JsonSave({'identity': identity, 'digests': digests}),
      ),
    )

  def close(self):
    """Waits until everything is on disk."""
    if self._manager is not None:
      self._manager.wait_until_finished()
      self._manager.close()
      self._manager = None

  def _set_aside(self, step: int):
    if not self._place.is_main:
      return
    self._damaged.mkdir(parents=True, exist_ok=True)
    target, n = self._damaged / str(step), 0
    while target.exists():
      n += 1
      target = self._damaged / f'{step}_{n}'
    (self._folder / str(step)).rename(target)


def _named(state: TrainState) -> dict:
  """Leaves under names that sort in order."""
  leaves = jax.tree.leaves(state)
  return {f'{i:05d}': leaf for i, leaf in enumerate(leaves)}


def _read(folder: epath.Path, like: TrainState) -> tuple[TrainState, str]:
  with _quiet():
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
      about = reader.restore(folder / 'about')
    with ocp.StandardCheckpointer() as reader:
      leaves = reader.restore(folder / 'state', _named(like))
  found = _digests(list(leaves.values()))
  wrong = [k for k, a, b in zip(leaves, found, about['digests']) if a != b]
  if wrong or len(found) != len(about['digests']):
    raise ValueError(f'digests of arrays {", ".join(wrong[:5])} differ')
  state = jax.tree.unflatten(
    jax.tree.structure(like), [leaves[k] for k in sorted(leaves)]
  )
  return state, about['identity']


@jax.jit  # one program: a CPU stalls on many with collectives at once
def _all_digests(arrays: list[jax.Array]) -> jax.Array:
  def one(x):
    x = x.astype(jnp.uint32) if x.dtype == bool else x
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # Odd weights: no change of one word cancels.
    return jnp.sum(bits * (2 * _places(x.shape) + 1), dtype=jnp.uint32)

  return jnp.stack([one(x) for x in arrays])


def _digests(arrays: list[jax.Array]) -> list[int]:
  """One uint32 an array; any single changed bit changes it."""
  return np.asarray(_all_digests(arrays)).tolist()


def _places(shape: tuple[int, ...]) -> jax.Array:
  """Each element's place in row-major order, modulo 2^32; never gathered."""
  place = jnp.zeros(shape, jnp.uint32)
  for axis, size in enumerate(shape):
    place = place * jnp.uint32(size) + lax.broadcasted_iota(
      jnp.uint32, shape, axis
    )
  return place


@contextlib.contextmanager
def _quiet():
  """No traceback of a library's own thread about damage that we report."""
  logger = logging.getLogger('absl')
  before = logger.level
  logger.setLevel(logging.CRITICAL)
  try:
    yield
  finally:
    logger.setLevel(before)
