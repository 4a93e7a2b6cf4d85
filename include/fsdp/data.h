/// @file
/// Which samples of a dataset this rank takes, for torch::data::make_data_loader.
///
///     fsdp::data::DistributedSampler sampler(
///         {.size = n, .world = world.size(), .rank = world.rank()});
///     auto loader = torch::data::make_data_loader(dataset, sampler, batch_per_rank);
///     for (int64_t epoch = 0; epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : *loader) ...
///     }
///
/// The order of an epoch depends only on the seed and the epoch. With a global batch of B samples,
/// step k takes places [k · B, (k + 1) · B) of that order, and rank r the r-th part of them. So the
/// samples of a step are the same for every number of ranks with the same B.
#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

/// Samplers and tokenizers.
namespace fsdp::data {

/// Options of DistributedSampler.
struct SamplerOptions {
  int64_t size = 0;     ///< Number of samples in the dataset.
  int world = 1;        ///< Number of ranks.
  int rank = 0;         ///< This process's rank.
  uint64_t seed = 0;    ///< Seed of the order.
  bool shuffle = true;  ///< False: the dataset's own order, in every epoch.

  /// Whether to skip a last step that isn't full. False: ranks share it evenly, and up to world - 1
  /// samples from the beginning of the epoch fill the gaps, so that all ranks have equally many.
  bool drop_last = false;
};

/// The samples of one rank. Copies share their state, because data loaders keep a copy that
/// set_epoch() must reach.
class DistributedSampler : public torch::data::samplers::Sampler<std::vector<size_t>> {
 public:
  /// Starts at epoch 0, position 0.
  explicit DistributedSampler(const SamplerOptions& options);

  /// Begins an epoch; data loaders call it in begin(). The epoch and position that were set, or,
  /// after a finished epoch, the next one. `new_size`, if given, is the dataset's new size.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  /// This rank's samples of the next step, `batch_size` per rank. nullopt at the end of the epoch.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  /// Goes to the beginning of an epoch.
  void set_epoch(int64_t epoch);
  /// The current epoch.
  int64_t epoch() const;
  /// Goes to a sample of the epoch's order, counted over all ranks: finished steps · B. To resume a
  /// run, set what it has trained on; position() may be further because loaders fetch ahead.
  void set_position(int64_t position);
  /// The next sample of the epoch's order, counted over all ranks.
  int64_t position() const;

  /// Writes epoch and position.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Reads epoch and position.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fsdp::data
