r"""What IndexShare costs in quality: glm-nano's trunk in four ways.

    python launch/index_price.py --corpus=CORPUS --workdir=runs/index_price

One base with an indexer in every layer is trained densely (windows of 1,024,
then 8,192). Each form goes on from it for the same steps, with the same
tokens in the same order, by the same optimiser and schedule; in the first
half everything is attended to and the indexers learn from all keys, in the
second they select:

    dense       every row attends to everything
    per_layer   every layer has an indexer and a selection of its own
    share       glm-nano's pattern: the other indexers are dropped, the
                remaining ones learn the mean target of the layers they serve

Seeds change the order of the tokens. Written before the measurement
(results/index_price.json). Without the dense half sharing's indexers learn
their new target from what they selected alone (results/misses.md).
"""

import dataclasses
import pathlib
import runpy

from glm_jax.training.config import Stage, TrainConfig

_TRUNK = pathlib.Path(__file__).with_name('glm_nano.py')
_MODEL = runpy.run_path(str(_TRUNK))['get_config'](mtp_layers=0)
_COMMON = dict(
  warmup=20, schedule='wsd', weight_decay=0.05, eval_windows=16, log_every=10
)


def get_base() -> TrainConfig:
  """29 M tokens; an indexer in every layer."""
  every = ('full',) * _MODEL.num_layers
  return TrainConfig(
    model=dataclasses.replace(_MODEL, indexer_types=every),
    stages=(
      Stage(
        name='short',
        steps=700,
        window=1024,
        batch=32,
        sparse=False,
        chunk=1024,
      ),
      Stage(
        name='long',
        steps=200,
        window=8192,
        batch=4,
        sparse=False,
        kl_stride=32,
      ),
    ),
    learning_rate=3e-3,
    decay=0.2,
    final_scale=0.3,
    **_COMMON,
  )


def get_train_config() -> TrainConfig:
  """15.7 M tokens a form; the launcher sets indexers, selection and seed."""
  part = dict(steps=240, window=8192, batch=4)
  return TrainConfig(
    model=_MODEL,
    stages=(
      Stage(name='warm', sparse=False, kl_stride=8, **part),
      Stage(name='form', **part),
    ),
    learning_rate=1e-3,
    decay=0.7,
    **_COMMON,
  )
