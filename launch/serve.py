r"""Serves a model over HTTP, as OpenAI's clients expect.

  python launch/serve.py --model=DIR
  curl http://127.0.0.1:8000/v1/chat/completions \
    -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

Everything is compiled before the port opens. The first SIGTERM or SIGINT
closes the port and lets running requests finish; exit code 0 means that the
server ended because it was told to. Over several hosts the same command runs
on each (launch/pod.sh): process 0 serves, the others follow it, and one that
is lost ends all.
"""

from __future__ import annotations

import dataclasses
import os
import time

from absl import flags
from etils import epath

from glm_jax import cli, mesh_flags  # noqa: F401 (defines flags)
from glm_jax.embedded import EMBEDDED

_MODEL = flags.DEFINE_string(
  'model',
  None,
  'Checkpoint directory, published or orbax format; default: glm-nano.',
)
_NAMES = flags.DEFINE_list(
  'served_model_name', [], "Names for clients; default: the directory's."
)
_LOAD_FORMAT = flags.DEFINE_enum(
  'load_format',
  'auto',
  ['auto', 'dummy'],
  "'dummy' takes random weights for a config or preset: for tests.",
)
_PER_LAYER = flags.DEFINE_bool(
  'per_layer_indexers',
  False,
  'With dummy weights: an indexer in every layer, to compare with.',
)
_HOST = flags.DEFINE_string(
  'host', '127.0.0.1', 'Address to listen on; 0.0.0.0 opens it to others.'
)
_PORT = flags.DEFINE_integer('port', 8000, 'Port; 0 takes a free one.')
_KEYS = flags.DEFINE_string(
  'api_key_file', None, 'File with one key a line, asked for by all paths.'
)
_MAX_LEN = flags.DEFINE_integer(
  'max_model_len', None, 'Tokens of a request; default: as many as fit.'
)
_MAX_SEQS = flags.DEFINE_integer(
  'max_num_seqs', None, 'Requests at once; default: 64, 8 on a CPU.'
)
_MAX_ROWS = flags.DEFINE_integer(
  'max_num_batched_tokens',
  None,
  'Rows of one step, drafts included; default: 512, 128 on a CPU.',
)
_COMPACT = flags.DEFINE_bool(
  'compact_shapes',
  None,
  'Compile two shapes alone: starts soon, wastes work on short contexts and '
  'few requests. Default: on a CPU.',
)
_MAX_QUEUE = flags.DEFINE_integer(
  'max_waiting_requests', 1024, 'Requests that may wait; more get 429.'
)
_PLANNED = flags.DEFINE_float(
  'planned_share',
  0.1,
  'Share of its new tokens that must fit when a request is admitted. Below 1 '
  'more run at once, and some may be set aside for a while.',
)
_DRAFTS = flags.DEFINE_integer(
  'num_speculative_tokens',
  None,
  'Drafts of a round; default: 5 if the model has a drafter, else 0.',
)
_DTYPE = flags.DEFINE_string(
  'dtype', 'auto', "Compute dtype: 'auto' (the config's), 'bf16' or 'f32'."
)
_WEIGHT_DTYPE = flags.DEFINE_string(
  'weight_dtype', 'auto', "'auto' (the checkpoint's), 'bf16', 'f32' or 'fp8'."
)
_CACHE_DTYPE = flags.DEFINE_string(
  'kv_cache_dtype', 'auto', "'auto', 'bf16', 'f32' or 'fp8'."
)
_UTILIZATION = flags.DEFINE_float(
  'gpu_memory_utilization', 0.9, 'Share of device memory to use, TPU too.'
)
_CACHE_BYTES = flags.DEFINE_integer(
  'kv_cache_memory_bytes', None, 'Bytes of the cache; default: what is left.'
)
_PAGES = flags.DEFINE_integer(
  'num_gpu_blocks_override', None, 'Pages of 64 tokens, instead of bytes.'
)
_PREFIX = flags.DEFINE_bool(
  'enable_prefix_caching', True, 'Share the pages of equal beginnings.'
)
_HOST_GIB = flags.DEFINE_float(
  'kv_offloading_size', 0.0, 'GiB of host memory for evicted pages.'
)
_HOST_LATENTS = flags.DEFINE_float(
  'latent_offloading_size',
  0.0,
  'GiB of host memory for the latents of all pages: the device keeps index '
  'keys alone, and holds many times the context. 0: latents on the device.',
)
_DISK = flags.DEFINE_string(
  'disk_cache_dir', None, 'Directory that keeps prefixes over a restart.'
)
_DETERMINISTIC = flags.DEFINE_bool(
  'deterministic', False, 'Bits do not depend on the batch. Slower.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of requests that bring none.')
_TUNE = flags.DEFINE_bool(
  'tune', False, 'Measure at the start what each context range runs on.'
)
_TUNING = flags.DEFINE_string(
  'tuning_file', None, 'A saved choice of --tune: read, or else written.'
)
_COMPILED = flags.DEFINE_string(
  'compilation_cache_dir',
  '~/.cache/glm_jax/compiled',
  "Keeps compiled programs over restarts; '' for none.",
)
_LOG_REQUESTS = flags.DEFINE_bool(
  'enable_log_requests', False, 'Log prompts and parameters too.'
)
_TIMEOUT = flags.DEFINE_float(
  'request_timeout', None, 'Seconds after which a request is ended.'
)
_DRAIN = flags.DEFINE_float(
  'shutdown_timeout', 600.0, 'Seconds that running requests get at the end.'
)
_BODY = flags.DEFINE_integer('max_body_bytes', 32 << 20, 'Of one request.')
# vLLM's command lines name these; there is one answer to each here.
flags.DEFINE_enum('tool_call_parser', 'glm47', ['glm47'], 'Always on.')
flags.DEFINE_enum('reasoning_parser', 'glm45', ['glm45'], 'Always on.')
flags.DEFINE_bool('enable_auto_tool_choice', True, 'Always on.')
_JSON = flags.DEFINE_string(
  'json', None, 'Write the URL and the sizes to this file when ready.'
)


def read_keys(path: str | None) -> tuple[str, ...]:
  """API keys of a file, one a line."""
  if path is None:
    return ()
  text = epath.Path(path).expanduser().read_text()
  keys = tuple(line.strip() for line in text.splitlines() if line.strip())
  if not keys:
    raise cli.UserError(f'--api_key_file={path} holds no key')
  return keys


def model_path() -> str:
  """Where the model is: a directory, or with random weights a config."""
  if _LOAD_FORMAT.value == 'auto':
    if _PER_LAYER.value:
      raise cli.UserError(
        '--per_layer_indexers needs --load_format=dummy: a checkpoint has no '
        'weights for them'
      )
    return cli.resolve_model_path(_MODEL.value or os.fspath(EMBEDDED))
  from glm_jax.presets import PRESETS

  name = _MODEL.value or os.fspath(EMBEDDED)
  return cli.resolve_model_path(name, presets=PRESETS)


def load(path: str):
  """(model, plan): from the checkpoint, or with random weights."""
  from glm_jax import checkpoints
  from glm_jax.config import FULL
  from glm_jax.plan import ROW_TILE
  from glm_jax.serving.host_latent import host_latent_plan
  from sharding import launching

  config = checkpoints.load_config(path)
  tile = ROW_TILE if _DETERMINISTIC.value else None
  plan = launching.plan_for(config, row_tile=tile)
  if _HOST_LATENTS.value:
    if hasattr(plan, 'mesh'):
      raise cli.UserError(
        '--latent_offloading_size is for one device: leave out --mesh'
      )
    plan = host_latent_plan(config, row_tile=tile)
  if _LOAD_FORMAT.value == 'auto':
    dtypes = {'dtype': _DTYPE.value, 'weight_dtype': _WEIGHT_DTYPE.value}
    return checkpoints.load_model(path, plan=plan, **dtypes), plan
  if _PER_LAYER.value:
    every = (FULL,) * len(config.indexer_types)
    config = dataclasses.replace(config, indexer_types=every)
  dtype = config.dtype if _DTYPE.value == 'auto' else _DTYPE.value
  return launching.random_model(config, dtype, _SEED.value, plan), plan


def sized(model, drafts: int, limit, plan, say):
  """The cache that fits beside the model, printed."""
  from glm_jax.cache import cache_dtype
  from glm_jax.serving import sizing
  from sharding import distributed

  dtype = 'f32' if str(model.embed.dtype) == 'float32' else 'auto'
  if _CACHE_DTYPE.value != 'auto':
    dtype = _CACHE_DTYPE.value
  dtype = cache_dtype(model.config, dtype)
  page = sizing.page_bytes(model.config, dtype, plan)
  memory = _CACHE_BYTES.value
  if memory is None:
    window = model.config.max_position_embeddings
    memory = sizing.available_bytes(_UTILIZATION.value)
    memory -= sizing.workspace_bytes(
      model.config,
      rows=limit.rows,
      drawn=limit.seqs * (drafts + 1) + 8,
      context=_MAX_LEN.value or window,
      plan=plan,
    )
    memory -= sizing.MOVING * page if _HOST_GIB.value else 0
    # Every process must come to the same.
    memory = distributed.least(max(memory, 0) >> 20) << 20
  host_bytes = int(_HOST_LATENTS.value * 2**30)
  latents = sizing.host_page_bytes(model.config, dtype) if host_bytes else 0
  if host_bytes:
    memory = min(memory, host_bytes // latents * page)
  size = sizing.fit(
    model.config,
    dtype=dtype,
    memory=memory,
    max_num_seqs=limit.seqs,
    max_model_len=_MAX_LEN.value,
    num_pages=_PAGES.value,
    page_size=page,
  )
  for line in sizing.lines(
    size, dtype, longest=_MAX_LEN.value is None, host_page=latents
  ):
    say(line)
  say(f'{drafts} drafts a round')
  return size, dtype


def engine_config(size, dtype: str, drafts: int, eos, limit):
  """The engine that the flags ask for."""
  import jax

  from glm_jax.serving import starting
  from glm_jax.serving.config import EngineConfig

  config = EngineConfig(
    max_model_len=size.max_model_len,
    num_pages=size.num_pages,
    max_num_seqs=limit.seqs,
    max_num_batched_tokens=limit.rows,
    num_speculative_tokens=drafts,
    kv_cache_dtype=dtype,
    enable_prefix_caching=_PREFIX.value,
    max_queue=_MAX_QUEUE.value,
    planned_share=_PLANNED.value,
    host_cache_bytes=int(_HOST_GIB.value * 2**30),
    disk_cache_dir=_DISK.value,
    wait_for_restores=jax.process_count() > 1,
    eos_token_ids=tuple(eos),
    seed=_SEED.value,
  )
  return starting.compact_shapes(config) if limit.compact else config


def answer_requests(engine, served, keys, about: dict) -> bool:
  """Serves until told to end; whether that was what ended it."""
  import jax

  from glm_jax.serving import http, lockstep

  options = http.ServerOptions(
    api_keys=keys,
    max_body_bytes=_BODY.value,
    request_seconds=_TIMEOUT.value,
    log_requests=_LOG_REQUESTS.value,
  )

  async def drain() -> None:
    if engine.alive:
      await engine.drain()

  def started(url: str) -> None:
    cli.log(f'listening on {url}{" (no API key)" if not keys else ""}')
    if _JSON.value:
      about['model'] = served.names[0]
      cli.write_json(_JSON.value, {'url': url, **about})

  server = http.Server(
    http.create_app(engine, served, options, on_shutdown=drain),
    host=_HOST.value,
    port=_PORT.value,
    drain_seconds=_DRAIN.value,
    on_started=started,
  )
  server.run()
  error = engine.error
  engine.stop()
  if error is not None and jax.process_count() > 1:
    raise lockstep.PodError(f'the engine has failed: {error!r}') from error
  if error is not None:
    cli.log(f'the engine has failed: {error!r}')
  return server.url != '' and error is None


def serve(path: str, keys: tuple[str, ...]) -> bool:
  """Serves, or follows process 0; every process runs this."""
  import jax

  from glm_jax.serving import lockstep, starting
  from glm_jax.serving.engine import Engine
  from glm_jax.text import read_eos_token_ids
  from sharding import distributed

  say = cli.log if distributed.is_main() else lambda text: None
  begin = time.perf_counter()
  model, plan = load(path)
  say(f'loaded {path} in {time.perf_counter() - begin:.1f} s')
  if _LOAD_FORMAT.value == 'dummy':
    say('random weights: the answers mean nothing')
  drafts = _DRAFTS.value
  if drafts is None:
    drafts = 0 if model.mtp is None else 5
  eos = {*read_eos_token_ids(path), *model.config.eos_token_ids}
  eos = tuple(sorted(eos))
  limit = starting.limits(_MAX_SEQS.value, _MAX_ROWS.value, _COMPACT.value)
  size, dtype = sized(model, drafts, limit, plan, say)
  config = engine_config(size, dtype, drafts, eos, limit)
  wires = []
  if jax.process_count() > 1:
    wires = lockstep.join(distributed.main_address())
  if not distributed.is_main():
    starting.leave_signals_to_process_0()
    lockstep.follow(Engine(model, config, plan), *wires)
    return True
  engine = starting.start_engine(
    model,
    config,
    plan,
    say,
    followers=wires,
    tune=_TUNE.value,
    tuning_file=_TUNING.value,
  )
  return answer_requests(engine, description(path, model, size, eos), keys, {
    'max_model_len': size.max_model_len,
    'num_pages': size.num_pages,
    'concurrency': size.concurrency,
    'num_speculative_tokens': drafts,
    'kv_cache_dtype': dtype,
  })  # fmt: skip


def description(path: str, model, size, eos: tuple[int, ...]):
  """The model as the API shows it."""
  from glm_jax.serving import http, starting
  from glm_jax.text import Tokenizer

  tokenizer = Tokenizer.load(path, eos_token_ids=eos)
  if tokenizer is None:
    cli.log('no tokenizer: completions take and give token ids alone')
  return http.ServedModel(
    names=tuple(_NAMES.value) or (epath.Path(path).name,),
    vocab_size=model.config.vocab_size,
    max_model_len=size.max_model_len,
    tokenizer=tokenizer,
    eos_ids=eos,
    sampling=starting.sampling_defaults(path),
  )


def main() -> bool:
  keys, path = read_keys(_KEYS.value), model_path()
  try:
    from glm_jax.serving import http, lockstep, starting  # noqa: F401
  except ModuleNotFoundError as error:
    raise cli.UserError(
      f"serving needs {error.name}: pip install 'glm-jax[serve]'"
    ) from None
  from sharding import distributed, launching

  starting.set_up(_COMPILED.value)
  try:
    with launching.processes():
      return serve(path, keys)
  except lockstep.PodError as error:
    distributed.fail(str(error))


if __name__ == '__main__':
  cli.run(main)
