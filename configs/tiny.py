"""A model of GLM-5.2's shape that runs in seconds on a CPU.

14 layers F F F S S S F S S S F S S S, 32 index heads, routed and shared
experts, and the drafter; index_topk 64 prunes from the 65th token on.

    python -c "
    import time, jax
    from glm_jax import forward, init_model, load_config
    from glm_jax.cache import bytes_per_token
    from glm_jax.param import num_elements
    c = load_config('configs/tiny.py')
    model = init_model(c, jax.random.key(0))
    print(num_elements(model))
    print(bytes_per_token(c), bytes_per_token(c, drafter=True))
    tokens = jax.random.randint(jax.random.key(1), (1, 256), 0, 512)
    run = jax.jit(forward)
    for _ in range(2):
      start = time.time()
      jax.block_until_ready(run(model, tokens).logits)
      print(f'{time.time() - start:.2f} s')"

Expected:

    4465248      parameters, the drafter's included
    5120 448     logical cache bytes a token in f32, trunk and drafter
    5.01 s       forward of 256 tokens with compilation (2 CPU cores)
    0.23 s       without
"""

from glm_jax.config import (
  IndexerConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
  MtpConfig,
)


def get_config() -> ModelConfig:
  """The configuration; equal to the preset 'tiny'."""
  return ModelConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    indexer_types=('full',) * 2 + ('full', 'shared', 'shared', 'shared') * 3,
    mlp_types=('dense',) * 3 + ('sparse',) * 11,
    mla=MlaConfig(
      num_heads=4,
      q_lora_rank=64,
      kv_lora_rank=64,
      qk_nope_head_dim=24,
      qk_rope_head_dim=16,
      v_head_dim=32,
    ),
    indexer=IndexerConfig(num_heads=32, head_dim=32, topk=64),
    moe=MoeConfig(num_experts=8, experts_per_token=2, intermediate_size=64),
    mtp=MtpConfig(num_layers=1),
    initializer_range=0.1,  # large enough for index scores to differ
    eos_token_ids=(0, 1, 2),
    pad_token_id=0,
    dtype='float32',
  )
