"""Muon for matrices, AdamW for the rest, and the learning rate.

Muon (arXiv 2502.16982): momentum, then five
Newton-Schulz steps that move all singular values of the update near 1, then a
scale that gives it AdamW's root mean square. Experts, scanned layers and heads
are matrices of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from glm_jax.config import ModelConfig
from glm_jax.training.config import TrainConfig
from glm_jax.training.parameters import decays, heads_of, is_matrix

_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_RMS = 0.2  # of an AdamW update


def learning_rate(config: TrainConfig, step: jax.Array) -> jax.Array:
  """The rate of a step, before the stage's own factor."""
  c = config
  step = step.astype(jnp.float32)
  up = jnp.minimum((step + 1) / max(c.warmup, 1), 1)
  if c.schedule == 'wsd':
    length = max(round(c.decay * c.steps), 1)
    gone = jnp.clip((step - (c.steps - length)) / length, 0, 1)
    down = 1 - (1 - c.final_scale) * gone
  else:
    share = jnp.clip((step - c.warmup) / max(c.steps - c.warmup, 1), 0, 1)
    down = c.final_scale + (1 - c.final_scale) * (
      0.5 + 0.5 * jnp.cos(jnp.pi * share)
    )
  return c.learning_rate * up * down


def orthogonalize(x: jax.Array) -> jax.Array:
  """Newton-Schulz over the last two axes; singular values go near 1."""
  wide = x.shape[-1] >= x.shape[-2]
  x = x if wide else x.swapaxes(-1, -2)
  x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
  a, b, c = _QUINTIC
  for _ in range(_STEPS):
    gram = x @ x.swapaxes(-1, -2)
    x = a * x + (b * gram + c * gram @ gram) @ x
  return x if wide else x.swapaxes(-1, -2)


def _directions(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Scaled directions of stacks of matrices [n, out, in].

  Stacks of equal shape go through the iteration together: a model has
  hundreds of small matrices but few shapes.
  """
  shapes: dict[tuple[int, ...], list[str]] = {}
  for path, x in parts.items():
    shapes.setdefault(x.shape[1:], []).append(path)
  out = {}
  for shape, paths in shapes.items():
    stack = jnp.concatenate([parts[p] for p in paths])
    turned = _RMS * max(shape) ** 0.5 * orthogonalize(stack)
    ends = np.cumsum([len(parts[p]) for p in paths])[:-1]
    out |= dict(zip(paths, jnp.split(turned, ends)))
  return out


class MuonState(NamedTuple):
  """Momentum by path."""

  momentum: dict[str, jax.Array]


def muon(config: ModelConfig, beta: float) -> optax.GradientTransformation:
  """Muon over a dict of matrices [..., out, in]."""

  def init(params):
    return MuonState(jax.tree.map(jnp.zeros_like, params))

  def split(path, x):
    heads = heads_of(path, config)
    return x.reshape(-1, x.shape[-2] // heads, x.shape[-1])

  def update(grads, state, params=None):
    del params
    old = state.momentum
    new = {k: beta * old[k] + (1 - beta) * g for k, g in grads.items()}
    # Nesterov's look-ahead.
    ahead = {k: beta * new[k] + (1 - beta) * g for k, g in grads.items()}
    parts = {k: split(k, x) for k, x in ahead.items()}
    turned = _directions(parts)
    return {k: turned[k].reshape(g.shape) for k, g in grads.items()}, (
      MuonState(new)
    )

  return optax.GradientTransformation(init, update)


class Optimizer:
  """Updates of a dict of parameters, without the learning rate."""

  def __init__(self, config: TrainConfig, paths: Iterable[str]):
    self._config = config
    use = config.optimizer == 'muon'
    self._matrices = [p for p in paths if use and is_matrix(p)]
    self._others = [p for p in paths if not (use and is_matrix(p))]
    self._muon = muon(config.model, config.momentum)
    self._adam = optax.scale_by_adam(*config.betas, eps=1e-9)

  def init(self, params: dict[str, jax.Array]):
    """Its state, a pytree."""
    pick = lambda paths: {p: params[p] for p in paths}
    return (
      self._muon.init(pick(self._matrices)),
      self._adam.init(pick(self._others)),
    )

  def update(
    self, grads: dict, state, params: dict, rate: jax.Array
  ) -> tuple[dict[str, jax.Array], object]:
    """New values of all parameters given, and the new state."""
    pick = lambda paths: {p: grads[p] for p in paths}
    matrices, first = self._muon.update(pick(self._matrices), state[0])
    others, second = self._adam.update(pick(self._others), state[1])
    c, new = self._config, {}
    for path, value in params.items():
      move = matrices[path] if path in matrices else others[path]
      scale = 1.0 if path in matrices else c.adam_scale
      decay = c.weight_decay if decays(path) else 0.0
      new[path] = value - rate * scale * (move + decay * value)
    return new, (first, second)
