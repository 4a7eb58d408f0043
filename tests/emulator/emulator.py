"""CUDA C++ kernels on the CPU: compile a source as host C++, launch its kernels thread by thread.

    module = Module(source, ("-DTILE=16",), "kernels.cu", checked=True)
    module.function("scale")((blocks,), (threads,), (x, y, np.int32(n), np.float32(a)))

Arrays are contiguous NumPy arrays, passed by pointer; scalars are NumPy scalars of the parameter's
type. A mistake in a launch, and whatever the kernel does wrong, raises `EmulatorError`, which names
kernel, block, thread and source line. What is checked and what is not: README.md beside this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
COMMON = [
    *("-std=c++17", "-fPIC", "-w", "-fno-exceptions", "-fno-rtti", "-fno-stack-protector"),
    *("-gdwarf-4", "-g1"),  # lines alone; addr2line of binutils 2.40 takes the wrong file from 5 on
    "-ffp-contract=off",  # kernels name the operations they want fused
    *("-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"),
    "-U_FORTIFY_SOURCE",  # its longjmp refuses to leave a fiber
]
# Lower than -O2: lines stay true, and fewer loads and stores are merged before they are watched.
HOOKS = [
    *("-O1", "-fsanitize=thread"),
    "-fsanitize=alignment,bounds,null,shift-exponent,integer-divide-by-zero,"
    "signed-integer-overflow,unreachable,return,bool,enum",
]
NVCC_ONLY = (
    r"--?std=|-arch=|--gpu-architecture|--fmad=|--?(generate-)?line-?info|-I|-default-device"
)
GCOV = """
extern "C" void __gcov_dump(void);
extern "C" void __gcov_reset(void);
extern "C" __attribute__((visibility("default"))) void emulator_gcov() {
  __gcov_dump();
  __gcov_reset();  // or the next dump would write nothing
}
"""
SHARED_LIMIT = 232448  # bytes a block may have on sm_90: static and dynamic together
SHARED_DEFAULT = 49152  # dynamic bytes a kernel may have before its limit is raised

_lock = threading.Lock()  # the runtime runs one launch at a time


class EmulatorError(RuntimeError):
    """A source that does not compile, a launch CUDA would refuse, or a fault found in a kernel."""


# ---------------------------------------------------------------- tools and cache


def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


@functools.cache
def cuda_headers() -> Path | None:
    """The folder of cuda_bf16.h, from the wheel `nvidia-cuda-runtime` or an installed toolkit."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(p) for p in (found.submodule_search_locations or ())] if found else []
    folders = [f for p in places for f in sorted(p.glob("*/include"), reverse=True)]
    folders += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    return next((f for f in folders if (f / "cuda_bf16.h").exists()), None)


def missing() -> str | None:
    """Why nothing can be emulated here, or None."""
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"the emulator's context switch is not written for {platform.machine()}"
    if _compiler() is None:
        return "the emulator needs g++ or clang++"
    if cuda_headers() is None:
        return "the emulator needs cuda_bf16.h: pip install nvidia-cuda-runtime nvidia-cuda-crt"
    return None


@functools.cache
def _machine() -> str:
    """What a binary built with -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return "\n".join(sorted(set(re.findall(r"^(?:flags|Features|model name).*$", text, re.M))))


@functools.cache
def _tools() -> tuple[str, str]:
    """The compiler and what names it, its machine and the emulator's own sources in a cache key."""
    reason = missing()
    if reason:
        raise EmulatorError(reason)
    version = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True)
    own = "".join((HERE / f).read_text() for f in ("cuda_host.h", "runtime.cpp", "emulator.py"))
    return _compiler(), "\0".join((version.stdout, _machine(), str(cuda_headers()), own))


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "cuda-emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _target(*parts: str) -> Path:
    """The library's place in the cache: named by all that it is made from."""
    key = hashlib.sha256("\0".join((_tools()[1], *parts)).encode()).hexdigest()[:32]
    return _cache() / f"{key}.so"


def _once(target: Path, build: Callable[[], None]) -> None:
    """Builds `target` where it is missing; of processes that want it, one does and all wait."""
    if target.exists():
        return
    lock = target.with_suffix(".lock")
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if not target.exists():
                build()
        finally:
            lock.unlink(missing_ok=True)  # who waits for it finds the target


def _run(folder: Path, name: str, *arguments: str) -> None:
    """The compiler in a folder; errors speak of `name`."""
    command = [_compiler(), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        shown = "\n".join(done.stderr.splitlines()[:30])
        raise EmulatorError(f"{name} does not compile as host C++:\n{shown}")


def _flags(*more: str) -> list[str]:
    native = "-march=native" if platform.machine() == "x86_64" else "-mcpu=native"
    include = ["-isystem", str(cuda_headers()), "-idirafter", str(HERE)]
    return [*COMMON, native, *more, "-I", str(HERE), *include]


def _header(flags: list[str]) -> list[str]:
    """The options that find cuda_host.h as g++ has it after parsing, with the same flags."""
    if "clang" in _compiler():
        return []
    folder = _target("cuda_host.h", *flags).with_suffix("")
    target = folder / "cuda_host.h.gch"

    def build() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            source = ("-x", "c++-header", str(HERE / "cuda_host.h"))
            _run(Path(made), "cuda_host.h", *flags, *source, "-o", "made.gch")
            os.replace(Path(made) / "made.gch", target)

    folder.mkdir(exist_ok=True)
    _once(target, build)
    return ["-I", str(folder)]


def _build(target: Path, text: str, flags: list[str], link: list[str], name: str) -> None:
    """Compiles `text` into the library `target`; errors speak of `name`."""
    with contextlib.ExitStack() as stack:
        if "--coverage" in flags:  # gcov needs the folder later
            folder = target.with_suffix("")
            folder.mkdir(exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=_cache())))
        (folder / "source.cpp").write_text(text)
        flags = [*flags, f"-fdebug-prefix-map={folder}=."]
        _run(folder, name, *flags, "-c", "source.cpp", "-o", "object.o")
        _run(folder, name, "-shared", "object.o", *link, "-o", "library.so", "-ldl")
        os.replace(folder / "library.so", target)  # whole or not at all: others may be looking


@functools.cache
def _runtime() -> tuple[ctypes.CDLL, Path]:
    path, text = _target("runtime"), (HERE / "runtime.cpp").read_text()
    _once(path, lambda: _build(path, text, _flags("-O2"), [], "runtime.cpp"))
    library = ctypes.CDLL(str(path))
    library.emulator_switches.restype = ctypes.c_ulonglong
    return library, path


def switches() -> int:
    """Context switches made so far in this process: one a thread-step."""
    return _runtime()[0].emulator_switches()


# ---------------------------------------------------------------- source


_PARENS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_ATTRIBUTE = rf"(?:(?:__align__|alignas|__attribute__)\s*{_PARENS}\s*|(?:static|volatile)\s+)"
_DYNAMIC = re.compile(
    rf"extern\s+{_ATTRIBUTE}*__shared__\s+{_ATTRIBUTE}*([\w:<>,\s*]+?)\s*{_ATTRIBUTE}*\b(\w+)\s*\[\s*\]\s*;"
)
_STATIC = re.compile(rf"({_ATTRIBUTE}*)__shared__\s+([^;{{}}]*);")


def _without_comments(source: str) -> str:
    """The source with comments blanked, every line and column where it was."""
    pattern = r"//(?:\\\n|[^\n])*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"

    def blank(m: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", m[0]) if m[0][0] == "/" else m[0]

    return re.sub(pattern, blank, source, flags=re.S)


def _split(text: str) -> list[str]:
    """The parts between commas that are in no bracket of any kind."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _declared(part: str) -> str:
    names = re.findall(r"[A-Za-z_]\w*", re.sub(_ATTRIBUTE, " ", part.split("[")[0].split("=")[0]))
    return names[-1] if names else ""


def _rewrite_shared(source: str, name: str) -> str:
    """Turns shared-memory declarations into references to the block's own; lines stay in place."""
    count = 0

    def dynamic(m: re.Match[str]) -> str:
        depth = source.count("{", 0, m.start()) - source.count("}", 0, m.start())
        if depth == 0 and "#define" not in source[source.rfind("\n", 0, m.start()) + 1 : m.start()]:
            line = source.count("\n", 0, m.start()) + 1
            raise EmulatorError(f"{name}:{line}: declare `{m[2]}` inside the function that uses it")
        kind = " ".join(m[1].split())
        memory = f"reinterpret_cast<{kind}*>(emulator::current->block->dynamic)"
        return f"{kind}* const {m[2]} = {memory};" + "\n" * m[0].count("\n")

    def static(m: re.Match[str]) -> str:
        nonlocal count
        count += 1
        shown = " ".join(m[2].split()).replace('"', "'")
        names = [_declared(p) for p in _split(m[2])]
        slot = f"EmulatorShared{count}"
        uses = " ".join(f"auto& {n} = emulator::shared<{slot}>().{n};" for n in names)
        text = f'static const char* emulator_text() {{ return "{shown}"; }}'
        member = m[1].replace("static", "") + m[2]
        return f"struct {slot} {{ {text} {member}; }}; {uses}"

    return _STATIC.sub(static, _DYNAMIC.sub(dynamic, source))


def _macro(option: str) -> str:
    """-DNAME=VALUE or -UNAME as a line of source."""
    name, _, value = option[2:].partition("=")
    return f"#define {name} {value or 1}\n" if option[1] == "D" else f"#undef {name}\n"


@dataclass(frozen=True)
class _Declaration:
    name: str
    parameters: tuple[str, ...]
    bounds: str  # the arguments of __launch_bounds__, or nothing
    cluster: str  # of __cluster_dims__, likewise


def _kernels(source: str, defines: Sequence[str]) -> list[_Declaration]:
    """The extern "C" kernels, macros expanded: people write instances of a template with one."""
    bare = re.sub(r"^\s*#\s*include.*$", "", source, flags=re.M)
    command = [_compiler(), "-E", "-P", "-x", "c++", "-DKDTREE_EMULATOR", *defines, "-"]
    done = subprocess.run(command, input=bare, capture_output=True, text=True)
    if done.returncode:
        raise EmulatorError(f"the preprocessor fails:\n{done.stderr}")
    return list(_declarations(done.stdout))


def _declarations(text: str) -> Iterator[_Declaration]:
    blocks = []
    for opened in re.finditer(r'extern\s+"C"\s*\{', text):
        depth, at = 1, opened.end()
        while depth and at < len(text):
            depth += (text[at] == "{") - (text[at] == "}")
            at += 1
        blocks.append((opened.end(), at))
    seen = set()
    for m in re.finditer(r"__global__", text):
        before = text[max(0, m.start() - 200) : m.start()]
        direct = re.search(r'extern\s+"C"\s*(?:static|inline|\s)*$', before)
        if not direct and not any(a <= m.start() < b for a, b in blocks):
            continue
        head = re.match(r"[^{;]*", text[m.end() :])[0]
        bounds, cluster = (
            re.search(rf"{name}\s*({_PARENS})", head)
            for name in ("__launch_bounds__", "__cluster_dims__")
        )
        head = re.sub(rf"__\w+__\s*{_PARENS}", " ", head)
        found = re.match(r"\s*(?:static\s+|inline\s+)*void\s+(\w+)\s*\((.*)\)\s*$", head, re.S)
        if found and found[1] not in seen:
            seen.add(found[1])
            names = tuple(_declared(p) for p in _split(found[2]) if p.strip() not in ("", "void"))
            yield _Declaration(
                found[1], names, *(given[1] if given else "()" for given in (bounds, cluster))
            )


def _table(kernels: list[_Declaration]) -> str:
    rows = "".join(
        f'  {{"{k.name}", &emulator::Entry<&{k.name}>::call, (const void*)&{k.name}, '
        f"emulator::Entry<&{k.name}>::count, emulator::Entry<&{k.name}>::parameters, "
        f"emulator::first{k.bounds}, emulator::cluster{k.cluster}}},\n"
        for k in kernels
    )
    export = 'extern "C" __attribute__((visibility("default")))'
    names = " ".join(f"{k.name}:{','.join(k.parameters)}" for k in kernels)
    return (
        f'\n#line 1 "emulator"\n'
        f"{export} emulator::Kernel emulator_kernels[] = {{\n{rows}  {{}}}};\n"
        f'{export} const char* emulator_names() {{ return "{names}"; }}\n'
        f"{export} int emulator_static_bytes() {{ return emulator::slot_bytes; }}\n"
    )


# ---------------------------------------------------------------- launching


class _Parameter(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char),
        ("constant", ctypes.c_char),
        ("size", ctypes.c_int),
        ("align", ctypes.c_int),
        ("element", ctypes.c_char_p),
    ]


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        ("address", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("max_threads", ctypes.c_int),
        ("cluster", ctypes.c_int),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.POINTER(_Kernel)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("static_bytes", ctypes.c_uint),
        ("seed", ctypes.c_ulonglong),
        ("cooperative", ctypes.c_uint),
        ("checked", ctypes.c_uint),
        ("dependent", ctypes.c_uint),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("constant", ctypes.c_uint),
        ("output", ctypes.c_uint),
        ("fresh", ctypes.c_uint),
    ]


# What launches may still be writing when a dependent one begins: (first, last + 1) addresses.
_fresh: deque[tuple[int, int]] = deque(maxlen=256)


def settle() -> None:
    """All launches so far have ended, as after a copy or a synchronisation on their stream."""
    _fresh.clear()


_TYPES = {
    "b1": "bool", "i1": "int8", "u1": "uint8", "i2": "int16", "u2": "uint16", "i4": "int32",
    "u4": "uint32", "i8": "int64", "u8": "uint64", "f2": "float16", "bf2": "bfloat16",
    "f4": "float32", "f8": "float64",
}  # fmt: skip


@functools.cache
def _code(dtype: np.dtype) -> str:
    if dtype.name == "bfloat16":
        return "bf2"
    return f"{dtype.kind}{dtype.itemsize}" if dtype.kind in "biuf" else "raw"


def _points_to(element: str, array: str) -> bool:
    """May a pointer to `element` get an array of this type? As bits, yes; as wrong values, no."""
    if element in ("raw", "i1", "u1", array):
        return True
    if element[-1] != array[-1] or "raw" in (element, array):
        return False
    bits = ("i2", "u2") if element[-1] == "2" else ()
    both_integers = element[0] in "iu" and array[0] in "iu"
    return both_integers or element in bits or array in bits


class Function:
    """One kernel of a module, called as `function(grid, block, args, shared_bytes=0)`.

    As on a device, `max_dynamic_shared_size_bytes` is to be raised before a launch with more than
    48 KB of dynamic shared memory.
    """

    def __init__(self, module: Module, kernel: _Kernel, names: tuple[str, ...]) -> None:
        self.name = kernel.name.decode()
        self.max_dynamic_shared_size_bytes = SHARED_DEFAULT
        self.parameters = names
        self._module = module
        self._kernel = kernel
        self._types = [kernel.parameters[i] for i in range(kernel.count)]

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[object],
        shared_bytes: int = 0,
        *,
        outputs: Sequence[str] = (),
        cooperative: bool = False,
        dependent: bool = False,
        seed: int = 0,
    ) -> None:
        """Runs the kernel to its end.

        grid, block: 1 to 3 numbers each.
        args: per parameter a contiguous array (None: null), or a NumPy scalar of its type.
        shared_bytes: dynamic shared memory.
        outputs: names of pointer parameters that the kernel writes whole. They are filled with NaN
            bits first; a checked module finds a byte read before it is written, or never written.
        cooperative: all blocks live at once, for grid barriers.
        dependent: may begin before the launches in front have ended; then every thread must call
            grid_dependency_wait(), and a checked module finds a write before it, or a read of what
            those launches write.
        seed: of the order in which threads and blocks run.
        Raises EmulatorError.
        """
        launch = _Launch(kernel=ctypes.pointer(self._kernel), seed=seed)
        launch.grid[:] = self._extent("grid", grid, (2**31 - 1, 65535, 65535))
        launch.block[:] = self._extent("block", block, (1024, 1024, 64))
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        if threads > self._kernel.max_threads:
            limit = self._kernel.max_threads
            self._refuse(f"a block of {threads} threads; its launch bounds allow {limit}")
        if launch.grid[0] % self._kernel.cluster:
            self._refuse(f"{launch.grid[0]} blocks in clusters of {self._kernel.cluster}")
        if shared_bytes > self.max_dynamic_shared_size_bytes:
            self._refuse(
                f"{shared_bytes} bytes of dynamic shared memory; max_dynamic_shared_size_bytes is "
                f"{self.max_dynamic_shared_size_bytes}"
            )
        if shared_bytes > SHARED_LIMIT:
            self._refuse(f"{shared_bytes} bytes of shared memory; a block has {SHARED_LIMIT}")
        launch.shared_bytes = shared_bytes
        launch.static_bytes = self._module.static_bytes
        launch.cooperative = cooperative
        launch.checked = self._module.checked
        launch.dependent = dependent
        values, buffers = self._pack(args, tuple(outputs))
        if not dependent:
            settle()
        elif self._module.checked:
            self._mark_fresh(buffers)
        pointers = (ctypes.c_void_p * max(1, len(values)))(
            *(ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values)
        )
        text = ctypes.create_string_buffer(2048)
        with _lock:
            failed = _runtime()[0].emulator_launch(
                ctypes.byref(launch), pointers, buffers, len(buffers), text, ctypes.c_size_t(2048)
            )
            if not _runtime()[0].emulator_launched_early():
                settle()  # the next launch begins when those in front of this one have ended
        if failed:
            raise EmulatorError(self._module.with_lines(text.value.decode()))
        _fresh.extend((b.data, b.data + b.bytes) for b in buffers if b.data and not b.constant)

    @staticmethod
    def _mark_fresh(buffers: ctypes.Array) -> None:
        """Marks what the launches in front may still be writing."""
        for b in buffers:
            low, high = b.data or 0, (b.data or 0) + b.bytes
            b.fresh = any(low < end and begin < high for begin, end in _fresh)

    def _refuse(self, why: str) -> None:
        raise EmulatorError(f"kernel {self.name}: {why}")

    def _extent(self, what: str, given: Sequence[int], limits: tuple[int, ...]) -> list[int]:
        extent = [*given, 1, 1][:3]
        if not 1 <= len(given) <= 3 or any(
            not 1 <= n <= m for n, m in zip(extent, limits, strict=True)
        ):
            self._refuse(f"{what} {tuple(given)}: expected 1 to 3 numbers from 1 to {limits}")
        return extent

    def _pack(self, args: Sequence[object], outputs: tuple[str, ...]) -> tuple[list, ctypes.Array]:
        if len(args) != len(self._types):
            expected = ", ".join(self.parameters)
            self._refuse(f"{len(args)} arguments, expected {len(self._types)}: {expected}")
        unknown = set(outputs) - set(self.parameters)
        if unknown:
            self._refuse(f"no parameter {sorted(unknown)}: it has {', '.join(self.parameters)}")
        values, buffers = [], []
        for i, (value, kind, name) in enumerate(
            zip(args, self._types, self.parameters, strict=True)
        ):
            where = f"argument {i} `{name}`"
            if kind.kind == b"p":
                values.append(self._pointer(where, value, kind))
                if value is not None:
                    constant, output = kind.constant == b"c", name in outputs
                    if output:
                        value.view(np.uint8)[...] = 0xFF
                    buffers.append(
                        _Buffer(values[-1].value, value.nbytes, name.encode(), constant, output)
                    )
            else:
                values.append(self._scalar(where, value, kind))
        return values, (_Buffer * len(buffers))(*buffers)

    def _pointer(self, where: str, value: object, kind: _Parameter) -> ctypes.c_void_p:
        element = kind.element.decode()
        if value is None:
            return ctypes.c_void_p(0)
        if not isinstance(value, np.ndarray):
            self._refuse(f"{where}: expected an array, got {type(value).__name__}")
        if not value.flags.c_contiguous:
            self._refuse(f"{where}: expected a contiguous array, got strides {value.strides}")
        if not _points_to(element, _code(value.dtype)):
            self._refuse(f"{where}: expected {_TYPES.get(element, element)}, got {value.dtype}")
        if kind.constant != b"c" and not value.flags.writeable:
            self._refuse(f"{where}: the kernel may write it, and the array is read-only")
        address = value.__array_interface__["data"][0]
        if address % kind.align:
            self._refuse(f"{where}: expected an address aligned to {kind.align} bytes")
        return ctypes.c_void_p(address)

    def _scalar(self, where: str, value: object, kind: _Parameter) -> ctypes.Array:
        element = kind.element.decode()
        expected = _TYPES.get(element, f"a structure of {kind.size} bytes")
        if not isinstance(value, np.generic):
            self._refuse(f"{where}: expected {expected}, got {type(value).__name__}: cast it")
        wrong_size = value.dtype.itemsize != kind.size
        if wrong_size or (kind.kind == b"s" and _code(value.dtype) != element):
            self._refuse(f"{where}: expected {expected}, got {value.dtype}")
        # 16-byte units: a structure may ask for that alignment, and is copied from here.
        units = (ctypes.c_longdouble * (kind.size // 16 + 1))()
        ctypes.memmove(units, value.tobytes(), kind.size)
        return units


class Module:
    """A source compiled for the emulator.

    source: CUDA C++ text.
    options: `-DNAME=VALUE` and `-UNAME`; those of NVCC_ONLY are taken and change nothing here.
    name: the file that messages name.
    checked: the build that watches every load and store; several times slower.
    coverage: count the lines that run (g++ only), for `executed_lines`.
    """

    def __init__(
        self,
        source: str,
        options: Sequence[str] = (),
        name: str = "kernels.cu",
        checked: bool = False,
        coverage: bool = False,
    ) -> None:
        defines = self._defines(options)
        self.name = name
        self.checked = checked
        self.coverage = coverage
        self._path = _target(source, *defines, name, str(checked), str(coverage))
        _once(self._path, lambda: self._compile(_without_comments(source), defines))
        self._library = library = ctypes.CDLL(str(self._path))
        library.emulator_names.restype = ctypes.c_char_p
        self.static_bytes = library.emulator_static_bytes()
        listed = dict(row.split(":") for row in library.emulator_names().decode().split())
        table = (_Kernel * len(listed)).in_dll(library, "emulator_kernels")
        self._functions = {
            name: (kernel, tuple(filter(None, names.split(","))))
            for kernel, (name, names) in zip(table, listed.items(), strict=True)
        }

    @staticmethod
    def _defines(options: Sequence[str]) -> list[str]:
        for o in options:
            if not re.match(rf"-D\w|-U\w|{NVCC_ONLY}", o):
                raise EmulatorError(f"option {o!r}: the emulator knows -D and -U")
        return [o for o in options if o[:2] in ("-D", "-U")]

    def _compile(self, source: str, defines: list[str]) -> None:
        # After the header: a definition such as -DT=4 must not reach into it.
        macros = "".join(_macro(d) for d in defines)
        body = _rewrite_shared(source, self.name)
        text = f'#include "cuda_host.h"\n{macros}#line 1 "{self.name}"\n{body}\n'
        flags = ["-DKDTREE_EMULATOR", "-fvisibility=hidden", *(HOOKS if self.checked else ["-O1"])]
        if "clang" not in _compiler():
            flags.append("-fno-gnu-unique")  # two modules may hold a template of one name
        text += _table(_kernels(source, defines))
        link = [str(_runtime()[1])]
        if self.coverage:
            text += GCOV
            flags += ["--coverage", "-O1"]  # at -O2 lines lose their counts to each other
            link += ["--coverage"]
        flags = _flags(*flags)
        _build(self._path, text, [*_header(flags), *flags], link, self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """The extern "C" kernels of the source."""
        return tuple(self._functions)

    def function(self, name: str) -> Function:
        """The kernel of that name; EmulatorError lists those there are."""
        if name not in self._functions:
            have = ", ".join(self._functions)
            raise EmulatorError(f'{self.name} has no extern "C" kernel {name}; it has {have}')
        return Function(self, *self._functions[name])

    @property
    def key(self) -> str:
        """The same for the same source, options and build."""
        return self._path.stem

    def forget_lines(self) -> None:
        """Of a module with coverage: nothing has run."""
        self._library.emulator_gcov()
        for counts in self._path.with_suffix("").glob("*.gcda"):
            counts.unlink()

    def executed_lines(self, source: str | None = None) -> dict[int, bool]:
        """Of a module with coverage: each line of `source` (as a #line calls it; default `name`)
        that has code, and whether it ever ran.

        Runs of all processes since the build, or since `forget_lines`, count. EmulatorError if gcov
        fails.
        """
        wanted = Path(source or self.name).name
        self._library.emulator_gcov()
        command = ["gcov", "--json-format", "--stdout", "object.gcda"]
        folder = self._path.with_suffix("")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode or not done.stdout:
            raise EmulatorError(f"gcov fails in {folder}: {done.stderr}")
        lines: dict[int, bool] = {}
        for file in json.loads(done.stdout)["files"]:
            if Path(file["file"]).name == wanted:
                for row in file["lines"]:  # a template has a row for each instance
                    number = row["line_number"]
                    lines[number] = lines.get(number, False) or row["count"] > 0
        return lines

    def with_lines(self, text: str) -> str:
        """Replaces each `@hex@`, a return address in this module, by its source line."""
        return re.sub(r"@([0-9a-f]+)@", lambda m: self._line(int(m[1], 16)), text)

    def _line(self, address: int) -> str:
        tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
        if tool is None:
            return f"{self.name}+0x{address:x} (addr2line would give the line)"
        command = [tool, "-e", str(self._path), "-f", "-C", "-i", hex(address - 1)]
        out = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        frames = []
        for function, place in zip(out[::2], out[1::2], strict=False):
            place = re.sub(r"^(\./)+|\s*\(discriminator \d+\)$", "", place)
            path = place.rsplit(":", 1)[0]
            if not path.startswith(("/", "?")):
                frames.append((place, function.split("(")[0]))
        if not frames:
            return f"{self.name}+0x{address:x}"
        inner, outer = frames[0], frames[-1]
        return inner[0] if inner is outer else f"{inner[0]} ({inner[1]}, called at {outer[0]})"
