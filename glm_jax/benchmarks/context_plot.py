"""The picture of suite `context` (extra `notebook`)."""

from __future__ import annotations

from typing import Any

from etils import epath

from glm_jax.benchmarks.context_report import PUBLISHED
from glm_jax.benchmarks.report import Report, Row

_COLOURS = {'shared': 'C0', 'per_layer': 'C1', 'dense': 'C2'}
_NAMES = {
  'shared': 'IndexShare',
  'per_layer': 'an indexer in every layer',
  'dense': 'dense attention',
}


def plot(report: Report, path: epath.PathLike) -> None:
  """Prefill, decoding, ratios with their bounds, and the published curve.

  Args:
    report: of the suite, whole or in part.
    path: of a PNG.
  """
  from matplotlib.figure import Figure

  figure = Figure(figsize=(12, 10), layout='constrained')
  (prefill, decode), (ratio, published) = figure.subplots(2, 2)
  _systems(prefill, report, 'prefill', lambda row: row.details['tokens_s'])
  prefill.set_ylabel('prefill from empty (tokens/s)')
  _systems(decode, report, 'decode', lambda row: row.us / 1e3)
  _systems(
    decode, report, 'attention', lambda row: row.us / 1e3,
    line='--', suffix=', attention side',
  )  # fmt: skip
  decode.set_ylabel('decoding, one sequence (ms per token)')
  _ratios(ratio, report)
  ratio.set_ylabel('time over that of IndexShare (ratio)')
  _published(published, report)
  published.set_ylabel('throughput (1 = per-layer indexers at 32K)')
  for axes in figure.axes:
    axes.set_xscale('log', base=2)
    axes.set_yscale('log')
    axes.xaxis.set_major_formatter('{x:,.0f}')
    axes.set_xlabel('context (tokens)')
    axes.tick_params(axis='x', labelrotation=30)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
      axes.legend(
        fontsize='x-small', loc='upper center', bbox_to_anchor=(0.5, -0.3),
        ncols=2,
      )  # fmt: skip
  devices = ', '.join(dict.fromkeys(row.device for row in report.rows))
  figure.suptitle(f'Eight layers of the model and the drafter on {devices}')
  path = epath.Path(path).expanduser()
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('wb') as stream:
    figure.savefig(stream, format='png', dpi=150)


def _rows(report: Report, phase: str, system: str) -> list[tuple[int, Row]]:
  """(context, row) of what was timed, ascending."""
  found = []
  for row in report.rows:
    if row.system == system and row.case.startswith(f'{phase}_') and row.us:
      found.append((row.details['context'], row))
  return sorted(found, key=lambda pair: pair[0])


def _systems(axes, report, phase, value, *, line='-', suffix='') -> None:
  for system, colour in _COLOURS.items():
    rows = _rows(report, phase, system)
    if rows:
      axes.plot(
        [context for context, _ in rows],
        [value(row) for _, row in rows],
        color=colour, linestyle=line, marker='o', markersize=4,
        label=_NAMES[system] + suffix,
      )  # fmt: skip


def _ratios(axes, report) -> None:
  """Measured ratios, and dotted what arithmetic allows."""
  for phase, marker in (('prefill', 'o'), ('attention', 's'), ('decode', '^')):
    rows = _rows(report, phase, 'shared')
    for system in ('per_layer', 'dense'):
      if phase == 'decode' and system == 'per_layer':
        continue  # its attention side is what the goal is about
      name = f'{_NAMES[system]}, {phase}'
      style: dict[str, Any] = dict(
        color=_COLOURS[system], marker=marker, markersize=4
      )
      timed = [
        (context, row.details[f'over_{system}'])
        for context, row in rows
        if row.details.get(f'over_{system}')
      ]
      if timed:
        axes.plot(*zip(*timed), label=name, **style)
        bound = [
          (context, row.details[f'bound_{system}'])
          for context, row in rows
          if phase != 'decode'
        ]
        if bound:
          axes.plot(
            *zip(*bound), linestyle=':', label=f'{name}: bound', **style
          )


def _published(axes, report) -> None:
  """Published curves in black, ours in the same unit."""
  base = None
  for context, row in _rows(report, 'prefill', 'per_layer'):
    if context == 32_768:
      base = row.details['tokens_s']
  for (name, curve), line in zip(PUBLISHED.items(), ('--', '-')):
    axes.plot(
      list(curve), list(curve.values()), color='black', linestyle=line,
      marker='D', markersize=4, label=f'{name}, published (metric not stated)',
    )  # fmt: skip
  if base:
    per_base = lambda row: row.details['tokens_s'] / base
    _systems(axes, report, 'prefill', per_base, suffix=', prefill here')
