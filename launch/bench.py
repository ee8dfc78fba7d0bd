"""Benchmarks, by suite; exits with 1 where a goal of the suite is missed.

  python launch/bench.py --suite=op --topology=v6e --evidence=compiled
  python launch/bench.py --suite=op --evidence=run --op=tiny    on this device
  python launch/bench.py --suite=op --op=grouped_matmul,decode_8x1m/fp8 ...
  python launch/bench.py --suite=layer --evidence=run     a layer and PyTorch's
  python launch/bench.py --suite=context --evidence=run   8K to 1M tokens
  python launch/bench.py --suite=serve --evidence=run     this engine and naive
  python launch/bench.py --suite=serve --evidence=run --url=http://HOST:PORT

'compiled' runs nothing: libtpu compiles for the generation on this host, and
what its cycle model cannot know is printed under the table.
"""

from __future__ import annotations

from absl import flags

from glm_jax import cli
from glm_jax.benchmarks import GPUS, SUITES, Device, Request, load_suite
from glm_jax.compiling import compiler_options
from pallas_kernels.block_sizes import GENERATIONS
from sharding.chips import CHIPS, chip_named

_SUITE = flags.DEFINE_string('suite', 'op', f'One of {", ".join(SUITES)}.')
_OP = flags.DEFINE_list(
  'op',
  None,
  'Names, or parts of names, of the cases, as in grouped_matmul or '
  'indexer_scores/decode_8x1m/bf16. Default: all.',
)
_TOPOLOGY = flags.DEFINE_list(
  'topology',
  None,
  f'Generations to compile for: {", ".join(CHIPS)}, or slices of them. '
  'Default: all.',
)
_EVIDENCE = flags.DEFINE_enum(
  'evidence', 'compiled', ['compiled', 'run'], 'Where numbers come from.'
)
_SYSTEM = flags.DEFINE_list(
  'system',
  None,
  "Implementations to measure. Default: 'tpu' compiled; the ops' own choice "
  "when run ('auto'). layer: jax, torch_eager, torch_sdpa, torch_static.",
)
_URL = flags.DEFINE_string(
  'url', None, 'serve: an OpenAI-compatible server to measure.'
)
_MODEL = flags.DEFINE_string(
  'model',
  None,
  'serve: what launch/serve.py gets, without --url. context: glm52 (the '
  'default) or tiny.',
)
_SCALE = flags.DEFINE_integer(
  'scale', 1, 'serve: traffic and window, 1024 tokens at 1.', lower_bound=1
)
_MAX_SECONDS = flags.DEFINE_float(
  'max_seconds',
  None,
  'layer, context: start no more cases after this; default: run all of them.',
  lower_bound=0,
)
_JSON = flags.DEFINE_string(
  'json',
  None,
  'Write the rows to this file; where cases take minutes, after each.',
)
_PLOT = flags.DEFINE_string('plot', None, 'context: write a PNG.')


def compile_targets(names: list[str]) -> tuple[Device, ...]:
  """The generations to compile for."""
  from glm_jax.benchmarks.compiled import CLOCKS

  chips = [chip_named(name) for name in names]
  return tuple(
    Device(
      name=chip.name,
      bandwidth=chip.bandwidth,
      flops=chip.peak(),
      clock=CLOCKS[chip.name],
      topology=chip.name,
      options=compiler_options(chip.name),
    )
    for chip in chips
  )


def run_devices(suite) -> tuple[Device, ...]:
  """None for a suite whose processes need the whole memory of the device."""
  if getattr(suite, 'OWN_PROCESSES', False):
    return ()
  return (device_at_hand(),)


def device_at_hand() -> Device:
  """The first device of this process, with its roofline where known."""
  import jax

  kind = jax.devices()[0].device_kind
  if kind in GENERATIONS:
    chip = chip_named(GENERATIONS[kind])
    return Device(chip.name, chip.bandwidth, chip.peak())
  return GPUS.get(kind, Device(kind, float('inf'), float('inf')))


def main() -> bool:
  suite = load_suite(_SUITE.value)
  run = _EVIDENCE.value == 'run'
  if run and _TOPOLOGY.value:
    raise cli.UserError('--topology is for --evidence=compiled: leave it out')
  systems = tuple(_SYSTEM.value or (['auto'] if run else ['tpu']))
  origin = cli.origin()
  save = lambda report: cli.write_json(_JSON.value, report)
  if _PLOT.value and not hasattr(suite, 'plot'):
    raise cli.UserError('--plot is for --suite=context: leave it out')
  request = Request(
    evidence=_EVIDENCE.value,
    devices=(
      run_devices(suite)
      if run
      else compile_targets(_TOPOLOGY.value or list(CHIPS))
    ),
    select=tuple(_OP.value or ()),
    systems=systems,
    command=origin['command'],
    date=origin['date'],
    url=_URL.value,
    model=_MODEL.value,
    scale=_SCALE.value,
    max_seconds=_MAX_SECONDS.value,
    save=save if _JSON.value else None,
  )
  report = suite.run(request, cli.log)
  print(report.table(suite.COLUMNS[request.evidence]))
  if _JSON.value:
    save(report)
  if _PLOT.value:
    suite.plot(report, _PLOT.value)
  return report.passed


if __name__ == '__main__':
  cli.run(main)
