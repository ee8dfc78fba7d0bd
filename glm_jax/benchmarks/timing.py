"""Times a call on the device at hand: wall and busy.

Wall is the host's time a call with several queued before a wait; busy is the
sum of the device's kernels in a profile, without the gaps between launches.
Under about 100 us a call, busy is what a kernel can be judged by: a virtual
machine may take 9 us a launch (spec/kernels_gpu.md).
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.benchmarks.compiled import kernels, op_function
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.tiling import PAGE

_MIN_SECONDS = 0.3  # of repeats together
_MAX_REPEATS = 30
_QUEUED = 10  # calls before a wait, where memory holds their results
_RESULTS = 1 << 30  # bytes of results that wait together


@dataclasses.dataclass(frozen=True)
class Timing:
  """What one call takes.

  Attributes:
    wall: median seconds a call, several queued before a wait.
    fastest: the least of those.
    slowest: the most of them.
    busy: seconds of all device kernels a call; None where the profiler sees
      no device (the CPU).
    launches: kernels a call, likewise.
    kernels: name -> seconds a call, largest first.
    queued: calls before a wait.
    repeats: waits.
  """

  wall: float
  fastest: float
  slowest: float
  busy: float | None
  launches: float | None
  kernels: Mapping[str, float]
  queued: int
  repeats: int

  @property
  def details(self) -> dict[str, Any]:
    """As the rows of a report have it."""
    us = lambda seconds: None if seconds is None else 1e6 * seconds
    top = list(self.kernels.items())[:12]
    return dict(
      queued=self.queued,
      repeats=self.repeats,
      fastest_us=us(self.fastest),
      slowest_us=us(self.slowest),
      busy_us=us(self.busy),
      launches=self.launches,
      device_kernels={name: us(seconds) for name, seconds in top},
    )


def measure(call: Callable, *args) -> Timing:
  """Times a compiled function; ten calls wait together, of 1 GiB at most.

  Args:
    call: of `args`, returns arrays; called twice before it is timed.
    *args: its arguments.

  Returns:
    Wall and busy times.
  """
  out = jax.block_until_ready(call(*args))
  size = sum(x.nbytes for x in jax.tree.leaves(out)) or 1
  queued = max(1, min(_QUEUED, _RESULTS // size))
  jax.block_until_ready(call(*args))

  def burst():
    start = time.perf_counter()
    jax.block_until_ready([call(*args) for _ in range(queued)])
    return (time.perf_counter() - start) / queued

  once = burst()
  again = int(_MIN_SECONDS / (once * queued))
  seconds = [burst() for _ in range(min(max(again, 3), _MAX_REPEATS))]
  kernels, launches = device_kernels(burst, queued)
  return Timing(
    wall=statistics.median(seconds),
    fastest=min(seconds),
    slowest=max(seconds),
    busy=sum(kernels.values()) if kernels else None,
    launches=launches if kernels else None,
    kernels=kernels,
    queued=queued,
    repeats=len(seconds),
  )


def device_kernels(
  run: Callable[[], Any], calls: int
) -> tuple[dict[str, float], float]:
  """Kernels of the devices while something runs.

  Args:
    run: what to profile; it waits for its results.
    calls: times that one counts.

  Returns:
    Name -> seconds of one of `calls`, largest first; kernels of one. Empty on
    a CPU.
  """
  total, count = collections.Counter(), 0
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      run()
    for file in pathlib.Path(folder).rglob('*.xplane.pb'):
      profile = jax.profiler.ProfileData.from_file(str(file))
      for event in _device_events(profile):
        total[event.name] += event.duration_ns / 1e9 / calls
        count += 1
  return dict(total.most_common()), count / calls


def _device_events(profile):
  """Events of a GPU's streams, or of a TPU's operations."""
  for plane in profile.planes:
    if not plane.name.startswith('/device:'):
      continue
    for line in plane.lines:
      if line.name.startswith('Stream') or line.name == 'XLA Ops':
        yield from line.events


def make_args(spec: ArgSpec, seed: int = 0) -> tuple:
  """Arrays for a case: random numbers, pages and slots in random order."""
  keys = iter(jax.random.split(jax.random.key(seed), len(spec.args) + 1))
  rng = np.random.default_rng(seed)
  args = [_fill(next(keys), a) for a in spec.args]
  T = spec.rows
  if spec.op in ('indexer_scores', 'streaming_topk'):
    pool, per = spec.args[2].shape[0], spec.args[4].shape[1]
    args[4] = jnp.asarray(
      rng.permutation(pool).astype(np.int32).reshape(spec.sequences, per)
    )
    each = T // spec.sequences
    args[5] = jnp.asarray(np.repeat(np.arange(spec.sequences), each), jnp.int32)
    last = per * PAGE - each + np.arange(each)
    args[6] = jnp.asarray(np.tile(last, spec.sequences), jnp.int32)
  elif spec.op == 'topk_gather_attention':
    k, context = spec.args[3].shape[1], spec.context
    own = np.repeat(np.arange(spec.sequences), T // spec.sequences) * context
    stride = max(context // k, 1)
    chosen = np.arange(k) * stride + rng.integers(0, stride, (T, k))
    slots = np.where(chosen < context, chosen, -1)
    slots = np.where(slots >= 0, slots + own[:, None], -1)
    args[3] = jnp.asarray(slots, jnp.int32)
  else:
    E = spec.args[4].shape[0]
    sizes = np.bincount(rng.integers(0, E, T), minlength=E)
    args[3], args[4] = jnp.int32(1), jnp.asarray(sizes, jnp.int32)
  return tuple(args)


def _fill(key, like):
  """Random contents of one array; integers are replaced by the caller."""
  if like is None:
    return None
  if like.dtype == jnp.uint8:
    bits = jax.jit(lambda: jax.random.bits(key, like.shape, jnp.uint8))()
    return bits & 0x3F  # neither NaN nor large, as e4m3 or as half a bf16
  if jnp.issubdtype(like.dtype, jnp.integer):
    return jnp.zeros(like.shape, like.dtype)
  wide = jnp.bfloat16 if like.dtype.itemsize < 4 else jnp.float32
  draw = lambda: jax.random.normal(key, like.shape, wide).astype(like.dtype)
  return jax.jit(draw)()


def time_case(
  spec: ArgSpec, implementation: str | None
) -> tuple[float, dict[str, Any]]:
  """Median seconds of one call, compiled and warmed up.

  Args:
    spec: the case.
    implementation: of the op; None is the op's own choice.

  Returns:
    Seconds, and how they were measured.
  """
  args = make_args(spec)
  lowered = jax.jit(op_function(spec, implementation)).lower(*args)
  timing = measure(lowered.compile(), *args)
  return timing.wall, timing.details | dict(kernels=kernels(lowered.as_text()))
