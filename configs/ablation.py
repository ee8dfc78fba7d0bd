r"""The drafter's ablation: one recipe for every form, three seeds.

    python launch/ablation.py --config=configs/ablation.py --corpus=CORPUS \
      --workdir=runs/ablation

The drafter is trained from fresh weights on glm-nano's frozen trunk. All
forms have the same steps, tokens in the same order, optimiser and schedule;
`glm_jax.evaluation.draft_ablation` says what the forms are. All drafters
attend to everything in the first stage, where their indexers warm up, and to
their selections in the second. Windows are as long as the measured contexts.
The same for all of them: nothing was tuned for one.
"""

import pathlib
import runpy

from glm_jax.training.config import Stage, TrainConfig
from glm_jax.training.draft_forward import DraftForm

_TRUNK = pathlib.Path(__file__).with_name('glm_nano.py')


def get_train_config() -> TrainConfig:
  """9.8 M tokens a run; every fourth row drafts."""
  return TrainConfig(
    model=runpy.run_path(str(_TRUNK))['get_config'](),
    stages=tuple(
      Stage(
        name=name,
        steps=300,
        window=4096,
        batch=4,
        train=('mtp',),
        draft=DraftForm(steps=7, stride=4, sparse=name == 'second'),
      )
      for name in ('first', 'second')
    ),
    learning_rate=3e-3,
    warmup=50,
    schedule='wsd',
    decay=0.5,
    weight_decay=0.05,
    eval_windows=8,
    save_every=200,
    log_every=20,
  )
