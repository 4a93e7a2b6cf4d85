/// @file
/// LoRA: trains two small matrices, A and B, beside each frozen linear.
///
///     nn::add_lora(*model, {.rank = 8, .alpha = 16, .where = nn::named_linears({"q_proj"})});
///     auto sharded = fully_shard(model, {.mixed_precision = {.frozen_masters = false}, …});
///     checkpoint::save(dir, sharded, &optimizer, {.only = nn::is_adapter});
///
/// A linear then computes W x + scale · B A dropout(x), where scale is alpha / rank. B starts at
/// zero, so the first step sees the base alone. Frozen parameters are sharded and gathered like
/// others, but have no gradients and no optimizer states.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/init_parameters.h"
#include "fsdp/nn/modules.h"

namespace fsdp::nn {

/// Options of add_lora().
struct LoRAOptions {
  int64_t rank = 16;    ///< Rows of A and columns of B.
  double alpha = 16;    ///< The scale is alpha / rank.
  double dropout = 0;   ///< On the input of A, in training.
  bool rslora = false;  ///< The scale is alpha / sqrt(rank).

  /// Which linears get an adapter, by their name in the module. Empty: all.
  std::function<bool(const std::string& name)> where = {};
};

/// What B · A is multiplied by.
double scale_of(const LoRAOptions& options);

/// A choice of linears by the end of their names: "q_proj" or "self_attn.q_proj".
std::function<bool(const std::string& name)> named_linears(const std::vector<std::string>& ends);

/// Adds adapters to the fsdp::nn::Linear layers of a module and to a GPT-2's products, and freezes
/// everything else in it.
///
/// Adapters are the parameters NAME.lora_A.weight [rank, in] and NAME.lora_B.weight [out, rank].
/// Returns the names of the linears that have one. Call it before fully_shard(), on every rank. An
/// Error if `where` chooses nothing, or one of torch's linears, whose forward can't be changed.
std::vector<std::string> add_lora(torch::nn::Module& module, const LoRAOptions& options);

/// While it lives, the linears below a module are computed without their adapters: the base alone.
class WithoutAdapters {
 public:
  /// Of this module.
  explicit WithoutAdapters(torch::nn::Module& module);
  ~WithoutAdapters();
  WithoutAdapters(const WithoutAdapters&) = delete;
  WithoutAdapters& operator=(const WithoutAdapters&) = delete;

 private:
  std::vector<std::shared_ptr<Adaptable>> linears_;
};

/// Whether a parameter of that name belongs to an adapter.
bool is_adapter(const std::string& name);
/// How a parameter of an adapter starts, for init_parameters(). Zero for other parameters.
Distribution adapter_start(const std::string& name, at::IntArrayRef sizes);

/// `out` plus what the adapters of `linears` make of `x`, for linears whose results are side by
/// side in `out` [.., sum of widths] (nn::linears(), norm_linears()).
at::Tensor add_adapters(const at::Tensor& out, const at::Tensor& x,
                        const std::vector<Linear>& linears);

}  // namespace fsdp::nn
