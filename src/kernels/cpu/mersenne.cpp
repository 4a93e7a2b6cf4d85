#include "kernels/cpu/mersenne.h"

namespace fsdp::kernels::cpu {
namespace {

constexpr int kStateWords = 624;
constexpr int kApart = 397;  // a new word depends on two neighbours and on the word this far ahead

uint32_t mixed(uint32_t upper, uint32_t lower) {
  const uint32_t joined = (upper & 0x80000000u) | (lower & 0x7fffffffu);
  return (joined >> 1) ^ ((0u - (lower & 1u)) & 0x9908b0dfu);
}

// Replaces all words of the state. Loops run over distances that vectors don't notice.
void renew(uint32_t* state) {
  constexpr int kRest = kStateWords - kApart;
  for (int i = 0; i < kRest; ++i) state[i] = state[i + kApart] ^ mixed(state[i], state[i + 1]);
  for (int i = kRest; i < kStateWords - 1; ++i)
    state[i] = state[i - kRest] ^ mixed(state[i], state[i + 1]);
  state[kStateWords - 1] = state[kApart - 1] ^ mixed(state[kStateWords - 1], state[0]);
}

}  // namespace

// The engine counts the draws until its words are used up, the one that renews them included.
void skip(at::mt19937_data_pod& engine, int64_t words) {
  const int64_t unused = engine.left_ - 1;
  if (words <= unused) {
    engine.left_ -= static_cast<int>(words);
    engine.next_ += static_cast<uint32_t>(words);
    return;
  }
  const int64_t beyond = words - unused - 1;
  for (int64_t i = 0; i <= beyond / kStateWords; ++i) renew(engine.state_.data());
  const int64_t used = beyond % kStateWords + 1;
  engine.left_ = static_cast<int>(kStateWords + 1 - used);
  engine.next_ = static_cast<uint32_t>(used);
}

}  // namespace fsdp::kernels::cpu
