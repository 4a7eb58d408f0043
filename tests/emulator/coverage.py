"""Line coverage of the kernel files over the emulated tests: python -m tests.emulator.coverage

Every kernel is compiled with counters (gcov, so g++ is needed) and pytest runs the tests that have
"emulate" in their name, in this process. Prints a table and the lines that never ran; the exit code
is 1 where a test fails or less than GOAL of the lines ran. Further arguments go to pytest.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import defaultdict

import pytest

import launchers
import ops
from tests.emulator import emulator

GOAL = 0.95


class CountingLauncher(launchers.EmulatorLauncher):
    """Keeps the modules that it compiles, each with counters that begin at zero."""

    modules: dict[str, emulator.Module] = {}

    def __init__(self, checked: bool = False) -> None:
        super().__init__(checked, coverage=not checked)

    def compile(self, source: str, options: tuple[str, ...], name: str) -> emulator.Module:
        module = super().compile(source, options, name)
        if module.checked:
            return module
        if module.key not in self.modules:
            module.forget_lines()
            self.modules[module.key] = module
        return self.modules[module.key]


def lines_of(modules) -> dict[str, dict[int, bool]]:
    """file -> line -> whether any of the modules ran it."""
    found: dict[str, dict[int, bool]] = defaultdict(dict)
    for module in modules:
        for file in ops.FILES:
            for line, ran in module.executed_lines(file).items():
                found[file][line] = found[file].get(line, False) or ran
    return found


def report(found: dict[str, dict[int, bool]]) -> float:
    """Print the table and the lines that never ran; returns the share that did."""
    print("\n| file | lines | ran |\n|---|---|---|")
    for file, lines in found.items():
        print(f"| {file} | {len(lines)} | {sum(lines.values()) / len(lines):.1%} |")
    for file, lines in found.items():
        text = (ops.HERE / file).read_text().splitlines()
        for line in sorted(number for number, ran in lines.items() if not ran):
            print(f"{file}:{line}: {text[line - 1].strip()}")
    every = [ran for lines in found.values() for ran in lines.values()]
    return sum(every) / len(every)


def main(argv: list[str]) -> int:
    reason = emulator.missing() or (None if shutil.which("gcov") else "coverage needs gcov")
    if reason:
        print(f"skipped: {reason}")
        return 0
    launchers.EmulatorLauncher = CountingLauncher
    began = time.perf_counter()
    failed = pytest.main(["-q", "-k", "emulate", "-m", "not gpu", *argv])
    share = report(lines_of(CountingLauncher.modules.values()))
    print(f"{share:.1%} of the lines ran, goal {GOAL:.0%}; {time.perf_counter() - began:.0f} s")
    return int(failed != 0 or share < GOAL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
