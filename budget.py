"""What the next round drafts (`draft.budget: auto`): plain decoding, the chain, or a tree, of the
number of nodes with the most expected tokens a second.

The text is the same whatever is drafted (R1), and a best-first tree is the beginning of every
larger one. So once the tokens are there, one drafted tree says how far a walk would have got with
every choice, and before they are, its probabilities claim it: with less noise, but not all true.
What a draft should add is what those of its text claim, times what came of it in texts of its kind,
times how much more or less now comes of the largest. Plain decoding drafts nothing; for it to
notice that drafts would pay, some of its rounds are `watched`: they draft, and verify the root
alone. A small draft takes less than the large tree that is evidence; where rounds are recorded and
the difference matters, many are `bare`: they say how far their own walk gets, and by the factor
that this is off, what is expected of all other choices is off, too. Where none are recorded, on a
CPU, a large tree takes little more than a small one to draft: every draft is evidence, and as much
of it is verified as pays by its own claims.

Regret, in seconds against the best fixed choice, with costs as measured:
- Evidence takes at most LEARNING of the time, and LESSONS rounds once, of plain decoding and of
  drafts each; but for the first drafts of a kind, and where bare rounds are not recorded.
- A text's evidence fades by KEPT a draft. While claims are as true, by choice, as they were (which
  fades by LASTING), a choice that was better by g tokens a draft and is worse by h since the text
  has changed is left once ln(1 + g / h) / (1 - KEPT) drafts have been seen. That costs less than
  what g gains in 1 / (1 - KEPT) drafts, however large h is. Beside plain decoding, drafts are seen
  as often as they are watched.
- A text begins with what others of its kind have shown, which weighs as much as PRIOR drafts, and
  FEW tokens in what comes of claims.
- Drafts give way to plain decoding when they lose by more than the evidence may be wrong by.
Nothing here can change a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from spec_decode import Tree

# Of a tree: powers of two, and from 8 on what is halfway between them.
NODES = (2, 4, *(n for e in range(3, 11) for n in (2**e, 3 * 2 ** (e - 1))))
KEPT = 0.93  # of evidence, a text's or all texts', after a draft
LASTING = 0.99  # of all texts' that says how true each choice's claims are
PRIOR = 5.0  # drafts of a text that weigh as much as all texts, and of these as that all is equal
FEW = 5.0  # claimed tokens that the same weigh as, in how much comes of claims lately
UNSURE = 0.9  # standard errors by which drafts may lose to plain decoding and be kept
LEARNING = 0.01  # of the time of plain decoding, and of drafts, that their evidence may take
LESSONS = 8  # rounds of such evidence that may be saved up: to be sure of a change at once
MOST_QUIET = 64  # rounds of plain decoding between watched ones, if there is time for them
TURNS = 6  # of every choice when they are measured; the shortest counts
CLOSE = 0.01  # of its seconds: a choice that takes so little less than a larger one is left out
TINY = 1e-9  # tokens
MOST_LEFT = 256  # tokens to come of a text, as far as recording another round is concerned
# Of a round's seconds (Costs.saw):
HITCH = 2.0  # times as many as expected, or as few, that are believed at most
FRESH = 4  # rounds after a change of choice that tell of the choice; later ones, of the machine
MEASURED = 20  # rounds that a measurement weighs as, and that a choice's ratio is the mean of
BELIEVED = 0.99  # of a choice's ratio, in logarithms, after a round
PACE_FRESH, PACE_LATER = 0.05, 0.2  # of what such rounds are off by: the machine's


Claims = list[np.ndarray]  # of every tree, tokens for every choice (`claimed`)


class Choice(NamedTuple):
    """What a round drafts. scored: nodes of the larger tree that is wanted as evidence; 0: none."""

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


def bare(choice: Choice) -> Choice:
    """The same without evidence."""
    return choice._replace(scored=0)


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


def accepted(
    tree: Tree, tokens: Sequence[int], of: Sequence[Choice], depth: int
) -> np.ndarray | None:
    """How deep a walk along `tokens` gets with each choice -> int [choices]; None where that
    depends on tokens to come."""
    path, ids, parents = [0], tree.token_ids.tolist(), tree.parent.tolist()
    for node in range(1, len(ids)):
        if parents[node] == path[-1]:
            if len(path) > len(tokens):
                return None
            if ids[node] == tokens[len(path) - 1]:
                path.append(node)
    places = np.argsort(-tree.score, kind="stable").tolist()
    ranks = sorted(places.index(node) for node in path)
    held = (bisect_left(path if c.budget > depth else ranks, c.budget) for c in of)  # as in `cut`
    return np.fromiter(held, int, len(of)) - 1


def claimed(tree: Tree, of: Sequence[Choice], depth: int) -> np.ndarray:
    """The same as the tree's own probabilities have it: fp64 [choices]."""
    chance = np.exp(tree.score.astype(float))
    last = np.minimum([c.budget for c in of], len(tree)) - 1
    return np.where(last < depth, (-np.sort(-chance)).cumsum()[last], chance.cumsum()[last]) - 1


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
        they are the machine's, or the context's. Both go by logarithms: means of factors. What was
        measured is believed again, by and by: else pace and ratio drift apart, as contexts begin
        short in every text and grow, and choices that are not taken seem ever slower."""
        if choice not in self.measured or seconds <= 0:
            return
        self.steady = self.steady + 1 if self.last == (choice, b) else 0
        self.last = choice, b
        now, seen = self.of(choice, b), self.seen.get((choice, b), MEASURED if b == 1 else 0)
        off = min(max(seconds / now, 1 / HITCH), HITCH)
        mine, pace = 0.0, PACE_LATER
        if self.steady < FRESH:
            mine, pace = 1 / (2 + min(seen, MEASURED)), PACE_FRESH
        self.seen[choice, b] = seen + 1
        ratio = now / self.expected(choice, b) / self.pace * off**mine
        if b == 1:  # of more nothing was measured
            ratio **= BELIEVED
        self.ratio[choice, b] = self.nearest[choice.mode == "ar", b] = ratio
        self.pace *= off**pace


class Evidence:
    """Drafts of one text, or of all texts of a kind; older ones have faded, by `kept` a draft.

    n       drafts
    tokens  [choices] that their walks reached
    claims  [choices] that their probabilities said
    """

    def __init__(self, choices: int, kept: float):
        self.n, self.kept = 0.0, kept
        self.tokens, self.claims = np.zeros((2, choices))

    def add(self, tokens: np.ndarray, claims: np.ndarray) -> None:
        self.n = self.kept * self.n + 1
        self.tokens = self.kept * self.tokens + tokens
        self.claims = self.kept * self.claims + claims


class Outlook(NamedTuple):
    """What to expect of the next draft of a text.

    claims  [choices] tokens that an average one says
    true    [choices] tokens that come of one that is claimed
    n       drafts that have shown it
    """

    claims: np.ndarray
    true: np.ndarray
    n: float


@dataclass
class _Text:
    """A text's evidence, and its drafts of which it does not say yet what became of them: (where
    the tokens begin that follow the root, tree, what that claims for every choice)."""

    evidence: Evidence
    open: list[tuple[int, Tree, np.ndarray]] = field(default_factory=list)


class Auto:
    """Picks what each round drafts, and learns from what it became.

    depth  candidates' positions;  most  nodes of a tree at most;  rows  of all trees together
    """

    def __init__(self, depth: int, most: int, rows: int):
        self.depth, self.rows = depth, rows
        self.offer(choices(depth, most))
        self.costs, self.measured = Costs(), False
        self.narrows = False  # trees are cut by their own probabilities
        self.extra = 0.0  # seconds of a watched round more than of plain decoding
        self.scoring: dict[Choice, float] = {}  # seconds of a round more than of a bare one
        self.saved = {True: 0.0, False: 0.0}  # seconds for evidence of plain decoding, of drafts
        self.quiet, self.gap = 0, 1  # plain rounds since a watched one, and until the next
        self.rate = 0.0  # tokens a second that are expected of the best choice

    def offer(self, of: Iterable[Choice]) -> None:
        """Choose among these from now on; what was known of others is forgotten."""
        self.choices = tuple(of)
        self.nodes = np.array([c.budget for c in self.choices])
        self.watched = Choice("ar", 1, self.choices[-1].scored)
        self.worth = np.ones(len(self.choices))  # tokens of plain decoding in the same time
        self.prior = self.worth - 1  # tokens that drafts add, if all choices are equal
        self.texts: WeakKeyDictionary = WeakKeyDictionary()
        # By kind of text, greedy or not: its drafts lately, and over a long time.
        self.kinds, self.lasting = (
            {greedy: Evidence(len(self.choices), kept) for greedy in (True, False)}
            for kept in (KEPT, LASTING)
        )

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
        names = list(took)
        for choice in [self.watched] * 2 + [*names, self.watched] * (TURNS - 2):
            if not time(choice):
                return
        if recorded:  # the smallest first: where its evidence takes little, that of all does
            for choice in names[1:]:
                if not all(time(bare(choice)) and time(choice) for _ in range(TURNS)):
                    return
                if took[choice] - took[bare(choice)] <= LEARNING * took[choice]:
                    break
        self.take(took, recorded)

    def take(self, took: dict[Choice, float], recorded: bool) -> None:
        """Choose by these seconds of one sequence: of choices, of watched and of bare rounds."""
        names = [c for c in self.choices if c in took]
        more = {c: took[c] - took[bare(c)] for c in names[1:] if bare(c) in took}
        # Fewer rows take no longer: what says so was held up.
        best = np.minimum.accumulate([took[c] for c in names][::-1])[::-1].tolist()
        self.extra = max(took[self.watched] - best[0], 0.0)
        self.saved[True] = LESSONS * self.extra
        if not recorded:
            most = max(c.budget for c in names)
            names = [c._replace(scored=min(c.scored, most)) for c in names]
        last = len(names) - 1
        kept = [i for i in range(last) if not i or best[i] < (1 - CLOSE) * best[i + 1]] + [last]
        self.offer(names[i] for i in kept)
        seconds = np.array(best)[kept]
        self.worth, self.narrows = seconds / seconds[0], not recorded
        self.prior = np.minimum(self.worth - 1, self.depth)
        rationed = {c: price for c, price in more.items() if price > LEARNING * took[c]}
        self.scoring = {c: price for c, price in rationed.items() if c in self.choices}
        self.saved[False] = LESSONS * max(self.scoring.values(), default=0.0)
        self.costs = Costs(dict(zip(self.choices, seconds.tolist(), strict=True)))
        self.measured = True

    # -- the choice

    def outlook(self, sequence) -> Outlook:
        """What to expect of this text's drafts. How true claims are: by choice, what the kind has
        shown for long, times a factor of all, which the largest choice shows lately. A text's
        factor and claims begin with its kind's."""
        kind, text = self.kinds[sequence.params.greedy], self.texts.get(sequence)
        lasting, prior = self.lasting[sequence.params.greedy], PRIOR * self.prior + TINY
        ratio = (lasting.tokens + prior) / (lasting.claims + prior)
        claims, factor, n = self.prior / ratio, 1.0, min(PRIOR, kind.n)
        for seen in (kind,) if text is None else (kind, text.evidence):
            claims = (seen.claims + PRIOR * claims) / (seen.n + PRIOR)
            factor = (seen.tokens[-1] + FEW * factor) / (seen.claims[-1] * ratio[-1] + FEW)
        return Outlook(claims, ratio * factor, n if text is None else n + text.evidence.n)

    def known(self, sequence) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that drafts of this text are expected to add, and the squared error [choices]: a
        walk ends with the first wrong token, so the variance is mean * (1 + mean); n drafts were
        seen, and one more that was off by one."""
        claims, true, n = self.outlook(sequence)
        mean = np.minimum(claims * true, self.depth)
        return mean, (n * mean * (1 + mean) + 1) / (n + 1) ** 2

    def gain(self, sequences: list) -> tuple[np.ndarray, np.ndarray]:
        """Expected tokens of a round of these together, and how far they may be off [choices]."""
        means, squares = zip(*map(self.known, sequences), strict=True)
        return len(sequences) + sum(means), UNSURE * sum(squares) ** 0.5

    def offered(self) -> tuple[Choice, ...]:
        """All that `choose` may say."""
        return (*self.choices, self.watched, *map(bare, self.scoring))

    def choose(self, sequences: list, before: dict[Choice, float] | None = None) -> Choice:
        """What the next round of these sequences drafts. before: seconds that go by before the
        first round of some choices; they must pay with what the texts may still become."""
        for sequence in sequences:
            self.settle(sequence)
        chain = next((c for c in self.choices if c.mode == "chain"), self.choices[-1])
        if not self.measured:
            return chain
        b, before = len(sequences), before or {}
        # Where a bare round would have to be recorded first, evidence is not paid for.
        scoring = {c: more for c, more in self.scoring.items() if bare(c) not in before}
        seconds = self.seconds(b) - np.array([scoring.get(c, 0.0) for c in self.choices])
        left = sum(min(s.rule.max_tokens - s.n_emitted, MOST_LEFT) for s in sequences)
        recording = np.array([before.get(c, 0.0) for c in self.choices])
        recording[b * self.nodes > self.rows] = np.inf
        gain, unsure = self.gain(sequences)
        self.rate = (gain / seconds).max()
        if not all(self.kinds[s.params.greedy].n for s in sequences):
            return chain
        # A round takes as long where fewer tokens are left than it would add.
        took, hoped = (np.maximum(left / g, 1) * seconds + recording for g in (gain, gain + unsure))
        draft = 1 + int(np.argmin(took[1:]))
        ends = all(map(self.ends, sequences))  # what they draft now says nothing
        if hoped[draft] < took[0]:
            self.quiet, self.gap = 0, 1
            choice = self.choices[draft]
            price = scoring.get(choice, 0.0)
            return bare(choice) if price and (ends or not self.pays(price, choice)) else choice
        if ends:
            return self.choices[0]
        return self.plain(self.extra + before.get(self.watched, 0.0))

    def plain(self, price: float) -> Choice:
        """Plain decoding, watched now and then, at growing intervals while drafts would not pay.
        price: seconds that watching adds to a round."""
        self.quiet += 1
        if self.quiet < self.gap or not self.pays(price, self.watched):
            return self.choices[0]
        self.quiet, self.gap = 0, min(2 * self.gap, MOST_QUIET)
        return self.watched

    def pays(self, price: float, choice: Choice) -> bool:
        """Pay for evidence that takes so many seconds, if enough is saved."""
        if price <= 0:
            return True
        plain = choice.mode == "ar"
        self.saved[plain] = min(self.saved[plain], LESSONS * price)
        if self.saved[plain] < price:
            return False
        self.saved[plain] -= price
        return True

    def seconds(self, b: int) -> np.ndarray:
        """Of a round of b sequences, as expected now [choices]."""
        return np.array([self.costs.of(c, b) for c in self.choices])

    def narrow(self, sequences: list, claims: Claims) -> Choice:
        """What to verify of trees that are there, by what their own probabilities claim (`learn`):
        the most tokens above those that its seconds are worth at the best rate."""
        b, costs = len(sequences), self.seconds(len(sequences))
        gain = np.full(len(self.choices), float(b))
        for sequence, claim in zip(sequences, claims, strict=True):
            gain += np.minimum(claim * self.outlook(sequence).true, self.depth)
        return self.choices[1 + int(np.argmax((gain - self.rate * costs)[1:]))]

    # -- what it became

    def heard(self, done) -> None:
        """Of a recorded round (rounds.Done), before its tokens are added to the texts."""
        self.saw(done.choice, len(done.places), done.seconds)
        live = [i for i, n in enumerate(done.counts) if n]
        if done.trees is not None:
            self.learn([done.places[i] for i in live], [done.trees[i] for i in live])
        elif done.choice.mode != "ar":
            for i in live:
                self.hear(done.places[i], self.scored(done.choice), int(done.counts[i]) - 1)

    def saw(self, choice: Choice, b: int, seconds: float) -> None:
        """A round of b sequences ran."""
        self.saved[choice.mode == "ar"] += LEARNING * seconds
        if choice.mode != "ar" and not choice.scored:
            choice = self.scored(choice)
            seconds += self.scoring.get(choice, 0.0)
        self.costs.saw(choice, b, seconds)

    def scored(self, choice: Choice) -> Choice:
        """Of a bare one, that of `choices`."""
        return choice._replace(scored=self.watched.scored)

    def hear(self, sequence, choice: Choice, got: int) -> None:
        """How far the walk of a bare draft got. With others it would have got so many times as far
        as with this one as is expected. Its claims are taken for those of an average draft that was
        seen: for those of `outlook`, which reckons with what comes of them, they could grow without
        end."""
        if choice not in self.choices or self.ends(sequence):
            return
        mean, at = self.known(sequence)[0], self.choices.index(choice)
        tokens = np.minimum(mean * got / max(mean[at], TINY), self.depth)
        claims = self.outlook(sequence).claims  # of the first
        for seen in self.evidence(sequence):
            seen.add(tokens, seen.claims / seen.n if seen.n else claims)

    def ends(self, sequence) -> bool:
        """Near its end a text takes smaller trees: they say nothing of others."""
        return sequence.rule.max_tokens - sequence.n_emitted <= self.depth

    def learn(self, sequences: list, trees: Sequence[Tree]) -> Claims:
        """Trees that were drafted behind these texts as they are now -> what they claim."""
        claims = [claimed(tree, self.choices, self.depth) for tree in trees]
        for sequence, tree, claim in zip(sequences, trees, claims, strict=True):
            if not self.ends(sequence):
                self.text(sequence).open.append((len(sequence.tokens), tree, claim))
        return claims

    def text(self, sequence) -> _Text:
        return self.texts.setdefault(sequence, _Text(Evidence(len(self.choices), KEPT)))

    def settle(self, sequence) -> None:
        """Take as evidence the drafts of which the text now says what became of them."""
        if (text := self.texts.get(sequence)) is None:
            return
        tokens, waiting = sequence.tokens, text.open
        text.open = []
        for start, tree, claims in waiting:
            got = accepted(tree, tokens[start : start + self.depth], self.choices, self.depth)
            if got is None:
                text.open.append((start, tree, claims))
                continue
            self.add(sequence, got, claims)
            if (1 + got > self.worth)[1:].any():
                self.gap = 1  # what plain decoding saw would have paid

    def add(self, sequence, tokens: np.ndarray, claims: np.ndarray) -> None:
        """To what is known of this text, and of all of its kind."""
        for seen in self.evidence(sequence):
            seen.add(tokens, claims)

    def evidence(self, sequence) -> tuple[Evidence, ...]:
        """Of this text, and of all of its kind: lately, and over a long time."""
        greedy = sequence.params.greedy
        return self.text(sequence).evidence, self.kinds[greedy], self.lasting[greedy]
