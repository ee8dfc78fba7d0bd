"""Eight layers of GLM-5.2 for one large GPU: a real window, few experts.

Layers 6 to 13 (full, shared x 3, twice) with the published dimensions and 16
experts instead of 256, and the drafter: 9.3e9 parameters, 18.5 GB in bf16.
There are no trained weights for it.

    python launch/serve.py --model=configs/glm52_slice.py --load_format=dummy
    python -c "
    from glm_jax import load_config
    from glm_jax.cache import bytes_per_token
    from glm_jax.model import abstract_model
    from glm_jax.param import num_elements
    c = load_config('configs/glm52_slice.py')
    print(num_elements(abstract_model(c)))
    print(bytes_per_token(c, physical=True))"
"""

from glm_jax.benchmarks.context_slice import SETTINGS
from glm_jax.config import ModelConfig


def get_config() -> ModelConfig:
  """The configuration that suite `context` measures."""
  return SETTINGS['glm52'].config
