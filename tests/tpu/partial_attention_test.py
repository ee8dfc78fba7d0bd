"""Partial attention with dynamic counts, compiled for every generation.

Nothing runs. Each selected row is a copy of its own out of the pool as it
lies: the program must hold no other form of the pool, and no gathered rows.
"""

import os

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from glm_jax.benchmarks.compiled import SLICES, compile_for
from pallas_kernels.topk_gather_attention.partial import partial_attention

os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

HEADS, LATENT, ROPE, TOPK = 64, 512, 64, 2048
POOL = {  # rows, dtype: what a device's share may hold
  'bf16': (8 << 20, jnp.bfloat16),
  'fp8': (8 << 20, jnp.uint8),
  'f32': (1 << 20, jnp.float32),
}


def arguments(dtype, T):
  rows, kind = POOL[dtype]
  shape = jax.ShapeDtypeStruct
  q = jnp.float32 if dtype == 'f32' else jnp.bfloat16
  return (
    shape((T, HEADS, LATENT + ROPE), q),
    shape((rows, 640), kind),
    shape((rows, 4), jnp.float32) if dtype == 'fp8' else None,
    shape((T, TOPK), jnp.int32),
    shape((T,), jnp.int32),
  )


def attend(*args):
  return partial_attention(
    *args, scale=1 / 16, latent_width=LATENT, implementation='tpu'
  )


@pytest.mark.tpu
class PartialAttentionTest(parameterized.TestCase):
  @parameterized.product(chip=tuple(SLICES), dtype=tuple(POOL), T=(8, 64))
  def test_reads_the_pool_in_place(self, chip, dtype, T):
    found = compile_for(attend, arguments(dtype, T), chip)
    self.assertEqual(found.kernels, ('partial_attention',))
    self.assertEqual(found.copies, ())
    # Masks, and the scales of records, for each row of each word fetched;
    # m and l in 128 lanes. A gather of scales has 21 MB for itself on v5p.
    own = T * (HEADS * 128 * 4 * 2 + TOPK * 4 * (4 + 3 * 4 * 8))
    self.assertLessEqual(found.temporaries, own + (24 << 20))
    print(f'\n{chip} {dtype} {T}: temporaries {found.temporaries / 1e6:.1f} MB')
