"""The gather of two kernels: where rows land, and how the planner reads it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plan_cases
from absl.testing import absltest, parameterized
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from glm_jax import hlo
from sharding import remote_gather
from sharding.chips import CHIPS
from sharding.planner.transfers import transfers

PROGRAM = """
ENTRY %main (p: bf16[64,128], x: bf16[1024,4096], w: bf16[4096,4096]) -> bf16[8,8] {
  %p = bf16[64,128]{1,0} parameter(0)
  %x = bf16[1024,4096]{1,0} parameter(1)
  %w = bf16[4096,4096]{1,0} parameter(2)
  %start = (bf16[64,128]{1,0}, bf16[512,128]{1,0}, s32[]{:S(2)}, s32[]{:S(2)}) custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"mesh_axes":"[]"
}}, metadata={op_name="jit(f)/fetch/gather_start"}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"0","transcendentals":"0","bytes_accessed":"10","remote_bytes_transferred":"1000000"}}}
  %whole = bf16[512,128]{1,0} get-tuple-element(%start), index=1
  %sent = s32[]{:S(2)} get-tuple-element(%start), index=2
  %there = s32[]{:S(2)} get-tuple-element(%start), index=3
  %dot.1 = bf16[1024,4096]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %wait = (bf16[512,128]{1,0}, bf16[1024,4096]{1,0}) custom-call(%whole, %dot.1, %sent, %there), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/fetch/gather_wait"}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"0","transcendentals":"0","bytes_accessed":"10","remote_bytes_transferred":"0"}}}
  %dot.2 = bf16[1024,4096]{1,0} dot(%dot.1, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""  # noqa: E501


class GatherTest(parameterized.TestCase):
  @parameterized.parameters(
    (('data', 'context', 'model'), (2, 2, 2), ()),
    (('context',), (4,), ('data', 'model')),
  )
  def test_rows_land_rank_after_rank(self, axes, sizes, others):
    """Two arrays at once, each another slot of three."""
    mesh = plan_cases.mesh((1, 4, 2) if others else (2, 2, 2))
    ring = remote_gather.Ring(axes, sizes, others, 0)
    n, rows = ring.ranks, 8
    rng = np.random.default_rng(0)
    pools = tuple(
      jnp.asarray(rng.normal(size=(n * 3 * rows, w)), d)
      for w, d in ((16, jnp.float32), (128, jnp.bfloat16))
    )
    body = functools.partial(
      remote_gather.gather,
      rows=rows,
      ring=ring,
      interpret=pltpu.InterpretParams(detect_races=True),
    )
    run = jax.shard_map(
      lambda pools: body(pools, jnp.array([1, 2]))[1],
      mesh=mesh,
      in_specs=P(axes),
      out_specs=P(),
      check_vma=False,
    )
    found = jax.jit(run)(pools)
    for slot, got, pool in zip((1, 2), found, pools, strict=True):
      wanted = np.asarray(pool).reshape(n, 3, rows, -1)[:, slot]
      np.testing.assert_array_equal(
        np.asarray(got), wanted.reshape(n * rows, -1)
      )

  def test_planner_sees_from_start_to_wait(self):
    """Compute between the kernels hides; what comes after does not."""
    (move,) = transfers(hlo.parse(PROGRAM), CHIPS['v5p'])
    self.assertTrue(move.asynchronous and move.is_fetch and move.hidden)
    self.assertEqual(move.bytes, 1e6)
    one = 2 * 1024 * 4096 * 4096 / CHIPS['v5p'].peak()
    self.assertAlmostEqual(move.window_seconds, one, delta=one / 100)


if __name__ == '__main__':
  absltest.main()
