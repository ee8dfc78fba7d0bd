"""A row of suite `serve`, from the figures of one replay."""

from __future__ import annotations

from typing import Any

from glm_jax.benchmarks.report import Request, Row


def serve_row(
  request: Request,
  case: str,
  system: str,
  figures: dict[str, Any],
  *,
  shape: str,
  us: float,
  **details: Any,
) -> Row:
  """The row of a case.

  Args:
    request: of the suite.
    case: its name.
    system: what served.
    figures: of `serving.benchmark.summary`.
    shape: of the requests, in words.
    us: microseconds a token.
    **details: what the case knows besides.
  """
  drafts = figures['drafts']
  prompt = max(figures['input_tokens'], 1)
  return Row(
    suite='serve',
    case=case,
    system=system,
    device='any' if request.url else request.devices[0].name,
    dtype='auto',
    shape=shape,
    us=us,
    evidence='run',
    command=request.command,
    date=request.date,
    details={
      **figures,
      'output_tok_s': figures['output_throughput'],
      'ttft_ms': figures['ttft']['Median'],
      'tpot_ms': figures['tpot']['Median'],
      'cached_percent': 100 * figures['cached_tokens'] / prompt,
      'accept_length': drafts and drafts['length'],
      **details,
    },
  )
