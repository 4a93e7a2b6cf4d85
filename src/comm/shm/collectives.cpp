#include "comm/shm/collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::comm::shm {
namespace {

enum Path : uint8_t { kStaged = 0, kDirect = 1, kInPlace = 2 };

// Elements that fit into `parts` equal parts of a staging buffer, each part cache-line aligned.
int64_t elements_per_round(const Group& group, int parts, int64_t element_size) {
  return std::min(kPartBytes, group.staging_bytes() / parts / 64 * 64) / element_size;
}

int64_t rounds_for(int64_t count, int64_t per_round) {
  return std::max<int64_t>(1, (count + per_round - 1) / per_round);
}

// The structure of every staged operation: each rank packs its part into its own buffer, then all
// unpack from every buffer; the rounds alternate between two buffers. pack and unpack get (first,
// n): the elements of this round.
template <typename Pack, typename Unpack>
void staged(Group& group, const Description& description, int64_t count, int64_t per_round,
            Pack pack, Unpack unpack) {
  group.begin(description);
  int64_t rounds = rounds_for(count, per_round);
  for (int64_t round = 0; round < rounds; ++round) {
    int64_t first = round * per_round, n = std::min(per_round, count - first);
    if (round > 0) group.next_round();
    pack(first, n);
    group.publish();
    group.await_all();
    unpack(first, n);
    group.leave_staging();
  }
}

// Visits the peers starting after this rank, so that not all ranks read rank 0 at once.
template <typename Body>
void for_each_peer(const Group& group, Body body) {
  for (int step = 1; step < group.size(); ++step) body((group.rank() + step) % group.size());
}

}  // namespace

void all_gather(Group& group, void* out, const void* in, int64_t count, c10::ScalarType type) {
  int64_t element = element_size(type), bytes = count * element;
  char* full = static_cast<char*>(out);
  char* own = full + group.rank() * bytes;
  Description description = describe(Operation::kAllGather, type, count);
  Location out_at = group.locate(out, bytes * group.size());
  Location in_at = group.locate(in, bytes);

  if (out_at.window >= 0 && in == own) {
    description.path = kInPlace;
    group.begin(description, out_at);
    group.publish();
    group.await_all();
    if (group.one_location()) return;  // the owners have written their parts: nothing to move
    // Each rank has its own full buffer (reduce_buffer), which contains its part.
    for_each_peer(group, [&](int peer) {
      std::memcpy(full + peer * bytes, group.resolve(peer).get() + peer * bytes, bytes);
    });
    group.publish();
    group.await_all();
    return;
  }
  if (in_at.window >= 0) {
    description.path = kDirect;
    group.begin(description, in_at);
    group.publish();
    group.await_all();
    for_each_peer(group, [&](int peer) {
      std::memcpy(full + peer * bytes, group.resolve(peer).get(), bytes);
    });
    if (in != own) std::memmove(own, in, bytes);
    group.publish();
    group.await_all();  // no rank reads `in` any more
    return;
  }
  const char* mine = static_cast<const char*>(in);
  staged(
      group, description, count, elements_per_round(group, 1, element),
      [&](int64_t first, int64_t n) {
        std::memcpy(group.staging(group.rank()), mine + first * element, n * element);
      },
      [&](int64_t first, int64_t n) {
        if (in != own) std::memcpy(own + first * element, mine + first * element, n * element);
        for_each_peer(group, [&](int peer) {
          std::memcpy(full + peer * bytes + first * element, group.staging(peer), n * element);
        });
      });
}

namespace {

// in: [size][count]. Sums this rank's part over every rank's `in`, read in place.
void reduce_scatter_direct(Group& group, void* out, const void* in, int64_t count,
                           c10::ScalarType type, ReduceOp op, const Parallel& parallel) {
  int64_t element = element_size(type);
  std::vector<std::shared_ptr<char>> held(group.size());
  std::vector<const char*> parts(group.size());
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer != group.rank()) held[peer] = group.resolve(peer);
    const char* base = peer == group.rank() ? static_cast<const char*>(in) : held[peer].get();
    parts[peer] = base + group.rank() * count * element;
  }
  parallel(count, [&](int64_t begin, int64_t end) {
    std::vector<const void*> sources(parts.size());
    for (size_t s = 0; s < parts.size(); ++s) sources[s] = parts[s] + begin * element;
    reduce(static_cast<char*>(out) + begin * element, sources, end - begin, type, op);
  });
}

}  // namespace

void reduce_scatter(Group& group, void* out, const void* in, int64_t count, c10::ScalarType type,
                    ReduceOp op, const Parallel& parallel) {
  int64_t element = element_size(type);
  const char* full = static_cast<const char*>(in);
  const char* own = full + group.rank() * count * element;
  Description description = describe(Operation::kReduceScatter, type, count, op);
  Location at = group.locate(in, count * element * group.size());
  if (at.window >= 0) {
    description.path = kDirect;
    group.begin(description, at);
    group.publish();
    group.await_all();
    reduce_scatter_direct(group, out, in, count, type, op, parallel);
    group.publish();
    group.await_all();  // no rank reads `in` any more
    return;
  }
  int64_t per_round = elements_per_round(group, group.size(), element);
  int64_t part = group.staging_bytes() / group.size() / 64 * 64;
  std::vector<const void*> sources(group.size());
  staged(
      group, description, count, per_round,
      [&](int64_t first, int64_t n) {
        for_each_peer(group, [&](int peer) {
          std::memcpy(group.staging(group.rank()) + peer * part,
                      full + (peer * count + first) * element, n * element);
        });
      },
      [&](int64_t first, int64_t n) {
        for (int peer = 0; peer < group.size(); ++peer)
          sources[peer] = group.staging(peer) + group.rank() * part;
        sources[group.rank()] = own + first * element;
        reduce(static_cast<char*>(out) + first * element, sources, n, type, op);
      });
}

namespace {

// Each rank sums its own range over all ranks' tensors and writes the sum to all of them.
void all_reduce_direct(Group& group, void* data, int64_t count, c10::ScalarType type, ReduceOp op,
                       const Parallel& parallel) {
  int64_t element = element_size(type), size = group.size(), rank = group.rank();
  int64_t share = (count + size - 1) / size;
  int64_t first = std::min(count, rank * share), last = std::min(count, first + share);
  std::vector<std::shared_ptr<char>> held(size);
  std::vector<char*> tensors(size);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) held[peer] = group.resolve(peer);
    tensors[peer] = peer == rank ? static_cast<char*>(data) : held[peer].get();
  }
  parallel(last - first, [&](int64_t begin, int64_t end) {
    // In blocks, so that the sum is still in the cache when it is copied to the others.
    constexpr int64_t kBlock = 16384;
    std::vector<const void*> sources(size);
    for (int64_t i = begin; i < end; i += kBlock) {
      int64_t n = std::min(kBlock, end - i), offset = (first + i) * element;
      for (int64_t peer = 0; peer < size; ++peer) sources[peer] = tensors[peer] + offset;
      reduce(tensors[rank] + offset, sources, n, type, op);
      for (int64_t peer = 0; peer < size; ++peer)
        if (peer != rank) std::memcpy(tensors[peer] + offset, tensors[rank] + offset, n * element);
    }
  });
}

}  // namespace

void all_reduce(Group& group, void* data, int64_t count, c10::ScalarType type, ReduceOp op,
                const Parallel& parallel) {
  int64_t element = element_size(type), size = group.size(), rank = group.rank();
  char* mine = static_cast<char*>(data);
  Description description = describe(Operation::kAllReduce, type, count, op);
  Location at = group.locate(data, count * element);
  if (at.window >= 0) {
    description.path = kDirect;
    group.begin(description, at);
    group.publish();
    group.await_all();
    all_reduce_direct(group, data, count, type, op, parallel);
    group.publish();
    group.await_all();
    return;
  }
  int64_t per_round = elements_per_round(group, 1, element);
  std::vector<const void*> sources(size);
  // Small: every rank adds everything. Large: two waits per round; each rank adds its share of the
  // round into its own staging buffer, then all copy the shares.
  bool small = count * element <= 8192 || size == 1;
  group.begin(description);
  for (int64_t round = 0; round < rounds_for(count, per_round); ++round) {
    int64_t first = round * per_round, n = std::min(per_round, count - first);
    if (round > 0) group.next_round();
    std::memcpy(group.staging(rank), mine + first * element, n * element);
    group.publish();
    group.await_all();
    int64_t share = small ? n : (n + size - 1) / size;
    auto share_of = [&](int64_t peer) { return std::min(n, peer * share); };
    int64_t begin = small ? 0 : share_of(rank), end = small ? n : share_of(rank + 1);
    for (int64_t peer = 0; peer < size; ++peer)
      sources[peer] = group.staging(peer) + begin * element;
    if (small) {
      reduce(mine + first * element, sources, n, type, op);
    } else {
      // Only this rank reads this range of any buffer, so the sum may replace its own part.
      reduce(group.staging(rank) + begin * element, sources, end - begin, type, op);
      group.publish();
      group.await_all();
      for (int64_t peer = 0; peer < size; ++peer)
        std::memcpy(mine + (first + share_of(peer)) * element,
                    group.staging(peer) + share_of(peer) * element,
                    (share_of(peer + 1) - share_of(peer)) * element);
    }
    group.leave_staging();
  }
}

void broadcast(Group& group, void* data, int64_t count, c10::ScalarType type, int root) {
  int64_t element = element_size(type);
  char* mine = static_cast<char*>(data);
  staged(
      group, describe(Operation::kBroadcast, type, count, ReduceOp::SUM, root), count,
      elements_per_round(group, 1, element),
      [&](int64_t first, int64_t n) {
        if (group.rank() == root)
          std::memcpy(group.staging(root), mine + first * element, n * element);
      },
      [&](int64_t first, int64_t n) {
        if (group.rank() != root)
          std::memcpy(mine + first * element, group.staging(root), n * element);
      });
}

void all_to_all(Group& group, void* out, const std::vector<int64_t>& out_counts, const void* in,
                const std::vector<int64_t>& in_counts, c10::ScalarType type) {
  int64_t element = element_size(type), size = group.size(), rank = group.rank();
  // Elements sent: [from][to].
  std::vector<int64_t> matrix(size * size);
  staged(
      group, describe(Operation::kAllToAll, type, 0), size, size,
      [&](int64_t, int64_t n) { std::memcpy(group.staging(rank), in_counts.data(), n * 8); },
      [&](int64_t, int64_t n) {
        for (int64_t peer = 0; peer < size; ++peer)
          std::memcpy(&matrix[peer * size], group.staging(peer), n * 8);
      });
  for (int64_t peer = 0; peer < size; ++peer) {
    int64_t sent = matrix[peer * size + rank];
    if (sent == out_counts[peer]) continue;
    group.raise(formatted("rank {} expects {} elements from rank {}, which sends {}", rank,
                          out_counts[peer], peer, sent),
                "a rank's output splits must match what the others send to it.", kExitFailed);
  }
  int64_t largest = *std::max_element(matrix.begin(), matrix.end());
  int64_t per_round = elements_per_round(group, size, element);
  int64_t part = group.staging_bytes() / size / 64 * 64;
  std::vector<int64_t> in_at(size), out_at(size);
  std::exclusive_scan(in_counts.begin(), in_counts.end(), in_at.begin(), int64_t{0});
  std::exclusive_scan(out_counts.begin(), out_counts.end(), out_at.begin(), int64_t{0});
  auto clipped = [](int64_t count, int64_t first, int64_t n) {
    return std::clamp<int64_t>(count - first, 0, n);
  };
  const char* source = static_cast<const char*>(in);
  char* target = static_cast<char*>(out);
  staged(
      group, describe(Operation::kAllToAll, type, largest), largest, per_round,
      [&](int64_t first, int64_t n) {
        for (int64_t peer = 0; peer < size; ++peer)
          std::memcpy(group.staging(rank) + peer * part, source + (in_at[peer] + first) * element,
                      clipped(in_counts[peer], first, n) * element);
      },
      [&](int64_t first, int64_t n) {
        for (int64_t peer = 0; peer < size; ++peer)
          std::memcpy(target + (out_at[peer] + first) * element, group.staging(peer) + rank * part,
                      clipped(out_counts[peer], first, n) * element);
      });
}

void barrier(Group& group) {
  group.begin(describe(Operation::kBarrier, c10::ScalarType::Byte, 0));
  group.publish();
  group.await_all();
}

}  // namespace fsdp::comm::shm
