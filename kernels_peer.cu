// Device code of sums across ranks: every rank writes its partials into the memory of the others and
// adds what it was given along the pairwise tree of R2, so the bits are those of any other way.
//
// Memory (ops.Mailbox). Each rank has two areas that all others write into, at the same offsets, with
// two halves that turns use alternately. A turn is one sum; its number is in `state`, in the rank's own
// memory, and all ranks count alike. Nothing is ever reset: what lies there belongs to this turn if the
// turn's number stands beside it. Two halves are enough: a rank ends turn t only with the parts that
// each other rank sends in turn t, and that rank began turn t after it had ended turn t - 1, so nobody
// still reads the half of turn t - 1 when turn t + 1 writes it.
//
// Blocks wait for blocks of other ranks, so a grid is no larger than what surely runs at once: one
// block on each processor. A wait that is longer than `patience` (nanoseconds) writes the ranks that
// have not come into `late` (bit r: rank r), where the host can read it, and ends the kernel with a
// fault: no sum is ever made of what is not there.

// ==== peer_sum ====

static_assert(RANKS == 2 || RANKS == 4 || RANKS == 8, "a pairwise tree over ranks");

// Accesses at system scope. A line is two halves of 8 bytes, each of which is stored at once: a float
// and, above it, the number of the turn.
#ifndef KDTREE_EMULATOR
DEVICE void store_line(u64* to, u64 low, u64 high) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" :: "l"(to), "l"(low), "l"(high) : "memory");
}
DEVICE void load_line(const u64* from, u64& low, u64& high) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
}
DEVICE void store_release(u32* to, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(to), "r"(value) : "memory");
}
DEVICE u32 load_acquire(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
DEVICE void spin() {}
#endif

// One thread's wait for other ranks.
struct Wait {
  u64* late;
  u64 patience, began;
  u32 looks;

  DEVICE_METHOD Wait(u64* late, u64 patience) : late(late), patience(patience), began(0), looks(0) {}

  // After a look that did not find all: `missing` has a bit for each rank that has not come.
  DEVICE_METHOD void go_on(u32 missing) {
    spin();
    if (++looks % 1024) return;  // the clock is slow to read
    const u64 now = nanoseconds();
    if (!began) began = now;
    if (now - began <= patience) return;
    *(volatile u64*)late = missing;
    __threadfence_system();  // the host has it before it hears of the fault
    __trap();
  }
};

// state: u32 [2], the number of the turn and the blocks that have come. To be read by every thread
// after the kernel in front has ended, and left by every block before it waits.
DEVICE u32 turn_of(const u32* state) { return *(const volatile u32*)state; }

// Numbers stay odd and even in turns when they wrap, and 0 is never one: fresh memory holds it.
DEVICE void leave_turn(u32* state, u32 turn) {
  __syncthreads();  // every thread has read the number before it changes
  if (threadIdx.x) return;
  if (atomicAdd(state + 1, 1) + 1 < gridDim.x) return;
  state[1] = 0;
  state[0] = turn == 0xffffffffu ? 2 : turn + 1;
}

// ((0+1)+(2+3))+((4+5)+(6+7))
DEVICE float add_ranks(float (&part)[RANKS]) {
#pragma unroll
  for (int n = RANKS / 2; n > 0; n /= 2)
#pragma unroll
    for (int i = 0; i < n; i++) part[i] = __fadd_rn(part[2 * i], part[2 * i + 1]);
  return part[0];
}

// Batches keep this many of a thread's loads in flight; more ranks are more loads of each.
constexpr int BATCH = 8 / RANKS;

// Sum in one shot: all ranks send everything to all and add everything. Data and number arrive
// together, so nothing is fenced: for few bytes.
// Grid (any, if all blocks run at once), THREADS; may be launched as a dependent kernel.
KERNEL push_sum(const float* x,        // [n], 16-byte aligned: this rank's partial
                float* out,            // [n], 16-byte aligned; not x
                const u64* mailboxes,  // [RANKS] addresses of u64 [2, RANKS, lines, 2]: half, sender
                u32* state,            // [2]
                u64* late,             // [1], host memory
                u64 patience, int n, int lines, int rank) {
  u64 to[RANKS];
#pragma unroll
  for (int r = 0; r < RANKS; r++) to[r] = mailboxes[r];  // never changes: read before the wait
  grid_dependency_wait();  // for x, and for the turn before this one
  const u32 turn = turn_of(state);
  const u64 number = (u64)turn << 32, half = (u64)(turn & 1) * RANKS * lines;
  const int first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS, all = (n + 1) / 2;
  auto load = [&](int begin, u64 (&low)[BATCH], u64 (&high)[BATCH]) {
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      const int i = begin + k * step;
      float2 pair = make_float2(0.0f, 0.0f);
      if (2 * i + 1 < n) pair = ((const float2*)x)[i];
      if (2 * i + 1 == n) pair.x = x[2 * i];
      low[k] = number | __float_as_uint(pair.x), high[k] = number | __float_as_uint(pair.y);
    }
  };
  for (int begin = first; begin < all; begin += BATCH * step) {
    u64 low[BATCH], high[BATCH];
    load(begin, low, high);
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      const int i = begin + k * step;
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        if (i < all && r != rank)
          store_line((u64*)to[r] + 2 * (half + (u64)rank * lines + i), low[k], high[k]);
    }
  }
  leave_turn(state, turn);
  grid_dependency_launch();  // all blocks run by now: what follows takes no place from them
  const u64* box = (const u64*)mailboxes[rank] + 2 * half;
  for (int begin = first; begin < all; begin += BATCH * step) {
    u64 own_low[BATCH], own_high[BATCH], low[BATCH][RANKS], high[BATCH][RANKS];
    load(begin, own_low, own_high);
    Wait wait(late, patience);
    for (;;) {
#pragma unroll
      for (int k = 0; k < BATCH; k++)
#pragma unroll
        for (int r = 0; r < RANKS; r++) {
          const int i = begin + k * step;
          low[k][r] = own_low[k], high[k][r] = own_high[k];
          if (i < all && r != rank) load_line(box + 2 * ((u64)r * lines + i), low[k][r], high[k][r]);
        }
      u32 missing = 0;
#pragma unroll
      for (int k = 0; k < BATCH; k++)
#pragma unroll
        for (int r = 0; r < RANKS; r++)
          if ((u32)(low[k][r] >> 32) != turn || (u32)(high[k][r] >> 32) != turn) missing |= 1u << r;
      if (!missing) break;
      wait.go_on(missing);
    }
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      const int i = begin + k * step;
      float a[RANKS], b[RANKS];
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        a[r] = __uint_as_float((u32)low[k][r]), b[r] = __uint_as_float((u32)high[k][r]);
      const float2 sum = make_float2(add_ranks(a), add_ranks(b));
      if (2 * i + 1 < n) ((float2*)out)[i] = sum;
      if (2 * i + 1 == n) out[2 * i] = sum.x;
    }
  }
}

// A block's flags: it has written for this turn, to each other rank or from each. flags: u32
// [RANKS, gridDim.x] by sender, in the receiver's memory.
DEVICE void raise_flags(const u64* mailboxes, u64 offset, int rank, u32 turn) {
  __syncthreads();  // the block's writes come before the flag, which releases them
  const int r = threadIdx.x;
  if (r < RANKS && r != rank)
    store_release((u32*)(mailboxes[r] + offset) + rank * gridDim.x + blockIdx.x, turn);
}
DEVICE void wait_for_flags(const u64* mailboxes, u64 offset, int rank, u32 turn, Wait wait) {
  const int r = threadIdx.x;
  if (r < RANKS && r != rank) {
    const u32* flag = (const u32*)(mailboxes[rank] + offset) + r * gridDim.x + blockIdx.x;
    while (load_acquire(flag) != turn) wait.go_on(1u << r);
  }
  __syncthreads();  // nobody reads before all flags were seen
}

// Of a block's quads of a slice: four apart by THREADS are loaded before any is stored.
DEVICE void copy_quads(const float4* from, float4* to, int begin, int end) {
  for (; begin < end; begin += 4 * THREADS) {
    float4 v[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (begin + k * THREADS < end) v[k] = __ldcg(from + begin + k * THREADS);
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (begin + k * THREADS < end) to[begin + k * THREADS] = v[k];
  }
}

// Sum in two shots: rank r adds slice r of n / RANKS values and sends the sum to all, so each value
// crosses a link twice and not RANKS - 1 times: for many bytes.
// Grid (any, equal on all ranks, if all blocks run at once), THREADS; may be launched as a dependent
// kernel.
KERNEL push_sum_slices(
    const float* x,        // [RANKS, slice], 16-byte aligned: this rank's partial; slice % 4 == 0
    float* out,            // [RANKS, slice], 16-byte aligned; not x
    const u64* mailboxes,  // [RANKS] addresses of u32 [2, 2, RANKS, gridDim.x]: half, shot, sender;
                           // and `flags` bytes on of float [2, 2, RANKS, room]: half, shot, sender
    u32* state,            // [2]
    u64* late,             // [1], host memory
    u64 patience, int slice, int room, int flags, int rank) {
  grid_dependency_wait();  // for x, and for the turn before this one
  const u32 turn = turn_of(state);
  const int half = turn & 1, quads = slice / 4, per = (quads + gridDim.x - 1) / gridDim.x;
  const int begin = blockIdx.x * per + threadIdx.x, end = min((int)(blockIdx.x + 1) * per, quads);
  auto flags_of = [&](int shot) { return (u64)(2 * half + shot) * RANKS * gridDim.x * 4; };
  auto values = [&](int r, int shot, int sender) {  // of rank r's memory
    return (float4*)(mailboxes[r] + flags) + (u64)((2 * half + shot) * RANKS + sender) * (room / 4);
  };
  const float4* given = (const float4*)x;
  float4* sums = (float4*)out;
  const Wait wait(late, patience);
  float4* to[RANKS];  // where others take this rank's sums
  const float4* from[RANKS];
#pragma unroll
  for (int r = 0; r < RANKS; r++) {
    to[r] = values(r, 1, rank);
    from[r] = r == rank ? given + rank * quads : values(rank, 0, r);
  }

  for (int r = 0; r < RANKS; r++)
    if (r != rank) copy_quads(given + r * quads, values(r, 0, rank), begin, end);
  raise_flags(mailboxes, flags_of(0), rank, turn);
  leave_turn(state, turn);
  grid_dependency_launch();  // all blocks run by now: what follows takes no place from them
  wait_for_flags(mailboxes, flags_of(0), rank, turn, wait);

  for (int first = begin; first < end; first += BATCH * THREADS) {
    float4 v[BATCH][RANKS];
#pragma unroll
    for (int k = 0; k < BATCH; k++)
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        if (first + k * THREADS < end) v[k][r] = __ldcg(from[r] + first + k * THREADS);
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      const int q = first + k * THREADS;
      if (q >= end) break;
      float part[4][RANKS];
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        part[0][r] = v[k][r].x, part[1][r] = v[k][r].y, part[2][r] = v[k][r].z, part[3][r] = v[k][r].w;
      const float4 sum = make_float4(add_ranks(part[0]), add_ranks(part[1]), add_ranks(part[2]),
                                     add_ranks(part[3]));
      sums[rank * quads + q] = sum;
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        if (r != rank) to[r][q] = sum;
    }
  }
  raise_flags(mailboxes, flags_of(1), rank, turn);
  wait_for_flags(mailboxes, flags_of(1), rank, turn, wait);

  for (int r = 0; r < RANKS; r++)
    if (r != rank) copy_quads(values(rank, 1, r), sums + r * quads, begin, end);
}
