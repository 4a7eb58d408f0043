"""Edit, save, know: compile what was saved, check it against its twins, run a prompt, time it.

The weights stay on the device. `Watch.begin` checks all sections once; `Watch.look`, called over
and over, checks the changed ones when a kernel file was saved.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass

import numpy as np

import ops as kernels
from config import DeviceFault, UserError
from engine import Engine
from ops import CudaOps, Launch, that_ran
from request import Result
from sampling import SamplingParams

TOKENS = {"cuda": 24, "emulate": 6}  # of the golden prompt, where none are asked for
TWIN_BYTES = 2 << 30  # a model of at most this size is run by the NumPy twins too
TIMED_SECONDS = 0.004  # a timing lasts at least so long, and the best of a few counts
TURNS = {"cuda": 5, "emulate": 2}


@dataclass(frozen=True)
class Timing:
    """One kernel's launches in one step together. bytes: every array once, of experts and of cache
    pages only what is in use."""

    launches: int
    seconds: float
    bytes: int

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.bytes / self.seconds / 1e9


@dataclass(frozen=True)
class Golden:
    """Plain decoding of the prompt, and the launches of the last step that was not a replay."""

    result: Result
    launches: list[Launch]


class Watch:
    """Checks the kernels of a loaded engine. Everything it learns is printed, a line each.

    prompt  text or token ids;  tokens  how many to decode (None: a few)
    """

    def __init__(self, engine: Engine, prompt: str | list[int], tokens: int | None = None):
        if not isinstance(engine.ops, CudaOps):
            raise UserError(
                "--watch, --check: the CPU has no kernels; use --device cuda, or --device emulate "
                "to run them as host code"
            )
        if engine.ops.comm is not None:
            raise UserError("--watch, --check: kernels are checked on one rank; use --tp 1")
        self.engine, self.ops, self.prompt = engine, engine.ops, prompt
        self.tokens = tokens or TOKENS[self.ops.name]
        self.params = SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        # Tensor cores take bfloat16; kernels that this model does not use are edited, too.
        made = dict.fromkeys((self.ops.activation, "float32", "bfloat16"))
        self.checkers = {
            activation: CudaOps(
                activation, launcher=self.ops.launcher, poison=True, directory=self.ops.directory
            )
            for activation in made
        }
        self.sections: dict[tuple[str, str], set[str]] = {}  # whose kernels a case launches
        here = self.ops.directory
        self.files = [here / file for file in kernels.FILES if (here / file).exists()]
        self.stamps = self.stamp()
        self.golden: Golden | None = None

    # -- what happens when

    def begin(self) -> bool:
        """Check all kernels, whatever was saved; whether all is right."""
        right = self.check_cases(None) and self.check_golden()
        unit = "emulated ms" if self.emulated else "µs"
        print(f"| one step on {self.ops.launcher.limits.name} | launches | {unit} | GB/s |")
        print("|---|---|---|---|")
        for kernel, t in self.measure(self.golden.launches if self.golden else []).items():
            print(f"| {kernel} | {t.launches} | {self.shown(t)} | {t.rate:.1f} |")
        if left := ", ".join(sorted(set(self.ops.sections) - self.used())):
            print(f"no check runs: {left}")
        print("all right" if right else "DIFFERENT", flush=True)
        return right

    def used(self) -> set[str]:
        """Sections that op tests or the golden prompt have compiled, and what all begin with."""
        every = (self.ops, *self.checkers.values())
        return {"prelude"}.union(*(made.compiled() for made in every))

    def look(self) -> bool | None:
        """None where nothing was saved; else whether all is right after the edit."""
        stamps = self.stamp()
        if stamps is None or stamps == self.stamps:
            return None
        saved = max(s[0] for file, s in stamps.items() if self.stamps.get(file) != s) / 1e9
        self.stamps = stamps
        try:  # the engine last: its kernels stay where any does not compile
            changed = {name for made in self.checkers.values() for name in made.reload()}
            changed |= set(self.ops.reload())
        except UserError as error:
            print(f"{error}\nthe old kernels stay", flush=True)
            return False
        if not changed:
            return None
        if self.engine.rounds is not None:
            self.engine.rounds.graphs.clear()  # they hold the old kernels
        if left := changed - self.used():
            print(f"NOT CHECKED, no op test and no step uses it: {', '.join(sorted(left))}")
        if not (changed := changed - left):
            return False
        names, running = ", ".join(sorted(changed)), time.time() - saved
        print(f"{names}: compiled, running {running:.2f} s after the save", flush=True)
        try:
            right = self.check_edit(changed)
        except UserError as error:  # a variant that only the op tests use
            print(error, flush=True)
            right = False
        except DeviceFault as error:
            if not self.emulated:  # nothing survives on a GPU
                raise
            print(error, flush=True)
            right = False
        took = time.time() - saved
        print(f"{'all right' if right else 'DIFFERENT'}, {took:.2f} s after the save", flush=True)
        return right

    def check_edit(self, changed: set[str]) -> bool:
        """Op tests, golden prompt and timing of the changed sections."""
        launches = self.golden.launches if self.golden else []
        right = self.check_cases(changed) and self.check_golden()
        for kernel, (was, now) in self.compare(launches, changed).items():
            print(
                f"{kernel}, {now.launches} launches: {self.shown(was)} -> {self.shown(now)} "
                f"{'emulated ms' if self.emulated else 'µs'}, {was.rate:.1f} -> {now.rate:.1f} GB/s"
            )
        return right

    @property
    def emulated(self) -> bool:
        return self.ops.name == "emulate"

    def shown(self, timing: Timing) -> str:
        return f"{timing.seconds * 1e3:.2f}" if self.emulated else f"{timing.seconds * 1e6:.1f}"

    def stamp(self) -> dict[str, tuple[int, int]] | None:
        """Time of change and size of the kernel files; None while an editor replaces one."""
        try:
            stats = {path.name: path.stat() for path in self.files}
        except FileNotFoundError:
            return None
        return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in stats.items()}

    # -- the op tests

    def check_cases(self, changed: set[str] | None) -> bool:
        """Run the cases that use a changed section (None: all); whether all agree."""
        from tests import op_cases  # the tests' own cases

        total, failed = 0, 0
        every = [(op_cases.check_sum, a, *c) for a in self.checkers for c in op_cases.SUMS]
        every += [  # choice and trees are fp32
            (op_cases.check_exact, "float32", *c) for c in op_cases.ROUTER + op_cases.DECODING
        ]
        for check, activation, case, shape in every:
            name, checker = op_cases.name_of(case, shape), self.checkers[activation]
            key = name, activation
            if changed is not None and not changed & self.sections.get(key, changed):
                continue
            total += 1
            used = self.sections[key] = set()
            checker.listener = lambda launch, used=used: used.add(launch.section)
            try:
                check(op_cases.Backend(checker), case, shape)
            except AssertionError as error:
                failed += 1
                line = traceback.extract_tb(error.__traceback__)[-1].line
                print(f"  {name}, {activation}: {error or line}")
            except DeviceFault:
                print(f"  {name}, {activation}:", flush=True)
                raise
        print(f"{total - failed} of {total} op tests agree with their twins", flush=True)
        return not failed

    # -- the golden prompt

    def check_golden(self) -> bool:
        """Decode the prompt by every mode; compare them with plain decoding, and that with the run
        before, or at first with the NumPy twins."""
        budget, modes = self.engine.settings.draft.budget, ("ar", "chain", "tree")
        if self.engine.drafter is None:
            modes = modes[:1]
        elif self.emulated:
            modes = ("ar", "tree")
        runs = {mode: self.decode(mode, budget) for mode in modes}
        plain, right = runs["ar"].result, True
        for mode in modes[1:]:
            right &= self.report(f"{mode} against ar", runs[mode].result, plain, bits=True)
        if self.golden is not None:
            right &= self.report("against the run before", plain, self.golden.result, bits=False)
        elif sum(p.bytes for p in (self.engine.plan, self.engine.draft_plan) if p) <= TWIN_BYTES:
            right &= self.report("against the NumPy twins", plain, self.twin(), bits=False)
        if right or self.golden is None:
            self.golden = Golden(plain, runs[modes[-1]].launches)
        return right

    def decode(self, mode: str, budget: int) -> Golden:
        engine = self.engine
        engine.use(mode, budget)
        sequence = engine.submit(self.prompt, self.params, keep_logits=True)
        step, launches = [], []
        engine.ops.listener = step.append
        try:
            while sequence.finish_reason is None:
                engine.advance(sequence)
                launches, step[:] = list(step) or launches, []
        finally:
            engine.ops.listener = None
            engine.cancel(sequence)  # where a kernel has failed
        result = sequence.result()
        if result.error:
            raise UserError(f"golden prompt: {result.error}")
        return Golden(result, that_ran(launches))

    def twin(self) -> Result:
        """The same prompt by the reference operations."""
        engine = Engine(self.engine.settings, "cpu")
        engine.use("ar", 1)
        [result] = engine.generate([self.prompt], self.params, keep_logits=True)
        return result

    def report(self, what: str, have: Result, want: Result, bits: bool) -> bool:
        """One line: whether ids and logit bits agree. Other ids are a difference, but for bfloat16
        against another order of its sums; other bits only where `bits` promises them."""
        n = len(want.token_ids)
        pairs = zip(have.token_ids, want.token_ids, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), n)
        differ = have.logits[:same].view(np.int32) != want.logits[:same].view(np.int32)
        words = [f"{n} ids equal" if same == n else f"ids part after {same} of {n}"]
        if differ.any():
            error = np.abs(have.logits[:same] - want.logits[:same]).max()
            words.append(f"logits differ by up to {error:.2g}")
        else:
            words.append("bits equal")
        print(f"golden prompt, {what}: {', '.join(words)}", flush=True)
        rounds = self.ops.activation == "bfloat16" and not bits
        return (same == n or rounds) and not (bits and differ.any())

    # -- timing

    def measure(self, launches: list[Launch]) -> dict[str, Timing]:
        """Every kernel of a step, as it is now."""
        return {
            kernel: Timing(len(mine), self.seconds([self.run_of(mine)])[0], self.bytes(mine))
            for kernel, mine in by_kernel(launches).items()
        }

    def compare(self, launches, changed: set[str]) -> dict[str, tuple[Timing, Timing]]:
        """Kernels of the changed sections: as they ran in `launches`, and as they are now, timed in
        turns on the same arguments."""
        out = {}
        for kernel, mine in by_kernel(launches).items():
            if mine[0].section in changed:
                was, now = self.seconds([self.run_of(mine, old=True), self.run_of(mine)])
                n, size = len(mine), self.bytes(mine)
                out[kernel] = Timing(n, was, size), Timing(n, now, size)
        return out

    def run_of(self, launches: list[Launch], old: bool = False):
        """A function that starts the launches again: one graph on a GPU."""

        def run() -> tuple:
            for launch in launches:
                self.ops.relaunch(launch, launch.function if old else None)
            return ()

        return self.ops.capture(run).replay

    def seconds(self, runs) -> list[float]:
        """The device's time for each of the runs: the best of some turns of about TIMED_SECONDS."""
        launcher = self.ops.launcher
        best = [launcher.seconds(run) for run in runs]
        times = [max(1, int(TIMED_SECONDS / max(t, 1e-6))) for t in best]
        for _ in range(TURNS[self.ops.name]):
            for i, run in enumerate(runs):
                took = launcher.seconds(lambda run=run, n=times[i]: [run() for _ in range(n)])
                best[i] = min(best[i], took / times[i])
        return best

    def bytes(self, launches: list[Launch]) -> int:
        """What the launches have to move at least; see Timing."""
        return sum(
            int(array.nbytes * self.share(array)) for launch in launches for array in arrays(launch)
        )

    def share(self, array) -> float:
        """The part of an array that a step reads: of stacked experts those that its rows choose at
        most, of the embedding one of each row, of cache pages those of the prompt."""
        engine, address = self.engine, self.ops.launcher.address(array)
        cache, experts = engine.cache, engine.dims.n_routed_experts
        rows = 1 if engine.drafter is None else engine.settings.draft.most
        if address == self.ops.launcher.address(engine.model.embedding):
            return min(1.0, rows / len(array))
        for pages in (cache.pages, cache.draft):
            if pages is not None:
                begin = self.ops.launcher.address(pages)
                if begin <= address < begin + pages.nbytes:
                    used = cache.pages_for(self.golden.result.prompt_tokens + self.tokens)
                    return min(1.0, used / engine.n_pages)
        if array.ndim == 3 and array.shape[0] == experts and len(array) > 1:
            return min(1.0, rows * engine.dims.num_experts_per_tok / experts)
        return 1.0


def by_kernel(launches: list[Launch]) -> dict[str, list[Launch]]:
    found: dict[str, list[Launch]] = {}
    for launch in launches:
        found.setdefault(launch.kernel, []).append(launch)
    return found


def arrays(launch: Launch) -> list:
    """The arrays among the arguments, each once."""
    return list({id(a): a for a in launch.args if hasattr(a, "nbytes") and a.ndim}.values())
