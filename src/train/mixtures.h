// Mixtures of experts in a run: what a step counts of their routers, and biases that follow it.
//
// The tally of a step (TrainStepOptions::tally) has for each mixture, in module order, the tokens
// of each expert, the sum of the entropies of tokens' scores, and the number of tokens.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "fsdp/nn/moe.h"

namespace fsdp::train {

struct Mixtures {
  std::vector<std::shared_ptr<nn::MoEImpl>> all;

  int64_t numbers() const;  // of their tally
  // They count into parts of `tally`, float64 [numbers()].
  void count_into(const at::Tensor& tally) const;
  // What a step does with the tally of all ranks: biases move by `rate`. Empty: nothing.
  std::function<void(const at::Tensor& tally)> balance(double rate) const;
};
Mixtures mixtures_of(const torch::nn::Module& module);

// What a tally says.
struct ExpertFigures {
  std::vector<std::vector<double>> load;  // of each mixture's experts, relative to the mean
  double most = 0;                        // the largest
  double least = 0;                       // the smallest
  double entropy = 0;                     // mean over tokens and mixtures, in nats
  double dropped = 0;                     // choices of tokens that no expert computed
};
ExpertFigures figures_of(const Mixtures& mixtures, const std::vector<double>& tally);

}  // namespace fsdp::train
