// Matrix products of bfloat16 activations on tensor cores: what ops.py runs in place of the simple
// kernels where the config asks for it and the shape allows it.
//
// Weights lie on the 16 side of mma m16n8k16, rows of x on the 8 side, so one packing serves every T.
// A row of x is one column of an mma and shares no arithmetic with its neighbours (R1). K goes in
// steps of 32 columns, ascending, two mma each; in both lane (g, t) holds columns 8t .. 8t + 3 or
// 8t + 4 .. 8t + 7 of the step, which are 16 neighbouring bytes of x.
//
// Weights of linear_mma and wide_mma are copied asynchronously, through a ring of STAGES places
// (-DSTAGES) a warp or a block; absorb_mma and query_mma, short kernels, fetch all of theirs before
// their input is there.

// ==== read ====

// Reads everything once: what the memory gives to a kernel that does nothing else. Any grid.
KERNEL read_all(const uint4* data,  // [n]
                i64 n,
                u32* out) {  // [1], written if all bits of a thread's data cancel out to a rare value
  const i64 stride = (i64)gridDim.x * THREADS;
  i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  u32 mixed = 0;
  for (; i + 7 * stride < n; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = __ldcs(data + i + k * stride);
#pragma unroll
    for (int k = 0; k < 8; k++) mixed ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < n; i += stride) mixed ^= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  if (mixed == 0x12345u) *out = mixed;
}

// ==== pack ====

// Weights to the order in which warps read them, once at load. Tile i of 16 rows: rows g = 0 .. 7 are
// rows stride * i + g of a, rows 8 + g are rows stride * i + offset + g of b. Gate and up interleave
// (stride 8, offset 0: one lane then holds a gate and its up), a plain matrix has a = b, stride 16,
// offset 8.

// grid ceil(n / THREADS); a thread makes one lane's 16 bytes of one mma.
KERNEL pack_dense(const bf16* a,  // [rows, K]
                  const bf16* b,  // likewise
                  uint4* out,     // [blocks, K / 32, wide, 2, 32]; wide tiles a block; rows past the
                                  // last are zero
                  int rows, int K, int stride, int offset, int wide, i64 n) {
  const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  const int lane = i % 32, half = i / 32 % 2, m = i / 64 % wide;
  const i64 rest = i / (64 * wide), tile = rest / (K / 32) * wide + m;
  const int column = rest % (K / 32) * 32 + lane % 4 * 8 + half * 4;
  const i64 low = tile * stride + lane / 4, high = low + offset;
  uint2 p = {0, 0}, q = {0, 0};
  if (low < rows) p = *(const uint2*)(a + low * K + column);
  if (high < rows) q = *(const uint2*)(b + high * K + column);
  out[i] = uint4{p.x, q.x, p.y, q.y};
}

// INT4 experts, 2 tiles a block, K in chunks of `groups` quantisation groups of 32: first the first one
// of each of `parts` of K, whose warps read them at the same time, and so on. A chunk of a tile: codes,
// 64 * groups words, by pairs of groups (single groups if odd), lane, group, half; then scales
// of rows g and 8 + g as one word, 8 * groups, by g, group. grid ceil(n / THREADS); a thread makes one
// word.
KERNEL pack_int4(const u32* a,          // [E, rows, K / 8], the published packing
                 const u32* b,          // likewise
                 const bf16* a_scales,  // [E, rows, K / 32]
                 const bf16* b_scales,  // likewise
                 void* packed,          // u32 [E, tiles / 2, K / 32 / groups, 2, 72 * groups]
                 int rows, int K, int tiles, int groups, int parts, int stride, int offset, i64 n) {
  const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  u32* out = (u32*)packed;
  const int words = 72 * groups, chunks = K / 32 / groups;
  int w = i % words;
  const i64 rest = i / words / 2, e = rest / chunks / (tiles / 2);
  const int tile = rest / chunks % (tiles / 2) * 2 + i / words % 2, place = rest % chunks;
  const int chunk = place % parts * (chunks / parts) + place / parts;
  const i64 low = e * rows + tile * stride, high = low + offset;
  if (w >= 64 * groups) {
    w -= 64 * groups;
    const int g = w / groups, column = chunk * groups + w % groups;
    out[i] = (u32)a_scales[(low + g) * (K / 32) + column].bits |
             (u32)b_scales[(high + g) * (K / 32) + column].bits << 16;
    return;
  }
  const int together = groups % 2 ? 1 : 2, each = 2 * together;
  const int lane = w / each % 32, group = w / (32 * each) * together + w % each / 2, half = w % 2;
  const int word = (chunk * groups + group) * 4 + lane % 4;
  const u32 p = a[(low + lane / 4) * (K / 8) + word] >> (16 * half);
  const u32 q = b[(high + lane / 4) * (K / 8) + word] >> (16 * half);
  // Nibbles 0 and 4 are columns 0, 1 of the lower row, 1 and 5 of the upper; 2, 6, 3, 7: columns 2, 3.
  u32 code = 0;
#pragma unroll
  for (int c = 0; c < 4; c++) {
    code |= ((p >> (4 * c)) & 15u) << (16 * (c % 2) + 8 * (c / 2));
    code |= ((q >> (4 * c)) & 15u) << (16 * (c % 2) + 8 * (c / 2) + 4);
  }
  out[i] = code;
}

// The weights of heads for absorb_mma, cut out of kv_b: output o and column k of head h lie at
// h * head + first + o * across + k * down. Outputs 16 i + 2 g are rows g of tile i and their right
// neighbours rows 8 + g: a lane of the product then holds pairs. grid ceil(n / THREADS); a thread makes
// one lane's 16 bytes of one mma.
KERNEL pack_heads(const bf16* kv_b,
                  uint4* out,  // [H, tiles, K / 32, 2, 32]; outputs past the last are zero
                  int outputs, int K, int head, int first, int across, int down, i64 n) {
  const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  const int lane = i % 32, half = i / 32 % 2, tiles = (outputs + 15) / 16, steps = K / 32;
  const i64 rest = i / 64;
  const int column = rest % steps * 32 + lane % 4 * 8 + half * 4;
  const int low = rest / steps % tiles * 16 + lane / 4 * 2;
  const bf16* from = kv_b + rest / steps / tiles * head + first;
  auto two = [&](int o, int k) {  // columns k, k + 1
    if (o >= outputs) return 0u;
    const bf16* at = from + (i64)o * across + (i64)k * down;
    return (u32)at[0].bits | (u32)at[down].bits << 16;
  };
  out[i] = uint4{two(low, column), two(low + 1, column), two(low, column + 2), two(low + 1, column + 2)};
}

// ==== linear_mma ====

// Sums over K in `parts` equal parts (a power of two), joined pairwise; a part adds its steps
// ascending. An item is `columns` blocks of MW tiles of 16 outputs, for NT * 8 rows of x; the eight warps
// share out its parts and columns: warp w takes parts of share w % split, column w / split. A warp
// with several parts joins them as a binary counter carries. x is loaded AHEAD steps before its use.
struct Shape {
  int stride;  // elements between rows of x
  int blocks;  // of MW tiles
  int steps;   // K / 32 of the whole matrix
  int first;   // step that this sum begins with
  int parts, part_steps, chunk;  // chunk: steps of one copy, divides part_steps
  int split;                     // warps that share K, a power of two up to WARPS and `parts`
};

// Calls finish(tile, n, v) for every tile of outputs and every eight rows of x: v.x, v.y are output
// 16 tile + g of rows 8n + 2t and 8n + 2t + 1, v.z, v.w those of output 16 tile + 8 + g.
// Shared: rings of STAGES places (one, where a warp takes one chunk), then [WARPS, MW, NT, 32] float4
// sums, then as many for each level of waiting parts, then barriers.
template <int NT, int MW, int AHEAD, class Finish>
DEVICE void products(const bf16* x, const unsigned char* weight, int T, const Shape& s,
                     const Finish& finish) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int STEP = MW * 1024;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int split = s.split, columns = WARPS / split;
  const int share = warp % split, column = warp / split;
  const int own = s.parts / split, steps = own * s.part_steps, chunks = steps / s.chunk;
  const int part_chunks = s.part_steps / s.chunk, units = columns * MW * NT;
  const int bytes = s.chunk * STEP, items = (s.blocks + columns - 1) / columns;
  // One item a block: all blocks run at once, and the next kernel's weights may come meanwhile.
  const bool single = items <= (int)gridDim.x;
  const int places = single && chunks == 1 ? 1 : STAGES;
  float4* sums = (float4*)(memory + WARPS * places * bytes);
  float4* waiting = sums + WARPS * MW * NT * 32 + warp * MW * NT * 32;
  int levels = 0;
  while ((1 << levels) < own) levels++;
  u64* barriers = (u64*)(sums + (levels + 1) * WARPS * MW * NT * 32);
  Ring<STAGES> ring(memory + warp * places * bytes, barriers + warp * STAGES, bytes);

  int put_item = blockIdx.x, put_chunk = 0;
  const unsigned char* from;
  auto locate = [&] {
    const i64 block = (i64)put_item * columns + column;
    from = weight + (block * s.steps + s.first + share * steps) * STEP;
  };
  auto there = [&] { return put_item * columns + column < s.blocks; };
  auto advance = [&] {
    from += bytes;
    if (++put_chunk == chunks) put_chunk = 0, put_item += gridDim.x, locate();
  };
  locate();
#pragma unroll
  for (int i = 0; i < STAGES; i++) ring.start(i, from, there()), advance();
  const bool early = single && gridDim.y == 1;
  if (early) grid_dependency_launch();
  grid_dependency_wait();  // weights are always there; x comes from the kernel in front

  const int row = g * s.stride + (s.first + share * steps) * 32 + t * 8;  // of 64 rows: an int does
  uint4 b[AHEAD][NT] = {};  // of one chunk; rows past the last stay zero
  auto load = [&](int place, int chunk, int k) {
#pragma unroll
    for (int n = 0; n < NT; n++)
      if (n * 8 + g < T)
        b[place][n] = *(const uint4*)(x + row + n * 8 * s.stride + (chunk * s.chunk + k) * 32);
  };
#pragma unroll
  for (int k = 0; k < AHEAD; k++)
    if (k < s.chunk) load(k, 0, k);

  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    float sum[MW][NT][4] = {};
    if (item * columns + column < s.blocks) {  // else this was the block's last item
#pragma unroll 1
      for (int c = 0; c < chunks; c++) {
        const uint4* w = (const uint4*)ring.get() + lane;
        // Whether b goes on to the next chunk; an item of one chunk that b holds whole keeps it.
        const bool again = (chunks > 1 || AHEAD < s.chunk) &&
                           (c + 1 < chunks || item + (int)gridDim.x < items);
#pragma unroll 1
        for (int begin = 0; begin < s.chunk; begin += AHEAD)
#pragma unroll
          for (int i = 0; i < AHEAD; i++) {
            const int k = begin + i;
            if (k >= s.chunk) break;
#pragma unroll
            for (int half = 0; half < 2; half++) {
              u32 a[MW][4];
#pragma unroll
              for (int m = 0; m < MW; m++) {
                const uint4 v = w[((k * MW + m) * 2 + half) * 32];
                a[m][0] = v.x, a[m][1] = v.y, a[m][2] = v.z, a[m][3] = v.w;
              }
#pragma unroll
              for (int n = 0; n < NT; n++)
#pragma unroll
                for (int m = 0; m < MW; m++)
                  if (half == 0) mma_bf16(sum[m][n], a[m], b[i][n].x, b[i][n].y);
                  else mma_bf16(sum[m][n], a[m], b[i][n].z, b[i][n].w);
            }
            if (k + AHEAD < s.chunk) load(i, c, k + AHEAD);
            else if (again) load(i, c + 1 == chunks ? 0 : c + 1, i);
          }
        ring.replace(from, there());
        advance();
        if (own == 1 || (c + 1) % part_chunks) continue;
        const int part = c / part_chunks;
#pragma unroll
        for (int m = 0; m < MW; m++)
#pragma unroll
          for (int n = 0; n < NT; n++) {
            float4* of = waiting + (m * NT + n) * 32 + lane;  // read and written by this lane alone
            float4 v = {sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]};
            int level = 0;
            for (; (part >> level) & 1; level++) {
              const float4 left = of[level * WARPS * MW * NT * 32];
              v.x = __fadd_rn(left.x, v.x), v.y = __fadd_rn(left.y, v.y);
              v.z = __fadd_rn(left.z, v.z), v.w = __fadd_rn(left.w, v.w);
            }
            if (part + 1 < own) {
              of[level * WARPS * MW * NT * 32] = v;
              v = float4{0, 0, 0, 0};
            }
            sum[m][n][0] = v.x, sum[m][n][1] = v.y, sum[m][n][2] = v.z, sum[m][n][3] = v.w;
          }
      }
    }
    if (!early && item + gridDim.x >= items) grid_dependency_launch();  // late: blocks would pile up
#pragma unroll
    for (int m = 0; m < MW; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
        sums[(share * units + (column * MW + m) * NT + n) * 32 + lane] =
            float4{sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]};
    __syncthreads();  // all shares of a sum are there before they are joined
    for (int u = warp; u < units; u += WARPS) {
      float4 v = join(sums + u * 32 + lane, units * 32, min(split, WARPS / 2));
      if (split == WARPS) {
        const float4 right = join(sums + (WARPS / 2 * units + u) * 32 + lane, units * 32, WARPS / 2);
        v.x = __fadd_rn(v.x, right.x), v.y = __fadd_rn(v.y, right.y);
        v.z = __fadd_rn(v.z, right.z), v.w = __fadd_rn(v.w, right.w);
      }
      const int block = item * columns + u / (MW * NT);
      if (block < s.blocks) finish(block * MW + u / NT % MW, u % NT, v);
    }
    if (item + gridDim.x < items) __syncthreads();  // joined before the next item writes `sums`
  }
}

// y[z][t, o] = sum over the z-th of gridDim.z shares of K of x[t, k] w[o, k], bf16 if rounded; s.parts
// are those of a share. grid (blocks shared out, ceil(T / (8 NT)), shares), block THREADS.
template <int NT, int MW, int AHEAD>
DEVICE void linear_mma(const bf16* x, const unsigned char* weight, void* y, int rounded, int y_stride,
                       int apart, int T, int out, const Shape& s) {
  const int first = blockIdx.y * NT * 8, rows = min(T - first, NT * 8), lane = threadIdx.x & 31;
  const i64 begin = (i64)first * y_stride + (i64)blockIdx.z * apart;
  auto put = [&](i64 at, float value) {
    if (rounded) store((bf16*)y + at, value);
    else ((float*)y)[at] = value;
  };
  auto finish = [&](int tile, int n, float4 v) {
    const int o = tile * 16 + lane / 4, t = n * 8 + lane % 4 * 2;
    const float low[2] = {v.x, v.y}, high[2] = {v.z, v.w};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (t + i >= rows) continue;
      const i64 at = begin + (i64)(t + i) * y_stride + o;
      if (o < out) put(at, low[i]);
      if (o + 8 < out) put(at + 8, high[i]);
    }
  };
  products<NT, MW, AHEAD>(x + (i64)first * s.stride, weight, rows, s, finish);
}

// h[t, c] = SiLU(gate) * up, rounded: tiles hold 8 gates and their 8 ups. Same grid.
template <int NT, int AHEAD>
DEVICE void gate_up_mma(const bf16* x, const unsigned char* weight, bf16* h, int T, int width,
                        const Shape& s) {
  const int first = blockIdx.y * NT * 8, rows = min(T - first, NT * 8), lane = threadIdx.x & 31;
  h += (i64)first * width;
  auto finish = [&](int tile, int n, float4 v) {
    const int o = tile * 8 + lane / 4, t = n * 8 + lane % 4 * 2;
    if (o >= width) return;
    if (t < rows) store(h + (i64)t * width + o, __fmul_rn(silu(v.x), v.z));
    if (t + 1 < rows) store(h + (i64)(t + 1) * width + o, __fmul_rn(silu(v.y), v.w));
  };
  products<NT, 1, AHEAD>(x + (i64)first * s.stride, weight, rows, s, finish);
}

// Names: linear_mma_NT_MW, gate_up_mma_NT_1; -DAHEAD_NT_MW, -DRESIDENT_NT_MW blocks a multiprocessor.
// x [T, stride], 16-byte aligned rows; weight of pack_dense.
#define LINEAR(NT, MW)                                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_##NT##_##MW)                      \
  linear_mma_##NT##_##MW(const bf16* x, const unsigned char* weight,                               \
                         void* y /* [T, y_stride], shares `apart` */, int rounded, int y_stride,   \
                         int apart, int T, int out, int stride, int blocks, int steps, int parts,  \
                         int part_steps, int chunk, int split) {                                   \
    const int first = blockIdx.z * parts * part_steps;                                             \
    const Shape s = {stride, blocks, steps, first, parts, part_steps, chunk, split};               \
    linear_mma<NT, MW, AHEAD_##NT##_##MW>(x, weight, y, rounded, y_stride, apart, T, out, s);      \
  }
#define GATE_UP(NT)                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_##NT##_1) gate_up_mma_##NT##_1(   \
      const bf16* x, const unsigned char* weight, bf16* h /* [T, width] */, int T, int width,      \
      int stride, int blocks, int steps, int parts, int part_steps, int chunk, int split) {        \
    const Shape s = {stride, blocks, steps, 0, parts, part_steps, chunk, split};                   \
    gate_up_mma<NT, AHEAD_##NT##_1>(x, weight, h, T, width, s);                                    \
  }
LINEAR(1, 1)
LINEAR(2, 1)
LINEAR(4, 1)
LINEAR(8, 1)
LINEAR(1, 2)
LINEAR(2, 2)
LINEAR(4, 2)
LINEAR(8, 2)
GATE_UP(1)
GATE_UP(2)
GATE_UP(4)
GATE_UP(8)

// ==== wide_mma ====

// The sums of linear_mma, bit for bit, for many rows. A block has 32 MW outputs of 8 NT WARPS / (2 WK)
// rows, a warp 16 MW of 8 NT; both operands come through shared memory, so that a block reads each
// once. K falls in `splits` (gridDim.z), those in WK shares of a block's warps, those in `own` parts,
// all equal: a power of two. A part adds its steps ascending, parts of a warp join as a binary counter
// carries (the first level in registers, the others in shared memory), then shares, then splits: the
// last block of a tile that comes joins them, or y has them apart.
// grid (output tiles, row tiles, splits), block THREADS.
// Shared: [STAGES] places of [WK] x (weights [2 MW, STEPS] kB and x [STEPS, rows, 32]), then waiting
// parts, [levels, MW NT, THREADS] float4.
struct WideShape {
  int T, out, stride;   // x is [T, stride], 16-byte aligned rows
  int blocks, wide;     // of pack_dense: `wide` tiles each
  int steps;            // K / 32
  int own, part_steps;  // steps of a part
  int early;            // whether all blocks run at once
  int form;             // of y: 0 fp32, 1 rounded, SILU_MUL: of gates and ups, as gate_up_mma has it
  int y_stride, apart;  // y[row * y_stride + output]; splits `apart`, if not 0
  float4* between;      // [splits, row tiles, output tiles, outputs * rows / 4], if splits join
  int* arrived;         // [row tiles, output tiles]: zeros, here and after it
};

// v.x, v.y: row g of a tile of weights, rows t and t + 1 of x; v.z, v.w: row 8 + g of the tile.
DEVICE void put_wide(void* y, const WideShape& s, int tile, int t, float4 v) {
  const int g = (threadIdx.x & 31) / 4;
  const float low[2] = {v.x, v.y}, high[2] = {v.z, v.w};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (t + i >= s.T) continue;
    const i64 row = (i64)(t + i) * s.y_stride;
    if (s.form == SILU_MUL) {
      if (tile * 8 + g < s.out)
        store((bf16*)y + row + tile * 8 + g, __fmul_rn(silu(low[i]), high[i]));
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int o = tile * 16 + half * 8 + g;
      if (o >= s.out) continue;
      if (s.form) store((bf16*)y + row + o, half ? high[i] : low[i]);
      else ((float*)y)[row + o] = half ? high[i] : low[i];
    }
  }
}

template <int MW, int NT, int WK, int STAGES>
DEVICE void wide_mma(const bf16* x, const unsigned char* weight, void* y, const WideShape& s) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int TILES = 2 * MW, ACROSS = WARPS / 2 / WK, MOST = 8 * NT * ACROSS;  // MOST: rows
  constexpr int WEIGHTS = TILES * STEPS * 1024, SHARE = WEIGHTS + STEPS * MOST * 64;
  constexpr int PLACE = WK * SHARE;
  constexpr int TOGETHER = THREADS / 64 / STEPS;  // tiles that all threads copy at once
  static_assert(TOGETHER % 2 == 0, "whole blocks of up to two tiles");
  static_assert(STEPS == 2, "fragments of two steps");
  static_assert(STAGES * PLACE >= TILES * MOST * 64, "the sums of a share fit");
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int down = warp % 2, across = warp / 2 % ACROSS, share = warp / 2 / ACROSS;
  const int steps = s.own * s.part_steps, chunks = (steps + STEPS - 1) / STEPS;
  const int begin = blockIdx.z * WK * steps;  // step of the first share
  const int first_tile = blockIdx.x * TILES, first_row = blockIdx.y * MOST;
  float4* waiting = (float4*)(memory + STAGES * PLACE) + threadIdx.x;

  // Threads take 16 bytes at a time, of both: where this one begins.
  const int at = threadIdx.x;
  const int w_step = at / 64 % STEPS, w_tile = at / 64 / STEPS;  // TOGETHER tiles at a time
  const int x_row = at / 4 % MOST;
  const i64 w_block = (first_tile + w_tile) / s.wide;
  const unsigned char* w_from =
      weight + ((w_block * s.steps + begin + w_step) * s.wide + w_tile % s.wide) * 1024 + at % 64 * 16;
  const bf16* x_from = x + (i64)(first_row + x_row) * s.stride + begin * 32 + at % 4 * 8;
  auto fetch_weights = [&](int chunk) {  // tiles past the last block are zeros
    unsigned char* to = memory + chunk % STAGES * PLACE + at * 16;
#pragma unroll
    for (int of = 0; of < WK; of++)
#pragma unroll
      for (int i = 0; i < TILES; i += TOGETHER) {
        if (chunk * STEPS + w_step >= steps || i + w_tile >= TILES) continue;
        const bool there = first_tile + i + w_tile < s.blocks * s.wide;
        const i64 from = (i64)i * s.steps + (of * steps + chunk * STEPS) * s.wide;
        cp_async_16(to + of * SHARE + i * STEPS * 1024, w_from + from * 1024, there ? 16 : 0);
      }
  };
  auto fetch_x = [&](int chunk) {  // rows past the last are zeros
    unsigned char* to = memory + chunk % STAGES * PLACE + WEIGHTS + at * 16;
#pragma unroll
    for (int of = 0; of < WK; of++)
#pragma unroll
      for (int i = 0; i < STEPS * MOST; i += THREADS / 4) {
        const int step = chunk * STEPS + (i + at / 4) / MOST, row = i % MOST;
        if (step >= steps || i + at / 4 >= STEPS * MOST) continue;
        const bool there = first_row + x_row + row < s.T;
        const i64 from = (i64)row * s.stride + (of * steps + step) * 32;
        cp_async_16(to + of * SHARE + i * 64, x_from + from, there ? 16 : 0);
      }
  };

  for (int i = 0; i < STAGES; i++)
    if (i < chunks) fetch_weights(i);
  if (s.early) grid_dependency_launch();
  grid_dependency_wait();  // weights are always there; x comes from the kernel in front
  for (int i = 0; i < STAGES; i++) {
    if (i < chunks) fetch_x(i);
    cp_async_commit();
  }

  float sum[MW][NT][4] = {}, kept[MW][NT][4] = {};
  int part = 0, left = s.part_steps;
  auto finish_part = [&] {  // `sum` goes to where its right neighbour finds it, or to the left one
    left = s.part_steps;
    if (s.own == 1) return;
    const bool last = part + 1 == s.own;
#pragma unroll
    for (int m = 0; m < MW; m++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float4 v = {sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]};
        if (part & 1) {
          v = add4(float4{kept[m][n][0], kept[m][n][1], kept[m][n][2], kept[m][n][3]}, v);
          float4* of = waiting + (m * NT + n) * THREADS;  // read and written by this thread alone
          int level = 1;
          for (; (part >> level) & 1; level++, of += MW * NT * THREADS) v = add4(*of, v);
          if (!last) *of = v;
        } else {
          kept[m][n][0] = v.x, kept[m][n][1] = v.y, kept[m][n][2] = v.z, kept[m][n][3] = v.w;
        }
        if (!last) v = float4{0, 0, 0, 0};
        sum[m][n][0] = v.x, sum[m][n][1] = v.y, sum[m][n][2] = v.z, sum[m][n][3] = v.w;
      }
    part++;
  };

  // Fragments are read one half of a step ahead of their use, those of x where registers suffice.
  constexpr int EARLY = MW * NT <= 16;
  u32 a[2][MW][4];         // by halves
  uint4 b[1 + EARLY][NT];  // by steps
  const unsigned char* mine = memory + share * SHARE;
  // A warp's tiles of weights are `down`, 2 + `down`, ...
  auto read_a = [&](const unsigned char* from, int k, int half) {
#pragma unroll
    for (int m = 0; m < MW; m++) {
      const int tile = 2 * m + down;
      const uint4 v = *(const uint4*)(from + (tile * STEPS + k) * 1024 + half * 512 + lane * 16);
      a[half][m][0] = v.x, a[half][m][1] = v.y, a[half][m][2] = v.z, a[half][m][3] = v.w;
    }
  };
  auto read_b = [&](const unsigned char* from, int k) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int row = k * MOST + (across * NT + n) * 8 + g;
      b[EARLY * k][n] = *(const uint4*)(from + WEIGHTS + row * 64 + t * 16);
    }
  };
  auto multiply = [&](int k, int half) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int m = 0; m < MW; m++) {
        const uint4 v = b[EARLY * k][n];
        mma_bf16(sum[m][n], a[half][m], half ? v.z : v.x, half ? v.w : v.y);
      }
  };
  cp_async_wait<STAGES - 1>();
  __syncthreads();  // the first chunk is there for all
  read_b(mine, 0), read_a(mine, 0, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; chunk++) {
    const unsigned char* from = mine + chunk % STAGES * PLACE;
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      const int step = chunk * STEPS + k;
      if (step >= steps) break;
      read_a(from, k, 1);
      multiply(k, 0);
      if (step + 1 < steps) {
        if (k + 1 == STEPS) {
          cp_async_wait<STAGES - 2>();
          __syncthreads();  // the next chunk is there for all, and all have read this one
          if (chunk + STAGES < chunks) fetch_weights(chunk + STAGES), fetch_x(chunk + STAGES);
          cp_async_commit();
          from = mine + (chunk + 1) % STAGES * PLACE;
        }
        read_a(from, (k + 1) % STEPS, 0);
        if (EARLY) read_b(from, (k + 1) % STEPS);
      }
      multiply(k, 1);
      if (!EARLY && step + 1 < steps) read_b(from, (k + 1) % STEPS);
      if (--left == 0) finish_part();
    }
  }
  if (!s.early) grid_dependency_launch();

  // Each of the WK warps with sums of one tile takes NT / WK eights of its rows from here on.
  float4* others = (float4*)memory;
  const int unit = (across * 2 + down) * 32 + lane;
  constexpr int UNITS = 64 * ACROSS;
  if (WK > 1) {
    __syncthreads();  // all have read the last places
#pragma unroll
    for (int m = 0; m < MW; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (n * WK / NT != share)
          others[(m * NT + n) * UNITS + unit] =
              float4{sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]};
    __syncthreads();  // the other share's sums are there
  }
  auto each = [&](auto take) {
#pragma unroll
    for (int m = 0; m < MW; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (n * WK / NT == share) {
          float4 v = {sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]};
          if (WK > 1) v = add4(others[(m * NT + n) * UNITS + unit], v);
          take(m, n, v);
        }
  };
  auto put = [&](int m, int n, float4 v, void* to) {
    put_wide(to, s, first_tile + m * 2 + down, first_row + (across * NT + n) * 8 + 2 * t, v);
  };
  if (gridDim.z == 1 || s.apart) {
    char* to = (char*)y + (i64)blockIdx.z * s.apart * 4;  // sums apart are fp32
    each([&](int m, int n, float4 v) { put(m, n, v, to); });
    return;
  }
  const int tile = blockIdx.y * gridDim.x + blockIdx.x, tiles = gridDim.x * gridDim.y;
  constexpr int SUMS = MW * NT * UNITS;
  float4* of = s.between + (i64)tile * SUMS + unit;
  each([&](int m, int n, float4 v) {
    of[(i64)blockIdx.z * tiles * SUMS + (m * NT + n) * UNITS] = v;
  });
  __shared__ int before;
  __threadfence();
  __syncthreads();  // all of this block's sums are where others see them
  if (threadIdx.x == 0) {
    before = atomicAdd(s.arrived + tile, 1);
    __threadfence();
  }
  __syncthreads();  // `before` is known
  if (before + 1 < (int)gridDim.z) return;
  if (threadIdx.x == 0) s.arrived[tile] = 0;
  each([&](int m, int n, float4) {
    put(m, n, join(of + (m * NT + n) * UNITS, tiles * SUMS, gridDim.z), y);
  });
}

// weight: of pack_dense, 16-byte aligned.
// Names: wide_mma_MW_NT_WK; -DSTAGES_MW_NT_WK, -DRESIDENT_MW_NT_WK blocks a multiprocessor. Those that
// no launch of this device has room for have no -D, and are left out.
#define WIDE(MW, NT, WK)                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_##MW##_##NT##_##WK)               \
  wide_mma_##MW##_##NT##_##WK(const bf16* x, const unsigned char* weight, void* y, float4* between, \
                              int* arrived, int form, int y_stride, int apart, int T, int out,     \
                              int stride, int blocks, int wide, int steps, int own,                \
                              int part_steps, int early) {                                         \
    const WideShape s = {T,          out,   stride, blocks,   wide,  steps,   own,                 \
                         part_steps, early, form,   y_stride, apart, between, arrived};            \
    wide_mma<MW, NT, WK, STAGES_##MW##_##NT##_##WK>(x, weight, y, s);                              \
  }
#ifdef STAGES_2_2_2
WIDE(2, 2, 2)
#endif
#ifdef STAGES_5_2_2
WIDE(5, 2, 2)
#endif
#ifdef STAGES_2_4_2
WIDE(2, 4, 2)
#endif
#ifdef STAGES_5_4_2
WIDE(5, 4, 2)
#endif
#ifdef STAGES_4_4_1
WIDE(4, 4, 1)
#endif

// ==== absorb_mma ====

// Products of each head of x with the head's own weight, rounded. K is -DPARTS equal parts of
// -DPART_STEPS steps of 32 columns, joined pairwise; a part adds its steps ascending, in the order of
// linear_mma. A block owns SLICE tiles of 16 outputs of one head, for EIGHTS * 8 rows: PARTS warps a
// tile, whose weights they hold in registers before x is there.
static_assert(PARTS <= WARPS && (PARTS & (PARTS - 1)) == 0, "one warp a part, joined pairwise");
constexpr int EIGHTS = 2;
constexpr int SLICE = WARPS / PARTS;

// x and out begin with this head of the block's first row; `rows` are left from there.
DEVICE void head_products(const bf16* x,        // [rows, stride], 4-byte aligned; 16 if stride % 8 == 0
                          const uint4* weight,  // [tiles, PARTS * PART_STEPS, 2, 32], of pack_heads
                          bf16* out,            // [rows, out_stride]
                          int slice, int rows, int outputs, int stride, int out_stride) {
  __shared__ float4 sums[WARPS][EIGHTS][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int part = warp % PARTS, tile = slice * SLICE + warp / PARTS;
  const bool there = tile * 16 < outputs, whole = stride % 8 == 0;
  weight += ((i64)tile * PARTS + part) * PART_STEPS * 64 + lane;
  x += part * PART_STEPS * 32 + t * 8;
  uint4 a[PART_STEPS][2] = {}, b[EIGHTS][PART_STEPS] = {};
  if (there)
#pragma unroll
    for (int k = 0; k < PART_STEPS; k++) a[k][0] = weight[k * 64], a[k][1] = weight[k * 64 + 32];
  grid_dependency_launch();
  grid_dependency_wait();  // weights are always there; x comes from the kernel in front
#pragma unroll
  for (int n = 0; n < EIGHTS; n++)
    if (there && n * 8 + g < rows)
#pragma unroll
      for (int k = 0; k < PART_STEPS; k++) {
        const bf16* from = x + (i64)(n * 8 + g) * stride + k * 32;
        const u32* words = (const u32*)from;
        b[n][k] = whole ? *(const uint4*)from : uint4{words[0], words[1], words[2], words[3]};
      }
  float4 v[EIGHTS];
#pragma unroll
  for (int n = 0; n < EIGHTS; n++) {
    float sum[4] = {};
    if (n * 8 < rows)
#pragma unroll
      for (int k = 0; k < PART_STEPS; k++) {
        const u32 first[4] = {a[k][0].x, a[k][0].y, a[k][0].z, a[k][0].w};
        const u32 second[4] = {a[k][1].x, a[k][1].y, a[k][1].z, a[k][1].w};
        mma_bf16(sum, first, b[n][k].x, b[n][k].y);
        mma_bf16(sum, second, b[n][k].z, b[n][k].w);
      }
    v[n] = float4{sum[0], sum[1], sum[2], sum[3]};
  }
  auto finish = [&](int of, int n, float4 sum) {
    const int o = of * 16 + 2 * g, row = n * 8 + 2 * t;
    if (o >= outputs) return;
    if (row < rows) store_pair(out + (i64)row * out_stride + o, sum.x, sum.z);
    if (row + 1 < rows) store_pair(out + (i64)(row + 1) * out_stride + o, sum.y, sum.w);
  };
  if constexpr (PARTS == 1) {
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) finish(tile, n, v[n]);
    return;
  }
#pragma unroll
  for (int n = 0; n < EIGHTS; n++) sums[warp][n][lane] = v[n];
  __syncthreads();  // all parts of a sum are there before they are joined
  for (int u = warp; u < SLICE * EIGHTS; u += WARPS) {
    const int of = u % SLICE, n = u / SLICE;
    float4 s[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) s[i] = sums[of * PARTS + i][n][lane];
#pragma unroll
    for (int d = 1; d < PARTS; d <<= 1)
#pragma unroll
      for (int i = 0; i < PARTS; i += 2 * d) {
        s[i].x = __fadd_rn(s[i].x, s[i + d].x), s[i].y = __fadd_rn(s[i].y, s[i + d].y);
        s[i].z = __fadd_rn(s[i].z, s[i + d].z), s[i].w = __fadd_rn(s[i].w, s[i + d].w);
      }
    finish(slice * SLICE + of, n, s[0]);
  }
}

// Absorbed query: out[t, h] = (q_nope[t, h] . key[h], rotated q_rope[t, h]), rounded; the rotation is
// latent_query's. grid (H * (slices + 1), ceil(T / (8 EIGHTS))), slices = ceil(latent / (16 SLICE)):
// a head's last block rotates.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
latent_query_mma(const bf16* q,          // [T, H, nope + rope]
                 const uint4* key,       // [H, tiles, ...] of pack_heads
                 const float* cosines,   // [positions, rope / 2]
                 const float* sines,     // likewise
                 const int* positions,   // [T]
                 bf16* out,              // [T, H, latent + rope]
                 int T, int H, int nope, int latent, int rope, int slices) {
  const int head = blockIdx.x / (slices + 1), slice = blockIdx.x % (slices + 1), half = rope / 2;
  const int first = blockIdx.y * EIGHTS * 8, rows = min(T - first, EIGHTS * 8);
  const int q_width = nope + rope, out_width = latent + rope;
  q += ((i64)first * H + head) * q_width;
  out += ((i64)first * H + head) * out_width;
  if (slice < slices) {
    key += (i64)head * ((latent + 15) / 16) * (PARTS * PART_STEPS * 64);
    head_products(q, key, out, slice, rows, latent, H * q_width, H * out_width);
    return;
  }
  grid_dependency_launch();
  grid_dependency_wait();  // for q and the positions: kernels in front may be many launches behind
  for (int i = threadIdx.x; i < rows * half; i += THREADS) {
    const int row = i / half, pair = i % half;
    const bf16* from = q + (i64)row * H * q_width + nope + 2 * pair;
    bf16* to = out + (i64)row * H * out_width + latent + pair;
    const i64 angle = (i64)positions[first + row] * half + pair;
    rotate(to_float(from[0]), to_float(from[1]), cosines[angle], sines[angle], to, to + half);
  }
}

// out[t, h, j] = sum over l of o[t, h, l] * value[h, j, l], rounded.
// grid (H * slices, ceil(T / (8 EIGHTS))), slices = ceil(v / (16 SLICE)).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
absorb_v_mma(const bf16* o,       // [T, H, latent]
             const uint4* value,  // [H, tiles, ...] of pack_heads
             bf16* out,           // [T, H, v]
             int T, int H, int v, int latent, int slices) {
  const int head = blockIdx.x / slices, slice = blockIdx.x % slices;
  const int first = blockIdx.y * EIGHTS * 8, rows = min(T - first, EIGHTS * 8);
  value += (i64)head * ((v + 15) / 16) * (PARTS * PART_STEPS * 64);
  head_products(o + ((i64)first * H + head) * latent, value, out + ((i64)first * H + head) * v, slice,
                rows, v, H * latent, H * v);
}

// ==== query_mma ====

// From what q_a and kv_a gave to the absorbed query and the cache entries, bit for bit as query_entry,
// linear_mma and latent_query_mma make them: three short kernels that wait for each other more than they
// work. -DQUERY_ROWS rows (8, one side of an mma) of a head have a cluster of -DBLOCKS blocks. Each norms all
// rows for itself, a warp a row, has -DTILES tiles of 16 columns of the head's query, whose K its
// warps share, and sends the columns to be absorbed to the others; then each of its warps has a tile
// of 16 of the absorbed ones. The cluster behind the last head makes the entries. A row of q_lora has
// -DQ_EIGHTS times 32 eights, one of the latent -DENTRY_EIGHTS; a head -DNOPE columns that are absorbed,
// -DROPE that are turned.
constexpr int LORA = 256 * Q_EIGHTS, LATENT = 256 * ENTRY_EIGHTS, COLUMNS = 16 * TILES;
constexpr int STEPS = LORA / 32 / WARPS, KEY_STEPS = NOPE / 32, KEY_TILES = LATENT / 16;
constexpr int PIECE = 1024 * STEPS;      // bytes of a warp's part of a tile
constexpr int ROW = 2 * LORA + 64;       // bytes of a normed row: fragments of rows fall in other banks
constexpr int NOPE_ROW = 2 * NOPE + 64;  // likewise
static_assert(LORA % (32 * WARPS) == 0 && LORA <= 8 * THREADS && LATENT <= 8 * THREADS, "as in rms_norm");
static_assert(BLOCKS * COLUMNS == NOPE + ROPE && KEY_TILES <= BLOCKS * WARPS && BLOCKS <= WARPS, "shares");
static_assert(QUERY_ROWS * COLUMNS / 2 <= THREADS && QUERY_ROWS <= WARPS && ROPE <= 64, "a thread a pair");

// A warp makes the norm of a row of EIGHTS times 32 eights, as rms_norm does in one block: lane l has what
// thread 32j + l has there. weight: in shared memory.
template <int EIGHTS>
DEVICE void norm_row(const float* x, const float* weight, bf16* out, float inverse_k, float eps) {
  const int lane = threadIdx.x & 31;
  float values[EIGHTS][8], own = 0.0f;
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) load8(x + 8 * (32 * j + lane), values[j]);
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    float eight = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) eight = __fmaf_rn(values[j][i], values[j][i], eight);
    const float sum = warp_sum(__fadd_rn(0.0f, eight));
    if (lane == j) own = sum;
  }
  const float mean = __fmul_rn(warp_sum(own), inverse_k);
  const float inverse = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    float factors[8];
    load8(weight + 8 * (32 * j + lane), factors);
#pragma unroll
    for (int i = 0; i < 8; i++)
      values[j][i] = __fmul_rn(round_to_act(__fmul_rn(values[j][i], inverse)), factors[i]);
    store8(out + 8 * (32 * j + lane), values[j]);
  }
}

// All threads fetch n weights of a norm.
DEVICE void fetch_weights(const float* from, float* to, int n) {
  for (int i = 4 * threadIdx.x; i < n; i += 4 * THREADS) *(float4*)(to + i) = *(const float4*)(from + i);
  __syncthreads();  // they are there before a warp reads them
}

// The cache entries, a warp a row: as latent_entry.
DEVICE void make_entries(int rows, const float* sums, int stride, const float* kv_weight, float* room,
                         const float* cosines, const float* sines, const int* positions, bf16* entries,
                         float inverse_latent, float eps) {
  const int lane = threadIdx.x & 31, row = threadIdx.x / 32;
  fetch_weights(kv_weight, room, LATENT);
  grid_dependency_launch();
  grid_dependency_wait();
  if (row >= rows) return;
  const float* kv = sums + (i64)row * stride + LORA;
  bf16* out = entries + (i64)row * (LATENT + ROPE);
  if (lane < ROPE / 2) {
    const i64 angle = (i64)positions[row] * (ROPE / 2) + lane;
    const float* pair = kv + LATENT + 2 * lane;
    bf16* to = out + LATENT + lane;
    rotate(pair[0], pair[1], cosines[angle], sines[angle], to, to + ROPE / 2);
  }
  norm_row<ENTRY_EIGHTS>(kv, room, out, inverse_latent, eps);
}

// Shared: the head's part of q_b, then normed rows, whose place sums take, then rows of columns to be
// absorbed, then weights of the norm, then barriers. grid ((H + 1) * BLOCKS, ceil(T / QUERY_ROWS)).
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1) query_mma(
    const float* sums,         // [T, stride]: q_a's LORA, then kv_a's LATENT + ROPE; 16-byte aligned
    const float* q_weight,     // [LORA]
    const float* kv_weight,    // [LATENT]
    const unsigned char* q_b,  // of pack_dense, [H * BLOCKS * TILES, ...]
    const uint4* key,          // [H, KEY_TILES, ...] of pack_heads
    const float* cosines,      // [positions, ROPE / 2]
    const float* sines,        // likewise
    const int* positions,      // [T]
    bf16* out,                 // [T, H, LATENT + ROPE]
    bf16* entries,             // [T, LATENT + ROPE]
    int T, int H, int stride, float inverse_q, float inverse_latent, float eps) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(16) bf16 own[QUERY_ROWS][COLUMNS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.x / BLOCKS, rank = blockIdx.x % BLOCKS, first = rank * COLUMNS;
  const int begin = blockIdx.y * QUERY_ROWS;
  sums += (i64)begin * stride, positions += begin, out += (i64)begin * H * (LATENT + ROPE);
  T = min(T - begin, QUERY_ROWS);
  if (head == H) {  // one block has work
    make_entries(rank == 0 ? T : 0, sums, stride, kv_weight, (float*)memory, cosines, sines, positions,
                 entries + (i64)begin * (LATENT + ROPE), inverse_latent, eps);
    return;
  }
  unsigned char* normed = memory + TILES * WARPS * PIECE;
  float4* parts = (float4*)normed;  // [WARPS, TILES, 32]
  unsigned char* nopes = normed + max(QUERY_ROWS * ROW, WARPS * TILES * 512);
  float* weights = (float*)(nopes + QUERY_ROWS * NOPE_ROW);  // [LORA]
  u64* barriers = (u64*)(weights + LORA);

  Ring<TILES> ring(memory + warp * TILES * PIECE, barriers + warp * TILES, PIECE);
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    const i64 tile = (i64)blockIdx.x * TILES + m;
    ring.start(m, q_b + (tile * WARPS + warp) * PIECE, true);
  }
  const int tile = rank + BLOCKS * warp;  // of the absorbed columns
  uint4 a[KEY_STEPS][2] = {};
  if (tile < KEY_TILES)
#pragma unroll
    for (int k = 0; k < KEY_STEPS; k++) {
      const uint4* from = key + (((i64)head * KEY_TILES + tile) * KEY_STEPS + k) * 64 + lane;
      a[k][0] = from[0], a[k][1] = from[32];
    }
  fetch_weights(q_weight, weights, LORA);
  cluster_arrive();
  grid_dependency_launch();
  grid_dependency_wait();  // weights are always there
  // This thread's pair of columns to be turned, if there is one: its angle is on its way meanwhile.
  const int row = threadIdx.x / (COLUMNS / 2), column = threadIdx.x % (COLUMNS / 2) * 2;
  const int pair = (first + column - NOPE) / 2;
  const bool turns = row < T && first + column >= NOPE;
  float c = 0.0f, s = 0.0f;
  if (turns) {
    const i64 angle = (i64)positions[row] * (ROPE / 2) + pair;
    c = cosines[angle], s = sines[angle];
  }
  if (warp < T)
    norm_row<Q_EIGHTS>(sums + (i64)warp * stride, weights, (bf16*)(normed + warp * ROW), inverse_q, eps);
  __syncthreads();  // all rows are normed before they are multiplied

  float sum[TILES][4] = {};
  const uint4* w[TILES];
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    w[m] = (const uint4*)ring.get() + lane;
    if (m + 1 < TILES) ring.replace(nullptr, false);
  }
#pragma unroll
  for (int k = 0; k < STEPS; k++) {
    uint4 b = {};  // rows past the last stay zero
    if (g < T) b = *(const uint4*)(normed + g * ROW + (warp * STEPS + k) * 64 + t * 16);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      const uint4 low = w[m][k * 64], high = w[m][k * 64 + 32];
      const u32 front[4] = {low.x, low.y, low.z, low.w}, back[4] = {high.x, high.y, high.z, high.w};
      mma_bf16(sum[m], front, b.x, b.y);
      mma_bf16(sum[m], back, b.z, b.w);
    }
  }
  __syncthreads();  // the normed rows are read before sums take their place
#pragma unroll
  for (int m = 0; m < TILES; m++)
    parts[(warp * TILES + m) * 32 + lane] = float4{sum[m][0], sum[m][1], sum[m][2], sum[m][3]};
  __syncthreads();  // all parts of a sum are there before they are joined
  if (warp < TILES) {
    const float4* of = parts + warp * 32 + lane;
    const float4 left = join(of, TILES * 32, WARPS / 2);
    const float4 v = add4(left, join(of + WARPS / 2 * TILES * 32, TILES * 32, WARPS / 2));
    bf16* to = &own[2 * t][warp * 16 + g];
    store(to, v.x), store(to + COLUMNS, v.y), store(to + 8, v.z), store(to + COLUMNS + 8, v.w);
  }
  __syncthreads();  // this block's columns are there
  cluster_wait();   // every block has begun before another one writes into it
  if (warp < BLOCKS) {
    unsigned char* to = cluster_map(nopes, warp);
    for (int i = lane; i < T * (COLUMNS / 8); i += 32) {
      const int from = i / (COLUMNS / 8), eight = i % (COLUMNS / 8) * 8;
      if (first + eight >= NOPE) continue;
      *(uint4*)(to + from * NOPE_ROW + 2 * (first + eight)) = *(const uint4*)&own[from][eight];
    }
  }
  if (turns) {
    bf16* to = out + ((i64)row * H + head) * (LATENT + ROPE) + LATENT + pair;
    const float x = to_float(own[row][column]), y = to_float(own[row][column + 1]);
    rotate(x, y, c, s, to, to + ROPE / 2);
  }
  cluster_sync();  // all columns to be absorbed are there, and no block writes to another any more
  if (tile >= KEY_TILES) return;
  float absorbed[4] = {};
#pragma unroll
  for (int k = 0; k < KEY_STEPS; k++) {
    uint4 b = {};
    if (g < T) b = *(const uint4*)(nopes + g * NOPE_ROW + k * 64 + t * 16);
    const u32 front[4] = {a[k][0].x, a[k][0].y, a[k][0].z, a[k][0].w};
    const u32 back[4] = {a[k][1].x, a[k][1].y, a[k][1].z, a[k][1].w};
    mma_bf16(absorbed, front, b.x, b.y);
    mma_bf16(absorbed, back, b.z, b.w);
  }
  bf16* to = out + ((i64)(2 * t) * H + head) * (LATENT + ROPE) + tile * 16 + 2 * g;
  if (2 * t < T) store_pair(to, absorbed[0], absorbed[2]);
  if (2 * t + 1 < T) store_pair(to + (i64)H * (LATENT + ROPE), absorbed[1], absorbed[3]);
}
