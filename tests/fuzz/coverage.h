// What the code under test did with the last input: which edges between its blocks it took, and
// which numbers it compared. The compiler inserts the calls:
// -fsanitize-coverage=trace-pc,trace-cmp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp::fuzz {

struct Comparison {  // of two numbers that weren't equal
  uint64_t left, right;
  int bytes;  // per number: 1, 2, 4 or 8
};

void forget_input();  // before the next one

// How many edges (or orders of magnitude of an edge's count) are new with this input. They count as
// known afterwards.
size_t learn_edges();
size_t known_edges();

// One of the latest comparisons; all zeros if there was none.
Comparison recent_comparison(uint64_t random);

}  // namespace fsdp::fuzz
