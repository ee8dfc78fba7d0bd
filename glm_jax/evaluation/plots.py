"""Pictures of what the evaluation measured (extra `notebook`).

Each function takes rows as the JSON files hold them, writes a PNG, and shows
two standard errors wherever it has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

Rows = Sequence[Mapping[str, Any]]


def plot_positions(
  losses: Mapping[str, Rows], path: epath.PathLike, *, topk: int | None = None
):
  """Loss by position of some models.

  Args:
    losses: name to `PositionLosses.rows()`.
    path: of the picture.
    topk: is marked: up to there every key is selected.
  """
  figure, axes = _figure()
  for name, rows in losses.items():
    axes.errorbar(
      [_middle(row) for row in rows],
      [row['nats'] for row in rows],
      yerr=[2 * (row['standard_error'] or 0) for row in rows],
      marker='o',
      markersize=4,
      capsize=3,
      label=f'{name} (±2 s.e.)',
    )
  if topk is not None:
    axes.axvline(topk, color='grey', linestyle=':', label=f'top-k {topk}')
  _powers(axes, 'position in the window (tokens)')
  axes.set_ylabel('loss (nats per token)')
  _save(figure, axes, path)


def plot_price(
  differences: Mapping[str, Rows],
  path: epath.PathLike,
  *,
  topk: int | None = None,
  goal: float | None = None,
):
  """What each form loses against a model with an indexer in every layer.

  Args:
    differences: form to rows of `paired_difference`.
    path: of the picture.
    topk: is marked: up to there every key is selected.
    goal: share of the loss that may be lost, drawn as a line.
  """
  figure, axes = _figure()
  for name, rows in differences.items():
    share = [100 * row['difference'] / row['nats'] for row in rows]
    upper = [100 * row['upper_share'] for row in rows]
    axes.errorbar(
      [_middle(row) for row in rows],
      share,
      yerr=[high - mean for high, mean in zip(upper, share)],
      marker='o',
      markersize=4,
      capsize=3,
      label=f'{name} (±2 s.e.)',
    )
  axes.axhline(0, color='black', linewidth=1, label='an indexer in every layer')
  if goal is not None:
    axes.axhline(
      100 * goal, color='grey', linestyle='--', label=f'goal, {goal:.1%}'
    )
  if topk is not None:
    axes.axvline(topk, color='grey', linestyle=':', label=f'top-k {topk}')
  _powers(axes, 'position in the window (tokens)')
  axes.set_ylabel('loss lost (% of the loss there)')
  _save(figure, axes, path)


def plot_needles(
  found: Mapping[str, Rows], path: epath.PathLike, *, topk: int | None = None
):
  """Share of needles found by distance.

  Args:
    found: name to 'by_distance' of `score_needles`.
    path: of the picture.
    topk: is marked.
  """
  figure, axes = _figure()
  for name, rows in found.items():
    share = [row['share'] for row in rows]
    # Of a proportion; zero at 0 and 1, where the count says more.
    errors = [
      2 * (p * (1 - p) / row['count']) ** 0.5 for p, row in zip(share, rows)
    ]
    count = sum(row['count'] for row in rows)
    axes.errorbar(
      [_middle(row) for row in rows],
      share,
      yerr=errors,
      marker='o',
      markersize=4,
      capsize=3,
      label=f'{name}: {count} needles (±2 s.e.)',
    )
  if topk is not None:
    axes.axvline(topk, color='grey', linestyle=':', label=f'top-k {topk}')
  _powers(axes, 'distance from needle to question (tokens)')
  axes.set_ylabel('needles found')
  axes.set_ylim(-0.03, 1.03)
  axes.yaxis.set_major_formatter(PercentFormatter(1))
  _save(figure, axes, path)


def plot_overlap(rows: Rows, path: epath.PathLike):
  """Overlap of selections, at the farthest positions that were measured.

  Args:
    rows: from `selection_overlap`.
    path: of the picture.
  """
  # The last bucket that has all kinds: one too short may hold no tile.
  kinds = {row['kind'] for row in rows}
  at = lambda low: [row for row in rows if row['from'] == low]
  whole = lambda low: {row['kind'] for row in at(low)} == kinds
  last = max(filter(whole, {row['from'] for row in rows}))
  rows = at(last)
  to = max(row['to'] for row in rows)
  figure = Figure(figsize=(13, 4.2), layout='constrained')
  figure.suptitle(f'Selections of queries at positions {last:,} to {to:,}')
  near, tile, layer = figure.subplots(1, 3)
  _by_layer(near, rows, 'neighbours', 'distance')
  _powers(near, 'distance between two queries (tokens)')
  near.set_ylabel('selected by both (share of k)')
  near.set_ylim(0, 1.03)
  near.legend(fontsize='small')
  _by_layer(tile, rows, 'tile', 'queries')
  _powers(tile, 'consecutive queries in a tile')
  tile.set_ylabel('keys in the union (units of k)')
  tile.set_ylim(0)
  tile.legend(fontsize='small')
  pairs = [row for row in rows if row['kind'] == 'layers']
  names = [f'{row["layer"]}, {row["other"]}' for row in pairs]
  layer.bar(names, [row['value'] for row in pairs], label='measured')
  if pairs:
    blind = pairs[0]['random']
    layer.axhline(blind, color='grey', linestyle=':', label='by chance')
  layer.set_xlabel('two layers with indexers')
  layer.set_ylabel('Jaccard index of their selections')
  layer.legend(fontsize='small')
  _write(figure, path)


def plot_ablation(rows: Rows, path: epath.PathLike):
  """Accept lengths of the drafter's forms, beside the published ones.

  Args:
    rows: from `draft_ablation.summarise`.
    path: of the picture.
  """
  figure, axes = _figure()
  places = range(len(rows))
  for offset, key, name in (
    (-0.2, 'accept_length', 'without the bonus token'),
    (0.2, 'accept_length_with_bonus', 'with the bonus token'),
  ):
    axes.bar(
      [i + offset for i in places],
      [row[key] for row in rows],
      0.36,
      yerr=[row[f'{key}_stdev'] or 0 for row in rows],
      capsize=3,
      label=f'measured, {name} (±1 st. dev. over seeds)',
    )
  axes.plot(
    places,
    [row['published'] for row in rows],
    'kD',
    label='published (GLM-5.2)',
  )
  axes.set_xticks(places, [row['name'] for row in rows], fontsize='small')
  axes.set_xlabel('what the drafter has')
  axes.set_ylabel('accept length (tokens a round)')
  axes.margins(y=0.35)  # room for the legend above the published points
  axes.set_ylim(bottom=0)
  _save(figure, axes, path)


def _figure():
  figure = Figure(figsize=(7, 4.2), layout='constrained')
  return figure, figure.subplots()


def _middle(row) -> float:
  """Where a bucket stands on a logarithmic axis."""
  return (max(row['from'], 1) * (row['to'] + 1)) ** 0.5


def _powers(axes, label: str):
  axes.set_xscale('log', base=2)
  axes.xaxis.set_major_formatter('{x:,.0f}')
  axes.set_xlabel(label)


def _by_layer(axes, rows, kind, number):
  """A line a layer, and one of what chance would give."""
  rows = [row for row in rows if row['kind'] == kind]
  for layer in sorted({row['layer'] for row in rows}):
    own = [row for row in rows if row['layer'] == layer]
    at = [row[number] for row in own]
    axes.plot(
      at,
      [row['value'] for row in own],
      'o-',
      markersize=4,
      label=f'layer {layer}',
    )
  if rows:
    blind = [row['random'] for row in own]
    axes.plot(at, blind, ':', color='grey', label='by chance')


def _save(figure, axes, path):
  axes.legend(fontsize='small')
  axes.grid(alpha=0.3)
  _write(figure, path)


def _write(figure, path):
  path = epath.Path(path).expanduser()
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('wb') as stream:
    figure.savefig(stream, format='png', dpi=150)
