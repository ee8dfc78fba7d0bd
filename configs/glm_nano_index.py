r"""glm-nano's indexers, taught once more by dense attention; trunk frozen.

    python launch/train.py --config=configs/glm_nano_index.py --corpus=CORPUS \
      --init_from=runs/glm_nano_long/trunk --workdir=runs/glm_nano_index \
      --max_seconds=560 --export=runs/glm_nano_index/trunk

The stage with IndexShare teaches the indexers about keys that they selected
already, and what lies far fades: dense attention finds 194 of 200 needles
then, the selection 156. This is the published warm-up (trunk frozen, dense
attention, loss over all keys) run a second time. With 240 steps of 16 windows
at half the rate and half the rows it came to 171, its loss still falling; four
times the steps, of a quarter of the tokens: 185.
"""

import pathlib
import runpy

from glm_jax.training.config import Stage, TrainConfig

_TRUNK = pathlib.Path(__file__).with_name('glm_nano.py')


def get_train_config() -> TrainConfig:
  """31 M tokens; every 4th row teaches."""
  return TrainConfig(
    model=runpy.run_path(str(_TRUNK))['get_config'](mtp_layers=0),
    stages=(
      Stage(
        name='index',
        steps=960,
        window=8192,
        batch=4,
        train=('indexer',),
        sparse=False,
        kl_stride=4,
      ),
    ),
    learning_rate=2e-3,
    warmup=20,
    schedule='wsd',
    decay=0.7,
    weight_decay=0.0,
    seed=2,
    eval_windows=8,
    save_every=200,
  )
