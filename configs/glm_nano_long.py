r"""glm-nano's trunk, continued at the full window, then with IndexShare.

    python launch/train.py --config=configs/glm_nano_long.py --corpus=CORPUS \
      --init_from=runs/glm_nano/trunk --workdir=runs/glm_nano_long \
      --max_seconds=560 --export=runs/glm_nano_long/trunk

The sparse stage's indexer loss covers selected keys only, so indexers that
saw windows of 1,024 alone never learn to look far: they found 22 of 80
needles at 2,048 and more tokens, dense attention 63. Hence a dense stage at
the full window before the sparse one:

    long    windows of 8,192, every row attends to everything; every 32nd row
            has an indexer loss over all its keys
    share   every row attends to its 256 selected keys, one selection a group
            (IndexShare), multi-layer indexer loss
"""

import pathlib
import runpy

from glm_jax.training.config import Stage, TrainConfig

_TRUNK = pathlib.Path(__file__).with_name('glm_nano.py')


def get_train_config() -> TrainConfig:
  """46 M tokens more."""
  return TrainConfig(
    model=runpy.run_path(str(_TRUNK))['get_config'](mtp_layers=0),
    stages=(
      Stage(
        name='long',
        steps=150,
        window=8192,
        batch=16,
        sparse=False,
        kl_stride=32,
      ),
      Stage(name='share', steps=200, window=8192, batch=16),
    ),
    learning_rate=1.5e-3,
    warmup=20,
    schedule='wsd',
    decay=0.5,
    weight_decay=0.05,
    seed=1,
    eval_every=50,
    eval_windows=32,
    save_every=100,
  )
