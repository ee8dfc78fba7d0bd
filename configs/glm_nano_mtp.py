r"""glm-nano's drafter: seven steps that share index and rows, trunk frozen.

    python launch/train.py --config=configs/glm_nano_mtp.py --corpus=CORPUS \
      --init_from=runs/glm_nano_index/trunk --workdir=runs/glm_nano_mtp \
      --max_seconds=560 --export=runs/glm_nano_mtp/model

First cross-entropy, the drafter attending to everything while its indexer
learns from all keys (a fresh one selects at random, and stays behind: its loss
was 0.6 after 400 sparse steps, the trunk's 0.13). Then end-to-end total
variation towards the trunk's own distribution, over its selection: from fresh
weights that loss alone is slow (0.70 accepted drafts a round after 145 steps).
The embedded model is what this run exports: trunk and drafter.
configs/ablation.py compares the forms.
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
  """The recipe: 52 M tokens, a quarter of the rows draft."""
  # Small steps: at first 4,096 tokens a step teach as much as 65,536 do.
  return TrainConfig(
    model=get_config(),
    stages=tuple(
      Stage(
        name=loss,
        steps=steps,
        window=8192,
        batch=4,
        train=('mtp',),
        draft=DraftForm(
          steps=7, share=True, stride=4, loss=loss, sparse=loss == 'tv'
        ),
      )
      for loss, steps in (('ce', 600), ('tv', 1000))
    ),
    learning_rate=3e-3,
    warmup=50,
    schedule='wsd',
    decay=0.4,
    weight_decay=0.05,
    eval_windows=8,
    save_every=200,
  )
