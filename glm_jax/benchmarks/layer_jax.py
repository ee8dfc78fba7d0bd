"""The JAX side of suite `layer`: times programs and compares their outputs.

`measuring.ask` starts this module, after PyTorch's has left its outputs.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.benchmarks import layer_cases
from glm_jax.benchmarks.layer_cases import CASES, LayerCase
from glm_jax.benchmarks.layer_programs import (
  Program,
  layer_program,
  layers_together,
  lower,
  make_layer,
  rows_of,
  step_inputs,
  stored_cache,
)
from glm_jax.benchmarks.measuring import answer_cases
from glm_jax.benchmarks.timing import measure
from glm_jax.config import ModelConfig
from glm_jax.plan import LocalPlan
from glm_jax.validation.compare import row_errors, set_violations, tolerance_of
from pallas_kernels.dispatch import chosen


def time_layers(case: LayerCase, kind: str, weights: dict) -> dict[str, Any]:
  """Times a program; microseconds are of one layer."""
  program, args = layer_program(case, kind, weights)
  compiled = lower(program, args).compile()
  leaves, cache, *others = args
  del program, args
  held = [cache]
  del cache

  def call():
    out, cache, _ = compiled(leaves, held.pop(), *others)
    held.append(cache)
    return out

  timing = measure(call)
  count = layers_together(case)
  per = lambda seconds: None if seconds is None else 1e6 * seconds / count
  top = list(timing.kernels.items())[:20]
  return dict(
    us=per(timing.wall),
    fastest_us=per(timing.fastest),
    slowest_us=per(timing.slowest),
    busy_us=per(timing.busy),
    launches=None if timing.launches is None else timing.launches / count,
    kernels={name[:80]: per(seconds) for name, seconds in top},
    queued=timing.queued,
    repeats=timing.repeats,
    layers_in_program=count,
    **_memory(compiled, count),
  )


def _memory(compiled, layers: int) -> dict[str, float | None]:
  """GiB of a program, a layer of it, and of the process so far."""
  found, gib = {}, 2**30
  sizes = compiled.memory_analysis()
  if sizes is not None:
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    held -= sizes.alias_size_in_bytes
    found['peak_gib'] = (held + sizes.temp_size_in_bytes) / gib / layers
    found['temporaries_gib'] = sizes.temp_size_in_bytes / gib
  device = jax.devices()[0].memory_stats() or {}
  if 'peak_bytes_in_use' in device:
    found['process_peak_gib'] = device['peak_bytes_in_use'] / gib
  return found


def compare(
  case: LayerCase, systems: list[str], weights: dict, folder: pathlib.Path
) -> dict[str, Any]:
  """Holds the layers against outputs that PyTorch left in a folder.

  The full layer's own selection is judged by its index scores; outputs are
  compared with PyTorch's selection given to both layers, since keys that
  score alike may change places.

  Returns:
    By system: errors, agreement and whether all are within `tolerance_of`
    the dtype.
  """
  rows = rows_of(case)
  cache, inputs = stored_cache(case, rows), step_inputs(case, rows)
  full = make_layer(case.config, weights, full=True)
  shared = make_layer(case.config, weights, full=False)

  def runner(layer, *capture):
    program = Program([layer], capture)
    step = jax.jit(program.step)
    return lambda selection, replay: step(
      program.leaves, cache, *inputs, selection, replay
    )[2]

  kept = runner(full, 'selected', 'scores')(None, None)
  own, scores = np.asarray(kept['selected']), np.asarray(kept['scores'])
  run_full, run_shared = runner(full, 'attention'), runner(shared, 'attention')
  found = {}
  for system in systems:
    with np.load(folder / f'{case.name}.{system}.npz') as file:
      theirs = dict(file)
    replay = jnp.asarray(theirs['selected'])
    given = LocalPlan().selection(rows, replay)
    outputs = dict(full=run_full(None, replay), shared=run_shared(given, None))
    ours = {
      kind: np.asarray(kept['attention'].astype(jnp.float32))
      for kind, kept in outputs.items()
    }
    found[system] = judge(case.config.dtype, theirs, ours, own, scores)
  return found


def judge(
  dtype: str,
  theirs: dict[str, np.ndarray],
  ours: dict[str, np.ndarray],
  selected: np.ndarray,
  scores: np.ndarray,
) -> dict[str, Any]:
  """Compares the outputs and the selection of both frameworks.

  Args:
    dtype: of the config.
    theirs: outputs [T, D] by kind, and 'selected' [T, k].
    ours: outputs [T, D] by kind, of their selection.
    selected: [T, k] our own selection.
    scores: [T, S] that it was chosen by.

  Returns:
    By kind the errors; of the selection the agreement and the rows where it
    differs by more than ties; 'passed'.
  """
  tol = tolerance_of(dtype)
  _, violate = set_violations(
    scores, theirs['selected'], selected, tol.selection
  )
  found, passed = {}, not violate.any()
  for kind, out in ours.items():
    worst, _ = row_errors(theirs[kind], out)
    apart = np.linalg.norm(out - theirs[kind])
    found[kind] = dict(
      worst_row_error=worst,
      relative_error=float(apart / np.linalg.norm(theirs[kind])),
    )
    passed &= worst <= tol.layer
  return dict(
    found,
    agreement=agreement(theirs['selected'], selected),
    rows_beyond_ties=int(violate.sum()),
    layer_tolerance=tol.layer,
    selection_tolerance=tol.selection,
    passed=bool(passed),
  )


def agreement(a: np.ndarray, b: np.ndarray) -> float:
  """Share of the selected positions [T, k] (-1 for none) that both have."""
  common = sum(len(np.intersect1d(x[x >= 0], y[y >= 0])) for x, y in zip(a, b))
  return common / max(int((a >= 0).sum()), 1)


def device_weights(config: ModelConfig) -> dict[str, jax.Array]:
  """`layer_cases.weights` in the config's dtype, on the device."""
  dtype = jnp.dtype(config.dtype)
  made = layer_cases.weights(config)
  return {
    name: jnp.asarray(array.astype(dtype)) for name, array in made.items()
  }


class JaxMeasure:
  """Answers cases; see `answer_cases`."""

  def __init__(self, folder: pathlib.Path):
    self.folder, self.preset, self.weights = folder, None, {}

  def __call__(self, request: dict) -> dict:
    """Answers a 'time' or 'parity' request."""
    case = CASES[request['case']]
    if case.preset != self.preset:
      self.weights, self.preset = device_weights(case.config), case.preset
    # float32 means float32, also on a GPU's matrix units.
    exact = jax.default_matmul_precision('highest')
    narrow = case.config.dtype != 'float32'
    with contextlib.nullcontext() if narrow else exact:
      if request['what'] == 'parity':
        found = compare(case, request['systems'], self.weights, self.folder)
      else:
        found = time_layers(case, request['kind'], self.weights)
    return dict(found, chosen=chosen())


def main() -> None:
  """Answers requests until stdin ends."""
  device = jax.devices()[0]
  hello = dict(
    device=device.device_kind,
    platform=device.platform,
    versions=f'jax {jax.__version__}',
  )
  failures = (RuntimeError, ValueError, OSError, MemoryError)
  answer_cases(hello, JaxMeasure(pathlib.Path(sys.argv[1])), failures)


if __name__ == '__main__':
  main()
