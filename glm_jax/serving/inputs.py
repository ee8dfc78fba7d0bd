"""A planned step as arrays: padded to a compiled shape, and made afresh.

An array that a step was given is never written again: the step may read it
after the call (known fault 45).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from glm_jax.sampling import SamplingParams
from glm_jax.serving.scheduler import StepPlan
from glm_jax.serving.sequence import Sequence
from glm_jax.serving.steps import MAX_STOP_IDS, StepInputs


class InputBuilder:
  """Makes the inputs of steps; its work follows the rows, not the context."""

  def __init__(
    self, num_slots: int, finishing: int, words: int, place: Callable
  ):
    """Remembers the sizes.

    Args:
      num_slots: S.
      finishing: F, prompts that may end in one step.
      words: ceil(V / 32).
      place: brings a fresh array to the device. Masks lie in one place
        whether anybody filters or not: the step is compiled for that.
    """
    self._num_slots, self._finishing = num_slots, finishing
    self._words, self._place = words, place
    self._open: dict[tuple[int, ...], tuple] = {}

  def build(
    self,
    step: StepPlan,
    P: int,
    B: int,
    K: int,
    proposals: Mapping[Sequence, tuple] | None = None,
  ) -> StepInputs:
    """Fresh arrays of one step, padded to its shapes.

    Args:
      step: what runs.
      P: prompt rows.
      B: decoding requests.
      K: drafts.
      proposals: of filtered sequences: tokens and masks.

    Returns:
      The inputs.
    """
    S, F = self._num_slots, self._finishing if P else 0
    tokens, pos = np.zeros(P, np.int32), np.full(P, -1, np.int32)
    slot, draft = np.full(P, S, np.int32), np.zeros(P, bool)
    rows, ends = np.zeros(F, np.int32), []
    at = 0
    for chunk in step.prefill:
      seq, end = chunk.seq, at + chunk.count
      first, last = chunk.start, chunk.start + chunk.count
      tokens[at:end] = seq.ids[first:last]
      pos[at:end] = np.arange(first, last, dtype=np.int32)
      slot[at:end] = seq.slot
      draft[at:end] = pos[at:end] >= seq.draft_from
      if chunk.last:
        rows[len(ends)] = end - 1
        ends.append(seq)
      at = end
    slots, count = np.full(B, S, np.int32), np.zeros(B, np.int32)
    for i, (seq, drafts) in enumerate(step.decode):
      slots[i], count[i] = seq.slot, drafts
    limits, last_slot, eos, params = self._ends(ends, F)
    forced, mask, last_mask = self._masks(step, ends, B, K, F, proposals)
    wanted = any(s.request.sampling.logprobs is not None for s in step.drawing)
    return StepInputs(
      tokens=tokens,
      slot=slot,
      pos=pos,
      draft=draft,
      last_row=rows,
      last_slot=last_slot,
      last_limits=limits,
      last_eos=eos,
      last_params=params,
      slots=slots,
      count=count,
      forced=forced,
      masked=np.bool_(bool(proposals)),
      mask=mask,
      last_mask=last_mask,
      logprobs=np.bool_(wanted),
    )

  def _ends(self, ends: list[Sequence], F: int):
    """What the slots of finishing prompts are filled with."""
    limits = np.ones(F, np.int32)
    slot = np.full(F, self._num_slots + 1, np.int32)
    eos = np.full((F, MAX_STOP_IDS), -1, np.int32)
    temperature, min_p = np.zeros((2, F), np.float32)
    top_p = np.ones(F, np.float32)
    top_k, seed = np.zeros(F, np.int32), np.zeros(F, np.uint32)
    for i, seq in enumerate(ends):
      p = seq.request.sampling
      slot[i], limits[i], seed[i] = seq.slot, seq.limit, seq.seed
      eos[i, : len(seq.eos)] = sorted(seq.eos)
      temperature[i], top_p[i] = p.temperature, p.top_p
      top_k[i], min_p[i] = p.top_k, p.min_p
    params = SamplingParams(temperature, top_k, top_p, min_p, seed)
    return limits, slot, eos, params

  def _masks(self, step, ends, B, K, F, proposals):
    """Proposals and masks; constants on the device where nobody filters."""
    if not proposals:
      return self._open_masks(B, K, F)
    forced, mask, last_mask = self._make_masks(B, K, F)
    for i, (seq, _) in enumerate(step.decode):
      if seq in proposals:
        tokens, masks = proposals[seq]
        forced[i, : len(tokens)] = tokens
        mask[i, : len(masks)] = masks
    for i, seq in enumerate(ends):
      if seq in proposals:
        last_mask[i] = proposals[seq][1][0]
    return tuple(map(self._place, (forced, mask, last_mask)))

  def _make_masks(self, B: int, K: int, F: int):
    """No proposals, and masks that allow everything."""
    full = np.uint32(0xFFFFFFFF)
    return (
      np.full((B, K), -1, np.int32),
      np.full((B, K + 1, self._words), full),
      np.full((F, self._words), full),
    )

  def _open_masks(self, *shape):
    if shape not in self._open:
      self._open[shape] = tuple(map(self._place, self._make_masks(*shape)))
    return self._open[shape]
