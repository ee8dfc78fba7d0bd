"""Log probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glm_jax.serving.request import TokenLogprob
from glm_jax.text import Tokenizer

# JSON has no infinity; the value that vLLM sends.
_FLOOR = -9999.0


def chat(
  tokenizer: Tokenizer, entries: Sequence[TokenLogprob]
) -> dict[str, Any]:
  """`choices[].logprobs` of a chat."""
  content = []
  for entry in entries:
    top = [_token(tokenizer, i, logprob) for i, logprob in entry.top]
    chosen = _token(tokenizer, entry.token, entry.logprob)
    content.append({**chosen, 'top_logprobs': top})
  return {'content': content, 'refusal': None}


def completion(
  tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob], offset: int
) -> dict[str, Any]:
  """`choices[].logprobs` of a completion; texts begin at `offset`."""
  name = lambda i: _text(tokenizer, i)
  offsets = []
  for entry in entries:
    offsets.append(offset)
    offset += len(name(entry.token))
  return {
    'tokens': [name(entry.token) for entry in entries],
    'token_logprobs': [_finite(entry.logprob) for entry in entries],
    'top_logprobs': [
      # The best of several ids with one text stands: they come best first.
      {name(i): _finite(logprob) for i, logprob in reversed(entry.top)}
      for entry in entries
    ],
    'text_offset': offsets,
  }


def _token(tokenizer: Tokenizer, i: int, logprob: float) -> dict[str, Any]:
  text = _text(tokenizer, i)
  whole = '\ufffd' not in text
  return {
    'token': text,
    'logprob': _finite(logprob),
    'bytes': list(text.encode()) if whole else None,
  }


def _text(tokenizer: Tokenizer | None, i: int) -> str:
  if tokenizer is None:
    return f'token_id:{i}'
  return tokenizer.decode([i], skip_special_tokens=False)


def _finite(logprob: float) -> float:
  return max(float(logprob), _FLOOR) if logprob == logprob else _FLOOR
