"""Fills `pallas_kernels/tuned.json` from the compiler's cycle model.

  python -m glm_jax.benchmarks.tune --topology=v6e,tpu7x

Nothing runs: the attention's profiling build is compiled with each number of
queries a step, and one that needs at least 2% fewer cycles than the heuristic
is entered, by generation, dtype and shape bucket, with both figures. Entries
of shapes that were not tried are kept. Before a TPU's own timings are at hand
this is the best there is; entries say that they are compiled, not run.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import shlex
import sys
from collections.abc import Callable

import jax.numpy as jnp
from absl import flags

from glm_jax import cli
from glm_jax.benchmarks.compiled import CLOCKS
from glm_jax.benchmarks.workers import measure_all
from glm_jax.compiling import compiler_options
from pallas_kernels import block_sizes
from pallas_kernels.arg_specs import HEADS, TOPK, arg_spec

OP = 'topk_gather_attention'
# Eight rows are simulated whatever the case, so only theirs is compared with
# the heuristic of the same shape.
CASES = ('decode_8x1m',)
QUERIES = (1, 2, 4)
LEAST_GAIN = 0.02

_TOPOLOGY = flags.DEFINE_list(
  'topology', None, f'Generations to tune for: {", ".join(CLOCKS)}.'
)
_OUT = flags.DEFINE_string('out', block_sizes.FILE, 'The file to fill.')


def entry_of(generation: str, dtype: str, case: str, entry: dict) -> dict:
  """The file's form of the entry of one case."""
  spec = arg_spec(OP, case, dtype)
  stored = jnp.dtype(spec.args[1].dtype).name
  at = block_sizes.bucket(dict(rows=spec.rows, heads=HEADS, keys=TOPK))
  return {OP: {generation: {stored: {at: entry}}}}


def merged(old: dict, new: dict) -> dict:
  """Two nested dictionaries as one; the second's leaves win."""
  both = lambda a, b: merged(a, b) if isinstance(a, dict) else b
  return {
    key: both(old[key], new[key])
    if key in old and key in new
    else new.get(key, old.get(key))
    for key in sorted({*old, *new})
  }


def cycles_of(generation: str, dtype: str, case: str) -> dict[int | None, int]:
  """Cycles by queries a step; None is the heuristic."""
  case = dict(
    op=OP,
    case=case,
    dtype=dtype,
    generation=generation,
    options=compiler_options(generation),
    profile=True,
  )
  tried = (None, *QUERIES)
  sizes = [{OP: dict(queries=n)} if n else {} for n in tried]
  cases = [dict(case, sizes=size) for size in sizes]
  found = {}
  for queries, answer in zip(tried, measure_all(cases)):
    kernel = [n for op, n in answer.get('cycles', {}).items() if OP in op]
    if kernel and 'error' not in answer:
      found[queries] = sum(kernel)
  return found


def winner(cycles: dict[int | None, int]) -> int | None:
  """The size that beats the heuristic by enough, or None."""
  if None not in cycles:
    return None
  best = min((n for n in cycles if n), key=cycles.get, default=None)
  if best is None or cycles[best] > (1 - LEAST_GAIN) * cycles[None]:
    return None
  return best


def tune(generations: list[str], log: Callable[[str], None]) -> dict:
  """Entries for the generations, in the file's form."""
  entries = {}
  command = shlex.join(
    ['python', '-m', 'glm_jax.benchmarks.tune', *sys.argv[1:]]
  )
  for generation in generations:
    for dtype in ('bf16', 'fp8'):
      for case in CASES:
        cycles = cycles_of(generation, dtype, case)
        best = winner(cycles)
        log(f'{generation} {dtype} {case}: {cycles}, takes {best}')
        if best is None:
          continue
        entry = dict(
          sizes=dict(queries=best),
          evidence='compiled, not run',
          cycles=cycles[best],
          heuristic_cycles=cycles[None],
          command=command,
          date=datetime.date.today().isoformat(),
        )
        entry = entry_of(generation, dtype, case, entry)
        entries = merged(entries, entry)
  return entries


def main() -> bool:
  """Tunes and writes the file."""
  names = _TOPOLOGY.value or list(CLOCKS)
  unknown = sorted(set(names) - set(CLOCKS))
  if unknown:
    raise cli.UserError(
      f'--topology={",".join(unknown)} is unknown: use {", ".join(CLOCKS)}'
    )
  path = pathlib.Path(_OUT.value)
  old = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(
    json.dumps(merged(old, tune(names, cli.log)), indent=1) + '\n'
  )
  return True


if __name__ == '__main__':
  cli.run(main)
