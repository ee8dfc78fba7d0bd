"""One of several processes of a test; `processes.Pair` gives each its devices.

  plan_process.py HOST:PORT NUM_PROCESSES PROCESS_ID MODE [PATH [CASE]]

`work` multiplies until it is killed; `leave` does nothing; `case` runs a plan
of `CASES` over all devices of all processes and process 0 writes what came
out; `save` and `restore` write and read a checkpoint, each process its own
parts.
"""

import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from sharding import distributed, make_mesh  # noqa: E402

CASES = {
  'partials': ('token_split', (1, 8, 1), {'move': 'partials'}),
  'rows': ('token_split', (2, 2, 2), {'move': 'rows'}),
  'layers': ('layer_split', (2, 4, 1), {}),
}


def work():
  mesh = make_mesh()
  split = NamedSharding(mesh, PartitionSpec('context'))
  x = jax.jit(lambda: jnp.ones(8), out_shardings=split)()
  step = jax.jit(lambda x: x + 1e-3 * jnp.sum(x), donate_argnums=0)
  print('started', flush=True)
  while True:
    x = jax.block_until_ready(step(x))


def case(path, name):
  import plan_cases

  plan, shape, options = CASES[name]
  plan = plan_cases.make_plan(plan, shape, **options)
  model = plan_cases.placed_model(shape)
  out = plan_cases.passes(model, plan, decode=False)
  if distributed.is_main():
    arrays = {f'{i}.{j}': a for i, pair in enumerate(out) for j, a in
              enumerate(pair)}  # fmt: skip
    np.savez(path, **arrays)


def leave():
  """Process 1 takes its time to let go of the coordination service."""
  if not distributed.is_main():
    shutdown = jax.distributed.shutdown
    jax.distributed.shutdown = lambda: (time.sleep(3), shutdown())


def save(path):
  import plan_cases

  from glm_jax.checkpoints.orbax_io import save_orbax

  save_orbax(plan_cases.placed_model((1, 8, 1)), plan_cases.config(), path)


def restore(path):
  import plan_cases

  from glm_jax.checkpoints.orbax_io import load_orbax
  from sharding import plan_named

  mesh = plan_cases.mesh((1, 8, 1))
  plan = plan_named('replicated', plan_cases.config(), mesh)
  model = load_orbax(path, plan=plan)
  for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(plan_cases.model())):
    for shard in a.addressable_shards:
      np.testing.assert_array_equal(shard.data, np.asarray(b)[shard.index])
  print('restored', flush=True)


def main():
  address, count, me, mode, *rest = sys.argv[1:]
  started = distributed.start(
    address, int(count), int(me), heartbeat_seconds=10
  )
  assert started == int(count)
  globals()[mode](*rest)
  distributed.finish()


if __name__ == '__main__':
  main()
