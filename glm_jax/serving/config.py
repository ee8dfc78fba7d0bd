"""What an engine is made with, and the shapes it compiles."""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.tiling import PAGE, cdiv, round_up


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """How one engine runs.

  Attributes:
    max_model_len: tokens of a request, prompt and new, at most.
    num_pages: pages of 64 tokens on the device.
    max_num_seqs: requests that run at once.
    max_num_batched_tokens: rows of one step, drafts included.
    num_speculative_tokens: drafts of a round unless a request says so.
    max_speculative_tokens: most drafts a request may ask for; None for
      `num_speculative_tokens`. Above 0 the drafter's rows are always kept.
    kv_cache_dtype: 'auto', 'bf16', 'f32' or 'fp8'.
    enable_prefix_caching: keep pages of finished requests for others.
    max_queue: requests that wait at most.
    planned_share: share of a request's new tokens that must fit at its
      admission; below 1 running requests may be preempted for memory.
    host_cache_bytes: budget of evicted pages in host memory; 0 for none. It
      adds to the device's pages, less those of requests that come back.
    disk_cache_dir: keeps pages over a restart; None for none.
    disk_cache_bytes: its budget.
    restore_window: pages of one request on their way up at most.
    wait_for_restores: the device waits for pages on their way up; for several
      processes, which must all go on in the same step.
    steps_ahead: steps dispatched before the ids of the oldest are read.
    debug: poison freed pages with NaN, check ids and checksums (slow).
    eos_token_ids: ids that end a request; None for the model config's.
    prefill_rows: prompt rows that steps are compiled for, 0 for steps without
      any; () for derived.
    batch_sizes: decoding requests that steps are compiled for; () for
      derived.
    draft_counts: drafts that steps are compiled for; () for derived.
    context_pages: pages a request that steps are compiled for; () for
      derived.
    seed: of the seeds of requests that bring none.
  """

  max_model_len: int
  num_pages: int
  max_num_seqs: int = 64
  max_num_batched_tokens: int = 512
  num_speculative_tokens: int = 0
  max_speculative_tokens: int | None = None
  kv_cache_dtype: str = 'auto'
  enable_prefix_caching: bool = True
  max_queue: int = 1024
  planned_share: float = 1.0
  host_cache_bytes: int = 0
  disk_cache_dir: str | None = None
  disk_cache_bytes: int = 1 << 34
  restore_window: int = 32
  wait_for_restores: bool = False
  steps_ahead: int = 1
  debug: bool = False
  eos_token_ids: tuple[int, ...] | None = None
  prefill_rows: tuple[int, ...] = ()
  batch_sizes: tuple[int, ...] = ()
  draft_counts: tuple[int, ...] = ()
  context_pages: tuple[int, ...] = ()
  seed: int = 0

  def __post_init__(self):
    rules = (
      ('max_model_len', self.max_model_len >= 2, 'at least 2'),
      ('num_pages', self.num_pages >= 1, 'at least 1'),
      ('max_num_seqs', self.max_num_seqs >= 1, 'at least 1'),
      ('max_num_batched_tokens', self.max_num_batched_tokens >= 8, '8 or more'),
      ('max_queue', self.max_queue >= 1, 'at least 1'),
      ('planned_share', 0 <= self.planned_share <= 1, 'between 0 and 1'),
      ('restore_window', self.restore_window >= 1, 'at least 1'),
      ('steps_ahead', 0 <= self.steps_ahead <= 8, '0 to 8'),
      ('num_speculative_tokens', self.num_speculative_tokens >= 0, '0 or more'),
    )
    for name, good, need in rules:
      if not good:
        raise ValueError(f'{name}={getattr(self, name)} must be {need}')
    if self.disk_cache_dir is not None and not self.host_cache_bytes:
      raise ValueError(
        f'disk_cache_dir={self.disk_cache_dir!r} needs host_cache_bytes: '
        'pages pass through host memory'
      )
    if not self.num_speculative_tokens <= self.most_drafts <= 8:
      raise ValueError(
        f'num_speculative_tokens={self.num_speculative_tokens} and '
        f'max_speculative_tokens={self.max_speculative_tokens} must be 0 to 8, '
        'the first no larger than the second'
      )

  @property
  def most_drafts(self) -> int:
    """Drafts of a round at most, over all requests."""
    most = self.max_speculative_tokens
    return self.num_speculative_tokens if most is None else most

  @property
  def max_blocks(self) -> int:
    """Pages of one request at most."""
    return cdiv(self.max_model_len, PAGE)


@dataclasses.dataclass(frozen=True)
class Buckets:
  """The shapes that are compiled; each dimension ascends.

  Attributes:
    prefill: prompt rows of a step.
    batch: decoding requests.
    drafts: drafts of a round.
    blocks: pages a request.
    finishing: prompts that may end in one step.
  """

  prefill: tuple[int, ...]
  batch: tuple[int, ...]
  drafts: tuple[int, ...]
  blocks: tuple[int, ...]
  finishing: int

  def all(self) -> list[tuple[int, int, int, int]]:
    """Every (prefill, batch, drafts, blocks)."""
    return [
      (p, b, k, n)
      for n in self.blocks
      for p in self.prefill
      for b in self.batch
      for k in self.drafts
    ]

  @staticmethod
  def fit(sizes: tuple[int, ...], need: int) -> int:
    """The smallest size that holds `need`."""
    for size in sizes:
      if size >= need:
        return size
    raise ValueError(f'{need} is beyond the compiled sizes {sizes}')


@functools.cache
def buckets(config: EngineConfig) -> Buckets:
  """The shapes of an engine: few, and closed under what it schedules."""
  most = config.max_num_seqs
  budget = round_up(config.max_num_batched_tokens, 8)
  prefill = config.prefill_rows or (0, round_up(budget // 8, 8), budget)
  batch = config.batch_sizes or (min(8, most), most)
  drafts = config.draft_counts or (
    0,
    config.num_speculative_tokens,
    config.most_drafts,
  )
  blocks = config.context_pages or _powers(16, config.max_blocks, 4)
  ascending = lambda sizes, top: tuple(
    sorted({s for s in sizes if s < top} | {top})
  )
  return Buckets(
    prefill=ascending(prefill, max(prefill)),
    batch=ascending(batch, most),
    drafts=ascending(drafts, config.most_drafts),
    blocks=ascending(blocks, config.max_blocks),
    finishing=min(8, most),
  )


def _powers(first: int, top: int, ratio: int) -> tuple[int, ...]:
  """first, first * ratio, ... below `top`."""
  sizes = []
  while first < top:
    sizes.append(first)
    first *= ratio
  return tuple(sizes)
