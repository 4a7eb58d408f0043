"""Text, tokenizer and tokens for the miniature `models/nano/`.

Collects the Python standard library and a dozen permissively licensed packages, holds some standard
modules out, trains a byte-level BPE with Kimi's split pattern, and writes into --out:

    tiktoken.model           4096 lines `base64 rank`
    train_stdlib.u16.xz      token ids the target trains on, uint16, each document between BOS and
    train_packages.u16.xz    EOS
    seeds.u16.xz             text the target never sees; the drafter's training texts continue it
    heldout.u16.xz           the tokens of heldout.txt.xz
    heldout_prompts.npz      the prompts' ids, for the evaluation on the GPU
    token_bytes.npy          bytes of every id, for bits per byte
    sources.json             what was read: versions, licences, files, bytes, tokens

and into --tests: `heldout_prompts.jsonl` and `heldout.txt.xz` (documents separated by U+001E).

    python tools/nano_data.py --out build/nano --tests tests/data
"""

from __future__ import annotations

import argparse
import base64
import json
import lzma
import platform
import random
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

SEED = 20260
BASE_VOCAB = 4096  # ranks of tiktoken.model; the 256 special ids follow
BOS, EOS = 4096, 4097

# Kimi's split pattern; `&&[^\p{Han}]` is a set intersection ("without Han").
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# fmt: off
HELD_OUT_MODULES = (
    "argparse", "bisect", "calendar", "configparser", "csv", "difflib", "fractions", "gettext",
    "heapq", "ipaddress", "json", "mailbox", "queue", "shlex", "statistics", "tarfile", "textwrap",
    "zipfile",
)
# fmt: on


@dataclass(frozen=True)
class Package:
    """One distribution: what to fetch and at most how much text to take from it."""

    name: str
    version: str
    licence: str
    sdist: bool = False  # the source archive holds tests and documents that the wheel lacks
    cap_mb: float = 24.0


PACKAGES = (
    Package("django", "5.2.19", "BSD-3-Clause", sdist=True),
    Package("flax", "0.12.8", "Apache-2.0", sdist=True),
    Package("jax", "0.10.2", "Apache-2.0"),
    Package("matplotlib", "3.11.2", "Matplotlib (PSF-based)"),
    Package("networkx", "3.6.1", "BSD-3-Clause", sdist=True),
    Package("numpy", "2.4.6", "BSD-3-Clause"),
    Package("pandas", "3.1.1", "BSD-3-Clause"),
    Package("scikit-learn", "1.9.1", "BSD-3-Clause"),
    Package("scipy", "1.17.1", "BSD-3-Clause"),
    Package("statsmodels", "0.15.0", "BSD-3-Clause"),
    Package("sympy", "1.14.0", "BSD-3-Clause"),
    Package("torch", "2.13.0", "BSD-3-Clause", cap_mb=30.0),
    Package("transformers", "5.24.0", "Apache-2.0", cap_mb=30.0),
)


@dataclass(frozen=True)
class Document:
    source: str  # "stdlib" or a package's name
    path: str
    text: str


# ---- reading ---------------------------------------------------------------------------------


def download(package: Package, folder: Path) -> Path:
    """The package's archive in `folder`, fetched with pip unless it lies there already."""
    stem = package.name.replace("-", "_")
    suffix = ".tar.gz" if package.sdist else ".whl"
    pattern = f"{stem}-{package.version}*{suffix}"
    if not list(folder.glob(pattern)):
        kind = "--no-binary" if package.sdist else "--only-binary"
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind, ":all:"]
            + ["--dest", str(folder), f"{package.name}=={package.version}"],
            check=True,
        )
    return next(folder.glob(pattern))


def archive_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of every file in a wheel or a source archive, the archive's root left out."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                yield name, wheel.read(name)
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist:
                if member.isfile():
                    handle = sdist.extractfile(member)
                    assert handle is not None
                    yield member.name.partition("/")[2], handle.read()


def stdlib_members() -> Iterator[tuple[str, bytes]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(("site-packages/", "config-")):
            yield name, path.read_bytes()


def machine_made(text: str) -> bool:
    """Tables and generated data: very long lines, or a large share of digits."""
    if max(map(len, text.split("\n"))) > 1000:
        return True
    solid = sum(not c.isspace() for c in text)
    return sum(c.isdigit() for c in text) > 0.15 * max(solid, 1)


VENDORED = {"_vendor", "vendor", "vendored", "third_party", "extern", "externals", "locale"}


def documents(source: str, members: Iterable[tuple[str, bytes]]) -> list[Document]:
    """The readable, hand-written texts among `members`, without vendored code and tables."""
    kept = []
    for name, raw in members:
        path = PurePosixPath(name)
        if path.suffix not in (".py", ".md", ".rst", ".txt") or VENDORED & set(path.parts):
            continue
        if ".dist-info" in name or ".egg-info" in name or not 200 <= len(raw) <= 400_000:
            continue
        try:
            text = raw.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if not machine_made(text):
            kept.append(Document(source, name, text))
    return kept


def cap(docs: list[Document], megabytes: float, rng: random.Random) -> list[Document]:
    """A random subset of at most `megabytes` of text."""
    docs = docs[:]
    rng.shuffle(docs)
    total, kept = 0, []
    for doc in docs:
        if total + len(doc.text) <= megabytes * 1e6:
            kept.append(doc)
            total += len(doc.text)
    return kept


# ---- splitting -------------------------------------------------------------------------------


def is_held_out(path: str) -> bool:
    """Whether a standard-library file belongs to a held-out module or to its tests."""
    parts = PurePosixPath(path).with_suffix("").parts
    names = {parts[0].lstrip("_")}
    if parts[0] == "test":
        names |= set(parts[1:2])
    return any(m in names or f"test_{m}" in names for m in HELD_OUT_MODULES)


def line_runs(text: str) -> set[int]:
    """Hashes of every three consecutive non-blank lines that hold at least 40 characters."""
    lines = [s for s in (line.strip() for line in text.split("\n")) if s]
    runs = ("\n".join(lines[i : i + 3]) for i in range(len(lines) - 2))
    return {hash(run) for run in runs if len(run) >= 40}


def drop_near_duplicates(docs: list[Document], held: list[Document]) -> list[Document]:
    """`docs` without exact repeats and without files that share three line runs with `held`."""
    held_runs = set().union(*(line_runs(d.text) for d in held))
    seen: set[str] = set()
    kept = []
    for doc in tqdm(docs, desc="near-duplicates", unit="file", mininterval=2):
        if doc.text not in seen and len(line_runs(doc.text) & held_runs) < 3:
            kept.append(doc)
        seen.add(doc.text)
    return kept


# ---- tokenizer -------------------------------------------------------------------------------


def byte_alphabet() -> dict[str, int]:
    """The byte behind each character of the byte-level alphabet (GPT-2's mapping)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in visible}
    hidden = [b for b in range(256) if b not in visible]
    return table | {chr(256 + i): b for i, b in enumerate(hidden)}


def train_ranks(texts: list[str]) -> dict[bytes, int]:
    """A byte-level BPE of BASE_VOCAB tokens: token bytes -> rank."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_VOCAB, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    byte_of = byte_alphabet()
    return {bytes(byte_of[c] for c in token): rank for token, rank in bpe.get_vocab().items()}


def write_ranks(ranks: dict[bytes, int], path: Path) -> None:
    lines = (
        base64.b64encode(token) + b" " + str(rank).encode() + b"\n"
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
    path.write_bytes(b"".join(lines))


def read_encoding(path: Path) -> tiktoken.Encoding:
    """The encoding of a tiktoken.model, specials left out: text never becomes a special id."""
    pairs = (line.split() for line in path.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    return tiktoken.Encoding(
        "nano", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )


def encode(docs: list[Document], encoding: tiktoken.Encoding, what: str) -> np.ndarray:
    """uint16 ids of all documents, each between BOS and EOS."""
    parts = []
    for doc in tqdm(docs, desc=f"tokens: {what}", unit="file", mininterval=2):
        parts.append(np.array([BOS, *encoding.encode_ordinary(doc.text), EOS], dtype=np.uint16))
    return np.concatenate(parts)


# ---- held-out files --------------------------------------------------------------------------


def cut_prompts(
    docs: list[Document],
    encoding: tiktoken.Encoding,
    count: int,
    tokens: tuple[int, int],
    name: str,
    rng: random.Random,
) -> list[dict[str, str]]:
    """`count` whole-line passages of about `tokens` (least, most) tokens, none overlapping."""
    used: dict[str, list[range]] = {}
    prompts: list[dict[str, str]] = []
    while len(prompts) < count:
        doc = rng.choices(docs, weights=[len(d.text) for d in docs])[0]
        lines = doc.text.splitlines(keepends=True)
        start = end = rng.randrange(len(lines))
        want = rng.randint(*tokens)
        text = ""
        while end < len(lines) and len(encoding.encode_ordinary(text)) < want:
            text += lines[end]
            end += 1
        taken = used.setdefault(doc.path, [])
        overlaps = any(r.start < end and start < r.stop for r in taken)
        plain = text.isascii() and all(c.isprintable() or c in "\n\t" for c in text)
        if end == len(lines) or overlaps or not text.strip() or not plain:
            continue
        taken.append(range(start, end))
        prompts.append({"id": f"{name}-{len(prompts):03d}", "source": doc.path, "text": text})
    return prompts


def cut_text(docs: list[Document], limit: int, rng: random.Random) -> list[Document]:
    """Whole held-out documents in random order, `limit` bytes of UTF-8 at most."""
    docs = [d for d in docs if "\x1e" not in d.text]
    rng.shuffle(docs)
    kept, total = [], 0
    for doc in docs:
        size = len(doc.text.encode()) + 1
        if total + size <= limit:
            kept.append(doc)
            total += size
    return kept


# ---- command line ----------------------------------------------------------------------------


def save_ids(ids: np.ndarray, path: Path) -> None:
    with lzma.open(path, "wb", preset=4) as handle:
        handle.write(ids.astype(np.uint16).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for tokens and tokenizer")
    parser.add_argument("--tests", type=Path, required=True, help="folder for the held-out files")
    parser.add_argument("--archives", type=Path, help="folder of archives (default OUT/archives)")
    parser.add_argument("--bpe-mb", type=float, default=30.0, help="text the BPE is trained on")
    args = parser.parse_args()
    archives = args.archives or args.out / "archives"
    for folder in (args.out, args.tests, archives):
        folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)

    stdlib = documents("stdlib", stdlib_members())
    held = [d for d in stdlib if is_held_out(d.path)]
    stdlib = drop_near_duplicates([d for d in stdlib if not is_held_out(d.path)], held)
    packages: list[Document] = []
    for package in tqdm(PACKAGES, desc="packages"):
        docs = documents(package.name, archive_members(download(package, archives)))
        packages += cap(docs, package.cap_mb, rng)
    packages = drop_near_duplicates(packages, held)

    for docs in (stdlib, packages):
        rng.shuffle(docs)
    seeds_std, train_std = stdlib[: len(stdlib) // 8], stdlib[len(stdlib) // 8 :]
    seeds_pkg, train_pkg = packages[: len(packages) // 10], packages[len(packages) // 10 :]

    sample = cap(train_std + train_pkg, args.bpe_mb, rng)
    write_ranks(train_ranks([d.text for d in sample]), args.out / "tiktoken.model")
    encoding = read_encoding(args.out / "tiktoken.model")

    heldout = cut_text(held, 600_000, rng)
    counts = {}
    for name, docs in {
        "train_stdlib": train_std,
        "train_packages": train_pkg,
        "seeds": seeds_std + seeds_pkg,
        "heldout": heldout,
    }.items():
        ids = encode(docs, encoding, name)
        counts[name] = len(ids)
        save_ids(ids, args.out / f"{name}.u16.xz")

    prompts = cut_prompts(held, encoding, 150, (100, 200), "short", rng)
    prompts += cut_prompts(held, encoding, 20, (880, 920), "long", rng)
    with open(args.tests / "heldout_prompts.jsonl", "w", encoding="utf-8") as handle:
        handle.writelines(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts)
    with lzma.open(args.tests / "heldout.txt.xz", "wb", preset=9) as handle:
        handle.write("\x1e".join(d.text for d in heldout).encode())
    ids = {p["id"]: np.array(encoding.encode_ordinary(p["text"]), np.int32) for p in prompts}
    np.savez(args.out / "heldout_prompts.npz", **ids)
    sizes = [len(encoding.decode_single_token_bytes(i)) for i in range(BASE_VOCAB)]
    np.save(args.out / "token_bytes.npy", np.array(sizes + [0] * 256, np.int32))

    def row(name: str, version: str, licence: str) -> dict[str, object]:
        docs = [d for d in stdlib + packages if d.source == name]
        size = sum(len(d.text.encode()) for d in docs)
        return dict(name=name, version=version, licence=licence, files=len(docs), bytes=size)

    sources = [row("stdlib", platform.python_version(), "PSF-2.0")]
    sources += [row(p.name, p.version, p.licence) for p in PACKAGES]
    size = sum(len(d.text.encode()) for d in heldout)
    report = {
        "seed": SEED,
        "sources": sources,
        "tokens": counts,
        "held_out_modules": HELD_OUT_MODULES,
        "held_out_files": sorted(d.path for d in held),
        "heldout_text": {"files": len(heldout), "bytes": size},
    }
    (args.out / "sources.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: report[k] for k in ("sources", "tokens", "heldout_text")}, indent=1))


if __name__ == "__main__":
    main()
