// What benchmarks train: a model of src/models with a batch of random data, the same weights and
// data as bench/peers/peer_fsdp2.py on the CPU; and steps, timed as it times them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/peers.h"
#include "fsdp/fully_shard.h"
#include "fsdp/world.h"
#include "train/config.h"

namespace CLI {
class App;
}

namespace fsdp::bench {

struct Shape {
  std::string model = "llama";  // or mlp
  int64_t layers = 6, dim = 384, heads = 6, kv_heads = 0, ffn = 0, vocab = 4096, seq = 128;
  int64_t width = 2048;        // of each of an mlp's 8 linears
  int64_t batch = 4;           // per rank and micro-batch
  std::string dtype = "fp32";  // of parameters in forward and backward; the optimizer has fp32
  bool tied = false, qkv_bias = false;
  int64_t accumulate = 1;  // micro-batches per step
};

// Declares a flag for each field, with the peer's name if it has one.
void add_shape_flags(CLI::App& command, Shape& shape);
std::vector<std::string> flags_of(const Shape& shape);
std::vector<std::string> peer_flags_of(const Shape& shape);
std::vector<std::string> peer_recomputes(const std::string& activations);  // the peer's flags
std::string title(const Shape& shape);                                     // "Llama 13.8M"
std::string description(const Shape& shape);  // "Llama 13.8M: 6 layers, dim 384, …"
int64_t parameter_count(const Shape& shape);
int64_t tokens_of(const Shape& shape);  // per rank and step; for an mlp, rows
// Per rank and step, forward and backward: 6 per token and weight in a matrix product (the head is
// one, an embedding lookup isn't), and the causal half of attention.
double flops_of(const Shape& shape);

struct Workload {
  std::shared_ptr<torch::nn::Module> module;  // on the CPU, in float32
  WrapPolicy wrap;                            // blocks of the Llama, linears of the MLP
  WrapPolicy feed_forwards;                   // of those blocks; the MLP has none
  std::function<at::Tensor()> loss;           // forward on this rank's batch, on the world's device
  std::vector<at::Tensor> inputs;             // that batch
  std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>
      loss_of;                                       // forward on other inputs
  bool unfilled = false;                             // parameters have no values yet; `draw` …
  std::function<void(torch::nn::Module& one)> draw;  // … draws those of one module
};

// Draws weights on the CPU, which takes half a minute for the largest model. `unfilled`:
// shard_workload draws them on the device. With the same --init the peer has the same weights.
Workload make_workload(const Shape& shape, const World& world, bool unfilled = false);

// Draws the weights of an unfilled workload on `device`, without sharding.
void draw_whole(const Workload& work, at::Device device);

// fully_shard with the workload's units, and activation checkpointing as in `fsdp train`.
Sharded shard_workload(const Workload& work, const World& world, ShardOptions how,
                       const memory::ActivationsConfig& activations = {});

// The allocator's peak in MiB that a plan expects for eager steps with the options of
// shard_workload; nullopt, with a warning, if it can't be planned.
std::optional<double> planned_mb(const Shape& shape, const World& world, const ShardOptions& how,
                                 const memory::ActivationsConfig& activations, double clip);

MixedPrecision mixed_precision(const Shape& shape);  // reduces and keeps gradients in float32

// For named rows: on a GPU, if nothing is reduced or accumulated, gradients stay as the matrix
// products give them; else they are summed and kept in float32, as FSDP2's are. `grad_dtype` (fp32
// or bf16) overrides this if it isn't empty.
MixedPrecision row_precision(const Shape& shape, const World& world, const std::string& grad_dtype);

struct Step {
  std::function<at::Tensor()> forward;  // returns the loss
  std::function<void()> clip;
  std::function<void()> update;  // optimizer step and zero_grad
};

// Seconds: medians over the steps, on the host's clock. On a GPU only `step` includes the device's
// time; the parts are the time the host takes to launch.
struct Timing {
  double step = 0, forward = 0, backward = 0, clip = 0, update = 0;
  std::vector<double> losses;  // of all steps, with warm-up; mean over ranks
};

Timing time_steps(const Step& step, int warmup, int steps, const World& world);

// The mean over ranks of each value.
std::vector<double> means_over_ranks(const std::vector<double>& values, const World& world);
Json line_of(const Timing& timing);            // what a rank prints
Json losses_of(std::vector<double> of_steps);  // the losses among that

double median(std::vector<double> values);

}  // namespace fsdp::bench
