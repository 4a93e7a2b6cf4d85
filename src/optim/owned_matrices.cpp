#include "optim/owned_matrices.h"

#include <ATen/ops/empty.h>

namespace fsdp::optim {

OwnedMatrices::OwnedMatrices(const Bucket& bucket, const MatrixPieces& pieces, int replica,
                             at::TensorOptions options)
    : bucket_(bucket), replica_(replica), options_(options) {
  for (const MatrixPiece& piece : pieces.own) add(piece.matrix);
  for (const MatrixPiece& piece : pieces.coming) add(piece.matrix);
  for (auto& [size, batch] : batches_) {
    const auto count = static_cast<int64_t>(batch.places.size());
    batch.values = at::empty({count, size.first, size.second}, options_);
    spread(batch);
  }
}

void OwnedMatrices::add(size_t which) {
  const Matrix& matrix = bucket_.matrices[which];
  if (!whole_.try_emplace(which).second) return;
  const bool computed = matrix.owner.replica == replica_;
  if (computed && matrix.parts.empty())
    return batches_[{matrix.rows, matrix.cols}].places.push_back({which, -1, 0});
  whole_[which] = at::empty({matrix.numel()}, options_);
  if (!computed) return;
  int64_t begin = 0;
  for (size_t i = 0; i < matrix.parts.size(); ++i) {
    const int64_t part = matrix.parts[i];
    batches_[matrix.dim == 0 ? std::pair(part, matrix.cols) : std::pair(matrix.rows, part)]
        .places.push_back({which, static_cast<int64_t>(i), begin});
    begin += part;
  }
}

// Matrices that aren't cut are in the batch itself.
void OwnedMatrices::spread(const Batch& batch) {
  for (size_t i = 0; i < batch.places.size(); ++i)
    if (batch.places[i].part < 0)
      whole_[batch.places[i].matrix] = batch.values.select(0, static_cast<int64_t>(i)).view({-1});
}

void OwnedMatrices::each_cut(
    const Batch& batch,
    const std::function<void(const at::Tensor& cut, const at::Tensor& place)>& body) {
  for (size_t i = 0; i < batch.places.size(); ++i) {
    const Place& place = batch.places[i];
    if (place.part < 0) continue;
    const Matrix& matrix = bucket_.matrices[place.matrix];
    body(whole_[place.matrix]
             .view({matrix.rows, matrix.cols})
             .narrow(matrix.dim, place.begin, matrix.parts[static_cast<size_t>(place.part)]),
         batch.values.select(0, static_cast<int64_t>(i)));
  }
}

at::Tensor OwnedMatrices::part(const MatrixPiece& piece) const {
  return whole_.at(piece.matrix).narrow(0, piece.from, piece.numel);
}

void OwnedMatrices::update(const std::function<at::Tensor(const at::Tensor& batch)>& updates_of) {
  for (auto& [size, batch] : batches_) {
    each_cut(batch, [](const at::Tensor& cut, const at::Tensor& place) { place.copy_(cut); });
    batch.values = updates_of(batch.values).contiguous();
    each_cut(batch, [](const at::Tensor& cut, const at::Tensor& place) { cut.copy_(place); });
    spread(batch);
  }
}

std::vector<at::Tensor> OwnedMatrices::of(int replica) const {
  std::vector<at::Tensor> matrices;
  for (const auto& [which, values] : whole_)
    if (bucket_.matrices[which].owner.replica == replica) matrices.push_back(values);
  return matrices;
}

int64_t OwnedMatrices::numel(int replica) const {
  int64_t sum = 0;
  for (const at::Tensor& matrix : of(replica)) sum += matrix.numel();
  return sum;
}

}  // namespace fsdp::optim
