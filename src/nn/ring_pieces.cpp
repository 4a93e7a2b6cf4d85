#include "nn/ring_pieces.h"

#include <algorithm>

namespace fsdp::nn {
namespace {

// The half `half` of a rank's part is this chunk of a sequence.
int64_t chunk_of(int64_t rank, int64_t half, int64_t ranks) {
  return half == 0 ? rank : 2 * ranks - 1 - rank;
}

// The pieces of two chunks of one sequence. Chunks lie at `query` and `key` in the parts, and
// begin at `from` and `seen` in the flattened batch.
void add_pieces(const RingShape& shape, int64_t row, int64_t query, int64_t from, int64_t key,
                int64_t seen, std::vector<Piece>& pieces) {
  const int64_t chunk = shape.tokens / 2;
  const auto& starts = shape.documents;
  // The document of the first query.
  auto next = std::upper_bound(starts.begin(), starts.end(), from);
  if (seen == from) {
    for (int64_t first = from; first < from + chunk; ++next) {
      const int64_t end = std::min<int64_t>(*next, from + chunk);
      const Span keys{key + first - from, end - first};
      if (end > first)
        pieces.push_back({{row, 1}, {query + first - from, end - first}, keys, true});
      first = std::max(first, end);
    }
    return;
  }
  // Only the document of the first query may lie in both chunks, and then in all between.
  const int64_t begin = std::max<int64_t>(*std::prev(next), seen);
  const int64_t end = std::min<int64_t>(*next, from + chunk);
  if (begin >= seen + chunk) return;
  pieces.push_back(
      {{row, 1}, {query, end - from}, {key + begin - seen, seen + chunk - begin}, false});
}

std::vector<Piece> pieces_of_documents(const RingShape& shape, int64_t rank, int64_t owner) {
  const int64_t chunk = shape.tokens / 2, whole = shape.tokens * shape.ranks;
  std::vector<Piece> pieces;
  for (int64_t row = 0; row < shape.batch; ++row)
    for (int64_t mine : {0, 1})
      for (int64_t theirs : {0, 1}) {
        const int64_t from = chunk_of(rank, mine, shape.ranks) * chunk;
        const int64_t seen = chunk_of(owner, theirs, shape.ranks) * chunk;
        if (seen > from) continue;
        add_pieces(shape, row, mine * chunk, row * whole + from, theirs * chunk, row * whole + seen,
                   pieces);
      }
  return pieces;
}

}  // namespace

std::vector<Piece> pieces_of(const RingShape& shape, int64_t rank, int64_t owner) {
  if (!shape.documents.empty()) return pieces_of_documents(shape, rank, owner);
  const Span batch{0, shape.batch}, all{0, shape.tokens};
  const int64_t half = shape.tokens / 2;
  if (!shape.causal) return {{batch, all, all, false}};
  if (owner == rank) return {{batch, all, all, true}};  // the second chunk comes after the first
  // An earlier rank's first chunk comes before both of this rank's, and its second one after them.
  if (owner < rank) return {{batch, all, {0, half}, false}};
  // A later rank's chunks both lie between this rank's.
  return {{batch, {half, half}, all, false}};
}

}  // namespace fsdp::nn
