"""Compared records as one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Sequence

import jinja2
import numpy as np
from etils import epath
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from glm_jax.validation.report import Case

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>glm-jax validation</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { border: 1px solid #c8ced6; padding: .25rem .6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; white-space: nowrap; }
img { max-width: 100%; } .bad { color: #b00020; font-weight: 600; }
.note { color: #56606e; font-size: .85rem; }
</style></head><body>
<h1>glm-jax validation</h1>
<p>Recorded runs, each beside the first of its case. Errors are
‖run − reference‖ / ‖reference‖ over all rows; KL is from the reference's
next-token distribution, every run given the same tokens. A selection agrees
if the keys that differ tie with the last one chosen, within the tolerance;
the run then goes on with the reference's. In bfloat16 every layer is given
the reference's input.</p>
{% for case, pictures in cases %}
<h2>{{ case.name }}: {{ case.meta.dtype }}, {{ case.meta.tokens | length }}
tokens</h2>
<table><tr><th>run</th><th>verdict</th><th>largest logit error</th>
<th>mean KL (nats)</th><th>largest KL</th><th>same likeliest token</th>
<th>first other token at</th><th>selections that agree</th>
<th>draft steps, largest KL</th></tr>
{% for run in case.runs %}{% set r = run.result %}
<tr><td>{{ run.name }}</td>
<td {% if not r.passed %}class="bad"{% endif %}>
{{ r.verdict }}</td>
<td>{{ r.max_abs_logit_error | number }}</td>
<td>{{ (run.kl.mean() if run.kl is not none else none) | number }}</td>
<td>{{ (run.kl.max() if run.kl is not none else none) | number }}</td>
<td>{{ r.argmax_agreement | share }}</td>
<td>{{ 'none' if run.other_token is none else run.other_token }}</td>
<td>{{ r.selected_set_agreement | share }} ({{ r.selected_ties }} ties)</td>
<td>{{ (run.draft_kl.max() if run.draft_kl is not none else none) | number }}
</td></tr>{% endfor %}</table>
{% for title, image in pictures %}
<h3>{{ title }}</h3>
<img alt="{{ title }}" src="data:image/png;base64,{{ image }}">
{% endfor %}
<h3>How each was run</h3><ul>
{% for run in [case] + case.runs | list %}
<li>{{ run.name }}{{ ' (reference)' if loop.first }}: {{ run.meta.framework }}
({% for k, v in run.meta.versions.items() %}{{ k }} {{ v
}}{{ ', ' if not loop.last }}{% endfor %})
<div class="note">{{ run.meta.notes | join('; ') }}</div></li>
{% endfor %}</ul>
{% endfor %}</body></html>
"""


def write_page(cases: Sequence[Case], path: epath.PathLike) -> epath.Path:
  """Writes the page.

  Args:
    cases: from `compare_records`.
    path: of the HTML file; parent folders are made.

  Returns:
    The path.
  """
  env = jinja2.Environment(autoescape=True, trim_blocks=True)
  env.filters['number'] = lambda x: '–' if x is None else f'{x:.1e}'
  env.filters['share'] = lambda x: '–' if x is None else f'{x:.4%}'
  html = env.from_string(_PAGE).render(
    cases=[(case, pictures(case)) for case in cases]
  )
  path = epath.Path(path).expanduser()
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(html)
  return path


def pictures(case: Case) -> list[tuple[str, str]]:
  """(title, PNG in base64) of a case."""
  out = [
    ('Error growth over the layers', _picture(case, _growth)),
    ('Agreement of the selected keys', _picture(case, _selections)),
  ]
  if any(run.kl is not None for run in case.runs):
    out.append(('Next-token distributions', _picture(case, _next_tokens)))
  if any(run.draft_kl is not None for run in case.runs):
    out.append(
      ('Draft steps, index and rows shared or not', _picture(case, _drafts))
    )
  return out


def _picture(case: Case, draw: Callable) -> str:
  figure = Figure(figsize=(10.5, 3.4), layout='constrained')
  axes = figure.subplots()
  draw(axes, case.runs)
  axes.legend(fontsize='small', loc='center left', bbox_to_anchor=(1, 0.5))
  axes.grid(alpha=0.3)
  axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  stream = io.BytesIO()
  figure.savefig(stream, format='png', dpi=110)
  return base64.b64encode(stream.getvalue()).decode()


def _growth(axes, runs):
  for color, run in zip(_colors(), runs):
    at = [e.layer for e in run.layers]
    for tensor, style in (('hidden', '-'), ('attention', ':')):
      # An error of exactly 0 has no place on a logarithmic axis.
      values = [getattr(e, tensor) or np.nan for e in run.layers]
      label = f'{run.name}: {tensor}'
      axes.plot(at, values, f'o{style}', c=color, ms=3, label=label)
  axes.set_yscale('log')
  axes.set_xlabel('layer')
  axes.set_ylabel('relative error')


def _colors():
  return itertools.cycle(f'C{i}' for i in range(10))


def _selections(axes, runs):
  top = 1e-4  # of a picture without any difference
  for run in runs:
    full = [e for e in run.layers if e.same_keys is not None]
    lost = [1 - e.same_keys for e in full]
    axes.plot([e.layer for e in full], lost, 'o-', ms=4, label=run.name)
    top = max([top, *lost])
  axes.set_xlabel('layer with an indexer')
  axes.set_ylabel('selected keys that differ (share)')
  axes.set_xlim(-0.5, max(e.layer for r in runs for e in r.layers) + 0.5)
  axes.set_ylim(-0.05 * top, 1.1 * top)


def _next_tokens(axes, runs):
  for run in runs:
    if run.kl is not None:
      axes.plot(np.maximum(run.kl, 1e-18), lw=0.8, label=run.name)
  axes.set_yscale('log')
  axes.set_xlabel('position (tokens)')
  axes.set_ylabel('KL from the reference (nats)')


def _drafts(axes, runs):
  kinds = (('shared', '-'), ('not shared', ':'))  # index and rows
  for color, run in zip(_colors(), runs):
    if run.draft_kl is not None:
      for kl, (kind, style) in zip(run.draft_kl, kinds):
        steps, label = range(1, len(kl) + 1), f'{run.name}: {kind}'
        kl = np.maximum(kl, 1e-18)
        axes.plot(steps, kl, f'o{style}', c=color, ms=4, label=label)
  axes.set_yscale('log')
  axes.set_xlabel('draft step')
  axes.set_ylabel('KL from the reference (nats)')
