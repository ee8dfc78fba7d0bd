"""Runs the model as serving does: rows of several sequences, a paged cache.

One executable serves prefill chunks and decode steps alike; unused rows are
padding that names a live sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax import init_cache
from glm_jax.cache import make_rows
from glm_jax.model import head, trunk
from glm_jax.plan import LocalPlan


class Runner:
  """A few sequences of one model and their cache."""

  def __init__(
    self,
    model,
    pages: list[list[int]],
    *,
    num_pages: int | None = None,
    rows: int = 8,
    capture: tuple[str, ...] = ('selected', 'scores'),
    plan: LocalPlan | None = None,
  ):
    self.model, self.num_rows = model, rows
    self.num_pages = num_pages
    self.reset(pages)
    plan = plan or LocalPlan()

    def step(model, tokens, seq, pos, table, cache, replay):
      rows = make_rows(seq, pos, table)
      hidden, cache, kept = trunk(
        model, tokens, cache, rows, plan, capture=capture, replay=replay
      )
      return cache, {'logits': head(model, hidden, plan), **kept}

    self._step = jax.jit(step, donate_argnames='cache')

  def reset(self, pages: list[list[int]]) -> None:
    """Forgets every sequence; the executable stays."""
    width = max(map(len, pages))
    table = [p + [-1] * (width - len(p)) for p in pages]
    self.page_table = jnp.asarray(table, jnp.int32)
    count = self.num_pages or max(max(p) for p in pages) + 1
    dtype = 'f32' if self.model.embed.dtype == jnp.float32 else 'bf16'
    self.cache = init_cache(self.model.config, count, dtype=dtype)
    self.lengths = [0] * len(pages)
    # (sequence, position) -> array, by name.
    self.seen: dict[str, dict[tuple[int, int], np.ndarray]] = {}

  def run(self, rows: list[tuple[int, int]], replay=None) -> np.ndarray:
    """Runs one step.

    Args:
      rows: (sequence, token) of each row, tokens of a sequence in order.
      replay: [F, rows, k] positions instead of own choices.

    Returns:
      [rows, V] logits.
    """
    R = self.num_rows
    tokens, seq = np.zeros(R, np.int32), np.zeros(R, np.int32)
    pos = np.full(R, -1, np.int32)
    for i, (s, token) in enumerate(rows):
      tokens[i], seq[i], pos[i] = token, s, self.lengths[s]
      self.lengths[s] += 1
    if replay is not None:
      missing = ((0, 0), (0, R - len(rows)), (0, 0))
      replay = np.pad(replay, missing, constant_values=-1)
    self.cache, out = self._step(
      self.model, tokens, seq, pos, self.page_table, self.cache, replay
    )
    out = {k: np.asarray(v) for k, v in out.items()}
    for i in range(len(rows)):
      at = (int(seq[i]), int(pos[i]))
      for name, value in out.items():
        row = value[i] if name == 'logits' else value[:, i]
        self.seen.setdefault(name, {})[at] = row
    return out['logits'][: len(rows)]

  def feed(self, sequences: list[list[int]], replay=None) -> None:
    """Prefills sequences, side by side, in chunks of the step's rows.

    Args:
      sequences: tokens of each sequence.
      replay: [F, T, k] of each sequence.
    """
    pairs = [
      (s, i) for s, tokens in enumerate(sequences) for i in range(len(tokens))
    ]
    for start in range(0, len(pairs), self.num_rows):
      chunk = pairs[start : start + self.num_rows]
      given = None
      if replay is not None:
        given = np.stack([replay[s][:, i] for s, i in chunk], axis=1)
      self.run([(s, int(sequences[s][i])) for s, i in chunk], given)

  def greedy(self, count: int) -> list[list[int]]:
    """Continues every sequence by `count` greedy tokens, all in one step."""
    every = range(len(self.lengths))
    new = [[] for _ in every]
    for _ in range(count):
      last = [self.seen['logits'][s, self.lengths[s] - 1] for s in every]
      rows = [(s, int(row.argmax())) for s, row in zip(every, last)]
      self.run(rows)
      for s, token in rows:
        new[s].append(token)
    return new

  def gathered(self, name: str, s: int) -> np.ndarray:
    """Everything seen of one sequence: [T, ...] logits, else [L, T, ...]."""
    rows = [self.seen[name][s, i] for i in range(self.lengths[s])]
    return np.stack(rows, axis=0 if name == 'logits' else 1)
