"""Compiles cases in a process whose libtpu was told to write cycle estimates.

libtpu reads its flags when jax starts, so `op_suite` starts this module with
them: `python -m glm_jax.benchmarks.child FOLDER`. It reads one case a line
(JSON) from stdin and writes one measurement a line to stdout. A case at which
the compiler aborts ends the process; what was finished before is kept.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys

from glm_jax.benchmarks.comparisons import TOP_K, top_k_baseline
from glm_jax.benchmarks.compiled import as_stored, compile_for, op_function
from glm_jax.benchmarks.profiling import profiling_build
from glm_jax.benchmarks.work import CORES, representative
from glm_jax.benchmarks.workers import read_cycles
from pallas_kernels import block_sizes
from pallas_kernels.arg_specs import arg_spec


def measure(case: dict, folder: pathlib.Path) -> dict:
  """Compiles one case.

  Args:
    case: op, case, dtype, generation, implementation, options, profile; or
      op `TOP_K`, generation, options and profile. 'sizes', by op, stand in
      place of tuned ones.
    folder: where libtpu writes estimates.

  Returns:
    With `profile`: cycles by HLO op of the representative case. Else what
    the compiler says of the whole case.
  """
  options, generation = case['options'], case['generation']
  if case['op'] == TOP_K:
    compile_for(*top_k_baseline(), generation, options=options)
    return dict(cycles=read_cycles(folder))
  spec = arg_spec(case['op'], case['case'], case['dtype'])
  if not case['profile']:
    call = op_function(spec, case['implementation'])
    call, args, given = as_stored(spec, call)
    return vars(compile_for(call, args, generation, options=options, **given))
  spec, _ = representative(spec, CORES[generation])
  for old in folder.glob('*.textproto'):
    old.unlink()
  call, args, given = as_stored(spec, profiling_build(spec))
  trial = contextlib.nullcontext()
  if 'sizes' in case:
    trial = block_sizes.trial(case['sizes'])
  with trial:
    compile_for(call, args, generation, options=options, **given)
  return dict(cycles=read_cycles(folder))


def main() -> None:
  """Answers cases until stdin ends."""
  folder = pathlib.Path(sys.argv[1])
  for line in sys.stdin:
    try:
      answer = measure(json.loads(line), folder)
    except (NotImplementedError, ValueError, RuntimeError) as error:
      answer = dict(error=str(error).splitlines()[0][:300])
    print(json.dumps(answer), flush=True)


if __name__ == '__main__':
  main()
