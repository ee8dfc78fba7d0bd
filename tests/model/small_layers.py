"""Small layers with weights from numpy, and values in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from glm_jax.layers import Init
from glm_jax.mla import Mla
from glm_jax.published_config import config_from_published

DTYPES = {'f32': np.float32, 'bf16': ml_dtypes.bfloat16}
THETA = 8e6


def wide(x):
  return np.asarray(x).astype(np.float64)


def t1(**changes):
  """The attention of T1 (spec/known_faults.md): N=4, R=16, nope 24, P=8."""
  return config_from_published(
    {
      'num_hidden_layers': 1,
      'hidden_size': 64,
      'num_attention_heads': 4,
      'q_lora_rank': 32,
      'kv_lora_rank': 16,
      'qk_nope_head_dim': 24,
      'qk_rope_head_dim': 8,
      'v_head_dim': 32,
      **changes,
    }
  )


def build(module, *args, **kwargs):
  """A module with weights from numpy, which needs no compilation.

  Kernels are normal (standard deviation `init.std`), norm weights lie in
  [0.1, 2], and the fp8 scales of neighbouring blocks differ up to 64 times.
  """
  init = next(a for a in args if isinstance(a, Init))
  rng = np.random.default_rng(0)
  make = lambda key: module(key, *args, **kwargs)

  def fill(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    if '.scale' in f'.{name}':
      value = init.std / 100 * 2.0 ** rng.integers(-3, 4, leaf.shape)
    elif 'weight' in name:
      value = rng.uniform(0.1, 2, leaf.shape)
    elif leaf.dtype == jnp.float8_e4m3fn:
      value = np.clip(100 * rng.normal(size=leaf.shape), -448, 448)
    else:
      value = init.std * rng.normal(size=leaf.shape)
    return jnp.asarray(value.astype(leaf.dtype))

  return jax.tree_util.tree_map_with_path(
    fill, jax.eval_shape(make, jax.random.key(0))
  )


def make_mla(init, **changes):
  return build(Mla, t1(**changes), init)


def rotate(x, positions, theta, width):
  """Pairs as complex numbers: (x0 + i x1) * exp(i p theta^(-2j/P))."""
  x = wide(x).copy()
  freq = theta ** (-np.arange(0, width, 2) / width)
  turn = np.exp(1j * np.maximum(positions, 0)[:, None] * freq)
  turn = turn.reshape(len(x), *(1,) * (x.ndim - 2), width // 2)
  pairs = (x[..., 0:width:2] + 1j * x[..., 1:width:2]) * turn
  x[..., 0:width:2], x[..., 1:width:2] = pairs.real, pairs.imag
  return x
