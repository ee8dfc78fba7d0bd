"""Teacher-forced passes over windows: nats and greedy tokens where asked.

The trainer's forward pass (`glm_jax.training.forward`), which attends to the
indexer's selection as inference does, on CPU and GPU alike. Logits exist for
a chunk of rows at a time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glm_jax.config import FULL, ModelConfig
from glm_jax.losses.chunks import join_rows, logits_of, split_rows
from glm_jax.model import Model
from glm_jax.training.forward import ForwardOptions, trunk
from glm_jax.training.step import head_weight
from glm_jax.training.windows import Windows
from pallas_kernels.tiling import PAGE, round_up

# What every row attends to: all rows; the selections as the config has them;
# the selection of its own layer's indexer, which every layer must have.
SELECTIONS = ('dense', 'share', 'per_layer')
_CHUNK = 1024  # rows whose logits exist at once


class Scores(NamedTuple):
  """How a model takes the tokens that it was asked about.

  Attributes:
    greedy: [N, m] int32 the likeliest token there.
    nats: [N, m] float32 negative log-likelihood of the token there.
  """

  greedy: np.ndarray
  nats: np.ndarray


def eval_options(
  config: ModelConfig, selection: str, rows: int, attention: str = 'auto'
) -> ForwardOptions:
  """How a pass without gradients runs.

  Args:
    config: of the model.
    selection: one of `SELECTIONS`.
    rows: of a window, whole pages.
    attention: as in `ForwardOptions`.

  Raises:
    ValueError: an unknown selection, or one that the model cannot make.
  """
  if selection not in SELECTIONS:
    raise ValueError(f'{selection=} must be one of {SELECTIONS}')
  shared = config.indexer_types.count('shared')
  if selection == 'per_layer' and set(config.indexer_types) != {FULL}:
    raise ValueError(
      f"selection='per_layer' needs an indexer in every layer; {shared} of "
      f'{config.num_layers} have none: give a model trained with its own'
    )
  return ForwardOptions(
    sparse=selection != 'dense',
    attention=attention,
    kl_stride=0,
    chunk=int(np.gcd(rows, 256)),
    remat=False,
  )


def whole_windows(tokens: np.ndarray) -> Windows:
  """Windows of one segment each, padded to whole pages.

  Args:
    tokens: [B, L] ids.
  """
  B, L = tokens.shape
  S = round_up(L, PAGE)
  pad = lambda a: np.pad(a, ((0, 0), (0, S - L)))
  place = np.broadcast_to(np.arange(L, dtype=np.int32), (B, L))
  ones = np.ones((B, L), np.int32)
  return Windows(*map(pad, (np.asarray(tokens, np.int32), ones, place)))


def score_tokens(
  model: Model,
  tokens: np.ndarray,
  places: np.ndarray,
  *,
  selection: str = 'share',
  batch: int = 8,
  attention: str = 'auto',
) -> Scores:
  """What the model makes of some tokens of contexts, in one pass a batch.

  Args:
    model: in the dtype to compute in.
    tokens: [N, L] ids.
    places: [N, m] of the tokens asked about, 1 to L - 1; each is judged by
      the row before it.
    selection: one of `SELECTIONS`.
    batch: contexts at once.
    attention: as in `ForwardOptions`.

  Raises:
    ValueError: places outside the contexts; see also `eval_options`.
  """
  tokens, places = np.asarray(tokens), np.asarray(places, np.int32)
  N, L = tokens.shape
  if (
    places.shape[0] != N
    or places.size
    and not (1 <= places.min() and places.max() < L)
  ):
    raise ValueError(
      f'places {places.shape} must be [{N}, m], each from 1 to {L - 1}'
    )
  options = eval_options(model.config, selection, round_up(L, PAGE), attention)
  batch = min(batch, N)
  parts = []
  for first in range(0, N, batch):
    # The last batch is filled up, so that one program serves all.
    which = np.arange(first, first + batch) % N
    windows = jax.tree.map(jnp.asarray, whole_windows(tokens[which]))
    hidden = _hidden(model, windows, options)
    part = _asked(model, hidden, windows, places[which])
    parts.append(jax.device_get(part))
  join = lambda *xs: np.concatenate(xs)[:N]
  return Scores(*jax.tree.map(join, *parts))


@functools.partial(jax.jit, static_argnames='options')
def _hidden(model, windows, options):
  """[B * S, D], one program for whatever is then asked of the rows."""
  return trunk(model, windows, options)[0]


@jax.jit
def _asked(model, hidden, windows, places):
  """(greedy, nats) [B, m] of the tokens at `places`."""
  B, S = windows.tokens.shape
  rows = (jnp.arange(B)[:, None] * S + places - 1).reshape(-1)
  targets = jnp.take_along_axis(windows.tokens, places, axis=1)
  found = judge_rows(model, hidden[rows], targets.reshape(-1))
  return jax.tree.map(lambda a: a.reshape(places.shape), found)


def window_nats(
  model: Model, windows: Windows, options: ForwardOptions
) -> tuple[jax.Array, jax.Array]:
  """Nats of every row's next token, and where there is one.

  Args:
    model: in the dtype to compute in.
    windows: [B, S + E]; a last row without look-ahead has no next token.
    options: from `eval_options`.

  Returns:
    [B, S] float32 and [B, S] bool.
  """
  windows = jax.tree.map(jnp.asarray, windows)
  S = windows.rows
  rows = jax.tree.map(lambda a: a[:, :S], windows)
  return _every(model, _hidden(model, rows, options), windows)


@jax.jit
def _every(model, hidden, windows):
  targets, mask = windows.targets(1)
  _, nats = judge_rows(model, hidden, targets.reshape(-1))
  return jnp.where(mask, nats.reshape(mask.shape), 0), mask


def judge_rows(
  model: Model, hidden: jax.Array, targets: jax.Array, chunk: int = _CHUNK
) -> tuple[jax.Array, jax.Array]:
  """The likeliest token of each row and the nats of its target.

  Args:
    model: whose head.
    hidden: [T, D] post-norm hidden states.
    targets: [T] int32.
    chunk: rows whose logits exist at once.

  Returns:
    [T] int32 and [T] float32.
  """
  head = head_weight(model)

  def part(xs):
    hidden, targets = xs
    logits = logits_of(hidden, head)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), nats

  parts = tuple(split_rows(a, chunk) for a in (hidden, targets))
  found = lax.map(part, parts)
  return tuple(join_rows(a, len(targets)) for a in found)
