"""budget.py: trees and their gains against the rule, costs, and the choice between them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import bench_step
import budget
import config
from budget import Auto, Choice, Costs, choices, cut, reach
from config import UserError
from sampling import SamplingParams
from spec_decode import build_tree
from tests import toy

DEPTH = 4
OF = choices(DEPTH, 24)


def drafts(seed: int, width: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Candidates of DEPTH positions."""
    rng = np.random.default_rng(seed)
    chance = -np.sort(-rng.dirichlet(np.full(width, 0.3), DEPTH), axis=1)
    ids = np.argsort(rng.random((DEPTH, 100)), axis=1)[:, :width].astype(np.int32)
    return ids, np.log(chance).astype(np.float32)


def paths(tree) -> set[tuple[int, ...]]:
    found = []
    for node in range(len(tree)):
        above = () if node == 0 else found[tree.parent[node]]
        found.append((*above, int(tree.token_ids[node])))
    return set(found)


class Text:
    """What the choice knows of a request."""

    def __init__(self, temperature: float = 0.0, left: int = 200):
        self.params = SamplingParams(temperature=temperature)
        self.rule, self.n_emitted = SimpleNamespace(max_tokens=left), 0


def test_choices():
    assert choices(0, 64) == (Choice("ar", 1),)
    assert [tuple(c) for c in choices(7, 12)] == [
        ("ar", 1, 0), ("tree", 2, 12), ("tree", 4, 12), ("chain", 8, 12), ("tree", 12, 12),
    ]  # fmt: skip
    assert [c.budget for c in choices(15, 8)] == [1, 2, 4, 8]


@pytest.mark.parametrize("seed", range(6))
def test_a_large_tree_holds_the_smaller_ones(seed):
    """The very trees that build_tree makes, and the sums of their probabilities by depth."""
    whole = build_tree(7, *drafts(seed), 24)
    found = reach(whole.score[None], whole.depth[None], [len(whole)], OF, DEPTH)[0]
    for choice, by_depth in zip(OF, found, strict=True):
        tree = build_tree(7, *drafts(seed), choice.budget)
        assert paths(cut(whole, choice.budget, DEPTH)) == paths(tree)
        expected = [np.exp(tree.score[tree.depth == d]).sum() for d in range(1, DEPTH + 1)]
        assert by_depth == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_cut_keeps_parents_before_children():
    whole = build_tree(7, *drafts(3), 24)
    for nodes in range(1, 24):
        tree = cut(whole, nodes, DEPTH)
        assert len(tree) == nodes and tree.parent[0] == -1
        assert (tree.parent[1:] < np.arange(1, nodes)).all() and (tree.parent[1:] >= 0).all()
        assert (tree.depth[1:] == tree.depth[tree.parent[1:]] + 1).all()


def test_trees_of_unlike_sizes_and_unwritten_places():
    scores = np.array([[0, -0.1, np.nan], [0, -0.5, -0.7]], np.float32)
    depths = np.array([[0, 1, 99], [0, 1, 2]], np.int32)
    found = reach(scores, depths, [2, 3], OF, DEPTH)
    assert found[0, -1] == pytest.approx([np.exp(-0.1), 0, 0, 0])
    assert found[1, -1] == pytest.approx([np.exp(-0.5), np.exp(-0.7), 0, 0])
    assert not found[:, 0].any()  # plain decoding


class TestCosts:
    def costs(self) -> Costs:
        return Costs({c: 1.0 + 0.1 * c.budget + (c.mode != "ar") for c in OF})

    def test_more_sequences_are_more_rows(self):
        costs = self.costs()
        assert costs.of(OF[0], 1) == pytest.approx(1.1)
        assert costs.of(Choice("tree", 8, 24), 3) == pytest.approx(costs.of(OF[-1], 1))
        assert costs.of(OF[-1], 4) == pytest.approx(2 + 9.6, rel=0.1)  # beyond what was measured

    def test_a_choice_that_takes_longer_is_told_from_a_machine_that_does(self):
        costs, (plain, *_, tree) = self.costs(), OF
        for _ in range(40):  # of few rounds at a time the tree takes twice as long
            for choice, times in ((plain, 1.0), (tree, 2.0)):
                for _ in range(3):
                    costs.saw(choice, 1, times * self.costs().expected(choice, 1))
        assert costs.of(tree, 1) / costs.of(plain, 1) == pytest.approx(2 * 4.4 / 1.1, rel=0.15)
        costs = self.costs()
        for _ in range(40):  # all has become slower: little is learned of this choice
            costs.saw(tree, 1, 2 * 4.4)
        assert costs.of(tree, 1) == pytest.approx(2 * 4.4, rel=0.05)
        # The first four rounds are taken for the choice's own, each for 1 / 22 of what it is off.
        assert 4 <= costs.of(tree, 1) / costs.of(plain, 1) <= 4 * 2 ** (4 / 22)

    def test_a_hitch_is_not_believed(self):
        costs = self.costs()
        costs.saw(OF[0], 1, 1000.0)
        assert costs.of(OF[0], 1) < 2


def auto_of(seconds: dict[int, float], **options) -> Auto:
    auto = Auto(DEPTH, 24, options.pop("rows", 1000))
    auto.measure(lambda choice: seconds[choice.budget], recorded=True)
    return auto


FLAT = {1: 1.0, 2: 1.5, 4: 1.5, 5: 1.5, 8: 1.5, 12: 1.6, 16: 1.6, 24: 1.7}
STEEP = {n: 1.0 + 0.5 * n for n in FLAT} | {1: 1.0}


def teach(auto: Auto, text: Text, sure: float, right: float, rounds: int = 60) -> None:
    """Rounds whose first draft claims a probability of `sure` and is right so often."""
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        choice = auto.choices[3]
        by_depth = sure ** np.arange(1, DEPTH + 1)
        nodes = np.array([min(c.budget - 1, DEPTH) for c in auto.choices])[:, None]
        predicted = np.where(np.arange(DEPTH) < nodes, by_depth, 0.0)[None]
        deep = int(np.argmin([*(rng.random(DEPTH) < right), False]))
        auto.learn([text], choice, predicted, [deep])


class TestChoice:
    def test_before_anything_is_known_it_is_the_chain(self):
        assert Auto(DEPTH, 24, 99).choose([Text()]).mode == "chain"
        assert auto_of(FLAT).choose([Text()]).mode == "chain"

    @pytest.mark.parametrize("sure", (0.5, 0.9))
    def test_what_was_reached_calibrates_what_was_claimed(self, sure):
        """Whatever drafts claim: rounds that reach far are worth a draft, others are not."""
        for right, modes in ((0.9, {"chain"}), (0.05, {"ar"})):
            auto, text = auto_of(FLAT), Text()
            teach(auto, text, sure, right)
            gain = auto.gain([text])[3]
            assert gain == pytest.approx(1 + sum(right**d for d in range(1, 5)), rel=0.3)
            assert {auto.choose([text]).mode for _ in range(2)} == modes
            fresh = Text()  # another text of its kind begins with what all have shown
            assert auto.choose([fresh]).mode in modes
            assert auto.choose([Text(temperature=1.0)]).mode == "chain"  # of another, nothing yet

    def test_plain_decoding_asks_again_now_and_then(self):
        auto, text = auto_of(STEEP), Text()
        teach(auto, text, 0.5, 0.05)
        picked = [auto.choose([text]).mode for _ in range(400)]
        asked = [i for i, mode in enumerate(picked) if mode != "ar"]
        assert 2 <= len(asked) <= 40 and np.diff(asked).min() > 8

    def test_recording_must_pay(self):
        auto, text = auto_of(FLAT), Text()
        teach(auto, text, 0.9, 0.9)
        best = auto.choose([text])
        before = np.array([0.0 if c.mode == "ar" else 1e6 for c in auto.choices])
        assert (best.mode, auto.choose([text], before).mode) == ("chain", "ar")

    def test_rows_of_all_sequences_are_bounded(self):
        auto, texts = auto_of(FLAT, rows=10), [Text() for _ in range(4)]
        for text in texts:
            teach(auto, text, 0.9, 0.9)
        assert auto.choose(texts[:1]).mode == "chain" and auto.choose(texts).budget <= 2

    def test_what_can_never_pay_is_not_measured(self):
        """Of five tokens at most, the slowest would still be slower than plain decoding."""
        auto = auto_of(STEEP)
        assert [c.budget for c in auto.choices] == [1, 2, 4, 5, 8, 12]
        auto = Auto(DEPTH, 24, 99)
        auto.measure(lambda choice: STEEP[choice.budget], recorded=False)
        assert {c.scored for c in auto.choices} == {0, 12}
        auto = Auto(DEPTH, 24, 99)
        auto.measure(lambda choice: None, recorded=True)
        assert not auto.measured

    def test_fewer_rows_never_seem_slower(self):
        """What was held up once is not given up, either."""
        held_up, auto = [9.0] * 2, Auto(DEPTH, 24, 99)
        auto.measure(
            lambda c: held_up.pop() if c.budget == 4 and len(held_up) > 1 else FLAT[c.budget], True
        )
        assert [auto.costs.measured[c] for c in auto.choices[1:4]] == [1.5] * 3
        auto = auto_of(FLAT | {2: 1.8})
        assert auto.costs.measured[auto.choices[1]] == 1.5

    def test_trees_that_are_there_are_cut_by_their_own_scores(self):
        auto, text = auto_of({n: 1.0 + 0.1 * n for n in FLAT}), Text()
        teach(auto, text, 0.5, 0.5)
        flat = np.array([np.arange(1, 5) <= min(c.budget - 1, 4) for c in auto.choices])
        assert auto.narrow([text], flat[None] * 1.0).budget >= 4
        assert auto.narrow([text], flat[None] * 0.01).budget == 2


# ---- in an engine ------------------------------------------------------------------------------

PROMPTS = [[5, 6, 7], list(range(20, 55)), [9] * 4]


def test_budgets_that_change_every_step(tmp_path, monkeypatch):
    """Plain steps, greedy and sampled, one and several together: no bit depends on the choice."""
    plain = toy.toy_engine(tmp_path, drafter={})
    made = toy.engine_of(tmp_path / "toy", drafter=True)
    script, picked = np.random.default_rng(3), set()

    def any_choice(*_):
        auto = made.auto
        picked.add(choice := auto.choices[script.integers(1, len(auto.choices))])
        return choice

    for wanted in ({}, {"temperature": 1.0, "seed": 4}, {"frequency_penalty": 0.5}):
        answers = toy.decode(plain, PROMPTS, **wanted)
        toy.assert_same_results(toy.decode(made, PROMPTS, "tree", "auto", **wanted), answers)
        assert made.auto.measured
        with monkeypatch.context() as patch:
            patch.setattr(made.auto, "narrow", any_choice)
            patch.setattr(made.auto, "choose", any_choice)
            toy.assert_same_results(toy.decode(made, PROMPTS, "tree", "auto", **wanted), answers)
    assert len(picked) > 5


@pytest.mark.parametrize("kind, least, most", (("perfect", 5, 9), ("wrong", 1, 1.2)))
def test_it_finds_what_pays(tmp_path, kind, least, most):
    """Costs of the test's own: perfect drafts are worth their rows, wrong ones soon are not."""
    plain = toy.toy_engine(tmp_path)
    answers = toy.decode(plain, PROMPTS[:1], max_tokens=56)
    made = toy.engine_of(tmp_path / "toy")
    toy.plug(made, kind, PROMPTS[:1], answers)
    made.use("tree", "auto")
    made.auto.measure(lambda choice: 1.0 + (choice.mode != "ar") + 0.02 * choice.budget, False)
    made.auto.costs.saw = lambda *_: None
    toy.assert_same_results(toy.decode(made, PROMPTS[:1], "tree", "auto", max_tokens=56), answers)
    [result] = toy.decode(made, PROMPTS[:1], "tree", "auto", max_tokens=56)
    assert least <= result.acceptance_length <= most
    drafted = sum(text.hopes.sum() > 0 for text in made.auto.kinds.values())
    assert drafted == 1  # the greedy texts


def test_warm_up_measures_and_leaves_nothing(tmp_path):
    toy.write_checkpoint(tmp_path, drafter={})
    settings = config.Config(
        model=config.ModelSection(path=tmp_path, lora_norm_eps=None, stated=()),
        draft=config.Draft(path=tmp_path / "drafter", mode="tree", budget="auto", limit=12),
        decode=config.Decode(leaf=16, span=2, prefill_chunk=32),
    )
    made = budget_engine(settings)
    assert made.auto.measured and not made.running and len(made.cache.free_slots) == 1
    assert max(c.budget for c in made.auto.choices) <= 12


def budget_engine(settings):
    from engine import Engine

    return Engine(settings, "cpu")


# ---- scripted drafts over a real drafter -------------------------------------------------------


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_replayed_drafts_follow_their_script(tmp_path, temperature):
    """Also where noise lifts the very token that it chose."""
    made = toy.toy_engine(tmp_path, drafter={})
    wanted = {"max_tokens": 56, "temperature": temperature, "seed": 1}
    [plain] = toy.decode(made, [[5, 6, 7]], **wanted)
    made.drafter = bench_step.Replay(made.drafter, 64)
    found = {}
    for script in bench_step.SCRIPTS:
        text, params = [5, 6, 7, *plain.token_ids], SamplingParams(temperature=temperature, seed=1)
        made.drafter.play(script, text, made.dims.vocab_size, params)
        [result] = toy.decode(made, [[5, 6, 7]], "tree", 16, **wanted)
        toy.assert_same_results([result], [plain])
        found[script.name] = result.acceptance_length
    assert found["perfect"] > 6 and found["wrong"] == 1
    assert found["perfect"] > found["mixed"] > 1.5 and found["good"] > 3
    assert found["mixed"] < 6


def test_modes_that_are_none_are_refused(tmp_path):
    made = toy.toy_engine(tmp_path)
    with pytest.raises(UserError, match="needs a drafter"):
        made.use("tree", "auto")
    made.use("ar", "auto")
    assert made.auto is None and budget.most_rows(8, 64) == 128
