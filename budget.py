"""How many nodes the next round drafts (`draft.budget: auto`): the number with the most expected
tokens a second.

A best-first tree is the beginning of every larger one, so one large tree's path probabilities say
how often a walk would reach each depth with each number of nodes. What walks did reach calibrates
them, text by text. A round's seconds are measured on this machine, once for each number of nodes,
and corrected by the rounds that run. Nothing here can change a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from spec_decode import Tree

NODES = tuple(sorted(n for e in range(1, 11) for n in (2**e, 3 * 2 ** (e - 1)) if n not in (3, 6)))
FRESH = 0.2  # weight of a round's prediction in its text's
KEPT = 0.9  # of a text's counts after a round; of all texts' counts and seconds see below
KEPT_OF_ALL = 0.97
FORGOTTEN = 0.05  # of what is known of a text, in a round of plain decoding
TRUST = 2.0  # reaches of a depth that a text must predict to weigh as much as all texts
TURNS = 4  # of every choice when they are measured; the shortest counts
MOST_LEFT = 256  # tokens to come of a text, as far as recording another round is concerned
PROBING = 0.02  # of the time of plain decoding that drafts may take to be heard of again
LEAST_QUIET, MOST_QUIET = 2, 256  # rounds of plain decoding between such drafts


class Choice(NamedTuple):
    """What a round drafts. scored: nodes of the larger tree whose scores are wanted; 0: of none."""

    mode: str
    budget: int
    scored: int = 0


def choices(depth: int, most: int) -> tuple[Choice, ...]:
    """Plain decoding, the chain of a block of depth + 1, and trees of up to `most` nodes. A tree as
    large as the chain is the chain."""
    if not depth:
        return (Choice("ar", 1),)
    trees = [n for n in NODES if n <= most and n != depth + 1]
    drafts = [Choice("tree", n, most) for n in trees]
    if depth + 1 <= most:
        drafts.append(Choice("chain", depth + 1, most))
    return (Choice("ar", 1), *sorted(drafts, key=lambda c: c.budget))


def most_rows(batch: int, limit: int) -> int:
    """Nodes of all trees of a round at most: of many sequences each has fewer."""
    return max(limit, 16 * batch)


def cut(tree: Tree, nodes: int, depth: int) -> Tree:
    """The tree of `nodes` nodes out of a larger one, over candidates of `depth` positions.

    See spec_decode.build_tree: it begins with the whole most probable path, where that fits.
    """
    if nodes > depth:
        first = np.arange(min(nodes, len(tree)))
    else:  # a child is no likelier than its parent, and stands behind it
        first = np.sort(np.argsort(-tree.score, kind="stable")[:nodes])
    place = np.full(len(tree) + 1, -1, np.int32)  # of the root's parent, -1, too
    place[first] = np.arange(len(first))
    return Tree(tree.token_ids[first], place[tree.parent[first]], tree.depth[first],
                tree.score[first])  # fmt: skip


def reach(scores, depths, sizes, of: Sequence[Choice], depth: int) -> np.ndarray:
    """How often a walk gets to depth 1, 2, .. by the trees' own scores -> [B, choices, depth].

    scores, depths  [B, M] of the nodes of trees of up to M nodes;  sizes [B]
    """
    there = np.arange(scores.shape[1]) < np.asarray(sizes)[:, None]
    chance = np.exp(scores, where=there, out=np.zeros(scores.shape, np.float32))
    at = np.where(there, depths, 0)[:, :, None] == np.arange(1, depth + 1)
    likeliest = np.argsort(-chance, axis=1, kind="stable")
    at = at * chance[:, :, None]
    best = np.take_along_axis(at, likeliest[:, :, None], axis=1)
    totals = {True: at.cumsum(axis=1), False: best.cumsum(axis=1)}
    last = scores.shape[1] - 1
    found = [totals[c.budget > depth][:, min(c.budget - 1, last)] for c in of]
    return np.stack(found, axis=1)  # of plain decoding: the root, which is at no depth


class Costs:
    """Seconds of a round, by choice and number of sequences.

    measured  of one sequence
    pace      of the machine now, against when that was
    ratio     of rounds that ran, to what was expected of them
    """

    def __init__(self, measured: dict[Choice, float] | None = None) -> None:
        self.measured = measured or {}
        self.pace = 1.0
        self.scaled: dict[tuple[Choice, int], float] = {}
        self.ratio: dict[tuple[Choice, int], float] = {}
        self.nearest: dict[tuple[bool, int], float] = {}  # the latest ratio of drafting, of plain
        self.seen: dict[tuple[Choice, int], int] = {}  # so many; what was measured counts as many
        self.last: tuple[Choice, int] | None = None
        self.steady = 0  # rounds since the last change

    def expected(self, choice: Choice, b: int) -> float:
        """By what was measured of one: b sequences are so many times its rows."""
        if b == 1:
            return self.measured[choice]
        if (choice, b) not in self.scaled:
            self.scaled[choice, b] = self.scale(choice, b)
        return self.scaled[choice, b]

    def scale(self, choice: Choice, b: int) -> float:
        """Seconds of verifying the rows of all, between those measured, and of drafting once."""
        plain, *drafts = sorted((c.budget, seconds) for c, seconds in self.measured.items())
        drafting = max(drafts[0][1] - plain[1], 0.0) if drafts else 0.0
        rows, seconds = zip(plain, *((n, s - drafting) for n, s in drafts), strict=True)
        wanted = b * choice.budget
        took = float(np.interp(wanted, rows, seconds))
        if drafts and wanted > rows[-1]:
            slope = (seconds[-1] - seconds[0]) / (rows[-1] - rows[0])
            took += max(slope, 0.0) * (wanted - rows[-1])
        return took + (drafting if choice.mode != "ar" else 0.0)

    def of(self, choice: Choice, b: int) -> float:
        nearest = self.nearest.get((choice.mode == "ar", b), 1.0)
        return self.pace * self.expected(choice, b) * self.ratio.get((choice, b), nearest)

    def saw(self, choice: Choice, b: int, seconds: float) -> None:
        """A round ran. Right after a change, other seconds than expected are the choice's; later
        they are the machine's, or the context's."""
        if choice not in self.measured or seconds <= 0:
            return
        self.steady = self.steady + 1 if self.last == (choice, b) else 0
        self.last = choice, b
        now, seen = self.of(choice, b), self.seen.get((choice, b), 20 if b == 1 else 0)
        off = min(max(seconds / now, 0.5), 2.0)
        mine, pace = (0.0, 0.2) if self.steady > 3 else (1 / (2 + min(seen, 20)), 0.05)
        self.seen[choice, b] = seen + 1
        ratio = now / self.expected(choice, b) / self.pace * off**mine
        self.ratio[choice, b] = self.nearest[choice.mode == "ar", b] = ratio
        self.pace *= off**pace


@dataclass
class _Text:
    """What is known of a text, or of all greedy or all sampled ones.

    reach        [choices, depth] predicted, smoothed
    hits, hopes  [depth] walks that got there, and were predicted to
    """

    reach: np.ndarray
    hits: np.ndarray
    hopes: np.ndarray

    def add(self, predicted, choice: int, got: np.ndarray, kept: float, fresh: float) -> None:
        self.reach = self.reach + fresh * (predicted - self.reach)
        self.hits = kept * self.hits + got
        self.hopes = kept * self.hopes + predicted[choice]

    def forget(self, of_all: _Text) -> None:
        """A round without drafts: what was known of this text counts less than what is of all."""
        self.reach = self.reach + FORGOTTEN * (of_all.reach - self.reach)
        self.hits, self.hopes = (1 - FORGOTTEN) * self.hits, (1 - FORGOTTEN) * self.hopes

    def calibration(self, prior) -> np.ndarray:
        """[depth], from `prior` on."""
        return (self.hits + TRUST * prior) / (self.hopes + TRUST)


class Auto:
    """Picks what each round drafts, and learns from what it became.

    depth  candidates' positions;  most  nodes of a tree at most;  rows  of all trees together
    """

    def __init__(self, depth: int, most: int, rows: int):
        self.depth, self.rows = depth, rows
        self.choices = choices(depth, most)
        self.costs, self.measured = Costs(), False
        self.texts: WeakKeyDictionary = WeakKeyDictionary()
        self.kinds: dict[bool, _Text] = {}  # by whether the choice is greedy
        self.quiet = 0  # rounds of plain decoding since the last draft

    def measure(self, seconds_of: Callable[[Choice], float | None], recorded: bool) -> None:
        """Time all choices, the smallest first, up to where even a whole block would not pay.
        seconds_of: of one sequence, None where that cannot be measured now. recorded: rounds are,
        for trees of the size that is scored, so that this must stay."""
        took: dict[Choice, float] = {}

        def time(choice: Choice) -> bool:
            if (seconds := seconds_of(choice)) is not None:
                took[choice] = min(seconds, took.get(choice, seconds))
            return seconds is not None

        for choice in self.choices:
            # Twice: the first time compiles and records, or something else may have held it up.
            if not (time(choice) and time(choice)):
                return
            if took[choice] > (self.depth + 1) * took[self.choices[0]]:
                break
        for choice in list(took) * (TURNS - 2):
            if not time(choice):
                return
        names = list(took)  # fewer rows take no longer: what says so was held up
        best = np.minimum.accumulate([took[c] for c in names][::-1])[::-1].tolist()
        if not recorded:
            most = max(c.budget for c in names)
            names = [c._replace(scored=min(c.scored, most)) for c in names]
        self.costs, self.measured = Costs(dict(zip(names, best, strict=True))), True
        self.choices = tuple(names)
        self.texts.clear()
        self.kinds.clear()

    # -- the choice

    def gain(self, sequences: list) -> np.ndarray | None:
        """Expected tokens of a round of these together [choices]; None where one is the first of
        its kind."""
        known = [self.texts.get(s, self.kinds.get(s.params.greedy)) for s in sequences]
        if None in known:
            return None
        return self.expect(sequences, np.stack([text.reach for text in known]))

    def expect(self, sequences: list, predicted: np.ndarray) -> np.ndarray:
        """Expected tokens of all together [choices] by predictions [B, choices, depth]."""
        scales = np.ones((len(sequences), 1, self.depth))
        for scale, sequence in zip(scales, sequences, strict=True):
            of_all, text = self.kinds.get(sequence.params.greedy), self.texts.get(sequence)
            if of_all is not None:
                scale[:] = of_all.calibration(1.0)
            if text is not None:
                scale[:] = text.calibration(scale)
        likely = np.minimum.accumulate(np.minimum(predicted * scales, 1.0), axis=2)
        return len(sequences) + likely.sum(axis=(0, 2))

    def choose(self, sequences: list, before: np.ndarray | float = 0.0) -> Choice:
        """What the next round of these sequences drafts. before [choices]: seconds that go by
        before the first such round, which must pay with what the texts may still become."""
        b, gain = len(sequences), self.gain(sequences)
        if not self.measured or gain is None:
            return next((c for c in self.choices if c.mode == "chain"), self.choices[-1])
        costs = self.seconds(b)
        left = sum(min(s.rule.max_tokens - s.n_emitted, MOST_LEFT) for s in sequences)
        took = left * costs / gain + before
        took[1:][[b * c.budget > self.rows for c in self.choices[1:]]] = np.inf
        best, draft = int(np.argmin(took)), 1 + int(np.argmin(took[1:]))
        if best == 0 and took[draft] < np.inf:
            for sequence in sequences:  # what was low may have risen: nothing is heard of it now
                if sequence in self.texts:
                    self.texts[sequence].forget(self.kinds[sequence.params.greedy])
            self.quiet += 1
            lost = costs[draft] - costs[0] * gain[draft] / b
            if self.quiet >= min(max(lost / (PROBING * costs[0]), LEAST_QUIET), MOST_QUIET):
                best = draft
        if best:
            self.quiet = 0
        return self.choices[best]

    def seconds(self, b: int) -> np.ndarray:
        return np.array([self.costs.of(c, b) for c in self.choices])

    def narrow(self, sequences: list, predicted: np.ndarray) -> Choice:
        """What to verify of trees that are there, by their own scores [B, choices, depth]: the most
        tokens above those that its seconds are worth at the best rate."""
        costs, gain = self.seconds(len(sequences)), self.expect(sequences, predicted)
        usual = self.gain(sequences)
        rate = ((gain if usual is None else usual) / costs).max()
        return self.choices[1 + int(np.argmax((gain - rate * costs)[1:]))]

    def predicted(self, trees: Sequence[Tree]) -> np.ndarray:
        """`reach` of trees that may differ in size."""
        sizes = np.array([len(t) for t in trees])
        scores = np.zeros((len(trees), sizes.max()), np.float32)
        depths = np.zeros(scores.shape, np.int32)
        for i, tree in enumerate(trees):
            scores[i, : len(tree)], depths[i, : len(tree)] = tree.score, tree.depth
        return reach(scores, depths, sizes, self.choices, self.depth)

    # -- what it became

    def heard(self, done) -> None:
        """Of a recorded round (rounds.Done)."""
        self.costs.saw(done.choice, len(done.places), done.seconds)
        if done.scored is None:
            return
        live = [i for i, n in enumerate(done.counts) if n]
        predicted = reach(*(a[live] for a in done.scored), self.choices, self.depth)
        self.learn([done.places[i] for i in live], done.choice, predicted, done.counts[live] - 1)

    def learn(self, sequences: list, choice: Choice, predicted: np.ndarray, accepted) -> None:
        """A round's predictions [B, choices, depth], and how deep each walk got [B]."""
        if choice not in self.choices:
            return
        which, deep = self.choices.index(choice), np.arange(1, self.depth + 1)
        for sequence, mine, n in zip(sequences, predicted, accepted, strict=True):
            got = (deep <= n).astype(float)
            nothing = np.zeros(self.depth)
            kind = self.kinds.setdefault(sequence.params.greedy, _Text(mine, nothing, nothing))
            text = self.texts.setdefault(sequence, _Text(kind.reach, nothing, nothing))
            kind.add(mine, which, got, KEPT_OF_ALL, FRESH / 4)
            text.add(mine, which, got, KEPT, FRESH)
