// Device code of decoding: the choice of tokens, draft trees, cache entries. See kernels.cu for the
// conventions; its prelude stands before every section here too.

// ==== tokens ====

// Arithmetic of sampling.py, to the bit: float64 by + - * / only, masses as integers in units of
// 2^-44, so that no order of a sum can change what is kept (R6).
constexpr int MASS_BITS = 44;
constexpr int NO_TOKEN = -1;

DEVICE double as_double(u64 bits) { return __longlong_as_double((i64)bits); }

// exp of -700 .. 0: x = k ln 2 + r, the series to r^12.
DEVICE double portable_exp(double x) {
  const double k = rint(x * (1.0 / 0.693147180559945309417));
  const double r = (x - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
  double series = 1.0 / 479001600.0;
  series = series * r + 1.0 / 39916800.0;
  series = series * r + 1.0 / 3628800.0;
  series = series * r + 1.0 / 362880.0;
  series = series * r + 1.0 / 40320.0;
  series = series * r + 1.0 / 5040.0;
  series = series * r + 1.0 / 720.0;
  series = series * r + 1.0 / 120.0;
  series = series * r + 1.0 / 24.0;
  series = series * r + 1.0 / 6.0;
  series = series * r + 1.0 / 2.0;
  series = series * r + 1.0;
  series = series * r + 1.0;
  return series * as_double((u64)(1023 + (int)k) << 52);
}

// log of a positive normal number: x = m 2^e, log m = 2 atanh((m - 1) / (m + 1)), to s^21.
DEVICE double portable_log(double x) {
  const u64 bits = (u64)__double_as_longlong(x);
  int e = (int)(bits >> 52) - 1022;
  double m = as_double((bits & 0x000fffffffffffffull) | (1022ull << 52));
  if (m < 0.70710678118654752440) m += m, e--;
  const double s = (m - 1.0) / (m + 1.0), squared = s * s;
  double series = 1.0 / 21.0;
  for (int n = 19; n > 0; n -= 2) series = series * squared + 1.0 / n;
  return e * 0.693147180559945309417 + (s + s) * series;
}

DEVICE u64 mass(float logit, float peak) {
  const double below = fmax((double)logit - (double)peak, -64.0);
  return (u64)floor(portable_exp(below) * 0x1p44 + 0.5);
}

// First word of Philox4x32-10, key = seed, counter = (id, position, 0, 0).
DEVICE u32 philox(u64 seed, u32 id, u32 position) {
  u32 c0 = id, c1 = position, c2 = 0, c3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
  for (int n = 0; n < 10; n++) {
    const u64 a = 0xd2511f53ull * c0, b = 0xcd9e8d57ull * c2;
    c0 = (u32)(b >> 32) ^ c1 ^ k0, c1 = (u32)b;
    c2 = (u32)(a >> 32) ^ c3 ^ k1, c3 = (u32)a;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  return c0;
}

DEVICE float gumbel(u64 seed, u32 id, u32 position) {
  const double v = ((double)philox(seed, id, position) + 0.5) * 0x1p-32;
  return (float)-portable_log(-portable_log(1.0 - v));
}

// Keys: larger means (value descending, id ascending) earlier. All keys of a row differ. 0: nothing.
DEVICE u64 key_of(float value, int id) {
  const u32 bits = __float_as_uint(__fadd_rn(value, 0.0f));  // -0 counts as 0
  return (u64)(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << 32 | ~(u32)id;
}
DEVICE int id_of(u64 key) { return (int)~(u32)key; }
DEVICE float value_of(u64 key) {
  const u32 bits = key >> 32;
  return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

DEVICE bool finite(float value) { return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u; }

DEVICE u64 warp_max(u64 value) {
  const u32 high = __reduce_max_sync(ALL, (u32)(value >> 32));
  return (u64)high << 32 | __reduce_max_sync(ALL, value >> 32 == high ? (u32)value : 0);
}

// Integer reductions over the block; shared: WARPS words, free on return.
DEVICE u64 block_max(u64 value, u64* shared) {
  value = warp_max(value);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();  // every warp's maximum is there before any is read
  for (int w = 0; w < WARPS; w++) value = max(value, shared[w]);
  __syncthreads();  // all have read before the caller writes `shared` again
  return value;
}
DEVICE u64 block_total(u64 value, u64* shared) {
  for (int distance = 16; distance > 0; distance >>= 1) value += __shfl_xor_sync(ALL, value, distance);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();  // every warp's sum is there before any is read
  u64 total = 0;
  for (int w = 0; w < WARPS; w++) total += shared[w];
  __syncthreads();  // all have read before the caller writes `shared` again
  return total;
}

// What key_at counts in.
struct Descent {
  u64 bins[256], keys[256], warps[WARPS], left, found;
  u32 counts[256];       // keys of a bin
  u32 set[2], clear[2];  // bits that some key has, that some key has not; low words first
  u32 many, n;
  int digit;
};
static_assert(THREADS == 256, "a thread a bin");

// The key at which the weights of the keys from the top down reach `want` (at least 1, at most their
// total); keys of 0 are none. A descent by 8 bits from the first bit in which keys differ, until so few
// are left that each is compared with all. With weights of 1 it is the want-th largest key.
template <class KeyOf, class WeightOf>
DEVICE u64 key_at(int n, u64 want, const KeyOf& key, const WeightOf& weight, Descent& d) {
  const int mine = 255 - threadIdx.x, lane = threadIdx.x & 31;
  u64 set = 0, clear = 0;
  u32 left = 0;  // keys that may be it
  for (int i = threadIdx.x; i < n; i += THREADS)
    if (const u64 k = key(i)) set |= k, clear |= ~k, left++;
  if (threadIdx.x < 2) d.set[threadIdx.x] = d.clear[threadIdx.x] = 0;
  if (threadIdx.x == 2) d.many = 0;
  __syncthreads();  // the words are zero before anything is added
  for (int word = 0; word < 2; word++) {
    const u32 ones = __reduce_or_sync(ALL, (u32)(set >> (32 * word)));
    const u32 zeros = __reduce_or_sync(ALL, (u32)(clear >> (32 * word)));
    if (lane == 0) atomicOr(&d.set[word], ones), atomicOr(&d.clear[word], zeros);
  }
  left = __reduce_add_sync(ALL, left);
  if (lane == 0) atomicAdd(&d.many, left);
  __syncthreads();  // all is there before it is read
  set = (u64)d.set[1] << 32 | d.set[0], left = d.many;
  const u64 differ = set & ((u64)d.clear[1] << 32 | d.clear[0]);
  int high = 64 - __clzll(differ);  // bits that are not decided yet
  u64 prefix = high < 64 ? set >> high << high : 0;
  auto may_be = [&](u64 k) { return k && (high == 64 || k >> high == prefix >> high); };
  while (left > THREADS && high > 0) {
    const int low = max(high - 8, 0);
    d.bins[mine] = 0, d.counts[mine] = 0;
    __syncthreads();  // bins are empty before anything is counted
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const u64 k = key(i);
      if (!may_be(k)) continue;
      const int digit = (k >> low) & ((1 << (high - low)) - 1);
      atomicAdd(&d.counts[digit], 1u);  // integers: no order
      if (sizeof(weight(i)) > 4) atomicAdd(&d.bins[digit], (u64)weight(i));
    }
    __syncthreads();  // all is counted before it is read
    const u64 here = sizeof(weight(0)) > 4 ? d.bins[mine] : d.counts[mine];
    const u64 above = block_before(here, d.warps);
    if (above < want && want <= above + here) d.digit = mine, d.left = want - above, d.many = d.counts[mine];
    __syncthreads();  // the digit is there before it is read
    want = d.left, left = d.many;
    prefix |= (u64)d.digit << low;
    high = low;
  }
  if (high == 0) return prefix;
  if (threadIdx.x == 0) d.n = 0;
  __syncthreads();  // the counter is zero before it is raised, and the bins have been read
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const u64 k = key(i);
    if (!may_be(k)) continue;
    const u32 to = atomicAdd(&d.n, 1u);
    d.keys[to] = k, d.bins[to] = weight(i);
  }
  __syncthreads();  // all are there before they are compared
  if (threadIdx.x < left) {
    const u64 own = d.keys[threadIdx.x];
    u64 above = 0;
    for (int i = 0; i < left; i++)
      above += d.keys[i] > own || (d.keys[i] == own && i < threadIdx.x) ? d.bins[i] : 0;
    if (above < want && want <= above + d.bins[threadIdx.x]) d.found = own;
  }
  __syncthreads();  // it is there before it is read
  return d.found;
}

// How a row's token is asked for. The host packs it (ops.REQUEST). Rows name theirs by number: in
// `owners`, where -1 is a filler row.
struct Request {
  u64 seed;
  u64 top_p;     // times 2^64; 0: off
  u64 min_mass;  // min_p in units of 2^-44; 0: off
  float temperature;  // 0: greedy
  int top_k;          // 0: off
};
DEVICE bool has_top_k(const Request& request, int V) { return request.top_k > 0 && request.top_k < V; }
DEVICE bool is_filtered(const Request& request, int V) {
  return request.temperature != 0.0f && (request.top_p || request.min_mass || has_top_k(request, V));
}

// A row falls in parts of PART columns, a block each, of which a thread holds EACH: column_of. What
// parts say of a row is joined by a later launch: keys and integers, so by any order.
constexpr int EACH = PART / THREADS;
static_assert(EACH % 4 == 0 && EACH <= 32, "groups of four, a bit a column");
DEVICE int column_of(int j) {  // of this thread's j-th: four neighbours, then THREADS * 4 further on
  return blockIdx.x * PART + j / 4 * (THREADS * 4) + threadIdx.x * 4 + j % 4;
}

DEVICE int place_of(int v) {  // which of this thread's columns v is, or -1
  const int at = v - blockIdx.x * PART;
  if (at < 0 || at >= PART || at % (THREADS * 4) / 4 != threadIdx.x) return -1;
  return at / (THREADS * 4) * 4 + at % 4;
}

// This thread's columns of a row; past its end -inf.
struct __align__(16) Four { u32 of[4]; };
DEVICE void from_bits(u32 bits, float* to) { *to = __uint_as_float(bits); }
DEVICE void from_bits(u32 bits, int* to) { *to = (int)bits; }
template <class T>
DEVICE Four load_four(const T* row, int v, int V) {
  Four four;
  if (V % 4 == 0 && (u64)row % 16 == 0 && v < V) return *(const Four*)(row + v);
#pragma unroll
  for (int c = 0; c < 4; c++) four.of[c] = v + c < V ? ((const u32*)row)[v + c] : 0xff800000u;
  return four;
}
template <class T>
DEVICE void load_part(const T* row, int V, T (&to)[EACH]) {
#pragma unroll
  for (int j = 0; j < EACH; j += 4) {
    const Four four = load_four(row, column_of(j), V);
#pragma unroll
    for (int c = 0; c < 4; c++) from_bits(four.of[c], &to[j + c]);
  }
}
DEVICE void store_part(const float (&values)[EACH], int V, float* row) {
  const bool whole = V % 4 == 0 && (u64)row % 16 == 0;
#pragma unroll
  for (int j = 0; j < EACH; j += 4) {
    const int v = column_of(j);
    if (whole && v < V) *(float4*)(row + v) = float4{values[j], values[j + 1], values[j + 2], values[j + 3]};
    else
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (v + c < V) row[v + c] = values[j + c];
  }
}

// Penalties on a copy of the logits (sampling.penalised), one block a row. Lists are by row:
// entries offsets[t] .. offsets[t + 1] - 1, an id once in each list.
KERNEL penalise(float* logits,            // [T, V]
                const float* penalties,   // [T, 3]: repetition, frequency, presence
                const int* seen_offsets,  // [T + 1]
                const int* seen_ids,      // in prompt or output
                const int* seen_counts,   // times in the output
                const int* bias_offsets,  // [T + 1]
                const int* bias_ids,
                const float* biases,
                const int* stop_offsets,  // [T + 1]: ids that may not be chosen yet
                const int* stop_ids, int V) {
  const int t = blockIdx.x;
  logits += (i64)t * V;
  const float repetition = penalties[3 * t], frequency = penalties[3 * t + 1];
  const float presence = penalties[3 * t + 2];
  for (int i = seen_offsets[t] + threadIdx.x; i < seen_offsets[t + 1]; i += THREADS) {
    float value = logits[seen_ids[i]];
    if (repetition != 1.0f)
      value = value > 0.0f ? __fdiv_rn(value, repetition) : __fmul_rn(value, repetition);
    if (seen_counts[i] > 0 && (frequency != 0.0f || presence != 0.0f)) {
      value = __fsub_rn(value, __fmul_rn(frequency, (float)seen_counts[i]));
      value = __fsub_rn(value, presence);
    }
    logits[seen_ids[i]] = value;
  }
  __syncthreads();  // an id may stand in the next list too
  for (int i = bias_offsets[t] + threadIdx.x; i < bias_offsets[t + 1]; i += THREADS)
    logits[bias_ids[i]] = __fadd_rn(logits[bias_ids[i]], biases[i]);
  __syncthreads();  // likewise
  for (int i = stop_offsets[t] + threadIdx.x; i < stop_offsets[t + 1]; i += THREADS)
    logits[stop_ids[i]] = minus_infinity();
}

// The same for the rows of trees, from what is kept of every sequence; a copy, and a plain one for
// rows without a sequence. A node's path is the sequence's text, its root included, and the nodes
// below the root down to itself. grid (parts, T), shared depth ints.
KERNEL penalise_paths(const float* logits,     // [T, V]
                      const int* token_ids,    // [T]
                      const int* sequence,     // [T] slot, or -1
                      const int* parent,       // [T] row, or -1 at a root
                      const int* counts,       // [slots, V]: -1 never seen, else times in the output
                      const float* biases,     // [slots, V]
                      const int* stops,        // [slots, n_stops], -1: unused
                      const float* penalties,  // [slots, 3]: repetition, frequency, presence
                      const int* emitted,      // [slots] tokens in the output
                      const int* min_tokens,   // [slots] stops may not be chosen before
                      float* out,              // [T, V]
                      int V, int depth, int n_stops) {
  extern __shared__ __align__(16) int path[];  // tokens below the root
  __shared__ int n_path;
  const int t = blockIdx.y, slot = sequence[t];
  float values[EACH], bias[EACH];
  int known[EACH], here[EACH] = {};
  load_part(logits + (i64)t * V, V, values);
  if (slot >= 0) load_part(biases + (i64)slot * V, V, bias), load_part(counts + (i64)slot * V, V, known);
  if (threadIdx.x == 0) {
    int n = 0;
    if (slot >= 0)
      for (int node = t; parent[node] >= 0 && n < depth; node = parent[node])
        path[n++] = token_ids[node];
    n_path = n;
  }
  __syncthreads();  // the path is there before it is looked through
  if (slot >= 0) {
    for (int i = 0; i < n_path; i++) {
      const int column = place_of(path[i]);
#pragma unroll
      for (int j = 0; j < EACH; j++) here[j] += j == column;
    }
    const float repetition = penalties[3 * slot], frequency = penalties[3 * slot + 1];
    const float presence = penalties[3 * slot + 2];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int count = max(known[j], 0) + here[j];
      float value = values[j];
      if (repetition != 1.0f && (known[j] >= 0 || here[j] > 0))
        value = value > 0.0f ? __fdiv_rn(value, repetition) : __fmul_rn(value, repetition);
      if (count > 0 && (frequency != 0.0f || presence != 0.0f)) {
        value = __fsub_rn(value, __fmul_rn(frequency, (float)count));
        value = __fsub_rn(value, presence);
      }
      values[j] = __fadd_rn(value, bias[j]);
    }
    if (emitted[slot] + n_path < min_tokens[slot])
      for (int i = 0; i < n_stops; i++) {
        const int column = place_of(stops[slot * n_stops + i]);
#pragma unroll
        for (int j = 0; j < EACH; j++) values[j] = j == column ? minus_infinity() : values[j];
      }
  }
  store_part(values, V, out + (i64)t * V);
}

// Emitted tokens enter the counts. A thread a sequence, grid ceil(B / THREADS).
KERNEL count_tokens(const int* tokens,  // [B, M], -1: none
                    const int* slots,   // [B], each once; -1 is skipped
                    int* counts,        // [slots, V]
                    int* emitted,       // [slots]
                    int B, int M, int V) {
  const int b = blockIdx.x * THREADS + threadIdx.x;
  if (b >= B || slots[b] < 0) return;
  for (int i = 0; i < M; i++) {
    const int token = tokens[b * M + i];
    if (token < 0) continue;
    int* count = counts + (i64)slots[b] * V + token;
    *count = max(*count, 0) + 1;
    emitted[slots[b]]++;
  }
}

// The noise to within 1e-4, for a guess that spares most of the exact ones.
DEVICE float gumbel_about(u64 seed, u32 id, u32 position) {
  const u32 x = philox(seed, id, position);
  const float v = __fmul_rn(__fadd_rn((float)x, 0.5f), 0x1p-32f);
  const float rest = __fmul_rn(__fadd_rn((float)~x, 0.5f), 0x1p-32f);  // 1 - v
  const float series = __fmul_rn(v, __fmaf_rn(v, __fmaf_rn(v, 1.0f / 3, 0.5f), 1.0f));
  return -__logf(v < 0x1p-6f ? series : -__logf(rest));
}

// The largest logit of every part. What a filtered row is counted in is emptied. grid (parts, T).
KERNEL best_of_parts(const float* logits,    // [T, V] as the model gave them
                     const float* adjusted,  // [T, V] after penalties; may be logits
                     const Request* requests,  // or ignored if !sampled
                     const int* owners,        // [T] request of each row
                     u64* bests,   // [T, parts] keys
                     int* states,  // [T, parts] 1: something finite, 2: NaN or +inf
                     u64* masses,  // [T, BINS]
                     int* counts,  // [T, BINS]
                     int* listed,  // [T]
                     int V, int sampled) {
  __shared__ u64 keys[WARPS];
  __shared__ int found[WARPS];
  grid_dependency_wait();
  grid_dependency_launch();
  const int t = blockIdx.y, part = blockIdx.x, parts = gridDim.x;
  float values[EACH];
  load_part(logits + (i64)t * V, V, values);
  bool some = false, broken = false;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    some |= values[j] > minus_infinity();  // or broken
    broken |= !(values[j] < -minus_infinity());
  }
  if (adjusted != logits) load_part(adjusted + (i64)t * V, V, values);
  float most = values[0];
  int at = 0;
#pragma unroll
  for (int j = 1; j < EACH; j++)
    if (values[j] > most) most = values[j], at = j;  // the first of equals
  const u64 key = warp_max(column_of(0) < V ? key_of(most, column_of(at)) : 0);
  const int state = (__any_sync(ALL, some) ? 1 : 0) | (__any_sync(ALL, broken) ? 2 : 0);
  if ((threadIdx.x & 31) == 0) keys[threadIdx.x / 32] = key, found[threadIdx.x / 32] = state;
  __syncthreads();  // every warp's best is there before one thread joins them
  if (threadIdx.x == 0) {
    u64 best = 0;
    int all = 0;
    for (int w = 0; w < WARPS; w++) best = max(best, keys[w]), all |= found[w];
    bests[t * parts + part] = best, states[t * parts + part] = all;
  }
  if (!sampled || owners[t] < 0 || !is_filtered(requests[owners[t]], V)) return;
  for (int i = part * THREADS + threadIdx.x; i < BINS; i += parts * THREADS)
    masses[(i64)t * BINS + i] = 0, counts[t * BINS + i] = 0;
  if (part == 0 && threadIdx.x == 0) listed[t] = 0;
}

// The largest logit of each row, and its token: NO_TOKEN where logits hold NaN or +inf, or nothing
// finite before or after penalties. A warp a row, grid ceil(T / WARPS).
KERNEL best_tokens(const u64* bests,   // [T, parts]
                   const int* states,  // [T, parts]
                   int* tokens,        // [T]
                   float* peaks,       // [T]
                   int T, int parts) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int t = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (t >= T) return;
  u64 best = 0;
  u32 state = 0;
  for (int p = lane; p < parts; p += 32)
    best = max(best, bests[t * parts + p]), state |= states[t * parts + p];
  best = warp_max(best);
  state = __reduce_or_sync(ALL, state);
  if (lane) return;
  const float peak = value_of(best);
  tokens[t] = state == 1 && finite(peak) ? id_of(best) : NO_TOKEN;
  peaks[t] = peak;
}

// Filters. A row's values / temperature fall in BINS bins by their distance below the largest, 1/32
// wide: a bin is a range of keys. Mass is 0 in the last one. What a filter decides is decided by whole
// bins, but for the bins in which the last token may lie that it keeps: those are listed and sorted out.
constexpr float BINS_A_UNIT = 32.0f;
static_assert(BINS >= 1000 && BINS % THREADS == 0, "exp(-BINS / 32) 2^44 rounds to 0");

DEVICE int list_size(int V) { return min(LISTED, V); }

DEVICE int bin_of(float scaled, float peak) {
  return (int)fminf(__fmul_rn(__fsub_rn(peak, scaled), BINS_A_UNIT), (float)(BINS - 1));
}

// Fills the bins of rows that top-k or top-p filters: masses for top-p, counts for top-k. Sums of
// integers, so no order. grid (parts, T).
KERNEL fill_bins(const float* adjusted,  // [T, V]
                 const Request* requests,
                 const int* owners,   // [T]
                 const int* tokens,   // [T] of best_tokens
                 const float* peaks,  // [T]
                 u64* masses,         // [T, BINS], 0
                 int* counts,         // [T, BINS], 0
                 int V) {
  // A mass has 45 bits: three words of 15, which PART of them do not overflow. 64 bits would be added
  // in shared memory by trying again and again.
  __shared__ u32 sums[3][BINS];
  __shared__ u32 count[BINS];
  static_assert(PART <= 1 << 17 && MASS_BITS < 45, "words do not overflow");
  grid_dependency_wait();
  grid_dependency_launch();
  const int t = blockIdx.y;
  if (owners[t] < 0 || tokens[t] == NO_TOKEN) return;
  const Request request = requests[owners[t]];
  const bool by_count = has_top_k(request, V), by_mass = request.top_p != 0;
  if (!is_filtered(request, V) || (!by_count && !by_mass)) return;
  float values[EACH];
  load_part(adjusted + (i64)t * V, V, values);
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    sums[0][i] = sums[1][i] = sums[2][i] = count[i] = 0;
  __syncthreads();  // bins are empty before anything is counted
  const float peak = __fdiv_rn(peaks[t], request.temperature);
#pragma unroll 1  // see score_kept
  for (int j = 0; j < EACH; j += 4) {
    int bin[4];
    u64 m[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float scaled = __fdiv_rn(values[j + c], request.temperature);
      bin[c] = bin_of(scaled, peak), m[c] = by_mass ? mass(scaled, peak) : 0;
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
      if (column_of(j + c) >= V) continue;
      if (by_count) atomicAdd(&count[bin[c]], 1u);
#pragma unroll
      for (int word = 0; word < 3; word++) {
        const u32 bits = (u32)(m[c] >> (15 * word)) & 0x7fff;
        if (bits) atomicAdd(&sums[word][bin[c]], bits);
      }
    }
  }
  __syncthreads();  // all is counted before it is read
  for (int i = threadIdx.x; i < BINS; i += THREADS) {
    const u64 m = sums[0][i] + ((u64)sums[1][i] << 15) + ((u64)sums[2][i] << 30);
    if (m) atomicAdd(masses + (i64)t * BINS + i, m);
    if (count[i]) atomicAdd(counts + t * BINS + i, (int)count[i]);
  }
}

// Where a row's filters cut. Tokens in bins before `low` are kept; those in low .. high and in
// rank_bin are to be looked at; the others are dropped.
struct Cut {
  int low, high;  // the bins in which the last token that top-p keeps may lie; without top-p rank_bin
  int rank_bin;   // the bin of the top_k-th token; BINS without top-k
  int rank;       // its place there, from 1
  u64 above;      // mass in the bins before low
  u64 before;     // mass in the bins before rank_bin
  DEVICE_METHOD bool looks_at(int bin) const { return (bin >= low && bin <= high) || bin == rank_bin; }
};

// The mass at which top-p is content. Within 2^-22 of all mass counts as arrived; a target of 0 or
// below it keeps the best token. most: at least total, to bound from below; else total.
DEVICE u64 wanted(u64 total, u64 most, u64 top_p) {
  const u64 target = __umul64hi(total, top_p) - (most >> 22);
  return (i64)target > 0 ? target : 1;
}

// By the whole block.
DEVICE void find_cut(const u64* masses, const int* counts, const Request& request, int V, Cut& cut,
                     u64* shared) {
  constexpr int MINE = BINS / THREADS;
  const int first = threadIdx.x * MINE;
  const bool by_count = has_top_k(request, V), by_mass = request.top_p != 0;
  u64 mass_here[MINE], sum = 0;
  for (int i = 0; i < MINE; i++) sum += mass_here[i] = by_mass ? masses[first + i] : 0;
  const u64 in_front = block_before(sum, shared), total = block_total(sum, shared);
  __shared__ u64 upto;
  if (threadIdx.x == 0) {
    cut.low = cut.high = cut.rank_bin = BINS, cut.rank = 0;
    cut.above = cut.before = upto = total;
  }
  __syncthreads();  // the default is there before one thread knows better
  if (by_count) {
    int here[MINE];
    u64 n = 0;
    for (int i = 0; i < MINE; i++) n += here[i] = counts[first + i];
    n = block_before(n, shared);
    u64 before = in_front;
    for (int i = 0; i < MINE; i++) {
      if (n < request.top_k && request.top_k <= n + here[i]) {
        cut.low = cut.high = cut.rank_bin = first + i, cut.rank = request.top_k - (int)n;
        cut.above = cut.before = before, upto = before + mass_here[i];
      }
      n += here[i], before += mass_here[i];
    }
    __syncthreads();  // the rank's bin is there before top-p looks before it
  }
  if (by_mass) {
    // What top-k leaves has a mass between these, and what top-p wants of it lies between those.
    const u64 least = wanted(cut.before, upto, request.top_p), most = wanted(upto, cut.before, request.top_p);
    __syncthreads();  // all have read before the cut is narrowed
    u64 before = in_front;
    for (int i = 0; i < MINE; i++) {
      const u64 after = before + mass_here[i];
      if (before < least && least <= after) cut.low = first + i, cut.above = before;
      if (before < most && most <= after) cut.high = first + i;
      before = after;
    }
  }
  __syncthreads();  // the cut is whole before it is read
}

// The best score of every part among the tokens that a row's filters keep for sure, and a list of
// those that have to be looked at. grid (parts, T).
KERNEL score_kept(const float* adjusted,  // [T, V]
                  const Request* requests,
                  const int* owners,     // [T]
                  const int* positions,  // [T]; the emitted token stands `ahead` further on
                  const int* tokens,     // [T] of best_tokens
                  const float* peaks,    // [T]
                  const u64* masses,     // [T, BINS]
                  const int* counts,     // [T, BINS]
                  u64* scores,           // [T, parts] keys
                  u64* list,             // [T, list_size] keys of logits, in any order
                  int* listed,           // [T] 0: so many are listed, or would be
                  int V, int ahead) {
  __shared__ Cut cut;
  __shared__ u64 shared[WARPS];
  __shared__ float guesses[PART];  // of the kept ones, in any order; before, logit / temperature
  __shared__ u16 places[PART];     // their columns in the part
  __shared__ int n_kept;
  static_assert(PART <= 1 << 16, "a place has 16 bits");
  grid_dependency_wait();
  grid_dependency_launch();
  const int t = blockIdx.y, lane = threadIdx.x & 31, start = blockIdx.x * PART;
  adjusted += (i64)t * V;
  if (owners[t] < 0 || tokens[t] == NO_TOKEN) return;
  const Request request = requests[owners[t]];
  if (request.temperature == 0.0f) return;
  const bool filtered = is_filtered(request, V);
  float values[EACH];
  load_part(adjusted, V, values);
  if (threadIdx.x == 0) n_kept = 0;
  if (filtered) find_cut(masses + (i64)t * BINS, counts + t * BINS, request, V, cut, shared);
  __syncthreads();  // the counter is zero before it is raised
  const float peak = __fdiv_rn(peaks[t], request.temperature);
  u32 heavy = 0xffffffffu;  // a bit a column: min-p leaves it
  if (request.min_mass)
#pragma unroll 1  // see below
    for (int j = 0; j < EACH; j++) {
      const int id = min(column_of(j), V - 1);
      if (mass(__fdiv_rn(adjusted[id], request.temperature), peak) < request.min_mass) heavy ^= 1u << j;
    }
  if (!filtered && threadIdx.x == 0) n_kept = min(PART, V - start);
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const float value = __fdiv_rn(values[j], request.temperature);
    const int id = column_of(j);
    if (!filtered) {  // all are kept, each in its own place
      guesses[id - start] = value, places[id - start] = id - start;
      continue;
    }
    const int bin = bin_of(value, peak);
    const bool inside = id < V, kept = inside && bin < cut.low && (heavy >> j & 1);
    const u32 all = __ballot_sync(ALL, kept);
    if (all) {
      int at = 0;
      if (lane == 0) at = atomicAdd(&n_kept, __popc(all));
      at = __shfl_sync(ALL, at, 0) + __popc(all & ((1u << lane) - 1));
      if (kept) guesses[at] = value, places[at] = id - start;
    }
    if (inside && cut.looks_at(bin)) {
      const int to = atomicAdd(listed + t, 1);
      if (to < list_size(V)) list[(i64)t * list_size(V) + to] = key_of(values[j], id);
    }
  }
  __syncthreads();  // all are there before they are read
  // Exact noise is made only where a guess comes near the best guess. Loops stay loops: unrolled they
  // would be more code than a multiprocessor holds.
  const int n = n_kept, position = positions[t] + ahead;
  float most = minus_infinity();
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += THREADS) {
    guesses[i] = __fadd_rn(guesses[i], gumbel_about(request.seed, start + places[i], position));
    most = fmaxf(most, guesses[i]);
  }
  most = value_of(block_max(key_of(most, 0), shared));
  // Both guesses may be off by 1e-4, both sums by half a unit in the last place.
  const float least = finite(most) ? most - (1e-3f + fabsf(most) * 0x1p-20f) : most;
  u64 best = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += THREADS)
    if (guesses[i] >= least) {
      const int id = start + places[i];
      const float scaled = __fdiv_rn(adjusted[id], request.temperature);
      best = max(best, key_of(__fadd_rn(scaled, gumbel(request.seed, id, position)), id));
    }
  best = block_max(best, shared);
  if (threadIdx.x == 0) scores[t * gridDim.x + blockIdx.x] = best;
}

// The least key that the filters keep of those that are looked at: n keys, 0 for none.
// weight: mass of the i-th key where top-p may end, else 0.
template <class KeyOf, class WeightOf>
DEVICE u64 least_kept(int n, const KeyOf& key, const WeightOf& weight, const Request& request,
                      float peak, const Cut& cut, Descent& d) {
  auto scaled = [&](u64 k) { return __fdiv_rn(value_of(k), request.temperature); };
  u64 least = 0, total = 0;
  if (cut.rank_bin < BINS) {
    auto of_rank = [&](int i) { return bin_of(scaled(key(i)), peak) == cut.rank_bin ? key(i) : 0; };
    least = key_at(n, cut.rank, of_rank, [](int) { return 1u; }, d);
    if (!request.top_p) return least;
    for (int i = threadIdx.x; i < n; i += THREADS)
      if (key(i) && of_rank(i) >= least) total += mass(scaled(key(i)), peak);
    total = block_total(total, d.warps);
  }
  if (!request.top_p) return least;
  total += cut.before;
  // What top-p keeps is among what top-k leaves: its mass is reached before others are counted.
  return key_at(n, wanted(total, total, request.top_p) - cut.above, key, weight, d);
}

// The token of each sampled row: the best score among what top-k, then top-p, then min-p leave
// (sampling.kept_ids). One block a row.
KERNEL choose(const float* adjusted,  // [T, V]
              const Request* requests,
              const int* owners,     // [T]
              const int* positions,  // [T]
              const float* peaks,    // [T]
              const u64* masses,     // [T, BINS]
              const int* counts,     // [T, BINS]
              const u64* scores,     // [T, parts] of score_kept
              const u64* list,       // [T, list_size]
              const int* listed,     // [T]
              int* tokens,           // [T]; other rows stay as they are
              int V, int ahead, int parts) {
  constexpr int NEAR = 1024;  // keys that are held with their masses
  __shared__ u64 keys[NEAR], weights[NEAR];
  __shared__ u64 shared[WARPS];
  __shared__ Descent d;
  __shared__ Cut cut;
  grid_dependency_wait();
  grid_dependency_launch();
  const int t = blockIdx.x;
  if (owners[t] < 0 || tokens[t] == NO_TOKEN) return;
  const Request request = requests[owners[t]];
  if (request.temperature == 0.0f) return;
  u64 best = 0;
  for (int p = threadIdx.x; p < parts; p += THREADS) best = max(best, scores[t * parts + p]);
  int n = 0;
  if (is_filtered(request, V)) {
    find_cut(masses + (i64)t * BINS, counts + t * BINS, request, V, cut, shared);
    n = listed[t];
  }
  adjusted += (i64)t * V, list += (i64)t * list_size(V);
  const float peak = __fdiv_rn(peaks[t], request.temperature);
  auto scaled = [&](u64 k) { return __fdiv_rn(value_of(k), request.temperature); };
  auto mass_of = [&](u64 k) {
    const int bin = bin_of(scaled(k), peak);
    return k && request.top_p && bin >= cut.low && bin <= cut.high ? mass(scaled(k), peak) : 0;
  };
  auto look = [&](int n, auto key, auto weight) {
    const u64 least = least_kept(n, key, weight, request, peak, cut, d);
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const u64 k = key(i);
      if (!k || k < least || (request.min_mass && mass(scaled(k), peak) < request.min_mass)) continue;
      const float noise = gumbel(request.seed, id_of(k), positions[t] + ahead);
      best = max(best, key_of(__fadd_rn(scaled(k), noise), id_of(k)));
    }
  };
  if (n <= NEAR) {
    for (int i = threadIdx.x; i < n; i += THREADS) keys[i] = list[i], weights[i] = mass_of(list[i]);
    __syncthreads();  // all are there before they are read
    if (n) look(n, [&](int i) { return keys[i]; }, [&](int i) { return weights[i]; });
  } else if (n <= list_size(V)) {
    look(n, [&](int i) { return list[i]; }, [&](int i) { return mass_of(list[i]); });
  } else {  // the list was too short: the whole row
    auto key = [&](int v) {
      const u64 k = key_of(adjusted[v], v);
      return cut.looks_at(bin_of(scaled(k), peak)) ? k : 0;
    };
    look(V, key, [&](int v) { return mass_of(key(v)); });
  }
  best = block_max(best, shared);
  if (threadIdx.x == 0) tokens[t] = id_of(best);
}

// (logits / temperature + noise) * temperature, in place of the drafter's logits: the very noise that
// will pick the target's token. grid (ceil(V / THREADS), T); greedy and filler rows are copied, or
// left out.
KERNEL add_noise(const float* logits,  // [T, V]
                 const Request* requests,
                 const int* owners,     // [T] request of each row
                 const int* positions,  // [T] of the tokens
                 float* out,            // [T, V]; may be logits
                 int V, int copied) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int v = blockIdx.x * THREADS + threadIdx.x, t = blockIdx.y;
  if (v >= V) return;
  const i64 at = (i64)t * V + v;
  if (owners[t] >= 0 && requests[owners[t]].temperature != 0.0f) {
    const Request request = requests[owners[t]];
    const float scaled = __fdiv_rn(logits[at], request.temperature);
    const float noisy = __fadd_rn(scaled, gumbel(request.seed, v, positions[t]));
    out[at] = __fmul_rn(noisy, request.temperature);
  } else if (copied) {
    out[at] = logits[at];
  }
}

// What is not finite counts as -inf.
DEVICE float clean(float logit) { return logit < -minus_infinity() ? logit : minus_infinity(); }

// Ranks n distinct keys by counting and writes the k largest.
DEVICE void write_top(const u64* found, int n, int k, const float* row, double log_total, int* ids,
                      float* log_probs) {
  for (int i = threadIdx.x; i < n; i += THREADS) {
    int rank = 0;
    for (int j = 0; j < n; j++) rank += found[j] > found[i];
    if (rank >= k) continue;
    const int id = id_of(found[i]);
    const float value = value_of(found[i]);  // without the sign of a zero
    ids[rank] = id;
    log_probs[rank] = (float)((double)(value == 0.0f ? row[id] : value) - log_total);
  }
}

// The k most likely tokens of each row by (logit descending, id ascending), with natural
// log-probabilities; and the log-probability of a given token: sampling.log_softmax_top, to the bit.
// One block a row; shared k words. What is not finite counts as -inf.
KERNEL log_softmax_top(const float* logits,  // [T, V]
                       const int* chosen,    // [T], or ignored if !has_chosen
                       int* ids,             // [T, k]
                       float* log_probs,     // [T, k]
                       float* chosen_log_prob,  // [T], written if has_chosen
                       int V, int k, int has_chosen) {
  extern __shared__ __align__(16) u64 found[];  // [k]
  __shared__ Descent d;
  __shared__ u64 shared[WARPS];
  __shared__ int n_found;
  logits += (i64)blockIdx.x * V;
  auto key = [&](int v) { return key_of(clean(logits[v]), v); };
  u64 best = 0, total = 0;
  for (int v = threadIdx.x; v < V; v += THREADS) best = max(best, key(v));
  const float peak = value_of(block_max(best, shared));
  if (peak != minus_infinity())
    for (int v = threadIdx.x; v < V; v += THREADS) total += mass(clean(logits[v]), peak);
  total = block_total(total, shared);
  const double log_total = total ? (double)peak + portable_log((double)total * 0x1p-44) : 0.0;
  const u64 least = key_at(V, k, key, [](int) { return 1u; }, d);
  if (threadIdx.x == 0) n_found = 0;
  __syncthreads();  // the counter is zero before it is raised
  for (int v = threadIdx.x; v < V; v += THREADS)
    if (key(v) >= least) found[atomicAdd(&n_found, 1)] = key(v);  // order is made below
  __syncthreads();  // all k are there before they are ranked
  ids += (i64)blockIdx.x * k, log_probs += (i64)blockIdx.x * k;
  write_top(found, k, k, logits, log_total, ids, log_probs);
  if (has_chosen && threadIdx.x == 0)
    chosen_log_prob[blockIdx.x] = (float)((double)clean(logits[chosen[blockIdx.x]]) - log_total);
}

// The same for drafts, over all parts of a row at once: the normaliser is a sum in fp32. A part's sum
// is of exp(logit - its largest): a thread's columns ascending, then block_sum. A run is RUN columns,
// what a warp loads at once. grid (parts, T).
constexpr int RUN = 128, RUNS = PART / RUN;  // runs of a part: of each EACH, a warp's after the other

#ifdef KDTREE_EMULATOR
DEVICE float exp_of(float x) { return exp2_approx(__fmul_rn(x, 1.44269504f)); }
#else
DEVICE float exp_of(float x) {  // __expf, but that a result below 2^-126 is 0: half the instructions
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(x, 1.44269504f)));
  return y;
}
#endif

// A row of drafts: with noise if it is sampled.
DEVICE const float* draft_row(const float* logits, const float* noisy, const Request* requests,
                              const int* owners, int V, int sampled, int t) {
  const bool with_noise = sampled && owners[t] >= 0 && requests[owners[t]].temperature != 0.0f;
  return (with_noise ? noisy : logits) + (i64)t * V;
}

KERNEL top_of_parts(const float* logits,      // [T, V]
                    const float* noisy,       // [T, V], read of sampled rows
                    const Request* requests,  // or ignored if !sampled
                    const int* owners,        // [T] request of each row
                    u32* runs,     // [T, parts * RUNS] largest of each run, in the order of keys
                    float* peaks,  // [T, parts] largest of each part
                    float* sums,   // [T, parts]
                    int V, int sampled) {
  __shared__ float floats[WARPS];
  grid_dependency_wait();
  grid_dependency_launch();
  const int t = blockIdx.y, at = t * gridDim.x + blockIdx.x;
  float values[EACH];
  load_part(draft_row(logits, noisy, requests, owners, V, sampled, t), V, values);
  float peak = minus_infinity();
#pragma unroll
  for (int j = 0; j < EACH; j += 4) {
    float highest = minus_infinity();
#pragma unroll
    for (int c = 0; c < 4; c++) {
      values[j + c] = clean(values[j + c]);
      highest = fmaxf(highest, values[j + c]);
    }
    const u32 most = __reduce_max_sync(ALL, (u32)(key_of(highest, 0) >> 32));
    if ((threadIdx.x & 31) == 0) runs[(i64)at * RUNS + j / 4 * WARPS + threadIdx.x / 32] = most;
    peak = fmaxf(peak, value_of((u64)most << 32));
  }
  if ((threadIdx.x & 31) == 0) floats[threadIdx.x / 32] = peak;
  __syncthreads();  // every warp's largest is there before any is read
  for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, floats[w]);
  __syncthreads();  // all have read before sums are written there
  float sum = 0.0f;
  if (peak != minus_infinity()) {
#pragma unroll
    for (int j = 0; j < EACH; j++) sum = __fadd_rn(sum, exp_of(__fsub_rn(values[j], peak)));
  }
  sum = block_sum(sum, floats);
  if (threadIdx.x == 0) peaks[at] = peak, sums[at] = sum;
}

// One block a row. The k-th largest of the runs' largest, or of the threads' largest of their runs, is
// a lower bound of the k-th largest logit: what reaches it is looked for in the runs that reach it.
// Parts add ascending, each times exp(its largest - the row's). Code that runs once is fetched from far
// away: the usual way through is short.
KERNEL top_of_runs(const float* logits,  // [T, V]
                   const float* noisy,   // [T, V]
                   const Request* requests,
                   const int* owners,   // [T]
                   const u32* runs,     // [T, parts * RUNS], 16-byte aligned
                   const float* peaks,  // [T, parts]
                   const float* sums,   // [T, parts]
                   int* ids,            // [T, k]
                   float* log_probs,    // [T, k]
                   int V, int k, int parts, int sampled) {
  __shared__ Descent d;
  __shared__ u64 found[FOUND];
  __shared__ int near[FOUND];  // runs that are looked through
  __shared__ int n_found, n_near;
  __shared__ float added[THREADS];
  __shared__ __align__(16) u32 largest[THREADS];
  __shared__ u32 bound;
  grid_dependency_wait();
  grid_dependency_launch();
  const int t = blockIdx.x, n_runs = parts * RUNS, lane = threadIdx.x & 31;
  const float* row = draft_row(logits, noisy, requests, owners, V, sampled, t);
  runs += (i64)t * n_runs, peaks += t * parts, sums += t * parts;

  const uint4* fours_of_runs = (const uint4*)runs;
  u32 most = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < n_runs / 4; i += THREADS) {
    const uint4 four = fours_of_runs[i];
    most = max(most, max(max(four.x, four.y), max(four.z, four.w)));
  }
  largest[threadIdx.x] = most;
  if (threadIdx.x == 0) n_found = n_near = 0;
  __syncthreads();  // all are there before they are compared
  u32 highest = 0;
  int rank = 0;
#pragma unroll 2
  for (int i = 0; i < THREADS; i += 4) {
    const uint4 four = *(const uint4*)(largest + i);
    const u32 of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int c = 0; c < 4; c++) {
      rank += of[c] > most || (of[c] == most && i + c < threadIdx.x);
      highest = max(highest, of[c]);
    }
  }
  if (rank == k - 1) bound = most;

  // The normaliser.
  const float peak = value_of((u64)highest << 32);
  float total = 0.0f;
  if (peak != minus_infinity())
#pragma unroll 1
    for (int first = 0; first < parts; first += THREADS) {
      const int p = first + threadIdx.x;
      if (p < parts) added[threadIdx.x] = __fmul_rn(sums[p], exp_of(__fsub_rn(peaks[p], peak)));
      __syncthreads();  // terms are there before they are added
      for (int i = 0; i < min(parts - first, THREADS); i++) total = __fadd_rn(total, added[i]);
      __syncthreads();  // all have read before the next ones are written
    }
  const double log_total = total > 0.0f ? (double)peak + portable_log((double)total) : 0.0;

  // What reaches the bound.
  __syncthreads();  // the bound is there before it is read
  u64 least = 1;
  if (k <= min(n_runs / 4, THREADS)) least = bound;
  else if (k <= n_runs)
    least = key_at(n_runs, k, [&](int i) { return (u64)runs[i]; }, [](int) { return 1u; }, d);
#pragma unroll 1
  for (int i = threadIdx.x; i < n_runs / 4; i += THREADS) {
    const uint4 four = fours_of_runs[i];
    const u32 of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int c = 0; c < 4; c++)
      if (of[c] >= least) {
        const int to = atomicAdd(&n_near, 1);
        if (to < FOUND) near[to] = 4 * i + c;
      }
  }
  __syncthreads();  // all runs are there before they are looked through
  auto key = [&](int v) { return key_of(clean(row[v]), v); };
  constexpr int AT_ONCE = 4;  // runs that a warp reads together
  for (int first = threadIdx.x / 32; first < min(n_near, FOUND); first += AT_ONCE * WARPS) {
    Four fours[AT_ONCE];
    int columns[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const int i = first + u * WARPS, run = i < min(n_near, FOUND) ? near[i] : -1;
      columns[u] = run < 0 ? V : run / RUNS * PART + run % RUNS / WARPS * (THREADS * 4) +
                                     run % RUNS % WARPS * RUN + 4 * lane;
      fours[u] = load_four(row, columns[u], V);
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      u64 keys[4];
      int here = 0;
#pragma unroll
      for (int c = 0; c < 4; c++) {
        keys[c] = key_of(clean(__uint_as_float(fours[u].of[c])), columns[u] + c);
        if (columns[u] + c >= V || keys[c] >> 32 < least) keys[c] = 0;
        here += keys[c] != 0;
      }
      if (!here) continue;
      int to = atomicAdd(&n_found, here);  // order is made below
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (keys[c] && to < FOUND) found[to++] = keys[c];
    }
  }
  __syncthreads();  // all are there before they are counted
  int n = n_found;
  if (n > FOUND || n_near > FOUND) {  // too many are equal: the k-th largest of the whole row
    const u64 last = key_at(V, k, key, [](int) { return 1u; }, d);
    if (threadIdx.x == 0) n_found = 0;
    __syncthreads();  // the counter is zero before it is raised
    for (int v = threadIdx.x; v < V; v += THREADS)
      if (key(v) >= last) found[atomicAdd(&n_found, 1)] = key(v);
    __syncthreads();  // all k are there before they are ranked
    n = k;
  }
  write_top(found, n, k, row, log_total, ids + (i64)t * k, log_probs + (i64)t * k);
}

// ==== tree ====

// The drafter's input for B sequences: rows of blocks (root, mask, mask, ...) at positions length + i,
// and what block attention and the noise need. One block of the grid a sequence; a slot of -1 is an
// unused place: its rows get id -1 and an empty context.
KERNEL draft_rows(const int* roots,    // [B]
                  const int* slots,    // [B]
                  const int* lengths,  // [slots]
                  const int* tables,   // [slots, max_pages]
                  int* ids,            // [B, n]
                  int* positions,      // [B, n]
                  int* contexts,       // [B] lengths
                  int* pages,          // [B, max_pages]
                  int* owners,         // [B, n - 1] slot of each draft
                  int* at,             // [B, n - 1] its position
                  int n, int max_pages, int mask) {
  begin_dependent();
  const int b = blockIdx.x, slot = slots[b], length = slot < 0 ? 0 : lengths[slot];
  for (int i = threadIdx.x; i < n; i += THREADS) {
    ids[b * n + i] = slot < 0 ? -1 : i ? mask : roots[b];
    positions[b * n + i] = length + i;
    if (i) owners[b * (n - 1) + i - 1] = slot, at[b * (n - 1) + i - 1] = length + i;
  }
  for (int i = threadIdx.x; i < max_pages; i += THREADS)
    pages[(i64)b * max_pages + i] = slot < 0 ? 0 : tables[(i64)slot * max_pages + i];
  if (threadIdx.x == 0) contexts[b] = length;
}

// Draft trees of B sequences, best first under a budget (spec_decode.build_tree): a block a sequence,
// of which all threads read and one warp builds. Every node has at most one pending child, its best
// candidate not yet taken, so a step is one maximum over the nodes: higher score, then smaller depth,
// then the parent's order. budget at most 65536, shared 16 * budget + 8 * D * W bytes.
KERNEL build_trees(const int* roots,        // [B]
                   const int* limits,       // [B] largest depth, at most D; -1: no tree
                   const int* candidates,   // [B, D, W] most probable first
                   const float* log_probs,  // [B, D, W]
                   int* token_ids,          // [B, budget]
                   int* parents,            // [B, budget], -1 at the root
                   int* depths,             // [B, budget]
                   float* scores,           // [B, budget]
                   int* sizes,              // [B] nodes, root included; 0: no tree
                   int D, int W, int budget) {
  extern __shared__ __align__(16) unsigned char memory[];
  begin_dependent();
  const int lane = threadIdx.x, b = blockIdx.x, limit = min(limits[b], D);
  float* score = (float*)memory;              // [budget] of the path, 0 at the root
  int* depth = (int*)memory + budget;         // [budget]
  int* next = (int*)memory + 2 * budget;      // [budget] rank of the pending child
  u32* pending = (u32*)memory + 3 * budget;   // [budget] its score, larger for a higher; 0: none
  int* near_ids = (int*)memory + 4 * budget;  // [D, W] candidates
  float* near_log_probs = (float*)near_ids + D * W;
  for (int i = threadIdx.x; i < D * W; i += THREADS) {
    near_ids[i] = candidates[(i64)b * D * W + i];
    near_log_probs[i] = log_probs[(i64)b * D * W + i];
  }
  __syncthreads();  // all is there before one warp goes on
  if (threadIdx.x >= 32) return;
  candidates = near_ids, log_probs = near_log_probs;
  token_ids += (i64)b * budget, parents += (i64)b * budget;
  depths += (i64)b * budget, scores += (i64)b * budget;

  auto put = [&](int node, int token, int parent, int at, float path) {  // by one lane
    score[node] = path, depth[node] = at, next[node] = 0;
    token_ids[node] = token, parents[node] = parent, depths[node] = at, scores[node] = path;
  };
  auto log_prob_of = [&](int at, int rank) {  // of a candidate below depth `at`
    return at < limit && rank < W ? log_probs[at * W + rank] : minus_infinity();
  };
  auto ordered = [&](float path, float log_prob) -> u32 {
    const u32 bits = __float_as_uint(__fadd_rn(path, log_prob));
    return !(log_prob > minus_infinity()) ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  };
  if (limit < 0) {
    if (lane == 0) sizes[b] = 0;
    return;
  }
  if (lane == 0) put(0, roots[b], -1, 0, 0.0f);
  int n = 1;
  if (budget > limit) {  // the whole most probable path first
    float path = 0.0f;
    while (n <= limit && log_probs[(n - 1) * W] > minus_infinity()) {
      path = __fadd_rn(path, log_probs[(n - 1) * W]);
      if (lane == 0) {
        put(n, candidates[(n - 1) * W], n - 1, n, path);
        next[n - 1] = 1;
      }
      n++;
    }
  }
  __syncwarp();  // nodes and ranks are there before other lanes look at them
  for (int i = lane; i < n; i += 32) pending[i] = ordered(score[i], log_prob_of(depth[i], next[i]));
  while (n < budget) {
    __syncwarp();  // what is pending is there before it is compared
    u32 best = 0, place = 0xffffffffu;
    for (int i = lane; i < n; i += 32) {
      const u32 here = (u32)depth[i] << 16 | i;
      if (pending[i] > best || (pending[i] == best && here < place)) best = pending[i], place = here;
    }
    const u32 most = __reduce_max_sync(ALL, best);
    if (!most) break;
    place = __reduce_min_sync(ALL, best == most ? place : 0xffffffffu);
    const int parent = place & 0xffff, at = place >> 16, rank = next[parent];
    const float path = __uint_as_float(most & 0x80000000u ? most ^ 0x80000000u : ~most);
    // Lane 0 has the new node, lane 1 its parent: their next candidates are read together.
    const float log_prob = lane ? log_prob_of(at, rank + 1) : log_prob_of(at + 1, 0);
    const u32 offered = ordered(lane ? score[parent] : path, log_prob);
    __syncwarp();  // all lanes have compared and read before anything changes
    if (lane == 0) put(n, candidates[at * W + rank], parent, at + 1, path);
    if (lane == 1) next[parent] = rank + 1;
    if (lane < 2) pending[lane ? parent : n] = offered;
    n++;
  }
  if (lane == 0) sizes[b] = n;
}

// Trees as the rows of a forward, sequence after sequence; the rest of the bucket are filler rows
// (id and sequence -1). One block.
KERNEL tree_rows(const int* token_ids,  // [B, budget]
                 const int* parents,    // [B, budget]
                 const int* depths,     // [B, budget]
                 const int* sizes,      // [B]
                 const int* slots,      // [B]
                 const int* lengths,    // [slots]
                 int* ids,              // [T]
                 int* positions,        // [T]
                 int* sequence,         // [T]
                 int* parent,           // [T]
                 int* first,            // [B] row of each root
                 int B, int budget, int T) {
  begin_dependent();
  for (int t = threadIdx.x; t < T; t += THREADS) {
    int b = 0, start = 0;
    while (b < B && t >= start + sizes[b]) start += sizes[b++];
    const bool filler = b == B;
    const int node = filler ? 0 : b * budget + t - start;
    ids[t] = filler ? -1 : token_ids[node];
    positions[t] = filler ? 0 : lengths[slots[b]] + depths[node];
    sequence[t] = filler ? -1 : slots[b];
    parent[t] = filler || parents[node] < 0 ? -1 : start + parents[node];
    if (!filler && t == start) first[b] = t;
  }
}

// Follows the target's own tokens from each root while they are children. A warp a sequence; grid
// ceil(B / WARPS). Unused places of the lists hold -1 (positions: 0), so later kernels skip them.
KERNEL walk_trees(const int* token_ids,  // [B, budget]
                  const int* parents,    // [B, budget]
                  const int* sizes,      // [B]
                  const int* first,      // [B] row of each root
                  const int* choices,    // [T] the target's token of every row
                  const int* slots,      // [B]
                  const int* lengths,    // [slots]
                  int* rows,             // [B, M] accepted rows, the root's first
                  int* row_slots,        // [B, M] their sequence
                  int* row_positions,    // [B, M] their positions
                  int* tokens,           // [B, M] emitted; the last is the next root
                  int* counts,           // [B] accepted rows
                  int* next_roots,       // [B]
                  int B, int budget, int M) {
  begin_dependent();
  const int lane = threadIdx.x & 31, b = blockIdx.x * WARPS + threadIdx.x / 32;
  if (b >= B) return;
  token_ids += (i64)b * budget, parents += (i64)b * budget;
  for (int i = lane; i < M; i += 32) {
    rows[b * M + i] = row_slots[b * M + i] = tokens[b * M + i] = -1;
    row_positions[b * M + i] = 0;
  }
  __syncwarp();  // lists are empty before lane 0 fills them
  const int size = sizes[b], root = first[b];
  auto emit = [&](int n, int node, int choice) {
    rows[b * M + n] = root + node, row_slots[b * M + n] = slots[b];
    row_positions[b * M + n] = lengths[slots[b]] + n, tokens[b * M + n] = choice;
  };
  int node = 0, n = 0;
  // Nodes stand behind their parents, so the path runs through them in ascending order.
  for (int base = 0; base < size; base += 32) {
    const int i = base + lane, parent = i < size ? parents[i] : -1, token = i < size ? token_ids[i] : -1;
    const bool chosen = parent >= 0 && choices[root + parent] == token;
    while (n + 1 < M) {
      const u32 found = __ballot_sync(ALL, chosen && parent == node);
      if (!found) break;
      const int child = __ffs(found) - 1, choice = __shfl_sync(ALL, token, child);
      if (lane == 0) emit(n, node, choice);
      node = base + child, n++;
    }
  }
  if (lane) return;
  counts[b] = size ? n + 1 : 0;
  if (size) {
    const int choice = choices[root + node];
    emit(n, node, choice);
    next_roots[b] = choice;
  }
}

// ==== entries ====

// Copies rows into the cache: row rows[i] of every layer to position positions[i] of sequence
// slots[i]; a slot of -1 is skipped. grid (ceil(width / THREADS), n, layers). Source and pages are
// different memory, so moves cannot overlap.
KERNEL put_entries(const act* from,       // [layers, T, width]
                   const int* rows,       // [n]
                   const int* slots,      // [n]
                   const int* positions,  // [n]
                   const int* tables,     // [slots, max_pages]
                   act* pages,            // [layers, n_pages, leaf, width]
                   int T, int width, int max_pages, int leaf, i64 layer_stride) {
  begin_dependent();
  const int k = blockIdx.x * THREADS + threadIdx.x, i = blockIdx.y;
  if (k >= width || slots[i] < 0) return;
  const int page = tables[(i64)slots[i] * max_pages + positions[i] / leaf];
  pages += blockIdx.z * layer_stride + ((i64)page * leaf + positions[i] % leaf) * width;
  pages[k] = from[((i64)blockIdx.z * T + rows[i]) * width + k];
}

// Where sequences stand after their walks. grid ceil(B / THREADS).
KERNEL advance(const int* slots,       // [B], each once; -1 is skipped
               const int* counts,      // [B] accepted rows
               const int* next_roots,  // [B]
               int* lengths,           // [slots]
               int* roots,             // [B]
               int* limits,            // [B]
               int B) {
  begin_dependent();
  const int b = blockIdx.x * THREADS + threadIdx.x;
  if (b >= B || slots[b] < 0 || !counts[b]) return;
  lengths[slots[b]] += counts[b];
  roots[b] = next_roots[b];
  limits[b] -= counts[b];
}

// ==== generate ====

// Weights from a seed, bit for bit reference.generate: entry (first_row + r, first_column + c) of a
// matrix of `width` columns, at [r, c] of out. SplitMix64 of the entry's index; every entry alone.
// grid ceil(n / THREADS), n = rows * columns.
DEVICE u64 random_bits(i64 i, u64 seed, int columns, int width, int first_row, int first_column) {
  const u64 row = first_row + i / columns, column = first_column + i % columns;
  u64 z = (row * width + column + 1) * 0x9E3779B97F4A7C15ull + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

template <typename T>
DEVICE void fill(T* out, i64 n, u64 seed, float mean, float scale, int columns, int width,
                 int first_row, int first_column) {
  const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  const u64 z = random_bits(i, seed, columns, width, first_row, first_column);
  // 24 bits to [-1, 1): exact in every step.
  const float u = __fsub_rn(__fmul_rn((float)(u32)(z >> 40), 1.0f / (1 << 23)), 1.0f);
  store(out + i, __fadd_rn(mean, __fmul_rn(scale, u)));
}

KERNEL generate_float32(float* out,  // [rows, columns]
                        i64 n, u64 seed, float mean, float scale, int columns, int width,
                        int first_row, int first_column) {
  fill(out, n, seed, mean, scale, columns, width, first_row, first_column);
}

KERNEL generate_bfloat16(bf16* out,  // [rows, columns]
                         i64 n, u64 seed, float mean, float scale, int columns, int width,
                         int first_row, int first_column) {
  fill(out, n, seed, mean, scale, columns, width, first_row, first_column);
}

KERNEL generate_int32(u32* out,  // [rows, columns], 32 random bits each: eight codes
                      i64 n, u64 seed, float mean, float scale, int columns, int width,
                      int first_row, int first_column) {
  const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i < n) out[i] = (u32)random_bits(i, seed, columns, width, first_row, first_column);
}
