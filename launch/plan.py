"""Plans a TPU slice without a TPU: does a step fit, what does it move.

  python launch/plan.py --topology=v6e:16x16 --context=1048576 --step=decode
  python launch/plan.py --topology=smallest:tpu7x --weight_dtype=fp8
  python launch/plan.py --topology=v5p:4x4x8 --fit=batch
  python launch/plan.py --topology=tpu7x:4x4x4 --step=prefill --chunk=65536
  python launch/plan.py --topology=v6e:16x16 --compare --plot=plans.png

The real step is compiled by libtpu (pip install 'glm-jax[plan]') on this
host, in a process of its own that is ended when it takes more than
--host_memory_gib. Exit code 0: it fits; 1: it does not (--json is written all
the same); 2: bad input. Nothing is run: figures are the compiler's.
"""

from __future__ import annotations

from absl import flags

from glm_jax import cli

_MODEL = flags.DEFINE_string(
  'model', 'glm52', 'Preset, config file or checkpoint directory.'
)
_TOPOLOGY = flags.DEFINE_string(
  'topology',
  None,
  "Slice, as 'tpu7x:4x4x8', or 'smallest:v6e' for the smallest that fits.",
)
_MESH = flags.DEFINE_string(
  'mesh',
  None,
  "Mesh axes, as 'context=32,model=2'. Default: fewest bytes a device.",
)
_CONTEXT = flags.DEFINE_integer(
  'context', 1_048_576, 'Cached tokens of a sequence; of train, its window.'
)
_BATCH = flags.DEFINE_integer('batch', 1, 'Sequences.')
_STEP = flags.DEFINE_enum(
  'step',
  'decode',
  ['decode', 'verify', 'prefill', 'serve', 'train'],
  "What to compile; 'serve' is the step of launch/serve.py.",
)
_CACHE_PLAN = flags.DEFINE_enum(
  'cache_plan',
  'token_split',
  ['token_split', 'layer_split', 'replicated'],
  'How the cache is split.',
)
_DRAFTS = flags.DEFINE_integer(
  'num_speculative_tokens',
  None,
  'Drafts of a verify (default: 3) or serve step.',
)
_CACHE_DTYPE = flags.DEFINE_string(
  'kv_cache_dtype', 'auto', "'auto', 'bf16', 'f32' or 'fp8'."
)
_WEIGHT_DTYPE = flags.DEFINE_string(
  'weight_dtype', 'auto', "'auto' (the config's), 'bf16', 'f32' or 'fp8'."
)
_CHUNK = flags.DEFINE_integer(
  'chunk',
  None,
  'Rows of a prefill step (default: 256 a device); prompt rows of a serve '
  'step (default: 512).',
)
_SLOTS = flags.DEFINE_integer(
  'slots', None, 'Transient layers of a plan that moves rows: 1 or 2.'
)
_IMPLEMENTATION = flags.DEFINE_string(
  'implementation', None, "Of the ops: 'xla', or TPU kernels where there are."
)
_FIT = flags.DEFINE_enum(
  'fit', None, ['batch', 'context'], 'Look for the largest that fits.'
)
_COMPARE = flags.DEFINE_bool(
  'compare', False, 'All cache plans, with IndexShare and without.'
)
_HOST_MEMORY = flags.DEFINE_float(
  'host_memory_gib', 20.0, 'Memory of this host that a compile may take.'
)
_PLOT = flags.DEFINE_string('plot', None, 'Draw the memory into this picture.')
_JSON = flags.DEFINE_string('json', None, 'Write the result to this file.')


def main() -> bool:
  if not _TOPOLOGY.value:
    raise cli.UserError(
      '--topology is needed: a slice such as v6e:16x16, or smallest:v6e'
    )
  from glm_jax import load_config, presets
  from sharding import planner
  from sharding.planner import report

  path = cli.resolve_model_path(_MODEL.value, presets=presets.PRESETS)
  options = dict(
    mesh=_MESH.value,
    context=_CONTEXT.value,
    batch=_BATCH.value,
    step=_STEP.value,
    cache_plan=_CACHE_PLAN.value,
    num_speculative_tokens=_drafts(),
    kv_cache_dtype=_CACHE_DTYPE.value,
    weight_dtype=_WEIGHT_DTYPE.value,
    chunk=_CHUNK.value,
    slots=_SLOTS.value,
    implementation=_IMPLEMENTATION.value,
    fit=_FIT.value,
    memory_limit=int(_HOST_MEMORY.value * 2**30),
    log=cli.log,
  )
  config, topology = load_config(path), _TOPOLOGY.value
  if _COMPARE.value:
    rows = planner.compare_plans(config, topology, **options)
    result, answer = _comparison(rows, _CACHE_PLAN.value)
    print(report.markdown(rows))
  else:
    plan = planner.plan_pod(config, topology, **options)
    rows, answer = [(plan.request.cache_plan, plan)], plan.fits
    result = plan.to_json()
    print(report.table(plan))
  if _JSON.value:
    cli.write_json(_JSON.value, cli.origin() | {'model': path} | result)
  if _PLOT.value:
    report.plot(rows, _PLOT.value)
  return answer


def _drafts() -> int:
  """Drafts of a round; only a verify step has any."""
  if _DRAFTS.value is None:
    return 3 if _STEP.value == 'verify' else 0
  return _DRAFTS.value


def _comparison(rows, cache_plan: str) -> tuple[dict, bool]:
  """The asked plan's figures with all plans beside them, and its answer."""
  results = {
    name: {'error': plan} if isinstance(plan, str) else plan.to_json()
    for name, plan in rows
  }
  name = next(name for name, _ in rows if name.startswith(cache_plan))
  asked = results[name]
  if 'error' in asked:
    raise cli.UserError(f'{name}: {asked["error"]}')
  return {**asked, 'plans': results}, asked['fits']


if __name__ == '__main__':
  cli.run(main)
