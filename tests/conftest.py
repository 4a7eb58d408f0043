"""The devices that op tests run on, and the report of a run on a GPU.

pytest                    cpu, and emulate where a host compiler is found
pytest -m gpu             the same tests on an NVIDIA GPU; writes tests/gpu_report.json
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import ops
import reference
from config import UserError

ROOT = Path(__file__).resolve().parent.parent
DEVICES = ("cpu", "emulate", pytest.param("cuda", marks=pytest.mark.gpu))
_counts = {"passed": 0, "failed": 0}
_started = time.time()


@cache
def launcher(device: str):
    """The launcher of a device; a string says why there is none."""
    if device == "cuda":
        try:
            return ops.CudaLauncher()
        except UserError as error:
            return str(error)
    from tests.emulator import emulator

    return emulator.missing() or ops.EmulatorLauncher()


@cache
def _operations(device: str, activation: str):
    if device == "cpu":
        return reference.ReferenceOps(activation)
    return ops.CudaOps(activation, launcher=launcher(device), poison=True)


class Device:
    """One backend as the op tests use it: NumPy in, NumPy out."""

    def __init__(self, name: str, activation: str):
        self.name, self.activation = name, activation
        self.ops = _operations(name, activation)

    def send(self, array: np.ndarray, fp32: bool = False):
        """Floats as activations (of values exact in the type) or as fp32; ints as int32."""
        if self.name == "cpu":
            return np.ascontiguousarray(array)
        if array.dtype.kind in "iu":
            return self.ops.index(array)
        kind = np.float32 if fp32 else self.ops.act
        return self.ops.launcher.upload(array.astype(kind))

    def get(self, array) -> np.ndarray:
        return np.asarray(array) if self.name == "cpu" else self.ops.download(array)


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    name = request.param
    if name != "cpu" and isinstance(launcher(name), str):
        pytest.skip(launcher(name))
    return name


@pytest.fixture(params=("float32", "bfloat16"))
def backend(device, request) -> Device:
    return Device(device, request.param)


def pytest_runtest_logreport(report) -> None:
    if report.when == "call" and "gpu" in report.keywords and report.outcome in _counts:
        _counts[report.outcome] += 1


def pytest_sessionfinish(session) -> None:
    """What ran on which card, once anything has run on one."""
    if not sum(_counts.values()):
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
        "tests": dict(_counts),
        "seconds": round(time.time() - _started, 1),
    }
    (ROOT / "tests" / "gpu_report.json").write_text(json.dumps(report, indent=2) + "\n")
