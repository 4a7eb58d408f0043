"""Checkpoint directory -> this rank's tensors. The only module that knows file formats.

The way in has three steps, and nothing large is read or allocated before the second has passed:

    open_checkpoint   config files, index, every shard's header, each checked against its file
    plan_target       every tensor the model needs: its shard, byte range, this rank's part of it
                      and its destination; all that do not fit are reported together
    load_target       threads read those parts, past the page cache, into the arrays; or
    stream_target     the same, a layer at a time

The drafter goes the same way through `plan_drafter` and `load_drafter`. `generate_weights` fills
the same plan from a seed, without files.

Every number in a file is a claim to be checked. Files are read with preadv and never mapped: a
mapped page past the end of a short file reads as junk instead of failing. Nor can a checkpoint make
the loader read a file elsewhere:

    An index names files without a folder. A link is followed only to a file inside the checkpoint
    directory or, when that is REPOSITORY/snapshots/REVISION (Hugging Face's cache), directly inside
    REPOSITORY/blobs. All else is refused unopened, in words that do not tell whether it exists.

INT4 is compressed-tensors' `pack-quantized`: w[o, c] = (nibble - 8) * scale[o, c // group]; column
c sits in word c // 8 at bits 4 * (c % 8). No zero point, no interleave.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import mmap
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

import config
import reference
from config import UserError
from reference import Int4Weight, unpack_int4

__all__ = [
    "Checkpoint",
    "DenseMlp",
    "DrafterLayer",
    "DrafterWeights",
    "LayerWeights",
    "MoeMlp",
    "Plan",
    "Share",
    "TargetWeights",
    "TensorInfo",
    "generate_weights",
    "generation_stop_ids",
    "load_drafter",
    "load_target",
    "open_checkpoint",
    "pack_int4",
    "plan_drafter",
    "plan_target",
    "quantise_int4",
    "read_piece",
    "read_rate",
    "stream_target",
    "unpack_int4",
]

log = logging.getLogger(__name__)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"F32": np.dtype("<f4"), "BF16": BFLOAT16, "I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
FLOATS = ("F32", "BF16")  # what a dense weight or a scale may be
# Bytes of every dtype of the format: a shard may also hold vision tensors, which are skipped.
ITEMSIZE = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}

PREFIX = "language_model."
VISION = ("vision_tower.", "mm_projector.")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

HEADER_LIMIT = 100_000_000  # bytes, the format's own limit
JSON_LIMIT = 100_000_000  # bytes; the index of K2.6 has about 25 million
COUNT_LIMIT = 1 << 48  # a dimension or an offset above this is nonsense
SHOWN = 8  # names of each kind listed in one error
READERS = 8  # threads
CHUNK = 8 << 20  # bytes a thread stages: READERS * CHUNK in all, and as much again in a Share
LANES = 4  # threads that read what the ranks of a host share
GAP = 64 << 10  # bytes that are read over rather than started anew behind
HUGE_PAGE = 2 << 20
PAGE = 4096  # what O_DIRECT wants offsets, lengths and addresses to be multiples of
DIRECT_FROM = 1 << 30  # bytes of a plan; below, the page cache makes the next start faster
STALL = 600  # seconds without a word of another rank

ONE_RANK = config.TensorParallel()


# ---- INT4 ----------------------------------------------------------------------------------------


def pack_int4(codes: np.ndarray) -> np.ndarray:
    """int8 codes -8..7 [..., in] -> int32 words [..., in / 8], first code in the lowest nibble."""
    low, high = (codes.min(), codes.max()) if codes.size else (0, 0)
    if codes.shape[-1] % 8 or low < -8 or high > 7:
        raise UserError(
            f"pack_int4: expected codes -8..7 in a multiple of 8 columns, got {low}..{high} in"
            f" {codes.shape[-1]}"
        )
    nibbles = (codes + 8).astype(np.uint8)
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view("<i4")


def quantise_int4(w: np.ndarray, group: int = 32, scale_dtype: Any = BFLOAT16) -> Int4Weight:
    """float32 [..., out, in] -> INT4 with one scale per `group` columns, float32 or bfloat16.

    scale = absmax / 7.5 uses both ends of the codes' range; the codes are taken from the scale as
    rounded to `scale_dtype`. A group of zeros has scale 0 and codes 0.
    """
    if w.shape[-1] % group or group % 8 or not np.isfinite(w).all():
        raise UserError(
            f"quantise_int4: expected finite values in whole groups of {group}, got {w.shape}"
        )
    groups = w.astype(np.float32, copy=False).reshape(*w.shape[:-1], -1, group)
    scales = (np.abs(groups).max(axis=-1) / np.float32(7.5)).astype(scale_dtype)
    step = scales.astype(np.float32)[..., None]
    codes = np.rint(groups / np.where(step == 0, np.float32(1), step)).clip(-8, 7)
    return Int4Weight(packed=pack_int4(codes.astype(np.int8).reshape(w.shape)), scales=scales)


# ---- files, JSON ---------------------------------------------------------------------------------


def _show(name: object) -> str:
    """A name from a file, fit for one line of an error."""
    text = str(name)
    return text if text.isprintable() and len(text) <= 160 else ascii(text[:160])


def _locate(directory: Path, name: str) -> str:
    """Real path of a checkpoint's file, under the rule in the module's docstring."""
    root = Path(os.path.realpath(directory))
    if name and name.isprintable() and name == os.path.basename(name) and name not in (".", ".."):
        real = Path(os.path.realpath(root / name))
        if real.is_relative_to(root):
            return str(real)
        if root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs":
            return str(real)
    raise UserError(
        f"{directory}: {_show(name)} does not name a file of this directory; a checkpoint's files"
        " must lie in it, or be links into the blobs folder of the same hub cache"
    )


@dataclass(frozen=True, slots=True)
class _File:
    path: Path  # as the user knows it, for errors
    fd: int
    size: int

    def read_into(self, view: memoryview, offset: int, wanted: int | None = None) -> None:
        """Fill `view` with the bytes from `offset` on: all, or at least the first `wanted`."""
        wanted, got = len(view) if wanted is None else wanted, 0
        while got < wanted:
            direct = self.direct()  # asked first: another thread may change it during the read
            try:
                end = got + os.preadv(self.fd, [view[got:]], offset + got)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    # This file system wants other blocks than PAGE, or none of it.
                    fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_RDONLY)
                    continue
                raise UserError(
                    f"{self.path}: cannot be read at byte {offset + got}: {error.strerror}"
                ) from None
            if end < wanted and direct:
                end -= end % PAGE  # the next read must begin on a block
            if end <= got:
                raise UserError(
                    f"{self.path}: truncated: expected {wanted - got} bytes more at byte"
                    f" {offset + got}; the file changed after its header was read, load again"
                )
            got = end

    def direct(self) -> bool:
        return bool(fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_DIRECT)

    def forget(self, offset: int, length: int) -> None:
        """Let the page cache drop what was read: it would push out what others need."""
        if not self.direct():
            os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, length: int) -> bytearray:
        data = bytearray(length)
        self.read_into(memoryview(data), offset)
        return data


@contextmanager
def _opened(directory: Path, name: str, direct: bool = False) -> Iterator[_File]:
    """The file; `direct`: past the page cache, if its file system can do that."""
    path, real = directory / name, _locate(directory, name)
    # The path has no link left in it; NONBLOCK so that a pipe cannot make us wait.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            fd = os.open(real, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            fd = os.open(real, flags)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be opened: {error.strerror}; is the download complete?"
        ) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: expected a file, found a folder or a device")
        yield _File(path, fd, status.st_size)
    finally:
        os.close(fd)


def _parse_json(raw: bytes | bytearray, source: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"{_show(twice)} is there twice")
        return found

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not valid JSON: {_show(error)}; download it again") from None
    if not isinstance(parsed, dict):
        raise UserError(f"{source}: expected a JSON object, got {type(parsed).__name__}")
    return parsed


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    with _opened(directory, name) as file:
        if file.size > JSON_LIMIT:
            raise UserError(
                f"{file.path}: {file.size} bytes of JSON, at most {JSON_LIMIT} are allowed"
            )
        return _parse_json(file.read(0, file.size), str(file.path))


# ---- the directory -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as a shard's header declares it, its byte range checked against the file."""

    name: str  # as in the file
    file: str  # shard, in the checkpoint's directory
    dtype: str  # the format's name: F32, BF16, I32 ...
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint directory: JSON parsed, shard headers checked, no data read yet."""

    directory: Path
    config_json: dict[str, Any]
    generation_config: dict[str, Any]  # {} when the file is absent
    tensors: dict[str, TensorInfo]  # all of them, by their names in the files
    text_names: dict[str, TensorInfo]  # no vision; the prefix `language_model.` stripped
    skipped_vision: int  # tensors that text_names leaves out
    generated: bool = False  # no files but the JSON ones: weights come from a seed
    shard: tuple[int, int] | None = None  # (rank, size) whose parts alone are here


def open_checkpoint(
    directory: Path | str, *, generate: bool = False, rank: int = 0, size: int = 1
) -> Checkpoint:
    """Read the JSON files and all headers; log how many vision tensors are skipped.

    generate    config.json is all there must be
    rank, size  choose the folder in a directory that tools/preshard.py wrote

    Raises UserError for a missing or unreadable file, a header that contradicts its file
    (truncated, overlaps, gaps), a tensor in two shards, an index that contradicts the shards, and a
    path that leaves the directory.
    """
    directory = Path(directory)
    if not os.path.isdir(directory):
        raise UserError(
            f"{directory}: no such directory; expected a checkpoint with config.json and {SINGLE}"
        )
    directory = _rank_directory(directory, rank, size)
    config_json = _read_json(directory, "config.json")
    generation_config: dict[str, Any] = {}
    if os.path.lexists(directory / "generation_config.json"):
        generation_config = _read_json(directory, "generation_config.json")
    if generate:
        return Checkpoint(directory, config_json, generation_config, {}, {}, 0, generated=True)
    shard = _read_shard_key(directory, config_json)
    tensors = _read_headers(directory)

    text: dict[str, TensorInfo] = {}
    skipped = 0
    for name, tensor in tensors.items():
        if name.startswith(VISION):
            skipped += 1
            continue
        short = name.removeprefix(PREFIX)
        if short in text:
            raise UserError(
                f"{directory}: {_show(short)} is there twice, with and without the prefix {PREFIX}"
            )
        text[short] = tensor
    if skipped:
        log.warning(
            "%s: %d vision tensors skipped, this engine reads text only", directory, skipped
        )
    return Checkpoint(
        directory, config_json, generation_config, tensors, text, skipped, shard=shard
    )


SHARD_KEY = "kdtree_shard"  # of config.json, written by tools/preshard.py: {"rank", "size"}


def rank_name(rank: int, size: int) -> str:
    """The folder of one rank's parts."""
    return f"rank-{rank}-of-{size}"


def _rank_directory(directory: Path, rank: int, size: int) -> Path:
    """The rank's own folder, where a checkpoint was cut beforehand."""
    found = sorted(path.name for path in directory.glob("rank-*-of-*"))
    if not found or (directory / "config.json").exists():
        return directory
    if rank_name(rank, size) not in found:
        raise UserError(
            f"{directory}: expected {rank_name(rank, size)} for tp.size {size}, found"
            f" {_some(found)}; start the ranks it was cut for, or cut it anew (tools/preshard.py)"
        )
    return directory / rank_name(rank, size)


def _read_shard_key(directory: Path, config_json: dict[str, Any]) -> tuple[int, int] | None:
    found = config_json.get(SHARD_KEY)
    if found is None:
        return None
    numbers = [found.get(key) for key in ("rank", "size")] if isinstance(found, dict) else []
    if [type(n) for n in numbers] != [int, int] or not 0 <= numbers[0] < numbers[1]:
        raise UserError(
            f"{directory / 'config.json'}: {SHARD_KEY}: expected a rank and a size, got"
            f" {_show(found)}; cut the checkpoint anew (tools/preshard.py)"
        )
    return numbers[0], numbers[1]


def generation_stop_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Ids that end a text: `eos_token_id`, one or a list, of generation_config.json.

    Where that has none, of config.json, as Hugging Face does; () if neither has.
    """
    outer, directory = checkpoint.config_json, checkpoint.directory
    vocabulary = config.parse_model(outer, source=str(directory / "config.json")).vocab_size
    for name, source in (
        ("generation_config.json", checkpoint.generation_config),
        ("config.json", outer.get("text_config", outer)),
        ("config.json", outer),
    ):
        found = source.get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
            raise UserError(
                f"{directory / name}: eos_token_id: expected one id or a list of ids, each in"
                f" 0..{vocabulary - 1}, got {_show(found)}"
            )
        return tuple(dict.fromkeys(ids))
    return ()


def _read_headers(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of the directory by name, from the index's shards or the single file."""
    single, indexed = (os.path.lexists(directory / name) for name in (SINGLE, INDEX))
    if single == indexed:
        found = "both are there, remove the one that is not meant" if single else "neither is there"
        raise UserError(f"{directory}: expected {SINGLE} or {INDEX}, {found}")
    index = _read_index(directory) if indexed else {}
    shards = sorted(set(index.values())) if indexed else [SINGLE]

    def read(shard: str) -> _Header:
        return _read_header(directory, shard)

    tensors: dict[str, TensorInfo] = {}
    with ThreadPoolExecutor(READERS) as pool:
        # Threads only read: parsing in all of them, they would wait for each other's lock.
        for shard, header in zip(shards, pool.map(read, shards), strict=True):
            for tensor in _parse_header(shard, header):
                other = tensors.setdefault(tensor.name, tensor)
                if other is not tensor:
                    raise UserError(
                        f"{directory}: {_show(tensor.name)} is in both {other.file} and"
                        f" {tensor.file}, expected in one"
                    )
    for name, shard in index.items():
        if name not in tensors or tensors[name].file != shard:
            raise UserError(
                f"{directory / INDEX}: places {_show(name)} in {shard}, which does not hold it"
            )
    if indexed and len(index) != len(tensors):
        extra = next(tensor for name, tensor in tensors.items() if name not in index)
        raise UserError(
            f"{directory / INDEX}: does not list {_show(extra.name)}, which {extra.file} holds"
        )
    return tensors


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor name -> shard."""
    index = _read_json(directory, INDEX).get("weight_map")
    if not isinstance(index, dict) or {type(shard) for shard in index.values()} != {str}:
        raise UserError(f"{directory / INDEX}: expected weight_map, of tensor names to shard names")
    return index


@dataclass(frozen=True, slots=True)
class _Header:
    """A shard's header as it is: 8 bytes of length, that many bytes of JSON, then the data."""

    path: Path
    text: bytearray
    size: int  # of the file


def _read_header(directory: Path, shard: str) -> _Header:
    with _opened(directory, shard) as file:
        where, size = file.path, file.size
        if size < 8:
            raise UserError(f"{where}: truncated: {size} bytes, expected 8 of header length alone")
        length = int.from_bytes(file.read(0, 8), "little")
        if length > HEADER_LIMIT:
            raise UserError(
                f"{where}: declares a header of {length} bytes, at most {HEADER_LIMIT} are"
                " allowed; the file is damaged or of another format"
            )
        if 8 + length > size:
            raise UserError(
                f"{where}: truncated: its header ends at byte {8 + length}, the file has"
                f" {size}; download it again"
            )
        return _Header(where, file.read(8, length), size)


def _parse_header(shard: str, raw: _Header) -> list[TensorInfo]:
    """The tensors of one safetensors file, in file order. Their data must leave no gaps."""
    where, start, size = raw.path, 8 + len(raw.text), raw.size
    header = _parse_json(raw.text, f"{where}: header")
    header.pop("__metadata__", None)
    tensors = [_read_entry(name, entry, shard, start, where) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    end = max((tensor.end for tensor in tensors), default=start)
    if end != size:
        fault = "truncated: " if end > size else ""
        raise UserError(
            f"{where}: {fault}its header declares {end} bytes, the file has {size};"
            " download it again"
        )
    at = start
    for tensor in tensors:
        if tensor.begin != at:
            fault = "overlaps the tensor before it" if tensor.begin < at else "follows a gap"
            raise UserError(
                f"{where}: {_show(tensor.name)} {fault}: declared at byte {tensor.begin}, expected"
                f" at {at}; download it again"
            )
        at = tensor.end
    return tensors


def _read_entry(name: str, entry: Any, shard: str, start: int, where: Path) -> TensorInfo:
    """One entry of a header: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}."""
    if not isinstance(entry, dict):
        entry = {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if type(dtype) is not str or dtype not in ITEMSIZE:
        raise UserError(
            f"{where}: {_show(name)}: dtype: expected one of {', '.join(ITEMSIZE)}, got"
            f" {_show(dtype)}"
        )
    for key, value, least, most in (("shape", shape, 0, 8), ("data_offsets", offsets, 2, 2)):
        if not _are_counts(value, least, most):
            raise UserError(
                f"{where}: {_show(name)}: {key}: expected a list of sizes, got {_show(value)}"
            )
    tensor = TensorInfo(name, shard, dtype, tuple(shape), start + offsets[0], start + offsets[1])
    expected, actual = math.prod(shape) * ITEMSIZE[dtype], offsets[1] - offsets[0]
    if actual != expected:
        raise UserError(
            f"{where}: {_show(name)}: {tensor} is {expected} bytes, its data_offsets hold {actual}"
        )
    return tensor


def _are_counts(value: Any, least: int, most: int) -> bool:
    if type(value) is not list or not least <= len(value) <= most:
        return False
    for x in value:  # noqa: SIM110 - `all` over a generator takes three times as long
        if type(x) is not int or not 0 <= x < COUNT_LIMIT:
            return False
    return True


# ---- the weights ---------------------------------------------------------------------------------


# All matrices are [out, in] as in the files. Dense ones, norms included, are float32 or bfloat16.
Weight = np.ndarray | Int4Weight


@dataclass(frozen=True)
class DenseMlp:
    """SwiGLU of a dense layer on one rank. I = intermediate_size / tp."""

    gate: Weight  # [I, H]
    up: Weight  # [I, H]
    down: Weight  # [H, I]


@dataclass(frozen=True)
class MoeMlp:
    """Routed and shared experts on one rank. I = moe_intermediate_size / tp."""

    router: np.ndarray  # [E, H]
    bias: np.ndarray  # [E] float32, the file's bits
    experts_gate: Weight  # [E, I, H]
    experts_up: Weight  # [E, I, H]
    experts_down: Weight  # [E, H, I]
    shared_gate: Weight | None  # [n_shared * I, H]; None without shared experts
    shared_up: Weight | None  # [n_shared * I, H]
    shared_down: Weight | None  # [H, n_shared * I]


@dataclass(frozen=True)
class LayerWeights:
    """One layer on one rank. A = heads / tp, H = hidden."""

    input_norm: np.ndarray  # [H]
    q_a: np.ndarray  # [q_lora, H]
    q_a_norm: np.ndarray  # [q_lora]
    q_b: np.ndarray  # [A * (nope + rope), q_lora], per head nope then rope rows
    kv_a: np.ndarray  # [kv_lora + rope, H]
    kv_a_norm: np.ndarray  # [kv_lora]
    kv_b: np.ndarray  # [A * (nope + v), kv_lora], per head k_nope then v rows
    o: np.ndarray  # [H, A * v]
    post_norm: np.ndarray  # [H]
    mlp: DenseMlp | MoeMlp


@dataclass(frozen=True)
class TargetWeights:
    """The target on one rank; a part that tp.cut replicates is whole.

    V_r = 8 * ceil(vocab / 8) / tp. Local row i is id rank * V_r + i; rows from vocab_size on are 0.
    """

    embed: np.ndarray  # [V_r, H]
    layers: Iterable[LayerWeights]  # a tuple, or an iterator where they come one by one
    norm: np.ndarray  # [H]
    head: np.ndarray  # [V_r, H]


@dataclass(frozen=True)
class DrafterLayer:
    """One DFlash layer on one rank. A, G = query and key heads, D = head_dim, I = width / tp."""

    input_norm: np.ndarray  # [H]
    q: np.ndarray  # [A * D, H]
    k: np.ndarray  # [G * D, H]
    v: np.ndarray  # [G * D, H]
    o: np.ndarray  # [H, A * D]
    q_norm: np.ndarray  # [D]
    k_norm: np.ndarray  # [D]
    post_norm: np.ndarray  # [H]
    gate: np.ndarray  # [I, H]
    up: np.ndarray  # [I, H]
    down: np.ndarray  # [H, I]


@dataclass(frozen=True)
class DrafterWeights:
    """The DFlash drafter on one rank. Embedding and head are the target's."""

    fc: np.ndarray  # [H / tp, taps * target hidden]
    hidden_norm: np.ndarray  # [H]
    norm: np.ndarray  # [H]
    layers: tuple[DrafterLayer, ...]


# ---- the plan ------------------------------------------------------------------------------------

Range = tuple[int, int]  # first, and one past the last
Shape = tuple[int, int]  # (out, in)


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's part of one tensor, for the first rows of its destination."""

    tensor: TensorInfo
    rows: Range
    columns: Range
    index: int | None  # which matrix of a stack


@dataclass(frozen=True, slots=True)
class Slot:
    """One array to fill. What no piece fills (padded vocabulary) is zero."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    upcast: bool  # to float32 once read, which is exact

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Int4Slots:
    """Stands for an Int4Weight in a plan."""

    packed: Slot
    scales: Slot


@dataclass(frozen=True)
class Plan:
    """What one rank will hold, and where each byte of it lies; checked, nothing read yet."""

    directory: Path
    weights: Any  # TargetWeights or DrafterWeights with a Slot in place of every array
    shapes: tuple[tuple[TensorInfo, Shape], ...] = ()  # weight_shape tensors and what they say
    group: int = 32  # columns of an INT4 scale
    own_files: bool = False  # tools/preshard.py's: no other rank reads them

    @property
    def slots(self) -> list[Slot]:
        return _slots(self.weights)

    @property
    def bytes(self) -> int:
        """Bytes this rank will hold."""
        return sum(slot.bytes for slot in self.slots)

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of every layer."""
        return [sum(slot.bytes for slot in _slots(layer)) for layer in self.weights.layers]


def plan_target(
    checkpoint: Checkpoint,
    model: config.Model,
    *,
    tp: config.TensorParallel = ONE_RANK,
    rank: int = 0,
) -> Plan:
    """Find every tensor of `model` in the checkpoint, and the part of it that `rank` holds.

    A cut gives each rank a contiguous equal part: of output rows for `column`, `heads` and
    `vocabulary`, of input columns for `row`. Raises UserError if a dimension cannot be cut so, and
    one UserError that names all missing, unknown, wrongly typed and wrongly shaped tensors.
    """
    plan = _Planner(checkpoint, tp, rank, model.group_size)
    vocabulary, hidden = model.vocab_size, model.hidden_size
    weights = TargetWeights(
        embed=plan.vocabulary("model.embed_tokens", vocabulary, hidden, tp.cut.embed_tokens),
        layers=tuple(_plan_layer(plan, model, i) for i in range(model.num_hidden_layers)),
        norm=plan.dense("model.norm", hidden),
        head=plan.vocabulary("lm_head", vocabulary, hidden, tp.cut.lm_head),
    )
    return plan.finish(weights)


def _plan_layer(plan: _Planner, model: config.Model, i: int) -> LayerWeights:
    at, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
    hidden, heads, q_lora = model.hidden_size, model.num_attention_heads, model.q_lora_rank
    latent, rope, value = model.kv_lora_rank, model.qk_rope_head_dim, model.v_head_dim
    q_rows, kv_rows = model.qk_nope_head_dim + rope, model.qk_nope_head_dim + value  # of one head
    first, last = plan.share(f"{attention}.o_proj", plan.cut.o_proj, heads, noun="heads")
    return LayerWeights(
        input_norm=plan.dense(f"{at}.input_layernorm", hidden),
        q_a=plan.dense(f"{attention}.q_a_proj", q_lora, hidden),
        q_a_norm=plan.dense(f"{attention}.q_a_layernorm", q_lora),
        q_b=plan.dense(
            f"{attention}.q_b_proj", heads * q_rows, q_lora, rows=(first * q_rows, last * q_rows)
        ),
        kv_a=plan.dense(f"{attention}.kv_a_proj_with_mqa", latent + rope, hidden),
        kv_a_norm=plan.dense(f"{attention}.kv_a_layernorm", latent),
        kv_b=plan.dense(
            f"{attention}.kv_b_proj",
            heads * kv_rows,
            latent,
            rows=(first * kv_rows, last * kv_rows),
        ),
        o=plan.dense(
            f"{attention}.o_proj", hidden, heads * value, columns=(first * value, last * value)
        ),
        post_norm=plan.dense(f"{at}.post_attention_layernorm", hidden),
        mlp=_plan_mlp(plan, model, i),
    )


def _plan_mlp(plan: _Planner, model: config.Model, i: int) -> DenseMlp | MoeMlp:
    at, layer, hidden = f"model.layers.{i}.mlp", model.layers[i], model.hidden_size
    if layer.kind == "dense":
        return DenseMlp(*plan.mlp(at, None, hidden, model.intermediate_size, layer.quantization))
    experts, width = model.n_routed_experts, model.moe_intermediate_size
    routed = plan.mlp(f"{at}.experts", experts, hidden, width, layer.experts)
    shared = (None, None, None)
    if model.n_shared_experts:
        name, width = f"{at}.shared_experts", model.n_shared_experts * width
        shared = plan.mlp(name, None, hidden, width, layer.shared_experts)
    return MoeMlp(
        plan.dense(f"{at}.gate", experts, hidden),
        # The published files hold F32, whose last bits choose experts; BF16 is seen in the wild.
        plan.array(f"{at}.gate.e_score_correction_bias", FLOATS[::-1], (experts,), upcast=True),
        *routed,
        *shared,
    )


def plan_drafter(
    checkpoint: Checkpoint,
    drafter: config.Drafter,
    model: config.Model,
    *,
    tp: config.TensorParallel = ONE_RANK,
    rank: int = 0,
) -> Plan:
    """As `plan_target`, for the DFlash drafter of the target `model`.

    Ranks beyond the number of key/value heads share them: each has the heads its queries read.
    """
    plan = _Planner(checkpoint, tp, rank)
    hidden, taps = drafter.hidden_size, len(drafter.target_layer_ids)
    rows = plan.share("fc", tp.cut.fc, hidden, noun="output rows")
    weights = DrafterWeights(
        fc=plan.dense("fc", hidden, taps * model.hidden_size, rows=rows),
        hidden_norm=plan.dense("hidden_norm", hidden),
        norm=plan.dense("norm", hidden),
        layers=tuple(
            _plan_drafter_layer(plan, drafter, i) for i in range(drafter.num_hidden_layers)
        ),
    )
    return plan.finish(weights)


def _plan_drafter_layer(plan: _Planner, drafter: config.Drafter, i: int) -> DrafterLayer:
    at, attention, hidden = f"layers.{i}", f"layers.{i}.self_attn", drafter.hidden_size
    heads, keys, width = drafter.num_attention_heads, drafter.num_key_value_heads, drafter.head_dim
    first, last = plan.share(f"{attention}.o_proj", plan.cut.o_proj, heads, noun="heads")
    if (last - first) * keys % heads and heads % ((last - first) * keys):
        raise UserError(
            f"{attention}.k_proj: {keys} heads cannot be shared out to {plan.tp.size} ranks;"
            " choose a tp.size that divides them or is a multiple of them"
        )
    q = (first * width, last * width)
    kv = (first * keys // heads * width, -(-last * keys // heads) * width)  # what those heads read
    gate, up, down = plan.mlp(f"{at}.mlp", None, hidden, drafter.intermediate_size, "none")
    return DrafterLayer(
        input_norm=plan.dense(f"{at}.input_layernorm", hidden),
        q=plan.dense(f"{attention}.q_proj", heads * width, hidden, rows=q),
        k=plan.dense(f"{attention}.k_proj", keys * width, hidden, rows=kv),
        v=plan.dense(f"{attention}.v_proj", keys * width, hidden, rows=kv),
        o=plan.dense(f"{attention}.o_proj", hidden, heads * width, columns=q),
        q_norm=plan.dense(f"{attention}.q_norm", width),
        k_norm=plan.dense(f"{attention}.k_norm", width),
        post_norm=plan.dense(f"{at}.post_attention_layernorm", hidden),
        gate=gate,
        up=up,
        down=down,
    )


class _Planner:
    """Looks tensors up for one rank; `finish` reports every fault together."""

    def __init__(
        self, checkpoint: Checkpoint, tp: config.TensorParallel, rank: int, group: int = 0
    ) -> None:
        if not 0 <= rank < tp.size:
            raise UserError(f"rank {rank}: expected 0..{tp.size - 1}, for tp.size is {tp.size}")
        if checkpoint.shard not in (None, (rank, tp.size)):
            own, of = checkpoint.shard
            raise UserError(
                f"{checkpoint.directory}: holds the parts of rank {own} of {of}, but this is rank"
                f" {rank} of {tp.size}; use tp.size {of}, or the whole checkpoint"
            )
        self.checkpoint, self.tp, self.cut, self.rank = checkpoint, tp, tp.cut, rank
        self.group = group  # columns of an INT4 scale
        self.asked: set[str] = set()
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.shapes: list[tuple[TensorInfo, Shape]] = []  # weight_shape tensors, what they must say

    def share(
        self, name: str, cut: str, units: int, unit: int = 1, noun: str = "input columns"
    ) -> Range:
        """This rank's equal part of `units` units of `unit` columns or rows."""
        if cut == "replicate":
            return 0, units * unit
        if (leaves := config.leaves(units)) % self.tp.size:
            whole = f"{units * unit} {noun}"
            if unit > 1:
                whole += f" are {units} groups of {unit} and"
            works = ", ".join(str(size) for size in (1, 2, 4, 8) if leaves % size == 0)
            raise UserError(
                f"{name}: {whole} cannot be cut in {self.tp.size}; tp.size may be {works}"
            )
        part = units // self.tp.size * unit
        return self.rank * part, (self.rank + 1) * part

    def find(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> TensorInfo | None:
        if self.checkpoint.generated:  # of the published type, which stands last
            return TensorInfo(name, "", dtypes[-1], shape, 0, 0)
        self.asked.add(name)
        held = self.checkpoint.text_names
        tensor = held.get(name)
        if tensor is None:
            self.missing.append(name)
            if len(self.missing) > 2 * len(held) + 1000:  # absurd sizes must not fill the memory
                raise UserError(
                    f"{self.checkpoint.directory}: its config.json asks for far more than the"
                    f" {len(held)} tensors there, missing first: {_some(self.missing)}"
                )
        elif tensor.dtype not in dtypes or tensor.shape != shape:
            expected = f"{' or '.join(dtypes)} {list(shape)}"
            self.wrong.append(f"{name} is {tensor}, expected {expected}")
            return None
        return tensor

    def array(
        self,
        names: str | list[str],
        dtypes: tuple[str, ...],
        shape: tuple[int, ...],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
        height: int | None = None,
        upcast: bool = False,
    ) -> Slot:
        """A slot for rows and columns of one tensor of `shape`, or of a list of them as a stack.

        `height`: rows of the slot, where that is more than the tensor gives.
        """
        stacked = isinstance(names, list)
        names = names if stacked else [names]
        rows, columns = rows or (0, shape[0]), columns or (0, math.prod(shape[1:]))
        part = (height or rows[1] - rows[0], columns[1] - columns[0])[: len(shape)]
        if self.checkpoint.shard:  # the file has no more than the part
            shape = (rows[1] - rows[0], columns[1] - columns[0])[: len(shape)]
            rows, columns = (0, shape[0]), (0, math.prod(shape[1:]))
        found = [tensor for name in names if (tensor := self.find(name, dtypes, shape))]
        kinds = sorted({tensor.dtype for tensor in found}) or [dtypes[0]]
        if len(kinds) > 1:
            one = next(tensor for tensor in found if tensor.dtype != found[0].dtype)
            self.wrong.append(
                f"{one.name} is {one.dtype}, expected {found[0].dtype} as its fellows"
            )
        pieces = (
            Piece(tensor, rows, columns, e if stacked else None) for e, tensor in enumerate(found)
        )
        whole = (len(names), *part) if stacked else part
        return Slot(names[0], DTYPES[kinds[0]], whole, tuple(pieces), upcast)

    def dense(
        self, module: str, *shape: int, rows: Range | None = None, columns: Range | None = None
    ) -> Slot:
        return self.array(f"{module}.weight", FLOATS, shape, rows=rows, columns=columns)

    def vocabulary(self, module: str, vocabulary: int, hidden: int, cut: str) -> Slot:
        """Rows padded to 8 equal shards (R2), the same ones at every size."""
        rank, size = (0, 1) if cut == "replicate" else (self.rank, self.tp.size)
        height = -(-vocabulary // 8) * 8 // size
        rows = min(rank * height, vocabulary), min((rank + 1) * height, vocabulary)
        return self.array(
            f"{module}.weight", FLOATS, (vocabulary, hidden), rows=rows, height=height
        )

    def mlp(
        self, module: str, experts: int | None, hidden: int, width: int, quantization: str
    ) -> tuple[Slot | Int4Slots, ...]:
        """gate, up and down of one MLP, or stacks of `experts` of them."""
        unit = self.group if quantization == "int4" else 1
        if width % unit or hidden % unit:
            raise UserError(
                f"{module}: widths {hidden} and {width} are not whole groups of {unit}; the INT4"
                " format needs that"
            )
        share = self.share(f"{module}.down_proj", self.cut.down_proj, width // unit, unit)
        matrix = self.int4 if quantization == "int4" else self.plain
        return (
            matrix(module, "gate_proj", experts, (width, hidden), rows=share),
            matrix(module, "up_proj", experts, (width, hidden), rows=share),
            matrix(module, "down_proj", experts, (hidden, width), columns=share),
        )

    def plain(
        self, module: str, projection: str, experts: int | None, shape: Shape, **cut: Range
    ) -> Slot:
        return self.array(_names(module, experts, f"{projection}.weight"), FLOATS, shape, **cut)

    def int4(
        self,
        module: str,
        projection: str,
        experts: int | None,
        shape: Shape,
        rows: Range | None = None,
        columns: Range | None = None,
    ) -> Int4Slots:
        """Words and scales are cut at the same whole groups, lest a scale meet others' codes."""
        out, inputs = shape
        first, last = columns or (0, inputs)
        if first % self.group or last % self.group:
            raise UserError(f"{module}.{projection}: columns {first}..{last} cut a group")

        def names(suffix: str) -> str | list[str]:
            return _names(module, experts, f"{projection}.{suffix}")

        said = names("weight_shape")
        for name in said if isinstance(said, list) else [said]:
            if tensor := self.find(name, ("I32", "I64"), (2,)):
                self.shapes.append((tensor, shape))

        def part(suffix: str, dtypes: tuple[str, ...], per: int) -> Slot:
            cut = (first // per, last // per)
            return self.array(names(suffix), dtypes, (out, inputs // per), rows=rows, columns=cut)

        return Int4Slots(
            part("weight_packed", ("I32",), 8), part("weight_scale", FLOATS, self.group)
        )

    def finish(self, weights: TargetWeights | DrafterWeights) -> Plan:
        unknown = [name for name in self.checkpoint.text_names if name not in self.asked]
        faults = {"missing": self.missing, "unknown": unknown, "wrong": self.wrong}
        listed = "; ".join(f"{len(n)} {kind}: {_some(n)}" for kind, n in faults.items() if n)
        if listed:
            raise UserError(
                f"{self.checkpoint.directory}: its tensors do not fit its config.json: {listed}"
            )
        if not self.checkpoint.generated:
            self._check_shapes()
        return Plan(
            self.checkpoint.directory,
            weights,
            tuple(self.shapes),
            self.group,
            self.checkpoint.shard is not None,
        )

    def _check_shapes(self) -> None:
        """What the weight_shape tensors say: (out, in) of the matrix before any cut."""
        by_file: dict[str, list[tuple[TensorInfo, Shape]]] = {}
        for tensor, shape in self.shapes:
            by_file.setdefault(tensor.file, []).append((tensor, shape))

        def check(name: str) -> None:
            with _opened(self.checkpoint.directory, name) as file:
                for tensor, shape in sorted(by_file[name], key=lambda item: item[0].begin):
                    data = file.read(tensor.begin, tensor.end - tensor.begin)
                    said = tuple(np.frombuffer(data, DTYPES[tensor.dtype]).tolist())
                    if said != shape:
                        raise UserError(
                            f"{file.path}: {tensor.name} says {said}, but the tensors and"
                            f" config.json make it {shape}; download the file again"
                        )

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(check, by_file))


def _names(module: str, experts: int | None, tensor: str) -> str | list[str]:
    """The tensor of one module, or that of each expert."""
    if experts is None:
        return f"{module}.{tensor}"
    return [f"{module}.{e}.{tensor}" for e in range(experts)]


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(_show(name) for name in names[:SHOWN]) + rest


# ---- the data ------------------------------------------------------------------------------------

# Takes a complete array and returns what stands for it in the weights (a GPU's copy, say).
Place = Callable[[Slot, np.ndarray], Any]


def load_target(
    plan: Plan, *, progress: bool = False, place: Place | None = None, share: Share | None = None
) -> TargetWeights:
    """Read what `plan_target` planned; `progress` shows a bar in bytes.

    place  is called here, in this thread, as soon as an array is complete, while others are read;
           the array's memory is then free again
    share  of the ranks on this host: what more than one of them needs is read once

    Needs Plan.bytes of memory (with `place` only that of the arrays that are not complete) and
    READERS * CHUNK bytes of staging; a Share has LANES * size * CHUNK. Raises UserError.
    """
    return _load(plan, progress, place, share)


def load_drafter(
    plan: Plan, *, progress: bool = False, place: Place | None = None, share: Share | None = None
) -> DrafterWeights:
    """Read what `plan_drafter` planned, like `load_target`."""
    return _load(plan, progress, place, share)


def stream_target(
    plan: Plan, *, progress: bool = False, share: Share | None = None
) -> TargetWeights:
    """`load_target` with `layers` an iterator: each layer once, in order. The next one is read
    while a layer is worked on; no more than these two are in memory. The iterator raises too.
    """

    def loaded() -> Iterator[Any]:
        trees = [replace(plan.weights, layers=()), *plan.weights.layers]
        groups = [_slots(tree) for tree in trees]
        arrays: dict[str, np.ndarray] = {}
        with _Reading(plan, groups, progress, share) as reading:
            complete = reading.complete()
            for g, tree in enumerate(trees):
                reading.allowed = g + 1
                while not all(slot.name in arrays for slot in groups[g]):
                    slot, array = next(complete)
                    arrays[slot.name] = array
                    del array
                yield _replace(tree, lambda slot: arrays.pop(slot.name))

    trees = loaded()
    return replace(next(trees), layers=trees)


def _load(plan: Plan, progress: bool, place: Place | None, share: Share | None) -> Any:
    arrays = {}
    with _Reading(plan, [plan.slots], progress, share) as reading:
        for slot, array in reading.complete():
            arrays[slot.name] = array if place is None else place(slot, array)
            del array  # or it would outlive `place` until the next one is complete
    return _replace(plan.weights, lambda slot: arrays[slot.name])


class _Reading:
    """Fills the slots of a plan with threads, while the thread that opened it takes what is ready.

    groups   of slots, which are begun in order
    allowed  the last group that may be begun
    """

    def __init__(self, plan: Plan, groups: list[list[Slot]], progress: bool, share: Share | None):
        self.directory, self.progress, self.share = plan.directory, progress, share
        self.slots = [slot for group in groups for slot in group]
        self.ends = np.cumsum([len(group) for group in groups]).tolist()  # of each group's slots
        sharing = share is not None and share.size > 1 and not plan.own_files
        self.private, self.common = _extents(groups, sharing)
        self.awaited = [0] * len(self.slots)  # rows of each slot that are still to come
        for extent in self.private + self.common:
            for part in extent.parts:
                self.awaited[part.slot] += part.rows
        self.arrays: list[Any] = [None] * len(self.slots)
        self.uncached = sum(slot.bytes for slot in self.slots) >= DIRECT_FROM
        self.staging, self.staged = threading.local(), max([CHUNK, *map(len, self.private)])
        self.ready: SimpleQueue = SimpleQueue()  # (bytes read, slots completed), or an error
        self.lock = threading.Condition()  # of `awaited`, `begun` and `ended`
        self.allowed, self.begun, self.ended = 0, -1, False

    def __enter__(self) -> _Reading:
        extents = self.private + self.common
        total = sum(extent.length for extent in extents)
        with ExitStack() as stack:
            bar = tqdm(
                total=total, unit="B", unit_scale=True, desc="weights", disable=not self.progress
            )
            self.bar = stack.enter_context(bar)
            self.files = {
                name: stack.enter_context(_opened(self.directory, name, self.uncached))
                for name in sorted({extent.file for extent in extents})
            }
            if self.common:
                longest = max(map(len, self.common))
                stack.enter_context(self.share.attached(_digest(self.common), longest))
            self.pool = ThreadPoolExecutor(READERS + (LANES if self.common else 0))
            # An error or Ctrl-C ends it at once.
            stack.callback(self.pool.shutdown, cancel_futures=True)
            stack.callback(self.end)
            if self.common:
                stack.enter_context(self.share.telling())
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def complete(self) -> Iterator[tuple[Slot, np.ndarray]]:
        """Every slot with its array, once, as soon as it is complete; nobody else holds it then."""
        for lane in range(LANES if self.common else 0):
            self.pool.submit(self.report, self.read_common, lane)
        batches = _batches(self.private)
        batch, left = next(batches, None), len(self.slots)
        while left:
            while self.begun < min(self.allowed, len(self.ends) - 1):
                for i in self.begin():  # nothing is read for these: a rank beyond the vocabulary
                    left -= 1
                    yield self.take(i)
            while batch is not None and batch[0].group <= self.begun:
                self.pool.submit(self.report, self.read, batch)
                batch = next(batches, None)
            if left:
                found = self.ready.get()
                if isinstance(found, BaseException):
                    raise found
                self.bar.update(found[0])
                for i in found[1]:
                    left -= 1
                    yield self.take(i)

    def begin(self) -> list[int]:
        """Make the arrays of the next group; returns slots that need no reading."""
        first = self.ends[self.begun] if self.begun >= 0 else 0
        new = range(first, self.ends[self.begun + 1])
        for i in new:
            # Zeros, as padding must be; a large array of them costs nothing until it is written.
            self.arrays[i] = np.zeros(self.slots[i].shape, self.slots[i].dtype)
        empty = [i for i in new if not self.awaited[i]]
        with self.lock:
            self.begun += 1
            self.lock.notify_all()
        return empty

    def take(self, i: int) -> tuple[Slot, np.ndarray]:
        array, self.arrays[i] = self.arrays[i], None
        return self.slots[i], array.astype(np.float32) if self.slots[i].upcast else array

    def end(self) -> None:
        with self.lock:
            self.ended = True
            self.lock.notify_all()

    # -- in the threads

    def report(self, work: Callable[[Any], None], argument: Any) -> None:
        try:
            work(argument)
        except BaseException as error:  # raised again by the thread that waits
            self.ready.put(error)

    def read(self, batch: list[_Extent]) -> None:
        if not hasattr(self.staging, "buffer"):
            self.staging.buffer = _staging_buffer(self.staged + 2 * PAGE)
        buffer = self.staging.buffer
        for extent in batch:
            extent.read(self.files, buffer, self.uncached)
            self.fill(extent, buffer)

    def read_common(self, lane: int) -> None:
        for extent, buffer in self.share.rounds(lane, self.common, self.files, self.uncached):
            with self.lock:
                self.lock.wait_for(lambda extent=extent: self.ended or self.begun >= extent.group)
                if self.ended:
                    return
            self.fill(extent, buffer)

    def fill(self, extent: _Extent, buffer: memoryview) -> None:
        extent.scatter(buffer, self.slots, self.arrays)
        complete = []
        with self.lock:
            for part in extent.parts:
                self.awaited[part.slot] -= part.rows
                if not self.awaited[part.slot]:
                    complete.append(part.slot)
        self.ready.put((extent.length, complete))


def _staging_buffer(length: int) -> memoryview:
    """Whole pages, of the huge kind where there are any: a read that bypasses the page cache has
    few large pieces then, and is twice as fast as into scattered small pages."""
    memory = mmap.mmap(-1, length + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return memoryview(memory)[-address % HUGE_PAGE :][:length]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of one tensor in a file, and where they belong.

    begin    bytes from the start of the file; rows of row_bytes, of which `columns` are wanted
    slot     number of the slot;  index: which matrix of a stack;  first: row of the destination
    """

    begin: int
    rows: int
    row_bytes: int
    columns: Range
    slot: int
    index: int | None
    first: int

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class _Extent:
    """One read: a range of a file, at most about CHUNK long, and the parts that lie in it."""

    group: int
    file: str
    parts: list[_Part]  # ascending

    @property
    def begin(self) -> int:
        return self.parts[0].begin - self.parts[0].begin % PAGE

    @property
    def length(self) -> int:
        """Bytes that are wanted, whole rows of them."""
        return sum(part.rows * part.row_bytes for part in self.parts)

    def __len__(self) -> int:
        return self.parts[-1].end - self.begin

    def read(self, files: dict[str, _File], buffer: memoryview, uncached: bool) -> None:
        """Whole pages around the parts, to the start of `buffer`."""
        file, length = files[self.file], len(self)
        file.read_into(buffer[: length + -length % PAGE], self.begin, length)
        if uncached:
            file.forget(self.begin, length)

    def scatter(self, buffer: memoryview, slots: list[Slot], arrays: list[np.ndarray]) -> None:
        """The wanted columns of all parts, to their arrays."""
        data = np.frombuffer(buffer, np.uint8)
        for part in self.parts:
            array = arrays[part.slot]
            matrix = array if part.index is None else array[part.index]
            rows = matrix[part.first : part.first + part.rows].view(np.uint8)
            at = part.begin - self.begin
            read = data[at : at + part.rows * part.row_bytes].reshape(part.rows, part.row_bytes)
            rows.reshape(part.rows, -1)[:] = read[:, slice(*part.columns)]


def _extents(groups: list[list[Slot]], sharing: bool) -> tuple[list[_Extent], list[_Extent]]:
    """The reads of a rank, by group, file and offset: its own, and those that its host's ranks
    share.

    Shared are rows of which this rank wants some columns, or that every rank wants.
    """
    private: list[tuple[int, str, _Part]] = []
    common: list[tuple[int, str, _Part]] = []
    slots = [(group, slot) for group, some in enumerate(groups) for slot in some]
    for number, (group, slot) in enumerate(slots):
        size = slot.dtype.itemsize
        for piece in slot.pieces:
            tensor, (first, last) = piece.tensor, piece.rows
            if first == last:
                continue
            row_bytes = (tensor.end - tensor.begin) // tensor.shape[0]
            columns = piece.columns[0] * size, piece.columns[1] * size
            step = max(1, CHUNK // row_bytes)
            whole = last - first == tensor.shape[0]
            to = common if sharing and whole else private
            for row in range(first, last, step):
                rows, begin = min(step, last - row), tensor.begin + row * row_bytes
                part = _Part(begin, rows, row_bytes, columns, number, piece.index, row - first)
                to.append((group, tensor.file, part))
    return _merged(private), _merged(common)


def _merged(parts: list[tuple[int, str, _Part]]) -> list[_Extent]:
    """Neighbours in one read, as far as it stays within CHUNK."""
    extents: list[_Extent] = []
    for group, file, part in sorted(parts, key=lambda item: (*item[:2], item[2].begin)):
        last = extents[-1] if extents else None
        if (
            last is not None
            and (last.group, last.file) == (group, file)
            and part.begin - last.parts[-1].end <= GAP
            and part.end - last.begin <= CHUNK
        ):
            last.parts.append(part)
        else:
            extents.append(_Extent(group, file, [part]))
    return extents


def _batches(extents: list[_Extent]) -> Iterator[list[_Extent]]:
    """Neighbouring reads of a group, about CHUNK bytes together: one task each would be 100,000."""
    batch: list[_Extent] = []
    size = 0
    for extent in extents:
        if batch and (size >= CHUNK or extent.group != batch[0].group):
            yield batch
            batch, size = [], 0
        batch.append(extent)
        size += len(extent)
    if batch:
        yield batch


def _digest(extents: list[_Extent]) -> int:
    """A checksum of what is read where: equal on all ranks that load the same checkpoint."""
    text = "".join(f"{e.file} {e.begin} {len(e)};" for e in extents)
    return zlib.crc32(text.encode()) + 1  # 0 stands for "not here yet"


def read_piece(plan: Plan, slot: Slot, piece: Piece, rows: int) -> np.ndarray:
    """The first rows (at most so many) of a rank's part of one tensor."""
    first, last = piece.rows
    one = replace(slot, pieces=(replace(piece, rows=(first, min(last, first + rows)), index=None),))
    one = replace(one, shape=(min(last - first, rows), *slot.shape[-1:])[: len(piece.tensor.shape)])
    return _load(replace(plan, weights=one), False, None, None)


@dataclass(frozen=True)
class Rate:
    bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e9


def read_rate(checkpoint: Checkpoint, most: int) -> Rate:
    """How fast the shards can be read past the page cache, by as many threads and in as large
    pieces as a load has: up to `most` bytes, from all of the shards."""
    names = sorted({tensor.file for tensor in checkpoint.tensors.values()})
    with ExitStack() as stack:
        files = [stack.enter_context(_opened(checkpoint.directory, n, True)) for n in names]
        chunks = [(f, at) for f in files for at in range(0, f.size - CHUNK + 1, CHUNK)]
        chunks = chunks[:: max(1, len(chunks) * CHUNK // most)] or [(files[0], 0)]
        staging = threading.local()

        def read(chunk: tuple[_File, int]) -> int:
            if not hasattr(staging, "buffer"):
                staging.buffer = _staging_buffer(CHUNK)
            file, at = chunk
            length = min(CHUNK, file.size - at)
            file.read_into(staging.buffer, at, length)
            file.forget(at, length)
            return length

        began = time.perf_counter()
        with ThreadPoolExecutor(READERS) as pool:
            done = sum(pool.map(read, chunks))
        return Rate(done, time.perf_counter() - began)


# ---- what the ranks of a host share --------------------------------------------------------------


class Share:
    """Reads that several ranks of one host need, done once: each rank reads every size-th extent
    into memory that all of them see, and takes its own columns from every one.

    path  a file in memory (below /dev/shm), PREFIX-ID, whose name the ranks agreed on and that no
          other run uses; rank 0 makes it, and unlinks it as soon as all have opened it. One that a
          killed run left behind is unlinked by the next run that shares reads.
    rank, size  among the ranks of this host

    Every lane is a thread in each rank. In round k each rank reads one extent, says so (ready),
    takes its part of all ranks' extents once they are ready, and says so (done); nobody reads the
    next one over an extent that somebody has not done with. Counters are read and written by system
    calls, which order them after the data on every processor.
    """

    def __init__(self, path: Path | str, rank: int, size: int):
        self.path, self.rank, self.size = str(path), rank, size

    @contextmanager
    def attached(self, digest: int, chunk: int) -> Iterator[None]:
        """Memory for extents of up to `chunk` bytes. All ranks must come in with one digest."""
        self.chunk = chunk + -chunk % PAGE + PAGE
        counters = (1 + 2 * LANES) * self.size * 8
        self.start = counters + -counters % PAGE
        length = self.start + LANES * self.size * self.chunk
        self.fd = self._open(length)
        self.memory = mmap.mmap(self.fd, length)
        try:
            try:
                self._say(0, digest)
                seen = self._wait(0, 1)
            finally:
                if self.rank == 0:
                    os.unlink(self.path)
            if set(seen) != {digest}:
                raise UserError(
                    f"rank {self.rank}: the ranks of this host plan different reads; do all load"
                    " the same checkpoint with the same config?"
                )
            yield
        finally:
            os.close(self.fd)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Should anything fail in here, then the others' waiting ends, in all lanes."""
        try:
            yield
        except BaseException:
            for row in range(1, 1 + 2 * LANES):
                self._say(row, -1)
            raise

    def _open(self, length: int) -> int:
        if self.rank == 0:
            self._sweep()
            made = f"{self.path}.new"
            fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)  # as long as this process lives
            os.ftruncate(fd, length)
            os.rename(made, self.path)  # nobody sees it before it has its size
            return fd
        limit = time.monotonic() + STALL
        while time.monotonic() < limit:
            try:
                return os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                time.sleep(0.005)
        raise UserError(f"rank {self.rank}: rank 0 of this host did not start to load")

    def _sweep(self) -> None:
        """Unlink files of runs whose rank 0 no longer lives: nobody holds their lock."""
        path = Path(self.path)
        for other in path.parent.glob(path.name.partition("-")[0] + "-*[!w]"):  # not *.new
            with suppress(OSError):  # locked, or another user's, or gone
                fd = os.open(other, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(other)
                finally:
                    os.close(fd)

    def rounds(
        self, lane: int, extents: list[_Extent], files: dict[str, _File], uncached: bool
    ) -> Iterator[tuple[_Extent, memoryview]]:
        """This lane's extents, each with its bytes, in order; valid until the next is asked for."""
        ready, done = 1 + lane, 1 + LANES + lane
        starts = range(lane * self.size, len(extents), LANES * self.size)
        for k, begin in enumerate(starts):
            group = extents[begin : begin + self.size]
            self._wait(done, k)
            if self.rank < len(group):
                group[self.rank].read(files, self._buffer(lane, self.rank), uncached)
            self._say(ready, k + 1)
            self._wait(ready, k + 1)
            for rank, extent in enumerate(group):
                yield extent, self._buffer(lane, rank)
            self._say(done, k + 1)

    def _buffer(self, lane: int, rank: int) -> memoryview:
        begin = self.start + (lane * self.size + rank) * self.chunk
        return memoryview(self.memory)[begin : begin + self.chunk]

    def _say(self, row: int, value: int) -> None:
        data = value.to_bytes(8, "little", signed=True)
        os.pwrite(self.fd, data, (row * self.size + self.rank) * 8)

    def _wait(self, row: int, least: int) -> list[int]:
        """Until every rank's counter is at least that; returns them."""
        limit = time.monotonic() + STALL
        while True:
            raw = os.pread(self.fd, self.size * 8, row * self.size * 8)
            values = np.frombuffer(raw, "<i8").tolist()
            if min(values) >= least:
                return values
            if min(values) < 0 or time.monotonic() > limit:
                one = values.index(min(values))
                raise UserError(f"rank {one} of this host failed while the weights were loaded")
            time.sleep(0.0005)


# ---- weights from a seed -------------------------------------------------------------------------


def tensor_seed(seed: int, name: str) -> int:
    """The 64-bit seed of one tensor, by its name without the prefix."""
    return (seed * 0xD1342543DE82EF95 ^ zlib.crc32(name.removeprefix(PREFIX).encode())) % (1 << 64)


def spread(name: str, shape: tuple[int, ...], group: int = 32) -> tuple[float, float]:
    """Centre and half-width of a generated tensor's values.

    Every product keeps about the size of its input, so that logits stay finite through all layers,
    no expert is preferred, and no direction: whatever the mean of an output is, layers add it up,
    until every token has the same successor. Codes of -8 .. 7 have a mean of -1/2, so scales stand
    on both sides of zero.
    """
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.01
    if len(shape) == 1:  # a norm
        return 1.0, 0.1
    if name.endswith("weight_scale"):
        return 0.0, math.sqrt(3 / (21.5 * shape[1] * group))  # the mean square of codes is 21.5
    if name.endswith("embed_tokens.weight"):
        return 0.0, math.sqrt(3)
    return 0.0, math.sqrt(3 / shape[1])


def generate_weights(plan: Plan, ops: Any, seed: int = 0, *, progress: bool = False) -> Any:
    """Fill a plan without files, on the device of `ops`: the bits that tools/make_checkpoint.py
    writes with this seed, whatever the rank. Norms and biases are made on the host.

    A target's `layers` are an iterator that makes each layer when it is asked for.
    """
    bar = tqdm(total=plan.bytes, unit="B", unit_scale=True, desc="weights", disable=not progress)

    def filled(slot: Slot) -> Any:
        host = len(slot.shape) == 1
        make, fill = (np.zeros, reference.generate) if host else (ops.blank, ops.generate)
        array = make(slot.shape, slot.dtype)
        for piece in slot.pieces:
            tensor, (first, last) = piece.tensor, piece.rows
            if first == last:
                continue
            matrix = array if piece.index is None else array[piece.index]
            mean, scale = spread(tensor.name, tensor.shape, plan.group)
            width = math.prod(tensor.shape[1:])
            at = (first, piece.columns[0])
            part = matrix[: last - first]
            fill(part, tensor_seed(seed, tensor.name), mean, scale, at, width)
        bar.update(slot.bytes)
        return array

    weights = plan.weights
    if isinstance(weights, DrafterWeights):
        with bar:
            return _replace(weights, filled)

    def made() -> Iterator[Any]:
        with bar:
            for tree in (replace(weights, layers=()), *weights.layers):
                yield _replace(tree, filled)

    trees = made()
    return replace(next(trees), layers=trees)


def _slots(node: Any) -> list[Slot]:
    """All slots of a tree of weights, in order."""
    found: list[Slot] = []
    _replace(node, found.append)
    return found


def _replace(node: Any, fill: Callable[[Slot], Any]) -> Any:
    """The same tree of dataclasses and tuples with `fill(slot)` in place of every slot."""
    if node is None:
        return None
    if isinstance(node, Slot):
        return fill(node)
    if isinstance(node, Int4Slots):
        return Int4Weight(packed=fill(node.packed), scales=fill(node.scales))
    if isinstance(node, tuple):
        return tuple(_replace(item, fill) for item in node)
    return type(node)(
        **{field.name: _replace(getattr(node, field.name), fill) for field in fields(node)}
    )
