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

DEVICE bool finite(float value) { return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u; }

// Integer reductions over the block; shared: WARPS words, free on return.
DEVICE u64 block_max(u64 value, u64* shared) {
  for (int distance = 16; distance > 0; distance >>= 1) {
    const u64 other = __shfl_xor_sync(ALL, value, distance);
    value = other > value ? other : value;
  }
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();  // every warp's maximum is there before any is read
  for (int w = 0; w < WARPS; w++) value = shared[w] > value ? shared[w] : value;
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

// The key at which the weights of the keys from the top down reach `want` (at least 1, at most their
// total): a descent by 8 bits. With weights of 1 it is the want-th largest key. bins: 256 words.
template <class KeyOf, class WeightOf>
DEVICE u64 key_at(int n, u64 want, const KeyOf& key, const WeightOf& weight, u64* bins) {
  u64 prefix = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += THREADS) bins[i] = 0;
    __syncthreads();  // bins are empty before anything is counted
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const u64 k = key(i);
      if (k && (shift == 56 || k >> (shift + 8) == prefix >> (shift + 8)))
        atomicAdd(&bins[(k >> shift) & 255], weight(i));  // integers: no order
    }
    __syncthreads();  // all is counted before it is read
    int digit = 255;
    for (; digit > 0 && bins[digit] < want; digit--) want -= bins[digit];
    prefix |= (u64)digit << shift;
    __syncthreads();  // all have read before the bins are emptied
  }
  return prefix;
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
// below the root down to itself. grid (ceil(V / THREADS), T), shared depth ints.
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
  const int v = blockIdx.x * THREADS + threadIdx.x, t = blockIdx.y, slot = sequence[t];
  if (threadIdx.x == 0) {
    int n = 0;
    if (slot >= 0)
      for (int node = t; parent[node] >= 0 && n < depth; node = parent[node])
        path[n++] = token_ids[node];
    n_path = n;
  }
  __syncthreads();  // the path is there before it is looked through
  if (v >= V) return;
  float value = logits[(i64)t * V + v];
  if (slot >= 0) {
    const i64 at = (i64)slot * V + v;
    int here = 0;
    for (int i = 0; i < n_path; i++) here += path[i] == v;
    const int count = max(counts[at], 0) + here;
    const float repetition = penalties[3 * slot], frequency = penalties[3 * slot + 1];
    const float presence = penalties[3 * slot + 2];
    if (repetition != 1.0f && (counts[at] >= 0 || here > 0))
      value = value > 0.0f ? __fdiv_rn(value, repetition) : __fmul_rn(value, repetition);
    if (count > 0 && (frequency != 0.0f || presence != 0.0f)) {
      value = __fsub_rn(value, __fmul_rn(frequency, (float)count));
      value = __fsub_rn(value, presence);
    }
    value = __fadd_rn(value, biases[at]);
    if (emitted[slot] + n_path < min_tokens[slot])
      for (int i = 0; i < n_stops; i++)
        if (stops[slot * n_stops + i] == v) value = minus_infinity();
  }
  out[(i64)t * V + v] = value;
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

// The greedy token of each row and the largest logit. One block a row. A row of logits with NaN or
// +inf, or with nothing finite before or after penalties, has NO_TOKEN.
KERNEL best_tokens(const float* logits,    // [T, V] as the model gave them
                   const float* adjusted,  // [T, V] after penalties; may be logits
                   int* tokens,            // [T]
                   float* peaks,           // [T] of adjusted
                   int V) {
  __shared__ u64 shared[WARPS];
  logits += (i64)blockIdx.x * V, adjusted += (i64)blockIdx.x * V;
  u64 best = 0, broken = 0, raw = 0;
  for (int v = threadIdx.x; v < V; v += THREADS) {
    if (!finite(logits[v]) && logits[v] != minus_infinity()) {
      broken = 1;
      continue;
    }
    raw |= finite(logits[v]);
    const u64 key = key_of(adjusted[v], v);
    best = key > best ? key : best;
  }
  best = block_max(best, shared);
  const bool usable = !block_max(broken, shared) && block_max(raw, shared);
  if (threadIdx.x) return;
  const float peak = best ? adjusted[id_of(best)] : minus_infinity();
  tokens[blockIdx.x] = usable && finite(peak) ? id_of(best) : NO_TOKEN;
  peaks[blockIdx.x] = peak;
}

// What sampled rows are chosen by. grid (ceil(V / THREADS), T); greedy rows, filler rows and rows
// without a token are skipped.
KERNEL noisy_scores(const float* adjusted,    // [T, V]
                    const Request* requests,
                    const int* owners,        // [T] request of each row
                    const int* positions,     // [T]; the emitted token stands `ahead` further on
                    const int* tokens,        // [T] of best_tokens
                    const float* peaks,       // [T]
                    float* scores,            // [T, V] logit / temperature + noise
                    u64* masses,              // [T, V], written where a filter needs them
                    int V, int ahead) {
  const int v = blockIdx.x * THREADS + threadIdx.x, t = blockIdx.y;
  if (v >= V || owners[t] < 0 || tokens[t] == NO_TOKEN) return;
  const Request request = requests[owners[t]];
  if (request.temperature == 0.0f) return;
  const i64 at = (i64)t * V + v;
  const float scaled = __fdiv_rn(adjusted[at], request.temperature);
  scores[at] = __fadd_rn(scaled, gumbel(request.seed, v, positions[t] + ahead));
  if (request.top_p || request.min_mass)
    masses[at] = mass(scaled, __fdiv_rn(peaks[t], request.temperature));
}

// The token of each sampled row: the best score among what top-k, then top-p, then min-p leave
// (sampling.kept_ids). One block a row.
KERNEL choose(const float* adjusted,  // [T, V]
              const Request* requests,
              const int* owners,        // [T] request of each row
              const float* scores,      // [T, V]
              const u64* masses,        // [T, V]
              int* tokens,              // [T]; greedy rows stay as they are
              int V) {
  __shared__ u64 bins[256];
  __shared__ u64 shared[WARPS];
  if (owners[blockIdx.x] < 0 || tokens[blockIdx.x] == NO_TOKEN) return;
  const Request request = requests[owners[blockIdx.x]];
  if (request.temperature == 0.0f) return;
  adjusted += (i64)blockIdx.x * V, scores += (i64)blockIdx.x * V, masses += (i64)blockIdx.x * V;
  u64 least = 0;  // keys below it are dropped
  auto kept = [&](int v) {
    const u64 key = key_of(adjusted[v], v);
    return key >= least ? key : 0;
  };
  if (request.top_k > 0 && request.top_k < V)
    least = key_at(V, request.top_k, kept, [](int) { return (u64)1; }, bins);
  if (request.top_p) {
    u64 total = 0;
    for (int v = threadIdx.x; v < V; v += THREADS)
      if (kept(v)) total += masses[v];
    total = block_total(total, shared);
    const u64 target = __umul64hi(total, request.top_p) - (total >> 22);
    // Within 2^-22 of all mass counts as arrived; a target of 0 or below it keeps the best token.
    const u64 want = (i64)target > 0 ? target : 1;
    least = key_at(V, want, kept, [&](int v) { return masses[v]; }, bins);
  }
  u64 best = 0;
  for (int v = threadIdx.x; v < V; v += THREADS) {
    if (!kept(v) || (request.min_mass && masses[v] < request.min_mass)) continue;
    const u64 key = key_of(scores[v], v);
    best = key > best ? key : best;
  }
  best = block_max(best, shared);
  if (threadIdx.x == 0) tokens[blockIdx.x] = id_of(best);
}

// (logits / temperature + noise) * temperature, in place of the drafter's logits: the very noise that
// will pick the target's token. grid (ceil(V / THREADS), T); greedy and filler rows are copied.
KERNEL add_noise(const float* logits,  // [T, V]
                 const Request* requests,
                 const int* owners,        // [T] request of each row
                 const int* positions,     // [T] of the tokens
                 float* out,               // [T, V]; may be logits
                 int V) {
  const int v = blockIdx.x * THREADS + threadIdx.x, t = blockIdx.y;
  if (v >= V) return;
  const i64 at = (i64)t * V + v;
  float value = logits[at];
  if (owners[t] >= 0 && requests[owners[t]].temperature != 0.0f) {
    const Request request = requests[owners[t]];
    value = __fadd_rn(__fdiv_rn(value, request.temperature), gumbel(request.seed, v, positions[t]));
    value = __fmul_rn(value, request.temperature);
  }
  out[at] = value;
}

// The k most likely tokens of each row by (logit descending, id ascending), with natural
// log-probabilities; and the log-probability of a given token (sampling.log_softmax_top). One block a
// row; shared k words. What is not finite counts as -inf.
KERNEL top_log_probs(const float* logits,  // [T, V]
                     const int* chosen,    // [T], or ignored if !has_chosen
                     int* ids,             // [T, k]
                     float* log_probs,     // [T, k]
                     float* chosen_log_prob,  // [T], written if has_chosen
                     int V, int k, int has_chosen) {
  extern __shared__ __align__(16) u64 found[];  // [k]
  __shared__ u64 bins[256];
  __shared__ u64 shared[WARPS];
  __shared__ int n_found;
  logits += (i64)blockIdx.x * V;
  auto value = [&](int v) { return finite(logits[v]) ? logits[v] : minus_infinity(); };
  auto key = [&](int v) { return key_of(value(v), v); };
  u64 best = 0, total = 0;
  for (int v = threadIdx.x; v < V; v += THREADS) best = key(v) > best ? key(v) : best;
  const float peak = value(id_of(block_max(best, shared)));
  if (peak != minus_infinity())
    for (int v = threadIdx.x; v < V; v += THREADS) total += mass(value(v), peak);
  total = block_total(total, shared);
  const double log_total = total ? (double)peak + portable_log((double)total * 0x1p-44) : 0.0;
  const u64 least = key_at(V, k, key, [](int) { return (u64)1; }, bins);
  if (threadIdx.x == 0) n_found = 0;
  __syncthreads();  // the counter is zero before it is raised
  for (int v = threadIdx.x; v < V; v += THREADS)
    if (key(v) >= least) found[atomicAdd(&n_found, 1)] = key(v);  // order is made below
  __syncthreads();  // all k are there before they are ranked
  for (int i = threadIdx.x; i < k; i += THREADS) {
    int rank = 0;
    for (int j = 0; j < k; j++) rank += found[j] > found[i];
    const int id = id_of(found[i]);
    ids[(i64)blockIdx.x * k + rank] = id;
    log_probs[(i64)blockIdx.x * k + rank] = (float)((double)value(id) - log_total);
  }
  if (has_chosen && threadIdx.x == 0)
    chosen_log_prob[blockIdx.x] = (float)((double)value(chosen[blockIdx.x]) - log_total);
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

// Draft trees of B sequences, best first under a budget (spec_decode.build_tree): a warp a sequence,
// grid ceil(B / WARPS). Every node has at most one pending child, its best candidate not yet taken, so
// a step is one maximum over the nodes: higher score, then smaller depth, then the parent's order.
// shared WARPS * budget * 12 bytes.
KERNEL build_trees(const int* roots,        // [B]
                   const int* limits,       // [B] largest depth, at most D; -1: no tree
                   const int* candidates,   // [B, D, W] most probable first
                   const float* log_probs,  // [B, D, W]
                   int* token_ids,          // [B, budget]
                   int* parents,            // [B, budget], -1 at the root
                   int* depths,             // [B, budget]
                   float* scores,           // [B, budget]
                   int* sizes,              // [B] nodes, root included; 0: no tree
                   int B, int D, int W, int budget) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, b = blockIdx.x * WARPS + warp;
  if (b >= B) return;
  float* score = (float*)memory + warp * budget;  // of the path, 0 at the root
  int* depth = (int*)memory + (WARPS + warp) * budget;
  int* next = (int*)memory + (2 * WARPS + warp) * budget;  // rank of the pending child
  const int limit = min(limits[b], D);
  candidates += (i64)b * D * W, log_probs += (i64)b * D * W;
  token_ids += (i64)b * budget, parents += (i64)b * budget;
  depths += (i64)b * budget, scores += (i64)b * budget;

  auto put = [&](int node, int token, int parent, int at, float path) {
    if (lane == 0) {
      score[node] = path, depth[node] = at, next[node] = 0;
      token_ids[node] = token, parents[node] = parent, depths[node] = at, scores[node] = path;
    }
    __syncwarp();  // the node is there before any lane looks at it
  };
  if (limit < 0) {
    if (lane == 0) sizes[b] = 0;
    return;
  }
  put(0, roots[b], -1, 0, 0.0f);
  int n = 1;
  if (budget > limit) {  // the whole most probable path first
    while (n <= limit && log_probs[(n - 1) * W] > minus_infinity()) {
      const float path = __fadd_rn(score[n - 1], log_probs[(n - 1) * W]);
      put(n, candidates[(n - 1) * W], n - 1, n, path);
      n++;
    }
    if (lane == 0)
      for (int i = 0; i + 1 < n; i++) next[i] = 1;
    __syncwarp();  // ranks are set before they are read
  }
  while (n < budget) {
    float best = minus_infinity();
    int best_node = -1;
    for (int i = lane; i < n; i += 32) {  // ascending, so an equal score and depth stays with the first
      if (depth[i] >= limit || next[i] >= W) continue;
      const float log_prob = log_probs[depth[i] * W + next[i]];
      if (!(log_prob > minus_infinity())) continue;
      const float path = __fadd_rn(score[i], log_prob);
      if (best_node < 0 || path > best || (path == best && depth[i] < depth[best_node]))
        best = path, best_node = i;
    }
    for (int distance = 16; distance > 0; distance >>= 1) {
      const float other = __shfl_xor_sync(ALL, best, distance);
      const int other_node = __shfl_xor_sync(ALL, best_node, distance);
      if (other_node < 0) continue;
      const bool equal = best_node >= 0 && other == best;
      const int deeper = equal ? depth[other_node] - depth[best_node] : 0;
      if (best_node < 0 || other > best ||
          (equal && (deeper < 0 || (deeper == 0 && other_node < best_node))))
        best = other, best_node = other_node;
    }
    if (best_node < 0) break;
    const int rank = next[best_node], at = depth[best_node];
    __syncwarp();  // all lanes have read before the parent moves on
    if (lane == 0) next[best_node] = rank + 1;
    put(n, candidates[at * W + rank], best_node, at + 1, best);
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
  const int lane = threadIdx.x & 31, b = blockIdx.x * WARPS + threadIdx.x / 32;
  if (b >= B) return;
  token_ids += (i64)b * budget, parents += (i64)b * budget;
  for (int i = lane; i < M; i += 32) {
    rows[b * M + i] = row_slots[b * M + i] = tokens[b * M + i] = -1;
    row_positions[b * M + i] = 0;
  }
  __syncwarp();  // lists are empty before lane 0 fills them
  int node = sizes[b] ? 0 : -1, n = 0;
  while (node >= 0 && n < M) {
    const int choice = choices[first[b] + node];
    if (lane == 0) {
      rows[b * M + n] = first[b] + node, row_slots[b * M + n] = slots[b];
      row_positions[b * M + n] = lengths[slots[b]] + n, tokens[b * M + n] = choice;
      next_roots[b] = choice;
    }
    n++;
    int child = -1;
    for (int base = 0; base < sizes[b] && child < 0; base += 32) {
      const int i = base + lane;
      const bool here = i < sizes[b] && parents[i] == node && token_ids[i] == choice;
      const u32 found = __ballot_sync(ALL, here);
      if (found) child = base + __ffs(found) - 1;
    }
    node = child;
  }
  if (lane == 0) counts[b] = n;
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

// lengths[slots[b]] += counts[b]. grid ceil(B / THREADS).
KERNEL advance(const int* slots,   // [B], each once; -1 is skipped
               const int* counts,  // [B]
               int* lengths,       // [slots]
               int B) {
  begin_dependent();
  const int b = blockIdx.x * THREADS + threadIdx.x;
  if (b < B && slots[b] >= 0) lengths[slots[b]] += counts[b];
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
