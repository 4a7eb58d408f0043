"""Products and attention of bfloat16 activations on tensor cores: what is packed, in which tiles,
in how many blocks. A part of `ops.CudaOps`, whose launches and checks these use.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

import config
from launchers import BFLOAT16, FLOAT32, INT32, INT32_MAX, THREADS, UINT8, WARPS, Defines, ceil
from reference import Int4Weight

# ---- products (kernels_gemm.cu, kernels_moe.cu) ------------------------------------------------

STEP = 32  # columns of K that two mma take
MIN_PART = 128  # columns of K in one part, if a leaf is cut at all
PARTS = 8  # parts of a leaf at most
ROUTER_PARTS = 32  # of the router, whose few outputs alone would keep few processors busy
HEAD_STEPS = 8  # steps of one part that a warp of absorb_mma holds at most
HEAD_ROWS = 16  # rows of a block of absorb_mma
QUERY_ROWS = 8  # of a block of query_mma
MOST_QUERIES = 16  # rows up to which it is taken
QUERY_BLOCKS = 132  # of a grid of it at most: more do not run at once, and then it is no gain
CLUSTER = 8  # blocks that share a head at most
EXPERT_ROWS = 128  # rows of one launch over the experts
DOWN_ROWS = (128, 64, 32, 16, 8)  # of one launch of expert_down_mma: the most that a block can hold
TILE_GROUP = 288  # bytes of a quantisation group of a tile of 16 rows: see kernels.cu
EXPERT_STAGES = 2  # pieces of the experts' weights that a warp has in flight
FEW_ROUNDS = 3  # of expert_gate_up_mma, in which a block's items go by its number
UP_RESIDENT = 3  # blocks of it that a processor holds at most: RESIDENT of its launch bounds
DOWN_RESIDENTS = (2, 3)  # blocks of expert_down_mma that a processor may be to hold
MAX_PAIRS = 4096  # (row, expert) pairs of one launch: struct Work has 12 bits for them
MANY_FROM = EXPERT_ROWS + 1  # rows from which on each expert takes its own together (experts_wide)
MANY_ROWS = 8192  # of one launch of those at most, a multiple of 4
SLOT_BYTES = 256 << 20  # of its sums of pairs that wait for their weights, if one block allows
DOWN_EACH = 56  # blocks of 32 outputs that a block of expert_down_wide takes at most
WHOLE = 8  # kB of weight that a warp may have in flight in one piece
SHARES = (1, 2, 4, 8)  # of K, in blocks of their own, or of the warps of a block
RESERVED = 1024  # shared bytes that a block takes beside its own
BESIDE_ROWS = 32  # up to which expert_down_mma multiplies the shared expert's down too
WIDE_ROWS = 32  # from which on a dense product takes wide_mma
WIDE_STEPS = 2  # of one place of its ring
SHARED_RATE = 133  # kB a µs that a multiprocessor's shared memory moves
WIDE_STATIC = 128  # shared bytes of it that are not dynamic
SILU_MUL = 2  # form of its outputs; 0: fp32, 1: rounded
MEETING_BYTES = 32 << 20  # of sums of one launch of it whose splits meet, at most
LINEAR_STAGES = 2  # of a dense one
PIECE = 4  # steps of one of those, if they divide
LONG = 64  # steps of a part from which on longer pieces are taken


@dataclass(frozen=True)
class Tile:
    """A variant of the dense kernels: 8 * `eights` rows of x, `wide` tiles of 16 outputs a warp.

    ahead     steps of x that a lane holds
    resident  blocks a multiprocessor
    """

    eights: int
    wide: int
    ahead: int
    resident: int


TILES = (
    Tile(1, 1, ahead=8, resident=2),
    Tile(2, 1, ahead=4, resident=2),
    Tile(4, 1, ahead=4, resident=1),
    Tile(8, 1, ahead=3, resident=1),
    Tile(1, 2, ahead=4, resident=2),
    Tile(2, 2, ahead=4, resident=2),
    Tile(4, 2, ahead=4, resident=1),
    Tile(8, 2, ahead=2, resident=1),
)


@dataclass(frozen=True)
class WideTile:
    """A variant of wide_mma: a warp has `wide` tiles of 16 outputs and 8 * `eights` rows.

    shares    of K, among the warps of a block
    stages    places of its ring
    resident  blocks a multiprocessor
    """

    wide: int
    eights: int
    shares: int
    stages: int
    resident: int

    @property
    def outputs(self) -> int:
        return 32 * self.wide

    @property
    def rows(self) -> int:
        return WARPS // 2 // self.shares * 8 * self.eights

    @property
    def name(self) -> str:
        return f"{self.wide}_{self.eights}_{self.shares}"

    def shared_bytes(self, own: int) -> int:
        """own: parts of K that a warp joins."""
        ring = self.stages * self.shares * WIDE_STEPS * 64 * (self.outputs + self.rows)
        levels = max(0, (own - 1).bit_length() - 1)
        return ring + levels * THREADS * self.wide * self.eights * 16


WIDE_VARIANTS = (
    WideTile(2, 2, shares=2, stages=4, resident=2),
    WideTile(5, 2, shares=2, stages=3, resident=1),
    WideTile(2, 4, shares=2, stages=3, resident=2),
    WideTile(5, 4, shares=2, stages=2, resident=1),
    WideTile(4, 4, shares=1, stages=3, resident=1),
)
ROOMY = 160_000  # shared bytes of a block from which on more is kept in flight
# Tiles of one launch whose splits, two at least, meet: 4 bytes a sum.
MEETINGS = MEETING_BYTES // min(2 * 4 * t.outputs * t.rows for t in WIDE_VARIANTS)
WIDE_TILES = 384  # from so many tiles of 16 outputs (over warps that share K) on: wide = 2


def parts_of(columns: int, most: int = PARTS) -> int:
    """Equal parts in which tensor cores add a leaf of K (reference.py's table): a power of two,
    whole steps, so wide that a warp's work is worth it. It depends on the leaf alone (R2)."""
    parts = config.leaves(columns // STEP, most)
    while parts > 1 and columns // parts < MIN_PART:
        parts //= 2
    return parts


def _piece(steps: int, most: int = 4) -> int:
    """Steps of one copy of weights: as many as divide `steps`."""
    return next(n for n in range(most, 0, -1) if steps % n == 0)


def _pieces(part_steps: int, own: int, wide: int):
    """(places in a warp's ring, steps of a piece) of a dense weight, the best first; own: parts
    that a warp has."""
    if own == 1 and part_steps * wide <= WHOLE:
        yield 1, part_steps
    # Longer ones are better than single steps, and where a warp has many.
    if _piece(part_steps, PIECE) == 1 or part_steps >= LONG:
        yield LINEAR_STAGES, _piece(part_steps, WHOLE)
    yield LINEAR_STAGES, _piece(part_steps, PIECE)


# -D of the dense section.
LINEAR_DEFINES: Defines = (
    ("STAGES", LINEAR_STAGES),
    *((f"{name.upper()}_{t.eights}_{t.wide}", getattr(t, name))
      for t in TILES for name in ("ahead", "resident")),
)  # fmt: skip


@functools.cache
def wide_defines(room: int) -> Defines:
    """-D of the section of many rows: of the variants that some launch has room for, in so many
    shared bytes of a block."""
    tiles = [t for t in WIDE_VARIANTS if t.shared_bytes(own=1) + WIDE_STATIC <= room]
    numbers = ((f"{name.upper()}_{t.name}", getattr(t, name))
               for t in tiles for name in ("stages", "resident"))  # fmt: skip
    return (("STEPS", WIDE_STEPS), ("SILU_MUL", SILU_MUL), *numbers)


def linear_shared_bytes(tile: Tile, piece: int, own: int, places: int = LINEAR_STAGES) -> int:
    """Of the dense kernels; own: parts of K that one warp joins, places: pieces in its ring."""
    sums = WARPS * tile.wide * tile.eights * 512
    rings = WARPS * (places * piece * tile.wide * 1024 + LINEAR_STAGES * 8)
    return rings + sums * (1 + (own - 1).bit_length())


def _work_bytes(experts: int, rows: int, top_k: int) -> int:
    """struct Work of the expert kernels."""
    pairs = rows * top_k
    if rows == 1 and top_k <= 32:
        return 4 * (WARPS + pairs) + 2 * pairs
    tiles, words = min(pairs, experts + pairs // 8), ceil(rows, 32)
    return 4 * (WARPS + tiles + experts * words) + 2 * (experts + pairs)


@dataclass(frozen=True)
class TensorMatrix:
    """A bfloat16 weight [out, in] in the order of pack_dense; gate and up interleaved are one.

    parts  of each of the `leaves` of K
    """

    data: object
    out_features: int
    in_features: int
    leaves: int
    row_cut: bool
    wide: int

    @property
    def parts(self) -> int:
        return parts_of(self.in_features // self.leaves)

    @property
    def blocks(self) -> int:
        return self.data.size // (self.in_features * 2 * 16 * self.wide)


@dataclass(frozen=True)
class Cut:
    """How blocks share a product: `shares` of K in blocks of their own, `split` warps on one of
    those; pieces of `piece` steps. whole: all at once, a piece a warp. blocks: of a share; grid:
    as many as it has work for. As a string it is what configs/tiles.yaml says."""

    tile: Tile
    shares: int
    split: int
    piece: int
    whole: bool
    shared_bytes: int
    blocks: int
    grid: int

    def __str__(self) -> str:
        tile = f"{8 * self.tile.eights}x{16 * self.tile.wide}"
        pieces = "whole" if self.whole else f"pieces of {self.piece}"
        return f"{tile} shares {self.shares} split {self.split} {pieces}"


@dataclass(frozen=True)
class WideCut:
    """The same of many rows: `shares` of K, whose sums stay apart, or `splits`, which blocks join;
    own: parts that a warp joins."""

    tile: WideTile
    shares: int
    splits: int
    own: int
    shared_bytes: int
    grid: tuple[int, int, int]

    def __str__(self) -> str:
        blocks = f"shares {self.shares} splits {self.splits}"
        return f"wide {self.tile.name} {blocks}"


@dataclass(frozen=True)
class TensorHeads:
    """One half of kv_b in the order of pack_heads: `outputs` sums over `columns` a head."""

    data: object
    heads: int
    outputs: int
    columns: int

    @property
    def defines(self) -> Defines:
        parts = parts_of(self.columns)
        return (("PARTS", parts), ("PART_STEPS", self.columns // STEP // parts))

    @property
    def slices(self) -> int:
        """Blocks that share the outputs of a head."""
        return ceil(self.outputs, 16 * WARPS // parts_of(self.columns))


@dataclass(frozen=True)
class QueryShape:
    """What query_mma is compiled for: widths of a compressed query, of a latent entry, of the two
    halves of a head's query."""

    lora: int
    latent: int
    nope: int
    rope: int

    @property
    def tiles(self) -> int:
        """Of 16 columns of a head's query."""
        return (self.nope + self.rope) // 16

    @property
    def blocks(self) -> int:
        """That share a head, as a cluster."""
        return next(n for n in range(CLUSTER, 0, -1) if self.tiles % n == 0)

    @property
    def fits(self) -> bool:
        """Norms that a warp has as one block of rms_norm has them, K in a part a warp, heads whose
        columns to be absorbed are one part."""
        widths = self.lora, self.latent
        return (
            all(n % (8 * 32) == 0 and n <= 8 * THREADS for n in widths)
            and parts_of(self.lora) == WARPS
            and parts_of(self.nope) == 1
            and self.nope % STEP == self.rope % 2 == (self.nope + self.rope) % 16 == 0
            and 0 < self.rope <= 64
            and self.nope > 0
            and self.latent // 16 <= self.blocks * WARPS
            and QUERY_ROWS * self.tiles // self.blocks * 8 <= THREADS
        )

    @property
    def defines(self) -> Defines:
        return (
            ("QUERY_ROWS", QUERY_ROWS),
            ("BLOCKS", self.blocks),
            ("TILES", self.tiles // self.blocks),
            ("Q_EIGHTS", self.lora // 256),
            ("ENTRY_EIGHTS", self.latent // 256),
            ("NOPE", self.nope),
            ("ROPE", self.rope),
        )

    @property
    def shared_bytes(self) -> int:
        """Of a block: weights and barriers, normed rows or sums, rows to be absorbed."""
        tiles, rows = self.tiles // self.blocks, QUERY_ROWS
        normed = max(rows * (2 * self.lora + 64), WARPS * tiles * 512)
        own = tiles * (32 * self.lora + 8 * WARPS) + 4 * self.lora
        return own + normed + rows * (2 * self.nope + 64)


@dataclass(frozen=True)
class TensorMlp:
    """A dense gated MLP; gate_up has 2 * width outputs.

    routed  the rows of a router, padded to whole tiles, and gate_up as one matrix, if they are
    """

    gate_up: TensorMatrix
    down: TensorMatrix
    leaves: int
    routed: TensorMatrix | None = None


@dataclass(frozen=True)
class Residents:
    """Blocks of the experts' gate and up, and of their down, that a processor is to hold. As a
    string it is what configs/tiles.yaml says."""

    up: int
    down: int

    def __str__(self) -> str:
        return f"blocks {self.up} and {self.down}"


@dataclass(frozen=True)
class ManyRows:
    """A variant of the experts' kernels for many rows: up to 8 * `eights` of an expert together.
    As a string it is what configs/tiles.yaml says.

    stages      places of the ring of gate and up
    up, down    blocks that a processor is to hold
    warpgroups  it multiplies by warpgroups
    """

    eights: int
    stages: int
    up: int
    down: int
    warpgroups: bool = False

    @property
    def most(self) -> int:
        return 8 * self.eights

    def __str__(self) -> str:
        return f"{self.most} rows of an expert" + ", by warpgroups" * self.warpgroups


MANY = (
    ManyRows(2, stages=3, up=2, down=2),
    ManyRows(4, stages=4, up=1, down=1),
    ManyRows(6, stages=4, up=1, down=1, warpgroups=True),
    ManyRows(6, stages=3, up=1, down=1),
)


@dataclass(frozen=True)
class TensorExperts:
    """INT4 experts in the order of pack_int4, `leaves` parts of the width.

    tickets  zeros, uint32 [2], of expert_gate_up_mma; the first also counts blocks of expert_lists
    up_groups, down_groups  quantisation groups in a piece
    """

    gate_up: object
    down: object
    tickets: object
    experts: int
    width: int
    hidden: int
    leaves: int
    up_groups: int
    down_groups: int

    @property
    def parts(self) -> int:
        return parts_of(self.hidden)

    def defines(self, top_k: int, way: Residents | ManyRows) -> Defines:
        if isinstance(way, ManyRows):
            own = (
                ("EIGHTS", way.eights), ("BY_WARPGROUPS", int(way.warpgroups)),
                ("UP_STAGES", way.stages), ("UP_RESIDENT", way.up),
            )  # fmt: skip
        else:
            own = (("FEW_ROUNDS", FEW_ROUNDS),)
        return (
            *own,
            ("STAGES", EXPERT_STAGES),
            ("DOWN_RESIDENT", way.down),
            ("TOP_K", top_k),
            ("BLOCKS", self.width // 16),
            ("LEAVES", self.leaves),
            ("PARTS", self.parts),
            ("UP_GROUPS", self.up_groups),
            ("DOWN_GROUPS", self.down_groups),
        )

    @property
    def chunks(self) -> int:
        """Pieces in a part of gate and up."""
        return self.hidden // self.parts // STEP // self.up_groups

    def most_items(self, rows: int, top_k: int) -> int:
        """Of a launch of gate and up: (tile of pairs, 16 columns)."""
        pairs = rows * top_k
        return min(pairs, self.experts + pairs // 8) * (self.width // 16)

    def up_shared_bytes(self, rows: int, top_k: int) -> int:
        rings = self.parts * EXPERT_STAGES * (2 * TILE_GROUP * self.up_groups + 8) + 8
        return rings + 2 * self.parts * 1024 + _work_bytes(self.experts, rows, top_k)

    def down_shared_bytes(self, rows: int, top_k: int, beside_parts: int = 0) -> int:
        rings = WARPS * EXPERT_STAGES * (2 * TILE_GROUP * self.down_groups + 8)
        sums = top_k + (self.leaves - 1).bit_length() + beside_parts
        slots = rows * 128 * sums + 4 * rows * top_k
        return rings + slots + _work_bytes(self.experts, rows, top_k)

    def many_up_shared_bytes(self, way: ManyRows) -> int:
        rings = way.stages * (self.up_groups * (WARPS * 2 * TILE_GROUP + way.most * 64) + WARPS * 8)
        levels = max(0, (self.parts - 1).bit_length() - 1)
        return rings + levels * THREADS * 2 * way.eights * 16

    def many_down_shared_bytes(self, way: ManyRows) -> int:
        rings = WARPS * EXPERT_STAGES * (2 * TILE_GROUP * self.down_groups + 8)
        return rings + self.width // self.leaves * 2 * way.most


class TensorCoreKernels:
    """Products of bfloat16 activations on tensor cores: a part of CudaOps."""

    def read(self, array) -> None:
        """Read every 16 bytes of an array once: the speed of the memory."""
        grid = (8 * self.launcher.limits.processors,)
        self._launch("read", "read_all", grid, array, np.int64(array.nbytes // 16), self.arange(1))

    @staticmethod
    def _packable(weight, leaves: int) -> bool:
        """Whether tensor cores take this weight [..., out, in] with K in so many leaves."""
        if isinstance(weight, Int4Weight) or weight.dtype != BFLOAT16:
            return False
        return weight.shape[-1] % (leaves * STEP) == 0 and math.prod(weight.shape[:-2]) == 1

    def _pack_dense(self, a, b, leaves=1, row_cut=False, wide: int | None = None) -> TensorMatrix:
        """[.., out, in], or with b gate and up together. wide: None to choose."""
        rows, k = a.shape[-2:]
        stride, offset, outputs = (16, 8, rows) if b is None else (8, 0, 2 * rows)
        tiles, sharing = ceil(outputs, 16), WARPS // min(PARTS, leaves * parts_of(k // leaves))
        if wide is None:
            roomy = self.launcher.limits.shared_bytes >= ROOMY
            wide = 2 if roomy and b is None and tiles // sharing >= WIDE_TILES else 1
        blocks = ceil(tiles, wide)
        sent = [self.launcher.upload(w).reshape(rows, k) for w in (a, a if b is None else b)]
        data = self.empty((blocks * wide * 16 * k * 2,), UINT8)
        n = data.size // 16
        self._launch(
            "pack", "pack_dense", (ceil(n, THREADS),), *sent, data, rows, k, stride, offset, wide,
            np.int64(n),
        )  # fmt: skip
        self.launcher.synchronize()  # a dependent launch reads weights without waiting for this
        return TensorMatrix(data, outputs, k, leaves, row_cut, wide)

    def _pack_heads(self, kv_b, heads: int, nope: int, v: int, latent: int):
        """kv_b bfloat16 [H, nope + v, latent] -> its keys and values as TensorHeads; None where the
        shape does not allow it."""
        steps = (columns // STEP // parts_of(columns) for columns in (nope, latent))
        if kv_b.dtype != BFLOAT16 or nope % STEP or latent % STEP or v % 2:
            return None
        if max(steps) > HEAD_STEPS:
            return None

        def pack(outputs, columns, first, across, down):
            data = self.empty((heads, ceil(outputs, 16) * 16 * columns * 2), UINT8)
            n = data.size // 16
            self._launch(
                "pack", "pack_heads", (ceil(n, THREADS),), kv_b, data, outputs, columns,
                (nope + v) * latent, first, across, down, np.int64(n),
            )  # fmt: skip
            return TensorHeads(data, heads, outputs, columns)

        pair = pack(latent, nope, 0, 1, latent), pack(v, latent, nope * latent, latent, 1)
        self.launcher.synchronize()  # as above
        return pair

    def _pack_experts(self, gate: Int4Weight, up: Int4Weight, down: Int4Weight, leaves: int):
        """TensorExperts, or None where the shape does not allow it."""
        weights, n = (gate, up, down), len(gate.packed)
        hidden, width = gate.in_features, gate.out_features
        if any(w.scales.dtype != BFLOAT16 or w.group_size != STEP for w in weights) or n == 1:
            return None
        if hidden % STEP or width % 16 or width % (leaves * STEP):
            return None
        up_groups = _piece(hidden // parts_of(hidden) // STEP)
        down_groups = _piece(width // leaves // STEP)
        codes = [self.launcher.upload(w.packed.view(np.int32)) for w in weights]
        scales = [self.launcher.upload(w.scales) for w in weights]

        def pack(a, b, rows, k, tiles, groups, parts, stride, offset):
            data = self.empty((n * tiles * (k // STEP) * TILE_GROUP,), UINT8)
            words = data.size // 4
            self._launch(
                "pack", "pack_int4", (ceil(words, THREADS),), codes[a], codes[b], scales[a],
                scales[b], data, rows, k, tiles, groups, parts, stride, offset, np.int64(words),
            )  # fmt: skip
            return data.reshape(n, tiles // 2, -1)

        both = pack(0, 1, width, hidden, width // 8, up_groups, parts_of(hidden), 8, 0)
        one = pack(2, 2, hidden, width, hidden // 16, down_groups, 1, 16, 8)
        self.launcher.synchronize()  # as above
        return TensorExperts(
            both, one, self.launcher.upload(np.zeros(2, np.uint32)), n, width, hidden, leaves,
            up_groups, down_groups,
        )  # fmt: skip

    def _cuts(self, rows: int, weight: TensorMatrix, parts: int, least: int, most: int):
        """Every way to launch a product with K in `parts` and from `least` to `most` shares, as
        Cut: they give the same bits."""
        limits, steps = self.launcher.limits, weight.in_features // STEP
        part_steps = steps // parts
        variants = [t for t in TILES if t.wide == weight.wide]
        enough = next((t.eights for t in variants if 8 * t.eights >= rows), variants[-1].eights)
        for tile in (t for t in variants if t.eights <= enough):
            for shares in (n for n in SHARES if least <= n <= most and parts % n == 0):
                for split in (n for n in SHARES if parts // shares % n == 0):
                    own, items = parts // shares // split, ceil(weight.blocks, WARPS // split)
                    grid = items * shares
                    for places, piece in _pieces(part_steps, own, tile.wide):
                        need = linear_shared_bytes(tile, piece, own, places)
                        if grid <= limits.processors:  # blocks of this launch and of the next find
                            need = max(need, limits.shared_bytes // 3 + 512)  # one place each
                        resident = min(tile.resident, limits.shared_bytes // need)
                        count, whole = min(items, resident * limits.processors), places == 1
                        if resident and not (whole and count * shares < grid):
                            yield Cut(tile, shares, split, piece, whole, need, count, grid)

    def _wide_cuts(self, rows: int, weight: TensorMatrix, parts: int, least: int, most: int):
        """The same of wide_mma, as WideCut."""
        limits, tiles = self.launcher.limits, weight.blocks * weight.wide
        alone = least == most == 1  # then blocks that share K join
        for tile in WIDE_VARIANTS:
            across, down = ceil(16 * tiles, tile.outputs), ceil(rows, tile.rows)
            for z in SHARES:
                own = parts // tile.shares // z
                need = tile.shared_bytes(own)
                if parts % (tile.shares * z) or need + WIDE_STATIC > limits.shared_bytes:
                    continue
                grid = across, down, z
                sums = math.prod(grid) * 4 * tile.outputs * tile.rows
                if alone and (z == 1 or z <= WARPS // 2 and sums <= MEETING_BYTES):
                    yield WideCut(tile, 1, z, own, need, grid)
                elif not alone and least <= z <= most:
                    yield WideCut(tile, z, 1, own, need, grid)

    def _cut(self, rows: int, weight: TensorMatrix, parts: int, least=1, most=1) -> Cut | WideCut:
        """The fastest, as measured, else by rule the one with the least to read for the busiest
        processor: bytes of weights, a tenth of those of x, what shares write and read; less if all
        is on its way before x is there."""
        steps, processors = weight.in_features // STEP, self.launcher.limits.processors

        def cost(cut: Cut):
            k, columns = steps * STEP // cut.shares, WARPS // cut.split * weight.wide * 16
            count, times = min(rows, 8 * cut.tile.eights), ceil(rows, 8 * cut.tile.eights)
            blocks = ceil(cut.grid * times, processors)
            read = blocks * k * (2 * columns + 0.2 * count) * (0.85 if cut.whole else 1)
            between = 128 * rows * weight.blocks * weight.wide / processors + 2000
            return read + between * cut.shares, -cut.split

        def rule() -> Cut | WideCut:
            chosen = min(self._cuts(rows, weight, parts, least, most), key=cost)
            at_once = chosen.grid * ceil(rows, 8 * chosen.tile.eights) <= processors
            if rows < WIDE_ROWS or chosen.whole and at_once:
                return chosen
            wide = self._wide_cuts(rows, weight, parts, least, most)
            return min(wide, key=lambda cut: self._wide_cost(weight, cut), default=chosen)

        product = f"dense {weight.out_features} x {weight.in_features}, by {16 * weight.wide}, "
        product += f"parts {parts}" + (f", shares {least} to {most}" if most > 1 else "")
        ways = self._all_cuts(rows, weight, parts, least, most)
        return self.tiles.choose(product, rows, ways, rule)

    def _all_cuts(self, rows: int, weight: TensorMatrix, parts: int, least: int, most: int):
        """Cuts, and from where the table's entry of WIDE_ROWS holds on WideCuts."""
        yield from self._cuts(rows, weight, parts, least, most)
        if 2 * rows > WIDE_ROWS:
            yield from self._wide_cuts(rows, weight, parts, least, most)

    def _wide_cost(self, weight: TensorMatrix, cut: WideCut) -> float:
        """About the µs of a launch on an H200, where shared memory is what limits: of every step a
        warp reads its fragments, a block writes both operands. A turn of blocks needs 0.75 to begin
        and 0.44 for 1024 sums a block; a second block on a processor hides a part of the first."""
        tile, limits = cut.tile, self.launcher.limits
        fragments = WARPS // tile.shares * (tile.wide + tile.eights / 2)
        step = (fragments + (tile.outputs + tile.rows) / 16) / SHARED_RATE
        steps, sums = weight.in_features // STEP / cut.grid[2], tile.outputs * tile.rows / 1024
        turns = ceil(math.prod(cut.grid), limits.processors)
        pairs = tile.resident == 2 and 2 * (cut.shared_bytes + WIDE_STATIC) <= limits.shared_bytes
        overlap = 0.82 if pairs and turns > 1 else 1.0
        meet = 2 + turns * sums / 8 if cut.splits > 1 else 0.0
        return turns * overlap * (0.75 + 0.44 * sums + step * steps) + meet

    def _mma(
        self, kernel: str, x, weight: TensorMatrix, out, columns: tuple, cut: Cut, parts: int
    ) -> None:
        """x times a packed weight into `out`; the sums of equal shares of K are not joined.

        columns  the kernel's arguments around T; none in front of it: gates and ups
        parts    of K, all shares together
        """
        if isinstance(cut, WideCut):
            self._wide_mma(x, weight, out, columns, cut, parts)
            return
        steps = weight.in_features // STEP
        before, after = columns
        grid = (cut.blocks, ceil(len(x), 8 * cut.tile.eights), cut.shares)
        self._launch(
            "linear_mma", f"{kernel}_{cut.tile.eights}_{cut.tile.wide}", grid, x, weight.data, out,
            *before, len(x), *after, weight.in_features, weight.blocks, steps, parts // cut.shares,
            steps // parts, cut.piece, cut.split, shared_bytes=cut.shared_bytes,
            defines=LINEAR_DEFINES, dependent=True,
        )  # fmt: skip

    def _wide_mma(
        self, x, weight: TensorMatrix, out, columns: tuple, cut: WideCut, parts: int
    ) -> None:
        """`_mma` of many rows."""
        before, (outputs,) = columns
        form, stride, apart = before or (SILU_MUL, outputs, 0)
        apart = apart if cut.shares > 1 else 0
        steps, (across, down, z) = weight.in_features // STEP, cut.grid
        sums = across * down * cut.tile.outputs * cut.tile.rows
        between = self.empty((cut.splits if cut.splits > 1 else 0, sums))
        self._launch(
            "wide_mma", f"wide_mma_{cut.tile.name}", cut.grid, x, weight.data, out, between,
            self.arrived, form, stride, apart, len(x), outputs, weight.in_features, weight.blocks,
            weight.wide, steps, cut.own, steps // parts,
            int(across * down * z <= self.launcher.limits.processors),
            shared_bytes=cut.shared_bytes, defines=wide_defines(self.launcher.limits.shared_bytes),
            dependent=True,
        )  # fmt: skip

    def _mma_gate_up(self, op: str, x, weight: TensorMlp):
        x = self._take(op, "x", x, self.act, None, weight.gate_up.in_features, aligned=True)
        width = weight.gate_up.out_features // 2
        h, parts = self.empty((len(x), width), self.act), weight.gate_up.parts
        cut = self._cut(len(x), weight.gate_up, parts)
        self._mma("gate_up_mma", x, weight.gate_up, h, ((), (width,)), cut, parts)
        return h

    def _mma_query(self, q, key: TensorHeads, cos, sin, positions):
        """`latent_query` with packed heads, after its checks."""
        n, heads, width = q.shape
        rope = width - key.columns
        out = self.empty((n, heads, key.outputs + rope), self.act)
        grid = (heads * (key.slices + 1), ceil(n, HEAD_ROWS))
        self._launch(
            "absorb_mma", "latent_query_mma", grid, q, key.data, cos, sin, positions, out, n, heads,
            key.columns, key.outputs, rope, key.slices, defines=key.defines, dependent=True,
        )  # fmt: skip
        return out

    def _query_shape(self, n: int, joined, q_b, key, latent: int, rope: int) -> QueryShape | None:
        """For n rows, where query_mma takes them."""
        limits, packed = self.launcher.limits, isinstance(key, TensorHeads)
        packed &= isinstance(q_b, TensorMatrix) and joined is not None
        if not (packed and limits.clusters and n <= MOST_QUERIES):
            return None
        shape = QueryShape(q_b.in_features, latent, key.columns, rope)
        whole = q_b.out_features == key.heads * (key.columns + rope) and key.outputs == latent
        whole &= joined.out_features == shape.lora + latent + rope
        plain = q_b.wide == q_b.leaves == 1 and joined.out_features % 4 == 0
        if not (whole and plain and shape.fits):
            return None
        if (key.heads + 1) * shape.blocks * ceil(n, QUERY_ROWS) > QUERY_BLOCKS:
            return None
        static = 32 * QUERY_ROWS * (shape.tiles // shape.blocks)  # the block's own columns
        return shape if shape.shared_bytes + static <= limits.shared_bytes else None

    def _mma_queries(
        self, sums, shape: QueryShape, q_b, key: TensorHeads, q_norm, kv_norm, eps, turn, out
    ):
        """`latent_queries` from what the joined q_a and kv_a gave, after its checks."""
        n, heads = len(sums), key.heads
        queries = self.empty((n, heads, shape.latent + shape.rope), self.act)
        grid = (heads + 1) * shape.blocks, ceil(n, QUERY_ROWS)
        self._launch(
            "query_mma", "query_mma", grid, sums, q_norm, kv_norm, q_b.data, key.data, *turn,
            queries, out, n, heads, sums.shape[1], np.float32(1.0 / shape.lora),
            np.float32(1.0 / shape.latent), eps, shared_bytes=shape.shared_bytes,
            defines=shape.defines, dependent=True,
        )  # fmt: skip
        return queries

    def _mma_value(self, o, value: TensorHeads):
        """`absorb_v` with packed heads."""
        heads = value.heads
        o = self._take("absorb_v", "o", o, self.act, None, heads, value.columns, aligned=True)
        out = self.empty((len(o), heads, value.outputs), self.act)
        self._launch(
            "absorb_mma", "absorb_v_mma", (heads * value.slices, ceil(len(o), HEAD_ROWS)), o,
            value.data, out, len(o), heads, value.outputs, value.columns, value.slices,
            defines=value.defines, dependent=True,
        )  # fmt: skip
        return out

    def _residents_of(self, e: TensorExperts, rows: int, top_k: int):
        """Every choice of Residents for a launch over so many rows: they give the same bits."""
        for up in range(1, self._most_up(e, rows, top_k) + 1):
            for down in DOWN_RESIDENTS:
                yield Residents(up, down)

    def _most_up(self, e: TensorExperts, rows: int, top_k: int) -> int:
        """Blocks of gate and up that a processor has room for."""
        need = e.up_shared_bytes(rows, top_k) + RESERVED
        return max(1, min(UP_RESIDENT, self.launcher.limits.shared_bytes // need))

    def _residents(self, e: TensorExperts, rows: int, top_k: int) -> Residents:
        """The fastest, as measured, else as many blocks as there is room for."""
        room = self.launcher.limits.shared_bytes
        up, down = e.up_shared_bytes(rows, top_k), e.down_shared_bytes(rows, top_k, 2)

        def rule() -> Residents:
            # Of one row, blocks of down find room beside those of gate and up, and fetch meanwhile.
            beside = rows == 1 and up + 2 * down + 3 * RESERVED <= room
            return Residents(self._most_up(e, rows, top_k), DOWN_RESIDENTS[1 if beside else 0])

        product = f"experts {e.experts} of {e.width} x {e.hidden}, top {top_k}, leaves {e.leaves}"
        return self.tiles.choose(product, rows, self._residents_of(e, rows, top_k), rule)

    def _many_ways(self, e: TensorExperts) -> list[ManyRows]:
        """The variants for many rows that there is room for: they give the same bits."""
        limits, whole = self.launcher.limits, e.up_groups % 2 == e.down_groups % 2 == 0
        ways = [way for way in MANY if not way.warpgroups or limits.warpgroups and whole]
        needs = {w: max(e.many_up_shared_bytes(w), e.many_down_shared_bytes(w)) for w in ways}
        return [way for way, need in needs.items() if need <= limits.shared_bytes]

    def _many(self, e: TensorExperts, rows: int, top_k: int) -> ManyRows | None:
        """The fastest, as measured, else by rule the one for the fewest together that holds what
        most experts get, 1.5 deviations above the mean; None for few rows."""
        ways = self._many_ways(e) if rows >= MANY_FROM else []

        def rule() -> ManyRows:
            mean = rows * top_k / e.experts
            largest = max(ways, key=lambda way: way.most)  # the first of these
            return next((w for w in ways if w.most >= mean + 1.5 * math.sqrt(mean)), largest)

        product = f"many rows of experts {e.experts} of {e.width} x {e.hidden}, top {top_k}"
        product += f", leaves {e.leaves}"
        return self.tiles.choose(product, rows, ways, rule) if ways else None

    def _mma_experts(self, x, ids, weights, experts: TensorExperts, shared, hidden=None):
        """`moe` with packed experts, before ranks join."""
        e = experts
        x = self._take("moe", "x", x, self.act, None, e.hidden, aligned=True)
        n, top_k = len(x), ids.shape[1]
        ids = self._take("moe", "ids", ids, INT32, n, top_k)
        weights = self._take("moe", "weights", weights, FLOAT32, n, top_k)
        h = self.empty((n * top_k, e.width), self.act)
        out = self.empty((n, e.hidden))
        sums, beside, down, of_down = out, h[:0], e.down, (1, 1, 0)
        way = self._many(e, min(n, MANY_ROWS), top_k)
        few = way is None and n <= BESIDE_ROWS  # experts_wide adds finished sums alone
        if few and isinstance(shared, TensorMlp) and shared.down.parts <= 2:
            self._check_leaves(shared, e.leaves)
            beside = self._dense_gate_up("moe", x, shared) if hidden is None else hidden
            matrix = shared.down
            down, of_down = matrix.data, (matrix.in_features, matrix.wide, matrix.parts)
        elif shared is not None:
            sums = self._shared_leaves(x, shared, e.leaves, hidden)
        if way is not None:
            step = 4 * ceil(n, 4 * ceil(n, MANY_ROWS))  # then ids of every launch are aligned
            for first in range(0, n, step):
                rows = slice(first, first + step)
                parts = x[rows], ids[rows], weights[rows], h[first * top_k :], sums[rows], out[rows]
                self._many_experts(e, way, *parts, int(sums is not out))
            return out
        limits, most_rows = self.launcher.limits, max(1, MAX_PAIRS // top_k)
        step = min(EXPERT_ROWS, most_rows)
        for first in range(0, n, step):
            rows = slice(first, min(n, first + step))
            count = rows.stop - first
            residents = self._residents(e, count, top_k)
            blocks = min(e.most_items(count, top_k), residents.up * limits.processors)
            self._launch(
                "experts_mma", "expert_gate_up_mma", (blocks,), x[rows], ids[rows], e.gate_up,
                h[first * top_k :], e.tickets, count, e.experts, e.chunks,
                shared_bytes=e.up_shared_bytes(count, top_k),
                defines=e.defines(top_k, residents), dependent=True,
            )  # fmt: skip
        needs = {r: e.down_shared_bytes(r, top_k, of_down[2]) for r in DOWN_ROWS}
        fit = (r for r, need in needs.items() if need <= limits.shared_bytes)
        step = min(next(fit, DOWN_ROWS[-1]), most_rows)
        for first in range(0, n, step):
            rows = slice(first, min(n, first + step))
            count = rows.stop - first
            residents = self._residents(e, count, top_k)
            self._launch(
                "experts_mma", "expert_down_mma", (e.hidden // 32,), h[first * top_k :], ids[rows],
                weights[rows], e.down, sums[rows], beside[rows], down, out[rows], count,
                e.experts, e.width, e.hidden, int(sums is not out), *of_down,
                shared_bytes=e.down_shared_bytes(count, top_k, of_down[2]),
                defines=e.defines(top_k, residents), dependent=True,
            )  # fmt: skip
        return out

    def _many_experts(
        self, e: TensorExperts, way: ManyRows, x, ids, weights, h, shared, out, has_shared: int
    ) -> None:
        """The experts of up to MANY_ROWS rows, whose rows each takes together, into `out`."""
        (n, top_k), blocks = ids.shape, e.hidden // 32
        ids = self._take("moe", "ids", ids, INT32, n, top_k, aligned=True)
        pairs = n * top_k
        tiles = min(pairs, e.experts + pairs // way.most)
        lists, counts = self.empty((e.experts, n), INT32), self.empty((e.experts,), INT32)
        table, n_tiles = self.empty((tiles, 4), INT32), self.empty((1,), INT32)
        defines = e.defines(top_k, way)

        def launch(kernel, grid, *args, shared_bytes=0):
            self._launch(
                "experts_wide", kernel, grid, *args, shared_bytes=shared_bytes, defines=defines,
                dependent=True,
            )  # fmt: skip

        if way.warpgroups:
            placed = self.empty(x.shape, self.act)
            pieces = x.size // 8
            launch("place_columns", (ceil(pieces, THREADS),), x, placed, np.int64(pieces))
            x = placed
        launch(
            "expert_lists", (ceil(e.experts, WARPS),), ids, lists, counts, table, n_tiles,
            e.tickets, n, e.experts,
        )  # fmt: skip
        launch(
            "expert_gate_up_wide", (ceil(e.width, 16 * WARPS), tiles), x, lists, table, n_tiles,
            e.gate_up, h, n, e.chunks, shared_bytes=e.many_up_shared_bytes(way),
        )  # fmt: skip
        # In so many turns that the sums of all pairs need no more than SLOT_BYTES.
        most = max(1, SLOT_BYTES // (pairs * e.leaves * 128))
        step = ceil(blocks, ceil(blocks, most))
        slots = self.empty((pairs * e.leaves * step, 32))
        for first in range(0, blocks, step):
            count = min(step, blocks - first)
            each = min(count, DOWN_EACH)
            launch(
                "expert_down_wide", (ceil(count, each), tiles, e.leaves), h, lists, table, n_tiles,
                e.down, slots, n, e.width, blocks, first, count, each,
                shared_bytes=e.many_down_shared_bytes(way),
            )  # fmt: skip
            launch(
                "expert_sum", (ceil(n * count * 8, THREADS),), slots, ids, weights, shared, out, n,
                e.experts, e.hidden, first, count, has_shared,
            )  # fmt: skip


# ---- attention (kernels_attention.cu) ----------------------------------------------------------

MAX_TENSOR_LEAF = 16 * WARPS  # positions of a leaf: a warp takes the scores of 16
PARTS_BYTES = 512 << 20  # of the parts of spans at most, if one row allows
WORK_ROWS = 1024  # of one launch of attention_work
WORK_TILES = 2  # column tiles from which on a variant may be worth it for many leaves
MEET = 4  # spans that a warp of the fold brings to a meeting
WARPGROUP_THREADS = 3 * 128  # of a block that multiplies by warpgroups: two do, one loads


@dataclass(frozen=True)
class ColumnTile:
    """A variant of the attention kernels: `tiles` times 8 columns (row, head) of a block.

    least       column tiles of a forward from which on it is the variant to take
    work        or, from WORK_TILES column tiles on, column tiles times leaves from which on
    warpgroups  it multiplies by warpgroups
    """

    tiles: int
    least: int
    work: int = INT32_MAX
    warpgroups: bool = False

    def suits(self, column_tiles: int, leaves: int) -> bool:
        works = column_tiles >= WORK_TILES and column_tiles * leaves >= self.work
        return column_tiles >= self.least or works

    @property
    def name(self) -> str:
        return "warpgroup" if self.warpgroups else f"mma_{self.tiles}"

    @property
    def threads(self) -> int:
        """Of a block."""
        return WARPGROUP_THREADS if self.warpgroups else THREADS


COLUMN_TILES = (
    ColumnTile(1, least=0),
    ColumnTile(2, least=5),
    ColumnTile(4, least=9),
    ColumnTile(8, least=25),
    ColumnTile(8, least=25, work=800, warpgroups=True),
)


def attention_defines(key: int, value: int, leaf: int, span: int) -> Defines:
    """-D of the attention section: widths of a key and of its value, positions of a leaf, span."""
    return (("KEY_WIDTH", key), ("VALUE_WIDTH", value), ("LEAF", leaf), ("SPAN", span))


@dataclass(frozen=True)
class AttentionShape:
    """What tensor cores attend in; apart: a value is not the front of its key."""

    key: int
    value: int
    leaf: int
    span: int
    apart: bool

    @property
    def fits(self) -> bool:
        return self.key % 8 == 0 and self.leaf <= MAX_TENSOR_LEAF

    @property
    def fits_warpgroups(self) -> bool:
        """What latent_spans_warpgroup asks for."""
        widths = self.key % 64 == 0 and self.value % 128 == 0 and self.value <= 512
        return widths and self.leaf == 64 and not self.apart

    @property
    def value_tiles(self) -> int:
        return ceil(self.value, 16)

    def defines(self, stages: int) -> Defines:
        widths = attention_defines(self.key, self.value, self.leaf, self.span)
        own = ("APART", int(self.apart)), ("STAGES", stages)
        return (*widths, *own, ("WARPGROUP_THREADS", WARPGROUP_THREADS))

    def shared_bytes(self, tile: ColumnTile, stages: int) -> int:
        """Of a block with so many leaves in flight."""
        if tile.warpgroups:
            gates = 8 * (4 * (self.key // 64) + 10) + 4 * (2 * 2 * 2 * 64)  # struct Gates
            return 64 * (3 * 2 * self.key + 128) + gates
        tiles = tile.tiles
        columns, width, values = 8 * tiles, ceil(self.key, 16) * 16, 16 * self.value_tiles
        stride, stage = 2 * width + 16, self.leaf * (2 * width + 16)
        if self.apart:
            stage += self.leaf * (2 * values + 16)
        inside = not self.apart and width - values >= self.leaf and columns <= self.leaf
        p = 0 if inside else columns * (2 * self.leaf + 16)
        return columns * (8 * (self.leaf // 16) + 8 + stride) + p + stages * stage


@dataclass(frozen=True)
class AttentionWork:
    """Units of one launch over rows [first, first + n) of a forward, on the device.

    units  int32 [.., 8];  rows  int32 [n, 4]: see attention_work
    slots  parts of a row at most;  tile, stages: the variant;  blocks: of its grid
    """

    first: int
    n: int
    units: object
    rows: object
    slots: int
    tile: ColumnTile
    stages: int
    blocks: int
    shared_bytes: int


class TensorCoreAttention:
    """Attention of bfloat16 activations on tensor cores: a part of CudaOps."""

    def _variant(
        self, shape: AttentionShape, column_tiles: int, leaves: int = 1
    ) -> tuple[ColumnTile, int, int] | None:
        """For so many column tiles and leaves of a context: (variant, stages, shared bytes), or
        None where none fits."""
        limits = self.launcher.limits
        for tile in (t for t in reversed(COLUMN_TILES) if t.suits(column_tiles, leaves)):
            if tile.warpgroups and not (limits.warpgroups and shape.fits_warpgroups):
                continue
            for stages in (2,) if tile.warpgroups else (2, 1):
                need = shape.shared_bytes(tile, stages)
                if need <= limits.shared_bytes:
                    return tile, stages, need
        return None

    def _tensor_shape(self, key: int, value: int, leaf: int, span: int, apart: bool):
        """AttentionShape where tensor cores are to take it, else None."""
        shape = AttentionShape(key, value, leaf, span, apart)
        takes = self.tensor_attention and shape.fits and self._variant(shape, 1) is not None
        return shape if takes else None

    def _attention_work(self, plan, shape: AttentionShape, heads: int) -> list:
        """The launches of a forward, planned at its first layer."""
        key = shape, heads
        if key not in plan.work:
            n, row_tiles = len(plan.positions), ceil(heads, 8)
            leaves, depth = plan.reach // shape.leaf + 1, plan.ancestors.shape[1]
            behind = min(leaves, (depth - 1) // shape.leaf + 2)  # leaves that rows do not share
            spans = ceil(leaves, shape.span) + behind
            row_bytes = spans * row_tiles * shape.value_tiles * 512
            step = max(1, min(n, WORK_ROWS, PARTS_BYTES // row_bytes))
            plan.work[key] = [
                self._plan_rows(plan, shape, row_tiles, first, min(step, n - first), spans, behind)
                for first in range(0, n, step)
            ]
        return plan.work[key]

    def _plan_rows(self, plan, shape, row_tiles: int, first: int, n: int, spans: int, behind: int):
        leaves = plan.reach // shape.leaf + 1
        tile, stages, need = self._variant(shape, n * row_tiles, leaves)
        together, head_parts = max(1, tile.tiles // row_tiles), ceil(row_tiles, tile.tiles)
        blocks = self.launcher.limits.processors
        alone = 2 * blocks // (ceil(n, together) * head_parts)  # leaves of a group in two turns
        slots = max(spans, min(leaves, alone) + behind)
        most = n * head_parts * slots
        work = AttentionWork(
            first, n, self.empty((most + blocks, 8), INT32), self.empty((n, 4), INT32), slots,
            tile, stages, min(blocks, most), need,
        )  # fmt: skip
        self._launch(
            "attention_work", "attention_work", (1,), plan.positions, plan.sequence, plan.lengths,
            plan.tables, plan.ancestors, work.units, work.rows, first, n, plan.ancestors.shape[1],
            plan.tables.shape[1], together, head_parts, row_tiles, work.blocks, slots,
            shared_bytes=16 * n, defines=(("LEAF", shape.leaf), ("SPAN", shape.span)),
        )  # fmt: skip
        return work

    def _latent_attention_mma(self, q, pages, fresh, plan, factor, shape: AttentionShape):
        n, heads, _ = q.shape
        out, row_tiles = self.empty((n, heads, shape.value), self.act), ceil(heads, 8)
        planned = (shape, heads) in plan.work
        for work in self._attention_work(plan, shape, heads):
            rows, all_tiles = slice(work.first, work.first + work.n), work.n * row_tiles
            parts = self.empty((work.slots, all_tiles, 4, 4))
            values = self.empty((work.slots, all_tiles, shape.value_tiles, 128))
            # What was planned in front of this very launch cannot be read before it has ended.
            keys = (pages, self._block_map(pages)) if work.tile.warpgroups else (pages,)
            self._launch(
                "attention_mma", f"latent_spans_{work.tile.name}", (work.blocks,), q[rows],
                *keys, fresh, plan.tables, plan.ancestors[rows], work.units, parts, values, heads,
                plan.tables.shape[1], plan.ancestors.shape[1], all_tiles, factor,
                shared_bytes=work.shared_bytes, defines=shape.defines(work.stages),
                dependent=planned, threads=work.tile.threads,
            )  # fmt: skip
            args = parts, values, work.rows, out[rows], heads, all_tiles
            self._fold_mma("latent_fold_mma", shape, work.stages, all_tiles, args)
            del parts, values, args  # the next launch's have their room
        return out

    def _block_map(self, pages):
        """CudaLauncher.block_map of pages' keys. All are kept: recorded launches read them."""
        keys = pages.reshape(-1, pages.shape[-1])
        key = self.launcher.address(keys), *keys.shape
        if key not in self.block_maps:
            self.block_maps[key] = self.launcher.block_map(keys)
        return self.block_maps[key]

    def _block_attention_mma(
        self, q, kv, pages, tables, lengths, window, factor, shape, settled: bool
    ):
        out, (blocks, max_pages) = self.empty(q.shape, self.act), tables.shape
        n, heads, kv_heads = len(q) // blocks, q.shape[1], kv.shape[2]
        column_tiles = ceil(n * (heads // kv_heads), 8)
        all_tiles = blocks * kv_heads * column_tiles
        tile, *_ = self._variant(shape, column_tiles)
        limits, column_parts = self.launcher.limits, ceil(column_tiles, tile.tiles)
        need = shape.shared_bytes(tile, stages=1)
        at_once = max(1, min(2, limits.shared_bytes // need)) * limits.processors
        leaves, units = max_pages + 1, blocks * kv_heads * column_parts
        slots = max(ceil(leaves, shape.span) + 1, min(leaves, at_once // units))
        parts = self.empty((slots, all_tiles, 4, 4))
        values = self.empty((slots, all_tiles, shape.value_tiles, 128))
        sizes = blocks, n, heads, kv_heads, window, column_parts, at_once, slots
        self._launch(
            "attention_mma", f"block_spans_{tile.name}", (min(at_once, units * slots),), q, kv,
            pages, lengths, tables, parts, values, *sizes, max_pages, factor,
            shared_bytes=need, defines=shape.defines(1), dependent=settled,
        )  # fmt: skip
        args = parts, values, lengths, out, *sizes
        self._fold_mma("block_fold_mma", shape, 1, all_tiles, args)
        return out

    def _fold_mma(self, kernel: str, shape: AttentionShape, stages: int, all_tiles: int, args):
        """split: warps that share the spans of a tile, as many as two blocks a processor hold."""
        room = 2 * WARPS * self.launcher.limits.processors // (shape.value_tiles * all_tiles)
        split = next((s for s in (8, 4, 2) if s <= room), 1)
        grid = ceil(shape.value_tiles * split, WARPS), all_tiles
        self._launch(
            "attention_mma", kernel, grid, *args, split, defines=shape.defines(stages),
            shared_bytes=WARPS * MEET * 1024 if split > 1 else 0, dependent=True,
        )  # fmt: skip


def many_bytes(rows: int, experts: int, top_k: int, leaves: int, hidden: int) -> int:
    """Scratch of `_many_experts`: lists, x once more with its columns placed (by warpgroups), and
    slots for the sums of pairs."""
    rows = min(rows, MANY_ROWS)
    block = rows * top_k * leaves * 128
    return (4 * experts + 2 * hidden) * rows + min(max(SLOT_BYTES, block), hidden // 32 * block)


def mma_needs(model: config.Model, linear: bool, experts: bool, attention: bool) -> dict[str, int]:
    """Dynamic shared bytes of the kernels of these kinds, for this model: see ops.shared_needs."""
    needs: dict[str, int] = {}
    if attention:
        needs["attention_work"] = 16 * WORK_ROWS
        needs["latent_fold_mma"] = needs["block_fold_mma"] = WARPS * MEET * 1024
    if linear:
        cuts = [(config.leaves(model.num_attention_heads, model.num_attention_heads), PARTS)]
        cuts += [(config.mlp_leaves(model, i), PARTS) for i in range(model.num_hidden_layers)]
        own = max(leaves * parts // WARPS for leaves, parts in cuts)
        needs["linear_mma"] = linear_shared_bytes(TILES[0], PIECE, own)
        needs["gate_up_mma"] = linear_shared_bytes(TILES[0], PIECE, 1)
    if experts and model.n_routed_experts:
        top_k, layer = model.num_experts_per_tok, model.num_hidden_layers - 1
        packed = TensorExperts(
            None, None, None, model.n_routed_experts, model.moe_intermediate_size,
            model.hidden_size, config.mlp_leaves(model, layer), up_groups=PIECE, down_groups=PIECE,
        )  # fmt: skip
        rows = min(EXPERT_ROWS, max(1, MAX_PAIRS // top_k))
        needs["expert_gate_up_mma"] = packed.up_shared_bytes(rows, top_k)
        needs["expert_down_mma"] = packed.down_shared_bytes(DOWN_ROWS[-1], top_k)
    return needs
