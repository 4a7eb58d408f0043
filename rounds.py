"""Decode rounds recorded on the device: draft, build, verify, choose, walk, commit, extend.

One graph for each (mode, budget, number of places) replays a whole round from arrays that stay on
the device: roots, lengths, limits, page tables, requests, penalties. The host launches a round
before it reads the one before, so the device does not wait for it; it reads tokens and counts,
decides what has ended, and hands the next prompts to the engine's own step. The tokens and bits are
the engine's: the operations are the same, and a row's bits do not depend on the other rows or on
filler (R1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cache import CacheFull, Placed
from config import DeviceFault, UserError
from model import Batch
from request import Sequence
from sampling import SamplingParams

log = logging.getLogger("kdtree")
MOST_STOPS = 16  # stop ids of a request that min_tokens can hide on the device


class Emitted(NamedTuple):
    """What one sequence got of a round: tokens, and the logits of each where they are wanted."""

    sequence: Sequence
    tokens: list[int]
    logits: np.ndarray | None


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

    places: list[Sequence]
    read: Callable[[], tuple]


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

    def step(
        self, running: list[Sequence], mode: str, budget: int, more: bool
    ) -> list[Emitted] | None:
        """Read the round in flight and return what each sequence got; with `more`, the one that
        follows is launched before. None: pages are short, or the round cannot be recorded; the
        engine's own step does it."""
        if self.flight is None:
            self.enter(running)
            if not self.launch(mode, budget):
                return None
        flight, self.flight = self.flight, None
        # Only if nobody has come or gone since, and never to record: recording starts from what the
        # host knows, which is behind by the round in flight.
        if more and flight.places == running and self.key(mode, budget) in self.graphs:
            self.launch(mode, budget)
        tokens, counts, logits, rows = flight.read()
        got = []
        for place, sequence in enumerate(flight.places):
            n = int(counts[place])
            if n and sequence.finish_reason is None and sequence.slot >= 0:
                of_tokens = None if logits is None else logits[rows[place, :n]]
                got.append(Emitted(sequence, tokens[place, :n].tolist(), of_tokens))
        return got

    def key(self, mode: str, budget: int) -> tuple:
        """What a recorded graph is for."""
        return (mode, budget, len(self.places), self.penalised)

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
            if self.penalised:
                self.ops.set_penalties(self.penalties, s.slot, s.params, s.path)
        refill(self.requests, self.ops.pack_requests(params))
        self.tables_sent = None

    @property
    def penalised(self) -> bool:
        return any(s.params.needs_path or s.params.logit_bias for s in self.places)

    def launch(self, mode: str, budget: int) -> bool:
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
        key = self.key(mode, budget)
        if key not in self.graphs:
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
            self.enter(self.places)  # recording ran the round once
            self.send_tables()
        self.graphs[key].replay()
        wanted = any(s.wants_logits for s in self.places)
        outputs = self.graphs[key].outputs
        self.flight = _Flight(list(self.places), self._reader(outputs, wanted))
        return True

    def send_tables(self) -> None:
        """The page tables, where they have changed."""
        tables = self.cache.tables[:, : self.state.tables.shape[1]]
        if self.tables_sent is None or not np.array_equal(tables, self.tables_sent):
            self.tables_sent = tables.copy()
            self.ops.refill(self.state.tables, tables)

    def _reader(self, outputs: tuple, wanted: bool) -> Callable[[], tuple]:
        tokens, counts, rows, logits = outputs
        some = (tokens, counts, rows, logits) if wanted else (tokens, counts)
        fetch = self.ops.fetch(some)

        def read() -> tuple:
            host = fetch()
            return (*host[:2], host[3], host[2]) if wanted else (*host, None, None)

        return read

    # -- the device's side: nothing here looks at a value, uploads or waits

    def round(self, mode: str, budget: int, b: int, penalised: bool) -> tuple:
        """One round over the first b places -> (tokens, counts, rows, logits), device arrays.

        tokens, rows  int32 [b, depth + 1];  counts int32 [b];  logits fp32 [b * budget, V]
        """
        o, state, depth = self.ops, self.state, self.depth
        roots, slots, limits = self.roots[:b], self.slots[:b], self.limits[:b]
        budget = {"ar": 1, "chain": depth + 1}.get(mode, budget)
        ids, log_probs = self._candidates(roots, slots, budget, 1 if mode == "chain" else budget)
        trees = o.build_trees(roots, limits, ids, log_probs, budget)
        rows = o.tree_rows(trees, slots, state.lengths, b * budget)
        batch = Batch(rows.token_ids, rows.positions, rows.sequence, rows.parent)
        forward = self.model.forward(batch, state, o.arange(b * budget))
        adjusted = None
        if penalised:
            adjusted = o.penalise_paths(forward.logits, rows, self.penalties, depth)
        choices = o.sample(
            forward.logits,
            rows.sequence,
            rows.positions,
            self.requests,
            ahead=1,
            adjusted=adjusted,
        )
        choices = o.decided(choices)
        walks = o.walk_trees(trees, rows.first, choices, slots, state.lengths, depth)
        placed = Placed(*(a.reshape(-1) for a in (walks.rows, walks.slots, walks.positions)))
        o.put_entries(state.pages, forward.entries, *vars(placed).values(), state.tables)
        if self.drafter is not None:
            self.drafter.extend(forward.taps, placed, state)
        o.advance(state.lengths, slots, walks.counts)
        if penalised:
            o.count_tokens(self.penalties, walks.tokens, slots)
        roots[...] = walks.roots
        limits -= walks.counts
        return walks.tokens, walks.counts, walks.rows, forward.logits

    def _candidates(self, roots, slots, budget: int, width: int) -> tuple:
        """The drafter's likeliest tokens and their log-probabilities, [b, depth, width]."""
        o, b = self.ops, len(roots)
        if budget == 1:  # plain decoding: nothing is drafted
            return self.nothing[0][:b], self.nothing[1][:b]
        n, mask = self.depth + 1, self.drafter.dims.mask_token_id
        rows = o.draft_rows(roots, slots, self.state.lengths, self.state.tables, n, mask)
        logits = self.drafter.forward(rows, self.state)
        logits = o.add_noise_of(logits, rows.owners, rows.draft_positions, self.requests)
        ids, log_probs = map(o.decided, o.top_log_probs(logits, width))
        return ids.reshape(b, self.depth, -1), log_probs.reshape(b, self.depth, -1)
