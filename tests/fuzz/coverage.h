// What the code under test did with the last input: which edges between its blocks it took, and
// which numbers it compared. The compiler puts the calls there:
// -fsanitize-coverage=trace-pc,trace-cmp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp::fuzz {

struct Comparison {  // that did not come out equal
  uint64_t left, right;
  int bytes;  // of each: 1, 2, 4 or 8
};

void forget_input();  // before the next one

// How many edges (or orders of magnitude of how often one was taken) no input before had. They are
// known afterwards.
size_t learn_edges();
size_t known_edges();

// Some comparison of late; all zeros if there was none.
Comparison recent_comparison(uint64_t random);

}  // namespace fsdp::fuzz
