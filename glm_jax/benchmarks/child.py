"""Compiles cases in a process whose libtpu was told to write cycle estimates.

libtpu reads its flags when jax starts, so `op_suite` starts this module with
them: `python -m glm_jax.benchmarks.child FOLDER`. It reads one case a line
(JSON) from stdin and writes one measurement a line to stdout. A case at which
the compiler aborts ends the process; what was finished before is kept.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

from glm_jax.benchmarks.compiled import compile_for, op_function
from glm_jax.benchmarks.work import representative
from pallas_kernels.arg_specs import arg_spec

_NAME = re.compile(r'hlo_op_name: "([^"]+)"')
_CYCLES = re.compile(r'estimated_cycles: (\d+)')


def measure(case: dict, folder: pathlib.Path) -> dict:
  """Compiles one case.

  Args:
    case: op, case, dtype, generation, implementation, options, profile.
    folder: where libtpu writes estimates.

  Returns:
    With `profile`: cycles by HLO op and the multiple of the simulated case.
    Else what the compiler says of the whole case.
  """
  spec = arg_spec(case['op'], case['case'], case['dtype'])
  options, generation = case['options'], case['generation']
  implementation = case['implementation']
  if not case['profile']:
    function = op_function(spec, implementation)
    found = compile_for(function, spec.args, generation, options=options)
    return vars(found)
  spec, times = representative(spec)
  for old in folder.glob('*.textproto'):
    old.unlink()
  function = op_function(spec, implementation, profile=True)
  found = compile_for(function, spec.args, generation, options=options)
  return dict(
    times=times, cycles=read_cycles(folder), profile_kernels=found.kernels
  )


def read_cycles(folder: pathlib.Path) -> dict[str, int]:
  """Estimated cycles by HLO op, from libtpu's static profiles."""
  cycles = {}
  for path in sorted(folder.glob('*.textproto')):
    text = path.read_text()
    for part in text.split('hlo_op_estimate')[1:]:
      name, count = _NAME.search(part), _CYCLES.search(part)
      if name and count:
        cycles[name.group(1)] = int(count.group(1))
  return cycles


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
