// Compiled without the instrumentation that calls it. One thread runs the code under test.
#include "fuzz/coverage.h"

#include <array>
#include <bit>
#include <cstring>

extern "C" const char __executable_start;  // from the linker; addresses differ between runs

namespace fsdp::fuzz {
namespace {

constexpr size_t kEdges = 1 << 16;
constexpr size_t kComparisons = 1 << 10;

alignas(64) std::array<uint8_t, kEdges> taken;  // how often, for the last input
alignas(64) std::array<uint8_t, kEdges> known;  // one bit per order of magnitude
std::array<Comparison, kComparisons> comparisons;
uint64_t previous = 0;
size_t compared = 0, edges = 0;

uint8_t magnitude(uint8_t count) {  // 1, 2, 3, 4-7, 8-15, 16-31, 32-127, more
  if (count <= 3) return static_cast<uint8_t>(1 << (count - 1));
  const int width = std::bit_width(count);
  return static_cast<uint8_t>(1 << (width <= 5 ? width : width <= 7 ? 6 : 7));
}

void compare(uint64_t left, uint64_t right, int bytes) {
  if (left == right) return;
  comparisons[compared++ % kComparisons] = {left, right, bytes};
}

}  // namespace

void forget_input() {
  taken.fill(0);
  previous = 0;
}

size_t learn_edges() {
  size_t fresh = 0;
  for (size_t word = 0; word < kEdges; word += 8) {
    uint64_t eight;
    std::memcpy(&eight, &taken[word], 8);
    if (eight == 0) continue;
    for (size_t i = word; i < word + 8; ++i) {
      if (taken[i] == 0) continue;
      const uint8_t bit = magnitude(taken[i]);
      if (known[i] & bit) continue;
      edges += known[i] == 0;
      known[i] |= bit;
      ++fresh;
    }
  }
  return fresh;
}

size_t known_edges() {
  return edges;
}

Comparison recent_comparison(uint64_t random) {
  if (compared == 0) return {0, 0, 0};
  return comparisons[random % (compared < kComparisons ? compared : kComparisons)];
}

}  // namespace fsdp::fuzz

extern "C" {

void __sanitizer_cov_trace_pc() {
  using namespace fsdp::fuzz;
  const auto at = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) -
                  reinterpret_cast<uintptr_t>(&__executable_start);
  const uint64_t here = uint64_t{at} * 0x9e3779b97f4a7c15u >> 48;
  uint8_t& count = taken[(here ^ previous) % kEdges];
  if (count < 255) ++count;
  previous = here >> 1;
}

// cmp compares two variables; in const_cmp the first number is a constant.
void __sanitizer_cov_trace_cmp1(uint8_t a, uint8_t b) {
  fsdp::fuzz::compare(a, b, 1);
}
void __sanitizer_cov_trace_cmp2(uint16_t a, uint16_t b) {
  fsdp::fuzz::compare(a, b, 2);
}
void __sanitizer_cov_trace_cmp4(uint32_t a, uint32_t b) {
  fsdp::fuzz::compare(a, b, 4);
}
void __sanitizer_cov_trace_cmp8(uint64_t a, uint64_t b) {
  fsdp::fuzz::compare(a, b, 8);
}
void __sanitizer_cov_trace_const_cmp1(uint8_t a, uint8_t b) {
  fsdp::fuzz::compare(b, a, 1);
}
void __sanitizer_cov_trace_const_cmp2(uint16_t a, uint16_t b) {
  fsdp::fuzz::compare(b, a, 2);
}
void __sanitizer_cov_trace_const_cmp4(uint32_t a, uint32_t b) {
  fsdp::fuzz::compare(b, a, 4);
}
void __sanitizer_cov_trace_const_cmp8(uint64_t a, uint64_t b) {
  fsdp::fuzz::compare(b, a, 8);
}
void __sanitizer_cov_trace_cmpf(float, float) {}
void __sanitizer_cov_trace_cmpd(double, double) {}

// cases: their number, the bits of each, then the cases.
void __sanitizer_cov_trace_switch(uint64_t value, uint64_t* cases) {
  const int bytes = static_cast<int>(cases[1] / 8);
  if (cases[0] == 0 || bytes < 1) return;
  fsdp::fuzz::compare(value, cases[2 + value % cases[0]], bytes);
}

}  // extern "C"
