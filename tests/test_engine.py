"""engine.py: the step loop on the toy model. Its promise: AR, chain and tree, alone or together,
now or later, give the same ids and the same logit bits; only the number of steps differs."""

from __future__ import annotations

import base64
import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from toy import assert_same_results, decode, engine_of, plug, same_bits, write_checkpoint

import reference
import spec_decode
from config import UserError
from engine import Engine
from sampling import SamplingParams

CONTEXT = 64
MODES = ("ar", "chain", "tree")
KINDS = ("perfect", "random", "wrong")
POISON = 255  # a token whose embedding is NaN in the `poisoned` checkpoint


def ids(seed: int, n: int) -> list[int]:
    return np.random.default_rng([7, seed]).integers(0, 250, n).tolist()


PROMPTS = [ids(i, 1 + (7 * i) % 37) for i in range(30)]  # lengths on both sides of leaf and chunk


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "toy", drafter={})


@pytest.fixture(scope="module")
def plain(checkpoint) -> Engine:
    """An engine that only ever decodes one at a time, one token at a time."""
    return engine_of(checkpoint, batch=1)


@pytest.fixture
def engine(checkpoint) -> Engine:
    """A cold engine of four slots with the toy's own drafter."""
    return engine_of(checkpoint, drafter=True, batch=4)


def solo(plain: Engine, prompts, **params):
    """Plain decoding of each prompt alone; an engine's answers are kept."""
    kept = plain.__dict__.setdefault("answers", {})
    for prompt in prompts:
        key = (tuple(prompt), *params.items())
        if key not in kept:
            [kept[key]] = decode(plain, [prompt], **params)
    return [kept[(tuple(prompt), *params.items())] for prompt in prompts]


def on_forward(engine: Engine, change) -> None:
    """Call change(batch, logit_rows, logits) after every forward; it may edit the logits."""
    forward = engine.model.forward

    def wrapped(batch, cache, logit_rows):
        out = forward(batch, cache, logit_rows)
        change(batch, logit_rows, out.logits)
        return out

    engine.model.forward = wrapped


def run(engine: Engine, sequences) -> list:
    """Step until all have ended."""
    while any(s.finish_reason is None for s in sequences):
        engine.step()
    return [s.result() for s in sequences]


def assert_idle(engine: Engine) -> None:
    """No request is left, and every slot is back."""
    assert not engine.running and not engine.waiting
    assert sorted(engine.cache.free_slots) == list(range(engine.settings.decode.batch))


class TestContextEnd:
    """E3: speculation reaches the end of the context."""

    @pytest.mark.parametrize("leaf", [16, 32, 64])
    @pytest.mark.parametrize("kind", ["perfect", "mixed", "own"])
    def test_e3(self, checkpoint, kind, leaf):
        settings = {"leaf": leaf, "prefill_chunk": 64, "batch": 2}
        prompts = [ids(n, n) for n in range(56, 64)]
        plain = engine_of(checkpoint, **settings)
        answers = solo(plain, prompts, max_tokens=None)
        for prompt, answer in zip(prompts, answers, strict=True):
            engine = engine_of(checkpoint, drafter=True, **settings)  # every page is still zero
            if kind != "own":
                plug(engine, kind, prompts, answers, block=9)  # trees of depth 8
            last = []
            on_forward(engine, lambda batch, *_, last=last: last.append(batch.positions.max()))
            results = decode(engine, [prompt], "tree", 24, max_tokens=None)
            assert_same_results(results, [answer])
            assert len(results[0].token_ids) == CONTEXT - len(prompt)
            assert results[0].finish_reason == "length"
            assert max(last) < CONTEXT
            for pages in (engine.cache.pages, engine.cache.draft):
                used = pages.any(axis=(0, 2, 3))
                assert used.sum() <= CONTEXT // leaf  # the other slot's pages were not touched
            assert_idle(engine)

    @pytest.mark.parametrize("mode", MODES)
    def test_prompt_that_leaves_one_place(self, engine, mode):
        [result] = decode(engine, [ids(1, CONTEXT - 1)], mode, max_tokens=None)
        assert (len(result.token_ids), result.finish_reason, result.steps) == (1, "length", 0)

    @pytest.mark.parametrize("n", [CONTEXT, CONTEXT + 1, 1000])
    def test_prompt_that_does_not_fit(self, engine, n):
        with pytest.raises(UserError, match=rf"prompt: {n} tokens do not fit.* {CONTEXT} "):
            engine.submit(ids(1, n))
        assert_idle(engine)


STOP = 264


def scripted(
    monkeypatch, engine: Engine, prompt: list[int], script: list[int], mode: str, **params
):
    """Decode with a target that says `script` (then 1, 1, ...) and a drafter that knows it."""
    said = script + [1] * CONTEXT

    def choose(logits, positions, *_, **__):
        return np.array([said[p - len(prompt)] for p in positions], np.int32)

    monkeypatch.setattr(engine.ops, "choose", choose)
    plug(engine, "perfect", [prompt], [SimpleNamespace(token_ids=said)])
    engine.use(mode, 16)
    sequence = engine.submit(prompt, SamplingParams(**params), keep_logits=True)
    pieces = list(engine.stream(sequence))
    result = sequence.result()
    assert "".join(pieces) == result.text
    assert len(result.logits if result.logits is not None else []) == len(result.token_ids)
    assert_idle(engine)
    return result


class TestStops:
    """F5, J7: whichever comes first in the text ends it, however many tokens a step brings."""

    # After the prefill's token, one step brings a, b, STOP, c, d, e (where the mode drafts).
    F5 = list(b"0ab") + [STOP] + list(b"cde")
    SIXTH = list(b"0abcde") + [STOP] + list(b"fg")

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        ("script", "cap", "text", "reason"),
        [
            (F5, 1 + 5, "0ab", "stop"),
            (SIXTH, 1 + 5, "0abcde", "length"),
            (F5, 1 + 3, "0ab", "stop"),  # the cap exactly at the stop
            (F5, 1 + 2, "0ab", "length"),  # and one before it
            (SIXTH, 1 + 6, "0abcde", "stop"),
            (F5, None, "0ab", "stop"),
            ([STOP, 97], 5, "", "stop"),  # the prefill's own token
            ([STOP, 97], 1, "", "stop"),
        ],
    )
    @pytest.mark.parametrize("kind", ["eos", "stop_token_ids"])
    def test_f5(self, monkeypatch, engine, mode, script, cap, text, reason, kind):
        own = {}
        if kind == "eos":
            engine.eos_ids = (STOP,)
        else:
            own["stop_token_ids"] = (STOP,)
        result = scripted(monkeypatch, engine, ids(2, 9), script, mode, max_tokens=cap, **own)
        assert (result.text, result.finish_reason) == (text, reason)
        assert result.token_ids == list(text.encode())

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        ("cap", "text", "n_ids", "reason"),
        [
            (10, "0ab", 6, "stop"),
            (6, "0ab", 6, "stop"),  # the cap exactly at the stop's last token
            (5, "0abST", 5, "length"),  # it never came to be
        ],
    )
    def test_f5_stop_string(self, monkeypatch, engine, mode, cap, text, n_ids, reason):
        script = list(b"0abSTOcde")
        result = scripted(
            monkeypatch, engine, ids(2, 9), script, mode, max_tokens=cap, stop=("STO",)
        )
        assert (result.text, result.finish_reason) == (text, reason)
        assert result.token_ids == script[:n_ids]

    @pytest.mark.parametrize("mode", MODES)  # ar: a piece a step; else all in one
    @pytest.mark.parametrize(
        ("pieces", "text", "reason"),
        [
            (["so ", "be", "ta ga", "mma x"], "so ", "stop"),
            (["so ", "be", "ta ga", "s yes"], "so beta gas yes", "length"),
            (["be", "ta ga", "mma x", "so "], "", "stop"),
            (["so ", "be", "be", "ta ga", "mma x"], "so be", "stop"),
            (["so ", "be", "ta ga", "be", "ta ga", "mma x"], "so beta ga", "stop"),
            (["so ", "be", "ta ga"], "so beta ga", "length"),  # held back, then set free
        ],
    )
    def test_f11(self, monkeypatch, checkpoint, tmp_path, mode, pieces, text, reason):
        words = sorted({*pieces})
        directory = Path(shutil.copytree(checkpoint, tmp_path / "toy"))
        with (directory / "tiktoken.model").open("ab") as file:
            for rank, word in enumerate(words, start=256):
                file.write(base64.b64encode(word.encode()) + b" %d\n" % rank)
        engine = engine_of(directory, batch=1)
        script = [256 + words.index(p) for p in pieces]
        result = scripted(  # which also checks that the stream is the text
            *(monkeypatch, engine, ids(2, 9), script, mode),
            **{"max_tokens": len(script), "stop": ("beta gamma", "gamma z")},
        )
        assert (result.text, result.finish_reason) == (text, reason)

    @pytest.mark.parametrize("mode", MODES)
    def test_before_min_tokens_nothing_ends_the_text(self, monkeypatch, engine, mode):
        script = list(b"0STOP") + [STOP] + list(b"1STOP2")
        wanted = {"stop": ("STOP",), "stop_token_ids": (STOP,), "min_tokens": 7}
        result = scripted(monkeypatch, engine, ids(2, 9), script, mode, **wanted)
        assert result.token_ids == script[:-1] and result.finish_reason == "stop"
        assert result.text.startswith("0STOP") and result.text.endswith("1")

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("shape", [lambda a, b: [a, b], lambda a, b: a], ids=["list", "one"])
    @pytest.mark.parametrize("which", [0, 1])
    def test_j7(self, checkpoint, tmp_path, plain, mode, shape, which):
        # The ids that end the text are ids that the toy says by itself, at the 6th and 9th place.
        prompt = next(p for p in PROMPTS if len(set(solo(plain, [p])[0].token_ids[:9])) == 9)
        answer = solo(plain, [prompt])[0]
        first, second = answer.token_ids[5], answer.token_ids[8]
        eos = shape(first, second) if which == 0 else shape(second, 263)
        directory = Path(shutil.copytree(checkpoint, tmp_path / "toy"))
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        engine = engine_of(directory, batch=2)
        plug(engine, "perfect", [prompt], [answer])
        [result] = decode(engine, [prompt], mode, ignore_eos=False)
        end = 5 if which == 0 else 8
        assert (result.token_ids, result.finish_reason) == (answer.token_ids[:end], "stop")
        assert same_bits(result.logits, answer.logits[:end])
        if mode != "ar":
            assert result.steps < end  # it was inside an accepted span
        assert_same_results(decode(engine, [prompt], mode, ignore_eos=True), [answer])


class TestSpeculationIsExact:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("mode", ["chain", "tree"])
    def test_f7(self, checkpoint, plain, kind, mode):
        answers = solo(plain, PROMPTS)
        engine = engine_of(checkpoint, batch=8)
        plug(engine, kind, PROMPTS, answers)
        results = decode(engine, PROMPTS, mode)
        assert_same_results(results, answers)
        lengths = [r.acceptance_length for r in results]
        if kind == "wrong":
            assert set(lengths) == {1.0}
        if kind == "perfect":
            assert {r.steps for r in results} == {3}  # 23 tokens after the first, 8 a step

    @pytest.mark.parametrize("kind", KINDS)
    def test_f7_ties_go_to_the_lowest_id(self, checkpoint, kind):
        engine = engine_of(checkpoint, batch=4)
        chosen = []

        def coarse(batch, rows, logits):  # whole numbers: nearly every best one has equals
            logits[:] = np.round(logits / 4)
            chosen.append((logits == logits.max(1, keepdims=True)).sum(1).max())

        on_forward(engine, coarse)
        answers = decode(engine, PROMPTS[:8])
        assert max(chosen) > 1
        for answer in answers:
            first = [int(np.flatnonzero(row == row.max())[0]) for row in answer.logits]
            assert answer.token_ids == first
        plug(engine, kind, PROMPTS[:8], answers)
        assert_same_results(decode(engine, PROMPTS[:8], "tree"), answers)

    @pytest.mark.parametrize("temperature", [0.7, 1.0])
    @pytest.mark.parametrize("mode", ["chain", "tree"])
    def test_sampled(self, engine, plain, mode, temperature):
        # The drafter's own noise is the target's: with its real logits some drafts are right.
        wanted = {"temperature": temperature, "seed": 11, "top_p": 0.9, "top_k": 50}
        assert_same_results(
            decode(engine, PROMPTS[:8], mode, **wanted), solo(plain, PROMPTS[:8], **wanted)
        )

    @pytest.mark.parametrize("seed", [None, 5])
    def test_f1_f3_scattered_nodes(self, monkeypatch, checkpoint, plain, seed):
        # At every other depth two wrong tokens look better than the right one, so accepted nodes
        # have rejected ones between them, and requests of one batch accept different numbers.
        wanted = {"temperature": 0.0 if seed is None else 0.5, "seed": seed}
        answers = solo(plain, PROMPTS[:9], **wanted)
        engine = engine_of(checkpoint, batch=3)
        drafter = plug(engine, "mixed", PROMPTS[:9], answers)
        draft, walks, walk = drafter.draft, [], spec_decode.walk

        def demoted(roots, slots, cache):
            logits = draft(roots, slots, cache)
            for rows in logits:
                for row in rows[::2]:
                    right = int(row.argmax())
                    row[[(right + 1) % 250, (right + 2) % 250]] = row[right] + 0.5
            return logits

        def watched(*args):
            walks.append(walk(*args))
            return walks[-1]

        drafter.draft = demoted
        monkeypatch.setattr(spec_decode, "walk", watched)
        assert_same_results(decode(engine, PROMPTS[:9], "tree", 64, **wanted), answers)
        scattered = [w.rows for w in walks if w.rows != list(range(len(w.rows)))]
        assert len(scattered) > 5 and max(map(len, scattered)) > 3

    @pytest.mark.parametrize("budget", [1, 2, 3, 8, 64])
    def test_any_budget(self, engine, plain, budget):
        answers = solo(plain, PROMPTS[:4])
        assert_same_results(decode(engine, PROMPTS[:4], "tree", budget), answers)

    def test_penalties_follow_each_nodes_own_path(self, checkpoint, plain):  # F8
        wanted = {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 1.3}
        answers = solo(plain, PROMPTS[:8], **wanted)
        assert answers[3].token_ids != solo(plain, [PROMPTS[3]])[0].token_ids
        for kind in ("perfect", "mixed", "wrong"):
            engine = engine_of(checkpoint, batch=8)
            plug(engine, kind, PROMPTS[:8], answers)
            assert_same_results(decode(engine, PROMPTS[:8], "tree", **wanted), answers)

    def test_f8_a_rejected_draft_carries_no_penalty(self, checkpoint, plain):
        never = 7
        wanted = {"frequency_penalty": 2, "repetition_penalty": 1.3, "logit_bias": {never: -100.0}}
        [answer] = decode(plain, PROMPTS[3:4], **wanted)
        engine = engine_of(checkpoint, batch=1)
        drafter = plug(engine, "wrong", PROMPTS[3:4], [answer])
        seen, draft, choose = [], drafter.draft, engine.ops.choose

        def stubborn(*args):
            logits = draft(*args)
            logits[:, :, never] = 50.0
            return logits

        def watched(logits, positions, params, paths):
            seen.append([path.output.get(never, 0) for path in paths])
            return choose(logits, positions, params, paths)

        drafter.draft, engine.ops.choose = stubborn, watched
        assert_same_results(decode(engine, PROMPTS[3:4], "chain", **wanted), [answer])
        # At the root it was never said; down the chain of such drafts it counts one more a node.
        assert len(seen) > 20 and all(counts == list(range(len(counts))) for counts in seen)


class TestSampling:
    """G1, G3."""

    def test_g1(self, engine):
        greedy = decode(engine, PROMPTS[:3])
        for same in (
            {"temperature": 1e-12},
            {"temperature": 1.0, "top_p": 1e-8, "seed": 1},
            {"temperature": 1.0, "top_k": 1, "seed": 1},
            {"temperature": 1e-4, "seed": 1},
        ):
            assert_same_results(decode(engine, PROMPTS[:3], "tree", **same), greedy)
        sampled = decode(engine, PROMPTS[:3], temperature=1.0, seed=1)
        assert [r.token_ids for r in sampled] != [r.token_ids for r in greedy]
        for off in ({"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}, {"top_k": 10**9}):
            again = decode(engine, PROMPTS[:3], "tree", temperature=1.0, seed=1, **off)
            assert_same_results(again, sampled)

    @pytest.mark.parametrize("mode", MODES)
    def test_g3(self, checkpoint, plain, engine, mode):
        prompt = PROMPTS[5]
        wanted = SamplingParams(1.0, seed=42, max_tokens=24, ignore_eos=True)
        [answer] = solo(plain, [prompt], temperature=1.0, seed=42)
        engine.use(mode, 16)

        def beside(before: int, after: int, slot: int):
            """The request among unseeded ones that came before and after it."""
            free = SamplingParams(1.0, max_tokens=30)
            others = [engine.submit(p, free) for p in PROMPTS[8 : 8 + before]]
            mine = engine.submit(prompt, wanted, keep_logits=True)
            others += [engine.submit(p, free) for p in PROMPTS[20 : 20 + after]]
            engine.step()
            assert mine.slot == slot
            run(engine, [mine, *others])
            return mine.result()

        cold = beside(0, 0, slot=0)
        warm = beside(0, 1, slot=0)
        # Take slots in ascending order again, whatever order they came back in.
        engine.cache.free_slots.sort(reverse=True)
        last = beside(3, 2, slot=3)
        assert_same_results([cold, warm, last], [answer] * 3)
        assert cold.seed == 42

    def test_unseeded_requests_differ(self, engine):
        runs = [decode(engine, [PROMPTS[5]], temperature=1.0)[0] for _ in range(5)]
        assert len({tuple(r.token_ids) for r in runs}) >= 2
        assert len({r.seed for r in runs}) == 5
        again = decode(engine, [PROMPTS[5]], "tree", temperature=1.0, seed=runs[2].seed)
        assert_same_results(again, [runs[2]])  # the reported seed is the one that was used

    def test_greedy_needs_no_seed(self, engine):
        assert decode(engine, [PROMPTS[0]])[0].seed is None


class TestCounters:
    """The first token is the prefill's; the verify steps emitted the others."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("cap", [1, 2, 9, 17, 18])
    def test_counts(self, checkpoint, plain, mode, cap):
        answers = solo(plain, PROMPTS[:3])
        engine = engine_of(checkpoint, batch=2)
        plug(engine, "perfect", PROMPTS[:3], answers)
        results = decode(engine, PROMPTS[:3], mode, max_tokens=cap)
        for prompt, result in zip(PROMPTS, results, strict=False):
            steps = cap - 1 if mode == "ar" else -(-(cap - 1) // 8)
            assert result.prompt_tokens == len(prompt)
            assert (len(result.token_ids), result.steps) == (cap, steps)
            assert result.finish_reason == "length"
            assert result.acceptance_length == ((cap - 1) / steps if steps else 0)
            assert result.prefill_s > 0 and result.decode_s >= 0
            assert result.tok_per_s == (cap > 1) * (cap - 1) / (result.decode_s or 1)

    def test_stop_on_the_first_token(self, monkeypatch, engine):
        result = scripted(monkeypatch, engine, ids(2, 9), [STOP], "tree", stop_token_ids=(STOP,))
        assert (result.token_ids, result.steps, result.acceptance_length) == ([], 0, 0)
        assert (result.text, result.logits, result.tok_per_s) == ("", None, 0)

    def test_a_step_that_only_stops_is_counted(self, monkeypatch, engine):
        script = [97, STOP]
        result = scripted(monkeypatch, engine, ids(2, 9), script, "tree", stop_token_ids=(STOP,))
        assert (result.token_ids, result.steps, result.acceptance_length) == ([97], 1, 0)


class TestText:
    """Text leaves in whole characters, whatever a step brings."""

    WORDS = "aé€😀z中𝄞 ok"

    @pytest.mark.parametrize("mode", MODES)
    def test_characters_are_not_split(self, monkeypatch, engine, mode):
        script = list(self.WORDS.encode())
        pieces = []
        feed = type(engine).stream

        def stream(self, sequence):
            for piece in feed(self, sequence):
                pieces.append(piece)
                yield piece

        monkeypatch.setattr(type(engine), "stream", stream)
        result = scripted(monkeypatch, engine, ids(2, 9), script, mode, max_tokens=len(script))
        assert result.text == self.WORDS
        assert "\ufffd" not in "".join(pieces) and "" not in pieces
        assert len(pieces) > 1

    def test_stream_is_the_text(self, engine):
        engine.use("tree", 16)
        sequence = engine.submit("hello", SamplingParams(max_tokens=24, ignore_eos=True))
        assert "".join(engine.stream(sequence)) == sequence.result().text
        assert sequence.result().prompt_tokens == 5

    def test_control_strings_of_a_prompt_are_text(self, engine):
        sequence = engine.submit("[EOS][PAD]", SamplingParams(max_tokens=1))
        assert sequence.prompt == list(b"[EOS][PAD]")
        run(engine, [sequence])


class TestBatching:
    """Requests join and leave at any step, and each is as if it were alone."""

    @pytest.mark.parametrize("batch", [1, 3, 8])
    @pytest.mark.parametrize("kind", ["mixed", "own"])
    def test_more_requests_than_slots(self, checkpoint, plain, batch, kind):
        answers = solo(plain, PROMPTS[:12])
        engine = engine_of(checkpoint, drafter=True, batch=batch)
        if kind == "mixed":
            plug(engine, kind, PROMPTS[:12], answers)
        assert_same_results(decode(engine, PROMPTS[:12], "tree"), answers)
        assert_idle(engine)

    @pytest.mark.parametrize("seed", range(4))
    def test_joins_at_any_step(self, checkpoint, plain, seed):
        rng = np.random.default_rng(seed)
        engine = engine_of(checkpoint, drafter=True, batch=3)
        engine.use(MODES[seed % 3], 8)
        asked, sequences = [], []
        for i in range(10):
            seeded = {"temperature": 1.0, "seed": i} if i % 3 else {}
            params = {"max_tokens": int(rng.integers(1, 20)), "ignore_eos": True, **seeded}
            asked.append((PROMPTS[(i + 8 * seed) % 30], params))
        for prompt, params in asked:
            sequences.append(engine.submit(prompt, SamplingParams(**params), keep_logits=True))
            for _ in range(rng.integers(0, 5)):
                if engine.running or engine.waiting:
                    engine.step()
        results = run(engine, sequences)
        assert_same_results(results, [solo(plain, [p], **params)[0] for p, params in asked])
        assert_idle(engine)

    def test_a_step_without_requests_is_nothing(self, engine):
        assert engine.step() == []

    def test_arrival_is_the_order_of_admission(self, engine):
        engine.use("ar", 1)
        sequences = [engine.submit(p, SamplingParams(max_tokens=4)) for p in PROMPTS[:9]]
        engine.step()
        assert [s for s in sequences if s.slot >= 0] == sequences[:4]
        run(engine, sequences)

    def test_chunks_of_a_prompt_do_not_change_bits(self, checkpoint, plain):
        prompts = [ids(n, n) for n in (15, 16, 17, 31, 32, 33, 47, 48, 49)]
        answers = solo(plain, prompts, max_tokens=8)
        for chunk in (16, 48, 64):
            engine = engine_of(checkpoint, batch=4, prefill_chunk=chunk)
            assert_same_results(decode(engine, prompts, max_tokens=8), answers)

    def test_a_refused_request_changes_nothing(self, engine, plain):
        engine.use("tree", 16)
        sequence = engine.submit(PROMPTS[3], SamplingParams(max_tokens=24), keep_logits=True)
        engine.step()
        for prompt, params in (
            ([], None),
            ("", None),
            ([272], None),
            ([-1], None),
            ([5], SamplingParams(temperature=-1)),
            ([5], SamplingParams(temperature=float("nan"))),
            ([5], SamplingParams(top_p=0)),
            ([5], SamplingParams(max_tokens=0)),
        ):
            with pytest.raises(UserError):
                engine.submit(prompt, params)
        assert_same_results(run(engine, [sequence]), solo(plain, [PROMPTS[3]], ignore_eos=False))
        assert_idle(engine)

    def test_generate_refuses_all_or_nothing(self, engine):
        with pytest.raises(UserError):
            engine.generate([PROMPTS[0], []], SamplingParams(max_tokens=4))
        assert_idle(engine)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    def change(tensors):
        tensors["model.embed_tokens.weight"][POISON] = np.nan

    return write_checkpoint(
        tmp_path_factory.mktemp("engine") / "poisoned", drafter={}, change=change
    )


class TestNotANumber:
    """A request whose logits are no numbers ends with an error, and nobody else notices."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.parametrize("after", [0, 1, 5])
    def test_neighbours_keep_their_bits(self, engine, plain, mode, bad, after):
        prompts = PROMPTS[10:16]
        answers = solo(plain, prompts)
        end = len(prompts[1]) + after  # of the position that the first bad row emits

        def poison(batch, rows, logits):
            victim = [s.slot for s in engine.running if s.prompt == prompts[1]]
            bad_rows = np.isin(batch.sequence[rows], victim) & (batch.positions[rows] + 1 >= end)
            logits[bad_rows, 3] = bad

        on_forward(engine, poison)
        results = decode(engine, prompts, mode)
        failed = results.pop(1)
        assert failed.finish_reason == "error" and failed.error
        assert failed.token_ids == answers[1].token_ids[:after]
        assert_same_results(results, [answers[0], *answers[2:]])
        assert_idle(engine)

    @pytest.mark.parametrize(
        "mode, budget", [("ar", 1), ("chain", 1), ("tree", 8), ("tree", "auto")]
    )
    @pytest.mark.parametrize("bad", [np.inf, 1e38])
    def test_it_is_said_once(self, tmp_path, mode, budget, bad):
        """By the request's error, and by no warning of NumPy's beside it."""

        def change(tensors):
            tensors["model.embed_tokens.weight"][POISON] = bad

        directory = write_checkpoint(tmp_path / "toy", drafter={}, change=change)
        engine = engine_of(directory, drafter=True, batch=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results = decode(engine, [[1, 2, POISON], [3, 4]], mode, budget)
        ended = "error" if bad == np.inf else "length"
        assert [r.finish_reason for r in results] == [ended, "length"]

    @pytest.mark.parametrize("mode", MODES)
    def test_broken_entries_stay_where_they_are(self, poisoned, mode):
        # The whole way is NaN: cache entries, router, taps, drafts. Good requests run beside it and
        # after it, in its slot and its pages.
        fine = PROMPTS[12:16]
        broken = [*PROMPTS[17], POISON, *PROMPTS[18]]
        answers = solo(engine_of(poisoned, batch=1), fine)
        engine = engine_of(poisoned, drafter=True, batch=3)
        for _ in range(2):
            results = decode(engine, [fine[0], broken, fine[1], fine[2], broken, fine[3]], mode)
            assert [r.finish_reason for r in results].count("error") == 2
            assert_same_results([results[i] for i in (0, 2, 3, 5)], answers)
        assert_idle(engine)

    def test_a_passing_fault_is_not_remembered(self, engine, plain):
        # The entries of a prompt are spoilt once. The same prompt must not find them again.
        prompt = ids(99, 40)
        assert len(prompt) > 2 * engine.cache.leaf
        engine.use("tree", 16)
        forward = engine.model.forward

        def spoilt(batch, cache, logit_rows):
            out = forward(batch, cache, logit_rows)
            out.entries[:] = np.nan
            out.logits[:] = np.nan
            return out

        engine.model.forward = spoilt
        [failed] = decode(engine, [prompt], "tree")
        assert failed.finish_reason == "error"
        engine.model.forward = forward
        assert_same_results(decode(engine, [prompt], "tree"), solo(plain, [prompt]))

    @pytest.mark.filterwarnings("error")
    def test_threads_of_a_product_warn_as_their_caller_does(self):
        large = np.full(4, 3e38, np.float32)
        parts = [lambda: large * large] * reference.WORKERS
        with np.errstate(over="ignore"):
            reference.run_parts(parts)
        with np.errstate(over="warn"), pytest.raises(RuntimeWarning, match="overflow"):
            reference.run_parts(parts)

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("wanted", [{"logprobs": 3}, {"temperature": 1.0, "top_p": 0.5}])
    def test_echo_of_a_broken_prompt_is_an_error_like_others(self, poisoned, wanted):
        engine = engine_of(poisoned, drafter=True, batch=2)
        broken, fine = [*PROMPTS[16], POISON, *PROMPTS[17]], PROMPTS[12]
        params = SamplingParams(max_tokens=6, ignore_eos=True, **wanted)
        results = engine.generate([broken, fine], params, echo=True)
        assert [r.finish_reason for r in results] == ["error", "length"]
        assert len(results[0].prompt_logprobs) == len(broken) - 1
        known = len(PROMPTS[16]) - 1
        assert np.isfinite(results[0].prompt_logprobs[:known]).all()
        assert np.isnan(results[0].prompt_logprobs[known + 1 :]).all()
        assert np.isfinite(results[1].prompt_logprobs).all()

    def test_nan_drafts_cost_steps_and_nothing_else(self, engine, plain):
        draft = engine.drafter.draft

        def broken(*args):
            logits = draft(*args)
            logits[:, 2:] = np.nan
            logits[0] = np.nan
            return logits

        engine.drafter.draft = broken
        for wanted in ({}, {"temperature": 1.0, "seed": 3}):
            answers = solo(plain, PROMPTS[:6], **wanted)
            for mode in ("chain", "tree"):
                assert_same_results(decode(engine, PROMPTS[:6], mode, **wanted), answers)


@pytest.mark.parametrize("prompt", ([1.5], ["a"], [None], [[1]], 7, None))
def test_prompts_that_are_no_ids_are_refused(engine, prompt) -> None:
    with pytest.raises(UserError):
        engine.submit(prompt)
    assert not engine.waiting


@pytest.mark.parametrize(
    "mode, budget", (("tre", 8), ("tree", 0), ("tree", 2.5), ("tree", "8"), ("tree", 10**9))
)
def test_modes_and_budgets_that_are_none_are_refused(engine, mode, budget) -> None:
    with pytest.raises(UserError):
        engine.use(mode, budget)
