"""The devices that op tests run on, and the report of a run on a GPU.

pytest                    cpu, and emulate where a host compiler is found
pytest -m gpu             the same tests on an NVIDIA GPU; writes tests/gpu_report.json
pytest --architectures    device code is also compiled for those that a plain run leaves out
"""

from __future__ import annotations

import gc
import hashlib
import json
import platform
import re
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import launchers
import ops
import reference
from config import UserError

if TYPE_CHECKING:
    from tests.op_cases import Backend

pytest.register_assert_rewrite("tests.op_cases")  # before anybody imports it
ROOT = Path(__file__).resolve().parent.parent
DEVICES = ("cpu", "emulate", pytest.param("cuda", marks=pytest.mark.gpu))
ON_GPU = ("device", "gpu")
_ran: list[tuple[str, str, float]] = []  # node id, outcome, seconds of every test on a GPU
_started = time.time()
LONGEST = (
    "parallel", "rounds", "devices", "kernels_compile", "engine", "golden", "ops", "peers",
    "scheduling", "gemm",
)  # fmt: skip


@cache
def launcher(device: str):
    """The launcher of a device ("checked": the emulator that watches every load and store); a
    string says why there is none."""
    if device == "cuda":
        try:
            return launchers.CudaLauncher()
        except UserError as error:
            return str(error)
    from tests.emulator import emulator

    return emulator.missing() or launchers.EmulatorLauncher(checked=device == "checked")


@cache
def _operations(device: str, activation: str):
    if device == "cpu":
        return reference.ReferenceOps(activation)
    return ops.CudaOps(activation, launcher=launcher(device), poison=True)


def backend_of(device: str, activation: str) -> Backend:
    from tests.op_cases import Backend

    return Backend(_operations(device, activation))


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    name = request.param
    if name != "cpu" and isinstance(launcher(name), str):
        pytest.skip(launcher(name))  # its text: no GPU or driver, or no host compiler
    return name


@pytest.fixture(params=("float32", "bfloat16"))
def backend(device, request) -> Backend:
    return backend_of(device, request.param)


def pytest_addoption(parser) -> None:
    parser.addoption("--architectures", action="store_true", help="compile for every architecture")


def pytest_configure(config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist: files begin in the order collected


def pytest_collection_modifyitems(items) -> None:
    """The files that take longest begin first: two processes then end together."""
    rank = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    for item in items:
        if item.get_closest_marker("gpu"):  # a report's keywords have directories' names, too
            item.user_properties.append(ON_GPU)


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported and collected stays: no need to look at it again and again
    gc.set_threshold(10_000, 5, 5)


def pytest_runtest_logreport(report) -> None:
    ran = report.when == "call" and report.outcome != "skipped"
    if ran and ON_GPU in map(tuple, report.user_properties):  # xdist sends lists
        _ran.append((report.nodeid, report.outcome, report.duration))


def _summed(key) -> dict[str, dict[str, float]]:
    """What ran, by key(node id); a key of None is left out."""
    found: dict[str, dict[str, float]] = {}
    for node, outcome, seconds in _ran:
        if (name := key(node)) is not None:
            row = found.setdefault(name, {"passed": 0, "failed": 0, "seconds": 0.0})
            row[outcome] += 1
            row["seconds"] = round(row["seconds"] + seconds, 3)
    return dict(sorted(found.items()))


def _operation_of(node: str) -> str | None:
    """Of an op test, the case that it ran."""
    from tests import op_cases

    cases = op_cases.SUMS + op_cases.ROUTER + op_cases.DECODING
    names = {case.__name__.rstrip("_") for case, _ in cases}
    return next((part for part in re.split(r"[\[\]-]", node) if part in names), None)


def pytest_sessionfinish(session) -> None:
    """What ran on which card, once anything has run on one."""
    if not _ran:
        return
    import cupy

    limits = launcher("cuda").limits
    sources = {
        file: hashlib.sha256((ROOT / file).read_bytes()).hexdigest()
        for file in ops.FILES
        if (ROOT / file).exists()
    }
    report = {
        "sources": sources,
        "card": limits.name,
        "architecture": limits.architecture,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cupy": cupy.__version__,
            "cuda": cupy.cuda.runtime.runtimeGetVersion(),
            "nvrtc": list(cupy.cuda.nvrtc.getVersion()),
        },
        "tests": {o: sum(r[1] == o for r in _ran) for o in ("passed", "failed")},
        "files": _summed(lambda node: node.partition("::")[0]),
        "operations": _summed(_operation_of),
        "seconds": round(time.time() - _started, 1),
    }
    (ROOT / "tests" / "gpu_report.json").write_text(json.dumps(report, indent=2) + "\n")
