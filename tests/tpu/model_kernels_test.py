"""The whole 78-layer model with the kernels inside, for one device's share.

Nothing runs: libtpu compiles decoding, verification and prefill for one
device of a slice (compiled, not run). The device holds fp8 weights whole but
for the experts, of which it has the 256th part (eight of width 256 for 256
of 2048), and its part of eight million-token sequences split over 128
devices. Collectives are not inside; the plans' tests have them.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from glm_jax import presets
from glm_jax.benchmarks.compiled import compile_for
from glm_jax.benchmarks.work import size
from glm_jax.cache import init_cache
from glm_jax.compiling import compiler_options
from glm_jax.decoding import DecodeState, decode_step, prefill_step
from glm_jax.model import abstract_model
from glm_jax.plan import LocalPlan
from glm_jax.sampling import sampling_params
from glm_jax.speculative import verify
from pallas_kernels import (
  grouped_matmul,
  indexer_scores,
  streaming_topk,
  topk_gather_attention,
)
from pallas_kernels.tiling import PAGE

os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

BATCH, DRAFTS, CHUNK = 8, 7, 1024
CONTEXT = 1_048_576 // 128  # tokens of each sequence on this device
OPS = (grouped_matmul, streaming_topk, topk_gather_attention, indexer_scores)
PLAN = LocalPlan()  # the ops' own choice


def share():
  """GLM-5.2 with one device's part of the experts."""
  config = presets.PRESETS['glm52']
  moe = dataclasses.replace(config.moe, num_experts=8, intermediate_size=256)
  return dataclasses.replace(config, moe=moe)


def call(step, kv_cache_dtype):
  """A step as a function, its arguments, and which one is donated."""
  config = share()
  model = abstract_model(config, weight_dtype='fp8')
  pages = BATCH * CONTEXT // PAGE
  cache = jax.eval_shape(
    lambda: init_cache(config, pages, dtype=kv_cache_dtype)
  )
  ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  table = ints(BATCH, CONTEXT // PAGE)
  if step == 'decode':
    state = DecodeState(
      cache,
      table,
      lengths=ints(BATCH),
      last_token=ints(BATCH),
      limits=ints(BATCH),
      eos=ints(3),
      done=jax.ShapeDtypeStruct((BATCH,), bool),
      params=jax.eval_shape(lambda: sampling_params(BATCH)),
    )
    run = lambda model, state: decode_step(model, state, plan=PLAN)
    return run, (model, state), cache
  if step == 'verify':
    tokens, each = ints(BATCH, DRAFTS + 1), ints(BATCH)
    run = lambda model, cache, tokens, table, position, count: verify(
      model, tokens, cache, table, position, count, PLAN
    )
    return run, (model, cache, tokens, table, each, each), cache
  run = lambda model, cache, *rows: prefill_step(
    model, cache, *rows, plan=PLAN, with_drafter=True
  )
  return run, (model, cache, table, *[ints(CHUNK)] * 3), cache


@pytest.mark.tpu
class ModelKernelsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (f'_{step}_{dtype}_{chip}', step, dtype, chip)
    for step in ('decode', 'verify', 'prefill')
    for dtype in ('bf16', 'fp8')
    for chip in ('v5p', 'v6e', 'tpu7x')
  )
  def test_compiles_with_kernels_and_without_copies(self, step, dtype, chip):
    run, args, cache = call(step, dtype)
    found = compile_for(
      run, args, chip, options=compiler_options(chip), donate=(1,)
    )
    held = sum(size(a) for a in jax.tree.leaves(cache))
    print(
      f'\n{chip} {step} {dtype} cache: arguments {found.arguments / 1e9:.2f} '
      f'GB, of which cache {held / 1e9:.2f}, temporaries '
      f'{found.temporaries / 1e9:.3f}, kernels {", ".join(found.kernels)} '
      f'(compiled, not run; {found.seconds:.0f} s)'
    )
    self.assertIn('grouped_matmul', found.kernels)
    self.assertGreaterEqual(found.aliased, held)
    # Bounded blocks of scores, rows and logits; no second cache.
    self.assertLess(found.temporaries, 6 * PLAN.block_bytes + 0.15 * held)
    self.assertEqual(found.copies, ())
