"""Times of a sum across the GPUs of this host by every way there is, each checked before a time
counts. `python bench.py reduce --tp 2`.

A recorded graph runs the sum many times, one after the other, and each rank replays it on numbers
drawn anew. A time is that of one sum, of the slowest rank.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import launchers
import ops
import parallel
from config import UserError
from reference import tree_sum

FOLLOWER = [sys.executable, str(Path(__file__).resolve())]
HIDDEN = 7168
LAUNCHES = 64  # of the sum in one graph
REPLAYS = 9
BFLOAT16_ERROR = 2.0**-8  # of the norm: partials rounded, and their sums
FLOAT32_ERROR = 2.0**-22


@dataclass(frozen=True)
class Way:
    """run: x -> the sum over all ranks; error: norm ratio at most, None where the bits are the
    tree's."""

    name: str
    run: Callable
    error: float | None = None
    dtype: object = np.float32


def ways(peers: parallel.PeerComm, device: ops.CudaOps) -> list[Way]:
    nccl, mail = peers.base, peers.mail
    return [
        Way("NCCL all-reduce fp32", nccl.all_reduce, FLOAT32_ERROR),
        Way("NCCL all-reduce bf16", nccl.all_reduce, BFLOAT16_ERROR, launchers.BFLOAT16),
        Way("NCCL gather + tree", nccl.tree_sum),
        Way("push, one shot", lambda x: device.push_sum(mail, x)),
        Way("push, two shots", lambda x: device.push_sum_slices(mail, x)),
        Way("as chosen", peers.tree_sum),
    ]


def table(size: int, all_rows) -> list[dict]:
    """A row for each T; rank 0's side."""
    launcher = launchers.CudaLauncher(0, size)
    host = parallel.start(size, FOLLOWER)
    host.broadcast(list(all_rows))
    lines = measure(host, launcher, all_rows)
    host.close()
    return lines


def measure(host: parallel.Comm, launcher, all_rows) -> list[dict]:
    """What every rank does."""
    device = ops.CudaOps(launcher=launcher)
    peers = parallel.on_device(host, device)
    if not isinstance(peers, parallel.PeerComm):
        raise UserError("reduce: the GPUs of this host cannot reach each other's memory")
    if host.rank == 0:
        print(f"{host.size} ranks on {launcher.limits.name}; µs of a sum of T x {HIDDEN} fp32\n")
    lines = []
    for rows in all_rows:
        line: dict = {"T": rows}
        right = True
        for way in ways(peers, device):
            try:
                took = time_way(way, host, device, rows)
            except UserError as error:  # too large for this way: on every rank
                print(f"{way.name}, {rows} rows: {error}", file=sys.stderr)
                took = None
            line[way.name] = "-" if took is None else took
            right &= took is None or took == took
        lines.append(line | {"identical": "yes" if right else "NO"})
    return lines


def drawn(host: parallel.Comm, rows: int, turn: int) -> np.ndarray:
    """[ranks, T, hidden]"""
    shape = rows, HIDDEN
    return np.stack(
        [
            np.random.default_rng([turn, rank]).standard_normal(shape, np.float32)
            for rank in range(host.size)
        ]
    )


def time_way(way: Way, host: parallel.Comm, device: ops.CudaOps, rows: int) -> float:
    """µs of the slowest rank; NaN where the result is wrong."""
    launcher, kind = device.launcher, way.dtype
    x = launcher.empty((rows, HIDDEN), kind)
    device.refill(x, drawn(host, rows, 0)[host.rank])
    graph = device.capture(lambda: tuple(way.run(x) for _ in range(LAUNCHES)))
    times, right = [], True
    for turn in range(REPLAYS + 2):  # the first two warm up
        parts = drawn(host, rows, turn)
        device.refill(x, parts[host.rank])
        launcher.synchronize()
        host.barrier()
        times.append(launcher.seconds(graph.replay) / LAUNCHES * 1e6)
        want = tree_sum(parts.astype(kind).astype(np.float32))
        for out in (graph.outputs[0], graph.outputs[-1]):
            right &= matches(way, device.download(out), want)
    found = np.array([[statistics.median(times[2:]) if right else np.nan]])
    return float(host.gather_columns(found).max())


def matches(way: Way, have: np.ndarray, want: np.ndarray) -> bool:
    if way.error is None:
        return have.tobytes() == want.tobytes()
    return bool(np.linalg.norm(have - want) <= way.error * np.linalg.norm(want))


def follow() -> None:
    """A rank that `table` has started."""
    host = parallel.attach(*map(int, sys.argv[-2:]))
    try:
        measure(host, launchers.CudaLauncher(host.rank, host.size), host.broadcast())
        assert host.broadcast() == parallel.End(0)
        host.close()
    except BaseException as error:
        host.fail(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    follow()
