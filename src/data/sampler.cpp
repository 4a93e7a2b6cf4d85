#include <torch/serialize/archive.h>
#include <torch/types.h>

#include "base/format.h"
#include "data/order.h"
#include "fsdp/data.h"
#include "fsdp/error.h"

namespace fsdp::data {

struct DistributedSampler::State {
  SamplerOptions options;
  int64_t epoch = 0;
  int64_t position = 0;   // in the epoch's order, over all ranks
  bool finished = false;  // the epoch is exhausted
  bool chosen = true;     // position and epoch were set, so the next reset() keeps them

  size_t sample(int64_t place) const {
    int64_t at = place % options.size;
    if (options.shuffle) at = shuffled(at, options.size, options.seed, epoch);
    return static_cast<size_t>(at);
  }
};

DistributedSampler::DistributedSampler(const SamplerOptions& options)
    : state_(std::make_shared<State>()) {
  if (options.size < 1) {
    throw Error(formatted("a sampler can't have {} samples.", options.size),
                "set SamplerOptions::size to the size of the dataset.");
  }
  if (options.world < 1 || options.rank < 0 || options.rank >= options.world) {
    throw Error(
        formatted("rank {} of a sampler isn't in a world of {}.", options.rank, options.world),
        "ranks count from 0 to world - 1.");
  }
  state_->options = options;
}

void DistributedSampler::reset(std::optional<size_t> new_size) {
  State& state = *state_;
  if (new_size && *new_size > 0) state.options.size = static_cast<int64_t>(*new_size);
  if (!state.chosen) {
    if (state.finished) ++state.epoch;
    state.position = 0;
  }
  state.chosen = false;
  state.finished = false;
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  State& state = *state_;
  const SamplerOptions& options = state.options;
  if (batch_size == 0)
    throw Error("a sampler was asked for a batch of 0 samples.", "pass a batch size of 1 or more.");
  auto each = static_cast<int64_t>(batch_size);
  int64_t left = options.size - state.position;
  if (left < each * options.world) {
    if (left <= 0 || options.drop_last) {
      state.finished = true;
      return std::nullopt;
    }
    each = (left + options.world - 1) / options.world;
  }
  std::vector<size_t> samples;
  samples.reserve(static_cast<size_t>(each));
  int64_t first = state.position + options.rank * each;
  for (int64_t i = 0; i < each; ++i) samples.push_back(state.sample(first + i));
  state.position += each * options.world;
  return samples;
}

void DistributedSampler::set_epoch(int64_t epoch) {
  state_->epoch = epoch;
  state_->position = 0;
  state_->finished = false;
  state_->chosen = true;
}

int64_t DistributedSampler::epoch() const {
  return state_->epoch;
}

void DistributedSampler::set_position(int64_t position) {
  if (position < 0)
    throw Error(formatted("a sampler can't be at position {}.", position), "positions start at 0.");
  state_->position = position;
  state_->finished = false;
  state_->chosen = true;
}

int64_t DistributedSampler::position() const {
  return state_->position;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  auto number = [](int64_t value) { return torch::tensor(value, torch::kInt64); };
  archive.write("epoch", number(state_->epoch), true);
  archive.write("position", number(state_->position), true);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  torch::Tensor epoch, position;
  archive.read("epoch", epoch, true);
  archive.read("position", position, true);
  set_epoch(epoch.item<int64_t>());
  set_position(position.item<int64_t>());
}

}  // namespace fsdp::data
