// Device code of the forward. ops.py cuts all kernels*.cu at their banners, puts this file's prelude
// before every section and compiles each section alone, so that an edit recompiles one of them.
//
// Bits (R1, R2, R5). A result's bits depend on its row, the weights and absolute positions. Sums run
// in the order that a kernel's contract states, whatever the grid; products join by explicit
// __fmaf_rn, and the compiler contracts nothing (--fmad=false). No floating-point atomics.
//
// These are the simple kernels: one format, one order, every shape. A faster one takes its place in
// ops.py behind the same operation; these stay as the proof of the format.
//
// Grids: x counts columns or work items, y and z count rows. Arrays are C order; `T` rows, `K` the
// summed dimension. Pointers need their type's alignment, 16 bytes where a contract says so.

// ==== prelude ====

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE static __device__ __forceinline__
#define DEVICE_METHOD __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)

static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps");
static_assert(ROWS == 8, "warp_sum8 adds eight rows at once");
constexpr int WARPS = THREADS / 32;
constexpr u32 ALL = 0xffffffffu;

struct bf16 {
  u16 bits;
};

// Activations as the rounding map of reference.py has them: rounded when they are stored.
#if ACTIVATION_BF16
typedef bf16 act;
#else
typedef float act;
#endif

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

DEVICE float to_float(float value) { return value; }
DEVICE float to_float(bf16 value) { return __uint_as_float((u32)value.bits << 16); }

DEVICE void store(float* to, float value) { *to = value; }
DEVICE void store(bf16* to, float value) {  // to nearest, ties to even; NaN becomes 0x7fff
#ifdef KDTREE_EMULATOR
  const u32 bits = __float_as_uint(value);
  const u32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  to->bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (u16)(rounded >> 16);
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(value));
#endif
}

DEVICE float round_to_act(float value) {
  act rounded;
  store(&rounded, value);
  return to_float(rounded);
}

// Eight neighbours at a 16-byte aligned address.
DEVICE void load8(const float* from, float (&to)[8]) {
  const float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}
DEVICE void load8(const bf16* from, float (&to)[8]) {
  const uint4 v = *(const uint4*)from;
  const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    to[2 * i] = __uint_as_float(pairs[i] << 16);
    to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

DEVICE void store8(float* to, const float (&from)[8]) {
  ((float4*)to)[0] = float4{from[0], from[1], from[2], from[3]};
  ((float4*)to)[1] = float4{from[4], from[5], from[6], from[7]};
}
DEVICE void store8(bf16* to, const float (&from)[8]) {  // each as `store`
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
#ifdef KDTREE_EMULATOR
    bf16 low, high;
    store(&low, from[2 * i]), store(&high, from[2 * i + 1]);
    pairs[i] = low.bits | (u32)high.bits << 16;
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pairs[i]) : "f"(from[2 * i + 1]), "f"(from[2 * i]));
#endif
  }
  *(uint4*)to = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}

DEVICE void store_pair(bf16* to, float low, float high) {  // at 4 aligned bytes
  bf16 a, b;
  store(&a, low);
  store(&b, high);
  *(u32*)to = (u32)a.bits | (u32)b.bits << 16;
}

DEVICE float silu(float gate) {
  return __fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate)));
}

// Over the 32 lanes by halves: distances 16, 8, 4, 2, 1. Every lane returns the sum.
DEVICE float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1)
    value = __fadd_rn(value, __shfl_xor_sync(ALL, value, distance));
  return value;
}

// warp_sum of eight values with 9 exchanges instead of 40; lane l returns the sum of value l / 4.
DEVICE float warp_sum8(float (&values)[8]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 4; half > 0; half >>= 1) {
    const bool upper = lane & (4 * half);
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float keep = upper ? values[i + half] : values[i];
      const float give = upper ? values[i] : values[i + half];
      values[i] = __fadd_rn(keep, __shfl_xor_sync(ALL, give, 4 * half));
    }
  }
  float sum = __fadd_rn(values[0], __shfl_xor_sync(ALL, values[0], 2));
  return __fadd_rn(sum, __shfl_xor_sync(ALL, sum, 1));
}

// Over the block: lanes by halves, then warps ascending. shared: WARPS floats, free on return.
DEVICE float block_sum(float value, float* shared) {
  value = warp_sum(value);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();  // every warp's sum is written before any is read
  float sum = shared[0];
#pragma unroll
  for (int w = 1; w < WARPS; w++) sum = __fadd_rn(sum, shared[w]);
  __syncthreads();  // all have read before the caller writes `shared` again
  return sum;
}

// The sum of integers over the threads in front of this one. shared: WARPS of them, free on return.
template <class Integer>
DEVICE Integer block_before(Integer value, Integer* shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  Integer sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance <<= 1) {
    const Integer other = __shfl_up_sync(ALL, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == 31) shared[warp] = sum;
  __syncthreads();  // every warp's sum is there before any is read
  sum -= value;
  for (int w = 0; w < warp; w++) sum += shared[w];
  __syncthreads();  // all have read before the caller writes `shared` again
  return sum;
}

// 2^(from - to), exact; zero below the normal range and for from = -inf.
DEVICE float power_of_two(float from, float to) {
  const float exponent = __fsub_rn(from, to);
  if (exponent != exponent && from == from) return 0.0f;  // both are -inf
  if (exponent < -126.0f) return 0.0f;
  return from == from ? __int_as_float(((int)exponent + 127) << 23) : from;
}

// Rotates the pair (a, b) by the row's angle, each product and sum rounded.
DEVICE void rotate(float a, float b, float c, float s, act* first, act* second) {
  store(first, __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)));
  store(second, __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
}

// Weight formats. `accumulate` adds this lane's share of columns [begin, end) of one weight row times
// n (of N) rows of x. Lane l takes steps l, l + 32, ... ascending; a step is a column of a dense
// weight, a quantisation group of an INT4 one.
template <class T>
struct Dense {
  const T* data;  // [out, K]

  DEVICE_METHOD Dense(const void* weight, const void*, int) : data((const T*)weight) {}

  template <int N>
  DEVICE_METHOD void accumulate(float (&sum)[N], const act* const (&x)[N], int n, i64 row, int K,
                                int begin, int end) const {
    const T* w = data + row * K;
#pragma unroll 4
    for (int k = begin + (threadIdx.x & 31); k < end; k += 32) {
      const float value = to_float(w[k]);
#pragma unroll
      for (int r = 0; r < N; r++)
        if (r < n) sum[r] = __fmaf_rn(value, to_float(x[r][k]), sum[r]);
    }
  }
};

// The published packing: column c in bits 4 * (c % 8) of word c / 8, lowest first; code = nibble - 8.
// A group starts from zero and joins by fma(scale, group, sum). K, begin and end are whole groups;
// packed and x are 16-byte aligned.
template <class S>
struct Int4 {
  const u32* packed;  // [out, K / 8]
  const S* scales;    // [out, K / group]
  int group;          // columns, a multiple of 8

  DEVICE_METHOD Int4(const void* weight, const void* scale, int columns)
      : packed((const u32*)weight), scales((const S*)scale), group(columns) {}

  template <int N>
  DEVICE_METHOD void accumulate(float (&sum)[N], const act* const (&x)[N], int n, i64 row, int K,
                                int begin, int end) const {
    const u32* words = packed + row * (K / 8);
    const S* scale = scales + row * (K / group);
    for (int g = begin / group + (threadIdx.x & 31); g < end / group; g += 32) {
      float part[N];
#pragma unroll
      for (int r = 0; r < N; r++) part[r] = 0.0f;
      for (int word = g * group / 8; word < (g + 1) * group / 8; word++) {
        const u32 codes = words[word];
#pragma unroll
        for (int r = 0; r < N; r++) {
          if (r >= n) continue;
          float values[8];
          load8(x[r] + word * 8, values);
#pragma unroll
          for (int c = 0; c < 8; c++) {
            const int code = (int)((codes >> (4 * c)) & 15u) - 8;
            part[r] = __fmaf_rn((float)code, values[c], part[r]);
          }
        }
      }
      const float s = to_float(scale[g]);
#pragma unroll
      for (int r = 0; r < N; r++)
        if (r < n) sum[r] = __fmaf_rn(s, part[r], sum[r]);
    }
  }
};

// A section that reads weights is compiled for one format: -DWEIGHT=DenseF32, and so on.
typedef Dense<float> DenseF32;
typedef Dense<bf16> DenseBf16;
typedef Int4<float> Int4F32;  // by the type of the scales
typedef Int4<bf16> Int4Bf16;

// Tensor cores and asynchronous copies; tests/emulator has twins of these names for a CPU. A fragment
// is what one lane holds of a tile: lane = 4 * g + t.
#ifndef BULK_COPIES  // one instruction copies kilobytes; before sm_90 every lane copies 16 bytes
#if defined(KDTREE_EMULATOR) || __CUDA_ARCH__ >= 900
#define BULK_COPIES 1
#else
#define BULK_COPIES 0
#endif
#endif
#if defined(KDTREE_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WARPGROUPS 1  // sm_90a alone
#else
#define WARPGROUPS 0
#endif
#ifndef KDTREE_EMULATOR
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// d += a b: 16 x 16 times 16 x 8, bf16, fp32 sums. a: rows g and g + 8 (odd registers), columns
// 2t, 2t + 1 (and 8 more: registers 2, 3); b: the same columns of row g of its transpose; d: rows g
// (0, 1) and g + 8 (2, 3), columns 2t, 2t + 1.
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#if BULK_COPIES
DEVICE void mbarrier_init(void* barrier, u32 count) {  // and let the copy engine see it
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;"
               :: "r"(shared_address(barrier)), "r"(count) : "memory");
}
DEVICE void mbarrier_expect(void* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
DEVICE void mbarrier_wait(void* barrier, u32 parity) {
  asm volatile("{\n.reg .pred done;\nWAIT%=:\n"
               "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra WAIT%=;\n}"
               :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}
DEVICE void bulk_copy(void* shared, const void* global, u32 bytes, void* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// Dependent launch: a kernel that is launched as one may start before the kernel in front of it has
// ended; it waits before it touches what that one writes, or reads what that one may still write.
DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void grid_dependency_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Blocks of a cluster: a barrier of all their threads, in two halves or at once, and the address of
// another one's shared memory.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
DEVICE void cluster_sync() { cluster_arrive(), cluster_wait(); }
template <class T>
DEVICE T* cluster_map(T* shared, u32 rank) {
  u64 address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"((u64)shared), "r"(rank));
  return (T*)address;
}
#else
DEVICE void grid_dependency_wait() {}
DEVICE void grid_dependency_launch() {}
#endif
#if WARPGROUPS
// Products of a warpgroup: d, of 64 x 64, = or += a b, 16 columns of a. In shared memory: blocks of 64
// rows x 128 bytes, aligned to 1024 bytes, where 16-byte piece i of row r stands at i ^ r % 8; a and
// b point to a row's 32 bytes. A warp has 16 rows of d: lane 4g + t columns 8j + 2t, 8j + 2t + 1 of rows g
// (4j, 4j + 1) and g + 8 (4j + 2, 4j + 3). a in registers: as mma_bf16 takes it.
// warpgroup_arrive, products, warpgroup_commit; then warpgroup_wait<groups that may still run>.
DEVICE void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
// What this thread has written to shared memory becomes visible to them.
DEVICE void warpgroup_see_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE u64 block_descriptor(const void* p) {  // 128-byte swizzle, 1024 bytes between eights of rows
  return (u64)(shared_address(p) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
#endif
// The first `bytes` of 16, the others zero.
DEVICE void cp_async_16(void* shared, const void* global, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(shared)), "l"(global), "r"(bytes) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
#endif

// The first line of a short kernel that is launched dependently and has nothing to fetch before.
DEVICE void begin_dependent() {
  grid_dependency_launch();
  grid_dependency_wait();
}

// One warp's stream of equal pieces through N places in shared memory, in order: N times `start`, then
// for every piece `get`, read, `replace` by the piece N later. All lanes call each. `there` is false
// past the end of the stream: the place stays as it is and must not be read.
template <int N>
struct Ring {
  unsigned char* places;  // [N, bytes], 16-byte aligned
  u64* full;              // [N]: a place's copy has arrived
  int bytes, place;
  u32 parity;

  // used: whether this warp will copy anything.
  DEVICE_METHOD Ring(void* memory, u64* barriers, int size, bool used = true)
      : places((unsigned char*)memory), full(barriers), bytes(size), place(0), parity(0) {
#if BULK_COPIES
    if (used && (threadIdx.x & 31) == 0)
      for (int i = 0; i < N; i++) mbarrier_init(full + i, 1);
    __syncwarp();  // the barriers exist before a lane waits at one
#endif
  }

  DEVICE_METHOD void start(int to, const unsigned char* from, bool there) {
    const int lane = threadIdx.x & 31;
#if BULK_COPIES
    if (there && lane == 0) {
      mbarrier_expect(full + to, bytes);
      bulk_copy(places + to * bytes, from, bytes, full + to);
    }
#else
    if (there)
      for (int i = 16 * lane; i < bytes; i += 512) cp_async_16(places + to * bytes + i, from + i);
    cp_async_commit();
#endif
  }

  DEVICE_METHOD const unsigned char* get() const {
#if BULK_COPIES
    mbarrier_wait(full + place, parity);
#else
    cp_async_wait<N - 1>();
#endif
    __syncwarp();  // every lane's copies have arrived
    return places + place * bytes;
  }

  DEVICE_METHOD void replace(const unsigned char* from, bool there) {
    __syncwarp();  // all lanes have read the piece before the next one is copied over it
    start(place, from, there);
    if (++place == N) place = 0, parity ^= 1;
  }
};

DEVICE float4 add4(float4 a, float4 b) {
  return float4{__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}

// n (a power of two, at most WARPS / 2) sums that lie `apart`, added pairwise.
DEVICE float4 join(const float4* of, int apart, int n) {
  float4 v[WARPS / 2];
#pragma unroll
  for (int i = 0; i < WARPS / 2; i++)
    if (i < n) v[i] = of[i * apart];
#pragma unroll
  for (int d = 1; d < WARPS / 2; d <<= 1)
    if (d < n)
#pragma unroll
      for (int i = 0; i < WARPS / 2; i += 2 * d) {
        v[i].x = __fadd_rn(v[i].x, v[i + d].x), v[i].y = __fadd_rn(v[i].y, v[i + d].y);
        v[i].z = __fadd_rn(v[i].z, v[i + d].z), v[i].w = __fadd_rn(v[i].w, v[i + d].w);
      }
  return v[0];
}

// INT4 weights as tensor cores take them (of pack_int4). Codes are exact in bfloat16 and come times 2^-6,
// which scales a sum and changes no other bit of it: FROM_CODES undoes it.
constexpr int TILE_GROUP = 288;  // bytes of one group of a tile: codes of 16 x 32, 16 scales
constexpr float FROM_CODES = 64.0f;

// Nibbles 0 and 4, 1 and 5, 2 and 6, 3 and 7 of q as two bfloat16 codes -8 .. 7, times 2^-6. The bits of
// a bfloat16 below 2^-125 are an integer times 2^-133, so a nibble need not be moved to be a number.
DEVICE void eight_codes(u32 q, u32 (&codes)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
#ifdef KDTREE_EMULATOR
    const float low = (float)((int)((q >> (4 * i)) & 15u) - 8) / FROM_CODES;
    const float high = (float)((int)((q >> (16 + 4 * i)) & 15u) - 8) / FROM_CODES;
    codes[i] = __float_as_uint(low) >> 16 | __float_as_uint(high);
#else
    const u32 nibbles = (i < 2 ? q : q >> 8) & (i % 2 ? 0x00f000f0u : 0x000f000fu);
    const u32 factor = i % 2 ? 0x7d007d00u : 0x7f007f00u;  // 2^123 or 2^127; then - 8 * 2^-6
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(codes[i]) : "r"(nibbles), "r"(factor), "r"(0xbe00be00u));
#endif
  }
}

// N words at an address aligned for the widest loads that divide them.
template <int N>
DEVICE void load_words(const unsigned char* from, u32 (&to)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const uint4 v = ((const uint4*)from)[i];
      to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
  } else if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const uint2 v = ((const uint2*)from)[i];
      to[2 * i] = v.x, to[2 * i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = ((const u32*)from)[i];
  }
}

// ==== elementwise ====

// grid ceil(n / THREADS), block THREADS. Each output is one element's own arithmetic. All may be
// launched dependently: they wait first.

KERNEL round_to_activation(const float* x,  // [n]
                           act* out,        // [n]
                           i64 n) {
  begin_dependent();
  const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i < n) store(out + i, x[i]);
}

// The residual: x + round(y), rounded. out may be x.
KERNEL add(const act* x,    // [n]
           const float* y,  // [n]
           act* out,        // [n]
           i64 n) {
  begin_dependent();
  const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i < n) store(out + i, __fadd_rn(to_float(x[i]), round_to_act(y[i])));
}

KERNEL silu_mul(const float* gate,  // [n]
                const float* up,    // [n]
                act* out,           // [n]
                i64 n) {
  begin_dependent();
  const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i < n) store(out + i, __fmul_rn(silu(gate[i]), up[i]));
}

// A row number outside [0, T) gives zeros: filler rows. grid (ceil(K / THREADS), n)
template <class X>
DEVICE void take_rows(const X* x, const int* rows, X* out, int T, int K) {
  begin_dependent();
  const int k = blockIdx.x * THREADS + threadIdx.x;
  if (k >= K) return;
  const int row = rows[blockIdx.y];
  out[(i64)blockIdx.y * K + k] = row >= 0 && row < T ? x[(i64)row * K + k] : X{};
}

KERNEL take_rows_f32(const float* x,   // [T, K]
                     const int* rows,  // [n]
                     float* out,       // [n, K]
                     int T, int K) {
  take_rows(x, rows, out, T, K);
}
KERNEL take_rows_act(const act* x, const int* rows, act* out, int T, int K) {
  take_rows(x, rows, out, T, K);
}
// Rows of any type as K aligned words of 16 bytes.
KERNEL take_rows_16(const uint4* x, const int* rows, uint4* out, int T, int K) {
  take_rows(x, rows, out, T, K);
}

// ==== embed ====

// grid (ceil(hidden / THREADS), T). Ids outside this rank's rows read as -0, the one number whose sum
// with any x is x, bit for bit. -DTABLE=float or bf16.
KERNEL embed(const int* ids,      // [T]
             const TABLE* table,  // [n, hidden], rows of ids first .. first + n - 1
             float* out,          // [T, hidden]
             int first, int n, int hidden) {
  begin_dependent();
  const int k = blockIdx.x * THREADS + threadIdx.x;
  if (k >= hidden) return;
  const int row = ids[blockIdx.y] - first;
  const float value = row >= 0 && row < n ? to_float(table[(i64)row * hidden + k]) : -0.0f;
  out[(i64)blockIdx.y * hidden + k] = value;
}

// ==== rms_norm ====

// A row of K values has BLOCKS blocks (-DBLOCKS, 1 or a cluster's), so the grid is T * BLOCKS. Thread i of
// its BLOCKS * THREADS threads holds values 8u .. 8u + 7 for u = i, i + BLOCKS * THREADS, ... (CHUNKS
// of them, -DCHUNKS): it adds the squares of eight ascending, then its eights ascending; then lanes by
// halves, then warps by halves. x / rms (taken as x times 1 / rms) is rounded, multiplied by the
// weight, rounded again. Rows whose K and stride are multiples of 8 are 16-byte aligned. All may be
// launched dependently: norm weights are always there, the rest is waited for.
typedef float Eights[CHUNKS][8];
typedef float Sums[BLOCKS * WARPS];
static_assert(BLOCKS * WARPS <= 32, "one warp adds the sums of all warps");

#if BLOCKS > 1
#define ROW_KERNEL extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
#else
#define ROW_KERNEL KERNEL
#endif

DEVICE int row_of_block() { return blockIdx.x / BLOCKS; }
DEVICE int rank_in_row() { return blockIdx.x % BLOCKS; }

DEVICE int place_of(int c) {
  return 8 * ((int)threadIdx.x + (rank_in_row() + c * BLOCKS) * THREADS);
}

// Values past the last are zero. vectors: the row is 16-byte aligned and K a multiple of 8.
template <class X>
DEVICE void load_row(const X* x, int K, bool vectors, Eights& to) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int k = place_of(c);
    if (vectors && k < K) {
      load8(x + k, to[c]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) to[c][i] = k + i < K ? to_float(x[k + i]) : 0.0f;
    }
  }
}

DEVICE void store_row(act* out, int K, bool vectors, const Eights& from) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int k = place_of(c);
    if (vectors) {
      if (k < K) store8(out + k, from[c]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (k + i < K) store(out + k + i, from[c][i]);
    }
  }
}

// What a row's kernel begins with: the next kernel may begin, and the row's other blocks may write here.
DEVICE void begin_row() {
  grid_dependency_launch();
#if BLOCKS > 1
  cluster_arrive();
#endif
}

// Over the row's threads, once. sums: of this block, written by all.
DEVICE float row_sum(float value, Sums& sums) {
  const int lane = threadIdx.x & 31, own = rank_in_row() * WARPS + threadIdx.x / 32;
  value = warp_sum(value);
#if BLOCKS > 1
  cluster_wait();  // every block has begun before another one writes into it
  if (lane < BLOCKS) *cluster_map(sums + own, lane) = value;
  cluster_sync();  // the sums of all warps are there
#else
  if (lane == 0) sums[own] = value;
  __syncthreads();  // likewise
#endif
  return warp_sum(lane < BLOCKS * WARPS ? sums[lane] : 0.0f);
}

// x becomes its norm, not yet rounded the second time.
DEVICE void norm_row(Eights& x, const Eights& weight, float inverse_k, float eps, Sums& sums) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    float eight = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) eight = __fmaf_rn(x[c][i], x[c][i], eight);
    sum = __fadd_rn(sum, eight);
  }
  const float mean = __fmul_rn(row_sum(sum, sums), inverse_k);
  const float inverse = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[c][i] = __fmul_rn(round_to_act(__fmul_rn(x[c][i], inverse)), weight[c][i]);
}

// out may be x when the types agree.
template <class X>
DEVICE void rms_norm(const X* x, const float* weight, act* out, int K, float inverse_k, float eps) {
  __shared__ Sums sums;
  const bool vectors = K % 8 == 0;
  const i64 row = (i64)row_of_block() * K;
  Eights values, weights;
  begin_row();
  load_row(weight, K, vectors, weights);
  grid_dependency_wait();
  load_row(x + row, K, vectors, values);
  norm_row(values, weights, inverse_k, eps, sums);
  store_row(out + row, K, vectors, values);
}

ROW_KERNEL rms_norm_f32(const float* x,       // [T, K]
                    const float* weight,  // [K]
                    act* out,             // [T, K]
                    int K, float inverse_k, float eps) {
  rms_norm(x, weight, out, K, inverse_k, eps);
}
ROW_KERNEL rms_norm_act(const act* x, const float* weight, act* out, int K, float inverse_k, float eps) {
  rms_norm(x, weight, out, K, inverse_k, eps);
}

// The residual, as `add`, and its norm. sum may be x.
ROW_KERNEL add_rms_norm(const act* x,         // [T, K]
                    const float* y,       // [T, K]
                    const float* weight,  // [K]
                    act* sum,             // [T, K]
                    act* out,             // [T, K]
                    act* taps,  // [T, taps_width], columns first .. first + K - 1 get the sum too,
                                // if has_taps
                    int K, int taps_width, int first, int has_taps, float inverse_k, float eps) {
  __shared__ Sums sums;
  const bool vectors = K % 8 == 0;
  const i64 row = (i64)row_of_block() * K;
  Eights values, others, weights;
  begin_row();
  load_row(weight, K, vectors, weights);
  grid_dependency_wait();
  load_row(y + row, K, vectors, others);
  load_row(x + row, K, vectors, values);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < 8; i++)
      values[c][i] = round_to_act(__fadd_rn(values[c][i], round_to_act(others[c][i])));
  store_row(sum + row, K, vectors, values);
  if (has_taps) {
    const bool aligned = vectors && taps_width % 8 == 0 && first % 8 == 0;
    store_row(taps + (i64)row_of_block() * taps_width + first, K, aligned, values);
  }
  norm_row(values, weights, inverse_k, eps, sums);
  store_row(out + row, K, vectors, values);
}

// The cache entry of a row: RMS-normed latent, de-interleaved and rotated key.
DEVICE void entry_row(const float* kv, const float* weight, const float* cosines, const float* sines,
                      const int* position, act* out, int latent, int rope, bool vectors,
                      float inverse_latent, float eps, Sums& sums) {
  const int half = rank_in_row() ? 0 : rope / 2;  // the row's first block turns the key
  Eights values, weights;
  load_row(weight, latent, latent % 8 == 0, weights);
  grid_dependency_wait();
  load_row(kv, latent, vectors, values);
  for (int i = THREADS - 1 - threadIdx.x; i < half; i += THREADS) {  // by threads with few values
    const i64 angle = (i64)(*position) * half + i;
    act* to = out + latent + i;
    rotate(kv[latent + 2 * i], kv[latent + 2 * i + 1], cosines[angle], sines[angle], to, to + half);
  }
  norm_row(values, weights, inverse_latent, eps, sums);
  store_row(out, latent, vectors, values);
}

ROW_KERNEL latent_entry(const float* kv,       // [T, latent + rope]
                    const float* weight,   // [latent]
                    const float* cosines,  // [positions, rope / 2]
                    const float* sines,    // likewise
                    const int* positions,  // [T]
                    act* out,              // [T, latent + rope]
                    int latent, int rope, float inverse_latent, float eps) {
  __shared__ Sums sums;
  const int row = row_of_block(), width = latent + rope;
  begin_row();
  entry_row(kv + (i64)row * width, weight, cosines, sines, positions + row, out + (i64)row * width,
            latent, rope, latent % 8 == 0 && width % 8 == 0, inverse_latent, eps, sums);
}

// The norm of a row's compressed query (y = 0), and its cache entry as latent_entry (y = 1).
// grid (T * BLOCKS, 2)
ROW_KERNEL query_entry(const float* q,          // [T, q_stride]
                   const float* kv,         // [T, kv_stride]
                   const float* q_weight,   // [K]
                   const float* kv_weight,  // [latent]
                   const float* cosines,    // [positions, rope / 2]
                   const float* sines,      // likewise
                   const int* positions,    // [T]
                   act* normed,             // [T, K]
                   act* entries,            // [T, latent + rope]
                   int K, int q_stride, int latent, int rope, int kv_stride, float inverse_k,
                   float inverse_latent, float eps) {
  __shared__ Sums sums;
  const int row = row_of_block(), width = latent + rope;
  begin_row();
  if (blockIdx.y) {
    entry_row(kv + (i64)row * kv_stride, kv_weight, cosines, sines, positions + row,
              entries + (i64)row * width, latent, rope,
              latent % 8 == 0 && width % 8 == 0 && kv_stride % 8 == 0, inverse_latent, eps, sums);
    return;
  }
  const bool vectors = K % 8 == 0 && q_stride % 8 == 0;
  Eights values, weights;
  load_row(q_weight, K, K % 8 == 0, weights);
  grid_dependency_wait();
  load_row(q + (i64)row * q_stride, K, vectors, values);
  norm_row(values, weights, inverse_k, eps, sums);
  store_row(normed + (i64)row * K, K, vectors, values);
}

#if BLOCKS == 1
// A head of the drafter. A query or a key (`weight` is there) becomes its norm, as rms_norm rounds it,
// whose component i is turned with i + d / 2; a value is only rounded. One block a head; shared d floats.
// start() is called after what is to be waited for; it says where x and `out` are and the position, or
// that there is nothing to do. If d is a multiple of 8, all arrays but the tables are 16-byte aligned.
struct Head {
  const float* x;  // [d]
  act* out;        // [d]
  int position;
};

template <class Start>
DEVICE void head_row(const float* weight, const float* cosines, const float* sines, int d,
                     float inverse_d, float eps, const Start& start) {
  extern __shared__ __align__(16) float normed[];  // [d]
  __shared__ Sums sums;
  const bool vectors = d % 8 == 0;
  const int half = d / 2, first = threadIdx.x;
  Eights values, weights;
  grid_dependency_launch();
  if (weight) load_row(weight, d, vectors, weights);
  grid_dependency_wait();
  Head head;
  if (!start(head)) return;
  load_row(head.x, d, vectors, values);
  if (!weight) {
    store_row(head.out, d, vectors, values);
    return;
  }
  cosines += (i64)head.position * half, sines += (i64)head.position * half;
  float c = 0.0f, s = 0.0f;  // of this thread's first pair, on their way while the row is normed
  if (first < half) c = cosines[first], s = sines[first];
  norm_row(values, weights, inverse_d, eps, sums);
#pragma unroll
  for (int u = 0; u < CHUNKS; u++)
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (place_of(u) + i < d) normed[place_of(u) + i] = round_to_act(values[u][i]);
  __syncthreads();  // the norm is there before it is turned
  for (int i = first; i < half; i += THREADS) {
    if (i > first) c = cosines[i], s = sines[i];
    rotate(normed[i], normed[i + half], c, s, head.out + i, head.out + half + i);
  }
}

// grid (H + 2 KV, T)
KERNEL block_inputs(const float* y,         // [T, H + 2 KV, d]: queries, keys, values
                    const float* q_weight,  // [d]
                    const float* k_weight,  // [d]
                    const float* cosines,   // [positions, d / 2]
                    const float* sines,     // likewise
                    const int* positions,   // [T]
                    act* q,                 // [T, H, d]
                    act* kv,                // [T, 2, KV, d]
                    int H, int KV, int d, float inverse_d, float eps) {
  const int h = blockIdx.x;
  const float* weight = h < H ? q_weight : h < H + KV ? k_weight : nullptr;
  head_row(weight, cosines, sines, d, inverse_d, eps, [&](Head& head) {
    const i64 t = blockIdx.y;
    head.x = y + (t * gridDim.x + h) * d;
    head.out = h < H ? q + (t * H + h) * d : kv + (t * 2 * KV + h - H) * d;
    head.position = positions[t];
    return true;
  });
}

// Row rows[i] of all layers to position positions[i] of sequence slots[i]; a slot of -1 is skipped.
// grid (layers * heads, n)
KERNEL put_context(const float* y,         // [T, layers, heads, d]: keys, as many values
                   const float* weights,   // [layers, d]
                   const float* cosines,   // [positions, d / 2]
                   const float* sines,     // likewise
                   const int* rows,        // [n]
                   const int* slots,       // [n]
                   const int* positions,   // [n]
                   const int* tables,      // [slots, max_pages]
                   act* pages,             // [layers, n_pages, leaf, heads, d]
                   int heads, int max_pages, int leaf, i64 layer_stride, int d, float inverse_d,
                   float eps) {
  const int layer = blockIdx.x / heads, h = blockIdx.x % heads, i = blockIdx.y;
  const float* weight = h < heads / 2 ? weights + (i64)layer * d : nullptr;
  head_row(weight, cosines, sines, d, inverse_d, eps, [&](Head& head) {
    const int slot = slots[i], position = positions[i], row = rows[i];
    if (slot < 0) return false;
    const i64 page = tables[(i64)slot * max_pages + position / leaf];
    head.x = y + ((i64)row * gridDim.x + blockIdx.x) * d;
    head.out = pages + layer * layer_stride + ((page * leaf + position % leaf) * heads + h) * d;
    head.position = position;
    return true;
  });
}
#endif

// ==== linear ====

// Rows first, first + 1, ... of x [T, K]; a place past the last row repeats the first.
DEVICE void rows_of(const act* x, int first, int n, int K, const act* (&rows)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) rows[r] = x + (i64)(first + (r < n ? r : 0)) * K;
}

// y[t, o] = sum over k of x[t, k] * w[o, k].
// grid (ceil(out / WARPS), ceil(T / ROWS)), block THREADS; a warp owns one output column of ROWS rows.
// K falls in `leaves` equal parts (a power of two). Inside a leaf: WEIGHT::accumulate, then warp_sum8.
// Leaves join pairwise, ((0+1)+(2+3))+((4+5)+(6+7)): a finished leaf is added to its left neighbours
// as a binary counter carries.
constexpr int MAX_LEVELS = 17;  // up to 65536 leaves

KERNEL linear(const act* x,        // [T, K], INT4: 16-byte aligned
              const void* weight,  // [out, K], or [out, K / 8] words
              const void* scales,  // INT4: [out, K / group]
              int group,           // INT4: columns that share a scale
              void* y,             // [T, out], fp32, or act if rounded
              int rounded, int T, int out, int K, int leaves) {
  __shared__ float waiting[WARPS][MAX_LEVELS][ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int column = blockIdx.x * WARPS + warp, first = blockIdx.y * ROWS;
  if (column >= out) return;
  const WEIGHT w(weight, scales, group);
  const int n = min(ROWS, T - first), width = K / leaves;
  const act* rows[ROWS];
  rows_of(x, first, n, K, rows);
  float total = 0.0f;
  for (int leaf = 0; leaf < leaves; leaf++) {
    float sum[ROWS] = {};
    w.accumulate(sum, rows, n, column, K, leaf * width, (leaf + 1) * width);
    total = warp_sum8(sum);
    int level = 0;
    for (; (leaf >> level) & 1; level++) total = __fadd_rn(waiting[warp][level][lane / 4], total);
    __syncwarp();  // the four lanes of a row have read before one of them writes
    if (lane % 4 == 0) waiting[warp][level][lane / 4] = total;
    __syncwarp();  // written before the next leaf reads
  }
  if (lane % 4 || lane / 4 >= n) return;
  const i64 at = (i64)(first + lane / 4) * out + column;
  if (rounded) store((act*)y + at, total);
  else ((float*)y)[at] = total;
}

// The leaf sums of `linear`, not joined. Same grid and order.
KERNEL linear_leaves(const act* x, const void* weight, const void* scales, int group,
                     float* y,  // [T, leaves, out]
                     int T, int out, int K, int leaves) {
  const int lane = threadIdx.x & 31, column = blockIdx.x * WARPS + threadIdx.x / 32;
  if (column >= out) return;
  const WEIGHT w(weight, scales, group);
  const int first = blockIdx.y * ROWS, n = min(ROWS, T - first), width = K / leaves;
  const act* rows[ROWS];
  rows_of(x, first, n, K, rows);
  for (int leaf = 0; leaf < leaves; leaf++) {
    float sum[ROWS] = {};
    w.accumulate(sum, rows, n, column, K, leaf * width, (leaf + 1) * width);
    const float total = warp_sum8(sum);
    if (lane % 4 == 0 && lane / 4 < n)
      y[((i64)(first + lane / 4) * leaves + leaf) * out + column] = total;
  }
}

// ==== absorb ====

// Compiled with -DTABLE=float or bf16, the type of kv_b [H, nope + v, latent].

// Absorbed query: out[t, h] = (q_nope[t, h] . key[h], rotated q_rope[t, h]), rounded.
// grid (H, ceil(T / ROWS)); shared ROWS * nope floats. A thread owns latent columns l, l + THREADS, ...
// and adds over nope ascending. The rope part holds pairs (x0, x1), (x2, x3), ...; it is
// de-interleaved and rotated in halves.
KERNEL latent_query(const act* q,          // [T, H, nope + rope]
                    const TABLE* kv_b,     // [H, nope + v, latent]
                    const float* cosines,  // [positions, rope / 2]
                    const float* sines,    // likewise
                    const int* positions,  // [T]
                    act* out,              // [T, H, latent + rope]
                    int T, int H, int nope, int v, int latent, int rope) {
  extern __shared__ __align__(16) float q_nope[];  // [ROWS, nope]
  const int head = blockIdx.x, first = blockIdx.y * ROWS, n = min(ROWS, T - first);
  const int q_width = nope + rope, out_width = latent + rope, half = rope / 2;
  for (int i = threadIdx.x; i < n * nope; i += THREADS)
    q_nope[i] = to_float(q[((i64)(first + i / nope) * H + head) * q_width + i % nope]);
  __syncthreads();  // the query is staged before any thread reads it
  const TABLE* key = kv_b + (i64)head * (nope + v) * latent;
  for (int l = threadIdx.x; l < latent; l += THREADS) {
    float sum[ROWS] = {};
    for (int i = 0; i < nope; i++) {
      const float w = to_float(key[(i64)i * latent + l]);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        if (r < n) sum[r] = __fmaf_rn(w, q_nope[r * nope + i], sum[r]);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      if (r < n) store(out + ((i64)(first + r) * H + head) * out_width + l, sum[r]);
  }
  for (int i = threadIdx.x; i < n * half; i += THREADS) {
    const int row = first + i / half, pair = i % half;
    const act* from = q + ((i64)row * H + head) * q_width + nope + 2 * pair;
    act* to = out + ((i64)row * H + head) * out_width + latent + pair;
    const i64 angle = (i64)positions[row] * half + pair;
    rotate(to_float(from[0]), to_float(from[1]), cosines[angle], sines[angle], to, to + half);
  }
}

// out[t, h, j] = sum over l of o[t, h, l] * value[h, j, l], rounded.
// grid (ceil(H * v / WARPS), ceil(T / ROWS)); a warp owns one (h, j) of ROWS rows, order as `linear`
// with one leaf.
KERNEL absorb_v(const act* o,       // [T, H, latent]
                const TABLE* kv_b,  // [H, nope + v, latent]
                act* out,           // [T, H, v]
                int T, int H, int nope, int v, int latent) {
  const int lane = threadIdx.x & 31, column = blockIdx.x * WARPS + threadIdx.x / 32;
  if (column >= H * v) return;
  const int first = blockIdx.y * ROWS, n = min(ROWS, T - first);
  const int head = column / v, j = column % v;
  const act* rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    rows[r] = o + ((i64)(first + (r < n ? r : 0)) * H + head) * latent;
  float sum[ROWS] = {};
  const i64 row = (i64)head * (nope + v) + nope + j;
  Dense<TABLE>(kv_b, nullptr, 0).accumulate(sum, rows, n, row, latent, 0, latent);
  const float total = warp_sum8(sum);
  if (lane % 4 == 0 && lane / 4 < n) store(out + (i64)(first + lane / 4) * H * v + column, total);
}

// ==== plan ====

// ancestors[t, d]: the batch row that holds position length + d of row t's own path, itself included;
// -1 beyond it. grid ceil(T / THREADS), a thread a row. A parent precedes its children.
KERNEL plan_ancestors(const int* positions,  // [T] absolute
                      const int* sequence,   // [T] cache slot, or -1: a filler row
                      const int* parent,     // [T] row, or -1
                      const int* lengths,    // [slots] committed
                      int* ancestors,        // [T, depth]
                      int T, int depth) {
  begin_dependent();
  const int t = blockIdx.x * THREADS + threadIdx.x;
  if (t >= T) return;
  int* path = ancestors + (i64)t * depth;
  for (int d = 0; d < depth; d++) path[d] = -1;
  if (sequence[t] < 0) return;
  int node = t;
  for (int d = min(positions[t] - lengths[sequence[t]], depth - 1); d >= 0 && node >= 0; d--) {
    path[d] = node;
    node = parent[node];
  }
}

// ==== attention ====

// Softmax over leaves of LEAF positions, folded in ascending order inside spans of SPAN leaves and
// then over spans (R3). Keys are KEY_WIDTH wide; a value is the first VALUE_WIDTH numbers at its key's
// address + value_offset. Compiled once for the target and once for the drafter.
static_assert((LEAF & (LEAF - 1)) == 0, "a power of two");
constexpr int HEADS = 4;  // of one row, computed together: a key is read once for them
constexpr int VALUES = (VALUE_WIDTH + THREADS - 1) / THREADS;

DEVICE float key_dot(const float* q, const act* key) {
  float sum[4] = {};  // columns k % 4, each ascending
  if constexpr (KEY_WIDTH % 8 == 0) {
#pragma unroll 4
    for (int k = 0; k < KEY_WIDTH; k += 8) {
      float values[8];
      load8(key + k, values);
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i % 4] = __fmaf_rn(q[k + i], values[i], sum[i % 4]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      for (int k = i; k < KEY_WIDTH; k += 4) sum[i] = __fmaf_rn(q[k], to_float(key[k]), sum[i]);
  }
  return __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
}

struct Shared {
  float q[HEADS][KEY_WIDTH];
  float scores[HEADS][LEAF];
  float p[HEADS][LEAF];
  float maxima[HEADS];
  const act* keys[LEAF];
};

// One span's softmax part of HEADS heads: reads s.q, writes (maximum, sum) to parts and values.
// key_of(leaf, slot) is the key in that slot, or null if the row does not see it. A slot out of sight
// adds nothing, so the order is: slots ascending inside a leaf, leaves ascending.
template <class KeyOf>
DEVICE void fold_span(Shared& s, const KeyOf& key_of, int leaf, int last_leaf, int value_offset,
                      float factor, int heads, float2* parts, float* values, int part_stride,
                      int value_stride) {
  float top[HEADS], total[HEADS], folded[HEADS][VALUES];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    top[h] = minus_infinity(), total[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; i++) folded[h][i] = 0.0f;
  }
  for (; leaf < last_leaf; leaf++) {
    for (int j = threadIdx.x; j < LEAF; j += THREADS) s.keys[j] = key_of(leaf, j);
    __syncthreads();  // addresses are known before scores are taken
    for (int i = threadIdx.x; i < heads * LEAF; i += THREADS) {
      const act* key = s.keys[i % LEAF];
      s.scores[i / LEAF][i % LEAF] =
          key ? __fmul_rn(key_dot(s.q[i / LEAF], key), factor) : minus_infinity();
    }
    __syncthreads();  // all scores of a head are there before its maximum
    for (int i = threadIdx.x; i < heads * LEAF; i += THREADS) {
      const float* scores = s.scores[i / LEAF];
      float maximum = scores[0];
#pragma unroll 8
      for (int j = 1; j < LEAF; j++) maximum = fmaxf(maximum, scores[j]);
      maximum = ceilf(maximum);
      const float base = maximum == minus_infinity() ? 0.0f : maximum;
      s.p[i / LEAF][i % LEAF] = round_to_act(exp2f(__fsub_rn(scores[i % LEAF], base)));
      if (i % LEAF == 0) s.maxima[i / LEAF] = maximum;
    }
    __syncthreads();  // p and maxima are there before they are summed
    float part[HEADS][VALUES] = {}, sum[HEADS] = {};
#pragma unroll 2
    for (int j = 0; j < LEAF; j++) {
      const act* key = s.keys[j];
      if (!key) continue;
      float value[VALUES];
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        const int d = threadIdx.x + i * THREADS;
        value[i] = d < VALUE_WIDTH ? to_float(key[value_offset + d]) : 0.0f;
      }
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        if (h >= heads) continue;
        const float p = s.p[h][j];
        sum[h] = __fadd_rn(sum[h], p);
#pragma unroll
        for (int i = 0; i < VALUES; i++) part[h][i] = __fmaf_rn(p, value[i], part[h][i]);
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      if (h >= heads) continue;
      const float maximum = fmaxf(top[h], s.maxima[h]);
      const float old = power_of_two(top[h], maximum), now = power_of_two(s.maxima[h], maximum);
      top[h] = maximum;
      total[h] = __fmaf_rn(sum[h], now, __fmul_rn(total[h], old));
#pragma unroll
      for (int i = 0; i < VALUES; i++)
        folded[h][i] = __fmaf_rn(part[h][i], now, __fmul_rn(folded[h][i], old));
    }
    __syncthreads();  // p, maxima and keys have been read before the next leaf overwrites them
  }
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (h >= heads) continue;
    if (threadIdx.x == 0) parts[(i64)h * part_stride] = make_float2(top[h], total[h]);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      const int d = threadIdx.x + i * THREADS;
      if (d < VALUE_WIDTH) values[(i64)h * value_stride + d] = folded[h][i];
    }
  }
}

// Keys and values are 16-byte aligned where KEY_WIDTH is a multiple of 8.

// Spans of absorbed latent attention. grid (span blocks, ceil(H / HEADS), T); a block takes spans
// blockIdx.x, + gridDim.x, …; shared sizeof(Shared). A row sees positions 0 .. its own: committed
// ones in pages, those of its own path in `fresh`.
KERNEL latent_spans(const act* q,           // [T, H, KEY_WIDTH]
                    const act* pages,       // [n_pages, LEAF, KEY_WIDTH]
                    const act* fresh,       // [T, KEY_WIDTH]
                    const int* positions,   // [T]
                    const int* sequence,    // [T], -1: a filler row, which writes nothing
                    const int* lengths,     // [slots]
                    const int* tables,      // [slots, max_pages]
                    const int* ancestors,   // [T, depth]
                    float2* parts,          // [T, H, spans]: maximum (log2), sum
                    float* values,          // [T, H, spans, VALUE_WIDTH]
                    int H, int spans, int max_pages, int depth, float factor) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *(Shared*)memory;
  const int t = blockIdx.z, head = blockIdx.y * HEADS, heads = min(HEADS, H - head);
  if (sequence[t] < 0) return;
  const int position = positions[t], length = lengths[sequence[t]];
  const int* table = tables + (i64)sequence[t] * max_pages;
  const int* path = ancestors + (i64)t * depth;
  const int leaves = position / LEAF + 1;
  auto key_of = [&](int leaf, int slot) -> const act* {
    const int at = leaf * LEAF + slot;
    if (at > position) return nullptr;
    if (at < length) return pages + ((i64)table[leaf] * LEAF + slot) * KEY_WIDTH;
    return fresh + (i64)path[at - length] * KEY_WIDTH;
  };
  for (int i = threadIdx.x; i < heads * KEY_WIDTH; i += THREADS)
    s.q[i / KEY_WIDTH][i % KEY_WIDTH] = to_float(q[((i64)t * H + head) * KEY_WIDTH + i]);
  for (int span = blockIdx.x; span * SPAN < leaves; span += gridDim.x) {
    const i64 at = ((i64)t * H + head) * spans + span;
    fold_span(s, key_of, span * SPAN, min(leaves, (span + 1) * SPAN), 0, factor, heads, parts + at,
              values + at * VALUE_WIDTH, spans, spans * VALUE_WIDTH);
  }
}

// Spans of the drafter's attention: a block's rows see the context (inside the window) and all rows
// of the block, which form one leaf after the context's last. grid (span blocks, KV * ceil(group /
// HEADS), B * n); shared sizeof(Shared). KEY_WIDTH = VALUE_WIDTH = d.
KERNEL block_spans(const act* q,        // [B * n, H, d]
                   const act* kv,       // [B * n, 2, KV, d], keys then values
                   const act* pages,    // [n_pages, LEAF, 2, KV, d]
                   const int* lengths,  // [B] context entries
                   const int* tables,   // [B, max_pages]
                   float2* parts,       // [B * n, H, spans]
                   float* values,       // [B * n, H, spans, d]
                   int n, int H, int KV, int spans, int max_pages, int window, float factor) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *(Shared*)memory;
  const int group = H / KV, tiles = (group + HEADS - 1) / HEADS;
  const int t = blockIdx.z, block = t / n, kv_head = blockIdx.y / tiles;
  const int head = kv_head * group + blockIdx.y % tiles * HEADS;
  const int heads = min(HEADS, (kv_head + 1) * group - head);
  const int length = lengths[block], position = length + t % n, entry = 2 * KV * KEY_WIDTH;
  const int* table = tables + (i64)block * max_pages;
  const int context_leaves = (length + LEAF - 1) / LEAF;
  const int first_leaf = window && length ? max(0, length - window + 1) / LEAF : 0;
  const act* own = kv + (i64)block * n * entry + kv_head * KEY_WIDTH;
  auto key_of = [&](int leaf, int slot) -> const act* {
    if (leaf == context_leaves) return slot < n ? own + (i64)slot * entry : nullptr;
    const int at = leaf * LEAF + slot;
    if (at >= length || (window && position - at >= window)) return nullptr;
    return pages + ((i64)table[leaf] * LEAF + slot) * entry + kv_head * KEY_WIDTH;
  };
  for (int i = threadIdx.x; i < heads * KEY_WIDTH; i += THREADS)
    s.q[i / KEY_WIDTH][i % KEY_WIDTH] = to_float(q[((i64)t * H + head) * KEY_WIDTH + i]);
  for (int span = blockIdx.x; span * SPAN <= context_leaves; span += gridDim.x) {
    const i64 at = ((i64)t * H + head) * spans + span;
    fold_span(s, key_of, max(first_leaf, span * SPAN), min(context_leaves + 1, (span + 1) * SPAN),
              KV * KEY_WIDTH, factor, heads, parts + at, values + at * VALUE_WIDTH, spans,
              spans * VALUE_WIDTH);
  }
}

// out = folded value / folded sum, rounded; spans ascending. grid (ceil(VALUE_WIDTH / THREADS), H, T).
// The first n of a row's spans hold something; none: a filler row, zero.
DEVICE void fold_spans(const float2* parts, const float* values, act* out, int H, int spans, int n) {
  const int d = blockIdx.x * THREADS + threadIdx.x;
  if (d >= VALUE_WIDTH) return;
  const i64 row = (i64)blockIdx.z * H + blockIdx.y;
  float top = minus_infinity(), sum = 0.0f, value = 0.0f;
  for (int span = 0; span < n; span++) {
    const float2 part = parts[row * spans + span];
    const float maximum = fmaxf(top, part.x);
    const float old = power_of_two(top, maximum), now = power_of_two(part.x, maximum);
    top = maximum;
    sum = __fmaf_rn(part.y, now, __fmul_rn(sum, old));
    value = __fmaf_rn(values[(row * spans + span) * VALUE_WIDTH + d], now, __fmul_rn(value, old));
  }
  store(out + row * VALUE_WIDTH + d, n ? __fdiv_rn(value, sum) : 0.0f);
}

KERNEL latent_fold(const float2* parts,   // [T, H, spans]
                   const float* values,   // [T, H, spans, VALUE_WIDTH]
                   const int* positions,  // [T]
                   const int* sequence,   // [T], -1: a filler row, which becomes zero
                   act* out,              // [T, H, VALUE_WIDTH]
                   int H, int spans) {
  const int t = blockIdx.z;
  const int n = sequence[t] < 0 ? 0 : positions[t] / (LEAF * SPAN) + 1;
  fold_spans(parts, values, out, H, spans, n);
}

KERNEL block_fold(const float2* parts,  // [B * n, H, spans]
                  const float* values,  // [B * n, H, spans, d]
                  const int* lengths,   // [B]
                  act* out,             // [B * n, H, d]
                  int n, int H, int spans) {
  const int context_leaves = (lengths[blockIdx.z / n] + LEAF - 1) / LEAF;
  fold_spans(parts, values, out, H, spans, context_leaves / SPAN + 1);
}

// ==== route ====

// The sum of equal `shares` (a power of two, at most 8) of a product's K, `apart`: joined pairwise.
DEVICE float join_shares(const float* of, int shares, i64 apart) {
  float part[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < shares) part[i] = of[i * apart];
#pragma unroll
  for (int d = 1; d < 8; d <<= 1)
    if (d < shares)
#pragma unroll
      for (int i = 0; i < 8; i += 2 * d) part[i] = __fadd_rn(part[i], part[i + d]);
  return part[0];
}

DEVICE void begin_route() {
  grid_dependency_wait();  // for the logits; another step may still read ids, weights and h
  // Not before: blocks of the next kernel would pile up on the processors that are free by then.
  grid_dependency_launch();
}

// Sigmoid router: the bias chooses, the unbiased scores weigh (R4). Ties go to the lower id, NaN counts
// as -inf. Chosen weights are added in ascending id. One block a row: a thread scores -DPER_THREAD
// experts, threadIdx.x and on by THREADS. Of the warps' best ones the least has a rank of WARPS at most,
// so only experts that reach it are candidates for top_k <= WARPS places; each counts the candidates
// in front of it.
// Further blocks: h = SiLU(gate) * up, rounded, one element a thread. Their columns follow those of the
// experts, padded to whole tiles of 16: 8 gates, their 8 ups, and so on.
// All blocks rehearse before the logits are there: so short a kernel waits mostly for its instructions.
// grid T + ceil(T * width / THREADS); shared: 2 E + 3 top_k + WARPS + 1 words.
KERNEL route(const float* logits,  // [shares, T, stride]
             const float* bias,    // [E]
             int* ids,             // [T, top_k] ascending
             float* weights,       // [T, top_k]
             act* h,               // [T, width]
             int T, int E, int stride, int shares, int top_k, int normalise, float scaling,
             int width) {
  extern __shared__ __align__(16) u64 ranks[];  // [E] of candidates: key << 32 | ~id, higher ones first
  int* chosen = (int*)(ranks + E);              // [top_k] ids, best first
  float* picked = (float*)(chosen + top_k);     // [top_k] their scores
  float* weighed = picked + top_k;              // [top_k], by ascending id
  u32* best = (u32*)(weighed + top_k);          // [WARPS] keys
  int* candidates = (int*)(best + WARPS);       // [1]
  const i64 apart = (i64)T * stride;
  if ((int)blockIdx.x >= T) {
    const int i = (blockIdx.x - T) * THREADS + threadIdx.x, row = i / width, c = i % width;
    const float* gate = logits + (i64)row * stride + (E + 15) / 16 * 16 + c / 8 * 16 + c % 8;
#pragma unroll 1
    for (int real = 0; real < 2; real++) {
      float g = 0.0f, up = 0.0f;
      if (real) begin_route();
      if (row >= T) continue;
      if (real) g = join_shares(gate, shares, apart), up = join_shares(gate + 8, shares, apart);
      const float value = __fmul_rn(silu(g), up);
      if (real) store(h + i, value);
    }
    return;
  }
  const int lane = threadIdx.x & 31;
  logits += (i64)blockIdx.x * stride, ids += (i64)blockIdx.x * top_k, weights += (i64)blockIdx.x * top_k;
  float offset[PER_THREAD], score[PER_THREAD];
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    offset[i] = bias[min(i * THREADS + (int)threadIdx.x, E - 1)];
    score[i] = 0.01f * lane;  // of the rehearsal: unlike ones, so that few are candidates
  }
#pragma unroll 1
  for (int real = 0; real < 2; real++) {
    if (threadIdx.x == 0) *candidates = 0;
    if (real) {
      begin_route();
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++)  // all loads are on their way before one is used
        score[i] = join_shares(logits + min(i * THREADS + (int)threadIdx.x, E - 1), shares, apart);
    }
    u32 key[PER_THREAD], most = 0;  // a key is ordered as the choices, and above 0
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
      score[i] = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-score[i])));
      const float value = __fadd_rn(__fadd_rn(score[i], offset[i]), 0.0f);  // -0 becomes 0
      const u32 bits = __float_as_uint(value == value ? value : minus_infinity());
      key[i] = bits >> 31 ? ~bits : bits | 0x80000000u;
      if (i * THREADS + (int)threadIdx.x >= E) key[i] = 0;
      most = max(most, key[i]);
    }
    most = __reduce_max_sync(ALL, most);
    if (lane == 0) best[threadIdx.x / 32] = most;
    __syncthreads();  // every warp's best is there; so is the zero of `candidates`
    u32 least = top_k > WARPS ? 0 : best[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) least = min(least, best[w]);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
      if (key[i] == 0 || key[i] < least) continue;
      ranks[atomicAdd(candidates, 1)] = (u64)key[i] << 32 | ~(u32)(i * THREADS + threadIdx.x);
    }
    __syncthreads();  // all candidates are there before they are compared
    const int n = *candidates;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
      if (key[i] == 0 || key[i] < least) continue;
      const int e = i * THREADS + threadIdx.x;
      const u64 own = (u64)key[i] << 32 | ~(u32)e;
      int before = 0;
#pragma unroll 8
      for (int j = 0; j < n; j++) before += ranks[j] > own;
      if (before < top_k) chosen[before] = e, picked[before] = score[i];
    }
    __syncthreads();  // all choices are there
    if (threadIdx.x >= 32) continue;
#pragma unroll 1
    for (int k = lane; k < top_k; k += 32) {
      int slot = 0;
#pragma unroll 8
      for (int j = 0; j < top_k; j++) slot += chosen[j] < chosen[k];
      if (real) ids[slot] = chosen[k];
      weighed[slot] = picked[k];
    }
    __syncwarp();  // all scores are there
    float total = 0.0f;
#pragma unroll 8
    for (int k = 0; k < top_k; k++) total = __fadd_rn(total, weighed[k]);
#pragma unroll 1
    for (int k = lane; k < top_k; k += 32) {
      const float weight =
          normalise ? __fdiv_rn(weighed[k], __fadd_rn(total, 1e-20f)) : weighed[k];
      if (real) weights[k] = __fmul_rn(weight, scaling);
    }
  }
}

// ==== sort_pairs ====

// (row, expert) pairs by ascending expert, then pair; cut in tiles of at most ROWS pairs. One block;
// shared 2 * THREADS ints. Ids outside [0, E) are filler and appear in no tile.
KERNEL sort_pairs(const int* ids,  // [P]
                  int* order,      // [P]
                  int* tiles,      // [max_tiles, 3]: expert, first place in `order`, pairs
                  int* n_tiles,    // [1]
                  int P, int E) {
  extern __shared__ __align__(16) int counts[];  // pairs and tiles of each thread's experts
  const int per = (E + THREADS - 1) / THREADS;
  const int first = threadIdx.x * per, last = min(E, first + per);
  auto count = [&](int e) {
    int n = 0;
    for (int p = 0; p < P; p++) n += ids[p] == e;
    return n;
  };
  int pairs = 0, own_tiles = 0;
  for (int e = first; e < last; e++) {
    const int n = count(e);
    pairs += n, own_tiles += (n + ROWS - 1) / ROWS;
  }
  counts[threadIdx.x] = pairs, counts[THREADS + threadIdx.x] = own_tiles;
  __syncthreads();  // every thread's counts are there before they are added
  int place = 0, tile = 0, all = 0;
  for (int i = 0; i < THREADS; i++) {
    if (i < threadIdx.x) place += counts[i], tile += counts[THREADS + i];
    all += counts[THREADS + i];
  }
  if (threadIdx.x == 0) *n_tiles = all;
  for (int e = first; e < last; e++) {
    const int begin = place;
    for (int p = 0; p < P; p++)
      if (ids[p] == e) order[place++] = p;
    for (int at = begin; at < place; at += ROWS, tile++) {
      tiles[3 * tile] = e, tiles[3 * tile + 1] = at, tiles[3 * tile + 2] = min(ROWS, place - at);
    }
  }
}

// ==== gate_up ====

// h = SiLU(x gate^T) * (x up^T), rounded, for n (of ROWS) rows of x; gate and up add as `linear` with
// one leaf. A warp owns one column.
DEVICE void gate_up(const act* const (&x)[ROWS], act* const (&h)[ROWS], int n, const WEIGHT& gate,
                    const WEIGHT& up, i64 first_row, int column, int K) {
  float sum[ROWS] = {};
  gate.accumulate(sum, x, n, first_row + column, K, 0, K);
  const float g = warp_sum8(sum);
#pragma unroll
  for (int r = 0; r < ROWS; r++) sum[r] = 0.0f;
  up.accumulate(sum, x, n, first_row + column, K, 0, K);
  const float u = warp_sum8(sum);
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    if (lane == 4 * r && r < n) store(h[r] + column, __fmul_rn(silu(g), u));
}

// A block takes ROWS pairs of one expert. grid (ceil(width / WARPS), max_tiles).
KERNEL expert_gate_up(const act* x,      // [T, K], INT4: 16-byte aligned
                      const int* order,  // [T * top_k], of sort_pairs
                      const int* tiles,  // [max_tiles, 3]
                      const int* n_tiles,       // [1]
                      const void* gate,         // [E, width, K], or words
                      const void* gate_scales,  // INT4: [E, width, K / group]
                      const void* up,           // likewise
                      const void* up_scales,    // likewise
                      int group,
                      act* h,  // [T * top_k, width]
                      int top_k, int width, int K) {
  const int column = blockIdx.x * WARPS + threadIdx.x / 32, tile = blockIdx.y;
  if (tile >= *n_tiles || column >= width) return;
  const int expert = tiles[3 * tile], begin = tiles[3 * tile + 1], n = tiles[3 * tile + 2];
  const act* rows[ROWS];
  act* out[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int pair = order[begin + (r < n ? r : 0)];
    rows[r] = x + (i64)(pair / top_k) * K;
    out[r] = h + (i64)pair * width;
  }
  gate_up(rows, out, n, WEIGHT(gate, gate_scales, group), WEIGHT(up, up_scales, group),
          (i64)expert * width, column, K);
}

// The same for one MLP that all rows take. grid (ceil(width / WARPS), ceil(T / ROWS)).
KERNEL dense_gate_up(const act* x, const void* gate, const void* gate_scales, const void* up,
                     const void* up_scales, int group,
                     act* h,  // [T, width]
                     int T, int width, int K) {
  const int column = blockIdx.x * WARPS + threadIdx.x / 32, first = blockIdx.y * ROWS;
  if (column >= width) return;
  const int n = min(ROWS, T - first);
  const act* rows[ROWS];
  act* out[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    rows[r] = x + (i64)(first + (r < n ? r : 0)) * K;
    out[r] = h + (i64)(first + (r < n ? r : 0)) * width;
  }
  gate_up(rows, out, n, WEIGHT(gate, gate_scales, group), WEIGHT(up, up_scales, group), 0, column,
          K);
}

// ==== expert_down ====

// out[t, o]: in every leaf of the width, routed experts by ascending id, weighted, then the shared
// one; then the leaf tree (R4). grid (ceil(hidden / WARPS), T); a warp owns one output of one row.
// A leaf's sum of one expert adds as `linear`; it joins by fma(weight, sum, total). leaves <= 8.
KERNEL expert_down(const act* h,         // [T * top_k, width], INT4: 16-byte aligned
                   const int* ids,       // [T, top_k] ascending in a row; outside [0, E): filler
                   const float* weights, // [T, top_k]
                   const void* down,     // [E, hidden, width], or words
                   const void* scales,   // INT4: [E, hidden, width / group]
                   int group,
                   const float* shared,  // [T, leaves, hidden], read if has_shared
                   float* out,           // [T, hidden]
                   int E, int top_k, int width, int hidden, int leaves, int has_shared) {
  const int lane = threadIdx.x & 31, column = blockIdx.x * WARPS + threadIdx.x / 32;
  if (column >= hidden) return;
  const WEIGHT w(down, scales, group);
  const int t = blockIdx.y, leaf_width = width / leaves;
  float total = 0.0f;  // of leaf lane / 4
  for (int k = 0; k < top_k; k++) {
    const i64 pair = (i64)t * top_k + k;
    const int expert = ids[pair];
    if (expert < 0 || expert >= E) continue;
    const act* const row[1] = {h + pair * width};
    float sums[8];
#pragma unroll
    for (int leaf = 0; leaf < 8; leaf++) {
      float sum[1] = {0.0f};
      if (leaf < leaves)
        w.accumulate(sum, row, 1, (i64)expert * hidden + column, width, leaf * leaf_width,
                     (leaf + 1) * leaf_width);
      sums[leaf] = sum[0];
    }
    total = __fmaf_rn(weights[pair], warp_sum8(sums), total);
  }
  const int leaf = lane / 4;
  if (has_shared && leaf < leaves)
    total = __fadd_rn(total, shared[((i64)t * leaves + leaf) * hidden + column]);
  for (int distance = 4; distance < 4 * leaves; distance <<= 1)
    total = __fadd_rn(total, __shfl_xor_sync(ALL, total, distance));
  if (lane == 0) out[(i64)t * hidden + column] = total;
}
