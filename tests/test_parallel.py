"""Tensor parallelism on CPUs: equal bits at every size (R2), rank 0 decides, and one death
ends all ranks."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ranks
import toy

import budget
import config
import parallel
from config import UserError
from engine import Engine
from parallel import End, Seat, SocketComm
from sampling import SamplingParams

HERE = Path(__file__).parent
SCRIPT = str(HERE / "ranks.py")
GOLDENS = HERE / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
WITH_DRAFTER = sorted(path.parent.parent.name for path in GOLDENS.glob("*/drafter/golden.npz"))
SIZES = (2, 4, 8)
SOME = slice(2, 4)  # of a bundle's prompts
ATTENTION = ("q_b_proj", "kv_b_proj", "o_proj", "q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def whole(*kinds: str) -> config.Cut:
    return config.Cut(**dict.fromkeys(kinds, "replicate"))


CUTS = (config.Cut(), whole(*ATTENTION), whole(*MLP), whole(*ATTENTION, *MLP))
# Index in CUTS of the first that a bundle's shape allows, by size: first for 2, for 4, for 8. The
# last leaves nothing cut but the vocabulary, which one bundle shows.
CUT = {"many-fp32": (0, 0, 1), "many-int4": (2, 2, 3), "nano-fp32": (0, 0, 0),
       "nano-int4": (0, 0, 0), "odd-fp32": (1, 1, 3), "odd-int4": (3, 3, 3),
       "yarn-fp32": (0, 0, 1), "yarn-int4": (2, 2, 3)}  # fmt: skip


def engine_of(
    directory: Path,
    comm=None,
    cut=CUTS[0],
    drafter=False,
    device="cpu",
    activation="float32",
    **decode,
) -> Engine:
    settings = config.Config(
        model=config.ModelSection(path=directory, lora_norm_eps=None, stated=()),
        tp=config.TensorParallel(size=comm.size if comm else 1, cut=cut),
        kernels=config.Kernels(activation=activation),
        draft=config.Draft(path=directory / "drafter" if drafter else None, limit=8),
        decode=config.Decode(**{"batch": 8, "prefill_chunk": 32, "leaf": 16, "span": 2, **decode}),
    )
    return Engine(settings, device, comm=comm)


@pytest.fixture(scope="module")
def worlds():
    """Ranks by their number, started once; a test's engine takes them over.

    mark  "nccl": without peer memory, where this process does without it too
    """
    started: dict[tuple[int, str], SocketComm] = {}

    def world(size: int, mark: str = "") -> SocketComm:
        if (size, mark) not in started:
            command = [sys.executable, SCRIPT, "follow", f"stand-in@{mark}"]
            started[size, mark] = parallel.start(size, command)
        return started[size, mark]

    yield world
    for comm in started.values():
        comm.close()
        assert [process.returncode for process in comm._processes] == [0] * (comm.size - 1)


# ---- the same bits at every size ---------------------------------------------------------------


@functools.cache
def golden(name: str) -> tuple[list[list[int]], np.ndarray]:
    """Prompts and ids of a bundle."""
    g = np.load(GOLDENS / name / "golden.npz")
    return [p.tolist() for p in np.split(g["prompt_ids"], np.cumsum(g["prompt_lengths"])[:-1])], g[
        "token_ids"
    ]


GREEDY, SAMPLED = {}, {"temperature": 0.8, "seed": 11}


@functools.cache
def alone(name: str) -> tuple:
    """Plain decoding on one rank: all prompts greedily; some of them sampled."""
    prompts, ids = golden(name)
    engine = engine_of(GOLDENS / name)
    return (
        toy.decode(engine, prompts, max_tokens=ids.shape[1]),
        toy.decode(engine, prompts[SOME], max_tokens=12, **SAMPLED),
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_goldens_keep_their_ids_and_bits(worlds, name, size):
    prompts, ids = golden(name)
    greedy, sampled = alone(name)
    first = CUT[name][SIZES.index(size)]
    for cut in CUTS[:first]:  # what the shape does not allow is refused before any rank hears of it
        with pytest.raises(UserError, match=r"tp\.size may be"):
            engine_of(GOLDENS / name, worlds(size), cut)
    if CUTS[first] == CUTS[-1] and (name, size) != ("odd-int4", 2):
        return
    engine = engine_of(GOLDENS / name, worlds(size), CUTS[first])
    toy.plug(engine, "mixed", prompts, greedy)
    results = toy.decode(engine, prompts, max_tokens=ids.shape[1])
    toy.assert_same_results(results, greedy)
    assert [r.token_ids for r in results] == ids.tolist()
    toy.assert_same_results(
        toy.decode(engine, prompts[SOME], "tree", 7, max_tokens=ids.shape[1]), greedy[SOME]
    )
    toy.plug(engine, "mixed", prompts[SOME], sampled)
    for mode in ("ar", "tree") if size == 2 else ("tree",):
        results = toy.decode(engine, prompts[SOME], mode, 7, max_tokens=12, **SAMPLED)
        toy.assert_same_results(results, sampled)


def assert_same_rounds(results, expected) -> None:
    """Equal trees, scores included, and equal ways through them."""
    for r, e in zip(results, expected, strict=True):
        assert len(r.rounds) == len(e.rounds) > 0
        for mine, other in zip(r.rounds, e.rounds, strict=True):
            assert mine.walk == other.walk
            for a, b in zip(vars(mine.tree).values(), vars(other.tree).values(), strict=True):
                assert toy.same_bits(a, b)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WITH_DRAFTER)
def test_drafts_keep_their_bits(worlds, name, size):
    """At 8 ranks the nano's two key/value heads are held by four ranks each. At 4 what can be whole
    without the rest is whole."""
    prompts = golden(name)[0][SOME]
    cut = CUTS[CUT[name][SIZES.index(size)]]
    if size == 4:
        kinds = ("embed_tokens", "lm_head", "fc")
        cut = dataclasses.replace(cut, **dict.fromkeys(kinds, "replicate"))
    one, many = (engine_of(GOLDENS / name, comm, cut, True) for comm in (None, worlds(size)))
    for wanted in (GREEDY, SAMPLED):
        params = SamplingParams(max_tokens=10, ignore_eos=True, **wanted)
        results = []
        for engine in (one, many):
            engine.use("tree", 12)
            results.append(engine.generate(prompts, params, keep_logits=True, keep_rounds=True))
        toy.assert_same_results(results[1], results[0])
        assert_same_rounds(results[1], results[0])


@pytest.mark.parametrize("vocab_size", [273, 279, 281])
def test_vocabularies_that_do_not_divide(worlds, tmp_path, vocab_size):
    toy.write_checkpoint(tmp_path, vocab_size=vocab_size)
    prompts = [[1, 2, vocab_size - 1], [vocab_size - 3]]
    one, two = engine_of(tmp_path), engine_of(tmp_path, worlds(4))
    toy.assert_same_results(*(toy.decode(e, prompts, max_tokens=6) for e in (one, two)))


@pytest.mark.parametrize("activation", ["float32", "bfloat16"])
def test_requests_come_and_go_alike(worlds, tmp_path, activation):
    """Few pages and slots: sequences are put back, cancelled, found again; one is to be scored."""
    toy.write_checkpoint(tmp_path, drafter={})
    params = SamplingParams(max_tokens=14, temperature=1.0, seed=5, ignore_eos=True)
    texts = ["a long prompt here", "b", "another one"]
    got = []
    for comm in (None, worlds(2)):
        engine = engine_of(tmp_path, comm, drafter=True, activation=activation, batch=2, pages=5)
        engine.use("tree", 6)
        some = [engine.submit(t, params, keep_logits=True, echo=t == "b") for t in texts]
        for _ in range(4):
            engine.step()
        engine.cancel(some[0])
        while any(s.finish_reason is None for s in some):
            engine.step()
        got.append([s.result() for s in some])
        got[-1] += engine.generate(texts[:1], params, keep_logits=True)
    toy.assert_same_results(got[1], got[0])
    assert toy.same_bits(got[1][1].prompt_logprobs, got[0][1].prompt_logprobs)
    assert got[0][0].finish_reason == "cancelled"


def test_recorded_rounds_on_two_ranks(worlds, tmp_path):
    """The kernels as host code: drafts, trees and walks stay where they are, rank 0's on each."""
    toy.write_checkpoint(tmp_path, drafter={})
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=5, ignore_eos=True)
    got = []
    for comm in (None, worlds(2)):
        kernels = {"device": "emulate", "activation": "bfloat16"}
        engine = engine_of(tmp_path, comm, drafter=True, batch=2, **kernels)
        engine.use("tree", 4)
        got.append(engine.generate(["hello", "b"], params, keep_logits=True))
        assert engine.rounds.graphs
        assert comm is None or (isinstance(engine.comm, parallel.PeerComm) and engine.comm.sums > 2)
    toy.assert_same_results(got[1], got[0])
    assert [r.steps for r in got[1]] == [r.steps for r in got[0]]


# ---- rank 0 decides ----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ("cpu", "emulate"))
def test_budgets_are_rank_0s(worlds, tmp_path, monkeypatch, device):
    """The others measure what it measures, and draft what it picks: here another choice a step."""
    toy.write_checkpoint(tmp_path, drafter={})
    n = 24 if device == "cpu" else 7
    params = SamplingParams(max_tokens=n, temperature=1.0, seed=5, ignore_eos=True)
    of = {"device": device, "activation": "bfloat16" if device == "emulate" else "float32"}
    plain = engine_of(tmp_path, drafter=True, batch=2, **of)
    expected = plain.generate(["hello", "b"], params, keep_logits=True)
    engine = engine_of(tmp_path, worlds(2), drafter=True, batch=2, **of)
    monkeypatch.setattr(budget, "CLOSE", -1.0)  # none is left out
    engine.use("tree", "auto")
    assert engine.auto.measured and not engine.running
    toy.assert_same_results(engine.generate(["hello", "b"], params, keep_logits=True), expected)
    turns, picked = itertools.cycle((*engine.auto.choices, engine.auto.watched)), set()

    def choose(*_):
        picked.add(choice := next(turns))
        return choice

    monkeypatch.setattr(engine.auto, "choose", choose)
    toy.assert_same_results(engine.generate(["hello", "b"], params, keep_logits=True), expected)
    assert len(picked) >= 3


def test_h2_other_drafts_on_rank_1_change_nothing(tmp_path):
    toy.write_checkpoint(tmp_path, drafter={"max_position_embeddings": 128},
                         max_position_embeddings=128)  # fmt: skip
    log = tmp_path / "rank1"
    comm = parallel.start(2, [sys.executable, SCRIPT, "follow", f"disturbed@{log}"])
    engine = engine_of(tmp_path, comm, drafter=True)
    engine.use("tree", 16)
    params = SamplingParams(max_tokens=65, temperature=1.0, ignore_eos=True)  # and no seed
    [result] = engine.generate([[5, 6, 7]], params, keep_logits=True, keep_rounds=True)
    engine.close()
    ids, rounds = pickle.loads(log.read_bytes())
    assert ids == result.token_ids and len(ids) == 65
    assert_same_rounds([dataclasses.replace(result, rounds=tuple(rounds))], [result])
    plain = engine_of(tmp_path)
    seeded = dataclasses.replace(params, seed=result.seed)
    toy.assert_same_results([result], plain.generate([[5, 6, 7]], seeded, keep_logits=True))


# ---- one death ends all ------------------------------------------------------------------------

FAULTS = {  # fault: what rank 0 says
    "raise": "error: rank 1: Traceback.*ValueError: the first mistake",
    "die": "error: rank 1: was killed by SIGKILL",
    "load-raise": "error: rank 1: Traceback.*ValueError: the first mistake",
    "load-die": "error: rank 1: was killed by SIGKILL",
    "lead-raise": "ValueError: the first mistake",
    "lead-die": "",
}


@dataclasses.dataclass(frozen=True)
class Run:
    process: subprocess.Popen
    mark: str
    began: float


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The command line at TP 4 with every fault, all at the same time."""
    directory = tmp_path_factory.mktemp("ranks")
    toy.write_checkpoint(directory, drafter={})
    asked = ["--config", "golden.yaml", "--model", str(directory), "--device", "cpu"]
    asked += ["--tp", "4", "--prompt", "hello", "--max-tokens", "40", "--ignore-eos"]
    started = {}
    for fault in FAULTS:
        mark = f"{fault}@{directory}"
        process = subprocess.Popen(
            [sys.executable, SCRIPT, "lead", mark, *asked],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started[fault] = Run(process, mark, time.monotonic())
    return started


def living(mark: str) -> list[str]:
    """Processes that have the mark among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_h1_one_failure_ends_all_ranks(runs, fault):
    run = runs[fault]
    _, said = run.process.communicate(timeout=30)
    deadline = run.began + 30
    assert run.process.returncode not in (0, None)
    assert re.search(FAULTS[fault], said.decode(), re.DOTALL), said.decode()
    assert said.decode().count("error") + said.decode().count("Traceback") <= 2, said.decode()
    while living(run.mark):
        assert time.monotonic() < deadline
        time.sleep(0.1)


# ---- the collectives, and who takes part -------------------------------------------------------


def run_ranks(size: int, comm_of, body) -> None:
    """A thread for each rank does `body`, meets the others and ends."""
    pairs = [socket.socketpair() for _ in range(size - 1)]
    seats = [Seat(rank, size, rank, size, None) for rank in range(size)]
    comms = [SocketComm(seats[0], [ours for ours, _ in pairs])]
    comms += [SocketComm(seat, [pair[1]]) for seat, pair in zip(seats[1:], pairs, strict=True)]
    passed = []

    def rank(host) -> None:
        comm = comm_of(host)
        body(comm)
        comm.barrier()
        if comm.rank:
            assert comm.broadcast() == End(3)
        passed.append(comm.rank)
        comm.close(3)

    threads = [threading.Thread(target=rank, args=(comm,), daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(passed) == list(range(size))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_collectives_over_sockets(size):
    run_ranks(size, lambda host: host, ranks.check)


CUDA = SimpleNamespace(name="cuda")  # operations that say no more than this


class DeviceArray(np.ndarray):
    """NumPy with CuPy's way to an address."""

    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))


class Nccl:
    """NCCL's calls as CuPy has them, between threads of this process. One object a world."""

    available, NCCL_FLOAT32, NCCL_UINT8 = True, 7, 1
    WIDTH = {7: 4, 1: 1}  # bytes

    def __init__(self, size: int):
        self.meeting, self.given = threading.Barrier(size, timeout=20), [None] * size
        self.group = threading.local()

    def get_version(self) -> int:
        return 22800

    def get_unique_id(self) -> bytes:
        return bytes(128)

    def NcclCommunicator(self, size: int, identity: bytes, rank: int):
        assert identity == bytes(128) and size == len(self.given)
        return NcclRank(self, rank)

    def exchange(self, rank: int, value) -> list:
        self.given[rank] = value
        self.meeting.wait()
        given = list(self.given)
        self.meeting.wait()
        return given

    def groupStart(self) -> None:
        self.group.calls = []

    def groupEnd(self) -> None:
        calls, rank = self.group.calls, self.group.rank
        sent = {peer: ctypes.string_at(at, n) for what, at, n, peer in calls if what == "send"}
        given = self.exchange(rank, sent)
        for what, at, n, peer in calls:
            if what == "recv":
                assert len(given[peer][rank]) == n
                ctypes.memmove(at, given[peer][rank], n)


@dataclasses.dataclass(frozen=True)
class NcclRank:
    world: Nccl
    rank: int

    def allGather(self, sent: int, received: int, count: int, kind: int, stream: int) -> None:
        given = self.world.exchange(self.rank, ctypes.string_at(sent, count * Nccl.WIDTH[kind]))
        ctypes.memmove(received, b"".join(given), sum(map(len, given)))

    def bcast(self, buffer: int, count: int, kind: int, root: int, stream: int) -> None:
        n = count * Nccl.WIDTH[kind]
        ctypes.memmove(buffer, self.world.exchange(self.rank, ctypes.string_at(buffer, n))[root], n)

    def send(self, buffer: int, count: int, kind: int, peer: int, stream: int) -> None:
        self.world.group.rank = self.rank
        self.world.group.calls.append(("send", buffer, count * Nccl.WIDTH[kind], peer))

    def recv(self, buffer: int, count: int, kind: int, peer: int, stream: int) -> None:
        self.world.group.calls.append(("recv", buffer, count * Nccl.WIDTH[kind], peer))


def use_stand_in(monkeypatch, size: int) -> None:
    """`Nccl` for CuPy's, and CuPy's few functions."""

    def device(function):
        return lambda *arguments, **named: function(*arguments, **named).view(DeviceArray)

    names = ("empty", "zeros", "array", "ascontiguousarray")
    cupy = SimpleNamespace(**{name: device(getattr(np, name)) for name in names})
    stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
    cupy.cuda = SimpleNamespace(nccl=Nccl(size), get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)


@pytest.mark.parametrize("size", [2, 8])
def test_collectives_over_nccl(monkeypatch, size):
    """The calls, against a stand-in with CuPy's signatures: no GPU is needed, none is proved."""
    use_stand_in(monkeypatch, size)
    run_ranks(size, lambda host: parallel.on_device(host, CUDA), ranks.check)


def test_a_missing_nccl_call_is_noticed(monkeypatch):
    use_stand_in(monkeypatch, 2)

    def uneven(comm) -> None:
        if comm.rank:
            comm.gather_columns(np.empty((0, 4), np.float32).view(DeviceArray))
            with pytest.raises(parallel.RankFailed, match="rank 0 has made 2 NCCL calls, rank 1 3"):
                comm.broadcast()
        else:
            comm.broadcast("hello")

    run_ranks(2, lambda host: parallel.on_device(host, CUDA), uneven)


def test_ranks_on_gpus_need_nccl(monkeypatch):
    use_stand_in(monkeypatch, 2)
    sys.modules["cupy.cuda"].nccl.available = False
    with pytest.raises(UserError, match="pip install nvidia-nccl-cu13"):
        parallel.on_device(None, CUDA)


def test_h1_the_first_error_is_what_is_said_of_all_that_follow():
    """Cleaning up after a rank has failed meets only the end of its connection."""
    ours, theirs = socket.socketpair()
    zero = SocketComm(Seat(0, 2, 0, 2, None), [ours])
    words = b"ValueError: the first mistake"
    theirs.sendall(parallel._HEADER.pack(parallel._FAILED, 0, len(words)) + words)
    theirs.close()
    for _ in range(2):
        with pytest.raises(parallel.RankFailed, match="rank 1: ValueError: the first mistake"):
            zero.barrier()
    zero.close(1)


def test_ranks_that_take_different_steps_are_told_so():
    ours, theirs = socket.socketpair()
    zero, one = (SocketComm(Seat(r, 2, r, 2, None), [s]) for r, s in ((0, ours), (1, theirs)))
    zero.broadcast("hello")
    with pytest.raises(parallel.RankFailed, match="rank 0 sent a broadcast .* exchange 1, a sum"):
        one.tree_sum(np.zeros(3, np.float32))
    one.close()
    zero.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
        (  # torchrun on two hosts: its own store has MASTER_PORT
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
             "MASTER_ADDR": "host", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            Seat(5, 8, 1, 4, ("host", 29501)),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
             "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            Seat(3, 4, 1, 2, None),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Seat(1, 2, 1, 0, None)),
        (
            {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1",
             "MASTER_ADDR": "node0", "MASTER_PORT": "4000"},
            Seat(9, 16, 1, 0, ("node0", 4000)),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, None),  # the batch script is alone
    ],
)  # fmt: skip
def test_seats(environ, expected):
    assert parallel.seat(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK.*expected numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected less than WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "p"}, "MASTER_PORT"),
    ],
)
def test_seats_that_cannot_be(environ, message):
    with pytest.raises(UserError, match=message):
        parallel.seat(environ)


def answers(*commands: tuple[list[str], dict]) -> list[dict]:
    """Run commands together; the JSON line of the first, after all have ended well."""
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=HERE.parent,
        )
        for command, environ in commands
    ]
    said = [process.communicate(timeout=60) for process in processes]
    assert [p.returncode for p in processes] == [0] * len(processes), said
    return [json.loads(line) for line in said[0][0].splitlines()]


def gpus() -> int:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:
        return 0


@pytest.fixture
def enough_gpus(request):
    size = request.getfixturevalue("size")
    if gpus() < size:
        pytest.skip(f"needs {size} GPUs, there are {gpus()}")


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_collectives_on_gpus(enough_gpus, size):
    """Over peer memory and over NCCL, eager and recorded."""
    environ = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, SCRIPT, "collectives", "cuda"]
    ranks_ = [{**environ, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(size)]
    answers(*((command, rank) for rank in ranks_))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["nano-int4", "nano-fp32"])
@pytest.mark.parametrize("way", ["peers", "nccl"])
@pytest.mark.parametrize("size", SIZES)
def test_goldens_on_gpus(enough_gpus, worlds, monkeypatch, size, way, name, activation):
    """The bits of one GPU, in recorded rounds and in plain steps; in fp32 the golden's ids."""
    if way == "nccl":
        monkeypatch.setattr(parallel, "with_peers", lambda host, base, ops: base)
    prompts, ids = golden(name)
    own = name in WITH_DRAFTER
    runs = []
    for comm in (None, worlds(size, way)):
        engine = engine_of(GOLDENS / name, comm, CUTS[0], own, "cuda", activation)
        assert comm is None or isinstance(engine.comm, parallel.PeerComm) == (way == "peers")
        results = toy.decode(engine, prompts, max_tokens=ids.shape[1])
        for mode in ("chain", "tree") if own else ():
            results += toy.decode(engine, prompts, mode, 12, max_tokens=ids.shape[1])
            results += toy.decode(engine, prompts, mode, 12, max_tokens=12, **SAMPLED)
            engine.use(mode, 12)
            params = SamplingParams(max_tokens=12, ignore_eos=True)  # in plain steps:
            results += engine.generate(prompts, params, keep_logits=True, keep_rounds=True)
        runs.append(results)
    toy.assert_same_results(runs[1], runs[0])
    assert [r.steps for r in runs[1]] == [r.steps for r in runs[0]]
    if activation == "float32":
        assert [r.token_ids for r in runs[1][: len(ids)]] == ids.tolist()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def request_file(tmp_path: Path, name: str) -> list[str]:
    """Arguments that decode a bundle's prompts at TP 2."""
    prompts, ids = golden(name)
    lines = (json.dumps({"prompt_ids": prompt, "id": i}) for i, prompt in enumerate(prompts))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    arguments = ["--config", "golden.yaml", "--model", str(GOLDENS / name), "--device", "cpu"]
    arguments += ["--ignore-eos", "--max-tokens", str(ids.shape[1]), "--tp", "2"]
    return [*arguments, "--prompts", str(tmp_path / "prompts.jsonl")]


def assert_golden(lines: list[dict], name: str) -> None:
    ids = golden(name)[1]
    assert len(lines) == len(ids)
    for line in lines:
        assert line["token_ids"] == ids[line["id"]].tolist()


def test_a_launcher_over_tcp(tmp_path):
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    lead = [sys.executable, "engine.py", *request_file(tmp_path, "nano-fp32")]
    follow = [sys.executable, "engine.py"]  # what it needs to know comes from rank 0
    lines = answers((lead, {**environ, "RANK": "0"}), (follow, {**environ, "RANK": "1"}))
    assert_golden(lines, "nano-fp32")


@pytest.fixture(scope="module")
def mpiexec():
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    beside = Path(sys.executable).parent
    found = shutil.which("mpiexec", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("mpiexec is not installed")
    return found


def test_collectives_over_mpi(mpiexec):
    answers(([mpiexec, "-n", "4", sys.executable, SCRIPT, "collectives"], {}))


def test_goldens_over_mpi(mpiexec, tmp_path):
    command = [mpiexec, "-n", "2", sys.executable, "engine.py"]
    lines = answers(([*command, *request_file(tmp_path, "nano-int4")], {}))
    assert_golden(lines, "nano-int4")


@pytest.mark.parametrize("fault", ["raise", "die"])
def test_h1_over_mpi(mpiexec, tmp_path, fault):
    command = [mpiexec, "-n", "2", sys.executable, SCRIPT, "launched", f"{fault}@{tmp_path}"]
    done = subprocess.run(
        [*command, *request_file(tmp_path, "nano-int4")],
        capture_output=True,
        timeout=30,
        cwd=HERE.parent,
    )
    assert done.returncode != 0
    if fault == "raise":
        assert b"error: rank 1: Traceback" in done.stderr and b"the first mistake" in done.stderr
    deadline = time.monotonic() + 5
    while living(f"{fault}@{tmp_path}"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
