"""Continues prompts with a checkpoint: text on stdout, timings on stderr.

  python launch/generate.py --prompt='import numpy' --num_speculative_tokens=5
  python launch/generate.py --model=DIR --prompt='Once upon a time'
  python launch/generate.py --model=DIR --prompt_ids=FILE.json --json=OUT.json

  python launch/generate.py --model=DIR --prompt=Hello --mesh=context=8

`--prompt_ids` holds a list of token ids, or a list of such lists. Over
several hosts every host runs the same command (`launch/pod.sh`).
"""

from __future__ import annotations

import json

from absl import flags
from etils import epath

from glm_jax import cli
from glm_jax import mesh_flags as _mesh_flags  # noqa: F401  defines flags

_MODEL = flags.DEFINE_string(
  'model',
  None,
  'Checkpoint directory, published or orbax format; default: glm-nano.',
)
_PROMPT = flags.DEFINE_multi_string(
  'prompt', [], 'Text to continue; may be repeated.'
)
_PROMPT_IDS = flags.DEFINE_string(
  'prompt_ids', None, 'JSON file of token ids to continue.'
)
_CHAT = flags.DEFINE_bool(
  'chat', False, 'Treat --prompt as a user turn, through the chat template.'
)
_THINKING = flags.DEFINE_bool(
  'enable_thinking', True, 'With --chat: let the model reason first.'
)
_EFFORT = flags.DEFINE_string(
  'reasoning_effort', None, "With --chat: 'high' reasons less than default."
)
_MAX_NEW = flags.DEFINE_integer(
  'max_new_tokens', 128, 'New tokens of each prompt at most.'
)
_TEMPERATURE = flags.DEFINE_float('temperature', 0.0, '0 is greedy.')
_TOP_P = flags.DEFINE_float('top_p', 1.0, 'Probability kept; 1 keeps all.')
_TOP_K = flags.DEFINE_integer('top_k', 0, 'Tokens kept; 0 keeps all.')
_MIN_P = flags.DEFINE_float(
  'min_p', 0.0, 'Least probability relative to the best; 0 keeps all.'
)
_DRAFTS = flags.DEFINE_integer(
  'num_speculative_tokens', 0, 'Drafts of a round, K; 0 decodes plainly.'
)
_ADAPTIVE = flags.DEFINE_bool(
  'adaptive_drafts', False, 'Fewer drafts after rejections, up to K later.'
)
_GREEDY_DRAFTS = flags.DEFINE_bool(
  'greedy_drafts', False, 'Draft the likeliest token instead of sampling q.'
)
_SHARE = flags.DEFINE_bool(
  'share_draft_index_and_kv',
  None,
  "Later draft steps reuse the first one's index and rows; default: the "
  "config's index_share_for_mtp_iteration.",
)
_ADVANCE = flags.DEFINE_bool(
  'advance_draft_position', True, 'Rotate later draft queries one on each.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Prompt i is sampled with seed + i.')
_STOP = flags.DEFINE_multi_string(
  'stop', [], 'Text that ends a sequence; may be repeated.'
)
_IGNORE_EOS = flags.DEFINE_bool(
  'ignore_eos', False, 'Go on after an end token.'
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
_CHUNK = flags.DEFINE_integer(
  'prefill_chunk', 512, 'Rows of one prefill step at most.'
)
_DETERMINISTIC = flags.DEFINE_bool(
  'deterministic',
  False,
  'Fixed row tiles: bits do not depend on batch or chunking. Slower.',
)
_JSON = flags.DEFINE_string('json', None, 'Write the result to this file.')


def read_prompt_ids(path: str) -> list[list[int]]:
  """Token ids of a JSON file: one list, or a list of lists."""
  try:
    ids = json.loads(epath.Path(path).expanduser().read_text())
  except json.JSONDecodeError as error:
    raise cli.UserError(f'--prompt_ids={path} is not JSON: {error}') from None
  if isinstance(ids, list) and ids and not isinstance(ids[0], list):
    ids = [ids]
  is_ids = lambda row: (
    isinstance(row, list)
    and all(isinstance(i, int) and not isinstance(i, bool) for i in row)
  )
  if not isinstance(ids, list) or not ids or not all(map(is_ids, ids)):
    raise cli.UserError(
      f'--prompt_ids={path} must hold a list of integers or a list of such '
      'lists'
    )
  return ids


def read_prompts(tokenizer) -> list[list[int]]:
  """The prompts asked for, as token ids."""
  if bool(_PROMPT.value) == bool(_PROMPT_IDS.value):
    raise cli.UserError('give either --prompt=TEXT or --prompt_ids=FILE.json')
  if _PROMPT_IDS.value:
    if _CHAT.value:
      raise cli.UserError('--chat needs --prompt: token ids are taken as is')
    return read_prompt_ids(_PROMPT_IDS.value)
  if tokenizer is None:
    raise cli.UserError(
      f'--model={_MODEL.value} has no tokenizer.json: use --prompt_ids'
    )
  prompts = _PROMPT.value
  if _CHAT.value:
    prompts = [
      tokenizer.apply_chat_template(
        [{'role': 'user', 'content': text}],
        enable_thinking=_THINKING.value,
        reasoning_effort=_EFFORT.value,
      )
      for text in prompts
    ]
  return [tokenizer.encode(text) for text in prompts]


def main() -> None:
  path = cli.resolve_model_path(_MODEL.value)
  from sharding import launching

  with launching.processes():
    run(path)


def run(path: str) -> None:
  """Generates; with several processes, all of them run this."""
  from glm_jax import checkpoints, generate
  from glm_jax.drafting import DraftOptions
  from glm_jax.plan import ROW_TILE
  from glm_jax.text import Tokenizer, read_eos_token_ids
  from sharding import distributed, launching

  tokenizer = Tokenizer.load(path)
  prompts = read_prompts(tokenizer)
  plan = launching.plan_for(
    checkpoints.load_config(path),
    row_tile=ROW_TILE if _DETERMINISTIC.value else None,
  )
  model = checkpoints.load_model(
    path, dtype=_DTYPE.value, weight_dtype=_WEIGHT_DTYPE.value, plan=plan
  )
  log_plan(plan, model.config, prompts)
  eos = () if _IGNORE_EOS.value else read_eos_token_ids(path)
  share = _SHARE.value
  if share is None:
    share = model.config.mtp.share_index_and_kv
  out = generate(
    model,
    prompts,
    max_new_tokens=_MAX_NEW.value,
    temperature=_TEMPERATURE.value,
    top_k=_TOP_K.value,
    top_p=_TOP_P.value,
    min_p=_MIN_P.value,
    seed=_SEED.value,
    eos_token_ids=eos,
    stop=_STOP.value,
    tokenizer=tokenizer,
    num_speculative_tokens=_DRAFTS.value,
    draft_options=DraftOptions(
      share, share, _ADVANCE.value, _GREEDY_DRAFTS.value
    ),
    adaptive_drafts=_ADAPTIVE.value,
    prefill_chunk=_CHUNK.value,
    cache_dtype=_CACHE_DTYPE.value,
    plan=plan,
  )
  if distributed.is_main():
    report(out, prompts)


def log_plan(plan, config, prompts) -> None:
  """What each device holds and moves, over several devices."""
  import jax

  from glm_jax import init_cache
  from pallas_kernels.tiling import PAGE, cdiv
  from sharding import distributed, launching

  if not hasattr(plan, 'cache_bytes') or not distributed.is_main():
    return
  room = _MAX_NEW.value + _DRAFTS.value
  pages = sum(cdiv(len(prompt) + room, PAGE) for prompt in prompts)
  make = lambda: init_cache(config, pages, dtype=_CACHE_DTYPE.value)
  cli.log(launching.describe(plan, jax.eval_shape(make), _CHUNK.value))


def report(out, prompts) -> None:
  """Text on stdout, timings on stderr, all of it in `--json`."""
  for i, tokens in enumerate(out.tokens):
    print(json.dumps(tokens) if out.text is None else out.text[i])
  new = sum(map(len, out.tokens))
  old = sum(map(len, prompts))
  cli.log(
    f'prefill {old} tokens in {out.seconds_prefill:.2f} s, decode {new} '
    f'tokens in {out.seconds_decode:.2f} s (both with compilation)'
  )
  drafts = out.drafts
  if drafts is not None:
    rates = ', '.join(
      f'{a}/{d}' for a, d in zip(drafts.accepted, drafts.drafted)
    )
    cli.log(
      f'accept length {drafts.accept_length:.2f}, with the bonus token '
      f'{drafts.accept_length_with_bonus:.2f}; accepted by position {rates}; '
      f'{drafts.index_calls} indexer calls in {drafts.passes} draft passes'
    )
  if _JSON.value:
    cli.write_json(
      _JSON.value,
      {
        'tokens': out.tokens,
        'text': out.text,
        'accept_length': drafts and drafts.accept_length,
        'accept_length_with_bonus': drafts and drafts.accept_length_with_bonus,
        'seconds_prefill': out.seconds_prefill,
        'seconds_decode': out.seconds_decode,
      },
    )


if __name__ == '__main__':
  cli.run(main)
