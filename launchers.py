"""Where kernels run: an NVIDIA GPU, or this host in its place.

`CudaLauncher` compiles with NVRTC, launches and moves arrays through CuPy. `EmulatorLauncher` runs
the same kernels thread by thread as host code, on arrays of NumPy's. Both have the same methods.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from config import UserError
from reference import free_memory

THREADS = 256  # of a block, if nothing else is said
WARPS = THREADS // 32
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)
INT32_MAX = 2**31 - 1
UINT8 = np.dtype(np.uint8)
UINT64 = np.dtype(np.uint64)
Defines = tuple[tuple[str, object], ...]  # -D options of one section
MOST_ARGUMENTS = 64  # of a kernel
# How `struct` puts an argument in 8 bytes; arrays as their addresses.
_PLACED = {np.int32: "i4x", np.uint32: "I4x", np.float32: "f4x", np.int64: "q", np.uint64: "Q"}


@functools.cache
def _placed(types: tuple[type, ...]) -> struct.Struct:
    return struct.Struct("=" + "".join(_PLACED.get(t, "Q") for t in types))


class _Call(threading.local):
    """What a dependent launch hands to the driver, made once a thread: it costs more than the
    launch. values: every argument in 8 bytes; places: where each is."""

    def __init__(self, driver) -> None:
        attribute, names = driver.CUlaunchAttribute(), driver.CUlaunchAttributeID
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self.config = driver.CUlaunchConfig()
        self.config.attrs, self.config.numAttrs = [attribute], 1
        self.values = (ctypes.c_uint64 * MOST_ARGUMENTS)()
        begin = ctypes.addressof(self.values)
        self.places = (ctypes.c_void_p * MOST_ARGUMENTS)(
            *range(begin, begin + 8 * MOST_ARGUMENTS, 8)
        )


@dataclass(frozen=True)
class Captured:
    """Recorded work: `replay` repeats it on what its inputs hold by then, into the same outputs."""

    outputs: tuple
    replay: Callable[[], None]
    keep: tuple = ()  # what the recorded work uses and nobody else holds


@dataclass(frozen=True)
class Limits:
    """What a device allows, read from the device.

    shared_bytes  dynamic shared memory of one block at most
    processors    streaming multiprocessors
    clusters      blocks may share their shared memory
    warpgroups    four warps may multiply together, from shared memory, and blocks be copied by maps
    """

    name: str
    architecture: str
    shared_bytes: int
    processors: int
    clusters: bool = False
    warpgroups: bool = False
    max_grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)


class CudaLauncher:
    """Compiles with NVRTC and launches through CuPy on the current stream."""

    name = "cuda"

    def __init__(self, index: int = 0, ranks: int = 1) -> None:
        """On GPU `index` of this host, where `ranks` of them are needed."""
        try:
            import cupy
        except ImportError:
            raise UserError(
                "--device cuda: CuPy is not installed; install cupy-cuda12x or cupy-cuda13x, or "
                "use --device cpu"
            ) from None
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise UserError(f"--device cuda: {self._no_driver(cupy, error)}") from None
        if not count:
            raise UserError("--device cuda: no NVIDIA GPU was found; use --device cpu")
        # A launcher may show each rank its own GPU alone; `ranks` that are started here see all.
        if count < ranks or 1 < count <= index:
            raise UserError(
                f"--device cuda: {max(ranks, index + 1)} ranks need as many GPUs, this host shows "
                f"{count}; lower tp.size, or use --device cpu"
            )
        cupy.cuda.Device(0 if count == 1 else index).use()
        self.xp = cupy
        self.array_type = cupy.ndarray
        self.faults = (
            cupy.cuda.runtime.CUDARuntimeError,
            cupy.cuda.driver.CUDADriverError,
        )
        device = cupy.cuda.Device()
        properties = cupy.cuda.runtime.getDeviceProperties(device.id)
        self._driver = None
        if int(device.compute_capability) >= 90:
            try:
                from cuda.bindings import driver
            except ImportError:
                pass  # kernels are then launched one after the other
            else:
                self._driver, self._call = driver, _Call(driver)
        self.limits = Limits(
            name=properties["name"].decode(),
            architecture=f"sm_{device.compute_capability}",
            shared_bytes=int(device.attributes["MaxSharedMemoryPerBlockOptin"]),
            processors=int(device.attributes["MultiProcessorCount"]),
            clusters=int(device.compute_capability) >= 90,
            warpgroups=device.compute_capability == "90" and self._driver is not None,
        )

    @staticmethod
    def _no_driver(cupy, error: Exception) -> str:
        """Why the GPUs cannot be counted, and what to do."""
        driver, ours = (
            f"{version // 1000}.{version % 1000 // 10}"
            for version in (
                cupy.cuda.runtime.driverGetVersion(),
                cupy.cuda.runtime.runtimeGetVersion(),
            )
        )
        if driver == "0.0":
            return "no NVIDIA GPU was found (there is no driver); use --device cpu"
        if float(driver) < float(ours):
            return (
                f"the NVIDIA driver is too old: it runs CUDA {driver}, this CuPy needs {ours}; "
                "update the driver, install a CuPy for its version (cupy-cuda12x) or use "
                "--device cpu"
            )
        return f"the NVIDIA driver cannot be used: {error}; use --device cpu"

    def compile(self, source: str, options: tuple[str, ...], name: str):
        """An object with get_function(kernel)."""
        if self.limits.warpgroups:  # CuPy asks for sm_90, which has none; NVRTC takes the larger
            options = (*options, "-arch=sm_90a")
        module = self.xp.RawModule(code=source, options=options, backend="nvrtc")
        try:
            module.compile()
        except self.xp.cuda.compiler.CompileException as error:
            lines = [line for line in str(error).splitlines() if ".cu(" in line] or [str(error)]
            raise UserError(f"section {name} does not compile:\n" + "\n".join(lines)) from None
        return module

    def function(self, module, kernel: str):
        return module.get_function(kernel)

    def launch(self, function, grid, block, args, shared_bytes: int, dependent=False) -> None:
        """dependent: the kernel may start before the one in front of it has ended, and waits for it
        itself; CuPy cannot ask for that, cuda.bindings can."""
        if not dependent or self._driver is None:
            function(grid, block, args, shared_mem=shared_bytes)
            return
        driver, made = self._driver, self._call.config
        made.gridDimX, made.gridDimY, made.gridDimZ = grid
        made.blockDimX, made.blockDimY, made.blockDimZ = block
        made.sharedMemBytes = shared_bytes
        made.hStream = driver.CUstream(self.xp.cuda.get_current_stream().ptr)
        values = [a.data.ptr if isinstance(a, self.array_type) else a.item() for a in args]
        _placed(tuple(map(type, args))).pack_into(self._call.values, 0, *values)
        kernel = driver.CUfunction(function.kernel.ptr)
        places = ctypes.addressof(self._call.places)
        (status,) = driver.cuLaunchKernelEx(made, kernel, places, 0)
        if status:
            raise self.xp.cuda.driver.CUDADriverError(int(status))

    def upload(self, array):
        if isinstance(array, self.array_type):
            return array
        out, host = self.empty(array.shape, array.dtype), np.asarray(array, order="C")
        # On the current stream: pool memory may still be read there by earlier kernels.
        stream = self.xp.cuda.get_current_stream()
        out.view(_bits(out.dtype)).set(host.view(_bits(host.dtype)), stream=stream)
        return out

    def download(self, array) -> np.ndarray:
        return array.view(_bits(array.dtype)).get().view(array.dtype)

    def fetch(self, arrays: tuple):
        """See CudaOps.fetch: pinned memory, so that the copies run behind the host's back."""
        xp, stream = self.xp, self.xp.cuda.get_current_stream()
        hosts = []
        for array in arrays:
            memory = xp.cuda.alloc_pinned_memory(max(array.nbytes, 1))
            host = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
            array.get(stream=stream, out=host, blocking=False)
            hosts.append(host)
        done = xp.cuda.Event()
        done.record(stream)

        def wait() -> tuple:
            done.synchronize()
            return tuple(hosts)

        return wait

    def empty(self, shape, dtype):
        """From CuPy's pool: nothing is asked of the driver once a step has run."""
        try:
            return self.xp.empty(shape, dtype)
        except self.xp.cuda.memory.OutOfMemoryError:
            free, total = self.xp.cuda.runtime.memGetInfo()
            need = math.prod(shape) * np.dtype(dtype).itemsize
            raise UserError(
                f"{self.limits.name}: out of memory: {need / 2**20:.0f} MiB more are needed, "
                f"{free / 2**20:.0f} of {total / 2**20:.0f} MiB are free; lower decode.batch, "
                "decode.context or draft.budget, or use more ranks (tp.size)"
            ) from None

    def capture(self, run):
        """See CudaOps.capture."""
        self.synchronize()  # what `run` reads may still be on its way on the current stream
        stream, pool = self.xp.cuda.Stream(non_blocking=True), self.xp.cuda.MemoryPool()
        with stream, self.xp.cuda.using_allocator(pool.malloc):
            run()  # compiles and fills the pool: neither is allowed, or wise, while capturing
            stream.synchronize()
            stream.begin_capture()
            try:
                outputs = run()
            finally:
                graph = stream.end_capture()
        # The pool holds every block that the graph writes: it must live as long.
        return Captured(outputs, graph.launch, keep=(stream, pool))

    def address(self, array) -> int:
        return array.data.ptr

    def block_map(self, array):
        """What kernels copy blocks of 64 x 64 by, of bfloat16 [rows, width]: uint64 [16]."""
        driver, (rows, width) = self._driver, array.shape
        long, short = driver.cuuint64_t, driver.cuuint32_t
        status, made = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, array.data.ptr,
            [long(width), long(rows)], [long(2 * width)], [short(64), short(64)],
            [short(1), short(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip
        if status:
            raise self.xp.cuda.driver.CUDADriverError(int(status))
        return self.upload(np.array([int(word) for word in made.opaque], np.uint64))

    def share(self, size: int):
        """Zeroed memory that other processes of this host can write: (uint8 array, its handle)."""
        memory = self.xp.cuda.Memory(size)  # an allocation of its own: a handle stands for a whole
        array = self.xp.ndarray(size, np.uint8, self.xp.cuda.MemoryPointer(memory, 0))
        array.fill(0)
        self.synchronize()
        return array, self.xp.cuda.runtime.ipcGetMemHandle(memory.ptr)

    def map(self, handle) -> int:
        """The address here of what another process has shared. It stays until this process ends."""
        runtime = self.xp.cuda.runtime
        return runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)

    def write(self, address: int, data: np.ndarray) -> None:
        """Host data to any address of the device's, mapped ones too; it is there on return."""
        runtime = self.xp.cuda.runtime
        runtime.memcpy(address, data.ctypes.data, data.nbytes, runtime.memcpyDefault)
        runtime.deviceSynchronize()  # the copy itself returns with the data still under way

    def word(self):
        """A zeroed uint64 [1] that kernels write and the host reads at any time: both's arrays."""
        pinned = self.xp.cuda.alloc_pinned_memory(8)
        host = np.frombuffer(pinned, np.uint64, 1)
        host[...] = 0
        memory = self.xp.cuda.UnownedMemory(pinned.ptr, 8, pinned, self.xp.cuda.Device().id)
        return self.xp.ndarray(1, np.uint64, self.xp.cuda.MemoryPointer(memory, 0)), host

    def free_bytes(self) -> int:
        return self.xp.cuda.runtime.memGetInfo()[0]

    def trim(self) -> None:
        self.synchronize()
        self.xp.get_default_memory_pool().free_all_blocks()

    def seconds(self, run: Callable[[], object]) -> float:
        """How long the device works on what run() starts."""
        begin, end = self.xp.cuda.Event(), self.xp.cuda.Event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return self.xp.cuda.get_elapsed_time(begin, end) / 1e3

    def mark(self):
        """A moment of the device's, when it has done what was asked so far; see `between`."""
        event = self.xp.cuda.Event()
        event.record()
        return event

    def between(self, begin, end) -> float:
        """Seconds between two marks that have passed."""
        return self.xp.cuda.get_elapsed_time(begin, end) / 1e3

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()


class EmulatorLauncher:
    """Runs the kernels as host code (tests/emulator) on NumPy arrays.

    checked   watches every load and store
    coverage  counts the lines that run
    """

    name = "emulate"
    xp = np
    array_type = np.ndarray

    def __init__(self, checked: bool = False, coverage: bool = False) -> None:
        from tests.emulator import emulator  # host compiler needed: only when asked for

        self.emulator, self.build = emulator, dict(checked=checked, coverage=coverage)
        self.mapped: list[np.ndarray] = []  # of other processes
        self.faults = (emulator.EmulatorError,)
        self.limits = Limits(
            "host", "emulator", 101_376, processors=1, clusters=True, warpgroups=True
        )

    def compile(self, source: str, options: tuple[str, ...], name: str):
        try:
            return self.emulator.Module(source, options, name, **self.build)
        except self.emulator.EmulatorError as error:
            raise UserError(f"section {name} does not compile:\n{error}") from None

    def function(self, module, kernel: str):
        return module.function(kernel)

    def launch(self, function, grid, block, args, shared_bytes: int, dependent=False) -> None:
        function(grid, block, args, shared_bytes, dependent=dependent)

    def upload(self, array: np.ndarray) -> np.ndarray:
        self.emulator.settle()
        return np.array(array, order="C")

    def download(self, array: np.ndarray) -> np.ndarray:
        self.emulator.settle()
        return np.array(array)

    def fetch(self, arrays: tuple):
        hosts = tuple(np.array(array) for array in arrays)
        return lambda: hosts

    def empty(self, shape, dtype) -> np.ndarray:
        return np.empty(shape, dtype)

    def capture(self, run):
        """See CudaOps.capture; here a replay runs everything again, into the same arrays."""
        outputs = run()

        def replay() -> None:
            for old, new in zip(outputs, run(), strict=True):
                if old is not None:
                    old[...] = new

        return Captured(outputs, replay)

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def block_map(self, array: np.ndarray) -> np.ndarray:
        """See CudaLauncher.block_map."""
        return np.array([array.ctypes.data, array.strides[0], *(0,) * 14], np.uint64)

    def share(self, size: int):
        """See CudaLauncher.share."""
        descriptor = os.memfd_create("kdtree", os.MFD_CLOEXEC)
        os.truncate(descriptor, size)
        array = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        weakref.finalize(array, os.close, descriptor)
        return array, (f"/proc/{os.getpid()}/fd/{descriptor}", size)

    def map(self, handle) -> int:
        """See CudaLauncher.map."""
        path, size = handle
        with open(path, "r+b") as file:
            array = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        self.mapped.append(array)
        return self.address(array)

    def write(self, address: int, data: np.ndarray) -> None:
        """See CudaLauncher.write."""
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def word(self):
        """See CudaLauncher.word."""
        both = np.zeros(1, np.uint64)
        return both, both

    def free_bytes(self) -> int:
        return free_memory()

    def trim(self) -> None:
        """Nothing is kept for later here."""

    def seconds(self, run: Callable[[], object]) -> float:
        """How long the host takes to emulate what run() starts."""
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, begin: float, end: float) -> float:
        return end - begin

    def synchronize(self) -> None:
        self.emulator.settle()


def _bits(dtype) -> np.dtype:
    """The integer type of the same size: copies need no knowledge of bfloat16."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


def ceil(n: int, unit: int) -> int:
    """Units that hold n."""
    return -(-n // unit)
