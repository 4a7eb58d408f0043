// Attention on tensor cores: what ops.py runs in place of latent_spans and block_spans for bfloat16
// activations, where the shape allows it.
//
// Scores are S^T = K Q^T: keys lie on the 16 side of mma m16n8k16, columns on the 8 side. A column is
// one (row, head), so that rows and heads share every key that is read, and a column shares no
// arithmetic with its neighbours (R1). Sums, per column and the same for every grid (R3):
//   a score         K's even steps of 16 ascending + its odd ones ascending, times factor
//   P of a leaf     2^(score - ceiling of the leaf's largest), rounded
//   sum of P        slots g, g + 8 of 16; then over g by halves 1, 2, 4; then over the 16s pairwise
//   P V of a leaf   16 slots at a time, ascending, from zero
//   leaves, spans   ascending; every leaf and span joins by fma(part, 2^., sum * 2^.)
// A part of a span may begin in one block and end in the kernel that folds: fp32 parts in memory lose
// nothing, and the arithmetic is the same.

// ==== attention_work ====

// -DLEAF positions, -DSPAN leaves.

// Over the block. shared: WARPS ints, free on return.
template <class Join>
DEVICE int block_join(int value, int* shared, const Join& join) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1)
    value = join(value, __shfl_xor_sync(ALL, value, distance));
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();  // every warp's value is there before any is read
  value = shared[0];
  for (int w = 1; w < WARPS; w++) value = join(value, shared[w]);
  __syncthreads();  // all have read before the caller writes `shared` again
  return value;
}

// What latent_spans_mma works through, in units: some rows of one sequence over some leaves. Up to
// `together` adjacent rows share the leaves in which they see the same keys in all slots: committed
// ones and those of common ancestors. The few leaves behind them are a unit of one row each. A unit has
// up to `each` shared leaves, a divisor of SPAN, so that it lies in one span. The first unit of a span
// leaves one part, the others one a leaf: a sum of their own would change the order of the span's. Of
// the divisors it is the one with the least cost, counted in thousandths of a leaf: leaves that a block
// takes one after the other, parts to write and to read again, and the longest fold.
//
// One block; shared 16 n bytes. Rows of a sequence are adjacent; rows [first, first + n) are planned.
KERNEL attention_work(const int* positions,  // [T]
                      const int* sequence,   // [T], -1: a filler row, which is in no unit
                      const int* lengths,    // [slots of the cache]
                      const int* tables,     // [slots of the cache, max_pages]
                      const int* ancestors,  // [T, depth]
                      int4* units,           // [.., 2]: first row << 8 | rows, head part << 20 | slot,
                                             // first leaf, last + 1; length, position of the first
                                             // row, its sequence, its first page or -1. Block b takes
                                             // b, b + blocks, ..: shared ones that follow each other.
                                             // Behind the last come `blocks` empty ones
                      int4* rows,            // [n]: shared leaves, each, leaves (0: filler), parts
                                             // of the shared leaves
                      int first, int n, int depth, int max_pages, int together, int head_parts,
                      int row_tiles, int blocks, int slots) {
  extern __shared__ __align__(16) int memory[];
  __shared__ int between[WARPS];
  int* leader = memory;      // [n] first row of a row's group; -1: filler
  int* shared = leader + n;  // [n] at a leader: what its rows share, positions, then leaves
  int* place = shared + n;   // [n] units in front of a leader's own
  int* behind = place + n;   // [n] single units in front of a row's own
  positions += first, sequence += first, ancestors += (i64)first * depth;
  for (int i = threadIdx.x; i < n; i += THREADS) shared[i] = 0x7fffffff;
  __syncthreads();  // no row lowers a number that is not there
  for (int i = threadIdx.x; i < n; i += THREADS) {
    leader[i] = -1;
    if (sequence[i] < 0) continue;
    int low = 0, high = i;  // the first row of the sequence
    while (low < high) {
      const int middle = (low + high) / 2;
      if (sequence[middle] == sequence[i]) high = middle;
      else low = middle + 1;
    }
    const int lead = low + (i - low) / together * together, length = lengths[sequence[i]];
    const int *own = ancestors + (i64)i * depth, *other = ancestors + (i64)lead * depth;
    low = 0, high = min(positions[i] - length + 1, depth);  // ancestors in common with the leader
    while (low < high) {
      const int middle = (low + high) / 2;
      if (own[middle] == other[middle]) low = middle + 1;
      else high = middle;
    }
    leader[i] = lead;
    atomicMin(shared + lead, length + low);
  }
  __syncthreads();  // a group's positions are final before they become leaves
  for (int i = threadIdx.x; i < n; i += THREADS)
    if (leader[i] == i) shared[i] /= LEAF;
  __syncthreads();  // leaves are there before they are counted

  const int per = (n + THREADS - 1) / THREADS;  // rows of a thread
  const int begin = min(n, (int)threadIdx.x * per), end = min(n, begin + per);
  auto parts_of = [](int leaves, int each) {
    const int rest = leaves % SPAN;
    return leaves / SPAN * (1 + SPAN - each) + (rest ? 1 + max(0, rest - each) : 0);
  };
  int of_groups, of_rows, of_parts, most;  // units, units, parts of this thread's rows; of any
  auto count = [&](int each) {
    of_groups = of_rows = of_parts = most = 0;
    for (int i = begin; i < end; i++) {
      if (leader[i] < 0) continue;
      const int own = shared[leader[i]], singles = positions[i] / LEAF + 1 - own;
      if (leader[i] == i) of_groups += (own + each - 1) / each;
      of_rows += singles, of_parts += parts_of(own, each) + singles;
      most = max(most, parts_of(own, each) + singles);
    }
  };
  auto add = [](int a, int b) { return a + b; };
  auto larger = [](int a, int b) { return max(a, b); };
  int each = SPAN;
  i64 least = -1;
  for (int turn = SPAN; turn > 0; turn--) {
    if (SPAN % turn) continue;
    count(turn);
    const i64 of_shared = (i64)block_join(of_groups, between, add) * head_parts;
    const i64 single = (i64)block_join(of_rows, between, add) * head_parts;
    const i64 parts = (i64)block_join(of_parts, between, add) * row_tiles;
    const int longest = block_join(most, between, larger);
    const i64 turns = (of_shared + blocks - 1) / blocks;  // single units fill up the last of them
    const i64 late = max((i64)0, single - (turns * blocks - of_shared) * turn);
    const i64 in_turn = turns * turn + (late + blocks - 1) / blocks;
    const i64 cost = in_turn * 1000 + parts + 8 * longest;
    if (longest <= slots && (least < 0 || cost < least)) each = turn, least = cost;
  }
  count(each);
  const int groups = block_join(of_groups, between, add) * head_parts;
  const int total = groups + block_join(of_rows, between, add) * head_parts;
  int group_place = block_before(of_groups, between);
  int row_place = block_before(of_rows, between);
  for (int i = begin; i < end; i++) {
    rows[i] = int4{0, 0, 0, 0};
    if (leader[i] < 0) continue;
    const int leaves = positions[i] / LEAF + 1, own = shared[leader[i]];
    rows[i] = int4{own, each, leaves, parts_of(own, each)};
    place[i] = group_place, behind[i] = row_place;
    if (leader[i] == i) group_place += (own + each - 1) / each;
    row_place += leaves - own;
  }
  __syncthreads();  // all places are there before a warp fills them

  auto put = [&](int at, int i, int count, int part, int slot, int from, int to) {
    const int table = sequence[i], length = lengths[table];
    const int page = from * LEAF < length ? tables[(i64)table * max_pages + from] : -1;
    units[2 * at] = int4{i << 8 | count, part << 20 | slot, from, to};
    units[2 * at + 1] = int4{length, positions[i], table, page};
  };
  const int rounds = groups / blocks, longer = groups % blocks;  // blocks with one unit more
  auto turn_of = [&](int k) {  // where the k-th shared unit stands
    const int block = k < longer * (rounds + 1) ? k / (rounds + 1) : (k - longer) / rounds;
    return (k - block * rounds - min(block, longer)) * blocks + block;
  };
  for (int i = threadIdx.x / 32; i < n; i += WARPS) {  // a warp a row
    if (leader[i] < 0) continue;
    const int own = shared[leader[i]], parts = parts_of(own, each);
    const int singles = positions[i] / LEAF + 1 - own, of_group = (own + each - 1) / each;
    int count = 1;
    while (i + count < n && leader[i + count] == i) count++;
    for (int k = threadIdx.x & 31; leader[i] == i && k < of_group * head_parts; k += 32) {
      const int from = k % of_group * each, inside = from % SPAN;
      const int slot = from / SPAN * (1 + SPAN - each) + (inside ? inside - each + 1 : 0);
      put(turn_of(place[i] * head_parts + k), i, count, k / of_group, slot, from,
          min(own, from + each));
    }
    for (int k = threadIdx.x & 31; k < singles * head_parts; k += 32) {
      const int single = k / head_parts;
      put(groups + behind[i] * head_parts + k, i, 1, k % head_parts, parts + single, own + single,
          own + single + 1);
    }
  }
  for (int i = threadIdx.x; i < blocks; i += THREADS)
    units[2 * (total + i)] = units[2 * (total + i) + 1] = int4{0, 0, 0, 0};
}

// ==== attention_mma ====

// -DKEY_WIDTH, VALUE_WIDTH, LEAF, SPAN as in the section attention. -DAPART: a value is not the front
// of its key. -DSTAGES: leaves in shared memory, 1 or 2. -DWARPGROUP_THREADS: of a block of
// latent_spans_warpgroup. Bytes: see AttentionShape in ops_mma.py.
static_assert(LEAF % 16 == 0 && LEAF <= 16 * WARPS && (LEAF & (LEAF - 1)) == 0, "whole key tiles");
static_assert(KEY_WIDTH % 8 == 0, "keys are copied 16 bytes at a time");
constexpr int KEY_TILES = LEAF / 16;
#define VALUE_TILES ((VALUE_WIDTH + 15) / 16)
constexpr int WIDTH = (KEY_WIDTH + 15) / 16 * 16;  // of a key in shared memory, zeros behind
constexpr int STRIDE = 2 * WIDTH + 16;             // bytes; an odd number of 16: no bank conflicts
constexpr int VALUE_STRIDE = APART ? 32 * VALUE_TILES + 16 : STRIDE;
constexpr int STAGE = LEAF * (STRIDE + (APART ? VALUE_STRIDE : 0));  // bytes of a leaf

#ifndef KDTREE_EMULATOR
DEVICE void ldmatrix_x2(u32 (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)));
}
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}
#if WARPGROUPS
// Registers of a warpgroup's threads: fewer of them, more of them. All its warps call.
template <int N>
DEVICE void warpgroup_release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N>
DEVICE void warpgroup_take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }
DEVICE void mbarrier_arrive(void* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
// A block of 64 x 64 numbers, as products of a warpgroup take it, from row `row` and column `column` on of
// rows in memory that the launcher made a map of. The thread that copies has called see_map.
DEVICE void see_map(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(map) : "memory");
}
DEVICE void copy_block(void* shared, const void* map, int column, int row, void* barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];"
               :: "r"(shared_address(shared)), "l"(map), "r"(column), "r"(row),
                  "r"(shared_address(barrier)) : "memory");
}
// Where a product reads rows of a block: a descriptor's lower word, found once and added to, in uniform
// registers, because to find every one anew takes longer than the products.
struct Operand {
  u32 word;

  DEVICE_METHOD Operand operator+(int bytes) const { return Operand{word + bytes / 16}; }
  DEVICE_METHOD u64 descriptor() const { return 64ull << 32 | 1ull << 62 | word; }  // as of a block
};
DEVICE Operand operand_at(const void* p) {
  return Operand{__reduce_max_sync(ALL, (u32)block_descriptor(p))};  // the same in all lanes
}
#define SUMS_OF_64                                                                                 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"    \
  "%25,%26,%27,%28,%29,%30,%31}"
#define EIGHT_SUMS(i)                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),      \
      "+f"(d[i + 6]), "+f"(d[i + 7])
// b: columns of d are rows in memory.
DEVICE void warpgroup_mma(float (&d)[32], Operand a, Operand b, bool add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SUMS_OF_64
               ", %32, %33, add, 1, 1, 0, 0;\n}"
               : EIGHT_SUMS(0), EIGHT_SUMS(8), EIGHT_SUMS(16), EIGHT_SUMS(24)
               : "l"(a.descriptor()), "l"(b.descriptor()), "r"((int)add));
}
// The same of 64 x 32.
DEVICE void warpgroup_mma(float (&d)[16], Operand a, Operand b, bool add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add, 1, 1, 0, 0;\n}"
               : EIGHT_SUMS(0), EIGHT_SUMS(8)
               : "l"(a.descriptor()), "l"(b.descriptor()), "r"((int)add));
}
// b: rows of d's sum are rows in memory; points to the first of 16.
DEVICE void warpgroup_mma_trans(float (&d)[32], const u32 (&a)[4], Operand b, bool add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SUMS_OF_64
               ", {%32,%33,%34,%35}, %36, add, 1, 1, 1;\n}"
               : EIGHT_SUMS(0), EIGHT_SUMS(8), EIGHT_SUMS(16), EIGHT_SUMS(24)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()), "r"((int)add));
}
#endif
// Both rounded as by `store`, low in the lower half.
DEVICE u32 round_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

// 2^(from - to) of whole numbers, from <= to, exact; zero below the normal range and for -inf.
DEVICE float scale_of(float from, float to) {
  const float exponent = fmaxf(__fsub_rn(from, to), -127.0f);  // also for the NaN of two infinities
  return __uint_as_float(__float_as_uint(__fadd_rn(exponent, 8388608.0f + 127.0f)) << 23);
}

// A row in memory that cp.async may read, or zeros.
struct Row {
  const bf16* from;  // valid in any case
  bool there, skipped = false;
};

// Eight lanes copy a row of FROM numbers, 16 bytes at a time, and zeros up to TO.
template <int TO, int FROM>
DEVICE void copy_row(unsigned char* to, const Row& row) {
  const int lane = threadIdx.x % 8, bytes = row.there ? 16 : 0;
  to += 16 * lane;
  const bf16* from = row.from + 8 * lane;
#pragma unroll
  for (int i = 0; i < TO; i += 64) {
    if (TO % 64 && i + 8 * lane >= TO) continue;
    if (TO == FROM) cp_async_16(to + 2 * i, from + i, bytes);
    else cp_async_16(to + 2 * i, i + 8 * lane < FROM ? from + i : row.from, i + 8 * lane < FROM ? bytes : 0);
  }
}

// key_of(slot) is a Row; its value stands value_offset numbers further.
template <class KeyOf>
DEVICE void load_leaf(unsigned char* stage, int value_offset, const KeyOf& key_of) {
#pragma unroll
  for (int r = threadIdx.x / 8; r < LEAF; r += THREADS / 8) {
    const Row key = key_of(r);
    if (key.skipped) continue;
    copy_row<WIDTH, KEY_WIDTH>(stage + r * STRIDE, key);
    if (APART)
      copy_row<16 * VALUE_TILES, VALUE_WIDTH>(stage + LEAF * STRIDE + r * VALUE_STRIDE,
                                              Row{key.from + value_offset, key.there});
  }
  cp_async_commit();
}

// A block's work on NT tiles of 8 columns. FIT: value tiles of a warp that it sums at once, as registers
// allow. PLACES: columns that shared memory has room for, so that a block may go from one number of
// tiles to another while some of its threads still read what they read last.
template <int NT, int FIT, int PLACES = 8 * NT>
struct Leaves {
  static constexpr int COLUMNS = 8 * NT;
  static constexpr int SHARING = WARPS / KEY_TILES;  // warps that share out the columns of 16 keys
  static constexpr int OWN = (NT + SHARING - 1) / SHARING;  // column tiles of a warp, for the scores
  static constexpr int DIMS = (VALUE_TILES + WARPS - 1) / WARPS;  // value tiles of a warp
  static constexpr bool UNEVEN = VALUE_TILES % WARPS != 0;  // a warp's last tiles may be no tiles
  static constexpr int AT_ONCE = DIMS < FIT ? DIMS : FIT;
  // P lies in the part of a key that is no value, read before P is there; else it has a place.
  static constexpr bool P_IN_KEYS =
      !APART && WIDTH - 16 * VALUE_TILES >= LEAF && PLACES <= LEAF;
  static constexpr int P_STRIDE = P_IN_KEYS ? STRIDE : 2 * LEAF + 16;
  static_assert(P_STRIDE / 16 % 2 == 1, "no bank conflicts");

  unsigned char* queries;  // [PLACES, STRIDE]
  unsigned char* p;        // [PLACES, P_STRIDE]
  float2* factors;         // [PLACES] of the sum so far, of this leaf
  float* maxima;           // [KEY_TILES, COLUMNS]
  float* sums;             // [KEY_TILES, COLUMNS]
  int lane, warp, g, t;
  float folded[DIMS][NT][4];  // of this lane: dims g, g + 8 of a tile, columns 2t, 2t + 1
  float top, total;           // of column threadIdx.x

  // memory: STAGES leaves, then the above.
  DEVICE_METHOD Leaves(unsigned char* memory) {
    queries = memory + STAGES * STAGE, p = queries + PLACES * STRIDE;
    factors = (float2*)(p + (P_IN_KEYS ? 0 : PLACES * P_STRIDE));
    maxima = (float*)(factors + PLACES), sums = maxima + KEY_TILES * PLACES;
    lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  }

  DEVICE_METHOD void clear() {
    top = minus_infinity(), total = 0.0f;
#pragma unroll
    for (int m = 0; m < DIMS; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) folded[m][n][i] = 0.0f;
  }

  // query_of(column) is a Row of q: columns that nobody asks for are worked on too, because a branch
  // between two mma costs more.
  template <class QueryOf>
  DEVICE_METHOD void load_queries(const QueryOf& query_of) {
#pragma unroll
    for (int c = threadIdx.x / 8; c < COLUMNS; c += THREADS / 8)
      copy_row<WIDTH, KEY_WIDTH>(queries + c * STRIDE, query_of(c));
    cp_async_commit();
  }

  // Scores of 16 keys and OWN column tiles, from `first` on: rows g and g + 8, columns 2t, 2t + 1.
  DEVICE_METHOD void scores(const unsigned char* keys, int first, float (&even)[OWN][4]) {
    float odd[OWN][4] = {};
    const unsigned char* a = keys + (warp % KEY_TILES * 16 + lane % 16) * STRIDE + lane / 16 * 16;
    const unsigned char* b = queries + (first * 8 + lane % 8) * STRIDE + lane / 8 * 16;
    u32 low[2][4], high[2][4], q[2][OWN][4];  // of two steps of 32: one is multiplied, one arrives
    auto fetch = [&](int k) {
      ldmatrix_x4(low[k % 2], a + 64 * k);
      ldmatrix_x4(high[k % 2], a + 64 * k + 32);
#pragma unroll
      for (int n = 0; n < OWN; n++) ldmatrix_x4(q[k % 2][n], b + n * 8 * STRIDE + 64 * k);
    };
    if (WIDTH >= 32) fetch(0);
#pragma unroll
    for (int k = 0; k < WIDTH / 32; k++) {
      if (k + 1 < WIDTH / 32) fetch(k + 1);
#pragma unroll
      for (int n = 0; n < OWN; n++) mma_bf16(even[n], low[k % 2], q[k % 2][n][0], q[k % 2][n][1]);
#pragma unroll
      for (int n = 0; n < OWN; n++) mma_bf16(odd[n], high[k % 2], q[k % 2][n][2], q[k % 2][n][3]);
    }
    if (WIDTH % 32) {
      u32 last[4];
      ldmatrix_x4(last, a + WIDTH / 32 * 64);
#pragma unroll
      for (int n = 0; n < OWN; n++) {
        u32 pair[2];
        ldmatrix_x2(pair, queries + ((first + n) * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 16 +
                              WIDTH / 32 * 64);
        mma_bf16(even[n], last, pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < OWN; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) even[n][i] = __fadd_rn(even[n][i], odd[n][i]);
  }

  // The largest score of 16 keys to `maxima`, for every column.
  DEVICE_METHOD void put_maxima(const float (&s)[OWN][4], int first) {
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      float low = fmaxf(s[n][0], s[n][2]), high = fmaxf(s[n][1], s[n][3]);
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) {
        low = fmaxf(low, __shfl_xor_sync(ALL, low, d));
        high = fmaxf(high, __shfl_xor_sync(ALL, high, d));
      }
      if (g == 0)
        *(float2*)(maxima + warp % KEY_TILES * COLUMNS + (first + n) * 8 + 2 * t) =
            float2{low, high};
    }
  }

  DEVICE_METHOD float maximum_of(int column) const {
    float maximum = maxima[column];
#pragma unroll
    for (int k = 1; k < KEY_TILES; k++) maximum = fmaxf(maximum, maxima[k * COLUMNS + column]);
    return ceilf(maximum);
  }

  // Rounded P to shared memory, and the sum over 16 keys to `sums`.
  DEVICE_METHOD void put_p(const float (&s)[OWN][4], int first, unsigned char* to) {
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      const int column = (first + n) * 8 + 2 * t, key = warp % KEY_TILES * 16 + g;
      float sum[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float maximum = maximum_of(column + i);
        const float base = maximum == minus_infinity() ? 0.0f : maximum;
        bf16* row = (bf16*)(to + (column + i) * P_STRIDE) + key;
        bf16 low, high;
        store(&low, exp2_approx(__fsub_rn(s[n][i], base)));
        store(&high, exp2_approx(__fsub_rn(s[n][2 + i], base)));
        row[0] = low, row[8] = high;
        sum[i] = __fadd_rn(to_float(low), to_float(high));
#pragma unroll
        for (int d = 4; d < 32; d <<= 1)
          sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(ALL, sum[i], d));
      }
      if (g == 0)
        *(float2*)(sums + warp % KEY_TILES * COLUMNS + column) = float2{sum[0], sum[1]};
    }
  }

  // folded = P V of this leaf, joined.
  DEVICE_METHOD void add_values(const unsigned char* values, const unsigned char* from) {
    const unsigned char* a = values + (lane % 8 + lane / 16 * 8) * VALUE_STRIDE + lane / 8 % 2 * 16;
    const unsigned char* b = from + lane % 8 * P_STRIDE + lane / 8 * 16;
#pragma unroll
    for (int m0 = 0; m0 < DIMS; m0 += AT_ONCE) {
      const int dim = warp * DIMS + m0;
      if (UNEVEN && dim >= VALUE_TILES) break;
      float sum[AT_ONCE][NT][4] = {};
      u32 v[2][AT_ONCE][4], q[2][4] = {};  // keys of two steps of 16; P of two tiles, one arrives
      auto fetch = [&](int k, int n) {
        u32(&to)[4] = q[n % 2];
        if constexpr (KEY_TILES == 1) {
          u32 pair[2];
          ldmatrix_x2(pair, from + (n * 8 + lane % 8) * P_STRIDE + lane / 8 % 2 * 16);
          to[0] = pair[0], to[1] = pair[1];
        } else {
          ldmatrix_x4(to, b + n * 8 * P_STRIDE + k * 32);
        }
      };
#pragma unroll
      for (int k = 0; k < KEY_TILES; k += 2) {
#pragma unroll
        for (int i = 0; i < 2 && k + i < KEY_TILES; i++)
#pragma unroll
          for (int m = 0; m < AT_ONCE; m++)
            if (m0 + m < DIMS) {
              const int tile = UNEVEN ? min(dim + m, VALUE_TILES - 1) : dim + m;
              ldmatrix_x4_trans(v[i][m], a + (k + i) * 16 * VALUE_STRIDE + tile * 32);
            }
        fetch(k, 0);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          if (n + 1 < NT) fetch(k, n + 1);
#pragma unroll
          for (int m = 0; m < AT_ONCE; m++)
            if (m0 + m < DIMS) mma_bf16(sum[m][n], v[0][m], q[n % 2][0], q[n % 2][1]);
#pragma unroll
          for (int m = 0; m < AT_ONCE; m++)
            if (KEY_TILES > 1 && m0 + m < DIMS)
              mma_bf16(sum[m][n], v[1][m], q[n % 2][2], q[n % 2][3]);
        }
      }
      __syncwarp();  // no data: keeps the compiler from working on all value tiles at a time
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const float4 f = *(const float4*)(factors + n * 8 + 2 * t);
#pragma unroll
        for (int m = 0; m < AT_ONCE; m++) {
          if (m0 + m >= DIMS) break;
          float(&to)[4] = folded[m0 + m][n];
          to[0] = __fmaf_rn(sum[m][n][0], f.y, __fmul_rn(to[0], f.x));
          to[1] = __fmaf_rn(sum[m][n][1], f.w, __fmul_rn(to[1], f.z));
          to[2] = __fmaf_rn(sum[m][n][2], f.y, __fmul_rn(to[2], f.x));
          to[3] = __fmaf_rn(sum[m][n][3], f.w, __fmul_rn(to[3], f.z));
        }
      }
    }
  }

  // One leaf, which lies in `stage` for all threads. seen(slot, column): whether it counts.
  template <class Seen>
  DEVICE_METHOD void add(unsigned char* stage, float factor, const Seen& seen) {
    const int first = warp / KEY_TILES * OWN, slot = warp % KEY_TILES * 16 + g;
    float s[OWN][4] = {};
    if (first < NT) {
      scores(stage, first, s);
#pragma unroll
      for (int n = 0; n < OWN; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          s[n][i] = seen(slot + i / 2 * 8, (first + n) * 8 + 2 * t + i % 2)
                        ? __fmul_rn(s[n][i], factor)
                        : minus_infinity();
      put_maxima(s, first);
    }
    __syncthreads();  // maxima of all keys are there; no score is taken from this leaf any more
    unsigned char* to = P_IN_KEYS ? stage + 32 * VALUE_TILES : p;
    if (first < NT) put_p(s, first, to);
    float now = 0.0f, old = 0.0f;
    if (threadIdx.x < COLUMNS) {
      const float maximum = maximum_of(threadIdx.x), most = fmaxf(top, maximum);
      old = scale_of(top, most), now = scale_of(maximum, most), top = most;
      factors[threadIdx.x] = float2{old, now};
    }
    __syncthreads();  // P, its sums and the factors are there
    if (threadIdx.x < COLUMNS) {
      float sum[KEY_TILES];
#pragma unroll
      for (int k = 0; k < KEY_TILES; k++) sum[k] = sums[k * COLUMNS + threadIdx.x];
#pragma unroll
      for (int d = 1; d < KEY_TILES; d <<= 1)
#pragma unroll
        for (int k = 0; k + d < KEY_TILES; k += 2 * d) sum[k] = __fadd_rn(sum[k], sum[k + d]);
      total = __fmaf_rn(sum[0], now, __fmul_rn(total, old));
    }
    add_values(APART ? stage + LEAF * STRIDE : stage, to);
  }

  // tile_of(n): where column tile n of `tiles` stands among all.
  template <class TileOf>
  DEVICE_METHOD void put(float4* parts, float4* values, int tiles, const TileOf& tile_of) const {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      if (n >= tiles) break;
      float4* to = values + ((i64)tile_of(n) * VALUE_TILES + warp * DIMS) * 32 + lane;
#pragma unroll
      for (int m = 0; m < DIMS; m++)
        if (warp * DIMS + m < VALUE_TILES)
          to[m * 32] = float4{folded[m][n][0], folded[m][n][1], folded[m][n][2], folded[m][n][3]};
    }
    if (threadIdx.x < 8 * tiles) {
      const int c = threadIdx.x % 8;
      float* to = (float*)(parts + (i64)tile_of(threadIdx.x / 8) * 4 + c / 2) + c % 2;
      to[0] = top, to[2] = total;
    }
  }
};

#if !APART
// What latent_spans_mma and latent_spans_warpgroup read and write.
struct Latent {
  const bf16* q;        // [n, H, KEY_WIDTH], 16-byte aligned
  const bf16* pages;    // [.., LEAF, KEY_WIDTH], likewise
  const bf16* fresh;    // [T, KEY_WIDTH], likewise
  const int* tables;    // [slots of the cache, max_pages]
  const int* ancestors; // [n, depth]
  float4* parts;        // [slots, all_tiles, 4]: maxima (log2) of columns 2t, 2t + 1, then their sums
  float4* values;       // [slots, all_tiles, VALUE_TILES, 32]
  int H, max_pages, depth, all_tiles;
  float factor;
};

// A unit of attention_work.
struct Unit {
  int4 a, b;

  DEVICE_METHOD int row() const { return a.x >> 8; }
  DEVICE_METHOD int rows() const { return a.x & 255; }  // 0: behind the last
  DEVICE_METHOD int part() const { return a.y >> 20; }  // of the heads
  DEVICE_METHOD int slot() const { return a.y & 0xfffff; }
  DEVICE_METHOD int begin() const { return a.z; }
  DEVICE_METHOD int end() const { return a.w; }
  DEVICE_METHOD int length() const { return b.x; }
  DEVICE_METHOD int position() const { return b.y; }
  DEVICE_METHOD int sequence() const { return b.z; }
  DEVICE_METHOD int first_page() const { return b.w; }
};

enum Keys { ALL_KEYS, COMMITTED, OTHERS };

// The key in a slot of a leaf, whose committed keys are in `page`.
DEVICE Row key_of(const Latent& x, const Unit& u, int leaf, int page, int slot, Keys which) {
  const int at = leaf * LEAF + slot;
  Row row = {x.pages + ((i64)page * LEAF + slot) * KEY_WIDTH, at <= u.position()};
  row.skipped = which != ALL_KEYS && (which == COMMITTED) != (at < u.length());
  if (at >= u.length() && !row.skipped) {
    const int* path = x.ancestors + (i64)u.row() * x.depth;
    row.from = x.fresh + (row.there ? (i64)path[at - u.length()] * KEY_WIDTH : 0);
  }
  return row;
}

DEVICE void load_leaf(const Latent& x, const Unit& u, int leaf, int page, unsigned char* stage,
                      Keys which = ALL_KEYS) {
  load_leaf(stage, 0, [&](int slot) { return key_of(x, u, leaf, page, slot, which); });
}

// Columns of a unit, in tiles of 8: tile n is head tile first + n % heads of its row n / heads.
struct Columns {
  int row_tiles, first, heads;

  DEVICE_METHOD Columns(const Latent& x, const Unit& u, int most) {
    row_tiles = (x.H + 7) / 8, first = u.part() * most, heads = min(most, row_tiles - first);
  }
  DEVICE_METHOD Row query(const Latent& x, const Unit& u, int column) const {
    const int n = column / 8, head = (first + n % heads) * 8 + column % 8;
    const bool there = n < u.rows() * heads && head < x.H;
    const i64 at = (i64)(u.row() + n / heads) * x.H + head;
    return Row{x.q + (there ? at * KEY_WIDTH : 0), there};
  }
  DEVICE_METHOD i64 tile(const Latent& x, const Unit& u, int slot, int n) const {
    return (i64)slot * x.all_tiles + (u.row() + n / heads) * row_tiles + first + n % heads;
  }
};

// Works on u, whose first leaf is on its way to `stage`, and starts the first leaf of the next unit,
// which is read where it is needed: registers are short. same: the columns are those of the unit before.
template <int NT, int FIT, int PLACES>
DEVICE void latent_unit(const Latent& x, const Unit& u, const int4* next_unit, bool same, int& stage,
                        unsigned char* memory) {
  Leaves<NT, FIT, PLACES> s(memory);
  const Columns columns(x, u, PLACES / 8);
  const int* table = x.tables + (i64)u.sequence() * x.max_pages;
  if (!same) s.load_queries([&](int column) { return columns.query(x, u, column); });
  // A span that began in another unit: its leaves stay apart, for the fold to join in order.
  const bool apart = u.begin() % SPAN != 0;
  int slot = u.slot();
  s.clear();
  for (int leaf = u.begin(); leaf < u.end(); leaf++) {
    const bool last = leaf + 1 == u.end();
    Unit next;
    int page = 0;  // of the next leaf
    if (last) next = Unit{next_unit[0], next_unit[1]};
    else if ((leaf + 1) * LEAF < u.length()) page = table[leaf + 1];
    cp_async_wait<0>();
    __syncthreads();  // the leaf has arrived; the one before has been read
    auto load_next = [&](unsigned char* to) {
      const Unit of = last ? next : u;
      if (of.rows())
        load_leaf(x, of, last ? of.begin() : leaf + 1, last ? of.first_page() : page, to);
    };
    if (STAGES == 2) load_next(memory + (1 - stage) * STAGE);
    s.add(memory + stage * STAGE, x.factor,
          [&](int key, int) { return leaf * LEAF + key <= u.position(); });
    if (STAGES == 2) {
      stage = 1 - stage;
    } else {
      __syncthreads();  // the leaf has been read before the next is copied over it
      load_next(memory);
    }
    if (!last && !apart) continue;
    s.put(x.parts, x.values, u.rows() * columns.heads,
          [&](int n) { return columns.tile(x, u, slot, n); });
    s.clear(), slot++;
  }
}

// Parts of spans of absorbed latent attention, unit by unit. grid: any, as many empty units at least
// behind the last; block THREADS. The first units are read, and their committed keys fetched, while
// the kernel in front still runs: it must be none that wrote them.
template <int NT>
DEVICE void latent_spans_mma(const Latent& x, const int4* units) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int FIT = NT == 8 ? 2 : 4;
  grid_dependency_launch();
  Unit u = {units[2 * blockIdx.x], units[2 * blockIdx.x + 1]};
  if (u.rows()) load_leaf(x, u, u.begin(), u.first_page(), memory, COMMITTED);
  grid_dependency_wait();
  if (u.rows()) load_leaf(x, u, u.begin(), u.first_page(), memory, OTHERS);
  int stage = 0;
  bool same = false;
  while (u.rows()) {
    units += 2 * gridDim.x;
    const int4* next = units + 2 * blockIdx.x;
    if (NT > 1 && u.rows() * min(NT, (x.H + 7) / 8 - u.part() * NT) == 1)
      latent_unit<1, 1, 8 * NT>(x, u, next, same, stage, memory);
    else
      latent_unit<NT, FIT, 8 * NT>(x, u, next, same, stage, memory);
    const Unit then = {next[0], next[1]};
    same = u.a.x == then.a.x && u.part() == then.part();
    u = then;
  }
}

#define LATENT_SPANS(NT)                                                                           \
  KERNEL latent_spans_mma_##NT(                                                                    \
      const bf16* q, const bf16* pages, const bf16* fresh, const int* tables,                      \
      const int* ancestors, const int4* units /* [.., 2] of attention_work */, float4* parts,      \
      float4* values, int H, int max_pages, int depth, int all_tiles, float factor) {              \
    const Latent x = {q,      pages, fresh,     tables, ancestors, parts,                          \
                      values, H,     max_pages, depth,  all_tiles, factor};                        \
    latent_spans_mma<NT>(x, units);                                                                \
  }
LATENT_SPANS(1)
LATENT_SPANS(2)
LATENT_SPANS(4)
LATENT_SPANS(8)

#if WARPGROUPS && LEAF == 64 && KEY_WIDTH % 64 == 0 && VALUE_WIDTH % 128 == 0 && VALUE_WIDTH <= 512
// latent_spans_mma for 64 columns, by warpgroups (sm_90a): the same sums in the same order. Scores are
// Q K^T and sums P V here. Of three warpgroups one loads. Of the others, the adders, each finds the
// scores of half of a leaf's keys, and adds half of the value's dims, 64 at a time. The warps that have
// the same 16 columns exchange what they know of P through shared memory.
// Queries and leaves lie in blocks of 64 rows x 128 bytes, whose 16-byte pieces are swizzled. Every block
// of a leaf is loaded, and given free, by itself, so that leaves arrive while others are worked on. Units,
// tables and committed leaves are read while the kernel in front still runs: it must be none that wrote them.
// grid: as latent_spans_mma; block WARPGROUP_THREADS; shared: two leaves, queries, P [64, 64], Gates, none
// in place of another.
static_assert(WARPGROUP_THREADS == 3 * 128, "two warpgroups add, one loads");
constexpr int BLOCK = 64 * 128;
constexpr int BLOCKS = KEY_WIDTH / 64;
constexpr int CHUNKS = VALUE_WIDTH / 128;  // of 64 dims, of an adder
constexpr int QUERY_WARPS = 3;             // that load queries

// Barriers of a block, and what adders exchange; in shared memory behind two leaves, queries and P.
struct Gates {
  u64 full[2][BLOCKS];        // a block has arrived
  u64 free[2][BLOCKS];        // it has been read for the last time
  u64 maxima[4], weights[4];  // both warps of 16 columns have put what follows, and P
  u64 asked, answered;        // the queries are there; they have been read for the last time
  float largest[2][2][64];    // score of a leaf's half, by column; leaves take turns
  float sums[2][2][64];       // of P, likewise

  DEVICE_METHOD void init() {
    for (int s = 0; s < 2; s++)
      for (int b = 0; b < BLOCKS; b++) {
        mbarrier_init(full[s] + b, 1);
        mbarrier_init(free[s] + b, b < 2 * CHUNKS ? 4 : 8);  // warps: of the adder of its dims, or all
      }
    for (int w = 0; w < 4; w++) mbarrier_init(maxima + w, 2), mbarrier_init(weights + w, 2);
    mbarrier_init(&asked, QUERY_WARPS), mbarrier_init(&answered, 8);
  }
};

// Rows of KEY_WIDTH to BLOCKS blocks, eight lanes a row; thread `thread` of `threads`.
template <class RowOf>
DEVICE void load_blocks(unsigned char* to, int thread, int threads, const RowOf& row_of) {
#pragma unroll 4
  for (int r = thread / 8; r < 64; r += threads / 8) {
    const Row row = row_of(r);
    const int piece = thread % 8;
    unsigned char* at = to + r * 128 + (piece ^ r % 8) * 16;
#pragma unroll
    for (int i = 0; i < BLOCKS; i++)
      cp_async_16(at + i * BLOCK, row.from + i * 64 + piece * 8, row.there ? 16 : 0);
  }
  cp_async_commit();
  cp_async_wait<0>();
  warpgroup_see_shared();
  __syncwarp();  // all lanes have seen to theirs before one says so
}

// One warp: all leaves of the block's units. Committed keys do not wait for the kernel in front.
DEVICE void load_leaves(const Latent& x, const void* map, const int4* units, unsigned char* blocks,
                        Gates& gates) {
  const int lane = threadIdx.x & 31;
  bool waited = false;
  see_map(map);
  Unit u = {units[2 * blockIdx.x], units[2 * blockIdx.x + 1]};
  for (int n = 0; u.rows();) {
    units += 2 * gridDim.x;
    const Unit next = {units[2 * blockIdx.x], units[2 * blockIdx.x + 1]};
    int page = u.first_page();
    for (int leaf = u.begin(); leaf < u.end(); leaf++, n++) {
      const int stage = n % 2, after = leaf + 1;
      unsigned char* to = blocks + stage * BLOCKS * BLOCK;
      int page_after = 0;
      if (after < u.end() && after * LEAF < u.length())
        page_after = x.tables[(i64)u.sequence() * x.max_pages + after];
      const bool committed = after * LEAF <= u.length();
      if (!committed && !waited) grid_dependency_wait(), waited = true;
      for (int b = 0; b < BLOCKS; b++) {
        if (n > 1) mbarrier_wait(gates.free[stage] + b, n / 2 - 1 & 1);
        if (!committed || lane) continue;
        mbarrier_expect(gates.full[stage] + b, BLOCK);
        copy_block(to + b * BLOCK, map, 64 * b, page * LEAF, gates.full[stage] + b);
      }
      if (!committed) {
        load_blocks(to, lane, 32,
                    [&](int slot) { return key_of(x, u, leaf, page, slot, ALL_KEYS); });
        if (lane == 0)
          for (int b = 0; b < BLOCKS; b++) mbarrier_arrive(gates.full[stage] + b);
      }
      page = page_after;
    }
    u = next;
  }
  if (!waited) grid_dependency_wait();
}

// QUERY_WARPS warps: the queries, wherever they change. thread: of these warps'.
DEVICE void load_unit_queries(const Latent& x, const int4* units, int thread, unsigned char* queries,
                              Gates& gates) {
  grid_dependency_wait();
  Unit u = {units[2 * blockIdx.x], units[2 * blockIdx.x + 1]};
  bool same = false;
  for (int n = 0; u.rows();) {
    units += 2 * gridDim.x;
    const Unit next = {units[2 * blockIdx.x], units[2 * blockIdx.x + 1]};
    if (!same) {
      if (n > 0) mbarrier_wait(&gates.answered, n - 1 & 1);
      const Columns columns(x, u, 8);
      load_blocks(queries, thread, 32 * QUERY_WARPS,
                  [&](int column) { return columns.query(x, u, column); });
      if (thread % 32 == 0) mbarrier_arrive(&gates.asked);
      n++;
    }
    same = u.a.x == next.a.x && u.part() == next.part();
    u = next;
  }
}

// A warp's 16 columns of a unit: this lane's are g and g + 8; of their dims it has 8j + 2t, 8j + 2t + 1
// of every chunk. Four lanes hold the same top and total.
struct Strip {
  float folded[CHUNKS][32];
  float top[2], total[2];

  DEVICE_METHOD void clear() {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int i = 0; i < 32; i++) folded[c][i] = 0.0f;
    top[0] = top[1] = minus_infinity(), total[0] = total[1] = 0.0f;
  }

  // s: of keys 8j + 2t, 8j + 2t + 1, columns g (4j, 4j + 1) and g + 8 (4j + 2, 4j + 3). keys: of this
  // adder; full: the blocks' barriers.
  DEVICE_METHOD void scores(Operand queries, Operand keys, u64* full, u32 parity, float factor,
                            float (&s)[16]) const {
    float odd[16];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      mbarrier_wait(full + b, parity);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int at = b * BLOCK + k * 64;  // two steps of 16
        warpgroup_mma(s, queries + at, keys + at, b + k > 0);
        warpgroup_mma(odd, queries + at + 32, keys + at + 32, b + k > 0);
      }
      warpgroup_commit();
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < 16; i++) s[i] = __fmul_rn(__fadd_rn(s[i], odd[i]), factor);
  }

  // p: rounded P of 16 columns and all keys, as the steps of 16 keys take it. scale: of the sum so far,
  // of this leaf, which is the n-th. rows: where P of these columns goes; it has
  // one place, for both warps have read P of a leaf before they meet for the maxima of the next.
  DEVICE_METHOD void softmax(const float (&s)[16], unsigned char* rows, Gates& gates, int adder,
                             int n, u32 (&p)[4][4], float2 (&scale)[2]) {
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4, strip = threadIdx.x / 32 % 4;
    const int at = 16 * strip + g;  // and 8 further
    auto& largest = gates.largest[n % 2];
    auto& sums = gates.sums[n % 2];
    float most[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      most[r] = s[2 * r];
#pragma unroll
      for (int j = 0; j < 4; j++)
        most[r] = fmaxf(most[r], fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      most[r] = fmaxf(most[r], __shfl_xor_sync(ALL, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(ALL, most[r], 2));
      if (t == 0) largest[adder][at + 8 * r] = most[r];
    }
    meet(gates.maxima + strip, n);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      most[r] = ceilf(fmaxf(most[r], largest[1 - adder][at + 8 * r]));
      const float base = most[r] == minus_infinity() ? 0.0f : most[r];
      unsigned char* row = rows + (g + 8 * r) * 128 + 4 * t;
      float sum[2];  // of 16 keys
#pragma unroll
      for (int k = 0; k < 2; k++) {
        float of[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int x = 8 * k + 4 * i + 2 * r;
          const u32 pair = round_pair(exp2_approx(__fsub_rn(s[x], base)),
                                      exp2_approx(__fsub_rn(s[x + 1], base)));
          *(u32*)(row + (4 * adder + 2 * k + i ^ g) * 16) = pair;
          of[i][0] = __uint_as_float(pair << 16), of[i][1] = __uint_as_float(pair & 0xffff0000u);
        }
        sum[k] = __fadd_rn(__fadd_rn(of[0][0], of[1][0]), __fadd_rn(of[0][1], of[1][1]));
        sum[k] = __fadd_rn(sum[k], __shfl_xor_sync(ALL, sum[k], 1));
        sum[k] = __fadd_rn(sum[k], __shfl_xor_sync(ALL, sum[k], 2));
      }
      if (t == 0) sums[adder][at + 8 * r] = __fadd_rn(sum[0], sum[1]);
    }
    meet(gates.weights + strip, n);
#pragma unroll
    for (int k = 0; k < 4; k++)
      ldmatrix_x4(p[k], rows + lane % 16 * 128 + (2 * k + lane / 16 ^ lane % 8) * 16);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float now = fmaxf(top[r], most[r]);
      scale[r] = float2{scale_of(top[r], now), scale_of(most[r], now)}, top[r] = now;
      const float sum = __fadd_rn(sums[0][at + 8 * r], sums[1][at + 8 * r]);
      total[r] = __fmaf_rn(sum, scale[r].y, __fmul_rn(total[r], scale[r].x));
    }
  }

  // The two warps of 16 columns, at leaf n: what each has written, both may read.
  DEVICE_METHOD static void meet(u64* barrier, int n) {
    __syncwarp();  // all lanes have written before one says so
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier);
    mbarrier_wait(barrier, n & 1);
  }

  // Columns g and g + 8 of all dims to the tiles `values`, if there are such, in the order of Leaves::put:
  // two neighbouring columns, which lanes 4g + t and 4 (g ^ 1) + t have, belong together.
  DEVICE_METHOD void put(float4* (&values)[2]) const {
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4, odd = g % 2;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int i = 0; i < 4; i++)  // tiles of 16 dims
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float* f = folded[c] + 8 * i + 2 * r;  // dims 2t, 2t + 1; 4 further: 2t + 8, 2t + 9
          const float low = __shfl_xor_sync(ALL, odd ? f[0] : f[1], 4);
          const float high = __shfl_xor_sync(ALL, odd ? f[4] : f[5], 4);
          if (values[r])
            values[r][(4 * c + i) * 32 + (2 * t + odd) * 4 + g / 2] =
                odd ? float4{low, f[1], high, f[5]} : float4{f[0], low, f[4], high};
        }
  }

  // values: of the first block of this adder's dims, which it has seen arrive; free: its barrier.
  DEVICE_METHOD void add_values(Operand values, u64* free, const u32 (&p)[4][4],
                                const float2 (&scale)[2]) {
    float sum[2][32];  // one chunk is joined while the next is multiplied
    auto start = [&](int c) {
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < 4; k++)
        warpgroup_mma_trans(sum[c % 2], p[k], values + (c * BLOCK + k * 16 * 128), k > 0);
      warpgroup_commit();
    };
    start(0);
    // Mostly the largest score stays, and so does the sum so far; times 1 it would be the same.
    if (!__all_sync(ALL, scale[0].x == 1.0f && scale[1].x == 1.0f))
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < 32; i++) folded[c][i] = __fmul_rn(folded[c][i], scale[i / 2 % 2].x);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (c + 1 < CHUNKS) start(c + 1), warpgroup_wait<1>();
      else warpgroup_wait<0>();
      if ((threadIdx.x & 31) == 0) mbarrier_arrive(free + c);
#pragma unroll
      for (int i = 0; i < 32; i++)
        folded[c][i] = __fmaf_rn(sum[c % 2][i], scale[i / 2 % 2].y, folded[c][i]);
    }
  }
};

// An adder, 0 or 1.
DEVICE void add_leaves(const Latent& x, const int4* units, int adder, const unsigned char* blocks,
                       const unsigned char* queries, unsigned char* p_block, Gates& gates) {
  const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4, strip = threadIdx.x / 32 % 4;
  const int first = adder * CHUNKS;
  unsigned char* rows_of_p = p_block + strip * 16 * 128;
  grid_dependency_wait();
  units += 2 * blockIdx.x;
  int asked = 0;
  bool same = false;
  Strip s;
  // Of a unit, what its leaves need is kept; the rest is read again where parts are put.
  for (int n = 0;; units += 2 * gridDim.x) {  // n: leaves so far
    const int4 unit = units[0];
    const int begin = unit.z, end = unit.w, position = units[1].y;
    if (!Unit{unit, unit}.rows()) break;
    if (!same) mbarrier_wait(&gates.asked, asked++ & 1);
    const int4 after = units[2 * gridDim.x];
    same = unit.x == after.x && unit.y >> 20 == after.y >> 20;
    // A span that began in another unit: its leaves stay apart, for the fold to join in order.
    const bool apart = begin % SPAN != 0;
    s.clear();
    for (int leaf = begin; leaf < end; leaf++, n++) {
      const int stage = n % 2;
      const u32 parity = n / 2 & 1;
      const unsigned char* keys = blocks + stage * BLOCKS * BLOCK;
      float scores[16];
      s.scores(operand_at(queries), operand_at(keys + adder * 32 * 128), gates.full[stage], parity,
               x.factor, scores);
      if (lane == 0) {
        for (int b = 2 * CHUNKS; b < BLOCKS; b++) mbarrier_arrive(gates.free[stage] + b);
        if (leaf + 1 == end && !same) mbarrier_arrive(&gates.answered);
      }
      if ((leaf + 1) * LEAF > position + 1)
#pragma unroll
        for (int i = 0; i < 16; i++)
          if (leaf * LEAF + 32 * adder + i / 4 * 8 + 2 * t + i % 2 > position)
            scores[i] = minus_infinity();
      u32 p[4][4];
      float2 scale[2];
      s.softmax(scores, rows_of_p, gates, adder, n, p, scale);
      s.add_values(operand_at(keys + first * BLOCK), gates.free[stage] + first, p, scale);
      if (leaf + 1 < end && !apart) continue;
      const Unit u = {units[0], units[1]};
      const Columns columns(x, u, 8);
      const int slot = u.slot() + (apart ? leaf - begin : 0);
      float4* tiles[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int tile = 2 * strip + r;
        const bool there = tile < u.rows() * columns.heads;
        const i64 to = there ? columns.tile(x, u, slot, tile) : 0;
        tiles[r] = there ? x.values + (to * VALUE_TILES + first * 4) * 32 : nullptr;
        if (there && adder == 0 && t == 0) {
          float* heads = (float*)(x.parts + to * 4 + g / 2) + g % 2;
          heads[0] = s.top[r], heads[2] = s.total[r];
        }
      }
      s.put(tiles);
      s.clear();
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPGROUP_THREADS, 1) latent_spans_warpgroup(
    const bf16* q,         // this and what has no words: see Latent
    const bf16* pages,
    const u64* map,        // [16] of the launcher's block_map, of pages as rows of KEY_WIDTH
    const bf16* fresh,
    const int* tables,
    const int* ancestors,
    const int4* units,     // [.., 2] of attention_work
    float4* parts,
    float4* values,
    int H, int max_pages, int depth, int all_tiles, float factor) {
  extern __shared__ __align__(1024) unsigned char blocks[];
  const Latent x = {q,      pages, fresh,     tables, ancestors, parts,
                    values, H,     max_pages, depth,  all_tiles, factor};
  unsigned char* queries = blocks + 2 * BLOCKS * BLOCK;
  unsigned char* p_block = queries + BLOCKS * BLOCK;
  Gates& gates = *(Gates*)(p_block + BLOCK);
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  grid_dependency_launch();
  if (threadIdx.x == 0) gates.init();
  __syncthreads();  // the barriers exist before anybody waits at one
  // A thread begins with 168 registers: 65536 in eights for the block's. 56 + 2 * 224 are three times that.
  if (group == 2) {
    warpgroup_release_registers<56>();
    if (thread < 32) load_leaves(x, map, units, blocks, gates);
    else load_unit_queries(x, units, thread - 32, queries, gates);
  } else {
    warpgroup_take_registers<224>();
    add_leaves(x, units, group, blocks, queries, p_block, gates);
  }
}
#endif
#endif

// A part of softmax of this lane: values at dims g, g + 8 and columns 2t, 2t + 1; m: maxima, sums.
struct Part {
  float4 m, v;
};

DEVICE void join(Part& a, const Part& b) {
  const float x = fmaxf(a.m.x, b.m.x), y = fmaxf(a.m.y, b.m.y);
  const float old_x = scale_of(a.m.x, x), now_x = scale_of(b.m.x, x);
  const float old_y = scale_of(a.m.y, y), now_y = scale_of(b.m.y, y);
  a.v.x = __fmaf_rn(b.v.x, now_x, __fmul_rn(a.v.x, old_x));
  a.v.y = __fmaf_rn(b.v.y, now_y, __fmul_rn(a.v.y, old_y));
  a.v.z = __fmaf_rn(b.v.z, now_x, __fmul_rn(a.v.z, old_x));
  a.v.w = __fmaf_rn(b.v.w, now_y, __fmul_rn(a.v.w, old_y));
  a.m.z = __fmaf_rn(b.m.z, now_x, __fmul_rn(a.m.z, old_x));
  a.m.w = __fmaf_rn(b.m.w, now_y, __fmul_rn(a.m.w, old_y));
  a.m.x = x, a.m.y = y;
}

// All parts of one column tile and one value tile, folded inside spans, then over spans. begin(span) is
// the first part of a span. `split` warps share the spans out and meet in `shared` [WARPS, MEET, 32];
// the first of them returns the whole. All threads of the block call. What is joined first is copied:
// a part is never -0, so nothing changes.
constexpr int MEET = 4;  // spans of a warp between two meetings
template <class Begin>
DEVICE Part fold_parts(const float4* parts, i64 part_stride, const float4* values, i64 stride,
                          int spans, int split, unsigned char* memory, const Begin& begin) {
  constexpr int AHEAD = 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, turn = warp % split;
  const int each = split == 1 ? spans : min(MEET, (spans + split - 1) / split);
  Part* shared = (Part*)memory;
  Part all, sum;
  bool first_span = true, first_part = true;
  auto put = [](Part& a, const Part& b, bool& first) {
    if (first) a = b;
    else join(a, b);
    first = false;
  };
  for (int round = 0; round < spans; round += each * split) {
    int span = min(spans, round + turn * each), next = begin(span + 1);
    const int start = begin(span), end = begin(min(spans, span + each));
    Part* mine = shared + warp * MEET * 32 + lane;
    auto end_span = [&] {
      if (split == 1) put(all, sum, first_span);
      else *mine = sum, mine += 32;
      first_part = true;
    };
    for (int k = start; k < end; k += AHEAD) {
      Part loaded[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        if (k + i >= end) continue;
        loaded[i].m = parts[(k + i) * part_stride + lane % 4];
        loaded[i].v = values[(k + i) * stride + lane];
      }
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        if (k + i >= end) break;
        if (k + i == next) end_span(), next = begin(++span + 1);
        put(sum, loaded[i], first_part);
      }
    }
    if (start < end) end_span();
    if (split == 1) break;
    __syncthreads();  // every warp's spans are there
    if (turn == 0)
#pragma unroll 4
      for (int i = 0; i < min(spans - round, each * split); i++)
        put(all, shared[((warp + i / each) * MEET + i % each) * 32 + lane], first_span);
    __syncthreads();  // all are read before the next ones are put there
  }
  return all;
}

// Columns 2t, 2t + 1 of the folded part, divided by their sums. out_of(column): a row of out, or null.
template <class OutOf>
DEVICE void put_row(const Part& all, int tile, bool empty, const OutOf& out_of) {
  const int lane = threadIdx.x & 31, t = lane % 4, dim = tile * 16 + lane / 4;
  const float values[2][2] = {{all.v.x, all.v.z}, {all.v.y, all.v.w}}, sums[2] = {all.m.z, all.m.w};
#pragma unroll
  for (int c = 0; c < 2; c++) {
    bf16* out = out_of(2 * t + c);
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (out && dim + 8 * i < VALUE_WIDTH)
        store(out + dim + 8 * i, empty ? 0.0f : __fdiv_rn(values[c][i], sums[c]));
  }
}

#if !APART
// out = folded value / folded sum, rounded. grid (ceil(VALUE_TILES * split / WARPS), all_tiles); shared
// for split > 1: WARPS * MEET * 1024 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 2) latent_fold_mma(const float4* parts,   // [slots, all_tiles, 4]
                     const float4* values,  // [slots, all_tiles, VALUE_TILES, 32]
                     const int4* rows,      // [n] of attention_work; a filler row becomes zero
                     bf16* out,             // [n, H, VALUE_WIDTH]
                     int H, int all_tiles, int split) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int tile = (blockIdx.x * WARPS + threadIdx.x / 32) / split, row_tiles = (H + 7) / 8;
  const int row = blockIdx.y / row_tiles, head = blockIdx.y % row_tiles * 8;
  grid_dependency_launch();
  const int4 of = rows[row];
  const int own = of.x, leaves = of.z, span_parts = 1 + SPAN - of.y;
  const i64 at = (i64)blockIdx.y * VALUE_TILES + min(tile, VALUE_TILES - 1);
  grid_dependency_wait();
  const Part all = fold_parts(
      parts + (i64)blockIdx.y * 4, (i64)all_tiles * 4, values + at * 32,
      (i64)all_tiles * VALUE_TILES * 32, (leaves + SPAN - 1) / SPAN, split, memory,
      [&](int span) {
        const int shared = span * SPAN < own ? span * span_parts : of.w;
        return shared + max(0, min(leaves, span * SPAN) - own);
      });
  if (tile >= VALUE_TILES || threadIdx.x / 32 % split) return;
  put_row(all, tile, leaves == 0, [&](int column) {
    return head + column < H ? out + ((i64)row * H + head + column) * VALUE_WIDTH : nullptr;
  });
}
#endif

#if APART
// The drafter's blocks: n rows each, which all see the context (inside the window) and the block. Unit:
// some leaves for some columns of one block and one key head; columns go by row, then query head.
struct Blocks {
  const int* lengths;  // [B] context entries
  int B, n, H, KV, window;
  int parts;   // of the columns of a block and key head, NT tiles each
  int blocks;  // units that run at once
  int slots;   // parts of a span's leaves for one column, at most

  DEVICE_METHOD int group() const { return H / KV; }
  DEVICE_METHOD int column_tiles() const { return (n * group() + 7) / 8; }
  DEVICE_METHOD int first_leaf(int b) const {
    return window && lengths[b] ? max(0, lengths[b] - window + 1) / LEAF : 0;
  }
  DEVICE_METHOD int own_leaf(int b) const { return (lengths[b] + LEAF - 1) / LEAF; }  // behind the context
  DEVICE_METHOD int units(int b, int each) const {
    return own_leaf(b) / each - first_leaf(b) / each + 1;
  }
  // Leaves of a unit, 1 or SPAN: see attention_work.
  DEVICE_METHOD int leaves_of_unit() const {
    i64 all = 0;
    int most = 0;
    for (int b = 0; b < B; b++) all += units(b, 1), most = max(most, units(b, 1));
    return all * KV * parts <= blocks && most <= slots ? 1 : SPAN;
  }
};

// grid: any. Keys, values and q are 16-byte aligned. Lengths, tables and the first leaf of the context
// are read while the kernel in front still runs: it must be none that wrote them.
template <int NT>
DEVICE void block_spans_mma(const bf16* q, const bf16* kv, const bf16* pages, const int* tables,
                            float4* parts, float4* values, const Blocks& of, int max_pages,
                            float factor) {
  extern __shared__ __align__(128) unsigned char memory[];
  Leaves<NT, 2> s(memory);
  grid_dependency_launch();
  bool waited = false;
  const int each = of.leaves_of_unit(), group = of.group(), tiles = of.column_tiles();
  const int n = of.n, together = of.KV * of.parts, entry = 2 * of.KV * KEY_WIDTH;
  int b = 0, before = 0;  // units in front of block b
  for (int u = blockIdx.x;; u += gridDim.x) {
    while (b < of.B && u >= before + of.units(b, each) * together)
      before += of.units(b, each) * together, b++;
    if (b == of.B) break;
    const int slot = (u - before) / together, head = (u - before) % together / of.parts;
    const int tile = (u - before) % of.parts * NT, length = of.lengths[b], own = of.own_leaf(b);
    const int unit = of.first_leaf(b) / each + slot;
    const int begin = max(of.first_leaf(b), unit * each), end = min(own + 1, unit * each + each);
    const bf16* rows = kv + (i64)b * n * entry + head * KEY_WIDTH;
    auto load = [&](int leaf) {
      const int page = leaf == own ? 0 : tables[(i64)b * max_pages + leaf];
      const bf16* context = pages + (i64)page * LEAF * entry + head * KEY_WIDTH;
      const bf16* from = leaf == own ? rows : context;
      const int there = leaf == own ? n : length - leaf * LEAF;
      load_leaf(memory, of.KV * KEY_WIDTH, [&](int key) {
        return Row{from + (key < there ? (i64)key * entry : 0), key < there};
      });
    };
    if (waited || begin != own) load(begin);
    if (!waited) {
      grid_dependency_wait();
      if (begin == own) load(begin);
      waited = true;
    }
    s.load_queries([&](int column) {
      const int c = tile * 8 + column;
      const bool there = c < n * group;
      const i64 at = ((i64)b * n + c / group) * of.H + head * group + c % group;
      return Row{q + (there ? at * KEY_WIDTH : 0), there};
    });
    s.clear();
    for (int leaf = begin; leaf < end; leaf++) {
      cp_async_wait<0>();
      __syncthreads();  // the leaf has arrived
      s.add(memory, factor, [&](int key, int column) {
        if (leaf == own) return key < n;
        const int at = leaf * LEAF + key, position = length + (tile * 8 + column) / group;
        return at < length && (!of.window || position - at < of.window);
      });
      __syncthreads();  // the leaf has been read before the next is copied over it
      if (leaf + 1 < end) load(leaf + 1);
    }
    const int all_tiles = of.B * of.KV * tiles, first = (b * of.KV + head) * tiles + tile;
    s.put(parts, values, min(NT, tiles - tile),
          [&](int column) { return slot * all_tiles + first + column; });
  }
  if (!waited) grid_dependency_wait();  // blocks without a unit too
}

#define BLOCK_SPANS(NT, RESIDENT)                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) block_spans_mma_##NT(            \
      const bf16* q /* [B * n, H, d] */, const bf16* kv /* [B * n, 2, KV, d] */,                   \
      const bf16* pages /* [.., LEAF, 2, KV, d] */, const int* lengths /* [B] */,                  \
      const int* tables /* [B, max_pages] */, float4* parts /* [slots, all_tiles, 4] */,           \
      float4* values /* [slots, all_tiles, VALUE_TILES, 32] */, int B, int n, int H, int KV,       \
      int window, int column_parts, int blocks, int slots, int max_pages, float factor) {          \
    const Blocks of = {lengths, B, n, H, KV, window, column_parts, blocks, slots};                 \
    block_spans_mma<NT>(q, kv, pages, tables, parts, values, of, max_pages, factor);               \
  }
BLOCK_SPANS(1, 2)
BLOCK_SPANS(2, 2)
BLOCK_SPANS(4, 2)
BLOCK_SPANS(8, 1)

// As latent_fold_mma, behind block_spans_mma; all_tiles: ceil(n * group / 8) for every block and key head.
KERNEL block_fold_mma(const float4* parts, const float4* values, const int* lengths,
                      bf16* out,  // [B * n, H, d]
                      int B, int n, int H, int KV, int window, int column_parts, int blocks,
                      int slots, int split) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Blocks of = {lengths, B, n, H, KV, window, column_parts, blocks, slots};
  const int tile = (blockIdx.x * WARPS + threadIdx.x / 32) / split, tiles = of.column_tiles();
  const int b = blockIdx.y / tiles / KV, head = blockIdx.y / tiles % KV, group = of.group();
  const i64 all_tiles = (i64)B * KV * tiles;
  const i64 at = (i64)blockIdx.y * VALUE_TILES + min(tile, VALUE_TILES - 1);
  grid_dependency_launch();
  const int each = of.leaves_of_unit(), first = of.first_leaf(b), units = of.units(b, each);
  const int span_units = each == 1 ? SPAN : 1;
  const int spans = of.own_leaf(b) / SPAN - first / SPAN + 1;
  grid_dependency_wait();
  const Part all = fold_parts(
      parts + (i64)blockIdx.y * 4, all_tiles * 4, values + at * 32, all_tiles * VALUE_TILES * 32,
      spans, split, memory, [&](int span) {
        return max(0, min(units, (first / SPAN + span) * span_units - first / each));
      });
  if (tile >= VALUE_TILES || threadIdx.x / 32 % split) return;
  put_row(all, tile, false, [&](int column) -> bf16* {
    const int c = blockIdx.y % tiles * 8 + column;
    if (c >= n * group) return nullptr;
    return out + (((i64)b * n + c / group) * H + head * group + c % group) * VALUE_WIDTH;
  });
}
#endif
