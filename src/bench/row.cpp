#include "bench/row.h"

#include <iterator>
#include <sstream>

#include "base/format.h"
#include "train/model_shape.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

train::Trainee shapes_of(const Row& row) {
  return train::make_unfilled_trainee(config_of(row), row.vocab);
}

}  // namespace

train::Config config_of(const Row& row) {
  const bool mlp = row.model == "mlp", short_gradients = row.grad_dtype == "bf16";
  train::Config config;
  config.model.type = mlp ? "mlp" : row.qkv_bias ? "qwen2" : "llama";
  config.model.vocab = row.vocab;
  config.model.dim = row.dim;
  config.model.layers = mlp ? 8 : row.layers;
  config.model.heads = row.heads;
  config.model.kv_heads = row.kv_heads;
  config.model.ffn = row.ffn;
  config.model.tied = row.tied;
  config.model.width = row.width;
  config.data.seq = row.seq;
  config.train.batch = row.batch * row.accumulate * row.on.ranks;
  config.train.micro_batch = row.batch;
  config.shard.strategy = row.strategy;
  config.shard.shard_ranks = row.copies > 0 ? row.on.ranks / row.copies : 0;
  config.shard.precision = row.dtype;
  config.shard.reduce = config.shard.gradients = short_gradients ? "bf16" : "fp32";
  if (row.reshard > 0) config.shard.reshard_after_forward = std::to_string(row.reshard);
  config.shard.forward_prefetch = config.shard.backward_prefetch = row.prefetch;
  config.activations = {.mode = row.activations, .keep_last = row.keep_last};
  config.offload.parameters = row.mode == "everything";
  config.offload.optimizer = row.mode == "everything" || row.mode == "optimizer";
  if (config.offload.optimizer) config.offload.fraction = row.fraction;
  return config;
}

std::string title_of(const Row& row) {
  const double millions = static_cast<double>(shapes_of(row).parameters) / 1e6;
  return formatted("{} {:.{}f}M", row.model == "mlp" ? "MLP" : "Llama", millions,
                   millions < 100 ? 1 : 0);
}

std::string description(const Row& row) {
  std::string sizes = formatted("8 linears of width {}", row.width);
  if (row.model != "mlp") {
    const auto shape = models::checked(
        std::get<models::LlamaConfig>(train::model_shape(config_of(row), row.vocab)));
    sizes = formatted(
        "{} layers, dim {}, {} heads ({} of keys and values), ffn {}, vocabulary {}{}, {} tokens",
        shape.layers, shape.dim, shape.heads, shape.kv_heads, shape.ffn, shape.vocab,
        shape.tied ? " (tied)" : "", row.seq);
  }
  return formatted("{}: {}, batch {} per rank{}, {}", title_of(row), sizes, row.batch,
                   row.accumulate > 1 ? formatted(", {} of them per step", row.accumulate) : "",
                   row.dtype);
}

int64_t tokens_of(const Row& row) {
  return row.batch * row.accumulate * (row.model == "mlp" ? 1 : row.seq);
}

double flops_of(const Row& row) {
  return shapes_of(row).flops_per_sample * static_cast<double>(row.batch * row.accumulate);
}

std::vector<std::string> peer_flags(const Row& row) {
  std::ostringstream flags;
  flags << "--device " << row.on.device << " --steps " << row.steps << " --warmup " << row.warmup
        << " --clip " << row.clip << (offload_mode(row) ? " --offload" : "") << " --batch "
        << row.batch << " --dtype " << row.dtype;
  if (row.model == "mlp")
    flags << " --mlp " << row.width;
  else
    flags << " --layers " << row.layers << " --dim " << row.dim << " --heads " << row.heads
          << " --kv-heads " << row.kv_heads << " --ffn " << row.ffn << " --vocab " << row.vocab
          << " --seq " << row.seq << (row.tied ? " --tied" : "")
          << (row.qkv_bias ? " --qkv-bias" : "");
  if (row.accumulate > 1) flags << " --accumulate " << row.accumulate;
  if (train::parse_strategy(row.strategy) == ShardingStrategy::SHARD_GRAD_OP)
    flags << " --reshard 0";
  flags << " --init " << row.init;
  std::istringstream words(flags.str());
  return {std::istream_iterator<std::string>(words), {}};
}

std::vector<std::string> peer_recomputes(const Row& row) {
  if (row.activations == "none") return {};
  return {row.activations == "selective" ? "--ac=selective" : "--ac"};
}

std::string counted(int64_t number, const std::string& noun) {
  return formatted("{} {}{}", number, noun, number == 1 ? "" : "s");
}

}  // namespace fsdp::bench
