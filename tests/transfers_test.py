"""Transfers read from HLO: bytes, and the compute that hides them."""
# ruff: noqa: E501  (HLO puts an instruction on a line)

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hlo_test import CHIP, compiled, module
from jax.sharding import Mesh, PartitionSpec

from sharding.planner.transfers import transfers


def overlap_text(compute, between=1):
  """An asynchronous gather of 3 x 2 MiB with `between` products inside it."""
  side = 1024
  products = '\n      '.join(
    f'%d{i} = f32[{side},{side}] convolution(%a, %a), dim_labels=bf_io->bf'
    for i in range(between)
  )
  return module(f"""
    HloModule m, is_scheduled=true

    %wrapped (p: bf16[{side},{side}]) -> bf16[4096,{side}] {{
      %p = bf16[{side},{side}] parameter(0)
      ROOT %ag = bf16[4096,{side}] all-gather(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={{0}}
    }}, execution_thread="sparsecore"

    ENTRY %main (a: bf16[{side},{side}]) -> bf16[4096,{side}] {{
      %a = bf16[{side},{side}]{{1,0:T(8,128)(2,1)}} parameter(0)
      %start = ((), (), (s32[8])) async-start(), async_execution_thread="sparsecore", calls=%wrapped, metadata={{op_name="jit(f)/fetch/all_gather"}}
      {products if compute == 'early' else ''}
      %update = ((bf16[{side},{side}]), bf16[4096,{side}], (s32[8])) async-update(%start, %a)
      {products if compute == 'inside' else ''}
      ROOT %done = bf16[4096,{side}] async-done(%update)
    }}
  """)


class TransferTest(parameterized.TestCase):
  # 3/4 of 8 MiB on a link, and 1024^3 products at the chip's peak.
  SECONDS = 3 * 2 * 1024 * 1024 / CHIP.link_bandwidth
  PRODUCT = max(2 * 1024**3 / CHIP.peak(), (2 + 4) * 2**20 / CHIP.bandwidth)

  @parameterized.parameters(
    ('inside', 1, False), ('inside', 9, True), ('early', 9, False)
  )
  def test_hidden_by_the_compute_inside(self, where, products, hidden):
    needed = -(-self.SECONDS // self.PRODUCT)
    self.assertBetween(needed, 2, 9)
    (got,) = transfers(overlap_text(where, products), CHIP)
    self.assertEqual(got.kind, 'all-gather')
    self.assertEqual(got.group, 4)
    self.assertEqual(got.bytes, 3 * 2 * 1024 * 1024)
    self.assertTrue(got.asynchronous)
    self.assertTrue(got.is_fetch)
    self.assertEqual(got.hidden, hidden)
    covered = {'inside': products * self.PRODUCT, 'early': 0}[where]
    self.assertAlmostEqual(got.hidden_seconds, min(covered, self.SECONDS))

  def test_two_transfers_share_the_links(self):
    m = module("""
      ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
        %a = f32[1024,1024] parameter(0)
        %s1 = (f32[1024,1024], f32[1024,1024], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
        %s2 = (f32[1024,1024], f32[1024,1024], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
        %busy = f32[8192,1024] custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"27000000000","bytes_accessed":"1"}}
        %e1 = f32[1024,1024] collective-permute-done(%s1)
        ROOT %e2 = f32[1024,1024] collective-permute-done(%s2)
      }
    """)
    first, second = transfers(m, CHIP)
    self.assertEqual(first.bytes, 4 * 2**20)
    busy = 27e9 / CHIP.peak()
    self.assertLess(first.seconds, busy)
    self.assertGreater(2 * first.seconds, busy)
    self.assertTrue(first.hidden)
    self.assertFalse(second.hidden)
    self.assertAlmostEqual(
      first.hidden_seconds + second.hidden_seconds, busy, places=12
    )

  @parameterized.parameters(
    ('all-gather', 'f32[8,16]', '{{0,1,2,3}}', 512 * 3 / 4),
    ('all-reduce', 'f32[8,16]', '[2,4]<=[8]', 2 * 512 * 3 / 4),
    ('reduce-scatter', 'f32[2,16]', '[2,4]<=[8]', 3 * 128),
    (
      'all-to-all',
      'f32[8,16]',
      "mesh['data'=2,'context'=4] {'context'}",
      512 * 3 / 4,
    ),
  )
  def test_bytes_of_each_kind(self, kind, shape, groups, received):
    m = module(f"""
      ENTRY %main (a: f32[8,16]) -> {shape} {{
        %a = f32[8,16] parameter(0)
        ROOT %c = {shape} {kind}(%a), channel_id=1, replica_groups={groups}, dimensions={{0}}
      }}
    """)
    (got,) = transfers(m, CHIP)
    self.assertEqual((got.kind, got.group), (kind, 4))
    self.assertEqual(got.bytes, received)
    self.assertFalse(got.asynchronous)
    self.assertFalse(got.hidden)

  def test_a_compiled_loop_of_collectives(self):
    mesh = Mesh(np.array(jax.devices()[:8]), ('x',))
    P = PartitionSpec

    @functools.partial(
      jax.shard_map, mesh=mesh, in_specs=P('x'), out_specs=P(), check_vma=False
    )
    def f(x):
      def body(i, total):
        with jax.named_scope('fetch'):
          everyone = jax.lax.all_gather(x + i, 'x', tiled=True)
        return total + jax.lax.psum(jnp.tanh(everyone), 'x')

      return jax.lax.fori_loop(0, 3, body, jnp.zeros((64, 32)))

    moves = transfers(compiled(f, jnp.ones((64, 32))), CHIP)
    size = 4 * 64 * 32
    got = {(t.kind, t.bytes, t.times, t.is_fetch) for t in moves}
    self.assertEqual(
      got,
      {
        ('all-gather', size * 7 / 8, 3, True),
        ('all-reduce', 2 * size * 7 / 8, 3, False),
      },
    )
