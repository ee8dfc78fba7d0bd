r"""glm-nano's drafter: seven steps that share index and rows, trunk frozen.

    python launch/train.py --config=configs/glm_nano_mtp.py --corpus=CORPUS \
      --init_from=runs/glm_nano/trunk --workdir=runs/glm_nano_mtp \
      --max_seconds=560 --export=runs/glm_nano_mtp/model

End-to-end total variation towards the trunk's own distribution. For the
ablation's older forms:

    --set=share=False --set=stride=1 --set=loss=ce

The embedded model is what this run exports: trunk and drafter.
"""

import pathlib
import runpy

from glm_jax.config import ModelConfig
from glm_jax.training.config import Stage, TrainConfig
from glm_jax.training.draft_forward import DraftForm

_TRUNK = pathlib.Path(__file__).with_name('glm_nano.py')


def get_config() -> ModelConfig:
  """The trunk's configuration with the drafter."""
  return runpy.run_path(str(_TRUNK))['get_config']()


def get_train_config() -> TrainConfig:
  """The recipe: 79 M tokens, a quarter of the rows draft."""
  return TrainConfig(
    model=get_config(),
    stages=(
      Stage(
        name='draft',
        steps=600,
        window=8192,
        batch=16,
        train=('mtp',),
        draft=DraftForm(steps=7, share=True, stride=4, loss='tv'),
      ),
    ),
    learning_rate=3e-3,
    warmup=50,
    schedule='wsd',
    decay=0.4,
    weight_decay=0.05,
    eval_windows=8,
    save_every=100,
  )
