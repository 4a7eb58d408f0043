// CUDA C++ for a host compiler: what a kernel's source sees when it is built for the emulator.
//
// Every CUDA thread is a fiber (runtime.cpp). Functions here that need other threads hand over to
// the runtime; the rest is plain C++. The loader (emulator.py) defines KDTREE_EMULATOR, includes
// this file before the kernels and rewrites `__shared__` declarations into `emulator::shared<...>`.
#pragma once

#include <sched.h>

#include <cassert>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

// After the standard headers, and before the qualifiers below, which these headers define as well.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __launch_bounds__
#undef __cluster_dims__
#undef __grid_constant__
#undef __forceinline__
#undef __noinline__
#undef __shared__
// Kernels keep a frame of their own, so that an address in one belongs to the kernel's source.
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
// GCC takes the attribute, and not the keyword, in every place where CUDA code writes it.
#define alignas(bytes) __attribute__((aligned(bytes)))

#undef assert
#define assert(condition) \
  ((condition) ? (void)0 : emulator::fail_at(__builtin_FILE(), __builtin_LINE(), "assertion failed: " #condition))

// ---------------------------------------------------------------- the runtime's side
namespace emulator {

struct BlockView { uint3 index; dim3 threads; dim3 grid; unsigned char* dynamic; };
struct ThreadView { uint3 index; unsigned lane; BlockView* block; bool waited, early; };
extern ThreadView* current;  // the running thread; every call into the runtime may change it

enum Collective { SYNC, SHUFFLE, BALLOT, MATCH, ADD, MIN_SIGNED, MAX_SIGNED, MIN_UNSIGNED, MAX_UNSIGNED,
                  AND, OR, XOR, MMA, LDMATRIX };
enum Access { READ, WRITE, ATOMIC };
struct Mma { float* d; const unsigned* a; unsigned b0, b1; bool bf16; };
struct Ldmatrix { unsigned* r; const void* row; int count; bool transposed; };

std::uint64_t collective(unsigned mask, Collective op, std::uint64_t value, unsigned source);
int block_barrier(int predicate, Collective op, const char* file, int line);
void grid_barrier(const char* file, int line);
void cluster_barrier(const char* file, int line);
void* cluster_map(void* shared, unsigned rank);
void fence();
void yield();
void* shared_slot(const void* table, int slot);
void touch(const void* address, unsigned bytes, Access access, void* caller);
[[noreturn]] void fail_at(const char* file, int line, const char* message);
void copy_async(void* shared, const void* global, int size, int bytes);
void copy_commit();
void copy_wait(unsigned newest);
void copy_bulk(void* shared, const void* global, unsigned bytes, void* barrier);
void mbarrier_init(void* barrier, unsigned count);
void mbarrier_arrive(void* barrier, unsigned bytes);
void mbarrier_wait(void* barrier, unsigned parity);

// Static shared memory: the loader turns `__shared__ float red[8];` into a struct of that member,
// and each such struct is a slot of the module, with a gap after it that nobody may touch.
struct Slot { const char* text; int bytes, offset; };
inline Slot slots[4096];
inline int slot_count = 0, slot_bytes = 0;
inline int reserve(const char* text, int bytes) {
  slots[slot_count] = {text, bytes, slot_bytes};
  slot_bytes += (bytes + 1023) / 1024 * 1024 + 1024;
  return slot_count++;
}
template <class T> struct SlotOf { static inline const int id = reserve(T::emulator_text(), sizeof(T)); };
template <class T> inline T& shared() { return *static_cast<T*>(shared_slot(slots, SlotOf<T>::id)); }

template <class T> inline std::uint64_t pack(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a value of at most 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T> inline T unpack(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// What the loader must know of a kernel's parameter: `p` (pointer), `s` (scalar) or `v` (struct), then the
// element: kind and bytes as in NumPy (f4, i4, u2, ...), `bf2` for bfloat16, `raw` for what has no NumPy name.
template <class T> struct Element {
  static constexpr const char* name() {
    if (std::is_same<T, bool>::value) return "b1";
    if (std::is_floating_point<T>::value) return sizeof(T) == 4 ? "f4" : "f8";
    // A structure of two bytes is somebody's bfloat16: bits, but not of any other size.
    if (!std::is_integral<T>::value) return sizeof(T) == 2 ? "u2" : "raw";
    constexpr bool sign = std::is_signed<T>::value;
    return sizeof(T) == 1 ? (sign ? "i1" : "u1") : sizeof(T) == 2 ? (sign ? "i2" : "u2")
         : sizeof(T) == 4 ? (sign ? "i4" : "u4") : (sign ? "i8" : "u8");
  }
  static constexpr int align = alignof(T), size = sizeof(T);
};
template <> struct Element<void> { static constexpr const char* name() { return "raw"; } static constexpr int align = 1, size = 1; };
template <> struct Element<__half> { static constexpr const char* name() { return "f2"; } static constexpr int align = 2, size = 2; };
template <> struct Element<__half2> { static constexpr const char* name() { return "f2"; } static constexpr int align = 4, size = 4; };
template <> struct Element<__nv_bfloat16> { static constexpr const char* name() { return "bf2"; } static constexpr int align = 2, size = 2; };
template <> struct Element<__nv_bfloat162> { static constexpr const char* name() { return "bf2"; } static constexpr int align = 4, size = 4; };
template <> struct Element<float2> { static constexpr const char* name() { return "f4"; } static constexpr int align = 8, size = 8; };
template <> struct Element<float4> { static constexpr const char* name() { return "f4"; } static constexpr int align = 16, size = 16; };
struct Parameter { char kind; char constant; int size, align; const char* element; };
template <class T> constexpr Parameter parameter() {
  using P = std::remove_pointer_t<std::remove_cv_t<T>>;
  using E = std::remove_cv_t<P>;
  return {std::is_pointer<T>::value ? 'p' : std::is_arithmetic<T>::value || sizeof(T) == 2 ? 's' : 'v',
          std::is_pointer<T>::value && std::is_const<P>::value ? 'c' : ' ', int(std::is_pointer<T>::value ? Element<E>::size : sizeof(T)),
          Element<E>::align, Element<E>::name()};
}

struct Kernel { const char* name; void (*call)(void**); const void* address; int count; const Parameter* parameters; int max_threads, cluster; };
template <auto F> struct Entry;
template <class... A, void (*F)(A...)> struct Entry<F> {
  static inline const Parameter parameters[sizeof...(A) + 1] = {parameter<A>()..., {}};
  template <std::size_t... I> __attribute__((no_sanitize_thread)) static void unpack(void** a, std::index_sequence<I...>) {
    F(*static_cast<std::remove_reference_t<A>*>(a[I])...);
  }
  static void call(void** a) { unpack(a, std::index_sequence_for<A...>{}); }
  static constexpr int count = sizeof...(A);
};
constexpr int first(int value = 1024, ...) { return value; }
constexpr int cluster(int x = 1) { return x; }
constexpr int cluster(int x, int, int) { return x; }  // along x alone

}  // namespace emulator

// ---------------------------------------------------------------- names and barriers
#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->block->index)
#define blockDim (emulator::current->block->threads)
#define gridDim (emulator::current->block->grid)
constexpr int warpSize = 32;

// The line is an argument so that threads at two barriers of one kernel can be told apart.
#define EMULATOR_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(EMULATOR_HERE) { emulator::block_barrier(0, emulator::SYNC, file, line); }
inline int __syncthreads_count(int p, EMULATOR_HERE) { return emulator::block_barrier(p != 0, emulator::ADD, file, line); }
inline int __syncthreads_and(int p, EMULATOR_HERE) { return emulator::block_barrier(p != 0, emulator::AND, file, line); }
inline int __syncthreads_or(int p, EMULATOR_HERE) { return emulator::block_barrier(p != 0, emulator::OR, file, line); }
inline void __threadfence() { emulator::fence(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { emulator::fence(); }
inline void __nanosleep(unsigned) { emulator::yield(); }
inline void __trap(EMULATOR_HERE) { emulator::fail_at(file, line, "__trap()"); }

namespace cooperative_groups {
struct grid_group { void sync(EMULATOR_HERE) const { emulator::grid_barrier(file, line); } };
struct thread_block { void sync(EMULATOR_HERE) const { __syncthreads(file, line); } };
inline grid_group this_grid() { return {}; }
inline thread_block this_thread_block() { return {}; }
}  // namespace cooperative_groups

// ---------------------------------------------------------------- the warp
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::collective(mask, emulator::SYNC, 0, 0); }
template <class T> inline T emulator_shuffle(unsigned mask, T value, unsigned source) {
  return emulator::unpack<T>(emulator::collective(mask, emulator::SHUFFLE, emulator::pack(value), source));
}
template <class T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned lane = emulator::current->lane;
  return emulator_shuffle(mask, value, (lane & ~(width - 1u)) + (unsigned(source) & (width - 1u)));
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = emulator::current->lane;
  return emulator_shuffle(mask, value, (lane & (width - 1u)) >= delta ? lane - delta : lane);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = emulator::current->lane;
  return emulator_shuffle(mask, value, (lane & (width - 1u)) + delta < unsigned(width) ? lane + delta : lane);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const unsigned lane = emulator::current->lane, other = lane ^ unsigned(bits);
  return emulator_shuffle(mask, value, other <= (lane | (width - 1u)) ? other : lane);
}
inline unsigned __ballot_sync(unsigned mask, int p) { return unsigned(emulator::collective(mask, emulator::BALLOT, p != 0, 0)); }
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
template <class T> inline unsigned __match_any_sync(unsigned mask, T v) { return unsigned(emulator::collective(mask, emulator::MATCH, emulator::pack(v), 0)); }
template <class T> inline unsigned __match_all_sync(unsigned mask, T v, int* same) {
  *same = __all_sync(mask, __match_any_sync(mask, v) == mask);
  return *same ? mask : 0;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) { return unsigned(emulator::collective(mask, emulator::ADD, v, 0)); }
inline int __reduce_add_sync(unsigned mask, int v) { return int(emulator::collective(mask, emulator::ADD, unsigned(v), 0)); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) { return unsigned(emulator::collective(mask, emulator::MIN_UNSIGNED, v, 0)); }
inline int __reduce_min_sync(unsigned mask, int v) { return int(emulator::collective(mask, emulator::MIN_SIGNED, unsigned(v), 0)); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) { return unsigned(emulator::collective(mask, emulator::MAX_UNSIGNED, v, 0)); }
inline int __reduce_max_sync(unsigned mask, int v) { return int(emulator::collective(mask, emulator::MAX_SIGNED, unsigned(v), 0)); }
inline unsigned __reduce_and_sync(unsigned mask, unsigned v) { return unsigned(emulator::collective(mask, emulator::AND, v, 0)); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned v) { return unsigned(emulator::collective(mask, emulator::OR, v, 0)); }
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v) { return unsigned(emulator::collective(mask, emulator::XOR, v, 0)); }
unsigned __activemask() __attribute__((error("__activemask() has no defined value here: name the lanes")));

// ---------------------------------------------------------------- atomics
// Fibers never run at the same time, so a plain update is atomic; only the checker must hear of it.
#define EMULATOR_ATOMIC(name, result)                                                                 \
  template <class T> __attribute__((noinline, no_sanitize_thread)) T name(T* p, std::common_type_t<T> v) { \
    emulator::touch(p, sizeof(T), emulator::ATOMIC, __builtin_return_address(0));                      \
    const T old = *p;                                                                                  \
    *p = result;                                                                                       \
    return old;                                                                                        \
  }
EMULATOR_ATOMIC(atomicAdd, old + v)
EMULATOR_ATOMIC(atomicSub, old - v)
EMULATOR_ATOMIC(atomicExch, v)
EMULATOR_ATOMIC(atomicMin, v < old ? v : old)
EMULATOR_ATOMIC(atomicMax, old < v ? v : old)
EMULATOR_ATOMIC(atomicAnd, old & v)
EMULATOR_ATOMIC(atomicOr, old | v)
EMULATOR_ATOMIC(atomicXor, old ^ v)
EMULATOR_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
EMULATOR_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
template <class T> __attribute__((noinline, no_sanitize_thread)) T atomicCAS(T* p, std::common_type_t<T> compare, std::common_type_t<T> v) {
  emulator::touch(p, sizeof(T), emulator::ATOMIC, __builtin_return_address(0));
  const T old = *p;
  if (old == compare) *p = v;
  return old;
}

// ---------------------------------------------------------------- bits, arithmetic, memory hints
inline float __uint_as_float(unsigned v) { return emulator::unpack<float>(v); }
inline float __int_as_float(int v) { return emulator::unpack<float>(unsigned(v)); }
inline unsigned __float_as_uint(float v) { return unsigned(emulator::pack(v)); }
inline int __float_as_int(float v) { return int(emulator::pack(v)); }
inline double __longlong_as_double(long long v) { return emulator::unpack<double>(std::uint64_t(v)); }
inline long long __double_as_longlong(double v) { return (long long)emulator::pack(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (v >> i & 1u) << (31 - i);
  return r;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t(y) << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned nibble = selector >> (4 * i) & 15, byte = unsigned(bytes >> (8 * (nibble & 7))) & 255;
    r |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) { return unsigned((std::uint64_t(hi) << 32 | lo) << (shift & 31) >> 32); }
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) { return unsigned((std::uint64_t(hi) << 32 | lo) >> (shift & 31)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(std::uint64_t(a) * b >> 32); }
inline int __mulhi(int a, int b) { return int(std::int64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += int((signed char)(unsigned(a) >> (8 * i))) * (signed char)(unsigned(b) >> (8 * i));
  return c;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frsqrt_rn(float a) { return float(1.0 / std::sqrt(double(a))); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
// glibc has these names, or may come to have them, with C linkage.
inline float emulator_exp(float a) { return std::exp(a); }
inline float emulator_log(float a) { return std::log(a); }
inline float emulator_log2(float a) { return std::log2(a); }
inline float emulator_sin(float a) { return std::sin(a); }
inline float emulator_cos(float a) { return std::cos(a); }
inline float emulator_pow(float a, float b) { return std::pow(a, b); }
inline float emulator_rsqrtf(float a) { return float(1.0 / std::sqrt(double(a))); }
inline double emulator_rsqrt(double a) { return 1.0 / std::sqrt(a); }
#define __expf emulator_exp
#define __logf emulator_log
#define __log2f emulator_log2
#define __sinf emulator_sin
#define __cosf emulator_cos
#define __powf emulator_pow
#define rsqrtf emulator_rsqrtf
#define rsqrt emulator_rsqrt
inline float __saturatef(float a) { return a > 0 ? (a < 1 ? a : 1.0f) : 0.0f; }
// Conversions to an integer saturate and take NaN to zero, as the device does.
template <class I, class F> inline I emulator_to_integer(F v) {
  if (v != v) return 0;
  if (v >= F(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
  if (v <= F(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  return I(v);
}
inline int __float2int_rn(float v) { return emulator_to_integer<int>(std::nearbyint(v)); }
inline int __float2int_rz(float v) { return emulator_to_integer<int>(std::trunc(v)); }
inline int __float2int_rd(float v) { return emulator_to_integer<int>(std::floor(v)); }
inline int __float2int_ru(float v) { return emulator_to_integer<int>(std::ceil(v)); }
inline unsigned __float2uint_rn(float v) { return emulator_to_integer<unsigned>(std::nearbyint(v)); }
inline unsigned __float2uint_rz(float v) { return emulator_to_integer<unsigned>(std::trunc(v)); }
inline long long __float2ll_rn(float v) { return emulator_to_integer<long long>(std::nearbyint(v)); }
inline long long __float2ll_rz(float v) { return emulator_to_integer<long long>(std::trunc(v)); }
inline unsigned long long __float2ull_rn(float v) { return emulator_to_integer<unsigned long long>(std::nearbyint(v)); }
inline unsigned long long __float2ull_rz(float v) { return emulator_to_integer<unsigned long long>(std::trunc(v)); }
inline long long __double2ll_rn(double v) { return emulator_to_integer<long long>(std::nearbyint(v)); }
inline float __int2float_rn(int v) { return float(v); }
inline float __uint2float_rn(unsigned v) { return float(v); }
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point<C>::value) return std::fmax(C(a), C(b)); else return C(a) < C(b) ? C(b) : C(a);
}
template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point<C>::value) return std::fmin(C(a), C(b)); else return C(b) < C(a) ? C(b) : C(a);
}
using std::isfinite;
using std::isinf;
using std::isnan;
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline T __ldcv(const T* p) { return *p; }
template <class T> inline void __stcs(T* p, std::common_type_t<T> v) { *p = v; }
template <class T> inline void __stcg(T* p, std::common_type_t<T> v) { *p = v; }
template <class T> inline void __stwt(T* p, std::common_type_t<T> v) { *p = v; }

// ---------------------------------------------------------------- host twins of inline PTX
// mma.sync.m16n8k16, row.col, fp32 accumulators; lane = 4 * g + t. A register i holds row g + 8 (i odd), columns
// 2t, 2t+1 (+ 8 for i >= 2); b0, b1 hold rows 2t, 2t+1 (+ 8), column g; d[i] row g (+ 8 for i >= 2), column 2t + (i & 1).
// Products are exact and summed in fp64, rounded once: the device truncates inside its sum, so last bits differ.
inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulator::Mma operands{d, a, b0, b1, true};
  emulator::collective(0xffffffffu, emulator::MMA, emulator::pack(&operands), 0);
}
inline void mma_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulator::Mma operands{d, a, b0, b1, false};
  emulator::collective(0xffffffffu, emulator::MMA, emulator::pack(&operands), 0);
}
// ldmatrix.sync.m8n8.xN.b16: lane 8 * i + r gives the address of row r of matrix i; register i of lane 4 * g + t
// receives elements 2t, 2t+1 of row g (.trans: of column g).
template <int N> inline void emulator_ldmatrix(unsigned (&r)[N], const void* row, bool transposed) {
  emulator::Ldmatrix operands{r, row, N, transposed};
  emulator::collective(0xffffffffu, emulator::LDMATRIX, emulator::pack(&operands), 0);
}
inline void ldmatrix_x1(unsigned (&r)[1], const void* shared) { emulator_ldmatrix(r, shared, false); }
inline void ldmatrix_x2(unsigned (&r)[2], const void* shared) { emulator_ldmatrix(r, shared, false); }
inline void ldmatrix_x4(unsigned (&r)[4], const void* shared) { emulator_ldmatrix(r, shared, false); }
inline void ldmatrix_x1_trans(unsigned (&r)[1], const void* shared) { emulator_ldmatrix(r, shared, true); }
inline void ldmatrix_x2_trans(unsigned (&r)[2], const void* shared) { emulator_ldmatrix(r, shared, true); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* shared) { emulator_ldmatrix(r, shared, true); }
// wgmma.m64n64k16 of bfloat16: d = or += a b. In shared memory a block has 64 rows of 128 bytes, aligned to 1024,
// whose 16-byte piece i of row r stands at i ^ r % 8. A warp has 16 rows of d; lane 4g + t columns 8j + 2t, 8j + 2t + 1 of
// rows g (4j, 4j + 1) and g + 8 (4j + 2, 4j + 3). Sums as of mma_bf16. Nothing is asynchronous here.
inline void warpgroup_arrive() {}
inline void warpgroup_commit() {}
template <int N> inline void warpgroup_wait() { __syncwarp(); }
inline void warpgroup_see_shared() {}
template <int N> inline void warpgroup_release_registers() {}
template <int N> inline void warpgroup_take_registers() {}
template <int M> inline void warpgroup_see_sums(float (&)[M]) {}
inline float emulator_bfloat(unsigned short bits) {
  const unsigned wide = unsigned(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline double emulator_of_block(const void* at, unsigned row, unsigned column) {
  const std::uintptr_t linear = std::uintptr_t(at) + row * 128 + column * 2;
  return double(emulator_bfloat(*(const unsigned short*)(linear ^ (linear >> 3 & 0x70))));
}
template <int N, class B> inline void emulator_warpgroup(float (&d)[N], const double (&a)[2][16], bool add, const B& b) {
  const unsigned t = emulator::current->lane % 4;
  for (int i = 0; i < N; i++) {
    double sum = 0;
    for (int k = 0; k < 16; k++) sum += a[i / 2 % 2][k] * b(k, i / 4 * 8 + 2 * t + i % 2);
    d[i] = float((add ? double(d[i]) : 0.0) + sum);
  }
}
struct Operand {
  const unsigned char* at;
  Operand operator+(int bytes) const { return Operand{at + bytes}; }
};
inline Operand operand_at(const void* p) { return Operand{static_cast<const unsigned char*>(p)}; }
template <int N> inline void warpgroup_mma(float (&d)[N], Operand a, Operand b, bool add) {  // b: columns lie in rows
  const unsigned row = emulator::current->index.x / 32 % 4 * 16 + emulator::current->lane / 4;
  double rows[2][16];
  for (int r = 0; r < 2; r++)
    for (int k = 0; k < 16; k++) rows[r][k] = emulator_of_block(a.at, row + 8 * r, k);
  emulator_warpgroup(d, rows, add, [&](int k, int column) { return emulator_of_block(b.at, column, k); });
}
inline void emulator_fragment(double (&rows)[2][16], const unsigned (&a)[4]) {  // a: as mma_bf16's
  for (int lane = 0; lane < 4; lane++)
    for (int i = 0; i < 4; i++) {
      const unsigned pair = __shfl_sync(0xffffffffu, a[i], int(emulator::current->lane / 4 * 4) + lane);
      for (int half = 0; half < 2; half++)
        rows[i % 2][i / 2 * 8 + 2 * lane + half] = double(emulator_bfloat((unsigned short)(pair >> 16 * half)));
    }
}
inline void warpgroup_mma_trans(float (&d)[32], const unsigned (&a)[4], Operand b, bool add) {
  double rows[2][16];
  emulator_fragment(rows, a);
  emulator_warpgroup(d, rows, add, [&](int k, int column) { return emulator_of_block(b.at, k, column); });
}
// m64nNk16, N = 2 M: b as of warpgroup_mma, of N rows.
template <int M> inline void warpgroup_mma_rows(float (&d)[M], const unsigned (&a)[4], const void* b, bool add) {
  double rows[2][16];
  emulator_fragment(rows, a);
  emulator_warpgroup(d, rows, add, [&](int k, int column) { return emulator_of_block(b, column, k); });
}
// cp.async: `bytes` are copied, the rest of the 4, 8 or 16 is zero. Nothing arrives before the wait of its group.
inline void cp_async_4(void* shared, const void* global, int bytes = 4) { emulator::copy_async(shared, global, 4, bytes); }
inline void cp_async_8(void* shared, const void* global, int bytes = 8) { emulator::copy_async(shared, global, 8, bytes); }
inline void cp_async_16(void* shared, const void* global, int bytes = 16) { emulator::copy_async(shared, global, 16, bytes); }
inline void cp_async_commit() { emulator::copy_commit(); }
template <int N> inline void cp_async_wait() { emulator::copy_wait(N); }
// cp.async.bulk with an mbarrier (8 bytes of shared memory): expect = arrive.expect_tx; wait = until the phase of
// that parity is complete. Nothing arrives before a thread waits.
inline void bulk_copy(void* shared, const void* global, unsigned bytes, void* barrier) { emulator::copy_bulk(shared, global, bytes, barrier); }
inline void mbarrier_init(void* barrier, unsigned count) { emulator::mbarrier_init(barrier, count); }
inline void mbarrier_expect(void* barrier, unsigned bytes) { emulator::mbarrier_arrive(barrier, bytes); }
inline void mbarrier_arrive(void* barrier) { emulator::mbarrier_arrive(barrier, 0); }
inline void mbarrier_wait(void* barrier, unsigned parity) { emulator::mbarrier_wait(barrier, parity); }
// Clusters (along x): a barrier of all their threads, and the address of another block's shared memory. In two
// halves the whole barrier is the second, so that what is written between them counts as ordered.
inline void cluster_sync(EMULATOR_HERE) { emulator::cluster_barrier(file, line); }
inline void cluster_arrive() {}
inline void cluster_wait(EMULATOR_HERE) { emulator::cluster_barrier(file, line); }
template <class T> inline T* cluster_map(T* shared, unsigned rank) { return static_cast<T*>(emulator::cluster_map(shared, rank)); }
// A block of 64 x 64 numbers, as of wgmma, from rows; the map (EmulatorLauncher.block_map): their address and bytes.
inline void see_map(const void*) {}
inline void copy_block(void* shared, const void* map, int column, int row, void* barrier) {
  const auto* of = static_cast<const unsigned long long*>(map);
  for (int i = 0; i < 512; i++) {
    const int r = i / 8, piece = i % 8;
    const auto* from = reinterpret_cast<const unsigned char*>(of[0]) + (row + r) * of[1] + 2 * column + 16 * piece;
    emulator::copy_bulk(static_cast<unsigned char*>(shared) + r * 128 + (piece ^ r % 8) * 16, from, 16, barrier);
  }
}
inline unsigned round_pair(float low, float high) {
  const __nv_bfloat16 pair[2] = {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
  unsigned bits;
  std::memcpy(&bits, pair, 4);
  return bits;
}
// ex2.approx.ftz.f32: within 2 ulp of this; subnormal inputs and results become zero, as there.
inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}
// System scope: memory that other processes read and write. Each half of a line is one access.
#define EMULATOR_SYSTEM inline __attribute__((noinline, no_sanitize_thread))
EMULATOR_SYSTEM void store_line(unsigned long long* to, unsigned long long low, unsigned long long high) {
  __atomic_store_n(to, low, __ATOMIC_RELAXED);
  __atomic_store_n(to + 1, high, __ATOMIC_RELAXED);
}
EMULATOR_SYSTEM void load_line(const unsigned long long* from, unsigned long long& low, unsigned long long& high) {
  low = __atomic_load_n(from, __ATOMIC_RELAXED);
  high = __atomic_load_n(from + 1, __ATOMIC_RELAXED);
}
EMULATOR_SYSTEM void store_release(unsigned* to, unsigned value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
EMULATOR_SYSTEM unsigned load_acquire(const unsigned* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
inline unsigned long long nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
inline void spin() {  // the other threads, and once for all of them the other processes
  if (!emulator::current->index.x) sched_yield();
  emulator::yield();
}
// Dependent launch only moves work earlier; one launch after another is always allowed. Every thread must wait
// before it leaves, and (checked) before it touches what the launches in front may still be at.
inline void grid_dependency_wait() { emulator::current->waited = true; }
inline void grid_dependency_launch() { emulator::current->early |= !emulator::current->waited; }
