"""Ranks for tests, with a fault put in first.

ranks.py lead FAULT ARGUMENTS…      rank 0: the command line, which starts the others by this script
ranks.py follow FAULT RANK SIZE     one of the others
ranks.py launched FAULT ARGUMENTS…  any rank, started by a launcher: the command line
ranks.py collectives [cuda]         any rank, started by a launcher: every collective against NumPy
ranks.py peers RANK SIZE            a rank other than 0 of test_peers.py: sums in peer memory
ranks.py reduce RANK SIZE           the same: a small bench.py reduce
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402

import bench_reduce  # noqa: E402
import engine  # noqa: E402
import launchers  # noqa: E402
import ops  # noqa: E402
import parallel  # noqa: E402
from engine import Engine  # noqa: E402

TURNS = 60  # sums in peer memory
WRONG = False  # of rank 0: whether `reduce` has a way that is wrong
STEP = 3  # of a fault: rank 1's third


def at_step(method: str, number: int, act) -> None:
    """Do `act` instead of the engine's call of this number."""
    plain, calls = getattr(Engine, method), []

    def patched(self, *arguments, **named):
        calls.append(0)
        if len(calls) == number:
            act()
        return plain(self, *arguments, **named)

    setattr(Engine, method, patched)


def fail() -> None:
    raise ValueError("the first mistake")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait() -> None:
    time.sleep(600)


class StandIn:
    """A drafter that says nothing, for the ranks beside a scripted one: rank 0 decides."""

    dims = SimpleNamespace(block_size=8)

    def __init__(self, vocab_size: int):
        self.shape = (self.dims.block_size - 1, vocab_size)

    def extend(self, taps, placed, cache) -> None:
        pass

    def draft(self, roots, slots, cache) -> np.ndarray:
        return np.zeros((len(roots), *self.shape), np.float32)


def stand_in() -> None:
    """Engines that have no drafter get one; see toy.plug."""
    load = Engine.load

    def patched(self, *arguments, **named):
        load(self, *arguments, **named)
        if self.drafter is None:
            self.drafter = StandIn(self.dims.vocab_size)
            self.model.taps = (0,)

    Engine.load = patched


def disturbed(log: str) -> None:
    """Other drafts than rank 0's; the trees and tokens of each request go to the file `log`."""
    load, retire = Engine.load, Engine.retire

    def patched(self, *arguments, **named):
        load(self, *arguments, **named)
        draft = self.drafter.draft

        def wrong(*arguments):
            logits = draft(*arguments)
            return logits + np.random.default_rng(1).normal(0, 3, logits.shape).astype(np.float32)

        self.drafter.draft = wrong

    def logged(self, sequence):
        retire(self, sequence)
        Path(log).write_bytes(pickle.dumps((sequence.emitted, sequence.rounds)))

    Engine.load, Engine.retire = patched, logged


def inject(fault: str, rank: int) -> None:
    """Put the fault in, where it is this rank's. What follows an @ marks the run, or is a file."""
    fault, _, mark = fault.partition("@")
    parallel.GRACE_S = 2.0  # rank 0 may be in a kernel, or loading, and notice nothing by itself
    if fault == "stand-in":
        stand_in()
        if mark == "nccl":
            parallel.with_peers = lambda host, base, ops: base
    elif rank == 1 and fault == "disturbed":
        disturbed(mark)
    elif rank == 1 and fault == "raise":
        at_step("step", STEP, fail)
    elif rank == 1 and fault == "die":
        at_step("step", STEP, die)
    elif rank == 1 and fault in ("load-raise", "load-die"):
        at_step("load", 1, fail if fault == "load-raise" else die)
    elif fault == "stall":
        parallel.PATIENCE_S = 5.0
        if rank == 1:
            at_step("step", STEP, wait)
    elif rank == 0 and fault == "load-die":
        at_step("weights", 1, wait)  # rank 0 is long at its own share, and waits for nobody
    elif rank == 0 and fault == "lead-raise":
        at_step("accept", STEP, fail)
    elif rank == 0 and fault == "lead-die":
        at_step("accept", STEP, die)


class Together(launchers.EmulatorLauncher):
    """All blocks of a grid at once, as on a device, and some of them."""

    def __init__(self, blocks: int):
        super().__init__()
        self.limits = dataclasses.replace(self.limits, processors=blocks)

    def launch(self, function, grid, block, args, shared_bytes: int, dependent=False) -> None:
        function(grid, block, args, shared_bytes, cooperative=True)


def peer_sums(host: parallel.Comm) -> None:
    """Sums of both kinds and many sizes through shared memory, on emulated devices; ranks come late
    by turns, and the numbers of the turns wrap on the way."""
    device = ops.CudaOps(launcher=Together(3), poison=True)
    comm = parallel.on_device(host, device)
    assert isinstance(comm, parallel.PeerComm)
    sums, short = comm.sums, comm.mail.short
    device.refill(comm.mail.turns, np.array([[2**32 - 4, 0]] * 2, np.uint32))
    host.barrier()
    sizes = (1, 2, 7, 1000, 3001, short, short + 32, short + 96 * host.size)
    drawn, late = np.random.default_rng(1), np.random.default_rng(host.rank)
    for turn in range(TURNS):
        shape = (1, int(drawn.choice(sizes)))
        parts = [
            np.random.default_rng([turn, r]).standard_normal(shape, dtype=np.float32)
            for r in range(host.size)
        ]
        if not late.integers(4):
            time.sleep(late.random() / 50)
        got = comm.tree_sum(parts[host.rank])
        assert got.tobytes() == tree(parts).tobytes(), (turn, shape)
    assert comm.sums == sums + TURNS
    ragged = np.ones((1, short + 33), np.float32)  # cannot be cut: another way
    assert (comm.tree_sum(ragged) == host.size).all() and comm.sums == sums + TURNS
    assert comm.tree_sum(ragged[:0]).shape == (0, short + 33)
    assert comm.broadcast(host.rank) == 0


def reduce(host: parallel.Comm) -> list[dict]:
    """bench.py reduce on emulated devices: ways that are right, nearly right and wrong."""
    bench_reduce.HIDDEN, bench_reduce.LAUNCHES, bench_reduce.REPLAYS = 64, 2, 1

    def ways(peers, device) -> list:
        def two_shots(x):
            return device.push_sum_slices(peers.mail, x)

        made = [bench_reduce.Way("chosen", peers.tree_sum)]
        made += [bench_reduce.Way("two shots", two_shots)]
        made += [bench_reduce.Way("near", lambda x: peers.tree_sum(x) * np.float32(1.001), 0.01)]
        if host.broadcast(WRONG):
            made += [bench_reduce.Way("wrong", lambda x: peers.tree_sum(x) * np.float32(1.001))]
        return made

    bench_reduce.ways = ways
    return bench_reduce.measure(host, Together(2), (1, 3))


def collectives(device: str = "cpu") -> None:
    host = comm = parallel.join()
    if device == "cuda":
        import cupy

        device = ops.CudaOps(launcher=launchers.CudaLauncher(host.local_rank))
        comm = parallel.on_device(host, device)
        assert isinstance(comm, parallel.PeerComm)
        for way in (comm, comm.base):
            check(way, cupy.asarray)
            replay(way, device, cupy)
    else:
        check(comm)
    comm.barrier()
    if comm.rank == 0:
        comm.close()
    else:
        assert comm.broadcast() == parallel.End(0)


def replay(comm: parallel.Comm, device, cupy) -> None:
    """100 replays of recorded collectives, each on other numbers."""
    for shape in ((1, 7168), (16, 7168), (64, 7168)):  # one shot, two shots
        x = cupy.zeros(shape, np.float32)
        recorded = device.capture(
            lambda x=x: (comm.tree_sum(x), comm.gather_columns(x), comm.share(x))
        )
        for turn in range(100):
            parts = [
                np.random.default_rng([turn, r]).standard_normal(shape, dtype=np.float32)
                for r in range(comm.size)
            ]
            x.set(parts[comm.rank])
            recorded.replay()
            summed, gathered, shared = (out.get() for out in recorded.outputs)
            assert summed.tobytes() == tree(parts).tobytes()
            assert gathered.tobytes() == np.concatenate(parts, 1).tobytes()
            assert shared.tobytes() == parts[0].tobytes()


def tree(parts: list[np.ndarray]) -> np.ndarray:
    """The sum in the declared order."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


def check(comm: parallel.Comm, put=np.asarray) -> None:
    """Sums of the declared order, columns, and rank 0's word; small and large, even and ragged.
    put: to where the arrays of these ranks live."""

    def got(array) -> bytes:
        return (array.get() if hasattr(array, "get") else array).tobytes()

    for shape in ((0, 5), (1, 1), (3, 7), (8, 384), (64, 4096), (65, 1031)):
        parts = [
            np.random.default_rng(r).standard_normal(shape, dtype=np.float32)
            * np.float32(10.0 ** np.random.default_rng(9 + r).integers(-4, 4))
            for r in range(comm.size)
        ]
        mine = put(parts[comm.rank])
        assert comm.tree_sum(mine).shape == shape
        assert got(comm.tree_sum(mine)) == tree(parts).tobytes()
        assert got(comm.gather_columns(mine)) == np.concatenate(parts, 1).tobytes()
        assert got(comm.share(mine)) == parts[0].tobytes()
    assert comm.broadcast({"rank": comm.rank}) == {"rank": 0}


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "collectives":
        sys.exit(collectives(*rest))
    if role in ("peers", "reduce"):
        comm = parallel.attach(*map(int, rest))
        peer_sums(comm) if role == "peers" else reduce(comm)
        assert comm.broadcast() == parallel.End(0)
        sys.exit(comm.close())
    fault, *rest = rest
    engine.FOLLOWER = [sys.executable, __file__, "follow", fault]
    if role == "lead":
        inject(fault, 0)
        sys.exit(engine.main(rest))
    if role == "launched":
        inject(fault, parallel.seat(os.environ).rank)
        sys.exit(engine.main(rest))
    inject(fault, int(rest[0]))
    sys.exit(engine.started())
