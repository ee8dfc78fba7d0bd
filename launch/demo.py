"""The whole in a minute: an independent checkpoint, checked and continued.

PyTorch `transformers` writes a small random checkpoint of the published
architecture (IndexShare pattern, 32 index heads, more tokens than top-k,
with a drafter). JAX and PyTorch then run it side by side, layer by layer,
and both continue a prompt. The model is random, so its words mean nothing;
that both sides say the same does.
"""

from __future__ import annotations

import pathlib
import time
import warnings

import numpy as np
from absl import flags

from glm_jax import cli

_OUT = flags.DEFINE_string('out', 'demo', 'Where the checkpoint is written.')
_NEW = flags.DEFINE_integer('max_new_tokens', 48, 'Tokens to continue.')
_DRAFTS = flags.DEFINE_integer(
  'num_speculative_tokens', 3, 'Drafts of a round.'
)
_ONLY_VALIDATE = flags.DEFINE_bool(
  'only_validate', False, 'Stop after the comparison.'
)
_PROMPT_TOKENS = 96  # three times the checkpoint's index_topk


def write_checkpoint(directory: pathlib.Path) -> None:
  """A random checkpoint with a byte-level tokenizer, made once."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  from glm_jax.validation.random_checkpoint import write_random_checkpoint

  if (directory / 'tokenizer.json').exists():
    return
  directory.mkdir(parents=True, exist_ok=True)
  write_random_checkpoint(directory, seed=0, mtp=True)
  # 256 bytes and three end tokens fill the first ids of 512.
  special = ['<|endoftext|>', '<|user|>', '<|observation|>']
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {token: i for i, token in enumerate([*special, *letters])}
  backend = tokenizers.Tokenizer(models.BPE(vocab, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(special)
  backend.save(str(directory / 'tokenizer.json'))


def torch_continuation(directory: pathlib.Path, prompt: list[int], new: int):
  """Greedy ids by transformers, and the seconds it took."""
  import torch
  import transformers

  model = transformers.GlmMoeDsaForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation='eager'
  )
  eps = model.config.rms_norm_eps
  for module in model.modules():
    if hasattr(module, 'q_a_layernorm'):
      module.q_a_layernorm.variance_epsilon = eps
      module.kv_a_layernorm.variance_epsilon = eps
  begin = time.perf_counter()
  ids = torch.tensor([prompt])
  out = model.generate(
    ids,
    attention_mask=torch.ones_like(ids),
    do_sample=False,
    max_new_tokens=new,
    min_new_tokens=new,
  )
  seconds = time.perf_counter() - begin
  return out[0, len(prompt) :].tolist(), seconds


def main() -> bool:
  warnings.filterwarnings('ignore')  # transformers' own, not this repo's
  try:
    import transformers
  except ImportError:
    raise cli.UserError(
      'the demo compares with PyTorch: pip install "glm-jax[validate]"'
    ) from None
  from glm_jax import generate, load_model, validate
  from glm_jax.plan import ROW_TILE, LocalPlan

  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  directory = pathlib.Path(_OUT.value) / 'checkpoint'
  write_checkpoint(directory)
  print(f'checkpoint, written by PyTorch transformers: {directory}\n')
  prompt = np.random.default_rng(0).integers(3, 259, _PROMPT_TOKENS).tolist()
  result = validate(directory, prompt, log=cli.log)
  print(result.table())
  if _ONLY_VALIDATE.value or not result.passed:
    return result.passed
  new, K = _NEW.value, _DRAFTS.value
  model = load_model(directory)
  rows = [('PyTorch', *torch_continuation(directory, prompt, new), '-')]
  for name, drafts in (('JAX', 0), (f'JAX, {K} drafts', K)):
    out = generate(
      model,
      [prompt],
      max_new_tokens=new,
      eos_token_ids=(),
      num_speculative_tokens=drafts,
      plan=LocalPlan(row_tile=ROW_TILE),
    )
    length = out.drafts and f'{out.drafts.accept_length_with_bonus:.2f}'
    seconds = out.seconds_prefill + out.seconds_decode
    rows.append((name, out.tokens[0], seconds, length or '-'))
  want = rows[0][1]
  print(f'\ngreedy continuation of {len(prompt)} tokens by {new}:')
  print(f'{"":>14}{"same tokens":>14}{"seconds":>10}{"tokens/round":>14}')
  for name, tokens, seconds, length in rows:
    same = sum(a == b for a, b in zip(tokens, want))
    print(f'{name:>14}{f"{same}/{new}":>14}{seconds:>10.1f}{length:>14}')
  print('\n(seconds include compilation; a random drafter is rarely right)')
  return all(tokens == want for _, tokens, _, _ in rows)


if __name__ == '__main__':
  cli.run(main)
