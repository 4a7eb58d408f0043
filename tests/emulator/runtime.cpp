// The emulator's runtime: one fiber per CUDA thread, and the checker that watches memory.
//
// A block's threads run one at a time; a thread runs until it must wait for others, and then the next
// ready thread of its warp, or of another warp, is resumed: which one is drawn from a seeded generator.
// A kernel built with hooks (checked=True) reports each load and store here (the `__tsan_*` functions,
// called by what -fsanitize=thread emits; its own library is not used) and each undefined operation
// (the `__ubsan_*` functions). Errors leave the fiber for good, with a text in which `@hex@` stands for an
// address in the kernel's module; the loader turns it into a source line.
#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <unordered_map>
#include <vector>

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "cuda_host.h"  // last: its macros must not reach the others

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

// ---------------------------------------------------------------- the context switch
// Saves what a called function must preserve, stores the stack pointer in *save, continues at `load`.
extern "C" void emulator_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
constexpr int FRAME_WORDS = 8, RETURN_WORD = 6;  // body() then starts as if it had been called
#elif defined(__aarch64__)
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x29, x30, [sp, #0]
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x29, x30, [sp, #0]
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch, .-emulator_switch
)");
constexpr int FRAME_WORDS = 20, RETURN_WORD = 1;
#else
#error "the emulator's context switch is written for x86-64 and aarch64"
#endif

namespace emulator {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using std::size_t;
using Address = std::uintptr_t;

constexpr size_t STACK = 64 << 10, PAGE = 4096;
constexpr size_t SHARED = 232448 + 2048;  // what a block may have on sm_90, and room for a gap after it

// ---------------------------------------------------------------- state
struct Text {
  char data[160];
  operator const char*() const { return data; }
};
enum State { READY, IN_WARP, AT_BARRIER, AT_GRID_BARRIER, AT_MBARRIER, GONE };

struct Copy { unsigned char* to; const unsigned char* from; int size, bytes; u32 group, where; };
struct Warp;
struct Block;

struct alignas(64) Thread : ThreadView {  // what every switch needs comes first, in one or two lines of the cache
  void* stack_pointer;  // none: it has not begun
  Warp* warp;
  // The warp operation this thread waits in.
  u64 value;
  u32 mask;
  Collective op;
  u32 source, where;
  State state;
  u32 id;
  Block* home;
  Address stack;  // lowest address
  void* mbarrier;
  const char* file;
  int line;
  // cp.async: copies not yet made, and the number of groups committed.
  std::vector<Copy> copies;
  u32 groups;
  // The checker's clock, and what this thread knows of the others' clocks (a row of Block::clocks).
  u32 clock;
  u32* knows;
};

struct Warp {
  Thread* lanes[32];
  u32 exist, alive, ready, waiting;  // bit masks of lanes; waiting: in a warp operation
  // Of the first that waits; alike: the same for all that wait.
  u32 mask;
  Collective op;
  bool alike;
  bool queued;
};

struct Mbarrier {
  u32 count, pending, phase;
  long long bytes;  // expected and not yet arrived
  std::vector<Copy> copies;
  std::vector<u32> knows;
};

struct Block : BlockView {
  std::vector<Thread> threads_;
  std::vector<Warp> warps;
  u32 count, arrived, gone, votes;
  int line;  // of the barrier that threads wait at
  const char* file;
  Collective op;
  unsigned char* statics;
  std::vector<u32> slot_serial;  // the block (by serial number) that last used each static slot
  u32 serial, epoch, first_epoch;
  bool wide;
  std::vector<u32> clocks;
  std::unordered_map<void*, Mbarrier> mbarriers;
  // The first read of shared memory that nobody had written, in this barrier interval: an error, but
  // if another thread's write follows before the barrier then the race is what to report.
  Thread* unwritten;
  Text unwritten_place;
  u32 unwritten_where;
};

struct Launch {
  const Kernel* kernel;
  u32 grid[3], block[3], shared_bytes, static_bytes;
  u64 seed;
  u32 cooperative, checked, dependent;
};

struct Buffer { void* data; size_t bytes; const char* name; u32 constant, output, fresh; };

static Launch launch_;
static void** arguments;
static std::vector<Block*> resident;   // blocks whose threads exist now
static std::vector<Block*> spare;      // kept for the next launch
static std::vector<Warp*> ready_warps;
static void* main_stack_pointer;
static sigjmp_buf escape;
static char* message;
static size_t message_size;
static u32 grid_arrived, unfinished;
static bool launched_early;  // a thread let the next launch begin before it had waited itself
static u32 serials;
static u64 switches, random_state;
static Address module_base;

ThreadView* current;
static inline Thread& me() { return *static_cast<Thread*>(current); }
static inline u32 offset(void* caller) { return u32(Address(caller) - module_base); }
#define CALLER offset(__builtin_return_address(0))

static inline u32 draw() {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return u32((random_state * 0x2545f4914f6cdd1dull) >> 32);
}
static inline u32 draw(u32 n) { return u32(u64(draw()) * n >> 32); }

// ---------------------------------------------------------------- errors
static Text thread_name(const Thread& t) {
  Text s;
  std::snprintf(s.data, sizeof s.data, "thread (%u,%u,%u)", t.index.x, t.index.y, t.index.z);
  return s;
}
static Text thread_name(const Block& b, u32 id) { return thread_name(b.threads_[id]); }

[[noreturn]] __attribute__((format(printf, 1, 2))) static void fail(const char* format, ...) {
  int n = std::snprintf(message, message_size, "kernel %s", launch_.kernel->name);
  if (current) {
    const Thread& t = me();
    n += std::snprintf(message + n, message_size - n, ", block (%u,%u,%u), %s", t.home->index.x, t.home->index.y, t.home->index.z, (const char*)thread_name(t));
  }
  n += std::snprintf(message + n, message_size - n, ": ");
  va_list list;
  va_start(list, format);
  std::vsnprintf(message + n, message_size - n, format, list);
  va_end(list);
  if (current && me().home->unwritten) {
    // It may well be the cause of what went wrong since.
    const Block& b = *me().home;
    n = int(std::strlen(message));
    std::snprintf(message + n, message_size - n, "; before that, %s reads %s at @%x@, which no thread had written", (const char*)thread_name(*b.unwritten),
                  (const char*)b.unwritten_place, b.unwritten_where);
  }
  siglongjmp(escape, 1);
}
void fail_at(const char* file, int line, const char* text) { fail("%s at %s:%d", text, file, line); }

static Text wait_name(const Thread& t) {
  Text s;
  switch (t.state) {
    case IN_WARP: std::snprintf(s.data, sizeof s.data, "a warp operation with mask 0x%08x at @%x@", t.mask, t.where); break;
    case AT_MBARRIER: std::snprintf(s.data, sizeof s.data, "an mbarrier at @%x@", t.where); break;
    case AT_GRID_BARRIER: std::snprintf(s.data, sizeof s.data, "the grid's barrier at %s:%d", t.file, t.line); break;
    default: std::snprintf(s.data, sizeof s.data, "the block's barrier at %s:%d", t.file, t.line);
  }
  return s;
}
[[noreturn]] static void deadlock() {
  // One thread for each kind of wait tells what is wrong; the current one is only the last to stop.
  char text[600];
  int n = 0;
  u32 seen = 0;
  const Thread* first = nullptr;
  for (Block* b : resident)
    for (Thread& t : b->threads_)
      if (t.state != GONE && !(seen >> t.state & 1)) {
        seen |= 1u << t.state;
        if (!first) first = &t;
        n += std::snprintf(text + n, sizeof text - n, "%s%s waits in %s", n ? "; " : "", (const char*)thread_name(t), (const char*)wait_name(t));
      }
  current = const_cast<Thread*>(first);
  fail("no thread can go on: %s", text);
}

// ---------------------------------------------------------------- the checker's memory
// For each word: who wrote it last and who read it last (two readers, of different warps if there are). A word that is
// ever touched in part gets four such cells, one a byte.
struct Record {
  u32 where, epoch, clock;
  u16 thread, flags;
};
enum : u16 { FLAG_ATOMIC = 1, FLAG_PENDING = 2 };
struct Cell { Record write, read[2]; };

struct Shadow {
  Cell *words = nullptr, *bytes = nullptr;
  unsigned char* split = nullptr;
  size_t size = 0;
  static void* zeroes(size_t n) {
    void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) std::abort();
    return p;
  }
  explicit Shadow(size_t n) : size((n + 3) / 4) {
    words = static_cast<Cell*>(zeroes(size * sizeof(Cell)));
    bytes = static_cast<Cell*>(zeroes(size * 4 * sizeof(Cell)));
    split = static_cast<unsigned char*>(zeroes(size));
  }
  ~Shadow() {
    munmap(words, size * sizeof(Cell));
    munmap(bytes, size * 4 * sizeof(Cell));
    munmap(split, size);
  }
  Shadow(const Shadow&) = delete;
};

enum Space { GLOBAL, DYNAMIC, STATIC, MODULE };
struct Region {
  Address low, high;
  Address base;  // where the shadow begins
  Space space;
  Shadow* shadow;  // none: constant, only its bounds are checked
  Block* block;    // of shared memory
  const char* name;
  u32 constant, output;
  u32 fresh;  // written by a launch that a dependent one does not wait for by itself
};
static std::vector<Region> regions;
static size_t last_region;
static std::unordered_map<void*, Shadow*> shared_shadows;  // by the block's memory
static std::vector<Shadow*> global_shadows;
static std::vector<u32> epoch_block;  // serial of the block that an epoch of this launch belongs to
static std::vector<bool> fenced_serial;
static u32 epochs = 1, launch_epoch, grid_epoch, launch_serial;

static u32 new_epoch(Block& b) {
  epoch_block.push_back(b.serial);
  return b.epoch = epochs++;
}

static Shadow* shared_shadow(void* memory, size_t bytes) {
  Shadow*& s = shared_shadows[memory];
  if (!s || s->size < (bytes + 3) / 4) {
    delete s;
    s = new Shadow(bytes);
  }
  return s;
}

// Is this record of another thread's access not ordered before what the current thread does?
static bool unordered(const Record& r, const Region& region) {
  if (r.epoch < launch_epoch) return false;
  const Thread& t = me();
  const u32 serial = epoch_block[r.epoch - launch_epoch];
  if (serial != t.home->serial) return region.space == GLOBAL && r.epoch > grid_epoch && !fenced_serial[serial - launch_serial];
  return r.thread != t.id && r.epoch >= t.home->epoch && t.knows[r.thread] < r.clock;
}

static const char* verb(Access a) { return a == READ ? "reads" : a == WRITE ? "writes" : "updates"; }

static Text place(const Region& r, Address a) {
  Text s;
  const char* kind = r.space == DYNAMIC ? "dynamic shared memory" : r.space == STATIC ? "shared" : "parameter";
  if (r.space == DYNAMIC) std::snprintf(s.data, sizeof s.data, "byte %zu of %s", size_t(a - r.low), kind);
  else std::snprintf(s.data, sizeof s.data, "byte %zu of %s `%s`", size_t(a - r.low), kind, r.name);
  return s;
}

[[noreturn]] static void conflict(const Region& region, Address a, Access access, u32 where, const Record& r, const char* did) {
  Block* b = me().home;
  for (Block* other : resident)
    if (other->serial == epoch_block[r.epoch - launch_epoch]) b = other;
  me().home->unwritten = nullptr;  // the race explains it
  const bool same = b->serial == epoch_block[r.epoch - launch_epoch];
  fail("race: %s %s at @%x@, which %s%s %s at @%x@ with no barrier between", verb(access), (const char*)place(region, a), where,
       same && b == me().home ? "" : "another block's ", (const char*)thread_name(*b, r.thread), did, r.where);
}

static inline void visit(Cell& cell, const Region& region, Address a, Access access, u32 where) {
  Thread& t = me();
  const Record now{where, t.home->epoch, t.clock, u16(t.id), u16(access == ATOMIC ? FLAG_ATOMIC : 0)};
  Record& w = cell.write;
  const bool shared = region.space != GLOBAL;
  if (access != WRITE && shared && w.epoch < t.home->first_epoch && !t.home->unwritten) {
    t.home->unwritten = &t;
    t.home->unwritten_place = place(region, a);
    t.home->unwritten_where = where;
  }
  if (access != WRITE && region.output && w.epoch < launch_epoch)
    fail("%s %s at @%x@, which holds no value yet: the launch declares it an output", verb(access), (const char*)place(region, a), where);
  if (w.flags & FLAG_PENDING && w.epoch >= (shared ? t.home->first_epoch : launch_epoch))
    fail("%s %s at @%x@ while the asynchronous copy that %s issued at @%x@ is not waited for", verb(access), (const char*)place(region, a), where,
         (const char*)thread_name(*t.home, w.thread), w.where);
  if (unordered(w, region) && !(access == ATOMIC && w.flags & FLAG_ATOMIC))
    conflict(region, a, access, where, w, w.flags & FLAG_ATOMIC ? "updates" : "writes");
  if (access == READ) {
    Record &r0 = cell.read[0], &r1 = cell.read[1];
    if (r0.epoch == now.epoch && r0.thread != now.thread && !(r1.epoch == now.epoch && r1.thread / 32 != now.thread / 32 && r0.thread / 32 == now.thread / 32)) r1 = r0;
    r0 = now;
  } else {
    for (const Record& r : cell.read)
      if (unordered(r, region)) conflict(region, a, access, where, r, "reads");
    w = now;
  }
}

template <class F> static void each_cell(Region& region, Address a, size_t n, F&& f) {
  Shadow& s = *region.shadow;
  for (Address p = a, end = a + n; p < end;) {
    const size_t byte = p - region.base, word = byte / 4;
    if (!s.split[word]) {
      if (byte % 4 == 0 && end - p >= 4) {
        f(s.words[word], p);
        p += 4;
        continue;
      }
      s.split[word] = 1;
      for (int i = 0; i < 4; i++) s.bytes[word * 4 + i] = s.words[word];
    }
    f(s.bytes[byte], p);
    p++;
  }
}

[[noreturn]] static void out_of_bounds(Address a, size_t n, Access access, u32 where) {
  const Region* nearest = nullptr;
  size_t distance = ~size_t(0);
  for (const Region& r : regions) {
    if (r.space == MODULE || (r.block && r.block != me().home)) continue;
    const size_t d = a < r.low ? r.low - a : a + n > r.high ? a + n - r.high : 0;
    if (d < distance) distance = d, nearest = &r;
  }
  if (a < PAGE) fail("%s %zu bytes at a null pointer (address 0x%zx) at @%x@", verb(access), n, size_t(a), where);
  if (!nearest || distance > (size_t(1) << 30)) fail("%s %zu bytes at 0x%zx, which belongs to no argument, at @%x@", verb(access), n, size_t(a), where);
  const char* side = a < nearest->low ? "before" : "past";
  const char* kind = nearest->space == DYNAMIC ? "dynamic shared memory" : nearest->space == STATIC ? "shared" : "parameter";
  fail("out of bounds: %s %zu bytes at @%x@, ending %zu bytes %s the %s of %s `%s` (%zu bytes)", verb(access), n, where,
       distance, side, a < nearest->low ? "start" : "end", kind, nearest->name, size_t(nearest->high - nearest->low));
}

static Region& find(Address a, size_t n, Access access, u32 where) {
  if (last_region < regions.size()) {
    Region& r = regions[last_region];
    if (a >= r.low && a + n <= r.high) return r;
  }
  for (size_t i = 0; i < regions.size(); i++) {
    Region& r = regions[i];
    if (a >= r.low && a + n <= r.high) {
      last_region = i;
      return r;
    }
  }
  out_of_bounds(a, n, access, where);
}

static void check(const void* address, size_t n, Access access, u32 where) {
  const Address a = Address(address);
  const Thread& t = me();
  if (a - t.stack < STACK || n == 0) return;
  // threadIdx and the like are read from here.
  if (a == Address(&current) || a - Address(current) < sizeof(ThreadView) || a - Address(t.block) < sizeof(BlockView)) return;
  Region& r = find(a, n, access, where);
  if (r.space == MODULE) return;
  if (launch_.dependent && !t.waited && r.space == GLOBAL && (access != READ || r.fresh))
    fail("%s %s at @%x@ before grid_dependency_wait(), in a dependent launch", verb(access), (const char*)place(r, a), where);
  if (r.constant) {
    if (access != READ) fail("%s %s at @%x@, which the kernel declares const", verb(access), (const char*)place(r, a), where);
    return;
  }
  if (r.block && r.block != t.home && launch_.kernel->cluster == 1) fail("%s another block's shared memory at @%x@", verb(access), where);
  each_cell(r, a, n, [&](Cell& cell, Address p) { visit(cell, r, p, access, where); });
}

void touch(const void* address, unsigned bytes, Access access, void* caller) {
  if (Address(address) % bytes) fail("%s %u bytes at a misaligned address (0x%zx) at @%x@", verb(access), bytes, size_t(Address(address)), offset(caller));
  if (launch_.checked) check(address, bytes, access, offset(caller));
}

static void check_unwritten(Block& b) {
  if (!b.unwritten) return;
  current = b.unwritten;
  b.unwritten = nullptr;
  fail("reads %s at @%x@, which no thread of this block had written", (const char*)b.unwritten_place, b.unwritten_where);
}

// What `from` has done so far is ordered before what `to` does next.
static void learn(u32* to, const u32* from, u32 low, u32 high) {
  for (u32 i = low; i < high; i++) to[i] = std::max(to[i], from[i]);
}
static void tick(Thread& t) { t.knows[t.id] = ++t.clock; }

static void order_warp(Warp& w, u32 mask) {
  Block& b = *w.lanes[__builtin_ctz(mask)]->home;
  const u32 warp = u32(&w - b.warps.data());
  const u32 low = b.wide ? 0 : warp * 32, high = b.wide ? b.count : std::min(b.count, low + 32);
  static u32 joined[1024];
  std::memset(joined + low, 0, (high - low) * sizeof(u32));
  for (u32 m = mask; m; m &= m - 1) learn(joined, w.lanes[__builtin_ctz(m)]->knows, low, high);
  for (u32 m = mask; m; m &= m - 1) {
    Thread& t = *w.lanes[__builtin_ctz(m)];
    std::memcpy(t.knows + low, joined + low, (high - low) * sizeof(u32));
    tick(t);
  }
}

// ---------------------------------------------------------------- scheduling
static inline void enqueue(Warp& w) {
  if (!w.queued && w.ready) {
    w.queued = true;
    ready_warps.push_back(&w);
  }
}
static inline void make_ready(Thread& t) {
  t.state = READY;
  t.warp->ready |= 1u << t.lane;
  enqueue(*t.warp);
}

static inline Thread* choose(Warp* w) {
  if (__builtin_expect(!w->ready, 0)) {
    do {
      if (ready_warps.empty()) return nullptr;
      const u32 i = draw(u32(ready_warps.size()));
      w = ready_warps[i];
      ready_warps[i] = ready_warps.back();
      ready_warps.pop_back();
      w->queued = false;
    } while (!w->ready);
  }
  const u32 r = draw() & 31, turned = w->ready >> r | w->ready << (-r & 31);
  const u32 lane = (u32(__builtin_ctz(turned)) + r) & 31;
  w->ready &= ~(1u << lane);
  return w->lanes[lane];
}

static void body();
static void frame(Thread& t) {
  // Tops are spread over the cache's sets: equal low address bits would make all threads share one.
  void** top = reinterpret_cast<void**>(t.stack + STACK - 64 - (t.id % 61) * 64) - FRAME_WORDS;
  std::memset(static_cast<void*>(top), 0, FRAME_WORDS * sizeof(void*));
  top[RETURN_WORD] = reinterpret_cast<void*>(&body);
  t.stack_pointer = top;
}
static inline void resume(Thread* to, void** save) {
  if (!to->stack_pointer) frame(*to);
  switches++;
  current = to;
  emulator_switch(save, to->stack_pointer);
}

// Runs others, of the same warp first; returns when this thread is made ready and chosen again.
static inline void wait(Thread& t) {
  Thread* to = choose(t.warp);
  if (!to) deadlock();
  if (to != &t) resume(to, &t.stack_pointer);
}

// Runs others of any warp: what this one waits for may be another's to do.
void yield() {
  Thread& t = me();
  make_ready(t);
  Warp none = {};
  Thread* to = choose(&none);
  if (to != &t) resume(to, &t.stack_pointer);
}

// Returns in the thread that is chosen next, if that has not begun: it does so on this stack.
static void leave() {
  Thread& t = me();
  Block& b = *t.home;
  Warp& w = *t.warp;
  if (launch_.dependent && !t.waited) fail("leaves without grid_dependency_wait(), in a dependent launch");
  if (launch_.checked && !t.copies.empty()) fail("leaves with the asynchronous copy issued at @%x@ not waited for", t.copies[0].where);
  for (u32 m = w.waiting; m; m &= m - 1) {
    const Thread& other = *w.lanes[__builtin_ctz(m)];
    if (other.mask >> t.lane & 1) fail("leaves the kernel while %s waits for it in %s", (const char*)thread_name(other), (const char*)wait_name(other));
  }
  if (b.arrived || grid_arrived)
    for (const Thread& other : b.threads_)
      if (other.state == AT_BARRIER || other.state == AT_GRID_BARRIER)
        fail("leaves the kernel without the barrier that %s waits for: %s", (const char*)thread_name(other), (const char*)wait_name(other));
  launched_early |= t.early;
  t.state = GONE;
  w.alive &= ~(1u << t.lane);
  if (++b.gone == b.count && launch_.checked) check_unwritten(b);
  if (--unfinished == 0) {
    current = nullptr;
    emulator_switch(&t.stack_pointer, main_stack_pointer);
  }
  Thread* to = choose(&w);
  if (!to) deadlock();
  if (to->stack_pointer) resume(to, &t.stack_pointer);
  std::swap(t.stack, to->stack);
  switches++;
  current = to;
}

static void body() {
  for (;;) {
    launch_.kernel->call(arguments);
    leave();
  }
}

// ---------------------------------------------------------------- barriers
static void release(Block& b) {
  for (Warp& w : b.warps) {
    w.ready = w.alive;
    enqueue(w);
  }
  for (Thread& t : b.threads_) {
    t.state = READY;
    t.value = b.votes;  // a thread of the next barrier may reset the block's count before all have looked
  }
  if (launch_.checked) {
    check_unwritten(b);
    new_epoch(b);
  }
}

[[noreturn]] static void some_left(const Block& b, const Thread& t) {
  for (const Thread& other : b.threads_)
    if (other.state == GONE) fail("waits in %s, which %s left the kernel without (%u of %u threads left)", (const char*)wait_name(t), (const char*)thread_name(other), b.gone, b.count);
  std::abort();
}
[[noreturn]] static void divergent(const Block& b, const Thread& t) {
  for (const Thread& other : b.threads_)
    if (other.state == AT_BARRIER && &other != &t)
      fail("divergent barrier: waits in %s, while %s waits in %s", (const char*)wait_name(t), (const char*)thread_name(other), (const char*)wait_name(other));
  std::abort();
}

int block_barrier(int predicate, Collective op, const char* file, int line) {
  Thread& t = me();
  Block& b = *t.home;
  t.file = file;
  t.line = line;
  t.state = AT_BARRIER;
  if (b.gone) some_left(b, t);
  if (b.arrived && (b.line != line || b.op != op || b.file != file)) divergent(b, t);
  if (!b.arrived) b.votes = 0;
  b.line = line;
  b.file = file;
  b.op = op;
  b.votes += u32(predicate);
  if (++b.arrived == b.count) {
    b.arrived = 0;
    release(b);
  }
  wait(t);  // also the last one to arrive: it gets no head start
  return op == ADD ? int(t.value) : op == AND ? t.value == b.count : t.value != 0;
}

// Of the threads of all blocks that are there.
static void barrier_of_all(const char* file, int line, bool grid) {
  Thread& t = me();
  const u64 threads = u64(resident.size()) * t.home->count;
  t.file = file;
  t.line = line;
  t.state = AT_GRID_BARRIER;
  for (Block* b : resident)
    if (b->gone) fail("waits in %s, which other threads left the kernel without", (const char*)wait_name(t));
  if (++grid_arrived == threads) {
    grid_arrived = 0;
    if (grid) grid_epoch = epochs - 1;
    for (Block* b : resident) release(*b);
  }
  wait(t);
}

void grid_barrier(const char* file, int line) {
  const u64 blocks = u64(launch_.grid[0]) * launch_.grid[1] * launch_.grid[2];
  if (blocks != resident.size()) fail("grid barrier at %s:%d in a launch that is not cooperative", file, line);
  barrier_of_all(file, line, true);
}

// Global memory is not watched across it: blocks of a cluster count as unordered there.
void cluster_barrier(const char* file, int line) {
  if (launch_.cooperative) fail("cluster barrier at %s:%d in a cooperative launch", file, line);
  barrier_of_all(file, line, false);
}

void* cluster_map(void* shared, unsigned rank) {
  const Block& b = *me().home;
  if (rank >= unsigned(launch_.kernel->cluster)) fail("block %u of a cluster of %d", rank, launch_.kernel->cluster);
  const Address a = Address(shared);
  const bool dynamic = a - Address(b.dynamic) < SHARED;
  const Block& other = *resident[rank];
  return dynamic ? other.dynamic + (a - Address(b.dynamic)) : other.statics + (a - Address(b.statics));
}

void fence() {
  if (launch_.checked) fenced_serial[me().home->serial - launch_serial] = true;
  yield();
}

// ---------------------------------------------------------------- warp operations
static float decode(u32 bits, bool bf16) {
  if (bf16) return unpack<float>(bits << 16);
  __half_raw raw;
  raw.x = u16(bits);
  return __half2float(__half(raw));
}

static void multiply(Warp& w) {
  float a[16][16], b[16][8];
  const Mma* operands[32];
  for (int lane = 0; lane < 32; lane++) {
    const Mma& m = *(operands[lane] = unpack<const Mma*>(w.lanes[lane]->value));
    const int g = lane >> 2, t = lane & 3;
    for (int i = 0; i < 4; i++)
      for (int h = 0; h < 2; h++) a[g + 8 * (i & 1)][2 * t + h + 8 * (i >> 1)] = decode(m.a[i] >> (16 * h) & 0xffff, m.bf16);
    for (int i = 0; i < 2; i++)
      for (int h = 0; h < 2; h++) b[2 * t + h + 8 * i][g] = decode((i ? m.b1 : m.b0) >> (16 * h) & 0xffff, m.bf16);
  }
  for (int row = 0; row < 16; row++) {
    double sum[8] = {};
    for (int k = 0; k < 16; k++)
      for (int column = 0; column < 8; column++) sum[column] += double(a[row][k]) * double(b[k][column]);
    for (int column = 0; column < 8; column++) {
      float& d = operands[(row & 7) * 4 + (column >> 1)]->d[(row >> 3) * 2 + (column & 1)];
      d = float(double(d) + sum[column]);
    }
  }
}

static void load_matrices(Warp& w) {
  const Thread* keep = &me();
  const Ldmatrix& all = *unpack<const Ldmatrix*>(keep->value);
  u16 matrix[8][8];
  for (int i = 0; i < all.count; i++) {
    for (int row = 0; row < 8; row++) {
      Thread& t = *w.lanes[8 * i + row];
      const Ldmatrix& m = *unpack<const Ldmatrix*>(t.value);
      current = &t;
      if (Address(m.row) % 16) fail("ldmatrix at @%x@ reads a row at a misaligned address (0x%zx)", t.where, size_t(Address(m.row)));
      if (launch_.checked) check(m.row, 16, READ, t.where);
      std::memcpy(matrix[row], m.row, 16);
    }
    for (int lane = 0; lane < 32; lane++) {
      const int g = lane >> 2, t = lane & 3;
      const u32 lo = all.transposed ? matrix[2 * t][g] : matrix[g][2 * t], hi = all.transposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
      unpack<const Ldmatrix*>(w.lanes[lane]->value)->r[i] = lo | hi << 16;
    }
  }
  current = const_cast<Thread*>(keep);
}

// All lanes of the mask are here: every lane's `value` becomes its result.
__attribute__((noinline)) static void finish(Warp& w, u32 mask, Collective op) {
  u64 in[32];
  for (u32 m = mask; m; m &= m - 1) {
    Thread& t = *w.lanes[__builtin_ctz(m)];
    in[t.lane] = t.value;
    t.state = READY;
  }
  u64 all = 0;
  switch (op) {
    case SYNC:
      if (launch_.checked) order_warp(w, mask);
      return;
    case MMA: return multiply(w);
    case LDMATRIX: return load_matrices(w);
    case SHUFFLE:
      for (u32 m = mask; m; m &= m - 1) {
        Thread& t = *w.lanes[__builtin_ctz(m)];
        if (!(mask >> t.source & 1)) {
          current = &t;
          fail("shuffle at @%x@ reads lane %u, which mask 0x%08x does not name or the warp does not have", t.where, t.source, t.mask);
        }
        t.value = in[t.source];
      }
      return;
    case MATCH:
      for (u32 m = mask; m; m &= m - 1) {
        u64 same = 0;
        for (u32 o = mask; o; o &= o - 1) same |= u64(in[__builtin_ctz(o)] == in[__builtin_ctz(m)]) << __builtin_ctz(o);
        w.lanes[__builtin_ctz(m)]->value = same;
      }
      return;
    case BALLOT:
      for (u32 m = mask; m; m &= m - 1) all |= in[__builtin_ctz(m)] << __builtin_ctz(m);
      break;
    default:
      all = in[__builtin_ctz(mask)];
      for (u32 m = mask & (mask - 1); m; m &= m - 1) {
        const u64 v = in[__builtin_ctz(m)];
        switch (op) {
          case ADD: all += v; break;
          case MIN_SIGNED: all = u32(std::min(int(all), int(v))); break;
          case MAX_SIGNED: all = u32(std::max(int(all), int(v))); break;
          case MIN_UNSIGNED: all = std::min(all, v); break;
          case MAX_UNSIGNED: all = std::max(all, v); break;
          case AND: all &= v; break;
          case OR: all |= v; break;
          default: all ^= v;
        }
      }
  }
  for (u32 m = mask; m; m &= m - 1) w.lanes[__builtin_ctz(m)]->value = all;
}

[[noreturn]] static void missing_lane(const Warp& w, u32 lanes) {
  const Thread& t = me();
  const u32 lane = u32(__builtin_ctz(lanes));
  fail("warp operation at @%x@ with mask 0x%08x names lane %u, which %s", t.where, t.mask, lane, w.exist >> lane & 1 ? "has left the kernel" : "the block does not have");
}
// A waiting lane that names this one must do the same; one that does not may join this operation later.
__attribute__((noinline)) static void meet(const Warp& w, const Thread& t) {
  for (u32 peers = w.waiting & t.mask; peers; peers &= peers - 1) {
    const Thread& other = *w.lanes[__builtin_ctz(peers)];
    if (other.mask == t.mask && other.op == t.op) break;
    if (other.mask >> t.lane & 1)
      fail("%s with mask 0x%08x at @%x@ meets a different one: %s waits in %s", t.op == SHUFFLE ? "shuffle" : "warp operation", t.mask, t.where, (const char*)thread_name(other), (const char*)wait_name(other));
  }
}
__attribute__((noinline)) static bool all_alike(const Warp& w, const Thread& t, u32 need) {
  for (u32 m = need; m; m &= m - 1) {
    const Thread& other = *w.lanes[__builtin_ctz(m)];
    if (other.mask != t.mask || other.op != t.op) return false;
  }
  return true;
}

u64 collective(unsigned mask, Collective op, u64 value, unsigned source) {
  Thread& t = me();
  Warp& w = *t.warp;
  t.mask = mask;
  t.op = op;
  t.value = value;
  t.source = source & 31;
  t.where = CALLER;
  t.state = IN_WARP;
  const u32 bit = 1u << t.lane;
  if (!(mask & bit)) fail("warp operation at @%x@ with mask 0x%08x, which leaves out the calling lane %u", t.where, mask, t.lane);
  // Lanes that a block of such a size never had may be named; `mma` and `ldmatrix` need them all.
  const u32 need = op >= MMA ? mask : mask & w.exist;
  if (need & ~w.alive) missing_lane(w, need & ~w.alive);
  if (!w.waiting) {
    w.mask = mask;
    w.op = op;
    w.alike = true;
  } else if (!w.alike || w.mask != mask || w.op != op) {
    w.alike = false;
    meet(w, t);
  }
  w.waiting |= bit;
  if ((w.waiting & need) == need && (w.alike || all_alike(w, t, need))) {
    finish(w, need, op);
    w.waiting &= ~need;
    w.ready |= need;
    enqueue(w);
  }
  wait(t);
  return t.value;
}

// ---------------------------------------------------------------- asynchronous copies
static void deliver(const Copy& c) {
  std::memcpy(c.to, c.from, size_t(c.bytes));
  std::memset(c.to + c.bytes, 0, size_t(c.size - c.bytes));
}
static void restamp(const Copy& c, const Record& stamp) {
  Region& r = find(Address(c.to), size_t(c.size), WRITE, c.where);
  each_cell(r, Address(c.to), size_t(c.size), [&](Cell& cell, Address) { cell.write = stamp; });
}
static Copy issue(void* shared, const void* global, int size, int bytes, u32 group, u32 where, int align) {
  Thread& t = me();
  if (bytes < 0 || bytes > size) fail("asynchronous copy at @%x@ of %d bytes into %d", where, bytes, size);
  if (Address(shared) % align || (bytes && Address(global) % align))
    fail("asynchronous copy at @%x@ from 0x%zx to 0x%zx: both must be aligned to %d bytes", where, size_t(Address(global)), size_t(Address(shared)), align);
  Copy c{static_cast<unsigned char*>(shared), static_cast<const unsigned char*>(global), size, bytes, group, where};
  if (launch_.checked) {
    if (bytes) check(global, size_t(bytes), READ, where);
    check(shared, size_t(size), WRITE, where);
    restamp(c, Record{where, t.home->epoch, t.clock, u16(t.id), FLAG_PENDING});
  }
  return c;
}

void copy_async(void* shared, const void* global, int size, int bytes) {
  Thread& t = me();
  t.copies.push_back(issue(shared, global, size, bytes, t.groups, CALLER, size));
}
void copy_commit() { me().groups++; }
void copy_wait(unsigned newest) {
  Thread& t = me();
  size_t done = 0;
  while (done < t.copies.size() && t.copies[done].group + newest < t.groups) {
    const Copy& c = t.copies[done++];
    deliver(c);
    if (launch_.checked) restamp(c, Record{c.where, t.home->epoch, t.clock, u16(t.id), 0});
  }
  t.copies.erase(t.copies.begin(), t.copies.begin() + long(done));
}

static Mbarrier& mbarrier(void* barrier, u32 where) {
  auto& all = me().home->mbarriers;
  const auto found = all.find(barrier);
  if (found == all.end()) fail("mbarrier used at @%x@ is not initialised", where);
  return found->second;
}
static void settle(void* address, Mbarrier& bar) {
  if (bar.pending || bar.bytes) return;
  bar.phase++;
  bar.pending = bar.count;
  for (Thread& t : me().home->threads_)
    if (t.state == AT_MBARRIER && t.mbarrier == address) make_ready(t);
}
static void deliver_all(void* address, Mbarrier& bar) {
  std::vector<Copy> copies;
  copies.swap(bar.copies);
  for (const Copy& c : copies) {
    deliver(c);
    bar.bytes -= c.bytes;
    // `group` and `where` keep the issuing thread and its clock: whoever waits learns of that clock.
    if (launch_.checked) {
      Thread& issuer = me().home->threads_[c.group];
      restamp(c, Record{c.where, me().home->epoch, bar.knows[c.group], u16(issuer.id), 0});
    }
  }
  if (!copies.empty()) settle(address, bar);
}

void mbarrier_init(void* barrier, unsigned count) {
  Block& b = *me().home;
  b.mbarriers[barrier] = Mbarrier{count, count, 0, 0, {}, std::vector<u32>(launch_.checked ? b.count : 0)};
  b.wide = true;
}
void mbarrier_arrive(void* barrier, unsigned bytes) {
  Mbarrier& bar = mbarrier(barrier, CALLER);
  Thread& t = me();
  if (!bar.pending) fail("mbarrier at @%x@ gets more arrivals than the %u it was initialised with", CALLER, bar.count);
  if (launch_.checked) {
    learn(bar.knows.data(), t.knows, 0, t.home->count);
    tick(t);
  }
  bar.bytes += bytes;
  bar.pending--;
  settle(barrier, bar);
}
void copy_bulk(void* shared, const void* global, unsigned bytes, void* barrier) {
  Thread& t = me();
  const u32 where = CALLER;
  Mbarrier& bar = mbarrier(barrier, where);
  if (bytes % 16) fail("bulk copy at @%x@ of %u bytes, which is not a multiple of 16", where, bytes);
  bar.copies.push_back(issue(shared, global, int(bytes), int(bytes), t.id, where, 16));
  if (launch_.checked) {
    bar.knows[t.id] = std::max(bar.knows[t.id], t.clock);
    tick(t);
  }
  for (const Thread& other : t.home->threads_)
    if (other.state == AT_MBARRIER && other.mbarrier == barrier) return deliver_all(barrier, bar);
}
void mbarrier_wait(void* barrier, unsigned parity) {
  Thread& t = me();
  t.where = CALLER;
  Mbarrier& bar = mbarrier(barrier, t.where);
  if ((bar.phase & 1) == parity) deliver_all(barrier, bar);
  while ((bar.phase & 1) == parity) {
    t.state = AT_MBARRIER;
    t.mbarrier = barrier;
    wait(t);
  }
  if (launch_.checked) learn(t.knows, bar.knows.data(), 0, t.home->count);
}

// ---------------------------------------------------------------- shared memory
void* shared_slot(const void* table, int slot) {
  Block& b = *me().home;
  const Slot& s = static_cast<const Slot*>(table)[slot];
  unsigned char* memory = b.statics + s.offset;
  if (b.slot_serial.size() <= size_t(slot)) b.slot_serial.resize(size_t(slot) + 1);
  if (b.slot_serial[slot] != b.serial) {
    b.slot_serial[slot] = b.serial;
    std::memset(memory, 0xff, size_t(s.bytes));
    if (launch_.checked) {
      const Address low = Address(memory);
      bool known = false;
      for (const Region& r : regions) known |= r.low == low;
      if (!known) regions.push_back({low, low + Address(s.bytes), Address(b.statics), STATIC, shared_shadow(b.statics, launch_.static_bytes + 4096), &b, s.text, 0, 0});
    }
  }
  return memory;
}

// ---------------------------------------------------------------- launching
static unsigned char* map(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("no memory for %zu bytes", bytes);
  return static_cast<unsigned char*>(p);
}

// Stacks are kept for all later launches. Below each lies a page that may not be touched.
static std::vector<Address> stacks;
static Address stack_of(size_t i) {
  while (stacks.size() <= i) {
    unsigned char* p = map(STACK + PAGE);
    mprotect(p, PAGE, PROT_NONE);
    stacks.push_back(Address(p) + PAGE);
  }
  return stacks[i];
}

static void prepare(Block& b, u32 linear, size_t first_stack) {
  b.index = {linear % launch_.grid[0], linear / launch_.grid[0] % launch_.grid[1], linear / launch_.grid[0] / launch_.grid[1]};
  b.threads = dim3(launch_.block[0], launch_.block[1], launch_.block[2]);
  b.grid = dim3(launch_.grid[0], launch_.grid[1], launch_.grid[2]);
  b.serial = ++serials;
  b.arrived = b.gone = 0;
  b.wide = false;
  b.unwritten = nullptr;
  b.mbarriers.clear();
  fenced_serial.push_back(false);
  if (launch_.shared_bytes) std::memset(b.dynamic, 0xff, launch_.shared_bytes);
  if (launch_.checked) {
    b.first_epoch = new_epoch(b);
    if (b.clocks.size() != size_t(b.count) * b.count) b.clocks.assign(size_t(b.count) * b.count, 0);
  }
  for (Warp& w : b.warps) {
    w.alive = w.ready = w.exist;
    w.waiting = 0;
    w.queued = false;
    enqueue(w);
  }
  for (u32 i = 0; i < b.count; i++) {
    Thread& t = b.threads_[i];
    t.stack = stack_of(first_stack + i);
    t.stack_pointer = nullptr;
    t.state = READY;
    t.copies.clear();
    t.groups = 0;
    t.waited = t.early = false;
    if (launch_.checked) {
      t.knows = b.clocks.data() + size_t(i) * b.count;
      tick(t);
    }
  }
}

static void shape(Block& b, u32 count, size_t static_bytes) {
  if (!b.dynamic) b.dynamic = map(SHARED);
  static std::unordered_map<Block*, size_t> capacity;
  if (capacity[&b] < static_bytes) {
    if (b.statics) munmap(b.statics, capacity[&b]);
    delete shared_shadows[b.statics];
    shared_shadows.erase(b.statics);
    b.statics = map(capacity[&b] = (static_bytes + PAGE - 1) / PAGE * PAGE);
  }
  b.slot_serial.clear();
  const dim3 size(launch_.block[0], launch_.block[1], launch_.block[2]);
  const bool same = b.count == count && b.threads.x == size.x && b.threads.y == size.y && b.threads.z == size.z;
  if (same) return;
  b.count = count;
  b.threads_.resize(count);
  b.warps.resize((count + 31) / 32);
  b.clocks.clear();
  for (Warp& w : b.warps) w = {};
  for (u32 i = 0; i < count; i++) {
    Thread& t = b.threads_[i];
    t.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    t.lane = i % 32;
    t.id = i;
    t.block = &b;
    t.home = &b;
    t.warp = &b.warps[i / 32];
    t.clock = 0;
    t.warp->lanes[t.lane] = &t;
    t.warp->exist |= 1u << t.lane;
  }
}

static void on_signal(int number, siginfo_t* info, void* context) {
#if defined(__x86_64__)
  const Address pc = Address(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#else
  const Address pc = Address(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#endif
  const Address a = Address(info->si_addr);
  // One more than the address: the loader takes all addresses for return addresses.
  const u32 where = offset(reinterpret_cast<void*>(pc + 1));
  if (current && number == SIGSEGV && a - (me().stack - PAGE) < PAGE) fail("overflows its stack of %zu KB at @%x@", STACK >> 10, where);
  if (number == SIGFPE) fail("divides an integer by zero at @%x@", where);
  if (number == SIGILL) fail("executes what cannot be reached at @%x@", where);
  fail("touches address 0x%zx, which is not mapped, at @%x@", size_t(a), where);
}

// The handlers are ours only while a kernel runs; they need a stack that an overflowing fiber cannot spoil.
struct Signals {
  static constexpr int numbers[4] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  struct sigaction old[4];
  stack_t old_stack;
  Signals() {
    alignas(16) static unsigned char memory[64 << 10];
    stack_t stack = {};
    stack.ss_sp = memory;
    stack.ss_size = sizeof memory;
    sigaltstack(&stack, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; i++) sigaction(numbers[i], &action, &old[i]);
  }
  ~Signals() {
    for (int i = 0; i < 4; i++) sigaction(numbers[i], &old[i], nullptr);
    sigaltstack(&old_stack, nullptr);
  }
};

static void add_module(Address inside) {
  dl_iterate_phdr([](dl_phdr_info* info, size_t, void* data) {
    const Address a = *static_cast<Address*>(data);
    bool here = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
      const auto& h = info->dlpi_phdr[i];
      here |= h.p_type == PT_LOAD && a - (info->dlpi_addr + h.p_vaddr) < h.p_memsz;
    }
    if (!here) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
      const auto& h = info->dlpi_phdr[i];
      const Address low = info->dlpi_addr + h.p_vaddr;
      if (h.p_type == PT_LOAD) regions.push_back({low, low + h.p_memsz, low, MODULE, nullptr, nullptr, "module", 0, 0});
    }
    return 1;
  }, &inside);
}

// Arguments that overlap become one region; it is constant, or an output, if all of them are.
static void add_buffers(const Buffer* buffers, int count) {
  std::vector<Buffer> sorted(buffers, buffers + count);
  std::sort(sorted.begin(), sorted.end(), [](const Buffer& a, const Buffer& b) { return a.data < b.data; });
  const size_t first = regions.size();
  for (const Buffer& b : sorted) {
    const Address low = Address(b.data), high = low + b.bytes;
    if (!b.bytes) continue;
    if (regions.size() > first && low < regions.back().high) {
      Region& r = regions.back();
      r.high = std::max(r.high, high);
      if (r.constant && !b.constant) r.name = b.name;
      r.constant &= b.constant;
      r.output &= b.output;
      r.fresh |= b.fresh;
    } else {
      regions.push_back({low, high, low & ~Address(3), GLOBAL, nullptr, nullptr, b.name, b.constant, b.output, b.fresh});
    }
  }
  for (size_t i = first; i < regions.size(); i++) {
    Region& r = regions[i];
    if (r.constant) continue;
    global_shadows.push_back(r.shadow = new Shadow(r.high - r.base));
  }
}

static void check_outputs() {
  current = nullptr;
  for (Region& r : regions) {
    if (!r.output) continue;
    size_t missing = 0, first = 0;
    for (Address a = r.low; a < r.high; a++) {
      const size_t byte = a - r.base;
      const Cell& cell = r.shadow->split[byte / 4] ? r.shadow->bytes[byte] : r.shadow->words[byte / 4];
      if (cell.write.epoch < launch_epoch && !missing++) first = a - r.low;
    }
    if (missing)
      fail("output `%s` is not written whole: %zu of %zu bytes are missing, the first is byte %zu; the kernel is at @%x@", r.name, missing,
           size_t(r.high - r.low), first, offset(const_cast<char*>(static_cast<const char*>(launch_.kernel->address)) + 1));
  }
}

static void run(const std::vector<u32>& order, size_t group) {
  const u32 count = launch_.block[0] * launch_.block[1] * launch_.block[2];
  resident.clear();
  for (size_t i = 0; i < group; i++) {
    if (spare.size() <= i) spare.push_back(new Block());
    shape(*spare[i], count, launch_.static_bytes);
    resident.push_back(spare[i]);
    if (launch_.checked && launch_.shared_bytes) {
      const Address low = Address(spare[i]->dynamic);
      regions.push_back({low, low + launch_.shared_bytes, low, DYNAMIC, shared_shadow(spare[i]->dynamic, SHARED), spare[i], "dynamic", 0, 0});
    }
  }
  for (size_t next = 0; next < order.size(); next += group) {
    ready_warps.clear();
    grid_arrived = 0;
    for (size_t i = 0; i < group; i++) prepare(*resident[i], order[next + i], i * count);
    unfinished = u32(group) * count;
    Warp none = {};
    resume(choose(&none), &main_stack_pointer);
  }
}

static void launch(const Buffer* buffers, int buffer_count) {
  regions.clear();
  epoch_block.clear();
  fenced_serial.clear();
  launch_epoch = epochs;
  launch_serial = serials + 1;
  grid_epoch = last_region = 0;
  launched_early = false;
  Dl_info module;
  if (!dladdr(launch_.kernel->address, &module)) std::abort();
  module_base = Address(module.dli_fbase);
  if (launch_.checked) {
    add_buffers(buffers, buffer_count);
    add_module(Address(launch_.kernel->address));
  }
  const size_t blocks = size_t(launch_.grid[0]) * launch_.grid[1] * launch_.grid[2];
  const size_t cluster = size_t(launch_.kernel->cluster), clusters = blocks / cluster;
  std::vector<u32> order(clusters);
  for (size_t i = 0; i < clusters; i++) {
    const u32 j = draw(u32(i) + 1);
    order[i] = order[j];
    order[j] = u32(i);
  }
  std::vector<u32> each;
  for (u32 first : order)
    for (size_t i = 0; i < cluster; i++) each.push_back(u32(first * cluster + i));
  run(each, launch_.cooperative ? blocks : cluster);
  if (launch_.checked) check_outputs();
}

}  // namespace emulator

using namespace emulator;

extern "C" {

// Of the last launch: whether the one behind it may begin before the ones in front of it have ended.
int emulator_launched_early() { return launched_early; }

// Returns 0, or 1 with the reason in `text`.
int emulator_launch(const Launch* what, void** args, const Buffer* buffers, int buffer_count, char* text, size_t text_size) {
  launch_ = *what;
  arguments = args;
  message = text;
  message_size = text_size;
  random_state = (launch_.seed + 1) * 0x9e3779b97f4a7c15ull | 1;
  Signals signals;
  const int failed = sigsetjmp(escape, 1);
  if (!failed) launch(buffers, buffer_count);
  current = nullptr;
  for (Shadow* s : global_shadows) delete s;
  global_shadows.clear();
  return failed;
}

unsigned long long emulator_switches() { return switches; }

// What -fsanitize=thread emits before each load and store.
#define HOOK(name, size, access) \
  void __tsan_##name##size(void* p) { if (current) check(p, size, access, CALLER); }
#define HOOKS(size) HOOK(read, size, READ) HOOK(write, size, WRITE) HOOK(unaligned_read, size, READ) HOOK(unaligned_write, size, WRITE)
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read_range(void* p, size_t n) { if (current) check(p, n, READ, CALLER); }
void __tsan_write_range(void* p, size_t n) { if (current) check(p, n, WRITE, CALLER); }
void __tsan_init() {}
// Clang's, in place of the C functions.
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  if (current) check(from, n, READ, CALLER), check(to, n, WRITE, CALLER);
  return std::memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  if (current) check(from, n, READ, CALLER), check(to, n, WRITE, CALLER);
  return std::memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  if (current) check(to, n, WRITE, CALLER);
  return std::memset(to, value, n);
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}

// What -fsanitize=undefined emits: each is handed a description that begins with file, line and column.
struct Place { const char* file; u32 line, column; };
#define UNDEFINED(name, what) \
  void __ubsan_handle_##name(const Place* p) { fail("undefined: %s at %s:%u", what, p->file, p->line); }
UNDEFINED(add_overflow, "signed overflow of an addition")
UNDEFINED(sub_overflow, "signed overflow of a subtraction")
UNDEFINED(mul_overflow, "signed overflow of a multiplication")
UNDEFINED(negate_overflow, "signed overflow of a negation")
UNDEFINED(divrem_overflow, "integer division by zero, or its overflow")
UNDEFINED(shift_out_of_bounds, "a shift by a negative or too large number of bits")
UNDEFINED(out_of_bounds, "an index outside its array")
UNDEFINED(builtin_unreachable, "a point that cannot be reached")
UNDEFINED(missing_return, "a function ends without its value")
UNDEFINED(vla_bound_not_positive, "an array of no positive size")
UNDEFINED(load_invalid_value, "a bool or enum with an impossible value")
UNDEFINED(float_cast_overflow, "a float too large for its integer type")
UNDEFINED(pointer_overflow, "pointer arithmetic that wraps around")
UNDEFINED(nonnull_arg, "a null pointer where none may be")
struct Mismatch { Place place; const void* type; unsigned char log_align, kind; };
void __ubsan_handle_type_mismatch_v1(const Mismatch* m, Address a) {
  if (a < PAGE) fail("null pointer used at %s:%u", m->place.file, m->place.line);
  const size_t align = size_t(1) << m->log_align;
  if (a % align) fail("misaligned access at %s:%u: address 0x%zx is no multiple of %zu", m->place.file, m->place.line, size_t(a), align);
  fail("access outside an object at %s:%u", m->place.file, m->place.line);
}

}
