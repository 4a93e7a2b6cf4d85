// What a rank of a ring computes with the keys of another: rectangles of queries × keys.
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp::nn {

struct Span {
  int64_t first, count;
};

struct Piece {
  Span sequences, queries, keys;  // of parts
  bool causal;                    // query i sees keys 0 to i, as many keys as queries; false: all
};

struct RingShape {
  int64_t ranks;
  int64_t batch, tokens;  // of a part
  bool causal;
  // Where documents begin in the flattened whole batch, and the end of the last; empty: none.
  std::vector<int32_t> documents = {};
};

// The pieces of `rank` with the keys of `owner`. A query is in some piece with its own rank's keys.
std::vector<Piece> pieces_of(const RingShape& shape, int64_t rank, int64_t owner);

}  // namespace fsdp::nn
