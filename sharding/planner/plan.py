"""What a compiled step says about a slice: the planner's answer.

Figures of one device come from the compiler (`worker.py`), those of the model
from the accountant. A chip is judged on its devices together; all devices run
the same program, so the worst one is any.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from glm_jax.cache import cache_dtype
from sharding import accountant
from sharding.chips import Chip, chip_named
from sharding.planner.request import PlanRequest
from sharding.planner.topology import num_chips, num_devices

EVIDENCE = 'compiled, not run'


@dataclasses.dataclass(frozen=True)
class PodPlan:
  """One step on one slice.

  Attributes:
    request: what was asked.
    measured: what the worker read from the compiled step.
  """

  request: PlanRequest
  measured: dict[str, Any]

  @property
  def chip(self) -> Chip:
    """The generation."""
    return chip_named(self.request.topology)

  @property
  def hbm_bytes_per_chip(self) -> int:
    """Memory that the step needs of a chip, all its devices together."""
    return self.measured['device_bytes']['total'] * self.chip.devices_per_chip

  @property
  def fits(self) -> bool:
    """Whether the compiler agrees and a chip has the memory."""
    compiles = self.measured['device_bytes']['fits_compiler']
    return compiles and self.hbm_bytes_per_chip <= self.chip.limit_bytes

  @property
  def roofline_seconds(self) -> float:
    """Least time of the compiled step: the slower of arithmetic and HBM."""
    return max(
      self.measured['compute_seconds'], self.measured['memory_seconds']
    )

  @property
  def exposed_seconds(self) -> float:
    """Time of transfers that no compute covers, at a link's bandwidth."""
    return sum(c['exposed_seconds'] for c in self.measured['collectives'])

  @functools.cached_property
  def fetches(self) -> list[dict[str, Any]]:
    """Transfers that bring cached rows from other ranks."""
    return [t for t in self.measured['transfers'] if t['is_fetch']]

  def count_fetches(self, hidden: bool) -> int:
    """Fetches of one pass that compute does, or does not, hide."""
    counts = (t['times'] for t in self.fetches if t['hidden'] == hidden)
    return round(sum(counts))

  @property
  def blocking_collectives_per_layer(self) -> float:
    """Collectives that nothing runs beside, a trunk layer."""
    blocking = sum(
      c['count'] for c in self.measured['collectives'] if not c['asynchronous']
    )
    return blocking / self.request.config.num_layers

  @property
  def model_flops(self) -> accountant.Flops:
    """FLOPs of the step by the formula, all sequences, drafter included."""
    r, config = self.request, self.request.config
    if r.step == 'verify':
      one = accountant.round_flops(config, r.context, r.num_speculative_tokens)
      return one * r.batch
    if r.step == 'decode':
      return accountant.token_flops(config, r.context) * r.batch
    if r.step == 'train':
      # Backward costs two forwards.
      rows = accountant.rows_flops(config, 0, r.context)
      return rows * (3 * r.batch)
    if r.step == 'serve':
      return self._serve_flops()
    rows = r.chunk // r.batch
    first = max(r.context - rows, 0)
    total = accountant.rows_flops(config, first, rows, head=False)
    if config.mtp.num_layers:
      total += accountant.rows_flops(
        config, first, rows, head=False, drafter=True
      )
    return total * r.batch

  def _serve_flops(self) -> accountant.Flops:
    """Decoding requests, and one request's prompt rows beside them."""
    decoding = dataclasses.replace(
      self.request,
      step='verify' if self.request.num_speculative_tokens else 'decode',
      chunk=None,
    )
    total = dataclasses.replace(self, request=decoding).model_flops
    if not self.request.chunk:
      return total
    prompt = dataclasses.replace(self.request, step='prefill', batch=1)
    return total + dataclasses.replace(self, request=prompt).model_flops

  def flops_per_token(self, counting: str = 'absorbed') -> float:
    """Trunk FLOPs of the token at the end of the context."""
    r = self.request
    return accountant.token_flops(
      r.config, r.context, counting=counting, head=r.step != 'prefill'
    ).total

  @property
  def prefill_seconds_lower_bound(self) -> float:
    """Least time to prefill every sequence's whole context.

    Arithmetic at peak on all chips; of a prefill step, also the links' time
    for the fetches of every chunk, if that is longer.
    """
    r = self.request
    total = accountant.prefill_flops(r.config, r.context)
    if r.config.mtp.num_layers:
      total += accountant.prefill_flops(r.config, r.context, drafter=True)
    chips = num_chips(r.topology)
    bound = accountant.roofline_seconds(
      total.total * r.batch, 0, self.chip, chips
    )
    if r.step != 'prefill':
      return bound
    chunks = math.ceil(r.batch * r.context / r.chunk)
    moved = sum(t['seconds'] * t['times'] for t in self.fetches)
    # Shapes are static: every chunk fetches whole layers, full or not.
    return max(bound, moved * chunks)

  @property
  def smallest_hiding_chunk(self) -> int | None:
    """Rows of a prefill step whose compute hides every fetch but the first.

    Compute inside each fetch's window grows with the rows. None for other
    steps, without fetches, or where some fetch has no window at all.
    """
    if self.request.step != 'prefill' or not self.fetches:
      return None
    ratios = []
    for fetch in self.fetches:
      if not fetch['asynchronous'] or not fetch['window_seconds']:
        ratios += [math.inf] * max(round(fetch['times']), 1)
      else:
        ratio = fetch['seconds'] / fetch['window_seconds']
        ratios += [ratio] * max(round(fetch['times']), 1)
    # The first layer's fetch has nothing before it to hide behind.
    worst = sorted(ratios)[-2] if len(ratios) > 1 else 0
    if math.isinf(worst):
      return None
    return math.ceil(self.request.chunk * worst)

  def _by_origin(self) -> list[dict[str, Any]]:
    """Transfers that come from the same place in the program, together."""
    keys = ('kind', 'op_name', 'group', 'asynchronous', 'hidden', 'is_fetch')
    groups: dict[tuple, dict[str, Any]] = {}
    for move in self.measured['transfers']:
      key = tuple(move[k] for k in keys)
      total = groups.setdefault(
        key, dict(zip(keys, key)) | {'count': 0.0, 'bytes': 0.0, 'seconds': 0.0}
      )
      total['count'] += move['times']
      total['bytes'] += move['times'] * move['bytes']
      total['seconds'] += move['times'] * move['seconds']
    return sorted(groups.values(), key=lambda g: -g['bytes'])

  def to_json(self) -> dict[str, Any]:
    """Every figure; keys of design section 8 first."""
    r, m = self.request, self.measured
    device, per_chip = m['device_bytes'], self.chip.devices_per_chip
    options = dataclasses.asdict(r)
    options.pop('config')
    options['mesh'] = str(r.mesh)
    options['kv_cache_dtype'] = cache_dtype(r.config, r.kv_cache_dtype)
    return {
      'fits': self.fits,
      'hbm_bytes_per_chip': self.hbm_bytes_per_chip,
      'hbm_limit_bytes': self.chip.limit_bytes,
      'devices_per_chip': per_chip,
      'flops_per_token': self.flops_per_token(),
      'roofline_seconds': self.roofline_seconds,
      'prefill_seconds_lower_bound': self.prefill_seconds_lower_bound,
      'fetches_hidden': self.count_fetches(True),
      'fetches_exposed': self.count_fetches(False),
      'smallest_hiding_chunk': self.smallest_hiding_chunk,
      'evidence': EVIDENCE,
      'chips': num_chips(r.topology),
      'devices': num_devices(r.topology),
      'headroom_bytes_per_chip': self.chip.limit_bytes
      - self.hbm_bytes_per_chip,
      'chip_bytes': {
        k: v * per_chip for k, v in device.items() if not isinstance(v, bool)
      },
      'device_bytes': device,
      'movement': m['movement'],
      'slot_bytes_per_device': m['slot_bytes'],
      'flops_per_token_no_core': self.flops_per_token('no_core'),
      'model_flops_per_step': self.model_flops.total,
      'executed_flops_per_chip': m['flops'] * per_chip,
      'hbm_traffic_bytes_per_chip': m['bytes'] * per_chip,
      'compute_seconds': m['compute_seconds'],
      'memory_seconds': m['memory_seconds'],
      'exposed_transfer_seconds': self.exposed_seconds,
      'collectives': m['collectives'],
      'blocking_collectives_per_layer': self.blocking_collectives_per_layer,
      'transfers': self._by_origin(),
      'operations': m['operations'],
      'loops_assumed': m['loops_assumed'],
      'loops_unknown': m['loops_unknown'],
      'kernels_without_cost': m['kernels_without_cost'],
      'seconds_to_compile': m['seconds_to_compile'],
      'host_bytes_to_compile': m.get('host_bytes'),
      'request': options,
    }
