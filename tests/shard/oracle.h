// The oracle: a plain copy of the model in this process, fed with every rank's batch in turn, and a
// sharded model trained beside it.
//
// Gradients are averaged in double. With bf16 parameters the copy keeps its own float32 masters,
// computes in bf16, and averages the bf16 gradients in double. BatchNorm's buffers are per rank.
#pragma once

#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <vector>

#include "fsdp/fully_shard.h"
#include "shard/models.h"
#include "shard/world.h"

namespace fsdp::shard {
class Flat;
}

namespace fsdp::testing {

inline constexpr uint64_t kSeed = 7;
inline constexpr double kLearningRate = 0.05;

// What one rank does with the model before the optimizer steps, backward included. Returns the loss
// to compare (undefined: none).
using RankWork = std::function<at::Tensor(Built& model, int rank)>;

class Oracle {
 public:
  Oracle(const ModelCase& model, int world, const MixedPrecision& precision, at::Device device);
  Oracle(const ModelCase& model, Built plain, int world, const MixedPrecision& precision);

  // Does every rank's work. Adds the average of the ranks' gradients, weighted by `weights` (of any
  // sum; default: equal), to the existing gradients.
  void run(const RankWork& work, std::vector<double> weights = {});
  void step();  // SGD on the masters
  void zero_grad();

  at::Tensor loss(int rank) const { return losses_[rank]; }
  const NamedTensors& masters() const { return masters_; }
  const NamedTensors& buffers(int rank) const { return buffers_[rank]; }
  at::Tensor gradient(size_t parameter) const { return gradients_[parameter]; }  // in double
  double gradient_norm() const;  // of all gradients together
  void scale_gradients(double factor);
  Built& plain() { return plain_; }
  std::optional<at::ScalarType> type() const { return precision_.param_dtype; }

 private:
  void work_as(int rank, const RankWork& work);

  const ModelCase& model_;
  MixedPrecision precision_;
  Built plain_;
  NamedTensors masters_;
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> losses_;     // of each rank, in the last run
  std::vector<NamedTensors> buffers_;  // of each rank
  std::unique_ptr<torch::optim::SGD> optimizer_;
  int runs_ = 0;
};

// A sharded model and its oracle, trained side by side; every difference fails the test.
class SideBySide {
 public:
  // `options.wrap` defaults to the model's own.
  explicit SideBySide(const ModelCase& model, ShardOptions options = {});
  // For a model that was already sharded, in any way.
  SideBySide(const ModelCase& model, Built mine, Sharded sharded, Oracle oracle);

  Built& mine() { return mine_; }
  const Sharded& sharded() const { return sharded_; }
  Oracle& oracle() { return oracle_; }
  // This rank's batch for the sharded model.
  Batch batch(int step, int rank) const;
  // The usual work of a step: forward and backward.
  RankWork work(int step) const;

  // Does the work on both, then compares loss and gradients.
  void run(const RankWork& work) { run(work, work); }
  void run(const RankWork& mine, const RankWork& reference, std::vector<double> weights = {});
  at::Tensor run_mine(const RankWork& work);
  void step();  // both optimizers; then compares parameters and buffers
  void zero_grad();
  void train(int steps, int first = 0);  // run, step and zero_grad

  void expect_same_loss(const at::Tensor& loss);
  void expect_same_gradients();
  void expect_same_parameters();
  void expect_same_buffers();

 private:
  using FullOf = std::function<at::Tensor(const std::string& parameter)>;
  using ShardOf = std::function<at::Tensor(shard::Flat& flat)>;

  double tolerance() const;
  // The sharded model's full tensors, in the order of the oracle's masters; undefined where
  // `shard_of` is. Collective.
  std::vector<at::Tensor> gathered(const FullOf& full, const ShardOf& shard_of);

  const ModelCase& model_;
  Built mine_;
  Sharded sharded_;
  Oracle oracle_;
  std::unique_ptr<torch::optim::SGD> optimizer_;
  double drift_ = 0;  // allowed difference of the parameters, from the gradients' tolerance
  int runs_ = 0;
  int compared_ = 0;
};

torch::optim::SGDOptions sgd_options(const ModelCase& model);
// The model as every rank builds it.
Built build_seeded(const ModelCase& model, uint64_t seed = kSeed);
// The copy it is compared with.
Built build_reference(const ModelCase& model, const MixedPrecision& precision, at::Device device);
MixedPrecision bf16_precision();  // bf16 parameters, float32 reduction

}  // namespace fsdp::testing
