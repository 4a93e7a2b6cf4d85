#include "shard/deferred_draw.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <mutex>

#include "kernels/cpu/mersenne.h"
#include "kernels/cpu/parallel.h"
#include "shard/deferred_tape.h"

namespace fsdp::shard::deferred {
namespace {

// normal_ makes so many numbers at a time. If they don't divide the tensor, it makes the last
// sixteen once more, from new words. Smaller tensors are made one by one, and a number may be left
// over for the next call.
constexpr int64_t kAtOnce = 16;

int64_t rounded_down(int64_t x) {
  return x / kAtOnce * kAtOnce;
}

}  // namespace

bool Draw::is_known() const {
  const bool known =
      type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
  return known && numel > 0 && (!normal || numel >= kAtOnce);
}

int64_t Draw::words(int64_t elements) const {
  return type == at::kDouble ? 2 * elements : elements;
}

int64_t Draw::end_of(size_t state) const {
  return state + 1 == states.size() ? numel : static_cast<int64_t>(state + 1) * kApart;
}

void Draw::skip(at::Generator& generator) {
  std::lock_guard lock(generator.mutex());
  auto* engine = at::check_generator<at::CPUGeneratorImpl>(generator);
  at::mt19937_data_pod now = engine->engine().data();
  states.resize(static_cast<size_t>(std::max<int64_t>(1, numel / kApart)));
  for (size_t i = 0; i < states.size(); ++i) {
    states[i] = now;
    kernels::cpu::skip(now, words(end_of(i) - static_cast<int64_t>(i) * kApart));
  }
  if (normal && numel % kAtOnce != 0) kernels::cpu::skip(now, words(kAtOnce));
  at::mt19937 after;
  after.set_data(now);
  engine->set_engine(after);
}

void Draw::fill(const at::Tensor& out, int64_t first) const {
  if (out.numel() == 0) return;
  const auto state_of = [&](int64_t element) {
    return std::min(element / kApart, static_cast<int64_t>(states.size()) - 1);
  };
  const int64_t from = state_of(first), to = state_of(first + out.numel() - 1);
  kernels::cpu::parallel_tasks(to - from + 1, [&](int64_t task) {
    BackendsOnly backends_only;
    const auto state = static_cast<size_t>(from + task);
    const int64_t begin = std::max(first, (from + task) * kApart);
    const int64_t end = std::min(first + out.numel(), end_of(state));
    fill_from(state, out.narrow(0, begin - first, end - begin), begin);
  });
}

// Draws whole sixteens around what is wanted, and the end of the tensor with its last sixteen.
void Draw::fill_from(size_t state, const at::Tensor& out, int64_t first) const {
  int64_t begin = first, end = first + out.numel();
  if (normal && numel % kAtOnce != 0 && end > numel - kAtOnce) {
    begin = std::min(rounded_down(first), rounded_down(numel - kAtOnce));
    end = numel;
  } else if (normal) {
    begin = rounded_down(first);
    end = rounded_down(end + kAtOnce - 1);
  }
  at::mt19937_data_pod now = states[state];
  kernels::cpu::skip(now, words(begin - static_cast<int64_t>(state) * kApart));
  at::mt19937 engine;
  engine.set_data(now);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();
  generator.get<at::CPUGeneratorImpl>()->set_engine(engine);
  const bool all = end - begin == out.numel();
  const at::Tensor drawn = all ? out : at::empty({end - begin}, out.options());
  normal ? drawn.normal_(a, b, generator) : drawn.uniform_(a, b, generator);
  if (!all) out.copy_(drawn.narrow(0, first - begin, out.numel()));
}

int64_t Draw::fingerprint() const {
  const at::mt19937_data_pod& state = states.front();
  uint64_t hash = 1469598103934665603ull;
  const auto add = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211ull; };
  add(normal);
  add(std::bit_cast<uint64_t>(a));
  add(std::bit_cast<uint64_t>(b));
  add(static_cast<uint64_t>(numel));
  add(state.next_);
  for (uint32_t word : state.state_) add(word);
  return static_cast<int64_t>(hash);
}

}  // namespace fsdp::shard::deferred
