"""A byte-level tokenizer with GLM's control tokens and markup, for tests."""

import functools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from glm_jax.data.tokenizer_training import CONTROL_TOKENS, MARKUP_TOKENS
from glm_jax.text import Tokenizer

EOS = ('<|endoftext|>', '<|user|>', '<|observation|>')
# One of them ends a 中 and begins the next, as real vocabularies have.
MERGES = [('t', 'h'), ('th', 'e'), ('Ń', 'ä'), ('Ġ', 'the'), ('i', 'n')]


@functools.cache
def backend():
  """Bytes, a few merges, then the special tokens: 284 ids."""
  tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map(''.join, MERGES)]
  vocab = {token: i for i, token in enumerate(tokens)}
  made = tokenizers.Tokenizer(models.BPE(vocab, MERGES))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(list(CONTROL_TOKENS))
  made.add_tokens(
    [tokenizers.AddedToken(t, normalized=False) for t in MARKUP_TOKENS]
  )
  return made


@functools.cache
def tokenizer() -> Tokenizer:
  """The same with GLM's chat template and end tokens."""
  eos = [backend().token_to_id(text) for text in EOS]
  return Tokenizer(backend(), eos_token_ids=eos)
