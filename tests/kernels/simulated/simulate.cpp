// The fibers of simulate.h.
//
// A fiber is started once and then runs one kernel after another; each block uses as many fibers as
// it has threads. Warps run one after the other from barrier to barrier, their threads from one
// warp operation to the next. Fibers switch with _setjmp and _longjmp, which make no system calls
// (swapcontext() does, for signals). glibc's checks of longjmp know only one stack, so they are
// switched off for this file.
#undef _FORTIFY_SOURCE

#include "kernels/simulated/simulate.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simulate {
namespace {

constexpr size_t kMostThreads = 1024;
// The odd part keeps stacks off the same cache lines.
constexpr size_t kStackBytes = (64 << 10) + 576;

enum class State : uint8_t { kRuns, kAtBarrier, kAtWarp, kEnded };

// Fibers by thread number, shared by all blocks; each is created when a block first needs it.
struct Fibers {
  State state[kMostThreads];
  uint3 thread[kMostThreads];
  uint64_t given[kMostThreads];  // to the warp operation it waits in
  uint64_t taken[kMostThreads];  // what was given to its warp's last operation
  uint32_t present[kMostThreads / kWarp];
  jmp_buf* place[kMostThreads];  // where it resumes, on its stack; null: not started
  std::unique_ptr<char[]> stacks =
      std::make_unique_for_overwrite<char[]>(kMostThreads * kStackBytes);
};

Fibers& fibers() {
  static Fibers all{};
  return all;
}

size_t threads = 0;  // per block
size_t current = 0;
jmp_buf scheduler;
const std::function<void()>* kernel = nullptr;
bool reversed = false;

[[noreturn]] void fail(const char* what, size_t number) {
  std::fprintf(stderr, "simulate: %s (%zu; block %u %u %u)\n", what, number, blockIdx.x, blockIdx.y,
               blockIdx.z);
  std::abort();
}

void stop(State state) {
  jmp_buf here;
  fibers().place[current] = &here;
  fibers().state[current] = state;
  if (_setjmp(here) == 0) _longjmp(scheduler, 1);
}

void run_kernels() {  // the body of a fiber: one kernel after the other
  for (;;) {
    (*kernel)();
    stop(State::kEnded);
  }
}

void begin(size_t number) {
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fibers().stacks.get() + number * kStackBytes;
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, run_kernels, 0);
  setcontext(&context);
}

void go_on(size_t number) {
  current = number;
  threadIdx = fibers().thread[number];
  if (_setjmp(scheduler) != 0) return;  // it stopped
  if (fibers().place[number])
    _longjmp(*fibers().place[number], 1);
  else
    begin(number);
}

// Runs the threads of a warp until each one waits for the block or has ended.
void run_warp(size_t first) {
  Fibers& all = fibers();
  const size_t count = std::min<size_t>(kWarp, threads - first);
  for (;;) {
    for (size_t i = 0; i < count; ++i) {
      const size_t number = first + (reversed ? count - 1 - i : i);
      if (all.state[number] == State::kRuns) go_on(number);
    }
    uint32_t waiting = 0;
    bool elsewhere = false;
    for (size_t i = 0; i < count; ++i) {
      if (all.state[first + i] == State::kAtWarp) waiting |= 1u << i;
      if (all.state[first + i] == State::kAtBarrier) elsewhere = true;
    }
    if (waiting == 0) return;
    if (elsewhere) fail("threads of a warp wait in different places; the warp of thread", first);
    all.present[first / kWarp] = waiting;
    for (size_t i = 0; i < count; ++i) {
      if (!(waiting >> i & 1)) continue;
      all.taken[first + i] = all.given[first + i];
      all.state[first + i] = State::kRuns;
    }
  }
}

void run_block() {
  Fibers& all = fibers();
  std::fill_n(all.state, threads, State::kRuns);
  const size_t warps = (threads + kWarp - 1) / kWarp;
  do {
    for (size_t i = 0; i < warps; ++i) run_warp((reversed ? warps - 1 - i : i) * kWarp);
    std::replace(all.state, all.state + threads, State::kAtBarrier, State::kRuns);
  } while (std::count(all.state, all.state + threads, State::kRuns) > 0);
}

}  // namespace

void set_reversed(bool value) {
  reversed = value;
}

unsigned lane() {
  return current % kWarp;
}

void wait_for_block() {
  stop(State::kAtBarrier);
}

Given exchange(uint64_t value) {
  fibers().given[current] = value;
  stop(State::kAtWarp);
  const size_t warp = current / kWarp;
  return {fibers().taken + warp * kWarp, fibers().present[warp]};
}

void launch(const Shape& shape, const std::function<void()>& code) {
  gridDim = shape.grid;
  blockDim = shape.block;
  kernel = &code;
  threads = size_t{blockDim.x} * blockDim.y * blockDim.z;
  const size_t blocks = size_t{gridDim.x} * gridDim.y * gridDim.z;
  if (threads == 0 || threads > kMostThreads) fail("too many threads in a block, or none", threads);
  if (blocks == 0 || gridDim.x > INT32_MAX || gridDim.y > UINT16_MAX || gridDim.z > UINT16_MAX)
    fail("too many blocks in a grid, or none", blocks);
  for (size_t i = 0; i < threads; ++i)
    fibers().thread[i] =
        make_uint3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
  for (size_t i = 0; i < blocks; ++i) {
    const size_t number = reversed ? blocks - 1 - i : i;
    blockIdx = make_uint3(number % gridDim.x, number / gridDim.x % gridDim.y,
                          number / gridDim.x / gridDim.y);
    run_block();
  }
}

}  // namespace simulate
