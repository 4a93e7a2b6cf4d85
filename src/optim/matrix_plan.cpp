#include "optim/matrix_plan.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "shard/group.h"
#include "shard/unit.h"

namespace fsdp::optim {
namespace {

Holders holders_of(const Matrix& matrix, const shard::Layout& layout) {
  const int64_t shard = layout.shard_numel(), end = matrix.begin + matrix.numel();
  Holders holders{.first = static_cast<int>(matrix.begin / shard),
                  .last = static_cast<int>((end - 1) / shard),
                  .most = 0,
                  .cost = matrix.cost()};
  // The first rank has the most, unless its part is smaller than a later one's.
  int64_t most = -1;
  for (int rank = holders.first; rank <= holders.last && rank <= holders.first + 1; ++rank) {
    const int64_t here = std::min(end, (rank + 1) * shard) - std::max(matrix.begin, rank * shard);
    if (here > most) holders.most = rank;
    most = std::max(most, here);
  }
  return holders;
}

}  // namespace

at::ScalarType travelling_type(const shard::Flat& flat) {
  const at::ScalarType type = flat.param_dtype();
  return type == at::kFloat || type == at::kDouble ? type : at::kBFloat16;
}

void give_owners(std::vector<Bucket>& buckets) {
  std::map<const shard::Group*, std::pair<std::vector<Holders>, std::vector<Matrix*>>> groups;
  std::map<const shard::Group*, int> ranks;
  for (Bucket& bucket : buckets)
    for (Matrix& matrix : bucket.matrices) {
      const shard::Layout& layout = bucket.flats[matrix.flat]->layout();
      auto& [holders, matrices] = groups[bucket.group];
      holders.push_back(holders_of(matrix, layout));
      matrices.push_back(&matrix);
      ranks[bucket.group] = layout.world();
    }
  for (auto& [group, all] : groups) {
    const auto owners = owners_of(all.first, ranks[group]);
    std::vector<std::pair<std::vector<Holders>, std::vector<Matrix*>>> owned(
        static_cast<size_t>(ranks[group]));
    for (size_t i = 0; i < owners.size(); ++i) {
      Matrix* matrix = all.second[i];
      matrix->owner.shard = owners[i];
      auto& [replicas, matrices] = owned[static_cast<size_t>(owners[i])];
      replicas.push_back({0, group->replicate_size - 1, 0, matrix->cost()});
      matrices.push_back(matrix);
    }
    for (auto& [replicas, matrices] : owned) {
      const auto computing = owners_of(replicas, group->replicate_size);
      for (size_t i = 0; i < computing.size(); ++i) matrices[i]->owner.replica = computing[i];
    }
  }
}

double Matrix::cost() const {
  const auto r = static_cast<double>(rows), c = static_cast<double>(cols);
  if (parts.empty()) return r * c * std::min(r, c);
  double sum = 0;
  for (const int64_t part : parts) {
    const auto p = static_cast<double>(part), other = dim == 0 ? c : r;
    sum += p * other * std::min(p, other);
  }
  return sum;
}

std::vector<int> owners_of(std::span<const Holders> matrices, int ranks) {
  std::vector<int> owners(matrices.size());
  std::vector<double> load(static_cast<size_t>(ranks));
  std::vector<size_t> shared;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const Holders& one = matrices[i];
    if (one.first < one.last) {
      shared.push_back(i);
      continue;
    }
    owners[i] = one.first;
    load[static_cast<size_t>(one.first)] += one.cost;
  }
  std::stable_sort(shared.begin(), shared.end(),
                   [&](size_t a, size_t b) { return matrices[a].cost > matrices[b].cost; });
  for (const size_t i : shared) {
    const auto most = static_cast<size_t>(matrices[i].most);
    const auto least = std::min_element(load.begin(), load.end());
    const size_t owner = load[most] <= *least ? most : static_cast<size_t>(least - load.begin());
    owners[i] = static_cast<int>(owner);
    load[owner] += matrices[i].cost;
  }
  return owners;
}

std::vector<Bucket> plan_buckets(const std::vector<shard::Flat*>& flats, const MatricesOf& of,
                                 int64_t most) {
  std::vector<Bucket> buckets;
  int64_t bytes = 0;
  for (shard::Flat* flat : flats) {
    std::vector<Matrix> matrices;
    for (size_t p = 0; p < flat->parameters().size(); ++p)
      for (Matrix& matrix : of(*flat, p)) matrices.push_back(std::move(matrix));
    if (matrices.empty()) continue;
    const shard::Group* group = flat->unit().group.get();
    const at::ScalarType type = travelling_type(*flat);
    const int64_t more = flat->layout().shard_numel() * shard::element_bytes(type);
    if (buckets.empty() || buckets.back().group != group || buckets.back().type != type ||
        bytes + more > most) {
      buckets.push_back({.group = group, .type = type});
      bytes = 0;
    }
    bytes += more;
    Bucket& bucket = buckets.back();
    for (Matrix& matrix : matrices) {
      matrix.flat = bucket.flats.size();
      bucket.matrices.push_back(std::move(matrix));
    }
    bucket.flats.push_back(flat);
  }
  give_owners(buckets);
  return buckets;
}

MatrixPieces pieces_of(const Bucket& bucket, int rank) {
  MatrixPieces pieces;
  const auto world = static_cast<size_t>(bucket.flats.front()->layout().world());
  std::vector<std::vector<MatrixPiece>> sent(world), coming(world);  // by the other rank
  for (size_t i = 0; i < bucket.matrices.size(); ++i) {
    const Matrix& matrix = bucket.matrices[i];
    const shard::Layout& layout = bucket.flats[matrix.flat]->layout();
    const int64_t shard = layout.shard_numel(), end = matrix.begin + matrix.numel();
    const Holders holders = holders_of(matrix, layout);
    pieces.travel = pieces.travel || holders.first < holders.last;
    for (int holder = holders.first; holder <= holders.last; ++holder) {
      if (holder != rank && matrix.owner.shard != rank) continue;
      const int64_t from = std::max(matrix.begin, holder * shard);
      const int64_t to = std::min(end, (holder + 1) * shard);
      const MatrixPiece piece{i, from - matrix.begin, to - from, from - holder * shard};
      if (holder == matrix.owner.shard)
        pieces.own.push_back(piece);
      else if (holder == rank)
        sent[static_cast<size_t>(matrix.owner.shard)].push_back(piece);
      else
        coming[static_cast<size_t>(holder)].push_back(piece);
    }
  }
  const auto join = [](const std::vector<std::vector<MatrixPiece>>& by_rank,
                       std::vector<MatrixPiece>& all, std::vector<int64_t>& counts) {
    for (const auto& some : by_rank) {
      counts.push_back(
          std::accumulate(some.begin(), some.end(), int64_t{0},
                          [](int64_t sum, const MatrixPiece& piece) { return sum + piece.numel; }));
      all.insert(all.end(), some.begin(), some.end());
    }
  };
  join(sent, pieces.sent, pieces.sent_counts);
  join(coming, pieces.coming, pieces.coming_counts);
  return pieces;
}

}  // namespace fsdp::optim
