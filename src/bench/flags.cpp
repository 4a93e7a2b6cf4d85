#include "bench/flags.h"

#include <algorithm>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::bench {
namespace {

constexpr const char* kNamedRows = "Named rows";
constexpr const char* kModel = "The model";

}  // namespace

void add_json(CLI::App& command, bool& json) {
  command.add_flag("--json", json, "One JSON object per line");
}

void add_place_flags(CLI::App& command, Place& on, bool threads) {
  add_choice(command, "--device", on.device, {"cpu", "cuda"}, "cpu or cuda")->capture_default_str();
  command.add_option("--backend", on.backend,
                     "shm, mpi or nccl; default: shm on the CPU, nccl on a GPU");
  add_count(command, "--ranks", on.ranks, "Ranks on this host");
  if (threads) add_count(command, "--threads", on.threads, "Threads per rank");
}

void add_row_flags(CLI::App& command, Options& options) {
  Row& row = options.given;
  options.command = &command;
  add_place_flags(command, row.on);
  add_count(command, "--steps", row.steps, "Timed steps");
  add_count(command, "--warmup", row.warmup, "Warm-up steps");
  add_json(command, options.json);
  const auto size = [&](const char* name, int64_t& value, const char* help, int64_t least = 1) {
    add_count(command, name, value, help, least, int64_t{1} << 40);
  };
  command.option_defaults()->group(kModel);
  add_choice(command, "--model", row.model, {"llama", "mlp"},
             "llama, or mlp: 8 linears with ReLU between them")
      ->capture_default_str();
  size("--layers", row.layers, "llama: blocks");
  size("--dim", row.dim, "llama: width of the residual stream");
  size("--heads", row.heads, "llama: query heads");
  size("--kv-heads", row.kv_heads, "llama: key and value heads; 0: the same as --heads", 0);
  size("--ffn", row.ffn, "llama: width of the feed-forward; 0: 8/3 of --dim", 0);
  size("--vocab", row.vocab, "llama: vocabulary size");
  size("--seq", row.seq, "llama: tokens per sequence");
  size("--width", row.width, "mlp: width of each linear");
  size("--batch", row.batch, "Sequences (llama) or rows (mlp) per micro-batch and rank");
  size("--accumulate", row.accumulate, "Micro-batches per step");
  command.add_flag("--tied", row.tied, "llama: share the weights of head and embedding");
  command.add_flag("--qkv-bias", row.qkv_bias, "llama: add biases to queries, keys and values");
  add_choice(command, "--dtype", row.dtype, {"fp32", "bf16"},
             "Dtype of parameters in forward and backward: fp32 or bf16")
      ->capture_default_str();
  command.option_defaults()->group("Options");
}

void add_named_flags(CLI::App& command, Options& options, const char* peer,
                     const std::function<void()>& named) {
  command.add_option("--clip", options.given.clip, "Clip gradients to this norm; 0: don't clip")
      ->check(CLI::Range(0.0, 1e30).description(""))
      ->capture_default_str();
  add_choice(command, "--init", options.given.init, {"cpu", "device"},
             "Where to draw the initial weights: cpu, or device, which is faster; default: cpu, or "
             "the row's own");
  command.option_defaults()->group(kNamedRows);
  command.add_flag("--peer", options.peer, peer);
  named();
  command
      .add_option("--write", options.page,
                  "Write a page with commands, versions and raw lines; default: in bench/results")
      ->expected(0, 1)
      ->type_name("[FILE]");
  command
      .add_option("--keep", options.keep,
                  "Append raw lines to this file, and don't repeat what it already has")
      ->type_name("FILE");
  add_count(command, "--limit", options.limit, "Time limit of one measurement, in seconds");
  command.option_defaults()->group("Options");
}

bool given(const Options& options, const std::string& flag) {
  const CLI::Option* option = options.command->get_option_no_throw(flag);
  return option && option->count() > 0 && option->get_group() != kModel;
}

bool model_given(const Options& options) {
  const auto is_given = [](const CLI::Option* option) {
    return option->get_group() == kModel && option->count() > 0;
  };
  return !options.command->get_options(is_given).empty();
}

void require_rows(const Options& options) {
  for (const CLI::Option* option : options.command->get_options())
    if (option->get_group() == kNamedRows && option->count() > 0 && options.rows.empty())
      throw Error(formatted("{} is only for named rows.", option->get_name()),
                  "add --rows; --help lists them.");
}

Row with_flags(Row row, const Options& options) {
  nlohmann::json settings = row;
  const nlohmann::json flags = options.given;
  for (const auto& [key, value] : flags.items()) {
    std::string flag = "--" + key;
    std::replace(flag.begin(), flag.end(), '_', '-');
    if (given(options, flag)) settings[key] = value;
  }
  if (given(options, "--activations")) settings["keep_last"] = options.given.keep_last;
  from_json(settings, row);
  return row;
}

std::vector<Row> chosen_rows(const Options& options, const std::vector<Row>& rows) {
  std::vector<Row> chosen;
  for (const Row& named : rows_named(options.rows, rows)) {
    Row row = with_flags(named, options);
    row.on = options.given.on;
    if (!given(options, "--ranks")) row.on.ranks = named.on.ranks;
    // Gradients stay as the matrix products give them if nothing is reduced or accumulated.
    const bool alone = row.on.ranks == 1 && row.accumulate == 1 && row.on.device != "cpu";
    if (row.grad_dtype.empty()) row.grad_dtype = alone && row.dtype == "bf16" ? "bf16" : "fp32";
    row.plan = true;
    chosen.push_back(row);
  }
  return chosen;
}

}  // namespace fsdp::bench
