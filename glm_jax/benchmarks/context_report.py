"""Rows, ratios, bounds and goals of suite `context`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from glm_jax.benchmarks.context_bound import (
  Work,
  bounds,
  decode_work,
  prefill_work,
)
from glm_jax.benchmarks.context_slice import Setting, context_name
from glm_jax.benchmarks.report import Report, Request, Row

Found = dict[str, Any]

BOUND_SHARE = 0.7  # of the bound, at the largest context (issue 8)
NOISE = 0.03
GROWS_FROM = 32_768  # tokens, in contexts that reach so far
# Throughput of z.ai/blog/glm-5.2 by context, as transcribed in spec/model.md
# section 6.1: both normalised to GLM-5.1 at 32K. Metric, hardware, batch and
# cache hit rate are not stated there.
PUBLISHED = {
  'GLM-5.1': {
    32_768: 1.00, 65_536: 1.62, 131_072: 2.42, 204_800: 2.77,
  },
  'GLM-5.2': {
    32_768: 1.03, 65_536: 2.06, 131_072: 3.86, 204_800: 4.69,
    262_144: 5.37, 524_288: 6.16, 1_048_576: 6.97,
  },
}  # fmt: skip
NOTES = (
  'layers 6 to 13 with the drafter, random weights: times are real, texts '
  'are not; one sequence, nothing cached before',
  'over_per_layer, over_dense: that system\'s time over the time of "shared"; '
  'bounds: what FLOPs (prefill) or bytes (decode) of the attention side alone '
  'allow, selection not counted; details have those of the whole step',
  "prefill: every chunk is waited for, the drafter's rows included; of "
  '"shared" all chunks run, of others as the row says, over the rows that '
  '"shared" has cached',
  'decode: the median of four waits for queued steps, over their number; '
  '"attention" is the same step without MLPs, head and sampling',
  'peak_gb: what the program holds, weights and cache included; peak_bytes: '
  'the most that the process had held by then',
  'the published curve (details) states no metric, hardware or hit rate',
)


class Case(NamedTuple):
  """One thing to measure."""

  phase: str
  system: str
  context: int

  @property
  def name(self) -> str:
    """As in 'decode_128k'."""
    return f'{self.phase}_{context_name(self.context)}'


def report(
  request: Request,
  setting: Setting,
  found: Mapping[Case, Found],
  late: Sequence[str] = (),
) -> Report:
  """The report of what has been measured so far.

  Args:
    request: what was asked.
    setting: the slice.
    found: seconds (a token of decoding, or of all of a prefill) and details.
    late: cases that there was no time for.

  Returns:
    Rows in the order of measuring, and the goals missed.
  """
  rows = tuple(_row(request, setting, case, found) for case in found)
  notes = NOTES
  if late:
    notes += (f'out of time: {", ".join(dict.fromkeys(late))} not measured',)
  return Report(rows, notes, tuple(missed(setting, found, late)))


def over(found: Mapping[Case, Found], case: Case, system: str) -> float | None:
  """A system's time over that of `shared` in the same case."""
  own = found.get(case._replace(system='shared'), {}).get('seconds')
  other = found.get(case._replace(system=system), {}).get('seconds')
  return other / own if own and other else None


def missed(
  setting: Setting, found: Mapping[Case, Found], late: Sequence[str] = ()
) -> list[str]:
  """Sentences about the goals that were measured and not reached."""
  last, texts = setting.contexts[-1], []
  for phase in ('prefill', 'attention'):
    case = Case(phase, 'shared', last)
    ratio = over(found, case, 'per_layer')
    bound = _bounds(setting, case, 'per_layer')['attention']
    if ratio is None:
      if case.name in late:
        texts.append(f'{case.name}: not measured in the time given')
    elif ratio < BOUND_SHARE * bound:
      texts.append(
        f'{case.name}: per-layer indexers take {ratio:.2f}x the time, '
        f'{ratio / bound:.0%} of the bound {bound:.2f}x; goal {BOUND_SHARE:.0%}'
      )
  for phase in ('prefill', 'decode'):
    texts += _shrinking(setting, found, phase)
  for case, figures in found.items():
    if figures.get('problem'):
      texts.append(f'{case.name} {case.system}: {figures["problem"]}')
  return texts


def _shrinking(setting, found, phase: str) -> list[str]:
  """Where the advantage over dense attention does not grow with context."""
  before, texts = None, []
  far = [c for c in setting.contexts if c >= GROWS_FROM] or setting.contexts
  for context in far:
    ratio = over(found, Case(phase, 'shared', context), 'dense')
    if ratio is None:
      continue
    if before is not None and ratio < before[1] * (1 - NOISE):
      texts.append(
        f'{phase}: {ratio:.2f}x over dense at {context_name(context)}, less '
        f'than {before[1]:.2f}x at {context_name(before[0])}'
      )
    before = (context, ratio)
  return texts


def _bounds(setting: Setting, case: Case, system: str) -> dict[str, float]:
  phase = 'prefill' if case.phase == 'prefill' else 'decode'
  return bounds(setting.config, phase, system, case.context, setting.chunk)


def _work(setting: Setting, case: Case) -> Work | None:
  """Least work of a row: of a whole prefill, or of a step."""
  c = setting.config
  if case.phase == 'prefill':
    return prefill_work(c, case.system, case.context, setting.chunk)
  if case.phase in ('decode', 'attention'):
    only = case.phase == 'attention'
    return decode_work(c, case.system, case.context, attention_only=only)
  return None


def _row(request: Request, setting: Setting, case: Case, found) -> Row:
  figures, work = found[case], _work(setting, case)
  seconds, device = figures['seconds'], request.devices[0]
  tokens = case.context if case.phase == 'prefill' else 1
  floor = None
  if work is not None:
    floor = max(work.bytes / device.bandwidth, work.flops / device.flops)
  timed = bool(seconds and work)
  peak = figures.get('program_bytes')
  details = dict(
    figures,
    context=case.context,
    tokens_s=tokens / seconds if seconds else None,
    flops=work and work.flops,
    bytes=work and work.bytes,
    gigabytes=work and work.bytes / 1e9,
    peak_gb=peak and peak / 1e9,
  )
  if case.phase in ('prefill', 'decode', 'attention'):
    details |= _ratios(setting, case, found)
  if case.phase == 'prefill':
    details |= {f'published_{k}': v.get(case.context)
                for k, v in PUBLISHED.items()}  # fmt: skip
  return Row(
    suite='context',
    case=case.name,
    system=case.system,
    device=device.name,
    dtype=setting.config.dtype,
    shape=_shape(setting, case),
    us=1e6 * seconds / tokens if seconds else None,
    tflops=work.flops / seconds / 1e12 if timed else None,
    gbps=work.bytes / seconds / 1e9 if timed else None,
    roofline_share=floor / seconds if timed and floor else None,
    ratio=seconds / floor if timed and floor else None,
    evidence='run',
    command=request.command,
    date=request.date,
    details=details,
  )


def _ratios(setting: Setting, case: Case, found) -> Found:
  """Ratios and bounds of `shared`'s rows; nothing for the others."""
  details = {}
  if case.system != 'shared':
    return details
  for system in ('per_layer', 'dense'):
    bound = _bounds(setting, case, system)
    details |= {
      f'over_{system}': over(found, case, system),
      f'bound_{system}': bound['attention'],
      f'bound_{system}_step': bound['step'],
    }
  return details


def _shape(setting: Setting, case: Case) -> str:
  if case.phase == 'prefill':
    return f'{case.context} tokens in chunks of {setting.chunk}'
  rows = setting.drafts + 1 if case.phase == 'drafting' else 1
  return f'{rows} rows of {case.context} tokens'
