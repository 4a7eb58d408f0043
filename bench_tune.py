"""The fastest launch of every product of a config's steps: `python bench.py --tune`.

A few tokens are decoded, and what then goes through tensor cores is heard with its weights. Each
product is then launched in every way that this build knows, as in a step: a recorded chain of other
layers' weights, cold, each behind a norm. Few turns tell the leaders, more of them, in turns, the
fastest. It is written down (tiles.py) if its bits are the others', if it is faster than the rule's
choice by more than the noise, and if a whole step is not slower with it: what stands beside a
launch in a step may suit it less.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

import config
import launchers
import tiles
from config import UserError
from engine import Engine
from sampling import SamplingParams

# Operations that are products, and which argument x [T, K] is.
PRODUCTS = {"_linear": 1, "_mma_gate_up": 1, "mixture": 0}
ROWS = (1, 2, 4, 8, 16, 32, 64)
MORE_ROWS = (128, 256, 512, 1024, 2048, 4096)  # of the experts
CALLS = 8  # of a product in a chain at most, each with weights of its own
CALL_ROWS = CALLS * 128  # of all calls together, if one allows: what they make waits in memory
FLUSH = 256 << 20  # bytes read in front of a chain: more than any L2 cache holds
FEW, MANY = 3, 15  # turns of all, and of the leaders
LEADERS = 8  # that go on to them
GAIN = 0.003  # of a chain's time: less is noise


class Trial(tiles.Tiles):
    """Choices that the tuner makes: the rule's, until `chosen` is overwritten."""

    def __init__(self, limits: launchers.Limits):
        super().__init__(limits)
        self.ways: dict[tuple[str, int], list] = {}
        self.asked: list[tuple[str, int]] = []

    def choose(self, product: str, rows: int, candidates, rule):
        key = product, rows
        if key not in self.ways:
            self.ways[key] = list(candidates)
            self.chosen[key] = rule()
        self.asked.append(key)
        return self.chosen[key]


@dataclass(frozen=True)
class Call:
    """An operation with weights of its own; x, its argument number `place`, has `columns`."""

    name: str
    place: int
    columns: int
    arguments: tuple

    def run(self, ops, x):
        before, after = self.arguments[: self.place], self.arguments[self.place + 1 :]
        return getattr(ops, self.name)(*before, x, *after)


@dataclass(eq=False)
class Runner:
    """A launch in a recorded chain, and the seconds of its replays."""

    way: object
    graph: launchers.Captured | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def beats(self, other: Runner) -> bool:
        """Beyond the noise: by GAIN, and three of four replays are faster than three of its."""
        quarter = statistics.quantiles(self.seconds, n=4, method="inclusive")[2]
        others = statistics.quantiles(other.seconds, n=4, method="inclusive")[0]
        return quarter < others and self.median < (1 - GAIN) * other.median


def table(arguments) -> list[dict]:
    """One row a product and T; configs/tiles.yaml is written."""
    settings = config.load(arguments.config, batch=1)
    kernels = config.Kernels(activation="bfloat16")  # all that tensor cores take
    engine = Engine(dataclasses.replace(settings, kernels=kernels), arguments.device)
    if engine.comm is not None:
        raise UserError("--tune: times one rank; set tp.size to 1, or tp.only_rank")
    if engine.ops.name == "cpu":
        raise UserError("--tune: times kernels and needs an NVIDIA GPU; none can be used here")
    for n in arguments.rows or ():
        if n & (n - 1):
            raise UserError(f"--rows: the table is of powers of two, got {n}")
    rows = tune(engine, arguments.rows)
    if not rows:
        raise UserError(f"--tune: {arguments.config}: there is no choice among launches")
    tiles.write(tiles.FILE, engine.ops.tiles.device, entries(rows))
    return rows


def tune(engine: Engine, rows: list[int] | None = None) -> list[dict]:
    """The rows of `table`. The engine's operations go on with what was found the fastest."""
    ops, calls = engine.ops, heard(engine)
    ops.tiles = Trial(ops.launcher.limits)
    found = Tuner(ops).rows(groups(ops, calls), rows)
    if engine.rounds is not None:
        confirm(engine, found)
    return found


def confirm(engine: Engine, rows: list[dict]) -> None:
    """Give the rule's choice back to what makes a step of so many rows slower."""
    trial, most = engine.ops.tiles, 1 if engine.drafter is None else ROWS[-1]
    for row in rows:
        if row["choice"] == row["rule"] or row["T"] > most:
            continue
        key = row["op"], row["T"]
        rule, won = (
            next(w for w in trial.ways[key] if str(w) == row[n]) for n in ("rule", "choice")
        )
        runners = []
        for way in (rule, won):
            trial.chosen[key] = way
            runners.append(Runner(way, seconds=steps(engine, row["T"])))
        if runners[0].beats(runners[1]):
            trial.chosen[key] = rule
            row |= {"choice": row["rule"], "µs": row["its µs"]}


def steps(engine: Engine, nodes: int) -> list[float]:
    """Seconds of recorded rounds of so many rows."""
    engine.rounds.graphs.clear()
    engine.use("ar" if nodes == 1 else "tree", nodes)
    sequence = engine.submit([1, 2, 3], SamplingParams(max_tokens=64, temperature=0.0))
    try:
        while not sequence.n_emitted:
            engine.advance(sequence)
        took = [engine.seconds(engine.choice, sequence.arrival) for _ in range(MANY + 1)]
    finally:
        engine.cancel(sequence)
    if None in took:
        raise UserError(f"--tune: no step of {nodes} rows was recorded; raise decode.context")
    return took[1:]  # the first one was recorded


def entries(rows: list[dict]) -> dict[str, dict]:
    """What the file says of these."""
    products: dict[str, dict] = {}
    for row in rows:
        entry = {"choice": row["choice"], "us": round(row["µs"], 2)}
        if row["rule"] != row["choice"]:
            entry["rule"] = round(row["its µs"], 2)
        products.setdefault(row["op"], {})[row["T"]] = entry
    return products


def heard(engine: Engine) -> list[Call]:
    """The products of a step, each with its weights once."""
    ops, found = engine.ops, {}
    rounds, engine.rounds = engine.rounds, None  # a recorded round would not be heard

    def listen(name: str, place: int) -> None:
        method = getattr(ops, name)

        def wrapped(*args, **kwargs):
            weights = [id(a) for i, a in enumerate(args) if i != place]
            call = Call(name, place, args[place].shape[1], args)
            found.setdefault((name, *weights), call)
            return method(*args, **kwargs)

        setattr(ops, name, wrapped)

    for name, place in PRODUCTS.items():
        listen(name, place)
    try:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        engine.generate([[1, 2, 3]], params)
    finally:
        for name in PRODUCTS:
            delattr(ops, name)
        engine.rounds = rounds
    return list(found.values())


def groups(ops, calls: list[Call]) -> list[list[Call]]:
    """Calls of the same products together, up to CALLS; those of few products first, so that each
    is timed where least is beside it."""
    alike: dict[tuple, list[Call]] = {}
    for call in calls:
        ops.tiles.asked.clear()
        call.run(ops, drawn(ops, 1, call.columns))
        if ops.tiles.asked:
            alike.setdefault((call.name, *sorted(set(ops.tiles.asked))), []).append(call)
    return [alike[key][:CALLS] for key in sorted(alike, key=len)]


def drawn(ops, rows: int, columns: int):
    x = ops.activations((rows, columns))
    ops.generate(x, 1, 0.0, 1.0)
    return x


class Tuner:
    """One GPU's launches, raced against each other."""

    def __init__(self, ops):
        self.ops, self.trial = ops, ops.tiles
        self.cold = ops.launcher.upload(np.zeros(FLUSH, np.uint8))
        self.tuned: set[tuple[str, int]] = set()

    def rows(self, alike: list[list[Call]], asked) -> list[dict]:
        """A row a product and T, which may be `asked` for."""
        found = []
        with tqdm(total=0, unit=" launches", disable=not sys.stderr.isatty()) as bar:
            for calls in alike:
                more = MORE_ROWS if calls[0].name == "mixture" else ()
                for rows in asked or (*ROWS, *more):
                    found += self.of_calls(calls, rows, bar)
        return found

    def of_calls(self, calls: list[Call], rows: int, bar) -> list[dict]:
        """A row for each product that these calls with so many rows of x are the first to need."""
        calls = calls[: max(1, CALL_ROWS // rows)]
        x = drawn(self.ops, rows, calls[0].columns)
        self.trial.asked.clear()
        calls[0].run(self.ops, x)
        keys = [key for key in dict.fromkeys(self.trial.asked) if key not in self.tuned]
        nothing = Runner(None, self.chain(calls, x, launch=False))
        self.turns([nothing], MANY if keys else 0)
        found = []
        for key in keys:
            bar.set_description(f"{key[0]}, {key[1]} rows")
            best, rule, wrong = self.race(key, lambda: self.chain(calls, x), bar)
            self.trial.chosen[key] = best.way
            self.tuned.add(key)
            us = [(r.median - nothing.median) / len(calls) * 1e6 for r in (best, rule)]
            found.append(
                {"op": key[0], "T": key[1], "choice": str(best.way), "µs": us[0],
                 "rule": str(rule.way), "its µs": us[1], "ways": len(self.trial.ways[key]),
                 "identical": "NO" if wrong else "yes"}
            )  # fmt: skip
        return found

    def chain(self, calls: list[Call], x, launch: bool = True) -> launchers.Captured:
        """Recorded: caches emptied, then every call on x behind a norm; or the norms alone."""
        ones = self.ops.upload(np.ones(x.shape[1], np.float32))

        def run() -> tuple:
            self.ops.read(self.cold)
            made = []
            for call in calls:
                self.ops.rms_norm(x, ones, 1e-5)
                if launch:
                    made.append(call.run(self.ops, x))
            return tuple(made)

        return self.ops.capture(run)

    def race(self, key: tuple[str, int], record: Callable, bar) -> tuple[Runner, Runner, list]:
        """(the winner, the rule's, those with other bits) of a product's launches."""
        ways, rule = self.trial.ways[key], self.trial.chosen[key]
        bar.total += len(ways)
        first, near, wrong = None, [], []
        for way in [rule, *(w for w in ways if w != rule)]:
            self.trial.chosen[key] = way
            runner = Runner(way, record())
            self.turns([runner], FEW)
            first = first or runner
            (near if self.same_bits(first, runner) else wrong).append(runner)
            near = sorted(near, key=lambda r: r.median)[:LEADERS]  # memory holds no more of them
            bar.update()
        leaders = near if first in near else [first, *near]
        self.turns(leaders, MANY)
        best = min(leaders, key=lambda r: r.median)
        return (best if best.beats(first) else first), first, wrong

    def turns(self, runners: list[Runner], n: int) -> None:
        for _ in range(n):
            for runner in runners:
                runner.seconds.append(self.ops.launcher.seconds(runner.graph.replay))

    def same_bits(self, a: Runner, b: Runner) -> bool:
        """Of all that a replay gives; what it does not write is not the other's."""
        for y in b.graph.outputs:
            bits(y)[...] = 0x7FFF
        b.graph.replay()
        pairs = zip(a.graph.outputs, b.graph.outputs, strict=True)
        return all(bool((bits(y) == bits(z)).all()) for y, z in pairs)


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")
