"""Kernels of decoding against their host twins: tokens, trees, walks and moves, all exactly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reference
import sampling
import spec_decode
from sampling import Path, SamplingParams

if TYPE_CHECKING:
    from tests.conftest import Device


# Their host twins, in sampling.py and spec_decode.py, are what the kernels are compared with.
pytestmark = pytest.mark.parametrize(
    "device", ("emulate", pytest.param("cuda", marks=pytest.mark.gpu)), indirect=True
)


@pytest.fixture
def backend(device) -> Device:
    from tests.conftest import Device

    return Device(device, "float32")


def logits_of(rng, rows: int, vocab: int) -> np.ndarray:
    """Logits with many exact ties, and both zeros."""
    logits = np.round(rng.standard_normal((rows, vocab)) * 4, 1).astype(np.float32)
    logits[:, ::7] = -0.0
    return logits


# ---- tokens ------------------------------------------------------------------------------------

REQUESTS = [
    SamplingParams(),
    SamplingParams(temperature=1e-12),
    SamplingParams(temperature=1.0, seed=42),
    SamplingParams(temperature=0.3, seed=2**64 - 1, top_k=5),
    SamplingParams(temperature=1.5, seed=7, top_p=0.5),
    SamplingParams(temperature=1.0, seed=7, top_p=1e-8),
    SamplingParams(temperature=0.9, seed=1, min_p=0.2),
    SamplingParams(temperature=2.0, seed=3, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, seed=5, top_k=10**6, top_p=0.999),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4),
    SamplingParams(temperature=1.0, seed=9, repetition_penalty=0.8, logit_bias={3: 4.5, 0: -100}),
    SamplingParams(logit_bias={1: 100.0}),
    SamplingParams(temperature=0.7, seed=11, min_tokens=9, top_p=0.8),
]


@pytest.mark.parametrize("vocab", (2, 33, 640, 5000))
def test_choose(backend, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for trial in range(6 if vocab < 1000 else 2):
        requests = [p for p in REQUESTS if all(i < vocab for i in p.logit_bias)]
        logits = logits_of(rng, len(requests), vocab)
        if trial == 1:
            logits[:, 1:] = -np.inf  # one token left
        positions = rng.integers(0, 2**31 - 1, len(requests)).astype(np.int32)
        prompt, emitted = rng.integers(0, vocab, 5), rng.integers(0, vocab, 8)
        path = Path.start(prompt, {vocab - 1, 0})
        for token in emitted.tolist():
            path = path.then(token)
        paths = [path] * len(requests)
        tokens = backend.get(
            backend.ops.choose(backend.send(logits, fp32=True), positions, requests, paths)
        )
        expected = sampling.choose(logits, positions, requests, paths)
        assert tokens.tolist() == expected.tolist()


def test_choose_rows_without_a_token(backend) -> None:
    """NaN, +inf and nothing finite end a row and leave the others alone."""
    logits = np.tile(np.arange(8, dtype=np.float32), (8, 1))
    logits[1, 3], logits[2, 0], logits[3] = np.nan, np.inf, -np.inf
    logits[5, 3], logits[6, 0], logits[7] = np.nan, np.inf, -np.inf
    requests = [SamplingParams()] * 4 + [SamplingParams(temperature=0.1, seed=1, top_p=0.5)] * 4
    tokens = backend.ops.choose(backend.send(logits, fp32=True), np.arange(8), requests)
    assert backend.get(tokens).tolist() == [7, -1, -1, -1] * 2


def test_choose_takes_the_fewest_tokens_that_reach_top_p(backend) -> None:
    """0.5, 0.25, 0.25 with top_p 0.5 keep one token, whatever the noise."""
    logits = np.log(np.array([[0.25, 0.5, 0.25]] * 50, np.float32))
    requests = [SamplingParams(temperature=1.0, seed=s, top_p=0.5) for s in range(50)]
    tokens = backend.ops.choose(backend.send(logits, fp32=True), np.arange(50), requests)
    assert backend.get(tokens).tolist() == [1] * 50


def test_add_noise(backend) -> None:
    """The drafter sees the bits of the noise that picks the target's token."""
    logits = logits_of(np.random.default_rng(0), 3, 777)
    requests = [
        SamplingParams(temperature=0.8, seed=5),
        SamplingParams(),
        SamplingParams(1.3, seed=6),
    ]
    positions = np.array([3, 4, 100_000], np.int32)
    out = backend.get(backend.ops.add_noise(backend.send(logits, fp32=True), positions, requests))
    for row, asked, position, have in zip(logits, requests, positions, out, strict=True):
        want = row
        if not asked.greedy:
            want = row / np.float32(asked.temperature)
            want = want + sampling.gumbel(asked.seed, int(position), len(row))
        assert np.array_equal(have.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("vocab, k", ((1, 1), (33, 33), (640, 20), (5000, 64)))
def test_top_log_probs(backend, vocab: int, k: int) -> None:
    """Ids and bits of sampling.log_softmax_top; within fp32's rounding of the drafter's twin."""
    rng = np.random.default_rng(k)
    logits = logits_of(rng, 5, vocab)
    logits[1] *= 20
    chosen = rng.integers(0, vocab, 5).astype(np.int32)
    sent = backend.send(logits, fp32=True)
    have, want = (
        backend.ops.log_softmax_top(sent, chosen, k),
        sampling.log_softmax_top(logits, chosen, k),
    )
    assert np.array_equal(have.top_ids, want.top_ids)
    assert np.array_equal(have.top.view(np.int32), want.top.view(np.int32))
    assert np.array_equal(have.chosen.view(np.int32), want.chosen.view(np.int32))
    ids, log_probs = (backend.get(a) for a in backend.ops.top_log_probs(sent, k))
    ref_ids, ref_log_probs = reference.ReferenceOps().top_log_probs(logits, k)
    assert np.array_equal(ids, ref_ids)
    # fp32: log of a sum of V terms, then a difference of numbers up to max |logit|.
    bound = 2.0**-24 * (math.sqrt(vocab) + 8 + 4 * np.abs(logits).max())
    assert np.abs(log_probs - ref_log_probs).max() <= bound


def test_top_log_probs_of_broken_logits(backend) -> None:
    """NaN sorts last with -inf; a row of nothing is all -inf and in order of ids."""
    logits = np.array([[1, np.nan, 3, 2], [np.nan] * 4], np.float32)
    ids, log_probs = backend.ops.top_log_probs(backend.send(logits, fp32=True), 4)
    assert backend.get(ids).tolist() == [[2, 3, 0, 1], [0, 1, 2, 3]]
    log_probs = backend.get(log_probs)
    assert log_probs[0, 3] == -np.inf and (log_probs[1] == -np.inf).all()


# ---- trees -------------------------------------------------------------------------------------


def drafts(rng, b: int, depth: int, width: int):
    """Candidates with exact ties between scores, some of probability zero."""
    ids = np.stack([[rng.permutation(50)[:width] for _ in range(depth)] for _ in range(b)])
    steps = np.cumsum(rng.integers(0, 3, (b, depth, width)), -1)
    log_probs = (-0.5 * steps).astype(np.float32)
    log_probs[rng.random((b, depth)) < 0.2, width // 2 :] = -np.inf
    for i in np.ndindex(
        b, depth
    ):  # equal log-probabilities stand by id, as top_log_probs gives them
        order = np.lexsort((ids[i], -log_probs[i]))
        ids[i] = ids[i][order]
    return ids.astype(np.int32), log_probs


@pytest.mark.parametrize("budget", (1, 2, 5, 8, 16, 33, 64))
def test_build_tree_rows_and_walk(backend, budget: int) -> None:
    rng = np.random.default_rng(budget)
    b, depth, width = 11, 6, min(budget, 12)
    ops = backend.ops
    ids, log_probs = drafts(rng, b, depth, width)
    roots = rng.integers(0, 50, b).astype(np.int32)
    limits = rng.integers(0, depth + 2, b).astype(np.int32)
    slots = rng.permutation(b + 3)[:b].astype(np.int32)
    lengths = rng.integers(0, 90, b + 3).astype(np.int32)
    trees = ops.build_trees(
        roots, limits, backend.send(ids), backend.send(log_probs, fp32=True), budget
    )
    sizes = backend.get(trees.sizes)
    expected = [
        spec_decode.build_tree(roots[i], *(a[i, : limits[i]] for a in (ids, log_probs)), budget)
        for i in range(b)
    ]
    assert sizes.tolist() == [len(t) for t in expected]
    for i, tree in enumerate(expected):
        for have, want in (
            (trees.token_ids, tree.token_ids), (trees.parents, tree.parent),
            (trees.depths, tree.depth), (trees.scores, tree.score),
        ):  # fmt: skip
            assert backend.get(have)[i, : len(tree)].tolist() == want.tolist()

    total = int(sizes.sum())
    rows = ops.tree_rows(trees, slots, lengths, total + 3)
    first = np.cumsum(sizes) - sizes
    assert backend.get(rows.first).tolist() == first.tolist()
    batch = spec_decode.concatenate(
        [
            spec_decode.tree_rows(tree, slots[i], lengths[slots[i]], first[i])
            for i, tree in enumerate(expected)
        ]
    )
    for name, filler in (("token_ids", -1), ("positions", 0), ("sequence", -1), ("parent", -1)):
        want = [*getattr(batch, name).tolist(), *[filler] * 3]
        assert backend.get(getattr(rows, name)).tolist() == want

    # The target agrees with a random child of most nodes.
    choices = np.full(total + 3, 99, np.int32)
    for i, tree in enumerate(expected):
        for node in range(1, len(tree)):
            if rng.random() < 0.7:
                choices[first[i] + tree.parent[node]] = tree.token_ids[node]
    choices[first[0]] = -1  # NaN logits at a root
    walks = ops.walk_trees(trees, rows.first, choices, slots, lengths, depth)
    for i, tree in enumerate(expected):
        walk = spec_decode.walk(tree, choices[first[i] : first[i] + len(tree)])
        n = len(walk.rows)
        assert int(backend.get(walks.counts)[i]) == n
        empty = [-1] * (depth + 1 - n)
        accepted = [int(first[i]) + r for r in walk.rows]
        assert backend.get(walks.rows)[i].tolist() == accepted + empty
        assert backend.get(walks.tokens)[i].tolist() == walk.tokens + empty
        assert backend.get(walks.slots)[i].tolist() == [int(slots[i])] * n + empty
        start = int(lengths[slots[i]])
        unused = [0] * len(empty)
        assert backend.get(walks.positions)[i].tolist() == [*range(start, start + n), *unused]
        assert int(backend.get(walks.roots)[i]) == walk.tokens[-1]


def test_entries_move_and_lengths_advance(backend) -> None:
    """Scattered accepted rows land at the next positions of every layer; all else stays (F3)."""
    rng, ops = np.random.default_rng(0), backend.ops
    layers, leaf, width, tables = 3, 16, 40, np.array([[4, 1], [0, 3], [2, -1]], np.int32)
    pages = rng.standard_normal((layers, 6, leaf, width), dtype=np.float32)
    fresh = rng.standard_normal((layers, 9, width), dtype=np.float32)
    rows, slots, positions = [0, 3, 5, -1, 8, -1], [1, 1, 1, -1, 0, -1], [14, 15, 16, -1, 3, -1]
    sent = backend.send(pages)
    ops.put_entries(sent, backend.send(fresh), rows, slots, positions, tables)
    for row, slot, position in zip(rows, slots, positions, strict=True):
        if slot >= 0:
            pages[:, tables[slot][position // leaf], position % leaf] = fresh[:, row]
    assert np.array_equal(backend.get(sent), pages)
    lengths = backend.send(np.array([3, 14, 7], np.int32))
    ops.advance(lengths, np.array([1, 0, -1], np.int32), np.array([3, 1, 5], np.int32))
    assert backend.get(lengths).tolist() == [4, 17, 7]
