"""Philox, noise, filters, penalties, log-probabilities and stop rules."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config import UserError
from sampling import (
    MASS_BITS,
    NO_TOKEN,
    Finish,
    Path,
    SamplingParams,
    StopRule,
    choose,
    fresh_seed,
    gumbel,
    kept_ids,
    log_softmax_top,
    mass,
    penalised,
    philox4x32_10,
    portable_exp,
    portable_log,
    top_ids,
)

VOCAB = 64


def logits_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities)).astype(np.float32)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (count, VOCAB)).astype(np.float32)


def kept(logits: np.ndarray, **params: float) -> list[int]:
    ids = kept_ids(logits, SamplingParams(temperature=1.0, seed=0, **params))
    return list(range(len(logits))) if ids is None else ids.tolist()


# ---------------------------------------------------------------- random bits and noise


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123, the lines "philox4x32 10"
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> list[np.uint32]:
        return [np.uint32(int(word, 16)) for word in text.split()]

    assert [int(word) for word in philox4x32_10(words(counter), words(key))] == words(expected)


def test_noise_is_the_counters_and_nothing_else() -> None:
    seed, position = (7 << 32) + 5, (3 << 32) + 11
    noise = gumbel(seed, position, VOCAB)
    for token_id in (0, 1, 63):  # one by one: key (5, 7), counter (id, 11, 3, 0)
        counter = [np.uint32(word) for word in (token_id, 11, 3, 0)]
        x = int(philox4x32_10(counter, [np.uint32(5), np.uint32(7)])[0])
        v = (x + 0.5) / 2**32
        # math's log1p and log are within 1 ulp of float64, so float32 differs by 1 ulp at most
        assert noise[token_id] == pytest.approx(-math.log(-math.log1p(-v)), rel=2**-23, abs=1e-9)
    assert np.array_equal(noise[:10], gumbel(seed, position, 10))
    for other in [(seed + 1, position), (seed + 2**32, position), (seed, position + 1), (seed, 11)]:
        assert not np.any(noise == gumbel(*other, VOCAB))


def test_noise_is_gumbels() -> None:
    # 200,000 draws: mean Euler's 0.5772 and variance pi^2/6, each within 5 standard errors
    # (sqrt(1.645 / 2e5) = 0.0029; fourth moment 14.6: sqrt((14.6 - 2.7) / 2e5) = 0.0077)
    noise = gumbel(3, 0, 200_000).astype(np.float64)
    assert abs(noise.mean() - 0.5772) < 5 * 0.0029
    assert abs(noise.var() - math.pi**2 / 6) < 5 * 0.0077
    # the ends of v: finite, and not 0 or 1
    for v in (0.5 * 2.0**-32, 1 - 0.5 * 2.0**-32):
        assert 0 < v < 1
        assert -3.2 < -portable_log(-portable_log(np.float64(1 - v))) < 23


def test_portable_log_and_exp() -> None:
    # Rounding of about 12 operations on terms that shrink: a few 2^-53, stated as 2e-15 and 1e-15.
    x = np.concatenate([np.geomspace(1e-12, 40, 5000), 1 - np.geomspace(2.0**-33, 0.5, 5000)])
    assert np.all(np.abs(portable_log(x) - np.log(x)) <= 2e-15 * np.abs(np.log(x)))
    x = -np.linspace(0, 64, 10_000)
    assert np.all(np.abs(portable_exp(x) / np.exp(x) - 1) <= 1e-15 * (1 + 0.05 * np.abs(x)))
    assert mass(np.float32([0, -np.inf, -100]), np.float32(0)).tolist() == [2**MASS_BITS, 0, 0]


def test_sampled_frequencies() -> None:
    # 4,000 positions: within 5 standard deviations of p = 0.5, 0.3, 0.2
    p = np.array([0.5, 0.3, 0.2])
    params = [SamplingParams(temperature=1.0, seed=9)] * 4000
    tokens = choose(np.tile(logits_of(*p), (4000, 1)), range(4000), params)
    counts = np.bincount(tokens, minlength=3)
    assert np.all(np.abs(counts - 4000 * p) < 5 * np.sqrt(4000 * p * (1 - p)))


# ---------------------------------------------------------------- filters


def test_g1_small_top_p_and_temperature_are_argmax() -> None:
    logits, positions = rows(40), range(40)
    argmax = logits.argmax(1)
    for asked in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-12),
        SamplingParams(temperature=1e-12, top_p=1e-8, seed=1),
        SamplingParams(temperature=1.0, top_p=1e-8, seed=1),
        SamplingParams(temperature=1.0, top_p=1e-300, seed=1),
        SamplingParams(temperature=1.0, top_k=1, seed=1),
        SamplingParams(temperature=1.0, min_p=1.0, seed=1),
    ):
        asked.validate(VOCAB)
        assert np.array_equal(choose(logits, positions, [asked] * 40), argmax)


@pytest.mark.parametrize("off", [{"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}, {"top_k": 10**12}])
def test_g1_filters_that_are_off(off: dict) -> None:
    assert kept(rows(1)[0], **off) == list(range(VOCAB))
    SamplingParams(temperature=1.0, **off).validate(VOCAB)


def test_g1_the_token_that_crosses_top_p_is_kept() -> None:
    assert kept(logits_of(0.5, 0.25, 0.25), top_p=0.5) == [0]
    assert kept(logits_of(0.25, 0.5, 0.25), top_p=0.51) == [0, 1]  # of equals the lower id
    assert kept(logits_of(0.25, 0.5, 0.25), top_p=0.75) == [0, 1]
    assert kept(logits_of(0.25, 0.5, 0.25), top_p=0.76) == [0, 1, 2]
    assert kept(logits_of(0.1, 0.2, 0.3, 0.4), top_p=0.7) == [2, 3]
    for shift in (-3.0, 1.0, 7.3):  # the float32 rounding of a shifted softmax decides nothing
        assert kept(logits_of(0.5, 0.25, 0.25) + np.float32(shift), top_p=0.5) == [0]


def test_filters_follow_each_other() -> None:
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    assert kept(logits, top_k=2, top_p=0.5) == [0]  # 0.4 of 0.7 has crossed, of 1.0 it has not
    assert kept(logits, top_p=0.5) == [0, 1]
    assert kept(logits, min_p=0.6) == [0, 1]
    assert kept(np.float32([1, 2, 2, 2, 1]), top_k=2) == [1, 2]
    hot = SamplingParams(temperature=100.0, top_p=0.5, seed=0)  # top-p is of the tempered logits
    assert kept_ids(logits, hot).tolist() == [0, 1]
    cold = replace(hot, temperature=0.1)
    assert kept_ids(logits, cold).tolist() == [0]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_filters_against_their_definition(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 5, 300, 700]))
    draws = np.random.default_rng(data.draw(st.integers(0, 999)))
    logits = (draws.integers(-8, 9, size) / 4).astype(np.float32)  # many equal values
    top_k = data.draw(st.sampled_from([0, 1, 3, 299, 1000]))
    top_p = data.draw(st.sampled_from([1e-8, 0.3, 0.9, 0.999, 1.0]))
    order = sorted(range(size), key=lambda i: (-logits[i], i))[: top_k or size]
    weights = [math.exp(logits[i] - logits.max()) for i in order]
    expected, so_far = [], 0.0
    for i, weight in zip(order, weights, strict=True):
        expected.append(i)
        so_far += weight
        if so_far >= (top_p - 2.0**-22) * math.fsum(weights) and top_p < 1:
            break
    assert kept(logits, top_k=top_k, top_p=top_p) == sorted(expected)
    assert top_ids(logits, min(top_k, size)).tolist() == order[: min(top_k, size)]


# ---------------------------------------------------------------- rows and requests


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.float32([[0, 5, 5, 1], [2, 2, 2, 2]])
    assert choose(logits, [0, 0], [SamplingParams()] * 2).tolist() == [1, 0]
    biased = SamplingParams(logit_bias={3: 4.0})
    assert choose(logits, [0, 0], [biased] * 2).tolist() == [1, 3]
    assert choose(np.empty((0, 4), np.float32), [], []).tolist() == []


@pytest.mark.parametrize("asked", [SamplingParams(), SamplingParams(temperature=0.8, seed=1)])
def test_rows_that_are_no_numbers_are_marked(asked: SamplingParams) -> None:
    logits = rows(6)
    alone = choose(logits, range(6), [asked] * 6)
    logits[1, 7], logits[2, 7], logits[3] = np.nan, np.inf, -np.inf
    tokens = choose(logits, range(6), [asked] * 6)
    assert tokens[1:4].tolist() == [NO_TOKEN] * 3
    assert np.array_equal(tokens[[0, 4, 5]], alone[[0, 4, 5]])


def test_g3_a_seeded_row_is_the_same_in_any_company() -> None:
    logits = rows(5)
    seeded = SamplingParams(temperature=1.0, seed=42)
    filtered = replace(seeded, top_p=0.9, top_k=20, min_p=0.01)
    others = [SamplingParams(), SamplingParams(temperature=1.0).with_seed(), filtered]
    for asked in (seeded, filtered):
        alone = choose(logits[:1], [17], [asked])[0]
        for slot in (0, 3, 4):
            params = [others[n % 3] for n in range(5)]
            params[slot] = asked
            positions = [n if n != slot else 17 for n in range(5)]
            company = logits.copy()
            company[[0, slot]] = company[[slot, 0]]
            before = company.copy()
            gumbel.cache_clear()  # cold
            assert choose(company, positions, params)[slot] == alone
            assert choose(company, positions, params)[slot] == alone  # warm
            assert np.array_equal(company, before)


def test_g3_requests_without_a_seed_differ() -> None:
    logits = np.zeros((20, VOCAB), np.float32)
    asked = SamplingParams(temperature=1.0)
    texts = {tuple(choose(logits, range(20), [asked.with_seed()] * 20).tolist()) for _ in range(5)}
    assert len(texts) == 5  # 64^-20 for a chance repeat
    assert 0 <= fresh_seed() < 2**53
    assert replace(asked, seed=7).with_seed().seed == 7
    with pytest.raises(ValueError, match="needs its seed"):
        choose(logits, range(20), [asked] * 20)


# ---------------------------------------------------------------- penalties


def test_f8_penalties_follow_the_definitions() -> None:
    path = Path.start([1, 1, 4]).then(2).then(3).then(2)
    assert (path.output, path.length) == ({2: 2, 3: 1}, 3)
    logits = np.float32([1, 2, 3, -4, -5, 6])

    def after(**params: float) -> list[float]:
        return penalised(logits, SamplingParams(**params), path).tolist()

    assert after(frequency_penalty=0.5) == [1, 2, 2, -4.5, -5, 6]
    assert after(presence_penalty=0.5) == [1, 2, 2.5, -4.5, -5, 6]
    assert after(repetition_penalty=2.0) == [1, 1, 1.5, -8, -10, 6]
    assert after(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={2: 10}) == [
        1,
        1,
        9.5,
        -9,
        -10,
        6,
    ]
    assert logits.tolist() == [1, 2, 3, -4, -5, 6]
    with pytest.raises(ValueError, match="need the row's path"):
        choose(logits[None], [0], [SamplingParams(presence_penalty=1.0)])


def test_f8_each_node_sees_its_own_path() -> None:
    asked = SamplingParams(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.3)
    root = Path.start([9]).then(5)
    a, b = root.then(1), root.then(2)
    nodes = [root, a, b, a.then(1), b.then(1)]
    logits = rows(5)
    together = choose(logits, [1, 2, 2, 3, 3], [asked] * 5, nodes)
    for n, path in enumerate(nodes):  # as one-by-one decoding would see it
        assert choose(logits[n : n + 1], [0], [asked], [path])[0] == together[n]


def test_f8_a_rejected_draft_carries_no_penalty() -> None:
    asked = SamplingParams(frequency_penalty=2.0)
    logits = np.float32([[0, 1, 0]])
    root = Path.start([])
    node = root.then(1)
    assert choose(logits, [1], [asked], [node]).tolist() == [0]
    assert choose(logits, [0], [asked], [root]).tolist() == [1]  # the node left no trace here


def test_min_tokens_hides_the_stop_ids() -> None:
    logits = np.float32([[0, 9, 3, 8]])
    for asked in (
        SamplingParams(min_tokens=2),
        SamplingParams(temperature=1.0, top_k=1, seed=1, min_tokens=2),
    ):
        path = Path.start([0], stop_ids=[1, 3])
        tokens = []
        for position in range(3):
            tokens.append(int(choose(logits, [position], [asked], [path])[0]))
            path = path.then(tokens[-1])
        assert tokens == [2, 2, 1]


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_are_of_the_logits_and_alone_in_their_bits() -> None:
    logits = rows(7)
    logits[0, 3] = logits[0, 5] = 20.0
    logits[1, 2] = -np.inf
    chosen = logits.argmax(1)
    result = log_softmax_top(logits, chosen, 4)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True))
    exact -= logits.max(1, keepdims=True)
    # float32's rounding, and 64 masses each within 2^-45 of a sum of at least 1
    assert np.allclose(result.chosen, exact[range(7), chosen], rtol=2**-23, atol=64 * 2.0**-45)
    assert np.array_equal(result.top[:, 0], result.chosen)
    assert result.top_ids[0, :2].tolist() == [3, 5]
    assert np.array_equal(result.top_ids, [top_ids(row, 4) for row in logits])
    others = np.take_along_axis(exact, result.top_ids.astype(int), 1)
    assert np.allclose(result.top, others, rtol=2**-23, atol=64 * 2.0**-45)
    one = log_softmax_top(logits[4:5], chosen[4:5], 4)
    assert np.array_equal(one.top[0], result.top[4])
    assert log_softmax_top(logits, chosen, 0).top.shape == (7, 0)
    assert log_softmax_top(logits, chosen, 999).top.shape == (7, VOCAB)


# ---------------------------------------------------------------- where ids end a text

A, B, C, D, E, STOP, EOS = 1, 2, 3, 4, 5, 60, 61


def rule(max_tokens: int | None, min_tokens: int = 0) -> StopRule:
    return StopRule(frozenset({STOP, EOS}), max_tokens, min_tokens)


@pytest.mark.parametrize("stop", [STOP, EOS])
@pytest.mark.parametrize(
    ("n_text", "cap", "expected"),
    [
        (2, 5, Finish(2, "stop")),
        (5, 5, Finish(5, "length")),  # the stop comes as sixth
        (4, 5, Finish(4, "stop")),  # as fifth: the cap would have let it pass
        (2, 2, Finish(2, "length")),  # behind a full text
        (2, 3, Finish(2, "stop")),
        (0, 1, Finish(0, "stop")),
        (2, None, Finish(2, "stop")),
    ],
)
def test_f5_stop_before_cap(stop: int, n_text: int, cap: int | None, expected: Finish) -> None:
    step = [A, B, C, D, E][:n_text] + [stop] + [C, D, E]
    assert rule(cap).finish(step, 0) == expected


@given(
    st.lists(st.sampled_from([A, B, STOP, EOS]), max_size=12),
    st.none() | st.integers(1, 8),
    st.integers(0, 3),
    st.lists(st.integers(1, 5), min_size=12, max_size=12),
)
@settings(max_examples=300, deadline=None)
def test_f5_many_a_step_ends_where_one_a_step_does(
    stream: list[int], cap: int | None, min_tokens: int, steps: list[int]
) -> None:
    def run(widths: list[int]) -> tuple[list[int], str | None]:
        text: list[int] = []
        rest = stream
        for width in widths:
            finish = rule(cap, min_tokens).finish(rest[:width], len(text))
            text += rest[: finish.keep]
            rest = rest[width:]
            if finish.reason:
                return text, finish.reason
        return text, None

    assert run(steps) == run([1] * len(stream))


def test_j7_each_of_several_end_ids_ends_the_reply() -> None:
    asked = SamplingParams(max_tokens=10)
    both = StopRule.of(asked, (STOP, EOS))
    for stop in (STOP, EOS):
        assert both.finish([stop], 3) == Finish(0, "stop")  # alone
        assert both.finish([A, stop, B], 3) == Finish(1, "stop")  # inside an accepted span
    assert StopRule.of(asked, [EOS]).finish([A, EOS], 0) == Finish(1, "stop")
    on = StopRule.of(replace(asked, ignore_eos=True, stop_token_ids=(C,)), (STOP, EOS))
    assert on.finish([A, STOP, EOS, B], 0) == Finish(4, None)
    assert on.finish([A, STOP, C, B], 0) == Finish(2, "stop")  # the request's own id still ends it


# ---------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1, "temperature: expected a number from 0 to 100, got -1"),
        ("temperature", math.nan, "temperature: .* got nan"),
        ("temperature", math.inf, "temperature: .* got inf"),
        ("temperature", "hot", "temperature: .* got 'hot'"),
        ("temperature", True, "temperature: .* got True"),
        ("top_p", 0, "top_p: expected a number above 0 to 1, got 0"),
        ("top_p", 2, "top_p: .* got 2"),
        ("top_p", math.nan, "top_p: .* got nan"),
        ("top_k", -2, "top_k: expected a whole number from -1 up, got -2"),
        ("top_k", 1.5, "top_k: .* got 1.5"),
        ("min_p", 1.1, "min_p: expected a number from 0 to 1"),
        ("seed", -1, "seed: expected a whole number from 0 to 18446744073709551615"),
        ("seed", 2**64, "seed: "),
        ("frequency_penalty", 2.5, "frequency_penalty: expected a number from -2 to 2"),
        ("presence_penalty", -3, "presence_penalty: expected a number from -2 to 2"),
        ("repetition_penalty", 0, "repetition_penalty: expected a number from 0.01 to 100"),
        ("logit_bias", {64: 1.0}, "logit_bias: a token id: .* from 0 to 63, got 64"),
        ("logit_bias", {"a": 1.0}, "logit_bias: a token id: .* got 'a'"),
        ("logit_bias", {3: 101}, r"logit_bias\[3\]: expected a number from -100 to 100"),
        ("logit_bias", [3], "logit_bias: expected ids with numbers"),
        ("max_tokens", 0, "max_tokens: expected a whole number from 1 up"),
        ("min_tokens", -1, "min_tokens: expected a whole number from 0"),
        ("min_tokens", 17, "min_tokens: expected a whole number from 0 to 16"),
        ("stop", "end", "stop: expected a list of strings"),
        ("stop", ("end", ""), "stop: .*none empty"),
        ("stop", None, "stop: "),
        ("stop_token_ids", (64,), "stop_token_ids: a token id: .* got 64"),
        ("stop_token_ids", 5, "stop_token_ids: expected a list of ids"),
        ("ignore_eos", 1, "ignore_eos: expected true or false"),
        ("logprobs", 21, "logprobs: expected a whole number from 0 to 20"),
    ],
)
def test_values_out_of_range(field: str, value: object, message: str) -> None:
    asked = SamplingParams(max_tokens=16)
    asked.validate(VOCAB)
    with pytest.raises(UserError, match=message):
        replace(asked, **{field: value}).validate(VOCAB)
