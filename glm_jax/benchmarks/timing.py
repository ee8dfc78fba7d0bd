"""Times a case on the device at hand."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.benchmarks.compiled import kernels, op_function
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.tiling import PAGE

_MIN_SECONDS = 0.5  # of repeats together
_MAX_REPEATS = 50


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
  call = lowered.compile()
  jax.block_until_ready(call(*args))
  seconds = []
  while sum(seconds) < _MIN_SECONDS and len(seconds) < _MAX_REPEATS:
    start = time.perf_counter()
    jax.block_until_ready(call(*args))
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds), dict(
    repeats=len(seconds),
    fastest_us=1e6 * min(seconds),
    slowest_us=1e6 * max(seconds),
    kernels=kernels(lowered.as_text()),
  )
