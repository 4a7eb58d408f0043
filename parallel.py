"""Ranks of tensor parallelism: who takes part, the few collectives, and one death ends all.

Sums are exact: fp32 partials are added along the pairwise tree of R2, ((0+1)+(2+3))+((4+5)+(6+7)),
whatever moves them. A rank's own leaves are added before, so the number of ranks only says where
that tree is cut, and no bit depends on it.

    SocketComm  host arrays, a star around rank 0; ranks of one host (`start`), or of a launcher
                that sets MASTER_ADDR and MASTER_PORT (torchrun, srun)
    MpiComm     host arrays over mpi4py; ranks of mpirun, or of srun with an MPI
    NcclComm    arrays on GPUs over NCCL, beside one of the two for everything on the host
    PeerComm    sums through memory that ranks of one host write for each other, beside another comm

Rank 0 decides: what the others need to know of requests, draft trees and sampled tokens comes by
`broadcast`. When a rank fails, its words go to rank 0, which shows the first; when a rank dies
without a word, the end of its connection says so, to a thread that waits for nothing else. Either
way every rank has left, with a status other than 0, within seconds.

Objects travel as pickles, so the port of rank 0 must be reachable by the ranks' hosts alone.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import logging
import os
import pickle
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from config import DeviceFault, UserError
from reference import tree_sum

log = logging.getLogger("kdtree")
MEET_S = 120.0  # for all ranks to come together
GRACE_S = 5.0  # for rank 0 to notice by itself that a rank has gone, and to say it its own way
LEAVE_S = 5.0  # for ranks to end by themselves
WORDS_S = 1.0  # for mpirun to pass on what a rank has printed before it kills it
TWO_SHOT_BYTES = 1 << 18  # from here on each rank adds a part of the sum instead of all of it
# Deaths are noticed by the host at once; this is for a rank that lives and does not come, and long
# enough for one that still compiles what the others have in their cache.
PATIENCE_S = 60.0
OFFER_BYTES = 1024  # of what a rank says to all others in `_exchange`, at most


class RankFailed(RuntimeError):
    """Another rank has failed, or died; the message is the first error, fit to be shown."""


@dataclass(frozen=True)
class End:
    """What rank 0 broadcasts last: every rank then ends with this status."""

    status: int


class Comm(Protocol):
    """What models and the engine use. All ranks call the same methods in the same order.

    rank, size  this process among all ranks
    local_rank, local_size  among those of its host; size 0: the launcher does not say
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    def tree_sum(self, x):
        """The sum of all ranks' fp32 arrays of equal shape, along the pairwise tree."""

    def gather_columns(self, x):
        """[T, n] of each rank -> [T, size * n], side by side."""

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's object, on every rank; what the others pass is not looked at."""

    def share(self, x):
        """Rank 0's array, on every rank; all pass one of its shape and type."""

    def barrier(self) -> None:
        """Returns when all ranks have come here."""

    def fail(self, text: str) -> NoReturn:
        """End this rank, and thereby all, with `text` as the error that is shown."""

    def close(self, status: int = 0) -> None:
        """The ranks end, with this status. Safe to call again."""


class Alone:
    """In place of the other ranks, where tp.only_rank runs one without them: they add nothing to a
    sum, and their columns are taken to be like this rank's. Shapes are right, values are not."""

    def __init__(self, size: int):
        self.size = size

    def tree_sum(self, x):
        return x

    def gather_columns(self, x):
        return x[:, None].repeat(self.size, 1).reshape(len(x), self.size * x.shape[1])

    def share(self, x):
        return x


# ---- who takes part ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Seat:
    """This process among the ranks that a launcher has started.

    address  where rank 0 listens;  None: the launcher's MPI connects the ranks
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: tuple[str, int] | None


# Variables of rank, size, local rank and local size by launcher. Slurm sets SLURM_STEP_NUM_TASKS
# for what srun starts, and SLURM_NTASKS also for the batch script, which is alone.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun
    tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)


def seat(environ: Mapping[str, str]) -> Seat | None:
    """What a launcher's variables say; None where this process is alone."""
    for launcher, names in enumerate(_LAUNCHERS):
        if not all(name in environ for name in names[:2]):
            continue
        missing = ("", "", environ[names[0]], "0")
        given = [environ.get(name, but) for name, but in zip(names, missing, strict=True)]
        if not all(value.isdecimal() for value in given):
            raise UserError(f"{', '.join(names)}: expected numbers, got {', '.join(given)}")
        rank, size, local_rank, local_size = map(int, given)
        if rank >= size:
            raise UserError(f"{names[0]}: expected less than {names[1]}, {size}, got {rank}")
        address = _address(environ)
        if launcher == 0 and address is None:
            raise UserError("MASTER_ADDR, MASTER_PORT: expected beside RANK and WORLD_SIZE")
        return Seat(rank, size, local_rank, local_size, address) if size > 1 else None
    return None


def _address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port:
        return None
    if not port.isdecimal() or not 0 < int(port) < 65535:
        raise UserError(f"MASTER_PORT: expected a port, 1 to 65534, got {port}")
    # torchrun's own store listens at the port itself.
    taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return host, int(port) + taken


@functools.cache
def join() -> Comm | None:
    """Meet the other ranks of the launcher that started this process; None where it is alone."""
    mine = seat(os.environ)
    if mine is None:
        return None
    return MpiComm(mine) if mine.address is None else _meet(mine)


def start(size: int, command: list[str]) -> SocketComm:
    """Start ranks 1 … size - 1 on this host; this process is rank 0.

    command  what each runs, with its rank and the size as two more arguments; it calls `attach`.
             Its standard input is the way to rank 0; output is rank 0's alone, errors are not.
    """
    peers, processes = [], []
    for rank in range(1, size):
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C is rank 0's to handle.
            processes.append(
                subprocess.Popen(
                    [*command, str(rank), str(size)],
                    stdin=theirs,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        peers.append(ours)
    return SocketComm(Seat(0, size, 0, size, None), peers, processes)


def attach(rank: int, size: int) -> SocketComm:
    """The side of a rank that `start` has started."""
    peer = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return SocketComm(Seat(rank, size, rank, size, None), [peer])


# ---- over sockets ------------------------------------------------------------------------------

_HEADER = struct.Struct("<BIQ")  # kind, number of the exchange, bytes that follow
_KINDS = {1: "a sum", 2: "a gathering of columns", 3: "a broadcast", 4: "a failure"}
_SUM, _GATHER, _OBJECT, _FAILED = _KINDS
_HELLO = struct.Struct("<8sII")  # magic, rank, size
_MAGIC = b"kdtree-1"


class SocketComm:
    """A star of sockets: rank 0 adds or joins what all have and sends the result back.

    Blocking reads, so a waiting rank costs nothing, which matters where ranks share cores.
    peers      rank 0: sockets to ranks 1, 2, …; others: the one to rank 0
    processes  ranks that this process has started
    """

    def __init__(self, mine: Seat, peers, processes=()):
        self.rank, self.size = mine.rank, mine.size
        self.local_rank, self.local_size = mine.local_rank, mine.local_size
        self._peers, self._processes = list(peers), list(processes)
        self._exchanges = 0
        self._noticed = threading.Event()  # somebody's end has been seen, by whatever thread
        self._first = ""  # what was said of the first failure
        self._closed = False
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        atexit.register(self._at_exit)

    def tree_sum(self, x: np.ndarray) -> np.ndarray:
        return self._through_rank_0(_SUM, x, x.shape, tree_sum)

    def gather_columns(self, x: np.ndarray) -> np.ndarray:
        shape = len(x), self.size * x.shape[1]
        return self._through_rank_0(_GATHER, x, shape, lambda parts: np.concatenate(parts, 1))

    def broadcast(self, value: Any = None) -> Any:
        self._exchanges += 1
        if self.rank:
            return pickle.loads(self._receive(self._peers[0], _OBJECT))
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        for peer in self._peers:
            self._send(peer, _OBJECT, data)
        return value

    def share(self, x: np.ndarray) -> np.ndarray:
        return self.broadcast(x)

    def barrier(self) -> None:
        self.tree_sum(np.zeros(1, np.float32))

    def fail(self, text: str) -> NoReturn:
        self._noticed.set()
        if self.rank == 0:
            print(f"error: {text}", file=sys.stderr)
            self._kill()
        else:
            with suppress(OSError):  # rank 0 may have gone before, with words of its own
                self._send(self._peers[0], _FAILED, text.encode())
        _leave(1)

    def close(self, status: int = 0) -> None:
        if self._closed:
            return
        if self.rank == 0 and not self._noticed.is_set():
            with suppress(RankFailed, OSError):
                self.broadcast(End(status))
        self._closed = True
        deadline = time.monotonic() + LEAVE_S
        if self.rank == 0 and not self._noticed.is_set():
            for peer in self._peers:  # hang up last: to them our end alone would be a death
                with suppress(OSError):
                    peer.settimeout(max(deadline - time.monotonic(), 0.01))
                    while peer.recv(1 << 16):
                        pass
        for peer in self._peers:
            with suppress(OSError):  # at once, though the watching thread still holds it
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))
        self._kill()

    # -- messages

    def _through_rank_0(self, kind: int, x: np.ndarray, shape, combine: Callable) -> np.ndarray:
        x = np.ascontiguousarray(x)
        if not x.size:
            return np.empty(shape, x.dtype)
        self._exchanges += 1
        if self.rank:
            self._send(self._peers[0], kind, _bytes(x))
            out = np.empty(shape, x.dtype)
            self._receive(self._peers[0], kind, _bytes(out))
            return out
        parts = np.empty((self.size, *x.shape), x.dtype)
        parts[0] = x
        for peer, part in zip(self._peers, parts[1:], strict=True):
            self._receive(peer, kind, _bytes(part))
        out = np.ascontiguousarray(combine(parts))
        for peer in self._peers:
            self._send(peer, kind, _bytes(out))
        return out

    def _send(self, peer: socket.socket, kind: int, data) -> None:
        header = _HEADER.pack(kind, self._exchanges & 0xFFFFFFFF, len(data))
        try:
            if len(data) < 4096:
                peer.sendall(header + bytes(data))
            else:
                peer.sendall(header)
                peer.sendall(data)
        except OSError:
            if kind == _FAILED:
                raise
            raise self._gone(peer) from None

    def _receive(self, peer: socket.socket, kind: int, into: memoryview | None = None):
        """The data of the next message, which must be the other side of this exchange."""
        try:
            found, number, length = _HEADER.unpack(_read(peer, bytearray(_HEADER.size)))
            if found == _FAILED:
                raise self._failure(peer, _read(peer, bytearray(length)).decode())
            due = self._exchanges & 0xFFFFFFFF
            if (found, number) != (kind, due) or (into is not None and length != len(into)):
                wanted = "" if into is None else f" of {len(into)} bytes"
                self._noticed.set()
                raise RankFailed(
                    f"rank {self._rank_of(peer)} sent {_KINDS.get(found, 'junk')} of {length} bytes"
                    f" as exchange {number} where rank {self.rank} is at exchange {due}, "
                    f"{_KINDS[kind]}{wanted}; all ranks must take the same steps"
                )
            return _read(peer, bytearray(length) if into is None else into)
        except OSError:
            raise self._gone(peer) from None

    # -- the end of a rank

    def _rank_of(self, peer: socket.socket) -> int:
        return 0 if self.rank else self._peers.index(peer) + 1

    def _failure(self, peer: socket.socket, text: str) -> RankFailed:
        """The first that was noticed: what fails after it, in cleaning up, fails because of it."""
        self._noticed.set()
        self._first = self._first or f"rank {self._rank_of(peer)}: {text}"
        return RankFailed(self._first)

    def _gone(self, peer: socket.socket) -> RankFailed:
        """The error for a peer that has hung up: its last words, or how it died."""
        if self.rank == 0:
            with suppress(OSError):  # words that came before the end, behind parts of a sum
                peer.settimeout(0.2)
                while header := _read(peer, bytearray(_HEADER.size)):
                    kind, _, length = _HEADER.unpack(header)
                    data = _read(peer, bytearray(length))
                    if kind == _FAILED:
                        return self._failure(peer, data.decode())
        how = "has gone"
        if self._processes:
            with suppress(subprocess.TimeoutExpired):
                status = self._processes[self._rank_of(peer) - 1].wait(1)
                how = f"has ended with status {status}"
                if status < 0:
                    how = f"was killed by {signal.Signals(-status).name}"
                    how += " (out of memory?)" if status == -signal.SIGKILL else ""
        return self._failure(peer, f"{how} without a word")

    def _watch(self) -> None:
        """Wait for a peer to hang up. It does so before its time only by dying."""
        poll = select.poll()
        by_fd = {peer.fileno(): peer for peer in self._peers}
        for fd in by_fd:
            poll.register(fd, select.POLLRDHUP)
        ready: list = []
        while not ready:
            ready = poll.poll(500)
            if self._closed:
                return
        if self.rank:
            _leave(1)
        if not self._noticed.wait(GRACE_S) and not self._closed:
            self.fail(str(self._gone(by_fd[ready[0][0]])))

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _at_exit(self) -> None:
        if self._closed:
            return
        failed = self._noticed.is_set() or getattr(sys, "last_value", None) is not None
        self.close(int(failed))
        if failed:  # what is still to be torn down may wait for ranks that are no more
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(LEAVE_S))


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _read(peer: socket.socket, into):
    """Fill a buffer; ConnectionError at the end of the connection."""
    view = memoryview(into)
    while len(view):
        got = peer.recv_into(view)
        if not got:
            raise ConnectionResetError
        view = view[got:]
    return into


def _leave(status: int) -> NoReturn:
    """End the process now: destructors of a device or a library might wait for other ranks."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


def _meet(mine: Seat) -> SocketComm:
    """The star of ranks on several hosts, or of one launcher."""
    deadline = time.monotonic() + MEET_S
    peers = [_call(mine, deadline)] if mine.rank else _answer(mine, deadline)
    for peer in peers:
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes hangs up nothing: it is asked every few seconds whether it is there.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("KEEPIDLE", 5), ("KEEPINTVL", 3), ("KEEPCNT", 3)):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)
    return SocketComm(mine, peers)


def _call(mine: Seat, deadline: float) -> socket.socket:
    while True:
        try:
            peer = socket.create_connection(mine.address, timeout=5)
            peer.sendall(_HELLO.pack(_MAGIC, mine.rank, mine.size))
            return peer
        except OSError as error:
            if time.monotonic() > deadline:
                host, port = mine.address
                raise UserError(
                    f"MASTER_ADDR, MASTER_PORT: rank 0 cannot be reached at {host} port {port}: "
                    f"{error}; did it start, and may this host connect to it?"
                ) from None
            time.sleep(0.1)


def _answer(mine: Seat, deadline: float) -> list[socket.socket]:
    came: dict[int, socket.socket] = {}
    with _listen(mine.address) as listener:
        while len(came) < mine.size - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                late = sorted(set(range(1, mine.size)) - set(came))
                raise UserError(
                    f"ranks {', '.join(map(str, late))} of {mine.size} did not come within "
                    f"{MEET_S:.0f} s; was the command started for each of them?"
                ) from None
            with suppress(OSError):  # a stranger, or one who hung up at once
                peer.settimeout(5)
                magic, rank, size = _HELLO.unpack(_read(peer, bytearray(_HELLO.size)))
                if magic == _MAGIC and size == mine.size and 0 < rank < size and rank not in came:
                    came[rank] = peer
                    continue
            peer.close()
    return [came[rank] for rank in range(1, mine.size)]


def _listen(address: tuple[str, int]) -> socket.socket:
    host, port = address
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    for name in (host, ""):  # the name may stand for this host without being an address of it
        try:
            return socket.create_server((name, port), family=family, backlog=64)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or not name:
                raise UserError(
                    f"MASTER_PORT: rank 0 cannot listen at {host} port {port}: {error.strerror}; "
                    "choose another port"
                ) from None
    raise AssertionError


# ---- over MPI ----------------------------------------------------------------------------------


class MpiComm:
    """All ranks of MPI_COMM_WORLD. The launcher ends them all when one dies or aborts.

    Waiting is polling with short sleeps: MPI's own spins, and ranks may share cores.
    """

    def __init__(self, mine: Seat):
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise UserError(
                f"MPI: the launcher's ranks need mpi4py ({error}); pip install mpi4py, or set "
                "MASTER_ADDR and MASTER_PORT to connect them without"
            ) from None
        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        if (self.rank, self.size) != (mine.rank, mine.size):
            raise UserError(
                f"MPI: the launcher says rank {mine.rank} of {mine.size}, mpi4py's MPI says "
                f"{self.rank} of {self.size}; use the launcher of the MPI that mpi4py was built on"
            )
        self.local_rank, self.local_size = mine.local_rank, mine.local_size
        self._closed = False
        atexit.register(self._at_exit)  # before mpi4py's own end of MPI

    def tree_sum(self, x: np.ndarray) -> np.ndarray:
        x = np.ascontiguousarray(x)
        if x.nbytes < TWO_SHOT_BYTES or x.size % self.size:
            return tree_sum(self._all_gather(x))
        mine = np.empty((self.size, x.size // self.size), x.dtype)
        self._wait(self._world.Ialltoall(_words(x), _words(mine)))
        return self._all_gather(tree_sum(mine)).reshape(x.shape)

    def gather_columns(self, x: np.ndarray) -> np.ndarray:
        return np.concatenate(self._all_gather(np.ascontiguousarray(x)), 1)

    def _all_gather(self, x: np.ndarray) -> np.ndarray:
        parts = np.empty((self.size, *x.shape), x.dtype)
        self._wait(self._world.Iallgather(_words(x), _words(parts)))
        return parts

    def broadcast(self, value: Any = None) -> Any:
        if self.rank:
            _poll(lambda: self._world.iprobe(source=0))
            return self._world.recv(source=0)
        for request in [self._world.isend(value, rank) for rank in range(1, self.size)]:
            self._wait(request)
        return value

    def share(self, x: np.ndarray) -> np.ndarray:
        return self.broadcast(x)

    def barrier(self) -> None:
        self._wait(self._world.Ibarrier())

    def fail(self, text: str) -> NoReturn:
        who = f"rank {self.rank}: " if self.rank else ""
        print(f"error: {who}{text}", file=sys.stderr, flush=True)
        time.sleep(WORDS_S)
        self._world.Abort(1)
        _leave(1)

    def close(self, status: int = 0) -> None:
        """The others end at once where they wait for rank 0's word; else MPI ends them."""
        if self._closed:
            return
        self._closed = True
        if self.rank == 0:
            requests = [self._world.issend(End(status), rank) for rank in range(1, self.size)]
            deadline = time.monotonic() + LEAVE_S
            while not self._mpi.Request.Testall(requests):
                if time.monotonic() > deadline:
                    sys.stdout.flush()
                    self._world.Abort(status or 1)
                time.sleep(1e-3)

    def _wait(self, request) -> None:
        _poll(request.Test)

    def _at_exit(self) -> None:
        if self.rank == 0:
            self.close(int(getattr(sys, "last_value", None) is not None))


def _words(array: np.ndarray) -> np.ndarray:
    """For MPI, which knows no bfloat16 and need not."""
    return array.reshape(-1).view(np.uint8)


def _poll(done: Callable[[], Any]) -> None:
    tries = 0
    while not done():
        tries += 1
        if tries < 20:
            os.sched_yield()
        else:
            time.sleep(2e-5 if tries < 20_000 else 1e-3)


# ---- over NCCL ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Counted:
    calls: int
    value: Any


def _agreed(said, calls: int, rank: int, what: str) -> Any:
    """The value that rank 0 said beside the number of its calls."""
    if not isinstance(said, _Counted):  # about the ranks themselves
        return said
    if said.calls != calls:
        raise RankFailed(
            f"rank 0 has made {said.calls} {what}, rank {rank} {calls}; all ranks must take the "
            "same steps"
        )
    return said.value


class NcclComm:
    """GPU arrays by NCCL on the current stream, so that it is captured with the kernels around it.

    host  the same ranks on the host: for decisions, the meeting and the end
    Only data moves through NCCL; the adding is ours, for NCCL's own sums keep no order.
    """

    def __init__(self, host: Comm):
        import cupy

        with warnings.catch_warnings(action="ignore"):  # CuPy's own, a dozen lines
            from cupy.cuda import nccl
        if not nccl.available:
            raise UserError(
                "NCCL cannot be loaded, and ranks on GPUs need it: pip install nvidia-nccl-cu13 "
                "(or -cu12, as CuPy), or use --tp 1"
            )
        if (version := nccl.get_version()) < 20900:
            raise UserError(f"NCCL {version}: expected 2.9 or newer, whose calls can be captured")
        self.rank, self.size = host.rank, host.size
        self.local_rank, self.local_size = host.local_rank, host.local_size
        self._host, self._cupy, self._nccl = host, cupy, nccl
        identity = host.broadcast(nccl.get_unique_id() if host.rank == 0 else None)
        self._comm = nccl.NcclCommunicator(self.size, identity, self.rank)
        # Never freed: NCCL's destructor waits for captured graphs, and for the other ranks.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._comm))
        self._calls = 0
        self.tree_sum(cupy.zeros((self.size, 2), np.float32))  # connects, compiles what adds
        self.tree_sum(cupy.zeros((1, TWO_SHOT_BYTES // 4), np.float32))
        cupy.cuda.get_current_stream().synchronize()

    def tree_sum(self, x):
        """One shot (all add all) for few bytes, two (each adds a part) for many: the same bits."""
        x = self._take(x)
        if not x.size:
            return x
        if self.size == 2 or x.nbytes < TWO_SHOT_BYTES or x.size % self.size:
            return tree_sum(self._all_gather(x))  # two ranks send as much either way
        part = x.size // self.size
        mine, stream = self._cupy.empty((self.size, part), x.dtype), self._stream()
        step = part * x.itemsize
        self._nccl.groupStart()
        for rank in range(self.size):
            given, taken = x.data.ptr + rank * step, mine.data.ptr + rank * step
            self._comm.send(given, part, self._nccl.NCCL_FLOAT32, rank, stream)
            self._comm.recv(taken, part, self._nccl.NCCL_FLOAT32, rank, stream)
        self._nccl.groupEnd()
        return self._all_gather(tree_sum(mine)).reshape(x.shape)

    def gather_columns(self, x):
        parts = self._all_gather(self._take(x)).swapaxes(0, 1)
        return self._cupy.ascontiguousarray(parts).reshape(len(x), self.size * x.shape[1])

    def broadcast(self, value: Any = None) -> Any:
        """Beside the value goes the number of calls so far, captured ones too: all must agree."""
        said = self._host.broadcast(_Counted(self._calls, value))
        return _agreed(said, self._calls, self.rank, "NCCL calls")

    def share(self, x):
        out = self._cupy.array(x)
        if out.nbytes:
            self._comm.bcast(out.data.ptr, out.nbytes, self._nccl.NCCL_UINT8, 0, self._stream())
        return out

    def barrier(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()
        self._host.barrier()

    def fail(self, text: str) -> NoReturn:
        self._host.fail(text)

    def close(self, status: int = 0) -> None:
        self._host.close(status)

    def all_reduce(self, x):
        """The sum by NCCL itself, in NCCL's order; for a comparison. fp32 or bfloat16."""
        out, nccl = self._cupy.empty_like(x), self._nccl
        kind = nccl.NCCL_FLOAT32 if x.dtype == np.float32 else nccl.NCCL_BFLOAT16
        given = x.data.ptr, out.data.ptr, x.size, kind, nccl.NCCL_SUM, self._stream()
        self._comm.allReduce(*given)
        return out

    def _take(self, x):
        if x.dtype != np.float32:
            raise UserError(f"NCCL: expected float32 partials, got {x.dtype}")
        self._calls += 1
        return self._cupy.ascontiguousarray(x)

    def _all_gather(self, x):
        parts = self._cupy.empty((self.size, *x.shape), x.dtype)
        if x.size:
            kind = self._nccl.NCCL_FLOAT32
            self._comm.allGather(x.data.ptr, parts.data.ptr, x.size, kind, self._stream())
        return parts

    def _stream(self) -> int:
        return self._cupy.cuda.get_current_stream().ptr


# ---- over peer memory --------------------------------------------------------------------------


class PeerComm:
    """Sums by kernels that write into the memory of the other ranks and add along the tree;
    what is too large or too ragged for them, and all else, by `base`.

    base    the same ranks, for arrays of the same operations
    mail    ops.Mailbox of this rank;  memory: what the others write into, which must live as long
    sums    how many went this way, captured ones counted once
    """

    def __init__(self, base: Comm, ops, mail, memory):
        self.rank, self.size = base.rank, base.size
        self.local_rank, self.local_size = base.local_rank, base.local_size
        self.base, self.mail, self.sums = base, mail, 0
        self._ops, self._memory = ops, memory

    def tree_sum(self, x):
        push = self._ops.push_for(self.mail, x)
        if push is None:
            return self.base.tree_sum(x)
        self.sums += 1
        return push(self.mail, x)

    def gather_columns(self, x):
        return self.base.gather_columns(x)

    def broadcast(self, value: Any = None) -> Any:
        """Beside the value goes the number of sums so far: see NcclComm.broadcast."""
        said = self.base.broadcast(_Counted(self.sums, value))
        return _agreed(said, self.sums, self.rank, "sums in peer memory")

    def share(self, x):
        return self.base.share(x)

    def barrier(self) -> None:
        self.base.barrier()

    def fail(self, text: str) -> NoReturn:
        self.base.fail(text)

    def close(self, status: int = 0) -> None:
        self.base.close(status)


class _NoPeers(Exception):
    """Why sums cannot go through peer memory; every rank raises the same."""


def with_peers(host: Comm, base: Comm, ops) -> Comm:
    """`base` with sums in peer memory. Where that cannot be had, on whatever rank, it is `base`
    itself, and rank 0 logs why. Every rank must come here.

    host  the same ranks on the host
    """
    try:
        return _peers(host, base, ops)
    except _NoPeers as why:
        if host.rank == 0:
            log.warning("sums do not go through peer memory: %s", why)
        return base


def _peers(host: Comm, base: Comm, ops) -> PeerComm:
    if host.size not in (2, 4, 8):
        raise _NoPeers(f"{host.size} ranks, expected 2, 4 or 8")
    own, handle = _agree(host, lambda: ops.share_mailbox(host.size))
    offers = _exchange(host, (_this_host(), handle, ops.launcher.limits.processors))
    hosts, handles, processors = zip(*offers, strict=True)
    if len(set(hosts)) > 1:
        raise _NoPeers("the ranks are not of one host")
    addresses = _agree(host, lambda: _map(handles, host.rank, own, ops.launcher))
    _agree(host, lambda: _probe(host, own, addresses, ops.launcher))
    mail = ops.mailbox(host.rank, addresses, min(processors), PATIENCE_S)
    made = PeerComm(base, ops, mail, own)
    _agree(host, lambda: _prove(made, ops))
    return made


def _exchange(host: Comm, value: Any) -> list:
    """What every rank says, by rank."""
    said, data = np.zeros((1, OFFER_BYTES), np.uint8), np.frombuffer(pickle.dumps(value), np.uint8)
    said[0, : len(data)] = data
    return [pickle.loads(row) for row in host.gather_columns(said).reshape(host.size, -1)]


def _agree(host: Comm, action: Callable[[], Any]) -> Any:
    """Its result, once all ranks have done it; _NoPeers on all where it failed on one."""
    result, why = None, ""
    try:
        result = action()
    except DeviceFault:
        raise
    except (_NoPeers, OSError, RuntimeError) as error:  # CuPy's are RuntimeErrors
        why = str(error)[: OFFER_BYTES // 2] or type(error).__name__
    for rank, said in enumerate(_exchange(host, why)):
        if said:
            raise _NoPeers(f"rank {rank}: {said}")
    return result


def _this_host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node() + (boot.read_text() if boot.exists() else "")


def _map(handles, rank: int, own, launcher) -> list[int]:
    """Where the memory of every rank is, as this process sees it."""
    return [
        launcher.address(own) if r == rank else launcher.map(handle)
        for r, handle in enumerate(handles)
    ]


def _probe(host: Comm, own, addresses: list[int], launcher) -> None:
    """Write a number into every other rank's memory, look for theirs, and clear them."""
    mark = np.array([host.rank + 1], np.uint64)
    try:
        for rank, address in enumerate(addresses):
            if rank != host.rank:
                launcher.write(address + 8 * host.rank, mark)
    finally:
        host.barrier()
    found = launcher.download(own[: 8 * host.size]).view(np.uint64).tolist()
    wanted = [0 if r == host.rank else r + 1 for r in range(host.size)]
    if found != wanted:
        raise _NoPeers(f"found {found} in its memory, expected {wanted}")
    own[: 8 * host.size] = 0
    launcher.synchronize()


def _prove(peers: PeerComm, ops) -> None:
    """Compare a sum of each kind with that of the base; compiles the kernels."""
    same = True
    for n in (1022, peers.mail.short + 32):  # in one shot, in two; all ranks take the same steps
        x = np.random.default_rng(peers.rank).standard_normal(n, dtype=np.float32)
        x = ops.launcher.upload(x)
        have, want = (ops.download(comm.tree_sum(x)) for comm in (peers, peers.base))
        same &= have.tobytes() == want.tobytes()
    if not same:
        raise _NoPeers("a sum in peer memory has other bits than the plain one")


def on_device(host: Comm, ops) -> Comm:
    """The collectives for arrays of these operations."""
    base = NcclComm(host) if ops.name == "cuda" else host
    return with_peers(host, base, ops) if hasattr(ops, "mailbox") else base
