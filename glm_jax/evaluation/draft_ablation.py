"""What each piece of the drafter is worth: accept lengths, row by row.

The published table adds one piece at a time (spec/model.md section 4.6):

    baseline                     older form: every draft step has rows and an
                                 index of its own; cross-entropy; the likeliest
                                 token is drafted and stands when it is drawn
    + IndexShare + KVShare       all steps read the first one's rows and index,
                                 in training as in drafting
    + rejection sampling         the same weights; drafts are drawn from q
    + end-to-end TV loss         weights trained for that acceptance

Three forms of weights serve the four rows. Accept length is measured by
drafting for real: held-out prompts, temperature 1, seven drafts a round.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from glm_jax.data import TokenBatches, TokenFile
from glm_jax.drafting import DraftOptions
from glm_jax.generation import generate
from glm_jax.model import Model
from glm_jax.plan import LocalPlan
from glm_jax.training.config import TrainConfig, override

_PREFILL_ROWS = 4096  # of a step: a GPU idles in smaller ones
# Form -> settings of the recipe, whose stages are 'first' and 'second'. Total
# variation barely moves fresh weights (q misses p's tokens: no gradient), so
# that form, too, begins with cross-entropy.
FORMS: Mapping[str, tuple[str, ...]] = {
  'unshared': ('share=False', 'loss=ce'),
  'shared': ('share=True', 'loss=ce'),
  'shared_tv': ('share=True', 'first.loss=ce', 'second.loss=tv'),
}


@dataclasses.dataclass(frozen=True)
class AblationRow:
  """One row of the table.

  Attributes:
    name: as the published table calls it.
    form: which weights, one of `FORMS`.
    greedy: draft the likeliest token; else draw it from q.
    published: accept length of GLM-5.2 (blog; 7 draft steps).
  """

  name: str
  form: str
  greedy: bool
  published: float

  @property
  def options(self) -> DraftOptions:
    """How the row drafts."""
    share = self.form != 'unshared'
    return DraftOptions(share, share, greedy=self.greedy)


ROWS = (
  AblationRow('baseline MTP', 'unshared', True, 4.56),
  AblationRow('+ IndexShare + KVShare', 'shared', True, 5.10),
  AblationRow('+ rejection sampling', 'shared', False, 5.29),
  AblationRow('+ end-to-end TV loss', 'shared_tv', False, 5.47),
)


def form_config(config: TrainConfig, form: str, seed: int) -> TrainConfig:
  """The recipe of one run: only the form and the seed differ."""
  return override(config, [*FORMS[form], f'seed={seed}'])


def held_out_prompts(
  file: TokenFile, count: int, length: int, room: int
) -> list[list[int]]:
  """Prompts of `length` tokens, spread over documents that go on after it.

  Args:
    file: held-out tokens.
    count: of prompts.
    length: tokens of each; more than top-k, or the index is idle.
    room: tokens that the document must have left.

  Raises:
    ValueError: too few documents are long enough.
  """
  window = length + room
  batches = TokenBatches(file, batch_size=1, window=-(-window // 64) * 64)
  prompts = []
  for index in range(batches.num_windows):
    some = batches.windows([index])
    if some.segment_ids[0, : window + 1].min() == 1 == some.segment_ids.max():
      prompts.append(some.tokens[0, :length].tolist())
  if len(prompts) < count:
    raise ValueError(
      f'{file.path} has {len(prompts)} windows of {window} tokens of one '
      f'document, {count} are needed: shorten the prompts'
    )
  step = len(prompts) / count
  return [prompts[int(i * step)] for i in range(count)]


def measure(
  model: Model,
  prompts: Sequence[Sequence[int]],
  options: DraftOptions,
  *,
  max_new_tokens: int = 128,
  num_drafts: int = 7,
  seed: int = 0,
  block_bytes: int = 64 << 20,
) -> dict[str, Any]:
  """Accept lengths of one drafter at temperature 1.

  Args:
    model: trunk and drafter.
    prompts: token ids.
    options: how it drafts.
    max_new_tokens: continued by so many, end tokens ignored.
    num_drafts: of a round.
    seed: of the sampling.
    block_bytes: see `LocalPlan`.

  Returns:
    'accept_length', 'accept_length_with_bonus', 'acceptance' (of each draft
    position, given that the ones before it stood), 'rounds'.
  """
  out = generate(
    model,
    prompts,
    max_new_tokens=max_new_tokens,
    temperature=1.0,
    seed=seed,
    eos_token_ids=(),
    num_speculative_tokens=num_drafts,
    draft_options=options,
    plan=LocalPlan(block_bytes=block_bytes),
    prefill_chunk=_PREFILL_ROWS,
  ).drafts
  before = (out.drafted[0], *out.accepted[:-1])
  return {
    'accept_length': out.accept_length,
    'accept_length_with_bonus': out.accept_length_with_bonus,
    'acceptance': [a / max(b, 1) for a, b in zip(out.accepted, before)],
    'rounds': out.rounds,
  }


def summarise(
  measured: Mapping[tuple[str, int], Mapping[str, Any]],
) -> list[dict[str, Any]]:
  """The table: mean and spread over seeds.

  Args:
    measured: (row name, seed) -> what `measure` returned.

  Returns:
    A dict a row: 'name', 'seeds', mean and standard deviation of both accept
    lengths, their gains over the first row, and the published length (its
    counting is not given) and gain.
  """
  rows = []
  for row in ROWS:
    runs = [v for (name, _), v in sorted(measured.items()) if name == row.name]
    if not runs:
      continue
    line = {'name': row.name, 'form': row.form, 'seeds': len(runs)}
    for key in ('accept_length', 'accept_length_with_bonus'):
      values = [run[key] for run in runs]
      line[key] = statistics.mean(values)
      line[f'{key}_stdev'] = (
        statistics.stdev(values) if len(values) > 1 else None
      )
    steps = zip(*(run['acceptance'] for run in runs))
    line['acceptance'] = [statistics.mean(step) for step in steps]
    line['published'] = row.published
    line['published_gain'] = row.published / ROWS[0].published - 1
    rows.append(line)
  first = rows[0] if rows and rows[0]['name'] == ROWS[0].name else None
  for line in rows:
    for key in ('accept_length', 'accept_length_with_bonus'):
      line[f'{key}_gain'] = line[key] / first[key] - 1 if first else None
  return rows
