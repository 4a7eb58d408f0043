"""bench.py ops on emulated kernels at tiny shapes: a time only for what was checked."""

from __future__ import annotations

import numpy as np
import pytest

import bench
import bench_kernels
import launchers
import ops
from config import UserError
from tests.conftest import launcher


@pytest.fixture
def small(monkeypatch) -> launchers.EmulatorLauncher:
    """K2.6's cases a hundred times smaller, three launches a graph."""
    host = launcher("emulate")
    if isinstance(host, str):
        pytest.skip(host)  # its text says what the emulator lacks, a compiler or headers
    for name, value in dict(
        HIDDEN=128, WIDTH=64, EXPERTS=16, TOP_K=4, LAUNCHES=3, REPLAYS=2, COLD_BYTES=1000,
        HEADS=2, Q_LORA=64, LATENT=32, ROPE=8, NOPE=32, VALUE=32, MOST_ROWS=16,
    ).items():  # fmt: skip
        monkeypatch.setattr(bench_kernels, name, value)
    cases = (
        bench_kernels.experts_case({9: 1.0}),
        bench_kernels.linear_case("o_proj", 70, 256, 8, {}),
        bench_kernels.mlp_case("shared expert", 64, {}),
        bench_kernels.router_case({}),
        bench_kernels.mixture_case({}),
        bench_kernels.attention_case(100, {}, heads=2, latent=32, width=48),
        bench_kernels.attention_case(200, {}, heads=2, latent=32, width=48, span=2),
        bench_kernels.layer_case({}),
    )
    monkeypatch.setattr(bench_kernels, "CASES", cases)
    monkeypatch.setattr(bench_kernels, "read_rate", lambda kernels: 100.0)
    return host


def test_every_operation_is_checked_and_timed(small) -> None:
    rows = bench_kernels.table(bench_kernels.CASES, [1, 9], False, small)
    assert [(r["op"], r["T"]) for r in rows] == [
        (c.name, t) for c in bench_kernels.CASES for t in (1, 9)
    ]
    for row in rows:
        assert row["identical"] == "yes" and row["µs"] > 0 and row["floor"] > 0
    assert rows[1]["goal"] == pytest.approx(45.55) and rows[0]["goal"] == "-"
    assert bench.table(rows).count("\n") == 17


def test_no_time_for_a_wrong_result(small, monkeypatch) -> None:
    """One wrong bit in one row alone, or a large error: no speed, and the exit code says so."""
    kernels = ops.CudaOps.linear

    def wrong(self, x, weight, **how):
        y = kernels(self, x, weight, **how)
        if self.act == launchers.BFLOAT16 and len(x) == 1:
            y.reshape(-1).view(np.int32)[0] ^= 1
        return y

    monkeypatch.setattr(ops.CudaOps, "linear", wrong)
    [row] = bench_kernels.table(bench_kernels.named(["o_proj"], [], 4), [9], False, small)
    assert (row["µs"], row["alone"], row["identical"]) == ("-", "0/8", "NO")
    monkeypatch.setattr(ops.CudaOps, "linear", lambda *a: kernels(*a) * (1 + (a[0].poison)))
    [row] = bench_kernels.table(bench_kernels.named(["o_proj"], [], 4), [9], False, small)
    assert (row["µs"], row["identical"]) == ("-", "NO")
    for checked in (bench_kernels.Checked(1.0, 8, 8), bench_kernels.Checked(0.0, 0, 0)):
        with pytest.raises(UserError, match="not checked, so not timed"):
            bench_kernels.time_case(bench_kernels.CASES[1], [], None, 9, 1, 16, checked)


def test_the_plain_read_reads_everything(small) -> None:
    """Every 16 bytes once, whatever the size: unwritten ones would show as out of bounds."""
    kernels = ops.CudaOps("bfloat16", launcher=launchers.EmulatorLauncher(checked=True))
    for n in (8, 4096, 40_000):
        kernels.read(bench_kernels.random(kernels, 1, 1, n))


def test_bytes_alone_need_no_gpu(capsys) -> None:
    """14.7 MB of o_proj at 1.79 TB/s."""
    assert bench.main(["ops", "--expect", "--op", "o_proj", "--rows", "1"]) == 0
    assert "| o_proj | 1 | 14.71 | 8.22 |" in capsys.readouterr().out
    assert bench.main(["ops", "--expect", "--op", "none"]) == 2
