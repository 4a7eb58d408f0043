"""Latent KV in pages of one attention leaf: admit, reserve, commit a path, roll back, free, reuse.

Page and leaf are the same thing, so a full page is one unchanging term of the softmax sum (R3).
Rows of the forward in flight live in an array of their own (`Forward.entries`): a draft that is not
accepted never touches a page, and a commit copies whatever rows were accepted, however scattered,
to the next positions.

Full pages stay known after their sequence has gone (`_Known`): a later prompt that begins with the
same tokens takes them over. R1 makes that exact: the page holds the very bits that the prompt would
compute again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


class CacheFull(Exception):
    """Not enough free pages. The scheduler decides who waits; nothing has been changed."""


@dataclass(eq=False)
class _Known:
    """A full page that can be found by its tokens: a node of the tree of prefixes.

    tokens    the page's own tokens; with those of all nodes above, the whole prefix
    children  by their tokens: a look-up compares the tokens, a hash alone decides nothing
    users     live sequences that hold the page
    """

    page: int
    parent: _Known | None
    tokens: tuple[int, ...]
    children: dict[tuple[int, ...], _Known] = field(default_factory=dict)
    users: int = 0
    last_used: int = 0


@dataclass(frozen=True)
class Placed:
    """Rows of a batch and where they were committed, all int32 [n]."""

    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray


class LatentCache:
    """Target (and drafter) entries of up to `slots` sequences.

    pages   [layers, n_pages, leaf, width]        committed entries of the target
    draft   [draft layers, n_pages, leaf, width]  the drafter's K and V, under the same page table
    lengths int32 [slots] committed tokens
    tables  int32 [slots, pages]                  page numbers in order; 0 beyond `held` of a slot
    """

    def __init__(
        self,
        ops,
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
        self.n_pages = n_pages
        self.ops = ops
        self.pages = ops.zeros((layers, n_pages, leaf, width))
        self.draft = ops.zeros((draft_layers, n_pages, leaf, draft_width))
        self.lengths = np.zeros(slots, np.int32)
        self.tables = np.zeros((slots, n_pages), np.int32)
        self.held = [0] * slots  # pages of each slot
        self.free_slots = list(range(slots))[::-1]
        self.free_pages = list(range(n_pages))[::-1]
        self._root = _Known(-1, None, ())
        self._known: dict[int, _Known] = {}  # by page
        self._chains: list[list[_Known]] = [[] for _ in range(slots)]  # known pages of each slot
        self._clock = 0

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.leaf)

    @property
    def available(self) -> int:
        """Pages that a reservation may count on: free, or known but in nobody's use."""
        return len(self.free_pages) + sum(k.users == 0 for k in self._known.values())

    def admit(self, tokens=(), most: int = 0) -> int:
        """A free slot. It starts with the known pages of the prefix that `tokens` shares with
        earlier text, at most `most` tokens; `lengths` of the slot says how many."""
        slot = self.free_slots.pop()
        node, chain = self._root, self._chains[slot]
        while (len(chain) + 1) * self.leaf <= most:
            begin = len(chain) * self.leaf
            node = node.children.get(tuple(tokens[begin : begin + self.leaf]))
            if node is None:
                break
            chain.append(node)
        self._clock += 1
        for node in chain:
            node.users += 1
            node.last_used = self._clock
        self.tables[slot, : len(chain)] = [node.page for node in chain]
        self.held[slot] = len(chain)
        self.lengths[slot] = len(chain) * self.leaf
        return slot

    def reserve(self, slot: int, tokens: int) -> None:
        """Make sure that `tokens` committed tokens fit. Raises CacheFull, then changes nothing.

        Known pages in nobody's use are given up for it, least recently used first.
        """
        held = self.held[slot]
        need = self.pages_for(tokens) - held
        if need <= 0:
            return
        if need > self.available:
            raise CacheFull
        while len(self.free_pages) < need:
            idle = (k for k in self._known.values() if k.users == 0 and not k.children)
            self._forget(min(idle, key=lambda k: k.last_used))
        self.tables[slot, held : held + need] = [self.free_pages.pop() for _ in range(need)]
        self.held[slot] = held + need

    def commit(self, moved: list[tuple[int, list[int]]], entries) -> Placed:
        """Copy rows of accepted paths, [(slot, rows)], to the next positions of their sequences, in
        every layer. entries [layers, T, width]: what the forward computed for its rows."""
        for slot, rows in moved:
            self.reserve(slot, int(self.lengths[slot]) + len(rows))
        placed = Placed(
            rows=np.concatenate([np.asarray(rows, np.int32) for _, rows in moved]),
            slots=np.repeat([slot for slot, _ in moved], [len(r) for _, r in moved]).astype(
                np.int32
            ),
            positions=np.concatenate(
                [np.arange(len(rows), dtype=np.int32) + self.lengths[slot] for slot, rows in moved]
            ),
        )
        self.ops.put_entries(
            self.pages, entries, placed.rows, placed.slots, placed.positions, self.tables
        )
        for slot, rows in moved:
            self.lengths[slot] += len(rows)
        return placed

    def remember(self, slot: int, tokens) -> None:
        """Make the slot's full pages known by `tokens`, its text; draft entries must be in too.

        A page that somebody else has made known meanwhile holds the same bits: it is shared, and
        the slot's own goes back.
        """
        chain = self._chains[slot]
        for index in range(len(chain), int(self.lengths[slot]) // self.leaf):
            parent = chain[-1] if chain else self._root
            own = tuple(tokens[index * self.leaf : (index + 1) * self.leaf])
            page = int(self.tables[slot, index])
            node = parent.children.get(own)
            if node is None:
                node = parent.children[own] = self._known[page] = _Known(page, parent, own)
            else:
                self.tables[slot, index] = node.page
                self.free_pages.append(page)
            node.users += 1
            node.last_used = self._clock
            chain.append(node)

    def roll_back(self, slot: int, length: int) -> None:
        """Forget everything of the slot from position `length` on, and give back whole pages.

        A known page is only let go (others may read it); it must not be cut.
        """
        keep = self.pages_for(length)
        chain = self._chains[slot]
        if length < len(chain) * self.leaf and length % self.leaf:
            keep -= 1  # the page under `length` is known: its tokens must be computed again
            length = keep * self.leaf
        self._clock += 1
        for node in chain[keep:]:
            node.users -= 1
            node.last_used = self._clock
        del chain[keep:]
        for page in self.tables[slot, keep : self.held[slot]].tolist():
            if page not in self._known:
                self.free_pages.append(page)
        self.tables[slot, keep:] = 0
        self.held[slot] = keep
        self.lengths[slot] = length

    def free(self, slot: int, sound: bool = True) -> None:
        """Give back the slot and what it holds; its known pages stay until they are needed.

        Pages that are not `sound` (a NaN came of them) are never found again, nor what follows.
        """
        if not sound and self._chains[slot]:
            self._hide(self._chains[slot][0])
        self.roll_back(slot, 0)
        self.free_slots.append(slot)

    def abandon(self) -> None:
        """Give back all slots, also where an interrupt has left a change half done. Known pages
        stay, those that were not quite made known or forgotten do not."""
        slots, known = len(self.lengths), self._known
        self.lengths[:], self.tables[:] = 0, 0
        self.held, self._chains = [0] * slots, [[] for _ in range(slots)]
        for node in (self._root, *known.values()):
            node.users = 0
            node.children = {t: k for t, k in node.children.items() if known.get(k.page) is k}
        self.free_slots = list(range(slots))[::-1]
        self.free_pages = [page for page in range(self.n_pages)[::-1] if page not in known]

    def forget_idle(self) -> None:
        """Give up all known pages in nobody's use: the next prompt is computed, not found."""
        while idle := [k for k in self._known.values() if k.users == 0 and not k.children]:
            for node in idle:
                self._forget(node)

    def _hide(self, node: _Known) -> None:
        if node.parent.children.get(node.tokens) is node:
            del node.parent.children[node.tokens]

    def _forget(self, node: _Known) -> None:
        self._hide(node)
        del self._known[node.page]
        self.free_pages.append(node.page)
