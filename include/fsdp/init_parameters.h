/// @file
/// Initial values drawn shard by shard: each rank draws its own part of every parameter, where it
/// lies.
///
///     auto model = fsdp::deferred_init([] { return Net(config); }, {.random = false});
///     auto sharded = fsdp::fully_shard(model, {.initialize = false});
///     fsdp::init_parameters(sharded, seed, [](const std::string& name, at::IntArrayRef sizes) {
///       if (sizes.size() > 1) return fsdp::Distribution::normal(0, 0.02);
///       return fsdp::Distribution::constant(name.ends_with("bias") ? 0 : 1);
///     });
///
/// An element's value follows from the seed, the parameter's name and the element's index alone. It
/// has the same bits on any number of ranks, however the model is sharded, and on CPUs and GPUs.
/// For large models this takes a fraction of the time of deferred_init(), which reproduces the bits
/// of torch's generator.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace fsdp {

class Sharded;

/// How the elements of a parameter are distributed at the start.
struct Distribution {
  /// The kinds.
  enum class Kind {
    kConstant,  ///< All are `a`.
    kUniform,   ///< Uniform in [a, b).
    kNormal,    ///< Normal with mean `a` and standard deviation `b`.
  };

  Kind kind = Kind::kConstant;  ///< What `a` and `b` mean.
  double a = 0;                 ///< The value, the lower bound or the mean.
  double b = 0;                 ///< The upper bound or the standard deviation.

  /// All elements equal.
  static Distribution constant(double value) { return {Kind::kConstant, value, 0}; }
  /// Uniform in [low, high).
  static Distribution uniform(double low, double high) { return {Kind::kUniform, low, high}; }
  /// Normal.
  static Distribution normal(double mean, double std) { return {Kind::kNormal, mean, std}; }
};

/// Says how a parameter starts, by its name in the module and its sizes.
using InitRule = std::function<Distribution(const std::string& name, at::IntArrayRef sizes)>;

/// Fills every parameter of a sharded model as `rule` says.
///
/// Moves no data between ranks, and needs no memory beyond one unit's shard. A tied parameter goes
/// by its first name. Indices count elements in memory order. Buffers keep their values, and so do
/// parameters that fully_shard() left out. Seed, rule and names must be the same on every rank.
/// Call it before training: optimizers keep their state. Collective.
void init_parameters(const Sharded& sharded, uint64_t seed, const InitRule& rule);

/// Fills one whole tensor with torch's generator, as a constructor would. Runs without autograd.
void init_tensor_(const at::Tensor& tensor, const Distribution& distribution);

}  // namespace fsdp
