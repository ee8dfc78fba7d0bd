"""One validation: a side that is judged, and what it is judged by."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from glm_jax.layer_plan import layer_plan
from glm_jax.validation import compare
from glm_jax.validation.record import Record, Writer, make_meta
from glm_jax.validation.result import Result, make_result
from glm_jax.validation.walk import Side, rejoin, walk

# Drafts compared: the first step and later ones, which share its index.
NUM_DRAFTS = 4


class Run:
  """The last side, judged by the first one or by a record, if either is."""

  def __init__(
    self,
    sides: list[Side],
    tokens: np.ndarray,
    dtype: str,
    layers: Sequence[int] | None,
    reference: Record | None,
    log: Callable[[str], None],
  ):
    self.judged = sides[-1]
    self.believed = sides[0] if len(sides) == 2 else None
    self.reference = reference
    self.tokens, self.dtype, self.log = tokens, dtype, log
    all_layers = tuple(range(self.judged.config.num_layers))
    recorded = all_layers if reference is None else reference.meta.layers
    self.layers = tuple(sorted(recorded if layers is None else layers))
    has_reference = len(sides) == 2 or reference is not None
    # bfloat16 noise compounds from layer to layer and flips near ties (the
    # 8 layers of known_faults.md's T1 part by 0.1): compared a layer a time.
    self.isolated = has_reference and (
      layers is not None or self.layers != all_layers or dtype == 'bfloat16'
    )
    if self.isolated:
      log("each layer is given the reference's input, not the layer below's")
    self.to_the_end = self.layers[-1] == all_layers[-1]

  def __call__(self, writer: Writer | None) -> Result:
    """Runs, compares, records."""
    tol = compare.tolerance_of(self.dtype)
    plan = layer_plan(self.judged.config)
    results = []
    pairs = walk(
      self.judged,
      self.tokens,
      self.layers,
      self._expected(),
      isolated=self.isolated,
    )
    for expected, out in pairs:
      if writer is not None:
        writer.add(out if self.believed is None else expected)
      line = f'layer {out.layer}'
      if expected is not None:
        full = plan.is_full(out.layer)
        results.append(compare.compare_layer(expected, out, full, tol))
        line += f': {results[-1].parted or "ok"}'
      self.log(line)
    logits = self._logits(expected, out, tol, writer)
    drafts = self._drafts(expected, out, tol, writer)
    if writer is not None:
      side = self.believed or self.judged
      writer.finish(
        make_meta(side, self.tokens, self.dtype, self.layers, self.to_the_end)
      )
    path = None if writer is None else os.fspath(writer.path)
    return make_result(results, logits, drafts, tol, len(self.tokens), path)

  def _expected(self):
    """The reference's layers, one by one; None without a reference."""
    if self.reference is not None:
      return self.reference.layers(self.layers)
    if self.believed is not None:
      pairs = walk(self.believed, self.tokens, self.layers)
      return (out for _, out in pairs)
    return None

  def _logits(self, expected, out, tol, writer):
    """Compares and records logits, where the last layer was run."""
    if not self.to_the_end:
      return None
    logits = self.judged.logits(rejoin(expected, out))
    reference = None
    if self.reference is not None:
      reference = self.reference.logits()
    elif self.believed is not None:
      reference = self.believed.logits(expected.hidden)
    if writer is not None:
      writer.add_logits(logits if self.believed is None else reference)
    if reference is None:
      return None
    return compare.compare_logits(reference, logits, tol)

  def _drafts(self, expected, out, tol, writer):
    """Compares and records draft logits, where there is a drafter.

    In bfloat16 a near tie of its index or experts is enough to part the
    later steps, so the drafter is compared in float32 only.
    """
    has_drafter = layer_plan(self.judged.config).has_mtp
    if not (has_drafter and self.to_the_end and len(self.tokens) > 1):
      return None
    if self.dtype != 'float32':
      self.log('drafter: compared in float32 only')
      return None
    reference = None if self.reference is None else self.reference.drafts()
    if self.reference is not None and reference is None:
      self.log('drafter: not in the record')
      return None
    given = [int(t) for t in self.tokens[: NUM_DRAFTS - 1]]
    drafts = self.judged.drafts(self.tokens, rejoin(expected, out), given)
    if self.believed is not None:
      reference = self.believed.drafts(self.tokens, expected.hidden, given)
    if writer is not None:
      writer.add_drafts(drafts if self.believed is None else reference)
    if reference is None:
      return None
    return compare.compare_logits(reference, drafts, tol)
