// INT4 experts on tensor cores: what ops.py runs in place of gate_up and expert_down for bfloat16
// activations, where the shape allows it. experts_mma takes few rows, experts_wide many; their bits are
// the same.
//
// Weights are those of pack_int4 (kernels_gemm.cu): on the 16 side of mma m16n8k16, rows of x on the 8
// side, K in steps of 32 columns, as that file says of all products.

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
