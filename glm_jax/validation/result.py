"""The verdict of a validation, and the table a person reads."""

from __future__ import annotations

import dataclasses

from glm_jax.validation.compare import LayerResult, LogitsResult, Tolerance


@dataclasses.dataclass(frozen=True)
class Parting:
  """Where two runs part first: a layer (None for logits) and a tensor."""

  layer: int | None
  tensor: str

  def __str__(self) -> str:
    where = '' if self.layer is None else f'layer {self.layer}: '
    return f'{where}{self.tensor}'


@dataclasses.dataclass(frozen=True)
class Result:
  """What `validate` returns; figures are None where nothing was compared.

  Attributes:
    passed: everything compared is within tolerance.
    max_abs_logit_error: largest absolute difference of two logits.
    max_abs_draft_logit_error: the same for the drafter's steps, with sharing
      and without; None without a drafter.
    argmax_agreement: share of positions with the same largest logit.
    selected_set_agreement: share of (full layer, row) pairs that select the
      same keys, up to near ties at the k-th score.
    selected_ties: pairs that needed the tie rule; the run went on with the
      reference's selection there.
    expert_ties: rows whose chosen experts differ by a near tie.
    parted: where the two part first, None if they do not.
    layers: how each layer compares.
    tolerance: what was allowed.
    num_tokens: positions run.
    record: directory of the record written, if any.
  """

  passed: bool
  max_abs_logit_error: float | None
  max_abs_draft_logit_error: float | None
  argmax_agreement: float | None
  selected_set_agreement: float | None
  selected_ties: int
  expert_ties: int
  parted: Parting | None
  layers: tuple[LayerResult, ...]
  tolerance: Tolerance
  num_tokens: int
  record: str | None

  @property
  def verdict(self) -> str:
    """'passed', or where the two part."""
    return 'passed' if self.passed else f'parts at {self.parted}'

  def table(self) -> str:
    """One line a layer, then the verdict."""
    if not self.layers:
      return f'recorded {self.num_tokens} tokens in {self.record}'
    head = ('layer', 'select', 'attention', 'mlp', 'hidden', 'verdict')
    lines = [' '.join(f'{name:>9}' for name in head)]
    for r in self.layers:
      share = r.selected_agreement
      cells = [str(r.layer), '-' if share is None else f'{share:.6f}']
      cells += [
        f'{r.errors[name]:.1e}' for name in ('attention', 'mlp', 'hidden')
      ]
      cells.append('ok' if r.parted is None else r.parted)
      lines.append(' '.join(f'{cell:>9}' for cell in cells))
    lines += ['', *self._summary()]
    return '\n'.join(lines)

  def _summary(self) -> list[str]:
    lines = [
      f'tensors: largest error in a row over its largest value, allowed '
      f'{self.tolerance.layer:g}',
    ]
    if self.selected_set_agreement is not None:
      lines.append(
        f'selected sets agree: {self.selected_set_agreement:.6f} '
        f'({self.selected_ties} rows by a near tie; experts: '
        f'{self.expert_ties})'
      )
    if self.max_abs_logit_error is not None:
      lines += [
        f'largest logit error: {self.max_abs_logit_error:.3e}',
        f'argmax agreement: {self.argmax_agreement:.6f}',
      ]
    if self.max_abs_draft_logit_error is not None:
      error = self.max_abs_draft_logit_error
      lines.append(f'largest draft logit error: {error:.3e}')
    verdict = 'passed' if self.passed else f'FAILED: they part at {self.parted}'
    return [*lines, verdict]


def make_result(
  layers: list[LayerResult],
  logits: LogitsResult | None,
  drafts: LogitsResult | None,
  tolerance: Tolerance,
  num_tokens: int,
  record: str | None,
) -> Result:
  """Sums up comparisons; without any, the run was only recorded."""
  parted = next((Parting(r.layer, r.parted) for r in layers if r.parted), None)
  if parted is None and logits is not None and not logits.passed:
    parted = Parting(None, 'logits')
  if parted is None and drafts is not None and not drafts.passed:
    parted = Parting(None, 'draft logits')
  shares = [
    r.selected_agreement for r in layers if r.selected_agreement is not None
  ]
  return Result(
    passed=parted is None,
    max_abs_logit_error=None if logits is None else logits.max_abs_error,
    max_abs_draft_logit_error=None if drafts is None else drafts.max_abs_error,
    argmax_agreement=None if logits is None else logits.argmax_agreement,
    selected_set_agreement=sum(shares) / len(shares) if shares else None,
    selected_ties=sum(r.selected_ties for r in layers),
    expert_ties=sum(r.expert_ties for r in layers),
    parted=parted,
    layers=tuple(layers),
    tolerance=tolerance,
    num_tokens=num_tokens,
    record=record,
  )
