#include "train/config_ready.h"

#include <map>
#include <sstream>
#include <tuple>

#include "base/format.h"
#include "base/table.h"
#include "train/config_resolve.h"
#include "train/model_shape.h"

namespace fsdp::train {
namespace {

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
  return std::visit([](const auto& shape) { return models::parameter_count(shape); },
                    model_shape(config, vocab));
}

std::string list_ready_configs() {
  // Configs for training before those for benchmarks, by family, small before large.
  std::map<std::tuple<bool, std::string, int64_t, std::string>, const ReadyConfig*> rows;
  for (const ReadyConfig& ready : ready_configs()) {
    Config config;
    std::string name(ready.name);
    apply_toml(config, ready.text, name);
    const bool has_model = ready.text.find("\n[model]") != std::string_view::npos;
    const int64_t count = has_model ? parameter_count(config).value_or(0) : 0;
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
