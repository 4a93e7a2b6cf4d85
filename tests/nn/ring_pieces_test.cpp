// The rectangles that ranks of a ring compute are the scores that attention needs, each once.
#include "nn/ring_pieces.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>

namespace fsdp::nn {
namespace {

// The place in a sequence of a rank's token.
int64_t place_of(const RingShape& shape, int64_t rank, int64_t token) {
  const int64_t chunk = shape.tokens / 2;
  const int64_t number = token < chunk ? rank : 2 * shape.ranks - 1 - rank;
  return number * chunk + token % chunk;
}

// How often a query sees a key: by sequence, query, key.
using Seen = std::map<std::array<int64_t, 3>, int>;

Seen seen_in_pieces(const RingShape& shape) {
  Seen seen;
  for (int64_t rank = 0; rank < shape.ranks; ++rank)
    for (int64_t owner = 0; owner < shape.ranks; ++owner)
      for (const Piece& piece : pieces_of(shape, rank, owner))
        for (int64_t row = 0; row < piece.sequences.count; ++row)
          for (int64_t q = 0; q < piece.queries.count; ++q)
            for (int64_t k = 0; k < (piece.causal ? q + 1 : piece.keys.count); ++k)
              ++seen[{piece.sequences.first + row, place_of(shape, rank, piece.queries.first + q),
                      place_of(shape, owner, piece.keys.first + k)}];
  return seen;
}

Seen expected_of(const RingShape& shape) {
  const int64_t whole = shape.tokens * shape.ranks;
  const auto document = [&](int64_t token) {
    return std::upper_bound(shape.documents.begin(), shape.documents.end(), token) -
           shape.documents.begin();
  };
  Seen seen;
  for (int64_t row = 0; row < shape.batch; ++row)
    for (int64_t q = 0; q < whole; ++q)
      for (int64_t k = 0; k < (shape.causal ? q + 1 : whole); ++k)
        if (document(row * whole + q) == document(row * whole + k)) seen[{row, q, k}] = 1;
  return seen;
}

TEST(RingPieces, CoverEveryScoreOnce) {
  std::mt19937 random(7);
  for (int64_t ranks : {1, 2, 3, 4, 5})
    for (int64_t tokens : {2, 6}) {
      RingShape shape{.ranks = ranks, .batch = 2, .tokens = tokens, .causal = false};
      EXPECT_EQ(seen_in_pieces(shape), expected_of(shape)) << ranks;
      shape.causal = true;
      EXPECT_EQ(seen_in_pieces(shape), expected_of(shape)) << ranks;
      for (const unsigned share : {2u, 5u, 50u}) {  // one in so many tokens begins a document
        shape.documents.clear();
        for (int64_t i = 0; i <= shape.batch * tokens * ranks; ++i)
          if (i % (tokens * ranks) == 0 || random() % share == 0)
            shape.documents.insert(shape.documents.end(), random() % 4 == 0 ? 2 : 1,
                                   static_cast<int32_t>(i));  // some are empty
        EXPECT_EQ(seen_in_pieces(shape), expected_of(shape)) << ranks << share;
      }
    }
}

TEST(RingPieces, AreTheSameWorkForAllRanks) {
  const RingShape shape{.ranks = 4, .batch = 1, .tokens = 8, .causal = true};
  for (int64_t rank = 0; rank < 4; ++rank)
    for (int64_t owner = 0; owner < 4; ++owner)
      for (const Piece& piece : pieces_of(shape, rank, owner))
        EXPECT_EQ(piece.queries.count * piece.keys.count, owner == rank ? 64 : 32);
}

}  // namespace
}  // namespace fsdp::nn
