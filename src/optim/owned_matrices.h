// The matrices of a bucket that this rank owns. Replicas own the same ones, and each computes some
// of them, in batches of equal sizes.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "optim/matrix_plan.h"

namespace fsdp::optim {

class OwnedMatrices {
 public:
  // Memory for all of them, not yet written. `bucket` must outlive it.
  OwnedMatrices(const Bucket& bucket, const MatrixPieces& pieces, int replica,
                at::TensorOptions options);

  at::Tensor part(const MatrixPiece& piece) const;
  // Replaces what this replica computes.
  void update(const std::function<at::Tensor(const at::Tensor& batch)>& updates_of);
  // What a replica computes: flat, in the order of the bucket's matrices; elements in all.
  std::vector<at::Tensor> of(int replica) const;
  int64_t numel(int replica) const;

 private:
  // A matrix, or a part of one, beside others of the same sizes.
  struct Place {
    size_t matrix;  // of the bucket
    int64_t part;   // -1: the whole
    int64_t begin;  // of the part
  };
  struct Batch {
    std::vector<Place> places;
    at::Tensor values;  // [places, rows, cols]
  };

  void add(size_t which);
  void spread(const Batch& batch);
  void each_cut(const Batch& batch,
                const std::function<void(const at::Tensor& cut, const at::Tensor& place)>& body);

  const Bucket& bucket_;
  const int replica_;
  const at::TensorOptions options_;
  std::map<std::pair<int64_t, int64_t>, Batch> batches_;  // by size
  std::map<size_t, at::Tensor> whole_;                    // by matrix, flat
};

}  // namespace fsdp::optim
