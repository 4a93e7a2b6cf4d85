#include "bench/row.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "base/format.h"
#include "base/subprocess.h"
#include "fsdp/error.h"
#include "train/model_shape.h"
#include "train/task.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

train::TrainTask shapes_of(const Row& row) {
  return train::make_unfilled_task(config_of(row), row.vocab);
}

template <typename Enum>
Enum setting(const char* key, const std::string& name) {
  if (const auto value = parse_enum<Enum>(name)) return *value;
  throw Error(formatted("a row has the {} \"{}\".", key, name),
              "fsdp train has the same settings; see docs/config.md.");
}

}  // namespace

std::string bench_file(const std::string& name) {
  namespace fs = std::filesystem;
  const fs::path source = fs::path(FSDP_BENCH_DIR) / name;
  const fs::path installed = fs::path(own_binary()).parent_path() / "../share/fsdp" / name;
  return (fs::exists(source) ? source : installed).string();
}

std::vector<Row> rows_of(const std::string& list) {
  using nlohmann::json;
  const std::string path = bench_file("rows.json");
  const json fields = Row();
  std::vector<Row> rows;
  std::map<std::string, json> known;
  try {
    const json lists = json::parse(std::ifstream(path));
    for (const json& entry : lists.at(list)) {
      json settings = entry.contains("like") ? known.at(entry["like"]) : json::object();
      settings.update(entry);
      for (const auto& [key, value] : entry.items())
        if (key != "like" && !fields.contains(key))
          throw std::out_of_range("there is no setting " + key);
      known[settings.value("name", "")] = settings;
      rows.push_back(settings.get<Row>());
    }
  } catch (const std::exception& problem) {
    throw Error(formatted("{}: can't read the rows of \"{}\": {}.", path, list, problem.what()),
                "settings are the fields of Row in src/bench/row.h.");
  }
  return rows;
}

std::vector<Row> rows_named(const std::string& names, const std::string& list) {
  std::vector<Row> chosen;
  std::string known;
  const std::vector<Row> rows = rows_of(list);
  for (const Row& row : rows) {
    if (!known.ends_with(", " + row.name)) known += ", " + row.name;
    if (names == "all" && row.in_all) chosen.push_back(row);
  }
  std::istringstream parts(names == "all" ? "" : names);
  for (std::string name; std::getline(parts, name, ',');) {
    const size_t before = chosen.size();
    for (const Row& row : rows)
      if (row.name == name) chosen.push_back(row);
    if (chosen.size() == before)
      throw Error(formatted("there is no row \"{}\".", name),
                  formatted("--rows takes all, or some of these, separated by commas: {}.",
                            known.substr(2)));
  }
  return chosen;
}

train::Config config_of(const Row& row) {
  const bool mlp = row.model == "mlp";
  train::Config config;
  config.model = {.type = mlp            ? models::ModelType::kMlp
                          : row.qkv_bias ? models::ModelType::kQwen2
                                         : models::ModelType::kLlama,
                  .vocab = row.vocab,
                  .dim = row.dim,
                  .layers = mlp ? 8 : row.layers,
                  .heads = row.heads,
                  .kv_heads = row.kv_heads,
                  .ffn = row.ffn,
                  .tied = row.tied,
                  .width = row.width};
  config.data.seq = row.seq;
  config.train.batch = row.batch * row.accumulate * row.on.ranks;
  config.train.micro_batch = row.batch;
  config.shard.strategy = train::parse_strategy(row.strategy);
  config.shard.shard_ranks = row.copies > 0 ? row.on.ranks / row.copies : 0;
  config.shard.precision = setting<shard::Precision>("dtype", row.dtype);
  config.shard.reduce = config.shard.gradients =
      row.grad_dtype == "bf16" ? shard::Precision::kBf16 : shard::Precision::kFp32;
  config.shard.reshard_after_forward.number = row.reshard;
  config.shard.forward_prefetch = config.shard.backward_prefetch = row.prefetch;
  config.activations = {.mode = setting<memory::ActivationsMode>("activations", row.activations),
                        .keep_last = row.keep_last};
  config.offload.parameters = row.mode == "everything";
  config.offload.optimizer = row.mode == "everything" || row.mode == "optimizer";
  if (config.offload.optimizer) config.offload.fraction = row.fraction;
  return config;
}

nlohmann::json for_rank(const Row& row) {
  nlohmann::json settings = row;
  for (const char* key :
       {"name", "title", "modes", "goal_ms", "goal_gb", "goal_times", "published_rate", "in_all"})
    settings.erase(key);
  return settings;
}

std::string peer_flags(const Row& row) {
  std::string flags =
      formatted("--device {} --steps {} --warmup {} --clip {}{} --batch {} --dtype {} --init {}",
                row.on.device, row.steps, row.warmup, row.clip, row.offloads() ? " --offload" : "",
                row.batch, row.dtype, row.init);
  if (row.model == "mlp")
    flags += formatted(" --mlp {}", row.width);
  else
    flags +=
        formatted(" --layers {} --dim {} --heads {} --kv-heads {} --ffn {} --vocab {} --seq {}{}{}",
                  row.layers, row.dim, row.heads, row.kv_heads, row.ffn, row.vocab, row.seq,
                  row.tied ? " --tied" : "", row.qkv_bias ? " --qkv-bias" : "");
  if (row.accumulate > 1) flags += formatted(" --accumulate {}", row.accumulate);
  const bool keeps = train::parse_strategy(row.strategy) == ShardingStrategy::SHARD_GRAD_OP;
  return flags + (keeps ? " --reshard 0" : "");
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

std::string place_note(const Row& row) {
  return formatted("{}; {} ranks x {} threads, {}", description(row), row.on.ranks, row.on.threads,
                   row.on.backend);
}

std::string time_note(const Row& row) {
  return formatted("Time: rank 0's median of {} steps after {} for warm-up.", row.steps,
                   row.warmup);
}

double Row::flops() const {
  return shapes_of(*this).flops_per_sample * static_cast<double>(batch * accumulate);
}

}  // namespace fsdp::bench
