#include "train/config_ready.h"

#include <map>
#include <sstream>
#include <tuple>

#include "base/format.h"
#include "base/table.h"
#include "train/config_resolve.h"

namespace fsdp::train {
namespace {

// Also for Qwen2.5, whose queries, keys and values have biases.
int64_t llama_parameters(const models::ModelConfig& model, int64_t vocab) {
  int64_t dim = model.dim, head = model.head_dim > 0 ? model.head_dim : dim / model.heads;
  int64_t q = model.heads * head;
  int64_t kv = (model.kv_heads > 0 ? model.kv_heads : model.heads) * head;
  int64_t ffn = model.ffn > 0 ? model.ffn : (8 * dim / 3 + 255) / 256 * 256;
  int64_t biases = model.type == models::ModelType::kQwen2 ? q + 2 * kv : 0;
  int64_t block = 2 * dim * q + 2 * dim * kv + 3 * dim * ffn + 2 * dim + biases;
  return vocab * dim * (model.tied ? 1 : 2) + model.layers * block + dim;
}

int64_t gpt2_parameters(const models::ModelConfig& model, int64_t vocab, int64_t positions) {
  int64_t dim = model.dim, ffn = model.ffn > 0 ? model.ffn : 4 * dim;
  int64_t attention = 4 * dim * dim + 4 * dim;
  int64_t feed_forward = 2 * dim * ffn + ffn + dim;
  return (vocab + positions) * dim + model.layers * (attention + feed_forward + 4 * dim) + 2 * dim;
}

std::string millions(int64_t count) {
  double number = static_cast<double>(count);
  return number >= 1e9 ? formatted("{:.2f}B", number / 1e9) : formatted("{:.1f}M", number / 1e6);
}

}  // namespace

const ReadyConfig* ready_config(std::string_view name) {
  for (const ReadyConfig& config : ready_configs())
    if (config.name == name) return &config;
  return nullptr;
}

std::string title(const ReadyConfig& config) {
  std::string_view line = config.text.substr(0, config.text.find('\n'));
  if (!line.starts_with("# ")) return "";
  return std::string(line.substr(2));
}

std::optional<int64_t> parameter_count(const Config& config) {
  const models::ModelConfig& model = config.model;
  if (model.type == models::ModelType::kMlp) return model.layers * (model.width + 1) * model.width;
  int64_t vocab = model.vocab;
  if (vocab == 0 && config.data.tokenizer == "bytes") vocab = 257;
  if (vocab == 0 || (model.head_dim == 0 && model.dim % model.heads != 0)) return {};
  int64_t positions = model.max_tokens > 0 ? model.max_tokens : config.data.seq;
  return model.type == models::ModelType::kGpt2 ? gpt2_parameters(model, vocab, positions)
                                                : llama_parameters(model, vocab);
}

std::string list_ready_configs() {
  // Configs for training before those for benchmarks, by family, small before large.
  std::map<std::tuple<bool, std::string, int64_t, std::string>, const ReadyConfig*> rows;
  for (const ReadyConfig& ready : ready_configs()) {
    Config config;
    std::string name(ready.name);
    apply_toml(config, ready.text, name);
    int64_t count = parameter_count(config).value_or(0);
    rows[{name.starts_with("bench/"), name.substr(0, name.find('-')), count, name}] = &ready;
  }
  Table table({{"name", "config", Table::kLeft},
               {"parameters", "parameters"},
               {"title", "what it is", Table::kLeft}});
  for (const auto& [order, ready] : rows) {
    int64_t count = std::get<2>(order);
    table.add({text(std::string(ready->name)), text(count > 0 ? millions(count) : ""),
               text(title(*ready))});
  }
  std::ostringstream out;
  table.print(out, false);
  return out.str();
}

}  // namespace fsdp::train
