"""The real shapes of GLM-5.2's ops, by name, for tests and benches.

Arrays are `jax.ShapeDtypeStruct`, so that a shape of many gigabytes costs
nothing until somebody fills it. The pool of an op holds one layer of all
sequences named in the case; its rows are what one device of a slice has of
all layers (a million tokens times 79 layers over 8 to 128 devices).

    decode_8x1m       8 sequences of 1,048,576 tokens, a row each
    decode_64x128k    64 sequences of 131,072 tokens, a row each
    verify_8x8_1m     8 sequences of 1,048,576 tokens, 8 rows each (drafts)
    prefill_1k_128k   1,024 rows of one sequence at the end of 131,072 tokens
    prefill_4k_1m     ... and so on
    tiny              seconds in the interpreter; more keys than top-k

`indexer_scores` alone returns [T, S], which exists for one bounded block of
rows only (64 MiB): its prefill cases have as many rows as fit.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.tiling import PAGE

# GLM-5.2 (spec/model.md section 1).
INDEX_HEADS, INDEX_WIDTH = 32, 128
HEADS, LATENT, ROPE = 64, 512, 64
TOPK = 2048
EXPERTS, MODEL, EXPERT_WIDTH, CHOICES = 256, 6144, 2048, 8
# Softmax scale of the attention, (nope + rope)^-0.5.
SCALE = 256**-0.5
DTYPES = ('bf16', 'fp8')
_ROW = {'bf16': (640, jnp.bfloat16), 'fp8': (640, jnp.uint8)}  # cache.py's
_K128, _M1 = 131_072, 1_048_576
_BLOCK_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class ArgSpec:
  """One op at one shape.

  Attributes:
    op: its public name.
    case: see the module.
    dtype: 'bf16' or 'fp8': of the keys, rows or weights.
    args: array arguments in the op's order; None where there is none.
    options: arguments by name.
    sequences: sequences of the case.
    context: tokens of each.
  """

  op: str
  case: str
  dtype: str
  args: tuple
  options: dict
  sequences: int
  context: int

  @property
  def name(self) -> str:
    """As in 'indexer_scores/decode_8x1m/bf16'."""
    return f'{self.op}/{self.case}/{self.dtype}'

  @property
  def rows(self) -> int:
    """Rows of the call."""
    return self.args[0].shape[0]


# case: sequences, context, rows of each
CASES = {
  'decode_8x1m': (8, _M1, 1),
  'decode_64x128k': (64, _K128, 1),
  'verify_8x8_1m': (8, _M1, 8),
  'prefill_1k_128k': (1, _K128, 1024),
  'prefill_4k_128k': (1, _K128, 4096),
  'prefill_1k_1m': (1, _M1, 1024),
  'prefill_4k_1m': (1, _M1, 4096),
  'tiny': (2, 2560, 4),
}
# Of 2 M rows, as in spec/kernels_gpu.md section 6; for benches alone.
GPU_CASES = {
  'decode_64x32k': (64, 32_768, 1),
  'decode_256x8k': (256, 8192, 1),
}
OPS = (
  'indexer_scores',
  'streaming_topk',
  'topk_gather_attention',
  'grouped_matmul_in',
  'grouped_matmul_out',
)
_shape = jax.ShapeDtypeStruct


def _index_args(dtype, sequences, context, rows):
  T, pages = sequences * rows, context // PAGE
  fp8 = dtype == 'fp8'
  pool = sequences * pages
  return (
    _shape((T, INDEX_HEADS, INDEX_WIDTH), jnp.bfloat16),
    _shape((T, INDEX_HEADS), jnp.float32),
    _shape(
      (pool, PAGE, INDEX_WIDTH), jnp.float8_e4m3fn if fp8 else jnp.bfloat16
    ),
    _shape((pool, PAGE), jnp.float32) if fp8 else None,
    _shape((sequences, pages), jnp.int32),
    _shape((T,), jnp.int32),
    _shape((T,), jnp.int32),
  )


def _attention_args(dtype, sequences, context, rows):
  T, pool = sequences * rows, sequences * context
  width, stored = _ROW[dtype]
  return (
    _shape((T, HEADS, LATENT + ROPE), jnp.bfloat16),
    _shape((pool, width), stored),
    _shape((pool, LATENT // 128), jnp.float32) if dtype == 'fp8' else None,
    _shape((T, TOPK), jnp.int32),
  )


def _expert_args(dtype, rows, F, D):
  fp8 = dtype == 'fp8'
  layers = 2  # so that a layer cut out of the pool would show
  weight = jnp.float8_e4m3fn if fp8 else jnp.bfloat16
  scales = (layers, EXPERTS, F // 128, D // 128)
  return (
    _shape((rows * CHOICES, D), jnp.bfloat16),
    _shape((layers, EXPERTS, F, D), weight),
    _shape(scales, jnp.float32) if fp8 else None,
    _shape((), jnp.int32),
    _shape((EXPERTS,), jnp.int32),
  )


@functools.cache
def arg_spec(op: str, case: str, dtype: str) -> ArgSpec:
  """One op at one shape; raises `ValueError` for names that are not here."""
  for what, name, known in (
    ('op', op, OPS),
    ('case', case, (*CASES, *GPU_CASES)),
    ('dtype', dtype, DTYPES),
  ):
    if name not in known:
      raise ValueError(f'{what}={name!r} is unknown: use one of {known}')
  sequences, context, rows = {**CASES, **GPU_CASES}[case]
  options = {}
  if op == 'indexer_scores':
    bounded = min(rows, max(_BLOCK_BYTES // (4 * context), 8))
    args = _index_args(dtype, sequences, context, bounded)
  elif op == 'streaming_topk':
    args = _index_args(dtype, sequences, context, rows)
    options = dict(k=TOPK)
  elif op == 'topk_gather_attention':
    args = _attention_args(dtype, sequences, context, rows)
    options = dict(scale=SCALE, latent_width=LATENT)
  else:
    into = op == 'grouped_matmul_in'
    F, D = (EXPERT_WIDTH, MODEL) if into else (MODEL, EXPERT_WIDTH)
    args = _expert_args(dtype, sequences * rows, F, D)
  return ArgSpec(op, case, dtype, args, options, sequences, context)


def arg_specs(
  ops: tuple[str, ...] = OPS, dtypes: tuple[str, ...] = DTYPES
) -> tuple[ArgSpec, ...]:
  """Every shape of some ops, those that are the same for an op once."""
  found = {}
  for op in ops:
    for dtype in dtypes:
      for case in CASES:
        spec = arg_spec(op, case, dtype)
        key = (op, dtype, str(spec.args))
        found.setdefault(key, spec)
  return tuple(found.values())
