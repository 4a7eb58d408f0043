"""Sums in peer memory: the bits of the tree over real processes, with kernels as host code and
shared memory in place of GPUs; what happens where a rank does not come, or memory is not shared."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ranks
import toy
from conftest import launcher
from test_parallel import SCRIPT, Run, gpus, living, run_ranks

import launchers
import ops
import parallel
from config import DeviceFault, UserError
from tests import op_cases


@pytest.fixture
def device() -> str:
    if isinstance(launcher("emulate"), str):
        pytest.skip(launcher("emulate"))  # its text says what the emulator lacks
    return "emulate"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_emulated_sums_over_processes(device, size):
    comm = parallel.start(size, [sys.executable, SCRIPT, "peers"])
    ranks.peer_sums(comm)
    comm.close()
    assert [process.returncode for process in comm._processes] == [0] * (size - 1)


@pytest.mark.parametrize("two_shots", [False, True])
def test_emulated_rank_that_does_not_come(device, two_shots):
    """The kernel gives up by the clock, and the fault says who is missing."""
    emulated = ops.CudaOps(launcher=launchers.EmulatorLauncher())
    memories = [emulated.share_mailbox(4)[0] for _ in range(4)]
    addresses = [emulated.launcher.address(memory) for memory in memories]
    mail = emulated.mailbox(1, addresses, 1, 0.2)
    push, began = (emulated.push_sum_slices if two_shots else emulated.push_sum), time.monotonic()
    with pytest.raises(DeviceFault, match="rank (0, 2, 3|[023]) did not come to a sum within 0.2"):
        push(mail, np.ones(64, np.float32))
    assert 0.2 <= time.monotonic() - began < 5


def test_emulated_line_that_is_half_there(device):
    """Each half of a line has the turn's number beside it, and both are waited for."""
    emulated = ops.CudaOps(launcher=launchers.EmulatorLauncher())
    memories = [emulated.share_mailbox(4)[0] for _ in range(4)]
    addresses = [emulated.launcher.address(memory) for memory in memories]
    mail = emulated.mailbox(1, addresses, 1, 0.2)
    given, _ = op_cases.one_shot(mail, np.ones((4, 6), np.float32), 1)
    given[-1][1][-1] = 0  # the last half of the last line of rank 3
    for at, values in given:
        emulated.launcher.write(addresses[1] + at, values)
    with pytest.raises(DeviceFault, match="rank 3 did not come to a sum within 0.2 s"):
        emulated.push_sum(mail, np.ones(6, np.float32))


@pytest.mark.parametrize("wrong", [False, True])
def test_emulated_bench_of_sums(device, monkeypatch, wrong):
    monkeypatch.setattr(ranks, "WRONG", wrong)
    comm = parallel.start(2, [sys.executable, SCRIPT, "reduce"])
    lines = ranks.reduce(comm)
    comm.close()
    assert [line["T"] for line in lines] == [1, 3]
    for line in lines:
        assert min(line["chosen"], line["two shots"], line["near"]) > 0
        assert line["identical"] == ("NO" if wrong else "yes")


def test_sums_that_peer_memory_does_not_take(device):
    emulated = ops.CudaOps(launcher=launchers.EmulatorLauncher())
    memory = emulated.share_mailbox(2)[0]
    mail = emulated.mailbox(0, [emulated.launcher.address(memory)] * 2, 1, 1.0)
    most = ops.MOST_IN_TWO_SHOTS
    for n, expected in ((0, None), (1, "push_sum"), (mail.short, "push_sum"), (most + 8, None),
                        (most, "push_sum_slices"), (mail.short + 4, None)):  # fmt: skip
        chosen = emulated.push_for(mail, np.empty(n, np.float32))
        assert getattr(chosen, "__name__", None) == expected, n
    with pytest.raises(UserError, match="expected at most"):
        emulated.push_sum(mail, np.empty(ops.MOST_IN_ONE_SHOT + 1, np.float32))
    with pytest.raises(UserError, match="expected a multiple of 8"):
        emulated.push_sum_slices(mail, np.empty(12, np.float32))


# ---- ranks that cannot share memory ------------------------------------------------------------


class Peers:
    """Operations of ranks that are threads of this process, with sums by sockets; `fault` is what
    rank 1 does not do."""

    def __init__(self, host: parallel.Comm, fault: str):
        self.host, self.fault = host, fault if host.rank == 1 else ""
        self.launcher = SimpleNamespace(
            limits=SimpleNamespace(processors=1),
            address=lambda array: array.ctypes.data,
            map=self.map,
            write=self.write,
            download=np.copy,
            upload=np.copy,
            synchronize=lambda: None,
        )

    def share_mailbox(self, size: int):
        if self.fault == "share":
            raise RuntimeError("cudaErrorNotSupported: operation not supported")
        memory = np.zeros(8 * size, np.uint8)
        return memory, memory.ctypes.data

    def map(self, handle: int) -> int:
        if self.fault == "map":
            raise RuntimeError("cudaErrorPeerAccessUnsupported")
        return handle

    def write(self, address: int, data: np.ndarray) -> None:
        if self.fault != "write":
            launchers.EmulatorLauncher.write(None, address, data)

    def mailbox(self, rank, addresses, blocks, patience):
        return SimpleNamespace(short=1024)

    def push_for(self, mail, x):
        return lambda mail, x: self.host.tree_sum(x) + (self.fault == "bits")

    def download(self, x):
        return x


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("", None),
        ("share", "rank 1: cudaErrorNotSupported: operation not supported"),
        ("map", "rank 1: cudaErrorPeerAccessUnsupported"),
        ("write", r"rank 0: found \[0, 0\] in its memory, expected \[0, 2\]"),
        ("bits", "rank 1: a sum in peer memory has other bits"),
        ("host", "the ranks are not of one host"),
    ],
)
def test_where_memory_cannot_be_shared(caplog, monkeypatch, fault, why):
    """One line says it, and all ranks go the other way."""
    if fault == "host":
        names = iter("ab")
        monkeypatch.setattr(parallel, "_this_host", lambda: next(names))
    made = []

    def comm_of(host):
        comm = parallel.with_peers(host, host, Peers(host, fault))
        made.append(type(comm))
        return comm

    with caplog.at_level(logging.WARNING, "kdtree"):
        run_ranks(2, comm_of, ranks.check)
    assert made == [parallel.SocketComm if why else parallel.PeerComm] * 2
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (why is not None)
    assert not why or re.match(f"sums do not go through peer memory: {why}", lines[0])


def test_a_sum_too_few_is_noticed():
    def uneven(comm) -> None:
        if comm.rank:
            comm.sums += 1
            with pytest.raises(parallel.RankFailed, match="made 2 sums in peer memory, rank 1 3"):
                comm.broadcast()
        else:
            comm.broadcast("hello")

    run_ranks(2, lambda host: parallel.with_peers(host, host, Peers(host, "")), uneven)


# ---- one death ends all, in the middle of a kernel ----------------------------------------------

SAID = {
    "raise": "error: rank 1: Traceback.*ValueError: the first mistake",
    "die": "error: rank 1: was killed by SIGKILL",
    "stall": "error: rank 1 did not come to a sum within 5 s",  # alive: the kernels' own clock
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The command line at TP 2 with every fault; emulated ones all at the same time."""
    directory = toy.write_checkpoint(tmp_path_factory.mktemp("peers"), drafter={})
    asked = ["--prompt", "hello", "--max-tokens", "9", "--ignore-eos", "--tp", "2"]
    asked += ["--config", "golden.yaml", "--model", str(directory)]
    started = {}

    def run(where: str, fault: str) -> Run:
        if (where, fault) not in started:
            for other in SAID if where == "emulate" else [fault]:
                mark = f"{other}@{directory}/{where}"
                command = [sys.executable, SCRIPT, "lead", mark, *asked, "--device", where]
                process = subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
                )
                started[where, other] = Run(process, mark, time.monotonic())
        return started[where, fault]

    return run


@pytest.mark.parametrize("fault", SAID)
@pytest.mark.parametrize("where", ("emulate", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_h1_while_kernels_wait(request, runs, where, fault):
    if where == "emulate":
        request.getfixturevalue("device")
    elif gpus() < 2:
        pytest.skip(f"needs 2 GPUs, there are {gpus()}")
    run = runs(where, fault)
    _, said = run.process.communicate(timeout=120)
    assert run.process.returncode not in (0, None)
    assert re.search(SAID[fault], said.decode(), re.DOTALL), said.decode()
    print(f"{fault}: all gone {time.monotonic() - run.began:.1f} s after the start")
    while living(run.mark):
        assert time.monotonic() < run.began + 120
        time.sleep(0.1)
