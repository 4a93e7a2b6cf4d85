// DistributedSampler: which samples of a dataset this rank takes, for
// torch::data::make_data_loader.
//
//   fsdp::data::DistributedSampler sampler(
//       {.size = n, .world = world.size(), .rank = world.rank()});
//   auto loader = torch::data::make_data_loader(dataset, sampler, batch_per_rank);
//   for (int64_t epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     for (auto& batch : *loader) ...
//   }
//
// The order of an epoch depends on the seed and the epoch alone. Step k takes places
// [k * B, (k + 1) * B) of it, where B is the batch of all ranks together, and rank r the r-th part
// of them: the samples of a step are the same at every number of ranks that gives the same B.
#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace fsdp::data {

struct SamplerOptions {
  int64_t size = 0;  // samples in the dataset
  int world = 1;
  int rank = 0;
  uint64_t seed = 0;
  bool shuffle = true;
  // What to do with a last step that is not full. False: ranks share it evenly, and where that does
  // not come out, samples from the beginning of the epoch fill the gaps (fewer than `world` of
  // them), so that every rank has as many as the others. True: it is left out.
  bool drop_last = false;
};

// A copy shares its state with the original: data loaders keep a copy of their own, and set_epoch()
// must reach it.
class DistributedSampler : public torch::data::samplers::Sampler<std::vector<size_t>> {
 public:
  explicit DistributedSampler(const SamplerOptions& options);

  // Begins an epoch; data loaders call it at begin(). The epoch that was set, at the position that
  // was set; or, after an epoch that was gone through to its end, the next one.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  // This rank's samples of the next step, of `batch_size` a rank. Nothing at the end of the epoch.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  void set_epoch(int64_t epoch);
  int64_t epoch() const;
  // Goes on at sample `position` of the epoch's order, counted over all ranks: steps done * B. What
  // a data loader has fetched ahead counts for position(), so a resumed run sets what it has
  // trained on.
  void set_position(int64_t position);
  int64_t position() const;

  // Epoch and position.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fsdp::data
