"""Every GPU kernel, at every real shape, compiled for an H200.

Nothing runs and no GPU is needed: the CUDA plugin compiles on this host for a
card that a text describes. It needs the plugin (`make test-gpu` installs it).
"""

import contextlib
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from glm_jax.benchmarks.compiled import op_function
from pallas_kernels.arg_specs import TOPK, ArgSpec, arg_spec, arg_specs

# Sizes and limits of an H200; what is left out does not matter here.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""
BLOCK = 64 << 20  # the ops' default
OPS = ('indexer_scores', 'streaming_topk', 'topk_gather_attention')
MATMULS = ('grouped_matmul_in', 'grouped_matmul_out')
TRITON = '__gpu$xla.gpu.triton'


def described():
  """A newer JAX asks a GPU of this host what it is; 0.10.2 takes an H100."""
  try:
    from jax._src.pallas.triton import gpu_info
  except ImportError:
    return contextlib.nullcontext()
  info = gpu_info._get_gpu_info_impl(gpu_info.GpuVersion.H200)
  return mock.patch.object(gpu_info, 'get_gpu_info', lambda: info)


def compiled(spec, implementation=None):
  card = topologies.get_topology_desc(
    platform='cuda', target_config=H200, topology='1x1x1'
  )
  place = SingleDeviceSharding(card.devices[0])
  args = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), spec.args
  )
  with described():
    call = op_function(spec, implementation)
    return jax.jit(call).lower(*args).compile()


def takes(spec) -> bool:
  """Records of bytes are attended to by XLA."""
  return spec.op in OPS and not (
    spec.op == 'topk_gather_attention' and spec.dtype == 'fp8'
  )


@pytest.mark.gpu
class OpsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    *((f'_{s.name}'.replace('/', '_'), s.name) for s in arg_specs() if takes(s))
  )
  def test_kernel(self, name):
    spec = arg_spec(*name.split('/'))
    found = compiled(spec)
    self.assertIn(TRITON, found.as_text())
    # The result, laid out in whole tiles, or gathered block by block.
    wide = spec.context if spec.op == 'indexer_scores' else 2 * TOPK
    own = 4 * spec.rows * wide
    temporaries = found.memory_analysis().temp_size_in_bytes
    print(f'\n{name}: {temporaries / 1e6:.1f} MB (compiled, not run)')
    block = max(BLOCK, 4 * spec.context * min(spec.rows, 264))
    self.assertLessEqual(temporaries, 1.5 * block + own)

  @parameterized.named_parameters(
    *((f'_{s.name}'.replace('/', '_'), s.name) for s in arg_specs(MATMULS))
  )
  def test_grouped_matmul(self, name):
    """One launch: no copy of a layer, no sum of the groups beside it."""
    found = compiled(arg_spec(*name.split('/')))
    self.assertEqual(found.as_text().count(TRITON), 1)
    self.assertNotRegex(found.as_text(), r' (fusion|copy|while)\(')
    self.assertLess(found.memory_analysis().temp_size_in_bytes, 1 << 20)

  @parameterized.parameters((48, 256), (256, 48))
  def test_grouped_matmul_of_glm_nano(self, F, D):
    shape = jax.ShapeDtypeStruct
    for dtype, rows in itertools.product(
      (jnp.bfloat16, jnp.float32), (4, 4096)
    ):
      spec = ArgSpec(
        'grouped_matmul_in',
        'glm_nano',
        str(jnp.dtype(dtype)),
        (
          shape((rows, D), dtype),
          shape((8, 16, F, D), dtype),
          None,
          shape((), jnp.int32),
          shape((16,), jnp.int32),
        ),
        {},
        1,
        rows,
      )
      self.assertIn(TRITON, compiled(spec).as_text())

  @parameterized.parameters(
    'decode_8x1m', 'decode_64x128k', 'prefill_1k_128k', 'tiny'
  )
  def test_hopper(self, case):
    spec = arg_spec('topk_gather_attention', case, 'bf16')
    found = compiled(spec, 'hopper')
    self.assertIn('mosaic_gpu', found.as_text())
    # Parts of few rows are merged by one launch.
    merged = int(spec.rows <= 16)
    self.assertEqual(found.as_text().count(TRITON), merged)

  def test_without_a_kernel_it_is_xla(self):
    spec = arg_spec('topk_gather_attention', 'tiny', 'fp8')
    self.assertNotIn(TRITON, compiled(spec).as_text())


if __name__ == '__main__':
  pytest.main([__file__])
