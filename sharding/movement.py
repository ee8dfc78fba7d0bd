"""Rows or results: what a split step of `token_split` sends, by bytes."""

from __future__ import annotations

from typing import NamedTuple

from glm_jax.config import ModelConfig
from glm_jax.layer_plan import layer_plan
from pallas_kernels.tiling import PAGE


class Movement(NamedTuple):
  """Bytes that one device receives in a pass, drafter included.

  Attributes:
    choice: 'rows' or 'partials'.
    rows: whole layers of the cache, all-gathered.
    partials: queries, all-gathered, and attended latents, reduce-scattered.
  """

  choice: str
  rows: int
  partials: int

  def __str__(self) -> str:
    return (
      f'moves {self.choice}: {self.rows / 1e9:.3f} GB of rows against '
      f'{self.partials / 1e9:.3f} GB of queries and partial results a device '
      'and pass'
    )


def movement(
  config: ModelConfig,
  ranks: int,
  num_rows: int,
  num_pages: int,
  *,
  row_bytes: int,
  key_bytes: int,
) -> Movement:
  """Decides what a pass of a prefill chunk moves.

  Args:
    config: the model.
    ranks: ranks over which tokens are split.
    num_rows: rows of the chunk.
    num_pages: pages of a layer's pool, over all ranks.
    row_bytes: of a cached latent row.
    key_bytes: of an index key.

  Returns:
    The cheaper choice and the bytes of both.
  """
  plan, c = layer_plan(config), config
  others = (ranks - 1) / ranks
  tokens = num_pages * PAGE
  compute = 4 if c.dtype == 'float32' else 2
  latents, fulls = plan.num_latent_slots, plan.num_index_slots
  rows = tokens * (latents * row_bytes + fulls * key_bytes)
  query = compute * c.mla.num_heads * c.mla.row_dim
  # Shares are summed in float32; so is every rank's lse, on all ranks.
  result = 4 * c.mla.num_heads * (c.mla.kv_lora_rank + ranks)
  index = c.indexer.num_heads * (compute * c.indexer.head_dim + 4)
  cut = 4 * 256 * 4 * 2 * ranks / max(ranks - 1, 1)  # four histograms, summed
  partials = num_rows * (latents * (query + result) + fulls * (index + cut))
  rows, partials = round(others * rows), round(others * partials)
  choice = 'rows' if rows < partials else 'partials'
  return Movement(choice, rows, partials)
