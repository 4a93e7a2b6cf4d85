#include "bench/row.h"

#include <algorithm>
#include <map>
#include <sstream>

#include "base/regular_file.h"
#include "bench/harness.h"
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

std::vector<Row> rows_of(const std::string& list) {
  using nlohmann::json;
  const std::string path = bench_file("rows.json");
  const json fields = Row();
  std::vector<Row> rows;
  std::map<std::string, json> known;
  try {
    const json lists = json::parse(read_if_there(path));
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
  using enum models::ModelType;
  const bool mlp = row.model == "mlp";
  train::Config config;
  config.model = {.type = mlp            ? kMlp
                          : row.qkv_bias ? kQwen2
                                         : kLlama,
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
  if (row.dtype == "fp8") config.fp8.recipe = setting<nn::Fp8Recipe>("recipe", row.recipe);
  const bool halves = row.grad_dtype == "bf16";
  config.shard.gradients = halves ? shard::Precision::kBf16 : shard::Precision::kFp32;
  config.shard.reduce = halves ? shard::Reduce::kBf16 : shard::Reduce::kFp32;
  if (!row.gather.empty()) config.shard.gather = setting<shard::Gather>("gather", row.gather);
  if (!row.reduce.empty()) config.shard.reduce = setting<shard::Reduce>("reduce", row.reduce);
  config.shard.share_host_memory = row.share;
  config.shard.reshard_after_forward.number = row.reshard;
  config.shard.forward_prefetch = config.shard.backward_prefetch = row.prefetch;
  config.optim.type = setting<optim::OptimizerType>("optim", row.optim);
  config.optim.lr = 1e-4;
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
                row.batch, row.dtype == "fp8" ? "bf16" : row.dtype, row.init);
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
                   row.dtype == "fp8" ? "fp8 " + row.recipe : row.dtype);
}

Strings notes_of(const Row& row, const std::string& memory) {
  return {formatted("{}; {} ranks x {} threads, {}", description(row), row.on.ranks, row.on.threads,
                    row.on.backend),
          formatted("Memory: {} Time: rank 0's median of {} steps after {} for warm-up.", memory,
                    row.steps, row.warmup)};
}

double Row::flops() const {
  return shapes_of(*this).flops_per_sample * static_cast<double>(batch * accumulate);
}

void add_row_flags(Flags& flags, Options& options) {
  Row& row = options.row;
  options.command = &flags.command;
  flags.place(row.on);
  flags.number("--threads", row.on.threads, "Threads per rank");
  flags.number("--steps", row.steps, "Timed steps");
  flags.number("--warmup", row.warmup, "Warm-up steps");
  flags.group(kModel);
  flags.choice("--model", row.model, {"llama", "mlp"},
               "llama, or mlp: 8 linears with ReLU between them");
  flags.number("--layers", row.layers, "llama: blocks");
  flags.number("--dim", row.dim, "llama: width of the residual stream");
  flags.number("--heads", row.heads, "llama: query heads");
  flags.number("--kv-heads", row.kv_heads, "llama: key and value heads; 0: the same as --heads", 0);
  flags.number("--ffn", row.ffn, "llama: width of the feed-forward; 0: 8/3 of --dim", 0);
  flags.number("--vocab", row.vocab, "llama: vocabulary size");
  flags.number("--seq", row.seq, "llama: tokens per sequence");
  flags.number("--width", row.width, "mlp: width of each linear");
  flags.number("--batch", row.batch, "Sequences (llama) or rows (mlp) per micro-batch and rank");
  flags.number("--accumulate", row.accumulate, "Micro-batches per step");
  flags.flag("--tied", row.tied, "llama: share the weights of head and embedding");
  flags.flag("--qkv-bias", row.qkv_bias, "llama: add biases to queries, keys and values");
  flags.choice("--dtype", row.dtype, {"fp32", "bf16", "fp8"},
               "Dtype of parameters in forward and backward: fp32, bf16, or fp8: bf16 with linears "
               "that compute in fp8");
  flags.choice("--recipe", row.recipe, {"tensorwise", "rowwise", "rowwise_bf16_grad"},
               "How fp8 scales numbers: tensorwise, rowwise or rowwise_bf16_grad");
  flags.group("Options");
}

void add_named_flags(Flags& flags, Options& options, const char* peer) {
  flags.number("--clip", options.row.clip, "Clip gradients to this norm; 0: don't clip", 0, 1e30,
               "FLOAT");
  flags.choice("--init", options.row.init, {"cpu", "device"},
               "Where to draw the initial weights: cpu, or device, which is faster; default: cpu, "
               "or the row's own");
  flags.command.get_option("--init")->default_str("");
  flags.group(kNamedRows);
  flags.flag("--peer", options.peer, peer);
  flags.any("--write", options.page,
            "Write a page with commands, versions and raw lines; default: in bench/results",
            "[FILE]");
  flags.command.get_option("--write")->expected(0, 1);
  flags.any("--keep", options.keep,
            "Append raw lines to this file, and don't repeat what it already has", "FILE");
  flags.number("--limit", options.limit, "Time limit of one measurement, in seconds");
}

const CLI::Option* given_in(const Options& options, const std::string& group) {
  for (const CLI::Option* option : options.command->get_options())
    if (option->get_group() == group && option->count() > 0) return option;
  return nullptr;
}

bool given(const Options& options, const std::string& flag) {
  const CLI::Option* option = options.command->get_option_no_throw(flag);
  return option && option->count() > 0 && option->get_group() != kModel;
}

void require_rows(const Options& options) {
  const CLI::Option* option = given_in(options, kNamedRows);
  if (option && options.rows.empty())
    throw Error(formatted("{} is only for named rows.", option->get_name()),
                "add --rows; --help lists them.");
}

Row with_flags(const Row& row, const Options& options) {
  nlohmann::json settings = row;
  const nlohmann::json flags = options.row;
  for (const auto& [key, value] : flags.items()) {
    std::string flag = "--" + key;
    std::ranges::replace(flag, '_', '-');
    if (given(options, flag)) settings[key] = value;
  }
  if (given(options, "--activations")) settings["keep_last"] = options.row.keep_last;
  Row changed = settings.get<Row>();
  changed.on = options.row.on;
  if (options.rows.empty()) return changed;
  if (!given(options, "--ranks")) changed.on.ranks = row.on.ranks;
  // Gradients stay as the matrix products give them if nothing is reduced or accumulated.
  const bool alone = changed.on.ranks == 1 && row.accumulate == 1 && changed.on.device != "cpu";
  if (changed.grad_dtype.empty())
    changed.grad_dtype = alone && row.dtype != "fp32" ? "bf16" : "fp32";
  changed.plan = true;
  return changed;
}

}  // namespace fsdp::bench
