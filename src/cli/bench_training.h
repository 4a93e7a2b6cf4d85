// What benchmarks train: a model of src/models by its shape with a batch of random data, the same
// weights and data as bench/peers/peer_fsdp2.py has on the CPU; and the steps, timed as it times
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_ranks.h"
#include "fsdp/fully_shard.h"
#include "fsdp/world.h"
#include "train/config.h"

namespace CLI {
class App;
}

namespace fsdp::cli {

struct Shape {
  std::string model = "llama";  // or mlp
  int64_t layers = 6, dim = 384, heads = 6, kv_heads = 0, ffn = 0, vocab = 4096, seq = 128;
  int64_t width = 2048;        // of an mlp, which has 8 linears
  int64_t batch = 4;           // a rank
  std::string dtype = "fp32";  // bf16: parameters and gradients' way; the optimizer sees fp32
  bool tied = false, qkv_bias = false;
  int64_t accumulate = 1;  // micro-batches of `batch` a step
};

// Declares a flag for each field, named as the peer names it where it has one.
void add_shape_flags(CLI::App& command, Shape& shape);
std::vector<std::string> flags_of(const Shape& shape);
std::vector<std::string> peer_flags_of(const Shape& shape);
std::vector<std::string> peer_recomputes(const std::string& activations);  // its flags for that
std::string title(const Shape& shape);                                     // "Llama 13.8M"
std::string description(const Shape& shape);  // "Llama 13.8M: 6 layers, dim 384, …"
int64_t parameter_count(const Shape& shape);
int64_t tokens_of(const Shape& shape);  // of a rank and step; rows of an mlp
// Of a rank and step, forward and backward: 6 for each token and weight that is in a matrix product
// (the head is, looking up an embedding is none), and the causal half of attention.
double flops_of(const Shape& shape);

struct Workload {
  std::shared_ptr<torch::nn::Module> module;  // on the CPU, in float32
  WrapPolicy wrap;                            // blocks of the Llama, linears of the MLP
  WrapPolicy feed_forwards;                   // of those blocks; the MLP has none
  std::function<at::Tensor()> loss;           // forward on this rank's batch, on `world`'s device
  std::vector<at::Tensor> inputs;             // that batch
  std::function<at::Tensor(const std::vector<at::Tensor>& inputs)> loss_of;  // forward on another
  bool unfilled = false;                             // parameters have no values yet …
  std::function<void(torch::nn::Module& one)> draw;  // … and this draws a module's own
};

// Weights are drawn on the CPU, which is half a minute for the largest. `unfilled`: shard_workload
// draws them on the device. The peer has the same with that --init.
Workload make_workload(const Shape& shape, const World& world, bool unfilled = false);

// What shard_workload does to an unfilled one, without sharding it.
void draw_whole(const Workload& work, at::Device device);

// fully_shard with the workload's units, and with activations as `fsdp train` treats them.
Sharded shard_workload(const Workload& work, const World& world, ShardOptions how,
                       const train::ActivationsConfig& activations = {});

// MiB that a plan expects the device's allocator to hand out at most, with the options that
// shard_workload is given, each step of eager orders; nothing where it cannot be planned, which is
// said.
std::optional<double> planned_mb(const Shape& shape, const World& world, const ShardOptions& how,
                                 const train::ActivationsConfig& activations, double clip);

MixedPrecision mixed_precision(const Shape& shape);  // gradients are reduced and kept in float32

// Of named rows: where nothing is reduced or accumulated on a GPU, gradients stay as the matrix
// products give them; else they are summed and kept in float32, as FSDP2's are. `grad_dtype`
// (fp32 or bf16) decides instead if it is not empty.
MixedPrecision row_precision(const Shape& shape, const World& world, const std::string& grad_dtype);

struct Step {
  std::function<at::Tensor()> forward;  // returns the loss
  std::function<void()> clip;
  std::function<void()> update;  // and away with the gradients
};

// Seconds are medians over the steps, on the host's clock. On a GPU only `step` has the device's
// work in it; the parts are how long the host took to give it its orders.
struct Timing {
  double step = 0, forward = 0, backward = 0, clip = 0, update = 0;
  std::vector<double> losses;  // of all steps, warm-up too; the mean of all ranks
};

Timing time_steps(const Step& step, int warmup, int steps, const World& world);

// Of one number each, whose data differ.
std::vector<double> means_over_ranks(const std::vector<double>& values, const World& world);
Json line_of(const Timing& timing);            // what a rank prints of it
Json losses_of(std::vector<double> of_steps);  // the part of it that tells how training went

double median(std::vector<double> values);

}  // namespace fsdp::cli
