"""Draft trees and their verification: plain decoding is a tree of one node, a chain a tree without
branches, and nothing but the speed depends on which is used.

A tree's rows go through the target with their ancestors in the slots of their positions (R3), so
every node's logits are those of plain decoding along its path. The walk follows the target's own
tokens from the root while they are in the tree; the first token off the tree is the next root.
Source of the tree: DDTree, best-first by path probability over a block drafter's distributions.
"""

from __future__ import annotations

import heapq
import struct
from dataclasses import dataclass

import numpy as np

import sampling
from model import Batch

_FLOAT32 = struct.Struct("f")
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Tree:
    """Nodes of one sequence, parents before children; node 0 is the root.

    token_ids int32 [N];  parent int32 [N], -1 for the root;  depth int32 [N]
    score     float32 [N]  log-probability of the path, 0 at the root
    """

    token_ids: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    score: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Walk:
    """The way through a tree.

    rows    accepted nodes from the root on, as indices of the tree
    tokens  what is emitted, one a row; the last is the bonus
    """

    rows: list[int]
    tokens: list[int]


def to_float32(value: float) -> float:
    """A sum of log-probabilities, rounded."""
    if value < -FLOAT32_MAX:
        return -np.inf
    return _FLOAT32.unpack(_FLOAT32.pack(value))[0]


def build_tree(root: int, ids: np.ndarray, log_probs: np.ndarray, budget: int) -> Tree:
    """The `budget` most probable nodes, root included, over independent positions.

    ids, log_probs  [positions, k]  candidates of each depth, most probable first, ids distinct
    Best-first: higher score, then smaller depth, then the parent's order, then the lower id (R4).
    Where the budget holds the whole most-probable path, that path is in the tree first: a step then
    accepts no less than the chain would. Candidates of probability 0 (-inf) and NaN are left out.
    """
    depth_limit, width = ids.shape
    tokens, parents, depths, scores = [int(root)], [-1], [0], [0.0]
    heap: list[tuple] = []  # (-score, depth, parent, token, rank, score of the rank behind it)
    candidates, added = ids.tolist(), np.asarray(log_probs, np.float32).tolist()

    def score_of(parent: int, rank: int) -> float:
        """float32: a sum of two in float64, rounded once more, is that of float32."""
        if rank == width or not added[depths[parent]][rank] > -np.inf:
            return -np.inf
        return to_float32(scores[parent] + added[depths[parent]][rank])

    def offer(parent: int, rank: int, score: float) -> None:
        """Put a candidate on the heap, with those after it whose score rounds to the same."""
        depth = depths[parent]
        while score > -np.inf:
            following = score_of(parent, rank + 1)
            token = candidates[depth][rank]
            heapq.heappush(heap, (-score, depth + 1, parent, token, rank, following))
            if following != score:
                return
            rank += 1

    def offer_children(parent: int, rank: int = 0) -> None:
        if depths[parent] < depth_limit:
            offer(parent, rank, score_of(parent, rank))

    def add(parent: int, token: int, score: float) -> int:
        scores.append(score)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        return len(tokens) - 1

    best = log_probs[:, 0] > -np.inf
    path = int(np.argmin(best)) if not best.all() else depth_limit
    seeded = path if budget > path else 0
    for node in range(seeded):
        add(node, candidates[node][0], score_of(node, 0))
    for node in range(seeded + 1):
        offer_children(node, 1 if node < seeded else 0)
    while heap and len(tokens) < budget:
        below, _, parent, token, rank, following = heapq.heappop(heap)
        if following != -below:
            # Ranks are in order of probability, so the next sibling need not be there before.
            offer(parent, rank + 1, following)
        offer_children(add(parent, token, -below))
    return Tree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.array(scores, np.float32),
    )


def chain(root: int, ids: np.ndarray, log_probs: np.ndarray) -> Tree:
    """The most probable token of every position in a line."""
    return build_tree(root, ids[:, :1], log_probs[:, :1], len(ids) + 1)


def single(root: int) -> Tree:
    """Plain autoregressive decoding."""
    zero = np.zeros(1, np.int32)
    return Tree(np.array([root], np.int32), zero - 1, zero, np.zeros(1, np.float32))


def tree_rows(tree: Tree, slot: int, length: int, first_row: int) -> Batch:
    """The tree as rows of a forward; the root stands at position `length`."""
    return Batch(
        token_ids=tree.token_ids,
        positions=(length + tree.depth).astype(np.int32),
        sequence=np.full(len(tree), slot, np.int32),
        parent=np.where(tree.parent < 0, -1, tree.parent + first_row).astype(np.int32),
    )


def prompt_rows(token_ids, slot: int, length: int, first_row: int) -> Batch:
    """A piece of a prompt as rows: a line of nodes that will all be accepted."""
    n = len(token_ids)
    parent = np.arange(first_row - 1, first_row + n - 1, dtype=np.int32)
    parent[0] = -1
    positions = np.arange(length, length + n, dtype=np.int32)
    return Batch(np.asarray(token_ids, np.int32), positions, np.full(n, slot, np.int32), parent)


def concatenate(parts: list[Batch]) -> Batch:
    """Rows of several sequences in one batch."""
    fields = zip(*((p.token_ids, p.positions, p.sequence, p.parent) for p in parts), strict=True)
    return Batch(*(np.concatenate(field) for field in fields))


def paths(tree: Tree, path: sampling.Path, params: sampling.SamplingParams) -> list[sampling.Path]:
    """For each node the path that its own choice sees: the request's, its ancestors, itself."""
    out = [path] * len(tree)
    if params.needs_path:
        for node in range(1, len(tree)):
            out[node] = out[tree.parent[node]].then(int(tree.token_ids[node]))
    return out


def walk(tree: Tree, choices: np.ndarray) -> Walk:
    """Follow the target's own tokens (`choices`, one a node) from the root while they are children.

    A choice of -1 (NaN logits) ends the walk with that -1 as the last token.
    """
    children = {
        (int(p), int(t)): i
        for i, (p, t) in enumerate(zip(tree.parent, tree.token_ids, strict=True))
        if p >= 0
    }
    rows, tokens = [0], [int(choices[0])]
    while (child := children.get((rows[-1], tokens[-1]))) is not None:
        rows.append(child)
        tokens.append(int(choices[child]))
    return Walk(rows, tokens)


class Speculator:
    """Proposes one tree per sequence: `mode` "ar", "chain" or "tree" with a node budget.

    The draft of a sampled token uses the very noise that will pick the target's token (R6 makes it
    a function of seed, position and id), so drafter and target tend to draw the same token even
    where the distribution is flat. That raises acceptance and cannot change the text.
    """

    def __init__(self, drafter, ops, mode: str, budget: int):
        self.drafter, self.ops, self.mode, self.budget = drafter, ops, mode, budget

    def propose(self, roots, slots, params, limits, cache) -> list[Tree]:
        """One tree per sequence. roots, slots: B each; params: B SamplingParams;
        limits: B, the largest depth worth drafting (tokens that may still be emitted, less one)."""
        drafting = [i for i in range(len(roots)) if self.mode != "ar" and limits[i] > 0]
        trees = [single(root) for root in roots]
        if not drafting:
            return trees
        some = [params[i] for i in drafting]
        logits = self.drafter.draft(
            np.asarray([roots[i] for i in drafting], np.int32),
            np.asarray([slots[i] for i in drafting]),
            cache,
        )
        lengths = cache.lengths[[slots[i] for i in drafting]]
        ids, log_probs = self.candidates(logits, lengths + 1, some)
        for i, of_ids, of_log_probs in zip(drafting, ids, log_probs, strict=True):
            depth = min(len(of_ids), limits[i])
            candidates = of_ids[:depth], of_log_probs[:depth]
            if self.mode == "chain":
                trees[i] = chain(roots[i], *candidates)
            else:
                trees[i] = build_tree(roots[i], *candidates, self.budget)
        return trees

    def candidates(self, logits, first_positions, params) -> tuple[np.ndarray, np.ndarray]:
        """Draft logits [B, D, V] of positions from `first_positions` [B] on, of requests `params`
        -> the likeliest ids and their log-probabilities, [B, D, budget] (chain: 1)."""
        blocks, depth, vocab = logits.shape
        flat = logits.reshape(blocks * depth, vocab)
        if not all(p.greedy for p in params):
            positions = (np.asarray(first_positions)[:, None] + np.arange(depth)).reshape(-1)
            flat = self.ops.add_noise(flat, positions, [p for p in params for _ in range(depth)])
        ids, log_probs = self.ops.top_log_probs(flat, 1 if self.mode == "chain" else self.budget)
        ids, log_probs = (self.ops.download(self.ops.decided(a)) for a in (ids, log_probs))
        return ids.reshape(blocks, depth, -1), log_probs.reshape(blocks, depth, -1)
