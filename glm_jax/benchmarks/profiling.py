"""The profiling builds of the kernels: static trip counts, no branches on data.

libtpu's cycle model takes a data-dependent branch as not taken and a dynamic
trip count as about one (spec/kernels_tpu.md section 1). Each kernel has a
build that does all the work there can be. Results stay right, but for fp8
scores of single rows: the simulation cannot split their queries into e4m3
parts, so that build takes the bytes as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from jax import lax

from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.block_scale import BLOCK
from pallas_kernels.grouped_matmul import tpu as grouped_matmul
from pallas_kernels.indexer_scores.tpu import scores_in_lines
from pallas_kernels.streaming_topk.select import select
from pallas_kernels.topk_gather_attention import tpu as attention


def profiling_build(spec: ArgSpec) -> Callable:
  """A case's kernel with every loop at its full length.

  Args:
    spec: the case.

  Returns:
    A function of the case's array arguments.
  """
  builds = {
    'indexer_scores': _scores,
    'streaming_topk': _select,
    'topk_gather_attention': _attend,
  }
  build = builds.get(spec.op, _multiply)
  return lambda *args: build(*args, **spec.options)


def _scores(*args):
  return scores_in_lines(*args, full=True)


def _select(*args, k):
  scores = scores_in_lines(*args, fill=False, full=True)
  keys = scores.shape[1] * scores.shape[2]
  return select(scores, lax.min(args[-1], keys - 1), k, full=True)


def _attend(*args, **options):
  return attention.topk_gather_attention(*args, **options)


def _multiply(*args):
  return grouped_matmul.grouped_matmul(*args, scale_block=BLOCK, profile=True)
