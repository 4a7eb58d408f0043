"""NumPy twins of every operation: the CPU backend, and what the kernels are checked against.

Bits (R1, R2). A BLAS call's rounding depends on its shape, so no call's shape ever depends on the
work: rows travel in tiles of `ROW_TILE`, columns in tiles chosen from the weight alone, K in the
leaves of the table below. A row then keeps its bits whatever its neighbours are, and a tensor-
parallel rank computes the very tiles that a single rank would. `self_check` proves the property on
the machine at hand, because it belongs to the BLAS library and not to us.

How each sum over K is cut (`leaves` = the largest power of two up to 8 that divides the units):

    operation             K                     leaves
    q_a, kv_a, router     hidden                1 (replicated)
    q_b, gate, up, head   q_lora or hidden      1 (sharded by output columns, in 8 shards)
    absorb_q, absorb_v    nope; latent          1 (a head is never cut)
    o_proj                heads x v             one a head (a power of two of them, else `leaves`)
    down_proj             expert width          8, whole quantisation groups
    drafter fc            taps x hidden         1 (sharded by output columns)
    drafter o, down       heads x d; width      8, whole heads; columns
    attention P.V         positions             one a cache page, folded in spans (R3)

Leaves are added pairwise, ((0+1)+(2+3))+((4+5)+(6+7)).

The kernels of ops.py cut K in the same leaves and go through one in an order of their own: the
simple ones lane by lane; tensor cores (kernels_gemm.cu, kernels_moe.cu; `kernels:` in the config)
16 columns at a time, ascending, after cutting a leaf in equal parts that join pairwise:

    a leaf of w columns             the largest power of two up to 8 that leaves whole steps of 32
                                    columns and at least 128 in a part (7168: 8; 1536: 8; 256: 2)
    the router; shared gate, up     likewise, up to 32 (beside experts that tensor cores take)
    routed experts' down_proj       1: one warp adds a leaf of a whole expert
    a score of attention            2: even and odd steps of 16 columns (kernels_attention.cu)
    attention P.V                   1: 16 positions at a time

Rounding map: the places where a value is cast to the activation type (a no-op for float32).

    x / rms                  rounded, times the weight, rounded
    q_a, kv_a outputs        stay fp32 (they feed a norm or the rotation)
    q_b output               rounded
    absorbed q, rotated q    rounded: what attention reads
    latent, k_pe             rounded: what the cache holds; a row's own key included
    P of a leaf              rounded; its sum is the sum of the rounded values
    attention output         rounded in the latent space, and again after absorb_v
    o_proj's sum             rounded, added to the residual, rounded
    gate, up                 stay fp32; SiLU(gate) * up is rounded
    MoE sum (R4)             rounded once, added to the residual, rounded
    router                   reads the rounded row, upcast; scores, weights, logits stay fp32

bfloat16 values are held in float32 arrays here: every bf16 product is exact in fp32, so rounding at
the places above is all that the type means.
"""

from __future__ import annotations

import copy
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_limits

import sampling
from config import Rope, UserError

ROW_TILE = 8  # rows of every matrix product; short tiles are padded with zero rows
HEAD_TILE = 8  # heads of one row that attention computes together, padded likewise
LOG2E = np.float32(math.log2(math.e))
WORKERS = 2  # threads that share the independent products of one call; they never change a bit
PARALLEL_FLOPS = 6e6  # below this a hand-over to a thread costs more than it saves


# ---- INT4, the published format ----------------------------------------------------------------


@dataclass(frozen=True)
class Int4Weight:
    """Packed INT4 matrix or stack: w[..., o, c] = code[..., o, c] * scales[..., o, c // group].

    packed  int32            [..., out, in / 8]      column c in bits 4*(c % 8) of word c // 8
    scales  float32 or bf16  [..., out, in / group]
    """

    packed: np.ndarray
    scales: np.ndarray

    @property
    def out_features(self) -> int:
        return self.packed.shape[-2]

    @property
    def in_features(self) -> int:
        return self.packed.shape[-1] * 8

    @property
    def group_size(self) -> int:
        return self.in_features // self.scales.shape[-1]


def unpack_int4(packed: np.ndarray) -> np.ndarray:
    """int32 or uint32 [..., n] to int8 codes -8..7 [..., 8 n], lowest nibble first.

    The shift is unsigned: a set top bit must not spread into its neighbours.
    """
    words = np.ascontiguousarray(packed).view(np.uint32)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    nibbles = (words[..., None] >> shifts) & np.uint32(15)
    return (nibbles.astype(np.int8) - np.int8(8)).reshape(*packed.shape[:-1], -1)


def dequantise_int4(weight: Int4Weight) -> np.ndarray:
    """float32 [..., out, in]: exact with bf16 scales, rounded once with float32 ones."""
    codes = unpack_int4(weight.packed).astype(np.float32)
    grouped = codes.reshape(*weight.scales.shape, weight.group_size)
    return (grouped * weight.scales.astype(np.float32)[..., None]).reshape(codes.shape)


def to_float32(weight) -> np.ndarray:
    """A dense float32 or bf16 array, or an `Int4Weight`, as float32: exact but for what
    `dequantise_int4` rounds."""
    if isinstance(weight, Int4Weight):
        return dequantise_int4(weight)
    return np.asarray(weight).astype(np.float32)


# ---- weights from a seed -----------------------------------------------------------------------


def generate(
    out: np.ndarray, seed: int, mean: float, scale: float, first=(0, 0), width: int | None = None
) -> None:
    """Fill `out` [rows, columns] (or [n]: n rows of one) with the part at `first` (row, column) of
    a matrix of `width` columns (default: out's own).

    An entry is a function of (seed, its index in the whole matrix) alone, so parts fit together.
    float32, bfloat16: mean + scale * u, rounded, u uniform in [-1, 1); int32: 32 random bits.
    The counter-based generator is SplitMix64 (Steele, Lea, Flood 2014).
    """
    rows = out.reshape(len(out), -1)
    n, columns = rows.shape
    width = columns if width is None else width
    step = max(1, (1 << 16) // max(columns, 1))  # what the caches hold
    for begin in range(0, n, step):
        part = rows[begin : begin + step]
        at = np.arange(first[0] + begin, first[0] + begin + len(part), dtype=np.uint64)
        z = at[:, None] * np.uint64(width) + np.arange(columns, dtype=np.uint64)  # wraps around
        z += np.uint64(first[1] + 1)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(seed)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        if out.dtype == np.int32:
            part[:] = z.astype(np.uint32).view(np.int32)
        else:
            u = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
            part[:] = np.float32(mean) + np.float32(scale) * u


# ---- tiles -------------------------------------------------------------------------------------


def column_tile(width: int) -> int:
    """Columns of one product for a shard of `width`: 64, 96 or 128, whichever pads least."""
    if width <= 128:
        return -(-width // 16) * 16
    return min((64, 96, 128), key=lambda tile: (-(-width // tile) * tile, tile))


@dataclass(frozen=True)
class TiledWeight:
    """A matrix as `linear` wants it: [leaves, column tiles, K / leaves, tile], float32.

    shards  equal parts of the output columns, each padded to whole tiles (1 where nothing is cut)
    width   valid columns of one shard
    row_cut whether tensor parallelism shards K: the leaf sums then join across ranks
    """

    data: np.ndarray
    shards: int
    width: int
    row_cut: bool = False

    @property
    def out_features(self) -> int:
        return self.shards * self.width

    @property
    def in_features(self) -> int:
        return self.data.shape[0] * self.data.shape[2]


@dataclass(frozen=True)
class MlpWeight:
    """Gate, up and down of E experts (E = 1: a dense or shared MLP), cut in S leaves of the width.

    gate_up  float32 [E, S, tiles, hidden, 2 * tile]  a tile's gate columns, then its up columns
    down     float32 [E, S, column tiles, width / S, column tile]
    width    width / S, valid columns of one leaf;  hidden: valid output columns
    packed   set instead of gate_up and down when memory is short: (gate, up, down) as read
    """

    gate_up: np.ndarray | None
    down: np.ndarray | None
    leaves: int
    width: int
    hidden: int
    packed: tuple | None = None

    @property
    def n_experts(self) -> int:
        return n_experts(self.packed[0]) if self.packed else len(self.gate_up)

    def tiles(self, e: int) -> tuple[np.ndarray, np.ndarray]:
        """Expert e's tiles: stored, or made now from the packed weights (same values and bits)."""
        if self.packed is None:
            return self.gate_up[e], self.down[e]
        return tile_mlp(*(to_float32(expert(w, e)) for w in self.packed), self.leaves)


def tile_columns(weight: np.ndarray, shards: int, n_leaves: int, row_cut: bool) -> TiledWeight:
    """[out, in] float32 to tiles; `shards` cuts the columns, `n_leaves` the sum over K."""
    out_features, in_features = weight.shape
    width = out_features // shards
    tile = column_tile(width)
    tiles = -(-width // tile)
    data = np.zeros((n_leaves, shards * tiles, in_features // n_leaves, tile), np.float32)
    by_leaf = weight.reshape(shards, width, n_leaves, in_features // n_leaves)
    for t in range(tiles):
        columns = by_leaf[:, t * tile : (t + 1) * tile]
        data[:, t::tiles, :, : columns.shape[1]] = columns.transpose(2, 0, 3, 1)
    return TiledWeight(data, shards, width, row_cut)


def row_tiles(x: np.ndarray) -> np.ndarray:
    """[T, K] to [ceil(T / ROW_TILE), ROW_TILE, K], the last tile padded with zero rows."""
    tiles = -(-x.shape[0] // ROW_TILE)
    if tiles * ROW_TILE == x.shape[0]:
        return np.ascontiguousarray(x).reshape(tiles, ROW_TILE, x.shape[1])
    padded = np.zeros((tiles * ROW_TILE, x.shape[1]), np.float32)
    padded[: x.shape[0]] = x
    return padded.reshape(tiles, ROW_TILE, x.shape[1])


def tree_sum(partials: np.ndarray) -> np.ndarray:
    """[leaves, ...] to [...], added pairwise in the one order of R2. leaves is a power of two."""
    while partials.shape[0] > 1:
        partials = partials[0::2] + partials[1::2]
    return partials[0]


_THREADS = threading.local()
_POOL: ThreadPoolExecutor | None = None


def _busy() -> bool:
    """Whether this thread is already working on a part."""
    return getattr(_THREADS, "busy", False)


def run_parts(parts: list) -> None:
    """Run callables that write disjoint results on WORKERS threads, with the caller's settings of
    floating-point errors; a nested call runs in place."""
    global _POOL
    if _busy():
        for part in parts:
            part()
        return

    errors = np.geterr()  # a thread's own

    def marked(part) -> None:
        _THREADS.busy = True
        try:
            with np.errstate(**errors):
                part()
        finally:
            _THREADS.busy = False

    if _POOL is None:
        _POOL = ThreadPoolExecutor(WORKERS - 1, thread_name_prefix="matmul")
    others = [_POOL.submit(marked, part) for part in parts[1:]]
    marked(parts[0])
    for other in others:
        other.result()


def matmul(a: np.ndarray, b: np.ndarray, split: int = 0) -> np.ndarray:
    """np.matmul of stacks of equal-shaped products; large stacks are shared among threads.

    `split` is the axis of the broadcast stack to cut. BLAS itself is kept to one thread: its own
    threading would make bits depend on the number of cores.
    """
    if max(a.size * b.shape[-1], b.size * a.shape[-2]) * 2 < PARALLEL_FLOPS or _busy():
        return np.matmul(a, b)
    stack = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if stack[split] < WORKERS:
        return np.matmul(a, b)
    out = np.empty((*stack, a.shape[-2], b.shape[-1]), np.float32)
    cuts = np.linspace(0, stack[split], WORKERS + 1).astype(int)

    def part(i: int) -> None:
        def cut(m: np.ndarray) -> np.ndarray:
            axis = split - len(stack) + m.ndim - 2
            if axis < 0 or m.shape[axis] == 1:
                return m
            return m[(slice(None),) * axis + (slice(cuts[i], cuts[i + 1]),)]

        target = out[(slice(None),) * split + (slice(cuts[i], cuts[i + 1]),)]
        np.matmul(cut(a), cut(b), out=target)

    run_parts([lambda i=i: part(i) for i in range(WORKERS)])
    return out


# ---- rows of the drafter ------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftRows:
    """The drafter's input for B blocks of n rows, all int32.

    token_ids, positions [B * n];  lengths [B] of context;  tables [B, pages]
    owners, draft_positions [B * (n - 1)]  cache slot (-1: unused) and position of every draft
    """

    token_ids: object
    positions: object
    lengths: object
    tables: object
    owners: object
    draft_positions: object


# ---- attention over leaves ---------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceRows:
    """What attention needs to know of one sequence in a batch.

    rows        slice of the batch
    pages       int32 [committed leaves]   pages that lie wholly below the committed length
    tail_first  absolute position of the first slot of the gathered tail
    tail        int32 [rows, tail leaves * leaf]  per row and slot: an index into
                (page under the tail, rows of the batch, one zero row)
    tail_page   page that holds the committed part of the tail, or -1
    visible     bool [rows, tail leaves, 1, leaf]  slot <= the row's own position
    """

    rows: slice
    pages: np.ndarray
    tail_first: int
    tail: np.ndarray
    tail_page: int
    visible: np.ndarray


def plan_attention(
    positions: np.ndarray,
    sequence: np.ndarray,
    parent: np.ndarray,
    lengths: np.ndarray,
    tables: np.ndarray,
    leaf: int,
) -> list[SequenceRows]:
    """Which cache entry or batch row stands in every slot that a row attends to (R3).

    positions  int32 [T] absolute;  sequence int32 [T], rows of one sequence adjacent
    parent     int32 [T] row of the parent in the batch or -1;  a parent precedes its children
    lengths    int32 [slots] committed length;  tables: int32 [slots, pages] page numbers
    A node's ancestors are put into the slots of their positions, so that a row reads the same keys
    in the same slots as if its path had been decoded one token at a time.
    """
    plans = []
    borders = np.flatnonzero(np.diff(sequence)) + 1
    starts = [0, *borders.tolist(), len(sequence)]
    for begin, end in zip(starts[:-1], starts[1:], strict=True):
        seq = int(sequence[begin])
        length, table = int(lengths[seq]), tables[seq]
        first = length // leaf
        n_rows = end - begin
        tail_leaves = int(positions[begin:end].max()) // leaf - first + 1
        zero = leaf + len(positions)
        tail = np.full((n_rows, tail_leaves * leaf), zero, np.int32)
        committed = length - first * leaf
        slots = np.arange(begin, end) + leaf
        for i in range(n_rows):
            above = int(parent[begin + i])
            if above >= 0:
                tail[i] = tail[above - begin]
            else:
                tail[i, :committed] = np.arange(committed)
            tail[i, int(positions[begin + i]) - first * leaf] = slots[i]
        slot_positions = first * leaf + np.arange(tail_leaves * leaf)
        visible = slot_positions <= positions[begin:end, None]
        plans.append(
            SequenceRows(
                rows=slice(begin, end),
                pages=np.asarray(table[:first], np.int32),
                tail_first=first * leaf,
                tail=tail,
                tail_page=int(table[first]) if committed else -1,
                visible=visible.reshape(n_rows, tail_leaves, 1, leaf),
            )
        )
    return plans


def fold_leaves(
    maxima: np.ndarray, sums: np.ndarray, values: np.ndarray, first: int, span: int
) -> tuple[np.ndarray, np.ndarray]:
    """Fold per-leaf softmax parts in ascending order, inside spans and then over spans (R3).

    maxima  float32 [rows, leaves, heads]      whole numbers (log2) or -inf where no key is visible
    sums    float32 [rows, leaves, heads]      values  float32 [rows, leaves, heads, width]
    Every factor is a power of two, so a leaf without visible keys adds an exact zero. Returns the
    folded (sum, value); `first` is the absolute index of leaf 0.
    """
    top = maxima.max(1, keepdims=True)
    if np.isfinite(maxima).all():
        exponent = maxima - top
        exponent[exponent < -126] = -200  # flush as the kernels do
        factor = np.ldexp(np.float32(1), exponent.astype(np.int32))
    else:
        with np.errstate(invalid="ignore"):
            exponent = np.maximum(maxima - top, -200.0)
        exponent = np.where(np.isneginf(maxima), -200, exponent)
        factor = np.ldexp(np.float32(1), np.nan_to_num(exponent).astype(np.int32))
        factor[exponent < -126] = 0
        factor[np.isnan(maxima)] = np.nan
    total_sum = total_value = None
    leaf = 0
    while leaf < maxima.shape[1]:
        end = min(maxima.shape[1], ((first + leaf) // span + 1) * span - first)
        span_sum = sums[:, leaf] * factor[:, leaf]
        span_value = values[:, leaf] * factor[:, leaf, :, None]
        for i in range(leaf + 1, end):
            span_sum = span_sum + sums[:, i] * factor[:, i]
            span_value = span_value + values[:, i] * factor[:, i, :, None]
        total_sum = span_sum if total_sum is None else total_sum + span_sum
        total_value = span_value if total_value is None else total_value + span_value
        leaf = end
    return total_sum, total_value


def free_memory() -> int:
    """Bytes of the host's memory that a program can have, the page cache included."""
    try:
        with open("/proc/meminfo") as file:
            found = next(line for line in file if line.startswith("MemAvailable:"))
        return 1024 * int(found.split()[1])
    except (OSError, StopIteration):  # not told: what nothing uses
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---- the operations ----------------------------------------------------------------------------


class ReferenceOps:
    """The operations on NumPy arrays. Every array is float32 or an integer type, C order.

    activation  "float32" or "bfloat16": the type of the rounding map above
    comm        joins the leaf sums of several ranks (parallel.Comm); None for one rank
    unpack      keep INT4 experts as float32 tiles; else they are unpacked at every use
    """

    name = "cpu"
    faults = ()  # a device's operations list here what they raise when a kernel has failed
    plan_attention = staticmethod(plan_attention)

    def __init__(self, activation: str = "float32", comm=None, unpack: bool = True):
        self.activation = activation
        self.comm = comm
        self.unpack = unpack
        # Bits must not depend on the number of cores: one BLAS thread, and our own threads around.
        self._blas_limit = threadpool_limits(1, user_api="blas")
        self_check()

    def alone(self) -> ReferenceOps:
        """The same operations for what every rank holds whole: nothing is joined across ranks."""
        twin = copy.copy(self)
        twin.comm = None
        return twin

    def round(self, x: np.ndarray) -> np.ndarray:
        """Cast to the activation type and back (round to nearest even)."""
        if self.activation == "float32":
            return x
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    def join(self, partials: np.ndarray) -> np.ndarray:
        """[this rank's leaves, ...] to the whole sum, along the pairwise tree over all ranks."""
        local = tree_sum(partials)
        return local if self.comm is None else self.comm.tree_sum(local)

    def decided(self, array: np.ndarray) -> np.ndarray:
        """Rank 0's draft candidates or chosen tokens, on every rank: rank 0 decides."""
        return array if self.comm is None else self.comm.share(array)

    # -- weights, once at load

    def prepare(self, weight, *, shards: int = 1, row_cut: bool = False) -> TiledWeight:
        """A dense or INT4 matrix [out, in] for `linear`.

        shards   parts of the output columns (or, with row_cut, of K) that this rank holds
        row_cut  K is cut in `shards` leaves whose sums are joined pairwise
        """
        dense = to_float32(weight)
        if row_cut:
            return tile_columns(dense, 1, shards, True)
        return tile_columns(dense, shards, 1, False)

    def prepare_mlp(self, gate, up, down, n_leaves: int) -> MlpWeight:
        """Stacks [E, width, hidden], [E, width, hidden], [E, hidden, width], dense or INT4."""
        hidden = gate.in_features if isinstance(gate, Int4Weight) else gate.shape[2]
        width = (down.in_features if isinstance(down, Int4Weight) else down.shape[2]) // n_leaves
        if not self.unpack:
            return MlpWeight(None, None, n_leaves, width, hidden, packed=(gate, up, down))
        experts = [
            tile_mlp(*(to_float32(expert(w, e)) for w in (gate, up, down)), n_leaves)
            for e in range(n_experts(gate))
        ]
        return MlpWeight(
            np.stack([e[0] for e in experts]),
            np.stack([e[1] for e in experts]),
            n_leaves,
            width,
            hidden,
        )

    def prepare_latent_inputs(self, q_a, kv_a) -> tuple[TiledWeight, TiledWeight]:
        """q_a [q_lora, hidden] and kv_a [latent + rope, hidden] for `latent_inputs`."""
        return self.prepare(q_a), self.prepare(kv_a)

    def prepare_block_inputs(self, q: list, k: list, v: list, shards: int, kv_shards: int):
        """q [H * d, hidden], k and v [KV * d, hidden] of all layers of the drafter, rows in so many
        shards: what `block_inputs` takes, a layer each, and what `put_context` takes."""
        queries = [self.prepare(w, shards=shards) for w in q]
        keys, values = ([self.prepare(w, shards=kv_shards) for w in some] for some in (k, v))
        inputs = list(zip(queries, keys, values, strict=True))
        return inputs, [pair for _, *pair in inputs]

    def prepare_heads(self, kv_b, n_heads: int, nope: int, v: int) -> tuple[np.ndarray, np.ndarray]:
        """kv_b [H * (nope + v), latent] to absorb_q's [H, nope, latent] and absorb_v's
        [H, latent, v], so that scores and sums are taken in the latent space."""
        per_head = to_float32(kv_b).reshape(n_heads, nope + v, -1)
        key = np.ascontiguousarray(per_head[:, :nope])
        return key, np.ascontiguousarray(per_head[:, nope:].transpose(0, 2, 1))

    def upload(self, array) -> np.ndarray:
        """A norm weight, bias or table as the operations read it: float32, C order."""
        return np.ascontiguousarray(to_float32(array))

    # -- memory: where the arrays of these operations live

    def zeros(self, shape) -> np.ndarray:
        """Zeros of the activation type: the cache's pages."""
        return np.zeros(shape, np.float32)

    @staticmethod
    def blank(shape, dtype) -> np.ndarray:
        """Zeros where `generate` fills them with a weight."""
        return np.zeros(shape, dtype)

    generate = staticmethod(generate)

    def activations(self, shape) -> np.ndarray:
        """An unwritten array of the activation type."""
        return np.empty(shape, np.float32)

    def index(self, array) -> np.ndarray:
        """Rows, positions, ids or page numbers as int32, where the operations read them."""
        return np.asarray(array, np.int32)

    def arange(self, n: int) -> np.ndarray:
        """int32 0 … n - 1, where the operations read it."""
        return np.arange(n, dtype=np.int32)

    def download(self, array) -> np.ndarray:
        """Any result as a NumPy array on the host."""
        return array

    # -- dense

    def embed(self, token_ids: np.ndarray, table: np.ndarray, first_id: int) -> np.ndarray:
        """int32 [T] -> [T, hidden]; the rank's rows start at `first_id`, others read as zero."""
        local = token_ids - first_id
        mine = (local >= 0) & (local < table.shape[0])
        rows = table[np.where(mine, local, 0)]
        rows[~mine] = -0.0  # the one number whose sum with any x is x, bit for bit
        return self.round(rows if self.comm is None else self.comm.tree_sum(rows))

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        """x [..., K] -> x / sqrt(mean(x^2) + eps), rounded, times weight [K], rounded."""
        mean = np.add.reduce(x * x, axis=-1, keepdims=True) * np.float32(1.0 / x.shape[-1])
        return self.round(self.round(x / np.sqrt(mean + np.float32(eps))) * weight)

    def linear(self, x: np.ndarray, weight: TiledWeight, rounded: bool = False) -> np.ndarray:
        """x [T, in] times weight [out, in] -> fp32 [T, out], in the leaf order of the table;
        rounded: to the activation type."""
        if rounded:
            return self.round(self.linear(x, weight))
        if not len(x):
            return np.empty((0, weight.out_features), np.float32)
        tiles = row_tiles(x)
        n, n_leaves = tiles.shape[0], weight.data.shape[0]
        if n_leaves == 1:
            y = matmul(tiles[:, None], weight.data[0][None], split=1)
        else:
            cut = tiles.reshape(n, ROW_TILE, n_leaves, -1).transpose(2, 0, 1, 3)
            cut = np.ascontiguousarray(cut)[:, :, None]
            y = matmul(cut, weight.data[:, None], split=0)
        if weight.row_cut:
            y = self.join(y.reshape(n_leaves, n, *y.shape[-3:]))
        tile = y.shape[-1]
        y = y.reshape(n, weight.shards, -1, ROW_TILE, tile).transpose(0, 3, 1, 2, 4)
        y = y.reshape(n * ROW_TILE, weight.shards, -1)[: x.shape[0], :, : weight.width]
        return np.ascontiguousarray(y).reshape(x.shape[0], weight.out_features)

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The residual: x + round(y), rounded."""
        return self.round(x + self.round(y))

    def add_rms_norm(self, x, y, weight, eps: float, taps=None, first: int = 0):
        """The residual `add` and its `rms_norm`: (sum, normed); the sum is also written to columns
        first … of `taps` [T, width]."""
        x = self.add(x, y)
        if taps is not None:
            taps[:, first : first + x.shape[1]] = x
        return x, self.rms_norm(x, weight, eps)

    def rope_table(self, rope: Rope, dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin, fp32 [positions, dim / 2] (see `rope_frequencies`)."""
        inverse, amplitude = rope_frequencies(rope, dim)
        angles = np.arange(positions)[:, None] * inverse
        return (np.cos(angles) * amplitude).astype(np.float32), (np.sin(angles) * amplitude).astype(
            np.float32
        )

    def take_rows(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """x [T, K] at int32 rows [n] -> [n, K]."""
        return x[rows]

    # -- latent attention

    def latent_query(self, q, key, cos, sin, positions) -> np.ndarray:
        """q [T, H, nope + rope], key [H, nope, latent] -> [T, H, latent + rope], rounded.

        The nope part is absorbed: its product with a key becomes one with the latent entry. The
        rope part holds interleaved pairs (x0, x1), (x2, x3) …; it is de-interleaved, then rotated
        in halves. `latent_entry` does the same to the key, so their product is unchanged.
        """
        nope = key.shape[1]
        pairs = q[..., nope:]
        rope = _rotate(pairs[..., 0::2], pairs[..., 1::2], cos, sin, positions)
        return self.round(np.concatenate([_per_head(q[..., :nope], key), rope], -1))

    def latent_entry(self, kv, weight, eps: float, cos, sin, positions, out) -> None:
        """kv_a's fp32 output [T, latent + rope] -> cache entries, written to `out` of that shape:
        normed latent, rotated key."""
        latent = weight.shape[0]
        pairs = kv[:, latent:]
        rope = _rotate(pairs[:, 0::2], pairs[:, 1::2], cos, sin, positions)
        normed = self.rms_norm(np.ascontiguousarray(kv[:, :latent]), weight, eps)
        out[:] = np.concatenate([normed, self.round(rope)], -1)

    def latent_inputs(
        self, x, weight, q_norm, kv_norm, eps, cos, sin, positions, out
    ) -> np.ndarray:
        """x [T, hidden] times `weight` of prepare_latent_inputs: q_a's output, normed [T, q_lora];
        kv_a's goes through `latent_entry`, to `out` [T, latent + rope]."""
        q_a, kv_a = weight
        self.latent_entry(self.linear(x, kv_a), kv_norm, eps, cos, sin, positions, out)
        return self.rms_norm(self.linear(x, q_a), q_norm, eps)

    def latent_queries(
        self, x, weight, q_b, key, q_norm, kv_norm, eps, cos, sin, positions, out
    ) -> np.ndarray:
        """x [T, hidden] -> what attention asks with [T, H, latent + rope]: `latent_inputs`, q_b and
        `latent_query`; the cache entries go to `out`."""
        turn = cos, sin, positions
        q = self.latent_inputs(x, weight, q_norm, kv_norm, eps, *turn, out)
        q = self.linear(q, q_b, rounded=True).reshape(len(x), len(key), -1)
        return self.latent_query(q, key, *turn)

    def absorb_v(self, o: np.ndarray, value: np.ndarray) -> np.ndarray:
        """o [T, H, latent] times value [H, latent, v] -> rounded [T, H, v]."""
        return self.round(_per_head(o, value))

    def latent_attention(self, q, pages, fresh, plan, scale: float, latent: int, span: int):
        """Absorbed MLA over leaves -> rounded [T, H, latent].

        q      [T, H, latent + rope]           pages  [n_pages, leaf, latent + rope] of this layer
        fresh  [T, latent + rope]              keys of the rows of this batch
        plan   from `plan_attention`           scale  of the scores; span: leaves per span (R3)
        """
        n_rows, n_heads, _ = q.shape
        head_tiles = -(-n_heads // HEAD_TILE)
        padded = np.zeros((n_rows, head_tiles * HEAD_TILE, q.shape[2]), np.float32)
        padded[:, :n_heads] = q
        padded = padded.reshape(n_rows, 1, head_tiles, HEAD_TILE, -1)
        out = np.empty((n_rows, n_heads, latent), np.float32)
        zero = np.zeros((1, fresh.shape[1]), np.float32)
        factor = np.float32(scale) * LOG2E
        leaf = pages.shape[1]
        for s in plan:
            below = pages[s.tail_page] if s.tail_page >= 0 else np.zeros_like(pages[0])
            tail = np.concatenate([below, fresh, zero])[s.tail]
            tail = tail.reshape(len(tail), -1, 1, leaf, tail.shape[-1])
            parts = [self._leaf_parts(padded[s.rows], tail, s.visible, factor, latent)]
            if len(s.pages):
                keys = _gather_pages(pages, s.pages)[None, :, None]
                parts.insert(0, self._leaf_parts(padded[s.rows], keys, None, factor, latent))
            maxima, sums, values = (np.concatenate(p, 1) for p in zip(*parts, strict=True))
            total, value = fold_leaves(maxima, sums, values, 0, span)
            out[s.rows] = (value / total[..., None])[:, :n_heads]
        return self.round(out)

    def _leaf_parts(self, q, keys, visible, factor, latent):
        """Ceiling of the log2 maximum, sum and P.V of every leaf: [rows, leaves, heads(, latent)].

        q [rows, 1, head tiles, HEAD_TILE, D]; keys [rows or 1, leaves, 1, leaf, D]
        """
        scores = matmul(q, keys.swapaxes(-1, -2)) * factor
        scores = scores.reshape(*scores.shape[:2], -1, scores.shape[-1])
        maxima, p = self._leaf_softmax(scores, visible)
        tiled = p.reshape(*p.shape[:2], -1, HEAD_TILE, p.shape[-1])
        values = matmul(tiled, keys[..., :latent])
        return maxima, np.add.reduce(p, axis=-1), values.reshape(*p.shape[:3], latent)

    # -- experts

    def route(self, x, router: TiledWeight, bias, top_k: int, normalise: bool, scaling: float):
        """Sigmoid router -> ids int32 [T, top_k] ascending, weights fp32 [T, top_k].

        The bias chooses, the unbiased scores weigh; ties go to the lower id (R4). The one place
        where `routed_scaling_factor` is applied. DeepSeek-V3, `DeepseekV3TopkRouter`.
        """
        scores = np.float32(1) / (np.float32(1) + np.exp(-self.linear(x, router)))
        choice = scores + bias
        choice = np.where(np.isnan(choice), np.float32(-np.inf), choice)
        order = np.argsort(-choice, axis=1, kind="stable")[:, :top_k]
        ids = np.sort(order, axis=1)
        weights = np.take_along_axis(scores, ids, 1)
        if normalise:
            total = weights[:, 0].copy()
            for k in range(1, top_k):
                total += weights[:, k]
            weights = weights / (total[:, None] + np.float32(1e-20))
        return ids.astype(np.int32), weights * np.float32(scaling)

    def join_router(self, router, shared):
        """(router, shared experts) for `mixture`, from `prepare` and `prepare_mlp`."""
        return router, shared

    def mixture(
        self, x, router, bias, top_k: int, normalise: bool, scaling: float, experts, shared
    ) -> np.ndarray:
        """`route`, then `moe` with what it chose -> fp32 [T, hidden]."""
        ids, weights = self.route(x, router, bias, top_k, normalise, scaling)
        return self.moe(x, ids, weights, experts, shared)

    def silu_mul(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """SiLU(gate) * up, rounded."""
        return self.round(gate / (np.float32(1) + np.exp(-gate)) * up)

    def mlp(self, x: np.ndarray, weight: MlpWeight) -> np.ndarray:
        """A dense gated MLP: x [T, hidden] -> fp32 [T, hidden], leaves joined."""
        return self.join(self._dense_leaves(x, weight).swapaxes(0, 1))

    def moe(self, x, ids, weights, experts: MlpWeight, shared: MlpWeight | None) -> np.ndarray:
        """Routed and shared experts -> fp32 [T, hidden] (R4).

        ids, weights [T, k], ids ascending in a row; an id outside [0, E) adds nothing (filler).
        Within each leaf: experts by ascending id, weighted, then the shared one; then the tree.
        """
        top_k = ids.shape[1]
        weights = np.where((ids >= 0) & (ids < experts.n_experts), weights, np.float32(0))
        of_tile, tile_rows, place = group_rows(ids, experts.n_experts)
        padded = np.concatenate([x, np.zeros((1, x.shape[1]), np.float32)])
        results = self._mlp_tiles(padded[tile_rows], of_tile, experts)
        results = np.concatenate([results, np.zeros((1, *results.shape[1:]), np.float32)])
        parts = results[place[..., 0], place[..., 1]]  # [T, k, leaves, hidden]
        total = parts[:, 0] * weights[:, 0, None, None]
        for k in range(1, top_k):
            total += parts[:, k] * weights[:, k, None, None]
        if shared is not None:
            total += self._dense_leaves(x, shared)
        return self.join(total.swapaxes(0, 1))

    def _dense_leaves(self, x: np.ndarray, weight: MlpWeight) -> np.ndarray:
        """The one MLP of a stack of one: x [T, hidden] -> unjoined fp32 [T, leaves, hidden]."""
        tiles = row_tiles(x)
        results = self._mlp_tiles(tiles, [0] * len(tiles), weight)
        return results.reshape(-1, *results.shape[2:])[: len(x)]

    def _mlp_tiles(self, tiles: np.ndarray, of_tile: list[int], weight: MlpWeight) -> np.ndarray:
        """Row tiles [P, ROW_TILE, hidden], tile p through expert of_tile[p].

        Returns unjoined leaf sums, fp32 [P, ROW_TILE, leaves, hidden]. Tiles are independent, so
        two threads may share them.
        """
        n = len(tiles)
        out = np.empty((n, ROW_TILE, weight.leaves, weight.hidden), np.float32)

        def some(mine: range) -> None:
            for p in mine:
                gate_up, down = weight.tiles(of_tile[p])
                both = np.matmul(tiles[p], gate_up)  # [leaves, tiles, ROW_TILE, 2 * tile]
                half = both.shape[-1] // 2
                h = self.silu_mul(both[..., :half], both[..., half:]).swapaxes(1, 2)
                h = h.reshape(weight.leaves, 1, ROW_TILE, -1)[..., : weight.width]
                y = np.matmul(np.ascontiguousarray(h), down)  # [leaves, tiles, ROW_TILE, tile]
                y = y.transpose(2, 0, 1, 3).reshape(ROW_TILE, weight.leaves, -1)
                out[p] = y[:, :, : weight.hidden]

        flops = 6 * n * ROW_TILE * weight.width * weight.hidden
        if n < WORKERS or flops < PARALLEL_FLOPS:
            some(range(n))
        else:
            run_parts([lambda i=i: some(range(i, n, WORKERS)) for i in range(WORKERS)])
        return out

    # -- tokens

    def head(self, x: np.ndarray, weight: TiledWeight, vocab_size: int) -> np.ndarray:
        """fp32 logits [T, V]: each rank's columns, gathered; the padding of the last is cut off."""
        logits = self.linear(x, weight)
        if self.comm is not None:
            logits = self.comm.gather_columns(logits)
        return logits[:, :vocab_size]

    choose = staticmethod(sampling.choose)
    log_softmax_top = staticmethod(sampling.log_softmax_top)

    def add_noise(self, logits: np.ndarray, positions, params) -> np.ndarray:
        """Draft logits [T, V] with the noise that will choose the target's token at `positions`:
        (logits / temperature + noise) * temperature for sampled rows, greedy rows as they are.

        The order is that of the target's choice. Scaled back, differences are in the logits' own
        units, so what the drafter does not know of the target weighs the same at any temperature.
        """
        out = logits.copy()
        for row, (position, asked) in enumerate(zip(positions, params, strict=True)):
            if not asked.greedy:
                noise = sampling.gumbel(asked.seed, int(position), logits.shape[1])
                heat = np.float32(asked.temperature)
                out[row] = (logits[row] / heat + noise) * heat
        return out

    # -- the cache

    def put_entries(self, pages, entries, rows, slots, positions, tables) -> None:
        """Write rows of `entries` [layers, T, width] to `pages` [layers, n_pages, leaf, width], at
        `positions` of sequences `slots`, all [n]; `tables` [slots, pages] are page numbers."""
        leaf = pages.shape[2]
        pages[:, tables[slots, positions // leaf], positions % leaf] = entries[:, rows]

    # -- the drafter

    def draft_rows(self, roots, slots, lengths, tables, n: int, mask: int) -> DraftRows:
        """Blocks (root, mask, mask, …) of n rows for B sequences in cache `slots`; lengths and
        tables are of all slots."""
        slots = np.asarray(slots)
        tokens = np.full((len(slots), n), mask, np.int32)
        tokens[:, 0] = roots
        positions = (lengths[slots][:, None] + np.arange(n)).astype(np.int32)
        return DraftRows(
            token_ids=tokens.reshape(-1),
            positions=positions.reshape(-1),
            lengths=lengths[slots],
            tables=tables[slots],
            owners=np.repeat(slots, n - 1).astype(np.int32),
            draft_positions=positions[:, 1:].reshape(-1),
        )

    def block_inputs(self, x, weight: tuple, q_norm, k_norm, eps: float, cos, sin, positions):
        """x [T, hidden] -> queries [T, H, d], and keys and values [T, 2, KV, d]: queries and keys
        normed over d (weights [d]), rounded and rotated; all rounded."""
        q, k, v = weight
        q = self._turned(x, q, q_norm, eps, cos, sin, positions)
        return q, self._keys_values(x, k, v, k_norm, eps, cos, sin, positions)

    def put_context(
        self, x, weight: list, norms, eps: float, cos, sin, rows, slots, positions, pages, tables
    ) -> None:
        """Keys and values of all layers, as `block_inputs` makes them, of `rows` of x [T, hidden],
        into `pages` [layers, n_pages, leaf, 2 * KV * d] as `put_entries`; norms [layers, d]."""
        x = x[rows]
        entries = [
            self._keys_values(x, *pair, norm, eps, cos, sin, positions).reshape(len(x), -1)
            for pair, norm in zip(weight, norms, strict=True)
        ]
        self.put_entries(pages, np.stack(entries), np.arange(len(x)), slots, positions, tables)

    def _turned(self, x, weight: TiledWeight, norm, eps: float, cos, sin, positions):
        """Heads [T, n, d] of x, normed and rotated: component i pairs with i + d / 2. Rounded."""
        heads = self.linear(x, weight).reshape(len(x), -1, len(norm))
        heads, half = self.rms_norm(heads, norm, eps), len(norm) // 2
        return self.round(_rotate(heads[..., :half], heads[..., half:], cos, sin, positions))

    def _keys_values(self, x, k: TiledWeight, v: TiledWeight, *how):
        keys = self._turned(x, k, *how)
        return np.stack([keys, self.linear(x, v, rounded=True).reshape(keys.shape)], 1)

    def block_attention(
        self, q, kv, pages, tables, lengths, window: int, scale: float, span: int, settled=False
    ):
        """Drafter attention: every block over its context and itself, non-causal -> rounded.

        q        [B * n, H, d]      rows of B blocks; row i of a block stands at position length + i
        kv       [B * n, 2, KV, d]  the blocks' own keys and values
        pages    [n_pages, leaf, 2, KV, d] of this layer;  tables: int32 [B, pages]
        lengths  int32 [B] context entries;  window: a key is visible while query - key < window
                 (0: always); within its block a query sees every key
        settled  of no meaning here: everything is there
        """
        n_blocks = len(lengths)
        n, (n_heads, d) = len(q) // n_blocks, q.shape[1:]
        kv_heads, leaf = kv.shape[2], pages.shape[1]
        out = np.empty_like(q)
        for b, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            rows, length = slice(b * n, (b + 1) * n), int(length)
            # One product a query head: its shape is the same however heads are shared out (R2).
            queries = np.ascontiguousarray(q[rows].swapaxes(0, 1))
            queries = queries.reshape(kv_heads, n_heads // kv_heads, 1, n, d)
            first, parts = 0, []
            if length and window != 1:
                first = max(0, length - window + 1) // leaf if window else 0
                positions = np.arange(first * leaf, -(-length // leaf) * leaf)
                context = pages[np.asarray(table[first : -(-length // leaf)])]
                context[-1, (length - 1) % leaf + 1 :] = 0  # slots past the end load as zero
                visible = np.broadcast_to(positions < length, (n, len(positions)))
                if window:
                    at = length + np.arange(n)[:, None]
                    visible = visible & (at - positions < window)
                visible = visible.reshape(n, -1, leaf).swapaxes(0, 1)
                parts.append(self._block_parts(queries, context, visible, scale))
            parts.append(self._block_parts(queries, kv[None, rows], None, scale))
            maxima, sums, values = (np.concatenate(p, 1) for p in zip(*parts, strict=True))
            total, value = fold_leaves(maxima, sums, values, first, span)
            out[rows] = (value / total[..., None]).swapaxes(0, 1)
        return self.round(out)

    def _block_parts(self, q, kv, visible, scale: float):
        """Softmax parts of leaves [leaves, leaf, 2, KV, d] for q [KV, H / KV, 1, n, d].

        Returns maxima and sums [H, leaves, n] and values [H, leaves, n, d].
        """
        kv = kv.transpose(2, 3, 0, 1, 4)[:, :, None]  # [2, KV, 1, leaves, leaf, d]
        keys, values = np.ascontiguousarray(kv)
        scores = matmul(q, keys.swapaxes(-1, -2)) * (np.float32(scale) * LOG2E)
        maxima, p = self._leaf_softmax(scores, visible)
        parts = maxima, np.add.reduce(p, axis=-1), matmul(p, values)
        return tuple(part.reshape(-1, *part.shape[2:]) for part in parts)

    def _leaf_softmax(self, scores, visible):
        """(ceiling of the log2 maximum, rounded 2^(score - maximum)) over the last axis."""
        if visible is not None:
            scores = np.where(visible, scores, np.float32(-np.inf))
        maxima = np.ceil(scores.max(-1))
        base = np.where(maxima == -np.inf, np.float32(0), maxima)  # no visible key: p = 0
        return maxima, self.round(np.exp2(scores - base[..., None]))

    def top_log_probs(self, logits, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k most likely tokens of each row: ids int32, log-probabilities fp32, [T, k].

        Ordered by logit descending, then id ascending. NaN sorts last with log-probability -inf.
        """
        safe = np.where(np.isnan(logits), np.float32(-np.inf), logits)
        k = min(k, safe.shape[1])
        top = np.argpartition(-safe, k - 1, axis=1)[:, :k] if k < safe.shape[1] else None
        if top is None:
            ids = np.argsort(-safe, axis=1, kind="stable")
        else:
            ids = _ordered_top(safe, top, k)
        best = safe.max(1, keepdims=True)
        best = np.where(np.isneginf(best), np.float32(0), best)
        mass = np.add.reduce(np.exp(safe - best), axis=1, keepdims=True)
        total = best + np.log(np.maximum(mass, np.float32(1e-38)))  # a row without any: all -inf
        return ids.astype(np.int32), np.take_along_axis(safe, ids, 1) - total


# ---- helpers of the operations -----------------------------------------------------------------


def n_experts(weight) -> int:
    return len(weight.packed) if isinstance(weight, Int4Weight) else len(weight)


def stack_of_one(weight):
    """A matrix, dense or INT4, as a stack with one entry, without a copy."""
    if isinstance(weight, Int4Weight):
        return Int4Weight(weight.packed[None], weight.scales[None])
    return weight[None]


def expert(weight, e: int):
    """Matrix e of a stack, dense or INT4, without a copy."""
    if isinstance(weight, Int4Weight):
        return Int4Weight(weight.packed[e], weight.scales[e])
    return weight[e]


def tile_mlp(gate, up, down, n_leaves: int) -> tuple[np.ndarray, np.ndarray]:
    """One expert, float32 [width, hidden] x 2 and [hidden, width], in the tiles of `MlpWeight`."""
    width, hidden = gate.shape[0] // n_leaves, gate.shape[1]
    tile = min(64, -(-width // 8) * 8)
    tiles = -(-width // tile)
    gate_up = np.zeros((n_leaves, tiles, hidden, 2 * tile), np.float32)
    for t in range(tiles):
        for half, w in enumerate((gate, up)):
            columns = w.reshape(n_leaves, width, hidden)[:, t * tile : (t + 1) * tile]
            begin = half * tile
            gate_up[:, t, :, begin : begin + columns.shape[1]] = columns.swapaxes(1, 2)
    return gate_up, tile_columns(down, 1, n_leaves, True).data


def group_rows(ids: np.ndarray, n_experts_: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Rows by the expert they chose, in row tiles of one expert each.

    ids  int [T, k];  ids outside [0, n_experts_) are filler
    Returns the expert of each tile [P]; the rows of each tile [P, ROW_TILE], T for an empty place;
    and for each (row, slot) its (tile, place) [T, k, 2], tile P for filler.
    """
    n_rows, top_k = ids.shape
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    of_tile: list[int] = []
    tile_rows: list[np.ndarray] = []
    place = np.zeros((n_rows * top_k, 2), np.int64)
    chosen, begins = np.unique(flat[order], return_index=True)
    ends = np.append(begins[1:], len(flat))
    for e, begin, end in zip(chosen.tolist(), begins.tolist(), ends.tolist(), strict=True):
        pairs = order[begin:end]
        if not 0 <= e < n_experts_:
            place[pairs, 0] = -1
            continue
        at = np.arange(end - begin)
        place[pairs, 0] = len(of_tile) + at // ROW_TILE
        place[pairs, 1] = at % ROW_TILE
        for first in range(begin, end, ROW_TILE):
            rows = np.full(ROW_TILE, n_rows, np.int64)
            some = order[first : min(first + ROW_TILE, end)] // top_k
            rows[: len(some)] = some
            of_tile.append(e)
            tile_rows.append(rows)
    place[place[:, 0] < 0, 0] = len(of_tile)
    rows = np.array(tile_rows, np.int64).reshape(-1, ROW_TILE)
    return of_tile, rows, place.reshape(n_rows, top_k, 2)


def _per_head(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [T, H, a] times weight [H, a, b] -> [T, H, b], in row tiles."""
    n_rows, n_heads, a = x.shape
    tiles = row_tiles(x.reshape(n_rows, n_heads * a))
    tiles = tiles.reshape(-1, ROW_TILE, n_heads, a).transpose(0, 2, 1, 3)
    y = matmul(np.ascontiguousarray(tiles), weight[None], split=1)
    return np.ascontiguousarray(y.transpose(0, 2, 1, 3)).reshape(-1, n_heads, y.shape[-1])[:n_rows]


def _rotate(a, b, cos, sin, positions) -> np.ndarray:
    shape = (len(positions),) + (1,) * (a.ndim - 2) + (a.shape[-1],)
    c, s = cos[positions].reshape(shape), sin[positions].reshape(shape)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def _ordered_top(values: np.ndarray, some: np.ndarray, k: int) -> np.ndarray:
    """The k largest of each row by (value descending, id ascending); `some` holds k of the largest,
    in any order and with any choice among equals at the border."""
    border = np.take_along_axis(values, some, 1).min(1)
    ids = np.empty((len(values), k), np.int64)
    for row, (line, least) in enumerate(zip(values, border, strict=True)):
        candidates = np.flatnonzero(line >= least)
        ids[row] = candidates[np.argsort(-line[candidates], kind="stable")[:k]]
    return ids


def _gather_pages(pages: np.ndarray, table: np.ndarray) -> np.ndarray:
    """pages[table], without a copy when the pages lie in a row."""
    first, n = int(table[0]), len(table)
    if n == 1 or (np.diff(table) == 1).all():
        return pages[first : first + n]
    return pages[table]


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's logarithmic magnitude correction (DeepSeek-V3, `yarn_get_mscale`)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(rope: Rope, head_dim: int) -> float:
    """1 / sqrt(nope + rope), times the square of YaRN's correction by `mscale_all_dim`."""
    scale = head_dim**-0.5
    if rope.type != "default" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def rope_frequencies(rope: Rope, dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies float64 [dim / 2] and the amplitude of cos and sin.

    YaRN (arXiv 2309.00071): dimensions that turn more than beta_fast times within the original
    length keep their frequency, those below beta_slow are stretched by `factor`, a linear ramp
    between. Amplitude: `deepseek_yarn` takes the ratio of the two mscales, `yarn` the plain
    correction of the factor.
    """
    inverse = rope.theta ** (-np.arange(0, dim, 2) / dim)
    if rope.type == "default":
        return inverse, 1.0

    def pair_index(turns: float) -> float:
        length = rope.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_index(rope.beta_fast)), 0)
    high = min(math.ceil(pair_index(rope.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    blended = inverse / rope.factor * ramp + inverse * (1 - ramp)
    if rope.type == "yarn":
        return blended, yarn_mscale(rope.factor, 1.0)
    return blended, yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(
        rope.factor, rope.mscale_all_dim
    )


def self_check() -> None:
    """Prove that this BLAS keeps a row's bits wherever it stands in a tile (R1 rests on it).

    Raises UserError naming the shape if it does not: no exact CPU decoding on such a library.
    """
    rng = np.random.default_rng(0)
    for k, columns in ((32, 64), (160, 64), (384, 64), (192, 96), (64, 16)):
        weight = rng.standard_normal((k, columns), dtype=np.float32)
        x = rng.standard_normal((ROW_TILE, k), dtype=np.float32)
        y = x @ weight
        for shift in range(1, ROW_TILE):
            moved = np.roll(x, shift, 0)
            moved[: shift // 2] = np.nan  # a neighbour must not reach a row either
            z = np.roll(moved @ weight, -shift, 0)
            keep = np.roll(np.arange(ROW_TILE) >= shift // 2, -shift)
            if not np.array_equal(z[keep].view(np.int32), y[keep].view(np.int32)):
                raise UserError(
                    f"NumPy's BLAS: a row of a [{ROW_TILE}, {k}] x [{k}, {columns}] product "
                    "changes with its place, so exact decoding is not possible with it; install a "
                    "NumPy built on OpenBLAS"
                )
