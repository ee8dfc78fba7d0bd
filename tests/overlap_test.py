"""Overlap of selections, sharing at inference only, pictures."""

import functools
import itertools
import pathlib
import tempfile
from unittest import mock

import jax
import numpy as np
import pytest
import small_models
from absl.testing import absltest, parameterized

from glm_jax import forward
from glm_jax.config import FULL, SHARED
from glm_jax.evaluation import overlap, plots, share_index
from glm_jax.layer_plan import layer_plan
from glm_jax.model import abstract_model
from glm_jax.training.parameters import Layout

# Compilation is what these tests spend their time on.
quick = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)


def setUpModule():
  overlap._selected = quick(overlap._selected.__wrapped__)


def random_selections(rng, layers, T, k):
  """Ascending positions up to each query's own, then -1."""
  out = np.full((layers, T, k), -1)
  for f, t in itertools.product(range(layers), range(T)):
    n = min(k, t + 1)
    out[f, t, :n] = np.sort(rng.choice(t + 1, n, replace=False))
  return out


class OverlapTest(parameterized.TestCase):
  def test_equals_sets(self):
    """Two contexts of 70 tokens, top-k 8, against Python's sets."""
    config = small_models.small_config(2)  # FFSS: full layers 0 and 1
    rng = np.random.default_rng(0)
    given = [random_selections(rng, 2, 70, 8) for _ in range(2)]
    rows = _overlap(config, given, distances=(1, 5), tiles=(4,))
    sets = [[[set(s) - {-1} for s in layer] for layer in x] for x in given]
    mean = lambda values: np.mean(list(values))
    for row in rows:
      layer = [0, 1].index(row['layer'])
      queries = range(row['from'], row['to'] + 1)
      if row['kind'] == 'neighbours':
        d = row['distance']
        wanted = mean(
          len(x[layer][t] & x[layer][t + d]) / 8
          for x in sets
          for t in queries
          if t + d < 70
        )
      elif row['kind'] == 'tile':
        starts = [t for t in queries if t % 4 == 0 and t + 4 <= 70]
        wanted = mean(
          len(set().union(*x[layer][t : t + 4])) / 8
          for x in sets
          for t in starts
        )
      else:
        assert (row['layer'], row['other']) == (0, 1)
        wanted = mean(
          len(x[0][t] & x[1][t]) / len(x[0][t] | x[1][t])
          for x in sets
          for t in queries
        )
      np.testing.assert_allclose(row['value'], wanted, err_msg=str(row))
      # Drawn blindly, they are what chance gives.
      if row['to'] - row['from'] >= 30:
        assert abs(row['value'] / row['random'] - 1) < 0.25, row
    spans = {(r['from'], r['to']) for r in rows}
    assert spans == {(8, 15), (16, 31), (32, 63), (64, 69)}
    kinds = [r['kind'] for r in rows if r['from'] == 32]
    assert sorted(kinds) == ['layers'] + ['neighbours'] * 4 + ['tile'] * 2

  def test_selections_are_those_of_inference(self):
    model = make(small_models.small_config(2))
    tokens = np.random.default_rng(0).integers(0, 96, 70)
    found = overlap.selections(model, tokens)
    assert found.shape == (2, 70, 8)
    assert (found[:, 3] == [[0, 1, 2, 3, -1, -1, -1, -1]] * 2).all()
    rows = overlap.selection_overlap(
      model, np.stack([tokens]), distances=(1,), tiles=(8,)
    )
    both = [
      len(set(a) & set(b)) / 8 for a, b in zip(found[0, 8:15], found[0, 9:16])
    ]
    both.append(len(set(found[0, 15]) & set(found[0, 16])) / 8)
    first = next(r for r in rows if r['kind'] == 'neighbours')
    np.testing.assert_allclose(first['value'], np.mean(both))
    with pytest.raises(ValueError, match='selected whole'):
      overlap.selection_overlap(model, tokens[None, :8])


class ShareIndexTest(parameterized.TestCase):
  def test_layers_take_the_selection_below(self):
    """Equal to replaying the full layers' choices in all of their layers."""
    model = all_full()
    kinds = 'FFSSFS'
    shared = share_index(model, kinds)
    names = {'F': FULL, 'S': SHARED}
    assert shared.config.indexer_types == tuple(names[c] for c in kinds)
    tokens = np.random.default_rng(0).integers(0, 96, (1, 70))
    out = quick(lambda m: forward(m, tokens, capture=('selected',)))(shared)
    plan = layer_plan(shared.config)
    source = [plan.full_layers.index(plan.index_source(i)) for i in range(6)]
    chosen = out.captured['selected'][np.asarray(source)]
    replay = quick(lambda m, s: forward(m, tokens, replay=s).logits)
    np.testing.assert_allclose(out.logits, replay(model, chosen), atol=2e-5)
    # Which selection a layer gets does matter.
    assert np.abs(out.logits - replay(model, chosen[::-1])).max() > 1e-2

  def test_bad_patterns_are_refused(self):
    with pytest.raises(ValueError, match='5 entries'):
      share_index(all_full(), 'FFSSF')
    shared = abstract_model(small_models.small_config(1))  # FSSS
    with pytest.raises(ValueError, match='layers .2.'):
      share_index(shared, 'FSFS')


class PlotsTest(parameterized.TestCase):
  def test_every_picture(self):
    folder = pathlib.Path(tempfile.mkdtemp(prefix='plots_'))
    edges = [(0, 63), (64, 127), (128, 255)]
    buckets = [{'from': a, 'to': b} for a, b in edges]
    losses = [b | {'nats': 3.0, 'standard_error': 0.1} for b in buckets]
    found = [b | {'count': 10, 'share': 0.9} for b in buckets]
    price = {'nats': 2.0, 'difference': 0.01, 'upper_share': 0.02}
    lost = [b | price for b in buckets]
    rng = np.random.default_rng(0)
    rows = _overlap(
      small_models.small_config(2), [random_selections(rng, 2, 70, 8)]
    )
    accepted = {
      f'{key}{end}': value
      for key in ('accept_length', 'accept_length_with_bonus')
      for end, value in (('', 4.0), ('_stdev', None))
    }
    forms = [accepted | {'name': n, 'published': 5.0} for n in ('a', 'b')]
    calls = (
      ('positions', plots.plot_positions, ({'model': losses},)),
      ('needles', plots.plot_needles, ({'model': found, 'other': found},)),
      ('price', plots.plot_price, ({'share': lost},)),
      ('overlap', plots.plot_overlap, (rows,)),
      ('ablation', plots.plot_ablation, (forms,)),
    )
    for name, plot, arguments in calls:
      with mock.patch.object(plots, '_write') as write:
        plot(*arguments, 'unused')
      figure = write.call_args[0][0]
      for axes in figure.axes:
        assert axes.get_xlabel() and axes.get_ylabel(), name
        assert axes.get_legend().get_texts(), name
      plot(*arguments, folder / 'new' / f'{name}.png')
      content = (folder / 'new' / f'{name}.png').read_bytes()
      assert content[1:4] == b'PNG' and len(content) > 5000


def _overlap(config, given, **options):
  """`selection_overlap` of made-up selections."""
  model = mock.Mock(config=config)
  windows = np.zeros((len(given), given[0].shape[1]), int)
  with mock.patch.object(overlap, 'selections', side_effect=given):
    return overlap.selection_overlap(model, windows, **options)


@functools.cache
def all_full():
  """Six full layers; dropping some changes what is scanned."""
  config = small_models.small_config(
    5, indexer_types=(FULL,) * 6, mlp_types=('dense',) + ('sparse',) * 5
  )
  return make(config)


def make(config):
  layout = Layout(config)  # Its initialisation compiles faster.
  return layout.model(layout.init(0), 'float32')


if __name__ == '__main__':
  absltest.main()
