"""Decode rounds recorded on the device: draft, build, verify, choose, walk, commit, extend.

One graph for each (choice of budget.py, number of places) replays a whole round from arrays that
stay on the device: roots, lengths, limits, page tables, requests, penalties. The host launches a
round before it reads the one before, so the device does not wait for it; it reads tokens and
counts, decides what has ended, and hands the next prompts to the engine's own step. The tokens and
bits are the engine's: the operations are the same, and a row's bits do not depend on the other rows
or on filler (R1).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from budget import Choice
from cache import CacheFull, Placed
from config import DeviceFault, UserError
from model import Batch
from request import Sequence
from sampling import SamplingParams
from spec_decode import Tree

log = logging.getLogger("kdtree")
MOST_STOPS = 16  # stop ids of a request that min_tokens can hide on the device


class Emitted(NamedTuple):
    """What one sequence got of a round: tokens, and the logits of each where they are wanted."""

    sequence: Sequence
    tokens: list[int]
    logits: np.ndarray | None


@dataclass(frozen=True)
class Done:
    """A round that was read.

    seconds  of the device;  places, counts  every sequence of it, and the rows that it accepted
    trees    the larger ones that were wanted (Choice.scored), of every sequence
    """

    emitted: list[Emitted]
    choice: Choice
    seconds: float
    places: list[Sequence]
    counts: np.ndarray
    trees: list[Tree] | None


@dataclass
class _State:
    """The device's own copy of what a round moves on; names as in cache.LatentCache."""

    lengths: object
    tables: object
    pages: object
    draft: object
    leaf: int


@dataclass(frozen=True)
class _Flight:
    """A round that was launched and not read: who stands where, and what it will leave behind."""

    choice: Choice
    places: list[Sequence]
    read: Callable[[], _Read]


class _Outputs(NamedTuple):
    """What a round leaves behind, on the device: arrays alone, as a recorded graph keeps them.

    tokens, rows  int32 [b, depth + 1];  counts int32 [b];  logits fp32 [b * budget, V]
    token_ids .. sizes  of the larger trees that are wanted (ops.Trees), or None
    """

    tokens: object
    counts: object
    token_ids: object
    parents: object
    depths: object
    scores: object
    sizes: object
    rows: object
    logits: object


class _Read(NamedTuple):
    """The same on the host; logits and rows where they are wanted. seconds: of the device."""

    tokens: np.ndarray
    counts: np.ndarray
    logits: np.ndarray | None
    rows: np.ndarray | None
    trees: list[Tree] | None
    seconds: float


class Rounds:
    """Recorded rounds over an engine's model, drafter and cache.

    places  the sequences that go through rounds now, by place
    flight  the round that was launched and not read. The cache's `lengths` on the host are behind
            by it; dropping it (None) is always safe, the same bits are then computed again.
    """

    def __init__(self, engine):
        self.model, self.drafter, self.ops = engine.model, engine.drafter, engine.ops
        self.cache = cache = engine.cache
        ops = engine.ops
        slots = len(cache.lengths)
        self.depth = engine.drafter.dims.block_size - 1 if engine.drafter is not None else 0
        per_sequence = min(cache.pages_for(engine.settings.decode.context), cache.n_pages)
        self.state = _State(
            lengths=ops.index(np.zeros(slots, np.int32)),
            tables=ops.index(np.zeros((slots, per_sequence), np.int32)),
            pages=cache.pages,
            draft=cache.draft,
            leaf=cache.leaf,
        )
        self.roots = ops.index(np.zeros(slots, np.int32))
        self.slots = ops.index(np.full(slots, -1, np.int32))
        self.limits = ops.index(np.full(slots, -1, np.int32))
        self.requests = ops.requests([SamplingParams()] * slots)
        self.penalties = ops.penalties(slots, engine.dims.vocab_size, MOST_STOPS)
        shape = (slots, max(self.depth, 1), 1)
        self.nothing = ops.index(np.zeros(shape, np.int32)), ops.upload(np.zeros(shape, np.float32))
        self.graphs: dict[tuple, object] = {}
        self.tables_sent: np.ndarray | None = None
        self.places: list[Sequence] = []
        self.flight: _Flight | None = None
        self.failed = False  # recording was tried and did not work
        self.recording = 0.0  # seconds that the last one took

    # -- the host's side

    def fit(self, running: list[Sequence]) -> bool:
        """Whether all of these can go on in rounds: no prompt is left to take in."""
        return not self.failed and all(
            s.n_emitted
            and int(self.cache.lengths[s.slot]) == s.to_prefill
            and not s.keep_rounds
            and len(s.rule.stop_ids) <= MOST_STOPS
            for s in running
        )

    def step(self, running: list[Sequence], choice: Choice, more: bool) -> Done | None:
        """Read the round in flight and say what each sequence got; with `more`, the one that
        follows is launched before. None: pages are short, or the round cannot be recorded; the
        engine's own step does it."""
        if self.flight is None:
            self.enter(running)
            if not self.launch(choice):
                return None
        flight, self.flight = self.flight, None
        # Only if nobody has come or gone since, and never to record: recording starts from what the
        # host knows, which is behind by the round in flight.
        if more and flight.places == running and not self.missing((choice,), running):
            self.launch(choice)
        read = flight.read()
        got = []
        for place, sequence in enumerate(flight.places):
            n = int(read.counts[place])
            if n and sequence.finish_reason is None and sequence.slot >= 0:
                logits = None if read.logits is None else read.logits[read.rows[place, :n]]
                got.append(Emitted(sequence, read.tokens[place, :n].tolist(), logits))
        return Done(got, flight.choice, read.seconds, flight.places, read.counts, read.trees)

    def key(self, choice: Choice, b: int, penalised: bool, sampled: bool = False) -> tuple:
        """What a recorded graph is for."""
        nodes = {"ar": 1, "chain": self.depth + 1}.get(choice.mode, choice.budget)
        return (choice._replace(budget=nodes), b, penalised, sampled)

    def missing(self, of: Iterable[Choice], running: list[Sequence]) -> list[Choice]:
        """Those whose round of these sequences is not recorded."""
        about = len(running), penalised(running), sampled(running)
        return [choice for choice in of if self.key(choice, *about) not in self.graphs]

    def seconds(self, choice: Choice, running: list[Sequence]) -> float | None:
        """How long a round takes the device, from where these sequences stand; they stay there. The
        round in flight is dropped. None: pages are short, or the round cannot be recorded."""
        self.enter(running)
        if not self.launch(choice):
            return None
        flight, self.flight = self.flight, None
        return flight.read().seconds

    def enter(self, running: list[Sequence]) -> None:
        """Bring the device's arrays level with the host's, for these sequences."""
        self.places = list(running)
        b = len(running)
        refill, cache = self.ops.refill, self.cache
        refill(self.state.lengths, cache.lengths)
        refill(self.roots[:b], np.array([s.tokens[-1] for s in running], np.int32))
        refill(self.slots[:b], np.array([s.slot for s in running], np.int32))
        limits = [s.rule.max_tokens - s.n_emitted - 1 for s in running]
        refill(self.limits[:b], np.array(limits, np.int32))
        params = [SamplingParams()] * len(cache.lengths)
        for s in running:
            params[s.slot] = s.params
            if penalised(running):
                self.ops.set_penalties(self.penalties, s.slot, s.params, s.path)
        refill(self.requests, self.ops.pack_requests(params))
        self.tables_sent = None

    def launch(self, choice: Choice) -> bool:
        """Start a round for `places`, unless pages are short."""
        cache, ahead = self.cache, 2 * (self.depth + 1)
        try:
            for s in self.places:
                if s.slot >= 0:
                    most = min(int(cache.lengths[s.slot]) + ahead, s.longest)
                    cache.reserve(s.slot, most)
        except CacheFull:
            return False
        self.send_tables()
        places = self.places
        key = self.key(choice, len(places), penalised(places), sampled(places))
        if key not in self.graphs:
            began = time.perf_counter()
            try:
                self.graphs[key] = self.ops.capture(lambda: self.round(*key))
            except (UserError, DeviceFault):
                raise
            except Exception as error:  # whatever the driver has against it: plain steps still run
                if self.ops.comm is not None:
                    raise  # the other ranks record: they must not be left alone in a round
                log.warning("rounds are not recorded, plain steps go on: %s", error)
                self.failed = True
                return False
            self.recording = time.perf_counter() - began
            self.enter(self.places)  # recording ran the round once
            self.send_tables()
        begin = self.ops.launcher.mark()
        self.graphs[key].replay()
        wanted = any(s.wants_logits for s in self.places)
        read = self._reader(self.graphs[key].outputs, wanted, begin)
        self.flight = _Flight(choice, list(self.places), read)
        return True

    def send_tables(self) -> None:
        """The page tables, where they have changed."""
        tables = self.cache.tables[:, : self.state.tables.shape[1]]
        if self.tables_sent is None or not np.array_equal(tables, self.tables_sent):
            self.tables_sent = tables.copy()
            self.ops.refill(self.state.tables, tables)

    def _reader(self, made: _Outputs, wanted: bool, begin) -> Callable[[], _Read]:
        end, arrays = self.ops.launcher.mark(), ()
        if made.sizes is not None:
            arrays = made.token_ids, made.parents, made.depths, made.scores, made.sizes
        bits = (made.rows, made.logits) if wanted else ()
        fetch = self.ops.fetch((made.tokens, made.counts, *arrays, *bits))

        def read() -> _Read:
            tokens, counts, *rest = fetch()
            larger = None
            if arrays:
                *nodes, sizes = rest[: len(arrays)]
                larger = [Tree(*(a[i, :n] for a in nodes)) for i, n in enumerate(sizes)]
            rows, logits = rest[-2:] if wanted else (None, None)
            seconds = self.ops.launcher.between(begin, end)
            return _Read(tokens, counts, logits, rows, larger, seconds)

        return read

    # -- the device's side: nothing here looks at a value, uploads or waits

    def round(self, choice: Choice, b: int, penalised: bool, sampled: bool) -> _Outputs:
        """One round over the first b places."""
        o, state, budget = self.ops, self.state, choice.budget
        depth = min(self.depth, budget - 1)  # of the trees at most
        roots, slots, limits = self.roots[:b], self.slots[:b], self.limits[:b]
        trees, whole = self.trees(choice, b, sampled)
        rows = o.tree_rows(trees, slots, state.lengths, b * budget)
        batch = Batch(rows.token_ids, rows.positions, rows.sequence, rows.parent)
        forward = self.model.forward(batch, state)
        adjusted = None
        if penalised:
            adjusted = o.penalise_paths(forward.logits, rows, self.penalties, depth)
        if sampled:
            asked = rows.sequence, rows.positions, self.requests
            choices = o.sample(forward.logits, *asked, ahead=1, adjusted=adjusted)
        else:
            choices = o.best_tokens(forward.logits, adjusted)
        choices = o.decided(choices)
        walks = o.walk_trees(trees, rows.first, choices, slots, state.lengths, depth)
        placed = Placed(*(a.reshape(-1) for a in (walks.rows, walks.slots, walks.positions)))
        o.put_entries(state.pages, forward.entries, *vars(placed).values(), state.tables)
        if self.drafter is not None:
            self.drafter.extend(forward.taps, placed, state)
        o.advance(walks, slots, state.lengths, roots, limits)
        if penalised:
            o.count_tokens(self.penalties, walks.tokens, slots)
        larger = (None,) * 5 if whole is None else vars(whole).values()
        return _Outputs(walks.tokens, walks.counts, *larger, walks.rows, forward.logits)

    def trees(self, choice: Choice, b: int, sampled: bool = False) -> tuple:
        """The round's trees, and the larger ones that are wanted or None."""
        o, nodes, scored = self.ops, choice.budget, choice.scored
        roots, limits = self.roots[:b], self.limits[:b]
        if nodes == 1 and not scored:  # plain decoding: nothing is drafted
            nothing = (array[:b] for array in self.nothing)
            return o.build_trees(roots, limits, *nothing, 1), None
        width = 1 if choice.mode == "chain" and not scored else max(nodes, scored)
        logits, noise = self.drafts(b)
        likeliest = o.top_log_probs(logits, width, noise if sampled else None)
        ids, log_probs = map(o.decided, likeliest)
        ids, log_probs = (array.reshape(b, self.depth, -1) for array in (ids, log_probs))
        if not scored:
            return o.build_trees(roots, limits, ids, log_probs, nodes), None
        whole = o.build_trees(roots, limits, ids, log_probs, scored)
        if nodes > self.depth:  # its beginning, see spec_decode.build_tree
            return dataclasses.replace(whole, sizes=np.minimum(whole.sizes, nodes)), whole
        return o.build_trees(roots, limits, ids, log_probs, nodes), whole

    def drafts(self, b: int) -> tuple:
        """The drafter's logits [b * depth, V], and what the requests' noise is made of."""
        o, n, mask = self.ops, self.depth + 1, self.drafter.dims.mask_token_id
        state, roots, slots = self.state, self.roots[:b], self.slots[:b]
        rows = o.draft_rows(roots, slots, state.lengths, state.tables, n, mask)
        logits = self.drafter.forward(rows, state)
        return logits, (rows.owners, rows.draft_positions, self.requests)


def penalised(some: list[Sequence]) -> bool:
    """Whether logits are changed before tokens are chosen from them."""
    return any(s.params.needs_path or s.params.logit_bias for s in some)


def sampled(some: list[Sequence]) -> bool:
    """Whether some tokens are drawn, so that there is noise to make."""
    return not all(s.params.greedy for s in some)
