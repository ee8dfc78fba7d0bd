r"""glm-nano's trunk, continued: the indexers learn to look far.

    python launch/train.py --config=configs/glm_nano_long.py --corpus=CORPUS \
      --init_from=runs/glm_nano/trunk --workdir=runs/glm_nano_long \
      --max_seconds=560 --export=runs/glm_nano_long/trunk

After configs/glm_nano.py alone, needles 2,048 and more tokens away are found
by dense attention but not by the selection (22 of 80 against 63): the sparse
stage's indexer loss covers selected keys only, and the dense one saw windows
of 1,024. So the indexers get a dense stage at the full window, too. Stages:

    long    windows of 8,192, every row attends to everything; every 32nd row
            has an indexer loss over all its keys
    share   as in configs/glm_nano.py
"""

import pathlib
import runpy

from glm_jax.training.config import Stage, TrainConfig

_TRUNK = pathlib.Path(__file__).with_name('glm_nano.py')


def get_train_config() -> TrainConfig:
  """26 M tokens more."""
  return TrainConfig(
    model=runpy.run_path(str(_TRUNK))['get_config'](mtp_layers=0),
    stages=(
      Stage(
        name='long',
        steps=100,
        window=8192,
        batch=16,
        sparse=False,
        kl_stride=32,
      ),
      Stage(name='share', steps=100, window=8192, batch=16),
    ),
    learning_rate=1.5e-3,
    warmup=10,
    schedule='wsd',
    decay=0.5,
    weight_decay=0.05,
    seed=1,
    eval_every=50,
    eval_windows=32,
    save_every=100,
  )
