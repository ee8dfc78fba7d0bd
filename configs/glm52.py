"""GLM-5.2 as published, number by number.

    python -c "
    from glm_jax import load_config
    from glm_jax.cache import bytes_per_token
    from glm_jax.model import abstract_model
    from glm_jax.param import num_elements
    c = load_config('configs/glm52.py')
    print(num_elements(abstract_model(c)))
    print(bytes_per_token(c), bytes_per_token(c, 'fp8'))
    print(bytes_per_token(c, drafter=True))"

Expected, in a few seconds on a CPU and without weights:

    753329940480    parameters, the drafter's included
    95232 53940     logical cache bytes a token of the trunk, bf16 and fp8
    1408            the same of the drafter, bf16

Sources: `config.json` of huggingface.co/zai-org/GLM-5.2 unless a line says
otherwise; section numbers are those of spec/model.md.
"""

from glm_jax.config import (
  IndexerConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  MtpConfig,
)


def get_config() -> ModelConfig:
  """The configuration; equal to the preset 'glm52'."""
  return ModelConfig(
    vocab_size=154_880,  # vocab_size
    hidden_size=6144,  # hidden_size
    intermediate_size=12_288,  # intermediate_size, of the dense layers
    # indexer_types: FFF SSSF SSSF ... SSSF SSS, section 1.2; 21 full layers.
    indexer_types=('full',) * 2 + ('full', 'shared', 'shared', 'shared') * 19,
    # mlp_layer_types: first_k_dense_replace is 3, moe_layer_freq 1.
    mlp_types=('dense',) * 3 + ('sparse',) * 75,
    mla=MlaConfig(
      num_heads=64,  # num_attention_heads; num_key_value_heads is nominal
      q_lora_rank=2048,  # q_lora_rank
      kv_lora_rank=512,  # kv_lora_rank
      qk_nope_head_dim=192,  # qk_nope_head_dim
      qk_rope_head_dim=64,  # qk_rope_head_dim; never head_dim, section 1.4
      v_head_dim=256,  # v_head_dim
      latent_norm_eps=1e-5,  # no key: the trainer's rms_norm_eps, section 2.6
    ),
    indexer=IndexerConfig(
      num_heads=32,  # index_n_heads
      head_dim=128,  # index_head_dim
      topk=2048,  # index_topk
      key_norm_eps=1e-6,  # no key: every trainer and engine, section 2.1
    ),
    moe=MoeConfig(
      num_experts=256,  # n_routed_experts
      experts_per_token=8,  # num_experts_per_tok
      num_shared_experts=1,  # n_shared_experts
      intermediate_size=2048,  # moe_intermediate_size
      routed_scaling_factor=2.5,  # routed_scaling_factor
      norm_topk_prob=True,  # norm_topk_prob
    ),
    mtp=MtpConfig(
      num_layers=1,  # num_nextn_predict_layers
      share_index_and_kv=True,  # index_share_for_mtp_iteration
      own_head=False,  # no shared_head.head in the files, section 1.3
    ),
    rms_norm_eps=1e-5,  # rms_norm_eps
    rope_theta=8e6,  # rope_parameters.rope_theta
    max_position_embeddings=1_048_576,  # max_position_embeddings
    tie_word_embeddings=False,  # tie_word_embeddings
    initializer_range=0.02,  # initializer_range
    eos_token_ids=(154_820, 154_827, 154_829),  # eos_token_id
    pad_token_id=154_820,  # pad_token_id
    dtype='bfloat16',  # dtype; the correction bias is F32
    weight_block_size=None,  # (128, 128) in GLM-5.2-FP8, section 1.5
  )
