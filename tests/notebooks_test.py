"""Every notebook runs from top to bottom, and its figures are labelled."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))

# Runs in a process of its own: cells share names, and figures are global.
_RUN = """
import json, sys
import matplotlib
matplotlib.use('Agg')
from matplotlib import pyplot as plt

names, figures = {'__name__': '__main__'}, 0
for cell in json.load(open(sys.argv[1]))['cells']:
  if cell['cell_type'] != 'code':
    continue
  source = ''.join(cell['source']).replace('%pip', 'raise  #')
  exec(compile(source, cell['id'], 'exec'), names)
  for number in plt.get_fignums():
    figures += 1
    axes = plt.figure(number).axes
    words = [t.get_text() for a in axes for t in (a.xaxis.label, a.yaxis.label)]
    titles = [a.get_title() for a in axes] + [plt.figure(number).get_suptitle()]
    assert sum(map(bool, words)) >= 2, (cell['id'], words)
    assert any('(' in w or ' ' in w for w in words), (cell['id'], words)
    assert any(titles), cell['id']
    lines = [a for a in axes if len(a.lines) > 1 or len(a.containers) > 1]
    for a in lines[:1]:
      assert a.get_legend(), (cell['id'], 'no legend')
    plt.close(number)
print('figures', figures)
"""


def test_there_are_notebooks():
  assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_first_code_cell_installs_what_is_missing(path):
  cells = json.loads(path.read_text())['cells']
  first = next(c for c in cells if c['cell_type'] == 'code')
  assert '%pip install' in ''.join(first['source'])


@pytest.mark.long
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs_and_its_figures_are_labelled(path):
  done = subprocess.run(
    [sys.executable, '-c', _RUN, str(path)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)},
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert int(done.stdout.split()[-1]) >= 2
