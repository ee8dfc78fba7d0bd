"""A model as a flat dict of float32 arrays, and back in any dtype.

Keys are the paths of `checkpoints.names` ('groups.blocks.0.attention.q_a.
kernel'). Optimiser and checkpoints see dicts only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from glm_jax.checkpoints.names import model_leaves
from glm_jax.config import ModelConfig
from glm_jax.model import Model, abstract_model, init_model

BIAS = '.router.correction_bias'


class Layout:
  """Paths and shapes of one configuration's parameters."""

  def __init__(self, config: ModelConfig):
    self.config = config
    abstract = abstract_model(config, dtype='float32')
    self._tree = jax.tree.structure(abstract)
    self.leaves = {x.path: x for x in model_leaves(abstract, config)}

  def flatten(self, model: Model) -> dict[str, jax.Array]:
    """The parameters of a model as float32."""
    values = (x.astype(jnp.float32) for x in jax.tree.leaves(model))
    return dict(zip(self.leaves, values, strict=True))

  def model(self, params: Mapping[str, jax.Array], dtype: str) -> Model:
    """The model in a compute dtype; the correction bias stays float32."""
    cast = lambda path: params[path].astype(
      jnp.float32 if path.endswith(BIAS) else jnp.dtype(dtype)
    )
    return self._tree.unflatten([cast(path) for path in self.leaves])

  def init(self, seed: int, start: Model | None = None) -> dict[str, jax.Array]:
    """Fresh parameters, overlaid with those of another model.

    Args:
      seed: of the fresh ones.
      start: a model whose parameters are taken; the drafter may be missing.

    Raises:
      ValueError: anything else is missing or has another shape.
    """
    # This generator compiles several times faster; its numbers depend on the
    # kind of device.
    key = jax.random.key(seed, impl='unsafe_rbg')
    params = self.flatten(_maker(self.config)(key))
    if start is None:
      return params
    given = Layout(start.config).flatten(start)
    wrong = [
      path
      for path, value in params.items()
      if not (path.startswith('mtp.') and path not in given)
      and getattr(given.get(path), 'shape', None) != value.shape
    ]
    if wrong:
      raise ValueError(
        f'the model to start from does not fit at {", ".join(wrong[:5])}: '
        'use the configuration it was trained with'
      )
    return {path: given.get(path, value) for path, value in params.items()}


@functools.lru_cache(4)
def _maker(config: ModelConfig):
  return jax.jit(lambda key: init_model(config, key, dtype='float32'))


def part_of(path: str) -> str:
  """'mtp', 'indexer' or 'trunk'."""
  if path.startswith('mtp.'):
    return 'mtp'
  return 'indexer' if '.indexer.' in path else 'trunk'


def is_matrix(path: str) -> bool:
  """Whether Muon takes it: a linear map between hidden features."""
  if path.startswith(('experts.', 'mtp.experts.')):
    return True
  return path.endswith('.kernel') and not path.endswith(
    ('weights_proj.kernel', 'head.kernel')
  )


def decays(path: str) -> bool:
  """Whether weight decay applies: matrices, embedding, head, router."""
  return path.endswith(
    ('.kernel', 'embed', 'router.weight', '.gate', '.up', '.down')
  )


def heads_of(path: str, config: ModelConfig) -> int:
  """Heads that a matrix holds one above another (Muon takes each alone)."""
  if path.endswith(('attention.q_b.kernel', 'attention.kv_b.kernel')):
    return config.mla.num_heads
  return config.indexer.num_heads if path.endswith('wq_b.kernel') else 1
