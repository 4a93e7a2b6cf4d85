// Shared by the tests of TrainStep: a plan of steps, taken eagerly, written out, and recorded;
// and comparisons of the results.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/recompute.h"
#include "fsdp/train_step.h"
#include "optim/states.h"
#include "optim/work_again.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/models.h"
#include "shard/oracle.h"
#include "shard/update.h"
#include "shard/world.h"

namespace fsdp::testing {

using Inputs = TrainStep::Inputs;

inline bool on_gpu() {
  return !test_device().is_cpu();
}

class GraphedSteps : public ::testing::Test {
 protected:
  void SetUp() override {
    set_deterministic(on_gpu());
    if (!on_gpu()) stand_in_.emplace(WorkAgain::seams());
  }
  void TearDown() override {
    set_deterministic(false);
    stand_in_.reset();
  }

 private:
  std::optional<WithSeams> stand_in_;

  // Deterministic operators, so that results can be compared on a GPU.
  static void set_deterministic(bool on) {
    at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/true);
    at::globalContext().setDeterministicCuDNN(on);
  }
};

struct Plan {
  std::string model = "mlp";
  MixedPrecision precision = {};
  TrainStepOptions step = {};
  int64_t micro_batches = 1;
  int steps = 10;
  bool sgd = false;
  std::function<std::unique_ptr<Optimizer>(const Sharded&)> optimizer = {};  // instead
  ReshardAfterForward reshard = {};
  std::optional<Recompute> recompute = {};                       // of every unit
  std::function<void(Inputs& inputs, int step)> change = {};     // of this rank's inputs
  std::function<void(Built& model, int step)> between = {};      // after each step
  std::function<void(Optimizer& optimizer, int step)> set = {};  // before each step
};

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<int> skipped;
  NamedTensors parameters, buffers;
  std::vector<int64_t> updates;  // of each flat, by the optimizer
  Traffic traffic;
  int64_t memory = 0;
  bool replayed = false;
  int64_t recordings = 0;
  std::string why_eager;
};

// Common to both ways.
class Trial {
 public:
  explicit Trial(const Plan& chosen) : plan(chosen), model_case_(model_case(chosen.model)) {
    built = build_seeded(model_case_);
    sharded = fully_shard(built.module, ShardOptions{.wrap = model_case_.wrap,
                                                     .mixed_precision = plan.precision,
                                                     .reshard_after_forward = plan.reshard,
                                                     .device = test_device()});
    if (plan.recompute)
      apply_activation_checkpointing(sharded,
                                     RecomputePolicy(model_case_.wrap, {.mode = *plan.recompute}));
    if (plan.optimizer)
      optimizer = plan.optimizer(sharded);
    else if (plan.sgd)
      optimizer = std::make_unique<SGD>(sharded, SGDOptions{.lr = 0.05, .momentum = 0.9});
    else
      optimizer = std::make_unique<AdamW>(
          sharded, AdamWOptions{.lr = 1e-2, .eps = 1e-3, .groups = {no_decay()}});
    sharded.reset_traffic();
  }

  std::vector<Inputs> inputs(int step) const {
    std::vector<Inputs> all;
    for (int i = 0; i < plan.micro_batches; ++i) {
      Batch batch = model_case_.batch(static_cast<int>(step * plan.micro_batches + i), rank());
      all.push_back({batch.x, batch.y});
      if (plan.change) plan.change(all.back(), step);
    }
    return all;
  }

  Outcome finish(Outcome outcome) {
    const StateDict full = sharded.full_state_dict();
    for (const auto& [name, parameter] : built.parameters)
      outcome.parameters.emplace_back(name, full.at(name).full());
    for (const auto& [name, buffer] : built.module->named_buffers().pairs())
      outcome.buffers.emplace_back(name, buffer.clone());
    for (const auto* flat : shard::trainable_flats(*shard::lock(sharded)))
      outcome.updates.push_back(optim::states_of(*optimizer).steps(*flat));
    return outcome;
  }

  Plan plan;
  Built built;
  Sharded sharded;
  std::unique_ptr<Optimizer> optimizer;

 private:
  const ModelCase& model_case_;
};

inline TrainStep step_of(Trial& trial) {
  return TrainStep(
      trial.sharded, *trial.optimizer,
      [&trial](const Inputs& inputs) {
        return trial.built.loss({0, inputs[0], inputs[1]});
      },
      trial.plan.step);
}

inline Outcome graphed(const Plan& plan) {
  Trial trial(plan);
  TrainStep step = step_of(trial);
  Outcome outcome;
  for (int i = 0; i < plan.steps; ++i) {
    if (plan.set) plan.set(*trial.optimizer, i);
    StepResult result = step(trial.inputs(i));
    outcome.losses.push_back(result.loss.item<double>());
    outcome.norms.push_back(result.norm.item<double>());
    outcome.skipped.push_back(result.skipped.item<bool>());
    if (plan.between) plan.between(trial.built, i);
  }
  step.wait();
  outcome.traffic = trial.sharded.traffic();
  outcome.memory = trial.sharded.memory().total();
  outcome.replayed = step.replayed();
  outcome.recordings = step.recordings();
  outcome.why_eager = step.why_eager();
  return trial.finish(std::move(outcome));
}

inline Outcome eager(Plan plan) {
  plan.step.graph = false;
  return graphed(plan);
}

// As users write it without TrainStep.
inline Outcome by_hand(const Plan& plan) {
  Trial trial(plan);
  Outcome outcome;
  for (int i = 0; i < plan.steps; ++i) {
    if (plan.set) plan.set(*trial.optimizer, i);
    double loss = 0;
    for (const Inputs& inputs : trial.inputs(i)) {
      Batch batch{0, inputs[0].to(test_device()), inputs[1].to(test_device())};
      at::Tensor part = trial.built.loss(batch) / static_cast<double>(plan.micro_batches);
      loss += part.item<double>();
      part.backward();
    }
    outcome.losses.push_back(sum_over_ranks(loss) / world_size());
    double clip = plan.step.clip > 0 ? plan.step.clip : std::numeric_limits<double>::infinity();
    outcome.norms.push_back(trial.sharded.clip_grad_norm_(clip).item<double>());
    bool finite = std::isfinite(outcome.losses.back()) && std::isfinite(outcome.norms.back());
    outcome.skipped.push_back(!finite);
    if (finite) trial.optimizer->step();
    trial.optimizer->zero_grad();
    if (plan.between) plan.between(trial.built, i);
  }
  outcome.traffic = trial.sharded.traffic();
  outcome.memory = trial.sharded.memory().total();
  return trial.finish(std::move(outcome));
}

inline void expect_same_tensors(const NamedTensors& a, const NamedTensors& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    bool same = tolerance == 0 ? at::equal(a[i].second, b[i].second)
                               : at::allclose(a[i].second, b[i].second, tolerance, tolerance);
    EXPECT_TRUE(same) << a[i].first << " differs by "
                      << (a[i].second - b[i].second).abs().max().item<double>();
  }
}

inline void expect_same_numbers(const std::vector<double>& a, const std::vector<double>& b,
                                double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i]))
      EXPECT_EQ(std::isfinite(a[i]), std::isfinite(b[i])) << "step " << i;
    else
      EXPECT_NEAR(a[i], b[i], tolerance * std::max(1.0, std::abs(b[i]))) << "step " << i;
  }
}

inline void expect_same(const Outcome& a, const Outcome& b, double tolerance = 0) {
  expect_same_numbers(a.losses, b.losses, tolerance);
  expect_same_numbers(a.norms, b.norms, tolerance);
  EXPECT_EQ(a.skipped, b.skipped);
  EXPECT_EQ(a.updates, b.updates);
  expect_same_tensors(a.parameters, b.parameters, tolerance);
  expect_same_tensors(a.buffers, b.buffers, tolerance);
  if (tolerance == 0) {
    EXPECT_EQ(a.memory, b.memory);
  }
}

// The steps of `plan` written out, eager and replayed: all the same.
inline Outcome expect_same_every_way(const Plan& plan) {
  Outcome plain = by_hand(plan), unrecorded = eager(plan), recorded = graphed(plan);
  expect_same(recorded, unrecorded);
  // With capturable numbers (a GPU's) a learning rate is a float32.
  expect_same(unrecorded, plain, on_gpu() ? 1e-5 : 0);
  EXPECT_TRUE(recorded.replayed) << recorded.why_eager;
  EXPECT_EQ(recorded.recordings, 1);
  EXPECT_EQ(unrecorded.recordings, 0);
  return recorded;
}

}  // namespace fsdp::testing
