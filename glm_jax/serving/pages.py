"""Physical pages: reference counts, the free list, idle pages to evict.

A page is one record with one life: latent rows of every layer, index keys,
drafter rows and its last hidden state share one id. It is always in exactly
one of three places:

    free   nobody uses it and its content means nothing
    used   one or more sequences hold it
    idle   no sequence holds it, the prefix index still knows its content;
           evicted in the order in which the pages became idle

A sequence releases its pages deepest first, so a prefix outlives what
continues it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

# Pages of one call that moves many: a call takes the host as long as any.
GROUP = 16


def groups(count: int) -> Iterator[slice]:
  """Cuts pages into groups and what is left into ones: two shapes."""
  whole = count - count % GROUP
  for at in range(0, whole, GROUP):
    yield slice(at, at + GROUP)
  for at in range(whole, count):
    yield slice(at, at + 1)


class PagePool:
  """Pages 0 .. num_pages - 1 of one cache.

  Attributes:
    num_pages: pages in all.
    on_evict: called with an idle page that is about to be reused.
    on_free: called with a page whose content became meaningless.
  """

  def __init__(
    self,
    num_pages: int,
    on_evict: Callable[[int], None] = lambda page: None,
    on_free: Callable[[int], None] = lambda page: None,
  ):
    if num_pages < 1:
      raise ValueError(f'{num_pages=} must be at least 1')
    self.num_pages = num_pages
    self.on_evict = on_evict
    self.on_free = on_free
    self._free = collections.deque(range(num_pages))
    self._references = [0] * num_pages
    self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
    self._kept: set[int] = set()

  @property
  def available(self) -> int:
    """Pages that can be taken now: free and idle ones."""
    return len(self._free) + len(self._idle)

  @property
  def num_free(self) -> int:
    """Pages whose content means nothing."""
    return len(self._free)

  @property
  def num_idle(self) -> int:
    """Pages that only the prefix index knows."""
    return len(self._idle)

  @property
  def num_used(self) -> int:
    """Pages that a sequence holds."""
    return self.num_pages - self.available

  def idle_pages(self) -> list[int]:
    """Idle pages, the next to be evicted first."""
    return list(self._idle)

  def references(self, page: int) -> int:
    """Sequences that hold a page."""
    self._check(page)
    return self._references[page]

  def take(self) -> int | None:
    """A page for one sequence, the longest idle one evicted if need be.

    Returns:
      The page, or None when every page is held.
    """
    if self._free:
      page = self._free.popleft()
    elif self._idle:
      page, _ = self._idle.popitem(last=False)
      self.on_evict(page)
      self._kept.discard(page)
    else:
      return None
    self._references[page] = 1
    return page

  def share(self, page: int) -> None:
    """One more sequence holds a used or idle page."""
    self._check(page)
    if not self._references[page]:
      if page not in self._idle:
        raise ValueError(f'page {page} is free: it cannot be shared')
      del self._idle[page]
    self._references[page] += 1

  def release(self, page: int) -> None:
    """One sequence less holds the page; it becomes idle, or free."""
    self._check(page)
    if not self._references[page]:
      raise ValueError(f'page {page} is released by nobody who holds it')
    self._references[page] -= 1
    if not self._references[page]:
      self._settle(page)

  def keep(self, page: int) -> None:
    """The prefix index knows the page: idle, not free, when released."""
    self._check(page)
    self._kept.add(page)

  def forget(self, page: int) -> None:
    """The prefix index knows the page no more."""
    self._check(page)
    self._kept.discard(page)
    if page in self._idle:
      del self._idle[page]
      self._settle(page)

  def check(self) -> None:
    """Raises `AssertionError` unless every page is in exactly one place."""
    free, idle = set(self._free), set(self._idle)
    used = {p for p in range(self.num_pages) if self._references[p]}
    assert len(free) == len(self._free), 'a page is free twice'
    assert not (free & idle or free & used or idle & used)
    assert len(free) + len(idle) + len(used) == self.num_pages
    assert idle <= self._kept and not (free & self._kept)

  def _settle(self, page: int) -> None:
    if page in self._kept:
      self._idle[page] = None
    else:
      self._free.append(page)
      self.on_free(page)

  def _check(self, page: int) -> None:
    if not 0 <= page < self.num_pages:
      raise ValueError(f'{page=} is not one of {self.num_pages} pages')
