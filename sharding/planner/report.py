"""The planner's answer as a table and as a picture."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from sharding.planner.plan import EVIDENCE, PodPlan

_GB = 1e9
_PARTS = (
  'weights',
  'optimiser',
  'cache',
  'state',
  'padding',
  'outputs',
  'temporaries',
  'program',
)


def table(plan: PodPlan) -> str:
  """Lines for a terminal: per chip and per device, then time and transfers."""
  r, m, chip = plan.request, plan.measured, plan.chip
  device, per_chip = m['device_bytes'], chip.devices_per_chip
  verdict = 'fits' if plan.fits else 'does not fit'
  head = (
    f'{r.step} on {r.topology}: {verdict} ({EVIDENCE})\n'
    f'mesh {r.mesh}, {r.cache_plan}, batch {r.batch}, context '
    f'{r.context:,}, rows {r.rows:,}'
  )
  lines = [head, '', f'{"GB":<28}{"a chip":>12}{"a device":>12}']
  row = lambda name, n: lines.append(
    f'{name:<28}{n * per_chip / _GB:>12.3f}{n / _GB:>12.3f}'
  )
  for part in _PARTS:
    if device.get(part):
      row(part, device[part])
  row('total', device['total'])
  row('limit', chip.limit_bytes / per_chip)
  row('head-room', chip.limit_bytes / per_chip - device['total'])
  if m['slot_bytes']:
    row('of temporaries, slots', m['slot_bytes'])
  lines += ['', *_work(plan), '', *_transfers(plan)]
  return '\n'.join(lines)


def _work(plan: PodPlan) -> list[str]:
  r, m, per_chip = plan.request, plan.measured, plan.chip.devices_per_chip
  out = [
    f'FLOPs a token at the end   {plan.flops_per_token() / _GB:,.1f} G '
    f'({plan.flops_per_token("no_core") / _GB:,.1f} G without the attention '
    'core)',
    f'FLOPs of the step          model {plan.model_flops.total / _GB:,.1f} G, '
    f'executed {m["flops"] * per_chip / _GB:,.2f} G a chip',
    f'HBM traffic                {m["bytes"] * per_chip / _GB:,.3f} GB a chip',
    f'roofline of the step       {_time(plan.roofline_seconds)} (compute '
    f'{_time(m["compute_seconds"])}, HBM {_time(m["memory_seconds"])})',
    f'prefill of {r.batch} x {r.context:,}    at least '
    f'{_time(plan.prefill_seconds_lower_bound)}',
  ]
  for name, trips in m['loops_assumed'].items():
    out.append(f'assumed: {trips:g} trips of {name}')
  for name in m['loops_unknown']:
    out.append(f'length unknown, counted once: {name}')
  for name in m['kernels_without_cost']:
    out.append(f'declares no cost, not counted: {name}')
  return out


def _transfers(plan: PodPlan) -> list[str]:
  lines = [
    f'{"collectives of the step":<28}{"count":>12}{"MB":>12}{"exposed":>12}'
  ]
  for c in plan.measured['collectives']:
    form = 'asynchronous' if c['asynchronous'] else 'blocking'
    lines.append(
      f'{c["kind"] + ", " + form:<34}{c["count"]:>6.0f}'
      f'{c["bytes"] / 1e6:>12.3f}{_time(c["exposed_seconds"]):>12}'
    )
  lines.append(
    f'blocking collectives a layer: {plan.blocking_collectives_per_layer:.1f}'
  )
  if plan.measured['movement']:
    lines.append(f'the chunk {plan.measured["movement"]}')
  hidden, exposed = plan.count_fetches(True), plan.count_fetches(False)
  lines.append(f'fetches of cached rows: {hidden} hidden, {exposed} exposed')
  chunk = plan.smallest_hiding_chunk
  if chunk is not None:
    lines.append(f'smallest chunk that hides all but the first: {chunk:,} rows')
  return lines


def _time(seconds: float) -> str:
  """Seconds in the unit that suits them."""
  for unit, scale in (('s', 1.0), ('ms', 1e-3), ('us', 1e-6)):
    if seconds >= scale:
      return f'{seconds / scale:.3g} {unit}'
  return f'{seconds * 1e9:.3g} ns'


def markdown(plans: Sequence[tuple[str, PodPlan | str]]) -> str:
  """A table of several plans, a line each."""
  lines = [
    '| plan | slice | fits | HBM GB a chip (limit) | weights | cache | '
    'temporaries | GFLOPs a chip | roofline | fetches hidden / exposed |',
    '|---|---|---|---|---|---|---|---|---|---|',
  ]
  for name, plan in plans:
    if isinstance(plan, str):
      lines.append(f'| {name} | {plan} | | | | | | | | |')
      continue
    n = plan.chip.devices_per_chip
    gb = functools.partial(_chip_gb, plan)
    lines.append(
      f'| {name} | {plan.request.topology} | {"yes" if plan.fits else "no"} | '
      f'{gb("total")} ({plan.chip.limit_bytes / _GB:.1f}) | {gb("weights")} | '
      f'{gb("cache")} | {gb("temporaries")} | '
      f'{plan.measured["flops"] * n / _GB:,.2f} | '
      f'{_time(plan.roofline_seconds)} | '
      f'{plan.count_fetches(True)} / {plan.count_fetches(False)} |'
    )
  return '\n'.join(lines)


def _chip_gb(plan: PodPlan, part: str) -> str:
  per_chip = plan.chip.devices_per_chip
  return f'{plan.measured["device_bytes"].get(part, 0) * per_chip / _GB:.2f}'


def plot(plans: Sequence[tuple[str, PodPlan | str]], path: str) -> None:
  """Draws what fills a chip's memory under each plan.

  Args:
    plans: names and plans; messages are left out.
    path: of the picture; matplotlib knows its format by the ending.

  Raises:
    ImportError: matplotlib is not installed (extra 'notebook').
  """
  from matplotlib.figure import Figure

  shown = [(name, p) for name, p in plans if not isinstance(p, str)]
  figure = Figure(figsize=(8, 1.2 + 0.5 * len(shown)), layout='constrained')
  axes = figure.subplots()
  names = [f'{name}\n{plan.request.topology}' for name, plan in shown]
  left = [0.0] * len(shown)
  for part in _PARTS:
    sizes = [
      max(p.measured['device_bytes'].get(part, 0), 0)
      * p.chip.devices_per_chip
      / _GB
      for _, p in shown
    ]
    axes.barh(names, sizes, left=left, label=part)
    left = [a + b for a, b in zip(left, sizes)]
  for i, (_, plan) in enumerate(shown):
    limit = plan.chip.limit_bytes / _GB
    axes.plot([limit, limit], [i - 0.45, i + 0.45], 'k--', linewidth=1)
  axes.set_xlabel(f'GB of a chip, its limit dashed ({EVIDENCE})')
  axes.invert_yaxis()
  axes.legend(fontsize='small', ncols=4, loc='upper center',
              bbox_to_anchor=(0.5, -0.25))  # fmt: skip
  figure.savefig(path)
