"""The emulator itself: CUDA's semantics on small kernels; planted faults, found at their lines."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

from tests.emulator import emulator
from tests.emulator.emulator import EmulatorError, Module

ml_dtypes = pytest.importorskip("ml_dtypes")
bfloat16 = ml_dtypes.bfloat16

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=str(emulator.missing()))

# ---------------------------------------------------------------- planted faults
# Compiled together, plain and checked. `// <name>` marks the line that a message must name,
# `// <name>+` a second one.

FAULTS = r"""
extern "C" __global__ void global_read(const float* x, float* y) {
  const int i = threadIdx.x;
  y[i] = x[i + 1];  // global_read
}
extern "C" __global__ void global_write(float* y, int stride) {
  y[(long)threadIdx.x * stride] = 1;  // global_write
}
extern "C" __global__ void dynamic_shared(float* y) {
  extern __shared__ float tile[];
  tile[threadIdx.x] = 1;  // dynamic_shared
  y[threadIdx.x] = tile[threadIdx.x];
}
__device__ void fill(float* p, int n) {
  for (int i = 0; i < n; i++)
    p[i] = 0;  // static_shared
}
extern "C" __global__ void static_shared(float* y, int n) {
  __shared__ float rows[2][8];  // another comment; with a semicolon
  __shared__ int other;
  if (threadIdx.x == 0) fill(&rows[0][0], n);
  if (threadIdx.x == 0) other = n;
  y[threadIdx.x] = 0;
}
extern "C" __global__ void array_index(float* y, int n) {
  float local[4] = {1, 2, 3, 4};
  y[threadIdx.x] = local[n];  // array_index
}
extern "C" __global__ void missing_barrier(float* y) {
  __shared__ float tile[64];
  tile[threadIdx.x] = threadIdx.x;  // missing_barrier+
  y[threadIdx.x] = tile[63 - threadIdx.x];  // missing_barrier
}
extern "C" __global__ void overwritten(float* y) {
  __shared__ float tile[64];
  for (int i = 0; i < 2; i++) {
    tile[threadIdx.x] = i;  // overwritten
    __syncthreads();
    y[threadIdx.x] = tile[63 - threadIdx.x];  // overwritten+
  }
}
extern "C" __global__ void missing_syncwarp(float* y) {
  __shared__ float tile[32];
  tile[threadIdx.x] = threadIdx.x;  // missing_syncwarp+
  const float sum = __shfl_xor_sync(~0u, 1.0f, 1);  // a shuffle orders no memory
  y[threadIdx.x] = sum + tile[31 - threadIdx.x];  // missing_syncwarp
}
extern "C" __global__ void between_blocks(float* y) {
  y[threadIdx.x] = blockIdx.x;  // between_blocks
}
extern "C" __global__ void atomic_and_plain(int* y) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);  // atomic_and_plain+
  y[threadIdx.x] = count;  // atomic_and_plain
}
extern "C" __global__ void divergent_barrier(float* y) {
  if (threadIdx.x < 32) {
    y[threadIdx.x] = 1;
    __syncthreads();  // divergent_barrier
  } else {
    y[threadIdx.x] = 2;
    __syncthreads();  // divergent_barrier+
  }
}
extern "C" __global__ void left_before_barrier(float* y, int n) {
  if (threadIdx.x >= n) return;
  y[threadIdx.x] = 1;
  __syncthreads();  // left_before_barrier
}
extern "C" __global__ void missing_wait(const float4* x, float4* y) {
  __shared__ float4 tile[32];
  cp_async_16(&tile[threadIdx.x], &x[threadIdx.x]);  // missing_wait+
  cp_async_commit();
  y[threadIdx.x] = tile[threadIdx.x];  // missing_wait
  cp_async_wait<0>();
}
extern "C" __global__ void wait_too_weak(const float4* x, float4* y) {
  __shared__ float4 tile[2][32];
  for (int i = 0; i < 2; i++) {
    cp_async_16(&tile[i][threadIdx.x], &x[threadIdx.x]);  // wait_too_weak+
    cp_async_commit();
  }
  cp_async_wait<1>();
  y[threadIdx.x] = tile[1][threadIdx.x];  // wait_too_weak
  cp_async_wait<0>();
}
extern "C" __global__ void wait_without_barrier(const float4* x, float4* y) {
  __shared__ float4 tile[32];
  cp_async_16(&tile[threadIdx.x], &x[threadIdx.x]);  // wait_without_barrier+
  cp_async_commit();
  cp_async_wait<0>();
  y[threadIdx.x] = tile[threadIdx.x ^ 1];  // wait_without_barrier
}
extern "C" __global__ void copy_past_end(const float4* x, float* y) {
  __shared__ float4 tile[32];
  cp_async_16(&tile[threadIdx.x], &x[threadIdx.x + 1]);  // copy_past_end
  cp_async_commit();
  cp_async_wait<0>();
  y[threadIdx.x] = 0;
}
extern "C" __global__ void mask_without_caller(float* y) {
  y[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 0);  // mask_without_caller
}
extern "C" __global__ void mask_with_absent(float* y) {
  float v = threadIdx.x;
  if (threadIdx.x < 16) v += __shfl_xor_sync(0xffffffffu, v, 8);  // mask_with_absent
  y[threadIdx.x] = v;
}
extern "C" __global__ void shuffle_from_outside(float* y) {
  float v = threadIdx.x;
  if (threadIdx.x < 16) v += __shfl_xor_sync(0x0000ffffu, v, 16);  // shuffle_from_outside
  y[threadIdx.x] = v;
}
extern "C" __global__ void unwritten_output(float* y, int n) {  // unwritten_output
  if (threadIdx.x < n) y[threadIdx.x] = 1;
}
extern "C" __global__ void output_read_first(float* y) {
  y[threadIdx.x] += 1;  // output_read_first
}
extern "C" __global__ void unwritten_shared(float* y) {
  __shared__ float tile[33];
  tile[threadIdx.x] = 1;
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x + 1];  // unwritten_shared
}
extern "C" __global__ void misaligned(const float* x, float* y, int offset) {
  const float4 v = *reinterpret_cast<const float4*>(x + offset);  // misaligned
  y[threadIdx.x] = v.x + v.w;
}
extern "C" __global__ void const_written(const float* x) {
  const_cast<float*>(x)[threadIdx.x] = 0;  // const_written
}
extern "C" __global__ void null_pointer(float* y) {
  y[threadIdx.x] = 1;  // null_pointer
}
extern "C" __global__ void divides(int* y, int n) {
  y[threadIdx.x] = 7 / n;  // divides
}
extern "C" __global__ void shifts(int* y, int n) {
  y[threadIdx.x] = 1 << n;  // shifts
}
__noinline__ int deep(int n) { volatile int r[512]; return r[n] = n && deep(n - 1); }  // stack
extern "C" __global__ void stack(int* y, int n) { y[threadIdx.x] = deep(n); }
extern "C" __global__ void asserts(int* y, int n) {
  assert(n < 3);  // asserts
  y[threadIdx.x] = n;
}
extern "C" __global__ void never_arrives(const float4* x, float4* y) {
  __shared__ float4 tile[32];
  __shared__ unsigned long long bar;
  if (threadIdx.x == 0) mbarrier_init(&bar, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_expect(&bar, 1024);
    bulk_copy(tile, x, 512, &bar);
  }
  mbarrier_wait(&bar, 0);  // never_arrives
  y[threadIdx.x] = tile[threadIdx.x];
}
extern "C" __global__ void bulk_not_waited(const float4* x, float4* y) {
  __shared__ float4 tile[32];
  __shared__ unsigned long long bar;
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    mbarrier_expect(&bar, 512);
    bulk_copy(tile, x, 512, &bar);  // bulk_not_waited+
  }
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x];  // bulk_not_waited
}
extern "C" __global__ void no_dependency_wait(float* y) {
  if (threadIdx.x < 31) grid_dependency_wait();
}
extern "C" __global__ void early_write(float* y) {
  y[threadIdx.x] = 1;  // early_write
  grid_dependency_wait();
}
extern "C" __global__ void begin_next(float* y, int late) {
  if (!late) grid_dependency_launch();
  grid_dependency_wait();
  grid_dependency_launch();
  y[threadIdx.x] = 1;
}
extern "C" __global__ void early_read(const float* x, float* y) {
  const float v = x[threadIdx.x];  // early_read
  grid_dependency_wait();
  y[threadIdx.x] = v;
}
extern "C" __global__ void spoiled_ldmatrix(unsigned* y) {
  __shared__ __align__(16) unsigned short tile[8][12];
  for (int i = threadIdx.x; i < 96; i += 32) (&tile[0][0])[i] = i;
  __syncwarp();
  unsigned r[1];
  ldmatrix_x1(r, &tile[threadIdx.x % 8][0]);  // spoiled_ldmatrix
  y[threadIdx.x] = r[0];
}
"""


@pytest.fixture(scope="module")
def plain() -> Module:
    return Module(FAULTS, name="faults.cu")


@pytest.fixture(scope="module")
def checked() -> Module:
    return Module(FAULTS, name="faults.cu", checked=True)


def line_of(mark: str) -> str:
    lines = [i for i, s in enumerate(FAULTS.splitlines(), 1) if s.endswith(f"// {mark}")]
    assert len(lines) == 1
    return f"faults.cu:{lines[0]}"


def floats(n: int) -> np.ndarray:
    return np.zeros(n, np.float32)


i32 = np.int32
# name, words of the message, (grid, block), arguments, dynamic shared bytes, outputs
CHECKED = [
    ("global_read", "past the end of parameter `x`", (1, 32), (floats(32), floats(32)), 0, ()),
    ("dynamic_shared", "4 bytes past the end of dynamic shared", (1, 32), (floats(32),), 124, ()),
    ("static_shared", "shared `float rows[2][8]`", (1, 32), (floats(32), i32(17)), 0, ()),
    ("array_index", "an index outside its array", (1, 32), (floats(32), i32(4)), 0, ()),
    ("missing_barrier", "race: reads|race: writes", (1, 64), (floats(64),), 0, ()),
    ("overwritten", "race: reads|race: writes", (1, 64), (floats(64),), 0, ()),
    ("missing_syncwarp", "race: reads|race: writes", (1, 32), (floats(32),), 0, ()),
    ("between_blocks", "another block's thread", (2, 32), (floats(32),), 0, ()),
    ("atomic_and_plain", "race: reads|race: updates", (1, 64), (np.zeros(64, i32),), 0, ()),
    ("missing_wait", "not waited for", (1, 32), (floats(128), floats(128)), 0, ()),
    ("wait_too_weak", "not waited for", (1, 32), (floats(128), floats(128)), 0, ()),
    ("wait_without_barrier", "race: ", (1, 32), (floats(128), floats(128)), 0, ()),
    ("copy_past_end", "16 bytes past the end of", (1, 32), (floats(128), floats(32)), 0, ()),
    ("unwritten_output", "12 of 128 bytes are missing", (1, 32), (floats(32), i32(29)), 0, "y"),
    ("output_read_first", "holds no value yet", (1, 32), (floats(32),), 0, "y"),
    ("unwritten_shared", "no thread of this block had", (1, 32), (floats(32),), 0, ()),
    ("misaligned", "misaligned access", (1, 32), (floats(36), floats(32), i32(1)), 0, ()),
    ("const_written", "declares const", (1, 32), (floats(32),), 0, ()),
    ("null_pointer", "null pointer", (1, 32), (None,), 0, ()),
    ("shifts", "a shift by", (1, 32), (np.zeros(32, i32), i32(32)), 0, ()),
    ("bulk_not_waited", "not waited for", (1, 32), (floats(128), floats(128)), 0, ()),
]
BOTH = [
    ("divergent_barrier", "divergent barrier: waits in", (1, 64), (floats(64),)),
    ("left_before_barrier", "the kernel without", (1, 64), (floats(64), i32(40))),
    ("mask_without_caller", "leaves out the calling lane", (1, 32), (floats(32),)),
    ("mask_with_absent", "has left the kernel|leaves the kernel while", (1, 32), (floats(32),)),
    ("shuffle_from_outside", "does not name", (1, 32), (floats(32),)),
    ("divides", "zero", (1, 32), (np.zeros(32, i32), i32(0))),
    ("stack", "overflows its stack of 64 KB", (1, 1), (np.zeros(1, i32), i32(500))),
    ("asserts", "assertion failed: n < 3", (1, 32), (np.zeros(32, i32), i32(3))),
    ("never_arrives", "no thread can go on", (1, 32), (floats(128), floats(128))),
    ("spoiled_ldmatrix", "a misaligned address", (1, 32), (np.zeros(32, np.uint32),)),
]  # fmt: skip


def assert_fault(module: Module, name: str, words: str, shape: tuple, args: tuple, **more) -> None:
    with pytest.raises(EmulatorError) as caught:
        module.function(name)((shape[0],), (shape[1],), args, **more)
    text = str(caught.value)
    assert text.startswith(f"kernel {name}"), text
    assert re.search("|".join(re.escape(w) for w in words.split("|")), text), text
    for mark in (name, name + "+"):
        if f"// {mark}\n" in FAULTS:
            assert re.search(re.escape(line_of(mark)) + r"\b", text), text
    if name != "unwritten_output":
        assert re.search(r"block \(\d,0,0\), thread \(\d+,0,0\)", text), text


@pytest.mark.parametrize(
    "name, words, shape, args, shared, outputs", CHECKED, ids=[c[0] for c in CHECKED]
)
def test_checked_build_finds(checked, name, words, shape, args, shared, outputs):
    for seed in range(3):  # found in whatever order the threads run
        assert_fault(
            checked, name, words, shape, args, shared_bytes=shared, outputs=outputs, seed=seed
        )


@pytest.mark.parametrize("build", ["plain", "checked"])
@pytest.mark.parametrize("name, words, shape, args", BOTH, ids=[c[0] for c in BOTH])
def test_both_builds_find(request, build, name, words, shape, args):
    if (build, name) == ("checked", "stack"):
        words = "overflows its stack"
    for seed in range(3):
        assert_fault(request.getfixturevalue(build), name, words, shape, args, seed=seed)


@pytest.mark.parametrize("build", ["plain", "checked"])
def test_a_dependent_launch_waits(request, build):
    """In every thread, and before it writes, or reads what the launches in front write."""
    module = request.getfixturevalue(build)
    x, y = floats(32), floats(32)
    words = "leaves without grid_dependency_wait"
    assert_fault(module, "no_dependency_wait", words, (1, 32), (x,), dependent=True)
    if build == "plain":
        return
    assert_fault(module, "early_write", "before grid_dep", (1, 32), (x,), dependent=True)
    read = module.function("early_read")
    read((1,), (32,), (x, y))
    read((1,), (32,), (x, y), dependent=True)  # a weight: no launch has written it
    assert_fault(module, "early_read", "before grid_dep", (1, 32), (y, x), dependent=True)
    emulator.settle()
    read((1,), (32,), (y, x), dependent=True)
    # What the next to last launch wrote is there if the last one let this one begin after its wait.
    begin, z = module.function("begin_next"), floats(32)
    for late in (1, 0):
        read((1,), (32,), (x, y))
        begin((1,), (32,), (z, i32(late)), dependent=True)
        if late:
            read((1,), (32,), (y, x), dependent=True)
    assert_fault(module, "early_read", "before grid_dep", (1, 32), (y, x), dependent=True)


CLUSTER = r"""
extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(32) around(float* y) {
  __shared__ float parts[4];
  cluster_sync();
  if (threadIdx.x < 4) *cluster_map(parts + blockIdx.x % 4, threadIdx.x) = blockIdx.x;
  cluster_sync();
  if (threadIdx.x == 0) y[blockIdx.x] = parts[0] + 10 * parts[1] + 100 * parts[2] + 1000 * parts[3];
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) left_before_cluster(float* y) {
  __shared__ float part;
  if (blockIdx.x) return;
  cluster_sync();
  y[0] = part;
}
"""


@pytest.mark.parametrize("checked", (False, True))
def test_blocks_of_a_cluster_write_into_each_other(checked):
    module, y = Module(CLUSTER, name="cluster.cu", checked=checked), floats(8)
    for seed in range(3):
        module.function("around")((8,), (32,), (y,), seed=seed)
        assert y.tolist() == [3210] * 4 + [7654] * 4
    with pytest.raises(EmulatorError, match="6 blocks in clusters of 4"):
        module.function("around")((6,), (32,), (y,))
    with pytest.raises(EmulatorError, match="no thread can go on|without"):
        module.function("left_before_cluster")((2,), (32,), (y,))


def test_unmapped_write_is_located(plain):
    stride = i32(2**28)
    assert_fault(plain, "global_write", "which is not mapped", (1, 32), (floats(32), stride))


def test_missing_barrier_shows_in_values(plain):
    """Without the checker, a shuffled order makes the race a wrong result under some seed."""
    expected = np.arange(63, -1, -1, dtype=np.float32)
    results = []
    for seed in range(8):
        y = floats(64)
        plain.function("missing_barrier")((1,), (64,), (y,), seed=seed)
        results.append(y.tobytes())
    assert any(r != expected.tobytes() for r in results)
    assert len(set(results)) > 1


def test_missing_wait_shows_in_values(plain):
    """cp.async delivers at its wait: shared memory still holds the NaN it starts with."""
    y = floats(128)
    plain.function("missing_wait")((1,), (32,), (np.ones(128, np.float32), y))
    assert np.isnan(y).all()


# ---------------------------------------------------------------- launches CUDA would refuse

LAUNCH = r"""
extern "C" __global__ void __launch_bounds__(128) scale(
    const float* x,  // [n]
    float* y,        // [n]
    int n, float a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i];
}
#define COPY(name, U) \
  extern "C" __global__ void name(const U* from, U* to) { to[threadIdx.x] = from[threadIdx.x]; }
COPY(copy_bf16, __nv_bfloat16)
COPY(copy_bits, unsigned short)
COPY(copy_half, __half)
COPY(copy_bytes, unsigned char)
struct Shape { int rows, columns; double factor; };
extern "C" __global__ void by_value(Shape s, double* y) {
  y[threadIdx.x] = s.rows * s.columns * s.factor;
}
__global__ void mangled(int) {}
template <class U> __global__ void generic(U) {}
"""


@pytest.fixture(scope="module")
def launch() -> Module:
    return Module(LAUNCH, ("-DT=4", "--fmad=false"), "launch.cu")


X, Y = np.arange(32, dtype=np.float32), floats(32)


@pytest.mark.parametrize(
    "args, message",
    [
        ((X, Y, i32(4)), "3 arguments, expected 4: x, y, n, a"),
        ((X, Y, 4, np.float32(2)), "argument 2 `n`: expected int32, got int: cast it"),
        ((X, Y, np.int64(4), np.float32(2)), "argument 2 `n`: expected int32, got int64"),
        ((X, Y, np.uint32(4), np.float32(2)), "argument 2 `n`: expected int32, got uint32"),
        ((X, Y, i32(4), 2.0), "argument 3 `a`: expected float32, got float: cast it"),
        ((X, Y, i32(4), np.float64(2)), "argument 3 `a`: expected float32, got float64"),
        ((X.astype(np.float64), Y, i32(4), np.float32(2)), "`x`: expected float32, got float64"),
        ((X.astype(i32), Y, i32(4), np.float32(2)), "`x`: expected float32, got int32"),
        ((X[::2], Y, i32(4), np.float32(2)), "`x`: expected a contiguous array"),
        ((X.tolist(), Y, i32(4), np.float32(2)), "`x`: expected an array, got list"),
    ],
)
def test_wrong_arguments(launch, args, message):
    with pytest.raises(EmulatorError, match=re.escape(message)) as caught:
        launch.function("scale")((1,), (32,), args)
    assert "kernel scale" in str(caught.value)


def test_wrong_shapes(launch):
    kernel, args = launch.function("scale"), (X, Y, i32(4), np.float32(2))
    with pytest.raises(EmulatorError, match="launch bounds allow 128"):
        kernel((1,), (256,), args)
    with pytest.raises(EmulatorError, match=r"grid \(0,\)"):
        kernel((0,), (32,), args)
    with pytest.raises(EmulatorError, match="max_dynamic_shared_size_bytes is 49152"):
        kernel((1,), (32,), args, 50000)
    kernel.max_dynamic_shared_size_bytes = 100_000
    kernel((1,), (32,), args, 50000)
    with pytest.raises(EmulatorError, match='no extern "C" kernel mangled'):
        launch.function("mangled")
    assert "generic" not in launch.names


def test_element_types(launch):
    half, brain = X.astype(np.float16), X.astype(bfloat16)
    for name, value in (
        ("copy_half", half),
        ("copy_bf16", brain),
        ("copy_bits", brain),
        ("copy_bits", half),
        ("copy_bf16", brain.view(np.uint16)),
    ):
        out = np.zeros_like(value)
        launch.function(name)((1,), (32,), (value, out))
        assert out.tobytes() == value.tobytes()
    with pytest.raises(EmulatorError, match="expected bfloat16, got float16"):
        launch.function("copy_bf16")((1,), (32,), (half, half.copy()))
    out = np.zeros(32, np.uint8)
    launch.function("copy_bytes")((1,), (32,), (X, out))
    assert out.tobytes() == X.tobytes()[:32]


def test_structure_by_value(launch):
    kind = np.dtype([("rows", "i4"), ("columns", "i4"), ("factor", "f8")])
    y = np.zeros(1)
    launch.function("by_value")((1,), (1,), (np.array((3, 5, 0.5), kind)[()], y))
    assert y[0] == 7.5
    with pytest.raises(EmulatorError, match="expected a structure of 16 bytes"):
        launch.function("by_value")((1,), (1,), (np.float32(1), y))


def test_source_errors():
    with pytest.raises(EmulatorError, match=r"broken.cu:3"):
        Module('\nextern "C" __global__ void k() {\n  nonsense;\n}\n', name="broken.cu")
    with pytest.raises(EmulatorError, match="option '-O3'"):
        Module("", ("-O3",))
    with pytest.raises(EmulatorError, match="broken.cu:1: declare `s` inside"):
        Module("extern __shared__ float s[];", name="broken.cu")


# ---------------------------------------------------------------- CUDA's semantics

SEMANTICS = r"""
#include <cuda_bf16.h>
extern "C" __global__ void warp(int* y) {  // [12, 32]
  const int lane = threadIdx.x, v = lane * lane;
  y[lane] = __shfl_sync(~0u, v, lane + 1, 8);
  y[32 + lane] = __shfl_up_sync(~0u, v, 3, 16);
  y[64 + lane] = __shfl_down_sync(~0u, v, 3, 16);
  y[96 + lane] = __shfl_xor_sync(~0u, v, 5);
  y[128 + lane] = __ballot_sync(~0u, lane % 3 == 0);
  y[160 + lane] = __match_any_sync(~0u, lane % 5);
  y[192 + lane] = __reduce_add_sync(~0u, v);
  y[224 + lane] = __reduce_min_sync(~0u, lane - 7);
  y[256 + lane] = __reduce_max_sync(~0u, unsigned(lane - 7));
  if (lane < 12) y[288 + lane] = __reduce_xor_sync(0xfffu, unsigned(v)); else y[288 + lane] = -1;
  y[320 + lane] = __all_sync(~0u, lane >= 0) * 2 + __any_sync(~0u, lane == 40);
  y[352 + lane] = int(__shfl_xor_sync(~0u, (long long)lane << 40, 1) >> 40);
}
extern "C" __global__ void votes(int* y) {
  const int t = threadIdx.x + blockDim.x * threadIdx.y;
  const int count = __syncthreads_count(t % 3 == 0);
  y[t] = count * 4 + __syncthreads_and(t >= 0) * 2 + __syncthreads_or(t == 99);
}
extern "C" __global__ void atomics(int* i, float* f, unsigned* u) {
  atomicAdd(i, 2);
  atomicMax(i + 1, int(threadIdx.x));
  atomicAdd(f, 1.0f);
  atomicCAS(u, threadIdx.x, threadIdx.x + 1000);
  atomicOr(u + 1, 1u << (threadIdx.x % 32));
  atomicInc(u + 2, 9u);
}
// D[16, 8] += A[16, 16] B[16, 8] through ldmatrix, B stored by rows (.trans) and by columns.
typedef __nv_bfloat16 bf16;
extern "C" __global__ void matmul(const bf16* a, const bf16* b, const bf16* bt, float* d,
                                  float* dt) {
  __shared__ __align__(16) bf16 as[16][16], bs[16][8], bts[8][16];
  const int lane = threadIdx.x, g = lane >> 2, t = lane & 3;
  for (int i = lane; i < 256; i += 32) as[i / 16][i % 16] = a[i];
  for (int i = lane; i < 128; i += 32) { bs[i / 8][i % 8] = b[i]; bts[i / 16][i % 16] = bt[i]; }
  __syncwarp();
  unsigned ra[4], rb[2], rt[2];
  ldmatrix_x4(ra, &as[lane & 15][(lane >> 4) * 8]);
  ldmatrix_x2_trans(rb, &bs[lane & 15][0]);
  ldmatrix_x2(rt, &bts[lane & 7][(lane >> 3 & 1) * 8]);
  float s[4] = {1, 1, 1, 1}, st[4] = {1, 1, 1, 1};
  mma_bf16(s, ra, rb[0], rb[1]);
  mma_bf16(st, ra, rt[0], rt[1]);
  for (int i = 0; i < 4; i++) {
    d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = s[i];
    dt[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = st[i];
  }
}
// Two stages of cp.async; the last piece is short and filled with zeros.
extern "C" __global__ void pipeline(const float* x, float* y, int pieces, int valid) {
  __shared__ float4 stage[2][32];
  auto load = [&](int p) {
    if (p < pieces) {
      const int at = (p * 32 + int(threadIdx.x)) * 4, bytes = max(0, min(16, (valid - at) * 4));
      cp_async_16(&stage[p & 1][threadIdx.x], bytes ? x + at : x, bytes);
    }
    cp_async_commit();
  };
  load(0);
  for (int p = 0; p < pieces; p++) {
    load(p + 1);
    cp_async_wait<1>();
    __syncthreads();  // all pieces of this stage have arrived
    reinterpret_cast<float4*>(y)[p * 32 + threadIdx.x] = stage[p & 1][31 - threadIdx.x];
    __syncthreads();  // all have read before the next load overwrites
  }
  cp_async_wait<0>();
}
// Warp 0 produces with bulk copies, warp 1 consumes: full and empty barriers, two stages.
extern "C" __global__ void producer(const float* x, float* y, int pieces) {
  __shared__ __align__(128) float stage[2][32];
  __shared__ unsigned long long full[2], empty[2];
  if (threadIdx.x == 0)
    for (int i = 0; i < 2; i++) { mbarrier_init(&full[i], 1); mbarrier_init(&empty[i], 32); }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int p = 0; p < pieces; p++) {
      if (p >= 2) mbarrier_wait(&empty[p & 1], (p / 2 - 1) & 1);
      mbarrier_expect(&full[p & 1], 128);
      bulk_copy(stage[p & 1], x + p * 32, 128, &full[p & 1]);
    }
  } else if (threadIdx.x >= 32) {
    const int lane = threadIdx.x - 32;
    for (int p = 0; p < pieces; p++) {
      mbarrier_wait(&full[p & 1], p / 2 & 1);
      y[p * 32 + lane] = stage[p & 1][31 - lane];
      mbarrier_arrive(&empty[p & 1]);
    }
  }
}
extern "C" __global__ void grid(float* y, float* total) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x + 1;
  cooperative_groups::this_grid().sync();
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    float s = 0;
    for (unsigned i = 0; i < gridDim.x * blockDim.x; i++) s += y[i];
    total[0] = s;
  }
}
// The last block to finish adds up what all left behind.
extern "C" __global__ void last_block(float* parts, float* total, unsigned* ticket) {
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = blockIdx.x;
    __threadfence();
    if (atomicAdd(ticket, 1u) == gridDim.x - 1) {
      float s = 0;
      for (unsigned i = 0; i < gridDim.x; i++) s += parts[i];
      total[0] = s;
    }
  }
}
template <int N> __device__ float tree(float v) {
  __shared__ float parts[N];
  parts[threadIdx.x] = v;
  __syncthreads();
  for (int d = 1; d < N; d *= 2) {
    if (threadIdx.x % (2 * d) == 0) parts[threadIdx.x] += parts[threadIdx.x + d];
    __syncthreads();
  }
  return parts[0];
}
extern "C" __global__ void shared_in_templates(float* y) {
  extern __shared__ __align__(16) unsigned char raw[];
  float* copy = reinterpret_cast<float*>(raw);
  const float a = tree<64>(threadIdx.x);
  copy[threadIdx.x] = a;
  y[blockIdx.x * 64 + threadIdx.x] = copy[threadIdx.x];
}
extern "C" __global__ void arithmetic(float* y, unsigned* u, const float* x) {
  y[0] = __fmaf_rn(x[0], x[1], x[2]);
  y[1] = x[0] * x[1] + x[2];
  y[2] = exp2_approx(-127.0f);
  y[3] = exp2_approx(3.0f);
  y[4] = rsqrtf(4.0f);
  y[5] = __bfloat162float(__float2bfloat16_rn(1.00390625f));
  u[0] = __byte_perm(0x33221100, 0x77665544, 0x7610);
  u[1] = __funnelshift_r(0x11112222, 0x33334444, 16);
  u[2] = __clz(1) * 10000 + __popc(255) * 100 + __ffs(8);
  u[3] = __umulhi(0x80000000u, 6u);
  u[4] = __float2int_rn(2.5f) * 10 + __float2int_rz(-1.5f);
}
"""


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checked"])
def semantics(request) -> Module:
    return Module(SEMANTICS, name="semantics.cu", checked=request.param)


def test_warp_operations(semantics):
    y = np.zeros((12, 32), i32)
    semantics.function("warp")((1,), (32,), (y,), outputs=("y",))
    lane = np.arange(32)
    v = lane * lane
    up = np.where(lane % 16 >= 3, lane - 3, lane)
    down = np.where(lane % 16 + 3 < 16, lane + 3, lane)
    expected = [
        v[lane // 8 * 8 + (lane + 1) % 8], v[up], v[down], v[lane ^ 5],
        sum(1 << i for i in range(32) if i % 3 == 0) - 0,
        [sum(1 << j for j in range(32) if j % 5 == i % 5) for i in range(32)],
        v.sum(), -7, -1,
        np.where(lane < 12, np.bitwise_xor.reduce(v[:12]), -1), 2, lane ^ 1,
    ]  # fmt: skip
    for row, want in zip(y, expected, strict=True):
        np.testing.assert_array_equal(row.astype(np.uint32), np.broadcast_to(want, 32) & 0xFFFFFFFF)


def test_block_votes(semantics):
    y = np.zeros(60, i32)
    semantics.function("votes")((1,), (10, 6), (y,))
    assert (y == 20 * 4 + 2).all()


def test_atomics(semantics):
    i, f, u = np.zeros(2, i32), floats(1), np.zeros(3, np.uint32)
    semantics.function("atomics")((4,), (64,), (i, f, u))
    assert i.tolist() == [512, 63] and f[0] == 256
    assert u.tolist() == [1000, 0xFFFFFFFF, 256 % 10]


def test_mma_and_ldmatrix(semantics):
    rng = np.random.default_rng(0)
    # Small integers: products and sums are exact, so a wrong element cannot hide.
    a = rng.integers(-8, 9, (16, 16)).astype(bfloat16)
    b = rng.integers(-8, 9, (16, 8)).astype(bfloat16)
    d, dt = np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
    args = (a, b, np.ascontiguousarray(b.T), d, dt)
    semantics.function("matmul")((1,), (32,), args, outputs=("d", "dt"))
    expected = a.astype(np.float32) @ b.astype(np.float32) + 1
    np.testing.assert_array_equal(d, expected)
    np.testing.assert_array_equal(dt, expected)


@pytest.mark.parametrize("seed", range(3))
def test_asynchronous_copies(semantics, seed):
    x, y = np.arange(1, 513, dtype=np.float32), floats(512)
    semantics.function("pipeline")((1,), (32,), (x, y, i32(4), i32(509)), outputs="y", seed=seed)
    x[509:] = 0
    np.testing.assert_array_equal(y.reshape(4, 32, 4), x.reshape(4, 32, 4)[:, ::-1])
    x, y = np.arange(224, dtype=np.float32), floats(224)
    semantics.function("producer")((1,), (64,), (x, y, i32(7)), outputs=("y",), seed=seed)
    np.testing.assert_array_equal(y.reshape(7, 32), x.reshape(7, 32)[:, ::-1])


def test_blocks_together(semantics):
    y, total = floats(96), floats(1)
    kernel = semantics.function("grid")
    kernel((3,), (32,), (y, total), cooperative=True, outputs=("y", "total"))
    assert total[0] == 32 * (1 + 2 + 3)
    with pytest.raises(EmulatorError, match="not cooperative"):
        kernel((3,), (32,), (y, total))
    args = (floats(8), floats(1), np.zeros(1, np.uint32))
    semantics.function("last_block")((8,), (32,), args)
    assert args[1][0] == 28


def test_shared_memory_of_templates(semantics):
    y = floats(128)
    semantics.function("shared_in_templates")((2,), (64,), (y,), 256, outputs=("y",))
    assert (y == 64 * 63 / 2).all()


def test_arithmetic(semantics):
    x = np.array([1 + 2**-12, 1 + 2**-12, -1 - 2**-11], np.float32)
    y, u = floats(6), np.zeros(5, np.uint32)
    semantics.function("arithmetic")((1,), (1,), (y, u, x))
    assert y.tolist() == [2**-24, 0, 0, 8, 0.5, 1.0]  # fused; not contracted; flushed
    assert u.tolist() == [0x77661100, 0x44441111, 310804, 3, 19]


def test_same_seed_same_order(plain):
    """A failure can be run again: the order of threads is the seed's."""

    def run(seed: int) -> bytes:
        y = floats(64)
        plain.function("missing_barrier")((1,), (64,), (y,), seed=seed)
        return y.tobytes()

    assert run(5) == run(5)


@pytest.mark.skipif(not shutil.which("gcov"), reason="coverage needs gcov")
def test_coverage(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # counts of no earlier run
    source = (
        LAUNCH
        + """
    extern "C" __global__ void branch(int* y, int n) {
      if (n > 2)
        y[threadIdx.x] = n;
      else
        y[threadIdx.x] = n * n * n;
    }"""
    )
    module = Module(source, name="covered.cu", coverage=True)
    y = np.zeros(4, i32)
    module.function("branch")((1,), (4,), (y, i32(3)))
    lines = source.splitlines()
    ran = module.executed_lines()
    assert ran[lines.index("        y[threadIdx.x] = n;") + 1]
    assert not ran[lines.index("        y[threadIdx.x] = n * n * n;") + 1]
    module.function("branch")((1,), (4,), (y, i32(2)))
    assert module.executed_lines()[lines.index("        y[threadIdx.x] = n * n * n;") + 1]
