"""Recorded rounds against the engine's own steps: the same ids and the same logit bits. bfloat16
where not said otherwise: tensor cores, which the emulator is far quicker with.
"""

from __future__ import annotations

import functools
import threading
from contextlib import suppress

import numpy as np
import pytest

import engine
import ops
from budget import Auto, bare
from sampling import SamplingParams
from tests import toy
from tests.conftest import launcher

pytestmark = pytest.mark.parametrize(
    "device", ("emulate", pytest.param("cuda", marks=pytest.mark.gpu)), indirect=True
)
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, top_p=0.9, max_tokens=7, ignore_eos=True)
PENALISED = SamplingParams(
    max_tokens=8, frequency_penalty=0.7, repetition_penalty=1.3, logit_bias={5: 2.0}, min_tokens=3
)
REQUESTS = [(list(range(5, 33)), SAMPLED), ([7, 7, 7], GREEDY), (list(range(40, 57)), PENALISED)]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Engines on one toy checkpoint; without `recorded` they take their own steps."""
    directory = toy.write_checkpoint(tmp_path_factory.mktemp("rounds") / "toy", drafter={})

    def made(device, activation="bfloat16", recorded=True, **settings):
        kernels = ops.CudaOps(activation, launcher=launcher(device), poison=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "make_ops", lambda *_: kernels)
            one = toy.engine_of(directory, drafter=True, activation=activation, **settings)
        if not recorded:
            one.rounds = None
        return one

    return made


@pytest.fixture(scope="module")
def plain(make):
    """What plain decoding makes of REQUESTS, each alone, in the engine's own steps."""

    @functools.cache
    def results(device, activation="bfloat16"):
        one = make(device, activation, recorded=False)
        one.use("ar", 1)
        return [decode(one, [request])[0] for request in REQUESTS]

    return results


def decode(made, requests):
    """Results of all requests, submitted together."""
    waiting = [made.submit(p, params, keep_logits=True) for p, params in requests]
    for sequence in waiting:
        while sequence.finish_reason is None:
            made.advance(sequence)
    return [sequence.result() for sequence in waiting]


def assert_same(results, expected) -> None:
    for a, b in zip(results, expected, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert np.array_equal(a.logits.view(np.int32), b.logits.view(np.int32))


@pytest.mark.parametrize("activation", ("float32", "bfloat16"))
def test_rounds_give_the_bits_of_plain_steps(device, activation, make, plain, monkeypatch) -> None:
    """Every mode, alone and together, joins included: three requests in two places. The engine's
    own steps give them with drafts, too. Emulated float32 is slow, and does with trees alone."""
    expected = plain(device, activation)
    modes = {"ar": 1, "chain": 1, "tree": 6}
    if (device, activation) == ("emulate", "float32"):
        modes = {"tree": 6}
    else:
        assert_same(decode(make(device, activation, recorded=False), REQUESTS), expected)
    made = make(device, activation, batch=2)
    launched = []
    launch = made.rounds.launch
    monkeypatch.setattr(made.rounds, "launch", lambda *a: launched.append(a) or launch(*a))
    for mode, budget in modes.items():
        made.use(mode, budget)
        assert_same(decode(made, REQUESTS), expected)
    assert {choice.mode for (choice,) in launched} == set(modes)
    assert len(made.cache.free_slots) == 2


def test_a_sequence_ends_and_others_go_on(device, make, plain) -> None:
    """Rounds in flight are dropped for a request that was cancelled or has ended."""
    expected = plain(device)[1:2]
    made = make(device, batch=2)
    gone = made.submit(*REQUESTS[0])
    stays = made.submit(*REQUESTS[1], keep_logits=True)
    while stays.n_emitted < 3:
        made.advance(stays)
    made.cancel(gone)
    while stays.finish_reason is None:
        made.advance(stays)
    assert_same([stays.result()], expected)


@pytest.mark.parametrize("pages", (4, 3))
def test_short_pages_fall_back_to_plain_steps(device, pages, make, plain) -> None:
    """Two rounds ahead do not fit into the last pages; the text is the same. Three pages are fewer
    than a whole context takes."""
    expected = plain(device)[:2]
    made = make(device, batch=2, pages=pages)
    assert_same(decode(made, REQUESTS[:2]), expected)


def test_an_interrupt_loses_no_tokens(device, make, plain, monkeypatch) -> None:
    """The round after the one whose reading is interrupted is under way and must be dropped."""
    expected = plain(device)[1:2]
    made = make(device)
    made.use("ar", 1)
    fetch, fetches = made.ops.fetch, []

    def interrupted(arrays):
        fetches.append(wait := fetch(arrays))
        second = len(fetches) == 2

        def read():
            if second:
                raise KeyboardInterrupt
            return wait()

        return read

    monkeypatch.setattr(made.ops, "fetch", interrupted)
    sequence = made.submit(*REQUESTS[1], keep_logits=True)
    while sequence.finish_reason is None:
        with suppress(KeyboardInterrupt):
            made.advance(sequence)
        assert len(fetches) < 30, "goes on without end"
    assert len(fetches) > 3
    assert_same([sequence.result()], expected)


def test_i4_recording_that_fails_is_said_and_plain_steps_go_on(
    device, make, plain, monkeypatch, caplog
) -> None:
    expected = plain(device)
    made = make(device)

    def refuse(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(made.ops, "capture", refuse)
    assert_same(decode(made, REQUESTS), expected)
    assert "not permitted" in caplog.text and not made.rounds.graphs


def test_i4_recording_while_another_thread_waits_on_the_device(device, make, plain) -> None:
    """The very first decode step is recorded, without warm-up, beside a waiting thread."""
    expected = plain(device)
    made = make(device)
    stop = threading.Event()

    def wait() -> None:
        while not stop.wait(0.001 if device == "emulate" else 0):  # emulated, it returns at once
            made.ops.launcher.synchronize()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert_same(decode(made, REQUESTS), expected)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("first, then", ((("ar", 1), ("tree", 8)), (("tree", 8), ("chain", 1))))
def test_a_mode_changed_with_a_round_in_flight(device, first, then, make, plain) -> None:
    """The new mode's graph is recorded only after the round in flight was read."""
    expected = plain(device)[:2]
    made = make(device, batch=2)
    sequences = [made.submit(p, params, keep_logits=True) for p, params in REQUESTS[:2]]
    for mode in [first] * 3 + [then] * 30:
        if any(s.finish_reason is None for s in sequences):
            made.use(*mode)
            made.step()
    assert_same([s.result() for s in sequences], expected)


SEVERAL = (1, 4, 12)  # nodes: of plain decoding, fewer than the chain's 8, and more


def among(made, nodes) -> Auto:
    """What `use` takes for "auto": trees of so many nodes, and of 12 where they are evidence."""
    auto = made.autos[7] = Auto(7, 12, 100)
    auto.offer(c._replace(scored=12 * (c.budget > 1)) for c in auto.choices if c.budget in nodes)
    return auto


@pytest.mark.parametrize("batch", (1, 2))
def test_budgets_that_change_every_round(device, batch, make, plain, monkeypatch) -> None:
    """Whatever "auto" picks, round by round and with a round in flight: the same ids and bits."""
    expected = plain(device)[:2]
    made = make(device, batch=batch)
    auto = among(made, SEVERAL)
    auto.costs.measured = {c: 1.0 for c in auto.choices}
    auto.measured = True
    made.use("tree", "auto")
    script, picked, flown, learned = np.random.default_rng(1), [], [], []
    of = (*auto.choices, auto.watched, *map(bare, auto.choices[1:]))

    def choose(sequences, before):
        assert set(before) <= set(auto.offered())
        picked.append(of[script.integers(len(of))])
        flown.append(made.rounds.flight is not None)
        return picked[-1]

    monkeypatch.setattr(auto, "choose", choose)
    monkeypatch.setattr(auto, "learn", lambda _, trees: learned.extend(map(len, trees)))
    for _ in range(2):  # at first each round is recorded, and waits for the one in flight
        assert_same(decode(made, REQUESTS[:2]), expected)
    assert set(picked) == set(of) and sum(flown) > 3
    assert max(learned) == 12


def test_rounds_are_measured_where_they_stand(device, make, plain) -> None:
    """Where "auto" is chosen while a text runs, before its next round: every choice, of which
    nothing is seen in the text; and the chain with nothing to learn from it."""
    expected = plain(device)
    made = make(device)
    auto, first = among(made, (1, 8)), made.submit(*REQUESTS[0], keep_logits=True)
    made.advance(first)
    made.use("tree", "auto")
    assert made.auto is auto and not auto.measured
    while first.finish_reason is None:
        made.advance(first)
    assert auto.measured and all(s > 0 for s in auto.costs.measured.values())
    assert {key[0] for key in made.rounds.graphs} >= measured(auto)
    assert_same([first.result(), *decode(made, REQUESTS[1:])], expected)


def measured(auto: Auto) -> set:
    return {*auto.choices, auto.watched, bare(auto.choices[-1])}


def test_rounds_are_measured_before_anybody_waits(device, make, plain) -> None:
    """Where "auto" is chosen before any text: greedy and sampled rounds, so that all are recorded
    whatever comes first, and none has to pay for it."""
    expected = plain(device)[:2]
    made = make(device)
    auto = among(made, (1, 8))
    made.use("tree", "auto")
    assert made.auto is auto and auto.measured and not made.running and not made.waiting
    graphs = made.rounds.graphs
    for drawn in (False, True):
        wanted = {made.rounds.key(choice, 1, False, drawn) for choice in measured(auto)}
        assert wanted <= set(graphs)
    before = set(graphs)
    assert_same([decode(made, [request])[0] for request in REQUESTS[:2]], expected)
    assert set(graphs) == before


def test_g1_huge_top_k_and_min_tokens_are_harmless(device, make) -> None:
    params = SamplingParams(temperature=1.0, seed=1, top_k=2**31, max_tokens=3, ignore_eos=True)
    late = SamplingParams(frequency_penalty=0.5, min_tokens=10**30)
    own, made = make(device, recorded=False), make(device)
    for request in ([1, 2], params), (list(range(50)), late):  # to the end of the context
        assert_same(decode(made, [request]), decode(own, [request]))
