// Which rank updates which matrix, and which pieces travel for it. Every rank computes the same
// plan from the layouts, without a message.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "shard/flat.h"

namespace fsdp::shard {
struct Group;
}

namespace fsdp::optim {

// The rank that computes a matrix's update: its places along the dimensions of the mesh.
struct Owner {
  int shard = 0, replica = 0;
};

// A matrix as it is in memory, which may be the transpose of the parameter's.
struct Matrix {
  size_t flat;       // index in its bucket
  size_t parameter;  // of the flat
  int64_t begin;     // in the flat's full buffer
  int64_t rows, cols;
  int64_t dim = 0;             // the dimension in memory that it is cut along
  std::vector<int64_t> parts;  // sizes of its parts; empty: it isn't cut
  Owner owner = {};

  int64_t numel() const { return rows * cols; }
  double cost() const;  // of its update, in products
};

// Flats whose pieces travel together.
struct Bucket {
  std::vector<shard::Flat*> flats;
  std::vector<Matrix> matrices;
  const shard::Group* group = nullptr;
  at::ScalarType type = at::kFloat;  // of what travels
};

// Elements [from, from + numel) of a matrix are at `offset` of their holder's shard.
struct MatrixPiece {
  size_t matrix;
  int64_t from, numel, offset;
};

// What a rank sends and gets; what comes back goes the other way.
struct MatrixPieces {
  std::vector<MatrixPiece> sent;                    // it holds them, others own them; by owner
  std::vector<MatrixPiece> coming;                  // it owns them, others hold them; by holder
  std::vector<MatrixPiece> own;                     // both
  std::vector<int64_t> sent_counts, coming_counts;  // elements, per rank
  bool travel = false;                              // between any ranks
};

// The matrices of a parameter: none if it isn't one or is frozen.
using MatricesOf = std::function<std::vector<Matrix>(const shard::Flat& flat, size_t parameter)>;

// 16-bit parameters travel as bfloat16, others as they are.
at::ScalarType travelling_type(const shard::Flat& flat);

// Fills buckets in the order of the flats, as far as a rank's part stays below `most` bytes.
std::vector<Bucket> plan_buckets(const std::vector<shard::Flat*>& flats, const MatricesOf& of,
                                 int64_t most);
// Balances all buckets of a group of ranks together, and then what the replicas of each rank do.
void give_owners(std::vector<Bucket>& buckets);

MatrixPieces pieces_of(const Bucket& bucket, int rank);

// The ranks that hold a matrix, and the one that holds most of it.
struct Holders {
  int first, last, most;
  double cost;
};
// A matrix that one rank holds is that rank's. Of the others, the most expensive comes first and
// goes to the rank with the least to do; of those, to the one that holds most of it.
std::vector<int> owners_of(std::span<const Holders> matrices, int ranks);

}  // namespace fsdp::optim
