"""The dense pass: the indexer's loss covers all keys that a row may see."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from absl.testing import absltest, parameterized

from glm_jax import losses
from glm_jax.training.draft_forward import DraftForm, draft_windows
from glm_jax.training.forward import (
  ForwardOptions,
  make_pass,
  run_attention,
  trunk,
)
from glm_jax.training.index_losses import index_loss
from glm_jax.training.parameters import Layout
from glm_jax.training.windows import Windows, visible

quick = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)


@functools.cache
def model():
  layout = Layout(small_models.small_config(3))
  return layout.model(layout.init(0), 'float32')


def packed():
  """Two windows of 128: of one document, and of three with padding behind."""
  rng = np.random.default_rng(0)
  S, ahead = 128, 8
  segments = np.ones((2, S + ahead), np.int32)
  positions = np.broadcast_to(np.arange(S + ahead), segments.shape).copy()
  for start, end, segment in ((0, 40, 1), (40, 41, 2), (41, 110, 3)):
    segments[1, start:end] = segment
    positions[1, start:end] = np.arange(end - start)
  segments[1, 110:] = 0
  tokens = rng.integers(0, 96, segments.shape, np.int32)
  return Windows(tokens, segments, positions)


class WarmUpTest(parameterized.TestCase):
  @parameterized.parameters(0, 1)
  def test_loss_is_kl_over_every_visible_key_of_the_own_segment(self, first):
    stride, offset = 4, 3
    options = ForwardOptions(sparse=False, kl_stride=stride)
    step = make_pass(model(), packed(), options, offset)
    step = step._replace(keys=step.keys._replace(first=first))
    block = model().prologue[0]
    x = np.random.default_rng(1).standard_normal(
      (256, model().config.hidden_size), np.float32
    )
    _, attended = run_attention(block, jnp.asarray(x), None, step)
    got = index_loss(attended.index, None, block, [attended.target], step)

    some = slice(offset, None, stride)
    mask = visible(step.keys.queries, step.keys)[:, some]
    q, w, keys = attended.index
    absorbed, rows = attended.target
    scale = block.attention.config.scale
    shares, scores = [], []
    for b in range(2):
      shares.append(
        losses.attention_target_dense(
          absorbed[b], rows[b], mask[b], scale=scale
        )
      )
      dots = jnp.einsum('tih,sh->tis', q[b, some], keys[b])
      scores.append(jnp.sum(jax.nn.relu(dots) * w[b, some][..., None], axis=1))
    want = losses.indexer_kl(*map(jnp.concatenate, (shares, scores, mask)))
    self.assertGreater(float(want), 0.01)
    np.testing.assert_allclose(got, want, rtol=1e-5)

  def test_a_dense_drafter_leaves_the_trunk_sparse(self):
    windows = packed()
    sparse = ForwardOptions(kl_stride=4, attention='masked')
    hidden, _ = quick(functools.partial(trunk, options=sparse))(
      model(), windows
    )
    form = DraftForm(steps=2)
    draft = lambda options, form: quick(
      lambda hidden: draft_windows(model(), windows, hidden, options, form)
    )(hidden)
    got = draft(sparse, dataclasses.replace(form, sparse=False))
    dense = draft(dataclasses.replace(sparse, sparse=False), form)
    chosen = draft(sparse, form)
    np.testing.assert_array_equal(got.hidden, dense.hidden)
    np.testing.assert_array_equal(got.aux['kl'], dense.aux['kl'])
    with pytest.raises(AssertionError):
      np.testing.assert_allclose(got.hidden, chosen.hidden, rtol=1e-2)


if __name__ == '__main__':
  absltest.main()
