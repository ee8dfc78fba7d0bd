"""Pages and their content over all tiers: find, hold, keep, move.

The store joins the page pool, the prefix index and the lower tiers. Moves on
the device (`device` below) are dispatched at once and in order, so a page
may be copied out, handed on and overwritten without waiting: whatever was
dispatched before still reads the old content (known faults 44, 45).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np

from glm_jax.serving.pages import GROUP, PagePool
from glm_jax.serving.prefix import Entry, PrefixIndex, chain
from glm_jax.serving.sequence import Sequence, State
from pallas_kernels.tiling import PAGE


class Device(Protocol):
  """Moves of whole page records, dispatched in order."""

  def copy(self, source: int, target: int) -> None:
    """Copies a page."""

  def extract(self, pages: Seq[int]) -> list[Any]:
    """Records of pages, on their way to host memory."""

  def insert(self, pages: Seq[int], records: Seq[Any]) -> None:
    """Fills pages from records on the device."""

  def poison(self, page: int) -> None:
    """Fills a page with NaN."""

  def set_row(self, slot: int, pages: list[int]) -> None:
    """Sets the page table of a slot."""

  def set_entries(self, entries: list[tuple[int, int, int]]) -> None:
    """Sets (slot, block, page) in the page table."""


@dataclasses.dataclass(frozen=True)
class Hit:
  """How much of a sequence is cached, and where it goes on.

  Attributes:
    pages: leading full pages; None for one that a lower tier has.
    source: a page to copy, whose copy the sequence writes on.
    tokens: tokens whose rows are there.
    start: first row to run, at most one row before `tokens` and before the
      end.
  """

  pages: tuple[Entry | None, ...] = ()
  source: Entry | None = None
  tokens: int = 0
  start: int = 0

  def without_copy(self) -> Hit:
    """The same on whole pages only."""
    tokens = len(self.pages) * PAGE
    return Hit(self.pages, None, tokens, tokens)


class PageStore:
  """All pages of one engine.

  Attributes:
    pool: physical pages.
    index: pages on the device by their tokens.
    tier: the host tier, or None.
    changes: (slot, block, page) that the page table does not have yet.
    counts: hits and misses in tokens, evictions, restores, copies.
  """

  def __init__(
    self,
    num_pages: int,
    device: Device,
    *,
    root: bytes = b'root',
    tier=None,
    with_drafter: bool = False,
    caching: bool = True,
    debug: bool = False,
  ):
    self.pool = PagePool(num_pages, self._evicted, self._freed)
    self.index = PrefixIndex(root)
    self.tier = tier
    self.changes: list[tuple[int, int, int]] = []
    self.counts = dict.fromkeys(
      ('query_tokens', 'hit_tokens', 'restored_pages', 'evicted_pages',
       'copied_pages', 'shortened_hits'), 0
    )  # fmt: skip
    self._device = device
    self._with_drafter = with_drafter
    self._caching = caching
    self._debug = debug
    self._reserved = 0
    self._leaving: list[tuple[bytes, int]] = []  # (key, page) of this call

  @property
  def unplanned(self) -> int:
    """Pages that no running sequence counts on."""
    return self.pool.available - self._reserved

  def find(self, seq: Sequence) -> Hit:
    """What is known of a sequence's tokens."""
    if not self._caching:
      return Hit()
    ids, n = seq.ids, len(seq.ids)
    seq.keys = chain(self.index.root, ids, seq.keys)
    below = self.tier.has if self.tier is not None else lambda key: False
    match = self.index.match(ids, seq.keys, below)
    pages, source = match.pages, match.tail
    tokens = len(pages) * PAGE + match.common
    if tokens >= n and source is None:
      # The last row must run, its logits are wanted: in a copy of its page.
      pages, source = pages[:-1], pages[-1]
      if source is None:
        tokens = n - PAGE
    start = min(tokens, n - 1)
    if self._with_drafter and source is not None and start == tokens:
      # The next drafter row needs the hidden state of the row before it.
      if source.hidden_row != (tokens - 1) % PAGE:
        start -= 1
    return Hit(pages, source, tokens, start)

  def shortage(self, seq: Sequence, hit: Hit, share: float) -> int:
    """Pages missing to admit a sequence; at most 0 if it fits."""
    held = sum(self.pool.references(e.page) > 0 for e in hit.pages if e)
    need = seq.plan_pages(share) + (hit.source is not None) - held
    return need - self.unplanned

  def attach(self, seq: Sequence, hit: Hit, share: float) -> None:
    """Gives a sequence its cached pages; `shortage` says that it fits.

    Sets its pages, `computed`, `draft_from` and, for pages of a lower tier,
    `restores`.
    """
    # Before any page is taken, which may push another one, or a record, out.
    for entry in (*hit.pages, hit.source):
      if entry is not None:
        self.pool.share(entry.page)
    for block, entry in enumerate(hit.pages):
      if entry is None:
        seq.restores.append((block, seq.keys[block]))
        self.tier.pin(seq.keys[block])
    for entry in hit.pages:
      seq.pages.append(self._take() if entry is None else entry.page)
    own = None if hit.source is None else self._take()
    self._send_down()
    if hit.source is not None:
      # Copy on write: the sequence goes on in its own copy of the page.
      self._device.copy(hit.source.page, own)
      self.pool.release(hit.source.page)
      seq.pages.append(own)
      self.counts['copied_pages'] += 1
    seq.computed, seq.draft_from = hit.start, max(hit.tokens, hit.start)
    seq.registered = hit.start // PAGE
    seq.planned = max(seq.plan_pages(share), len(seq.pages))
    self._reserved += seq.planned - len(seq.pages)
    self._device.set_row(seq.slot, seq.pages)
    if not seq.admitted:
      seq.cached_tokens = hit.start
      self.counts['query_tokens'] += seq.prompt_tokens
      self.counts['hit_tokens'] += seq.cached_tokens

  def grow(self, seq: Sequence, tokens: int) -> bool:
    """Makes room for the first `tokens` tokens; False if there is none."""
    while len(seq.pages) * PAGE < tokens:
      page = self.pool.take()
      if page is None:
        break
      if len(seq.pages) < seq.planned:
        self._reserved -= 1
      self.changes.append((seq.slot, len(seq.pages), page))
      seq.pages.append(page)
    self._send_down()
    return len(seq.pages) * PAGE >= tokens

  def register(self, seq: Sequence) -> None:
    """Makes a sequence's complete pages known to others."""
    full = seq.complete(self._with_drafter) // PAGE
    if not self._caching or full <= seq.registered:
      return
    first = seq.registered
    for block in range(first, full):
      tokens = np.array(seq.ids[block * PAGE : (block + 1) * PAGE], np.int32)
      parent = seq.keys[block - 1] if block else self.index.root
      page = seq.pages[block]
      entry = self.index.insert(parent, tokens, page, PAGE - 1)
      if len(seq.keys) == block:
        seq.keys.append(entry.key)
      if self.tier is not None:
        self.tier.doubled(entry.key)
      if entry.page == page:
        self.pool.keep(page)
      else:  # computed twice at the same time: go on with the older one
        self.pool.share(entry.page)
        self.pool.release(page)
        seq.pages[block] = entry.page
        self.changes.append((seq.slot, block, entry.page))
    seq.registered = full

  def release(self, seq: Sequence) -> None:
    """Takes a sequence's pages back; complete rows stay known."""
    if seq.state is not State.RESTORING:
      self.register(seq)
      self._register_tail(seq)
    for _, key in [*seq.restores, *(t[:2] for t in seq.transfers)]:
      self.tier.unpin(key)
    seq.restores.clear()
    seq.transfers.clear()
    # Its slot may have another owner before the next step.
    self.changes = [c for c in self.changes if c[0] != seq.slot]
    self._reserved -= max(seq.planned - len(seq.pages), 0)
    for page in reversed(seq.pages):
      self.pool.release(page)
    seq.pages.clear()
    seq.registered = seq.computed = seq.planned = 0

  def _register_tail(self, seq: Sequence) -> None:
    complete = seq.complete(self._with_drafter)
    block, rows = divmod(complete, PAGE)
    if not self._caching or not rows or block != seq.registered:
      return
    page = seq.pages[block]
    if self.pool.references(page) > 1 or self.index.of_page(page):
      return
    hidden = self._hidden_position(seq) - block * PAGE
    parent = seq.keys[block - 1] if block else self.index.root
    tokens = np.array(seq.ids[block * PAGE : complete], np.int32)
    entry = self.index.insert(parent, tokens, page, hidden)
    if entry.page == page:
      self.pool.keep(page)

  def _hidden_position(self, seq: Sequence) -> int:
    """Whose hidden state the newest page keeps; before 0 if that is open."""
    if seq.state is State.DECODE:
      # Steps in flight may replace it.
      is_open = seq.in_flight and not seq.settled
      return -PAGE * len(seq.pages) if is_open else len(seq.ids) - 2
    ran = seq.computed > seq.draft_from
    return seq.computed - 1 if ran else -PAGE * len(seq.pages)

  def restore(self, seq: Sequence, window: int, *, wait: bool) -> bool:
    """Moves a sequence's pages up from the lower tier, a few at a time.

    Args:
      seq: in state RESTORING.
      window: transfers under way at most.
      wait: take transfers that are not there yet; the device waits.

    Returns:
      Whether nothing is left to bring. A page that cannot be had shortens
      the hit to what lies before it.
    """
    while seq.restores or seq.transfers:
      if len(seq.transfers) <= window // 2:  # so that many go together
        self._fetch(seq, window - len(seq.transfers))
      blocks, records, lost = [], [], False
      for block, _, transfer in seq.transfers:
        if transfer is not None and not (wait or transfer.ready()):
          break
        record = None if transfer is None else transfer.result()
        lost = record is None
        if lost:
          break
        blocks.append(block)
        records.append(record)
      self._restored(seq, blocks, records)
      if lost:
        self._shorten(seq, block)
        return True
      if not blocks:
        return False
    return True

  def _fetch(self, seq: Sequence, most: int) -> None:
    """Starts transfers of a sequence's next pages."""
    count = min(most, len(seq.restores))
    some = [seq.restores.popleft() for _ in range(count)]
    transfers = self.tier.fetch([key for _, key in some])
    for (block, key), transfer in zip(some, transfers, strict=True):
      seq.transfers.append((block, key, transfer))

  def _restored(self, seq: Sequence, blocks: list[int], records) -> None:
    """Fills pages and makes them known; theirs are the first transfers."""
    self._device.insert([seq.pages[block] for block in blocks], records)
    for block, (_, key, _) in zip(blocks, seq.transfers):
      self.tier.unpin(key)
      tokens = np.array(seq.ids[block * PAGE : (block + 1) * PAGE], np.int32)
      parent = seq.keys[block - 1] if block else self.index.root
      page = seq.pages[block]
      entry = self.index.insert(parent, tokens, page, PAGE - 1)
      self.tier.doubled(entry.key)
      if entry.page == page:
        self.pool.keep(page)
    del seq.transfers[: len(blocks)]
    self.counts['restored_pages'] += len(blocks)

  def _shorten(self, seq: Sequence, block: int) -> None:
    for _, key in [*(t[:2] for t in seq.transfers), *seq.restores]:
      self.tier.unpin(key)
    seq.transfers.clear()
    seq.restores.clear()
    self.counts['shortened_hits'] += 1
    lost = seq.computed - block * PAGE
    seq.computed = seq.draft_from = block * PAGE
    seq.registered = block
    if not seq.admitted:
      self.counts['hit_tokens'] -= lost
      seq.cached_tokens -= lost
    # What lies above may be shared and must not be written.
    self._reserved += len(seq.pages) - block
    for page in reversed(seq.pages[block:]):
      self.pool.release(page)
    del seq.pages[block:]
    self._device.set_row(seq.slot, seq.pages)

  def offload(self, most: int, *, replace: bool = False) -> None:
    """Copies idle pages down before their place is needed, oldest first.

    Args:
      most: pages at most.
      replace: even where another record must go for them (before the end);
        else only what the tier has room for.
    """
    if self.tier is None:
      return
    if not replace:
      most = min(most, self.tier.room)
    idle = map(self.index.of_page, self.pool.idle_pages())
    new = (
      entry
      for entry in idle
      if len(entry.tokens) == PAGE and not self.tier.has(entry.key)
    )
    self._leaving = [(e.key, e.page) for e in itertools.islice(new, most)]
    keys = [key for key, _ in self._leaving]
    self._send_down()
    if not replace:
      for key in keys:
        self.tier.doubled(key)

  def flush(self) -> None:
    """Forgets every page that no sequence holds, in all tiers."""
    for page in self.index.pages():
      if not self.pool.references(page):
        self.index.remove(page)
        self.pool.forget(page)
    if self.tier is not None:
      self.tier.clear()

  def flush_changes(self) -> None:
    """Brings the device's page table up to date."""
    if self.changes:
      self._device.set_entries(self.changes)
      self.changes = []

  def _take(self) -> int:
    page = self.pool.take()
    if page is None:
      raise RuntimeError('no page left although the plan counted on it')
    return page

  def _evicted(self, page: int) -> None:
    entry = self.index.remove(page)
    self.counts['evicted_pages'] += 1
    if (
      self.tier is not None and entry is not None and len(entry.tokens) == PAGE
    ):
      if self.tier.has(entry.key):
        self.tier.single(entry.key)
      else:
        self._leaving.append((entry.key, page))

  def _send_down(self) -> None:
    """Copies the pages that are leaving, before anything writes to them.

    A group at a time: records beyond the tier's budget are at most a group.
    """
    leaving, self._leaving = self._leaving, []
    for at in range(0, len(leaving), GROUP):
      keys, pages = zip(*leaving[at : at + GROUP])
      for key, record in zip(keys, self._device.extract(pages), strict=True):
        self.tier.put(key, record)

  def _freed(self, page: int) -> None:
    if self._debug:
      self._send_down()  # also where a test takes pages past the store
      self._device.poison(page)
