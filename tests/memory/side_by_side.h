// Runs a model plainly and with recomputation, from the same seed; every bit that differs is a
// failure.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/recompute.h"

namespace fsdp::testing {

struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor()> loss;  // a forward pass
  RecomputePolicy policy;            // which modules are regions
};

// Makes a subject whose policy uses `mode`. The caller seeds the generator.
using Make = std::function<Subject(Recompute mode)>;

struct Outcome {
  std::vector<at::Tensor> losses, gradients, buffers;
  at::Tensor random;  // the generator's state at the end
  int64_t kept = 0;   // bytes between forward and backward, in the last step
  int64_t left = 0;   // bytes after everything is freed
  std::string error;  // of an exception; the other fields are then invalid
};

struct RunOptions {
  bool recompute = true;
  Recompute mode = Recompute::FULL;
  int steps = 2;
  int forwards = 1;                            // before one backward
  bool retain = false;                         // backward twice
  bool less = true;                            // expect no more to be kept than in a plain run
  std::function<void(Subject&)> prepare = {};  // before the policy is applied
};

Outcome run(const Make& make, const RunOptions& options);
void expect_equal(const Outcome& plain, const Outcome& other);
// Compares a plain run with full, selective and offloaded ones.
void expect_same(const Make& make, RunOptions options = {});

}  // namespace fsdp::testing
