#include "shard/config.h"

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/sharding.h"

namespace fsdp::shard {

void describe(ShardConfig& shard, OptionList& list) {
  list.section("shard", "Sharding and precision");
  list.add("strategy", shard.strategy, "Sharding strategy");
  list.add(
      "wrap", shard.wrap,
      "What a unit is: one block, modules of at least wrap_min_params, or the whole model (root)");
  list.add("wrap_min_params", shard.wrap_min_params,
           "wrap = size: minimum number of parameters per unit",
           {.least = 1, .only_with = {shard.wrap, {WrapBy::kSize}}});
  list.add("shard_ranks", shard.shard_ranks,
           "hybrid_shard: ranks that share one copy of the model; 0: the ranks of one host",
           {.least = 0, .only_with = {shard.strategy, {ShardingStrategy::HYBRID_SHARD}}});
  list.add("precision", shard.precision, "Data type of parameters and activations in operators");
  list.add("reduce", shard.reduce, "Data type of gradients in reductions");
  list.add("gather", shard.gather,
           "How parameters are gathered; fp8 and int8 halve the bytes of bf16 and round weights");
  list.add("gradients", shard.gradients,
           "Data type of gradients between backward and the optimizer; bf16 halves their memory",
           {.without_first = 1, .without_last = 2});
  list.add("reshard_after_forward", shard.reshard_after_forward,
           "Reshard parameters after forward (true), keep them for backward (false), or reshard to "
           "this many ranks");
  list.add("forward_prefetch", shard.forward_prefetch, "Units to gather ahead in forward",
           {.least = 0, .most = 64});
  list.add("backward_prefetch", shard.backward_prefetch, "Units to gather ahead in backward",
           {.least = 0, .most = 64});
  list.add("limit_all_gathers", shard.limit_all_gathers,
           "Delay gathers until the memory of earlier ones is free");
  list.add("share_host_memory", shard.share_host_memory,
           "Keep gathered parameters once per host, in shared memory (shm only)");
}

void check(const ShardConfig& shard, int world) {
  if (shard.shard_ranks > 0 && world % shard.shard_ranks != 0)
    throw Error(formatted("{} ranks can't be divided into groups of shard.shard_ranks = {}.", world,
                          shard.shard_ranks),
                "choose a divisor of the number of ranks.");
  const auto& reshard = shard.reshard_after_forward;
  const std::string given = "shard.reshard_after_forward = " + enum_name(reshard);
  if (shard.strategy == ShardingStrategy::NO_SHARD && reshard != Reshard::kAuto)
    throw Error(given + " has no effect: no_shard never reshards parameters.",
                "leave it at \"auto\", or choose another shard.strategy.");
  if (shard.strategy == ShardingStrategy::SHARD_GRAD_OP && reshard != Reshard::kAuto &&
      reshard != Reshard::kFalse)
    throw Error(given + " contradicts shard_grad_op, which keeps parameters until backward.",
                "leave it at \"auto\", or set shard.strategy to full_shard.");
  const int64_t ranks = shard.shard_ranks > 0 ? shard.shard_ranks : world;
  if (reshard.number > 0 && ranks % reshard.number != 0)
    throw Error(formatted("{} doesn't divide the {} ranks that share the model.", given, ranks),
                "choose a divisor, true or false.");
  check_precision(shard);
  const bool none = shard.strategy == ShardingStrategy::NO_SHARD;
  if (none && shard.gather != Gather::kPlain)
    throw Error(formatted("shard.gather = {} has no effect: no_shard gathers no parameters.",
                          enum_name(shard.gather)),
                "set it to plain, or choose another shard.strategy.");
  if (none && (shard.reduce == Reduce::kFp8 || shard.reduce == Reduce::kInt8))
    throw Error(
        formatted("shard.reduce = {} doesn't work with no_shard, whose gradients are summed "
                  "by an all-reduce.",
                  enum_name(shard.reduce)),
        "set shard.reduce to fp32 or bf16, or choose another shard.strategy.");
}

void check_precision(const ShardConfig& shard) {
  const std::string computed = enum_name(shard.precision), reduced = enum_name(shard.reduce);
  const bool fp32 = shard.precision == Precision::kFp32;
  if (fp32 && (shard.reduce == Reduce::kBf16 || shard.reduce == Reduce::kFp16))
    throw Error(formatted("shard.reduce = {} would round gradients, which are computed in fp32 "
                          "(shard.precision).",
                          reduced),
                formatted("set shard.precision to {}, or shard.reduce to fp32.", reduced));
  if (shard.gradients == Precision::kBf16 && (fp32 || shard.precision == Precision::kFp16))
    throw Error(formatted("shard.gradients = bf16 would round gradients, which are computed in {} "
                          "(shard.precision).",
                          computed),
                "set shard.precision to bf16, or shard.gradients to fp32.");
}

}  // namespace fsdp::shard
