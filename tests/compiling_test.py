"""Options of the compiler, by the name of a chip."""

from absl.testing import parameterized

from glm_jax.compiling import compiler_options


class OptionsTest(parameterized.TestCase):
  def test_every_generation_by_every_name(self):
    for name in ('tpu7x', 'tpu7x:4x4x4', 'TPU7x'):
      self.assertIn(
        'xla_tpu_control_large_2nd_minor_layout_for_x16',
        compiler_options(name),
      )
    self.assertEqual(compiler_options('TPU v6 lite'), compiler_options('v6e'))
    for name in ('cpu', 'gpu', 'v5p', 'TPU v5'):
      self.assertEqual(compiler_options(name), {})
    self.assertIn('xla_gpu_enable_triton_gemm', compiler_options('NVIDIA H200'))
    compiler_options('v6e').clear()
    self.assertTrue(compiler_options('v6e'))
