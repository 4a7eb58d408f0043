"""Where a decode step's time goes: `engine.py --profile`, one table for people.

On a device, the launches of a recorded round are started again kernel by kernel, each kernel's all
in one recording, and set beside the round's own time. On the CPU, and where nothing is recorded,
every operation is timed on the host, without what it calls.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from config import UserError
from engine import Engine
from ops import that_ran
from request import Sequence
from rounds import Rounds, penalised, sampled
from sampling import SamplingParams

WARM = 8  # tokens of a text before anything is measured
TOKENS = 48  # of the text at most
TURNS = {"cuda": 9, "emulate": 1}
TIMED_SECONDS = 0.003  # a kernel is timed at least so long


@dataclass(frozen=True)
class Part:
    """An operation's calls in one step together; seconds of them alone."""

    name: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class Profile:
    """parts; seconds of a step, of which `apart` more pass before the next one begins"""

    parts: list[Part]
    seconds: float
    apart: float
    what: str


def table(engine: Engine, prompt, params: SamplingParams) -> str:
    """A prompt's decode step in Markdown."""
    if engine.comm is not None:
        raise UserError("--profile: the step of one rank only; use --tp 1")
    tokens = min(params.max_tokens or TOKENS, TOKENS)
    if tokens < 4:
        raise UserError(f"--profile: expected --max-tokens of at least 4, got {tokens}")
    params = dataclasses.replace(params, max_tokens=tokens, ignore_eos=True, stop=())
    sequence = engine.submit(prompt, params)
    try:
        while sequence.n_emitted < min(WARM, tokens // 2) and sequence.finish_reason is None:
            engine.advance(sequence)
        if sequence.error:
            raise UserError(f"--profile: {sequence.error}")
        if sequence.finish_reason is not None:
            raise UserError(
                "--profile: the text ended at once; give another --prompt or more tokens"
            )
        of = on_the_host if engine.rounds is None else recorded
        return markdown(of(engine, sequence))
    finally:
        engine.cancel(sequence)


def markdown(profile: Profile) -> str:
    total = sum(part.seconds for part in profile.parts)
    # Kernels that overlap in the round take longer one by one: then they share its time.
    scale = min(1.0, profile.seconds / total) if total else 1.0
    lines = [
        f"{profile.what}: {1e3 * profile.seconds:.3f} ms a step",
        "",
        "| operation | calls | µs each | ms a step | share |",
        "|---|---|---|---|---|",
    ]

    def line(name: str, seconds: float, calls: float | None = None) -> None:
        share = f"{seconds / profile.seconds:.1%}"
        each = ["", ""] if calls is None else [f"{calls:.4g}", f"{1e6 * seconds / calls:.1f}"]
        lines.append(f"| {name} | {' | '.join(each)} | {1e3 * seconds:.3f} | {share} |")

    for part in sorted(profile.parts, key=lambda part: -part.seconds):
        line(part.name, part.seconds * scale, part.calls)
    line("idle, or none of these", profile.seconds - total * scale)
    line("**a step**", profile.seconds)
    if profile.apart > 0:
        line("between steps", profile.apart)
    if scale < 1:
        lines += ["", f"One by one they take {1e3 * total:.3f} ms: in a step they overlap."]
    return "\n".join(lines)


# ---- a recorded round --------------------------------------------------------------------------


def recorded(engine: Engine, sequence: Sequence) -> Profile:
    """The kernels of the round that is due."""
    rounds, ops, turns = engine.rounds, engine.ops, TURNS[engine.ops.name]
    choice = engine.choose()
    took = [rounds.seconds(choice, [sequence]) for _ in range(turns)]
    if None in took:
        raise UserError("--profile: too few pages for two rounds; raise decode.pages")
    kind = penalised([sequence]), sampled([sequence])
    launches = launched(ops, lambda: rounds.round(*rounds.key(choice, 1, *kind)))
    parts = []
    for kernel in dict.fromkeys(launch.kernel for launch in launches):
        mine = [launch for launch in launches if launch.kernel == kernel]
        rounds.enter([sequence])  # where kernels before have moved on lengths
        parts.append(Part(kernel, len(mine), seconds_of(ops, mine, turns)))
    rounds.flight = None  # the text goes on from here
    median = statistics.median(took)
    apart = between(engine, sequence)
    same = engine.auto is None  # else the rounds were of several sizes
    what = f"{choice.mode} of {rounds.key(choice, 1, False)[0].budget} nodes at position "
    what += f"{len(sequence.prompt) + WARM}, {ops.launcher.limits.name}"
    return Profile(parts, median, apart if same else 0.0, what)


def between(engine: Engine, sequence: Sequence) -> float:
    """Seconds a round, over the rest of the text, in which the device had none to work on."""
    rounds, worked = engine.rounds, []

    def step(*arguments):
        done = Rounds.step(rounds, *arguments)
        worked.append(0.0 if done is None else done.seconds)
        return done

    rounds.step, began = step, time.perf_counter()
    try:
        while sequence.finish_reason is None:
            engine.advance(sequence)
    finally:
        del rounds.step  # the method is there again
    return (time.perf_counter() - began - sum(worked)) / max(len(worked), 1)


def launched(ops, run: Callable[[], tuple]) -> list:
    """What `run` launches, once."""
    found: list = []
    ops.listener = found.append
    try:
        ops.capture(run)
    finally:
        ops.listener = None
    return that_ran(found)


def seconds_of(ops, launches: list, turns: int) -> float:
    """The device's time for these launches, one after the other."""

    def run() -> tuple:
        for launch in launches:
            ops.relaunch(launch)
        return ()

    replay, seconds = ops.capture(run).replay, ops.launcher.seconds
    n = max(1, int(TIMED_SECONDS / max(seconds(replay), 1e-6))) if turns > 1 else 1
    return min(seconds(lambda: [replay() for _ in range(n)]) / n for _ in range(turns))


# ---- operations on the host --------------------------------------------------------------------


class Stopwatch:
    """Seconds and calls of every operation of `ops`, of each without the operations that it calls,
    while this is entered."""

    def __init__(self, ops):
        self.ops, self.inner = ops, []
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def __enter__(self) -> Stopwatch:
        self.thread = threading.get_ident()
        for name in dir(type(self.ops)):
            plain = getattr(self.ops, name)
            if not name.startswith("_") and callable(plain) and not isinstance(plain, type):
                vars(self.ops)[name] = self.timed(name, plain)
                self.seconds[name], self.calls[name] = 0.0, 0
        return self

    def __exit__(self, *_) -> None:
        for name in self.seconds:
            del vars(self.ops)[name]

    def timed(self, name: str, plain: Callable) -> Callable:
        def run(*arguments, **named):
            if threading.get_ident() != self.thread:  # its time is that of who waits for it
                return plain(*arguments, **named)
            self.inner.append(0.0)
            began = time.perf_counter()
            try:
                return plain(*arguments, **named)
            finally:
                took = time.perf_counter() - began
                self.seconds[name] += took - self.inner.pop()
                self.calls[name] += 1
                if self.inner:
                    self.inner[-1] += took

        return run


def on_the_host(engine: Engine, sequence: Sequence) -> Profile:
    """The operations of the steps that are left."""
    before, began = sequence.steps, time.perf_counter()
    with Stopwatch(engine.ops) as watch:
        while sequence.finish_reason is None:
            engine.advance(sequence)
    steps = max(sequence.steps - before, 1)
    took = (time.perf_counter() - began) / steps
    parts = [
        Part(name, watch.calls[name] / steps, seconds / steps)
        for name, seconds in watch.seconds.items()
        if watch.calls[name]
    ]
    nodes = "auto" if engine.auto is not None else engine.choice.budget
    what = f"{engine.mode}" if engine.mode != "tree" else f"tree, {nodes} nodes"
    return Profile(parts, took, 0.0, f"{what} on {engine.ops.name}, {steps} steps")
