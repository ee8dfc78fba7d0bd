"""What serving selected, replayed in the trainer (known fault 52)."""

import functools

import jax
import numpy as np
import pytest
import small_models
from absl.testing import absltest, parameterized

from glm_jax.cache import init_cache
from glm_jax.evaluation import selection_agreement
from glm_jax.evaluation.scoring import judge_rows, whole_windows
from glm_jax.model import forward
from glm_jax.training.forward import ForwardOptions, trunk
from glm_jax.training.parameters import Layout

# Compilation is what these tests spend their time on.
quick = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)
# Two sequences; prefill in two chunks, then decoding.
TOKENS, CHUNKS, DECODED = 128, (64, 56), 8


@functools.cache
def layout():
  """A full layer, then two scanned groups; top-k 8, 32 index heads."""
  config = small_models.small_config(3)
  assert config.indexer.num_heads == 32 and config.indexer.topk == 8
  return Layout(config)


@functools.cache
def model(dtype='float32'):
  return layout().model(layout().init(0), dtype)


@functools.cache
def tokens():
  return np.random.default_rng(0).integers(0, 96, (2, TOKENS))


@functools.cache
def served():
  """Log-probabilities [B, T] of next tokens, and selections [F, B, T, k]."""
  step = quick(
    lambda m, ids, cache, start: forward(
      m, ids, cache, start=start, capture=('selected',)
    )
  )
  cache = init_cache(layout().config, 2 * TOKENS // 64, dtype='f32')
  logits, chosen, done = [], [], 0
  for size in (*CHUNKS, *[1] * DECODED):
    ids = tokens()[:, done : done + size]
    out = step(model(), ids, cache, np.full(2, done))
    cache, done = out.cache, done + size
    logits.append(out.logits)
    chosen.append(out.captured['selected'])
  assert done == TOKENS
  logits = np.concatenate(logits, axis=1)[:, :-1]
  logp = np.asarray(jax.nn.log_softmax(logits))
  logp = np.take_along_axis(logp, tokens()[:, 1:, None], axis=-1)[..., 0]
  return logp, np.concatenate(chosen, axis=2)


def trained(replay, attention='gather', dtype='float32'):
  """The same of the trainer's forward pass."""
  windows = whole_windows(tokens())
  options = ForwardOptions(
    attention=attention, kl_stride=0, chunk=64, keep_selection=True
  )
  hidden, aux = _trunk(options)(model(dtype), windows, replay)
  targets = np.roll(tokens(), -1, axis=1).reshape(-1)
  _, nats = judge_rows(model(dtype), hidden, targets)
  return -np.asarray(nats).reshape(2, TOKENS)[:, :-1], aux['selected']


@functools.cache
def _trunk(options):
  return quick(lambda m, w, r: trunk(m, w, options, replay=r))


class ReplayTest(parameterized.TestCase):
  @parameterized.parameters('gather', 'masked')
  def test_replayed_selections_give_the_same_log_probabilities(self, attention):
    logp, chosen = served()
    ours, kept = trained(chosen, attention)
    assert np.abs(ours - logp).max() <= 1e-5
    assert selection_agreement(kept, chosen) == 1
    # A trainer that chose for itself, differently, would be noticed.
    worse = np.array(chosen)
    worse[:, :, 8:, 0] = worse[:, :, 8:, 1]
    other, _ = trained(worse, attention)
    assert np.abs(other - logp).max() > 1e-3

  def test_without_replay_the_overlap_is_reported(self):
    _, chosen = served()
    _, own = trained(None)
    agreement = selection_agreement(own, chosen)
    # In one precision only near ties may fall otherwise.
    assert agreement > 0.999, agreement
    _, rounded = trained(None, dtype='bfloat16')
    lower = selection_agreement(rounded, chosen)
    print(f'overlap of selections: float32 {agreement}, bfloat16 {lower}')
    assert 0.8 < lower < 1

  def test_dense_passes_have_nothing_to_replay(self):
    options = ForwardOptions(sparse=False, keep_selection=True)
    with pytest.raises(ValueError, match='selects nothing'):
      trunk(model(), whole_windows(tokens()), options)

  def test_agreement_is_a_share_of_sets(self):
    a = np.array([[3, 1, -1], [0, 1, 2], [-1, -1, -1]])
    b = np.array([[1, 3, -1], [5, 2, -1], [-1, -1, -1]])
    # All of two; one of three; a query without keys does not count.
    np.testing.assert_allclose(selection_agreement(a, b), (1 + 1 / 3) / 2)
    with pytest.raises(ValueError, match='differ'):
      selection_agreement(a, b[:2])


if __name__ == '__main__':
  absltest.main()
