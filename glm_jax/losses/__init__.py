"""The losses of training, as pure functions over arrays.

    tokens.py     cross-entropy from hidden states and the head
    selection.py  indexer losses: attention targets, index scores, KL
    drafts.py     drafter losses: cross-entropy and total variation over steps
    balance.py    the router's bias, moved by load instead of by a gradient
    chunks.py     sums over tokens that never hold all logits at once

G is the number of draft steps, T tokens, V vocabulary, D hidden width, k
selected keys, S keys in all. Masks say which rows count and are never taken
from token ids. A loss is the mean over the rows that count and 0 when none
does. What a loss teaches towards (attention targets, the trunk's
distributions) is cut from the graph inside the loss.
"""

from glm_jax.losses.balance import expert_load, update_correction_bias
from glm_jax.losses.drafts import (
  draft_targets,
  end_to_end_tv,
  end_to_end_tv_from_hidden,
  mtp_cross_entropy,
  total_variation,
)
from glm_jax.losses.selection import (
  attention_target,
  attention_target_dense,
  indexer_kl,
  indexer_kl_dense,
  indexer_kl_dense_rows,
  mean_target,
  selected_scores,
)
from glm_jax.losses.tokens import cross_entropy

__all__ = [
  'attention_target',
  'attention_target_dense',
  'cross_entropy',
  'draft_targets',
  'end_to_end_tv',
  'end_to_end_tv_from_hidden',
  'expert_load',
  'indexer_kl',
  'indexer_kl_dense',
  'indexer_kl_dense_rows',
  'mean_target',
  'mtp_cross_entropy',
  'selected_scores',
  'total_variation',
  'update_correction_bias',
]
