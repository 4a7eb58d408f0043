// Matrix products of bfloat16 activations on tensor cores: what ops.py runs in place of the simple
// kernels where the config asks for it and the shape allows it.
//
// Weights lie on the 16 side of mma m16n8k16, rows of x on the 8 side, so one packing serves every T.
// A row of x is one column of an mma and shares no arithmetic with its neighbours (R1). K goes in
// steps of 32 columns, ascending, two mma each; in both lane (g, t) holds columns 8t .. 8t + 3 or
// 8t + 4 .. 8t + 7 of the step, which are 16 neighbouring bytes of x.
//
// All copies of weights are asynchronous, through a ring of STAGES places (-DSTAGES) a warp, or a
// block in wide_mma.

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

DEVICE void store_pair(bf16* to, float low, float high) {  // at 4 aligned bytes
  bf16 a, b;
  store(&a, low);
  store(&b, high);
  *(u32*)to = (u32)a.bits | (u32)b.bits << 16;
}

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

// ==== experts_mma ====

// -DPARTS of K; -DUP_GROUPS, -DDOWN_GROUPS: quantisation groups in a chunk of gate and up, of down;
// -DSTAGES: chunks that a warp has in flight; -DFEW_ROUNDS: see expert_gate_up_mma; -DDOWN_RESIDENT:
// blocks of expert_down_mma that a processor is to hold; -DBLOCKS of 16 columns of h; -DLEAVES of the
// width; -DTOP_K.
// For few rows a block runs through its code once: short code is faster than unrolled loops.
static_assert(PARTS <= WARPS && (PARTS & (PARTS - 1)) == 0, "one warp a part, joined pairwise");

// A chunk of weights: 2 tiles of 16 rows x GROUPS quantisation groups (of pack_int4). b: 8 rows of x,
// the same columns. A group starts from zero and joins by fma(scale, group, sum).
// reload(k) makes b[k] that of the next chunk, as soon as this one is done with it.
template <int GROUPS, class Reload>
DEVICE void multiply(const unsigned char* chunk, const uint4 (&b)[GROUPS], float (&sum)[2][4],
                     const Reload& reload) {
  constexpr int TOGETHER = GROUPS % 2 ? 1 : 2;  // groups whose codes lie side by side in a lane
  const int lane = threadIdx.x & 31;
  u32 scales[2][GROUPS];
#pragma unroll
  for (int m = 0; m < 2; m++)
    load_words(chunk + (m * TILE_GROUP + 256) * GROUPS + lane / 4 * GROUPS * 4, scales[m]);
#pragma unroll
  for (int p = 0; p < GROUPS / TOGETHER; p++) {
    u32 codes[2][2 * TOGETHER];
#pragma unroll
    for (int m = 0; m < 2; m++)
      load_words(chunk + m * TILE_GROUP * GROUPS + (p * 32 + lane) * TOGETHER * 8, codes[m]);
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const int k = p * TOGETHER + i;
#pragma unroll
      for (int m = 0; m < 2; m++) {
        float group[4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 a[4];
          eight_codes(codes[m][2 * i + half], a);
          if (half == 0) mma_bf16(group, a, b[k].x, b[k].y);
          else mma_bf16(group, a, b[k].z, b[k].w);
        }
        const float low = __uint_as_float(scales[m][k] << 16);
        const float high = __uint_as_float(scales[m][k] & 0xffff0000u);
        sum[m][0] = __fmaf_rn(low, group[0], sum[m][0]);
        sum[m][1] = __fmaf_rn(low, group[1], sum[m][1]);
        sum[m][2] = __fmaf_rn(high, group[2], sum[m][2]);
        sum[m][3] = __fmaf_rn(high, group[3], sum[m][3]);
      }
      reload(k);
    }
  }
}

// The work of T rows in shared memory: tiles of at most 8 (row, slot) pairs of one expert, ascending
// expert, then row. Every block makes its own: that is cheaper than a kernel.
struct Work {
  u32* tiles;  // [min(P, E + P / 8)]: expert << 16 | first pair << 4 | pairs
  u16* pairs;  // [P], P = T * TOP_K <= 4096: pair numbers by expert
  int n_tiles;
};

// Bytes: see _work_bytes in ops_mma.py. ids outside [0, E) are filler and appear in no tile.
DEVICE Work sort_work(const int* ids, int T, int E, unsigned char* memory) {
  const int P = T * TOP_K, lane = threadIdx.x & 31, warp = threadIdx.x / 32, words = (T + 31) / 32;
  Work work;
  u32* totals = (u32*)memory;  // [WARPS], pairs | tiles << 16
  work.tiles = totals + WARPS;
  u32* rows = work.tiles + min(P, E + P / 8);  // [E, words] bit t: row t chose the expert
  u16* first = (u16*)(rows + E * words);       // [E]
  work.pairs = first + E;
  if (T == 1 && TOP_K <= 32) {  // a row's ids are distinct: one pair a tile
    work.pairs = (u16*)rows;
    if (warp == 0) {
      const bool there = lane < TOP_K && ids[lane] >= 0 && ids[lane] < E;
      const u32 all = __ballot_sync(ALL, there);
      const int at = __popc(all & ((1u << lane) - 1));
      if (there) work.tiles[at] = (u32)ids[lane] << 16 | (u32)at << 4 | 1, work.pairs[at] = lane;
      if (lane == 0) totals[0] = __popc(all);
    }
    __syncthreads();  // the tiles are there before any warp reads them
    work.n_tiles = totals[0];
    return work;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < E * words; i += THREADS) rows[i] = 0;
  __syncthreads();  // cleared before bits are set
#pragma unroll 1
  for (int p = threadIdx.x; p < P; p += THREADS) {
    const int e = ids[p], t = p / TOP_K;
    if (e >= 0 && e < E) atomicOr(rows + e * words + t / 32, 1u << (t % 32));
  }
  __syncthreads();  // all bits are set before they are counted
  const int per = (E + THREADS - 1) / THREADS, begin = threadIdx.x * per;
  auto count = [&](int e) {
    int n = 0;
#pragma unroll 1
    for (int w = 0; w < words; w++) n += __popc(rows[e * words + w]);
    return n;
  };
  u32 own = 0;
#pragma unroll 1
  for (int e = begin; e < min(E, begin + per); e++) {
    const u32 n = count(e);
    own += n | (n + 7) / 8 << 16;
  }
  u32 upto = own;  // of all threads before this one and itself
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const u32 left = __shfl_up_sync(ALL, upto, d);
    if (lane >= d) upto += left;
  }
  if (lane == 31) totals[warp] = upto;
  __syncthreads();  // all warps' totals are there
  u32 all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) upto += totals[w];
    all += totals[w];
  }
  u32 at = upto - own;
#pragma unroll 1
  for (int e = begin; e < min(E, begin + per); e++) {
    u32 place = at & 0xffffu, tile = at >> 16;
    const int n = count(e);
    at += (u32)n | (u32)((n + 7) / 8) << 16;
    first[e] = place;
#pragma unroll 1
    for (int left = n; left > 0; left -= 8, place += 8)
      work.tiles[tile++] = (u32)e << 16 | place << 4 | (u32)min(left, 8);
  }
  __syncthreads();  // every expert's first place is there
#pragma unroll 1
  for (int p = threadIdx.x; p < P; p += THREADS) {
    const int e = ids[p], t = p / TOP_K;
    if (e < 0 || e >= E) continue;
    int place = first[e] + __popc(rows[e * words + t / 32] & ((1u << (t % 32)) - 1));
#pragma unroll 1
    for (int w = 0; w < t / 32; w++) place += __popc(rows[e * words + w]);
    work.pairs[place] = p;
  }
  __syncthreads();  // all pairs are placed before any warp reads them
  work.n_tiles = all >> 16;
  return work;
}

// h[pair] = SiLU(gate) * up, rounded. An item is a tile of pairs times 16 columns of h; its K falls in
// PARTS parts, one a warp, joined pairwise. A part adds its groups ascending. grid: the items shared out,
// by the blocks' numbers; in more than FEW_ROUNDS all but a block's first by tickets, for processors differ
// in how fast they read. shared: rings, then [2, PARTS, 2, 32] float4 sums (two items in turn), barriers,
// two tickets, work.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int RESIDENT = 3;  // blocks a multiprocessor; elsewhere shared memory allows less
#else
constexpr int RESIDENT = 2;
#endif
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
expert_gate_up_mma(const bf16* x,                // [T, K], 16-byte aligned rows
                   const int* ids,               // [T, TOP_K], distinct in a row
                   const unsigned char* weight,  // of pack_int4, [E, BLOCKS, ...]
                   bf16* h,                      // [T * TOP_K, 16 * BLOCKS]
                   u32* tickets,                 // [2] zeros, as it is left: drawn; blocks that are done
                   int T, int E,
                   int chunks) {  // of a part
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4;
  constexpr int bytes = 2 * UP_GROUPS * TILE_GROUP;
  float4* sums = (float4*)(memory + PARTS * STAGES * bytes);
  u64* barriers = (u64*)(sums + 2 * PARTS * 64);
  u32* drawn = (u32*)(barriers + PARTS * STAGES);  // of the items in turn
  const int own = warp % PARTS;  // the other warps only help to sort and to join
  Ring<STAGES> ring(memory + own * STAGES * bytes, barriers + own * STAGES, bytes, warp < PARTS);
  grid_dependency_wait();  // for ids and x
  grid_dependency_launch();  // what follows may sort these ids meanwhile
  // In few rounds, numbers are fairer: blocks of one processor draw at the same time. A warp that is a
  // whole item ahead would have to know the item after next.
  const int most = min(T * TOP_K, E + T * TOP_K / 8) * BLOCKS;
  const bool draws = STAGES < chunks && FEW_ROUNDS * (int)gridDim.x < most;
  u32 ticket = 0;
  if (draws && threadIdx.x == 0) ticket = atomicAdd(tickets, 1u);
  const Work work = sort_work(ids, T, E, (unsigned char*)(drawn + 2));
  const int items = work.n_tiles * BLOCKS;
  int next = blockIdx.x + gridDim.x;  // the item after the one that is multiplied
  if (draws) {
    if (threadIdx.x == 0) drawn[1] = ticket;
    __syncthreads();  // the first ticket is there
    next = gridDim.x + drawn[1];
  }

  int put_item = warp < PARTS ? blockIdx.x : items, put_chunk = 0;
  u32 piece = 0;  // of `bytes` each
  auto locate = [&] {
    if (put_item >= items) return;
    const u32 block = (work.tiles[put_item / BLOCKS] >> 16) * BLOCKS + put_item % BLOCKS;
    piece = block * PARTS * chunks + warp;
  };
  auto there = [&] { return put_item < items; };
  auto advance = [&] {
    piece += PARTS;
    if (++put_chunk == chunks) put_chunk = 0, put_item = draws ? next : put_item + gridDim.x, locate();
  };
  locate();
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) ring.start(i, weight + (u64)piece * bytes, there()), advance();

  // b: one chunk of this lane's row of x, which lies at `row`. Without a condition in the loop: a lane
  // without a pair has the tile's last one, and nobody stores its sums; behind the last item comes any row.
  uint4 b[UP_GROUPS];
  auto row_of = [&](int item) {
    int pair = 0;
    if (item < items) {
      const u32 tile = work.tiles[item / BLOCKS];
      pair = work.pairs[((tile & 0xffffu) >> 4) + min(g, (int)(tile & 15u) - 1)];
    }
    return x + (pair / TOP_K * PARTS + own) * chunks * UP_GROUPS * 32 + lane % 4 * 8;
  };
  const bf16* row = row_of(blockIdx.x);
  auto reload = [&](int k) { b[k] = *(const uint4*)(row + 32 * k); };
#pragma unroll
  for (int k = 0; k < UP_GROUPS; k++) reload(k);

  int turn = 0;
#pragma unroll 1
  for (int item = blockIdx.x; item < items;) {
    if (draws && threadIdx.x == 0) ticket = next < items ? atomicAdd(tickets, 1u) : items;
    float sum[2][4] = {};
#pragma unroll 1
    for (int c = warp < PARTS ? 0 : chunks; c < chunks; c++) {
      row += 32 * UP_GROUPS;
      if (c + 1 == chunks) row = row_of(next);
      multiply<UP_GROUPS>(ring.get(), b, sum, reload);
      ring.replace(weight + (u64)piece * bytes, there());
      advance();
    }
    float4* mine = sums + turn * PARTS * 64;
    if (draws && threadIdx.x == 0) drawn[turn] = ticket;
#pragma unroll
    for (int m = 0; m < 2; m++)
      if (warp < PARTS) mine[(warp * 2 + m) * 32 + lane] = float4{sum[m][0], sum[m][1], sum[m][2], sum[m][3]};
    __syncthreads();  // all parts and the ticket are there; the other turn's have been read by all
    const u32 tile = work.tiles[item / BLOCKS];
    const int n = tile & 15u;
    const u16* pairs = work.pairs + ((tile & 0xffffu) >> 4);
#pragma unroll 1
    for (int i = threadIdx.x; i < 128; i += THREADS) {
      const int m = i / 64, r = i % 8, j = i / 8 % 8;  // column m * 8 + r of h, pair j
      if (j >= n) continue;
      const float* at = (const float*)(mine + m * 32 + r * 4 + j / 2) + j % 2;
      float gate[WARPS], up[WARPS];
#pragma unroll
      for (int w = 0; w < WARPS; w++)
        if (w < PARTS) gate[w] = at[w * 256], up[w] = at[w * 256 + 2];
#pragma unroll
      for (int d = 1; d < WARPS; d <<= 1)
        if (d < PARTS)
#pragma unroll
          for (int w = 0; w < WARPS; w += 2 * d) {
            gate[w] = __fadd_rn(gate[w], gate[w + d]);
            up[w] = __fadd_rn(up[w], up[w + d]);
          }
      store(h + (i64)pairs[j] * BLOCKS * 16 + item % BLOCKS * 16 + m * 8 + r,
            __fmul_rn(silu(__fmul_rn(gate[0], FROM_CODES)), __fmul_rn(up[0], FROM_CODES)));
    }
    item = next, next = gridDim.x + (draws ? drawn[turn] : item);
    turn ^= 1;
  }
  if (draws && threadIdx.x == 0) {
    __threadfence();  // this block has drawn before it is done
    if (atomicInc(tickets + 1, gridDim.x - 1) == gridDim.x - 1) tickets[0] = 0;
  }
}

// out[t, o]: in every leaf of the width, routed experts by ascending id, weighted, then the shared
// one; then the leaf tree (R4). A block owns 32 outputs. In every leaf a warp takes whole tiles of
// pairs and leaves the sums of a pair in its slot; then each output adds its own experts by
// fma(weight, sum, total). A sum adds its groups ascending. The shared expert's down is multiplied here
// too, as linear_mma would: one or two `beside_parts` of a leaf; that of the first leaf while the
// kernel in front still works.
// grid hidden / 32, block THREADS; shared: rings, [T * TOP_K, 8] float4 slots, [levels, T, 8] float4
// waiting leaves, [beside_parts, T, 8] float4, barriers, [T * TOP_K] weights, work.
// slot[g]: outputs g, 8 + g, 16 + g, 24 + g.
extern "C" __global__ void __launch_bounds__(THREADS, DOWN_RESIDENT)
expert_down_mma(const bf16* h,                // [T * TOP_K, width], 16-byte aligned rows
                const int* ids,               // [T, TOP_K] ascending in a row; outside [0, E): filler
                const float* weights,         // [T, TOP_K]
                const unsigned char* weight,  // of pack_int4, [E, hidden / 32, ...]
                const float* shared,          // [T, LEAVES, hidden], read if has_shared
                const bf16* beside_h,         // [T, beside_width], 16-byte aligned rows
                const uint4* beside,          // of pack_dense, beside_wide tiles a block
                float* out,                   // [T, hidden]
                int T, int E, int width, int hidden, int has_shared,
                int beside_width, int beside_wide,
                int beside_parts) {  // at most 2; 0: nothing beside
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int leaf_width = width / LEAVES, chunks = leaf_width / 32 / DOWN_GROUPS, P = T * TOP_K;
  constexpr int bytes = 2 * DOWN_GROUPS * TILE_GROUP;
  int levels = 0;
  while ((1 << levels) < LEAVES) levels++;
  float4* slots = (float4*)(memory + WARPS * STAGES * bytes);
  float4* waiting = slots + P * 8;
  float4* beside_sums = waiting + levels * T * 8;
  u64* barriers = (u64*)(beside_sums + beside_parts * T * 8);
  float* factors = (float*)(barriers + WARPS * STAGES);
  Ring<STAGES> ring(memory + warp * STAGES * bytes, barriers + warp * STAGES, bytes);
  const Work work = sort_work(ids, T, E, (unsigned char*)(factors + P));

  int put_leaf = 0, put_tile = warp, put_chunk = 0;
  u32 piece = 0;  // of `bytes` each
  auto locate = [&] {
    if (put_tile >= work.n_tiles) put_tile = warp, put_leaf++;
    if (put_leaf >= LEAVES || put_tile >= work.n_tiles) return;
    const u32 block = (work.tiles[put_tile] >> 16) * gridDim.x + blockIdx.x;
    piece = (block * LEAVES + put_leaf) * chunks;
  };
  auto there = [&] { return put_leaf < LEAVES && put_tile < work.n_tiles; };
  auto advance = [&] {
    piece++;
    if (++put_chunk == chunks) put_chunk = 0, put_tile += WARPS, locate();
  };
  locate();
#pragma unroll
  for (int i = 0; i < STAGES; i++) ring.start(i, weight + (u64)piece * bytes, there()), advance();
#pragma unroll 1
  for (int p = threadIdx.x; p < P; p += THREADS) {
    const bool there = ids[p] >= 0 && ids[p] < E;
    factors[p] = there ? __fmul_rn(weights[p], FROM_CODES) : 0.0f;
    if (!there)  // filler adds 0 * 0
      for (int i = 0; i < 8; i++) slots[p * 8 + i] = float4{0, 0, 0, 0};
  }

  const int beside_steps = beside_width / 32, leaf_steps = beside_steps / LEAVES;
  auto multiply_beside = [&](int leaf) {  // a warp takes eight rows and a part
    const int part_steps = beside_parts ? leaf_steps / beside_parts : 0;
#pragma unroll 1
    for (int u = warp; u < (T + 7) / 8 * beside_parts; u += WARPS) {
      const int part = u % beside_parts, first = u / beside_parts * 8;
      const int begin = leaf * leaf_steps + part * part_steps;
      const bf16* x = beside_h + (i64)(first + g) * beside_width + begin * 32 + t * 8;
      float sum[2][4] = {};
#pragma unroll 1
      for (int k = 0; k < part_steps; k += 2) {
        uint4 a[2][2][2] = {}, b[2] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if (k + i >= part_steps) continue;
#pragma unroll
          for (int m = 0; m < 2; m++) {
            const int tile = blockIdx.x * 2 + m;
            const i64 step = (i64)(tile / beside_wide) * beside_steps + begin + k + i;
            const uint4* w = beside + (step * beside_wide + tile % beside_wide) * 64 + lane;
            a[i][m][0] = w[0], a[i][m][1] = w[32];
          }
          if (first + g < T) b[i] = *(const uint4*)(x + (k + i) * 32);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if (k + i >= part_steps) continue;
#pragma unroll
          for (int m = 0; m < 2; m++) {
            const u32 low[4] = {a[i][m][0].x, a[i][m][0].y, a[i][m][0].z, a[i][m][0].w};
            const u32 high[4] = {a[i][m][1].x, a[i][m][1].y, a[i][m][1].z, a[i][m][1].w};
            mma_bf16(sum[m], low, b[i].x, b[i].y);
            mma_bf16(sum[m], high, b[i].z, b[i].w);
          }
        }
      }
      float4* to = beside_sums + (part * T + first + 2 * t) * 8 + g;
      if (first + 2 * t < T) to[0] = float4{sum[0][0], sum[0][2], sum[1][0], sum[1][2]};
      if (first + 2 * t + 1 < T) to[8] = float4{sum[0][1], sum[0][3], sum[1][1], sum[1][3]};
    }
  };
#pragma unroll 1
  for (int leaf = 0; leaf < LEAVES; leaf++) {
    multiply_beside(leaf);
    if (leaf == 0) {
      grid_dependency_wait();  // for h; the kernel that makes it began when all else was there
      grid_dependency_launch();  // what follows may fetch its weights meanwhile
    }
    // b, row: as above, of h.
    uint4 b[DOWN_GROUPS];
    auto row_of = [&](int i) {
      int pair = 0;
      if (i < work.n_tiles) {
        const u32 tile = work.tiles[i];
        pair = work.pairs[((tile & 0xffffu) >> 4) + min(g, (int)(tile & 15u) - 1)];
      }
      return h + pair * width + leaf * leaf_width + t * 8;
    };
    const bf16* row = row_of(warp);
    auto reload = [&](int k) { b[k] = *(const uint4*)(row + 32 * k); };
#pragma unroll
    for (int k = 0; k < DOWN_GROUPS; k++) reload(k);
#pragma unroll 1
    for (int i = warp; i < work.n_tiles; i += WARPS) {
      float sum[2][4] = {};
#pragma unroll 1
      for (int c = 0; c < chunks; c++) {
        row += 32 * DOWN_GROUPS;
        if (c + 1 == chunks) row = row_of(i + WARPS);
        multiply<DOWN_GROUPS>(ring.get(), b, sum, reload);
        ring.replace(weight + (u64)piece * bytes, there());
        advance();
      }
      const u32 tile = work.tiles[i];
      const int n = tile & 15u;
      const u16* pairs = work.pairs + ((tile & 0xffffu) >> 4);
      if (2 * t < n)
        slots[pairs[2 * t] * 8 + g] = float4{sum[0][0], sum[0][2], sum[1][0], sum[1][2]};
      if (2 * t + 1 < n)
        slots[pairs[2 * t + 1] * 8 + g] = float4{sum[0][1], sum[0][3], sum[1][1], sum[1][3]};
    }
    __syncthreads();  // all slots of this leaf are filled
#pragma unroll 1
    for (int i = threadIdx.x; i < T * 8; i += THREADS) {
      const int row = i / 8;
      float total[4] = {};
#pragma unroll 4
      for (int k = 0; k < TOP_K; k++) {
        const float4 v = slots[(row * TOP_K + k) * 8 + i % 8];
        const float factor = factors[row * TOP_K + k];
        total[0] = __fmaf_rn(factor, v.x, total[0]), total[1] = __fmaf_rn(factor, v.y, total[1]);
        total[2] = __fmaf_rn(factor, v.z, total[2]), total[3] = __fmaf_rn(factor, v.w, total[3]);
      }
      const int column = blockIdx.x * 32 + i % 8;
      if (has_shared)
#pragma unroll
        for (int m = 0; m < 4; m++)
          total[m] = __fadd_rn(total[m], shared[((i64)row * LEAVES + leaf) * hidden + column + 8 * m]);
      if (beside_parts) {
        float4 v = beside_sums[i];
        if (beside_parts == 2) {
          const float4 right = beside_sums[T * 8 + i];
          v.x = __fadd_rn(v.x, right.x), v.y = __fadd_rn(v.y, right.y);
          v.z = __fadd_rn(v.z, right.z), v.w = __fadd_rn(v.w, right.w);
        }
        total[0] = __fadd_rn(total[0], v.x), total[1] = __fadd_rn(total[1], v.y);
        total[2] = __fadd_rn(total[2], v.z), total[3] = __fadd_rn(total[3], v.w);
      }
      float4* of = waiting + i;  // read and written by this thread alone
      int level = 0;
      for (; (leaf >> level) & 1; level++) {
        const float4 left = of[level * T * 8];
        total[0] = __fadd_rn(left.x, total[0]), total[1] = __fadd_rn(left.y, total[1]);
        total[2] = __fadd_rn(left.z, total[2]), total[3] = __fadd_rn(left.w, total[3]);
      }
      if (leaf + 1 < LEAVES) {
        of[level * T * 8] = float4{total[0], total[1], total[2], total[3]};
      } else {
#pragma unroll
        for (int m = 0; m < 4; m++) out[(i64)row * hidden + column + 8 * m] = total[m];
      }
    }
    if (leaf + 1 < LEAVES) __syncthreads();  // all slots are read before the next leaf fills them
  }
}

// ==== experts_wide ====

// The sums of expert_gate_up_mma and expert_down_mma, bit for bit, for many rows: the rows of an expert
// are taken together, so that its weights are read once for up to 8 EIGHTS of them, and a fragment
// that is unpacked once serves them all. Defines as in experts_mma, but FEW_ROUNDS; of the variant
// -DEIGHTS, -DBY_WARPGROUPS, -DUP_STAGES: chunks of gate and up in flight, and -DUP_RESIDENT,
// -DDOWN_RESIDENT: blocks that a processor is to hold. All blocks have THREADS threads; nothing aliases
// but where it is said.
//
// A tile is {expert, first place in its list, pairs}. A warp has 32 rows of weights (one block of
// pack_int4) and all rows of x of a tile, which come through shared memory: there [groups, MOST, 32].
// Warpgroups multiply what four warps have: they read x themselves, in blocks of two groups,
// [groups / 2, MOST, 64], whose 16-byte pieces are swizzled. The columns of a group then stand in the order
// in which mma takes them (`place_of`), in x as in h.
static_assert((PARTS & (PARTS - 1)) == 0, "parts join pairwise");
constexpr int MOST = 8 * EIGHTS;          // rows of x of a tile
constexpr int SETS = THREADS / 4 / MOST;  // groups of columns that all threads copy at once
static_assert(SETS >= 1, "four threads a row of x");

// Where column c of a group stands: lane t of a fragment has 8t, 8t + 1, ... and mma takes a pair of each.
DEVICE int place_of(int c) { return BY_WARPGROUPS ? c % 8 / 2 * 8 + c / 8 * 2 + c % 2 : c; }

#if BY_WARPGROUPS && !defined(KDTREE_EMULATOR)
#define SUMS_4 "%0,%1,%2,%3"
#define SUMS_8 SUMS_4 ",%4,%5,%6,%7"
#define SUMS_12 SUMS_8 ",%8,%9,%10,%11"
#define SUMS_16 SUMS_12 ",%12,%13,%14,%15"
#define SUMS_20 SUMS_16 ",%16,%17,%18,%19"
#define SUMS_24 SUMS_20 ",%20,%21,%22,%23"
#define FOUR_SUMS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
// Sums that were waited for: what reads them stays behind that wait.
template <int M>
DEVICE void warpgroup_see_sums(float (&d)[M]) {
#pragma unroll
  for (int i = 0; i < M; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// d, of 64 x N, = or += a b: a in registers, N rows of b in memory.
#define ROWS_MMA(M, N, A, B, ADD, ...)                                                             \
  DEVICE void warpgroup_mma_rows(float (&d)[M], const u32 (&a)[4], const void* b, bool add) {      \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SUMS_##M "}, {" A    \
                 "}, " B ", add, 1, 1, 0;\n}"                                                      \
                 : __VA_ARGS__                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(block_descriptor(b)),           \
                   "r"((int)add));                                                                 \
  }
ROWS_MMA(4, 8, "%4,%5,%6,%7", "%8", "%9", FOUR_SUMS(0))
ROWS_MMA(8, 16, "%8,%9,%10,%11", "%12", "%13", FOUR_SUMS(0), FOUR_SUMS(4))
ROWS_MMA(12, 24, "%12,%13,%14,%15", "%16", "%17", FOUR_SUMS(0), FOUR_SUMS(4), FOUR_SUMS(8))
ROWS_MMA(16, 32, "%16,%17,%18,%19", "%20", "%21", FOUR_SUMS(0), FOUR_SUMS(4), FOUR_SUMS(8),
         FOUR_SUMS(12))
ROWS_MMA(20, 40, "%20,%21,%22,%23", "%24", "%25", FOUR_SUMS(0), FOUR_SUMS(4), FOUR_SUMS(8),
         FOUR_SUMS(12), FOUR_SUMS(16))
ROWS_MMA(24, 48, "%24,%25,%26,%27", "%28", "%29", FOUR_SUMS(0), FOUR_SUMS(4), FOUR_SUMS(8),
         FOUR_SUMS(12), FOUR_SUMS(16), FOUR_SUMS(20))
#endif

template <int N>
struct Count {
  static constexpr int value = N;
};

// run(Count<n>), n in 1 .. N: code without branches for every number of eights.
template <int N = EIGHTS, class Run>
DEVICE void with_count(int n, const Run& run) {
  if constexpr (N > 1)
    if (n < N) return with_count<N - 1>(n, run);
  run(Count<N>());
}

// Sums of 2 tiles of 16 weights a warp and N eights of x, in the order of `multiply` of experts_mma.
template <int N>
struct Product {
  float (&sum)[2][EIGHTS][4];

  // One group of tile m, of which `of` has the sums.
  DEVICE_METHOD void join(int m, u32 scales, const float* of) {
    const float low = __uint_as_float(scales << 16), high = __uint_as_float(scales & 0xffff0000u);
#pragma unroll
    for (int n = 0; n < N; n++) {
      sum[m][n][0] = __fmaf_rn(low, of[4 * n], sum[m][n][0]);
      sum[m][n][1] = __fmaf_rn(low, of[4 * n + 1], sum[m][n][1]);
      sum[m][n][2] = __fmaf_rn(high, of[4 * n + 2], sum[m][n][2]);
      sum[m][n][3] = __fmaf_rn(high, of[4 * n + 3], sum[m][n][3]);
    }
  }

  // Adds a chunk of GROUPS groups of weights times x in shared memory. between(): at some place of it.
#if BY_WARPGROUPS
  // One tile is multiplied while the other's sums are joined. Nothing runs on from one chunk to the next:
  // the compiler would wait for every single product. `between` is where both are busy.
  template <int GROUPS, class Between>
  DEVICE_METHOD void add(const unsigned char* chunk, const unsigned char* x, const Between& between) {
    static_assert(GROUPS % 2 == 0, "blocks of two groups");
    const int lane = threadIdx.x & 31;
    float group[2][4 * N];
    u32 scales[2][GROUPS], codes[2][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
      load_words(chunk + (m * TILE_GROUP + 256) * GROUPS + lane / 4 * GROUPS * 4, scales[m]);
    auto start = [&](int k, int m) {
      if (k % 2 == 0) load_words(chunk + m * TILE_GROUP * GROUPS + (k / 2 * 32 + lane) * 16, codes[m]);
      u32 a[2][4];
      eight_codes(codes[m][k % 2 * 2], a[0]), eight_codes(codes[m][k % 2 * 2 + 1], a[1]);
      const unsigned char* b = x + k / 2 * MOST * 128 + k % 2 * 64;
      warpgroup_arrive();
      warpgroup_mma_rows(group[m], a[0], b, false);
      warpgroup_mma_rows(group[m], a[1], b + 32, true);
      warpgroup_commit();
    };
    start(0, 0);
#pragma unroll
    for (int k = 0; k < GROUPS; k++) {
      start(k, 1);
      if (k + 1 == GROUPS / 2) between();
      warpgroup_wait<1>();
      warpgroup_see_sums(group[0]);
      join(0, scales[0][k], group[0]);
      if (k + 1 < GROUPS) start(k + 1, 0), warpgroup_wait<1>();
      else warpgroup_wait<0>();
      warpgroup_see_sums(group[1]);
      join(1, scales[1][k], group[1]);
    }
  }
#else
  template <int GROUPS, class Between>
  DEVICE_METHOD void add(const unsigned char* chunk, const unsigned char* x, const Between& between) {
    between();
    constexpr int TOGETHER = GROUPS % 2 ? 1 : 2;  // groups whose codes lie side by side in a lane
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    x += g * 64 + t * 16;
#pragma unroll 1
    for (int p = 0; p < GROUPS; p += TOGETHER) {
      u32 codes[2][2 * TOGETHER], scales[2][TOGETHER];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const unsigned char* of = chunk + m * TILE_GROUP * GROUPS;
        load_words(of + p * 256 + lane * TOGETHER * 8, codes[m]);
        load_words(of + 256 * GROUPS + (g * GROUPS + p) * 4, scales[m]);
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        u32 a[2][2][4];
        float group[2][4 * N] = {};
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) eight_codes(codes[m][2 * i + half], a[m][half]);
#pragma unroll
        for (int n = 0; n < N; n++) {
          const uint4 b = *(const uint4*)(x + ((p + i) * MOST + n * 8) * 64);
#pragma unroll
          for (int m = 0; m < 2; m++) {
            float (&of)[4] = *(float(*)[4])(group[m] + 4 * n);
            mma_bf16(of, a[m][0], b.x, b.y);
            mma_bf16(of, a[m][1], b.z, b.w);
          }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) join(m, scales[m][i], group[m]);
      }
    }
  }
#endif
};

// x with the columns of every group where warpgroups want them. grid ceil(n / THREADS); a thread makes
// 16 bytes.
KERNEL place_columns(const bf16* x,  // [T, K], 16-byte aligned rows
                     bf16* out,      // likewise, columns as `place_of`
                     i64 n) {        // T * K / 8
  begin_dependent();
  const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  const u32* from = (const u32*)x + i / 4 * 16 + i % 4;
  ((uint4*)out)[i] = uint4{from[0], from[4], from[8], from[12]};
}

// The pairs of every expert, and tiles of them: as few as hold them, of nearly equal numbers of
// eights, experts ascending. ids outside [0, E) are filler and in no list. A warp makes one list; the
// block that comes last makes the tiles. grid ceil(E / WARPS).
KERNEL expert_lists(const int* ids,  // [T, TOP_K], distinct in a row; 16-byte aligned
                    int* lists,      // [E, T]: pair numbers, ascending
                    int* counts,     // [E]
                    int4* tiles,     // [min(P, E + P / MOST)], P = T * TOP_K
                    int* n_tiles,    // [1]
                    u32* arrived,    // [1]: zero, here and after it
                    int T, int E) {
  __shared__ int shared[WARPS];
  __shared__ u32 before;
  begin_dependent();
  const int P = T * TOP_K, lane = threadIdx.x & 31, e = blockIdx.x * WARPS + threadIdx.x / 32;
  const u32 lower = (1u << lane) - 1;
  int n = 0;
  auto find = [&](const int (&of)[4], int first) {  // in pairs first + 4 * lane ...
    u32 there[4];
#pragma unroll
    for (int i = 0; i < 4; i++) there[i] = __ballot_sync(ALL, of[i] == e);
    int at = n;
#pragma unroll
    for (int i = 0; i < 4; i++) at += __popc(there[i] & lower), n += __popc(there[i]);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (of[i] == e) lists[(i64)e * T + at++] = first + 4 * lane + i;
  };
  if (e < E) {
    constexpr int AHEAD = 8;  // loads on their way: none may wait for a store to `lists`
    int first = 0;
#pragma unroll 1
    for (; first + 128 * AHEAD <= P; first += 128 * AHEAD) {
      int4 v[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) v[i] = ((const int4*)(ids + first))[i * 32 + lane];
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (__any_sync(ALL, v[i].x == e || v[i].y == e || v[i].z == e || v[i].w == e))
          find({v[i].x, v[i].y, v[i].z, v[i].w}, first + 128 * i);
    }
#pragma unroll 1
    for (; first + 128 <= P; first += 128) {
      const int4 v = ((const int4*)(ids + first))[lane];
      find({v.x, v.y, v.z, v.w}, first);
    }
    int of[4];
#pragma unroll
    for (int i = 0; i < 4; i++) of[i] = first + 4 * lane + i < P ? ids[first + 4 * lane + i] : -1;
    find(of, first);
    if (lane == 0) counts[e] = n;
  }
  __threadfence();
  __syncthreads();  // all of this block's counts are where others see them
  if (threadIdx.x == 0) {
    before = atomicInc(arrived, gridDim.x - 1);  // which ends at zero
    __threadfence();
  }
  __syncthreads();  // `before` is known
  if (before + 1 < gridDim.x) return;
  const int per = (E + THREADS - 1) / THREADS, begin = threadIdx.x * per, end = min(E, begin + per);
  auto tiles_of = [&](int e) { return (counts[e] + MOST - 1) / MOST; };
  int own = 0;
  for (int e = begin; e < end; e++) own += tiles_of(e);
  int at = block_before(own, shared);
  if (threadIdx.x == THREADS - 1) *n_tiles = at + own;
  for (int e = begin; e < end; e++) {
    const int count = counts[e], eights = (count + 7) / 8, n = tiles_of(e);
    for (int i = 0; i < n; i++) {
      const int first = eights * i / n * 8;
      tiles[at++] = int4{e, first, min(count, eights * (i + 1) / n * 8) - first, 0};
    }
  }
}

// Rows of a tile on their way to shared memory: a thread copies pieces of one; rows past the last are zeros.
struct Rows {
  const bf16* from;  // of the first group, for threads that copy the first
  int bytes;         // of a piece that are there
  bool copies;

  // The n pairs of `list`, `each` of which share a row of x [.., columns].
  DEVICE_METHOD Rows(const bf16* x, const int* list, int n, int columns, int each) {
    const int row = threadIdx.x / 4 % MOST;
    bytes = row < n ? 16 : 0, copies = threadIdx.x / 4 / MOST < SETS;
    from = x + (i64)(list[row < n ? row : 0] / each) * columns + threadIdx.x % 4 * 8;
  }

  // GROUPS groups, from column group `first` on.
  template <int GROUPS>
  DEVICE_METHOD void fetch(unsigned char* to, int first) const {
    const int row = threadIdx.x / 4 % MOST, set = threadIdx.x / 4 / MOST, t = threadIdx.x % 4;
    const bf16* of = from + first * 32;
    if (!copies) return;
#pragma unroll
    for (int i = 0; i < GROUPS; i += SETS) {
      if (i + set >= GROUPS) continue;
#if BY_WARPGROUPS
      // Neighbouring rows write to other banks.
      const int even = SETS > 1 ? set : i, half = even % 2 ^ row % 2, pair = (i + (SETS > 1 ? set : 0)) / 2;
      cp_async_16(to + pair * MOST * 128 + row * 128 + ((half * 4 + t) ^ row % 8) * 16,
                  of + pair * 64 + half * 32, bytes);
#else
      cp_async_16(to + ((i + set) * MOST + row) * 64 + t * 16, of + (i + set) * 32, bytes);
#endif
    }
  }
};

// What this thread copied is there, but for the last N groups, for whoever multiplies after a barrier.
template <int N>
DEVICE void wait_for_rows() {
  cp_async_wait<N>();
#if BY_WARPGROUPS
  warpgroup_see_shared();
#endif
}

// h[pair] = SiLU(gate) * up, rounded. A block takes a tile and 16 * WARPS columns of h; a warp adds the
// PARTS parts of K one after the other, and joins them as a binary counter carries: the first level
// in registers, the others in shared memory. K = PARTS * chunks * UP_GROUPS * 32.
// grid (ceil(BLOCKS / WARPS), tiles at most); shared: rings, [UP_STAGES] places of x of a chunk, then
// waiting parts, [levels, 2 EIGHTS, THREADS] float4, barriers.
extern "C" __global__ void __launch_bounds__(THREADS, UP_RESIDENT)
expert_gate_up_wide(const bf16* x,                // [T, K], 16-byte aligned rows, columns as `place_of`
                    const int* lists,             // [E, T], of expert_lists, as the next two
                    const int4* tiles,            // expert, first place in its list, pairs
                    const int* n_tiles,           // [1]
                    const unsigned char* weight,  // of pack_int4, [E, BLOCKS, ...], 16-byte aligned
                    bf16* h,                      // [T * TOP_K, 16 * BLOCKS], rows and columns as x
                    int T,
                    int chunks) {  // of a part
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int WEIGHTS = 2 * UP_GROUPS * TILE_GROUP, PLACE = UP_GROUPS * MOST * 64;
  constexpr int LEVELS = PARTS > 4 ? 2 : PARTS > 2 ? 1 : 0;
  static_assert(PARTS <= 8 && UP_STAGES >= 3, "levels of waiting parts; the chunks before, here and next");
  static_assert(!BY_WARPGROUPS || WARPS * WEIGHTS % 1024 == 0, "x begins where swizzled blocks may");
  begin_dependent();
  if (blockIdx.y >= *n_tiles) return;
  const int4 tile = tiles[blockIdx.y];
  const int* list = lists + (i64)tile.x * T + tile.y;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int block = blockIdx.x * WARPS + warp, all = PARTS * chunks;
  unsigned char* places = memory + WARPS * UP_STAGES * WEIGHTS;
  float4* waiting = (float4*)(places + UP_STAGES * PLACE);
  u64* barriers = (u64*)(waiting + LEVELS * 2 * EIGHTS * THREADS);
  waiting += threadIdx.x;
  Ring<UP_STAGES> ring(memory + warp * UP_STAGES * WEIGHTS, barriers + warp * UP_STAGES, WEIGHTS);

  // Warps past the last block multiply it again: warpgroups need all of theirs.
  const unsigned char* from = weight + ((i64)tile.x * BLOCKS + min(block, BLOCKS - 1)) * all * WEIGHTS;
  int put_piece = 0, put_part = 0;
  auto there = [&] { return put_part < PARTS; };
  auto advance = [&] {
    put_piece += PARTS;
    if (put_piece >= all) put_piece = ++put_part;
  };
#pragma unroll 1
  for (int i = 0; i < UP_STAGES; i++) ring.start(i, from + (i64)put_piece * WEIGHTS, there()), advance();
  const Rows rows(x, list, tile.z, all * UP_GROUPS * 32, TOP_K);
  int put = 0, place = 0, put_place = 0;
  auto fetch = [&] {
    if (put < all) rows.fetch<UP_GROUPS>(places + put_place * PLACE, put * UP_GROUPS);
    cp_async_commit();
    put++;
    if (++put_place == UP_STAGES) put_place = 0;
  };
#pragma unroll 1
  for (int i = 0; i < UP_STAGES - 1; i++) fetch();
  wait_for_rows<UP_STAGES - 2>();
  __syncthreads();  // the first chunk is there for all

  float sum[2][EIGHTS][4] = {}, kept[2][EIGHTS][4] = {};
  auto finish_part = [&](int part) {  // `sum` goes to where its right neighbour finds it, or to the left one
    const bool last = part + 1 == PARTS;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int n = 0; n < EIGHTS; n++) {
        float4 v = {sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]};
        if (part & 1) {
          v = add4(float4{kept[m][n][0], kept[m][n][1], kept[m][n][2], kept[m][n][3]}, v);
          float4* of = waiting + (m * EIGHTS + n) * THREADS;  // read and written by this thread alone
          int level = 1;
          for (; (part >> level) & 1; level++, of += 2 * EIGHTS * THREADS) v = add4(*of, v);
          if (!last) *of = v;
        } else {
          kept[m][n][0] = v.x, kept[m][n][1] = v.y, kept[m][n][2] = v.z, kept[m][n][3] = v.w;
        }
        if (!last) v = float4{0, 0, 0, 0};
        sum[m][n][0] = v.x, sum[m][n][1] = v.y, sum[m][n][2] = v.z, sum[m][n][3] = v.w;
      }
  };
  with_count((tile.z + 7) / 8, [&](auto count) {
    Product<decltype(count)::value> product{sum};
    int part = 0, chunk = 0;
#pragma unroll 1
    for (int i = 0; i < all; i++) {
      product.template add<UP_GROUPS>(ring.get(), places + place * PLACE, [&] {
        wait_for_rows<UP_STAGES - 3>();
        __syncthreads();  // the next chunk is there for all, and all have read the one before this
        fetch();
      });
      ring.replace(from + (i64)put_piece * WEIGHTS, there());
      advance();
      if (++place == UP_STAGES) place = 0;
      if (++chunk < chunks) continue;
      if (PARTS > 1) finish_part(part);
      chunk = 0, part++;
    }
  });
  if (block >= BLOCKS) return;
#pragma unroll
  for (int n = 0; n < EIGHTS; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int of = n * 8 + 2 * t + i;
      if (of >= tile.z) continue;
      bf16* to = h + (i64)list[of] * BLOCKS * 16 + block / 2 * 32;
#pragma unroll
      for (int m = 0; m < 2; m++)
        store(to + place_of(block % 2 * 16 + m * 8 + g),
              __fmul_rn(silu(__fmul_rn(sum[m][n][i], FROM_CODES)), __fmul_rn(sum[m][n][2 + i], FROM_CODES)));
    }
}

// slots[pair, leaf]: an expert's sums of `blocks` blocks of 32 outputs, from `first_block` on, unweighted;
// float4 g of a block: outputs g, 8 + g, 16 + g, 24 + g. A sum adds its groups ascending. A block takes a
// tile, a leaf and `each` blocks of outputs, every WARPS-th a warp.
// grid (ceil(blocks / each), tiles at most, LEAVES); shared: rings, the leaf's columns of h as x above,
// barriers.
extern "C" __global__ void __launch_bounds__(THREADS, DOWN_RESIDENT)
expert_down_wide(const bf16* h,                // [T * TOP_K, width], of expert_gate_up_wide
                 const int* lists,             // [E, T], of expert_lists, as the next two
                 const int4* tiles,            // expert, first place in its list, pairs
                 const int* n_tiles,           // [1]
                 const unsigned char* weight,  // of pack_int4, [E, all_blocks, ...], 16-byte aligned
                 float4* slots,                // [T * TOP_K, LEAVES, blocks, 8]
                 int T, int width, int all_blocks, int first_block, int blocks, int each) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int bytes = 2 * DOWN_GROUPS * TILE_GROUP;
  begin_dependent();
  if (blockIdx.y >= *n_tiles) return;
  const int4 tile = tiles[blockIdx.y];
  const int* list = lists + (i64)tile.x * T + tile.y;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int leaf = blockIdx.z, leaf_width = width / LEAVES;
  const int chunks = leaf_width / 32 / DOWN_GROUPS, end = min(blocks, (int)(blockIdx.x + 1) * each);
  unsigned char* rows = memory + WARPS * STAGES * bytes;
  u64* barriers = (u64*)(rows + leaf_width * MOST * 2);
  Ring<STAGES> ring(memory + warp * STAGES * bytes, barriers + warp * STAGES, bytes);

  int put = blockIdx.x * each, put_chunk = 0;  // of all warps: the first block
  auto there = [&] { return put < end; };
  auto from = [&] {  // past the last block that one again: warpgroups need all of their warps
    const i64 block = (i64)tile.x * all_blocks + first_block + min(put + warp, end - 1);
    return weight + ((block * LEAVES + leaf) * chunks + put_chunk) * bytes;
  };
  auto advance = [&] {
    if (++put_chunk == chunks) put_chunk = 0, put += WARPS;
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) ring.start(i, from(), there()), advance();
  const Rows fetched(h, list, tile.z, width, 1);
#pragma unroll 1
  for (int c = 0; c < chunks; c++)
    fetched.fetch<DOWN_GROUPS>(rows + c * DOWN_GROUPS * MOST * 64, (leaf * chunks + c) * DOWN_GROUPS);
  cp_async_commit();
  wait_for_rows<0>();
  __syncthreads();  // the rows are there for all

  with_count((tile.z + 7) / 8, [&](auto count) {
#pragma unroll 1
    for (int first = blockIdx.x * each; first < end; first += WARPS) {
      const int block = first + warp;
      float sum[2][EIGHTS][4] = {};
      Product<decltype(count)::value> product{sum};
#pragma unroll 1
      for (int c = 0; c < chunks; c++) {
        product.template add<DOWN_GROUPS>(ring.get(), rows + c * DOWN_GROUPS * MOST * 64, [] {});
        ring.replace(from(), there());
        advance();
      }
#pragma unroll
      for (int n = 0; n < decltype(count)::value; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int of = n * 8 + 2 * t + i;
          if (of < tile.z && block < end)
            slots[(((i64)list[of] * LEAVES + leaf) * blocks + block) * 8 + g] =
                float4{sum[0][n][i], sum[0][n][2 + i], sum[1][n][i], sum[1][n][2 + i]};
        }
    }
  });
}

// out[t, o] of `blocks` blocks of 32 outputs: in every leaf, routed experts by ascending id, weighted, then
// the shared one; then the leaf tree (R4), as expert_down_mma has it. A thread adds one float4 of `slots`:
// outputs g, 8 + g, 16 + g, 24 + g of a block. grid ceil(T * blocks * 8 / THREADS).
KERNEL expert_sum(const float4* slots,   // of expert_down_wide
                  const int* ids,        // [T, TOP_K] ascending in a row; outside [0, E): filler
                  const float* weights,  // [T, TOP_K]
                  const float* shared,   // [T, LEAVES, hidden], read if has_shared, else it may be out
                  float* out,            // [T, hidden]; the columns of these blocks are written
                  int T, int E, int hidden, int first_block, int blocks, int has_shared) {
  begin_dependent();
  const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i >= (i64)T * blocks * 8) return;
  const int row = i / (blocks * 8), of = i % (blocks * 8);
  const int column = (first_block + of / 8) * 32 + of % 8;
  constexpr int LEVELS = LEAVES > 4 ? 3 : LEAVES > 2 ? 2 : LEAVES > 1 ? 1 : 0;
  static_assert(LEAVES <= 8, "levels of waiting leaves");
  float factors[TOP_K];
  bool real[TOP_K];
#pragma unroll
  for (int k = 0; k < TOP_K; k++) {
    const int e = ids[row * TOP_K + k];
    real[k] = e >= 0 && e < E;  // filler adds 0 * 0
    factors[k] = real[k] ? __fmul_rn(weights[row * TOP_K + k], FROM_CODES) : 0.0f;
  }
  float4 waiting[LEVELS + 1];
#pragma unroll
  for (int leaf = 0; leaf < LEAVES; leaf++) {
    float4 v[TOP_K], total = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      v[k] = float4{0, 0, 0, 0};
      if (real[k]) v[k] = slots[(((i64)row * TOP_K + k) * LEAVES + leaf) * blocks * 8 + of];
    }
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      total.x = __fmaf_rn(factors[k], v[k].x, total.x), total.y = __fmaf_rn(factors[k], v[k].y, total.y);
      total.z = __fmaf_rn(factors[k], v[k].z, total.z), total.w = __fmaf_rn(factors[k], v[k].w, total.w);
    }
    if (has_shared) {
      const float* beside = shared + ((i64)row * LEAVES + leaf) * hidden + column;
      total = add4(total, float4{beside[0], beside[8], beside[16], beside[24]});
    }
    int level = 0;
#pragma unroll
    for (; level < LEVELS && (leaf >> level) & 1; level++) total = add4(waiting[level], total);
    waiting[level] = total;
  }
  float* to = out + (i64)row * hidden + column;
  const float4 total = waiting[LEVELS];
  to[0] = total.x, to[8] = total.y, to[16] = total.z, to[24] = total.w;
}
