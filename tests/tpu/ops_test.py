"""Every op, at every real shape, compiled for every TPU generation.

Nothing runs: libtpu compiles on this host. No program may hold a copy of its
cache or weights, and its temporaries are bounded by a rule per op. The
kernels take part as soon as an op has one.
"""

import inspect
import os

import jax
import pytest
from absl.testing import parameterized

import pallas_kernels
from glm_jax.benchmarks.compiled import (
  SLICES,
  as_stored,
  compile_for,
  op_function,
)
from glm_jax.benchmarks.work import size
from pallas_kernels.arg_specs import arg_spec, arg_specs

os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

BLOCK = 64 << 20  # of scores or of gathered rows, the ops' default
# XLA's own form gathers and widens keys and rows of a block: several arrays
# of the block's size live at once.
SLACK = {'tpu': 2, 'xla': 6}
# The form of plain XLA is compiled at these only: sorts of a million keys
# take minutes each.
XLA_CASES = ('tiny', 'decode_64x128k')
CHIPS = tuple(SLICES)
XLA_CHIPS = ('v5e', 'v6e')  # one without SparseCores, one with


def available(spec):
  name = spec.op.removesuffix('_in').removesuffix('_out')
  return inspect.getmodule(getattr(pallas_kernels, name)).AVAILABLE


def cases(wanted, chips=CHIPS):
  return [
    (f'_{spec.name}_{chip}'.replace('/', '_'), spec.name, chip)
    for spec in arg_specs()
    if wanted(spec)
    for chip in chips
  ]


def compiled(name, chip, implementation):
  spec = arg_spec(*name.split('/'))
  call = op_function(spec, implementation)
  call, args, given = as_stored(spec, call)
  found = compile_for(call, args, chip, **given)
  print(
    f'\n{name} {implementation} {chip}: arguments '
    f'{found.arguments / 1e9:.2f} GB, temporaries '
    f'{found.temporaries / 1e6:.1f} MB, {found.seconds:.0f} s to compile '
    '(compiled, not run)'
  )
  return spec, found


def result_bytes(spec):
  """Bytes of [T, S] scores, which the public call lays out anew.

  The selection takes them as the kernel leaves them, [T, S / 128, 128].
  """
  return 4 * spec.rows * spec.context


def budget(spec, implementation):
  """Bytes of temporaries that the op's memory law allows."""
  # A few operands of the call itself are put in another order or layout.
  own = sum(size(a) for a in spec.args if a is not None and a.ndim < 4)
  own -= max(size(a) for a in spec.args if a is not None and a.ndim < 4)
  if spec.op.startswith('grouped_matmul'):
    own = 2 * size(spec.args[0])
    if spec.args[2] is not None:  # a layer's scales, padded to 128 lanes
      own += 8 * size(spec.args[2]) // spec.args[2].shape[0]
    return (1 << 20) + (own if implementation == 'tpu' else 3 * own + BLOCK)
  if spec.op in ('indexer_scores', 'streaming_topk') and spec.dtype == 'fp8':
    own += size(spec.args[3])  # scales leave their plane in lines of two pages
  if spec.op == 'indexer_scores':
    own += result_bytes(spec)
  return SLACK[implementation] * BLOCK + 2 * own


@pytest.mark.tpu
class OpsTest(parameterized.TestCase):
  def check(self, name, chip, implementation):
    spec, found = compiled(name, chip, implementation)
    copies = found.copies
    if spec.op == 'indexer_scores':
      own = f', {result_bytes(spec)} bytes)'
      copies = tuple(x for x in copies if not x.endswith(own))
    self.assertEqual(copies, ())
    self.assertLessEqual(found.temporaries, budget(spec, implementation))
    if implementation == 'tpu':
      self.assertNotEmpty(found.kernels)
    else:
      self.assertEmpty(found.kernels)

  @parameterized.named_parameters(*cases(lambda s: 'tpu' in available(s)))
  def test_kernel(self, name, chip):
    self.check(name, chip, 'tpu')

  @parameterized.named_parameters(
    *cases(lambda s: s.case in XLA_CASES, XLA_CHIPS)
  )
  def test_plain_xla(self, name, chip):
    self.check(name, chip, 'xla')

  @parameterized.parameters(*CHIPS)
  def test_a_program_lowered_for_tpu_holds_the_kernel(self, chip):
    """Nobody named an implementation, and this host is no TPU."""
    spec = arg_spec('grouped_matmul_in', 'decode_8x1m', 'fp8')
    found = compile_for(op_function(spec, None), spec.args, chip)
    self.assertEqual(found.kernels, ('grouped_matmul',))

  def test_a_cache_sized_copy_is_seen(self):
    """Rows of 576 features, without the padding to 640: the trap itself."""
    spec = arg_spec('topk_gather_attention', 'prefill_1k_1m', 'bf16')
    q, rows, scales, slots = spec.args
    unpadded = jax.ShapeDtypeStruct((rows.shape[0], 576), rows.dtype)
    args = (q, unpadded, scales, slots)
    found = compile_for(op_function(spec, 'xla'), args, 'v5p')
    self.assertLen(found.copies, 1)
    self.assertGreater(found.temporaries, size(unpadded))
