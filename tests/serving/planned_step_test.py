"""What the pod planner compiles is what a server runs, bucket by bucket."""

import dataclasses

import jax
import plan_cases
import pytest
from absl.testing import parameterized
from small_engines import CONFIG

from glm_jax.serving.config import buckets
from glm_jax.serving.runner import Runner
from glm_jax.serving.scheduler import StepPlan
from sharding import MeshShape, make_mesh, plan_named
from sharding.planner import process
from sharding.planner.engine_step import bucket_requests, serve_call
from sharding.planner.request import PlanRequest
from sharding.planner.steps import abstract_cache
from sharding.rules import abstract_sharded

SHAPE = MeshShape(1, 8, 1)


def request(topology, shape, **changes):
  return PlanRequest(
    config=plan_cases.config(),
    topology=topology,
    mesh=shape,
    step='serve',
    batch=CONFIG.max_num_seqs,
    kv_cache_dtype='f32',
    **changes,
  )


class PlannedStepTest(parameterized.TestCase):
  @parameterized.parameters('token_split', 'layer_split', 'replicated')
  def test_arguments_are_those_of_a_server(self, name):
    config = dataclasses.replace(CONFIG, num_pages=16)
    (rows, batch, drafts, blocks), *_ = buckets(config).all()
    mesh = make_mesh(SHAPE)
    plan = plan_named(name, plan_cases.config(), mesh)
    asked = request(
      'v5e:2x4',
      SHAPE,
      chunk=rows,
      num_speculative_tokens=drafts,
      context=64 * blocks - drafts,
      cache_plan=name,
    )
    model = jax.eval_shape(plan_cases.model.__wrapped__)  # keeps no tracer
    cache, _ = abstract_cache(asked, plan)
    model = abstract_sharded(model, mesh)
    _, arguments, static = serve_call(asked, model, cache, mesh)
    runner = Runner(model, config, plan)  # needs no weights to be made
    inputs = runner._inputs.build(StepPlan(), rows, batch, drafts)
    real = runner._state, runner._table, inputs
    same = lambda a, b: self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
    jax.tree.map(same, real, arguments[1:])
    for a, b in zip(*map(jax.tree.leaves, (real[0], arguments[1]))):
      assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert static['with_drafter'] and static['blocks'] == blocks

  def test_every_bucket_is_asked_for(self):
    config = dataclasses.replace(
      CONFIG, prefill_rows=(0, 32), context_pages=(2,), draft_counts=(0, 3)
    )
    asked = bucket_requests(request('v5e:2x4', SHAPE), config)
    shapes = [
      (r.chunk, r.batch, r.num_speculative_tokens, r.pages) for r in asked
    ]
    assert shapes == buckets(config).all() and len(set(shapes)) == 12
    assert {r.rows for r in asked} == {
      p + 4 * (k + 1) for p in (0, 32) for k in (0, 3, 7)
    }

  @pytest.mark.tpu
  def test_every_bucket_compiles_for_several_hosts(self):
    """16 chips, four hosts of them (compiled, not run)."""
    config = dataclasses.replace(
      CONFIG, prefill_rows=(0, 32), draft_counts=(3,), max_speculative_tokens=3
    )
    asked = request('v5e:4x4', MeshShape(1, 8, 2))
    for bucket in bucket_requests(asked, config):
      held = process.compile_step(bucket)['device_bytes']
      print(bucket.chunk, bucket.pages, held['temporaries'])
      assert held['fits_compiler']
      assert held['weights'] > 0 and held['cache'] > 0
