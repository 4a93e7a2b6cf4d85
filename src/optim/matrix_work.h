// MatrixKinds: which parameters of a model are matrices. MatrixWork: a MatrixOptimizer's plan of
// buckets, and their way to the owners and back.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "fsdp/muon.h"
#include "optim/matrix_plan.h"
#include "shard/update.h"

namespace fsdp::optim {

struct MatrixKinds {
  MatrixKinds(const shard::Engine& model, MatrixParameters chosen);

  std::vector<Matrix> matrices_of(const shard::Flat& flat, size_t parameter) const;

  MatrixParameters options;
  std::set<std::string> names;  // of all matrices
};

int64_t length_of(const Optimizer::Piece& piece);

// The matrices of a flat in one update.
struct FlatUpdate {
  shard::Flat* flat = nullptr;
  Optimizer::Update what;              // its pieces with matrices
  std::vector<at::Tensor> directions;  // of each piece; after the exchange, its update
};

struct MatrixWork {
  explicit MatrixWork(const MatrixOptimizer& of) : optimizer(of) {}

  // Memory for the directions of the pieces, on `device`.
  void make_room(FlatUpdate& update, at::Device device, bool pinned = false) const;
  // Writes the directions.
  std::function<void()> directing(const std::vector<const FlatUpdate*>& updates) const;
  // Turns directions into updates: buckets one after the other, so that each travels while others
  // are computed. `direct`: the directions of a bucket aren't written yet. Calls `done` for every
  // flat whose updates are there.
  void exchange(shard::Engine& model, std::vector<FlatUpdate>& updates, bool direct,
                const std::function<void(FlatUpdate& update)>& done);
  // Applies the updates of a flat.
  std::function<void()> applying(const FlatUpdate& update) const;

 private:
  struct Flight;
  const std::vector<Bucket>& buckets(shard::Engine& model, const std::vector<FlatUpdate>& updates);
  void start(shard::Engine& model, Flight& flight, bool direct) const;
  void compute(shard::Engine& model, Flight& flight) const;
  void give_back(shard::Engine& model, Flight& flight) const;
  void finish(Flight& flight) const;

  const MatrixOptimizer& optimizer;
  std::vector<bool> trained_;                                     // what the plans were made for
  std::map<std::pair<const shard::Flat*, int64_t>, Owner> owners_;  // by flat and begin
  std::map<std::vector<shard::Flat*>, std::vector<Bucket>> plans_;
};

}  // namespace fsdp::optim
