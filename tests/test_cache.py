"""cache.py: pages that prompts share. A page is found by its tokens and its place, holds the bits
that would be computed again, and is given up last used first; nothing is ever lost or owned twice.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from toy import assert_same_results, engine_of, same_bits, write_checkpoint

from cache import CacheFull, LatentCache
from engine import Engine
from sampling import SamplingParams

LEAF = 16


def ids(seed: int, n: int) -> list[int]:
    return np.random.default_rng([11, seed]).integers(0, 250, n).tolist()


# ---- the cache alone ---------------------------------------------------------------------------


class PlainOps:
    """Just enough operations for a cache of whole numbers."""

    def zeros(self, shape):
        return np.zeros(shape, np.int64)

    def put_entries(self, pages, entries, rows, slots, positions, tables) -> None:
        leaf = pages.shape[2]
        where = tables[slots, positions // leaf]
        pages[:, where, positions % leaf] = entries[:, rows]


def small(slots: int = 4, n_pages: int = 6, leaf: int = 2) -> LatentCache:
    return LatentCache(
        PlainOps(),
        slots=slots,
        n_pages=n_pages,
        leaf=leaf,
        layers=2,
        width=1,
        draft_layers=1,
        draft_width=1,
    )


def entry(tokens: list[int]) -> int:
    """What a forward would compute for the last of these tokens: all before it matter."""
    return 1 + zlib.crc32(bytes(tokens))


def put(cache: LatentCache, slot: int, tokens: list[int]) -> None:
    """Commit what the slot does not hold yet of `tokens`, from scattered rows of a forward."""
    done, rows = int(cache.lengths[slot]), []
    entries = np.full((2, 3 * len(tokens) + 1, 1), -1, np.int64)
    for i in range(done, len(tokens)):
        rows.append(3 * i + i % 2)
        entries[:, rows[-1], 0] = entry(tokens[: i + 1])
    if rows:
        placed = cache.commit([(slot, rows)], entries)
        own = -entries[:1, placed.rows]
        n = np.arange(len(rows))
        cache.ops.put_entries(cache.draft, own, n, placed.slots, placed.positions, cache.tables)


def start(cache: LatentCache, tokens: list[int], most: int | None = None) -> int:
    """Admit, compute and make known; the slot."""
    slot = cache.admit(tokens, len(tokens) if most is None else most)
    put(cache, slot, tokens)
    cache.remember(slot, tokens)
    return slot


def found(cache: LatentCache, tokens: list[int]) -> int:
    """Tokens that a prompt of these would find; nothing else about the cache changes."""
    clock = cache._clock
    used = {page: node.last_used for page, node in cache._known.items()}
    slot = cache.admit(tokens, len(tokens))
    n = int(cache.lengths[slot])
    cache.free(slot)
    cache._clock = clock
    for page, node in cache._known.items():
        node.last_used = used[page]
    return n


def holds(cache: LatentCache, slot: int, tokens: list[int]) -> bool:
    """Whether target and drafter pages hold the entries of this text."""
    n = int(cache.lengths[slot])
    where = cache.tables[slot, np.arange(n) // cache.leaf], np.arange(n) % cache.leaf
    expected = [entry(tokens[: i + 1]) for i in range(n)]
    target, draft = cache.pages[:, *where, 0], cache.draft[0][where][:, 0]
    return (target == expected).all() and (-draft == expected).all()


class TestWhatMatches:
    def test_whole_pages_of_the_same_beginning(self):
        cache = small(n_pages=8)
        cache.free(start(cache, [1, 2, 3, 4, 5]))
        assert found(cache, [1, 2, 3, 4, 5]) == 4
        assert found(cache, [1, 2, 3]) == 2
        assert found(cache, [1, 2, 3, 4, 6, 7, 8]) == 4
        assert found(cache, [1]) == found(cache, []) == 0

    @pytest.mark.parametrize("place", range(8))
    def test_one_other_token_ends_the_match(self, place):
        cache, text = small(n_pages=8), [1, 2, 3, 4, 5, 6, 7, 8]
        cache.free(start(cache, text))
        other = [*text[:place], 9, *text[place + 1 :]]
        assert found(cache, other) == place // 2 * 2

    def test_the_same_tokens_elsewhere_are_another_page(self):
        cache = small(n_pages=8)
        cache.free(start(cache, [1, 2, 3, 4]))
        assert found(cache, [3, 4, 1, 2]) == 0
        assert found(cache, [1, 2, 1, 2]) == 2
        assert found(cache, [5, 6, 3, 4]) == 0

    def test_tokens_of_equal_hash_do_not_match(self):
        # Python hashes -1 and -2 alike, so these tuples meet in one place of any table by hash.
        assert hash((5, -1)) == hash((5, -2))
        cache = small()
        slot = cache.admit()
        cache.reserve(slot, 2)
        cache.lengths[slot] = 2
        cache.remember(slot, [5, -1])
        assert found(cache, [5, -1]) == 2
        assert found(cache, [5, -2]) == 0

    def test_at_most_what_was_asked_for(self):
        cache, text = small(), [1, 2, 3, 4]
        cache.free(start(cache, text))
        for most in range(5):
            slot = cache.admit(text, most)
            assert cache.lengths[slot] == most // 2 * 2
            cache.free(slot)

    def test_what_is_not_remembered_is_not_found(self):
        cache, text = small(), [1, 2, 3, 4]
        slot = cache.admit(text, 4)
        put(cache, slot, text)
        assert found(cache, text) == 0
        cache.free(slot)
        assert found(cache, text) == 0 and len(cache.free_pages) == 6

    def test_what_is_not_sound_is_not_found_and_its_readers_keep_it(self):
        cache, text = small(n_pages=8), [1, 2, 3, 4, 5, 6]
        bad, reader = start(cache, text), start(cache, text)
        cache.free(bad, sound=False)
        assert found(cache, text) == 0
        assert holds(cache, reader, text)
        again = start(cache, text)  # computed anew, known anew
        assert found(cache, text) == 6
        assert not set(cache.tables[again, :3]) & set(cache.tables[reader, :3])
        cache.free(again)
        cache.free(reader)
        assert cache.available == 8


class TestSharing:
    def test_two_live_sequences_hold_the_same_pages(self):
        cache = small()
        first, second = start(cache, [1, 2, 3, 4, 5, 6]), start(cache, [1, 2, 3, 4, 7, 8])
        assert (cache.tables[first, :2] == cache.tables[second, :2]).all()
        assert cache.tables[first, 2] != cache.tables[second, 2]
        assert len(cache.free_pages) == 6 - 4
        assert [k.users for k in cache._chains[first]] == [2, 2, 1]
        cache.free(first)
        assert [k.users for k in cache._chains[second]] == [1, 1, 1]
        assert holds(cache, second, [1, 2, 3, 4, 7, 8])

    def test_pages_computed_at_the_same_time_become_one(self):
        cache, text = small(), [1, 2, 3, 4, 5, 6]
        slots = [cache.admit(text, 6) for _ in range(2)]
        for slot in slots:
            put(cache, slot, text)
        assert not cache.free_pages
        for slot in slots:
            cache.remember(slot, text)
        assert (cache.tables[slots[0], :3] == cache.tables[slots[1], :3]).all()
        assert len(cache.free_pages) == 3
        put(cache, slots[1], [*text, 7, 8])  # and it goes on behind them
        cache.remember(slots[1], [*text, 7, 8])
        assert found(cache, [*text, 7, 8]) == 8
        assert holds(cache, slots[0], text) and holds(cache, slots[1], [*text, 7, 8])

    def test_a_known_page_is_not_cut(self):
        cache, text = small(), [1, 2, 3, 4, 5]
        slot = start(cache, text)
        cache.roll_back(slot, 3)  # within the second known page, so it goes as a whole
        assert cache.lengths[slot] == 2
        put(cache, slot, [1, 2, 9, 9])
        assert holds(cache, slot, [1, 2, 9, 9])
        assert found(cache, text) == 4

    def test_an_own_page_is_cut(self):
        cache = small()
        slot = cache.admit()
        put(cache, slot, [1, 2, 3, 4, 5])
        cache.roll_back(slot, 3)
        assert (cache.lengths[slot], cache.held[slot], len(cache.free_pages)) == (3, 2, 4)
        put(cache, slot, [1, 2, 3, 9, 9])
        assert holds(cache, slot, [1, 2, 3, 9, 9])


class TestEviction:
    def test_least_recently_used_goes_first_from_its_end(self):
        cache = small(n_pages=6)
        texts = [[n, n, n, n + 1] for n in (1, 11, 21)]
        for text in texts:
            cache.free(start(cache, text))
        cache.free(cache.admit(texts[0], 4))  # looked at again
        slot = cache.admit()
        left = []
        for tokens in range(2, 14, 2):
            cache.reserve(slot, tokens)
            left.append([found_in(cache, text) for text in texts])
        assert left == [[4, 2, 4], [4, 0, 4], [4, 0, 2], [4, 0, 0], [2, 0, 0], [0, 0, 0]]
        with pytest.raises(CacheFull):
            cache.reserve(slot, 14)

    def test_use_lasts_until_the_request_ends(self):
        cache = small(n_pages=4)
        long = start(cache, [1, 1])
        cache.free(start(cache, [2, 2]))
        cache.free(long)  # began earlier, ended later
        slot = cache.admit()
        cache.reserve(slot, 2 * 3)
        assert (found_in(cache, [1, 1]), found_in(cache, [2, 2])) == (2, 0)

    def test_pages_in_use_stay(self):
        cache, text = small(n_pages=4), [1, 2, 3, 4]
        live = start(cache, text)
        other = cache.admit()
        cache.reserve(other, 4)
        before = cache.tables.copy(), list(cache.free_pages), cache.held[:], dict(cache._known)
        with pytest.raises(CacheFull):
            cache.reserve(other, 6)
        after = cache.tables.copy(), list(cache.free_pages), cache.held[:], dict(cache._known)
        assert (before[0] == after[0]).all() and before[1:] == after[1:]
        assert holds(cache, live, text)


def found_in(cache: LatentCache, tokens: list[int]) -> int:
    """Like `found`, read off the tree of prefixes: needs no free slot."""
    node, n = cache._root, 0
    while node := node.children.get(tuple(tokens[n : n + cache.leaf])):
        n += cache.leaf
    return n


class AnyOrder(RuleBasedStateMachine):
    """Random admissions, commits, roll-backs and ends over few pages and very similar texts."""

    def __init__(self):
        super().__init__()
        self.cache = small(slots=3, n_pages=5)
        self.texts: dict[int, list[int]] = {}  # of live slots

    words = st.lists(st.integers(1, 2), max_size=9)
    which = st.integers(0, 2)

    def live(self, which: int) -> int:
        return sorted(self.texts)[which % len(self.texts)]

    @precondition(lambda self: self.cache.free_slots)
    @rule(text=words, most=st.integers(0, 9))
    def admit(self, text, most):
        free = len(self.cache.free_pages)
        slot = self.cache.admit(text, min(most, len(text)))
        n = int(self.cache.lengths[slot])
        assert n <= min(most, len(text)) and n % 2 == 0
        assert len(self.cache.free_pages) == free
        self.texts[slot] = text[:n]

    @precondition(lambda self: self.texts)
    @rule(which=which, more=words, known=st.booleans())
    def commit(self, which, more, known):
        slot = self.live(which)
        text = self.texts[slot] + more
        need = self.cache.pages_for(len(text)) - self.cache.held[slot]
        fits = need <= self.cache.available
        try:
            put(self.cache, slot, text)
        except CacheFull:
            assert not fits
            return
        assert fits or need <= 0
        self.texts[slot] = text
        if known:
            self.cache.remember(slot, text)

    @precondition(lambda self: self.texts)
    @rule(which=which, length=st.integers(0, 9))
    def roll_back(self, which, length):
        slot = self.live(which)
        length = min(length, len(self.texts[slot]))
        self.cache.roll_back(slot, length)
        kept = int(self.cache.lengths[slot])
        assert length - 2 < kept <= length
        self.texts[slot] = self.texts[slot][:kept]

    @precondition(lambda self: self.texts)
    @rule(which=which, sound=st.booleans())
    def free(self, which, sound):
        slot = self.live(which)
        del self.texts[slot]
        self.cache.free(slot, sound)

    @invariant()
    def every_page_has_one_owner(self):
        cache = self.cache
        private, users = [], {page: 0 for page in cache._known}
        for slot in range(3):
            held = cache.tables[slot, : cache.held[slot]].tolist()
            chain = cache._chains[slot]
            assert held[: len(chain)] == [node.page for node in chain]
            private += held[len(chain) :]
            for node in chain:
                users[node.page] += 1
            assert not cache.tables[slot, len(held) :].any()
            assert slot in self.texts or (not held and slot in cache.free_slots)
        assert users == {page: node.users for page, node in cache._known.items()}
        assert sorted(cache.free_pages + private + list(cache._known)) == list(range(5))

    @invariant()
    def every_text_is_there(self):
        for slot, text in self.texts.items():
            assert self.cache.lengths[slot] == len(text)
            assert holds(self.cache, slot, text)

    @invariant()
    def what_can_be_found_is_what_it_says(self):
        waiting = [(self.cache._root, [])]
        while waiting:
            node, before = waiting.pop()
            for tokens, child in node.children.items():
                text = [*before, *tokens]
                assert (child.tokens, child.parent) == (tokens, node)
                here = self.cache.pages[0, child.page, :, 0]
                assert here.tolist() == [entry(text[: len(before) + i + 1]) for i in range(2)]
                waiting.append((child, text))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=40,
    stateful_step_count=120,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# ---- the engine on it --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(
        tmp_path_factory.mktemp("cache") / "toy",
        drafter={"max_position_embeddings": 256},
        max_position_embeddings=256,
        rope_scaling={
            **{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            **{"beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    )


def cold_engine(checkpoint, **decode) -> Engine:
    """Draft trees; `engine.rows` is the number of rows that its forwards have had."""
    engine = engine_of(checkpoint, drafter=True, **{"batch": 3, **decode})
    engine.use("tree", 12)
    engine.rows, forward = 0, engine.model.forward

    def counted(batch, cache, logit_rows):
        engine.rows += len(batch)
        return forward(batch, cache, logit_rows)

    engine.model.forward = counted
    return engine


@pytest.fixture
def engine(checkpoint) -> Engine:
    return cold_engine(checkpoint)


def prefill(engine, prompt, params=None, **options):
    """Submit, and step until the first token is there -> (sequence, rows that it took)."""
    params = params or SamplingParams(max_tokens=12, ignore_eos=True)
    sequence = engine.submit(prompt, params, keep_logits=True, keep_rounds=True, **options)
    before = engine.rows
    while not sequence.first_token:
        engine.step()
    return sequence, engine.rows - before


def finish(engine, sequence):
    while sequence.finish_reason is None:
        engine.step()
    return sequence.result()


def run(engine, prompt, params=None, **options):
    sequence, rows = prefill(engine, prompt, params, **options)
    return finish(engine, sequence), rows


def assert_same_rounds(results, expected) -> None:
    """The same text from the very same trees."""
    assert_same_results(results, expected)
    for r, e in zip(results, expected, strict=True):
        assert (r.steps, r.acceptance_length) == (e.steps, e.acceptance_length)
        for ours, theirs in zip(r.rounds, e.rounds, strict=True):
            assert ours.walk == theirs.walk
            for name in ("token_ids", "parent", "depth", "score"):
                assert same_bits(getattr(ours.tree, name), getattr(theirs.tree, name))


SAMPLED = SamplingParams(0.6, seed=5, max_tokens=12, ignore_eos=True, repetition_penalty=1.1)


class TestReuse:
    @pytest.mark.parametrize("params", [None, SAMPLED], ids=["greedy", "seeded"])
    @pytest.mark.parametrize("shared", [0, 15, 16, 47, 48, 90, 100])
    def test_same_bits_same_trees_fewer_rows(self, checkpoint, engine, shared, params):
        # A prompt of 100 tokens after another that has `shared` of them in common.
        prompt = ids(1, 100)
        answer, rows = run(cold_engine(checkpoint), prompt, params)
        assert rows == 100
        run(engine, [*prompt[:shared], *ids(2, 20)])
        result, rows = run(engine, prompt, params)
        assert rows == 100 - min(shared // LEAF * LEAF, 96)
        assert_same_rounds([result], [answer])

    def test_every_mode_is_the_same_after_every_other(self, checkpoint):
        prompt, answers = ids(3, 70), []
        engine = engine_of(checkpoint, drafter=True, batch=1)
        for mode in ("tree", "ar", "chain", "tree", "ar"):
            engine.use(mode, 12)
            [result] = engine.generate([prompt], SAMPLED, keep_logits=True)
            answers.append(result)
        assert_same_results(answers[1:], answers[:1] * 4)

    def test_a_conversation_goes_on(self, checkpoint, engine):
        text = ids(4, 40)
        for turn in range(3):
            result, rows = run(engine, text)
            known = 0 if turn == 0 else (len(text) - 10) // LEAF * LEAF  # all but the last token
            assert rows == len(text) - known
            text = [*text, *result.token_ids, *ids(5 + turn, 9)]
        answer, _ = run(cold_engine(checkpoint), text[: -9 - 12])
        assert_same_rounds([result], [answer])

    def test_one_other_token_is_computed_from_its_page_on(self, engine):
        prompt = ids(6, 80)
        run(engine, prompt)
        for place in (0, 15, 16, 40, 63, 64, 79):
            other = [*prompt[:place], (prompt[place] + 1) % 250, *prompt[place + 1 :]]
            _, rows = run(engine, other)
            assert rows == 80 - place // LEAF * LEAF

    def test_live_requests_share(self, checkpoint, engine):
        prompts = [[*ids(7, 64), *ids(8 + i, 5)] for i in range(3)]
        first, _ = prefill(engine, prompts[0])
        free = len(engine.cache.free_pages)
        others = [prefill(engine, p) for p in prompts[1:]]
        tables = engine.cache.tables[[first.slot] + [s.slot for s, _ in others], :4]
        assert (tables == tables[0]).all()
        assert free - len(engine.cache.free_pages) <= 2 * 2
        results = [finish(engine, s) for s in (first, *(s for s, _ in others))]
        cold = [run(cold_engine(checkpoint), p)[0] for p in prompts]
        assert_same_rounds(results, cold)

    def test_requests_of_one_moment_become_one(self, checkpoint, engine):
        prompt = ids(12, 64)
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        sequences = [engine.submit(prompt, params, keep_logits=True) for _ in range(3)]
        while not all(s.n_emitted > 1 for s in sequences):
            engine.step()
        tables = engine.cache.tables[[s.slot for s in sequences], :4]
        assert (tables == tables[0]).all()
        results = [finish(engine, s) for s in sequences]
        assert_same_results(results, [run(cold_engine(checkpoint), prompt)[0]] * 3)

    @pytest.mark.parametrize("n", [1, 2, 16, 17, 70])
    def test_echo_computes_all_and_finds_the_same(self, checkpoint, engine, n):
        prompt = ids(13, n)
        answer, rows = run(cold_engine(checkpoint), prompt, echo=True)
        assert rows == n
        assert answer.prompt_logprobs.shape == (n - 1,)
        for _ in range(2):
            result, rows = run(engine, prompt, echo=True)
            assert rows == n
            assert_same_rounds([result], [answer])
            assert same_bits(result.prompt_logprobs, answer.prompt_logprobs)
        _, rows = run(engine, prompt)  # what echo computed is of use to others
        assert rows == n - (n - 1) // LEAF * LEAF

    def test_put_back_and_return(self, checkpoint, engine):
        # Nine pages of 16 for two requests that need eight each in the end.
        engine = cold_engine(checkpoint, batch=2, pages=9)
        prompts = [ids(14, 50), ids(15, 30)]
        params = [
            SamplingParams(max_tokens=75, ignore_eos=True),
            SamplingParams(0.6, seed=5, max_tokens=90, ignore_eos=True),
        ]
        old, new = (
            engine.submit(p, q, keep_logits=True, keep_rounds=True)
            for p, q in zip(prompts, params, strict=True)
        )
        put_back = 0
        while old.finish_reason is None or new.finish_reason is None:
            before = new.slot
            engine.step()
            assert old.slot >= 0 or old.finish_reason  # the elder is never disturbed
            put_back += before >= 0 and new.slot < 0 and new.finish_reason is None
        assert put_back == 1
        results = [old.result(), new.result()]
        cold = [run(cold_engine(checkpoint), p, q)[0] for p, q in zip(prompts, params, strict=True)]
        assert_same_rounds(results, cold)
        assert engine.cache.available == 9

    def test_a_cancelled_request_leaves_what_is_known(self, engine):
        prompt = ids(16, 70)
        sequence, _ = prefill(engine, prompt)
        engine.cancel(sequence)
        assert run(engine, prompt)[1] == 70 - 64
        waiting = engine.submit(prompt)
        engine.cancel(waiting)
        assert waiting.result().finish_reason == "cancelled"
        assert waiting.result().prefill_s >= 0 and waiting.result().decode_s == 0
