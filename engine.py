"""The step loop: schedule, draft, verify, accept, commit. `Engine` is also the library.

python engine.py --config nano.yaml --prompt "def fibonacci(n):"

engine = Engine(config.load("nano.yaml"))
[result] = engine.generate(["def fibonacci(n):"])

With tensor parallelism, rank 0 has the engine that people use. The others follow: each builds the
same engine on its share of the weights and makes the calls that rank 0's makes (`Order`).
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `main`: Ctrl-C has nothing to tidy up yet

import dataclasses
import logging
import os
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path

import numpy as np

import budget as budgets
import config
import loader
import parallel
import sampling
import spec_decode
from budget import Auto, Choice
from cache import CacheFull, LatentCache
from config import UserError
from drafter import Drafter
from model import Batch, Forward, Model
from reference import ReferenceOps, free_memory
from request import Result, Round, Sequence
from rounds import Rounds
from sampling import SamplingParams, StopRule
from spec_decode import Speculator, Tree, Walk
from tokenizer import Tokenizer

MODES = ("ar", "chain", "tree")
SHARED_MEMORY = "/dev/shm"
# What is not finite is found where tokens are chosen, and said there: no need for NumPy's warnings.
QUIET = np.errstate(over="ignore", invalid="ignore", divide="ignore")
WARM_UP = 256  # tokens of the text on which rounds are measured
# What a rank that is started here runs; `parallel.start` adds its rank and their number.
FOLLOWER = [
    sys.executable,
    "-c",
    "import sys; sys.path.insert(0, sys.argv[1]); import engine; sys.exit(engine.started())",
    str(Path(__file__).resolve().parent),
]


@dataclass(frozen=True)
class Build:
    """Rank 0's engine, for the other ranks to have one like it."""

    settings: config.Config
    device: str
    debug_kernels: bool


@dataclass(frozen=True)
class Order:
    """A call of rank 0's engine, for the engines of the other ranks to make too."""

    method: str
    arguments: tuple


@dataclass(frozen=True)
class Drafted:
    """The trees of a step, and what was chosen for them."""

    choice: Choice
    trees: list[tuple[Sequence, Tree]]


@dataclass(frozen=True)
class Part:
    """One sequence's share of a forward: its tree, or (tree None) a piece of its prompt.

    rows    slice of the batch
    logits  slice of the logits: every node's; of a prompt piece all or the last, if they are needed
    """

    sequence: Sequence
    tree: Tree | None
    rows: slice
    logits: slice
    ends_prompt: bool = False  # its last row decides the request's first token


@dataclass(frozen=True)
class Step:
    """One forward: what stands where, and what came out."""

    batch: Batch
    parts: list[Part]
    forward: Forward


@dataclass(frozen=True)
class Accepted:
    """What one sequence gets of a forward: the walk through its tree (or, on no row, the first
    token after its prompt), and the rows of the logits that decided its tokens."""

    part: Part
    walk: Walk
    logit_rows: list[int]


class Engine:
    """A loaded model that decodes requests, one or many together.

    Every request's tokens and logits are those of plain decoding alone, whatever the mode, the
    neighbours or the moment it was scheduled (README.md: why the bits are equal). `submit` may be
    called from any thread; whoever waits for text drives the steps.
    """

    def __init__(
        self,
        settings: config.Config,
        device: str = "auto",
        *,
        load: bool = True,
        debug_kernels: bool = False,
        comm: parallel.Comm | None = None,
    ):
        """Read and check everything but the weights; then `load` them, unless told not to yet.

        debug_kernels  wait after every kernel, so that one that fails is named
        comm           the ranks to use, for one engine at a time; None: the launcher's, else `load`
                       starts tp.size of them on this host. Of a launcher's only rank 0 comes back.
        """
        if comm is None and (comm := parallel.join()) is not None and comm.rank:
            raise SystemExit(follow(comm))
        tp, generate = settings.tp, settings.model.load == "generate"
        self.rank = comm.rank if comm is not None else tp.only_rank or 0
        where = dict(generate=generate, rank=self.rank, size=tp.size)
        checkpoint = loader.open_checkpoint(settings.model.path, **where)
        self.dims = config.parse_model(
            checkpoint.config_json,
            source=str(checkpoint.directory / "config.json"),
            lora_norm_eps=settings.model.lora_norm_eps,
        )
        draft_checkpoint = draft_dims = None
        if settings.draft.path is not None:
            draft_checkpoint = loader.open_checkpoint(settings.draft.path, **where)
            draft_dims = config.parse_drafter(
                draft_checkpoint.config_json,
                source=str(draft_checkpoint.directory / "config.json"),
            )
        self.settings = settings = config.validate(settings, self.dims, draft_dims)
        if comm is not None and comm.size != tp.size:
            raise UserError(
                f"tp.size: expected {comm.size}, the number of ranks that were started, got "
                f"{tp.size}; use --tp {comm.size}"
            )
        # A checkpoint without a vocabulary still decodes ids; one with a broken one does not.
        self.tokenizer = None
        if os.path.lexists(checkpoint.directory / "tiktoken.model"):
            self.tokenizer = Tokenizer(checkpoint.directory, self.dims.vocab_size)
        self.eos_ids = loader.generation_stop_ids(checkpoint)
        self.plan = loader.plan_target(checkpoint, self.dims, tp=tp, rank=self.rank)
        self.draft_dims, self.draft_plan = draft_dims, None
        if draft_dims is not None:
            self.draft_plan = loader.plan_drafter(
                draft_checkpoint, draft_dims, self.dims, tp=tp, rank=self.rank
            )
        self.waiting: deque[Sequence] = deque()  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.arrivals = 0
        self.autos: dict[int, Auto] = {}  # by the drafter's depth
        self.auto: Auto | None = None  # of them, the one that chooses now
        self.changing = False  # a step or a cancellation is under way, or was interrupted
        self.lock = threading.Lock()
        self.debug_kernels = debug_kernels
        self.ranks, self.comm = comm, None  # `load` brings them together
        index, needed = (0, 1 if tp.only_rank is not None else tp.size)
        if comm is not None:
            index, needed = comm.local_rank, 1
        self.ops = make_ops(device, settings, self.dims, debug_kernels, index, needed)
        if load:
            self.load()

    def load(self, progress: bool = False) -> None:
        """Weights to the device, and an empty cache. What can be wrong with the files was said."""
        self.meet()
        decode, draft_dims = self.settings.decode, self.draft_dims
        if hasattr(self.ops, "check_fit"):
            self.ops.check_fit(self.dims, draft_dims, decode.leaf, self.settings.draft.most)
            self.check_memory()
        else:
            self.check_host_memory()
        common = dict(context=decode.context, span=decode.span)
        self.model = Model(
            self.dims,
            self.weights(self.plan, progress),
            self.ops,
            taps=draft_dims.target_layer_ids if draft_dims else (),
            rank=self.rank,
            tp=self.settings.tp,
            **common,
        )
        self.drafter = draft_dims and Drafter(
            draft_dims, self.weights(self.draft_plan, progress), self.ops, self.model, **common
        )
        self.allocate()
        self.use(self.settings.draft.mode, self.settings.draft.budget)

    def allocate(self) -> None:
        """An empty cache, as the config says, and rounds over it, of which none is recorded; in the
        place of those that were there."""
        decode, draft_dims = self.settings.decode, self.draft_dims
        self.cache = self.rounds = None
        if hasattr(self.ops, "trim"):
            self.ops.trim()
        self.cache = LatentCache(
            self.ops,
            slots=decode.batch,
            n_pages=self.n_pages,
            leaf=decode.leaf,
            layers=self.dims.num_hidden_layers,
            width=self.model.cache_width,
            draft_layers=draft_dims.num_hidden_layers if draft_dims else 0,
            draft_width=self.drafter.cache_width if draft_dims else 0,
        )
        recorded = hasattr(self.ops, "capture") and not self.ops.debug
        self.rounds = Rounds(self) if recorded else None

    @property
    def n_pages(self) -> int:
        """Of the cache."""
        decode = self.settings.decode
        return decode.pages or decode.batch * -(-decode.context // decode.leaf)

    def weights(self, plan: loader.Plan, progress: bool):
        """What a plan calls for, from its files or from the seed."""
        model = self.settings.model
        if model.load == "generate":
            return loader.generate_weights(plan, self.ops, model.seed, progress=progress)
        share = self.shared_reads()
        load = loader.stream_target if plan is self.plan else loader.load_drafter
        return load(plan, progress=progress, share=share)

    def forecast(self) -> dict[str, int]:
        """Bytes that this rank needs on the device: weights, cache, scratch, and what loading needs
        for a time beyond these: a layer as it was read beside the same one packed, and the next."""
        decode, ops = self.settings.decode, self.ops
        nodes = decode.batch * self.settings.draft.most
        if self.settings.draft.budget == config.AUTO:
            # Each number of nodes keeps the arrays of its rounds; together about so much.
            nodes = 6 * budgets.most_rows(decode.batch, self.settings.draft.limit)
        rows, reach = max(decode.prefill_chunk, nodes), decode.context - 1
        if decode.batch > 1:  # two pieces, of which one is a row short, and trees: see schedule
            rows = 2 * decode.prefill_chunk + nodes
        plans = [self.plan, self.draft_plan] if self.draft_plan else [self.plan]
        # The drafter's k and v: beside its q, and all together.
        twice = sum(w.k.bytes + w.v.bytes for plan in plans[1:] for w in plan.weights.layers)
        need = {
            "weights": sum(plan.bytes for plan in plans) + twice,
            "cache": self.cache_values() * ops.act.itemsize,
            "scratch": ops.scratch_bytes(self.dims, rows, nodes, reach, decode.leaf, decode.span),
        }
        loading = 2 * max(self.plan.layer_bytes)
        return need | {"loading": max(0, loading - need["cache"] - need["scratch"])}

    def cache_values(self) -> int:
        """Numbers that this rank's pages hold."""
        draft, width = self.draft_dims, self.dims.kv_lora_rank + self.dims.qk_rope_head_dim
        entry = self.dims.num_hidden_layers * width
        if draft is not None:
            kv_heads = max(1, draft.num_key_value_heads // self.settings.tp.ranks("o_proj"))
            entry += draft.num_hidden_layers * 2 * kv_heads * draft.head_dim
        return self.n_pages * self.settings.decode.leaf * entry

    def check_memory(self) -> None:
        """Raise UserError where the forecast is known not to fit on the device."""
        need, launcher = self.forecast(), self.ops.launcher
        free = launcher.free_bytes()
        if sum(need.values()) > free:
            parts = ", ".join(f"{what} {n / 2**30:.2f} GiB" for what, n in need.items())
            lower = {
                "weights": "use more ranks (tp.size)",
                "loading": "use more ranks (tp.size)",
                "cache": "lower decode.context, decode.batch or decode.pages",
                "scratch": "lower decode.batch, decode.prefill_chunk or draft.budget",
            }[max(need, key=need.get)]
            raise UserError(
                f"{launcher.limits.name}: {free / 2**30:.2f} GiB of memory are free, "
                f"{sum(need.values()) / 2**30:.2f} are needed ({parts}); {lower}"
            )

    def host_bytes(self) -> int:
        """What the CPU backend holds of this rank's weights: dense ones as float32, INT4 as it
        decides."""
        total = 0
        for plan in (self.plan, self.draft_plan):
            for slot in plan.slots if plan else ():
                packed = slot.dtype == np.int32
                widening = 1 if packed else 4 // slot.dtype.itemsize
                total += slot.bytes * (8 if packed and self.ops.unpack else widening)
        return total

    def check_host_memory(self) -> None:
        """Raise UserError where this machine could not hold the weights, or the cache beside them,
        even if it were empty."""
        ranks = self.comm.local_size if self.comm is not None else 1
        need, whole = ranks * self.host_bytes(), os.sysconf("SC_PHYS_PAGES")
        whole *= os.sysconf("SC_PAGE_SIZE")
        has = f"this machine has {whole / 2**30:.2f} GiB of memory, the weights need"
        if need > whole:
            raise UserError(
                f"{has} {need / 2**30:.2f} on a CPU; use a machine with GPUs (--device cuda)"
            )
        tables = self.settings.decode.batch * self.n_pages
        cache = ranks * 4 * (self.cache_values() + tables)  # float32, int32
        if need + cache > whole:
            raise UserError(
                f"{has} {need / 2**30:.2f} on a CPU, the cache {cache / 2**30:.2f}; lower "
                "decode.context, decode.batch or decode.pages"
            )

    def use(self, mode: str, budget: int | str) -> None:
        """Decode with "ar", "chain" or "tree" from now on; nothing but the speed changes. A tree
        with a budget of "auto" is what pays best, round by round; also plain decoding, or the chain
        (budget.py). That is measured the first time, here if nothing is live, else while the first
        text is decoded; it stays for the next time, with what was learned since."""
        numbered = type(budget) is int and 1 <= budget <= config.MOST_NODES
        if mode not in MODES or not (numbered or budget == config.AUTO):
            raise UserError(
                f"mode and budget: expected {', '.join(MODES)} and 1 to {config.MOST_NODES} nodes "
                f"or {config.AUTO}, got {mode!r} and {budget!r}"
            )
        if mode != "ar" and self.drafter is None:
            raise UserError(f"mode {mode}: needs a drafter; state draft.path or use ar")
        self.order("use", mode, budget)
        self.mode, self.auto, limit = mode, None, self.settings.draft.limit
        if mode == "tree" and budget == config.AUTO:
            depth = self.drafter.dims.block_size - 1
            rows = budgets.most_rows(self.settings.decode.batch, limit)
            self.auto = self.autos.setdefault(depth, Auto(depth, limit, rows))
        # Of plain decoding and of a chain the number of nodes is known.
        self.choice = Choice(mode, 1 if budget == config.AUTO else budget)
        new = self.auto is not None and not self.auto.measured
        if new and self.leads and not (self.running or self.waiting):
            self.warm_up()

    def warm_up(self) -> None:
        """Measure the rounds of one text before anybody waits for them; where they are recorded,
        those of a sampled text too, which are others."""
        most = self.drafter.dims.block_size + 1  # tokens: the drafts are not cut short
        n = min(WARM_UP, self.settings.decode.context - most - 1)
        ids = np.random.default_rng(0).integers(0, self.dims.vocab_size, max(n, 1)).tolist()
        for temperature in (0.0,) if self.rounds is None else (0.0, 1.0):
            asked = SamplingParams(temperature=temperature, max_tokens=most, ignore_eos=True)
            with suppress(UserError):  # a cache that is too small for it
                sequence = self.submit(ids, asked)
                try:
                    while not sequence.n_emitted and sequence.finish_reason is None:
                        self.advance(sequence)
                    with self.lock:  # else another thread's steps would go on with this text
                        if sequence in self.ready():
                            self.measure(sequence)
                finally:
                    self.cancel(sequence)

    # -- the other ranks

    def meet(self) -> None:
        """On rank 0: have the other ranks build this engine too. On all: connect the operations."""
        tp, comm = self.settings.tp, self.ranks
        if tp.only_rank is not None:
            self.ops.comm = parallel.Alone(tp.size)
            return
        if comm is None and tp.size > 1:
            comm = parallel.start(tp.size, FOLLOWER)
        if comm is None:
            return
        if comm.rank == 0:
            comm.broadcast(Build(self.settings, self.ops.name, self.debug_kernels))
        self.comm = self.ops.comm = parallel.on_device(comm, self.ops)

    @property
    def leads(self) -> bool:
        """Whether this engine is the one that people use."""
        return self.comm is None or self.rank == 0

    def order(self, method: str, *arguments) -> None:
        """On rank 0: the other ranks make this call too."""
        if self.comm is not None and self.rank == 0:
            self.comm.broadcast(Order(method, arguments))

    def follow(self) -> object:
        """On the others: make the calls of rank 0's engine; returns what rank 0 says after them."""
        while isinstance(said := self.comm.broadcast(), Order):
            getattr(self, said.method)(*said.arguments)
        return said

    def close(self) -> None:
        """End the other ranks; without that they end with this process."""
        if self.comm is not None:
            self.comm.close()

    def shared_reads(self) -> loader.Share | None:
        """Where the ranks of a host pass on what they read for each other: memory of a name new to
        each load. None, and each reads for itself, where rank 0 finds too little room."""
        if self.comm is None:
            return None
        name, need = None, 2 * loader.LANES * loader.CHUNK * self.comm.local_size
        if self.rank == 0:
            with suppress(OSError):
                room = os.statvfs(SHARED_MEMORY)
                if room.f_bavail * room.f_frsize > need:
                    name = f"{SHARED_MEMORY}/kdtree-{uuid.uuid4().hex}"
        name = self.comm.broadcast(name)
        if name is None or self.comm.local_size < 2:
            return None
        return loader.Share(name, self.comm.local_rank, self.comm.local_size)

    # -- the step loop

    @QUIET
    def step(self, choice: Choice | None = None) -> list[Sequence]:
        """One round for all live sequences; returns those that emitted or ended. For one thread:
        where there are several, `advance` takes the lock. choice: rank 0's, on the other ranks.

        Raises DeviceFault where a kernel fails: the engine cannot be used after it.
        """
        self.begin_change()
        try:
            choice = choice or self.choose()
            self.order("step", choice)
            got = self.round(choice)
            self.changing = False
            return got
        except self.ops.faults as error:
            raise self.ops.fault(error, "this step") from error

    def begin_change(self) -> None:
        """Before slots and lines change. Where the last change was interrupted, all live sequences
        go back in line, and will compute the same bits again."""
        if self.changing and self.comm is None:  # of several ranks none goes on
            live = {s.arrival: s for s in (*self.running, *self.waiting)}
            for sequence in live.values():
                sequence.slot = -1
                sequence.finished = time.perf_counter()  # those that go on will say it again
            left = sorted(n for n, s in live.items() if s.finish_reason is None)
            self.running, self.waiting = [], deque(live[n] for n in left)
            if self.rounds is not None:
                self.rounds.flight = None
            self.cache.abandon()
        self.changing = True

    def round(self, choice: Choice) -> list[Sequence]:
        if self.rounds is not None and (got := self.recorded(choice)) is not None:
            return got
        chunks, began = self.schedule(), time.perf_counter()
        trees = self.draft(choice)
        if not trees and not chunks:
            return []
        drafted = self.narrow(choice, trees)
        step = self.verify(drafted.trees, chunks)
        accepted = self.accept(step)
        if not chunks and self.auto is not None and self.auto.narrows and self.leads:
            self.auto.saw(drafted.choice, len(drafted.trees), time.perf_counter() - began)
        return self.commit(step, accepted)

    def recorded(self, choice: Choice) -> list[Sequence] | None:
        """The step as a recorded round on the device (rounds.py), where only decoding is due."""
        more = not (self.waiting and self.cache.free_slots)
        idle = self.rounds.flight is None
        if idle and not (more and self.running and self.rounds.fit(self.running)):
            return None
        try:
            done = self.rounds.step(self.running, choice, more)
            if done is None:
                return None
            if self.auto is not None and self.leads:
                self.auto.heard(done)
            for sequence, tokens, logits in done.emitted:
                taken = sequence.emit(tokens, logits)
                sequence.steps += 1
                self.cache.lengths[sequence.slot] += taken
                self.cache.remember(sequence.slot, sequence.tokens)
                if sequence.finish_reason is not None:
                    self.retire(sequence)
        except BaseException:
            self.rounds.flight = None  # it goes on from tokens that were not, or not all, taken
            raise
        return [sequence for sequence, _, _ in done.emitted]

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Room for what runs, admission by arrival, prompt pieces: (sequence, rows of its piece).

        Pieces end at absolute multiples of prefill_chunk; one forward takes about one such piece,
        and never as many rows as two have.
        """
        for sequence in list(self.running):
            self.make_room(sequence)
        while self.waiting and self.cache.free_slots and self.admit(self.waiting[0]):
            self.waiting.popleft()
        size, chunks = self.settings.decode.prefill_chunk, []
        room = size
        for sequence in self.running:
            done = self.committed(sequence)
            n = min(sequence.to_prefill, (done // size + 1) * size) - done
            if n > 0 and room > 0:
                chunks.append((sequence, n))
                room -= n
        return chunks

    def room(self, sequence: Sequence) -> int:
        """Tokens that the cache must hold for the sequence to take its next verify step. Admission
        asks for as much, so that nobody is admitted only to be put back at once."""
        most = self.drafter.dims.block_size if self.drafter is not None else 1
        return min(sequence.to_prefill + most, sequence.longest)

    def make_room(self, sequence: Sequence) -> None:
        """Pages for the sequence's next step. Where they are short, the youngest gives its own back
        and will compute the same bits again later."""
        while sequence.slot >= 0:
            try:
                return self.cache.reserve(sequence.slot, self.room(sequence))
            except CacheFull:
                youngest = self.running[-1]
                self.waiting.appendleft(youngest)  # before it leaves: an interrupt loses nobody
                self.running.pop()
                self.cache.free(youngest.slot)
                youngest.slot = -1

    def admit(self, sequence: Sequence) -> bool:
        """Give the sequence a slot, the known pages of its prefix, and pages for the rest."""
        # The last prompt token's logits are needed, and with echo those of all.
        most = 0 if sequence.echo else sequence.to_prefill - (sequence.n_emitted == 0)
        slot = self.cache.admit(sequence.tokens, most)
        try:
            self.cache.reserve(slot, self.room(sequence))
        except CacheFull:
            self.cache.free(slot)
            return False
        self.running.append(sequence)
        sequence.slot = slot
        return True

    def ready(self) -> list[Sequence]:
        """Sequences whose text but for the root is in the cache."""
        return [s for s in self.running if s.n_emitted and self.committed(s) == s.to_prefill]

    def choose(self) -> Choice:
        """On rank 0: what the next round drafts. With "auto" its costs are measured before."""
        if self.auto is None:
            return self.choice
        ready = self.ready()
        if not ready:
            return self.auto.choices[0]
        rounds = None if self.rounds is None or self.rounds.failed else self.rounds
        if not self.auto.measured and len(ready) == len(self.running):
            self.measure(ready[0])
        if rounds is None:
            return self.auto.choose(ready)
        missing = rounds.missing(self.auto.offered(), ready)
        return self.auto.choose(ready, dict.fromkeys(missing, rounds.recording))

    def measure(self, sequence: Sequence) -> None:
        """Time the rounds that "auto" chooses among, from where this sequence stands."""
        recorded = self.rounds is not None and not self.rounds.failed
        self.auto.measure(lambda choice: self.seconds(choice, sequence.arrival), recorded)

    @QUIET
    def seconds(self, choice: Choice, arrival: int) -> float | None:
        """How long a round of the one sequence of this number takes; None: pages are short."""
        self.order("seconds", choice, arrival)
        one = [s for s in self.running if s.arrival == arrival]
        if self.rounds is not None and self.rounds.fit(one):
            return self.rounds.seconds(choice, one)
        began = time.perf_counter()
        trees = self.draft(choice, one)
        if choice.scored:
            [(_, tree)] = trees
            trees = [(*one, budgets.cut(tree, choice.budget, self.auto.depth))]
        self.accept(self.verify(trees, []))
        return time.perf_counter() - began

    def draft(
        self, choice: Choice, some: list[Sequence] | None = None
    ) -> list[tuple[Sequence, Tree]]:
        """A tree for every sequence that decodes, or for some; larger ones than the choice says
        where they are wanted."""
        ready = self.ready() if some is None else some
        if choice.mode == "ar" and not choice.scored:
            return [(s, spec_decode.single(s.tokens[-1])) for s in ready]
        mode, nodes = choice.mode, choice.budget
        if choice.scored:
            mode, nodes = "tree", choice.scored
        trees = Speculator(self.drafter, self.ops, mode, nodes).propose(
            roots=[s.tokens[-1] for s in ready],
            slots=[s.slot for s in ready],
            params=[s.params for s in ready],
            limits=[s.rule.max_tokens - s.n_emitted - 1 for s in ready],
            cache=self.cache,
        )
        return list(zip(ready, trees, strict=True))

    def narrow(self, choice: Choice, trees: list[tuple[Sequence, Tree]]) -> Drafted:
        """The trees to verify: where larger ones were drafted, they are evidence (Auto), and as
        much of them is verified as pays."""
        if not choice.scored or not trees:
            return Drafted(choice, trees)
        sequences, larger = map(list, zip(*trees, strict=True))
        if self.leads:
            claims = self.auto.learn(sequences, larger)
            if self.auto.narrows and choice.mode != "ar":
                choice = self.auto.narrow(sequences, claims)
        if self.comm is not None:
            choice = self.comm.broadcast(choice)
        depth = self.auto.depth
        trees = [(s, budgets.cut(tree, choice.budget, depth)) for s, tree in trees]
        return Drafted(choice, trees)

    def verify(self, trees, chunks) -> Step:
        """One forward over all trees and prompt pieces."""
        batches, parts, row, logit_rows = [], [], 0, []

        def add(sequence, tree, rows: Batch, decided, ends_prompt=False) -> None:
            nonlocal row
            logits = slice(len(logit_rows), len(logit_rows) + len(decided))
            parts.append(Part(sequence, tree, slice(row, row + len(rows)), logits, ends_prompt))
            batches.append(rows)
            logit_rows.extend(row + i for i in decided)
            row += len(rows)

        for sequence, tree in trees:
            rows = spec_decode.tree_rows(tree, sequence.slot, self.committed(sequence), row)
            add(sequence, tree, rows, range(len(tree)))
        for sequence, n in chunks:
            done = self.committed(sequence)
            ids = sequence.tokens[done : done + n]
            ends = not sequence.n_emitted and done + n == len(sequence.prompt)
            decided = range(0 if sequence.echo else n - 1, n) if ends or sequence.echo else ()
            add(
                sequence,
                None,
                spec_decode.prompt_rows(ids, sequence.slot, done, row),
                decided,
                ends,
            )
        batch = spec_decode.concatenate(batches)
        forward = self.model.forward(batch, self.cache, np.asarray(logit_rows, np.int32))
        return Step(batch, parts, forward)

    def accept(self, step: Step) -> list[Accepted]:
        """The target's own tokens: a walk for every tree, the first token of a finished prompt."""
        deciding = [p for p in step.parts if p.tree is not None or p.ends_prompt]
        rows, positions, params, paths = [], [], [], []
        for part in deciding:
            s, n = part.sequence, len(part.tree) if part.tree else 1
            rows.append(range(part.logits.stop - n, part.logits.stop))
            positions.append(step.batch.positions[part.rows.stop - n : part.rows.stop] + 1)
            params += [s.params] * n
            paths += spec_decode.paths(part.tree, s.path, s.params) if part.tree else [s.path]
        if not deciding:
            return []
        logits = step.forward.logits
        decided = np.concatenate(rows).astype(np.int32)
        if len(decided) < len(logits):  # echo asks for logits that decide nothing
            logits = self.ops.take_rows(logits, self.ops.index(decided))
        choices = self.ops.choose(logits, np.concatenate(positions), params, paths)
        choices = self.ops.download(self.ops.decided(choices))
        accepted = []
        for part, where in zip(deciding, rows, strict=True):
            mine, choices = choices[: len(where)], choices[len(where) :]
            walk = spec_decode.walk(part.tree, mine) if part.tree else Walk([], [int(mine[0])])
            accepted.append(Accepted(part, walk, [where[node] for node in walk.rows or [0]]))
        return accepted

    def commit(self, step: Step, accepted: list[Accepted]) -> list[Sequence]:
        """Extend texts, move accepted rows into the cache, end what has ended."""
        moved = []
        wanted = any(part.sequence.wants_logits for part in step.parts)
        logits = self.ops.download(step.forward.logits) if wanted else None
        for part in step.parts:
            if part.tree is None:
                if part.sequence.echo:
                    self.score(part.sequence, logits[part.logits])
                moved.append((part.sequence, list(range(part.rows.start, part.rows.stop))))
        for a in accepted:
            sequence = a.part.sequence
            taken = sequence.emit(a.walk.tokens, logits[a.logit_rows] if wanted else None)
            if a.part.tree is not None:
                sequence.steps += 1
                if sequence.keep_rounds:
                    sequence.rounds.append(Round(a.part.tree, a.walk))
                moved.append((sequence, [a.part.rows.start + n for n in a.walk.rows[:taken]]))
        self.store(step, [(s, rows) for s, rows in moved if rows])
        changed = [a.part.sequence for a in accepted]
        for sequence in changed:
            if sequence.finish_reason is not None:
                self.retire(sequence)
        return changed

    def store(self, step: Step, moved: list[tuple[Sequence, list[int]]]) -> None:
        """Commit rows of several sequences: target entries, then the drafter's context."""
        if not moved:
            return
        rows = [(sequence.slot, some) for sequence, some in moved]
        placed = self.cache.commit(rows, step.forward.entries)
        if self.drafter is not None:
            self.drafter.extend(step.forward.taps, placed, self.cache)
        for sequence, _ in moved:
            # A chosen token proves its whole context finite; before that nobody may rely on it.
            if sequence.n_emitted:
                self.cache.remember(sequence.slot, sequence.tokens)

    def committed(self, sequence: Sequence) -> int:
        """Tokens of the sequence that are in the cache."""
        return int(self.cache.lengths[sequence.slot])

    def score(self, sequence: Sequence, logits: np.ndarray) -> None:
        """Log-probabilities of the prompt tokens that follow these rows of the prompt."""
        done = self.committed(sequence)
        following = np.asarray(sequence.prompt[done + 1 : done + 1 + len(logits)], np.int64)
        logits = logits[: len(following)]
        fine = np.isfinite(logits.max(axis=1))  # the others stay NaN
        scored = sampling.log_softmax_top(logits[fine], following[fine], 0)
        # By position: a request that was put back comes here again, with the same bits.
        sequence.prompt_logprobs[done : done + len(following)][fine] = scored.chosen

    def retire(self, sequence: Sequence) -> None:
        """Give back what an ended or cancelled sequence held."""
        sequence.finished = time.perf_counter()
        if sequence.slot >= 0:
            self.cache.free(sequence.slot, sound=sequence.finish_reason != "error")
            sequence.slot = -1
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    # -- requests

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        id: object = None,
        keep_logits: bool = False,
        keep_rounds: bool = False,
        echo: bool = False,
    ) -> Sequence:
        """Check a request and put it in line. Raises UserError; then nothing has changed.

        prompt  text, or token ids;  params  default: what the config's decode section asks for
        keep_logits, keep_rounds, echo  what the Result is to hold beside text and ids
        """
        params = params or default_params(self.settings)
        ids, limit = self.check(prompt, params)
        params = params if params.greedy else params.with_seed()
        rule = dataclasses.replace(StopRule.of(params, self.eos_ids), max_tokens=limit)
        with self.lock:
            sequence = self.enqueue(ids, params, rule, keep_rounds, echo)
            sequence.id, sequence.keep_logits = id, keep_logits
        return sequence

    def enqueue(self, ids, params, rule, keep_rounds: bool, echo: bool) -> Sequence:
        """Put a checked request in line."""
        self.order("enqueue", ids, params, rule, keep_rounds, echo)
        self.arrivals += 1
        sequence = Sequence.start(
            ids,
            params,
            rule,
            self.arrivals,
            self.tokenizer,
            id=None,
            keep_rounds=keep_rounds,
            echo=echo,
        )
        self.waiting.append(sequence)
        return sequence

    def check(self, prompt: str | list[int], params: SamplingParams) -> tuple[list[int], int]:
        """The prompt's ids and how many tokens it may emit. Raises UserError for parameters out of
        range and a prompt that can never fit; needs no weights."""
        params.validate(self.dims.vocab_size)
        try:
            ids = self.encode(prompt) if isinstance(prompt, str) else list(map(index, prompt))
        except TypeError:
            raise UserError("prompt: expected a text or a list of token ids") from None
        if not ids:
            raise UserError("prompt: expected at least one token, got none; give some text")
        top = self.dims.vocab_size - 1
        for token in ids:
            if not 0 <= token <= top:
                raise UserError(f"prompt: token id {token} is outside the vocabulary, 0 to {top}")
        context = self.settings.decode.context
        if len(ids) >= context:
            raise UserError(
                f"prompt: {len(ids)} tokens do not fit; decode.context is {context} and one "
                "must be left to emit; shorten the prompt or raise --context"
            )
        limit = min(params.max_tokens or context, context - len(ids))
        leaf = self.settings.decode.leaf
        need = -(-(len(ids) + limit - 1) // leaf)
        if need > self.n_pages:
            raise UserError(
                f"prompt: {len(ids)} tokens and {limit} more need {need} pages of "
                f"{leaf}, the cache has {self.n_pages}; lower max_tokens or raise decode.pages"
            )
        return ids, limit

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; control strings in it are text like any other."""
        return self.vocabulary().encode(text)

    def encode_chat(self, messages: list[dict], thinking: bool = True) -> list[int]:
        """Ids of a conversation, by the checkpoint's own template."""
        return self.vocabulary().encode_chat(messages, thinking=thinking)

    def vocabulary(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(
                f"{self.settings.model.path}: has no tiktoken.model, so text cannot be read; give "
                "prompts as token ids (prompt_ids in a line of --prompts)"
            )
        return self.tokenizer

    def cancel(self, sequence: Sequence) -> None:
        """End a request now, keeping what it has emitted."""
        with self.lock:
            if sequence.finish_reason is None or sequence.slot >= 0:
                self.drop(sequence.arrival)

    def drop(self, arrival: int) -> None:
        """End the live request of this number."""
        self.order("drop", arrival)
        self.begin_change()
        live = (s for s in (*self.running, *self.waiting) if s.arrival == arrival)
        if (sequence := next(live, None)) is not None:  # else another engine's
            # An interrupted step may have ended the text and not got to giving back its slot.
            sequence.finish_reason = sequence.finish_reason or "cancelled"
            self.retire(sequence)
        self.changing = False

    def advance(self, sequence: Sequence) -> None:
        """One step, unless another thread has meanwhile ended the sequence."""
        with self.lock:
            if sequence.finish_reason is None:
                self.step()

    def generate(
        self, prompts: Iterable[str | list[int]], params: SamplingParams | None = None, **options
    ) -> list[Result]:
        """Decode prompts (texts or id lists) together; results in the order of the prompts.
        Raises UserError where one of them cannot run; then none has."""
        if isinstance(prompts, str):  # else a text would be read as one prompt a character
            raise UserError("prompts: expected a list, got one text; put it in a list")
        sequences: list[Sequence] = []
        try:
            for prompt in prompts:
                sequences.append(self.submit(prompt, params, **options))
            for sequence in sequences:
                while sequence.finish_reason is None:
                    self.advance(sequence)
        finally:  # all or none: whatever went wrong, nothing of this call goes on
            for sequence in sequences:
                self.cancel(sequence)
        return [sequence.result() for sequence in sequences]

    def stream(self, sequence: Sequence) -> Iterator[str]:
        """Pieces of a submitted request's text as they are accepted; ends with the request."""
        sent = 0
        try:
            while True:
                ended = sequence.finish_reason is not None
                pieces = sequence.pieces[sent:]
                sent += len(pieces)
                yield from pieces
                if ended:
                    return
                self.advance(sequence)
        finally:  # the reader may leave early; what it asked for then ends with it
            self.cancel(sequence)


def default_params(settings: config.Config) -> SamplingParams:
    """The sampling that the config's decode section asks for."""
    d = settings.decode
    return SamplingParams(
        temperature=d.temperature,
        top_p=d.top_p,
        top_k=d.top_k,
        seed=d.seed,
        max_tokens=d.max_tokens,
    )


def make_ops(
    device: str, settings: config.Config, dims: config.Model, debug=False, index=0, needed=1
):
    """The operations of "cpu", "cuda", "emulate" (the kernels as host code), or "auto": a GPU where
    there is one, else the CPU, said in one line. debug: see ops.CudaOps; index, needed: see
    launchers.CudaLauncher."""
    activation = settings.kernels.activation
    if device != "cpu":
        import ops  # with these, CuPy: nothing else may need it
        from launchers import CudaLauncher, EmulatorLauncher

        try:
            emulated = device == "emulate"
            launcher = EmulatorLauncher() if emulated else CudaLauncher(index, needed)
            kinds = "linear", "moe", "attention"
            chosen = {kind: getattr(settings.kernels, kind) for kind in kinds}
            return ops.CudaOps(activation, launcher=launcher, debug=debug, **chosen)
        except UserError as error:
            if device != "auto":
                raise
            reason = str(error).removeprefix("--device cuda: ").partition(";")[0]
            print(f"[decoding on the CPU: {reason}]", file=sys.stderr)
    # INT4 experts unpacked to fp32 once, where that leaves half of the free memory.
    moe_layers = sum(layer.kind == "moe" for layer in dims.layers)
    expert = 3 * dims.moe_intermediate_size * dims.hidden_size * 4
    free = free_memory()
    unpack = moe_layers * dims.n_routed_experts * expert < free // 2
    return ReferenceOps(activation, unpack=unpack)


def follow(comm: parallel.Comm) -> int:
    """What a rank other than 0 does: the engines that rank 0 has, until it ends. Returns the exit
    status; whatever fails here ends all ranks, with rank 0 saying why."""
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle
    logging.disable(logging.WARNING)  # what there is to say of the files, rank 0 says
    try:
        said = comm.broadcast()
        while isinstance(said, Build):
            said = Engine(
                said.settings, said.device, debug_kernels=said.debug_kernels, comm=comm
            ).follow()
        comm.close()
        return said.status
    except (UserError, config.DeviceFault, parallel.RankFailed) as error:
        comm.fail(str(error))
    except BaseException:
        comm.fail(traceback.format_exc().rstrip())


def started() -> int:
    """The whole of a rank that `parallel.start` has started."""
    return follow(parallel.attach(*map(int, sys.argv[-2:])))


def main(argv: list[str] | None = None) -> int:
    """The command line (commands.py), under the name that people type."""
    import commands  # here, because it stands on this module

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # since this file's first lines
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        comm = parallel.join()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if comm is not None and comm.rank:
        return follow(comm)
    status = 1
    try:
        status = commands.main(argv)
        return status
    finally:
        if comm is not None:
            comm.close(status)


if __name__ == "__main__":
    import engine  # under its own name, so that every class of it is there once

    code = engine.main()
    sys.stdout.flush()
    if code == config.DEVICE_FAULT:
        os._exit(code)  # nothing of a GPU that has failed can be freed, and trying prints errors
    sys.exit(code)
