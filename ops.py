"""The operations on a GPU: compile `kernels*.cu`, check, cast, launch. Sole owner of device code,
with `ops_mma.py` for what tensor cores do.

`CudaOps` has the names and signatures of `reference.ReferenceOps`; what an operation means, and
where it rounds, is written there. Arrays live where the launcher (launchers.py) keeps them.
bfloat16 activations are stored as bfloat16.

The files are cut at their banners. Every section is compiled alone behind the prelude (the first),
so an edit recompiles one section, and a source holds all that its result depends on (nothing is
included): the compile cache needs no other key.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import config
import reference
import sampling
from config import DeviceFault, UserError
from launchers import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT32_MAX,
    THREADS,
    UINT64,
    WARPS,
    Captured,
    CudaLauncher,
    Defines,
    Limits,
    ceil,
)
from ops_mma import (
    COLUMN_TILES,
    MANY_FROM,
    MEETING_BYTES,
    MEETINGS,
    PARTS_BYTES,
    ROUTER_PARTS,
    SHARES,
    WORK_ROWS,
    TensorCoreAttention,
    TensorCoreKernels,
    TensorExperts,
    TensorHeads,
    TensorMatrix,
    TensorMlp,
    attention_defines,
    many_bytes,
    mma_needs,
    parts_of,
)
from reference import DraftRows, Int4Weight
from tiles import Tiles

FILES = (
    "kernels.cu",
    "kernels_decode.cu",
    "kernels_gemm.cu",
    "kernels_moe.cu",
    "kernels_attention.cu",
    "kernels_peer.cu",
)
HERE = Path(__file__).resolve().parent
OPTIONS = ("-std=c++17", "--fmad=false")  # no contraction: it changes bits between kernels (R5)
ROWS = 8  # rows of x that a warp takes together
ROW_BLOCKS = 4  # that share a wide row of a norm, as a cluster
HEADS = 4  # heads of one row that an attention block takes together
SHARED_DEFAULT = 48 * 1024  # dynamic shared bytes that a kernel has without asking
# Values of a sum across ranks: up to where one shot is faster, by the number of ranks (measured for
# two on H200, reckoned from that for more); at most in one shot, for all others together; in two.
ONE_SHOT = {2: 40 * 7168, 4: 8 * 7168, 8: 3 * 7168}
MOST_IN_ONE_SHOT, MOST_IN_TWO_SHOTS = 1 << 19, 1 << 20
MAX_PEER_BLOCKS = 256  # grid of these: flags are laid out for so many
MAX_SPAN_BLOCKS = 64  # grid of the span loop; a block takes every so-many-th span
REQUEST = np.dtype(  # struct Request of the kernels
    [("seed", "u8"), ("top_p", "u8"), ("min_mass", "u8"), ("temperature", "f4"), ("top_k", "i4")]
)
TYPES = {FLOAT32: "float", BFLOAT16: "bf16"}  # the kernels' names
# ---- source ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """One operation's part of a source file; `line` is where its text starts."""

    name: str
    file: str
    line: int
    text: str

    def source(self, prelude: Section) -> str:
        """What is compiled. Errors carry the file's own line numbers."""
        parts = (prelude,) if self.name == prelude.name else (prelude, self)
        return "".join(f'#line {part.line} "{part.file}"\n{part.text}' for part in parts)


def read_sections(directory: Path = HERE) -> dict[str, Section]:
    """The banners `// ==== name ====` of all kernel files, in order; "prelude" is the first."""
    sections: dict[str, Section] = {}
    for file in FILES:
        path = directory / file
        if not path.exists():
            continue
        lines = path.read_text().splitlines(keepends=True)
        banners = [
            (i, match[1])
            for i, line in enumerate(lines)
            if (match := re.fullmatch(r"// ==== (\w+) ====\n", line))
        ]
        ends = [i for i, _ in banners[1:]] + [len(lines)]
        for (begin, name), end in zip(banners, ends, strict=True):
            if name in sections:
                raise UserError(f"{file}:{begin + 1}: section {name} is there twice; rename one")
            sections[name] = Section(name, file, begin + 2, "".join(lines[begin + 1 : end]))
    if "prelude" not in sections:
        raise UserError(
            f"{directory / FILES[0]}: expected a banner // ==== prelude ====, found none"
        )
    return sections


def defines_of(activation: str, extra: Defines = ()) -> tuple[str, ...]:
    """-D options: the tile constants owned here, the activation type, a section's own."""
    values = {"THREADS": THREADS, "ROWS": ROWS, "ACTIVATION_BF16": int(activation == "bfloat16")}
    return tuple(f"-D{name}={value}" for name, value in (values | dict(extra)).items())


def norm_defines(width: int, clusters: bool) -> Defines:
    """-D of the rms_norm section, for rows of this width: eights that a thread holds, blocks that
    share a row where the device has clusters."""
    blocks = ROW_BLOCKS if clusters and width > 8 * THREADS else 1
    return (("CHUNKS", ceil(width, 8 * THREADS * blocks)), ("BLOCKS", blocks))


def attention_shared_bytes(key: int, leaf: int) -> int:
    """sizeof(Shared) of the attention section."""
    return -(-(HEADS * (key + 2 * leaf + 1) * 4) // 8) * 8 + leaf * 8


# Of the tokens section: columns of a row that a block takes, bins and listed keys of a filtered
# row, the most keys of which the k largest are found at once.
PART, BINS, LISTED, FOUND = 4096, 1024, 16384, 512
TOKEN_DEFINES: Defines = (
    ("PART", PART), ("BINS", BINS), ("LISTED", LISTED), ("FOUND", FOUND),
)  # fmt: skip
RUNS = PART // 128  # of columns whose largest is kept


# Dynamic shared memory of every kernel that asks for some, by the size that decides it.
SHARED_BYTES: dict[str, Callable[..., int]] = {
    "latent_query": lambda nope: 4 * ROWS * nope,
    "latent_spans": attention_shared_bytes,
    "block_spans": attention_shared_bytes,
    "route": lambda experts, top_k: 8 * experts + 12 * top_k + 4 * WARPS + 4,
    "sort_pairs": lambda: 8 * THREADS,
    "log_softmax_top": lambda k: 8 * k,
    "penalise_paths": lambda depth: 4 * max(depth, 1),
    "build_trees": lambda budget, depth, width: 16 * budget + 8 * depth * width,
    **dict.fromkeys(("block_inputs", "put_context"), lambda head_dim: 4 * head_dim),
}


# What to change where a kernel does not fit; else decode.leaf.
INSTEAD = {
    **dict.fromkeys(("build_trees", "log_softmax_top"), "lower draft.budget"),
    **dict.fromkeys(("linear_mma", "gate_up_mma"), "use kernels.linear: simple"),
    **dict.fromkeys(("expert_gate_up_mma", "expert_down_mma"), "use kernels.moe: simple"),
}
# Take fewer rows where there is less room; attention gives way to the simple kernels at last.
ADAPTIVE = (
    "linear_mma", "gate_up_mma", "expert_down_mma", "expert_gate_up_wide", "expert_down_wide",
    "latent_spans_mma", "block_spans_mma",
)  # fmt: skip


TENSOR = ("tensor_linear", "tensor_experts", "tensor_attention")  # of CudaOps


def shared_needs(
    model: config.Model,
    drafter: config.Drafter | None,
    leaf: int,
    budget: int,
    *,
    tensor_linear: bool = False,
    tensor_experts: bool = False,
    tensor_attention: bool = False,
) -> dict[str, int]:
    """Dynamic shared bytes of every kernel that needs some, for this model, leaf and tree; of
    ADAPTIVE ones the least. Without tensor parallelism, which makes sums shorter only."""
    width = model.kv_lora_rank + model.qk_rope_head_dim
    depth = 1 if drafter is None else drafter.block_size - 1
    sizes = {
        "latent_query": (model.qk_nope_head_dim,),
        "latent_spans": (width, leaf),
        "route": (model.n_routed_experts, model.num_experts_per_tok),
        "sort_pairs": (),
        "log_softmax_top": (max(budget, sampling.MAX_LOGPROBS),),
        "penalise_paths": (depth,),
        "build_trees": (budget, depth, budget),
    }
    if drafter is not None:
        sizes["block_spans"] = (drafter.head_dim, leaf)
        sizes |= dict.fromkeys(("block_inputs", "put_context"), (drafter.head_dim,))
    needs = {kernel: SHARED_BYTES[kernel](*given) for kernel, given in sizes.items()}
    return needs | mma_needs(model, tensor_linear, tensor_experts, tensor_attention)


@dataclass(frozen=True)
class Launch:
    """One launch as it went to the device; `function` is the kernel that ran."""

    section: str
    kernel: str
    grid: tuple[int, int, int]
    args: tuple
    shared_bytes: int
    defines: Defines
    function: object
    threads: int


def that_ran(launches: list[Launch]) -> list[Launch]:
    """Of what was launched while a round was recorded: recording runs it before, and those launches
    have run, on arrays that stay. What was only recorded has arrays that nothing was written to."""
    half = len(launches) // 2
    names = [launch.kernel for launch in launches]
    return launches[:half] if names[:half] == names[half:] else launches


# ---- weights and plans -------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A weight [out, in], or a stack [parts, out, in], in the published layout.

    format  the kernels' WEIGHT: DenseF32, DenseBf16, or Int4F32, Int4Bf16 by the type of the scales
    data    [parts, out, in], or int32 [parts, out, in / 8];  scales: [parts, out, in / group]
            (of a dense weight `data` again: never read)
    leaves  parts of the sum over K that join pairwise;  row_cut: also across ranks
    """

    format: str
    data: object
    scales: object
    group: int
    parts: int
    out_features: int
    in_features: int
    leaves: int = 1
    row_cut: bool = False

    @property
    def defines(self) -> Defines:
        return (("WEIGHT", self.format),)


@dataclass(frozen=True)
class LatentInputs:
    """q_a and kv_a; one matrix of both (`joined`) where tensor cores take them, else two."""

    joined: object
    q_a: object
    kv_a: object
    q_lora: int
    width: int  # latent + rope


@dataclass(frozen=True)
class BlockInputs:
    """The drafter's q, k and v as one matrix: rows of queries, of keys, and as many of values."""

    joined: Matrix | TensorMatrix
    q_rows: int
    kv_rows: int


@dataclass(frozen=True)
class Mlp:
    """Gate, up and down of E experts (E = 1: one MLP); the width falls in `leaves` parts."""

    gate: Matrix
    up: Matrix
    down: Matrix
    leaves: int


@dataclass(frozen=True)
class Heads:
    """kv_b as it is, [H, nope + v, latent]: absorb_q reads the first rows of a head, absorb_v the
    others."""

    data: object
    heads: int
    nope: int
    v: int
    latent: int

    @property
    def defines(self) -> Defines:
        return (("TABLE", TYPES[self.data.dtype]),)


@dataclass(frozen=True)
class AttentionPlan:
    """What latent_attention needs to know of the rows, in device memory.

    positions int32 [T];  sequence int32 [T] (-1: filler);  lengths int32 [slots]
    tables    int32 [slots, max_pages]
    ancestors int32 [T, depth]  row that holds position length + d of a row's own path, or -1
    reach     no row's position is beyond it (host; sizes the grid and the scratch)
    work      what attention on tensor cores made of it, by its settings (AttentionWork)
    """

    positions: object
    sequence: object
    lengths: object
    tables: object
    ancestors: object
    leaf: int
    reach: int
    work: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Mailbox:
    """What a rank's part of push_sum and push_sum_slices needs; kernels_peer.cu says how they meet.

    lines     uint64 [ranks], where each rank's area for sums in one shot is, in this process
    slices    the same of its area for sums in two shots
    turns     uint32 [2, 2], of each kind: the number of the next turn, blocks that have come (0)
    late      uint64 [1] of the host's: the ranks that have not come, when a kernel has failed
    said      `late` as the host reads it
    blocks    grids have no more, on any rank
    patience  nanoseconds
    """

    rank: int
    size: int
    lines: object
    slices: object
    turns: object
    late: object
    said: np.ndarray
    blocks: int
    patience: int

    @property
    def short(self) -> int:
        """Up to so many values one shot is faster."""
        return ONE_SHOT[self.size]


def _share_of(values: int, size: int) -> int:
    """Of values that a rank sends to the others together, what each gets."""
    return values // (size - 1) // 32 * 32


def _flag_bytes(size: int) -> int:
    return 2 * 2 * size * 4 * MAX_PEER_BLOCKS


def mailbox_bytes(size: int) -> tuple[int, int]:
    """Of a rank's two areas, among `size`: lines of 8 bytes a value; flags and values."""
    lines = 2 * size * 8 * _share_of(MOST_IN_ONE_SHOT, size)
    return lines, _flag_bytes(size) + 2 * 2 * 4 * MOST_IN_TWO_SHOTS


@dataclass(frozen=True)
class Penalties:
    """What penalties need of every cache slot, on the device (see penalise_paths in the kernels).

    counts int32 [slots, V];  biases fp32 [slots, V];  stops int32 [slots, n]
    values fp32 [slots, 3];  emitted, min_tokens int32 [slots]
    """

    counts: object
    biases: object
    stops: object
    values: object
    emitted: object
    min_tokens: object


@dataclass(frozen=True)
class Trees:
    """Draft trees of B sequences on the device (spec_decode.Tree): [B, budget], sizes int32 [B]."""

    token_ids: object
    parents: object
    depths: object
    scores: object
    sizes: object


@dataclass(frozen=True)
class TreeRows:
    """model.Batch of trees, int32 [T] each; first int32 [B]: the row of each root."""

    token_ids: object
    positions: object
    sequence: object
    parent: object
    first: object


@dataclass(frozen=True)
class Walks:
    """Accepted paths of B trees; lists int32 [B, depth + 1], beyond a path's end -1 (positions: 0).

    rows, slots, positions  accepted rows, their cache slot and position: what `put_entries` takes
    tokens                  emitted; the last of each is in `roots` too
    counts int32 [B]        accepted rows
    """

    rows: object
    slots: object
    positions: object
    tokens: object
    counts: object
    roots: object


@dataclass(frozen=True)
class _Parts:
    """What the kernels of `sample` hand on, on the device (see their contracts)."""

    parts: int
    tokens: object
    peaks: object
    masses: object
    counts: object
    listed: object


# ---- the operations ----------------------------------------------------------------------------


class CudaOps(TensorCoreKernels, TensorCoreAttention):
    """The operations of `reference.ReferenceOps` by the kernels of `FILES`.

    activation  "float32" or "bfloat16"
    comm        joins the leaf sums of several ranks (parallel.Comm); None for one rank
    launcher    CudaLauncher or EmulatorLauncher
    linear, moe, attention "simple" or "tensor_core": kernels of dense products, of INT4 experts and
                of attention, where the shape allows; None: tensor cores for bfloat16. fp32
                activations are always simple
    poison      new buffers are filled with NaN: what a kernel forgot to write then shows
    debug       waits after every launch, so that a fault names its operation; nothing is recorded
    listener    called with every Launch, after it
    directory   of the kernel files
    """

    def __init__(
        self,
        activation: str = "float32",
        comm=None,
        launcher=None,
        *,
        linear: str | None = None,
        moe: str | None = None,
        attention: str | None = None,
        poison: bool = False,
        debug: bool = False,
        directory: Path = HERE,
    ):
        self.activation, self.comm = activation, comm
        self.launcher = launcher or CudaLauncher()
        self.name = self.launcher.name
        self.poison, self.debug = poison, debug
        self.act = BFLOAT16 if activation == "bfloat16" else FLOAT32
        self.tensor_linear, self.tensor_experts, self.tensor_attention = (
            self.act == BFLOAT16 and asked != "simple" for asked in (linear, moe, attention)
        )
        self.directory, self.sections = directory, read_sections(directory)
        self._functions: dict[tuple, object] = {}
        self._modules: dict[tuple, object] = {}
        self._counted: dict[int, object] = {}
        self.tiles = Tiles(self.launcher.limits)
        self.arrived = self.launcher.upload(np.zeros(MEETINGS, np.int32))  # see wide_mma
        self.block_maps: dict[tuple[int, int, int], object] = {}  # see block_map
        self.listener: Callable[[Launch], None] | None = None
        self.mail: Mailbox | None = None

    def alone(self) -> CudaOps:
        """The same operations for what every rank holds whole: nothing is joined across ranks."""
        twin = copy.copy(self)
        twin.comm = None
        return twin

    def decided(self, array):
        """Rank 0's draft candidates or chosen tokens, on every rank: rank 0 decides."""
        return array if self.comm is None else self.comm.share(array)

    # -- compile and launch

    def _function(self, section: str, kernel: str, defines, shared_bytes: int):
        key = (section, kernel, defines, shared_bytes if shared_bytes > SHARED_DEFAULT else 0)
        if key not in self._functions:
            module_key = (section, defines)
            if module_key not in self._modules:
                source = self.sections[section].source(self.sections["prelude"])
                options = (*OPTIONS, *defines_of(self.activation, defines))
                self._modules[module_key] = self.launcher.compile(source, options, section)
            function = self.launcher.function(self._modules[module_key], kernel)
            if shared_bytes > function.max_dynamic_shared_size_bytes:  # more must be asked for
                function.max_dynamic_shared_size_bytes = shared_bytes
            self._functions[key] = function
        return self._functions[key]

    def _launch(
        self, section, kernel, grid, *args, shared_bytes=0, defines=(), dependent=False,
        threads=THREADS,
    ) -> None:  # fmt: skip
        """Launch with checked grid, shared memory and casted scalars; no work, no launch.

        dependent: see CudaLauncher.launch; threads: of a block
        """
        grid = (*grid, *(1,) * (3 - len(grid)))
        if 0 in grid:
            return
        limits = self.launcher.limits
        if any(n > most for n, most in zip(grid, limits.max_grid, strict=True)):
            raise UserError(
                f"{kernel}: a grid of {grid} blocks is more than {limits.name} allows "
                f"({limits.max_grid}); use fewer rows in one forward"
            )
        if shared_bytes > limits.shared_bytes:
            raise _too_large(kernel, shared_bytes, limits)
        function = self._function(section, kernel, defines, shared_bytes)
        cast = tuple(_scalar(kernel, a) for a in args)
        try:
            self.launcher.launch(function, grid, (threads, 1, 1), cast, shared_bytes, dependent)
            if self.debug:
                self.launcher.synchronize()
        except self.launcher.faults as error:
            raise self.fault(error, f"{kernel} with a grid of {grid}") from error
        if self.listener is not None:
            made = section, kernel, grid, cast, shared_bytes, defines, function, threads
            self.listener(Launch(*made))

    @property
    def faults(self) -> tuple[type[Exception], ...]:
        """What the launcher raises when a kernel has failed, at once or at a later call."""
        return self.launcher.faults

    def fault(self, error: Exception, where: str) -> DeviceFault:
        """What to say of one of `faults` seen at `where`; a GPU is behind what the host asks."""
        if self.mail is not None and (late := int(self.mail.said[0])):
            ranks = ", ".join(str(r) for r in range(self.mail.size) if late >> r & 1)
            seconds = self.mail.patience / 1e9
            return DeviceFault(f"rank {ranks} did not come to a sum within {seconds:g} s")
        if self.debug or self.name == "emulate":
            return DeviceFault(f"{where} failed: {error}")
        return DeviceFault(f"{where}, or a kernel before: {error}; --debug-kernels names it")

    def relaunch(self, launch: Launch, function=None) -> None:
        """Launch again what was launched, with the kernel as it is now, or with `function`."""
        if function is None:
            function = self._function(
                launch.section, launch.kernel, launch.defines, launch.shared_bytes
            )
        block = (launch.threads, 1, 1)
        self.launcher.launch(function, launch.grid, block, launch.args, launch.shared_bytes)

    def check_fit(
        self, model: config.Model, drafter: config.Drafter | None, leaf: int, budget: int
    ) -> None:
        """Raise UserError, before any weight is loaded, naming a kernel that does not fit here."""
        limits, tensor = self.launcher.limits, {name: getattr(self, name) for name in TENSOR}
        for kernel, need in shared_needs(model, drafter, leaf, budget, **tensor).items():
            if need > limits.shared_bytes:
                raise _too_large(kernel, need, limits)

    def scratch_bytes(
        self, model: config.Model, rows: int, logits: int, reach: int, leaf: int, span: int
    ) -> int:
        """About what the arrays of one forward take: `rows` rows at up to `reach` positions, of
        which `logits` choose a token. Blocks of one size are kept for the next forward, so all
        count."""
        a, heads = self.act.itemsize, model.num_attention_heads
        latent, spans = model.kv_lora_rank, reach // (leaf * span) + 1
        attention = heads * (2 * latent + model.qk_rope_head_dim) * a
        parts = rows * heads * spans * (latent + 2) * 4
        if self.tensor_attention:  # see _attention_work; a part a leaf where there are few rows
            behind = min(rows, reach) // leaf + 2
            columns = min(rows, WORK_ROWS) * ceil(heads, 8) * 8 * (spans + behind)
            columns += 2 * self.launcher.limits.processors * COLUMN_TILES[-1].tiles * 8
            parts = min(columns * (latent + 2) * 4, PARTS_BYTES)
        if self.tensor_linear:
            parts += MEETING_BYTES
        if self.tensor_experts and model.n_routed_experts and rows >= MANY_FROM:
            leaves = config.mlp_leaves(model, model.num_hidden_layers - 1)
            sizes = model.n_routed_experts, model.num_experts_per_tok, leaves, model.hidden_size
            parts += many_bytes(rows, *sizes)
        experts = model.num_experts_per_tok * model.moe_intermediate_size * a
        dense = model.intermediate_size * a + model.hidden_size * (4 * a + 4 * 10)  # 8 leaves, sums
        entries = model.num_hidden_layers * (latent + model.qk_rope_head_dim) * a
        scores = model.vocab_size * (4 + 4 + 4)  # logits, penalised, drafts with noise
        scores += BINS * (8 + 4) + min(LISTED, model.vocab_size) * 8  # of filters
        rest = attention + experts + dense + entries + 4 * rows
        return rows * rest + parts + logits * scores

    def compiled(self) -> set[str]:
        """Sections that have been used, in some form."""
        return {name for name, _ in self._modules}

    def reload(self) -> list[str]:
        """Read the sources again; returns the changed sections, of which those in use are compiled.
        Nothing changes on an error."""
        sections = read_sections(self.directory)
        if sections["prelude"].text != self.sections["prelude"].text:
            changed = list(sections)
        else:
            changed = [
                name
                for name, section in sections.items()
                if name not in self.sections or section.text != self.sections[name].text
            ]
        modules = {}
        for name, defines in self._modules:
            if name in changed and name in sections:
                source = sections[name].source(sections["prelude"])
                options = (*OPTIONS, *defines_of(self.activation, defines))
                modules[name, defines] = self.launcher.compile(source, options, name)
        self.sections = sections
        self._modules.update(modules)
        self._functions = {k: f for k, f in self._functions.items() if k[0] not in changed}
        return changed

    def refill(self, array, host: np.ndarray) -> None:
        """Write a host array over a device array of the same shape and type."""
        array[...] = self.launcher.upload(np.asarray(host, array.dtype))

    def fetch(self, arrays: tuple) -> Callable[[], tuple]:
        """Start copying arrays to the host; the result waits for them and gives them as NumPy."""
        return self.launcher.fetch(arrays)

    def capture(self, run: Callable[[], tuple]) -> Captured:
        """Record what `run` launches, as a CUDA graph where there is a GPU.

        run() returns a tuple of arrays. It reads fixed arrays on the device, uploads nothing and
        waits for nothing; it is run once before, so that all is compiled and allocated.
        """
        return self.launcher.capture(run)

    # -- sums across ranks: see parallel.PeerComm

    def share_mailbox(self, size: int):
        """Memory for the other ones of `size` ranks to write into, and its handle for them."""
        return self.launcher.share(sum(mailbox_bytes(size)))

    def mailbox(self, rank: int, addresses: list[int], blocks: int, patience: float) -> Mailbox:
        """addresses: of all ranks' memory, all zero; blocks: that run at once on every rank's
        device; patience: seconds."""
        upload, lines = self.launcher.upload, np.array(addresses, np.uint64)
        slices = lines + np.uint64(mailbox_bytes(len(addresses))[0])
        late, said = self.launcher.word()
        self.mail = Mailbox(
            rank, len(addresses), upload(lines), upload(slices),
            upload(np.array([[1, 0]] * 2, np.uint32)), late, said,
            min(blocks, MAX_PEER_BLOCKS), int(patience * 1e9),
        )  # fmt: skip
        return self.mail

    def push_for(self, mail: Mailbox, x) -> Callable | None:
        """push_sum or push_sum_slices, as it is faster for x; None where neither takes it."""
        if 0 < x.size <= mail.short:
            return self.push_sum
        whole = x.size % (4 * mail.size) == 0
        return self.push_sum_slices if whole and 0 < x.size <= MOST_IN_TWO_SHOTS else None

    def push_sum(self, mail: Mailbox, x):
        """The sum over all ranks of fp32 [..], in their pairwise order: in one shot, for few."""
        x, most = self._partial("push_sum", x), _share_of(MOST_IN_ONE_SHOT, mail.size)
        if x.size > most:
            raise UserError(
                f"push_sum: expected at most {most} values, got {x.size}; push_for says what takes "
                "them"
            )
        out = self.empty(x.shape)
        grid = (min(mail.blocks, ceil(x.size, 2 * THREADS)),)
        self._launch(
            "peer_sum", "push_sum", grid, x, out, mail.lines, mail.turns[0], mail.late,
            np.uint64(mail.patience), x.size, most // 2, mail.rank,
            defines=(("RANKS", mail.size),), dependent=True,
        )  # fmt: skip
        return out

    def push_sum_slices(self, mail: Mailbox, x):
        """The same in two shots, for many values: a multiple of 4 for every rank."""
        x, size = self._partial("push_sum_slices", x), mail.size
        if x.size > MOST_IN_TWO_SHOTS or x.size % (4 * size):
            raise UserError(
                f"push_sum_slices: expected a multiple of {4 * size}, at most {MOST_IN_TWO_SHOTS} "
                f"values, got {x.size}; push_for says what takes them"
            )
        out = self.empty(x.shape)
        # Every block fences: half as many blocks are faster for many values.
        grid = (min(-(-mail.blocks // 2), ceil(x.size, 4 * size * THREADS)),)
        self._launch(
            "peer_sum", "push_sum_slices", grid, x, out, mail.slices, mail.turns[1], mail.late,
            np.uint64(mail.patience), x.size // size, MOST_IN_TWO_SHOTS // size,
            _flag_bytes(size), mail.rank, defines=(("RANKS", size),), dependent=True,
        )  # fmt: skip
        return out

    def _partial(self, op: str, x):
        if x.size and self.launcher.address(x) % 16:
            x = self.launcher.xp.array(x)
        return self._take(op, "x", x, FLOAT32, *x.shape)

    # -- memory

    def empty(self, shape, dtype=FLOAT32):
        """A new array, unwritten (NaN under `poison`)."""
        array = self.launcher.empty(shape, dtype)
        if self.poison and array.size:
            array.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN in both float types, -1 in int32
        return array

    def zeros(self, shape):
        """Zeros of the activation type: the cache's pages."""
        array = self.launcher.empty(shape, self.act)
        array.reshape(-1).view(np.uint8)[...] = 0
        return array

    def activations(self, shape):
        """An unwritten array of the activation type."""
        return self.empty(shape, self.act)

    def index(self, array):
        """Row numbers, positions or ids as int32 where the kernels read them."""
        if isinstance(array, self.launcher.array_type) and array.dtype == INT32:
            return array
        return self.launcher.upload(np.asarray(array, np.int32))

    def arange(self, n: int):
        """int32 0 … n - 1 where the kernels read it, made once."""
        if n not in self._counted:
            self._counted[n] = self.launcher.upload(np.arange(n, dtype=np.int32))
        return self._counted[n]

    def download(self, array) -> np.ndarray:
        """Any array of these operations as NumPy, bfloat16 as float32. Waits for the device."""
        host = self.launcher.download(array)
        return host.astype(np.float32) if host.dtype == BFLOAT16 else host

    def _take(self, op: str, name: str, array, dtype, *shape, aligned: bool = False):
        """The array, after its checks; None in `shape` stands for any size.

        aligned: the kernel reads 16 bytes at a time
        """
        where = f"{op}: {name}"
        if not isinstance(array, self.launcher.array_type):
            raise UserError(
                f"{where}: expected an array on {self.name}, got {type(array).__name__}; upload it"
            )
        fits = array.ndim == len(shape) and all(
            want is None or want == have for want, have in zip(shape, array.shape, strict=True)
        )
        if array.dtype != dtype or not fits:
            expected = ", ".join("any" if n is None else str(n) for n in shape)
            raise UserError(
                f"{where}: expected {np.dtype(dtype).name} [{expected}], got {array.dtype.name} "
                f"{list(array.shape)}"
            )
        if not array.flags.c_contiguous:
            raise UserError(
                f"{where}: expected C order, got strides {array.strides}; copy it first"
            )
        if aligned and array.size and self.launcher.address(array) % 16:
            raise UserError(f"{where}: expected 16-byte alignment, got an odd slice; copy it first")
        return array

    def _rows_of(self, op: str, x, aligned: bool = False):
        """Checks an activation or fp32 array of rows; returns it and "act" or "f32"."""
        if getattr(x, "dtype", None) == self.act:
            return self._take(op, "x", x, self.act, *x.shape, aligned=aligned), "act"
        shape = getattr(x, "shape", (None,))
        return self._take(op, "x", x, FLOAT32, *shape, aligned=aligned), "f32"

    # -- weights, once at load

    def blank(self, shape, dtype):
        """Zeros where `generate` fills them with a weight."""
        array = self.launcher.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0
        return array

    def generate(self, out, seed: int, mean: float, scale: float, first=(0, 0), width=None):
        """Fill `out` [rows, columns] as reference.generate does, to the bit."""
        columns = out.shape[-1]
        out = self._take("generate", "out", out, out.dtype, *out.shape)
        self._launch(
            "generate", f"generate_{out.dtype.name}", (ceil(out.size, THREADS),), out,
            np.int64(out.size), np.uint64(seed), mean, scale, columns, width or columns, *first,
        )  # fmt: skip

    def trim(self) -> None:
        """Give back memory that nothing holds any more, such as what packing the weights needed."""
        self.launcher.trim()

    def upload(self, array):
        """A norm weight, bias or rotation table: float32. A bfloat16 matrix stays bfloat16."""
        if not isinstance(array, np.ndarray):  # a matrix that is on the device already
            return array
        keep = array.ndim == 2 and array.dtype == BFLOAT16
        return self.launcher.upload(array if keep else array.astype(np.float32))

    def _matrix(self, weight, leaves: int = 1, row_cut: bool = False) -> Matrix:
        if isinstance(weight, Int4Weight):
            scales = weight.scales
            kind = "Int4Bf16" if scales.dtype == BFLOAT16 else "Int4F32"
            group, data = weight.group_size, self.launcher.upload(weight.packed.view(np.int32))
            if group % 8 or (weight.in_features // leaves) % group:
                raise UserError(
                    f"prepare: {weight.in_features} input columns in {leaves} leaves are not whole "
                    f"groups of {group}"
                )
            uploaded = self.launcher.upload(scales)
        else:
            kind, group = {FLOAT32: "DenseF32", BFLOAT16: "DenseBf16"}.get(weight.dtype), 1
            if kind is None:
                raise UserError(
                    f"prepare: expected a float32, bfloat16 or INT4 weight, got {weight.dtype}"
                )
            data = uploaded = self.launcher.upload(weight)
        shape = weight.packed.shape if isinstance(weight, Int4Weight) else weight.shape
        in_features = shape[-1] * (8 if isinstance(weight, Int4Weight) else 1)
        parts = math.prod(shape[:-2])
        if in_features % leaves or leaves & (leaves - 1):
            raise UserError(
                f"prepare: {in_features} input columns cannot be cut in {leaves} leaves; expected "
                "a power of two that divides them"
            )
        return Matrix(kind, data, uploaded, group, parts, shape[-2], in_features, leaves, row_cut)

    def prepare(self, weight, *, shards: int = 1, row_cut: bool = False) -> Matrix | TensorMatrix:
        """A matrix for `linear`. Only K is cut in leaves: column shards cannot change a sum."""
        if self.tensor_linear and self._packable(weight, shards if row_cut else 1):
            return self._pack_dense(weight, None, shards if row_cut else 1, row_cut)
        return self._matrix(weight, shards if row_cut else 1, row_cut)

    def prepare_mlp(self, gate, up, down, n_leaves: int) -> Mlp | TensorMlp | TensorExperts:
        """Stacks [E, width, hidden], [E, width, hidden], [E, hidden, width], dense or INT4."""
        if self.tensor_experts and all(isinstance(w, Int4Weight) for w in (gate, up, down)):
            packed = self._pack_experts(gate, up, down, n_leaves)
            if packed is not None:
                return packed
        fits = all(self._packable(w, n) for w, n in ((gate, 1), (up, 1), (down, n_leaves)))
        if self.tensor_linear and fits:
            down = self._pack_dense(down, None, n_leaves, True)
            return TensorMlp(self._pack_dense(gate, up), down, n_leaves)
        if n_leaves > 8:  # expert_down holds one leaf in every four lanes of a warp
            raise UserError(f"prepare_mlp: {n_leaves} leaves, expected at most 8")
        return Mlp(
            self._matrix(gate), self._matrix(up), self._matrix(down, n_leaves, True), n_leaves
        )

    def prepare_latent_inputs(self, q_a, kv_a) -> LatentInputs:
        """q_a [q_lora, hidden] and kv_a [latent + rope, hidden] for `latent_inputs`."""
        rows = [w.out_features if isinstance(w, Int4Weight) else len(w) for w in (q_a, kv_a)]
        if self.tensor_linear and all(self._packable(w, 1) for w in (q_a, kv_a)):
            return LatentInputs(self.prepare(self._on_top([q_a, kv_a])), None, None, *rows)
        return LatentInputs(None, self.prepare(q_a), self.prepare(kv_a), *rows)

    def prepare_block_inputs(self, q: list, k: list, v: list, shards: int, kv_shards: int):
        """q [H * d, hidden], k and v [KV * d, hidden] of all layers of the drafter: BlockInputs, a
        layer each, and k and v of all as one matrix for `put_context`."""
        layers = list(zip(q, k, v, strict=True))
        inputs = [BlockInputs(self.prepare(self._on_top(w)), len(w[0]), len(w[1])) for w in layers]
        return inputs, self.prepare(self._on_top([w for _, *pair in layers for w in pair]))

    def _on_top(self, weights: list):
        """Dense [.., in] matrices on top of each other; of several types as float32."""
        if len({w.dtype for w in weights}) > 1:
            weights = [w.astype(np.float32) for w in weights]
        kind = weights[0].dtype
        sent = [self.launcher.upload(w).view(f"u{kind.itemsize}") for w in weights]
        return self.launcher.xp.concatenate(sent).view(kind)

    def prepare_heads(self, kv_b, n_heads: int, nope: int, v: int):
        """kv_b [H * (nope + v), latent], dense -> what latent_query and absorb_v take: Heads or
        TensorHeads."""
        matrix = self._matrix(kv_b)
        if matrix.group != 1:
            raise UserError("prepare_heads: expected a dense kv_b_proj, got INT4")
        latent = matrix.in_features
        if self.tensor_linear:
            packed = self._pack_heads(matrix.data, n_heads, nope, v, latent)
            if packed is not None:
                return packed
        heads = Heads(matrix.data, n_heads, nope, v, latent)
        return heads, heads

    # -- dense

    def round(self, x):
        """fp32 to the activation type."""
        x = self._take("round", "x", x, FLOAT32, *x.shape)
        if self.act == FLOAT32:
            return x
        out = self.empty(x.shape, self.act)
        grid = (ceil(x.size, THREADS),)
        n = np.int64(x.size)
        self._launch("elementwise", "round_to_activation", grid, x, out, n, dependent=True)
        return out

    def embed(self, token_ids, table, first_id: int):
        """int32 [T] -> [T, hidden]; the rank's rows start at `first_id`, others read as zero."""
        ids = self.index(token_ids)
        n, hidden = table.shape
        table = self._take("embed", "table", table, table.dtype, n, hidden)
        out = self.empty((len(ids), hidden))
        grid = (ceil(hidden, THREADS), len(ids))
        defines = (("TABLE", TYPES[table.dtype]),)
        self._launch(
            "embed", "embed", grid, ids, table, out, first_id, n, hidden, defines=defines,
            dependent=True,
        )  # fmt: skip
        return self.round(out if self.comm is None else self.comm.tree_sum(out))

    def rms_norm(self, x, weight, eps: float):
        """x [..., K] -> x / sqrt(mean(x^2) + eps), rounded, times weight [K], rounded."""
        k = x.shape[-1]
        x, kind = self._rows_of("rms_norm", x, aligned=k % 8 == 0)
        weight = self._take("rms_norm", "weight", weight, FLOAT32, k, aligned=True)
        out = self.empty(x.shape, self.act)
        args = x, weight, out, k, np.float32(1.0 / k), eps
        self._launch_rows(f"rms_norm_{kind}", k, x.size // k, 1, *args)
        return out

    def _launch_rows(self, kernel: str, width: int, rows: int, depth: int, *args) -> None:
        """A kernel of the rms_norm section on so many rows, at most `width` wide."""
        defines = norm_defines(width, self.launcher.limits.clusters)
        grid = (rows * dict(defines)["BLOCKS"], depth)
        self._launch("rms_norm", kernel, grid, *args, defines=defines, dependent=True)

    def add_rms_norm(self, x, y, weight, eps: float, taps=None, first: int = 0):
        """x + round(y), rounded [T, K], and its `rms_norm`, as one kernel; the sum is also written
        to columns first … of `taps` [T, width]."""
        op, (n, k) = "add_rms_norm", x.shape
        x = self._take(op, "x", x, self.act, n, k, aligned=k % 8 == 0)
        y = self._take(op, "y", y, FLOAT32, n, k, aligned=k % 8 == 0)
        weight = self._take(op, "weight", weight, FLOAT32, k, aligned=True)
        tapped, total, out = (
            taps is not None,
            self.empty((n, k), self.act),
            self.empty((n, k), self.act),
        )
        taps = self._take(op, "taps", taps, self.act, n, None, aligned=True) if tapped else total
        if first + k > taps.shape[1]:
            raise UserError(
                f"{op}: columns {first} to {first + k} were asked for, taps have {taps.shape[1]}; "
                "make them wider"
            )
        self._launch_rows(
            op, k, n, 1, x, y, weight, total, out, taps, k, taps.shape[1], first, int(tapped),
            np.float32(1.0 / k), eps,
        )  # fmt: skip
        return total, out

    def linear(self, x, weight: Matrix, rounded: bool = False):
        """x [T, in] times weight [out, in] -> fp32 [T, out], or rounded to the activation type."""
        if weight.row_cut and self.comm is not None:
            y = self.comm.tree_sum(self._linear("linear", x, weight, weight.out_features))
            return self.round(y) if rounded else y
        return self._linear("linear", x, weight, weight.out_features, rounded)

    def _linear(self, op: str, x, weight: Matrix, columns: int, rounded: bool = False):
        packed = isinstance(weight, TensorMatrix)
        aligned = packed or weight.group > 1
        x = self._take(op, "x", x, self.act, None, weight.in_features, aligned=aligned)
        y = self.empty((len(x), columns), self.act if rounded else FLOAT32)
        if packed:
            parts = weight.leaves * weight.parts
            cut = self._cut(len(x), weight, parts)
            before = int(rounded), columns, 0
            self._mma("linear_mma", x, weight, y, (before, (columns,)), cut, parts)
            return y
        grid = (ceil(columns, WARPS), ceil(len(x), ROWS))
        self._launch(
            "linear", "linear", grid, x, weight.data, weight.scales, weight.group, y, int(rounded),
            len(x), columns, weight.in_features, weight.leaves, defines=weight.defines,
        )  # fmt: skip
        return y

    def add(self, x, y):
        """The residual: x + round(y), rounded."""
        x = self._take("add", "x", x, self.act, *x.shape)
        y = self._take("add", "y", y, FLOAT32, *x.shape)
        out = self.empty(x.shape, self.act)
        grid = (ceil(x.size, THREADS),)
        self._launch("elementwise", "add", grid, x, y, out, np.int64(x.size), dependent=True)
        return out

    def silu_mul(self, gate, up):
        """SiLU(gate) * up, rounded."""
        gate = self._take("silu_mul", "gate", gate, FLOAT32, *gate.shape)
        up = self._take("silu_mul", "up", up, FLOAT32, *gate.shape)
        out = self.empty(gate.shape, self.act)
        grid = (ceil(gate.size, THREADS),)
        n = np.int64(gate.size)
        self._launch("elementwise", "silu_mul", grid, gate, up, out, n, dependent=True)
        return out

    def rope_table(self, rope: config.Rope, dim: int, positions: int):
        """cos and sin, fp32 [positions, dim / 2], computed on the host as the reference does."""
        cosines, sines = rope_table(rope, dim, positions)
        return self.launcher.upload(cosines), self.launcher.upload(sines)

    def take_rows(self, x, rows):
        """x [T, K], activations or fp32, at int32 rows [n] -> [n, K]; a row of -1 gives zeros."""
        x, kind = self._rows_of("take_rows", x)
        rows = self.index(rows)
        n_rows, k = x.shape
        out = self.empty((len(rows), k), x.dtype)
        words = k * x.dtype.itemsize // 16
        if words * 16 == k * x.dtype.itemsize and self.launcher.address(x) % 16 == 0:
            kind, k = "16", words
        grid = (ceil(k, THREADS), len(rows))
        self._launch(
            "elementwise", f"take_rows_{kind}", grid, x, rows, out, n_rows, k, dependent=True
        )
        return out

    # -- latent attention

    def plan_attention(self, positions, sequence, parent, lengths, tables, leaf: int):
        """Which row holds every position of a row's own path (R3), as the reference's.

        Lengths in NumPy tell how far the rows can reach; for lengths on the device every grid is as
        large as the longest context needs, so that a captured graph fits all lengths. A sequence of
        -1 makes a filler row.
        """
        tables = self._tables("plan_attention", tables)
        reach = tables.shape[1] * leaf - 1
        if isinstance(lengths, np.ndarray):
            reach = int(lengths.max(initial=0)) + len(positions)
        rows = [self.index(a) for a in (positions, sequence, parent)]
        lengths = self.index(lengths)
        n = len(rows[0])
        ancestors = self.empty((n, n), INT32)
        grid = (ceil(n, THREADS),)
        args = *rows, lengths, ancestors, n, n
        self._launch("plan", "plan_ancestors", grid, *args, dependent=True)
        return AttentionPlan(rows[0], rows[1], lengths, tables, ancestors, leaf, reach)

    def _tables(self, op: str, tables):
        """int32 [sequences, pages] page numbers, on the device."""
        return self._take(op, "tables", self.index(tables), INT32, None, None)

    def latent_query(self, q, key: Heads | TensorHeads, cos, sin, positions):
        """q [T, H, nope + rope] -> absorbed and rotated [T, H, latent + rope], rounded."""
        packed = isinstance(key, TensorHeads)
        nope, (n, _, width) = key.columns if packed else key.nope, q.shape
        rope, whole = width - nope, packed and width % 8 == 0
        q = self._take("latent_query", "q", q, self.act, None, key.heads, width, aligned=whole)
        self._take("latent_query", "cos", cos, FLOAT32, None, rope // 2)
        positions = self._take("latent_query", "positions", self.index(positions), INT32, n)
        if packed:
            return self._mma_query(q, key, cos, sin, positions)
        out = self.empty((n, key.heads, key.latent + rope), self.act)
        self._launch(
            "absorb", "latent_query", (key.heads, ceil(n, ROWS)), q, key.data, cos, sin, positions,
            out, n, key.heads, key.nope, key.v, key.latent, rope,
            shared_bytes=SHARED_BYTES["latent_query"](key.nope), defines=key.defines,
        )  # fmt: skip
        return out

    def latent_entry(self, kv, weight, eps: float, cos, sin, positions, out) -> None:
        """kv_a's fp32 output [T, latent + rope] -> the cache entries, into `out` of that shape:
        normed latent, rotated key."""
        op, latent = "latent_entry", weight.shape[0]
        kv = self._take(op, "kv", kv, FLOAT32, None, None, aligned=True)
        n, rope = len(kv), kv.shape[1] - latent
        weight, out, positions = self._entry(op, n, weight, rope, cos, sin, positions, out)
        self._launch_rows(
            op, latent, n, 1, kv, weight, cos, sin, positions, out, latent, rope,
            np.float32(1.0 / latent), eps,
        )  # fmt: skip

    def latent_inputs(
        self, x, weight: LatentInputs, q_norm, kv_norm, eps: float, cos, sin, positions, out
    ):
        """x [T, hidden] -> q_a's output, normed [T, q_lora]; kv_a's becomes the cache entries, into
        `out` [T, latent + rope], as `latent_entry` makes them."""
        op, n, k, latent = "latent_inputs", len(x), weight.q_lora, kv_norm.shape[0]
        rope = weight.width - latent
        if weight.joined is not None:
            q = self.linear(x, weight.joined)
            kv = q.reshape(-1)[k:]
            strides = k + weight.width, k + weight.width
        else:
            q, kv, strides = (
                *(self.linear(x, w) for w in (weight.q_a, weight.kv_a)),
                (k, weight.width),
            )
        q_norm = self._take(op, "q_norm", q_norm, FLOAT32, k, aligned=True)
        kv_norm, out, positions = self._entry(op, n, kv_norm, rope, cos, sin, positions, out)
        normed, widest = self.empty((n, k), self.act), max(k, latent)
        self._launch_rows(
            "query_entry", widest, n, 2, q, kv, q_norm, kv_norm, cos, sin, positions, normed, out,
            k, strides[0], latent, rope, strides[1], np.float32(1.0 / k), np.float32(1.0 / latent),
            eps,
        )  # fmt: skip
        return normed

    def latent_queries(
        self, x, weight: LatentInputs, q_b, key, q_norm, kv_norm, eps: float, cos, sin, positions,
        out,
    ):  # fmt: skip
        """x [T, hidden] -> what attention asks with [T, H, latent + rope]: `latent_inputs`, q_b and
        `latent_query`; the cache entries go into `out`."""
        n, latent, rope = len(x), kv_norm.shape[0], weight.width - kv_norm.shape[0]
        shape = self._query_shape(n, weight.joined, q_b, key, latent, rope)
        turn = cos, sin, positions
        if shape is None:
            q = self.latent_inputs(x, weight, q_norm, kv_norm, eps, *turn, out)
            q = self.linear(q, q_b, rounded=True).reshape(n, key.heads, -1)
            return self.latent_query(q, key, *turn)
        op, sums = "latent_queries", self.linear(x, weight.joined)
        q_norm = self._take(op, "q_norm", q_norm, FLOAT32, weight.q_lora, aligned=True)
        kv_norm, out, at = self._entry(op, n, kv_norm, rope, *turn, out)
        turn = cos, sin, at
        return self._mma_queries(sums, shape, q_b, key, q_norm, kv_norm, eps, turn, out)

    def _entry(self, op: str, n: int, weight, rope: int, cos, sin, positions, out):
        """Checks what makes a cache entry: returns weight, out and positions."""
        latent = weight.shape[0]
        whole = latent % 8 == 0 and rope % 8 == 0  # then written 8 numbers at a time
        self._take(op, "cos", cos, FLOAT32, None, rope // 2)
        self._take(op, "sin", sin, FLOAT32, None, rope // 2)
        return (
            self._take(op, "weight", weight, FLOAT32, latent, aligned=True),
            self._take(op, "out", out, self.act, n, latent + rope, aligned=whole),
            self._take(op, "positions", self.index(positions), INT32, n),
        )

    def absorb_v(self, o, value: Heads | TensorHeads):
        """o [T, H, latent] -> rounded [T, H, v]."""
        if isinstance(value, TensorHeads):
            return self._mma_value(o, value)
        o = self._take("absorb_v", "o", o, self.act, None, value.heads, value.latent)
        out = self.empty((len(o), value.heads, value.v), self.act)
        grid = (ceil(value.heads * value.v, WARPS), ceil(len(o), ROWS))
        self._launch(
            "absorb", "absorb_v", grid, o, value.data, out, len(o), value.heads, value.nope,
            value.v, value.latent, defines=value.defines,
        )  # fmt: skip
        return out

    def latent_attention(self, q, pages, fresh, plan: AttentionPlan, scale, latent: int, span: int):
        """Absorbed MLA over leaves -> rounded [T, H, latent]."""
        op = "latent_attention"
        n, heads, width = q.shape
        whole = width % 8 == 0  # then keys are read 8 numbers at a time
        shape = self._tensor_shape(width, latent, plan.leaf, span, apart=False)
        q = self._take(op, "q", q, self.act, None, None, None, aligned=shape is not None)
        pages = self._take(op, "pages", pages, self.act, None, plan.leaf, width, aligned=whole)
        fresh = self._take(op, "fresh", fresh, self.act, n, width, aligned=whole)
        factor = np.float32(scale) * reference.LOG2E
        if shape is not None:
            return self._latent_attention_mma(q, pages, fresh, plan, factor, shape)
        spans = plan.reach // (plan.leaf * span) + 1
        parts = self.empty((n, heads, spans, 2))
        values = self.empty((n, heads, spans, latent))
        out = self.empty((n, heads, latent), self.act)
        defines = attention_defines(width, latent, plan.leaf, span)
        self._launch(
            "attention", "latent_spans", (min(spans, MAX_SPAN_BLOCKS), ceil(heads, HEADS), n),
            q, pages, fresh, plan.positions, plan.sequence, plan.lengths, plan.tables,
            plan.ancestors, parts, values, heads, spans, plan.tables.shape[1],
            plan.ancestors.shape[1], factor,
            shared_bytes=attention_shared_bytes(width, plan.leaf), defines=defines,
        )  # fmt: skip
        grid = (ceil(latent, THREADS), heads, n)
        self._launch(
            "attention", "latent_fold", grid, parts, values, plan.positions, plan.sequence, out,
            heads, spans, defines=defines,
        )  # fmt: skip
        return out

    # -- experts

    def join_router(self, router, shared):
        """(router, shared experts) for `mixture`, from `prepare` and `prepare_mlp`: one matrix of
        both lies in memory where tensor cores take them."""
        if not isinstance(router, TensorMatrix) or not isinstance(shared, TensorMlp):
            return router, shared
        both, cut = (router, shared.gate_up), router.data.size
        data = self.launcher.xp.concatenate([w.data for w in both])
        self.launcher.synchronize()  # as in _pack_dense
        n = data.size // (router.in_features * 2)
        joined = replace(router, data=data, out_features=n)
        router = replace(router, data=data[:cut])
        gate_up = replace(shared.gate_up, data=data[cut:])
        return router, replace(shared, gate_up=gate_up, routed=joined)

    def mixture(
        self, x, router, bias, top_k: int, normalise: bool, scaling: float, experts, shared
    ):
        """`route`, then `moe` with what it chose."""
        if not isinstance(shared, TensorMlp) or shared.routed is None:
            ids, weights = self.route(x, router, bias, top_k, normalise, scaling)
            return self.moe(x, ids, weights, experts, shared)
        logits, hidden = self._router_sums(x, shared.routed), shared.gate_up.out_features // 2
        h = self.empty((len(x), hidden), self.act)
        count = router.out_features
        ids, weights = self._choose_experts(logits, count, bias, top_k, normalise, scaling, h)
        return self.moe(x, ids, weights, experts, shared, h)

    def _router_sums(self, x, matrix: TensorMatrix):
        """x times the matrix of a router, shares of K not joined: fp32 [shares, T, outputs]."""
        x = self._take("route", "x", x, self.act, None, matrix.in_features, aligned=True)
        n, outputs = len(x), matrix.out_features
        parts = parts_of(matrix.in_features, ROUTER_PARTS)
        cut = self._cut(n, matrix, parts, most=SHARES[-1])
        sums = self.empty((cut.shares, n, outputs))
        columns = (0, outputs, n * outputs), (outputs,)
        self._mma("linear_mma", x, matrix, sums, columns, cut, parts)
        return sums

    def _choose_experts(self, logits, experts, bias, top_k, normalise, scaling, h=None):
        """ids, weights from logits [shares, T, experts or more]; what follows goes through SiLU to
        h [T, width]."""
        shares, n, stride = logits.shape
        bias = self._take("route", "bias", bias, FLOAT32, experts)
        ids, weights = self.empty((n, top_k), INT32), self.empty((n, top_k))
        h = self.empty((n, 0), self.act) if h is None else h
        width = h.shape[1]
        self._launch(
            "route", "route", (n + ceil(n * width, THREADS),), logits, bias, ids, weights,
            h, n, experts, stride, shares, top_k, int(normalise),
            np.float32(scaling), width, defines=(("PER_THREAD", ceil(experts, THREADS)),),
            shared_bytes=SHARED_BYTES["route"](experts, top_k), dependent=True,
        )  # fmt: skip
        return ids, weights

    def route(self, x, router: Matrix, bias, top_k: int, normalise: bool, scaling: float):
        """Sigmoid router -> ids int32 [T, top_k] ascending, weights fp32 [T, top_k]."""
        if isinstance(router, TensorMatrix):
            logits = self._router_sums(x, router)
        else:
            logits = self.linear(x, router)[None]
        return self._choose_experts(logits, router.out_features, bias, top_k, normalise, scaling)

    def mlp(self, x, weight: Mlp):
        """A dense gated MLP: x [T, hidden] -> fp32 [T, hidden], leaves joined."""
        return self.linear(self._dense_gate_up("mlp", x, weight), weight.down)

    def _dense_gate_up(self, op: str, x, weight: Mlp):
        if isinstance(weight, TensorMlp):
            return self._mma_gate_up(op, x, weight)
        gate, up = weight.gate, weight.up
        x = self._take(op, "x", x, self.act, None, gate.in_features, aligned=gate.group > 1)
        h = self.empty((len(x), gate.out_features), self.act)
        grid = (ceil(gate.out_features, WARPS), ceil(len(x), ROWS))
        self._launch(
            "gate_up", "dense_gate_up", grid, x, gate.data, gate.scales, up.data, up.scales,
            gate.group, h, len(x), gate.out_features, gate.in_features, defines=gate.defines,
        )  # fmt: skip
        return h

    def moe(self, x, ids, weights, experts: Mlp, shared: Mlp | None, hidden=None):
        """Routed and shared experts -> fp32 [T, hidden] (R4). Ids outside [0, E) are filler.

        hidden: SiLU(gate) * up of the shared experts, if it is there
        """
        if isinstance(experts, TensorExperts):
            out = self._mma_experts(x, ids, weights, experts, shared, hidden)
            return out if self.comm is None else self.comm.tree_sum(out)
        gate, up, down = experts.gate, experts.up, experts.down
        x = self._take("moe", "x", x, self.act, None, gate.in_features, aligned=gate.group > 1)
        n, (top_k, e, width) = len(x), (ids.shape[1], gate.parts, gate.out_features)
        ids = self._take("moe", "ids", ids, INT32, n, top_k)
        weights = self._take("moe", "weights", weights, FLOAT32, n, top_k)
        pairs = n * top_k
        max_tiles = min(pairs, e + pairs // ROWS)
        order, tiles = self.empty((pairs,), INT32), self.empty((max_tiles, 3), INT32)
        n_tiles = self.empty((1,), INT32)
        self._launch(
            "sort_pairs", "sort_pairs", (1 if pairs else 0,), ids, order, tiles, n_tiles, pairs, e,
            shared_bytes=SHARED_BYTES["sort_pairs"](),
        )  # fmt: skip
        h = self.empty((pairs, width), self.act)
        self._launch(
            "gate_up", "expert_gate_up", (ceil(width, WARPS), max_tiles), x, order, tiles, n_tiles,
            gate.data, gate.scales, up.data, up.scales, gate.group, h, top_k, width,
            gate.in_features, defines=gate.defines,
        )  # fmt: skip
        out = self.empty((n, down.out_features))
        beside = out if shared is None else self._shared_leaves(x, shared, experts.leaves, hidden)
        self._launch(
            "expert_down", "expert_down", (ceil(down.out_features, WARPS), n), h, ids, weights,
            down.data, down.scales, down.group, beside, out, e, top_k, width, down.out_features,
            experts.leaves, int(shared is not None), defines=down.defines,
        )  # fmt: skip
        return out if self.comm is None else self.comm.tree_sum(out)

    @staticmethod
    def _check_leaves(shared, leaves: int) -> None:
        if shared.leaves != leaves:
            raise UserError(
                f"moe: shared experts in {shared.leaves} leaves, routed ones in {leaves}; expected "
                "equal numbers"
            )

    def _shared_leaves(self, x, shared: Mlp, leaves: int, hidden=None):
        """Unjoined leaf sums of the shared experts, fp32 [T, leaves, hidden]."""
        down = shared.down
        self._check_leaves(shared, leaves)
        h = self._dense_gate_up("moe", x, shared) if hidden is None else hidden
        y = self.empty((len(x), leaves, down.out_features))
        if isinstance(down, TensorMatrix):
            n, parts = down.out_features, leaves * down.parts
            cut = self._cut(len(x), down, parts, leaves, leaves)
            self._mma("linear_mma", h, down, y, ((0, leaves * n, n), (n,)), cut, parts)
            return y
        grid = (ceil(down.out_features, WARPS), ceil(len(x), ROWS))
        self._launch(
            "linear", "linear_leaves", grid, h, down.data, down.scales, down.group, y, len(x),
            down.out_features, down.in_features, leaves, defines=down.defines,
        )  # fmt: skip
        return y

    # -- tokens

    def head(self, x, weight: Matrix, vocab_size: int):
        """fp32 logits [T, V]: each rank's columns, gathered; the padding of the last is cut off."""
        if self.comm is None:
            return self._linear("head", x, weight, vocab_size)
        logits = self.comm.gather_columns(self.linear(x, weight))
        return self.launcher.xp.ascontiguousarray(logits[:, :vocab_size])

    # -- the drafter

    def block_inputs(self, x, weight: BlockInputs, q_norm, k_norm, eps: float, cos, sin, positions):
        """x [T, hidden] -> queries [T, H, d], and keys and values [T, 2, KV, d]: queries and keys
        normed over d (weights [d]), rounded and rotated; all rounded."""
        op, n, d = "block_inputs", len(x), q_norm.shape[0]
        heads, kv_heads = weight.q_rows // d, weight.kv_rows // d
        q_norm = self._take(op, "q_norm", q_norm, FLOAT32, d, aligned=d % 8 == 0)
        k_norm = self._take(op, "k_norm", k_norm, FLOAT32, d, aligned=d % 8 == 0)
        positions = self._take(op, "positions", self.index(positions), INT32, n)
        y = self.linear(x, weight.joined)
        q, kv = self.empty((n, heads, d), self.act), self.empty((n, 2, kv_heads, d), self.act)
        args = y, q_norm, k_norm, cos, sin, positions, q, kv, heads, kv_heads
        self._launch_heads(op, heads + 2 * kv_heads, n, cos, sin, d, eps, *args)
        return q, kv

    def put_context(
        self, x, weight, norms, eps: float, cos, sin, rows, slots, positions, pages, tables
    ) -> None:
        """Keys and values of all layers, as `block_inputs` makes them, of `rows` of x [T, hidden],
        into `pages` [layers, n_pages, leaf, 2 * KV * d] as `put_entries`; norms [layers, d]."""
        op, (layers, n_pages, leaf, width), d = "put_context", pages.shape, norms.shape[1]
        norms = self._take(op, "norms", norms, FLOAT32, layers, d, aligned=d % 8 == 0)
        pages = self._take(
            op, "pages", pages, self.act, layers, None, None, weight.out_features // layers,
            aligned=d % 8 == 0,
        )  # fmt: skip
        tables = self._tables(op, tables)
        rows, slots, positions = (self.index(a).reshape(-1) for a in (rows, slots, positions))
        y = self.linear(x, weight)
        args = (
            y, norms, cos, sin, rows, slots, positions, tables, pages, width // d, tables.shape[1],
            leaf, np.int64(n_pages * leaf * width),
        )  # fmt: skip
        self._launch_heads(op, layers * width // d, len(rows), cos, sin, d, eps, *args)

    def _launch_heads(self, kernel: str, heads: int, n: int, cos, sin, d: int, eps, *args) -> None:
        """A kernel of the rms_norm section on so many heads of n rows."""
        for name, table in (("cos", cos), ("sin", sin)):
            self._take(kernel, name, table, FLOAT32, None, d // 2)
        self._launch(
            "rms_norm", kernel, (heads, n), *args, d, np.float32(1.0 / d), eps,
            shared_bytes=SHARED_BYTES[kernel](d), defines=norm_defines(d, clusters=False),
            dependent=True,
        )  # fmt: skip

    def block_attention(
        self, q, kv, pages, tables, lengths, window: int, scale: float, span: int, settled=False
    ):
        """Drafter attention: every block over its context and itself, non-causal -> rounded.

        settled: another block_attention was launched since lengths, tables and pages were written
        """
        op = "block_attention"
        rows, heads, d = q.shape
        q = self._take(op, "q", q, self.act, None, None, None, aligned=d % 8 == 0)
        whole = d % 8 == 0  # then keys are read 8 numbers at a time
        shape = self._tensor_shape(d, d, pages.shape[1], span, apart=True)
        kv = self._take(op, "kv", kv, self.act, rows, 2, None, d, aligned=whole)
        kv_heads, leaf = kv.shape[2], pages.shape[1]
        pages = self._take(op, "pages", pages, self.act, None, leaf, 2, kv_heads, d, aligned=whole)
        tables = self._tables(op, tables)
        blocks, max_pages = tables.shape
        lengths = self._take(op, "lengths", self.index(lengths), INT32, blocks)
        n = rows // blocks
        if n > leaf:
            raise UserError(f"{op}: a block of {n} rows does not fit a leaf of {leaf} positions")
        factor = np.float32(scale) * reference.LOG2E
        if shape is not None and rows:
            return self._block_attention_mma(
                q, kv, pages, tables, lengths, window, factor, shape, settled
            )
        spans = max_pages // span + 1
        parts = self.empty((rows, heads, spans, 2))
        values = self.empty((rows, heads, spans, d))
        out = self.empty(q.shape, self.act)
        defines = attention_defines(d, d, leaf, span)
        grid = (min(spans, MAX_SPAN_BLOCKS), kv_heads * ceil(heads // kv_heads, HEADS), rows)
        self._launch(
            "attention", "block_spans", grid, q, kv, pages, lengths, tables, parts, values, n,
            heads, kv_heads, spans, max_pages, window, factor,
            shared_bytes=attention_shared_bytes(d, leaf), defines=defines,
        )  # fmt: skip
        grid = (ceil(d, THREADS), heads, rows)
        self._launch(
            "attention", "block_fold", grid, parts, values, lengths, out, n, heads, spans,
            defines=defines,
        )  # fmt: skip
        return out

    # -- the choice of tokens

    def requests(self, params):
        """SamplingParams of n requests where and as the kernels read them, uint8 [n, 32]."""
        return self.launcher.upload(self.pack_requests(params))

    def pack_requests(self, params) -> np.ndarray:
        """`requests` on the host."""
        packed = np.zeros(len(params), REQUEST)
        for row, asked in zip(packed, params, strict=True):
            if asked.greedy:
                continue
            if asked.seed is None:
                raise UserError(
                    "choose: a sampled request needs its seed (SamplingParams.with_seed)"
                )
            row["seed"], row["temperature"] = asked.seed, asked.temperature
            row["top_p"] = max(1, int(math.ldexp(asked.top_p, 64))) if asked.top_p < 1 else 0
            row["min_mass"] = int(math.ldexp(asked.min_p, sampling.MASS_BITS))
            row["top_k"] = min(max(asked.top_k, 0), INT32_MAX)
        return packed.view(np.uint8).reshape(len(params), REQUEST.itemsize)

    def choose(self, logits, positions, params, paths=None):
        """The target's token for each row, to the bit that of `sampling.choose` -> int32 [T].

        logits fp32 [T, V], not changed;  positions of the emitted tokens;  params, paths: T each
        """
        adjusted = logits
        if any(p.needs_path or p.logit_bias for p in params):
            adjusted = self._penalised(logits, params, paths)
        if all(p.greedy for p in params):
            return self.best_tokens(logits, adjusted)
        owners = self.arange(len(params))
        return self.sample(logits, owners, positions, self.requests(params), adjusted=adjusted)

    def best_tokens(self, logits, adjusted=None):
        """Greedy tokens int32 [T]; adjusted: the logits after penalties."""
        adjusted = logits if adjusted is None else adjusted
        return self._best_of_parts(logits, adjusted, (self.arange(1),) * 2, False).tokens

    def sample(self, logits, owners, positions, requests, *, ahead: int = 0, adjusted=None):
        """`choose` with everything on the device -> int32 [T].

        owners    int32 [T] the request of each row, -1 for a filler row
        positions int32 [T]; the emitted token stands `ahead` further on;  requests: of `requests`
        adjusted  the logits after penalties
        """
        n, vocab = logits.shape
        owners = self._take("sample", "owners", self.index(owners), INT32, n)
        positions = self._take("sample", "positions", self.index(positions), INT32, n)
        adjusted = logits if adjusted is None else adjusted
        p = self._best_of_parts(logits, adjusted, (requests, owners), True)
        asked, counted, grid = (requests, owners, positions), (p.masses, p.counts), (p.parts, n)
        self._choice(
            "fill_bins", grid, adjusted, requests, owners, p.tokens, p.peaks, *counted, vocab
        )
        scores, keys = (self.empty((n, width), UINT64) for width in (p.parts, min(LISTED, vocab)))
        self._choice(
            "score_kept", grid, adjusted, *asked, p.tokens, p.peaks, *counted, scores, keys,
            p.listed, vocab, ahead,
        )  # fmt: skip
        self._choice(
            "choose", (n,), adjusted, *asked, p.peaks, *counted, scores, keys, p.listed, p.tokens,
            vocab, ahead, p.parts,
        )  # fmt: skip
        return p.tokens

    def _choice(self, kernel: str, grid, *args) -> None:
        """Launch a kernel that may start behind the one in front of it."""
        self._launch("tokens", kernel, grid, *args, defines=TOKEN_DEFINES, dependent=True)

    def _best_of_parts(self, logits, adjusted, asked: tuple, sampled: bool) -> _Parts:
        """The largest logits of all rows; with `sampled`, asked: (requests, owners)."""
        n, vocab = logits.shape
        logits = self._take("choose", "logits", logits, FLOAT32, None, None)
        adjusted = self._take("choose", "adjusted", adjusted, FLOAT32, n, vocab)
        parts, bins = ceil(vocab, PART), BINS if sampled else 1
        p = _Parts(
            parts=parts,
            tokens=self.empty((n,), INT32), peaks=self.empty((n,)),
            masses=self.empty((n, bins), UINT64), counts=self.empty((n, bins), INT32),
            listed=self.empty((n,), INT32),
        )  # fmt: skip
        bests, states = self.empty((n, parts), UINT64), self.empty((n, parts), INT32)
        self._choice(
            "best_of_parts", (parts, n), logits, adjusted, *asked, bests, states, p.masses,
            p.counts, p.listed, vocab, int(sampled),
        )  # fmt: skip
        self._choice("best_tokens", (ceil(n, WARPS),), bests, states, p.tokens, p.peaks, n, parts)
        return p

    def _penalised(self, logits, params, paths):
        """A copy of the logits with penalties, logit bias and min_tokens of every row."""
        seen, bias, stops, penalties = [], [], [], np.ones((len(params), 3), np.float32)
        for row, (asked, path) in enumerate(
            zip(params, paths or [None] * len(params), strict=True)
        ):
            if asked.needs_path and path is None:
                raise UserError("choose: these parameters need the row's path, got None")
            penalties[row] = (
                asked.repetition_penalty,
                asked.frequency_penalty,
                asked.presence_penalty,
            )
            counts = dict.fromkeys(path.prompt.tolist(), 0) | dict(path.output) if path else {}
            seen.append(counts if asked.needs_path else {})
            bias.append(dict(asked.logit_bias))
            early = path is not None and path.length < asked.min_tokens
            stops.append(dict.fromkeys(path.stop_ids, 0) if early else {})
        n, vocab = logits.shape
        adjusted = self.empty(logits.shape)
        adjusted[...] = logits
        lists = [
            *self._lists(seen, INT32),
            *self._lists(bias, FLOAT32),
            *self._lists(stops, INT32)[:2],
        ]
        self._launch(
            "tokens", "penalise", (n,), adjusted, self.launcher.upload(penalties), *lists, vocab,
            defines=TOKEN_DEFINES,
        )  # fmt: skip
        return adjusted

    def _lists(self, rows: list[dict], dtype):
        """{id: value} of every row as (offsets [n + 1], ids, values); ids and values not empty."""
        offsets = np.cumsum([0, *(len(r) for r in rows)])
        ids = [i for r in rows for i in r] or [0]
        values = [v for r in rows for v in r.values()] or [0]
        arrays = np.array(offsets, np.int32), np.array(ids, np.int32), np.array(values, dtype)
        return [self.launcher.upload(a) for a in arrays]

    def penalties(self, slots: int, vocab: int, n_stops: int) -> Penalties:
        """Room for the penalties of every slot, all off; n_stops: stop ids of a request at most."""
        made = Penalties(
            counts=np.full((slots, vocab), -1, np.int32),
            biases=np.zeros((slots, vocab), np.float32),
            stops=np.full((slots, max(n_stops, 1)), -1, np.int32),
            values=np.tile(np.array([1, 0, 0], np.float32), (slots, 1)),
            emitted=np.zeros(slots, np.int32),
            min_tokens=np.zeros(slots, np.int32),
        )
        return Penalties(
            **{name: self.launcher.upload(array) for name, array in vars(made).items()}
        )

    def set_penalties(self, state: Penalties, slot: int, asked, path) -> None:
        """A request takes a slot: its SamplingParams and the sampling.Path of its text so far."""
        vocab, n_stops = state.counts.shape[1], state.stops.shape[1]
        counts, biases = np.full(vocab, -1, np.int32), np.zeros(vocab, np.float32)
        counts[path.prompt] = 0
        counts[list(path.output)] = list(path.output.values())
        biases[list(asked.logit_bias)] = list(asked.logit_bias.values())
        if len(path.stop_ids) > n_stops:
            raise UserError(
                f"set_penalties: {len(path.stop_ids)} stop ids, there is room for {n_stops}"
            )
        stops = np.full(n_stops, -1, np.int32)
        stops[: len(path.stop_ids)] = sorted(path.stop_ids)
        values = asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty
        for array, row in (
            (state.counts, counts),
            (state.biases, biases),
            (state.stops, stops),
            (state.values, np.array(values, np.float32)),
            (state.emitted, np.array(path.length, np.int32)),
            (state.min_tokens, np.array(min(asked.min_tokens, INT32_MAX), np.int32)),
        ):
            array[slot] = self.launcher.upload(row)

    def penalise_paths(self, logits, rows: TreeRows, state: Penalties, depth: int):
        """A copy of the logits [T, V] of trees of at most `depth`, with every row's penalties."""
        n, vocab = logits.shape
        logits = self._take("penalise_paths", "logits", logits, FLOAT32, None, None)
        out, grid = self.empty(logits.shape), (ceil(vocab, PART), n)
        self._launch(
            "tokens", "penalise_paths", grid, logits, rows.token_ids, rows.sequence, rows.parent,
            state.counts, state.biases, state.stops, state.values, state.emitted, state.min_tokens,
            out, vocab, depth, state.stops.shape[1],
            shared_bytes=SHARED_BYTES["penalise_paths"](depth), defines=TOKEN_DEFINES,
        )  # fmt: skip
        return out

    def count_tokens(self, state: Penalties, tokens, slots) -> None:
        """Emitted tokens [B, M] of `walk_trees` enter the counts of their slots [B]."""
        b, m = tokens.shape
        tokens = self._take("count_tokens", "tokens", tokens, INT32, None, None)
        slots = self._take("count_tokens", "slots", self.index(slots), INT32, b)
        self._launch(
            "tokens", "count_tokens", (ceil(b, THREADS),), tokens, slots, state.counts,
            state.emitted, b, m, state.counts.shape[1], defines=TOKEN_DEFINES,
        )  # fmt: skip

    def add_noise(self, logits, positions, params):
        """Draft logits [T, V] of sampled rows / temperature + the target's noise at `positions`."""
        owners = self.arange(len(params))
        return self.add_noise_of(logits, owners, positions, self.requests(params))

    def add_noise_of(self, logits, owners, positions, requests):
        """`add_noise` with everything on the device; owners as in `sample`."""
        n, vocab = logits.shape
        logits = self._take("add_noise", "logits", logits, FLOAT32, None, None)
        owners = self._take("add_noise", "owners", self.index(owners), INT32, n)
        positions = self._take("add_noise", "positions", self.index(positions), INT32, n)
        return self._noisy(logits, owners, positions, requests, True)

    def _noisy(self, logits, owners, positions, requests, copied: bool):
        """Sampled rows with noise; the others only if `copied`."""
        n, vocab = logits.shape
        out, grid = self.empty(logits.shape), (ceil(vocab, THREADS), n)
        self._choice(
            "add_noise", grid, logits, requests, owners, positions, out, vocab, int(copied)
        )
        return out

    def top_log_probs(self, logits, k: int, noise: tuple | None = None):
        """The k most likely tokens of each row: ids int32, log-probabilities fp32, [T, k].

        Ordered by logit descending, then id ascending. noise: (owners, positions, requests), for
        the logits with noise that `add_noise_of` would give.
        """
        logits = self._take("top_log_probs", "logits", logits, FLOAT32, None, None)
        n, vocab = logits.shape
        k = min(k, vocab)
        if k > FOUND:
            logits = logits if noise is None else self.add_noise_of(logits, *noise)
            return self._log_softmax_top(logits, k, None)[:2]
        noisy, asked = logits, (self.arange(1),) * 2
        if noise is not None:
            owners, positions, requests = noise
            owners = self._take("top_log_probs", "owners", self.index(owners), INT32, n)
            positions = self._take("top_log_probs", "positions", self.index(positions), INT32, n)
            noisy, asked = (
                self._noisy(logits, owners, positions, requests, False),
                (requests, owners),
            )
        parts, rows = ceil(vocab, PART), (logits, noisy, *asked)
        runs = self.empty((n, parts * RUNS), INT32)
        peaks, sums = self.empty((n, parts)), self.empty((n, parts))
        ids, log_probs = self.empty((n, k), INT32), self.empty((n, k))
        sampled = int(noise is not None)
        self._choice("top_of_parts", (parts, n), *rows, runs, peaks, sums, vocab, sampled)
        self._choice(
            "top_of_runs", (n,), *rows, runs, peaks, sums, ids, log_probs, vocab, k, parts, sampled
        )
        return ids, log_probs

    def log_softmax_top(self, logits, chosen, n: int) -> sampling.TokenLogprobs:
        """Log-probabilities of chosen tokens and of the n most likely, as `sampling`'s to the bit,
        on the host."""
        logits = self._take("log_softmax_top", "logits", logits, FLOAT32, None, None)
        chosen = self._take("log_softmax_top", "chosen", self.index(chosen), INT32, len(logits))
        k = min(max(n, 1), logits.shape[1])
        ids, log_probs, of_chosen = self._log_softmax_top(logits, k, chosen)
        ids, log_probs = self.download(ids)[:, :n], self.download(log_probs)[:, :n]
        return sampling.TokenLogprobs(self.download(of_chosen), ids, log_probs)

    def _log_softmax_top(self, logits, k: int, chosen):
        rows, vocab = logits.shape
        ids, log_probs = self.empty((rows, k), INT32), self.empty((rows, k))
        of_chosen = self.empty((rows,))
        self._launch(
            "tokens", "log_softmax_top", (rows,), logits, ids if chosen is None else chosen, ids,
            log_probs, of_chosen, vocab, k, int(chosen is not None),
            shared_bytes=SHARED_BYTES["log_softmax_top"](k), defines=TOKEN_DEFINES,
        )  # fmt: skip
        return ids, log_probs, of_chosen

    # -- trees and cache entries, on the device for a batch of sequences

    def draft_rows(self, roots, slots, lengths, tables, n: int, mask: int) -> DraftRows:
        """The drafter's blocks of n rows for B sequences; a slot of -1 is an unused place."""
        roots = self.index(roots)
        b = len(roots)
        slots = self._take("draft_rows", "slots", self.index(slots), INT32, b)
        tables = self._tables("draft_rows", tables)
        pages = tables.shape[1]
        shapes = (b * n,), (b * n,), (b,), (b, pages), (b * (n - 1),), (b * (n - 1),)
        made = [self.empty(shape, INT32) for shape in shapes]
        self._launch(
            "tree", "draft_rows", (b,), roots, slots, self.index(lengths), tables, *made, n, pages,
            mask, dependent=True,
        )  # fmt: skip
        return DraftRows(*made)

    def build_trees(self, roots, limits, candidates, log_probs, budget: int) -> Trees:
        """`spec_decode.build_tree` for B sequences: candidates, log_probs [B, D, W]."""
        b, depth, width = candidates.shape
        roots = self._take("build_trees", "roots", self.index(roots), INT32, b)
        limits = self._take("build_trees", "limits", self.index(limits), INT32, b)
        self._take("build_trees", "candidates", candidates, INT32, b, depth, width)
        self._take("build_trees", "log_probs", log_probs, FLOAT32, b, depth, width)
        ids, parents, depths = (self.empty((b, budget), INT32) for _ in range(3))
        scores, sizes = self.empty((b, budget)), self.empty((b,), INT32)
        self._launch(
            "tree", "build_trees", (b,), roots, limits, candidates, log_probs, ids, parents, depths,
            scores, sizes, depth, width, budget,
            shared_bytes=SHARED_BYTES["build_trees"](budget, depth, width), dependent=True,
        )  # fmt: skip
        return Trees(ids, parents, depths, scores, sizes)

    def tree_rows(self, trees: Trees, slots, lengths, rows: int) -> TreeRows:
        """The trees as the rows of one forward of `rows` rows; those left over are filler."""
        b, budget = trees.token_ids.shape
        slots = self._take("tree_rows", "slots", self.index(slots), INT32, b)
        ids, positions, sequence, parent = (self.empty((rows,), INT32) for _ in range(4))
        first = self.empty((b,), INT32)
        self._launch(
            "tree", "tree_rows", (1 if rows else 0,), trees.token_ids, trees.parents, trees.depths,
            trees.sizes, slots, self.index(lengths), ids, positions, sequence, parent, first, b,
            budget, rows, dependent=True,
        )  # fmt: skip
        return TreeRows(ids, positions, sequence, parent, first)

    def walk_trees(self, trees: Trees, first, choices, slots, lengths, depth: int) -> Walks:
        """Follow the target's `choices` (int32 [T], by row) through every tree; at most depth + 1
        accepted rows each."""
        b, budget = trees.token_ids.shape
        first = self._take("walk_trees", "first", first, INT32, b)
        choices = self._take("walk_trees", "choices", self.index(choices), INT32, None)
        slots = self._take("walk_trees", "slots", self.index(slots), INT32, b)
        lists = [self.empty((b, depth + 1), INT32) for _ in range(4)]
        counts, roots = self.empty((b,), INT32), self.empty((b,), INT32)
        self._launch(
            "tree", "walk_trees", (ceil(b, WARPS),), trees.token_ids, trees.parents, trees.sizes,
            first, choices, slots, self.index(lengths), *lists, counts, roots, b, budget, depth + 1,
            dependent=True,
        )  # fmt: skip
        return Walks(*lists, counts, roots)

    def put_entries(self, pages, entries, rows, slots, positions, tables) -> None:
        """Write rows of `entries` [layers, T, width] into `pages` [layers, n_pages, leaf, width] at
        positions of sequences, all int32 [n]; a slot of -1 is skipped. tables: int32 [slots, pages]
        page numbers."""
        layers, n_pages, leaf, width = pages.shape
        pages = self._take("put_entries", "pages", pages, self.act, None, None, None, None)
        entries = self._take("put_entries", "entries", entries, self.act, layers, None, width)
        tables = self._tables("put_entries", tables)
        rows, slots, positions = (self.index(a).reshape(-1) for a in (rows, slots, positions))
        grid = (ceil(width, THREADS), len(rows), layers)
        self._launch(
            "entries", "put_entries", grid, entries, rows, slots, positions, tables, pages,
            entries.shape[1], width, tables.shape[1], leaf, np.int64(n_pages * leaf * width),
            dependent=True,
        )  # fmt: skip

    def advance(self, walks: Walks, slots, lengths, roots, limits) -> None:
        """Where B sequences stand after their walks: lengths of their slots, each once; roots and
        limits, int32 [B]."""
        b = len(walks.counts)
        slots = self._take("advance", "slots", self.index(slots), INT32, b)
        lengths = self._take("advance", "lengths", lengths, INT32, None)
        roots = self._take("advance", "roots", roots, INT32, b)
        limits = self._take("advance", "limits", limits, INT32, b)
        args = slots, walks.counts, walks.roots, lengths, roots, limits, b
        self._launch("entries", "advance", (ceil(b, THREADS),), *args, dependent=True)


# ---- helpers -----------------------------------------------------------------------------------


def rope_table(rope: config.Rope, dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """The reference's rotation table, on the host."""
    inverse, amplitude = reference.rope_frequencies(rope, dim)
    angles = np.arange(positions)[:, None] * inverse
    return (
        (np.cos(angles) * amplitude).astype(np.float32),
        (np.sin(angles) * amplitude).astype(np.float32),
    )


def _too_large(kernel: str, need: int, limits: Limits) -> UserError:
    """Of a kernel, or of one of its variants (_NT or _NT_MW behind its name)."""
    instead = INSTEAD.get(re.sub(r"(_\d+)+$", "", kernel), "lower decode.leaf")
    return UserError(
        f"{kernel}: needs {need} bytes of shared memory, a block on {limits.name} has "
        f"{limits.shared_bytes}; {instead}"
    )


def _scalar(kernel: str, value):
    """A Python number as the 4 bytes that a kernel's int or float takes; arrays as they are."""
    if isinstance(value, (bool, int)):
        if not -(2**31) <= value < 2**31:
            raise UserError(f"{kernel}: {value} does not fit an int argument")
        return np.int32(value)
    return np.float32(value) if isinstance(value, float) else value
