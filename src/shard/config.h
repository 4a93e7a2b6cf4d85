// [shard] of a run's config.
#pragma once

#include <cstdint>

#include "base/options.h"

namespace fsdp {
enum class ShardingStrategy;  // in fsdp/sharding.h, which needs LibTorch
constexpr auto enum_table(ShardingStrategy) {
  return std::to_array<EnumName>(
      {{"full_shard"}, {"shard_grad_op"}, {"no_shard"}, {"hybrid_shard"}});
}
}  // namespace fsdp

namespace fsdp::shard {

enum class WrapBy { kBlock, kSize, kRoot };
constexpr auto enum_table(WrapBy) {
  return std::to_array<EnumName>({{"block"}, {"size"}, {"root"}});
}

enum class Precision { kAuto, kFp32, kBf16, kFp16, kFp8 };
constexpr auto enum_table(Precision) {
  return std::to_array<EnumName>({{"auto", "bf16 on a GPU, else fp32"},
                                  {"fp32"},
                                  {"bf16"},
                                  {"fp16"},
                                  {"fp8", "bf16, and matrix products of linears in fp8"}});
}

// How gradients are reduced.
enum class Reduce { kFp32, kBf16, kFp16, kFp8, kInt8 };
constexpr auto enum_table(Reduce) {
  return std::to_array<EnumName>({{"fp32"},
                                  {"bf16", "sent in bf16, summed in fp32"},
                                  {"fp16"},
                                  {"fp8", "sent in one byte, summed in fp32"},
                                  {"int8", "sent in one byte, summed in fp32"}});
}

// How parameters are gathered.
enum class Gather { kPlain, kFp8, kInt8 };
constexpr auto enum_table(Gather) {
  return std::to_array<EnumName>({{"plain", "in shard.precision"},
                                  {"fp8", "matrices in one byte"},
                                  {"int8", "matrices in one byte"}});
}

enum class Reshard { kAuto, kTrue, kFalse };
constexpr auto enum_table(Reshard) {
  return std::to_array<EnumName>({{"auto", "decided by the strategy"}, {"true"}, {"false"}});
}

struct ShardConfig {
  ShardingStrategy strategy{};  // FULL_SHARD
  WrapBy wrap = WrapBy::kBlock;
  int64_t wrap_min_params = 1'000'000;  // for wrap = size
  int64_t shard_ranks = 0;  // hybrid_shard: ranks that share one copy; 0: the ranks of one host
  Precision precision = Precision::kAuto;  // of parameters in operators
  Reduce reduce = Reduce::kFp32;
  Gather gather = Gather::kPlain;
  Precision gradients = Precision::kFp32;  // between backward and the optimizer
  OrNumber<Reshard> reshard_after_forward;
  int64_t forward_prefetch = 1;
  int64_t backward_prefetch = 1;
  bool limit_all_gathers = true;
  bool share_host_memory = true;
};

void describe(ShardConfig& shard, OptionList& list);
void check(const ShardConfig& shard, int world);
void check_precision(const ShardConfig& shard);  // part of check()

}  // namespace fsdp::shard
