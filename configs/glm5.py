"""GLM-5 and GLM-5.1: GLM-5.2 with an indexer in every layer and 200K tokens.

    python -c "
    from glm_jax import load_config
    from glm_jax.cache import bytes_per_token
    from glm_jax.model import abstract_model
    from glm_jax.param import num_elements
    c = load_config('configs/glm5.py')
    print(num_elements(abstract_model(c)))
    print(bytes_per_token(c), bytes_per_token(c, 'fp8'))"

Expected, in a few seconds on a CPU and without weights:

    753864139008    parameters, the drafter's included
    109824 61464    logical cache bytes a token of the trunk, bf16 and fp8

The published `config.json` of these models has no indexer_types. Loading
such a checkpoint asks for them: write 78 times 'full'.
"""

import dataclasses

from glm_jax.config import ModelConfig
from glm_jax.presets import PRESETS


def get_config() -> ModelConfig:
  """The configuration; equal to the presets 'glm5' and 'glm51'."""
  return dataclasses.replace(
    PRESETS['glm52'],
    indexer_types=('full',) * 78,  # indexers on all layers, section 1.2
    rope_theta=1e6,  # rope_theta, section 1.1
    max_position_embeddings=202_752,  # max_position_embeddings
  )
