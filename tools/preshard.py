"""Cut a checkpoint for the ranks of tensor parallelism, once, so that later starts read less.

    python tools/preshard.py CHECKPOINT OUT --size 8 [--drafter-of TARGET]

OUT/rank-R-of-S is a checkpoint in the published layout whose tensors are rank R's parts; its
config.json says so. The engine is then given OUT as the path, with the same tp.size. A drafter is
cut alike: `--drafter-of` names its target, whose sizes it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import config  # noqa: E402
import loader  # noqa: E402
from config import UserError  # noqa: E402

SHARD_BYTES = 8 << 30
TYPES = {dtype: name for name, dtype in loader.DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor to write."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def entries_of(slot: loader.Slot) -> list[Entry]:
    """The tensors that a slot is made of, cut to this rank's part."""
    dtype = np.dtype(np.float32) if slot.upcast else slot.dtype
    found = []
    for piece in slot.pieces:
        first, last = piece.rows
        shape = (last - first, piece.columns[1] - piece.columns[0])[: len(piece.tensor.shape)]
        found.append(Entry(piece.tensor.name, dtype, shape))
    return found


def write_rank(plan: loader.Plan, directory: Path, progress: bool) -> None:
    """All tensors of a plan: their places first, then the data as the loader completes it."""
    directory.mkdir(parents=True)
    entries = [entry for slot in plan.slots for entry in entries_of(slot)]
    says = {
        tensor.name: np.array(shape, loader.DTYPES[tensor.dtype]) for tensor, shape in plan.shapes
    }
    entries += [Entry(name, value.dtype, value.shape) for name, value in says.items()]
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if size and size + entry.bytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.bytes
    files, places, weight_map = [], {}, {}
    try:
        for n, group in enumerate(groups, start=1):
            name = f"model-{n:05}-of-{len(groups):06}.safetensors"
            fd = os.open(
                directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
            )
            files.append(fd)
            weight_map |= {entry.name: name for entry in group}
            places |= {name: (fd, at) for name, at in write_header(fd, group).items()}
        for name, value in says.items():
            write(*places[name], value)

        def place(slot: loader.Slot, array: np.ndarray) -> None:
            for piece in slot.pieces:
                matrix = array if piece.index is None else array[piece.index]
                write(*places[piece.tensor.name], matrix[: piece.rows[1] - piece.rows[0]])

        loader.load_target(plan, progress=progress, place=place)
    finally:
        for fd in files:
            os.close(fd)
    index = {"metadata": {"total_size": sum(e.bytes for e in entries)}, "weight_map": weight_map}
    (directory / loader.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_header(fd: int, group: list[Entry]) -> dict[str, int]:
    """Where in the file each tensor goes, by name."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for entry in group:
        header[entry.name] = {
            "dtype": TYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [at, at + entry.bytes],
        }
        at += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.pwrite(fd, len(text).to_bytes(8, "little") + text, 0)
    start = 8 + len(text)
    os.ftruncate(fd, start + at)
    return {entry.name: start + header[entry.name]["data_offsets"][0] for entry in group}


def write(fd: int, offset: int, array: np.ndarray) -> None:
    data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    while len(data):
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def preshard(
    source: Path, out: Path, tp: config.TensorParallel, target: Path | None, progress: bool
) -> None:
    """Write every rank's directory. `target`: the source is a drafter, of this target."""
    checkpoint = loader.open_checkpoint(source)
    where = str(source / "config.json")
    if target is None:
        model = config.parse_model(checkpoint.config_json, source=where)
    else:
        own = config.parse_drafter(checkpoint.config_json, source=where)
        raw = json.loads((target / "config.json").read_text())
        model = config.parse_model(raw, source=str(target / "config.json"))
    plans = [
        loader.plan_target(checkpoint, model, tp=tp, rank=rank)
        if target is None
        else loader.plan_drafter(checkpoint, own, model, tp=tp, rank=rank)
        for rank in range(tp.size)
    ]
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: is not empty; name a new directory")
    check_room(
        out, sum(entry.bytes for p in plans for slot in p.slots for entry in entries_of(slot))
    )
    for rank, plan in enumerate(plans):
        directory = out / loader.rank_name(rank, tp.size)
        write_rank(plan, directory, progress)
        for path in source.iterdir():  # tokenizer, chat template, generation config
            weights = path.suffix == ".safetensors" or path.name in (loader.INDEX, "config.json")
            if path.is_file() and not weights and path.suffix != ".yaml":  # these are of the whole
                shutil.copyfile(path, directory / path.name)
        # Last, so that a directory without it is one that was not finished.
        raw = {**checkpoint.config_json, loader.SHARD_KEY: {"rank": rank, "size": tp.size}}
        (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def check_room(out: Path, needed: int) -> None:
    """Raise UserError where so many bytes are not free for `out`."""
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            f"{out}: the parts take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free there; "
            "name a directory on a larger disk"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=8, choices=(1, 2, 4, 8), help="tp.size")
    parser.add_argument("--config", help="YAML file whose tp section says how tensors are cut")
    parser.add_argument("--drafter-of", type=Path, metavar="TARGET", help="the target's directory")
    a = parser.parse_args(argv)
    try:
        cut = config.load(a.config).tp.cut if a.config else config.Cut()
        tp = config.TensorParallel(size=a.size, cut=cut)
        preshard(a.checkpoint, a.out, tp, a.drafter_of, sys.stderr.isatty())
        size = sum(path.stat().st_size for path in a.out.rglob("*") if path.is_file())
        print(f"{a.out}: parts of {a.checkpoint} for tp.size {a.size}, {size / 2**30:.3g} GiB")
        key = "draft.path" if a.drafter_of else "model.path"
        print(f"now: a config with {key}: {a.out} and tp.size: {a.size}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
