"""Token counts of an answer, as OpenAI's `usage`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glm_jax.serving.http.choices import Choice


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
  """Counts over all choices.

  Args:
    choices: `n` of each prompt, in order of prompts; a prompt counts once.
    n: choices of a prompt.
  """
  # A choice that has not had an output yet knows no counts.
  groups = [choices[i : i + n] for i in range(0, len(choices), n)]
  largest = lambda name: sum(
    max(getattr(choice.output, name) for choice in group) for group in groups
  )
  prompt, cached = largest('prompt_tokens'), 0
  for group in groups:
    # Of a prompt's choices the first one shows what was cached before.
    cached += group[0].output.cached_tokens
  new = sum(choice.num_ids for choice in choices)
  drafted = sum(sum(choice.output.drafted) for choice in choices)
  accepted = sum(sum(choice.output.accepted) for choice in choices)
  return {
    'prompt_tokens': prompt,
    'completion_tokens': new,
    'total_tokens': prompt + new,
    'prompt_tokens_details': {'cached_tokens': cached},
    'completion_tokens_details': {
      'reasoning_tokens': sum(choice.num_reasoning for choice in choices),
      'accepted_prediction_tokens': accepted,
      'rejected_prediction_tokens': drafted - accepted,
    },
  }
