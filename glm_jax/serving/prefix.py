"""The prefix index: which page holds the rows of which tokens.

A full page is known by the hash of all tokens up to its end, chained page by
page; the last, partial page of a sequence hangs under its parent's hash too.
A prompt that leaves the known tokens inside a page copies that page and goes
on in the copy.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from pallas_kernels.tiling import PAGE


@dataclasses.dataclass(frozen=True)
class Entry:
  """One page on the device.

  Attributes:
    key: chained hash up to the page's last token.
    parent: key of the page before.
    tokens: [1 .. 64] int32 tokens whose rows, drafter's included, are there.
    page: where.
    hidden_row: row of the page whose hidden state the page keeps.
  """

  key: bytes
  parent: bytes
  tokens: np.ndarray
  page: int
  hidden_row: int


@dataclasses.dataclass(frozen=True)
class Match:
  """What is known of a prompt.

  Attributes:
    pages: an entry for each full page on the device, None for one that a
      lower tier has.
    tail: a page on the device that goes on with the same tokens for a while;
      only below pages that are all on the device.
    common: tokens of the tail that agree.
  """

  pages: tuple[Entry | None, ...]
  tail: Entry | None
  common: int


def chain(
  root: bytes, ids: Sequence[int], known: Sequence[bytes] = ()
) -> list[bytes]:
  """Keys of all full pages.

  Args:
    root: what the rows depend on besides the tokens (model, dtypes).
    ids: n tokens.
    known: keys of the first pages, if already computed.

  Returns:
    n // 64 keys of 16 bytes.
  """
  keys = list(known)
  parent = keys[-1] if keys else root
  for i in range(len(keys), len(ids) // PAGE):
    tokens = np.array(ids[i * PAGE : (i + 1) * PAGE], np.int32)
    parent = page_key(parent, tokens.data)
    keys.append(parent)
  return keys


def page_key(parent: bytes, data) -> bytes:
  """The key of a page from its parent's and the bytes of its tokens."""
  return hashlib.blake2b(data, digest_size=16, key=parent).digest()


class PrefixIndex:
  """Pages on the device by their tokens."""

  def __init__(self, root: bytes = b'root'):
    self.root = root
    self._full: dict[bytes, Entry] = {}
    self._children: dict[bytes, dict[bytes, Entry]] = {}
    self._by_page: dict[int, Entry] = {}

  def __len__(self) -> int:
    return len(self._by_page)

  def of_page(self, page: int) -> Entry | None:
    """The entry of a page, if it has one."""
    return self._by_page.get(page)

  def get(self, key: bytes) -> Entry | None:
    """The full page with this key, if it is on the device."""
    return self._full.get(key)

  def match(
    self,
    ids: Sequence[int],
    keys: list[bytes],
    elsewhere: Callable[[bytes], bool] = lambda key: False,
  ) -> Match:
    """The longest known prefix.

    Args:
      ids: n tokens.
      keys: their `chain`.
      elsewhere: whether a lower tier has a page.

    Returns:
      The match.
    """
    pages: list[Entry | None] = []
    for key in keys:
      entry = self._full.get(key)
      if entry is None and not elsewhere(key):
        break
      pages.append(entry)
    if None in pages:
      return Match(tuple(pages), None, 0)
    parent = keys[len(pages) - 1] if pages else self.root
    rest = ids[len(pages) * PAGE : (len(pages) + 1) * PAGE]
    rest = np.array(rest, np.int32)
    tail, common = None, 0
    for entry in self._children.get(parent, {}).values():
      width = min(len(rest), len(entry.tokens))
      differs = np.flatnonzero(rest[:width] != entry.tokens[:width])
      agree = int(differs[0]) if len(differs) else width
      if agree > common:
        tail, common = entry, agree
    return Match(tuple(pages), tail, common)

  def insert(
    self, parent: bytes, tokens: np.ndarray, page: int, hidden_row: int
  ) -> Entry:
    """Makes a page known.

    Args:
      parent: key of the page before, or the root.
      tokens: [1 .. 64] int32 tokens of the page.
      page: where their rows are.
      hidden_row: row whose hidden state the page keeps.

    Returns:
      The entry; an older one of another page, if the same tokens are known.
    """
    tokens = np.array(tokens, np.int32)
    key = page_key(parent, tokens.data)
    siblings = self._children.setdefault(parent, {})
    if key in siblings:
      return siblings[key]
    if page in self._by_page:
      raise ValueError(f'page {page} is known under other tokens')
    entry = Entry(key, parent, tokens, page, hidden_row)
    siblings[key] = entry
    self._by_page[page] = entry
    if len(tokens) == PAGE:
      self._full[key] = entry
    return entry

  def remove(self, page: int) -> Entry | None:
    """Forgets a page; returns its entry."""
    entry = self._by_page.pop(page, None)
    if entry is None:
      return None
    siblings = self._children[entry.parent]
    del siblings[entry.key]
    if not siblings:
      del self._children[entry.parent]
    self._full.pop(entry.key, None)
    return entry

  def pages(self) -> list[int]:
    """Every known page."""
    return list(self._by_page)
