"""Latent KV in pages of one attention leaf: admit, reserve, commit an accepted path, roll back, free.

Page and leaf are the same thing, so a full page is one unchanging term of the softmax sum (R3). Rows
of the forward in flight live in a scratch of their own (`fresh`): a draft that is not accepted never
touches a page, and a commit copies whatever rows were accepted, however scattered, to the next
positions.
"""

from __future__ import annotations

import numpy as np


class CacheFull(Exception):
    """No free page. The scheduler decides who waits; nothing has been changed."""


class LatentCache:
    """Target (and drafter) entries of up to `slots` sequences.

    pages   [layers, n_pages, leaf, width]        committed entries of the target
    fresh   [layers, rows, width]                 rows of the current forward, not committed
    draft   [draft layers, n_pages, leaf, width]  the drafter's K and V, under the same page table
    lengths int32 [slots] committed tokens;  tables: page numbers of each slot, in order
    """

    def __init__(
        self,
        *,
        slots: int,
        n_pages: int,
        leaf: int,
        layers: int,
        width: int,
        draft_layers: int = 0,
        draft_width: int = 0,
    ):
        self.leaf = leaf
        self.pages = np.zeros((layers, n_pages, leaf, width), np.float32)
        self.draft = np.zeros((draft_layers, n_pages, leaf, draft_width), np.float32)
        self.fresh: list[np.ndarray | None] = [None] * layers
        self.lengths = np.zeros(slots, np.int32)
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.free_slots = list(range(slots))[::-1]
        self.free_pages = list(range(n_pages))[::-1]
        self.n_pages = n_pages

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.leaf)

    def admit(self) -> int:
        """A free slot with no pages yet."""
        slot = self.free_slots.pop()
        self.lengths[slot] = 0
        return slot

    def reserve(self, slot: int, tokens: int) -> None:
        """Make sure that `tokens` committed tokens fit. Raises CacheFull, then changes nothing."""
        need = self.pages_for(tokens) - len(self.tables[slot])
        if need > len(self.free_pages):
            raise CacheFull
        self.tables[slot].extend(self.free_pages.pop() for _ in range(need))

    def slots_of(self, slot: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(page, place in the page) of positions begin … end - 1."""
        positions = np.arange(begin, end)
        table = np.asarray(self.tables[slot], np.int64)
        return table[positions // self.leaf], positions % self.leaf

    def commit(self, slot: int, rows) -> None:
        """Copy the batch rows of an accepted path to the next positions, in every layer."""
        begin = int(self.lengths[slot])
        end = begin + len(rows)
        self.reserve(slot, end)
        page, place = self.slots_of(slot, begin, end)
        for pages, fresh in zip(self.pages, self.fresh, strict=True):
            pages[page, place] = fresh[rows]
        self.lengths[slot] = end

    def roll_back(self, slot: int, length: int) -> None:
        """Forget everything from position `length` on and give back pages that are now empty."""
        keep = self.pages_for(length)
        self.free_pages.extend(self.tables[slot][keep:])
        del self.tables[slot][keep:]
        self.lengths[slot] = length

    def free(self, slot: int) -> None:
        """Give back the slot and all its pages."""
        self.roll_back(slot, 0)
        self.free_slots.append(slot)
