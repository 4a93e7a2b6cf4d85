// What a rank trains, and the step that it times.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "bench/row.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/train_step.h"
#include "fsdp/world.h"

namespace fsdp::bench {

using Inputs = std::vector<at::Tensor>;

// The model of a row with a batch of random data: the same weights and data as
// bench/peers/peer_fsdp2.py on the CPU.
struct Workload {
  train::Trainee trainee;                         // on the CPU, in float32
  Inputs inputs;                                  // this rank's batch, on the world's device
  std::function<at::Tensor(const Inputs&)> loss;  // forward
  // Set if the parameters have no values yet (row.init = device): draws those of one module.
  std::function<void(torch::nn::Module& one)> draw;
};
Workload make_workload(const Row& row, const World& world);

// fully_shard with blocks (of an mlp, linears) as units, and activation checkpointing as in
// `fsdp train`.
Sharded shard_workload(const Workload& work, const Row& row, const World& world);
// Moves the model to `device` without sharding it.
void place_workload(const Workload& work, at::Device device);

// The allocator's peak in MiB that a plan expects for eager steps; nullopt, with a warning, if it
// can't be planned.
std::optional<double> planned_mb(const Row& row, const World& world);

class PlainAdamW;

// A model and what updates it.
struct Training {
  Workload work;
  at::Device device;
  Sharded sharded;                    // no model if it isn't sharded
  std::shared_ptr<AdamW> optimizer;   // of the sharded model; null: it isn't updated
  std::shared_ptr<TrainStep> graph;   // if steps are graphs
  std::shared_ptr<PlainAdamW> plain;  // of a model that isn't sharded
  // Steps before the memory peak counts. A graph allocates while it is captured and not when it is
  // replayed, so its peak counts from just before the capture.
  int settled = 0;
};
Training make_training(const Row& row, const World& world);

enum class Stage { kForward, kBackward, kClip, kUpdate };

// Takes a step and returns the loss of its last micro-batch (of a graph, the mean over
// micro-batches and ranks). `passed` is called when the host has passed a stage; not by a graph.
at::Tensor take_step(
    const Training& training, const Row& row,
    const std::function<void(Stage)>& passed = [](Stage) {});

}  // namespace fsdp::bench
