#include "optim/matrix_work.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/format.h"
#include "base/seams.h"
#include "fsdp/error.h"
#include "kernels/matrix_update.h"
#include "optim/owned_matrices.h"
#include "shard/contents.h"
#include "shard/group.h"
#include "shard/unit.h"

namespace fsdp::optim {
namespace {

constexpr size_t kPlans = 64;  // kept, of combinations of units with gradients

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
  at::Tensor sent, coming;     // directions
  at::Tensor shared, learned;  // updates, among replicas
  at::Tensor given, updated;   // updates, back
  std::optional<OwnedMatrices> owned = {};
  std::optional<shard::Travelling> there = {}, across = {}, back = {};

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
  flight.there.emplace(model, flight.bucket.group->reduce, flight.coming, flight.sent,
                       pieces.coming_counts, pieces.sent_counts,
                       CallOptions{.label = "matrices to their owners", .identity = flight.number});
}

void MatrixWork::compute(shard::Engine& model, Flight& flight) const {
  if (flight.there) flight.there->wait();
  const MatrixPieces& pieces = flight.pieces;
  const shard::Group& group = *flight.bucket.group;
  const int replica = group.replicate_size > 1 ? group.replicate.rank() : 0;
  OwnedMatrices& owned = flight.owned.emplace(flight.bucket, pieces, replica, flight.options);
  std::vector<at::Tensor> to, from;
  const auto take = [&](const MatrixPiece& piece, const at::Tensor& values) {
    if (flight.bucket.matrices[piece.matrix].owner.replica != replica) return;
    to.push_back(owned.part(piece));
    from.push_back(values);
  };
  for (const MatrixPiece& piece : pieces.own) take(piece, flight.mine(piece));
  if (pieces.travel) Flight::each(pieces.coming, flight.coming, take);
  copy_all(to, from);
  flight.coming.reset();
  owned.update([this](const at::Tensor& batch) { return optimizer.updates_of(batch); });
  if (group.replicate_size == 1) return;

  const auto replicas = static_cast<size_t>(group.replicate_size);
  const int64_t count = owned.numel(replica);
  std::vector<int64_t> sent(replicas, count), coming;
  for (int other = 0; other < group.replicate_size; ++other) coming.push_back(owned.numel(other));
  coming[static_cast<size_t>(replica)] = sent[static_cast<size_t>(replica)] = 0;
  flight.shared = joined(owned.of(replica), flight.options).repeat({group.replicate_size - 1});
  flight.learned =
      at::empty({std::accumulate(coming.begin(), coming.end(), int64_t{0})}, flight.options);
  flight.across.emplace(model, group.replicate, flight.learned, flight.shared, coming, sent,
                        CallOptions{.label = "updates to replicas", .identity = flight.number});
}

void MatrixWork::give_back(shard::Engine& model, Flight& flight) const {
  const MatrixPieces& pieces = flight.pieces;
  OwnedMatrices& owned = *flight.owned;
  std::vector<at::Tensor> to, from;
  if (flight.across) {
    flight.across->wait();
    int64_t at = 0;
    for (int other = 0; other < flight.bucket.group->replicate_size; ++other) {
      if (other == flight.bucket.group->replicate.rank()) continue;
      for (const at::Tensor& matrix : owned.of(other)) {
        to.push_back(matrix);
        from.push_back(flight.learned.narrow(0, at, matrix.numel()));
        at += matrix.numel();
      }
    }
    copy_all(to, from);
    to.clear();
    from.clear();
  }
  for (const MatrixPiece& piece : pieces.own) {
    to.push_back(flight.mine(piece));
    from.push_back(owned.part(piece));
  }
  copy_all(to, from);
  if (!pieces.travel) return;
  std::vector<at::Tensor> given;
  for (const MatrixPiece& piece : pieces.coming) given.push_back(owned.part(piece));
  flight.given = joined(given, flight.options);
  flight.owned.reset();
  flight.updated = at::empty_like(flight.sent);
  flight.back.emplace(model, flight.bucket.group->reduce, flight.updated, flight.given,
                      pieces.sent_counts, pieces.coming_counts,
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
  // A bucket is put together while the one before it is computed, the one before that goes to the
  // replicas, and the one before that returns.
  for (size_t i = 0; i < all.size() + 3; ++i) {
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
    if (i >= 2 && i - 2 < all.size()) give_back(model, *flights[i - 2]);
    if (i < 3) continue;
    finish(*flights[i - 3]);
    for (FlatUpdate* update : flights[i - 3]->updates) done(*update);
    flights[i - 3].reset();
  }
}

}  // namespace fsdp::optim
