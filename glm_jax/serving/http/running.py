"""An accepted request while it runs: steps, measurements, the end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence

from glm_jax.serving.http.choices import Choice, Step
from glm_jax.serving.http.errors import ApiError
from glm_jax.serving.http.generation import Generation
from glm_jax.serving.http.service import Service
from glm_jax.serving.request import Request

_LOG = logging.getLogger(__name__)


class Running:
  """The sequences of one HTTP request with their choices.

  Leaving the context aborts whatever has not finished.

  Attributes:
    choices: one a request of the engine.
  """

  def __init__(
    self,
    service: Service,
    response_id: str,
    requests: Sequence[Request],
    choices: Sequence[Choice],
  ):
    self._service = service
    self._id = response_id
    self._requests = requests
    self.choices = choices
    self._generation = Generation(service.engine, requests)
    self._metrics = [service.metrics.sequence() for _ in requests]

  async def __aenter__(self) -> Running:
    ids = tuple(request.request_id for request in self._requests)
    self._service.running[self._id] = ids
    await self._generation.__aenter__()
    return self

  async def __aexit__(self, *error):
    try:
      await self._generation.__aexit__(*error)
    finally:
      self._service.running.pop(self._id, None)
      for metrics, choice in zip(self._metrics, self.choices):
        metrics.finish(choice.output, choice.finish_reason or 'abort')
      _LOG.info(
        '%s: %d prompt tokens, %d new, %s',
        self._id,
        sum(len(request.prompt_ids) for request in self._requests),
        sum(choice.num_ids for choice in self.choices),
        ', '.join(choice.finish_reason or 'abort' for choice in self.choices),
      )

  async def accepted(self):
    """Returns once no refusal is to be expected; see `Generation`."""
    await self._generation.accepted()

  async def steps(self) -> AsyncIterator[tuple[int, Step]]:
    """Yields (index of the choice, step) until all have finished.

    Raises:
      ApiError: the engine refused or failed, a deadline has passed, or a
        grammar had to be given up.
    """
    async for index, output in self._generation.outputs():
      step = self.choices[index].take(output)
      self._metrics[index].tokens(len(step.ids))
      if step.cut:
        self._generation.end(index)
      if step.finish_reason is not None:
        self._check_end(index, step.finish_reason)
      yield index, step

  def _check_end(self, index: int, reason: str):
    choice, request = self.choices[index], self._requests[index]
    self._metrics[index].finish(choice.output, reason)
    if reason == 'deadline':
      raise ApiError(
        408,
        f'the deadline passed after {choice.num_ids} new tokens',
        code='deadline_exceeded',
      )
    if reason == 'error':
      raise ApiError(500, choice.output.error or 'failed', code='engine_failed')
    failure = getattr(request.token_filter, 'error', None)
    if failure is not None:
      raise ApiError(
        400,
        f'the schema was too complex to follow: {failure:.300}; simplify it',
        param='response_format',
      )
