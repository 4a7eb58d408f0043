"""Many requests together: who joins when, who waits, who is put back. Each request's ids, logit
bits and log-probabilities are those of plain decoding alone, whatever happens around it.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toy import DIMS, YARN, assert_same_results, engine_of, plug, same_bits, write_checkpoint

from cache import CacheFull
from config import UserError
from engine import MODES, Engine
from request import Result
from sampling import SamplingParams

CONTEXT = 640
EOS = DIMS["vocab_size"] - 2
LETTERS = tuple("etaoinshrdlu")


def ids(seed: int, n: int) -> list[int]:
    return np.random.default_rng([13, seed]).integers(0, 250, n).tolist()


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    echo: bool = False

    def submit(self, engine: Engine):
        return engine.submit(list(self.prompt), self.params, keep_logits=True, echo=self.echo)


def mixed_requests() -> list[Request]:
    """64 requests, 1 to 500 tokens long, of every control; some begin alike."""
    rng = np.random.default_rng(0)
    lengths = np.unique(np.geomspace(1, 500, 90).astype(int))
    lengths = rng.permutation(np.append(rng.choice(lengths[1:-1], 62), [1, 500]))
    requests = []
    for i, n in enumerate(lengths.tolist()):
        shared = int(rng.integers(0, n + 1)) if i % 3 == 0 else 0
        prompt = (*ids(1, shared), *ids(100 + i, n - shared))

        def some(share: float, *values, off):
            return values[rng.integers(len(values))] if rng.random() < share else off

        grows = i % 5 == 0  # over several pages, to its cap
        most = 40 if grows else int(rng.integers(1, 15))
        params = SamplingParams(
            temperature=some(0.7, 0.2, 0.8, 1.3, off=0.0),
            seed=int(rng.integers(2**53)),
            top_p=some(0.3, 0.5, 0.95, off=1.0),
            top_k=some(0.3, 3, 40, off=0),
            min_p=some(0.2, 0.05, 0.3, off=0.0),
            frequency_penalty=some(0.3, -0.5, 1.5, off=0.0),
            presence_penalty=some(0.2, -1.0, 2.0, off=0.0),
            repetition_penalty=some(0.3, 0.8, 1.3, off=1.0),
            logit_bias=some(0.3, {EOS: 9.0}, {101: 12.0, 32: 12.0, 7: -100.0}, off={}),
            max_tokens=most,
            min_tokens=min(most, some(0.3, 2, 5, off=0)),
            stop=() if grows else some(0.5, ("e",), ("e ", "  "), LETTERS, off=()),
            stop_token_ids=() if grows else some(0.2, (32, 200), off=()),
            ignore_eos=grows or bool(rng.integers(2)),
            logprobs=some(0.4, 0, 1, 5, off=None),
        )
        requests.append(Request(prompt, params, echo=rng.random() < 0.15))
    return requests


REQUESTS = mixed_requests()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    longer = {"max_position_embeddings": CONTEXT}
    return write_checkpoint(
        tmp_path_factory.mktemp("scheduling") / "toy",
        drafter=longer,
        rope_scaling={**YARN, "original_max_position_embeddings": CONTEXT // 4},
        n_routed_experts=8,
        **longer,
    )


@pytest.fixture(scope="module")
def alone(checkpoint):
    """A request's result by plain decoding alone, in a cache that knows nothing."""
    engine = engine_of(checkpoint, batch=1, prefill_chunk=64)
    admit, kept = engine.cache.admit, {}
    engine.cache.admit = lambda tokens, most: admit()

    def result(request: Request) -> Result:
        key = id(request)
        if key not in kept:
            sequence = request.submit(engine)
            while sequence.finish_reason is None:
                engine.step()
            kept[key] = request, sequence.result()
        return kept[key][1]

    return result


def assert_same(results: list[Result], expected: list[Result]) -> None:
    """Ids, texts, reasons, logit bits, and the bits of every log-probability."""
    assert_same_results(results, expected)
    for r, e in zip(results, expected, strict=True):
        assert (r.logprobs is None) == (e.logprobs is None)
        if r.logprobs is not None:
            for field in dataclasses.fields(r.logprobs):
                assert same_bits(getattr(r.logprobs, field.name), getattr(e.logprobs, field.name))
        assert (r.prompt_logprobs is None) == (e.prompt_logprobs is None)
        assert r.prompt_logprobs is None or same_bits(r.prompt_logprobs, e.prompt_logprobs)


def assert_nothing_left(engine: Engine) -> None:
    """No request, every slot back, every page free or known and in nobody's use."""
    cache = engine.cache
    assert not engine.running and not engine.waiting
    assert sorted(cache.free_slots) == list(range(engine.settings.decode.batch))
    assert cache.available == cache.n_pages
    assert not any(cache.held) and not any(cache._chains)


class Watch:
    """Steps an engine and counts who is put back and how often somebody waits for pages.

    pressure  how often pages are said to be short when they are not, beside when they are
    """

    def __init__(self, engine: Engine, pressure: float = 0.0):
        self.engine = engine
        self.steps = self.put_back = self.waited = 0
        rng, make_room, reserve = np.random.default_rng(0), engine.make_room, engine.cache.reserve

        def short(slot, tokens):
            engine.cache.reserve = reserve
            raise CacheFull

        def watched(sequence):
            before = len(engine.waiting)
            if rng.random() < pressure and sequence.slot >= 0:
                engine.cache.reserve = short
            make_room(sequence)
            self.put_back += len(engine.waiting) - before

        engine.make_room = watched

    def step(self) -> None:
        self.engine.step()
        self.steps += 1
        self.waited += bool(self.engine.waiting and self.engine.cache.free_slots)

    def run(self, sequences) -> list[Result]:
        while any(s.finish_reason is None for s in sequences):
            self.step()
        return [s.result() for s in sequences]


def test_the_mix_holds_what_it_says(alone):
    lengths = [len(r.prompt) for r in REQUESTS]
    assert (len(REQUESTS), min(lengths), max(lengths)) == (64, 1, 500)
    off = SamplingParams()
    for field in dataclasses.fields(SamplingParams):
        values = [getattr(r.params, field.name) for r in REQUESTS]
        assert sum(v != getattr(off, field.name) for v in values) >= 5, field.name
    results = [alone(r) for r in REQUESTS]
    stopped = [r for r in results if r.finish_reason == "stop"]
    assert len(stopped) >= 10 and len(results) - len(stopped) >= 10
    assert sum(not r.token_ids for r in results) >= 1  # ended by its very first token
    assert sum(len(r.token_ids) == 40 for r in results) >= 10


# Pages of 16; the longest request needs 34 of them. Order 2 is with the checkpoint's own drafter.
@pytest.mark.parametrize(
    ("batch", "pages", "order", "mode"),
    [(1, 34, 0, "chain"), (1, 34, 1, "tree"), (3, 37, 1, "ar"), (3, 37, 2, "tree"),
     (8, 44, 1, "chain"), (16, 60, 0, "tree"), (16, 60, 2, "chain")],
)  # fmt: skip
def test_64_requests_are_each_as_if_alone(checkpoint, alone, batch, pages, order, mode):
    answers = [alone(r) for r in REQUESTS]
    engine = engine_of(
        checkpoint, drafter=True, batch=batch, pages=pages, prefill_chunk=(64, 48, 256)[order]
    )
    if order < 2:
        plug(engine, "mixed", [r.prompt for r in REQUESTS], answers, seed=order)
    engine.use(mode, 10)
    rng, watch = np.random.default_rng(order), Watch(engine, pressure=0.02)
    turn = (np.arange(64), np.arange(64)[::-1], rng.permutation(64))[order]
    sequences = {}
    for i in turn.tolist():
        sequences[i] = REQUESTS[i].submit(engine)
        for _ in range(rng.integers(0, 3) if order else 0):
            watch.step()
    results = watch.run(list(sequences.values()))
    assert_same(results, [answers[i] for i in sequences])
    assert_nothing_left(engine)
    assert watch.waited and watch.put_back >= 3


class TestWhoWaits:
    def test_admission_is_by_arrival(self, checkpoint):
        engine = engine_of(checkpoint, batch=4, pages=20)
        first = engine.submit(ids(1, 200), SamplingParams(max_tokens=20, ignore_eos=True))
        large = engine.submit(ids(2, 250), SamplingParams(max_tokens=2, ignore_eos=True))
        small = [engine.submit(ids(3 + i, 4), SamplingParams(max_tokens=1)) for i in range(3)]
        while first.finish_reason is None:
            assert large.slot < 0 and all(s.slot < 0 for s in small)  # nobody overtakes
            engine.step()
        ended = []
        while len(ended) < 4:
            ended += [s for s in engine.step() if s.finish_reason]
        assert set(ended) == {large, *small}
        assert_nothing_left(engine)

    def test_the_youngest_is_put_back(self, checkpoint):
        engine = engine_of(checkpoint, batch=3, pages=8)
        sequences = [
            engine.submit(ids(i, 20), SamplingParams(max_tokens=90, ignore_eos=True))
            for i in range(3)
        ]
        while any(s.finish_reason is None for s in sequences):
            engine.step()
            held = [s.slot >= 0 for s in sequences if s.finish_reason is None]
            assert held == sorted(held, reverse=True)  # elders before younger ones
        finished = [s.finished for s in sequences]
        assert finished == sorted(finished)

    def test_nobody_is_admitted_only_to_be_put_back(self, checkpoint):
        # The elder grows for long; the younger has room for its prompt and little more.
        engine = engine_of(checkpoint, drafter=True, batch=2, pages=12)
        engine.use("tree", 8)
        elder = engine.submit(ids(1, 90), SamplingParams(max_tokens=80, ignore_eos=True))
        younger = engine.submit(ids(2, 60), SamplingParams(max_tokens=90, ignore_eos=True))
        rows, forward, watch = [], engine.model.forward, Watch(engine)

        def counted(batch, cache, logit_rows):
            rows.append(int((batch.sequence == younger.slot).sum()) if younger.slot >= 0 else 0)
            return forward(batch, cache, logit_rows)

        engine.model.forward = counted
        while elder.finish_reason is None:
            watch.step()
        assert watch.put_back == 1
        assert sum(r > 8 for r in rows) <= 4  # its prompt was not computed again and again
        watch.run([younger])
        assert_nothing_left(engine)

    @pytest.mark.parametrize(("n", "most"), [(80, 50), (129, 1), (1, 129)])
    def test_what_can_never_fit_is_refused(self, checkpoint, n, most):
        engine = engine_of(checkpoint, batch=2, pages=8)
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        with pytest.raises(UserError, match=r"need 9 pages of 16, the cache has 8"):
            engine.submit(ids(1, n), params)
        assert_nothing_left(engine)
        fits = dataclasses.replace(params, max_tokens=max(most - 1, 1))
        [result] = engine.generate([ids(1, n - (most == 1))], fits)
        assert len(result.token_ids) == fits.max_tokens


class TestOneForward:
    def pieces(self, engine: Engine, sequences) -> list[dict[int, np.ndarray]]:
        """The positions of each sequence's rows in every forward, by index of the sequence."""
        seen, forward = [], engine.model.forward

        def watched(batch, cache, logit_rows):
            at = {
                i: batch.positions[batch.sequence == s.slot]
                for i, s in enumerate(sequences)
                if s.slot >= 0
            }
            seen.append({i: positions for i, positions in at.items() if len(positions)})
            return forward(batch, cache, logit_rows)

        engine.model.forward = watched
        Watch(engine).run(sequences)
        return seen

    def test_prompts_and_trees_share_it_and_pieces_end_at_absolute_borders(self, checkpoint):
        engine = engine_of(checkpoint, drafter=True, batch=4, prefill_chunk=32)
        engine.use("tree", 8)
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        lengths = (10, 150, 33, 64)
        engine.generate([ids(1, 150)[:20]], params)  # one page of it is known then
        sequences = [engine.submit(ids(i, n), params) for i, n in enumerate(lengths)]
        seen = self.pieces(engine, sequences)
        done, shared = [0, 16, 0, 0], 0
        for at in seen:
            kinds = set()
            for i, positions in at.items():
                if done[i] < lengths[i]:
                    end = min(lengths[i], (done[i] // 32 + 1) * 32)
                    assert positions.tolist() == list(range(done[i], end))
                    done[i] = end
                    kinds.add("prompt")
                else:
                    kinds.add("tree")
            shared += len(kinds) == 2
            assert sum(map(len, at.values())) < 2 * 32 + 4 * 8
        assert done == list(lengths) and shared >= 4

    def test_a_long_prompt_does_not_hold_up_the_others(self, checkpoint):
        engine = engine_of(checkpoint, batch=2, prefill_chunk=32)
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        sequences = [engine.submit(ids(1, 5), params), engine.submit(ids(2, 400), params)]
        seen = self.pieces(engine, sequences)
        assert all(0 in at for at in seen[:10])


class TestLibrary:
    """`submit` from any thread; whoever waits for text drives the steps."""

    def test_four_threads_stream_at_once(self, checkpoint, alone):
        engine = engine_of(checkpoint, drafter=True, batch=3, pages=40)
        engine.use("tree", 8)
        mine = [r for r in REQUESTS if len(r.prompt) < 100 and not r.echo][:24]
        answers, found, failed = [alone(r) for r in mine], {}, []
        ready = threading.Barrier(4)

        def work(thread: int) -> None:
            try:
                ready.wait()
                for i in range(thread, len(mine), 4):
                    if i % 8 < 4:
                        sequence = mine[i].submit(engine)
                        text = "".join(engine.stream(sequence))
                        found[i] = sequence.result()
                        assert text == found[i].text
                    else:
                        prompt, params = list(mine[i].prompt), mine[i].params
                        [found[i]] = engine.generate([prompt], params, keep_logits=True)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed and not any(thread.is_alive() for thread in threads)
        assert_same([found[i] for i in range(len(mine))], answers)
        assert all(r.decode_s >= 0 and r.prefill_s > 0 for r in found.values())
        assert_nothing_left(engine)

    def test_j1_fifty_aborts(self, checkpoint, alone):
        # Readers leave while waiting, amid the prompt, amid the text; one request goes on beside
        # them all.
        engine = engine_of(checkpoint, drafter=True, batch=3, pages=24)
        engine.use("tree", 8)
        [steady] = [r for r in REQUESTS if r.params.max_tokens == 40 and len(r.prompt) < 20][:1]
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        sizes = []
        for _ in range(2):
            neighbour = steady.submit(engine)
            for i in range(50):
                sequence = engine.submit(ids(i, 1 + 5 * i % 90), params, keep_logits=True)
                if i % 3 == 0:
                    reader = engine.stream(sequence)
                    next(reader, None)
                    reader.close()
                else:
                    for _ in range(i % 3 - 1):
                        engine.step()
                    engine.cancel(sequence)
                assert sequence.finish_reason == "cancelled"
                assert sequence.slot == -1 and sequence not in engine.waiting
                result = sequence.result()
                assert len(result.token_ids) == len(sequence.logits)
                assert result.decode_s >= 0 and result.prefill_s >= 0
            assert_same(Watch(engine).run([neighbour]), [alone(steady)])
            assert_nothing_left(engine)
            del sequence, reader, result, neighbour
            gc.collect()
            sizes.append(len(gc.get_objects()))
        assert sizes[1] - sizes[0] < 300  # nothing of fifty more requests has stayed

    def test_generate_that_is_interrupted_leaves_nothing(self, checkpoint, monkeypatch):
        engine = engine_of(checkpoint, batch=2)
        step, steps = engine.step, []

        def interrupted():
            steps.append(step())
            if len(steps) == 5:
                raise KeyboardInterrupt
            return steps[-1]

        monkeypatch.setattr(engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([ids(i, 30) for i in range(4)], SamplingParams(max_tokens=50))
        assert_nothing_left(engine)

    def test_cancelling_twice_or_after_the_end_changes_nothing(self, checkpoint):
        engine = engine_of(checkpoint, batch=1)
        [ended, waiting] = [engine.submit(ids(i, 3), SamplingParams(max_tokens=2)) for i in (1, 2)]
        while ended.finish_reason is None:
            engine.step()
        reason = ended.finish_reason
        for sequence in (ended, waiting, waiting):
            engine.cancel(sequence)
        assert (ended.finish_reason, waiting.finish_reason) == (reason, "cancelled")
        assert_nothing_left(engine)


# ---- anything at any moment --------------------------------------------------------------------

BASE = ids(50, 80)
POOL = [
    Request(
        tuple(BASE[:n]) if i % 2 else tuple(ids(200 + i, n)),
        SamplingParams(
            temperature=(0.0, 1.0, 0.4)[i % 3],
            seed=i,
            top_k=(0, 20)[i % 2],
            frequency_penalty=(0.0, 0.0, 1.0)[i % 3],
            max_tokens=(1, 4, 9, 30)[i % 4],
            stop=LETTERS if i % 5 == 0 else (),
            ignore_eos=i % 4 != 0,
            logit_bias={EOS: 7.0} if i % 7 == 0 else {},
            logprobs=(None, 2)[i % 2],
        ),
        echo=i % 9 == 0,
    )
    for i, n in enumerate([1, 2, 7, 15, 16, 17, 30, 31, 32, 33, 47, 48, 49, 64, 65, 80] * 2)
]
REFUSED = [
    ([], SamplingParams()),
    ([DIMS["vocab_size"]], SamplingParams()),
    ([1] * CONTEXT, SamplingParams()),
    ([1] * 80, SamplingParams(max_tokens=500)),
    ([1], SamplingParams(temperature=-0.1)),
    ([1], SamplingParams(top_p=0.0)),
    ([1], SamplingParams(min_tokens=5, max_tokens=4)),
    ([1], SamplingParams(logit_bias={DIMS["vocab_size"]: 1.0})),
    ([1], SamplingParams(stop=("",))),
]


class AnyMoment(RuleBasedStateMachine):
    """Requests join, leave and end while the mode changes; three slots, ten pages."""

    checkpoint = alone = None  # given by the test below

    def __init__(self):
        super().__init__()
        self.engine = engine_of(self.checkpoint, drafter=True, batch=3, pages=10)
        self.asked: list[tuple[Request, object]] = []

    @initialize(first=st.lists(st.sampled_from(POOL), max_size=6), mode=st.sampled_from(MODES))
    def begin(self, first, mode):
        self.engine.use(mode, 6)
        for request in first:
            self.submit(request)

    @rule(request=st.sampled_from(POOL))
    def submit(self, request):
        self.asked.append((request, request.submit(self.engine)))

    @rule(bad=st.sampled_from(REFUSED))
    def refuse(self, bad):
        before = len(self.engine.waiting), len(self.engine.running)
        with pytest.raises(UserError):
            self.engine.submit(*bad)
        assert before == (len(self.engine.waiting), len(self.engine.running))

    @rule(n=st.integers(1, 6))
    def step(self, n):
        for _ in range(n):
            self.engine.step()

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        self.engine.cancel(self.asked[which % len(self.asked)][1])

    @rule(mode=st.sampled_from(MODES), budget=st.integers(1, 12))
    def change_mode(self, mode, budget):
        self.engine.use(mode, budget)

    @invariant()
    def arrivals_are_in_order(self):
        arrivals = [s.arrival for s in [*self.engine.running, *self.engine.waiting]]
        assert arrivals == sorted(arrivals)

    def teardown(self):
        Watch(self.engine).run([s for _, s in self.asked])
        assert_nothing_left(self.engine)
        for request, sequence in self.asked:
            result, answer = sequence.result(), self.alone(request)
            if result.finish_reason != "cancelled":
                assert_same([result], [answer])
                continue
            n = len(result.token_ids)
            assert result.token_ids == answer.token_ids[:n]
            assert answer.text.startswith(result.text)
            assert n == 0 or same_bits(result.logits, answer.logits[:n])


def test_anything_at_any_moment(checkpoint, alone):
    AnyMoment.checkpoint, AnyMoment.alone = checkpoint, staticmethod(alone)
    machine = AnyMoment.TestCase
    machine.settings = settings(
        max_examples=30,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    machine().runTest()
