r"""glm-nano, the embedded model: the trunk's recipe.

10 layers F F F S S S F S S S, 32 index heads with index_topk 256 in a context
of 8,192, 16 experts (4 a token) and one shared. With its drafter (layer 10,
configs/glm_nano_mtp.py) it has 12.1 M parameters: under 24 MiB in bf16.

    python launch/prepare_data.py --recipe=configs/corpus.json --out=CORPUS
    python launch/train.py --config=configs/glm_nano.py --corpus=CORPUS \
      --workdir=runs/glm_nano --max_seconds=560 --export=runs/glm_nano/trunk

and the same line again until it says that the last step is done. One stage,
windows of 1,024 in which every row attends to everything; the indexers learn
beside the trunk (the warm-up costs nothing extra). configs/glm_nano_long.py
goes on from it at the full window, with IndexShare.

    12134096     parameters, the drafter's included
"""

from glm_jax.config import (
  IndexerConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  MtpConfig,
)
from glm_jax.training.config import Stage, TrainConfig


def get_config(mtp_layers: int = 1) -> ModelConfig:
  """The model; the trunk is trained without its drafter."""
  return ModelConfig(
    vocab_size=6144,
    hidden_size=256,
    intermediate_size=1024,
    indexer_types=('full',) * 2 + ('full', 'shared', 'shared', 'shared') * 2,
    mlp_types=('dense',) * 2 + ('sparse',) * 8,
    mla=MlaConfig(
      num_heads=4,
      q_lora_rank=128,
      kv_lora_rank=128,
      qk_nope_head_dim=32,
      qk_rope_head_dim=32,
      v_head_dim=64,
    ),
    indexer=IndexerConfig(num_heads=32, head_dim=32, topk=256),
    moe=MoeConfig(num_experts=16, experts_per_token=4, intermediate_size=48),
    mtp=MtpConfig(num_layers=mtp_layers),
    rope_theta=100_000.0,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    eos_token_ids=(6120, 6127, 6129),  # end of text, user, observation
    pad_token_id=6120,
    dtype='bfloat16',
  )


def get_train_config() -> TrainConfig:
  """The recipe's first part: 92 M tokens, about 1.2 epochs."""
  return TrainConfig(
    model=get_config(mtp_layers=0),
    stages=(
      Stage(
        name='short',
        steps=700,
        window=1024,
        batch=128,
        sparse=False,
        chunk=1024,
      ),
    ),
    learning_rate=3e-3,
    warmup=100,
    schedule='wsd',
    decay=0.2,
    final_scale=0.5,
    weight_decay=0.05,
    eval_every=100,
    eval_windows=32,
    save_every=100,
  )
