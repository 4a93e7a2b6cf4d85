#include "optim/matrix_work.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "base/seams.h"
#include "fsdp/error.h"
#include "kernels/matrix_update.h"
#include "shard/contents.h"
#include "shard/unit.h"

namespace fsdp::optim {
namespace {

constexpr size_t kPlans = 64;  // kept, of combinations of units with gradients

// A matrix, or a part of one, beside others of the same sizes.
struct Place {
  size_t matrix;  // of the bucket
  int64_t part;   // -1: the whole
  int64_t begin;  // of the part
};

// Elements [offset, offset + numel) of a flat's shard in the tensors of its pieces.
at::Tensor find_in(const FlatUpdate& update, int64_t offset, int64_t numel) {
  for (size_t i = 0; i < update.directions.size(); ++i) {
    const int64_t begin = update.what.pieces[i].begin;
    if (begin <= offset && offset + numel <= begin + update.directions[i].numel())
      return update.directions[i].narrow(0, offset - begin, numel);
  }
  throw Error(update.flat->unit().label() + ": a matrix isn't inside of one stretch of its shard.",
              "this is an error in fsdp; please report it.");
}

void copy_all(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  if (!to.empty()) at::_foreach_copy_(to, from);
}

at::Tensor joined(const std::vector<at::Tensor>& parts, at::TensorOptions options) {
  return parts.empty() ? at::empty({0}, options) : at::cat(parts);
}

bool is_head(const std::string& name) {
  const size_t end = name.rfind('.');
  if (end == std::string::npos) return false;
  const size_t begin = name.rfind('.', end - 1);
  const std::string module = name.substr(begin + 1, end - begin - 1);
  return module == "lm_head" || module == "head" || module == "output";
}

bool is_matrix(const shard::Parameter& p, const MatrixParameters& options) {
  const size_t dims = p.sizes.size();
  if (dims < 2 || p.handle.numel() == 0 || p.is_norm || p.is_embedding) return false;
  if (dims > 3 && !p.is_convolution) return false;
  if (dims > 2 && p.order[0] != 0) return false;
  return std::none_of(p.names.begin(), p.names.end(), [&](const std::string& name) {
    return options.others ? options.others(name, p.handle) : is_head(name);
  });
}

// The matrices of a bucket that this rank owns, in batches of equal sizes.
class OwnedMatrices {
 public:
  OwnedMatrices(const Bucket& bucket, const MatrixPieces& pieces, at::TensorOptions options)
      : bucket_(bucket), options_(options) {
    for (const MatrixPiece& piece : pieces.own) add(piece.matrix);
    for (const MatrixPiece& piece : pieces.coming) add(piece.matrix);
    for (auto& [size, batch] : batches_) {
      const auto count = static_cast<int64_t>(batch.places.size());
      batch.values = at::empty({count, size.first, size.second}, options);
      spread(batch);
    }
  }

  at::Tensor part(const MatrixPiece& piece) const {
    return whole_.at(piece.matrix).narrow(0, piece.from, piece.numel);
  }

  template <typename UpdatesOf>
  void update(const UpdatesOf& updates_of) {
    for (auto& [size, batch] : batches_) {
      each_cut(batch, [](const at::Tensor& cut, const at::Tensor& place) { place.copy_(cut); });
      batch.values = updates_of(batch.values).contiguous();
      each_cut(batch, [](const at::Tensor& cut, const at::Tensor& place) { cut.copy_(place); });
      spread(batch);
    }
  }

 private:
  struct Batch {
    std::vector<Place> places;
    at::Tensor values;  // [places, rows, cols]
  };

  void add(size_t which) {
    const Matrix& matrix = bucket_.matrices[which];
    if (!whole_.try_emplace(which).second) return;
    if (matrix.parts.empty())
      return batches_[{matrix.rows, matrix.cols}].places.push_back({which, -1, 0});
    whole_[which] = at::empty({matrix.numel()}, options_);
    int64_t begin = 0;
    for (size_t i = 0; i < matrix.parts.size(); ++i) {
      const int64_t part = matrix.parts[i];
      batches_[matrix.dim == 0 ? std::pair(part, matrix.cols) : std::pair(matrix.rows, part)]
          .places.push_back({which, static_cast<int64_t>(i), begin});
      begin += part;
    }
  }

  // Matrices that aren't cut are in the batch itself.
  void spread(const Batch& batch) {
    for (size_t i = 0; i < batch.places.size(); ++i)
      if (batch.places[i].part < 0)
        whole_[batch.places[i].matrix] = batch.values.select(0, static_cast<int64_t>(i)).view({-1});
  }

  template <typename Body>
  void each_cut(const Batch& batch, const Body& body) {
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

  const Bucket& bucket_;
  const at::TensorOptions options_;
  std::map<std::pair<int64_t, int64_t>, Batch> batches_;  // by size
  std::map<size_t, at::Tensor> whole_;                    // by matrix, flat
};

}  // namespace

int64_t length_of(const Optimizer::Piece& piece) {
  return (piece.rest.defined() ? piece.rest : piece.master).numel();
}

// --- kinds ---

MatrixKinds::MatrixKinds(const shard::Engine& model, MatrixParameters chosen)
    : options(std::move(chosen)) {
  for (const shard::Flat* flat : shard::all_flats(model))
    for (const shard::Parameter& p : flat->parameters())
      if (is_matrix(p, options)) names.insert(p.names.begin(), p.names.end());
}

std::vector<Matrix> MatrixKinds::matrices_of(const shard::Flat& flat, size_t parameter) const {
  const shard::Parameter& p = flat.parameters()[parameter];
  if (!p.handle.requires_grad() || !names.contains(p.name())) return {};
  const bool experts = p.sizes.size() == 3 && !p.is_convolution;
  const size_t outer = experts ? 1 : 0;  // the first dimension of a matrix
  const int64_t count = experts ? p.sizes[0] : 1;
  const int64_t rows = p.sizes[p.order[outer]], cols = p.handle.numel() / count / rows;
  Matrix matrix{.parameter = parameter, .rows = rows, .cols = cols};
  if (options.split) {
    const MatrixSplit split = options.split(p.name(), p.handle);
    matrix.parts = split.sizes;
    matrix.dim = p.order[outer] == split.dim + static_cast<int64_t>(outer) ? 0 : 1;
    int64_t sum = 0;
    for (const int64_t size : split.sizes) sum = size < 1 ? -1 : sum + size;
    if (!split.sizes.empty() && sum != (matrix.dim == 0 ? rows : cols))
      throw Error(
          formatted("\"{}\" can't be cut along its dimension {} into {} parts of {} in all.",
                    p.name(), split.dim, split.sizes.size(), sum),
          "the sizes must be positive and add up to the matrix's; dim is 0 or 1.");
  }
  std::vector<Matrix> all;
  for (int64_t i = 0; i < count; ++i) {
    matrix.begin = flat.layout().offset(parameter) + i * rows * cols;
    all.push_back(matrix);
  }
  return all;
}

// --- the elementwise parts ---

void MatrixWork::make_room(FlatUpdate& update, at::Device device, bool pinned) const {
  const auto type = travelling_type(*update.flat);
  for (const auto& piece : update.what.pieces)
    update.directions.push_back(at::empty(
        {length_of(piece)}, at::TensorOptions(type).device(device).pinned_memory(pinned)));
}

std::function<void()> MatrixWork::directing(const std::vector<const FlatUpdate*>& updates) const {
  Optimizer::Update all;
  std::vector<at::Tensor> directions;
  for (const FlatUpdate* update : updates) {
    all.factor = update->what.factor;
    all.rates = update->what.rates;
    all.counts = update->what.counts;
    all.pieces.insert(all.pieces.end(), update->what.pieces.begin(), update->what.pieces.end());
    directions.insert(directions.end(), update->directions.begin(), update->directions.end());
  }
  return optimizer.prepare_directions(all, directions);
}

std::function<void()> MatrixWork::applying(const FlatUpdate& update) const {
  std::vector<kernels::AppliedTensors> tensors;
  for (size_t i = 0; i < update.directions.size(); ++i) {
    const Optimizer::Piece& piece = update.what.pieces[i];
    const Optimizer::Group& group = optimizer.groups()[piece.group];
    tensors.push_back({.master = piece.master,
                       .low = piece.low,
                       .rest = piece.rest,
                       .update = update.directions[i],
                       .lr = group.lr,
                       .weight_decay = group.weight_decay});
    if (update.what.rates.defined())
      tensors.back().rates = update.what.rates.select(0, static_cast<int64_t>(piece.group));
  }
  return [tensors = std::move(tensors), factor = update.what.factor] {
    kernels::apply_update(tensors, factor);
  };
}

// --- the plan ---

const std::vector<Bucket>& MatrixWork::buckets(shard::Engine& model,
                                               const std::vector<FlatUpdate>& updates) {
  const auto of = [&](const shard::Flat& flat, size_t parameter) {
    return optimizer.kinds_->matrices_of(flat, parameter);
  };
  const auto all = shard::trainable_flats(model);
  std::vector<bool> trained;
  for (const shard::Flat* flat : all)
    for (const auto& p : flat->parameters()) trained.push_back(p.handle.requires_grad());
  if (trained != trained_) {
    trained_ = std::move(trained);
    plans_.clear();
    owners_.clear();
    auto whole = plan_buckets(all, of, seams().matrix_bucket);
    give_owners(whole);
    for (const Bucket& bucket : whole)
      for (const Matrix& matrix : bucket.matrices)
        owners_[{bucket.flats[matrix.flat], matrix.begin}] = matrix.owner;
  }
  std::vector<shard::Flat*> flats;
  for (const FlatUpdate& update : updates) flats.push_back(update.flat);
  if (plans_.size() >= kPlans) plans_.clear();  // other units have gradients in every step
  const auto [known, fresh] = plans_.try_emplace(flats);
  if (!fresh) return known->second;
  known->second = plan_buckets(flats, of, seams().matrix_bucket);
  for (Bucket& bucket : known->second)
    for (Matrix& matrix : bucket.matrices)
      matrix.owner = owners_.at({bucket.flats[matrix.flat], matrix.begin});
  return known->second;
}

// --- the exchange ---

// A bucket on its way.
struct MatrixWork::Flight {
  const Bucket& bucket;
  int64_t number;
  std::vector<FlatUpdate*> updates;  // of its flats
  MatrixPieces pieces;
  at::TensorOptions options = {};
  // Travelling tensors live until they have arrived.
  at::Tensor sent, coming;    // directions
  at::Tensor given, updated;  // updates, back
  std::optional<shard::Travelling> there = {}, back = {};

  at::Tensor mine(const MatrixPiece& piece) const {
    return find_in(*updates[bucket.matrices[piece.matrix].flat], piece.offset, piece.numel);
  }
  // Calls body(piece, part of `memory`) for pieces that are in it one after the other.
  template <typename Body>
  static void each(const std::vector<MatrixPiece>& some, const at::Tensor& memory,
                   const Body& body) {
    int64_t at = 0;
    for (const MatrixPiece& piece : some) {
      body(piece, memory.narrow(0, at, piece.numel));
      at += piece.numel;
    }
  }
};

void MatrixWork::start(shard::Engine& model, Flight& flight, bool direct) const {
  if (direct)
    directing(std::vector<const FlatUpdate*>(flight.updates.begin(), flight.updates.end()))();
  const MatrixPieces& pieces = flight.pieces;
  flight.options = at::TensorOptions(flight.bucket.type).device(shard::device_of(model));
  if (!pieces.travel) return;
  std::vector<at::Tensor> sent;
  for (const MatrixPiece& piece : pieces.sent) sent.push_back(flight.mine(piece));
  int64_t coming = 0;
  for (const int64_t count : pieces.coming_counts) coming += count;
  flight.sent = joined(sent, flight.options);
  flight.coming = at::empty({coming}, flight.options);
  flight.there.emplace(model, *flight.bucket.group, flight.coming, flight.sent,
                       pieces.coming_counts, pieces.sent_counts,
                       CallOptions{.label = "matrices to their owners", .identity = flight.number});
}

void MatrixWork::compute(shard::Engine& model, Flight& flight) const {
  if (flight.there) flight.there->wait();
  const MatrixPieces& pieces = flight.pieces;
  OwnedMatrices owned(flight.bucket, pieces, flight.options);
  std::vector<at::Tensor> there, here;
  const auto meet = [&](const MatrixPiece& piece, const at::Tensor& values) {
    there.push_back(owned.part(piece));
    here.push_back(values);
  };
  for (const MatrixPiece& piece : pieces.own) meet(piece, flight.mine(piece));
  if (pieces.travel) Flight::each(pieces.coming, flight.coming, meet);
  copy_all(there, here);
  owned.update([this](const at::Tensor& batch) { return optimizer.updates_of(batch); });

  there.clear();
  here.clear();
  for (const MatrixPiece& piece : pieces.own) meet(piece, flight.mine(piece));
  copy_all(here, there);
  flight.coming.reset();
  if (!pieces.travel) return;
  std::vector<at::Tensor> given;
  for (const MatrixPiece& piece : pieces.coming) given.push_back(owned.part(piece));
  flight.given = joined(given, flight.options);
  flight.updated = at::empty_like(flight.sent);
  flight.back.emplace(model, *flight.bucket.group, flight.updated, flight.given, pieces.sent_counts,
                      pieces.coming_counts,
                      CallOptions{.label = "updates of matrices", .identity = flight.number});
}

void MatrixWork::finish(Flight& flight) const {
  if (!flight.back) return;
  flight.back->wait();
  std::vector<at::Tensor> to, from;
  Flight::each(flight.pieces.sent, flight.updated,
               [&](const MatrixPiece& piece, const at::Tensor& values) {
                 to.push_back(flight.mine(piece));
                 from.push_back(values);
               });
  copy_all(to, from);
}

void MatrixWork::exchange(shard::Engine& model, std::vector<FlatUpdate>& updates, bool direct,
                          const std::function<void(FlatUpdate& update)>& done) {
  const std::vector<Bucket>& all = buckets(model, updates);
  std::vector<std::unique_ptr<Flight>> flights(all.size());
  // A bucket is put together while the one before it is computed and the one before that returns.
  for (size_t i = 0; i < all.size() + 2; ++i) {
    if (i < all.size()) {
      std::vector<FlatUpdate*> those;
      for (const shard::Flat* flat : all[i].flats)
        those.push_back(&*std::find_if(updates.begin(), updates.end(),
                                       [&](const auto& update) { return update.flat == flat; }));
      const int rank = all[i].flats.front()->rank();
      flights[i].reset(new Flight{all[i], static_cast<int64_t>(i) + 1, std::move(those),
                                  pieces_of(all[i], rank)});
      start(model, *flights[i], direct);
    }
    if (i >= 1 && i - 1 < all.size()) compute(model, *flights[i - 1]);
    if (i < 2) continue;
    finish(*flights[i - 2]);
    for (FlatUpdate* update : flights[i - 2]->updates) done(*update);
    flights[i - 2].reset();
  }
}

}  // namespace fsdp::optim
