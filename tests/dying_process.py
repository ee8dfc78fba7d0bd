"""A measuring process for tests: doubles numbers and dies at 13."""

import os
import sys

from glm_jax.benchmarks.measuring import answer_cases


def measure(case):
  if case['n'] == 13:
    print('thirteen is too much', file=sys.stderr, flush=True)
    os._exit(1)
  if case['n'] < 0:
    raise ValueError(f'{case["n"]} is negative\nand more')
  print('a line of a library')
  return dict(twice=2 * case['n'], pid=os.getpid())


if __name__ == '__main__':
  answer_cases(dict(device='none'), measure, (ValueError,))
