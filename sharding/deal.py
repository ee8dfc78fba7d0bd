"""Which rank holds a page, and under which number.

Three kinds of page numbers exist, and a name says which one a variable is:

    page           global: what page tables hold, everywhere and always
    local page     within the pool of the rank that owns it
    gathered page  within a whole layer as an all-gather lays it out: rank
                   after rank, each with its local pages

Pages are dealt like cards: page p goes to rank p mod `outer`. Sequences whose
pages are numbered one after another are so dealt evenly, whatever their
length; any other page table gives the same results, less evenly.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.tiling import PAGE, cdiv


@dataclasses.dataclass(frozen=True)
class Deal:
  """Pages dealt over ranks.

  Attributes:
    outer: ranks a page is dealt over first.
    inner: ranks that share one outer rank's pages: those are dealt on among
      them, so that the outer rank of a page does not depend on `inner`.
  """

  outer: int
  inner: int = 1

  @property
  def ranks(self) -> int:
    """All ranks, numbered outer first."""
    return self.outer * self.inner

  def local_pages(self, num_pages: int) -> int:
    """Pages of one rank's pool; the last ones of some ranks are unused."""
    return cdiv(num_pages, self.ranks)

  def owner(self, page):
    """Rank of a page."""
    return page % self.outer * self.inner + page // self.outer % self.inner

  def local(self, page):
    """Local page of a page, on its owner."""
    return page // self.ranks

  def page(self, owner, local):
    """The page that is `local` on rank `owner`."""
    first = owner // self.inner + owner % self.inner * self.outer
    return local * self.ranks + first

  def gathered(self, page, num_pages: int):
    """Gathered page of a page; a negative page stays as it is."""
    at = self.owner(page) * self.local_pages(num_pages) + self.local(page)
    return jnp.where(page >= 0, at, page)

  def own_pages(self, page: jax.Array, rank) -> jax.Array:
    """Local pages, -1 for pages of other ranks and for none."""
    mine = (page >= 0) & (self.owner(page) == rank)
    return jnp.where(mine, self.local(page), -1)

  def own_slots(self, slots: jax.Array, rank) -> jax.Array:
    """Token slots (page * 64 + offset) within the rank's pool, or -1."""
    page = jnp.where(slots >= 0, slots // PAGE, -1)
    local = self.own_pages(page, rank)
    return jnp.where(local >= 0, local * PAGE + slots % PAGE, -1)

  def gathered_slots(self, slots: jax.Array, num_pages: int) -> jax.Array:
    """Token slots within a gathered layer; -1 stays -1."""
    page = jnp.where(slots >= 0, slots // PAGE, -1)
    at = self.gathered(page, num_pages)
    return jnp.where(slots >= 0, at * PAGE + slots % PAGE, -1)
