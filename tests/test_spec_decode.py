"""spec_decode.py: trees against a brute force of the rule, rows, walks, and the noise of drafts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import sampling
import spec_decode
from reference import ReferenceOps
from sampling import NO_TOKEN, SamplingParams
from spec_decode import Speculator, Tree, build_tree, chain, single, tree_rows, walk

ROOT = 7


def block_candidates(ops, mode: str, budget: int, logits, first: int, params):
    """Ids and log-probabilities of one block's draft logits [D, V]."""
    speculator = Speculator(None, ops, mode, budget)
    return (a[0] for a in speculator.candidates(logits[None], [first], [params]))


def path_of(tree, node: int) -> list[int]:
    """Tokens from the root's first child down to `node`, the root left out."""
    tokens = []
    while node > 0:
        tokens.append(int(tree.token_ids[node]))
        node = int(tree.parent[node])
    return tokens[::-1]


def nodes_of(tree: Tree) -> list[tuple[int, ...]]:
    """Every node by its path from the root, in tree order."""
    return [tuple(path_of(tree, i)) for i in range(len(tree))]


def argmax_path(log_probs: np.ndarray) -> int:
    """Drafts on the most probable path: it ends where nothing is possible."""
    possible = log_probs[:, 0] > -np.inf
    return len(possible) if possible.all() else int(np.argmin(possible))


def brute_force(ids: np.ndarray, log_probs: np.ndarray, budget: int) -> list[tuple[int, ...]]:
    """R4 word by word: of all children that the tree lacks, again and again the first by (higher
    score, smaller depth, the parent's place, lower id); before that, the argmax path if it fits."""
    paths, scores = [()], [np.float32(0)]

    def add(parent: int, rank: int) -> None:
        depth = len(paths[parent])
        paths.append((*paths[parent], int(ids[depth, rank])))
        scores.append(np.float32(scores[parent] + log_probs[depth, rank]))

    if budget > argmax_path(log_probs):
        for node in range(argmax_path(log_probs)):
            add(node, 0)
    while len(paths) < budget:
        choices = [
            (-(scores[p] + log_probs[len(path), r]), len(path) + 1, p, int(ids[len(path), r]), r)
            for p, path in enumerate(paths)
            for r in range(ids.shape[1])
            if len(path) < len(ids)
            and log_probs[len(path), r] > -np.inf
            and (*path, int(ids[len(path), r])) not in paths
        ]
        if not choices:
            break
        _, _, parent, _, rank = min(choices)
        add(parent, rank)
    return paths


def candidates(logits: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted as the drafter's are: by log-probability descending, then id ascending, NaN last."""
    safe = np.where(np.isnan(logits), np.float32(-np.inf), logits.astype(np.float32))
    ids = np.argsort(-safe, axis=1, kind="stable")[:, :width]
    return ids.astype(np.int32), np.take_along_axis(logits.astype(np.float32), ids, 1)


# Eighths add up without rounding, so that ties are ties whatever the order of a sum.
EIGHTHS = st.integers(-24, 0).map(lambda n: n / 8)
FEW = st.sampled_from([0.0, -1.0, -1.0, -2.0])
BROKEN = st.sampled_from([-0.5, -0.5, -1.5, -np.inf, np.nan])


@st.composite
def drafts(draw, values):
    """(ids, log_probs) of 1-5 positions over 1-6 tokens; not normalised, which nothing needs."""
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 6)))
    width = draw(st.integers(1, shape[1]))
    return candidates(draw(arrays(np.float32, shape, elements=values)), width)


BUDGETS = st.one_of(st.integers(1, 12), st.just(60))
FAST = settings(max_examples=150, deadline=None)


class TestBuildTree:
    @pytest.mark.parametrize("values", [EIGHTHS, FEW, BROKEN], ids=["spread", "ties", "inf, nan"])
    def test_equals_brute_force(self, values):
        @FAST
        @given(drafts(values), BUDGETS)
        def check(draft, budget):
            tree = build_tree(ROOT, *draft, budget)
            assert nodes_of(tree) == brute_force(*draft, budget)

        check()

    @pytest.mark.parametrize("seed", range(8))
    def test_holds_the_best_of_all_paths(self, seed):
        # Without ties the tree is a set: the best paths there are, the argmax path among them.
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((4, 5)) * 2
        ids, log_probs = candidates(logits - np.log(np.exp(logits).sum(1, keepdims=True)), 5)
        score = {(): 0.0}
        for depth in range(4):
            for path in [p for p in score if len(p) == depth]:
                for rank in range(5):
                    score[(*path, int(ids[depth, rank]))] = score[path] + log_probs[depth, rank]
        by_score = sorted(score, key=score.__getitem__, reverse=True)
        for budget in (1, 2, 4, 5, 8, 16, 100, 781, 5000):  # 781 = 1 + 5 + 25 + 125 + 625
            nodes = nodes_of(build_tree(ROOT, ids, log_probs, budget))
            first = [tuple(ids[:n, 0].tolist()) for n in range(5)] if budget > 4 else []
            rest = [path for path in by_score if path not in first]
            assert set(nodes) == set(first + rest[: budget - len(first)])
            assert len(set(nodes)) == len(nodes) == min(budget, 781)

    @FAST
    @given(st.one_of(drafts(EIGHTHS), drafts(BROKEN)), BUDGETS)
    def test_is_a_tree_of_the_draft(self, draft, budget):
        ids, log_probs = draft
        tree = build_tree(ROOT, ids, log_probs, budget)
        assert 1 <= len(tree) <= budget
        assert (tree.token_ids[0], tree.parent[0], tree.depth[0], tree.score[0]) == (ROOT, -1, 0, 0)
        assert tree.depth.max() <= len(ids)  # the drafts of a block: its size less the root
        for node in range(1, len(tree)):
            parent = tree.parent[node]
            assert 0 <= parent < node
            assert tree.depth[node] == tree.depth[parent] + 1
            [rank] = np.flatnonzero(ids[tree.depth[parent]] == tree.token_ids[node])
            assert tree.score[node] == tree.score[parent] + log_probs[tree.depth[parent], rank]
        children = list(zip(tree.parent.tolist(), tree.token_ids.tolist(), strict=True))
        assert len(set(children)) == len(children)
        assert {a.dtype for a in (tree.token_ids, tree.parent, tree.depth)} == {np.dtype(np.int32)}
        assert tree.score.dtype == np.float32

    @FAST
    @given(st.one_of(drafts(EIGHTHS), drafts(FEW), drafts(BROKEN)), BUDGETS, st.randoms())
    def test_accepts_no_less_than_the_chain(self, draft, budget, random):
        ids, log_probs = draft
        line = chain(ROOT, ids, log_probs)
        if budget < len(line):
            return
        tree = build_tree(ROOT, ids, log_probs, budget)
        assert nodes_of(tree)[: len(line)] == nodes_of(line)
        target = {}  # one choice a path, the same for both

        def choose(path):
            pool = ids[min(len(path), len(ids) - 1)].tolist()
            return target.setdefault(path, random.choice([*pool[:1] * 3, *pool, 999]))

        lengths = [
            len(walk(t, np.array([choose(path) for path in nodes_of(t)])).tokens)
            for t in (line, tree)
        ]
        assert lengths[1] >= lengths[0]

    def test_equal_scores_by_depth_then_parent_then_id(self):
        # Depth 1: ids 4 and 9 at -1; depth 2: ids 2 and 3 at 0 and -1.
        ids = np.array([[4, 9], [2, 3]], np.int32)
        log_probs = np.array([[-1, -1], [0, -1]], np.float32)
        order = [(), (4,), (4, 2), (9,), (9, 2), (4, 3), (9, 3)]
        assert nodes_of(build_tree(ROOT, ids, log_probs, 99)) == order
        # Budget 2 cannot hold the argmax path; the shallower of equals and the lower id come first.
        assert nodes_of(build_tree(ROOT, ids, log_probs, 2)) == [(), (4,)]

    def test_scores_that_rounding_makes_equal_go_by_id(self):
        # Beside a parent's -64 the two log-probabilities of depth 2 are one float32 score.
        ids = np.array([[1, 2], [9, 3], [0, 5]], np.int32)
        near = np.float32(-0.5), np.nextafter(np.float32(-0.5), np.float32(-1))
        assert np.float32(-64) + near[0] == np.float32(-64) + near[1]
        log_probs = np.array([[-64, -np.inf], near, [-8, -8]], np.float32)
        assert nodes_of(build_tree(ROOT, ids, log_probs, 3)) == [(), (1,), (1, 3)]

    def test_short_argmax_path_is_held_by_its_own_length(self):
        # The drafter sees nothing after two tokens, so a budget of three holds its whole path, even
        # though three tokens of depth 1 are each more probable than it.
        ids = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.int32)
        log_probs = np.array([[-1, -1, -1], [-4, -4, -4], [-np.inf] * 3], np.float32)
        assert nodes_of(build_tree(ROOT, ids, log_probs, 3)) == [(), (1,), (1, 4)]

    def test_nothing_possible_leaves_the_root(self):
        for nothing in (-np.inf, np.nan):
            tree = build_tree(ROOT, np.zeros((3, 2), np.int32), np.full((3, 2), nothing), 8)
            assert nodes_of(tree) == [()]

    def test_no_positions_leave_the_root(self):
        empty = np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32)
        assert nodes_of(build_tree(ROOT, *empty, 8)) == nodes_of(chain(ROOT, *empty)) == [()]

    def test_vocabulary_of_one(self):
        ids, log_probs = np.zeros((3, 1), np.int32), np.zeros((3, 1), np.float32)
        assert nodes_of(build_tree(ROOT, ids, log_probs, 50)) == [(), (0,), (0, 0), (0, 0, 0)]

    def test_chain_is_the_argmax_path(self):
        ids, log_probs = candidates(np.random.default_rng(3).standard_normal((7, 20)), 5)
        tree = chain(ROOT, ids, log_probs)
        assert tree.token_ids.tolist() == [ROOT, *ids[:, 0].tolist()]
        assert tree.parent.tolist() == list(range(-1, 7))

    def test_single_is_the_root(self):
        assert nodes_of(single(ROOT)) == [()]
        assert single(ROOT).token_ids.tolist() == [ROOT]


# The root with children A (1) and B (2), and C (3) under A, stored as A, B, C.
BRANCHING = Tree(
    np.array([ROOT, 1, 2, 3], np.int32),
    np.array([-1, 0, 0, 1], np.int32),
    np.array([0, 1, 1, 2], np.int32),
    np.zeros(4, np.float32),
)


class TestRows:
    def test_f1_positions_are_depths(self):
        rows = tree_rows(BRANCHING, slot=5, length=40, first_row=0)
        assert rows.positions.tolist() == [40, 41, 41, 42]
        assert rows.token_ids.tolist() == [ROOT, 1, 2, 3]
        assert rows.sequence.tolist() == [5] * 4
        assert rows.parent.tolist() == [-1, 0, 0, 1]

    def test_parents_are_rows_of_the_batch(self):
        prompt = spec_decode.prompt_rows([8, 9, 10], slot=0, length=32, first_row=0)
        tree = tree_rows(BRANCHING, slot=1, length=6, first_row=3)
        more = spec_decode.prompt_rows([11], slot=2, length=0, first_row=7)
        batch = spec_decode.concatenate([prompt, tree, more])
        assert batch.parent.tolist() == [-1, 0, 1, -1, 3, 3, 4, -1]
        assert batch.positions.tolist() == [32, 33, 34, 6, 7, 7, 8, 0]
        assert batch.sequence.tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
        assert batch.token_ids.tolist() == [8, 9, 10, ROOT, 1, 2, 3, 11]
        fields = (batch.token_ids, batch.positions, batch.sequence, batch.parent)
        assert {f.dtype for f in fields} == {np.dtype(np.int32)}


class TestWalk:
    def test_scattered_nodes(self):
        # Root -> 5 (node 3) -> 6 (node 5); the rest is beside the path.
        tree = Tree(
            np.array([ROOT, 1, 2, 5, 6, 6, 8, 9], np.int32),
            np.array([-1, 0, 0, 0, 1, 3, 3, 2], np.int32),
            np.array([0, 1, 1, 1, 2, 2, 2, 2], np.int32),
            np.zeros(8, np.float32),
        )
        found = walk(tree, np.array([5, 0, 0, 6, 0, 42, 0, 0]))
        assert (found.rows, found.tokens) == ([0, 3, 5], [5, 6, 42])

    def test_leaves_at_the_root(self):
        found = walk(BRANCHING, np.array([3, 1, 2, 3]))  # 3 is C's token, but no child of the root
        assert (found.rows, found.tokens) == ([0], [3])

    def test_root_alone_emits_its_bonus(self):
        found = walk(single(ROOT), np.array([ROOT]))
        assert (found.rows, found.tokens) == ([0], [ROOT])

    @pytest.mark.parametrize(
        ("choices", "rows", "tokens"),
        [
            ([NO_TOKEN, 3, 0, 0], [0], [NO_TOKEN]),
            ([1, NO_TOKEN, 0, 0], [0, 1], [1, NO_TOKEN]),
            ([1, 3, NO_TOKEN, 4], [0, 1, 3], [1, 3, 4]),  # off the path: nobody's business
        ],
    )
    def test_no_token_ends_it(self, choices, rows, tokens):
        found = walk(BRANCHING, np.array(choices))
        assert (found.rows, found.tokens) == (rows, tokens)


@pytest.fixture(scope="module")
def ops() -> ReferenceOps:
    return ReferenceOps()


def target_choices(logits, first_position, params):
    positions = range(first_position, first_position + len(logits))
    return sampling.choose(logits, positions, [params] * len(logits)).tolist()


class TestCandidates:
    """A drafter that knows the target's logits must propose the target's own tokens first."""

    @pytest.mark.parametrize("mode", ["chain", "tree"])
    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 2**64 - 1),
        temperature=st.one_of(st.just(0.0), st.floats(1e-12, 100)),
        first=st.integers(1, 2**20),
        vocabulary=st.integers(1, 40),
        data=st.integers(0, 2**32 - 1),
    )
    def test_rank_0_is_the_targets_token(
        self, ops, mode, seed, temperature, first, vocabulary, data
    ):
        logits = np.random.default_rng(data).standard_normal((5, vocabulary), np.float32) * 4
        params = SamplingParams(temperature=temperature, seed=seed)
        ids, log_probs = block_candidates(ops, mode, 8, logits, first, params)
        assert ids[:, 0].tolist() == target_choices(logits, first, params)
        assert ids.shape == (5, 1 if mode == "chain" else min(8, vocabulary))
        assert (np.diff(log_probs, axis=1) <= 0).all()

    def test_tied_logits_go_to_the_lowest_id(self, ops):
        logits = np.zeros((3, 30), np.float32)
        logits[:, [4, 11, 20]] = 2
        ids, _ = block_candidates(ops, "tree", 5, logits, 9, SamplingParams())
        assert ids.tolist() == [[4, 11, 20, 0, 1]] * 3

    def test_distributions_are_normalised(self, ops):
        logits = np.random.default_rng(0).standard_normal((4, 6), np.float32)
        for params in (SamplingParams(), SamplingParams(temperature=0.7, seed=3)):
            _, log_probs = block_candidates(ops, "tree", 6, logits, 1, params)
            np.testing.assert_allclose(np.exp(log_probs).sum(1), 1, atol=1e-6)  # 6 exps, 6 sums

    def test_seed_and_position_matter(self, ops):
        logits = np.zeros((1, 4096), np.float32)
        drawn = set()
        for seed in range(5):
            params = SamplingParams(1.0, seed=seed)
            for position in range(5):
                ids, _ = block_candidates(ops, "chain", 8, logits, position, params)
                drawn.add(int(ids[0, 0]))
        assert len(drawn) > 20  # of 25, from 4096 ids: hardly any two agree


class TestPropose:
    """Which trees a step gets, with a drafter of fixed logits."""

    def propose(self, ops, mode, limits, budget=6, block=8):
        calls = []
        logits = np.random.default_rng(1).standard_normal((9, block - 1, 50), np.float32)

        def draft(roots, slots, cache):
            calls.append((roots.tolist(), slots.tolist()))
            return logits[: len(roots)]

        speculator = Speculator(SimpleNamespace(draft=draft), ops, mode, budget)
        n = len(limits)
        cache = SimpleNamespace(lengths=np.arange(10, 10 + n, dtype=np.int32))
        roots, slots = list(range(20, 20 + n)), list(range(n))
        trees = speculator.propose(roots, slots, [SamplingParams()] * n, limits, cache)
        assert [int(t.token_ids[0]) for t in trees] == roots
        return trees, calls

    def test_ar_does_not_draft(self, ops):
        trees, calls = self.propose(ops, "ar", [7, 7])
        assert [len(t) for t in trees] == [1, 1]
        assert not calls

    @pytest.mark.parametrize("mode", ["chain", "tree"])
    def test_depth_keeps_to_limit_and_block(self, ops, mode):
        limits = [0, 1, 3, 7, 100]
        trees, calls = self.propose(ops, mode, limits, budget=64)
        assert [int(t.depth.max()) for t in trees] == [0, 1, 3, 7, 7]
        assert calls == [([21, 22, 23, 24], [1, 2, 3, 4])]  # nothing to draft for the first

    def test_noise_is_that_of_the_emitting_positions(self, ops):
        # A root stands at the committed length, so its first draft is of the place behind it.
        logits = np.random.default_rng(2).standard_normal((3, 7, 50), np.float32)
        drafter = SimpleNamespace(draft=lambda roots, slots, cache: logits)
        cache = SimpleNamespace(lengths=np.array([31, 31, 9], np.int32))
        params = [SamplingParams(1.0, seed=5), SamplingParams(), SamplingParams(0.6, seed=5)]
        trees = Speculator(drafter, ops, "chain", 8).propose(
            [ROOT] * 3, [0, 1, 2], params, [7] * 3, cache
        )
        for tree, rows, length, asked in zip(trees, logits, cache.lengths, params, strict=True):
            expected = target_choices(rows, int(length) + 1, asked)
            assert tree.token_ids.tolist() == [ROOT, *expected]

    def test_no_one_left_to_draft_for(self, ops):
        trees, calls = self.propose(ops, "tree", [0, 0])
        assert [len(t) for t in trees] == [1, 1]
        assert not calls

    @pytest.mark.parametrize("budget", [1, 2, 8, 16, 33])
    def test_budget_counts_the_root(self, ops, budget):
        trees, _ = self.propose(ops, "tree", [7, 7], budget)
        assert [len(t) for t in trees] == [budget, budget]
