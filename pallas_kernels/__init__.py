"""The ops of the sparse-attention hot path; imports jax only.

Each op is a folder: the public call (`__init__`), `reference.py`, which is
its specification, and one file an implementation, all with the same array
arguments in the same order.
"""

from pallas_kernels.dispatch import Choice, choices, choose
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.indexer_scores import indexer_scores
from pallas_kernels.streaming_topk import streaming_topk
from pallas_kernels.topk_gather_attention import topk_gather_attention

__all__ = [
  'Choice',
  'choices',
  'choose',
  'grouped_matmul',
  'indexer_scores',
  'streaming_topk',
  'topk_gather_attention',
]
